/* What reads and writes scores, once for each of their dtypes: S is the stored type, NAME(x) the name for it. */

/* The largest value, and of each of `groups` strided groups of the row the largest: maxima (groups vectors). Scores that do
   not fill all groups are in none of them: the threshold that is made of the maxima is as good without them. */
INLINE float NAME(pass_groups)(const S *row, int64_t n, const int groups, vf *maxima) {
    vf best[16];
    for (int g = 0; g < groups; g++) best[g] = NAME(load)(row + g * W);
    int64_t i = (int64_t)groups * W;
    for (; i + groups * W <= n; i += groups * W)
        for (int g = 0; g < groups; g++) best[g] = largerf(NAME(load)(row + i + g * W), best[g]);
    vf top = best[0];
    for (int g = 0; g < groups; g++) {
        maxima[g] = best[g];
        top = largerf(best[g], top);
    }
    for (; i + W <= n; i += W) top = largerf(NAME(load)(row + i), top);
    float most = -INFINITY;
    for (int l = 0; l < W; l++) most = top[l] > most ? top[l] : most;
    for (; i < n; i++) {
        float x = NAME(one)(row[i]);
        most = x > most ? x : most;
    }
    return most;
}

static float NAME(maxima)(const S *row, int64_t n, int groups, vf *maxima) {
    switch (groups) {
    case 1: return NAME(pass_groups)(row, n, 1, maxima);
    case 2: return NAME(pass_groups)(row, n, 2, maxima);
    case 4: return NAME(pass_groups)(row, n, 4, maxima);
    case 8: return NAME(pass_groups)(row, n, 8, maxima);
    default: return NAME(pass_groups)(row, n, 16, maxima);
    }
}

static float NAME(most)(const S *row, int64_t n) {
    float most = -INFINITY;
    int64_t i = 0;
    if (n >= W) {
        vf top = NAME(load)(row);
        for (i = W; i + W <= n; i += W) top = largerf(NAME(load)(row + i), top);
        for (int l = 0; l < W; l++) most = top[l] > most ? top[l] : most;
    }
    for (; i < n; i++) {
        float x = NAME(one)(row[i]);
        most = x > most ? x : most;
    }
    return most;
}

/* Collects what reaches the threshold; with sums, also e^(score - most) and, if smoothed, score - most. */
INLINE void NAME(pass_collect)(const S *row, int64_t n, Kept *kept, float most, const int sums, const int smoothed, Sums *out) {
    vf top = allf(most);
    double sum = 0, total = 0;
    int64_t real = 0, i = 0;
    while (i + W <= n) {
        /* Float sums of few numbers, their sum in double: no digits are lost over a long row. */
        int64_t end = i + 64 * W <= n ? i + 64 * W : n - W + 1;
        vf some = {0}, shifted_sum = {0};
        vi reals = {0}, tops = {0};
        for (; i < end; i += W) {
            vf x = NAME(load)(row + i);
            uint32_t hits = kept ? reach(x, kept->threshold) : 0;
            if (__builtin_expect(hits != 0, 0)) {
                do {
                    int l = __builtin_ctz(hits);
                    hits &= hits - 1;
                    kept->score[kept->count] = NAME(one)(row[i + l]);
                    kept->class[kept->count++] = (int32_t)(i + l);
                } while (hits);
                if (kept->count > kept->room) compact(kept);
            }
            if (sums) {
                vf shifted = x - top;
                /* The largest are counted: beside their 1 the digits of the others would go, which are the target's gradient
                   where it is the largest. */
                vi is_top = shifted == 0;
                tops -= is_top;
                some += (vf)((vi)exponentialf(shifted) & ~is_top);
                if (smoothed) {
                    vi is_real = x > -INFINITY;
                    reals -= is_real;
                    shifted_sum += (vf)((vi)shifted & is_real);
                }
            }
        }
        if (sums) {
            double part = 0, shifted_part = 0;
            for (int l = 0; l < W; l++) part += (double)some[l], shifted_part += (double)shifted_sum[l];
            sum += part + sum_of(tops);
            total += shifted_part;
            real += sum_of(reals);
        }
    }
    for (; i < n; i++) {
        float x = NAME(one)(row[i]);
        if (kept && !(x < kept->threshold[0])) {
            kept->score[kept->count] = x;
            kept->class[kept->count++] = (int32_t)i;
            if (kept->count > kept->room) compact(kept);
        }
        if (sums) {
            sum += exponentialf(allf(x - most))[0];
            if (smoothed && x > -INFINITY) real++, total += x - most;
        }
    }
    if (sums) *out = (Sums){sum, total, real};
}

/* All scores, where all are kept. */
static void NAME(keep_all)(const S *row, int64_t n, Kept *kept) {
    int64_t i = 0;
    vi strange = {0};
    for (; i + W <= n; i += W) {
        vf x = NAME(load)(row + i);
        store_f32(kept->score + i, x);
        strange |= (vi)(x != x);
    }
    for (; i < n; i++) {
        kept->score[i] = NAME(one)(row[i]);
        strange[0] |= kept->score[i] != kept->score[i];
    }
    for (i = 0; i < n; i++) kept->class[i] = (int32_t)i;
    for (int l = 0; l < W; l++) kept->nan |= strange[l] != 0;
    kept->count = n;
}

static void NAME(collect)(const S *row, int64_t n, Kept *kept, float most, int sums, int smoothed, Sums *out) {
    if (!sums)
        NAME(pass_collect)(row, n, kept, most, 0, 0, out);
    else if (!smoothed)
        NAME(pass_collect)(row, n, kept, most, 1, 0, out);
    else
        NAME(pass_collect)(row, n, kept, most, 1, 1, out);
}

/* One row of the gradient. */
INLINE void NAME(back_row)(const Back *back, int64_t row, float factor) {
    int64_t n = back->n, m = back->m;
    const S *scores = (const S *)back->scores + row * back->stride;
    S *out = (S *)back->out + row * back->out_stride;
    const float *rest = back->of_rest ? back->of_rest + 3 * row : NULL;
    if (m < n) {
        float share = rest ? rest[1] * factor : 0, added = rest ? rest[2] * factor : 0;
        if (rest && (share != 0 || added != 0)) {
            vf top = allf(rest[0]);
            int64_t i = 0;
            if (added == 0)
                for (; i + W <= n; i += W) NAME(store)(out + i, share * exponentialf(NAME(load)(scores + i) - top));
            for (; i + W <= n; i += W) {
                vf x = NAME(load)(scores + i);
                NAME(store)(out + i, share * exponentialf(x - top) + (vf)((vi)allf(added) & (vi)(x > -INFINITY)));
            }
            for (; i < n; i++) {
                float x = NAME(one)(scores[i]);
                out[i] = NAME(narrow)(share * exponentialf(allf(x - rest[0]))[0] + (x > -INFINITY ? added : 0));
            }
        } else
            memset(out, 0, (size_t)n * sizeof(S));
    }
    const float *gradient = back->gradient + row * m;
    const int32_t *classes = back->classes + row * m;
    for (int64_t i = 0; i < m; i++) out[classes[i]] = NAME(narrow)(factor * gradient[i]);
}

#undef S
#undef NAME
