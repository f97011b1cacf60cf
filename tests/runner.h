#ifndef TANDEM_TESTS_RUNNER_H
#define TANDEM_TESTS_RUNNER_H

/* One model and one or more sequences over scattered pages, without engine or pool, on either
 * backend: for tests and benches that look at whole passes. Pages are handed out in a shuffled
 * order; a small arena (all of one in the host's memory) is filled with NaN, so that what no row
 * wrote shows. */

#include "model/model.h"

struct runner;

struct runner_options {
    const char *device; /* "cpu" (NULL) or "cuda" */
    const char *path;
    bool dummy; /* random weights of path's shapes (a config.json, or any model file) */
    const char *target_path; /* of the model that `path` borrows from; NULL: it stands alone */
    enum kern_precision precision;
    const char *isa; /* NULL: best */
    int n_threads;
    int max_tokens; /* of a sequence */
    int n_seqs;
    int max_pages; /* of a group, see runner_recut; 0: n_seqs sequences of max_tokens */
    int max_rows;
    int max_logits;     /* rows of a pass that want logits; 0: max_rows */
    enum kern_dtype kv; /* KERN_F16 by default for FAST, F32 for REFERENCE: set it */
    int select_layer;   /* 0: one group; else shallow and deep groups; -1: round(3 L / 16) */
};

/* Any error ends the process with its text. */
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

/* Run one pass over pieces (generated ones first); logits f32 [sum of n][vocab] of every row, in
 * the order of the pieces; of a reduced head the first n_head columns are written. */
void runner_pass(struct runner *r, const struct runner_piece *pieces, int n_pieces, float *logits);

/* The same with logits of the last n_logits rows alone (0: none). */
void runner_pass_last(struct runner *r, const struct runner_piece *pieces, int n_pieces,
                      float *logits, int n_logits);

/* The same in steps, for timing. set: the pass's arrays to the backend. enqueue: the pass as it was
 * set last, through a recording where the backend keeps any; again and again if wanted. finish:
 * wait, and the logits of its last rows to `logits` (NULL: they stay where they are). */
void runner_set(struct runner *r, const struct runner_piece *pieces, int n_pieces, int n_logits);
void runner_enqueue(struct runner *r);
void runner_finish(struct runner *r, float *logits);

/* Forget all sequences and cut the pages anew: n_seqs of max_tokens each, both within what the
 * runner was opened with. Block lists have exactly that capacity then. */
void runner_recut(struct runner *r, int n_seqs, int max_tokens);

/* Sequence `seq` has n tokens, whatever its pages hold. */
void runner_pretend(struct runner *r, int seq, int n);
int runner_select_layer(const struct runner *r); /* 0: one group */
struct kern *runner_kern(struct runner *r);
void *runner_arena(struct runner *r, int group, size_t *bytes); /* NULL: no such group */

/* From now on the deep layers (of a runner with a select_layer) of generated rows read n blocks:
 * the first, the newest three and others spread evenly; 0: all. Prompt rows want 0. */
void runner_keep(struct runner *r, int n);

/* Bytes of packed weights that a pass reads; the backend's name. */
size_t runner_weight_bytes(const struct runner *r);
const char *runner_device(const struct runner *r);

/* Forget a sequence's tokens beyond n. */
void runner_truncate(struct runner *r, int seq, int n);
int runner_length(const struct runner *r, int seq);

/* XXH3 hash of the sequence's KV of tokens [0, n). */
uint64_t runner_kv_hash(struct runner *r, int seq, int n);

#endif
