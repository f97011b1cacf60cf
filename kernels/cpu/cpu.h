#ifndef TANDEM_KERNELS_CPU_H
#define TANDEM_KERNELS_CPU_H

/* Private to kernels/cpu/: the backend's context and the table of inner functions that each
 * instruction set fills. context.c chooses a table at open, ops.c turns each operation of kern_ops
 * into one threads_run over it. Inner functions work on a range or a share of the work, never start
 * threads, never allocate. */

#include "base/threads.h"
#include "kernels/kernels.h"

enum { CPU_MAX_THREADS = 256 };

struct cpu_ctx;

/* Packed activations of one class of rows. The buffer of a kern_act holds the generated rows' part
 * first (gen_bytes(n_gen, cols)), the prompt rows' part behind it, each in its own layout, so that
 * the kernel and the bits of a row follow from its class alone. */
enum cpu_class { CPU_GEN, CPU_PROMPT }; /* also the deals of a product's panels */

/* Products. `reference` and `plain` run anywhere; `avx2` and `avx512` need what their names say;
 * avx512 serves prompt rows by AMX bf16 tiles where the machine has them (ctx->amx). */
struct cpu_matmul_isa {
    /* Packed size; 0 where cols does not suit the dtype. */
    size_t (*weight_bytes)(enum kern_dtype t, int rows, int cols);
    /* Rows are packed in panels of this many (interleaved); the last panel is padded with zeros. */
    int panel_rows;
    /* Pack panels [begin, end) from the file layout at `src` (all rows). */
    void (*weight_pack)(const struct kern_weight *w, void *dst, const void *src, int begin,
                        int end);
    /* One row as f32 [cols], for embed. */
    void (*weight_row)(const struct kern_weight *w, int row, float *out);
    /* Bytes of a class's activations for n rows. */
    size_t (*act_bytes)(const struct cpu_ctx *c, enum cpu_class cls, int n, int cols);
    /* Pack row r (of n) of a class from f32 x[cols]; `act` is the start of the class's part. */
    void (*act_row)(const struct cpu_ctx *c, enum cpu_class cls, void *act, int r, int n, int cols,
                    const float *x);
    /* Share of thread `idx` of `n_threads` of out[n][...] = act W^T for one class: the panels of
     * outputs that threads_take(ctx->threads, cls, idx, ...) deals it, or a split of its own.
     * `scratch` is this thread's matmul scratch (ctx->matmul_scratch_bytes). */
    void (*matmul)(const struct cpu_ctx *c, enum cpu_class cls, int n, const struct kern_weight *w,
                   const void *act, float *out, int out_stride, int out_offset, void *scratch,
                   int idx, int n_threads);
};
/* Panels of a packed matrix. */
static inline int cpu_n_panels(const struct cpu_matmul_isa *isa, const struct kern_weight *w) {
    return (w->rows + isa->panel_rows - 1) / isa->panel_rows;
}
extern const struct cpu_matmul_isa cpu_matmul_reference, cpu_matmul_plain, cpu_matmul_avx2,
    cpu_matmul_avxvnni, cpu_matmul_avx512;

/* Row-wise arithmetic. kernels/cpu/rowwise.c is compiled once for each instruction set: 16 partial
 * sums in a fixed order, no contraction, so that every table but `reference` (double) gives the
 * same bits. */
struct cpu_rowwise_isa {
    /* x += delta (NULL: not), out = rmsnorm(x) * weight. out may be x. */
    void (*norm)(float *x, const float *delta, const float *weight, float eps, int cols,
                 float *out);
    /* out = silu(gate) * up. out may be gate or up. */
    void (*gate)(const float *gate, const float *up, int cols, float *out);
    /* cos and sin [half] of position * inv_freq, the angle in double, times scale; position < 2^24.
     */
    void (*rope_angles)(const float *inv_freq, int half, int32_t position, float scale, float *cos,
                        float *sin);
    /* One head in place: bias (NULL: not), norm (NULL: not), rotation by cos/sin [dim/2] (NULL:
     * not). */
    void (*rope_head)(float *x, int head_dim, const float *bias, const float *norm, float eps,
                      const float *cos, const float *sin, int dim, bool interleaved);
    /* Largest of x[n] and the lowest index that holds it; false where x holds NaN. */
    bool (*max)(const float *x, int n, float *max, int *idx);
    /* Sum of exp((x[i] - max) * inv_t) over i < n in an order that n alone decides; out (NULL: not)
     * gets the terms. */
    double (*exp_sum)(const float *x, int n, float max, float inv_t, float *out);
};
extern const struct cpu_rowwise_isa cpu_rowwise_reference, cpu_rowwise_plain, cpu_rowwise_avx2,
    cpu_rowwise_avx512;

/* Attention's inner functions; kernels/cpu/attention.h says what a job and an item are. */
struct attn_job;
struct attn_tile;
struct cpu_attn_isa {
    /* Write k[head_dim], v[head_dim] of one token into place t of a page's head. */
    void (*kv_write)(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                     const float *v);
    /* One tile's queries over node `node` of its KV tree; partials to the tile's slots. `scratch`
     * is the thread's own; node `then_node` of `then` (NULL: none) is what that thread takes next
     * and may be read ahead. `held`: the thread's item before was of the same tile and pass, so
     * that the scratch holds its queries. */
    void (*item)(struct attn_job *job, const struct attn_tile *tile, int node,
                 const struct attn_tile *then, int then_node, bool held, void *scratch);
    /* Reduce the tile's nodes in place and write its rows of the output. */
    void (*combine)(const struct attn_job *job, const struct attn_tile *tile);
    /* The tile's marked rows into taps->mass and taps->head_mass. */
    void (*mass)(struct attn_job *job, const struct attn_tile *tile, void *scratch);
};
extern const struct cpu_attn_isa cpu_attn_reference, cpu_attn_plain, cpu_attn_avx2, cpu_attn_avx512;

