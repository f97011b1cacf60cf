/* Rounds of speculation decided, in one launch: Leviathan, Kalman and Matias, "Fast inference from
 * transformers via speculative decoding", ICML 2023, algorithm 1, and matching of the target's own
 * draws.
 *
 * A row's outcome (its draft token accepted or not, and the token that would follow if the round
 * ended here) is a pure function of that row, so a team of blocks takes each, all at once, also the
 * rows that turn out to lie behind their round's end: on a GPU waiting for the row before costs
 * more. Outcomes go to scratch; the last row of a round to be done (counted there) reads the
 * round's prefix off them and emits its tokens. A round without a draft token needs no such
 * meeting, and is `sample` by construction.
 *
 * The host knows the number of rounds alone, so there are KERN_MAX_DRAFT + 1 teams a round; those
 * beyond its rows end at once. A row's cost is sample.cu's; a rejected one adds a pass for the
 * residual and its search. */
#include "kernels/cuda/draw.cuh"

enum { MAX_ROWS = KERN_MAX_DRAFT + 1 };

/* Scratch. n_done is zero between calls: the buffer is zeroed when it is reserved, and the last row
 * leaves it so. Its place depends on the round's index alone. */
struct accept_row {
    struct kern_sampled s; /* the output's token, whether drafted or not; -1: none */
    int32_t accepted;      /* the draft token stands and the round goes on */
};
struct alignas(KERN_ACT_ALIGN) accept_round {
    accept_row rows[MAX_ROWS];
    uint32_t n_done;
};

struct accept_job {
    int n_rounds, n; /* n: columns */
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    struct kern_history history;
    const struct kern_round *rounds;
    const int32_t *draft;
    struct kern_draft_probs q;
    accept_round *scratch;
    int32_t *n_accepted;
    struct kern_sampled *out;
};

struct verdict {
    int col; /* -1: none */
    bool accepted;
};

/* ---- The draft's distribution -------------------------------------------------------------- */

struct draft_row {
    const float *probs;
    const int32_t *ids;
    int n;
};

__device__ static inline float draft_p(const draft_row &q, int32_t token) {
    int col = column_of(q.ids, q.n, token);
    return col < 0 ? 0.f : q.probs[col];
}

/* Of tokens first..first + 3. */
__device__ static inline void draft_p4(const draft_row &q, int first, float p[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = 0.f;
    if (!q.ids) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + i < q.n) p[i] = q.probs[first + i];
        return;
    }
    int low = 0, high = min(q.n, first + 1); /* ascending: entry i is at least i */
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (q.ids[mid] < first) low = mid + 1;
        else high = mid;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (low < q.n && q.ids[low] == first + i) p[i] = q.probs[low++];
}

__device__ static inline bool is_valid(float q) {
    return q >= 0 && q <= FLT_MAX;
}

/* ---- One row ------------------------------------------------------------------------------- */

/* max(0, p - q) of the kept columns, times 2^62; false where q is no probability. */
__device__ static inline bool residual4(const sampler_row &r, const sampler_dist &d,
                                        const draft_row &q, double inv_total, int col,
                                        const float x[4], uint64_t v[4]) {
    float w[4], of_draft[4];
    bool kept[4], any = false, ok = true;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = 0;
        kept[i] = col + i < r.n && is_kept(d.cut, order_key(x[i]), col + i);
        any |= kept[i];
    }
    if (!any) return true;
    kept_weights(r, d, col, x, w);
    draft_p4(q, col, of_draft);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (!kept[i]) continue;
        float p = weight_p(w[i], inv_total);
        ok &= is_valid(of_draft[i]);
        if (p > of_draft[i]) v[i] = __float2ull_rn(__fadd_rn(p, -of_draft[i]) * 0x1p62f);
    }
    return ok;
}

/* The column in place of a rejected one. Where rounding left no residual, p itself serves, as on
 * the CPU. */
