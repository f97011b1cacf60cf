/* Attention of generated rows: 1..64 rows a sequence over pages that a block list names. Bound by
 * the bytes of K and V: at 4.3 TB/s an SM of 132 gets 64 tokens of a head of 128 (32 KB) each
 * microsecond, in which its tensor cores could do ten times the products of 16 queries.
 *
 * Cut. A sequence's rows times a KV head's query heads are its queries; up to max_q (64, of
 * head_dim above 128: 32) go through a page together, in tiles of 16 (mma.m16n8k16). A leaf is 8
 * list entries, 512 tokens; a node is an aligned 2^level of leaves (level 0 but where partials
 * would outgrow the scratch); an item is (sequence, KV head, node, max_q queries). Persistent
 * blocks, one an SM: each finds its share of the items from the lists (whole nodes in one run, the
 * list ends dealt out behind them), so a recorded launch serves contexts of any length. One warp
 * loads: planes of K and V by bulk copies into a ring of some 170 KB, running ahead over items.
 * Eight compute: each owns a slice of a page's tokens (16 of them; where head_dim <= 64, 16 of
 * every second page) and some tiles, for which it keeps (m, l, o) in registers over the leaf.
 *
 * Bits. Inside a slice: its tokens in list order, page by page. A leaf: (o, l) of slices scaled to
 * the largest m, summed pairwise in slice order. Leaves: the aligned binary tree, node without a
 * right half equals its left one; inside a block's node by the same join as in the combining
 * kernel. None of it depends on tiles, items or blocks. What a row does not see weighs exactly 0,
 * and a page that it does not see changes no bit.
 *
 * Never multiplied: scores of unseen tokens are replaced before use; V rows that no row of the tile
 * sees are masked to zero in registers (V rows past the newest token are not even loaded). */

#include <limits.h>

#include "kernels/cuda/attention_gen_load.cuh"

/* ---- Computing ---- */

/* A computing warp's place and what it knows of its queries. */
template <int D> struct gen_warp {
    using cut = gen_cut<D>;
    int lane, slice, group; /* group: of warps */
    int n_tiles;            /* it has of this item */
    int pos[cut::tiles][2]; /* position of the row of queries lane / 4 and + 8; -1: sees nothing */
    int clear;              /* blocks before this one are seen whole by all its rows */
    uint32_t k_row, k_x;    /* offset of this lane's token in K, its chunk's swizzle; in V */
    uint32_t v_row, v_x;
};

/* Query i of the item in hand is row and head ..; false behind the last. */
__device__ static inline bool gen_query(const struct attn_args &a, const struct gen_leaf &leaf,
                                        int i, int *row, int *head) {
    int q = leaf.q0 + i;
    if (q >= leaf.n_q) return false;
    int r = q / a.group;
    *row = leaf.row + r;
    *head = leaf.head * a.group + (q - r * a.group);
    return true;
}

/* The item's queries as fragments: [tile][16 dimensions][lane][8]; by all computing threads. */
template <typename T>
__device__ static void gen_put_queries(const struct attn_args &a, const struct gen_leaf &leaf,
                                       int n_tiles, uint4 *frag) {
    int steps = a.head_dim / 16;
    for (int i = threadIdx.x; i < n_tiles * steps * 32; i += GEN_WARPS * 32) {
        int lane = i & 31, step = i / 32 % steps, tile = i / 32 / steps;
        float2 x[2][2]; /* [row][half] */
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row, head;
            x[r][0] = x[r][1] = make_float2(0.f, 0.f);
            if (!gen_query(a, leaf, tile * 16 + r * 8 + lane / 4, &row, &head)) continue;
            const float2 *q = (const float2 *)(a.qkv + (size_t)row * a.qkv_stride +
                                               (size_t)head * a.head_dim + step * 16) +
                              lane % 4;
            x[r][0] = q[0];
            x[r][1] = q[4];
        }
        frag[i] = make_uint4(pack2<T>(x[0][0].x, x[0][0].y), pack2<T>(x[1][0].x, x[1][0].y),
                             pack2<T>(x[0][1].x, x[0][1].y), pack2<T>(x[1][1].x, x[1][1].y));
    }
}

