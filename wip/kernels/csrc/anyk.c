/* What Python calls: chooses the instruction set, splits the rows among threads, reduces the losses. */
#include "anyk.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* For native.py, which compares it with abi.py. */
EXPORT extern const int64_t anyk_layout[], anyk_layout_size;
const int64_t anyk_layout[] = {ANYK_LAYOUT};
const int64_t anyk_layout_size = sizeof anyk_layout / sizeof *anyk_layout;

/* ---- instruction sets ---- */

extern const Variant variant_avx512bf16, variant_avx512, variant_avx2, variant_baseline;
static const Variant *const variants[] = { /* the fastest first */
#if defined(HAS_AVX512BF16)
    &variant_avx512bf16,
#endif
#if defined(HAS_AVX512)
    &variant_avx512,
#endif
#if defined(HAS_AVX2)
    &variant_avx2,
#endif
    &variant_baseline,
};
enum { VARIANTS = sizeof variants / sizeof *variants };
static _Atomic(const Variant *) chosen;

static int runs_here(const Variant *variant) {
#if defined(HAS_AVX2) || defined(HAS_AVX512)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
#if defined(HAS_AVX512BF16)
    if (!strcmp(variant->name, "avx512bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    if (!strcmp(variant->name, "avx512")) return avx512;
    if (!strcmp(variant->name, "avx2")) return avx2;
#endif
    return !strcmp(variant->name, "baseline");
}

static const Variant *variant(void) {
    const Variant *known = atomic_load_explicit(&chosen, memory_order_acquire);
    for (int i = 0; !known; i++)
        if (runs_here(variants[i])) atomic_store_explicit(&chosen, known = variants[i], memory_order_release);
    return known;
}

EXPORT const char *anyk_variant(void) { return variant()->name; }

/* For the tests: takes the variant of this number, 0 being the fastest; returns 0 if it does not run here. */
EXPORT int anyk_use(int number) {
    if (number < 0 || number >= VARIANTS || !runs_here(variants[number])) return 0;
    atomic_store(&chosen, variants[number]);
    return 1;
}

/* ---- memory ---- */

/* Blocks that nobody uses at the moment are kept, up to so many bytes in all: the system hands memory out page by page, which costs
   more than the work. */
enum { SPARE_BLOCKS = 32, MOST_SPARE = 32 << 20 };
typedef struct {
    int64_t size;
    char memory[] __attribute__((aligned(64)));
} MemoryBlock;
static _Atomic(MemoryBlock *) spare[SPARE_BLOCKS];
static _Atomic int64_t spare_bytes;

static void free_block(MemoryBlock *block) {
    atomic_fetch_sub(&spare_bytes, block->size);
    free(block);
}

char *take_memory(int64_t size) {
    for (int i = 0; i < SPARE_BLOCKS; i++) {
        MemoryBlock *block = atomic_exchange(spare + i, NULL);
        if (!block) continue;
        if (block->size < size) {
            free_block(block);
            continue;
        }
        atomic_fetch_sub(&spare_bytes, block->size);
        return block->memory;
    }
    void *made = NULL;
    if (posix_memalign(&made, 64, (size_t)size + sizeof(MemoryBlock))) return NULL;
    MemoryBlock *block = made;
    block->size = size;
    return block->memory;
}

void give_memory_back(char *memory) {
    MemoryBlock *block = (MemoryBlock *)(memory - offsetof(MemoryBlock, memory));
    int fits = atomic_fetch_add(&spare_bytes, block->size) + block->size <= MOST_SPARE;
    for (int i = 0; fits && i < SPARE_BLOCKS; i++) {
        MemoryBlock *none = NULL;
        if (atomic_compare_exchange_strong(spare + i, &none, block)) return;
    }
    free_block(block);
}

/* ---- threads ----

   Why a pool of our own and not OpenMP: torch brings its own OpenMP library, under another name, and a second one in the same
   process means a second set of threads that compete for the cores, or an abort (Intel's). GNU's hangs in a child that was
   forked after its first use, as the workers of a DataLoader are. Apple's compiler has none. torch's own threads
   (at::parallel_for) are out of reach from C. */

/* Work in parts, which are taken one after the other by whoever is free. What a part computes does not depend on who. */
typedef struct {
    Task task;
    void *context;
    int64_t parts;
    _Atomic int64_t next; /* part */
    _Atomic int helpers;  /* that have begun and not finished */
} Job;

static void work_on(Job *job) {
    for (int64_t part; (part = atomic_fetch_add(&job->next, 1)) < job->parts;) job->task(job->context, part);
}

/* Threads that wait for jobs. They belong to the process that made them: after a fork the child makes its own, if asked. */
enum { MOST_THREADS = 64 };
typedef struct {
    pid_t process;
    atomic_flag busy;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int threads;
    Job *job;
    int vacancies;            /* how many more threads may begin with the job */
    _Atomic uint64_t number; /* of the job */
} Pool;
static _Atomic(Pool *) pool;

static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *worker(void *given) {
    Pool *mine = given;
    for (uint64_t seen = 0;;) {
        /* The next job often follows at once. */
        for (int i = 0; i < 2000 && atomic_load_explicit(&mine->number, memory_order_acquire) == seen; i++) pause_a_little();
        pthread_mutex_lock(&mine->lock);
        while (atomic_load(&mine->number) == seen) pthread_cond_wait(&mine->wake, &mine->lock);
        seen = atomic_load(&mine->number);
        Job *job = mine->vacancies > 0 ? mine->job : NULL;
        if (job) mine->vacancies--, atomic_fetch_add(&job->helpers, 1);
        pthread_mutex_unlock(&mine->lock);
        if (!job) continue;
        work_on(job);
        atomic_fetch_sub_explicit(&job->helpers, 1, memory_order_release);
    }
    return NULL;
}

static Pool *pool_of_process(void) {
    Pool *known = atomic_load(&pool);
    pid_t process = getpid();
    if (known && known->process == process) return known;
    Pool *made = calloc(1, sizeof(Pool));
    if (!made) return NULL;
    made->process = process;
    atomic_flag_clear(&made->busy);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->wake, NULL);
    if (atomic_compare_exchange_strong(&pool, &known, made)) return made; /* a parent's is left as it is: it may be locked */
    free(made);
    return atomic_load(&pool);
}

static void start_threads(Pool *mine, int wanted) {
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (mine->threads < wanted && !pthread_create(&thread, &detached, worker, mine)) mine->threads++;
    pthread_attr_destroy(&detached);
}

void each_part(Task task, void *context, int64_t parts, int threads) {
    Job job = {.task = task, .context = context, .parts = parts};
    if (parts == 1) {
        task(context, 0);
        return;
    }
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > parts) threads = (int)parts;
    Pool *mine = threads > 1 ? pool_of_process() : NULL;
    if (!mine || atomic_flag_test_and_set(&mine->busy)) { /* with this very work, or that of another thread of Python's */
        work_on(&job);
        return;
    }
    start_threads(mine, threads - 1);
    pthread_mutex_lock(&mine->lock);
    mine->job = &job;
    mine->vacancies = threads - 1;
    atomic_fetch_add(&mine->number, 1);
    pthread_cond_broadcast(&mine->wake);
    pthread_mutex_unlock(&mine->lock);
    work_on(&job);
    pthread_mutex_lock(&mine->lock);
    mine->vacancies = 0; /* who has not begun by now is not waited for */
    pthread_mutex_unlock(&mine->lock);
    for (int64_t i = 0; atomic_load_explicit(&job.helpers, memory_order_acquire); i++)
        i < 10000 ? pause_a_little() : (void)sched_yield(); /* a helper that lost its core */
    atomic_flag_clear(&mine->busy);
}

