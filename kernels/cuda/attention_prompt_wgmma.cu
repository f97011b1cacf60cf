/* Attention of prompt rows on sm_90: attention_prompt.cu's tiles by wgmma.
 *
 * A block stays on its multiprocessor and takes tile after tile of 128 queries (rows x heads of a
 * group) of one KV head. One warp of the first warpgroup finds the tiles, walks their lists and
 * loads the pages' planes by tensor copies into a ring; two warpgroups of 64 queries each multiply:
 * scores of the next page run on the tensor cores beside the values of this one, and the softmax of
 * the next beside the latter. Queries, weights and both accumulators lie in registers, so shared
 * memory feeds only K and V.
 *
 * page.cuh's order of a plane is what the tensor cores' own swizzles expect. Page ids are a
 * dimension of the tensor; one that is negative yields zeros.
 *
 * Napkin, head_dim 128: a page is 2 x 16 KB and 4.2 MFLOP for the tile, 1,024 clocks of the tensor
 * cores; exponentials 512 clocks of the special function units, beside them. L2 gives 32 bytes a
 * clock and multiprocessor at the full rate, which is about what it can. */
#include <cuda.h>

#include "kernels/cuda/attention_prompt.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    GROUP_Q = 64, /* queries of a warpgroup */
    N_GROUPS = 2, /* that multiply */
    TILE_Q = GROUP_Q * N_GROUPS,
    THREADS = 128 * (N_GROUPS + 1),
    CLEAN_BARRIER = 1, /* named barriers: of the multiplying warpgroups, of each */
    GROUP_BARRIER = 2,
    LOADER_REGS = 40,
    GROUP_REGS = 232,
    MAX_STAGES = 8,
};

template <int HD> struct wide {
    static constexpr int P = page_chunks(HD);
    static constexpr int WIDTH = page_width(HD); /* bytes of a column's row: the swizzle */
    static constexpr int N_COLUMNS = HD * 2 / WIDTH;
    static constexpr int COLUMN = page_column(HD);
    static constexpr int PLANE = KERN_BLOCK * HD * 2;
    static constexpr uint64_t MODE = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3;
    static constexpr bool Q_IN_SMEM = HD > 128;
    static constexpr int Q_BYTES = Q_IN_SMEM ? GROUP_Q * HD * 2 : 0; /* of a warpgroup */
    static constexpr int STAGES = HD > 128 ? 2 : HD > 64 ? 5 : 8;
    static constexpr int SMEM = 2 * STAGES * PLANE + N_GROUPS * Q_BYTES + 1024;
    static constexpr int O_PART = HD > 128 ? HD / 2 : HD; /* columns of a product with V */
    static constexpr int N_PARTS = HD / O_PART;
    static constexpr int O = O_PART / 2; /* accumulators of a thread */
};

/* What the loading warp tells the others of a tile. */
struct tile_note {
    int row, n_rows; /* n_rows 0: no more tiles */
    int head, n_entries, n_whole, last;
    size_t list; /* first entry */
};

struct shared_state {
    alignas(8) uint64_t k_full[MAX_STAGES], k_empty[MAX_STAGES], v_full[MAX_STAGES],
        v_empty[MAX_STAGES], note_full[2], note_empty[2];
    uint32_t bad[MAX_STAGES][2]; /* clean_values' */
    tile_note note[2];
};

#if HAVE_WGMMA

/* ---- Instructions ---- */

__device__ static inline void expect_bytes(uint32_t bar, uint32_t bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
}
__device__ static inline void copy_plane(uint32_t dst, const CUtensorMap *map, int head, int page,
                                         uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %2, %2, %3, %4}], [%5];" ::"r"(dst),
                 "l"(map), "r"(0), "r"(head), "r"(page), "r"(bar)
                 : "memory");
}
#define F8(d, i)                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define L32                                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31"
#define L40 L32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define L48 L40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define L64 L48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

/* d (+)= a B: a in registers, B in shared memory; `trans` 1: B's columns are the contiguous ones.
 * The numbers name operands behind the accumulators: a, the descriptor, whether d counts. */
