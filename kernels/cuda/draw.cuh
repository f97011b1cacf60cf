#ifndef TANDEM_KERNELS_CUDA_DRAW_CUH
#define TANDEM_KERNELS_CUDA_DRAW_CUH

/* Private: kernels/cpu/draw.c and gumbel.c on a team: a token from a filtered distribution, and
 * log-probabilities. */

#include "kernels/cuda/filter.cuh"

__device__ static inline double draw_uniform(const struct kern_sample *p, uint32_t purpose) {
    return philox_uniform(p->seed, (uint64_t)p->position, purpose);
}

/* ---- Inverse CDF --------------------------------------------------------------------------- */

/* Sum of the kept weights. */
template <int TEAM>
__device__ static inline team_sum dist_total(sampler<TEAM> &m, const sampler_row &r,
                                             const sampler_dist &d) {
    uint64_t mine = 0;
    each_line(m, r, [&](int col, float *x) {
        float w[4];
        kept_weights(r, d, col, x, w);
#pragma unroll
        for (int i = 0; i < 4; i++) mine += weight_fixed(m, w[i]);
    });
    return team_add(m, mine, false);
}

/* The whole number that a running sum must pass. */
__device__ static inline uint64_t draw_target(double u, uint64_t total) {
    uint64_t target = __double2ull_rd(__dmul_rn(u, __ull2double_rn(total)));
    return target < total ? target : total - 1;
}

/* The first column whose running sum of kept weights passes u * total; t is dist_total. */
template <int TEAM>
__device__ static inline int draw_by_weight(sampler<TEAM> &m, const sampler_row &r,
                                            const sampler_dist &d, const team_sum &t, double u) {
    return team_find(m, r, t, draw_target(u, t.total), [&](int col, const float *x, uint64_t *v) {
        float w[4];
        kept_weights(r, d, col, x, w);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = weight_fixed(m, w[i]);
    });
}

/* ---- Gumbel noise -------------------------------------------------------------------------- */

/* The best sum so far, and exp(-sum) with room for errors: what 1 - u must stay below, see
 * kernels/cpu/gumbel.h. */
struct gumbel_best {
    double sum;
    int col;
    float reach;
};

__device__ static inline double gumbel_noise(uint32_t r) {
    return -log(-log(__dmul_rn((double)r + 0.5, 0x1p-32)));
}
__device__ static inline float gumbel_reach(double sum) {
    return (float)(exp(-sum) * 1.0001);
}

/* The draws of columns col..col + 3; neighbours share a block where columns are tokens. */
__device__ static inline void gumbel_draws(const sampler_row &r, const struct kern_sample *p,
                                           int col, uint32_t draw[4]) {
    philox_block b;
    uint32_t have = UINT32_MAX;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t token = (uint32_t)token_of(r.ids, min(col + i, r.n - 1)), at = token & 3;
        if (token / 4 != have) b = philox(p->seed, (uint64_t)p->position, RNG_GUMBEL, token / 4);
        have = token / 4;
        draw[i] = at & 2 ? at & 1 ? b.r[3] : b.r[2] : at & 1 ? b.r[1] : b.r[0];
    }
}

__device__ static inline uint64_t order_key64(double x) {
    uint64_t b = (uint64_t)__double_as_longlong(x);
    return b >> 63 ? ~b : b | 1ull << 63;
}

/* A lane's columns against its best; w: 0 where not kept. */
__device__ static inline void gumbel_try(gumbel_best *best, const sampler_row &r,
                                         const struct kern_sample *p, const sampler_dist &d,
                                         int col, const float x[4], const float w[4]) {
    float top = fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3]));
    uint32_t draw[4];
    if (!(top * best->reach > 0x1p-33f)) return;
    gumbel_draws(r, p, col, draw);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (!((float)(int32_t)(~draw[i] >> 1) * 0x1p-31f < w[i] * best->reach)) continue;
        double scaled = __dmul_rn((double)x[i] - (double)d.max, (double)d.inv_t);
        double sum = __dadd_rn(scaled, gumbel_noise(draw[i]));
        if (sum > best->sum || (sum == best->sum && col + i < best->col))
            *best = {sum, col + i, gumbel_reach(sum)};
    }
}

/* The kept column of the largest logit plus noise, the lowest among equals; top: of the largest
 * logit. */
template <int TEAM>
__device__ static inline int draw_by_noise(sampler<TEAM> &m, const sampler_row &r,
                                           const sampler_dist &d, const struct kern_sample *p,
                                           int top) {
    uint32_t draw[4];
    gumbel_draws(r, p, top & ~3, draw);
    uint32_t at = top & 2 ? top & 1 ? draw[3] : draw[2] : top & 1 ? draw[1] : draw[0];
    double sum = gumbel_noise(at);
    gumbel_best best = {sum, top, gumbel_reach(sum)};
    each_line(m, r, [&](int col, float *x) {
        float w[4];
        kept_weights(r, d, col, x, w);
        gumbel_try(&best, r, p, d, col, x, w);
    });
    uint64_t key = order_key64(best.sum), high = warp_max(key);
    uint64_t col = warp_max(key == high ? ~(uint64_t)best.col : 0);
    team_tell(m, high, col);
    key = col = 0;
    for (int w = m.lane; w < TEAM * TEAM_WARPS; w += 32) {
        uint64_t k = m.s->part[m.turn][w][0], c = m.s->part[m.turn][w][1];
        if (k > key || (k == key && c > col)) key = k, col = c;
    }
    high = warp_max(key);
    return (int)~warp_max(key == high ? col : 0);
}

