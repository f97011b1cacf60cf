/* Opening a model: one sizes pass over the tensors, one reservation, one packing pass. The same
 * layout function runs twice, so that what the plan counts is what is taken. */
#include "model/model_private.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/threads.h"
#include "model/source.h"

/* A cursor over the reservation; base NULL only counts. */
struct carve {
    uint8_t *base;
    size_t used;
    bool overflow;
};

static void *carve_take(struct carve *c, size_t bytes) {
    size_t at;
    if (!checked_align(c->used, KERN_ACT_ALIGN, &at) || !checked_add(at, bytes, &c->used)) {
        c->overflow = true;
        return NULL;
    }
    return c->base ? c->base + at : NULL;
}

struct layout {
    struct model *m; /* filled where carve.base is set */
    const struct model_source *src;
    const struct model_borrow *borrow; /* or NULL */
    struct carve carve;
    size_t done, total;    /* bytes of file tensors, for progress */
    struct threads *dummy; /* who makes weights up; NULL: they are the file's */
    uint8_t *room;         /* for tensors on their way, grown as needed */
    size_t room_bytes;
    void (*progress)(void *arg, size_t done, size_t total);
    void *progress_arg;
    struct err *e;
};

static bool find(const struct layout *l, enum tensor_role role, int layer,
                 struct tensor_view *out) {
    return model_source_find(l->src, role, layer, out, NULL) == 0;
}

static void report(struct layout *l, size_t bytes) {
    l->done += bytes;
    if (l->carve.base && l->progress) l->progress(l->progress_arg, l->done, l->total);
}

static int need_room(struct layout *l, const char *name, size_t bytes) {
    if (bytes <= l->room_bytes) return 0;
    free(l->room);
    l->room_bytes = 0;
    l->room = malloc(bytes);
    if (!l->room) return err_raise(l->e, E_NOMEM, "%s: no memory for %zu bytes", name, bytes);
    l->room_bytes = bytes;
    return 0;
}

/* A tensor's bytes: the file's own, or made up in the room, which the next call overwrites. NULL
 * while counting. */
static int tensor_bytes(struct layout *l, const struct tensor_view *v, const void **out) {
    *out = l->dummy ? NULL : v->data;
    if (!l->carve.base || !l->dummy) return 0;
    int rc = need_room(l, v->name, v->bytes);
    if (rc) return rc;
    model__dummy_fill(v, l->room, l->dummy);
    *out = l->room;
    return 0;
}

/* A vector as f32 in backend memory; *out stays NULL where the model has none. */
static int take_vector(struct layout *l, enum tensor_role role, int layer, const float **out) {
    struct tensor_view v;
    if (!find(l, role, layer, &v)) return 0;
    size_t n = (size_t)v.rows * (size_t)v.cols;
    float *dst = carve_take(&l->carve, n * sizeof(float));
    if (dst) {
        const void *data;
        int rc = tensor_bytes(l, &v, &data);
        float *host = rc ? NULL : malloc(n * sizeof(float));
        if (rc) return rc;
        if (!host) return err_raise(l->e, E_NOMEM, "%s: no memory for %zu values", v.name, n);
        kern_dequantize(v.dtype, data, host, n);
        rc = l->m->k->ops->upload(l->m->k, dst, host, n * sizeof(float), l->e);
        free(host);
        if (rc) return rc;
        *out = dst;
    }
    report(l, v.bytes);
    return 0;
}

static int take_weight(struct layout *l, const char *name, enum kern_dtype t, int rows, int cols,
                       const void *src, struct kern_weight *out) {
    struct kern *k = l->m->k;
    size_t bytes = k->ops->weight_bytes(k, t, rows, cols);
    if (bytes == 0)
        return err_raise(l->e, E_UNSUPPORTED, "tensor %s: no %s product for %s with %d columns",
                         name, k->ops->backend, kern_dtype_name(t), cols);
    void *dst = carve_take(&l->carve, bytes);
    if (!dst) return 0;
    return k->ops->weight_pack(k, out, dst, t, rows, cols, src, l->e);
}

/* The tensor as it stands. */
static int take_tensor(struct layout *l, const struct tensor_view *v, struct kern_weight *out) {
    const void *data;
    int rc = tensor_bytes(l, v, &data);
    if (!rc) rc = take_weight(l, v->name, v->dtype, v->rows, v->cols, data, out);
    report(l, v->bytes);
    return rc;
}

