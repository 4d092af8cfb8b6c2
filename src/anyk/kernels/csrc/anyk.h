/* What Python hands over: native.py has the same structures. */
#ifndef ANYK_H
#define ANYK_H

#include <stdint.h>

#define ANYK_ABI 2
#define LANES 16 /* rows that are computed side by side */

enum { NETWORK, LAPSUM, KSUBSET, SOFTSORT, NEURALSORT };
enum { LOGISTIC, LOGISTIC_ART, CAUCHY, GAUSSIAN, RECIPROCAL, OPTIMAL };
enum { TARGET, SORTED, GIVEN };
enum { SEPARATE, MIXED, OPERATOR, ERROR };
enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { OF_ALL, OF_CLASS, OF_ROW };
enum { MEAN, SUM, NONE };
enum { FINE, BAD_TARGET, PADDED_TARGET, TOO_FEW, NO_MEMORY, STRANGE }; /* STRANGE: NaN where the plain code decides */

typedef struct {
    int64_t n, m, k;
    int32_t operator, swap, wires, family;
    int32_t all_classes, uses_softmax;
    double ce_weight, q, smoothing, scale;
    int64_t size;               /* of the network */
    const int32_t *comparators; /* (size, 3): upper wire, lower wire, layer */
    const int32_t *outputs;     /* (k) */
    const int32_t *numbers;     /* (m + 1, 3): target's wire, first layer, last layer + 1 */
    int64_t sorting_size;
    const int32_t *sorting; /* (sorting_size, 2): a network that sorts all scores, where all of few are kept; or NULL */
} Spec;
enum { MOST_SORTED = 128 };

/* The smooth top-k loss. */
typedef struct {
    int64_t n, k;
    double temperature, margin;
    double gap; /* between the k-th and the next score, from which on the loss is the hard one */
} SmoothSpec;
enum { MOST_K = 8 }; /* power sums in float32 are exact enough up to here */

typedef struct {
    int64_t rows, stride, ignore_index;
    int32_t dtype, p_k_of, reduction, threads;
    const void *scores;
    const int64_t *target;
    const double *p_k;
    const float *weight; /* of the classes, or NULL */
    const float *cross_entropy; /* (rows) over all classes, if the scores are of the candidates alone; or NULL */
    float *loss;         /* (rows), or one number */
    /* What the backward pass needs; NULL: nothing. */
    float *gradient;  /* (rows, m): of the loss of a row by its candidates */
    int32_t *classes; /* (rows, m): which they are */
    float *of_rest;   /* (rows, 3): the other classes' gradient is [1] exp(score - [0]) + [2]; see also Back.powers */
    float *divisor;   /* (1): what the mean divides by */
    float *of_cross_entropy; /* (rows) */
} Batch;

typedef struct {
    int64_t rows, n, m, stride, out_stride, incoming_stride;
    int32_t dtype, powers, threads, single; /* single: one incoming number for all */
    double rate; /* with powers, of_rest is (rows, 1 + powers): [1] x + [2] x^2 + …, x = exp(rate (score - [0])) */
    const void *scores;
    const float *gradient;
    const int32_t *classes;
    const float *of_rest, *divisor;
    const float *incoming;
    void *out;
} Back;

/* rows [first, last); returns a status */
typedef int (*Work)(const void *spec, const void *batch, int64_t first, int64_t last);

#endif