/* The row's own draw: a column. t: dist_total, where it is not by noise. */
template <int TEAM>
__device__ static inline int draw_own(sampler<TEAM> &m, const sampler_row &r, const sampler_dist &d,
                                      const struct kern_sample *p, const team_sum &t, int top) {
    if (p->gumbel) return draw_by_noise(m, r, d, p, top);
    return draw_by_weight(m, r, d, t, draw_uniform(p, (uint32_t)p->purpose));
}

/* ---- Log-probabilities --------------------------------------------------------------------- */

/* The best n <= 20 columns of the raw row to the first block's shared `top`, in no order. */
template <int TEAM>
__device__ static inline void collect_top(sampler<TEAM> &m, const sampler_row &raw, float max,
                                          int n) {
    sampler_goal g = {max, 1.f, false, false, false, true};
    uint64_t weight;
    if (threadIdx.x == 0) m.s->n_top = 0; /* seen after the barrier behind the bins */
    bins_by_depth(m, raw, g);
    sampler_cut cut = select_prefix(m, raw, g, (uint64_t)n, &weight);
    uint32_t *n_top = team_at<TEAM>(&m.s->n_top, 0);
    uint64_t *top = team_at<TEAM>(m.s->top, 0);
    each_line(m, raw, [&](int col, float *x) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t key = order_key(x[i]);
            if (col + i >= raw.n || !is_kept(cut, key, col + i)) continue;
            uint32_t at = atomicAdd(n_top, 1u);
            if (at < 32) top[at] = (uint64_t)key << 32 | (uint32_t) ~(col + i);
        }
    });
    team_sync<TEAM>();
}

/* Log-probability of column col, and the best ones, under the raw logits: to out, by the team's
 * first warp. row: the row with its changes, which do not count; raw_max: of the raw logits. */
template <int TEAM>
__device__ static inline void logprobs(sampler<TEAM> &m, const sampler_row &row, float raw_max,
                                       int col, const struct kern_sample *p,
                                       struct kern_sampled *out) {
    sampler_row raw = row;
    raw.changed = false;
    uint64_t mine = 0;
    each_line(m, raw, [&](int c, float *x) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (c + i < raw.n) mine += weight_fixed(m, weight_of(x[i], raw_max, 1.f));
    });
    double sum = weight_sum(m, team_add(m, mine, false).total);
    double log_sum = raw_max == INFINITY ? (double)NAN : (double)raw_max + log(sum);
    int n = min(min(max(p->n_logprobs, 0), (int)KERN_MAX_LOGPROBS), raw.n);
    if (n > 0) collect_top(m, raw, raw_max, n);
    if (m.warp != 0) return;
    if (m.lane == 0) out->logprob = (float)((double)raw.x[col] - log_sum);
    uint64_t mine_top = m.lane < n ? m.s->top[m.lane] : 0;
    int rank = 0;
    for (int i = 0; i < n; i++)
        rank += __shfl_sync(0xffffffffu, (unsigned long long)mine_top, i) > mine_top;
    if (m.lane < n) {
        out->top_id[rank] = token_of(raw.ids, (int)~(uint32_t)mine_top);
        out->top_logprob[rank] = (float)((double)key_value((uint32_t)(mine_top >> 32)) - log_sum);
    } else if (m.lane < KERN_MAX_LOGPROBS) {
        out->top_id[m.lane] = -1;
        out->top_logprob[m.lane] = -INFINITY;
    }
}

__device__ static inline bool wants_logprobs(const struct kern_sample *p) {
    return p->want_logprob || p->n_logprobs > 0;
}

/* An entry with nothing but its token, by one warp. */
__device__ static inline void put_token(struct kern_sampled *out, int32_t token, int lane) {
    static_assert(sizeof *out % 4 == 0, "words");
    for (int i = lane; i < (int)(sizeof *out / 4); i += 32)
        ((int32_t *)out)[i] = i == 0 ? token : 0;
    __syncwarp();
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* What a row's request makes of its logits. */
struct row_state {
    sampler_row row;
    row_best best;
    bool none, greedy; /* nothing can be drawn; the best column alone can be */
};

template <int TEAM>
__device__ static inline row_state row_open(sampler<TEAM> &m, const float *x, int n,
                                            const int32_t *ids, const struct kern_sample *p,
                                            const struct kern_history *h) {
    row_state st;
    float first[SCAN_AHEAD][4];
    team_arrive<TEAM>();
    st.row = row_of(x, n, ids);
    load_ahead(m, st.row, m.begin, first); /* on their way while params come */
    row_change(m.s, st.row, p, h);
    if (st.row.changed) __syncthreads();
    st.best = row_scan(m, st.row, first);
    st.greedy = p->temperature < 1e-5f;
    st.none = st.best.nan || st.best.col < 0 || (!st.greedy && st.best.max == INFINITY);
    return st;
}

#endif
