/* kvpool/: what the draft's pages may do that the target's may not (lag, leave holes, go away), and
 * whose blocks an answer's are, by example. test_kvpool_rounds.c has the model. */
#include "tests/harness.h"

#include "base/err.h"
#include "kvpool/kvpool_private.h"
#include "tests/pool_helper.h"

struct hits {
    int seq, target, draft;
};

static struct hits open_want(struct kvpool *p, struct kvpool_want want) {
    struct err e = {0};
    struct hits h;
    assert_ok(kvpool_seq_open(p, &want, &h.seq, &h.target, &h.draft, &e), e);
    kvpool_check(p);
    return h;
}

static void check_table(const struct kvpool *p, int seq, int n_blocks, int hole_first,
                        int hole_end) {
    int n;
    const int32_t *pages = kvpool_seq_pages(p, seq, KVPOOL_DRAFT, &n);
    assert_int_equal(n, n_blocks);
    for (int b = 0; b < n; b++) assert_int_equal(pages[b] < 0, b >= hole_first && b < hole_end);
}

/* A draft that lags: the target's pages are registered without it, the draft's join the same nodes
 * later, also where the node is another sequence's; a draft page may go alone and come back. */
static void test_kvpool_draft_lags(void) {
    struct kvpool_options o = options(1, 1, 1, 256);
    struct kvpool *p = open_pool(&o);
    struct kvpool_stats st;
    int32_t t[320];
    fill(t, 320, 0);
    struct kvpool_want want = {.n_tokens = 320, .with_draft = true, .prompt = t, .n_prompt = 320};
    struct kvpool_want plain = want;
    plain.with_draft = false;
    struct hits a = open_want(p, want), b = open_want(p, want);
    extend_all(p, a.seq, false, 256);
    kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, 100);
    kvpool_seq_register(p, a.seq, t, 256, KVPOOL_PROMPT);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 4);
    assert_int_equal(st.n_draft_nodes, 1);
    struct hits c = open_want(p, want);
    assert_int_equal(c.target, 256);
    assert_int_equal(c.draft, 64);
    kvpool_seq_close(p, c.seq);
    /* b computed the same: its draft pages join a's nodes 1 and 2, its target pages stay its own.
     */
    extend_all(p, b.seq, true, 200);
    kvpool_seq_register(p, b.seq, t, 200, KVPOOL_PROMPT);
    kvpool_check(p);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 4);
    assert_int_equal(st.n_draft_nodes, 3);
    /* a catches up: its pages of blocks 1 and 2 stay its own, the one of block 3 joins. */
    kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, 256);
    kvpool_seq_register(p, a.seq, t, 256, KVPOOL_PROMPT);
    kvpool_seq_close(p, a.seq);
    kvpool_seq_close(p, b.seq);
    kvpool_check(p);
    c = open_want(p, want);
    assert_int_equal(c.target, 256);
    assert_int_equal(c.draft, 256);
    kvpool_seq_close(p, c.seq);
    /* Without a draft the same nodes are hit; their draft pages are then the first to go. */
    c = open_want(p, plain);
    assert_int_equal(c.target, 256);
    assert_int_equal(c.draft, 0);
    assert_false(kvpool_seq_has_draft(p, c.seq));
    kvpool_cache_clear(p);
    kvpool_check(p);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 4);
    assert_int_equal(st.n_draft_nodes, 0);
    assert_int_equal(st.n_evicted_draft, 4);
    assert_int_equal(st.of[KVPOOL_DRAFT].cached, 0);
    kvpool_seq_close(p, c.seq);
    /* And come back. */
    c = open_want(p, want);
    assert_int_equal(c.draft, 0);
    kvpool_seq_extend(p, c.seq, KVPOOL_DRAFT, 256);
    kvpool_seq_register(p, c.seq, t, 256, KVPOOL_PROMPT);
    kvpool_seq_close(p, c.seq);
    c = open_want(p, want);
    assert_int_equal(c.draft, 256);
    kvpool_seq_close(p, c.seq);
    kvpool_close(p);
}

