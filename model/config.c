#include "model/config.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/utf8.h"
#include "kernels/kernels.h"
#include "model/config_private.h"

const struct config__family config__families[] = {
    {.arch = "llama",
     .gguf_arch = "llama",
     .hf_class = "LlamaForCausalLM",
     .hf_type = "llama",
     .gguf_interleaved = true,
     .hf_rope_base = 10000},
    {.arch = "mistral",
     .hf_class = "MistralForCausalLM",
     .hf_type = "mistral",
     .hf_rope_base = 10000},
    {.arch = "qwen2",
     .gguf_arch = "qwen2",
     .hf_class = "Qwen2ForCausalLM",
     .hf_type = "qwen2",
     .qkv_bias = true,
     .hf_rope_base = 10000},
    {.arch = "qwen3",
     .gguf_arch = "qwen3",
     .hf_class = "Qwen3ForCausalLM",
     .hf_type = "qwen3",
     .qk_norm = true,
     .hf_rope_base = 10000,
     .hf_head_dim = 128},
    {.arch = "smollm3",
     .gguf_arch = "smollm3",
     .hf_class = "SmolLM3ForCausalLM",
     .hf_type = "smollm3",
     .gguf_interleaved = true,
     .hf_tied = true,
     .hf_rope_base = 2000000},
};
const size_t config__n_families = sizeof config__families / sizeof *config__families;

/* Part of an architecture's name, lower case -> what it needs that is not here. First match wins.
 */
static const struct {
    const char *part, *lacks;
} refusals[] = {
    {"moe", "mixture-of-experts layers"},
    {"mixtral", "mixture-of-experts layers"},
    {"gpt-oss", "mixture-of-experts layers and attention sinks"},
    {"gptoss", "mixture-of-experts layers and attention sinks"},
    {"deepseek", "latent attention and mixture-of-experts layers"},
    {"llama4", "mixture-of-experts layers and chunked attention"},
    {"dbrx", "mixture-of-experts layers"},
    {"grok", "mixture-of-experts layers"},
    {"glm", "GLM's norms and partial rope"},
    {"kimi", "linear attention and mixture-of-experts layers"},
    {"minimax", "linear attention and mixture-of-experts layers"},
    {"gemma", "Gemma's norms, scaled embedding, GeGLU, soft caps and alternating windows"},
    {"mamba", "recurrent state, which cannot be rewound after a rejected draft"},
    {"rwkv", "recurrent state, which cannot be rewound after a rejected draft"},
    {"jamba", "recurrent state, which cannot be rewound after a rejected draft"},
    {"falcon-h", "recurrent state, which cannot be rewound after a rejected draft"},
    {"falconh", "recurrent state, which cannot be rewound after a rejected draft"},
    {"hybrid", "recurrent state, which cannot be rewound after a rejected draft"},
    {"nemotron", "Nemotron's layers"},
    {"lfm", "convolution layers with state"},
    {"next", "linear attention with state, which cannot be rewound after a rejected draft"},
    {"qwen3_5", "linear attention with state, which cannot be rewound after a rejected draft"},
    {"qwen35", "linear attention with state, which cannot be rewound after a rejected draft"},
    {"vl", "images"},
    {"conditionalgeneration", "images or an encoder"},
    {"mistral3", "Mistral 3's attention temperature"},
    {"mistral4", "Mistral 4's latent attention"},
    {"ministral", "Ministral's alternating windows"},
    {"phi", "Phi's fused projections and longrope"},
    {"granite", "Granite's scaled embedding, residual, attention and logits"},
    {"minicpm", "MiniCPM's scaled embedding and residual"},
    {"olmo", "OLMo's norms"},
    {"cohere", "Cohere's parallel layers and LayerNorm"},
    {"command", "Cohere's parallel layers and LayerNorm"},
    {"bert", "an encoder"},
    {"t5", "an encoder"},
    {"eagle", "a draft head that reads another model's states"},
};

int config__refuse_arch(const char *name, size_t n, struct err *e) {
    char lower[64];
    size_t k = n < sizeof lower - 1 ? n : sizeof lower - 1;
    for (size_t i = 0; i < k; i++) lower[i] = (char)tolower((unsigned char)name[i]);
    lower[k] = 0;
    const char *lacks = NULL;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals && !lacks; i++)
        if (strstr(lower, refusals[i].part)) lacks = refusals[i].lacks;
    return err_raise(
        e, E_UNSUPPORTED,
        "architecture '%.*s' is not supported: %s%s; supported are llama, mistral, qwen2, "
        "qwen3 and smollm3 (dense decoders)",
        (int)k, name, lacks ? "it needs " : "we do not know it", lacks ? lacks : "");
}

void config__set_name(struct model_config *c, const char *s, size_t n) {
    size_t to = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp = 0;
        int k = utf8_decode(s + i, n - i, &cp);
        bool is_good = k > 0, is_control = is_good && (cp < 0x20 || (cp >= 0x7f && cp < 0xa0));
        if (!is_good) k = 1;
        if (to + (size_t)k >= sizeof c->name) break;
        if (!is_control) memcpy(c->name + to, is_good ? s + i : "?", (size_t)k);
        to += is_control ? 0 : (size_t)k;
        i += (size_t)k;
    }
    c->name[to] = 0;
}

