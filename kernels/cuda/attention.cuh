#ifndef TANDEM_KERNELS_CUDA_ATTENTION_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_CUH

/* Private to kernels/cuda/attention*.cu: one call's arguments as kernels take them by value, what a
 * row sees, and the instructions that attention is made of (barriers in shared memory, bulk copies
 * of a head's plane, 8 x 8 matrix loads, 16 x 8 x 16 products).
 *
 * attention.cu sends generated rows (below n_gen) to attention_gen.cu and prompt rows to
 * attention_prompt.cu. Each of the two writes `out` for its own class's rows, idle ones as zeros.
 * They share the scratch, one after the other. */

#include <math.h>

#include "kernels/cuda/barrier.cuh"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/page.cuh"

enum {
    ATTN_ENTRIES = KERN_LEAF / KERN_BLOCK, /* list entries of a leaf */
};

struct attn_args {
    /* Rows. */
    int n_gen, n_prompt, n_seqs;
    const int32_t *position, *row_seq, *seq_row, *seq_n_rows;
    /* Lists. */
    const int32_t *page, *block, *n_blocks;
    const uint8_t *quarters; /* of generated rows' entries; NULL: all */
    int capacity, seq_stride, head_stride;
    /* Pages. */
    const uint8_t *kv;
    size_t page_stride, k_offset, v_offset, kv_head_stride; /* bytes */
    bool bf16;                                              /* else f16 */
    int n_kv, head_dim;
    /* Queries. */
    int n_heads, group; /* group: query heads per KV head */
    float scale_log2;   /* scale * log2(e): weights are exp2(score * scale_log2 - ...) */
    const float *qkv;
    int qkv_stride; /* floats a row */
    float *out;     /* [n_rows][n_heads * head_dim] */
    /* Taps; each may be NULL. */
    float *mass, *head_mass;
    const int32_t *mass_line; /* not NULL where one of the two is there */
    int mass_head_stride;
    float *quarter_mass; /* beside mass */
    const uint64_t *ancestors;
    unsigned long long *kv_bytes;
    /* What calls of generated rows leave for those that repeat them; whether this one does. */
    uint8_t *found;
    bool repeated;
    /* Scratch of the call, shared by the classes. */
    uint8_t *scratch;
    size_t scratch_bytes;
    /* Not NULL: generated rows go here, packed for a product, and not to `out`. */
    uint16_t *act;
    int act_stride; /* elements */
    bool act_bf16;
};

/* attention_gen.cu; bytes of `found`, and of `scratch`. */
size_t cuda_attention_gen_found_bytes(int n_seqs, int n_heads);
size_t cuda_attention_gen_bytes(const struct cuda_ctx *c, int n_gen, int n_seqs, int n_heads,
                                int head_dim, int list_capacity);
int cuda_attention_gen(struct cuda_ctx *c, const struct attn_args *a);
/* attention_prompt.cu: rows n_gen .. n_gen + n_prompt - 1; the mass of both classes' marked rows
 * (called last, where a->mass or a->head_mass is set, with `out` written). */
size_t cuda_attention_prompt_bytes(const struct cuda_ctx *c, int n_gen, int n_prompt, int n_seqs,
                                   int n_heads, int head_dim, int list_capacity);
int cuda_attention_prompt(struct cuda_ctx *c, const struct attn_args *a);
int cuda_attention_mass(struct cuda_ctx *c, const struct attn_args *a);

/* ---- Lists and what is seen ---- */

__device__ static inline size_t attn_list(const struct attn_args &a, int seq, int head) {
    return (size_t)seq * (size_t)a.seq_stride + (size_t)head * (size_t)a.head_stride;
}
/* A head's plane of one page: KERN_BLOCK x head_dim elements in page.cuh's order. */
__device__ static inline const uint8_t *attn_plane(const struct attn_args &a, int page, int head,
                                                   bool value) {
    return a.kv + (size_t)page * a.page_stride + (value ? a.v_offset : a.k_offset) +
           (size_t)head * a.kv_head_stride;
}

/* Leading entries of a list that begin at or before `position`; blocks ascend. All lanes of a warp
 * call it with the same arguments and get the same answer. Nearly always one look at the end. */
__device__ static inline int attn_entries_until(const struct attn_args &a, size_t list,
                                                int position) {
    const int32_t *block = a.block + list * (size_t)a.capacity;
    int n = min(max(a.n_blocks[list], 0), a.capacity), lane = threadIdx.x & 31;
    while (n > 0) {
        int at = n - 32 + lane;
        bool seen = at < 0 || (long long)block[at] * KERN_BLOCK <= position;
        unsigned mask = __ballot_sync(~0u, seen);
        if (mask & 1) return max(n - 32, 0) + __popc(mask) - max(32 - n, 0);
        /* None of the last 32: 31 probes cut what is left into 32 parts. */
        n -= 32;
        if (n <= 32) continue;
        int part = n / 32;
        mask = __ballot_sync(~0u, (long long)block[lane * part] * KERN_BLOCK <= position);
        n = min(n, __popc(mask) * part + (mask == ~0u ? n : 0));
    }
    return 0;
}

