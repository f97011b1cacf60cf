/* kvpool/: each promise of the header by example. test_kvpool_random.c has the model. */
#include "tests/harness.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kvpool/kvpool_private.h"
#include "tests/pool_helper.h"

/* ---- The pool's one allocation, watched: this definition takes the C library's place ---- */

static int n_allocs, fail_alloc;
static size_t alloc_bytes;

void *aligned_alloc(size_t align, size_t bytes) {
    n_allocs++;
    alloc_bytes += bytes;
    return fail_alloc ? NULL : memalign(align, bytes);
}

static void test_kvpool_hit_rounding(void) {
    struct kvpool_options o = options(1, 1, 1, 1024);
    struct kvpool *p = open_pool(&o);
    int32_t t[512];
    fill(t, 512, 1);
    assert_int_equal(serve(p, t, 512, true, 0), 0);
    /* n_prompt -> hit: never more than n_prompt - 32, whole blocks. */
    static const int want[][2] = {{1, 0},    {64, 0},    {95, 0},    {96, 64},   {97, 64},
                                  {159, 64}, {160, 128}, {512, 448}, {511, 448}, {480, 448}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        struct err e = {0};
        int seq, hit;
        assert_ok(open_seq(p, 512, true, t, want[i][0], 0, &seq, &hit, &e), e);
        assert_int_equal(hit, want[i][1]);
        kvpool_seq_close(p, seq);
    }
    /* Another salt finds nothing; a sequence without a draft finds what one with a draft left. */
    assert_int_equal(serve(p, t, 512, true, 1), 0);
    assert_int_equal(serve(p, t, 512, true, 1), 448);
    assert_int_equal(serve(p, t, 512, false, 0), 448);
    /* One differing token ends the hit at its block. */
    t[200] = -1;
    assert_int_equal(serve(p, t, 512, true, 0), 192);
    kvpool_close(p);
}

/* A walk can go on until what it came to is forgotten, also where the place is another's since. */
static void test_kvpool_walks(void) {
    struct kvpool_options o = options(0, 1, 1, 1024);
    struct kvpool *p = open_pool(&o);
    int32_t t[192], other[192];
    fill(t, 192, 0);
    fill(other, 192, 5000);
    assert_int_equal(serve(p, t, 128, false, 0), 0);
    struct kvpool_walk first = {.node = -1}, w;
    assert_true(kvpool_walk_next(p, &first, t));
    w = first;
    assert_true(kvpool_walk_next(p, &w, t + 64));
    assert_false(kvpool_walk_next(p, &w, t + 128));
    assert_int_equal(serve(p, t, 192, false, 0), 128); /* one block more */
    assert_true(kvpool_walk_holds(p, &w));
    assert_true(kvpool_walk_next(p, &w, t + 128));
    kvpool_cache_clear(p);
    assert_false(kvpool_walk_holds(p, &w));
    assert_false(kvpool_walk_holds(p, &first));
    assert_int_equal(serve(p, other, 192, false, 0), 0);
    assert_int_equal(serve(p, t, 192, false, 0), 0);
    assert_false(kvpool_walk_holds(p, &w));
    assert_false(kvpool_walk_holds(p, &first));
    kvpool_close(p);
}

static void test_kvpool_collisions(void) {
    struct kvpool_options o = options(0, 1, 1, 1024);
    struct kvpool *p = open_pool(&o);
    kvpool__set_hash_mask(p, 0); /* every block has the same hash */
    int32_t t[8][192];
    for (int i = 0; i < 8; i++) {
        fill(t[i], 192, 1000 * (i / 2));
        t[i][70] += i % 2; /* pairs share the first block */
        assert_int_equal(serve(p, t[i], 192, false, 7), i % 2 ? 64 : 0);
    }
    for (int i = 0; i < 8; i++) assert_int_equal(serve(p, t[i], 192, false, 7), 128);
    /* A walk tells prompts apart where they part, and finds none of another tenant. */
    uint64_t serial[8][2];
    for (int i = 0; i < 8; i++) {
        struct kvpool_walk w = {.salt = 7, .node = -1}, other = {.salt = 8, .node = -1};
        for (int b = 0; b < 2; b++) {
            assert_true(kvpool_walk_next(p, &w, t[i] + 64 * b));
            serial[i][b] = w.serial;
            for (int k = 0; k < i; k++)
                assert_true((serial[k][b] == w.serial) == (b == 0 && k / 2 == i / 2));
        }
        assert_true(kvpool_walk_holds(p, &w));
        assert_false(kvpool_walk_next(p, &w, t[i] + 64)); /* another text */
        assert_true(kvpool_walk_holds(p, &w) && kvpool_walk_holds(p, &other));
        assert_false(kvpool_walk_next(p, &other, t[i]));
    }
    /* The same block text behind another block is another block. */
    int32_t moved[192];
    memcpy(moved, t[0] + 64, 64 * sizeof *moved);
    memcpy(moved + 64, t[0], 128 * sizeof *moved);
    assert_int_equal(serve(p, moved, 192, false, 7), 0);
    for (int i = 0; i < 8; i++) assert_int_equal(serve(p, t[i], 192, false, 8), i % 2 ? 64 : 0);
    kvpool_close(p);
}

