/* Attention of prompt rows: softmax(q K^T * scale) V over a list of pages, by mma.m16n8k16.
 *
 * A block has 64 queries (rows x heads of a group) of one KV head, 16 a warp, and walks the tile's
 * list: scores of a page of 64 tokens in registers, running softmax, weights times values. K of the
 * next page is on its way while this one's softmax and second product run, V while its scores are
 * computed: 256 head_dim bytes of shared memory, so several blocks share a multiprocessor and fill
 * each other's waits. Grid: (KV heads, tiles that the row counts allow), the last rows first;
 * blocks without a tile leave.
 *
 * Work: 4 head_dim FLOP for each (query, token); a page is loaded once for 64 queries, 64 FLOP a
 * byte, which the L2 cache serves (the heads' tiles walk the same pages side by side).
 *
 * On sm_90 the rows go to attention_prompt_wgmma.cu instead, but for rows of token trees. */
#include "kernels/cuda/attention_prompt_mma.cuh"

/* ---- Products ---- */

/* o[16 x HD] += p[16 x 64] V of a loaded page. */
template <typename T, int HD>
__device__ static inline void add_values(const uint32_t (&p)[16], uint32_t v_smem,
                                         float (&o)[HD / 8][4]) {
    int lane = threadIdx.x & 31;
    /* Matrices of a load: tokens 0..7 and 8..15 (lane / 8 % 2), chunks 0 and 1 (lane / 16). */
    int token = lane % 16, c = lane / 16;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
#pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            uint32_t b[4];
            ldmatrix4_trans(b, v_smem + page_chunk(16 * k + token, 2 * n + c, HD));
            mma16816<T>(o[2 * n], x, b[0], b[1]);
            mma16816<T>(o[2 * n + 1], x, b[2], b[3]);
        }
    }
}

/* ---- The kernel ---- */

/* Rows of no sequence, shared out over the grid. */
__device__ static void zero_idle_rows(const attn_args &a) {
    int n_blocks = gridDim.x * gridDim.y, width = a.n_heads * a.head_dim;
    for (int i = blockIdx.y * gridDim.x + blockIdx.x; i < a.n_prompt; i += n_blocks) {
        int row = a.n_gen + i;
        if (a.row_seq[row] >= 0) continue;
        for (int x = threadIdx.x; x < width; x += PROMPT_THREADS)
            a.out[(size_t)row * width + x] = 0.f;
    }
}

template <typename T, int HD>
__device__ static inline void write_query(const attn_args &a, const query_place &q, float l,
                                          const float (&o)[HD / 8][4], int h) {
    l = softmax_total(l);
    if (q.row < 0) return;
    float by = q.position < 0 || l == 0.f ? 0.f : 1.f / l;
    float *out = a.out + ((size_t)q.row * a.n_heads + q.head) * HD + (threadIdx.x & 3) * 2;
#pragma unroll
    for (int n = 0; n < HD / 8; n++) {
        float2 x = {o[n][2 * h] * by, o[n][2 * h + 1] * by};
        *(float2 *)(out + 8 * n) = x;
    }
}

template <typename T, int HD>
__global__ void __launch_bounds__(PROMPT_THREADS)
    attention_prompt_kernel(attn_args a, int tile_rows) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ uint32_t bad[2];
    const uint32_t k_smem = smem_addr(smem), v_smem = k_smem + prompt_shape<HD>::PLANE;
    pdl_trigger();
    pdl_wait();
    zero_idle_rows(a);
    prompt_tile t;
    int head = blockIdx.x, n, n_whole, first = a.n_gen;
    if (!prompt_tile_find(a, first, first + a.n_prompt, tile_rows, blockIdx.y, &t)) return;
    prompt_tile_look(a, NULL, &t);
    size_t list = attn_list(a, t.seq, head);
    prompt_entries(a, t, list, &n, &n_whole);
    list *= (size_t)a.capacity;
    load_plane<HD>(k_smem, a, list, 0, n, head, false);

    query_place at[2];
    queries<T, HD> q;
    find_queries(a, t, head, NULL, at);
    q.load(a, at, v_smem + prompt_shape<HD>::PLANE);

    float o[HD / 8][4] = {}, s[32], alpha[2];
    softmax_rows soft = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
    for (int e = 0; e < n; e++) {
        load_plane<HD>(v_smem, a, list, e, n, head, true);
        if (threadIdx.x < 2) bad[threadIdx.x] = 0;
        async_wait_older(); /* K */
        score_page<T, HD>(q, k_smem, s);
        uint64_t seen[2] = {~(uint64_t)0, ~(uint64_t)0};
        if (e >= n_whole) {
            int block = a.block[list + e];
#pragma unroll
            for (int h = 0; h < 2; h++)
                seen[h] = prompt_seen(a, t.seq, at[h].row, at[h].position, block);
            mask_scores(s, seen[0], seen[1]);
        }
        __syncthreads();
        load_plane<HD>(k_smem, a, list, e + 1, n, head, false);
        softmax_page(s, soft, a.scale_log2, alpha);
        async_wait_older(); /* V */
        if (e >= n_whole) {
            int n_seen = t.last - a.block[list + e] * KERN_BLOCK + 1;
            for (int i = threadIdx.x; i < KERN_BLOCK * HD / 8; i += PROMPT_THREADS)
                clean_values<T>((uint4 *)(smem + prompt_shape<HD>::PLANE) + i,
                                i * 16 % page_column(HD) / page_width(HD), n_seen, bad);
            __syncthreads();
            uint64_t spoilt = (uint64_t)bad[1] << 32 | bad[0];
            if (spoilt) spoil_weights(s, spoilt & seen[0], spoilt & seen[1]);
        }
        if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f))
#pragma unroll
            for (int i = 0; i < HD / 8; i++) {
                o[i][0] *= alpha[0], o[i][1] *= alpha[0];
                o[i][2] *= alpha[1], o[i][3] *= alpha[1];
            }
        uint32_t p[16];
        pack_weights<T>(s, p);
        add_values<T, HD>(p, v_smem, o);
        __syncthreads();
    }
    write_query<T, HD>(a, at[0], soft.l[0], o, 0);
    write_query<T, HD>(a, at[1], soft.l[1], o, 1);
    if (a.kv_bytes && threadIdx.x == 0)
        atomicAdd(a.kv_bytes, prompt_bytes(t, a.block + list, n, HD));
}

/* ---- Launching ---- */

template <typename T, int HD> static int launch(struct cuda_ctx *c, const struct attn_args *a) {
    static bool allowed;
    int rc, tile_rows = PROMPT_Q / a->group;
    void (*kernel)(attn_args, int) = attention_prompt_kernel<T, HD>;
    if (!allowed && (rc = cuda_allow_smem(c, kernel, prompt_shape<HD>::SMEM))) return rc;
    allowed = true;
    dim3 grid((unsigned)a->n_kv, (unsigned)prompt_max_tiles(a->n_prompt, a->n_seqs, tile_rows));
    return CUDA_LAUNCH(c, kernel, grid, dim3(PROMPT_THREADS), prompt_shape<HD>::SMEM, *a,
                       tile_rows);
}

struct launcher {
    template <typename T, int HD> static int run(struct cuda_ctx *c, const struct attn_args *a) {
        return launch<T, HD>(c, a);
    }
};

int cuda_attention_prompt(struct cuda_ctx *c, const struct attn_args *a) {
    if (a->n_prompt == 0) return 0;
    if (!a->ancestors && cuda_attention_has_wgmma(c, a)) return cuda_attention_prompt_wgmma(c, a);
    return prompt_dispatch<launcher>(c, a);
}
