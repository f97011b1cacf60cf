/* Rounds decided by kern_ops.accept: equal bits to `sample`, a twin in double token by token,
 * hostile inputs, threads and neighbours. tests/test_accept_law.c holds the law. */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/cpu.h"
#include "tests/accept_victim.h"
#include "tests/sample_twin.h"

static struct kern *open_kern(const char *isa, int n_threads) {
    struct kern *k;
    struct kern_options o = {.n_threads = n_threads, .isa = isa};
    return kern_cpu_open(&k, &o, NULL) == 0 ? k : NULL;
}

/* accept with fresh scratch, whose end is watched. */
static void accept(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                   const struct kern_sample *params, const struct kern_history *h,
                   const struct kern_round *rounds, const int32_t *draft,
                   const struct kern_draft_probs *q, int32_t *n_accepted,
                   struct kern_sampled *out) {
    size_t bytes = k->ops->accept_scratch_bytes(k, n_rounds, vocab);
    size_t all = (bytes + 63) / 64 * 64 + 64;
    uint8_t *scratch = aligned_alloc(64, all);
    assert_non_null(scratch);
    memset(scratch, 0xa5, all);
    assert_int_equal(k->ops->accept(k, n_rounds, vocab, logits, stride, params, h, rounds, draft, q,
                                    scratch, n_accepted, out),
                     0);
    for (size_t i = bytes; i < all; i++) assert_int_equal(scratch[i], 0xa5);
    free(scratch);
}

static void sample(struct kern *k, int n, int vocab, const int32_t *ids, const float *logits,
                   size_t stride, const struct kern_sample *params, const struct kern_history *h,
                   struct kern_sampled *out, float *probs) {
    void *scratch = aligned_alloc(64, (k->ops->sample_scratch_bytes(k, n, vocab) + 63) / 64 * 64);
    assert_non_null(scratch);
    k->ops->sample(k, n, vocab, ids, logits, stride, params, h, scratch, out, probs);
    free(scratch);
}

static const char *const sets[] = {"plain", "avx2", "avx512"};
enum { N_SETS = sizeof sets / sizeof *sets };

/* A round of no draft token is `sample`, bit for bit, log-probabilities included. */
static void test_accept_no_draft(void) {
    enum { N = 60, VOCAB = 1003, STRIDE = 1010 };
    static float x[N * STRIDE];
    struct kern_sample p[N];
    struct kern_round rounds[N];
    struct kern_sampled want[N], got[N];
    int32_t n_accepted[N];
    twin_logits(x, N * STRIDE, 7, 2);
    for (int i = 0; i < N; i++) {
        p[i] = accept_mixed(i);
        rounds[i] = (struct kern_round){0, N - 1 - i, 0, i % 2 - 1};
    }
    x[5 * STRIDE + 17] = NAN;
    for (int s = 0; s < N_SETS; s++) {
        struct kern *k = open_kern(sets[s], 2);
        if (!k) continue;
        sample(k, N, VOCAB, NULL, x, STRIDE, p, NULL, want, NULL);
        memset(got, 0xee, sizeof got);
        accept(k, N, VOCAB, x, STRIDE, p, NULL, rounds, NULL, NULL, n_accepted, got);
        assert_memory_equal(got, want, sizeof got);
        for (int i = 0; i < N; i++) assert_int_equal(n_accepted[i], 0);
        assert_int_equal(got[5].token, -1);
        k->ops->close(k);
    }
}

/* Greedy, Gumbel and undrawn proposals: the tokens are those of plain draws whatever was proposed,
 * and as many are accepted as agree; rows behind the round's end are left alone. Greedy rounds with
 * q (a greedy draft's, all on its token) say the same. */
