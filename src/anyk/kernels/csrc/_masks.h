/* Masks with a threshold: m_c = F((s_c - b) / t) with one b a row, such that the mask sums to k. F is the Laplace distribution
   function (anyk/operators/lapsum.py) or clip(x, 0, 1) (anyk/operators/permutahedron.py). */

/* Scores of a row over the temperature, less that of `reference`: those above `last`, how many equal it, and the sum of
   e^(s - last) over those below. */
typedef struct {
    double *above;
    int64_t count;
    double last, equal, below;
} Profile;

/* Where b lies among the scores, and the sums that the equation for b has then. */
typedef struct {
    double passed;            /* how many scores are above b */
    double lowest, highest;   /* of those above b, and of the others */
    double above, below;      /* sums of e^(b - s) over the scores above b, and of e^(s - b) over the others */
} Split;

static Split split_at(const Profile *p, double b) {
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
    double sum = above ? 0 : (p->equal + p->below) * exp(p->last - from);
    for (int64_t i = 0; i < p->count; i++)
        if ((p->above[i] > b) == above) sum += exp(above ? from - p->above[i] : p->above[i] - from);
    return log(sum);
}

/* b with sum_c F(s_c - b) = k, F that of Laplace, 0 < k <= n / 2: b is not below `last`.

   With i scores above b, A = sum of e^(-s) over them and B = sum of e^s over the others, the equation is i - A e^b / 2 + B e^-b / 2
   = k, quadratic in e^b. Its solution is right if b has the same i; else it is where to look next. */
static double laplace_threshold(const Profile *p, double k) {
    double low = p->last, high = INFINITY, b = p->last;
    for (int64_t i = 0; i < p->count; i++) b = p->above[i] > b ? p->above[i] : b;
    for (int step = 0; step < 200; step++) {
        Split at = split_at(p, b);
        double missing = k - at.passed, found;
        if (at.passed + (at.below - at.above) / 2 > k)
            low = b;
        else
            high = b;
        double root = sqrt(missing * missing + at.above * at.below);
        int far = 0; /* e to the distance is no number: on to the next score */
        if (missing == 0)
            found = (at.highest + log_sum_beside(p, b, at.highest, 0) + at.lowest - log_sum_beside(p, b, at.lowest, 1)) / 2;
        else if (missing > 0)
            found = (far = b - at.highest > 600) ? at.highest : b + log(at.below / (missing + root));
        else
            found = (far = at.lowest - b > 600) ? at.lowest : b + log((root - missing) / at.above);
        if (!far && found >= at.highest && found <= at.lowest) return found;
        /* on to the next interval: not past the bounds that are known */
        if (found > high || found < low) found = high < INFINITY ? low + (high - low) / 2 : found;
        if (found == b) return b;
        b = found;
    }
    return b;
}

/* tau with sum_c clip(s_c - tau, 0, 1) = k, for the scores that can be above 0 there, `low` <= tau < `high`. The sum falls with
   tau in straight pieces: a Newton step that ends on the right piece is exact. */
static double clip_threshold(const double *s, int64_t count, double k, double low, double high) {
    double tau = low + (high - low) / 2;
    for (int step = 0; step < 200; step++) {
        double sum = 0, inside = 0;
        for (int64_t i = 0; i < count; i++) {
            double x = s[i] - tau;
            sum += x < 0 ? 0 : x > 1 ? 1 : x;
            inside += x > 0 && x < 1;
        }
        double surplus = sum - k;
        if (surplus > 0)
            low = tau;
        else
            high = tau;
        double found = inside > 0 ? tau + surplus / inside : tau;
        if (found == tau && (inside > 0 || surplus == 0)) return tau;
        if (!(found > low && found < high)) found = low + (high - low) / 2;
        if (found == tau || found == low || found == high) return tau;
        if (fabs(surplus) <= 1e-13 * k) return tau;
        tau = found;
    }
    return tau;
}

