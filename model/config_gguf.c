/* model_config from the "<arch>.*" keys of a GGUF header. Which keys there are and what they
 * default to follows the converter and the loader of the llama.cpp project. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "model/config.h"
#include "model/config_private.h"
#include "model/gguf.h"

enum { NOPE_INTERVAL = 4 }; /* SmolLM3: fixed by the architecture, no key tells it */

/* Reads keys below one architecture's name. The first error stays: later reads do nothing. */
struct reader {
    const struct gguf *g;
    const struct config__family *family;
    struct err *e;
    int rc;
    char key[96]; /* of the last read */
};

static bool has(struct reader *r, const char *suffix) {
    snprintf(r->key, sizeof r->key, "%s.%s", r->family->gguf_arch, suffix);
    return gguf_has(r->g, r->key);
}

/* A per-layer array is taken where all layers agree. */
static void read_uniform_array(struct reader *r, int64_t lo, int64_t hi, int64_t *out) {
    enum gguf_type type;
    size_t n;
    const void *data;
    if ((r->rc = gguf_array(r->g, r->key, &type, &n, r->e)) != 0) return;
    if ((type != GGUF_I32 && type != GGUF_U32) || n == 0) {
        r->rc = err_raise(r->e, E_FORMAT, "key %s: an array that is no list of integers", r->key);
        return;
    }
    if ((r->rc = gguf_array_data(r->g, r->key, type, &data, &n, r->e)) != 0) return;
    const unsigned char *bytes = data;
    int32_t first, v;
    memcpy(&first, bytes, 4);
    for (size_t i = 1; i < n; i++) {
        memcpy(&v, bytes + 4 * i, 4);
        if (v != first) {
            r->rc = err_raise(r->e, E_UNSUPPORTED, "key %s: layers of different sizes (%d and %d)",
                              r->key, first, v);
            return;
        }
    }
    if (first < lo || first > hi)
        r->rc = err_raise(r->e, E_FORMAT, "key %s: %d is outside %lld..%lld", r->key, first,
                          (long long)lo, (long long)hi);
    else *out = first;
}

static int need_int(struct reader *r, const char *suffix, int64_t lo, int64_t hi) {
    int64_t v = lo;
    if (r->rc) return (int)lo;
    bool there = has(r, suffix);
    enum gguf_type type;
    size_t n;
    if (there && gguf_array(r->g, r->key, &type, &n, NULL) == 0) read_uniform_array(r, lo, hi, &v);
    else r->rc = gguf_get_int(r->g, r->key, lo, hi, &v, r->e);
    return (int)v;
}

static int int_or(struct reader *r, const char *suffix, int64_t lo, int64_t hi, int otherwise) {
    return has(r, suffix) ? need_int(r, suffix, lo, hi) : otherwise;
}

static double float_or(struct reader *r, const char *suffix, double lo, double hi,
                       double otherwise) {
    double v = otherwise;
    if (r->rc == 0 && has(r, suffix)) r->rc = gguf_get_float(r->g, r->key, lo, hi, &v, r->e);
    return v;
}

/* Keys that change the computation in a way that we do not have, unless they hold a neutral value.
 */
static int refuse_extras(struct reader *r) {
    static const struct {
        const char *suffix;
        double neutral;
        const char *what;
    } extras[] = {
        {"expert_count", 0, "mixture-of-experts layers"},
        {"attention.scale", 0, "an attention scale of its own"},
        {"logit_scale", 1, "scaled logits"},
        {"residual_scale", 1, "a scaled residual"},
        {"embedding_scale", 1, "a scaled embedding"},
        {"attention.clamp_kqv", 0, "clamped Q, K and V"},
        {"attention.max_alibi_bias", 0, "ALiBi"},
        {"attn_logit_softcapping", 0, "capped attention logits"},
        {"final_logit_softcapping", 0, "capped logits"},
        {"attention.temperature_scale", 0, "an attention temperature"},
        {"rope.scaling.yarn_ext_factor", 1, "a YaRN extrapolation factor"},
    };
    for (size_t i = 0; i < sizeof extras / sizeof *extras; i++) {
        double v = float_or(r, extras[i].suffix, -1e30, 1e30, extras[i].neutral);
        if (r->rc) return r->rc;
        if (v != extras[i].neutral && v != 0)
            return r->rc = err_raise(r->e, E_UNSUPPORTED, "key %s is %g: %s is not supported",
                                     r->key, v, extras[i].what);
    }
    bool causal = true;
    if (has(r, "attention.causal")) r->rc = gguf_get_bool(r->g, r->key, &causal, r->e);
    if (r->rc == 0 && !causal)
        r->rc = err_raise(r->e, E_UNSUPPORTED, "key %s is false: an encoder", r->key);
    return r->rc;
}