static void test_accept_matches_draws(void) {
    enum { N = 40, VOCAB = 200, ROWS = N * (KERN_MAX_DRAFT + 1) };
    static float x[ROWS * VOCAB], q_probs[ROWS * VOCAB];
    static struct kern_sample p[ROWS];
    static struct kern_sampled plain[ROWS], got[ROWS], untouched;
    struct kern_round rounds[N];
    int32_t draft[ROWS], n_accepted[N];
    struct kern_draft_probs q = {q_probs, VOCAB, VOCAB, NULL};
    memset(&untouched, 0xee, sizeof untouched);
    twin_logits(x, ROWS * VOCAB, 8, 2);
    for (int s = 0; s < N_SETS; s++) {
        struct kern *k = open_kern(sets[s], 3);
        if (!k) continue;
        int n_full = 0, n_cut = 0;
        for (int r = 0; r < ROWS; r++) {
            p[r] = accept_mixed(r);
            if (r / (KERN_MAX_DRAFT + 1) % 3 == 0) p[r].temperature = 0;
            if (r / (KERN_MAX_DRAFT + 1) % 3 == 1) p[r].gumbel = 1;
        }
        sample(k, ROWS, VOCAB, NULL, x, VOCAB, p, NULL, plain, NULL);
        memset(q_probs, 0, sizeof q_probs);
        for (int i = 0; i < N; i++) {
            int first = i * (KERN_MAX_DRAFT + 1);
            bool with_q = i % 6 == 3; /* greedy */
            rounds[i] =
                (struct kern_round){i % (KERN_MAX_DRAFT + 1), first, first, with_q ? first : -1};
            for (int j = 0; j < rounds[i].n_draft; j++) {
                bool off = rng_u32(9, (uint64_t)(first + j), RNG_TEST, 0) % 8 == 0;
                draft[first + j] = (plain[first + j].token + off) % VOCAB;
                q_probs[(first + j) * VOCAB + draft[first + j]] = 1;
            }
        }
        memset(got, 0xee, sizeof got);
        accept(k, N, VOCAB, x, VOCAB, p, NULL, rounds, draft, &q, n_accepted, got);
        for (int i = 0; i < N; i++) {
            int first = rounds[i].first_row, n = 0;
            while (n < rounds[i].n_draft && draft[first + n] == plain[first + n].token) n++;
            assert_int_equal(n_accepted[i], n);
            assert_memory_equal(&got[first], &plain[first], (size_t)(n + 1) * sizeof *got);
            for (int j = n + 1; j <= KERN_MAX_DRAFT; j++)
                assert_memory_equal(&got[first + j], &untouched, sizeof untouched);
            n_full += rounds[i].n_draft > 0 && n == rounds[i].n_draft;
            n_cut += n < rounds[i].n_draft;
        }
        assert_true(n_full > 3 && n_cut > 10);
        k->ops->close(k);
    }
}

/* A draft whose distribution is the target's is always accepted: under Gumbel noise, as both take
 * the same token, and without, as u < 1. */
static void test_accept_identical(void) {
    enum { N = 50, D = KERN_MAX_DRAFT, VOCAB = 3001, ROWS = D + 1 };
    static float x[ROWS * VOCAB], q_probs[D * VOCAB];
    struct kern_sample p[ROWS], d[D];
    struct kern_sampled drawn[D], got[ROWS];
    struct kern_draft_probs q = {q_probs, VOCAB, VOCAB, NULL};
    int32_t draft[D], n_accepted;
    struct kern *k = open_kern(NULL, 2);
    for (int i = 0; i < N; i++) {
        twin_logits(x, ROWS * VOCAB, (uint64_t)i + 20, 1.5f);
        for (int r = 0; r < ROWS; r++) {
            p[r] = accept_mixed(i);
            p[r].gumbel = i % 2;
            p[r].position = r;
            if (r == D) break;
            d[r] = p[r];
            d[r].purpose = RNG_DRAFT;
            d[r].probs_row = r;
        }
        sample(k, D, VOCAB, NULL, x, VOCAB, d, NULL, drawn, q_probs);
        for (int r = 0; r < D; r++) draft[r] = drawn[r].token;
        struct kern_round round = {D, 0, 0, i % 2 && i % 4 == 1 ? -1 : 0};
        accept(k, 1, VOCAB, x, VOCAB, p, NULL, &round, draft, &q, &n_accepted, got);
        assert_int_equal(n_accepted, D);
        for (int r = 0; r < D; r++) assert_int_equal(got[r].token, draft[r]);
    }
    k->ops->close(k);
}

/* Random rounds against the twin, token by token: penalties that see the draft tokens before each
 * row, filters, bans, q of a model, of a reduced head, and none. */
