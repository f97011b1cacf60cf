/* The way in: checks on the submitter's thread, the inbox, and the flags by which other threads
 * talk to the step thread. */
#include <stdio.h>

#include "base/err.h"
#include "engine/engine_private.h"

void engine__wake(struct engine *g) {
    atomic_store_explicit(&g->news, true, memory_order_release);
    pthread_mutex_lock(&g->lock);
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
}

void engine__sleep(struct engine *g) {
    pthread_mutex_lock(&g->lock);
    while (!atomic_load_explicit(&g->news, memory_order_acquire))
        pthread_cond_wait(&g->wake, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

bool engine__take_inbox(struct engine *g) {
    if (!atomic_exchange_explicit(&g->news, false, memory_order_acq_rel)) return false;
    pthread_mutex_lock(&g->lock);
    struct engine_list in = g->inbox;
    g->inbox = (struct engine_list){0};
    bool closing = g->closing;
    pthread_mutex_unlock(&g->lock);
    for (struct engine_request *r; (r = engine__list_pop(&in));) {
        g->live.n_requests++;
        engine__list_push(&g->waiting, r);
    }
    return closing;
}

/* The answer's effective length; an explicit max_tokens that does not fit in the context is cut to
 * it (the answer then ends with "length"), the default also to what the pool can hold. */
static int choose_max_tokens(const struct engine *g, const struct engine_submit_options *o,
                             int *out, struct err *e) {
    int context = g->sizes.o.context, room = context - o->n_prompt;
    if (room < 1)
        return err_raise(e, E_TOO_LONG,
                         "the prompt has %d tokens, the context %d; an answer needs at least one",
                         o->n_prompt, context);
    int pool_room = g->pool_tokens - o->n_prompt;
    if (pool_room < 1)
        return err_raise(e, E_TOO_LONG,
                         "the prompt has %d tokens, the KV pool can hold %d of one sequence",
                         o->n_prompt, g->pool_tokens);
    int n = o->params.max_tokens;
    if (n < 0) {
        n = ENGINE_DEFAULT_MAX_TOKENS < room ? ENGINE_DEFAULT_MAX_TOKENS : room;
        if (n > pool_room) n = pool_room;
    }
    if (n > room) n = room;
    if (n > pool_room)
        return err_raise(
            e, E_TOO_LONG,
            "prompt of %d and max_tokens of %d can never fit: the KV pool holds %d tokens of "
            "one sequence",
            o->n_prompt, n, g->pool_tokens);
    *out = n;
    return 0;
}

static int check_options(const struct engine *g, const struct engine_submit_options *o,
                         struct err *e) {
    int rc = verify_params_check(&o->params, e);
    if (!rc && o->sparse) rc = target_settings_check(o->sparse, e);
    if (!rc) rc = engine__sparse_check(g, o->sparse, e);
    if (rc) return rc;
    if (o->params.draft_tokens > g->sizes.o.max_draft_tokens)
        return err_raise(e, E_RANGE, "draft_tokens is %d, this engine makes room for 0..%d a round",
                         o->params.draft_tokens, g->sizes.o.max_draft_tokens);
    if (o->n_prompt < 1 || !o->prompt) return err_raise(e, E_RANGE, "the prompt is empty");
    for (int i = 0; i < o->n_prompt; i++)
        if (o->prompt[i] < 0 || o->prompt[i] >= g->sizes.vocab)
            return err_raise(e, E_RANGE, "prompt token %d is %d, ids are 0..%d", i, o->prompt[i],
                             g->sizes.vocab - 1);
    if (o->params.min_tokens > 0 && g->n_eog > ENGINE_MAX_BANNED)
        return err_raise(e, E_UNSUPPORTED,
                         "min_tokens: the model has %d end tokens, at most %d can be held back",
                         g->n_eog, ENGINE_MAX_BANNED);
    return 0;
}

int engine_failed(const struct engine *g, struct err *e) {
    int code = atomic_load_explicit(&g->failed, memory_order_acquire);
    return code ? err_raise(e, code, "%s", g->failure) : 0;
}

/* An operation knows that it could not start, the next sync what stopped the device. */
void engine__break(struct engine *g, int rc, const struct err *e) {
    struct err why = {0};
    if (engine_failed(g, NULL)) return;
    if (g->kern->ops->sync(g->kern, &why) == 0 || !why.message[0]) why = *e;
    snprintf(g->failure, sizeof g->failure, "the device failed: %s",
             why.message[0] ? why.message : err_text(rc));
    atomic_store_explicit(&g->failed, rc, memory_order_release);
}

static int check_queue(const struct engine *g, struct err *e) {
    int rc = engine_failed(g, e);
    if (rc) return rc;
    if (atomic_load(&g->draining)) return err_raise(e, E_CLOSED, "shutting down: no new requests");
    int n = atomic_load(&g->n_waiting);
    if (n >= g->sizes.o.max_queue)
        return err_raise(e, E_FULL,
                         "overloaded: %d requests wait already, at most %d may; retry later", n,
                         g->sizes.o.max_queue);
    return 0;
}

int engine_submit(struct engine *g, const struct engine_submit_options *o,
                  struct engine_request **out, struct err *e) {
    struct engine_request *r;
    int max_tokens = 0, rc = check_queue(g, e);
    if (!rc) rc = check_options(g, o, e);
    if (!rc) rc = choose_max_tokens(g, o, &max_tokens, e);
    if (!rc) rc = engine__request_make(g, o, max_tokens, &r, e);
    if (rc) return rc;
    pthread_mutex_lock(&g->lock);
    rc = g->closing ? err_raise(e, E_CLOSED, "shutting down: no new requests") : check_queue(g, e);
    if (!rc) {
        atomic_fetch_add(&g->n_waiting, 1);
        atomic_fetch_add(&g->n_live, 1);
        engine__list_push(&g->inbox, r);
        *out = r;
        atomic_store_explicit(&g->news, true, memory_order_release);
        pthread_cond_signal(&g->wake);
    }
    pthread_mutex_unlock(&g->lock);
    if (rc) {
        engine__request_unref(r);
        engine__request_unref(r);
    }
    return rc;
}

void engine_cancel(struct engine *g, struct engine_request *r) {
    atomic_store_explicit(&r->cancel, true, memory_order_release);
    engine__wake(g);
}

void engine_pause(struct engine *g, struct engine_request *r, bool paused) {
    atomic_store_explicit(&r->paused, paused, memory_order_release);
    engine__wake(g);
}

void engine_drain(struct engine *g) {
    atomic_store(&g->draining, true);
}

bool engine_idle(const struct engine *g) {
    return atomic_load(&g->n_live) == 0;
}
