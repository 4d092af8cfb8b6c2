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

#include "_select.h"

enum { PAST_CACHES = 1 << 25 }; /* bytes */

/* Memory for the work on a block of rows, of which parts are taken from the front. */
typedef struct {
    char *next;
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

#include "_operators.h"

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

/* The work on blocks of rows: the loss, the batch, and memory for a block. */
typedef struct {
    const Spec *spec;
    const Batch *batch;
    int over_candidates, smoothed;
    Block b;
    Row rows[LANES];
    vd *p, *shares, *cross_entropy, *loss, *of_cross_entropy;
    int32_t *classes; /* (lanes, m) */
    float *scores;    /* (lanes, m); in the end the softmax of the candidates, over all classes not yet divided by its sum */
    Kept kept;
    Item *order, *other;
    float *whole; /* (n) */
    /* where all scores are sorted many rows at once */
    float *all_scores; /* (lanes, n) */
    int32_t *keys, *targets;
} Job;

static Job job_of(const Spec *spec, const Batch *batch, char *memory) {
    int64_t n = spec->n, m = spec->m, k = spec->k, room = room_of(spec);
    Arena arena = {memory};
    Job job = {.spec = spec, .batch = batch, .b = {.spec = spec, .m = m, .k = k}, .kept = {.room = room - 64}};
    job.over_candidates = spec->family != OPERATOR && spec->family != ERROR && !spec->all_classes;
    job.smoothed = spec->smoothing > 0 && spec->uses_softmax;
    job.b.x = VECTORS(m);
    job.b.of_x = VECTORS(m);
    job.b.log_t = VECTORS(k);
    job.b.of_log_t = VECTORS(k);
    job.b.work = VECTORS(work_size(spec));
    job.b.place = take(&arena, LANES * 4);
    job.b.number = take(&arena, LANES * 4);
    job.b.rivals = take(&arena, LANES * 4 * k);
    job.p = VECTORS(k);
    job.shares = VECTORS(k);
    job.cross_entropy = VECTORS(1);
    job.loss = VECTORS(1);
    job.of_cross_entropy = VECTORS(1);
    job.classes = take(&arena, LANES * m * 4);
    job.scores = take(&arena, LANES * m * 4);
    job.kept.score = take(&arena, room * 4);
    job.kept.class = take(&arena, room * 4);
    job.order = take(&arena, room * 8);
    job.other = take(&arena, room * 8);
    job.whole = take(&arena, n * 4);
    if (spec->sorting) {
        job.all_scores = take(&arena, LANES * n * 4);
        job.keys = take(&arena, LANES * n * 4);
        job.targets = take(&arena, LANES * 4);
    }
    return job;
}

/* Sorts the scores of all rows of a block. */
static void sort_all(Job *job, int64_t start, int lanes) {
    const Batch *batch = job->batch;
    int64_t n = job->spec->n;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t row = start + lane;
        int counts = lane < lanes && batch->target[row] != batch->ignore_index;
        float *scores = job->all_scores + lane * n;
        job->targets[lane] = counts ? (int32_t)batch->target[row] : 0;
        if (counts)
            read_all(row_of(batch->scores, batch->dtype, row * batch->stride), batch->dtype, n, scores);
        else
            memset(scores, 0, (size_t)n * 4);
    }
    sort_block(job->spec, job->all_scores, job->targets, job->keys);
}

/* A lane without a row, or with one that does not count: anything that is harmless. */
static void leave_out(Job *job, int lane) {
    Block *b = &job->b;
    for (int64_t i = 0; i < b->m; i++) {
        ((double *)b->x)[i * LANES + lane] = 0;
        job->classes[lane * b->m + i] = (int32_t)i;
        job->scores[lane * b->m + i] = 0;
    }
    for (int64_t j = 0; j < b->k; j++) {
        ((double *)job->p)[j * LANES + lane] = 1.0 / (double)b->k;
        b->rivals[j * LANES + lane] = -1;
    }
    b->place[lane] = 0;
    b->number[lane] = (int32_t)b->m;
    ((double *)job->cross_entropy)[lane] = 0;
}

