/* A few points of V(batch, rows, context), measured in the first idle moments after start, so that
 * the first answer's rounds are not chosen blindly. One point at a time: a request that comes in
 * between waits for one pass at most. Serving refines them. */
#include "base/clock.h"
#include "base/err.h"
#include "engine/engine_private.h"

enum { REPEATS = 3, FAR_CONTEXT = 4096 };

static const int rows_of_point[] = {1, 2, 3, 5, 8};
enum { N_ROWS = sizeof rows_of_point / sizeof *rows_of_point };

/* One pass of n rows behind `context` positions of a sequence whose K and V nobody wrote: their
 * values change no time. */
static int run_pass(struct engine *g, int seq, int context, int n, int64_t *ns, struct err *e) {
    static const int32_t token[KERN_MAX_DRAFT + 1];
    struct model_batch *b = &g->batch.pass;
    struct model_pass pass;
    int row, rc = 0, n_blocks;
    model_batch_begin(b);
    int idx = model_batch_add(b, token, n, context, false, &row);
    for (int i = 0; i < n; i++) model_batch_want(b, row + i);
    for (int i = 0; i < g->sizes.n_groups && !rc; i++) {
        const int32_t *pages = kvpool_seq_pages(g->pool, seq, g->sizes.group_class[i], &n_blocks);
        rc = model_batch_pages(b, g->kern, idx, i, pages, n_blocks, 0, 0, e);
    }
    if (!rc) rc = model_batch_finish(b, g->kern, &pass, e);
    engine__describe_groups(g, &pass);
    int64_t start = clock_ns();
    if (!rc) rc = model_forward(g->model, &pass, e);
    if (!rc) rc = g->kern->ops->sync(g->kern, e);
    *ns = clock_ns() - start;
    return rc;
}

static void observe_target(struct engine *g, int seq, int context, int n) {
    struct err e = {0};
    for (int i = 0; i < REPEATS; i++) {
        int64_t ns;
        if (run_pass(g, seq, context, n, &ns, &e)) return;
        /* The first pass warms caches up. */
        if (i > 0) draft_cost_observe(&g->passes.target, n, context + n, (double)ns);
    }
}

static void observe_draft(void *arg, const struct proposer_pass *pass) {
    struct engine *g = arg;
    if (!pass->prompt)
        draft_cost_observe(&g->passes.draft, pass->n_rows, pass->kv_tokens, (double)pass->ns);
}

/* The draft's passes of one row, through its own front door. */
static int run_draft(struct engine *g, int seq, int context, struct err *e) {
    static const int32_t token[FAR_CONTEXT + 1];
    struct kern_history history = engine__history(g);
    struct proposer_turn t = {.seq = seq,
                              .ids = token,
                              .n_tokens = context + 1,
                              .n_rows = 1,
                              .n_draft = REPEATS,
                              .sample = {.top_p = 1, .repetition_penalty = 1, .history = -1},
                              .n_kv = context};
    if (t.n_draft > g->sizes.o.max_draft_tokens) t.n_draft = g->sizes.o.max_draft_tokens;
    return proposer_run(g->proposer, g->pool, &history, g->eog, 0, &t, 1, observe_draft, g, e);
}

static bool wanted(const struct engine *g) {
    return g->sizes.o.draft_tokens == VERIFY_DRAFT_AUTO && (g->proposer || g->sizes.o.lookup);
}

bool engine__calibrate(struct engine *g) {
    int n_points = 2 * (N_ROWS + (g->proposer != NULL)), point = g->n_calibrated;
    /* Later on a point could push cached prefixes out of the pool; serving teaches the rest. */
    if (!wanted(g) || point >= n_points || g->live.n_requests > 0) return false;
    int near_or_far = point / (n_points / 2), which = point % (n_points / 2);
    int context = near_or_far ? FAR_CONTEXT : KVPOOL_BLOCK, seq, n_hit, n_draft_hit;
    bool draft = which == N_ROWS;
    g->n_calibrated++;
    if (context + KERN_MAX_DRAFT > g->sizes.o.context / 2) return true; /* not what it will serve */
    if (draft && context + KERN_MAX_DRAFT > g->sizes.draft_context) return true;
    int n = draft ? 0 : rows_of_point[which];
    if (n > g->batch.pass.caps.max_logits) return true;
    struct err e = {0};
    struct kvpool_want want = {.n_tokens = context + KERN_MAX_DRAFT + 1, .with_draft = draft};
    if (kvpool_seq_open(g->pool, &want, &seq, &n_hit, &n_draft_hit, &e)) return true;
    if (draft) {
        kvpool_seq_extend(g->pool, seq, KVPOOL_DRAFT, context);
        run_draft(g, seq, context, &e);
    } else {
        for (int i = 0; i < g->sizes.n_groups; i++)
            kvpool_seq_extend(g->pool, seq, g->sizes.group_class[i], context + n);
        observe_target(g, seq, context, n);
    }
    kvpool_seq_close(g->pool, seq);
    return true;
}
