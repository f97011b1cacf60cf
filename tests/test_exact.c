/* engine/ with exact answers, over the tiny model and the default pair. Goal: what a sparse target
 * proposes and dense passes verify is the dense target's answer to the bit (tokens, log-
 * probabilities, logits of emitted rows, committed K and V), for any length of the runs, any
 * proposer, alone and in batches with neighbours that are cancelled; the counters show that tokens
 * were accepted and rejected. What a run reads is a function of what is final: the naive loop's
 * masses of the newest 32 committed rows, whatever came between. Whoever leaves in the middle of a
 * run leaves nothing provisional behind. */
#include "tests/sparse_bed.h"

#include <string.h>
#include <time.h>

#include "base/err.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

enum { MOST_TOKENS = MOST_PROMPT + MOST_OUT, N_ENDS = 8 };

static struct target_settings settings(int selector, int exact) {
    struct target_settings s;
    target_settings_unset(&s);
    s.selector = selector;
    s.keep_blocks = 4;
    s.window_blocks = 1;
    s.reserve = 0.1;
    s.exact = exact;
    return s;
}

/* ---- Speculation's bed ---- */

/* Runs of 4, 1 and 16 tokens against draft off, fixed lengths and auto; lookup is on in every
 * second. */
static const int run_lengths[] = {4, 1, 16};
static const int draft_lengths[] = {0, 2, 8, VERIFY_DRAFT_AUTO, 1, 3, VERIFY_DRAFT_AUTO};

static void check_bed(bool sampled, bool gumbel, bool records) {
    struct bed b;
    watch_reset(records);
    bed_tiny_sparse(&b, sparse_target(), SELECT_LAYER);
    b.sampled = sampled;
    b.gumbel = gumbel;
    b.exact = run_lengths;
    b.n_exact = 3;
    b.n_requests = TINY_SLOW ? 9 : 16;
    b.n_out = TINY_SLOW ? 48 : 96;
    bed_check(&b, draft_lengths, records || TINY_SLOW ? 4 : 7, true);
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(!records || watch.n_replays > 200);
    bed_close_tiny(&b);
}

static void test_exact_greedy(void) {
    check_bed(false, false, false);
}
static void test_exact_sampled(void) {
    check_bed(true, false, false);
}
static void test_exact_gumbel(void) {
    check_bed(false, true, false);
}
static void test_exact_device(void) {
    check_bed(false, false, true);
}

static void check_default(bool sampled) {
    static const int lengths[] = {0, 3, VERIFY_DRAFT_AUTO}, runs[] = {16};
    struct bed b;
    watch_reset(false);
    bed_default_pair(&b, TINY_SLOW ? 2 : 4, TINY_SLOW ? 30 : 64);
    b.n_alone = 2;
    bed_sparse(&b);
    b.sampled = sampled;
    b.exact = runs;
    b.n_exact = 1;
    bed_check(&b, lengths + sampled, (TINY_SLOW ? 2 : 3) - sampled, true);
    bed_close_default_pair(&b);
}

static void test_exact_default_pair(void) {
    check_default(false);
}
static void test_exact_default_pair_sampled(void) {
    check_default(true);
}

/* ---- What a request left ---- */

