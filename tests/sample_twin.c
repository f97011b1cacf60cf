#include "tests/sample_twin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

struct entry {
    double x, p;
    int col;
};

static int by_logit(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    return x->x > y->x ? -1 : x->x < y->x ? 1 : x->col - y->col;
}

static double penalised(double x, int32_t token, const struct kern_sample *p,
                        const struct kern_history *h) {
    size_t at = (size_t)p->history * h->stride + (size_t)token;
    double r = (double)p->repetition_penalty, n = h->output[at];
    for (int i = 0; i < p->n_recent; i++) n += h->recent[p->first_recent + i] == token;
    if (h->prompt[at] || n > 0) x = x > 0 ? x / r : x * r;
    if (n > 0) x -= (double)p->presence_penalty + n * (double)p->frequency_penalty;
    return x;
}

/* Entries of the best `keep` that top-p leaves; `sum` is their weight. */
static int cut_top_p(const struct entry *e, int keep, double top_p, double sum, bool *clear) {
    double run_sum = 0;
    int n = 0;
    while (n < keep && (n == 0 || run_sum < top_p * sum)) {
        run_sum += e[n++].p;
        if (fabs(run_sum / sum - top_p) < 1e-6) *clear = false;
    }
    return n;
}

bool twin_probs(const float *logits, int vocab, const int32_t *ids, const struct kern_sample *p,
                const struct kern_history *h, double *probs) {
    struct entry small[16], *e = small;
    bool clear = true;
    if (vocab > 16) e = malloc((size_t)vocab * sizeof *e);
    for (int i = 0; i < vocab; i++) {
        int32_t token = ids ? ids[i] : i;
        double x = (double)logits[i];
        if (h && p->history >= 0) x = penalised(x, token, p, h);
        for (int b = 0; b < p->n_banned; b++)
            if (p->banned[b] == token) x = -INFINITY;
        e[i] = (struct entry){x, 0, i};
    }
    qsort(e, (size_t)vocab, sizeof *e, by_logit);
    double sum = 0;
    int keep = p->top_k > 0 && p->top_k < vocab ? p->top_k : vocab;
    for (int i = 0; i < keep; i++) sum += e[i].p = exp((e[i].x - e[0].x) / (double)p->temperature);
    if (p->top_p < 1) keep = cut_top_p(e, keep, (double)p->top_p, sum, &clear);
    if (p->min_p > 0) {
        int n = 0;
        while (n < keep && e[n].p >= (double)p->min_p) n++;
        for (int i = 1; i < keep; i++)
            if (fabs(e[i].p - (double)p->min_p) < 1e-6 * (double)p->min_p) clear = false;
        keep = n;
    }
    sum = 0;
    for (int i = 0; i < keep; i++) sum += e[i].p;
    for (int i = 0; i < vocab; i++) probs[i] = 0;
    for (int i = 0; i < keep; i++) probs[e[i].col] = e[i].p / sum;
    if (e != small) free(e);
    return clear;
}

struct kern_sample twin_neutral(void) {
    return (struct kern_sample){.temperature = 1,
                                .top_p = 1,
                                .repetition_penalty = 1,
                                .history = -1,
                                .purpose = RNG_SAMPLE,
                                .probs_row = -1};
}

void twin_logits(float *x, int n, uint64_t salt, float spread) {
    for (int i = 0; i < n; i++) {
        float u = rng_uniform(salt, (uint64_t)i, RNG_TEST, 0),
              v = rng_uniform(salt, (uint64_t)i, RNG_TEST, 1);
        x[i] = spread * sqrtf(-2 * logf(u + 1e-7f)) * cosf(6.2831853f * v);
    }
}

double twin_uniform(const struct kern_sample *p, int purpose) {
    double r0 = rng_u32(p->seed, (uint64_t)p->position, (enum rng_purpose)purpose, 0);
    double r1 = rng_u32(p->seed, (uint64_t)p->position, (enum rng_purpose)purpose, 1);
    return (r0 + (r1 + 0.5) * 0x1p-32) * 0x1p-32;
}

