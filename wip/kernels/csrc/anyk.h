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

/* A loss of rows of n scores: Loss and SmoothLoss of anyk/kernels/losses.py. */
typedef struct {
    int64_t n, m, k; /* classes, candidates of a row, entries of P_K */
    int32_t operator, swap, wires, family;
    int32_t all_classes;  /* the softmax, if there is one, is over all classes and not over the candidates */
    int32_t uses_softmax; /* a softmax over all classes must be computed */
    double ce_weight, q, smoothing;
    double scale;               /* the scores are divided by it */
    double margin, gap;         /* SMOOTH: from this gap on between the k-th and the next score, the loss is the hard one */
    int64_t size;               /* of the network: its number of comparators */
    const int32_t *comparators; /* (size, 3): upper wire, lower wire, layer */
    const int32_t *outputs;     /* (k): the wires that the best, the second best, … end on */
    const int32_t *starts;      /* (m + 1, 3), by the number of candidates that are not padding: the wire that the target starts
                                   on, the first layer that the row runs through, and the layer behind the last */
} Spec;

/* One call of the forward pass. For the backward pass it keeps, of each row, the gradient by its m candidates (SMOOTH: by the k
   best others and the target), and a few coefficients from which the gradient by any other class follows, given its score:

       top-k losses    rest (rows, 3):      rest[1] exp(score - rest[0]) + rest[2]
       SMOOTH          rest (rows, 1 + k):  sum over j = 1 … k of rest[j] x^j, x = exp(rate (score - rest[0])) */
typedef struct {
    int64_t rows, stride, ignore_index;
    int32_t dtype, p_k_of, reduction, threads;
    const void *scores;         /* (rows, n); the rows are `stride` numbers apart */
    const int64_t *target;      /* (rows) */
    const double *p_k;          /* (k), (n, k) or (rows, k), as p_k_of says */
    const float *weight;        /* (n) of the classes, or NULL */
    const float *cross_entropy; /* (rows) over all classes, where the scores are the candidates' alone; or NULL */
    float *loss;                /* (rows), or one number if reduced */
    float *gradient;            /* (rows, m), or NULL: no backward pass will follow, and what follows here is NULL too */
    int32_t *classes;           /* (rows, m): which classes the candidates are */
    float *rest;                /* as above; NULL: the gradient by the other classes is zero, or there are none */
    float *divisor;             /* (1): what the mean is divided by */
    float *grad_cross_entropy;  /* (rows): the gradient by the cross-entropy that was given, or NULL */
} Batch;

/* One call of the backward pass: what the forward pass has kept, and the gradient that came in. */
typedef struct {
    int64_t rows, n, m, stride, incoming_stride;
    int32_t dtype;
    int32_t powers; /* 0 for the top-k losses; k for SMOOTH, whose rate is below */
    int32_t threads;
    int32_t single; /* one incoming number for all rows */
    double rate;
    const void *scores;
    const float *gradient;
    const int32_t *classes;
    const float *rest, *divisor; /* rest may be NULL */
    const float *incoming;
    void *out; /* (rows, n): the gradient by the scores, of their dtype */
} Backward;

/* Whatever else is made of rows of scores, or the gradient of it. Each function has its own use for the fields:

       best            out (rows, k) int64: the k best classes, descending by score
       mask            out (rows, n): the mask; NULL: the thresholds are all that is wanted. saved (rows), or of KSUBSET (rows, 3)
       mask_backward   of `gives`, MASK or THRESHOLD: out (rows, n), from `saved`
       draw            out (rows, n): zeros and ones, from `seeds`
       order           of `gives`, RANKS or SORT, of scores in descending order, float32: out (rows, n) float32, of RANKS where
                       the scores stood. With `incoming`: the gradient, where the scores stood
       network_mask    of finite scores in descending order, float32: out (rows, n) float32, where the scores stood: the mask, or
                       with `incoming` the gradient */
typedef struct {
    int64_t rows, n, stride, incoming_stride; /* rows of scores and of incoming gradients are so many numbers apart */
    int32_t dtype, threads, operator, gives, swap;
    double k, rate;             /* rate: what the scores are multiplied by */
    const void *scores;         /* (rows, n) */
    const double *ks;           /* (rows): one k for each row, or NULL: k for all */
    const int64_t *order;       /* (rows, n): where the scores stood, if they are in order */
    int64_t size;               /* of the network: its number of comparators */
    const int32_t *comparators; /* (size, 3): upper wire, lower wire, layer */
    const int32_t *outputs;     /* (k): the wires that the best, the second best, … end on */
    const uint64_t *seeds;      /* (rows): random bits */
    const void *incoming;       /* (rows, n), of the dtype of the result; of thresholds (rows) double; NULL: forward */
    double *saved;              /* what the backward pass needs: thresholds, infinite where nothing or everything is chosen */
    void *out;
    double *grad_k, *grad_rate; /* (rows), or NULL; by the rate, times the rate */
} Rows;

/* Computes the rows [first, last) of a call and returns a Status. */
typedef int (*Kernel)(const void *call, int64_t first, int64_t last);

/* The call of the forward pass. */
typedef struct {
    const Spec *spec;
    const Batch *batch;
} LossCall;

/* kernels.c, compiled for one instruction set. */
typedef struct {
    const char *name;
    Kernel forward, backward, best, mask, mask_backward, draw, order, network_mask;
} Variant;

/* Working memory, aligned to 64 bytes and not cleared; NULL if there is none. */
char *take_memory(int64_t size);
void give_memory_back(char *memory);

/* Calls a task with the numbers 0 … parts - 1, by so many threads. A task may do the same: alone, as the threads are busy. */
typedef void (*Task)(void *context, int64_t part);
void each_part(Task task, void *context, int64_t parts, int threads);

#endif
