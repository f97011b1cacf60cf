/* Weights onto the device, and rows of them back out.
 *
 * PACKING. The file's bytes go up in slices of whole strips (16 rows) through two halves of the
 * context's dequantisation buffer, which nobody needs while weights are loaded: a copy fills one
 * half while a kernel reorders the other. The source is ordinary memory, often a mapped file, so
 * the driver stages each copy and the call returns when it has read the source; slices of tens of
 * megabytes keep that at the speed of the host's memory. Reordering itself is bound by device
 * memory: a thread makes one lane's share of a tile.
 *
 * ROWS. cuda_weight_rows feeds prompt products: a warp turns 16 rows x 64 columns into 2 KB of
 * 16-bit floats, 16 bytes a lane and store, four lanes filling 64 bytes of a row; bound by what it
 * writes. kern_cuda_embed takes values one by one: a few rows. */

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/quant.cuh"

#include <string.h>

#include "base/half.h"

namespace {

enum {
    REPORT_BYTES = 256, /* at the start of the staging memory */
    SLICE_BYTES = (CUDA_DEQUANT_BYTES - REPORT_BYTES) / 2 / 256 * 256,
    THREADS = 256,
};

size_t div_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

/* ---- Packing: kernels ---- */

/* Rows of a plain type into [rows][stride] of 16 bits, zeros behind cols. F32 becomes f16; the
 * first element that f16 cannot hold is left in *bad (its index from `base` on). */
template <typename IN>
__global__ void pack_plain_kernel(const IN *from, uint16_t *to, size_t rows, int cols, int stride,
                                  unsigned long long base, unsigned long long *bad) {
    pdl_wait();
    pdl_trigger();
    size_t n = rows * (size_t)stride, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        size_t row = i / (size_t)stride;
        int col = (int)(i - row * (size_t)stride);
        size_t at = row * (size_t)cols + (size_t)col;
        IN v = col < cols ? from[at] : IN(0);
        if constexpr (sizeof(IN) == 4) {
            if (!(fabsf(v) <= 65504.f)) atomicMin(bad, base + at);
            to[i] = __half_as_ushort(__float2half_rn(v));
        } else {
            to[i] = v;
        }
    }
}

/* Strips from a slice of the file: n_strips of `tiles` tiles, `rows` rows left. A thread a lane. */
template <enum kern_dtype T>
__global__ void pack_quant_kernel(const uint8_t *from, uint8_t *to, int n_strips, int tiles,
                                  int rows, int cols) {
    using Q = quant<T>;
    pdl_wait();
    pdl_trigger();
    size_t row_bytes = (size_t)(cols / Q::BLOCK) * Q::FILE_BYTES;
    size_t n = (size_t)n_strips * (size_t)tiles * 32, step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        size_t tile = i / 32, strip = tile / (size_t)tiles;
        int lane = (int)(i % 32), kt = (int)(tile - strip * (size_t)tiles);
        const uint8_t *row[2];
        for (int h = 0; h < 2; h++) {
            size_t r = 16 * strip + (size_t)(lane / 4 + 8 * h);
            row[h] = r < (size_t)rows
                         ? from + r * row_bytes + (size_t)kt * (Q::K / Q::BLOCK) * Q::FILE_BYTES
                         : NULL;
        }
        quant_pack_lane<T>(to + tile * Q::TILE, lane, row, cols - kt * Q::K);
    }
}

/* ---- Packing: slices ---- */

struct slice {
    struct cuda_ctx *c;
    enum kern_dtype t;
    int rows, cols; /* of the slice; of the matrix */
    size_t first;   /* row */
    const uint8_t *from;
    uint8_t *dst; /* of the whole matrix */

    unsigned blocks(size_t threads) const {
        size_t n = div_up(threads, THREADS), most = (size_t)c->n_sms * 32;
        return (unsigned)(n < most ? n : most);
    }
    template <enum kern_dtype T> int run() {
        int tiles = (int)div_up((size_t)cols, quant<T>::K), strips = (int)div_up((size_t)rows, 16);
        uint8_t *to = dst + first / 16 * (size_t)tiles * quant<T>::TILE;
        return CUDA_LAUNCH(c, pack_quant_kernel<T>, dim3(blocks((size_t)strips * tiles * 32)),
                           dim3(THREADS), 0, from, to, strips, tiles, rows, cols);
    }
    template <typename IN> int plain() {
        int stride = plain_stride(cols);
        return CUDA_LAUNCH(
            c, pack_plain_kernel<IN>, dim3(blocks((size_t)rows * stride)), dim3(THREADS), 0,
            (const IN *)from, (uint16_t *)dst + first * (size_t)stride, (size_t)rows, cols, stride,
            (unsigned long long)first * (unsigned long long)cols, (unsigned long long *)c->dequant);
    }
};

