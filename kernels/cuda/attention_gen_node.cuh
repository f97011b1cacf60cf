#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_NODE_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_NODE_CUH

/* The computing side of attention_gen.cu: an item's queries as fragments, pages out of the ring,
 * and (m, l, o) of the node in hand, from its first page to its place in the scratch. */

#include <limits.h>

#include "kernels/cuda/attention_gen_load.cuh"

/* ---- Queries ---- */

/* A computing warp's place. */
struct gen_warp {
    int lane, warp;
    int clear;           /* blocks before this one are seen whole by all its rows */
    uint32_t k_row, k_x; /* offset of this lane's token in K, its chunk's swizzle; in V */
    uint32_t v_row, v_x;
};

/* Query i of the item in hand is row and head ..; false behind the last. */
__device__ static inline bool gen_query(const struct attn_args &a, const struct gen_plan &p,
                                        const struct gen_item &item, int i, int *row, int *head) {
    int q = item.q0 + i;
    if (q >= item.n_q) return false;
    int r = gen_divide(q, p.group_by);
    *row = item.row + r;
    *head = item.head * a.group + (q - r * a.group);
    return true;
}

/* The item's queries as fragments: [tile][16 dimensions][lane][8]; by all computing threads. The
 * loads of all go out together: beside those of pages each round takes long. */
template <typename T, int D, bool EXACT, int N>
__device__ static void gen_put_queries(const struct attn_args &a, const struct gen_plan &p,
                                       const struct gen_item &item, uint4 *frag) {
    constexpr int warps = GEN_WARPS, all = N * D / 16 / warps, at_once = all < 8 ? all : 8;
    int steps = EXACT ? D / 16 : a.head_dim / 16, lane = threadIdx.x & 31;
    for (int at = threadIdx.x / 32; at < N * steps; at += warps * at_once) {
        float2 x[at_once][2][2]; /* [row][half] */
#pragma unroll
        for (int k = 0; k < at_once; k++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int i = at + k * warps, row, head;
                int tile = EXACT ? i / (D / 16) : gen_quotient(i, steps), step = i - tile * steps;
                x[k][r][0] = x[k][r][1] = make_float2(0.f, 0.f);
                if (i >= N * steps) continue;
                if (!gen_query(a, p, item, tile * 16 + r * 8 + lane / 4, &row, &head)) continue;
                const float2 *q = (const float2 *)(a.qkv + (size_t)row * a.qkv_stride +
                                                   (size_t)head * a.head_dim + step * 16) +
                                  lane % 4;
                x[k][r][0] = __ldcg(q);
                x[k][r][1] = __ldcg(q + 4);
            }
#pragma unroll
        for (int k = 0; k < at_once; k++)
            if (at + k * warps < N * steps)
                frag[(at + k * warps) * 32 + lane] = make_uint4(
                    pack2<T>(x[k][0][0].x, x[k][0][0].y), pack2<T>(x[k][1][0].x, x[k][1][0].y),
                    pack2<T>(x[k][0][1].x, x[k][0][1].y), pack2<T>(x[k][1][1].x, x[k][1][1].y));
    }
}

/* Positions of the rows of the item's queries, for all warps; by all computing threads. */
__device__ static void gen_put_positions(const struct attn_args &a, const struct gen_plan &p,
                                         const struct gen_item &item, struct gen_shared *sh) {
    for (int i = threadIdx.x; i < 64; i += GEN_WARPS * 32) {
        int row, head, pos = INT_MAX; /* no query */
        if (gen_query(a, p, item, i, &row, &head))
            pos = a.row_seq[row] == item.seq ? a.position[row] : -1;
        sh->pos[i] = pos;
    }
}

/* From which block on rows differ. */
__device__ static int gen_clear_until(const struct attn_args &a, const struct gen_item &item,
                                      const struct gen_shared *sh) {
    int lane = threadIdx.x & 31, least = min(sh->pos[lane], sh->pos[lane + 32]);
    if (a.ancestors) /* rows of the pass hide from each other */
        for (int r = lane; r < attn_pass_rows(a, item.seq); r += 32)
            least = min(least, a.position[item.row + r] - 1);
    least = __reduce_min_sync(~0u, least);
    return least < 0 ? 0 : (int)(((long long)least + 1) / KERN_BLOCK);
}

/* Tokens of a page that each query sees, for all warps; by all computing threads. */
__device__ static void gen_put_seen(const struct attn_args &a, const struct gen_plan &p,
                                    const struct gen_item &item, const struct gen_shared *sh,
                                    uint64_t *seen, int block) {
    int i = threadIdx.x, row, head;
    uint64_t there = attn_quarter_tokens((unsigned)block >> GEN_QUARTER_SHIFT ^ 15);
    block &= (1 << GEN_QUARTER_SHIFT) - 1;
    if (i < 64)
        seen[i] = gen_query(a, p, item, i, &row, &head) && sh->pos[i] >= 0
                      ? attn_seen(a, item.seq, row, sh->pos[i], block) & there
                      : 0;
    named_sync(1, GEN_WARPS * 32);
}

