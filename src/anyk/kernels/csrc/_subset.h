/* Random subsets of size k whose weight is the product of their members' e^(s/t): the probability of each entry to be a member
   (the mask of anyk/operators/ksubset.py, where the formulae are explained), its gradient, and draws.

   The subsets are those of independent draws with the probabilities p_c = sigmoid(s_c / t - b), given that there are k in all,
   whatever b is. b is such that the p sum to about k. Then the frequencies w_l = 2 pi l / N tell k from other numbers, N being
   several standard deviations of the number, and all but the first ten or so have no weight. */

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

/* What is known of a row, in order that the backward pass finds it again. */
typedef struct {
    double reference; /* a score */
    double shift;     /* b = reference / t + shift; infinite where nothing or everything is chosen, NaN where the row has NaN */
    double k;
} Tilt;

/* One frequency. */
typedef struct {
    double cosine, sine, real, imaginary; /* of e^(i w), and of the weight, which stands for that of -w as well */
    float closeness;                      /* cos^2 (w / 2) */
    float of_q, of_p;                     /* u - p = p q (q e^(i w) - q + p - p e^(-i w)) / d, summed with some weights */
    float square_q, square, square_p;     /* u (1 - u) = p q (q^2 e^(i w) + 2 p q + p^2 e^(-i w)) / d^2, with the weights */
} Frequency;

typedef struct {
    Finder finder;
    float *s;                /* (n): the row, and -inf behind */
    double *odds;            /* (n): e^(-s/t + …), then p */
    float *p, *q;            /* (n) */
    float *incoming;         /* (n), of the backward pass */
    Frequency *frequencies;
    int64_t count;           /* of the frequencies but the first, which is 0 and has the weight `constant` */
    double constant;
} SubsetWork;

static SubsetWork lay_out_subset(int64_t n, int64_t m, int backward, Arena *arena) {
    SubsetWork work = {.finder = lay_out_finder(n, m, arena)};
    int64_t whole = n + 64;
    work.s = take(arena, whole * 4);
    work.odds = take(arena, whole * 8);
    work.p = take(arena, whole * 4);
    work.q = take(arena, whole * 4);
    work.incoming = backward ? take(arena, whole * 4) : NULL;
    work.frequencies = take(arena, (int64_t)(16 + sqrt(64 + 12 * (double)n)) * (int64_t)sizeof(Frequency));
    return work;
}

#define BY_EACH_DTYPE(dtype, call)                                         \
    do {                                                                   \
        if ((dtype) == FLOAT32) { enum { DTYPE = FLOAT32 }; call; }        \
        else if ((dtype) == BFLOAT16) { enum { DTYPE = BFLOAT16 }; call; } \
        else { enum { DTYPE = FLOAT16 }; call; }                           \
    } while (0)

/* The row in float32, -inf behind it. */
INLINE void pass_scores(const void *row, const int dtype, int64_t n, float *s) {
    for (int64_t i = 0; i < n; i += W) store_f32(s + i, load_some(row, dtype, i, n));
}
static void read_scores(const void *row, int dtype, int64_t n, float *s) { BY_EACH_DTYPE(dtype, pass_scores(row, DTYPE, n, s)); }

/* e^-((s - reference) / t) of a row. No number is 0 or infinite, not even when shifted by a hundred. */
static void odds_of(const float *s, int64_t n, double reference, double rate, double *odds) {
    for (int64_t i = 0; i < (n + W - 1) / W * W; i++) {
        double x = (reference - (double)s[i]) * rate;
        odds[i] = x < 500 ? x : 500;
    }
    enum { STEP = BYTES / 8 };
    for (int64_t i = 0; i < n; i += STEP) *(vd *)(odds + i) = exponential(larger(*(vd *)(odds + i), splat(-500)));
}