int twin_invert(const double *p, int n, double u, double *margin) {
    double below = 0, sum = 0;
    int last = -1;
    for (int i = 0; i < n; i++) sum += p[i];
    for (int i = 0; i < n; i++) {
        if (!(p[i] > 0)) continue;
        last = i;
        if (below + p[i] > u * sum) {
            *margin = fmin(u * sum - below, below + p[i] - u * sum) / sum;
            return i;
        }
        below += p[i];
    }
    *margin = 0;
    return last;
}

/* Wilson and Hilferty: chi-square of f degrees is about f (1 - 2/9f + z sqrt(2/9f))^3; z = 4.75 for
 * 1e-6. */
static double chi_square_limit(int f) {
    double a = 2.0 / (9.0 * f);
    return f * pow(1 - a + 4.75 * sqrt(a), 3);
}

double twin_chi_excess(const int *counts, const double *want, int n, int total) {
    double chi = 0, rare = 0, rare_seen = 0;
    int f = -1;
    for (int i = 0; i < n; i++) {
        double expected = want[i] * total;
        if (want[i] == 0 && counts[i] > 0) return INFINITY;
        if (expected < 10) {
            rare += expected;
            rare_seen += counts[i];
            continue;
        }
        chi += (counts[i] - expected) * (counts[i] - expected) / expected;
        f++;
    }
    if (rare > 5) {
        chi += (rare_seen - rare) * (rare_seen - rare) / rare;
        f++;
    }
    return f > 0 ? chi / chi_square_limit(f) : 0;
}

static bool twin_accepts(double u, double p, double q, enum twin_fault fault) {
    if (fault == TWIN_ACCEPTS_BY_P) return u < p;
    if (fault == TWIN_ACCEPTS_HALF) return u < 2 * p / q;
    return u * q < p;
}

struct twin_round twin_accept(int vocab, const float *logits, size_t stride,
                              const struct kern_sample *params, const struct kern_history *h,
                              const struct kern_round *r, const int32_t *draft,
                              const struct kern_draft_probs *q, enum twin_fault fault) {
    enum { MAX_VOCAB = 64 };
    struct twin_round t = {.margin = 1};
    for (int i = 0; i <= r->n_draft; i++) {
        double p[MAX_VOCAB], of_draft[MAX_VOCAB] = {0}, margin;
        size_t row = (size_t)(r->first_row + i);
        if (!twin_probs(logits + row * stride, vocab, NULL, &params[row], h, p)) t.margin = 0;
        int own = twin_invert(p, vocab, twin_uniform(&params[row], params[row].purpose), &margin);
        int32_t x = i < r->n_draft ? draft[r->first_draft + i] : -1;
        if (i == r->n_draft || r->first_q < 0) {
            t.margin = fmin(t.margin, margin);
            t.token[i] = own;
            if (x != own) return t;
            t.n_accepted++;
            continue;
        }
        for (int c = 0; c < q->n; c++)
            of_draft[q->ids ? q->ids[c] : c] =
                (double)q->probs[(size_t)(r->first_q + i) * q->stride + (size_t)c];
        if (fault == TWIN_Q_UNFILTERED)
            for (int c = 0; c < vocab; c++) of_draft[c] = 1. / vocab;
        double u = twin_uniform(&params[row], RNG_ACCEPT);
        t.margin = fmin(t.margin, fabs(u * of_draft[x] - p[x]));
        t.token[i] = x;
        if (twin_accepts(u, p[x], of_draft[x], fault)) {
            t.n_accepted++;
            continue;
        }
        if (fault != TWIN_RESIDUAL_IS_P)
            for (int c = 0; c < vocab; c++) p[c] = fmax(0, p[c] - of_draft[c]);
        if (fault != TWIN_RESIDUAL_SHARES_U) u = twin_uniform(&params[row], RNG_RESIDUAL);
        t.token[i] = twin_invert(p, vocab, u, &margin);
        t.margin = fmin(t.margin, margin);
        return t;
    }
    return t;
}
