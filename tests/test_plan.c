/* kvpool/plan.h: the plan's sums, its agreement with kvpool_open to the byte and with admission to
 * the sequence, and that its advice, followed, works. Random inputs; the pool itself is the judge.
 */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/err.h"
#include "base/rng.h"
#include "base/strbuf.h"
#include "kvpool/plan.h"
#include "target/gain.h"

static uint64_t counter;
static int draw(int below) {
    return (int)(rng_u32(99, counter++, RNG_TEST, 0) % (uint32_t)below);
}

static struct kvpool_page_shape shape(int layers, int heads, int dim) {
    return (struct kvpool_page_shape){
        .n_layers = layers, .n_kv_heads = heads, .head_dim = dim, .elem_bytes = 2};
}

/* The default target with the default draft, on a machine that is its own device. */
static struct plan_input default_pair(void) {
    return (struct plan_input){
        .target_weight_bytes = 98362432,
        .draft_weight_bytes = 30000000,
        .workspace_bytes = 12000000,
        .logits_bytes = 32u * 49152 * 4,
        .draft_prob_bytes = 32u * 16384 * 4,
        .host_bytes = 5000000,
        .pool = {.shape = {shape(4, 3, 64), shape(12, 3, 64), shape(18, 3, 64)},
                 .max_seqs = 32,
                 .max_blocks = 129,
                 .max_cached = -1},
        .budget_bytes = (size_t)4 << 30,
        .device_is_host = true,
        .context = 8192,
        .lookahead = 9,
        .max_rows = 512};
}

static void make(struct plan *p, const struct plan_input *in) {
    struct err e = {0};
    assert_ok(plan_make(p, in, &e), e);
    size_t device = 0, host = 0;
    for (int i = 0; i < p->n_lines; i++)
        *(p->lines[i].place == PLAN_DEVICE ? &device : &host) += p->lines[i].bytes;
    assert_int_equal(device, p->device_bytes);
    assert_int_equal(host, p->host_bytes);
}

/* Open the planned pool and fill it with sequences of n tokens, taking every page: how many went
 * in. */
static int fill(const struct plan *p, int n_tokens) {
    struct err e = {0};
    struct kvpool *pool;
    struct kvpool_want want = {.n_tokens = n_tokens, .with_draft = p->with_draft};
    int n = 0, seq, hit, draft_hit;
    assert_ok(kvpool_open(&pool, &p->pool, &e), e);
    while (kvpool_seq_open(pool, &want, &seq, &hit, &draft_hit, &e) == 0) {
        for (int c = 0; c < KVPOOL_N_CLASSES; c++)
            kvpool_seq_extend(pool, seq, (enum kvpool_class)c, n_tokens);
        n++;
    }
    kvpool_check(pool);
    kvpool_close(pool);
    return n;
}

static void test_plan_default_pair(void) {
    struct plan_input in = default_pair();
    struct plan p;
    make(&p, &in);
    assert_true(p.fits);
    assert_true(p.device_bytes + p.host_bytes <= in.budget_bytes);
    /* Less than an extent and the bookkeeping's wobble is left over. */
    assert_true(in.budget_bytes - p.device_bytes - p.host_bytes < 2 * p.geometry.extent_bytes);
    assert_int_equal(p.pool_host_bytes, kvpool_host_bytes(&p.pool));
    /* 34 layers x 2 x 3 heads x 64 x 2 bytes = 26,112 bytes a token. */
    size_t token = 0;
    for (int c = 0; c < 3; c++) token += p.geometry.page_bytes[c] / KVPOOL_BLOCK;
    assert_int_equal(token, 26112);
    assert_true((size_t)p.tokens_fit <= p.pool.arena_bytes / token);
    assert_true((size_t)p.tokens_fit >= p.pool.arena_bytes / token * 98 / 100);
    assert_int_equal(plan_check(&p, NULL), 0);
}