/* What the warp's rows see: positions, and from which block on rows differ. */
template <int D>
__device__ static void gen_look_at_rows(const struct attn_args &a, const struct gen_leaf &leaf,
                                        struct gen_warp<D> &w) {
    using cut = gen_cut<D>;
    int least = INT_MAX;
#pragma unroll
    for (int i = 0; i < cut::tiles; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row, head;
            w.pos[i][r] = -1;
            int q = (w.group + i * cut::groups) * 16 + r * 8 + w.lane / 4;
            if (!gen_query(a, leaf, q, &row, &head)) continue;
            if (a.row_seq[row] == leaf.seq) w.pos[i][r] = a.position[row];
            least = min(least, w.pos[i][r]);
        }
    if (a.ancestors) /* rows of the pass hide from each other */
        for (int r = w.lane; r < attn_pass_rows(a, leaf.seq); r += 32)
            least = min(least, a.position[leaf.row + r] - 1);
    least = __reduce_min_sync(~0u, least);
    w.clear = least < 0 ? 0 : (int)(((long long)least + 1) / KERN_BLOCK);
}

/* Tokens of the warp's slice of a page that its query (tile i, half r) sees, 16 bits. */
template <int D>
__device__ static inline uint32_t gen_seen(const struct attn_args &a, const struct gen_leaf &leaf,
                                           const struct gen_warp<D> &w, int i, int r, int block) {
    int row = 0, head;
    if (w.pos[i][r] < 0) return 0;
    if (a.ancestors)
        gen_query(a, leaf, (w.group + i * gen_cut<D>::groups) * 16 + r * 8 + w.lane / 4, &row,
                  &head);
    return (uint32_t)(attn_seen(a, leaf.seq, row, w.pos[i][r], block) >> (w.slice % 4 * 16)) &
           0xffff;
}

/* Scores, weights and values of N tiles of a warp over a leaf. */
template <typename T, int D, bool EXACT, int N> struct gen_sums {
    static constexpr bool keeps_q = N * D <= 128; /* queries stay in registers */
    static constexpr int chains = D > 64 ? 2 : 1; /* sums of a score side by side */
    float o[N][D / 8][4], m[N][2], l[N][2];
    uint32_t q[keeps_q ? N : 1][keeps_q ? D / 16 : 1][4];

    /* Whether step i of 16 dimensions exists. */
    static __device__ bool has(int i, int head_dim) { return EXACT || i * 16 < head_dim; }

    __device__ void query(uint32_t (&f)[4], const uint4 *frag, const struct gen_warp<D> &w, int i,
                          int k, int head_dim) {
        int steps = EXACT ? D / 16 : head_dim / 16;
        uint4 x = frag[((w.group + i * gen_cut<D>::groups) * steps + k) * 32 + w.lane];
        f[0] = x.x, f[1] = x.y, f[2] = x.z, f[3] = x.w;
    }

    __device__ void begin(const uint4 *frag, const struct gen_warp<D> &w, int head_dim) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            m[i][0] = m[i][1] = -INFINITY;
            l[i][0] = l[i][1] = 0.f;
#pragma unroll
            for (int d = 0; d < D / 8; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][d][e] = 0.f;
            if constexpr (keeps_q) {
#pragma unroll
                for (int k = 0; k < D / 16; k++)
                    if (has(k, head_dim)) query(q[i][k], frag, w, i, k, head_dim);
            }
        }
    }

    /* s[tile][chain][8 tokens][4] = q K^T over the slice's 16 tokens. */
    __device__ void scores(float (&s)[N][chains][2][4], const uint4 *frag,
                           const struct gen_warp<D> &w, uint32_t k_plane, int head_dim) {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int c = 0; c < chains * 8; c++) s[i][c / 8][c / 4 % 2][c % 4] = 0.f;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            if (!has(k, head_dim)) break;
            uint32_t b[4];
            ldmatrix4(b, k_plane + w.k_row + ((uint32_t)(k * 32) ^ w.k_x));
