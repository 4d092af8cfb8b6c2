/* Masks with a threshold: m_c = F((s_c - b) / t) with one b a row, such that the mask sums to k. F is the Laplace distribution
   function (anyk/operators/lapsum.py) or clip(x, 0, 1) (anyk/operators/permutahedron.py).

   A row is passed over in parts of PART scores, which several threads may share. What is added up is added up for each part,
   and these sums in their order: the result does not depend on the number of threads. */

/* ---- passes over a row ---- */

/* W scores of any dtype, in float32; the dtype is a constant where these are inlined. */
INLINE vf load_any(const void *row, const int dtype, int64_t i) {
    if (dtype == FLOAT32) return load_f32((const float *)row + i);
    return dtype == BFLOAT16 ? load_bf16((const bf16 *)row + i) : load_f16((const f16 *)row + i);
}
INLINE void store_any(void *row, const int dtype, int64_t i, vf x) {
    if (dtype == FLOAT32)
        store_f32((float *)row + i, x);
    else if (dtype == BFLOAT16)
        store_bf16((bf16 *)row + i, x);
    else
        store_f16((f16 *)row + i, x);
}
INLINE vf load_some(const void *row, const int dtype, int64_t i, int64_t n) {
    if (i + W <= n) return load_any(row, dtype, i);
    vf x = {0};
    for (int l = 0; l < W; l++) x[l] = i + l < n ? score_at(row, dtype, i + l) : -INFINITY;
    return x;
}
INLINE void store_some(void *row, const int dtype, int64_t i, int64_t n, vf x) {
    if (i + W <= n) {
        store_any(row, dtype, i, x);
        return;
    }
    char narrowed[W * 4];
    store_any(narrowed, dtype, 0, x);
    memcpy((char *)row + i * (int64_t)item_size(dtype), narrowed, (size_t)(n - i) * item_size(dtype));
}

/* A function that is inlined for each dtype. */
#define FOR_DTYPE(dtype, call)                                                     \
    do {                                                                           \
        if ((dtype) == FLOAT32) { enum { DTYPE = FLOAT32 }; call; }                \
        else if ((dtype) == BFLOAT16) { enum { DTYPE = BFLOAT16 }; call; }         \
        else { enum { DTYPE = FLOAT16 }; call; }                                   \
    } while (0)
#define FOR_DTYPE_AND_KIND(dtype, kind, call)                                      \
    do {                                                                           \
        if ((kind) == LAPSUM) { enum { KIND = LAPSUM }; FOR_DTYPE(dtype, call); }  \
        else { enum { KIND = PERMUTAHEDRON }; FOR_DTYPE(dtype, call); }            \
    } while (0)

/* A threshold in two floats: a score less the first is exact where the two are near. */
typedef struct {
    vf high, low, rate;
} Scale;
INLINE Scale scale_of(double b, double rate) {
    float high = (float)b;
    return (Scale){splatf(high), splatf((float)(b - (double)high)), splatf((float)rate)};
}
INLINE vf scaled(vf s, Scale scale) { return ((s - scale.high) - scale.low) * scale.rate; }
INLINE vf absolutef(vf x) { return (vf)((vi)x & INT32_MAX); }

/* What a pass finds in a part of a row. */
typedef struct {
    int64_t count, equal;
    double above, below;
    float lowest, highest;
    int32_t largest_bits; /* of a score without its sign: those of infinity, or more, if there is infinity or NaN */
} Found;

/* A row, and who works on it. `turned`: it stands for the scores with the other sign. */
typedef struct {
    const void *scores;
    int64_t n;
    int dtype, threads, turned;
    Found *found; /* of each part */
    /* of a pass: */
    float *maxima; /* (groups) */
    int64_t groups, columns;
    _Atomic int strange;
    float *kept; /* (n): those of each part stand where the part begins */
    float limit, rate;
    int sums, far;
    Scale scale;
} Line;
enum { INFINITE_BITS = 0x7f800000 };

INLINE int64_t parts_of(int64_t n) { return (n + PART - 1) / PART; }
INLINE int64_t end_of_part(int64_t part, int64_t n) { return (part + 1) * PART < n ? (part + 1) * PART : n; }

INLINE vf load_line(const Line *line, const int dtype, int64_t i) {
    vi sign = splati(line->turned ? INT32_MIN : 0);
    if (i + W <= line->n) return (vf)((vi)load_any(line->scores, dtype, i) ^ sign);
    vf x = splatf(-INFINITY);
    for (int l = 0; i + l < line->n; l++) {
        float score = score_at(line->scores, dtype, i + l);
        x[l] = line->turned ? -score : score;
    }
    return x;
}
INLINE vi bits_of_some(vf x, int64_t i, int64_t n) { /* without the sign; 0 behind the end of the row */
    vi bits = (vi)x & INT32_MAX;
    for (int l = W - 1; i + l >= n; l--) bits[l] = 0;
    return bits;
}

