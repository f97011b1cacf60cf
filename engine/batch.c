/* The arrays of a pass. One layout function names every buffer; it runs once to count (the plan
 * prints the sums) and once to carve. The host fills its copies and uploads what is used; page
 * tables go straight from the pool to the backend. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "engine/engine_private.h"

/* Two cursors, host and backend; base NULL only counts. */
struct carve {
    uint8_t *host, *dev;
    size_t host_used, dev_used;
};

static void *take(uint8_t *base, size_t *used, size_t bytes) {
    void *p = base ? base + *used : NULL;
    *used += align_up(bytes, KERN_ACT_ALIGN);
    return p;
}

static void *take_dev(struct carve *c, size_t bytes) {
    return take(c->dev, &c->dev_used, bytes);
}
static void *take_host(struct carve *c, size_t bytes) {
    return take(c->host, &c->host_used, bytes);
}

static void take_array(struct carve *c, struct engine_array *a, size_t n, size_t size) {
    a->bytes = n * size;
    a->host = take_host(c, a->bytes);
    a->dev = take_dev(c, a->bytes);
}

/* Bytes of each part, where `s` is not NULL, and every pointer of b. All counts are bounded: rows
 * and sequences by engine__sizes, vocab and blocks by the model's config. */
static void layout(struct engine_batch *b, struct carve *c, const struct engine_sizes *z,
                   size_t scratch, struct engine_sizes *s) {
    size_t rows = (size_t)z->caps.max_rows, seqs = (size_t)z->caps.max_seqs, i32 = sizeof(int32_t);
    size_t logits = (size_t)z->caps.max_logits, blocks = (size_t)z->caps.max_blocks;
    size_t vocab = (size_t)z->vocab, start = c->dev_used;
    take_array(c, &b->token, rows, i32);
    take_array(c, &b->position, rows, i32);
    take_array(c, &b->row_seq, rows, i32);
    take_array(c, &b->seq_row, seqs, i32);
    take_array(c, &b->seq_n_rows, seqs, i32);
    take_array(c, &b->logit_row, logits, i32);
    for (int i = 0; i < z->n_groups; i++) {
        take_array(c, &b->slot_page[i], rows, i32);
        take_array(c, &b->n_blocks[i], seqs, i32);
        b->dev_list[i] = take_dev(c, seqs * blocks * i32);
    }
    b->dev_block = take_dev(c, seqs * blocks * i32);
    b->dev_kv_bytes = take_dev(c, sizeof *b->dev_kv_bytes);
    if (s) s->batch_bytes = c->dev_used - start;
    start = c->dev_used;
    b->dev_logits = take_dev(c, logits * vocab * sizeof(float));
    if (s) s->logits_bytes = c->dev_used - start;
    start = c->dev_used;
    take_array(c, &b->sample, logits, sizeof(struct kern_sample));
    b->dev_sampled = take_dev(c, logits * sizeof *b->dev_sampled);
    b->sampled = take_host(c, logits * sizeof *b->sampled);
    b->sample_scratch = take_dev(c, scratch);
    if (s) s->sample_bytes = c->dev_used - start;
    start = c->dev_used;
    b->dev_prompt_count = take_dev(c, seqs * vocab * sizeof(uint16_t));
    b->dev_output_count = take_dev(c, seqs * vocab * sizeof(uint16_t));
    b->count = take_host(c, vocab * sizeof(uint16_t));
    if (s) s->history_bytes = c->dev_used - start;
}

static size_t scratch_bytes(const struct engine_sizes *z, const struct kern *k) {
    return k->ops->sample_scratch_bytes(k, z->caps.max_logits, z->vocab);
}

void engine__batch_sizes(struct engine_sizes *s, const struct kern *k) {
    struct engine_batch none = {0};
    struct carve c = {0};
    layout(&none, &c, s, scratch_bytes(s, k), s);
    s->batch_host_bytes = c.host_used;
}

