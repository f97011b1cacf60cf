/* engine/ with a sparse target, over the tiny model. Goal: what deep layers read is what docs/
 * sparsity.md says, to the block and to the byte, and a function of the prefix and the settings
 * alone. The lists are those of a naive loop of one-row passes; they are the same in every batch,
 * chunk and draft length, behind a hit of the cache and with recordings; kernels count the bytes
 * that the lists name; unlisted pages may hold NaN; at keep 1 and below the floor every bit is
 * dense's; speculation changes no bit; and pages that a sparse answer wrote serve its own
 * conversation under its own settings alone. */
#include "tests/sparse_bed.h"

#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

static struct target_settings settings(int selector, int keep_blocks, double reserve) {
    struct target_settings s;
    target_settings_unset(&s);
    s.selector = selector;
    s.keep_blocks = keep_blocks;
    s.window_blocks = 2;
    s.reserve = reserve;
    return s;
}

/* ---- The naive loop ---- */

/* What the prompt's last 32 rows paid to each block in layers SELECT_LAYER... */
static void naive_mass(const int32_t *prompt, int n, float mass[MOST_BLOCKS]) {
    static float rows[MOST_PROMPT][MOST_BLOCKS];
    tiny_naive_masses(sparse_target(), SELECT_LAYER, prompt, n, n, MOST_BLOCKS, rows[0]);
    memset(mass, 0, MOST_BLOCKS * sizeof *mass);
    for (int i = n - 32; i < n; i++)
        for (int b = 0; b < MOST_BLOCKS; b++)
            if (rows[i][b] > mass[b]) mass[b] = rows[i][b];
}

/* The list of every selector is what target/ makes of the prefix, `observed` of the naive masses;
 * prompts whose last 32 rows lie in one block or two, begin or end one. */
