#ifndef TANDEM_KERNELS_CUDA_ATTENTION_GEN_LOAD_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_GEN_LOAD_CUH

/* The loading side of attention_gen.cu: which leaves are this block's, in which order, and their
 * planes into the ring of stages. */

#include "kernels/cuda/attention_gen.cuh"

/* ---- Finding work ---- */

/* Entries of a list of n that begin at or before `position`, one thread; tail: the last block. */
__device__ static inline int gen_entries_until(const int32_t *block, int n, int tail,
                                               int position) {
    if (n == 0 || (long long)tail * KERN_BLOCK <= position) return n;
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if ((long long)block[mid] * KERN_BLOCK <= position) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

__device__ static inline size_t gen_list(const struct attn_args &a, const struct gen_plan &p,
                                         int i) {
    int per_seq = p.n_lists / a.n_seqs; /* 1, or n_kv */
    return attn_list(a, i / per_seq, i % per_seq);
}

/* All threads: the tables but slots and items. `last` is -1 everywhere at entry. */
__device__ static void gen_look(const struct attn_args &a, const struct gen_plan &p,
                                const struct gen_tables &t) {
    int tid = threadIdx.x, n = 0, tail = 0;
    /* Loads that wait for nothing go first. */
    if (tid < p.n_lists) {
        size_t list = gen_list(a, p, tid);
        n = min(max(a.n_blocks[list], 0), a.capacity);
        if (n) tail = a.block[list * (size_t)a.capacity + (n - 1)];
    }
    for (int r = tid; r < a.n_gen; r += GEN_THREADS) {
        int s = a.row_seq[r], at = a.position[r];
        if (s >= 0 && s < a.n_seqs) atomicMax(&t.last[s], at);
    }
    for (int s = tid; s < a.n_seqs; s += GEN_THREADS) {
        int row = a.seq_row[s], n_rows = a.seq_n_rows[s];
        bool mine = row >= 0 && row < a.n_gen && n_rows > 0;
        t.row[s] = mine ? row : 0;
        t.n_rows[s] = mine ? min(n_rows, a.n_gen - row) : 0;
    }
    __syncthreads();
    int per_seq = p.n_lists / a.n_seqs;
    for (int i = tid; i < p.n_lists; i += GEN_THREADS) {
        size_t list = gen_list(a, p, i);
        const int32_t *block = a.block + list * (size_t)a.capacity;
        if (i != tid) {
            n = min(max(a.n_blocks[list], 0), a.capacity);
            if (n) tail = block[n - 1];
        }
        int s = i / per_seq;
        t.n_entries[i] = t.n_rows[s] ? gen_entries_until(block, n, tail, t.last[s]) : 0;
    }
    __syncthreads();
}

__device__ static inline int warp_scan(int x) { /* inclusive */
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int y = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

/* The loading warp: slots and items of every list, and where partials lie, for the combining
 * kernel. n_items: of whole nodes, of list ends. */
__device__ static void gen_count(const struct attn_args &a, const struct gen_plan &p,
                                 const struct gen_tables &t, int max_q, int (&n_items)[2]) {
    int lane = threadIdx.x & 31, slots = 0, per_seq = p.n_lists / a.n_seqs;
    n_items[0] = n_items[1] = 0;
    for (int base = 0; base < p.n_lists; base += 32) {
        int i = base + lane, s = 0, n_q = 0, n_entries = 0;
        if (i < p.n_lists) {
            s = i / per_seq;
            n_q = t.n_rows[s] * a.group;
            n_entries = t.n_entries[i];
        }
        int whole = n_entries / (ATTN_ENTRIES << p.level);
        int end = n_entries % (ATTN_ENTRIES << p.level) != 0, n_nodes = whole + end;
        int n_slots = p.heads_in * n_nodes * n_q, upto = warp_scan(n_slots);
        int first = slots + upto - n_slots;
        /* More than the capacities allow: rows that lie. Such a list has no nodes. */
        if (first < 0 || (long long)first + n_slots > p.n_slots) whole = end = n_nodes = 0;
        slots += __shfl_sync(~0u, upto, 31);
        int n_chunks = (n_q + max_q - 1) / max_q * p.heads_in;
        int whole_upto = warp_scan(whole * n_chunks), end_upto = warp_scan(end * n_chunks);
        if (i < p.n_lists) {
            if (n_nodes == 0) t.n_entries[i] = 0;
            t.slot[i] = first;
            t.before[0][i] = n_items[0] + whole_upto - whole * n_chunks;
            t.before[1][i] = n_items[1] + end_upto - end * n_chunks;
        }
        n_items[0] += __shfl_sync(~0u, whole_upto, 31);
        n_items[1] += __shfl_sync(~0u, end_upto, 31);
        if (i < p.n_lists && i % gridDim.x == blockIdx.x)
            for (int h = 0; h < p.heads_in; h++) {
                int head = per_seq == 1 ? h : i % per_seq;
                p.part[s * a.n_kv + head] =
                    (struct gen_part){first + h * n_nodes * n_q, n_nodes, n_q, t.row[s]};
            }
    }
    __syncwarp();
}

/* Last list that begins at or before item idx; whole warp. */
__device__ static inline int gen_find(const int *before, int n, int idx) {
    int lane = threadIdx.x & 31, at = 0;
    for (int base = 0; base < n; base += 32) {
        unsigned m = __ballot_sync(~0u, base + lane < n && before[base + lane] <= idx);
        at = base + __popc(m);
        if (m != ~0u) break;
    }
    return at - 1;
}

/* The leaves of this block in order. Every lane holds the same state, and lane e page and block of
 * the leaf's entry e. */
struct gen_walk {
    int n_items[2];
    int kind, idx, n_left; /* item: kind 0 whole nodes in one run, 1 list ends, a grid apart */
    struct gen_leaf leaf;
    int list, leaf0; /* of the node: its list, its first leaf */
    int page, block, last;
    bool open;
};

__device__ static void gen_walk_item(const struct attn_args &a, const struct gen_plan &p,
                                     const struct gen_tables &t, int max_q, struct gen_walk &w) {
    int i = gen_find(t.before[w.kind], p.n_lists, w.idx), at = w.idx - t.before[w.kind][i];
    int per_seq = p.n_lists / a.n_seqs, s = i / per_seq, n_entries = t.n_entries[i];
    int n_q = t.n_rows[s] * a.group, n_chunks = (n_q + max_q - 1) / max_q;
    int whole = n_entries / (ATTN_ENTRIES << p.level);
    int n_leaves = (n_entries + ATTN_ENTRIES - 1) / ATTN_ENTRIES;
    int n_nodes = (n_leaves + (1 << p.level) - 1) >> p.level;
    int of_head = (w.kind ? 1 : whole) * n_chunks, h = at / of_head;
    at -= h * of_head;
    int node = w.kind ? whole : at / n_chunks, q0 = at % n_chunks * max_q;
    int head = per_seq == 1 ? h : i % per_seq;
    w.leaf.fresh = w.leaf.seq != s || w.leaf.head != head || w.leaf.q0 != q0;
    w.leaf.seq = s, w.leaf.head = head, w.leaf.row = t.row[s];
    w.leaf.n_q = n_q, w.leaf.q0 = q0;
    w.leaf.idx = 0;
    w.leaf.n_leaves = min(1 << p.level, n_leaves - (node << p.level));
    w.leaf.slot = t.slot[i] + (h * n_nodes + node) * n_q;
    w.list = i, w.leaf0 = node << p.level, w.last = t.last[s];
}

/* Step to the next leaf; open becomes false behind the last. */
__device__ static void gen_walk_next(const struct attn_args &a, const struct gen_plan &p,
                                     const struct gen_tables &t, int max_q, struct gen_walk &w) {
    int lane = threadIdx.x & 31, n_grid = gridDim.x;
    if (w.leaf.idx + 1 < w.leaf.n_leaves) {
        w.leaf.idx++;
        w.leaf.fresh = 0;
    } else {
        if (w.n_left == 0 && w.kind == 0) {
            w.kind = 1; /* blocks with one whole node less come first */
            w.idx = ((int)blockIdx.x - w.n_items[0] % n_grid + n_grid) % n_grid - n_grid;
            w.n_left = w.n_items[1] > w.idx + n_grid ? (w.n_items[1] - w.idx - 1) / n_grid : 0;
        }
        if (w.n_left == 0) {
            w.open = false;
            w.leaf.n_entries = -1;
            return;
        }
        w.n_left--;
        w.idx += w.kind ? n_grid : 1;
        gen_walk_item(a, p, t, max_q, w);
    }
    int e = (w.leaf0 + w.leaf.idx) * ATTN_ENTRIES;
    w.leaf.n_entries = min((int)ATTN_ENTRIES, t.n_entries[w.list] - e);
    if (lane < w.leaf.n_entries) {
        size_t at = gen_list(a, p, w.list) * (size_t)a.capacity + (e + lane);
        w.page = a.page[at];
        w.block = a.block[at];
    }
}

__device__ static void gen_walk_begin(const struct attn_args &a, const struct gen_plan &p,
                                      const struct gen_tables &t, int max_q, struct gen_walk &w) {
    gen_count(a, p, t, max_q, w.n_items);
    int n_grid = gridDim.x, b = blockIdx.x, each = w.n_items[0] / n_grid;
    int more = w.n_items[0] % n_grid;
    w.kind = 0;
    w.idx = b * each + min(b, more) - 1;
    w.n_left = each + (b < more);
    w.leaf.seq = w.leaf.head = w.leaf.q0 = -1;
    w.leaf.idx = w.leaf.n_leaves = 0;
    w.page = w.block = 0;
    w.open = true;
    gen_walk_next(a, p, t, max_q, w);
}

/* ---- Loading ---- */

/* Place in the ring: stage and the parity of its phase. */
struct gen_ring {
    uint32_t data, full, empty, plane; /* plane: bytes of a stage */
    int stage, n;
    uint32_t phase;
    __device__ void step() {
        if (++stage == n) stage = 0, phase ^= 1;
    }
};

__device__ static void gen_load_plane(struct gen_ring &ring, const void *src, uint32_t bytes) {
    bar_wait(ring.empty + ring.stage * 8, ring.phase ^ 1);
    copy_to_smem(ring.data + ring.stage * ring.plane, src, bytes, ring.full + ring.stage * 8);
    ring.step();
}

__device__ static void gen_load(const struct attn_args &a, const struct gen_plan &p,
                                struct gen_shared *sh, const struct gen_tables &t, int max_q,
                                struct gen_ring ring) {
    int lane = threadIdx.x & 31, n = 0;
    uint32_t row_bytes = a.head_dim * 2;
    unsigned long long bytes = 0;
    struct gen_walk next;
    gen_walk_begin(a, p, t, max_q, next);
    for (;; n++) {
        struct gen_walk now = next;
        struct gen_leaf *leaf = &sh->leaf[n % GEN_LEAVES];
        if (next.open) gen_walk_next(a, p, t, max_q, next); /* its page ids arrive meanwhile */
        bar_wait(smem_addr(&sh->leaf_empty[n % GEN_LEAVES]), (n / GEN_LEAVES & 1) ^ 1);
        if (lane == 0) *leaf = now.leaf;
        __syncwarp();
        if (lane < now.leaf.n_entries) leaf->block[lane] = now.block;
        __syncwarp();
        if (lane == 0) bar_arrive(smem_addr(&sh->leaf_full[n % GEN_LEAVES]));
        if (!now.open) break;
        for (int e = 0; e < now.leaf.n_entries; e++) {
            int page = __shfl_sync(~0u, now.page, e), block = __shfl_sync(~0u, now.block, e);
            long long newer = (long long)now.last - (long long)block * KERN_BLOCK + 1;
            uint32_t n_tokens = newer < KERN_BLOCK ? (uint32_t)max(newer, 1ll) : KERN_BLOCK;
            gen_load_plane(ring, attn_plane(a, page, now.leaf.head, false), ring.plane);
            gen_load_plane(ring, attn_plane(a, page, now.leaf.head, true), n_tokens * row_bytes);
            bytes += (KERN_BLOCK + n_tokens) * row_bytes;
        }
    }
    if (lane == 0 && a.kv_bytes && bytes) atomicAdd(a.kv_bytes, bytes);
}

#endif
