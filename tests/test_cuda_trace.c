/* A trace on the CUDA device beside one on the CPU's reference path: the same text of a tiny model
 * gives states, representatives, attention masses and the worth of forced tokens that are near the
 * twin's. On the CPU, 16-bit KV costs up to .004 of the largest value here, bf16 products up to
 * .055; a wrong page, layer, head or row costs all of it. Skipped where there is no GPU. */
#include "tests/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "target/target.h"
#include "target/trace.h"
#include "tests/cuda_helper.h"
#include "tests/tiny_model.h"

enum { PROMPT = 700, LOOK = 64, ANSWER = 80, N = PROMPT + LOOK + ANSWER, H = 128, LAYERS = 4 };
#define TOLERANCE 0.12 /* of the largest */

/* What is told of the text. */
struct told {
    float most[16], heads[LAYERS * 2 * 16], state[2][N * H], plane[2][16 * 4 * H], nll[ANSWER];
    float score[16];
};

static struct tiny_options tiny(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = LAYERS;
    t.hidden = H;
    t.n_heads = 2;
    t.n_kv_heads = 1;
    t.head_dim = 64;
    t.dtype = KERN_F16;
    return t;
}

static struct told *trace(struct kern *k, enum kern_dtype kv_dtype, int chunk) {
    static const int32_t kept[] = {0, 2, 5, 9, 10, 11};
    struct tiny_options tiny_options = tiny();
    struct target_trace_options o = {.max_tokens = N,
                                     .max_rows = 256,
                                     .select_layer = 1,
                                     .n_taps = 2,
                                     .tap_layer = {1, 3},
                                     .heads = true,
                                     .kv_dtype = kv_dtype};
    struct model_caps caps = target_trace_caps(&o);
    struct model_source *src;
    struct model *m;
    struct target_trace *t;
    struct target_masses masses;
    struct err e = {0};
    struct told *out = calloc(1, sizeof *out);
    const char *path = tiny_model_file(&tiny_options);
    const float *most;
    int32_t ids[N];
    assert_non_null(out);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = (int32_t)(rng_u32(3, 0, RNG_TEST, i) % TINY_FIRST_MERGE);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&m, src, NULL, k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
    assert_ok(target_trace_open(&t, &o, m, k, &e), e);
    for (int at = 0; at < PROMPT - 100; at += chunk) {
        int n = PROMPT - 100 - at < chunk ? PROMPT - 100 - at : chunk;
        assert_ok(target_trace_prompt(t, ids + at, n, 0, NULL, &e), e);
    }
    assert_ok(target_trace_prompt(t, ids + PROMPT - 100, 100, 32, &most, &e), e);
    memcpy(out->most, most, sizeof *most * (size_t)target_n_blocks(PROMPT));
    assert_ok(target_trace_look(t, ids + PROMPT, LOOK, &masses, &e), e);
    for (int i = 0; i < masses.n_layers * masses.n_heads; i++)
        memcpy(out->heads + i * 16, masses.mass + i * masses.stride,
               sizeof *most * (size_t)masses.n_blocks);
    struct kern_scorer mean = {.kind = KERN_SCORE_MEAN, .cols = H, .n_queries = 32, .normed = true};
    assert_ok(target_trace_score(t, 1, &mean, out->score, &e), e);
    struct target_kept list = {.block = kept, .n = 6, .n_blocks = target_n_blocks(PROMPT + LOOK)};
    assert_ok(target_trace_force(t, ids + PROMPT + LOOK, ANSWER, &list, out->nll, NULL, &e), e);
    /* The list leaves the states of what was forced alone; those of the prompt come back. */
    assert_ok(target_trace_rewind(t, PROMPT + LOOK, &e), e);
    for (int i = 0; i < 2; i++) {
        assert_ok(target_trace_states(t, i, 0, PROMPT + LOOK, out->state[i], &e), e);
        assert_ok(target_trace_plane(t, i, 0, (PROMPT + LOOK) / 64, out->plane[i], &e), e);
    }
    target_trace_close(t);
    model_close(m);
    return out;
}

static void near(const char *what, const float *got, const float *want, int n, double tolerance) {
    double top = 0, worst = 0;
    for (int i = 0; i < n; i++) top = fmax(top, fabs((double)want[i]));
    for (int i = 0; i < n; i++) {
        double apart = fabs((double)got[i] - (double)want[i]);
        if (!(apart <= tolerance * top))
            fail_msg("%s %d is %.7g, want %.7g", what, i, (double)got[i], (double)want[i]);
        worst = fmax(worst, apart / top);
    }
    printf("# %s: worst %.2g of the largest\n", what, worst);
}

static void test_cuda_trace(void) {
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    struct told *got = trace(k, KERN_F16, 256), *want = trace(twin, KERN_F32, 256);
    struct told *again = trace(k, KERN_F16, 130);
    near("most attention", got->most, want->most, target_n_blocks(PROMPT), TOLERANCE);
    near("attention by head", got->heads, want->heads, 3 * 2 * 16, TOLERANCE);
    for (int l = 0; l < 3; l++)
        for (int h = 0; h < 2; h++) {
            double sum = 0;
            for (int b = 0; b < 16; b++) sum += (double)got->heads[(l * 2 + h) * 16 + b];
            assert_near(sum, LOOK, 1e-3 * LOOK);
        }
    near("states", got->state[0], want->state[0], (PROMPT + LOOK) * H, TOLERANCE);
    near("deep states", got->state[1], want->state[1], (PROMPT + LOOK) * H, TOLERANCE);
    near("representatives", got->plane[1], want->plane[1], (PROMPT + LOOK) / 64 * 4 * H, TOLERANCE);
    near("scores", got->score, want->score, (PROMPT + LOOK) / 64, TOLERANCE);
    near("worth of tokens", got->nll, want->nll, ANSWER, TOLERANCE);
    /* Other chunks, the same bits. */
    assert_memory_equal(got, again, sizeof *got);
    free(got);
    free(want);
    free(again);
    k->ops->close(k);
    twin->ops->close(twin);
}

const struct test tests[] = {
    {"cuda_trace", TEST_GPU, 120000, test_cuda_trace},
    {0},
};