/* Four prompts of two blocks fill the pool; a fifth forgets the prompt unused longest, from its
 * end. */
static void test_kvpool_lru_order(void) {
    struct kvpool_options o = options(0, 0, 1, 2 * 8);
    struct kvpool *p = open_pool(&o);
    struct kvpool_stats st;
    int32_t t[5][128];
    for (int i = 0; i < 5; i++) fill(t[i], 128, 1000 * i);
    for (int i = 0; i < 4; i++) {
        struct err e = {0};
        int seq, hit;
        assert_ok(open_seq(p, 128, false, t[i], 128, 0, &seq, &hit, &e), e);
        kvpool_seq_extend(p, seq, KVPOOL_DEEP, 128);
        kvpool_seq_register(p, seq, t[i], 128, KVPOOL_PROMPT);
        kvpool_seq_close(p, seq);
    }
    kvpool_get_stats(p, &st);
    assert_int_equal(st.of[KVPOOL_DEEP].cached, 8);
    /* Use prompt 0 again: 1 is now the oldest. */
    struct err e = {0};
    int seq, hit;
    int32_t longer[160] = {0};
    memcpy(longer, t[0], sizeof t[0]);
    assert_ok(open_seq(p, 160, false, longer, 160, 0, &seq, &hit, &e), e);
    assert_int_equal(hit, 128);
    kvpool_seq_close(p, seq);
    /* One page of new text takes one page: the end of prompt 1, whose beginning stays. */
    assert_ok(open_seq(p, 64, false, t[4], 64, 0, &seq, &hit, &e), e);
    kvpool_seq_extend(p, seq, KVPOOL_DEEP, 64);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_evicted, 1);
    for (int i = 0; i < 4; i++) {
        int32_t first = kvpool__prefix_find(p, -1, 0, 0, t[i]);
        assert_true(first >= 0);
        int32_t second = kvpool__prefix_find(p, first, 0, 0, t[i] + 64);
        assert_int_equal(second >= 0, i != 1);
    }
    kvpool_seq_close(p, seq);
    kvpool_check(p);
    kvpool_close(p);
}

/* A sequence that hangs its blocks on another's block keeps that block young, so that the chain is
 * forgotten from its end. */
static void test_kvpool_lru_foreign_parent(void) {
    struct kvpool_options o = options(0, 0, 1, 64);
    struct kvpool *p = open_pool(&o);
    struct err e = {0};
    int32_t t[192], other[64];
    int a, b, hit;
    fill(t, 192, 0);
    fill(other, 64, 5000);
    assert_ok(open_seq(p, 192, false, t, 192, 0, &a, &hit, &e), e);
    assert_ok(open_seq(p, 192, false, t, 192, 0, &b, &hit, &e), e);
    kvpool_seq_extend(p, a, KVPOOL_DEEP, 192);
    kvpool_seq_extend(p, b, KVPOOL_DEEP, 192);
    kvpool_seq_register(p, a, t, 64, KVPOOL_PROMPT);
    kvpool_seq_register(p, b, t, 128, KVPOOL_PROMPT);
    kvpool_seq_close(p, a);
    int32_t first = kvpool__prefix_find(p, -1, 0, 0, t);
    for (int i = 0; i < 2; i++) {
        assert_ok(open_seq(p, 64, false, other, 64, 0, &a, &hit, &e), e);
        kvpool_seq_extend(p, a, KVPOOL_DEEP, 64);
        kvpool_seq_register(p, a, other, 64, KVPOOL_PROMPT);
        kvpool_seq_close(p, a);
        other[0]--;
        assert_int_not_equal(p->lru[LRU_WHOLE].head, first);
        if (i == 0) kvpool_seq_register(p, b, t, 192, KVPOOL_PROMPT);
        else kvpool_seq_close(p, b);
        assert_int_equal(p->lru[LRU_WHOLE].head, first);
        kvpool_check(p);
    }
    kvpool_close(p);
}

