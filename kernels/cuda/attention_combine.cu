/* Partials of nodes of generated rows to the output: for each row and query head, (m, l, o) joined
 * as attention_gen.cu's tree asks, then o / l. Nodes that are alone went to `out` there.
 *
 * Latency is all that matters: one row of 32 heads has some 32 partials of 520 bytes a head, 0.5 MB
 * from the L2 cache. So the blocks fit beside attention_gen.cu's on an SM and start with them, find
 * the work while those run, and when those are done all loads of a head go out together: a lane
 * takes V dimensions of 32 / V nodes. Their (m, l) lie across the lanes, so that the tree of
 * factors is computed for all pairs at once and handed out by shuffles. Before the wait a round
 * without nodes fetches the code of the others, and the first task's addresses are there, so that
 * behind it the first instructions are the loads (.2 to 1.3 us of 7 to 37).
 *
 * A block that had to wait for the end of one of attention_gen.cu's would find its work only then
 * (some 3 us), and keep the kernel behind this one from starting early: 32 sequences that had
 * nothing to join lost 4 of 37 us. So there are no more blocks than fit, and where they are many
 * their registers are few. (One an SM, some with two tasks: 8 to 15 % more for a lone sequence.)
 * They come to lie unevenly, up to eight on an SM that attention_gen.cu left, which end 1 to 2 us
 * later.
 *
 * Tried, a lone sequence's five rows. Not to wait for the kernel's end but for slots: words that
 * say that they are there (a NaN that no arithmetic makes, wiped by who has read them) save .4 us
 * of the wait and cost .5 to 1.3 for the wiping; counts of items that are done, behind a fence: 5
 * to 15 % more. In clusters of 8, which the chip spreads: .1 us less, and up to 3 % more for 32
 * sequences. So much shared memory for each that one to four of them, not eight, find room on an
 * SM: .1 to .4 us more, 1 to 3 where there are few pages. V of 1 with 32 nodes a warp: .6 us more;
 * V of 4 with 16: the same as with 8.
 *
 * What is read before pdl_wait (rows, lists) nothing writes any more: see cuda.cuh. */

#include "kernels/cuda/attention_gen_load.cuh"

/* V dimensions of up to N nodes of a (row, head), a warp: node i in x[i], its m and l in lane i. */
template <int V> struct combine_batch {
    static constexpr int N = 32 / V;
    float x[N][V], m, l;

    /* at: of this lane's V floats of node 0; ml: of node `lane`; step: floats between two nodes. */
    __device__ void load(const float *at, const float2 *ml, int step, int n, bool mine) {
        float2 y = make_float2(-INFINITY, 0.f);
        if ((int)(threadIdx.x & 31) < n) y = __ldcg(ml);
        if (!mine) n = 0;
#pragma unroll
        for (int i = 0; i < N; i++, at += step) {
            if (i < n) {
                if constexpr (V == 4) {
                    float4 z = __ldcg((const float4 *)at);
                    x[i][0] = z.x, x[i][1] = z.y, x[i][2] = z.z, x[i][3] = z.w;
                } else if constexpr (V == 2) {
                    float2 z = __ldcg((const float2 *)at);
                    x[i][0] = z.x, x[i][1] = z.y;
                } else x[i][0] = __ldcg(at);
            } else {
#pragma unroll
                for (int j = 0; j < V; j++) x[i][j] = 0.f;
            }
        }
        m = y.x, l = y.y;
    }

    /* Nodes i, i + step, .. of n each join with node i + d. */
    template <int STEP> __device__ void join(int d, int n) {
        int lane = threadIdx.x & 31;
        float mb = __shfl_down_sync(~0u, m, d), lb = __shfl_down_sync(~0u, l, d), top, wa, wb;
        gen_factors(m, mb, &top, &wa, &wb);
        bool there = lane + d < n;
        if (there && lane % STEP == 0) {
            m = top;
            l = gen_join(l, wa, lb, wb);
        }
        /* No right half: times 1, plus 0. */
        if (!there) wa = 1.f, wb = 0.f;
#pragma unroll
        for (int i = 0; i < N; i += STEP) {
            float a = __shfl_sync(~0u, wa, i), b = __shfl_sync(~0u, wb, i);
#pragma unroll
            for (int j = 0; j < V; j++) x[i][j] = gen_join(x[i][j], a, x[(i + d) % N][j], b);
        }
    }

    /* All of them, to x[0], and m, l in every lane. pages: nodes are single pages. */
    __device__ void tree(int n, bool pages) {
        if (pages) {
            join<4>(1, n);
            join<4>(2, n);
            join<4>(3, n);
        } else {
            join<2>(1, n);
            join<4>(2, n);
        }
        join<8>(4, n);
        if constexpr (N >= 16) join<16>(8, n);
        if constexpr (N >= 32)
            if (n > 16) join<32>(16, n);
        m = __shfl_sync(~0u, m, 0);
        l = __shfl_sync(~0u, l, 0);
    }
};

