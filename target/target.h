#ifndef TANDEM_TARGET_H
#define TANDEM_TARGET_H

/* SparDA: which blocks of a sequence the target's deep layers go on reading. A selector gives every
 * block of a committed prefix one number, a policy says how many are kept, and the result, an
 * epoch's ascending list of blocks, serves until the next selection. Pure functions over the
 * caller's memory: a selection depends on the prefix (by the selector's numbers) and the request's
 * settings alone. Nothing allocates, no clock, no state. docs/sparsity.md has the law in words. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvpool/kvpool.h"

struct err;

enum {
    TARGET_BLOCK = KVPOOL_BLOCK,  /* tokens */
    TARGET_QUARTERS = 4,          /* of a block */
    TARGET_ROWS = 32,             /* newest prompt rows whose attention `observed` looks at */
    TARGET_MIN_BLOCKS = 32,       /* the floor: a context of no more blocks stays dense */
    TARGET_WINDOW_BLOCKS = 3,     /* newest blocks that are always kept */
    TARGET_MOST_BLOCKS = 1 << 20, /* of any setting that counts blocks or tokens */
    TARGET_SURPRISE_TOKENS = 16,  /* whose mean negative log-likelihood is the running surprise */
    TARGET_SURPRISE_LEAST = 32,   /* tokens of an epoch before surprise may end it */
    TARGET_WIDE_TOKENS = 64,      /* tokens of an epoch that surprise made wider */
    TARGET_MOST_EXACT = 16,       /* of `exact`, and what "on" means: KERN_MAX_DRAFT */
    TARGET_PREFILL_START = 2048,  /* a prompt's positions below are computed densely */
    TARGET_PREFILL_CHUNK = 512,   /* positions behind it that share a list */
    TARGET_RECHECK_ROWS = 16,     /* newest rows whose attention in the select layer re-checks */
};
#define TARGET_RESERVE 0.01 /* share of all blocks that chance keeps on top */
#define TARGET_SURPRISE 0.5 /* nats above an epoch's beginning that are a surprise */
#define TARGET_WIDE 1.5     /* times as many blocks while an epoch is wide */

/* ---- Settings ---- */

enum target_selector {
    TARGET_OFF,      /* dense: nothing is selected */
    TARGET_ALL,      /* every block, by way of a list */
    TARGET_OBSERVED, /* attention that the prompt's last rows paid in the deep layers */
    TARGET_RECENT,   /* the newest blocks */
    TARGET_RANDOM,   /* chance, by the request's seed */
    TARGET_SCORER,   /* what the scorer file makes of states and representatives */
    TARGET_MEAN,     /* the pooled query state against each block's mean state, both normed */
    TARGET_MINMAX,   /* the same against its tokens' least and largest values */
    TARGET_BOUND,    /* the same against their mean and standard deviation */
    TARGET_N_SELECTORS
};
enum { TARGET_UNSET = -1 };
#define TARGET_CURVE 0.0                       /* `keep`: by the curve */
#define TARGET_NO_THRESHOLD (-__builtin_inf()) /* `threshold`: none */
#define TARGET_UNSET_THRESHOLD __builtin_nan("")
enum { /* `reselect`, beside numbers of tokens */
       TARGET_RESELECT_OFF = 0,
       TARGET_RESELECT_STEP = 1,
       TARGET_RESELECT_SURPRISE = -2
};
enum { TARGET_PREFILL_DENSE, TARGET_PREFILL_SPARSE }; /* `prefill` */
enum { TARGET_RECHECK_OFF, TARGET_RECHECK_BORDER };   /* `recheck` */
enum target_lists {                                   /* `lists`: who reads the same list */
                    TARGET_LISTS_ONE, /* all deep layers (to and from `select2`, where there is one)
                                       */
                    TARGET_LISTS_LAYER, /* the heads of a layer */
                    TARGET_LISTS_HEAD,  /* the query heads of a KV head */
                    TARGET_N_LISTS
};

/* Share of the blocks to keep by length: keep is linear in log(tokens) between points, constant
 * before the first and behind the last. */
enum { TARGET_CURVE_POINTS = 8 };
struct target_curve {
    int n; /* 0: none */
    struct {
        double tokens, keep;
    } at[TARGET_CURVE_POINTS]; /* ascending in tokens */
};
/* (8K, 1) (16K, .15) (32K, .10) (128K, .05): the source's. */
extern const struct target_curve target_source_curve;
double target_curve_keep(const struct target_curve *c, double n_tokens); /* c->n > 0 */