typedef struct {
    Finder finder;
    float *row;      /* (n) those that are not padding, or all of them turned round */
    float *widened;  /* (n) in float32 */
    double *profile; /* (n + room) */
} MaskWork;

static MaskWork lay_out_mask(int64_t n, Arena *arena) {
    MaskWork work = {.finder = lay_out_finder(n, n, arena)};
    work.row = take(arena, (n + 64) * 4);
    work.widened = take(arena, (n + 64) * 4);
    work.profile = take(arena, (n + 64) * 8);
    return work;
}

/* The smallest of the m best scores. */
static float best_and_last(const float *s, int64_t n, int64_t m, Kept *kept, float *room) {
    Sums unused;
    find_best(s, FLOAT32, n, m, 0, 0, kept, room, &unused);
    if (kept->count > m) compact(kept);
    float last = INFINITY;
    for (int64_t i = 0; i < kept->count; i++) last = kept->score[i] < last ? kept->score[i] : last;
    return last;
}

/* The threshold of n finite scores, 0 < k <= n / 2. */
static double laplace_row(const float *s, int64_t n, double k, double rate, MaskWork *work) {
    /* At the (2k)-th score half of 2k scores have passed at least: b lies above it. */
    int64_t wanted = 2 * (int64_t)ceil(k) + 1;
    Kept *kept = &work->finder.kept;
    float last = best_and_last(s, n, wanted < n ? wanted : n, kept, work->finder.widened);
    double reference = (double)last, below = 0;
    Profile p = {.above = work->profile};
    for (int64_t i = 0; i < kept->count; i++)
        if (kept->score[i] > last) p.above[p.count++] = ((double)kept->score[i] - reference) * rate;
    for (int l = 0; l < BYTES / 8; l++) p.above[p.count + l] = -INFINITY;
    p.equal = (double)powers_f32(s, n, 1, last, (float)rate, &below);
    p.below = below;
    return reference + laplace_threshold(&p, k) / rate;
}

/* The threshold of n finite scores, 0 < k < n. */
static double clip_row(const float *s, int64_t n, double k, double rate, MaskWork *work) {
    Kept *kept = &work->finder.kept;
    int64_t upper = (int64_t)ceil(k), lower = (int64_t)floor(k) + 1;
    double next = (double)best_and_last(s, n, lower, kept, work->finder.widened), kth = next;
    if (upper < lower) { /* the k-th is the last but one of the best */
        int64_t lasts = 0;
        double above = INFINITY;
        for (int64_t i = 0; i < kept->count; i++) {
            lasts += kept->score[i] == (float)next;
            if (kept->score[i] > (float)next && (double)kept->score[i] < above) above = (double)kept->score[i];
        }
        if (lasts == 1) kth = above;
    }
    double reference = kth, gap = (kth - next) * rate;
    if (gap >= 1) return reference - (1 + (gap - 1) / 2) / rate; /* anywhere between the two */
    double low = -gap - 1;
    int64_t count = 0;
    float limit = (float)(reference + low / rate);
    for (int64_t i = 0; i < n; i++)
        if (s[i] >= limit) work->profile[count++] = ((double)s[i] - reference) * rate;
    return reference + clip_threshold(work->profile, count, k, low, 0) / rate;
}

/* b of a row: infinite where k is 0 or not less than the number of scores that are not padding, NaN where the row has NaN. */
static double threshold_of_row(const Mask *mask, const float *s, double k, MaskWork *work, int *strange) {
    int64_t n = mask->n, real = 0;
    double total = 0;
    int infinite = 0;
    for (int64_t i = 0; i < n; i++) {
        real += s[i] > -INFINITY;
        infinite |= s[i] == INFINITY;
        total += s[i] != s[i];
    }
    *strange |= infinite;
    if (total > 0 || k != k) return NAN;
    if (k <= 0) return INFINITY;
    if (k >= (double)real) return -INFINITY;
    int mirrored = mask->kind == LAPSUM && 2 * k > (double)real;
    if (real < n || mirrored) { /* few are left out: the threshold of the scores turned round */
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++)
            if (s[i] > -INFINITY) work->row[count++] = mirrored ? -s[i] : s[i];
        s = work->row, n = real;
    }
    if (mask->kind != LAPSUM) return clip_row(s, n, k, mask->rate, work);
    double b = laplace_row(s, n, mirrored ? (double)n - k : k, mask->rate, work);
    return mirrored ? -b : b;
}

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
    float last[W];
    char narrowed[W * 4];
    store_f32(last, x);
    store_any(narrowed, dtype, 0, x);
    memcpy((char *)row + i * (int64_t)item_size(dtype), narrowed, (size_t)(n - i) * item_size(dtype));
}

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

