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
    TARGET_ROWS = 32,             /* newest prompt rows whose attention `observed` looks at */
    TARGET_MIN_BLOCKS = 32,       /* the floor: a context of no more blocks stays dense */
    TARGET_WINDOW_BLOCKS = 3,     /* newest blocks that are always kept */
    TARGET_MOST_BLOCKS = 1 << 20, /* of any setting that counts blocks */
};
#define TARGET_RESERVE 0.01 /* share of all blocks that chance keeps on top */

/* ---- Settings ---- */

enum target_selector {
    TARGET_OFF,      /* dense: nothing is selected */
    TARGET_ALL,      /* every block, by way of a list */
    TARGET_OBSERVED, /* attention that the prompt's last rows paid in the deep layers */
    TARGET_RECENT,   /* the newest blocks */
    TARGET_RANDOM,   /* chance, by the request's seed */
    TARGET_N_SELECTORS
};
enum { TARGET_UNSET = -1 };
#define TARGET_CURVE 0.0 /* `keep`: by the curve */

/* How a request wants to be read. Any field may be unset: then the one below it counts (request,
 * engine, default). */
struct target_settings {
    int selector;      /* enum target_selector; default off */
    double keep;       /* (0, 1]: this share of the blocks; TARGET_CURVE (default) */
    int keep_blocks;   /* > 0: so many, whatever `keep` says; 0 (default): by `keep` */
    int min_blocks;    /* floor; default TARGET_MIN_BLOCKS, or keep_blocks where that is less */
    int window_blocks; /* newest blocks that are always kept, at least 1 */
    double reserve;    /* [0, 1]: share of the blocks that is kept at random on top */
};
void target_settings_unset(struct target_settings *s); /* all of it */

/* Ranges of what is set; E_RANGE with name, value and range, E_INVALID where keep and keep_blocks
 * are both asked for. */
int target_settings_check(const struct target_settings *s, struct err *e);

/* `request` over `base` over the defaults; nothing is unset in the result. Asking for keep_blocks
 * or keep takes back what the base says of the other. */
struct target_settings target_settings_resolve(const struct target_settings *base,
                                               const struct target_settings *request);

/* A number for the law by which resolved settings compute an answer: equal settings, equal number;
 * 0: dense. */
uint64_t target_settings_law(const struct target_settings *s);

const char *target_selector_name(int selector); /* "off", "observed"...; "?" */
/* The name need not end in NUL; E_RANGE names what is allowed. */
int target_selector_parse(int *out, const char *s, size_t n, struct err *e);
/* "curve" or a number of (0, 1] in text; E_RANGE with the range. */
int target_keep_parse(double *out, const char *s, size_t n, struct err *e);

/* ---- How many blocks ---- */

/* Share of the blocks to keep by length: keep is linear in log(tokens) between points, constant
 * before the first and behind the last. */
struct target_curve {
    int n;
    struct {
        double tokens, keep;
    } at[8]; /* ascending in tokens */
};
/* (8K, 1) (16K, .15) (32K, .10) (128K, .05): the source's. */
extern const struct target_curve target_source_curve;
double target_curve_keep(const struct target_curve *c, double n_tokens);

static inline int target_n_blocks(int n_tokens) {
    return (n_tokens + TARGET_BLOCK - 1) / TARGET_BLOCK;
}

/* Blocks kept of a prefix, pinned ones included, the reserve not: all of them where the settings
 * are off or nothing may go. */
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
    int epoch;     /* 0: the end of the prompt */
    /* [n_blocks] f32, of a selector that observes: attention mass of each block, the most over deep
     * layers, heads and the rows that were looked at. NULL for others. */
    const float *mass;
};

/* Select the blocks of an epoch: the pinned ones (the first, the newest window_blocks), the best by
 * the selector's score up to target_n_kept, then the reserve, drawn by (seed, epoch) from what is
 * left. Ties go to the lower block; a NaN scores lowest. Ascending into kept [n_blocks]; returns
 * how many. score: [n_blocks] scratch, which may be view->mass itself. */
int target_select(const struct target_settings *s, const struct target_view *view, float *score,
                  int32_t *kept);

#endif
