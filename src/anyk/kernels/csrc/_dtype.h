/* Passes over a row of scores. _select.h includes this once for each dtype: S is the stored type, NAME(x) the name of x for it.
   The functions called pass_… are inlined with arguments that are constants then, one loop for each case. */

/* The last scores of a row, fewer than two vectors: filled up with -inf. */
INLINE Pair NAME(load_last)(const S *p, int64_t count) {
    S padded[2 * W];
    for (int l = 0; l < 2 * W; l++) padded[l] = l < count ? p[l] : NAME(narrow)(-INFINITY);
    return NAME(load_pair)(padded);
}

static float NAME(maximum)(const S *row, int64_t n) {
    vf top = splatf(-INFINITY);
    for (int64_t i = 0; i < n; i += 2 * W) {
        Pair x = i + 2 * W <= n ? NAME(load_pair)(row + i) : NAME(load_last)(row + i, n - i);
        top = largerf(x.b, largerf(x.a, top));
    }
    return largest_of(top);
}

/* Returns the largest score, and the maxima of `groups` W strided groups of scores. The last scores, too few for all groups, are
   in none of them: a threshold that is made of the maxima is as good without them. */
INLINE float NAME(pass_maxima)(const S *row, int64_t n, const int groups, vf *maxima) {
    vf best[16];
    int64_t i = 0;
    for (int g = 0; g < groups; g++) best[g] = splatf(-INFINITY);
    for (; i + groups * W <= n; i += groups * W)
        for (int g = 0; g < groups; g += 2) {
            Pair x = NAME(load_pair)(row + i + g * W);
            best[g] = largerf(x.a, best[g]);
            best[g + 1] = largerf(x.b, best[g + 1]);
        }
    vf top = splatf(NAME(maximum)(row + i, n - i));
    for (int g = 0; g < groups; g++) {
        maxima[g] = best[g];
        top = largerf(best[g], top);
    }
    return largest_of(top);
}

static float NAME(group_maxima)(const S *row, int64_t n, int groups, vf *maxima) {
    switch (groups) {
    case 2: return NAME(pass_maxima)(row, n, 2, maxima);
    case 4: return NAME(pass_maxima)(row, n, 4, maxima);
    case 8: return NAME(pass_maxima)(row, n, 8, maxima);
    default: return NAME(pass_maxima)(row, n, 16, maxima);
    }
}

/* Of the scores [first, n) of a row: keeps what reaches the threshold, unless `kept` is NULL, and adds to the sums, if asked. */
INLINE void NAME(pass_collect)(const S *row, int64_t first, int64_t n, Kept *kept, float maximum, const int sums,
                               const int smoothed, Sums *out) {
    vf top = splatf(maximum), threshold = kept ? kept->threshold : top;
    int64_t count = kept ? kept->count : 0;
    for (int64_t i = first; i < n;) {
        /* Float sums of few numbers, their sum in double: no digits are lost over a long row. */
        int64_t end = i + 64 * W < n ? i + 64 * W : n;
        vf some = {0}, shifted_sum = {0};
        vi reals = {0}, tops = {0};
        for (; i < end; i += 2 * W) {
            Pair x = i + 2 * W <= n ? NAME(load_pair)(row + i) : NAME(load_last)(row + i, n - i);
            if (sums) { /* the next chunk comes while this one is computed */
                __builtin_prefetch(row + i + CHUNK);
                if (2 * W * sizeof(S) > 64) __builtin_prefetch(row + i + W + CHUNK);
            }
            if (kept) {
                uint32_t hits_a = not_below(x.a, threshold), hits_b = not_below(x.b, threshold);
                if (__builtin_expect((hits_a | hits_b) != 0, 0)) {
                    uint64_t hits = NAME(in_order)(hits_a, hits_b);
                    if (i + 2 * W > n) hits &= (1ull << (n - i)) - 1;
                    for (; hits; hits &= hits - 1) {
                        int64_t c = i + __builtin_ctzll(hits);
                        kept->score[count] = NAME(widen)(row[c]);
                        kept->class[count++] = (int32_t)c;
                    }
                    if (count > kept->capacity) {
                        kept->count = count;
                        compact(kept);
                        count = kept->count;
                        threshold = kept->threshold;
                    }
                }
            }
            if (sums) {
                vf a = x.a - top, b = x.b - top;
                /* The largest, whose exponentials are 1, are counted apart: added to them the others would lose digits, and if the
                   target is the largest, the others are its gradient. */
                vi a_is_top = a == 0, b_is_top = b == 0;
                tops -= a_is_top + b_is_top;
                some += (vf)((vi)exponentialf(a) & ~a_is_top) + (vf)((vi)exponentialf(b) & ~b_is_top);
                if (smoothed) {
                    vi a_is_real = x.a > -INFINITY, b_is_real = x.b > -INFINITY;
                    reals -= a_is_real + b_is_real;
                    shifted_sum += (vf)((vi)a & a_is_real) + (vf)((vi)b & b_is_real);
                }
            }
        }
        if (sums) {
            double part = 0, shifted_part = 0;
            for (int l = 0; l < W; l++) part += (double)some[l], shifted_part += (double)shifted_sum[l];
            out->exp_sum += part + sum_of(tops);
            out->shifted_sum += shifted_part;
            out->real_count += sum_of(reals);
        }
    }
    if (kept) kept->count = count;
}

