/* Random subsets of size k whose weight is the product of their members' e^(s/t): the probability of each entry to be a member
   (the mask of anyk/operators/ksubset.py, where the formulae are explained), its gradient, and draws.

   The subsets are those of independent draws with the probabilities p_c = sigmoid(s_c / t - b), given that there are k in all,
   whatever b is. b is such that the p sum to about k. Then the frequencies w_l = 2 pi l / N tell k from other numbers, N being
   several standard deviations of the number, and all but the first ten or so have no weight. */

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
    const Rows *rows;
    float *s;     /* (n): the row, and -inf behind, up to a whole vector, as all of these */
    double *odds; /* (n): e^(-s/t + …), then p */
    float *p, *q; /* (n) */
    float *incoming; /* (n), of the backward pass */
    uint32_t *limits, *drawn; /* (n), of draws */
    Finder finder;
    Frequency *frequencies;
    int64_t count;   /* of the frequencies but the first, which is 0 and has the weight `constant` */
    double constant;
} SubsetWork;

static void lay_out_subset(void *given, Arena *arena) {
    SubsetWork *work = given;
    int64_t n = work->rows->n, k = (int64_t)work->rows->k, whole = n + 64;
    work->s = take(arena, whole * 4);
    work->odds = take(arena, whole * 8);
    work->p = take(arena, whole * 4);
    work->q = take(arena, whole * 4);
    work->incoming = take(arena, whole * 4);
    work->limits = take(arena, whole * 4);
    work->drawn = take(arena, whole * 4);
    lay_out_finder(&work->finder, n, k < 1 ? 1 : k < n ? k : n, arena);
    work->frequencies = take(arena, (int64_t)(16 + sqrt(64 + 12 * (double)n)) * (int64_t)sizeof(Frequency));
}

/* ---- the tilt ---- */

/* e^-((s - reference) / t) of a row. No number is 0 or infinite, not even when shifted by a hundred: padding has none to speak of. */
static void odds_of(const SubsetWork *work, double reference) {
    int64_t whole = (work->rows->n + W - 1) / W * W;
    for (int64_t i = 0; i < whole; i++) work->odds[i] = (reference - (double)work->s[i]) * work->rows->rate;
    for (int64_t i = 0; i < whole; i += D) {
        vd *odds = (vd *)(work->odds + i);
        *odds = exponential(smaller(larger(*odds, splat(-500)), splat(500)));
    }
}

/* Sums of p and of p (1 - p), p = 1 / (1 + factor odds). */
static void tilted_sums(const double *odds, int64_t n, double factor, double *sum, double *slope) {
    vd some = {0}, slopes = {0};
    for (int64_t i = 0; i < n; i += D) {
        vd p = 1 / (1 + factor * *(const vd *)(odds + i));
        some += p;
        slopes += p - p * p;
    }
    *sum = total(some), *slope = total(slopes);
}

/* The shift with which the p sum to k, but for a tenth: Newton's method for the logit of their mean, which is nearly straight far
   from the solution. It starts where the k-th best entry has p = 1/2. */
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

/* Reads a row and finds its tilt. Returns a Status. */
static int tilt_of_row(SubsetWork *work, int64_t r, Tilt *tilt) {
    const Rows *rows = work->rows;
    int64_t n = rows->n;
    double k = rows->k;
    widen_row(row_of(rows->scores, rows->dtype, r * rows->stride), rows->dtype, n, work->s);
    vi reals = {0}, infinite = {0}, nan = {0};
    for (int64_t i = 0; i < n; i += W) {
        vf s = load_f32(work->s + i);
        reals -= (vi)(s > -INFINITY), infinite -= (vi)(s == INFINITY), nan -= (vi)(s != s);
    }
    int64_t real = sum_of(reals);
    int has_nan = sum_of(nan) > 0;
    *tilt = (Tilt){.k = k, .shift = has_nan ? NAN : k <= 0 ? INFINITY : -INFINITY};
    if (sum_of(infinite) > 0 && !has_nan) return UNUSUAL;
    if (has_nan || k <= 0 || k >= (double)real) return FINE;
    const Kept *kept = &work->finder.kept;
    find_best(work->s, FLOAT32, n, (int64_t)k, &work->finder, NULL, 0);
    tilt->reference = (double)score_of_key(threshold_key(kept->score, kept->count, (int64_t)k, 0, 1)); /* the k-th best */
    odds_of(work, tilt->reference);
    tilt->shift = find_shift(work->odds, n, (double)real, k);
    return FINE;
}

