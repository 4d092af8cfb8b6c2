/* What Python hands over, and what anyk.c and kernels.c know of each other.

   abi.py has the structures' fields in the same order: native.py uses no library where the two differ. abi.h, which build.py
   writes, has the constants of abi.py. Shapes stand in brackets. A pointer that may be NULL says so. */
#ifndef ANYK_H
#define ANYK_H

#include <stddef.h>
#include <stdint.h>

/* Newer versions of these, which older systems lack, came with glibc 2.29 (exp, log) and 2.34 (pthread_create). */
#if defined(__GLIBC__) && defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#endif
#if defined(OLDEST)
__asm__(".symver exp,exp@" OLDEST);
__asm__(".symver log,log@" OLDEST);
__asm__(".symver pthread_create,pthread_create@" OLDEST);
#endif

#include "abi.h"

#define LANES 16 /* rows that are computed side by side */
#define PART 16384 /* scores of a long row that a thread takes at a time, and that are added up by themselves */

/* A top-k loss for rows of n scores: anyk/kernels/loss_description.py. */
typedef struct {
    int64_t n, m, k; /* classes, candidates of a row, entries of P_K */
    int32_t operator, swap, wires, family;
    int32_t all_classes;  /* the softmax, if there is one, is over all classes and not over the candidates */
    int32_t uses_softmax; /* a softmax over all classes must be computed */
    double ce_weight, q, smoothing;
    double scale;               /* the scores are divided by it */
    int64_t size;               /* of the network: its number of comparators */
    const int32_t *comparators; /* (size, 3): upper wire, lower wire, layer */
    const int32_t *outputs;     /* (k): the wires that the best, the second best, … end on */
    const int32_t *starts;      /* (m + 1, 3), by the number of candidates that are not padding: the wire that the target starts
                                   on, the first layer that the row runs through, and the layer behind the last */
    int64_t sorter_size;
    const int32_t *sorter; /* (sorter_size, 2): the comparators of a hard network that sorts all n scores; NULL: none is used */
} Spec;

/* The smooth top-k loss: anyk/baselines.py. */
typedef struct {
    int64_t n, k;
    double temperature, margin;
    double gap; /* between the k-th and the next score, from which on the loss is the hard one */
} SmoothSpec;

/* One call of the forward pass. For the backward pass it keeps, of each row, the gradient by its m candidates (smooth top-k: by
   the k best others and the target), and a few coefficients from which the gradient by any other class follows, given its score:

       top-k losses         rest (rows, 3):      rest[1] exp(score - rest[0]) + rest[2]
       smooth top-k loss    rest (rows, 1 + k):  sum over j = 1 … k of rest[j] x^j, x = exp(rate (score - rest[0])) */
typedef struct {
    int64_t rows, stride, ignore_index;
    int32_t dtype, p_k_of, reduction, threads;
    const void *scores;         /* (rows, n); the rows are `stride` numbers apart */
    const int64_t *target;      /* (rows) */
    const double *p_k;          /* (k), (n, k) or (rows, k), as p_k_of says */
    const float *weight;        /* (n) of the classes, or NULL */
    const float *cross_entropy; /* (rows) over all classes, where the scores are the candidates' alone; or NULL */
    float *loss;                /* (rows), or one number if reduced */
    float *gradient;            /* (rows, m), or NULL: no backward pass will follow, and the rest is NULL too */
    int32_t *classes;           /* (rows, m): which classes the candidates are */
    float *rest;                /* as above; NULL: the gradient by the other classes is zero, or there are none */
    float *divisor;             /* (1): what the mean is divided by */
    float *grad_cross_entropy;  /* (rows): the gradient by the cross-entropy that was given, or NULL */
} Batch;

/* One call of the backward pass: what the forward pass has kept, and the gradient that came in. */
typedef struct {
    int64_t rows, n, m, stride, out_stride, incoming_stride;
    int32_t dtype;
    int32_t powers; /* 0 for the top-k losses; k for the smooth one, whose rate is below */
    int32_t threads;
    int32_t single; /* one incoming number for all rows */
    double rate;
    const void *scores;
    const float *gradient;
    const int32_t *classes;
    const float *rest, *divisor; /* either may be NULL */
    const float *incoming;
    void *out; /* (rows, n): the gradient by the scores, of their dtype */
} Backward;

