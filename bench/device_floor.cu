/* Bandwidth, matrix rate, marks on the stream, random fills: what bench_kernels, bench_step and
 * bench_round measure with.
 *
 * The sweep: two blocks of 512 threads an SM, eight independent 16-byte
 * loads in flight a thread: 128 KiB an SM, some three times what 4.8 TB/s times a microsecond of
 * latency asks for. The copy is the driver's own. */
#include <stdlib.h>

#include "bench/device_floor.h"
#include "kernels/cuda/cuda.cuh"

enum { REPEATS = 15, SWEEP_THREADS = 512, SWEEP_LOADS = 8, MATRIX = 8192 };

struct device_floor {
    struct cuda_ctx *c;
    cudaEvent_t at[DEVICE_MARKS];
    uint32_t *sink;
};

/* A failure that was noted in the context, to the caller. */
static int tell(struct device_floor *f, int rc, struct err *e) {
    return rc ? f->c->kern.ops->sync(&f->c->kern, e) : 0;
}
#define TRY(f, call)                                                                               \
    do {                                                                                           \
        int try_rc = tell((f), CUDA_NOTE((f)->c, (call)), e);                                      \
        if (try_rc) return try_rc;                                                                 \
    } while (0)

int device_floor_open(struct device_floor **out, struct kern *k, struct err *e) {
    struct device_floor *f = (struct device_floor *)calloc(1, sizeof *f);
    if (!f) return err_raise(e, E_NOMEM, "no memory for the device's clock");
    f->c = cuda_ctx(k);
    *out = f;
    for (int i = 0; i < DEVICE_MARKS; i++) TRY(f, cudaEventCreate(&f->at[i]));
    void *sink;
    int rc = k->ops->reserve(k, 64, &sink, e);
    f->sink = (uint32_t *)sink;
    return rc;
}

void device_floor_close(struct device_floor *f) {
    if (!f) return;
    for (int i = 0; i < DEVICE_MARKS; i++) cudaEventDestroy(f->at[i]);
    f->c->kern.ops->unreserve(&f->c->kern, f->sink);
    free(f);
}

/* ---- Clock ---- */

int device_floor_mark(struct device_floor *f, int i, struct err *e) {
    TRY(f, cudaEventRecord(f->at[i], f->c->stream));
    return 0;
}

