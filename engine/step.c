/* The step thread: take what was submitted, admit, compute one batch, commit, publish. Between
 * allocguard_enter and allocguard_leave nothing is allocated or freed; owners are told and memory
 * is let go after it. */
#include <stdio.h>
#include <string.h>

#include "base/allocguard.h"
#include "base/clock.h"
#include "base/err.h"
#include "engine/engine_private.h"

/* ---- The end of a request ---- */

/* The request leaves for `done`; its owner learns of it in deliver(), after the numbers were
 * published, so that whoever sees an end finds it counted. It must be on no other list. */
static void retire(struct engine *g, struct engine_request *r, enum engine_finish end) {
    r->end = end;
    r->finished_ns = clock_ns();
    g->live.n_finished[end]++;
    engine__histogram_add(&g->live.e2e, (double)(r->finished_ns - r->submitted_ns) / 1e9);
    engine__list_push(&g->done, r);
}

/* Take running[idx] out: its finished blocks stay in the cache, its pages and reservation go back.
 */
static void leave(struct engine *g, int idx, enum engine_finish end) {
    struct engine_request *r = g->running[idx];
    if (r->use_cache && end != ENGINE_FAILED) {
        int n_prompt_kv = r->n_kv < r->n_prompt ? r->n_kv : r->n_prompt;
        kvpool_seq_register(g->pool, r->seq, r->ids, n_prompt_kv, KVPOOL_PROMPT, r->salt);
        kvpool_seq_register(g->pool, r->seq, r->ids, r->n_kv, KVPOOL_GENERATED, r->salt);
    }
    kvpool_seq_close(g->pool, r->seq);
    g->free_slot[g->n_free_slots++] = r->slot;
    g->n_running--;
    memmove(&g->running[idx], &g->running[idx + 1],
            (size_t)(g->n_running - idx) * sizeof g->running[0]);
    retire(g, r, end);
}

static void fail(struct engine *g, int idx, int code, const char *text) {
    struct engine_request *r = g->running[idx];
    r->error_code = code;
    snprintf(r->error, sizeof r->error, "%s", text);
    leave(g, idx, ENGINE_FAILED);
}

static int find_running(const struct engine *g, const struct engine_request *r) {
    for (int i = 0; i < g->n_running; i++)
        if (g->running[i] == r) return i;
    ASSERT(!"a request of this step is running");
    return -1;
}

/* ---- Admission ---- */

static void drop_cancelled(struct engine *g) {
    struct engine_list keep = {0};
    for (struct engine_request *r; (r = engine__list_pop(&g->waiting));) {
        if (!atomic_load_explicit(&r->cancel, memory_order_acquire)) {
            engine__list_push(&keep, r);
            continue;
        }
        atomic_fetch_sub(&g->n_waiting, 1);
        retire(g, r, ENGINE_CANCELLED);
    }
    g->waiting = keep;
    for (int i = g->n_running - 1; i >= 0; i--)
        if (atomic_load_explicit(&g->running[i]->cancel, memory_order_acquire))
            leave(g, i, ENGINE_CANCELLED);
}

/* First in, first out: while the head of the queue has no room, nobody behind it is let past, so
 * that a long request is not starved by short ones. The last answer token never gets K and V of its
 * own, so that n_prompt + max_tokens already holds one row of look-ahead. */
static void admit(struct engine *g) {
    while (g->waiting.head && g->n_running < g->sizes.o.max_seqs) {
        struct engine_request *r = g->waiting.head;
        struct err e = {0};
        int n_hit = 0;
        int rc = kvpool_seq_open(g->pool, r->n_prompt + r->max_tokens, false,
                                 r->use_cache ? r->ids : NULL, r->use_cache ? r->n_prompt : 0,
                                 r->salt, &r->seq, &n_hit, &e);
        if (rc == E_FULL) return;
        engine__list_pop(&g->waiting);
        atomic_fetch_sub(&g->n_waiting, 1);
        if (rc) { /* submission refused what can never fit: not reached, but no reason to stop the
                     server */
            r->error_code = rc;
            snprintf(r->error, sizeof r->error, "%s", e.message);
            retire(g, r, ENGINE_FAILED);
            continue;
        }
        r->slot = g->free_slot[--g->n_free_slots];
        r->n_kv = n_hit;
        g->running[g->n_running++] = r;
        atomic_store_explicit(&r->n_cached_prompt, n_hit, memory_order_relaxed);
        atomic_store_explicit(&r->admitted_ns, clock_ns(), memory_order_relaxed);
        g->live.n_prompt_tokens += (uint64_t)r->n_prompt;
        g->live.n_cached_prompt_tokens += (uint64_t)n_hit;
        if (r->has_penalties && (rc = engine__history_begin(g, r, &e)) != 0)
            fail(g, g->n_running - 1, rc, e.message);
    }
}

