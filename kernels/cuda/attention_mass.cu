/* The mass taps: of every list entry, the largest share that a head of a row pays to it, over the
 * rows of one line, or each head's shares summed over the rows that have a line. Those rows are the
 * marked ones here.
 *
 * Two passes over K with attention_prompt.cu's tiles (64 queries of rows of either class, 16 a
 * warp). The first leaves each query's log2 of the sum of exp2 of its scores; the second computes
 * the scores again, sums their weights by entry and takes the maximum over queries: floats that are
 * not negative order like their bits, so atomicMax gives one result in any order. Few rows are
 * marked (the last 32 of a prompt), so lists are cut into 16 interleaved parts, leaf i to part
 * i % 16, for the blocks to be many: that is fixed by the place in the list, like every sum. Sums
 * by head are added in the order of rows: a block takes all tiles of a sequence, one after another.
 *
 * Napkin: 32 rows of a 128K prompt at 8B, 2 x 2 head_dim FLOP for each (query, token): 70 GFLOP,
 * and K twice from memory, 0.5 GB: some 0.3 ms a layer. */
#include "kernels/cuda/attention_prompt_mma.cuh"

enum { N_PARTS = 16 };

/* A block's place: its tile, its head, its part of the list. */
struct mass_place {
    prompt_tile t;
    int head, n, n_whole;
    size_t list; /* index of its first entry */
};

/* The j-th entry of this block's part. */
__device__ static inline int entry_of(int j) {
    return (j / ATTN_ENTRIES * N_PARTS + (int)blockIdx.z) * ATTN_ENTRIES + j % ATTN_ENTRIES;
}

/* False where no row of the tile is marked. */
__device__ static inline bool find_place(const attn_args &a, int tile_rows, mass_place *p) {
    p->head = blockIdx.x;
    if (!prompt_tile_find(a, 0, a.n_gen + a.n_prompt, tile_rows, blockIdx.y, &p->t)) return false;
    prompt_tile_look(a, a.mass_line, &p->t);
    if (p->t.last < 0) return false;
    size_t list = attn_list(a, p->t.seq, p->head);
    prompt_entries(a, p->t, list, &p->n, &p->n_whole);
    p->list = list * (size_t)a.capacity;
    return true;
}

/* The same of rows row .. row + n_rows - 1, fewer than a tile's, of sequence blockIdx.y. */
__device__ static inline bool place_at(const attn_args &a, int row, int n_rows, mass_place *p) {
    p->head = blockIdx.x;
    p->t.seq = blockIdx.y, p->t.row = row, p->t.n_rows = n_rows;
    prompt_tile_look(a, a.mass_line, &p->t);
    if (p->t.last < 0) return false;
    size_t list = attn_list(a, p->t.seq, p->head);
    prompt_entries(a, p->t, list, &p->n, &p->n_whole);
    p->list = list * (size_t)a.capacity;
    return true;
}

/* Where a query's sum of part `part` lies in the scratch. */
__device__ static inline float *sum_at(const attn_args &a, const query_place &q, int part) {
    size_t row = (size_t)part * (a.n_gen + a.n_prompt) + q.row;
    return (float *)a.scratch + row * a.n_heads + q.head;
}

/* Scores of the block's part of the list, page by page, to use(entry, s). */
template <typename T, int HD, typename F>
__device__ static inline void walk(const attn_args &a, const mass_place &p,
                                   const query_place (&at)[2], uint32_t smem, F use) {
    typedef prompt_shape<HD> S;
    queries<T, HD> q;
    q.load(a, at, smem + 2 * S::PLANE);
    load_plane<HD>(smem, a, p.list, entry_of(0), p.n, p.head, false);
    for (int j = 0; entry_of(j) < p.n; j++) {
        int e = entry_of(j);
        uint32_t now = smem + (j & 1) * S::PLANE, then = smem + (~j & 1) * S::PLANE;
        load_plane<HD>(then, a, p.list, entry_of(j + 1), p.n, p.head, false);
        async_wait_older();
        float s[32];
        score_page<T, HD>(q, now, s);
        if (e >= p.n_whole) {
            int block = a.block[p.list + e];
            mask_scores(s, prompt_seen(a, p.t.seq, at[0].row, at[0].position, block),
                        prompt_seen(a, p.t.seq, at[1].row, at[1].position, block));
        }
        use(e, s);
        __syncthreads();
    }
}

/* ---- Sums ---- */

