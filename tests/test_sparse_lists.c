/* Several lists an epoch: by layer, by KV head, from a second select layer on; and quarters of
 * blocks. Goal: each list is the one that target_select makes of what its readers saw, and the
 * answer's rows read by it, to the byte. A naive loop of one-row passes, each layer and head with
 * its masses and its list in arrays of its own, gives the lists and every row's logits; batches of
 * requests of all kinds, chunks, lookup, hits and recordings change nothing; kernels count what the
 * lists name; parts of pages that no list of their layer and head names may hold NaN; lists of
 * everything are dense to the bit. */
#include "tests/list_loop.h"

#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

/* Room for lists of KV heads; who says nothing reads densely. */
static void list_options(struct engine_options *o) {
    sparse_options(o);
    o->sparse.lists = TARGET_LISTS_HEAD;
    o->sparse.quarters = 1;
}

/* ---- The naive loop ---- */

static int count_union(const struct sparse_record *r) {
    bool in[MOST_BLOCKS] = {0};
    int n = 0;
    for (int i = 0; i < r->n_lists; i++)
        for (int k = 0; k < r->list[i].n; k++) in[r->list[i].kept[k]] = true;
    for (int b = 0; b < MOST_BLOCKS; b++) n += in[b];
    return n;
}

static void test_lists_naive(void) {
    static const int lengths[] = {641, 700};
    static struct sparse_record r[N_KINDS], want;
    static struct list_loop l;
    struct engine_options o;
    struct engine_submit_options s;
    list_options(&o);
    struct engine *g = sparse_open(&o, r);
    list_loop_open(&l);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int kind = 0; kind < N_KINDS; kind++) {
            struct target_settings of =
                list_settings((enum list_kind)kind, 4, kind == HEAD ? 0.1 : 0);
            sparse_request(kind, lengths[i], TINY_SLOW ? 4 : 70, &r[kind], &s);
            memcpy(r[kind].prompt, r[0].prompt, sizeof r[0].prompt); /* of one mass */
            s.sparse = &of;
            sparse_run(g, &s, &r[kind]);
            if (kind == 0) list_loop_prompt(&l, &r[0]);
            list_loop_answer(&l, (enum list_kind)kind, &of, s.params.seed, &r[kind], &want);
            sparse_assert_lists(&r[kind], &want, target_lists_name(of.lists));
            sparse_assert_rows(&r[kind], &want, target_lists_name(of.lists));
            assert_int_equal(r[kind].sparsity.n_lists, want.n_lists);
            assert_int_equal(r[kind].sparsity.n_kept, r[kind].list[0].n);
            assert_int_equal(r[kind].sparsity.n_union, count_union(&want));
            /* Lists that all are one another would show nothing. */
            assert_true(want.n_lists == 1 || count_union(&want) > want.list[0].n);
        }
    list_loop_close(&l);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- The same whatever goes on around ---- */

/* Kinds side by side, one list of other selectors, dense and exact ones among them. */
static void fill(int i, struct sparse_record *r, struct engine_submit_options *s) {
    static const int lengths[] = {600, 650, 703, 960, 1030, 320, 577};
    static struct target_settings of[MOST_REQUESTS];
    sparse_request(i, lengths[i % 7], TINY_SLOW ? 16 : 60 + i, r, s);
    of[i] = list_settings((enum list_kind)(i % N_KINDS), 3 + i % 3, i % 2 ? 0.1 : 0);
    if (i == 6) of[i].exact = 4;
    if (i == 8) of[i].selector = TARGET_OFF;
    if (i == 0) of[i].selector = TARGET_RANDOM;
    if (i == 5) of[i].reselect = 20, of[i].reselector = TARGET_RECENT;
    s->sparse = &of[i];
}

static void test_lists_same(void) {
    static struct sparse_record want[MOST_REQUESTS], got[MOST_REQUESTS];
    static const struct {
        int max_rows, n_threads, draft_tokens;
        bool together, again;
        const char *what;
    } runs[] = {
        {17, 1, 3, false, false, "chunks of 17, lookup"},
        {192, 2, 0, false, true, "behind a hit"},
        {64, 2, 8, true, false, "in a batch, lookup"},
        {100, 1, VERIFY_DRAFT_AUTO, true, false, "in a batch, auto"},
    };
    int n = TINY_SLOW ? 6 : MOST_REQUESTS;
    struct engine_options o;
    list_options(&o);
    o.max_rows = 1500;
    sparse_run_all(&o, fill, n, false, false, want);
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        list_options(&o);
        o.max_rows = runs[k].max_rows;
        o.n_threads = runs[k].n_threads;
        o.draft_tokens = runs[k].draft_tokens;
        sparse_run_all(&o, fill, n, runs[k].together, runs[k].again, got);
        for (int i = 0; i < n; i++) {
            /* Of an exact answer the lists are those of each dense pass, which lookup moves. */
            if (i != 6) sparse_assert_lists(&got[i], &want[i], runs[k].what);
            if (i != 6) sparse_assert_rows(&got[i], &want[i], runs[k].what);
            assert_memory_equal(got[i].out, want[i].out, (size_t)want[i].n_out * sizeof(int32_t));
        }
    }
}

