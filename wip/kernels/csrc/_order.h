/* Soft ranks and sorts of rows that are in descending order: LapSum's ranks are sums over pairs of scores, those of Permutahedron
   and its sort are means over blocks (anyk/operators/lapsum.py, permutahedron.py). */

typedef struct {
    double total; /* of the values of the block */
    int64_t size, start;
} Merged;

typedef struct {
    const Rows *rows;
    float *decay, *given; /* (n) */
    double *sums;         /* (n) */
    Merged *blocks;       /* (n) */
} OrderWork;

static void lay_out_order(void *given, Arena *arena) {
    OrderWork *work = given;
    int64_t n = work->rows->n;
    if (work->rows->operator == LAPSUM) {
        work->decay = take(arena, (n + W) * 4);
        work->given = take(arena, n * 4);
        work->sums = take(arena, n * 8);
    } else
        work->blocks = take(arena, n * (int64_t)sizeof(Merged));
}

/* One row. What is read and written where the scores stood is so once: that is memory in any order. */
typedef struct {
    const float *s;
    const int64_t *order;
    const float *incoming; /* or NULL: forward */
    float *out;
} OrderRow;

/* The factors e^(-(s_(i-1) - s_i) / t) between neighbours; the first is 0. */
static void find_decays(const float *s, int64_t n, float rate, float *decay) {
    decay[0] = 0;
    for (int64_t i = 1; i < n; i += W)
        store_f32(decay + i, exponentialf((load_some(s, FLOAT32, i, n) - load_some(s, FLOAT32, i - 1, n)) * rate));
}

static void laplace_ranks(const OrderWork *work, const OrderRow *row) {
    int64_t n = work->rows->n;
    double better = 0, worse = 0;
    for (int64_t i = 0; i < n; i++) work->sums[i] = better = (double)work->decay[i] * (better + (i > 0));
    for (int64_t i = n; i-- > 0;) {
        if (i + 1 < n) worse = (double)work->decay[i + 1] * (worse + 1);
        row->out[row->order[i]] = (float)(1 + (double)i + (worse - work->sums[i]) / 2);
    }
}

static double laplace_ranks_backward(const OrderWork *work, const OrderRow *row) {
    int64_t n = work->rows->n;
    double ones = 0, sum = 0, by_rate = 0, half = work->rows->rate / 2;
    const float *decay = work->decay;
    float *given = work->given;
    for (int64_t i = 0; i < n; i++) given[i] = row->incoming[row->order[i]];
    for (int64_t i = 0; i < n; i++) {
        ones = (double)decay[i] * (ones + (i > 0));
        sum = (double)decay[i] * (sum + (i > 0 ? (double)given[i - 1] : 0));
        work->sums[i] = sum - (double)given[i] * ones;
    }
    ones = sum = 0;
    for (int64_t i = n; i-- > 0;) {
        if (i + 1 < n) {
            ones = (double)decay[i + 1] * (ones + 1);
            sum = (double)decay[i + 1] * (sum + (double)given[i + 1]);
        }
        double value = half * (work->sums[i] + sum - (double)given[i] * ones);
        row->out[row->order[i]] = (float)value;
        by_rate += value * ((double)row->s[i] - (double)row->s[0]);
    }
    return by_rate;
}

/* The blocks of the ascending sequence that is nearest to y_i = -s_i rate - i (ranks) or s_i + i / rate (sort): neighbours that
   descend are pooled. Returns how many there are. */
static int64_t pool_row(const Rows *rows, const float *s, Merged *pools) {
    int64_t count = 0;
    for (int64_t i = 0; i < rows->n; i++) {
        double relative = (double)s[i] - (double)s[0];
        double y = rows->gives == SORT ? relative + (double)i * rows->rate : -relative * rows->rate - (double)i;
        Merged block = {y, 1, i};
        while (count > 0 && pools[count - 1].total * (double)block.size >= block.total * (double)pools[count - 1].size) {
            count--;
            block = (Merged){pools[count].total + block.total, pools[count].size + block.size, pools[count].start};
        }
        pools[count++] = block;
    }
    return count;
}

/* Ranks: within a block, mean place + mean of s rate - s rate. Sort: mean of s + (mean place - place) rate. */
static void permutahedron_row(const OrderWork *work, const OrderRow *row) {
    const Rows *rows = work->rows;
    const float *s = row->s;
    int64_t count = pool_row(rows, s, work->blocks);
    for (int64_t b = 0; b < count; b++) {
        int64_t start = work->blocks[b].start, end = start + work->blocks[b].size;
        double mean = 0, place = (double)(start + end - 1) / 2;
        for (int64_t i = start; i < end; i++) mean += (double)s[i] - (double)s[start];
        mean /= (double)(end - start);
        for (int64_t i = start; i < end; i++)
            if (rows->gives == SORT)
                row->out[i] = (float)((double)s[start] + mean + (place - (double)i) * rows->rate);
            else
                row->out[row->order[i]] = (float)(1 + place + (mean - ((double)s[i] - (double)s[start])) * rows->rate);
    }
}

static double permutahedron_backward(const OrderWork *work, const OrderRow *row) {
    const Rows *rows = work->rows;
    int is_sort = rows->gives == SORT;
    int64_t count = pool_row(rows, row->s, work->blocks);
    double by_rate = 0;
    for (int64_t b = 0; b < count; b++) {
        int64_t start = work->blocks[b].start, end = start + work->blocks[b].size;
        double mean = 0, place = (double)(start + end - 1) / 2;
        for (int64_t i = start; i < end; i++) mean += (double)row->incoming[is_sort ? i : row->order[i]];
        mean /= (double)(end - start);
        for (int64_t i = start; i < end; i++) {
            double apart = is_sort ? 0 : mean - (double)row->incoming[row->order[i]];
            row->out[row->order[i]] = (float)(is_sort ? mean : apart * rows->rate);
            by_rate += is_sort ? (double)row->incoming[i] * (place - (double)i) : apart * ((double)row->s[i] - (double)row->s[start]);
        }
    }
    return by_rate * rows->rate;
}

static int order_rows(void *given, int64_t first, int64_t last) {
    OrderWork *work = given;
    const Rows *rows = work->rows;
    for (int64_t r = first; r < last; r++) {
        OrderRow row = {.s = (const float *)rows->scores + r * rows->n, .order = rows->order + r * rows->n,
                        .out = (float *)rows->out + r * rows->n};
        if (rows->incoming) row.incoming = (const float *)rows->incoming + r * rows->incoming_stride;
        double by_rate = 0;
        if (rows->operator == LAPSUM) {
            find_decays(row.s, rows->n, (float)rows->rate, work->decay);
            if (row.incoming)
                by_rate = laplace_ranks_backward(work, &row);
            else
                laplace_ranks(work, &row);
        } else if (row.incoming)
            by_rate = permutahedron_backward(work, &row);
        else
            permutahedron_row(work, &row);
        if (rows->grad_rate) rows->grad_rate[r] = by_rate;
    }
    return FINE;
}

static int order(const void *call, int64_t first, int64_t last) {
    return with_memory(lay_out_order, order_rows, &(OrderWork){.rows = call}, first, last);
}
