/* The target's pass of a step: its buffers, filled from the turn's sequences, and the decision of
 * their rounds. One layout function names every buffer; it runs once to count (the plan prints the
 * sums) and once to carve. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/rng.h"
#include "engine/engine_private.h"

static size_t scratch_bytes(const struct engine_sizes *z, const struct kern *k) {
    return k->ops->accept_scratch_bytes(k, z->caps.max_seqs, z->vocab);
}

/* Parts of lines of masses that a pass may fill. Each prompt has a line, each row of a dense pass
 * one; where lines have a part for each layer and KV head, draft rows of dense passes are fewer
 * (exact.c). */
static size_t mass_parts(const struct engine_sizes *z) {
    size_t seqs = (size_t)z->caps.max_seqs, logits = (size_t)z->caps.max_logits;
    size_t each = (size_t)z->list_layers * (size_t)z->list_heads;
    size_t few = logits < TARGET_MOST_EXACT ? logits : TARGET_MOST_EXACT;
    return max_size(seqs + logits, (seqs + few) * each);
}

/* The group of deep layers, 0 where there is none. */
static int deep_group(const struct engine_sizes *z) {
    for (int i = 0; i < z->n_groups; i++)
        if (z->group_class[i] == KVPOOL_DEEP) return i;
    return 0;
}

/* Bytes of each part, where `s` is not NULL, and every pointer of b. All counts are bounded: rows
 * and sequences by engine__sizes, vocab and blocks by the model's config. */
static void layout(struct engine_batch *b, struct model_carve *c, const struct engine_sizes *z,
                   const struct kern *k, struct engine_sizes *s) {
    size_t seqs = (size_t)z->caps.max_seqs, logits = (size_t)z->caps.max_logits;
    size_t vocab = (size_t)z->vocab, start = c->dev_used;
    model_batch_arrays(&b->pass, c, &z->caps, z->n_groups);
    model_carve_array(c, &b->round, seqs, sizeof(struct kern_round));
    model_carve_array(c, &b->sample, logits, sizeof(struct kern_sample));
    model_batch_lists(&b->pass, c);
    model_batch_own(&b->pass, c, deep_group(z), z->list_layers, z->list_heads, z->list_quarters);
    if (s) s->batch_bytes = c->dev_used - start;
    start = c->dev_used;
    b->dev_logits = model_carve_dev(c, logits * vocab * sizeof(float));
    if (s) s->logits_bytes = c->dev_used - start;
    start = c->dev_used;
    model_carve_array(c, &b->kv_bytes, ENGINE_MAX_GROUPS, sizeof(uint64_t));
    model_carve_array(c, &b->n_accepted, seqs, sizeof(int32_t));
    model_carve_array(c, &b->drawn, seqs * (size_t)z->o.max_draft_tokens, sizeof(int32_t));
    model_carve_array(c, &b->sampled, logits, sizeof(struct kern_sampled));
    b->scratch = model_carve_dev(c, scratch_bytes(z, k));
    if (s) s->sample_bytes = c->dev_used - start;
    start = c->dev_used;
    size_t n_mass = mass_parts(z) * (size_t)z->caps.max_blocks;
    model_carve_array(c, &b->mass_line, (size_t)z->caps.max_rows, sizeof(int32_t));
    model_carve_array(c, &b->mass, n_mass, sizeof(float));
    b->no_mass = model_carve_host(c, n_mass * sizeof(float));
    model_carve_array(c, &b->quarter_mass, z->list_quarters ? n_mass * TARGET_QUARTERS : 0,
                      sizeof(float));
    b->look = model_carve_host(c, (size_t)z->caps.max_blocks * sizeof(float));
    if (s) s->selection_bytes = c->dev_used - start;
    start = c->dev_used;
    engine__states_layout(&b->states, c, z, k);
    if (s) s->states_bytes = c->dev_used - start;
    start = c->dev_used;
    b->dev_prompt_count = model_carve_dev(c, seqs * vocab * sizeof(uint16_t));
    b->dev_output_count = model_carve_dev(c, seqs * vocab * sizeof(uint16_t));
    if (s) s->history_bytes = c->dev_used - start;
}

void engine__batch_sizes(struct engine_sizes *s, const struct kern *k) {
    struct engine_batch none = {0};
    struct model_carve c = {0};
    layout(&none, &c, s, k, s);
    s->batch_host_bytes =
        c.host_used + (size_t)s->vocab * sizeof *none.count + engine__prefill_bytes(s);
}

