#ifndef TANDEM_DRAFT_DEPTH_H
#define TANDEM_DRAFT_DEPTH_H

/* How many tokens to propose: g per sequence and round, by predicted tokens per second. Two things
 * are learned while serving: what passes cost, V(batch, rows, context), and how often draft tokens
 * are accepted by their place in the round. Pure arithmetic over plain structs; no clock, no
 * chance, nothing allocates: tests feed it simulated machines. A round is: make bids, draft_choose,
 * run passes and tell their times to draft_cost_observe, commit, draft_learn for every bid. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"

/* ---- What a pass costs ---- */

enum {
    DRAFT_COST_ROWS = 25, /* grid of row counts: 1..10 12 14 16 20 24 32 40 48 64 96 128 192 256 512
                             1024; between: linear */
};

/* One model's passes: ns(rows, kv) = speed * (level[rows] + slope[rows] * (kv - where it was
 * learned)); kv = positions read, summed over the rows' sequences (each sequence's context once).
 * A change of the whole machine goes to `speed` within dozens of passes, so that a row count that
 * was not tried lately keeps its proportion; levels follow hundreds of passes, slopes too. */
struct draft_cost {
    struct draft_cost_point {
        double kv, ns; /* level: ns at this context while speed is 1; 0: never seen */
        double slow_n, slow_kv, slow_ns, slow_kv2, slow_kv_ns; /* slope: sums */
        uint32_t last;                                         /* n_observed at its newest pass */
    } at[DRAFT_COST_ROWS];
    double speed;    /* of the machine: factor on all levels */
    double kv_share; /* what bytes say that a position adds to a pass of one row, as a share of one
                        on an empty context: slopes are drawn to it; 0: nothing is known */
    /* Covariance of the logs of the levels and, last, of speed. */
    double cov[DRAFT_COST_ROWS + 1][DRAFT_COST_ROWS + 1];
    uint32_t n_observed;
    int newest;           /* grid row of the newest pass */
    int n_turned, n_cold; /* passes that will still feel another row count, and a prompt */
};
void draft_cost_init(struct draft_cost *c, double kv_share);
/* A pass of n_rows generated rows took ns. A pass that was held up moves nothing by more than 3 %;
 * twice as slow for good is believed within about 50 passes, also of the row counts that were not
 * seen meanwhile. Ignores what is no finite time of a nanosecond or more. */
void draft_cost_observe(struct draft_cost *c, int n_rows, double kv_tokens, double ns);
/* A pass with prompt rows ran, which is not observed: what the next dozen passes take says little
 * of what passes take. */
void draft_cost_disturb(struct draft_cost *c);
/* Predicted ns of a pass; 0 while nothing is known. Monotone in rows and kv; rows that were never
 * seen are interpolated or extrapolated from those that were. */
double draft_cost_predict(const struct draft_cost *c, int n_rows, double kv_tokens);
/* Is there an observation near (n_rows, kv_tokens)? */
bool draft_cost_known(const struct draft_cost *c, int n_rows, double kv_tokens);

/* ---- How often draft tokens are accepted ---- */

enum draft_source {
    DRAFT_BY_MODEL,
    DRAFT_BY_LOOKUP,
    DRAFT_N_SOURCES = DRAFT_BY_LOOKUP + 5, /* of rates: lookup has one for each class of matches:
                                              2, 3, 4..7, 8..15 and 16 or more tokens */
};

/* Which rate a proposal is judged by. */
int draft_rate_idx(enum draft_source source, int n_match);

enum { DRAFT_N_LEVELS = 9 }; /* rate.c: chances of a token, from hardly ever to all but surely */

/* A running estimate of how a source's proposals fare. The model's: by place, the chance that place
 * i is accepted given that all before it were. Lookup's: its proposals are of several kinds, since
 * a text repeats itself here or it does not; how often is each kind of them. */