INLINE void pass_mask(const void *row, void *out, int64_t n, const int dtype, const int kind, Scale scale) {
    const vf zero = {0}, one = splatf(1);
    for (int64_t i = 0; i < n; i += W) {
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

/* The slopes of F at the scores, times 2 for Laplace, into `slopes`; their sum, and that of slopes times incoming gradients. */
INLINE void pass_slopes(const void *row, const void *incoming, float *slopes, int64_t n, const int dtype, const int kind,
                        Scale scale, double *sum, double *weighted) {
    const vf zero = {0}, one = splatf(1);
    for (int64_t i = 0; i < n;) {
        vf some = {0}, more = {0};
        for (int64_t end = i + 64 * W < n ? i + 64 * W : n; i < end; i += W) {
            vf x = scaled(load_some(row, dtype, i, n), scale), g = load_some(incoming, dtype, i, n), p;
            if (kind == LAPSUM)
                p = exponentialf(-absolutef(x));
            else
                p = (vf)((vi)one & (vi)(x > zero) & (vi)(x < one));
            store_f32(slopes + i, p); /* there is room behind the last */
            if (i + W > n) g = (vf)((vi)g & (vi)(p > zero));
            some += p;
            more += p * g;
        }
        for (int l = 0; l < W; l++) *sum += (double)some[l], *weighted += (double)more[l];
    }
}

INLINE double pass_gradient(const void *row, const void *incoming, const float *slopes, void *out, int64_t n, const int dtype,
                            const int kind, Scale scale, float mean) {
    vf factor = scale.rate * (kind == LAPSUM ? 0.5f : 1.0f);
    double by_scale = 0;
    for (int64_t i = 0; i < n;) {
        vf some = {0};
        for (int64_t end = i + 64 * W < n ? i + 64 * W : n; i < end; i += W) {
            vf p = load_f32(slopes + i), y = factor * p * (load_some(incoming, dtype, i, n) - mean);
            y = (vf)((vi)y & (vi)(p > (vf){0})); /* padding has none */
            store_some(out, dtype, i, n, y);
            some += (vf)((vi)(y * scaled(load_some(row, dtype, i, n), scale)) & (vi)(p > (vf){0}));
        }
        for (int l = 0; l < W; l++) by_scale += (double)some[l];
    }
    return by_scale;
}

#define BY_DTYPE_AND_KIND(dtype, kind, call)                                                           \
    do {                                                                                               \
        if ((kind) == LAPSUM) {                                                                        \
            enum { KIND = LAPSUM };                                                                    \
            if ((dtype) == FLOAT32) { enum { DTYPE = FLOAT32 }; call; }                                \
            else if ((dtype) == BFLOAT16) { enum { DTYPE = BFLOAT16 }; call; }                         \
            else { enum { DTYPE = FLOAT16 }; call; }                                                   \
        } else {                                                                                       \
            enum { KIND = PERMUTAHEDRON };                                                             \
            if ((dtype) == FLOAT32) { enum { DTYPE = FLOAT32 }; call; }                                \
            else if ((dtype) == BFLOAT16) { enum { DTYPE = BFLOAT16 }; call; }                         \
            else { enum { DTYPE = FLOAT16 }; call; }                                                   \
        }                                                                                              \
    } while (0)

/* 1 for all that is not padding, or 0, or NaN. */
static void write_trivial_mask(const void *row, void *out, int64_t n, int dtype, double b) {
    for (int64_t i = 0; i < n; i++) {
        float value = b != b ? NAN : b > 0 || score_at(row, dtype, i) == -INFINITY ? 0 : 1;
        store_some(out, dtype, i, i + 1, splatf(value));
    }
}

static int mask_rows(const Mask *mask, MaskWork *work, int64_t first, int64_t last) {
    int64_t n = mask->n, bytes = (int64_t)item_size(mask->dtype);
    int strange = 0;
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(mask->scores, mask->dtype, r * mask->stride);
        void *out = (char *)mask->out + r * n * bytes;
        const float *s = row;
        if (mask->dtype != FLOAT32) {
            widen_row(row, mask->dtype, n, work->widened);
            s = work->widened;
        }
        double b = threshold_of_row(mask, s, mask->ks ? mask->ks[r] : mask->k, work, &strange);
        if (strange) return STRANGE;
        mask->threshold[r] = b;
        if (!isfinite(b))
            write_trivial_mask(row, out, n, mask->dtype, b);
        else
            BY_DTYPE_AND_KIND(mask->dtype, mask->kind, pass_mask(row, out, n, DTYPE, KIND, scale_of(b, mask->rate)));
    }
    return FINE;
}

static int mask(const Call *call, int64_t first, int64_t last) {
    Arena arena = {0};
    lay_out_mask(call->mask->n, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    MaskWork work = lay_out_mask(call->mask->n, &arena);
    int status = mask_rows(call->mask, &work, first, last);
    give_memory_back(arena.memory);
    return status;
}

/* The mean of the incoming gradients with the weights softmax(-|s - b| / t), where all slopes are too small for a float. */
static double far_mean(const MaskBackward *back, const void *row, const void *incoming, double b) {
    double nearest = INFINITY, sum = 0, weighted = 0;
    for (int64_t i = 0; i < back->n; i++) nearest = fmin(nearest, fabs((double)score_at(row, back->dtype, i) - b));
    for (int64_t i = 0; i < back->n; i++) {
        double weight = exp((nearest - fabs((double)score_at(row, back->dtype, i) - b)) * back->rate);
        sum += weight, weighted += weight * (double)score_at(incoming, back->dtype, i);
    }
    return weighted / sum;
}

static int mask_backward(const Call *call, int64_t first, int64_t last) {
    const MaskBackward *back = call->mask_backward;
    int64_t n = back->n, bytes = (int64_t)item_size(back->dtype);
    float *slopes = (float *)take_memory((n + W) * 4);
    if (!slopes) return NO_MEMORY;
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(back->scores, back->dtype, r * back->stride);
        const void *incoming = row_of(back->incoming, back->dtype, r * back->incoming_stride);
        void *out = (char *)back->out + r * n * bytes;
        double b = back->threshold[r], sum = 0, weighted = 0, mean = 0, by_scale = 0;
        if (isinf(b))
            memset(out, 0, (size_t)(n * bytes));
        else if (b != b) {
            write_trivial_mask(row, out, n, back->dtype, b);
            mean = by_scale = NAN;
        } else {
            Scale scale = scale_of(b, back->rate);
            BY_DTYPE_AND_KIND(back->dtype, back->kind,
                              pass_slopes(row, incoming, slopes, n, DTYPE, KIND, scale, &sum, &weighted));
            mean = sum > 0 ? weighted / sum : back->kind == LAPSUM && back->grad_k ? far_mean(back, row, incoming, b) : 0;
            BY_DTYPE_AND_KIND(back->dtype, back->kind, by_scale = pass_gradient(row, incoming, slopes, out, n, DTYPE, KIND, scale,
                                                                                (float)mean));
        }
        if (back->grad_k) back->grad_k[r] = mean;
        if (back->grad_rate) back->grad_rate[r] = by_scale / back->rate; /* by 1 / t: sum of gradient (s - b) */
    }
    give_memory_back((char *)slopes);
    return FINE;
}
