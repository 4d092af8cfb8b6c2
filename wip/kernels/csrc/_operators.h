/* The operators: log T of the target, LANES rows side by side, in double precision.

   Each operator is one function. Its forward pass computes log T of the target from x, and keeps in the scratch memory what its
   backward pass needs: that adds the gradient by x, given the one by log T. A quantity of all rows is NV vectors; where an
   array is said to be (k), there are k times as many. */

/* A block of LANES rows. */
typedef struct {
    const Spec *spec;
    int64_t m, k;
    vd *x;                  /* (m) the candidates' scores less the target's, over the temperature, in the operator's order */
    vd *grad_x;             /* (m) the gradient by x */
    int32_t *position;      /* (lanes) where the target stands in x */
    int32_t *real_count;    /* (lanes) how many candidates are not padding */
    int32_t *rivals;        /* (k, lanes) networks: where in x the best, second best, … of the others stand */
    vd *log_t, *grad_log_t; /* (k) */
    int has_padding;        /* in any of the rows */
    Arena scratch;          /* what the operator keeps from its forward to its backward pass */
} Block;
enum { PADDED_RIVAL = -1, NO_RIVAL = -2 }; /* instead of a rival's position: it is padding; there are fewer others */

/* How an operator is called. Each lays its scratch memory out at its start, in the same way whenever it is called. */
typedef enum { LAY_OUT, FORWARD, BACKWARD } Pass;

static vd *take_quantities(Block *b, int64_t count) { return take(&b->scratch, count * LANES * 8); }

/* One vector of integers of the rows. */
INLINE vl lanes_of(const int32_t *numbers, int v) {
    vl result;
    for (int l = 0; l < D; l++) result[l] = numbers[v * D + l];
    return result;
}

/* log(e^a + e^b) */
INLINE vd log_of_sum(vd a, vd b) {
    vd maximum = larger(a, b), minimum = smaller(a, b);
    return maximum + logarithm(1 + exponential(minimum - maximum));
}