typedef struct {
    Kernel kernel;
    const void *call;
    int64_t rows, rows_of_part;
    _Atomic int status;
} RowsJob;

static void run_part(void *context, int64_t part) {
    RowsJob *job = context;
    int64_t first = part * job->rows_of_part, last = first + job->rows_of_part;
    int fine = FINE, status = job->kernel(job->call, first, last < job->rows ? last : job->rows);
    if (status != FINE) atomic_compare_exchange_strong(&job->status, &fine, status);
}

/* Runs a kernel over all rows, whole blocks of them, several parts for each thread. `work` is about how many scores are looked
   at for a row, three or so in a nanosecond. To wake a thread takes as long as 100,000: a second one gains from 250,000 on. */
static int run_rows(Kernel kernel, const void *call, int64_t rows, int64_t block, int64_t work, int threads) {
    int64_t worth = rows * work / 125000, blocks = (rows + block - 1) / block;
    if (threads > worth) threads = (int)worth;
    if (threads < 1) threads = 1;
    int64_t blocks_of_part = threads == 1 ? blocks : blocks / (4 * (int64_t)threads);
    RowsJob job = {.kernel = kernel, .call = call, .rows = rows, .rows_of_part = block * (blocks_of_part > 1 ? blocks_of_part : 1)};
    each_part(run_part, &job, (rows + job.rows_of_part - 1) / job.rows_of_part, threads);
    return atomic_load(&job.status);
}

