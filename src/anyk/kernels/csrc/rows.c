/* Losses and gradients of rows. Compiled once for each instruction set: VARIANT is in the names of its functions.

   A row's candidates are found in two passes over its scores; then LANES rows are computed side by side, in double precision,
   each vector holding the same quantity of several rows. What is computed is what the plain code of anyk/operators and
   anyk/losses.py defines; the formulae are explained there. */
#include "anyk.h"
#include "_vector.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define EXPORTED(name) JOIN(name, VARIANT)

/* Scores that are not lower than a threshold, and how many of the best are wanted. */
typedef struct {
    vf threshold;
    int64_t count, wanted, room;
    float *score;
    int32_t *class;
    int nan;
} Kept;

typedef struct {
    double exponentials, shifted;
    int64_t real;
} Sums;

/* Integers in the order of the floats. */
INLINE int32_t key_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & INT32_MAX);
}
INLINE float of_key(int32_t key) {
    key ^= (key >> 31) & INT32_MAX;
    float x;
    memcpy(&x, &key, 4);
    return x;
}

/* The largest key that at least `wanted` of the scores reach; or, with slack, a lower one that up to `slack` more reach. */
static int32_t key_reached_by(const float *scores, int64_t count, int64_t wanted, int64_t slack) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        int32_t key = key_of(scores[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    while (low < high) { /* low is reached by at least `wanted`, high + 1 by fewer */
        int32_t middle = (int32_t)(((int64_t)low + high + 1) >> 1);
        int64_t reached = 0;
        int64_t i = 0;
        vi sums = {0}, limit = alli(middle);
        for (; i + W <= count; i += W) {
            vi bits = (vi)*(const vfu *)(scores + i);
            sums -= (vi)((bits ^ ((bits >> 31) & INT32_MAX)) >= limit);
        }
        reached = sum_of(sums);
        for (; i < count; i++) reached += key_of(scores[i]) >= middle;
        if (reached >= wanted) {
            low = middle;
            if (reached <= wanted + slack) break;
        } else
            high = middle - 1;
    }
    return low;
}

/* Keeps the best of what was collected, the earlier of equals, and raises the threshold above them. */
static void compact(Kept *kept) {
    for (int64_t i = 0; i < kept->count; i++) kept->nan |= kept->score[i] != kept->score[i];
    int32_t least = key_reached_by(kept->score, kept->count, kept->wanted, 0);
    int64_t above = 0, count = 0;
    for (int64_t i = 0; i < kept->count; i++) above += key_of(kept->score[i]) > least;
    int64_t ties = kept->wanted - above;
    for (int64_t i = 0; i < kept->count; i++) {
        int32_t key = key_of(kept->score[i]);
        if (key > least || (key == least && ties-- > 0)) {
            kept->score[count] = kept->score[i];
            kept->class[count++] = kept->class[i];
        }
    }
    kept->count = count;
    /* NaN in, NaN out: nothing more needs to be found. Above +inf there is nothing but NaN. */
    if (kept->nan || least >= key_of(INFINITY))
        kept->threshold = allf(INFINITY), kept->nan |= least > key_of(INFINITY);
    else
        kept->threshold = allf(of_key(least + 1));
    if (kept->threshold[0] == INFINITY && kept->count > kept->room) kept->count = kept->room;
}

/* float32 */
INLINE vf load_f32(const float *p) { return (vf)*(const vfu *)p; }
INLINE float one_f32(float x) { return x; }
INLINE void store_f32(float *p, vf x) { *(vfu *)p = (vfu)x; }
INLINE float narrow_f32(float x) { return x; }
#define S float
#define NAME(x) x##_f32
#include "_scores.h"

/* bfloat16: the upper half of a float */
typedef uint16_t bf16;
INLINE float one_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE bf16 narrow_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
typedef uint16_t vhalf __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
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
#define S bf16
#define NAME(x) x##_bf16
#include "_scores.h"

/* float16 */
typedef uint16_t f16;
#if defined(__F16C__)
INLINE float one_f16(f16 x) { return _cvtsh_ss(x); }
INLINE f16 narrow_f16(float x) { return _cvtss_sh(x, 0); }
#else
INLINE float one_f16(f16 x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023, bits;
    float y;
    if (exponent == 0) {
        y = (float)mantissa * 0x1p-24f;
        return sign ? -y : y;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
    memcpy(&y, &bits, 4);
    return y;
}
INLINE f16 narrow_f16(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (f16)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (f16)(sign | 0x7c00);
    if (bits < 0x38800000) { /* subnormal: the sum rounds as it should */
        float y;
        memcpy(&y, &bits, 4);
        y += 0.5f;
        memcpy(&bits, &y, 4);
        return (f16)(sign | (bits - 0x3f000000));
    }
    bits += 0xc8000fff + ((bits >> 13) & 1);
    return (f16)(sign | bits >> 13);
}
#endif
INLINE vf load_f16(const f16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && BYTES == 32
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf x;
    for (int l = 0; l < W; l++) x[l] = one_f16(p[l]);
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
#define S f16
#define NAME(x) x##_f16
#include "_scores.h"

INLINE size_t item_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE const void *row_of(const void *scores, int dtype, int64_t offset) {
    return (const char *)scores + offset * (int64_t)item_size(dtype);
}
static float score_at(const void *row, int dtype, int64_t i) {
    if (dtype == FLOAT32) return ((const float *)row)[i];
    return dtype == BFLOAT16 ? one_bf16(((const bf16 *)row)[i]) : one_f16(((const f16 *)row)[i]);
}

/* The `wanted` best scores of a row, and perhaps some more, in the order of their classes. Returns the largest score. */
static float find(const void *row, int dtype, int64_t n, int64_t wanted, int sums, int smoothed, Kept *kept, float *whole,
                  Sums *out) {
    int groups = 1;
    while (groups < 16 && groups * W < 4 * wanted) groups *= 2;
    float most;
    kept->count = 0;
    kept->nan = 0;
    kept->wanted = wanted;
    int all_kept = wanted >= n;
    if (all_kept || n <= groups * W * 2 || groups * W < wanted + wanted / 4) {
        if (dtype == FLOAT32)
            most = most_f32(row, n);
        else
            most = dtype == BFLOAT16 ? most_bf16(row, n) : most_f16(row, n);
        if (!all_kept) {
            for (int64_t i = 0; i < n; i++) whole[i] = score_at(row, dtype, i);
            kept->threshold = allf(of_key(key_reached_by(whole, n, wanted, wanted / 8 + 2)));
        }
    } else {
        vf maxima[16];
        if (dtype == FLOAT32)
            most = maxima_f32(row, n, groups, maxima);
        else
            most = dtype == BFLOAT16 ? maxima_bf16(row, n, groups, maxima) : maxima_f16(row, n, groups, maxima);
        kept->threshold = allf(of_key(key_reached_by((const float *)maxima, groups * W, wanted, wanted / 8 + 1)));
    }
    if (all_kept) {
        if (dtype == FLOAT32)
            keep_all_f32(row, n, kept);
        else if (dtype == BFLOAT16)
            keep_all_bf16(row, n, kept);
        else
            keep_all_f16(row, n, kept);
        if (!sums) return most;
    } else if (kept->threshold[0] != kept->threshold[0])
        kept->threshold = allf(INFINITY), kept->nan = 1;
    Kept *to = all_kept ? NULL : kept;
    if (dtype == FLOAT32)
        collect_f32(row, n, to, most, sums, smoothed, out);
    else if (dtype == BFLOAT16)
        collect_bf16(row, n, to, most, sums, smoothed, out);
    else
        collect_f16(row, n, to, most, sums, smoothed, out);
    for (int64_t i = 0; to && i < kept->count; i++) kept->nan |= kept->score[i] != kept->score[i];
    return most;
}

/* All scores of a row. */
static void read_all(const void *row, int dtype, int64_t n, float *scores) {
    if (dtype == FLOAT32)
        memcpy(scores, row, (size_t)n * 4);
    else
        for (int64_t i = 0; i < n; i++) scores[i] = score_at(row, dtype, i);
}

/* The largest of few scores, whether there is NaN among them, and their sums. */
static float sums_of(const float *scores, int64_t n, int sums, int smoothed, int *nan, Sums *out) {
    int strange = 0;
    for (int64_t i = 0; i < n; i++) strange |= scores[i] != scores[i];
    *nan = strange;
    float most = most_f32(scores, n);
    if (sums) collect_f32(scores, n, NULL, most, 1, smoothed, out);
    return most;
}

typedef struct {
    int32_t key, class;
} Item;

/* Stable, descending. */
static void merge_sort(Item *items, Item *other, int64_t count) {
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t start = 0; start < count; start += 2 * width) {
            int64_t middle = start + width < count ? start + width : count;
            int64_t end = start + 2 * width < count ? start + 2 * width : count;
            int64_t i = start, j = middle;
            for (int64_t place = start; place < end; place++)
                other[place] = j >= end || (i < middle && items[i].key >= items[j].key) ? items[i++] : items[j++];
        }
        memcpy(items, other, (size_t)count * sizeof(Item));
    }
}

/* Sorts what was kept, descending, the earlier class first among equals, and keeps the wanted ones. There is room for W more
   scores than were kept. `order` has room for the kept. */
static void sort(Kept *kept, Item *order, Item *other) {
    int64_t count = kept->count, wanted = kept->wanted < count ? kept->wanted : count;
    if (count > wanted + wanted / 4 + 2 * W) {
        compact(kept);
        count = kept->count;
    }
    if (count <= 320) {
        vi ranks[320 / W + 1];
        int vectors = (int)((count + W - 1) / W);
        for (int64_t i = count; i < vectors * W; i++) kept->score[i] = -INFINITY;
        for (int g = 0; g < vectors; g += 4) {
            vi r0 = {0}, r1 = {0}, r2 = {0}, r3 = {0};
            vf x0 = load_f32(kept->score + g * W), x1 = x0, x2 = x0, x3 = x0;
            if (g + 1 < vectors) x1 = load_f32(kept->score + (g + 1) * W);
            if (g + 2 < vectors) x2 = load_f32(kept->score + (g + 2) * W);
            if (g + 3 < vectors) x3 = load_f32(kept->score + (g + 3) * W);
            if (g + 1 >= vectors)
                for (int64_t j = 0; j < count; j++) r0 = count_if_above(r0, allf(kept->score[j]), x0);
            else if (g + 2 >= vectors)
                for (int64_t j = 0; j < count; j++) {
                    vf y = allf(kept->score[j]);
                    r0 = count_if_above(r0, y, x0), r1 = count_if_above(r1, y, x1);
                }
            else
                for (int64_t j = 0; j < count; j++) {
                    vf y = allf(kept->score[j]);
                    r0 = count_if_above(r0, y, x0), r1 = count_if_above(r1, y, x1);
                    r2 = count_if_above(r2, y, x2), r3 = count_if_above(r3, y, x3);
                }
            ranks[g] = r0;
            if (g + 1 < vectors) ranks[g + 1] = r1;
            if (g + 2 < vectors) ranks[g + 2] = r2;
            if (g + 3 < vectors) ranks[g + 3] = r3;
        }
        const int32_t *rank = (const int32_t *)ranks;
        for (int64_t i = 0; i < count; i++) order[i].class = -1;
        for (int64_t i = 0; i < count; i++) {
            int32_t r = rank[i];
            while (order[r].class >= 0) r++; /* equals have the same rank: the later one goes behind */
            order[r].key = (int32_t)i;
            order[r].class = kept->class[i];
        }
        float *sorted = (float *)other;
        for (int64_t i = 0; i < wanted; i++) sorted[i] = kept->score[order[i].key];
        for (int64_t i = 0; i < wanted; i++) {
            kept->score[i] = sorted[i];
            kept->class[i] = order[i].class;
        }
    } else {
        for (int64_t i = 0; i < count; i++) order[i] = (Item){key_of(kept->score[i] == 0 ? 0.0f : kept->score[i]), kept->class[i]};
        merge_sort(order, other, count);
        for (int64_t i = 0; i < wanted; i++) {
            kept->score[i] = of_key(order[i].key);
            kept->class[i] = order[i].class;
        }
    }
    kept->count = wanted;
}

/* Sorts the scores of LANES rows at once, descending, the earlier class first among equals, each row's `last` class behind all.
   The keys are the scores without their lowest bits, where the class is: what that leaves undecided is put right in `unpack`. */
static void sort_block(const Spec *spec, const float *scores, const int32_t *last, int32_t *keys) {
    int64_t n = spec->n;
    for (int lane = 0; lane < LANES; lane++) {
        const float *row = scores + lane * n;
        for (int64_t i = 0; i < n; i++) {
            float score = row[i] == 0 ? 0.0f : row[i];
            keys[i * LANES + lane] = (key_of(score) & ~(MOST_SORTED - 1)) | (int32_t)(MOST_SORTED - 1 - i);
        }
        keys[last[lane] * LANES + lane] = INT32_MIN | (MOST_SORTED - 1 - last[lane]);
    }
    const int32_t *pair = spec->sorting;
    for (int64_t number = 0; number < spec->sorting_size; number++, pair += 2) {
        vi *upper = (vi *)(keys + pair[0] * LANES), *lower = (vi *)(keys + pair[1] * LANES);
        for (int v = 0; v < LANES / W; v++) {
            vi a = upper[v], b = lower[v];
            upper[v] = larger_int(a, b);
            lower[v] = smaller_int(a, b);
        }
    }
}

/* A row's sorted scores, without the last one. */
static void unpack(const int32_t *keys, const float *row, int lane, Kept *kept) {
    for (int64_t i = 0; i < kept->wanted; i++) {
        int32_t class = MOST_SORTED - 1 - (keys[i * LANES + lane] & (MOST_SORTED - 1));
        kept->class[i] = class;
        kept->score[i] = row[class];
    }
    kept->count = kept->wanted;
    /* Mostly all is decided. Behind the scores there is room for a vector. */
    int undecided = 0;
    kept->score[kept->wanted] = -INFINITY;
    for (int64_t i = 0; i < kept->wanted; i += W) {
        uint32_t not_less = reach(load_f32(kept->score + i + 1), load_f32(kept->score + i));
        int64_t left = kept->wanted - i;
        undecided |= (not_less & (left < W ? (1u << left) - 1 : ~0u)) != 0;
    }
    if (!undecided) return;
    for (int64_t i = 1; i < kept->wanted; i++)
        for (int64_t j = i; j > 0 && (kept->score[j] > kept->score[j - 1] ||
                                      (kept->score[j] == kept->score[j - 1] && kept->class[j] < kept->class[j - 1]));
             j--) {
            float score = kept->score[j];
            int32_t class = kept->class[j];
            kept->score[j] = kept->score[j - 1], kept->class[j] = kept->class[j - 1];
            kept->score[j - 1] = score, kept->class[j - 1] = class;
        }
}

/* Memory for the work on a block of rows, of which parts are taken from the front. */
typedef struct {
    char *next, *end;
} Arena;

static void *take(Arena *arena, int64_t bytes) {
    char *start = arena->next;
    arena->next += (bytes + 63) & ~(int64_t)63;
#if defined(__SANITIZE_ADDRESS__) /* between the parts is nobody's */
    arena->next += 64;
    __asan_unpoison_memory_region(start, (size_t)bytes);
    __asan_poison_memory_region(start + bytes, (size_t)(arena->next - start - bytes));
#endif
    return start;
}
#define VECTORS(count) take(&arena, (int64_t)(count) * LANES * 8)

/* What a block of rows shares: quantities of LANES rows in NV vectors. */
typedef struct {
    const Spec *spec;
    int64_t m, k;
    vd *x;             /* (m) scores less the target's, over the temperature, as the operator wants them arranged */
    vd *of_x;          /* (m) the gradient by them */
    int32_t *place;    /* (lanes) where the target stands */
    int32_t *number;   /* (lanes) how many are not padding */
    int32_t *rivals;   /* (k, lanes) networks: where the best others stand */
    vd *log_t, *of_log_t; /* (k) */
    vd *target;        /* the target's x: 0 */
    int padded;        /* some row has padding */
    vd *work;          /* what the operator asked for */
} Block;

static int64_t work_size(const Spec *spec) {
    switch (spec->operator) {
    case NETWORK: return 3 * spec->size + 3 * spec->m + 4 * spec->k;
    case LAPSUM: return 3 * spec->m + 3 * spec->k + 8;
    case KSUBSET: return spec->m * (spec->k + 4) + spec->k * (spec->k + 4);
    case SOFTSORT: return spec->m + spec->k * (spec->m + 6);
    default: return spec->m * 3 + spec->k * (spec->m + 4);
    }
}

INLINE vl lanes_of(const int32_t *numbers, int v) {
    vl result;
    for (int l = 0; l < BYTES / 8; l++) result[l] = numbers[v * (BYTES / 8) + l];
    return result;
}

INLINE vd smaller_share(const int swap, vd a) { /* swap(-a) for a >= 0 */
    switch (swap) {
    case LOGISTIC: {
        vd e = exponential(-a);
        return e * inverse(1 + e);
    }
    case LOGISTIC_ART: {
        vd length = root(a * a + 1e-6);
        vd e = exponential(-a / root(length));
        return e / (1 + e);
    }
    case CAUCHY:
        for (int l = 0; l < BYTES / 8; l++) a[l] = atan2(1, a[l]) / 3.14159265358979323846;
        return a;
    case GAUSSIAN:
        for (int l = 0; l < BYTES / 8; l++) a[l] = erfc(a[l] * 0.70710678118654752440) / 2;
        return a;
    case RECIPROCAL: return 1 / (2 + a);
    default: return pick(a <= 0.25, 0.5 - a, 1 / (16 * larger(a, all(0.25))));
    }
}

INLINE vd slope_of(const int swap, vd a, vd x) { /* the derivative at ±a, where the smaller share is x */
    switch (swap) {
    case LOGISTIC: return x * (1 - x);
    case LOGISTIC_ART: {
        vd length = root(a * a + 1e-6), part = a / length;
        return x * (1 - x) / root(length) * (1 - part * part / 2);
    }
    case CAUCHY: return 1 / (3.14159265358979323846 * (1 + a * a));
    case GAUSSIAN: return exponential(-a * a / 2) * 0.39894228040143267794;
    case RECIPROCAL: return 1 / ((2 + a) * (2 + a));
    default: {
        vd held = larger(a, all(0.25));
        return 1 / (16 * held * held);
    }
    }
}

/* Which rows a comparator leaves as they are. */
INLINE vl frozen_in(const Block *b, const int32_t *comparator, int v) {
    vl number = lanes_of(b->number, v);
    vl frozen = comparator[1] >= number;
    for (int l = 0; l < BYTES / 8; l++) {
        const int32_t *row = b->spec->numbers + 3 * number[l];
        if (comparator[2] < row[1] || comparator[2] >= row[2]) frozen[l] = -1;
    }
    return frozen;
}

INLINE void network_forward(Block *b, const int swap, const int padded) {
    const Spec *spec = b->spec;
    vd *restrict s = b->x, *restrict c = b->work + 3 * spec->size * NV, *restrict saved = b->work;
    for (int64_t i = 0; i < b->m; i++)
        EACH c[i * NV + v] = only(lanes_of(b->place, v) == i, all(1));
    const int32_t *comparator = spec->comparators;
    for (int64_t number = 0; number < spec->size; number++, comparator += 3, saved += 3 * NV) {
        vd *upper = s + comparator[0] * NV, *lower = s + comparator[1] * NV;
        vd *c_upper = c + comparator[0] * NV, *c_lower = c + comparator[1] * NV;
        EACH {
            vd d = upper[v] - lower[v], a = size_of(d);
            vd x = smaller_share(swap, a);
            vd moved = x * a, high = larger(upper[v], lower[v]), low = smaller(upper[v], lower[v]);
            vd new_upper = high - moved, new_lower = low + moved;
            if (padded) {
                vl frozen = frozen_in(b, comparator, v);
                x = only(~frozen, x);
                d = only(~frozen, d);
                new_upper = pick(frozen, upper[v], new_upper);
                new_lower = pick(frozen, lower[v], new_lower);
            }
            upper[v] = new_upper;
            lower[v] = new_lower;
            vd c_high = by_sign(d, c_lower[v], c_upper[v]), c_low = by_sign(d, c_upper[v], c_lower[v]);
            vd apart = c_high - c_low, y = 1 - x;
            /* Sums of non-negative terms: the digits of small shares stay. */
            c_upper[v] = y * c_high + x * c_low;
            c_lower[v] = x * c_high + y * c_low;
            saved[v] = d;
            saved[NV + v] = x;
            saved[2 * NV + v] = apart;
        }
    }
}

INLINE void network_backward(Block *b, const int swap, const int padded, vd *restrict of_c) {
    const Spec *spec = b->spec;
    vd *restrict of_s = b->of_x;
    const int32_t *comparator = spec->comparators + 3 * spec->size;
    vd *restrict saved = b->work + 3 * spec->size * NV;
    for (int64_t number = spec->size; number-- > 0;) {
        comparator -= 3;
        saved -= 3 * NV;
        vd *upper = of_s + comparator[0] * NV, *lower = of_s + comparator[1] * NV;
        vd *c_upper = of_c + comparator[0] * NV, *c_lower = of_c + comparator[1] * NV;
        EACH {
            vd d = saved[v], x = saved[NV + v], a = size_of(d), y = 1 - x;
            vd slope = slope_of(swap, a, x);
            if (padded) slope = only(~(vl)(x == 0), slope);
            vd by_size = (lower[v] - upper[v]) * (x - a * slope) - (c_lower[v] - c_upper[v]) * saved[2 * NV + v] * slope;
            vd high = upper[v] + by_size, low = lower[v] - by_size;
            vd c_high = y * c_upper[v] + x * c_lower[v], c_low = x * c_upper[v] + y * c_lower[v];
            upper[v] = by_sign(d, low, high);
            lower[v] = by_sign(d, high, low);
            c_upper[v] = by_sign(d, c_low, c_high);
            c_lower[v] = by_sign(d, c_high, c_low);
        }
    }
}

#define FOR_SWAP(function, ...)                                              \
    switch (b->spec->swap) {                                                 \
    case LOGISTIC: function(b, LOGISTIC, __VA_ARGS__); break;                \
    case LOGISTIC_ART: function(b, LOGISTIC_ART, __VA_ARGS__); break;        \
    case CAUCHY: function(b, CAUCHY, __VA_ARGS__); break;                    \
    case GAUSSIAN: function(b, GAUSSIAN, __VA_ARGS__); break;                \
    case RECIPROCAL: function(b, RECIPROCAL, __VA_ARGS__); break;            \
    default: function(b, OPTIMAL, __VA_ARGS__); break;                       \
    }

static void network(Block *b, int backward) {
    const Spec *spec = b->spec;
    vd *c = b->work + 3 * spec->size * NV, *of_c = c + spec->m * NV;
    vd *t = of_c + spec->m * NV, *tail = t + b->k * NV, *tail_slope = tail + b->k * NV;
    int swap = spec->swap;
    int polynomial = swap == CAUCHY || swap == RECIPROCAL || swap == OPTIMAL;
    if (!backward) {
        /* The best others' leads, before the network changes the scores. */
        for (int64_t j = 0; j < b->k; j++) {
            EACH {
                vd lead = {0}, none = {0};
                for (int l = 0; l < BYTES / 8; l++) {
                    int lane = v * (BYTES / 8) + l;
                    int32_t rival = b->rivals[j * LANES + lane];
                    if (rival >= 0)
                        lead[l] = -b->x[rival * NV + v][l];
                    else
                        none[l] = rival == -2 ? 1 : 0; /* no such rival: the tail is e^-30 itself */
                }
                if (polynomial) {
                    vd behind = larger(-lead, all(0));
                    tail[j * NV + v] = pick(none > 0, all(0), -0.5 * logarithm(1 + behind)) - 30;
                    tail_slope[j * NV + v] = only(~(vl)(none > 0), pick(lead <= 0, 0.5 / (1 + behind), all(0)));
                } else {
                    vd z = lead, z_slope = all(1);
                    if (swap == LOGISTIC_ART) {
                        vd length = root(lead * lead + 1e-6), part = lead / length;
                        z = lead / root(length);
                        z_slope = (1 - part * part / 2) / root(length);
                    }
                    vd e = exponential(-size_of(z));
                    vd log_sigmoid = smaller(z, all(0)) - logarithm(1 + e);
                    vd other = pick(z > 0, e, all(1)) / (1 + e);
                    tail[j * NV + v] = pick(none > 0, all(0), 0.5 * log_sigmoid) - 30;
                    tail_slope[j * NV + v] = only(~(vl)(none > 0), 0.5 * other * z_slope);
                }
            }
        }
        if (b->padded) {
            FOR_SWAP(network_forward, 1)
        } else {
            FOR_SWAP(network_forward, 0)
        }
        for (int64_t j = 0; j < b->k; j++)
            EACH {
                vd share = c[spec->outputs[j] * NV + v];
                vd sum = j ? t[(j - 1) * NV + v] + share : share;
                t[j * NV + v] = sum;
                vd log_sum = pick(sum > 1e-290, logarithm(sum), all(-1e300)), log_tail = tail[j * NV + v];
                vd most = larger(log_sum, log_tail), least = smaller(log_sum, log_tail);
                b->log_t[j * NV + v] = most + logarithm(1 + exponential(least - most));
            }
        return;
    }
    for (int64_t i = 0; i < b->m * NV; i++) of_c[i] = (vd){0};
    vd later[NV];
    EACH later[v] = (vd){0};
    for (int64_t j = b->k; j-- > 0;)
        EACH {
            vd g = b->of_log_t[j * NV + v], log_t = b->log_t[j * NV + v];
            later[v] += g * exponential(smaller(-log_t, all(300)));
            of_c[spec->outputs[j] * NV + v] = later[v];
            t[j * NV + v] = g * exponential(tail[j * NV + v] - log_t) * tail_slope[j * NV + v]; /* by the lead */
        }
    if (b->padded) {
        FOR_SWAP(network_backward, 1, of_c)
    } else {
        FOR_SWAP(network_backward, 0, of_c)
    }
    for (int64_t j = 0; j < b->k; j++)
        EACH for (int l = 0; l < BYTES / 8; l++) {
            int lane = v * (BYTES / 8) + l;
            int32_t rival = b->rivals[j * LANES + lane];
            if (rival < 0) continue;
            double g = t[j * NV + v][l];
            b->of_x[rival * NV + v][l] -= g;
            b->of_x[b->place[lane] * NV + v][l] += g;
        }
}

/* x descending, padding at its end far below */
static void lapsum(Block *b, int backward) {
    int64_t m = b->m, k = b->k, first = 2 * k + 1 < m ? 2 * k + 1 : m;
    vd *better = b->work, *worse = better + m * NV, *close = worse + m * NV;
    vd *threshold = close + m * NV, *margin = threshold + k * NV;
    const vd *x = b->x;
    const double none = -1e37;
    if (!backward) {
        EACH {
            vl number = lanes_of(b->number, v);
            for (int64_t i = 0; i + 1 < m; i++)
                close[i * NV + v] = only(i + 1 < number, exponential(x[(i + 1) * NV + v] - x[i * NV + v]));
            better[v] = all(1);
            for (int64_t i = 1; i < first; i++) better[i * NV + v] = 1 + better[(i - 1) * NV + v] * close[(i - 1) * NV + v];
            worse[(m - 1) * NV + v] = all(1);
            for (int64_t i = m - 1; i-- > 0;) worse[i * NV + v] = 1 + worse[(i + 1) * NV + v] * close[i * NV + v];
            for (int64_t j = 1; j <= k; j++) {
                vd rank = all((double)j), above = {0}, a = all(1), at_a = {0}, bb = worse[v], at_b = x[v];
                vd has_b = all(1);
                vd most = __builtin_convertvector(number - 1, vd);
                rank = larger(smaller(rank, most), all(1));
                for (int64_t i = 0; i < first; i++) {
                    vd passed = (double)(i + 1) + (worse[i * NV + v] - 1 - better[i * NV + v]) / 2;
                    vl here = (passed <= rank) & (i < number);
                    above += only(here, all(1));
                    a = pick(here, better[i * NV + v], a);
                    at_a = pick(here, x[i * NV + v], at_a);
                    if (i + 1 < first) {
                        bb = pick(here, worse[(i + 1) * NV + v], bb);
                        at_b = pick(here, x[(i + 1) * NV + v], at_b);
                        has_b = pick(here, only(i + 1 < number, all(1)), has_b);
                    } else
                        has_b = pick(here, all(0), has_b);
                }
                vd log_a = pick(above > 0, logarithm(a) - at_a, all(none));
                vd log_b = pick(has_b > 0, logarithm(bb) + at_b, all(none));
                vd missing = rank - above, size = larger(size_of(missing), all(1));
                vd root_ = logarithm(size + root(size * size + exponential(log_a + log_b)));
                vd result = pick(missing > 0, log_b - root_, root_ - log_a);
                result = pick(missing == 0, (log_b - log_a) / 2, result);
                result = larger(smaller(result, all(1e36)), all(-1e36));
                threshold[(j - 1) * NV + v] = result;
                vd ahead = -result; /* the target's x is 0 */
                vd e = 0.5 * exponential(-larger(ahead, all(0)));
                vl last = number == j;
                margin[(j - 1) * NV + v] = only(~last, pick(ahead < 0, all(1), e / (1 - e)));
                b->log_t[(j - 1) * NV + v] =
                    only(~last, pick(ahead < 0, ahead - 0.69314718055994530942, logarithm(1 - e)));
            }
        }
        return;
    }
    /* From x_2k on (the thresholds lie above it) the weights of all thresholds are e^(x_i - x_2k) times a number. */
    int64_t far = first < m ? first - 1 : m;
    EACH {
        vl number = lanes_of(b->number, v), place = lanes_of(b->place, v);
        vd far_sum = {0}, far_share = {0}, of_target = {0};
        for (int64_t i = far; i < m; i++)
            far_sum += worse[i * NV + v] = only(i < number, exponential(x[i * NV + v] - x[far * NV + v]));
        for (int64_t j = 0; j < k; j++) {
            vd g = b->of_log_t[j * NV + v] * margin[j * NV + v], at = threshold[j * NV + v];
            vd nearest = all(1e300), sum = {0}, to_far = {0};
            for (int64_t i = 0; i < far || (i == far && far < m); i++)
                nearest = smaller(nearest, pick(i < number, size_of(x[i * NV + v] - at), all(1e300)));
            for (int64_t i = 0; i < far; i++) {
                vd weight = only(i < number, exponential(nearest - size_of(x[i * NV + v] - at)));
                close[i * NV + v] = weight;
                sum += weight;
            }
            if (far < m) to_far = only(far < number, exponential(nearest - size_of(x[far * NV + v] - at)));
            vd share = g / (sum + to_far * far_sum);
            far_share += share * to_far;
            of_target += g;
            for (int64_t i = 0; i < far; i++) b->of_x[i * NV + v] -= share * close[i * NV + v];
        }
        for (int64_t i = far; i < m; i++) b->of_x[i * NV + v] -= far_share * worse[i * NV + v];
        for (int64_t i = 0; i < m; i++) b->of_x[i * NV + v] += only(place == i, of_target);
    }
}

/* x: the others descending, then the target */
static void ksubset(Block *b, int backward) {
    int64_t others = b->m - 1, k = b->k, used = k < others ? k : others;
    vd *grown = b->work;                      /* (k, others): F_j of the first i + 1 */
    vd *weight = grown + k * b->m * NV;       /* (others) e^(x_i - x_q), q the last used, from there on */
    vd *direct = weight + b->m * NV;          /* (others) the gradient by what the round before has grown */
    vd *pairs = direct + b->m * NV;           /* (k, k) e^(x_i - x_j), j <= i < q; (j, q): e^(x_q - x_j) */
    vd *slope = pairs + k * k * NV;           /* (k) of log T by the ratio */
    const vd *x = b->x;
    if (!backward) {
        EACH {
            vl number = lanes_of(b->number, v) - 1; /* of the others */
            int64_t q = used - 1;
            for (int64_t i = q < 0 ? 0 : q; i < others; i++)
                weight[i * NV + v] = only(i < number, exponential(x[i * NV + v] - x[q * NV + v]));
            vd before = all(1);
            for (int64_t j = 0; j < used; j++) {
                for (int64_t i = j; i <= q; i++)
                    pairs[(j * k + i) * NV + v] = only(i < number, exponential(x[i * NV + v] - x[j * NV + v]));
                vd step = pairs[(j * k + q) * NV + v], total = {0};
                vd *now = grown + j * b->m * NV + v, *last = now - b->m * NV;
                for (int64_t i = j; i < q; i++) {
                    vd w = pairs[(j * k + i) * NV + v];
                    total += j ? w * last[(i - 1) * NV] : w;
                    now[i * NV] = total;
                }
                for (int64_t i = q; i < others; i++) {
                    vd w = step * weight[i * NV + v];
                    total += j ? w * last[(i - 1) * NV] : w;
                    now[i * NV] = total;
                }
                vl exists = j < number;
                total = pick(exists, total, all(1));
                vd ratio = x[j * NV + v] + logarithm(total / before);
                before = total;
                vd e = exponential(-size_of(ratio));
                b->log_t[j * NV + v] = only(exists, smaller(-ratio, all(0)) - logarithm(1 + e));
                slope[j * NV + v] = only(exists, -pick(ratio > 0, all(1), e) / (1 + e));
            }
            for (int64_t j = used < 0 ? 0 : used; j < k; j++) b->log_t[j * NV + v] = (vd){0};
        }
        return;
    }
    for (int64_t i = 0; i < others * NV; i++) direct[i] = (vd){0};
    EACH {
        vl number = lanes_of(b->number, v) - 1;
        int64_t q = used - 1;
        vd of_target = {0}, next = {0};
        for (int64_t j = used; j-- > 0;) {
            vd r = only(j < number, b->of_log_t[j * NV + v] * slope[j * NV + v]); /* by the ratio */
            of_target -= r;
            vd *now = grown + j * b->m * NV + v, *last = now - b->m * NV;
            vd step = pairs[(j * k + q) * NV + v], own = {0};
            vd running = (r - next) / larger(now[(others - 1) * NV], all(1));
            next = r;
            vd given = direct[(others - 1) * NV + v]; /* by the round after this one, which took what is one place before */
            direct[(others - 1) * NV + v] = (vd){0};
            for (int64_t i = others; i-- > j;) {
                running += given;
                vd w = running * (i < q ? pairs[(j * k + i) * NV + v] : step * weight[i * NV + v]);
                if (i) {
                    given = direct[(i - 1) * NV + v];
                    direct[(i - 1) * NV + v] = w;
                }
                if (j) w *= last[(i - 1) * NV];
                b->of_x[i * NV + v] += w;
                own += w;
            }
            b->of_x[j * NV + v] += r - own;
        }
        b->of_x[others * NV + v] += of_target;
    }
}

/* log of the running sums of e^column, and back */
INLINE void log_sums(Block *b, vd *column, int backward, int v) {
    if (!backward) {
        vd sum = column[v];
        b->log_t[v] = sum;
        for (int64_t r = 1; r < b->k; r++) {
            vd most = larger(sum, column[r * NV + v]), least = smaller(sum, column[r * NV + v]);
            b->log_t[r * NV + v] = sum = most + logarithm(1 + exponential(least - most));
        }
        return;
    }
    /* by e^column over a common factor, which is kept in range: sum over j >= r of g_j e^(column_r - log T_j) */
    vd sum = {0};
    for (int64_t r = b->k; r-- > 0;) {
        vd log_t = b->log_t[r * NV + v];
        if (r + 1 < b->k) sum *= exponential(log_t - b->log_t[(r + 1) * NV + v]);
        sum += b->of_log_t[r * NV + v];
        column[r * NV + v] = sum * exponential(column[r * NV + v] - log_t);
    }
}

/* x descending, padding at its end */
static void softsort(Block *b, int backward) {
    int64_t m = b->m, k = b->k;
    vd *weight = b->work;                        /* (m) e^(x_i - x_q), q = k - 1, from there on */
    vd *pairs = weight + m * NV;                 /* (k, k) e^-|x_i - x_r|; (r, q): e^(x_q - x_r) */
    vd *column = pairs + k * k * NV, *sums = column + k * NV;
    const vd *x = b->x;
    int64_t q = k - 1;
    EACH {
        vl number = lanes_of(b->number, v), place = lanes_of(b->place, v);
        if (!backward) {
            for (int64_t i = q; i < m; i++)
                weight[i * NV + v] = only(i < number, exponential(x[i * NV + v] - x[q * NV + v]));
            for (int64_t r = 0; r < k; r++) {
                vd sum = {0};
                for (int64_t i = 0; i < r; i++) sum += pairs[(r * k + i) * NV + v] = pairs[(i * k + r) * NV + v];
                for (int64_t i = r; i < q; i++)
                    sum += pairs[(r * k + i) * NV + v] = exponential(x[i * NV + v] - x[r * NV + v]);
                vd step = pairs[(r * k + q) * NV + v] = exponential(x[q * NV + v] - x[r * NV + v]);
                for (int64_t i = q; i < m; i++) sum += step * weight[i * NV + v];
                sums[r * NV + v] = sum;
                column[r * NV + v] = -size_of(x[r * NV + v]) - logarithm(sum); /* the target's x is 0 */
            }
            log_sums(b, column, 0, v);
            continue;
        }
        log_sums(b, column, 1, v);
        for (int64_t r = 0; r < k; r++) {
            vd g = column[r * NV + v], share = g / sums[r * NV + v], own = {0}, here = x[r * NV + v];
            vd step = share * pairs[(r * k + q) * NV + v];
            /* -|x_i - x_r| moves with x_i below x_r, and against it above; of equals it has no slope */
            for (int64_t i = 0; i < r; i++) {
                vd p = only(x[i * NV + v] > here, share * pairs[(r * k + i) * NV + v]);
                b->of_x[i * NV + v] += p;
                own -= p;
            }
            for (int64_t i = r + 1; i < m; i++) {
                vd p = i < q ? share * pairs[(r * k + i) * NV + v] : step * weight[i * NV + v];
                p = only(x[i * NV + v] < here, p);
                b->of_x[i * NV + v] -= p;
                own += p;
            }
            vd sign = pick(here > 0, all(1), only(here < 0, all(-1))); /* here - the target */
            b->of_x[r * NV + v] += own - g * sign;
            for (int64_t i = 0; i < m; i++) b->of_x[i * NV + v] += only(place == i, g * sign);
        }
    }
}

/* x descending, padding at its end */
static void neuralsort(Block *b, int backward) {
    int64_t m = b->m, k = b->k;
    vd *better = b->work, *of_better = better + m * NV;
    vd *weight = of_better + m * NV;                /* (k, m) e^(exponent - the largest of the rank) */
    vd *column = weight + k * m * NV, *sums = column + k * NV;
    const vd *x = b->x;
    EACH {
        vl number = lanes_of(b->number, v), place = lanes_of(b->place, v);
        if (!backward) {
            vd total = {0};
            better[v] = total;
            for (int64_t i = 1; i < m; i++) {
                total += only(i < number, (double)i * (x[(i - 1) * NV + v] - x[i * NV + v]));
                better[i * NV + v] = total;
            }
            for (int64_t r = 0; r < k; r++) {
                double factor = -1 - 2 * (double)r;
                vd most = factor * x[r * NV + v] - 2 * better[r * NV + v], sum = {0}, own = {0};
                for (int64_t i = 0; i < m; i++) {
                    vd exponent = factor * x[i * NV + v] - 2 * better[i * NV + v] - most;
                    vd e = only(i < number, exponential(exponent));
                    weight[(r * m + i) * NV + v] = e;
                    sum += e;
                    own = pick(place == i, exponent, own);
                }
                sums[r * NV + v] = sum;
                column[r * NV + v] = own - logarithm(sum);
            }
            log_sums(b, column, 0, v);
            continue;
        }
        log_sums(b, column, 1, v);
        for (int64_t i = 0; i < m; i++) of_better[i * NV + v] = (vd){0};
        for (int64_t r = 0; r < k; r++) {
            double factor = -1 - 2 * (double)r;
            vd g = column[r * NV + v], share = g / sums[r * NV + v];
            for (int64_t i = 0; i < m; i++) {
                vd by = only(place == i, g) - share * weight[(r * m + i) * NV + v];
                b->of_x[i * NV + v] += factor * by;
                of_better[i * NV + v] -= 2 * by;
            }
        }
        vd later = {0};
        for (int64_t i = m; i-- > 1;) {
            later += of_better[i * NV + v];
            vd by = only(i < number, (double)i * later);
            b->of_x[(i - 1) * NV + v] += by;
            b->of_x[i * NV + v] -= by;
        }
    }
}

static void run_operator(Block *b, int backward) {
    switch (b->spec->operator) {
    case NETWORK: network(b, backward); break;
    case LAPSUM: lapsum(b, backward); break;
    case KSUBSET: ksubset(b, backward); break;
    case SOFTSORT: softsort(b, backward); break;
    default: neuralsort(b, backward);
    }
}

/* log sum_j p_j T_j, at most 0, over j >= first, with -cross-entropy in place of the first log T if given; and what of it each
   log T has */
INLINE vd log_mean(const Block *b, const vd *p, int64_t first, const vd *instead, vd *shares, int v) {
    vd most = all(-1e300), sum = {0};
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        most = larger(most, pick(p[j * NV + v] > 0, log_t, all(-1e300)));
    }
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        vd part = only(p[j * NV + v] > 0, p[j * NV + v] * exponential(smaller(log_t - most, all(0))));
        shares[j * NV + v] = part;
        sum += part;
    }
    vd result = most + logarithm(sum);
    vl over = result > 0; /* the T of operators that are only row-stochastic can pass 1 */
    for (int64_t j = first; j < b->k; j++) shares[j * NV + v] = only(~over, shares[j * NV + v] / sum);
    return smaller(result, all(0));
}

