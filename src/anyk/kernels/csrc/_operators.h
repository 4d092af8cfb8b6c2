/* The operators, and the loss that is made of their log T: LANES rows side by side.

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

/* anyk.swaps and anyk.operators.sorting_network have these. */
#define ART_ROUNDING 1e-3
#define LOG_TAIL_WEIGHT (-30)
#define PI 3.14159265358979323846

/* How an operator is called. Each lays its scratch memory out at its start, in the same way whenever it is called. */
typedef enum { LAY_OUT, FORWARD, BACKWARD } Pass;

static vd *take_quantities(Block *b, int64_t count) { return take(&b->scratch, count * LANES * 8); }

/* One vector of integers of the rows. */
INLINE vl lanes_of(const int32_t *numbers, int v) {
    vl result;
    for (int l = 0; l < BYTES / 8; l++) result[l] = numbers[v * (BYTES / 8) + l];
    return result;
}

INLINE vd smaller_share(const int swap, vd a) { /* swap(-a) for a >= 0 */
    switch (swap) {
    case LOGISTIC: {
        vd e = exponential(-a);
        return e * reciprocal(1 + e);
    }
    case LOGISTIC_ART: {
        vd length = square_root(a * a + ART_ROUNDING * ART_ROUNDING);
        vd e = exponential(-a / square_root(length));
        return e / (1 + e);
    }
    case CAUCHY:
        for (int l = 0; l < BYTES / 8; l++) a[l] = atan2(1, a[l]) / PI;
        return a;
    case GAUSSIAN:
        for (int l = 0; l < BYTES / 8; l++) a[l] = erfc(a[l] * 0.70710678118654752440) / 2;
        return a;
    case RECIPROCAL: return 1 / (2 + a);
    default: return pick(a <= 0.25, 0.5 - a, 1 / (16 * larger(a, splat(0.25))));
    }
}

INLINE vd slope_of(const int swap, vd a, vd x) { /* the derivative at ±a, where the smaller share is x */
    switch (swap) {
    case LOGISTIC: return x * (1 - x);
    case LOGISTIC_ART: {
        vd length = square_root(a * a + ART_ROUNDING * ART_ROUNDING), part = a / length;
        return x * (1 - x) / square_root(length) * (1 - part * part / 2);
    }
    case CAUCHY: return 1 / (PI * (1 + a * a));
    case GAUSSIAN: return exponential(-a * a / 2) * 0.39894228040143267794;
    case RECIPROCAL: return 1 / ((2 + a) * (2 + a));
    default: {
        vd held = larger(a, splat(0.25));
        return 1 / (16 * held * held);
    }
    }
}

/* In which rows a comparator does nothing: its lower wire is padding, or the row does not run through its layer. */
INLINE vl frozen_in(const Block *b, const int32_t *comparator, int v) {
    vl real_count = lanes_of(b->real_count, v);
    vl frozen = comparator[1] >= real_count;
    for (int l = 0; l < BYTES / 8; l++) {
        const int32_t *row = b->spec->starts + 3 * real_count[l];
        if (comparator[2] < row[1] || comparator[2] >= row[2]) frozen[l] = -1;
    }
    return frozen;
}

/* One comparator; `reached`: the target's column may be other than zero on its wires. */
INLINE void comparator_forward(Block *b, const int32_t *comparator, vd *restrict s, vd *restrict c, vd *restrict saved,
                               const int swap, const int padded, const int reached) {
    vd *upper = s + comparator[0] * NV, *lower = s + comparator[1] * NV;
    vd *c_upper = c + comparator[0] * NV, *c_lower = c + comparator[1] * NV;
    EACH {
        vd d = upper[v] - lower[v], a = absolute(d);
        vd x = smaller_share(swap, a);
        vd moved = x * a, high = larger(upper[v], lower[v]), low = smaller(upper[v], lower[v]);
        vd new_upper = high - moved, new_lower = low + moved;
        if (padded) {
            vl frozen = frozen_in(b, comparator, v);
            x = only(~frozen, x);
            d = only(~frozen, d);
            new_upper = pick(frozen, upper[v], new_upper);
            new_lower = pick(frozen, lower[v], new_lower);
        }
        upper[v] = new_upper;
        lower[v] = new_lower;
        saved[v] = d;
        saved[NV + v] = x;
        if (!reached) continue;
        vd c_high = by_sign(d, c_lower[v], c_upper[v]), c_low = by_sign(d, c_upper[v], c_lower[v]);
        vd y = 1 - x;
        /* Sums of non-negative terms: the digits of small shares stay. */
        c_upper[v] = y * c_high + x * c_low;
        c_lower[v] = x * c_high + y * c_low;
        saved[2 * NV + v] = c_high - c_low;
    }
}