/* The pool admits exactly what the plan promises. */
static void test_plan_agrees_with_pool(void) {
    for (int i = 0; i < 200; i++) {
        struct plan_input in = default_pair();
        struct kvpool_stats st;
        struct kvpool *pool;
        struct err e = {0};
        struct plan p;
        int heads = 1 + draw(4);
        in.pool.shape[KVPOOL_DRAFT] = shape(draw(3), 1 + draw(3), 8 << draw(3));
        in.pool.shape[KVPOOL_SHALLOW] = shape(draw(8), heads, 64);
        in.pool.shape[KVPOOL_DEEP] = shape(1 + draw(20), heads, 64);
        in.pool.max_seqs = 1 + draw(40);
        in.pool.max_cached = draw(2) ? -1 : draw(50);
        in.context = 1 + draw(1500);
        in.pool.max_blocks = 24;
        in.budget_bytes = ((size_t)160 << 20) + (size_t)draw(200 << 20);
        in.device_is_host = draw(2);
        in.margin_bytes = (size_t)draw(1 << 20);
        if (draw(2)) in.pool.arena_bytes = (size_t)(8 << 20) + (size_t)draw(60 << 20);
        if (draw(3) == 0) in.pool.min_bytes[KVPOOL_DEEP] = 4 << 20;
        make(&p, &in);
        if (!p.geometry.n_extents) {
            assert_false(p.fits);
            continue;
        }
        assert_ok(kvpool_open(&pool, &p.pool, &e), e);
        kvpool_get_stats(pool, &st);
        assert_int_equal(st.arena_bytes, p.pool.arena_bytes); /* nothing is rounded away */
        assert_int_equal(st.n_extents, p.geometry.n_extents);
        int most = kvpool_max_tokens(pool, p.with_draft);
        kvpool_close(pool);
        assert_int_equal(p.largest_context, most > 9 ? most - 9 : 0);
        if (!in.pool.arena_bytes) {
            size_t used = p.device_bytes + p.margin_bytes + (p.device_is_host ? p.host_bytes : 0);
            assert_true(used <= in.budget_bytes);
        }
        if (p.largest_context < p.context) {
            assert_false(p.fits);
            continue;
        }
        assert_int_equal(fill(&p, p.context + p.lookahead), p.seqs_at_context);
        if (p.context_for_all > 0) {
            assert_int_equal(fill(&p, p.context_for_all + p.lookahead), p.pool.max_seqs);
            assert_true(p.context_for_all == p.pool.max_blocks * 64 - 9 ||
                        fill(&p, p.context_for_all + p.lookahead + 64) < p.pool.max_seqs);
        }
    }
}

/* Set the KV memory that the plan asks for: then it fits. */
static void test_plan_advice_works(void) {
    for (int i = 0; i < 100; i++) {
        struct plan_input in = default_pair();
        struct plan p, q;
        in.budget_bytes = 0;
        in.pool.arena_bytes = ((size_t)6 + (size_t)draw(300)) << 20;
        in.pool.max_seqs = 1 + draw(16);
        in.context = 64 + draw(8000);
        make(&p, &in);
        for (int n = 1; n <= in.pool.max_seqs; n += in.pool.max_seqs) {
            in.pool.arena_bytes = plan_arena_for(&p, n, in.context);
            make(&q, &in);
            assert_true(q.seqs_at_context >= n);
            assert_true(q.fits);
            /* And not wildly more than the pages: an eighth and an extent a class. */
            size_t pages = (size_t)n * 26112 * 64 * (((size_t)in.context + 9 + 63) / 64);
            assert_true(in.pool.arena_bytes <= pages + pages / 8 + 3 * q.geometry.extent_bytes);
        }
        if (!p.fits) assert_non_null(strstr(p.advice[0], "--kv-memory"));
    }
    /* Too little for the weights alone. */
    struct plan_input in = default_pair();
    struct plan p;
    struct err e = {0};
    in.budget_bytes = 100 << 20;
    make(&p, &in);
    assert_false(p.fits);
    assert_int_equal(plan_check(&p, &e), E_FULL);
    assert_non_null(strstr(e.message, "no room for a KV pool"));
    assert_non_null(strstr(p.advice[p.n_advice - 1], "without the draft"));
    /* Explicit KV bytes beyond the budget. */
    in.budget_bytes = 300 << 20;
    in.pool.arena_bytes = 400 << 20;
    make(&p, &in);
    assert_false(p.fits);
    assert_non_null(strstr(p.advice[0], "over the budget"));
}

/* Where no context is short enough for all sequences, none is advised. */
static void test_plan_advises_no_zero(void) {
    struct plan_input in = default_pair();
    struct plan p;
    in.context = 64;
    in.pool.arena_bytes = (size_t)8 << 20;
    make(&p, &in);
    assert_int_equal(p.context_for_all, 0);
    assert_true(p.n_advice > 0);
    for (int i = 0; i < p.n_advice; i++)
        if (strstr(p.advice[i], "--ctx-size 0")) fail_msg("%s", p.advice[i]);
}

