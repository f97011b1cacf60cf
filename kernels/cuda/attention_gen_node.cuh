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

/* The item's queries as fragments: [tile of 8][32 dimensions][lane][8]; by all computing threads.
 * wait: for the kernel that made them, when all addresses are there. */
template <typename T, int D, bool EXACT, int N>
__device__ static void gen_put_queries(const struct attn_args &a, const struct gen_plan &p,
                                       const struct gen_item &item, uint4 *frag, bool wait) {
    constexpr int all = N * ((D + 31) / 32), at_once = (all + GEN_WARPS - 1) / GEN_WARPS;
    int pairs = EXACT ? D / 32 : (a.head_dim + 31) / 32, lane = threadIdx.x & 31;
    const float2 *from[at_once]; /* NULL: no query */
    float2 x[at_once][4];
#pragma unroll
    for (int k = 0; k < at_once; k++) {
        int at = threadIdx.x / 32 + k * GEN_WARPS, row, head;
        int tile = EXACT ? at / (D / 32) : gen_quotient(at, pairs), pair = at - tile * pairs;
        from[k] = NULL;
        if (at >= N * pairs || !gen_query(a, p, item, tile * 8 + lane / 4, &row, &head)) continue;
        from[k] = (const float2 *)(a.qkv + (size_t)row * a.qkv_stride + (size_t)head * a.head_dim +
                                   pair * 32) +
                  lane % 4;
    }
    if (wait) pdl_wait();
#pragma unroll
    for (int k = 0; k < at_once; k++) {
        int at = threadIdx.x / 32 + k * GEN_WARPS;
        bool half = !EXACT && at % pairs * 32 + 16 >= a.head_dim; /* of the last 32 */
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[k][i] = from[k] && !(half && i > 1) ? __ldcg(from[k] + i * 4) : make_float2(0.f, 0.f);
    }
#pragma unroll
    for (int k = 0; k < at_once; k++) {
        int at = threadIdx.x / 32 + k * GEN_WARPS;
        if (at < N * pairs)
            frag[at * 32 + lane] =
                make_uint4(pack2<T>(x[k][0].x, x[k][0].y), pack2<T>(x[k][1].x, x[k][1].y),
                           pack2<T>(x[k][2].x, x[k][2].y), pack2<T>(x[k][3].x, x[k][3].y));
    }
}

/* Positions of the rows of the item's queries, for all warps, which each look themselves; returns
 * from which block on rows differ. */
