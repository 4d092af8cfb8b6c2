/* The front: checks what Python hands over, splits the rows among threads, chooses the instruction set. */
#include "anyk.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VISIBLE __attribute__((visibility("default")))

/* Since glibc 2.34 it has a new version, which older systems lack. */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.17");
#endif

#define DECLARE(variant)                                                                                              \
    int64_t arena_size_##variant(const Spec *);                                                                       \
    int forward_##variant(const Spec *, const Batch *, int64_t, int64_t, char *);                                     \
    int backward_##variant(const Back *, int64_t, int64_t);                                                           \
    int smooth_##variant(const SmoothSpec *, const Batch *, int64_t, int64_t, char *);                                \
    int64_t best_size_##variant(int64_t, int64_t);                                                                    \
    int best_##variant(const void *, int, int64_t, int64_t, int64_t, int64_t *, int64_t, int64_t, char *);
#define VARIANT_OF(variant) \
    {#variant,           arena_size_##variant, forward_##variant, backward_##variant, \
     smooth_##variant,   best_size_##variant,  best_##variant}

DECLARE(baseline)
#if defined(HAS_AVX2)
DECLARE(avx2)
#endif
#if defined(HAS_AVX512)
DECLARE(avx512)
#endif
#if defined(HAS_AVX512BF16)
DECLARE(avx512bf16)
#endif

typedef struct {
    const char *name;
    int64_t (*arena_size)(const Spec *);
    int (*forward)(const Spec *, const Batch *, int64_t, int64_t, char *);
    int (*backward)(const Back *, int64_t, int64_t);
    int (*smooth)(const SmoothSpec *, const Batch *, int64_t, int64_t, char *);
    int64_t (*best_size)(int64_t, int64_t);
    int (*best)(const void *, int, int64_t, int64_t, int64_t, int64_t *, int64_t, int64_t, char *);
} Variant;

static const Variant variants[] = {
#if defined(HAS_AVX512BF16)
    VARIANT_OF(avx512bf16),
#endif
#if defined(HAS_AVX512)
    VARIANT_OF(avx512),
#endif
#if defined(HAS_AVX2)
    VARIANT_OF(avx2),
#endif
    VARIANT_OF(baseline),
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
    if (known) return known;
    known = variants;
    while (!runs_here(known)) known++;
    atomic_store_explicit(&chosen, known, memory_order_release);
    return known;
}

VISIBLE int anyk_abi(void) { return ANYK_ABI; }
VISIBLE const char *anyk_variant(void) { return variant()->name; }

/* For the tests: takes the variant of this number, 0 being the fastest; 0 if it does not run here. */
VISIBLE int anyk_use(int number) {
    if (number < 0 || number >= VARIANTS || !runs_here(variants + number)) return 0;
    atomic_store(&chosen, variants + number);
    return 1;
}

/* Arenas that nobody uses at the moment: memory from the system comes page by page, which costs more than the work. */
enum { ARENAS = 32 };
typedef struct {
    int64_t size;
    char memory[] __attribute__((aligned(64)));
} Arena;
static _Atomic(Arena *) spare[ARENAS];

static Arena *arena_of(int64_t size) {
    for (int i = 0; i < ARENAS; i++) {
        Arena *arena = atomic_exchange(spare + i, NULL);
        if (!arena) continue;
        if (arena->size >= size) return arena;
        free(arena);
    }
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)size + sizeof(Arena))) return NULL;
    ((Arena *)memory)->size = size;
    return memory;
}

static void give_back(Arena *arena) {
    for (int i = 0; i < ARENAS && arena->size < (8 << 20); i++) { /* at most 256 MiB stay */
        Arena *none = NULL;
        if (atomic_compare_exchange_strong(spare + i, &none, arena)) return;
    }
    free(arena);
}

/* One job: parts [0, parts), taken one after the other by whoever is free. What a part computes does not depend on who. */
typedef struct {
    int (*run)(const void *, int64_t part);
    const void *argument;
    int64_t parts;
    _Atomic int64_t next;
    _Atomic int status;
    _Atomic int working; /* workers that have not finished */
} Job;

static void work_on(Job *job) {
    for (;;) {
        int64_t part = atomic_fetch_add(&job->next, 1);
        if (part >= job->parts) return;
        int status = job->run(job->argument, part);
        if (status != FINE) {
            int fine = FINE;
            atomic_compare_exchange_strong(&job->status, &fine, status);
        }
    }
}

