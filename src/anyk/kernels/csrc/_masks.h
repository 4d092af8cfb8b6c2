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

typedef struct {
    Finder finder;
    double *profile; /* (m + room) */
    int64_t m;       /* the most scores that are looked for */
} MaskWork;

static MaskWork lay_out_mask(int64_t n, int64_t m, Arena *arena) {
    MaskWork work = {.finder = lay_out_finder(n, m, arena), .m = m};
    work.profile = take(arena, (m + 64) * 8);
    return work;
}

/* How many of the best scores the threshold depends on: for Laplace, at the (2k)-th score half of 2k scores have passed at
   least, so that b lies above it. */
static int64_t wanted(int kind, int64_t n, double k) {
    int64_t m = kind == LAPSUM ? 2 * (int64_t)ceil(k) + 1 : (int64_t)floor(k) + 1;
    return m < 1 ? 1 : m < n ? m : n;
}

/* The smallest of the m best scores. */
static float best_and_last(const float *s, int64_t n, int64_t m, Finder *finder) {
    Sums unused;
    Kept *kept = &finder->kept;
    find_best(s, FLOAT32, n, m, 0, 0, kept, finder->widened, &unused);
    if (kept->count > m) compact(kept);
    float last = INFINITY;
    for (int64_t i = 0; i < kept->count; i++) last = kept->score[i] < last ? kept->score[i] : last;
    return last;
}

/* The threshold of n finite scores, 0 < k <= n / 2. */
static double laplace_row(const float *s, int64_t n, double k, double rate, MaskWork *work) {
    Kept *kept = &work->finder.kept;
    float last = best_and_last(s, n, wanted(LAPSUM, n, k), &work->finder);
    double reference = (double)last, below = 0;
    Profile p = {.above = work->profile};
    for (int64_t i = 0; i < kept->count; i++)
        if (kept->score[i] > last) p.above[p.count++] = ((double)kept->score[i] - reference) * rate;
    for (int l = 0; l < BYTES / 8; l++) p.above[p.count + l] = -INFINITY;
    p.equal = (double)powers_f32(s, n, 1, last, (float)rate, &below);
    p.below = below;
    return reference + laplace_threshold(&p, k) / rate;
}

/* The threshold of n finite scores, 0 < k < n. NaN: no memory. */
static double clip_row(const float *s, int64_t n, double k, double rate, MaskWork *work) {
    Kept *kept = &work->finder.kept;
    int64_t lower = (int64_t)floor(k) + 1;
    float next = best_and_last(s, n, lower, &work->finder), kth = next;
    if ((int64_t)ceil(k) < lower) { /* the k-th is the last but one of the best */
        int64_t lasts = 0;
        float above = INFINITY;
        for (int64_t i = 0; i < kept->count; i++) {
            lasts += kept->score[i] == next;
            if (kept->score[i] > next && kept->score[i] < above) above = kept->score[i];
        }
        if (lasts == 1) kth = above;
    }
    double reference = (double)kth, gap = (reference - (double)next) * rate;
    if (gap >= 1) return reference - (1 + (gap - 1) / 2) / rate; /* anywhere between the two */
    /* only what is above the lowest possible tau counts */
    float limit = (float)(reference - (gap + 1) / rate);
    int64_t count = 0, most = 0;
    vi reached = {0};
    for (int64_t i = 0; i + W <= n; i += W) reached -= (vi)(load_f32(s + i) >= limit);
    most = sum_of(reached) + W;
    char *memory = borrow((most + 2 * W) * 4);
    if (!memory) return NAN;
    float *near = (float *)memory;
    vf limits = splatf(limit);
    for (int64_t i = 0; i < n; i += W) {
        uint32_t hits = i + W <= n ? not_below(load_f32(s + i), limits) : 0;
        for (int64_t j = i; i + W > n && j < n; j++) hits |= (uint32_t)(s[j] >= limit) << (j - i);
        for (; hits; hits &= hits - 1) near[count++] = (float)(((double)s[i + __builtin_ctz(hits)] - reference) * rate);
    }
    for (int l = 0; l < W; l++) near[count + l] = -INFINITY;
    double tau = clip_threshold(near, count, k, -gap - 1, 0);
    give_memory_back(memory);
    return reference + tau / rate;
}