template <typename T, int HD>
__global__ void __launch_bounds__(PROMPT_THREADS) mass_sums_kernel(attn_args a, int tile_rows) {
    extern __shared__ __align__(128) uint8_t smem[];
    pdl_trigger();
    pdl_wait();
    mass_place p;
    if (!find_place(a, tile_rows, &p)) return;
    query_place at[2];
    find_queries(a, p.t, p.head, a.mass_line, at);
    softmax_rows soft = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
    walk<T, HD>(a, p, at, smem_addr(smem), [&](int, float(&s)[32]) {
        float alpha[2];
        softmax_page(s, soft, a.scale_log2, alpha);
    });
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float l = softmax_total(soft.l[h]);
        if (at[h].position < 0 || (threadIdx.x & 3)) continue;
        *sum_at(a, at[h], blockIdx.z) = l == 0.f ? -INFINITY : soft.m[h] * a.scale_log2 + log2f(l);
    }
    if (a.kv_bytes && blockIdx.z == 0 && threadIdx.x == 0) /* both passes' */
        atomicAdd(a.kv_bytes, 2ull * p.n * prompt_shape<HD>::PLANE);
}

/* ---- Shares ---- */

/* log2 of a query's whole sum; -infinity where it sees nothing. */
__device__ static inline float whole_sum(const attn_args &a, const query_place &q) {
    if (q.position < 0) return -INFINITY;
    float top = -INFINITY, sum = 0.f;
    for (int i = 0; i < (int)gridDim.z; i++) top = fmaxf(top, *sum_at(a, q, i));
    if (top == -INFINITY) return top;
    for (int i = 0; i < (int)gridDim.z; i++) sum += exp2_fast(*sum_at(a, q, i) - top);
    return top + log2f(sum);
}

/* Share of a page in each query's sum; 0 where the query sees nothing. */
__device__ static inline void page_shares(const float (&s)[32], const float (&whole)[2],
                                          float scale_log2, float (&share)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 16; i++)
            sum += exp2_fast(fmaf(s[i / 2 * 4 + 2 * h + i % 2], scale_log2, -whole[h]));
        share[h] = softmax_total(sum);
        if (whole[h] == -INFINITY) share[h] = 0.f;
    }
}

/* The same of its quarter i. */
__device__ static inline void quarter_shares(const float (&s)[32], int i, const float (&whole)[2],
                                             float scale_log2, float (&share)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0.f;
#pragma unroll
        for (int x = 0; x < 4; x++)
            sum += exp2_fast(fmaf(s[(2 * i + x / 2) * 4 + 2 * h + x % 2], scale_log2, -whole[h]));
        share[h] = softmax_total(sum);
        if (whole[h] == -INFINITY) share[h] = 0.f;
    }
}

/* The largest of the warp's queries. */
__device__ static inline float largest_share(const float (&share)[2]) {
    float best = fmaxf(fmaxf(share[0], share[1]), 0.f); /* NaN is nobody's maximum */
    for (int d = 4; d < 32; d *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
    return best;
}

/* Lines of a thread's two queries, -1: of none; true where all of the warp's that have one have the
 * same, which is then `*only`. */
__device__ static inline bool find_lines(const attn_args &a, const query_place (&at)[2],
                                         int (&line)[2], int *only) {
    int least = INT32_MAX, most = -1;
    for (int h = 0; h < 2; h++) {
        line[h] = -1;
        if (at[h].position < 0) continue;
        line[h] = a.mass_line[at[h].row] + (int)blockIdx.x * a.mass_head_stride;
        least = min(least, line[h]);
        most = max(most, line[h]);
    }
    *only = __reduce_max_sync(~0u, most);
    return *only < 0 || __reduce_min_sync(~0u, least) == *only;
}

/* mass: [line][n] */
__device__ static inline void raise_mass(float *mass, int n, int line, int at, float share) {
    if (share > 0.f) atomicMax((int *)mass + (size_t)line * (size_t)n + at, __float_as_int(share));
}

/* A warp's queries raise their lines at `at`: where `one`, all of them line `only`. */
__device__ static inline void raise_lines(float *mass, int n, const int (&line)[2], bool one,
                                          int only, int at, const float (&share)[2]) {
    if (one) {
        float best = largest_share(share);
        if ((threadIdx.x & 31) == 0 && only >= 0) raise_mass(mass, n, only, at, best);
        return;
    }
    for (int h = 0; h < 2; h++)
        if ((threadIdx.x & 3) == 0 && line[h] >= 0) raise_mass(mass, n, line[h], at, share[h]);
}

/* QUARTERS: of each quarter of a page, too. */
template <typename T, int HD, bool QUARTERS>
__global__ void __launch_bounds__(PROMPT_THREADS) mass_shares_kernel(attn_args a, int tile_rows) {
    extern __shared__ __align__(128) uint8_t smem[];
    pdl_trigger();
    pdl_wait();
    mass_place p;
    if (!find_place(a, tile_rows, &p)) return;
    query_place at[2];
    find_queries(a, p.t, p.head, a.mass_line, at);
    float whole[2] = {whole_sum(a, at[0]), whole_sum(a, at[1])};
    int line[2], only;
    bool one = find_lines(a, at, line, &only); /* of a prompt: nearly always */
    walk<T, HD>(a, p, at, smem_addr(smem), [&](int e, float(&s)[32]) {
        float share[2];
        page_shares(s, whole, a.scale_log2, share);
        raise_lines(a.mass, a.capacity, line, one, only, e, share);
        if constexpr (!QUARTERS) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            quarter_shares(s, i, whole, a.scale_log2, share);
            raise_lines(a.quarter_mass, 4 * a.capacity, line, one, only, 4 * e + i, share);
        }
    });
}