#define WGMMA_A(type, n, list, a0, a1, a2, a3, b, add, trans)                                      \
    "{ .reg .pred p; setp.ne.b32 p, %" #add ", 0; wgmma.mma_async.sync.aligned.m64n" #n            \
    "k16.f32." type "." type " {" list "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b            \
    ", p, 1, 1, " #trans "; }"
#define A_IN(a, b, add) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b), "r"(add)

#define WGMMA_FOR(T, type)                                                                         \
    __device__ static inline void wgmma_scores(T *, float(&d)[32], const uint32_t *a, uint64_t b,  \
                                               int add) {                                          \
        asm volatile(WGMMA_A(type, 64, L32, 32, 33, 34, 35, 36, 37, 0)                             \
                     : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24)                                    \
                     : A_IN(a, b, add));                                                           \
    }                                                                                              \
    __device__ static inline void wgmma_scores_shared(T *, float(&d)[32], uint64_t a, uint64_t b,  \
                                                      int add) {                                   \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64"  \
                     "k16.f32." type "." type " {" L32 "}, %32, %33, p, 1, 1, 0, 0; }"             \
                     : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24)                                    \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }                                                                                              \
    __device__ static inline void wgmma_values(T *, float(&d)[32], const uint32_t *a,              \
                                               uint64_t b) {                                       \
        asm volatile(WGMMA_A(type, 64, L32, 32, 33, 34, 35, 36, 37, 1)                             \
                     : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24)                                    \
                     : A_IN(a, b, 1));                                                             \
    }                                                                                              \
    __device__ static inline void wgmma_values(T *, float(&d)[40], const uint32_t *a,              \
                                               uint64_t b) {                                       \
        asm volatile(WGMMA_A(type, 80, L40, 40, 41, 42, 43, 44, 45, 1)                             \
                     : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24), F8(d, 32)                         \
                     : A_IN(a, b, 1));                                                             \
    }                                                                                              \
    __device__ static inline void wgmma_values(T *, float(&d)[48], const uint32_t *a,              \
                                               uint64_t b) {                                       \
        asm volatile(WGMMA_A(type, 96, L48, 48, 49, 50, 51, 52, 53, 1)                             \
                     : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24), F8(d, 32), F8(d, 40)              \
                     : A_IN(a, b, 1));                                                             \
    }                                                                                              \
    __device__ static inline void wgmma_values(T *, float(&d)[64], const uint32_t *a,              \
                                               uint64_t b) {                                       \
        asm volatile(WGMMA_A(type, 128, L64, 64, 65, 66, 67, 68, 69, 1)                            \
                     : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24), F8(d, 32), F8(d, 40), F8(d, 48),  \
                       F8(d, 56)                                                                   \
                     : A_IN(a, b, 1));                                                             \
    }
WGMMA_FOR(__half, "f16")
WGMMA_FOR(__nv_bfloat16, "bf16")

/* ---- Products ---- */

/* Column bytes at which k-step k of 16 elements of a row begins. */
template <int HD> __device__ constexpr int step_at(int k) {
    return k * 32 / wide<HD>::WIDTH * wide<HD>::COLUMN + k * 32 % wide<HD>::WIDTH;
}

/* Start s = q K^T of a page in shared memory. */
template <typename T, int HD>
__device__ static inline void start_scores(float (&s)[32], const uint32_t (*q)[4], uint32_t q_smem,
                                           uint32_t k_smem) {
    typedef wide<HD> W;
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        uint64_t b = matrix(k_smem + step_at<HD>(k), 16, 8 * W::WIDTH, W::MODE);
        if (W::Q_IN_SMEM)
            wgmma_scores_shared((T *)0, s,
                                matrix(q_smem + step_at<HD>(k), 16, 8 * W::WIDTH, W::MODE), b, k);
        else wgmma_scores((T *)0, s, q[W::Q_IN_SMEM ? 0 : k], b, k);
    }
    wgmma_commit();
}

