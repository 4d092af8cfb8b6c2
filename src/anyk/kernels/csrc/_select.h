/* Finding and sorting the best scores of a row.

   The first pass takes the maximum of each of many groups of scores. What enough of these maxima reach, enough scores reach: this
   is the threshold. The second pass keeps what reaches it, little more than was asked for, and that is sorted. */

/* The scores that reach a threshold, with their classes. */
typedef struct {
    vf threshold; /* the same number everywhere */
    int64_t count;
    int64_t wanted;   /* how many of the best are */
    int64_t capacity; /* beyond it, the best are picked and the threshold is raised */
    float *score;
    int32_t *class;
    int has_nan;
} Kept;

/* Sums over all scores of a row. Padding, which is -inf, is not counted. */
typedef struct {
    double exp_sum;     /* of exp(score - maximum) */
    double shifted_sum; /* of score - maximum */
    int64_t real_count;
} Sums;

/* Integers in the order of the floats. */
INLINE int32_t key_of(float x) {
    int32_t bits;
    x += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & INT32_MAX);
}
INLINE float score_of_key(int32_t key) {
    key ^= (key >> 31) & INT32_MAX;
    float x;
    memcpy(&x, &key, 4);
    return x;
}

/* The largest key that at least `wanted` of the scores reach, by bisection. It ends early, with a lower key, where at most `slack`
   more scores reach that, or where it is less than `step` lower: keys of different scores are `step` apart. */
static int32_t threshold_key(const float *scores, int64_t count, int64_t wanted, int64_t slack, int32_t step) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        int32_t key = key_of(scores[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    while ((int64_t)high - low >= step) { /* low is reached by at least `wanted`, high + 1 by fewer */
        int32_t middle = (int32_t)(((int64_t)low + high + 1) >> 1);
        int64_t reached = 0;
        int64_t i = 0;
        vi sums = {0}, limit = splati(middle);
        for (; i + W <= count; i += W) {
            vi bits = (vi)((vf)*(const vfu *)(scores + i) + 0.0f);
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
    for (int64_t i = 0; i < kept->count; i++) kept->has_nan |= kept->score[i] != kept->score[i];
    int32_t minimum = threshold_key(kept->score, kept->count, kept->wanted, 0, 1);
    int64_t above = 0, count = 0;
    for (int64_t i = 0; i < kept->count; i++) above += key_of(kept->score[i]) > minimum;
    int64_t ties = kept->wanted - above;
    for (int64_t i = 0; i < kept->count; i++) {
        int32_t key = key_of(kept->score[i]);
        if (key > minimum || (key == minimum && ties-- > 0)) {
            kept->score[count] = kept->score[i];
            kept->class[count++] = kept->class[i];
        }
    }
    kept->count = count;
    /* NaN in, NaN out: nothing more needs to be found. Above +inf there is nothing but NaN. */
    if (kept->has_nan || minimum >= key_of(INFINITY))
        kept->threshold = splatf(INFINITY), kept->has_nan |= minimum > key_of(INFINITY);
    else
        kept->threshold = splatf(score_of_key(minimum + 1));
    if (kept->threshold[0] == INFINITY && kept->count > kept->capacity) kept->count = kept->capacity;
}

/* The next 2 W scores of a row. Which of the two vectors has which of them differs between the dtypes: in_order() takes two masks
   of their elements to one mask in the order of the row. */
typedef struct {
    vf a, b;
} Pair;

/* How far apart the keys of two different scores of the same sign are, at least. */
enum { STEP_f32 = 1, STEP_bf16 = 1 << 16, STEP_f16 = 1 << 13 };
enum { CHUNK = 8192 }; /* scores that are read at once: a part of the first cache */

/* float32 */
INLINE vf load_f32(const float *p) { return (vf)*(const vfu *)p; }
INLINE float widen_f32(float x) { return x; }
INLINE void store_f32(float *p, vf x) { *(vfu *)p = (vfu)x; }
INLINE float narrow_f32(float x) { return x; }
INLINE Pair load_pair_f32(const float *p) { return (Pair){load_f32(p), load_f32(p + W)}; }
INLINE void store_pair_f32(float *p, Pair x) { store_f32(p, x.a), store_f32(p + W, x.b); }
INLINE void stream_pair_f32(float *p, Pair x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)x.a), _mm512_stream_ps(p + W, (__m512)x.b);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)x.a), _mm256_stream_ps(p + W, (__m256)x.b);
#elif defined(__SSE2__)
    _mm_stream_ps(p, (__m128)x.a), _mm_stream_ps(p + W, (__m128)x.b);
