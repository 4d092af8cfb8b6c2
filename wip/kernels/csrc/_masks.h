/* Masks with a threshold: m_c = F((s_c - b) / t) with one b a row, such that the mask sums to k. F is the Laplace distribution
   function (anyk/operators/lapsum.py) or clip(x, 0, 1) (anyk/operators/permutahedron.py).

   A row is passed over in parts of PART scores, which several threads may share. What is added up is added up for each part,
   and these sums in their order: the result does not depend on the number of threads. */

/* A threshold in two floats: a score less the first is exact where the two are near. */
typedef struct {
    vf high, low, rate;
} Scale;
INLINE Scale scale_of(double b, double rate) {
    float high = (float)b;
    return (Scale){splatf(high), splatf((float)(b - (double)high)), splatf((float)rate)};
}
INLINE vf scaled(vf s, Scale scale) { return ((s - scale.high) - scale.low) * scale.rate; }

/* What a pass finds in a part of a row. */
typedef struct {
    int64_t count;         /* of the scores above the threshold */
    double above, below;   /* sums of e^-|x| over those above, and over the others */
    float lowest, highest; /* x of those above, and of the others */
    double sum, weighted;  /* of the backward pass */
} Found;

/* A row, or some scores of a row, and what the passes over it need. */
typedef struct {
    const void *scores;
    int64_t n;
    int dtype, threads, operator;
    int turned; /* it stands for the scores with the other sign */
    double reference, rate; /* what is computed in double precision is a score less the reference, times the rate */
    double tail; /* the sum of e^s over the scores that were left out, which are at most 0 */
    Scale scale;
    float limit;
    Found *found; /* of each part */
    float *kept;  /* (n): those of each part stand where the part begins */
    float *maxima;
    int64_t groups, columns;
    _Atomic int is_finite;
    const void *incoming;
    void *out;
    float *slopes;
    float factor, mean; /* the gradient is factor slope (incoming - mean) */
} Line;

INLINE int64_t parts_of(int64_t n) { return (n + PART - 1) / PART; }

