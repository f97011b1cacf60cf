#ifndef TANDEM_TESTS_ACCEPT_VICTIM_H
#define TANDEM_TESTS_ACCEPT_VICTIM_H

/* What the tests of every backend's `accept` share: settings of all sorts, and a small round that
 * is broken in every way, with what must come of it. */

#include "kernels/kernels.h"

enum { VICTIM_VOCAB = 8 };

/* One round of two draft tokens over 8 tokens; greedy, all accepted, then token 6. */
struct victim {
    float x[3 * VICTIM_VOCAB], q[2 * VICTIM_VOCAB];
    struct kern_sample p[3];
    int32_t draft[2], n_accepted[2];
    struct kern_round round;
    struct kern_draft_probs probs;
    struct kern_sampled out[4];
};

/* Decide v's round on a backend: n_accepted[0] and out[0..3), which hold bytes of 0xEE where
 * nothing was written. */
typedef void victim_run_fn(void *backend, struct victim *v);

/* NaN, infinities, bans of everything, tokens and distributions that lie. */
void victims_check(victim_run_fn *run, void *backend);

/* The i-th settings: greedy, Gumbel and drawn rows, filters, log-probabilities, bans. */
struct kern_sample accept_mixed(int i);

#endif