#else
    store_pair_f32(p, x);
#endif
}
INLINE uint64_t in_order_f32(uint32_t a, uint32_t b) { return (uint64_t)b << W | a; }
INLINE void streams_end(void) {
#if defined(__SSE2__)
    _mm_sfence(); /* the candidates' gradients, which are written over these next, must not be overtaken */
#endif
}
#define S float
#define NAME(x) x##_f32
#include "_dtype.h"

/* bfloat16: the upper half of a float */
typedef uint16_t bf16;
#define LITTLE_ENDIAN_HALVES (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
INLINE float widen_bf16(bf16 x) {
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
/* Two scores are one integer, of which one is the upper half already. */
typedef uint32_t vuiu __attribute__((vector_size(BYTES), aligned(2), may_alias));
INLINE Pair load_pair_bf16(const bf16 *p) {
    vui both = (vui)*(const vuiu *)p, upper = both & 0xffff0000, lower = both << 16;
    return LITTLE_ENDIAN_HALVES ? (Pair){(vf)lower, (vf)upper} : (Pair){(vf)upper, (vf)lower};
}
INLINE void store_pair_bf16(bf16 *p, Pair x) {
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)x.b, (__m512)x.a);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, halves));
#else
    /* NaN stays NaN: the lower half of those that get here is zero */
    vui a = (vui)x.a, b = (vui)x.b;
    a += 0x7fff + ((a >> 16) & 1);
    b += 0x7fff + ((b >> 16) & 1);
    *(vuiu *)p = (vuiu)(LITTLE_ENDIAN_HALVES ? (b & 0xffff0000) | a >> 16 : (a & 0xffff0000) | b >> 16);
#endif
}
INLINE void stream_pair_bf16(bf16 *p, Pair x) { store_pair_bf16(p, x); }
INLINE uint32_t spread(uint32_t x) { /* bit l to place 2 l */
    x = (x | x << 8) & 0x00ff00ff;
    x = (x | x << 4) & 0x0f0f0f0f;
    x = (x | x << 2) & 0x33333333;
    return (x | x << 1) & 0x55555555;
}
INLINE uint64_t in_order_bf16(uint32_t a, uint32_t b) { return spread(a) | spread(b) << 1; }
#define S bf16
#define NAME(x) x##_bf16
#include "_dtype.h"

/* float16 */
typedef uint16_t f16;
#if defined(__F16C__)
INLINE float widen_f16(f16 x) { return _cvtsh_ss(x); }
INLINE f16 narrow_f16(float x) { return _cvtss_sh(x, 0); }
#else
INLINE float widen_f16(f16 x) {
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
INLINE Pair load_pair_f16(const f16 *p) { return (Pair){load_f16(p), load_f16(p + W)}; }
INLINE void store_pair_f16(f16 *p, Pair x) { store_f16(p, x.a), store_f16(p + W, x.b); }
INLINE void stream_pair_f16(f16 *p, Pair x) { store_pair_f16(p, x); }
INLINE uint64_t in_order_f16(uint32_t a, uint32_t b) { return (uint64_t)b << W | a; }
#define S f16
#define NAME(x) x##_f16
#include "_dtype.h"

INLINE size_t item_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }
INLINE const void *row_of(const void *scores, int dtype, int64_t offset) {
    return (const char *)scores + offset * (int64_t)item_size(dtype);
}
static float score_at(const void *row, int dtype, int64_t i) {
    if (dtype == FLOAT32) return ((const float *)row)[i];
    return dtype == BFLOAT16 ? widen_bf16(((const bf16 *)row)[i]) : widen_f16(((const f16 *)row)[i]);
}

