#ifndef TANDEM_TESTS_SAMPLE_TWIN_H
#define TANDEM_TESTS_SAMPLE_TWIN_H

/* Sampling's twin: sorts whole rows and sums in double, straight from the definitions. And what the
 * tests of `sample` and `accept` share. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* The distribution of a row of n columns (tokens ids[0..n), NULL: 0..n) after p's penalties, bans,
 * temperature (> 0) and filters. False where a threshold lies within 1e-6 of a tie in probability,
 * so that rounding would decide. */
bool twin_probs(const float *logits, int n, const int32_t *ids, const struct kern_sample *p,
                const struct kern_history *h, double *probs);

/* One that asks for nothing: temperature 1, no filter, no penalty, no log-probabilities. */
struct kern_sample twin_neutral(void);

/* Peaked like a model's: most far below the best few. */
void twin_logits(float *x, int n, uint64_t salt, float spread);

/* The uniform that a row's draw of this purpose is made from. */
double twin_uniform(const struct kern_sample *p, int purpose);

/* Index that u draws from p[n] by the running sum, *margin how far u lay from another one. */
int twin_invert(const double *p, int n, double u, double *margin);

/* Chi-square of counts[n], `total` in all, against the law want[n], over its limit: above 1 at a
 * false alarm rate of 1e-6. Cells that expect fewer than 10 are pooled; infinite where a cell that
 * expects 0 is not empty. */
double twin_chi_excess(const int *counts, const double *want, int n, int total);

/* ---- Rounds ---- */

/* TWIN_RIGHT, or what a decider may get wrong. */
enum twin_fault {
    TWIN_RIGHT,
    TWIN_RESIDUAL_IS_P,     /* a rejected token is replaced by a draw from p */
    TWIN_RESIDUAL_SHARES_U, /* ... by the very uniform that rejected it */
    TWIN_ACCEPTS_BY_P,      /* u < p */
    TWIN_ACCEPTS_HALF,      /* where p >= q / 2 */
    TWIN_Q_UNFILTERED,      /* q taken for uniform */
    TWIN_N_FAULTS,
};

struct twin_round {
    int n_accepted;
    int32_t token[KERN_MAX_DRAFT + 1];
    double margin; /* how far every decision lay from another one */
};

/* A round in double, straight from the algorithm; temperature > 0, draws by inverse CDF, at most 64
 * tokens, valid q. */
struct twin_round twin_accept(int vocab, const float *logits, size_t stride,
                              const struct kern_sample *params, const struct kern_history *h,
                              const struct kern_round *r, const int32_t *draft,
                              const struct kern_draft_probs *q, enum twin_fault fault);

#endif
