/* One text through a target: its pages, the passes that fill them, what they leave behind.
 *
 * Page ids count up: block b of a group is at b pages' distance from the group's start. Logits have
 * a row in front of a pass's own, the row before it: what predicts the pass's first token. */
#include "target/trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/rng.h"
#include "target/target.h"
#include "target/trace_private.h"

/* So much is taken off the token's logit: it is drawn, and its probability told, which penalties do
 * not touch. */
#define FORCED 1e30f

/* A pass's rows and what is wanted of them. */
struct rows {
    const int32_t *ids;
    int n;
    bool prompt;
    int first_mark; /* rows from here on are looked at; n: none */
    bool heads;     /* by head, else the most of all */
    bool apart;     /* by KV head and layer, quarters, too */
    const struct target_kept *kept;
    int n_logits; /* of the last rows */
};

int target_trace_n_tokens(const struct target_trace *t) {
    return t->n_tokens;
}

/* ---- A pass ---- */

bool target__trace_is_apart(const struct target_kept *kept) {
    return kept && (kept->own || kept->quarters);
}

/* The blocks that are read of n_all into t->read, their quarters into t->quarters; returns how
 * many. */
static int list(struct target_trace *t, const struct target_kept *kept, int n_all) {
    int n = 0, before = -1;
    ASSERT(kept->n >= 0 && kept->n <= kept->n_blocks && kept->n_blocks <= n_all);
    for (int i = 0; i < kept->n; i++) {
        ASSERT(kept->block[i] > before && kept->block[i] < kept->n_blocks);
        t->quarters[n] = kept->quarters ? kept->quarters[i] : 15;
        t->read[n++] = before = kept->block[i];
    }
    memset(t->quarters + n, 15, (size_t)(n_all - kept->n_blocks));
    for (int b = kept->n_blocks; b < n_all; b++) t->read[n++] = b;
    return n;
}

void target__trace_deep_pages(struct target_trace *t, int seq_idx, const int32_t *pages,
                              const struct target_kept *kept, int n_all, uint64_t id) {
    struct model_batch *b = &t->batch;
    int group = t->n_groups - 1, n = n_all;
    if (!b->own.used) {
        ASSERT(!target__trace_is_apart(kept));
        if (kept) n = list(t, kept, n_all);
        model_batch_pages(b, seq_idx, group, pages, kept ? t->read : NULL, n);
        return;
    }
    model_batch_pages(b, seq_idx, group, pages, NULL, n_all);
    if (!model_batch_begin_own(b, seq_idx, id, n_all)) return;
    for (int layer = 0; layer < b->own.n_layers; layer++)
        for (int head = 0; head < b->own.n_heads; head++) {
            const struct target_kept *own =
                kept && kept->own ? &kept->own[layer * b->own.n_heads + head] : kept;
            if (own) n = list(t, own, n_all);
            model_batch_put_own(b, seq_idx, layer, head, pages, own ? t->read : NULL,
                                own ? t->quarters : NULL, n);
        }
}

static void fill(struct target_trace *t, const struct rows *r) {
    struct model_batch *b = &t->batch;
    int row, n_all = target_n_blocks(t->n_tokens + r->n);
    model_batch_begin(b);
    if (target__trace_is_apart(r->kept)) model_batch_use_own(b);
    int idx = model_batch_add(b, r->ids, r->n, t->n_tokens, r->prompt, &row);
    for (int i = r->n - r->n_logits; i < r->n; i++) model_batch_want(b, row + i);
    for (int g = 0; g < t->n_groups - 1; g++)
        model_batch_pages(b, idx, g, t->pages[g], NULL, n_all);
    target__trace_deep_pages(t, idx, t->pages[t->n_groups - 1], r->kept, n_all, ++t->own_id);
    *(struct kern_note *)t->note.host =
        (struct kern_note){.first_row = t->n_tokens, .position = t->n_tokens, .n_rows = r->n};
    for (int i = 0; i < r->n; i++) ((int32_t *)t->mark.host)[i] = i >= r->first_mark ? 0 : -1;
    /* The tokens are drawn by force: see FORCED. */
    for (int i = 0; i < r->n && i < TARGET_TRACE_LOOK; i++) {
        ((int32_t *)t->recent.host)[i] = r->ids[i];
        ((struct kern_sample *)t->params.host)[i] =
            (struct kern_sample){.top_p = 1,
                                 .repetition_penalty = 1,
                                 .presence_penalty = -FORCED,
                                 .purpose = RNG_SAMPLE,
                                 .first_recent = i,
                                 .n_recent = 1,
                                 .probs_row = -1,
                                 .n_logprobs = 1,
                                 .want_logprob = 1};
    }
}

