#ifndef TANDEM_ENGINE_H
#define TANDEM_ENGINE_H

/* The engine: sequences in continuous batches over one model (later a pair), stepped by one thread
 * of its own. Requests are submitted from any thread; their tokens appear in memory that belongs to
 * the request, and the submitter is told to look. The step loop allocates nothing.
 *
 *   open -> submit -> (notify) poll ... poll until finished -> release -> close
 *
 * A request's output arrays are allocated at submission (max_tokens entries). The step thread
 * appends and publishes a count; the reader takes from its own cursor up to that count without a
 * lock. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"
#include "kvpool/kvpool.h"
#include "kvpool/plan.h"
#include "model/model.h"
#include "target/target.h"
#include "verify/verify.h"

struct err;
struct engine;
struct engine_request;

enum {
    ENGINE_MAX_SEQS = 256, /* running at once */
    ENGINE_DEFAULT_MAX_TOKENS = 1024,
};

struct engine_options {
    const char *model_path; /* .gguf or Hugging Face folder */
    const char *draft_path; /* the draft model, NULL: none (prompt lookup may still propose) */
    const char *device; /* "cpu" (default), "cuda", "cuda:N", or "auto": a GPU if there is one */
    const char *chat_template; /* family name that overrides detection, or NULL */
    int n_threads;             /* 0: all usable */
    enum kern_precision precision;
    const char *isa;        /* see kern_options */
    const char *kv_type;    /* "f16" (default, NULL), "bf16", "q8_0" (8 bits, CPU): caches of target
                               and draft; the reference path uses f32 */
    size_t kv_memory_bytes; /* of the pool's arena; 0: what is free, see engine_plan */
    int context;          /* most tokens of a sequence, refused where the pool cannot hold one such;
                             0: the model's, or as much of it as the pool holds */
    int max_seqs;         /* running at once; 0: 32 */
    int max_queue;        /* waiting for admission (each request does until the next step); beyond:
                             E_FULL; -1: 256, 0 counts as 1 */
    int max_rows;         /* rows of a step, > max_seqs; 0: 512 */
    double prefill_share; /* share of a step's time for prompt rows while others decode; 0: 0.5 */
    int select_layer; /* border of shallow and deep pages; -1: the scorer's, else round(3 L / 16) */
    bool prefix_cache;    /* default on: set by engine_options_default */
    int draft_tokens;     /* draft tokens a round: -1 auto (default), 0 off, 1..max_draft_tokens */
    int max_draft_tokens; /* most of a round, what buffers are made for: 1..KERN_MAX_DRAFT; 0: 8 */
    int draft_window;     /* the draft sees the first block and the newest ones of so many tokens, a
                             multiple of 64, >= 128; 0: everything */
    bool lookup;          /* prompt lookup proposes where it matches; default on */
    struct target_settings sparse; /* of requests that say nothing else; unset: off */
    const char *scorer_path; /* a scorer of blocks for this model, NULL: none; it brings its select
                                layer */
    bool dummy_weights;      /* random weights: model_path (and draft_path) give shapes alone, a
                                config.json is enough */
    const char *dummy_type;  /* "Q4_K": of all their matrices; NULL: as the files say */
};
void engine_options_default(struct engine_options *o);

/* Load, reserve, start the step thread. Everything that memory is reserved for is in the plan,
 * printed by the caller. Errors name file, key, value, numbers. progress (may be NULL) is called
 * while loading. */
int engine_open(struct engine **out, const struct engine_options *o,
                void (*progress)(void *arg, size_t done, size_t total), void *arg, struct err *e);

/* Stop at once: running requests end with ENGINE_ABORTED; release them first or after. */
void engine_close(struct engine *g);

/* Open the backend that o->device names, by o's threads, precision and instruction set, for whoever
 * runs a model without an engine. Close it through its ops. */
int engine_open_device(struct kern **out, const struct engine_options *o, struct err *e);

/* The cache type that `name` ("f16", "bf16", "q8_0"; NULL: f16) means on backend k: F32 on the
 * reference path. E_INVALID for another word, E_UNSUPPORTED for a type that the backend does not
 * read. */
int engine_kv_dtype(const char *name, enum kern_precision precision, const struct kern *k,
                    enum kern_dtype *out, struct err *e);

