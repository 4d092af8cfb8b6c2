/* The smooth top-k loss. With rate = 1 / (k temperature) and the k-th best score s of the classes that are not the target, a
   class enters it as exp(rate (score - s)): z for the k best, of which each is handled by itself, and x for the rest, of which
   only the sums of x, x^2, …, x^k are needed (Newton's identities make elementary symmetric polynomials of them). The formulae
   are those of anyk/baselines.py. */

/* The elementary symmetric polynomials e[0] … e[k] of k factors, without one of them (-1: of all). */
static void polynomials(const double *factors, int k, int without, double *e) {
    e[0] = 1;
    for (int i = 1; i <= k; i++) e[i] = 0;
    for (int f = 0; f < k; f++)
        if (f != without)
            for (int i = k; i > 0; i--) e[i] += factors[f] * e[i - 1];
}

/* The loss of a row from the best scores of the others (`found` of them, descending, at least k), the target's score, and the
   power sums of the rest; with its gradient by the k best others, by the target, and by each of the power sums over j. */
static double smooth_loss(const SmoothSpec *spec, const float *first, int64_t found, float own, const double *sums,
                          double *by_first, double *by_own, double *by_powers) {
    int k = (int)spec->k;
    double t = spec->temperature, rate = 1 / ((double)k * t), last = (double)first[k - 1];
    for (int i = 0; i < k; i++) by_first[i] = by_powers[i] = 0;
    *by_own = 0;
    double lead = spec->margin + (last - (double)own) / k;
    /* the k-th and the (k+1)-th of all scores, the target among them */
    double next = found > k ? (double)first[k] : -INFINITY, before = k > 1 ? (double)first[k - 2] : INFINITY;
    double kth = (double)own > last ? ((double)own < before ? (double)own : before) : last;
    double after = (double)own > last ? last : (double)own > next ? (double)own : next;
    if (kth - after >= spec->gap) {
        if (lead >= 0) by_first[k - 1] = 1.0 / k, *by_own = -1.0 / k;
        return lead > 0 ? lead : 0;
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
    double e = exponential(splat(u > 0 ? -u : u))[0];
    double loss = t * ((u > 0 ? u : 0) + logarithm(splat(1 + e))[0]), share = (u > 0 ? 1 : e) / (1 + e);
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
        for (int i = j; i <= k; i++)
            sum += (of_z[i] / numerator - (i < k ? of_z[i + 1] / denominator : 0)) * of_x[i - j];
        by_powers[j - 1] = share / k * (j % 2 ? sum : -sum);
    }
    return loss;
}

static int smooth_rows(const SmoothSpec *spec, const Batch *batch, Finder *finder, int64_t first, int64_t last) {
    int64_t n = spec->n, k = spec->k, wanted = k + 2 < n ? k + 2 : n;
    Kept kept = finder->kept;
    double rate = 1 / ((double)k * spec->temperature);
    for (int64_t row = first; row < last; row++) {
        float *gradient = batch->gradient ? batch->gradient + row * (k + 1) : NULL;
        int32_t *classes = batch->gradient ? batch->classes + row * (k + 1) : NULL;
        float *rest = batch->gradient ? batch->rest + row * (k + 1) : NULL;
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
        find_best(scores, batch->dtype, n, wanted, 0, 0, &kept, finder->widened, &unused);
        if (kept.has_nan || own != own || own == INFINITY) return STRANGE;
        sort_kept(&kept, finder->items, finder->buffer);
        int64_t found = 0;
        for (int64_t i = 0; i < kept.count; i++)
            if (kept.class[i] != target) kept.score[found] = kept.score[i], kept.class[found++] = kept.class[i];
        float kth = kept.score[k - 1];
        if (kept.score[0] == INFINITY) return STRANGE; /* an overflow must show */
        if (kth == -INFINITY) return TOO_FEW; /* or just enough: the plain code knows */
        double sums[MOST_K] = {0}, by_first[MOST_K], by_own, by_powers[MOST_K];
        int64_t equal = BY_DTYPE(batch->dtype, powers, scores, n, (int)k, kth, (float)rate, sums);
        /* Without the k best and the target: they are not of the rest. */
        for (int64_t i = 0; i < k; i++) equal -= kept.score[i] == kth;
        equal -= own == kth;
        double x = own < kth ? (double)exponentialf(splatf((own - kth) * (float)rate))[0] : 0, power = x;
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
