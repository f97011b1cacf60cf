/* Roles -> tensors of the file: names in both formats, shapes from the config, and the two checks
 * that make a quiet mistake loud: nothing missing, nothing left over. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/file.h"
#include "model/ggml_types.h"
#include "model/source_private.h"

enum { MAX_NAME = 256 };

/* Printf formats take the layer. NULL: the format has no such tensor. */
static const struct {
    const char *gguf, *hf;
    bool vector;
} roles[TENSOR_N_ROLES] = {
    [TENSOR_TOKEN_EMBD] = {"token_embd.weight", "model.embed_tokens.weight", false},
    [TENSOR_OUTPUT] = {"output.weight", "lm_head.weight", false},
    [TENSOR_OUTPUT_NORM] = {"output_norm.weight", "model.norm.weight", true},
    [TENSOR_ROPE_FREQS] = {"rope_freqs.weight", NULL, true},
    [TENSOR_ATTN_NORM] = {"blk.%d.attn_norm.weight", "model.layers.%d.input_layernorm.weight",
                          true},
    [TENSOR_ATTN_Q] = {"blk.%d.attn_q.weight", "model.layers.%d.self_attn.q_proj.weight", false},
    [TENSOR_ATTN_K] = {"blk.%d.attn_k.weight", "model.layers.%d.self_attn.k_proj.weight", false},
    [TENSOR_ATTN_V] = {"blk.%d.attn_v.weight", "model.layers.%d.self_attn.v_proj.weight", false},
    [TENSOR_ATTN_O] = {"blk.%d.attn_output.weight", "model.layers.%d.self_attn.o_proj.weight",
                       false},
    [TENSOR_Q_BIAS] = {"blk.%d.attn_q.bias", "model.layers.%d.self_attn.q_proj.bias", true},
    [TENSOR_K_BIAS] = {"blk.%d.attn_k.bias", "model.layers.%d.self_attn.k_proj.bias", true},
    [TENSOR_V_BIAS] = {"blk.%d.attn_v.bias", "model.layers.%d.self_attn.v_proj.bias", true},
    [TENSOR_Q_NORM] = {"blk.%d.attn_q_norm.weight", "model.layers.%d.self_attn.q_norm.weight",
                       true},
    [TENSOR_K_NORM] = {"blk.%d.attn_k_norm.weight", "model.layers.%d.self_attn.k_norm.weight",
                       true},
    [TENSOR_FFN_NORM] = {"blk.%d.ffn_norm.weight",
                         "model.layers.%d.post_attention_layernorm.weight", true},
    [TENSOR_FFN_GATE] = {"blk.%d.ffn_gate.weight", "model.layers.%d.mlp.gate_proj.weight", false},
    [TENSOR_FFN_UP] = {"blk.%d.ffn_up.weight", "model.layers.%d.mlp.up_proj.weight", false},
    [TENSOR_FFN_DOWN] = {"blk.%d.ffn_down.weight", "model.layers.%d.mlp.down_proj.weight", false},
};

static bool is_own(enum tensor_role role) {
    return role < TENSOR_ATTN_NORM;
}

static bool has_role(const struct model_source *s, enum tensor_role role) {
    const struct model_config *c = &s->config;
    switch (role) {
    case TENSOR_TOKEN_EMBD:
        return !c->borrows_embedding;
    case TENSOR_OUTPUT:
        return !c->tied && !c->borrows_head;
    case TENSOR_ROPE_FREQS:
        return s->gguf && gguf_tensor_find(s->gguf, "rope_freqs.weight");
    case TENSOR_Q_BIAS:
    case TENSOR_K_BIAS:
    case TENSOR_V_BIAS:
        return c->qkv_bias;
    case TENSOR_Q_NORM:
    case TENSOR_K_NORM:
        return c->qk_norm;
    default:
        return true;
    }
}

