#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_CUH

/* What the kernels of generated rows share (attention_gen.cu says how the work is cut): the plan of
 * a call, what lies in shared memory, and how two nodes of the tree of leaves are joined. */

#include "kernels/cuda/attention.cuh"

enum {
    GEN_WARPS = 8,                      /* that compute */
    GEN_THREADS = (GEN_WARPS + 4) * 32, /* a warpgroup for the one that loads */
    GEN_LEAVES = 4,                     /* leaves described ahead */
    GEN_MAX_STAGES = 32,
    GEN_MAX_BLOCKS = 192,  /* of the grid */
    GEN_MERGE_DIMS = 32,   /* dimensions that slices exchange at a time */
    GEN_MERGE_STRIDE = 40, /* floats: 8 rows' pairs on different banks */
    GEN_MAX_COMBINE = 16,  /* warps of the combining kernel's blocks */
};
static const size_t GEN_SCRATCH = (size_t)192 << 20; /* of partials */

template <int D> struct gen_cut {
    static constexpr int slices = D <= 64 ? 8 : 4;
    static constexpr int groups = GEN_WARPS / slices; /* of warps: tiles are dealt out to them */
    static constexpr int tiles = D <= 64 ? 4 : D <= 128 ? 2 : 1; /* of a warp */
    static constexpr int max_q = 16 * groups * tiles;
};
static_assert(gen_cut<64>::max_q == 64 && gen_cut<128>::max_q == 64 && gen_cut<256>::max_q == 32,
              "gen_max_q");
static inline int gen_max_q(int head_dim) {
    return head_dim <= 128 ? 64 : 32;
}

/* Partials of sequences' nodes: slot first + (node * n_q + query) of a (sequence, KV head). */
struct gen_part {
    int first, n_nodes, n_q, row; /* row: the sequence's first */
};

/* What the host decides from capacities. */
struct gen_plan {
    int n_lists, heads_in; /* lists; KV heads that share one */
    int level, n_slots;
    int n_stages;
    struct gen_part *part; /* [n_seqs][n_kv] */
    float2 *ml;            /* [n_slots] m (of exp2), l */
    float *o;              /* [n_slots][head_dim] */
    float *stack;          /* [blocks][level][max_q][head_dim + 2]: nodes waiting for their right */
};

/* A leaf that is on its way through the ring. */
struct gen_leaf {
    int seq, head, row, n_q; /* row: the sequence's first; n_q: its queries */
    int q0;                  /* first query of the item */
    int n_entries;           /* -1: no more leaves */
    int idx, n_leaves;       /* in its node */
    int slot;                /* of the node's query 0 */
    int fresh;               /* 1: other queries than the leaf before */
    int block[ATTN_ENTRIES];
};

struct gen_shared {
    uint64_t full[GEN_MAX_STAGES], empty[GEN_MAX_STAGES];
    uint64_t leaf_full[GEN_LEAVES], leaf_empty[GEN_LEAVES];
    struct gen_leaf leaf[GEN_LEAVES];
    alignas(16) float m[GEN_WARPS * 4 * 16], l[GEN_WARPS * 4 * 16]; /* [group][tile][slice][16] */
    alignas(16) float merge[GEN_WARPS * 16 * GEN_MERGE_STRIDE];     /* [group][slice][16][..] */
};

/* Per sequence: largest position, first row, generated rows. Per list: entries, first slot, items
 * before it (whole nodes, list ends). */
struct gen_tables {
    int *last, *row, *n_rows;
    int *n_entries, *slot, *before[2];
};

/* Shared memory: gen_shared, queries as fragments, tables, the ring. */
struct gen_layout {
    size_t queries, tables, ring;
};
__host__ __device__ static inline struct gen_layout gen_layout(int head_dim, int max_q, int n_seqs,
                                                               int n_lists) {
    struct gen_layout at;
    at.queries = (sizeof(struct gen_shared) + 127) / 128 * 128;
    at.tables = at.queries + (size_t)max_q * head_dim * 2;
    at.ring = (at.tables + ((size_t)n_seqs * 3 + (size_t)n_lists * 4) * 4 + 127) / 128 * 128;
    return at;
}
__device__ static inline struct gen_tables gen_tables(int *p, int n_seqs, int n_lists) {
    struct gen_tables t;
    t.last = p, t.row = p + n_seqs, t.n_rows = p + 2 * n_seqs;
    t.n_entries = p + 3 * n_seqs, t.slot = t.n_entries + n_lists;
    t.before[0] = t.slot + n_lists, t.before[1] = t.before[0] + n_lists;
    return t;
}

/* V floats at an address aligned to them. */
template <int V> struct gen_vec;
template <> struct gen_vec<4> {
    __device__ static void get(float (&v)[4], const float *p) {
        float4 x = *(const float4 *)p;
        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    }
    __device__ static void put(float *p, const float (&v)[4]) {
        *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
    }
};
template <> struct gen_vec<2> {
    __device__ static void get(float (&v)[2], const float *p) {
        float2 x = *(const float2 *)p;
        v[0] = x.x, v[1] = x.y;
    }
    __device__ static void put(float *p, const float (&v)[2]) {
        *(float2 *)p = make_float2(v[0], v[1]);
    }
};

/* ---- Joining nodes ---- */

/* a = a joined with b, its right neighbour; v: n values of o. Both kernels use it, on the same
 * numbers in the same order. m = -infinity: the empty node, which changes nothing. */
template <int N>
__device__ static inline void gen_join(float &ma, float &la, float (&va)[N], float mb, float lb,
                                       const float (&vb)[N]) {
    if (mb == -INFINITY) return;
    if (ma == -INFINITY) {
        ma = mb, la = lb;
#pragma unroll
        for (int i = 0; i < N; i++) va[i] = vb[i];
        return;
    }
    float m = fmaxf(ma, mb), wa = exp2_fast(ma - m), wb = exp2_fast(mb - m);
    ma = m;
    la = __fmaf_rn(lb, wb, __fmul_rn(la, wa));
#pragma unroll
    for (int i = 0; i < N; i++) va[i] = __fmaf_rn(vb[i], wb, __fmul_rn(va[i], wa));
}

/* attention_combine.cu: from partials of nodes to `out`; n_nodes: that a list may have. */
int cuda_attention_gen_combine(struct cuda_ctx *c, const struct attn_args *a,
                               const struct gen_plan *p, int n_nodes);

#endif
