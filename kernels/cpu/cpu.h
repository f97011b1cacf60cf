#ifndef TANDEM_KERNELS_CPU_H
#define TANDEM_KERNELS_CPU_H

/* Private to kernels/cpu/: the backend's context and the table of inner functions that each instruction set
 * fills. context.c chooses a table at open, ops.c turns each operation of kern_ops into one threads_run
 * over it. Inner functions work on a range or a share of the work, never start threads, never allocate. */

#include "base/threads.h"
#include "kernels/kernels.h"

enum { CPU_MAX_THREADS = 256 };

struct cpu_ctx;

/* Packed activations of one class of rows. The buffer of a kern_act holds the generated rows' part first
 * (gen_bytes(n_gen, cols)), the prompt rows' part behind it, each in its own layout, so that the kernel and
 * the bits of a row follow from its class alone. */
enum cpu_class { CPU_GEN, CPU_PROMPT };

/* Products. `reference` and `plain` run anywhere; `avx2` and `avx512` need what their names say; avx512
 * serves prompt rows by AMX bf16 tiles where the machine has them (ctx->amx). */
struct cpu_matmul_isa {
    /* Packed size; 0 where cols does not suit the dtype. */
    size_t (*weight_bytes)(enum kern_dtype t, int rows, int cols);
    /* Rows are packed in panels of this many (interleaved); the last panel is padded with zeros. */
    int panel_rows;
    /* Pack panels [begin, end) from the file layout at `src` (all rows). */
    void (*weight_pack)(const struct kern_weight *w, void *dst, const void *src, int begin, int end);
    /* One row as f32 [cols], for embed. */
    void (*weight_row)(const struct kern_weight *w, int row, float *out);
    /* Bytes of a class's activations for n rows. */
    size_t (*act_bytes)(const struct cpu_ctx *c, enum cpu_class cls, int n, int cols);
    /* Pack row r (of n) of a class from f32 x[cols]; `act` is the start of the class's part. */
    void (*act_row)(const struct cpu_ctx *c, enum cpu_class cls, void *act, int r, int n, int cols,
                    const float *x);
    /* Share `idx` of `n_threads` of out[n][...] = act W^T for one class; splits by output panels. `scratch`
     * is this thread's matmul scratch (ctx->matmul_scratch_bytes). */
    void (*matmul)(const struct cpu_ctx *c, enum cpu_class cls, int n, const struct kern_weight *w,
                   const void *act, float *out, int out_stride, int out_offset, void *scratch, int idx,
                   int n_threads);
};

/* Row-wise arithmetic. kernels/cpu/rowwise.c is compiled once for each instruction set: 16 partial sums in
 * a fixed order, no contraction, so that every table but `reference` (double) gives the same bits. */
struct cpu_rowwise_isa {
    /* x += delta (NULL: not), out = rmsnorm(x) * weight. */
    void (*norm)(float *x, const float *delta, const float *weight, float eps, int cols, float *out);
    /* out = silu(gate) * up. */
    void (*gate)(const float *gate, const float *up, int cols, float *out);
    /* One head in place: bias (NULL: not), norm (NULL: not), rotation by cos/sin [dim/2]. */
    void (*rope_head)(float *x, int head_dim, const float *bias, const float *norm, float eps,
                      const float *cos, const float *sin, int dim, bool interleaved);
};

/* Attention. A work item is (sequence, KV head, tile of its rows, node of the KV tree). */
struct cpu_attn_isa {
    /* Write k[head_dim], v[head_dim] of one token into place t of a page's head. */
    void (*kv_write)(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                     const float *v);
    size_t (*scratch_bytes)(const struct cpu_ctx *c, struct kern_rows rows, int n_seqs, int n_heads,
                            int head_dim, int list_capacity);
    /* Share idx of n_threads of the whole operation (phase 0: leaves; 1: combine). */
    void (*attention)(const struct cpu_ctx *c, const struct kern_batch *b,
                      const struct kern_lists *lists, int n_heads, float scale, const float *qkv,
                      const struct kern_kv *kv, const struct kern_attn_taps *taps, void *scratch,
                      float *out, int phase, int idx, int n_threads);
};

struct cpu_isa {
    const char *name;
    const struct cpu_matmul_isa *matmul;
    const struct cpu_rowwise_isa *rowwise;
    const struct cpu_attn_isa *attn;
};

/* Tables. The ones that need more than the baseline are NULL in a build for another architecture. */
extern const struct cpu_isa cpu_isa_reference, cpu_isa_plain, cpu_isa_avx2, cpu_isa_avx512;

struct cpu_ctx {
    struct kern kern; /* first */
    struct threads *threads;
    enum kern_precision precision;
    const struct cpu_isa *isa;
    bool amx; /* prompt products and prompt attention may use AMX bf16 */
    size_t matmul_scratch_bytes; /* a thread */
    void *matmul_scratch[CPU_MAX_THREADS];
};

static inline const struct cpu_ctx *cpu_ctx(const struct kern *k) { return (const struct cpu_ctx *)k; }

#endif