int pack_slice(struct slice *s) {
    if (quant_is(s->t)) return quant_dispatch(s->t, *s);
    return s->t == KERN_F32 ? s->plain<float>() : s->plain<uint16_t>();
}

/* Bytes of a row in the file; 0 where cols is no multiple of the block. */
size_t row_bytes(enum kern_dtype t, int cols) {
    return cols % kern_dtype_block(t) ? 0 : kern_dtype_bytes(t, (size_t)cols);
}

/* All of it enqueued; *bad: the first value that does not fit, ULLONG_MAX: none. Waits. */
int pack_all(struct cuda_ctx *c, enum kern_dtype t, int rows, int cols, const uint8_t *src,
             uint8_t *dst, unsigned long long *bad) {
    size_t bytes = row_bytes(t, cols), per_slice = SLICE_BYTES / bytes / 16 * 16;
    uint8_t *stage = (uint8_t *)c->dequant + REPORT_BYTES;
    int rc = CUDA_NOTE(c, cudaMemsetAsync(c->dequant, 0xff, REPORT_BYTES, c->stream));
    for (size_t first = 0, i = 0; !rc && first < (size_t)rows; first += per_slice, i++) {
        size_t n = (size_t)rows - first < per_slice ? (size_t)rows - first : per_slice;
        struct slice s = {c, t, (int)n, cols, first, stage + i % 2 * SLICE_BYTES, dst};
        rc = CUDA_NOTE(c, cudaMemcpyAsync((void *)s.from, src + first * bytes, n * bytes,
                                          cudaMemcpyHostToDevice, c->stream));
        if (!rc) rc = pack_slice(&s);
    }
    if (!rc)
        rc = CUDA_NOTE(
            c, cudaMemcpyAsync(bad, c->dequant, sizeof *bad, cudaMemcpyDeviceToHost, c->stream));
    int waited = CUDA_NOTE(c, cudaStreamSynchronize(c->stream));
    return rc ? rc : waited;
}

} // namespace

size_t kern_cuda_weight_bytes(const struct kern *k, enum kern_dtype t, int rows, int cols) {
    (void)k;
    if (rows <= 0 || cols <= 0 || cols > INT32_MAX - 256) return 0;
    size_t bytes = row_bytes(t, cols), strips = div_up((size_t)rows, 16);
    if (bytes == 0 || 16 * bytes > SLICE_BYTES) return 0;
    if (!quant_is(t)) return strips * 16 * (size_t)plain_stride(cols) * 2;
    return strips * div_up((size_t)cols, (size_t)quant_tile_cols(t)) * quant_tile_bytes(t);
}

int kern_cuda_weight_pack(struct kern *k, struct kern_weight *out, void *dst, enum kern_dtype t,
                          int rows, int cols, const void *src, struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    unsigned long long bad = ~0ull;
    size_t bytes = kern_cuda_weight_bytes(k, t, rows, cols);
    if (bytes == 0)
        return err_raise(e, E_UNSUPPORTED, "the CUDA backend has no product with %s [%d][%d]",
                         kern_dtype_name(t), rows, cols);
    *out = kern_weight{dst, t == KERN_F32 ? KERN_F16 : t, rows, cols, bytes, NULL};
    int rc = 0, added = (rows + 15) / 16 * 16 - rows;
    if (!quant_is(t) && added > 0) {
        size_t stride = (size_t)plain_stride(cols) * 2;
        rc = CUDA_NOTE(c, cudaMemsetAsync((uint8_t *)dst + (size_t)rows * stride, 0,
                                          (size_t)added * stride, c->stream));
    }
    if (!rc) rc = pack_all(c, t, rows, cols, (const uint8_t *)src, (uint8_t *)dst, &bad);
    if (rc)
        return err_raise(e, E_DEVICE, "packing %s [%d][%d]: %s", kern_dtype_name(t), rows, cols,
                         c->failure);
    if (bad != ~0ull) {
        uint32_t bits;
        memcpy(&bits, (const uint8_t *)src + bad * 4, 4);
        return err_raise(e, E_UNSUPPORTED,
                         "F32 weights are kept as F16 on the device, which cannot hold the value "
                         "%g at row %llu, column %llu of [%d][%d]",
                         (double)half_bits_to_f32(bits), bad / (unsigned)cols, bad % (unsigned)cols,
                         rows, cols);
    }
    return 0;
}

/* ---- Embedding ---- */

