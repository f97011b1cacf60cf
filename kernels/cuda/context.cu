/* Opening a device, its memory, and how failures are told. One device, one stream; everything that
 * the backend needs for itself is one block, taken at open. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/cuda/cuda.cuh"

enum { OLDEST_SM = 80 }; /* bf16 tensor cores and asynchronous copies */
static const size_t OWN_BYTES = (size_t)CUDA_LT_WORKSPACE_BYTES + CUDA_DEQUANT_BYTES;

/* ---- Failures ---- */

static int note(struct cuda_ctx *c, const char *problem, const char *what, const char *file,
                int line) {
    if (!c->failure[0]) {
        size_t n = strcspn(what, "(");
        snprintf(c->failure, sizeof c->failure, "%s:%d: %.*s: %s", file, line, (int)n, what,
                 problem);
    }
    return E_DEVICE;
}

int cuda_note(struct cuda_ctx *c, cudaError_t rc, const char *what, const char *file, int line) {
    return rc == cudaSuccess ? 0 : note(c, cudaGetErrorString(rc), what, file, line);
}

int cuda_note_lt(struct cuda_ctx *c, cublasStatus_t rc, const char *what, const char *file,
                 int line) {
    return rc == CUBLAS_STATUS_SUCCESS ? 0 : note(c, cublasLtGetStatusString(rc), what, file, line);
}

/* What went wrong since the last time, to the caller. */
static int tell(struct cuda_ctx *c, int rc, struct err *e) {
    if (!c->failure[0]) return rc;
    rc = err_raise(e, E_DEVICE, "CUDA: %s", c->failure);
    c->failure[0] = 0;
    cudaGetLastError(); /* what is not sticky is forgotten */
    return rc;
}

/* The driver keeps a current device for each thread, 0 at first. */
static void make_current(const struct cuda_ctx *c) {
    static thread_local int current;
    if (current == c->device) return;
    cudaSetDevice(c->device);
    current = c->device;
}

/* ---- Memory ---- */

static int op_reserve(struct kern *k, size_t bytes, void **out, struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    size_t free_bytes = 0, total = 0;
    *out = NULL;
    make_current(c);
    if (bytes == 0) return err_raise(e, E_INVALID, "reserve: no bytes asked for");
    if (cudaMalloc(out, bytes) != cudaSuccess) {
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        return err_raise(e, E_NOMEM,
                         "the device has no %zu bytes in one piece: %zu of %zu are free", bytes,
                         free_bytes, total);
    }
    int rc = CUDA_NOTE(c, cudaMemsetAsync(*out, 0, bytes, c->stream));
    if (!rc) rc = CUDA_NOTE(c, cudaStreamSynchronize(c->stream));
    return tell(c, rc, e);
}

static void op_unreserve(struct kern *k, void *p) {
    (void)k;
    if (p) cudaFree(p);
}

static int op_host_reserve(struct kern *k, size_t bytes, void **out, struct err *e) {
    *out = NULL;
    if (bytes == 0) return err_raise(e, E_INVALID, "reserve: no bytes asked for");
    if (cudaMallocHost(out, bytes) != cudaSuccess) {
        cudaGetLastError();
        return err_raise(e, E_NOMEM, "the system pins no %zu bytes of host memory", bytes);
    }
    memset(*out, 0, bytes);
    (void)k;
    return 0;
}

static void op_host_unreserve(struct kern *k, void *p) {
    (void)k;
    if (p) cudaFreeHost(p);
}

/* The driver copies a pageable source before the call returns, and reads a pinned one later. */
static int op_upload(struct kern *k, void *dst, const void *host, size_t bytes, struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT(!c->recording && ((dst && host) || bytes == 0));
    make_current(c); /* a step begins with an upload, on whichever thread */
    if (!bytes) return 0;
    return tell(
        c, CUDA_NOTE(c, cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, c->stream)), e);
}

static int op_fetch(struct kern *k, void *host, const void *src, size_t bytes, struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT(!c->recording && ((src && host) || bytes == 0));
    if (!bytes) return 0;
    return tell(
        c, CUDA_NOTE(c, cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, c->stream)), e);
}