template <int TEAM>
__device__ static inline int corrected(sampler<TEAM> &m, const sampler_row &r,
                                       const sampler_dist &d, const struct kern_sample *p,
                                       const draft_row &q, const team_sum &total) {
    double u = draw_uniform(p, RNG_RESIDUAL), inv = 1 / weight_sum(m, total.total);
    uint64_t mine = 0;
    bool bad = false;
    each_line(m, r, [&](int col, float *x) {
        uint64_t v[4];
        bad |= !residual4(r, d, q, inv, col, x, v);
        mine += v[0] + v[1] + v[2] + v[3];
    });
    team_sum t = team_add(m, mine, bad);
    if (t.flag) return -1;
    if (t.total == 0) return draw_by_weight(m, r, d, total, u);
    return team_find(m, r, t, draw_target(u, t.total), [&](int col, const float *x, uint64_t *v) {
        residual4(r, d, q, inv, col, x, v);
    });
}

/* min(1, p / q) without a division; a token that the draft could not have drawn is judged by the
 * target alone. */
__device__ static inline bool accepts(const struct kern_sample *p, float of_target,
                                      float of_draft) {
    return __dmul_rn(draw_uniform(p, RNG_ACCEPT), (double)of_draft) < (double)of_target;
}

/* Algorithm 1 at one place: draft token x, drawn from q, against the target's distribution. */
template <int TEAM>
__device__ static inline verdict lossless(sampler<TEAM> &m, const row_state &st,
                                          const struct kern_sample *p, const draft_row &q,
                                          int32_t x) {
    int best = st.best.col;
    float of_draft = x < 0 || x >= st.row.n ? -1.f : draft_p(q, x);
    if (!is_valid(of_draft)) return {-1, false};
    if (st.greedy) { /* all chance on one token; so is the residual */
        if (accepts(p, x == best ? 1.f : 0.f, of_draft)) return {x, true};
        return {is_valid(draft_p(q, best)) ? best : -1, false};
    }
    sampler_dist d = filter_row(m, st.row, p, st.best.max);
    team_sum total = dist_total(m, st.row, d);
    float of_target = 0.f, logit = load_one(m.s, st.row, x);
    if (is_kept(d.cut, order_key(logit), x)) {
        float w = weight_of(logit, d.max, d.inv_t);
        if (w >= d.min_w) of_target = weight_p(w, 1 / weight_sum(m, total.total));
    }
    if (accepts(p, of_target, of_draft)) return {x, true};
    return {corrected(m, st.row, d, p, q, total), false};
}

/* What `sample` would draw. */
template <int TEAM>
__device__ static inline int own_draw(sampler<TEAM> &m, const row_state &st,
                                      const struct kern_sample *p) {
    if (st.greedy) return st.best.col;
    team_sum t = {0, 0, 0, false};
    sampler_dist d = filter_row(m, st.row, p, st.best.max);
    if (!p->gumbel) t = dist_total(m, st.row, d);
    return draw_own(m, st.row, d, p, t, st.best.col);
}

template <int TEAM>
__device__ static inline verdict decide(sampler<TEAM> &m, const accept_job &j, const row_state &st,
                                        const struct kern_sample *p, const struct kern_round *r,
                                        int i) {
    if (st.none) return {-1, false};
    bool last = i >= r->n_draft, drawn = !last && r->first_q >= 0 && j.q.probs;
    int32_t x = last ? -1 : j.draft[r->first_draft + i];
    if (drawn) {
        draft_row q = {j.q.probs + (size_t)(r->first_q + i) * j.q.stride, j.q.ids, j.q.n};
        return lossless(m, st, p, q, x);
    }
    int col = own_draw(m, st, p);
    return {col, !last && col >= 0 && col == x};
}

/* ---- A round ------------------------------------------------------------------------------- */

/* The round's rows are all in scratch: how many draft tokens stand, and the tokens that follow. By
 * one warp. */