static void test_plan_refuses_nonsense(void) {
    struct err e = {0};
    struct plan p;
    struct plan_input in = default_pair();
    in.context = 0;
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    in = default_pair();
    in.budget_bytes = 0;
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    in = default_pair();
    in.pool.max_seqs = 0;
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    in = default_pair();
    in.target_weight_bytes = SIZE_MAX - 5;
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    in = default_pair();
    in.host_bytes = SIZE_MAX - 5;
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    in = default_pair();
    memset(in.pool.shape, 0, sizeof in.pool.shape);
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    in = default_pair();
    in.pool.arena_bytes = 1000;
    assert_int_equal(plan_make(&p, &in, &e), E_RANGE);
    assert_non_null(strstr(e.message, "1000"));
}

static void test_plan_renders(void) {
    struct plan_input in = default_pair();
    struct strbuf b = {0};
    struct plan p;
    char long_note[300];
    memset(long_note, 'x', sizeof long_note - 1);
    long_note[sizeof long_note - 1] = 0;
    in.extra[0] = (struct plan_item){"a \"name\" that is far longer than its field", 4096,
                                     PLAN_HOST, PLAN_KNOB_NONE, long_note};
    in.device_is_host = false;
    make(&p, &in);
    plan_render_text(&p, &b);
    assert_false(b.failed);
    assert_non_null(strstr(b.data, "98,362,432"));
    assert_non_null(strstr(b.data, "KV pool"));
    assert_non_null(strstr(b.data, "sum on the device"));
    strbuf_clear(&b);
    plan_render_json(&p, &b);
    json_error_t error;
    json_t *root = json_loads(b.data, JSON_REJECT_DUPLICATES, &error);
    if (!root) fail_msg("%s in %s", error.text, b.data);
    json_t *pool = json_object_get(root, "pool");
    assert_int_equal(json_integer_value(json_object_get(pool, "arena_bytes")), p.pool.arena_bytes);
    assert_int_equal(json_array_size(json_object_get(root, "lines")), p.n_lines);
    json_t *by = json_object_get(root, "seqs_by_context");
    json_t *last = json_array_get(by, json_array_size(by) - 1);
    assert_int_equal(json_integer_value(json_object_get(last, "context")), in.context);
    json_decref(root);
    strbuf_deinit(&b);
}

/* ---- What sparse reading gains ---- */

/* A 7B shape without grouped heads at 32K, one tenth kept: figures that can be worked out by hand.
 */
static struct target_gain_input wide_model(void) {
    return (struct target_gain_input){.n_layers = 32,
                                      .n_shallow = 6,
                                      .n_heads = 32,
                                      .head_dim = 128,
                                      .kv_layer_bytes = 2 * 32 * 128 * 2,
                                      .weight_bytes = 13.2e9,
                                      .weight_macs = 6.6e9,
                                      .n_tokens = 32768,
                                      .n_kept = 3328,
                                      .batch = 1,
                                      .bandwidth = 4e12,
                                      .rate = 4e14};
}

static void test_plan_gain_by_hand(void) {
    struct target_gain_input in = wide_model();
    struct target_gain g;
    struct err e = {0};
    assert_ok(target_gain(&g, &in, &e), e);
    double kept = 3328. / 32768, kv = 32. * 32768 * 16384;
    assert_near(g.share, (6 + 26 * kept) / 32, 1e-12);
    assert_near(g.kv_bytes, kv, 1);
    assert_near(g.kv_bytes_sparse, kv * g.share, 1);
    assert_near(g.kv_share, kv / (kv + 13.2e9), 1e-12);
    /* Everything is bound by memory here: seconds are bytes. */
    assert_near(g.dense_seconds, (13.2e9 + kv) / 4e12, 1e-12);
    assert_near(g.gain, (13.2e9 + kv) / (13.2e9 + kv * g.share), 1e-9);
    assert_near(g.even_tokens, 13.2e9 / (32 * 16384.), 1e-6);
    assert_near(g.macs_per_byte, (6.6e9 + 2. * 4096 * 32 * 32768) / (13.2e9 + kv), 1e-9);
    assert_near(g.machine_macs_per_byte, 100, 1e-9);
    assert_int_equal(g.is_long, TARGET_YES);
    assert_int_equal(g.is_memory_bound, TARGET_YES);
    assert_int_equal(g.is_kv_bound, TARGET_YES);
    assert_int_equal(g.n_no, 0);
    /* Four sequences: their KV is four times as much, the weights are read once. */
    in.batch = 4;
    double one = g.gain;
    assert_ok(target_gain(&g, &in, &e), e);
    assert_near(g.kv_bytes, 4 * kv, 1);
    assert_true(g.gain > one);
    assert_near(g.even_tokens, 13.2e9 / (4 * 32 * 16384.), 1e-6);
    /* Without speeds: bytes alone, and one question stays open. */
    in.bandwidth = in.rate = 0;
    double with = g.gain;
    assert_ok(target_gain(&g, &in, &e), e);
    assert_near(g.gain, with, 1e-9);
    assert_int_equal(g.is_memory_bound, TARGET_UNKNOWN);
    assert_true(g.dense_seconds == 0 && g.n_no == 0);
}

