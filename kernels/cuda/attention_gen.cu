/* Attention of generated rows: 1..64 rows a sequence over pages that a block list names. Bound by
 * the bytes of K and V: at 4.3 TB/s an SM of 132 gets 64 tokens of a head of 128 (32 KB) each
 * microsecond, in which its tensor cores could do ten times the products of 16 queries; and below a
 * few MB bound by latency: finding the work, the first bytes, the join.
 *
 * Cut. A sequence's rows times a KV head's query heads are its queries; up to max_q (40, of
 * head_dim above 128: 24) go through a page together. Scores are tokens x queries and o is
 * dimensions x queries, so that queries come in tiles of 8: one row of four heads
 * wastes half of its products, not three quarters. An item is (sequence, KV head, aligned 2^level
 * of its list's pages, max_q queries). Every block finds the level and its items from the lists:
 * single pages where there is little to do, thousands of tokens where there is much, so that all
 * blocks have the same share and few partials (gen_choose). A recorded launch thus serves contexts
 * of any length. Two blocks an SM, which hide each other's latency; a warp loads planes of K and V
 * by bulk copies into a ring of 64 or 80 KB, running ahead over items; four compute a page
 * together: each multiplies 16 of its tokens with K and, when they have agreed on the largest score
 * and exchanged weights through shared memory, a quarter of the dimensions with V. So no sums meet
 * across warps, and a node's (m, l, o) stay in registers. They multiply by mma.m16n8k16; several
 * tiles of heads of 128 by wgmma on sm_90, which adds up the same (attention_gen_wide.cuh).
 *
 * Nodes wait for their right neighbours: a fold of four pages in registers, those of eight and 16
 * in what is left of the shared memory (shelves), larger ones in the scratch. That one is what five
 * rows notice: a node of three tiles is 18 KB, there and back in some 1,400 clocks in which its
 * block reads nothing and the other cannot read for two. Of 32 sequences behind 8K it cost 15 %
 * every four pages; a second shelf instead of a fifth stage saves 2 % there, 3 % behind 131K. Where
 * there are no more folds than blocks none of that is wanted, and the kernel is one without it.
 *
 * Start. Rows, lists, and pages that the pass does not write, are read before pdl_wait (cuda.cuh
 * says why they may be): blocks find their work and load what they can when the product before
 * leaves an SM, while the new K and V are still being rotated. Blocks without work leave at once,
 * so that the next product's take their place and fill their rings. But the last eight stay until
 * the wait where five rows have many pages: 256 items of 16 pages leave eight blocks of 264 idle,
 * and combining blocks came to lie on what those left, up to eight on an SM (35.3 us for 35.5
 * behind 32K; for one row and few pages no difference was seen).
 *
 * Finding the work takes a block 4 to 7 us from its first instruction to its first copy: four waits
 * for memory, one behind the other, and cold code. Blocks of one layer start when those of the
 * layer before leave, so behind 8K all of that showed. But layers of a group read the same lists:
 * the first call leaves what it found in the scratch, the others (kern_lists.repeated) begin with
 * one load and copy after 2 to 3 us. That they may read it so early, the first call's combining
 * kernel sees to, which lets nothing start before it is there.
 *
 * Napkin, one row of 32/8 heads of 128 at 8K on an H200: 33.5 MB are 7.4 us; start, finding the
 * work and the first bytes 3, the last page 1, the end of one kernel to the other's 1, the join
 * 1: 13.4. Measured 9.9, the next call's start beside this one's end. Five rows, by clocks in both
 * kernels (stamps cost some of it): from the wait's end to queries in shared memory .7 to 1.1 us, a
 * page 1.2 (the newest, of which not all is seen, .3 more), nodes in the scratch .5 behind the
 * last, the wait of the combining kernel over .6 to .9 behind that, the join 1.1 to 1.4, the next
 * call's wait over .6 to 1.1 behind the join. A page is 2,300 clocks: products with K 400, the
 * largest of each query 350, weights 400, two barriers and the fence between 250, products with V
 * 320, the node 350. Code is cold in every launch and costs some 2 us for 1,000 instructions in a
 * row: that is why few run once, addresses are computed before the wait, and next to nothing lies
 * in local memory (a stack frame of 104 bytes cost 3 % everywhere): on sm_90 head_dims without a
 * kernel of their own have up to 176 bytes, the others none.
 *
 * Tried: warps with pages of their own, no barriers, and a cluster a KV head instead of the
 * combining kernel. A page is 500 (five rows: 1,300) instructions one after another then, 2.5 to 5
 * us: 16 us here, and 37 with five rows. A round without pages first, so that their code is there
 * (as the combining kernel does): 3 us more, what loads needs the same instructions' bandwidth.
 *
 * Tried on five rows, by wgmma: the next page's scores beside this one's values (148 registers
 * without a waiting fold, 168 with): 5 to 10 % slower behind 8K, the same behind more. Three blocks
 * an SM (128 registers, three stages each): 5 % faster behind 8K, 10 % slower behind 32K, 20 % with
 * 32 sequences. One tile by wgmma: a page takes 15 % longer than by mma. Two pages at a time with
 * one pair of barriers: 12 % slower behind 32K and a tenth kept. What of the join can be done
 * before V's products are there, beside them: the same, or 5 % slower where it is kept from coming
 * between them. Sums of weights by mma beside them: 10 % slower. Folds of two pages, so that 208
 * blocks and not 104 share 416 pages: 5 % faster there, 3 to 8 % slower elsewhere. Single pages as
 * items there: 25 % slower. Pages behind the ring asked into L2 (1, 2, 4 a block): the same or up
 * to 15 % slower. All of the ring asked for at once: up to 3 % slower. The halves of a fold in two
 * blocks of a cluster, joined through distributed shared memory: 10 % slower there, as handing over
 * a node takes 1.5 us. What is seen of the newest page found before the wait: .1 us less there, up
 * to 1.5 more behind 8K. The way of queries into shared memory and of nodes to the scratch gone
 * once before the wait: the same, and up to 3 % slower. Barriers made by the loading warp's lanes,
 * and what was found asked for before: the same.
 *
 * Bits. A page: weights exp2(score - largest score of the page), the scaled score and the
 * difference in one fused step, rounded to 16 bits; l and o are their products with ones and with
 * V, tokens in order, 16 a step (l of heads of 128 on sm_90: 16 each, then those). Four pages,
 * aligned, are joined one after another; those nodes by an aligned binary tree (a leaf of 512
 * tokens is two of them), a node without a right half being its left one. Levels of items differ by
 * where joins are done: gen_join says how. None of it depends on tiles, items or blocks. What a row
 * does not see weighs exactly 0, and a page that it does not see changes no bit.
 *
 * Never multiplied: scores of unseen tokens are replaced before use; V rows that no row of the item
 * sees are masked to zero in registers, or made zeros in shared memory where wgmma reads them there
 * (V rows past the newest token are not even loaded). */

