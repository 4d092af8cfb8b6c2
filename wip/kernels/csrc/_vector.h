/* Vectors of doubles and floats as wide as the machine's (the vector extension of gcc and clang), with what C's operators lack. A
   comparison gives a mask: integers with all bits set where it holds, 0 elsewhere. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#include <immintrin.h>
#elif defined(__AVX2__)
#define BYTES 32
#include <immintrin.h>
#elif defined(__SSE2__)
#define BYTES 16
#include <emmintrin.h>
#else
#define BYTES 16
#endif

typedef double vd __attribute__((vector_size(BYTES)));
typedef int64_t vl __attribute__((vector_size(BYTES)));
typedef float vf __attribute__((vector_size(BYTES)));
typedef int32_t vi __attribute__((vector_size(BYTES)));
typedef uint64_t vul __attribute__((vector_size(BYTES))); /* for sums of bits: of signed numbers they may not overflow */
typedef uint32_t vui __attribute__((vector_size(BYTES)));
typedef float vfu __attribute__((vector_size(BYTES), aligned(4), may_alias));
#define W ((int)(BYTES / 4)) /* floats in a vector */
#define D ((int)(BYTES / 8)) /* doubles in a vector */
#define NV (LANES / D) /* vectors that hold one double of each of the LANES rows */
#define EACH for (int v = 0; v < NV; v++) /* of these vectors */
#define INLINE static inline __attribute__((always_inline))

/* The same number everywhere. */
INLINE vd splat(double x) { return x - (vd){0}; }
INLINE vf splatf(float x) { return x - (vf){0}; }
INLINE vi splati(int32_t x) { return x - (vi){0}; }

