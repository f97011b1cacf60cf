#ifndef TANDEM_ENGINE_PRIVATE_H
#define TANDEM_ENGINE_PRIVATE_H

/* What the files of engine/ share. Who owns what:
 *   step thread   pool, model, backend, waiting and running lists, batch, live numbers; no lock
 *   `lock`        inbox, closing; taken by the step thread only when `news` says that there is
 * something `stats_lock`  the published copy of the numbers a request     its owner and the engine
 * hold one reference each; whoever drops the last one frees */

#include <pthread.h>
#include <stdatomic.h>

#include "draft/draft.h"
#include "engine/engine.h"
#include "model/batch.h"
#include "target/scorer.h"

enum {
    ENGINE_DEFAULT_DRAFT_TOKENS = 8, /* most of a round: options.max_draft_tokens */
    ENGINE_FAR_BEHIND = 64,  /* tokens that a draft may lag and still propose in this round */
    ENGINE_MIN_CHUNK = 16,   /* prompt rows of a step that has any, where others decode */
    ENGINE_FIRST_CHUNK = 64, /* the same while step times are not known */
    ENGINE_MAX_BANNED = 8,   /* entries of kern_sample.banned */
    ENGINE_MAX_GROUPS = 2,   /* layer groups of the target: shallow, deep */
    ENGINE_ERROR_BYTES = 256,
};

/* ---- Sizes: what opening reserves, computed from headers alone (setup.c) ---- */

struct engine_sizes {
    struct engine_options o; /* every default filled in; strings are the caller's */
    enum kern_dtype kv_dtype;
    int vocab; /* rows of the head */
    int model_layers;
    int n_groups;
    enum kvpool_class group_class[ENGINE_MAX_GROUPS];
    int group_first[ENGINE_MAX_GROUPS], group_layers[ENGINE_MAX_GROUPS];
    struct model_caps caps;
    struct kvpool_options pool;
    size_t weight_bytes, workspace_bytes;
    /* Parts of the step's buffers. */
    size_t batch_bytes, logits_bytes, history_bytes, sample_bytes, selection_bytes, states_bytes;
    /* Lists that a request may ask for beside one for all deep layers: by layer, by KV head where
     * list_heads > 1; list_layers 0: none. */
    int list_layers, list_heads;
    bool list_quarters; /* and quarters of blocks */
    int state_cols;     /* the model's width where states of blocks are kept; 0: nobody asks */
    bool state_first;   /* and each block's first state, too */
    bool state_minmax, state_spread; /* and what `minmax` and `bound` go by */
    bool has_scorer;
    struct target_scorer_defaults scorer;
    struct kern_scorer scorer_shape; /* without weights */
    size_t scorer_bytes;             /* of its weights */
    size_t batch_host_bytes;         /* the host's copies */
    bool has_draft;
    int draft_context, draft_layers;
    struct proposer_options proposer;
    struct proposer_sizes draft;
};

struct model_source;

/* Open the backend that o->device names (device.c). plan_only: sizes are enough. */
int engine__open_device(struct kern **out, const struct engine_options *o, bool plan_only,
                        struct err *e);

/* Fill *s and *plan from the options, the headers and what the device has free; draft and scorer
 * are NULL without one. Errors name option and value; a plan that does not fit is no error here. */
int engine__sizes(struct engine_sizes *s, struct plan *plan, const struct engine_options *o,
                  const struct model_source *src, const struct model_source *draft,
                  const struct target_scorer_file *scorer, const struct kern *k,
                  size_t device_free_bytes, struct err *e);

/* What keeps a server from starting: no pool, more than is free, or a context that was asked for by
 * number and does not fit (E_FULL with advice). A model's own context that is longer than the pool
 * can hold only lowers s->o.context, the limit of what is admitted. */
int engine__check_plan(struct engine_sizes *s, const struct plan *plan, bool asked_context,
                       struct err *e);

/* ---- Requests (request.c) ---- */

enum engine_notify { NOTIFY_FREE, NOTIFY_BUSY, NOTIFY_NEVER };