void config__set_rope_defaults(struct model_config *c) {
    c->rope_scaling = ROPE_NONE;
    c->rope_factor = 1;
    c->rope_low_freq_factor = 1;
    c->rope_high_freq_factor = 4;
    c->rope_beta_fast = 32;
    c->rope_beta_slow = 1;
    c->rope_attention_factor = 1;
    c->rope_original_context = 0;
}

int config__scaled_context(const struct model_config *c, int positions) {
    double stretched = positions;
    if (c->rope_scaling == ROPE_YARN)
        stretched = fmax(positions, (double)c->rope_original_context * c->rope_factor);
    if (c->rope_scaling == ROPE_LINEAR) stretched = positions * c->rope_factor;
    return stretched < MODEL_MAX_CONTEXT ? (int)stretched : MODEL_MAX_CONTEXT;
}

/* ---- Ranges ---- */

struct int_range {
    const char *name;
    long long value, lo, hi;
};

struct float_range {
    const char *name;
    double value, lo, hi;
};

static int check_ints(const struct int_range *r, size_t n, struct err *e) {
    for (size_t i = 0; i < n; i++)
        if (r[i].value < r[i].lo || r[i].value > r[i].hi)
            return err_raise(e, E_FORMAT, "%s is %lld, outside %lld..%lld", r[i].name, r[i].value,
                             r[i].lo, r[i].hi);
    return 0;
}

static int check_floats(const struct float_range *r, size_t n, struct err *e) {
    for (size_t i = 0; i < n; i++)
        if (!(r[i].value >= r[i].lo && r[i].value <= r[i].hi)) /* NaN too */
            return err_raise(e, E_FORMAT, "%s is %g, outside %g..%g", r[i].name, r[i].value,
                             r[i].lo, r[i].hi);
    return 0;
}

#define CHECK_INTS(r) check_ints((r), sizeof(r) / sizeof *(r), e)
#define CHECK_FLOATS(r) check_floats((r), sizeof(r) / sizeof *(r), e)

static int check_rope(const struct model_config *c, struct err *e) {
    const struct float_range floats[] = {
        {"rope base", c->rope_base, 1.001, 1e12},
        {"rope factor", c->rope_factor, 1e-3, 1e6},
        {"rope attention factor", c->rope_attention_factor, 1e-3, 1e3},
    };
    int rc = CHECK_FLOATS(floats);
    if (rc || c->rope_scaling == ROPE_NONE || c->rope_scaling == ROPE_LINEAR) return rc;
    const struct int_range original[] = {
        {"original context length", c->rope_original_context, 1, MODEL_MAX_CONTEXT}};
    const struct float_range llama3[] = {
        {"rope low_freq_factor", c->rope_low_freq_factor, 1e-3, 1e6},
        {"rope high_freq_factor", c->rope_high_freq_factor, 1e-3, 1e6},
    };
    const struct float_range yarn[] = {
        {"YaRN beta_slow", c->rope_beta_slow, 1e-3, 1e6},
        {"YaRN beta_fast", c->rope_beta_fast, c->rope_beta_slow, 1e6},
    };
    if ((rc = CHECK_INTS(original)) != 0) return rc;
    if (c->rope_scaling == ROPE_YARN) return CHECK_FLOATS(yarn);
    if ((rc = CHECK_FLOATS(llama3)) != 0) return rc;
    if (c->rope_high_freq_factor <= c->rope_low_freq_factor)
        return err_raise(e, E_FORMAT, "rope high_freq_factor %g is not above low_freq_factor %g",
                         c->rope_high_freq_factor, c->rope_low_freq_factor);
    return 0;
}

int model_config_check(const struct model_config *c, struct err *e) {
    const struct int_range ints[] = {
        {"number of layers", c->n_layers, 1, MODEL_MAX_LAYERS},
        {"hidden size", c->hidden, 1, MODEL_MAX_HIDDEN},
        {"feed-forward size", c->ffn, 1, MODEL_MAX_FFN},
        {"number of query heads", c->n_heads, 1, MODEL_MAX_HEADS},
        {"number of KV heads", c->n_kv_heads, 1, c->n_heads},
        {"head dimension", c->head_dim, 2, MODEL_MAX_HEAD_DIM},
        {"vocabulary size", c->vocab, 1, MODEL_MAX_VOCAB},
        {"context length", c->context, 1, MODEL_MAX_CONTEXT},
        {"rope dimension", c->rope_dim, 2, c->head_dim},
        {"number of head rows", c->n_head, 1, c->vocab},
    };
    const struct float_range floats[] = {{"norm epsilon", c->norm_eps, 1e-12, 0.1}};
    int rc = CHECK_INTS(ints);
    if (rc == 0) rc = CHECK_FLOATS(floats);
    if (rc) return rc;
    if (c->n_heads % c->n_kv_heads)
        return err_raise(e, E_FORMAT, "%d query heads are no multiple of %d KV heads", c->n_heads,
                         c->n_kv_heads);
    if (c->n_heads / c->n_kv_heads > KERN_MAX_GROUP)
        return err_raise(e, E_UNSUPPORTED, "%d query heads a KV head; %d is the limit",
                         c->n_heads / c->n_kv_heads, KERN_MAX_GROUP);
    if (c->rope_dim % 2) return err_raise(e, E_FORMAT, "rope dimension %d is odd", c->rope_dim);
    return check_rope(c, e);
}