/* All scores of a row in float32. */
static void widen_row(const void *row, int dtype, int64_t n, float *scores) {
    if (dtype == FLOAT32)
        memcpy(scores, row, (size_t)n * 4);
    else
        for (int64_t i = 0; i < n; i++) scores[i] = score_at(row, dtype, i);
}

/* The function for a dtype. */
#define BY_DTYPE(dtype, function, ...)                              \
    ((dtype) == FLOAT32    ? function##_f32(__VA_ARGS__)            \
     : (dtype) == BFLOAT16 ? function##_bf16(__VA_ARGS__)           \
                           : function##_f16(__VA_ARGS__))

/* Keeps the `wanted` best scores of a row, and perhaps some more, in the order of their classes. Returns the largest score and,
   with `sums`, sums over the row: of the shifted scores only if smoothed. `widened` has room for n floats. */
static float find_best(const void *row, int dtype, int64_t n, int64_t wanted, int sums, int smoothed, Kept *kept,
                       float *widened, Sums *out) {
    int groups = 2;
    while (groups < 16 && groups * W < 4 * wanted) groups *= 2;
    float maximum;
    kept->count = 0;
    kept->has_nan = 0;
    kept->wanted = wanted;
    *out = (Sums){0};
    if (wanted < n && n > groups * W * 2 && groups * W >= wanted + wanted / 4)
        maximum = BY_DTYPE(dtype, scan, row, n, groups, sums, smoothed, kept, out);
    else {
        maximum = BY_DTYPE(dtype, maximum, row, n);
        if (wanted >= n) {
            BY_DTYPE(dtype, keep_all, row, n, kept);
            if (sums) BY_DTYPE(dtype, collect, row, 0, n, NULL, maximum, sums, smoothed, out);
            return maximum;
        }
        widen_row(row, dtype, n, widened);
        kept->threshold = splatf(score_of_key(threshold_key(widened, n, wanted, wanted / 8 + 2, 1)));
        if (kept->threshold[0] != kept->threshold[0]) kept->threshold = splatf(INFINITY), kept->has_nan = 1;
        BY_DTYPE(dtype, collect, row, 0, n, kept, maximum, sums, smoothed, out);
    }
    for (int64_t i = 0; i < kept->count; i++) kept->has_nan |= kept->score[i] != kept->score[i];
    return maximum;
}

/* The largest of few scores, with their sums, and whether there is NaN among them. */
static float max_and_sums(const float *scores, int64_t n, int sums, int smoothed, int *has_nan, Sums *out) {
    int any_nan = 0;
    for (int64_t i = 0; i < n; i++) any_nan |= scores[i] != scores[i];
    *has_nan = any_nan;
    float maximum = maximum_f32(scores, n);
    if (sums) collect_f32(scores, 0, n, NULL, maximum, 1, smoothed, out);
    return maximum;
}

typedef struct {
    int32_t key, class;
} Item;

/* Stable, descending. */
static void merge_sort(Item *items, Item *buffer, int64_t count) {
    for (int64_t width = 1; width < count; width *= 2) {
        for (int64_t start = 0; start < count; start += 2 * width) {
            int64_t middle = start + width < count ? start + width : count;
            int64_t end = start + 2 * width < count ? start + 2 * width : count;
            int64_t i = start, j = middle;
            for (int64_t at = start; at < end; at++)
                buffer[at] = j >= end || (i < middle && items[i].key >= items[j].key) ? items[i++] : items[j++];
        }
        memcpy(items, buffer, (size_t)count * sizeof(Item));
    }
}

/* How many scores are above each score of the vectors from *g on, `together` of them at once. */
INLINE void rank_vectors(const Kept *kept, const int together, vi *ranks, int *g) {
    vf x[4];
    vi above[4];
    for (int u = 0; u < together; u++) x[u] = load_f32(kept->score + (*g + u) * W), above[u] = (vi){0};
    for (int64_t j = 0; j < kept->count; j++) {
        vf y = splatf(kept->score[j]);
        for (int u = 0; u < together; u++) above[u] = count_if_above(above[u], y, x[u]);
    }
    for (int u = 0; u < together; u++) ranks[(*g)++] = above[u];
}

/* Sorts what was kept, descending, the earlier class first among equals, and keeps the wanted ones. Up to 320 scores are ranked
   by comparing each with all. There must be room for W more scores than were kept, and in both arrays for as many items. */
static void sort_kept(Kept *kept, Item *items, Item *buffer) {
    int64_t count = kept->count, wanted = kept->wanted < count ? kept->wanted : count;
    if (count > wanted + wanted / 4 + 2 * W) {
        compact(kept);
        count = kept->count;
    }
    if (count <= 320) {
        vi ranks[320 / W + 1];
        int vectors = (int)((count + W - 1) / W);
        for (int64_t i = count; i < vectors * W; i++) kept->score[i] = -INFINITY;
        for (int g = 0; g < vectors;)
            if (vectors - g >= 4)
                rank_vectors(kept, 4, ranks, &g);
            else if (vectors - g >= 2)
                rank_vectors(kept, 2, ranks, &g);
            else
                rank_vectors(kept, 1, ranks, &g);
        const int32_t *rank = (const int32_t *)ranks;
        for (int64_t i = 0; i < count; i++) items[i].class = -1;
        for (int64_t i = 0; i < count; i++) {
            int32_t r = rank[i];
            while (items[r].class >= 0) r++; /* equals have the same rank: the later one goes behind */
            items[r].key = (int32_t)i;
            items[r].class = kept->class[i];
        }
        float *sorted = (float *)buffer;
        for (int64_t i = 0; i < wanted; i++) sorted[i] = kept->score[items[i].key];
        for (int64_t i = 0; i < wanted; i++) {
            kept->score[i] = sorted[i];
            kept->class[i] = items[i].class;
        }
    } else {
        for (int64_t i = 0; i < count; i++) items[i] = (Item){key_of(kept->score[i]), kept->class[i]};
        merge_sort(items, buffer, count);
        for (int64_t i = 0; i < wanted; i++) {
            kept->score[i] = score_of_key(items[i].key);
            kept->class[i] = items[i].class;
        }
    }
    kept->count = wanted;
}

/* Sorts the scores of LANES rows at once, descending, the earlier class first among equals, each row's `last` class behind all.
   The lowest bits of a key are replaced by the class: scores that differ in these bits alone are put right by unpack_sorted(). */
static void sort_block(const Spec *spec, const float *scores, const int32_t *last, int32_t *keys) {
    int64_t n = spec->n;
    for (int lane = 0; lane < LANES; lane++) {
        const float *row = scores + lane * n;
        for (int64_t i = 0; i < n; i++) {
            keys[i * LANES + lane] = (key_of(row[i]) & ~(MOST_SORTED - 1)) | (int32_t)(MOST_SORTED - 1 - i);
        }
        keys[last[lane] * LANES + lane] = INT32_MIN | (MOST_SORTED - 1 - last[lane]);
    }
    const int32_t *pair = spec->sorter;
    for (int64_t number = 0; number < spec->sorter_size; number++, pair += 2) {
        vi *upper = (vi *)(keys + pair[0] * LANES), *lower = (vi *)(keys + pair[1] * LANES);
        for (int v = 0; v < LANES / W; v++) {
            vi a = upper[v], b = lower[v];
            upper[v] = larger_int(a, b);
            lower[v] = smaller_int(a, b);
        }
    }
}

/* A row's sorted scores, without the class that was put last. */
static void unpack_sorted(const int32_t *keys, const float *row, int lane, Kept *kept) {
    for (int64_t i = 0; i < kept->wanted; i++) {
        int32_t class = MOST_SORTED - 1 - (keys[i * LANES + lane] & (MOST_SORTED - 1));
        kept->class[i] = class;
        kept->score[i] = row[class];
    }
    kept->count = kept->wanted;
    /* Almost always they are in order by now. Behind the scores there is room for a vector. */
    int undecided = 0;
    kept->score[kept->wanted] = -INFINITY;
    for (int64_t i = 0; i < kept->wanted; i += W) {
        uint32_t not_less = not_below(load_f32(kept->score + i + 1), load_f32(kept->score + i));
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