/* An answer's blocks belong to its conversation; a prompt's to all of a tenant. */
static void test_kvpool_owners(void) {
    struct kvpool_options o = options(1, 1, 1, 512);
    struct kvpool *p = open_pool(&o);
    struct kvpool_stats st;
    int32_t t[512];
    fill(t, 512, 0);
    struct kvpool_want first = {.n_tokens = 400, .prompt = t, .n_prompt = 130, .conversation = 7};
    struct kvpool_want next = {.n_tokens = 512, .prompt = t, .n_prompt = 480, .conversation = 7};
    struct hits a = open_want(p, first);
    extend_all(p, a.seq, false, 400);
    kvpool_seq_register(p, a.seq, t, 130, KVPOOL_PROMPT);
    kvpool_seq_register(p, a.seq, t, 400, KVPOOL_GENERATED);
    kvpool_seq_close(p, a.seq);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 6);
    assert_int_equal(st.n_generated_nodes, 4);
    static const struct {
        uint64_t conversation, salt;
        int hit;
    } want[] = {{7, 0, 384}, {8, 0, 128}, {0, 0, 128}, {7, 1, 0}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        next.conversation = want[i].conversation;
        next.salt = want[i].salt;
        a = open_want(p, next);
        assert_int_equal(a.target, want[i].hit);
        kvpool_seq_close(p, a.seq);
    }
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_hit_generated_tokens, 256);
    /* Conversation 0 leaves no answer behind. */
    first.conversation = 0;
    first.prompt = NULL;
    a = open_want(p, first);
    extend_all(p, a.seq, false, 400);
    kvpool_seq_register(p, a.seq, t, 130, KVPOOL_PROMPT);
    kvpool_seq_register(p, a.seq, t, 400, KVPOOL_GENERATED);
    kvpool_seq_register(p, a.seq, t, 400, KVPOOL_PROMPT); /* the prompt has ended */
    kvpool_seq_close(p, a.seq);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 6);
    /* The next turn of another conversation computes the answer as a prompt: shared from then on,
     * beside the answer's own blocks, and taken before them. */
    next.conversation = 8;
    next.salt = 0;
    a = open_want(p, next);
    assert_int_equal(a.target, 128);
    extend_all(p, a.seq, false, 480);
    kvpool_seq_register(p, a.seq, t, 300, KVPOOL_PROMPT);
    kvpool_seq_close(p, a.seq);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 8);
    assert_int_equal(st.n_generated_nodes, 4);
    next.conversation = 0;
    a = open_want(p, next);
    assert_int_equal(a.target, 256);
    kvpool_seq_close(p, a.seq);
    next.conversation = 7;
    a = open_want(p, next);
    assert_int_equal(a.target, 256);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_hit_generated_tokens, 256);
    kvpool_seq_close(p, a.seq);
    kvpool_close(p);
}

/* What is computed behind a generated block stays the conversation's, whatever it is registered
 * as, and also when the nodes were forgotten meanwhile and are registered anew. */
static void test_kvpool_behind_generated(void) {
    for (int forget = 0; forget < 2; forget++) {
        struct kvpool_options o = options(0, 1, 1, 512);
        struct kvpool *p = open_pool(&o);
        struct kvpool_stats st;
        int32_t t[512];
        fill(t, 512, 0);
        struct kvpool_want want = {
            .n_tokens = 512, .prompt = t, .n_prompt = 448, .conversation = 7};
        struct hits a = open_want(p, want);
        extend_all(p, a.seq, false, 256);
        kvpool_seq_register(p, a.seq, t, 128, KVPOOL_PROMPT);
        kvpool_seq_register(p, a.seq, t, 256, KVPOOL_GENERATED);
        kvpool_seq_close(p, a.seq);
        a = open_want(p, want);
        assert_int_equal(a.target, 256);
        if (forget) kvpool__prefix_drop(p, kvpool__prefix_find(p, -1, 0, 0, t));
        extend_all(p, a.seq, false, 448);
        kvpool_seq_register(p, a.seq, t, 448, KVPOOL_PROMPT);
        kvpool_seq_close(p, a.seq);
        kvpool_check(p);
        kvpool_get_stats(p, &st);
        assert_int_equal(st.n_cached_nodes, 7);
        assert_int_equal(st.n_generated_nodes, 5);
        want.conversation = 0;
        a = open_want(p, want);
        assert_int_equal(a.target, 128);
        kvpool_seq_close(p, a.seq);
        kvpool_close(p);
    }
}

/* A draft with a window holds draft_blocks pages at once however long its text; a hit takes the
 * first block and the newest; whoever else uses a page, giving it back gives another. */
