#ifndef TANDEM_TESTS_RUNNER_H
#define TANDEM_TESTS_RUNNER_H

/* One model and one or more sequences over scattered pages, without engine or pool: for tests that look at
 * logits. Pages are handed out in a shuffled order, and the space between them is filled with NaN. */

#include "model/model.h"

struct runner;

struct runner_options {
    const char *path;
    enum kern_precision precision;
    const char *isa;      /* NULL: best */
    int n_threads;
    int max_tokens;       /* of a sequence */
    int n_seqs;
    int max_rows;
    enum kern_dtype kv;   /* KERN_F16 by default for FAST, F32 for REFERENCE: set it */
    int select_layer;     /* 0: one group; else shallow and deep groups */
};

/* Fails the running test on any error. */
struct runner *runner_open(const struct runner_options *o);
void runner_close(struct runner *r);
const struct model_config *runner_config(const struct runner *r);
struct model *runner_model(struct runner *r);

/* A piece of one sequence for the next pass. */
struct runner_piece {
    int seq;
    const int32_t *ids;
    int n;
    bool prompt; /* row class */
};

/* Run one pass over pieces (generated ones first); logits f32 [sum of n][vocab] of every row, in the order of
 * the pieces. */
void runner_pass(struct runner *r, const struct runner_piece *pieces, int n_pieces, float *logits);

/* Forget a sequence's tokens beyond n. */
void runner_truncate(struct runner *r, int seq, int n);
int runner_length(const struct runner *r, int seq);

/* XXH3 hash of the sequence's KV of tokens [0, n). */
uint64_t runner_kv_hash(struct runner *r, int seq, int n);

#endif