/* How a request wants to be read. Any field may be unset: then the one below it counts (request,
 * engine, default). */
struct target_settings {
    int selector;      /* enum target_selector; default off */
    double keep;       /* (0, 1]: this share of the blocks; TARGET_CURVE (default) */
    int keep_blocks;   /* > 0: so many, whatever `keep` says; 0 (default): by `keep` */
    int min_blocks;    /* floor; default TARGET_MIN_BLOCKS, or keep_blocks where that is less */
    int window_blocks; /* newest blocks that are always kept, at least 1 */
    double reserve;    /* [0, 1]: share of the blocks that is kept at random on top */
    double threshold;  /* blocks that score less go, down to min_blocks; TARGET_NO_THRESHOLD */
    double smooth;     /* [0, 1]: so much of its neighbours' mean score is added to a block's;
                          default 0, of the scorer what its file says */
    int reselect;      /* tokens of an epoch inside an answer, or TARGET_RESELECT_*; default off */
    int reselector;    /* who selects then, any but `observed`; default: the selector itself, for
                          `observed` the scorer where there is one, else mean */
    double surprise;   /* nats, with TARGET_RESELECT_SURPRISE */
    int recheck; /* TARGET_RECHECK_*; default off. Border: of the blocks that measure well, but
                    neither very well nor too badly, the select layer's true attention
                    decides */
    double drop; /* [0, 1), default 0: at an epoch's end so much of the blocks that its list had
                    beside the pinned ones, the least used, are left out of the next; with
                    `reselect` alone */
    struct target_curve curve; /* of keep TARGET_CURVE; n 0: unset. Default: the scorer file's, else
                                  the source's */
    int exact;   /* tokens that sparse rounds may commit provisionally before a dense pass verifies
                    them, 0 (off, the default)..TARGET_MOST_EXACT. More than 0: the selector is
                    `observed` unless another is asked for, selects anew after each such pass, and
                    `reselect` is off */
    int prefill; /* TARGET_PREFILL_*; default dense. Sparse: the selector is `observed` unless
                    another is asked for, `exact` is off */
    int prefill_dense; /* tokens, at least; default TARGET_PREFILL_START */
    int prefill_chunk; /* tokens, a multiple of TARGET_BLOCK; default TARGET_PREFILL_CHUNK */
    int lists;   /* enum target_lists; default one. Others are made by `observed` alone, of what was
                    seen where they will be read */
    int select2; /* deep layers from this one on have a list of their own; 0 (default): none */
    int quarters; /* of 4, of 16 tokens each, that are read of a kept block that is not pinned,
                     where the selector measures quarters. 4 (default): all */
};
void target_settings_unset(struct target_settings *s); /* all of it */

/* Ranges of what is set; E_RANGE with name, value and range, E_INVALID where keep and keep_blocks
 * are both asked for, or exact or sparse prefill beside selector off, or exact beside reselect or
 * sparse prefill, or several lists or quarters beside exact, re-checks or a selector that cannot
 * tell them apart. */
int target_settings_check(const struct target_settings *s, struct err *e);

/* What a scorer file says of how it wants to be used. */
struct target_scorer_defaults {
    double smoothing;          /* of its scores */
    struct target_curve curve; /* its model's; n 0: none */
};

/* `request` over `base` over the defaults, of which some are those of the scorer that is loaded
 * (NULL: none); nothing is unset in the result. Asking for keep_blocks or keep takes back what the
 * base says of the other; so it is with exact and reselect, with exact and sparse prefill, and with
 * several lists or quarters and exact, re-checks or another selector. */
struct target_settings target_settings_resolve(const struct target_settings *base,
                                               const struct target_settings *request,
                                               const struct target_scorer_defaults *scorer);

/* Does a selector read states of the select layer and blocks' representatives? And do resolved
 * settings, at the end of the prompt or later? */
static inline bool target_by_states(int selector) {
    return selector == TARGET_SCORER || selector == TARGET_MEAN || selector == TARGET_MINMAX ||
           selector == TARGET_BOUND;
}
bool target_needs_states(const struct target_settings *s);
/* Do they ask this very selector? */
bool target_asks(const struct target_settings *s, int selector);

/* A number for the law by which resolved settings compute an answer: equal settings, equal number;
 * 0: dense, as what was verified densely is. */
uint64_t target_settings_law(const struct target_settings *s);

