#ifndef TANDEM_ENGINE_PRIVATE_H
#define TANDEM_ENGINE_PRIVATE_H

/* What the files of engine/ share. Who owns what:
 *   step thread   pool, model, backend, waiting and running lists, batch, live numbers; no lock
 *   `lock`        inbox, closing; taken by the step thread only when `news` says that there is
 * something `stats_lock`  the published copy of the numbers a request     its owner and the engine
 * hold one reference each; whoever drops the last one frees */

#include <pthread.h>
#include <stdatomic.h>

#include "engine/engine.h"

enum {
    ENGINE_ROWS_A_SEQ =
        1, /* rows of a generating sequence in a step: pending token + draft tokens */
    ENGINE_PLAN_DRAFT_TOKENS = 8, /* draft tokens a round that a plan with a draft makes room for */
    ENGINE_MIN_CHUNK = 16,        /* prompt rows of a step that has any, where others decode */
    ENGINE_FIRST_CHUNK = 64,      /* the same while step times are not known */
    ENGINE_MAX_BANNED = 8,        /* entries of kern_sample.banned */
    ENGINE_MAX_GROUPS = 2,        /* layer groups of the target: shallow, deep */
    ENGINE_ERROR_BYTES = 256,
};

/* ---- Sizes: what opening reserves, computed from headers alone (setup.c) ---- */

struct engine_sizes {
    struct engine_options o; /* every default filled in; strings are the caller's */
    enum kern_dtype kv_dtype;
    int vocab; /* rows of the head */
    int n_groups;
    enum kvpool_class group_class[ENGINE_MAX_GROUPS];
    int group_first[ENGINE_MAX_GROUPS], group_layers[ENGINE_MAX_GROUPS];
    struct model_caps caps;
    struct kvpool_options pool;
    size_t weight_bytes, workspace_bytes;
    size_t batch_bytes, logits_bytes, history_bytes, sample_bytes; /* parts of the step's buffers */
    size_t batch_host_bytes;                                       /* the host's copies */
    size_t draft_weight_bytes, draft_prob_bytes;                   /* of a plan with a draft */
    int lookahead; /* tokens reserved beyond a sequence's own */
};

struct model_source;

/* Fill *s and *plan from the options, the headers and what the device has free; draft is NULL
 * without one. Errors name option and value; a plan that does not fit is no error here. */
int engine__sizes(struct engine_sizes *s, struct plan *plan, const struct engine_options *o,
                  const struct model_source *src, const struct model_source *draft,
                  const struct kern *k, size_t device_free_bytes, struct err *e);

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
    uint64_t seed, salt;
    bool use_cache, has_penalties;
    void (*notify)(void *arg);
    void *notify_arg;
    int32_t *ids;                     /* [n_prompt + max_tokens]: prompt, then answer */
    struct engine_logprobs *logprobs; /* [max_tokens] or NULL */
    int64_t submitted_ns;

    /* Published by the step thread; the plain fields below `finish` are written before it. */
    atomic_int n_tokens, n_cached_prompt;
    atomic_llong admitted_ns, first_token_ns;
    atomic_int finish;
    int64_t finished_ns;
    int stop_idx, error_code;
    char error[ENGINE_ERROR_BYTES];

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

/* A singly linked list, first in first out. */
struct engine_list {
    struct engine_request *head, *tail;
};
void engine__list_push(struct engine_list *l, struct engine_request *r);
struct engine_request *engine__list_pop(struct engine_list *l);

/* ---- The batch of a step (batch.c) ---- */

/* An array that the host fills and the backend reads. */
struct engine_array {
    void *host, *dev;
    size_t bytes; /* capacity */
};

struct engine_batch {
    struct engine_array token, position, row_seq, seq_row, seq_n_rows, logit_row, sample;
    struct engine_array slot_page[ENGINE_MAX_GROUPS], n_blocks[ENGINE_MAX_GROUPS];
    int32_t *dev_list[ENGINE_MAX_GROUPS]; /* [max_seqs][max_blocks] */
    int32_t *dev_block;                   /* the same shape: 0, 1, 2, ... in each list */
    uint64_t *dev_kv_bytes;
    float *dev_logits;                             /* [max_logits][vocab] */
    struct kern_sampled *dev_sampled, *sampled;    /* [max_logits], backend's and host's */
    uint16_t *dev_prompt_count, *dev_output_count; /* [max_seqs][vocab] */
    uint16_t *count;                               /* [vocab], staging */
    void *sample_scratch;
    void *host_block, *dev_block_base; /* what everything above is carved from */
    int n_gen, n_prompt, n_seqs, n_logits;
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

/* Penalty counts of a request that was given a slot, and of one more token. */
int engine__history_begin(struct engine *g, const struct engine_request *r, struct err *e);
int engine__history_add(struct engine *g, const struct engine_request *r, int32_t token,
                        struct err *e);

/* ---- Schedule (schedule.c) ---- */

/* Choose this step's rows: sets n_rows of each running request and g->turn in row order. Returns
 * rows. */
int engine__schedule(struct engine *g);
void engine__costs_update(struct engine_costs *c, int n_gen, int n_prompt, double ns);
int engine__prompt_budget(const struct engine_costs *c, int n_gen, int max_rows, double share);

/* ---- Numbers (stats.c) ---- */

void engine__stats_init(struct engine_stats *s);
void engine__histogram_add(struct engine_histogram *h, double seconds);
void engine__stats_publish(struct engine *g);

/* ---- The engine ---- */

struct engine {
    struct engine_sizes sizes;
    struct kern *kern;
    struct model *model;
    struct tokenizer *tokenizer;
    const struct chat_family *chat;
    char chat_error[256];
    struct plan plan;
    uint64_t fingerprint;
    int vocab;                  /* ids that may be drawn: entries of the tokenizer, not padding */
    int eog[ENGINE_MAX_BANNED]; /* end tokens, the first of n_eog */
    int n_eog;
    int pool_tokens; /* of one sequence in an empty pool */
    struct kvpool *pool;
    void *arena;
    struct engine_batch batch;
    int64_t opened_ns;
    bool has_lock, has_thread;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct engine_list inbox; /* lock */
    bool closing;             /* lock */
    atomic_bool news, draining;
    atomic_int n_waiting, n_live; /* live: submitted and not finished */

    /* Step thread. */
    struct engine_list waiting, done;
    struct engine_request *running[ENGINE_MAX_SEQS]; /* in the order of admission */
    int n_running;
    struct engine_request *turn[ENGINE_MAX_SEQS]; /* this step's, generating ones first */
    int n_turn;
    int free_slot[ENGINE_MAX_SEQS], n_free_slots;
    struct engine_costs costs;
    struct engine_stats live;
    void (*trace)(void *arg, const struct engine_request *r, int position, const float *logits,
                  int n);
    void *trace_arg;
    float *trace_row; /* [vocab] */

    pthread_mutex_t stats_lock;
    struct engine_stats published;
};

/* step.c: the step thread's body. */
void *engine__thread(void *arg);

/* queue.c: called by the step thread. Moves the inbox to `waiting`; true when the engine is
 * closing. */
bool engine__take_inbox(struct engine *g);
void engine__sleep(struct engine *g); /* until news */
void engine__wake(struct engine *g);  /* any thread: there is something to look at */

#endif
