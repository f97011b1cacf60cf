/* Speculation changes nothing but time. Requests of many kinds run once without speculation, alone;
 * then again with every draft length, auto, lookup alone, a windowed draft, in batches with
 * cancelled neighbours: tokens, log-probabilities, the hash of every committed logits row, of all
 * committed K and V, and how the answer ended must be the same to the bit, greedy or by Gumbel
 * coupling. Counters prove that acceptances, rejections and rollbacks across page borders happened.
 * Once over a tiny random pair, where everything is fast and the draft is wrong often; once over
 * the default pair. Then what goes wrong: a draft of another vocabulary, NaN in a draft, no memory
 * for drafts, a draft of a shorter context. */
#include "tests/speculation_bed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"

/* ---- The tiny pair ---- */

static const struct tiny_options *tiny_target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.dtype = KERN_Q8_0;
    return &t;
}

static void check_tiny(bool gumbel, bool borrow) {
    struct bed b;
    struct tiny_draft d;
    int32_t ids[TINY_VOCAB];
    int n = 0;
    tiny_draft_default(&d, tiny_target());
    if (borrow) { /* every other id, and the end of turn */
        for (int i = 0; i < TINY_VOCAB; i++)
            if (i % 2 == 0 || i == TINY_IM_END) ids[n++] = i;
        d.borrow_embedding = true;
        d.head_ids = ids;
        d.n_head_ids = n;
    }
    bed_tiny(&b, tiny_target(), &d);
    b.gumbel = gumbel;
    bed_check(&b, bed_all_lengths, BED_N_LENGTHS, true);
    bed_close_tiny(&b);
}

/* Both caches of 8 bits: a place that a rollback gave up is written again, scales and all. */
static void test_speculation_kv_q8_0(void) {
    static const int lengths[] = {4, VERIFY_DRAFT_AUTO};
    struct bed b;
    struct tiny_draft d;
    tiny_draft_default(&d, tiny_target());
    bed_tiny(&b, tiny_target(), &d);
    b.o.kv_type = "q8_0";
    bed_check(&b, lengths, 2, true);
    bed_close_tiny(&b);
}

static void test_speculation_greedy(void) {
    check_tiny(false, false);
}
static void test_speculation_gumbel(void) {
    check_tiny(true, false);
}
static void test_speculation_reduced_head(void) {
    check_tiny(false, true);
}
static void test_speculation_reduced_head_gumbel(void) {
    check_tiny(true, true);
}

/* ---- Edges ---- */

/* The pair with a fixed draft length; 0: the target alone. */
static struct engine *open_pair(struct bed *b, int draft_tokens) {
    struct err e = {0};
    struct engine *g;
    b->o.model_path = b->target;
    b->o.draft_path = draft_tokens ? b->draft : NULL;
    b->o.draft_tokens = draft_tokens;
    assert_ok(engine_open(&g, &b->o, NULL, NULL, &e), e);
    return g;
}

/* An answer that runs into the context's end, whatever is drafted. */
static void test_speculation_context_end(void) {
    struct bed b;
    struct tiny_draft d;
    tiny_draft_default(&d, tiny_target());
    bed_tiny(&b, tiny_target(), &d);
    b.o.context = 200;
    struct engine_submit_options s;
    int32_t prompt[150], want[50], got[50];
    tiny_prompt(9, prompt, 150);
    tiny_submit_options(&s, prompt, 150);
    s.params.max_tokens = 100;
    s.params.ignore_eos = true;
    for (int g = 0; g <= 8; g++) {
        struct engine_progress p;
        struct engine *engine = open_pair(&b, g);
        int n = tiny_run(engine, &s, g ? got : want, &p);
        assert_int_equal(n, 50);
        assert_int_equal(p.finish, ENGINE_LENGTH);
        if (g) assert_memory_equal(got, want, sizeof want);
        tiny_assert_pool_whole(engine);
        engine_close(engine);
    }
    bed_close_tiny(&b);
}

