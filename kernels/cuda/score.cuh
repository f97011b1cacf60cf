#ifndef TANDEM_KERNELS_CUDA_SCORE_CUH
#define TANDEM_KERNELS_CUDA_SCORE_CUH

/* What score.cu shares with score_late.cu and score_product.cu: where a sequence's states lie, and
 * the one large product of each kind. */

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

enum { SCORE_TILE = 128 }; /* rows and outputs of a block of a product */

/* 16 bytes on their way to shared memory (cp.async): the floats of src[0..n_floats), zeros behind
 * them. ALIGNED: src is, to 16 bytes, and n_floats is 4 or more, or none. */
template <bool ALIGNED>
__device__ static inline void score_copy(uint32_t dst, const float *src, int n_floats) {
    if constexpr (ALIGNED) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                     "r"(n_floats > 0 ? 16 : 0)
                     : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst + 4 * i),
                         "l"(i < n_floats ? src + i : src), "r"(i < n_floats ? 4 : 0)
                         : "memory");
    }
}

/* A row's two numbers, and a unit's four: y = d (sum + query - mean * weight) + bias, then second *
 * GELU(y). */
struct score_row {
    float mean, d;
};
struct score_unit {
    float query, weight, bias, second;
};

/* MLP: out[row][tile] = the sum of what the tile's units give for row of x, x w^T in f32's accuracy
 * before. */
struct score_product {
    int rows, n, cols;
    const float *x; /* [rows][cols] */
    const float *w;
    size_t w_stride; /* floats */
    const score_row *row;
    const score_unit *unit;
    float *out;
};
int cuda_score_product(struct cuda_ctx *c, bool aligned, const score_product &p);

/* ---- LATE ---- */

enum { SCORE_STEP = 32 }; /* columns that are multiplied before they join a total */
/* Halves from one row of the split B to the next; behind cols they are zeros. */
__host__ __device__ static inline int score_stride(int cols) {
    return (cols + SCORE_STEP - 1) / SCORE_STEP * SCORE_STEP;
}

/* A power of two that brings numbers of up to `most` below 2^15 and above 2^14 where f32 allows,
 * and the one that takes it off. */
struct score_scale {
    float up, down;
};
__device__ static inline score_scale score_scale_of(float most) {
    const uint32_t e = max(__float_as_uint(most) >> 23, 15u);
    return {__uint_as_float((268 - e) << 23), __uint_as_float((e - 14) << 23)};
}

/* out[4 n_blocks][n] = quarters' sums as they lie in their planes times B^T in f32's accuracy, and
 * row[4 n_blocks], what norming them needs: r = d * sum - mean. */
struct score_late_product {
    score_planes planes;
    int n;
    bool normed;
    const __half *split; /* [2][n][score_stride(cols)]: B times powers of two, hi and lo */
    const float *unit;   /* [n]: what takes them off */
    score_row *row;
    float *out;
};
/* E_UNSUPPORTED where the device has less shared memory than the tiles need. */
int cuda_score_late_product(struct cuda_ctx *c, bool aligned, const score_late_product &p);

#endif
