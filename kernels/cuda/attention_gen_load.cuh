#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_LOAD_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_LOAD_CUH

/* How the work of a call is found on the device (both kernels of generated rows do, and find the
 * same), and the loading side of attention_gen.cu: which items are this block's, in which order,
 * and their planes into the ring of stages. */

#include <limits.h>
#include <string.h>

#include "kernels/cuda/attention_gen.cuh"

/* ---- Finding work ---- */

/* Per sequence: largest and smallest position, first row, generated rows. Per list: entries, chunks
 * of max_q queries, first slot, items before it (whole nodes, list ends). Of the call where it has
 * many lists, for each level that an item may have: items and slots; pages through which queries
 * go, the longest list. */
struct gen_tables {
    int *first; /* of all of them, gen_table_ints */
    int *last, *least, *row, *n_rows;
    int *n_entries, *n_chunks, *slot, *before; /* before: [2][n_lists] */
    int *n_items, *n_slots, *n_pages, *longest;
    int *level; /* of the call's items */
};
__device__ static inline struct gen_tables gen_tables(int *p, int n_seqs, int n_lists) {
    struct gen_tables t;
    t.first = t.last = p, t.row = p + n_seqs, t.n_rows = p + 2 * n_seqs, t.least = p + 3 * n_seqs;
    t.n_entries = p + 4 * n_seqs, t.n_chunks = t.n_entries + n_lists;
    t.slot = t.n_chunks + n_lists;
    t.before = t.slot + n_lists;
    t.n_items = t.before + 2 * n_lists;
    t.n_slots = t.n_items + GEN_MAX_LEVELS;
    t.n_pages = t.n_slots + GEN_MAX_LEVELS;
    t.longest = t.n_pages + 1;
    t.level = t.longest + 1;
    return t;
}

/* Levels of items: single pages, then from a fold of pages on. */
__device__ static inline int gen_level_of(int choice) {
    return choice == 0 ? 0 : choice + GEN_FOLD_LEVEL - 1;
}

/* All threads, before a __syncthreads and gen_look. */
__device__ static void gen_clear(const struct attn_args &a, const struct gen_tables &t) {
    for (int s = threadIdx.x; s < a.n_seqs; s += blockDim.x) t.last[s] = -1, t.least[s] = INT_MAX;
    for (int i = threadIdx.x; i < 2 * GEN_MAX_LEVELS + 2; i += blockDim.x) t.n_items[i] = 0;
}

/* Entries of a list of n that begin at or before `position`, one thread; the last does not. What is
 * seldom needed stays out of the way of the rest, which every block runs through once, cold. */
__device__ __noinline__ static int gen_search(const int32_t *block, int n, int position) {
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if ((long long)__ldcg(block + mid) * KERN_BLOCK <= position) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}
/* The same, whatever the last block (tail) is. */
__device__ static inline int gen_entries_until(const int32_t *block, int n, int tail,
                                               int position) {
    if (n == 0 || (long long)tail * KERN_BLOCK <= position) return n;
    return gen_search(block, n, position);
}

__device__ static inline int gen_list_seq(const struct gen_plan &p, int i) {
    return p.per_seq == 1 ? i : gen_quotient(i, p.per_seq);
}
__device__ static inline size_t gen_list(const struct attn_args &a, const struct gen_plan &p,
                                         int i) {
    int s = gen_list_seq(p, i);
    return attn_list(a, s, i - s * p.per_seq);
}

/* What a call's lists have in common: see gen_tables. */
struct gen_sums {
    int items, slots, pages, longest;
    __device__ void add(int n_entries, int n_chunks, int n_q, int heads_in, int level) {
        int nodes = (n_entries + (1 << level) - 1) >> level;
        items += nodes * n_chunks * heads_in;
        slots += nodes * n_q * heads_in;
        pages += n_entries * n_chunks * heads_in;
        longest = max(longest, n_entries);
    }
};