/* Memory moves between classes: all of it to a target without a draft, and back. */
static void test_kvpool_classes_share(void) {
    struct kvpool_options o = options(1, 1, 2, 256);
    o.max_blocks = 100;
    o.max_cached = 0;
    struct kvpool *p = open_pool(&o);
    struct err e = {0};
    int alone = kvpool_max_tokens(p, false), both = kvpool_max_tokens(p, true);
    assert_true(alone > both && both >= 64);
    for (int i = 0; i < 4; i++) {
        int seq, other, hit, n = i % 2 ? alone : both;
        assert_ok(open_seq(p, n, i % 2 == 0, NULL, 0, 0, &seq, &hit, &e), e);
        assert_int_equal(open_seq(p, 64, true, NULL, 0, 0, &other, &hit, &e), E_FULL);
        extend_all(p, seq, i % 2 == 0, n);
        kvpool_check(p);
        kvpool_seq_close(p, seq);
    }
    int seq, hit;
    assert_int_equal(open_seq(p, alone + 1, false, NULL, 0, 0, &seq, &hit, &e), E_TOO_LONG);
    assert_non_null(strstr(e.message, "at most"));
    assert_int_equal(open_seq(p, 0, false, NULL, 0, 0, &seq, &hit, &e), E_RANGE);
    kvpool_close(p);
}

/* A guarantee for the draft is kept free of target pages. */
static void test_kvpool_minimum(void) {
    struct kvpool_options o = options(1, 1, 1, 120);
    o.max_blocks = 100;
    struct kvpool *p = open_pool(&o);
    int all = kvpool_max_tokens(p, false);
    kvpool_close(p);
    o.min_bytes[KVPOOL_DRAFT] = 40 * 1024;
    p = open_pool(&o);
    int less = kvpool_max_tokens(p, false);
    assert_int_equal(all, 30 * 64);
    assert_int_equal(less, 20 * 64);
    assert_int_equal(kvpool_max_tokens(p, true), 20 * 64);
    kvpool_close(p);
    struct err e = {0};
    o.min_bytes[KVPOOL_DEEP] = 100 * 1024;
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    assert_null(p);
}

static void test_kvpool_one_allocation(void) {
    for (int i = 0; i < 3; i++) {
        struct kvpool_options o = options(i, 2, 3, 1000 + 100 * (size_t)i);
        struct kvpool *p;
        struct err e = {0};
        size_t want = kvpool_host_bytes(&o);
        n_allocs = 0;
        alloc_bytes = 0;
#ifndef __SANITIZE_ADDRESS__
        struct mallinfo2 before = mallinfo2();
#endif
        assert_ok(kvpool_open(&p, &o, &e), e);
#ifndef __SANITIZE_ADDRESS__
        struct mallinfo2 after = mallinfo2();
        size_t taken = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
        assert_in_range(taken, want, want + 8192); /* the heap's own rounding */
#endif
        assert_int_equal(n_allocs, 1);
        assert_int_equal(alloc_bytes, want);
        int32_t t[256];
        fill(t, 256, 0);
        assert_int_equal(serve(p, t, 256, i > 0, 0), 0);
        assert_int_equal(n_allocs, 1);
        kvpool_close(p);
        fail_alloc = 1;
        assert_int_equal(kvpool_open(&p, &o, &e), E_NOMEM);
        assert_null(p);
        fail_alloc = 0;
    }
}

