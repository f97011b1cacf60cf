/* Sampling. The twin sorts whole rows and sums in double, straight from the definitions; thresholds
 * that fall within 1e-6 of a tie in probability are drawn again, so that rounding cannot decide.
 * Draws are held to the exact filtered distribution by chi-square at a false-alarm rate of 1e-6 a
 * case with fixed seeds (so the outcome never changes from run to run). */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/cpu.h"

static const char *const names[] = {"reference", "plain", "avx2", "avx512"};
enum { N_NAMES = sizeof names / sizeof *names };

static struct kern *open_kern(const char *name, int n_threads) {
    struct kern *k;
    bool reference = !strcmp(name, "reference");
    struct kern_options o = {.n_threads = n_threads,
                             .isa = reference ? NULL : name,
                             .precision = reference ? KERN_REFERENCE : KERN_FAST};
    return kern_cpu_open(&k, &o, NULL) == 0 ? k : NULL;
}

static const struct kern_sample neutral = {
    .temperature = 1, .top_p = 1, .repetition_penalty = 1, .history = -1};

static void run(struct kern *k, int n, int vocab, const float *logits, size_t stride,
                const struct kern_sample *p, const struct kern_history *h, struct kern_sampled *out,
                float *probs) {
    size_t bytes = k->ops->sample_scratch_bytes(k, n, vocab);
    size_t all = (bytes + 63) / 64 * 64 + 64;
    uint8_t *scratch = aligned_alloc(64, all);
    assert_non_null(scratch);
    memset(scratch, 0xa5, all);
    assert_int_equal(k->ops->sample(k, n, vocab, logits, stride, p, h, scratch, out, probs), 0);
    for (size_t i = bytes; i < all; i++) assert_int_equal(scratch[i], 0xa5);
    free(scratch);
}

/* Peaked like a model's: most far below the best few. */
static void random_logits(float *x, int n, uint64_t salt, float spread) {
    for (int i = 0; i < n; i++) {
        float u = rng_uniform(salt, (uint64_t)i, RNG_TEST, 0),
              v = rng_uniform(salt, (uint64_t)i, RNG_TEST, 1);
        x[i] = spread * sqrtf(-2 * logf(u + 1e-7f)) * cosf(6.2831853f * v);
    }
}

/* ---- The twin ------------------------------------------------------------------------------ */

struct entry {
    double x, p;
    int id;
};

static int by_logit(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    return x->x > y->x ? -1 : x->x < y->x ? 1 : x->id - y->id;
}

/* The filtered distribution; false where a threshold is too near a tie to be judged. */
static bool twin(const float *logits, int vocab, const struct kern_sample *p,
                 const struct kern_history *h, double *probs) {
    struct entry *e = malloc((size_t)vocab * sizeof *e);
    bool clear = true;
    for (int i = 0; i < vocab; i++) {
        double x = (double)logits[i];
        if (h && p->history >= 0) {
            size_t at = (size_t)p->history * h->stride + (size_t)i;
            double r = (double)p->repetition_penalty, n = h->output[at];
            if (h->prompt[at] || h->output[at]) x = x > 0 ? x / r : x * r;
            if (n > 0) x -= (double)p->presence_penalty + n * (double)p->frequency_penalty;
        }
        for (int b = 0; b < p->n_banned; b++)
            if (p->banned[b] == i) x = -INFINITY;
        e[i] = (struct entry){x, 0, i};
    }
    qsort(e, (size_t)vocab, sizeof *e, by_logit);
    double sum = 0, run_sum = 0;
    int keep = p->top_k > 0 && p->top_k < vocab ? p->top_k : vocab;
    for (int i = 0; i < keep; i++) sum += e[i].p = exp((e[i].x - e[0].x) / (double)p->temperature);
    if (p->top_p < 1) {
        int n = 0;
        while (n < keep && (n == 0 || run_sum < (double)p->top_p * sum)) {
            run_sum += e[n++].p;
            if (fabs(run_sum / sum - (double)p->top_p) < 1e-6) clear = false;
        }
        keep = n;
    }
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
    for (int i = 0; i < keep; i++) probs[e[i].id] = e[i].p / sum;
    free(e);
    return clear;
}

/* ---- Tests --------------------------------------------------------------------------------- */

