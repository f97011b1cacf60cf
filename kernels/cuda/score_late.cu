/* The product of `late`: quarters of blocks, as their sums lie in the pages, times B, and what
 * norming a quarter needs, in one pass over the planes.
 *
 * 2,048 blocks of 4,096 columns are 8,192 x 256 x 4,096 = 8.6 G multiply-adds in f32's accuracy
 * over 134 MB. As three products of TF32 (score_product.cu) with a pass of its own for the means
 * and deviations `late` took 439 us. Here a number becomes two f16, hi + lo, after a power of two
 * has brought it into their range: 22 bits, of which every product is exact, and x w = lo hi' + hi
 * lo' + hi hi' leaves out 2^-24 of a term. The matrix units take twice as many f16 as TF32.
 *
 * A row's power of two is that of its largest number in a step of 32 columns; such a step starts
 * from zero, since the units' truncating sums drift, and joins a total in f32 that rounds to
 * nearest, by one fused operation that takes the power off again. B is split once a call
 * (score.cu), by one power of two for each of its rows. So nothing that a row's sums go through
 * depends on another row.
 *
 * Mean and variance: sums of x - p and of its square, p the mean of the row's first 32 columns.
 * Then (p - mean)^2 is at most cols / 32 times the variance, whatever the numbers, and of f32's 24
 * bits the difference of the two sums loses log2(1 + cols / 32) at worst.
 *
 * A block has 128 quarters x 128 outputs, 8 warps of 64 x 32. Steps come by cp.async; while the
 * warps multiply one, they split the next: a thread half of a row. By L2's bytes (2 MB of planes, 2
 * MB of B a block, 537 MB together) some 100 us, by mma.sync's rate 90; on an H200 it takes some
 * 200, for two warps on a scheduler leave it idle most of the time, and all of `late` 271. */
#include <type_traits>

#include "kernels/cuda/score.cuh"

enum {
    THREADS = 256,
    K = SCORE_STEP,
    MANY_STAGES = 4, /* where shared memory has room: 160 KB */
    FEW_STAGES = 2,  /* 96 KB: every chip */
    RAW_BYTES = SCORE_TILE * K * 4,
    HALF_BYTES = SCORE_TILE * K * 2, /* of one of hi and lo */
    PITCH = K * 2,                   /* of a row of hi or lo */
    STAGE_BYTES = RAW_BYTES + 2 * HALF_BYTES,
};
static constexpr int smem_bytes(int stages) {
    return stages * STAGE_BYTES + 2 * 2 * HALF_BYTES;
}

/* ---- Shared memory ----
 *
 * [stages] of quarters, f32, 128 bytes a row, piece c of 16 bytes at c ^ row % 8; [stages] of B, hi
 * and lo, 64 bytes a row, piece c at c ^ row / 2 % 4; [2] of quarters, hi and lo, likewise. With
 * these every 8 lanes of a load or a store meet every bank once. */

__device__ static inline uint32_t piece_at(int row, int piece) {
    return (uint32_t)(row * PITCH + (piece ^ row / 2 % 4) * 16);
}
__device__ static inline void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ static inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ static inline void load_matrix4(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ static inline void store_shared(uint32_t at, const uint32_t *v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

/* Columns [k, k + 32) of 128 quarters and outputs; zeros where there is none. x_row: NULL, where
 * there is no quarter or it has no tokens. A group is committed in any case. */
template <bool ALIGNED>
__device__ static inline void load_stage(const score_late_product &p, uint32_t raw, uint32_t b,
                                         const float *const *x_row, int first_output, int k) {
    const int stride = score_stride(p.planes.cols);
    if (k < p.planes.cols) {
#pragma unroll
        for (int i = 0; i < SCORE_TILE * 8 / THREADS; i++) {
            const int at = (int)threadIdx.x + i * THREADS, row = at / 8, piece = at % 8;
            const int col = k + 4 * piece, left = p.planes.cols - col;
            const float *x = x_row[row];
            const bool has = x && left > 0;
            score_copy<ALIGNED>(raw + row * 128 + (piece ^ row % 8) * 16,
                                has ? x + col : (const float *)p.split, has ? left : 0);
        }
#pragma unroll
        for (int i = 0; i < SCORE_TILE * 8 / THREADS; i++) {
            const int at = (int)threadIdx.x + i * THREADS, row = at / 4 % SCORE_TILE;
            const int low = at / 4 / SCORE_TILE, output = first_output + row;
            const __half *from = p.split + ((size_t)low * p.n + output) * stride + k + at % 4 * 8;
            score_copy<true>(b + low * HALF_BYTES + piece_at(row, at % 4),
                             (const float *)(output < p.n ? from : p.split), output < p.n ? 4 : 0);
        }
    }
    copy_commit();
}

/* ---- Splitting ---- */

/* A thread's half of a row: 16 columns of a step, and what it has seen of the row. */
struct half_row {
    float pivot, sum, square;
};

__device__ static inline float of_pair(float x) {
    return x + __shfl_xor_sync(~0u, x, 1);
}

__device__ static inline void read_raw(float (&x)[16], uint32_t raw, int row, int half) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[4 * i]), "=f"(x[4 * i + 1]), "=f"(x[4 * i + 2]), "=f"(x[4 * i + 3])
                     : "r"(raw + row * 128 + ((4 * half + i) ^ row % 8) * 16)
                     : "memory");
}

