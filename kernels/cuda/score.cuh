#ifndef TANDEM_KERNELS_CUDA_SCORE_CUH
#define TANDEM_KERNELS_CUDA_SCORE_CUH

/* What score.cu and score_product.cu share: where a sequence's states lie, and the one large
 * product. */

#include "kernels/cuda/cuda.cuh"

struct score_planes {
    const uint8_t *base; /* at the first page's plane */
    size_t page_stride;
    const int32_t *page;
    int n_blocks, n_tokens, cols;
};
__device__ static inline const float *score_plane(const score_planes &p, int block) {
    return (const float *)(p.base + (size_t)p.page[block] * p.page_stride);
}
/* Tokens of a quarter that were noted. */
__device__ static inline int score_quarter_tokens(const score_planes &p, int block, int quarter) {
    int n = p.n_tokens - block * KERN_BLOCK - quarter * KERN_QUARTER;
    return max(0, min(n, (int)KERN_QUARTER));
}

enum { SCORE_TILE = 128 }; /* rows and outputs of a block of the product */

/* A row's two numbers, and a unit's four: y = d (sum + query - mean * weight) + bias, then second *
 * GELU(y). */
struct score_row {
    float mean, d;
};
struct score_unit {
    float query, weight, bias, second;
};

/* out = x w^T in f32's accuracy. LATE: rows are quarters of blocks as they lie in their planes, out
 * [4 n_blocks][n]. MLP: rows are x's, out[row][tile] the sum of the tile's units' outputs. */
struct score_product {
    int rows, n, cols;
    score_planes planes; /* LATE */
    const float *x;      /* MLP: [rows][cols] */
    const float *w;
    size_t w_stride; /* floats */
    const score_row *row;
    const score_unit *unit;
    float *out;
};
int cuda_score_product(struct cuda_ctx *c, bool late, bool aligned, const score_product &p);

#endif