#include "kernels/cuda/attention_gen_node.cuh"

/* ---- Computing ---- */

/* What each query sees of a page that not all see whole. */
__device__ static inline const uint64_t *gen_find_seen(const gen_job &j, struct gen_ring &ring,
                                                       int block) {
    uint64_t *seen = j.sh->seen[ring.turn ^= 1]; /* the other one may still be read */
    gen_put_seen(j.a, j.p, j.item, j.sh, seen, block);
    return seen;
}

#if HAVE_WGMMA
/* A page whose K has come (in stage `first`), by wgmma. What one that is not seen whole needs is
 * done while its scores are being made: its block is the last to end. */
template <typename T, int D, bool EXACT, int N, bool FOLDS>
__device__ static inline void gen_page_wide(gen_node<T, D, EXACT, N, FOLDS> &node, const gen_job &j,
                                            struct gen_ring &ring, int first) {
    float x[2][N][4], top[N][2], u[2][N][4];
    int block = j.sh->block[first];
    uint32_t bits = 0;
    uint32_t v_matrix = wide_matrix(ring.data + ring.ahead(1) * ring.plane);
    wide_scores<T, N>(x, wide_matrix(ring.data + ring.ahead(0) * ring.plane),
                      wide_matrix(j.queries));
    if (block >= j.w.clear) {
        const uint64_t *seen = gen_find_seen(j, ring, block);
        bits = node.template mask<N>(j, seen);
        int v = gen_take(ring, 1);
        node.clear_unseen(ring.data + v * ring.plane, node.some_see(j, seen));
    }
    wgmma_wait<0>();
    hold(x[0]), hold(x[1]);
    gen_give_back(ring, first);
#pragma unroll
    for (int i = 0; i < 4 * N; i++) x[0][i / 4][i % 4] += x[1][i / 4][i % 4];
    if (block >= j.w.clear) node.template mask<N>(x[0], bits);
    node.template weigh<N>(x[0], top, j);
    int v = gen_take(ring, 1);
    wide_values<T, N>(u, v_matrix, wide_matrix(j.weights));
    wgmma_wait<0>();
    hold(u[0]), hold(u[1]);
    gen_give_back(ring, v);
    node.join_page(j, top, u);
    ring.step(), ring.step();
}
#endif

