/* Several lists an epoch: by layer, by KV head, from a second select layer on; and quarters of
 * blocks. Goal: each list is the one that target_select makes of what its readers saw, and the
 * answer's rows read by it, to the byte. A naive loop of one-row passes, each layer and head with
 * its masses and its list in arrays of its own, gives the lists and every row's logits; batches of
 * requests of all kinds, chunks, lookup, hits and recordings change nothing; kernels count what the
 * lists name; parts of pages that no list of their layer and head names may hold NaN; lists of
 * everything are dense to the bit. */
#include "tests/engine_helper.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/err.h"
#include "model/source.h"
#include "tests/one_row.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

enum {
    N_LAYERS = 4,
    SELECT_LAYER = 1,
    N_DEEP = N_LAYERS - SELECT_LAYER,
    N_KV = 2,
    N_PARTS = N_DEEP * N_KV,
    HEAD_DIM = 16,
    MOST_PROMPT = 1100,
    MOST_OUT = 100,
    MOST_BLOCKS = (MOST_PROMPT + MOST_OUT) / 64 + 1,
    FIRST_SEED = 100,
    MOST_REQUESTS = 12,
    ROW_BYTES = HEAD_DIM * 2,
};

static const struct tiny_options *target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = N_LAYERS;
    return &t;
}

/* Room for lists of KV heads; who says nothing reads densely. */
static void list_options(struct engine_options *o) {
    tiny_engine_options(o);
    o->select_layer = SELECT_LAYER;
    o->kv_memory_bytes = (size_t)300 * TINY_BLOCK_BYTES;
    o->max_rows = 192;
    o->sparse.lists = TARGET_LISTS_HEAD;
    o->sparse.quarters = 1;
}

enum kind { ONE, LAYER, HEAD, SECOND, TWO_QUARTERS, HEAD_QUARTER, N_KINDS };

static struct target_settings settings(enum kind kind, int keep_blocks, double reserve) {
    struct target_settings s;
    target_settings_unset(&s);
    s.selector = TARGET_OBSERVED;
    s.keep_blocks = keep_blocks;
    s.window_blocks = 1;
    s.reserve = reserve;
    s.lists = kind == LAYER                          ? TARGET_LISTS_LAYER
              : kind == HEAD || kind == HEAD_QUARTER ? TARGET_LISTS_HEAD
                                                     : TARGET_LISTS_ONE;
    if (kind == SECOND) s.select2 = SELECT_LAYER + 2;
    s.quarters = kind == TWO_QUARTERS ? 2 : kind == HEAD_QUARTER ? 1 : 4;
    return s;
}

/* Which list a layer and head reads, told once more. */
static int list_of(enum kind kind, int part) {
    int layer = part / N_KV;
    return kind == LAYER                          ? layer
           : kind == HEAD || kind == HEAD_QUARTER ? part
           : kind == SECOND                       ? layer >= 2
                                                  : 0;
}

/* ---- What a request left ---- */

struct list {
    int n;
    int32_t kept[MOST_BLOCKS];
    uint8_t quarters[MOST_BLOCKS]; /* of the naive loop's; 0: all */
};

struct record {
    int n_prompt, n_out, n_lists, n_blocks, n_cached;
    int32_t prompt[MOST_PROMPT], out[MOST_OUT];
    struct list list[N_PARTS];
    uint64_t row[MOST_OUT];
    struct engine_sparsity sparsity;
};

static struct record *record_of(void *arg, const struct engine_request *r) {
    struct engine_progress p;
    engine_poll(r, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + MOST_REQUESTS) return NULL;
    return (struct record *)arg + (p.seed - FIRST_SEED);
}

static void keep_row(void *arg, const struct engine_request *request, int position,
                     const float *logits, int n) {
    struct record *r = record_of(arg, request);
    if (!r || position < r->n_prompt - 1 || position >= r->n_prompt - 1 + MOST_OUT) return;
    r->row[position - r->n_prompt + 1] = XXH3_64bits(logits, (size_t)n * sizeof *logits);
}

static void keep_list(void *arg, const struct engine_request *request,
                      const struct engine_kv_view *v, const int32_t *kept, int n_kept,
                      int n_blocks) {
    struct record *r = record_of(arg, request);
    (void)v;
    if (!r) return;
    assert_true(n_blocks <= MOST_BLOCKS && r->n_lists < N_PARTS);
    struct list *l = &r->list[r->n_lists++];
    l->n = n_kept;
    r->n_blocks = n_blocks;
    memcpy(l->kept, kept, (size_t)n_kept * sizeof *kept);
}