/* A model without a draft or shallow layers: callers may loop over all classes. */
static void test_kvpool_unused_classes(void) {
    struct kvpool_options o = options(0, 0, 3, 300);
    struct kvpool *p = open_pool(&o);
    struct err e = {0};
    int need[KVPOOL_N_CLASSES], seq[9], hit, n;
    kvpool_need(p, 65, true, need);
    assert_int_equal(need[KVPOOL_DRAFT] + need[KVPOOL_SHALLOW], 0);
    assert_int_equal(need[KVPOOL_DEEP], 2);
    for (int i = 0; i < o.max_seqs; i++) {
        assert_ok(open_seq(p, 65, true, NULL, 0, 0, &seq[i], &hit, &e), e);
        extend_all(p, seq[i], true, 65);
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            kvpool_seq_pages(p, seq[i], (enum kvpool_class)c, &n);
            assert_int_equal(n, need[c]);
        }
    }
    assert_int_equal(open_seq(p, 65, true, NULL, 0, 0, &seq[8], &hit, &e), E_FULL);
    assert_non_null(strstr(e.message, "all 8 sequences"));
    kvpool_seq_close(p, seq[3]);
    assert_ok(open_seq(p, 65, true, NULL, 0, 0, &seq[3], &hit, &e), e);
    kvpool_check(p);
    kvpool_close(p);
}

static void test_kvpool_bad_options(void) {
    struct err e = {0};
    struct kvpool *p;
    struct kvpool_options o = options(0, 0, 0, 100);
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    o = options(1, 1, 1, 5);
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    assert_int_equal(kvpool_host_bytes(&o), 0);
    o = options(1, 1, 1, 100);
    o.shape[1].head_dim = INT32_MAX;
    o.shape[1].n_kv_heads = INT32_MAX;
    o.shape[1].n_layers = INT32_MAX;
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    o = options(1, 1, 1, 100);
    o.max_seqs = 0;
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    o = options(1, 1, 1, 100);
    o.max_blocks = INT32_MAX;
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    o = options(1, 1, 1, 100);
    o.max_cached = -1;
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    o = options(1, 1, 1, 100);
    o.arena_bytes = SIZE_MAX;
    assert_int_equal(kvpool_open(&p, &o, &e), E_RANGE);
    o.arena_bytes = (size_t)1 << 40; /* 2^29 pages of 2 KiB: fine but for the host's memory */
    assert_true(kvpool_host_bytes(&o) > (size_t)1 << 30);
}

/* Chosen extents waste little: shapes of real pairs, arenas from one block each upwards. */
static void test_kvpool_geometry_waste(void) {
    static const int shapes[][7] = {
        /* draft layers heads dim, target heads dim, shallow, deep */
        {4, 3, 64, 3, 64, 12, 18},  {4, 3, 64, 3, 64, 6, 24}, {28, 8, 128, 8, 128, 7, 29},
        {16, 8, 64, 8, 128, 6, 26}, {0, 1, 1, 3, 64, 30, 0},  {1, 3, 64, 32, 128, 6, 26},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int *s = shapes[i];
        struct kvpool_options o = {
            .shape = {{.n_layers = s[0], .n_kv_heads = s[1], .head_dim = s[2], .elem_bytes = 2},
                      {.n_layers = s[5], .n_kv_heads = s[3], .head_dim = s[4], .elem_bytes = 2},
                      {.n_layers = s[6], .n_kv_heads = s[3], .head_dim = s[4], .elem_bytes = 2}}};
        size_t block = 0, largest = 0;
        for (int c = 0; c < 3; c++) {
            size_t page = kvpool_page_bytes(&o.shape[c]);
            block += page;
            if (page > largest) largest = page;
        }
        for (size_t n = 8; n <= 32768; n *= 4) {
            struct kvpool_geometry g;
            struct err e = {0};
            o.arena_bytes = n * block;
            assert_ok(kvpool_geometry(&o, &g, &e), e);
            int fit = kvpool_geometry_max_blocks(&g, 1, true);
            double ideal = (double)o.arena_bytes / (double)block;
            /* An eighth at most, and of tiny arenas what one extent a class costs. */
            assert_true(fit <= ideal);
            if (n >= 128) assert_true(fit >= .875 * ideal);
            else assert_true(fit >= 1);
        }
        struct kvpool_geometry g;
        o.arena_bytes = 3 * largest;
        assert_int_equal(kvpool_geometry(&o, &g, NULL), 0);
        assert_true(kvpool_geometry_max_blocks(&g, 1, true) >= 1);
    }
}