__device__ static inline void emit(const accept_job &j, int round, int lane) {
    const struct kern_round *r = &j.rounds[round];
    accept_round *a = &j.scratch[round];
    enum { WORDS = sizeof(struct kern_sampled) / 4 };
    bool ends = lane <= r->n_draft && !__ldcg(&a->rows[min(lane, MAX_ROWS - 1)].accepted);
    int n = __ffs((int)__ballot_sync(0xffffffffu, ends)) - 1;
    for (int i = 0; i <= n; i++) {
        const int32_t *from = (const int32_t *)&a->rows[i].s;
        int32_t *to = (int32_t *)&j.out[r->first_row + i];
        for (int w = lane; w < WORDS; w += 32) to[w] = __ldcg(from + w);
    }
    if (lane == 0) j.n_accepted[round] = n;
}

/* Hand in row i; whoever hands in the last one emits the round. By one warp. */
__device__ static inline void meet(const accept_job &j, int round, int i, bool accepted, int lane) {
    accept_round *a = &j.scratch[round];
    uint32_t n_before = 0;
    if (lane == 0) a->rows[i].accepted = accepted;
    __threadfence();
    __syncwarp();
    if (lane == 0) n_before = atomicAdd(&a->n_done, 1u);
    n_before = __shfl_sync(0xffffffffu, n_before, 0);
    if (n_before != (uint32_t)j.rounds[round].n_draft) return;
    __threadfence();
    emit(j, round, lane);
    if (lane == 0) a->n_done = 0;
}

/* All first rows before all second ones. */
template <int TEAM>
__device__ static inline void accept_row_of(sampler_shared *s, const accept_job &j) {
    pdl_trigger();
    pdl_wait();
    int round = team_idx<TEAM>() % j.n_rounds, i = team_idx<TEAM>() / j.n_rounds;
    const struct kern_round *r = &j.rounds[round];
    if (i > r->n_draft) return;
    size_t row = (size_t)(r->first_row + i);
    const struct kern_sample *p = &j.params[row];
    bool alone = r->n_draft == 0;
    struct kern_sampled *out = alone ? &j.out[row] : &j.scratch[round].rows[i].s;
    sampler<TEAM> m = sampler_of<TEAM>(s, j.n);
    row_state st = row_open(m, j.logits + row * j.stride, j.n, NULL, p, &j.history);
    verdict v = decide(m, j, st, p, r, i);
    if (m.warp == 0) put_token(out, v.col, m.lane);
    if (v.col >= 0 && wants_logprobs(p)) logprobs(m, st.row, st.best.raw_max, v.col, p, out);
    if (m.warp != 0) return;
    if (!alone) meet(j, round, i, v.accepted, m.lane);
    else if (m.lane == 0) j.n_accepted[round] = 0;
}

template <int TEAM>
__global__ void TEAM_CLUSTER(TEAM) __launch_bounds__(TEAM_THREADS, 1)
    accept_kernel(const __grid_constant__ accept_job j) {
    __shared__ sampler_shared s;
    accept_row_of<TEAM>(&s, j);
}

size_t kern_cuda_accept_scratch_bytes(const struct kern *k, int n_rounds, int vocab) {
    (void)k, (void)vocab;
    return (size_t)n_rounds * sizeof(accept_round);
}

int kern_cuda_accept(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                     const struct kern_sample *params, const struct kern_history *history,
                     const struct kern_round *rounds, const int32_t *draft,
                     const struct kern_draft_probs *q, void *scratch, int32_t *n_accepted,
                     struct kern_sampled *out) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT(n_rounds >= 0 && n_rounds <= KERN_MAX_ROWS);
    ASSERT(vocab > 0 && vocab <= SAMPLER_MAX_VOCAB && stride >= (size_t)vocab);
    if (n_rounds == 0) return 0;
    accept_job j = {n_rounds,   vocab,  logits, stride, params,
                    {},         rounds, draft,  {},     (accept_round *)scratch,
                    n_accepted, out};
    if (history) j.history = *history;
    if (q) j.q = *q;
    int n_teams = n_rounds * MAX_ROWS;
    if (team_wanted(c, vocab) == 1)
        return CUDA_LAUNCH(c, accept_kernel<1>, dim3(n_teams), dim3(TEAM_THREADS), 0, j);
    return CUDA_LAUNCH(c, accept_kernel<TEAM_MAX>, dim3(n_teams * TEAM_MAX), dim3(TEAM_THREADS), 0,
                       j);
}
