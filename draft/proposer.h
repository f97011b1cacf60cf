#ifndef TANDEM_DRAFT_PROPOSER_H
#define TANDEM_DRAFT_PROPOSER_H

/* The draft model: a second instance of model/ with pages, lists and positions of its own in the
 * same pool. Proposes for a batch of sequences at once: one pass in which each catches up on the
 * tokens that it has not seen (after a rejected tail, after rounds without it, after a prefix hit)
 * and draws its first token, then one pass per further token. Passes are chained in the backend:
 * the host enqueues them all, then whatever follows, and waits once.
 *
 *   prepare (fills, uploads) -> run (enqueues) -> the caller's sync -> done (times)
 *
 * Owned by the step thread. */

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "kvpool/kvpool.h"
#include "model/model.h"

struct err;
struct proposer;
struct model_source;

struct proposer_options {
    int max_seqs, max_draft; /* sequences of a round, draft tokens of each */
    int max_rows;            /* of a catch-up pass */
    int max_blocks;          /* of a sequence */
    int vocab;               /* ids that may be drawn: the tokenizer's entries */
    int window;              /* engine_options.draft_window */
    enum kern_dtype kv_dtype;
};

/* Bytes that opening reserves of the backend's memory and of the host's, from headers alone. */
struct proposer_sizes {
    size_t weight_bytes, workspace_bytes, batch_bytes, prob_bytes, host_bytes;
};
int proposer_sizes(struct proposer_sizes *out, const struct proposer_options *o,
                   const struct model_source *src, const struct model_borrow *borrow,
                   const struct kern *k, struct err *e);

int proposer_open(struct proposer **out, const struct proposer_options *o,
                  const struct model_source *src, const struct model_borrow *borrow, struct kern *k,
                  void *arena, struct err *e);
void proposer_close(struct proposer *p);

const struct model_config *proposer_config(const struct proposer *p);

/* Draft pages that a sequence of n_tokens may hold at once under these options: what to reserve. */
int proposer_blocks(const struct proposer_options *o, int n_tokens);

/* One sequence's part of a round. */
struct proposer_turn {
    /* In. */
    int seq;            /* in the pool, with draft pages */
    const int32_t *ids; /* committed tokens, the pending one last */
    int n_tokens;
    int n_rows;  /* tokens that it may catch up on now; fewer than n_tokens - n_kv leave it
                    behind, and nothing is proposed */
    int n_draft; /* draft tokens wanted; 0: only catch up */
    struct kern_sample sample; /* the request's settings and history; position, purpose, recent and
                                  bans are the proposer's */
    int min_position;          /* end tokens are banned at positions below */
    bool wants_probs; /* acceptance will need the distributions (neither greedy nor Gumbel) */
    int first_target; /* entry of `target` that takes its first draft token */
    /* In and out. */
    int n_kv; /* positions whose K and V the draft's pages hold, once the passes have run */
    /* Out. */
    int n_proposed; /* draft tokens that will be drawn: n_draft, or 0 where it stays behind */
};

/* Numbers of one pass, for the cost table. */
struct proposer_pass {
    int n_rows;
    int n_prompt;     /* of n_rows, those of the prompt class: longer ways to catch up */
    double kv_tokens; /* positions read, summed over sequences */
    int64_t ns;       /* of the device; 0: not known */
};

/* Turn i's row of probabilities of its first draft token, and the entry of `drawn` that takes it.
 */
int proposer_first(const struct proposer *p, int turn);

/* Lay out the passes of these turns and upload what they start from. Pages of the class
 * KVPOOL_DRAFT are extended for all of them (asserted to be reserved), those behind the window
 * forgotten. Afterwards the host's copies are the backend's until the next sync. */
int proposer_prepare(struct proposer *p, struct kvpool *pool, const int *eog, int n_eog,
                     struct proposer_turn *turn, int n_turns, struct err *e);

/* Enqueue the passes. Draft tokens go to `drawn` [max_seqs][max_draft], turn i's from
 * proposer_first on, and to `target`, the target's tokens (backend memory, both). A token of -1:
 * the draft's output held NaN there; those behind it are -1, too. An end token ends nothing: what
 * is drawn behind it is never emitted. history: the target's counts (`recent` is ignored). Marks
 * *mark + 1 .. are set behind each pass, *mark being set already, and *mark moves to the last. */
int proposer_run(struct proposer *p, const struct kern_history *history, int32_t *drawn,
                 int32_t *target, int *mark, struct err *e);

/* After the sync: `observe` is told of each pass. */
int proposer_done(struct proposer *p, void (*observe)(void *arg, const struct proposer_pass *pass),
                  void *arg);

/* Where the draft's distributions of the last run lie, for kern_ops.accept. */
struct kern_draft_probs proposer_probs(const struct proposer *p);

#endif