/* An item of N tiles; FOLDS: it may have more pages than a fold. */
template <typename T, int D, bool EXACT, int N, bool FOLDS>
__device__ static inline void gen_run(const gen_job &job, struct gen_ring &ring_then) {
    constexpr bool pairs = EXACT && N * D <= GEN_PAIR_WIDTH;
    const gen_job j = job;
    struct gen_ring ring = ring_then;
    gen_node<T, D, EXACT, N, FOLDS> node;
    int n_pages = j.item.n_pages;
    node.begin(j);
    node.clear();
    for (int n = 0; n < n_pages; n++) {
        int stage = gen_take(ring, 0), block = j.sh->block[stage];
        bool clear = block < j.w.clear, two = false;
        if constexpr (pairs) /* not at the end: there they go as they come */
            two = clear && n % 2 == 0 && n + 4 <= n_pages && ring.n >= 4 &&
                  j.sh->block[gen_take(ring, 2)] < j.w.clear;
#if HAVE_WGMMA
        if constexpr (gen_is_wide<D, EXACT, N>()) gen_page_wide(node, j, ring, stage);
        else
#endif
            if (two)
            gen_pages<false, pairs ? 2 : 1>(node, j, ring, stage, NULL);
        else if (clear) gen_pages<false, 1>(node, j, ring, stage, NULL);
        else gen_pages<true, 1>(node, j, ring, stage, gen_find_seen(j, ring, block));
        n += two;
        if constexpr (FOLDS) {
            bool last = n + 1 == n_pages;
            if (n_pages > GEN_FOLD && (last || n % GEN_FOLD == GEN_FOLD - 1))
                node.climb(j, n / GEN_FOLD, last);
        }
    }
    if (j.item.only) node.put_out(j);
    else node.put_slot(j);
    ring_then = ring;
}