static float *states_of(const struct target_trace *t, int tap) {
    return t->states + (size_t)tap * (size_t)t->o.max_tokens * (size_t)t->c->hidden;
}

static float *ring_of(const struct target_trace *t, int tap) {
    return t->rings + (size_t)tap * KERN_STATE_QUERIES * (size_t)t->c->hidden;
}

/* By the note that is in the backend. */
static int note(struct target_trace *t, struct err *e) {
    for (int i = 0; i < t->o.n_taps; i++) {
        struct kern_plane p = trace_plane_of(t, i);
        int rc = t->k->ops->note_states(t->k, 1, t->note.dev, states_of(t, i), &p, t->identity,
                                        t->n_blocks, ring_of(t, i));
        if (rc) return err_raise(e, rc, "noting states of layer %d failed", t->o.tap_layer[i]);
    }
    return 0;
}

static void set_groups(const struct target_trace *t, const struct rows *r, struct model_pass *p) {
    for (int g = 0; g < t->n_groups; g++) {
        struct model_group *to = &p->group[g];
        to->first_layer = t->group_first[g];
        to->n_layers = t->group_layers[g];
        to->arena = t->group_arena[g];
        to->kv_dtype = t->o.kv_dtype;
        if (g < t->n_groups - 1 || r->first_mark >= r->n) continue;
        to->taps.mass_line = t->mark.dev;
        if (r->heads) to->taps.head_mass = t->mass;
        else to->taps.mass = t->mass;
        to->head_mass_stride = (size_t)t->c->n_heads * (size_t)t->n_blocks;
        if (!r->apart) continue;
        to->taps.quarter_mass = t->quarter_mass;
        to->taps.mass_head_stride = t->c->n_kv_heads > 1;
        to->mass_stride = (size_t)t->c->n_kv_heads * (size_t)t->n_blocks;
    }
    p->n_taps = t->o.n_taps;
    for (int i = 0; i < p->n_taps; i++)
        p->tap[i] = (struct model_tap){.layer = t->o.tap_layer[i],
                                       .state = states_of(t, i) +
                                                (size_t)t->n_tokens * (size_t)t->c->hidden};
}

int target__trace_settle(struct target_trace *t, struct err *e) {
    if (!t->is_enqueued) return 0;
    t->is_enqueued = false;
    return t->k->ops->sync(t->k, e);
}

/* Enqueue one pass; its logits stand in rows 1.. then. */
static int run(struct target_trace *t, const struct rows *r, struct err *e) {
    struct model_pass p;
    ASSERT(r->n > 0 && t->n_tokens + r->n <= t->o.max_tokens);
    int rc = target__trace_settle(t, e);
    if (rc) return rc;
    fill(t, r);
    rc = model_batch_finish(&t->batch, t->k, &t->mark, r->n, sizeof(int32_t), NULL, &p, e);
    if (rc) return rc;
    set_groups(t, r, &p);
    p.logits = t->logits + (size_t)trace_vocab_of(t);
    p.logits_stride = (size_t)trace_vocab_of(t);
    rc = model_forward(t->m, &p, e);
    if (!rc) rc = note(t, e);
    t->n_tokens += r->n;
    t->is_enqueued = true;
    return rc;
}

static int copy(struct target_trace *t, void *dst, const void *src, size_t bytes, struct err *e) {
    int rc = t->k->ops->copy_page(t->k, dst, src, bytes);
    return rc ? err_raise(e, rc, "copying %zu bytes failed", bytes) : 0;
}

/* Row i of a pass's n_logits rows predicts what comes next. */
static int keep_last(struct target_trace *t, int n_logits, struct err *e) {
    size_t vocab = (size_t)trace_vocab_of(t);
    t->has_last = true;
    return copy(t, t->logits, t->logits + (size_t)n_logits * vocab, vocab * sizeof(float), e);
}