static void test_sample_greedy(void) {
    enum { V = 5000 };
    static float x[3 * V];
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 2);
        if (!k) continue;
        random_logits(x, 3 * V, 1, 3);
        x[4321] = x[1234] = 50; /* a tie: the lower id */
        x[2 * V + 77] = NAN;
        x[V + 100] = 60, x[V + 200] = 59, x[V + 300] = 58;
        struct kern_sample p[3] = {neutral, neutral, neutral};
        for (int i = 0; i < 3; i++) p[i].temperature = 0;
        p[1].n_banned = 2;
        p[1].banned[0] = 100;
        p[1].banned[1] = 200;
        struct kern_sampled out[3];
        static float probs[3 * V];
        run(k, 3, V, x, V, p, NULL, out, probs);
        assert_int_equal(out[0].token, 1234);
        assert_int_equal(out[1].token, 300);
        assert_int_equal(out[2].token, -1);
        for (int i = 0; i < V; i++) {
            assert_true(probs[i] == (i == 1234));
            assert_true(probs[V + i] == (i == 300));
            assert_true(probs[2 * V + i] == 0);
        }
        /* NaN at every place of a small row, also under a ban and with chance; nothing left to
         * draw. */
        for (int at = 0; at < 40; at++) {
            random_logits(x, 40, 2, 1);
            x[at] = NAN;
            p[0] = neutral;
            p[0].temperature = (float)(at % 2);
            p[0].n_banned = 1;
            p[0].banned[0] = at;
            run(k, 1, 40, x, 40, p, NULL, out, NULL);
            assert_int_equal(out[0].token, -1);
        }
        for (int i = 0; i < 40; i++) x[i] = -INFINITY;
        for (int t = 0; t < 2; t++) {
            p[0] = neutral;
            p[0].temperature = (float)t;
            run(k, 1, 40, x, 40, p, NULL, out, NULL);
            assert_int_equal(out[0].token, -1);
        }
        x[7] = 0; /* one that can be drawn among impossible ones */
        run(k, 1, 40, x, 40, p, NULL, out, NULL);
        assert_int_equal(out[0].token, 7);
        k->ops->close(k);
    }
}

/* The distribution that comes back is the twin's for every mix of filters and penalties; the f32
 * weights' relative error is some 2e-7 plus that of the exponent, |x| / T * 6e-8. */
static void test_sample_filters(void) {
    enum { V = 1201, N_HISTORIES = 2 };
    static float x[V], probs[V];
    static double want[V];
    static uint16_t prompt[N_HISTORIES * V], output[N_HISTORIES * V];
    for (int i = 0; i < N_HISTORIES * V; i++) {
        prompt[i] = rng_u32(3, (uint64_t)i, RNG_TEST, 0) % 5 == 0;
        output[i] = rng_u32(4, (uint64_t)i, RNG_TEST, 0) % 7 == 0 ? (uint16_t)(i % 4) : 0;
    }
    struct kern_history h = {prompt, output, V};
    static const float temperatures[] = {0.05f, 0.7f, 1, 2.5f};
    static const int top_ks[] = {0, 1, 2, 40, 1000, 1201, 9999};
    static const float top_ps[] = {1, 0.999f, 0.95f, 0.5f, 0.01f}, min_ps[] = {0, 0.001f, 0.05f, 1};
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        int n_checked = 0, n_unclear = 0;
        for (int i = 0; i < 4 * 7 * 5 * 4; i++) {
            struct kern_sample p = neutral;
            p.temperature = temperatures[i % 4];
            p.top_k = top_ks[i / 4 % 7];
            p.top_p = top_ps[i / 28 % 5];
            p.min_p = min_ps[i / 140 % 4];
            p.seed = (uint64_t)i;
            if (i % 3 == 0) {
                p.history = i % 2;
                p.repetition_penalty = 1.3f;
                p.presence_penalty = 0.4f;
                p.frequency_penalty = -0.2f;
            }
            p.n_banned = i % 5 == 0 ? 8 : 0;
            for (int b = 0; b < 8; b++) p.banned[b] = b * 150;
            random_logits(x, V, (uint64_t)i + 10, i % 2 ? 4 : 1);
            if (!twin(x, V, &p, &h, want)) {
                n_unclear++;
                continue;
            }
            struct kern_sampled out;
            run(k, 1, V, x, V, &p, &h, &out, probs);
            assert_true(out.token >= 0 && want[out.token] > 0);
            /* what would be subnormal counts as 0 */
            for (int t = 0; t < V; t++) {
                assert_near(probs[t], want[t], want[t] * 4e-5 + 2e-38);
                assert_true((probs[t] > 0) == (want[t] > 1e-44) || want[t] < 1e-30);
            }
            n_checked++;
        }
        assert_true(n_checked > 500 && n_unclear < 60);
        k->ops->close(k);
    }
}