/* ---- One pass ---- */

static void trace(struct engine *g) {
    for (int i = 0; i < g->n_turn; i++) {
        const struct engine_request *r = g->turn[i];
        for (int k = 0; k < r->n_logits; k++) {
            const float *logits =
                g->batch.dev_logits + (size_t)(r->first_logit + k) * (size_t)g->sizes.vocab;
            if (g->kern->ops->download(g->kern, g->trace_row, logits,
                                       (size_t)g->vocab * sizeof *g->trace_row, NULL))
                continue;
            allocguard_leave(); /* the sink is a test's */
            g->trace(g->trace_arg, r, r->n_kv + r->n_rows - r->n_logits + k, g->trace_row,
                     g->vocab);
            allocguard_enter();
        }
    }
}

/* Compute the rows of g->turn and draw the tokens of those that want one, into batch.sampled. */
static int compute(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    struct kern *k = g->kern;
    struct model_pass pass;
    for (int i = 0; i < g->n_turn; i++)
        for (int c = 0; c < g->sizes.n_groups; c++)
            kvpool_seq_extend(g->pool, g->turn[i]->seq, g->sizes.group_class[c],
                              g->turn[i]->n_kv + g->turn[i]->n_rows);
    int rc = engine__batch_build(g, &pass, e);
    if (!rc) rc = model_forward(g->model, &pass, e);
    if (!rc && b->n_logits > 0) {
        struct kern_history history = {b->dev_prompt_count, b->dev_output_count,
                                       (size_t)g->sizes.vocab};
        rc = k->ops->sample(k, b->n_logits, g->vocab, b->dev_logits, (size_t)g->sizes.vocab,
                            b->sample.dev, &history, b->sample_scratch, b->dev_sampled, NULL);
        if (rc) err_raise(e, rc, "sampling of %d rows failed", b->n_logits);
    }
    if (!rc) rc = k->ops->sync(k, e);
    if (!rc && b->n_logits > 0)
        rc = k->ops->download(k, b->sampled, b->dev_sampled,
                              (size_t)b->n_logits * sizeof *b->sampled, e);
    uint64_t kv_bytes = 0;
    if (!rc) rc = k->ops->download(k, &kv_bytes, b->dev_kv_bytes, sizeof kv_bytes, e);
    g->live.kv_bytes_read += kv_bytes;
    if (!rc && g->trace) trace(g);
    return rc;
}

/* ---- Commit ---- */

static void keep_logprobs(struct engine_request *r, const struct kern_sampled *s) {
    struct engine_logprobs *lp = &r->logprobs[r->n_out];
    lp->logprob = s->logprob;
    lp->n_top = r->params.logprobs;
    memcpy(lp->top_id, s->top_id, sizeof lp->top_id);
    memcpy(lp->top_logprob, s->top_logprob, sizeof lp->top_logprob);
}

static void count_latency(struct engine *g, struct engine_request *r, int64_t now) {
    if (r->n_out == 1) {
        atomic_store_explicit(&r->first_token_ns, now, memory_order_relaxed);
        engine__histogram_add(&g->live.ttft, (double)(now - r->submitted_ns) / 1e9);
    } else {
        engine__histogram_add(&g->live.itl, (double)(now - r->last_token_ns) / 1e9);
    }
    r->last_token_ns = now;
}

/* Append one drawn token. Returns how the request ends, ENGINE_RUNNING where it goes on. A token
 * that ends the answer is counted like any other; its text is cut by verify_text. */