__device__ static int gen_put_positions(const struct attn_args &a, const struct gen_plan &p,
                                        const struct gen_item &item, struct gen_shared *sh) {
    int lane = threadIdx.x & 31, least = INT_MAX;
#pragma unroll
    for (int i = lane; i < 64; i += 32) {
        int row, head, pos = INT_MAX; /* no query */
        if (gen_query(a, p, item, i, &row, &head))
            pos = __ldcg(&a.row_seq[row]) == item.seq ? __ldcg(&a.position[row]) : -1;
        if (threadIdx.x < 32) sh->pos[i] = pos;
        least = min(least, pos);
    }
    if (a.ancestors) /* rows of the pass hide from each other */
        for (int r = lane; r < attn_pass_rows(a, item.seq); r += 32)
            least = min(least, __ldcg(&a.position[item.row + r]) - 1);
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

/* The transpose of an 8 x 8 matrix of 16-bit elements: lane i has row i / 4, columns 2 (i % 4) and
 * the next. */
__device__ static inline uint32_t transposed(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* What one item's pages are computed with. */
struct gen_job {
    const struct attn_args &a;
    const struct gen_plan &p;
    const struct gen_item &item;
    struct gen_shared *sh;
    const uint4 *frag; /* queries */
    /* Shared addresses, of this lane: in gen_shared's top; in the page's weights, [tile][16 tokens]
     * [lane] pairs of registers, of its own 16 tokens and of the first. */
    uint32_t top, put, get;
    int head_dim;
    float scale_log2;
    struct gen_warp w;
};

/* N tiles of 8 queries of a warp: its dimensions of a node. Everything is transposed, scores are
 * tokens x queries and o is dimensions x queries, so that one row of few heads wastes little: of a
 * 16 x 8 tile lane 4 g + t has rows g and g + 8 of queries 2 t and 2 t + 1 ([0], [1]; [2], [3]). */
template <typename T, int D, bool EXACT, int N> struct gen_node {
    static constexpr int P = gen_cut<D>::pairs, H = D / 16, H2 = (H + 1) / 2;
    static constexpr int chains = D > 64 ? 4 : 2;       /* sums of a score side by side */
    static constexpr bool keeps_q = N == 1 && D <= 128; /* queries stay in registers */
    float o[N][P][4], m[N][2], l[N][2];
    uint4 q[keeps_q ? N * H2 : 1];

    /* Whether step i of 16 dimensions exists. */
    static __device__ bool has(int i, int head_dim) { return EXACT || i * 16 < head_dim; }

    __device__ uint4 query(const gen_job &j, int n, int k2) {
        int pairs = EXACT ? D / 32 : (j.head_dim + 31) / 32;
        return j.frag[(n * pairs + k2) * 32 + j.w.lane];
    }

    __device__ void begin(const gen_job &j) {
        if constexpr (keeps_q) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int k = 0; k < H2; k++)
                    if (has(k * 2, j.head_dim)) q[n * H2 + k] = query(j, n, k);
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < N; n++) {
            m[n][0] = m[n][1] = -INFINITY;
            l[n][0] = l[n][1] = 0.f;
#pragma unroll
            for (int y = 0; y < P; y++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[n][y][e] = 0.f;
        }
    }

    /* x[tile][4] = K q^T over the warp's 16 tokens. */
    __device__ void scores(float (*x)[4], const gen_job &j, uint32_t k_plane) {
        uint32_t a[H][4];
#pragma unroll
        for (int k = 0; k < H; k++)
            if (has(k, j.head_dim))
                ldmatrix4(a[k], k_plane + j.w.k_row + ((uint32_t)(k * 32) ^ j.w.k_x));
#pragma unroll
        for (int n = 0; n < N; n++) {
            float s[chains][4] = {};
#pragma unroll
            for (int k2 = 0; k2 < H2; k2++) {
                if (!has(k2 * 2, j.head_dim)) break;
                uint4 f;
                if constexpr (keeps_q) f = q[n * H2 + k2];
                else f = query(j, n, k2);
                mma16816<T>(s[k2 * 2 % chains], a[k2 * 2], f.x, f.y);
                if (k2 * 2 + 1 < H && has(k2 * 2 + 1, j.head_dim))
                    mma16816<T>(s[(k2 * 2 + 1) % chains], a[k2 * 2 + 1 < H ? k2 * 2 + 1 : 0], f.z,
                                f.w);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[n][e] = s[0][e] + s[1][e];
                if constexpr (chains == 4) x[n][e] += s[2][e] + s[3][e];
            }
        }
    }

    /* Scores, scaled and masked, of M tiles (of one page or more) to weights in shared memory; top:
     * the page's largest of each query; seen: where MASKED, the tokens that a query sees, else all.
     * All four warps pass its two barriers. */
    template <bool MASKED, int M>
    __device__ static void weigh(float (&x)[M][4], float (&top)[M][2], const gen_job &j,
                                 const uint64_t *seen) {
        int g = j.w.lane / 4, t = j.w.lane % 4;
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t see = 0;
                if constexpr (MASKED)
                    see = (uint32_t)(seen[i * 8 + t * 2 + r] >> (j.w.warp * 16 + g));
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float &y = x[i][h * 2 + r];
                    y = __fmul_rn(y, j.scale_log2);
                    if (MASKED && !(see >> (h * 8) & 1)) y = -INFINITY;
                }
                top[i][r] = fmaxf(x[i][r], x[i][2 + r]);
            }
#pragma unroll
        for (int d = 4; d < 32; d *= 2)
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], d));
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (g == 0)
                    asm volatile(
                        "st.shared.f32 [%0], %1;" ::"r"(j.top + (i * 8 + r) * 16 + j.w.warp * 4),
                        "f"(top[i][r]));
        named_sync(1, GEN_WARPS * 32);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float y[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
                             : "r"(j.top + (i * 8 + r) * 16));
                top[i][r] = fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
            }
#pragma unroll
        for (int i = 0; i < M; i++) {
            float from[2];
            uint32_t w[2];
#pragma unroll
            for (int r = 0; r < 2; r++)
                from[r] = MASKED && top[i][r] == -INFINITY ? 0.f : top[i][r];
#pragma unroll
            for (int h = 0; h < 2; h++)
                w[h] = transposed(pack2_weights<T>(exp2_fast(x[i][h * 2] - from[0]),
                                                   exp2_fast(x[i][h * 2 + 1] - from[1])));
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(j.put + i * 1024), "r"(w[0]),
                         "r"(w[1]));
        }
        named_sync(1, GEN_WARPS * 32);
    }

    /* Join the page whose weights lie from `tile` on: weights times V; where MASKED, what no row
     * sees is masked away. */
    template <bool MASKED>
    __device__ void values(const float (*top)[2], const gen_job &j, int tile, uint32_t v_plane,
                           const uint64_t *seen) {
        const uint32_t one[4] = {gen_ones<T>(), gen_ones<T>(), gen_ones<T>(), gen_ones<T>()};
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
                    for (int e = 0; e < 4; e++) v[y][k][e] &= keep[e / 2];
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            float u[P][4] = {}, sum[4] = {};
            uint32_t w[4][2];
#pragma unroll
            for (int k = 0; k < 4; k++)
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                             : "=r"(w[k][0]), "=r"(w[k][1])
                             : "r"(j.get + (tile + n) * 1024 + k * 256));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mma16816<T>(sum, one, w[k][0], w[k][1]);
