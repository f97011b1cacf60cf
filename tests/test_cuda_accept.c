/* CUDA's `accept`: the same rounds as the CPU's fast backend decides, bits of `sample` where
 * nothing is drafted, hostile inputs, and the law itself: chains over a toy pair of 8 tokens, whose
 * first three tokens are held to the exact joint law of the target alone by chi-square, at a
 * false-alarm rate of 1e-6 a case with fixed seeds (tests/test_accept_law.c has the method, and
 * shows that it refuses wrong deciders). */
#include "tests/cuda_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "tests/accept_victim.h"
#include "tests/sample_twin.h"

static struct kern *cpu_fast(void) {
    struct kern_options o = {.n_threads = 1};
    struct kern *k = NULL;
    struct err e = {0};
    assert_ok(kern_cpu_open(&k, &o, &e), e);
    return k;
}

/* One call's arguments, all on the host. */
struct call {
    int n_rounds, vocab, n_rows, n_draft; /* rows of logits, params and out; entries of draft */
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    const struct kern_history *h; /* recent: the draft */
    int n_histories;
    const struct kern_round *rounds;
    const int32_t *draft;
    const struct kern_draft_probs *q;
    int n_q; /* its rows */
};

/* A backend and the buffers that calls use; they grow. */
struct side {
    struct kern *k;
    void *buf[12];
    size_t bytes[12];
};
enum { LOGITS, PARAMS, PROMPT, OUTPUT, RECENT, ROUNDS, DRAFT, Q, Q_IDS, SCRATCH, ACCEPTED, OUT };

static void *room(struct side *s, int i, size_t n) {
    struct err e = {0};
    if (n > s->bytes[i]) {
        if (s->buf[i]) s->k->ops->unreserve(s->k, s->buf[i]);
        assert_ok(s->k->ops->reserve(s->k, n, &s->buf[i], &e), e);
        s->bytes[i] = n;
    }
    return s->buf[i];
}

static void *put(struct side *s, int i, const void *host, size_t n) {
    struct err e = {0};
    if (!host || n == 0) return NULL;
    void *p = room(s, i, n);
    assert_ok(s->k->ops->upload(s->k, p, host, n, &e), e);
    return p;
}

static void side_close(struct side *s) {
    for (int i = 0; i < 12; i++)
        if (s->buf[i]) s->k->ops->unreserve(s->k, s->buf[i]);
    s->k->ops->close(s->k);
}

/* out[n_rows + 1] (the last one to be left alone) and n_accepted as the backend leaves them, bytes
 * of 0xEE before. The scratch is used again from call to call, as the engine does. */
static void accept(struct side *s, const struct call *c, int32_t *n_accepted,
                   struct kern_sampled *out) {
    const struct kern_ops *ops = s->k->ops;
    size_t n_out = (size_t)c->n_rows + 1, n_accepted_bytes = ((size_t)c->n_rounds + 1) * 4;
    size_t counts = (size_t)c->n_histories * (c->h ? c->h->stride : 0) * sizeof(uint16_t);
    struct err e = {0};
    struct kern_history h = {0};
    struct kern_draft_probs q = {0};
    void *logits = put(s, LOGITS, c->logits,
                       ((size_t)(c->n_rows - 1) * c->stride + (size_t)c->vocab) * sizeof(float));
    void *params = put(s, PARAMS, c->params, (size_t)c->n_rows * sizeof *c->params);
    void *rounds = put(s, ROUNDS, c->rounds, (size_t)c->n_rounds * sizeof *c->rounds);
    void *draft = put(s, DRAFT, c->draft, (size_t)c->n_draft * sizeof *c->draft);
    if (c->h) {
        h = *c->h;
        h.prompt = put(s, PROMPT, c->h->prompt, counts);
        h.output = put(s, OUTPUT, c->h->output, counts);
        h.recent = put(s, RECENT, c->h->recent, (size_t)c->n_draft * sizeof *c->draft);
    }
    if (c->q) {
        q = *c->q;
        q.probs =
            put(s, Q, c->q->probs, ((size_t)(c->n_q - 1) * q.stride + (size_t)q.n) * sizeof(float));
        q.ids = put(s, Q_IDS, c->q->ids, (size_t)q.n * sizeof *q.ids);
    }
    memset(out, 0xEE, n_out * sizeof *out);
    memset(n_accepted, 0xEE, n_accepted_bytes);
    void *dev_out = put(s, OUT, out, n_out * sizeof *out);
    void *dev_accepted = put(s, ACCEPTED, n_accepted, n_accepted_bytes);
    void *scratch = room(s, SCRATCH, ops->accept_scratch_bytes(s->k, c->n_rounds, c->vocab));
    assert_int_equal(ops->accept(s->k, c->n_rounds, c->vocab, logits, c->stride, params,
                                 c->h ? &h : NULL, rounds, draft, c->q ? &q : NULL, scratch,
                                 dev_accepted, dev_out),
                     0);
    assert_ok(ops->download(s->k, out, dev_out, n_out * sizeof *out, &e), e);
    assert_ok(ops->download(s->k, n_accepted, dev_accepted, n_accepted_bytes, &e), e);
    for (size_t i = 0; i < sizeof *out; i++)
        assert_int_equal(((uint8_t *)&out[c->n_rows])[i], 0xEE);
    assert_int_equal((uint32_t)n_accepted[c->n_rounds], 0xEEEEEEEEu);
}