static enum engine_finish commit_token(struct engine *g, struct engine_request *r,
                                       const struct kern_sampled *s, int64_t now, struct err *e) {
    if (s->token < 0) {
        err_raise(e, E_NUMERIC,
                  "the model's output at position %d holds values that are no numbers",
                  r->n_prompt + r->n_out);
        return ENGINE_FAILED;
    }
    ASSERT(r->n_out < r->max_tokens && s->token < g->vocab);
    if (r->logprobs) keep_logprobs(r, s);
    r->ids[r->n_prompt + r->n_out++] = s->token;
    r->news = true;
    g->live.n_generated_tokens++;
    count_latency(g, r, now);
    if (r->has_penalties && engine__history_add(g, r, s->token, e)) return ENGINE_FAILED;
    if (!r->params.ignore_eos && tokenizer_is_eog(g->tokenizer, s->token)) return ENGINE_STOP;
    if (verify_text_push(&r->text, s->token, NULL)) {
        r->stop_idx = r->text.stop_idx;
        return ENGINE_STOP;
    }
    return r->n_out == r->max_tokens ? ENGINE_LENGTH : ENGINE_RUNNING;
}

/* The rows of `r` ran: their K and V count now, then the drawn token. */
static void commit(struct engine *g, struct engine_request *r, int64_t now) {
    struct err e = {0};
    r->n_kv += r->n_rows;
    if (r->n_logits == 0) return;
    if (r->use_cache && r->n_kv == r->n_prompt)
        kvpool_seq_register(g->pool, r->seq, r->ids, r->n_prompt, KVPOOL_PROMPT, r->salt);
    enum engine_finish end =
        commit_token(g, r, &g->batch.sampled[r->first_logit + r->n_logits - 1], now, &e);
    if (end == ENGINE_FAILED) fail(g, find_running(g, r), e.code, e.message);
    else if (end != ENGINE_RUNNING) leave(g, find_running(g, r), end);
    else atomic_store_explicit(&r->n_tokens, r->n_out, memory_order_release);
}

/* One step; false where nothing could be done. */
static bool step(struct engine *g) {
    drop_cancelled(g);
    admit(g);
    int n_rows = engine__schedule(g);
    if (n_rows == 0) return g->done.head != NULL;
    struct err e = {0};
    int64_t start = clock_ns();
    int rc = compute(g, &e);
    int64_t end = clock_ns();
    for (int i = 0; i < g->n_turn; i++) {
        if (rc) fail(g, find_running(g, g->turn[i]), rc, e.message);
        else commit(g, g->turn[i], end);
    }
    if (!rc)
        engine__costs_update(&g->costs, g->batch.n_gen, g->batch.n_prompt, (double)(end - start));
    g->live.n_steps++;
    g->live.n_rows += (uint64_t)n_rows;
    g->live.step_seconds += (double)(clock_ns() - start) / 1e9;
    return true;
}

/* Outside of the guard: publish, tell owners, let go of what ended. The engine is idle before the
 * last owner is told, so that a server that drains may look when it is told. */
static void deliver(struct engine *g) {
    engine__stats_publish(g);
    for (int i = 0; i < g->n_running; i++) {
        struct engine_request *r = g->running[i];
        if (!r->news) continue;
        r->news = false;
        engine__request_notify(r);
    }
    for (struct engine_request *r; (r = engine__list_pop(&g->done));) {
        atomic_store_explicit(&r->n_tokens, r->n_out, memory_order_release);
        atomic_store_explicit(&r->finish, (int)r->end, memory_order_release);
        atomic_fetch_sub(&g->n_live, 1);
        engine__request_notify(r);
        engine__request_unref(r);
    }
}

static void abort_all(struct engine *g) {
    for (struct engine_request *r; (r = engine__list_pop(&g->waiting));) {
        atomic_fetch_sub(&g->n_waiting, 1);
        retire(g, r, ENGINE_ABORTED);
    }
    while (g->n_running > 0) leave(g, g->n_running - 1, ENGINE_ABORTED);
}

void *engine__thread(void *arg) {
    struct engine *g = arg;
    for (;;) {
        allocguard_enter();
        bool closing = engine__take_inbox(g), worked = false;
        if (closing) abort_all(g);
        else worked = step(g);
        allocguard_leave();
        deliver(g);
        if (closing) return NULL;
        if (!worked) engine__sleep(g);
    }
}