static int fetch_mass(struct target_trace *t, size_t n, struct err *e) {
    t->is_enqueued = false;
    return t->k->ops->download(t->k, t->seen.host, t->mass, n * sizeof(float), e);
}

/* ---- Appending ---- */

static int check_room(const struct target_trace *t, const int32_t *ids, int n, struct err *e) {
    if (n < 0 || n > t->o.max_tokens - t->n_tokens)
        return err_raise(e, E_TOO_LONG, "%d more tokens behind %d: the trace has room for %d", n,
                         t->n_tokens, t->o.max_tokens);
    for (int i = 0; ids && i < n; i++)
        if (ids[i] < 0 || ids[i] >= t->c->vocab)
            return err_raise(e, E_RANGE, "token %d at %d: ids are 0 to %d", ids[i], t->n_tokens + i,
                             t->c->vocab - 1);
    return 0;
}

/* Nothing was looked at yet. */
static int clear_mass(struct target_trace *t, bool apart, struct err *e) {
    size_t n = apart ? trace_n_apart(t) : 1;
    int rc = copy(t, t->mass, t->no_mass, n * (size_t)t->n_blocks * sizeof(float), e);
    if (rc || !apart) return rc;
    return copy(t, t->quarter_mass, t->no_mass, trace_quarter_floats(t) * sizeof(float), e);
}

static int fetch_prompt_mass(struct target_trace *t, bool apart, struct err *e) {
    int rc = fetch_mass(t, (apart ? trace_n_apart(t) : 1) * (size_t)t->n_blocks, e);
    if (rc || !apart) return rc;
    return t->k->ops->download(t->k, t->seen_quarters.host, t->quarter_mass,
                               trace_quarter_floats(t) * sizeof(float), e);
}

static struct target_seen seen_of(const struct target_trace *t) {
    return (struct target_seen){.mass = t->seen.host,
                                .quarters = t->seen_quarters.host,
                                .n_layers = trace_n_deep(t),
                                .n_heads = t->c->n_kv_heads,
                                .stride = t->n_blocks};
}

static int prompt(struct target_trace *t, const int32_t *ids, int n, int n_look, bool apart,
                  struct err *e) {
    int rc = check_room(t, ids, n, e), most = target_trace_caps(&t->o).max_rows;
    if (rc || n == 0) return rc;
    if (n_look > 0) rc = clear_mass(t, apart, e);
    for (int at = 0; !rc && at < n;) {
        int take = n - at < most ? n - at : most, end = at + take;
        int mark = n - n_look - at < 0 ? 0 : n - n_look - at < take ? n - n_look - at : take;
        rc = run(t,
                 &(struct rows){.ids = ids + at,
                                .n = take,
                                .prompt = true,
                                .first_mark = mark,
                                .apart = apart,
                                .n_logits = end == n},
                 e);
        at = end;
    }
    if (!rc) rc = keep_last(t, 1, e);
    if (!rc)
        rc = copy(t, t->prompt_logits, t->logits, (size_t)trace_vocab_of(t) * sizeof(float), e);
    t->prompt_end = t->n_tokens;
    return rc || n_look == 0 ? rc : fetch_prompt_mass(t, apart, e);
}

int target_trace_prompt(struct target_trace *t, const int32_t *ids, int n, int n_look,
                        const float **mass, struct err *e) {
    if (n_look > n) n_look = n;
    int rc = prompt(t, ids, n, n_look, false, e);
    if (!rc && n > 0 && mass) *mass = n_look > 0 ? t->seen.host : NULL;
    return rc;
}

int target_trace_prompt_apart(struct target_trace *t, const int32_t *ids, int n, int n_look,
                              struct target_seen *out, struct err *e) {
    ASSERT(t->o.apart && n_look > 0);
    int rc = prompt(t, ids, n, n_look < n ? n_look : n, true, e);
    *out = seen_of(t);
    return rc;
}

int target_trace_look_apart(struct target_trace *t, int32_t id, struct target_seen *out,
                            struct err *e) {
    const struct rows r = {.ids = &id, .n = 1, .prompt = true, .apart = true, .n_logits = 1};
    ASSERT(t->o.apart);
    int rc = check_room(t, &id, 1, e);
    if (!rc) rc = clear_mass(t, true, e);
    if (!rc) rc = run(t, &r, e);
    if (!rc) rc = keep_last(t, 1, e);
    if (!rc) rc = fetch_prompt_mass(t, true, e);
    *out = seen_of(t);
    return rc;
}