/* A draft of a shorter context stops proposing there and says so; the answer is the same. */
static void test_speculation_short_draft(void) {
    struct bed b;
    struct tiny_draft d;
    tiny_draft_default(&d, tiny_target());
    d.context = 128;
    bed_tiny(&b, tiny_target(), &d);
    struct engine_submit_options s;
    int32_t prompt[100], want[90], got[90];
    tiny_prompt(10, prompt, 100);
    tiny_submit_options(&s, prompt, 100);
    s.params.max_tokens = 90;
    s.params.ignore_eos = true;
    s.params.lookup = false;
    for (int g = 0; g <= 4; g += 4) {
        struct engine_progress p;
        struct engine *engine = open_pair(&b, g);
        assert_int_equal(tiny_run(engine, &s, g ? got : want, &p), 90);
        if (g) {
            assert_memory_equal(got, want, sizeof want);
            assert_int_equal(p.no_draft, ENGINE_DRAFT_CONTEXT);
            assert_true(p.speculation.n_rounds > 2);
            assert_true(p.speculation.n_plain_rounds > 40);
        }
        engine_close(engine);
    }
    bed_close_tiny(&b);
}

/* Requests that ask for drafts where the engine has none by itself: whoever's prompt ends in the
 * same step still finds a row of logits. */
