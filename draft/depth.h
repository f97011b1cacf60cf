#ifndef TANDEM_DRAFT_DEPTH_H
#define TANDEM_DRAFT_DEPTH_H

/* How many tokens to propose: g per sequence and round, by predicted tokens per second. Two things
 * are learned while serving: what passes cost, V(batch, rows, context), and how often draft tokens
 * are accepted by their place in the round. Pure arithmetic over plain structs; no clock, no
 * chance, nothing allocates: tests feed it simulated machines. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* ---- What a pass costs ---- */

enum {
    DRAFT_COST_ROWS = 12, /* grid of row counts: 1 2 3 4 5 6 8 12 16 32 64 128; between: linear */
};

/* One model's passes: ns(rows, kv) = base[rows] + slope[rows] * kv, kv = positions read, summed
 * over the rows' sequences (each sequence's context once). */
struct draft_cost {
    struct draft_cost_point {
        double n, kv, ns, kv2, kv_ns; /* decayed sums of a fit by least squares */
    } at[DRAFT_COST_ROWS];
};
void draft_cost_init(struct draft_cost *c);
void draft_cost_observe(struct draft_cost *c, int n_rows, double kv_tokens, double ns);
/* Predicted ns of a pass; 0 while nothing is known. Monotone in rows and kv; rows that were never
 * seen are interpolated or extrapolated from those that were. */
double draft_cost_predict(const struct draft_cost *c, int n_rows, double kv_tokens);
/* Is there an observation near (n_rows, kv_tokens)? */
bool draft_cost_known(const struct draft_cost *c, int n_rows, double kv_tokens);

/* ---- How often draft tokens are accepted ---- */

enum draft_source { DRAFT_BY_MODEL, DRAFT_BY_LOOKUP, DRAFT_N_SOURCES };

/* Running estimate by place: chance that place i is accepted given that all before it were. */
struct draft_rate {
    float accepted[KERN_MAX_DRAFT], tried[KERN_MAX_DRAFT]; /* decayed counts */
};
void draft_rate_init(struct draft_rate *r, const struct draft_rate *prior); /* NULL: a weak prior */
/* A round drafted n_drafted and n_accepted of them were accepted. */
void draft_rate_update(struct draft_rate *r, int n_drafted, int n_accepted);
double draft_rate_at(const struct draft_rate *r, int place); /* in [0, 1] */

/* ---- The choice ---- */

/* One sequence of a round that may speculate. */
struct draft_bid {
    /* In. */
    int max_model;             /* draft tokens that the model may propose, 0: none */
    int max_lookup;            /* tokens that lookup has ready, 0: none */
    int n_match;               /* how long lookup's match was */
    double kv_tokens;          /* its context */
    int n_lag;                 /* committed tokens that the draft has not seen, pending included */
    struct draft_rate *rate;   /* [DRAFT_N_SOURCES], the sequence's own */
    struct draft_probe *probe; /* its state of re-probing */
    int forced;                /* >= 0: this many, whatever is predicted (a fixed setting);
                                  lookup goes first where it matches; -1: auto */
    /* Out. */
    enum draft_source source;
    int n_draft;
};

/* After g = 0 the model is tried again now and then, less often as it keeps failing, so that
 * probing costs at most about 1 % of the time. */
struct draft_probe {
    int n_idle; /* rounds since the model last proposed */
    int wait;   /* rounds until the next probe */
};

struct draft_costs {
    struct draft_cost target, draft;
};

/* Choose n_draft and source of each bid so that predicted tokens per second of the whole round are
 * most. n_other_rows: generated rows of the pass besides the bids' pending ones, other_kv their
 * positions. max_rows: rows that all bids together may add. */
void draft_choose(const struct draft_costs *c, struct draft_bid *bid, int n_bids, int n_other_rows,
                  double other_kv, int max_rows);

#endif
