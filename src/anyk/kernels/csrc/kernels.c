/* The kernels: losses, their gradients, and the best classes of rows of scores. Compiled once for each instruction set, whose
   name is VARIANT.

   A row's candidates are found in two passes over its scores (_select.h). Then LANES rows are computed side by side, in double
   precision, each vector holding the same quantity of several rows (_operators.h). What is computed is what the plain code in
   anyk/operators, anyk/losses.py and anyk/baselines.py defines; the formulae are explained there. */
#include "anyk.h"
#include "_vector.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "_select.h"

enum { PAST_CACHES = 1 << 25 }; /* bytes: a gradient of this size is not held by any cache until it is read */

/* Memory from which parts are taken one after the other. Without memory, only how much the parts take is counted: the same code
   tells the size and then lays the parts out. */
typedef struct {
    char *memory;
    int64_t used;
} Arena;

static void *take(Arena *arena, int64_t bytes) {
    char *start = arena->memory ? arena->memory + arena->used : NULL;
    arena->used += (bytes + 63) & ~(int64_t)63;
#if defined(__SANITIZE_ADDRESS__) /* the gaps between the parts belong to nobody */
    arena->used += 64;
    if (start) {
        __asan_unpoison_memory_region(start, (size_t)bytes);
        __asan_poison_memory_region(start + bytes, (size_t)(arena->memory + arena->used - start - bytes));
    }
#endif
    return start;
}

/* Memory for one thing alone, to be given back. */
static char *borrow(int64_t bytes) {
    Arena counted = {0};
    take(&counted, bytes);
    Arena arena = {.memory = take_memory(counted.used)};
    return arena.memory ? take(&arena, bytes) : NULL;
}

#include "_operators.h"

/* Memory to find and sort the m best of n scores in. */
typedef struct {
    Kept kept;
    Item *items, *buffer;
    float *widened; /* (n) */
} Finder;

static Finder lay_out_finder(int64_t n, int64_t m, Arena *arena) {
    int64_t capacity = 4 * m + 128 < n ? 4 * m + 128 : n;
    int64_t room = capacity + 64; /* two vectors may be added before it is seen that there are too many */
    Finder finder = {.kept = {.capacity = capacity}};
    finder.kept.score = take(arena, room * 4);
    finder.kept.class = take(arena, room * 4);
    finder.items = take(arena, room * 8);
    finder.buffer = take(arena, room * 8);
    finder.widened = take(arena, n * 4);
    return finder;
}

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
    float *scores;    /* (lanes, m) of the candidates; later their softmax, which over all classes is not yet divided */
    Finder finder;
    /* Where all scores of the rows are sorted at once: */
    float *all_scores; /* (lanes, n) */
    int32_t *keys;     /* (n, lanes) */
    int32_t *targets;  /* (lanes) */
} Work;

static Work lay_out(const Spec *spec, const Batch *batch, Arena *arena) {
    int64_t n = spec->n, m = spec->m, k = spec->k, vector = LANES * 8;
    Work work = {.spec = spec, .batch = batch, .block = {.spec = spec, .m = m, .k = k}};
    Block *b = &work.block;
    work.over_candidates = spec->family != OPERATOR && spec->family != ERROR && !spec->all_classes;
    work.smoothed = spec->smoothing > 0 && spec->uses_softmax;
    b->x = take(arena, m * vector);
    b->grad_x = take(arena, m * vector);
    b->log_t = take(arena, k * vector);
    b->grad_log_t = take(arena, k * vector);
    run_operator(b, LAY_OUT); /* counts what it takes */
    b->scratch.memory = take(arena, b->scratch.used);
    b->position = take(arena, LANES * 4);
    b->real_count = take(arena, LANES * 4);
    b->rivals = take(arena, LANES * 4 * k);
    work.p_k = take(arena, k * vector);
    work.shares = take(arena, k * vector);
    work.cross_entropy = take(arena, vector);
    work.loss = take(arena, vector);
    work.grad_cross_entropy = take(arena, vector);
    work.classes = take(arena, LANES * m * 4);
    work.scores = take(arena, LANES * m * 4);
    work.finder = lay_out_finder(n, m, arena);
    if (spec->sorter) {
        work.all_scores = take(arena, LANES * n * 4);
        work.keys = take(arena, LANES * n * 4);
        work.targets = take(arena, LANES * 4);
    }
    return work;
}