struct engine_request {
    /* Set at submission. */
    struct verify_params params;
    int n_prompt, max_tokens; /* max_tokens: the effective one, n_prompt + max_tokens <= context */
    uint64_t seed, salt, conversation;
    bool use_cache, has_penalties;
    void (*notify)(void *arg);
    void *notify_arg;
    int32_t *ids;                     /* [n_prompt + max_tokens]: prompt, then answer */
    struct engine_logprobs *logprobs; /* [max_tokens] or NULL */
    uint8_t *drafted;                 /* [max_tokens] */
    void *lookup_memory;              /* NULL: lookup is off for it */
    struct target_settings sparse;    /* nothing unset */
    float *score; /* [most lists][blocks of the prompt; exact: all]: attention mass of those seen so
                     far, then scratch of the selection. NULL: nothing is selected */
    int32_t *read; /* [most lists][blocks of n_prompt + max_tokens]: what deep layers read, once
                      n_kept > 0 */
    int *kept;     /* [most lists]: leading entries of each that were selected */
    float *quarter_mass; /* as score, [4] of each block's quarters; NULL: whole blocks are read */
    uint8_t *quarters;   /* as read: which are read of each block */
    float *used; /* [blocks of the prompt]: target_view's, of the list in `read`. NULL: nobody drops
                  */
    uint64_t sparse_law;  /* of its answer's pages; 0: dense */
    uint64_t prefill_law; /* of its prompt's pages; 0: dense */
    int64_t submitted_ns;

    /* Published by the step thread; the plain fields below `finish` are written before it. */
    atomic_int n_tokens, n_cached_prompt;
    atomic_llong admitted_ns, first_token_ns, committed_ns;
    atomic_int finish;
    int64_t finished_ns;
    int stop_idx, error_code;
    char error[ENGINE_ERROR_BYTES];
    struct engine_speculation speculation;
    enum engine_no_draft no_draft;
    struct engine_sparsity sparsity;

    /* Asked for by the owner. */
    atomic_bool cancel, paused;
    atomic_int refs;         /* owner, engine */
    atomic_int notify_state; /* enum engine_notify: no call begins once the owner has released */

    /* The step thread's own. */
    struct verify_text text;
    int seq;    /* in the pool */
    int slot;   /* histories */
    int n_out;  /* answer tokens committed; n_tokens follows at the end of the step */
    int n_kv;   /* positions whose K and V are in the pool */
    int n_rows; /* this step: rows, of which the last n_logits want logits */
    int n_logits;
    int first_logit; /* index of its first logits row */
    int round_idx;   /* index of its round, where n_logits > 0 */
    /* This round's proposal: n_draft tokens in ids, behind the committed ones; -1 each where the
     * model draws them. */
    int n_draft;
    int first_draft; /* entry of the batch's tokens for the first of them */
    int first_q;     /* row of the draft's probabilities, -1: none needed */
    bool has_bid;
    struct draft_bid bid;              /* what this round's choice was made of */
    int32_t looked_up[KERN_MAX_DRAFT]; /* what lookup had ready, bid.max_lookup of them */
    bool draft_nan;                    /* the draft's output held NaN */
    int n_draft_kv; /* positions that the draft has seen; -1: this request has no draft */
    struct draft_lookup lookup;
    struct draft_rate rate[DRAFT_N_SOURCES];
    struct draft_probe probe;
    int first_row; /* this step: of its rows, and its index among the pass's sequences */
    int pass_idx;
    int mass_line; /* this step: line of the batch's masses that its rows filled, -1: none */
    int n_kept;    /* entries that the epoch's longest list kept of the first n_ranked blocks; 0: no
                      list, all is read */
    int n_ranked;
    int n_lists;      /* of the epoch: 1, or what target_n_lists says */
    uint64_t list_id; /* of the epoch's lists, nobody else's */
    bool has_quarters;
    uint64_t n_left; /* positions that they leave out, summed over deep layers and KV heads */
    struct kvpool_walk place; /* along its prompt's cached blocks, behind n_placed tokens */
    int n_placed;
    struct target_epoch epoch;
    bool wants_selection, wants_wide; /* before its next pass */
    bool counts_more;                 /* its penalty counts hold tokens that were not committed */
    /* Exact answers (exact.c). */
    float *seen;    /* [TARGET_ROWS + 1][blocks of n_prompt + max_tokens]: masses of the newest
                       committed rows, by their number, and the prompt's. NULL: not exact */
    int n_seen;     /* rows since the prompt */
    int n_ahead;    /* provisional tokens in ids, behind the final ones; n_kv counts them */
    bool run_ended; /* the next round is the dense pass */
    bool is_dense;  /* this step's round is: its draft tokens are the provisional ones */
    struct verify_text ahead;           /* of the run; used where there are stop strings */
    int32_t run_lookup[KERN_MAX_DRAFT]; /* what lookup said where the run began */
    int n_run_lookup, run_match;
    bool news;
    enum engine_finish end; /* what `finish` will be, once on the done list */
    int64_t last_token_ns;
    struct engine_request *next;
};