/* Start o += p V of a page in shared memory. */
template <typename T, int HD>
__device__ static inline void start_values(float (&o)[wide<HD>::N_PARTS][wide<HD>::O],
                                           const uint32_t (&p)[16], uint32_t v_smem) {
    typedef wide<HD> W;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int part = 0; part < W::N_PARTS; part++)
            wgmma_values(
                (T *)0, o[part], p + 4 * k,
                matrix(v_smem + part * (W::O_PART * 2 / W::WIDTH) * W::COLUMN + k * 16 * W::WIDTH,
                       W::COLUMN, 8 * W::WIDTH, W::MODE));
    wgmma_commit();
}

/* ---- Loading ---- */

/* The k-th pick of a block among the items, there and back, so that early and late blocks get as
 * much. */
__device__ static inline int item_of(int round) {
    int n = gridDim.x, b = blockIdx.x;
    return round * n + (round & 1 ? n - 1 - b : b);
}

template <int HD>
__device__ static void load_entries(const attn_args &a, const CUtensorMap *k_map,
                                    const CUtensorMap *v_map, const tile_note &t, shared_state *sh,
                                    uint32_t smem, int *ring) {
    typedef wide<HD> W;
    int lane = threadIdx.x & 31, page = 0, then = 0;
    if (lane < t.n_entries) then = a.page[t.list + lane];
    for (int e = 0; e < t.n_entries; e++) {
        if (e % 32 == 0) {
            page = then;
            if (e + 32 + lane < t.n_entries) then = a.page[t.list + e + 32 + lane];
        }
        int id = __shfl_sync(~0u, page, e % 32), at = (*ring)++, i = at % W::STAGES;
        uint32_t parity = (at / W::STAGES & 1) ^ 1;
        if (lane == 0) {
            bar_wait(smem_addr(&sh->k_empty[i]), parity);
            expect_bytes(smem_addr(&sh->k_full[i]), W::PLANE);
            copy_plane(smem + i * W::PLANE, k_map, t.head, id, smem_addr(&sh->k_full[i]));
            bar_wait(smem_addr(&sh->v_empty[i]), parity);
            sh->bad[i][0] = sh->bad[i][1] = 0;
            expect_bytes(smem_addr(&sh->v_full[i]), W::PLANE);
            copy_plane(smem + (W::STAGES + i) * W::PLANE, v_map, t.head, id,
                       smem_addr(&sh->v_full[i]));
        }
        __syncwarp();
    }
}

/* One warp: tiles in their order, their notes, their pages. */
template <int HD>
__device__ static void load_tiles(const attn_args &a, int tile_rows, const CUtensorMap *k_map,
                                  const CUtensorMap *v_map, shared_state *sh, uint32_t smem) {
    int lane = threadIdx.x & 31, ring = 0;
    unsigned long long bytes = 0;
    for (int round = 0;; round++) {
        int item = item_of(round), slot = round & 1;
        prompt_tile t;
        tile_note note = {0, 0, item % a.n_kv, 0, 0, -1, 0};
        if (prompt_tile_find(a, a.n_gen, a.n_gen + a.n_prompt, tile_rows, item / a.n_kv, &t)) {
            prompt_tile_look(a, NULL, &t);
            note.row = t.row, note.n_rows = t.n_rows, note.last = t.last;
            size_t list = attn_list(a, t.seq, note.head);
            prompt_entries(a, t, list, &note.n_entries, &note.n_whole);
            note.list = list * (size_t)a.capacity;
            bytes += prompt_bytes(t, a.block + note.list, note.n_entries, HD);
        }
        if (lane == 0) {
            bar_wait(smem_addr(&sh->note_empty[slot]), (round / 2 & 1) ^ 1);
            sh->note[slot] = note;
            bar_arrive(smem_addr(&sh->note_full[slot]));
        }
        __syncwarp();
        if (note.n_rows == 0) break;
        load_entries<HD>(a, k_map, v_map, note, sh, smem, &ring);
    }
    if (lane == 0 && a.kv_bytes && bytes) atomicAdd(a.kv_bytes, bytes);
}