/* Sums of p and of p (1 - p), p = 1 / (1 + factor odds). */
static void tilted_sums(const double *odds, int64_t n, double factor, double *sum, double *slope) {
    enum { STEP = BYTES / 8 };
    vd some = {0}, slopes = {0};
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        vd p = 1 / (1 + factor * *(const vd *)(odds + i));
        some += p;
        slopes += p - p * p;
    }
    *sum = *slope = 0;
    for (int l = 0; l < STEP; l++) *sum += some[l], *slope += slopes[l];
    for (; i < n; i++) {
        double p = 1 / (1 + factor * odds[i]);
        *sum += p, *slope += p - p * p;
    }
}

/* The shift with which the p sum to k, but for a tenth: Newton's method for the logit of their mean, which is nearly straight far
   from the solution. It starts where an entry that is as good as the k-th has p = 1/2. */
static double find_shift(const double *odds, int64_t n, double real, double k) {
    double low = -INFINITY, high = INFINITY, shift = 0;
    for (int step = 0; step < 100; step++) {
        double sum, slope;
        tilted_sums(odds, n, exp(shift), &sum, &slope);
        if (fabs(sum - k) <= 0.1) break;
        if (sum > k)
            low = shift;
        else
            high = shift;
        double found = shift + (log(sum / (real - sum)) - log(k / (real - k))) * (sum * (real - sum)) / (real * slope);
        if (!(found > low && found < high)) found = low + (high - low) / 2;
        if (!isfinite(found)) found = shift + (sum > k ? 1 : -1);
        shift = found;
    }
    return shift;
}

/* The tilt of a row that was read into work->s. Returns a Status. */
static int tilt_of_row(SubsetWork *work, int64_t n, double k, double rate, Tilt *tilt) {
    int has_nan = 0, is_infinite = 0;
    int64_t real = count_real(work->s, n, &has_nan, &is_infinite);
    *tilt = (Tilt){.k = k, .shift = has_nan ? NAN : k <= 0 ? INFINITY : -INFINITY};
    if (is_infinite && !has_nan) return STRANGE;
    if (has_nan || k <= 0 || k >= (double)real) return FINE;
    tilt->reference = (double)best_and_last(work->s, n, (int64_t)k, &work->finder);
    odds_of(work->s, n, tilt->reference, rate, work->odds);
    tilt->shift = find_shift(work->odds, n, (double)real, k);
    return FINE;
}

/* p in the place of the odds, p and q = 1 - p in float32, and the variance of the number that is drawn. */
static double probabilities(SubsetWork *work, int64_t n, double shift) {
    double factor = exp(shift), variance = 0;
    for (int64_t i = 0; i < n; i++) {
        double odds = factor * work->odds[i], p = 1 / (1 + odds);
        work->odds[i] = p;
        work->p[i] = (float)p;
        work->q[i] = (float)(odds * p);
    }
    for (int64_t i = n; i < n + W; i++) work->odds[i] = 0, work->p[i] = 0, work->q[i] = 1;
    enum { STEP = BYTES / 8 };
    vd some = {0};
    for (int64_t i = 0; i < n; i += STEP) {
        vd p = *(const vd *)(work->odds + i);
        some += p - p * p;
    }
    for (int l = 0; l < STEP; l++) variance += some[l];
    return variance;
}

enum { AT_ONCE = 4 }; /* frequencies */

/* The products over a row of 1 - p + p e^(i w), for some frequencies. */
static void products(const double *p, int64_t n, Frequency *frequencies) {
    enum { STEP = BYTES / 8 };
    vd real[AT_ONCE], imaginary[AT_ONCE], less[AT_ONCE], turned[AT_ONCE];
    for (int j = 0; j < AT_ONCE; j++) {
        real[j] = splat(1), imaginary[j] = splat(0);
        less[j] = splat(frequencies[j].cosine - 1), turned[j] = splat(frequencies[j].sine);
    }
    for (int64_t i = 0; i < n; i += STEP) {
        vd at = *(const vd *)(p + i);
        for (int j = 0; j < AT_ONCE; j++) {
            vd x = 1 + at * less[j], y = at * turned[j], before = real[j];
            real[j] = before * x - imaginary[j] * y;
            imaginary[j] = before * y + imaginary[j] * x;
        }
    }
    for (int j = 0; j < AT_ONCE; j++) {
        double x = 1, y = 0;
        for (int l = 0; l < STEP; l++) {
            double before = x;
            x = before * real[j][l] - y * imaginary[j][l];
            y = before * imaginary[j][l] + y * real[j][l];
        }
        frequencies[j].real = x, frequencies[j].imaginary = y;
    }
}

