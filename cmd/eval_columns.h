#ifndef TANDEM_CMD_EVAL_COLUMNS_H
#define TANDEM_CMD_EVAL_COLUMNS_H

/* The ways of reading that an evaluation compares: selectors x kept shares, dense first. */

#include <stdbool.h>
#include <stdint.h>

#include "target/target.h"

enum eval_selector {
    EVAL_DENSE,
    EVAL_OBSERVED, /* as serving has it */
    EVAL_RECENT,
    EVAL_RANDOM,
    EVAL_MEAN,
    EVAL_MINMAX,
    EVAL_BOUND,
    EVAL_SCORER, /* a file's */
    EVAL_ORACLE, /* the attention that the tokens behind the prompt pay, from a dense pass */
    EVAL_N_SELECTORS
};
const char *eval_selector_name(enum eval_selector s);

enum { EVAL_MAX_COLUMNS = 48, EVAL_MAX_SCORERS = 8, EVAL_MAX_KEEPS = 8, EVAL_MAX_PARTS = 16 };

/* When a column selects anew inside an answer: by states of blocks (as it began; after an observed
 * beginning the first scorer there is, else the mean). */
enum eval_anew {
    EVAL_ONCE,
    EVAL_AGAIN,     /* where a late fact comes up */
    EVAL_EACH_STEP, /* before every token */
    EVAL_N_ANEW
};

struct eval_column {
    enum eval_selector selector;
    int scorer;                      /* of EVAL_SCORER: which file, else -1 */
    enum eval_anew anew;             /* beyond the prompt's end */
    int size;                        /* tokens of a block of selection; 0: as served, 64 */
    char name[64];                   /* "observed 32", "scorer late.safetensors .1" */
    struct target_settings settings; /* resolved, by which target_select counts and draws */
};

struct eval_columns {
    int n; /* >= 1: the first is dense */
    struct eval_column at[EVAL_MAX_COLUMNS];
};

/* What the columns are made of, as typed; NULL: not. */
struct eval_wishes {
    const char *selectors;   /* "observed,recent"; dense is there in any case */
    const char *keep_blocks; /* "32,16,12" */
    const char *keep;        /* ".25,.1"; both may be given */
    const char *scorers[EVAL_MAX_SCORERS];
    struct target_scorer_defaults defaults[EVAL_MAX_SCORERS]; /* what each file says */
    int n_scorers;
    const char *reserve, *smooth; /* "0,.01,.02": a column each; NULL: the default */
    bool anew[EVAL_N_ANEW];       /* observed and those by states once more, selecting anew so */
    bool recheck;                 /* and once more, re-checked by the select layer's attention */
    /* And once more each (NULL: not): observed by lists of "layer,head", by a second select layer;
     * those that measure quarters by so many of them, by blocks of selection of 16, 32, 128. */
    const char *lists, *select2, *quarters, *sizes;
    /* Those of `anew` once more each, selecting anew at a late fact, less such a share of what was
     * used least until then: ".25,.5". */
    const char *drop;
    struct target_deep deep;                  /* of the model */
    bool measures_quarters[EVAL_MAX_SCORERS]; /* of each file */
    struct target_settings base;              /* window and floor where given, else unset */
};

/* E_RANGE names the word that is wrong; E_INVALID where a scorer is asked for without a file. */
int eval_columns_make(struct eval_columns *out, const struct eval_wishes *w, struct err *e);

/* Does it read by more than one list of whole blocks of 64 (cmd/eval_apart.h)? Any of them? */
bool eval_column_is_apart(const struct eval_column *c);
bool eval_columns_are_apart(const struct eval_columns *c);
/* Does it read by one list of whole blocks of 64, made once and by the selector's numbers alone?
 * How much such lists must keep is what a curve tells. */
bool eval_column_is_plain(const struct eval_column *c);

/* What a column may look at: numbers of the blocks of one prompt, NULL where nobody asked. */
struct eval_scores {
    int n_tokens;
    uint64_t seed;
    const float *observed, *mean, *minmax, *bound, *oracle;
    const float *scorer[EVAL_MAX_SCORERS];
    const float *attention; /* of the blocks that eval_column_recheck names */
    const float *used; /* what a list's blocks were paid, where some are to be dropped; else NULL */
    const float *mean_quarters, *scorer_quarters[EVAL_MAX_SCORERS]; /* [4] of each block */
};

/* What a column's blocks, and their quarters, measure; NULL: nothing does, or nobody asked. */
const float *eval_column_numbers(const struct eval_column *c, const struct eval_scores *s);
const float *eval_column_quarters(const struct eval_column *c, const struct eval_scores *s);

/* The blocks whose attention in the select layer the column's re-check wants, ascending into list;
 * 0: it has none, or leaves nothing out. list and scratch hold the prefix's blocks. */
int eval_column_recheck(const struct eval_column *c, const struct eval_scores *s, float *scratch,
                        int32_t *list);

/* The column's list for a prefix; kept and scratch hold its blocks. Returns how many; the number of
 * all blocks where nothing is left out. */
int eval_column_select(const struct eval_column *c, const struct eval_scores *s, float *scratch,
                       int32_t *kept);

#endif
