#ifndef TANDEM_KERNELS_CUDA_CUDA_CUH
#define TANDEM_KERNELS_CUDA_CUDA_CUH

/* Private to kernels/cuda/: the backend's context, how kernels are launched, and the operations
 * that context.cu puts into the table. Each .cu exports C functions of kern_ops's signatures.
 *
 * Launches. One stream. Every kernel goes through cuda_launch, which lets it start while the one
 * before it still runs (programmatic dependent launch). So every kernel calls pdl_wait() in every
 * thread before it reads or writes anything that another kernel or copy touches; before that it may
 * only read weights (nothing writes them after loading), set up shared memory, and compute.
 * pdl_trigger() early lets the next one start. On chips before sm_90 both do nothing.
 * embed, the first kernel of a pass, triggers behind its pdl_wait: whatever was enqueued before the
 * pass is done when another kernel of the pass starts. Attention of generated rows and its
 * combining kernel therefore read rows, lists and pages that the pass does not write before their
 * pdl_wait, rotation the rows. (A pass without embed begins behind a copy of its rows, which waits
 * for everything.) A pass's first attention of a list triggers behind its end likewise: what it
 * found is there for the others.
 *
 * Shapes are host arguments; contents are device memory. Nothing here reads device memory on the
 * host, allocates or waits outside of open, close, sync, download and record_*.
 *
 * Activations (kern_act): 16-bit floats, row-major, all rows of both classes one after another,
 * act_stride(cols) elements apart, columns beyond `cols` zero. bf16 where the partner is BF16, f16
 * otherwise, where values saturate at +-65,504 instead of becoming infinite. */

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "base/err.h"
#include "kernels/kernels.h"

enum {
    CUDA_MAX_RECORDINGS = 96,
    CUDA_DEQUANT_BYTES = 96 << 20,     /* a slice of a quantised matrix as f16, for prompt rows */
    CUDA_LT_WORKSPACE_BYTES = 32 << 20, /* cuBLASLt's */
};

struct cuda_recordings; /* recordings.cu */
struct cuda_marks;      /* marks.cu */
struct cuda_plans;      /* prompt.cu */

struct cuda_ctx {
    struct kern kern; /* first member */
    int device, sm;   /* sm: 90 for compute capability 9.0 */
    int n_sms;
    size_t max_smem; /* bytes a block may take after opting in */
    size_t l2_bytes;
    cudaStream_t stream;
    cublasLtHandle_t lt;
    void *own;          /* one device block: what follows is carved from it */
    void *lt_workspace; /* CUDA_LT_WORKSPACE_BYTES */
    void *dequant;      /* CUDA_DEQUANT_BYTES */
    struct cuda_recordings *recordings;
    struct cuda_plans *plans;
    bool recording;      /* between record_begin and record_end */
    uint64_t n_recorded; /* recordings made, or tried */
    struct cuda_marks *marks;
    /* The first failure since the last sync; operations return E_DEVICE and sync tells it. */
    char failure[400];
};

static inline struct cuda_ctx *cuda_ctx(struct kern *k) {
    return (struct cuda_ctx *)k;
}
static inline const struct cuda_ctx *cuda_ctx(const struct kern *k) {
    return (const struct cuda_ctx *)k;
}

/* Note a failed call in the context (the first one stays) and return E_DEVICE; 0 where rc is
 * success. `what` names the call. */
int cuda_note(struct cuda_ctx *c, cudaError_t rc, const char *what, const char *file, int line);
#define CUDA_NOTE(c, call) cuda_note((c), (call), #call, __FILE__, __LINE__)
/* The same for cuBLASLt. */
int cuda_note_lt(struct cuda_ctx *c, cublasStatus_t rc, const char *what, const char *file,
                 int line);
#define CUDA_NOTE_LT(c, call) cuda_note_lt((c), (call), #call, __FILE__, __LINE__)

/* ---- Launching ---- */

/* Enqueue kernel<<<grid, block, smem>>>(args...) on the context's stream; E_DEVICE where it does
 * not start. More than 48 KiB of smem: call cuda_allow_smem once before (at open, or under a static
 * flag of the launcher: it costs a driver call). */