/* A lane's list each: their sums for the level of choice `lane`; whole warp. */
__device__ static inline struct gen_sums gen_sum_lists(const struct gen_plan &p, int n_entries,
                                                       int n_chunks, int n_q) {
    int lane = threadIdx.x & 31;
    struct gen_sums all = {0, 0, 0, 0};
#pragma unroll 1
    for (int c = 0; c < p.max_level; c++) {
        struct gen_sums own = {0, 0, 0, 0};
        own.add(n_entries, n_chunks, n_q, p.heads_in, gen_level_of(c));
        int items = __reduce_add_sync(~0u, own.items), slots = __reduce_add_sync(~0u, own.slots);
        if (lane == c) all.items = items, all.slots = slots;
    }
    all.pages = __reduce_add_sync(~0u, n_entries * n_chunks * p.heads_in);
    all.longest = __reduce_max_sync(~0u, n_entries);
    return all;
}

/* A warp's lists add what they have to the call's sums. */
__device__ __noinline__ static void gen_add(const struct gen_plan &p, int *all_items,
                                            int *all_slots, int *all_pages, int n_entries,
                                            int n_chunks, int n_q) {
    int lane = threadIdx.x & 31;
    struct gen_sums sums = gen_sum_lists(p, n_entries, n_chunks, n_q);
    if (lane < p.max_level) {
        atomicAdd(all_items + lane, sums.items);
        atomicAdd(all_slots + lane, sums.slots);
    }
    if (lane) return;
    atomicAdd(all_pages, sums.pages);
    atomicMax(all_pages + 1, sums.longest); /* gen_tables' longest */
}

/* All threads: the tables but slots and items. They read past the L1 cache: the combining kernel
 * looks while attention_gen.cu's runs. */
__device__ static void gen_look(const struct attn_args &a, const struct gen_plan &p,
                                const struct gen_tables &t) {
    int tid = threadIdx.x, n = 0, tail = 0;
    /* Loads that wait for nothing go first. */
    if (tid < p.n_lists) {
        size_t list = gen_list(a, p, tid);
        n = min(max(__ldcg(a.n_blocks + list), 0), a.capacity);
        if (n) tail = __ldcg(a.block + list * (size_t)a.capacity + (n - 1));
    }
#pragma unroll 1
    for (int r = tid; r < a.n_gen; r += blockDim.x) {
        int s = __ldcg(a.row_seq + r), at = __ldcg(a.position + r);
        if (s >= 0 && s < a.n_seqs) atomicMax(&t.last[s], at), atomicMin(&t.least[s], at);
    }
#pragma unroll 1
    for (int s = tid; s < a.n_seqs; s += blockDim.x) {
        int row = __ldcg(a.seq_row + s), n_rows = __ldcg(a.seq_n_rows + s);
        bool mine = row >= 0 && row < a.n_gen && n_rows > 0;
        t.row[s] = mine ? row : 0;
        t.n_rows[s] = mine ? min(n_rows, a.n_gen - row) : 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int base = tid & ~31; base < p.n_lists; base += blockDim.x) {
        int i = base + (tid & 31), n_entries = 0, n_q = 0, n_chunks = 0;
        if (i < p.n_lists) {
            const int32_t *block = a.block + gen_list(a, p, i) * (size_t)a.capacity;
            if (i != tid) {
                n = min(max(__ldcg(a.n_blocks + gen_list(a, p, i)), 0), a.capacity);
                if (n) tail = __ldcg(block + n - 1);
            }
            int s = gen_list_seq(p, i);
            n_q = t.n_rows[s] * a.group;
            n_chunks = gen_divide(n_q + p.max_q - 1, p.max_q_by);
            n_entries = n_q ? gen_entries_until(block, n, tail, t.last[s]) : 0;
            t.n_entries[i] = n_entries;
            t.n_chunks[i] = n_chunks;
        }
        if (p.n_lists > 32) gen_add(p, t.n_items, t.n_slots, t.n_pages, n_entries, n_chunks, n_q);
    }
    __syncthreads();
}

/* Blocks that share the call's pages. Few pages go to one block an SM: beside it there is room for
 * one of the next attention, which finds its work and loads its pages meanwhile. */