#pragma unroll
            for (int i = 0; i < N; i++) {
                uint32_t f[4];
                if constexpr (!keeps_q) query(f, frag, w, i, k, head_dim);
                else f[0] = q[i][k][0], f[1] = q[i][k][1], f[2] = q[i][k][2], f[3] = q[i][k][3];
                mma16816<T>(s[i][k % chains][0], f, b[0], b[1]);
                mma16816<T>(s[i][k % chains][1], f, b[2], b[3]);
            }
        }
    }

    /* s to weights in p (fragments of A), m, l and o moved along; seen: of each row, all ones where
     * every token is. */
    __device__ void weights(float (&s)[N][chains][2][4], uint32_t (&p)[N][4], float scale,
                            const uint32_t (&seen)[N][2], const struct gen_warp<D> &w) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float by[2];
            bool same = true;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x[4], top = -INFINITY, sum = 0.f;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float y = s[i][0][e / 2][r * 2 + e % 2];
                    if constexpr (chains == 2) y += s[i][1][e / 2][r * 2 + e % 2];
                    bool see = seen[i][r] >> (e / 2 * 8 + w.lane % 4 * 2 + e % 2) & 1;
                    x[e] = see ? y * scale : -INFINITY;
                    top = fmaxf(top, x[e]);
                }
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                top = fmaxf(top, m[i][r]);
                float from = top == -INFINITY ? 0.f : top;
                by[r] = exp2_fast(m[i][r] - from);
                same = same && top == m[i][r];
                m[i][r] = top;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    x[e] = exp2_fast(x[e] - from);
                    sum += x[e];
                }
                l[i][r] = __fmaf_rn(l[i][r], by[r], sum);
                p[i][r] = pack2_weights<T>(x[0], x[1]);
                p[i][2 + r] = pack2_weights<T>(x[2], x[3]);
            }
            if (__all_sync(~0u, same)) continue; /* factors of 1, or of nothing */
#pragma unroll
            for (int d = 0; d < D / 8; d++) {
                o[i][d][0] *= by[0], o[i][d][1] *= by[0];
                o[i][d][2] *= by[1], o[i][d][3] *= by[1];
            }
        }
    }

    /* o += p V; `some`: the slice's tokens that a row sees, the others' bytes are masked away. */
    __device__ void values(const uint32_t (&p)[N][4], uint32_t v_plane, uint32_t some,
                           const struct gen_warp<D> &w, int head_dim) {
        uint32_t bits = some >> (w.lane % 4 * 2), keep[2];
        keep[0] = (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
        keep[1] = (bits & 0x100 ? 0xffffu : 0) | (bits & 0x200 ? 0xffff0000u : 0);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            if (!has(k, head_dim)) break;
            uint32_t b[4];
            ldmatrix4_trans(b, v_plane + w.v_row + ((uint32_t)(k * 32) ^ w.v_x));
#pragma unroll
            for (int i = 0; i < N; i++) {
                mma16816<T>(o[i][2 * k], p[i], b[0] & keep[0], b[1] & keep[1]);
                mma16816<T>(o[i][2 * k + 1], p[i], b[2] & keep[0], b[3] & keep[1]);
            }
        }
    }
};

/* Wait for the stage in hand and return its address; give it back and step on. */
__device__ static inline uint32_t gen_take(const struct gen_ring &ring) {
    bar_wait(ring.full + ring.stage * 8, ring.phase);
    return ring.data + ring.stage * ring.plane;
}
__device__ static inline void gen_give_back(struct gen_ring &ring) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) bar_arrive(ring.empty + ring.stage * 8);
    ring.step();
}

