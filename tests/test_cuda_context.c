/* Goal: a device is opened or refused in words, sizes need no device, and a recording does what the
 * calls that it stands for would do now. Method: refusals by name; sizes of a plan-only context
 * against an opened one; a chain of operations under one key, run plainly, captured and replayed
 * over fresh inputs each time, against the same chain without a recording; more keys than are kept.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "tests/cuda_helper.h"

static void test_cuda_context_refusals(void) {
    struct kern *k = cuda_or_skip(), *none = NULL;
    struct kern_device_info info;
    struct err e = {0};
    void *p = NULL;
    k->ops->info(k, &info);
    printf("%s: %zu of %zu bytes free, %zu taken by the kernels\n", info.name, info.free_bytes,
           info.memory_bytes, info.own_bytes);
    assert_true(info.free_bytes > 0 && info.free_bytes < info.memory_bytes && !info.is_host);
    assert_int_equal(k->ops->reserve(k, (size_t)1 << 50, &p, &e), E_NOMEM);
    assert_non_null(strstr(e.message, "1125899906842624"));
    assert_null(p);
    /* The refusal leaves nothing behind. */
    assert_ok(k->ops->sync(k, &e), e);
    struct kern_options o = {.device = 999};
    assert_int_equal(kern_cuda_open(&none, &o, &e), E_RANGE);
    assert_non_null(strstr(e.message, "999"));
    o = (struct kern_options){.precision = KERN_REFERENCE};
    assert_int_equal(kern_cuda_open(&none, &o, &e), E_INVALID);
    assert_null(none);
    k->ops->close(k);
}

static void test_cuda_context_memory(void) {
    struct kern *k = cuda_or_skip();
    struct err e = {0};
    enum { N = 1000003 };
    uint8_t *pinned = NULL, *plain = malloc(N), *dev;
    void *p, *h;
    assert_ok(k->ops->reserve(k, N, &p, &e), e);
    assert_ok(k->ops->host_reserve(k, N, &h, &e), e);
    dev = p;
    pinned = h;
    for (int i = 0; i < N; i++) assert_int_equal(pinned[i], 0);
    assert_ok(k->ops->fetch(k, pinned, dev, N, &e), e);
    assert_ok(k->ops->sync(k, &e), e);
    for (int i = 0; i < N; i++) assert_int_equal(pinned[i], 0); /* reserve zeroes */
    for (int i = 0; i < N; i++) plain[i] = (uint8_t)(i * 7 + i / 251);
    assert_ok(k->ops->upload(k, dev, plain, N, &e), e);
    memset(plain, 0xAA, N); /* a pageable source may change at once */
    assert_ok(k->ops->copy_page(k, dev + 4096, dev, 4096), e);
    assert_ok(k->ops->download(k, plain, dev, N, &e), e);
    for (int i = 0; i < N; i++) {
        int at = i >= 4096 && i < 8192 ? i - 4096 : i;
        assert_int_equal(plain[i], (uint8_t)(at * 7 + at / 251));
    }
    k->ops->host_unreserve(k, h);
    k->ops->unreserve(k, p);
    free(plain);
    k->ops->close(k);
}

static void test_cuda_context_plan_only(void) {
    struct kern *k = cuda_or_skip(), *plan = NULL;
    struct kern_options o = {.plan_only = true};
    struct err e = {0};
    assert_ok(kern_cuda_open(&plan, &o, &e), e);
    struct kern_rows rows = {.n_gen = 33, .n_prompt = 479};
    for (int t = 0; t < KERN_N_DTYPES; t++)
        assert_int_equal(plan->ops->weight_bytes(plan, t, 1537, 2560),
                         k->ops->weight_bytes(k, t, 1537, 2560));
    assert_int_equal(plan->ops->act_bytes(plan, rows, 2560), k->ops->act_bytes(k, rows, 2560));
    assert_int_equal(plan->ops->attn_scratch_bytes(plan, rows, 32, 32, 128, 2048),
                     k->ops->attn_scratch_bytes(k, rows, 32, 32, 128, 2048));
    assert_int_equal(plan->ops->sample_scratch_bytes(plan, 32, 128256),
                     k->ops->sample_scratch_bytes(k, 32, 128256));
    assert_int_equal(plan->ops->accept_scratch_bytes(plan, 32, 128256),
                     k->ops->accept_scratch_bytes(k, 32, 128256));
    plan->ops->close(plan);
    k->ops->close(k);
}

/* ---- Recordings ---- */

enum { ROWS = 3, COLS = 96, OUT = 80 };

struct chain {
    struct kern *k;
    struct kern_weight w;
    void *weight_mem;
    float *x, *norm, *out;
    struct kern_act act;
};