/* Allocate for checked options; one reference for the owner and one for the engine. */
int engine__request_make(const struct engine *g, const struct engine_submit_options *o,
                         int max_tokens, struct engine_request **out, struct err *e);
void engine__request_unref(struct engine_request *r);
void engine__request_notify(struct engine_request *r);

static inline bool engine__decodes(const struct engine_request *r) {
    return r->n_kv >= r->n_prompt;
}

/* Tokens that its next round goes on from. */
static inline int engine__n_tokens(const struct engine_request *r) {
    return r->n_prompt + r->n_out + r->n_ahead;
}

/* A singly linked list, first in first out. */
struct engine_list {
    struct engine_request *head, *tail;
};
void engine__list_push(struct engine_list *l, struct engine_request *r);
struct engine_request *engine__list_pop(struct engine_list *l);

/* ---- The batch of a step (batch.c) ---- */

/* States of the select layer and what is kept of them (states.c); nothing where state_cols is 0. */
struct engine_states {
    float *state;             /* backend, [max_rows][cols]: entering the select layer, a pass's */
    float *ring;              /* backend, [max_seqs][KERN_STATE_QUERIES][cols], by slot */
    struct model_array notes; /* kern_note [max_seqs] */
    void *scratch;            /* of a score */
    int n_notes;              /* committed in this step */
};

struct engine_batch {
    struct model_batch pass;
    /* Uploaded with the pass's own arrays. */
    struct model_array round;  /* kern_round [max_seqs] */
    struct model_array sample; /* kern_sample [max_logits] */
    /* What a step brings back, in one copy. */
    struct model_array kv_bytes;   /* u64 [ENGINE_MAX_GROUPS]: K and V that attention ever read */
    struct model_array n_accepted; /* i32 [max_seqs] */
    struct model_array drawn;   /* i32 [max_seqs][max_draft_tokens], the draft's tokens by turn */
    struct model_array sampled; /* kern_sampled [max_logits] */
    float *dev_logits;          /* [max_logits][vocab] */
    uint16_t *dev_prompt_count, *dev_output_count; /* [max_seqs][vocab] */
    uint16_t *count;                   /* [vocab], staging: a heap block, so that it may change */
    void *scratch;                     /* of the decision */
    void *host_block, *dev_block_base; /* what everything above is carved from */
    /* What deep layers' attention saw of the rows that are looked at, in a pass that has any. */
    struct model_array mass_line; /* i32 [max_rows] */
    struct model_array mass;      /* f32 [lines][mass_parts][max_blocks] */
    const float *no_mass;         /* host: as many zeroes */
    int n_mass;                   /* lines of this pass */
    int mass_parts; /* 1: the most over deep layers and heads; else [layer][KV head] */
    struct model_array quarter_mass; /* the same, [4] of each block; empty where nobody may ask */
    bool looks_at_quarters;          /* in this pass */
    float *look;                     /* host, [max_blocks]: what a look brings back */
    struct engine_states states;
    uint64_t kv_bytes_seen[ENGINE_MAX_GROUPS]; /* of kv_bytes, at the last look */
    int n_rounds;
    bool has_penalties; /* some round's tokens are counted */
};

struct engine_costs {  /* running estimates of where a step's time goes */
    double gen_ns[16]; /* a step of 2^i generated rows and nothing else; 0: not known */
    double prompt_row_ns;
};