static void make_request(int i, int n_prompt, int n_out, struct record *r,
                         struct engine_submit_options *s) {
    memset(r, 0, sizeof *r);
    r->n_prompt = n_prompt;
    tiny_prompt(70 + (uint64_t)i, r->prompt, n_prompt);
    tiny_submit_options(s, r->prompt, n_prompt);
    s->params.seed = FIRST_SEED + (uint64_t)i;
    s->params.max_tokens = n_out;
    s->params.ignore_eos = true;
}

static struct engine *open_engine(const struct engine_options *o, struct record *records) {
    struct engine *g = tiny_engine_open(o, target());
    engine_trace_logits(g, keep_row, records);
    engine_trace_selection(g, keep_list, records);
    return g;
}

static void keep_end(struct record *r, const struct engine_progress *p) {
    if (p->finish == ENGINE_FAILED) fail_msg("seed %d: %s", (int)p->seed, p->error);
    r->n_out = p->n_tokens;
    r->n_cached = p->n_cached_prompt;
    r->sparsity = p->sparsity;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
}

static void run(struct engine *g, const struct engine_submit_options *s, struct record *r) {
    struct engine_request *request = tiny_submit(g, s);
    struct engine_progress p = tiny_wait(request);
    keep_end(r, &p);
    engine_release(g, request);
}

static void assert_lists(const struct record *got, const struct record *want, const char *what) {
    if (got->n_lists != want->n_lists)
        fail_msg("%s: %d lists, want %d", what, got->n_lists, want->n_lists);
    for (int i = 0; i < want->n_lists; i++)
        if (got->list[i].n != want->list[i].n ||
            memcmp(got->list[i].kept, want->list[i].kept,
                   (size_t)want->list[i].n * sizeof *want->list[i].kept) != 0)
            fail_msg("%s: list %d is another", what, i);
}

static void assert_rows(const struct record *got, const struct record *want, const char *what) {
    assert_int_equal(got->n_out, want->n_out);
    for (int i = 0; i < want->n_out; i++)
        if (got->out[i] != want->out[i] || got->row[i] != want->row[i])
            fail_msg("%s: token %d is %d, want %d%s", what, i, got->out[i], want->out[i],
                     got->out[i] == want->out[i] ? ", of other logits" : "");
}

/* ---- The naive loop ---- */

struct naive {
    struct kern *k;
    struct model *m;
    void *arena;
    int32_t page[2][MOST_BLOCKS], all[MOST_BLOCKS];
    float mass[N_PARTS][MOST_BLOCKS], quarter_mass[N_PARTS][MOST_BLOCKS][4], logits[TINY_VOCAB];
    /* Of the deep layers: */
    int32_t own_page[N_PARTS][MOST_BLOCKS], own_block[N_PARTS][MOST_BLOCKS], own_n[N_PARTS];
    uint8_t own_quarters[N_PARTS][MOST_BLOCKS];
};