/* From headers alone, the same code that engine_open runs. device_free_bytes 0: this machine's. */
int engine_plan(struct plan *out, const struct engine_options *o, size_t device_free_bytes,
                struct err *e);

/* What was opened. */
const struct model_config *engine_model_config(const struct engine *g);
const struct tokenizer *engine_tokenizer(const struct engine *g);
const struct chat_family *engine_chat(const struct engine *g); /* NULL: none known */
const char *engine_chat_error(const struct engine *g);         /* why it is NULL */
const struct plan *engine_get_plan(const struct engine *g);
int engine_context(const struct engine *g); /* most tokens of a sequence, prompt and answer */
const char *engine_model_name(const struct engine *g);
const struct model_config *engine_draft_config(const struct engine *g); /* NULL: no draft */
uint64_t engine_model_fingerprint(const struct engine *g);
int engine_select_layer(const struct engine *g);
const struct kern_scorer *engine_scorer(const struct engine *g);       /* NULL: none */
struct target_settings engine_sparse_defaults(const struct engine *g); /* of requests that ask for
                                                                          nothing; resolved */
bool engine_is_dummy(const struct engine *g); /* the weights are random; the model's name says so */

/* ---- Requests ---- */

enum engine_finish {
    ENGINE_RUNNING = 0,
    ENGINE_STOP,   /* end token or stop string */
    ENGINE_LENGTH, /* max_tokens or the context's end */
    ENGINE_CANCELLED,
    ENGINE_FAILED, /* error: see engine_progress.error */
    ENGINE_ABORTED /* the engine was closed or drained past its deadline */
};
const char *
engine_finish_name(enum engine_finish f); /* "stop", "length", "cancelled", "error", "aborted" */

struct engine_logprobs {
    float logprob;
    int n_top;
    int32_t top_id[KERN_MAX_LOGPROBS];
    float top_logprob[KERN_MAX_LOGPROBS];
};

struct engine_submit_options {
    struct verify_params params;
    const int32_t *prompt; /* copied */
    int n_prompt;
    uint64_t salt;         /* prefix cache tenant */
    uint64_t conversation; /* who may reuse this answer's KV: requests of the same number (and
                              salt). 0: nobody; prompts are shared by all of a tenant anyway */
    const struct target_settings *sparse; /* NULL: the engine's; what is unset in it likewise */
    bool no_prefix_cache;                 /* neither take from the cache nor leave anything in it */
    bool show_special; /* stop strings are looked for in text that shows control tokens; give the
                          same to    verify_text_init */
    /* Called on the step thread at most once a step while there is news; must only wake the owner.
     */
    void (*notify)(void *arg);
    void *notify_arg;
};

/* Check and enqueue. E_RANGE (parameter), E_TOO_LONG (n_prompt, context and pool in the text),
 * E_FULL (queue: retry later), E_CLOSED (draining). The text is the answer for a client. Any
 * thread. */
int engine_submit(struct engine *g, const struct engine_submit_options *o,
                  struct engine_request **out, struct err *e);

/* What speculation did for one request, or for all. Only verified tokens count: a draft token is
 * accepted when it was emitted; what a stop cut off behind it is not. Of exact answers it tells
 * what sparse rounds accepted; engine_exact, what dense passes left of that. */
struct engine_speculation {
    uint64_t n_rounds;                            /* target passes with at least one draft token */
    uint64_t n_plain_rounds;                      /* target passes of one generated row */
    uint64_t n_drafted, n_accepted;               /* tokens, model and lookup together */
    uint64_t n_lookup_drafted, n_lookup_accepted; /* of those, by prompt lookup */
    uint64_t
        n_drafted_at[KERN_MAX_DRAFT]; /* by place in the round: how often the place was filled */
    uint64_t n_accepted_at[KERN_MAX_DRAFT]; /* and accepted */
    uint64_t n_page_rollbacks;              /* rejections that gave whole pages back */
    int64_t draft_ns, verify_ns; /* time in the draft's passes and in the target's, whole batches: a
                                    request's share is by rows */
};
/* Why a request that asked for a draft went on without one. */
enum engine_no_draft {
    ENGINE_DRAFT_OK,
    ENGINE_DRAFT_NONE,
    ENGINE_DRAFT_OFF,
    ENGINE_DRAFT_MEMORY,
    ENGINE_DRAFT_CONTEXT
};
const char *
engine_no_draft_name(enum engine_no_draft n); /* "", "no draft model", "off", "draft memory short",
                                                  "beyond the draft's context" */

