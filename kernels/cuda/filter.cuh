#ifndef TANDEM_KERNELS_CUDA_FILTER_CUH
#define TANDEM_KERNELS_CUDA_FILTER_CUH

/* Private: kernels/cpu/filter.c's law on a team. Every filter keeps a prefix of one order (higher
 * logit first, lower column first among equals), so a distribution is a cut in that order, and no
 * list of candidates is made: whoever goes over the row asks each column whether it is kept.
 *
 * The cut is found by narrowing an interval of order keys: 1,024 bins of counts and weights in
 * shared memory, the first time by how far a logit lies below the largest (which spreads any row
 * well), then by the key's bits. The bin in which the target falls is the next interval; most end
 * after two or three passes, when one column is left in it or one key. Between equal keys the
 * columns are counted. Columns of weight 0 take no part.
 *
 * What is costly are exponentials and atomics in shared memory, and most columns of a model's row
 * lie far below the largest. They share the last bin: a thread counts its own in registers, and
 * weighs them only where somebody needs the row's whole weight. */

#include <float.h>

#include "kernels/cuda/sampler.cuh"

/* The order's prefix: keys beyond `key`, and of those that equal it the columns up to `col`. */
struct sampler_cut {
    uint32_t key;
    int col;
};

/* The filtered distribution. */
struct sampler_dist {
    float max, inv_t;
    sampler_cut cut;
    float min_w; /* the least weight */
};

__device__ static inline bool is_kept(const sampler_cut &c, uint32_t key, int col) {
    return key > c.key || (key == c.key && col <= c.col);
}

/* Weights of the distribution, 0 for what is not kept. */
__device__ static inline void kept_weights(const sampler_row &r, const sampler_dist &d, int col,
                                           const float x[4], float w[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = 0.f;
        if (col + i < r.n && is_kept(d.cut, order_key(x[i]), col + i)) {
            w[i] = weight_of(x[i], d.max, d.inv_t);
            if (!(w[i] >= d.min_w)) w[i] = 0.f;
        }
    }
}

/* ---- Bins ---------------------------------------------------------------------------------- */

enum { FAR_BIN = SAMPLER_BINS - 1 };
static const float FAR = 16.f;          /* a weight of 1e-7 */
static const float WEIGHTLESS = 87.33f; /* beyond it weight_exp is 0 */

/* What a selection goes by. */
struct sampler_goal {
    float max, inv_t;
    bool by_weight;  /* else by count */
    bool weighs;     /* bins hold weights, */
    bool weighs_far; /* the last one too */
    bool with_zero;  /* columns of weight 0 count too */
};

/* Of a logit below the largest, in units of the temperature: minus the argument of its weight. */
__device__ static inline float depth_of(const sampler_goal &g, float x) {
    return __fmul_rn(__fadd_rn(g.max, -x), g.inv_t);
}

/* 63 bins a unit, then the last. Never falls as depth grows; infinity less infinity is 0. */
__device__ static inline int depth_bin(float depth) {
    if (!(depth > 0.f)) return 0;
    return depth < FAR ? (int)__fmul_rn(depth, 63.f) : FAR_BIN;
}

__device__ static inline bool takes_part(const sampler_goal &g, float depth) {
    return g.with_zero || depth <= WEIGHTLESS;
}

/* The least key whose bin is at most `bin`; the largest logit's bin is 0. All lanes. */
__device__ static inline uint32_t depth_bin_end(const sampler_goal &g, int bin, int lane) {
    uint32_t low = order_key(-INFINITY), high = order_key(g.max);
    while (low < high) {
        uint32_t step = (high - low) / 32 + 1, at = low + step * (uint32_t)lane;
        bool in = at >= high || depth_bin(depth_of(g, key_value(at))) <= bin;
        uint32_t which = __ballot_sync(0xffffffffu, in);
        uint32_t first = which ? (uint32_t)__ffs((int)which) - 1 : 32;
        if (first == 0) return low;
        if (first < 32) high = min(high, low + step * first);
        low += step * (first - 1) + 1;
    }
    return low;
}

__device__ static inline void hist_add(sampler_hist *h, int bin, uint32_t count, uint64_t weight) {
    atomicAdd(&h->count[bin], count);
    if (weight == 0) return;
    uint32_t low = (uint32_t)weight, old = atomicAdd(&h->low[bin], low);
    uint32_t high = (uint32_t)(weight >> 32) + (old + low < old);
    if (high) atomicAdd(&h->high[bin], high);
}

__device__ static inline uint64_t hist_weight(const sampler_hist *h, int bin) {
    return (uint64_t)h->high[bin] << 32 | h->low[bin];
}

/* The block's bins are made ready. Others may still read those of the last filling, not those of
 * the one before. */