static void expected_shape(const struct model_config *c, enum tensor_role role, int *rows,
                           int *cols) {
    int q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    *rows = 1;
    *cols = c->hidden;
    switch (role) {
    case TENSOR_TOKEN_EMBD:
        *rows = c->vocab;
        break;
    case TENSOR_OUTPUT:
        *rows = c->n_head;
        break;
    case TENSOR_OUTPUT_NORM:
    case TENSOR_ATTN_NORM:
    case TENSOR_FFN_NORM:
        break;
    case TENSOR_ROPE_FREQS:
        *cols = c->rope_dim / 2;
        break;
    case TENSOR_ATTN_Q:
        *rows = q;
        break;
    case TENSOR_ATTN_K:
    case TENSOR_ATTN_V:
        *rows = kv;
        break;
    case TENSOR_ATTN_O:
        *rows = c->hidden;
        *cols = q;
        break;
    case TENSOR_Q_BIAS:
        *cols = q;
        break;
    case TENSOR_K_BIAS:
    case TENSOR_V_BIAS:
        *cols = kv;
        break;
    case TENSOR_Q_NORM:
    case TENSOR_K_NORM:
        *cols = c->head_dim;
        break;
    case TENSOR_FFN_GATE:
    case TENSOR_FFN_UP:
        *rows = c->ffn;
        break;
    case TENSOR_FFN_DOWN:
        *rows = c->hidden;
        *cols = c->ffn;
        break;
    case TENSOR_N_ROLES:
        break;
    }
}

/* ---- One tensor ---- */

/* What both formats say of a tensor, the contiguous dimension last. */
struct found {
    int n_dims;
    uint64_t dims[SAFETENSORS_MAX_DIMS];
};

static int find_gguf(const struct model_source *s, struct tensor_view *v, struct found *f,
                     struct err *e) {
    const struct gguf_tensor *t = gguf_tensor_find(s->gguf, v->name);
    if (!t) return err_raise(e, E_FORMAT, "tensor %s is missing", v->name);
    f->n_dims = t->n_dims;
    while (f->n_dims > 1 && t->dims[f->n_dims - 1] == 1) f->n_dims--; /* [n, 1] is a vector */
    for (int i = 0; i < f->n_dims; i++) f->dims[i] = t->dims[f->n_dims - 1 - i];
    v->dtype = ggml_type_find(t->ggml_type)->dtype;
    v->data = t->data;
    v->bytes = t->bytes;
    return 0;
}

static int find_safetensors(const struct model_source *s, struct tensor_view *v, struct found *f,
                            struct err *e) {
    const struct safetensors_tensor *t = safetensors_find(s->tensors, v->name);
    if (!t) {
        if (v->role == TENSOR_OUTPUT)
            return err_raise(e, E_FORMAT,
                             "tensor %s is missing and tie_word_embeddings is not true", v->name);
        return err_raise(e, E_FORMAT, "tensor %s is missing", v->name);
    }
    f->n_dims = t->n_dims;
    for (int i = 0; i < t->n_dims; i++) f->dims[i] = t->dims[i];
    v->data = t->data;
    v->bytes = t->bytes;
    return safetensors_dtype(t, &v->dtype, e);
}

static void describe_dims(const struct found *f, char *buf, size_t n) {
    size_t at = 0;
    buf[0] = 0;
    for (int i = 0; i < f->n_dims && at < n; i++)
        at += (size_t)snprintf(buf + at, n - at, "%s%llu", i ? " x " : "",
                               (unsigned long long)f->dims[i]);
}

static int check_view(const struct model_source *s, const struct tensor_view *v,
                      const struct found *f, struct err *e) {
    bool vector = roles[v->role].vector;
    bool same = f->n_dims == (vector ? 1 : 2) && f->dims[f->n_dims - 1] == (uint64_t)v->cols &&
                (vector || f->dims[0] == (uint64_t)v->rows);
    /* A GGUF matrix of one row reads as a vector once its trailing ones are gone. */
    if (s->gguf && !vector && v->rows == 1 && f->n_dims == 1)
        same = f->dims[0] == (uint64_t)v->cols;
    if (!same) {
        char dims[128], want[64];
        describe_dims(f, dims, sizeof dims);
        if (vector) snprintf(want, sizeof want, "%d", v->cols);
        else snprintf(want, sizeof want, "%d x %d", v->rows, v->cols);
        return err_raise(e, E_FORMAT, "tensor %s has the shape [%s]; by the config it is [%s]",
                         v->name, dims, want);
    }
    bool plain = v->dtype == KERN_F32 || v->dtype == KERN_F16 || v->dtype == KERN_BF16;
    if (vector && !plain)
        return err_raise(e, E_UNSUPPORTED, "tensor %s: a quantised vector", v->name);
    if (v->role == TENSOR_ROPE_FREQS && v->dtype != KERN_F32)
        return err_raise(e, E_UNSUPPORTED, "tensor %s: not of type F32", v->name);
    return 0;
}