static void test_accept_twin(void) {
    enum { N = 1500, VOCAB = 60, D = 5, ROWS = D + 1, HEAD_N = 31 };
    static float x[ROWS * VOCAB], y[ROWS * VOCAB], q_probs[ROWS * VOCAB];
    static uint16_t prompt[VOCAB], output[VOCAB];
    static int32_t ids[HEAD_N];
    for (int i = 0; i < HEAD_N; i++) ids[i] = 2 * i - i / 30;
    for (int i = 0; i < VOCAB; i++) {
        prompt[i] = i % 5 == 0;
        output[i] = i % 7 == 0 ? (uint16_t)(i % 3) : 0;
    }
    for (int s = 0; s < N_SETS; s++) {
        struct kern *k = open_kern(sets[s], 1);
        if (!k) continue;
        int n_compared = 0, n_by_length[ROWS] = {0};
        for (int i = 0; i < N; i++) {
            struct kern_sample p[ROWS];
            struct kern_sampled got[ROWS], drawn;
            int32_t draft[D], n_accepted;
            struct kern_history h = {prompt, output, VOCAB, draft};
            struct kern_round round = {1 + i % D, 0, 0, i % 3 == 2 ? -1 : 0};
            struct kern_draft_probs q = {q_probs, VOCAB, VOCAB, NULL};
            if (i % 3 == 1) q = (struct kern_draft_probs){q_probs, HEAD_N, HEAD_N, ids};
            twin_logits(x, ROWS * VOCAB, (uint64_t)i + 5000, 1.5f);
            twin_logits(y, ROWS * VOCAB, (uint64_t)i + 15000, 0.6f);
            for (int r = 0; r <= round.n_draft; r++) {
                p[r] = accept_mixed(i);
                if (p[r].temperature == 0) p[r].temperature = 0.5f;
                p[r].gumbel = 0;
                p[r].position = 10 + r;
                p[r].n_recent = r;
                if (i % 4 < 2) {
                    p[r].history = 0;
                    p[r].repetition_penalty = 1.2f, p[r].presence_penalty = 0.6f;
                    p[r].frequency_penalty = 0.3f;
                }
                if (r == round.n_draft) break;
                struct kern_sample d = p[r];
                d.purpose = RNG_DRAFT;
                d.probs_row = r;
                for (int c = 0; c < q.n; c++)
                    y[r * VOCAB + c] += x[r * VOCAB + (q.ids ? ids[c] : c)];
                sample(k, 1, q.n, q.ids, y + r * VOCAB, VOCAB, &d, &h, &drawn, q_probs);
                draft[r] = drawn.token;
            }
            accept(k, 1, VOCAB, x, VOCAB, p, &h, &round, draft, &q, &n_accepted, got);
            struct twin_round want =
                twin_accept(VOCAB, x, VOCAB, p, &h, &round, draft, &q, TWIN_RIGHT);
            if (want.margin < 1e-5) continue;
            assert_int_equal(n_accepted, want.n_accepted);
            for (int r = 0; r <= n_accepted; r++) assert_int_equal(got[r].token, want.token[r]);
            n_by_length[n_accepted]++;
            n_compared++;
        }
        assert_true(n_compared > N * 9 / 10);
        for (int r = 0; r <= D; r++)
            if (n_by_length[r] < 4) fail_msg("%s: %d rounds of %d", sets[s], n_by_length[r], r);
        k->ops->close(k);
    }
}

/* Penalties see the draft tokens: a round's rows are those of `sample` with the tokens before each
 * counted in a history. */
static void test_accept_recent(void) {
    enum { D = 6, ROWS = D + 1, VOCAB = 90 };
    static float x[ROWS * VOCAB];
    static uint16_t prompt[VOCAB], output[ROWS * VOCAB], zeros[ROWS * VOCAB];
    struct kern_sample p[ROWS], plain[ROWS];
    struct kern_sampled want[ROWS], got[ROWS];
    struct kern *k = open_kern(NULL, 2);
    int n_changed = 0;
    for (int i = 0; i < 100; i++) {
        int32_t draft[D], n_accepted;
        struct kern_round round = {D, 0, 0, -1};
        memset(output, 0, sizeof output);
        twin_logits(x, ROWS * VOCAB, (uint64_t)i + 60, 0.5f);
        for (int r = 0; r < ROWS; r++) {
            p[r] = accept_mixed(i);
            p[r].history = 0;
            p[r].position = r;
            p[r].presence_penalty = 2;
            p[r].repetition_penalty = 1.5f;
            p[r].n_recent = r;
            plain[r] = p[r];
            plain[r].n_recent = 0;
            struct kern_history h = {prompt, output + r * VOCAB, VOCAB, NULL};
            sample(k, 1, VOCAB, NULL, x + r * VOCAB, VOCAB, &plain[r], &h, &want[r], NULL);
            h.output = zeros;
            struct kern_sampled other;
            sample(k, 1, VOCAB, NULL, x + r * VOCAB, VOCAB, &plain[r], &h, &other, NULL);
            n_changed += other.token != want[r].token;
            if (r == D) break;
            draft[r] = want[r].token; /* all accepted, if penalties say the same */
            memcpy(output + (r + 1) * VOCAB, output + r * VOCAB, VOCAB * sizeof *output);
            output[(r + 1) * VOCAB + draft[r]]++;
        }
        struct kern_history h = {prompt, zeros, VOCAB, draft};
        accept(k, 1, VOCAB, x, VOCAB, p, &h, &round, draft, NULL, &n_accepted, got);
        assert_int_equal(n_accepted, D);
        assert_memory_equal(got, want, sizeof got);
    }
    assert_true(n_changed > 20);
    k->ops->close(k);
}