__device__ static inline sampler_hist *bins_clear(sampler_shared *s, int which) {
    sampler_hist *h = &s->hist[which];
    for (int i = (int)threadIdx.x; i < SAMPLER_BINS; i += TEAM_THREADS)
        h->count[i] = h->low[i] = h->high[i] = 0;
    __syncthreads();
    return h;
}

/* The block's bins are full: sums of 32 together, and the team's may be searched. */
template <int TEAM> __device__ static inline void bins_close(sampler<TEAM> &m, int which) {
    const sampler_hist *h = &m.s->hist[which];
    __syncthreads();
    for (int c = (int)threadIdx.x / 32; c < 32; c += TEAM_WARPS) {
        int bin = c * 32 + m.lane;
        uint64_t count = warp_sum(h->count[bin]), weight = warp_sum(hist_weight(h, bin));
        if (m.lane == 0) m.s->coarse[which][c] = {weight, (uint32_t)count, 0};
    }
    team_sync<TEAM>();
}

/* All columns by depth, to bins 0. */
template <int TEAM>
__device__ static inline void bins_by_depth(sampler<TEAM> &m, const sampler_row &r,
                                            const sampler_goal &g) {
    sampler_hist *h = bins_clear(m.s, 0);
    uint64_t n_far = 0, far = 0;
    each_line(m, r, [&](int col, float *x) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float depth = depth_of(g, x[i]);
            if (col + i >= r.n || !takes_part(g, depth)) continue;
            if (depth >= FAR) {
                n_far++;
                if (g.weighs_far) far += weight_fixed(m, weight_exp(-depth));
            } else
                hist_add(h, depth_bin(depth), 1,
                         g.weighs ? weight_fixed(m, weight_exp(-depth)) : 0);
        }
    });
    n_far = warp_sum(n_far);
    far = warp_sum(far);
    if (m.lane == 0 && n_far) hist_add(h, FAR_BIN, (uint32_t)n_far, far);
    bins_close(m, 0);
}

/* Those with low <= key <= high, by key: bin 0 holds the highest. */
template <int TEAM>
__device__ static inline void bins_by_key(sampler<TEAM> &m, const sampler_row &r,
                                          const sampler_goal &g, uint32_t low, uint32_t high,
                                          int shift) {
    m.which = 3 - m.which;
    sampler_hist *h = bins_clear(m.s, m.which);
    each_line(m, r, [&](int col, float *x) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t key = order_key(x[i]);
            float depth = depth_of(g, x[i]);
            if (key < low || key > high || col + i >= r.n || !takes_part(g, depth)) continue;
            hist_add(h, (int)((high - key) >> shift), 1,
                     g.weighs ? weight_fixed(m, weight_exp(-depth)) : 0);
        }
    });
    bins_close(m, m.which);
}

/* Where running sums over the lanes reach the target: this warp's answer, the lane's own share in
 * n, w on top of `base`. False where they do not. */
__device__ static inline bool lanes_reach(uint64_t n, uint64_t w, bool by_weight, uint64_t target,
                                          int lane, sampler_bin *base) {
    uint64_t run_n = base->n_above + warp_prefix(n, lane);
    uint64_t run_w = base->above + warp_prefix(w, lane);
    uint32_t reached = __ballot_sync(0xffffffffu, (by_weight ? run_w : run_n) >= target);
    int at = reached ? __ffs((int)reached) - 1 : 31;
    uint64_t n_at = __shfl_sync(0xffffffffu, (unsigned long long)n, at);
    uint64_t w_at = __shfl_sync(0xffffffffu, (unsigned long long)w, at);
    run_n = __shfl_sync(0xffffffffu, (unsigned long long)run_n, at);
    run_w = __shfl_sync(0xffffffffu, (unsigned long long)run_w, at);
    base->n_above = (uint32_t)(run_n - (reached ? n_at : 0));
    base->above = run_w - (reached ? w_at : 0);
    base->n = (uint32_t)n_at;
    base->weight = w_at;
    base->bin = at;
    return reached != 0;
}

/* The first bin at which the team's running count or weight reaches the target. Every block
 * searches all by itself: whole numbers, one answer. */
template <int TEAM>
__device__ static inline sampler_bin bins_search(sampler<TEAM> &m, int which, bool by_weight,
                                                 uint64_t target) {
    __syncthreads(); /* the last answer has been read */
    if (threadIdx.x < 32) {
        uint64_t n = 0, w = 0;
        sampler_bin b = {0, 0, 0, 0, 0};
        for (int i = 0; i < TEAM; i++) {
            const sampler_coarse *c = team_at<TEAM>(&m.s->coarse[which][m.lane], i);
            n += c->count;
            w += c->weight;
        }
        bool reached = lanes_reach(n, w, by_weight, target, m.lane, &b);
        if (reached) {
            int coarse = b.bin, bin = coarse * 32 + m.lane;
            n = w = 0;
            for (int i = 0; i < TEAM; i++) {
                const sampler_hist *h = team_at<TEAM>(&m.s->hist[which], i);
                n += h->count[bin];
                w += hist_weight(h, bin);
            }
            lanes_reach(n, w, by_weight, target, m.lane, &b);
            b.bin += coarse * 32;
        } else b.bin = -1;
        if (m.lane == 0) m.s->bin = b;
    }
    __syncthreads();
    return m.s->bin;
}