/* Sizes of the step's buffers into *s. */
void engine__batch_sizes(struct engine_sizes *s, const struct kern *k);
int engine__batch_open(struct engine *g, struct err *e);
void engine__batch_close(struct engine *g);

/* Fill and upload the batch from g->turn[0..n_turn), whose pages are extended; describes the pass.
 */
int engine__batch_build(struct engine *g, struct model_pass *pass, struct err *e);

/* The same of one sequence of n generated rows behind `context` positions, whose tokens nobody
 * cares for: a round of n - 1 draft tokens (calibrate.c). */
int engine__batch_build_dummy(struct engine *g, int seq, int context, int n,
                              struct model_pass *pass, struct err *e);

/* A batch of the newest n positions of `r` that were noted, at which blocks read[0..n_read) are
 * looked at, and what it brings: the mass of each entry, in batch.look. Waits. What was built
 * before must be done with. */
int engine__batch_look(struct engine *g, const struct engine_request *r, const int32_t *read,
                       int n_read, int n, struct err *e);

/* Enqueue the pass and the decision of its rounds. */
int engine__batch_run(struct engine *g, const struct model_pass *pass, struct err *e);

/* Enqueue the way back of what was decided and seen; it is in the host's arrays after a sync. Then:
 * bytes of K and V read by each group since the last look. */
int engine__batch_fetch(struct engine *g, struct err *e);
void engine__batch_kv_bytes(struct engine *g, uint64_t out[ENGINE_MAX_GROUPS]);

/* What a request's draws have in common; the position is the caller's. */
struct kern_sample engine__sample_of(const struct engine *g, const struct engine_request *r);
struct kern_history engine__history(const struct engine *g);

/* Penalty counts of a request that was given a slot. What it emits is counted in the backend; where
 * less of a round was committed than was counted, `rewind` counts the answer anew. */
int engine__history_begin(struct engine *g, const struct engine_request *r, struct err *e);
int engine__history_rewind(struct engine *g, const struct engine_request *r, struct err *e);

/* ---- Selection (sparse.c) ---- */

/* What a scorer file needs of sizes; it was held against the model. */
void engine__states_scorer(struct engine_sizes *s, const struct target_scorer_file *f);

/* What of states stands in a block's page, without a place. */
struct kern_plane engine__states_shape(const struct engine_sizes *s);

/* Part of the step's buffers: carve, or count where `st` is all zero. */
void engine__states_layout(struct engine_states *st, struct model_carve *c,
                           const struct engine_sizes *z, const struct kern *k);
/* The pass gives its states. */
void engine__states_tap(const struct engine *g, struct model_pass *pass);
/* The first n rows of `r` in this pass were committed: remember, and once all were, note them. In
 * stream order before anything that may take the pages of who left. */
void engine__states_commit(struct engine *g, const struct engine_request *r, int n);
int engine__states_note(struct engine *g, struct err *e);
/* Can a selector by states score quarters of blocks? */
bool engine__states_tell_quarters(const struct engine *g, int selector);
/* Enqueue scores of all blocks of `r`, which was in this pass, into `out` (backend), and of their
 * quarters into `quarters`, NULL: not wanted. */
int engine__states_score(struct engine *g, const struct engine_request *r, int selector, float *out,
                         float *quarters, struct err *e);

/* Can this engine do what these settings, over its own, ask for? E_UNSUPPORTED says what it would
 * take. asked: NULL, nothing. */
int engine__sparse_check(const struct engine *g, const struct target_settings *asked,
                         struct err *e);

/* At submission: settings, and memory where blocks may go. false: no memory. */
bool engine__sparse_init(const struct engine *g, struct engine_request *r,
                         const struct target_settings *asked);

/* Whose generated pages a request may find and leaves: its conversation, under the law of its
 * settings. 0: nobody's. */
uint64_t engine__sparse_owner(const struct engine_request *r);

/* Of the turn's requests: does one read, in this pass, or look by layer or head? */
bool engine__sparse_reads_own(const struct engine *g);
bool engine__sparse_looks_own(const struct engine *g, bool *at_quarters);

/* Give lines to those of its rows in the pass that are looked at: first_row... */
void engine__sparse_mark(struct engine *g, struct engine_request *r, int first_row);

