/* Finding and sorting the best scores of a row.

   The first pass takes the maximum of each of many groups of scores. What enough of these maxima reach, enough scores reach: this
   is the limit. The second pass keeps what reaches it, little more than was asked for, and that is sorted. */

enum { CHUNK = 8192 }; /* scores that are read at once: a part of the first cache */
enum { INFINITE_BITS = 0x7f800000 }; /* of infinity, without the sign; those of NaN are more */

/* ---- scores as integers in the same order ---- */

INLINE int32_t key_of(float x) {
    int32_t bits = (int32_t)bits_of(x + 0.0f); /* -0 becomes 0 */
    return bits ^ ((bits >> 31) & INT32_MAX);
}
INLINE float score_of_key(int32_t key) { return of_bits((uint32_t)(key ^ ((key >> 31) & INT32_MAX))); }

/* How far apart the keys of two different scores of the same sign are, at least. */
static int32_t key_step(int dtype) { return dtype == FLOAT32 ? 1 : dtype == BFLOAT16 ? 1 << 16 : 1 << 13; }

/* The largest key that at least `wanted` of the scores reach, by bisection. It ends early, with a lower key, where at most `slack`
   more scores reach that, or where it is less than `step` lower. */
static int32_t threshold_key(const float *scores, int64_t count, int64_t wanted, int64_t slack, int32_t step) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        int32_t key = key_of(scores[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    while ((int64_t)high - low >= step) { /* low is reached by at least `wanted`, high + 1 by fewer */
        int32_t middle = (int32_t)(((int64_t)low + high + 1) >> 1);
        int64_t i = 0;
        vi sums = {0}, limit = splati(middle);
        for (; i + W <= count; i += W) {
            vi bits = (vi)(load_f32(scores + i) + 0.0f);
            sums -= (vi)((bits ^ ((bits >> 31) & INT32_MAX)) >= limit);
        }
        int64_t reached = sum_of(sums);
        for (; i < count; i++) reached += key_of(scores[i]) >= middle;
        if (reached >= wanted) {
            low = middle;
            if (reached <= wanted + slack) break;
        } else
            high = middle - 1;
    }
    return low;
}

/* ---- groups ---- */

/* So many that the m best of n are in different ones as a rule; an odd number of vectors, since rows have even periods. Where that
   is nearly all of the row, each score is a group. */
static int64_t groups_for(int64_t n, int64_t m) {
    int64_t vectors = (4 * m + W - 1) / W | 1, all = (n + W - 1) / W;
    return W * (2 * vectors < all ? vectors : all);
}

/* The maxima of the groups [first, last) of `groups` strided ones, or of what they were and that, if it goes on. `turned`: of the
   scores with the other sign. Returns the largest bits of a score without its sign. */
INLINE int32_t pass_groups(const void *row, const int dtype, int64_t n, int turned, int64_t groups, int64_t first, int64_t last,
                           int goes_on, float *maxima) {
    const int64_t together = 8 * groups; /* of so many scores, those of a group are read at once */
    vi sign = splati(turned ? INT32_MIN : 0), most = {0};
    for (int64_t start = 0; start + first < n; start += together, goes_on = 1)
        for (int64_t c = first; c < last; c += W) {
            vf top = goes_on ? load_f32(maxima + c) : splatf(-INFINITY);
            int64_t i = start + c, end = i + together, whole = end < n - W + 1 ? end : n - W + 1;
            for (; i < whole; i += groups) {
                vf x = (vf)((vi)load(row, dtype, i) ^ sign);
                most = larger_int(most, (vi)absolutef(x));
                top = largerf(x, top);
            }
            for (int l = 0; i < end && i + l < n; l++) { /* less than a vector */
                float score = score_at(row, dtype, i + l);
                most[0] = larger_int(most, splati((int32_t)bits_of(fabsf(score))))[0];
                score = turned ? -score : score;
                top[l] = score > top[l] ? score : top[l];
            }
            store_f32(maxima + c, top);
        }
    int32_t largest = 0;
    for (int l = 0; l < W; l++) largest = most[l] > largest ? most[l] : largest;
    return largest;
}

static float largest_score(const float *scores, int64_t count) {
    vf top = splatf(-INFINITY);
    for (int64_t i = 0; i < count; i += W) top = largerf(load_some(scores, FLOAT32, i, count), top);
    return largest_of(top);
}

/* ---- what is kept ---- */

/* The scores that reach a limit, with their classes, in the order of the classes. */
typedef struct {
    float limit;
    int64_t count;
    int64_t wanted;   /* how many of the best are */
    int64_t capacity; /* beyond it, the best are picked and the limit is raised */
    float *score;
    int32_t *class;
} Kept;

/* Sums over all scores of a row. Padding, which is -inf, is not counted. */
typedef struct {
    double exp_sum;     /* of exp(score - maximum) */
    double shifted_sum; /* of score - maximum */
    int64_t real_count;
} Sums;

/* Memory to find and sort the best of n scores in. */
typedef struct {
    Kept kept;
    struct Item {
        int32_t key, class;
    } * items;
    float *maxima, *sorted;
} Finder;

static void lay_out_finder(Finder *finder, int64_t n, int64_t m, Arena *arena) {
    int64_t capacity = 4 * m + 128 < n ? 4 * m + 128 : n;
    int64_t room = capacity + 64; /* a vector may be added before it is seen that there are too many */
    finder->kept.capacity = capacity;
    finder->kept.score = take(arena, room * 4);
    finder->kept.class = take(arena, room * 4);
    finder->items = take(arena, room * 8);
    finder->sorted = take(arena, room * 4);
    finder->maxima = take(arena, groups_for(n, m) * 4);
}

/* Keeps the best of what was collected, the earlier of equals, and raises the limit above them. */
static void compact(Kept *kept) {
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
    kept->limit = score_of_key(minimum + 1); /* above infinity it is NaN, which nothing reaches */
}

/* Keeps those of a row that are marked by bits, from `first` on. */
INLINE void keep_hits(uint64_t hits, const void *row, const int dtype, int64_t first, Kept *kept) {
    for (; hits; hits &= hits - 1) {
        int64_t c = first + __builtin_ctzll(hits);
        kept->score[kept->count] = score_at(row, dtype, c);
        kept->class[kept->count++] = (int32_t)c;
    }
    if (kept->count > kept->capacity) compact(kept);
}

/* Sums of a few vectors. */
typedef struct {
    vf exponentials, shifted;
    vi tops, reals;
} VectorSums;
INLINE void add_vector(vf x, float maximum, const int smoothed, VectorSums *sums) {
    /* The largest, whose exponentials are 1, are counted apart: added to them the others would lose digits, and if the target is the
       largest, the others are its gradient. */
    vf shifted = x - maximum;
    vi is_top = shifted == 0, is_real = x > -INFINITY;
    sums->tops -= is_top;
    sums->exponentials += onlyf(~is_top, exponentialf(shifted));
    if (!smoothed) return;
    sums->reals -= is_real;
    sums->shifted += onlyf(is_real, shifted);
}

/* Of the scores [first, last): keeps what reaches the limit, with `keeps`; adds to the sums, which are relative to the maximum, with
   `adds`. Together, since the processor computes exponentials while it finds out which way a branch goes. */
INLINE void pass_collect(const void *row, const int dtype, int64_t first, int64_t last, float maximum, const int keeps,
                         const int adds, const int smoothed, Kept *kept, Sums *sums) {
    for (int64_t i = first; i < last;) {
        VectorSums some = {0};
        for (int64_t end = i + FEW < last ? i + FEW : last - 2 * W + 1; i < end; i += 2 * W) {
            vf a = load(row, dtype, i), b = load(row, dtype, i + W);
            if (keeps) {
                uint64_t hits = reaches(a, splatf(kept->limit)) | (uint64_t)reaches(b, splatf(kept->limit)) << W;
                if (__builtin_expect(hits != 0, 0)) keep_hits(hits, row, dtype, i, kept);
            }
            if (!adds) continue;
            __builtin_prefetch((const char *)row + (i + CHUNK) * item_size(dtype)); /* the next chunk comes meanwhile */
            __builtin_prefetch((const char *)row + (i + W + CHUNK) * item_size(dtype));
            add_vector(a, maximum, smoothed, &some);
            add_vector(b, maximum, smoothed, &some);
        }
        for (; i < last && i + 2 * W > last; i += W) { /* the end of the row */
            vf x = load_some(row, dtype, i, last);
            uint32_t there = last - i < W ? (1u << (last - i)) - 1 : ~0u;
            if (keeps) keep_hits(reaches(x, splatf(kept->limit)) & there, row, dtype, i, kept);
            if (adds) add_vector(x, maximum, smoothed, &some);
        }
        if (!adds) continue;
        sums->exp_sum += total_of(some.exponentials) + sum_of(some.tops);
        sums->shifted_sum += total_of(some.shifted);
        sums->real_count += sum_of(some.reals);
    }
}
static void collect(const void *row, int dtype, int64_t first, int64_t last, float maximum, int keeps, int smoothed, Kept *kept,
                    Sums *sums) {
    if (!sums)
        FOR_DTYPE(dtype, pass_collect(row, DTYPE, first, last, maximum, 1, 0, 0, kept, sums));
    else if (smoothed)
        FOR_DTYPE(dtype, pass_collect(row, DTYPE, first, last, maximum, keeps, 1, 1, kept, sums));
    else if (keeps)
        FOR_DTYPE(dtype, pass_collect(row, DTYPE, first, last, maximum, 1, 1, 0, kept, sums));
    else
        FOR_DTYPE(dtype, pass_collect(row, DTYPE, first, last, maximum, 0, 1, 0, kept, sums));
}

/* Keeps all scores. Returns the largest one, NaN if there is NaN. */
static float keep_all(const void *row, int dtype, int64_t n, Kept *kept) {
    int has_nan = 0;
    widen_row(row, dtype, n, kept->score);
    for (int64_t i = 0; i < n; i++) {
        kept->class[i] = (int32_t)i;
        has_nan |= kept->score[i] != kept->score[i];
    }
    kept->count = kept->wanted = n;
    return has_nan ? NAN : largest_score(kept->score, n);
}

/* Keeps the `wanted` best scores of a row, and perhaps some more. Returns the largest score, NaN if there is NaN; in `sums`, unless
   it is NULL, the sums over the row, of the shifted scores only if smoothed. Those of a long row are made together with the maxima,
   chunk by chunk, while the chunk is in the first cache. */
static float find_best(const void *row, int dtype, int64_t n, int64_t wanted, Finder *finder, Sums *sums, int smoothed) {
    Kept *kept = &finder->kept;
    int64_t groups = groups_for(n, wanted);
    int in_chunks = sums && n >= 2 * CHUNK && groups <= CHUNK;
    float maximum = -INFINITY;
    if (sums) *sums = (Sums){0};
    if (wanted == n) {
        maximum = keep_all(row, dtype, n, kept);
        if (sums) collect(row, dtype, 0, n, maximum, 0, smoothed, kept, sums);
        return maximum;
    }
    for (int64_t first = 0, last; first < n; first = last) {
        last = !in_chunks || n - first < 2 * CHUNK ? n : first + CHUNK;
        int32_t bits;
        FOR_DTYPE(dtype, bits = pass_groups(row_of(row, dtype, first), DTYPE, last - first, 0, groups, 0, groups, first > 0,
                                            finder->maxima));
        if (bits > INFINITE_BITS) return NAN;
        float before = maximum;
        maximum = largest_score(finder->maxima, groups);
        if (!in_chunks || maximum == -INFINITY) continue;
        double shift = before == -INFINITY ? 0 : (double)before - (double)maximum;
        sums->exp_sum *= exp(shift);
        sums->shifted_sum += shift * (double)sums->real_count;
        collect(row, dtype, first, last, maximum, 0, smoothed, kept, sums);
    }
    int64_t count = groups < n ? groups : n;
    kept->count = 0, kept->wanted = wanted;
    kept->limit = score_of_key(threshold_key(finder->maxima, count, wanted, wanted / 8 + 1, key_step(dtype)));
    collect(row, dtype, 0, n, maximum, 1, smoothed, kept, in_chunks ? NULL : sums);
    return maximum;
}

/* ---- in order ---- */

static int compare_items(const void *a, const void *b) {
    const struct Item *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? 1 : -1) : x->class - y->class;
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

/* Sorts what was kept, descending, the earlier class first among equals, and keeps the wanted ones. Up to 320 scores are ranked by
   comparing each with all. */
static void sort_kept(Finder *finder) {
    enum { MOST_RANKED = 320 };
    Kept *kept = &finder->kept;
    struct Item *items = finder->items;
    if (kept->count > kept->wanted + kept->wanted / 4 + 2 * W) compact(kept);
    int64_t count = kept->count;
    if (count <= MOST_RANKED) {
        vi ranks[MOST_RANKED / W + 1];
        int vectors = (int)((count + W - 1) / W);
        for (int64_t i = count; i < vectors * W; i++) kept->score[i] = -INFINITY;
        for (int g = 0; g < vectors;)
            if (vectors - g >= 4)
                rank_vectors(kept, 4, ranks, &g);
            else
                rank_vectors(kept, 1, ranks, &g);
        for (int64_t i = 0; i < count; i++) items[i].class = -1;
        for (int64_t i = 0; i < count; i++) {
            int32_t r = ((const int32_t *)ranks)[i];
            while (items[r].class >= 0) r++; /* equals have the same rank: the later one goes behind */
            items[r].class = kept->class[i];
            finder->sorted[r] = kept->score[i];
        }
    } else {
        for (int64_t i = 0; i < count; i++) items[i] = (struct Item){key_of(kept->score[i]), kept->class[i]};
        qsort(items, (size_t)count, sizeof *items, compare_items);
        for (int64_t i = 0; i < count; i++) finder->sorted[i] = score_of_key(items[i].key);
    }
    kept->count = kept->wanted < count ? kept->wanted : count;
    for (int64_t i = 0; i < kept->count; i++) {
        kept->score[i] = finder->sorted[i];
        kept->class[i] = items[i].class;
    }
}