template <typename T, int D, bool EXACT, int N, bool FOLDS>
__device__ static void gen_compute(const struct attn_args &a, const struct gen_plan &p,
                                   struct gen_shared *sh, uint4 *frag, uint32_t weights,
                                   struct gen_ring ring) {
    struct gen_warp w;
    w.lane = threadIdx.x & 31;
    w.warp = threadIdx.x / 32;
    int hd = EXACT ? D : a.head_dim, upper = w.lane / 16;
    int odd = w.lane / 8 % 2; /* lanes' matrices: K (tokens, dims) 00 10 01 11; V 00 01 10 11 */
    int k_token = w.warp * 16 + w.lane % 8 + odd * 8, v_token = w.lane % 8 + upper * 8;
    w.k_row = k_token * page_width(hd);
    w.k_x = (page_turn(k_token, hd) ^ upper) * 16;
    w.v_row = v_token * page_width(hd);
    w.v_x = (page_turn(v_token, hd) ^ odd) * 16;
    for (int n = 0;; n++) {
        bar_wait(smem_addr(&sh->item_full[n % GEN_ITEMS]), n / GEN_ITEMS & 1);
        const struct gen_item &item = sh->item[n % GEN_ITEMS];
        if (item.n_pages < 0) {
            /* One waits, so that the grid does; so do idle ones that stay. */
            bool stays = N == 3 && FOLDS && gridDim.x - blockIdx.x <= GEN_STAY;
            if (n == 0 && (blockIdx.x == 0 || stays)) pdl_wait();
            break;
        }
        if (item.fresh) {
            named_sync(1, GEN_WARPS * 32); /* nobody reads the queries before */
            w.clear = gen_put_positions(a, p, item, sh);
            if constexpr (gen_is_wide<D, EXACT, N>())
                gen_put_queries_wide<T, N>(a, p, item, frag, n == 0);
            else gen_put_queries<T, D, EXACT, N>(a, p, item, frag, n == 0);
            named_sync(1, GEN_WARPS * 32);
        }
        struct gen_job j = {a, p, item, sh, frag};
        j.top = smem_addr(sh->top) + w.lane % 4 * 32;
        j.get = weights + w.lane * 8;
        j.put = j.get + w.warp * 256;
        if (gen_is_wide<D, EXACT, N>()) j.put = wide_put_at(weights, w.warp, w.lane);
        j.queries = smem_addr(frag), j.weights = weights;
        j.head_dim = a.head_dim, j.scale_log2 = a.scale_log2;
        j.width_log2 = 31 - __clz(page_width(hd));
        j.w = w;
        gen_run<T, D, EXACT, N, FOLDS>(j, ring);
        __syncwarp();
        if (w.lane == 0) bar_arrive(smem_addr(&sh->item_empty[n % GEN_ITEMS]));
    }
}

/* ---- The kernel ---- */

/* Threads for which registers must suffice. Of two blocks an SM, where that costs no spills: 128 a
 * thread, so that two combining blocks (64) find room beside them; a quarter of a multiprocessor
 * has up to three of their warps. */
template <int D, bool EXACT, int N> constexpr int gen_bound() {
    return gen_cut<D>::per_sm < 2                                        ? GEN_THREADS
           : EXACT && (N == 1 || N == 3 && (D == 64 || HAVE_WGMMA != 0)) ? 224
                                                                         : 192;
}
template <typename T, int D, bool EXACT, int N, bool FOLDS>
__global__ void __launch_bounds__(gen_bound<D, EXACT, N>(), gen_cut<D>::per_sm)
    attention_gen_kernel(const __grid_constant__ struct attn_args a,
                         const __grid_constant__ struct gen_plan p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    struct gen_shared *sh = (struct gen_shared *)smem;
    struct gen_layout at = gen_layout(a.head_dim, p.max_q, a.n_seqs, p.n_lists);
    struct gen_tables t = gen_tables((int *)(smem + at.tables), a.n_seqs, p.n_lists);
    struct gen_ring ring = {smem_addr(smem + at.ring),
                            smem_addr(sh->full),
                            smem_addr(sh->empty),
                            (uint32_t)(a.head_dim * KERN_BLOCK * 2),
                            0,
                            p.n_stages,
                            0,
                            0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            bar_init(ring.full + i * 8, GEN_FULL_ARRIVALS);
            bar_init(ring.empty + i * 8, GEN_WARPS);
        }
        for (int i = 0; i < GEN_ITEMS; i++) {
            bar_init(smem_addr(&sh->item_full[i]), 1);
            bar_init(smem_addr(&sh->item_empty[i]), GEN_WARPS);
        }
        bar_init_fence();
    }
    if (!a.repeated) gen_clear(a, t);
    pdl_trigger();
    __syncthreads();
    if (!a.repeated) gen_look(a, p, t);
    else if (threadIdx.x < GEN_WARPS * 32) {
        gen_fetch_tables(a, p, t, GEN_WARPS * 32);
        named_arrive(2, GEN_THREADS); /* the loading warp waits there */
    }
    if (threadIdx.x >= GEN_WARPS * 32) gen_load(a, p, sh, t, ring);
    else
        gen_compute<T, D, EXACT, N, FOLDS>(a, p, sh, (uint4 *)(smem + at.queries),
                                           smem_addr(smem + at.weights), ring);
}

