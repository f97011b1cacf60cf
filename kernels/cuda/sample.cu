/* One token a row, in one launch. A team of blocks takes a row (team.cuh: a cluster of 8 for real
 * vocabularies where the chip has them, else one block): the row is read once from L2 and then from
 * L1, what the blocks find goes through each other's shared memory, and nothing goes through
 * global memory but the result.
 *
 * Napkin, 5 rows of 128,256 columns: 2.6 MB on 40 blocks of 512 threads, 64 KB a block at some 64
 * bytes a clock: 0.6 us a pass from L2. A greedy row is one pass and one barrier of the cluster, 2
 * us beside the launch. Chance adds a pass for bins, one or two for each cut, one for the total,
 * and the owner's search: some 8 passes and barriers, 8 to 12 us; noise and probabilities one pass
 * each.
 *
 * A row with NaN, with an infinite largest logit where chance would have to choose, or with every
 * token banned gives token -1. */
#include "kernels/cuda/draw.cuh"

struct sample_job {
    int n; /* columns */
    const int32_t *ids;
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    struct kern_history history; /* zeroed: none */
    struct kern_sampled *out;
    float *probs;
};

/* The filtered distribution, or all chance on column `only` where that is not -1, or nothing at all
 * (none). */
template <int TEAM>
__device__ static inline void write_probs(const sampler<TEAM> &m, const row_state &st,
                                          const sampler_dist &d, double total, float *probs) {
    double inv = 1 / total;
    bool aligned = ((uint64_t)probs | (uint64_t)st.row.n * sizeof *probs) % 16 == 0;
    each_line(m, st.row, [&](int col, float *x) {
        float w[4] = {0.f, 0.f, 0.f, 0.f};
        if (!st.none && !st.greedy) kept_weights(st.row, d, col, x, w);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (st.greedy && !st.none) w[i] = col + i == st.best.col ? 1.f : 0.f;
            else w[i] = weight_p(w[i], inv);
        }
        if (aligned && col + 4 <= st.row.n)
            *(float4 *)(probs + col) = make_float4(w[0], w[1], w[2], w[3]);
        else
            for (int i = 0; i < 4 && col + i < st.row.n; i++) probs[col + i] = w[i];
    });
}

/* The row's token; d and *total, of its weights, are for write_probs. */
template <int TEAM>
__device__ static inline int draw_row(sampler<TEAM> &m, const row_state &st,
                                      const struct kern_sample *p, bool want_total, sampler_dist *d,
                                      double *total) {
    if (st.none) return -1;
    if (st.greedy) return st.best.col;
    team_sum t = {0, 0, 0, false};
    *d = filter_row(m, st.row, p, st.best.max);
    if (want_total || !p->gumbel) t = dist_total(m, st.row, *d);
    *total = weight_sum(m, t.total);
    return draw_own(m, st.row, *d, p, t, st.best.col);
}

template <int TEAM>
__device__ static inline void sample_row(sampler_shared *s, const sample_job &j) {
    pdl_trigger();
    pdl_wait();
    int row = team_idx<TEAM>();
    const struct kern_sample *p = &j.params[row];
    float *probs = NULL;
    if (j.probs && p->probs_row >= 0) probs = j.probs + (size_t)p->probs_row * (size_t)j.n;
    sampler<TEAM> m = sampler_of<TEAM>(s, j.n);
    row_state st = row_open(m, j.logits + (size_t)row * j.stride, j.n, j.ids, p, &j.history);
    sampler_dist d = {0.f, 0.f, {0, 0}, 0.f};
    double total = 1;
    int col = draw_row(m, st, p, probs != NULL, &d, &total);
    if (probs) write_probs(m, st, d, total, probs);
    if (m.warp == 0) put_token(&j.out[row], col < 0 ? -1 : token_of(j.ids, col), m.lane);
    if (col >= 0 && wants_logprobs(p)) logprobs(m, st.row, st.best.raw_max, col, p, &j.out[row]);
}

template <int TEAM>
__global__ void TEAM_CLUSTER(TEAM) __launch_bounds__(TEAM_THREADS, 1)
    sample_kernel(const __grid_constant__ sample_job j) {
    __shared__ sampler_shared s;
    sample_row<TEAM>(&s, j);
}

size_t kern_cuda_sample_scratch_bytes(const struct kern *k, int n_rows, int vocab) {
    (void)k, (void)n_rows, (void)vocab;
    return KERN_ACT_ALIGN; /* none is read or written */
}

int kern_cuda_sample(struct kern *k, int n_rows, int vocab, const int32_t *ids, const float *logits,
                     size_t stride, const struct kern_sample *params,
                     const struct kern_history *history, void *scratch, struct kern_sampled *out,
                     float *probs) {
    struct cuda_ctx *c = cuda_ctx(k);
    (void)scratch;
    ASSERT(vocab > 0 && vocab <= SAMPLER_MAX_VOCAB && stride >= (size_t)vocab);
    ASSERT(n_rows >= 0 && n_rows <= KERN_MAX_ROWS);
    if (n_rows == 0) return 0;
    sample_job j = {vocab, ids, logits, stride, params, {}, out, probs};
    if (history) j.history = *history;
    if (team_wanted(c, vocab) == 1)
        return CUDA_LAUNCH(c, sample_kernel<1>, dim3(n_rows), dim3(TEAM_THREADS), 0, j);
    return CUDA_LAUNCH(c, sample_kernel<TEAM_MAX>, dim3(n_rows * TEAM_MAX), dim3(TEAM_THREADS), 0,
                       j);
}