/* Takes the target from what was kept, where the classes are in order. */
static void leave_target_out(Kept *kept, int32_t target) {
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

/* Finds and arranges the candidates of a row that counts. */
static int read_row(Job *job, int64_t row, int lane) {
    const Spec *spec = job->spec;
    const Batch *batch = job->batch;
    Block *b = &job->b;
    Kept *kept = &job->kept;
    Row *r = job->rows + lane;
    int64_t n = spec->n, m = spec->m, k = spec->k;
    int32_t target = (int32_t)batch->target[row];
    const void *scores_of_row = row_of(batch->scores, batch->dtype, row * batch->stride);
    float own = score_at(scores_of_row, batch->dtype, target), *scores = job->scores + lane * m;
    if (own == -INFINITY) return PADDED_TARGET;
    r->weight = batch->weight ? batch->weight[target] : 1;
    Sums sums = {0};
    if (spec->sorting)
        r->top = sums_of(job->all_scores + lane * n, n, spec->uses_softmax, job->smoothed, &kept->nan, &sums);
    else
        r->top = find(scores_of_row, batch->dtype, n, m, spec->uses_softmax, job->smoothed, kept, job->whole, &sums);
    r->nan = kept->nan || own != own || r->top == INFINITY; /* inf - inf: what has overflown must show */
    kept->wanted = m - 1;
    if (r->nan) { /* the row's numbers are replaced in the end */
        kept->count = 0;
        for (int64_t i = 0; kept->count < m - 1; i++)
            if (i != target) kept->score[kept->count] = 0, kept->class[kept->count++] = (int32_t)i;
    } else if (spec->sorting)
        unpack(job->keys, job->all_scores + lane * n, lane, kept);
    else {
        leave_target_out(kept, target);
        sort(kept, job->order, job->other);
    }
    int32_t number = 1;
    while (number < m && kept->score[number - 1] != -INFINITY) number++;
    if (number < k) return TOO_FEW;
    b->number[lane] = number;
    b->padded |= number < m;
    b->place[lane] = arrange(spec, kept, scores_of_row, batch->dtype, target, number, job->classes + lane * m, scores, b->rivals + lane);
    r->score = r->nan ? 0 : (double)own;
    double scale = 1 / spec->scale, *x = (double *)b->x + lane;
    if (r->nan)
        for (int64_t i = 0; i < m; i++) x[i * LANES] = 0;
    else if (number < m)
        for (int64_t i = 0; i < m; i++) x[i * LANES] = scores[i] == -INFINITY ? -1e30 : ((double)scores[i] - r->score) * scale;
    else
        for (int64_t i = 0; i < m; i++) x[i * LANES] = ((double)scores[i] - r->score) * scale;
    const double *p_k = batch->p_k;
    if (batch->p_k_of != OF_ALL) p_k += k * (batch->p_k_of == OF_CLASS ? target : row);
    for (int64_t j = 0; j < k; j++) ((double *)job->p)[j * LANES + lane] = p_k[j];
    if (batch->cross_entropy) ((double *)job->cross_entropy)[lane] = (double)batch->cross_entropy[row];
    if (spec->uses_softmax) {
        r->sum = r->nan ? 1 : sums.exponentials;
        r->real = sums.real;
        r->shifted = sums.shifted;
        ((double *)job->cross_entropy)[lane] = (double)r->top - r->score; /* and the logarithm of the sum, in add_logarithms */
    }
    return FINE;
}

static void add_logarithms(Job *job) {
    EACH {
        vd sum;
        for (int l = 0; l < BYTES / 8; l++) {
            const Row *r = job->rows + v * (BYTES / 8) + l;
            sum[l] = r->counts ? r->sum : 1;
        }
        job->cross_entropy[v] += logarithm(sum);
    }
}

/* Cross-entropy and softmax over the candidates. */
static void over_candidates(Job *job) {
    Block *b = &job->b;
    double scale = job->spec->scale;
    EACH {
        vd top = all(-1e300), sum = {0};
        for (int64_t i = 0; i < b->m; i++) top = larger(top, b->x[i * NV + v]);
        for (int64_t i = 0; i < b->m; i++) sum += b->of_x[i * NV + v] = exponential((b->x[i * NV + v] - top) * scale);
        job->cross_entropy[v] = top * scale + logarithm(sum);
        for (int64_t i = 0; i < b->m; i++) {
            vd share = b->of_x[i * NV + v] / sum;
            for (int l = 0; l < BYTES / 8; l++) job->scores[(v * (BYTES / 8) + l) * b->m + i] = (float)share[l];
        }
    }
}

static void write_loss(Job *job, int64_t row, int lane) {
    const Spec *spec = job->spec;
    const Row *r = job->rows + lane;
    double value = ((double *)job->loss)[lane];
    if (job->smoothed && r->counts) /* log sum exp less the mean score */
        value += spec->ce_weight * spec->smoothing *
                 (((double *)job->cross_entropy)[lane] + r->score - (double)r->top - r->shifted / (double)r->real);
    job->batch->loss[row] = !r->counts ? 0 : r->nan ? NAN : (float)(value * (double)r->weight);
}

/* What the backward pass needs of a row. */
static void write_gradient(Job *job, int64_t row, int lane) {
    const Spec *spec = job->spec;
    const Batch *batch = job->batch;
    const Row *r = job->rows + lane;
    int64_t m = spec->m;
    float *gradient = batch->gradient + row * m, *e = job->scores + lane * m;
    float *rest = batch->of_rest ? batch->of_rest + 3 * row : NULL;
    memcpy(batch->classes + row * m, job->classes + lane * m, (size_t)m * 4);
    double by_ce = r->counts ? ((double *)job->of_cross_entropy)[lane] * (double)r->weight : 0;
    if (batch->of_cross_entropy) batch->of_cross_entropy[row] = (float)by_ce;
    if (!r->counts) {
        memset(gradient, 0, (size_t)m * 4);
        if (rest) memset(rest, 0, 12);
        return;
    }
    double scale = (double)r->weight / spec->scale, share = 0, added = 0;
    const double *of_x = (const double *)job->b.of_x + lane;
    int32_t place = job->b.place[lane];
    double of_target = of_x[place * LANES] * scale - by_ce;
    if (spec->uses_softmax) {
        double amount = job->smoothed ? spec->ce_weight * spec->smoothing * (double)r->weight : 0;
        share = (by_ce + amount) / r->sum;
        if (amount > 0) added = -amount / (double)r->real;
        vf top = allf(r->top);
        int64_t i = 0;
        int padding = job->b.number[lane] < m;
        for (; i + W <= m; i += W) {
            vf x = load_f32(e + i), y = exponentialf(x - top);
            if (padding) y = (vf)(((vi)y & (vi)(x > -INFINITY)) | ((vi)allf(-1) & ~(vi)(x > -INFINITY)));
            store_f32(e + i, y);
        }
        for (; i < m; i++) e[i] = e[i] == -INFINITY ? -1 : exponentialf(allf(e[i] - r->top))[0];
        for (i = 0; i < m; i++) /* padding, marked by -1, has none */
            gradient[i] = padding && e[i] < 0 ? 0 : (float)(of_x[i * LANES] * scale + share * (double)e[i] + added);
        of_target += share * (double)e[place] + added;
    } else if (job->over_candidates) {
        for (int64_t i = 0; i < m; i++) gradient[i] = (float)(of_x[i * LANES] * scale + by_ce * (double)e[i]);
        of_target += by_ce * (double)e[place];
    } else {
        for (int64_t i = 0; i < m; i++) gradient[i] = (float)(of_x[i * LANES] * scale);
        of_target += by_ce; /* where it is given, its slope is apart */
    }
    gradient[place] = (float)of_target;
    for (int64_t i = 0; r->nan && i < m; i++) gradient[i] = NAN;
    if (rest) {
        rest[0] = r->top;
        rest[1] = r->nan ? NAN : (float)share;
        rest[2] = (float)added;
    }
}

int EXPORTED(forward)(const Spec *spec, const Batch *batch, int64_t first, int64_t last, char *memory) {
    Job job = job_of(spec, batch, memory);
    Block *b = &job.b;
    int runs = !(spec->k == 1 && job.over_candidates), status = FINE;
    for (int64_t start = first; start < last; start += LANES) {
        int lanes = (int)(last - start < LANES ? last - start : LANES);
        b->padded = 0;
        if (spec->sorting) sort_all(&job, start, lanes);
        for (int lane = 0; lane < LANES; lane++) {
            job.rows[lane] = (Row){.counts = lane < lanes && batch->target[start + lane] != batch->ignore_index};
            if (!job.rows[lane].counts)
                leave_out(&job, lane);
            else if ((status = read_row(&job, start + lane, lane)) != FINE)
                return status;
        }
        if (spec->uses_softmax) add_logarithms(&job);
        if (job.over_candidates) over_candidates(&job);
        if (runs)
            run_operator(b, 0);
        else
            EACH b->log_t[v] = (vd){0};
        shape(b, job.p, job.cross_entropy, job.loss, job.of_cross_entropy, job.shares);
        for (int lane = 0; lane < lanes; lane++) write_loss(&job, start + lane, lane);
        if (!batch->gradient) continue;
        memset(b->of_x, 0, (size_t)(spec->m * LANES * 8));
        if (runs) run_operator(b, 1);
        for (int lane = 0; lane < lanes; lane++) write_gradient(&job, start + lane, lane);
    }
    return FINE;
}

int EXPORTED(backward)(const Back *back, int64_t first, int64_t last) {
    /* What no cache holds until it is read again need not be read into them to be written. */
    int past_caches = back->dtype == FLOAT32 && back->rows * back->n * 4 >= PAST_CACHES && back->n >= 1024;
    for (int64_t row = first; row < last; row++) {
        float factor = back->incoming[back->single ? 0 : row * back->incoming_stride];
        if (back->divisor) factor /= *back->divisor;
        if (back->dtype == FLOAT32)
            back_row_f32(back, row, factor, past_caches);
        else if (back->dtype == BFLOAT16)
            back_row_bf16(back, row, factor, 0);
        else
            back_row_f16(back, row, factor, 0);
    }
    return FINE;
}

/* Memory to find and sort the m best of n scores in. */
typedef struct {
    Kept kept;
    Item *order, *other;
    float *whole; /* (n) */
} Finder;

static Finder finder_of(int64_t n, int64_t m, char *memory) {
    Spec sizes = {.n = n, .m = m};
    Arena arena = {memory};
    int64_t room = room_of(&sizes);
    Finder finder = {.kept = {.room = room - 64}};
    finder.kept.score = take(&arena, room * 4);
    finder.kept.class = take(&arena, room * 4);
    finder.order = take(&arena, room * 8);
    finder.other = take(&arena, room * 8);
    finder.whole = take(&arena, n * 4);
    return finder;
}

/* The classes of the m best scores of each row, descending. */
int64_t EXPORTED(best_size)(int64_t n, int64_t m) {
    Spec spec = {.n = n, .m = m};
    return room_of(&spec) * 40 + n * 4 + 64 * 16;
}

int EXPORTED(best)(const void *scores, int dtype, int64_t stride, int64_t n, int64_t m, int64_t *out,
                   int64_t first, int64_t last, char *memory) {
    Finder finder = finder_of(n, m, memory);
    for (int64_t row = first; row < last; row++) {
        Sums sums;
        find(row_of(scores, dtype, row * stride), dtype, n, m, 0, 0, &finder.kept, finder.whole, &sums);
        if (finder.kept.nan) return STRANGE; /* it has no order here; the plain code has one */
        sort(&finder.kept, finder.order, finder.other);
        for (int64_t i = 0; i < m; i++) out[row * m + i] = finder.kept.class[i];
    }
    return FINE;
}

#include "_smooth.h"

int EXPORTED(smooth)(const SmoothSpec *spec, const Batch *batch, int64_t first, int64_t last, char *memory) {
    int64_t n = spec->n, k = spec->k, wanted = k + 2 < n ? k + 2 : n;
    Finder finder = finder_of(n, wanted, memory);
    Kept kept = finder.kept;
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
        find(scores, batch->dtype, n, wanted, 0, 0, &kept, finder.whole, &unused);
        if (kept.nan || own != own || own == INFINITY) return STRANGE;
        sort(&kept, finder.order, finder.other);
        int64_t found = 0;
        for (int64_t i = 0; i < kept.count; i++)
            if (kept.class[i] != target) kept.score[found] = kept.score[i], kept.class[found++] = kept.class[i];
        float kth = kept.score[k - 1];
        if (kept.score[0] == INFINITY) return STRANGE; /* what has overflown must show */
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
