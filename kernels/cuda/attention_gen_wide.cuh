#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_WIDE_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_WIDE_CUH

/* The products of attention_gen.cu by wgmma, for heads of 128 on sm_90: the four computing warps
 * are one warpgroup, a page's 64 tokens are the 64 rows of its scores, and of o each warp gets the
 * dimensions that it has with mma.m16n8k16, lane by lane. K, V, queries and weights are read from
 * shared memory by the tensor cores themselves: neither instructions nor registers are spent on
 * fragments, so 24 queries and a node that waits fit 128 registers. */

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    WIDE_DIM = 128,
    WIDE_TILE = 1024,               /* bytes of 8 rows of a column */
    WIDE_COLUMN = KERN_BLOCK * 128, /* of 64 dimensions of a plane */
};

/* Whether a page's sums go in the order of wgmma's products (scores: two chains, over half of the
 * dimensions each; weights: of 16 tokens each, then those), and whether these make them: a tile of
 * 8 queries is quicker by mma.m16n8k16, whose products add up the same on an H200: no document says
 * so, tests/test_cuda_attention.c does (one row's bits against those of several). */
template <int D, bool EXACT> __device__ constexpr bool gen_wide_order() {
    return HAVE_WGMMA && EXACT && D == WIDE_DIM;
}
template <int D, bool EXACT, int N> __device__ constexpr bool gen_is_wide() {
    return gen_wide_order<D, EXACT>() && N > 1;
}

/* A matrix of rows of 128 bytes, 8 of them a tile, in shared memory: the low half of its
 * descriptor, to which bytes / 16 may be added. The other half is the same for all. */
__device__ static inline uint32_t wide_matrix(uint32_t addr) {
    return (uint32_t)matrix(addr, WIDE_COLUMN, WIDE_TILE, 1);
}

#if HAVE_WGMMA
#define TILE(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TILES_3(d) TILE(d, 0), TILE(d, 1), TILE(d, 2)
#define TILES_5(d) TILE(d, 0), TILE(d, 1), TILE(d, 2), TILE(d, 3), TILE(d, 4)
#define REGS_3 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define REGS_5 REGS_3 ",%12,%13,%14,%15,%16,%17,%18,%19"

/* d[64 x 8 n] (+)= a b, `bytes` into two wide_matrix; TURNED: a's columns are contiguous there. The
 * numbers name the operands behind d. */
#define WIDE_FOR(T, type, n, cols, x0, x1, x2, x3, x4)                                             \
    template <int TURNED>                                                                          \
    __device__ static inline void wide_product(T *, float(&d)[n][4], uint32_t a, int a_bytes,      \
                                               uint32_t b, int b_bytes, int add) {                 \
        uint32_t high = (uint32_t)(matrix(0, 0, WIDE_TILE, 1) >> 32);                              \
        asm volatile("{ .reg .pred p; .reg .b64 x, y; setp.ne.b32 p, %" #x3 ", 0;"                 \
                     " mov.b64 x, {%" #x0 ", %" #x2 "}; mov.b64 y, {%" #x1 ", %" #x2 "};"          \
                     " wgmma.mma_async.sync.aligned.m64n" #cols "k16.f32." type "." type           \
                     " {" REGS_##n "}, x, y, p, 1, 1, %" #x4 ", 0; }"                              \
                     : TILES_##n(d)                                                                \
                     : "r"(a + a_bytes / 16), "r"(b + b_bytes / 16), "r"(high), "r"(add),          \
                       "n"(TURNED));                                                               \
    }
WIDE_FOR(__half, "f16", 3, 24, 12, 13, 14, 15, 16)
WIDE_FOR(__half, "f16", 5, 40, 20, 21, 22, 23, 24)
WIDE_FOR(__nv_bfloat16, "bf16", 3, 24, 12, 13, 14, 15, 16)
WIDE_FOR(__nv_bfloat16, "bf16", 5, 40, 20, 21, 22, 23, 24)
#undef WIDE_FOR

/* Start K q^T of a page: x[0] over its first 64 dimensions, x[1] over the others. */
template <typename T, int N>
__device__ static inline void wide_scores(float (&x)[2][N][4], uint32_t k, uint32_t q) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int y = 0; y < 2; y++)
            wide_product<0>((T *)0, x[y], k, y * WIDE_COLUMN + i * 32, q,
                            y * N * WIDE_TILE + i * 32, i);
    wgmma_commit();
}
/* Start u = V^T w of a page, 64 dimensions each. */
template <typename T, int N>
__device__ static inline void wide_values(float (&u)[2][N][4], uint32_t v, uint32_t w) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KERN_BLOCK / 16; i++)
#pragma unroll
        for (int y = 0; y < 2; y++)
            wide_product<1>((T *)0, u[y], v, y * WIDE_COLUMN + i * 2 * WIDE_TILE, w, i * 32, i);
    wgmma_commit();
}
#endif

/* Tiles of weights, tokens x queries as wide_scores leaves them (16 tokens of this warp, as 16-bit
 * pairs of queries), into the matrix. to: of this lane, see wide_put_at. */
template <int M> __device__ static inline void wide_put(uint32_t to, const uint32_t (&w)[M][2]) {
#pragma unroll
    for (int i = 0; i + 1 < M; i += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + i * WIDE_TILE),
                     "r"(w[i][0]), "r"(w[i][1]), "r"(w[i + 1][0]), "r"(w[i + 1][1])
                     : "memory");
    if constexpr (M % 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                         to + (M - 1) * WIDE_TILE),
                     "r"(w[M - 1][0]), "r"(w[M - 1][1])
                     : "memory");
}
/* This lane's row of a matrix of weights for wide_put: of two tiles' two chunks of 8 tokens. */
__device__ static inline uint32_t wide_put_at(uint32_t weights, int warp, int lane) {
    return weights + lane / 16 * WIDE_TILE + page_chunk(lane % 8, warp * 2 + lane / 8 % 2, 64);
}

#endif