/* One page. */
template <typename T, int D, bool EXACT, int N>
__device__ static inline void gen_page(const struct attn_args &a, const struct gen_leaf &leaf,
                                       const uint4 *frag, const struct gen_warp<D> &w, int block,
                                       struct gen_ring &ring, gen_sums<T, D, EXACT, N> &sums) {
    uint32_t seen[N][2], some = 0xffff;
    bool clear = block < w.clear;
#pragma unroll
    for (int i = 0; i < N; i++) seen[i][0] = seen[i][1] = 0xffff;
    if (!clear) {
        some = 0;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                seen[i][r] = gen_seen<D>(a, leaf, w, i, r, block);
                some |= seen[i][r];
            }
        some = __reduce_or_sync(~0u, some);
    }
    uint32_t p[N][4], k_plane = gen_take(ring);
    if (some) {
        float s[N][gen_sums<T, D, EXACT, N>::chains][2][4];
        sums.scores(s, frag, w, k_plane, a.head_dim);
        gen_give_back(ring);
        sums.weights(s, p, a.scale_log2, seen, w);
    } else gen_give_back(ring);
    uint32_t v_plane = gen_take(ring);
    if (some) sums.values(p, v_plane, some, w, a.head_dim);
    gen_give_back(ring);
}

/* ---- From slices to a leaf, from leaves to a node ---- */

/* (m, l) of a row of a tile from its slices': the largest m, l in slice order. */
template <int D> __device__ static inline float2 gen_row_ml(const struct gen_shared *sh, int at) {
    float m = -INFINITY, l = 0.f;
#pragma unroll
    for (int s = 0; s < gen_cut<D>::slices; s++) m = fmaxf(m, sh->m[at + s * 16]);
    if (m == -INFINITY) return make_float2(m, 0.f);
#pragma unroll
    for (int s = 0; s < gen_cut<D>::slices; s++)
        l = __fmaf_rn(sh->l[at + s * 16], exp2_fast(sh->m[at + s * 16] - m), l);
    return make_float2(m, l);
}

/* V values of a leaf's o of query q (item's) from element `at` on, joined with the nodes to its
 * left, to the stack or, of the node's last leaf, to its slot. put_ml: this thread writes m, l. */
template <int D, int V>
__device__ static void gen_store(const struct attn_args &a, const struct gen_plan &p,
                                 const struct gen_leaf &leaf, int q, int at, float2 ml,
                                 float (&v)[V], bool put_ml) {
    constexpr int max_q = gen_cut<D>::max_q;
    int hd = a.head_dim, level = 0;
    bool last = leaf.idx + 1 == leaf.n_leaves;
    float *stack = p.stack + (size_t)blockIdx.x * p.level * max_q * (hd + 2) + (size_t)q * (hd + 2);
    for (int left = leaf.idx; last ? left != 0 : left & 1; left >>= 1, level++) {
        if (!(left & 1)) continue;
        const float *node = stack + (size_t)level * max_q * (hd + 2);
        float u[V], m = node[hd], l = node[hd + 1];
#pragma unroll
        for (int i = 0; i < V; i++) u[i] = node[at + i];
        gen_join<V>(m, l, u, ml.x, ml.y, v);
        ml = make_float2(m, l);
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = u[i];
    }
    if (!last) {
        float *node = stack + (size_t)level * max_q * (hd + 2);
#pragma unroll
        for (int i = 0; i < V; i++) node[at + i] = v[i];
        if (put_ml) node[hd] = ml.x, node[hd + 1] = ml.y;
        return;
    }
    size_t slot = (size_t)leaf.slot + leaf.q0 + q;
    gen_vec<V>::put(p.o + slot * hd + at, v);
    if (put_ml) p.ml[slot] = ml;
}

/* Sum the slices of tile i, 32 dimensions at a time through shared memory; the group's threads take
 * 16 rows x 32 dimensions between them. */