/* The maxima of `groups` strided groups of scores, for those of a part. Few of the m best share a group: what m of the maxima
   reach is reached by little more than m scores. */
INLINE void pass_groups(Line *line, const int dtype, int64_t part) {
    int64_t first = part * line->columns, last = first + line->columns < line->groups ? first + line->columns : line->groups;
    vi most = {0};
    for (int64_t start = 0; start + first < line->n; start += line->groups)
        for (int64_t c = first; c < last; c += W) {
            if (start + c >= line->n) {
                if (!start) store_f32(line->maxima + c, splatf(-INFINITY));
                continue;
            }
            vf x = load_line(line, dtype, start + c);
            most = larger_int(most, bits_of_some(x, start + c, line->n));
            store_f32(line->maxima + c, start ? largerf(x, load_f32(line->maxima + c)) : x);
        }
    for (int l = 0; l < W; l++)
        if (most[l] >= INFINITE_BITS) line->strange = 1;
}
static void groups_task(void *context, int64_t part) {
    Line *line = context;
    FOR_DTYPE(line->dtype, pass_groups(line, DTYPE, part));
}

/* Keeps the scores that reach the limit. With `sums` only those above it; how many equal it, and the sum of e^(s - limit) over
   those below. */
INLINE void pass_keep(Line *line, const int dtype, const int sums, int64_t part) {
    int64_t end = end_of_part(part, line->n), count = 0, equal = 0;
    float *kept = line->kept + part * PART;
    double below = 0;
    vf limit = splatf(line->limit), from = splatf(sums ? nextafterf(line->limit, INFINITY) : line->limit);
    for (int64_t i = part * PART; i < end;) {
        /* Float sums of few numbers, their sum in double: no digits are lost over a long row. */
        vf some = {0};
        vi equals = {0};
        for (int64_t stop = i + 64 * W < end ? i + 64 * W : end; i < stop; i += W) {
            vf s = load_line(line, dtype, i);
            uint32_t hits = not_below(s, from);
            if (__builtin_expect(hits != 0, 0)) {
                float lanes[W];
                store_f32(lanes, s);
                for (; hits; hits &= hits - 1) kept[count++] = lanes[__builtin_ctz(hits)];
            }
            if (sums) {
                equals -= (vi)(s == limit);
                some += (vf)((vi)exponentialf((s - limit) * line->rate) & (vi)(s < limit));
            }
        }
        if (sums) {
            for (int l = 0; l < W; l++) below += (double)some[l];
            equal += sum_of(equals);
        }
    }
    line->found[part] = (Found){.count = count, .equal = equal, .below = below};
}
static void keep_task(void *context, int64_t part) {
    Line *line = context;
    if (line->sums)
        FOR_DTYPE(line->dtype, pass_keep(line, DTYPE, 1, part));
    else
        FOR_DTYPE(line->dtype, pass_keep(line, DTYPE, 0, part));
}

/* Of x = (s - b) / t: how many are above 0, the sums of e^-|x| over them and over the others, the lowest and the highest. */
INLINE void pass_split(Line *line, const int dtype, int64_t part) {
    int64_t end = end_of_part(part, line->n), passed = 0;
    double above = 0, below = 0;
    vf lowest = splatf(-INFINITY), highest = splatf(-INFINITY); /* lowest: with the other sign */
    vi most = {0};
    for (int64_t i = part * PART; i < end;) {
        vf some = {0}, all = {0};
        vi count = {0};
        for (int64_t stop = i + 64 * W < end ? i + 64 * W : end; i < stop; i += W) {
            vf s = load_line(line, dtype, i), x = scaled(s, line->scale), e = exponentialf(-absolutef(x));
            vi is_above = x > 0;
            most = larger_int(most, bits_of_some(s, i, line->n));
            count -= is_above;
            some += (vf)((vi)e & is_above);
            all += e;
            lowest = largerf((vf)(((vi)-x & is_above) | ((vi)splatf(-INFINITY) & ~is_above)), lowest);
            highest = largerf((vf)(((vi)x & ~is_above) | ((vi)splatf(-INFINITY) & is_above)), highest);
        }
        for (int l = 0; l < W; l++) above += (double)some[l], below += (double)all[l] - (double)some[l];
        passed += sum_of(count);
    }
    Found found = {.count = passed, .above = above, .below = below, .lowest = -largest_of(lowest), .highest = largest_of(highest)};
    for (int l = 0; l < W; l++) found.largest_bits = most[l] > found.largest_bits ? most[l] : found.largest_bits;
    line->found[part] = found;
}
static void split_task(void *context, int64_t part) {
    Line *line = context;
    FOR_DTYPE(line->dtype, pass_split(line, DTYPE, part));
}