/* Every second prompt repeats itself, for lookup. */
static void make_request(int i, int n_prompt, int n_out, struct sparse_record *r,
                         struct engine_submit_options *s) {
    sparse_request(i, n_prompt, n_out, r, s);
    for (int k = 12; i % 2 == 0 && k < n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
}

static void assert_text(const struct sparse_record *got, const struct sparse_record *want,
                        const char *what) {
    assert_int_equal(got->n_out, want->n_out);
    for (int i = 0; i < want->n_out; i++)
        if (got->out[i] != want->out[i])
            fail_msg("%s: token %d is %d, densely %d", what, i, got->out[i], want->out[i]);
    assert_int_equal(got->finish, want->finish);
}

/* ---- What a run reads ---- */

static void naive_masses(const struct sparse_record *r, float mass[MOST_TOKENS][MOST_BLOCKS]) {
    int32_t ids[MOST_TOKENS];
    int n = r->n_prompt + r->n_out - 1;
    memcpy(ids, r->prompt, (size_t)r->n_prompt * sizeof *ids);
    memcpy(ids + r->n_prompt, r->out, (size_t)r->n_out * sizeof *ids);
    memset(mass, 0, MOST_TOKENS * sizeof *mass);
    tiny_naive_masses(sparse_target(), SELECT_LAYER, ids, r->n_prompt, n, MOST_BLOCKS, mass[0]);
}

/* The list of a run that begins behind n final positions. */
static int naive_list(const struct sparse_record *r, const struct target_settings *asked,
                      float mass[MOST_TOKENS][MOST_BLOCKS], int n, int32_t *kept) {
    float most[MOST_BLOCKS] = {0};
    struct target_settings none, s;
    int n_rows = n - r->n_prompt; /* of the answer */
    int first = n_rows >= 32 ? n - 32 : r->n_prompt - 32;
    target_settings_unset(&none);
    s = target_settings_resolve(&none, asked, NULL);
    for (int i = first; i < n; i++)
        for (int b = 0; b < MOST_BLOCKS; b++)
            if (mass[i][b] > most[b]) most[b] = mass[i][b];
    struct target_view view = {
        .n_tokens = n, .seed = FIRST_SEED, .epoch = n_rows > 0 ? n : 0, .mass = most};
    return target_select(&s, &view, most, kept);
}

/* Runs of different lengths, proposers and company make selections behind different tokens: each is
 * the naive loop's behind so many. */
static void test_exact_lists(void) {
    static struct sparse_record r[MOST_REQUESTS];
    static float mass[MOST_TOKENS][MOST_BLOCKS];
    static const struct {
        int exact, draft_tokens, max_rows;
        bool company;
    } runs[] = {{16, 0, 192, false}, {3, 0, 64, true}, {7, 3, 100, false}, {16, 8, 48, true}};
    int32_t want[MOST_BLOCKS];
    struct engine_options o;
    struct engine_submit_options s, other;
    int n_lists = 0, n_out = TINY_SLOW ? 70 : 140;
    watch_reset(false);
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        struct target_settings of = settings(TARGET_OBSERVED, runs[k].exact);
        struct engine_request *others[4];
        sparse_options(&o);
        o.draft_tokens = runs[k].draft_tokens;
        o.max_rows = runs[k].max_rows;
        struct engine *g = sparse_open(&o, r);
        for (int i = 1; i < 5 && runs[k].company; i++) {
            make_request(i, 300 + 50 * i, n_out, &r[i], &other);
            other.sparse = &of;
            others[i - 1] = tiny_submit(g, &other);
        }
        make_request(0, 577, n_out, &r[0], &s);
        s.sparse = &of;
        sparse_run(g, &s, &r[0]);
        for (int i = 0; i < 4 && runs[k].company; i++) {
            tiny_wait(others[i]);
            engine_release(g, others[i]);
        }
        tiny_assert_pool_whole(g);
        engine_close(g);
        if (k == 0) naive_masses(&r[0], mass);
        for (int i = 0; i < r[0].n_lists; i++) {
            const struct sparse_list *list = &r[0].list[i];
            int n = i == 0 ? r[0].n_prompt : list->n_kv;
            int n_want = naive_list(&r[0], &of, mass, n, want);
            if (list->n != n_want || memcmp(list->kept, want, (size_t)n_want * sizeof *want) != 0)
                fail_msg("run %zu: the list behind %d tokens is another", k, n);
            assert_int_equal(list->n_blocks, (n + 63) / 64);
            assert_true(n_want < list->n_blocks);
            n_lists++;
        }
        assert_int_equal(r[0].n_lists, r[0].sparsity.n_selections);
        assert_int_equal(r[0].sparsity.n_blocks,
                         (r[0].n_prompt + n_out - 1) / 64 + 1 - (r[0].n_prompt + n_out - 1 < 0));
    }
    assert_true(n_lists > (TINY_SLOW ? 20 : 60));
}