/* LapSum: x descending, padding at its end far below */
static void lapsum(Block *b, Pass pass) {
    int64_t m = b->m, k = b->k, first = 2 * k + 1 < m ? 2 * k + 1 : m;
    vd *better = take_quantities(b, m), *worse = take_quantities(b, m), *close = take_quantities(b, m);
    vd *threshold = take_quantities(b, k), *margin = take_quantities(b, k);
    if (pass == LAY_OUT) return;
    const vd *x = b->x;
    const double none = -1e37;
    if (pass == FORWARD) {
        EACH {
            vl real_count = lanes_of(b->real_count, v);
            for (int64_t i = 0; i + 1 < m; i++)
                close[i * NV + v] = only(i + 1 < real_count, exponential(x[(i + 1) * NV + v] - x[i * NV + v]));
            better[v] = splat(1);
            for (int64_t i = 1; i < first; i++) better[i * NV + v] = 1 + better[(i - 1) * NV + v] * close[(i - 1) * NV + v];
            worse[(m - 1) * NV + v] = splat(1);
            for (int64_t i = m - 1; i-- > 0;) worse[i * NV + v] = 1 + worse[(i + 1) * NV + v] * close[i * NV + v];
            for (int64_t j = 1; j <= k; j++) {
                vd rank = splat((double)j), above = {0}, a = splat(1), at_a = {0}, bb = worse[v], at_b = x[v];
                vd has_b = splat(1);
                vd maximum = __builtin_convertvector(real_count - 1, vd);
                rank = larger(smaller(rank, maximum), splat(1));
                for (int64_t i = 0; i < first; i++) {
                    vd passed = (double)(i + 1) + (worse[i * NV + v] - 1 - better[i * NV + v]) / 2;
                    vl here = (passed <= rank) & (i < real_count);
                    above += only(here, splat(1));
                    a = pick(here, better[i * NV + v], a);
                    at_a = pick(here, x[i * NV + v], at_a);
                    if (i + 1 < first) {
                        bb = pick(here, worse[(i + 1) * NV + v], bb);
                        at_b = pick(here, x[(i + 1) * NV + v], at_b);
                        has_b = pick(here, only(i + 1 < real_count, splat(1)), has_b);
                    } else
                        has_b = pick(here, splat(0), has_b);
                }
                vd log_a = pick(above > 0, logarithm(a) - at_a, splat(none));
                vd log_b = pick(has_b > 0, logarithm(bb) + at_b, splat(none));
                vd missing = rank - above, size = larger(absolute(missing), splat(1));
                vd log_root = logarithm(size + square_root(size * size + exponential(log_a + log_b)));
                vd result = pick(missing > 0, log_b - log_root, log_root - log_a);
                result = pick(missing == 0, (log_b - log_a) / 2, result);
                result = larger(smaller(result, splat(1e36)), splat(-1e36));
                threshold[(j - 1) * NV + v] = result;
                vd ahead = -result; /* the target's x is 0 */
                vd e = 0.5 * exponential(-larger(ahead, splat(0)));
                vl last = real_count == j;
                margin[(j - 1) * NV + v] = only(~last, pick(ahead < 0, splat(1), e / (1 - e)));
                b->log_t[(j - 1) * NV + v] =
                    only(~last, pick(ahead < 0, ahead - M_LN2, logarithm(1 - e)));
            }
        }
        return;
    }
    /* From x_2k on (the thresholds lie above it) the weights of all thresholds are e^(x_i - x_2k) times a
       factor. */
    int64_t far = first < m ? first - 1 : m;
    EACH {
        vl real_count = lanes_of(b->real_count, v), position = lanes_of(b->position, v);
        vd far_sum = {0}, far_share = {0}, grad_target = {0};
        for (int64_t i = far; i < m; i++)
            far_sum += worse[i * NV + v] = only(i < real_count, exponential(x[i * NV + v] - x[far * NV + v]));
        for (int64_t j = 0; j < k; j++) {
            vd g = b->grad_log_t[j * NV + v] * margin[j * NV + v], at = threshold[j * NV + v];
            vd nearest = splat(1e300), sum = {0}, to_far = {0};
            for (int64_t i = 0; i < far || (i == far && far < m); i++)
                nearest = smaller(nearest, pick(i < real_count, absolute(x[i * NV + v] - at), splat(1e300)));
            for (int64_t i = 0; i < far; i++) {
                vd weight = only(i < real_count, exponential(nearest - absolute(x[i * NV + v] - at)));
                close[i * NV + v] = weight;
                sum += weight;
            }
            if (far < m) to_far = only(far < real_count, exponential(nearest - absolute(x[far * NV + v] - at)));
            vd share = g / (sum + to_far * far_sum);
            far_share += share * to_far;
            grad_target += g;
            for (int64_t i = 0; i < far; i++) b->grad_x[i * NV + v] -= share * close[i * NV + v];
        }
        for (int64_t i = far; i < m; i++) b->grad_x[i * NV + v] -= far_share * worse[i * NV + v];
        for (int64_t i = 0; i < m; i++) b->grad_x[i * NV + v] += only(position == i, grad_target);
    }
}