const char *target_selector_name(int selector); /* "off", "observed"...; "?" */
/* "off", "step", "surprise"; NULL: a number of tokens. */
const char *target_reselect_name(int reselect);
/* The name need not end in NUL; E_RANGE names what is allowed. */
int target_selector_parse(int *out, const char *s, size_t n, struct err *e);
/* Into s->keep, for a curve's points into s->curve, too: "curve", a number of (0, 1], or points as
 * "8192:1,16384:.15" with tokens ascending. E_RANGE with what is allowed. */
int target_keep_parse(struct target_settings *s, const char *text, size_t n, struct err *e);
/* "off" or a number; E_RANGE. */
int target_threshold_parse(double *out, const char *s, size_t n, struct err *e);
/* "off", "step", "surprise" or a number of tokens; E_RANGE names what is allowed. */
int target_reselect_parse(int *out, const char *s, size_t n, struct err *e);
/* "off", "border"; E_RANGE names them. */
int target_recheck_parse(int *out, const char *s, size_t n, struct err *e);
const char *target_recheck_name(int recheck);
/* "dense", "sparse"; E_RANGE names them. */
int target_prefill_parse(int *out, const char *s, size_t n, struct err *e);
const char *target_prefill_name(int prefill);
/* "one", "layer", "head"; E_RANGE names them. */
int target_lists_parse(int *out, const char *s, size_t n, struct err *e);
const char *target_lists_name(int lists);
/* "on" (TARGET_MOST_EXACT), "off" or a number of tokens; E_RANGE names what is allowed. */
int target_exact_parse(int *out, const char *s, size_t n, struct err *e);
/* One that can select inside an answer; E_RANGE names them. */
int target_reselector_parse(int *out, const char *s, size_t n, struct err *e);

/* ---- How many blocks ---- */

static inline int target_n_blocks(int n_tokens) {
    return (n_tokens + TARGET_BLOCK - 1) / TARGET_BLOCK;
}

/* Most blocks kept of a prefix, pinned ones included, the reserve not: all of them where the
 * settings are off or nothing may go. Without a threshold exactly so many are. */
int target_n_kept(const struct target_settings *s, int n_tokens);
/* Of the others, how many the reserve adds. */
int target_n_reserve(const struct target_settings *s, int n_tokens);

/* Does a prefix of n_tokens lose any block under these settings, and does a selector that observes
 * need to look? */
bool target_selects(const struct target_settings *s, int n_tokens);
bool target_observes(const struct target_settings *s, int n_tokens);

/* ---- A selection ---- */

/* What a selector may look at: the prefix at the start of an epoch. */
struct target_view {
    int n_tokens;
    uint64_t seed; /* the request's */
    int epoch;     /* 0: the end of the prompt; others: `reselector` selects */
    /* [n_blocks] f32, of a selector that observes: attention mass of each block, the most over deep
     * layers, heads and the rows that were looked at. NULL for others. */
    const float *mass;
    const float *score; /* [n_blocks] f32, of a selector by states: its scores. NULL for others */
    bool wide;          /* TARGET_WIDE times as many blocks */
    /* [n_blocks] f32, 0 or more: the most that a head of one of the epoch's rows paid to a block in
     * a deep layer; NaN: it had no part in the last list. NULL: there was none, or nobody drops. */
    const float *used;
    /* [n_blocks] f32 of the blocks that target_recheck names: the most that a head of one of the
     * newest rows pays to it in the select layer, where it is one of these. NULL: no re-check. */
    const float *attention;
};

/* Blocks that settings leave out of this view's list because they were used least. */
int target_n_dropped(const struct target_settings *s, const struct target_view *view);

/* With `recheck`, before a selection: the blocks whose true attention it wants, ascending into list
 * [n_blocks]: the pinned ones, those of the prefix' newest TARGET_RECHECK_ROWS tokens, and the best
 * twice as many as would be kept beside them. Returns how many; 0: none, because it is off, or the
 * selector does not measure. score: [n_blocks] scratch that is neither view->mass nor view->score.
 */
int target_recheck(const struct target_settings *s, const struct target_view *view, float *score,
                   int32_t *list);

/* Select the blocks of an epoch: the pinned ones (the first, the newest window_blocks), the best by
 * the selector's score (smoothed, where it measures) up to target_n_kept, or those among them that
 * reach the threshold (re-checked: the better half of them, then of the best twice as many those
 * with most attention), then the reserve, drawn by (seed, epoch) from what is left. Ties go to the
 * lower block; a NaN scores lowest. Ascending into kept [n_blocks]; returns how many. score:
 * [n_blocks] scratch, which may be view->mass or view->score itself. */