/* The frequencies of a row and their weights, whose real parts sum to 1. By Bernstein's inequality, the number that is drawn
   differs from its mean by N or more with a probability of 2 e^-24. */
static void weigh_frequencies(SubsetWork *work, int64_t n, double k, double variance) {
    double limit = ceil(8 + sqrt(64 + 48 * variance)) + 1;
    int64_t number = (limit < (double)n + 1 ? (int64_t)limit : n + 1) | 1, most = number / 2;
    Frequency *f = work->frequencies;
    double sum = 1;
    work->count = 0;
    for (int64_t first = 0; first < most && work->count == first; first += AT_ONCE) {
        for (int j = 0; j < AT_ONCE; j++) {
            double angle = 2 * M_PI * (double)(first + j + 1) / (double)number, half = cos(angle / 2);
            f[first + j] = (Frequency){.cosine = cos(angle), .sine = sin(angle), .closeness = (float)(half * half)};
        }
        products(work->odds, n, f + first);
        /* they fall with the frequency */
        for (int j = 0; j < AT_ONCE && work->count < most; j++) {
            Frequency *at = f + first + j;
            if (at->real * at->real + at->imaginary * at->imaginary < 1e-28) break;
            double angle = 2 * M_PI * (double)((first + j + 1) * (int64_t)k % number) / (double)number;
            double real = 2 * (at->real * cos(angle) + at->imaginary * sin(angle));
            at->imaginary = 2 * (at->imaginary * cos(angle) - at->real * sin(angle)), at->real = real;
            sum += real;
            work->count++;
        }
    }
    work->constant = 1 / sum;
    for (int64_t l = 0; l < work->count; l++) f[l].real /= sum, f[l].imaginary /= sum;
}

/* What multiplies q / d and p / d in the sum of u - p over the frequencies, with these weights. */
INLINE void set_shares(Frequency *f, double real, double imaginary) {
    f->of_q = (float)(real * (f->cosine - 1) - imaginary * f->sine);
    f->of_p = (float)(real * (1 - f->cosine) - imaginary * f->sine);
}

/* |1 - p + p e^(i w)|^2 without a difference: d = (p - q)^2 + 4 p q cos^2 (w / 2) */
INLINE vf inverse(vf apart, vf near, float closeness) { return 1 / (apart + near * closeness); }

INLINE void pass_subset(const SubsetWork *work, void *out, int64_t n, const int dtype) {
    const vf zero = {0}, one = splatf(1);
    for (int64_t i = 0; i < n; i += W) {
        vf p = load_f32(work->p + i), q = load_f32(work->q + i), pq = p * q, apart = (p - q) * (p - q), near = 4 * pq;
        vf of_q = {0}, of_p = {0};
        for (int64_t l = 0; l < work->count; l++) {
            const Frequency *f = work->frequencies + l;
            vf r = inverse(apart, near, f->closeness);
            of_q += f->of_q * r, of_p += f->of_p * r;
        }
        vf y = largerf(zero, p + pq * (q * of_q + p * of_p));
        y = -largerf(-y, -one);
        store_some(out, dtype, i, n, (vf)((vi)y & (vi)(load_f32(work->s + i) > -INFINITY)));
    }
}