template <typename T, int D, bool EXACT, int N>
__device__ static inline void
gen_merge(const struct attn_args &a, const struct gen_plan &p, const struct gen_leaf &leaf,
          struct gen_shared *sh, const struct gen_warp<D> &w, gen_sums<T, D, EXACT, N> &sums) {
    using cut = gen_cut<D>;
    constexpr int n_threads = cut::slices * 32, V = 16 * GEN_MERGE_DIMS / n_threads;
    constexpr int per_row = GEN_MERGE_DIMS / V;
    int tid = w.slice * 32 + w.lane, g = w.lane / 4, t = w.lane % 4;
    int ml_at = w.group * cut::tiles * cut::slices * 16; /* of the group's tile 0, slice 0 */
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float l = sums.l[i][r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            int at = ml_at + (i * cut::slices + w.slice) * 16 + r * 8 + g;
            if (t == 0) sh->m[at] = sums.m[i][r], sh->l[at] = l;
        }
    named_sync(2 + w.group, n_threads);
    float *buf = sh->merge + w.group * cut::slices * 16 * GEN_MERGE_STRIDE;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float m = -INFINITY, own = sums.m[i][r];
#pragma unroll
            for (int s = 0; s < cut::slices; s++)
                m = fmaxf(m, sh->m[ml_at + (i * cut::slices + s) * 16 + r * 8 + g]);
            by[r] = own == -INFINITY ? 0.f : exp2_fast(own - m);
        }
        int row = tid / per_row, col = tid % per_row * V;
        int q = (w.group + i * cut::groups) * 16 + row;
        bool mine = leaf.q0 + q < leaf.n_q;
        float2 ml = make_float2(0.f, 0.f);
        if (mine) ml = gen_row_ml<D>(sh, ml_at + i * cut::slices * 16 + row);
#pragma unroll
        for (int d0 = 0; d0 < D / 8; d0 += 4) {
            if (!EXACT && d0 * 8 >= a.head_dim) break;
            float *to = buf + (w.slice * 16 + g) * GEN_MERGE_STRIDE + t * 2;
#pragma unroll
            for (int j = 0; j < 4 && d0 + j < D / 8; j++) {
                const float(&o)[4] = sums.o[i][d0 + j];
                *(float2 *)(to + j * 8) = make_float2(o[0] * by[0], o[1] * by[0]);
                *(float2 *)(to + 8 * GEN_MERGE_STRIDE + j * 8) =
                    make_float2(o[2] * by[1], o[3] * by[1]);
            }
            named_sync(2 + w.group, n_threads);
            if (mine && d0 * 8 + col < a.head_dim) {
                float v[cut::slices][V], sum[V];
                const float *from = buf + row * GEN_MERGE_STRIDE + col;
#pragma unroll
                for (int s = 0; s < cut::slices; s++)
                    gen_vec<V>::get(v[s], from + s * 16 * GEN_MERGE_STRIDE);
#pragma unroll
                for (int j = 0; j < V; j++) {
                    sum[j] = (v[0][j] + v[1][j]) + (v[2][j] + v[3][j]);
                    if constexpr (cut::slices == 8)
                        sum[j] += (v[4][j] + v[5][j]) + (v[6][j] + v[7][j]);
                }
                gen_store<D, V>(a, p, leaf, q, d0 * 8 + col, ml, sum, d0 == 0 && col == 0);
            }
            named_sync(2 + w.group, n_threads);
        }
    }
}

/* A leaf of N tiles a warp (0: the stages just go by). */
template <typename T, int D, bool EXACT, int N>
__device__ static void gen_run(const struct attn_args &a, const struct gen_plan &p,
                               const struct gen_leaf &leaf, struct gen_shared *sh,
                               const uint4 *frag, const struct gen_warp<D> &w,
                               struct gen_ring &ring) {
    if constexpr (N == 0) {
        for (int i = 0; i < 2 * leaf.n_entries; i++) {
            gen_take(ring);
            gen_give_back(ring);
        }
    } else {
        gen_sums<T, D, EXACT, N> sums;
        sums.begin(frag, w, a.head_dim);
        for (int e = 0; e < leaf.n_entries; e++) {
            if (gen_cut<D>::slices == 8 && (e & 1) != w.slice / 4) {
                for (int i = 0; i < 2; i++) {
                    gen_take(ring);
                    gen_give_back(ring);
                }
                continue;
            }
            gen_page<T, D, EXACT, N>(a, leaf, frag, w, leaf.block[e], ring, sums);
        }
        gen_merge<T, D, EXACT, N>(a, p, leaf, sh, w, sums);
    }
}

