/* The target's pass of a step: its buffers, filled from the turn's sequences, and the decision of
 * their rounds. One layout function names every buffer; it runs once to count (the plan prints the
 * sums) and once to carve. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "engine/engine_private.h"

/* Bytes of each part, where `s` is not NULL, and every pointer of b. All counts are bounded: rows
 * and sequences by engine__sizes, vocab and blocks by the model's config. */
static void layout(struct engine_batch *b, struct model_carve *c, const struct engine_sizes *z,
                   size_t scratch, struct engine_sizes *s) {
    size_t seqs = (size_t)z->caps.max_seqs, logits = (size_t)z->caps.max_logits;
    size_t vocab = (size_t)z->vocab, start = c->dev_used;
    model_batch_layout(&b->pass, c, &z->caps, z->n_groups);
    if (s) s->batch_bytes = c->dev_used - start;
    start = c->dev_used;
    b->dev_logits = model_carve_dev(c, logits * vocab * sizeof(float));
    if (s) s->logits_bytes = c->dev_used - start;
    start = c->dev_used;
    model_carve_array(c, &b->sample, logits, sizeof(struct kern_sample));
    model_carve_array(c, &b->round, seqs, sizeof(struct kern_round));
    model_carve_array(c, &b->n_accepted, seqs, sizeof(int32_t));
    b->dev_sampled = model_carve_dev(c, logits * sizeof *b->dev_sampled);
    b->sampled = model_carve_host(c, logits * sizeof *b->sampled);
    b->scratch = model_carve_dev(c, scratch);
    if (s) s->sample_bytes = c->dev_used - start;
    start = c->dev_used;
    b->dev_prompt_count = model_carve_dev(c, seqs * vocab * sizeof(uint16_t));
    b->dev_output_count = model_carve_dev(c, seqs * vocab * sizeof(uint16_t));
    b->count = model_carve_host(c, vocab * sizeof(uint16_t));
    if (s) s->history_bytes = c->dev_used - start;
}

static size_t scratch_bytes(const struct engine_sizes *z, const struct kern *k) {
    return k->ops->accept_scratch_bytes(k, z->caps.max_seqs, z->vocab);
}

void engine__batch_sizes(struct engine_sizes *s, const struct kern *k) {
    struct engine_batch none = {0};
    struct model_carve c = {0};
    layout(&none, &c, s, scratch_bytes(s, k), s);
    s->batch_host_bytes = c.host_used;
}

int engine__batch_open(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    const struct engine_sizes *z = &g->sizes;
    struct model_carve c = {0};
    size_t scratch = scratch_bytes(z, g->kern);
    layout(b, &c, z, scratch, NULL);
    int rc = g->kern->ops->reserve(g->kern, c.dev_used, &b->dev_block_base, e);
    if (rc) return err_prefix(e, rc, "buffers of a step");
    b->host_block = aligned_alloc(KERN_ACT_ALIGN, c.host_used);
    if (!b->host_block) return err_raise(e, E_NOMEM, "no memory for the buffers of a step");
    c = (struct model_carve){.host = b->host_block, .dev = b->dev_block_base};
    layout(b, &c, z, scratch, NULL);
    return model_batch_init(&b->pass, g->kern, e);
}

void engine__batch_close(struct engine *g) {
    g->kern->ops->unreserve(g->kern, g->batch.dev_block_base);
    free(g->batch.host_block);
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
    s->n_logprobs = r->params.logprobs > 0 ? r->params.logprobs : 0;
    s->want_logprob = r->params.logprobs >= 0;
    if (position - r->n_prompt < r->params.min_tokens) {
        s->n_banned = g->n_eog;
        memcpy(s->banned, g->eog, (size_t)g->n_eog * sizeof *s->banned);
    }
}

/* Rows of one sequence: committed tokens from n_kv on, then the draft tokens; the last n_logits
 * want logits. Draft tokens stand behind the committed ones in `ids` for the time of the pass. */
static int fill_rows(struct engine *g, struct engine_request *r) {
    struct model_batch *b = &g->batch.pass;
    int row,
        idx = model_batch_add(b, r->ids + r->n_kv, r->n_rows, r->n_kv, !engine__decodes(r), &row);
    int first = r->n_rows - r->n_logits;
    r->first_logit = b->n_logits;
    for (int i = first; i < r->n_rows; i++)
        fill_sample(g, r, model_batch_want(b, row + i), r->n_kv + i + 1, row + first + 1,
                    i - first);
    if (r->n_logits == 0) return idx;
    r->round_idx = g->batch.n_rounds++;
    ((struct kern_round *)g->batch.round.host)[r->round_idx] =
        (struct kern_round){.n_draft = r->n_draft,
                            .first_row = r->first_logit,
                            .first_draft = row + first + 1,
                            .first_q = r->first_q};
    return idx;
}