static bool str_is(struct gguf_str s, const char *text) {
    return s.n == strlen(text) && memcmp(s.data, text, s.n) == 0;
}

/* The factor that YaRN puts on cos and sin. Files of the converter carry transformers' own
 * attention_factor where the model has one. */
static double yarn_attention_factor(struct reader *r, double factor) {
    double m = float_or(r, "rope.scaling.yarn_log_multiplier", 0, 1e3, 0);
    double a = config__yarn_mscale(factor, 1);
    if (m != 0) a /= config__yarn_mscale(factor, m);
    a = float_or(r, "rope.scaling.yarn_attn_factor", 1e-3, 1e3, a);
    return a * float_or(r, "rope.scaling.attn_factor", 1e-3, 1e3, 1);
}

static void read_rope(struct reader *r, struct model_config *c, int positions) {
    config__set_rope_defaults(c);
    c->rope_interleaved = r->family->gguf_interleaved;
    c->rope_dim = int_or(r, "rope.dimension_count", 1, MODEL_MAX_HEAD_DIM, c->head_dim);
    if (r->rc == 0 && c->rope_dim != c->head_dim)
        r->rc = err_raise(r->e, E_UNSUPPORTED,
                          "key %s is %d, the head dimension is %d: partial rope is not supported",
                          r->key, c->rope_dim, c->head_dim);
    c->rope_base = float_or(r, "rope.freq_base", 1, 1e12, 10000);
    double factor = float_or(r, "rope.scale_linear", 0, 1e6, 1);
    factor = float_or(r, "rope.scaling.factor", 0, 1e6, factor);
    if (factor == 0) factor = 1;
    struct gguf_str type = {"linear", 6};
    if (r->rc == 0 && has(r, "rope.scaling.type")) r->rc = gguf_get_str(r->g, r->key, &type, r->e);
    if (r->rc) return;
    if (str_is(type, "none")) return;
    if (str_is(type, "linear")) {
        if (factor != 1) c->rope_scaling = ROPE_LINEAR;
    } else if (str_is(type, "yarn")) {
        c->rope_scaling = ROPE_YARN;
        c->rope_original_context =
            int_or(r, "rope.scaling.original_context_length", 1, MODEL_MAX_CONTEXT, positions);
        c->rope_beta_fast = float_or(r, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32);
        c->rope_beta_slow = float_or(r, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1);
        c->rope_attention_factor = yarn_attention_factor(r, factor);
    } else {
        r->rc =
            err_raise(r->e, E_UNSUPPORTED,
                      "key %s: rope scaling \"%.*s\" is not supported (none, linear, yarn; llama3 "
                      "as the tensor rope_freqs.weight)",
                      r->key, type.n < 40 ? (int)type.n : 40, type.data);
    }
    c->rope_factor = factor;
}

/* Rows of the embedding: the key where there is one, else the tensor, else the token list. */
static void read_vocab(struct reader *r, struct model_config *c) {
    const struct gguf_tensor *embd = gguf_tensor_find(r->g, "token_embd.weight");
    enum gguf_type type;
    size_t n = 0;
    if (r->rc) return;
    if (c->borrows_embedding && !has(r, "vocab_size")) {
        r->rc =
            err_raise(r->e, E_FORMAT,
                      "key %s is missing: a draft that borrows its target's embedding tells its "
                      "vocabulary by it",
                      r->key);
        return;
    }
    if (has(r, "vocab_size")) c->vocab = need_int(r, "vocab_size", 1, MODEL_MAX_VOCAB);
    else if (embd && embd->dims[1] <= MODEL_MAX_VOCAB) c->vocab = (int)embd->dims[1];
    else if ((r->rc = gguf_array(r->g, "tokenizer.ggml.tokens", &type, &n, r->e)) == 0)
        c->vocab = n <= MODEL_MAX_VOCAB ? (int)n : MODEL_MAX_VOCAB + 1;
    /* The key counts the tokenizer's entries in some files, the head may be padded beyond them. */
    if (r->rc == 0 && embd && embd->dims[1] <= MODEL_MAX_VOCAB && (int)embd->dims[1] > c->vocab)
        c->vocab = (int)embd->dims[1];
}

