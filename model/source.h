#ifndef TANDEM_MODEL_SOURCE_H
#define TANDEM_MODEL_SOURCE_H

/* One view over the files that a model comes in: a GGUF file, or a Hugging Face folder (config.json
 * and safetensors, sharded or not). Opening checks everything that can be told from headers: the
 * config, that every tensor which the architecture needs is there with the right shape and a type
 * that we can compute with, and that no tensor is left over that we would silently ignore. Weights
 * stay in the files' mappings until they are packed (model_open); then close the source. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

struct err;
struct gguf;
struct model_source;

/* What a tensor is for. The first four belong to the model, the others to each layer. */
enum tensor_role {
    TENSOR_TOKEN_EMBD,  /* [vocab][H]; none where config.borrows_embedding */
    TENSOR_OUTPUT,      /* [n_head][H]; none where config.tied or config.borrows_head */
    TENSOR_OUTPUT_NORM, /* [H] */
    TENSOR_ROPE_FREQS,  /* [rope_dim / 2], optional: factors for model_rope_frequencies */
    TENSOR_ATTN_NORM,   /* [H] */
    TENSOR_ATTN_Q,      /* [n_heads head_dim][H] */
    TENSOR_ATTN_K,      /* [n_kv_heads head_dim][H] */
    TENSOR_ATTN_V,      /* [n_kv_heads head_dim][H] */
    TENSOR_ATTN_O,      /* [H][n_heads head_dim] */
    TENSOR_Q_BIAS,      /* where config.qkv_bias */
    TENSOR_K_BIAS,
    TENSOR_V_BIAS,
    TENSOR_Q_NORM, /* [head_dim] where config.qk_norm */
    TENSOR_K_NORM,
    TENSOR_FFN_NORM, /* [H] */
    TENSOR_FFN_GATE, /* [F][H] */
    TENSOR_FFN_UP,   /* [F][H] */
    TENSOR_FFN_DOWN, /* [H][F] */
    TENSOR_N_ROLES
};

/* One tensor as it lies in the file, row-major, rows outputs and cols inputs of y = W x; a vector
 * has one row. */
struct tensor_view {
    const char *name; /* the file's name for it; lives as long as the source */
    enum kern_dtype dtype;
    int rows, cols;
    const void *data; /* file bytes, possibly unaligned; NULL where the source has headers only */
    size_t bytes;
    enum tensor_role role;
    int layer; /* 0 for the model's own */
};

/* Open `path`: a GGUF file or a Hugging Face folder. Errors name file, key or tensor, and value.
 * E_UNSUPPORTED for PyTorch checkpoints, with what to do instead. */
int model_source_open(struct model_source **out, const char *path, struct err *e);

/* The same for planning: weights need not be there. Also takes a config.json (or a folder that
 * holds only that: shapes follow from it, the type is its torch_dtype) and the beginning of a GGUF
 * file. */
int model_source_plan_only(struct model_source **out, const char *path, struct err *e);

/* The same for random weights of these shapes (--load-format dummy): nothing but headers is read,
 * and model_open makes the weights up. All matrices are of type `type`; KERN_N_DTYPES: as the file
 * or config says. The config's name ends in "(random weights)", so that whoever shows it says so.
 * E_UNSUPPORTED where a matrix's columns are no whole blocks of the type. */
int model_source_open_dummy(struct model_source **out, const char *path, enum kern_dtype type,
                            struct err *e);

/* Safe on NULL. Views and the GGUF handle end with it. */
void model_source_close(struct model_source *s);

const struct model_config *model_source_config(const struct model_source *s);
const char *model_source_path(const struct model_source *s); /* as given */
bool model_source_has_weights(const struct model_source *s);
bool model_source_is_dummy(const struct model_source *s);

/* The tensor of `role` in `layer` (0 for the model's own). E_NOT_FOUND where this model has none:
 * only possible for TOKEN_EMBD of a draft that borrows it, OUTPUT, ROPE_FREQS, biases and Q/K
 * norms, others were found by open. */
int model_source_find(const struct model_source *s, enum tensor_role role, int layer,
                      struct tensor_view *out, struct err *e);

/* All tensors that the model uses, in the order of roles and layers: for `info`, plan and loading.
 */
size_t model_source_n_tensors(const struct model_source *s);
const struct tensor_view *model_source_tensor_at(const struct model_source *s, size_t idx);
uint64_t model_source_n_params(const struct model_source *s);
size_t model_source_bytes(const struct model_source *s);

/* A draft's head of fewer rows than the vocabulary: the token id of each, [config.n_head]
 * ascending; NULL where the head is whole. Lives as long as the source. */
const int32_t *model_source_head_ids(const struct model_source *s);

/* XXH3-64 of the bytes of the embedding that a draft with config.borrows_embedding was made for; 0
 * for others. */
uint64_t model_source_embedding_hash(const struct model_source *s);

/* For the tokenizer: the GGUF (NULL for a folder), or the folder (NULL for a GGUF). */
const struct gguf *model_source_gguf(const struct model_source *s);
const char *model_source_folder(const struct model_source *s);

/* The chat template's text, NULL where the model brings none. */
const char *model_source_chat_template(const struct model_source *s, size_t *n);

/* 64 bits over the headers and the first bytes of each tensor (where they are there): tells one
 * model file from another, not proof against an adversary. */
uint64_t model_source_fingerprint(const struct model_source *s);

#ifdef __cplusplus
}
#endif

#endif
