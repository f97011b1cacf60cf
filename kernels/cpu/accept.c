/* Rounds of speculation decided: Leviathan, Kalman and Matias, "Fast inference from transformers
 * via speculative decoding", ICML 2023, algorithm 1, and matching of the target's own draws.
 *
 * A row's outcome (its draft token accepted or not, and the token that would follow if the round
 * ended here) is a pure function of that row, so threads take rows as they come, all first rows
 * before all second ones, and the prefix is read off afterwards. Rows behind one that is known to
 * end its round are passed over: what is done in vain is at most a row a thread. Log-probabilities
 * are for emitted tokens only and come last. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/sampler.h"

enum {
    MAX_ROWS = KERN_MAX_DRAFT + 1, /* of a round */
    /* Logits whose maxima one thread finds in about the time that waking the team may take: greedy
     * calls below it stay with the caller. */
    ALONE_BELOW = 1 << 19,
};

struct verdict {
    int32_t token; /* of the output, whether drafted or not; -1: none */
    bool accepted; /* the draft token stands and the round goes on */
};

/* The draft's distribution at one place. */
struct draft_row {
    const float *probs;
    const int32_t *ids;
    int n;
};

struct round_state {
    atomic_int end;                /* the lowest row known to end the round */
    struct verdict rows[MAX_ROWS]; /* [0, end] are filled when all is done */
};

struct accept_job {
    const struct cpu_ctx *c;
    int n_rounds, vocab, n_items; /* items: rows of rounds, by row first */
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    const struct kern_history *history;
    const struct kern_round *rounds;
    const int32_t *draft;
    const struct kern_draft_probs *q;
    int32_t *n_accepted;
    struct kern_sampled *out;
    struct round_state *states; /* [n_rounds] */
    uint8_t *samplers;          /* a thread each */
    atomic_int next;            /* item */
};

/* ---- One row ------------------------------------------------------------------------------- */

static float draft_p(const struct draft_row *q, int32_t token) {
    int col = cpu_sampler_column(q->ids, q->n, token);
    return col < 0 ? 0.f : q->probs[col];
}

static bool valid(float q) {
    return q >= 0 && q <= FLT_MAX;
}

/* min(1, p / q) without a division; a token that the draft could not have drawn is judged by the
 * target alone. */
static bool accepts(double u, float p, float q) {
    return u * (double)q < (double)p;
}

/* max(0, p - q) of the candidates to r[s->n]. False where q is no probability. */
static bool residual(const struct cpu_sampler *s, const struct draft_row *q, double total,
                     float *r) {
    double inv = 1 / total;
    bool ok = true;
    int n_same = s->all && !q->ids ? (q->n < s->n ? q->n : s->n) : 0;
    for (int i = 0; i < n_same; i++) {
        float d = cpu_sampler_p(s->w[i], inv) - q->probs[i];
        ok &= valid(q->probs[i]);
        r[i] = d > 0 ? d : 0.f;
    }
    for (int i = n_same, at = 0; i < s->n; i++) {
        int32_t token = cpu_sampler_token(s, i);
        float p = cpu_sampler_p(s->w[i], inv), of_draft = 0.f;
        if (q->ids) {
            while (at < q->n && q->ids[at] < token) at++;
            if (at < q->n && q->ids[at] == token) of_draft = q->probs[at];
        } else if (token < q->n) of_draft = q->probs[token];
        ok &= valid(of_draft);
        r[i] = p > of_draft ? p - of_draft : 0.f;
    }
    return ok;
}

/* The token in place of a rejected one. Where rounding left no residual, p itself serves: a
 * rejection's chance is the residual's total, which then was of rounding's own size, some 1e-7, and
 * so is what the output's law can be off by. */
