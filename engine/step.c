/* The step thread: take what was submitted, admit, propose, compute one batch, commit, publish.
 * Between allocguard_enter and allocguard_leave nothing is allocated or freed; owners are told and
 * memory is let go after it. */
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
    engine_histogram_add(&g->live.e2e, (double)(r->finished_ns - r->submitted_ns) / 1e9);
    engine__list_push(&g->done, r);
}

struct engine_kv_view engine__kv_view(const struct engine *g, const struct engine_request *r) {
    struct engine_kv_view v = {.kern = g->kern,
                               .arena = g->arena,
                               .n_kv = r->n_kv,
                               .dtype = g->sizes.kv_dtype,
                               .n_groups = g->sizes.n_groups};
    for (int i = 0, n; i < v.n_groups; i++) {
        v.group[i].first_layer = g->sizes.group_first[i];
        v.group[i].n_layers = g->sizes.group_layers[i];
        v.group[i].pages = kvpool_seq_pages(g->pool, r->seq, g->sizes.group_class[i], &n);
    }
    return v;
}

static void trace_kv(struct engine *g, const struct engine_request *r) {
    struct engine_kv_view v = engine__kv_view(g, r);
    allocguard_leave(); /* the sink is a test's */
    g->trace_kv(g->trace_kv_arg, r, &v);
    allocguard_enter();
}

/* Take running[idx] out: its finished blocks stay in the cache, its pages and reservation go back.
 */