/* Keeps all scores. */
static void NAME(keep_all)(const S *row, int64_t n, Kept *kept) {
    int64_t i = 0;
    vi any_nan = {0};
    for (; i + W <= n; i += W) {
        vf x = NAME(load)(row + i);
        store_f32(kept->score + i, x);
        any_nan |= (vi)(x != x);
    }
    for (; i < n; i++) {
        kept->score[i] = NAME(widen)(row[i]);
        any_nan[0] |= kept->score[i] != kept->score[i];
    }
    for (i = 0; i < n; i++) kept->class[i] = (int32_t)i;
    for (int l = 0; l < W; l++) kept->has_nan |= any_nan[l] != 0;
    kept->count = n;
}

static void NAME(collect)(const S *row, int64_t first, int64_t n, Kept *kept, float maximum, int sums, int smoothed, Sums *out) {
    if (!sums)
        NAME(pass_collect)(row, first, n, kept, maximum, 0, 0, out);
    else if (!smoothed)
        NAME(pass_collect)(row, first, n, kept, maximum, 1, 0, out);
    else
        NAME(pass_collect)(row, first, n, kept, maximum, 1, 1, out);
}

/* Keeps the best scores of a row; returns the largest score and, with `sums`, the sums. Those of a long row are made together with
   the maxima, chunk by chunk, while the chunk is in the first cache. */
static float NAME(scan)(const S *row, int64_t n, int groups, int sums, int smoothed, Kept *kept, Sums *out) {
    vf maxima[16], some[16];
    int in_chunks = sums && n >= 2 * CHUNK;
    float maximum = -INFINITY;
    if (in_chunks) {
        for (int64_t first = 0, last; first < n; first = last) {
            last = n - first < 2 * CHUNK ? n : first + CHUNK;
            float top = NAME(group_maxima)(row + first, last - first, groups, some);
            for (int g = 0; g < groups; g++) maxima[g] = first ? largerf(some[g], maxima[g]) : some[g];
            if (top > maximum) {
                double shift = maximum == -INFINITY ? 0 : (double)maximum - (double)top;
                out->exp_sum *= exponential(splat(shift))[0];
                out->shifted_sum += shift * (double)out->real_count;
                maximum = top;
            }
            if (maximum > -INFINITY) NAME(collect)(row, first, last, NULL, maximum, 1, smoothed, out);
        }
    } else
        maximum = NAME(group_maxima)(row, n, groups, maxima);
    int64_t slack = kept->wanted / 8 + 1;
    float minimum = score_of_key(threshold_key((const float *)maxima, groups * W, kept->wanted, slack, NAME(STEP)));
    if (minimum != minimum) minimum = INFINITY, kept->has_nan = 1;
    kept->threshold = splatf(minimum);
    NAME(collect)(row, 0, n, kept, maximum, sums && !in_chunks, smoothed, out);
    return maximum;
}

/* Adds up x, x^2, …, x^k over the scores below `last`, x = exp(rate (score - last)); returns how many scores equal `last`. */
INLINE int64_t NAME(pass_powers)(const S *row, int64_t n, const int k, float last, float rate, double *sums) {
    vf top = splatf(last);
    int64_t equal = 0, i = 0;
    while (i + W <= n) {
        int64_t end = i + 64 * W <= n ? i + 64 * W : n - W + 1;
        vf some[MOST_K];
        vi equals = {0};
        for (int j = 0; j < k; j++) some[j] = (vf){0};
        for (; i < end; i += W) {
            vf s = NAME(load)(row + i);
            equals -= (vi)(s == top);
            vf x = (vf)((vi)exponentialf((s - top) * rate) & (vi)(s < top)), power = x;
            for (int j = 0; j < k; j++) {
                some[j] += power;
                power *= x;
            }
        }
        for (int j = 0; j < k; j++) {
            float part = 0;
            for (int l = 0; l < W; l++) part += some[j][l];
            sums[j] += (double)part;
        }
        equal += sum_of(equals);
    }
    for (; i < n; i++) {
        float s = NAME(widen)(row[i]);
        equal += s == last;
        if (!(s < last)) continue;
        float x = exponentialf(splatf((s - last) * rate))[0], power = x;
        for (int j = 0; j < k; j++) {
            sums[j] += (double)power;
            power *= x;
        }
    }
    return equal;
}

