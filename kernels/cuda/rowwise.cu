/* Row-wise operations: norm, gate and plain packing of f32 rows into the 16-bit rows that products
 * multiply; picking rows; copying bytes.
 *
 * All are bound by memory: norm_pack moves 14 bytes an element with a delta (x and delta in, x and
 * 16 bits out), gate_pack 10, pack 6. 4,096 rows of 4,096: 235 MB, 55 us at 4.3 TB/s; gate of 4,096
 * rows of 14,336: 590 MB, 137 us. One row is bound by latency: 2 to 3 us.
 *
 * Norm: one block a row. A thread holds its quads of 4 elements in registers between the sum and
 * the scaling, so x is read once; the norm's weight is read before the wait for the kernel before.
 * A thread adds its quads in order, a warp its lanes by a butterfly, every thread the warps' sums
 * in order: threads and quads follow from cols alone, so that the order does too.
 * The others are elementwise: any cut gives the same bits, so few rows are cut finely, many
 * coarsely.
 *
 * Quads are 16-byte accesses where cols is a multiple of 4 (rows are then aligned), single elements
 * otherwise. */
#include "kernels/cuda/cuda.cuh"

enum {
    FEW_ROWS = 64,       /* cut finely up to here */
    LOOP_THREADS = 1024, /* norm of rows too wide for registers */
};

