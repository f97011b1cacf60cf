#ifndef TANDEM_CMD_EVAL_APART_H
#define TANDEM_CMD_EVAL_APART_H

/* Columns that read by more than one list of whole blocks: lists by layer, by KV head or from a
 * second select layer on, quarters of blocks, blocks of selection of another size than 64 tokens.
 * What is made here for one prompt is what serving makes of the same settings (target/); sizes
 * other than 64 are not served: the law counts them in place of blocks, and what it keeps is read
 * by quarters. */

#include "cmd/eval_columns.h"
#include "target/trace.h"

struct eval_apart {
    struct target_deep deep;
    int n_blocks, n_columns; /* capacity */
    struct target_kept *own; /* [columns][layers * KV heads] */
    int32_t *block;    /* [columns][layers * KV heads][n_blocks], as many lists as there are */
    uint8_t *quarters; /* the same */
    float *mass, *by_quarter; /* of the prompt: [layers * KV heads][n_blocks], [4] of each */
    float *line, *quarter;    /* of one list */
    float *unit;              /* [4 * n_blocks] of blocks of selection */
    int32_t *picked;          /* [4 * n_blocks] */
};

/* Room for so many columns and blocks. E_NOMEM. */
int eval_apart_open(struct eval_apart *a, const struct target_deep *deep, int n_columns,
                    int n_blocks, struct err *e);
void eval_apart_close(struct eval_apart *a); /* safe on a zeroed struct */

/* What the prompt's end was seen to pay: kept here until the next prompt. Then the most of it by
 * block, which is what `observed` selects by, into most[n_blocks]. */
void eval_apart_see(struct eval_apart *a, const struct target_seen *seen, int n_blocks,
                    float *most);

/* The lists of the column-th column for the prompt of s into *out, valid until it is made again.
 * Returns how many blocks' worth of tokens they keep, rounded, the mean over lists; 0: nothing is
 * left out, *out is not touched. */
int eval_apart_select(struct eval_apart *a, int column, const struct eval_column *c,
                      const struct eval_scores *s, struct target_kept *out);

#endif