static void leave(struct engine *g, int idx, enum engine_finish end) {
    struct engine_request *r = g->running[idx];
    engine__exact_drop(r);
    if (r->use_cache && end != ENGINE_FAILED) {
        int n_prompt_kv = r->n_kv < r->n_prompt ? r->n_kv : r->n_prompt;
        kvpool_seq_register(g->pool, r->seq, r->ids, n_prompt_kv, KVPOOL_PROMPT);
        kvpool_seq_register(g->pool, r->seq, r->ids, r->n_kv, KVPOOL_GENERATED);
    }
    if (g->trace_kv && !engine_failed(g, NULL)) trace_kv(g, r);
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

/* The youngest running request that has a draft goes on without; false where none has. */
static bool take_back_draft(struct engine *g) {
    for (int i = g->n_running - 1; i >= 0; i--) {
        struct engine_request *r = g->running[i];
        if (r->n_draft_kv < 0 || !kvpool_seq_has_draft(g->pool, r->seq)) continue;
        engine__drop_draft(g, r, ENGINE_DRAFT_MEMORY);
        return true;
    }
    return false;
}

/* A place in the pool, with a draft where there is one and room for it. Room for the sequence
 * itself goes before everybody's drafts. */
static int take_place(struct engine *g, struct engine_request *r, struct kvpool_want want,
                      int *n_hit, int *n_draft_hit, enum engine_no_draft *why, struct err *e) {
    bool off = engine__draft_setting(g, &r->params) == 0 || !r->params.draft_model;
    *why = !g->proposer ? ENGINE_DRAFT_NONE : off ? ENGINE_DRAFT_OFF : ENGINE_DRAFT_OK;
    if (*why == ENGINE_DRAFT_OK && r->n_prompt >= g->sizes.draft_context)
        *why = ENGINE_DRAFT_CONTEXT;
    if (*why == ENGINE_DRAFT_OK) {
        int n = want.n_tokens < g->sizes.draft_context ? want.n_tokens : g->sizes.draft_context;
        want.with_draft = true;
        want.draft_blocks = proposer_blocks(&g->sizes.proposer, n);
        int rc = kvpool_seq_open(g->pool, &want, &r->seq, n_hit, n_draft_hit, e);
        if (rc != E_FULL && rc != E_TOO_LONG) return rc;
        *why = ENGINE_DRAFT_MEMORY;
        want.with_draft = false;
        want.draft_blocks = 0;
    }
    int rc;
    do rc = kvpool_seq_open(g->pool, &want, &r->seq, n_hit, n_draft_hit, e);
    while (rc == E_FULL && take_back_draft(g));
    *n_draft_hit = -1;
    return rc;
}

/* The same with what the cache has of its prompt, as far as it can go on from there. */
static int open_seq(struct engine *g, struct engine_request *r, int *n_hit, int *n_draft_hit,
                    enum engine_no_draft *why, struct err *e) {
    struct kvpool_want want = {
        .n_tokens = r->n_prompt + r->max_tokens,
        .prompt = r->use_cache ? r->ids : NULL,
        .n_prompt = r->use_cache ? r->n_prompt : 0,
        .salt = engine__prefill_salt(r),
        .conversation = engine__sparse_owner(r),
    };
    int most = want.n_prompt / KVPOOL_BLOCK * KVPOOL_BLOCK;
    for (;;) {
        int n = engine__prefill_hit(g, r, most);
        if (n < most) want.n_prompt = n + KVPOOL_SHARED_TAIL;
        int rc = take_place(g, r, want, n_hit, n_draft_hit, why, e);
        if (rc || engine__prefill_hit(g, r, *n_hit) == *n_hit) return rc;
        kvpool_seq_close(g->pool, r->seq);
        most = *n_hit;
    }
}

/* First in, first out: while the head of the queue has no room, nobody behind it is let past, so
 * that a long request is not starved by short ones. The last answer token never gets K and V of its
 * own and a round never drafts beyond max_tokens, so that n_prompt + max_tokens holds every row. */
static void admit(struct engine *g) {
    while (g->waiting.head && g->n_running < g->sizes.o.max_seqs) {
        struct engine_request *r = g->waiting.head;
        struct err e = {0};
        int n_hit = 0, n_draft_hit = -1;
        enum engine_no_draft why;
        int rc = open_seq(g, r, &n_hit, &n_draft_hit, &why, &e);
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
        g->live.n_draft_starved += why == ENGINE_DRAFT_MEMORY;
        engine__round_begin(g, r, n_draft_hit, why);
        r->slot = g->free_slot[--g->n_free_slots];
        r->n_kv = n_hit;
        engine__prefill_resume(g, r);
        g->running[g->n_running++] = r;
        atomic_store_explicit(&r->n_cached_prompt, n_hit, memory_order_relaxed);
        atomic_store_explicit(&r->admitted_ns, clock_ns(), memory_order_relaxed);
        g->live.n_prompt_tokens += (uint64_t)r->n_prompt;
        g->live.n_cached_prompt_tokens += (uint64_t)n_hit;
        if (r->has_penalties && (rc = engine__history_begin(g, r, &e)) != 0) {
            engine__break(g, rc, &e);
            return;
        }
    }
}

/* The backend failed: nothing can be computed any more, and everybody is told why. */
static void fail_all(struct engine *g) {
    struct err e = {0};
    int rc = engine_failed(g, &e);
    while (g->n_running > 0) fail(g, g->n_running - 1, rc, e.message);
    for (struct engine_request *r; (r = engine__list_pop(&g->waiting));) {
        atomic_fetch_sub(&g->n_waiting, 1);
        r->error_code = rc;
        snprintf(r->error, sizeof r->error, "%s", e.message);
        retire(g, r, ENGINE_FAILED);
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

/* A pass of generated rows alone tells what such passes cost, and each request its share. */
static void note_cost(struct engine *g, int64_t ns) {
    double kv = 0;
    int rows = 0;
    for (int i = 0; i < g->n_turn; i++) {
        kv += engine__sparse_kv(g, g->turn[i], g->turn[i]->n_kv + g->turn[i]->n_rows);
        rows += g->turn[i]->n_rows;
    }
    for (int i = 0; i < g->n_turn; i++)
        g->turn[i]->speculation.verify_ns += ns * g->turn[i]->n_rows / rows;
    g->live.speculation.verify_ns += ns;
    draft_cost_observe(&g->passes.target, rows, kv, (double)ns);
}

/* After the sync: what the marks tell. The draft's passes lie between the first and `mark`, the
 * target's before the next. */
static int note_times(struct engine *g, int mark) {
    const struct kern_ops *ops = g->kern->ops;
    int n_gen = 0, n_prompt = 0, rc = engine__draft_done(g);
    int64_t ns = 0;
    for (int i = 0; i < g->n_turn; i++)
        *(engine__decodes(g->turn[i]) ? &n_gen : &n_prompt) += g->turn[i]->n_rows;
    if (!rc) rc = ops->elapsed(g->kern, 0, mark + 1, &g->kernel_ns);
    if (!rc) rc = ops->elapsed(g->kern, mark, mark + 1, &ns);
    if (rc || ns == 0) return rc;
    if (n_prompt == 0) note_cost(g, ns);
    else draft_cost_disturb(&g->passes.target);
    engine__costs_update(&g->costs, n_gen, n_prompt, (double)ns);
    return 0;
}

/* Does this step's pass hold generated rows alone? */
static bool only_answers(const struct engine *g) {
    for (int i = 0; i < g->n_turn; i++)
        if (!engine__decodes(g->turn[i])) return false;
    return true;
}

/* What attention read, by group and, as far as lists tell, by request. */
static void count_kv(struct engine *g) {
    uint64_t n[ENGINE_MAX_GROUPS];
    struct engine_answer_kv *answers = only_answers(g) ? &g->live.answers : NULL;
    engine__batch_kv_bytes(g, n);
    if (answers) answers->n_passes++;
    for (int i = 0; i < g->sizes.n_groups; i++) {
        bool deep = g->sizes.group_class[i] == KVPOOL_DEEP;
        g->live.kv_bytes_read += n[i];
        *(deep ? &g->live.kv_deep_bytes_read : &g->live.kv_shallow_bytes_read) += n[i];
        if (answers) *(deep ? &answers->deep_bytes : &answers->shallow_bytes) += n[i];
    }
    for (int i = 0; i < g->n_turn; i++) {
        engine__sparse_count(g, g->turn[i]);
        if (answers) engine__sparse_listed(g, g->turn[i], answers);
    }
}

/* Enqueue the step: the draft's passes, the target's, the decision and its way back. The only wait
 * is the sync at its end; nothing before it looks at what was computed. */
static int enqueue(struct engine *g, int *mark, struct err *e) {
    struct kern *k = g->kern;
    struct model_pass pass;
    int rc = engine__batch_build(g, &pass, e);
    if (!rc) rc = engine__draft_prepare(g, e);
    if (!rc) rc = k->ops->mark(k, *mark);
    if (!rc) rc = engine__draft_run(g, mark, e);
    if (!rc) rc = engine__batch_run(g, &pass, e);
    if (!rc) rc = k->ops->mark(k, *mark + 1);
    if (!rc) rc = engine__batch_fetch(g, e);
    return rc ? rc : k->ops->sync(k, e);
}

/* Compute the rows of g->turn and decide the rounds of those that want a token. */
static int compute(struct engine *g, struct err *e) {
    int mark = 0;
    for (int i = 0; i < g->n_turn; i++)
        for (int c = 0; c < g->sizes.n_groups; c++)
            kvpool_seq_extend(g->pool, g->turn[i]->seq, g->sizes.group_class[c],
                              g->turn[i]->n_kv + g->turn[i]->n_rows);
    int rc = enqueue(g, &mark, e);
    if (!rc) rc = note_times(g, mark);
    if (rc) return rc;
    count_kv(g);
    for (int i = 0; i < g->n_turn; i++) engine__sparse_see(g, g->turn[i]);
    if (g->trace) trace(g);
    return 0;
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
        engine_histogram_add(&g->live.ttft, (double)(now - r->submitted_ns) / 1e9);
    } else {
        engine_histogram_add(&g->live.itl, (double)(now - r->last_token_ns) / 1e9);
    }
    r->last_token_ns = now;
}

/* Append one drawn token. Returns how the request ends, ENGINE_RUNNING where it goes on. A token
 * that ends the answer is counted like any other; its text is cut by verify_text. */
static enum engine_finish commit_token(struct engine *g, struct engine_request *r,
                                       const struct kern_sampled *s, bool drafted, int64_t now,
                                       struct err *e) {
    if (s->token < 0) {
        err_raise(e, E_NUMERIC,
                  "the model's output at position %d holds values that are no numbers",
                  r->n_prompt + r->n_out);
        return ENGINE_FAILED;
    }
    ASSERT(r->n_out < r->max_tokens && s->token < g->vocab);
    if (r->logprobs) keep_logprobs(r, s);
    r->drafted[r->n_out] = drafted;
    r->ids[r->n_prompt + r->n_out++] = s->token;
    r->news = true;
    g->live.n_generated_tokens++;
    count_latency(g, r, now);
    if (!r->params.ignore_eos && tokenizer_is_eog(g->tokenizer, s->token)) return ENGINE_STOP;
    if (verify_text_push(&r->text, s->token, NULL)) {
        r->stop_idx = r->text.stop_idx;
        return ENGINE_STOP;
    }
    return r->n_out == r->max_tokens ? ENGINE_LENGTH : ENGINE_RUNNING;
}

/* The rows of `r` ran and its round was decided: emit the accepted run and the token that the
 * target added, up to where the answer or its epoch ends; then K and V of what was emitted count,
 * the newest token, which has none yet, left out. The one place where cursors move forward. */
static void commit(struct engine *g, struct engine_request *r, int64_t now) {
    struct err e = {0};
    if (r->n_logits == 0) {
        engine__states_commit(g, r, r->n_rows);
        r->n_kv += r->n_rows;
        if (r->use_cache) kvpool_seq_register(g->pool, r->seq, r->ids, r->n_kv, KVPOOL_PROMPT);
        engine__prefill_advance(r);
        return;
    }
    int n_accepted = ((int32_t *)g->batch.n_accepted.host)[r->round_idx], n_committed = 0;
    const struct kern_sampled *run =
        (const struct kern_sampled *)g->batch.sampled.host + r->first_logit;
    if (engine__is_ahead(r)) {
        engine__exact_commit(g, r, n_accepted, run);
        return;
    }
    enum engine_finish end = ENGINE_RUNNING;
    bool answers = engine__decodes(r), cut = false;
    ASSERT(n_accepted >= 0 && n_accepted <= r->n_draft);
    if (!answers) {
        if (r->use_cache) kvpool_seq_register(g->pool, r->seq, r->ids, r->n_prompt, KVPOOL_PROMPT);
        engine__sparse_select(g, r);
    }
    for (int i = 0; i <= n_accepted && end == ENGINE_RUNNING && !cut; i++) {
        end = commit_token(g, r, &run[i], i < n_accepted, now, &e);
        n_committed += end != ENGINE_FAILED;
        cut = answers && end == ENGINE_RUNNING && engine__sparse_token(r, run[i].logprob);
    }
    int n_kv = r->n_prompt + r->n_out - (r->n_out > 0);
    engine__states_commit(g, r, n_kv - r->n_kv);
    engine__recheck_see(g, r, n_kv - r->n_kv);
    if (r->is_dense) engine__exact_end(g, r, n_kv - r->n_kv, n_accepted, n_committed);
    r->n_kv = n_kv;
    if (cut && n_committed <= n_accepted) {
        r->counts_more = r->has_penalties;
        r->sparsity.n_cut += n_accepted + 1 - n_committed;
        g->live.n_cut += (uint64_t)(n_accepted + 1 - n_committed);
    }
    atomic_store_explicit(&r->committed_ns, now, memory_order_relaxed);
    engine__round_end(g, r, n_accepted, n_committed);
    if (end == ENGINE_FAILED) fail(g, find_running(g, r), e.code, e.message);
    else if (end != ENGINE_RUNNING) leave(g, find_running(g, r), end);
    else atomic_store_explicit(&r->n_tokens, r->n_out, memory_order_release);
}

/* A draft whose output holds NaN ends its request, nobody else's. */
static void fail_broken_draft(struct engine *g, struct engine_request *r) {
    char text[ENGINE_ERROR_BYTES];
    snprintf(text, sizeof text,
             "the draft's output behind position %d holds values that are no numbers",
             r->n_prompt + r->n_out - 1);
    fail(g, find_running(g, r), E_NUMERIC, text);
}

static void count_step(struct engine *g, int n_rows, int64_t ns) {
    g->live.n_steps++;
    g->live.n_rows += (uint64_t)n_rows;
    g->live.step_seconds += (double)ns / 1e9;
    g->live.speculation.draft_ns += g->draft_ns;
    if (g->kernel_ns == 0) return; /* not known */
    ns -= g->select_ns;            /* no part of what a round costs */
    g->live.overhead_seconds += (double)(ns - g->kernel_ns) / 1e9;
    g->passes.fixed_ns += 0.05 * ((double)(ns - g->kernel_ns) - g->passes.fixed_ns);
}

/* What commits leave to be done before the next pass: states to be noted, lists to be made, counts
 * to be taken back. */
static int settle(struct engine *g, struct err *e) {
    int rc = engine__states_note(g, e);
    for (int i = 0; i < g->n_running && !rc; i++) {
        if (!g->running[i]->counts_more) continue;
        g->running[i]->counts_more = false;
        rc = engine__history_rewind(g, g->running[i], e);
    }
    return rc ? rc : engine__sparse_renew(g, e);
}

/* One step; false where nothing could be done. */
static bool step(struct engine *g) {
    drop_cancelled(g);
    admit(g);
    if (engine_failed(g, NULL)) return true;
    struct err e = {0};
    int64_t start = clock_ns();
    g->kernel_ns = g->select_ns = 0;
    engine__collect(g);
    engine__choose(g);
    int n_rows = engine__schedule(g);
    if (n_rows == 0) return g->done.head != NULL;
    int rc = compute(g, &e);
    if (rc) {
        engine__break(g, rc, &e);
        return true;
    }
    int64_t now = clock_ns();
    bool answers = only_answers(g);
    uint64_t n_before = g->live.n_generated_tokens;
    for (int i = 0; i < g->n_turn; i++) {
        if (g->turn[i]->draft_nan) fail_broken_draft(g, g->turn[i]);
        else commit(g, g->turn[i], now);
    }
    if (answers) g->live.answers.n_tokens += g->live.n_generated_tokens - n_before;
    rc = settle(g, &e);
    if (rc) {
        engine__break(g, rc, &e);
        return true;
    }
    count_step(g, n_rows, clock_ns() - start);
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
        else if (!engine_failed(g, NULL)) worked = step(g) || engine__calibrate(g);
        if (engine_failed(g, NULL)) fail_all(g);
        allocguard_leave();
        deliver(g);
        if (closing) return NULL;
        if (!worked) engine__sleep(g);
    }
}