int target_trace_look(struct target_trace *t, const int32_t *ids, int n, struct target_masses *out,
                      struct err *e) {
    ASSERT(t->o.heads && n > 0 && n <= TARGET_TRACE_LOOK);
    int rc = check_room(t, ids, n, e);
    if (!rc) rc = copy(t, t->mass, t->no_mass, trace_mass_floats(t) * sizeof(float), e);
    if (!rc)
        rc = run(
            t, &(struct rows){.ids = ids, .n = n, .prompt = true, .heads = true, .n_logits = 1}, e);
    if (!rc) rc = keep_last(t, 1, e);
    if (!rc) rc = fetch_mass(t, trace_mass_floats(t), e);
    if (rc) return rc;
    *out = (struct target_masses){.mass = t->seen.host,
                                  .first_layer = t->o.select_layer,
                                  .n_layers = trace_n_deep(t),
                                  .n_heads = t->c->n_heads,
                                  .n_rows = n,
                                  .n_blocks = target_n_blocks(t->n_tokens),
                                  .stride = t->n_blocks};
    return 0;
}

/* What logits row i says of forced token i, for n rows. */
static int tell(struct target_trace *t, int n, bool has_first, float *nll, int32_t *argmax,
                struct err *e) {
    const struct kern_history history = {.prompt = t->no_history,
                                         .output = t->no_history,
                                         .stride = (size_t)trace_vocab_of(t),
                                         .recent = t->recent.dev};
    const struct kern_sampled *drawn = t->sampled.host;
    int rc =
        t->k->ops->sample(t->k, n, trace_vocab_of(t), NULL, t->logits, (size_t)trace_vocab_of(t),
                          t->params.dev, &history, t->sample_scratch, t->sampled.dev, NULL);
    if (rc) return err_raise(e, rc, "reading logits failed");
    t->is_enqueued = false;
    rc = t->k->ops->download(t->k, t->sampled.host, t->sampled.dev, (size_t)n * sizeof *drawn, e);
    for (int i = 0; !rc && i < n; i++) {
        bool known = i > 0 || has_first;
        if (known && drawn[i].token != ((int32_t *)t->recent.host)[i])
            return err_raise(e, E_NUMERIC, "logits hold NaN before token %d", t->n_tokens - n + i);
        if (nll) nll[i] = known ? -drawn[i].logprob : NAN;
        if (argmax) argmax[i] = known ? drawn[i].top_id[0] : -1;
    }
    return rc;
}

static int force(struct target_trace *t, const int32_t *ids, int n, const struct target_kept *kept,
                 bool look, float *nll, int32_t *argmax, struct err *e) {
    int rc = check_room(t, ids, n, e);
    for (int at = 0; !rc && at < n;) {
        int take = n - at < TARGET_TRACE_LOOK ? n - at : TARGET_TRACE_LOOK;
        bool has_first = t->has_last;
        rc = run(t,
                 &(struct rows){.ids = ids + at,
                                .n = take,
                                .first_mark = look ? 0 : take,
                                .kept = kept,
                                .n_logits = take},
                 e);
        if (!rc && (nll || argmax))
            rc = tell(t, take, has_first, nll ? nll + at : NULL, argmax ? argmax + at : NULL, e);
        if (!rc) rc = keep_last(t, take, e);
        at += take;
    }
    return rc;
}

int target_trace_force(struct target_trace *t, const int32_t *ids, int n,
                       const struct target_kept *kept, float *nll, int32_t *argmax, struct err *e) {
    return force(t, ids, n, kept, false, nll, argmax, e);
}

/* A list's entries stay where they are while blocks join behind it, and masses of later passes
 * raise those of earlier ones. */
int target_trace_force_used(struct target_trace *t, const int32_t *ids, int n,
                            const struct target_kept *kept, float *used, struct err *e) {
    ASSERT(kept && !target__trace_is_apart(kept));
    int rc = clear_mass(t, false, e);
    if (!rc) rc = force(t, ids, n, kept, true, NULL, NULL, e);
    if (!rc) rc = fetch_mass(t, (size_t)kept->n, e);
    for (int i = 0; i < kept->n_blocks; i++) used[i] = NAN;
    for (int i = 0; i < kept->n && !rc; i++)
        used[kept->block[i]] = ((const float *)t->seen.host)[i];
    return rc;
}