/* The loss of each row from log T, P_K and the cross-entropy; with the slopes by log T and by the cross-entropy. */
static void shape(Block *b, const vd *p, const vd *cross_entropy, vd *loss, vd *of_cross_entropy, vd *shares) {
    const Spec *spec = b->spec;
    int64_t k = b->k;
    int softmax = spec->family != OPERATOR;
    EACH {
        of_cross_entropy[v] = (vd){0};
        if (spec->family == ERROR) {
            vd sum = {0};
            double power = spec->power, rest = 1 - spec->guide;
            for (int64_t j = 0; j < k; j++) {
                vd log_t = smaller(b->log_t[j * NV + v], all(0)), weight = rest * p[j * NV + v];
                vd t = exponential(power * log_t); /* T^power */
                vd error = power == 0 ? -log_t : (1 - t) / power;
                sum += weight * error;
                b->of_log_t[j * NV + v] = only(~(vl)(b->log_t[j * NV + v] > 0), -weight * t);
            }
            loss[v] = sum;
            if (spec->guide > 0) {
                double guide = spec->guide * (1 - spec->smoothing);
                loss[v] += guide * cross_entropy[v];
                of_cross_entropy[v] = all(guide);
            }
        } else if (k == 1 && softmax) { /* the softmax of the candidates alone */
            loss[v] = cross_entropy[v];
            of_cross_entropy[v] = all(1);
            b->of_log_t[v] = (vd){0};
        } else if (spec->family == SEPARATE) {
            vd later = {0};
            for (int64_t j = 1; j < k; j++) later += p[j * NV + v];
            vd mean = log_mean(b, p, 1, NULL, shares, v);
            vl some = later > 0;
            mean -= pick(some, logarithm(pick(some, later, all(1))), all(0));
            /* at most 0 after the division by the sum: what log_mean held was for the undivided one */
            vl over = mean > 0;
            mean = smaller(mean, all(0));
            loss[v] = p[v] * cross_entropy[v] - only(some, later * mean);
            of_cross_entropy[v] = p[v];
            b->of_log_t[v] = (vd){0};
            for (int64_t j = 1; j < k; j++) b->of_log_t[j * NV + v] = only(some & ~over, -later * shares[j * NV + v]);
        } else {
            int mixed = spec->family == MIXED;
            loss[v] = -log_mean(b, p, 0, mixed ? cross_entropy : NULL, shares, v);
            for (int64_t j = 0; j < k; j++) b->of_log_t[j * NV + v] = -shares[j * NV + v];
            if (mixed) {
                of_cross_entropy[v] = shares[v];
                b->of_log_t[v] = (vd){0};
            }
        }
    }
}

