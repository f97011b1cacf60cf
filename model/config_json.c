/* model_config from a Hugging Face config.json. What an absent key means is taken from the
 * configuration classes of transformers. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "model/config.h"
#include "model/config_private.h"
#include "model/json_private.h"

enum { MAX_JSON_BYTES = 4 << 20 };

/* Reads keys of one object. The first error stays: later reads do nothing. */
struct reader {
    json_t *obj;
    const struct config__family *family;
    struct err *e;
    int rc;
};

/* NULL where the key is absent or null. */
static json_t *get(const struct reader *r, const char *key) {
    json_t *v = json_object_get(r->obj, key);
    return json_is_null(v) ? NULL : v;
}

static const char *type_name(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a bool";
    case JSON_NULL:
        break;
    }
    return "null";
}

static double number_or(struct reader *r, const char *key, double lo, double hi, double otherwise) {
    json_t *v = get(r, key);
    if (r->rc || !v) return otherwise;
    double f = json_number_value(v);
    if (!json_is_number(v))
        r->rc = err_raise(r->e, E_FORMAT, "%s: %s, expected a number", key, type_name(v));
    else if (!(f >= lo && f <= hi))
        r->rc = err_raise(r->e, E_FORMAT, "%s: %.17g is outside %g..%g", key, f, lo, hi);
    return r->rc ? otherwise : f;
}

static int int_or(struct reader *r, const char *key, int lo, int hi, int otherwise) {
    double f = number_or(r, key, lo, hi, otherwise);
    if (r->rc == 0 && f != floor(f))
        r->rc = err_raise(r->e, E_FORMAT, "%s: %g is no integer", key, f);
    return r->rc ? otherwise : (int)f;
}

static void need(struct reader *r, const char *key) {
    if (r->rc == 0 && !get(r, key)) r->rc = err_raise(r->e, E_FORMAT, "%s is missing", key);
}

static int need_int(struct reader *r, const char *key, int lo, int hi) {
    need(r, key);
    return int_or(r, key, lo, hi, lo);
}

static bool bool_or(struct reader *r, const char *key, bool otherwise) {
    json_t *v = get(r, key);
    if (r->rc || !v) return otherwise;
    if (!json_is_boolean(v))
        r->rc = err_raise(r->e, E_FORMAT, "%s: %s, expected a bool", key, type_name(v));
    return json_is_true(v);
}

/* NULL where absent. */
static const char *str_or_null(struct reader *r, const char *key) {
    json_t *v = get(r, key);
    if (r->rc || !v) return NULL;
    if (!json_is_string(v))
        r->rc = err_raise(r->e, E_FORMAT, "%s: %s, expected a string", key, type_name(v));
    return json_string_value(v);
}

/* ---- Family and what it lacks ---- */

static int find_family(struct reader *r) {
    json_t *list = get(r, "architectures");
    const char *class = json_string_value(json_array_get(list, 0)),
               *type = str_or_null(r, "model_type");
    if (r->rc) return r->rc;
    if (!class && !type)
        return r->rc = err_raise(r->e, E_FORMAT, "neither architectures nor model_type is there");
    for (size_t i = 0; i < config__n_families; i++) {
        const struct config__family *f = &config__families[i];
        if (class ? strcmp(class, f->hf_class) == 0 : strcmp(type, f->hf_type) == 0) {
            r->family = f;
            return 0;
        }
    }
    const char *name = class ? class : type;
    return r->rc = config__refuse_arch(name, strlen(name), r->e);
}

