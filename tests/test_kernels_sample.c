/* Sampling against its twin in double (tests/sample_twin.h); thresholds that fall within 1e-6 of a
 * tie in probability are drawn again, so that rounding cannot decide. Draws are held to the exact
 * filtered distribution by chi-square at a false-alarm rate of 1e-6 a case with fixed seeds (so the
 * outcome never changes from run to run). */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/cpu.h"
#include "tests/sample_twin.h"

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

/* Every row's distribution to its own row of probs, where that is not NULL. */
static void run_ids(struct kern *k, int n, int vocab, const int32_t *ids, const float *logits,
                    size_t stride, const struct kern_sample *params, const struct kern_history *h,
                    struct kern_sampled *out, float *probs) {
    enum { MAX_ROWS = 64 };
    struct kern_sample p[MAX_ROWS];
    assert_in_range(n, 0, MAX_ROWS);
    for (int i = 0; i < n; i++) {
        p[i] = params[i];
        p[i].probs_row = probs ? i : -1;
    }
    size_t bytes = k->ops->sample_scratch_bytes(k, n, vocab);
    size_t all = (bytes + 63) / 64 * 64 + 64;
    uint8_t *scratch = aligned_alloc(64, all);
    assert_non_null(scratch);
    memset(scratch, 0xa5, all);
    assert_int_equal(k->ops->sample(k, n, vocab, ids, logits, stride, p, h, scratch, out, probs),
                     0);
    for (size_t i = bytes; i < all; i++) assert_int_equal(scratch[i], 0xa5);
    free(scratch);
}

static void run(struct kern *k, int n, int vocab, const float *logits, size_t stride,
                const struct kern_sample *p, const struct kern_history *h, struct kern_sampled *out,
                float *probs) {
    run_ids(k, n, vocab, NULL, logits, stride, p, h, out, probs);
}

struct entry {
    double x;
    int id;
};

static int by_logit(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    return x->x > y->x ? -1 : x->x < y->x ? 1 : x->id - y->id;
}

/* ---- Tests --------------------------------------------------------------------------------- */

