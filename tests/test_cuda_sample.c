/* CUDA's `sample` against the CPU's fast one on the same inputs. Weights have the same bits on both
 * sides and sums agree to some 1e-7 of the whole (the CPU adds f32 lanes where it wants a row's
 * total before a top-p cut, some 1e-15 elsewhere), so tokens are equal but where a draw or a cut
 * falls that close to a border: at most one row in 2,000 may differ, and each that does must lie
 * within 1e-5 of a border by the twin in double. Probabilities follow within 1e-6 of themselves. */
#include "tests/cuda_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
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
    int n, vocab;
    const int32_t *ids;
    const float *logits;
    size_t stride;
    const struct kern_sample *params;
    const struct kern_history *h;
    int n_histories, n_recent; /* sizes behind h */
    int n_probs;               /* rows of probs, 0: NULL is handed in */
};

enum { GUARD = 64 }; /* bytes before and behind an output */

static void check_guard(const uint8_t *p, size_t n, const char *what) {
    for (size_t i = 0; i < GUARD; i++)
        if (p[i] != 0xFF || p[GUARD + n + i] != 0xFF) fail_msg("%s: written outside, %zu", what, i);
}

/* out[n], probs[n_probs * vocab] as the device leaves them; what it does not write keeps bytes of
 * 0xFF. */
static void sample_cuda(struct kern *k, const struct call *c, struct kern_sampled *out,
                        float *probs) {
    size_t out_bytes = (size_t)c->n * sizeof *out;
    size_t probs_bytes = (size_t)c->n_probs * (size_t)c->vocab * sizeof *probs;
    size_t counts = (size_t)c->n_histories * (c->h ? c->h->stride : 0) * sizeof(uint16_t);
    void *ids = c->ids ? dev_put(k, c->ids, (size_t)c->vocab * sizeof *c->ids) : NULL;
    size_t n_logits = (size_t)(c->n - 1) * c->stride + (size_t)c->vocab;
    float *logits = dev_put(k, c->logits, n_logits * sizeof *logits);
    void *params = dev_put(k, c->params, (size_t)c->n * sizeof *c->params);
    struct kern_history h = {0};
    if (c->h) {
        h = *c->h;
        h.prompt = dev_put(k, c->h->prompt, counts);
        h.output = dev_put(k, c->h->output, counts);
        if (c->h->recent) h.recent = dev_put(k, c->h->recent, (size_t)c->n_recent * 4);
    }
    uint8_t *dev_out = dev_put(k, NULL, out_bytes + 2 * GUARD);
    uint8_t *dev_probs = probs ? dev_put(k, NULL, probs_bytes + 2 * GUARD) : NULL;
    void *scratch = NULL;
    struct err e = {0};
    assert_ok(k->ops->reserve(k, k->ops->sample_scratch_bytes(k, c->n, c->vocab), &scratch, &e), e);
    assert_int_equal(k->ops->sample(k, c->n, c->vocab, ids, logits, c->stride, params,
                                    c->h ? &h : NULL, scratch, (void *)(dev_out + GUARD),
                                    probs ? (void *)(dev_probs + GUARD) : NULL),
                     0);
    assert_ok(k->ops->sync(k, &e), e);
    uint8_t *back = dev_get(k, dev_out, out_bytes + 2 * GUARD);
    check_guard(back, out_bytes, "out");
    memcpy(out, back + GUARD, out_bytes);
    free(back);
    if (probs) {
        back = dev_get(k, dev_probs, probs_bytes + 2 * GUARD);
        check_guard(back, probs_bytes, "probs");
        memcpy(probs, back + GUARD, probs_bytes);
        free(back);
        k->ops->unreserve(k, dev_probs);
    }
    if (c->h) {
        k->ops->unreserve(k, (void *)h.prompt);
        k->ops->unreserve(k, (void *)h.output);
        if (h.recent) k->ops->unreserve(k, (void *)h.recent);
    }
    if (ids) k->ops->unreserve(k, ids);
    k->ops->unreserve(k, logits);
    k->ops->unreserve(k, params);
    k->ops->unreserve(k, dev_out);
    k->ops->unreserve(k, scratch);
}