/* ---- Every selector ---- */

static void test_exact_selectors(void) {
    static struct sparse_record want[2], got[2];
    static const int selectors[] = {TARGET_OBSERVED, TARGET_RECENT, TARGET_RANDOM, TARGET_MEAN,
                                    TARGET_ALL};
    struct engine_options o;
    struct engine_submit_options s;
    watch_reset(false);
    sparse_options(&o);
    struct engine *g = tiny_engine_open(&o, sparse_target());
    for (int i = 0; i < 2; i++) {
        make_request(i, 600 + i, 90, &want[i], &s);
        sparse_run(g, &s, &want[i]);
    }
    engine_close(g);
    for (size_t k = 0; k < sizeof selectors / sizeof *selectors; k++)
        for (int draft = TEST_SANITIZED ? 3 : 0; draft < 4; draft += 3) {
            sparse_options(&o);
            o.draft_tokens = draft;
            o.sparse = settings(selectors[k], 5);
            if (selectors[k] == TARGET_ALL) o.sparse.keep_blocks = TARGET_UNSET;
            g = tiny_engine_open(&o, sparse_target());
            for (int i = 0; i < 2; i++) {
                make_request(i, 600 + i, 90, &got[i], &s);
                sparse_run(g, &s, &got[i]);
                assert_text(&got[i], &want[i], target_selector_name(selectors[k]));
                const struct engine_sparsity *x = &got[i].sparsity;
                assert_int_equal(x->settings.exact, 5);
                assert_int_equal(x->exact.n_tokens, 89); /* the first is the prompt's own */
                assert_int_equal(x->exact.n_tokens - x->exact.n_passes, x->exact.n_accepted);
                if (selectors[k] != TARGET_ALL) assert_true(x->n_selections > 1);
                /* Nothing is left out: all that is proposed is right. 89 tokens, 6 a pass. */
                if (selectors[k] != TARGET_ALL) continue;
                assert_int_equal(x->exact.n_accepted, x->exact.n_provisional);
                assert_int_equal(x->exact.n_passes, 15);
            }
            engine_close(g);
        }
}

/* A prompt that loses no block is dense without any of this. */
static void test_exact_short(void) {
    static struct sparse_record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of = settings(TARGET_UNSET, 16);
    watch_reset(false);
    sparse_options(&o);
    struct engine *g = tiny_engine_open(&o, sparse_target());
    make_request(1, 200, 60, &want, &s);
    sparse_run(g, &s, &want);
    s.sparse = &of;
    sparse_run(g, &s, &got);
    assert_text(&got, &want, "short");
    assert_int_equal(got.sparsity.settings.selector, TARGET_OBSERVED);
    assert_int_equal(got.sparsity.exact.n_passes, 0);
    engine_close(g);
}

/* ---- Ends ---- */

/* The answer's length and the context's end leave no row beyond them; little room for logits makes
 * runs shorter and lets dense passes wait for each other. */