/* Recordings, which are told apart by the lists that they read. */
static void test_lists_speculation_device(void) {
    static const int few[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(true);
    bed_tiny_sparse(&b, sparse_target(), SELECT_LAYER);
    b.o.sparse.lists = TARGET_LISTS_HEAD;
    b.o.sparse.quarters = 2;
    b.n_requests = 8;
    b.n_out = TINY_SLOW ? 40 : 96;
    bed_check(&b, few, TINY_SLOW ? 1 : 2, true);
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(watch.n_replays > 50);
    bed_close_tiny(&b);
}

/* ---- Dense, to the bit ---- */

static void test_lists_dense(void) {
    static struct sparse_record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    list_options(&o);
    struct engine *g = sparse_open(&o, &want);
    sparse_request(0, 900, 40, &want, &s);
    sparse_run(g, &s, &want);
    engine_close(g);
    g = sparse_open(&o, &got);
    for (int kind = LAYER; kind <= SECOND; kind++) {
        struct target_settings of = list_settings((enum list_kind)kind, 3, 1); /* all in reserve */
        sparse_request(0, 900, 40, &got, &s);
        s.sparse = &of;
        sparse_run(g, &s, &got);
        assert_true(got.n_lists > 1);
        for (int i = 0; i < got.n_lists; i++) assert_int_equal(got.list[i].n, got.list[i].n_blocks);
        assert_int_equal(got.sparsity.kv_shallow_bytes + got.sparsity.kv_deep_bytes,
                         got.sparsity.kv_dense_bytes);
        sparse_assert_rows(&got, &want, "lists of everything");
    }
    engine_close(g);
}

/* ---- Bytes ---- */

/* K and V that a row at `position` reads of one layer and head: of every block, K whole, V up to
 * the last position that it sees; of the prompt's blocks, of the n_quarters of those that are not
 * pinned. */
static uint64_t naive_bytes(int position, const struct sparse_list *l, int n_quarters) {
    uint64_t n = 0;
    for (int b = 0; b <= position / 64; b++) {
        bool in = b >= l->n_blocks;
        for (int i = 0; i < l->n; i++) in |= l->kept[i] == b;
        int seen = position - 64 * b + 1;
        if (in && b > 0 && b < l->n_blocks - 1) n += ROW_BYTES * (uint64_t)(2 * 16 * n_quarters);
        else if (in) n += ROW_BYTES * (uint64_t)(64 + (seen < 64 ? seen : 64));
    }
    return n;
}

static void test_lists_bytes(void) {
    static struct sparse_record r;
    struct engine_options o;
    struct engine_submit_options s;
    list_options(&o);
    o.prefix_cache = false;
    struct engine *g = sparse_open(&o, &r);
    for (int kind = LAYER; kind < N_KINDS; kind++) {
        struct target_settings of = list_settings((enum list_kind)kind, 4, 0.1);
        enum { N_PROMPT = 901, N_OUT = 90 };
        uint64_t deep[3], want = 0, positions = 0;
        of.threshold = 0.2; /* lists of several lengths */
        of.min_blocks = 2;
        for (int i = 0; i < 2; i++) {
            struct engine_stats before, after;
            sparse_request(0, N_PROMPT, i ? N_OUT : 1, &r, &s);
            s.sparse = &of;
            tiny_assert_pool_whole(g);
            engine_get_stats(g, &before);
            sparse_run(g, &s, &r);
            tiny_assert_pool_whole(g);
            engine_get_stats(g, &after);
            deep[i] = after.kv_deep_bytes_read - before.kv_deep_bytes_read;
            deep[2] = after.answers.listed_deep_bytes - before.answers.listed_deep_bytes;
        }
        for (int i = 0; i < N_OUT - 1; i++)
            for (int p = 0; p < N_PARTS; p++) {
                const struct sparse_list *l = &r.list[list_of((enum list_kind)kind, p)];
                want += naive_bytes(N_PROMPT + i, l, of.quarters);
                positions += (uint64_t)(N_PROMPT + i + 1 - 64 * (l->n_blocks - l->n) -
                                        16 * (4 - of.quarters) * (l->n - 2));
            }
        assert_int_equal(deep[1] - deep[0], want);
        assert_int_equal(deep[2], want);
        assert_int_equal(r.sparsity.kv_deep_bytes, 2 * ROW_BYTES * positions);
    }
    engine_close(g);
}

/* ---- Poison ---- */

struct poison {
    bool kept_too;                  /* also a block that a list names */
    const struct sparse_list *want; /* lists with their quarters */
    int at, n_parts;
};

/* Quarter q of a head's K and V: NaN. K is [head_dim][64], V [64][head_dim]. */
static void poison_quarter(uint8_t *k, uint8_t *v, int q) {
    for (size_t d = 0; d < HEAD_DIM; d++) memset(k + (64 * d + 16 * (size_t)q) * 2, 0x7e, 32);
    memset(v + 16 * (size_t)q * ROW_BYTES, 0x7e, 16 * ROW_BYTES);
}

static void poison_parts(void *arg, const struct engine_request *r, const struct engine_kv_view *v,
                         const int32_t *kept, int n_kept, int n_blocks) {
    struct poison *p = arg;
    size_t head = (size_t)64 * ROW_BYTES, plane = N_KV * head;
    int layer = p->at / N_KV, kv = p->at % N_KV;
    (void)r;
    p->at++;
    for (int b = 0, at = 0; b < n_blocks; b++) {
        bool in = at < n_kept && kept[at] == b;
        unsigned reads = in ? p->want[p->at - 1].quarters[at] : 0;
        uint8_t *page = (uint8_t *)v->arena + kvpool_page_offset(v->group[1].pages[b]);
        uint8_t *k = page + 2 * (size_t)layer * plane + (size_t)kv * head;
        at += in;
        if (in && p->kept_too && layer == 1 && kv == 1 && b == kept[1]) reads = 0;
        for (int q = 0; q < 4; q++) {
            if (reads >> q & 1) continue;
            poison_quarter(k, k + plane, q);
            p->n_parts++;
        }
    }
}

static void test_lists_poison(void) {
    static struct sparse_record want, got;
    static struct list_loop l;
    struct poison p = {.want = want.list};
    struct target_settings of = list_settings(HEAD_QUARTER, 5, 0.1);
    struct engine_options o;
    struct engine_submit_options s;
    int n_out = 0;
    list_options(&o);
    o.draft_tokens = 4;
    struct engine *g = sparse_open(&o, &got);
    sparse_request(0, 900, TINY_SLOW ? 20 : 80, &got, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    sparse_run(g, &s, &got);
    engine_close(g);
    list_loop_open(&l);
    list_loop_prompt(&l, &got);
    list_loop_answer(&l, HEAD_QUARTER, &of, FIRST_SEED, &got, &want);
    list_loop_close(&l);
    for (int i = 0; i < want.n_lists; i++)
        n_out += 4 * (want.list[i].n_blocks - want.list[i].n) + 3 * (want.list[i].n - 2);
    g = tiny_engine_open(&o, sparse_target());
    sparse_trace_rows(g, &got);
    engine_trace_selection(g, poison_parts, &p);
    sparse_request(0, 900, TINY_SLOW ? 20 : 80, &got, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    sparse_run(g, &s, &got);
    assert_int_equal(p.at, N_PARTS);
    assert_int_equal(p.n_parts, n_out);
    sparse_assert_rows(&got, &want, "NaN in unlisted parts");
    p = (struct poison){.kept_too = true, .want = want.list};
    struct engine_request *r = tiny_submit(g, &s);
    assert_int_equal(tiny_wait(r).finish, ENGINE_FAILED);
    engine_release(g, r);
    engine_close(g);
}

/* ---- Refusals ---- */

static void refused(struct engine *g, struct target_settings of, int code, const char *text) {
    struct engine_submit_options s;
    struct engine_request *r;
    struct err e = {0};
    int32_t prompt[8];
    tiny_prompt(1, prompt, 8);
    tiny_submit_options(&s, prompt, 8);
    s.sparse = &of;
    int rc = engine_submit(g, &s, &r, &e);
    if (rc != code || !strstr(e.message, text))
        fail_msg("rc %d, '%s'; want %d, '%s'", rc, e.message, code, text);
}

static void test_lists_refused(void) {
    struct engine_options o;
    struct engine *g;
    struct err e = {0};
    struct target_settings of;
    list_options(&o);
    o.sparse.lists = TARGET_LISTS_LAYER;
    o.sparse.quarters = TARGET_UNSET;
    g = tiny_engine_open(&o, sparse_target());
    refused(g, list_settings(HEAD, 4, 0), E_UNSUPPORTED, "started with --lists head keeps it");
    of = list_settings(LAYER, 4, 0);
    of.selector = TARGET_RECENT;
    refused(g, of, E_INVALID, "sparse \"recent\", lists \"layer\": only \"observed\"");
    of = list_settings(SECOND, 4, 0);
    of.selector = TARGET_MEAN;
    refused(g, of, E_INVALID, "sparse \"mean\", select2: only \"observed\"");
    of = list_settings(HEAD, 4, 0);
    of.exact = 4;
    refused(g, of, E_INVALID, "exact 4, lists \"head\"");
    of = list_settings(LAYER, 4, 0);
    of.select2 = 2;
    refused(g, of, E_INVALID, "lists \"layer\", select2 2");
    of = list_settings(SECOND, 4, 0);
    of.select2 = SELECT_LAYER;
    refused(g, of, E_RANGE,
            "select2 is 1, allowed are 0 (none) and the deep layers behind the "
            "first, [2, 3]");
    of.select2 = N_LAYERS;
    refused(g, of, E_RANGE, "select2 is 4");
    of.select2 = -7;
    refused(g, of, E_RANGE, "select2 is -7");
    of.select2 = TARGET_UNSET;
    of.lists = 3;
    refused(g, of, E_RANGE, "lists is 3");
    of = list_settings(TWO_QUARTERS, 4, 0);
    refused(g, of, E_UNSUPPORTED, "quarters 2: no room is kept");
    of.selector = TARGET_RANDOM;
    refused(g, of, E_INVALID, "sparse \"random\", quarters 2: it measures blocks as a whole");
    of.quarters = 0;
    refused(g, of, E_RANGE, "quarters is 0, allowed is [1, 4]");
    engine_close(g);
    o.sparse.lists = TARGET_UNSET;
    g = tiny_engine_open(&o, sparse_target());
    refused(g, list_settings(LAYER, 4, 0), E_UNSUPPORTED, "started with --lists layer keeps it");
    refused(g, list_settings(SECOND, 4, 0), E_UNSUPPORTED, "select2: no room");
    engine_close(g);
    struct tiny_options many = *sparse_target();
    many.n_heads = many.n_kv_heads = 16;
    o.model_path = tiny_model_file(&many);
    o.sparse.select2 = 7;
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "select2 is 7"));
    o.sparse.select2 = TARGET_UNSET;
    o.sparse.lists = TARGET_LISTS_HEAD;
    o.max_seqs = KERN_MAX_LISTS / 16 + 1;
    assert_int_equal(engine_open(&g, &o, NULL, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "lists \"head\": 65 sequences of 16 KV heads"));
    unlink(o.model_path);
}

/* Whose wish counts where request and server ask for what excludes each other. */
static void test_lists_resolve(void) {
    struct target_settings base, ask, s;
    target_settings_unset(&base);
    target_settings_unset(&ask);
    base.selector = TARGET_OBSERVED;
    base.lists = TARGET_LISTS_HEAD;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_int_equal(s.lists, TARGET_LISTS_HEAD);
    uint64_t law = target_settings_law(&s);
    ask.lists = TARGET_LISTS_LAYER;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_int_equal(s.lists, TARGET_LISTS_LAYER);
    assert_true(target_settings_law(&s) != law);
    ask.lists = TARGET_UNSET;
    ask.select2 = 3;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_true(s.lists == TARGET_LISTS_ONE && s.select2 == 3);
    assert_true(target_settings_law(&s) != law);
    ask.select2 = TARGET_UNSET;
    ask.selector = TARGET_MEAN;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_int_equal(s.lists, TARGET_LISTS_ONE);
    ask.selector = TARGET_UNSET;
    ask.exact = 8;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_true(s.lists == TARGET_LISTS_ONE && s.exact == 8);
    base.lists = TARGET_UNSET;
    base.exact = 8;
    ask.exact = TARGET_UNSET;
    ask.lists = TARGET_LISTS_LAYER;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_true(s.lists == TARGET_LISTS_LAYER && s.exact == 0);
    ask.selector = TARGET_OFF;
    s = target_settings_resolve(&base, &ask, NULL);
    assert_int_equal(s.lists, TARGET_LISTS_ONE);
}

const struct test tests[] = {
    {"lists_naive", TEST_QUICK, 60000, test_lists_naive},
    {"lists_same", TEST_QUICK, 120000, test_lists_same},
    {"lists_speculation_device", TEST_FULL, 300000, test_lists_speculation_device},
    {"lists_dense", TEST_QUICK, 60000, test_lists_dense},
    {"lists_bytes", TEST_QUICK, 60000, test_lists_bytes},
    {"lists_poison", TEST_QUICK, 60000, test_lists_poison},
    {"lists_refused", TEST_QUICK, 20000, test_lists_refused},
    {"lists_resolve", TEST_QUICK, 20000, test_lists_resolve},
    {0},
};