/* ---- A page ---- */

/* Wait for the stage `ahead` of the one in hand and return its index; give it back. */
__device__ static inline int gen_take(const struct gen_ring &ring, int ahead) {
    int stage = ring.stage + ahead, wrapped = stage >= ring.n;
    stage -= wrapped ? ring.n : 0;
    bar_wait(ring.full + stage * 8, ring.phase ^ wrapped);
    return stage;
}
__device__ static inline void gen_give_back(const struct gen_ring &ring, int stage) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) bar_arrive(ring.empty + stage * 8);
}

template <typename T> __device__ constexpr uint32_t gen_ones();
template <> __device__ constexpr uint32_t gen_ones<__half>() {
    return 0x3c003c00;
}
template <> __device__ constexpr uint32_t gen_ones<__nv_bfloat16>() {
    return 0x3f803f80;
}

/* What one item's pages are computed with. */
struct gen_job {
    const struct attn_args &a;
    const struct gen_plan &p;
    const struct gen_item &item;
    struct gen_shared *sh;
    const uint4 *frag; /* queries */
    /* Shared addresses, of this lane: in gen_shared's top; in the page's weights, [tile][16][64] of
     * 16 bits, chunks of 8 swizzled by row, where it writes its tokens and the 8 behind, and where
     * it reads, the chunk's bits apart. */
    uint32_t top, put0, put1, get, get_x;
    int head_dim;
    float scale_log2;
    struct gen_warp w;
};