__device__ static inline int gen_n_blocks(const struct gen_plan &p, int pages) {
    return pages <= GEN_FEW * p.n_few ? min(p.n_few, p.n_blocks) : p.n_blocks;
}

/* The level of the call's items; whole warp, a lane a level. In units of a page's time: the busiest
 * block's pages, half a page for each of its items and tiles, and 4,096 partials of a query for the
 * combining kernel; the largest level among the best. */
__device__ static inline int gen_choose(const struct attn_args &a, const struct gen_plan &p,
                                        const struct gen_tables &t, struct gen_sums *call) {
    int c = min((int)(threadIdx.x & 31), p.max_level - 1), level = gen_level_of(c);
    struct gen_sums sums = {0, 0, 0, 0};
    if (p.n_lists > 32) sums = {t.n_items[c], t.n_slots[c], *t.n_pages, *t.longest};
    else if (p.n_lists == 1)
        sums.add(t.n_entries[0], t.n_chunks[0], t.n_rows[0] * a.group, p.heads_in, level);
    else {
        int i = threadIdx.x & 31, n_entries = 0, n_chunks = 0, n_q = 0;
        if (i < p.n_lists) {
            n_entries = t.n_entries[i], n_chunks = t.n_chunks[i];
            n_q = t.n_rows[gen_list_seq(p, i)] * a.group;
        }
        sums = gen_sum_lists(p, n_entries, n_chunks, n_q);
    }
    *call = sums;
    float items = (float)max(sums.items, 1), pages = (float)max(sums.pages, 0);
    float each = ceilf(__fdividef(items, (float)gen_n_blocks(p, sums.pages)) - 1e-3f);
    float most =
        fmaxf(__fdividef(each * pages, items), fminf((float)(1 << level), (float)sums.longest));
    float cost = most + (float)p.max_q / 32.f * each + (float)sums.slots / 4096.f;
    cost = fminf(fmaxf(cost, 0.f), 1e6f);
    bool fits = sums.slots >= 0 && sums.slots <= p.n_slots;
    unsigned key = fits ? (unsigned)(cost * 8.f) * 32 + (31 - c) : 0xffffffe0u + (31 - c);
    return gen_level_of(31 - (int)(__reduce_min_sync(~0u, key) & 31));
}

/* Inclusive sums over the lanes. */
__device__ static inline void warp_scan(int (&x)[3]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int y = __shfl_up_sync(~0u, x[i], d);
            if (lane >= d) x[i] += y;
        }
}

/* One warp: slots and items of every list. n_items: of whole nodes, of list ends. */
__device__ static void gen_count(const struct attn_args &a, const struct gen_plan &p,
                                 const struct gen_tables &t, int level, int (&n_items)[2]) {
    int lane = threadIdx.x & 31;
    long long slots = 0;
    n_items[0] = n_items[1] = 0;
#pragma unroll 1
    for (int base = 0; base < p.n_lists; base += 32) {
        int i = base + lane, n_q = 0, n_entries = 0, n_chunks = 0;
        if (i < p.n_lists) {
            n_q = t.n_rows[gen_list_seq(p, i)] * a.group;
            n_entries = t.n_entries[i];
            n_chunks = t.n_chunks[i] * p.heads_in;
        }
        int whole = n_entries >> level, end = (n_entries & ((1 << level) - 1)) != 0;
        long long need = (long long)p.heads_in * (whole + end) * n_q;
        /* More than the capacities allow: rows that lie. Such a list has no nodes. */
        if (need > p.n_slots || need > INT_MAX / 64) need = whole = end = 0;
        int upto[3] = {(int)need, whole * n_chunks, end * n_chunks};
        if (p.n_lists > 1) warp_scan(upto);
        long long first = slots + upto[0] - need;
        bool none = first + need > p.n_slots;
        if (__any_sync(~0u, none)) { /* neither has one that does not find room */
            if (none) whole = end = 0;
            int again[3] = {0, whole * n_chunks, end * n_chunks};
            warp_scan(again);
            upto[1] = again[1], upto[2] = again[2];
        }
        if (i < p.n_lists) {
            if (whole + end == 0) t.n_entries[i] = 0;
            t.slot[i] = (int)first;
            t.before[i] = n_items[0] + upto[1] - whole * n_chunks;
            t.before[p.n_lists + i] = n_items[1] + upto[2] - end * n_chunks;
        }
        int top = min(31, p.n_lists - 1 - base);
        slots += __shfl_sync(~0u, upto[0], top);
        n_items[0] += __shfl_sync(~0u, upto[1], top);
        n_items[1] += __shfl_sync(~0u, upto[2], top);
    }
    __syncwarp();
}

