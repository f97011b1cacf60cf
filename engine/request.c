/* A request's memory: everything is allocated at submission, on the submitter's thread, and freed
 * by whoever lets go last. The step thread publishes with release stores, the owner reads with
 * acquire loads. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/err.h"
#include "engine/engine_private.h"

const char *engine_finish_name(enum engine_finish f) {
    static const char *const names[] = {"running",   "stop",  "length",
                                        "cancelled", "error", "aborted"};
    return (unsigned)f < sizeof names / sizeof *names ? names[f] : "unknown";
}

const char *engine_no_draft_name(enum engine_no_draft n) {
    static const char *const names[] = {"", "no draft model", "off", "draft memory short",
                                        "beyond the draft's context"};
    return (unsigned)n < sizeof names / sizeof *names ? names[n] : "unknown";
}

/* 53 bits, so that every client language can hold the seed that `done` reports. */
static uint64_t draw_seed(void) {
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) seed = (uint64_t)clock_ns();
    return seed >> 11;
}

/* A greedy answer is the same each time: where chance has a say in what is read, too. */
static uint64_t choose_seed(const struct engine_request *r) {
    if (r->params.has_seed) return r->params.seed;
    return r->params.temperature == 0 && r->sparse.selector != TARGET_OFF ? 0 : draw_seed();
}

/* May prompt lookup propose for it? */
static bool looks_up(const struct engine *g, const struct verify_params *p) {
    return g->sizes.o.lookup && p->lookup && engine__draft_setting(g, p) != 0 &&
           g->sizes.o.max_draft_tokens > 0;
}

int engine__request_make(const struct engine *g, const struct engine_submit_options *o,
                         int max_tokens, struct engine_request **out, struct err *e) {
    struct engine_request *r = calloc(1, sizeof *r);
    if (!r) return err_raise(e, E_NOMEM, "no memory for a request");
    r->params = o->params;
    r->n_prompt = o->n_prompt;
    r->max_tokens = max_tokens;
    r->salt = o->salt;
    r->conversation = o->conversation;
    r->n_draft_kv = r->first_q = -1;
    r->use_cache = !o->no_prefix_cache;
    r->has_penalties = o->params.repetition_penalty != 1 || o->params.presence_penalty != 0 ||
                       o->params.frequency_penalty != 0;
    r->notify = o->notify;
    r->notify_arg = o->notify_arg;
    r->seq = r->slot = r->stop_idx = -1;
    atomic_init(&r->refs, 2);
    bool has_memory = engine__sparse_init(g, r, o->sparse);
    r->seed = choose_seed(r);
    size_t n = (size_t)o->n_prompt + (size_t)max_tokens;
    int rc = verify_text_init(&r->text, g->tokenizer, &r->params, o->show_special, e);
    if (rc) goto fail;
    has_memory = has_memory && engine__exact_init(g, r, o->show_special, e);
    r->ids = malloc(n * sizeof *r->ids);
    if (o->params.logprobs >= 0) r->logprobs = malloc((size_t)max_tokens * sizeof *r->logprobs);
    r->drafted = calloc((size_t)max_tokens, 1);
    bool lookup = looks_up(g, &o->params);
    if (lookup) r->lookup_memory = malloc(draft_lookup_bytes(o->n_prompt + max_tokens));
    if (!has_memory || !r->ids || !r->drafted || (lookup && !r->lookup_memory) ||
        (o->params.logprobs >= 0 && !r->logprobs)) {
        rc = err_raise(e, E_NOMEM,
                       "no memory for a request of %d prompt tokens and %d answer tokens",
                       o->n_prompt, max_tokens);
        goto fail;
    }
    memcpy(r->ids, o->prompt, (size_t)o->n_prompt * sizeof *r->ids);
    r->submitted_ns = clock_ns();
    *out = r;
    return 0;
fail:
    atomic_store(&r->refs, 1);
    engine__request_unref(r);
    return rc;
}

void engine__request_unref(struct engine_request *r) {
    if (atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel) != 1) return;
    verify_text_deinit(&r->text);
    verify_text_deinit(&r->ahead);
    free(r->ids);
    free(r->logprobs);
    free(r->drafted);
    free(r->lookup_memory);
    free(r->score);
    free(r->read);
    free(r->kept);
    free(r->quarter_mass);
    free(r->quarters);
    free(r->used);
    free(r->seen);
    free(r);
}

void engine__request_notify(struct engine_request *r) {
    int want = NOTIFY_FREE;
    if (!r->notify || !atomic_compare_exchange_strong(&r->notify_state, &want, NOTIFY_BUSY)) return;
    r->notify(r->notify_arg);
    atomic_store(&r->notify_state, NOTIFY_FREE);
}

void engine_poll(const struct engine_request *r, struct engine_progress *out) {
    memset(out, 0, sizeof *out);
    /* `finish` first: once it is set nothing changes any more. */
    out->finish = (enum engine_finish)atomic_load_explicit(&r->finish, memory_order_acquire);
    out->n_tokens = atomic_load_explicit(&r->n_tokens, memory_order_acquire);
    out->tokens = r->ids + r->n_prompt;
    out->logprobs = r->logprobs;
    out->drafted = r->drafted;
    out->n_prompt = r->n_prompt;
    out->n_cached_prompt = atomic_load_explicit(&r->n_cached_prompt, memory_order_relaxed);
    out->seed = r->seed;
    out->submitted_ns = r->submitted_ns;
    out->admitted_ns = atomic_load_explicit(&r->admitted_ns, memory_order_relaxed);
    out->first_token_ns = atomic_load_explicit(&r->first_token_ns, memory_order_relaxed);
    out->committed_ns = atomic_load_explicit(&r->committed_ns, memory_order_relaxed);
    out->stop_idx = -1;
    out->error = "";
    if (out->finish == ENGINE_RUNNING) return;
    out->speculation = r->speculation;
    out->no_draft = r->no_draft;
    out->sparsity = r->sparsity;
    out->finished_ns = r->finished_ns;
    out->stop_idx = r->stop_idx;
    out->error_code = r->error_code;
    out->error = r->error;
}

void engine_release(struct engine *g, struct engine_request *r) {
    /* A call of notify that has begun is waited for; none begins after. */
    for (int want = NOTIFY_FREE;
         !atomic_compare_exchange_weak(&r->notify_state, &want, NOTIFY_NEVER); want = NOTIFY_FREE)
        sched_yield();
    /* A finished request needs no engine: it may be closed already. */
    if (atomic_load_explicit(&r->finish, memory_order_acquire) == ENGINE_RUNNING)
        engine_cancel(g, r);
    engine__request_unref(r);
}

void engine__list_push(struct engine_list *l, struct engine_request *r) {
    r->next = NULL;
    if (l->tail) l->tail->next = r;
    else l->head = r;
    l->tail = r;
}

struct engine_request *engine__list_pop(struct engine_list *l) {
    struct engine_request *r = l->head;
    if (!r) return NULL;
    l->head = r->next;
    if (!l->head) l->tail = NULL;
    r->next = NULL;
    return r;
}