/* Rows of no sequence become zeros: the other warps of the loading warpgroup. */
__device__ static void zero_idle_rows(const attn_args &a) {
    int warp = threadIdx.x / 32 - 1, width = a.n_heads * a.head_dim;
    for (int i = blockIdx.x * 3 + warp; i < a.n_prompt; i += gridDim.x * 3) {
        int row = a.n_gen + i;
        if (a.row_seq[row] >= 0) continue;
        for (int x = threadIdx.x & 31; x < width; x += 32) a.out[(size_t)row * width + x] = 0.f;
    }
}

/* ---- Multiplying ---- */

/* A thread's two queries of a tile. */
struct my_queries {
    int row[2], head[2], position[2]; /* row -1: none; position -1: sees nothing */
};

__device__ static inline my_queries find_queries(const attn_args &a, const tile_note &t, int i0) {
    my_queries q;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int i = i0 + 8 * h, r = i / a.group;
        q.row[h] = r < t.n_rows ? t.row + r : -1;
        q.head[h] = t.head * a.group + i % a.group;
        q.position[h] = r < t.n_rows ? prompt_position(a, q.row[h]) : -1;
    }
    return q;
}

/* Queries to registers as A fragments, or to shared memory in K's order. */
template <typename T, int HD>
__device__ static inline void load_queries(const attn_args &a, const my_queries &my,
                                           uint32_t (*q)[4], uint32_t q_smem, int group) {
    typedef wide<HD> W;
    int t = threadIdx.x & 3, row = threadIdx.x % 128 / 32 * 16 + (threadIdx.x & 31) / 4;
    if (W::Q_IN_SMEM) named_sync(GROUP_BARRIER + group, 128); /* the last tile's are read */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float *src = my.position[h] < 0 ? NULL
                                              : a.qkv + (size_t)my.row[h] * a.qkv_stride +
                                                    (size_t)my.head[h] * HD + 2 * t;
#pragma unroll
        for (int k = 0; k < HD / 16; k++) {
            uint32_t x[2];
            load_query<T>(src ? src + 16 * k : NULL, &x[0], &x[1]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (!W::Q_IN_SMEM) q[W::Q_IN_SMEM ? 0 : k][h + 2 * i] = x[i];
                else {
                    int r = row + 8 * h, c = 2 * k + i;
                    uint32_t at = c / W::P * W::COLUMN + r * W::WIDTH + (c % W::P ^ r % 8) * 16;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(q_smem + at + 4 * t), "r"(x[i])
                                 : "memory");
                }
            }
        }
    }
    if (W::Q_IN_SMEM) {
        async_fence();
        named_sync(GROUP_BARRIER + group, 128);
    }
}

/* A page that some row of the tile sees in part: V is made clean by both warpgroups; the tokens
 * that hold no numbers. */
template <typename T, int HD>
__device__ static inline uint64_t clean_page(uint8_t *v, int n_seen, volatile uint32_t *bad) {
    typedef wide<HD> W;
    for (int i = threadIdx.x - 128; i < W::PLANE / 16; i += TILE_Q * 2)
        clean_values<T>((uint4 *)v + i, i % (W::COLUMN / 16) / W::P, n_seen, (uint32_t *)bad);
    async_fence();
    named_sync(CLEAN_BARRIER, 128 * N_GROUPS);
    return (uint64_t)bad[1] << 32 | bad[0];
}

/* Where a warpgroup stands in the ring. */
struct ring_place {
    int i;
    uint32_t parity;
    template <int STAGES> __device__ void next() {
        if (++i == STAGES) i = 0, parity ^= 1;
    }
};

__device__ static inline void leave(uint64_t *bar) {
    if ((threadIdx.x & 31) == 0) bar_arrive(smem_addr(bar));
}

