/* One pass over the rows of many sequences. The residual stream x and the last product's output
 * travel apart: each norm adds what the product before it left in `delta`, so the addition costs no
 * pass of its own. */
#include "model/model_private.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/err.h"

#define TRY(call)                                                                                  \
    do {                                                                                           \
        int try_rc = (call);                                                                       \
        if (try_rc != 0) return failed(k, try_rc, #call, e);                                       \
    } while (0)

/* An operation says only that it failed; why, the backend tells when it is asked to wait. */
static int failed(struct kern *k, int rc, const char *call, struct err *e) {
    struct err why = {0};
    k->ops->sync(k, &why);
    return err_raise(e, rc, "forward: %.*s failed%s%s", (int)strcspn(call, "("), call,
                     why.code ? ": " : "", why.code ? why.message : "");
}

/* The workspace's packed activations, for products with `w`. */
static struct kern_act act_for(const struct model *m, const struct kern_weight *w) {
    struct kern_act act = m->ws.act;
    act.partner = w->dtype;
    return act;
}

/* out[r][:] = the parts' products side by side. */
static int linear(struct kern *k, struct kern_rows rows, const struct model_linear *l,
                  struct kern_act act, float *out) {
    for (int i = 0; i < l->n_parts; i++) {
        int rc = k->ops->matmul(k, rows, &l->part[i], act, out, l->rows, l->offset[i]);
        if (rc) return rc;
    }
    return 0;
}

/* What the rows of the group's i-th layer read. */
static struct kern_lists lists_of(const struct model_group *g, int i) {
    struct kern_lists l = g->lists;
    size_t first = (size_t)i * g->layer_lists;
    l.page += first * (size_t)l.capacity;
    l.block += first * (size_t)l.capacity;
    l.n_blocks += first;
    if (l.quarters) l.quarters += first * (size_t)l.capacity;
    l.repeated = i > 0 && g->layer_lists == 0;
    return l;
}

/* Where a layer's K and V lie in its group's pages. */
static struct kern_kv kv_of(const struct model_config *c, const struct model_group *g, int layer) {
    return (struct kern_kv){
        .base = g->arena,
        .page_stride = 1024,
        .k_offset = model_kv_offset(c, layer - g->first_layer, false, g->kv_dtype),
        .v_offset = model_kv_offset(c, layer - g->first_layer, true, g->kv_dtype),
        .head_stride = model_kv_head_bytes(c, g->kv_dtype),
        .dtype = g->kv_dtype,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
    };
}

static struct kern_rope rope_of(const struct model *m, int layer) {
    const struct model_config *c = &m->config;
    const struct model_layer *l = &m->layers[layer];
    return (struct kern_rope){
        .inv_freq = c->rope_skip[layer] ? NULL : m->inv_freq,
        .dim = c->rope_dim,
        .interleaved = c->rope_interleaved,
        .scale = (float)c->rope_attention_factor,
        .q_norm = l->q_norm,
        .k_norm = l->k_norm,
        .norm_eps = c->norm_eps,
        .q_bias = l->q_bias,
        .k_bias = l->k_bias,
        .v_bias = l->v_bias,
    };
}

static int attention_block(struct model *m, const struct model_pass *p, const struct model_group *g,
                           int layer, struct err *e) {
    const struct model_config *c = &m->config;
    const struct model_layer *l = &m->layers[layer];
    struct model_workspace *w = &m->ws;
    struct kern *k = m->k;
    struct kern_batch batch = p->batch;
    const struct kern_kv kv = kv_of(c, g, layer);
    const struct kern_rope rope = rope_of(m, layer);
    batch.slot_page = g->slot_page;
    TRY(linear(k, batch.rows, &l->qkv, act_for(m, l->qkv.part), w->qkv));
    TRY(k->ops->rope_kv(k, &batch, &rope, c->n_heads, w->qkv, &kv));
    float scale = 1.0f / sqrtf((float)c->head_dim);
    int i = layer - g->first_layer;
    struct kern_lists lists = lists_of(g, i);
    struct kern_attn_taps taps = g->taps;
    if (taps.mass) taps.mass += (size_t)i * g->mass_stride;
    if (taps.quarter_mass) taps.quarter_mass += 4 * (size_t)i * g->mass_stride;
    if (taps.head_mass) taps.head_mass += (size_t)i * g->head_mass_stride;
    taps.act = act_for(m, l->o.part);
    TRY(k->ops->attention(k, &batch, &lists, c->n_heads, scale, w->qkv, &kv, &taps, w->attn_scratch,
                          w->heads));
    TRY(linear(k, batch.rows, &l->o, taps.act, w->delta));
    return 0;
}

static int ffn_block(struct model *m, const struct model_pass *p, int layer, struct err *e) {
    const struct model_config *c = &m->config;
    const struct model_layer *l = &m->layers[layer];
    struct model_workspace *w = &m->ws;
    struct kern *k = m->k;
    struct kern_rows rows = p->batch.rows;
    struct kern_act act = act_for(m, l->gate_up.part);
    TRY(k->ops->norm_pack(k, rows, c->hidden, w->x, w->delta, l->ffn_norm, c->norm_eps, act, NULL));
    TRY(linear(k, rows, &l->gate_up, act, w->gate_up));
    act = act_for(m, l->down.part);
    TRY(k->ops->gate_pack(k, rows, c->ffn, w->gate_up, act));
    TRY(linear(k, rows, &l->down, act, w->delta));
    return 0;
}

/* Logits of the rows that want them. They are products of the generated class whatever the row was,
 * so that a prompt's last row and a decode row of equal state have equal logits. */
static int head_block(struct model *m, const struct model_pass *p, struct err *e) {
    const struct model_config *c = &m->config;
    struct model_workspace *w = &m->ws;
    struct kern *k = m->k;
    struct kern_rows rows = {.n_gen = p->n_logits};
    TRY(k->ops->gather(k, w->x, c->hidden, p->logit_row, p->n_logits, w->last));
    TRY(k->ops->gather(k, w->delta, c->hidden, p->logit_row, p->n_logits, w->last_delta));
    struct kern_act act = act_for(m, &m->head);
    TRY(k->ops->norm_pack(k, rows, c->hidden, w->last, w->last_delta, m->out_norm, c->norm_eps, act,
                          p->tap_final));
    TRY(k->ops->matmul(k, rows, &m->head, act, p->logits, (int)p->logits_stride, 0));
    return 0;
}

static void check_pass(const struct model *m, const struct model_pass *p) {
    int n_rows = p->batch.rows.n_gen + p->batch.rows.n_prompt, layer = 0;
    ASSERT(n_rows > 0 && n_rows <= m->caps.max_rows);
    ASSERT(p->batch.n_seqs <= m->caps.max_seqs && p->n_logits <= m->caps.max_logits);
    ASSERT(p->n_groups > 0 && p->n_groups <= MODEL_MAX_GROUPS);
    ASSERT(p->n_taps >= 0 && p->n_taps <= MODEL_MAX_TAPS);
    for (int i = 0; i < p->n_groups; i++) {
        ASSERT(p->group[i].first_layer == layer);
        ASSERT(p->group[i].lists.capacity <= m->caps.max_blocks);
        layer += p->group[i].n_layers;
    }
    ASSERT(layer == m->config.n_layers);
    ASSERT(p->n_logits == 0 || p->logits_stride >= (size_t)m->config.n_head);
}

int model_forward(struct model *m, const struct model_pass *p, struct err *e) {
    check_pass(m, p);
    const struct model_config *c = &m->config;
    struct model_workspace *w = &m->ws;
    struct kern *k = m->k;
    struct kern_rows rows = p->batch.rows;
    int n_rows = rows.n_gen + rows.n_prompt;
    TRY(k->ops->embed(k, &m->embedding, p->batch.token, n_rows, w->x));
    for (int i = 0; i < p->n_groups; i++) {
        const struct model_group *g = &p->group[i];
        for (int layer = g->first_layer; layer < g->first_layer + g->n_layers; layer++) {
            TRY(k->ops->norm_pack(k, rows, c->hidden, w->x, layer ? w->delta : NULL,
                                  m->layers[layer].attn_norm, c->norm_eps,
                                  act_for(m, m->layers[layer].qkv.part), NULL));
            for (int t = 0; t < p->n_taps; t++)
                if (p->tap[t].layer == layer)
                    TRY(k->ops->copy_page(k, p->tap[t].state, w->x,
                                          (size_t)n_rows * (size_t)c->hidden * sizeof(float)));
            int rc = attention_block(m, p, g, layer, e);
            if (!rc) rc = ffn_block(m, p, layer, e);
            if (rc) return rc;
        }
    }
    return p->n_logits ? head_block(m, p, e) : 0;
}

/* K and V of the rows are there already and may be another class's bits: they are made once more,
 * as rotation makes them with the queries, into a page that nobody reads. Its id is 0, as is the
 * number of the one sequence in every entry of row_seq. */
int model_look(struct model *m, const struct model_pass *p, int group, const float *ring, int n,
               int first, struct err *e) {
    const struct model_config *c = &m->config;
    const struct model_group *g = &p->group[group];
    const struct model_layer *l = &m->layers[g->first_layer];
    const struct kern_kv kv = kv_of(c, g, g->first_layer);
    const struct kern_rope rope = rope_of(m, g->first_layer);
    struct model_workspace *w = &m->ws;
    struct kern *k = m->k;
    struct kern_batch batch = p->batch, aside = batch;
    struct kern_kv nowhere = kv;
    size_t row = (size_t)c->hidden * sizeof(float);
    int n_rows = batch.rows.n_gen, n_end = n - first < n_rows ? n - first : n_rows;
    ASSERT(batch.rows.n_prompt == 0 && batch.n_seqs == 1);
    ASSERT(n_rows > 0 && n_rows <= n && n_rows <= KERN_BLOCK && n_rows <= m->caps.max_rows);
    ASSERT(first >= 0 && first < n && g->n_layers > 0);
    nowhere.base = w->gate_up;
    nowhere.k_offset = 0;
    nowhere.v_offset = (size_t)c->n_kv_heads * kv.head_stride;
    batch.slot_page = g->slot_page;
    aside.slot_page = batch.row_seq;
    TRY(k->ops->copy_page(k, w->x, ring + (size_t)first * (size_t)c->hidden, (size_t)n_end * row));
    if (n_end < n_rows)
        TRY(k->ops->copy_page(k, w->x + (size_t)n_end * (size_t)c->hidden, ring,
                              (size_t)(n_rows - n_end) * row));
    TRY(k->ops->norm_pack(k, batch.rows, c->hidden, w->x, NULL, l->attn_norm, c->norm_eps,
                          act_for(m, l->qkv.part), NULL));
    TRY(linear(k, batch.rows, &l->qkv, act_for(m, l->qkv.part), w->qkv));
    TRY(k->ops->rope_kv(k, &aside, &rope, c->n_heads, w->qkv, &nowhere));
    TRY(k->ops->attention(k, &batch, &g->lists, c->n_heads, 1.0f / sqrtf((float)c->head_dim),
                          w->qkv, &kv, &g->taps, w->attn_scratch, w->heads));
    return 0;
}