/* ---- calls ---- */

/* The losses of all rows, and their reduction. */
EXPORT int anyk_forward(const Spec *spec, const Batch *batch) {
    /* Targets are looked at before anything is looked up with them. */
    double counted = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t target = batch->target[row];
        if (target == batch->ignore_index) continue;
        if (target < 0 || target >= spec->n) return BAD_TARGET;
        counted += batch->weight ? (double)batch->weight[target] : 1;
    }
    Batch unreduced = *batch;
    if (batch->reduction != NONE) {
        unreduced.loss = malloc((size_t)(batch->rows ? batch->rows : 1) * sizeof(float));
        if (!unreduced.loss) return NO_MEMORY;
    }
    int64_t work = spec->n + (spec->operator == SMOOTH ? 1000 : 20 * spec->m);
    int status = run_rows(variant()->forward, &(LossCall){spec, &unreduced}, batch->rows, LANES, work, batch->threads);
    double divisor = batch->reduction == MEAN && counted != 0 ? counted : 1;
    if (batch->divisor) *batch->divisor = (float)divisor;
    if (batch->reduction != NONE) {
        /* In the order of the rows, whoever computed them. */
        double sum = 0;
        for (int64_t row = 0; status == FINE && row < batch->rows; row++) sum += (double)unreduced.loss[row];
        /* Nothing counted: NaN, as torch has it, but with a gradient of zero. */
        *batch->loss = batch->reduction == MEAN && counted == 0 ? NAN : (float)(sum / divisor);
        free(unreduced.loss);
    }
    return status;
}

EXPORT int anyk_backward(const Backward *back) {
    return run_rows(variant()->backward, back, back->rows, LANES, back->n, back->threads);
}

EXPORT int anyk_best(const Rows *rows) { return run_rows(variant()->best, rows, rows->rows, LANES, rows->n, rows->threads); }

/* A row is a part of the work; or it is split itself, where there are few and long ones. */
static int run_masks(Kernel kernel, const Rows *rows) {
    int splits_rows = rows->operator != KSUBSET && rows->rows < 4 * (int64_t)rows->threads && rows->n >= 4 * PART;
    return run_rows(kernel, rows, rows->rows, 1, 4 * rows->n, splits_rows ? 1 : rows->threads);
}

EXPORT int anyk_mask(const Rows *rows) { return run_masks(variant()->mask, rows); }

EXPORT int anyk_mask_backward(const Rows *rows) { return run_masks(variant()->mask_backward, rows); }

EXPORT int anyk_draw(const Rows *rows) { return run_rows(variant()->draw, rows, rows->rows, 1, 40 * rows->n, rows->threads); }

EXPORT int anyk_order(const Rows *rows) { return run_rows(variant()->order, rows, rows->rows, 1, 4 * rows->n, rows->threads); }

EXPORT int anyk_network_mask(const Rows *rows) {
    return run_rows(variant()->network_mask, rows, rows->rows, LANES, 4 * rows->size, rows->threads);
}
