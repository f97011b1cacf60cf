#ifndef TANDEM_MODEL_CONFIG_H
#define TANDEM_MODEL_CONFIG_H

/* What a dense decoder is, in numbers: read from a GGUF header or a Hugging Face config.json,
 * checked before any weight is touched. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;
struct gguf;

enum {
    MODEL_MAX_LAYERS = 256,
    MODEL_MAX_HIDDEN = 65536,
    MODEL_MAX_FFN = 262144,
    MODEL_MAX_HEADS = 512,
    MODEL_MAX_HEAD_DIM = 256,
    MODEL_MAX_VOCAB = 1 << 20,
    MODEL_MAX_CONTEXT = 1 << 24,
};

enum rope_scaling { ROPE_NONE, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

struct model_config {
    char arch[32];  /* "llama", "qwen2", "qwen3", "smollm3", "mistral" */
    char name[128]; /* for people */
    int n_layers;
    int hidden;     /* H */
    int ffn;        /* F */
    int n_heads;    /* query heads */
    int n_kv_heads; /* divides n_heads */
    int head_dim;   /* explicit, not always H / n_heads */
    int vocab;      /* rows of the embedding and head, padded ones included */
    int context;    /* tokens the model may be asked for: its positions, stretched by a
                     * linear or YaRN factor, cut to the sliding window where it has one
                     * (inside it full attention is the same; Mistral v0.1: 4,096) */
    float norm_eps;
    bool tied;             /* the head is the embedding, or rows of it */
    bool qkv_bias;         /* Qwen2 */
    bool qk_norm;          /* Qwen3: RMSNorm per head before rope */
    bool rope_interleaved; /* pairs (2i, 2i+1), as GGUF llama and smollm3 files are, whose
                            * converter permutes Q and K; else (i, i + d/2) */
    int rope_dim;          /* leading dims of a head that turn, even */
    double rope_base;
    enum rope_scaling rope_scaling;
    double rope_factor;
    double rope_low_freq_factor, rope_high_freq_factor; /* llama3 */
    double rope_beta_fast, rope_beta_slow;              /* yarn */
    double rope_attention_factor; /* yarn: multiplies cos and sin; 1 elsewhere */
    int rope_original_context;    /* llama3, yarn */
    bool borrows_embedding;       /* a draft file without token_embd: the target's serves */
    bool borrows_head;            /* and its head's rows are the target's (of n_head ids) */
    int n_head; /* rows of the head: vocab, or fewer where a draft lists token ids */
    uint8_t rope_skip[MODEL_MAX_LAYERS]; /* 1: the layer has no rope (SmolLM3) */
};

/* From the "<arch>.*" keys. E_UNSUPPORTED names the architecture or feature that we lack. */
int model_config_from_gguf(struct model_config *c, const struct gguf *g, struct err *e);

/* From config.json (and nothing else). Same errors. `json` need not be NUL-terminated. */
int model_config_from_json(struct model_config *c, const char *json, size_t n, struct err *e);

/* Ranges and divisibility, the same for both sources. E_FORMAT with name and value. */
int model_config_check(const struct model_config *c, struct err *e);

/* Inverse frequency of each rotated pair, [rope_dim / 2] f32, scaling applied; `factors` (or NULL)
 * are GGUF's rope_freqs.weight, which divide. */
void model_rope_frequencies(const struct model_config *c, const float *factors, float *out);

#endif