int engine__batch_open(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    const struct engine_sizes *z = &g->sizes;
    const struct kern_ops *ops = g->kern->ops;
    struct model_carve c = {0};
    layout(b, &c, z, g->kern, NULL);
    int rc = ops->reserve(g->kern, c.dev_used, &b->dev_block_base, e);
    if (!rc) rc = ops->host_reserve(g->kern, c.host_used, &b->host_block, e);
    if (rc) return err_prefix(e, rc, "buffers of a step");
    b->count = malloc((size_t)z->vocab * sizeof *b->count);
    if (!b->count) return err_raise(e, E_NOMEM, "no memory for the buffers of a step");
    c = (struct model_carve){.host = b->host_block, .dev = b->dev_block_base};
    layout(b, &c, z, g->kern, NULL);
    return model_batch_init(&b->pass, g->kern, e);
}

void engine__batch_close(struct engine *g) {
    if (g->sizes.state_cols > 0) g->kern->ops->sync(g->kern, NULL); /* the last step's notes */
    g->kern->ops->unreserve(g->kern, g->batch.dev_block_base);
    g->kern->ops->host_unreserve(g->kern, g->batch.host_block);
    free(g->batch.count);
}

/* ---- Filling ---- */

struct kern_sample engine__sample_of(const struct engine *g, const struct engine_request *r) {
    const struct verify_params *p = &r->params;
    return (struct kern_sample){
        .temperature = (float)p->temperature,
        .top_k = p->top_k < g->vocab ? p->top_k : 0,
        .top_p = (float)p->top_p,
        .min_p = (float)p->min_p,
        .repetition_penalty = (float)p->repetition_penalty,
        .presence_penalty = (float)p->presence_penalty,
        .frequency_penalty = (float)p->frequency_penalty,
        .seed = r->seed,
        .purpose = RNG_SAMPLE,
        .gumbel = p->coupling == VERIFY_GUMBEL,
        .history = r->has_penalties ? r->slot : -1,
        .probs_row = -1,
    };
}

/* The draw at `position`, behind `n_recent` draft tokens that stand in rows from first_recent on.
 */
static void fill_sample(struct engine *g, const struct engine_request *r, int logit, int position,
                        int first_recent, int n_recent) {
    struct kern_sample *s = &((struct kern_sample *)g->batch.sample.host)[logit];
    *s = engine__sample_of(g, r);
    s->position = position;
    s->first_recent = first_recent;
    s->n_recent = n_recent;
    bool keeps = r->params.logprobs >= 0 && !engine__is_ahead(r);
    s->n_logprobs = keeps ? r->params.logprobs : 0;
    s->want_logprob = keeps || engine__sparse_wants_logprob(r);
    if (position - r->n_prompt < r->params.min_tokens) {
        s->n_banned = g->n_eog;
        memcpy(s->banned, g->eog, (size_t)g->n_eog * sizeof *s->banned);
    }
}

/* A draw for nobody. */
static const struct kern_sample no_request = {
    .top_p = 1, .repetition_penalty = 1, .purpose = RNG_SAMPLE, .history = -1, .probs_row = -1};

static void add_round(struct engine_batch *b, const struct kern_round *round) {
    ((struct kern_round *)b->round.host)[b->n_rounds++] = *round;
}

/* Rows of one sequence: committed tokens from n_kv on, then the draft tokens; the last n_logits
 * want logits. Draft tokens stand behind the committed ones in `ids` for the time of the pass. */
static int fill_rows(struct engine *g, struct engine_request *r) {
    struct model_batch *b = &g->batch.pass;
    int row,
        idx = model_batch_add(b, r->ids + r->n_kv, r->n_rows, r->n_kv, !engine__decodes(r), &row);
    int first = r->n_rows - r->n_logits;
    r->first_row = row;
    r->pass_idx = idx;
    engine__sparse_mark(g, r, row);
    r->first_logit = b->n_logits;
    r->first_draft = row + first + 1;
    for (int i = first; i < r->n_rows; i++)
        fill_sample(g, r, model_batch_want(b, row + i), r->n_kv + i + 1, r->first_draft, i - first);
    if (r->n_logits == 0) return idx;
    r->round_idx = g->batch.n_rounds;
    add_round(&g->batch, &(struct kern_round){.n_draft = r->n_draft,
                                              .first_row = r->first_logit,
                                              .first_draft = r->first_draft,
                                              .first_q = r->first_q});
    g->batch.has_penalties |= r->has_penalties;
    return idx;
}