/* Last list that begins at or before item idx; whole warp. */
__device__ static inline int gen_find(const int *before, int n, int idx) {
    int lane = threadIdx.x & 31, at = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += 32) {
        unsigned m = __ballot_sync(~0u, base + lane < n && before[base + lane] <= idx);
        at = base + __popc(m);
        if (m != ~0u) break;
    }
    return at - 1;
}

/* This block's items in order, in runs of up to 32 pages. Every lane holds the same state, and lane
 * e the page (see gen_page_of) of the run's entry e. */
struct alignas(16) gen_walk {
    int n_items[2], level, n_grid;
    int kind, idx, n_left; /* item: kind 0 whole nodes in one run, 1 list ends, a grid apart */
    struct gen_item item;
    int list, e, e_end; /* entries behind the run */
    int n, page, last;
    int id;           /* of the page */
    int written;      /* blocks from this one on get tokens in this pass */
    bool first, open; /* first: run of its item */
    bool small;       /* the whole call may wait for memory at once */

    /* This head's first byte of the page but for k_offset or v_offset. */
    __device__ unsigned long long plane(const struct attn_args &a) const {
        return (unsigned long long)a.kv + (unsigned long long)(unsigned)id * a.page_stride +
               (unsigned long long)item.head * a.kv_head_stride;
    }
};

__device__ static void gen_walk_item(const struct attn_args &a, const struct gen_plan &p,
                                     const struct gen_tables &t, struct gen_walk &w) {
    const int *before = t.before + w.kind * p.n_lists;
    int i = p.n_lists == 1 ? 0 : gen_find(before, p.n_lists, w.idx);
    int at = w.idx - before[i];
    int s = gen_list_seq(p, i), n_entries = t.n_entries[i];
    int n_q = t.n_rows[s] * a.group, n_chunks = t.n_chunks[i];
    int whole = n_entries >> w.level, n_nodes = (n_entries + (1 << w.level) - 1) >> w.level;
    int of_head = (w.kind ? 1 : whole) * n_chunks;
    int h = p.heads_in == 1 ? 0 : gen_quotient(at, of_head);
    at -= h * of_head;
    int node = n_chunks == 1 ? at : gen_quotient(at, n_chunks), q0 = (at - node * n_chunks);
    if (w.kind) node = whole;
    q0 *= p.max_q;
    int head = p.per_seq == 1 ? h : i - s * p.per_seq;
    w.item.fresh = w.item.seq != s || w.item.head != head || w.item.q0 != q0;
    w.item.seq = s, w.item.head = head, w.item.row = t.row[s];
    w.item.n_q = n_q, w.item.q0 = q0;
    w.item.slot = t.slot[i] + (h * n_nodes + node) * n_q;
    w.item.only = n_nodes == 1;
    w.list = i, w.last = t.last[s];
    w.written = a.n_prompt ? 0 : t.least[s] >> 6;
    w.e = node << w.level;
    w.e_end = min(n_entries, w.e + (1 << w.level));
    w.item.n_pages = w.e_end - w.e;
}