static void naive_open(struct naive *l) {
    struct tiny_options t = *target();
    struct err e = {0};
    struct kern_options ko = {.n_threads = 1};
    struct model_caps caps = {
        .max_rows = 1, .max_seqs = 1, .max_blocks = MOST_BLOCKS, .max_logits = 1};
    struct model_source *src;
    const char *path = tiny_model_file(&t);
    size_t page = (size_t)2 * N_LAYERS * N_KV * 64 * ROW_BYTES;
    memset(l, 0, sizeof *l);
    assert_ok(kern_cpu_open(&l->k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&l->m, src, NULL, l->k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
    assert_ok(l->k->ops->reserve(l->k, page * 2 * MOST_BLOCKS, &l->arena, &e), e);
    for (int i = 0; i < MOST_BLOCKS; i++) {
        l->all[i] = i;
        for (int g = 0; g < 2; g++)
            l->page[g][i] =
                (int32_t)((size_t)((i * 7 % MOST_BLOCKS) * 2 + g) * page / KVPOOL_ALIGN);
    }
}

static void naive_close(struct naive *l) {
    l->k->ops->unreserve(l->k, l->arena);
    model_close(l->m);
    l->k->ops->close(l->k);
}

/* lists: [N_PARTS], of the prompt's n_blocks blocks; NULL: all is read. */
static void naive_row(struct naive *l, int32_t token, int at, int n_prompt,
                      const struct list *const *lists) {
    struct err e = {0};
    int32_t zero = 0, n_all = at / 64 + 1;
    bool generated = at >= n_prompt, mark = !generated && at >= n_prompt - 32;
    for (int p = 0; p < N_PARTS; p++) {
        int n = 0;
        for (int i = 0; i < n_all; i++) {
            bool in = !lists || i >= (n_prompt + 63) / 64;
            l->own_quarters[p][n] = 15;
            for (int k = 0; lists && k < lists[p]->n; k++) {
                if (lists[p]->kept[k] != i) continue;
                in = true;
                if (lists[p]->quarters[k]) l->own_quarters[p][n] = lists[p]->quarters[k];
            }
            if (!in) continue;
            l->own_block[p][n] = i;
            l->own_page[p][n++] = l->page[1][i];
        }
        l->own_n[p] = n;
    }
    struct model_pass pass = one_row_pass(&token, &at, generated, l->logits, 2);
    pass.group[0] = (struct model_group){.first_layer = 0,
                                         .n_layers = SELECT_LAYER,
                                         .arena = l->arena,
                                         .kv_dtype = KERN_F16,
                                         .slot_page = &l->page[0][at / 64],
                                         .lists = {.page = l->page[0],
                                                   .block = l->all,
                                                   .n_blocks = &n_all,
                                                   .capacity = MOST_BLOCKS,
                                                   .seq_stride = 1}};
    pass.group[1] =
        (struct model_group){.first_layer = SELECT_LAYER,
                             .n_layers = N_DEEP,
                             .arena = l->arena,
                             .kv_dtype = KERN_F16,
                             .slot_page = &l->page[1][at / 64],
                             .lists = {.page = l->own_page[0],
                                       .block = l->own_block[0],
                                       .n_blocks = l->own_n,
                                       .capacity = MOST_BLOCKS,
                                       .seq_stride = N_PARTS,
                                       .head_stride = 1,
                                       .quarters = l->own_quarters[0]},
                             .layer_lists = N_KV,
                             .taps = {.mass = mark ? l->mass[0] : NULL,
                                      .mass_line = mark ? &zero : NULL,
                                      .mass_head_stride = 1,
                                      .quarter_mass = mark ? l->quarter_mass[0][0] : NULL},
                             .mass_stride = (size_t)N_KV * MOST_BLOCKS};
    assert_ok(model_forward(l->m, &pass, &e), e);
}

static void naive_prompt(struct naive *l, const struct record *r) {
    memset(l->mass, 0, sizeof l->mass);
    memset(l->quarter_mass, 0, sizeof l->quarter_mass);
    for (int i = 0; i < r->n_prompt; i++) naive_row(l, r->prompt[i], i, r->n_prompt, NULL);
}

/* The n quarters of list i's blocks that its readers looked at most, but of pinned ones, in which
 * settings' window is 1. */
static void naive_quarters(const struct naive *l, enum kind kind, int i, int n, int n_blocks,
                           struct list *out) {
    for (int k = 0; k < out->n; k++) {
        int b = out->kept[k];
        float mass[4] = {0};
        for (int p = 0; p < N_PARTS; p++)
            for (int q = 0; q < 4 && list_of(kind, p) == i; q++)
                if (l->quarter_mass[p][b][q] > mass[q]) mass[q] = l->quarter_mass[p][b][q];
        out->quarters[k] = b == 0 || b == n_blocks - 1 ? 15 : 0;
        for (int more = 0; more < n; more++) {
            int best = -1;
            for (int q = 0; q < 4; q++)
                if (!(out->quarters[k] >> q & 1) && (best < 0 || mass[q] > mass[best])) best = q;
            if (best >= 0) out->quarters[k] |= (uint8_t)(1 << best);
        }
    }
}

/* Lists and every row's logits of an answer whose tokens are got's. */
static void naive_answer(struct naive *l, enum kind kind, const struct target_settings *asked,
                         uint64_t seed, const struct record *got, struct record *want) {
    struct target_settings none, s;
    const struct list *reads[N_PARTS];
    target_settings_unset(&none);
    s = target_settings_resolve(&none, asked, NULL);
    *want = *got;
    want->n_lists = 0;
    for (int p = 0; p < N_PARTS; p++)
        if (list_of(kind, p) >= want->n_lists) want->n_lists = list_of(kind, p) + 1;
    for (int i = 0; i < want->n_lists; i++) {
        float mass[MOST_BLOCKS] = {0};
        for (int p = 0; p < N_PARTS; p++)
            for (int b = 0; b < MOST_BLOCKS && list_of(kind, p) == i; b++)
                if (l->mass[p][b] > mass[b]) mass[b] = l->mass[p][b];
        struct target_view view = {.n_tokens = got->n_prompt, .seed = seed, .mass = mass};
        want->list[i].n = target_select(&s, &view, mass, want->list[i].kept);
        naive_quarters(l, kind, i, s.quarters, (got->n_prompt + 63) / 64, &want->list[i]);
    }
    for (int p = 0; p < N_PARTS; p++) reads[p] = &want->list[list_of(kind, p)];
    for (int i = 0; i < got->n_out; i++) {
        if (i > 0) naive_row(l, got->out[i - 1], got->n_prompt + i - 1, got->n_prompt, reads);
        else naive_row(l, got->prompt[got->n_prompt - 1], got->n_prompt - 1, got->n_prompt, NULL);
        want->row[i] = XXH3_64bits(l->logits, sizeof l->logits);
    }
}

static int count_union(const struct record *r) {
    bool in[MOST_BLOCKS] = {0};
    int n = 0;
    for (int i = 0; i < r->n_lists; i++)
        for (int k = 0; k < r->list[i].n; k++) in[r->list[i].kept[k]] = true;
    for (int b = 0; b < MOST_BLOCKS; b++) n += in[b];
    return n;
}

static void test_lists_naive(void) {
    static const int lengths[] = {641, 700};
    static struct record r[N_KINDS], want;
    static struct naive l;
    struct engine_options o;
    struct engine_submit_options s;
    list_options(&o);
    struct engine *g = open_engine(&o, r);
    naive_open(&l);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int kind = 0; kind < N_KINDS; kind++) {
            struct target_settings of = settings((enum kind)kind, 4, kind == HEAD ? 0.1 : 0);
            make_request(kind, lengths[i], TINY_SLOW ? 4 : 70, &r[kind], &s);
            memcpy(r[kind].prompt, r[0].prompt, sizeof r[0].prompt); /* of one mass */
            s.sparse = &of;
            run(g, &s, &r[kind]);
            if (kind == 0) naive_prompt(&l, &r[0]);
            naive_answer(&l, (enum kind)kind, &of, s.params.seed, &r[kind], &want);
            assert_lists(&r[kind], &want, target_lists_name(of.lists));
            assert_rows(&r[kind], &want, target_lists_name(of.lists));
            assert_int_equal(r[kind].sparsity.n_lists, want.n_lists);
            assert_int_equal(r[kind].sparsity.n_kept, r[kind].list[0].n);
            assert_int_equal(r[kind].sparsity.n_union, count_union(&want));
            /* Lists that all are one another would show nothing. */
            assert_true(want.n_lists == 1 || count_union(&want) > want.list[0].n);
        }
    naive_close(&l);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- The same whatever goes on around ---- */

/* Kinds side by side, one list of other selectors, dense and exact ones among them. */
static void fill(int i, struct record *r, struct engine_submit_options *s) {
    static const int lengths[] = {600, 650, 703, 960, 1030, 320, 577};
    static struct target_settings of[MOST_REQUESTS];
    make_request(i, lengths[i % 7], TINY_SLOW ? 16 : 60 + i, r, s);
    of[i] = settings((enum kind)(i % N_KINDS), 3 + i % 3, i % 2 ? 0.1 : 0);
    if (i == 6) of[i].exact = 4;
    if (i == 8) of[i].selector = TARGET_OFF;
    if (i == 0) of[i].selector = TARGET_RANDOM;
    if (i == 5) of[i].reselect = 20, of[i].reselector = TARGET_RECENT;
    s->sparse = &of[i];
}

/* A request that selects anew keeps its newest lists. */
static void keep_newest(void *arg, const struct engine_request *request,
                        const struct engine_kv_view *v, const int32_t *kept, int n_kept,
                        int n_blocks) {
    struct record *r = record_of(arg, request);
    struct engine_progress p;
    engine_poll(request, &p);
    if (r && (p.seed == FIRST_SEED + 5 || p.seed == FIRST_SEED + 6) && p.n_tokens > 0)
        r->n_lists = 0;
    keep_list(arg, request, v, kept, n_kept, n_blocks);
}

static void run_all(const struct engine_options *o, int n, bool together, bool again,
                    struct record *r) {
    struct engine *g = tiny_engine_open(o, target());
    struct engine_request *request[MOST_REQUESTS];
    struct engine_submit_options s;
    engine_trace_logits(g, keep_row, r);
    engine_trace_selection(g, keep_newest, r);
    for (int pass = 0; pass <= again; pass++)
        for (int i = 0; i < n; i++) {
            fill(i, &r[i], &s);
            if (!together) {
                run(g, &s, &r[i]);
                if (pass) assert_true(r[i].n_cached >= r[i].n_prompt - 32 - 63);
            } else {
                request[i] = tiny_submit(g, &s);
            }
        }
    for (int i = 0; i < n && together; i++) {
        struct engine_progress p = tiny_wait(request[i]);
        keep_end(&r[i], &p);
        engine_release(g, request[i]);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

static void test_lists_same(void) {
    static struct record want[MOST_REQUESTS], got[MOST_REQUESTS];
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
    run_all(&o, n, false, false, want);
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        list_options(&o);
        o.max_rows = runs[k].max_rows;
        o.n_threads = runs[k].n_threads;
        o.draft_tokens = runs[k].draft_tokens;
        run_all(&o, n, runs[k].together, runs[k].again, got);
        for (int i = 0; i < n; i++) {
            /* Of an exact answer the lists are those of each dense pass, which lookup moves. */
            if (i != 6) assert_lists(&got[i], &want[i], runs[k].what);
            if (i != 6) assert_rows(&got[i], &want[i], runs[k].what);
            assert_memory_equal(got[i].out, want[i].out, (size_t)want[i].n_out * sizeof(int32_t));
        }
    }
}

/* Recordings, which are told apart by the lists that they read. */
static void test_lists_speculation_device(void) {
    static const int few[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(true);
    bed_tiny_sparse(&b, target(), SELECT_LAYER);
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
    static struct record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    list_options(&o);
    struct engine *g = open_engine(&o, &want);
    make_request(0, 900, 40, &want, &s);
    run(g, &s, &want);
    engine_close(g);
    g = open_engine(&o, &got);
    for (int kind = LAYER; kind <= SECOND; kind++) {
        struct target_settings of = settings((enum kind)kind, 3, 1); /* all in reserve */
        make_request(0, 900, 40, &got, &s);
        s.sparse = &of;
        run(g, &s, &got);
        assert_true(got.n_lists > 1);
        for (int i = 0; i < got.n_lists; i++) assert_int_equal(got.list[i].n, got.n_blocks);
        assert_int_equal(got.sparsity.kv_shallow_bytes + got.sparsity.kv_deep_bytes,
                         got.sparsity.kv_dense_bytes);
        assert_rows(&got, &want, "lists of everything");
    }
    engine_close(g);
}

/* ---- Bytes ---- */

/* K and V that a row at `position` reads of one layer and head: of every block, K whole, V up to
 * the last position that it sees; of the prompt's blocks, of the n_quarters of those that are not
 * pinned. */
static uint64_t naive_bytes(int position, const struct list *l, int n_blocks, int n_quarters) {
    uint64_t n = 0;
    for (int b = 0; b <= position / 64; b++) {
        bool in = b >= n_blocks;
        for (int i = 0; i < l->n; i++) in |= l->kept[i] == b;
        int seen = position - 64 * b + 1;
        if (in && b > 0 && b < n_blocks - 1) n += ROW_BYTES * (uint64_t)(2 * 16 * n_quarters);
        else if (in) n += ROW_BYTES * (uint64_t)(64 + (seen < 64 ? seen : 64));
    }
    return n;
}

static void test_lists_bytes(void) {
    static struct record r;
    struct engine_options o;
    struct engine_submit_options s;
    list_options(&o);
    o.prefix_cache = false;
    struct engine *g = open_engine(&o, &r);
    for (int kind = LAYER; kind < N_KINDS; kind++) {
        struct target_settings of = settings((enum kind)kind, 4, 0.1);
        enum { N_PROMPT = 901, N_OUT = 90 };
        uint64_t deep[3], want = 0, positions = 0;
        of.threshold = 0.2; /* lists of several lengths */
        of.min_blocks = 2;
        for (int i = 0; i < 2; i++) {
            struct engine_stats before, after;
            make_request(0, N_PROMPT, i ? N_OUT : 1, &r, &s);
            s.sparse = &of;
            tiny_assert_pool_whole(g);
            engine_get_stats(g, &before);
            run(g, &s, &r);
            tiny_assert_pool_whole(g);
            engine_get_stats(g, &after);
            deep[i] = after.kv_deep_bytes_read - before.kv_deep_bytes_read;
            deep[2] = after.answers.listed_deep_bytes - before.answers.listed_deep_bytes;
        }
        for (int i = 0; i < N_OUT - 1; i++)
            for (int p = 0; p < N_PARTS; p++) {
                const struct list *l = &r.list[list_of((enum kind)kind, p)];
                want += naive_bytes(N_PROMPT + i, l, r.n_blocks, of.quarters);
                positions += (uint64_t)(N_PROMPT + i + 1 - 64 * (r.n_blocks - l->n) -
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
    bool kept_too;           /* also a block that a list names */
    const struct list *want; /* lists with their quarters */
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
    static struct record want, got;
    static struct naive l;
    struct poison p = {.want = want.list};
    struct target_settings of = settings(HEAD_QUARTER, 5, 0.1);
    struct engine_options o;
    struct engine_submit_options s;
    int n_out = 0;
    list_options(&o);
    o.draft_tokens = 4;
    struct engine *g = open_engine(&o, &got);
    make_request(0, 900, TINY_SLOW ? 20 : 80, &got, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    run(g, &s, &got);
    engine_close(g);
    naive_open(&l);
    naive_prompt(&l, &got);
    naive_answer(&l, HEAD_QUARTER, &of, FIRST_SEED, &got, &want);
    naive_close(&l);
    for (int i = 0; i < want.n_lists; i++)
        n_out += 4 * (want.n_blocks - want.list[i].n) + 3 * (want.list[i].n - 2);
    g = tiny_engine_open(&o, target());
    engine_trace_logits(g, keep_row, &got);
    engine_trace_selection(g, poison_parts, &p);
    make_request(0, 900, TINY_SLOW ? 20 : 80, &got, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    run(g, &s, &got);
    assert_int_equal(p.at, N_PARTS);
    assert_int_equal(p.n_parts, n_out);
    assert_rows(&got, &want, "NaN in unlisted parts");
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
    g = tiny_engine_open(&o, target());
    refused(g, settings(HEAD, 4, 0), E_UNSUPPORTED, "started with --lists head keeps it");
    of = settings(LAYER, 4, 0);
    of.selector = TARGET_RECENT;
    refused(g, of, E_INVALID, "sparse \"recent\", lists \"layer\": only \"observed\"");
    of = settings(SECOND, 4, 0);
    of.selector = TARGET_MEAN;
    refused(g, of, E_INVALID, "sparse \"mean\", select2: only \"observed\"");
    of = settings(HEAD, 4, 0);
    of.exact = 4;
    refused(g, of, E_INVALID, "exact 4, lists \"head\"");
    of = settings(LAYER, 4, 0);
    of.select2 = 2;
    refused(g, of, E_INVALID, "lists \"layer\", select2 2");
    of = settings(SECOND, 4, 0);
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
    of = settings(TWO_QUARTERS, 4, 0);
    refused(g, of, E_UNSUPPORTED, "quarters 2: no room is kept");
    of.selector = TARGET_RANDOM;
    refused(g, of, E_INVALID, "sparse \"random\", quarters 2: it measures blocks as a whole");
    of.quarters = 0;
    refused(g, of, E_RANGE, "quarters is 0, allowed is [1, 4]");
    engine_close(g);
    o.sparse.lists = TARGET_UNSET;
    g = tiny_engine_open(&o, target());
    refused(g, settings(LAYER, 4, 0), E_UNSUPPORTED, "started with --lists layer keeps it");
    refused(g, settings(SECOND, 4, 0), E_UNSUPPORTED, "select2: no room");
    engine_close(g);
    struct tiny_options many = *target();
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
