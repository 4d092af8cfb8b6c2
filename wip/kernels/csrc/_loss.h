/* Losses. A row's candidates are found and sorted (_select.h). Then log T of LANES rows is computed side by side (_operators.h), and
   of it the loss. */

/* What is known of a row beside its candidates. */
typedef struct {
    int counts;  /* its target is not ignore_index */
    int has_nan; /* or infinity: its results will be NaN */
    float maximum, weight;
    double target_score;
    Sums sums; /* over all classes */
} Row;

/* The work on one block of LANES rows after the other. */
typedef struct {
    const Spec *spec;
    const Batch *batch;
    int over_candidates, smoothed;
    Block block;
    Row rows[LANES];
    vd *p_k, *shares;                              /* (k) */
    vd *cross_entropy, *grad_cross_entropy, *loss; /* (1) */
    int32_t *classes; /* (lanes, m) */
    float *scores;    /* (lanes, m) of the candidates */
    float *softmax;   /* (lanes, m) of the candidates; that over all classes is not yet divided */
    Finder finder;
} Work;

static void run_operator(Block *b, Pass pass) {
    b->scratch.used = 0;
    switch (b->spec->operator) {
    case NETWORK: network(b, pass); break;
    case LAPSUM: lapsum(b, pass); break;
    case KSUBSET: ksubset(b, pass); break;
    case SOFTSORT: softsort(b, pass); break;
    default: neuralsort(b, pass);
    }
}

static void lay_out_loss(void *given, Arena *arena) {
    Work *work = given;
    const Spec *spec = work->spec;
    int64_t n = spec->n, m = spec->m, k = spec->k, vector = LANES * 8;
    Block *b = &work->block;
    *b = (Block){.spec = spec, .m = m, .k = k};
    b->x = take(arena, m * vector);
    b->grad_x = take(arena, m * vector);
    b->log_t = take(arena, k * vector);
    b->grad_log_t = take(arena, k * vector);
    run_operator(b, LAY_OUT); /* counts what it takes */
    b->scratch.memory = take(arena, b->scratch.used);
    b->position = take(arena, LANES * 4);
    b->real_count = take(arena, LANES * 4);
    b->rivals = take(arena, LANES * 4 * k);
    work->p_k = take(arena, k * vector);
    work->shares = take(arena, k * vector);
    work->cross_entropy = take(arena, vector);
    work->loss = take(arena, vector);
    work->grad_cross_entropy = take(arena, vector);
    work->classes = take(arena, LANES * m * 4);
    work->scores = take(arena, (LANES * m + W) * 4);
    work->softmax = take(arena, (LANES * m + W) * 4);
    lay_out_finder(&work->finder, n, m, arena);
}

/* ---- candidates ---- */

/* Fills a lane that has no row, or one that does not count, with harmless numbers. */
static void fill_unused_lane(Work *work, int lane) {
    Block *b = &work->block;
    for (int64_t i = 0; i < b->m; i++) {
        ((double *)b->x)[i * LANES + lane] = 0;
        work->classes[lane * b->m + i] = (int32_t)i;
        work->scores[lane * b->m + i] = 0;
    }
    for (int64_t j = 0; j < b->k; j++) {
        ((double *)work->p_k)[j * LANES + lane] = 1.0 / (double)b->k;
        b->rivals[j * LANES + lane] = PADDED_RIVAL;
    }
    b->position[lane] = 0;
    b->real_count[lane] = (int32_t)b->m;
    ((double *)work->cross_entropy)[lane] = 0;
}

/* Removes the target from what was kept, which is in the order of the classes. */
static void remove_target(Kept *kept, int32_t target) {
    int64_t i = 0;
    while (i < kept->count && kept->class[i] != target) i++;
    if (i == kept->count) return;
    kept->count--;
    memmove(kept->score + i, kept->score + i + 1, (size_t)(kept->count - i) * 4);
    memmove(kept->class + i, kept->class + i + 1, (size_t)(kept->count - i) * 4);
}

