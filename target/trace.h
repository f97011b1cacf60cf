#ifndef TANDEM_TARGET_TRACE_H
#define TANDEM_TARGET_TRACE_H

/* One text through a target without an engine, on any backend: what training and evaluation look
 * at. A trace holds the KV of one sequence in pages of its own (shallow and deep groups, as the
 * engine cuts them), the states that enter some layers, and the representatives that the engine
 * would keep of them, made by the same operation (kern_ops.note_states) as the same rows are
 * computed: features here are the bits of serving.
 *
 * Rows are appended as a prompt's (dense) or as an answer's (generated class, deep layers through a
 * list), taken back by rewinding, and may be looked at on the way. Memory is reserved when a trace
 * is opened. One thread at a time; a call that failed leaves a trace that can only be closed. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "model/model.h"

struct err;
struct target_trace;

enum {
    TARGET_TRACE_ROWS = 1024, /* rows of a prompt's pass where options say nothing */
    TARGET_TRACE_LOOK = 64,   /* most rows of a look, and of a pass that gives logits */
};

struct target_trace_options {
    int max_tokens;   /* of a text */
    int max_rows;     /* of a pass, TARGET_TRACE_LOOK..KERN_MAX_ROWS; 0: TARGET_TRACE_ROWS */
    int select_layer; /* 0..layers - 1: first of the deep layers, which masses are told of */
    int n_taps;       /* layers whose entering states are kept */
    int tap_layer[MODEL_MAX_TAPS];
    bool has_first;              /* representatives hold each block's first state, too */
    bool has_minmax, has_spread; /* and what `minmax` and `bound` go by */
    bool heads;                  /* target_trace_look will be called */
    int max_answers;             /* of target_trace_answers, 0..TARGET_TRACE_LOOK; 0: not called */
    int max_answer_tokens;       /* of each, what is forced and what is drawn together */
    bool apart; /* what is kept may differ by layer and KV head and leave quarters out, and
                   target_trace_prompt_apart will be called; with `heads` */
    enum kern_dtype kv_dtype; /* one that the backend reads; F32 on the reference path */
};

/* What the model must be opened with to be traced (model_open). */
struct model_caps target_trace_caps(const struct target_trace_options *o);

/* E_RANGE names an option and its range; E_UNSUPPORTED: the device reads whole blocks alone and
 * `apart` is asked for; E_NOMEM with the bytes. m and k must outlive the trace. */
int target_trace_open(struct target_trace **out, const struct target_trace_options *o,
                      struct model *m, struct kern *k, struct err *e);
void target_trace_close(struct target_trace *t); /* NULL: nothing */
/* Backend memory that it has reserved. */
size_t target_trace_bytes(const struct target_trace *t);

int target_trace_n_tokens(const struct target_trace *t);

/* ---- Appending ---- */

/* Append ids[n] as prompt rows. The last n_look of them (0: none) are looked at: *mass gets
 * f32 [blocks of all tokens], the most that a deep layer's head of one of those rows pays to a
 * block; what `observed` selects by. Valid until the next call. */
int target_trace_prompt(struct target_trace *t, const int32_t *ids, int n, int n_look,
                        const float **mass, struct err *e);

/* The same by those that may read lists of their own: each KV head of each deep layer. */
struct target_seen {
    const float *mass;     /* [n_layers][n_heads][stride] the most over the query heads that read
                              the KV head, and over rows; valid until the next call */
    const float *quarters; /* [n_layers][n_heads][stride][4] likewise of each block's quarters */
    int n_layers, n_heads; /* deep ones; KV heads */
    int stride;
};
int target_trace_prompt_apart(struct target_trace *t, const int32_t *ids, int n, int n_look,
                              struct target_seen *out, struct err *e);

/* Attention of some rows by layer and head. */
struct target_masses {
    const float *mass; /* [n_layers][n_heads][stride], valid until the next call; the sum over rows:
                          a head's blocks sum to n_rows */
    int first_layer, n_layers; /* the deep ones */
    int n_heads;
    int n_rows;
    int n_blocks; /* of all tokens, the rows' own among them */
    int stride;
};

/* Append ids[n], n <= TARGET_TRACE_LOOK, as prompt rows and tell what they attend to. */
int target_trace_look(struct target_trace *t, const int32_t *ids, int n, struct target_masses *out,
                      struct err *e);