/* Equal logits: exactly k stay, those of the lowest ids; zeros of both signs are equal. */
static void test_sample_ties(void) {
    enum { V = 200 };
    float x[V], probs[V];
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        for (int i = 0; i < V; i++) x[i] = i % 2 ? 0.f : -0.f;
        struct kern_sample p = neutral;
        struct kern_sampled out;
        p.top_k = 7;
        run(k, 1, V, x, V, &p, NULL, &out, probs);
        for (int i = 0; i < V; i++) assert_near(probs[i], i < 7 ? 1. / 7 : 0, 1e-7);
        p.top_k = 0;
        p.top_p = 0.4999f; /* 100 of 200 equals */
        run(k, 1, V, x, V, &p, NULL, &out, probs);
        for (int i = 0; i < V; i++) assert_near(probs[i], i < 100 ? 0.01 : 0, 1e-8);
        p.top_k = 50;
        p.top_p = 0.4999f; /* of what top-k left: 25 */
        run(k, 1, V, x, V, &p, NULL, &out, probs);
        for (int i = 0; i < V; i++) assert_near(probs[i], i < 25 ? 0.04 : 0, 1e-8);
        k->ops->close(k);
    }
}

/* Wilson and Hilferty: chi-square of f degrees is about f (1 - 2/9f + z sqrt(2/9f))^3; z = 4.75 for
 * 1e-6. */
static double chi_square_limit(int f) {
    double a = 2.0 / (9.0 * f);
    return f * pow(1 - a + 4.75 * sqrt(a), 3);
}

static void test_sample_chi_square(void) {
    enum { V = 300, N = 20000 };
    static float x[V];
    static double want[V];
    struct kern_sample cases[7] = {neutral, neutral, neutral, neutral, neutral, neutral, neutral};
    cases[1].temperature = 0.6f;
    cases[2].top_k = 20;
    cases[3].top_p = 0.8f;
    cases[4].min_p = 0.05f;
    cases[5].top_k = 50, cases[5].top_p = 0.9f, cases[5].min_p = 0.02f, cases[5].temperature = 1.4f;
    cases[6].n_banned = 2, cases[6].banned[0] = 3, cases[6].banned[1] = 299;
    struct kern *k = open_kern("plain", 1);
    for (int c = 0; c < 7; c++) {
        random_logits(x, V, (uint64_t)c + 100, 1.5f);
        assert_true(twin(x, V, &cases[c], NULL, want));
        static int seen[V];
        memset(seen, 0, sizeof seen);
        struct kern_sample p = cases[c];
        for (int i = 0; i < N; i++) {
            struct kern_sampled out;
            p.seed = (uint64_t)(i % 200);
            p.position = i / 200;
            static uint8_t scratch[1 << 16];
            k->ops->sample(k, 1, V, x, V, &p, NULL, scratch, &out, NULL);
            assert_in_range(out.token, 0, V - 1);
            seen[out.token]++;
        }
        double chi = 0, rare = 0, rare_seen = 0;
        int f = -1;
        for (int i = 0; i < V; i++) {
            if (want[i] == 0) assert_int_equal(seen[i], 0);
            if (want[i] * N < 10) { /* pool the rare ones */
                rare += want[i] * N;
                rare_seen += seen[i];
                continue;
            }
            chi += (seen[i] - want[i] * N) * (seen[i] - want[i] * N) / (want[i] * N);
            f++;
        }
        if (rare > 5) {
            chi += (rare_seen - rare) * (rare_seen - rare) / rare;
            f++;
        }
        if (chi > chi_square_limit(f))
            fail_msg("case %d: chi-square %g of %d, limit %g", c, chi, f, chi_square_limit(f));
    }
    k->ops->close(k);
}

/* A draw is a function of its row, seed and position: not of neighbours, threads or an earlier
 * call; and the sets agree on it (their exponentials have the same bits). */
