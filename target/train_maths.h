#ifndef TANDEM_TARGET_TRAIN_MATHS_H
#define TANDEM_TARGET_TRAIN_MATHS_H

/* Private: scores, losses and gradients of scorers. train_maths.c is compiled once for each
 * instruction set in f32, which trains, and once in double, which the gradient check reads: one
 * text, so the check covers what trains. `real` below is the type of the table.
 *
 * Parameters lie in one array, weights transposed:
 *   LATE  a [H][D], b [H][D]; D = heads x head_dim
 *   MLP   w1 [2H][W], b1 [W], w2 [W], b2 [1], then, with a LayerNorm, its weight [2H], bias [2H] */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "target/train.h"

/* Samples of one window in `real`. */
struct train_place {
    const void *query;       /* [n_queries][H] normed, the newest last */
    int n_queries;           /* 1..KERN_STATE_QUERIES */
    int first, n;            /* blocks first..first + n - 1 are scored */
    const float *label;      /* [n] sums to 1 */
    const uint8_t *positive; /* [n] 1: one of the best by label */
};
struct train_item {
    const void *rep; /* normed: LATE [4 n_blocks][H] quarters, MLP [n_blocks][H] */
    int n_blocks, n_places;
    const struct train_place *place;
    double weight; /* of a place in the batch's loss */
};

struct train_maths {
    const char *isa;
    size_t real_bytes;
    size_t (*scratch_bytes)(const struct target_train_shape *s, int n_blocks);
    /* The weighted sum of the places' losses. grad (NULL: not wanted) [n_params] is overwritten;
     * scores (NULL): real [n_places][n_blocks], of place p's block b at p * n_blocks + b. */
    double (*item)(const struct target_train_shape *s, const void *params,
                   const struct train_item *item, void *scratch, void *grad, void *scores);
};

extern const struct train_maths train_maths_plain, train_maths_avx2, train_maths_avx512,
    train_maths_double;
/* The best that runs here, in f32. */
const struct train_maths *target__train_maths(void);

size_t target__train_n_params(const struct target_train_shape *s);

#endif