/* Leaves in the finder the m - 1 best of the others, in order, and what else is to be known of all scores of a row. */
static void find_others(Work *work, const void *row_scores, int32_t target, Row *row) {
    const Spec *spec = work->spec;
    Kept *kept = &work->finder.kept;
    Sums *sums = spec->uses_softmax ? &row->sums : NULL;
    row->maximum = find_best(row_scores, work->batch->dtype, spec->n, spec->m, &work->finder, sums, work->smoothed);
    row->has_nan = !(row->maximum < INFINITY); /* inf - inf: an overflow must show */
    kept->wanted = spec->m - 1;
    if (!row->has_nan) {
        remove_target(kept, target);
        sort_kept(&work->finder);
        return;
    }
    row->sums.exp_sum = 1;
    kept->count = 0; /* any candidates will do */
    for (int64_t i = 0; kept->count < kept->wanted; i++)
        if (i != target) kept->score[kept->count] = 0, kept->class[kept->count++] = (int32_t)i;
}

/* Wires "given": the candidates from the last to the first, padding at the end; of all classes by their index, else by their
   rank. Returns the target's position, which among the sorted candidates is `rank`. */
static int32_t arrange_as_given(const Spec *spec, const Kept *others, const void *row, int dtype, int32_t target, int32_t rank,
                                int32_t *classes, float *scores) {
    int32_t next = 0, position = 0;
    for (int padding = 0; padding < 2; padding++)
        for (int64_t i = spec->m; i-- > 0;) {
            int32_t class = spec->m == spec->n ? (int32_t)i : i == rank ? target : others->class[i - (i > rank)];
            float score = score_at(row, dtype, class);
            if ((score == -INFINITY) != padding) continue;
            if (class == target) position = next;
            classes[next] = class;
            scores[next++] = score;
        }
    return position;
}

/* Puts a row's candidates, which are the target and the others in descending order, where the operator wants them; returns the
   target's position. */
static int32_t arrange(const Spec *spec, const Kept *others, const void *row, int dtype, int32_t target, int32_t real_count,
                       int32_t *classes, float *scores) {
    int32_t position = 0, count = (int32_t)spec->m - 1;
    float own = score_at(row, dtype, target);
    while (position < count && (others->score[position] > own ||
                                (others->score[position] == own && others->class[position] < target)))
        position++; /* its rank */
    if (spec->operator == NETWORK && spec->wires == GIVEN)
        return arrange_as_given(spec, others, row, dtype, target, position, classes, scores);
    if (spec->operator == NETWORK) position = spec->starts[3 * real_count];
    if (spec->operator == KSUBSET) position = count;
    size_t before = (size_t)position * 4, behind = (size_t)(count - position) * 4;
    memcpy(classes, others->class, before);
    memcpy(scores, others->score, before);
    memcpy(classes + position + 1, others->class + position, behind);
    memcpy(scores + position + 1, others->score + position, behind);
    classes[position] = target;
    scores[position] = own;
    return position;
}

/* Where the best others stand among the candidates. */
static void find_rivals(const Spec *spec, const Kept *others, const int32_t *classes, int32_t position, int32_t *rivals) {
    for (int64_t j = 0; j < spec->k; j++) {
        int32_t rival = (int32_t)(j + (j >= position));
        if (j >= spec->m - 1)
            rival = NO_RIVAL;
        else if (others->score[j] == -INFINITY)
            rival = PADDED_RIVAL;
        else if (spec->wires == GIVEN)
            for (rival = 0; classes[rival] != others->class[j];) rival++;
        rivals[j * LANES] = rival;
    }
}

