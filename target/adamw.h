#ifndef TANDEM_TARGET_ADAMW_H
#define TANDEM_TARGET_ADAMW_H

/* Private: AdamW (Loshchilov and Hutter 2019, algorithm 2) over one array, with the gradient cut to
 * a norm of 1 before. Element by element and sums over fixed runs: the same bits for any number of
 * threads. */

#include <stddef.h>

struct threads;

struct adamw {
    size_t n;
    float *param, *grad, *m, *v; /* [n], the caller's */
    size_t n_decay;              /* of the first n_decay parameters: weights, not biases */
    double weight_decay;
};

/* Step number `step` (from 1) at that learning rate. sums: [adamw_n_runs(n)] scratch. Returns the
 * gradient's norm before it was cut. */
double target__adamw(const struct adamw *a, int step, double learning_rate, double *sums,
                     struct threads *threads);
size_t target__adamw_n_runs(size_t n);

/* Warm-up to `peak` over n_warmup steps, then a cosine down to a twentieth of it. step from 1. */
double target__learning_rate(int step, int n_steps, int n_warmup, double peak);

#endif
