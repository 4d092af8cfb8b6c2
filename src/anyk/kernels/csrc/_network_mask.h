/* The mask of a sorting network, of rows in descending order: LANES of them side by side (anyk/operators/sorting_network.py).

   The scores run through the comparators, each of which keeps its difference d and the share x that crosses. Then ones start on
   the first k outputs and run back: what arrives on a wire is the entry of the score that stood there. Of the backward pass
   the incoming gradients v run forward, which gives that by each comparator's weight, and these back to the scores. */

enum { KEPT = 3 }; /* of a comparator: d, x, and the difference of what runs back; later the gradient by the weight */

/* The scores less the k-th, near which digits count, over the temperature. */
static double relative_score(const NetworkMask *g, int64_t row, int64_t i) {
    const float *s = g->scores + row * g->n;
    return ((double)s[i] - (double)s[g->k - 1]) * g->rate;
}

INLINE void run_scores(const NetworkMask *g, const int swap, vd *restrict s, vd *restrict kept) {
    const int32_t *c = g->comparators;
    for (int64_t index = 0; index < g->size; index++, c += 3, kept += KEPT * NV) {
        vd *upper = s + c[0] * NV, *lower = s + c[1] * NV;
        EACH {
            vd d = upper[v] - lower[v], a = absolute(d), x = smaller_share(swap, a), moved = x * a;
            vd high = larger(upper[v], lower[v]), low = smaller(upper[v], lower[v]);
            upper[v] = high - moved;
            lower[v] = low + moved;
            kept[v] = d;
            kept[NV + v] = x;
        }
    }
}

/* The mixture of a comparator, which is its own transpose. */
INLINE void mix(const vd *kept, int v, vd *upper, vd *lower) {
    vd d = kept[v], x = kept[NV + v], a = *upper, b = *lower, keep = by_sign(d, x, 1 - x), cross = by_sign(d, 1 - x, x);
    *upper = keep * a + cross * b;
    *lower = cross * a + keep * b;
}

static void run_ones_back(const NetworkMask *g, vd *restrict u, vd *restrict kept) {
    for (int64_t i = 0; i < g->n * NV; i++) u[i] = (vd){0};
    for (int64_t j = 0; j < g->k; j++) EACH u[g->outputs[j] * NV + v] = splat(1);
    for (int64_t index = g->size; index-- > 0;) {
        const int32_t *c = g->comparators + 3 * index;
        vd *at = kept + KEPT * NV * index;
        EACH {
            at[2 * NV + v] = u[c[0] * NV + v] - u[c[1] * NV + v];
            mix(at, v, u + c[0] * NV + v, u + c[1] * NV + v);
        }
    }
}

static void run_incoming(const NetworkMask *g, vd *restrict incoming, vd *restrict kept) {
    const int32_t *c = g->comparators;
    for (int64_t index = 0; index < g->size; index++, c += 3, kept += KEPT * NV)
        EACH {
            kept[2 * NV + v] *= incoming[c[0] * NV + v] - incoming[c[1] * NV + v];
            mix(kept, v, incoming + c[0] * NV + v, incoming + c[1] * NV + v);
        }
}

INLINE void run_scores_back(const NetworkMask *g, const int swap, vd *restrict grad, const vd *restrict kept) {
    for (int64_t i = 0; i < g->n * NV; i++) grad[i] = (vd){0};
    for (int64_t index = g->size; index-- > 0;) {
        const int32_t *c = g->comparators + 3 * index;
        const vd *at = kept + KEPT * NV * index;
        vd *upper = grad + c[0] * NV, *lower = grad + c[1] * NV;
        EACH {
            vd d = at[v], x = at[NV + v], a = absolute(d), slope = slope_of(swap, a, x);
            vd by_size = (lower[v] - upper[v]) * (x - a * slope), by_weight = at[2 * NV + v] * slope;
            vd high = upper[v] + by_size, low = lower[v] - by_size;
            upper[v] = by_sign(d, low, high) + by_weight;
            lower[v] = by_sign(d, high, low) - by_weight;
        }
    }
}

#define BY_SWAP(number, function, ...)                                       \
    switch (number) {                                                        \
    case LOGISTIC: function(g, LOGISTIC, __VA_ARGS__); break;                \
    case LOGISTIC_ART: function(g, LOGISTIC_ART, __VA_ARGS__); break;        \
    case CAUCHY: function(g, CAUCHY, __VA_ARGS__); break;                    \
    case GAUSSIAN: function(g, GAUSSIAN, __VA_ARGS__); break;                \
    case RECIPROCAL: function(g, RECIPROCAL, __VA_ARGS__); break;            \
    default: function(g, OPTIMAL, __VA_ARGS__); break;                       \
    }

/* Entries of tied scores, or their gradients, are averaged. `values` has those of one row, LANES apart. */
static void average_ties(const float *s, int64_t n, double *values) {
    for (int64_t start = 0, end; start < n; start = end) {
        double sum = 0;
        for (end = start; end < n && s[end] == s[start]; end++) sum += values[end * LANES];
        if (end - start > 1)
            for (int64_t i = start; i < end; i++) values[i * LANES] = sum / (double)(end - start);
    }
}

static int network_mask(const Call *call, int64_t first, int64_t last) {
    const NetworkMask *g = call->network_mask;
    int64_t n = g->n, vector = LANES * 8;
    Arena arena = {0};
    take(&arena, n * vector), take(&arena, n * vector), take(&arena, g->size * KEPT * vector);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    vd *s = take(&arena, n * vector), *u = take(&arena, n * vector), *kept = take(&arena, g->size * KEPT * vector);
    for (int64_t start = first; start < last; start += LANES) {
        int lanes = last - start < LANES ? (int)(last - start) : LANES;
        for (int64_t i = 0; i < n; i++) /* the other lanes do what the first does */
            for (int l = 0; l < LANES; l++) ((double *)s)[i * LANES + l] = relative_score(g, l < lanes ? start + l : start, i);
        BY_SWAP(g->swap, run_scores, s, kept)
        run_ones_back(g, u, kept);
        if (g->incoming) {
            for (int l = 0; l < LANES; l++) {
                int64_t row = l < lanes ? start + l : start;
                for (int64_t i = 0; i < n; i++) ((double *)u)[i * LANES + l] = (double)g->incoming[row * n + g->order[row * n + i]];
                average_ties(g->scores + row * n, n, (double *)u + l);
            }
            run_incoming(g, u, kept);
            BY_SWAP(g->swap, run_scores_back, u, kept)
        }
        for (int l = 0; l < lanes; l++) {
            int64_t row = start + l;
            double *values = (double *)u + l, by_rate = 0;
            if (!g->incoming) average_ties(g->scores + row * n, n, values);
            for (int64_t i = 0; i < n; i++) {
                double value = values[i * LANES];
                by_rate += value * relative_score(g, row, i);
                g->out[row * n + g->order[row * n + i]] = (float)(g->incoming ? value * g->rate : value);
            }
            if (g->grad_rate) g->grad_rate[row] = by_rate;
        }
    }
    give_memory_back(arena.memory);
    return FINE;
}