/* Finds and arranges the candidates of a row that counts, and sets everything else that is known of it. */
static int read_row(Work *work, int64_t row, int lane) {
    const Spec *spec = work->spec;
    const Batch *batch = work->batch;
    Block *b = &work->block;
    const Kept *others = &work->finder.kept;
    Row *r = work->rows + lane;
    int64_t m = spec->m, k = spec->k;
    int32_t target = (int32_t)batch->target[row], *classes = work->classes + lane * m, real_count = 1;
    const void *row_scores = row_of(batch->scores, batch->dtype, row * batch->stride);
    float own = score_at(row_scores, batch->dtype, target), *scores = work->scores + lane * m;
    if (own == -INFINITY) return PADDED_TARGET;
    r->weight = batch->weight ? batch->weight[target] : 1;
    find_others(work, row_scores, target, r);
    while (real_count < m && others->score[real_count - 1] != -INFINITY) real_count++;
    if (real_count < k) return TOO_FEW;
    b->real_count[lane] = real_count;
    b->has_padding |= real_count < m;
    b->position[lane] = arrange(spec, others, row_scores, batch->dtype, target, real_count, classes, scores);
    if (spec->operator == NETWORK) find_rivals(spec, others, classes, b->position[lane], b->rivals + lane);
    r->target_score = r->has_nan ? 0 : (double)own;
    double scale = 1 / spec->scale, *x = (double *)b->x + lane;
    for (int64_t i = 0; i < m; i++) {
        double relative = ((double)scores[i] - r->target_score) * scale;
        x[i * LANES] = r->has_nan ? 0 : scores[i] == -INFINITY ? -OUT_OF_REACH : relative;
    }
    const double *p_k = batch->p_k;
    if (batch->p_k_of != OF_ALL) p_k += k * (batch->p_k_of == OF_CLASS ? target : row);
    for (int64_t j = 0; j < k; j++) ((double *)work->p_k)[j * LANES + lane] = p_k[j];
    if (batch->cross_entropy)
        ((double *)work->cross_entropy)[lane] = (double)batch->cross_entropy[row];
    else if (spec->uses_softmax) /* add_log_sums does the rest */
        ((double *)work->cross_entropy)[lane] = r->has_nan ? 0 : (double)r->maximum - r->target_score;
    return FINE;
}

/* ---- the loss of log T ---- */

/* The logarithm of the sum in each row's cross-entropy over all classes. */
static void add_log_sums(Work *work) {
    EACH {
        vd sum;
        for (int l = 0; l < D; l++) {
            const Row *r = work->rows + v * D + l;
            sum[l] = r->counts ? r->sums.exp_sum : 1;
        }
        work->cross_entropy[v] += logarithm(sum);
    }
}

/* Cross-entropy and softmax over the candidates. */
static void softmax_over_candidates(Work *work) {
    Block *b = &work->block;
    double scale = work->spec->scale;
    EACH {
        vd maximum = splat(-1e300), sum = {0};
        for (int64_t i = 0; i < b->m; i++) maximum = larger(maximum, b->x[i * NV + v]);
        for (int64_t i = 0; i < b->m; i++)
            sum += b->grad_x[i * NV + v] = exponential((b->x[i * NV + v] - maximum) * scale); /* not used before the backward */
        work->cross_entropy[v] = maximum * scale + logarithm(sum);
        for (int64_t i = 0; i < b->m; i++) {
            vd share = b->grad_x[i * NV + v] / sum;
            for (int l = 0; l < D; l++) work->softmax[(v * D + l) * b->m + i] = (float)share[l];
        }
    }
}

/* log sum_j p_j T_j over j >= first, at most 0. `instead`: a cross-entropy, whose negative takes the place of the first log T; or
   NULL. The shares are the gradient by each log T. */
INLINE vd log_mean(const Block *b, const vd *p, int64_t first, const vd *instead, vd *shares, int v) {
    vd maximum = splat(-1e300), sum = {0};
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        maximum = larger(maximum, pick(p[j * NV + v] > 0, log_t, splat(-1e300)));
    }
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        vd part = only(p[j * NV + v] > 0, p[j * NV + v] * exponential(smaller(log_t - maximum, splat(0))));
        shares[j * NV + v] = part;
        sum += part;
    }
    vd result = maximum + logarithm(sum);
    vl over = result > 0; /* the T of operators that are only row-stochastic can pass 1 */
    for (int64_t j = first; j < b->k; j++) shares[j * NV + v] = only(~over, shares[j * NV + v] / sum);
    return smaller(result, splat(0));
}

/* The loss of each row from log T, P_K and the cross-entropy, with the gradients by log T and by the cross-entropy. `shares` has
   room for k quantities. */