static int32_t corrected(struct cpu_sampler *s, const struct kern_sample *p,
                         const struct draft_row *q, double total) {
    float *r = s->all ? s->kept : s->adjusted; /* not read any more */
    double u = cpu_sampler_uniform(p, RNG_RESIDUAL);
    if (!residual(s, q, total, r)) return -1;
    double left = cpu_sampler_total(s, r);
    if (!(left > 0)) {
        r = s->w;
        left = cpu_sampler_total(s, r);
    }
    int i = cpu_sampler_invert(s, r, u, left);
    return i < 0 ? -1 : cpu_sampler_token(s, i);
}

/* Algorithm 1 at one place: draft token x, drawn from q, against the target's distribution. */
static struct verdict lossless(struct cpu_sampler *s, const struct kern_sample *p,
                               const struct draft_row *q, int32_t x) {
    if (x < 0 || x >= s->vocab || !valid(draft_p(q, x))) return (struct verdict){-1, false};
    double total = cpu_sampler_total(s, s->w);
    int i = s->all ? x : cpu_sampler_column(s->col, s->n, x);
    float of_target = i < 0 ? 0.f : cpu_sampler_p(s->w[i], 1 / total);
    if (accepts(cpu_sampler_uniform(p, RNG_ACCEPT), of_target, draft_p(q, x)))
        return (struct verdict){x, true};
    return (struct verdict){corrected(s, p, q, total), false};
}

/* What `sample` would draw. */
static int32_t own_draw(struct cpu_sampler *s, const struct kern_sample *p) {
    int i = cpu_sampler_draw(s, p, p->gumbel ? 0 : cpu_sampler_total(s, s->w));
    return i < 0 ? -1 : cpu_sampler_token(s, i);
}

static struct verdict decide(const struct accept_job *j, struct cpu_sampler *s,
                             const struct kern_round *r, int i) {
    size_t row = (size_t)(r->first_row + i);
    const struct kern_sample *p = &j->params[row];
    if (!cpu_sampler_filter(s, j->logits + row * j->stride, p, j->history))
        return (struct verdict){-1, false};
    if (i == r->n_draft) return (struct verdict){own_draw(s, p), false};
    int32_t x = j->draft[r->first_draft + i];
    if (r->first_q < 0) {
        int32_t token = own_draw(s, p);
        return (struct verdict){token, token >= 0 && token == x};
    }
    struct draft_row q = {j->q->probs + (size_t)(r->first_q + i) * j->q->stride, j->q->ids,
                          j->q->n};
    return lossless(s, p, &q, x);
}

/* ---- All rows ------------------------------------------------------------------------------ */

static struct cpu_sampler sampler_of(const struct accept_job *j, int thread) {
    return cpu_sampler_carve(j->c->isa, j->vocab, NULL,
                             j->samplers + (size_t)thread * cpu_sampler_bytes(j->vocab));
}

static void end_at(struct round_state *st, int row) {
    int end = atomic_load_explicit(&st->end, memory_order_relaxed);
    while (row < end && !atomic_compare_exchange_weak_explicit(
                            &st->end, &end, row, memory_order_relaxed, memory_order_relaxed)) {
    }
}

static void decide_share(void *arg, int idx, int n_threads) {
    struct accept_job *j = arg;
    struct cpu_sampler s = sampler_of(j, idx);
    (void)n_threads;
    for (;;) {
        int item = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        if (item >= j->n_items) return;
        int i = item / j->n_rounds;
        struct round_state *st = &j->states[item % j->n_rounds];
        const struct kern_round *r = &j->rounds[item % j->n_rounds];
        if (i > r->n_draft || i > atomic_load_explicit(&st->end, memory_order_relaxed)) continue;
        st->rows[i] = decide(j, &s, r, i);
        if (!st->rows[i].accepted) end_at(st, i);
    }
}