/* Factors divide frequencies: a zero or a NaN among them would spoil every logit. */
static int check_rope_factors(const struct tensor_view *v, struct err *e) {
    for (int i = 0; i < v->cols && v->data; i++) {
        float f;
        memcpy(&f, (const char *)v->data + 4 * (size_t)i, 4);
        if (!(f >= 1e-3f && f <= 1e6f))
            return err_raise(e, E_FORMAT, "tensor %s: factor %d is %g", v->name, i, (double)f);
    }
    return 0;
}

static int format_name(struct model_source *s, struct tensor_view *v, struct err *e) {
    char name[MAX_NAME];
    const char *format = s->gguf ? roles[v->role].gguf : roles[v->role].hf;
    const char *number = strstr(format, "%d");
    if (number)
        snprintf(name, sizeof name, "%.*s%d%s", (int)(number - format), format, v->layer,
                 number + 2);
    else snprintf(name, sizeof name, "%s", format);
    v->name = arena_strndup(&s->arena, name, strlen(name));
    return v->name ? 0 : err_raise(e, E_NOMEM, "no memory for tensor names");
}

/* What random weights in this tensor's place are like. */
static int make_dummy(const struct model_source *s, struct tensor_view *v, struct err *e) {
    if (s->dummy_type != KERN_N_DTYPES && !roles[v->role].vector) v->dtype = s->dummy_type;
    int block = kern_dtype_block(v->dtype);
    if (v->cols % block)
        return err_raise(e, E_UNSUPPORTED, "tensor %s: %d columns are no whole blocks of %d of %s",
                         v->name, v->cols, block, kern_dtype_name(v->dtype));
    v->data = NULL;
    v->bytes = (size_t)v->rows * kern_dtype_bytes(v->dtype, (size_t)v->cols);
    return 0;
}

/* Is there anything to look tensors up in? A GGUF may be a vocabulary alone, a folder a config. */
static bool has_tensors(const struct model_source *s) {
    return s->gguf ? gguf_n_tensors(s->gguf) > 0 : s->tensors != NULL;
}

static int map_one(struct model_source *s, struct tensor_view *v, struct err *e) {
    struct found f = {0};
    int rc = format_name(s, v, e);
    if (rc) return rc;
    expected_shape(&s->config, v->role, &v->rows, &v->cols);
    if (has_tensors(s)) {
        rc = s->gguf ? find_gguf(s, v, &f, e) : find_safetensors(s, v, &f, e);
        if (rc == 0) rc = check_view(s, v, &f, e);
    } else { /* shapes follow from the config */
        v->dtype = s->planned_dtype;
        v->bytes = (size_t)v->rows * (size_t)v->cols * (v->dtype == KERN_F32 ? 4 : 2);
    }
    if (rc == 0 && s->dummy) rc = make_dummy(s, v, e);
    if (rc == 0 && v->role == TENSOR_ROPE_FREQS) rc = check_rope_factors(v, e);
    if (rc) return rc;
    if (!v->data) s->has_weights = false;
    s->n_params += (uint64_t)v->rows * (uint64_t)v->cols;
    s->bytes += v->bytes;
    return 0;
}

/* ---- Left over ---- */

static bool ends_with(const char *s, size_t n, const char *suffix) {
    size_t k = strlen(suffix);
    return n >= k && memcmp(s + n - k, suffix, k) == 0;
}

/* Tensors that some files carry and nobody needs: tables of rope, and a head that is tied anyway.
 */
static bool may_be_ignored(const struct model_source *s, const char *name, size_t n) {
    if (ends_with(name, n, ".rotary_emb.inv_freq") || ends_with(name, n, ".attn_rot_embd.weight"))
        return true;
    return !s->gguf && s->config.tied && n == 14 && memcmp(name, "lm_head.weight", 14) == 0;
}