/* a where the mask is set; b, or 0, elsewhere. */
INLINE vd pick(vl mask, vd a, vd b) { return (vd)(((vl)a & mask) | ((vl)b & ~mask)); }
INLINE vf pickf(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vd only(vl mask, vd a) { return (vd)((vl)a & mask); }
INLINE vf onlyf(vi mask, vf a) { return (vf)((vi)a & mask); }

INLINE vd absolute(vd a) { return (vd)((vl)a & INT64_MAX); }
INLINE vf absolutef(vf a) { return (vf)((vi)a & INT32_MAX); }

/* For each instruction set: larger, smaller (of two; of NaN and b, it is b), by_sign (a where d is negative or -0, else b),
   square_root, reciprocal, largerf; reaches (a bit for each element of x that is not below the
   limit). And where C's
   operators are slower: count_if_above (adds 1 where a > x), sum_of, larger_int, smaller_int, zero_below (y, 0 where x is below
   the limit). */
#if defined(__AVX512F__)
INLINE vd larger(vd a, vd b) { return (vd)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE vd smaller(vd a, vd b) { return (vd)_mm512_min_pd((__m512d)a, (__m512d)b); }
INLINE vd by_sign(vd d, vd a, vd b) {
    return (vd)_mm512_mask_blend_pd(_mm512_movepi64_mask((__m512i)d), (__m512d)b, (__m512d)a);
}
INLINE vd square_root(vd a) { return (vd)_mm512_sqrt_pd((__m512d)a); }
INLINE vd reciprocal(vd a) { /* relative error 4e-9 */
    vd x = (vd)_mm512_rcp14_pd((__m512d)a);
    return x + x * (1 - a * x);
}
INLINE vf largerf(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE uint32_t reaches(vf x, vf limit) { return _mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_GE_OQ); }
INLINE vi count_if_above(vi count, vf a, vf x) {
    return (vi)_mm512_mask_add_epi32((__m512i)count, _mm512_cmp_ps_mask((__m512)a, (__m512)x, _CMP_GT_OQ), (__m512i)count,
                                     _mm512_set1_epi32(1));
}
INLINE int32_t sum_of(vi x) { return _mm512_reduce_add_epi32((__m512i)x); }
INLINE vi larger_int(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vi smaller_int(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE vf zero_below(vf x, vf limit, vf y) {
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_NLT_UQ), (__m512)y);
}
#elif defined(__AVX2__)
INLINE vd larger(vd a, vd b) { return (vd)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE vd smaller(vd a, vd b) { return (vd)_mm256_min_pd((__m256d)a, (__m256d)b); }
INLINE vd by_sign(vd d, vd a, vd b) { return (vd)_mm256_blendv_pd((__m256d)b, (__m256d)a, (__m256d)d); }
INLINE vd square_root(vd a) { return (vd)_mm256_sqrt_pd((__m256d)a); }
INLINE vf largerf(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE uint32_t reaches(vf x, vf limit) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)limit, _CMP_GE_OQ));
}
#elif defined(__SSE2__)
INLINE vd larger(vd a, vd b) { return (vd)_mm_max_pd((__m128d)a, (__m128d)b); }
INLINE vd smaller(vd a, vd b) { return (vd)_mm_min_pd((__m128d)a, (__m128d)b); }
INLINE vd square_root(vd a) { return (vd)_mm_sqrt_pd((__m128d)a); }
INLINE vf largerf(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE uint32_t reaches(vf x, vf limit) { return (uint32_t)_mm_movemask_ps(_mm_cmpge_ps((__m128)x, (__m128)limit)); }
#else
INLINE vd larger(vd a, vd b) { return pick(a > b, a, b); }
INLINE vd smaller(vd a, vd b) { return pick(a < b, a, b); }
INLINE vd square_root(vd a) {
    for (int i = 0; i < D; i++) a[i] = sqrt(a[i]);
    return a;
}
INLINE vf largerf(vf a, vf b) {
    return pickf(a > b, a, b);
}
INLINE uint32_t reaches(vf x, vf limit) {
    vi below = x < t;
    uint32_t mask = 0;
    for (int i = 0; i < W; i++) mask |= (uint32_t)(below[i] == 0) << i;
    return mask;
}
#endif
#if !defined(__AVX2__)
INLINE vd by_sign(vd d, vd a, vd b) { return pick((vl)d < 0, a, b); }
#endif
#if !defined(__AVX512F__)
INLINE vd reciprocal(vd a) { return 1 / a; }
INLINE vi larger_int(vi a, vi b) {
    vi mask = a > b;
    return (a & mask) | (b & ~mask);
}
INLINE vi smaller_int(vi a, vi b) {
    vi mask = a < b;
    return (a & mask) | (b & ~mask);
}
INLINE vi count_if_above(vi count, vf a, vf x) { return count - (vi)(a > x); }
INLINE int32_t sum_of(vi x) {
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += x[i];
    return sum;
}
INLINE vf zero_below(vf x, vf limit, vf y) { return (vf)((vi)y & ~(vi)(x < limit)); }
#endif

INLINE vf smallerf(vf a, vf b) { return -largerf(-a, -b); }
INLINE float largest_of(vf x) {
    float largest = x[0];
    for (int l = 1; l < W; l++) largest = x[l] > largest ? x[l] : largest;
    return largest;
}
/* Sums in float of few numbers, their sum in double: so no digits are lost over a long row. */
enum { FEW = 64 * W };
INLINE double total_of(vf x) {
    double sum = 0;
    for (int l = 0; l < W; l++) sum += (double)x[l];
    return sum;
}
INLINE double total(vd x) {
    double sum = 0;
    for (int l = 0; l < D; l++) sum += x[l];
    return sum;
}

/* c[0] x^(count - 1) + … + c[count - 1] */
INLINE vd polynomial(vd x, const double *c, const int count) {
    vd p = splat(c[0]);
    for (int i = 1; i < count; i++) p = p * x + c[i];
    return p;
}
INLINE vf polynomialf(vf x, const float *c, const int count) {
    vf p = splatf(c[0]);
    for (int i = 1; i < count; i++) p = p * x + c[i];
    return p;
}

/* e^x for x <= 700, with a relative error of 3e-10; 3e-308 below x = -708. */
INLINE vd exponential(vd x) {
    const double magic = 0x1.8p52;
    x = larger(x, splat(-708.0));
    vd t = x * 0x1.71547652b82fep0 + magic;
    vd n = t - magic;
    vd r = x - n * 0x1.62e42fefa39efp-1;
    static const double c[] = { /* near-minimax on half of log 2 to both sides */
        0x1.a1256cd2f13c2p-13, 0x1.6d43af18200d3p-10, 0x1.1110e0c5c7f50p-7, 0x1.5554e8a22b84cp-5,
        0x1.5555555a800cdp-3,  0x1.0000000ba132cp-1,  1, 1};
    return (vd)((vul)polynomial(r, c, 8) + ((vul)t << 52));
}

/* 1 - e^x, with all digits near x = 0; e is e^x */
INLINE vd one_minus_exp(vd x, vd e) {
    static const double c[] = {1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1};
    return pick(x > -0.1, -x * polynomial(x, c, 7), 1 - e);
}

/* log x for x > 0, with an absolute error of 1e-14. */
INLINE vd logarithm(vd x) {
    x = larger(x, splat(1e-300));
    vl bits = (vl)x - 0x3fe6a09e667f3bcd; /* the root of 1/2: the mantissa is then between it and the root of 2 */
    vl exponent = bits >> 52;
    vd mantissa = (vd)((vl)x - (exponent << 52));
    vd e = (vd)(exponent + 0x4338000000000000) - 0x1.8p52;
    vd f = (mantissa - 1) / (mantissa + 1), z = f * f;
    static const double c[] = {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3};
    return e * 0x1.62e42fefa39efp-1 + 2 * (f + f * z * polynomial(z, c, 9));
}

/* e^x for x <= 0, with a relative error of 1e-7; 0 below x = -87, where it would leave the normal numbers, and for -inf. */
INLINE vf exponentialf(vf x) {
    const float magic = 0x1.8p23f;
    vf minimum = splatf(-87.0f);
    vf held = largerf(minimum, x); /* NaN stays */
    vf t = held * 0x1.715476p0f + magic;
    vf n = t - magic;
    vf r = held - n * 0x1.62e400p-1f - n * 0x1.7f7d1cp-20f;
    static const float c[] = {0x1.6d117cp-10f, 0x1.120be1p-7f, 0x1.555518p-5f, 0x1.5554dcp-3f, 0.5f, 1, 1};
    return zero_below(x, minimum, (vf)((vui)polynomialf(r, c, 7) + ((vui)t << 23)));
}