template <int V> struct combine_node {
    float v[V], m, l;
    /* *this to the right of a. */
    __device__ void join_left(const combine_node &a) {
        float top, wa, wb;
        gen_factors(a.m, m, &top, &wa, &wb);
        l = gen_join(a.l, wa, l, wb);
        m = top;
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = gen_join(a.v[i], wa, v[i], wb);
    }
};

/* A (row, head, part of its dimensions), and this warp's share of its nodes, aligned. */
struct combine_task {
    int row, head, part, n; /* n: nodes; -1: nothing to do, 0: zeros */
    int each, n0, n1;       /* nodes of a warp; of this one */
    int n_q;
    size_t slot; /* of its node 0 */
    /* Of node n0, and of node n0 + lane. All that is needed to ask for them is there before they
     * are. */
    const float *o;
    const float2 *ml;
};

/* This warp's nodes of a task: batches, on a stack. dry: everything is run through but for the
 * loads. */
template <int V>
__device__ static combine_node<V> combine_nodes(const combine_task &w, int hd, bool pages,
                                                bool mine, bool dry) {
    constexpr int N = combine_batch<V>::N;
    combine_node<V> now, stack[GEN_MAX_LEVELS];
    const float *o = w.o;
    const float2 *ml = w.ml;
    int left = dry ? 0 : w.n1 - w.n0, step = w.n_q * hd, count = 0;
    do { /* count: bits: levels of the stack that are held */
        combine_batch<V> batch;
        batch.load(o, ml, step, left, mine);
        batch.tree(min(N, left), pages);
        now.m = batch.m, now.l = batch.l;
#pragma unroll
        for (int i = 0; i < V; i++) now.v[i] = batch.x[0][i];
        int level = 0;
        bool more = left > N;
        for (int held = count; more ? held & 1 : held != 0; held >>= 1, level++)
            if (held & 1) now.join_left(stack[level]);
        if (more) stack[level] = now;
        count++, left -= N;
        o += (size_t)N * step, ml += (size_t)N * w.n_q;
    } while (left > 0);
    return now;
}

__device__ static inline combine_task combine_find(const struct attn_args &a,
                                                   const struct gen_plan &p,
                                                   const struct gen_tables &t, int level, int i) {
    combine_task w;
    w.part = i % p.n_parts;
    i /= p.n_parts;
    w.head = i % a.n_heads;
    w.row = i / a.n_heads;
    w.n = w.n_q = 0;
    w.slot = 0;
    int s = __ldcg(a.row_seq + w.row);
    if (s < 0 || s >= a.n_seqs || p.n_lists == 0) return w;
    int kv = w.head / a.group, list = s * p.per_seq + (p.per_seq == 1 ? 0 : kv);
    int q = (w.row - t.row[s]) * a.group + w.head % a.group, n_q = t.n_rows[s] * a.group;
    if (w.row < t.row[s] || q >= n_q) return w;
    w.n_q = n_q;
    w.n = (t.n_entries[list] + (1 << level) - 1) >> level;
    int h = p.per_seq == 1 ? kv : 0;
    w.slot = (size_t)t.slot[list] + (size_t)h * w.n * n_q + q;
    if (w.n == 1) w.n = -1;
    return w;
}