/* Defines name(line), a pass over all parts of a line, by what is to be done with the scores [first, last) of one. */
#define OVER_PARTS(name, ...)                                                                         \
    static void name##_task(void *context, int64_t part) {                                            \
        Line *line = context;                                                                         \
        int64_t first = part * PART, last = first + PART < line->n ? first + PART : line->n;          \
        FOR_DTYPE(line->dtype, __VA_ARGS__);                                                          \
    }                                                                                                 \
    static void name(Line *line) { each_part(name##_task, line, parts_of(line->n), line->threads); }

/* ---- passes ---- */

static void groups_task(void *context, int64_t part) {
    Line *line = context;
    int64_t first = part * line->columns, last = first + line->columns < line->groups ? first + line->columns : line->groups;
    int32_t bits;
    FOR_DTYPE(line->dtype, bits = pass_groups(line->scores, DTYPE, line->n, line->turned, line->groups, first, last, 0, line->maxima));
    if (bits >= INFINITE_BITS) line->is_finite = 0;
}

/* Leaves in `limit` a score that m scores reach, and few more as a rule. */
static void limit_to_best(Line *line, int64_t m) {
    line->groups = groups_for(line->n, m);
    /* the maxima do not depend on how the groups are shared */
    int64_t shares = line->threads > 1 && line->n >= 4 * PART ? 4 * (int64_t)line->threads : 1;
    line->columns = (line->groups / W + shares - 1) / shares * W;
    each_part(groups_task, line, (line->groups + line->columns - 1) / line->columns, line->threads);
    if (!line->is_finite) return;
    int64_t count = line->groups < line->n ? line->groups : line->n;
    line->limit = score_of_key(threshold_key(line->maxima, count, m, m / 8 + 1, key_step(line->dtype)));
}

/* With `sums`, adds up on both sides of the threshold; with `keeps`, keeps what reaches the limit, which is the threshold then. */
INLINE void pass_split(Line *line, const int dtype, int64_t first, int64_t last, const int keeps, const int sums) {
    const vi sign = splati(line->turned ? INT32_MIN : 0);
    const vf infinite = splatf(INFINITY), limit = splatf(line->limit);
    const Scale scale = line->scale;
    Found found = {0};
    vf lowest = infinite, highest = -infinite;
    float *kept = line->kept + first;
    for (int64_t i = first; i < last;) {
        vf above = {0}, all = {0};
        vi count = {0};
        for (int64_t end = i + FEW < last ? i + FEW : last; i < end; i += W) {
            vf s = (vf)((vi)load_some(line->scores, dtype, i, line->n) ^ sign);
            for (int l = W - 1; i + l >= line->n; l--) s[l] = -INFINITY;
            vf x = scaled(s, scale);
            vi is_above = keeps ? (vi)(s >= limit) : (vi)(x > 0);
            count -= is_above;
            if (keeps) {
                uint32_t hits = reaches(s, limit);
                float lanes[W];
                if (__builtin_expect(hits != 0, 0)) {
                    store_f32(lanes, s);
                    for (; hits; hits &= hits - 1) *kept++ = lanes[__builtin_ctz(hits)];
                }
            }
            if (sums) {
                vf e = exponentialf(-absolutef(x));
                above += onlyf(is_above, e);
                all += e;
            }
            if (sums && !keeps) {
                lowest = smallerf(pickf(is_above, x, infinite), lowest);
                highest = largerf(pickf(is_above, -infinite, x), highest);
            }
        }
        found.above += total_of(above), found.below += total_of(all) - total_of(above);
        found.count += sum_of(count);
    }
    found.lowest = -largest_of(-lowest), found.highest = largest_of(highest);
    line->found[first / PART] = found;
}
OVER_PARTS(split, pass_split(line, DTYPE, first, last, 0, 1))
OVER_PARTS(keep_and_sum, pass_split(line, DTYPE, first, last, 1, 1))
OVER_PARTS(keep_only, pass_split(line, DTYPE, first, last, 1, 0))

/* A line of what was kept of another one. */
static Line line_of_kept(const Line *line) {
    Line few = *line;
    few.scores = line->kept, few.dtype = FLOAT32, few.turned = 0, few.n = 0, few.tail = DBL_MIN; /* far away it may be no float */
    for (int64_t part = 0; part < parts_of(line->n); part++) {
        memmove(line->kept + few.n, line->kept + part * PART, (size_t)line->found[part].count * 4);
        few.n += line->found[part].count;
        few.tail += line->found[part].below;
    }
    return few;
}

/* ---- thresholds ---- */

/* Where b lies among the scores, and the sums that the equation for b has then. */
typedef struct {
    double passed;          /* how many scores are above b */
    double lowest, highest; /* of those above b, and of the others */
    double above, below;    /* sums of e^(b - s) over the scores above b, and of e^(s - b) over the others */
} Split;

/* The tail is at most 0, and b above it: without one, e^-b may be infinite. */
static double tail_at(const Line *line, double b) { return line->tail > 0 ? line->tail * exp(-b) : 0; }

static Split split_at(Line *line, double b) {
    Split at = {.lowest = INFINITY, .highest = line->tail > 0 ? 0 : -INFINITY, .below = tail_at(line, b)};
    line->scale = scale_of(line->reference + b / line->rate, line->rate);
    split(line);
    for (int64_t part = 0; part < parts_of(line->n); part++) {
        const Found *found = line->found + part;
        at.passed += (double)found->count, at.above += found->above, at.below += found->below;
        at.lowest = fmin(at.lowest, b + (double)found->lowest);
        at.highest = fmax(at.highest, b + (double)found->highest);
    }
    return at;
}

/* log of the sum of e^(-|s - from|) over the scores on one side of b. */
static double log_sum_beside(const Line *line, double b, double from, int above) {
    double sum = above ? 0 : tail_at(line, from);
    for (int64_t i = 0; i < line->n; i++) {
        double score = (double)score_at(line->scores, line->dtype, i);
        double s = ((line->turned ? -score : score) - line->reference) * line->rate;
        if ((s > b) == above) sum += exp(-fabs(s - from));
    }
    return log(sum);
}

/* b with sum_c F(s_c - b) = k, F that of Laplace, from a first guess.

   With i scores above b, A = sum of e^(-s) over them and B = sum of e^s over the others, the equation is i - A e^b / 2 + B e^-b / 2
   = k, quadratic in e^b. Its solution is right if b has the same i; else it is where to look next, and wrong by the square of
   the distance at most. */
static double laplace_threshold(Line *line, double k, double b) {
    /* Further away than that, e to the distance is no float. And so near, nothing is left to gain in float32. */
    const double reach = 80, near = 1e-4;
    double low = line->tail > 0 ? 0 : -INFINITY, high = INFINITY;
    for (int step = 0; step < 200; step++) {
        Split at = split_at(line, b);
        double missing = k - at.passed, found;
        if (at.passed + (at.below - at.above) / 2 > k)
            low = b;
        else
            high = b;
        double root = sqrt(missing * missing + at.above * at.below);
        int far = 0; /* on to the next score */
        if (missing == 0 && b - at.highest < reach && at.lowest - b < reach)
            found = b + (log(at.below) - log(at.above)) / 2;
        else if (missing == 0)
            found = (at.highest + log_sum_beside(line, b, at.highest, 0) + at.lowest - log_sum_beside(line, b, at.lowest, 1)) / 2;
        else if (missing > 0)
            found = (far = b - at.highest > reach) ? at.highest : b + log(at.below / (missing + root));
        else
            found = (far = at.lowest - b > reach) ? at.lowest : b + log((root - missing) / at.above);
        if (!far && ((found >= at.highest && found <= at.lowest) || fabs(found - b) < near)) return found;
        /* on to the next interval: not past the bounds that are known */
        if (found > high || found < low) found = high - low < INFINITY ? low + (high - low) / 2 : found > high ? high : low;
        /* hard masks: one interval at a time would take as many steps as there are scores */
        if (step > 8 && step % 2 && high - low < INFINITY) found = low + (high - low) / 2;
        if (found == b) return b;
        b = found;
    }
    return b;
}

enum { SAMPLE = 4096 }; /* scores of a long row that the first guess of a threshold is made of */

/* So many temperatures from the number that it is relative to, a float64 has too few digits for a threshold: the plain code has
   it relative to a score near it. */
static const double FAR = 4e9; /* more than the -1e9 that padding often has */

/* How many of the best scores the threshold depends on: for Laplace, at the (2k)-th score half of 2k scores have passed at
   least, so that b lies above it. */
static int64_t wanted(int operator, int64_t n, double k) {
    int64_t m = operator == LAPSUM ? 2 * (int64_t)ceil(k) + 1 : (int64_t)floor(k) + 1;
    return m < 1 ? 1 : m < n ? m : n;
}
/* So few are looked at, and a sum over the rest. */
static int depends_on_few(int64_t n, int64_t m) { return 4 * m <= n; }

/* The threshold of scores of which few pass, less the reference. */
static double laplace_of_few(Line *line, double k, int64_t m) {
    limit_to_best(line, m);
    if (!line->is_finite) return NAN;
    line->reference = (double)line->limit;
    line->scale = scale_of(line->reference, line->rate);
    line->limit = nextafterf(line->limit, INFINITY);
    keep_and_sum(line);
    Line few = line_of_kept(line);
    double best = few.n ? (double)largest_score(few.scores, few.n) - line->reference : 0;
    return laplace_threshold(&few, k, best * line->rate);
}

static double laplace_of_many(Line *line, double k) {
    limit_to_best(line, 1);
    if (!line->is_finite) return NAN;
    int64_t size = line->n < SAMPLE ? line->n : SAMPLE, stride = line->n / size;
    double mean = 0;
    for (int64_t i = 0; i < size; i++) {
        float score = score_at(line->scores, line->dtype, i * stride);
        line->kept[i] = line->turned ? -score : score;
        mean += (double)line->kept[i] / (double)size;
    }
    line->reference = mean;
    if (line->n == size) return laplace_threshold(line, k, 0);
    Line sample = *line;
    sample.scores = line->kept, sample.dtype = FLOAT32, sample.turned = 0, sample.n = size;
    return laplace_threshold(line, k, laplace_threshold(&sample, k * (double)size / (double)line->n, 0));
}

/* tau with sum_c clip(s_c - tau, 0, 1) = k, for `count` scores over the temperature, relative to the k-th; low <= tau < high. The sum
   falls with tau in straight pieces: a Newton step that ends on the right piece is exact. */
static double clip_threshold(const float *s, int64_t count, double k, double low, double high) {
    double tau = low + (high - low) / 2;
    for (int step = 0; step < 200; step++) {
        double sum = 0; /* of those between 0 and 1: among many ones they would lose their digits */
        int64_t inside = 0, ones = 0;
        vf at = splatf((float)tau);
        tau = (double)at[0];
        for (int64_t i = 0; i < count;) {
            vf some = {0};
            vi between = {0}, above = {0};
            for (int64_t end = i + FEW < count ? i + FEW : count; i < end; i += W) {
                vf x = load_some(s, FLOAT32, i, count) - at;
                vi is_between = (vi)(x > 0) & (vi)(x < 1);
                some += onlyf(is_between, x);
                between -= is_between;
                above -= (vi)(x >= 1);
            }
            sum += total_of(some), inside += sum_of(between), ones += sum_of(above);
        }
        double surplus = sum + (double)ones - k;
        if (surplus > 0)
            low = tau;
        else
            high = tau;
        double found = inside > 0 ? tau + surplus / (double)inside : tau;
        if (fabs(surplus) <= 1e-7 * (double)inside) return found;
        if (!(found > low && found < high)) found = low + (high - low) / 2;
        if ((float)found == (float)tau || high - low < 1e-9) return found;
        tau = found;
    }
    return tau;
}

/* The threshold of clip, less the reference. */
static double clip_row(Line *line, double k) {
    int64_t m = wanted(PERMUTAHEDRON, line->n, k), above = 0;
    limit_to_best(line, m);
    if (!line->is_finite) return NAN;
    keep_only(line);
    Line few = line_of_kept(line);
    float *kept = line->kept, limit = score_of_key(threshold_key(kept, few.n, m, 0, 1)), next = INFINITY, kth = INFINITY;
    for (int64_t i = 0; i < few.n; i++)
        if (kept[i] >= limit) next = kept[i] < next ? kept[i] : next;
    for (int64_t i = 0; i < few.n; i++)
        if (kept[i] > next) above++, kth = kept[i] < kth ? kept[i] : kth;
    if (above < (int64_t)ceil(k)) kth = next;
    double reference = line->reference = (double)kth, gap = (reference - (double)next) * line->rate;
    if (gap >= 1) return -(1 + (gap - 1) / 2); /* anywhere between the two */
    /* only what is above the lowest possible tau counts */
    limit = fmaxf((float)(reference - (gap + 1) / line->rate), -FLT_MAX);
    if (limit < line->limit) {
        line->limit = limit;
        keep_only(line);
        few = line_of_kept(line);
    }
    for (int64_t i = 0; i < few.n; i++) kept[i] = (float)(((double)kept[i] - reference) * line->rate);
    return clip_threshold(kept, few.n, k, -gap - 1, 0);
}

/* ---- masks ---- */

typedef struct {
    const Rows *rows;
    int64_t most; /* of what `wanted` says of the rows */
    float *maxima, *kept, *real;
    Found *found;
} MaskWork;

static void lay_out_mask(void *given, Arena *arena) {
    MaskWork *work = given;
    int64_t n = work->rows->n;
    work->maxima = take(arena, 2 * groups_for(n, work->most) * 4); /* of a padded row it may be all scores, if they are fewer */
    work->kept = take(arena, (n + W) * 4);
    work->real = take(arena, (n + W) * 4);
    work->found = take(arena, parts_of(n) * (int64_t)sizeof(Found));
}

enum { NOT_FINITE = -1 };

/* The threshold of a row of scores, 0 < k < n. Returns NOT_FINITE if they are not; UNUSUAL if it is FAR from zero, or was found
   relative to a score that is FAR from it. */
static int finite_threshold(const MaskWork *work, const void *scores, int dtype, int64_t n, double k, double *b) {
    const Rows *rows = work->rows;
    int turned = rows->operator == LAPSUM && 2 * k > (double)n; /* few are left out: the threshold of the scores turned round */
    Line line = {.scores = scores, .n = n, .dtype = dtype, .threads = rows->threads, .operator = rows->operator, .turned = turned,
                 .rate = rows->rate, .is_finite = 1, .found = work->found, .maxima = work->maxima, .kept = work->kept};
    k = turned ? (double)n - k : k;
    int64_t m = wanted(rows->operator, n, k);
    double found = rows->operator != LAPSUM ? clip_row(&line, k)
                   : depends_on_few(n, m)   ? laplace_of_few(&line, k, m)
                                            : laplace_of_many(&line, k);
    if (!line.is_finite) return NOT_FINITE;
    *b = line.reference + found / rows->rate;
    if (turned) *b = -*b;
    return fabs(found) > FAR || fabs(*b) * rows->rate > FAR ? UNUSUAL : FINE;
}

/* b of a row: infinite where k is 0 or not less than the number of scores that are not padding, NaN where the row has NaN. */
static int threshold_of_row(const MaskWork *work, const void *row, double k, double *b) {
    const Rows *rows = work->rows;
    int64_t n = rows->n, real = 0;
    int status = k > 0 && k < (double)n ? finite_threshold(work, row, rows->dtype, n, k, b) : NOT_FINITE;
    if (status != NOT_FINITE) return status;
    int has_nan = k != k, is_infinite = 0;
    for (int64_t i = 0; i < n; i++) {
        float score = score_at(row, rows->dtype, i);
        has_nan |= score != score, is_infinite |= score == INFINITY;
        if (score > -INFINITY) work->real[real++] = score;
    }
    if (has_nan || is_infinite || k <= 0 || k >= (double)real) {
        *b = has_nan ? NAN : k <= 0 ? INFINITY : -INFINITY;
        return is_infinite && !has_nan ? UNUSUAL : FINE;
    }
    return finite_threshold(work, work->real, FLOAT32, real, k, b);
}

INLINE void pass_mask(const Line *line, const int dtype, int64_t first, int64_t last) {
    const Scale scale = line->scale;
    const int laplace = line->operator == LAPSUM;
    for (int64_t i = first; i < last; i += W) {
        vf x = scaled(load_some(line->scores, dtype, i, line->n), scale), y;
        if (laplace) {
            vf tail = 0.5f * exponentialf(-absolutef(x));
            y = pickf(x < 0, tail, 1 - tail);
        } else
            y = largerf(splatf(0), smallerf(x, splatf(1)));
        store_some(line->out, dtype, i, line->n, y);
    }
}
OVER_PARTS(write_mask, pass_mask(line, DTYPE, first, last))

/* 1 for all that is not padding, or 0, or NaN. */
static void write_trivial_mask(const void *row, void *out, int64_t n, int dtype, double b) {
    for (int64_t i = 0; i < n; i++) {
        float value = b != b ? NAN : b > 0 || score_at(row, dtype, i) == -INFINITY ? 0 : 1;
        store_one(out, dtype, i, value);
    }
}

static int mask_rows(void *given, int64_t first, int64_t last) {
    MaskWork *work = given;
    const Rows *rows = work->rows;
    for (int64_t r = first; r < last; r++) {
        double b;
        Line line = {.scores = row_of(rows->scores, rows->dtype, r * rows->stride), .n = rows->n, .dtype = rows->dtype,
                     .threads = rows->threads, .operator = rows->operator};
        int status = threshold_of_row(work, line.scores, rows->ks ? rows->ks[r] : rows->k, &b);
        if (status != FINE) return status;
        rows->saved[r] = b;
        if (!rows->out) {
            if (!isfinite(b)) return UNUSUAL; /* the best or the last score, or NaN */
            continue;
        }
        line.out = out_row(rows->out, rows->dtype, r * rows->n);
        line.scale = scale_of(b, rows->rate);
        if (isfinite(b))
            write_mask(&line);
        else
            write_trivial_mask(line.scores, line.out, rows->n, rows->dtype, b);
    }
    return FINE;
}

static int threshold_mask(const Rows *rows, int64_t first, int64_t last) {
    MaskWork work = {.rows = rows, .most = 1};
    for (int64_t r = first; r < last; r++) {
        double k = rows->ks ? rows->ks[r] : rows->k, others = (double)rows->n - k;
        if (!(k > 0) || k >= (double)rows->n) continue;
        int64_t m = wanted(rows->operator, rows->n, rows->operator == LAPSUM && others < k ? others : k);
        work.most = m > work.most ? m : work.most;
        if (!rows->ks) break;
    }
    return with_memory(lay_out_mask, mask_rows, &work, first, last);
}

/* ---- gradients ---- */

typedef struct {
    const Rows *rows;
    float *slopes;
    Found *found;
} SlopeWork;

static void lay_out_slopes(void *given, Arena *arena) {
    SlopeWork *work = given;
    work->slopes = take(arena, (work->rows->n + W) * 4);
    work->found = take(arena, parts_of(work->rows->n) * (int64_t)sizeof(Found));
}

/* The slopes of F at the scores, times 2 for Laplace; their sum, and that of slopes times incoming gradients. */
INLINE void pass_slopes(Line *line, const int dtype, int64_t first, int64_t last) {
    const Scale scale = line->scale;
    const int laplace = line->operator == LAPSUM;
    Found found = {0};
    for (int64_t i = first; i < last;) {
        vf some = {0}, more = {0};
        for (int64_t end = i + FEW < last ? i + FEW : last; i < end; i += W) {
            vf x = scaled(load_some(line->scores, dtype, i, line->n), scale);
            vf slope = laplace ? exponentialf(-absolutef(x)) : onlyf((vi)(x > 0) & (vi)(x < 1), splatf(1));
            store_f32(line->slopes + i, slope);
            some += slope;
            if (line->incoming) more += onlyf(slope > 0, slope * load_some(line->incoming, dtype, i, line->n));
        }
        found.sum += total_of(some), found.weighted += total_of(more);
    }
    line->found[first / PART] = found;
}
OVER_PARTS(find_slopes, pass_slopes(line, DTYPE, first, last))

/* The gradient by the scores, none for padding; the sum of it times x. */
INLINE void pass_gradient(Line *line, const int dtype, int64_t first, int64_t last) {
    const Scale scale = line->scale;
    Found found = {0};
    for (int64_t i = first; i < last;) {
        vf some = {0};
        for (int64_t end = i + FEW < last ? i + FEW : last; i < end; i += W) {
            vf slope = load_f32(line->slopes + i), y = {0};
            if (line->incoming) y = load_some(line->incoming, dtype, i, line->n);
            y = onlyf(slope > 0, line->factor * slope * (y - line->mean));
            store_some(line->out, dtype, i, line->n, y);
            some += onlyf(slope > 0, y * scaled(load_some(line->scores, dtype, i, line->n), scale));
        }
        found.weighted += total_of(some);
    }
    line->found[first / PART] = found;
}
OVER_PARTS(write_gradient_of_mask, pass_gradient(line, DTYPE, first, last))

/* Where all slopes are too small for a float: relative to the largest, in place of the slopes; their sums. Returns how far the
   nearest score is. */
static double far_slopes(Line *line, double b, double *sum, double *weighted) {
    double nearest = INFINITY;
    *sum = *weighted = 0;
    for (int64_t i = 0; i < line->n; i++) nearest = fmin(nearest, fabs((double)score_at(line->scores, line->dtype, i) - b));
    for (int64_t i = 0; i < line->n; i++) {
        double weight = exp((nearest - fabs((double)score_at(line->scores, line->dtype, i) - b)) * line->rate);
        line->slopes[i] = (float)weight;
        *sum += weight;
        if (line->incoming && weight > 0) *weighted += weight * (double)score_at(line->incoming, line->dtype, i);
    }
    return nearest * line->rate;
}

/* With the weights w = slopes / (sum of the slopes), db = sum of w ds, and of a mask dm_c = slope_c (ds_c - db) / t. By k: dm = w dk,
   db = -t dk / (sum of the slopes). */
static void row_backward(Line *line, const Rows *rows, double b, int64_t r) {
    find_slopes(line);
    double sum = 0, weighted = 0, by_rate = 0, nearest = 0;
    for (int64_t part = 0; part < parts_of(line->n); part++)
        sum += line->found[part].sum, weighted += line->found[part].weighted;
    if (sum < 1e-30 && rows->operator == LAPSUM && (rows->gives == THRESHOLD || rows->grad_k))
        nearest = far_slopes(line, b, &sum, &weighted);
    double mean = sum > 0 ? weighted / sum : 0, grad_k = mean;
    if (rows->gives == THRESHOLD) {
        double incoming = ((const double *)rows->incoming)[r];
        line->factor = (float)(incoming / sum), line->mean = -1; /* there is no incoming beside it */
        grad_k = -2 * incoming * exp(fmin(nearest, 80)) / (rows->rate * sum); /* as the plain code has it: e^80 is a float */
    } else {
        line->factor = (float)(rows->rate * exp(-nearest) * (rows->operator == LAPSUM ? 0.5 : 1.0));
        line->mean = (float)mean;
    }
    write_gradient_of_mask(line);
    for (int64_t part = 0; part < parts_of(line->n); part++) by_rate += line->found[part].weighted;
    if (rows->grad_k) rows->grad_k[r] = grad_k;
    if (rows->grad_rate) rows->grad_rate[r] = by_rate / rows->rate;
}

static int slope_rows(void *given, int64_t first, int64_t last) {
    SlopeWork *work = given;
    const Rows *rows = work->rows;
    for (int64_t r = first; r < last; r++) {
        double b = rows->saved[r];
        Line line = {.scores = row_of(rows->scores, rows->dtype, r * rows->stride), .n = rows->n, .dtype = rows->dtype,
                     .threads = rows->threads, .operator = rows->operator, .rate = rows->rate, .scale = scale_of(b, rows->rate),
                     .out = out_row(rows->out, rows->dtype, r * rows->n), .slopes = work->slopes, .found = work->found};
        if (rows->gives == MASK) line.incoming = row_of(rows->incoming, rows->dtype, r * rows->incoming_stride);
        if (isfinite(b)) {
            row_backward(&line, rows, b, r);
            continue;
        }
        write_trivial_mask(line.scores, line.out, rows->n, rows->dtype, b != b ? b : INFINITY);
        if (rows->grad_k) rows->grad_k[r] = b != b ? NAN : 0;
        if (rows->grad_rate) rows->grad_rate[r] = b != b ? NAN : 0;
    }
    return FINE;
}
