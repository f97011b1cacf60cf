/* The product of `mlp`: representatives of blocks times the first layer's weights, f32 in and out.
 *
 * Of 2,048 blocks and 4,096 columns it is 2,048 x 4,096 x 4,096 = 34 G multiply-adds. On an H200
 * plain FFMA would take 1.2 ms at its very peak. So the matrix units do it, in three products of
 * TF32: x = hi + lo with hi the upper 11 bits and lo the rest, x w = lo hi' + hi lo' + hi hi'; what
 * is left out is 2^-21 of a term (bf16 in three would leave 2^-16). The units add with truncation,
 * whose bias grows with every step: so a sum of 32 terms starts from zero and joins a total in f32
 * that rounds to nearest. By mma.sync (some 300 TFLOP/s of TF32): 0.7 ms.
 *
 * A block has 128 rows x 128 outputs, 8 warps of 64 x 32; 32 columns a stage, three stages by
 * cp.async. Which of a stage's columns a matrix step takes is free as long as both sides agree:
 * lane (g, t) of a fragment loads columns 4 t .. 4 t + 3 of 16 as one vector, and has with that the
 * two elements of two steps. A stage's row is 128 bytes; odd rows swap halves, so that 8 lanes (two
 * rows) meet every bank once. The order of a sum follows from the columns alone. */
#include "kernels/cuda/score.cuh"

enum {
    THREADS = 256,
    K = 32, /* columns a stage */
    STAGES = 3,
    SIDE_BYTES = SCORE_TILE * K * 4,
    STAGE_BYTES = 2 * SIDE_BYTES,
    SMEM_BYTES = STAGES * STAGE_BYTES, /* 96 KB: every chip has it */
};

/* Columns [k, k + 32) of 128 rows, zeros where there is none. x_row: NULL, behind the last row. */
template <bool ALIGNED>
__device__ static inline void load_stage(const score_product &p, uint32_t at,
                                         const float *const *x_row, int first_output, int k) {
#pragma unroll
    for (int i = 0; i < SCORE_TILE * 8 / THREADS; i++) {
        const int idx = (int)threadIdx.x + i * THREADS, row = idx / 8, chunk = idx % 8;
        const int col = k + 4 * chunk, left = p.cols - col, output = first_output + row;
        const uint32_t to = at + row * 128 + (chunk ^ (row & 1) << 2) * 16;
        const float *x = x_row[row], *w = p.w + (size_t)output * p.w_stride;
        const bool has_x = x && left > 0, has_w = output < p.n && left > 0;
        score_copy<ALIGNED>(to, has_x ? x + col : p.w, has_x ? left : 0);
        score_copy<ALIGNED>(to + SIDE_BYTES, has_w ? w + col : p.w, has_w ? left : 0);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ static inline void split(float x, uint32_t &hi, uint32_t &lo) {
    hi = __float_as_uint(x) & 0xffffe000;
    lo = __float_as_uint(x - __uint_as_float(hi));
}

__device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3},"
        " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ static inline float4 load_shared(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at));
    return v;
}

/* One step of 8 columns: the first (x, y) or the second (z, w) elements of what was loaded. */
template <bool SECOND>
__device__ static inline void step(float (&acc)[4][4][4], const float4 (&a)[4][2],
                                   const float4 (&b)[4]) {
    uint32_t b_hi[4][2], b_lo[4][2];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        split(SECOND ? b[n].z : b[n].x, b_hi[n][0], b_lo[n][0]);
        split(SECOND ? b[n].w : b[n].y, b_hi[n][1], b_lo[n][1]);
    }
#pragma unroll
    for (int m = 0; m < 4; m += 2) {
        uint32_t a_hi[2][4], a_lo[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float4 v = a[m + i][r];
                split(SECOND ? v.z : v.x, a_hi[i][r], a_lo[i][r]);
                split(SECOND ? v.w : v.y, a_hi[i][2 + r], a_lo[i][2 + r]);
            }
#pragma unroll
        for (int part = 0; part < 3; part++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    mma(acc[m + i][n], part == 0 ? a_lo[i] : a_hi[i],
                        part == 1 ? b_lo[n] : b_hi[n]);
    }
}

/* A stage into the totals. x_at, w_at: this lane's vector of the warp's first row on either side.
 */