struct draft_rate {
    bool by_level; /* lookup's: `share` counts, else the places */
    float accepted[KERN_MAX_DRAFT], tried[KERN_MAX_DRAFT]; /* decayed counts */
    float prior[KERN_MAX_DRAFT];                           /* what they are drawn to */
    float share[DRAFT_N_LEVELS], n_rounds; /* of proposals of which each token is right with the
                                              level's chance, sum 1; rounds that speak for them */
    bool proven;           /* lookup's first: it was right at length in this request */
    float n_own, n_tokens; /* the model's, decayed: rounds that lookup left to it, used or not, and
                              tokens of all rounds */
};
void draft_rate_init(struct draft_rate *r, const struct draft_rate *prior); /* NULL: a weak prior */
/* All DRAFT_N_SOURCES of them; prior NULL: what is usual for each source. */
void draft_rates_init(struct draft_rate *rate, const struct draft_rate *prior);
/* A round drafted n_drafted and n_accepted of them were accepted. */
void draft_rate_update(struct draft_rate *r, int n_drafted, int n_accepted);
double draft_rate_at(const struct draft_rate *r, int place); /* in [0, 1] */

/* ---- The choice ---- */

/* After g = 0 the model is tried again now and then, less often as it keeps failing, so that
 * probing costs at most about 1 % of the time. Zeroed for a new request. */
struct draft_probe {
    int n_idle;    /* rounds since the model last proposed */
    int wait;      /* rounds until the next probe; 0: not off */
    bool spent;    /* the one probe that may cost more was made */
    double credit; /* ns: the hundredth part of its rounds since then */
    double worth;  /* running mean of what the model gains, 1: nothing; 0: not known */
};

enum {
    DRAFT_MAX_BIDS = 256,
    DRAFT_LONG_WAY = KERN_MAX_DRAFT + 1, /* a draft takes more rows than these as a prompt's */
};

/* One sequence of a round that may speculate. */
struct draft_bid {
    /* In. */
    int max_model;    /* draft tokens that the model may propose, 0: none */
    int max_lookup;   /* tokens that lookup has ready, 0: none */
    int n_match;      /* how long lookup's match was */
    double kv_tokens; /* its context */
    double target_kv; /* positions of it that the target reads, a mean over layers; 0: kv_tokens */
    int n_lag;        /* committed tokens that the draft has not seen, pending included */
    int n_left;       /* tokens that it may still emit: over the model's share of their rounds
                         the cost of catching up is spread; 0: not known */
    struct draft_rate *rate;   /* [DRAFT_N_SOURCES], the sequence's own */
    struct draft_probe *probe; /* its state of re-probing */
    int forced;                /* >= 0: this many, whatever is predicted (a fixed setting);
                                  lookup goes first where it matches; -1: auto */
    /* Out. */
    enum draft_source source;
    int n_draft;
    bool is_probe; /* tried against the prediction */
};

struct draft_costs {
    struct draft_cost target, draft;
    double lag_row_ns; /* the draft's, of a row of a long way to catch up, which it takes as it
                          takes a prompt; 0: not known */
    double fixed_ns; /* what each round takes whatever is chosen, beside both models' passes; 0: not
                        known */
};

/* A draft's pass of n_rows rows of a long way to catch up took ns. */
void draft_costs_observe_lag(struct draft_costs *c, int n_rows, double ns);

/* Choose n_draft and source of each bid so that predicted tokens per second of the whole round are
 * most. n_other_rows: generated rows of the pass besides the bids' pending ones, other_kv their
 * positions. max_rows: rows that all bids together may add. At most DRAFT_MAX_BIDS. Exact for one
 * bid, within a few percent for more. */
void draft_choose(const struct draft_costs *c, struct draft_bid *bid, int n_bids, int n_other_rows,
                  double other_kv, int max_rows);

/* What became of a bid; call it for every bid of draft_choose, whatever was chosen. n_drafted
 * tokens were really proposed (0 also where the draft was still catching up) and n_accepted of them
 * were accepted. `looked_up` are the n_looked_up tokens that lookup had ready, used or not,
 * `emitted` what the round committed behind the pending token: what lookup would have earned is
 * known without trying, so its rates never starve. Updates the bid's rates and probe and `prior`
 * [DRAFT_N_SOURCES], the engine's running rates (NULL: none). */
void draft_learn(const struct draft_bid *bid, struct draft_rate *prior, int n_drafted,
                 int n_accepted, const int32_t *looked_up, int n_looked_up, const int32_t *emitted,
                 int n_emitted);

#endif
