#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_QUERY_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_QUERY_CUH

/* The queries of attention_gen.cu's items: which row and head each is, their numbers in shared
 * memory, where they stand, and what of a page they see. */

#include <limits.h>

#include "kernels/cuda/attention_gen_load.cuh"
#include "kernels/cuda/attention_gen_wide.cuh"

/* A computing warp's place. */
struct gen_warp {
    int lane, warp;
    int clear;           /* blocks before this one are seen whole by all its rows */
    uint32_t k_row, k_x; /* offset of this lane's token in a column of K, its chunk's turn; of V */
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

/* The item's queries, by all computing threads: as fragments, [tile of 8][32 dimensions][lane][8].
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
        if (at >= N * pairs) continue;
        uint4 y = make_uint4(pack2<T>(x[k][0].x, x[k][0].y), pack2<T>(x[k][1].x, x[k][1].y),
                             pack2<T>(x[k][2].x, x[k][2].y), pack2<T>(x[k][3].x, x[k][3].y));
        frag[at * 32 + lane] = y;
    }
}
/* The same as a matrix in page.cuh's order, [64 dimensions][8 N][64], for wgmma: a thread 8
 * dimensions of a query of each tile. */
template <typename T, int N>
__device__ static void gen_put_queries_wide(const struct attn_args &a, const struct gen_plan &p,
                                            const struct gen_item &item, uint4 *matrix, bool wait) {
    int g = threadIdx.x / 16, c = threadIdx.x % 16;
    const float4 *from[N]; /* NULL: no query */
    float4 x[N][2] = {};
#pragma unroll
    for (int k = 0; k < N; k++) {
        int row, head;
        from[k] = NULL;
        if (gen_query(a, p, item, k * 8 + g, &row, &head))
            from[k] = (const float4 *)(a.qkv + (size_t)row * a.qkv_stride +
                                       (size_t)head * WIDE_DIM + c * 8);
    }
    uint4 *to = matrix + c / 8 * N * (WIDE_TILE / 16) + g * 8 + (c % 8 ^ g);
    if (wait) pdl_wait();
#pragma unroll
    for (int k = 0; k < N; k++)
        if (from[k]) x[k][0] = __ldcg(from[k]), x[k][1] = __ldcg(from[k] + 1);
#pragma unroll
    for (int k = 0; k < N; k++)
        to[k * (WIDE_TILE / 16)] =
            make_uint4(pack2<T>(x[k][0].x, x[k][0].y), pack2<T>(x[k][0].z, x[k][0].w),
                       pack2<T>(x[k][1].x, x[k][1].y), pack2<T>(x[k][1].z, x[k][1].w));
    async_fence();
}

/* Positions of the rows of the item's queries, for all warps, which each look themselves; returns
 * from which block on rows differ. */
__device__ static int gen_put_positions(const struct attn_args &a, const struct gen_plan &p,
                                        const struct gen_item &item, struct gen_shared *sh) {
    int lane = threadIdx.x & 31, least = INT_MAX;
#pragma unroll
    for (int i = lane; i < GEN_MAX_Q; i += 32) {
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
    uint64_t there = attn_quarter_tokens(gen_quarters_of(block));
    block &= GEN_BLOCK_MASK;
    if (i < GEN_MAX_Q)
        seen[i] = gen_query(a, p, item, i, &row, &head) && sh->pos[i] >= 0
                      ? attn_seen(a, item.seq, row, sh->pos[i], block) & there
                      : 0;
    named_sync(1, GEN_WARPS * 32);
}

#endif