static void test_sparse_lists_naive(void) {
    static const int lengths[] = {577, 640, 641, 671, 672, 673, 700, 33 * 20, 1000, 1400};
    static struct sparse_record r[MOST_REQUESTS];
    struct engine_options o;
    struct engine_submit_options s;
    float mass[MOST_BLOCKS], score[MOST_BLOCKS];
    int32_t want[MOST_BLOCKS];
    sparse_options(&o);
    struct engine *g = sparse_open(&o, r);
    for (size_t i = 0; i < (TINY_SLOW ? 4 : sizeof lengths / sizeof *lengths); i++) {
        struct target_settings of[3], none;
        target_settings_unset(&none);
        of[0] = settings(TARGET_OBSERVED, 5, 0.1);
        of[1] = settings(TARGET_RECENT, 4, 0);
        of[2] = settings(TARGET_RANDOM, TARGET_UNSET, 0.1);
        of[2].keep = 0.3;
        of[2].min_blocks = 2;
        for (int k = 0; k < 3; k++) {
            sparse_request(k, lengths[i], 3, &r[k], &s);
            s.sparse = &of[k];
            naive_mass(r[k].prompt, lengths[i], mass);
            struct target_view view = {.n_tokens = lengths[i], .seed = s.params.seed, .mass = mass};
            struct target_settings resolved = target_settings_resolve(&none, &of[k], NULL);
            int n = target_select(&resolved, &view, score, want);
            sparse_run(g, &s, &r[k]);
            assert_int_equal(r[k].n_lists, 1);
            assert_int_equal(r[k].list[0].n_blocks, (lengths[i] + 63) / 64);
            assert_int_equal(r[k].list[0].n, n);
            assert_memory_equal(r[k].list[0].kept, want, (size_t)n * sizeof *want);
            assert_true(n < r[k].list[0].n_blocks);
            assert_int_equal(r[k].sparsity.n_kept, n);
            assert_int_equal(r[k].sparsity.n_selections, 1);
            assert_int_equal(r[k].sparsity.settings.selector, of[k].selector);
        }
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- The same whatever goes on around ---- */

static void fill(int i, struct sparse_record *r, struct engine_submit_options *s) {
    static const int lengths[] = {600, 650, 703, 960, 1100, 400, 320, 1217};
    static struct target_settings of[MOST_REQUESTS];
    sparse_request(i, lengths[i % 8], TINY_SLOW ? 24 : 70 + i, r, s);
    of[i] = settings(TARGET_OBSERVED, 4 + i % 3, i % 2 ? 0.1 : 0);
    if (i % 5 == 4) of[i].selector = TARGET_RANDOM;
    s->sparse = &of[i];
}

static void test_sparse_same(void) {
    static struct sparse_record want[MOST_REQUESTS], got[MOST_REQUESTS];
    static const struct {
        int max_rows, n_threads, draft_tokens;
        bool together, again;
        const char *what;
    } runs[] = {
        {17, 1, 0, false, false, "chunks of 17"},
        {48, 1, 3, false, false, "chunks of 48, lookup"},
        {192, 2, 0, false, true, "behind a hit"},
        {64, 2, 8, true, false, "in a batch, lookup"},
        {100, 1, VERIFY_DRAFT_AUTO, true, false, "in a batch, auto"},
    };
    int n = TEST_RACES ? 3 : TINY_SLOW ? 6 : 12;
    struct engine_options o;
    sparse_options(&o);
    o.max_rows = 1500;
    sparse_run_all(&o, fill, n, false, false, want);
    for (int i = 0; i < n; i++)
        assert_in_range(sparse_newest(&want[i])->n, 3, sparse_newest(&want[i])->n_blocks);
    for (size_t k = TEST_RACES ? 2 : 0; k < sizeof runs / sizeof *runs; k++) { /* by two threads */
        sparse_options(&o);
        o.max_rows = runs[k].max_rows;
        o.n_threads = runs[k].n_threads;
        o.draft_tokens = runs[k].draft_tokens;
        sparse_run_all(&o, fill, n, runs[k].together, runs[k].again, got);
        for (int i = 0; i < n; i++) {
            sparse_assert_lists(&got[i], &want[i], runs[k].what);
            sparse_assert_rows(&got[i], &want[i], runs[k].what);
        }
    }
}

/* ---- Speculation ---- */

static void check_speculation(bool gumbel, bool records, const char *kv_type) {
    static const int few[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(records);
    bed_tiny_sparse(&b, sparse_target(), SELECT_LAYER);
    b.gumbel = gumbel;
    b.o.kv_type = kv_type;
    b.n_requests = TINY_SLOW ? 9 : 16;
    b.n_out = 96;
    bool all = !records && !kv_type && !TINY_SLOW;
    bed_check(&b, all ? bed_all_lengths : few, all ? BED_N_LENGTHS : 2, true);
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(!records || watch.n_replays > 200);
    bed_close_tiny(&b);
}

static void test_sparse_speculation(void) {
    check_speculation(false, false, NULL);
}
static void test_sparse_speculation_kv_q8_0(void) {
    check_speculation(false, false, "q8_0");
}
static void test_sparse_speculation_gumbel(void) {
    check_speculation(true, false, NULL);
}
static void test_sparse_speculation_device(void) {
    check_speculation(false, true, NULL);
}

static void test_sparse_default_pair(void) {
    static const int lengths[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(false);
    bed_default_pair(&b, TINY_SLOW ? 4 : 8, TINY_SLOW ? 40 : 64);
    b.n_alone = 4;
    bed_sparse(&b);
    bed_check(&b, lengths, TINY_SLOW ? 1 : 2, true);
    bed_close_default_pair(&b);
}

/* ---- Dense, to the bit ---- */

static void test_sparse_is_dense(void) {
    static struct sparse_record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    sparse_options(&o);
    struct engine *g = sparse_open(&o, &want);
    sparse_request(0, 900, 60, &want, &s);
    sparse_run(g, &s, &want);
    engine_close(g);
    assert_int_equal(want.n_lists, 0);
    assert_int_equal(want.sparsity.n_kept, 0);
    g = sparse_open(&o, &got);
    struct target_settings of[5];
    of[0] = settings(TARGET_ALL, TARGET_UNSET, 0);      /* by way of lists */
    of[1] = settings(TARGET_OBSERVED, TARGET_UNSET, 0); /* keep 1: nothing goes */
    of[1].keep = 1;
    of[2] = settings(TARGET_RECENT, TARGET_UNSET, 0); /* the floor's 32 blocks are more */
    of[2].keep = 0.1;
    of[3] = settings(TARGET_OBSERVED, TARGET_UNSET, 0); /* the curve begins later */
    of[3].min_blocks = 1;
    of[4] = settings(TARGET_RECENT, 3, 1); /* a reserve of everything, by way of lists */
    for (int i = 0; i < 5; i++) {
        sparse_request(0, 900, 60, &got, &s);
        s.sparse = &of[i];
        sparse_run(g, &s, &got);
        assert_int_equal(got.n_lists, i == 0 || i == 4);
        assert_int_equal(got.sparsity.kv_shallow_bytes + got.sparsity.kv_deep_bytes,
                         got.sparsity.kv_dense_bytes);
        sparse_assert_rows(&got, &want, target_selector_name(of[i].selector));
    }
    /* And sparse is not dense. */
    of[0] = settings(TARGET_RECENT, 3, 0);
    sparse_request(0, 900, 60, &got, &s);
    s.sparse = &of[0];
    sparse_run(g, &s, &got);
    assert_memory_not_equal(got.row, want.row, sizeof got.row);
    assert_true(got.row[0] == want.row[0]); /* the prompt's own last row is dense */
    engine_close(g);
}

/* ---- Bytes ---- */

/* K and V that a row at `position` reads of one layer, of so many bytes a token and head: of every
 * block, K whole, V up to the last position that it sees (kernels/cpu/attention.h). kept NULL: all
 * blocks. */
static uint64_t naive_bytes(uint64_t token, int position, const struct sparse_list *kept) {
    uint64_t n = 0;
    for (int b = 0; b <= position / 64; b++) {
        bool in = !kept || b >= kept->n_blocks;
        for (int i = 0; kept && i < kept->n; i++) in |= kept->kept[i] == b;
        int seen = position - 64 * b + 1;
        if (in) n += 2 * token * (uint64_t)(64 + (seen < 64 ? seen : 64));
    }
    return n;
}

static void count(struct engine *g, const struct engine_submit_options *s, struct sparse_record *r,
                  uint64_t n[2], int n_out) {
    struct engine_stats before, after;
    struct engine_submit_options o = *s;
    o.params.max_tokens = n_out;
    o.no_prefix_cache = true;
    tiny_assert_pool_whole(g);
    engine_get_stats(g, &before);
    sparse_run(g, &o, r);
    tiny_assert_pool_whole(g);
    engine_get_stats(g, &after);
    n[0] = after.kv_shallow_bytes_read - before.kv_shallow_bytes_read;
    n[1] = after.kv_deep_bytes_read - before.kv_deep_bytes_read;
    assert_int_equal(after.kv_bytes_read - before.kv_bytes_read, n[0] + n[1]);
}

/* The kernels' counters of both groups, prefill subtracted, are the lists' bytes. */
static void check_bytes(const char *kv_type, uint64_t head) {
    static struct sparse_record r;
    struct engine_options o;
    struct engine_submit_options s;
    sparse_options(&o);
    o.kv_type = kv_type;
    struct engine *g = sparse_open(&o, &r);
    uint64_t sum[2] = {0};
    for (int k = 0; k < 3; k++) {
        struct target_settings of = settings(k == 0   ? TARGET_OFF
                                             : k == 1 ? TARGET_OBSERVED
                                                      : TARGET_RANDOM,
                                             5, k == 2 ? 0.1 : 0);
        uint64_t prefill[2], all[2], want[2] = {0};
        int n_out = 130, n_prompt = 1100 + k;
        sparse_request(0, n_prompt, n_out, &r, &s);
        s.sparse = &of;
        count(g, &s, &r, prefill, 1);
        count(g, &s, &r, all, n_out);
        const struct sparse_list *kept = k ? sparse_newest(&r) : NULL;
        int n_left = kept ? kept->n_blocks - kept->n : 0;
        for (int i = 0; i < n_out - 1; i++) {
            int n_dense = SELECT_LAYER, n_deep = N_LAYERS - SELECT_LAYER;
            want[0] += (uint64_t)n_dense * naive_bytes(head, n_prompt + i, NULL);
            want[1] += (uint64_t)n_deep * naive_bytes(head, n_prompt + i, kept);
        }
        assert_int_equal(all[0] - prefill[0], want[0]);
        assert_int_equal(all[1] - prefill[1], want[1]);
        sum[0] += want[0];
        sum[1] += want[1];
        if (k == 1) assert_true(3 * want[1] < 3 * want[0] * 2); /* far less than dense's 3 to 1 */
        /* What the request itself is told counts positions. */
        uint64_t tokens = 0, deep = 0, token = 2 * 2 * head;
        for (int i = 0; i < n_out - 1; i++) {
            tokens += (uint64_t)(n_prompt + i + 1);
            deep += (uint64_t)(n_prompt + i + 1 - 64 * n_left);
        }
        assert_int_equal(r.sparsity.kv_shallow_bytes, tokens * token * SELECT_LAYER);
        assert_int_equal(r.sparsity.kv_deep_bytes, deep * token * (N_LAYERS - SELECT_LAYER));
        assert_int_equal(r.sparsity.kv_dense_bytes, tokens * token * N_LAYERS);
    }
    struct engine_stats stats;
    engine_get_stats(g, &stats);
    assert_int_equal(stats.n_sparse_requests, 4);
    /* Alone, an answer's passes hold generated rows alone, all after its first token. */
    assert_int_equal(stats.answers.n_passes, 3 * 129);
    assert_int_equal(stats.answers.n_tokens, 3 * 129);
    assert_int_equal(stats.answers.shallow_bytes, sum[0]);
    assert_int_equal(stats.answers.deep_bytes, sum[1]);
    assert_int_equal(stats.answers.listed_shallow_bytes, sum[0]);
    assert_int_equal(stats.answers.listed_deep_bytes, sum[1]);
    assert_int_equal(stats.n_selections, 4);
    assert_int_equal(stats.n_blocks_selected, 4 * 18);
    engine_close(g);
}

static void test_sparse_bytes(void) {
    check_bytes("f16", 16 * 2);
    check_bytes("q8_0", 16 + 2); /* a group of 16 and its scale */
}

/* ---- Poison ---- */

struct poison {
    bool kept_too;     /* also one block that is read */
    size_t head_bytes; /* of a token */
    int n_pages;
};

static void poison_pages(void *arg, const struct engine_request *r, const struct engine_kv_view *v,
                         const int32_t *kept, int n_kept, int n_blocks) {
    struct poison *p = arg;
    (void)r;
    assert_int_equal(v->n_groups, 2);
    size_t bytes = (size_t)v->group[1].n_layers * 2 * 2 * 64 * p->head_bytes;
    for (int b = 0, at = 0; b < n_blocks; b++) {
        bool in = at < n_kept && kept[at] == b;
        at += in;
        if (in && !(p->kept_too && b == kept[1])) continue;
        memset((uint8_t *)v->arena + kvpool_page_offset(v->group[1].pages[b]), 0x7e,
               bytes); /* NaN */
        p->n_pages++;
    }
}

/* Deep pages that the selection left out are never touched: they hold NaN from then on, and every
 * bit stays. One that it kept would be noticed. */
static void check_poison(const char *kv_type, size_t head_bytes) {
    static struct sparse_record want, got;
    struct poison p = {.head_bytes = head_bytes};
    struct target_settings of = settings(TARGET_OBSERVED, 5, 0.1);
    struct engine_options o;
    struct engine_submit_options s;
    sparse_options(&o);
    o.kv_type = kv_type;
    o.draft_tokens = 4; /* lookup: rounds of several rows, too */
    struct engine *g = sparse_open(&o, &want);
    sparse_request(0, 1100, 120, &want, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    sparse_run(g, &s, &want);
    engine_close(g);
    g = tiny_engine_open(&o, sparse_target());
    sparse_trace_rows(g, &got);
    engine_trace_selection(g, poison_pages, &p);
    sparse_request(0, 1100, 120, &got, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    sparse_run(g, &s, &got);
    assert_int_equal(want.n_lists, 1);
    assert_int_equal(p.n_pages, want.list[0].n_blocks - want.list[0].n);
    sparse_assert_rows(&got, &want, "NaN in unlisted pages");
    p.kept_too = true;
    struct engine_request *r = tiny_submit(g, &s);
    assert_int_equal(tiny_wait(r).finish, ENGINE_FAILED);
    engine_release(g, r);
    engine_close(g);
}

static void test_sparse_poison(void) {
    check_poison("f16", 16 * 2);
    check_poison("q8_0", 16 + 2); /* 0x7e7e is NaN of a scale */
}

/* ---- Whose pages ---- */

/* A second turn: the first prompt, its answer, some more. Under the same settings its own answer's
 * blocks come from the cache; under others, dense among them, only what the prompt left. */
static void test_sparse_owners(void) {
    static struct sparse_record r;
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of = settings(TARGET_OBSERVED, 4, 0), other, off;
    other = of;
    other.keep_blocks = 5;
    off = of;
    off.selector = TARGET_OFF;
    enum { N_PROMPT = 640, N_OUT = 140, N_NEXT = N_PROMPT + N_OUT + 100 };
    const struct {
        const struct target_settings *first, *next;
        uint64_t conversation;
        int n_hit;
    } cases[] = {
        {&of, &of, 7, 768},   {&of, &of, 8, 640},  {&of, &of, 0, 640},  {&of, &other, 7, 640},
        {&of, &off, 7, 640},  {&of, NULL, 7, 640}, {&off, &of, 7, 640}, {&off, &off, 7, 768},
        {&off, NULL, 7, 768}, {NULL, &of, 7, 640},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t prompt[N_NEXT];
        sparse_options(&o);
        struct engine *g = sparse_open(&o, &r);
        sparse_request(0, N_PROMPT, N_OUT, &r, &s);
        s.sparse = cases[i].first;
        s.conversation = 7;
        sparse_run(g, &s, &r);
        memcpy(prompt, r.prompt, N_PROMPT * sizeof *prompt);
        memcpy(prompt + N_PROMPT, r.out, N_OUT * sizeof *prompt);
        tiny_prompt(3, prompt + N_PROMPT + N_OUT, 100);
        tiny_submit_options(&s, prompt, N_NEXT);
        s.sparse = cases[i].next;
        s.conversation = cases[i].conversation;
        sparse_run(g, &s, &r);
        if (r.n_cached != cases[i].n_hit)
            fail_msg("case %zu: %d tokens from the cache, want %d", i, r.n_cached, cases[i].n_hit);
        engine_close(g);
    }
}

/* ---- Refusals ---- */

static void test_sparse_refused(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_request *r;
    struct err e = {0};
    int32_t prompt[8];
    sparse_options(&o);
    struct engine *g = tiny_engine_open(&o, sparse_target());
    tiny_prompt(1, prompt, 8);
    tiny_submit_options(&s, prompt, 8);
    struct target_settings bad = settings(TARGET_OBSERVED, TARGET_UNSET, 0);
    bad.keep = 1.5;
    s.sparse = &bad;
    assert_int_equal(engine_submit(g, &s, &r, &e), E_RANGE);
    assert_non_null(strstr(e.message, "keep is 1.5"));
    engine_close(g);
    o.sparse = bad;
    o.model_path = tiny_model_file(sparse_target());
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_RANGE);
    unlink(o.model_path);
}

const struct test tests[] = {
    {"sparse_lists_naive", TEST_QUICK, 60000, test_sparse_lists_naive},
    {"sparse_same", TEST_QUICK, 120000, test_sparse_same},
    {"sparse_speculation", TEST_FULL, 300000, test_sparse_speculation},
    {"sparse_speculation_kv_q8_0", TEST_FULL, 300000, test_sparse_speculation_kv_q8_0},
    {"sparse_speculation_gumbel", TEST_FULL, 300000, test_sparse_speculation_gumbel},
    {"sparse_speculation_device", TEST_FULL, 300000, test_sparse_speculation_device},
    {"sparse_default_pair", TEST_FULL, 600000, test_sparse_default_pair},
    {"sparse_is_dense", TEST_QUICK, 60000, test_sparse_is_dense},
    {"sparse_bytes", TEST_QUICK, 60000, test_sparse_bytes},
    {"sparse_poison", TEST_QUICK, 60000, test_sparse_poison},
    {"sparse_owners", TEST_QUICK, 60000, test_sparse_owners},
    {"sparse_refused", TEST_QUICK, 20000, test_sparse_refused},
    {0},
};
