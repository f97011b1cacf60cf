#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_CUH

/* What the kernels of generated rows share (attention_gen.cu says how the work is cut): the plan of
 * a call, what lies in shared memory, and how two nodes of the tree of pages are joined. */

#include "kernels/cuda/attention.cuh"

enum {
    GEN_WARPS = 4,                      /* that compute */
    GEN_THREADS = (GEN_WARPS + 1) * 32, /* and one that loads */
    GEN_ITEMS = 4,                      /* items described ahead */
    GEN_MAX_STAGES = 32,
    GEN_MAX_Q = 40,       /* queries of an item at most: gen_cut */
    GEN_MAX_BLOCKS = 304, /* of the grid */
    GEN_FEW = 4,          /* pages of a block up to which one block an SM will do */
    GEN_STAY = 8,         /* blocks, the last ones, that stay without work: attention_gen.cu */
    GEN_FOLD = 4,         /* pages that are joined one after another; above them a binary tree */
    GEN_FOLD_LEVEL = 2,
    GEN_MAX_SHELVES = 2,  /* places in shared memory for nodes of 2 and 4 folds */
    GEN_PAIR_WIDTH = 128, /* tiles * head_dim up to which two pages at a time pay */
    GEN_LEVEL = 7,        /* an item has up to 2^this pages, more where the scratch asks for it */
    GEN_MAX_LEVELS = 24,
    GEN_START_BYTES = 368, /* of gen_start */
    GEN_COMBINE_WARPS = 4,
    GEN_BESIDE = 2,          /* blocks of the combining kernel for which there is room on an SM */
    GEN_COMBINE_SMEM = 3200, /* of each, beside its tables */
};
static const size_t GEN_WINDOW = 64 << 10;          /* bytes that an SM waits for */
static const long long GEN_SMALL = 16 << 20;        /* where nothing is gained by waiting */
static const size_t GEN_SCRATCH = (size_t)48 << 20; /* of partials */

template <int D> struct gen_cut {
    static constexpr int pairs = (D + 63) / 64; /* 16 dimensions each, of a warp: warp + 4 i */
    static constexpr int max_tiles = D <= 128 ? 5 : 3; /* of 8 queries */
    static constexpr int max_q = 8 * max_tiles;
    static constexpr int per_sm = D <= 128 ? 2 : 1;   /* blocks */
    static constexpr int tile_floats = 4 * pairs + 4; /* of a node of a tile, a thread */
};
static_assert(gen_cut<128>::max_q <= GEN_MAX_Q && gen_cut<256>::max_q <= GEN_MAX_Q, "");
static inline int gen_max_q(int head_dim) {
    return head_dim <= 128 ? gen_cut<128>::max_q : gen_cut<256>::max_q;
}

/* What the host decides from capacities. */
struct gen_plan {
    int n_lists, per_seq, heads_in; /* lists, of a sequence; KV heads that share one */
    int max_q, n_blocks;            /* n_blocks: of the grid of attention_gen.cu */
    int n_few;                      /* of them, where they have up to GEN_FEW pages: one an SM */
    bool alone;                     /* there cannot be more pages than that */
    uint32_t max_q_by, group_by;    /* for gen_divide */
    int max_level, n_slots;
    int shelf, n_shelves; /* offset in shared memory; nodes of 2, 4 folds that may wait there */
    int n_stages, window; /* window: stages that wait for memory at a time */
    int n_parts;          /* of a head's dimensions, for the combining kernel */
    float2 *ml;           /* [n_slots] m (of exp2), l */
    float *o;             /* [n_slots][head_dim] */
    float *stack;         /* [blocks][max_level - 2][tiles][tile_floats][128]: nodes that wait */
};

/* An item that is on its way through the ring. */
struct gen_item {
    int seq, head, row, n_q; /* row: the sequence's first; n_q: its queries */
    int q0;                  /* first query of the item */
    int n_pages;             /* -1: no more items */
    int slot;                /* of the node's query 0 */
    int only;                /* 1: the list's only node, straight to `out` */
    int fresh;               /* 1: other queries than the item before */
};

/* A page's block with the quarters that are not there above it, so that a page that lacks any
 * counts as one that not all rows see whole. */
enum { GEN_QUARTER_SHIFT = 27, GEN_BLOCK_MASK = (1 << GEN_QUARTER_SHIFT) - 1 };
__device__ static inline int gen_page_of(int block, unsigned quarters) {
    return block | (int)((quarters ^ 15) << GEN_QUARTER_SHIFT);
}
__device__ static inline unsigned gen_quarters_of(int page) {
    return (unsigned)page >> GEN_QUARTER_SHIFT ^ 15;
}