static void loss_of_log_t(Block *b, const vd *p, const vd *cross_entropy, vd *loss, vd *grad_cross_entropy, vd *shares) {
    const Spec *spec = b->spec;
    int64_t k = b->k;
    int softmax = spec->family != OPERATOR;
    EACH {
        grad_cross_entropy[v] = (vd){0};
        if (spec->family == ERROR) {
            vd sum = {0};
            double q = spec->q, rest = 1 - spec->ce_weight;
            for (int64_t j = 0; j < k; j++) {
                vd log_t = smaller(b->log_t[j * NV + v], splat(0)), weight = rest * p[j * NV + v];
                vd t = exponential(q * log_t); /* T^q */
                vd error = q == 0 ? -log_t : one_minus_exp(q * log_t, t) / q;
                sum += weight * error;
                b->grad_log_t[j * NV + v] = only(~(vl)(b->log_t[j * NV + v] > 0), -weight * t);
            }
            loss[v] = sum;
            if (spec->ce_weight > 0) {
                double ce_weight = spec->ce_weight * (1 - spec->smoothing);
                loss[v] += ce_weight * cross_entropy[v];
                grad_cross_entropy[v] = splat(ce_weight);
            }
        } else if (k == 1 && softmax) { /* the softmax of the candidates alone */
            loss[v] = cross_entropy[v];
            grad_cross_entropy[v] = splat(1);
            b->grad_log_t[v] = (vd){0};
        } else if (spec->family == SEPARATE) {
            vd later = {0};
            for (int64_t j = 1; j < k; j++) later += p[j * NV + v];
            vd mean = log_mean(b, p, 1, NULL, shares, v);
            vl some = later > 0;
            mean -= pick(some, logarithm(pick(some, later, splat(1))), splat(0));
            /* at most 0 after the division by the sum: what log_mean held was for the undivided one */
            vl over = mean > 0;
            mean = smaller(mean, splat(0));
            loss[v] = p[v] * cross_entropy[v] - only(some, later * mean);
            grad_cross_entropy[v] = p[v];
            b->grad_log_t[v] = (vd){0};
            for (int64_t j = 1; j < k; j++) b->grad_log_t[j * NV + v] = only(some & ~over, -later * shares[j * NV + v]);
        } else {
            int mixed = spec->family == MIXED;
            loss[v] = -log_mean(b, p, 0, mixed ? cross_entropy : NULL, shares, v);
            for (int64_t j = 0; j < k; j++) b->grad_log_t[j * NV + v] = -shares[j * NV + v];
            if (mixed) {
                grad_cross_entropy[v] = shares[v];
                b->grad_log_t[v] = (vd){0};
            }
        }
    }
}

/* ---- forward ---- */

static void write_loss(Work *work, int64_t row, int lane) {
    const Spec *spec = work->spec;
    const Row *r = work->rows + lane;
    double value = ((double *)work->loss)[lane];
    if (work->smoothed && r->counts) /* label smoothing: log sum exp less the mean score */
        value += spec->ce_weight * spec->smoothing *
                 (((double *)work->cross_entropy)[lane] + r->target_score - (double)r->maximum -
                  r->sums.shifted_sum / (double)r->sums.real_count);
    work->batch->loss[row] = !r->counts ? 0 : r->has_nan ? NAN : (float)(value * (double)r->weight);
}

