#ifndef TANDEM_CMD_EVAL_BED_H
#define TANDEM_CMD_EVAL_BED_H

/* A model opened for evaluation: its trace, its scorers, and for one prompt at a time the numbers
 * that selectors see and each column's list. */

#include "cmd/eval_apart.h"
#include "cmd/eval_text.h"
#include "engine/engine.h"
#include "target/scorer.h"
#include "target/trace.h"

enum { EVAL_MAX_STOP = 64 };

struct eval_bed {
    struct model_source *src; /* closed when open */
    struct kern *k;
    struct model *m;
    struct tokenizer *tokenizer;
    struct eval_speech speech;
    struct target_trace *trace;
    struct model_config c;
    uint64_t fingerprint; /* of the model's file */
    char device[128];
    int select_layer;
    int max_tokens;              /* of a text, what follows a prompt included */
    int32_t stop[EVAL_MAX_STOP]; /* ids that end an answer */
    int n_stop;
    int n_scorers;
    struct target_scorer *scorer[EVAL_MAX_SCORERS];
    struct target_scorer_file *scorer_file[EVAL_MAX_SCORERS]; /* as read */
    /* Of the prompt at hand; [n_blocks] each. */
    int n_blocks; /* capacity */
    float *numbers, *scratch;
    float *used;    /* what the list of a column was paid, as target_trace_force_used tells */
    int32_t *lists; /* [EVAL_MAX_COLUMNS][n_blocks] */
    struct target_kept kept[EVAL_MAX_COLUMNS];
    struct eval_apart apart;         /* lists of columns that have more; empty: there are none */
    int n_kept[EVAL_MAX_COLUMNS];    /* blocks, or blocks' worth of tokens */
    bool is_dense[EVAL_MAX_COLUMNS]; /* nothing is left out */
    struct eval_scores scores;
};

struct eval_bed_options {
    struct engine_options
        engine;      /* model, device, threads, precision, select layer; -1: not said */
    int max_tokens;  /* of a text */
    int max_answers; /* columns that answer at once, and tokens of each */
    int max_answer_tokens;
    bool apart; /* columns of cmd/eval_apart.h will be asked for */
    const char *const *scorers;
    int n_scorers;
};

/* Open in two steps: what the model is, then, when the caller knows what it asks for, the device.
 * E_INVALID where scorers' layers differ from each other or from the select layer that was asked
 * for. */
int eval_bed_read(struct eval_bed **out, const struct eval_bed_options *o, struct err *e);
struct target_deep eval_bed_deep(const struct eval_bed *b);
int eval_bed_open(struct eval_bed *b, const struct eval_bed_options *o, struct err *e);
void eval_bed_close(struct eval_bed *b); /* NULL: nothing */

/* Start a text: ids[n] as a prompt, with the numbers that `columns` need of it (but the oracle's).
 * seed: of chance in this prompt. */
int eval_bed_prompt(struct eval_bed *b, const struct eval_columns *columns, const int32_t *ids,
                    int n, uint64_t seed, struct err *e);

/* What ids[n] (up to TARGET_TRACE_LOOK of them) behind the prompt and lead[n_lead] attend to in a
 * dense pass: the oracle's numbers. *masses (NULL: not wanted) tells by layer and head, valid until
 * the next call. The next call may be any: each goes back to the prompt's end by itself. */
int eval_bed_look(struct eval_bed *b, const int32_t *lead, int n_lead, const int32_t *ids, int n,
                  struct target_masses *masses, struct err *e);

/* Make every column's list from the numbers of the prompt, re-checked where it asks for that. An
 * oracle that has not looked gives the dense list. */
int eval_bed_select(struct eval_bed *b, const struct eval_columns *columns, struct err *e);

/* The list of a column selecting anew where the trace stands now: blocks of the prompt by numbers
 * that the newest states ask for, what was generated is read in any case. A column that drops goes
 * by b->used, too. */
int eval_bed_again(struct eval_bed *b, const struct eval_column *c, struct target_kept *out,
                   struct err *e);

/* NULL where the column is dense. */
const struct target_kept *eval_bed_kept(const struct eval_bed *b, int column);

#endif