/* left: columns of the row from this half's first on; those behind them are zeros. */
__device__ static inline void see(half_row &seen, const float (&x)[16], int left) {
    float sum = 0, square = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float d = i < left ? x[i] - seen.pivot : 0.f;
        sum += d;
        square = fmaf(d, d, square);
    }
    seen.sum += sum;
    seen.square += square;
}
__device__ static inline half_row first_seen(const float (&x)[16], int cols) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) sum += x[i];
    return {of_pair(sum) / min(cols, (int)K), 0.f, 0.f};
}

/* The row's mean and 1 / deviation as score_row has them: r = d * sum - mean. */
__device__ static inline score_row norm_of(const half_row &seen, int cols, float tokens) {
    const float sum = of_pair(seen.sum), square = of_pair(seen.square), off = sum / cols;
    float variance = (square - sum * off) / cols;
    if (variance < 0.f) variance = 0.f; /* a NaN stays */
    const float d = 1.f / sqrtf(variance / (tokens * tokens) + 1e-5f);
    return {(seen.pivot + off) / tokens * d, d / tokens};
}

/* hi and lo of the row's half into shared memory, and what takes the power of two off. */
__device__ static inline void split(const float (&x)[16], uint32_t at, float *down, int row,
                                    int half) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(x[i]));
    const score_scale s = score_scale_of(fmaxf(most, __shfl_xor_sync(~0u, most, 1)));
    uint32_t hi[8], lo[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float a = x[2 * i] * s.up, b = x[2 * i + 1] * s.up;
        const __half2 h = __floats2half2_rn(a, b);
        const float2 back = __half22float2(h);
        const __half2 l = __floats2half2_rn(a - back.x, b - back.y);
        hi[i] = *(const uint32_t *)&h, lo[i] = *(const uint32_t *)&l;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        store_shared(at + piece_at(row, 2 * half + i), hi + 4 * i);
        store_shared(at + HALF_BYTES + piece_at(row, 2 * half + i), lo + 4 * i);
    }
    if (half == 0) down[row] = s.down;
}

/* ---- Multiplying ---- */

__device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
        " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A step of B: columns 8 i .. 8 i + 7 of 8 outputs, [n][i]. */
struct step_of_b {
    uint32_t hi[4][4], lo[4][4];
    /* b: hi of the warp's first row. */
    __device__ void load(uint32_t b) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            load_matrix4(hi[n], b + piece_at(n * 8 + lane % 8, lane / 8));
            load_matrix4(lo[n], b + HALF_BYTES + piece_at(n * 8 + lane % 8, lane / 8));
        }
    }
};

/* A step of 32 rows, from 16 m on, into their totals. a: hi of the warp's first row; down: that of
 * its row g. */
__device__ static inline void multiply(float (&total)[4][4][4], uint32_t a, const step_of_b &b,
                                       const float *down, int m) {
    const int lane = threadIdx.x % 32;
    float acc[2][4][4] = {};
    uint32_t a_hi[2][2][4], a_lo[2][2][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t at = a + piece_at((m + i) * 16 + lane % 16, 2 * k + lane / 16);
            load_matrix4(a_hi[i][k], at);
            load_matrix4(a_lo[i][k], at + HALF_BYTES);
        }
#pragma unroll
    for (int part = 0; part < 3; part++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const uint32_t(&w)[4] = part == 1 ? b.lo[n] : b.hi[n];
                    mma(acc[i][n], part == 0 ? a_lo[i][k] : a_hi[i][k], w[2 * k], w[2 * k + 1]);
                }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float by = down[(m + i) * 16 + 8 * half];
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++)
                    total[m + i][n][e] = fmaf(acc[i][n][e], by, total[m + i][n][e]);
        }
}

/* Element e of fragment (m, n) is row m * 16 + g + e / 2 * 8, output n * 8 + 2 t + e % 2. */
__device__ static inline void store(const score_late_product &p, const float (&total)[4][4][4],
                                    int row, int output) {
    const int rows = 4 * p.planes.n_blocks;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int o = output + n * 8 + i;
            const float unit = o < p.n ? p.unit[o] : 0.f;
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = row + m * 16 + half * 8;
                    if (r < rows && o < p.n)
                        p.out[(size_t)r * p.n + o] = total[m][n][2 * half + i] * unit;
                }
        }
}

/* ---- The kernel ---- */

