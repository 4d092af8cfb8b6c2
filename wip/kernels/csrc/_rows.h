/* Rows of scores of any dtype, read and written as vectors of float32. `dtype` is a constant wherever these are inlined. */

typedef uint16_t bf16; /* the upper half of a float */
typedef uint16_t f16;
typedef uint16_t vhalf __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));

INLINE float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE vf load_f32(const float *p) { return (vf)*(const vfu *)p; }
INLINE void store_f32(float *p, vf x) { *(vfu *)p = (vfu)x; }

INLINE vf load_bf16(const bf16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vhalf *)p, vui) << 16);
#endif
}
INLINE void store_bf16(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vui bits = (vui)x;
    /* NaN stays NaN: the lower half of those that get here is zero */
    vui rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(__AVX2__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)rounded, (__m256i)rounded), 8);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
#else
    *(vhalf *)p = __builtin_convertvector(rounded, vhalf);
#endif
#endif
}

#if defined(__F16C__)
INLINE float widen_f16(f16 x) { return _cvtsh_ss(x); }
INLINE f16 narrow_f16(float x) { return _cvtss_sh(x, 0); }
#else
INLINE float widen_f16(f16 x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023;
    if (exponent == 0) return of_bits(sign | bits_of((float)mantissa * 0x1p-24f));
    return of_bits(sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13);
}
INLINE f16 narrow_f16(float x) {
    uint32_t sign = (bits_of(x) >> 16) & 0x8000, bits = bits_of(x) & 0x7fffffff;
    if (bits > 0x7f800000) return (f16)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (f16)(sign | 0x7c00);
    if (bits < 0x38800000) return (f16)(sign | (bits_of(of_bits(bits) + 0.5f) - 0x3f000000)); /* subnormal: the sum rounds */
    return (f16)(sign | (bits + 0xc8000fff + ((bits >> 13) & 1)) >> 13);
}
#endif
INLINE vf load_f16(const f16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && BYTES == 32
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf x;
    for (int l = 0; l < W; l++) x[l] = widen_f16(p[l]);
    return x;
#endif
}
INLINE void store_f16(f16 *p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, 0));
#elif defined(__F16C__) && BYTES == 32
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, 0));
#else
    for (int l = 0; l < W; l++) p[l] = narrow_f16(x[l]);
#endif
}

/* Past the caches, which what is large would only empty. The address must be aligned. */
INLINE void stream_f32(float *p, vf x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)x);
#elif defined(__SSE2__)
    _mm_stream_ps(p, (__m128)x);
#else
    store_f32(p, x);
#endif
}
INLINE void end_streams(void) {
#if defined(__SSE2__)
    _mm_sfence(); /* what is written over the same place next must not be overtaken */
#endif
}

/* ---- of any dtype ---- */

/* A statement in which DTYPE is a constant. */
#define FOR_DTYPE(dtype, ...)                                                     \
    do {                                                                          \
        if ((dtype) == FLOAT32) { enum { DTYPE = FLOAT32 }; __VA_ARGS__; }        \
        else if ((dtype) == BFLOAT16) { enum { DTYPE = BFLOAT16 }; __VA_ARGS__; } \
        else { enum { DTYPE = FLOAT16 }; __VA_ARGS__; }                           \
    } while (0)

INLINE int64_t item_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE const void *row_of(const void *scores, int dtype, int64_t offset) { return (const char *)scores + offset * item_size(dtype); }
INLINE void *out_row(void *out, int dtype, int64_t offset) { return (char *)out + offset * item_size(dtype); }

INLINE float score_at(const void *row, int dtype, int64_t i) {
    if (dtype == FLOAT32) return ((const float *)row)[i];
    return dtype == BFLOAT16 ? of_bits((uint32_t)((const bf16 *)row)[i] << 16) : widen_f16(((const f16 *)row)[i]);
}

INLINE vf load(const void *row, const int dtype, int64_t i) {
    if (dtype == FLOAT32) return load_f32((const float *)row + i);
    return dtype == BFLOAT16 ? load_bf16((const bf16 *)row + i) : load_f16((const f16 *)row + i);
}
/* -inf behind the end of a row of n */
INLINE vf load_some(const void *row, const int dtype, int64_t i, int64_t n) {
    if (i + W <= n) return load(row, dtype, i);
    vf x = splatf(-INFINITY);
    for (int l = 0; i + l < n; l++) x[l] = score_at(row, dtype, i + l);
    return x;
}

INLINE void store(void *row, const int dtype, int64_t i, vf x) {
    if (dtype == FLOAT32)
        store_f32((float *)row + i, x);
    else if (dtype == BFLOAT16)
        store_bf16((bf16 *)row + i, x);
    else
        store_f16((f16 *)row + i, x);
}
INLINE void store_some(void *row, const int dtype, int64_t i, int64_t n, vf x) {
    if (i + W <= n) {
        store(row, dtype, i, x);
        return;
    }
    char narrowed[W * 4];
    store(narrowed, dtype, 0, x);
    memcpy(out_row(row, dtype, i), narrowed, (size_t)((n - i) * item_size(dtype)));
}
INLINE void store_one(void *row, const int dtype, int64_t i, float x) {
    uint32_t bits = bits_of(x);
    if (dtype == FLOAT32)
        ((float *)row)[i] = x;
    else if (dtype == BFLOAT16)
        ((bf16 *)row)[i] = x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    else
        ((f16 *)row)[i] = narrow_f16(x);
}

/* The row in float32, -inf behind it up to a whole vector. */
static void widen_row(const void *row, int dtype, int64_t n, float *scores) {
    FOR_DTYPE(dtype, for (int64_t i = 0; i < n; i += W) store_f32(scores + i, load_some(row, DTYPE, i, n)));
}
