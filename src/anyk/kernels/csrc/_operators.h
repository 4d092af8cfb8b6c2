/* The operators, and what becomes of their log T: LANES rows side by side. */

/* What a block of rows shares: quantities of LANES rows in NV vectors. */
typedef struct {
    const Spec *spec;
    int64_t m, k;
    vd *x;             /* (m) scores less the target's, over the temperature, as the operator wants them arranged */
    vd *of_x;          /* (m) the gradient by them */
    int32_t *place;    /* (lanes) where the target stands */
    int32_t *number;   /* (lanes) how many are not padding */
    int32_t *rivals;   /* (k, lanes) networks: where the best others stand */
    vd *log_t, *of_log_t; /* (k) */
    int padded;        /* some row has padding */
    vd *work;          /* what the operator asked for */
} Block;

static int64_t work_size(const Spec *spec) {
    switch (spec->operator) {
    case NETWORK: return 3 * spec->size + 3 * spec->m + 4 * spec->k + (spec->size + spec->m) / (LANES * 8) + 1;
    case LAPSUM: return 3 * spec->m + 3 * spec->k + 8;
    case KSUBSET: return spec->m * (spec->k + 4) + spec->k * (spec->k + 4);
    case SOFTSORT: return spec->m + spec->k * (spec->m + 6);
    default: return spec->m * 3 + spec->k * (spec->m + 4);
    }
}

INLINE vl lanes_of(const int32_t *numbers, int v) {
    vl result;
    for (int l = 0; l < BYTES / 8; l++) result[l] = numbers[v * (BYTES / 8) + l];
    return result;
}

INLINE vd smaller_share(const int swap, vd a) { /* swap(-a) for a >= 0 */
    switch (swap) {
    case LOGISTIC: {
        vd e = exponential(-a);
        return e * inverse(1 + e);
    }
    case LOGISTIC_ART: {
        vd length = root(a * a + 1e-6);
        vd e = exponential(-a / root(length));
        return e / (1 + e);
    }
    case CAUCHY:
        for (int l = 0; l < BYTES / 8; l++) a[l] = atan2(1, a[l]) / 3.14159265358979323846;
        return a;
    case GAUSSIAN:
        for (int l = 0; l < BYTES / 8; l++) a[l] = erfc(a[l] * 0.70710678118654752440) / 2;
        return a;
    case RECIPROCAL: return 1 / (2 + a);
    default: return pick(a <= 0.25, 0.5 - a, 1 / (16 * larger(a, all(0.25))));
    }
}

INLINE vd slope_of(const int swap, vd a, vd x) { /* the derivative at ±a, where the smaller share is x */
    switch (swap) {
    case LOGISTIC: return x * (1 - x);
    case LOGISTIC_ART: {
        vd length = root(a * a + 1e-6), part = a / length;
        return x * (1 - x) / root(length) * (1 - part * part / 2);
    }
    case CAUCHY: return 1 / (3.14159265358979323846 * (1 + a * a));
    case GAUSSIAN: return exponential(-a * a / 2) * 0.39894228040143267794;
    case RECIPROCAL: return 1 / ((2 + a) * (2 + a));
    default: {
        vd held = larger(a, all(0.25));
        return 1 / (16 * held * held);
    }
    }
}