#pragma unroll
                for (int y = 0; y < P; y++) {
                    if (D % 64 || !EXACT)
                        if (!has(j.w.warp + 4 * y, EXACT ? D : j.head_dim)) break;
                    mma16816<T>(u[y], v[y][k], w[k][0], w[k][1]);
                }
            }
            join(n, top[n], sum[0], sum[1], u);
        }
    }

    /* Tile n joins (m, l, u), its right neighbour. */
    __device__ void join(int n, const float (&mb)[2], float l0, float l1, const float (&u)[P][4]) {
        float wa[2], wb[2];
#pragma unroll
        for (int r = 0; r < 2; r++) gen_factors(m[n][r], mb[r], &m[n][r], &wa[r], &wb[r]);
        l[n][0] = gen_join(l[n][0], wa[0], l0, wb[0]);
        l[n][1] = gen_join(l[n][1], wa[1], l1, wb[1]);
#pragma unroll
        for (int y = 0; y < P; y++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                o[n][y][e] = gen_join(o[n][y][e], wa[e % 2], u[y][e], wb[e % 2]);
    }

    /* ---- A node that is whole ---- */

    /* Its own place of tile n on the stack, thread by thread. */
    __device__ float *waiting(const gen_job &j, int level, int n) {
        size_t node = ((size_t)blockIdx.x * (j.p.max_level - GEN_FOLD_LEVEL) + level);
        return j.p.stack +
               ((node * (j.p.max_q / 8) + n) * gen_cut<D>::tile_floats) * (GEN_WARPS * 32) +
               threadIdx.x;
    }

    /* Fold `idx` of an item: joined with the nodes to its left; all but the last wait. */
    __device__ void climb(const gen_job &j, int idx, bool last) {
        constexpr int S = GEN_WARPS * 32;
        int level = 0;
        for (int left = idx; last ? left != 0 : left & 1; left >>= 1, level++) {
            if (!(left & 1)) continue;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float *from = waiting(j, level, n);
                float mb[2] = {m[n][0], m[n][1]}, lb[2] = {l[n][0], l[n][1]}, u[P][4];
#pragma unroll
                for (int d = 0; d < 4 * P; d++) {
                    u[d / 4][d % 4] = o[n][d / 4][d % 4];
                    o[n][d / 4][d % 4] = from[d * S];
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    m[n][r] = from[(4 * P + r) * S];
                    l[n][r] = from[(4 * P + 2 + r) * S];
                }
                join(n, mb, lb[0], lb[1], u);
            }
        }
        if (last) return;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float *to = waiting(j, level, n);
#pragma unroll
            for (int d = 0; d < 4 * P; d++) to[d * S] = o[n][d / 4][d % 4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                to[(4 * P + r) * S] = m[n][r];
                to[(4 * P + 2 + r) * S] = l[n][r];
            }
        }
    }

    /* The item's node to its slot: with an exact head_dim one address and offsets. */
    __device__ void put_slot(const gen_job &j) {
        int g = j.w.lane / 4, t = j.w.lane % 4, hd = EXACT ? D : j.head_dim;
        int left = j.item.n_q - j.item.q0 - t * 2;
        size_t slot = (size_t)j.item.slot + j.item.q0 + t * 2;
        float *to = j.p.o + slot * hd + j.w.warp * 16 + g;
        float2 *ml = j.p.ml + slot;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (n * 8 + r >= left) continue;
                if (j.w.warp == 0 && g == 0) ml[n * 8 + r] = make_float2(m[n][r], l[n][r]);
#pragma unroll
                for (int y = 0; y < P; y++) {
                    if (D % 64 || !EXACT)
                        if (!has(j.w.warp + 4 * y, hd)) break;
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        to[(n * 8 + r) * hd + y * 64 + h * 8] = o[n][y][h * 2 + r];
                }
            }
    }

    /* The list's only node to `out`, or packed. */
    __device__ void put_out(const gen_job &j) {
        int g = j.w.lane / 4, t = j.w.lane % 4, hd = EXACT ? D : j.head_dim;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row, head;
                if (!gen_query(j.a, j.p, j.item, n * 8 + t * 2 + r, &row, &head)) continue;
                float *to = j.a.out + ((size_t)row * j.a.n_heads + head) * hd, by = gen_by(l[n][r]);
                uint16_t *packed = j.a.act + (size_t)row * j.a.act_stride + head * hd;
#pragma unroll
                for (int y = 0; y < P; y++) {
                    int pair = j.w.warp + 4 * y;
                    if (D % 64 || !EXACT)
                        if (!has(pair, hd)) break;
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        int e = pair * 16 + h * 8 + g;
                        float v = gen_out(o[n][y][h * 2 + r], by);
                        if (j.a.act) packed[e] = (uint16_t)to_act_pair(v, 0.f, j.a.act_bf16);
                        else to[e] = v;
                    }
                }
            }
    }
};

/* The next M pages, of whose first K has come (in stage `first`). Two at a time take little longer
 * than one: a page is a chain of waits. */
template <bool MASKED, int M, typename T, int D, bool EXACT, int N>
__device__ static inline void gen_pages(gen_node<T, D, EXACT, N> &node, const gen_job &j,
                                        struct gen_ring &ring, int first, const uint64_t *seen) {
    float x[M * N][4], top[M * N][2];
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