static void logprob_share(void *arg, int idx, int n_threads) {
    struct accept_job *j = arg;
    struct cpu_sampler s = sampler_of(j, idx);
    (void)n_threads;
    for (;;) {
        int item = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        if (item >= j->n_items) return;
        int i = item / j->n_rounds, round = item % j->n_rounds;
        if (i > j->n_accepted[round]) continue;
        size_t row = (size_t)(j->rounds[round].first_row + i);
        struct kern_sampled *out = &j->out[row];
        if (out->token >= 0 && cpu_sampler_wants_logprobs(&j->params[row]))
            cpu_sampler_logprobs(&s, j->logits + row * j->stride, out->token, &j->params[row], out);
    }
}

static bool all_greedy(const struct accept_job *j) {
    for (int i = 0; i < j->n_rounds; i++)
        if (j->params[j->rounds[i].first_row].temperature > 0) return false;
    return true;
}

static void run_items(struct accept_job *j, threads_fn *fn, bool alone) {
    atomic_store_explicit(&j->next, 0, memory_order_relaxed);
    if (alone || j->n_items == 1) fn(j, 0, 1);
    else threads_run(j->c->threads, fn, j);
}

/* Emit a round's tokens; true where one of them wants log-probabilities. */
static bool emit(const struct accept_job *j, int round) {
    const struct kern_round *r = &j->rounds[round];
    struct round_state *st = &j->states[round];
    int n = atomic_load_explicit(&st->end, memory_order_relaxed);
    bool wanted = false;
    DASSERT(n <= r->n_draft);
    for (int i = 0; i <= n; i++) {
        struct kern_sampled *out = &j->out[r->first_row + i];
        memset(out, 0, sizeof *out);
        out->token = st->rows[i].token;
        wanted |= cpu_sampler_wants_logprobs(&j->params[r->first_row + i]);
    }
    j->n_accepted[round] = n;
    return wanted;
}

static size_t states_bytes(int n_rounds) {
    return align_up((size_t)n_rounds * sizeof(struct round_state), 64);
}

size_t kern_cpu_accept_scratch_bytes(const struct kern *k, int n_rounds, int vocab) {
    return states_bytes(n_rounds) +
           (size_t)threads_n(cpu_ctx(k)->threads) * cpu_sampler_bytes(vocab);
}

int kern_cpu_accept(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                    const struct kern_sample *params, const struct kern_history *history,
                    const struct kern_round *rounds, const int32_t *draft,
                    const struct kern_draft_probs *q, void *scratch, int32_t *n_accepted,
                    struct kern_sampled *out) {
    ASSERT(n_rounds >= 0 && n_rounds <= KERN_MAX_ROWS);
    ASSERT(vocab > 0 && vocab <= CPU_SAMPLER_MAX_VOCAB && stride >= (size_t)vocab);
    struct accept_job j = {
        .c = cpu_ctx(k),
        .n_rounds = n_rounds,
        .vocab = vocab,
        .logits = logits,
        .stride = stride,
        .params = params,
        .history = history,
        .rounds = rounds,
        .draft = draft,
        .q = q,
        .n_accepted = n_accepted,
        .out = out,
        .states = scratch,
        .samplers = (uint8_t *)scratch + states_bytes(n_rounds),
    };
    for (int i = 0; i < n_rounds; i++) {
        const struct kern_round *r = &rounds[i];
        ASSERT(r->n_draft >= 0 && r->n_draft <= KERN_MAX_DRAFT && r->first_row >= 0);
        ASSERT(r->n_draft == 0 || r->first_q < 0 || (q && q->n > 0 && q->stride >= (size_t)q->n));
        atomic_init(&j.states[i].end, r->n_draft);
        if (j.n_items < (r->n_draft + 1) * n_rounds) j.n_items = (r->n_draft + 1) * n_rounds;
    }
    if (n_rounds == 0) return 0;
    run_items(&j, decide_share, (int64_t)j.n_items * vocab < ALONE_BELOW && all_greedy(&j));
    bool wanted = false;
    for (int i = 0; i < n_rounds; i++) wanted |= emit(&j, i);
    if (wanted) run_items(&j, logprob_share, false);
    return 0;
}