static int fill_pages(struct engine *g, const struct engine_request *r, int idx, struct err *e) {
    int rc = 0, n_blocks;
    for (int i = 0; i < g->sizes.n_groups && !rc; i++) {
        const int32_t *pages =
            kvpool_seq_pages(g->pool, r->seq, g->sizes.group_class[i], &n_blocks);
        rc = model_batch_pages(&g->batch.pass, g->kern, idx, i, pages, n_blocks, 0, 0, e);
    }
    return rc;
}

void engine__describe_groups(const struct engine *g, struct model_pass *pass) {
    const struct engine_sizes *z = &g->sizes;
    for (int i = 0; i < z->n_groups; i++) {
        pass->group[i].first_layer = z->group_first[i];
        pass->group[i].n_layers = z->group_layers[i];
        pass->group[i].arena = g->arena;
        pass->group[i].kv_dtype = z->kv_dtype;
    }
    pass->logits = g->batch.dev_logits;
    pass->logits_stride = (size_t)z->vocab;
}

int engine__batch_build(struct engine *g, struct model_pass *pass, struct err *e) {
    struct engine_batch *b = &g->batch;
    model_batch_begin(&b->pass);
    b->n_rounds = 0;
    for (int i = 0; i < g->n_turn; i++) {
        int idx = fill_rows(g, g->turn[i]);
        int rc = fill_pages(g, g->turn[i], idx, e);
        if (rc) return rc;
    }
    int rc = model_batch_finish(&b->pass, g->kern, pass, e);
    engine__describe_groups(g, pass);
    if (!rc)
        rc = model_array_put(g->kern, &b->sample, b->pass.n_logits, sizeof(struct kern_sample), e);
    if (!rc) rc = model_array_put(g->kern, &b->round, b->n_rounds, sizeof(struct kern_round), e);
    return rc;
}

/* ---- Deciding ---- */

struct kern_history engine__history(const struct engine *g) {
    return (struct kern_history){.prompt = g->batch.dev_prompt_count,
                                 .output = g->batch.dev_output_count,
                                 .stride = (size_t)g->sizes.vocab,
                                 .recent = g->batch.pass.token.dev};
}

int engine__batch_decide(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    struct kern *k = g->kern;
    if (b->n_rounds == 0) return 0;
    struct kern_history history = engine__history(g);
    struct kern_draft_probs q = {0};
    if (g->proposer) q = proposer_probs(g->proposer);
    int rc = k->ops->accept(k, b->n_rounds, g->vocab, b->dev_logits, (size_t)g->sizes.vocab,
                            b->sample.dev, &history, b->round.dev, b->pass.token.dev, &q,
                            b->scratch, b->n_accepted.dev, b->dev_sampled);
    return rc ? err_raise(e, rc, "deciding %d rounds failed", b->n_rounds) : 0;
}

/* What was decided, to the host. */
int engine__batch_fetch(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    const struct kern_ops *ops = g->kern->ops;
    uint64_t kv_bytes = 0;
    int rc = ops->download(g->kern, &kv_bytes, b->pass.dev_kv_bytes, sizeof kv_bytes, e);
    g->live.kv_bytes_read += kv_bytes;
    if (!rc && b->n_rounds > 0)
        rc = ops->download(g->kern, b->sampled, b->dev_sampled,
                           (size_t)b->pass.n_logits * sizeof *b->sampled, e);
    if (!rc && b->n_rounds > 0)
        rc = ops->download(g->kern, b->n_accepted.host, b->n_accepted.dev,
                           (size_t)b->n_rounds * sizeof(int32_t), e);
    return rc;
}

/* ---- Penalty counts ---- */

static void add_count(uint16_t *count) {
    if (*count < UINT16_MAX) ++*count;
}

int engine__history_begin(struct engine *g, const struct engine_request *r, struct err *e) {
    struct engine_batch *b = &g->batch;
    size_t n = (size_t)g->sizes.vocab, at = (size_t)r->slot * n, bytes = n * sizeof *b->count;
    memset(b->count, 0, bytes);
    int rc = g->kern->ops->upload(g->kern, b->dev_output_count + at, b->count, bytes, e);
    for (int i = 0; i < r->n_prompt; i++) b->count[r->ids[i]] = 1;
    return rc ? rc : g->kern->ops->upload(g->kern, b->dev_prompt_count + at, b->count, bytes, e);
}

int engine__history_add(struct engine *g, const struct engine_request *r, int32_t token,
                        struct err *e) {
    uint16_t count = 0;
    for (int i = 0; i < r->n_out; i++)
        if (r->ids[r->n_prompt + i] == token) add_count(&count);
    uint16_t *dst = g->batch.dev_output_count + (size_t)r->slot * (size_t)g->sizes.vocab + token;
    return g->kern->ops->upload(g->kern, dst, &count, sizeof count, e);
}