static void run_victim(void *backend, struct victim *v) {
    enum { V = VICTIM_VOCAB };
    memset(v->out, 0xee, sizeof v->out);
    accept(backend, 1, V, v->x, V, v->p, NULL, &v->round, v->draft, &v->probs, v->n_accepted,
           v->out);
}

static void test_accept_hostile(void) {
    struct kern *k = open_kern(NULL, 2);
    victims_check(run_victim, k);
    accept(k, 0, 8, NULL, 8, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    k->ops->close(k);
}

/* A round's bits depend on its own rows alone: not on the threads, nor on who shares the call. */
static void test_accept_independent(void) {
    enum { N = 37, VOCAB = 700, ROWS = N * (KERN_MAX_DRAFT + 1) };
    static float x[ROWS * VOCAB], y[ROWS * VOCAB], q_probs[ROWS * VOCAB];
    static struct kern_sample p[ROWS], d[ROWS];
    static struct kern_sampled first[ROWS], got[ROWS], alone[ROWS];
    static struct kern_sampled drawn[ROWS];
    struct kern_round rounds[N];
    int32_t draft[ROWS], n_first[N], n_got[N], n_alone;
    struct kern_draft_probs q = {q_probs, VOCAB, VOCAB, NULL};
    struct kern *k = open_kern("plain", 1);
    twin_logits(x, ROWS * VOCAB, 30, 2);
    twin_logits(y, ROWS * VOCAB, 31, 0.3f);
    for (int i = 0; i < ROWS * VOCAB; i++) y[i] += x[i];
    for (int r = 0; r < ROWS; r++) {
        p[r] = accept_mixed(r / (KERN_MAX_DRAFT + 1));
        p[r].position = r % (KERN_MAX_DRAFT + 1);
        d[r] = p[r];
        d[r].purpose = RNG_DRAFT;
        d[r].probs_row = r;
    }
    sample(k, ROWS, VOCAB, NULL, y, VOCAB, d, NULL, drawn, q_probs);
    for (int r = 0; r < ROWS; r++) draft[r] = drawn[r].token;
    for (int i = 0; i < N; i++) {
        int at = i * (KERN_MAX_DRAFT + 1);
        rounds[i] = (struct kern_round){i * 5 % (KERN_MAX_DRAFT + 1), at, at, i % 3 ? at : -1};
    }
    memset(first, 0xee, sizeof first);
    accept(k, N, VOCAB, x, VOCAB, p, NULL, rounds, draft, &q, n_first, first);
    k->ops->close(k);
    for (int s = 0; s < N_SETS; s++)
        for (int threads = 1; threads <= 4; threads++) {
            k = open_kern(sets[s], threads);
            if (!k) continue;
            memset(got, 0xee, sizeof got);
            accept(k, N, VOCAB, x, VOCAB, p, NULL, rounds, draft, &q, n_got, got);
            assert_memory_equal(n_got, n_first, sizeof n_got);
            assert_memory_equal(got, first, sizeof got);
            for (int i = 0; i < N; i++) {
                int at = rounds[i].first_row, n = rounds[i].n_draft + 1;
                memset(alone + at, 0xee, (size_t)n * sizeof *alone);
                accept(k, 1, VOCAB, x, VOCAB, p, NULL, &rounds[i], draft, &q, &n_alone, alone);
                assert_int_equal(n_alone, n_first[i]);
                assert_memory_equal(alone + at, first + at, (size_t)n * sizeof *alone);
            }
            k->ops->close(k);
        }
    int n_some = 0;
    for (int i = 0; i < N; i++) n_some += n_first[i] > 0 && n_first[i] < rounds[i].n_draft;
    assert_true(n_some > 3);
}

const struct test tests[] = {
    {"accept_no_draft", TEST_QUICK, 60000, test_accept_no_draft},
    {"accept_matches_draws", TEST_QUICK, 60000, test_accept_matches_draws},
    {"accept_identical", TEST_QUICK, 60000, test_accept_identical},
    {"accept_twin", TEST_QUICK, 60000, test_accept_twin},
    {"accept_recent", TEST_QUICK, 60000, test_accept_recent},
    {"accept_hostile", TEST_QUICK, 60000, test_accept_hostile},
    {"accept_independent", TEST_QUICK, 60000, test_accept_independent},
    {0},
};