/* Counts the scores that are not padding; notices NaN and infinity. */
static int64_t count_real(const float *s, int64_t n, int *has_nan, int *is_infinite) {
    vi padded = {0}, strange = {0}, top = {0};
    int64_t i = 0, count = 0;
    for (; i + W <= n; i += W) {
        vf x = load_f32(s + i);
        padded -= (vi)(x == -INFINITY);
        strange |= (vi)(x != x);
        top |= (vi)(x == INFINITY);
    }
    count = sum_of(padded);
    for (; i < n; i++) count += s[i] == -INFINITY, strange[0] |= s[i] != s[i], top[0] |= s[i] == INFINITY;
    for (int l = 0; l < W; l++) *has_nan |= strange[l] != 0, *is_infinite |= top[l] != 0;
    return n - count;
}

/* b of a row: infinite where k is 0 or not less than the number of scores that are not padding, NaN where the row has NaN. */
static int threshold_of_row(const Mask *mask, const float *s, double k, MaskWork *work, double *b) {
    int has_nan = 0, is_infinite = 0;
    int64_t n = mask->n, real = count_real(s, n, &has_nan, &is_infinite);
    *b = has_nan || k != k ? NAN : k <= 0 ? INFINITY : -INFINITY;
    if (is_infinite && !has_nan) return STRANGE;
    if (has_nan || k != k || k <= 0 || k >= (double)real) return FINE;
    int mirrored = mask->kind == LAPSUM && 2 * k > (double)real;
    char *memory = NULL;
    if (real < n || mirrored) { /* mirrored: few are left out, and the threshold is that of the scores turned round */
        int64_t count = 0;
        memory = borrow((real + W) * 4);
        if (!memory) return NO_MEMORY;
        float *row = (float *)memory;
        for (int64_t i = 0; i < n; i++)
            if (s[i] > -INFINITY) row[count++] = mirrored ? -s[i] : s[i];
        s = row, n = real;
    }
    if (mask->kind == LAPSUM) {
        double found = laplace_row(s, n, mirrored ? (double)n - k : k, mask->rate, work);
        *b = mirrored ? -found : found;
    } else
        *b = clip_row(s, n, k, mask->rate, work);
    if (memory) give_memory_back(memory);
    return *b != *b ? NO_MEMORY : FINE;
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

static int mask_rows(const Mask *mask, MaskWork *work, float *widened, int64_t first, int64_t last) {
    int64_t n = mask->n, bytes = (int64_t)item_size(mask->dtype);
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(mask->scores, mask->dtype, r * mask->stride);
        void *out = (char *)mask->out + r * n * bytes;
        if (widened)
            for (int64_t i = 0; i < n; i += W) /* there is room behind the last */
                store_f32(widened + i, mask->dtype == BFLOAT16 ? load_some(row, BFLOAT16, i, n) : load_some(row, FLOAT16, i, n));
        double b;
        int status = threshold_of_row(mask, widened ? widened : row, mask->ks ? mask->ks[r] : mask->k, work, &b);
        if (status != FINE) return status;
        mask->threshold[r] = b;
        if (!isfinite(b))
            write_trivial_mask(row, out, n, mask->dtype, b);
        else
            BY_DTYPE_AND_KIND(mask->dtype, mask->kind, pass_mask(row, out, n, DTYPE, KIND, scale_of(b, mask->rate)));
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
    char *widened = mask->dtype == FLOAT32 || !arena.memory ? NULL : borrow((n + W) * 4);
    int status = NO_MEMORY;
    if (arena.memory && (widened || mask->dtype == FLOAT32)) {
        MaskWork work = lay_out_mask(n, m, &arena);
        status = mask_rows(mask, &work, (float *)widened, first, last);
    }
    if (arena.memory) give_memory_back(arena.memory);
    if (widened) give_memory_back(widened);
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
    float *slopes = (float *)borrow((n + W) * 4);
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