int engine__batch_open(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    const struct engine_sizes *z = &g->sizes;
    struct carve c = {0};
    size_t scratch = scratch_bytes(z, g->kern);
    layout(b, &c, z, scratch, NULL);
    int rc = g->kern->ops->reserve(g->kern, c.dev_used, &b->dev_block_base, e);
    if (rc) return err_prefix(e, rc, "buffers of a step");
    b->host_block = aligned_alloc(KERN_ACT_ALIGN, c.host_used);
    size_t n = (size_t)z->caps.max_blocks;
    int32_t *index = malloc(n * sizeof *index);
    if (!b->host_block || !index) rc = err_raise(e, E_NOMEM, "no memory for the buffers of a step");
    if (!rc) {
        c = (struct carve){.host = b->host_block, .dev = b->dev_block_base};
        layout(b, &c, z, scratch, NULL);
        for (size_t i = 0; i < n; i++) index[i] = (int32_t)i;
    }
    for (size_t i = 0; i < (size_t)z->caps.max_seqs && !rc; i++)
        rc = g->kern->ops->upload(g->kern, b->dev_block + i * n, index, n * sizeof *index, e);
    free(index);
    return rc;
}

void engine__batch_close(struct engine *g) {
    g->kern->ops->unreserve(g->kern, g->batch.dev_block_base);
    free(g->batch.host_block);
}

/* ---- Filling ---- */

static void fill_sample(struct engine *g, const struct engine_request *r, int position) {
    const struct verify_params *p = &r->params;
    struct kern_sample *s = &((struct kern_sample *)g->batch.sample.host)[g->batch.n_logits];
    *s = (struct kern_sample){
        .temperature = (float)p->temperature,
        .top_k = p->top_k < g->vocab ? p->top_k : 0,
        .top_p = (float)p->top_p,
        .min_p = (float)p->min_p,
        .repetition_penalty = (float)p->repetition_penalty,
        .presence_penalty = (float)p->presence_penalty,
        .frequency_penalty = (float)p->frequency_penalty,
        .seed = r->seed,
        .position = position,
        .history = r->has_penalties ? r->slot : -1,
        .n_logprobs = p->logprobs > 0 ? p->logprobs : 0,
        .want_logprob = p->logprobs >= 0,
    };
    if (position - r->n_prompt < p->min_tokens) {
        s->n_banned = g->n_eog;
        memcpy(s->banned, g->eog, (size_t)g->n_eog * sizeof *s->banned);
    }
}

/* Rows of one sequence: positions n_kv .. n_kv + n_rows - 1, the last n_logits of them with logits.
 */
static void fill_rows(struct engine *g, struct engine_request *r, int row, int seq_idx) {
    struct engine_batch *b = &g->batch;
    int32_t *token = b->token.host, *position = b->position.host, *row_seq = b->row_seq.host;
    ((int32_t *)b->seq_row.host)[seq_idx] = row;
    ((int32_t *)b->seq_n_rows.host)[seq_idx] = r->n_rows;
    memcpy(token + row, r->ids + r->n_kv, (size_t)r->n_rows * sizeof *token);
    for (int i = 0; i < r->n_rows; i++) {
        position[row + i] = r->n_kv + i;
        row_seq[row + i] = seq_idx;
    }
    r->first_logit = b->n_logits;
    for (int i = r->n_rows - r->n_logits; i < r->n_rows; i++) {
        ((int32_t *)b->logit_row.host)[b->n_logits] = row + i;
        fill_sample(g, r, r->n_kv + i + 1);
        b->n_logits++;
    }
}

/* Pages that take the rows' K and V, and the list that they read. */
static int fill_pages(struct engine *g, const struct engine_request *r, int row, int seq_idx,
                      int group, struct err *e) {
    struct engine_batch *b = &g->batch;
    int n_blocks, capacity = g->sizes.caps.max_blocks;
    const int32_t *pages =
        kvpool_seq_pages(g->pool, r->seq, g->sizes.group_class[group], &n_blocks);
    int32_t *slot = (int32_t *)b->slot_page[group].host + row;
    ASSERT(n_blocks <= capacity && (r->n_kv + r->n_rows - 1) / KVPOOL_BLOCK < n_blocks);
    for (int i = 0; i < r->n_rows; i++) slot[i] = pages[(r->n_kv + i) / KVPOOL_BLOCK];
    ((int32_t *)b->n_blocks[group].host)[seq_idx] = n_blocks;
    return g->kern->ops->upload(g->kern, b->dev_list[group] + (size_t)seq_idx * (size_t)capacity,
                                pages, (size_t)n_blocks * sizeof *pages, e);
}