static int compare_view_names(const void *a, const void *b) {
    const struct tensor_view *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static int compare_key(const void *key, const void *b) {
    const struct gguf_str *k = key;
    const struct tensor_view *const *v = b;
    size_t n = strlen((*v)->name);
    int c = memcmp(k->data, (*v)->name, min_size(k->n, n));
    return c ? c : (k->n > n) - (k->n < n);
}

/* A tensor that we do not use would change the result where the file's author used it. */
static int refuse_left_over(const struct model_source *s, struct err *e) {
    size_t n = s->gguf      ? gguf_n_tensors(s->gguf)
               : s->tensors ? safetensors_n_tensors(s->tensors)
                            : 0;
    if (n == 0) return 0;
    const struct tensor_view **sorted = malloc(s->n_views * sizeof *sorted);
    if (!sorted) return err_raise(e, E_NOMEM, "no memory for %zu tensors", s->n_views);
    for (size_t i = 0; i < s->n_views; i++) sorted[i] = &s->views[i];
    qsort(sorted, s->n_views, sizeof *sorted, compare_view_names);
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        struct gguf_str name;
        if (s->gguf) name = gguf_tensor_at(s->gguf, i)->name;
        else name.n = strlen(name.data = safetensors_tensor_at(s->tensors, i)->name);
        if (bsearch(&name, sorted, s->n_views, sizeof *sorted, compare_key)) continue;
        if (may_be_ignored(s, name.data, name.n)) continue;
        rc = err_raise(e, E_UNSUPPORTED,
                       "tensor %.*s has no place in a %s of %d layers; leaving it out would change "
                       "the result",
                       name.n < 100 ? (int)name.n : 100, name.data, s->config.arch,
                       s->config.n_layers);
    }
    free(sorted);
    return rc;
}

/* ---- All ---- */

int source__map_tensors(struct model_source *s, struct err *e) {
    if (!s->plan && !has_tensors(s))
        return err_raise(e, E_FORMAT, "no tensors in it: a vocabulary alone?");
    s->n_own = 0;
    s->n_layer_roles = 0;
    for (int role = 0; role < TENSOR_N_ROLES; role++) {
        s->slot[role] = -1;
        if (!has_role(s, (enum tensor_role)role)) continue;
        s->slot[role] = is_own((enum tensor_role)role) ? (int)s->n_own++ : s->n_layer_roles++;
    }
    s->n_views = s->n_own + (size_t)s->config.n_layers * (size_t)s->n_layer_roles;
    s->views = arena_take_zeroed(&s->arena, s->n_views, sizeof *s->views);
    if (!s->views) return err_raise(e, E_NOMEM, "no memory for %zu tensors", s->n_views);
    s->has_weights = has_tensors(s);
    size_t at = 0;
    int rc = 0;
    for (int layer = -1; layer < s->config.n_layers && rc == 0; layer++)
        for (int role = 0; role < TENSOR_N_ROLES && rc == 0; role++) {
            if (s->slot[role] < 0 || is_own((enum tensor_role)role) != (layer < 0)) continue;
            struct tensor_view *v = &s->views[at++];
            v->role = (enum tensor_role)role;
            v->layer = layer < 0 ? 0 : layer;
            rc = map_one(s, v, e);
        }
    return rc ? rc : refuse_left_over(s, e);
}

int model_source_find(const struct model_source *s, enum tensor_role role, int layer,
                      struct tensor_view *out, struct err *e) {
    ASSERT((int)role >= 0 && role < TENSOR_N_ROLES && layer >= 0 && layer < s->config.n_layers);
    if (s->slot[role] < 0)
        return err_raise(e, E_NOT_FOUND, "this model has no tensor %s",
                         s->gguf || !roles[role].hf ? roles[role].gguf : roles[role].hf);
    size_t idx = (size_t)s->slot[role];
    if (!is_own(role)) idx += s->n_own + (size_t)layer * (size_t)s->n_layer_roles;
    *out = s->views[idx];
    return 0;
}