static void test_exact_ends(void) {
    static struct sparse_record want[N_ENDS], got[N_ENDS];
    static const int lengths[N_ENDS] = {1, 2, 3, 17, 18, 40, 500, 500};
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of = settings(TARGET_OBSERVED, 16);
    struct engine_request *r[N_ENDS];
    watch_reset(false);
    for (int tight = 0; tight < 2; tight++) {
        sparse_options(&o);
        o.context = 660;
        o.max_seqs = 8;
        if (tight) o.max_rows = 17;
        if (tight) o.max_draft_tokens = 1;
        o.draft_tokens = tight ? 1 : 4;
        struct engine *g = tiny_engine_open(&o, sparse_target());
        for (int i = 0; i < N_ENDS; i++) {
            make_request(i, i == 7 ? 659 : 577 + i, lengths[i], &want[i], &s);
            sparse_run(g, &s, &want[i]);
        }
        for (int i = 0; i < N_ENDS; i++) {
            make_request(i, i == 7 ? 659 : 577 + i, lengths[i], &got[i], &s);
            s.sparse = &of;
            r[i] = tiny_submit(g, &s);
        }
        for (int i = 0; i < N_ENDS; i++) {
            struct engine_progress p = tiny_wait(r[i]);
            sparse_end(&got[i], &p);
            engine_release(g, r[i]);
            assert_text(&got[i], &want[i], tight ? "tight" : "wide");
            assert_int_equal(got[i].finish, ENGINE_LENGTH);
            assert_int_equal(got[i].sparsity.exact.n_tokens, got[i].n_out - 1);
        }
        assert_int_equal(got[6].n_out, 660 - 583);
        assert_int_equal(got[7].n_out, 1);
        assert_true(got[6].sparsity.exact.n_provisional > 0);
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
}

/* The answer with `stop`, densely or exactly. */
static void run_stopped(struct engine *g, int i, const char *stop, int n_stop,
                        const struct target_settings *of, struct sparse_record *r) {
    struct engine_submit_options s;
    make_request(i, 600 + 7 * i, 100, r, &s);
    s.params.n_stops = 1;
    s.params.stops[0].n = n_stop;
    memcpy(s.params.stops[0].text, stop, (size_t)n_stop);
    s.sparse = of;
    sparse_run(g, &s, r);
}

/* A stop string inside a run ends it and, if it is the dense target's, the answer. Stops are pairs
 * of letters that the dense answer has, not too early. */
static void test_exact_stops(void) {
    static struct sparse_record want, got;
    struct engine_options o;
    struct target_settings of = settings(TARGET_OBSERVED, 16);
    struct strbuf text = {0};
    int n_stopped = 0, n_inside = 0;
    watch_reset(false);
    sparse_options(&o);
    struct engine *g = tiny_engine_open(&o, sparse_target());
    for (int i = 0; i < 8; i++) {
        run_stopped(g, i, "~~~~", 4, NULL, &want);
        strbuf_clear(&text);
        for (int k = 0; k < want.n_out; k++)
            tokenizer_token_bytes(engine_tokenizer(g), want.out[k], false, &text);
        int n_tried = 0;
        for (size_t at = text.n / 8; at + 1 < text.n && n_tried < 4; at++) {
            const char *stop = text.data + at;
            if (((stop[0] | stop[1]) & 0x80) || memmem(text.data, at, stop, 2)) continue;
            run_stopped(g, i, stop, 2, NULL, &want);
            run_stopped(g, i, stop, 2, &of, &got);
            assert_text(&got, &want, "stop");
            n_stopped += got.finish == ENGINE_STOP;
            n_inside += got.finish == ENGINE_STOP &&
                        got.sparsity.exact.n_tokens ==
                            got.sparsity.exact.n_accepted + got.sparsity.exact.n_passes - 1;
            n_tried++;
        }
    }
    strbuf_deinit(&text);
    assert_true(n_stopped > 5);
    assert_true(n_inside > 0); /* the last token was a provisional one */
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- Leaving in the middle ---- */

struct left {
    struct sparse_record *want;
    int n_checked;
};

/* Whoever leaves has K and V of final tokens alone. */
static void check_left(void *arg, const struct engine_request *request,
                       const struct engine_kv_view *v) {
    struct left *l = arg;
    struct engine_progress p;
    engine_poll(request, &p);
    (void)request;
    if (p.n_tokens == 0) return;
    /* n_tokens is published behind the step; the newest token has no K and V. */
    assert_true(v->n_kv >= p.n_prompt + p.n_tokens - 1);
    assert_true(v->n_kv <= l->want->n_prompt + l->want->n_out - 1);
    l->n_checked++;
}

/* Cancelled, paused and closed engines in the middle of runs: nothing that was final is lost,
 * nothing provisional is seen, no page stays; and what the cache was given is the dense answer's.
 */
static void test_exact_leaving(void) {
    static struct sparse_record want, got;
    struct left left = {.want = &want};
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of = settings(TARGET_OBSERVED, 16);
    watch_reset(false);
    sparse_options(&o);
    struct engine *g = tiny_engine_open(&o, sparse_target());
    make_request(0, 577, 140, &want, &s);
    sparse_run(g, &s, &want);
    engine_close(g);
    g = tiny_engine_open(&o, sparse_target());
    engine_trace_kv(g, check_left, &left);
    for (int i = 0; i < 12; i += 1 + TEST_SANITIZED) {
        make_request(0, 577, 140, &got, &s);
        s.sparse = &of;
        s.conversation = 9;
        struct engine_request *r = tiny_submit(g, &s);
        tiny_wait_tokens(r, 1 + 11 * i);
        if (i % 3 == 1) {
            struct timespec pause = {.tv_nsec = 2000000};
            engine_pause(g, r, true);
            nanosleep(&pause, NULL);
            engine_pause(g, r, false);
        }
        if (i % 3 != 2) engine_cancel(g, r);
        struct engine_progress p = tiny_wait(r);
        assert_true(p.n_tokens >= 1);
        assert_memory_equal(p.tokens, want.out, (size_t)p.n_tokens * sizeof *want.out);
        engine_release(g, r);
        tiny_assert_pool_whole(g);
    }
    assert_true(left.n_checked >= (TEST_SANITIZED ? 6 : 12));
    /* Closed under way. */
    make_request(0, 577, 140, &got, &s);
    s.sparse = &of;
    struct engine_request *r = tiny_submit(g, &s);
    tiny_wait_tokens(r, 20);
    engine_close(g);
    struct engine_progress p;
    engine_poll(r, &p);
    assert_memory_equal(p.tokens, want.out, (size_t)p.n_tokens * sizeof *want.out);
    engine_release(NULL, r);
}

/* Its pages are a dense answer's: the next turn finds them densely, exactly, and not by the
 * settings without `exact`. */
static void test_exact_owners(void) {
    static struct sparse_record r;
    enum { N_PROMPT = 640, N_OUT = 140, N_NEXT = N_PROMPT + N_OUT + 100 };
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings exact = settings(TARGET_OBSERVED, 8), off, sparse, longer;
    off = sparse = longer = exact;
    off.selector = TARGET_OFF;
    off.exact = 0;
    sparse.exact = 0;
    longer.exact = 16;
    longer.keep_blocks = 5;
    const struct {
        const struct target_settings *first, *next;
        int n_hit;
    } cases[] = {{&exact, &off, 768}, {&exact, &exact, 768},  {&exact, &longer, 768},
                 {&off, &exact, 768}, {&exact, &sparse, 640}, {&sparse, &exact, 640}};
    watch_reset(false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static int32_t prompt[N_NEXT];
        sparse_options(&o);
        struct engine *g = tiny_engine_open(&o, sparse_target());
        make_request(0, N_PROMPT, N_OUT, &r, &s);
        s.sparse = cases[i].first;
        s.conversation = 7;
        sparse_run(g, &s, &r);
        memcpy(prompt, r.prompt, N_PROMPT * sizeof *prompt);
        memcpy(prompt + N_PROMPT, r.out, N_OUT * sizeof *prompt);
        tiny_prompt(3, prompt + N_PROMPT + N_OUT, 100);
        tiny_submit_options(&s, prompt, N_NEXT);
        s.sparse = cases[i].next;
        s.conversation = 7;
        sparse_run(g, &s, &r);
        if (r.n_cached != cases[i].n_hit)
            fail_msg("case %zu: %d tokens from the cache, want %d", i, r.n_cached, cases[i].n_hit);
        engine_close(g);
    }
}

/* ---- Settings ---- */

static void refuse(struct target_settings s, int code, const char *text) {
    struct err e = {0};
    assert_int_equal(target_settings_check(&s, &e), code);
    if (!strstr(e.message, text)) fail_msg("\"%s\" does not say \"%s\"", e.message, text);
}

static void test_exact_settings(void) {
    struct target_settings base, s, r;
    struct err e = {0};
    int n = -5;
    target_settings_unset(&s);
    base = s;
    s.exact = 17;
    refuse(s, E_RANGE, "exact is 17, allowed is [0, 16]");
    s.exact = -2;
    refuse(s, E_RANGE, "exact is -2");
    s.exact = 4;
    s.selector = TARGET_OFF;
    refuse(s, E_INVALID, "exact 4, sparse \"off\"");
    s.selector = TARGET_RECENT;
    s.reselect = 20;
    refuse(s, E_INVALID, "exact 4, reselect 20");
    s.reselect = TARGET_UNSET;
    assert_ok(target_settings_check(&s, &e), e);
    /* It takes back what the base says of reselect, and the other way round. */
    base.reselect = 20;
    base.selector = TARGET_OFF;
    s.selector = TARGET_UNSET;
    r = target_settings_resolve(&base, &s, NULL);
    assert_int_equal(r.exact, 4);
    assert_int_equal(r.selector, TARGET_OBSERVED);
    assert_int_equal(r.reselect, TARGET_RESELECT_OFF);
    assert_true(target_settings_law(&r) == 0);
    base = s;
    target_settings_unset(&s);
    r = target_settings_resolve(&base, &s, NULL);
    assert_int_equal(r.exact, 4);
    assert_int_equal(r.selector, TARGET_OBSERVED);
    s.reselect = 9;
    r = target_settings_resolve(&base, &s, NULL);
    assert_int_equal(r.exact, 0);
    target_settings_unset(&s);
    s.selector = TARGET_OFF;
    r = target_settings_resolve(&base, &s, NULL);
    assert_int_equal(r.exact, 0);
    assert_int_equal(r.selector, TARGET_OFF);
    const struct {
        const char *text;
        int n;
    } good[] = {{"on", 16}, {"off", 0}, {"0", 0}, {"1", 1}, {"16", 16}};
    const char *bad[] = {"17", "-1", "1.5", "", "yes", "1e9", "nan", "16 "};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_ok(target_exact_parse(&n, good[i].text, strlen(good[i].text), &e), e);
        assert_int_equal(n, good[i].n);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(target_exact_parse(&n, bad[i], strlen(bad[i]), &e), E_RANGE);
        assert_non_null(strstr(e.message, "exact is \""));
    }
}

const struct test tests[] = {
    {"exact_greedy", TEST_FULL, 600000, test_exact_greedy},
    {"exact_sampled", TEST_FULL, 600000, test_exact_sampled},
    {"exact_gumbel", TEST_FULL, 600000, test_exact_gumbel},
    {"exact_device", TEST_FULL, 600000, test_exact_device},
    {"exact_default_pair", TEST_FULL, 900000, test_exact_default_pair},
    {"exact_default_pair_sampled", TEST_FULL, 900000, test_exact_default_pair_sampled},
    {"exact_lists", TEST_QUICK, 120000, test_exact_lists},
    {"exact_selectors", TEST_QUICK, 120000, test_exact_selectors},
    {"exact_short", TEST_QUICK, 60000, test_exact_short},
    {"exact_ends", TEST_QUICK, 120000, test_exact_ends},
    {"exact_stops", TEST_QUICK, 120000, test_exact_stops},
    {"exact_leaving", TEST_QUICK, 120000, test_exact_leaving},
    {"exact_owners", TEST_QUICK, 60000, test_exact_owners},
    {"exact_settings", TEST_QUICK, 20000, test_exact_settings},
    {0},
};
