#ifndef TANDEM_KERNELS_CUDA_ATTENTION_PROMPT_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_PROMPT_CUH

/* What the kernels of prompt rows (attention_prompt.cu, attention_prompt_wgmma.cu) and of the mass
 * tap share: how rows are cut into tiles, which list entries a tile sees, and the softmax over a
 * page.
 *
 * A tile is some consecutive rows of one sequence with all query heads of one KV head, which share
 * every key and value that is loaded: query i of a tile is row i / group, head i % group. Entries
 * of the list go by in their order, 64 tokens at a time, in one running softmax. Scores of a page
 * lie in fragments as mma and wgmma have them: s[4 j + e] is column 8 j + 2 (lane % 4) + e % 2 of
 * query lane / 4 + 8 (e / 2) of a warp's 16. A row's sums hence run in one order wherever the row
 * stands, and a page that it does not see leaves its m, l and o as they are, bit for bit. */

#include <type_traits>

#include "kernels/cuda/attention.cuh"

/* Tiles that n rows of at most n_seqs sequences can make. */
static inline int prompt_max_tiles(int n_rows, int n_seqs, int tile_rows) {
    return n_rows / tile_rows + (n_seqs < n_rows ? n_seqs : n_rows);
}

/* attention_prompt_wgmma.cu. Whether this machine, build and layout have it; the call. */
bool cuda_attention_has_wgmma(const struct cuda_ctx *c, const struct attn_args *a);
int cuda_attention_prompt_wgmma(struct cuda_ctx *c, const struct attn_args *a);

/* ---- Tiles ---- */

struct prompt_tile {
    int seq, row, n_rows;
    int last, least; /* largest and least position of its rows; -1: idle rows alone */
};

/* Rows [first, end) of the batch that belong to a sequence. */
__device__ static inline int prompt_seq_rows(const attn_args &a, int seq, int first, int end,
                                             int *begin) {
    *begin = 0;
    if (seq >= a.n_seqs) return 0;
    long long b = a.seq_row[seq], e = b + a.seq_n_rows[seq];
    if (b < first) b = first;
    if (e > end) e = end;
    *begin = (int)b;
    return e > b ? (int)(e - b) : 0;
}

/* Position of a row; -1 where it is idle. */
__device__ static inline int prompt_position(const attn_args &a, int row) {
    int p = a.position[row];
    return a.row_seq[row] < 0 || p < 0 ? -1 : p;
}

/* Called by whole warps: of the tiles of tile_rows rows that the rows [first, end) make, the one
 * idx places before the last, as the last rows have the most to do. False where there are fewer. */
__device__ static inline bool prompt_tile_find(const attn_args &a, int first, int end,
                                               int tile_rows, int idx, prompt_tile *t) {
    int lane = threadIdx.x & 31, total = 0, begin;
    for (int s = 0; s < a.n_seqs; s += 32) {
        int n_rows = prompt_seq_rows(a, s + lane, first, end, &begin);
        total += __reduce_add_sync(~0u, (n_rows + tile_rows - 1) / tile_rows);
    }
    int want = total - 1 - idx, base = 0;
    if (want < 0) return false;
    for (int s = 0; s < a.n_seqs; s += 32) {
        int n_rows = prompt_seq_rows(a, s + lane, first, end, &begin);
        int n = (n_rows + tile_rows - 1) / tile_rows, upto = n;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += other;
        }
        int in = want - (base + upto - n); /* which of this lane's tiles */
        unsigned who = __ballot_sync(~0u, in >= 0 && in < n);
        if (who) {
            int src = __ffs(who) - 1;
            t->seq = s + src;
            t->row = __shfl_sync(~0u, begin + in * tile_rows, src);
            t->n_rows = min(tile_rows, __shfl_sync(~0u, n_rows - in * tile_rows, src));
            break;
        }
        base += __shfl_sync(~0u, upto, 31);
    }
    return true;
}

/* Called by whole warps: the tile's positions; of its rows that have a line alone where `line` is
 * not NULL. */
__device__ static inline void prompt_tile_look(const attn_args &a, const int32_t *line,
                                               prompt_tile *t) {
    int last = -1, least = INT32_MAX;
    for (int r = threadIdx.x & 31; r < t->n_rows; r += 32) {
        int p = prompt_position(a, t->row + r);
        if (p < 0 || (line && line[t->row + r] < 0)) continue;
        last = max(last, p);
        least = min(least, p);
    }
    t->last = __reduce_max_sync(~0u, last);
    t->least = __reduce_min_sync(~0u, least);
}

/* Called by whole warps: leading entries with a token that some row of the tile sees, and of those
 * the leading ones of which every row sees every token. Rows of a token tree see their own pass by
 * their masks. */
__device__ static inline void prompt_entries(const attn_args &a, const prompt_tile &t, size_t list,
                                             int *n, int *n_whole) {
    *n = t.last < 0 ? 0 : attn_entries_until(a, list, t.last);
    int until = t.least - (KERN_BLOCK - 1);
    if (a.ancestors) {
        int first = min(max(a.seq_row[t.seq], 0), a.n_gen + a.n_prompt - 1);
        until = min(until, max(a.position[first], 0) / KERN_BLOCK * KERN_BLOCK - 1);
    }
    *n_whole = t.last < 0 || until < 0 ? 0 : attn_entries_until(a, list, until);
}

/* Bytes of K and V that a tile reads, as kernels/cpu/attention.h counts them: only the last entry
 * can be seen in part. */
