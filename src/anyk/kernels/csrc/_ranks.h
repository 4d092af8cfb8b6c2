/* Soft ranks and sorts of rows that are in descending order: LapSum's ranks are sums over pairs of scores, those of Permutahedron
   and its sort are means over blocks (anyk/operators/lapsum.py, permutahedron.py). */

/* The factors e^(-(s_(i-1) - s_i) / t) between neighbours; the first is 0. `decay` has room for W more. */
static void decays(const float *s, int64_t n, float rate, float *decay) {
    decay[0] = 0;
    for (int64_t i = 1; i < n; i += W) {
        vf x = {0}, before = {0};
        if (i + W <= n)
            x = load_f32(s + i), before = load_f32(s + i - 1);
        else
            for (int l = 0; i + l < n; l++) x[l] = s[i + l], before[l] = s[i + l - 1];
        store_f32(decay + i, exponentialf((x - before) * rate));
    }
}

/* What is read and written where the scores stood is so once: that is memory in any order. */
static void laplace_ranks(const Ranking *r, const float *s, const int64_t *order, float *out, float *decay, double *sums) {
    int64_t n = r->n;
    double better = 0, worse = 0;
    decays(s, n, (float)r->rate, decay);
    for (int64_t i = 0; i < n; i++) sums[i] = better = (double)decay[i] * (better + (i > 0));
    for (int64_t i = n; i-- > 0;) {
        if (i + 1 < n) worse = (double)decay[i + 1] * (worse + 1);
        out[order[i]] = (float)(1 + (double)i + (worse - sums[i]) / 2);
    }
}

static double laplace_ranks_backward(const Ranking *r, const float *s, const int64_t *order, const float *incoming, float *out,
                                     float *decay, double *sums, float *given) {
    int64_t n = r->n;
    double ones = 0, sum = 0, by_rate = 0, half = r->rate / 2;
    decays(s, n, (float)r->rate, decay);
    for (int64_t i = 0; i < n; i++) given[i] = incoming[order[i]];
    for (int64_t i = 0; i < n; i++) {
        ones = (double)decay[i] * (ones + (i > 0));
        sum = (double)decay[i] * (sum + (i > 0 ? (double)given[i - 1] : 0));
        sums[i] = sum - (double)given[i] * ones;
    }
    ones = sum = 0;
    for (int64_t i = n; i-- > 0;) {
        if (i + 1 < n) {
            ones = (double)decay[i + 1] * (ones + 1);
            sum = (double)decay[i + 1] * (sum + (double)given[i + 1]);
        }
        double value = half * (sums[i] + sum - (double)given[i] * ones);
        out[order[i]] = (float)value;
        by_rate += value * ((double)s[i] - (double)s[0]);
    }
    return by_rate / r->rate;
}

typedef struct {
    double total; /* of the values of the block */
    int64_t size, start;
} Merged;

/* The blocks of the ascending sequence that is nearest to y_i = -s_i rate - i (ranks) or s_i + i rate (sort, rate is 1 / t):
   neighbours that descend are pooled. Returns how many there are. */
static int64_t pool_row(const Ranking *r, const float *s, Merged *pools) {
    int64_t count = 0;
    int is_sort = r->kind == SORT;
    for (int64_t i = 0; i < r->n; i++) {
        double relative = (double)s[i] - (double)s[0];
        double y = is_sort ? relative + (double)i * r->rate : -relative * r->rate - (double)i;
        Merged block = {y, 1, i};
        while (count > 0 && pools[count - 1].total * (double)block.size >= block.total * (double)pools[count - 1].size) {
            count--;
            block = (Merged){pools[count].total + block.total, pools[count].size + block.size, pools[count].start};
        }
        pools[count++] = block;
    }
    return count;
}

/* Ranks: within a block, mean place + mean of s rate - s rate. Sort: mean of s + (mean place - place) rate. */
static void permutahedron_row(const Ranking *r, const float *s, const int64_t *order, float *out, Merged *pools) {
    int64_t count = pool_row(r, s, pools);
    for (int64_t b = 0; b < count; b++) {
        int64_t start = pools[b].start, end = start + pools[b].size;
        double mean = 0, place = (double)(start + end - 1) / 2;
        for (int64_t i = start; i < end; i++) mean += (double)s[i] - (double)s[start];
        mean /= (double)(end - start);
        for (int64_t i = start; i < end; i++) {
            double apart = mean - ((double)s[i] - (double)s[start]);
            if (r->kind == SORT)
                out[i] = (float)((double)s[start] + mean + (place - (double)i) * r->rate);
            else
                out[order[i]] = (float)(1 + place + apart * r->rate);
        }
    }
}

static double permutahedron_backward(const Ranking *r, const float *s, const int64_t *order, const float *incoming, float *out,
                                     Merged *pools) {
    int64_t count = pool_row(r, s, pools);
    int is_sort = r->kind == SORT;
    double by_rate = 0;
    for (int64_t b = 0; b < count; b++) {
        int64_t start = pools[b].start, end = start + pools[b].size;
        double mean = 0, place = (double)(start + end - 1) / 2;
        for (int64_t i = start; i < end; i++) mean += (double)incoming[is_sort ? i : order[i]];
        mean /= (double)(end - start);
        for (int64_t i = start; i < end; i++) {
            if (is_sort) {
                out[order[i]] = (float)mean;
                by_rate += (double)incoming[i] * (place - (double)i);
            } else {
                double apart = mean - (double)incoming[order[i]];
                out[order[i]] = (float)(apart * r->rate);
                by_rate += apart * ((double)s[i] - (double)s[start]);
            }
        }
    }
    return by_rate;
}

static int ranking(const Call *call, int64_t first, int64_t last) {
    const Ranking *r = call->ranking;
    int64_t n = r->n;
    /* of a pool three numbers of 8 bytes; of LapSum a sum, a factor, and an incoming gradient */
    char *memory = borrow((n + W) * (int64_t)sizeof(Merged));
    if (!memory) return NO_MEMORY;
    double *sums = (double *)memory;
    float *decay = (float *)(sums + n), *given = decay + n + W;
    for (int64_t row = first; row < last; row++) {
        const float *s = r->scores + row * n, *incoming = r->incoming ? r->incoming + row * n : NULL;
        const int64_t *order = r->order + row * n;
        float *out = r->out + row * n;
        double by_rate = 0;
        if (r->operator == LAPSUM && incoming)
            by_rate = laplace_ranks_backward(r, s, order, incoming, out, decay, sums, given);
        else if (r->operator == LAPSUM)
            laplace_ranks(r, s, order, out, decay, sums);
        else if (incoming)
            by_rate = permutahedron_backward(r, s, order, incoming, out, (Merged *)memory);
        else
            permutahedron_row(r, s, order, out, (Merged *)memory);
        if (r->grad_rate) r->grad_rate[row] = by_rate;
    }
    give_memory_back(memory);
    return FINE;
}
