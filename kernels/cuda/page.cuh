#ifndef TANDEM_KERNELS_CUDA_PAGE_CUH
#define TANDEM_KERNELS_CUDA_PAGE_CUH

/* How one head's K or V of one block lies in its page: the plane [64 tokens][head_dim] of 2-byte
 * elements cut into columns of 128 bytes (64 or 32 where head_dim asks for it), one column after
 * the other, each [64 tokens][width]; a token's row of a column in chunks of 16 bytes whose order
 * depends on the token. That is the order that wgmma's swizzle of that width expects of a matrix in
 * shared memory, so a whole plane (contiguous: one bulk copy) can be multiplied as it lies; and the
 * 8 rows of an 8 x 8 matrix are read without bank conflicts (ldmatrix, with or without .trans), for
 * every head_dim that is a multiple of 16. K and V have the same order. */

#include <stdint.h>

#include "kernels/kernels.h"

/* Chunks of a column's row: the largest power of two up to 8 that divides those of the head. */
__host__ __device__ static constexpr inline int page_chunks(int head_dim) {
    int n = head_dim / 8, p = n & -n;
    return p > 8 ? 8 : p;
}
/* Bytes of a column's row, and of a column. */
__host__ __device__ static constexpr inline int page_width(int head_dim) {
    return page_chunks(head_dim) * 16;
}
__host__ __device__ static constexpr inline int page_column(int head_dim) {
    return page_width(head_dim) * KERN_BLOCK;
}
/* What token t's chunks of a column are exchanged by (exclusive or). Rows of p chunks repeat their
 * banks every 8 / p tokens: those take turns. */
__host__ __device__ static constexpr inline int page_turn(int t, int head_dim) {
    int p = page_chunks(head_dim);
    return t / (8 / p) & (p - 1);
}
/* Byte offset of chunk c of token t inside the head's plane. */
__host__ __device__ static constexpr inline int page_chunk(int t, int c, int head_dim) {
    int p = page_chunks(head_dim);
    return c / p * page_column(head_dim) + t * page_width(head_dim) +
           (c % p ^ page_turn(t, head_dim)) * 16;
}
/* Offset of element i of token t, in elements. */
__host__ __device__ static constexpr inline int page_at(int t, int i, int head_dim) {
    return page_chunk(t, i / 8, head_dim) / 2 + i % 8;
}

#endif
