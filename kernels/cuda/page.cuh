#ifndef TANDEM_KERNELS_CUDA_PAGE_CUH
#define TANDEM_KERNELS_CUDA_PAGE_CUH

/* How one head's K or V of one block lies in its page: [64 tokens][head_dim], 2-byte elements, a
 * token's row cut into chunks of 16 bytes whose order depends on the token, so that a whole plane
 * (contiguous: one bulk copy) is free of bank conflicts in shared memory when the 8 rows of an
 * 8 x 8 matrix are read together (ldmatrix, with or without .trans), for every head_dim that is a
 * multiple of 16. K and V have the same order. */

#include <stdint.h>

/* Place of chunk c (of head_dim / 8) in the row of token t. With p the largest power of two up to 8
 * that divides the number of chunks, rows repeat their banks every 8 / p tokens: those take turns
 * inside groups of p chunks. */
__host__ __device__ static inline int page_chunk(int t, int c, int head_dim) {
    int n = head_dim / 8, p = n & -n;
    if (p > 8) p = 8;
    int every = 8 / p; /* 1, 2, 4 or 8 */
    return c ^ ((t / every) & (p - 1));
}
/* Element offset inside the head's plane. */
__host__ __device__ static inline int page_at(int t, int i, int head_dim) {
    return t * head_dim + page_chunk(t, i / 8, head_dim) * 8 + i % 8;
}

#endif