static void test_sample_deterministic(void) {
    enum { V = 4097, ROWS = 33, STRIDE = 4100 };
    static float x[ROWS * STRIDE];
    struct kern_sample p[ROWS];
    struct kern_sampled first[ROWS], got[ROWS];
    random_logits(x, ROWS * STRIDE, 5, 2);
    for (int r = 0; r < ROWS; r++) {
        p[r] = neutral;
        p[r].seed = (uint64_t)r / 4;
        p[r].position = r;
        p[r].top_k = r % 3 ? 0 : 30;
        p[r].top_p = r % 5 ? 1 : 0.9f;
        p[r].min_p = r % 7 ? 0 : 0.01f;
    }
    bool have = false;
    for (int n = 1; n < N_NAMES; n++)
        for (int threads = 1; threads <= 3; threads++) {
            struct kern *k = open_kern(names[n], threads);
            if (!k) continue;
            run(k, ROWS, V, x, STRIDE, p, NULL, got, NULL);
            if (!have) memcpy(first, got, sizeof first);
            have = true;
            for (int r = 0; r < ROWS; r++) {
                assert_int_equal(got[r].token, first[r].token);
                struct kern_sampled alone;
                run(k, 1, V, x + r * STRIDE, STRIDE, &p[r], NULL, &alone, NULL);
                assert_int_equal(alone.token, first[r].token);
            }
            k->ops->close(k);
        }
    int n_same = 0;
    for (int r = 1; r < ROWS; r++) n_same += first[r].token == first[0].token;
    assert_true(n_same < 8);
}

/* Log-probabilities are of the raw logits whatever the filters; the best ones in order, ties by id.
 */
static void test_sample_logprobs(void) {
    enum { V = 2000 };
    static float x[V];
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        random_logits(x, V, 6, 3);
        x[900] = x[901] = x[1500];
        struct kern_sample p = neutral;
        p.temperature = 0.3f;
        p.top_k = 5;
        p.n_banned = 1;
        p.n_logprobs = 20;
        p.want_logprob = 1;
        struct entry e[V];
        double sum = 0, top = -INFINITY;
        for (int i = 0; i < V; i++) {
            e[i] = (struct entry){(double)x[i], 0, i};
            top = fmax(top, (double)x[i]);
        }
        qsort(e, V, sizeof *e, by_logit);
        p.banned[0] = e[0].id;
        for (int i = 0; i < V; i++) sum += exp((double)x[i] - top);
        struct kern_sampled out;
        run(k, 1, V, x, V, &p, NULL, &out, NULL);
        assert_true(out.token != e[0].id);
        assert_near(out.logprob, (double)x[out.token] - top - log(sum), 2e-6);
        for (int i = 0; i < 20; i++) {
            assert_int_equal(out.top_id[i], e[i].id);
            assert_near(out.top_logprob[i], e[i].x - top - log(sum), 2e-6);
        }
        /* fewer tokens than asked for */
        run(k, 1, 3, x, 3, &p, NULL, &out, NULL);
        assert_int_equal(out.top_id[3], -1);
        assert_true(out.top_id[2] >= 0);
        k->ops->close(k);
    }
}

/* Rows flat and steep at a real vocabulary's size (GPT-2's), so that every depth of the search is
 * taken. */
static void test_sample_large_vocab(void) {
    enum { V = 50257 };
    static float x[V], probs[V];
    static double want[V];
    static const float spreads[] = {0, 0.001f, 1, 8, 200};
    for (int n = 1; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        for (int i = n - 1; i < 15; i += n) { /* each set other ones */
            random_logits(x, V, (uint64_t)i, spreads[i % 5]);
            struct kern_sample p = neutral;
            p.top_p = i / 5 == 1 ? 0.9f : 1;
            p.top_k = i / 5 == 2 ? 500 : 0;
            p.seed = (uint64_t)i;
            struct kern_sampled out;
            if (!twin(x, V, &p, NULL, want)) continue;
            run(k, 1, V, x, V, &p, NULL, &out, probs);
            double sum = 0, off = 0;
            for (int t = 0; t < V; t++) {
                sum += (double)probs[t];
                off += fabs((double)probs[t] - want[t]);
            }
            assert_near(sum, 1, 1e-6);
            assert_near(off, 0, 1e-4);
            assert_true(out.token >= 0 && want[out.token] > 0);
        }
        k->ops->close(k);
    }
}

const struct test tests[] = {
    {"sample_greedy", TEST_QUICK, 60000, test_sample_greedy},
    {"sample_filters", TEST_QUICK, 240000, test_sample_filters},
    {"sample_ties", TEST_QUICK, 60000, test_sample_ties},
    {"sample_chi_square", TEST_QUICK, 240000, test_sample_chi_square},
    {"sample_deterministic", TEST_QUICK, 240000, test_sample_deterministic},
    {"sample_logprobs", TEST_QUICK, 60000, test_sample_logprobs},
    {"sample_large_vocab", TEST_QUICK, 240000, test_sample_large_vocab},
    {0},
};
