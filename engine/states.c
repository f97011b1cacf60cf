/* States of the select layer: each pass taps them, each commit notes those of its rows in their
 * blocks' pages and in the sequence's ring of the newest, and scorers read both. A state is noted
 * once, when its token is committed: what a round drafted in vain never gets there, and blocks that
 * a prefix hit brings have theirs in their pages. */
#include "base/checked.h"
#include "base/err.h"
#include "engine/engine_private.h"

/* ---- Buffers ---- */

void engine__states_scorer(struct engine_sizes *s, const struct target_scorer_file *f) {
    s->has_scorer = true;
    s->scorer = (struct target_scorer_defaults){.smoothing = f->smoothing, .curve = f->curve};
    s->scorer_shape = target_scorer_shape(f);
    s->scorer_bytes = target_scorer_file_bytes(f);
    s->state_first = f->by_first;
}

struct kern_plane engine__states_shape(const struct engine_sizes *s) {
    return (struct kern_plane){.cols = s->state_cols,
                               .has_first = s->state_first,
                               .has_minmax = s->state_minmax,
                               .has_spread = s->state_spread};
}

static size_t scratch_bytes(const struct engine_sizes *z, const struct kern *k) {
    size_t n = 0;
    if (z->has_scorer) n = k->ops->score_scratch_bytes(k, &z->scorer_shape, z->caps.max_blocks);
    for (int i = 0; i < TARGET_N_SELECTORS; i++) {
        if (!target_by_states(i) || i == TARGET_SCORER) continue;
        const struct kern_scorer plain = target_scorer_plain(i, z->state_cols);
        n = max_size(n, k->ops->score_scratch_bytes(k, &plain, z->caps.max_blocks));
    }
    return n;
}

void engine__states_layout(struct engine_states *st, struct model_carve *c,
                           const struct engine_sizes *z, const struct kern *k) {
    size_t cols = (size_t)z->state_cols, seqs = (size_t)z->caps.max_seqs;
    if (cols == 0) return;
    st->state = model_carve_dev(c, (size_t)z->caps.max_rows * cols * sizeof *st->state);
    st->ring = model_carve_dev(c, seqs * KERN_STATE_QUERIES * cols * sizeof *st->ring);
    model_carve_array(c, &st->notes, seqs, sizeof(struct kern_note));
    st->scratch = model_carve_dev(c, scratch_bytes(z, k));
}

/* ---- Noting ---- */

/* The pages that hold planes are those of the first group, which all rows read densely. */
static struct kern_plane plane(const struct engine *g) {
    struct kern_plane p = engine__states_shape(&g->sizes);
    p.base = g->arena;
    p.page_stride = KVPOOL_ALIGN;
    p.plane_offset = kvpool_state_offset(&g->sizes.pool.shape[KVPOOL_SHALLOW]);
    return p;
}

void engine__states_tap(const struct engine *g, struct model_pass *pass) {
    if (g->sizes.state_cols == 0) return;
    pass->n_taps = 1;
    pass->tap[0] =
        (struct model_tap){.layer = g->sizes.o.select_layer, .state = g->batch.states.state};
}

void engine__states_commit(struct engine *g, const struct engine_request *r, int n) {
    struct engine_states *st = &g->batch.states;
    ASSERT(n >= 0 && n <= r->n_rows);
    if (g->sizes.state_cols == 0 || n == 0) return;
    ((struct kern_note *)st->notes.host)[st->n_notes++] =
        (struct kern_note){.seq = r->pass_idx,
                           .first_row = r->first_row,
                           .position = r->n_kv,
                           .n_rows = n,
                           .ring = r->slot};
}

int engine__states_note(struct engine *g, struct err *e) {
    struct engine_states *st = &g->batch.states;
    const struct kern_ops *ops = g->kern->ops;
    struct kern_plane p = plane(g);
    int n = st->n_notes;
    st->n_notes = 0;
    if (n == 0) return 0;
    int rc = ops->upload(g->kern, st->notes.dev, st->notes.host,
                         (size_t)n * sizeof(struct kern_note), e);
    if (rc) return rc;
    rc = ops->note_states(g->kern, n, st->notes.dev, st->state, &p, g->batch.pass.page[0].dev,
                          g->batch.pass.caps.max_blocks, st->ring);
    return rc ? err_raise(e, rc, "noting states of %d sequences failed", n) : 0;
}

/* ---- Scores ---- */

bool engine__states_tell_quarters(const struct engine *g, int selector) {
    return selector == TARGET_MEAN ||
           (selector == TARGET_SCORER && g->sizes.scorer_shape.kind == KERN_SCORE_LATE);
}

int engine__states_score(struct engine *g, const struct engine_request *r, int selector, float *out,
                         float *quarters, struct err *e) {
    const struct engine_states *st = &g->batch.states;
    size_t cols = (size_t)g->sizes.state_cols, blocks = (size_t)g->batch.pass.caps.max_blocks;
    ASSERT(target_by_states(selector) && cols > 0);
    struct kern_scorer scorer = selector == TARGET_SCORER
                                    ? *target_scorer_kern(g->scorer)
                                    : target_scorer_plain(selector, g->sizes.state_cols);
    struct kern_score_view v = {
        .plane = plane(g),
        .page = g->batch.pass.page[0].dev + (size_t)r->pass_idx * blocks,
        .ring = st->ring + (size_t)r->slot * KERN_STATE_QUERIES * cols,
        .n_tokens = r->n_kv,
    };
    int rc = g->kern->ops->score(g->kern, &scorer, &v, st->scratch, out);
    scorer.by_quarter = true;
    if (!rc && quarters) rc = g->kern->ops->score(g->kern, &scorer, &v, st->scratch, quarters);
    return rc ? err_raise(e, rc, "scoring %d tokens failed", r->n_kv) : 0;
}
