#ifndef TANDEM_MODEL_H
#define TANDEM_MODEL_H

/* A dense decoder ready to run on a backend: weights packed once, a forward pass over rows of many
 * sequences. Draft and target are two of these; the target is handed another attention plan (block
 * lists), nothing else. This is the folder's public header; it brings the others. */

#include "kernels/kernels.h"
#include "model/chat.h"
#include "model/config.h"
#include "model/gguf.h"
#include "model/tokenizer.h"

struct err;
struct model;
struct model_source; /* model/source.h */

/* What a draft file may leave to its target (keys tandem.draft.*, docs/draft-format.md): the input
 * embedding, the output head's rows, the tokenizer. NULL where a model stands alone. */
struct model_borrow {
    const struct model *target;            /* its packed embedding is shared; NULL while planning */
    const struct model_source *target_src; /* still open: head rows are packed from its file */
};

/* Capacities that buffers are sized for. */
struct model_caps {
    int max_rows;   /* rows of a pass, both classes together */
    int max_seqs;   /* sequences of a pass */
    int max_blocks; /* entries of a block list */
    int max_logits; /* rows that need logits in a pass */
};

/* Bytes of packed weights, and of workspace for `caps`, on backend k. From headers alone.
 * E_UNSUPPORTED where the backend cannot multiply a type that the file holds (named). */
int model_weight_bytes(const struct model_source *src, const struct model_borrow *borrow,
                       const struct kern *k, size_t *out, struct err *e);
int model_workspace_bytes(const struct model_config *c, const struct kern *k,
                          const struct model_caps *caps, size_t *out, struct err *e);

/* Pack all weights of `src` into one reservation of backend k and carve the workspace. progress
 * (may be NULL) sees bytes of weights done. The source may be closed afterwards; k must outlive the
 * model, and so must the target of a `borrow`. E_INVALID where the file borrows and borrow is NULL,
 * or where the target's embedding is not the one that the file was made with. */
int model_open(struct model **out, const struct model_source *src,
               const struct model_borrow *borrow, struct kern *k, const struct model_caps *caps,
               void (*progress)(void *arg, size_t done, size_t total), void *arg, struct err *e);
void model_close(struct model *m);

const struct model_config *model_get_config(const struct model *m);
size_t model_reserved_bytes(const struct model *m); /* weights and workspace */

/* A run of layers whose KV lies in pages of one class, with the lists that its rows read. */
struct model_group {
    int first_layer, n_layers;
    void *arena; /* backend memory; page p at arena + p * 1024 */
    enum kern_dtype kv_dtype;
    const int32_t *slot_page; /* [n_rows] page that takes a row's K and V */
    struct kern_lists lists;
    size_t layer_lists; /* lists from one layer's to the next's; 0: all layers read the same */
    struct kern_attn_taps taps; /* zero: none */
    size_t mass_stride;         /* floats from one layer's part of taps.mass to the next's (of its
                                   quarter_mass four times as many); 0: the layers' maximum */
    size_t head_mass_stride;    /* floats from one layer's part of taps.head_mass to the next's; 0:
                                   the layers' masses are summed */
};

enum {
    MODEL_MAX_GROUPS = 3,
    MODEL_MAX_TAPS = 8, /* layers whose states one pass may give */
};

/* The residual stream entering a layer. */
struct model_tap {
    int layer;
    float *state; /* f32 [n_rows][H] */
};

/* One pass. All arrays are in backend memory. */
struct model_pass {
    struct kern_batch batch; /* its slot_page is ignored: see groups */
    int n_groups;
    struct model_group group[MODEL_MAX_GROUPS]; /* together they cover all layers in order */
    int n_logits;
    const int32_t *logit_row; /* [n_logits] rows whose logits are wanted */
    float *logits;            /* f32 [n_logits][logits_stride] */
    size_t logits_stride;     /* >= config.n_head */
    int n_taps;
    struct model_tap tap[MODEL_MAX_TAPS];
    float *tap_final; /* f32 [n_logits][H]: state after the last norm; NULL: not wanted */
};

/* Run the pass: embedding, layers, head. Enqueues on the backend; see kernels.h for what holds of
 * bits. */
int model_forward(struct model *m, const struct model_pass *p, struct err *e);

/* What the rows of a pass of one sequence pay to the blocks of a group's lists in the group's first
 * layer, by its taps, and nothing else: row i enters the layer with the state of row (first + i) %
 * n of `ring` (f32 [n][H], backend memory), at the pass's position of it. At most KERN_BLOCK
 * generated rows of consecutive positions. No page is written: the rows' own K and V must be in
 * theirs. */
int model_look(struct model *m, const struct model_pass *p, int group, const float *ring, int n,
               int first, struct err *e);

/* The head's rows: config.n_head of them. Row i is token ids[i] (backend memory, ascending), NULL:
 * row = id. */
int model_n_head(const struct model *m);
const int32_t *model_head_ids(const struct model *m);

/* The tokenizer that `src` brings. Random weights of a config alone bring none and get the one of
 * tokenizer_open_bytes, as large as the head. Errors name the path. */
int model_open_tokenizer(struct tokenizer **out, const struct model_source *src, struct err *e);

/* May `draft` propose for `target`? Same tokenizer entries and special ids (padding of the
 * vocabulary does not count), or a draft that borrows and was made for this embedding. E_INVALID
 * names the first difference with both values. */
int model_check_pair(const struct model_source *target, const struct tokenizer *target_tokenizer,
                     const struct model_source *draft, struct err *e);

/* Embedding and head weights; a draft that borrows shows its target's. */
const struct kern_weight *model_embedding(const struct model *m);
const struct kern_weight *model_head(const struct model *m);

/* Shape of one KV page of `n_layers` layers of this model: [layer][K, V][kv head], each of
 * model_kv_head_bytes. Byte offsets inside a page for a layer of the group: */
static inline size_t model_kv_head_bytes(const struct model_config *c, enum kern_dtype kv) {
    return KERN_BLOCK * kern_kv_token_bytes(kv, c->head_dim);
}
static inline size_t model_kv_offset(const struct model_config *c, int layer_in_group, bool value,
                                     enum kern_dtype kv) {
    size_t plane = (size_t)c->n_kv_heads * model_kv_head_bytes(c, kv);
    return (2 * (size_t)layer_in_group + (value ? 1 : 0)) * plane;
}

#endif