/* Sorts the scores of all rows of a block. */
static void sort_rows(Work *work, int64_t start, int lanes) {
    const Batch *batch = work->batch;
    int64_t n = work->spec->n;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t row = start + lane;
        int counts = lane < lanes && batch->target[row] != batch->ignore_index;
        float *scores = work->all_scores + lane * n;
        work->targets[lane] = counts ? (int32_t)batch->target[row] : 0;
        if (counts)
            widen_row(row_of(batch->scores, batch->dtype, row * batch->stride), batch->dtype, n, scores);
        else
            memset(scores, 0, (size_t)n * 4);
    }
    sort_block(work->spec, work->all_scores, work->targets, work->keys);
}

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
    int64_t i = 0, behind = kept->count;
    while (i < behind) {
        int64_t middle = (i + behind) / 2;
        if (kept->class[middle] < target)
            i = middle + 1;
        else
            behind = middle;
    }
    if (i == kept->count || kept->class[i] != target) return;
    kept->count--;
    memmove(kept->score + i, kept->score + i + 1, (size_t)(kept->count - i) * 4);
    memmove(kept->class + i, kept->class + i + 1, (size_t)(kept->count - i) * 4);
}

/* Wires "given": the candidates from the last to the first, padding at the end; of all classes by their index, else by their
   rank. Returns the target's position, which among the sorted candidates is `rank`. */
static int32_t arrange_as_given(const Spec *spec, const Kept *others, const void *row, int dtype, int32_t target, int32_t rank,
                                int32_t *classes, float *scores, int32_t *rivals) {
    int64_t m = spec->m, count = m - 1;
    int32_t next = 0, position = 0;
    for (int padding = 0; padding < 2; padding++)
        for (int64_t i = m; i-- > 0;) {
            int32_t class = m == spec->n ? (int32_t)i : i == rank ? target : others->class[i - (i > rank)];
            float score = m != spec->n && class != target ? others->score[i - (i > rank)] : score_at(row, dtype, class);
            if ((score == -INFINITY) != padding) continue;
            if (class == target) position = next;
            classes[next] = class;
            scores[next++] = score;
        }
    for (int64_t j = 0; j < spec->k; j++) {
        rivals[j * LANES] = j < count ? PADDED_RIVAL : NO_RIVAL;
        if (j < count && others->score[j] != -INFINITY)
            for (int32_t i = 0; i < m; i++)
                if (classes[i] == others->class[j]) rivals[j * LANES] = i;
    }
    return position;
}

/* Puts a row's candidates, which are the target and the others in descending order, where the operator wants them; returns the
   target's position. */
static int32_t arrange(const Spec *spec, const Kept *others, const void *row, int dtype, int32_t target, int32_t real_count,
                       int32_t *classes, float *scores, int32_t *rivals) {
    int64_t count = spec->m - 1;
    float own = score_at(row, dtype, target);
    int network = spec->operator == NETWORK;
    int32_t position = 0, behind = (int32_t)count;
    while (position < behind) { /* its rank */
        int32_t middle = (position + behind) / 2;
        if (others->score[middle] > own || (others->score[middle] == own && others->class[middle] < target))
            position = middle + 1;
        else
            behind = middle;
    }
    if (network && spec->wires == GIVEN)
        return arrange_as_given(spec, others, row, dtype, target, position, classes, scores, rivals);
    if (spec->operator == KSUBSET)
        position = (int32_t)count;
    else if (network && spec->wires == TARGET)
        position = spec->starts[3 * real_count];
    memcpy(classes, others->class, (size_t)position * 4);
    memcpy(scores, others->score, (size_t)position * 4);
    memcpy(classes + position + 1, others->class + position, (size_t)(count - position) * 4);
    memcpy(scores + position + 1, others->score + position, (size_t)(count - position) * 4);
    classes[position] = target;
    scores[position] = own;
    for (int64_t j = 0; network && j < spec->k; j++)
        rivals[j * LANES] = j >= count ? NO_RIVAL : others->score[j] == -INFINITY ? PADDED_RIVAL : (int32_t)(j + (j >= position));
    return position;
}