static void test_kvpool_draft_window(void) {
    struct kvpool_options o = options(1, 1, 1, 64); /* 32 pages */
    struct kvpool *p = open_pool(&o);
    struct err e = {0};
    struct kvpool_stats st;
    int32_t t[640];
    int seq, hit, n;
    fill(t, 640, 0);
    struct kvpool_want want = {
        .n_tokens = 640, .with_draft = true, .draft_blocks = 4, .prompt = t, .n_prompt = 640};
    struct hits a = open_want(p, want);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.of[KVPOOL_DRAFT].reserved, 4);
    assert_int_equal(kvpool_seq_limit(p, a.seq, KVPOOL_DRAFT), 256);
    for (n = 64; n <= 640; n += 64) {
        if (n > 256) kvpool_seq_forget_draft(p, a.seq, 1, n / 64 - 3);
        extend_all(p, a.seq, true, n);
        kvpool_seq_register(p, a.seq, t, n, KVPOOL_PROMPT);
        kvpool_check(p);
    }
    check_table(p, a.seq, 10, 1, 7);
    kvpool_seq_forget_draft(p, a.seq, 1, 7);
    kvpool_seq_forget_draft(p, a.seq, 3, 8);
    check_table(p, a.seq, 10, 1, 8);
    /* A rollback into a hole ends at the block's start; the text is then written anew. */
    kvpool_seq_truncate(p, a.seq, KVPOOL_DRAFT, 500);
    assert_int_equal(kvpool_seq_n_tokens(p, a.seq, KVPOOL_DRAFT), 448);
    kvpool_check(p);
    kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, 600);
    check_table(p, a.seq, 10, 1, 7);
    /* The last block is not whole: it stays. */
    kvpool_seq_forget_draft(p, a.seq, 8, 10);
    const int32_t *pages = kvpool_seq_pages(p, a.seq, KVPOOL_DRAFT, &n);
    assert_true(pages[8] < 0 && pages[9] >= 0);
    kvpool_seq_close(p, a.seq);
    kvpool_check(p);
    kvpool_close(p);

    /* Two share a hit in a pool of 30 pages, not one to spare: the target's 2 x (9 shared + 2), the
     * draft's 2 x 4. */
    o.arena_bytes = 60 * 1024;
    p = open_pool(&o);
    want.n_prompt = 0;
    want.draft_blocks = 0;
    want.prompt = NULL;
    a = open_want(p, want);
    extend_all(p, a.seq, true, 640);
    kvpool_seq_register(p, a.seq, t, 640, KVPOOL_PROMPT);
    kvpool_seq_close(p, a.seq);
    want.prompt = t;
    want.n_prompt = 640;
    want.draft_blocks = 4;
    a = open_want(p, want);
    struct hits b = open_want(p, want);
    assert_int_equal(a.draft, 576);
    assert_int_equal(b.draft, 576);
    check_table(p, b.seq, 9, 1, 7);
    assert_int_equal(open_seq(p, 1, false, NULL, 0, 0, &seq, &hit, &e), E_FULL);
    for (int i = 0; i < 2; i++) {
        int one = i ? b.seq : a.seq;
        kvpool_seq_forget_draft(p, one, 1, 9);
        kvpool_seq_extend(p, one, KVPOOL_DRAFT, 640);
        kvpool_seq_forget_draft(p, one, 1, 10);
        assert_int_equal(p->seqs[one].limit[KVPOOL_DRAFT], 4);
        kvpool_check(p);
    }
    kvpool_seq_close(p, a.seq);
    kvpool_seq_close(p, b.seq);
    kvpool_close(p);
}

/* A draft is taken back: its pages and its reservation serve others at once, what it had
 * registered stays cached until it is needed. */
