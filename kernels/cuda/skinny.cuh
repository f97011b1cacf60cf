#ifndef TANDEM_KERNELS_CUDA_SKINNY_CUH
#define TANDEM_KERNELS_CUDA_SKINNY_CUH

/* What the three skinny kernels of 16-bit weights share: skinny_stream.cu (up to STREAM_MAX rows)
 * and skinny_few.cu (up to FEW_MAX), bound by the weights' bytes alone, and skinny_plain.cu (more).
 *
 * All give the same bits, for a sum has one order, whatever the shape and the number of rows: K in
 * blocks of 64 columns is cut into RANKS ranges (rank_begin), and each range into two chains, the
 * first and the second 32 columns of its blocks. A chain is added up block by block in one
 * accumulator, two mma.m16n8k16 a block. The result is the sum over the ranges of the first
 * chains, from the left, plus that of the second chains. */
#include "kernels/cuda/barrier.cuh"
#include "kernels/cuda/cuda.cuh"

enum {
    STREAM_MAX = 8,
    FEW_MAX = 32,
    BLOCK_COLS = 64,
    RANKS = 4,
    CHAINS = 2,                    /* of a range */
    SKINNY_WARPS = RANKS * CHAINS, /* of a block where each multiplies a chain */
};

/* Which product: types of W and x. Mixed ones (rare) are multiplied in f16. */
enum form { FORM_BF16, FORM_F16, FORM_W_BF16, FORM_X_BF16 };

struct skinny_args {
    const uint16_t *w; /* [rows16][stride] */
    const uint16_t *x; /* [n][stride] */
    float *out;
    int rows, rows16, stride;
    int n, chunk; /* rows of the call; rows of a pass (skinny_plain.cu) */
    int out_stride;
    int n_blocks;  /* of the whole K */
    int log_split; /* 2^.. blocks of a cluster share K (skinny_plain.cu) */
    int slots;     /* of a ring (skinny_few.cu, skinny_stream.cu) */
    int log_n;     /* 2^log_n >= n (skinny_stream.cu) */
};

/* skinny_stream.cu: whether the chip serves n rows so; W and x of one type. */
bool cuda_skinny_streams(const struct cuda_ctx *c, int n);
int cuda_skinny_stream(struct cuda_ctx *c, const struct skinny_args *a, bool bf16);
/* skinny_few.cu: n <= FEW_MAX. */
int cuda_skinny_few(struct cuda_ctx *c, const struct skinny_args *a, enum form form);

__host__ __device__ static inline int rank_begin(int n_blocks, int rank) {
    return n_blocks * rank / RANKS;
}

/* ---- Instructions ---- */

__device__ static inline void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ static inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ static inline void store_shared16(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ static inline void load_matrix4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
template <bool BF16>
__device__ static inline void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    if (BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ static inline void bf16_to_f16(uint32_t v[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __half2 h = __halves2half2(to_act_half(__uint_as_float(v[i] << 16)),
                                   to_act_half(__uint_as_float(v[i] & 0xffff0000u)));
        v[i] = *(uint32_t *)&h;
    }
}

/* For weights: 16 bytes that are read once. */
__device__ static inline uint64_t read_once_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ static inline void copy_once(uint32_t dst, const void *src, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst),
                 "l"(src), "l"(policy)
                 : "memory");
}

/* ---- The chains' sums of a pass meet ----
 *
 * As fragments lie, in `red`: [warp][M_TILES][N_TILES][lane][4], SKINNY_WARPS x M_TILES x N_TILES x
 * 512 bytes. Threads 0 .. 32 * SKINNY_WARPS - 1, all by barrier `bar`; tiles from tile_end on are
 * stored nowhere. */
template <int M_TILES, int N_TILES>
__device__ static inline void skinny_store_sums(const skinny_args &a, float *red, int tile,
                                                int tile_end, const float acc[M_TILES][N_TILES][4],
                                                int bar) {
    enum { FRAGMENTS = M_TILES * N_TILES, ALL = FRAGMENTS * 128, SUMMERS = 32 * SKINNY_WARPS };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
            ((float4 *)red)[(warp * FRAGMENTS + m * N_TILES + n) * 32 + lane] =
                *(const float4 *)acc[m][n];
    named_sync(bar, SUMMERS);
#pragma unroll
    for (int e = threadIdx.x; e < ALL; e += SUMMERS) {
        int at = e / 4 % 32, i = e % 4, m = e / 128 / N_TILES, n = e / 128 % N_TILES;
        int row = (tile + m) * 16 + at / 4 + i / 2 * 8, col = n * 8 + at % 4 * 2 + i % 2;
        float sum[CHAINS];
#pragma unroll
        for (int k = 0; k < CHAINS; k++) {
            sum[k] = red[k * ALL + e];
#pragma unroll
            for (int rank = 1; rank < RANKS; rank++) sum[k] += red[(rank * CHAINS + k) * ALL + e];
        }
        if (tile + m < tile_end && row < a.rows && col < a.n)
            a.out[(size_t)col * a.out_stride + row] = sum[0] + sum[1];
    }
}

#endif