static void refuse_extras(struct reader *r) {
    static const char *const biases[] = {"attention_bias", "mlp_bias"};
    for (size_t i = 0; i < 2; i++)
        if (bool_or(r, biases[i], false) && r->rc == 0)
            r->rc = err_raise(r->e, E_UNSUPPORTED, "%s is true: %s with biases is not supported",
                              biases[i], i ? "a feed-forward" : "an output projection");
    const char *act = str_or_null(r, "hidden_act");
    if (r->rc == 0 && act && strcmp(act, "silu") != 0)
        r->rc =
            err_raise(r->e, E_UNSUPPORTED, "hidden_act is \"%.40s\": only silu is supported", act);
    static const char *const experts[] = {"num_local_experts", "num_experts", "n_routed_experts"};
    for (size_t i = 0; i < 3; i++)
        if (int_or(r, experts[i], 0, 1 << 20, 0) > 0 && r->rc == 0)
            r->rc = err_raise(r->e, E_UNSUPPORTED,
                              "%s: mixture-of-experts layers are not supported", experts[i]);
    if (number_or(r, "partial_rotary_factor", 0, 1e3, 1) != 1 && r->rc == 0)
        r->rc =
            err_raise(r->e, E_UNSUPPORTED, "partial_rotary_factor: partial rope is not supported");
    json_t *quant = get(r, "quantization_config");
    if (r->rc == 0 && quant) {
        const char *method = json_string_value(json_object_get(quant, "quant_method"));
        r->rc =
            err_raise(r->e, E_UNSUPPORTED,
                      "quantization_config (%.40s) is not supported: give plain f32, f16 or bf16 "
                      "weights, or a GGUF file",
                      method ? method : "of unknown method");
    }
}

/* ---- Rope ---- */

/* The object that tells the scaling, NULL where none does: `rope_parameters` (possibly one object
 * per kind of layer), else the older `rope_scaling`. */
static json_t *rope_object(struct reader *r) {
    const char *key = "rope_parameters";
    json_t *v = get(r, key);
    if (!v) v = get(r, key = "rope_scaling");
    if (!v) return NULL;
    if (!json_is_object(v)) {
        r->rc = err_raise(r->e, E_FORMAT, "%s: %s, expected an object", key, type_name(v));
        return NULL;
    }
    json_t *full = json_object_get(v, "full_attention");
    return json_is_object(full) ? full : v;
}

static void read_llama3(struct reader *s, struct model_config *c) {
    need(s, "factor");
    need(s, "low_freq_factor");
    need(s, "high_freq_factor");
    c->rope_low_freq_factor = number_or(s, "low_freq_factor", 1e-3, 1e6, 1);
    c->rope_high_freq_factor = number_or(s, "high_freq_factor", 1e-3, 1e6, 4);
}

static void read_yarn(struct reader *s, struct model_config *c, int positions) {
    if (!get(s, "factor")) c->rope_factor = (double)positions / c->rope_original_context;
    /* Zero means the default there, as in transformers. */
    double fast = number_or(s, "beta_fast", 0, 1e6, 32),
           slow = number_or(s, "beta_slow", 0, 1e6, 1);
    c->rope_beta_fast = fast != 0 ? fast : 32;
    c->rope_beta_slow = slow != 0 ? slow : 1;
    double m = number_or(s, "mscale", 0, 1e3, 0), all = number_or(s, "mscale_all_dim", 0, 1e3, 0);
    double a = config__yarn_mscale(c->rope_factor, 1);
    if (m != 0 && all != 0)
        a = config__yarn_mscale(c->rope_factor, m) / config__yarn_mscale(c->rope_factor, all);
    c->rope_attention_factor = number_or(s, "attention_factor", 1e-3, 1e3, a);
    if (!bool_or(s, "truncate", true) && s->rc == 0)
        s->rc = err_raise(s->e, E_UNSUPPORTED, "rope scaling: truncate false is not supported");
}