static void test_speculation_asked_for(void) {
    enum { N = 24, N_OUT = 12 };
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    struct engine_request *r[N];
    uint64_t n_rounds = 0;
    tiny_draft_default(&d, tiny_target());
    bed_tiny(&b, tiny_target(), &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 0;
    for (b.o.max_seqs = 1; b.o.max_seqs <= 3; b.o.max_seqs++) {
        assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
        for (int i = 0; i < N; i++) {
            struct engine_submit_options s;
            int32_t prompt[40];
            tiny_prompt(500 + (uint64_t)i, prompt, 40);
            tiny_submit_options(&s, prompt, 1 + i % 40);
            s.params.max_tokens = N_OUT + i % 5;
            s.params.ignore_eos = true;
            s.params.draft_tokens = 8;
            r[i] = tiny_submit(g, &s);
        }
        for (int i = 0; i < N; i++) {
            struct engine_progress p = tiny_wait(r[i]);
            assert_int_equal(p.n_tokens, N_OUT + i % 5);
            n_rounds += p.speculation.n_rounds;
            engine_release(g, r[i]);
        }
        assert_true(n_rounds > 0);
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
    bed_close_tiny(&b);
}

/* Long rounds of many sequences leave a small step's rows to a prompt, too: it is answered while
 * they go on. */
static void test_speculation_prompts_go_on(void) {
    enum { N = 8 };
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    struct engine_submit_options s;
    struct engine_request *r[N];
    int32_t prompt[100];
    tiny_draft_default(&d, tiny_target());
    bed_tiny(&b, tiny_target(), &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 8;
    b.o.max_seqs = N + 1;
    b.o.max_rows = 9 * N;
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    for (int i = 0; i < N; i++) {
        tiny_prompt(600 + (uint64_t)i, prompt, 10);
        tiny_submit_options(&s, prompt, 10);
        s.params.max_tokens = 240;
        s.params.ignore_eos = true;
        r[i] = tiny_submit(g, &s);
    }
    for (int i = 0; i < N; i++) tiny_wait_tokens(r[i], 2);
    tiny_prompt(700, prompt, 100);
    tiny_submit_options(&s, prompt, 100);
    s.params.max_tokens = 1;
    struct engine_request *late = tiny_submit(g, &s);
    struct engine_progress p = tiny_wait(late);
    assert_int_equal(p.n_tokens, 1);
    for (int i = 0; i < N; i++) {
        struct engine_progress q = tiny_wait(r[i]);
        assert_int_equal(q.n_tokens, 240);
        assert_true(q.finished_ns > p.finished_ns);
        engine_release(g, r[i]);
    }
    engine_release(g, late);
    tiny_assert_pool_whole(g);
    engine_close(g);
    bed_close_tiny(&b);
}

/* Where pages run short, drafts are given up before anybody waits or fails. */
static void test_speculation_starved(void) {
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    tiny_draft_default(&d, tiny_target());
    bed_tiny(&b, tiny_target(), &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 4;
    b.o.kv_memory_bytes = (size_t)30 * TINY_BLOCK_BYTES;
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    enum { N = 12 };
    struct engine_request *r[N];
    int n_without = 0;
    for (int i = 0; i < N; i++) {
        struct engine_submit_options s;
        int32_t prompt[200];
        tiny_prompt(300 + (uint64_t)i, prompt, 200);
        tiny_submit_options(&s, prompt, 200);
        s.params.max_tokens = 120;
        s.params.ignore_eos = true;
        r[i] = tiny_submit(g, &s);
    }
    for (int i = 0; i < N; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        assert_int_equal(p.finish, ENGINE_LENGTH);
        assert_int_equal(p.n_tokens, 120);
        n_without += p.no_draft == ENGINE_DRAFT_MEMORY;
        engine_release(g, r[i]);
    }
    tiny_assert_pool_whole(g);
    struct engine_stats s;
    engine_get_stats(g, &s);
    assert_true(n_without > 0);
    assert_int_equal(s.n_draft_starved, n_without);
    engine_close(g);
    bed_close_tiny(&b);
}

/* NaN in the draft's weights: that request fails with a clear error, one without a draft goes on.
 */
static void test_speculation_nan_draft(void) {
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    tiny_draft_default(&d, tiny_target());
    d.noise = INFINITY;
    bed_tiny(&b, tiny_target(), &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 3;
    b.o.lookup = false;
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    struct engine_submit_options s;
    struct engine_progress p;
    int32_t prompt[20];
    tiny_prompt(4, prompt, 20);
    tiny_submit_options(&s, prompt, 20);
    struct engine_request *r = tiny_submit(g, &s);
    p = tiny_wait(r);
    assert_int_equal(p.finish, ENGINE_FAILED);
    assert_int_equal(p.error_code, E_NUMERIC);
    assert_non_null(strstr(p.error, "draft"));
    engine_release(g, r);
    s.params.draft_tokens = 0;
    assert_int_equal(tiny_run(g, &s, NULL, &p), 16);
    assert_int_equal(p.finish, ENGINE_LENGTH);
    tiny_assert_pool_whole(g);
    engine_close(g);
    bed_close_tiny(&b);
}

/* Refused at start, naming what is wrong; and ranges of the settings. */
static void test_speculation_refusals(void) {
    struct bed b;
    struct tiny_draft d;
    struct tiny_options other;
    struct err e = {0};
    struct engine *g = NULL;
    tiny_draft_default(&d, tiny_target());
    bed_tiny(&b, tiny_target(), &d);
    tiny_model_default(&other);
    other.hidden = 128;
    other.seed = 99;
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 17;
    assert_int_equal(engine_open(&g, &b.o, NULL, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "17"));
    b.o.draft_tokens = 3;
    b.o.draft_window = 100;
    assert_int_equal(engine_open(&g, &b.o, NULL, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "100"));
    b.o.draft_window = 0;
    b.o.draft_path = "/nonexistent/draft.gguf";
    assert_int_not_equal(engine_open(&g, &b.o, NULL, NULL, &e), 0);
    assert_non_null(strstr(e.message, "nonexistent"));
    /* A borrowing draft that was made for another target. */
    char *wrong = strdup(b.target);
    d.borrow_embedding = true;
    char *borrower = strdup(tiny_draft_file(&other, &d));
    b.o.draft_path = borrower;
    assert_int_not_equal(engine_open(&g, &b.o, NULL, NULL, &e), 0);
    assert_non_null(strstr(e.message, "embedding"));
    assert_null(g);
    unlink(borrower);
    free(borrower);
    free(wrong);
    bed_close_tiny(&b);
}

/* A head of padding alone has nothing that may be drawn; beside one token it is no harm. */
static void test_speculation_head_of_padding(void) {
    static const int32_t ids[] = {'a', TINY_VOCAB - 1};
    struct tiny_options t = *tiny_target();
    struct engine_options o;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g = NULL;
    t.padded = true;
    tiny_engine_options(&o);
    o.draft_tokens = 4;
    o.model_path = tiny_model_file(&t);
    tiny_draft_default(&d, &t);
    d.borrow_embedding = true;
    for (int n = 2; n > 0; n--) {
        d.head_ids = ids + 2 - n;
        d.n_head_ids = n;
        o.draft_path = tiny_draft_file(&t, &d);
        int rc = engine_open(&g, &o, NULL, NULL, &e);
        unlink(o.draft_path);
        if (n == 1) break;
        struct engine_submit_options s;
        struct engine_progress p;
        int32_t prompt[20];
        assert_ok(rc, e);
        tiny_prompt(4, prompt, 20);
        tiny_submit_options(&s, prompt, 20);
        s.params.lookup = false;
        s.params.ignore_eos = true;
        assert_int_equal(tiny_run(g, &s, NULL, &p), 16);
        assert_true(p.speculation.n_drafted > 0);
        engine_close(g);
        g = NULL;
    }
    unlink(o.model_path);
    assert_null(g);
    assert_non_null(strstr(e.message, "tandem.draft.head_ids"));
}

/* ---- The default pair ---- */

static void check_default(int n_requests, int n_out, bool gumbel, const int *lengths,
                          int n_lengths) {
    struct bed b;
    bed_default_pair(&b, n_requests, n_out);
    b.gumbel = gumbel;
    b.n_alone = n_requests < 50 ? 3 : n_requests; /* of the long tier all */
    bed_check(&b, lengths, n_lengths, true);
    bed_close_default_pair(&b);
}

static void test_speculation_default_pair(void) {
    static const int lengths[] = {3, VERIFY_DRAFT_AUTO};
    if (TINY_SLOW) test_skip("the default pair takes minutes under a sanitizer");
    check_default(10, 48, false, lengths, 2);
}
static void test_speculation_default_pair_gumbel(void) {
    static const int lengths[] = {4};
    if (TINY_SLOW) test_skip("the default pair takes minutes under a sanitizer");
    check_default(10, 40, true, lengths, 1);
}
static void test_speculation_default_pair_all(void) {
    check_default(200, 128, false, bed_all_lengths, BED_N_LENGTHS);
}
static void test_speculation_default_pair_all_gumbel(void) {
    static const int lengths[] = {4, VERIFY_DRAFT_AUTO};
    check_default(200, 128, true, lengths, 2);
}

const struct test tests[] = {
    {"speculation_kv_q8_0", TEST_QUICK, 60000, test_speculation_kv_q8_0},
    {"speculation_greedy", TEST_QUICK, 120000, test_speculation_greedy},
    {"speculation_gumbel", TEST_QUICK, 120000, test_speculation_gumbel},
    {"speculation_reduced_head", TEST_QUICK, 120000, test_speculation_reduced_head},
    /* Full: sanitizers see the head in the one before and the noise in the one before that. */
    {"speculation_reduced_head_gumbel", TEST_FULL, 120000, test_speculation_reduced_head_gumbel},
    {"speculation_context_end", TEST_QUICK, 60000, test_speculation_context_end},
    {"speculation_short_draft", TEST_QUICK, 60000, test_speculation_short_draft},
    {"speculation_asked_for", TEST_QUICK, 60000, test_speculation_asked_for},
    {"speculation_prompts_go_on", TEST_QUICK, 60000, test_speculation_prompts_go_on},
    {"speculation_starved", TEST_QUICK, 60000, test_speculation_starved},
    {"speculation_nan_draft", TEST_QUICK, 60000, test_speculation_nan_draft},
    {"speculation_refusals", TEST_QUICK, 60000, test_speculation_refusals},
    {"speculation_head_of_padding", TEST_QUICK, 60000, test_speculation_head_of_padding},
    {"speculation_default_pair", TEST_FULL, 240000, test_speculation_default_pair},
    {"speculation_default_pair_gumbel", TEST_FULL, 240000, test_speculation_default_pair_gumbel},
    {"speculation_default_pair_all", TEST_LONG, 7200000, test_speculation_default_pair_all},
    {"speculation_default_pair_all_gumbel", TEST_LONG, 7200000,
     test_speculation_default_pair_all_gumbel},
    {0},
};