/* Two sequences share a block; one rolls back into it and writes: it must get its own page. */
static void test_kvpool_private_copy(void) {
    struct kvpool_options o = options(0, 1, 1, 256);
    struct kvpool *p = open_pool(&o);
    struct err e = {0};
    int32_t t[256], src, dst;
    int a, b, hit, n;
    bool must_copy;
    fill(t, 256, 0);
    serve(p, t, 192, false, 0);
    assert_ok(open_seq(p, 256, false, t, 256, 0, &a, &hit, &e), e);
    assert_int_equal(hit, 192);
    assert_ok(open_seq(p, 256, false, t, 256, 0, &b, &hit, &e), e);
    int32_t shared = kvpool_seq_pages(p, a, KVPOOL_DEEP, &n)[2];
    assert_int_equal(kvpool_seq_pages(p, b, KVPOOL_DEEP, &n)[2], shared);
    kvpool_seq_truncate(p, b, KVPOOL_DEEP, 150);
    assert_ok(kvpool_seq_writable(p, b, KVPOOL_DEEP, 2, &must_copy, &src, &dst, &e), e);
    assert_true(must_copy);
    assert_int_equal(src, shared);
    assert_int_equal(kvpool_seq_pages(p, b, KVPOOL_DEEP, &n)[2], dst);
    assert_int_equal(kvpool_seq_pages(p, a, KVPOOL_DEEP, &n)[2], shared);
    kvpool_check(p);
    /* Again: it is private now. */
    assert_ok(kvpool_seq_writable(p, b, KVPOOL_DEEP, 2, &must_copy, &src, &dst, &e), e);
    assert_false(must_copy);
    kvpool_seq_close(p, b);
    /* Only the cache shares it now: the cache gives it up, no copy. */
    kvpool_seq_truncate(p, a, KVPOOL_DEEP, 150);
    assert_ok(kvpool_seq_writable(p, a, KVPOOL_DEEP, 2, &must_copy, &src, &dst, &e), e);
    assert_false(must_copy);
    kvpool_seq_extend(p, a, KVPOOL_DEEP, 200);
    kvpool_seq_close(p, a);
    assert_int_equal(serve(p, t, 192, false, 0), 128);
    kvpool_check(p);
    kvpool_close(p);
}

/* States stand behind K and V, aligned, and are part of the page; numbers that are no size give
 * none. */
static void test_kvpool_states(void) {
    struct kvpool_page_shape s = {
        .n_layers = 3, .n_kv_heads = 3, .head_dim = 20, .elem_bytes = 2, .scale_bytes = 1};
    size_t kv = (size_t)3 * 2 * 3 * (20 * 64 * 2 + 1);
    assert_int_equal(kvpool_state_offset(&s), 0);
    assert_int_equal(kvpool_page_bytes(&s), (kv + 1023) / 1024 * 1024);
    s.state_bytes = 4 * 576 * 4;
    assert_int_equal(kvpool_state_offset(&s), (kv + 63) / 64 * 64);
    assert_int_equal(kvpool_page_bytes(&s),
                     ((kv + 63) / 64 * 64 + 4 * 576 * 4 + 1023) / 1024 * 1024);
    s.state_bytes = -1;
    assert_int_equal(kvpool_page_bytes(&s), 0);
    s.state_bytes = 64;
    s.n_layers = INT32_MAX;
    s.head_dim = s.n_kv_heads = 1 << 20;
    assert_int_equal(kvpool_page_bytes(&s), 0);
    assert_int_equal(kvpool_state_offset(&s), 0);
}

const struct test tests[] = {
    {"kvpool_hit_rounding", TEST_QUICK, 5000, test_kvpool_hit_rounding},
    {"kvpool_walks", TEST_QUICK, 5000, test_kvpool_walks},
    {"kvpool_collisions", TEST_QUICK, 5000, test_kvpool_collisions},
    {"kvpool_lru_order", TEST_QUICK, 5000, test_kvpool_lru_order},
    {"kvpool_lru_foreign_parent", TEST_QUICK, 5000, test_kvpool_lru_foreign_parent},
    {"kvpool_classes_share", TEST_QUICK, 5000, test_kvpool_classes_share},
    {"kvpool_minimum", TEST_QUICK, 5000, test_kvpool_minimum},
    {"kvpool_one_allocation", TEST_QUICK, 5000, test_kvpool_one_allocation},
    {"kvpool_unused_classes", TEST_QUICK, 5000, test_kvpool_unused_classes},
    {"kvpool_bad_options", TEST_QUICK, 5000, test_kvpool_bad_options},
    {"kvpool_geometry_waste", TEST_QUICK, 5000, test_kvpool_geometry_waste},
    {"kvpool_private_copy", TEST_QUICK, 5000, test_kvpool_private_copy},
    {"kvpool_states", TEST_QUICK, 5000, test_kvpool_states},
    {0},
};
