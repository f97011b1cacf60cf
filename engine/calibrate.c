/* A few points of V(batch, rows, context), measured in the first idle moments after start, so that
 * the first answer's rounds are not chosen blindly. One point at a time: a request that comes in
 * between waits for one point's passes at most. Serving refines them. A backend that keeps
 * recordings has those of one sequence's rounds afterwards. */
#include "base/err.h"
#include "engine/engine_private.h"

enum {
    REPEATS = 3,
    RECORD_REPEATS = 5, /* where the first two are spent on making a recording */
    FAR_CONTEXT = 4096, /* or half of what will be served */
    LAG_ROWS = 256,     /* of a draft's long way to catch up */
};

static const int rows_of_point[] = {1, 2, 3, 5, 8};
enum { N_ROWS = sizeof rows_of_point / sizeof *rows_of_point };

/* Everything that was enqueued is behind us, and the counter of bytes moved by nobody's reading. */
static int finish(struct engine *g, struct err *e) {
    int rc = engine__batch_fetch(g, e);
    if (!rc) rc = g->kern->ops->sync(g->kern, e);
    uint64_t nobodys[ENGINE_MAX_GROUPS];
    if (!rc) engine__batch_kv_bytes(g, nobodys);
    return rc;
}

/* One pass of n rows behind `context` positions of a sequence whose K and V nobody wrote: their
 * values change no time. */
static int run_target(struct engine *g, int seq, int context, int n, int64_t *ns, struct err *e) {
    const struct kern_ops *ops = g->kern->ops;
    struct model_pass pass;
    int rc = engine__batch_build_dummy(g, seq, context, n, &pass, e);
    if (!rc) rc = ops->mark(g->kern, 0);
    if (!rc) rc = engine__batch_run(g, &pass, e);
    if (!rc) rc = ops->mark(g->kern, 1);
    if (!rc) rc = finish(g, e);
    return rc ? rc : ops->elapsed(g->kern, 0, 1, ns);
}

static int observe_target(struct engine *g, int seq, int context, int n, struct err *e) {
    int repeats = g->batch.pass.records ? RECORD_REPEATS : REPEATS;
    for (int i = 0; i < repeats; i++) {
        int64_t ns;
        int rc = run_target(g, seq, context, n, &ns, e);
        if (rc) return rc;
        /* The first pass warms caches up. */
        if (i > 0) draft_cost_observe(&g->passes.target, n, context + n, (double)ns);
    }
    return 0;
}

void engine__observe_draft(void *arg, const struct proposer_pass *pass) {
    struct engine *g = arg;
    if (pass->n_prompt == pass->n_rows)
        draft_costs_observe_lag(&g->passes, pass->n_rows, (double)pass->ns);
    else if (pass->n_prompt == 0)
        draft_cost_observe(&g->passes.draft, pass->n_rows, pass->kv_tokens, (double)pass->ns);
}

/* The draft's passes through its own front door: n rows to catch up on, then single ones. */
static int run_draft(struct engine *g, int seq, int context, int n, struct err *e) {
    static const int32_t token[FAR_CONTEXT + LAG_ROWS + KERN_MAX_DRAFT];
    const struct kern_ops *ops = g->kern->ops;
    struct kern_history history = engine__history(g);
    struct proposer_turn t = {
        .seq = seq,
        .ids = token,
        .n_tokens = context + n,
        .n_rows = n,
        .n_draft = REPEATS,
        .sample = {.top_p = 1, .repetition_penalty = 1, .history = -1, .probs_row = -1},
        .n_kv = context};
    int mark = 0;
    if (t.n_draft > g->sizes.o.max_draft_tokens) t.n_draft = g->sizes.o.max_draft_tokens;
    int rc = proposer_prepare(g->proposer, g->pool, g->eog, 0, &t, 1, e);
    if (!rc) rc = ops->mark(g->kern, 0);
    if (!rc)
        rc = proposer_run(g->proposer, &history, g->batch.drawn.dev, g->batch.pass.token.dev, &mark,
                          e);
    if (!rc) rc = finish(g, e);
    return rc ? rc : proposer_done(g->proposer, engine__observe_draft, g);
}