/* ---- The cut ------------------------------------------------------------------------------- */

/* Between n columns of the same key, the first `keep` of them. */
template <int TEAM>
__device__ static inline int tied_column(sampler<TEAM> &m, const sampler_row &r, uint32_t key,
                                         uint64_t keep) {
    auto equals = [&](int col, const float *x, uint64_t *v) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = col + i < r.n && order_key(x[i]) == key;
    };
    uint64_t mine = 0;
    each_line(m, r, [&](int col, float *x) {
        uint64_t v[4];
        equals(col, x, v);
        mine += v[0] + v[1] + v[2] + v[3];
    });
    team_sum t = team_add(m, mine, false);
    return team_find(m, r, t, keep - 1, equals);
}

/* The shortest prefix of the order whose count or weight reaches the target; everything where
 * nothing does. bins_by_depth has been. *weight: what the prefix weighs, where goal.weighs. */
template <int TEAM>
__device__ static inline sampler_cut select_prefix(sampler<TEAM> &m, const sampler_row &r,
                                                   const sampler_goal &g, uint64_t target,
                                                   uint64_t *weight) {
    sampler_bin b = bins_search(m, 0, g.by_weight, target);
    *weight = b.above;
    if (b.bin < 0) return {0, SAMPLER_ALL};
    uint32_t low = depth_bin_end(g, b.bin, m.lane), high = order_key(g.max);
    if (b.bin > 0) high = depth_bin_end(g, b.bin - 1, m.lane) - 1;
    for (;;) {
        *weight = b.above + b.weight;
        if (b.n == 1 || (!g.by_weight && b.n_above + b.n == target)) return {low, SAMPLER_ALL};
        if (low >= high) break;
        int shift = max(22 - __clz((int)(high - low)), 0);
        bins_by_key(m, r, g, low, high, shift);
        sampler_bin next =
            bins_search(m, m.which, g.by_weight, target - (g.by_weight ? b.above : b.n_above));
        high -= (uint32_t)next.bin << shift;
        if (high - low >= 1u << shift) low = high - (1u << shift) + 1;
        b.n_above += next.n_above;
        b.above += next.above;
        b.n = next.n;
        b.weight = next.weight;
    }
    uint64_t each = b.weight / b.n, keep = target - b.n_above;
    if (g.by_weight) keep = (target - b.above + each - 1) / each;
    if (keep >= b.n) return {low, SAMPLER_ALL};
    *weight = b.above + keep * each;
    return {low, tied_column(m, r, low, keep)};
}

/* Does the cut's prefix hold some of the last bin? */
__device__ static inline bool reaches_far(const sampler_goal &g, const sampler_cut &c) {
    return c.key == 0 || depth_of(g, key_value(c.key)) >= FAR;
}

/* The distribution that the request asks for; best: of the row, its maximum finite. */
template <int TEAM>
__device__ static inline sampler_dist filter_row(sampler<TEAM> &m, const sampler_row &r,
                                                 const struct kern_sample *p, float max) {
    float top_p = fmaxf(p->top_p, 0.f), min_p = p->min_p;
    bool by_k = p->top_k > 0 && p->top_k < r.n, by_p = p->top_p < 1.f;
    sampler_dist d = {max, fmaxf(__fdiv_rn(1.f, p->temperature), FLT_MIN), {0, SAMPLER_ALL}, 0.f};
    if (min_p > 0.f) d.min_w = fminf(min_p, 1.f);
    if (!by_k && !by_p) return d;
    sampler_goal g = {d.max, d.inv_t, false, by_p, by_p && !by_k, false};
    uint64_t weight = 0;
    bins_by_depth(m, r, g);
    if (by_k) {
        d.cut = select_prefix(m, r, g, (uint64_t)p->top_k, &weight);
        if (by_p && reaches_far(g, d.cut)) { /* the second cut may lie there too */
            g.weighs_far = true;
            team_sync<TEAM>();
            bins_by_depth(m, r, g);
        }
    }
    if (by_p && d.cut.key == 0) weight = bins_search(m, 0, true, UINT64_MAX).above;
    if (by_p) {
        uint64_t target = __double2ull_ru(__dmul_rn((double)top_p, __ull2double_rn(weight)));
        target = target < 1 ? 1 : target > weight ? weight : target;
        g.by_weight = true;
        d.cut = select_prefix(m, r, g, target, &weight);
    }
    return d;
}

#endif