/* A warpgroup without a query in this tile keeps step. */
template <typename T, int HD>
__device__ static void skip_tile(const tile_note &t, const attn_args &a, shared_state *sh,
                                 uint8_t *smem, ring_place *at) {
    typedef wide<HD> W;
    for (int e = 0; e < t.n_entries; e++) {
        bar_wait(smem_addr(&sh->k_full[at->i]), at->parity);
        leave(&sh->k_empty[at->i]);
        bar_wait(smem_addr(&sh->v_full[at->i]), at->parity);
        if (e >= t.n_whole)
            clean_page<T, HD>(smem + (W::STAGES + at->i) * W::PLANE,
                              t.last - a.block[t.list + e] * KERN_BLOCK + 1, sh->bad[at->i]);
        leave(&sh->v_empty[at->i]);
        at->next<W::STAGES>();
    }
}

/* Scores of entry e, whose K stands at `at`, to weights. */
template <typename T, int HD>
__device__ static inline void weigh(const attn_args &a, const tile_note &t, const my_queries &my,
                                    int e, shared_state *sh, uint8_t *smem, const ring_place &at,
                                    float (&s)[32], softmax_rows &soft, float (&alpha)[2]) {
    typedef wide<HD> W;
    if (e < t.n_whole) {
        softmax_page(s, soft, a.scale_log2, alpha);
        return;
    }
    int block = a.block[t.list + e];
    uint64_t seen0 = prompt_seen(a, 0, my.row[0], my.position[0], block);
    uint64_t seen1 = prompt_seen(a, 0, my.row[1], my.position[1], block);
    mask_scores(s, seen0, seen1);
    softmax_page(s, soft, a.scale_log2, alpha);
    bar_wait(smem_addr(&sh->v_full[at.i]), at.parity);
    uint64_t bad = clean_page<T, HD>(smem + (W::STAGES + at.i) * W::PLANE,
                                     t.last - block * KERN_BLOCK + 1, sh->bad[at.i]);
    if (bad) spoil_weights(s, bad & seen0, bad & seen1);
}

template <typename T, int HD>
__device__ static inline void write_queries(const attn_args &a, const my_queries &my,
                                            const softmax_rows &soft,
                                            const float (&o)[wide<HD>::N_PARTS][wide<HD>::O]) {
    typedef wide<HD> W;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float l = softmax_total(soft.l[h]);
        if (my.row[h] < 0) continue;
        float by = my.position[h] < 0 || l == 0.f ? 0.f : 1.f / l;
        float *out =
            a.out + ((size_t)my.row[h] * a.n_heads + my.head[h]) * HD + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int part = 0; part < W::N_PARTS; part++)
#pragma unroll
            for (int n = 0; n < W::O / 4; n++) {
                float2 x = {o[part][4 * n + 2 * h] * by, o[part][4 * n + 2 * h + 1] * by};
                *(float2 *)(out + part * W::O_PART + 8 * n) = x;
            }
    }
}

/* One warpgroup, one tile. K runs one entry ahead of V: while the tensor cores add page e - 1's
 * values, the softmax of page e is computed. */