template <typename... P, typename... A>
static inline int cuda_launch_at(struct cuda_ctx *c, const char *name, const char *file, int line,
                                 void (*kernel)(P...), dim3 grid, dim3 block, size_t smem,
                                 A... args) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attr[1];
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem;
    config.stream = c->stream;
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attr;
    config.numAttrs = c->sm >= 90 ? 1 : 0;
    cudaError_t rc = cudaLaunchKernelEx(&config, kernel, P(args)...);
    return rc == cudaSuccess ? 0 : cuda_note(c, rc, name, file, line);
}
#define CUDA_LAUNCH(c, kernel, grid, block, smem, ...)                                             \
    cuda_launch_at((c), #kernel, __FILE__, __LINE__, (kernel), (grid), (block), (smem), __VA_ARGS__)

template <typename K>
static inline int cuda_allow_smem(struct cuda_ctx *c, K kernel, size_t bytes) {
    return CUDA_NOTE(c, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)bytes));
}

/* Wait until everything enqueued before this kernel is done and visible. */
__device__ static inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The next kernel may be scheduled once every block has come here or ended. */
__device__ static inline void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- Activations ---- */

__host__ __device__ static inline int act_stride(int cols) {
    return (cols + 63) & ~63;
}
static inline bool act_is_bf16(const struct kern_act *a) {
    return a->partner == KERN_BF16;
}
/* Saturating; NaN stays NaN. */
__device__ static inline __half2 to_act_half2(float x, float y) {
    const __half2 most = __half2half2(__ushort_as_half(0x7bff)), least = __hneg2(most);
    return __hmax2_nan(__hmin2_nan(__floats2half2_rn(x, y), most), least);
}
__device__ static inline __half to_act_half(float x) {
    return __low2half(to_act_half2(x, x));
}
/* Two neighbours as they lie in memory; four. */
__device__ static inline uint32_t to_act_pair(float x, float y, bool bf16) {
    union {
        __half2 h;
        __nv_bfloat162 b;
        uint32_t bits;
    } out;
    if (bf16) out.b = __floats2bfloat162_rn(x, y);
    else out.h = to_act_half2(x, y);
    return out.bits;
}
__device__ static inline uint2 to_act_quad(float4 v, bool bf16) {
    return make_uint2(to_act_pair(v.x, v.y, bf16), to_act_pair(v.z, v.w, bf16));
}

/* ---- Weights ----
 *
 * PLAIN layout (weights of F16 and BF16 files; F32 ones are stored as F16, refused where a value is
 * beyond its range): row-major, plain_stride(cols) elements a row, zeros behind `cols`, and rows up
 * to a multiple of 16, the added ones zero. kern_weight.dtype is F16 or BF16 then.
 *
 * QUANTISED: kernels/cuda/quant.cuh. */

__host__ __device__ static inline int plain_stride(int cols) {
    return (cols + 63) & ~63;
}
static inline bool weight_is_plain(const struct kern_weight *w) {
    return w->dtype == KERN_F16 || w->dtype == KERN_BF16;
}

/* weights.cu */
size_t kern_cuda_weight_bytes(const struct kern *k, enum kern_dtype t, int rows, int cols);
int kern_cuda_weight_pack(struct kern *k, struct kern_weight *out, void *dst, enum kern_dtype t,
                          int rows, int cols, const void *src, struct err *e);
int kern_cuda_embed(struct kern *k, const struct kern_weight *w, const int32_t *token, int n_rows,
                    float *x);
/* Rows [first, first + n) of a weight of any layout as row-major 16-bit floats, plain_stride(cols)
 * apart, bf16 or f16: what prompt products multiply where the stored form is another. */
int cuda_weight_rows(struct cuda_ctx *c, const struct kern_weight *w, int first, int n, bool bf16,
                     void *dst);

/* ---- Products ---- */

/* matmul.cu: generated rows to a skinny kernel, prompt rows to cuBLASLt. */
size_t kern_cuda_act_bytes(const struct kern *k, struct kern_rows rows, int cols);
int kern_cuda_matmul(struct kern *k, struct kern_rows rows, const struct kern_weight *w,
                     struct kern_act act, float *out, int out_stride, int out_offset);
/* n rows of x (act_stride(w->cols) elements apart; bf16 or f16) times W^T to
 * out[r * out_stride + i]; one order of summation whatever n is. skinny_plain.cu, skinny_quant.cu
 * (f16 activations, or bf16 converted), prompt.cu. */