/* ---- Sums by head ---- */

/* The block's part of the lists of one KV head and sequence is its own: nobody else adds there. */
template <typename T, int HD>
__global__ void __launch_bounds__(PROMPT_THREADS) head_mass_kernel(attn_args a, int tile_rows) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float shares[PROMPT_Q]; /* of one page: query i of the tile */
    pdl_trigger();
    pdl_wait();
    int begin, n_rows = prompt_seq_rows(a, blockIdx.y, 0, a.n_gen + a.n_prompt, &begin);
    size_t line = (size_t)blockIdx.y * a.n_heads + (size_t)blockIdx.x * a.group + threadIdx.x;
    float *out = a.head_mass + line * (size_t)a.capacity; /* of threads below `group` */
    for (int at = 0; at < n_rows; at += tile_rows) {
        mass_place p;
        if (!place_at(a, begin + at, min(tile_rows, n_rows - at), &p)) continue;
        query_place q[2];
        find_queries(a, p.t, p.head, a.mass_line, q);
        float whole[2] = {whole_sum(a, q[0]), whole_sum(a, q[1])};
        walk<T, HD>(a, p, q, smem_addr(smem), [&](int e, float(&s)[32]) {
            float share[2];
            int i = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
            page_shares(s, whole, a.scale_log2, share);
            if ((threadIdx.x & 3) == 0) shares[i] = share[0], shares[i + 8] = share[1];
            __syncthreads();
            if ((int)threadIdx.x >= a.group) return;
            float sum = 0.f;
            for (int r = 0; r < p.t.n_rows; r++) sum += shares[r * a.group + threadIdx.x];
            out[e] += sum;
        });
        if (a.mass && a.kv_bytes && blockIdx.z == 0 && threadIdx.x == 0)
            atomicAdd(a.kv_bytes, (unsigned long long)p.n * prompt_shape<HD>::PLANE);
    }
}

/* ---- Launching ---- */

template <typename T, int HD> static int launch(struct cuda_ctx *c, const struct attn_args *a) {
    static bool allowed;
    int rc, tile_rows = PROMPT_Q / a->group, n_rows = a->n_gen + a->n_prompt;
    int leaves = (a->capacity + ATTN_ENTRIES - 1) / ATTN_ENTRIES;
    const int bytes = prompt_shape<HD>::SMEM;
    if (!allowed && ((rc = cuda_allow_smem(c, mass_sums_kernel<T, HD>, bytes)) ||
                     (rc = cuda_allow_smem(c, mass_shares_kernel<T, HD, false>, bytes)) ||
                     (rc = cuda_allow_smem(c, mass_shares_kernel<T, HD, true>, bytes)) ||
                     (rc = cuda_allow_smem(c, head_mass_kernel<T, HD>, bytes))))
        return rc;
    allowed = true;
    unsigned parts = (unsigned)(leaves < N_PARTS ? leaves : N_PARTS);
    dim3 grid((unsigned)a->n_kv, (unsigned)prompt_max_tiles(n_rows, a->n_seqs, tile_rows), parts);
    dim3 seqs((unsigned)a->n_kv, (unsigned)a->n_seqs, parts), threads(PROMPT_THREADS);
    rc = CUDA_LAUNCH(c, (mass_sums_kernel<T, HD>), grid, threads, bytes, *a, tile_rows);
    if (!rc && a->mass && a->quarter_mass)
        rc = CUDA_LAUNCH(c, (mass_shares_kernel<T, HD, true>), grid, threads, bytes, *a, tile_rows);
    else if (!rc && a->mass)
        rc =
            CUDA_LAUNCH(c, (mass_shares_kernel<T, HD, false>), grid, threads, bytes, *a, tile_rows);
    if (!rc && a->head_mass)
        rc = CUDA_LAUNCH(c, (head_mass_kernel<T, HD>), seqs, threads, bytes, *a, tile_rows);
    return rc;
}

struct launcher {
    template <typename T, int HD> static int run(struct cuda_ctx *c, const struct attn_args *a) {
        return launch<T, HD>(c, a);
    }
};

size_t cuda_attention_prompt_bytes(const struct cuda_ctx *c, int n_gen, int n_prompt, int n_seqs,
                                   int n_heads, int head_dim, int list_capacity) {
    (void)c, (void)n_seqs, (void)head_dim, (void)list_capacity;
    return (size_t)N_PARTS * ((size_t)n_gen + (size_t)n_prompt) * (size_t)n_heads * sizeof(float);
}

int cuda_attention_mass(struct cuda_ctx *c, const struct attn_args *a) {
    if ((!a->mass && !a->head_mass) || !a->mass_line || a->n_gen + a->n_prompt == 0 ||
        a->capacity == 0)
        return 0;
    return prompt_dispatch<launcher>(c, a);
}