INLINE void network_forward(Block *b, const int swap, const int padded, vd *saved, vd *c, int8_t *reached) {
    const Spec *spec = b->spec;
    int8_t *wires = reached + spec->size;
    memset(wires, 0, (size_t)b->m);
    for (int lane = 0; lane < LANES; lane++) wires[b->position[lane]] = 1;
    for (int64_t i = 0; i < b->m; i++)
        EACH c[i * NV + v] = only(lanes_of(b->position, v) == i, splat(1));
    const int32_t *comparator = spec->comparators;
    for (int64_t index = 0; index < spec->size; index++, comparator += 3, saved += 3 * NV) {
        int8_t one = wires[comparator[0]] | wires[comparator[1]];
        reached[index] = wires[comparator[0]] = wires[comparator[1]] = one;
        if (one)
            comparator_forward(b, comparator, b->x, c, saved, swap, padded, 1);
        else
            comparator_forward(b, comparator, b->x, c, saved, swap, padded, 0);
    }
}

INLINE void comparator_backward(const int32_t *comparator, vd *restrict grad_s, vd *restrict grad_c, const vd *restrict saved,
                                const int swap, const int padded, const int reached) {
    vd *upper = grad_s + comparator[0] * NV, *lower = grad_s + comparator[1] * NV;
    vd *c_upper = grad_c + comparator[0] * NV, *c_lower = grad_c + comparator[1] * NV;
    EACH {
        vd d = saved[v], x = saved[NV + v], a = absolute(d), y = 1 - x;
        vd slope = slope_of(swap, a, x);
        if (padded) slope = only(~(vl)(x == 0), slope);
        vd by_size = (lower[v] - upper[v]) * (x - a * slope);
        if (reached) by_size -= (c_lower[v] - c_upper[v]) * saved[2 * NV + v] * slope;
        vd high = upper[v] + by_size, low = lower[v] - by_size;
        upper[v] = by_sign(d, low, high);
        lower[v] = by_sign(d, high, low);
        if (!reached) continue; /* the slope by a column that is zero whatever the scores is not wanted */
        vd c_high = y * c_upper[v] + x * c_lower[v], c_low = x * c_upper[v] + y * c_lower[v];
        c_upper[v] = by_sign(d, c_low, c_high);
        c_lower[v] = by_sign(d, c_high, c_low);
    }
}

INLINE void network_backward(Block *b, const int swap, const int padded, vd *saved, vd *grad_c, const int8_t *reached) {
    const Spec *spec = b->spec;
    const int32_t *comparator = spec->comparators + 3 * spec->size;
    saved += 3 * spec->size * NV;
    for (int64_t index = spec->size; index-- > 0;) {
        comparator -= 3;
        saved -= 3 * NV;
        if (reached[index])
            comparator_backward(comparator, b->grad_x, grad_c, saved, swap, padded, 1);
        else
            comparator_backward(comparator, b->grad_x, grad_c, saved, swap, padded, 0);
    }
}

#define FOR_SWAP(function, ...)                                              \
    switch (b->spec->swap) {                                                 \
    case LOGISTIC: function(b, LOGISTIC, __VA_ARGS__); break;                \
    case LOGISTIC_ART: function(b, LOGISTIC_ART, __VA_ARGS__); break;        \
    case CAUCHY: function(b, CAUCHY, __VA_ARGS__); break;                    \
    case GAUSSIAN: function(b, GAUSSIAN, __VA_ARGS__); break;                \
    case RECIPROCAL: function(b, RECIPROCAL, __VA_ARGS__); break;            \
    default: function(b, OPTIMAL, __VA_ARGS__); break;                       \
    }

