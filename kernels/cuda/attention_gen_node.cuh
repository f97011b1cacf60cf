#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_NODE_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_NODE_CUH

/* The computing side of attention_gen.cu: pages out of the ring, and (m, l, o) of the node in hand,
 * from its first page to its place in the scratch. */

#include <float.h>

#include "kernels/cuda/attention_gen_query.cuh"

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

/* The largest of K numbers of each of the lanes that differ in the bits D, D / 2, .. 4: in each
 * step a lane keeps half of the numbers and hands the others over, so that (K + 7) / 8 are left of
 * three steps; index: which one lane's i-th is. */
template <int K, int D> struct gen_tops {
    static constexpr int H = (K + 1) / 2;
    __device__ static void reduce(float *x) {
        bool upper = threadIdx.x & D;
#pragma unroll
        for (int i = 0; i < H; i++) {
            float keep = x[i], give = x[i];
            if (i + H < K) {
                if (upper) keep = x[i + H];
                else give = x[i + H];
            }
            x[i] = fmaxf(keep, __shfl_xor_sync(~0u, give, D));
        }
        if constexpr (D > 4) gen_tops<H, D / 2>::reduce(x);
    }
    __device__ static int index(int i) {
        if constexpr (D > 4) i = gen_tops<H, D / 2>::index(i);
        return i + (threadIdx.x & D && i + H < K ? H : 0);
    }
};

/* What one item's pages are computed with. */
struct gen_job {
    const struct attn_args &a;
    const struct gen_plan &p;
    const struct gen_item &item;
    struct gen_shared *sh;
    const uint4 *frag; /* queries */
    /* Shared addresses, of this lane: in gen_shared's top; in the page's weights, of its own 16
     * tokens and of the first. Weights are [tile][16 tokens][lane] pairs of registers, or where
     * gen_is_wide a matrix, [8 N queries][64 tokens] in page.cuh's order. */
    uint32_t top, put, get;
    uint32_t queries, weights; /* shared addresses */
    int head_dim, width_log2;  /* of a column of a plane, bytes */
    float scale_log2;
    struct gen_warp w;
};

/* N tiles of 8 queries of a warp: its dimensions of a node. Everything is transposed, scores are
 * tokens x queries and o is dimensions x queries, so that one row of few heads wastes little: of a
 * 16 x 8 tile lane 4 g + t has rows g and g + 8 of queries 2 t and 2 t + 1 ([0], [1]; [2], [3]). */