/* n tensors of one type and width as one, their rows one behind the other. */
static int take_joined(struct layout *l, int n, const struct tensor_view *v,
                       struct kern_weight *out) {
    size_t bytes = 0;
    int rows = 0, rc = 0;
    for (int i = 0; i < n; i++) bytes += v[i].bytes, rows += v[i].rows;
    if (l->carve.base) rc = need_room(l, v[0].name, bytes);
    if (rc) return rc;
    for (size_t i = 0, at = 0; l->carve.base && i < (size_t)n; at += v[i].bytes, i++)
        if (l->dummy) model__dummy_fill(&v[i], l->room + at, l->dummy);
        else memcpy(l->room + at, v[i].data, v[i].bytes);
    rc = take_weight(l, v[0].name, v[0].dtype, rows, v[0].cols, l->room, out);
    report(l, bytes);
    return rc;
}

/* Matrices that share an input, packed as one where their types agree. */
static int take_linear(struct layout *l, int layer, int n, const enum tensor_role *roles,
                       struct model_linear *out) {
    struct tensor_view v[MODEL_MAX_PARTS];
    int rows = 0;
    bool same = true;
    for (int i = 0; i < n; i++) {
        bool found = find(l, roles[i], layer, &v[i]);
        ASSERT(found); /* model_source_open checked it */
        same = same && v[i].dtype == v[0].dtype;
        rows += v[i].rows;
    }
    struct model_linear lin = {.rows = rows};
    int rc = 0;
    if (!same || n == 1) {
        for (int i = 0, at = 0; i < n && !rc; at += v[i].rows, i++) {
            lin.offset[i] = at;
            rc = take_tensor(l, &v[i], &lin.part[i]);
        }
        lin.n_parts = n;
    } else {
        rc = take_joined(l, n, v, &lin.part[0]);
        lin.n_parts = 1;
    }
    if (l->carve.base) *out = lin;
    return rc;
}

static int take_layer(struct layout *l, int i) {
    static const enum tensor_role qkv[] = {TENSOR_ATTN_Q, TENSOR_ATTN_K, TENSOR_ATTN_V};
    static const enum tensor_role o[] = {TENSOR_ATTN_O};
    static const enum tensor_role gate_up[] = {TENSOR_FFN_GATE, TENSOR_FFN_UP};
    static const enum tensor_role down[] = {TENSOR_FFN_DOWN};
    struct model_layer none = {0}, *y = l->carve.base ? &l->m->layers[i] : &none;
    int rc = take_vector(l, TENSOR_ATTN_NORM, i, &y->attn_norm);
    if (!rc) rc = take_linear(l, i, 3, qkv, &y->qkv);
    if (!rc) rc = take_vector(l, TENSOR_Q_BIAS, i, &y->q_bias);
    if (!rc) rc = take_vector(l, TENSOR_K_BIAS, i, &y->k_bias);
    if (!rc) rc = take_vector(l, TENSOR_V_BIAS, i, &y->v_bias);
    if (!rc) rc = take_vector(l, TENSOR_Q_NORM, i, &y->q_norm);
    if (!rc) rc = take_vector(l, TENSOR_K_NORM, i, &y->k_norm);
    if (!rc) rc = take_linear(l, i, 1, o, &y->o);
    if (!rc) rc = take_vector(l, TENSOR_FFN_NORM, i, &y->ffn_norm);
    if (!rc) rc = take_linear(l, i, 2, gate_up, &y->gate_up);
    if (!rc) rc = take_linear(l, i, 1, down, &y->down);
    return rc;
}

static int take_rope(struct layout *l) {
    const struct model_config *c = &l->m->config;
    struct tensor_view v;
    size_t n = (size_t)c->rope_dim / 2;
    float *dst = carve_take(&l->carve, n * sizeof(float));
    if (!dst) return 0;
    float factors[MODEL_MAX_HEAD_DIM / 2], freq[MODEL_MAX_HEAD_DIM / 2];
    bool have = !l->dummy && find(l, TENSOR_ROPE_FREQS, 0, &v);
    if (have) kern_dequantize(v.dtype, v.data, factors, n);
    model_rope_frequencies(c, have ? factors : NULL, freq);
    l->m->inv_freq = dst;
    return l->m->k->ops->upload(l->m->k, dst, freq, n * sizeof(float), l->e);
}

static int take_embedding(struct layout *l) {
    struct tensor_view v;
    if (l->m->config.borrows_embedding) {
        if (l->carve.base) l->m->embedding = l->borrow->target->embedding;
        return 0;
    }
    bool found = find(l, TENSOR_TOKEN_EMBD, 0, &v);
    ASSERT(found); /* model_source_open checked it */
    return take_tensor(l, &v, &l->m->embedding);
}

