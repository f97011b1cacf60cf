/* Row-wise arithmetic of the CPU backend: every instruction set that this machine has gives the
 * same bits, and those lie within a stated distance of sums in double. Each test runs over all
 * tables, so a machine without AVX-512 tests what it can run. */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/cpu/cpu.h"

enum { MAX_TABLES = 4 };

/* Tables that run here; the first is plain. */
static int tables(const struct cpu_rowwise_isa *out[MAX_TABLES]) {
    static const char *const names[] = {"plain", "avx2", "avx512"};
    int n = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct kern *k;
        struct kern_options o = {.n_threads = 1, .isa = names[i]};
        if (kern_cpu_open(&k, &o, NULL) != 0) continue;
        out[n++] = cpu_ctx(k)->isa->rowwise;
        k->ops->close(k);
    }
    assert_ptr_equal(out[0], &cpu_rowwise_plain);
    return n;
}

static float random_f32(uint64_t at, float scale) {
    return (rng_uniform(7, at, RNG_TEST, 0) * 2 - 1) * scale;
}

static void random_row(float *x, int n, uint64_t salt, float scale) {
    for (int i = 0; i < n; i++) x[i] = random_f32(salt * 100000 + (uint64_t)i, scale);
}

/* Sweep e^x through exp_sum with max 0: 2e-7 relative, 0 where the result would be subnormal, exact
 * ends. */
static void test_exp_accuracy(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    enum { N = 1 << 16 };
    static float x[N], out[MAX_TABLES][N];
    double worst = 0;
    for (int part = 0; part < 16; part++) {
        for (int i = 0; i < N; i++)
            x[i] = -105.f + 194.f * ((float)i * 16 + (float)part) / (float)(N * 16) +
                   random_f32((uint64_t)i, 1e-3f);
        for (int k = 0; k < n_tables; k++) {
            t[k]->exp_sum(x, N, 0, 1, out[k]);
            assert_memory_equal(out[k], out[0], sizeof out[0]);
        }
        for (int i = 0; i < N; i++) {
            double want = exp((double)x[i]), d = fabs((double)out[0][i] - want);
            if (x[i] < -87.33f) assert_true(out[0][i] == 0.f);
            else if (want < (double)3.4e38f) worst = fmax(worst, d / want);
        }
    }
    assert_near(worst, 0, 2e-7);
    float edge[] = {-INFINITY, 0, NAN, 89, INFINITY, -1e30f, -0.f}, got[7];
    for (int k = 0; k < n_tables; k++) {
        t[k]->exp_sum(edge, 7, 0, 1, got);
        assert_true(got[0] == 0 && got[1] == 1 && isnan(got[2]) && isinf(got[3]) && isinf(got[4]));
        assert_true(got[5] == 0 && got[6] == 1);
    }
}

/* One lane alone gives the bits that it has among many. */
static void test_exp_one_lane(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    float x[100], all[100], one;
    random_row(x, 100, 1, 30);
    for (int k = 0; k < n_tables; k++) {
        t[k]->exp_sum(x, 100, 3, 0.7f, all);
        for (int i = 0; i < 100; i++) {
            t[k]->exp_sum(x + i, 1, 3, 0.7f, &one);
            assert_memory_equal(&one, &all[i], 4);
        }
    }
}

/* Norm: 16 f32 partial sums of n / 16 terms each lose at most n / 16 half ulps, 4e-6 for 1000
 * columns. */
static void test_norm(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    static const int cols[] = {1, 15, 16, 17, 33, 64, 576, 1000};
    static float x[1000], delta[1000], w[1000], want_x[1000], want[1000], got_x[MAX_TABLES][1000],
        got[MAX_TABLES][1000];
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++)
        for (int with_delta = 0; with_delta < 2; with_delta++) {
            int n = cols[c];
            random_row(x, n, c, 3);
            random_row(delta, n, c + 50, 3);
            random_row(w, n, c + 100, 2);
            memcpy(want_x, x, sizeof x);
            cpu_rowwise_reference.norm(want_x, with_delta ? delta : NULL, w, 1e-5f, n, want);
            for (int k = 0; k < n_tables; k++) {
                memcpy(got_x[k], x, sizeof x);
                t[k]->norm(got_x[k], with_delta ? delta : NULL, w, 1e-5f, n, got[k]);
                assert_memory_equal(got_x[k], want_x, (size_t)n * 4);
                assert_memory_equal(got[k], got[0], (size_t)n * 4);
            }
            for (int i = 0; i < n; i++)
                assert_near(got[0][i], want[i], 1e-6 + fabs(want[i]) * 4e-6);
        }
}

static void test_gate(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    static float g[1537], u[1537], want[1537], got[MAX_TABLES][1537];
    random_row(g, 1537, 3, 20);
    random_row(u, 1537, 4, 5);
    g[7] = -200; /* e^200 is infinite, the gate must be 0 and not NaN */
    g[8] = 200;
    cpu_rowwise_reference.gate(g, u, 1537, want);
    for (int k = 0; k < n_tables; k++)
        for (int n = 1537; n > 1490; n--) {
            t[k]->gate(g, u, n, got[k]);
            assert_memory_equal(got[k], got[0], (size_t)n * 4);
        }
    t[0]->gate(g, u, 1537, got[0]);
    for (int i = 0; i < 1537; i++) assert_near(got[0][i], want[i], 1e-12 + fabs(want[i]) * 5e-7);
}