/* Threads that wait for jobs. They belong to the process that made them: after a fork the child makes its own, if asked. */
enum { MOST = 64 };
typedef struct {
    pid_t process;
    atomic_flag busy;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int threads;
    Job *job;
    int wanted;
    _Atomic uint64_t number; /* of the job */
} Pool;
static _Atomic(Pool *) pool;

static inline void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

typedef struct {
    Pool *pool;
    int number;
} Worker;

static void *worker(void *given) {
    Worker me = *(Worker *)given;
    free(given);
    uint64_t seen = 0;
    for (;;) {
        /* The next job often follows at once. */
        for (int i = 0; i < 2000 && atomic_load_explicit(&me.pool->number, memory_order_acquire) == seen; i++) pause_a_little();
        pthread_mutex_lock(&me.pool->lock);
        while (atomic_load(&me.pool->number) == seen) pthread_cond_wait(&me.pool->wake, &me.pool->lock);
        seen = atomic_load(&me.pool->number);
        Job *job = me.number < me.pool->wanted ? me.pool->job : NULL;
        pthread_mutex_unlock(&me.pool->lock);
        if (!job) continue;
        work_on(job);
        atomic_fetch_sub_explicit(&job->working, 1, memory_order_release);
    }
    return NULL;
}

static Pool *pool_here(void) {
    Pool *here = atomic_load(&pool);
    pid_t process = getpid();
    if (here && here->process == process) return here;
    Pool *made = calloc(1, sizeof(Pool));
    if (!made) return NULL;
    made->process = process;
    atomic_flag_clear(&made->busy);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->wake, NULL);
    if (atomic_compare_exchange_strong(&pool, &here, made)) return made; /* the parent's is left alone: it may be in use */
    free(made);
    return atomic_load(&pool);
}

static int run_job(int (*run)(const void *, int64_t), const void *argument, int64_t parts, int threads) {
    Job job = {.run = run, .argument = argument, .parts = parts};
    if (threads > parts) threads = (int)parts;
    if (threads > MOST) threads = MOST;
    Pool *here = threads > 1 ? pool_here() : NULL;
    if (here && !atomic_flag_test_and_set(&here->busy)) {
        while (here->threads < threads - 1) {
            pthread_t thread;
            pthread_attr_t attributes;
            Worker *next = malloc(sizeof(Worker));
            if (!next) break;
            *next = (Worker){here, here->threads};
            pthread_attr_init(&attributes);
            pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
            int failed = pthread_create(&thread, &attributes, worker, next);
            pthread_attr_destroy(&attributes);
            if (failed) {
                free(next);
                break;
            }
            here->threads++;
        }
        int helpers = here->threads < threads - 1 ? here->threads : threads - 1;
        atomic_store(&job.working, helpers);
        pthread_mutex_lock(&here->lock);
        here->job = &job;
        here->wanted = helpers;
        atomic_fetch_add(&here->number, 1);
        pthread_cond_broadcast(&here->wake);
        pthread_mutex_unlock(&here->lock);
        work_on(&job);
        for (int64_t i = 0; atomic_load_explicit(&job.working, memory_order_acquire); i++)
            i < 10000 ? pause_a_little() : (void)sched_yield(); /* a helper that lost its core */
        atomic_flag_clear(&here->busy);
    } else
        work_on(&job); /* another thread of this process has the workers */
    return atomic_load(&job.status);
}

/* Rows in whole blocks, and as few as give every thread several. */
static int64_t rows_in_part(int64_t rows, int threads) {
    int64_t blocks = (rows + LANES - 1) / LANES, each = blocks / (4 * (int64_t)threads);
    return LANES * (threads == 1 ? (blocks ? blocks : 1) : each > 1 ? each : 1);
}

typedef struct {
    const Spec *spec;
    const SmoothSpec *smooth;
    const Batch *batch;
    const Back *back;
    int64_t rows, step;
    const void *scores;
    int64_t stride, n, m;
    int dtype;
    int64_t *out;
} Split;

static int64_t end_of(const Split *split, int64_t part) {
    int64_t end = (part + 1) * split->step;
    return end < split->rows ? end : split->rows;
}

