/* Sorting networks: their column for the target, of which log T is made, and their masks (anyk/operators/network.py). LANES rows run
   through the comparators side by side. */

/* ---- one comparator ---- */

INLINE vd art_length(vd a) { return square_root(a * a + ART_ROUNDING * ART_ROUNDING); }

/* swap(-a) for a >= 0: the share of the values that cross. */
INLINE vd smaller_share(const int swap, vd a) {
    if (swap == GAUSSIAN) {
        for (int l = 0; l < D; l++) a[l] = erfc(a[l] * M_SQRT1_2) / 2;
        return a;
    }
    vd e = exponential(swap == LOGISTIC ? -a : -a / square_root(art_length(a)));
    return swap == LOGISTIC ? e * reciprocal(1 + e) : e / (1 + e);
}

/* The derivative of the swap at ±a, where the smaller share is x. */
INLINE vd slope_of(const int swap, vd a, vd x) {
    if (swap == GAUSSIAN) return exponential(-a * a / 2) * 0.39894228040143267794;
    if (swap == LOGISTIC) return x * (1 - x);
    vd length = art_length(a), part = a / length;
    return x * (1 - x) / square_root(length) * (1 - part * part / 2);
}

/* What a comparator keeps for the backward pass. */
enum { KEPT = 3 };
typedef struct {
    vd d, x;   /* the difference of its scores, and the share that crosses */
    vd across; /* the difference of the shares that it mixed */
} Comparison;

/* The scores. */
INLINE void compare(const int swap, vd *upper, vd *lower, vl frozen, Comparison *kept) {
    vd d = *upper - *lower, a = absolute(d), x = smaller_share(swap, a), moved = x * a;
    vd high = larger(*upper, *lower), low = smaller(*upper, *lower);
    *upper = pick(frozen, *upper, high - moved);
    *lower = pick(frozen, *lower, low + moved);
    kept->d = only(~frozen, d);
    kept->x = only(~frozen, x);
}

/* The shares: a symmetric matrix, and so its own transpose. Sums of non-negative terms: the digits of small shares stay. */
INLINE void mix(const Comparison *kept, vd *upper, vd *lower) {
    vd a = *upper, b = *lower, x = kept->x, y = 1 - x;
    vd keep = by_sign(kept->d, x, y), cross = by_sign(kept->d, y, x);
    *upper = keep * a + cross * b;
    *lower = cross * a + keep * b;
}

/* The gradient by the scores, from that by what they became, and from that by the share that stays. */
INLINE void compare_backward(const int swap, const Comparison *kept, vd by_share, vd *upper, vd *lower) {
    vd x = kept->x, a = absolute(kept->d);
    vd slope = only(~(vl)(x == 0), slope_of(swap, a, x)); /* frozen */
    vd by_size = (*lower - *upper) * (x - a * slope), by_place = by_share * slope;
    vd high = *upper + by_size, low = *lower - by_size;
    *upper = by_sign(kept->d, low, high) + by_place;
    *lower = by_sign(kept->d, high, low) - by_place;
}

#define FOR_SWAP(swap, function, ...)                                                \
    do {                                                                             \
        if ((swap) == LOGISTIC) function(LOGISTIC, __VA_ARGS__);                     \
        else if ((swap) == LOGISTIC_ART) function(LOGISTIC_ART, __VA_ARGS__);        \
        else function(GAUSSIAN, __VA_ARGS__);                                        \
    } while (0)

/* ---- the loss ---- */

/* In which rows a comparator does nothing: its lower wire is padding, or the row does not run through its layer. */
INLINE vl frozen_in(const Block *b, const int32_t *comparator, int v) {
    vl real_count = lanes_of(b->real_count, v);
    vl frozen = comparator[1] >= real_count;
    for (int l = 0; l < D; l++) {
        const int32_t *row = b->spec->starts + 3 * real_count[l];
        if (comparator[2] < row[1] || comparator[2] >= row[2]) frozen[l] = -1;
    }
    return frozen;
}

/* The target's column is zero but on the wires that were `reached`, and then whatever the scores are. */
INLINE void run_column(const int swap, Block *b, Comparison *restrict kept, vd *restrict column, int8_t *restrict reached) {
    const Spec *spec = b->spec;
    vd *restrict x = b->x;
    int8_t *wires = reached + spec->size;
    memset(wires, 0, (size_t)b->m);
    for (int lane = 0; lane < LANES; lane++) wires[b->position[lane]] = 1;
    for (int64_t i = 0; i < b->m; i++)
        EACH {
            x[i * NV + v] = smaller(larger(x[i * NV + v], splat(-OUT_OF_REACH)), splat(OUT_OF_REACH));
            column[i * NV + v] = only(lanes_of(b->position, v) == i, splat(1));
        }
    const int32_t *c = spec->comparators;
    for (int64_t index = 0; index < spec->size; index++, c += 3, kept += NV) {
        int64_t upper = c[0] * NV, lower = c[1] * NV;
        int8_t one = reached[index] = wires[c[0]] = wires[c[1]] = wires[c[0]] | wires[c[1]];
        if (b->has_padding)
            EACH compare(swap, x + upper + v, x + lower + v, frozen_in(b, c, v), kept + v);
        else
            EACH compare(swap, x + upper + v, x + lower + v, (vl){0}, kept + v);
        if (!one) continue;
        EACH {
            kept[v].across = column[upper + v] - column[lower + v];
            mix(kept + v, column + upper + v, column + lower + v);
        }
    }
}

