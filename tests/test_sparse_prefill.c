/* engine/ with prompts that are computed sparsely, over the tiny model. Goal: each chunk's list and
 * every logits row are those of a naive loop of one-row passes by docs/sparsity.md; they are the
 * same whatever passes, batches, cancelled neighbours or hits of the cache a prompt is computed in;
 * where lists hold everything every bit is dense's; pages that a chunk does not read may hold NaN;
 * and prompts are shared under the very same law alone. */
#include "tests/epoch_bed.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

enum { CHUNK = 128, DENSE = 256 };

static struct target_settings prefill_settings(int selector, int keep_blocks) {
    struct target_settings s = epoch_settings(selector, keep_blocks, TARGET_RESELECT_OFF);
    s.prefill = TARGET_PREFILL_SPARSE;
    s.prefill_dense = DENSE;
    s.prefill_chunk = CHUNK;
    return s;
}

/* By hand: chunks of a prompt that get a list. */
static int n_chunks(int n_prompt, int start, int chunk) {
    int n = 0;
    for (int i = chunk; i < n_prompt; i += chunk) n += i >= start;
    return n;
}

/* ---- The naive loop ---- */

static void test_prefill_naive(void) {
    static struct epoch_record records[MOST_REQUESTS], want;
    static struct epoch_loop l;
    static const int lengths[] = {577, 500, 641, 640, 1000};
    static const struct {
        int selector, reselector, keep_blocks, chunk, dense;
        double smooth;
    } kinds[] = {
        {TARGET_MEAN, TARGET_UNSET, 4, CHUNK, DENSE, 0},
        {TARGET_OBSERVED, TARGET_UNSET, 3, 64, 100, 0},
        {TARGET_OBSERVED, TARGET_RANDOM, 4, 192, 0, .5},
        {TARGET_RECENT, TARGET_UNSET, 3, 256, DENSE, 0},
        {TARGET_RANDOM, TARGET_MEAN, 5, CHUNK, 500, .3},
        {TARGET_ALL, TARGET_UNSET, 4, CHUNK, DENSE, 0},
        {TARGET_OBSERVED, TARGET_MEAN, 4, 512, DENSE, 0}, /* dense near some prompts' end */
    };
    struct engine_options o;
    struct engine_submit_options s;
    int n_thin = 0, n_observed = 0;
    epoch_options(&o);
    struct engine *g = epoch_open(&o, records);
    epoch_loop_open(&l, NULL, NULL);
    for (size_t i = 0; i < (TINY_SLOW ? 2 : sizeof lengths / sizeof *lengths); i++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            struct epoch_record *r = &records[k];
            struct target_settings of = prefill_settings(kinds[k].selector, kinds[k].keep_blocks);
            of.reselector = kinds[k].reselector;
            of.prefill_chunk = kinds[k].chunk;
            of.prefill_dense = kinds[k].dense;
            of.smooth = kinds[k].smooth;
            if (k == 0) of.reselect = 20;
            epoch_request((int)k, lengths[i], 60, r, &s);
            s.sparse = &of;
            s.no_prefix_cache = true;
            epoch_run(g, &s, r);
            epoch_naive(&l, &of, NULL, s.params.seed, r, &want);
            epoch_assert_same(r, &want, target_selector_name(of.selector));
            assert_int_equal(r->n_chunks, want.n_chunks);
            n_thin += r->sparsity.prefill.kv_bytes < r->sparsity.prefill.kv_dense_bytes;
            n_observed += r->sparsity.settings.selector == TARGET_OBSERVED;
            /* At 256 four blocks lose none; `all` lists them. */
            if (k == 0) assert_int_equal(r->n_chunks, n_chunks(lengths[i], 257, CHUNK));
            if (k == 5) assert_int_equal(r->n_chunks, n_chunks(lengths[i], 256, CHUNK));
        }
    assert_true(n_thin > (TINY_SLOW ? 8 : 20));
    assert_true(TINY_SLOW || (n_observed > 0 && n_observed < 15)); /* the last rows' lists decide */
    epoch_loop_close(&l);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* With a scorer it is the scorer that selects, in the place of `observed`, too. */
static void test_prefill_scorer(void) {
    static struct epoch_record records[MOST_REQUESTS], want;
    static struct epoch_loop l;
    struct engine_options o;
    struct engine_submit_options s;
    for (int mlp = 0; mlp < 2; mlp++) {
        struct target_scorer *loaded;
        struct target_scorer_file *file = epoch_scorer(mlp);
        struct target_scorer_defaults says = {file->smoothing, file->curve};
        epoch_options(&o);
        target_settings_unset(&o.sparse);
        o.select_layer = -1;
        o.scorer_path = epoch_scorer_file(file);
        o.sparse = prefill_settings(TARGET_OBSERVED, 4);
        struct engine *g = epoch_open(&o, records);
        unlink(o.scorer_path);
        epoch_loop_open(&l, &loaded, file);
        for (int k = 0; k < 2; k++) {
            struct epoch_record *r = &records[k];
            struct target_settings of = prefill_settings(TARGET_OBSERVED, 4);
            if (k == 1) of.keep_blocks = TARGET_UNSET, of.min_blocks = 2, of.keep = .4;
            epoch_request(k, 700 + 200 * k, 40, r, &s);
            s.sparse = k == 1 ? &of : NULL; /* the server's */
            epoch_run(g, &s, r);
            epoch_naive(&l, &of, &says, s.params.seed, r, &want);
            epoch_assert_same(r, &want, mlp ? "mlp" : "late");
            assert_true(r->n_chunks > 2 && r->sparsity.settings.selector == TARGET_SCORER);
        }
        target_scorer_close(loaded);
        target_scorer_free(file);
        epoch_loop_close(&l);
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
}

/* ---- The same whatever goes on around ---- */

static void fill(int i, struct epoch_record *r, struct engine_submit_options *s) {
    static const int lengths[] = {600, 650, 703, 960, 1100, 400};
    static const int selectors[] = {TARGET_MEAN, TARGET_OBSERVED, TARGET_RECENT, TARGET_OBSERVED};
    static const int chunks[] = {64, 128, 192, 320, 512};
    static struct target_settings of[MOST_REQUESTS];
    epoch_request(i, lengths[i % 6], TINY_SLOW ? 20 : 40 + i, r, s);
    s->params.coupling = VERIFY_GUMBEL;
    s->params.temperature = i % 3 == 1 ? 0 : 1;
    of[i] = prefill_settings(selectors[i % 4], 4 + i % 3);
    of[i].prefill_chunk = chunks[i % 5];
    of[i].prefill_dense = i % 2 ? 0 : DENSE;
    if (i % 4 == 1) of[i].reselect = 16;
    s->sparse = &of[i];
}

/* Some of the very same prompt and law, whose pages are shared. */
static void fill_company(int i, int n, struct epoch_record *r, struct engine_submit_options *s) {
    fill(i % 4 ? (i + 5) % n : i, r, s);
}

static const struct epoch_crowd crowd = {
    .fill = fill, .company = fill_company, .company_tokens = 1};

static void test_prefill_same(void) {
    static struct epoch_record want[MOST_REQUESTS], got[MOST_REQUESTS];
    static const struct {
        int max_rows, n_threads, draft_tokens;
        bool together, again;
        const char *what;
    } runs[] = {
        {17, 1, 0, false, false, "passes of 17"},
        {48, 1, 3, false, false, "passes of 48, lookup"},
        {192, 2, 0, false, true, "behind a hit"},
        {64, 2, 8, true, false, "in a batch, lookup"},
        {300, 1, VERIFY_DRAFT_AUTO, true, false, "in a batch, auto"},
    };
    int n = TINY_SLOW ? 6 : 15, n_lists = 0, n_fewer = 0;
    struct engine_options o;
    watch_reset(false);
    epoch_options(&o);
    o.max_rows = 1100;
    epoch_run_all(&o, &crowd, n, false, false, want);
    for (int i = 0; i < n; i++) n_lists += want[i].n_chunks;
    assert_true(n_lists > 2 * n);
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        epoch_options(&o);
        o.max_rows = runs[k].max_rows;
        o.n_threads = runs[k].n_threads;
        o.draft_tokens = runs[k].draft_tokens;
        epoch_run_all(&o, &crowd, n, runs[k].together, runs[k].again, got);
        for (int i = 0; i < n; i++) {
            epoch_assert_same(&got[i], &want[i], runs[k].what);
            n_fewer += want[i].n_chunks - got[i].n_chunks;
            if (runs[k].together || runs[k].again) continue;
            assert_int_equal(got[i].sparsity.prefill.kv_bytes, want[i].sparsity.prefill.kv_bytes);
        }
    }
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(n_fewer > n); /* cached chunks need no list */
}

/* Draft lengths, batches with cancelled neighbours, the prompts' K and V too, on a backend that is
 * as strict as a device. */
static void test_prefill_speculation_device(void) {
    static const int lengths[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(true);
    bed_tiny_sparse(&b, epoch_target(), SELECT_LAYER);
    b.o.sparse.reserve = 0;
    b.o.sparse.prefill = TARGET_PREFILL_SPARSE;
    b.o.sparse.prefill_dense = 0;
    b.o.sparse.prefill_chunk = 64;
    b.n_requests = TINY_SLOW ? 6 : 14;
    b.n_out = 96;
    bed_check(&b, lengths, 2, true);
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(watch.n_replays > 100);
    bed_close_tiny(&b);
}

/* ---- Dense, to the bit; what is counted ---- */

static void test_prefill_dense(void) {
    static struct epoch_record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    epoch_options(&o);
    struct engine *g = epoch_open(&o, &want);
    struct target_settings of[5], off = epoch_settings(TARGET_OFF, TARGET_UNSET, TARGET_UNSET);
    epoch_request(0, 900, 60, &want, &s);
    s.sparse = &off;
    epoch_run(g, &s, &want);
    engine_close(g);
    for (int i = 0; i < 5; i++) of[i] = prefill_settings(TARGET_OBSERVED, TARGET_UNSET);
    of[0].keep = 1;
    of[1].keep = 0.1; /* the floor's 32 blocks are more */
    of[2].selector = TARGET_ALL;
    of[2].min_blocks = 1;
    of[3].keep_blocks = 3; /* by way of lists: a reserve of everything */
    of[3].reserve = 1;
    of[4] = of[3];
    of[4].prefill_dense = 901; /* the prompt ends before */
    for (int i = 0; i < 5; i++) {
        g = epoch_open(&o, &got);
        epoch_request(0, 900, 60, &got, &s);
        s.sparse = &of[i];
        epoch_run(g, &s, &got);
        assert_int_equal(got.n_chunks, i == 2 ? 6 : i == 3 ? 6 : 0);
        assert_int_equal(got.sparsity.prefill.kv_bytes, got.sparsity.prefill.kv_dense_bytes);
        assert_int_equal(got.sparsity.prefill.kv_dense_bytes,
                         (uint64_t)N_LAYERS * 2 * 2 * 16 * 2 * 900 * 901 / 2);
        got.n_lists = got.n_chunks = 0;
        epoch_assert_same(&got, &want, "all blocks");
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
    /* And sparse is not dense; its rows' bytes are those of its lists, and kernels read less. */
    struct engine_stats before, after;
    struct target_settings few = prefill_settings(TARGET_MEAN, 3);
    uint64_t shallow[2], deep[2];
    o.max_rows = CHUNK; /* the same passes */
    g = epoch_open(&o, &got);
    s.params.max_tokens = 1;
    s.no_prefix_cache = true;
    for (int sparse = 0; sparse < 2; sparse++) {
        s.sparse = sparse ? &few : &off;
        engine_get_stats(g, &before);
        got.n_chunks = got.n_lists = 0;
        epoch_run(g, &s, &got);
        tiny_assert_pool_whole(g);
        engine_get_stats(g, &after);
        shallow[sparse] = after.kv_shallow_bytes_read - before.kv_shallow_bytes_read;
        deep[sparse] = after.kv_deep_bytes_read - before.kv_deep_bytes_read;
    }
    assert_int_equal(shallow[1], shallow[0]);
    assert_true(deep[1] < deep[0] * 7 / 10);
    assert_int_equal(got.n_chunks, 6);
    uint64_t left = 0;
    for (int c = 0; c < 6; c++) {
        int border = DENSE + c * CHUNK, n = 900 - border < CHUNK ? 900 - border : CHUNK;
        left += (uint64_t)n * (uint64_t)(border - 64 * got.chunk[c].n);
    }
    assert_int_equal(got.sparsity.prefill.kv_dense_bytes - got.sparsity.prefill.kv_bytes,
                     left * (N_LAYERS - SELECT_LAYER) * 2 * 2 * 16 * 2);
    assert_int_equal(after.prefill.n_selections, 6);
    assert_int_equal(after.prefill.kv_bytes, got.sparsity.prefill.kv_bytes);
    assert_true(got.row[0] != want.row[0]);
    engine_close(g);
}

/* ---- Poison ---- */

struct poison {
    uint8_t *saved; /* [MOST_BLOCKS][PAGE_BYTES] */
    bool is_bad[MOST_BLOCKS];
    bool kept_too; /* also one block that is read */
    int n_pages, n_blocks;
};

/* While a chunk is computed the deep pages that it does not read hold NaN. */
static void poison_pages(void *arg, const struct engine_request *r, const struct engine_kv_view *v,
                         const int32_t *kept, int n_kept, int n_blocks) {
    struct poison *p = arg;
    (void)r;
    for (int b = 0, at = 0; b < n_blocks; b++) {
        uint8_t *page = (uint8_t *)v->arena + kvpool_page_offset(v->group[1].pages[b]);
        uint8_t *saved = p->saved + (size_t)b * PAGE_BYTES;
        bool in = at < n_kept && kept[at] == b;
        at += in;
        if (p->is_bad[b]) memcpy(page, saved, PAGE_BYTES);
        p->is_bad[b] = !in || (p->kept_too && b == kept[1]);
        if (!p->is_bad[b]) continue;
        memcpy(saved, page, PAGE_BYTES);
        memset(page, 0x7e, PAGE_BYTES);
        p->n_pages++;
    }
}

static void test_prefill_poison(void) {
    static struct epoch_record want, got;
    struct poison p = {.saved = malloc((size_t)MOST_BLOCKS * PAGE_BYTES)};
    struct target_settings of = prefill_settings(TARGET_MEAN, 4);
    struct engine_options o;
    struct engine_submit_options s;
    epoch_options(&o);
    assert_non_null(p.saved);
    struct engine *g = epoch_open(&o, &want);
    epoch_request(0, 1000, 60, &want, &s);
    s.sparse = &of;
    s.no_prefix_cache = true;
    epoch_run(g, &s, &want);
    engine_trace_selection(g, poison_pages, &p);
    got = want;
    memset(want.row, 0, sizeof want.row);
    struct engine_request *r = tiny_submit(g, &s);
    struct engine_progress end = tiny_wait(r);
    assert_int_equal(end.finish, ENGINE_LENGTH);
    assert_memory_equal(end.tokens, got.out, sizeof *got.out * (size_t)got.n_out);
    assert_memory_equal(want.row, got.row, sizeof *got.row * (size_t)got.n_out);
    assert_true(p.n_pages > 20);
    engine_release(g, r);
    memset(p.is_bad, 0, sizeof p.is_bad);
    p.kept_too = true;
    r = tiny_submit(g, &s);
    assert_int_equal(tiny_wait(r).finish, ENGINE_FAILED);
    engine_release(g, r);
    tiny_assert_pool_whole(g);
    engine_close(g);
    free(p.saved);
}

/* ---- Who shares ---- */

static int next_turn(const struct target_settings *first, const struct target_settings *next,
                     int n_out, uint64_t conversation, struct epoch_record *r) {
    struct engine_options o;
    struct engine_submit_options s;
    enum { N_PROMPT = 650, N_NEXT = 1000 };
    int32_t prompt[N_NEXT];
    epoch_options(&o);
    struct engine *g = epoch_open(&o, r);
    epoch_request(0, N_PROMPT, n_out, r, &s);
    s.sparse = first;
    s.conversation = 7;
    epoch_run(g, &s, r);
    memcpy(prompt, r->prompt, N_PROMPT * sizeof *prompt);
    memcpy(prompt + N_PROMPT, r->out, (size_t)n_out * sizeof *prompt);
    tiny_prompt(3, prompt + N_PROMPT + n_out, N_NEXT - N_PROMPT - n_out);
    epoch_request(1, N_NEXT, 20, r, &s); /* within the prompt's last block */
    memcpy(r->prompt, prompt, sizeof prompt);
    s.prompt = prompt;
    s.params.seed = FIRST_SEED;
    s.sparse = next;
    s.conversation = conversation;
    epoch_run(g, &s, r);
    tiny_assert_pool_whole(g);
    engine_close(g);
    return r->n_cached;
}

static void test_prefill_shared(void) {
    static struct epoch_record r, want;
    struct target_settings of = prefill_settings(TARGET_MEAN, 4), dense = of, chunk = of,
                           start = of, keep = of, observed = of, exact = of;
    dense.prefill = TARGET_PREFILL_DENSE;
    chunk.prefill_chunk = 64;
    start.prefill_dense = 384;
    keep.keep_blocks = 5;
    observed.selector = TARGET_OBSERVED; /* the same lists of chunks */
    exact.prefill = TARGET_UNSET;
    exact.exact = 4;
    const struct {
        const struct target_settings *first, *next;
        int n_hit;
    } cases[] = {{&of, &of, 640},       {&of, &dense, 0}, {&dense, &of, 0}, {&of, &chunk, 0},
                 {&of, &start, 0},      {&of, &keep, 0},  {&of, &exact, 0}, {&of, &observed, 640},
                 {&dense, &exact, 640}, {&of, NULL, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int n = next_turn(cases[i].first, cases[i].next, 40, 8, &r);
        if (n != cases[i].n_hit)
            fail_msg("case %zu: %d tokens from the cache, want %d", i, n, cases[i].n_hit);
    }
    /* Of its own conversation a long answer, too: as far as a list is known for the chunk that the
     * cached pages end in. The prompt's last chunk began at 640. */
    assert_int_equal(next_turn(&of, &of, 60, 7, &r), 704);
    assert_int_equal(next_turn(&of, &of, 140, 7, &r), 704);
    of.prefill_chunk = 512;
    assert_int_equal(next_turn(&of, &of, 140, 7, &r), 768);
    /* Behind a hit that was cut short, lists are those of the whole prompt from nothing. */
    of = prefill_settings(TARGET_MEAN, 4);
    next_turn(&of, &of, 140, 8, &r);
    assert_int_equal(r.n_cached, 640);
    static struct epoch_loop l;
    epoch_loop_open(&l, NULL, NULL);
    epoch_naive(&l, &of, NULL, FIRST_SEED, &r, &want);
    epoch_loop_close(&l);
    assert_int_equal(want.n_chunks - r.n_chunks, 3);
    epoch_assert_same(&r, &want, "second turn");
}

/* Steps along cached blocks, of everybody. */
static atomic_int n_steps;
bool __real_kvpool_walk_next(const struct kvpool *p, struct kvpool_walk *w, const int32_t *tokens);
bool __wrap_kvpool_walk_next(const struct kvpool *p, struct kvpool_walk *w, const int32_t *tokens);
bool __wrap_kvpool_walk_next(const struct kvpool *p, struct kvpool_walk *w, const int32_t *tokens) {
    n_steps++;
    return __real_kvpool_walk_next(p, w, tokens);
}

/* However many borders a prompt has, its blocks are walked once, and twice at its admission. */
static void test_prefill_walks_once(void) {
    enum { LENGTH = 1090, N_BLOCKS = LENGTH / 64 };
    static struct epoch_record r;
    struct target_settings of = prefill_settings(TARGET_MEAN, 3);
    struct engine_options o;
    struct engine_submit_options s;
    of.prefill_chunk = 64;
    of.prefill_dense = 0;
    epoch_options(&o);
    struct engine *g = epoch_open(&o, &r);
    for (int pass = 0; pass < 2; pass++) {
        epoch_request(0, LENGTH, 2, &r, &s);
        s.sparse = &of;
        n_steps = 0;
        epoch_run(g, &s, &r);
        assert_int_equal(r.n_cached >= LENGTH - 32 - 63, pass);
        assert_in_range(n_steps, N_BLOCKS - 1, 3 * N_BLOCKS + 3);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* More lists than are remembered: of a cached prompt as much is taken as can be gone on from, in
 * one go or after a second look, and what comes out is the same. */
static void test_prefill_forgotten(void) {
    enum { N = 150, LENGTH = 1090, LEAST = LENGTH - 32 - 63 };
    static struct epoch_record r;
    static uint64_t row[N];
    struct target_settings of = prefill_settings(TARGET_MEAN, 3);
    struct engine_options o;
    struct engine_submit_options s;
    int n_whole = 0, n_part = 0;
    of.prefill_chunk = 64;
    of.prefill_dense = 0;
    of.reserve = 0;
    epoch_options(&o);
    o.max_rows = 512;
    o.kv_memory_bytes = (size_t)(N * 18 + 100) * 2 * TINY_BLOCK_BYTES;
    struct engine *g = epoch_open(&o, &r);
    for (int i = 0; i < 2 * N; i++) {
        epoch_request(0, LENGTH, 1, &r, &s);
        tiny_prompt(1000 + (uint64_t)(i % N), r.prompt, LENGTH);
        s.sparse = &of;
        epoch_run(g, &s, &r);
        if (i < N) {
            row[i] = r.row[0];
            continue;
        }
        if (r.row[0] != row[i - N])
            fail_msg("prompt %d, behind %d cached tokens: other logits", i - N, r.n_cached);
        n_whole += r.n_cached >= LEAST;
        n_part += r.n_cached < LEAST;
    }
    assert_true(n_whole > 0 && n_part > N / 10);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- Refusals ---- */

static void refused(struct engine *g, struct engine_submit_options *s,
                    const struct target_settings *of, int code, const char *says) {
    struct engine_request *r;
    struct err e = {0};
    s->sparse = of;
    assert_int_equal(engine_submit(g, s, &r, &e), code);
    if (!strstr(e.message, says)) fail_msg("\"%s\" does not say \"%s\"", e.message, says);
}

static void test_prefill_refused(void) {
    static struct epoch_record r;
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of = prefill_settings(TARGET_UNSET, 4);
    epoch_options(&o);
    target_settings_unset(&o.sparse);
    struct engine *g = epoch_open(&o, &r);
    epoch_request(0, 700, 4, &r, &s);
    refused(g, &s, &of, E_UNSUPPORTED, "--sparse-prefill keeps them");
    of.reselector = TARGET_RECENT; /* needs no states */
    s.sparse = &of;
    epoch_run(g, &s, &r);
    assert_int_equal(r.sparsity.settings.selector, TARGET_RECENT);
    assert_int_equal(r.n_chunks, n_chunks(700, 257, CHUNK));
    of.prefill_chunk = 100;
    refused(g, &s, &of, E_RANGE, "prefill_chunk is 100, allowed are multiples of 64");
    of.prefill_chunk = TARGET_MOST_BLOCKS + 64;
    refused(g, &s, &of, E_RANGE, "prefill_chunk is 1048640");
    of.prefill_chunk = 0;
    refused(g, &s, &of, E_RANGE, "prefill_chunk is 0");
    of.prefill_chunk = 64;
    of.prefill_dense = -7;
    refused(g, &s, &of, E_RANGE, "prefill_dense is -7");
    of.prefill_dense = 0;
    of.prefill = 2;
    refused(g, &s, &of, E_RANGE, "prefill is 2");
    of.prefill = TARGET_PREFILL_SPARSE;
    of.exact = 3;
    refused(g, &s, &of, E_INVALID, "exact 3, prefill \"sparse\"");
    of.exact = 0;
    of.selector = TARGET_OFF;
    refused(g, &s, &of, E_INVALID, "prefill \"sparse\", sparse \"off\"");
    engine_close(g);
    /* A server's default; who asks for exactness or nothing sparse gets a dense prompt. */
    o.sparse = prefill_settings(TARGET_UNSET, 4);
    g = epoch_open(&o, &r);
    for (int k = 0; k < 3; k++) {
        target_settings_unset(&of);
        if (k == 0) of.exact = 4;
        if (k == 1) of.selector = TARGET_OFF;
        epoch_request(0, 700, 1, &r, &s);
        s.sparse = &of;
        epoch_run(g, &s, &r);
        assert_int_equal(r.n_chunks > 0, k == 2);
        assert_int_equal(r.n_cached, k == 1 ? 640 : 0); /* the exact one's dense pages */
        assert_int_equal(r.sparsity.settings.prefill, k == 2);
    }
    engine_close(g);
}

const struct test tests[] = {
    {"prefill_naive", TEST_QUICK, 120000, test_prefill_naive},
    {"prefill_scorer", TEST_QUICK, 60000, test_prefill_scorer},
    {"prefill_same", TEST_QUICK, 120000, test_prefill_same},
    {"prefill_speculation_device", TEST_FULL, 300000, test_prefill_speculation_device},
    {"prefill_dense", TEST_QUICK, 60000, test_prefill_dense},
    {"prefill_poison", TEST_QUICK, 30000, test_prefill_poison},
    {"prefill_shared", TEST_QUICK, 60000, test_prefill_shared},
    /* Full: it takes more lists than the table holds; sanitizers see the same calls in `shared`. */
    {"prefill_forgotten", TEST_FULL, 120000, test_prefill_forgotten},
    {"prefill_walks_once", TEST_QUICK, 20000, test_prefill_walks_once},
    {"prefill_refused", TEST_QUICK, 20000, test_prefill_refused},
    {0},
};