/* The longer of reading and computing, operation by operation. */
static void test_plan_gain_bound_by_products(void) {
    struct target_gain_input in = wide_model();
    struct target_gain g;
    struct err e = {0};
    in.rate = 1e12; /* 4 bytes a product */
    in.n_tokens = 4096;
    in.n_kept = 512;
    assert_ok(target_gain(&g, &in, &e), e);
    double positions = 32. * 4096, left = 6. * 4096 + 26. * 512;
    assert_near(g.dense_seconds, 6.6e9 / 1e12 + 2 * 4096 * positions / 1e12, 1e-12);
    assert_near(g.sparse_seconds, 6.6e9 / 1e12 + 2 * 4096 * left / 1e12, 1e-12);
    assert_int_equal(g.is_long, TARGET_NO);
    assert_int_equal(g.is_memory_bound, TARGET_NO);
    assert_int_equal(g.is_kv_bound, TARGET_NO);
    assert_int_equal(g.n_no, 3);
    /* Everything kept gains nothing. */
    in.n_kept = in.n_tokens;
    assert_ok(target_gain(&g, &in, &e), e);
    assert_true(g.gain == 1 && g.share == 1);
    /* All layers deep, or none. */
    in.n_kept = 64;
    in.n_shallow = 0;
    assert_ok(target_gain(&g, &in, &e), e);
    assert_near(g.share, 64. / 4096, 1e-12);
    in.n_shallow = 32;
    assert_ok(target_gain(&g, &in, &e), e);
    assert_true(g.share == 1);
}

static void test_plan_gain_refuses(void) {
    for (int i = 0; i < 14; i++) {
        struct target_gain_input in = wide_model();
        struct target_gain g;
        struct err e = {0};
        if (i == 0) in.n_layers = 0;
        if (i == 1) in.n_shallow = 33;
        if (i == 12) in.rate = 1e-300; /* would make gains of infinities */
        if (i == 13) in.bandwidth = .5;
        if (i == 2) in.n_kept = 32769;
        if (i == 3) in.n_kept = 0;
        if (i == 4) in.n_tokens = 0;
        if (i == 5) in.batch = 0;
        if (i == 6) in.weight_bytes = NAN;
        if (i == 7) in.weight_macs = 0;
        if (i == 8) in.bandwidth = -1;
        if (i == 9) in.rate = INFINITY;
        if (i == 10) in.kv_layer_bytes = 0;
        if (i == 11) in.head_dim = 0;
        assert_int_equal(target_gain(&g, &in, &e), E_RANGE);
    }
}

const struct test tests[] = {
    {"plan_default_pair", TEST_QUICK, 5000, test_plan_default_pair},
    {"plan_agrees_with_pool", TEST_QUICK, 20000, test_plan_agrees_with_pool},
    {"plan_advice_works", TEST_QUICK, 20000, test_plan_advice_works},
    {"plan_advises_no_zero", TEST_QUICK, 5000, test_plan_advises_no_zero},
    {"plan_refuses_nonsense", TEST_QUICK, 5000, test_plan_refuses_nonsense},
    {"plan_gain_by_hand", TEST_QUICK, 5000, test_plan_gain_by_hand},
    {"plan_gain_bound_by_products", TEST_QUICK, 5000, test_plan_gain_bound_by_products},
    {"plan_gain_refuses", TEST_QUICK, 5000, test_plan_gain_refuses},
    {"plan_renders", TEST_QUICK, 5000, test_plan_renders},
    {0},
};