/* Lists by deep layer and KV head. */
static void fill_own(struct engine *g, const struct engine_request *r, int idx,
                     const int32_t *pages, int n_pages) {
    struct model_batch *b = &g->batch.pass;
    if (!model_batch_begin_own(b, idx, engine__sparse_id(r), n_pages)) return;
    for (int layer = 0; layer < b->own.n_layers; layer++)
        for (int head = 0; head < b->own.n_heads; head++) {
            int n = n_pages;
            const uint8_t *quarters;
            const int32_t *read = engine__sparse_own(g, r, layer, head, &n, &quarters);
            model_batch_put_own(b, idx, layer, head, pages, read, quarters, n);
        }
}

/* r: NULL where everything is read. */
static void fill_pages(struct engine *g, const struct engine_request *r, int seq, int idx) {
    for (int i = 0; i < g->sizes.n_groups; i++) {
        enum kvpool_class c = g->sizes.group_class[i];
        bool own = g->batch.pass.own.used && c == KVPOOL_DEEP;
        int n;
        const int32_t *pages = kvpool_seq_pages(g->pool, seq, c, &n);
        const int32_t *read = r && !own ? engine__sparse_list(r, c, &n) : NULL;
        model_batch_pages(&g->batch.pass, idx, i, pages, read, n);
        if (own) fill_own(g, r, idx, pages, n);
    }
}

/* Rows and sequences up to counts that occur often, where recordings are kept: a sequence more is a
 * round of an idle row. */
static void pad(struct engine_batch *b) {
    struct model_batch *p = &b->pass;
    const struct model_caps *caps = &p->caps;
    int seqs = model_batch_round(p, p->n_seqs), n = p->n_logits;
    int rows = model_batch_round(p, p->n_gen + seqs - p->n_seqs);
    if (p->n_prompt > 0 || seqs > caps->max_seqs || rows > caps->max_rows ||
        rows > caps->max_logits || p->n_gen != n)
        return;
    model_batch_pad(p, rows, seqs, rows);
    for (; n < rows; n++) {
        ((struct kern_sample *)b->sample.host)[n] = no_request;
        if (b->n_rounds < seqs) add_round(b, &(struct kern_round){.first_row = n, .first_q = -1});
    }
}

static size_t mass_bytes(const struct engine_batch *b) {
    size_t parts = (size_t)b->n_mass * (size_t)b->mass_parts;
    return parts * (size_t)b->pass.caps.max_blocks * sizeof(float);
}

/* Rows' lines and nothing in them, to the backend. */
static int put_mass(struct engine *g, struct model_pass *pass, struct err *e) {
    const struct kern_ops *ops = g->kern->ops;
    struct engine_batch *b = &g->batch;
    if (b->n_mass == 0) return 0;
    int rc = ops->upload(g->kern, b->mass_line.dev, b->mass_line.host,
                         (size_t)(b->pass.n_gen + b->pass.n_prompt) * sizeof(int32_t), e);
    if (!rc) rc = ops->upload(g->kern, b->mass.dev, b->no_mass, mass_bytes(b), e);
    for (size_t i = 0; i < TARGET_QUARTERS && b->looks_at_quarters && !rc; i++)
        rc = ops->upload(g->kern, (uint8_t *)b->quarter_mass.dev + i * mass_bytes(b), b->no_mass,
                         mass_bytes(b), e);
    for (int i = 0; i < g->sizes.n_groups; i++) {
        if (g->sizes.group_class[i] != KVPOOL_DEEP) continue;
        pass->group[i].taps.mass = b->mass.dev;
        pass->group[i].taps.mass_line = b->mass_line.dev;
        if (b->looks_at_quarters) pass->group[i].taps.quarter_mass = b->quarter_mass.dev;
        if (b->mass_parts == 1) continue;
        pass->group[i].taps.mass_head_stride = g->sizes.list_heads > 1;
        pass->group[i].mass_stride = (size_t)g->sizes.list_heads * (size_t)b->pass.caps.max_blocks;
    }
    return rc;
}