int target_select(const struct target_settings *s, const struct target_view *view, float *score,
                  int32_t *kept);

/* The quarters of each block of a list, bits 0..3: all of a pinned one (the first, the newest
 * window_blocks) and of every block where settings ask for all; of others the settings' number,
 * those that score best; ties go to the lower, NaN scores lowest. mass: [n_blocks][4] f32 of the
 * prefix's blocks, masses or scores of who made the list. Into out [n_kept]; returns how many
 * in all. */
int target_select_quarters(const struct target_settings *s, int n_tokens, const float *mass,
                           const int32_t *kept, int n_kept, uint8_t *out);

/* ---- Several lists ---- */

/* The layers that lists are read in. */
struct target_deep {
    int first, n_layers; /* the select layer; layers from there on */
    int n_heads;         /* KV heads of each */
};

/* Do settings ask for more than one list? For less than all of a kept block? */
bool target_has_lists(const struct target_settings *s);
static inline bool target_has_quarters(const struct target_settings *s) {
    return s->quarters > 0 && s->quarters < TARGET_QUARTERS;
}
/* Can a selector tell them apart? */
static inline bool target_tells_apart(int selector) {
    return selector == TARGET_OBSERVED || selector == TARGET_ALL;
}
/* And quarters? `scorer` where it is `late`. */
static inline bool target_tells_quarters(int selector) {
    return target_tells_apart(selector) || selector == TARGET_MEAN || selector == TARGET_SCORER;
}
/* Of settings that may be unset or are resolved: E_INVALID where they ask for lists beside what
 * makes one; where d is not NULL, E_RANGE where `select2` is none of the deep layers behind the
 * first. */
int target_lists_check(const struct target_settings *s, const struct target_deep *d, struct err *e);

/* Lists of an epoch that `observed` begins, and which of them KV head `head` of the `layer`-th deep
 * layer reads. Each is made by target_select as if it were the only one, of the masses seen by
 * those that read it. */
int target_n_lists(const struct target_settings *s, const struct target_deep *d);
int target_list_of(const struct target_settings *s, const struct target_deep *d, int layer,
                   int head);

/* ---- Prompts, where resolved settings compute them sparsely ---- */

/* The law's chunks begin at the multiples of prefill_chunk; those from `first` on, INT32_MAX:
 * none, may have a list, which is made of the blocks before the chunk. */
int target_prefill_first(const struct target_settings *s);
/* Where the chunk of a position begins; 0: it is computed densely, whatever it is. */
int target_prefill_border(const struct target_settings *s, int position);
/* Is there a list for the chunk that begins there? Where there is, `reselector` makes it: a view of
 * the prefix before it with epoch = border > 0, and seed 0, so that prompts are shared. */
bool target_prefill_selects(const struct target_settings *s, int border);
/* Who selects at the end of a prompt: `selector`; in the place of `observed`, which has to have
 * seen what it judges, `reselector` where a list had a say in what the last rows read. */
int target_first_selector(const struct target_settings *s, int n_tokens);
/* A number for the law by which they compute prompts: equal lists, equal number; 0: densely. */
uint64_t target_prefill_law(const struct target_settings *s);

/* ---- Epochs inside an answer ---- */

/* Where an answer's epoch stands: a function of the tokens committed under its list alone. */
struct target_epoch {
    int n_tokens; /* committed since its selection */
    bool wide;
    double sum;   /* surprise of all its tokens */
    double start; /* mean surprise of its first TARGET_SURPRISE_TOKENS */
    float
        nll[TARGET_SURPRISE_TOKENS]; /* of the newest ones, by n_tokens % TARGET_SURPRISE_TOKENS */
};

/* A token was committed whose negative log-likelihood under the target (nats, before temperature
 * and filters) is nll, looked at with TARGET_RESELECT_SURPRISE alone. True: the epoch ends with it
 * and the next begins, wide where *wide says so. */
bool target_epoch_token(struct target_epoch *e, const struct target_settings *s, float nll,
                        bool *wide);

/* Most tokens that may be committed until an end that is known beforehand, >= 1; INT32_MAX: none
 * is. Surprise may come sooner. */
int target_epoch_left(const struct target_epoch *e, const struct target_settings *s);

#endif