/* What the rows of the pass's `line` saw of n blocks in deep layers: raises `out`. */
void engine__sparse_raise(const struct engine *g, int line, int n, float *out);

/* After the sync: take in what was seen. Before its first answer token is committed: select, or
 * ask for it. */
void engine__sparse_see(struct engine *g, struct engine_request *r);
void engine__sparse_select(struct engine *g, struct engine_request *r);

/* An answer token of a generated row was committed; logprob: its own. True: its epoch ends here,
 * nothing behind it may be committed from this pass. */
bool engine__sparse_token(struct engine_request *r, float logprob);
/* Most tokens that a round of `r` may commit, >= 1: no round passes an end that is known. */
int engine__sparse_left(const struct engine_request *r);
bool engine__sparse_wants_logprob(const struct engine_request *r);
/* All commits of the step are done and noted: select for those that asked for it. Waits where
 * scores are needed. */
int engine__sparse_renew(struct engine *g, struct err *e);

/* Blocks that `r` reads in a layer group: *n_read is the sequence's number of blocks and becomes
 * theirs; NULL: all. */
const int32_t *engine__sparse_list(const struct engine_request *r, enum kvpool_class c,
                                   int *n_read);
/* The same of one KV head of the layer-th deep layer; *quarters: of each block, NULL: all. The id
 * of all that a request reads there; 0: everything. */
const int32_t *engine__sparse_own(const struct engine *g, const struct engine_request *r, int layer,
                                  int head, int *n_read, const uint8_t **quarters);
uint64_t engine__sparse_id(const struct engine_request *r);
/* Its lists are other ones from now on, of which the first n_lists are used, without `quarters` or
 * with those of the selected blocks. */
void engine__sparse_changed(struct engine *g, struct engine_request *r, int n_lists, bool quarters);

/* Positions that the target reads for n_tokens of `r`, a mean over its layers. */
double engine__sparse_kv(const struct engine *g, const struct engine_request *r, int n_tokens);

/* A pass of its rows ran: count what their lists held. */
void engine__sparse_count(struct engine *g, struct engine_request *r);
/* The same by the kernels' rule, whole pages of K: added to the listed bytes of `out`. */
void engine__sparse_listed(const struct engine *g, const struct engine_request *r,
                           struct engine_answer_kv *out);

/* ---- Re-checks (recheck.c) ---- */

/* At submission, behind engine__sparse_init. false: no memory. */
bool engine__recheck_init(struct engine_request *r);
/* Its generated rows are looked at, a line each. */
bool engine__recheck_marks(const struct engine_request *r);
/* The first n of its rows were committed: take in what they paid. */
void engine__recheck_see(const struct engine *g, struct engine_request *r, int n);
/* Before a selection: what view->used and view->attention are to hold. scratch: f32 [blocks], not
 * where the view's numbers stand. May wait. */
int engine__recheck(struct engine *g, struct engine_request *r, struct target_view *view,
                    float *scratch, struct err *e);
/* After it: the new list has not been used. */
void engine__recheck_begin(struct engine_request *r);

/* ---- Sparse prefill (prefill.c) ---- */

/* Lists of chunks whose pages may be cached. */
struct engine_lists {
    struct engine_known *entry; /* one block of memory with the bits; NULL: no cache */
    uint64_t *bits, clock;
};
size_t engine__prefill_bytes(const struct engine_sizes *z);
int engine__prefill_open(struct engine *g, struct err *e);
void engine__prefill_close(struct engine *g);

/* Under which number a request's prompt is shared: its salt, and the law where it is not dense. */
uint64_t engine__prefill_salt(const struct engine_request *r);
/* Of `most` cached tokens, whole blocks, those behind which it can go on. */
int engine__prefill_hit(const struct engine *g, const struct engine_request *r, int most);
/* Admitted with n_kv tokens from the cache: the list of the chunk that they end in. */
void engine__prefill_resume(struct engine *g, struct engine_request *r);
/* Rows that a pass may still take of its prompt before a border. */
int engine__prefill_left(const struct engine_request *r);
/* Prompt rows were committed, n_kv moved: at a border ask for a list. Then make it, of the scores,
 * or without where the selector needs none; scratch: f32 [max_blocks], which may be `score`. */