/* Step to the next run; open becomes false behind the last. */
__device__ static void gen_walk_next(const struct attn_args &a, const struct gen_plan &p,
                                     const struct gen_tables &t, struct gen_walk &w) {
    int lane = threadIdx.x & 31, n_grid = w.n_grid;
    w.first = w.e == w.e_end;
    if (w.first) {
        if (w.n_left == 0 && w.kind == 0) {
            w.kind = 1; /* blocks with one whole node less come first */
            int before = w.n_items[0] - gen_quotient(w.n_items[0], n_grid) * n_grid;
            w.idx = (int)blockIdx.x - before - ((int)blockIdx.x >= before ? n_grid : 0);
            w.n_left =
                w.n_items[1] > w.idx + n_grid ? gen_quotient(w.n_items[1] - w.idx - 1, n_grid) : 0;
        }
        if (w.n_left == 0) {
            w.open = false;
            w.n = 0;
            w.item.n_pages = -1;
            return;
        }
        w.n_left--;
        w.idx += w.kind ? n_grid : 1;
        gen_walk_item(a, p, t, w);
    }
    w.n = min(32, w.e_end - w.e);
    if (lane < w.n) {
        size_t at = gen_list(a, p, w.list) * (size_t)a.capacity + (w.e + lane);
        w.id = __ldcg(a.page + at);
        w.page =
            gen_page_of(__ldcg(a.block + at), a.quarters ? __ldcg(a.quarters + at) & 15u : 15u);
    }
    w.e += w.n;
}

__device__ static void gen_walk_begin(const struct attn_args &a, const struct gen_plan &p,
                                      const struct gen_tables &t, struct gen_walk &w) {
    struct gen_sums call;
    w.level = gen_choose(a, p, t, &call);
    w.small = (long long)call.pages * a.head_dim * KERN_BLOCK * 4 <= GEN_SMALL;
    if ((threadIdx.x & 31) == 0) *t.level = w.level, *t.longest = call.longest;
    gen_count(a, p, t, w.level, w.n_items);
    int n_grid = w.n_grid = gen_n_blocks(p, call.pages), b = blockIdx.x;
    if (b >= n_grid) w.n_items[0] = w.n_items[1] = 0;
    int each = gen_quotient(w.n_items[0], n_grid);
    int more = w.n_items[0] - each * n_grid;
    w.kind = 0;
    w.idx = b * each + min(b, more) - 1;
    w.n_left = each + (b < more);
    w.item.seq = w.item.head = w.item.q0 = -1;
    w.e = w.e_end = 0;
    w.id = w.page = 0;
    w.open = true;
    gen_walk_next(a, p, t, w);
}

/* ---- Finding it again ---- */

/* What a call leaves in attn_args.found for those that repeat its rows and lists: where each
 * block's walk begins, and behind them, at gen_found_tables, the tables. */
struct gen_start {
    struct gen_walk walk; /* lane 0's */
    int id[32], page[32]; /* all lanes' */
};
static_assert(sizeof(struct gen_start) == GEN_START_BYTES, "");

/* gen_walk_begin of a repeated call: one wait for memory instead of four, one behind the other. */
__device__ static void gen_walk_again(const struct attn_args &a, struct gen_walk &w) {
    const struct gen_start *start = (const struct gen_start *)a.found + blockIdx.x;
    int lane = threadIdx.x & 31, id = __ldcg(start->id + lane), page = __ldcg(start->page + lane);
    int4 words[sizeof w / sizeof(int4)];
#pragma unroll
    for (int i = 0; i < (int)(sizeof w / sizeof(int4)); i++)
        words[i] = __ldcg((const int4 *)&start->walk + i);
    memcpy(&w, words, sizeof w);
    w.id = id, w.page = page;
}
/* Whole warp: what that wants, here to shared memory; */
__device__ static void gen_walk_keep(const struct gen_walk &w, struct gen_start *start) {
    int lane = threadIdx.x & 31;
    if (lane == 0) start->walk = w;
    start->id[lane] = w.id, start->page[lane] = w.page;
    __syncwarp();
}
/* and behind pdl_wait, as calls before may still read what they found, from there to its place. */
__device__ static void gen_leave_found(const struct attn_args &a, const struct gen_plan &p,
                                       const struct gen_tables &t, const struct gen_start *start) {
    int lane = threadIdx.x & 31, n = (int)gen_table_ints(a.n_seqs, p.n_lists);
    int *to = (int *)((struct gen_start *)a.found + blockIdx.x);
    for (int i = lane; i < (int)(sizeof *start / sizeof *to); i += 32) to[i] = ((int *)start)[i];
    if (blockIdx.x == 0)
#pragma unroll 1
        for (int i = lane; i < n; i += 32) gen_found_tables(a.found)[i] = t.first[i];
}
/* Threads [0, n_threads): the tables that a call before left. */
__device__ static inline void gen_fetch_tables(const struct attn_args &a, const struct gen_plan &p,
                                               const struct gen_tables &t, int n_threads) {
    int n = (int)gen_table_ints(a.n_seqs, p.n_lists);
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += n_threads)
        t.first[i] = __ldcg(gen_found_tables(a.found) + i);
}