/* The greedy token of the logits' first row, whatever `recent` holds. */
static int draw(struct target_trace *t, int32_t *out, struct err *e) {
    const struct kern_sampled *drawn = t->sampled.host;
    struct kern_sample p = {
        .top_p = 1, .repetition_penalty = 1, .purpose = RNG_SAMPLE, .history = -1, .probs_row = -1};
    int rc = target__trace_settle(t, e);
    if (!rc) rc = t->k->ops->upload(t->k, t->params.dev, &p, sizeof p, e);
    if (!rc)
        rc = t->k->ops->sample(t->k, 1, trace_vocab_of(t), NULL, t->logits,
                               (size_t)trace_vocab_of(t), t->params.dev, NULL, t->sample_scratch,
                               t->sampled.dev, NULL);
    if (!rc) rc = t->k->ops->download(t->k, t->sampled.host, t->sampled.dev, sizeof *drawn, e);
    if (rc) return err_prefix(e, rc, "drawing token %d", t->n_tokens);
    if (drawn->token < 0)
        return err_raise(e, E_NUMERIC, "logits hold NaN before token %d", t->n_tokens);
    *out = drawn->token;
    return 0;
}

int target_trace_generate(struct target_trace *t, int n, const struct target_kept *kept,
                          const int32_t *stop, int n_stop, int32_t *out, int *n_out,
                          struct err *e) {
    int rc = check_room(t, NULL, n, e);
    *n_out = 0;
    if (!rc && !t->has_last && n > 0)
        rc = err_raise(e, E_INVALID, "nothing tells what follows token %d: append one first",
                       t->n_tokens);
    while (!rc && *n_out < n) {
        if (*n_out > 0) rc = target_trace_force(t, &out[*n_out - 1], 1, kept, NULL, NULL, e);
        if (!rc) rc = draw(t, &out[*n_out], e);
        for (int i = 0; !rc && i < n_stop; i++)
            if (out[*n_out] == stop[i]) return 0;
        if (!rc) ++*n_out;
    }
    return rc;
}

/* The newest states are noted again from the start of the quarter that holds the oldest of them: a
 * quarter's first token sets its sum, so what was added behind n_tokens is gone. */
int target_trace_rewind(struct target_trace *t, int n_tokens, struct err *e) {
    ASSERT(n_tokens >= 0 && n_tokens <= t->n_tokens);
    int from = n_tokens - KERN_STATE_QUERIES, rc = target__trace_settle(t, e);
    if (rc || n_tokens == t->n_tokens) return rc;
    from = from < 0 ? 0 : from / KERN_QUARTER * KERN_QUARTER;
    t->n_tokens = n_tokens;
    t->has_last = n_tokens == t->prompt_end && n_tokens > 0;
    if (t->prompt_end > n_tokens) t->prompt_end = -1;
    if (t->has_last)
        rc = copy(t, t->logits, t->prompt_logits, (size_t)trace_vocab_of(t) * sizeof(float), e);
    if (rc || n_tokens == 0 || t->o.n_taps == 0) return rc;
    *(struct kern_note *)t->note.host =
        (struct kern_note){.first_row = from, .position = from, .n_rows = n_tokens - from};
    rc = t->k->ops->upload(t->k, t->note.dev, t->note.host, sizeof(struct kern_note), e);
    t->is_enqueued = true;
    return rc ? rc : note(t, e);
}

/* ---- Reading ---- */

int target_trace_states(struct target_trace *t, int tap, int first, int n, float *out,
                        struct err *e) {
    size_t h = (size_t)t->c->hidden;
    ASSERT(tap >= 0 && tap < t->o.n_taps && first >= 0 && n >= 0 && first + n <= t->n_tokens);
    t->is_enqueued = false;
    return t->k->ops->download(t->k, out, states_of(t, tap) + (size_t)first * h,
                               (size_t)n * h * sizeof(float), e);
}