/* `sample` of rows, on the host's arrays, each row's distribution to its own row of probs. */
static void sample(struct side *s, int n, int vocab, const int32_t *ids, const float *logits,
                   size_t stride, const struct kern_sample *params, const struct kern_history *h,
                   struct kern_sampled *out, float *probs) {
    struct err e = {0};
    struct kern *k = s->k;
    size_t probs_bytes = probs ? (size_t)n * (size_t)vocab * sizeof *probs : 0;
    void *dev_ids = put(s, Q_IDS, ids, (size_t)vocab * sizeof *ids);
    void *dev_logits = put(s, LOGITS, logits, ((size_t)n - 1) * stride * 4 + (size_t)vocab * 4);
    void *dev_params = put(s, PARAMS, params, (size_t)n * sizeof *params);
    void *dev_out = room(s, OUT, (size_t)n * sizeof *out);
    void *dev_probs = probs ? room(s, Q, probs_bytes) : NULL;
    void *scratch = NULL; /* of its own: accept's must stay as accept leaves it */
    assert_ok(k->ops->reserve(k, k->ops->sample_scratch_bytes(k, n, vocab), &scratch, &e), e);
    k->ops->sample(k, n, vocab, dev_ids, dev_logits, stride, dev_params, h, scratch, dev_out,
                   dev_probs);
    assert_ok(k->ops->download(k, out, dev_out, (size_t)n * sizeof *out, &e), e);
    if (probs) assert_ok(k->ops->download(k, probs, dev_probs, probs_bytes, &e), e);
    k->ops->unreserve(k, scratch);
}

static bool same_logprob(float got, float want) {
    return got == want || fabsf(got - want) <= 2e-6f + 2e-7f * fabsf(want);
}

/* A round's tokens and log-probabilities against the CPU's, rows behind its end by their bytes. 0
 * where they differ in a token. */
static int same_round(const struct kern_round *r, int n_got, const struct kern_sampled *got,
                      int n_want, const struct kern_sampled *want) {
    if (n_got != n_want) return 0;
    for (int i = 0; i <= r->n_draft; i++) {
        const struct kern_sampled *a = &got[r->first_row + i], *b = &want[r->first_row + i];
        if (i > n_want) {
            for (size_t n = 0; n < sizeof *a; n++) assert_int_equal(((uint8_t *)a)[n], 0xEE);
            continue;
        }
        if (a->token != b->token) return 0;
        bool same = same_logprob(a->logprob, b->logprob);
        for (int j = 0; j < KERN_MAX_LOGPROBS; j++)
            same &=
                a->top_id[j] == b->top_id[j] && same_logprob(a->top_logprob[j], b->top_logprob[j]);
        if (!same)
            fail_msg("row %d: log-probability %.9g, want %.9g; best %d, want %d", i,
                     (double)a->logprob, (double)b->logprob, a->top_id[0], b->top_id[0]);
    }
    return 1;
}