/* ---- Loading ---- */

/* Place in the ring: stage and the parity of its phase. */
struct gen_ring {
    uint32_t data, full, empty, plane; /* plane: bytes of a stage */
    int stage, n;
    uint32_t phase;
    int turn; /* of the masks of what is seen */
    __device__ void step() {
        if (++stage == n) stage = 0, phase ^= 1;
    }
    /* The stage i < n after this one; the compiler knows that a warp's lanes agree on it. */
    __device__ uint32_t ahead(int i) const {
        int at = __shfl_sync(~0u, stage, 0) + i;
        return at < n ? at : at - n;
    }
};
/* Arrivals at a stage's full barrier: the copy's; where that is no bulk copy, one for its block
 * too. */
enum { GEN_FULL_ARRIVALS = COPY_ARRIVALS == 1 ? 1 : COPY_ARRIVALS + 1 };

/* One lane: bytes from global to shared memory that nobody reads again, so that they leave the L2
 * cache first. */
__device__ static inline void gen_bulk(uint32_t dst, const uint8_t *src, uint32_t bytes,
                                       uint32_t bar) {
#if __CUDA_ARCH__ >= 900
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
#endif
}
/* One lane: a stage's block is known, and `bytes` of it are on their way. */
__device__ static inline void gen_expect(int *at, int block, uint32_t bytes, uint32_t bar) {
    *at = block;
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
#else
    bar_arrive(bar);
#endif
}

/* A plane to a stage; at, block: see gen_expect. Whole warp. */
__device__ static inline void gen_copy(uint32_t dst, const uint8_t *src, uint32_t bytes,
                                       uint32_t bar, int *at, int block) {
    if (elected()) {
        gen_expect(at, block, bytes, bar);
        gen_bulk(dst, src, bytes, bar);
    }
#if __CUDA_ARCH__ < 900
    copy_to_smem(dst, src, bytes, bar);
#endif
}

/* The same of rows [0, n_rows) of a plane that lie in `quarters`, a lane a quarter of a column;
 * returns their bytes. */
__device__ static uint32_t gen_copy_rows(uint32_t dst, const uint8_t *src, uint32_t n_rows,
                                         int head_dim, unsigned quarters, uint32_t bar, int *at,
                                         int block) {
    int width = page_width(head_dim), n_columns = head_dim * 2 / width, lane = threadIdx.x & 31;
    uint32_t first = lane % 4 * KERN_QUARTER, n = n_rows > first ? n_rows - first : 0;
    uint32_t size = quarters >> lane % 4 & 1 ? min(n, (uint32_t)KERN_QUARTER) * width : 0;
    uint32_t all = __reduce_add_sync(~0u, lane < 4 ? size : 0) * n_columns;
    if (lane == 0) gen_expect(at, block, all, bar);
    __syncwarp();
    for (int column = lane / 4; column < n_columns && size; column += 8) {
        uint32_t place = (column * KERN_BLOCK + first) * width;
#if __CUDA_ARCH__ >= 900
        gen_bulk(dst + place, src + place, size, bar);
#else
        for (uint32_t x = place; x < place + size; x += 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + x),
                         "l"(__cvta_generic_to_global(src + x))
                         : "memory");
#endif
    }