/* A head of the rows `ids` of v, a tensor that stands whole in this file or in the target's. */
static int take_head_rows(struct layout *l, const struct tensor_view *v) {
    struct model *m = l->m;
    void *rows = NULL;
    const void *data = NULL;
    int n = m->config.n_head, rc = 0;
    if (l->dummy) { /* any rows will do */
        struct tensor_view some = *v;
        some.rows = n;
        some.bytes = (size_t)n * kern_dtype_bytes(v->dtype, (size_t)v->cols);
        rc = tensor_bytes(l, &some, &data);
    } else if (l->carve.base) {
        rc = model__gather_rows(v, model_source_head_ids(l->src), n, &rows, l->e);
        data = rows;
    }
    if (!rc) rc = take_weight(l, v->name, v->dtype, n, v->cols, data, &m->head);
    free(rows);
    return rc;
}

static int take_head_ids(struct layout *l) {
    struct model *m = l->m;
    size_t bytes = (size_t)m->config.n_head * sizeof(int32_t);
    int32_t *dst = carve_take(&l->carve, bytes);
    if (!dst) return 0;
    m->head_ids = dst;
    return m->k->ops->upload(m->k, dst, model_source_head_ids(l->src), bytes, l->e);
}

static int take_head(struct layout *l) {
    struct model *m = l->m;
    const struct model_config *c = &m->config;
    bool whole = c->n_head == c->vocab, own = !c->tied && !c->borrows_head;
    struct tensor_view v;
    int rc = model__find_head(l->src, l->borrow, &v, l->e);
    if (rc) return rc;
    if (own) {
        rc = take_tensor(l, &v, &m->head);
    } else if (!whole) rc = take_head_rows(l, &v);
    else if (c->tied) m->head = m->embedding;
    else if (l->carve.base) m->head = l->borrow->target->head;
    if (!rc && !whole) rc = take_head_ids(l);
    return rc;
}