/* Writes what the backward pass needs of a row: see Batch. */
static void write_gradient(Work *work, int64_t row, int lane) {
    const Spec *spec = work->spec;
    const Batch *batch = work->batch;
    const Row *r = work->rows + lane;
    int64_t m = spec->m;
    float *gradient = batch->gradient + row * m, *scores = work->scores + lane * m, *softmax = work->softmax + lane * m;
    float *rest = batch->rest ? batch->rest + 3 * row : NULL;
    memcpy(batch->classes + row * m, work->classes + lane * m, (size_t)m * 4);
    double by_ce = r->counts ? ((double *)work->grad_cross_entropy)[lane] * (double)r->weight : 0;
    if (batch->grad_cross_entropy) batch->grad_cross_entropy[row] = (float)by_ce;
    if (!r->counts || r->has_nan) {
        float value = r->has_nan ? NAN : 0;
        for (int64_t i = 0; i < m; i++) gradient[i] = value;
        if (rest) rest[0] = 0, rest[1] = value, rest[2] = 0;
        return;
    }
    /* By a class: share times its softmax, plus what the smoothing adds; by the target's, less by_ce. */
    double share = 0, added = 0, scale = (double)r->weight / spec->scale;
    if (spec->uses_softmax) {
        double amount = work->smoothed ? spec->ce_weight * spec->smoothing * (double)r->weight : 0;
        share = (by_ce + amount) / r->sums.exp_sum;
        added = amount > 0 ? -amount / (double)r->sums.real_count : 0;
        for (int64_t i = 0; i < m; i += W) store_f32(softmax + i, exponentialf(load_f32(scores + i) - r->maximum));
    } else if (work->over_candidates)
        share = by_ce;
    else
        memset(softmax, 0, (size_t)m * 4);
    const double *grad_x = (const double *)work->block.grad_x + lane;
    int32_t target = work->block.position[lane];
    for (int64_t i = 0; i < m; i++) gradient[i] = (float)(grad_x[i * LANES] * scale + share * (double)softmax[i]);
    for (int64_t i = 0; i < m && added < 0; i++) gradient[i] += scores[i] > -INFINITY ? (float)added : 0;
    double own = batch->cross_entropy ? 0 : by_ce;
    gradient[target] = (float)(grad_x[target * LANES] * scale + share * (double)softmax[target] + added - own);
    if (rest) rest[0] = r->maximum, rest[1] = (float)share, rest[2] = (float)added;
}

static int forward_blocks(void *given, int64_t first, int64_t last) {
    Work *work = given;
    const Spec *spec = work->spec;
    const Batch *batch = work->batch;
    Block *b = &work->block;
    int runs = !(spec->k == 1 && work->over_candidates), status = FINE;
    for (int64_t start = first; start < last; start += LANES) {
        int lanes = (int)(last - start < LANES ? last - start : LANES);
        b->has_padding = 0;
        for (int lane = 0; lane < LANES; lane++)
            work->rows[lane] = (Row){.counts = lane < lanes && batch->target[start + lane] != batch->ignore_index};
        for (int lane = 0; lane < LANES; lane++)
            if (!work->rows[lane].counts)
                fill_unused_lane(work, lane);
            else if ((status = read_row(work, start + lane, lane)) != FINE)
                return status;
        if (spec->uses_softmax) add_log_sums(work);
        if (work->over_candidates) softmax_over_candidates(work);
        if (runs)
            run_operator(b, FORWARD);
        else
            EACH b->log_t[v] = (vd){0};
        loss_of_log_t(b, work->p_k, work->cross_entropy, work->loss, work->grad_cross_entropy, work->shares);
        for (int lane = 0; lane < lanes; lane++) write_loss(work, start + lane, lane);
        if (!batch->gradient) continue;
        memset(b->grad_x, 0, (size_t)(spec->m * LANES * 8));
        if (runs) run_operator(b, BACKWARD);
        for (int lane = 0; lane < lanes; lane++) write_gradient(work, start + lane, lane);
    }
    return FINE;
}

#include "_smooth.h"

static int forward(const void *given, int64_t first, int64_t last) {
    const LossCall *call = given;
    const Spec *spec = call->spec;
    if (spec->operator == SMOOTH)
        return with_memory(lay_out_smooth, smooth_rows, &(SmoothWork){.spec = spec, .batch = call->batch}, first, last);
    Work work = {.spec = spec, .batch = call->batch};
    work.over_candidates = spec->family != OPERATOR && spec->family != ERROR && !spec->all_classes;
    work.smoothed = spec->smoothing > 0 && spec->uses_softmax;
    return with_memory(lay_out_loss, forward_blocks, &work, first, last);
}

/* ---- backward ---- */

enum { PAST_CACHES = 1 << 25 }; /* bytes: a gradient of this size is not held by any cache until it is read */