/* KSubset: x are the others, descending, then the target */
static void ksubset(Block *b, Pass pass) {
    int64_t others = b->m - 1, k = b->k, used = k < others ? k : others;
    vd *grown = take_quantities(b, k * b->m); /* (k, m): F_j of the first i + 1 others */
    vd *weight = take_quantities(b, b->m);    /* e^(x_i - x_q), q the last used, from there on */
    vd *direct = take_quantities(b, b->m);    /* the gradient by what the round before has grown */
    vd *pairs = take_quantities(b, k * k);    /* (k, k) e^(x_i - x_j), j <= i < q; (j, q): e^(x_q - x_j) */
    vd *slope = take_quantities(b, k);        /* of log T by the ratio */
    if (pass == LAY_OUT) return;
    const vd *x = b->x;
    if (pass == FORWARD) {
        EACH {
            vl real_count = lanes_of(b->real_count, v) - 1; /* of the others */
            int64_t q = used - 1;
            for (int64_t i = q < 0 ? 0 : q; i < others; i++)
                weight[i * NV + v] = only(i < real_count, exponential(x[i * NV + v] - x[q * NV + v]));
            vd before = splat(1);
            for (int64_t j = 0; j < used; j++) {
                for (int64_t i = j; i <= q; i++)
                    pairs[(j * k + i) * NV + v] = only(i < real_count, exponential(x[i * NV + v] - x[j * NV + v]));
                vd step = pairs[(j * k + q) * NV + v], total = {0};
                vd *now = grown + j * b->m * NV + v, *last = now - b->m * NV;
                for (int64_t i = j; i < q; i++) {
                    vd w = pairs[(j * k + i) * NV + v];
                    total += j ? w * last[(i - 1) * NV] : w;
                    now[i * NV] = total;
                }
                for (int64_t i = q; i < others; i++) {
                    vd w = step * weight[i * NV + v];
                    total += j ? w * last[(i - 1) * NV] : w;
                    now[i * NV] = total;
                }
                vl exists = j < real_count;
                total = pick(exists, total, splat(1));
                vd ratio = x[j * NV + v] + logarithm(total / before);
                before = total;
                vd e = exponential(-absolute(ratio));
                b->log_t[j * NV + v] = only(exists, smaller(-ratio, splat(0)) - logarithm(1 + e));
                slope[j * NV + v] = only(exists, -pick(ratio > 0, splat(1), e) / (1 + e));
            }
            for (int64_t j = used < 0 ? 0 : used; j < k; j++) b->log_t[j * NV + v] = (vd){0};
        }
        return;
    }
    for (int64_t i = 0; i < others * NV; i++) direct[i] = (vd){0};
    EACH {
        vl real_count = lanes_of(b->real_count, v) - 1;
        int64_t q = used - 1;
        vd grad_target = {0}, next = {0};
        for (int64_t j = used; j-- > 0;) {
            vd r = only(j < real_count, b->grad_log_t[j * NV + v] * slope[j * NV + v]); /* by the ratio */
            grad_target -= r;
            vd *now = grown + j * b->m * NV + v, *last = now - b->m * NV;
            vd step = pairs[(j * k + q) * NV + v], own = {0};
            vd running = (r - next) / larger(now[(others - 1) * NV], splat(1));
            next = r;
            vd given = direct[(others - 1) * NV + v]; /* by the round after this one, which took what is one place before */
            direct[(others - 1) * NV + v] = (vd){0};
            for (int64_t i = others; i-- > j;) {
                running += given;
                vd w = running * (i < q ? pairs[(j * k + i) * NV + v] : step * weight[i * NV + v]);
                if (i) {
                    given = direct[(i - 1) * NV + v];
                    direct[(i - 1) * NV + v] = w;
                }
                if (j) w *= last[(i - 1) * NV];
                b->grad_x[i * NV + v] += w;
                own += w;
            }
            b->grad_x[j * NV + v] += r - own;
        }
        b->grad_x[others * NV + v] += grad_target;
    }
}

/* log T as the logarithm of the running sums of e^column; backward: replaces the column by the gradient by it. */
INLINE void log_sums(Block *b, vd *column, Pass pass, int v) {
    if (pass == FORWARD) {
        vd sum = column[v];
        b->log_t[v] = sum;
        for (int64_t r = 1; r < b->k; r++) b->log_t[r * NV + v] = sum = log_of_sum(sum, column[r * NV + v]);
        return;
    }
    /* sum over j >= r of g_j e^(column_r - log T_j), with a common factor taken out of the running sum to keep it in range */
    vd sum = {0};
    for (int64_t r = b->k; r-- > 0;) {
        vd log_t = b->log_t[r * NV + v];
        if (r + 1 < b->k) sum *= exponential(log_t - b->log_t[(r + 1) * NV + v]);
        sum += b->grad_log_t[r * NV + v];
        column[r * NV + v] = sum * exponential(column[r * NV + v] - log_t);
    }
}

