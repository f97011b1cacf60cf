/* A token from a filtered distribution, and log-probabilities. The draw inverts the distribution's
 * sums in order of id; sums are double in an order that the number of candidates alone decides. */
#include <math.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/gumbel.h"
#include "kernels/cpu/sampler.h"

double cpu_sampler_total(struct cpu_sampler *s, const float *w) {
    double total = 0;
    for (int c = 0, begin = 0; begin < s->n; c++, begin += CPU_SAMPLER_CHUNK) {
        int end = begin + CPU_SAMPLER_CHUNK < s->n ? begin + CPU_SAMPLER_CHUNK : s->n, i = begin;
        double lane[8] = {0};
        for (; i + 8 <= end; i += 8)
            for (int j = 0; j < 8; j++) lane[j] += (double)w[i + j];
        for (; i < end; i++) lane[0] += (double)w[i];
        s->bins[c] = ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
                     ((lane[2] + lane[6]) + (lane[3] + lane[7]));
        total += s->bins[c];
    }
    return total;
}

double cpu_sampler_uniform(const struct kern_sample *p, int purpose) {
    /* One block holds both draws. */
    uint32_t counter[4] = {(uint32_t)p->position, (uint32_t)((uint64_t)p->position >> 32),
                           (uint32_t)purpose, 0};
    uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)(p->seed >> 32)}, r[4];
    philox4x32(counter, key, r);
    return (r[0] + (r[1] + 0.5) * 0x1p-32) * 0x1p-32;
}

/* Rounding may leave it to the last candidate that weighs something. */
int cpu_sampler_invert(const struct cpu_sampler *s, const float *w, double u, double total) {
    double target = u * total, below = 0;
    int begin = 0, last = -1;
    for (int c = 0; begin + CPU_SAMPLER_CHUNK < s->n && below + s->bins[c] <= target; c++) {
        below += s->bins[c];
        begin += CPU_SAMPLER_CHUNK;
    }
    for (int i = begin; i < s->n; i++) {
        if (!(w[i] > 0)) continue;
        last = i;
        below += (double)w[i];
        if (below > target) return i;
    }
    for (int i = begin - 1; last < 0 && i >= 0; i--)
        if (w[i] > 0) last = i;
    return last;
}

int cpu_sampler_draw(const struct cpu_sampler *s, const struct kern_sample *p, double total) {
    ASSERT(p->purpose == RNG_SAMPLE || p->purpose == RNG_DRAFT);
    if (!p->gumbel) return cpu_sampler_invert(s, s->w, cpu_sampler_uniform(p, p->purpose), total);
    if (s->n == 1) return 0;
    struct cpu_gumbel_row row = {
        .seed = p->seed,
        .position = (uint64_t)p->position,
        .n = s->n,
        .col = s->all ? NULL : s->col,
        .ids = s->ids,
        .w = s->w,
        .x = s->x,
        .max = s->max,
        .inv_t = s->inv_t,
        .best = s->best,
    };
    return s->isa->gumbel(&row);
}

/* ---- Log-probabilities --------------------------------------------------------------------- */

static float block_max(const float *x, int n) {
    float top = -INFINITY;
    for (int i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* The n best columns of the raw logits, lower ones first among equals, by insertion: few pass the
 * last one. */
static void top_logprobs(const float *x, int vocab, int n, double log_sum,
                         struct kern_sampled *out) {
    int n_have = 0;
    float best[KERN_MAX_LOGPROBS];
    for (int i = 0; i < vocab && n > 0; i++) {
        if (i % 32 == 0 && n_have == n) {
            while (vocab - i >= 32 && !(block_max(x + i, 32) > best[n - 1])) i += 32;
            if (i == vocab) break;
        }
        if (n_have == n && !(x[i] > best[n - 1])) continue;
        int at = n_have < n ? n_have++ : n - 1;
        for (; at > 0 && x[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            out->top_id[at] = out->top_id[at - 1];
        }
        best[at] = x[i];
        out->top_id[at] = i;
    }
    for (int i = 0; i < KERN_MAX_LOGPROBS; i++) {
        if (i >= n_have) out->top_id[i] = -1;
        out->top_logprob[i] = i < n_have ? (float)((double)best[i] - log_sum) : -INFINITY;
    }
}

void cpu_sampler_logprobs(const struct cpu_sampler *s, const float *logits, int col,
                          const struct kern_sample *p, struct kern_sampled *out) {
    const struct cpu_rowwise_isa *rw = s->isa->rowwise;
    int n = p->n_logprobs < 0 ? 0 : p->n_logprobs, idx;
    if (n > KERN_MAX_LOGPROBS) n = KERN_MAX_LOGPROBS;
    float max;
    rw->max(logits, s->vocab, &max, &idx);
    double log_sum = (double)max + log(rw->exp_sum(logits, s->vocab, max, 1.f, NULL));
    out->logprob = (float)((double)logits[col] - log_sum);
    top_logprobs(logits, s->vocab, n, log_sum, out);
    for (int i = 0; s->ids && i < n && out->top_id[i] >= 0; i++)
        out->top_id[i] = s->ids[out->top_id[i]];
}