/* ---- Against the CPU ----------------------------------------------------------------------- */

/* A round of no draft token is `sample`, bit for bit, log-probabilities included. */
static void check_no_draft(struct side *s, int vocab) {
    enum { N = 60 };
    size_t stride = (size_t)vocab + 7;
    float *x = malloc(N * stride * sizeof *x);
    struct kern_sample p[N];
    struct kern_round rounds[N];
    struct kern_sampled want[N], got[N + 1];
    int32_t n_accepted[N + 1];
    twin_logits(x, (int)(N * stride), 7, 2);
    for (int i = 0; i < N; i++) {
        p[i] = accept_mixed(i);
        rounds[i] = (struct kern_round){0, N - 1 - i, 0, i % 2 - 1};
    }
    x[5 * stride + 17] = NAN;
    sample(s, N, vocab, NULL, x, stride, p, NULL, want, NULL);
    struct call c = {.n_rounds = N,
                     .vocab = vocab,
                     .n_rows = N,
                     .logits = x,
                     .stride = stride,
                     .params = p,
                     .rounds = rounds};
    accept(s, &c, n_accepted, got);
    for (int i = 0; i < N; i++) {
        if (memcmp(&got[i], &want[i], sizeof got[i]) != 0)
            fail_msg("row %d of %d columns: token %d, sample's %d", i, vocab, got[i].token,
                     want[i].token);
        assert_int_equal(n_accepted[i], 0);
    }
    assert_int_equal(got[5].token, -1);
    free(x);
}

static void test_cuda_accept_no_draft(void) {
    struct side s = {.k = cuda_or_skip()};
    check_no_draft(&s, 1003);
    check_no_draft(&s, 9000);
    side_close(&s);
}

/* Rounds of every length with q of a model, of a reduced head, and none; penalties that see the
 * draft tokens before each row. */
struct mix {
    int vocab, n_head, n_rounds, n_rows;
    float *x, *y, *probs;
    int32_t *ids, *draft;
    uint16_t *prompt, *output;
    struct kern_sample *params;
    struct kern_sampled *drawn;
    struct kern_round *rounds;
    struct kern_history h;
    struct kern_draft_probs q;
};

static void mix_open(struct mix *m, int vocab, bool head, int n_rounds) {
    size_t rows = (size_t)n_rounds * (KERN_MAX_DRAFT + 1), v = (size_t)vocab;
    *m = (struct mix){.vocab = vocab, .n_rounds = n_rounds, .n_rows = (int)rows};
    m->n_head = head ? vocab / 2 : vocab;
    m->x = malloc(rows * v * sizeof *m->x);
    m->y = malloc(rows * v * sizeof *m->y);
    m->probs = calloc(rows * v, sizeof *m->probs);
    m->ids = malloc(v * sizeof *m->ids);
    m->draft = calloc(rows, sizeof *m->draft);
    m->prompt = calloc(v, sizeof *m->prompt);
    m->output = calloc(v, sizeof *m->output);
    m->params = malloc(rows * sizeof *m->params);
    m->drawn = malloc(rows * sizeof *m->drawn);
    m->rounds = malloc((size_t)n_rounds * sizeof *m->rounds);
    for (int i = 0; i < vocab; i++) {
        m->prompt[i] = i % 5 == 0;
        m->output[i] = i % 7 == 0 ? (uint16_t)(i % 3) : 0;
        m->ids[i] = 2 * i - i % 2;
    }
    m->h = (struct kern_history){m->prompt, m->output, v, m->draft};
    m->q = (struct kern_draft_probs){m->probs, v, m->n_head, head ? m->ids : NULL};
}