__device__ static inline void multiply_stage(float (&total)[4][4][4], uint32_t x_at, uint32_t w_at,
                                             uint32_t chunk) {
    float acc[4][4][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t at = chunk ^ half * 64;
        float4 a[4][2], b[4];
#pragma unroll
        for (int m = 0; m < 4; m++) {
            a[m][0] = load_shared(x_at + m * 16 * 128 + at);
            a[m][1] = load_shared(x_at + (m * 16 + 8) * 128 + at);
            b[m] = load_shared(w_at + m * 8 * 128 + at);
        }
        step<false>(acc, a, b);
        step<true>(acc, a, b);
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[m][n][i] += acc[m][n][i];
}

/* ---- What becomes of the sums ---- */

__device__ static inline float gelu(float y) {
    return 0.5f * y * (1.f + erff(y * 0.707106781f));
}

/* Each row's sum over the tile's units: 8 in a lane, four lanes, four warps, in this order. Element
 * i of fragment (m, n) is row m * 16 + g + i / 2 * 8, output n * 8 + 2 t + i % 2. */
__device__ static inline void reduce(const score_product &p, const float (&total)[4][4][4],
                                     int row_in_tile, int warp_n, int output, float *smem) {
    const int first = blockIdx.x * SCORE_TILE;
    float sum[4][2] = {};
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = first + row_in_tile + m * 16 + half * 8;
            const score_row row = p.row[min(r, p.rows - 1)];
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int o = output + n * 8 + i;
                    if (o >= p.n) continue;
                    const score_unit u = p.unit[o];
                    const float x = total[m][n][half * 2 + i];
                    const float y = row.d * (x + u.query - row.mean * u.weight) + u.bias;
                    sum[m][half] += u.second * gelu(y);
                }
            sum[m][half] += __shfl_xor_sync(~0u, sum[m][half], 1);
            sum[m][half] += __shfl_xor_sync(~0u, sum[m][half], 2);
        }
    __syncthreads();
    if (threadIdx.x % 4 == 0)
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                smem[warp_n * SCORE_TILE + row_in_tile + m * 16 + half * 8] = sum[m][half];
    __syncthreads();
    const int r = threadIdx.x;
    if (r >= SCORE_TILE || first + r >= p.rows) return;
    float all = 0;
    for (int w = 0; w < 4; w++) all += smem[w * SCORE_TILE + r];
    p.out[(size_t)(first + r) * gridDim.y + blockIdx.y] = all;
}

template <bool ALIGNED>
static __global__ void __launch_bounds__(THREADS, 1) product_kernel(score_product p) {
    extern __shared__ __align__(128) float smem[];
    __shared__ const float *x_row[SCORE_TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int warp_m = warp / 4, warp_n = warp % 4, output = blockIdx.y * SCORE_TILE;
    pdl_wait();
    pdl_trigger();
    if (threadIdx.x < SCORE_TILE) {
        const int r = blockIdx.x * SCORE_TILE + threadIdx.x;
        x_row[threadIdx.x] = r < p.rows ? p.x + (size_t)r * p.cols : (const float *)NULL;
    }
    __syncthreads();
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(smem);
    const int n_stages = (p.cols + K - 1) / K;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        load_stage<ALIGNED>(p, base + s * STAGE_BYTES, x_row, output, s * K);
    const uint32_t x_at = (warp_m * 64 + g) * 128, w_at = SIDE_BYTES + (warp_n * 32 + g) * 128;
    const uint32_t chunk = (t ^ (g & 1) << 2) * 16;
    float total[4][4][4] = {};
    for (int s = 0; s < n_stages; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        const int next = s + STAGES - 1; /* columns behind the last are zeros */
        load_stage<ALIGNED>(p, base + next % STAGES * STAGE_BYTES, x_row, output, next * K);
        const uint32_t stage = base + s % STAGES * STAGE_BYTES;
        multiply_stage(total, stage + x_at, stage + w_at, chunk);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    reduce(p, total, warp_m * 64 + g, warp_n, output + warp_n * 32 + 2 * t, smem);
}

template <bool ALIGNED> static int launch(struct cuda_ctx *c, const score_product &p) {
    static bool allowed[64]; /* by device */
    const dim3 grid((p.rows + SCORE_TILE - 1) / SCORE_TILE, (p.n + SCORE_TILE - 1) / SCORE_TILE);
    if (c->max_smem < SMEM_BYTES + sizeof(float *) * SCORE_TILE || grid.y > 65535)
        return E_UNSUPPORTED;
    if (c->device >= 64 || !allowed[c->device]) {
        int rc = cuda_allow_smem(c, product_kernel<ALIGNED>, SMEM_BYTES);
        if (rc) return rc;
        if (c->device < 64) allowed[c->device] = true;
    }
    return CUDA_LAUNCH(c, product_kernel<ALIGNED>, grid, THREADS, SMEM_BYTES, p);
}

int cuda_score_product(struct cuda_ctx *c, bool aligned, const score_product &p) {
    return aligned ? launch<true>(c, p) : launch<false>(c, p);
}