/* ---- thresholds ---- */

/* Scores of a row over the temperature, less that of a reference: those above `last`, how many equal it, and the sum of
   e^(s - last) over those below. Or all of them: the row itself, in float32. */
typedef struct {
    double *above;
    int64_t count;
    double last, equal, below;
    Line *line; /* or NULL */
    double reference, rate;
} Profile;

/* Where b lies among the scores, and the sums that the equation for b has then. */
typedef struct {
    double passed;          /* how many scores are above b */
    double lowest, highest; /* of those above b, and of the others */
    double above, below;    /* sums of e^(b - s) over the scores above b, and of e^(s - b) over the others */
} Split;

static Split split_line(const Profile *p, double b) {
    Line *line = p->line;
    Split split = {.lowest = INFINITY, .highest = -INFINITY};
    line->scale = scale_of(p->reference + b / p->rate, p->rate);
    each_part(split_task, line, parts_of(line->n), line->threads);
    for (int64_t part = 0; part < parts_of(line->n); part++) {
        Found *found = line->found + part;
        split.passed += (double)found->count, split.above += found->above, split.below += found->below;
        split.lowest = fmin(split.lowest, b + (double)found->lowest);
        split.highest = fmax(split.highest, b + (double)found->highest);
        if (found->largest_bits >= INFINITE_BITS) line->strange = 1;
    }
    return split;
}

static Split split_at(const Profile *p, double b) {
    if (p->line) return split_line(p, b);
    Split split = {.lowest = INFINITY, .highest = p->last};
    const vd zero = {0}, infinite = splat(INFINITY);
    vd passed = zero, above = zero, below = zero, lowest = infinite, highest = splat(p->last);
    enum { STEP = BYTES / 8 };
    for (int64_t i = 0; i < p->count; i += STEP) { /* behind the scores there is room, filled with -inf */
        vd d = *(const vd *)(p->above + i) - b, e = exponential(-absolute(d));
        vl is_above = d > 0;
        passed -= __builtin_convertvector(is_above, vd);
        above += only(is_above, e);
        below += only(~is_above & (vl)(d > -700), e);
        lowest = smaller(lowest, pick(is_above, d, infinite));
        highest = larger(highest, pick(is_above, splat(-INFINITY), d + b));
    }
    for (int l = 0; l < STEP; l++) {
        split.passed += passed[l], split.above += above[l], split.below += below[l];
        split.lowest = lowest[l] + b < split.lowest ? lowest[l] + b : split.lowest;
        split.highest = highest[l] > split.highest ? highest[l] : split.highest;
    }
    split.below += (p->equal + p->below) * exp(p->last - b);
    return split;
}

/* log of the sum of e^(sign (s - from)) over the scores on one side of b. */
static double log_sum_beside(const Profile *p, double b, double from, int above) {
    double sum = above || p->line ? 0 : (p->equal + p->below) * exp(p->last - from);
    for (int64_t i = 0; i < (p->line ? p->line->n : p->count); i++) {
        double s;
        if (p->line) {
            double score = (double)score_at(p->line->scores, p->line->dtype, i);
            s = ((p->line->turned ? -score : score) - p->reference) * p->rate;
        } else
            s = p->above[i];
        if ((s > b) == above) sum += exp(above ? from - s : s - from);
    }
    return log(sum);
}

/* b with sum_c F(s_c - b) = k, F that of Laplace, from a first guess.

   With i scores above b, A = sum of e^(-s) over them and B = sum of e^s over the others, the equation is i - A e^b / 2 + B e^-b / 2
   = k, quadratic in e^b. Its solution is right if b has the same i; else it is where to look next, and wrong by the square of
   the distance at most. */