/* The first task from i on that has something to do. alone: a warp takes all of its nodes. */
template <int V>
__device__ static combine_task combine_next(const struct attn_args &a, const struct gen_plan &p,
                                            const struct gen_tables &t, int level, bool alone,
                                            int &i, int step) {
    combine_task w = {};
    for (; i < a.n_gen * a.n_heads * p.n_parts; i += step) {
        w = combine_find(a, p, t, level, i);
        if (w.n >= 0) break;
    }
    int lane = threadIdx.x & 31, warp = alone ? 0 : threadIdx.x / 32;
    w.each = level ? 1 : GEN_FOLD; /* what no warp splits, times 2^n */
    while (w.each * (alone ? 1 : GEN_COMBINE_WARPS) < w.n) w.each *= 2;
    w.n0 = min(warp * w.each, max(w.n, 0)), w.n1 = min(w.n0 + w.each, max(w.n, 0));
    w.o = p.o + (w.slot + (size_t)w.n0 * w.n_q) * a.head_dim + (w.part * 32 + lane) * V;
    w.ml = p.ml + w.slot + (size_t)(w.n0 + lane) * w.n_q;
    return w;
}

template <int V>
__device__ static inline void combine_put(const struct attn_args &a, const combine_task &w,
                                          const combine_node<V> &node) {
    int d = (w.part * 32 + (threadIdx.x & 31)) * V;
    if (d >= a.head_dim) return;
    float by = gen_by(node.l), *out = a.out + ((size_t)w.row * a.n_heads + w.head) * a.head_dim + d;
    if (a.act) {
        uint16_t *act = a.act + (size_t)w.row * a.act_stride + (size_t)w.head * a.head_dim + d;
        float v[4] = {};
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = gen_out(node.v[i], by);
        uint2 packed = to_act_quad(make_float4(v[0], v[1], v[2], v[3]), a.act_bf16);
        if constexpr (V == 4) *(uint2 *)act = packed;
        else if constexpr (V == 2) *(uint32_t *)act = packed.x;
        else *act = (uint16_t)packed.x;
        return;
    }
#pragma unroll
    for (int i = 0; i < V; i++) out[i] = gen_out(node.v[i], by);
}

/* Packed rows are zero behind their columns. */
__device__ static void combine_pad(const struct attn_args &a) {
    int cols = a.n_heads * a.head_dim, n = a.act_stride - cols;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n * a.n_gen;
         i += gridDim.x * blockDim.x)
        a.act[(size_t)(i / n) * a.act_stride + cols + i % n] = 0;
}

/* A block a task at a time, its warps aligned nodes of the tree; a warp a task where there are few
 * nodes. TIGHT: in 64 registers a thread, so that GEN_BESIDE fit beside two blocks of
 * attention_gen.cu, not in 80, of which one does. */