static int64_t room_of(const Spec *spec) {
    int64_t room = 4 * spec->m + 128;
    return (room < spec->n ? room : spec->n) + 64;
}

int64_t EXPORTED(arena_size)(const Spec *spec) {
    int64_t lanes = LANES * 8, m = spec->m, k = spec->k, room = room_of(spec);
    int64_t vectors = work_size(spec) + 2 * m + 5 * k + 16;
    return vectors * lanes + LANES * m * 8 + (k + 8) * LANES * 4 + room * 40 + spec->n * 4 + (spec->sorting ? LANES * 8 * spec->n : 0) + 64 * 64;
}

/* What is known of a row beside its candidates. */
typedef struct {
    float top, weight;
    int counts, nan;
    double score, sum;
    int64_t real;
    double shifted;
} Row;

/* Puts a row's candidates, best first among the others, where the operator wants them; returns the target's place. */
static int32_t arrange(const Spec *spec, const Kept *others, const void *row, int dtype, int32_t target, int32_t number,
                       int32_t *classes, float *scores, int32_t *rivals) {
    int64_t m = spec->m, count = m - 1;
    float own = score_at(row, dtype, target);
    int network = spec->operator == NETWORK;
    int32_t place = 0, behind = (int32_t)count;
    while (place < behind) {
        int32_t middle = (place + behind) / 2;
        if (others->score[middle] > own || (others->score[middle] == own && others->class[middle] < target))
            place = middle + 1;
        else
            behind = middle;
    }
    if (spec->operator == KSUBSET)
        place = (int32_t)count;
    else if (network && spec->wires == TARGET)
        place = spec->numbers[3 * number];
    if (network && spec->wires == GIVEN) {
        int32_t next = 0, sorted = place;
        if (m == spec->n) { /* from the last class to the first, padding at the end */
            for (int padded = 0; padded < 2; padded++)
                for (int64_t c = m; c-- > 0;) {
                    float score = score_at(row, dtype, c);
                    if ((score == -INFINITY) != padded) continue;
                    if (c == target) place = next;
                    classes[next] = (int32_t)c;
                    scores[next++] = score;
                }
        } else {
            for (int padded = 0; padded < 2; padded++)
                for (int64_t i = m; i-- > 0;) {
                    int64_t other = i - (i > sorted);
                    float score = i == sorted ? own : others->score[other];
                    if ((score == -INFINITY) != padded) continue;
                    if (i == sorted) place = next;
                    classes[next] = i == sorted ? target : others->class[other];
                    scores[next++] = score;
                }
        }
        for (int64_t j = 0; j < spec->k; j++) {
            rivals[j * LANES] = j < count ? -1 : -2;
            if (j < count && others->score[j] != -INFINITY)
                for (int32_t i = 0; i < m; i++)
                    if (classes[i] == others->class[j]) rivals[j * LANES] = i;
        }
        return place;
    }
    memcpy(classes, others->class, (size_t)place * 4);
    memcpy(scores, others->score, (size_t)place * 4);
    memcpy(classes + place + 1, others->class + place, (size_t)(count - place) * 4);
    memcpy(scores + place + 1, others->score + place, (size_t)(count - place) * 4);
    classes[place] = target;
    scores[place] = own;
    if (network)
        for (int64_t j = 0; j < spec->k; j++)
            rivals[j * LANES] = j >= count ? -2 : others->score[j] == -INFINITY ? -1 : (int32_t)(j + (j >= place));
    return place;
}

