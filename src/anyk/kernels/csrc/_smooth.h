/* The smooth top-k loss of a row. */

/* E_0 … E_k of the k factors but one (-1: all of them). */
static void polynomials(const double *factors, int k, int without, double *e) {
    e[0] = 1;
    for (int i = 1; i <= k; i++) e[i] = 0;
    for (int f = 0; f < k; f++)
        if (f != without)
            for (int i = k; i > 0; i--) e[i] += factors[f] * e[i - 1];
}

/* The loss of a row, and the slopes by the first k others, by the target, and by x^1 … x^k of the rest. The formulae are those
   of anyk/baselines.py. */
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
    for (int i = 0; i < k; i++) z[i] = exponential(all(rate * (last - (double)first[i])))[0];
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
    double u = lead / t + logarithm(all(numerator / denominator))[0];
    double e = exponential(all(u > 0 ? -u : u))[0];
    double loss = t * ((u > 0 ? u : 0) + logarithm(all(1 + e))[0]), share = (u > 0 ? 1 : e) / (1 + e);
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