/* N tiles of a warp: its dimensions of a node. Lane 4 g + t has of row g (r = 0) and g + 8. */
template <typename T, int D, bool EXACT, int N> struct gen_node {
    static constexpr int P = gen_cut<D>::pairs;
    static constexpr int chains = D > 64 ? 2 : 1;       /* sums of a score side by side */
    static constexpr bool keeps_q = N == 1 && D <= 128; /* queries stay in registers */
    float o[N][2 * P][4], m[N][2], l[N][2];
    uint32_t q[keeps_q ? D / 16 : 1][4];

    /* Whether step i of 16 dimensions exists. */
    static __device__ bool has(int i, int head_dim) { return EXACT || i * 16 < head_dim; }

    __device__ void query(uint32_t (&f)[4], const gen_job &j, int i, int k) {
        int steps = EXACT ? D / 16 : j.head_dim / 16;
        uint4 x = j.frag[(i * steps + k) * 32 + j.w.lane];
        f[0] = x.x, f[1] = x.y, f[2] = x.z, f[3] = x.w;
    }

    __device__ void begin(const gen_job &j) {
        if constexpr (keeps_q) {
#pragma unroll
            for (int k = 0; k < D / 16; k++)
                if (has(k, j.head_dim)) query(q[k], j, 0, k);
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < N; i++) {
            m[i][0] = m[i][1] = -INFINITY;
            l[i][0] = l[i][1] = 0.f;
#pragma unroll
            for (int d = 0; d < 2 * P; d++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[i][d][e] = 0.f;
        }
    }

    /* x[tile][8 tokens][4] = q K^T over the warp's 16 tokens. */
    __device__ void scores(float (*x)[2][4], const gen_job &j, uint32_t k_plane) {
        constexpr bool keeps_k = N * D <= (EXACT ? 512 : 128);
        uint32_t b[keeps_k ? D / 16 : 1][4];
        if constexpr (keeps_k) {
#pragma unroll
            for (int k = 0; k < D / 16; k++)
                if (has(k, j.head_dim))
                    ldmatrix4(b[k], k_plane + j.w.k_row + ((uint32_t)(k * 32) ^ j.w.k_x));
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            float s[chains][2][4] = {};
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                if (!has(k, j.head_dim)) break;
                uint32_t f[4];
                if constexpr (!keeps_q) query(f, j, i, k);
                else f[0] = q[k][0], f[1] = q[k][1], f[2] = q[k][2], f[3] = q[k][3];
                uint32_t(&y)[4] = b[keeps_k ? k : 0];
                if constexpr (!keeps_k)
                    ldmatrix4(y, k_plane + j.w.k_row + ((uint32_t)(k * 32) ^ j.w.k_x));
                mma16816<T>(s[k % chains][0], f, y[0], y[1]);
                mma16816<T>(s[k % chains][1], f, y[2], y[3]);
            }
#pragma unroll
            for (int e = 0; e < 8; e++) {
                x[i][e / 4][e % 4] = s[0][e / 4][e % 4];
                if constexpr (chains == 2) x[i][e / 4][e % 4] += s[1][e / 4][e % 4];
            }
        }
    }

    /* Scores, scaled and masked, of M tiles (of one page or more) to weights in shared memory; top:
     * the page's largest of each row; seen: where MASKED, the tokens that a query sees, else all.
     * All four warps pass its two barriers. */
    template <bool MASKED, int M>
    __device__ static void weigh(float (&x)[M][2][4], float (&top)[M][2], const gen_job &j,
                                 const uint64_t *seen) {
        int g = j.w.lane / 4, t = j.w.lane % 4;
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t see = 0;
                if constexpr (MASKED)
                    see = (uint32_t)(seen[i * 16 + r * 8 + g] >> (j.w.warp * 16 + t * 2));
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float &y = x[i][e / 2][r * 2 + e % 2];
                    y = __fmul_rn(y, j.scale_log2);
                    if (MASKED && !(see >> (e / 2 * 8 + e % 2) & 1)) y = -INFINITY;
                }
                float most = fmaxf(fmaxf(x[i][0][r * 2], x[i][0][r * 2 + 1]),
                                   fmaxf(x[i][1][r * 2], x[i][1][r * 2 + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                top[i][r] = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            }
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (t == 0)
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(j.top + (i * 16 + r * 8) * 16 +
                                                                 j.w.warp * 4),
                                 "f"(top[i][r]));
        named_sync(1, GEN_WARPS * 32);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float y[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
                             : "r"(j.top + (i * 16 + r * 8) * 16));
                top[i][r] = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
            }
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float from = MASKED && top[i][r] == -INFINITY ? 0.f : top[i][r];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint32_t pair = pack2_weights<T>(exp2_fast(x[i][h][r * 2] - from),
                                                     exp2_fast(x[i][h][r * 2 + 1] - from));
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"((h ? j.put1 : j.put0) +
                                                                 (i * 16 + r * 8) * 128),
                                 "r"(pair));
                }
            }
        named_sync(1, GEN_WARPS * 32);
    }

    /* Join the page whose weights lie from `tile` on: weights times V; where MASKED, what no row
     * sees is masked away. */
    template <bool MASKED>
    __device__ void values(const float (*top)[2], const gen_job &j, int tile, uint32_t v_plane,
                           const uint64_t *seen) {
        uint32_t v[P][4][4], step = 32 * (EXACT ? D : j.head_dim);
#pragma unroll
        for (int y = 0; y < P; y++) {
            int pair = j.w.warp + 4 * y;
            if (D % 64 || !EXACT)
                if (!has(pair, EXACT ? D : j.head_dim)) break;
#pragma unroll
            for (int k = 0; k < 4; k++)
                ldmatrix4_trans(v[y][k],
                                v_plane + j.w.v_row + k * step + ((uint32_t)(pair * 32) ^ j.w.v_x));
        }
        if constexpr (MASKED) {
            uint64_t mine = seen[j.w.lane] | seen[j.w.lane + 32];
            uint64_t some = (uint64_t)__reduce_or_sync(~0u, (uint32_t)(mine >> 32)) << 32 |
                            __reduce_or_sync(~0u, (uint32_t)mine);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                uint32_t bits = (uint32_t)(some >> (k * 16)) >> (j.w.lane % 4 * 2), keep[2];
                keep[0] = (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
                keep[1] = (bits & 0x100 ? 0xffffu : 0) | (bits & 0x200 ? 0xffff0000u : 0);
#pragma unroll
                for (int y = 0; y < P; y++)
#pragma unroll
                    for (int e = 0; e < 4; e++) v[y][k][e] &= keep[e % 2];
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint32_t f[4][4];
            float u[2 * P][4] = {}, sum[4] = {};
#pragma unroll
            for (int k = 0; k < 4; k++)
                ldmatrix4(f[k], j.get + (tile + i) * 16 * 128 + ((uint32_t)(k * 32) ^ j.get_x));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mma16816<T>(sum, f[k], gen_ones<T>(), gen_ones<T>());
#pragma unroll
                for (int y = 0; y < P; y++) {
                    if (D % 64 || !EXACT)
                        if (!has(j.w.warp + 4 * y, EXACT ? D : j.head_dim)) break;
                    mma16816<T>(u[2 * y], f[k], v[y][k][0], v[y][k][1]);
                    mma16816<T>(u[2 * y + 1], f[k], v[y][k][2], v[y][k][3]);
                }
            }
            join(i, top[i], sum[0], sum[2], u);
        }
    }

    /* Tile i joins (m, l, u), its right neighbour. */
    __device__ void join(int i, const float (&mb)[2], float l0, float l1,
                         const float (&u)[2 * P][4]) {
        float wa[2], wb[2];
#pragma unroll
        for (int r = 0; r < 2; r++) gen_factors(m[i][r], mb[r], &m[i][r], &wa[r], &wb[r]);
        l[i][0] = gen_join(l[i][0], wa[0], l0, wb[0]);
        l[i][1] = gen_join(l[i][1], wa[1], l1, wb[1]);
#pragma unroll
        for (int d = 0; d < 2 * P; d++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[i][d][e] = gen_join(o[i][d][e], wa[e / 2], u[d][e], wb[e / 2]);
    }

    /* ---- A node that is whole ---- */

    /* Its own place of tile i on the stack, thread by thread. */
    __device__ float *waiting(const gen_job &j, int level, int i) {
        size_t node = ((size_t)blockIdx.x * (j.p.max_level - GEN_FOLD_LEVEL) + level);
        return j.p.stack +
               ((node * (j.p.max_q / 16) + i) * gen_cut<D>::tile_floats) * (GEN_WARPS * 32) +
               threadIdx.x;
    }

    /* Fold `idx` of an item: joined with the nodes to its left; all but the last wait. */
    __device__ void climb(const gen_job &j, int idx, bool last) {
        constexpr int S = GEN_WARPS * 32;
        int level = 0;
        for (int left = idx; last ? left != 0 : left & 1; left >>= 1, level++) {
            if (!(left & 1)) continue;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float *from = waiting(j, level, i);
                float mb[2] = {m[i][0], m[i][1]}, lb[2] = {l[i][0], l[i][1]}, u[2 * P][4];
#pragma unroll
                for (int d = 0; d < 8 * P; d++) {
                    u[d / 4][d % 4] = o[i][d / 4][d % 4];
                    o[i][d / 4][d % 4] = from[d * S];
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    m[i][r] = from[(8 * P + r) * S];
                    l[i][r] = from[(8 * P + 2 + r) * S];
                }
                join(i, mb, lb[0], lb[1], u);
            }
        }
        if (last) return;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float *to = waiting(j, level, i);
#pragma unroll
            for (int d = 0; d < 8 * P; d++) to[d * S] = o[i][d / 4][d % 4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                to[(8 * P + r) * S] = m[i][r];
                to[(8 * P + 2 + r) * S] = l[i][r];
            }
        }
    }

    /* The item's node to its slot, or to `out`. */
    __device__ void put(const gen_job &j) {
        int g = j.w.lane / 4, t = j.w.lane % 4, hd = j.head_dim;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row, head, at = i * 16 + r * 8 + g;
                if (!gen_query(j.a, j.p, j.item, at, &row, &head)) continue;
                size_t slot = (size_t)j.item.slot + j.item.q0 + at;
                float *to = j.p.o + slot * hd, by = gen_by(l[i][r]);
                uint16_t *packed = NULL;
                if (j.item.only) {
                    to = j.a.out + ((size_t)row * j.a.n_heads + head) * hd;
                    if (j.a.act) packed = j.a.act + (size_t)row * j.a.act_stride + head * hd;
                } else if (j.w.warp == 0 && t == 0) j.p.ml[slot] = make_float2(m[i][r], l[i][r]);
#pragma unroll
                for (int d = 0; d < 2 * P; d++) {
                    int pair = j.w.warp + 4 * (d / 2);
                    if (!has(pair, EXACT ? D : hd) || pair * 16 >= D) break;
                    float2 v = make_float2(o[i][d][r * 2], o[i][d][r * 2 + 1]);
                    if (j.item.only) v = make_float2(gen_out(v.x, by), gen_out(v.y, by));
                    int e = pair * 16 + d % 2 * 8 + t * 2;
                    if (packed) *(uint32_t *)(packed + e) = to_act_pair(v.x, v.y, j.a.act_bf16);
                    else *(float2 *)(to + e) = v;
                }
            }
    }
};

/* The next M pages, of whose first K has come (in stage `first`). Two at a time take little longer
 * than one: a page is a chain of waits. */
template <bool MASKED, int M, typename T, int D, bool EXACT, int N>
__device__ static inline void gen_pages(gen_node<T, D, EXACT, N> &node, const gen_job &j,
                                        struct gen_ring &ring, int first, const uint64_t *seen) {
    float x[M * N][2][4], top[M * N][2];
#pragma unroll
    for (int i = 0; i < M; i++) {
        int stage = i ? gen_take(ring, 2 * i) : first;
        node.scores(x + i * N, j, ring.data + stage * ring.plane);
        gen_give_back(ring, stage);
    }
    node.template weigh<MASKED, M * N>(x, top, j, seen);
#pragma unroll
    for (int i = 0; i < M; i++) {
        int stage = gen_take(ring, 2 * i + 1);
        node.template values<MASKED>(top + i * N, j, i * N, ring.data + stage * ring.plane, seen);
        gen_give_back(ring, stage);
    }
    for (int i = 0; i < 2 * M; i++) ring.step();
}

#endif