template <typename T, int D, bool EXACT, int N, bool FOLDS> struct gen_node {
    static constexpr int P = gen_cut<D>::pairs, H = D / 16, H2 = (H + 1) / 2;
    static constexpr bool wide = gen_is_wide<D, EXACT, N>(), ordered = gen_wide_order<D, EXACT>();
    static constexpr int chains = D > 64 && !ordered ? 4 : 2; /* sums of a score side by side */
    static constexpr bool keeps_q = N == 1 && D <= 128;       /* queries stay in registers */
    /* The last fold that waits for its right neighbour stays in registers where they suffice: o;
     * m and l in gen_shared. */
    static constexpr bool keeps_fold = FOLDS && N <= 3 && (ordered || EXACT && D == 64);
    float o[N][P][4], m[N][2], l[N][2];
    float fold[keeps_fold ? N : 1][P][4];
    uint4 q[keeps_q ? N * H2 : 1];

    /* Which of a score's sums step i of 16 dimensions goes to; whether it exists. */
    static __device__ constexpr int chain(int i) { return ordered ? i / (H / 2) : i % chains; }
    static __device__ bool has(int i, int head_dim) { return EXACT || i * 16 < head_dim; }

    /* Where its chunks begin in a plane's row: its column and its place there. */
    static __device__ uint32_t step(int i, const gen_job &j, uint32_t x) {
        uint32_t at = i * 32, log2 = EXACT ? 0 : j.width_log2,
                 width = EXACT ? page_width(D) : 1 << log2;
        return (EXACT ? at / width : at >> log2) * (width * KERN_BLOCK) + (at & (width - 1) ^ x);
    }

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
            if (has(k, j.head_dim)) ldmatrix4(a[k], k_plane + j.w.k_row + step(k, j, j.w.k_x));
#pragma unroll
        for (int n = 0; n < N; n++) {
            float s[chains][4] = {};
#pragma unroll
            for (int k2 = 0; k2 < H2; k2++) {
                if (!has(k2 * 2, j.head_dim)) break;
                uint4 f;
                if constexpr (keeps_q) f = q[n * H2 + k2];
                else f = query(j, n, k2);
                mma16816<T>(s[chain(k2 * 2)], a[k2 * 2], f.x, f.y);
                if (k2 * 2 + 1 < H && has(k2 * 2 + 1, j.head_dim))
                    mma16816<T>(s[chain(k2 * 2 + 1)], a[k2 * 2 + 1 < H ? k2 * 2 + 1 : 0], f.z, f.w);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[n][e] = s[0][e] + s[1][e];
                if constexpr (chains == 4) x[n][e] += s[2][e] + s[3][e];
            }
        }
    }

    /* Which of a page's scores this lane's queries see, two bits a query; the others: -infinity. */
    template <int M> __device__ static uint32_t mask(const gen_job &j, const uint64_t *seen) {
        static_assert(M <= 8, "");
        int g = j.w.lane / 4, t = j.w.lane % 4;
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            uint32_t see =
                (uint32_t)(seen[i / 2 * 8 + t * 2 + i % 2] >> (j.w.warp * 16 + g)) & 0x101;
            bits |= (see | see >> 7) % 4 << i * 2;
        }
        return bits;
    }
    template <int M> __device__ static void mask(float (&x)[M][4], uint32_t bits) {
#pragma unroll
        for (int i = 0; i < 4 * M; i++)
            if (!(bits >> (i / 4 * 4 + i % 2 * 2 + i % 4 / 2) & 1)) x[i / 4][i % 4] = -INFINITY;
    }

    /* Scores of M tiles (of one page or more) to weights in shared memory; top: the page's largest
     * of each query, scaled. All four warps pass its two barriers. */
    template <int M>
    __device__ static void weigh(float (&x)[M][4], float (&top)[M][2], const gen_job &j) {
        int g = j.w.lane / 4, t = j.w.lane % 4;
        float most[2 * M];
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) most[i * 2 + r] = fmaxf(x[i][r], x[i][2 + r]);
        gen_tops<2 * M, 16>::reduce(most);
#pragma unroll
        for (int i = 0; i < (2 * M + 7) / 8; i++) {
            int at = gen_tops<2 * M, 16>::index(i);
            asm volatile(
                "st.shared.f32 [%0], %1;" ::"r"(j.top + (at / 2 * 8 + at % 2) * 16 + j.w.warp * 4),
                "f"(most[i]));
        }
        named_sync(1, GEN_WARPS * 32);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float y[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
                             : "r"(j.top + (i * 8 + r) * 16));
                top[i][r] = __fmul_rn(fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3])), j.scale_log2);
            }
        uint32_t w[M][2]; /* tokens g, g + 8 of two queries */
#pragma unroll
        for (int i = 0; i < M; i++) {
            float from[2];
#pragma unroll
            for (int r = 0; r < 2; r++) from[r] = fminf(-top[i][r], FLT_MAX); /* sees nothing: 0 */
#pragma unroll
            for (int h = 0; h < 2; h++)
                w[i][h] =
                    pack2_weights<T>(exp2_fast(__fmaf_rn(x[i][h * 2], j.scale_log2, from[0])),
                                     exp2_fast(__fmaf_rn(x[i][h * 2 + 1], j.scale_log2, from[1])));
        }
        if constexpr (wide) wide_put<M>(j.put, w);
        /* Their sums, which the fence takes as long as to make. */
        const uint32_t one[4] = {gen_ones<T>(), gen_ones<T>(), gen_ones<T>(), gen_ones<T>()};
        float sum[M][4] = {};
#pragma unroll
        for (int i = 0; i < M; i++) {
            uint32_t w0 = transposed(w[i][0]), w1 = transposed(w[i][1]);
            if constexpr (ordered) mma16816<T>(sum[i], one, w0, w1);
            if constexpr (!wide)
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(j.put + i * 1024), "r"(w0),
                             "r"(w1));
        }
        if constexpr (wide) async_fence();
        if constexpr (ordered)
            if (g == 0)