/* Which rows a comparator leaves as they are. */
INLINE vl frozen_in(const Block *b, const int32_t *comparator, int v) {
    vl number = lanes_of(b->number, v);
    vl frozen = comparator[1] >= number;
    for (int l = 0; l < BYTES / 8; l++) {
        const int32_t *row = b->spec->numbers + 3 * number[l];
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
        vd d = upper[v] - lower[v], a = size_of(d);
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

INLINE void network_forward(Block *b, const int swap, const int padded, int8_t *reached) {
    const Spec *spec = b->spec;
    vd *c = b->work + 3 * spec->size * NV, *saved = b->work;
    int8_t *wires = reached + spec->size;
    memset(wires, 0, (size_t)b->m);
    for (int lane = 0; lane < LANES; lane++) wires[b->place[lane]] = 1;
    for (int64_t i = 0; i < b->m; i++)
        EACH c[i * NV + v] = only(lanes_of(b->place, v) == i, all(1));
    const int32_t *comparator = spec->comparators;
    for (int64_t number = 0; number < spec->size; number++, comparator += 3, saved += 3 * NV) {
        int8_t one = wires[comparator[0]] | wires[comparator[1]];
        reached[number] = wires[comparator[0]] = wires[comparator[1]] = one;
        if (one)
            comparator_forward(b, comparator, b->x, c, saved, swap, padded, 1);
        else
            comparator_forward(b, comparator, b->x, c, saved, swap, padded, 0);
    }
}

INLINE void comparator_backward(const int32_t *comparator, vd *restrict of_s, vd *restrict of_c, const vd *restrict saved,
                                const int swap, const int padded, const int reached) {
    vd *upper = of_s + comparator[0] * NV, *lower = of_s + comparator[1] * NV;
    vd *c_upper = of_c + comparator[0] * NV, *c_lower = of_c + comparator[1] * NV;
    EACH {
        vd d = saved[v], x = saved[NV + v], a = size_of(d), y = 1 - x;
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

INLINE void network_backward(Block *b, const int swap, const int padded, vd *of_c, const int8_t *reached) {
    const Spec *spec = b->spec;
    const int32_t *comparator = spec->comparators + 3 * spec->size;
    vd *saved = b->work + 3 * spec->size * NV;
    for (int64_t number = spec->size; number-- > 0;) {
        comparator -= 3;
        saved -= 3 * NV;
        if (reached[number])
            comparator_backward(comparator, b->of_x, of_c, saved, swap, padded, 1);
        else
            comparator_backward(comparator, b->of_x, of_c, saved, swap, padded, 0);
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

static void network(Block *b, int backward) {
    const Spec *spec = b->spec;
    vd *c = b->work + 3 * spec->size * NV, *of_c = c + spec->m * NV;
    vd *t = of_c + spec->m * NV, *tail = t + b->k * NV, *tail_slope = tail + b->k * NV;
    int8_t *reached = (int8_t *)(tail_slope + b->k * NV); /* (comparators, wires) */
    int swap = spec->swap;
    int polynomial = swap == CAUCHY || swap == RECIPROCAL || swap == OPTIMAL;
    if (!backward) {
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
                        none[l] = rival == -2 ? 1 : 0; /* no such rival: the tail is e^-30 itself */
                }
                if (polynomial) {
                    vd behind = larger(-lead, all(0));
                    tail[j * NV + v] = pick(none > 0, all(0), -0.5 * logarithm(1 + behind)) - 30;
                    tail_slope[j * NV + v] = only(~(vl)(none > 0), pick(lead <= 0, 0.5 / (1 + behind), all(0)));
                } else {
                    vd z = lead, z_slope = all(1);
                    if (swap == LOGISTIC_ART) {
                        vd length = root(lead * lead + 1e-6), part = lead / length;
                        z = lead / root(length);
                        z_slope = (1 - part * part / 2) / root(length);
                    }
                    vd e = exponential(-size_of(z));
                    vd log_sigmoid = smaller(z, all(0)) - logarithm(1 + e);
                    vd other = pick(z > 0, e, all(1)) / (1 + e);
                    tail[j * NV + v] = pick(none > 0, all(0), 0.5 * log_sigmoid) - 30;
                    tail_slope[j * NV + v] = only(~(vl)(none > 0), 0.5 * other * z_slope);
                }
            }
        }
        if (b->padded) {
            FOR_SWAP(network_forward, 1, reached)
        } else {
            FOR_SWAP(network_forward, 0, reached)
        }
        for (int64_t j = 0; j < b->k; j++)
            EACH {
                vd share = c[spec->outputs[j] * NV + v];
                vd sum = j ? t[(j - 1) * NV + v] + share : share;
                t[j * NV + v] = sum;
                vd log_sum = pick(sum > 1e-290, logarithm(sum), all(-1e300)), log_tail = tail[j * NV + v];
                vd most = larger(log_sum, log_tail), least = smaller(log_sum, log_tail);
                b->log_t[j * NV + v] = most + logarithm(1 + exponential(least - most));
            }
        return;
    }
    for (int64_t i = 0; i < b->m * NV; i++) of_c[i] = (vd){0};
    vd later[NV];
    EACH later[v] = (vd){0};
    for (int64_t j = b->k; j-- > 0;)
        EACH {
            vd g = b->of_log_t[j * NV + v], log_t = b->log_t[j * NV + v];
            later[v] += g * exponential(smaller(-log_t, all(300)));
            of_c[spec->outputs[j] * NV + v] = later[v];
            t[j * NV + v] = g * exponential(tail[j * NV + v] - log_t) * tail_slope[j * NV + v]; /* by the lead */
        }
    if (b->padded) {
        FOR_SWAP(network_backward, 1, of_c, reached)
    } else {
        FOR_SWAP(network_backward, 0, of_c, reached)
    }
    for (int64_t j = 0; j < b->k; j++)
        EACH for (int l = 0; l < BYTES / 8; l++) {
            int lane = v * (BYTES / 8) + l;
            int32_t rival = b->rivals[j * LANES + lane];
            if (rival < 0) continue;
            double g = t[j * NV + v][l];
            b->of_x[rival * NV + v][l] -= g;
            b->of_x[b->place[lane] * NV + v][l] += g;
        }
}

/* x descending, padding at its end far below */
static void lapsum(Block *b, int backward) {
    int64_t m = b->m, k = b->k, first = 2 * k + 1 < m ? 2 * k + 1 : m;
    vd *better = b->work, *worse = better + m * NV, *close = worse + m * NV;
    vd *threshold = close + m * NV, *margin = threshold + k * NV;
    const vd *x = b->x;
    const double none = -1e37;
    if (!backward) {
        EACH {
            vl number = lanes_of(b->number, v);
            for (int64_t i = 0; i + 1 < m; i++)
                close[i * NV + v] = only(i + 1 < number, exponential(x[(i + 1) * NV + v] - x[i * NV + v]));
            better[v] = all(1);
            for (int64_t i = 1; i < first; i++) better[i * NV + v] = 1 + better[(i - 1) * NV + v] * close[(i - 1) * NV + v];
            worse[(m - 1) * NV + v] = all(1);
            for (int64_t i = m - 1; i-- > 0;) worse[i * NV + v] = 1 + worse[(i + 1) * NV + v] * close[i * NV + v];
            for (int64_t j = 1; j <= k; j++) {
                vd rank = all((double)j), above = {0}, a = all(1), at_a = {0}, bb = worse[v], at_b = x[v];
                vd has_b = all(1);
                vd most = __builtin_convertvector(number - 1, vd);
                rank = larger(smaller(rank, most), all(1));
                for (int64_t i = 0; i < first; i++) {
                    vd passed = (double)(i + 1) + (worse[i * NV + v] - 1 - better[i * NV + v]) / 2;
                    vl here = (passed <= rank) & (i < number);
                    above += only(here, all(1));
                    a = pick(here, better[i * NV + v], a);
                    at_a = pick(here, x[i * NV + v], at_a);
                    if (i + 1 < first) {
                        bb = pick(here, worse[(i + 1) * NV + v], bb);
                        at_b = pick(here, x[(i + 1) * NV + v], at_b);
                        has_b = pick(here, only(i + 1 < number, all(1)), has_b);
                    } else
                        has_b = pick(here, all(0), has_b);
                }
                vd log_a = pick(above > 0, logarithm(a) - at_a, all(none));
                vd log_b = pick(has_b > 0, logarithm(bb) + at_b, all(none));
                vd missing = rank - above, size = larger(size_of(missing), all(1));
                vd root_ = logarithm(size + root(size * size + exponential(log_a + log_b)));
                vd result = pick(missing > 0, log_b - root_, root_ - log_a);
                result = pick(missing == 0, (log_b - log_a) / 2, result);
                result = larger(smaller(result, all(1e36)), all(-1e36));
                threshold[(j - 1) * NV + v] = result;
                vd ahead = -result; /* the target's x is 0 */
                vd e = 0.5 * exponential(-larger(ahead, all(0)));
                vl last = number == j;
                margin[(j - 1) * NV + v] = only(~last, pick(ahead < 0, all(1), e / (1 - e)));
                b->log_t[(j - 1) * NV + v] =
                    only(~last, pick(ahead < 0, ahead - 0.69314718055994530942, logarithm(1 - e)));
            }
        }
        return;
    }
    /* From x_2k on (the thresholds lie above it) the weights of all thresholds are e^(x_i - x_2k) times a number. */
    int64_t far = first < m ? first - 1 : m;
    EACH {
        vl number = lanes_of(b->number, v), place = lanes_of(b->place, v);
        vd far_sum = {0}, far_share = {0}, of_target = {0};
        for (int64_t i = far; i < m; i++)
            far_sum += worse[i * NV + v] = only(i < number, exponential(x[i * NV + v] - x[far * NV + v]));
        for (int64_t j = 0; j < k; j++) {
            vd g = b->of_log_t[j * NV + v] * margin[j * NV + v], at = threshold[j * NV + v];
            vd nearest = all(1e300), sum = {0}, to_far = {0};
            for (int64_t i = 0; i < far || (i == far && far < m); i++)
                nearest = smaller(nearest, pick(i < number, size_of(x[i * NV + v] - at), all(1e300)));
            for (int64_t i = 0; i < far; i++) {
                vd weight = only(i < number, exponential(nearest - size_of(x[i * NV + v] - at)));
                close[i * NV + v] = weight;
                sum += weight;
            }
            if (far < m) to_far = only(far < number, exponential(nearest - size_of(x[far * NV + v] - at)));
            vd share = g / (sum + to_far * far_sum);
            far_share += share * to_far;
            of_target += g;
            for (int64_t i = 0; i < far; i++) b->of_x[i * NV + v] -= share * close[i * NV + v];
        }
        for (int64_t i = far; i < m; i++) b->of_x[i * NV + v] -= far_share * worse[i * NV + v];
        for (int64_t i = 0; i < m; i++) b->of_x[i * NV + v] += only(place == i, of_target);
    }
}

/* x: the others descending, then the target */
static void ksubset(Block *b, int backward) {
    int64_t others = b->m - 1, k = b->k, used = k < others ? k : others;
    vd *grown = b->work;                      /* (k, others): F_j of the first i + 1 */
    vd *weight = grown + k * b->m * NV;       /* (others) e^(x_i - x_q), q the last used, from there on */
    vd *direct = weight + b->m * NV;          /* (others) the gradient by what the round before has grown */
    vd *pairs = direct + b->m * NV;           /* (k, k) e^(x_i - x_j), j <= i < q; (j, q): e^(x_q - x_j) */
    vd *slope = pairs + k * k * NV;           /* (k) of log T by the ratio */
    const vd *x = b->x;
    if (!backward) {
        EACH {
            vl number = lanes_of(b->number, v) - 1; /* of the others */
            int64_t q = used - 1;
            for (int64_t i = q < 0 ? 0 : q; i < others; i++)
                weight[i * NV + v] = only(i < number, exponential(x[i * NV + v] - x[q * NV + v]));
            vd before = all(1);
            for (int64_t j = 0; j < used; j++) {
                for (int64_t i = j; i <= q; i++)
                    pairs[(j * k + i) * NV + v] = only(i < number, exponential(x[i * NV + v] - x[j * NV + v]));
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
                vl exists = j < number;
                total = pick(exists, total, all(1));
                vd ratio = x[j * NV + v] + logarithm(total / before);
                before = total;
                vd e = exponential(-size_of(ratio));
                b->log_t[j * NV + v] = only(exists, smaller(-ratio, all(0)) - logarithm(1 + e));
                slope[j * NV + v] = only(exists, -pick(ratio > 0, all(1), e) / (1 + e));
            }
            for (int64_t j = used < 0 ? 0 : used; j < k; j++) b->log_t[j * NV + v] = (vd){0};
        }
        return;
    }
    for (int64_t i = 0; i < others * NV; i++) direct[i] = (vd){0};
    EACH {
        vl number = lanes_of(b->number, v) - 1;
        int64_t q = used - 1;
        vd of_target = {0}, next = {0};
        for (int64_t j = used; j-- > 0;) {
            vd r = only(j < number, b->of_log_t[j * NV + v] * slope[j * NV + v]); /* by the ratio */
            of_target -= r;
            vd *now = grown + j * b->m * NV + v, *last = now - b->m * NV;
            vd step = pairs[(j * k + q) * NV + v], own = {0};
            vd running = (r - next) / larger(now[(others - 1) * NV], all(1));
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
                b->of_x[i * NV + v] += w;
                own += w;
            }
            b->of_x[j * NV + v] += r - own;
        }
        b->of_x[others * NV + v] += of_target;
    }
}

/* log of the running sums of e^column, and back */
INLINE void log_sums(Block *b, vd *column, int backward, int v) {
    if (!backward) {
        vd sum = column[v];
        b->log_t[v] = sum;
        for (int64_t r = 1; r < b->k; r++) {
            vd most = larger(sum, column[r * NV + v]), least = smaller(sum, column[r * NV + v]);
            b->log_t[r * NV + v] = sum = most + logarithm(1 + exponential(least - most));
        }
        return;
    }
    /* by e^column over a common factor, which is kept in range: sum over j >= r of g_j e^(column_r - log T_j) */
    vd sum = {0};
    for (int64_t r = b->k; r-- > 0;) {
        vd log_t = b->log_t[r * NV + v];
        if (r + 1 < b->k) sum *= exponential(log_t - b->log_t[(r + 1) * NV + v]);
        sum += b->of_log_t[r * NV + v];
        column[r * NV + v] = sum * exponential(column[r * NV + v] - log_t);
    }
}

/* x descending, padding at its end */
static void softsort(Block *b, int backward) {
    int64_t m = b->m, k = b->k;
    vd *weight = b->work;                        /* (m) e^(x_i - x_q), q = k - 1, from there on */
    vd *pairs = weight + m * NV;                 /* (k, k) e^-|x_i - x_r|; (r, q): e^(x_q - x_r) */
    vd *column = pairs + k * k * NV, *sums = column + k * NV;
    const vd *x = b->x;
    int64_t q = k - 1;
    EACH {
        vl number = lanes_of(b->number, v), place = lanes_of(b->place, v);
        if (!backward) {
            for (int64_t i = q; i < m; i++)
                weight[i * NV + v] = only(i < number, exponential(x[i * NV + v] - x[q * NV + v]));
            for (int64_t r = 0; r < k; r++) {
                vd sum = {0};
                for (int64_t i = 0; i < r; i++) sum += pairs[(r * k + i) * NV + v] = pairs[(i * k + r) * NV + v];
                for (int64_t i = r; i < q; i++)
                    sum += pairs[(r * k + i) * NV + v] = exponential(x[i * NV + v] - x[r * NV + v]);
                vd step = pairs[(r * k + q) * NV + v] = exponential(x[q * NV + v] - x[r * NV + v]);
                for (int64_t i = q; i < m; i++) sum += step * weight[i * NV + v];
                sums[r * NV + v] = sum;
                column[r * NV + v] = -size_of(x[r * NV + v]) - logarithm(sum); /* the target's x is 0 */
            }
            log_sums(b, column, 0, v);
            continue;
        }
        log_sums(b, column, 1, v);
        for (int64_t r = 0; r < k; r++) {
            vd g = column[r * NV + v], share = g / sums[r * NV + v], own = {0}, here = x[r * NV + v];
            vd step = share * pairs[(r * k + q) * NV + v];
            /* -|x_i - x_r| moves with x_i below x_r, and against it above; of equals it has no slope */
            for (int64_t i = 0; i < r; i++) {
                vd p = only(x[i * NV + v] > here, share * pairs[(r * k + i) * NV + v]);
                b->of_x[i * NV + v] += p;
                own -= p;
            }
            for (int64_t i = r + 1; i < m; i++) {
                vd p = i < q ? share * pairs[(r * k + i) * NV + v] : step * weight[i * NV + v];
                p = only(x[i * NV + v] < here, p);
                b->of_x[i * NV + v] -= p;
                own += p;
            }
            vd sign = pick(here > 0, all(1), only(here < 0, all(-1))); /* here - the target */
            b->of_x[r * NV + v] += own - g * sign;
            for (int64_t i = 0; i < m; i++) b->of_x[i * NV + v] += only(place == i, g * sign);
        }
    }
}

/* x descending, padding at its end */
static void neuralsort(Block *b, int backward) {
    int64_t m = b->m, k = b->k;
    vd *better = b->work, *of_better = better + m * NV;
    vd *weight = of_better + m * NV;                /* (k, m) e^(exponent - the largest of the rank) */
    vd *column = weight + k * m * NV, *sums = column + k * NV;
    const vd *x = b->x;
    EACH {
        vl number = lanes_of(b->number, v), place = lanes_of(b->place, v);
        if (!backward) {
            vd total = {0};
            better[v] = total;
            for (int64_t i = 1; i < m; i++) {
                total += only(i < number, (double)i * (x[(i - 1) * NV + v] - x[i * NV + v]));
                better[i * NV + v] = total;
            }
            for (int64_t r = 0; r < k; r++) {
                double factor = -1 - 2 * (double)r;
                vd most = factor * x[r * NV + v] - 2 * better[r * NV + v], sum = {0}, own = {0};
                for (int64_t i = 0; i < m; i++) {
                    vd exponent = factor * x[i * NV + v] - 2 * better[i * NV + v] - most;
                    vd e = only(i < number, exponential(exponent));
                    weight[(r * m + i) * NV + v] = e;
                    sum += e;
                    own = pick(place == i, exponent, own);
                }
                sums[r * NV + v] = sum;
                column[r * NV + v] = own - logarithm(sum);
            }
            log_sums(b, column, 0, v);
            continue;
        }
        log_sums(b, column, 1, v);
        for (int64_t i = 0; i < m; i++) of_better[i * NV + v] = (vd){0};
        for (int64_t r = 0; r < k; r++) {
            double factor = -1 - 2 * (double)r;
            vd g = column[r * NV + v], share = g / sums[r * NV + v];
            for (int64_t i = 0; i < m; i++) {
                vd by = only(place == i, g) - share * weight[(r * m + i) * NV + v];
                b->of_x[i * NV + v] += factor * by;
                of_better[i * NV + v] -= 2 * by;
            }
        }
        vd later = {0};
        for (int64_t i = m; i-- > 1;) {
            later += of_better[i * NV + v];
            vd by = only(i < number, (double)i * later);
            b->of_x[(i - 1) * NV + v] += by;
            b->of_x[i * NV + v] -= by;
        }
    }
}

static void run_operator(Block *b, int backward) {
    switch (b->spec->operator) {
    case NETWORK: network(b, backward); break;
    case LAPSUM: lapsum(b, backward); break;
    case KSUBSET: ksubset(b, backward); break;
    case SOFTSORT: softsort(b, backward); break;
    default: neuralsort(b, backward);
    }
}

/* log sum_j p_j T_j, at most 0, over j >= first, with -cross-entropy in place of the first log T if given; and what of it each
   log T has */
INLINE vd log_mean(const Block *b, const vd *p, int64_t first, const vd *instead, vd *shares, int v) {
    vd most = all(-1e300), sum = {0};
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        most = larger(most, pick(p[j * NV + v] > 0, log_t, all(-1e300)));
    }
    for (int64_t j = first; j < b->k; j++) {
        vd log_t = instead && j == 0 ? -instead[v] : b->log_t[j * NV + v];
        vd part = only(p[j * NV + v] > 0, p[j * NV + v] * exponential(smaller(log_t - most, all(0))));
        shares[j * NV + v] = part;
        sum += part;
    }
    vd result = most + logarithm(sum);
    vl over = result > 0; /* the T of operators that are only row-stochastic can pass 1 */
    for (int64_t j = first; j < b->k; j++) shares[j * NV + v] = only(~over, shares[j * NV + v] / sum);
    return smaller(result, all(0));
}

/* The loss of each row from log T, P_K and the cross-entropy; with the slopes by log T and by the cross-entropy. */
static void shape(Block *b, const vd *p, const vd *cross_entropy, vd *loss, vd *of_cross_entropy, vd *shares) {
    const Spec *spec = b->spec;
    int64_t k = b->k;
    int softmax = spec->family != OPERATOR;
    EACH {
        of_cross_entropy[v] = (vd){0};
        if (spec->family == ERROR) {
            vd sum = {0};
            double q = spec->q, rest = 1 - spec->ce_weight;
            for (int64_t j = 0; j < k; j++) {
                vd log_t = smaller(b->log_t[j * NV + v], all(0)), weight = rest * p[j * NV + v];
                vd t = exponential(q * log_t); /* T^q */
                vd error = q == 0 ? -log_t : one_less(q * log_t, t) / q;
                sum += weight * error;
                b->of_log_t[j * NV + v] = only(~(vl)(b->log_t[j * NV + v] > 0), -weight * t);
            }
            loss[v] = sum;
            if (spec->ce_weight > 0) {
                double ce_weight = spec->ce_weight * (1 - spec->smoothing);
                loss[v] += ce_weight * cross_entropy[v];
                of_cross_entropy[v] = all(ce_weight);
            }
        } else if (k == 1 && softmax) { /* the softmax of the candidates alone */
            loss[v] = cross_entropy[v];
            of_cross_entropy[v] = all(1);
            b->of_log_t[v] = (vd){0};
        } else if (spec->family == SEPARATE) {
            vd later = {0};
            for (int64_t j = 1; j < k; j++) later += p[j * NV + v];
            vd mean = log_mean(b, p, 1, NULL, shares, v);
            vl some = later > 0;
            mean -= pick(some, logarithm(pick(some, later, all(1))), all(0));
            /* at most 0 after the division by the sum: what log_mean held was for the undivided one */
            vl over = mean > 0;
            mean = smaller(mean, all(0));
            loss[v] = p[v] * cross_entropy[v] - only(some, later * mean);
            of_cross_entropy[v] = p[v];
            b->of_log_t[v] = (vd){0};
            for (int64_t j = 1; j < k; j++) b->of_log_t[j * NV + v] = only(some & ~over, -later * shares[j * NV + v]);
        } else {
            int mixed = spec->family == MIXED;
            loss[v] = -log_mean(b, p, 0, mixed ? cross_entropy : NULL, shares, v);
            for (int64_t j = 0; j < k; j++) b->of_log_t[j * NV + v] = -shares[j * NV + v];
            if (mixed) {
                of_cross_entropy[v] = shares[v];
                b->of_log_t[v] = (vd){0};
            }
        }
    }
}