static int put(struct engine *g, const struct engine_array *a, int n, size_t size, struct err *e) {
    size_t bytes = (size_t)n * size;
    ASSERT(bytes <= a->bytes);
    return bytes ? g->kern->ops->upload(g->kern, a->dev, a->host, bytes, e) : 0;
}

static int upload_all(struct engine *g, struct err *e) {
    struct engine_batch *b = &g->batch;
    int rows = b->n_gen + b->n_prompt, rc = 0;
    size_t i32 = sizeof(int32_t);
    uint64_t zero = 0;
    const struct {
        const struct engine_array *array;
        int n;
    } list[] = {{&b->token, rows},           {&b->position, rows},
                {&b->row_seq, rows},         {&b->seq_row, b->n_seqs},
                {&b->seq_n_rows, b->n_seqs}, {&b->logit_row, b->n_logits}};
    for (size_t i = 0; i < sizeof list / sizeof *list && !rc; i++)
        rc = put(g, list[i].array, list[i].n, i32, e);
    for (int i = 0; i < g->sizes.n_groups && !rc; i++) {
        rc = put(g, &b->slot_page[i], rows, i32, e);
        if (!rc) rc = put(g, &b->n_blocks[i], b->n_seqs, i32, e);
    }
    if (!rc) rc = put(g, &b->sample, b->n_logits, sizeof(struct kern_sample), e);
    if (!rc) rc = g->kern->ops->upload(g->kern, b->dev_kv_bytes, &zero, sizeof zero, e);
    return rc;
}

static void describe(const struct engine *g, struct model_pass *pass) {
    const struct engine_batch *b = &g->batch;
    const struct engine_sizes *z = &g->sizes;
    *pass = (struct model_pass){
        .batch = {.rows = {.n_gen = b->n_gen, .n_prompt = b->n_prompt},
                  .token = b->token.dev,
                  .position = b->position.dev,
                  .row_seq = b->row_seq.dev,
                  .n_seqs = b->n_seqs,
                  .seq_row = b->seq_row.dev,
                  .seq_n_rows = b->seq_n_rows.dev},
        .n_groups = z->n_groups,
        .n_logits = b->n_logits,
        .logit_row = b->logit_row.dev,
        .logits = b->dev_logits,
        .logits_stride = (size_t)z->vocab,
    };
    for (int i = 0; i < z->n_groups; i++)
        pass->group[i] = (struct model_group){
            .first_layer = z->group_first[i],
            .n_layers = z->group_layers[i],
            .arena = g->arena,
            .kv_dtype = z->kv_dtype,
            .slot_page = b->slot_page[i].dev,
            .lists = {.page = b->dev_list[i],
                      .block = b->dev_block,
                      .n_blocks = b->n_blocks[i].dev,
                      .capacity = z->caps.max_blocks,
                      .seq_stride = 1,
                      .head_stride = 0},
            .taps = {.kv_bytes_read = b->dev_kv_bytes},
        };
}

int engine__batch_build(struct engine *g, struct model_pass *pass, struct err *e) {
    struct engine_batch *b = &g->batch;
    b->n_gen = b->n_prompt = b->n_seqs = b->n_logits = 0;
    for (int i = 0; i < g->n_turn; i++) {
        struct engine_request *r = g->turn[i];
        int row = b->n_gen + b->n_prompt;
        ASSERT(row + r->n_rows <= g->sizes.caps.max_rows);
        ASSERT(b->n_logits + r->n_logits <= g->sizes.caps.max_logits);
        fill_rows(g, r, row, b->n_seqs);
        for (int group = 0; group < g->sizes.n_groups; group++) {
            int rc = fill_pages(g, r, row, b->n_seqs, group, e);
            if (rc) return rc;
        }
        b->n_seqs++;
        if (engine__decodes(r)) {
            ASSERT(b->n_prompt == 0); /* generated rows come first */
            b->n_gen += r->n_rows;
        } else {
            b->n_prompt += r->n_rows;
        }
    }
    describe(g, pass);
    return upload_all(g, e);
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