static void read_rope(struct reader *r, struct model_config *c, int positions) {
    config__set_rope_defaults(c);
    c->rope_dim = c->head_dim;
    c->rope_base = number_or(r, "rope_theta", 1, 1e12, r->family->hf_rope_base);
    json_t *obj = rope_object(r);
    if (r->rc || !obj) return;
    struct reader s = {obj, r->family, r->e, 0};
    const char *type = str_or_null(&s, "rope_type");
    if (!type) type = str_or_null(&s, "type");
    c->rope_base = number_or(&s, "rope_theta", 1, 1e12, c->rope_base);
    c->rope_factor = number_or(&s, "factor", 1e-3, 1e6, 1);
    c->rope_original_context =
        int_or(&s, "original_max_position_embeddings", 1, MODEL_MAX_CONTEXT, positions);
    if (get(r, "original_max_position_embeddings"))
        c->rope_original_context =
            int_or(r, "original_max_position_embeddings", 1, MODEL_MAX_CONTEXT, positions);
    if (number_or(&s, "partial_rotary_factor", 0, 1e3, 1) != 1 && s.rc == 0)
        s.rc =
            err_raise(r->e, E_UNSUPPORTED, "partial_rotary_factor: partial rope is not supported");
    if (s.rc == 0 && type && strcmp(type, "default") != 0) {
        if (strcmp(type, "linear") == 0) {
            c->rope_scaling = ROPE_LINEAR;
            need(&s, "factor");
        } else if (strcmp(type, "llama3") == 0) {
            c->rope_scaling = ROPE_LLAMA3;
            read_llama3(&s, c);
        } else if (strcmp(type, "yarn") == 0) {
            c->rope_scaling = ROPE_YARN;
            read_yarn(&s, c, positions);
        } else {
            s.rc =
                err_raise(r->e, E_UNSUPPORTED,
                          "rope scaling \"%.40s\" is not supported (linear, llama3, yarn)", type);
        }
    } else if (s.rc == 0 && !type && get(&s, "factor")) {
        s.rc =
            err_raise(r->e, E_FORMAT, "rope scaling has a factor but neither rope_type nor type");
    }
    if (c->rope_scaling == ROPE_NONE) c->rope_factor = 1;
    if (r->rc == 0) r->rc = s.rc;
}

/* SmolLM3: in no_rope_layers a 1 means that the layer has rope; without the list every
 * no_rope_layer_interval-th layer has none. */
static void read_nope(struct reader *r, struct model_config *c) {
    json_t *list = get(r, "no_rope_layers");
    if (r->rc || strcmp(c->arch, "smollm3") != 0) return;
    int interval = int_or(r, "no_rope_layer_interval", 1, MODEL_MAX_LAYERS, 4);
    if (list && (!json_is_array(list) || json_array_size(list) < (size_t)c->n_layers)) {
        r->rc = err_raise(r->e, E_FORMAT, "no_rope_layers: no list of %d layers", c->n_layers);
        return;
    }
    for (int i = 0; i < c->n_layers && r->rc == 0; i++) {
        c->rope_skip[i] = (i + 1) % interval == 0;
        if (!list) continue;
        json_t *v = json_array_get(list, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > 1)
            r->rc = err_raise(r->e, E_FORMAT, "no_rope_layers: element %d is neither 0 nor 1", i);
        else c->rope_skip[i] = json_integer_value(v) == 0;
    }
}

/* ---- Sliding windows ---- */

/* Does any layer slide by the rules of its class? Only asked when the class has a window at all. */
static bool any_layer_slides(struct reader *r, const struct model_config *c) {
    if (strcmp(c->arch, "mistral") == 0) return true;
    if (strcmp(c->arch, "smollm3") == 0) { /* its layers without rope do */
        for (int i = 0; i < c->n_layers; i++)
            if (c->rope_skip[i]) return true;
        return false;
    }
    return int_or(r, "max_window_layers", 0, 1 << 20, 28) < c->n_layers;
}