/* Pages of 8-bit keys and values; kernels/cpu/attention_q8.h says what they hold. Attention's own
 * functions call these where a cache is of KERN_Q8_0. */
struct cpu_q8_isa;
extern const struct cpu_q8_isa cpu_q8_plain, cpu_q8_avx2, cpu_q8_avxvnni, cpu_q8_avx512;

/* Scores of blocks; kernels/cpu/score.h says what a job is. kernels/cpu/score.c is compiled once
 * for each instruction set: every table but `reference` (double) gives the same bits. */
struct score_job;
struct cpu_score_isa {
    size_t (*scratch_bytes)(const struct kern_scorer *s, int n_threads);
    /* The query's side: the states themselves (one thread), then its products. */
    void (*queries)(const struct score_job *j);
    void (*rows)(const struct score_job *j, int idx, int n_threads);
    /* Share `idx` of the blocks. */
    void (*blocks)(const struct score_job *j, int idx, int n_threads);
};
extern const struct cpu_score_isa cpu_score_reference, cpu_score_plain, cpu_score_avx2,
    cpu_score_avx512;

/* Operations of kern_ops that live in ops_attention.c, ops_score.c, sample.c, accept.c and
 * advance.c; K and V of a token are written, rows attended, tokens drawn and rounds decided each in
 * one threads_run. */
int kern_cpu_rope_kv(struct kern *k, const struct kern_batch *b, const struct kern_rope *rope,
                     int n_heads, float *qkv, const struct kern_kv *kv);
size_t kern_cpu_attn_scratch_bytes(const struct kern *k, struct kern_rows rows, int n_seqs,
                                   int n_heads, int head_dim, int list_capacity);
int kern_cpu_attention(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                       int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                       const struct kern_attn_taps *taps, void *scratch, float *out);
int kern_cpu_note_states(struct kern *k, int n, const struct kern_note *notes, const float *x,
                         const struct kern_plane *plane, const int32_t *page, int capacity,
                         float *ring);
size_t kern_cpu_score_scratch_bytes(const struct kern *k, const struct kern_scorer *s,
                                    int n_blocks);
int kern_cpu_score(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                   void *scratch, float *out);
size_t kern_cpu_sample_scratch_bytes(const struct kern *k, int n_rows, int vocab);
int kern_cpu_sample(struct kern *k, int n_rows, int vocab, const int32_t *ids, const float *logits,
                    size_t stride, const struct kern_sample *params,
                    const struct kern_history *history, void *scratch, struct kern_sampled *out,
                    float *probs);
size_t kern_cpu_accept_scratch_bytes(const struct kern *k, int n_rounds, int vocab);
int kern_cpu_accept(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                    const struct kern_sample *params, const struct kern_history *history,
                    const struct kern_round *rounds, const int32_t *draft,
                    const struct kern_draft_probs *q, void *scratch, int32_t *n_accepted,
                    struct kern_sampled *out);
int kern_cpu_advance(struct kern *k, int n, struct kern_drawing *drawing,
                     const struct kern_sampled *out, const struct kern_next *next, int32_t *drawn,
                     int32_t *target);
int kern_cpu_tally(struct kern *k, int n_rounds, const struct kern_round *rounds,
                   const struct kern_sample *params, const int32_t *n_accepted,
                   const struct kern_sampled *out, uint16_t *output, size_t stride);
int kern_cpu_mark(struct kern *k, int i);
int kern_cpu_elapsed(struct kern *k, int from, int to, int64_t *ns);

/* The draw by Gumbel noise; kernels/cpu/gumbel.h says what it promises. */
struct cpu_gumbel_row;
typedef int cpu_gumbel_fn(const struct cpu_gumbel_row *g);
extern cpu_gumbel_fn cpu_gumbel_plain, cpu_gumbel_avx2, cpu_gumbel_avx512;

struct cpu_isa {
    const char *name;
    const struct cpu_matmul_isa *matmul;
    const struct cpu_rowwise_isa *rowwise;
    const struct cpu_attn_isa *attn;
    const struct cpu_q8_isa *q8;
    const struct cpu_score_isa *score;
    cpu_gumbel_fn *gumbel;
};

/* Tables that are always there; isa.c lists all that are linked. */
extern const struct cpu_isa cpu_isa_reference, cpu_isa_plain;

struct cpu_ctx {
    struct kern kern; /* first */
    struct threads *threads;
    enum kern_precision precision;
    const struct cpu_isa *isa;
    bool amx;           /* prompt products and prompt attention may use AMX bf16 */
    bool f32_weights;   /* an F32 matrix was packed: AMX's prompt rows keep an f32 copy beside their
                           tiles */
    bool float_weights; /* an F32, F16 or BF16 matrix was packed: generated rows keep an f32 copy
                           beside their bytes */
    size_t matmul_scratch_bytes; /* a thread */
    void *matmul_scratch[CPU_MAX_THREADS];
    int64_t mark_ns[KERN_MAX_MARKS];
};

static inline const struct cpu_ctx *cpu_ctx(const struct kern *k) {
    return (const struct cpu_ctx *)k;
}

#endif