static int op_sync(struct kern *k, struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    make_current(c);
    cuda_recordings_abort(c); /* after a failure in the middle of one */
    return tell(c, CUDA_NOTE(c, cudaStreamSynchronize(c->stream)), e);
}

static int op_download(struct kern *k, void *host, const void *src, size_t bytes, struct err *e) {
    int rc = op_fetch(k, host, src, bytes, e);
    return rc ? rc : op_sync(k, e);
}

static void op_info(const struct kern *k, struct kern_device_info *out) {
    const struct cuda_ctx *c = cuda_ctx(k);
    cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    memset(out, 0, sizeof *out);
    out->own_bytes = OWN_BYTES;
    out->kv_types = 1u << KERN_F16 | 1u << KERN_BF16;
    out->records = true;
    out->quarters = true;
    if (!c->stream) {
        snprintf(out->name, sizeof out->name, "a CUDA device (none was opened)");
        return;
    }
    cudaMemGetInfo(&free_bytes, &total);
    if (cudaGetDeviceProperties(&p, c->device) == cudaSuccess)
        snprintf(out->name, sizeof out->name, "%.80s, %d SMs, sm_%d", p.name, c->n_sms, c->sm);
    out->memory_bytes = total;
    out->free_bytes = free_bytes;
}

/* ---- Life ---- */

static void op_close(struct kern *k) {
    struct cuda_ctx *c = cuda_ctx(k);
    if (!c) return;
    if (c->stream) cudaStreamSynchronize(c->stream);
    if (c->lt) cuda_prompt_close(c);
    cuda_recordings_close(c);
    cuda_marks_close(c);
    if (c->lt) cublasLtDestroy(c->lt);
    if (c->own) cudaFree(c->own);
    if (c->stream) cudaStreamDestroy(c->stream);
    free(c);
}

static const struct kern_ops cuda_ops = {
    .backend = "cuda",
    .close = op_close,
    .info = op_info,
    .reserve = op_reserve,
    .unreserve = op_unreserve,
    .host_reserve = op_host_reserve,
    .host_unreserve = op_host_unreserve,
    .upload = op_upload,
    .download = op_download,
    .fetch = op_fetch,
    .sync = op_sync,
    .record_begin = kern_cuda_record_begin,
    .record_end = kern_cuda_record_end,
    .mark = kern_cuda_mark,
    .elapsed = kern_cuda_elapsed,
    .weight_bytes = kern_cuda_weight_bytes,
    .weight_pack = kern_cuda_weight_pack,
    .embed = kern_cuda_embed,
    .act_bytes = kern_cuda_act_bytes,
    .norm_pack = kern_cuda_norm_pack,
    .pack = kern_cuda_pack,
    .gate_pack = kern_cuda_gate_pack,
    .matmul = kern_cuda_matmul,
    .gather = kern_cuda_gather,
    .rope_kv = kern_cuda_rope_kv,
    .attn_scratch_bytes = kern_cuda_attn_scratch_bytes,
    .attention = kern_cuda_attention,
    .note_states = kern_cuda_note_states,
    .score_scratch_bytes = kern_cuda_score_scratch_bytes,
    .score = kern_cuda_score,
    .copy_page = kern_cuda_copy_page,
    .sample_scratch_bytes = kern_cuda_sample_scratch_bytes,
    .sample = kern_cuda_sample,
    .accept_scratch_bytes = kern_cuda_accept_scratch_bytes,
    .accept = kern_cuda_accept,
    .advance = kern_cuda_advance,
    .tally = kern_cuda_tally,
};

/* Is there a device of that number that these kernels run on? Everything missing is
 * E_UNSUPPORTED: the caller may go on with the CPU. */