static void network(Block *b, Pass pass) {
    const Spec *spec = b->spec;
    vd *saved = take_quantities(b, 3 * spec->size); /* of each comparator */
    vd *c = take_quantities(b, b->m), *grad_c = take_quantities(b, b->m);
    vd *t = take_quantities(b, b->k), *tail = take_quantities(b, b->k), *tail_slope = take_quantities(b, b->k);
    int8_t *reached = take(&b->scratch, spec->size + b->m); /* comparators and wires where the column is not zero */
    if (pass == LAY_OUT) return;
    int swap = spec->swap;
    int polynomial = swap == CAUCHY || swap == RECIPROCAL || swap == OPTIMAL;
    if (pass == FORWARD) {
        /* The best others' leads, before the network changes the scores. */
        for (int64_t j = 0; j < b->k; j++) {
            EACH {
                vd lead = {0}, none = {0};
                for (int l = 0; l < BYTES / 8; l++) {
                    int lane = v * (BYTES / 8) + l;
                    int32_t rival = b->rivals[j * LANES + lane];
                    if (rival >= 0)
                        lead[l] = -b->x[rival * NV + v][l];
                    else
                        none[l] = rival == NO_RIVAL ? 1 : 0; /* the tail is its weight alone */
                }
                if (polynomial) {
                    vd behind = larger(-lead, splat(0));
                    tail[j * NV + v] = pick(none > 0, splat(0), -0.5 * logarithm(1 + behind)) + LOG_TAIL_WEIGHT;
                    tail_slope[j * NV + v] = only(~(vl)(none > 0), pick(lead <= 0, 0.5 / (1 + behind), splat(0)));
                } else {
                    vd z = lead, z_slope = splat(1);
                    if (swap == LOGISTIC_ART) {
                        vd length = square_root(lead * lead + ART_ROUNDING * ART_ROUNDING), part = lead / length;
                        z = lead / square_root(length);
                        z_slope = (1 - part * part / 2) / square_root(length);
                    }
                    vd e = exponential(-absolute(z));
                    vd log_sigmoid = smaller(z, splat(0)) - logarithm(1 + e);
                    vd other = pick(z > 0, e, splat(1)) / (1 + e);
                    tail[j * NV + v] = pick(none > 0, splat(0), 0.5 * log_sigmoid) + LOG_TAIL_WEIGHT;
                    tail_slope[j * NV + v] = only(~(vl)(none > 0), 0.5 * other * z_slope);
                }
            }
        }
        if (b->has_padding) {
            FOR_SWAP(network_forward, 1, saved, c, reached)
        } else {
            FOR_SWAP(network_forward, 0, saved, c, reached)
        }
        for (int64_t j = 0; j < b->k; j++)
            EACH {
                vd share = c[spec->outputs[j] * NV + v];
                vd sum = j ? t[(j - 1) * NV + v] + share : share;
                t[j * NV + v] = sum;
                vd log_sum = pick(sum > 1e-290, logarithm(sum), splat(-1e300)), log_tail = tail[j * NV + v];
                vd maximum = larger(log_sum, log_tail), minimum = smaller(log_sum, log_tail);
                b->log_t[j * NV + v] = maximum + logarithm(1 + exponential(minimum - maximum));
            }
        return;
    }
    for (int64_t i = 0; i < b->m * NV; i++) grad_c[i] = (vd){0};
    vd later[NV];
    EACH later[v] = (vd){0};
    for (int64_t j = b->k; j-- > 0;)
        EACH {
            vd g = b->grad_log_t[j * NV + v], log_t = b->log_t[j * NV + v];
            later[v] += g * exponential(smaller(-log_t, splat(300)));
            grad_c[spec->outputs[j] * NV + v] = later[v];
            t[j * NV + v] = g * exponential(tail[j * NV + v] - log_t) * tail_slope[j * NV + v]; /* by the lead */
        }
    if (b->has_padding) {
        FOR_SWAP(network_backward, 1, saved, grad_c, reached)
    } else {
        FOR_SWAP(network_backward, 0, saved, grad_c, reached)
    }
    for (int64_t j = 0; j < b->k; j++)
        EACH for (int l = 0; l < BYTES / 8; l++) {
            int lane = v * (BYTES / 8) + l;
            int32_t rival = b->rivals[j * LANES + lane];
            if (rival < 0) continue;
            double g = t[j * NV + v][l];
            b->grad_x[rival * NV + v][l] -= g;
            b->grad_x[b->position[lane] * NV + v][l] += g;
        }
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
                    only(~last, pick(ahead < 0, ahead - 0.69314718055994530942, logarithm(1 - e)));
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
        for (int64_t r = 1; r < b->k; r++) {
            vd maximum = larger(sum, column[r * NV + v]), minimum = smaller(sum, column[r * NV + v]);
            b->log_t[r * NV + v] = sum = maximum + logarithm(1 + exponential(minimum - maximum));
        }
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

static void run_operator(Block *b, Pass pass) {
    b->scratch.used = 0;
    switch (b->spec->operator) {
    case NETWORK: network(b, pass); break;
    case LAPSUM: lapsum(b, pass); break;
    case KSUBSET: ksubset(b, pass); break;
    case SOFTSORT: softsort(b, pass); break;
    default: neuralsort(b, pass);
    }
}

/* log sum_j p_j T_j over j >= first, at most 0. `instead`: a cross-entropy, whose negative takes the place of the first log T; or
   NULL. The shares are the gradient by each log T. */
INLINE vd log_mean(const Block *b, const vd *p, int64_t first, const vd *instead, vd *shares, int v) {
    vd maximum = splat(-1e300), sum = {0};
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        maximum = larger(maximum, pick(p[j * NV + v] > 0, log_t, splat(-1e300)));
    }
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        vd part = only(p[j * NV + v] > 0, p[j * NV + v] * exponential(smaller(log_t - maximum, splat(0))));
        shares[j * NV + v] = part;
        sum += part;
    }
    vd result = maximum + logarithm(sum);
    vl over = result > 0; /* the T of operators that are only row-stochastic can pass 1 */
    for (int64_t j = first; j < b->k; j++) shares[j * NV + v] = only(~over, shares[j * NV + v] / sum);
    return smaller(result, splat(0));
}