template <typename T, int HD>
__device__ static inline void attend(const attn_args &a, const tile_note &t, int group,
                                     shared_state *sh, uint8_t *smem, uint32_t k_smem,
                                     uint32_t q_smem, ring_place *at) {
    typedef wide<HD> W;
    const uint32_t v_smem = k_smem + W::STAGES * W::PLANE;
    my_queries my =
        find_queries(a, t, group * GROUP_Q + threadIdx.x % 128 / 32 * 16 + (threadIdx.x & 31) / 4);
    uint32_t q[W::Q_IN_SMEM ? 1 : HD / 16][4], p[16];
    load_queries<T, HD>(a, my, q, q_smem, group);
    float o[W::N_PARTS][W::O] = {}, s[32], alpha[2];
    softmax_rows soft = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
    ring_place k = *at, v = *at;
    if (t.n_entries) {
        bar_wait(smem_addr(&sh->k_full[k.i]), k.parity);
        wgmma_fence();
        start_scores<T, HD>(s, q, q_smem, k_smem + k.i * W::PLANE);
        wgmma_wait<0>();
        hold(s);
        leave(&sh->k_empty[k.i]);
        weigh<T, HD>(a, t, my, 0, sh, smem, k, s, soft, alpha);
        pack_weights<T>(s, p);
        k.next<W::STAGES>();
    }
    for (int e = 1; e < t.n_entries; e++) {
        bar_wait(smem_addr(&sh->k_full[k.i]), k.parity);
        bar_wait(smem_addr(&sh->v_full[v.i]), v.parity);
        hold(s);
        hold(p);
        wgmma_fence();
        start_scores<T, HD>(s, q, q_smem, k_smem + k.i * W::PLANE);
        start_values<T, HD>(o, p, v_smem + v.i * W::PLANE);
        wgmma_wait<1>();
        hold(s);
        leave(&sh->k_empty[k.i]);
        weigh<T, HD>(a, t, my, e, sh, smem, k, s, soft, alpha);
        wgmma_wait<0>();
        hold(p);
#pragma unroll
        for (int part = 0; part < W::N_PARTS; part++) hold(o[part]);
        leave(&sh->v_empty[v.i]);
        if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f))
#pragma unroll
            for (int part = 0; part < W::N_PARTS; part++)
#pragma unroll
                for (int i = 0; i < W::O; i++) o[part][i] *= alpha[i / 2 & 1];
        pack_weights<T>(s, p);
        k.next<W::STAGES>();
        v.next<W::STAGES>();
    }
    if (t.n_entries) {
        bar_wait(smem_addr(&sh->v_full[v.i]), v.parity);
        hold(p);
        wgmma_fence();
        start_values<T, HD>(o, p, v_smem + v.i * W::PLANE);
        wgmma_wait<0>();
        hold(p);
#pragma unroll
        for (int part = 0; part < W::N_PARTS; part++) hold(o[part]);
        leave(&sh->v_empty[v.i]);
    }
    *at = k;
    write_queries<T, HD>(a, my, soft, o);
}

template <typename T, int HD>
__device__ static void multiply_tiles(const attn_args &a, int group, shared_state *sh,
                                      uint8_t *smem, uint32_t k_smem) {
    typedef wide<HD> W;
    uint32_t q_smem = k_smem + 2 * W::STAGES * W::PLANE + group * W::Q_BYTES;
    ring_place at = {0, 0};
    for (int round = 0;; round++) {
        int slot = round & 1;
        bar_wait(smem_addr(&sh->note_full[slot]), round / 2 & 1);
        tile_note t = sh->note[slot];
        __syncwarp();
        leave(&sh->note_empty[slot]);
        if (t.n_rows == 0) break;
        if (group * GROUP_Q < t.n_rows * a.group)
            attend<T, HD>(a, t, group, sh, smem, k_smem, q_smem, &at);
        else skip_tile<T, HD>(t, a, sh, smem, &at);
    }
}

#endif /* HAVE_WGMMA */

/* ---- The kernel ---- */

/* Holds static shared memory only where it was compiled for sm_90a: that is how the host knows. */
template <typename T, int HD>
__global__ void __launch_bounds__(THREADS, 1)
    attention_prompt_wgmma_kernel(attn_args a, int tile_rows, const __grid_constant__ CUtensorMap k,
                                  const __grid_constant__ CUtensorMap v) {
#if HAVE_WGMMA
    extern __shared__ uint8_t raw[];
    __shared__ shared_state sh;
    uint8_t *smem = raw + (-smem_addr(raw) & 1023);
    pdl_trigger();
    if (threadIdx.x == 0) {
        for (int i = 0; i < wide<HD>::STAGES; i++) {
            bar_init(smem_addr(&sh.k_full[i]), 1);
            bar_init(smem_addr(&sh.v_full[i]), 1);
            bar_init(smem_addr(&sh.k_empty[i]), 4 * N_GROUPS);
            bar_init(smem_addr(&sh.v_empty[i]), 4 * N_GROUPS);
        }
        for (int i = 0; i < 2; i++) {
            bar_init(smem_addr(&sh.note_full[i]), 1);
            bar_init(smem_addr(&sh.note_empty[i]), 4 * N_GROUPS);
        }
        bar_init_fence();
    }
    __syncthreads();
    pdl_wait();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)LOADER_REGS));
        if (threadIdx.x < 32) load_tiles<HD>(a, tile_rows, &k, &v, &sh, smem_addr(smem));
        else zero_idle_rows(a);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)GROUP_REGS));
        multiply_tiles<T, HD>(a, threadIdx.x / 128 - 1, &sh, smem, smem_addr(smem));
    }