INLINE void run_column_back(const int swap, Block *b, const Comparison *restrict kept, vd *restrict grad_column,
                            const int8_t *reached) {
    const Spec *spec = b->spec;
    vd *restrict grad_x = b->grad_x;
    for (int64_t index = spec->size; index-- > 0;) {
        int64_t upper = spec->comparators[3 * index] * NV, lower = spec->comparators[3 * index + 1] * NV;
        const Comparison *at = kept + index * NV;
        if (!reached[index])
            EACH compare_backward(swap, at + v, (vd){0}, grad_x + upper + v, grad_x + lower + v);
        else
            EACH {
                vd by_share = (grad_column[upper + v] - grad_column[lower + v]) * at[v].across;
                compare_backward(swap, at + v, by_share, grad_x + upper + v, grad_x + lower + v);
                mix(at + v, grad_column + upper + v, grad_column + lower + v);
            }
    }
}

/* The logarithm of what the loss continues along where T underflows, by the target's lead over the j-th best of the others; and its
   slope. */
static void log_tail(const Block *b, int64_t j, int v, vd *tail, vd *slope) {
    int art = b->spec->swap == LOGISTIC_ART;
    vd lead = {0};
    vl none = {0};
    for (int l = 0; l < D; l++) {
        int32_t rival = b->rivals[j * LANES + v * D + l];
        none[l] = rival == NO_RIVAL ? -1 : 0; /* the tail is its weight alone */
        lead[l] = rival >= 0 ? -b->x[rival * NV + v][l] : 0;
    }
    vd length = art_length(lead), part = lead / length, root = square_root(length);
    vd z = art ? lead / root : lead, z_slope = art ? (1 - part * part / 2) / root : splat(1);
    vd e = exponential(-absolute(z));
    vd log_sigmoid = smaller(z, splat(0)) - logarithm(1 + e);
    *tail = only(~none, 0.5 * log_sigmoid) + LOG_TAIL_WEIGHT;
    *slope = only(~none, 0.5 * pick(z > 0, e, splat(1)) / (1 + e) * z_slope);
}

static void network(Block *b, Pass pass) {
    const Spec *spec = b->spec;
    Comparison *kept = take(&b->scratch, spec->size * LANES * 8 * KEPT);
    vd *column = take_quantities(b, b->m);
    vd *t = take_quantities(b, b->k), *tail = take_quantities(b, b->k), *tail_slope = take_quantities(b, b->k);
    int8_t *reached = take(&b->scratch, spec->size + b->m); /* comparators and wires */
    if (pass == LAY_OUT) return;
    if (pass == FORWARD) {
        for (int64_t j = 0; j < b->k; j++) /* before the network changes the scores */
            EACH log_tail(b, j, v, tail + j * NV + v, tail_slope + j * NV + v);
        FOR_SWAP(spec->swap, run_column, b, kept, column, reached);
        for (int64_t j = 0; j < b->k; j++)
            EACH {
                vd share = column[spec->outputs[j] * NV + v];
                vd sum = t[j * NV + v] = j ? t[(j - 1) * NV + v] + share : share;
                b->log_t[j * NV + v] = log_of_sum(pick(sum > 1e-290, logarithm(sum), splat(-1e300)), tail[j * NV + v]);
            }
        return;
    }
    for (int64_t i = 0; i < b->m * NV; i++) column[i] = (vd){0}; /* its gradient from here on */
    vd later[NV];
    EACH later[v] = (vd){0};
    for (int64_t j = b->k; j-- > 0;)
        EACH {
            vd g = b->grad_log_t[j * NV + v], log_t = b->log_t[j * NV + v];
            later[v] += g * exponential(smaller(-log_t, splat(300)));
            column[spec->outputs[j] * NV + v] = later[v];
            t[j * NV + v] = g * exponential(tail[j * NV + v] - log_t) * tail_slope[j * NV + v]; /* by the lead */
        }
    FOR_SWAP(spec->swap, run_column_back, b, kept, column, reached);
    for (int64_t j = 0; j < b->k; j++)
        for (int lane = 0; lane < LANES; lane++) {
            int32_t rival = b->rivals[j * LANES + lane];
            if (rival < 0) continue;
            double g = ((double *)t)[j * LANES + lane];
            ((double *)b->grad_x)[rival * LANES + lane] -= g;
            ((double *)b->grad_x)[b->position[lane] * LANES + lane] += g;
        }
}

/* ---- masks ----

   The scores run through the comparators. Then ones start on the first k outputs and run back: what arrives on a wire is the entry of
   the score that stood there. Of the backward pass the incoming gradients run forward, which gives that by each comparator's share,
   and these back to the scores. */

typedef struct {
    const Rows *rows;
    vd *scores, *entries; /* (n) */
    Comparison *kept;
} NetworkWork;