template <typename T, int D, bool EXACT>
__device__ static void gen_compute(const struct attn_args &a, const struct gen_plan &p,
                                   struct gen_shared *sh, uint4 *frag, struct gen_ring ring) {
    using cut = gen_cut<D>;
    struct gen_warp<D> w;
    w.lane = threadIdx.x & 31;
    w.slice = threadIdx.x / 32 % cut::slices;
    w.group = threadIdx.x / 32 / cut::slices;
    int hd = EXACT ? D : a.head_dim, t = w.slice % 4 * 16 + w.lane % 8, upper = w.lane / 16;
    int odd = w.lane / 8 % 2; /* lanes' matrices: K (tokens, dims) 00 01 10 11; V 00 10 01 11 */
    int k_token = t + upper * 8, v_token = t + odd * 8;
    w.k_row = k_token * hd * 2;
    w.k_x = (page_chunk(k_token, 0, hd) ^ odd) * 16;
    w.v_row = v_token * hd * 2;
    w.v_x = (page_chunk(v_token, 0, hd) ^ upper) * 16;
    w.n_tiles = 0;
    for (int n = 0;; n++) {
        bar_wait(smem_addr(&sh->leaf_full[n % GEN_LEAVES]), n / GEN_LEAVES & 1);
        const struct gen_leaf &leaf = sh->leaf[n % GEN_LEAVES];
        if (leaf.n_entries < 0) break;
        if (leaf.fresh) {
            int n_tiles = (min(leaf.n_q - leaf.q0, (int)cut::max_q) + 15) / 16;
            w.n_tiles = (n_tiles - w.group + cut::groups - 1) / cut::groups;
            named_sync(1, GEN_WARPS * 32); /* nobody reads the queries before */
            gen_put_queries<T>(a, leaf, n_tiles, frag);
            gen_look_at_rows<D>(a, leaf, w);
            named_sync(1, GEN_WARPS * 32);
        }
        if (w.n_tiles == 0) gen_run<T, D, EXACT, 0>(a, p, leaf, sh, frag, w, ring);
        else if (w.n_tiles == 1) gen_run<T, D, EXACT, 1>(a, p, leaf, sh, frag, w, ring);
        else if (w.n_tiles == 2) {
            if constexpr (cut::tiles >= 2) gen_run<T, D, EXACT, 2>(a, p, leaf, sh, frag, w, ring);
        } else if constexpr (cut::tiles >= 4)
            gen_run<T, D, EXACT, 4>(a, p, leaf, sh, frag, w, ring);
        __syncwarp();
        if (w.lane == 0) bar_arrive(smem_addr(&sh->leaf_empty[n % GEN_LEAVES]));
    }
}

/* ---- The kernel ---- */

/* The small arrays and the lists, shared out over the grid. */
__device__ static void gen_prefetch(const struct attn_args &a, const struct gen_plan &p) {
    size_t at = ((size_t)blockIdx.x * GEN_THREADS + threadIdx.x) * 32;
    size_t step = (size_t)gridDim.x * GEN_THREADS * 32; /* elements: lines of 128 bytes */
    size_t n_list = (size_t)p.n_lists * a.capacity;
    for (size_t i = at; i < (size_t)a.n_gen; i += step) {
        prefetch_l2(a.position + i);
        prefetch_l2(a.row_seq + i);
    }
    for (size_t i = at; i < (size_t)a.n_seqs; i += step) {
        prefetch_l2(a.seq_row + i);
        prefetch_l2(a.seq_n_rows + i);
    }
    for (size_t i = at; i < (size_t)p.n_lists; i += step) prefetch_l2(a.n_blocks + i);
    if (n_list > 1 << 18) return; /* much of it is unused then */
    for (size_t i = at; i < n_list; i += step) {
        prefetch_l2(a.page + i);
        prefetch_l2(a.block + i);
    }
}

/* A warpgroup's registers a thread, where the chip can shift them (at launch: 168). */
template <int N, bool MORE> __device__ static inline void gen_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

