/* engine/ over a device that is as strict as a GPU (tests/watched_kern.h): what it fetches arrives
 * at the sync, recordings are really replayed, and it can be lost. Goal: a step keeps kernels.h's
 * rules, waits once and copies little; recordings and the idle rows that go with them change no
 * bit; a lost device ends everything with one clear error and nothing hangs. */
#include "tests/engine_helper.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

enum {
    MOST_UPLOADS = 7, /* of a step: arrays of both models, page lists of three groups, two of
                         block indexes */
};

static void check_rules(void) {
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(watch.n_keys <= 96);
}

static const struct tiny_options *target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.dtype = KERN_Q8_0;
    return &t;
}

static void open_bed(struct bed *b) {
    struct tiny_draft d;
    tiny_draft_default(&d, target());
    bed_tiny(b, target(), &d);
    b->o.model_path = b->target;
    b->o.draft_path = b->draft;
}

/* ---- Bits ---- */

static void check_equal(bool gumbel) {
    static const int lengths[] = {3, 8, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(true);
    open_bed(&b);
    b.n_requests = TINY_SLOW ? 12 : 24;
    b.gumbel = gumbel;
    bed_check(&b, lengths, 3, true);
    check_rules();
    assert_true(watch.n_replays > 1000);
    bed_close_tiny(&b);
}

static void test_engine_device_equal(void) {
    check_equal(false);
}
static void test_engine_device_equal_gumbel(void) {
    check_equal(true);
}

/* Sampled rounds have probabilities and residuals to hand on: the same seeds give the same text
 * with recordings as without, where nothing but them differs. */
static void test_engine_device_equal_sampled(void) {
    enum { N = 12, N_OUT = 60 };
    static int32_t out[2][N][N_OUT];
    struct bed b;
    struct err e = {0};
    open_bed(&b);
    b.o.draft_tokens = 4;
    for (int records = 0; records < 2; records++) {
        struct engine *g;
        watch_reset(records);
        assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
        for (int i = 0; i < N; i++) {
            struct engine_submit_options s;
            int32_t prompt[40];
            tiny_prompt(900 + (uint64_t)i, prompt, 40);
            tiny_submit_options(&s, prompt, 10 + i);
            s.params.temperature = 1;
            s.params.top_p = i % 2 ? 0.9 : 1;
            s.params.repetition_penalty = i % 3 ? 1 : 1.1;
            s.params.max_tokens = N_OUT;
            s.params.ignore_eos = true;
            s.params.seed = (uint64_t)i;
            assert_int_equal(tiny_run(g, &s, out[records][i], NULL), N_OUT);
        }
        engine_close(g);
        check_rules();
    }
    assert_true(watch.n_replays > 100);
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    bed_close_tiny(&b);
}

/* ---- Copies ---- */

/* A step waits once, brings everything back at once and sends little. */
static void test_engine_device_copies(void) {
    enum { N = 6 };
    struct bed b;
    struct err e = {0};
    struct engine *g;
    struct engine_stats stats;
    struct engine_request *r[N];
    open_bed(&b);
    b.o.draft_tokens = 3;
    watch_reset(true);
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    watch_reset(true);
    for (int i = 0; i < N; i++) {
        struct engine_submit_options s;
        int32_t prompt[90];
        tiny_prompt(800 + (uint64_t)i, prompt, 90);
        tiny_submit_options(&s, prompt, 20 + 10 * i);
        s.params.max_tokens = 150;
        s.params.ignore_eos = true;
        s.params.draft_tokens = i % 4; /* ragged */
        r[i] = tiny_submit(g, &s);
    }
    for (int i = 0; i < N; i++) {
        assert_int_equal(tiny_wait(r[i]).n_tokens, 150);
        engine_release(g, r[i]);
    }
    tiny_assert_pool_whole(g);
    engine_get_stats(g, &stats);
    engine_close(g);
    check_rules();
    long n_steps = (long)stats.n_steps;
    assert_int_equal(watch.n_syncs, n_steps);
    assert_int_equal(watch.n_fetches, n_steps);
    assert_int_equal(watch.n_downloads, 0);
    assert_true(watch.most_uploads <= MOST_UPLOADS);
    /* Two of arrays; lists move when a sequence ends or passes into another block. */
    assert_true(watch.n_uploads < 3 * n_steps);
    assert_true(stats.speculation.n_accepted > 50);
    bed_close_tiny(&b);
}

/* Idle moments after start prepare the recordings of a lone sequence's rounds. */
static void test_engine_device_calibrates(void) {
    struct bed b;
    struct err e = {0};
    struct engine *g;
    struct engine_submit_options s;
    int32_t prompt[64];
    open_bed(&b);
    b.o.draft_tokens = VERIFY_DRAFT_AUTO;
    watch_reset(true);
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    int64_t start = clock_ns();
    for (long n = -1; n != watch.n_ops || n == 0;) { /* until it rests */
        n = watch.n_ops;
        usleep(100000);
        if (clock_ms_since(start) > 30000) fail_msg("calibration does not end");
    }
    struct engine_stats stats;
    engine_get_stats(g, &stats);
    assert_true(stats.is_calibrated);
    tiny_prompt(1, prompt, 64);
    tiny_submit_options(&s, prompt, 64);
    s.params.max_tokens = 100;
    s.params.ignore_eos = true;
    s.params.lookup = false;
    assert_int_equal(tiny_run(g, &s, NULL, NULL), 100);
    engine_close(g);
    check_rules();
    /* Rounds of 1..9 rows, the draft's of 1 and 2; the request adds few others. */
    assert_in_range(watch.n_keys, 11, 14);
    bed_close_tiny(&b);
}

/* ---- Losing it ---- */

/* The device goes at the n-th operation from the moment that requests run. */
static void check_lost(long n, bool late) {
    enum { N = 5 };
    struct bed b;
    struct err e = {0};
    struct engine *g;
    struct engine_request *r[N];
    struct engine_submit_options s;
    int32_t prompt[N][30];
    open_bed(&b);
    b.o.draft_tokens = 3;
    b.o.max_seqs = 3; /* two wait */
    watch_reset(true);
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    assert_int_equal(engine_failed(g, &e), 0);
    for (int i = 0; i < N; i++) {
        tiny_prompt(i, prompt[i], 30);
        tiny_submit_options(&s, prompt[i], 30);
        s.params.max_tokens = 400;
        s.params.ignore_eos = true;
        s.params.repetition_penalty = i == 1 ? 1.1 : 1;
        r[i] = tiny_submit(g, &s);
    }
    tiny_wait_tokens(r[0], 5);
    watch_fail(n, late);
    for (int i = 0; i < N; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        assert_int_equal(p.finish, ENGINE_FAILED);
        assert_int_equal(p.error_code, E_DEVICE);
        assert_non_null(strstr(p.error, "the watched device is gone"));
        engine_release(g, r[i]);
    }
    assert_int_equal(engine_failed(g, &e), E_DEVICE);
    assert_non_null(strstr(e.message, "the watched device is gone"));
    e = (struct err){0};
    assert_int_equal(engine_submit(g, &s, &r[0], &e), E_DEVICE);
    assert_non_null(strstr(e.message, "the watched device is gone"));
    tiny_assert_pool_whole(g);
    engine_close(g);
    bed_close_tiny(&b);
}

/* Each operation of a step is the one that fails once. */
static void test_engine_device_lost(void) {
    for (long n = 1; n < (TINY_SLOW ? 20 : 150); n += 1 + n / 8) check_lost(n, false);
}
static void test_engine_device_lost_late(void) {
    for (long n = 1; n < (TINY_SLOW ? 20 : 150); n += 1 + n / 8) check_lost(n, true);
}

/* Nobody asks for anything, and still it is told. */
static void test_engine_device_lost_idle(void) {
    struct bed b;
    struct err e = {0};
    struct engine *g;
    struct engine_submit_options s;
    struct engine_request *r = NULL;
    int32_t prompt[4] = {1, 2, 3, 4};
    int64_t start = clock_ns();
    open_bed(&b);
    b.o.draft_tokens = VERIFY_DRAFT_AUTO;
    watch_reset(true);
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    watch_fail(3, false);
    /* Either calibration finds out, or it was over before and the first request does. */
    while (!engine_failed(g, &e) && clock_ms_since(start) < 500) usleep(1000);
    tiny_submit_options(&s, prompt, 4);
    int rc = engine_submit(g, &s, &r, &e);
    if (rc) {
        assert_int_equal(rc, E_DEVICE);
    } else {
        struct engine_progress p = tiny_wait(r);
        assert_int_equal(p.finish, ENGINE_FAILED);
        assert_int_equal(p.error_code, E_DEVICE);
        engine_release(g, r);
    }
    assert_int_equal(engine_failed(g, &e), E_DEVICE);
    engine_close(g);
    bed_close_tiny(&b);
}

/* A device that reads no 8-bit caches says so at the start, and in a plan, and what to do. */
static void test_engine_device_kv_types(void) {
    struct tiny_options t = *target();
    struct engine_options o;
    struct engine *g;
    struct plan p;
    struct err e = {0};
    watch_reset(false);
    watch.kv_types = 1u << KERN_F16 | 1u << KERN_BF16;
    tiny_engine_options(&o);
    o.model_path = tiny_model_file(&t);
    o.kv_type = "q8_0";
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "kv type q8_0"));
    assert_non_null(strstr(e.message, "reads: f16 bf16"));
    assert_non_null(strstr(e.message, "--device cpu"));
    assert_int_equal(engine_plan(&p, &o, 0, &e), E_UNSUPPORTED);
    o.kv_type = "bf16";
    assert_ok(engine_plan(&p, &o, 0, &e), e);
    watch.kv_types = 0;
    /* Half the bytes and the scales: 2 KV heads of 16, one scale of 2 bytes. */
    struct plan q;
    o.kv_type = "q8_0";
    assert_ok(engine_plan(&q, &o, 0, &e), e);
    int n_layers = q.pool.shape[KVPOOL_DEEP].n_layers;
    assert_int_equal(kvpool_page_bytes(&q.pool.shape[KVPOOL_DEEP]),
                     (size_t)(n_layers * 2 * 2 * 64 * (16 + 2) + 1023) / 1024 * 1024);
    assert_true(q.tokens_fit * 10 > p.tokens_fit * 16);
    unlink(o.model_path);
}

const struct test tests[] = {
    {"engine_device_equal", TEST_QUICK, 120000, test_engine_device_equal},
    /* Full: to a sanitizer it is speculation_gumbel over the recordings of the one before. */
    {"engine_device_equal_gumbel", TEST_FULL, 120000, test_engine_device_equal_gumbel},
    {"engine_device_equal_sampled", TEST_QUICK, 60000, test_engine_device_equal_sampled},
    {"engine_device_copies", TEST_QUICK, 60000, test_engine_device_copies},
    {"engine_device_calibrates", TEST_QUICK, 60000, test_engine_device_calibrates},
    {"engine_device_lost", TEST_QUICK, 60000, test_engine_device_lost},
    {"engine_device_lost_late", TEST_QUICK, 60000, test_engine_device_lost_late},
    {"engine_device_lost_idle", TEST_QUICK, 60000, test_engine_device_lost_idle},
    {"engine_device_kv_types", TEST_QUICK, 20000, test_engine_device_kv_types},
    {0},
};
