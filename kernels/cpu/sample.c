/* One token a row: kernels/cpu/filter.c makes the distribution, draw.c takes the token. A row with
 * NaN, with an infinite largest logit where chance would have to choose, or with every token banned
 * gives token -1. */
#include <string.h>

#include "base/err.h"
#include "kernels/cpu/sampler.h"

struct sample_job {
    const struct cpu_ctx *c;
    int n_rows, vocab;
    const int32_t *ids;
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    const struct kern_history *history;
    uint8_t *scratch;
    struct kern_sampled *out;
    float *probs;
};

static void write_probs(const struct cpu_sampler *s, double total, float *probs) {
    double inv = 1 / total;
    if (s->all) {
        for (int i = 0; i < s->n; i++) probs[i] = cpu_sampler_p(s->w[i], inv);
        return;
    }
    memset(probs, 0, (size_t)s->vocab * sizeof *probs);
    for (int i = 0; i < s->n; i++) probs[s->col[i]] = cpu_sampler_p(s->w[i], inv);
}

static void sample_row(const struct sample_job *j, struct cpu_sampler *s, int row) {
    const struct kern_sample *p = &j->params[row];
    const float *logits = j->logits + (size_t)row * j->stride;
    float *probs = NULL;
    if (j->probs && p->probs_row >= 0) probs = j->probs + (size_t)p->probs_row * (size_t)j->vocab;
    struct kern_sampled *out = &j->out[row];
    memset(out, 0, sizeof *out);
    out->token = -1;
    if (!cpu_sampler_filter(s, logits, p, j->history)) {
        if (probs) memset(probs, 0, (size_t)j->vocab * sizeof *probs);
        return;
    }
    double total = probs || !p->gumbel ? cpu_sampler_total(s, s->w) : 0;
    int i = cpu_sampler_draw(s, p, total);
    if (probs) write_probs(s, total, probs);
    if (i < 0) return;
    out->token = cpu_sampler_token(s, i);
    if (cpu_sampler_wants_logprobs(p))
        cpu_sampler_logprobs(s, logits, cpu_sampler_col(s, i), p, out);
}

static void sample_share(void *arg, int idx, int n_threads) {
    const struct sample_job *j = arg;
    struct cpu_sampler s = cpu_sampler_carve(
        j->c->isa, j->vocab, j->ids, j->scratch + (size_t)idx * cpu_sampler_bytes(j->vocab));
    int begin, end;
    threads_split(j->n_rows, 1, idx, n_threads, &begin, &end);
    for (int row = begin; row < end; row++) sample_row(j, &s, row);
}

size_t kern_cpu_sample_scratch_bytes(const struct kern *k, int n_rows, int vocab) {
    (void)n_rows;
    return (size_t)threads_n(cpu_ctx(k)->threads) * cpu_sampler_bytes(vocab);
}

int kern_cpu_sample(struct kern *k, int n_rows, int vocab, const int32_t *ids, const float *logits,
                    size_t stride, const struct kern_sample *params,
                    const struct kern_history *history, void *scratch, struct kern_sampled *out,
                    float *probs) {
    const struct cpu_ctx *c = cpu_ctx(k);
    ASSERT(vocab > 0 && vocab <= CPU_SAMPLER_MAX_VOCAB && stride >= (size_t)vocab);
    struct sample_job j = {c,      n_rows,  vocab,   ids, logits, stride,
                           params, history, scratch, out, probs};
    if (n_rows == 1) sample_share(&j, 0, 1);
    else if (n_rows > 1) threads_run(c->threads, sample_share, &j);
    return 0;
}