/* share exp(score - maximum) + added for the places [first, last) of a row, where padding gets no `added`. */
INLINE void write_rest(const void *scores, const int dtype, void *out, int64_t first, int64_t last, const int past_caches,
                       const int smoothed, const float *rest, float factor) {
    vf maximum = splatf(rest[0]), share = splatf(factor * rest[1]), added = splatf(factor * rest[2]);
    int64_t i = first;
    for (; i + W <= last; i += W) {
        vf x = load(scores, dtype, i), y = share * exponentialf(x - maximum);
        if (smoothed) y += onlyf(x > -INFINITY, added);
        if (past_caches)
            stream_f32((float *)out + i, y);
        else
            store(out, dtype, i, y);
    }
    if (i == last) return;
    vf x = load_some(scores, dtype, i, last);
    store_some(out, dtype, i, last, share * exponentialf(x - maximum) + onlyf(x > -INFINITY, added));
}

INLINE void backward_row(const Backward *back, const int dtype, int64_t row, float factor, int past_caches) {
    int64_t n = back->n, m = back->m;
    const void *scores = row_of(back->scores, dtype, row * back->stride);
    void *out = out_row(back->out, dtype, row * n);
    const float *rest = back->rest ? back->rest + (back->powers ? 1 + back->powers : 3) * row : NULL;
    if (back->powers)
        write_powers(scores, dtype, out, n, back->powers, rest, (float)back->rate, factor);
    else if (m < n && (!rest || (rest[1] == 0 && rest[2] == 0)))
        memset(out, 0, (size_t)(n * item_size(dtype)));
    else if (m < n && past_caches && dtype == FLOAT32) {
        int64_t aligned = (int64_t)(-(uintptr_t)out % BYTES / sizeof(float));
        write_rest(scores, dtype, out, 0, aligned, 0, 1, rest, factor);
        write_rest(scores, dtype, out, aligned, n, 1, 1, rest, factor);
        end_streams();
    } else if (m < n && rest[2] == 0)
        write_rest(scores, dtype, out, 0, n, 0, 0, rest, factor);
    else if (m < n)
        write_rest(scores, dtype, out, 0, n, 0, 1, rest, factor);
    const float *gradient = back->gradient + row * m;
    const int32_t *classes = back->classes + row * m;
    for (int64_t i = 0; i < m; i++) store_one(out, dtype, classes[i], factor * gradient[i]);
}

static int backward(const void *call, int64_t first, int64_t last) {
    const Backward *back = call;
    /* What no cache will hold need not be read into the caches to be written. */
    int past_caches = back->rows * back->n * 4 >= PAST_CACHES && back->n >= 1024;
    for (int64_t row = first; row < last; row++) {
        float factor = back->incoming[back->single ? 0 : row * back->incoming_stride];
        if (back->single) factor /= *back->divisor;
        FOR_DTYPE(back->dtype, backward_row(back, DTYPE, row, factor, past_caches));
    }
    return FINE;
}

/* ---- the best classes ---- */

typedef struct {
    const Rows *rows;
    Finder finder;
} BestWork;

static void lay_out_best(void *given, Arena *arena) {
    BestWork *work = given;
    lay_out_finder(&work->finder, work->rows->n, (int64_t)work->rows->k, arena);
}

static int best_rows(void *given, int64_t first, int64_t last) {
    BestWork *work = given;
    const Rows *rows = work->rows;
    int64_t m = (int64_t)rows->k;
    for (int64_t row = first; row < last; row++) {
        const void *scores = row_of(rows->scores, rows->dtype, row * rows->stride);
        float maximum = find_best(scores, rows->dtype, rows->n, m, &work->finder, NULL, 0);
        if (maximum != maximum) return UNUSUAL; /* NaN has no order here; the plain code has one */
        sort_kept(&work->finder);
        for (int64_t i = 0; i < m; i++) ((int64_t *)rows->out)[row * m + i] = work->finder.kept.class[i];
    }
    return FINE;
}

static int best(const void *call, int64_t first, int64_t last) {
    return with_memory(lay_out_best, best_rows, &(BestWork){.rows = call}, first, last);
}