/* p in the place of the odds, p and q = 1 - p in float32, and the variance of the number that is drawn. */
static double probabilities(SubsetWork *work, double shift) {
    int64_t whole = (work->rows->n + W - 1) / W * W;
    double factor = exp(shift);
    vd variance = {0};
    for (int64_t i = 0; i < whole; i++) {
        double odds = factor * work->odds[i], p = 1 / (1 + odds);
        work->odds[i] = p;
        work->p[i] = (float)p;
        work->q[i] = (float)(odds * p);
    }
    for (int64_t i = 0; i < whole; i += D) {
        vd p = *(const vd *)(work->odds + i);
        variance += p - p * p;
    }
    return total(variance);
}

/* ---- frequencies ---- */

enum { AT_ONCE = 4 }; /* frequencies */

/* The products over a row of 1 - p + p e^(i w), for some frequencies. */
static void products(const double *p, int64_t n, Frequency *frequencies) {
    vd real[AT_ONCE], imaginary[AT_ONCE], less[AT_ONCE], turned[AT_ONCE];
    for (int j = 0; j < AT_ONCE; j++) {
        real[j] = splat(1), imaginary[j] = splat(0);
        less[j] = splat(frequencies[j].cosine - 1), turned[j] = splat(frequencies[j].sine);
    }
    for (int64_t i = 0; i < n; i += D) {
        vd at = *(const vd *)(p + i);
        for (int j = 0; j < AT_ONCE; j++) {
            vd x = 1 + at * less[j], y = at * turned[j], before = real[j];
            real[j] = before * x - imaginary[j] * y;
            imaginary[j] = before * y + imaginary[j] * x;
        }
    }
    for (int j = 0; j < AT_ONCE; j++) {
        double x = 1, y = 0;
        for (int l = 0; l < D; l++) {
            double before = x;
            x = before * real[j][l] - y * imaginary[j][l];
            y = before * imaginary[j][l] + y * real[j][l];
        }
        frequencies[j].real = x, frequencies[j].imaginary = y;
    }
}

/* The frequencies of a row and their weights, whose real parts sum to 1. By Bernstein's inequality, the number that is drawn
   differs from its mean by N or more with a probability of 2 e^-24. */