static int subset_rows(const Mask *mask, SubsetWork *work, int64_t first, int64_t last) {
    int64_t n = mask->n;
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(mask->scores, mask->dtype, r * mask->stride);
        void *out = (char *)mask->out + r * n * (int64_t)item_size(mask->dtype);
        Tilt *tilt = (Tilt *)mask->threshold + r;
        read_scores(row, mask->dtype, n, work->s);
        int status = tilt_of_row(work, n, mask->k, mask->rate, tilt);
        if (status != FINE) return status;
        if (!isfinite(tilt->shift)) {
            write_trivial_mask(row, out, n, mask->dtype, tilt->shift);
            continue;
        }
        weigh_frequencies(work, n, tilt->k, probabilities(work, n, tilt->shift));
        for (int64_t l = 0; l < work->count; l++)
            set_shares(work->frequencies + l, work->frequencies[l].real, work->frequencies[l].imaginary);
        BY_EACH_DTYPE(mask->dtype, pass_subset(work, out, n, DTYPE));
    }
    return FINE;
}

/* The gradients that came in, 0 for padding and behind the row, into work->incoming; their mean with the weights p q. */
INLINE float pass_incoming(const SubsetWork *work, const void *incoming, int64_t n, const int dtype) {
    double sum = 0, total = 0;
    for (int64_t i = 0; i < n;) {
        vf some = {0}, weights = {0};
        for (int64_t end = i + 64 * W < n ? i + 64 * W : n; i < end; i += W) {
            vf g = load_some(incoming, dtype, i, n), pq = load_f32(work->p + i) * load_f32(work->q + i);
            g = (vf)((vi)g & (vi)(load_f32(work->s + i) > -INFINITY));
            store_f32(work->incoming + i, g);
            some += pq * g, weights += pq;
        }
        for (int l = 0; l < W; l++) sum += (double)some[l], total += (double)weights[l];
    }
    return total > 0 ? (float)(sum / total) : 0;
}

/* For each frequency the sum of (u_c - p_c) g_c; g less its mean, which changes nothing and saves digits. Then sets the shares to
   those of weights times what this differs from its own mean. */
static void weigh_gradients(SubsetWork *work, int64_t n, float mean) {
    enum { MOST = 64 }; /* vectors: what is read again for each frequency stays in the first cache */
    Frequency *f = work->frequencies;
    double *of_q = work->odds, *of_p = of_q + work->count; /* p is no longer needed there */
    for (int64_t l = 0; l < work->count; l++) of_q[l] = of_p[l] = 0;
    for (int64_t start = 0; start < n; start += MOST * W) {
        int64_t end = start + MOST * W < n ? start + MOST * W : n;
        for (int64_t l = 0; l < work->count; l++) {
            vf some_q = {0}, some_p = {0};
            for (int64_t i = start; i < end; i += W) {
                vf p = load_f32(work->p + i), q = load_f32(work->q + i), pq = p * q;
                vf r = (load_f32(work->incoming + i) - mean) * pq * inverse((p - q) * (p - q), 4 * pq, f[l].closeness);
                some_q += q * r, some_p += p * r;
            }
            for (int v = 0; v < W; v++) of_q[l] += (double)some_q[v], of_p[l] += (double)some_p[v];
        }
    }
    double centre = 0;
    for (int64_t l = 0; l < work->count; l++) {
        double real = (f[l].cosine - 1) * of_q[l] + (1 - f[l].cosine) * of_p[l], imaginary = f[l].sine * (of_q[l] + of_p[l]);
        centre += f[l].real * real - f[l].imaginary * imaginary;
        of_q[l] = real, of_p[l] = imaginary;
    }
    for (int64_t l = 0; l < work->count; l++) {
        double real = of_q[l] - centre, imaginary = of_p[l], x = f[l].real, y = f[l].imaginary;
        set_shares(f + l, x * real - y * imaginary, x * imaginary + y * real);
        f[l].square_q = (float)(x * f[l].cosine - y * f[l].sine);
        f[l].square = (float)(2 * x);
        f[l].square_p = (float)(x * f[l].cosine + y * f[l].sine);
    }
}