void engine__prefill_advance(struct engine_request *r);
int engine__prefill_selector(const struct engine_request *r);
void engine__prefill_select(struct engine *g, struct engine_request *r, const float *score,
                            float *scratch);
/* A pass of its prompt's rows ran; bytes: K and V of a position in one layer. */
void engine__prefill_count(struct engine *g, struct engine_request *r, uint64_t layer_bytes,
                           int n_deep, int n_layers);

/* ---- Exact answers (exact.c) ---- */

/* At submission, behind engine__sparse_init. false: no memory. */
bool engine__exact_init(const struct engine *g, struct engine_request *r, bool show_special,
                        struct err *e);
/* Is this step's round of `r` provisional? */
static inline bool engine__is_ahead(const struct engine_request *r) {
    return r->seen && engine__decodes(r) && !r->is_dense;
}
/* At the beginning of a step, of a generating request: whether its round is the dense pass, for
 * which n_draft is set. *n_taken: rows that dense passes of this step add. false: its pass finds no
 * room in this step. */
bool engine__exact_turn(const struct engine *g, struct engine_request *r, int *n_taken);
/* Provisional tokens that this run may still get; INT32_MAX: not exact. */
int engine__exact_left(const struct engine *g, const struct engine_request *r);
/* What lookup has for this round, into r->looked_up. */
int engine__exact_lookup(struct engine_request *r, int most, int *n_match);
/* A provisional round was decided; run: its tokens. Ends the round. */
void engine__exact_commit(struct engine *g, struct engine_request *r, int n_accepted,
                          const struct kern_sampled *run);
/* The dense pass was decided and n_committed tokens emitted; K and V of its first n_rows rows are
 * final. */
void engine__exact_end(struct engine *g, struct engine_request *r, int n_rows, int n_accepted,
                       int n_committed);
/* Nothing provisional is left: back to what is final. */
void engine__exact_drop(struct engine_request *r);
/* What was seen so far is the prompt's; masses of what was seen last, into r->score. */
void engine__exact_keep_prompt(struct engine_request *r);
void engine__exact_masses(struct engine_request *r, int n_blocks);

/* ---- Failure (queue.c) ---- */

/* The backend failed with rc; `e` is what its operation said. From now on engine_failed tells. */
void engine__break(struct engine *g, int rc, const struct err *e);

/* ---- Schedule (schedule.c) ---- */

/* Who generates in this step: g->turn, in the order of admission. Then, after they proposed, the
 * rows of all: n_rows and n_logits of each, prompt chunks behind the generating ones. Returns rows.
 */
void engine__collect(struct engine *g);
int engine__schedule(struct engine *g);
void engine__costs_update(struct engine_costs *c, int n_gen, int n_prompt, double ns);
int engine__prompt_budget(const struct engine_costs *c, int n_gen, int max_rows, double share);

/* ---- Proposals (round.c) ---- */

/* A request was admitted: its index, rates, what its draft has seen (n_draft_hit tokens, -1: it has
 * none, for the reason `why`). */
void engine__round_begin(struct engine *g, struct engine_request *r, int n_draft_hit,
                         enum engine_no_draft why);

/* Draft tokens a round by a request's settings or else the engine's: VERIFY_DRAFT_AUTO, 0 (off)...
 */
int engine__draft_setting(const struct engine *g, const struct verify_params *p);

/* Set n_draft of every request of g->turn and write the tokens behind its committed ones. */
void engine__choose(struct engine *g);

/* The draft's passes of this step: fill and upload, once the target's batch is; enqueue, with marks
 * of time behind *mark; after the sync, what they took and drew. */
int engine__draft_prepare(struct engine *g, struct err *e);
int engine__draft_run(struct engine *g, int *mark, struct err *e);
int engine__draft_done(struct engine *g);

/* A round was decided: n_accepted of its draft tokens, n_committed tokens emitted in all. Counts
 * and learns from it, and rolls both caches back to what is committed (r->n_kv). */
void engine__round_end(struct engine *g, struct engine_request *r, int n_accepted, int n_committed);

/* This request goes on without a draft. */
void engine__drop_draft(struct engine *g, struct engine_request *r, enum engine_no_draft why);