/* What dense passes made of exact answers' provisional tokens. */
struct engine_exact {
    uint64_t n_passes;                  /* dense ones */
    uint64_t n_provisional, n_accepted; /* tokens that they verified; of those, emitted */
    uint64_t n_tokens; /* emitted by them, their own included: n_tokens / n_passes a pass */
};

/* What sparse prefill did: K and V of the positions that prompt rows saw, row by row, whatever
 * passes they came in; dense: had no list left anything out. */
struct engine_prefill {
    uint64_t n_selections;     /* lists made; those of cached chunks are not */
    uint64_t n_blocks, n_kept; /* of a request: at its newest list; of all: sums over lists */
    uint64_t kv_bytes, kv_dense_bytes;
};

/* What SparDA did for one request, docs/sparsity.md. */
struct engine_sparsity {
    struct target_settings settings; /* nothing unset; selector off: dense by wish, else who chose
                                        at the prompt's end */
    int n_selections, n_wide;        /* of these, made wider by surprise */
    int n_blocks, n_kept; /* of the prompt (an exact answer: of all that is final) at the newest
                             selection, reserve and pinned included; equal, or 0 selections: all is
                             read */
    int n_kept_first;     /* at the first one */
    int n_lists, n_union; /* lists that it made, of which n_kept is the longest's, and blocks that
                             one of them holds */
    int n_dropped;        /* blocks that selections left out because they had been used least */
    int n_cut; /* tokens that verification allowed behind an epoch's end, drawn anew after it */
    int64_t select_ns; /* time spent in selections; shared ones by requests */
    /* K and V of the positions that its answer's passes had in their lists, once a pass; dense:
     * had the lists held everything. */
    uint64_t kv_shallow_bytes, kv_deep_bytes, kv_dense_bytes;
    struct engine_exact exact;     /* zero unless settings.exact */
    struct engine_prefill prefill; /* zero unless settings.prefill is sparse */
};

/* A consistent snapshot of a request. Arrays stay valid until release; entries below n_tokens never
 * change. */
struct engine_progress {
    int n_tokens;                           /* committed so far */
    const int32_t *tokens;                  /* [n_tokens] */
    const struct engine_logprobs *logprobs; /* [n_tokens] or NULL */
    const uint8_t *drafted;        /* [n_tokens] 1: an accepted draft token (in an exact answer: an
                                      accepted provisional one), 0: the target's own */
    enum engine_finish finish;     /* when not RUNNING, n_tokens is final */
    int stop_idx;                  /* which stop string, -1: an end token or none */
    int error_code;                /* E_* with ENGINE_FAILED */
    const char *error;             /* text, "" */
    int n_prompt, n_cached_prompt; /* tokens; cached: taken from the prefix cache */
    uint64_t seed;                 /* the one used */
    struct engine_speculation speculation; /* final with `finish`, zero before */
    enum engine_no_draft no_draft;         /* likewise */
    struct engine_sparsity sparsity;       /* likewise */
    /* Times in ns on base/clock.h's clock; 0: not yet. committed: of the newest of n_tokens, when
     * the host learned of it. */
    int64_t submitted_ns, admitted_ns, first_token_ns, committed_ns, finished_ns;
};
void engine_poll(const struct engine_request *r, struct engine_progress *out);

/* Ask to end it; finish becomes CANCELLED within one step. Harmless when finished. Any thread. */
void engine_cancel(struct engine *g, struct engine_request *r);

/* A slow reader: leave the batch but keep the KV (true), or go on (false). Any thread. */
void engine_pause(struct engine *g, struct engine_request *r, bool paused);

/* The owner will not look again: cancels if running, frees once the step thread let go. Any thread.
 */
void engine_release(struct engine *g, struct engine_request *r);

/* Refuse new requests from now on; running ones go on. */
void engine_drain(struct engine *g);
bool engine_idle(const struct engine *g); /* nothing running or waiting */

/* 0, or why nothing can be computed any more: the device failed, E_DEVICE as a rule. Requests end
 * with that error, new ones are refused with it; all that is left is to close. Any thread. */
int engine_failed(const struct engine *g, struct err *e);

/* ---- Numbers ---- */