int cuda_skinny_plain(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                      bool x_bf16, float *out, int out_stride);
int cuda_skinny_quant(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                      bool x_bf16, float *out, int out_stride);
int cuda_prompt_product(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                        bool x_bf16, float *out, int out_stride);
/* Called by open and close: cuBLASLt's plans are cached by shape. */
int cuda_prompt_open(struct cuda_ctx *c, struct err *e);
void cuda_prompt_close(struct cuda_ctx *c);

/* ---- Rows: rowwise.cu, rope.cu ---- */

int kern_cuda_norm_pack(struct kern *k, struct kern_rows rows, int cols, float *x,
                        const float *delta, const float *weight, float eps, struct kern_act act,
                        float *normed);
int kern_cuda_pack(struct kern *k, struct kern_rows rows, int cols, const float *x,
                   struct kern_act act);
int kern_cuda_gate_pack(struct kern *k, struct kern_rows rows, int cols, const float *gate_up,
                        struct kern_act act);
int kern_cuda_gather(struct kern *k, const float *x, int cols, const int32_t *row_idx, int n,
                     float *x_out);
int kern_cuda_copy_page(struct kern *k, void *dst, const void *src, size_t bytes);
int kern_cuda_rope_kv(struct kern *k, const struct kern_batch *b, const struct kern_rope *rope,
                      int n_heads, float *qkv, const struct kern_kv *kv);

/* ---- Attention: attention.cu (dispatch, scratch), attention_gen.cu, attention_prompt.cu ---- */

size_t kern_cuda_attn_scratch_bytes(const struct kern *k, struct kern_rows rows, int n_seqs,
                                    int n_heads, int head_dim, int list_capacity);
int kern_cuda_attention(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                        int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                        const struct kern_attn_taps *taps, void *scratch, float *out);

/* ---- States and scores: notes.cu, score.cu ---- */

int kern_cuda_note_states(struct kern *k, int n, const struct kern_note *notes, const float *x,
                          const struct kern_plane *plane, const int32_t *page, int capacity,
                          float *ring);
size_t kern_cuda_score_scratch_bytes(const struct kern *k, const struct kern_scorer *s,
                                     int n_blocks);
/* E_UNSUPPORTED where the device has less shared memory than the product's tiles need. */
int kern_cuda_score(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                    void *scratch, float *out);

/* ---- Drawing: sample.cu, accept.cu ---- */

size_t kern_cuda_sample_scratch_bytes(const struct kern *k, int n_rows, int vocab);
int kern_cuda_sample(struct kern *k, int n_rows, int vocab, const int32_t *ids, const float *logits,
                     size_t stride, const struct kern_sample *params,
                     const struct kern_history *history, void *scratch, struct kern_sampled *out,
                     float *probs);
size_t kern_cuda_accept_scratch_bytes(const struct kern *k, int n_rounds, int vocab);
int kern_cuda_accept(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                     const struct kern_sample *params, const struct kern_history *history,
                     const struct kern_round *rounds, const int32_t *draft,
                     const struct kern_draft_probs *q, void *scratch, int32_t *n_accepted,
                     struct kern_sampled *out);

/* ---- Recordings: recordings.cu ---- */

int cuda_recordings_open(struct cuda_ctx *c, struct err *e);
void cuda_recordings_close(struct cuda_ctx *c);
/* Give up the capture under way, if any; what it held is lost. */
void cuda_recordings_abort(struct cuda_ctx *c);
int kern_cuda_record_begin(struct kern *k, const uint64_t key[KERN_RECORD_KEY], bool *replayed,
                           struct err *e);
int kern_cuda_record_end(struct kern *k, struct err *e);

/* ---- Between passes: advance.cu; time: marks.cu ---- */

int kern_cuda_advance(struct kern *k, int n, struct kern_drawing *drawing,
                      const struct kern_sampled *out, const struct kern_next *next, int32_t *drawn,
                      int32_t *target);
int kern_cuda_tally(struct kern *k, int n_rounds, const struct kern_round *rounds,
                    const struct kern_sample *params, const int32_t *n_accepted,
                    const struct kern_sampled *out, uint16_t *output, size_t stride);
int cuda_marks_open(struct cuda_ctx *c, struct err *e);
void cuda_marks_close(struct cuda_ctx *c);
int kern_cuda_mark(struct kern *k, int i);
int kern_cuda_elapsed(struct kern *k, int from, int to, int64_t *ns);

#endif