/* Returns the sum of gradients times scores. */
INLINE double pass_subset_gradient(const SubsetWork *work, void *out, int64_t n, const int dtype, const Tilt *tilt, double rate,
                                   float mean) {
    const vf reference = splatf((float)tilt->reference);
    const float shift = (float)tilt->shift, factor = (float)rate;
    double by_scale = 0;
    for (int64_t i = 0; i < n;) {
        vf some = {0};
        for (int64_t end = i + 64 * W < n ? i + 64 * W : n; i < end; i += W) {
            vf p = load_f32(work->p + i), q = load_f32(work->q + i), pq = p * q, apart = (p - q) * (p - q), near = 4 * pq;
            vf of_q = {0}, of_p = {0}, square_q = {0}, square = {0}, square_p = {0};
            for (int64_t l = 0; l < work->count; l++) {
                const Frequency *f = work->frequencies + l;
                vf r = inverse(apart, near, f->closeness);
                of_q += f->of_q * r, of_p += f->of_p * r;
                r *= r;
                square_q += f->square_q * r, square += f->square * r, square_p += f->square_p * r;
            }
            vf own = (float)work->constant + q * q * square_q + pq * square + p * p * square_p;
            vf x = (load_f32(work->s + i) - reference) * factor - shift;
            vf y = factor * pq * (q * of_q + p * of_p + own * (load_f32(work->incoming + i) - mean));
            y = (vf)((vi)y & ~(vi)(pq == 0)); /* so far away, and padding */
            some += (vf)((vi)(y * x) & ~(vi)(pq == 0));
            store_some(out, dtype, i, n, y);
        }
        for (int l = 0; l < W; l++) by_scale += (double)some[l];
    }
    return by_scale;
}

static void subset_backward_rows(const MaskBackward *back, SubsetWork *work, int64_t first, int64_t last) {
    int64_t n = back->n, bytes = (int64_t)item_size(back->dtype);
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(back->scores, back->dtype, r * back->stride);
        const void *incoming = row_of(back->incoming, back->dtype, r * back->incoming_stride);
        void *out = (char *)back->out + r * n * bytes;
        const Tilt *tilt = (const Tilt *)back->threshold + r;
        double by_scale = tilt->shift != tilt->shift ? NAN : 0;
        if (isinf(tilt->shift))
            memset(out, 0, (size_t)(n * bytes));
        else if (tilt->shift != tilt->shift)
            write_trivial_mask(row, out, n, back->dtype, tilt->shift);
        else {
            float mean;
            read_scores(row, back->dtype, n, work->s);
            odds_of(work->s, n, tilt->reference, back->rate, work->odds);
            weigh_frequencies(work, n, tilt->k, probabilities(work, n, tilt->shift));
            BY_EACH_DTYPE(back->dtype, mean = pass_incoming(work, incoming, n, DTYPE));
            weigh_gradients(work, n, mean);
            BY_EACH_DTYPE(back->dtype, by_scale = pass_subset_gradient(work, out, n, DTYPE, tilt, back->rate, mean));
        }
        if (back->grad_rate) back->grad_rate[r] = by_scale / back->rate;
    }
}

/* ---- draws ---- */

/* How many are drawn among the entries of a block: of 2, 4, 8, … neighbours, two blocks making the next. The blocks are numbered
   from 1, which has all entries; block b is made of blocks 2 b and 2 b + 1. */
typedef struct {
    int64_t start;  /* where its probabilities are */
    int32_t low;    /* the number that the first of them is of */
    int32_t count;  /* what has less than 1e-20 is left out */
    int32_t real;   /* entries that are not padding */
    int32_t number; /* that are drawn */
} Numbers;

typedef struct {
    SubsetWork subset;
    Numbers *blocks; /* (size) */
    double *probabilities;
    int64_t size; /* the entries and what makes them a power of 2 */
} DrawWork;