static void test_kvpool_drop_draft(void) {
    struct kvpool_options o = options(1, 1, 1, 24); /* 12 pages */
    struct kvpool *p = open_pool(&o);
    struct err e = {0};
    struct kvpool_stats st;
    int32_t t[256];
    int seq, hit, n;
    fill(t, 256, 0);
    struct kvpool_want want = {.n_tokens = 256, .with_draft = true};
    struct hits a = open_want(p, want);
    extend_all(p, a.seq, false, 200);
    kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, 150);
    kvpool_seq_register(p, a.seq, t, 128, KVPOOL_PROMPT);
    assert_int_equal(open_seq(p, 128, false, NULL, 0, 0, &seq, &hit, &e), E_FULL);
    assert_true(kvpool_seq_has_draft(p, a.seq));
    kvpool_seq_drop_draft(p, a.seq);
    kvpool_seq_drop_draft(p, a.seq);
    kvpool_check(p);
    assert_false(kvpool_seq_has_draft(p, a.seq));
    assert_int_equal(kvpool_seq_n_tokens(p, a.seq, KVPOOL_DRAFT), 0);
    assert_int_equal(kvpool_seq_limit(p, a.seq, KVPOOL_DRAFT), 0);
    kvpool_seq_pages(p, a.seq, KVPOOL_DRAFT, &n);
    assert_int_equal(n, 0);
    kvpool_seq_forget_draft(p, a.seq, 0, 4);
    kvpool_seq_truncate(p, a.seq, KVPOOL_DRAFT, 0);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_draft_dropped, 1);
    assert_int_equal(st.of[KVPOOL_DRAFT].cached, 2);
    assert_int_equal(st.of[KVPOOL_DRAFT].reserved, 0);
    assert_ok(open_seq(p, 128, false, NULL, 0, 0, &seq, &hit, &e), e);
    extend_all(p, seq, false, 128);
    extend_all(p, a.seq, false, 256);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 2); /* nodes stayed */
    assert_int_equal(st.n_evicted, 0);
    kvpool_seq_register(p, a.seq, t, 256, KVPOOL_PROMPT);
    kvpool_seq_close(p, seq);
    kvpool_seq_close(p, a.seq);
    kvpool_check(p);
    assert_int_equal(serve(p, t, 256, false, 0), 192);
    kvpool_close(p);
}

/* A block whose draft page was given back before it was registered ends the cached draft: later
 * blocks of the draft do not join, the target's do. */
static void test_kvpool_draft_gap(void) {
    struct kvpool_options o = options(1, 1, 1, 256);
    struct kvpool *p = open_pool(&o);
    struct kvpool_stats st;
    int32_t t[512];
    fill(t, 512, 0);
    struct kvpool_want want = {.n_tokens = 512, .with_draft = true, .draft_blocks = 4};
    struct hits a = open_want(p, want);
    extend_all(p, a.seq, false, 384);
    kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, 192);
    kvpool_seq_register(p, a.seq, t, 64, KVPOOL_PROMPT);
    kvpool_seq_forget_draft(p, a.seq, 1, 2);
    for (int n = 256; n <= 384; n += 64) {
        kvpool_seq_forget_draft(p, a.seq, 1, n / 64 - 2);
        kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, n);
        kvpool_seq_register(p, a.seq, t, n, KVPOOL_PROMPT);
    }
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 6);
    assert_int_equal(st.n_draft_nodes, 1);
    /* It goes back before the gap, and is then registered as it comes. */
    kvpool_seq_truncate(p, a.seq, KVPOOL_DRAFT, 64);
    for (int n = 128; n <= 384; n += 64) {
        kvpool_seq_forget_draft(p, a.seq, 1, n / 64 - 2);
        kvpool_seq_extend(p, a.seq, KVPOOL_DRAFT, n);
        kvpool_seq_register(p, a.seq, t, 384, KVPOOL_PROMPT);
    }
    kvpool_check(p);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_draft_nodes, 6);
    kvpool_seq_close(p, a.seq);
    kvpool_close(p);
}

/* A sequence walks its chain anew and comes through its own block, which hangs on another chain
 * than the look-up found: none of that chain may be forgotten for a node behind it. */
static void test_kvpool_own_chain(void) {
    struct kvpool_options o = options(0, 1, 1, 256);
    o.max_cached = 5;
    struct kvpool *p = open_pool(&o);
    struct kvpool_stats st;
    int32_t t[512];
    fill(t, 512, 0);
    struct kvpool_want want = {.n_tokens = 384, .conversation = 7};
    struct hits a = open_want(p, want), b = open_want(p, want);
    extend_all(p, a.seq, false, 128);
    extend_all(p, b.seq, false, 384);
    kvpool_seq_register(p, a.seq, t, 64, KVPOOL_PROMPT);
    kvpool_seq_register(p, a.seq, t, 128, KVPOOL_GENERATED);
    kvpool_seq_register(p, b.seq, t, 64, KVPOOL_PROMPT);
    kvpool_seq_register(p, b.seq, t, 256, KVPOOL_GENERATED); /* a's two nodes, two of its own */
    kvpool_seq_close(p, a.seq);
    a = open_want(p, want);
    extend_all(p, a.seq, false, 128);
    kvpool_seq_register(p, a.seq, t, 128, KVPOOL_PROMPT); /* block 1 as a prompt's too */
    kvpool_seq_close(p, a.seq);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 5);
    int32_t node = kvpool__prefix_find(p, -1, 0, 0, t);
    for (int i = 1; i < 4; i++) node = kvpool__prefix_find(p, node, 0, 7, t + 64 * i);
    kvpool__prefix_drop(p, node);
    kvpool_seq_register(p, b.seq, t, 384, KVPOOL_GENERATED);
    kvpool_check(p);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_cached_nodes, 5);
    assert_int_equal(st.n_evicted, 1); /* the one dropped above */
    assert_int_equal(p->seqs[b.seq].reg_blocks, 4);
    kvpool_seq_close(p, b.seq);
    kvpool_close(p);
}