#endif
}

/* ---- Launching ---- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function that makes tensor maps; NULL where it has none. */
static encode_fn find_encode(void) {
    static void *found;
    static bool looked;
    if (looked) return (encode_fn)found;
    cudaDriverEntryPointQueryResult how;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &how) != cudaSuccess ||
        how != cudaDriverEntryPointSuccess)
        found = NULL;
    looked = true;
    return (encode_fn)found;
}

/* All planes of K or V as [page][head][column][token][element]. */
template <int HD>
static int make_map(struct cuda_ctx *c, const struct attn_args *a, bool value, CUtensorMap *out) {
    typedef wide<HD> W;
    const cuuint64_t dims[5] = {W::WIDTH / 2, KERN_BLOCK, W::N_COLUMNS, (cuuint64_t)a->n_kv,
                                INT32_MAX};
    const cuuint64_t strides[4] = {W::WIDTH, W::COLUMN, a->kv_head_stride, a->page_stride};
    const cuuint32_t box[5] = {W::WIDTH / 2, KERN_BLOCK, W::N_COLUMNS, 1, 1},
                     steps[5] = {1, 1, 1, 1, 1};
    CUresult rc = find_encode()(
        out, a->bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5,
        (void *)(a->kv + (value ? a->v_offset : a->k_offset)), dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return rc == CUDA_SUCCESS
               ? 0
               : cuda_note(c, cudaErrorInvalidValue, "cuTensorMapEncodeTiled", __FILE__, __LINE__);
}

template <typename T, int HD> static int launch(struct cuda_ctx *c, const struct attn_args *a) {
    static bool allowed;
    int rc, tile_rows = TILE_Q / a->group;
    auto *kernel = attention_prompt_wgmma_kernel<T, HD>;
    if (!allowed && (rc = cuda_allow_smem(c, kernel, wide<HD>::SMEM))) return rc;
    allowed = true;
    CUtensorMap k, v;
    if ((rc = make_map<HD>(c, a, false, &k)) || (rc = make_map<HD>(c, a, true, &v))) return rc;
    int items = a->n_kv * prompt_max_tiles(a->n_prompt, a->n_seqs, tile_rows);
    dim3 grid((unsigned)(items < c->n_sms ? items : c->n_sms));
    return CUDA_LAUNCH(c, kernel, grid, dim3(THREADS), wide<HD>::SMEM, *a, tile_rows, k, v);
}

struct launcher {
    template <typename T, int HD> static int run(struct cuda_ctx *c, const struct attn_args *a) {
        return launch<T, HD>(c, a);
    }
};

int cuda_attention_prompt_wgmma(struct cuda_ctx *c, const struct attn_args *a) {
    return prompt_dispatch<launcher>(c, a);
}

bool cuda_attention_has_wgmma(const struct cuda_ctx *c, const struct attn_args *a) {
    static int built = -1;
    if (c->sm != 90) return false;
    if (built < 0) {
        cudaFuncAttributes at = {};
        built =
            cudaFuncGetAttributes(&at, attention_prompt_wgmma_kernel<__half, 128>) == cudaSuccess &&
            at.sharedSizeBytes >= sizeof(shared_state) && find_encode();
    }
    return built && ((uintptr_t)(a->kv + a->k_offset) | (uintptr_t)(a->kv + a->v_offset) |
                     a->kv_head_stride | a->page_stride) %
                            16 ==
                        0;
}