__device__ static inline unsigned long long prompt_bytes(const prompt_tile &t, const int32_t *block,
                                                         int n_entries, int head_dim) {
    if (n_entries == 0) return 0;
    long long tail = (long long)t.last - (long long)block[n_entries - 1] * KERN_BLOCK + 1;
    long long n = (long long)(2 * n_entries - 1) * KERN_BLOCK + min(tail, (long long)KERN_BLOCK);
    return (unsigned long long)n * head_dim * 2;
}

/* Bit i: does a row of the tile (position -1: idle) see token i of the block? */
__device__ static inline uint64_t prompt_seen(const attn_args &a, int seq, int row, int position,
                                              int block) {
    return position < 0 ? 0 : attn_seen(a, seq, row, position, block);
}

/* ---- Fragments ---- */

/* A thread's part of one k-step of a query row's A fragment: columns 0, 1 and 8, 9 of src; NULL:
 * zeros. */
template <typename T>
__device__ static inline void load_query(const float *src, uint32_t *low, uint32_t *high) {
    float2 x = {0.f, 0.f}, y = {0.f, 0.f};
    if (src) {
        x = *(const float2 *)src;
        y = *(const float2 *)(src + 8);
    }
    *low = pack2<T>(x.x, x.y);
    *high = pack2<T>(y.x, y.y);
}

/* Scores of tokens that a thread's two rows do not see become -infinity. */
__device__ static inline void mask_scores(float (&s)[32], uint64_t seen0, uint64_t seen1) {
    int c = (threadIdx.x & 3) * 2;
    seen0 >>= c, seen1 >>= c;
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (!(seen0 >> (8 * i + e) & 1)) s[4 * i + e] = -INFINITY;
            if (!(seen1 >> (8 * i + e) & 1)) s[4 * i + 2 + e] = -INFINITY;
        }
    }
}

/* Weights of tokens that hold no numbers become NaN: see clean_values. */
__device__ static inline void spoil_weights(float (&s)[32], uint64_t bad0, uint64_t bad1) {
    int c = (threadIdx.x & 3) * 2;
    bad0 >>= c, bad1 >>= c;
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (bad0 >> (8 * i + e) & 1) s[4 * i + e] = NAN;
            if (bad1 >> (8 * i + e) & 1) s[4 * i + 2 + e] = NAN;
        }
    }
}

struct softmax_rows {
    float m[2], l[2]; /* largest score; this thread's part of the sum */
};

/* Scores become weights; alpha is what o so far is multiplied by: exactly 1 where a row's maximum
 * stays. */
__device__ static inline void softmax_page(float (&s)[32], softmax_rows &x, float scale_log2,
                                           float (&alpha)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = s[2 * h];
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top, x.m[h]);
        alpha[h] = top == x.m[h] ? 1.f : exp2_fast((x.m[h] - top) * scale_log2);
        x.m[h] = top;
        float shift = top == -INFINITY ? 0.f : top * scale_log2, sum = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float p = exp2_fast(fmaf(s[4 * i + 2 * h + e], scale_log2, -shift));
                s[4 * i + 2 * h + e] = p;
                sum += p;
            }
        x.l[h] = fmaf(x.l[h], alpha[h], sum);
    }
}

/* The whole sum of a row, in all four threads that share it. */
__device__ static inline float softmax_total(float l) {
    l += __shfl_xor_sync(~0u, l, 1);
    return l + __shfl_xor_sync(~0u, l, 2);
}

/* Weights as the A fragments of the product with 16 tokens, k of 4. */
template <typename T>
__device__ static inline void pack_weights(const float (&s)[32], uint32_t (&p)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) p[i] = pack2_weights<T>(s[2 * i], s[2 * i + 1]);
}

/* ---- Values that must not be multiplied ---- */

/* Whether a word of two 16-bit floats holds an infinity or NaN. */
template <typename T> __device__ static inline bool not_finite(uint32_t w) {
    const uint32_t e = std::is_same<T, __half>::value ? 0x7c00u : 0x7f80u;
    return (w & e) == e || (w & e << 16) == e << 16;
}

/* Chunk of 16 bytes of token `token` in a loaded V page: zero behind the tile's last visible token,
 * where anything may lie. Something that is not finite before it is zeroed as well, and the token
 * noted in bad: rows that see it get a weight of NaN instead, the others stay clean. */
template <typename T>
__device__ static inline void clean_values(uint4 *chunk, int token, int n_seen, uint32_t *bad) {
    uint4 x = *chunk;
    bool odd = not_finite<T>(x.x) || not_finite<T>(x.y) || not_finite<T>(x.z) || not_finite<T>(x.w);
    if (token < n_seen && !odd) return;
    *chunk = make_uint4(0, 0, 0, 0);
    if (token < n_seen) atomicOr(&bad[token / 32], 1u << token % 32);
}

/* ---- Which instance ---- */

template <typename L, typename T>
static inline int prompt_dispatch_dim(struct cuda_ctx *c, const struct attn_args *a) {
    switch (a->head_dim) {
    case 64:
        return L::template run<T, 64>(c, a);
    case 80:
        return L::template run<T, 80>(c, a);
    case 96:
        return L::template run<T, 96>(c, a);
    case 128:
        return L::template run<T, 128>(c, a);
    case 256:
        return L::template run<T, 256>(c, a);
    default:
        return CUDA_NOTE(c, cudaErrorInvalidValue);
    }
}

/* L::run<T, HD>(c, a) by the KV type and head_dim of the call. */
template <typename L>
static inline int prompt_dispatch(struct cuda_ctx *c, const struct attn_args *a) {
    return a->bf16 ? prompt_dispatch_dim<L, __nv_bfloat16>(c, a)
                   : prompt_dispatch_dim<L, __half>(c, a);
}

#endif