#if __CUDA_ARCH__ < 900
    copies_arrive(bar);
#endif
    return all;
}

/* At most `window` stages wait for memory at a time, so that what comes first in the ring also
 * arrives first, and small loads beside it are not stuck behind: more would not be faster. */
__device__ static inline uint32_t gen_load_plane(struct gen_shared *sh, struct gen_ring &ring,
                                                 struct gen_ring &landed, int block,
                                                 const uint8_t *src, uint32_t n_rows,
                                                 int head_dim) {
    uint32_t bytes = ring.plane, full = ring.full + ring.stage * 8;
    uint32_t to = ring.data + ring.stage * ring.plane;
    int *at = &sh->block[ring.stage];
    bar_wait(ring.empty + ring.stage * 8, ring.phase ^ 1);
    if (block >> GEN_QUARTER_SHIFT == 0 && n_rows == KERN_BLOCK)
        gen_copy(to, src, bytes, full, at, block);
    else bytes = gen_copy_rows(to, src, n_rows, head_dim, gen_quarters_of(block), full, at, block);
    ring.step();
    if (landed.turn > 0) landed.turn--;
    else {
        bar_wait(landed.full + landed.stage * 8, landed.phase);
        landed.step();
    }
    return bytes;
}

__device__ static void gen_load(const struct attn_args &a, const struct gen_plan &p,
                                struct gen_shared *sh, const struct gen_tables &t,
                                struct gen_ring ring) {
    int lane = threadIdx.x & 31, n = 0;
    unsigned long long bytes = 0;
    struct gen_walk next;
    struct gen_ring landed = ring;
    bool waited = false;        /* pages that nobody writes in this pass need not be waited for */
    bool fetched = !a.repeated; /* the tables, by the other warps: the first run needs none */
    if (a.repeated) gen_walk_again(a, next);
    else {
        gen_walk_begin(a, p, t, next);
        gen_walk_keep(next, (struct gen_start *)sh->start);
    }
    landed.turn = (next.small ? p.n_stages : p.window) - 1; /* stages that may still wait */
    for (;;) {
        struct gen_walk now = next;
        if (now.first) {
            bar_wait(smem_addr(&sh->item_empty[n % GEN_ITEMS]), (n / GEN_ITEMS & 1) ^ 1);
            if (lane == 0) {
                sh->item[n % GEN_ITEMS] = now.item;
                bar_arrive(smem_addr(&sh->item_full[n % GEN_ITEMS]));
            }
            n++;
        }
        if (!now.open) break;
#pragma unroll 1
        for (int e = 0; e < now.n; e++) {
            const uint8_t *src = (const uint8_t *)__shfl_sync(~0u, now.plane(a), e);
            int page = __shfl_sync(~0u, now.page, e), block = page & GEN_BLOCK_MASK;
            if (!waited && block >= now.written) {
                pdl_wait();
                waited = true;
            }
            uint32_t n_tokens = block == now.last >> 6 ? (now.last & 63) + 1 : KERN_BLOCK;
            bytes +=
                gen_load_plane(sh, ring, landed, page, src + a.k_offset, KERN_BLOCK, a.head_dim);
            bytes += gen_load_plane(sh, ring, landed, page, src + a.v_offset, n_tokens, a.head_dim);
            /* The next run's page ids arrive meanwhile. */
            if (e == 0) {
                if (!fetched) named_sync(2, GEN_THREADS);
                fetched = true;
                gen_walk_next(a, p, t, next);
            }
        }
    }
    if (!fetched) named_sync(2, GEN_THREADS);
    bool counts = a.kv_bytes && bytes;
    if (!waited && (counts || !a.repeated)) pdl_wait();
    if (!a.repeated) gen_leave_found(a, p, t, (struct gen_start *)sh->start);
    if (!counts) return;
    if (lane == 0) atomicAdd(a.kv_bytes, bytes);
}

#endif