/* Angles in double to f32: one rounding, so half an ulp of 1 and a little; positions up to 2^24. */
static void test_rope_angles(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    float inv[64], c[MAX_TABLES][64], s[MAX_TABLES][64], rc[64], rs[64];
    for (int i = 0; i < 64; i++) inv[i] = (float)pow(10000, -i / 64.0);
    for (int n = 0; n < 4000; n++) {
        int32_t position = n < 1000 ? n : (int32_t)(rng_u32(1, (uint64_t)n, RNG_TEST, 0) >> 8);
        if (n == 3999) position = (1 << 24) - 1;
        float scale = n % 2 ? 1.f : 1.1386f;
        int half = n % 3 ? 64 : 37;
        cpu_rowwise_reference.rope_angles(inv, half, position, scale, rc, rs);
        for (int k = 0; k < n_tables; k++) {
            t[k]->rope_angles(inv, half, position, scale, c[k], s[k]);
            assert_memory_equal(c[k], c[0], (size_t)half * 4);
            assert_memory_equal(s[k], s[0], (size_t)half * 4);
        }
        for (int i = 0; i < half; i++) {
            assert_near(c[0][i], rc[i], 1.3e-7);
            assert_near(s[0][i], rs[i], 1.3e-7);
        }
    }
}

static void test_rope_head(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    static const int shapes[][2] = {{64, 64}, {80, 32}, {128, 128}, {6, 4}, {256, 64}};
    float x[256], bias[256], norm[256], c[128], s[128], want[256], got[MAX_TABLES][256];
    random_row(x, 256, 5, 2);
    random_row(bias, 256, 6, 1);
    random_row(norm, 256, 7, 2);
    for (int i = 0; i < 128; i++) {
        c[i] = cosf((float)i);
        s[i] = sinf((float)i);
    }
    for (int options = 0; options < 16; options++)
        for (size_t h = 0; h < sizeof shapes / sizeof *shapes; h++) {
            int hd = shapes[h][0], dim = shapes[h][1];
            const float *b = options & 1 ? bias : NULL, *w = options & 2 ? norm : NULL;
            const float *cs = options & 8 ? c : NULL;
            memcpy(want, x, sizeof x);
            cpu_rowwise_reference.rope_head(want, hd, b, w, 1e-6f, cs, s, dim, options & 4);
            for (int k = 0; k < n_tables; k++) {
                memcpy(got[k], x, sizeof x);
                t[k]->rope_head(got[k], hd, b, w, 1e-6f, cs, s, dim, options & 4);
                assert_memory_equal(got[k], got[0], sizeof x);
            }
            for (int i = 0; i < 256; i++) assert_near(got[0][i], want[i], 3e-6);
        }
    /* The pairs themselves, by hand: a quarter turn takes (a, b) to (-b, a). */
    float quarter_c[2] = {0, 1}, quarter_s[2] = {1, 0}, y[4] = {1, 2, 3, 4}, z[4] = {1, 2, 3, 4};
    t[0]->rope_head(y, 4, NULL, NULL, 0, quarter_c, quarter_s, 4, true);
    assert_true(y[0] == -2 && y[1] == 1 && y[2] == 3 && y[3] == 4);
    t[0]->rope_head(z, 4, NULL, NULL, 0, quarter_c, quarter_s, 4, false);
    assert_true(z[0] == -3 && z[1] == 2 && z[2] == 1 && z[3] == 4);
}

/* The lowest id wins ties; NaN at any place is told; rows of -infinity have a maximum too. */
static void test_max(void) {
    const struct cpu_rowwise_isa *t[MAX_TABLES];
    int n_tables = tables(t);
    enum { N = 2600 };
    static float x[N];
    for (int k = 0; k < n_tables; k++)
        for (int n = 1; n <= N; n = n < 70 ? n + 1 : n * 2 + 3) {
            float max;
            int idx;
            random_row(x, n, (uint64_t)n, 10);
            for (int at = 0; at < n; at += n / 37 + 1) {
                float keep = x[at];
                x[at] = 11;
                float last = x[n - 1];
                x[n - 1] = 11;
                assert_true(t[k]->max(x, n, &max, &idx));
                assert_int_equal(idx, at);
                assert_true(max == 11);
                x[n - 1] = last;
                x[at] = NAN;
                assert_false(t[k]->max(x, n, &max, &idx));
                x[at] = keep;
            }
            for (int i = 0; i < n; i++) x[i] = -INFINITY;
            assert_true(t[k]->max(x, n, &max, &idx));
            assert_int_equal(idx, 0);
            assert_true(max == -INFINITY);
        }
}

const struct test tests[] = {
    {"rowwise_exp_accuracy", TEST_QUICK, 240000, test_exp_accuracy},
    {"rowwise_exp_one_lane", TEST_QUICK, 60000, test_exp_one_lane},
    {"rowwise_norm", TEST_QUICK, 60000, test_norm},
    {"rowwise_gate", TEST_QUICK, 60000, test_gate},
    {"rowwise_rope_angles", TEST_QUICK, 60000, test_rope_angles},
    {"rowwise_rope_head", TEST_QUICK, 60000, test_rope_head},
    {"rowwise_max", TEST_QUICK, 60000, test_max},
    {0},
};