int target_trace_plane(struct target_trace *t, int tap, int first, int n, float *out,
                       struct err *e) {
    struct kern_plane p = trace_plane_of(t, tap);
    size_t bytes = kern_plane_bytes(&p);
    ASSERT(tap >= 0 && tap < t->o.n_taps && first >= 0 && n >= 0);
    ASSERT(first + n <= target_n_blocks(t->n_tokens));
    t->is_enqueued = false;
    const uint8_t *at = (const uint8_t *)p.base + (size_t)first * p.page_stride;
    if (bytes == p.page_stride) return t->k->ops->download(t->k, out, at, (size_t)n * bytes, e);
    for (int i = 0; i < n; i++) {
        int rc = t->k->ops->download(t->k, (uint8_t *)out + (size_t)i * bytes,
                                     at + (size_t)i * p.page_stride, bytes, e);
        if (rc) return rc;
    }
    return 0;
}

int target_trace_score(struct target_trace *t, int tap, const struct kern_scorer *s, float *out,
                       struct err *e) {
    const struct kern_ops *ops = t->k->ops;
    struct kern_score_view v = {.plane = trace_plane_of(t, tap),
                                .page = t->identity,
                                .ring = ring_of(t, tap),
                                .n_tokens = t->n_tokens};
    size_t each = s->by_quarter ? TARGET_QUARTERS : 1;
    size_t blocks = each * (size_t)target_n_blocks(t->n_tokens);
    size_t line = align_up(each * (size_t)t->n_blocks * sizeof(float), KERN_ACT_ALIGN);
    size_t bytes = line + ops->score_scratch_bytes(t->k, s, t->n_blocks);
    ASSERT(tap >= 0 && tap < t->o.n_taps && s->cols == t->c->hidden && t->n_tokens > 0);
    int rc = target__trace_settle(t, e);
    if (!rc && bytes > t->score_scratch_bytes) {
        ops->unreserve(t->k, t->score_scratch);
        t->score_scratch = NULL;
        t->score_scratch_bytes = 0;
        rc = ops->reserve(t->k, bytes, &t->score_scratch, e);
        if (!rc) t->score_scratch_bytes = bytes;
    }
    if (rc) return rc;
    rc = ops->score(t->k, s, &v, (uint8_t *)t->score_scratch + line, t->score_scratch);
    if (rc) return err_raise(e, rc, "scoring blocks failed");
    return ops->download(t->k, out, t->score_scratch, blocks * sizeof(float), e);
}

int target_trace_recheck(struct target_trace *t, int tap, const int32_t *list, int n,
                         const float **mass, struct err *e) {
    static const int32_t ids[TARGET_RECHECK_ROWS]; /* tokens play no part */
    const struct rows r = {.ids = ids, .n = TARGET_RECHECK_ROWS};
    struct model_batch *b = &t->batch;
    struct model_pass p;
    int first = t->n_tokens - r.n, deep = t->n_groups - 1, row;
    ASSERT(tap >= 0 && tap < t->o.n_taps && t->o.tap_layer[tap] == t->o.select_layer);
    ASSERT(first >= 0 && n > 0 && n <= target_n_blocks(t->n_tokens));
    int rc = target__trace_settle(t, e);
    if (rc) return rc;
    model_batch_begin(b);
    int idx = model_batch_add(b, ids, r.n, first, false, &row);
    for (int g = 0; g < t->n_groups; g++)
        model_batch_pages(b, idx, g, t->pages[g], g == deep ? list : NULL,
                          g == deep ? n : target_n_blocks(t->n_tokens));
    for (int i = 0; i < r.n; i++) ((int32_t *)t->mark.host)[i] = 0;
    rc = model_batch_finish(b, t->k, &t->mark, r.n, sizeof(int32_t), NULL, &p, e);
    if (!rc) rc = copy(t, t->mass, t->no_mass, (size_t)n * sizeof(float), e);
    if (rc) return rc;
    set_groups(t, &r, &p);
    rc = model_look(t->m, &p, deep, states_of(t, tap) + (size_t)first * (size_t)t->c->hidden, r.n,
                    0, e);
    *mass = (const float *)t->seen.host;
    return rc ? rc : fetch_mass(t, (size_t)n, e);
}

void *target_trace_page(const struct target_trace *t, bool deep, int block, size_t *bytes) {
    int g = deep ? t->n_groups - 1 : 0;
    *bytes = t->page_bytes[g];
    return t->group_arena[g] + (size_t)block * t->page_bytes[g];
}