/* What was filled, to the backend. */
static int put(struct engine *g, struct model_pass *pass, struct err *e) {
    const struct engine_sizes *z = &g->sizes;
    struct engine_batch *b = &g->batch;
    pad(b);
    int rc = model_batch_finish(&b->pass, g->kern, &b->sample, b->pass.n_logits,
                                sizeof(struct kern_sample), b->kv_bytes.dev, pass, e);
    for (int i = 0; i < z->n_groups; i++) {
        pass->group[i].first_layer = z->group_first[i];
        pass->group[i].n_layers = z->group_layers[i];
        pass->group[i].arena = g->arena;
        pass->group[i].kv_dtype = z->kv_dtype;
    }
    pass->logits = b->dev_logits;
    pass->logits_stride = (size_t)z->vocab;
    engine__states_tap(g, pass);
    return rc ? rc : put_mass(g, pass, e);
}

static void begin(struct engine_batch *b) {
    model_batch_begin(&b->pass);
    b->n_rounds = b->n_mass = 0;
    b->mass_parts = 1;
    b->looks_at_quarters = false;
    b->has_penalties = false;
}

int engine__batch_build(struct engine *g, struct model_pass *pass, struct err *e) {
    begin(&g->batch);
    if (engine__sparse_reads_own(g)) model_batch_use_own(&g->batch.pass);
    if (engine__sparse_looks_own(g, &g->batch.looks_at_quarters))
        g->batch.mass_parts = g->sizes.list_layers * g->sizes.list_heads;
    for (int i = 0; i < g->n_turn; i++)
        fill_pages(g, g->turn[i], g->turn[i]->seq, fill_rows(g, g->turn[i]));
    return put(g, pass, e);
}

int engine__batch_build_dummy(struct engine *g, int seq, int context, int n,
                              struct model_pass *pass, struct err *e) {
    static const int32_t token[KERN_MAX_DRAFT + 1];
    struct engine_batch *b = &g->batch;
    int row;
    begin(b);
    int idx = model_batch_add(&b->pass, token, n, context, false, &row);
    for (int i = 0; i < n; i++)
        ((struct kern_sample *)b->sample.host)[model_batch_want(&b->pass, row + i)] = no_request;
    add_round(b, &(struct kern_round){.n_draft = n - 1, .first_draft = row + 1, .first_q = -1});
    fill_pages(g, NULL, seq, idx);
    return put(g, pass, e);
}

/* ---- Looking ---- */

int engine__batch_look(struct engine *g, const struct engine_request *r, const int32_t *read,
                       int n_read, int n, struct err *e) {
    struct engine_batch *b = &g->batch;
    struct model_pass pass;
    size_t cols = (size_t)g->sizes.state_cols;
    int first = r->n_kv - n, row, deep = deep_group(&g->sizes);
    ASSERT(first >= 0 && n <= KERN_STATE_QUERIES && n <= b->pass.caps.max_rows);
    begin(b);
    int idx = model_batch_add(&b->pass, r->ids + first, n, first, false, &row);
    for (int i = 0; i < g->sizes.n_groups; i++) {
        int n_pages;
        const int32_t *pages = kvpool_seq_pages(g->pool, r->seq, g->sizes.group_class[i], &n_pages);
        model_batch_pages(&b->pass, idx, i, pages, i == deep ? read : NULL,
                          i == deep ? n_read : n_pages);
    }
    b->n_mass = 1;
    memset(b->mass_line.host, 0, (size_t)n * sizeof(int32_t));
    int rc = put(g, &pass, e);
    /* No part of what answers read. */
    pass.group[deep].taps.kv_bytes_read = NULL;
    if (!rc)
        rc = model_look(g->model, &pass, deep,
                        b->states.ring + (size_t)r->slot * KERN_STATE_QUERIES * cols,
                        KERN_STATE_QUERIES, first % KERN_STATE_QUERIES, e);
    if (!rc)
        rc =
            g->kern->ops->fetch(g->kern, b->look, b->mass.dev, (size_t)n_read * sizeof *b->look, e);
    return rc ? rc : g->kern->ops->sync(g->kern, e);
}

/* ---- Deciding ---- */

struct kern_history engine__history(const struct engine *g) {
    return (struct kern_history){.prompt = g->batch.dev_prompt_count,
                                 .output = g->batch.dev_output_count,
                                 .stride = (size_t)g->sizes.vocab,
                                 .recent = g->batch.pass.token.dev};
}