/* The layers' window, 0 where all attend to everything. */
static int read_window(struct reader *r, const struct model_config *c) {
    if (strcmp(c->arch, "llama") == 0) return 0; /* its class knows none */
    bool mistral = strcmp(c->arch, "mistral") == 0;
    bool used = mistral || bool_or(r, "use_sliding_window", false);
    bool absent = !json_object_get(r->obj, "sliding_window");
    int window = int_or(r, "sliding_window", 1, INT32_MAX, absent ? 4096 : 0);
    if (!used) window = 0;
    json_t *types = get(r, "layer_types");
    if (!types) return window > 0 && any_layer_slides(r, c) ? window : 0;
    if (!json_is_array(types) && r->rc == 0)
        r->rc = err_raise(r->e, E_FORMAT, "layer_types: %s, expected an array", type_name(types));
    bool slides = mistral;
    for (size_t i = 0; i < json_array_size(types) && r->rc == 0; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type && strcmp(type, "sliding_attention") == 0) slides = true;
        else if (!type || strcmp(type, "full_attention") != 0)
            r->rc = err_raise(r->e, E_UNSUPPORTED, "layer_types: \"%.40s\" is not supported",
                              type ? type : "(no string)");
    }
    if (slides && window == 0 && !mistral && r->rc == 0)
        r->rc = err_raise(r->e, E_UNSUPPORTED,
                          "layer_types names sliding_attention, but sliding_window is off");
    return slides ? window : 0;
}

/* ---- All of it
 * ----------------------------------------------------------------------------------- */

static void read_shape(struct reader *r, struct model_config *c) {
    c->n_layers = need_int(r, "num_hidden_layers", 1, MODEL_MAX_LAYERS);
    c->hidden = need_int(r, "hidden_size", 1, MODEL_MAX_HIDDEN);
    c->ffn = need_int(r, "intermediate_size", 1, MODEL_MAX_FFN);
    c->n_heads = need_int(r, "num_attention_heads", 1, MODEL_MAX_HEADS);
    c->n_kv_heads = int_or(r, "num_key_value_heads", 1, MODEL_MAX_HEADS, c->n_heads);
    c->vocab = need_int(r, "vocab_size", 1, MODEL_MAX_VOCAB);
    c->norm_eps = (float)number_or(r, "rms_norm_eps", 1e-12, 0.1, 1e-6);
    if (r->rc) return;
    bool absent = !json_object_get(r->obj, "head_dim");
    int dim = c->hidden / c->n_heads;
    if (absent && r->family->hf_head_dim) dim = r->family->hf_head_dim;
    else if (!get(r, "head_dim") && c->hidden % c->n_heads)
        r->rc = err_raise(r->e, E_FORMAT, "hidden_size %d is no multiple of num_attention_heads %d",
                          c->hidden, c->n_heads);
    c->head_dim = int_or(r, "head_dim", 1, MODEL_MAX_HEAD_DIM, dim);
}

static int read_config(struct reader *r, struct model_config *c) {
    if (find_family(r)) return r->rc;
    snprintf(c->arch, sizeof c->arch, "%s", r->family->arch);
    const char *name = json_string_value(get(r, "_name_or_path"));
    if (name) config__set_name(c, name, strlen(name));
    refuse_extras(r);
    read_shape(r, c);
    int positions = need_int(r, "max_position_embeddings", 1, MODEL_MAX_CONTEXT);
    if (r->rc) return r->rc;
    c->tied = bool_or(r, "tie_word_embeddings", r->family->hf_tied);
    c->qkv_bias = r->family->qkv_bias;
    c->qk_norm = r->family->qk_norm;
    read_rope(r, c, positions);
    read_nope(r, c);
    if (r->rc) return r->rc;
    c->context = config__scaled_context(c, positions);
    c->n_head = c->vocab; /* folders hold whole models: drafts that borrow come as GGUF */
    int window = read_window(r, c);
    if (window > 0 && window < c->context) c->context = window;
    return r->rc ? r->rc : model_config_check(c, r->e);
}

int model_config_from_json(struct model_config *c, const char *json, size_t n, struct err *e) {
    memset(c, 0, sizeof *c);
    if (n > MAX_JSON_BYTES)
        return err_raise(e, E_TOO_LONG, "a config of %zu bytes; %d is the limit", n,
                         MAX_JSON_BYTES);
    json_t *root;
    int rc = json__parse_object(&root, json, n, e);
    if (rc) return rc;
    struct reader r = {root, NULL, e, 0};
    rc = read_config(&r, c);
    json_decref(root);
    return rc;
}