int device_floor_between(struct device_floor *f, int from, int to, double *ms, struct err *e) {
    float got = 0;
    TRY(f, cudaEventSynchronize(f->at[to]));
    TRY(f, cudaEventElapsedTime(&got, f->at[from], f->at[to]));
    *ms = got;
    return 0;
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

/* Median milliseconds between REPEATS + 1 marks in a row. */
static int median(struct device_floor *f, double *ms, struct err *e) {
    double got[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        int rc = device_floor_between(f, i, i + 1, &got[i], e);
        if (rc) return rc;
    }
    qsort(got, REPEATS, sizeof *got, by_value);
    *ms = got[REPEATS / 2];
    return 0;
}

/* ---- Contents ---- */

/* 32 bits of (seed, i), mixed as MurmurHash3 finishes. */
__device__ static inline uint32_t mix(uint32_t seed, uint64_t i) {
    uint32_t x = (uint32_t)i * 0x9E3779B9u + (uint32_t)(i >> 32) * 0x85EBCA6Bu + seed;
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

/* A word of type t: one f32 or two 16-bit floats. */
__device__ static inline uint32_t word(enum kern_dtype t, float scale, uint32_t r) {
    if (t == KERN_F32) return __float_as_uint(scale * (float)(int32_t)r * 0x1p-31f);
    float lo = scale * (float)(int16_t)r * 0x1p-15f;
    float hi = scale * (float)(int16_t)(r >> 16) * 0x1p-15f;
    if (t == KERN_BF16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
        return *(uint32_t *)&v;
    }
    __half2 v = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&v;
}

static __global__ void fill_kernel(uint8_t *base, const int32_t *page, int n, size_t bytes,
                                   enum kern_dtype t, float scale, uint32_t seed) {
    for (int r = blockIdx.x; r < n; r += gridDim.x) {
        uint4 *p = (uint4 *)(base + (page ? (size_t)page[r] * 1024 : (size_t)r * bytes));
        for (size_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
            uint64_t at = ((uint64_t)r * (bytes / 16) + i) * 4;
            p[i] = make_uint4(word(t, scale, mix(seed, at)), word(t, scale, mix(seed, at + 1)),
                              word(t, scale, mix(seed, at + 2)), word(t, scale, mix(seed, at + 3)));
        }
    }
}

int device_floor_fill(struct device_floor *f, void *base, const int32_t *page, int n, size_t bytes,
                      enum kern_dtype t, float scale, uint32_t seed, struct err *e) {
    if (n < 1) return 0;
    int blocks = n < 8192 ? n : 8192;
    fill_kernel<<<blocks, 256, 0, f->c->stream>>>((uint8_t *)base, page, n, bytes, t, scale, seed);
    TRY(f, cudaGetLastError());
    return 0;
}

int device_floor_set(struct device_floor *f, void *p, int value, size_t bytes, struct err *e) {
    TRY(f, cudaMemsetAsync(p, value, bytes, f->c->stream));
    return 0;
}

/* ---- Bandwidth ---- */

__device__ static inline uint4 load(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

static __global__ void __launch_bounds__(SWEEP_THREADS, 2)
    sweep_kernel(const uint4 *p, size_t n, uint32_t *sink) {
    size_t all = (size_t)gridDim.x * SWEEP_THREADS;
    size_t i = (size_t)blockIdx.x * SWEEP_THREADS + threadIdx.x;
    uint32_t sum = 0;
    for (; i + (SWEEP_LOADS - 1) * all < n; i += SWEEP_LOADS * all) {
        uint4 v[SWEEP_LOADS];
#pragma unroll
        for (int k = 0; k < SWEEP_LOADS; k++) v[k] = load(p + i + (size_t)k * all);
#pragma unroll
        for (int k = 0; k < SWEEP_LOADS; k++) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < n; i += all) {
        uint4 v = load(p + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x5EED5EEDu) *sink = sum; /* keeps the loads alive */
}

static int time_copy(struct device_floor *f, uint8_t *p, size_t bytes, double *rate,
                     struct err *e) {
    for (int i = -2; i < REPEATS; i++) {
        int rc = device_floor_mark(f, i < 0 ? 0 : i, e);
        if (rc) return rc;
        TRY(f, cudaMemcpyAsync(p + bytes, p, bytes, cudaMemcpyDeviceToDevice, f->c->stream));
    }
    double ms;
    int rc = device_floor_mark(f, REPEATS, e);
    if (!rc) rc = median(f, &ms, e);
    if (!rc) *rate = 2.0 * (double)bytes / ms * 1e3;
    return rc;
}

static int time_sweep(struct device_floor *f, const uint8_t *p, size_t bytes, double *rate,
                      struct err *e) {
    for (int i = -2; i < REPEATS; i++) {
        int rc = device_floor_mark(f, i < 0 ? 0 : i, e);
        if (rc) return rc;
        sweep_kernel<<<2 * f->c->n_sms, SWEEP_THREADS, 0, f->c->stream>>>(
            (const uint4 *)p, bytes / sizeof(uint4), f->sink);
        TRY(f, cudaGetLastError());
    }
    double ms;
    int rc = device_floor_mark(f, REPEATS, e);
    if (!rc) rc = median(f, &ms, e);
    if (!rc) *rate = (double)bytes / ms * 1e3;
    return rc;
}

int device_floor_bandwidth(struct device_floor *f, size_t bytes, double *copy, double *sweep,
                           struct err *e) {
    struct kern *k = &f->c->kern;
    void *p;
    bytes = bytes >> 20 << 20;
    int rc = k->ops->reserve(k, 2 * bytes, &p, e);
    if (rc) return rc;
    rc = device_floor_fill(f, p, NULL, (int)(2 * bytes >> 20), 1 << 20, KERN_F32, 1, 1, e);
    if (!rc) rc = time_copy(f, (uint8_t *)p, bytes, copy, e);
    if (!rc) rc = time_sweep(f, (const uint8_t *)p, 2 * bytes, sweep, e);
    k->ops->unreserve(k, p);
    return rc;
}

/* ---- Matrix rate ---- */

struct product {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t in, out;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t best;
};

static int describe(struct device_floor *f, struct product *p) {
    struct cuda_ctx *c = f->c;
    cublasOperation_t turned = CUBLAS_OP_T;
    size_t most = CUDA_LT_WORKSPACE_BYTES;
    int found = 0;
    int rc = CUDA_NOTE_LT(c, cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (!rc)
        rc = CUDA_NOTE_LT(c, cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA,
                                                            &turned, sizeof turned));
    if (!rc)
        rc = CUDA_NOTE_LT(c,
                          cublasLtMatrixLayoutCreate(&p->in, CUDA_R_16BF, MATRIX, MATRIX, MATRIX));
    if (!rc)
        rc = CUDA_NOTE_LT(c,
                          cublasLtMatrixLayoutCreate(&p->out, CUDA_R_16BF, MATRIX, MATRIX, MATRIX));
    if (!rc) rc = CUDA_NOTE_LT(c, cublasLtMatmulPreferenceCreate(&p->pref));
    if (!rc)
        rc = CUDA_NOTE_LT(
            c, cublasLtMatmulPreferenceSetAttribute(
                   p->pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
    if (!rc)
        rc = CUDA_NOTE_LT(c, cublasLtMatmulAlgoGetHeuristic(c->lt, p->op, p->in, p->in, p->out,
                                                            p->out, p->pref, 1, &p->best, &found));
    return rc;
}

static void forget(struct product *p) {
    if (p->pref) cublasLtMatmulPreferenceDestroy(p->pref);
    if (p->out) cublasLtMatrixLayoutDestroy(p->out);
    if (p->in) cublasLtMatrixLayoutDestroy(p->in);
    if (p->op) cublasLtMatmulDescDestroy(p->op);
}

static int time_product(struct device_floor *f, const struct product *p, uint8_t *m, double *rate,
                        struct err *e) {
    const size_t bytes = 2 * (size_t)MATRIX * MATRIX;
    const float one = 1, zero = 0;
    struct cuda_ctx *c = f->c;
    double ms;
    for (int i = -3; i < REPEATS; i++) {
        int rc = device_floor_mark(f, i < 0 ? 0 : i, e);
        if (rc) return rc;
        rc = CUDA_NOTE_LT(c, cublasLtMatmul(c->lt, p->op, &one, m, p->in, m + bytes, p->in, &zero,
                                            m + 2 * bytes, p->out, m + 2 * bytes, p->out,
                                            &p->best.algo, c->lt_workspace, CUDA_LT_WORKSPACE_BYTES,
                                            c->stream));
        if (rc) return tell(f, rc, e);
    }
    int rc = device_floor_mark(f, REPEATS, e);
    if (!rc) rc = median(f, &ms, e);
    if (!rc) *rate = 2.0 * MATRIX * MATRIX * MATRIX / ms * 1e3;
    return rc;
}

int device_floor_matrix_rate(struct device_floor *f, double *rate, struct err *e) {
    struct kern *k = &f->c->kern;
    const size_t bytes = 2 * (size_t)MATRIX * MATRIX;
    struct product p = {};
    void *m;
    int rc = k->ops->reserve(k, 3 * bytes, &m, e);
    if (rc) return rc;
    rc = device_floor_fill(f, m, NULL, (int)(2 * bytes >> 20), 1 << 20, KERN_BF16, 1, 2, e);
    if (!rc) rc = tell(f, describe(f, &p), e);
    if (!rc) rc = time_product(f, &p, (uint8_t *)m, rate, e);
    forget(&p);
    k->ops->unreserve(k, m);
    return rc;
}