static int compute(struct engine *g, const struct model_pass *pass, struct err *e) {
    struct engine_batch *b = &g->batch;
    struct kern *k = g->kern;
    struct kern_history history = engine__history(g);
    struct kern_draft_probs q = {0};
    if (g->proposer) q = proposer_probs(g->proposer);
    int rc = model_forward(g->model, pass, e);
    if (rc || b->n_rounds == 0) return rc;
    rc = k->ops->accept(k, b->n_rounds, g->vocab, b->dev_logits, (size_t)g->sizes.vocab,
                        b->sample.dev, &history, b->round.dev, b->pass.token.dev, &q, b->scratch,
                        b->n_accepted.dev, b->sampled.dev);
    if (!rc && b->has_penalties)
        rc = k->ops->tally(k, b->n_rounds, b->round.dev, b->sample.dev, b->n_accepted.dev,
                           b->sampled.dev, b->dev_output_count, (size_t)g->sizes.vocab);
    return rc ? err_raise(e, rc, "deciding %d rounds failed", b->n_rounds) : 0;
}

int engine__batch_run(struct engine *g, const struct model_pass *pass, struct err *e) {
    const struct kern_ops *ops = g->kern->ops;
    const struct engine_batch *b = &g->batch;
    uint64_t key[KERN_RECORD_KEY];
    bool replayed = false;
    if (pass->batch.rows.n_prompt > 0) return compute(g, pass, e);
    model_batch_key(&b->pass, pass,
                    (uint64_t)b->n_rounds << 3 | b->pass.own.used << 2 | (b->n_mass > 0) << 1 |
                        b->has_penalties,
                    key);
    int rc = ops->record_begin(g->kern, key, &replayed, e);
    if (rc || replayed) return rc;
    rc = compute(g, pass, e);
    return rc ? rc : ops->record_end(g->kern, e);
}

int engine__batch_fetch(struct engine *g, struct err *e) {
    const struct engine_batch *b = &g->batch;
    int n = b->n_rounds > 0 ? b->pass.n_logits : 0;
    int rc = g->kern->ops->fetch(
        g->kern, b->kv_bytes.host, b->kv_bytes.dev,
        model_array_span(&b->kv_bytes, &b->sampled, n, sizeof(struct kern_sampled)), e);
    if (rc || b->n_mass == 0) return rc;
    rc = g->kern->ops->fetch(g->kern, b->mass.host, b->mass.dev, mass_bytes(b), e);
    if (rc || !b->looks_at_quarters) return rc;
    return g->kern->ops->fetch(g->kern, b->quarter_mass.host, b->quarter_mass.dev,
                               TARGET_QUARTERS * mass_bytes(b), e);
}

void engine__batch_kv_bytes(struct engine *g, uint64_t out[ENGINE_MAX_GROUPS]) {
    const uint64_t *all = g->batch.kv_bytes.host;
    for (int i = 0; i < ENGINE_MAX_GROUPS; i++) {
        out[i] = all[i] - g->batch.kv_bytes_seen[i];
        g->batch.kv_bytes_seen[i] = all[i];
    }
}

/* ---- Penalty counts ---- */

int engine__history_begin(struct engine *g, const struct engine_request *r, struct err *e) {
    struct engine_batch *b = &g->batch;
    size_t n = (size_t)g->sizes.vocab, at = (size_t)r->slot * n, bytes = n * sizeof *b->count;
    memset(b->count, 0, bytes);
    int rc = g->kern->ops->upload(g->kern, b->dev_output_count + at, b->count, bytes, e);
    for (int i = 0; i < r->n_prompt; i++) b->count[r->ids[i]] = 1;
    return rc ? rc : g->kern->ops->upload(g->kern, b->dev_prompt_count + at, b->count, bytes, e);
}

int engine__history_rewind(struct engine *g, const struct engine_request *r, struct err *e) {
    struct engine_batch *b = &g->batch;
    size_t n = (size_t)g->sizes.vocab, bytes = n * sizeof *b->count;
    memset(b->count, 0, bytes);
    for (int i = 0; i < r->n_out; i++) {
        uint16_t *count = &b->count[r->ids[r->n_prompt + i]];
        *count += *count < UINT16_MAX;
    }
    return g->kern->ops->upload(g->kern, b->dev_output_count + (size_t)r->slot * n, b->count, bytes,
                                e);
}