int EXPORTED(forward)(const Spec *spec, const Batch *batch, int64_t first, int64_t last, char *memory) {
    int64_t n = spec->n, m = spec->m, k = spec->k;
    Arena arena = {memory, NULL};
    Block b = {.spec = spec, .m = m, .k = k};
    b.x = VECTORS(m);
    b.of_x = VECTORS(m);
    b.log_t = VECTORS(k);
    b.of_log_t = VECTORS(k);
    vd *p = VECTORS(k), *shares = VECTORS(k), *cross_entropy = VECTORS(1), *loss = VECTORS(1), *of_ce = VECTORS(1);
    vd *candidate_sum = VECTORS(1), *candidate_top = VECTORS(1);
    b.work = VECTORS(work_size(spec));
    b.place = take(&arena, LANES * 4);
    b.number = take(&arena, LANES * 4);
    b.rivals = take(&arena, LANES * 4 * k);
    int32_t *classes = take(&arena, LANES * m * 4);
    float *scores = take(&arena, LANES * m * 4);
    int64_t room = room_of(spec);
    Kept kept = {.room = room - 64};
    kept.score = take(&arena, room * 4);
    kept.class = take(&arena, room * 4);
    Item *order = take(&arena, room * 8), *other = take(&arena, room * 8);
    float *whole = take(&arena, n * 4);
    float *rows_whole = NULL;
    int32_t *keys = NULL, *targets = NULL;
    if (spec->sorting) {
        rows_whole = take(&arena, LANES * n * 4);
        keys = take(&arena, LANES * n * 4);
        targets = take(&arena, LANES * 4);
    }
    int over_candidates = spec->family != OPERATOR && spec->family != ERROR && !spec->all_classes;
    int runs = !(k == 1 && over_candidates);
    int smoothed = spec->smoothing > 0 && spec->uses_softmax;
    for (int64_t start = first; start < last; start += LANES) {
        Row rows[LANES];
        int lanes = (int)(last - start < LANES ? last - start : LANES);
        b.padded = 0;
        if (spec->sorting) {
            for (int lane = 0; lane < LANES; lane++) {
                int64_t row = start + lane;
                int counts = lane < lanes && batch->target[row] != batch->ignore_index;
                targets[lane] = counts ? (int32_t)batch->target[row] : 0;
                if (counts)
                    read_all(row_of(batch->scores, batch->dtype, row * batch->stride), batch->dtype, n, rows_whole + lane * n);
                else
                    memset(rows_whole + lane * n, 0, (size_t)n * 4);
            }
            sort_block(spec, rows_whole, targets, keys);
        }
        for (int lane = 0; lane < LANES; lane++) {
            int64_t row = start + lane;
            Row *r = rows + lane;
            *r = (Row){0};
            int32_t *own_classes = classes + lane * m;
            float *own_scores = scores + lane * m;
            if (lane < lanes && batch->target[row] != batch->ignore_index) r->counts = 1;
            if (!r->counts) { /* anything that is harmless */
                for (int64_t i = 0; i < m; i++) ((double *)b.x)[i * LANES + lane] = 0, own_classes[i] = (int32_t)i, own_scores[i] = 0;
                for (int64_t j = 0; j < k; j++) ((double *)p)[j * LANES + lane] = 1.0 / (double)k, b.rivals[j * LANES + lane] = -1;
                b.place[lane] = 0;
                b.number[lane] = (int32_t)m;
                ((double *)cross_entropy)[lane] = 0;
                continue;
            }
            int32_t target = (int32_t)batch->target[row];
            const void *scores_of_row = row_of(batch->scores, batch->dtype, row * batch->stride);
            float own = score_at(scores_of_row, batch->dtype, target);
            if (own == -INFINITY) return PADDED_TARGET;
            r->weight = batch->weight ? batch->weight[target] : 1;
            Sums sums = {0};
            if (spec->sorting)
                r->top = sums_of(rows_whole + lane * n, n, spec->uses_softmax, smoothed, &kept.nan, &sums);
            else
                r->top = find(scores_of_row, batch->dtype, n, m, spec->uses_softmax, smoothed, &kept, whole, &sums);
            r->nan = kept.nan || own != own || r->top == INFINITY; /* inf - inf: what has overflown must show */
            if (r->nan) { /* the row's numbers are replaced in the end */
                kept.count = 0;
                for (int64_t i = 0; kept.count < m - 1; i++)
                    if (i != target) kept.score[kept.count] = 0, kept.class[kept.count++] = (int32_t)i;
            } else if (!spec->sorting) {
                /* the classes are in order */
                int64_t i = 0, behind = kept.count;
                while (i < behind) {
                    int64_t middle = (i + behind) / 2;
                    if (kept.class[middle] < target)
                        i = middle + 1;
                    else
                        behind = middle;
                }
                if (i < kept.count && kept.class[i] == target) {
                    kept.count--;
                    memmove(kept.score + i, kept.score + i + 1, (size_t)(kept.count - i) * 4);
                    memmove(kept.class + i, kept.class + i + 1, (size_t)(kept.count - i) * 4);
                }
            }
            kept.wanted = m - 1;
            if (!spec->sorting)
                sort(&kept, order, other);
            else if (!r->nan)
                unpack(keys, rows_whole + lane * n, lane, &kept);
            int32_t number = 1;
            while (number < m && kept.score[number - 1] != -INFINITY) number++;
            if (number < k) return TOO_FEW;
            b.number[lane] = number;
            b.padded |= number < m;
            b.place[lane] = arrange(spec, &kept, scores_of_row, batch->dtype, target, number, own_classes, own_scores, b.rivals + lane);
            double score = own, scale = 1 / spec->scale;
            if (r->nan) score = 0;
            double *x = (double *)b.x + lane;
            if (r->nan)
                for (int64_t i = 0; i < m; i++) x[i * LANES] = 0;
            else if (number < m)
                for (int64_t i = 0; i < m; i++)
                    x[i * LANES] = own_scores[i] == -INFINITY ? -1e30 : ((double)own_scores[i] - score) * scale;
            else
                for (int64_t i = 0; i < m; i++) x[i * LANES] = ((double)own_scores[i] - score) * scale;
            r->score = score;
            const double *p_k = batch->p_k;
            if (batch->p_k_of != OF_ALL) p_k += k * (batch->p_k_of == OF_CLASS ? target : row);
            for (int64_t j = 0; j < k; j++) ((double *)p)[j * LANES + lane] = p_k[j];
            if (batch->cross_entropy) ((double *)cross_entropy)[lane] = (double)batch->cross_entropy[row];
            if (spec->uses_softmax) {
                r->sum = sums.exponentials;
                r->real = sums.real;
                r->shifted = sums.shifted;
                ((double *)cross_entropy)[lane] = (double)r->top - score; /* and the logarithm of the sum, below */
            }
        }
        if (spec->uses_softmax)
            EACH {
                vd sum;
                for (int l = 0; l < BYTES / 8; l++) {
                    const Row *r = rows + v * (BYTES / 8) + l;
                    sum[l] = r->counts && !r->nan ? r->sum : 1;
                }
                cross_entropy[v] += logarithm(sum);
            }
        if (over_candidates)
            EACH {
                vd top = all(-1e300), sum = {0};
                for (int64_t i = 0; i < m; i++) top = larger(top, b.x[i * NV + v]);
                for (int64_t i = 0; i < m; i++) sum += exponential((b.x[i * NV + v] - top) * spec->scale);
                candidate_top[v] = top;
                candidate_sum[v] = sum;
                cross_entropy[v] = top * spec->scale + logarithm(sum);
            }
        int wants = batch->gradient != NULL;
        vd *before = NULL;
        if (over_candidates && wants) { /* a network changes the scores in place */
            before = b.of_x;
            for (int64_t i = 0; i < m * NV; i++) before[i] = exponential((b.x[i] - candidate_top[i % NV]) * spec->scale);
            for (int64_t lane = 0; lane < LANES; lane++)
                for (int64_t i = 0; i < m; i++)
                    scores[lane * m + i] = (float)(((double *)before)[i * LANES + lane] / ((double *)candidate_sum)[lane]);
        }
        if (runs)
            run_operator(&b, 0);
        else
            EACH b.log_t[v] = (vd){0};
        shape(&b, p, cross_entropy, loss, of_ce, shares);
        for (int lane = 0; lane < lanes; lane++) {
            const Row *r = rows + lane;
            double value = ((double *)loss)[lane];
            if (smoothed && r->counts) /* log sum exp less the mean score */
                value += spec->guide * spec->smoothing *
                         (((double *)cross_entropy)[lane] + r->score - (double)r->top - r->shifted / (double)r->real);
            batch->loss[start + lane] = !r->counts ? 0 : r->nan ? NAN : (float)(value * r->weight);
        }
        if (!wants) continue;
        memset(b.of_x, 0, (size_t)(m * LANES * 8));
        if (runs) run_operator(&b, 1);
        for (int lane = 0; lane < lanes; lane++) {
            const Row *r = rows + lane;
            int64_t row = start + lane;
            float *gradient = batch->gradient + row * m;
            const float *own = scores + lane * m;
            memcpy(batch->classes + row * m, classes + lane * m, (size_t)m * 4);
            if (!r->counts) {
                memset(gradient, 0, (size_t)m * 4);
                if (batch->of_rest) memset(batch->of_rest + 3 * row, 0, 12);
                if (batch->of_cross_entropy) batch->of_cross_entropy[row] = 0;
                continue;
            }
            if (batch->of_cross_entropy) batch->of_cross_entropy[row] = (float)((double *)of_ce)[lane];
            double by_ce = ((double *)of_ce)[lane] * r->weight, scale = r->weight / spec->scale;
            double share = 0, added = 0;
            if (spec->uses_softmax) {
                share = by_ce;
                if (smoothed) {
                    double amount = spec->guide * spec->smoothing * r->weight;
                    share += amount;
                    added = -amount / (double)r->real;
                }
                share /= r->sum;
            }
            const double *of_x = (const double *)b.of_x + lane;
            if (spec->uses_softmax) { /* padding has none: e^-inf is 0, and so is what the operator gives it */
                float *e = scores + lane * m;
                vf top = allf(r->top);
                int64_t i = 0;
                int32_t padding = b.number[lane] < m;
                for (; i + W <= m; i += W) {
                    vf x = load_f32(e + i), y = exponentialf(x - top);
                    if (padding) y = (vf)(((vi)y & (vi)(x > -INFINITY)) | ((vi)allf(-1) & ~(vi)(x > -INFINITY)));
                    store_f32(e + i, y);
                }
                for (; i < m; i++) e[i] = e[i] == -INFINITY ? -1 : exponentialf(allf(e[i] - r->top))[0];
                for (i = 0; i < m; i++)
                    gradient[i] = padding && e[i] < 0 ? 0 : (float)(of_x[i * LANES] * scale + share * (double)e[i] + added);
            } else if (over_candidates)
                for (int64_t i = 0; i < m; i++) gradient[i] = (float)(of_x[i * LANES] * scale + by_ce * (double)own[i]);
            else
                for (int64_t i = 0; i < m; i++) gradient[i] = (float)(of_x[i * LANES] * scale);
            int32_t place = b.place[lane];
            if (spec->uses_softmax)
                gradient[place] = (float)(of_x[place * LANES] * scale + share * (double)own[place] + added - by_ce);
            else if (over_candidates)
                gradient[place] = (float)(of_x[place * LANES] * scale + by_ce * ((double)own[place] - 1));
            if (r->nan)
                for (int64_t i = 0; i < m; i++) gradient[i] = NAN;
            if (batch->of_rest) {
                float *rest = batch->of_rest + 3 * row;
                rest[0] = r->top;
                rest[1] = r->nan ? NAN : (float)share;
                rest[2] = (float)added;
            }
        }
    }
    return FINE;
}