/* Draft pages that lie thinly over many extents cost more than what they save: the hit takes as
 * many as fit. And where every extent is spoken for, a draft page goes without its node. */
static void test_kvpool_draft_extents(void) {
    struct kvpool_options o = options(1, 0, 4, 8 * 40);
    o.max_blocks = 40;
    struct kvpool *p = open_pool(&o);
    struct kvpool_stats st;
    int32_t t[4][320];
    struct hits h[4], filler;
    assert_int_equal(p->n_extents, 40);
    assert_int_equal(p->cls[KVPOOL_DRAFT].ppe, 4);
    for (int i = 0; i < 4; i++) fill(t[i], 320, 1000 * i);
    struct kvpool_want want = {.n_tokens = 320, .with_draft = true, .n_prompt = 320};
    for (int i = 0; i < 4; i++) h[i] = open_want(p, want);
    for (int n = 64; n <= 320; n += 64)
        for (int i = 0; i < 4; i++) extend_all(p, h[i].seq, true, n);
    kvpool_seq_register(p, h[0].seq, t[0], 320, KVPOOL_PROMPT);
    for (int i = 0; i < 4; i++) kvpool_seq_close(p, h[i].seq);
    want.prompt = t[0];
    for (int room = 5; room >= 1; room--) {
        struct err e = {0};
        filler = open_want(p, (struct kvpool_want){.n_tokens = (40 - 5 - room) * 64});
        int rc = kvpool_seq_open(p, &want, &h[0].seq, &h[0].target, &h[0].draft, &e);
        assert_int_equal(rc, room < 2 ? E_FULL : 0);
        if (!rc) {
            assert_int_equal(h[0].target, 256);
            assert_int_equal(h[0].draft, 64 * (room < 4 ? room : 4));
            kvpool_check(p);
            kvpool_seq_close(p, h[0].seq);
        }
        kvpool_seq_close(p, filler.seq);
    }
    kvpool_cache_clear(p);

    want = (struct kvpool_want){.n_tokens = 192, .with_draft = true};
    h[0] = open_want(p, want);
    want.n_tokens = 128;
    h[1] = open_want(p, want);
    extend_all(p, h[0].seq, true, 192);
    extend_all(p, h[1].seq, true, 64);
    kvpool_seq_register(p, h[0].seq, t[0], 192, KVPOOL_PROMPT);
    kvpool_seq_close(p, h[0].seq);
    filler = open_want(p, (struct kvpool_want){.n_tokens = 37 * 64});
    kvpool_get_stats(p, &st);
    long long n_evicted = st.n_evicted, n_evicted_draft = st.n_evicted_draft;
    kvpool_seq_extend(p, h[1].seq, KVPOOL_DRAFT, 128);
    kvpool_check(p);
    kvpool_get_stats(p, &st);
    assert_int_equal(st.n_evicted, n_evicted);
    assert_int_equal(st.n_evicted_draft, n_evicted_draft + 1);
    assert_int_equal(st.n_cached_nodes, 3);
    kvpool_seq_close(p, filler.seq);
    kvpool_seq_close(p, h[1].seq);
    kvpool_close(p);
}

const struct test tests[] = {
    {"kvpool_draft_lags", TEST_QUICK, 5000, test_kvpool_draft_lags},
    {"kvpool_owners", TEST_QUICK, 5000, test_kvpool_owners},
    {"kvpool_behind_generated", TEST_QUICK, 5000, test_kvpool_behind_generated},
    {"kvpool_draft_window", TEST_QUICK, 5000, test_kvpool_draft_window},
    {"kvpool_drop_draft", TEST_QUICK, 5000, test_kvpool_drop_draft},
    {"kvpool_draft_gap", TEST_QUICK, 5000, test_kvpool_draft_gap},
    {"kvpool_own_chain", TEST_QUICK, 5000, test_kvpool_own_chain},
    {"kvpool_draft_extents", TEST_QUICK, 5000, test_kvpool_draft_extents},
    {0},
};