static void test_sample_greedy(void) {
    enum { V = 5000 };
    static float x[3 * V];
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 2);
        if (!k) continue;
        twin_logits(x, 3 * V, 1, 3);
        x[4321] = x[1234] = 50; /* a tie: the lower id */
        x[2 * V + 77] = NAN;
        x[V + 100] = 60, x[V + 200] = 59, x[V + 300] = 58;
        struct kern_sample neutral = twin_neutral(), p[3] = {neutral, neutral, neutral};
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
            twin_logits(x, 40, 2, 1);
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
    struct kern_history h = {prompt, output, V, NULL};
    static const float temperatures[] = {0.05f, 0.7f, 1, 2.5f};
    static const int top_ks[] = {0, 1, 2, 40, 1000, 1201, 9999};
    static const float top_ps[] = {1, 0.999f, 0.95f, 0.5f, 0.01f}, min_ps[] = {0, 0.001f, 0.05f, 1};
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        int n_checked = 0, n_unclear = 0;
        for (int i = 0; i < 4 * 7 * 5 * 4; i++) {
            struct kern_sample p = twin_neutral();
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
            twin_logits(x, V, (uint64_t)i + 10, i % 2 ? 4 : 1);
            if (!twin_probs(x, V, NULL, &p, &h, want)) {
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
        struct kern_sample p = twin_neutral();
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

/* Both ways of drawing follow the distribution. */
static void test_sample_chi_square(void) {
    enum { V = 300, N = 20000, N_CASES = 7 };
    static float x[V];
    static double want[V];
    struct kern_sample cases[N_CASES];
    for (int c = 0; c < N_CASES; c++) cases[c] = twin_neutral();
    cases[1].temperature = 0.6f;
    cases[2].top_k = 20;
    cases[3].top_p = 0.8f;
    cases[4].min_p = 0.05f;
    cases[5].top_k = 50, cases[5].top_p = 0.9f, cases[5].min_p = 0.02f, cases[5].temperature = 1.4f;
    cases[6].n_banned = 2, cases[6].banned[0] = 3, cases[6].banned[1] = 299;
    struct kern *k = open_kern("plain", 1);
    for (int c = 0; c < 2 * N_CASES; c++) {
        struct kern_sample p = cases[c / 2];
        twin_logits(x, V, (uint64_t)(c / 2) + 100, 1.5f);
        assert_true(twin_probs(x, V, NULL, &p, NULL, want));
        p.gumbel = c % 2;
        static int seen[V];
        memset(seen, 0, sizeof seen);
        for (int i = 0; i < N; i++) {
            struct kern_sampled out;
            p.seed = (uint64_t)(i % 200);
            p.position = i / 200;
            static uint8_t scratch[1 << 16];
            k->ops->sample(k, 1, V, NULL, x, V, &p, NULL, scratch, &out, NULL);
            assert_in_range(out.token, 0, V - 1);
            seen[out.token]++;
        }
        double excess = twin_chi_excess(seen, want, V, N);
        if (!(excess < 1)) fail_msg("case %d: chi-square %g of its limit", c, excess);
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
    twin_logits(x, ROWS * STRIDE, 5, 2);
    for (int r = 0; r < ROWS; r++) {
        p[r] = twin_neutral();
        p[r].seed = (uint64_t)r / 4;
        p[r].position = r;
        p[r].top_k = r % 3 ? 0 : 30;
        p[r].top_p = r % 5 ? 1 : 0.9f;
        p[r].min_p = r % 7 ? 0 : 0.01f;
        p[r].gumbel = r % 4 == 3;
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
        twin_logits(x, V, 6, 3);
        x[900] = x[901] = x[1500];
        struct kern_sample p = twin_neutral();
        p.temperature = 0.3f;
        p.top_k = 5;
        p.n_banned = 1;
        p.n_logprobs = 20;
        p.want_logprob = 1;
        struct entry e[V];
        double sum = 0, top = -INFINITY;
        for (int i = 0; i < V; i++) {
            e[i] = (struct entry){(double)x[i], i};
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
            twin_logits(x, V, (uint64_t)i, spreads[i % 5]);
            struct kern_sample p = twin_neutral();
            p.top_p = i / 5 == 1 ? 0.9f : 1;
            p.top_k = i / 5 == 2 ? 500 : 0;
            p.seed = (uint64_t)i;
            struct kern_sampled out;
            if (!twin_probs(x, V, NULL, &p, NULL, want)) continue;
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

/* Draft tokens of a round count as output for the penalties: the same bits as with them counted in
 * the history. Repeated ones, ones of the prompt, ones counted before, a saturated count. */
static void test_sample_recent(void) {
    enum { V = 700 };
    static float x[V], got_probs[V], want_probs[V];
    static uint16_t prompt[2 * V], output[2 * V], counted[2 * V];
    static const int32_t recent[] = {9, 5, 5, 699, 40, 5, 0, 41, 9, 123, 5, 5, 5, 5, 5, 5, 5, 600};
    for (int i = 0; i < 2 * V; i++) {
        prompt[i] = i % 5 == 0;
        output[i] = i % 7 == 0 ? (uint16_t)(i % 4) : 0;
    }
    output[V + 41] = UINT16_MAX;
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        for (int i = 0; i < 200; i++) {
            struct kern_sample p = twin_neutral();
            p.temperature = 0.9f;
            p.repetition_penalty = i % 2 ? 1.3f : 1;
            p.presence_penalty = i % 3 ? 0.4f : 0;
            p.frequency_penalty = i % 5 ? 0.3f : 0;
            p.top_k = i % 4 == 0 ? 300 : 0;
            p.history = i % 2;
            p.seed = (uint64_t)i;
            p.gumbel = i % 3 == 1;
            p.first_recent = i % 3;
            p.n_recent = i % (KERN_MAX_DRAFT - 1);
            twin_logits(x, V, (uint64_t)i + 900, 2);
            struct kern_history h = {prompt, output, V, recent}, all = {prompt, counted, V, NULL};
            memcpy(counted, output, sizeof output);
            for (int r = 0; r < p.n_recent; r++) {
                uint16_t *c = &counted[(size_t)p.history * V + (size_t)recent[p.first_recent + r]];
                *c = *c == UINT16_MAX ? *c : (uint16_t)(*c + 1);
            }
            struct kern_sampled got, want;
            run(k, 1, V, x, V, &p, &h, &got, got_probs);
            p.n_recent = 0;
            run(k, 1, V, x, V, &p, &all, &want, want_probs);
            assert_memory_equal(&got, &want, sizeof got);
            assert_memory_equal(got_probs, want_probs, sizeof got_probs);
        }
        /* Without a history nothing is penalised; an id that the row lacks is passed over. */
        struct kern_sample p = twin_neutral();
        struct kern_history h = {prompt, output, V, recent};
        struct kern_sampled out;
        p.presence_penalty = 2;
        p.n_recent = 3;
        run(k, 1, V, x, V, &p, &h, &out, got_probs);
        p.n_recent = 0;
        run(k, 1, V, x, V, &p, &h, &out, want_probs);
        assert_memory_equal(got_probs, want_probs, sizeof got_probs);
        p.history = 0;
        p.n_recent = 3;
        run(k, 1, 8, x, V, &p, &h, &out, got_probs); /* 9 is not among 8 columns */
        assert_in_range(out.token, 0, 7);
        k->ops->close(k);
    }
}

/* A reduced head: columns are tokens ids[i]. The distribution is the twin's, tokens come back by
 * id, penalties, bans and draft tokens go by id, and the Gumbel draw is the one of a full row where
 * all else is impossible. */
static void test_sample_ids(void) {
    enum { V = 2000, N = 611 };
    static float x[N], full[V], probs[N];
    static double want[N];
    static int32_t ids[N];
    static uint16_t prompt[V], output[V];
    for (int i = 0; i < N; i++) ids[i] = i < 300 ? i : 300 + (i - 300) * 5 + i % 3;
    assert_true(ids[N - 1] < V);
    for (int i = 0; i < V; i++) {
        prompt[i] = i % 5 == 0;
        output[i] = i % 7 == 0 ? (uint16_t)(i % 4) : 0;
    }
    int32_t recent[4] = {ids[500], 4, ids[500], ids[301] + 1};
    struct kern_history h = {prompt, output, V, recent};
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 1);
        if (!k) continue;
        int n_checked = 0, n_high = 0;
        for (int i = 0; i < 240; i++) {
            struct kern_sample p = twin_neutral();
            twin_logits(x, N, (uint64_t)i + 1700, 2);
            p.temperature = i % 2 ? 0.7f : 1;
            p.top_k = i % 3 ? 0 : 60;
            p.top_p = i % 5 ? 1 : 0.9f;
            p.gumbel = i % 4 >= 2;
            p.purpose = i % 7 ? RNG_DRAFT : RNG_SAMPLE;
            p.seed = (uint64_t)i;
            p.n_banned = 3;
            p.banned[0] = ids[i], p.banned[1] = ids[610 - i], p.banned[2] = ids[301] + 1;
            if (i % 2) {
                p.history = 0;
                p.repetition_penalty = 1.2f, p.presence_penalty = 0.5f, p.frequency_penalty = 0.1f;
                p.n_recent = i % 5;
            }
            if (p.n_recent > 4) p.n_recent = 4;
            if (!twin_probs(x, N, ids, &p, &h, want)) continue;
            struct kern_sampled out, wide;
            p.n_logprobs = 5;
            run_ids(k, 1, N, ids, x, N, &p, &h, &out, probs);
            for (int c = 0; c < N; c++) assert_near(probs[c], want[c], want[c] * 4e-5 + 2e-38);
            int col = 0;
            while (col < N && ids[col] != out.token) col++;
            assert_true(col < N && want[col] > 0);
            n_high += col >= 300;
            n_checked++;
            for (int t = 0; t < V; t++) full[t] = -INFINITY;
            for (int c = 0; c < N; c++) full[ids[c]] = x[c];
            run(k, 1, V, full, V, &p, &h, &wide, NULL);
            assert_int_equal(wide.token, out.token);
            for (int t = 0; t < 5; t++) assert_int_equal(wide.top_id[t], out.top_id[t]);
            assert_near(wide.logprob, out.logprob, 1e-6);
            p.temperature = 0;
            run_ids(k, 1, N, ids, x, N, &p, &h, &out, NULL);
            run(k, 1, V, full, V, &p, &h, &wide, NULL);
            assert_int_equal(wide.token, out.token);
        }
        assert_true(n_checked > 200 && n_high > 50);
        k->ops->close(k);
    }
}

/* Gumbel draws: exactly the largest log p + noise, found here over every token in double, whatever
 * the set, the purpose, and the size of the row; steep rows and flat ones, where pruning sees
 * everything and nothing. */
static void test_sample_gumbel(void) {
    static const int sizes[] = {1, 2, 15, 63, 64, 65, 1000, 50257};
    static const float spreads[] = {0, 0.01f, 1, 3, 40};
    enum { V = 50257 };
    static float x[V];
    static double want[V];
    for (int i = 0; i < 200; i++) {
        int v = sizes[i % 8];
        struct kern_sample p = twin_neutral();
        if (v == V && i >= 120) continue; /* the twin sorts */
        twin_logits(x, v, (uint64_t)i + 2500, spreads[i % 5]);
        p.temperature = i % 3 ? 1 : 0.7f;
        p.top_k = i % 4 == 1 ? 30 : 0;
        p.top_p = i % 7 == 2 ? 0.9f : 1;
        p.min_p = i % 11 == 3 ? 0.02f : 0;
        p.seed = (uint64_t)i * 0x9e3779b97f4a7c15u;
        p.position = (int64_t)i << (i % 2 ? 33 : 0);
        p.gumbel = 1;
        if (!twin_probs(x, v, NULL, &p, NULL, want)) continue;
        int best = -1;
        double top = -INFINITY, second = -INFINITY;
        for (int t = 0; t < v; t++) {
            double u =
                (rng_u32(p.seed, (uint64_t)p.position, RNG_GUMBEL, (uint32_t)t) + 0.5) * 0x1p-32;
            double sum = log(want[t]) - log(-log(u));
            if (sum > top) {
                second = top;
                top = sum;
                best = t;
            } else if (sum > second) second = sum;
        }
        if (top - second < 1e-9) continue; /* rounding would decide */
        for (int n = 0; n < N_NAMES; n++) {
            struct kern *k = open_kern(names[n], 1);
            if (!k) continue;
            struct kern_sampled out;
            p.purpose = n % 2 ? RNG_SAMPLE : RNG_DRAFT;
            run(k, 1, v, x, (size_t)v, &p, NULL, &out, NULL);
            assert_int_equal(out.token, best);
            k->ops->close(k);
        }
    }
}

/* The draw inverts the distribution at the uniform of its purpose; another purpose, seed or
 * position is another draw. And a row's distribution goes to probs_row, nowhere else. */
static void test_sample_purpose(void) {
    enum { V = 3000, N = 400, ROWS = 4 };
    static float x[ROWS * V], probs[3 * V];
    static double want[V];
    struct kern *k = open_kern("plain", 2);
    int n_same = 0;
    for (int i = 0; i < N; i++) {
        struct kern_sample p = twin_neutral();
        struct kern_sampled out[2];
        double margin;
        twin_logits(x, V, (uint64_t)i + 3300, 1.5f);
        p.top_k = i % 2 ? 0 : 100;
        p.seed = (uint64_t)i;
        p.position = i % 10;
        if (!twin_probs(x, V, NULL, &p, NULL, want)) continue;
        for (int d = 0; d < 2; d++) {
            p.purpose = d ? RNG_DRAFT : RNG_SAMPLE;
            run(k, 1, V, x, V, &p, NULL, &out[d], NULL);
            int token = twin_invert(want, V, twin_uniform(&p, p.purpose), &margin);
            if (margin > 1e-6) assert_int_equal(out[d].token, token);
        }
        n_same += out[0].token == out[1].token;
    }
    assert_true(n_same < N / 4);
    struct kern_sample p[ROWS] = {twin_neutral(), twin_neutral(), twin_neutral(), twin_neutral()};
    struct kern_sampled out[ROWS];
    size_t bytes = k->ops->sample_scratch_bytes(k, ROWS, V);
    void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    twin_logits(x, ROWS * V, 3299, 1);
    memset(probs, 0x55, sizeof probs);
    p[0].probs_row = 2;
    p[2].probs_row = 0;
    p[2].gumbel = 1;
    assert_int_equal(k->ops->sample(k, ROWS, V, NULL, x, V, p, NULL, scratch, out, probs), 0);
    for (int r = 0; r < 3; r += 2) {
        assert_true(twin_probs(x + r * V, V, NULL, &p[r], NULL, want));
        for (int t = 0; t < V; t++) assert_near(probs[(2 - r) * V + t], want[t], want[t] * 4e-5);
    }
    for (size_t b = V * sizeof *probs; b < 2 * V * sizeof *probs; b++)
        assert_int_equal(((uint8_t *)probs)[b], 0x55);
    free(scratch);
    k->ops->close(k);
}

const struct test tests[] = {
    {"sample_greedy", TEST_QUICK, 60000, test_sample_greedy},
    {"sample_filters", TEST_QUICK, 240000, test_sample_filters},
    {"sample_ties", TEST_QUICK, 60000, test_sample_ties},
    {"sample_chi_square", TEST_QUICK, 240000, test_sample_chi_square},
    {"sample_deterministic", TEST_QUICK, 240000, test_sample_deterministic},
    {"sample_logprobs", TEST_QUICK, 60000, test_sample_logprobs},
    {"sample_recent", TEST_QUICK, 60000, test_sample_recent},
    {"sample_ids", TEST_QUICK, 60000, test_sample_ids},
    {"sample_gumbel", TEST_QUICK, 60000, test_sample_gumbel},
    {"sample_purpose", TEST_QUICK, 60000, test_sample_purpose},
    {"sample_large_vocab", TEST_QUICK, 240000, test_sample_large_vocab},
    {0},
};