namespace {

__device__ float plain_value(uint16_t v, bool bf16) {
    return bf16 ? __uint_as_float((uint32_t)v << 16) : __half2float(__ushort_as_half(v));
}

/* A block a row of x. */
__global__ void embed_plain_kernel(const uint16_t *w, bool bf16, int rows, int cols, int stride,
                                   const int32_t *token, float *x) {
    pdl_wait();
    pdl_trigger(); /* behind pdl_wait: cuda.cuh */
    int id = token[blockIdx.x];
    bool inside = id >= 0 && id < rows;
    const uint16_t *row = w + (size_t)(inside ? id : 0) * (size_t)stride;
    float *to = x + (size_t)blockIdx.x * (size_t)cols;
    for (int i = (int)threadIdx.x; i < cols; i += THREADS)
        to[i] = inside ? plain_value(row[i], bf16) : 0.f;
}

template <enum kern_dtype T>
__global__ void embed_quant_kernel(const uint8_t *w, int rows, int cols, int tiles,
                                   const int32_t *token, float *x) {
    using Q = quant<T>;
    pdl_wait();
    pdl_trigger(); /* behind pdl_wait: cuda.cuh */
    int id = token[blockIdx.x];
    bool inside = id >= 0 && id < rows;
    const uint8_t *strip = w + (size_t)(inside ? id / 16 : 0) * (size_t)tiles * Q::TILE;
    float *to = x + (size_t)blockIdx.x * (size_t)cols;
    for (int i = (int)threadIdx.x; i < cols; i += THREADS)
        to[i] =
            inside ? quant_value<T>(strip + (size_t)(i / Q::K) * Q::TILE, id % 16, i % Q::K) : 0.f;
}

struct embedder {
    struct cuda_ctx *c;
    const struct kern_weight *w;
    const int32_t *token;
    int n;
    float *x;
    template <enum kern_dtype T> int run() {
        int tiles = (int)div_up((size_t)w->cols, quant<T>::K);
        return CUDA_LAUNCH(c, embed_quant_kernel<T>, dim3((unsigned)n), dim3(THREADS), 0,
                           (const uint8_t *)w->data, w->rows, w->cols, tiles, token, x);
    }
};

} // namespace

int kern_cuda_embed(struct kern *k, const struct kern_weight *w, const int32_t *token, int n_rows,
                    float *x) {
    struct cuda_ctx *c = cuda_ctx(k);
    if (n_rows == 0) return 0;
    embedder e = {c, w, token, n_rows, x};
    if (!weight_is_plain(w)) return quant_dispatch(w->dtype, e);
    return CUDA_LAUNCH(c, embed_plain_kernel, dim3((unsigned)n_rows), dim3(THREADS), 0,
                       (const uint16_t *)w->data, w->dtype == KERN_BF16, w->rows, w->cols,
                       plain_stride(w->cols), token, x);
}

/* ---- Rows as 16-bit floats ---- */

namespace {

/* Beyond f16: the largest; NaN stays. */
__device__ __forceinline__ uint32_t pack_2(float a, float b, bool bf16) {
    if (bf16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
        return *(uint32_t *)&v;
    }
    a = a != a ? a : fminf(fmaxf(a, -65504.f), 65504.f);
    b = b != b ? b : fminf(fmaxf(b, -65504.f), 65504.f);
    __half2 v = __floats2half2_rn(a, b);
    return *(uint32_t *)&v;
}

/* f16 to bf16 or back, pairs of elements. */
__global__ void rows_plain_kernel(const uint32_t *from, bool to_bf16, size_t n_pairs,
                                  uint32_t *to) {
    pdl_trigger();
    pdl_wait();
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n_pairs; i += step) {
        uint32_t v = from[i];
        to[i] = pack_2(plain_value((uint16_t)v, !to_bf16),
                       plain_value((uint16_t)(v >> 16), !to_bf16), to_bf16);
    }
}

/* The 8 weights of a lane in one block of 32, row h, as kern_dequantize has them. */
template <enum kern_dtype T>
__device__ __forceinline__ void lane_row(const quant_scales<T> &scales, const uint32_t a[2][4],
                                         int s, int h, bool bf16, uint32_t out[4]) {
    constexpr float OFF = (float)quant<T>::OFFSET;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* e = 2 i, 2 i + 1 */
        uint32_t pair = a[i / 2][h + i % 2 * 2];
        float2 q = __half22float2(*(__half2 *)&pair);
        q.x = fmaf(q.x, quant_unit<T>(h), -OFF), q.y = fmaf(q.y, quant_unit<T>(h), -OFF);
        float dw = scales.scale(s, i / 2, h), mw = scales.min(s, h);
        if (quant<T>::MIN) q.x = fmaf(dw, q.x, mw), q.y = fmaf(dw, q.y, mw);
        else q.x *= dw, q.y *= dw;
        out[i] = pack_2(q.x, q.y, bf16);
    }
}