/* The loss of each row from log T, P_K and the cross-entropy, with the gradients by log T and by the cross-entropy. `shares` has
   room for k quantities. */
static void loss_of_log_t(Block *b, const vd *p, const vd *cross_entropy, vd *loss, vd *grad_cross_entropy, vd *shares) {
    const Spec *spec = b->spec;
    int64_t k = b->k;
    int softmax = spec->family != OPERATOR;
    EACH {
        grad_cross_entropy[v] = (vd){0};
        if (spec->family == ERROR) {
            vd sum = {0};
            double q = spec->q, rest = 1 - spec->ce_weight;
            for (int64_t j = 0; j < k; j++) {
                vd log_t = smaller(b->log_t[j * NV + v], splat(0)), weight = rest * p[j * NV + v];
                vd t = exponential(q * log_t); /* T^q */
                vd error = q == 0 ? -log_t : one_minus_exp(q * log_t, t) / q;
                sum += weight * error;
                b->grad_log_t[j * NV + v] = only(~(vl)(b->log_t[j * NV + v] > 0), -weight * t);
            }
            loss[v] = sum;
            if (spec->ce_weight > 0) {
                double ce_weight = spec->ce_weight * (1 - spec->smoothing);
                loss[v] += ce_weight * cross_entropy[v];
                grad_cross_entropy[v] = splat(ce_weight);
            }
        } else if (k == 1 && softmax) { /* the softmax of the candidates alone */
            loss[v] = cross_entropy[v];
            grad_cross_entropy[v] = splat(1);
            b->grad_log_t[v] = (vd){0};
        } else if (spec->family == SEPARATE) {
            vd later = {0};
            for (int64_t j = 1; j < k; j++) later += p[j * NV + v];
            vd mean = log_mean(b, p, 1, NULL, shares, v);
            vl some = later > 0;
            mean -= pick(some, logarithm(pick(some, later, splat(1))), splat(0));
            /* at most 0 after the division by the sum: what log_mean held was for the undivided one */
            vl over = mean > 0;
            mean = smaller(mean, splat(0));
            loss[v] = p[v] * cross_entropy[v] - only(some, later * mean);
            grad_cross_entropy[v] = p[v];
            b->grad_log_t[v] = (vd){0};
            for (int64_t j = 1; j < k; j++) b->grad_log_t[j * NV + v] = only(some & ~over, -later * shares[j * NV + v]);
        } else {
            int mixed = spec->family == MIXED;
            loss[v] = -log_mean(b, p, 0, mixed ? cross_entropy : NULL, shares, v);
            for (int64_t j = 0; j < k; j++) b->grad_log_t[j * NV + v] = -shares[j * NV + v];
            if (mixed) {
                grad_cross_entropy[v] = shares[v];
                b->grad_log_t[v] = (vd){0};
            }
        }
    }
}
