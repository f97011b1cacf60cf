#ifndef TANDEM_TARGET_SCORER_H
#define TANDEM_TARGET_SCORER_H

/* A trained scorer of blocks as a file (docs/scorer-format.md): safetensors whose metadata says for
 * which model, select layer and blocks it was trained. Read as hostile bytes; what was read is held
 * against the model before its weights go to a backend. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "target/target.h"

struct err;
struct model_config;
struct target_scorer; /* one in a backend's memory */

enum {
    TARGET_SCORER_MAX_HEADS = 64,
    TARGET_SCORER_MAX_HEAD_DIM = 1024,
    TARGET_SCORER_MAX_WIDTH = 65536,
    TARGET_SCORER_MAX_BYTES = 1 << 30, /* of all weights */
    TARGET_SCORER_RECIPE = 512,
};

/* A file's content. The fields above the weights decide which of these there are and how long they
 * are; others are NULL. */
struct target_scorer_file {
    enum kern_score kind;
    int layer;                 /* whose entering state is noted: the select layer, 1 or more */
    int hidden;                /* of the model */
    int n_heads;               /* LATE; 0 elsewhere */
    int head_dim;              /* LATE */
    int width;                 /* MLP */
    int n_queries;             /* 1..KERN_STATE_QUERIES */
    bool normed;               /* as in kern_scorer */
    bool by_first;             /* not LATE */
    bool has_layernorm;        /* MLP */
    int block;                 /* tokens of a block, 64 */
    double smoothing;          /* [0, 1] of the neighbours' mean is added to a score; 0: off */
    uint64_t fingerprint;      /* model_source_fingerprint of the target */
    struct target_curve curve; /* calibrated for it; n 0: none */
    char recipe[TARGET_SCORER_RECIPE]; /* how it was trained, for people; "": not said */

    float *a, *b;               /* LATE: [n_heads * head_dim][hidden] */
    float *ln_weight, *ln_bias; /* MLP with LayerNorm: [2 hidden] */
    float *w1, *b1, *w2, *b2;   /* MLP: [width][2 hidden], [width], [width], [1] */
};

/* A new file of `shape`'s fields with weights of zero (training fills them). E_RANGE names a field
 * that is out of range. */
int target_scorer_make(struct target_scorer_file **out, const struct target_scorer_file *shape,
                       struct err *e);
/* Safe on NULL. */
void target_scorer_free(struct target_scorer_file *f);

/* Read a file; the error names it, and the key or tensor that is wrong. Weights may still be no
 * numbers: target_scorer_check says so. */
int target_scorer_read(struct target_scorer_file **out, const char *path, struct err *e);
/* The same from bytes (tests, fuzzing). */
int target_scorer_read_bytes(struct target_scorer_file **out, const uint8_t *data, size_t n,
                             struct err *e);

/* Write beside `path` and rename over it. Equal content, equal bytes. E_RANGE as in make; E_IO with
 * the path. */
int target_scorer_write(const char *path, const struct target_scorer_file *f, struct err *e);

/* Is it a scorer of this model? E_INVALID names what differs, with both values: the fingerprint
 * (model_source_fingerprint), the hidden size, the layer, the block; E_NUMERIC a weight that is NaN
 * or infinite. */
int target_scorer_check(const struct target_scorer_file *f, const struct model_config *c,
                        uint64_t fingerprint, struct err *e);

/* ---- On a backend ---- */

/* A selector by states that needs no file: mean, minmax, bound. cols: the model's width. */
struct kern_scorer target_scorer_plain(int selector, int cols);

/* What the operation is told of it, without weights: enough to ask for scratch. */
struct kern_scorer target_scorer_shape(const struct target_scorer_file *f);

/* Bring the weights to k's memory, at start: it allocates and waits. The file may be freed. */
int target_scorer_load(struct target_scorer **out, const struct target_scorer_file *f,
                       struct kern *k, struct err *e);
const struct kern_scorer *target_scorer_kern(const struct target_scorer *s);
size_t target_scorer_bytes(const struct target_scorer *s); /* of the backend's memory */
/* What of it load will take, from a file alone. */
size_t target_scorer_file_bytes(const struct target_scorer_file *f);
/* Safe on NULL. */
void target_scorer_close(struct target_scorer *s);

#endif
