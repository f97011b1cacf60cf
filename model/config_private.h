#ifndef TANDEM_MODEL_CONFIG_PRIVATE_H
#define TANDEM_MODEL_CONFIG_PRIVATE_H

/* What both readers of a config share: the table of families, how others are refused, and the rules
 * that follow from scaling. */

#include <stddef.h>

#include "model/config.h"

/* A supported family and what its own code fixes without telling the file. */
struct config__family {
    const char *arch;
    const char *gguf_arch; /* NULL: comes as another one's */
    const char *hf_class;
    const char *hf_type; /* model_type */
    bool qkv_bias, qk_norm;
    bool gguf_interleaved; /* the converter permutes Q and K for pairs (2i, 2i+1) */
    bool hf_tied;          /* tie_word_embeddings where the key is absent */
    double hf_rope_base;   /* rope_theta where the key is absent */
    int hf_head_dim;       /* head_dim where the key is absent; 0: hidden / heads */
};

extern const struct config__family config__families[];
extern const size_t config__n_families;

/* E_UNSUPPORTED for an architecture (either naming) with what we would need for it. */
int config__refuse_arch(const char *name, size_t n, struct err *e);

/* Tokens that a model may be asked for: a linear or YaRN factor stretches what the file calls its
 * positions, as serving engines read such files. */
int config__scaled_context(const struct model_config *c, int positions);

/* YaRN's magnitude correction 0.1 m ln(s) + 1, 1 where s <= 1. */
double config__yarn_mscale(double scale, double m);

/* The keys tandem.draft.* of a GGUF: does the file borrow its target's embedding, and which ids the
 * head has (after the vocabulary is known). E_FORMAT with key and value. */
int config__read_borrowing(struct model_config *c, const struct gguf *g, struct err *e);
int config__read_head_ids(struct model_config *c, const struct gguf *g, struct err *e);

/* Of a file that passed both: the ids of a head with n < vocab rows; the wanted XXH3-64. */
void config__copy_head_ids(const struct gguf *g, int32_t *out, int n);
int config__embedding_hash(const struct gguf *g, uint64_t *out, struct err *e);

/* c->name from what a file says: whole characters, none that would command a terminal, '?' for
 * bytes that are no UTF-8. */
void config__set_name(struct model_config *c, const char *s, size_t n);

/* No rope scaling: the neutral values of every field. */
void config__set_rope_defaults(struct model_config *c);

#endif