/* Append one prompt row and tell what it pays, as target_trace_prompt_apart does of several. */
int target_trace_look_apart(struct target_trace *t, int32_t id, struct target_seen *out,
                            struct err *e);

/* What deep layers read: block[0..n) of the first n_blocks blocks, ascending, and every block
 * behind those. Rows must stand behind the first n_blocks blocks' begin. The rest is for traces
 * whose options say `apart`. */
struct target_kept {
    const int32_t *block;
    int n, n_blocks;
    const uint8_t *quarters; /* [n] bits 0..3: quarters that are read, 15 of a block that rows lie
                                in; NULL: all of every block */
    /* [deep layers][KV heads]: each reads what its own says, of the same n_blocks and without `own`
     * again, and nothing above but n_blocks counts. NULL: all read the above. */
    const struct target_kept *own;
};

/* Append ids[n] as an answer's rows through `kept` (NULL: dense). nll[n] (NULL: not wanted): what
 * the tokens were worth, -log p of each behind what stands before it; argmax[n] (NULL): what would
 * have been drawn greedily in its place. The first is told by the row before: after a rewind to a
 * place where no call ended it is unknown, NaN and -1. The last row of a prompt was computed
 * densely, as in serving. E_NUMERIC where logits hold NaN. */
int target_trace_force(struct target_trace *t, const int32_t *ids, int n,
                       const struct target_kept *kept, float *nll, int32_t *argmax, struct err *e);

/* The same through a list of whole blocks, with what the rows pay to it: used[kept->n_blocks] gets,
 * of the blocks in the list, the most that a head of a deep layer pays to it in one of the rows,
 * NaN of others; what `drop` goes by (docs/sparsity.md). */
int target_trace_force_used(struct target_trace *t, const int32_t *ids, int n,
                            const struct target_kept *kept, float *used, struct err *e);

/* Draw greedily, up to n tokens or the first of stop[n_stop], into out[n]; *n_out without the stop
 * token. The last token drawn is not appended (force it to go on). */
int target_trace_generate(struct target_trace *t, int n, const struct target_kept *kept,
                          const int32_t *stop, int n_stop, int32_t *out, int *n_out, struct err *e);

/* As if for each of n_answers lists (NULL among them: dense) lead[n_lead] were forced and up to n
 * tokens drawn by target_trace_generate, each from here: the same tokens, in passes that hold rows
 * of all of them. Answer i gets out[i * n ..], n_out[i] of them. The trace itself stands where it
 * stood; what was computed is gone. */
int target_trace_answers(struct target_trace *t, int n_answers,
                         const struct target_kept *const *kept, const int32_t *lead, int n_lead,
                         int n, const int32_t *stop, int n_stop, int32_t *out, int *n_out,
                         struct err *e);

/* Back to the first n_tokens tokens: states, representatives and what follows are as if no more had
 * been appended. */
int target_trace_rewind(struct target_trace *t, int n_tokens, struct err *e);

/* ---- Reading ---- */

/* States that enter layer tap_layer[tap] at positions first..first + n - 1: f32 [n][H]. */
int target_trace_states(struct target_trace *t, int tap, int first, int n, float *out,
                        struct err *e);
/* Representatives of n blocks from `first` on: f32 [n][rows of a kern_plane][H], sums over each
 * quarter's tokens, then what else the options ask for. Quarters without tokens hold anything. */
int target_trace_plane(struct target_trace *t, int tap, int first, int n, float *out,
                       struct err *e);
/* The scorer's number of every block: f32 [blocks of all tokens]; with by_quarter four, of each
 * quarter. */
int target_trace_score(struct target_trace *t, int tap, const struct kern_scorer *s, float *out,
                       struct err *e);

/* What the newest TARGET_RECHECK_ROWS tokens pay in the select layer, whose states are those of
 * `tap`, to the blocks list[n] (ascending, those tokens' own among them): *mass gets f32 [n], the
 * most over heads and rows. What a re-check goes by (docs/sparsity.md). Valid until the next call.
 */
int target_trace_recheck(struct target_trace *t, int tap, const int32_t *list, int n,
                         const float **mass, struct err *e);

/* Where a block's KV of the shallow or deep layers lies in backend memory, for tests. */
void *target_trace_page(const struct target_trace *t, bool deep, int block, size_t *bytes);

#endif