static int forward_part(const void *given, int64_t part) {
    const Split *split = given;
    Arena *arena = arena_of(variant()->arena_size(split->spec));
    if (!arena) return NO_MEMORY;
    int status = variant()->forward(split->spec, split->batch, part * split->step, end_of(split, part), arena->memory);
    give_back(arena);
    return status;
}

static int smooth_part(const void *given, int64_t part) {
    const Split *split = given;
    int64_t n = split->smooth->n, k = split->smooth->k;
    Arena *arena = arena_of(variant()->best_size(n, k + 2 < n ? k + 2 : n));
    if (!arena) return NO_MEMORY;
    int status = variant()->smooth(split->smooth, split->batch, part * split->step, end_of(split, part), arena->memory);
    give_back(arena);
    return status;
}

static int backward_part(const void *given, int64_t part) {
    const Split *split = given;
    return variant()->backward(split->back, part * split->step, end_of(split, part));
}

static int best_part(const void *given, int64_t part) {
    const Split *s = given;
    Arena *arena = arena_of(variant()->best_size(s->n, s->m));
    if (!arena) return NO_MEMORY;
    int status = variant()->best(s->scores, s->dtype, s->stride, s->n, s->m, s->out, part * s->step,
                                 end_of(s, part), arena->memory);
    give_back(arena);
    return status;
}

/* Fewer threads where there is little to do: to wake one takes longer than 20,000 scores. */
static int threads_for(int threads, int64_t scores) {
    int64_t most = scores / 20000;
    return threads < 1 || most < 1 ? 1 : most < threads ? (int)most : threads;
}

/* Losses of all rows, and what becomes of them. */
static int run_batch(int (*run)(const void *, int64_t), Split *split, const Batch *batch, int64_t n, int64_t work) {
    /* Targets are looked at before anything is looked up with them. */
    double counted = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t target = batch->target[row];
        if (target == batch->ignore_index) continue;
        if (target < 0 || target >= n) return BAD_TARGET;
        counted += batch->weight ? (double)batch->weight[target] : 1;
    }
    float *losses = batch->loss;
    Batch own = *batch;
    if (batch->reduction != NONE) {
        losses = own.loss = malloc((size_t)(batch->rows ? batch->rows : 1) * sizeof(float));
        if (!losses) return NO_MEMORY;
    }
    int threads = threads_for(batch->threads, work);
    split->batch = &own;
    split->rows = batch->rows;
    split->step = rows_in_part(batch->rows, threads);
    int status = run_job(run, split, (batch->rows + split->step - 1) / split->step, threads);
    if (batch->reduction != NONE) {
        /* In the order of the rows, whoever computed them. */
        double sum = 0;
        for (int64_t row = 0; status == FINE && row < batch->rows; row++) sum += (double)losses[row];
        /* Nothing counted: NaN, as torch has it, but with a gradient of zero. */
        if (batch->reduction == MEAN) sum = counted != 0 ? sum / counted : (double)NAN;
        *batch->loss = (float)sum;
        if (batch->divisor) *batch->divisor = batch->reduction == MEAN && counted != 0 ? (float)counted : 1;
        free(losses);
    }
    return status;
}

VISIBLE int anyk_forward(const Spec *spec, const Batch *batch) {
    Split split = {.spec = spec};
    return run_batch(forward_part, &split, batch, spec->n, batch->rows * (spec->n + 20 * spec->m));
}

VISIBLE int anyk_smooth(const SmoothSpec *spec, const Batch *batch) {
    Split split = {.smooth = spec};
    return run_batch(smooth_part, &split, batch, spec->n, batch->rows * (spec->n + 1000));
}

VISIBLE int anyk_backward(const Back *back) {
    int threads = threads_for(back->threads, back->rows * back->n);
    Split split = {.back = back, .rows = back->rows, .step = rows_in_part(back->rows, threads)};
    return run_job(backward_part, &split, (back->rows + split.step - 1) / split.step, threads);
}

VISIBLE int anyk_best(const void *scores, int dtype, int64_t rows, int64_t stride, int64_t n, int64_t m,
                      int64_t *out, int wanted_threads) {
    int threads = threads_for(wanted_threads, rows * n);
    Split split = {.rows = rows, .scores = scores, .stride = stride, .n = n, .m = m, .dtype = dtype,
                   .out = out, .step = rows_in_part(rows, threads)};
    return run_job(best_part, &split, (rows + split.step - 1) / split.step, threads);
}