int EXPORTED(backward)(const Back *back, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        float factor = back->incoming[back->single ? 0 : row * back->incoming_stride];
        if (back->divisor) factor /= *back->divisor;
        if (back->dtype == FLOAT32)
            back_row_f32(back, row, factor);
        else if (back->dtype == BFLOAT16)
            back_row_bf16(back, row, factor);
        else
            back_row_f16(back, row, factor);
    }
    return FINE;
}

/* The classes of the m best scores of each row; descending if in order. */
int64_t EXPORTED(best_size)(int64_t n, int64_t m) {
    Spec spec = {.n = n, .m = m};
    return room_of(&spec) * 40 + n * 4 + 64 * 16;
}

int EXPORTED(best)(const void *scores, int dtype, int64_t stride, int64_t n, int64_t m, int in_order, int64_t *out,
                   int64_t first, int64_t last, char *memory) {
    Spec spec = {.n = n, .m = m};
    Arena arena = {memory, NULL};
    int64_t room = room_of(&spec);
    Kept kept = {.room = room - 64};
    kept.score = take(&arena, room * 4);
    kept.class = take(&arena, room * 4);
    Item *order = take(&arena, room * 8), *other = take(&arena, room * 8);
    float *whole = take(&arena, n * 4);
    for (int64_t row = first; row < last; row++) {
        Sums sums;
        find(row_of(scores, dtype, row * stride), dtype, n, m, 0, 0, &kept, whole, &sums);
        if (kept.nan) return STRANGE; /* it has no order here; the plain code has one */
        (void)in_order;
        sort(&kept, order, other);
        for (int64_t i = 0; i < m; i++) out[row * m + i] = kept.class[i];
    }
    return FINE;
}