static DrawWork lay_out_draw(int64_t n, int64_t k, Arena *arena) {
    DrawWork work = {.subset = lay_out_subset(n, k > 0 ? k : 1, 0, arena), .size = 2};
    while (work.size < n) work.size *= 2;
    int64_t room = 2 * k + 32; /* behind the last: what is made of two blocks before it is cut to k + 1 */
    for (int64_t length = 2; length <= work.size; length *= 2)
        room += work.size / length * ((length < 16 || length < k ? length : k) + 1);
    work.blocks = take(arena, work.size * (int64_t)sizeof(Numbers));
    work.probabilities = take(arena, room * 8);
    return work;
}

/* The probability of an entry to be drawn. */
INLINE double single(const DrawWork *work, int64_t n, int64_t c, int32_t *real) {
    *real = c < n && work->subset.s[c] > -INFINITY;
    return *real ? work->subset.odds[c] : 0;
}

INLINE void pass_convolved(const double *restrict a, const int64_t a_count, const double *restrict b, const int64_t b_count,
                           double *restrict out) {
    for (int64_t i = 0; i < a_count + b_count - 1; i++) out[i] = 0;
    for (int64_t i = 0; i < a_count; i++)
        for (int64_t j = 0; j < b_count; j++) out[i + j] += a[i] * b[j];
}

/* The probabilities of the numbers in two blocks together. */
static void convolve(const double *a, int64_t a_count, const double *b, int64_t b_count, double *out) {
    switch (a_count == b_count ? a_count : 0) { /* of 4, 8 and 16 entries */
    case 3: pass_convolved(a, 3, b, 3, out); break;
    case 5: pass_convolved(a, 5, b, 5, out); break;
    case 9: pass_convolved(a, 9, b, 9, out); break;
    default: a_count < b_count ? pass_convolved(a, a_count, b, b_count, out) : pass_convolved(b, b_count, a, a_count, out);
    }
}

static void count_blocks(DrawWork *work, int64_t n, int32_t most) {
    int64_t used = 0, b = work->size - 1;
    for (; b >= work->size / 2; b--) {
        int32_t left, right;
        double *made = work->probabilities + used, p = single(work, n, 2 * b - work->size, &left);
        double other = single(work, n, 2 * b + 1 - work->size, &right);
        made[0] = (1 - p) * (1 - other), made[1] = p * (1 - other) + (1 - p) * other, made[2] = p * other;
        work->blocks[b] = (Numbers){.start = used, .count = 3, .real = left + right};
        used += 3;
    }
    for (; b > 0; b--) {
        const Numbers *left = work->blocks + 2 * b, *right = left + 1;
        double *made = work->probabilities + used;
        convolve(work->probabilities + left->start, left->count, work->probabilities + right->start, right->count, made);
        Numbers block = {.low = left->low + right->low, .count = left->count + right->count - 1, .real = left->real + right->real};
        int32_t skipped = 0;
        if (b < work->size / 8) { /* 16 entries and more */
            if (block.low + block.count > most + 1) block.count = block.low > most ? 1 : most + 1 - block.low;
            while (block.count > 1 && made[block.count - 1] < 1e-20) block.count--;
            while (skipped < block.count - 1 && made[skipped] < 1e-20) skipped++;
        }
        block.start = used + skipped, block.low += skipped;
        used += block.count, block.count -= skipped;
        work->blocks[b] = block;
    }
}

/* How many of a block's number are in its left half: the first number with which the running sum of the probabilities passes a
   random share of their sum. */
static int32_t number_in_left(int32_t number, double uniform, const Numbers *left, const Numbers *right,
                              const double *probabilities) {
    int32_t first = number - right->low - right->count + 1, last = number - right->low;
    if (first < left->low) first = left->low;
    if (last > left->low + left->count - 1) last = left->low + left->count - 1;
    double sum = 0, passed = 0;
    int32_t found = first;
    if (first <= last) {
        const double *in_left = probabilities + left->start + (first - left->low);
        const double *in_right = probabilities + right->start + (number - first - right->low);
        for (int32_t j = 0; j <= last - first; j++) sum += in_left[j] * in_right[-j];
        for (; found <= last && passed <= uniform * sum; found++) passed += in_left[found - first] * in_right[first - found];
        found -= passed > uniform * sum;
    }
    /* Never what is excluded, and always the number in all, whatever rounding says. */
    int32_t least = number > right->real ? number - right->real : 0, most = number < left->real ? number : left->real;
    return found < least ? least : found > most ? most : found;
}