static void mix_close(struct mix *m) {
    void *all[] = {m->x,      m->y,      m->probs,  m->ids,   m->draft,
                   m->prompt, m->output, m->params, m->drawn, m->rounds};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* The draft is the target and noise; its tokens are drawn by the CPU. */
static void mix_fill(struct mix *m, struct side *cpu, int salt) {
    size_t v = (size_t)m->vocab;
    twin_logits(m->x, m->n_rows * m->vocab, (uint64_t)salt, 1.5f);
    twin_logits(m->y, m->n_rows * m->vocab, (uint64_t)salt + 1, 0.6f);
    struct kern_history h = m->h;
    h.recent = NULL;
    for (int r = 0; r < m->n_rows; r++) {
        int round = r / (KERN_MAX_DRAFT + 1), i = r % (KERN_MAX_DRAFT + 1);
        struct kern_sample p = accept_mixed(round + salt);
        p.position = 10 + i;
        p.gumbel = round % 3 == 2 && round % 2;
        if (round % 4 < 2) {
            p.history = 0;
            p.repetition_penalty = 1.2f, p.presence_penalty = 0.6f, p.frequency_penalty = 0.3f;
        }
        m->params[r] = p;
        p.purpose = RNG_DRAFT;
        p.probs_row = 0;
        for (int c = 0; c < m->n_head; c++)
            m->y[(size_t)r * v + (size_t)c] +=
                m->x[(size_t)r * v + (size_t)(m->q.ids ? m->q.ids[c] : c)];
        sample(cpu, 1, m->n_head, m->q.ids, m->y + (size_t)r * v, v, &p, &h, &m->drawn[r],
               m->probs + (size_t)r * v);
        m->draft[r] = m->drawn[r].token;
        if (round % 3 == 2 && rng_u32(5, (uint64_t)r, RNG_TEST, 0) % 5 == 0) m->draft[r] = -1;
        m->params[r].first_recent = r - i;
        m->params[r].n_recent = i;
    }
    for (int i = 0; i < m->n_rounds; i++) {
        int first = i * (KERN_MAX_DRAFT + 1);
        m->rounds[i] = (struct kern_round){(i + salt) % (KERN_MAX_DRAFT + 1), first, first,
                                           i % 3 == 2 ? -1 : first};
    }
}

static void check_mix(struct side *cuda, struct side *cpu, int vocab, bool head, int n_rounds,
                      int n_salts) {
    struct mix m;
    mix_open(&m, vocab, head, n_rounds);
    size_t n = (size_t)m.n_rows + 1;
    struct kern_sampled *got = malloc(n * sizeof *got), *want = malloc(n * sizeof *want);
    int32_t *n_got = malloc((size_t)(n_rounds + 1) * 4),
            *n_want = malloc((size_t)(n_rounds + 1) * 4);
    int n_other = 0, n_cut = 0, n_kept = 0;
    for (int salt = 0; salt < n_salts; salt++) {
        mix_fill(&m, cpu, 100 * salt);
        struct call c = {n_rounds, vocab, m.n_rows, m.n_rows, m.x,  (size_t)vocab, m.params,
                         &m.h,     1,     m.rounds, m.draft,  &m.q, m.n_rows};
        accept(cuda, &c, n_got, got);
        accept(cpu, &c, n_want, want);
        for (int i = 0; i < n_rounds; i++) {
            bool same = same_round(&m.rounds[i], n_got[i], got, n_want[i], want);
            if (!same)
                print_message("round %d of salt %d: %d accepted, want %d; then token %d, want %d\n",
                              i, salt, n_got[i], n_want[i],
                              got[m.rounds[i].first_row + n_got[i]].token,
                              want[m.rounds[i].first_row + n_want[i]].token);
            n_other += !same;
            n_cut += n_want[i] < m.rounds[i].n_draft;
            n_kept += n_want[i] > 0;
        }
    }
    print_message("%d columns: %d rounds, %d cut, %d with accepted tokens, %d differ\n", vocab,
                  n_salts * n_rounds, n_cut, n_kept, n_other);
    assert_true(n_cut > n_rounds / 4 && n_kept > n_rounds / 4);
    /* sums agree to 1e-7 where a top-p cut is made, to 1e-12 elsewhere */
    assert_true(n_other <= n_salts * n_rounds / 1000 + 1);
    mix_close(&m);
    free(got);
    free(want);
    free(n_got);
    free(n_want);
}

static void test_cuda_accept_equals_cpu(void) {
    struct side cuda = {.k = cuda_or_skip()}, cpu = {.k = cpu_fast()};
    check_mix(&cuda, &cpu, 60, false, 51, 8);
    check_mix(&cuda, &cpu, 301, true, 51, 8);
    check_mix(&cuda, &cpu, 6001, false, 24, 2);
    check_mix(&cuda, &cpu, 6000, true, 24, 2);
    check_mix(&cuda, &cpu, 49152, true, 3, 2);
    side_close(&cuda);
    side_close(&cpu);
}

/* A round's bits depend on its own rows alone. */
static void test_cuda_accept_independent(void) {
    struct side cuda = {.k = cuda_or_skip()}, cpu = {.k = cpu_fast()};
    enum { N = 19, VOCAB = 5003 };
    struct mix m;
    mix_open(&m, VOCAB, false, N);
    mix_fill(&m, &cpu, 3);
    struct kern_sampled *all = malloc(((size_t)m.n_rows + 1) * sizeof *all);
    struct kern_sampled *one = malloc(((size_t)m.n_rows + 1) * sizeof *one);
    int32_t n_all[N + 1], n_one[N + 1];
    struct call c = {N,    VOCAB, m.n_rows, m.n_rows, m.x,  VOCAB,   m.params,
                     &m.h, 1,     m.rounds, m.draft,  &m.q, m.n_rows};
    accept(&cuda, &c, n_all, all);
    for (int i = 0; i < N; i++) {
        c.n_rounds = 1;
        c.rounds = &m.rounds[i];
        accept(&cuda, &c, n_one, one);
        assert_int_equal(n_one[0], n_all[i]);
        for (int r = 0; r <= n_one[0]; r++)
            assert_memory_equal(&one[m.rounds[i].first_row + r], &all[m.rounds[i].first_row + r],
                                sizeof *one);
    }
    c.n_rounds = N - 3; /* other places, from the back, and twice over the same scratch */
    struct kern_round turned[N];
    for (int i = 0; i < N; i++) turned[i] = m.rounds[N - 1 - i];
    c.rounds = turned;
    for (int twice = 0; twice < 2; twice++) {
        accept(&cuda, &c, n_one, one);
        for (int i = 0; i < N - 3; i++) {
            assert_int_equal(n_one[i], n_all[N - 1 - i]);
            for (int r = 0; r <= n_one[i]; r++)
                assert_memory_equal(&one[turned[i].first_row + r], &all[turned[i].first_row + r],
                                    sizeof *one);
        }
    }
    mix_close(&m);
    free(all);
    free(one);
    side_close(&cuda);
    side_close(&cpu);
}

/* ---- Hostile ------------------------------------------------------------------------------- */

static void run_victim(void *backend, struct victim *v) {
    enum { V = VICTIM_VOCAB };
    struct call c = {1, V, 3, 2, v->x, V, v->p, NULL, 0, &v->round, v->draft, &v->probs, 2};
    accept(backend, &c, v->n_accepted, v->out);
}

static void test_cuda_accept_hostile(void) {
    struct side s = {.k = cuda_or_skip()};
    victims_check(run_victim, &s);
    assert_int_equal(
        s.k->ops->accept(s.k, 0, 8, NULL, 8, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL), 0);
    side_close(&s);
}

/* ---- The law ------------------------------------------------------------------------------- */

enum {
    V = 8,
    N_HEAD = 5,
    N_CONTEXTS = 1 + V + V * V, /* of at most two tokens */
    N_JOINT = V * V * V,
    CHAINS = 4096, /* that advance together */
    LENGTH = 3,    /* tokens of a chain that count */
    DEPTH = 2,     /* draft tokens */
    LAW_ROWS = CHAINS * (DEPTH + 1),
};

static const int32_t head_ids[N_HEAD] = {0, 1, 3, 4, 6};

enum proposer { MODEL, HEAD, LOOKUP, GUMBEL, N_PROPOSERS };
static const char *const proposer_names[] = {"model", "head", "lookup", "gumbel"};

struct law {
    struct side s;
    float target[N_CONTEXTS][V], drafted[N_CONTEXTS][V], head[N_CONTEXTS][N_HEAD];
    enum proposer proposer;
    struct kern_sample kind;
    uint64_t seed;
    int n_active, active[CHAINS], n_tokens[CHAINS];
    int32_t token[CHAINS][LENGTH + DEPTH + 1], draft[CHAINS * DEPTH], n_accepted[CHAINS + 1];
    struct kern_sample params[LAW_ROWS];
    float logits[LAW_ROWS * V], probs[CHAINS * V], q[CHAINS * DEPTH * V];
    struct kern_round rounds[CHAINS];
    struct kern_sampled out[LAW_ROWS + 1];
    long n_rounds, n_kept;
};

static int context(const int32_t *t, int n) {
    return n == 0 ? 0 : n == 1 ? 1 + t[0] : 1 + V + V * t[n - 2] + t[n - 1];
}

static int context_behind(const struct law *l, int slot, int n_draft) {
    int32_t t[LENGTH + 2 * DEPTH + 1];
    memcpy(t, l->token[slot], (size_t)l->n_tokens[slot] * sizeof *t);
    memcpy(t + l->n_tokens[slot], l->draft + slot * DEPTH, (size_t)n_draft * sizeof *t);
    return context(t, l->n_tokens[slot] + n_draft);
}

static struct kern_sample law_params(const struct law *l, int slot, int n_draft, int purpose) {
    struct kern_sample p = l->kind;
    p.seed = l->seed + (uint64_t)slot;
    p.position = l->n_tokens[slot] + n_draft;
    p.purpose = purpose;
    p.gumbel = l->proposer == GUMBEL;
    return p;
}

/* Draft token i of every active chain; distributions stand at [active][DEPTH][columns] in q. */
static void propose(struct law *l, int i) {
    bool head = l->proposer == HEAD;
    int cols = head ? N_HEAD : V;
    for (int a = 0; a < l->n_active; a++) {
        int slot = l->active[a], ctx = context_behind(l, slot, i);
        if (l->proposer == LOOKUP)
            l->draft[slot * DEPTH + i] = (int32_t)(rng_u32(77, (uint64_t)ctx, RNG_TEST, 0) % V);
        memcpy(l->logits + a * cols, head ? l->head[ctx] : l->drafted[ctx],
               (size_t)cols * sizeof(float));
        l->params[a] = law_params(l, slot, i, RNG_DRAFT);
        l->params[a].probs_row = a;
    }
    if (l->proposer == LOOKUP) return;
    sample(&l->s, l->n_active, cols, head ? head_ids : NULL, l->logits, (size_t)cols, l->params,
           NULL, l->out, l->probs);
    for (int a = 0; a < l->n_active; a++) {
        assert_in_range(l->out[a].token, 0, V - 1);
        l->draft[l->active[a] * DEPTH + i] = l->out[a].token;
        memcpy(l->q + (a * DEPTH + i) * cols, l->probs + a * cols, (size_t)cols * sizeof(float));
    }
}

/* One round of every active chain; those that are long enough leave. */
static void advance(struct law *l) {
    int n_left = 0, cols = l->proposer == HEAD ? N_HEAD : V;
    bool drawn = l->proposer == MODEL || l->proposer == HEAD;
    for (int i = 0; i < DEPTH; i++) propose(l, i);
    for (int a = 0; a < l->n_active; a++) {
        int slot = l->active[a], first = a * (DEPTH + 1);
        l->rounds[a] = (struct kern_round){DEPTH, first, slot * DEPTH, drawn ? a * DEPTH : -1};
        for (int i = 0; i <= DEPTH; i++) {
            memcpy(l->logits + (first + i) * V, l->target[context_behind(l, slot, i)],
                   V * sizeof(float));
            l->params[first + i] = law_params(l, slot, i, RNG_SAMPLE);
        }
    }
    struct kern_draft_probs q = {l->q, (size_t)cols, cols, cols == V ? NULL : head_ids};
    struct call c = {l->n_active,        V,         l->n_active * (DEPTH + 1),
                     CHAINS * DEPTH,     l->logits, V,
                     l->params,          NULL,      0,
                     l->rounds,          l->draft,  &q,
                     l->n_active * DEPTH};
    accept(&l->s, &c, l->n_accepted, l->out);
    for (int a = 0; a < l->n_active; a++) {
        int slot = l->active[a];
        assert_in_range(l->n_accepted[a], 0, DEPTH);
        for (int i = 0; i <= l->n_accepted[a]; i++)
            l->token[slot][l->n_tokens[slot]++] = l->out[a * (DEPTH + 1) + i].token;
        l->n_kept += l->n_accepted[a];
        if (l->n_tokens[slot] < LENGTH) l->active[n_left++] = slot;
    }
    l->n_rounds += l->n_active;
    l->n_active = n_left;
}

/* The exact law of the target alone. */
static void joint_law(const struct law *l, double *want) {
    double pa[V], pb[V], pc[V];
    assert_true(twin_probs(l->target[0], V, NULL, &l->kind, NULL, pa));
    for (int32_t a = 0; a < V; a++) {
        assert_true(twin_probs(l->target[context(&a, 1)], V, NULL, &l->kind, NULL, pb));
        for (int32_t b = 0; b < V; b++) {
            int ctx = context((int32_t[]){a, b}, 2);
            assert_true(twin_probs(l->target[ctx], V, NULL, &l->kind, NULL, pc));
            for (int c = 0; c < V; c++) want[(a * V + b) * V + c] = pa[a] * pb[b] * pc[c];
        }
    }
}

static void check_law(struct law *l, long n_rounds) {
    int counts[N_JOINT] = {0}, n = 0;
    double want[N_JOINT];
    joint_law(l, want);
    l->n_rounds = l->n_kept = 0;
    for (; l->n_rounds < n_rounds; l->seed += CHAINS, n += CHAINS) {
        memset(l->n_tokens, 0, sizeof l->n_tokens);
        l->n_active = CHAINS;
        for (int i = 0; i < CHAINS; i++) l->active[i] = i;
        while (l->n_active > 0) advance(l);
        for (int i = 0; i < CHAINS; i++)
            counts[(l->token[i][0] * V + l->token[i][1]) * V + l->token[i][2]]++;
    }
    double excess = twin_chi_excess(counts, want, N_JOINT, n);
    print_message("%s: %ld rounds, %.2f tokens accepted a round, chi-square %.2f of its limit\n",
                  proposer_names[l->proposer], l->n_rounds, (double)l->n_kept / (double)l->n_rounds,
                  excess);
    if (!(excess < 1)) fail_msg("chi-square %g of its limit", excess);
    assert_true(l->n_kept > l->n_rounds / 100 && l->n_kept < l->n_rounds * DEPTH);
}

static void test_cuda_accept_law(void) {
    static struct law l;
    l.s.k = cuda_or_skip();
    twin_logits(&l.target[0][0], N_CONTEXTS * V, 41, 1.2f);
    twin_logits(&l.drafted[0][0], N_CONTEXTS * V, 42, 0.8f);
    for (int c = 0; c < N_CONTEXTS; c++) {
        for (int i = 0; i < V; i++) l.drafted[c][i] += l.target[c][i];
        for (int i = 0; i < N_HEAD; i++) l.head[c][i] = l.drafted[c][head_ids[i]];
    }
    for (int f = 0; f < 3; f++)
        for (int i = 0; i < N_PROPOSERS; i++) {
            l.kind = twin_neutral();
            l.kind.temperature = f ? 0.7f : 1;
            if (f == 1) l.kind.top_k = 5, l.kind.top_p = 0.85f;
            if (f == 2) l.kind.min_p = 0.06f;
            l.proposer = (enum proposer)i;
            l.seed = (uint64_t)(f * N_PROPOSERS + i) << 32;
            check_law(&l, f == 0 && i == MODEL ? 300000 : 100000);
        }
    side_close(&l.s);
}

const struct test tests[] = {
    {"cuda_accept_no_draft", TEST_GPU, 60000, test_cuda_accept_no_draft},
    {"cuda_accept_equals_cpu", TEST_GPU, 60000, test_cuda_accept_equals_cpu},
    {"cuda_accept_independent", TEST_GPU, 60000, test_cuda_accept_independent},
    {"cuda_accept_hostile", TEST_GPU, 60000, test_cuda_accept_hostile},
    {"cuda_accept_law", TEST_GPU, 60000, test_cuda_accept_law},
    {0},
};