static int find_device(struct cuda_ctx *c, int device, struct err *e) {
    int n = 0, driver = 0, runtime = 0;
    cudaError_t rc = cudaGetDeviceCount(&n);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (rc == cudaErrorInsufficientDriver && driver > 0)
        return err_raise(e, E_UNSUPPORTED,
                         "CUDA: the driver is for CUDA %d.%d, this build needs %d.%d: update the "
                         "driver, or use --device cpu",
                         driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (rc == cudaErrorInsufficientDriver || rc == cudaErrorNoDevice || (!rc && n == 0))
        return err_raise(e, E_UNSUPPORTED,
                         "CUDA: no NVIDIA GPU and driver are visible here (built for CUDA %d.%d); "
                         "use --device cpu",
                         runtime / 1000, runtime % 1000 / 10);
    if (rc != cudaSuccess) return err_raise(e, E_UNSUPPORTED, "CUDA: %s", cudaGetErrorString(rc));
    if (device < 0 || device >= n)
        return err_raise(e, E_RANGE, "CUDA device %d: %d visible, numbered from 0", device, n);
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    c->device = device;
    c->sm = 10 * major + minor;
    if (c->sm < OLDEST_SM)
        return err_raise(e, E_UNSUPPORTED,
                         "CUDA device %d has compute capability %d.%d, the kernels need %d.%d or "
                         "newer; use --device cpu",
                         device, major, minor, OLDEST_SM / 10, OLDEST_SM % 10);
    return 0;
}

static int read_limits(struct cuda_ctx *c) {
    int sms = 0, smem = 0, l2 = 0;
    int rc = CUDA_NOTE(c, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, c->device));
    if (!rc)
        rc = CUDA_NOTE(
            c, cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, c->device));
    if (!rc) rc = CUDA_NOTE(c, cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, c->device));
    c->n_sms = sms;
    c->max_smem = (size_t)smem;
    c->l2_bytes = (size_t)l2;
    return rc;
}

/* Sizes of buffers depend on these as little as may be; a plan without a device takes an H200's. */
static void plan_limits(struct cuda_ctx *c) {
    c->sm = 90;
    c->n_sms = 132;
    c->max_smem = 227 << 10;
    c->l2_bytes = (size_t)60 << 20;
}

/* The backend's own memory. A device too small for that says so with numbers. */
static int take_own(struct cuda_ctx *c, struct err *e) {
    int rc = op_reserve(&c->kern, OWN_BYTES, &c->own, e);
    if (rc) return err_prefix(e, rc, "the kernels' own memory");
    c->lt_workspace = c->own;
    c->dequant = (uint8_t *)c->own + CUDA_LT_WORKSPACE_BYTES;
    return 0;
}

/* Is there code for this device in the binary? Asked with a kernel that every build has. */
static __global__ void probe_kernel() {
    pdl_wait();
}

static int check_code(struct cuda_ctx *c, struct err *e) {
    cudaFuncAttributes a;
    cudaError_t rc = cudaFuncGetAttributes(&a, probe_kernel);
    /* PTX of an older chip, compiled at start, has none of the newer one's instructions: pdl_wait
     * would wait for nothing. */
    if (rc == cudaSuccess && a.ptxVersion < c->sm) c->sm = a.ptxVersion;
    if (rc == cudaSuccess) return 0;
    return err_raise(e, E_UNSUPPORTED,
                     "CUDA: this build has no code for sm_%d (%s): configure with --cuda-arch %d",
                     c->sm, cudaGetErrorString(rc), c->sm);
}

int kern_cuda_open(struct kern **out, const struct kern_options *o, struct err *e) {
    *out = NULL;
    if (o->precision == KERN_REFERENCE)
        return err_raise(e, E_INVALID, "the f32 reference path is the CPU's: use --device cpu");
    struct cuda_ctx *c = (struct cuda_ctx *)calloc(1, sizeof *c);
    if (!c) return err_raise(e, E_NOMEM, "kernels: cannot allocate the context");
    c->kern.ops = &cuda_ops;
    if (o->plan_only) {
        plan_limits(c);
        *out = &c->kern;
        return 0;
    }
    int rc = find_device(c, o->device, e);
    if (rc) {
        free(c);
        return rc;
    }
    make_current(c);
    rc = read_limits(c);
    if (!rc) rc = CUDA_NOTE(c, cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    if (!rc) rc = CUDA_NOTE_LT(c, cublasLtCreate(&c->lt));
    if (rc) rc = tell(c, rc, e);
    if (!rc) rc = check_code(c, e);
    if (!rc) rc = take_own(c, e);
    if (!rc) rc = cuda_recordings_open(c, e);
    if (!rc) rc = cuda_marks_open(c, e);
    if (!rc) rc = cuda_prompt_open(c, e);
    if (rc) {
        op_close(&c->kern);
        return rc;
    }
    *out = &c->kern;
    return 0;
}