template <int V, bool TIGHT>
__global__ void __launch_bounds__(GEN_COMBINE_WARPS * 32, TIGHT ? 8 : 6)
    attention_gen_combine_kernel(const __grid_constant__ struct attn_args a,
                                 const __grid_constant__ struct gen_plan p) {
    extern __shared__ int smem[];
    __shared__ combine_node<V> side[GEN_COMBINE_WARPS][32];
    struct gen_tables t = gen_tables(smem, a.n_seqs, p.n_lists);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int n_tasks = a.n_gen * a.n_heads * p.n_parts;
    /* What the kernel before leaves is read by repeated calls from their first instruction on: no
     * kernel behind this one starts before it is there. */
    if (a.repeated) pdl_trigger();
    if (p.n_lists == 0) pdl_wait(); /* no kernel of ours before */
    if (a.repeated) gen_fetch_tables(a, p, t, GEN_COMBINE_WARPS * 32);
    else {
        gen_clear(a, t);
        __syncthreads();
        gen_look(a, p, t);
        if (warp == 0) {
            struct gen_sums call;
            int unused[2], chosen = gen_choose(a, p, t, &call);
            gen_count(a, p, t, chosen, unused);
            *t.level = chosen, *t.longest = call.longest;
        }
    }
    __syncthreads();
    int level = *t.level, longest = (*t.longest + (1 << level) - 1) >> level;
    bool alone = longest <= combine_batch<V>::N; /* a warp takes a task */
    int step = alone ? gridDim.x * GEN_COMBINE_WARPS : gridDim.x;
    int i = alone ? warp * gridDim.x + blockIdx.x : blockIdx.x;
    combine_task w = combine_next<V>(a, p, t, level, alone, i, step);
    /* The first round has no nodes and no task. */
    for (bool dry = true; dry || i < n_tasks; dry = false) {
        bool mine = (w.part * 32 + lane) * V < a.head_dim;
        combine_node<V> node = combine_nodes<V>(w, a.head_dim, level == 0, mine, dry);
        if (!alone) {
            if (warp) side[warp][lane] = node;
            __syncthreads();
            if (warp == 0) {
                combine_node<V> b = side[3][lane], c = side[2][lane], e = side[1][lane];
                if (w.each * 3 < w.n) b.join_left(c);
                else b = c;
                if (w.each < w.n) e.join_left(node), node = e;
                if (w.each * 2 < w.n) b.join_left(node), node = b;
            }
            __syncthreads();
        }
        if (dry) {
            pdl_wait();
            if (!a.repeated) pdl_trigger();
            if (a.act && a.act_stride > a.n_heads * a.head_dim) combine_pad(a);
            continue;
        }
        if (alone || warp == 0) combine_put<V>(a, w, node);
        i += step;
        if (i < n_tasks) w = combine_next<V>(a, p, t, level, alone, i, step);
    }
}

template <int V, bool TIGHT>
static int combine_launch(struct cuda_ctx *c, const struct attn_args *a, const struct gen_plan &p,
                          int grid) {
    static int allowed = -1; /* device */
    size_t smem = gen_table_ints(a->n_seqs, p.n_lists) * sizeof(int);
    if (smem > 40 << 10 && allowed != c->device) {
        int rc = cuda_allow_smem(c, attention_gen_combine_kernel<V, TIGHT>, c->max_smem - 8192);
        if (rc) return rc;
        allowed = c->device;
    }
    return CUDA_LAUNCH(c, (attention_gen_combine_kernel<V, TIGHT>), dim3(grid),
                       dim3(GEN_COMBINE_WARPS * 32), smem, *a, p);
}

/* Of a head's dimensions, v of each lane. */
static int combine_parts(int head_dim, int v) {
    return (head_dim + 32 * v - 1) / (32 * v);
}

int cuda_attention_gen_combine(struct cuda_ctx *c, const struct attn_args *a, struct gen_plan p) {
    long long pairs = (long long)a->n_gen * a->n_heads;
    int v = 1;
    while (v < 4 && pairs * combine_parts(a->head_dim, v) > c->n_sms) v *= 2;
    /* Few pages make few nodes: a warp takes them all, and there are four in a block. */
    if (v == 4 && p.alone && pairs * combine_parts(a->head_dim, 2) <= GEN_COMBINE_WARPS * c->n_sms)
        v = 2;
    p.n_parts = combine_parts(a->head_dim, v);
    long long n_tasks = pairs * p.n_parts;
    int grid = GEN_BESIDE * c->n_sms;
    if (n_tasks < grid) grid = (int)n_tasks;
    if (v < 4 && grid > c->n_sms) grid = c->n_sms;
    switch (v) { /* with V of 1 and 2 there is at most one block an SM */
    case 1:
        return combine_launch<1, false>(c, a, p, grid);
    case 2:
        return combine_launch<2, false>(c, a, p, grid);
    }
    return p.alone ? combine_launch<4, false>(c, a, p, grid)
                   : combine_launch<4, true>(c, a, p, grid);
}