/* Tokens of quarters, bits 0..3. */
__device__ static inline uint64_t attn_quarter_tokens(unsigned quarters) {
    uint64_t tokens = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (quarters >> i & 1) tokens |= (uint64_t)0xffff << (KERN_QUARTER * i);
    return tokens;
}

/* Rows of a sequence in this pass that a mask of ancestors has bits for. */
__device__ static inline int attn_pass_rows(const struct attn_args &a, int seq) {
    int first = __ldcg(&a.seq_row[seq]), n = min(__ldcg(&a.seq_n_rows[seq]), 64);
    return first < 0 ? 0 : min(n, a.n_gen + a.n_prompt - first);
}

/* Bit i: does `row` (of sequence seq, at `position`) see token i of the block? Rows that are idle
 * see nothing: the caller's business. */
__device__ static inline uint64_t attn_seen(const struct attn_args &a, int seq, int row,
                                            int position, int block) {
    long long n = (long long)position - (long long)block * KERN_BLOCK + 1;
    if (n <= 0) return 0;
    uint64_t seen = n >= KERN_BLOCK ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1;
    if (!a.ancestors) return seen;
    /* A token tree: rows of this pass are seen by their bit, everything older by position. */
    uint64_t mask = a.ancestors[row];
    int first = a.seq_row[seq], n_pass = attn_pass_rows(a, seq);
    for (int i = 0; i < n_pass; i++) {
        int at = a.position[first + i];
        if (at / KERN_BLOCK == block && !(mask >> i & 1))
            seen &= ~((uint64_t)1 << (at % KERN_BLOCK));
    }
    return seen;
}

/* ---- Copies to shared memory; addresses are 32-bit shared ones ---- */

/* Where chips have no bulk copies: a whole warp copies `bytes` (a multiple of 16, both sides
 * 16-byte aligned) to shared memory; `bar`, initialised with COPY_ARRIVALS for each copy of a
 * phase, completes when they have landed. Of a bulk copy one arrives. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define COPY_ARRIVALS 1
#else
#define COPY_ARRIVALS 32
#endif
__device__ static inline void copy_to_smem(uint32_t dst, const void *src, uint32_t bytes,
                                           uint32_t bar) {
    int lane = threadIdx.x & 31;
    const char *from = (const char *)__cvta_generic_to_global(src);
    for (uint32_t i = lane * 16; i < bytes; i += 32 * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + i), "l"(from + i)
                     : "memory");
    copies_arrive(bar);
}

/* ---- Matrices ---- */

/* Four 8 x 8 matrices of 16-bit elements; lane i hands in the address of row i % 8 of matrix i / 8.
 * Lane i gets of each its row i / 4, columns 2 (i % 4) and the next (with .trans: column i / 4,
 * rows 2 (i % 4) and the next). */
__device__ static inline void ldmatrix4(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
__device__ static inline void ldmatrix4_trans(uint32_t (&r)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
/* d[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane / 4, t = lane % 4: a0 = (g, 2t..), a1 = (g + 8,
 * 2t..), a2 = (g, 2t + 8..), a3 = (g + 8, 2t + 8..); b0 = (2t.., g), b1 = (2t + 8.., g); d0, d1 =
 * (g, 2t..), d2, d3 = (g + 8, 2t..). */
template <typename T>
__device__ static inline void mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1);
template <>
__device__ inline void mma16816<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
                 " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma16816<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3},"
                 " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two floats as a pair of 16-bit ones, lo in the low half. Finite values saturate in f16. */
template <typename T> __device__ static inline uint32_t pack2(float lo, float hi);
template <> __device__ inline uint32_t pack2<__half>(float lo, float hi) {
    if (fabsf(lo) > 65504.f) lo = copysignf(65504.f, lo);
    if (fabsf(hi) > 65504.f) hi = copysignf(65504.f, hi);
    __half2 h = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&h;
}
template <> __device__ inline uint32_t pack2<__nv_bfloat16>(float lo, float hi) {
    __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&h;
}
/* The same for weights, which lie in [0, 1] or are NaN. */
template <typename T> __device__ static inline uint32_t pack2_weights(float lo, float hi);
template <> __device__ inline uint32_t pack2_weights<__half>(float lo, float hi) {
    __half2 h = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&h;
}
template <> __device__ inline uint32_t pack2_weights<__nv_bfloat16>(float lo, float hi) {
    return pack2<__nv_bfloat16>(lo, hi);
}

__device__ static inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