template <bool VEC> __device__ static inline float4 load_quad(const float *row, int i, int cols) {
    if (VEC) return i < cols ? *(const float4 *)(row + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    return make_float4(i < cols ? row[i] : 0.f, i + 1 < cols ? row[i + 1] : 0.f,
                       i + 2 < cols ? row[i + 2] : 0.f, i + 3 < cols ? row[i + 3] : 0.f);
}
template <bool VEC>
__device__ static inline void store_quad(float *row, int i, int cols, float4 v) {
    if (VEC) {
        if (i < cols) *(float4 *)(row + i) = v;
        return;
    }
    if (i < cols) row[i] = v.x;
    if (i + 1 < cols) row[i + 1] = v.y;
    if (i + 2 < cols) row[i + 2] = v.z;
    if (i + 3 < cols) row[i + 3] = v.w;
}

/* A packed row: 16-bit elements, quads at multiples of 4 up to the stride. */
__device__ static inline void store_act(uint16_t *row, int i, float4 v, bool bf16) {
    *(uint2 *)(row + i) = to_act_quad(v, bf16);
}

/* ---- Norm ---- */

struct norm_args {
    int cols, stride;
    float *x;
    const float *delta, *weight;
    float inv_cols, eps;
    uint16_t *act;
    bool bf16;
    float *normed;
};

__device__ static inline float4 add_quad(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ static inline float sum_squares(float sum, float4 v) {
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
    sum = fmaf(v.z, v.z, sum);
    return fmaf(v.w, v.w, sum);
}

/* The block's sum, in every thread; once a kernel. */
template <int THREADS> __device__ static inline float block_sum(float v) {
    __shared__ float part[THREADS / 32];
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum += part[i];
    return sum;
}

/* Columns beyond the row are zero in x, so that they are zero in the sum and in the result. */
template <bool VEC>
__device__ static inline void store_normed(const norm_args &a, size_t at, uint16_t *act, int i,
                                           float4 x, float4 w, float scale) {
    float4 v =
        make_float4(x.x * scale * w.x, x.y * scale * w.y, x.z * scale * w.z, x.w * scale * w.w);
    if (i >= a.cols) v = make_float4(0.f, 0.f, 0.f, 0.f); /* 0 times an infinite scale is NaN */
    if (!VEC) {
        if (i + 1 >= a.cols) v.y = 0.f;
        if (i + 2 >= a.cols) v.z = 0.f;
        if (i + 3 >= a.cols) v.w = 0.f;
    }
    store_act(act, i, v, a.bf16);
    if (a.normed) store_quad<VEC>(a.normed + at, i, a.cols, v);
}

template <int THREADS, int QUADS, bool VEC>
__global__ void __launch_bounds__(THREADS) norm_pack_kernel(const norm_args a) {
    pdl_trigger();
    float4 w[QUADS], x[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        w[q] = load_quad<VEC>(a.weight, 4 * (threadIdx.x + q * THREADS), a.cols);
    size_t at = (size_t)blockIdx.x * a.cols;
    uint16_t *act = a.act + (size_t)blockIdx.x * a.stride;
    pdl_wait();
#pragma unroll
    for (int q = 0; q < QUADS; q++)
        x[q] = load_quad<VEC>(a.x + at, 4 * (threadIdx.x + q * THREADS), a.cols);
    if (a.delta) {
        float4 d[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            d[q] = load_quad<VEC>(a.delta + at, 4 * (threadIdx.x + q * THREADS), a.cols);
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            x[q] = add_quad(x[q], d[q]);
            store_quad<VEC>(a.x + at, 4 * (threadIdx.x + q * THREADS), a.cols, x[q]);
        }
    }
    float sum = 0.f;
#pragma unroll
    for (int q = 0; q < QUADS; q++) sum = sum_squares(sum, x[q]);
    float scale = rsqrtf(fmaf(block_sum<THREADS>(sum), a.inv_cols, a.eps));
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int i = 4 * (threadIdx.x + q * THREADS);
        if (i < a.stride) store_normed<VEC>(a, at, act, i, x[q], w[q], scale);
    }
}

/* Rows of any width: x is read again, by the thread that wrote it. */
template <bool VEC>
__global__ void __launch_bounds__(LOOP_THREADS) norm_pack_wide_kernel(const norm_args a) {
    pdl_trigger();
    size_t at = (size_t)blockIdx.x * a.cols;
    uint16_t *act = a.act + (size_t)blockIdx.x * a.stride;
    pdl_wait();
    float sum = 0.f;
    for (int i = 4 * threadIdx.x; i < a.cols; i += 4 * LOOP_THREADS) {
        float4 x = load_quad<VEC>(a.x + at, i, a.cols);
        if (a.delta) {
            x = add_quad(x, load_quad<VEC>(a.delta + at, i, a.cols));
            store_quad<VEC>(a.x + at, i, a.cols, x);
        }
        sum = sum_squares(sum, x);
    }
    float scale = rsqrtf(fmaf(block_sum<LOOP_THREADS>(sum), a.inv_cols, a.eps));
    for (int i = 4 * threadIdx.x; i < a.stride; i += 4 * LOOP_THREADS)
        store_normed<VEC>(a, at, act, i, load_quad<VEC>(a.x + at, i, a.cols),
                          load_quad<VEC>(a.weight, i, a.cols), scale);
}

template <bool VEC> static int launch_norm(struct cuda_ctx *c, int n, const norm_args &a) {
    int quads = a.stride / 4;
    if (quads <= 256) return CUDA_LAUNCH(c, (norm_pack_kernel<256, 1, VEC>), n, 256, 0, a);
    if (quads <= 512) return CUDA_LAUNCH(c, (norm_pack_kernel<256, 2, VEC>), n, 256, 0, a);
    if (quads <= 1024) return CUDA_LAUNCH(c, (norm_pack_kernel<512, 2, VEC>), n, 512, 0, a);
    if (quads <= 2048) return CUDA_LAUNCH(c, (norm_pack_kernel<512, 4, VEC>), n, 512, 0, a);
    if (quads <= 4096) return CUDA_LAUNCH(c, (norm_pack_kernel<512, 8, VEC>), n, 512, 0, a);
    return CUDA_LAUNCH(c, norm_pack_wide_kernel<VEC>, n, LOOP_THREADS, 0, a);
}

/* Rows of a call, checked against the room for their packed form. */
static int check_act(struct kern_rows rows, int cols, const struct kern_act &act) {
    int n = rows.n_gen + rows.n_prompt;
    ASSERT(rows.n_gen >= 0 && rows.n_prompt >= 0 && n <= KERN_MAX_ROWS && cols > 0);
    ASSERT(n == 0 || (act.data && (uintptr_t)act.data % 16 == 0));
    ASSERT((size_t)n * (size_t)act_stride(cols) * sizeof(uint16_t) <= act.bytes);
    return n;
}
static bool is_aligned(int cols, const void *a, const void *b) {
    return cols % 4 == 0 && ((uintptr_t)a | (uintptr_t)b) % 16 == 0;
}

int kern_cuda_norm_pack(struct kern *k, struct kern_rows rows, int cols, float *x,
                        const float *delta, const float *weight, float eps, struct kern_act act,
                        float *normed) {
    int n = check_act(rows, cols, act);
    if (n == 0) return 0;
    ASSERT(x && weight);
    norm_args a = {cols,
                   act_stride(cols),
                   x,
                   delta,
                   weight,
                   1.f / (float)cols,
                   eps,
                   (uint16_t *)act.data,
                   act_is_bf16(&act),
                   normed};
    bool vec = is_aligned(cols, x, delta) && is_aligned(cols, weight, normed);
    return vec ? launch_norm<true>(cuda_ctx(k), n, a) : launch_norm<false>(cuda_ctx(k), n, a);
}

/* ---- Elementwise packing ---- */

struct pack_args {
    int cols, stride;
    const float *in; /* pack: [cols] a row; gate_pack: [2 * cols], gate first */
    uint16_t *act;
    bool bf16;
};

/* silu(g) * u. e^-g may be infinite: g / infinity is 0. The approximations lose 1e-5 at most,
 * a fiftieth of what 16 bits lose. */
__device__ static inline float gated(float g, float u) {
    return __fdividef(g, 1.f + __expf(-g)) * u;
}

template <bool GATE, bool VEC>
__device__ static inline float4 pack_load(const pack_args &a, int i) {
    const float *row = a.in + (size_t)blockIdx.y * (GATE ? 2 * (size_t)a.cols : (size_t)a.cols);
    float4 v = load_quad<VEC>(row, i, a.cols);
    if (!GATE) return v;
    float4 u = load_quad<VEC>(row + a.cols, i, a.cols);
    return make_float4(gated(v.x, u.x), gated(v.y, u.y), gated(v.z, u.z), gated(v.w, u.w));
}

/* Row blockIdx.y; a block takes blockDim * QUADS neighbouring quads. */
template <bool GATE, bool VEC, int QUADS> __global__ void pack_kernel(const pack_args a) {
    pdl_trigger();
    uint16_t *act = a.act + (size_t)blockIdx.y * a.stride;
    int first = 4 * (blockIdx.x * blockDim.x * QUADS + threadIdx.x);
    float4 v[QUADS];
    pdl_wait();
#pragma unroll
    for (int q = 0; q < QUADS; q++) v[q] = pack_load<GATE, VEC>(a, first + 4 * q * (int)blockDim.x);
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        int i = first + 4 * q * (int)blockDim.x;
        if (i < a.stride) store_act(act, i, v[q], a.bf16);
    }
}

template <bool GATE, bool VEC>
static int launch_pack(struct cuda_ctx *c, int n, const pack_args &a) {
    int quads = a.stride / 4, threads = n <= FEW_ROWS ? 128 : 256;
    if (n <= FEW_ROWS)
        return CUDA_LAUNCH(c, (pack_kernel<GATE, VEC, 1>), dim3((quads + 127) / 128, n), threads, 0,
                           a);
    return CUDA_LAUNCH(c, (pack_kernel<GATE, VEC, 2>), dim3((quads + 511) / 512, n), threads, 0, a);
}

int kern_cuda_pack(struct kern *k, struct kern_rows rows, int cols, const float *x,
                   struct kern_act act) {
    int n = check_act(rows, cols, act);
    if (n == 0) return 0;
    ASSERT(x);
    pack_args a = {cols, act_stride(cols), x, (uint16_t *)act.data, act_is_bf16(&act)};
    return is_aligned(cols, x, x) ? launch_pack<false, true>(cuda_ctx(k), n, a)
                                  : launch_pack<false, false>(cuda_ctx(k), n, a);
}

int kern_cuda_gate_pack(struct kern *k, struct kern_rows rows, int cols, const float *gate_up,
                        struct kern_act act) {
    int n = check_act(rows, cols, act);
    if (n == 0) return 0;
    ASSERT(gate_up);
    pack_args a = {cols, act_stride(cols), gate_up, (uint16_t *)act.data, act_is_bf16(&act)};
    return is_aligned(cols, gate_up, gate_up) ? launch_pack<true, true>(cuda_ctx(k), n, a)
                                              : launch_pack<true, false>(cuda_ctx(k), n, a);
}

/* ---- Copies ---- */

/* Row blockIdx.y of x_out; an index that no row can have gives zeros. */
template <bool VEC>
__global__ void gather_kernel(const float *x, int cols, const int32_t *row_idx, float *x_out) {
    pdl_trigger();
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    pdl_wait();
    int row = row_idx[blockIdx.y];
    bool known = row >= 0 && row < KERN_MAX_ROWS;
    float4 v = load_quad<VEC>(x + (size_t)(known ? row : 0) * cols, i, known ? cols : 0);
    store_quad<VEC>(x_out + (size_t)blockIdx.y * cols, i, cols, v);
}

int kern_cuda_gather(struct kern *k, const float *x, int cols, const int32_t *row_idx, int n,
                     float *x_out) {
    ASSERT(x && row_idx && x_out && cols > 0 && n >= 0 && n <= KERN_MAX_ROWS);
    if (n == 0) return 0;
    struct cuda_ctx *c = cuda_ctx(k);
    dim3 grid((cols + 511) / 512, n);
    if (is_aligned(cols, x, x_out))
        return CUDA_LAUNCH(c, gather_kernel<true>, grid, 128, 0, x, cols, row_idx, x_out);
    return CUDA_LAUNCH(c, gather_kernel<false>, grid, 128, 0, x, cols, row_idx, x_out);
}

/* n_wide pieces of 16 bytes, then single bytes up to n. */
__global__ void copy_kernel(uint8_t *dst, const uint8_t *src, size_t n_wide, size_t n) {
    pdl_trigger();
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x,
           step = (size_t)gridDim.x * blockDim.x;
    pdl_wait();
    for (size_t i = at; i < n_wide; i += step) ((uint4 *)dst)[i] = ((const uint4 *)src)[i];
    for (size_t i = 16 * n_wide + at; i < n; i += step) dst[i] = src[i];
}

/* A kernel, so that the ones around it overlap; a copy command would make both wait. */
int kern_cuda_copy_page(struct kern *k, void *dst, const void *src, size_t bytes) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT((dst && src) || bytes == 0);
    if (bytes == 0) return 0;
    size_t n_wide = ((uintptr_t)dst | (uintptr_t)src) % 16 ? 0 : bytes / 16;
    size_t units = n_wide ? n_wide : bytes, blocks = (units + 255) / 256, most = 8 * c->n_sms;
    return CUDA_LAUNCH(c, copy_kernel, (unsigned)(blocks < most ? blocks : most), 256, 0,
                       (uint8_t *)dst, (const uint8_t *)src, n_wide, bytes);
}