/* The m best classes of each row. */
typedef struct {
    int64_t rows, n, m, stride;
    int32_t dtype, threads;
    const void *scores;
    int64_t *classes; /* (rows, m): the result, descending by score */
} Selection;

/* Masks of rows of scores: anyk/operators/lapsum.py, permutahedron.py and ksubset.py. */
typedef struct {
    int64_t rows, n, stride;
    int32_t dtype, threads, kind; /* kind: LAPSUM, PERMUTAHEDRON or KSUBSET */
    int32_t unused;
    double k, rate; /* rate: 1 / temperature */
    const void *scores;
    const double *ks;  /* (rows): one k for each row, or NULL: k for all */
    double *threshold; /* (rows): infinite where nothing or everything is chosen. KSUBSET: (rows, 3), as _subset.h has it */
    void *out;         /* (rows, n), of the dtype of the scores; NULL: the thresholds are all that is wanted */
} Mask;

typedef struct {
    int64_t rows, n, stride, incoming_stride;
    int32_t dtype, threads, kind;
    int32_t of_threshold; /* the gradients are those of the thresholds, of LapSum */
    double rate;
    const void *scores;
    const double *threshold;
    const void *incoming; /* (rows, n), of the dtype of the scores, as is the result; of the thresholds: doubles (rows) */
    void *out;
    double *grad_k, *grad_rate; /* (rows), or NULL */
} MaskBackward;

/* Soft ranks or sorts of rows that are in descending order, or their gradients. */
typedef struct {
    int64_t rows, n;
    int32_t threads, operator, kind; /* kind: RANKS or SORT */
    int32_t unused;
    double rate;           /* 1 / temperature */
    const float *scores;   /* (rows, n), descending */
    const int64_t *order;  /* (rows, n): where they stood */
    const float *incoming; /* (rows, n), or NULL: forward */
    float *out;            /* (rows, n): ranks where the scores stood, or scores in order; or the gradient where they stood */
    double *grad_rate;     /* (rows), or NULL */
} Ranking;

/* Random subsets of size k: anyk/operators/ksubset.py. */
typedef struct {
    int64_t rows, n, k, stride;
    int32_t dtype, threads;
    double rate; /* 1 / temperature */
    const void *scores;
    const double *uniform; /* (rows, size - 1): random numbers between 0 and 1; size: the least power of 2 that is not below n */
    void *out;             /* (rows, n), of the dtype of the scores: zeros and ones */
} Draw;

/* Masks by a sorting network of rows that are in descending order, or their gradients: anyk/operators/sorting_network.py. */
typedef struct {
    int64_t rows, n, k, size; /* size: the number of comparators */
    int32_t threads, swap;
    double rate;                /* the scores are multiplied by it */
    const int32_t *comparators; /* (size, 3): upper wire, lower wire, layer */
    const int32_t *outputs;     /* (k): the wires that the best, the second best, … end on */
    const float *scores;        /* (rows, n), descending and finite */
    const int64_t *order;       /* (rows, n): where they stood */
    const float *incoming;      /* (rows, n), or NULL: forward */
    float *out;                 /* (rows, n): the mask, or the gradient, where the scores stood */
    double *grad_rate;          /* (rows), or NULL: the gradient by the rate, times the rate */
} NetworkMask;

/* What a kernel gets: those of these that are its own. */
typedef struct {
    const Spec *spec;
    const SmoothSpec *smooth;
    const Batch *batch;
    const Backward *backward;
    const Selection *selection;
    const Mask *mask;
    const MaskBackward *mask_backward;
    const Ranking *ranking;
    const Draw *draw;
    const NetworkMask *network_mask;
} Call;

/* Computes the rows [first, last) and returns a Status. */
typedef int (*Kernel)(const Call *call, int64_t first, int64_t last);

/* kernels.c, compiled for one instruction set. */
typedef struct {
    const char *name;
    Kernel forward, smooth, backward, best, mask, mask_backward, ranking, draw, network_mask;
} Variant;

/* Working memory, aligned to 64 bytes and not cleared; NULL if there is none. */
char *take_memory(int64_t size);
void give_memory_back(char *memory);

/* Calls a task with the numbers 0 … parts - 1, by so many threads. A task may do the same: alone, as the threads are busy. */
typedef void (*Task)(void *context, int64_t part);
void each_part(Task task, void *context, int64_t parts, int threads);

#endif