template <typename T, int D, bool EXACT>
__global__ void __launch_bounds__(GEN_THREADS, 1)
    attention_gen_kernel(const __grid_constant__ struct attn_args a,
                         const __grid_constant__ struct gen_plan p) {
    extern __shared__ __align__(128) uint8_t smem[];
    constexpr int max_q = gen_cut<D>::max_q;
    struct gen_shared *sh = (struct gen_shared *)smem;
    struct gen_layout at = gen_layout(a.head_dim, max_q, a.n_seqs, p.n_lists);
    struct gen_tables t = gen_tables((int *)(smem + at.tables), a.n_seqs, p.n_lists);
    struct gen_ring ring = {smem_addr(smem + at.ring),
                            smem_addr(sh->full),
                            smem_addr(sh->empty),
                            (uint32_t)(a.head_dim * KERN_BLOCK * 2),
                            0,
                            p.n_stages,
                            0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            bar_init(ring.full + i * 8, COPY_ARRIVALS);
            bar_init(ring.empty + i * 8, GEN_WARPS);
        }
        for (int i = 0; i < GEN_LEAVES; i++) {
            bar_init(smem_addr(&sh->leaf_full[i]), 1);
            bar_init(smem_addr(&sh->leaf_empty[i]), GEN_WARPS);
        }
        bar_init_fence();
    }
    for (int s = threadIdx.x; s < a.n_seqs; s += GEN_THREADS) t.last[s] = -1;
    gen_prefetch(a, p);
    __syncthreads();
    pdl_wait();
    pdl_trigger();
    gen_look(a, p, t);
    if (threadIdx.x >= GEN_WARPS * 32) {
        gen_registers<56, false>();
        if (threadIdx.x < GEN_WARPS * 32 + 32) gen_load(a, p, sh, t, max_q, ring);
    } else {
        gen_registers<224, true>();
        gen_compute<T, D, EXACT>(a, p, sh, (uint4 *)(smem + at.queries), ring);
    }
}

/* ---- Launching ---- */

static size_t up256(size_t n) {
    return (n + 255) & ~(size_t)255;
}

/* Partials of R (row, head) pairs with at most n_leaves leaves each: the least level that keeps
 * them inside GEN_SCRATCH, or single nodes. */
static int gen_level(size_t pairs, int head_dim, int n_leaves) {
    size_t slot = ((size_t)head_dim + 2) * sizeof(float);
    int level = 0;
    while (1 << level < n_leaves &&
           pairs * (size_t)((n_leaves + (1 << level) - 1) >> level) * slot > GEN_SCRATCH)
        level++;
    return level;
}

static size_t gen_stack_bytes(int level, int head_dim) {
    return up256((size_t)GEN_MAX_BLOCKS * (size_t)level * (size_t)gen_max_q(head_dim) *
                 ((size_t)head_dim + 2) * sizeof(float));
}

/* Grows with every argument, so that scratch for the largest call serves all. */
size_t cuda_attention_gen_bytes(const struct cuda_ctx *c, int n_gen, int n_seqs, int n_heads,
                                int head_dim, int list_capacity) {
    (void)c;
    size_t pairs = (size_t)n_gen * (size_t)n_heads, slot = ((size_t)head_dim + 2) * sizeof(float);
    int n_leaves = (list_capacity + ATTN_ENTRIES - 1) / ATTN_ENTRIES;
    size_t all = pairs * (size_t)n_leaves * slot, least = pairs * slot;
    if (all > GEN_SCRATCH) all = GEN_SCRATCH > least ? GEN_SCRATCH : least;
    return up256((size_t)n_seqs * (size_t)n_heads * sizeof(struct gen_part)) + all + 512 +
           gen_stack_bytes(gen_level(pairs, head_dim, n_leaves), head_dim);
}