/* One group of 64 columns; `to` is the matrix's row of the lane's row g, in the group's first
 * column, write[h] says whether row g + 8 h is wanted. */
template <enum kern_dtype T>
__device__ __forceinline__ void write_group(const uint8_t *tile, const quant_scales<T> &scales,
                                            int u, int lane, bool bf16, uint16_t *to, size_t stride,
                                            const bool write[2]) {
    quant_words<T> words;
    words.load(tile, u, lane);
#pragma unroll
    for (int b = 0; b < 2; b++) {
        uint32_t a[2][4];
        words.operands(b, a);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t v[4];
            lane_row<T>(scales, a, 2 * u + b, h, bf16, v);
            if (!write[h]) continue;
            uint16_t *at = to + 8 * h * stride + 32 * b;
            *(uint2 *)(at + quant_col<T>(lane % 4, 0)) = make_uint2(v[0], v[1]);
            *(uint2 *)(at + quant_col<T>(lane % 4, 4)) = make_uint2(v[2], v[3]);
        }
    }
}

/* A warp a tile; `to` is row `first`. */
template <enum kern_dtype T>
__global__ void __launch_bounds__(THREADS)
    rows_quant_kernel(const uint8_t *w, int tiles, int first, int n, int stride, bool bf16,
                      uint16_t *to) {
    using Q = quant<T>;
    int lane = (int)threadIdx.x % 32, strip0 = first / 16;
    size_t units = (size_t)((first + n - 1) / 16 - strip0 + 1) * (size_t)tiles;
    size_t step = (size_t)gridDim.x * (THREADS / 32);
    pdl_trigger();
    pdl_wait();
    for (size_t i = (size_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < units; i += step) {
        size_t strip = i / (size_t)tiles, kt = i - strip * (size_t)tiles;
        const uint8_t *tile = w + ((size_t)strip0 * (size_t)tiles + i) * Q::TILE;
        long long row = 16 * ((long long)strip0 + (long long)strip) + lane / 4 - first;
        bool write[2] = {row >= 0 && row < n, row + 8 >= 0 && row + 8 < n};
        uint16_t *at = to + row * stride + (long long)kt * Q::K;
        quant_scales<T> scales;
        scales.load(tile, lane / 4);
#pragma unroll
        for (int u = 0; u < Q::K / 64; u++)
            write_group<T>(tile, scales, u, lane, bf16, at + 64 * u, (size_t)stride, write);
    }
}

struct row_writer {
    struct cuda_ctx *c;
    const struct kern_weight *w;
    int first, n;
    bool bf16;
    uint16_t *dst;
    template <enum kern_dtype T> int run() {
        int tiles = (int)div_up((size_t)w->cols, quant<T>::K);
        size_t strips = (size_t)(n + 15) / 16 + 1, units = strips * (size_t)tiles;
        size_t blocks = div_up(units, THREADS / 32), most = (size_t)c->n_sms * 8 * 4;
        return CUDA_LAUNCH(c, rows_quant_kernel<T>, dim3((unsigned)(blocks < most ? blocks : most)),
                           dim3(THREADS), 0, (const uint8_t *)w->data, tiles, first, n,
                           plain_stride(w->cols), bf16, dst);
    }
};

} // namespace

int cuda_weight_rows(struct cuda_ctx *c, const struct kern_weight *w, int first, int n, bool bf16,
                     void *dst) {
    ASSERT(first >= 0 && n >= 0 && first + n <= w->rows);
    if (n == 0) return 0;
    row_writer r = {c, w, first, n, bf16, (uint16_t *)dst};
    if (!weight_is_plain(w)) return quant_dispatch(w->dtype, r);
    size_t stride = (size_t)plain_stride(w->cols);
    const uint16_t *from = (const uint16_t *)w->data + (size_t)first * stride;
    if (bf16 == (w->dtype == KERN_BF16))
        return CUDA_NOTE(c, cudaMemcpyAsync(dst, from, (size_t)n * stride * 2,
                                            cudaMemcpyDeviceToDevice, c->stream));
    size_t pairs = (size_t)n * stride / 2, blocks = div_up(pairs, THREADS);
    size_t most = (size_t)c->n_sms * 32;
    return CUDA_LAUNCH(c, rows_plain_kernel, dim3((unsigned)(blocks < most ? blocks : most)),
                       dim3(THREADS), 0, (const uint32_t *)from, bf16, pairs, (uint32_t *)dst);
}