/* E_0 … E_k of the k factors but one (-1: all of them). */
static void polynomials(const double *factors, int k, int without, double *e) {
    e[0] = 1;
    for (int i = 1; i <= k; i++) e[i] = 0;
    for (int f = 0; f < k; f++)
        if (f != without)
            for (int i = k; i > 0; i--) e[i] += factors[f] * e[i - 1];
}

/* The loss of a row, and the slopes by the first k others, by the target, and by x^1 … x^k of the rest. The formulae are those
   of anyk/baselines.py. */
static double smooth_loss(const SmoothSpec *spec, const float *first, int64_t found, float own, const double *sums,
                          double *by_first, double *by_own, double *by_powers) {
    int k = (int)spec->k;
    double t = spec->temperature, rate = 1 / ((double)k * t), last = (double)first[k - 1];
    for (int i = 0; i < k; i++) by_first[i] = by_powers[i] = 0;
    *by_own = 0;
    double lead = spec->margin + (last - (double)own) / k;
    /* the k-th and the (k+1)-th of all scores, the target among them */
    double next = found > k ? (double)first[k] : -INFINITY, before = k > 1 ? (double)first[k - 2] : INFINITY;
    double kth = (double)own > last ? ((double)own < before ? (double)own : before) : last;
    double after = (double)own > last ? last : (double)own > next ? (double)own : next;
    if (kth - after >= spec->gap) {
        if (lead >= 0) by_first[k - 1] = 1.0 / k, *by_own = -1.0 / k;
        return lead > 0 ? lead : 0;
    }
    double z[MOST_K], of_z[MOST_K + 1], of_x[MOST_K + 1], without[MOST_K + 1];
    for (int i = 0; i < k; i++) z[i] = exponential(all(rate * (last - (double)first[i])))[0];
    polynomials(z, k, -1, of_z);
    of_x[0] = 1;
    for (int i = 1; i <= k; i++) {
        double sum = 0;
        for (int j = 1; j <= i; j++) sum += (j % 2 ? sums[j - 1] : -sums[j - 1]) * of_x[i - j];
        of_x[i] = sum / i;
    }
    double numerator = 0, denominator = 0;
    for (int i = 0; i <= k; i++) numerator += of_z[i] * of_x[i];
    for (int i = 0; i < k; i++) denominator += of_z[i + 1] * of_x[i];
    double u = lead / t + logarithm(all(numerator / denominator))[0];
    double e = exponential(all(u > 0 ? -u : u))[0];
    double loss = t * ((u > 0 ? u : 0) + logarithm(all(1 + e))[0]), share = (u > 0 ? 1 : e) / (1 + e);
    *by_own = -share / k;
    for (int i = 0; i < k; i++) {
        polynomials(z, k, i, without);
        double of_numerator = 0, of_denominator = 0;
        for (int j = 1; j <= k; j++) of_numerator += without[j - 1] * of_x[j];
        for (int j = 0; j < k; j++) of_denominator += without[j] * of_x[j];
        by_first[i] = -share / k * z[i] * (of_numerator / numerator - of_denominator / denominator);
    }
    for (int j = 1; j <= k; j++) {
        double sum = 0;
        for (int i = j; i <= k; i++)
            sum += (of_z[i] / numerator - (i < k ? of_z[i + 1] / denominator : 0)) * of_x[i - j];
        by_powers[j - 1] = share / k * (j % 2 ? sum : -sum);
    }
    return loss;
}

