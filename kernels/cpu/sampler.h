#ifndef TANDEM_KERNELS_CPU_SAMPLER_H
#define TANDEM_KERNELS_CPU_SAMPLER_H

/* Private: what sample.c and accept.c share. A sampler is one thread's scratch. filter.c turns a
 * row of logits into the distribution that the request asks for: candidates with weights; draw.c
 * takes a token from it and gives log-probabilities. */

#include "kernels/cpu/cpu.h"

enum {
    CPU_SAMPLER_BINS = 2048,
    CPU_SAMPLER_CHUNK = 1024, /* weights of a chunk of the draw */
    CPU_SAMPLER_MAX_VOCAB = CPU_SAMPLER_BINS * CPU_SAMPLER_CHUNK, /* chunk sums go to the bins */
};

struct cpu_sampler {
    const struct cpu_isa *isa;
    int vocab;          /* columns of a row */
    const int32_t *ids; /* [vocab] tokens of the columns, ascending; NULL: the columns themselves */
    float *adjusted;    /* [vocab] logits after penalties and bans */
    double *bins;       /* [CPU_SAMPLER_BINS] counts of the search; sums of the draw */
    /* The filtered distribution, candidates in order of column. */
    int n;          /* candidates */
    bool all;       /* every column is one: col and kept are not filled */
    int32_t *col;   /* [vocab] their columns */
    float *kept;    /* [vocab] their logits */
    float *w;       /* [vocab] their weights exp((x - max) / T) */
    const float *x; /* their logits: kept, or the row's */
    float max, inv_t;
    int best; /* candidate of the largest logit, the lowest column among equals */
};

size_t cpu_sampler_bytes(int vocab);
struct cpu_sampler cpu_sampler_carve(const struct cpu_isa *isa, int vocab, const int32_t *ids,
                                     void *scratch);

/* ---- filter.c ---- */

/* The row's distribution: penalties and bans, then temperature, top-k, top-p, min-p. False where
 * there is none: the logits hold NaN, everything is banned, or chance would have to choose with an
 * infinite largest logit. logits must outlive the draw. */
bool cpu_sampler_filter(struct cpu_sampler *s, const float *logits, const struct kern_sample *p,
                        const struct kern_history *h);

/* Column of a token, -1: none. */
int cpu_sampler_column(const int32_t *ids, int n, int32_t token);

static inline int cpu_sampler_col(const struct cpu_sampler *s, int candidate) {
    return s->all ? candidate : s->col[candidate];
}
static inline int32_t cpu_sampler_token(const struct cpu_sampler *s, int candidate) {
    int col = cpu_sampler_col(s, candidate);
    return s->ids ? s->ids[col] : col;
}

/* ---- draw.c ---- */

/* Sum of w[s->n], chunk sums to s->bins for cpu_sampler_invert. */
double cpu_sampler_total(struct cpu_sampler *s, const float *w);

/* A weight as the probability that callers see: f32, one rounding for draft and target alike. */
static inline float cpu_sampler_p(float w, double inv_total) {
    return (float)((double)w * inv_total);
}

/* Uniform in (0, 1) of a row's position: (r0 + (r1 + 1/2) / 2^32) / 2^32, r the 32-bit draws 0 and
 * 1 of `purpose`. */
double cpu_sampler_uniform(const struct kern_sample *p, int purpose);

/* The first candidate whose running sum of w passes u * total, right after cpu_sampler_total of the
 * same w. -1 where no weight is positive. */
int cpu_sampler_invert(const struct cpu_sampler *s, const float *w, double u, double total);

/* The row's own draw from the filtered distribution, a candidate: by Gumbel noise, or inverse CDF
 * by the row's purpose. total: cpu_sampler_total(s, s->w), just computed; not read under Gumbel. */
int cpu_sampler_draw(const struct cpu_sampler *s, const struct kern_sample *p, double total);

static inline bool cpu_sampler_wants_logprobs(const struct kern_sample *p) {
    return p->want_logprob || p->n_logprobs > 0;
}

/* Log-probability of out->token, at column col, and the best ones, under the raw logits (without
 * NaN). */
void cpu_sampler_logprobs(const struct cpu_sampler *s, const float *logits, int col,
                          const struct kern_sample *p, struct kern_sampled *out);

#endif