static void chain_open(struct chain *c) {
    struct err e = {0};
    c->k = cuda_or_skip();
    float *w = test_floats(1, (size_t)OUT * COLS, 1), *norm = test_floats(2, COLS, 1);
    size_t bytes = c->k->ops->weight_bytes(c->k, KERN_F32, OUT, COLS);
    assert_true(bytes > 0);
    c->weight_mem = dev_put(c->k, NULL, bytes);
    assert_ok(c->k->ops->weight_pack(c->k, &c->w, c->weight_mem, KERN_F32, OUT, COLS, w, &e), e);
    c->norm = dev_put(c->k, norm, COLS * sizeof(float));
    c->x = dev_put(c->k, NULL, ROWS * COLS * sizeof(float));
    c->out = dev_put(c->k, NULL, ROWS * OUT * sizeof(float));
    c->act.bytes = c->k->ops->act_bytes(c->k, (struct kern_rows){.n_gen = ROWS}, COLS);
    c->act.partner = c->w.dtype;
    c->act.data = dev_put(c->k, NULL, c->act.bytes);
    free(w);
    free(norm);
}

static void chain_close(struct chain *c) {
    const struct kern_ops *ops = c->k->ops;
    ops->unreserve(c->k, c->weight_mem);
    ops->unreserve(c->k, c->norm);
    ops->unreserve(c->k, c->x);
    ops->unreserve(c->k, c->out);
    ops->unreserve(c->k, c->act.data);
    ops->close(c->k);
}

/* norm (which changes x) and product over fresh inputs, under `key` or plainly; out to the host. */
static float *chain_run(struct chain *c, uint64_t seed, const uint64_t *key, bool *replayed) {
    struct err e = {0};
    const struct kern_ops *ops = c->k->ops;
    struct kern_rows rows = {.n_gen = ROWS};
    float *x = test_floats(seed, ROWS * COLS, 2);
    *replayed = false;
    assert_ok(ops->upload(c->k, c->x, x, ROWS * COLS * sizeof *x, &e), e);
    if (key) assert_ok(ops->record_begin(c->k, key, replayed, &e), e);
    if (!*replayed) {
        assert_ok(ops->norm_pack(c->k, rows, COLS, c->x, NULL, c->norm, 1e-5f, c->act, NULL), e);
        assert_ok(ops->matmul(c->k, rows, &c->w, c->act, c->out, OUT, 0), e);
        if (key) assert_ok(ops->record_end(c->k, &e), e);
    }
    assert_ok(ops->sync(c->k, &e), e);
    free(x);
    return dev_get(c->k, c->out, ROWS * OUT * sizeof(float));
}

static void test_cuda_context_recordings(void) {
    struct chain c;
    bool replayed;
    int n_replayed = 0;
    chain_open(&c);
    for (uint64_t turn = 0; turn < 3 * 120 + 8; turn++) {
        /* 120 names in three rounds: more than are kept, so places are taken over; then one again
         * and again. */
        uint64_t name = turn < 360 ? turn % 120 : 7;
        uint64_t key[KERN_RECORD_KEY] = {name, 0, 0, 0, 0, 5};
        float *got = chain_run(&c, 100 + turn, key, &replayed);
        n_replayed += replayed;
        float *want = chain_run(&c, 100 + turn, NULL, &replayed);
        assert_memory_equal(got, want, ROWS * OUT * sizeof(float));
        free(got);
        free(want);
    }
    printf("%d of 368 runs were replays\n", n_replayed);
    assert_true(n_replayed >= 6);
    chain_close(&c);
}

/* A failure inside leaves the backend usable. */
static void test_cuda_context_recording_given_up(void) {
    struct chain c;
    struct err e = {0};
    bool replayed;
    uint64_t key[KERN_RECORD_KEY] = {1};
    chain_open(&c);
    free(chain_run(&c, 1, key, &replayed));
    assert_ok(c.k->ops->record_begin(c.k, key, &replayed, &e), e);
    assert_false(replayed);
    assert_ok(c.k->ops->sync(c.k, &e), e); /* gives it up */
    float *got = chain_run(&c, 5, key, &replayed), *want = chain_run(&c, 5, NULL, &replayed);
    assert_memory_equal(got, want, ROWS * OUT * sizeof(float));
    free(got);
    free(want);
    chain_close(&c);
}

const struct test tests[] = {
    {"cuda_context_refusals", TEST_GPU, 20000, test_cuda_context_refusals},
    {"cuda_context_memory", TEST_GPU, 20000, test_cuda_context_memory},
    {"cuda_context_plan_only", TEST_GPU, 20000, test_cuda_context_plan_only},
    {"cuda_context_recordings", TEST_GPU, 60000, test_cuda_context_recordings},
    {"cuda_context_recording_given_up", TEST_GPU, 20000, test_cuda_context_recording_given_up},
    {0},
};