static void sample_cpu(struct kern *k, const struct call *c, struct kern_sampled *out,
                       float *probs) {
    void *scratch = NULL;
    struct err e = {0};
    assert_ok(k->ops->reserve(k, k->ops->sample_scratch_bytes(k, c->n, c->vocab), &scratch, &e), e);
    if (probs) memset(probs, 0xFF, (size_t)c->n_probs * (size_t)c->vocab * sizeof *probs);
    k->ops->sample(k, c->n, c->vocab, c->ids, c->logits, c->stride, c->params, c->h, scratch, out,
                   probs);
    k->ops->unreserve(k, scratch);
}

/* How far the row's draw lies from another token, in probability; 0 where a filter's cut is within
 * 1e-6 of a border. Gumbel: distance of the two best sums. */
static double margin_of(const struct call *c, int row) {
    const struct kern_sample *p = &c->params[row];
    const float *x = c->logits + (size_t)row * c->stride;
    double *probs = malloc((size_t)c->vocab * sizeof *probs), margin = 0;
    if (twin_probs(x, c->vocab, c->ids, p, c->h, probs)) {
        if (!p->gumbel) twin_invert(probs, c->vocab, twin_uniform(p, p->purpose), &margin);
        else {
            double best = -INFINITY, next = -INFINITY;
            for (int i = 0; i < c->vocab; i++) {
                if (!(probs[i] > 0)) continue;
                uint32_t r = rng_u32(p->seed, (uint64_t)p->position, RNG_GUMBEL,
                                     (uint32_t)(c->ids ? c->ids[i] : i));
                double sum = log(probs[i]) - log(-log((r + 0.5) * 0x1p-32));
                next = fmax(next, fmin(sum, best));
                best = fmax(best, sum);
            }
            margin = best - next;
        }
    }
    free(probs);
    return margin;
}

static int n_rows_seen, n_differ; /* of the running test */

static bool same_logprob(float got, float want) {
    if (got == want || (isnan(got) && isnan(want))) return true;
    return fabsf(got - want) <= 2e-6f + 2e-7f * fabsf(want);
}

static void compare_row(const struct call *c, int row, const struct kern_sampled *got,
                        const struct kern_sampled *want) {
    n_rows_seen++;
    if (got->token != want->token) {
        double margin = margin_of(c, row);
        n_differ++;
        if (!(margin < 1e-5))
            fail_msg("row %d of %d columns: token %d, want %d, %g from a border", row, c->vocab,
                     got->token, want->token, margin);
        return;
    }
    if (!same_logprob(got->logprob, want->logprob))
        fail_msg("row %d: log-probability %.9g, want %.9g", row, (double)got->logprob,
                 (double)want->logprob);
    for (int i = 0; i < KERN_MAX_LOGPROBS; i++)
        if (got->top_id[i] != want->top_id[i] ||
            !same_logprob(got->top_logprob[i], want->top_logprob[i]))
            fail_msg("row %d: best %d is %d at %.9g, want %d at %.9g", row, i, got->top_id[i],
                     (double)got->top_logprob[i], want->top_id[i], (double)want->top_logprob[i]);
}

static void compare_probs(const struct call *c, int row, const float *got, const float *want) {
    for (int i = 0; i < c->vocab; i++) {
        bool same = got[i] == want[i] || fabsf(got[i] - want[i]) <= 1e-6f * want[i] ||
                    (isnan(got[i]) && isnan(want[i])); /* not written */
        if (same) continue;
        if (margin_of(c, row) < 1e-5) {
            n_differ++;
            return;
        }
        fail_msg("probs of row %d, column %d: %.9g, want %.9g", row, i, (double)got[i],
                 (double)want[i]);
    }
}

