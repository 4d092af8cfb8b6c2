/* The smooth top-k loss. With rate = 1 / (k temperature) and the k-th best score s of the classes that are not the target, a
   class enters it as exp(rate (score - s)): z for the k best, of which each is handled by itself, and x for the rest, of which
   only the sums of x, x^2, …, x^k are needed (Newton's identities make elementary symmetric polynomials of them). The formulae
   are those of anyk/baselines.py. */

/* Adds up x, x^2, …, x^k over the scores below `last`, x = exp(rate (score - last)); returns how many scores equal `last`. */
INLINE int64_t pass_powers(const void *row, const int dtype, int64_t n, const int k, float last, float rate, double *sums) {
    vf top = splatf(last);
    int64_t equal = 0;
    for (int64_t i = 0; i < n;) {
        vf some[MOST_K];
        vi equals = {0};
        for (int j = 0; j < k; j++) some[j] = (vf){0};
        for (int64_t end = i + FEW < n ? i + FEW : n; i < end; i += W) {
            vf s = load_some(row, dtype, i, n);
            equals -= (vi)(s == top);
            vf x = onlyf(s < top, exponentialf((s - top) * rate)), power = x;
            for (int j = 0; j < k; j++) {
                some[j] += power;
                power *= x;
            }
        }
        for (int j = 0; j < k; j++) sums[j] += total_of(some[j]);
        equal += sum_of(equals);
    }
    return equal;
}

/* k is a constant, too: the sums stay in registers. */
static int64_t powers(const void *row, int dtype, int64_t n, int k, float last, float rate, double *sums) {
    int64_t equal = 0;
    switch (k) {
    case 1: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 1, last, rate, sums)); break;
    case 2: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 2, last, rate, sums)); break;
    case 3: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 3, last, rate, sums)); break;
    case 4: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 4, last, rate, sums)); break;
    case 5: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 5, last, rate, sums)); break;
    case 6: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 6, last, rate, sums)); break;
    case 7: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 7, last, rate, sums)); break;
    default: FOR_DTYPE(dtype, equal = pass_powers(row, DTYPE, n, 8, last, rate, sums));
    }
    return equal;
}

/* The gradient by the classes that are no candidates: a polynomial of x. */
INLINE void write_powers(const void *scores, const int dtype, void *out, int64_t n, int k, const float *rest, float rate,
                         float factor) {
    int none = 1;
    for (int j = 1; j <= k; j++) none &= rest[j] == 0;
    if (none) {
        memset(out, 0, (size_t)(n * item_size(dtype)));
        return;
    }
    for (int64_t i = 0; i < n; i += W) {
        vf x = exponentialf((load_some(scores, dtype, i, n) - rest[0]) * rate), sum = {0};
        for (int j = k; j > 0; j--) sum = (sum + factor * rest[j]) * x;
        store_some(out, dtype, i, n, sum);
    }
}

/* The elementary symmetric polynomials e[0] … e[k] of k factors, without one of them (-1: of all). */
static void polynomials(const double *factors, int k, int without, double *e) {
    e[0] = 1;
    for (int i = 1; i <= k; i++) e[i] = 0;
    for (int f = 0; f < k; f++)
        for (int i = k; i > 0 && f != without; i--) e[i] += factors[f] * e[i - 1];
}

/* The loss of a row from the best scores of the others (`found` of them, descending, at least k), the target's score, and the
   power sums of the rest; with its gradient by the k best others, by the target, and by each of the power sums over j. */
static double smooth_loss(const Spec *spec, const float *first, int64_t found, float own, const double *sums, double *by_first,
                          double *by_own, double *by_powers) {
    int k = (int)spec->k;
    double t = spec->scale, rate = 1 / ((double)k * t), last = (double)first[k - 1];
    for (int i = 0; i < k; i++) by_first[i] = by_powers[i] = 0;
    *by_own = 0;
    double lead = spec->margin + (last - (double)own) / k;
    /* the k-th and the (k+1)-th of all scores, the target among them */
    double next = found > k ? (double)first[k] : -INFINITY, before = k > 1 ? (double)first[k - 2] : INFINITY;
    double kth = (double)own > last ? fmin((double)own, before) : last;
    double after = (double)own > last ? last : fmax((double)own, next);
    if (kth - after >= spec->gap) {
        if (lead >= 0) by_first[k - 1] = 1.0 / k, *by_own = -1.0 / k;
        return fmax(lead, 0);
    }
    double z[MOST_K], of_z[MOST_K + 1], of_x[MOST_K + 1], without[MOST_K + 1];
    for (int i = 0; i < k; i++) z[i] = exponential(splat(rate * (last - (double)first[i])))[0];
    polynomials(z, k, -1, of_z);
    of_x[0] = 1;
    for (int i = 1; i <= k; i++) {
        double sum = 0;
        for (int j = 1; j <= i; j++) sum += (j % 2 ? sums[j - 1] : -sums[j - 1]) * of_x[i - j];
        of_x[i] = sum / i;
    }
    double numerator = 0, denominator = 0;
    for (int i = 0; i <= k; i++) numerator += of_z[i] * of_x[i];
    for (int i = 0; i < k; i++) denominator += of_z[i + 1] * of_x[i];
    double u = lead / t + logarithm(splat(numerator / denominator))[0];
    double e = exponential(splat(-fabs(u)))[0];
    double loss = t * (fmax(u, 0) + logarithm(splat(1 + e))[0]), share = (u > 0 ? 1 : e) / (1 + e);
    *by_own = -share / k;
    for (int i = 0; i < k; i++) {
        polynomials(z, k, i, without);
        double of_numerator = 0, of_denominator = 0;
        for (int j = 1; j <= k; j++) of_numerator += without[j - 1] * of_x[j];
        for (int j = 0; j < k; j++) of_denominator += without[j] * of_x[j];
        by_first[i] = -share / k * z[i] * (of_numerator / numerator - of_denominator / denominator);
    }
    for (int j = 1; j <= k; j++) {
        double sum = 0;
        for (int i = j; i <= k; i++) sum += (of_z[i] / numerator - (i < k ? of_z[i + 1] / denominator : 0)) * of_x[i - j];
        by_powers[j - 1] = share / k * (j % 2 ? sum : -sum);
    }
    return loss;
}