/* Finds and arranges the candidates of a row that counts, and sets everything else that is known of it. */
static int read_row(Work *work, int64_t row, int lane) {
    const Spec *spec = work->spec;
    const Batch *batch = work->batch;
    Block *b = &work->block;
    Kept *kept = &work->finder.kept;
    Row *r = work->rows + lane;
    int64_t n = spec->n, m = spec->m, k = spec->k;
    int32_t target = (int32_t)batch->target[row];
    const void *row_scores = row_of(batch->scores, batch->dtype, row * batch->stride);
    const float *all_scores = spec->sorter ? work->all_scores + lane * n : NULL;
    float own = score_at(row_scores, batch->dtype, target), *scores = work->scores + lane * m;
    if (own == -INFINITY) return PADDED_TARGET;
    r->weight = batch->weight ? batch->weight[target] : 1;
    if (spec->sorter)
        r->maximum = max_and_sums(all_scores, n, spec->uses_softmax, work->smoothed, &kept->has_nan, &r->sums);
    else
        r->maximum = find_best(row_scores, batch->dtype, n, m, spec->uses_softmax, work->smoothed, kept, work->finder.widened,
                               &r->sums);
    r->has_nan = kept->has_nan || own != own || r->maximum == INFINITY; /* inf - inf: an overflow must show */
    kept->wanted = m - 1;
    if (r->has_nan) { /* any candidates will do */
        kept->count = 0;
        for (int64_t i = 0; kept->count < m - 1; i++)
            if (i != target) kept->score[kept->count] = 0, kept->class[kept->count++] = (int32_t)i;
    } else if (spec->sorter)
        unpack_sorted(work->keys, all_scores, lane, kept);
    else {
        remove_target(kept, target);
        sort_kept(kept, work->finder.items, work->finder.buffer);
    }
    int32_t real_count = 1;
    while (real_count < m && kept->score[real_count - 1] != -INFINITY) real_count++;
    if (real_count < k) return TOO_FEW;
    b->real_count[lane] = real_count;
    b->has_padding |= real_count < m;
    b->position[lane] = arrange(spec, kept, row_scores, batch->dtype, target, real_count, work->classes + lane * m, scores,
                                b->rivals + lane);
    r->target_score = r->has_nan ? 0 : (double)own;
    double scale = 1 / spec->scale, *x = (double *)b->x + lane;
    if (r->has_nan)
        for (int64_t i = 0; i < m; i++) x[i * LANES] = 0;
    else if (real_count < m)
        for (int64_t i = 0; i < m; i++)
            x[i * LANES] = scores[i] == -INFINITY ? -1e30 : ((double)scores[i] - r->target_score) * scale;
    else
        for (int64_t i = 0; i < m; i++) x[i * LANES] = ((double)scores[i] - r->target_score) * scale;
    const double *p_k = batch->p_k;
    if (batch->p_k_of != OF_ALL) p_k += k * (batch->p_k_of == OF_CLASS ? target : row);
    for (int64_t j = 0; j < k; j++) ((double *)work->p_k)[j * LANES + lane] = p_k[j];
    if (batch->cross_entropy) ((double *)work->cross_entropy)[lane] = (double)batch->cross_entropy[row];
    if (spec->uses_softmax) {
        if (r->has_nan) r->sums.exp_sum = 1;
        ((double *)work->cross_entropy)[lane] = (double)r->maximum - r->target_score; /* add_log_sums does the rest */
    }
    return FINE;
}

/* The logarithm of the sum in each row's cross-entropy over all classes. */
static void add_log_sums(Work *work) {
    EACH {
        vd sum;
        for (int l = 0; l < BYTES / 8; l++) {
            const Row *r = work->rows + v * (BYTES / 8) + l;
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
            for (int l = 0; l < BYTES / 8; l++) work->scores[(v * (BYTES / 8) + l) * b->m + i] = (float)share[l];
        }
    }
}

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
    float *gradient = batch->gradient + row * m, *e = work->scores + lane * m;
    float *rest = batch->rest ? batch->rest + 3 * row : NULL;
    memcpy(batch->classes + row * m, work->classes + lane * m, (size_t)m * 4);
    double by_ce = r->counts ? ((double *)work->grad_cross_entropy)[lane] * (double)r->weight : 0;
    if (batch->grad_cross_entropy) batch->grad_cross_entropy[row] = (float)by_ce;
    if (!r->counts) {
        memset(gradient, 0, (size_t)m * 4);
        if (rest) memset(rest, 0, 12);
        return;
    }
    double scale = (double)r->weight / spec->scale, share = 0, added = 0;
    const double *grad_x = (const double *)work->block.grad_x + lane;
    int32_t position = work->block.position[lane];
    double grad_target = grad_x[position * LANES] * scale - by_ce;
    if (spec->uses_softmax) {
        double amount = work->smoothed ? spec->ce_weight * spec->smoothing * (double)r->weight : 0;
        share = (by_ce + amount) / r->sums.exp_sum;
        if (amount > 0) added = -amount / (double)r->sums.real_count;
        vf maximum = splatf(r->maximum);
        int64_t i = 0;
        int padding = work->block.real_count[lane] < m;
        for (; i + W <= m; i += W) {
            vf x = load_f32(e + i), y = exponentialf(x - maximum);
            if (padding) y = (vf)(((vi)y & (vi)(x > -INFINITY)) | ((vi)splatf(-1) & ~(vi)(x > -INFINITY)));
            store_f32(e + i, y);
        }
        for (; i < m; i++) e[i] = e[i] == -INFINITY ? -1 : exponentialf(splatf(e[i] - r->maximum))[0];
        for (i = 0; i < m; i++) /* padding, marked by -1, has none */
            gradient[i] = padding && e[i] < 0 ? 0 : (float)(grad_x[i * LANES] * scale + share * (double)e[i] + added);
        grad_target += share * (double)e[position] + added;
    } else if (work->over_candidates) {
        for (int64_t i = 0; i < m; i++) gradient[i] = (float)(grad_x[i * LANES] * scale + by_ce * (double)e[i]);
        grad_target += by_ce * (double)e[position];
    } else {
        for (int64_t i = 0; i < m; i++) gradient[i] = (float)(grad_x[i * LANES] * scale);
        grad_target += by_ce; /* a cross-entropy that is given has its own gradient */
    }
    gradient[position] = (float)grad_target;
    for (int64_t i = 0; r->has_nan && i < m; i++) gradient[i] = NAN;
    if (rest) {
        rest[0] = r->maximum;
        rest[1] = r->has_nan ? NAN : (float)share;
        rest[2] = (float)added;
    }
}