#pragma unroll
                for (int i = 0; i < M; i++)
#pragma unroll
                    for (int r = 0; r < 2; r++) j.sh->sum[i * 8 + t * 2 + r][j.w.warp] = sum[i][r];
        named_sync(1, GEN_WARPS * 32);
    }

    /* Tokens that some query sees; whole warp. */
    static __device__ uint64_t some_see(const gen_job &j, const uint64_t *seen) {
        uint64_t mine = seen[j.w.lane] | seen[min(j.w.lane + 32, GEN_MAX_Q - 1)];
        return (uint64_t)__reduce_or_sync(~0u, (uint32_t)(mine >> 32)) << 32 |
               __reduce_or_sync(~0u, (uint32_t)mine);
    }

    /* Zeros for all other tokens of a plane of wide heads; a thread a token's row of a column. */
    static __device__ void clear_unseen(uint32_t v_plane, uint64_t some) {
        int token = threadIdx.x % KERN_BLOCK;
        if (some >> token & 1) return;
        uint32_t to = v_plane + threadIdx.x / KERN_BLOCK * WIDE_COLUMN + token * 128;
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + i * 16), "r"(0));
    }

    /* Join the page whose weights lie from `tile` on: weights times V; where MASKED, what no row
     * sees is masked away. */
    template <bool MASKED>
    __device__ void values(const float (*top)[2], const gen_job &j, int tile, uint32_t v_plane,
                           const uint64_t *seen) {
        const uint32_t one[4] = {gen_ones<T>(), gen_ones<T>(), gen_ones<T>(), gen_ones<T>()};
        uint32_t v[P][4][4], tokens = 16 * (EXACT ? page_width(D) : 1 << j.width_log2);
#pragma unroll
        for (int y = 0; y < P; y++) {
            int pair = j.w.warp + 4 * y;
            if (D % 64 || !EXACT)
                if (!has(pair, EXACT ? D : j.head_dim)) break;
#pragma unroll
            for (int k = 0; k < 4; k++)
                ldmatrix4_trans(v[y][k], v_plane + j.w.v_row + k * tokens + step(pair, j, j.w.v_x));
        }
        if constexpr (MASKED) {
            uint64_t some = some_see(j, seen);
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
                if constexpr (!ordered) mma16816<T>(sum, one, w[k][0], w[k][1]);
#pragma unroll
                for (int y = 0; y < P; y++) {
                    if (D % 64 || !EXACT)
                        if (!has(j.w.warp + 4 * y, EXACT ? D : j.head_dim)) break;
                    mma16816<T>(u[y], v[y][k], w[k][0], w[k][1]);
                }
            }
            if constexpr (ordered) weights(j, tile + n, sum[0], sum[1]);
            join(n, top[n], sum[0], sum[1], u);
        }
    }

    /* The sums that `weigh` left of a tile's weights. */
    static __device__ void weights(const gen_job &j, int tile, float &l0, float &l1) {
        const float4 *at = (const float4 *)j.sh->sum[tile * 8 + j.w.lane % 4 * 2], a = at[0],
                     b = at[1];
        l0 = (a.x + a.y) + (a.z + a.w);
        l1 = (b.x + b.y) + (b.z + b.w);
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

    /* A page's u as wide_values leaves it. */
    __device__ void join_page(const gen_job &j, const float (&top)[N][2],
                              const float (&u)[2][N][4]) {
        static_assert(!wide || P == 2, "");
#pragma unroll
        for (int n = 0; n < N; n++) {
            float of[P][4], l[2];
            weights(j, n, l[0], l[1]);
#pragma unroll
            for (int e = 0; e < 4 * P; e++) of[e / 4][e % 4] = u[e / 4 % 2][n][e % 4];
            join(n, top[n], l[0], l[1], of);
        }
    }

    /* ---- A node that is whole ---- */

    /* Its own place of tile n on the stack, thread by thread. */
    __device__ float *waiting(const gen_job &j, int level, int n) {
        size_t node = ((size_t)blockIdx.x * (j.p.max_level - GEN_FOLD_LEVEL) + level);
        return j.p.stack +
               ((node * (j.p.max_q / 8) + n) * gen_cut<D>::tile_floats) * (GEN_WARPS * 32) +
               threadIdx.x;
    }

    /* The node waits in place 0, registers, or on a shelf, 1 or more; is joined with the one that
     * does. All warps have the same m and l, and the barriers of the pages between keep them. */
    __device__ void keep(const gen_job &j, int place) {
        float4 *shelf = on_shelf(j, place);
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (j.w.warp == 0 && j.w.lane < 4)
                    j.sh->waits[place][n * 8 + j.w.lane * 2 + r] = make_float2(m[n][r], l[n][r]);
#pragma unroll
            for (int y = 0; y < P; y++) {
                if (place)
                    shelf[(n * P + y) * (GEN_WARPS * 32)] =
                        make_float4(o[n][y][0], o[n][y][1], o[n][y][2], o[n][y][3]);
                else
#pragma unroll
                    for (int e = 0; e < 4; e++) fold[n][y][e] = o[n][y][e];
            }
        }
    }
    __device__ void join_kept(const gen_job &j, int place) {
        const float4 *shelf = on_shelf(j, place);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float mb[2] = {m[n][0], m[n][1]}, lb[2] = {l[n][0], l[n][1]}, u[P][4];
#pragma unroll
            for (int y = 0; y < P; y++) {
                float4 a;
                if (place) a = shelf[(n * P + y) * (GEN_WARPS * 32)];
                else a = make_float4(fold[n][y][0], fold[n][y][1], fold[n][y][2], fold[n][y][3]);
#pragma unroll
                for (int e = 0; e < 4; e++) u[y][e] = o[n][y][e];
                o[n][y][0] = a.x, o[n][y][1] = a.y, o[n][y][2] = a.z, o[n][y][3] = a.w;
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float2 a = j.sh->waits[place][n * 8 + j.w.lane % 4 * 2 + r];
                m[n][r] = a.x, l[n][r] = a.y;
            }
            join(n, mb, lb[0], lb[1], u);
        }
    }
    __device__ float4 *on_shelf(const gen_job &j, int place) {
        return (float4 *)((uint8_t *)j.sh + j.p.shelf) + threadIdx.x +
               (place - 1) * (N * P * GEN_WARPS * 32);
    }

    /* Fold `idx` of an item: joined with the nodes to its left; all but the last wait, and a new
     * one begins. */
    __device__ void climb(const gen_job &j, int idx, bool last) {
        constexpr int S = GEN_WARPS * 32;
        int level = 0;
        if constexpr (keeps_fold) {
            if (idx & 1) join_kept(j, 0);
            else if (!last) {
                keep(j, 0);
                clear();
                return;
            }
#pragma unroll 1
            for (level = 1; level <= j.p.n_shelves; level++) {
                if (idx >> level & 1) join_kept(j, level);
                else if (!last) {
                    keep(j, level);
                    clear();
                    return;
                }
            }
        }
        for (int left = idx >> level; last ? left != 0 : left & 1; left >>= 1, level++) {
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
        clear();
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
template <bool MASKED, int M, typename T, int D, bool EXACT, int N, bool FOLDS>
__device__ static inline void gen_pages(gen_node<T, D, EXACT, N, FOLDS> &node, const gen_job &j,
                                        struct gen_ring &ring, int first, const uint64_t *seen) {
    float x[M * N][4], top[M * N][2];
#pragma unroll
    for (int i = 0; i < M; i++) {
        int stage = i ? gen_take(ring, 2 * i) : first;
        node.scores(x + i * N, j, ring.data + stage * ring.plane);
        gen_give_back(ring, stage);
    }
    if (MASKED) node.template mask<M * N>(x, node.template mask<M * N>(j, seen));
    node.template weigh<M * N>(x, top, j);
#pragma unroll
    for (int i = 0; i < M; i++) {
        int stage = gen_take(ring, 2 * i + 1);
        node.template values<MASKED>(top + i * N, j, i * N, ring.data + stage * ring.plane, seen);
        gen_give_back(ring, stage);
    }
    for (int i = 0; i < 2 * M; i++) ring.step();
}

#endif