/* Both sides of a call, compared. */
static void compare(struct kern *cuda, struct kern *cpu, const struct call *c) {
    size_t n = (size_t)c->n, np = (size_t)c->n_probs * (size_t)c->vocab;
    struct kern_sampled *got = malloc(n * sizeof *got), *want = malloc(n * sizeof *want);
    float *p_got = np ? malloc(np * sizeof(float)) : NULL;
    float *p_want = np ? malloc(np * sizeof(float)) : NULL;
    sample_cuda(cuda, c, got, p_got);
    sample_cpu(cpu, c, want, p_want);
    for (int i = 0; i < c->n; i++) {
        compare_row(c, i, &got[i], &want[i]);
        int at = c->params[i].probs_row;
        if (np && at >= 0)
            compare_probs(c, i, p_got + (size_t)at * (size_t)c->vocab,
                          p_want + (size_t)at * (size_t)c->vocab);
    }
    free(got);
    free(want);
    free(p_got);
    free(p_want);
}

static void check_rate(const char *what) {
    print_message("%s: %d rows, %d differ\n", what, n_rows_seen, n_differ);
    if (n_differ > n_rows_seen / 2000 + 1) fail_msg("%d of %d differ", n_differ, n_rows_seen);
}

/* Settings of all sorts. */
static struct kern_sample mixed(int i) {
    static const float temperatures[] = {1, 0.7f, 0, 1.3f, 0.05f, 1};
    static const int top_ks[] = {0, 50, 0, 1, 20, 400, 0, 5};
    static const float top_ps[] = {1, 0.95f, 1, 0.9f, 0.5f}, min_ps[] = {0, 0, 0.02f};
    struct kern_sample p = twin_neutral();
    p.temperature = temperatures[i % 6];
    p.top_k = top_ks[i / 2 % 8];
    p.top_p = top_ps[i / 3 % 5];
    p.min_p = min_ps[i / 5 % 3];
    p.gumbel = i % 7 == 3;
    p.seed = (uint64_t)i * 77 + (i % 2 ? 1ull << 40 : 0);
    p.position = i % 3 ? i : (1ll << 33) + i;
    p.purpose = i % 5 == 4 ? RNG_DRAFT : RNG_SAMPLE;
    p.n_logprobs = i % 11 == 5 ? 1 + i % KERN_MAX_LOGPROBS : 0;
    p.want_logprob = i % 13 == 6;
    return p;
}

/* ---- Tests --------------------------------------------------------------------------------- */

/* Thousands of rows over vocabularies odd and even, one block a row and eight. */
static void test_cuda_sample_equals_cpu(void) {
    struct kern *cuda = cuda_or_skip(), *cpu = cpu_fast();
    static const int vocabs[] = {1, 2, 5, 31, 128, 129, 1003, 4096, 4097, 9001};
    static const float spreads[] = {2, 0.3f, 6};
    enum { ROWS = 200 };
    n_rows_seen = n_differ = 0;
    for (int v = 0; v < 10; v++)
        for (int s = 0; s < 3; s++) {
            int vocab = vocabs[v], stride = vocab + (v % 2 ? 3 : 0);
            float *x = malloc((size_t)(ROWS * stride) * sizeof *x);
            struct kern_sample p[ROWS];
            twin_logits(x, ROWS * stride, (uint64_t)(10 * v + s), spreads[s]);
            for (int i = 0; i < ROWS; i++) {
                p[i] = mixed(i + 31 * v + 7 * s);
                p[i].probs_row = i % 4 == 1 ? i / 4 : -1;
            }
            struct call c = {ROWS, vocab, NULL, x, (size_t)stride, p, NULL, 0, 0, (ROWS + 3) / 4};
            compare(cuda, cpu, &c);
            free(x);
        }
    check_rate("equals_cpu");
    cuda->ops->close(cuda);
    cpu->ops->close(cpu);
}

/* Penalties over two histories, recent tokens (some that are no ids), bans; with and without a
 * reduced head. */