/* Measure one point of what passes cost, in an idle moment; false when all are known or nothing can
 * be measured (calibrate.c). */
bool engine__calibrate(struct engine *g);
/* Nothing is left to be measured. */
bool engine__is_calibrated(const struct engine *g);
/* Tell the table of what the draft's passes cost (arg: the engine); prompt rows are another kind.
 */
void engine__observe_draft(void *arg, const struct proposer_pass *pass);

/* ---- Numbers (stats.c) ---- */

void engine__stats_init(struct engine_stats *s);
void engine__stats_publish(struct engine *g);

/* ---- The engine ---- */

struct engine {
    struct engine_sizes sizes;
    struct kern *kern;
    struct model *model;
    struct proposer *proposer;    /* NULL: no draft model */
    struct target_scorer *scorer; /* NULL: none */
    struct tokenizer *tokenizer;
    const struct chat_family *chat;
    char chat_error[256];
    struct plan plan;
    uint64_t fingerprint;
    int vocab;                  /* ids that may be drawn: entries of the tokenizer, not padding */
    int eog[ENGINE_MAX_BANNED]; /* end tokens, the first of n_eog */
    int n_eog;
    int pool_tokens; /* of one sequence in an empty pool, without a draft */
    struct kvpool *pool;
    void *arena;
    struct engine_batch batch;
    struct engine_lists known;
    int64_t opened_ns;
    bool has_lock, has_thread;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct engine_list inbox; /* lock */
    bool closing;             /* lock */
    atomic_bool news, draining;
    atomic_int n_waiting, n_live; /* live: submitted and not finished */
    atomic_int failed;            /* E_* once the backend has failed; `failure` was set before */
    char failure[ENGINE_ERROR_BYTES];

    /* Step thread. */
    struct engine_list waiting, done;
    struct engine_request *running[ENGINE_MAX_SEQS]; /* in the order of admission */
    int n_running;
    struct engine_request *turn[ENGINE_MAX_SEQS]; /* this step's, generating ones first */
    int n_turn;
    int n_dense_rows; /* of this step: draft rows of dense passes of exact answers */
    int free_slot[ENGINE_MAX_SEQS], n_free_slots;
    struct engine_costs costs;
    struct draft_costs passes;                /* of the choice of draft lengths */
    struct draft_rate prior[DRAFT_N_SOURCES]; /* of all requests: what a new one starts from */
    struct draft_bid bid[ENGINE_MAX_SEQS];
    struct engine_request *bidder[ENGINE_MAX_SEQS];
    struct proposer_turn draft_turn[ENGINE_MAX_SEQS];
    struct engine_request *drafter[ENGINE_MAX_SEQS];
    int n_draft_turns;
    int n_calibrated; /* points measured so far, of one context */
    bool calibrates_far, is_calibrated;
    int64_t draft_ns, kernel_ns; /* of this step: in draft passes; in the backend's operations */
    int64_t draft_pass_rows;     /* rows of this step's draft passes */
    int64_t select_ns;           /* of this step: waiting for scores and selecting */
    uint64_t n_list_ids;
    struct engine_stats live;
    void (*trace)(void *arg, const struct engine_request *r, int position, const float *logits,
                  int n);
    void *trace_arg;
    float *trace_row; /* [vocab] */
    void (*trace_kv)(void *arg, const struct engine_request *r, const struct engine_kv_view *v);
    void *trace_kv_arg;
    void (*trace_selection)(void *arg, const struct engine_request *r,
                            const struct engine_kv_view *v, const int32_t *kept, int n_kept,
                            int n_blocks);
    void *trace_selection_arg;

    pthread_mutex_t stats_lock;
    struct engine_stats published;
};

/* step.c: the step thread's body; where a request's pages lie. */
void *engine__thread(void *arg);
struct engine_kv_view engine__kv_view(const struct engine *g, const struct engine_request *r);

/* queue.c: called by the step thread. Moves the inbox to `waiting`; true when the engine is
 * closing. */
bool engine__take_inbox(struct engine *g);
void engine__sleep(struct engine *g); /* until news */
void engine__wake(struct engine *g);  /* any thread: there is something to look at */

#endif