template <bool ALIGNED, int STAGES>
static __global__ void __launch_bounds__(THREADS, 1) late_product_kernel(score_late_product p) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ const float *x_row[SCORE_TILE];
    __shared__ float down[2][SCORE_TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / 4,
              warp_n = warp % 4;
    const int first = blockIdx.x * SCORE_TILE, output = blockIdx.y * SCORE_TILE;
    const int row = threadIdx.x / 2, half = threadIdx.x % 2; /* that this thread splits */
    const int cols = p.planes.cols, n_stages = (cols + K - 1) / K;
    pdl_wait();
    pdl_trigger();
    if (threadIdx.x < SCORE_TILE) {
        const int r = first + threadIdx.x;
        const bool is = r < 4 * p.planes.n_blocks && score_quarter_tokens(p.planes, r / 4, r % 4);
        x_row[threadIdx.x] =
            is ? score_plane(p.planes, r / 4) + (size_t)(r % 4) * cols : (const float *)NULL;
    }
    __syncthreads();
    const uint32_t raw = (uint32_t)__cvta_generic_to_shared(smem);
    const uint32_t b = raw + STAGES * RAW_BYTES, a = b + STAGES * 2 * HALF_BYTES;
#pragma unroll
    for (int s = 0; s < STAGES; s++)
        load_stage<ALIGNED>(p, raw + s * RAW_BYTES, b + s * 2 * HALF_BYTES, x_row, output, s * K);
    float x[16], total[4][4][4] = {};
    copy_wait<STAGES - 1>();
    __syncthreads();
    read_raw(x, raw, row, half);
    half_row seen = first_seen(x, cols);
    see(seen, x, cols - 16 * half);
    split(x, a, down[0], row, half);
    copy_wait<STAGES - 2>();
    __syncthreads();
    /* Splitting stands amid the products, as one stretch of instructions without a branch, so that
     * they share the clocks. FULL: the next step has all of its columns. */
    auto iterate = [&](int s, auto full) {
        constexpr bool FULL = decltype(full)::value;
        const int next = s + 1, at = s % STAGES, left = cols - next * K - 16 * half;
        const uint32_t tiles = a + s % 2 * 2 * HALF_BYTES + warp_m * 64 * PITCH;
        const float *by = down[s % 2] + warp_m * 64 + lane / 4;
        step_of_b w;
        read_raw(x, raw + next % STAGES * RAW_BYTES, row, half);
        w.load(b + at * 2 * HALF_BYTES + warp_n * 32 * PITCH);
        multiply(total, tiles, w, by, 0);
        if (FULL || next < n_stages) {
            see(seen, x, FULL ? 16 : left);
            split(x, a + next % 2 * 2 * HALF_BYTES, down[next % 2], row, half);
        }
        multiply(total, tiles, w, by, 2);
        if constexpr (STAGES > 2) copy_wait<STAGES - 3>();
        __syncthreads();
        load_stage<ALIGNED>(p, raw + at * RAW_BYTES, b + at * 2 * HALF_BYTES, x_row, output,
                            (s + STAGES) * K);
        if constexpr (STAGES == 2) {
            copy_wait<0>();
            __syncthreads();
        }
    };
    int s = 0;
#pragma unroll 1
    for (; s < cols / K - 1; s++) iterate(s, std::true_type());
#pragma unroll 1
    for (; s < n_stages; s++) iterate(s, std::false_type());
    copy_wait<0>();
    store(p, total, first + warp_m * 64 + lane / 4, output + warp_n * 32 + lane % 4 * 2);
    const int r = first + row;
    if (blockIdx.y != 0) return;
    const int tokens = r < 4 * p.planes.n_blocks ? score_quarter_tokens(p.planes, r / 4, r % 4) : 0;
    score_row norm = {0.f, tokens ? 1.f / tokens : 0.f};
    if (p.normed) { /* both threads of a row */
        const score_row normed = norm_of(seen, cols, (float)max(tokens, 1));
        if (tokens) norm = normed;
    }
    if (half == 0 && r < 4 * p.planes.n_blocks) p.row[r] = norm;
}

template <bool ALIGNED, int STAGES>
static int launch(struct cuda_ctx *c, const score_late_product &p) {
    static bool allowed[64]; /* by device */
    const int rows = 4 * p.planes.n_blocks;
    const dim3 grid((rows + SCORE_TILE - 1) / SCORE_TILE, (p.n + SCORE_TILE - 1) / SCORE_TILE);
    if (grid.y > 65535) return E_UNSUPPORTED;
    if (c->device >= 64 || !allowed[c->device]) {
        int rc = cuda_allow_smem(c, late_product_kernel<ALIGNED, STAGES>, smem_bytes(STAGES));
        if (rc) return rc;
        if (c->device < 64) allowed[c->device] = true;
    }
    return CUDA_LAUNCH(c, (late_product_kernel<ALIGNED, STAGES>), grid, THREADS, smem_bytes(STAGES),
                       p);
}

int cuda_score_late_product(struct cuda_ctx *c, bool aligned, const score_late_product &p) {
    const size_t own = SCORE_TILE * (sizeof(float *) + 2 * sizeof(float));
    if (c->max_smem < smem_bytes(FEW_STAGES) + own) return E_UNSUPPORTED;
    if (c->max_smem < smem_bytes(MANY_STAGES) + own)
        return aligned ? launch<true, FEW_STAGES>(c, p) : launch<false, FEW_STAGES>(c, p);
    return aligned ? launch<true, MANY_STAGES>(c, p) : launch<false, MANY_STAGES>(c, p);
}