static void test_cuda_sample_penalties(void) {
    struct kern *cuda = cuda_or_skip(), *cpu = cpu_fast();
    enum { V = 6007, HEAD = 4999, ROWS = 300, N_RECENT = 40 };
    static float x[ROWS * V];
    static uint16_t prompt[2 * V], output[2 * V];
    static int32_t recent[N_RECENT], ids[HEAD];
    struct kern_sample p[ROWS];
    for (int i = 0; i < 2 * V; i++) {
        prompt[i] = rng_u32(3, (uint64_t)i, RNG_TEST, 0) % 5 == 0;
        output[i] = rng_u32(4, (uint64_t)i, RNG_TEST, 0) % 7 == 0 ? (uint16_t)(i % 4) : 0;
    }
    output[V + 41] = UINT16_MAX;
    for (int i = 0; i < HEAD; i++) ids[i] = i + i / 5;
    for (int i = 0; i < N_RECENT; i++)
        recent[i] = i % 9 == 4 ? -1 : (int32_t)(rng_u32(5, (uint64_t)i, RNG_TEST, 0) % V);
    recent[3] = recent[5] = recent[6] = 41;
    recent[8] = V + 3;
    n_rows_seen = n_differ = 0;
    for (int pass = 0; pass < 4; pass++) {
        twin_logits(x, ROWS * V, (uint64_t)(900 + pass), 2);
        for (int i = 0; i < ROWS; i++) {
            p[i] = mixed(i + 1000 * pass);
            p[i].history = i % 4 == 3 ? -1 : i % 2;
            p[i].repetition_penalty = i % 3 ? 1.3f : 1;
            p[i].presence_penalty = i % 5 ? 0.4f : 0;
            p[i].frequency_penalty = i % 7 ? -0.2f : 0.6f;
            p[i].first_recent = i % 20;
            p[i].n_recent = i % (KERN_MAX_DRAFT + 1);
            p[i].n_banned = i % 6 == 0 ? 1 + i % 8 : 0;
            for (int b = 0; b < 8; b++) p[i].banned[b] = b == 7 ? -5 : (i * 31 + b * 700) % V;
            if (p[i].n_banned) x[i * V + p[i].banned[0]] = 30; /* the best one is banned */
        }
        struct kern_history h = {prompt, output, V, recent};
        bool head = pass % 2;
        struct call c = {ROWS, head ? HEAD : V, head ? ids : NULL, x, V, p, &h, 2, N_RECENT, 0};
        compare(cuda, cpu, &c);
    }
    check_rate("penalties");
    cuda->ops->close(cuda);
    cpu->ops->close(cpu);
}

/* Real vocabularies: peaked rows, flat ones, all equal, two values, hardly any weight, and equal
 * logits across every cut. */
static void test_cuda_sample_large(void) {
    struct kern *cuda = cuda_or_skip(), *cpu = cpu_fast();
    static const int vocabs[] = {128256, 49152, 151936, 50257};
    enum { ROWS = 24 };
    n_rows_seen = n_differ = 0;
    for (int v = 0; v < 4; v++) {
        int vocab = vocabs[v];
        float *x = malloc((size_t)ROWS * (size_t)vocab * sizeof *x);
        struct kern_sample p[ROWS];
        for (int i = 0; i < ROWS; i++) {
            static const float spreads[] = {3, 1, 0.01f, 10, 200, 2.5f};
            float *row = x + (size_t)i * (size_t)vocab;
            twin_logits(row, vocab, (uint64_t)(v * 100 + i), spreads[i % 6]);
            for (int t = 0; t < vocab && i % 8 == 5; t++) row[t] = 1.5f;
            for (int t = 0; t < vocab && i % 8 == 6; t++) row[t] = t % 3 ? 0.f : -0.f;
            for (int t = 0; t < vocab && i % 8 == 7; t++) row[t] = rintf(row[t] * 2) / 2;
            for (int t = 1; t < vocab && i == 20; t++) row[t] = -INFINITY;
            p[i] = mixed(i * 5 + v);
            if (i % 3 == 0) p[i].top_k = 50, p[i].top_p = 0.95f, p[i].temperature = 0.7f;
            if (i % 8 == 7) p[i].top_k = 1000, p[i].top_p = 0.9f, p[i].temperature = 1;
            if (i % 8 == 5) p[i].top_k = i % 16 == 5 ? 777 : 0, p[i].top_p = 0.61f;
            if (i == 20) p[i].temperature = 1;
            p[i].n_logprobs = i % 5 == 2 ? 20 : 0;
            p[i].probs_row = i;
        }
        struct call c = {ROWS, vocab, NULL, x, (size_t)vocab, p, NULL, 0, 0, ROWS};
        compare(cuda, cpu, &c);
        free(x);
    }
    check_rate("large");
    cuda->ops->close(cuda);
    cpu->ops->close(cpu);
}