/* Ways to catch up are of one row, or two after a round that was accepted whole, or long. */
static int measure_draft(struct engine *g, int seq, int context, int n, struct err *e) {
    int rc = 0, repeats = g->batch.pass.records ? REPEATS : n == LAG_ROWS ? 2 : 1;
    for (int i = 0; i < repeats && !rc; i++) {
        if (n == LAG_ROWS && i == 1) g->passes.lag_row_ns = 0; /* the first one warms up */
        rc = run_draft(g, seq, context, n, e);
        kvpool_seq_truncate(g->pool, seq, KVPOOL_DRAFT, context);
    }
    return rc;
}

static bool wanted(const struct engine *g) {
    return g->sizes.o.draft_tokens == VERIFY_DRAFT_AUTO && (g->proposer || g->sizes.o.lookup);
}

/* Rows of the i-th point of a context, of the target or of the draft; 0: there is none. */
static int rows_of(const struct engine *g, int i, bool *draft) {
    bool records = g->batch.pass.records;
    int n_target = records ? g->sizes.o.max_draft_tokens + 1 : N_ROWS;
    *draft = i >= n_target;
    if (!*draft) return records ? i + 1 : rows_of_point[i];
    int n_short = records ? 2 : 1, at = i - n_target;
    if (!g->proposer || at > n_short) return 0;
    return at < n_short ? at + 1 : LAG_ROWS;
}

static int measure(struct engine *g, int context, int n, bool draft, struct err *e) {
    int seq, n_hit, n_draft_hit, rc = 0;
    struct kvpool_want want = {.n_tokens = context + n + KERN_MAX_DRAFT + 1, .with_draft = draft};
    if (kvpool_seq_open(g->pool, &want, &seq, &n_hit, &n_draft_hit, NULL)) return 0;
    if (draft) {
        kvpool_seq_extend(g->pool, seq, KVPOOL_DRAFT, context);
        rc = measure_draft(g, seq, context, n, e);
    } else {
        for (int i = 0; i < g->sizes.n_groups; i++)
            kvpool_seq_extend(g->pool, seq, g->sizes.group_class[i], context + n);
        rc = observe_target(g, seq, context, n, e);
    }
    kvpool_seq_close(g->pool, seq);
    return rc;
}

/* The second context: far from the first, but with room for what is measured behind it. */
static int far_context(const struct engine *g, bool draft) {
    int most = g->sizes.o.context / 2;
    if (draft && g->sizes.draft_context < most) most = g->sizes.draft_context;
    most = (most - LAG_ROWS - KERN_MAX_DRAFT) / KVPOOL_BLOCK * KVPOOL_BLOCK;
    return most < FAR_CONTEXT ? most : FAR_CONTEXT;
}

/* Later on a point could push cached prefixes out of the pool; serving teaches the rest. */
bool engine__is_calibrated(const struct engine *g) {
    return !wanted(g) || g->is_calibrated || g->live.n_requests > 0;
}

bool engine__calibrate(struct engine *g) {
    struct err e = {0};
    bool draft;
    if (engine__is_calibrated(g)) return false;
    int n = rows_of(g, g->n_calibrated++, &draft);
    int context = g->calibrates_far ? far_context(g, draft) : KVPOOL_BLOCK;
    if (n == 0) {
        g->is_calibrated = g->calibrates_far;
        g->calibrates_far = true;
        g->n_calibrated = 0;
        return true;
    }
    if (context + KERN_MAX_DRAFT > g->sizes.o.context / 2) return true; /* not what it will serve */
    if (g->calibrates_far && context < 8 * KVPOOL_BLOCK) return true;   /* nothing new */
    if (draft && context + n + KERN_MAX_DRAFT > g->sizes.draft_context) return true;
    if (n > (draft ? g->sizes.proposer.max_rows : g->batch.pass.caps.max_logits)) return true;
    int rc = measure(g, context, n, draft, &e);
    if (rc) engine__break(g, rc, &e);
    return true;
}
