#ifndef TANDEM_MODEL_PRIVATE_H
#define TANDEM_MODEL_PRIVATE_H

/* What model.c lays out and forward.c reads. Every pointer is into one reservation of the backend.
 */

#include "model/model.h"

enum { MODEL_MAX_PARTS = 3 };

/* Matrices that share an input and write side by side: one when the file's types agree (they are
 * packed as one), several otherwise. */
struct model_linear {
    int n_parts;
    struct kern_weight part[MODEL_MAX_PARTS];
    int offset[MODEL_MAX_PARTS]; /* first output column of each part */
    int rows;                    /* outputs of all parts */
};

struct model_layer {
    const float *attn_norm;                /* [H] */
    struct model_linear qkv;               /* [(n_heads + 2 n_kv_heads) * head_dim][H] */
    const float *q_bias, *k_bias, *v_bias; /* or NULL */
    const float *q_norm, *k_norm;          /* [head_dim] or NULL */
    struct model_linear o;                 /* [H][n_heads * head_dim] */
    const float *ffn_norm;                 /* [H] */
    struct model_linear gate_up;           /* [2F][H], gate first */
    struct model_linear down;              /* [H][F] */
};

struct model_workspace {
    float *x;          /* [max_rows][H] residual stream */
    float *delta;      /* [max_rows][H] what the last product adds to it */
    float *qkv;        /* [max_rows][(n_heads + 2 n_kv_heads) * head_dim] */
    float *heads;      /* [max_rows][n_heads * head_dim] attention's output */
    float *gate_up;    /* [max_rows][2F] */
    float *last;       /* [max_logits][H] */
    float *last_delta; /* [max_logits][H] */
    void *attn_scratch;
    struct kern_act act;
};

struct model {
    struct model_config config;
    struct kern *k;
    struct model_caps caps;
    struct kern_weight embedding; /* [vocab][H]; the target's where it is borrowed */
    struct kern_weight head;      /* [n_head][H]; the embedding where tied and whole */
    const int32_t *head_ids;      /* [n_head]; NULL: row = id */
    const float *out_norm;        /* [H] */
    const float *inv_freq;        /* [rope_dim / 2] */
    struct model_layer *layers;   /* host, [n_layers] */
    struct model_workspace ws;
    void *reserved;
    size_t reserved_bytes;
};

struct tensor_view;

/* ---- dummy.c: random weights (model_source_open_dummy) ---- */

struct threads;

/* Write v->bytes that stand for v's in the file: the same for any number of threads. */
void model__dummy_fill(const struct tensor_view *v, void *dst, struct threads *t);

/* ---- borrow.c: a draft and its target, see docs/draft-format.md ---- */

/* Does `src` find in `target` (NULL: there is none) what it borrows? From headers; 0 where it
 * borrows nothing. E_INVALID with both values. */
int model__check_borrow(const struct model_source *src, const struct model_source *target,
                        struct err *e);

/* Is the target's embedding, byte for byte, the one that the draft was made for? Reads it all; 0
 * where only the target's headers are there. After model__check_borrow. */
int model__check_embedding(const struct model_source *src, const struct model_source *target,
                           struct err *e);

/* The tensor that the head is, or whose rows it has: the file's own output or (tied) embedding, or
 * the target's. */
int model__find_head(const struct model_source *src, const struct model_borrow *borrow,
                     struct tensor_view *out, struct err *e);

/* Copy the file bytes of the rows `ids` into *out (heap, the caller frees). */
int model__gather_rows(const struct tensor_view *v, const int32_t *ids, int n, void **out,
                       struct err *e);

#endif