/* One behind the other, as a pass takes them; behind the head, the next pass. */
static void chain_weights(struct model *m) {
    struct kern_weight *last = &m->head;
    for (int i = 0; i < m->config.n_layers; i++) {
        struct model_layer *layer = &m->layers[i];
        struct model_linear *of[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
        for (size_t k = 0; k < sizeof of / sizeof *of; k++)
            for (int part = 0; part < of[k]->n_parts; part++) {
                last->next = &of[k]->part[part];
                last = &of[k]->part[part];
            }
    }
    last->next = &m->head;
}

static int take_weights(struct layout *l) {
    struct model *m = l->m;
    int rc = take_embedding(l);
    if (!rc) rc = take_head(l);
    if (!rc) rc = take_vector(l, TENSOR_OUTPUT_NORM, 0, &m->out_norm);
    if (!rc) rc = take_rope(l);
    for (int i = 0; i < m->config.n_layers && !rc; i++) rc = take_layer(l, i);
    if (!rc && l->carve.overflow)
        rc = err_raise(l->e, E_TOO_LONG, "weights: the sum of sizes overflows");
    return rc;
}

/* Packed activations of a pass of `rows` rows in any mixture of the classes: each class is asked
 * alone, since both in full would be more rows than a pass may have. */
static size_t most_act_bytes(const struct kern *k, int rows, int cols) {
    return k->ops->act_bytes(k, (struct kern_rows){.n_gen = rows}, cols) +
           k->ops->act_bytes(k, (struct kern_rows){.n_prompt = rows}, cols);
}

/* Workspace; rows of either class may fill a pass. */
static int take_workspace(struct carve *cv, struct kern *k, const struct model_config *c,
                          const struct model_caps *caps, struct model_workspace *w) {
    size_t rows = (size_t)caps->max_rows, logits = (size_t)caps->max_logits, f = sizeof(float);
    size_t heads = (size_t)c->n_heads * (size_t)c->head_dim;
    size_t kv = (size_t)c->n_kv_heads * (size_t)c->head_dim;
    size_t act = most_act_bytes(k, caps->max_rows, c->hidden);
    act = max_size(act, most_act_bytes(k, caps->max_rows, c->n_heads * c->head_dim));
    act = max_size(act, most_act_bytes(k, caps->max_rows, c->ffn));
    struct kern_rows last = {.n_gen = caps->max_logits};
    act = max_size(act, k->ops->act_bytes(k, last, c->hidden));
    struct kern_rows any = {.n_gen = caps->max_rows};
    struct kern_rows prompt = {.n_prompt = caps->max_rows};
    size_t attn = max_size(k->ops->attn_scratch_bytes(k, any, caps->max_seqs, c->n_heads,
                                                      c->head_dim, caps->max_blocks),
                           k->ops->attn_scratch_bytes(k, prompt, caps->max_seqs, c->n_heads,
                                                      c->head_dim, caps->max_blocks));
    size_t look = 2 * KERN_BLOCK * kv * f; /* a page of one layer: model_look's */
    struct model_workspace ws = {
        .x = carve_take(cv, rows * (size_t)c->hidden * f),
        .delta = carve_take(cv, rows * (size_t)c->hidden * f),
        .qkv = carve_take(cv, rows * (heads + 2 * kv) * f),
        .heads = carve_take(cv, rows * heads * f),
        .gate_up = carve_take(cv, max_size(rows * 2 * (size_t)c->ffn * f, look)),
        .last = carve_take(cv, logits * (size_t)c->hidden * f),
        .last_delta = carve_take(cv, logits * (size_t)c->hidden * f),
        .attn_scratch = carve_take(cv, attn),
        .act = {.data = carve_take(cv, act), .bytes = act},
    };
    *w = ws;
    return cv->overflow ? E_TOO_LONG : 0;
}

int model_weight_bytes(const struct model_source *src, const struct model_borrow *borrow,
                       const struct kern *k, size_t *out, struct err *e) {
    struct model m = {.config = *model_source_config(src), .k = (struct kern *)(uintptr_t)k};
    struct layout l = {.m = &m, .src = src, .borrow = borrow, .e = e};
    int rc = model__check_borrow(src, borrow ? borrow->target_src : NULL, e);
    if (rc) return rc;
    rc = take_weights(&l);
    *out = align_up(l.carve.used, KERN_ACT_ALIGN);
    return rc;
}

int model_workspace_bytes(const struct model_config *c, const struct kern *k,
                          const struct model_caps *caps, size_t *out, struct err *e) {
    struct carve cv = {0};
    struct model_workspace w;
    if (take_workspace(&cv, (struct kern *)(uintptr_t)k, c, caps, &w))
        return err_raise(e, E_TOO_LONG, "workspace of %d rows: the sum of sizes overflows",
                         caps->max_rows);
    *out = align_up(cv.used, KERN_ACT_ALIGN);
    return 0;
}

int model_open(struct model **out, const struct model_source *src,
               const struct model_borrow *borrow, struct kern *k, const struct model_caps *caps,
               void (*progress)(void *arg, size_t done, size_t total), void *arg, struct err *e) {
    size_t weights = 0, workspace = 0;
    int rc = model_weight_bytes(src, borrow, k, &weights, e);
    if (!rc && model_source_config(src)->borrows_embedding) {
        ASSERT(borrow->target && borrow->target->k == k);
        rc = model__check_embedding(src, borrow->target_src, e);
    }
    if (!rc) rc = model_workspace_bytes(model_source_config(src), k, caps, &workspace, e);
    if (rc) return rc;
    struct model *m = calloc(1, sizeof *m);
    if (!m) return err_raise(e, E_NOMEM, "no memory for the model");
    m->config = *model_source_config(src);
    m->k = k;
    m->caps = *caps;
    m->reserved_bytes = weights + workspace;
    m->layers = calloc((size_t)m->config.n_layers, sizeof *m->layers);
    if (!m->layers) {
        rc = err_raise(e, E_NOMEM, "no memory for %d layers", m->config.n_layers);
        goto fail_model;
    }
    rc = k->ops->reserve(k, m->reserved_bytes, &m->reserved, e);
    if (rc) goto fail_layers;
    struct threads *dummy = NULL;
    if (model_source_is_dummy(src)) rc = threads_open(&dummy, 0, e);
    if (rc) goto fail_reserved;
    struct layout l = {.m = m,
                       .src = src,
                       .borrow = borrow,
                       .carve = {.base = m->reserved},
                       .e = e,
                       .progress = progress,
                       .progress_arg = arg,
                       .total = model_source_bytes(src),
                       .dummy = dummy};
    rc = take_weights(&l);
    free(l.room);
    threads_close(dummy);
    if (rc) goto fail_reserved;
    chain_weights(m);
    ASSERT(align_up(l.carve.used, KERN_ACT_ALIGN) == weights);
    take_workspace(&l.carve, k, &m->config, caps, &m->ws);
    ASSERT(l.carve.used <= m->reserved_bytes);
    *out = m;
    return 0;

fail_reserved:
    k->ops->unreserve(k, m->reserved);
fail_layers:
    free(m->layers);
fail_model:
    free(m);
    return rc;
}

void model_close(struct model *m) {
    if (!m) return;
    m->k->ops->unreserve(m->k, m->reserved);
    free(m->layers);
    free(m);
}

const struct model_config *model_get_config(const struct model *m) {
    return &m->config;
}
size_t model_reserved_bytes(const struct model *m) {
    return m->reserved_bytes;
}
int model_n_head(const struct model *m) {
    return m->config.n_head;
}
const int32_t *model_head_ids(const struct model *m) {
    return m->head_ids;
}
const struct kern_weight *model_embedding(const struct model *m) {
    return &m->embedding;
}
const struct kern_weight *model_head(const struct model *m) {
    return &m->head;
}