static int forward_blocks(Work *work, int64_t first, int64_t last) {
    const Spec *spec = work->spec;
    const Batch *batch = work->batch;
    Block *b = &work->block;
    int runs = !(spec->k == 1 && work->over_candidates), status = FINE;
    for (int64_t start = first; start < last; start += LANES) {
        int lanes = (int)(last - start < LANES ? last - start : LANES);
        b->has_padding = 0;
        if (spec->sorter) sort_rows(work, start, lanes);
        for (int lane = 0; lane < LANES; lane++) {
            work->rows[lane] = (Row){.counts = lane < lanes && batch->target[start + lane] != batch->ignore_index};
            if (!work->rows[lane].counts)
                fill_unused_lane(work, lane);
            else if ((status = read_row(work, start + lane, lane)) != FINE)
                return status;
        }
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

static int forward(const Call *call, int64_t first, int64_t last) {
    Arena arena = {0};
    lay_out(call->spec, call->batch, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    Work work = lay_out(call->spec, call->batch, &arena);
    int status = forward_blocks(&work, first, last);
    give_memory_back(arena.memory);
    return status;
}

static int backward(const Call *call, int64_t first, int64_t last) {
    const Backward *back = call->backward;
    /* What no cache will hold need not be read into the caches to be written. */
    int past_caches = back->dtype == FLOAT32 && back->rows * back->n * 4 >= PAST_CACHES && back->n >= 1024;
    for (int64_t row = first; row < last; row++) {
        float factor = back->incoming[back->single ? 0 : row * back->incoming_stride];
        if (back->divisor) factor /= *back->divisor;
        BY_DTYPE(back->dtype, backward_row, back, row, factor, past_caches);
    }
    return FINE;
}

static int best_rows(const Selection *given, Finder *finder, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        Sums unused;
        find_best(row_of(given->scores, given->dtype, row * given->stride), given->dtype, given->n, given->m, 0, 0,
                  &finder->kept, finder->widened, &unused);
        if (finder->kept.has_nan) return STRANGE; /* it has no order here; the plain code has one */
        sort_kept(&finder->kept, finder->items, finder->buffer);
        for (int64_t i = 0; i < given->m; i++) given->classes[row * given->m + i] = finder->kept.class[i];
    }
    return FINE;
}

#include "_smooth.h"

static int with_finder(const Call *call, int64_t n, int64_t m, int64_t first, int64_t last) {
    Arena arena = {0};
    lay_out_finder(n, m, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    Finder finder = lay_out_finder(n, m, &arena);
    int status = call->selection ? best_rows(call->selection, &finder, first, last)
                                 : smooth_rows(call->smooth, call->batch, &finder, first, last);
    give_memory_back(arena.memory);
    return status;
}

static int best(const Call *call, int64_t first, int64_t last) {
    return with_finder(call, call->selection->n, call->selection->m, first, last);
}

static int smooth(const Call *call, int64_t first, int64_t last) {
    int64_t n = call->smooth->n, m = call->smooth->k + 2;
    return with_finder(call, n, m < n ? m : n, first, last);
}

#include "_masks.h"
#include "_subset.h"
#include "_ranks.h"
#include "_network_mask.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
const Variant JOIN(variant_, VARIANT) = {TEXT(VARIANT), forward, smooth, backward, best, mask_of_kind, mask_backward_of_kind, ranking,
                                         draw, network_mask};