typedef struct {
    const Spec *spec;
    const Batch *batch;
    Finder finder;
} SmoothWork;

static int64_t smooth_wanted(const Spec *spec) { return spec->k + 2 < spec->n ? spec->k + 2 : spec->n; }

static void lay_out_smooth(void *given, Arena *arena) {
    SmoothWork *work = given;
    lay_out_finder(&work->finder, work->spec->n, smooth_wanted(work->spec), arena);
}

/* The power sums of a row without those of the k best of the others and of the target. */
static void sum_powers(const Spec *spec, const void *scores, int dtype, const float *first, float own, double *sums) {
    int64_t k = spec->k;
    float kth = first[k - 1], rate = (float)(1 / ((double)k * spec->scale));
    int64_t equal = powers(scores, dtype, spec->n, (int)k, kth, rate, sums) - (own == kth);
    for (int64_t i = 0; i < k; i++) equal -= first[i] == kth;
    double x = own < kth ? (double)exponentialf(splatf((own - kth) * rate))[0] : 0, power = x;
    for (int64_t j = 0; j < k; j++, power *= x) sums[j] = fmax(sums[j] - power, 0) + (double)equal;
}

static int smooth_rows(void *given, int64_t first, int64_t last) {
    SmoothWork *work = given;
    const Spec *spec = work->spec;
    const Batch *batch = work->batch;
    int64_t k = spec->k;
    const Kept *kept = &work->finder.kept;
    for (int64_t row = first; row < last; row++) {
        int64_t target = batch->target[row];
        const void *scores = row_of(batch->scores, batch->dtype, row * batch->stride);
        double loss = 0, sums[MOST_K] = {0}, by_first[MOST_K] = {0}, by_own = 0, by_powers[MOST_K] = {0}, weight = 1;
        int counts = target != batch->ignore_index;
        if (counts) {
            float own = score_at(scores, batch->dtype, target);
            if (own == -INFINITY) return PADDED_TARGET;
            float maximum = find_best(scores, batch->dtype, spec->n, smooth_wanted(spec), &work->finder, NULL, 0);
            if (!(maximum < INFINITY)) { /* an overflow must show */
                loss = by_own = NAN;
                for (int64_t i = 0; i < k; i++) by_first[i] = by_powers[i] = NAN, kept->score[i] = 0, kept->class[i] = (int32_t)(i + (i >= target));
            } else {
                sort_kept(&work->finder);
                remove_target(&work->finder.kept, (int32_t)target);
                if (kept->score[k - 1] > -INFINITY) { /* else no subset leaves the target out: the loss is 0 */
                    sum_powers(spec, scores, batch->dtype, kept->score, own, sums);
                    loss = smooth_loss(spec, kept->score, kept->count, own, sums, by_first, &by_own, by_powers);
                }
            }
            weight = batch->weight ? (double)batch->weight[target] : 1;
        }
        batch->loss[row] = (float)(weight * loss);
        if (!batch->gradient) continue;
        float *gradient = batch->gradient + row * (k + 1), *rest = batch->rest + row * (k + 1);
        int32_t *classes = batch->classes + row * (k + 1);
        rest[0] = counts ? kept->score[k - 1] : 0;
        for (int64_t i = 0; i < k; i++) {
            gradient[i] = (float)(weight * by_first[i]);
            classes[i] = counts ? kept->class[i] : (int32_t)i;
            rest[1 + i] = (float)(weight * by_powers[i]);
        }
        gradient[k] = (float)(weight * by_own);
        classes[k] = counts ? (int32_t)target : (int32_t)k;
    }
    return FINE;
}