/* ---- Launching ---- */

static size_t up256(size_t n) {
    return (n + 255) & ~(size_t)255;
}
static size_t slot_bytes(int head_dim) {
    return ((size_t)head_dim + 2) * sizeof(float);
}

/* The largest level of an item: GEN_LEVEL, or the least that keeps the partials of R (row, head)
 * pairs with at most n_pages pages each inside GEN_SCRATCH, or single nodes. */
static int gen_max_level(size_t pairs, int head_dim, int n_pages) {
    int level = GEN_LEVEL;
    while (level < GEN_MAX_LEVELS && 1 << level < n_pages &&
           pairs * (size_t)((n_pages + (1 << level) - 1) >> level) * slot_bytes(head_dim) >
               GEN_SCRATCH)
        level++;
    return level;
}

static size_t gen_n_slots(size_t pairs, int head_dim, int n_pages) {
    size_t all = pairs * (size_t)n_pages, most = GEN_SCRATCH / slot_bytes(head_dim);
    if (all > most) all = most;
    return all > pairs ? all : pairs;
}

/* Whether a kernel is compiled for this very head_dim. */
static bool gen_exact(int head_dim) {
    return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

/* Queries of an item at most, of as many tiles as there are kernels for: those of a sequence if all
 * have as many rows. Any number serves any batch: what is more goes through the pages again. */
static int gen_item_q(int n_rows, int group, int head_dim) {
    long long n_q = (long long)n_rows * group;
    if (n_q <= 8 && gen_exact(head_dim)) return 8;
    return n_q <= 24 && head_dim <= 128 ? 24 : gen_max_q(head_dim);
}

static size_t gen_stack_bytes(int level, int n_q, int head_dim) {
    int floats = head_dim <= 64    ? gen_cut<64>::tile_floats
                 : head_dim <= 128 ? gen_cut<128>::tile_floats
                                   : gen_cut<256>::tile_floats;
    return up256((size_t)GEN_MAX_BLOCKS * (size_t)(level - GEN_FOLD_LEVEL) * (size_t)(n_q / 8) *
                 (size_t)floats * GEN_WARPS * 32 * sizeof(float));
}

size_t cuda_attention_gen_found_bytes(int n_seqs, int n_heads) {
    return up256((size_t)GEN_MAX_BLOCKS * GEN_START_BYTES +
                 gen_table_ints(n_seqs, n_seqs * n_heads) * sizeof(int));
}

/* Grows with every argument, so that scratch for the largest call serves all. */
size_t cuda_attention_gen_bytes(const struct cuda_ctx *c, int n_gen, int n_seqs, int n_heads,
                                int head_dim, int list_capacity) {
    (void)c, (void)n_seqs;
    size_t pairs = (size_t)n_gen * (size_t)n_heads;
    int level = gen_max_level(pairs, head_dim, list_capacity);
    return gen_n_slots(pairs, head_dim, list_capacity) * slot_bytes(head_dim) + 512 +
           gen_stack_bytes(level, gen_item_q(n_gen, n_heads, head_dim), head_dim);
}

/* Shared memory of a block: its share of an SM beside those of the combining kernel. */
static size_t gen_smem(const struct cuda_ctx *c, int per_sm, int n_seqs, int n_lists) {
    size_t reserved = 1024; /* by the driver, of each block */
    if (per_sm == 1) return c->max_smem;
    size_t combine =
        GEN_BESIDE * (reserved + GEN_COMBINE_SMEM + gen_table_ints(n_seqs, n_lists) * sizeof(int));
    return (c->max_smem + reserved - combine) / (size_t)per_sm / 128 * 128 - reserved;
}

static struct gen_plan gen_plan(const struct attn_args *a) {
    struct gen_plan p = {};
    size_t pairs = (size_t)a->n_gen * (size_t)a->n_heads;
    p.heads_in = a->head_stride ? 1 : a->n_kv;
    p.per_seq = a->n_kv / p.heads_in;
    p.n_lists = a->n_seqs * p.per_seq;
    p.max_q = gen_item_q((a->n_gen + a->n_seqs - 1) / (a->n_seqs > 0 ? a->n_seqs : 1), a->group,
                         a->head_dim);
    p.max_q_by = gen_divisor(p.max_q), p.group_by = gen_divisor(a->group);
    p.max_level = gen_max_level(pairs, a->head_dim, a->capacity);
    p.n_slots = (int)gen_n_slots(pairs, a->head_dim, a->capacity);
    uint8_t *at = a->scratch;
    p.ml = (float2 *)at;
    at += up256((size_t)p.n_slots * sizeof(float2));
    p.o = (float *)at;
    at += up256((size_t)p.n_slots * (size_t)a->head_dim * sizeof(float));
    p.stack = (float *)at;
    return p;
}

template <typename T, int D, bool EXACT, int N, bool FOLDS>
static int gen_launch_kernel(struct cuda_ctx *c, const struct attn_args *a, struct gen_plan *p,
                             size_t items) {
    static int allowed = -1; /* device */
    int per_sm = gen_cut<D>::per_sm == 2 && c->max_smem >= 160 << 10 ? 2 : 1;
    struct gen_layout l = gen_layout(a->head_dim, p->max_q, a->n_seqs, p->n_lists);
    size_t plane = (size_t)a->head_dim * KERN_BLOCK * 2;
    size_t most = gen_smem(c, per_sm, a->n_seqs, p->n_lists);
    if (most < l.ring + 2 * plane || most > c->max_smem) per_sm = 1, most = c->max_smem;
    p->n_stages = most > l.ring ? (int)((most - l.ring) / plane) : 0;
    if (p->n_stages > GEN_MAX_STAGES) p->n_stages = GEN_MAX_STAGES;
    /* As fast as five, and a second shelf finds room. */
    if (N == 3 && D == WIDE_DIM && p->n_stages > 4) p->n_stages = 4;
    p->window = (int)((GEN_WINDOW / (size_t)per_sm + plane - 1) / plane);
    if (p->window < 2) p->window = 2;
    if (p->n_stages < 2)
        return cuda_note(c, cudaErrorInvalidConfiguration, "attention: too many lists", __FILE__,
                         __LINE__);
    int grid = c->n_sms * per_sm < GEN_MAX_BLOCKS ? c->n_sms * per_sm : GEN_MAX_BLOCKS;
    p->n_blocks = items < (size_t)grid ? (int)items : grid;
    p->n_few = grid / per_sm;
    /* No more of a multiprocessor than the pages that there can be need: the next kernel's blocks
     * find room the earlier. */
    p->alone = items <= (size_t)GEN_FEW * (size_t)p->n_few;
    size_t busy = (size_t)(p->alone ? p->n_few : grid), each = 2 * ((items + busy - 1) / busy);
    if ((size_t)p->n_stages > each) p->n_stages = (int)each;
    /* What is left of the share serves as shelves. */
    size_t shelf = (size_t)N * gen_cut<D>::pairs * 4 * sizeof(float) * GEN_WARPS * 32;
    size_t smem = l.ring + (size_t)p->n_stages * plane;
    p->shelf = (int)smem, p->n_shelves = 0;
    if (FOLDS && N <= 3 && EXACT && D <= WIDE_DIM && items > 8 * (size_t)grid)
        while (p->n_shelves < GEN_MAX_SHELVES && smem + shelf <= most)
            smem += shelf, p->n_shelves++;
    if (p->window > p->n_stages) p->window = p->n_stages;
    if (allowed != c->device) {
        int rc = cuda_allow_smem(c, attention_gen_kernel<T, D, EXACT, N, FOLDS>, c->max_smem);
        if (rc) return rc;
        allowed = c->device;
    }
    return CUDA_LAUNCH(c, (attention_gen_kernel<T, D, EXACT, N, FOLDS>), dim3(p->n_blocks),
                       dim3(GEN_THREADS), smem, *a, *p);
}

/* Where there are no more folds than blocks no item has more than one: without what joins folds a
 * page takes 4 % less (registers that nothing else wants, and no moves between them). */
template <typename T, int D, bool EXACT, int N>
static int gen_launch_tiles(struct cuda_ctx *c, const struct attn_args *a, struct gen_plan *p,
                            size_t items) {
    if constexpr (EXACT && N <= 3 && D <= WIDE_DIM) {
        size_t capacity = (size_t)a->capacity; /* of each of items / capacity lists */
        size_t folds = items / capacity * ((capacity + GEN_FOLD - 1) / GEN_FOLD);
        if (folds <= (size_t)gen_cut<D>::per_sm * (size_t)c->n_sms) {
            p->max_level = GEN_FOLD_LEVEL; /* single pages or folds */
            return gen_launch_kernel<T, D, EXACT, N, false>(c, a, p, items);
        }
    }
    return gen_launch_kernel<T, D, EXACT, N, true>(c, a, p, items);
}

template <typename T, int D, bool EXACT>
static int gen_launch(struct cuda_ctx *c, const struct attn_args *a, struct gen_plan *p,
                      size_t items) {
    if constexpr (EXACT)
        if (p->max_q == 8) return gen_launch_tiles<T, D, EXACT, 1>(c, a, p, items);
    if constexpr (D <= 128)
        if (p->max_q == 24) return gen_launch_tiles<T, D, EXACT, 3>(c, a, p, items);
    return gen_launch_tiles<T, D, EXACT, gen_cut<D>::max_tiles>(c, a, p, items);
}

template <typename T>
static int gen_launch_as(struct cuda_ctx *c, const struct attn_args *a, struct gen_plan *p,
                         size_t items) {
    switch (a->head_dim) {
    case 64:
        return gen_launch<T, 64, true>(c, a, p, items);
    case 128:
        return gen_launch<T, 128, true>(c, a, p, items);
    case 256:
        return gen_launch<T, 256, true>(c, a, p, items);
    }
    return a->head_dim < 64    ? gen_launch<T, 64, false>(c, a, p, items)
           : a->head_dim < 128 ? gen_launch<T, 128, false>(c, a, p, items)
                               : gen_launch<T, 256, false>(c, a, p, items);
}

int cuda_attention_gen(struct cuda_ctx *c, const struct attn_args *a) {
    if (a->n_gen == 0) return 0;
    struct gen_plan p = gen_plan(a);
    int rc = 0;
    /* Single pages, each sequence's queries cut into chunks: more there cannot be. */
    size_t chunks = (size_t)a->n_gen * (size_t)a->group / (size_t)p.max_q +
                    (size_t)(a->n_seqs < a->n_gen ? a->n_seqs : a->n_gen);
    size_t items = chunks * (size_t)a->n_kv * (size_t)a->capacity;
    if (items == 0) p.n_lists = 0;
    else if (a->bf16) rc = gen_launch_as<__nv_bfloat16>(c, a, &p, items);
    else rc = gen_launch_as<__half>(c, a, &p, items);
    if (rc) return rc;
    return cuda_attention_gen_combine(c, a, p);
}