static void lay_out_network(void *given, Arena *arena) {
    NetworkWork *work = given;
    int64_t vector = LANES * 8;
    work->scores = take(arena, work->rows->n * vector);
    work->entries = take(arena, work->rows->n * vector);
    work->kept = take(arena, work->rows->size * vector * KEPT);
}

INLINE void run_scores(const int swap, const Rows *rows, vd *scores, Comparison *kept) {
    const int32_t *c = rows->comparators;
    for (int64_t index = 0; index < rows->size; index++, c += 3, kept += NV)
        EACH compare(swap, scores + c[0] * NV + v, scores + c[1] * NV + v, (vl){0}, kept + v);
}

static void run_ones_back(const Rows *rows, vd *entries, Comparison *kept) {
    for (int64_t i = 0; i < rows->n * NV; i++) entries[i] = (vd){0};
    for (int64_t j = 0; j < (int64_t)rows->k; j++) EACH entries[rows->outputs[j] * NV + v] = splat(1);
    for (int64_t index = rows->size; index-- > 0;) {
        const int32_t *c = rows->comparators + 3 * index;
        Comparison *at = kept + index * NV;
        EACH {
            vd *upper = entries + c[0] * NV + v, *lower = entries + c[1] * NV + v;
            at[v].across = *upper - *lower;
            mix(at + v, upper, lower);
        }
    }
}

/* Leaves in `across` the gradient by the share that stays. */
static void run_incoming(const Rows *rows, vd *incoming, Comparison *kept) {
    const int32_t *c = rows->comparators;
    for (int64_t index = 0; index < rows->size; index++, c += 3, kept += NV)
        EACH {
            vd *upper = incoming + c[0] * NV + v, *lower = incoming + c[1] * NV + v;
            kept[v].across *= *upper - *lower;
            mix(kept + v, upper, lower);
        }
}

INLINE void run_scores_back(const int swap, const Rows *rows, vd *grad, const Comparison *kept) {
    for (int64_t i = 0; i < rows->n * NV; i++) grad[i] = (vd){0};
    for (int64_t index = rows->size; index-- > 0;) {
        const int32_t *c = rows->comparators + 3 * index;
        const Comparison *at = kept + index * NV;
        EACH compare_backward(swap, at + v, at[v].across, grad + c[0] * NV + v, grad + c[1] * NV + v);
    }
}

/* Entries of tied scores, or their gradients, are averaged. `values` has those of one row, LANES apart. */
static void average_ties(const float *s, int64_t n, double *values) {
    for (int64_t start = 0, end; start < n; start = end) {
        double sum = 0;
        for (end = start; end < n && s[end] == s[start]; end++) sum += values[end * LANES];
        for (int64_t i = start; i < end; i++) values[i * LANES] = sum / (double)(end - start);
    }
}

/* The scores less the k-th, near which digits count, over the temperature. */
static double relative_score(const Rows *rows, int64_t row, int64_t i) {
    const float *s = (const float *)rows->scores + row * rows->n;
    return ((double)s[i] - (double)s[(int64_t)rows->k - 1]) * rows->rate;
}

static int network_rows(void *given, int64_t first, int64_t last) {
    NetworkWork *work = given;
    const Rows *rows = work->rows;
    int64_t n = rows->n;
    const float *scores = rows->scores, *incoming = rows->incoming;
    double *relative = (double *)work->scores, *entries = (double *)work->entries;
    for (int64_t start = first; start < last; start += LANES) {
        int lanes = last - start < LANES ? (int)(last - start) : LANES; /* the others do what the first does */
        for (int64_t i = 0; i < n; i++)
            for (int l = 0; l < LANES; l++) relative[i * LANES + l] = relative_score(rows, l < lanes ? start + l : start, i);
        FOR_SWAP(rows->swap, run_scores, rows, work->scores, work->kept);
        run_ones_back(rows, work->entries, work->kept);
        if (incoming) {
            for (int l = 0; l < LANES; l++) {
                int64_t row = l < lanes ? start + l : start, stride = rows->incoming_stride;
                for (int64_t i = 0; i < n; i++) entries[i * LANES + l] = (double)incoming[row * stride + rows->order[row * n + i]];
                average_ties(scores + row * n, n, entries + l);
            }
            run_incoming(rows, work->entries, work->kept);
            FOR_SWAP(rows->swap, run_scores_back, rows, work->entries, work->kept);
        }
        for (int l = 0; l < lanes; l++) {
            int64_t row = start + l;
            double by_rate = 0;
            if (!incoming) average_ties(scores + row * n, n, entries + l);
            for (int64_t i = 0; i < n; i++) {
                double value = entries[i * LANES + l];
                by_rate += value * relative_score(rows, row, i);
                ((float *)rows->out)[row * n + rows->order[row * n + i]] = (float)(incoming ? value * rows->rate : value);
            }
            if (rows->grad_rate) rows->grad_rate[row] = by_rate;
        }
    }
    return FINE;
}

static int network_mask(const void *call, int64_t first, int64_t last) {
    return with_memory(lay_out_network, network_rows, &(NetworkWork){.rows = call}, first, last);
}