/* Ties, NaN at every place, infinities, nothing left: as the CPU has it, exactly. */
static void test_cuda_sample_edges(void) {
    struct kern *cuda = cuda_or_skip(), *cpu = cpu_fast();
    enum { V = 4200, ROWS = 160 };
    static float x[ROWS * V];
    struct kern_sample p[ROWS];
    for (int small = 0; small < 2; small++) {
        int vocab = small ? 40 : V;
        twin_logits(x, ROWS * V, (uint64_t)small + 1, 3);
        for (int i = 0; i < ROWS; i++) {
            float *row = x + i * vocab;
            int at = (int)(rng_u32(6, (uint64_t)i, RNG_TEST, 0) % (unsigned)vocab);
            p[i] = mixed(i);
            p[i].want_logprob = i % 2;
            p[i].n_logprobs = i % 4 == 1 ? 20 : 0;
            p[i].probs_row = i;
            if (i < 40) row[small ? i : at] = NAN;
            if (i % 4 == 0) p[i].n_banned = 1, p[i].banned[0] = at; /* hides no NaN */
            if (i >= 40 && i < 60) row[at] = row[vocab - 1 - at / 2] = 50;
            if (i >= 60 && i < 80) row[at] = INFINITY;
            if (i >= 80 && i < 100)
                for (int t = 0; t < vocab; t++) row[t] = -INFINITY;
            if (i >= 90 && i < 100) row[at] = 0;
            if (i >= 100 && i < 110) row[at] = -INFINITY;
            if (i >= 110 && i < 120) /* banned, all of the first 8 */
                for (int t = 0; t < vocab; t++) row[t] = t < 8 ? row[t] : -INFINITY;
            if (i >= 110 && i < 120) p[i].n_banned = 8;
            for (int b = 0; i >= 110 && i < 120 && b < 8; b++) p[i].banned[b] = b;
            if (i >= 120 && i < 130) p[i].temperature = 1e30f;
            if (i >= 130 && i < 140) p[i].temperature = 1.1e-5f;
            if (i >= 140) row[at] = 1e30f, row[at / 2] = -1e30f;
        }
        struct call c = {ROWS, vocab, NULL, x, (size_t)vocab, p, NULL, 0, 0, ROWS};
        n_rows_seen = n_differ = 0;
        compare(cuda, cpu, &c);
        assert_int_equal(n_differ, 0);
    }
    cuda->ops->close(cuda);
    cpu->ops->close(cpu);
}