static void divide_blocks(DrawWork *work, int64_t n, int32_t k, const double *uniform, void *out, int dtype) {
    int64_t b = 1;
    work->blocks[1].number = k;
    for (; b < work->size / 2; b++) {
        Numbers *left = work->blocks + 2 * b, *right = left + 1;
        int32_t number = work->blocks[b].number;
        left->number = number ? number_in_left(number, uniform[b - 1], left, right, work->probabilities) : 0;
        right->number = number - left->number;
    }
    for (; b < work->size; b++) { /* two entries */
        int64_t c = 2 * b - work->size;
        int32_t number = work->blocks[b].number, left, right;
        if (!number) continue;
        double p = single(work, n, c, &left), other = single(work, n, c + 1, &right), first = p * (1 - other);
        if (number == 1) left = !right || (left && uniform[b - 1] * (first + (1 - p) * other) >= (1 - p) * other);
        if (left) store_some(out, dtype, c, c + 1, splatf(1));
        if (number - left) store_some(out, dtype, c + 1, c + 2, splatf(1));
    }
}

static int draw_rows(const Draw *draw, DrawWork *work, int64_t first, int64_t last) {
    int64_t n = draw->n, bytes = (int64_t)item_size(draw->dtype);
    for (int64_t r = first; r < last; r++) {
        const void *row = row_of(draw->scores, draw->dtype, r * draw->stride);
        void *out = (char *)draw->out + r * n * bytes;
        Tilt tilt;
        read_scores(row, draw->dtype, n, work->subset.s);
        int status = tilt_of_row(&work->subset, n, (double)draw->k, draw->rate, &tilt);
        if (status != FINE) return status;
        if (!isfinite(tilt.shift)) {
            write_trivial_mask(row, out, n, draw->dtype, tilt.shift);
            continue;
        }
        probabilities(&work->subset, n, tilt.shift);
        count_blocks(work, n, (int32_t)draw->k);
        memset(out, 0, (size_t)(n * bytes));
        divide_blocks(work, n, (int32_t)draw->k, draw->uniform + r * (work->size - 1), out, draw->dtype);
    }
    return FINE;
}

/* ---- calls ---- */

static int mask_of_kind(const Call *call, int64_t first, int64_t last) {
    const Mask *given = call->mask;
    if (given->kind != KSUBSET) return mask(call, first, last);
    int64_t m = given->k < 1 ? 1 : given->k < (double)given->n ? (int64_t)given->k : given->n;
    Arena arena = {0};
    lay_out_subset(given->n, m, 0, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    SubsetWork work = lay_out_subset(given->n, m, 0, &arena);
    int status = subset_rows(given, &work, first, last);
    give_memory_back(arena.memory);
    return status;
}

static int mask_backward_of_kind(const Call *call, int64_t first, int64_t last) {
    const MaskBackward *back = call->mask_backward;
    if (back->kind != KSUBSET) return mask_backward(call, first, last);
    Arena arena = {0};
    lay_out_subset(back->n, 1, 1, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    SubsetWork work = lay_out_subset(back->n, 1, 1, &arena);
    subset_backward_rows(back, &work, first, last);
    give_memory_back(arena.memory);
    return FINE;
}

static int draw(const Call *call, int64_t first, int64_t last) {
    const Draw *given = call->draw;
    int64_t n = given->n, k = given->k < n ? given->k : n;
    Arena arena = {0};
    lay_out_draw(n, k, &arena);
    arena = (Arena){.memory = take_memory(arena.used)};
    if (!arena.memory) return NO_MEMORY;
    DrawWork work = lay_out_draw(n, k, &arena);
    int status = draw_rows(given, &work, first, last);
    give_memory_back(arena.memory);
    return status;
}