static double laplace_threshold(const Profile *p, double k, double b) {
    double low = p->line ? -INFINITY : p->last, high = INFINITY;
    /* Further away than that, e to the distance is no number. And so near, nothing is left to gain in float32. */
    const double reach = p->line ? 80 : 600, near = p->line ? 1e-4 : 0;
    for (int step = 0; step < 200; step++) {
        Split at = split_at(p, b);
        if (p->line && p->line->strange) return b;
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
            found = (at.highest + log_sum_beside(p, b, at.highest, 0) + at.lowest - log_sum_beside(p, b, at.lowest, 1)) / 2;
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

/* tau with sum_c clip(s_c - tau, 0, 1) = k, for `count` scores over the temperature, relative to the k-th; low <= tau < high. The sum
   falls with tau in straight pieces: a Newton step that ends on the right piece is exact. Behind the scores there is room,
   filled with -inf. */
static double clip_threshold(const float *s, int64_t count, double k, double low, double high) {
    double tau = low + (high - low) / 2;
    const vf zero = {0}, one = splatf(1);
    for (int step = 0; step < 200; step++) {
        double sum = 0; /* of those between 0 and 1: among many ones they would lose their digits */
        int64_t inside = 0, ones = 0;
        vf at = splatf((float)tau);
        tau = (double)at[0];
        for (int64_t i = 0; i < count;) {
            vf some = {0};
            vi between = {0}, above = {0};
            for (int64_t end = i + 64 * W < count ? i + 64 * W : count; i < end; i += W) {
                vf x = load_f32(s + i) - at;
                vi is_between = (vi)(x > zero) & (vi)(x < one);
                some += (vf)((vi)x & is_between);
                between -= is_between;
                above -= (vi)(x >= one);
            }
            for (int l = 0; l < W; l++) sum += (double)some[l], inside += between[l], ones += above[l];
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

/* Memory for the rows of a call. */
typedef struct {
    float *maxima, *kept;
    double *profile;
    Found *found;
} MaskWork;
enum { SAMPLE = 4096 }; /* scores of a long row that the first guess of a threshold is made of */

/* How many of the best scores the threshold depends on: for Laplace, at the (2k)-th score half of 2k scores have passed at
   least, so that b lies above it. */
static int64_t wanted(int kind, int64_t n, double k) {
    int64_t m = kind == LAPSUM ? 2 * (int64_t)ceil(k) + 1 : (int64_t)floor(k) + 1;
    return m < 1 ? 1 : m < n ? m : n;
}

/* So many groups that the m best are in different ones as a rule; an odd number of vectors, since rows have even periods. */
static int64_t groups_for(int64_t n, int64_t m) {
    int64_t vectors = (4 * m + W - 1) / W | 1, all = (n + W - 1) / W;
    return W * (2 * vectors < all ? vectors : all);
}
/* At most that many for up to n scores, which are fewer in rows with padding: then it may be all of them. */
static int64_t most_groups_for(int64_t n, int64_t m) {
    int64_t vectors = (4 * m + W - 1) / W | 1, all = (n + W - 1) / W;
    return W * (2 * vectors < all ? 2 * vectors : all);
}

static MaskWork lay_out_mask(int64_t n, int64_t m, Arena *arena) {
    MaskWork work;
    int64_t most = 2 * m + 64 > SAMPLE ? 2 * m + 64 : SAMPLE;
    work.maxima = take(arena, most_groups_for(n, m) * 4);
    work.kept = take(arena, (n + W) * 4);
    work.profile = take(arena, ((most < n ? most : n) + 64) * 8);
    work.found = take(arena, parts_of(n) * (int64_t)sizeof(Found));
    return work;
}

/* Keeps what reaches a limit that m scores reach, and few more as a rule. Returns how many scores were kept, all in a row; -1 if
   the row has infinity or NaN. */
static int64_t keep(Line *line, float limit, int sums, double rate) {
    line->limit = limit, line->sums = sums, line->rate = (float)rate;
    each_part(keep_task, line, parts_of(line->n), line->threads);
    int64_t count = 0;
    for (int64_t part = 0; part < parts_of(line->n); part++) {
        memmove(line->kept + count, line->kept + part * PART, (size_t)line->found[part].count * 4);
        count += line->found[part].count;
    }
    return count;
}
static int64_t keep_best(Line *line, int64_t m, int sums, double rate) {
    static const int32_t steps[] = {[FLOAT32] = STEP_f32, [BFLOAT16] = STEP_bf16, [FLOAT16] = STEP_f16};
    line->groups = groups_for(line->n, m);
    /* the maxima do not depend on how the groups are shared */
    int64_t shares = line->threads > 1 && line->n >= 4 * PART ? 4 * (int64_t)line->threads : 1;
    line->columns = (line->groups / W + shares - 1) / shares * W;
    each_part(groups_task, line, (line->groups + line->columns - 1) / line->columns, line->threads);
    if (line->strange) return -1;
    int64_t count = line->groups < line->n ? line->groups : line->n;
    return keep(line, score_of_key(threshold_key(line->maxima, count, m, m / 8 + 1, steps[line->dtype])), sums, rate);
}

/* So many temperatures from the number that it is relative to, a float64 has too few digits for a threshold: the plain code has
   it relative to a score near it. */
static const double FAR = 4e9; /* more than the -1e9 that padding often has */

/* The threshold of finite scores, 0 < k <= n / 2. */
static double laplace_row(Line *line, double k, double rate, MaskWork *work) {
    int64_t n = line->n, m = wanted(LAPSUM, n, k);
    Profile p = {.above = work->profile, .rate = rate};
    if (4 * m <= n) {
        int64_t count = keep_best(line, m, 1, rate);
        if (count < 0) return NAN;
        float last = line->limit;
        for (int64_t part = 0; part < parts_of(n); part++)
            p.equal += (double)line->found[part].equal, p.below += line->found[part].below;
        if (count > 2 * m) { /* many of the best were in the same groups */
            last = score_of_key(threshold_key(line->kept, count, m, m / 8 + 1, 1));
            p.below = (p.below + p.equal) * exp(((double)line->limit - (double)last) * rate), p.equal = 0;
            for (int64_t i = 0; i < count; i++) {
                if (line->kept[i] == last) p.equal++;
                if (line->kept[i] < last) p.below += exp(((double)line->kept[i] - (double)last) * rate);
            }
        }
        p.reference = (double)last;
        for (int64_t i = 0; i < count; i++)
            if (line->kept[i] > last) p.above[p.count++] = ((double)line->kept[i] - p.reference) * rate;
    } else { /* of few scores all are looked at; of many, every so many */
        int64_t size = n < SAMPLE ? n : SAMPLE, stride = n / size;
        float lowest = INFINITY;
        for (int64_t i = 0; i < size; i++) {
            float score = score_at(line->scores, line->dtype, i * stride);
            if (!isfinite(score)) line->strange = 1;
            line->kept[i] = score = line->turned ? -score : score;
            lowest = score < lowest ? score : lowest;
        }
        if (line->strange) return NAN;
        p.reference = (double)lowest;
        for (int64_t i = 0; i < size; i++)
            if (line->kept[i] > lowest)
                p.above[p.count++] = ((double)line->kept[i] - p.reference) * rate;
            else
                p.equal++;
    }
    for (int l = 0; l < BYTES / 8; l++) p.above[p.count + l] = -INFINITY;
    double b = 0; /* from the best; where about half are chosen, from the mean */
    for (int64_t i = 0; i < p.count; i++) b = 4 * m > n ? b + p.above[i] / (double)p.count : fmax(b, p.above[i]);
    if (4 * m > n && n > SAMPLE) {
        b = laplace_threshold(&p, k * SAMPLE / (double)n, b);
        p.line = line;
    }
    b = laplace_threshold(&p, k, b);
    line->far = fabs(b) > FAR;
    return p.reference + b / rate;
}

/* The threshold of finite scores, 0 < k < n. */
static double clip_row(Line *line, double k, double rate) {
    int64_t m = wanted(PERMUTAHEDRON, line->n, k), count = keep_best(line, m, 0, rate), above = 0;
    if (count < 0) return NAN;
    float *kept = line->kept, limit = score_of_key(threshold_key(kept, count, m, 0, 1)), next = INFINITY, kth = INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (kept[i] >= limit) next = kept[i] < next ? kept[i] : next;
    for (int64_t i = 0; i < count; i++)
        if (kept[i] > next) above++, kth = kept[i] < kth ? kept[i] : kth;
    if (above < (int64_t)ceil(k)) kth = next;
    double reference = (double)kth, gap = (reference - (double)next) * rate;
    if (gap >= 1) return reference - (1 + (gap - 1) / 2) / rate; /* anywhere between the two */
    /* only what is above the lowest possible tau counts */
    limit = (float)(reference - (gap + 1) / rate);
    if (limit < line->limit) count = keep(line, fmaxf(limit, -FLT_MAX), 0, rate);
    for (int64_t i = 0; i < count; i++) kept[i] = (float)(((double)kept[i] - reference) * rate);
    for (int l = 0; l < W; l++) kept[count + l] = -INFINITY;
    return reference + clip_threshold(kept, count, k, -gap - 1, 0) / rate;
}

enum { NOT_FINITE = -1 };

/* The threshold of a row of scores, 0 < k < n. Returns NOT_FINITE if they are not; STRANGE if it is FAR from zero, or was found
   relative to a score that is FAR from it. */
static int finite_threshold(const Mask *mask, const void *scores, int dtype, int64_t n, double k, MaskWork *work, double *b) {
    int turned = mask->kind == LAPSUM && 2 * k > (double)n; /* few are left out: the threshold of the scores turned round */
    Line line = {.scores = scores, .n = n, .dtype = dtype, .threads = mask->threads, .turned = turned,
                 .found = work->found, .maxima = work->maxima, .kept = work->kept};
    double found = mask->kind == LAPSUM ? laplace_row(&line, turned ? (double)n - k : k, mask->rate, work)
                                        : clip_row(&line, k, mask->rate);
    *b = turned ? -found : found;
    return line.strange ? NOT_FINITE : line.far || fabs(found) * mask->rate > FAR ? STRANGE : FINE;
}

/* b of a row: infinite where k is 0 or not less than the number of scores that are not padding, NaN where the row has NaN. */
static int threshold_of_row(const Mask *mask, const void *row, double k, MaskWork *work, double *b) {
    int64_t n = mask->n, real = 0;
    int status = k > 0 && k < (double)n ? finite_threshold(mask, row, mask->dtype, n, k, work, b) : NOT_FINITE;
    if (status != NOT_FINITE) return status;
    int has_nan = 0, is_infinite = 0;
    float *scores = (float *)borrow(n * 4);
    if (!scores) return NO_MEMORY;
    for (int64_t i = 0; i < n; i++) {
        float score = score_at(row, mask->dtype, i);
        has_nan |= score != score, is_infinite |= score == INFINITY;
        if (score > -INFINITY) scores[real++] = score;
    }
    *b = has_nan || k != k ? NAN : k <= 0 ? INFINITY : -INFINITY;
    status = is_infinite && !has_nan ? STRANGE : FINE;
    if (!has_nan && !is_infinite && k > 0 && k < (double)real) status = finite_threshold(mask, scores, FLOAT32, real, k, work, b);
    give_memory_back((char *)scores);
    return status;
}

/* ---- masks ---- */

INLINE void pass_mask(const void *row, void *out, int64_t first, int64_t last, int64_t n, const int dtype, const int kind,
                      Scale scale) {
    const vf zero = {0}, one = splatf(1);
    for (int64_t i = first; i < last; i += W) {
        vf x = scaled(load_some(row, dtype, i, n), scale), y;
        if (kind == LAPSUM) {
            vf tail = 0.5f * exponentialf(-absolutef(x));
            vi below = x < zero;
            y = (vf)(((vi)tail & below) | ((vi)(one - tail) & ~below));
        } else
            y = largerf(zero, -largerf(-x, -one));
        store_some(out, dtype, i, n, y);
    }
}
typedef struct {
    const Mask *mask;
    const void *row;
    void *out;
    Scale scale;
} MaskPass;
static void mask_task(void *context, int64_t part) {
    const MaskPass *p = context;
    int64_t first = part * PART, last = end_of_part(part, p->mask->n);
    FOR_DTYPE_AND_KIND(p->mask->dtype, p->mask->kind, pass_mask(p->row, p->out, first, last, p->mask->n, DTYPE, KIND, p->scale));
}

/* 1 for all that is not padding, or 0, or NaN. */
static void write_trivial_mask(const void *row, void *out, int64_t n, int dtype, double b) {
    for (int64_t i = 0; i < n; i++) {
        float value = b != b ? NAN : b > 0 || score_at(row, dtype, i) == -INFINITY ? 0 : 1;
        store_some(out, dtype, i, i + 1, splatf(value));
    }
}

static int mask_rows(const Mask *mask, MaskWork *work, int64_t first, int64_t last) {
    int64_t n = mask->n, bytes = (int64_t)item_size(mask->dtype);
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(mask->scores, mask->dtype, r * mask->stride);
        double b;
        int status = threshold_of_row(mask, row, mask->ks ? mask->ks[r] : mask->k, work, &b);
        if (status != FINE) return status;
        mask->threshold[r] = b;
        if (!mask->out) {
            if (!isfinite(b)) return STRANGE; /* the best or the last score, or NaN */
            continue;
        }
        MaskPass pass = {mask, row, (char *)mask->out + r * n * bytes, scale_of(b, mask->rate)};
        if (isfinite(b))
            each_part(mask_task, &pass, parts_of(n), mask->threads);
        else
            write_trivial_mask(row, pass.out, n, mask->dtype, b);
    }
    return FINE;
}

static int mask(const Call *call, int64_t first, int64_t last) {
    const Mask *mask = call->mask;
    int64_t n = mask->n, m = 1;
    for (int64_t r = first; r < last; r++) {
        double k = mask->ks ? mask->ks[r] : mask->k, other = (double)n - k;
        int64_t needed = !(k > 0) || k >= (double)n ? 1 : wanted(mask->kind, n, mask->kind == LAPSUM && other < k ? other : k);
        m = needed > m ? needed : m;
        if (!mask->ks) break;
    }
    Arena arena = {0};
    lay_out_mask(n, m, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    MaskWork work = lay_out_mask(n, m, &arena);
    int status = mask_rows(mask, &work, first, last);
    give_memory_back(arena.memory);
    return status;
}

/* ---- gradients ---- */

/* The work on one row. */
typedef struct {
    const MaskBackward *back;
    const void *row, *incoming; /* of the threshold: no incoming */
    void *out;
    float *slopes; /* (n), and room behind */
    double *sums;  /* (parts, 2) */
    Scale scale;
    float mean; /* of the incoming gradients; of the threshold, what the slopes are multiplied by */
} Slopes;

/* The slopes of F at the scores, times 2 for Laplace, into `slopes`; their sum, and that of slopes times incoming gradients; of
   the threshold, times x = (s - b) / t. */
INLINE void pass_slopes(const Slopes *p, int64_t part, const int dtype, const int kind, const int of_threshold) {
    const vf zero = {0}, one = splatf(1);
    int64_t n = p->back->n, last = end_of_part(part, n);
    double sum = 0, weighted = 0;
    for (int64_t i = part * PART; i < last;) {
        vf some = {0}, more = {0};
        for (int64_t end = i + 64 * W < last ? i + 64 * W : last; i < end; i += W) {
            vf x = scaled(load_some(p->row, dtype, i, n), p->scale), slope;
            vf factor = of_threshold ? x : load_some(p->incoming, dtype, i, n);
            if (kind == LAPSUM)
                slope = exponentialf(-absolutef(x));
            else
                slope = (vf)((vi)one & (vi)(x > zero) & (vi)(x < one));
            store_f32(p->slopes + i, slope);
            if (of_threshold || i + W > n) factor = (vf)((vi)factor & (vi)(slope > zero));
            some += slope;
            more += slope * factor;
        }
        for (int l = 0; l < W; l++) sum += (double)some[l], weighted += (double)more[l];
    }
    p->sums[2 * part] = sum, p->sums[2 * part + 1] = weighted;
}
static void slopes_task(void *context, int64_t part) {
    const Slopes *p = context;
    if (p->back->of_threshold)
        FOR_DTYPE(p->back->dtype, pass_slopes(p, part, DTYPE, LAPSUM, 1));
    else
        FOR_DTYPE_AND_KIND(p->back->dtype, p->back->kind, pass_slopes(p, part, DTYPE, KIND, 0));
}

/* The gradient by the scores; adds up that by the rate, times the rate. */
INLINE void pass_gradient(const Slopes *p, int64_t part, const int dtype, const int kind) {
    vf factor = p->scale.rate * (kind == LAPSUM ? 0.5f : 1.0f);
    int64_t n = p->back->n, last = end_of_part(part, n);
    double sum = 0;
    for (int64_t i = part * PART; i < last;) {
        vf some = {0};
        for (int64_t end = i + 64 * W < last ? i + 64 * W : last; i < end; i += W) {
            vf slope = load_f32(p->slopes + i), y = factor * slope * (load_some(p->incoming, dtype, i, n) - p->mean);
            y = (vf)((vi)y & (vi)(slope > (vf){0})); /* padding has none */
            store_some(p->out, dtype, i, n, y);
            some += (vf)((vi)(y * scaled(load_some(p->row, dtype, i, n), p->scale)) & (vi)(slope > (vf){0}));
        }
        for (int l = 0; l < W; l++) sum += (double)some[l];
    }
    p->sums[2 * part] = sum;
}
INLINE void pass_weights(const Slopes *p, int64_t part, const int dtype) {
    int64_t n = p->back->n, last = end_of_part(part, n);
    for (int64_t i = part * PART; i < last; i += W) store_some(p->out, dtype, i, n, load_f32(p->slopes + i) * p->mean);
}
static void gradient_task(void *context, int64_t part) {
    const Slopes *p = context;
    if (p->back->of_threshold)
        FOR_DTYPE(p->back->dtype, pass_weights(p, part, DTYPE));
    else
        FOR_DTYPE_AND_KIND(p->back->dtype, p->back->kind, pass_gradient(p, part, DTYPE, KIND));
}

static double sum_of_parts(const Slopes *p, int which) {
    double sum = 0;
    for (int64_t part = 0; part < parts_of(p->back->n); part++) sum += p->sums[2 * part + which];
    return sum;
}

/* Where all slopes are too small for a float: relative to the largest, in place of the slopes. Returns their sum, and how far the
   nearest score is. */
static double far_slopes(const Slopes *p, double b, double *closest) {
    const MaskBackward *back = p->back;
    double nearest = INFINITY, sum = 0;
    for (int64_t i = 0; i < back->n; i++) nearest = fmin(nearest, fabs((double)score_at(p->row, back->dtype, i) - b));
    for (int64_t i = 0; i < back->n; i++) {
        double weight = exp((nearest - fabs((double)score_at(p->row, back->dtype, i) - b)) * back->rate);
        p->slopes[i] = (float)weight;
        sum += weight;
    }
    *closest = nearest * back->rate;
    return sum;
}

/* db = sum of w ds, with the weights w = softmax(-|s - b| / t); by k: -t / (sum of the slopes); by 1 / t: t (sum of w (s - b)). */
static void threshold_backward(Slopes *p, double b, double incoming, double *by_k, double *by_rate) {
    const MaskBackward *back = p->back;
    int64_t parts = parts_of(back->n);
    each_part(slopes_task, p, parts, back->threads);
    double sum = sum_of_parts(p, 0), mean = sum > 0 ? sum_of_parts(p, 1) / sum : 0;
    double nearest = 0;
    if (sum < 1e-30) {
        sum = far_slopes(p, b, &nearest), mean = 0;
        for (int64_t i = 0; i < back->n; i++)
            if (p->slopes[i] > 0) mean += (double)p->slopes[i] / sum * ((double)score_at(p->row, back->dtype, i) - b) * back->rate;
    }
    *by_k = -2 * incoming * exp(fmin(nearest, 80)) / (back->rate * sum); /* as the plain code has it: e^80 is a float */
    *by_rate = incoming * mean / back->rate; /* times the rate, as that of a mask */
    p->mean = (float)(incoming / sum);
    each_part(gradient_task, p, parts, back->threads);
}

static void mask_row_backward(Slopes *p, double b, double *by_k, double *by_rate) {
    const MaskBackward *back = p->back;
    int64_t parts = parts_of(back->n);
    each_part(slopes_task, p, parts, back->threads);
    double sum = sum_of_parts(p, 0), mean = sum > 0 ? sum_of_parts(p, 1) / sum : 0;
    p->mean = (float)mean;
    each_part(gradient_task, p, parts, back->threads);
    *by_rate = sum_of_parts(p, 0) / back->rate; /* the sum of gradient (s - b) */
    if (sum == 0 && back->kind == LAPSUM && back->grad_k) {
        double nearest;
        sum = far_slopes(p, b, &nearest);
        for (int64_t i = 0; i < back->n; i++)
            mean += (double)p->slopes[i] / sum * (double)score_at(p->incoming, back->dtype, i);
    }
    *by_k = mean;
}

static int mask_backward(const Call *call, int64_t first, int64_t last) {
    const MaskBackward *back = call->mask_backward;
    int64_t n = back->n, bytes = (int64_t)item_size(back->dtype);
    Arena arena = {0};
    take(&arena, (n + W) * 4), take(&arena, parts_of(n) * 16);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    Slopes work = {.back = back, .slopes = take(&arena, (n + W) * 4)};
    work.sums = take(&arena, parts_of(n) * 16);
    for (int64_t r = first; r < last; r++) {
        double b = back->threshold[r], by_k = 0, by_rate = 0;
        work.row = row_of(back->scores, back->dtype, r * back->stride);
        work.out = (char *)back->out + r * n * bytes;
        work.scale = scale_of(b, back->rate);
        if (back->of_threshold)
            threshold_backward(&work, b, ((const double *)back->incoming)[r], &by_k, &by_rate);
        else if (isinf(b))
            memset(work.out, 0, (size_t)(n * bytes));
        else if (b != b) {
            write_trivial_mask(work.row, work.out, n, back->dtype, b);
            by_k = by_rate = NAN;
        } else {
            work.incoming = row_of(back->incoming, back->dtype, r * back->incoming_stride);
            mask_row_backward(&work, b, &by_k, &by_rate);
        }
        if (back->grad_k) back->grad_k[r] = by_k;
        if (back->grad_rate) back->grad_rate[r] = by_rate;
    }
    give_memory_back(arena.memory);
    return FINE;
}