struct gen_shared {
    uint64_t full[GEN_MAX_STAGES], empty[GEN_MAX_STAGES];
    uint64_t item_full[GEN_ITEMS], item_empty[GEN_ITEMS];
    int block[GEN_MAX_STAGES]; /* of the page in a stage, and what it lacks: gen_page_of */
    struct gen_item item[GEN_ITEMS];
    uint64_t seen[2][GEN_MAX_Q]; /* tokens of a page that a query sees */
    int pos[GEN_MAX_Q];          /* of queries' rows; -1: sees nothing */
    /* Of a query: largest score of a warp's tokens (2 pages); sum of their weights (wide heads). */
    alignas(16) float top[GEN_MAX_Q][GEN_WARPS], sum[GEN_MAX_Q][GEN_WARPS];
    float2 waits[1 + GEN_MAX_SHELVES][24];      /* m, l of nodes in registers and on shelves */
    alignas(16) uint8_t start[GEN_START_BYTES]; /* gen_start, for the calls after this one */
};

/* Shared memory: gen_shared, queries, weights of a page, tables, the ring. What the tensor cores
 * read begins at 1,024 bytes. */
struct gen_layout {
    size_t queries, weights, tables, ring;
};
/* ints */
__host__ __device__ static inline size_t gen_table_ints(int n_seqs, int n_lists) {
    return (size_t)n_seqs * 4 + (size_t)n_lists * 5 + 2 * GEN_MAX_LEVELS + 3;
}
/* attn_args.found: a gen_start for each block, then the tables. */
__host__ __device__ static inline int *gen_found_tables(uint8_t *found) {
    return (int *)(found + GEN_MAX_BLOCKS * GEN_START_BYTES);
}
__host__ __device__ static inline struct gen_layout gen_layout(int head_dim, int max_q, int n_seqs,
                                                               int n_lists) {
    struct gen_layout at;
    at.queries = (sizeof(struct gen_shared) + 1023) / 1024 * 1024;
    at.weights = at.queries + (size_t)(max_q / 8 * ((head_dim + 31) / 32)) * 512;
    int pages = max_q / 8 * head_dim <= GEN_PAIR_WIDTH ? 2 : 1;
    at.tables = at.weights + (size_t)(pages * max_q) * KERN_BLOCK * 2;
    at.ring = (at.tables + gen_table_ints(n_seqs, n_lists) * 4 + 1023) / 1024 * 1024;
    return at;
}

/* x / d for 0 <= x, x d < 2^32, by = gen_divisor(d). */
static inline uint32_t gen_divisor(int d) {
    return d < 2 ? 0 : (uint32_t)(((uint64_t)1 << 32) / (uint32_t)d + 1);
}
__device__ static inline int gen_divide(int x, uint32_t by) {
    return by ? (int)__umulhi((uint32_t)x, by) : x;
}
__device__ __noinline__ static int gen_long_quotient(int x, int d) {
    return x / d;
}
/* x / d, 0 <= x, 0 < d; quick where x is below 2^22. */
__device__ static inline int gen_quotient(int x, int d) {
    if (x < d) return 0;
    if (x >= 1 << 22) return gen_long_quotient(x, d);
    int q = __float2int_rz(__fdividef((float)x, (float)d)), left = x - q * d;
    return left < 0 ? q - 1 : left >= d ? q + 1 : q;
}

/* ---- Joining nodes ---- */

/* Factors of two neighbours with largest scores ma and mb in their join, whose own is *m; a node
 * that sees nothing (-infinity) gets 0. Every join of this call takes them from here, and every
 * value is b * wb + (a * wa) in one fused step: the same bits wherever it is done. */
__device__ static inline void gen_factors(float ma, float mb, float *m, float *wa, float *wb) {
    float top = fmaxf(ma, mb), from = top == -INFINITY ? 0.f : top;
    *m = top;
    *wa = exp2_fast(ma - from);
    *wb = exp2_fast(mb - from);
}
__device__ static inline float gen_join(float a, float wa, float b, float wb) {
    return __fmaf_rn(b, wb, __fmul_rn(a, wa));
}
/* A value of `out`; by: 1 / l. */
__device__ static inline float gen_out(float v, float by) {
    return __fmaf_rn(v, by, 0.f); /* never -0 */
}
__device__ static inline float gen_by(float l) {
    return l == 0.f ? 0.f : 1.f / l; /* a row that sees nothing: zeros */
}

/* attention_combine.cu: from partials of nodes to `out`, right behind attention_gen.cu's kernel. */
int cuda_attention_gen_combine(struct cuda_ctx *c, const struct attn_args *a, struct gen_plan p);

#endif