/* SoftSort: x descending, padding at its end */
static void softsort(Block *b, Pass pass) {
    int64_t m = b->m, k = b->k;
    vd *weight = take_quantities(b, m);    /* e^(x_i - x_q), q = k - 1, from there on */
    vd *pairs = take_quantities(b, k * k); /* (k, k) e^-|x_i - x_r|; (r, q): e^(x_q - x_r) */
    vd *column = take_quantities(b, k), *sums = take_quantities(b, k);
    if (pass == LAY_OUT) return;
    const vd *x = b->x;
    int64_t q = k - 1;
    EACH {
        vl real_count = lanes_of(b->real_count, v), position = lanes_of(b->position, v);
        if (pass == FORWARD) {
            for (int64_t i = q; i < m; i++)
                weight[i * NV + v] = only(i < real_count, exponential(x[i * NV + v] - x[q * NV + v]));
            for (int64_t r = 0; r < k; r++) {
                vd sum = {0};
                for (int64_t i = 0; i < r; i++) sum += pairs[(r * k + i) * NV + v] = pairs[(i * k + r) * NV + v];
                for (int64_t i = r; i < q; i++)
                    sum += pairs[(r * k + i) * NV + v] = exponential(x[i * NV + v] - x[r * NV + v]);
                vd step = pairs[(r * k + q) * NV + v] = exponential(x[q * NV + v] - x[r * NV + v]);
                for (int64_t i = q; i < m; i++) sum += step * weight[i * NV + v];
                sums[r * NV + v] = sum;
                column[r * NV + v] = -absolute(x[r * NV + v]) - logarithm(sum); /* the target's x is 0 */
            }
            log_sums(b, column, FORWARD, v);
            continue;
        }
        log_sums(b, column, BACKWARD, v);
        for (int64_t r = 0; r < k; r++) {
            vd g = column[r * NV + v], share = g / sums[r * NV + v], own = {0}, here = x[r * NV + v];
            vd step = share * pairs[(r * k + q) * NV + v];
            /* -|x_i - x_r| moves with x_i below x_r, and against it above; of equals it has no slope */
            for (int64_t i = 0; i < r; i++) {
                vd p = only(x[i * NV + v] > here, share * pairs[(r * k + i) * NV + v]);
                b->grad_x[i * NV + v] += p;
                own -= p;
            }
            for (int64_t i = r + 1; i < m; i++) {
                vd p = i < q ? share * pairs[(r * k + i) * NV + v] : step * weight[i * NV + v];
                p = only(x[i * NV + v] < here, p);
                b->grad_x[i * NV + v] -= p;
                own += p;
            }
            vd sign = pick(here > 0, splat(1), only(here < 0, splat(-1))); /* here - the target */
            b->grad_x[r * NV + v] += own - g * sign;
            for (int64_t i = 0; i < m; i++) b->grad_x[i * NV + v] += only(position == i, g * sign);
        }
    }
}

/* NeuralSort: x descending, padding at its end */
static void neuralsort(Block *b, Pass pass) {
    int64_t m = b->m, k = b->k;
    vd *better = take_quantities(b, m), *grad_better = take_quantities(b, m);
    vd *weight = take_quantities(b, k * m); /* (k, m) e^(exponent - the largest of the rank) */
    vd *column = take_quantities(b, k), *sums = take_quantities(b, k);
    if (pass == LAY_OUT) return;
    const vd *x = b->x;
    EACH {
        vl real_count = lanes_of(b->real_count, v), position = lanes_of(b->position, v);
        if (pass == FORWARD) {
            vd total = {0};
            better[v] = total;
            for (int64_t i = 1; i < m; i++) {
                total += only(i < real_count, (double)i * (x[(i - 1) * NV + v] - x[i * NV + v]));
                better[i * NV + v] = total;
            }
            for (int64_t r = 0; r < k; r++) {
                double factor = -1 - 2 * (double)r;
                vd maximum = factor * x[r * NV + v] - 2 * better[r * NV + v], sum = {0}, own = {0};
                for (int64_t i = 0; i < m; i++) {
                    vd exponent = factor * x[i * NV + v] - 2 * better[i * NV + v] - maximum;
                    vd e = only(i < real_count, exponential(exponent));
                    weight[(r * m + i) * NV + v] = e;
                    sum += e;
                    own = pick(position == i, exponent, own);
                }
                sums[r * NV + v] = sum;
                column[r * NV + v] = own - logarithm(sum);
            }
            log_sums(b, column, FORWARD, v);
            continue;
        }
        log_sums(b, column, BACKWARD, v);
        for (int64_t i = 0; i < m; i++) grad_better[i * NV + v] = (vd){0};
        for (int64_t r = 0; r < k; r++) {
            double factor = -1 - 2 * (double)r;
            vd g = column[r * NV + v], share = g / sums[r * NV + v];
            for (int64_t i = 0; i < m; i++) {
                vd by = only(position == i, g) - share * weight[(r * m + i) * NV + v];
                b->grad_x[i * NV + v] += factor * by;
                grad_better[i * NV + v] -= 2 * by;
            }
        }
        vd later = {0};
        for (int64_t i = m; i-- > 1;) {
            later += grad_better[i * NV + v];
            vd by = only(i < real_count, (double)i * later);
            b->grad_x[(i - 1) * NV + v] += by;
            b->grad_x[i * NV + v] -= by;
        }
    }
}