static int64_t NAME(powers)(const S *row, int64_t n, int k, float last, float rate, double *sums) {
    switch (k) {
    case 1: return NAME(pass_powers)(row, n, 1, last, rate, sums);
    case 2: return NAME(pass_powers)(row, n, 2, last, rate, sums);
    case 3: return NAME(pass_powers)(row, n, 3, last, rate, sums);
    case 4: return NAME(pass_powers)(row, n, 4, last, rate, sums);
    case 5: return NAME(pass_powers)(row, n, 5, last, rate, sums);
    case 6: return NAME(pass_powers)(row, n, 6, last, rate, sums);
    case 7: return NAME(pass_powers)(row, n, 7, last, rate, sums);
    default: return NAME(pass_powers)(row, n, 8, last, rate, sums);
    }
}

/* The gradient of the smooth loss by the classes that are no candidates: a polynomial of x. */
static void NAME(write_powers)(const S *scores, S *out, int64_t n, int k, const float *rest, float rate, float factor) {
    float scaled[MOST_K];
    for (int j = 0; j < k; j++) scaled[j] = factor * rest[1 + j];
    vf top = splatf(rest[0]);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        vf x = exponentialf((NAME(load)(scores + i) - top) * rate), sum = {0};
        for (int j = k; j-- > 0;) sum = (sum + scaled[j]) * x;
        NAME(store)(out + i, sum);
    }
    for (; i < n; i++) {
        float x = exponentialf(splatf((NAME(widen)(scores[i]) - rest[0]) * rate))[0], sum = 0;
        for (int j = k; j-- > 0;) sum = (sum + scaled[j]) * x;
        out[i] = NAME(narrow)(sum);
    }
}

/* Writes share exp(score - maximum) + added for the places [first, last) of a row, where padding gets no `added`; zeros without a
   softmax. With `past_caches`, vectors are written around the caches; they must be aligned then. */
INLINE void NAME(write_rest)(const S *scores, S *out, int64_t first, int64_t last, const int softmax, const int smoothed,
                             const int past_caches, float maximum, float share, float added) {
    vf top = splatf(maximum);
    for (int64_t i = first; i < last; i += 2 * W) {
        int whole = i + 2 * W <= last;
        Pair y = {{0}, {0}};
        if (softmax) {
            Pair x = whole ? NAME(load_pair)(scores + i) : NAME(load_last)(scores + i, last - i);
            y.a = share * exponentialf(x.a - top);
            y.b = share * exponentialf(x.b - top);
            if (smoothed) {
                y.a += (vf)((vi)splatf(added) & (vi)(x.a > -INFINITY));
                y.b += (vf)((vi)splatf(added) & (vi)(x.b > -INFINITY));
            }
        }
        if (whole && past_caches)
            NAME(stream_pair)(out + i, y);
        else if (whole)
            NAME(store_pair)(out + i, y);
        else {
            S written[2 * W];
            NAME(store_pair)(written, y);
            memcpy(out + i, written, (size_t)(last - i) * sizeof(S));
        }
    }
}

/* One row of the gradient. */
INLINE void NAME(backward_row)(const Backward *back, int64_t row, float factor, int past_caches) {
    int64_t n = back->n, m = back->m;
    const S *scores = (const S *)back->scores + row * back->stride;
    S *out = (S *)back->out + row * back->out_stride;
    const float *rest = back->rest ? back->rest + (back->powers ? 1 + back->powers : 3) * row : NULL;
    if (back->powers) {
        int none = 1;
        for (int j = 0; j < back->powers; j++) none &= rest[1 + j] == 0;
        if (none)
            memset(out, 0, (size_t)n * sizeof(S));
        else
            NAME(write_powers)(scores, out, n, back->powers, rest, (float)back->rate, factor);
    } else if (m < n) {
        float share = rest ? rest[1] * factor : 0, added = rest ? rest[2] * factor : 0, maximum = rest ? rest[0] : 0;
        int softmax = share != 0 || added != 0;
        if (past_caches) {
            int64_t aligned = (int64_t)(-(uintptr_t)out % BYTES / sizeof(S));
            if (!softmax)
                NAME(write_rest)(scores, out, 0, aligned, 0, 0, 0, 0, 0, 0),
                    NAME(write_rest)(scores, out, aligned, n, 0, 0, 1, 0, 0, 0);
            else
                NAME(write_rest)(scores, out, 0, aligned, 1, 1, 0, maximum, share, added),
                    NAME(write_rest)(scores, out, aligned, n, 1, 1, 1, maximum, share, added);
            streams_end();
        } else if (!softmax)
            memset(out, 0, (size_t)n * sizeof(S));
        else if (added == 0)
            NAME(write_rest)(scores, out, 0, n, 1, 0, 0, maximum, share, 0);
        else
            NAME(write_rest)(scores, out, 0, n, 1, 1, 0, maximum, share, added);
    }
    const float *gradient = back->gradient + row * m;
    const int32_t *classes = back->classes + row * m;
    for (int64_t i = 0; i < m; i++) out[classes[i]] = NAME(narrow)(factor * gradient[i]);
}

#undef S
#undef NAME