enum { ENGINE_N_BUCKETS = 16 };
struct engine_histogram {           /* cumulative counts as Prometheus has them */
    double bound[ENGINE_N_BUCKETS]; /* seconds; the last is +inf */
    uint64_t count[ENGINE_N_BUCKETS];
    double sum;
    uint64_t n;
};
static inline void engine_histogram_add(struct engine_histogram *h, double seconds) {
    for (int i = ENGINE_N_BUCKETS - 1; i >= 0 && seconds <= h->bound[i]; i--) h->count[i]++;
    h->sum += seconds;
    h->n++;
}

/* Passes that held generated rows alone, whole batches: what the kernels counted in them, and what
 * their lists come to by the kernels' own rule (K of every listed page whole, V up to the newest
 * position). Equal to the byte where a sequence's rows of a round lie in one tile of the kernel; a
 * second tile reads its pages again and makes the first number the larger one. */
struct engine_answer_kv {
    uint64_t n_passes, n_tokens; /* tokens: committed by them */
    uint64_t shallow_bytes, deep_bytes, listed_shallow_bytes, listed_deep_bytes;
};

struct engine_stats {
    int n_running, n_waiting, n_paused;
    bool is_calibrated; /* what passes cost was measured after start, or nobody wants that */
    uint64_t n_requests, n_finished[6]; /* by enum engine_finish */
    uint64_t n_prompt_tokens, n_generated_tokens, n_cached_prompt_tokens;
    uint64_t n_steps, n_rows;
    uint64_t kv_bytes_read; /* K and V that attention read, as the kernels count; of those: */
    uint64_t kv_shallow_bytes_read, kv_deep_bytes_read;
    struct engine_answer_kv answers;                         /* of these bytes, answers' own */
    uint64_t n_sparse_requests;                              /* whose prefix lost blocks */
    uint64_t n_selections, n_blocks_selected, n_blocks_kept; /* blocks: sums over selections */
    uint64_t n_reselections, n_wide; /* of the selections, inside answers; made by surprise */
    uint64_t n_cut;                  /* tokens drawn anew behind an epoch's end */
    struct engine_exact exact;       /* of all exact answers */
    struct engine_prefill prefill;   /* of all prompts computed sparsely */
    double select_seconds;           /* spent in selections, waits for scores included */
    double step_seconds;             /* spent in steps */
    double overhead_seconds;         /* of those, in rounds outside the backend's operations */
    struct engine_speculation speculation;
    uint64_t n_draft_starved; /* requests that went on without a draft for want of memory */
    struct engine_histogram ttft, itl, e2e;
    struct kvpool_stats pool;
    size_t resident_bytes; /* of the process */
    double uptime_seconds;
};
/* A snapshot made by the step thread between steps (or directly while it sleeps). Any thread. */
void engine_get_stats(struct engine *g, struct engine_stats *out);

/* ---- Tests and benches ---- */

/* `sink` sees every logits row that the step thread computes, on that thread: of which request, the
 * position of the row's token (the drawn one is the next), the n ids that may be drawn. For
 * equality tests. Call before the first request. */
void engine_trace_logits(struct engine *g,
                         void (*sink)(void *arg, const struct engine_request *r, int position,
                                      const float *logits, int n),
                         void *arg);

/* Where a request's committed K and V lie, for tests. Pages may be written between steps: in a
 * sink. */
struct engine_kv_view {
    struct kern *kern; /* whose memory the arena is: pages are read by its download */
    void *arena;
    int n_kv; /* committed positions */
    enum kern_dtype dtype;
    int n_groups;
    struct {
        int first_layer, n_layers;
        const int32_t *pages; /* of blocks 0.. */
    } group[MODEL_MAX_GROUPS];
};
/* `sink` sees each request as it leaves, on the step thread. Call before the first request. */
void engine_trace_kv(struct engine *g,
                     void (*sink)(void *arg, const struct engine_request *r,
                                  const struct engine_kv_view *v),
                     void *arg);

/* `sink` sees each selection as it is made, on the step thread, those of prompts' chunks too:
 * ascending blocks kept of n_blocks; of several lists one after another, in target_list_of's order.
 * Call before the first request. */
void engine_trace_selection(struct engine *g,
                            void (*sink)(void *arg, const struct engine_request *r,
                                         const struct engine_kv_view *v, const int32_t *kept,
                                         int n_kept, int n_blocks),
                            void *arg);

#endif