/* A row's bits depend neither on the rows beside it, nor on its place, nor on the run. */
static void test_cuda_sample_independent(void) {
    struct kern *cuda = cuda_or_skip();
    enum { V = 20001, ROWS = 41 };
    static float x[ROWS * V], turned[ROWS * V], probs[ROWS * V], again[ROWS * V];
    struct kern_sample p[ROWS], q[ROWS];
    struct kern_sampled out[ROWS], other[ROWS];
    twin_logits(x, ROWS * V, 5, 2);
    for (int i = 0; i < ROWS; i++) {
        p[i] = mixed(i);
        p[i].n_logprobs = i % 3 ? 0 : 7;
        p[i].probs_row = i;
    }
    struct call c = {ROWS, V, NULL, x, V, p, NULL, 0, 0, ROWS};
    sample_cuda(cuda, &c, out, probs);
    for (int turn = 1; turn < ROWS; turn += 13) {
        for (int i = 0; i < ROWS; i++) {
            int from = (i + turn) % ROWS;
            memcpy(turned + i * V, x + from * V, V * sizeof *x);
            q[i] = p[from];
            q[i].probs_row = i;
        }
        struct call d = {ROWS - turn, V, NULL, turned, V, q, NULL, 0, 0, ROWS};
        sample_cuda(cuda, &d, other, again);
        for (int i = 0; i < ROWS - turn; i++) {
            int from = (i + turn) % ROWS;
            if (memcmp(&other[i], &out[from], sizeof *out) != 0)
                fail_msg("row %d at %d of %d: token %d, alone %d", from, i, ROWS - turn,
                         other[i].token, out[from].token);
            assert_memory_equal(again + i * V, probs + from * V, V * sizeof *probs);
        }
    }
    cuda->ops->close(cuda);
}

/* Draws follow the distribution, by inverse CDF and by noise: chi-square at a false-alarm rate of
 * 1e-6 a case, fixed seeds. */
static void test_cuda_sample_chi_square(void) {
    struct kern *cuda = cuda_or_skip();
    enum { V = 300, N = 4000, CALLS = 10, N_CASES = 5 };
    float *x = malloc((size_t)N * V * sizeof *x);
    struct kern_sample *p = malloc(N * sizeof *p);
    struct kern_sampled *out = malloc(N * sizeof *out);
    struct kern_sample cases[N_CASES];
    double want[V];
    for (int c = 0; c < N_CASES; c++) cases[c] = twin_neutral();
    cases[1].temperature = 0.6f;
    cases[2].top_k = 20;
    cases[3].top_p = 0.8f;
    cases[4].top_k = 50, cases[4].top_p = 0.9f, cases[4].min_p = 0.02f;
    for (int c = 0; c < 2 * N_CASES; c++) {
        int seen[V] = {0};
        cases[c / 2].gumbel = c % 2;
        twin_logits(x, V, (uint64_t)(c / 2) + 100, 1.5f);
        for (int i = 1; i < N; i++) memcpy(x + i * V, x, V * sizeof *x);
        assert_true(twin_probs(x, V, NULL, &cases[c / 2], NULL, want));
        for (int call = 0; call < CALLS; call++) {
            for (int i = 0; i < N; i++) {
                p[i] = cases[c / 2];
                p[i].seed = (uint64_t)(i % 200);
                p[i].position = call * N + i / 200;
            }
            struct call k = {N, V, NULL, x, V, p, NULL, 0, 0, 0};
            sample_cuda(cuda, &k, out, NULL);
            for (int i = 0; i < N; i++) {
                assert_in_range(out[i].token, 0, V - 1);
                seen[out[i].token]++;
            }
        }
        double excess = twin_chi_excess(seen, want, V, N * CALLS);
        if (!(excess < 1)) fail_msg("case %d: chi-square %g of its limit", c, excess);
    }
    free(x);
    free(p);
    free(out);
    cuda->ops->close(cuda);
}

const struct test tests[] = {
    {"cuda_sample_equals_cpu", TEST_GPU, 60000, test_cuda_sample_equals_cpu},
    {"cuda_sample_penalties", TEST_GPU, 60000, test_cuda_sample_penalties},
    {"cuda_sample_large", TEST_GPU, 60000, test_cuda_sample_large},
    {"cuda_sample_edges", TEST_GPU, 60000, test_cuda_sample_edges},
    {"cuda_sample_independent", TEST_GPU, 60000, test_cuda_sample_independent},
    {"cuda_sample_chi_square", TEST_GPU, 60000, test_cuda_sample_chi_square},
    {0},
};