static struct gen_plan gen_plan(const struct cuda_ctx *c, const struct attn_args *a) {
    struct gen_plan p = {};
    size_t pairs = (size_t)a->n_gen * (size_t)a->n_heads;
    int n_leaves = (a->capacity + ATTN_ENTRIES - 1) / ATTN_ENTRIES;
    p.heads_in = a->head_stride ? 1 : a->n_kv;
    p.n_lists = a->n_seqs * (a->n_kv / p.heads_in);
    p.level = gen_level(pairs, a->head_dim, n_leaves);
    p.n_slots = (int)(pairs * (size_t)((n_leaves + (1 << p.level) - 1) >> p.level));
    uint8_t *at = a->scratch;
    p.part = (struct gen_part *)at;
    at += up256((size_t)a->n_seqs * (size_t)a->n_heads * sizeof(struct gen_part));
    p.ml = (float2 *)at;
    at += up256((size_t)p.n_slots * sizeof(float2));
    p.o = (float *)at;
    at += up256((size_t)p.n_slots * (size_t)a->head_dim * sizeof(float));
    p.stack = (float *)at;
    struct gen_layout l = gen_layout(a->head_dim, gen_max_q(a->head_dim), a->n_seqs, p.n_lists);
    size_t plane = (size_t)a->head_dim * KERN_BLOCK * 2;
    p.n_stages = c->max_smem > l.ring ? (int)((c->max_smem - l.ring) / plane) : 0;
    if (p.n_stages > GEN_MAX_STAGES) p.n_stages = GEN_MAX_STAGES;
    return p;
}

template <typename T, int D, bool EXACT>
static int gen_launch(struct cuda_ctx *c, const struct attn_args *a, const struct gen_plan *p,
                      int grid) {
    static int allowed = -1; /* device */
    struct gen_layout l = gen_layout(a->head_dim, gen_cut<D>::max_q, a->n_seqs, p->n_lists);
    size_t smem = l.ring + (size_t)p->n_stages * (size_t)a->head_dim * KERN_BLOCK * 2;
    if (allowed != c->device) {
        int rc = cuda_allow_smem(c, attention_gen_kernel<T, D, EXACT>, c->max_smem);
        if (rc) return rc;
        allowed = c->device;
    }
    return CUDA_LAUNCH(c, (attention_gen_kernel<T, D, EXACT>), dim3(grid), dim3(GEN_THREADS), smem,
                       *a, *p);
}

template <typename T>
static int gen_launch_as(struct cuda_ctx *c, const struct attn_args *a, const struct gen_plan *p,
                         int grid) {
    switch (a->head_dim) {
    case 64:
        return gen_launch<T, 64, true>(c, a, p, grid);
    case 80:
        return gen_launch<T, 80, true>(c, a, p, grid);
    case 96:
        return gen_launch<T, 96, true>(c, a, p, grid);
    case 128:
        return gen_launch<T, 128, true>(c, a, p, grid);
    case 256:
        return gen_launch<T, 256, true>(c, a, p, grid);
    }
    return a->head_dim < 64    ? gen_launch<T, 64, false>(c, a, p, grid)
           : a->head_dim < 128 ? gen_launch<T, 128, false>(c, a, p, grid)
                               : gen_launch<T, 256, false>(c, a, p, grid);
}

int cuda_attention_gen(struct cuda_ctx *c, const struct attn_args *a) {
    if (a->n_gen == 0) return 0;
    struct gen_plan p = gen_plan(c, a);
    int max_q = gen_max_q(a->head_dim), rc = 0;
    size_t n_leaves = ((size_t)a->capacity + ATTN_ENTRIES - 1) / ATTN_ENTRIES;
    size_t chunks = (size_t)a->n_gen * (size_t)a->group / (size_t)max_q +
                    (size_t)(a->n_seqs < a->n_gen ? a->n_seqs : a->n_gen);
    size_t n_nodes = (n_leaves + ((size_t)1 << p.level) - 1) >> p.level;
    size_t items = chunks * (size_t)a->n_kv * n_nodes;
    size_t grid = c->n_sms < GEN_MAX_BLOCKS ? (size_t)c->n_sms : (size_t)GEN_MAX_BLOCKS;
    if (grid > items) grid = items;
    if (p.n_stages < 1)
        return cuda_note(c, cudaErrorInvalidConfiguration, "attention: too many lists", __FILE__,
                         __LINE__);
    if (grid == 0) p.part = NULL;
    else if (a->bf16) rc = gen_launch_as<__nv_bfloat16>(c, a, &p, (int)grid);
    else rc = gen_launch_as<__half>(c, a, &p, (int)grid);
    if (rc) return rc;
    return cuda_attention_gen_combine(c, a, &p, (int)n_nodes);
}