static void weigh_frequencies(SubsetWork *work, double k, double variance) {
    int64_t n = work->rows->n;
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

/* What the sums over the frequencies are made of, for W entries. |1 - p + p e^(i w)|^2 comes without a difference:
   d = (p - q)^2 + 4 p q cos^2 (w / 2) */
typedef struct {
    vf p, q, pq, apart;
} Entries;
INLINE Entries entries_at(const SubsetWork *work, int64_t i) {
    vf p = load_f32(work->p + i), q = load_f32(work->q + i);
    return (Entries){p, q, p * q, (p - q) * (p - q)};
}
INLINE vf inverse(Entries e, const Frequency *f) { return 1 / (e.apart + 4 * e.pq * f->closeness); }

/* ---- masks ---- */

INLINE void pass_subset(const SubsetWork *work, void *out, const int dtype) {
    for (int64_t i = 0; i < work->rows->n; i += W) {
        Entries e = entries_at(work, i);
        vf of_q = {0}, of_p = {0};
        for (int64_t l = 0; l < work->count; l++) {
            const Frequency *f = work->frequencies + l;
            vf r = inverse(e, f);
            of_q += f->of_q * r, of_p += f->of_p * r;
        }
        vf y = smallerf(largerf(e.p + e.pq * (e.q * of_q + e.p * of_p), splatf(0)), splatf(1));
        store_some(out, dtype, i, work->rows->n, onlyf(load_f32(work->s + i) > -INFINITY, y));
    }
}

static int subset_rows(void *given, int64_t first, int64_t last) {
    SubsetWork *work = given;
    const Rows *rows = work->rows;
    for (int64_t r = first; r < last; r++) {
        void *out = out_row(rows->out, rows->dtype, r * rows->n);
        Tilt *tilt = (Tilt *)rows->saved + r;
        int status = tilt_of_row(work, r, tilt);
        if (status != FINE) return status;
        if (!isfinite(tilt->shift)) {
            write_trivial_mask(row_of(rows->scores, rows->dtype, r * rows->stride), out, rows->n, rows->dtype, tilt->shift);
            continue;
        }
        weigh_frequencies(work, tilt->k, probabilities(work, tilt->shift));
        for (int64_t l = 0; l < work->count; l++)
            set_shares(work->frequencies + l, work->frequencies[l].real, work->frequencies[l].imaginary);
        FOR_DTYPE(rows->dtype, pass_subset(work, out, DTYPE));
    }
    return FINE;
}

/* ---- gradients ---- */

/* The gradients that came in, 0 for padding and behind the row, into work->incoming; their mean with the weights p q. */
static float read_incoming(const SubsetWork *work, int64_t r) {
    const Rows *rows = work->rows;
    double sum = 0, total = 0;
    widen_row(row_of(rows->incoming, rows->dtype, r * rows->incoming_stride), rows->dtype, rows->n, work->incoming);
    for (int64_t i = 0; i < rows->n;) {
        vf some = {0}, weights = {0};
        for (int64_t end = i + FEW < rows->n ? i + FEW : rows->n; i < end; i += W) {
            vf g = onlyf(load_f32(work->s + i) > -INFINITY, load_f32(work->incoming + i)), pq = entries_at(work, i).pq;
            store_f32(work->incoming + i, g);
            some += pq * g, weights += pq;
        }
        sum += total_of(some), total += total_of(weights);
    }
    return total > 0 ? (float)(sum / total) : 0;
}

/* For each frequency the sum of (u_c - p_c) g_c; g less its mean, which changes nothing and saves digits. Then sets the shares to
   those of weights times what this differs from its own mean. */
static void weigh_gradients(SubsetWork *work, float mean) {
    const int64_t most = 64 * W, n = work->rows->n; /* what is read again for each frequency stays in the first cache */
    Frequency *f = work->frequencies;
    double *of_q = work->odds, *of_p = of_q + work->count; /* p is no longer needed there */
    for (int64_t l = 0; l < work->count; l++) of_q[l] = of_p[l] = 0;
    for (int64_t start = 0; start < n; start += most) {
        int64_t end = start + most < n ? start + most : n;
        for (int64_t l = 0; l < work->count; l++) {
            vf some_q = {0}, some_p = {0};
            for (int64_t i = start; i < end; i += W) {
                Entries e = entries_at(work, i);
                vf r = (load_f32(work->incoming + i) - mean) * e.pq * inverse(e, f + l);
                some_q += e.q * r, some_p += e.p * r;
            }
            of_q[l] += total_of(some_q), of_p[l] += total_of(some_p);
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
INLINE double pass_subset_gradient(const SubsetWork *work, void *out, const int dtype, const Tilt *tilt, float mean) {
    const int64_t n = work->rows->n;
    const float reference = (float)tilt->reference, shift = (float)tilt->shift, rate = (float)work->rows->rate;
    double by_rate = 0;
    for (int64_t i = 0; i < n;) {
        vf some = {0};
        for (int64_t end = i + FEW < n ? i + FEW : n; i < end; i += W) {
            Entries e = entries_at(work, i);
            vf of_q = {0}, of_p = {0}, square_q = {0}, square = {0}, square_p = {0};
            for (int64_t l = 0; l < work->count; l++) {
                const Frequency *f = work->frequencies + l;
                vf r = inverse(e, f);
                of_q += f->of_q * r, of_p += f->of_p * r;
                r *= r;
                square_q += f->square_q * r, square += f->square * r, square_p += f->square_p * r;
            }
            vf own = (float)work->constant + e.q * e.q * square_q + e.pq * square + e.p * e.p * square_p;
            vf x = (load_f32(work->s + i) - reference) * rate - shift;
            vf y = rate * e.pq * (e.q * of_q + e.p * of_p + own * (load_f32(work->incoming + i) - mean));
            y = onlyf(~(vi)(e.pq == 0), y); /* so far away, and padding */
            some += onlyf(~(vi)(e.pq == 0), y * x);
            store_some(out, dtype, i, n, y);
        }
        by_rate += total_of(some);
    }
    return by_rate;
}

static int subset_backward_rows(void *given, int64_t first, int64_t last) {
    SubsetWork *work = given;
    const Rows *rows = work->rows;
    for (int64_t r = first; r < last; r++) {
        void *out = out_row(rows->out, rows->dtype, r * rows->n);
        const Tilt *tilt = (const Tilt *)rows->saved + r;
        double by_rate = 0;
        widen_row(row_of(rows->scores, rows->dtype, r * rows->stride), rows->dtype, rows->n, work->s);
        if (isfinite(tilt->shift)) {
            odds_of(work, tilt->reference);
            weigh_frequencies(work, tilt->k, probabilities(work, tilt->shift));
            float mean = read_incoming(work, r);
            weigh_gradients(work, mean);
            FOR_DTYPE(rows->dtype, by_rate = pass_subset_gradient(work, out, DTYPE, tilt, mean));
        } else {
            by_rate = isinf(tilt->shift) ? 0 : NAN;
            write_trivial_mask(row_of(rows->scores, rows->dtype, r * rows->stride), out, rows->n, rows->dtype, isinf(tilt->shift) ? INFINITY : NAN);
        }
        if (rows->grad_rate) rows->grad_rate[r] = by_rate / rows->rate;
    }
    return FINE;
}

/* ---- draws ---- */

/* Eight generators of random numbers side by side (xoshiro256++), whatever the vectors of the machine. */
typedef uint64_t Random __attribute__((vector_size(64)));
enum { NUMBERS = 16 }; /* of 32 bits, at a time */

static void seed_random(uint64_t seed, Random *state) {
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < 8; l++) { /* splitmix64 */
            uint64_t z = seed += 0x9e3779b97f4a7c15;
            z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
            z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
            state[i][l] = z ^ (z >> 31);
        }
}
INLINE void next_random(Random *s, uint32_t *numbers) {
    Random sum = s[0] + s[3], result = (sum << 23 | sum >> 41) + s[0], shifted = s[1] << 17;
    s[2] ^= s[0], s[3] ^= s[1], s[1] ^= s[2], s[0] ^= s[3], s[2] ^= shifted;
    s[3] = s[3] << 45 | s[3] >> 19;
    memcpy(numbers, &result, sizeof result);
}

/* Draws each entry by itself, to 2^-32 of a probability, again and again until k are drawn: about once in 2.5 sqrt(variance)
   times. */
static int draw_row(SubsetWork *work, int64_t k, uint64_t seed) {
    enum { MOST_DRAWS = 100000 };
    int64_t n = work->rows->n;
    Random state[4];
    seed_random(seed, state);
    for (int64_t i = 0; i < n + NUMBERS; i++) {
        double limit = i < n ? work->odds[i] * 0x1p32 : 0;
        work->limits[i] = limit < 0x1p32 ? (uint32_t)limit : UINT32_MAX;
    }
    for (int draws = 0; draws < MOST_DRAWS; draws++) {
        int64_t count = 0;
        for (int64_t i = 0; i < n; i += NUMBERS) {
            uint32_t numbers[NUMBERS], some = 0;
            next_random(state, numbers);
            for (int l = 0; l < NUMBERS; l++) some += work->drawn[i + l] = numbers[l] < work->limits[i + l];
            count += some;
        }
        if (count == k) return FINE;
    }
    return UNUSUAL;
}

static int draw_rows(void *given, int64_t first, int64_t last) {
    SubsetWork *work = given;
    const Rows *rows = work->rows;
    for (int64_t r = first; r < last; r++) {
        void *out = out_row(rows->out, rows->dtype, r * rows->n);
        Tilt tilt;
        int status = tilt_of_row(work, r, &tilt);
        if (status == FINE && !isfinite(tilt.shift)) {
            write_trivial_mask(row_of(rows->scores, rows->dtype, r * rows->stride), out, rows->n, rows->dtype, tilt.shift);
            continue;
        }
        if (status == FINE) {
            probabilities(work, tilt.shift);
            status = draw_row(work, (int64_t)rows->k, rows->seeds[r]);
        }
        if (status != FINE) return status;
        FOR_DTYPE(rows->dtype, for (int64_t i = 0; i < rows->n; i++) store_one(out, DTYPE, i, (float)work->drawn[i]));
    }
    return FINE;
}

/* ---- calls ---- */

static int mask(const void *call, int64_t first, int64_t last) {
    const Rows *rows = call;
    if (rows->operator != KSUBSET) return threshold_mask(rows, first, last);
    return with_memory(lay_out_subset, subset_rows, &(SubsetWork){.rows = rows}, first, last);
}

static int mask_backward(const void *call, int64_t first, int64_t last) {
    const Rows *rows = call;
    if (rows->operator != KSUBSET) return with_memory(lay_out_slopes, slope_rows, &(SlopeWork){.rows = rows}, first, last);
    return with_memory(lay_out_subset, subset_backward_rows, &(SubsetWork){.rows = rows}, first, last);
}

static int draw(const void *call, int64_t first, int64_t last) {
    return with_memory(lay_out_subset, draw_rows, &(SubsetWork){.rows = call}, first, last);
}