static int find_family(const struct gguf *g, const struct config__family **out, struct err *e) {
    struct gguf_str arch;
    int rc = gguf_get_str(g, "general.architecture", &arch, e);
    if (rc)
        return rc == E_NOT_FOUND ? err_raise(e, E_FORMAT, "key general.architecture is missing")
                                 : rc;
    for (size_t i = 0; i < config__n_families; i++)
        if (config__families[i].gguf_arch && str_is(arch, config__families[i].gguf_arch)) {
            *out = &config__families[i];
            return 0;
        }
    return config__refuse_arch(arch.data, arch.n, e);
}

static void read_name(const struct gguf *g, struct model_config *c) {
    struct gguf_str s;
    if (gguf_get_str(g, "general.name", &s, NULL) != 0) return;
    config__set_name(c, s.data, s.n);
}

int model_config_from_gguf(struct model_config *c, const struct gguf *g, struct err *e) {
    struct reader r = {g, NULL, e, 0, ""};
    memset(c, 0, sizeof *c);
    int rc = find_family(g, &r.family, e);
    if (rc) return rc;
    snprintf(c->arch, sizeof c->arch, "%s", r.family->arch);
    read_name(g, c);
    c->n_layers = need_int(&r, "block_count", 1, MODEL_MAX_LAYERS);
    c->hidden = need_int(&r, "embedding_length", 1, MODEL_MAX_HIDDEN);
    c->ffn = need_int(&r, "feed_forward_length", 1, MODEL_MAX_FFN);
    c->n_heads = need_int(&r, "attention.head_count", 1, MODEL_MAX_HEADS);
    c->n_kv_heads = int_or(&r, "attention.head_count_kv", 1, MODEL_MAX_HEADS, c->n_heads);
    int positions = need_int(&r, "context_length", 1, MODEL_MAX_CONTEXT);
    if (r.rc) return r.rc;
    bool explicit_dim = has(&r, "attention.key_length");
    if (!explicit_dim && c->hidden % c->n_heads)
        return err_raise(e, E_FORMAT, "embedding_length %d is no multiple of head_count %d",
                         c->hidden, c->n_heads);
    c->head_dim = int_or(&r, "attention.key_length", 1, MODEL_MAX_HEAD_DIM, c->hidden / c->n_heads);
    int value_dim = int_or(&r, "attention.value_length", 1, MODEL_MAX_HEAD_DIM, c->head_dim);
    if (r.rc == 0 && value_dim != c->head_dim)
        return err_raise(e, E_UNSUPPORTED, "keys of %d and values of %d dimensions", c->head_dim,
                         value_dim);
    double eps = 0;
    if (r.rc == 0) {
        has(&r, "attention.layer_norm_rms_epsilon");
        r.rc = gguf_get_float(g, r.key, 1e-12, 0.1, &eps, e);
    }
    c->norm_eps = (float)eps;
    if (r.rc == 0) r.rc = config__read_borrowing(c, g, e);
    read_vocab(&r, c);
    if (r.rc == 0) r.rc = config__read_head_ids(c, g, e);
    read_rope(&r, c, positions);
    c->context = config__scaled_context(c, positions);
    /* A window as wide as the context sees everything; a narrower one ends the context instead. */
    int window = int_or(&r, "attention.sliding_window", 0, INT32_MAX, 0);
    if (window > 0 && window < c->context) c->context = window;
    if (r.rc == 0) refuse_extras(&r);
    if (r.rc) return r.rc;
    /* Presence of the tensors decides where the file has no key for it. */
    bool own_head = gguf_tensor_find(g, "output.weight");
    c->tied = !own_head && !c->borrows_embedding;
    c->borrows_head = !own_head && c->borrows_embedding;
    c->qkv_bias = r.family->qkv_bias || gguf_tensor_find(g, "blk.0.attn_q.bias");
    c->qk_norm = r.family->qk_norm;
    if (strcmp(c->arch, "smollm3") == 0)
        for (int i = 0; i < c->n_layers; i++) c->rope_skip[i] = (i + 1) % NOPE_INTERVAL == 0;
    return model_config_check(c, e);
}