int EXPORTED(smooth)(const SmoothSpec *spec, const Batch *batch, int64_t first, int64_t last, char *memory) {
    int64_t n = spec->n, k = spec->k;
    Spec sizes = {.n = n, .m = k + 2 < n ? k + 2 : n};
    Arena arena = {memory, NULL};
    int64_t room = room_of(&sizes);
    Kept kept = {.room = room - 64};
    kept.score = take(&arena, room * 4);
    kept.class = take(&arena, room * 4);
    Item *order = take(&arena, room * 8), *other = take(&arena, room * 8);
    float *whole = take(&arena, n * 4);
    double rate = 1 / ((double)k * spec->temperature);
    for (int64_t row = first; row < last; row++) {
        float *gradient = batch->gradient ? batch->gradient + row * (k + 1) : NULL;
        int32_t *classes = batch->gradient ? batch->classes + row * (k + 1) : NULL;
        float *rest = batch->gradient ? batch->of_rest + row * (k + 1) : NULL;
        int64_t target = batch->target[row];
        if (target == batch->ignore_index) {
            batch->loss[row] = 0;
            for (int64_t i = 0; gradient && i <= k; i++) gradient[i] = rest[i] = 0, classes[i] = (int32_t)i;
            continue;
        }
        const void *scores = row_of(batch->scores, batch->dtype, row * batch->stride);
        float own = score_at(scores, batch->dtype, target);
        if (own == -INFINITY) return PADDED_TARGET;
        Sums unused;
        find(scores, batch->dtype, n, sizes.m, 0, 0, &kept, whole, &unused);
        kept.wanted = sizes.m;
        if (kept.nan || own != own) return STRANGE;
        sort(&kept, order, other);
        int64_t found = 0;
        for (int64_t i = 0; i < kept.count; i++)
            if (kept.class[i] != target) kept.score[found] = kept.score[i], kept.class[found++] = kept.class[i];
        float kth = kept.score[k - 1];
        if (kth == -INFINITY) return TOO_FEW; /* or just enough: the plain code knows */
        double sums[MOST_K] = {0}, by_first[MOST_K], by_own, by_powers[MOST_K];
        int64_t equal;
        if (batch->dtype == FLOAT32)
            equal = powers_f32(scores, n, (int)k, kth, (float)rate, sums);
        else if (batch->dtype == BFLOAT16)
            equal = powers_bf16(scores, n, (int)k, kth, (float)rate, sums);
        else
            equal = powers_f16(scores, n, (int)k, kth, (float)rate, sums);
        for (int64_t i = 0; i < k; i++) equal -= kept.score[i] == kth;
        equal -= own == kth;
        double x = own < kth ? (double)exponentialf(allf((own - kth) * (float)rate))[0] : 0, power = x;
        for (int64_t j = 0; j < k; j++) {
            double sum = sums[j] - power;
            sums[j] = (sum > 0 ? sum : 0) + (double)equal;
            power *= x;
        }
        double weight = batch->weight ? (double)batch->weight[target] : 1;
        double loss = smooth_loss(spec, kept.score, found, own, sums, by_first, &by_own, by_powers);
        batch->loss[row] = (float)(weight * loss);
        if (!gradient) continue;
        rest[0] = kth;
        for (int64_t i = 0; i < k; i++) {
            gradient[i] = (float)(weight * by_first[i]);
            classes[i] = kept.class[i];
            rest[1 + i] = (float)(weight * by_powers[i]);
        }
        gradient[k] = (float)(weight * by_own);
        classes[k] = (int32_t)target;
    }
    return FINE;
}
