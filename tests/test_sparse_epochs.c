/* engine/ with selections by states of the select layer, at the end of the prompt and inside
 * answers, over the tiny model. Goal: every list is what docs/sparsity.md says of the committed
 * tokens and the settings, and of nothing else. A naive loop of one-row passes notes states, scores
 * and selects at each point by itself; the engine's lists, tokens and logits are the same behind
 * chunks, hits of the cache, rounds of any length that are cut at the points, batches with
 * cancelled neighbours, and recordings; where all blocks are kept every bit is dense's; servers
 * that nobody asks for states keep none. */
#include "tests/epoch_bed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

/* By hand for the rule's first part: a list every `reselect` tokens that a generated row drew. */
static int n_points(int n_out, int reselect) {
    return reselect > 0 ? 1 + (n_out - 2) / reselect : 1;
}

static void test_epochs_naive(void) {
    static struct epoch_record records[MOST_REQUESTS], want;
    static const int lengths[] = {577, 640, 641, 700, 995};
    static const struct {
        int selector, reselect, reselector;
        double smooth, threshold;
    } kinds[] = {
        {TARGET_MEAN, TARGET_RESELECT_OFF, TARGET_UNSET, 0, TARGET_NO_THRESHOLD},
        {TARGET_MEAN, 1, TARGET_UNSET, 0, TARGET_NO_THRESHOLD},
        {TARGET_OBSERVED, 16, TARGET_UNSET, .5, TARGET_NO_THRESHOLD},
        {TARGET_OBSERVED, TARGET_RESELECT_SURPRISE, TARGET_UNSET, 0, TARGET_NO_THRESHOLD},
        {TARGET_RECENT, 7, TARGET_MEAN, 0, TARGET_NO_THRESHOLD},
        {TARGET_RANDOM, 5, TARGET_UNSET, 0, TARGET_NO_THRESHOLD},
        {TARGET_MEAN, 10, TARGET_UNSET, 0, 4},
    };
    struct engine_options o;
    struct engine_submit_options s;
    static struct epoch_loop l;
    int n_wide = 0, n_changes = 0, n_short = 0;
    epoch_options(&o);
    struct engine *g = epoch_open(&o, records);
    epoch_loop_open(&l, NULL, NULL);
    for (size_t i = 0; i < (TINY_SLOW ? 2 : sizeof lengths / sizeof *lengths); i++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            struct epoch_record *r = &records[k];
            struct target_settings of = epoch_settings(kinds[k].selector, 5, kinds[k].reselect);
            of.reselector = kinds[k].reselector;
            of.smooth = kinds[k].smooth;
            of.threshold = kinds[k].threshold;
            if (k == 6) of.min_blocks = 2;
            epoch_request((int)k, lengths[i], 120, r, &s);
            if (k == 3) s.params.temperature = 1;
            s.sparse = &of;
            epoch_run(g, &s, r);
            if (kinds[k].reselect >= 0)
                assert_int_equal(r->n_lists, n_points(r->n_out, kinds[k].reselect));
            epoch_naive(&l, &of, NULL, s.params.seed, r, &want);
            epoch_assert_same(r, &want, target_selector_name(of.selector));
            for (int j = 1; j < r->n_lists; j++)
                n_changes += r->list[j].n != r->list[0].n ||
                             memcmp(r->list[j].kept, r->list[j - 1].kept,
                                    (size_t)r->list[j].n * sizeof(int32_t)) != 0;
            n_wide += r->sparsity.n_wide;
            /* Fewer than the five and the reserve. */
            for (int j = 0; j < r->n_lists && k == 6; j++) n_short += r->list[j].n < 6;
        }
    assert_true(n_changes > 100 && (TINY_SLOW || (n_wide >= 3 && n_short > 0)));
    epoch_loop_close(&l);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* Quarters of blocks by the states' own measure, at a prompt's end and inside answers. */
static void test_epochs_quarters(void) {
    static struct epoch_record records[MOST_REQUESTS], want, whole;
    static const int kinds[][4] = {{TARGET_MEAN, TARGET_MEAN, 640, 1},
                                   {TARGET_SCORER, TARGET_MEAN, 700, 2},
                                   {TARGET_MEAN, TARGET_RECENT, 577, 3}};
    static struct epoch_loop l;
    struct target_scorer *loaded;
    struct target_scorer_file *f = epoch_scorer(false);
    struct engine_options o;
    struct engine_submit_options s;
    epoch_options(&o);
    o.sparse.quarters = 1;
    o.scorer_path = epoch_scorer_file(f);
    struct engine *g = epoch_open(&o, records);
    unlink(o.scorer_path);
    epoch_loop_open(&l, &loaded, f);
    for (int k = 0; k < 3; k++) {
        struct target_settings of = epoch_settings(kinds[k][0], 5, 9);
        of.reselector = kinds[k][1];
        of.quarters = kinds[k][3];
        epoch_request(k, kinds[k][2], TINY_SLOW ? 20 : 60, &records[k], &s);
        s.sparse = &of;
        epoch_run(g, &s, &records[k]);
        epoch_naive(&l, &of, NULL, s.params.seed, &records[k], &want);
        epoch_assert_same(&records[k], &want, target_selector_name(of.selector));
        of.quarters = 4; /* what is left out has a say */
        epoch_naive(&l, &of, NULL, s.params.seed, &records[k], &whole);
        assert_true(whole.row[1] != want.row[1]);
    }
    target_scorer_close(loaded);
    target_scorer_free(f);
    epoch_loop_close(&l);
    engine_close(g);
}

/* Selectors by bounds, on a server that keeps what they go by. */
static void test_epochs_bounds(void) {
    static struct epoch_record records[MOST_REQUESTS], want;
    static const int selectors[][3] = {{TARGET_MINMAX, TARGET_MINMAX, 640},
                                       {TARGET_BOUND, TARGET_MINMAX, 995},
                                       {TARGET_OBSERVED, TARGET_BOUND, 641}};
    static struct epoch_loop l;
    struct engine_options o;
    struct engine_submit_options s;
    int n_others = 0;
    epoch_options(&o);
    o.sparse.selector = TARGET_MINMAX;
    o.sparse.reselect = TARGET_RESELECT_STEP;
    o.sparse.reselector = TARGET_BOUND;
    struct engine *g = epoch_open(&o, records);
    const struct kvpool_page_shape *shape = engine_get_plan(g)->pool.shape;
    assert_int_equal(shape[KVPOOL_SHALLOW].state_bytes, 8 * 64 * 4);
    epoch_loop_open(&l, NULL, NULL);
    for (int k = 0; k < 3; k++) {
        struct target_settings of = epoch_settings(selectors[k][0], 4, 9), mean;
        of.reselector = selectors[k][1];
        epoch_request(k, selectors[k][2], TINY_SLOW ? 20 : 60, &records[k], &s);
        s.sparse = &of;
        epoch_run(g, &s, &records[k]);
        epoch_naive(&l, &of, NULL, s.params.seed, &records[k], &want);
        epoch_assert_same(&records[k], &want, target_selector_name(of.selector));
        mean = of; /* chooses otherwise at times, as do the two */
        mean.selector = mean.reselector = TARGET_MEAN;
        static struct epoch_record by_mean;
        epoch_naive(&l, &mean, NULL, s.params.seed, &records[k], &by_mean);
        for (int j = 0; j < want.n_lists; j++)
            n_others += want.list[j].n != by_mean.list[j].n ||
                        memcmp(want.list[j].kept, by_mean.list[j].kept,
                               (size_t)want.list[j].n * sizeof(int32_t)) != 0;
    }
    assert_true(n_others > 3);
    epoch_loop_close(&l);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- Re-checks ---- */

/* Attention of a row in the select layer alone is what a whole pass finds there, to the bit: layers
 * in three groups, of which the second is the select layer. */
static void test_epochs_look(void) {
    static struct epoch_loop l;
    static struct epoch_record r, want;
    static float seen[MOST_BLOCKS], look[MOST_BLOCKS];
    struct engine_submit_options s;
    struct target_settings of = epoch_settings(TARGET_RECENT, 4, 0);
    struct err e = {0};
    int32_t zero = 0, one = 1, at = 799, n_all = 13, elsewhere = 0;
    epoch_loop_open(&l, NULL, NULL);
    epoch_request(0, 700, 1, &r, &s);
    memcpy(r.out, r.prompt, MOST_OUT * sizeof *r.out);
    r.n_out = 102; /* positions 700.. are generated rows */
    epoch_naive(&l, &of, NULL, 0, &r, &want);
    assert_true(l.n == 801);
    /* The row again: what it writes goes to a page of nobody's. */
    elsewhere = (int32_t)((size_t)(2 * MOST_BLOCKS - 1) * l.page_bytes / KVPOOL_ALIGN);
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < n_all; i++) assert_true(l.page[g][i] != elsewhere);
    struct kern_lists shallow = {.page = l.page[0],
                                 .block = l.all,
                                 .n_blocks = &n_all,
                                 .capacity = MOST_BLOCKS,
                                 .seq_stride = 1};
    struct kern_lists deep = shallow;
    deep.page = l.page[1];
    struct model_pass pass = {
        .batch = {.rows = {.n_gen = 1},
                  .token = &r.out[at - 700],
                  .position = &at,
                  .row_seq = &zero,
                  .n_seqs = 1,
                  .seq_row = &zero,
                  .seq_n_rows = &one},
        .n_groups = 3,
    };
    static const int first_layer[] = {0, SELECT_LAYER, SELECT_LAYER + 1, N_LAYERS};
    for (int g = 0; g < 3; g++)
        pass.group[g] = (struct model_group){.first_layer = first_layer[g],
                                             .n_layers = first_layer[g + 1] - first_layer[g],
                                             .arena = l.arena,
                                             .kv_dtype = KERN_F16,
                                             .slot_page = &elsewhere,
                                             .lists = g ? deep : shallow};
    pass.group[1].taps = (struct kern_attn_taps){.mass = seen, .mass_line = &zero};
    assert_ok(model_forward(l.m, &pass, &e), e);
    epoch_loop_look(&l, at, l.all, n_all, look);
    assert_memory_equal(look, seen, (size_t)n_all * sizeof *look);
    assert_true(look[0] > 0 && look[12] > 0);
    epoch_loop_close(&l);
}

static void recheck_fill(int i, struct epoch_record *r, struct engine_submit_options *s) {
    static const struct {
        int n_prompt, selector, reselect, reselector, recheck, min_blocks;
        double drop;
    } kinds[] = {
        {640, TARGET_MEAN, 9, TARGET_MEAN, TARGET_RECHECK_BORDER, TARGET_UNSET, 0},
        {995, TARGET_OBSERVED, 7, TARGET_MEAN, TARGET_RECHECK_BORDER, TARGET_UNSET, .3},
        {711, TARGET_MEAN, TARGET_RESELECT_SURPRISE, TARGET_MEAN, TARGET_RECHECK_OFF, 2, .5},
        {577, TARGET_RECENT, 5, TARGET_RECENT, TARGET_RECHECK_BORDER, 2, .4},
        {900, TARGET_OBSERVED, 1, TARGET_MEAN, TARGET_RECHECK_BORDER, 3, .25},
    };
    static struct target_settings of[MOST_REQUESTS];
    epoch_request(i, kinds[i].n_prompt, TINY_SLOW ? 44 : 60, r, s);
    for (int k = 12; i % 2 && k < r->n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
    s->params.coupling = VERIFY_GUMBEL;
    s->params.temperature = i % 2 ? 0.2 : 0;
    of[i] = epoch_settings(kinds[i].selector, 5, kinds[i].reselect);
    of[i].surprise = 1e-3;
    of[i].reselector = kinds[i].reselector;
    of[i].recheck = kinds[i].recheck;
    of[i].min_blocks = kinds[i].min_blocks;
    of[i].drop = kinds[i].drop;
    s->sparse = &of[i];
}

static void recheck_company(int i, int n, struct epoch_record *r, struct engine_submit_options *s) {
    recheck_fill((i + 2) % n, r, s);
}

/* Lists and logits are the naive loop's, which looks row by row and counts use row by row; then the
 * same in chunks, behind hits, in rounds and in batches. */
static void test_epochs_recheck(void) {
    enum { N = 5 };
    static const struct epoch_crowd recheck = {
        .fill = recheck_fill, .company = recheck_company, .company_tokens = 3};
    static struct epoch_record want[MOST_REQUESTS], got[MOST_REQUESTS], naive, without;
    static struct epoch_loop l;
    struct engine_options o;
    struct engine_submit_options s;
    int n_other = 0, n_short = 0, n_dropped = 0;
    epoch_options(&o);
    epoch_run_all(&o, &recheck, N, false, true, want);
    epoch_loop_open(&l, NULL, NULL);
    for (int i = 0; i < N; i++) {
        recheck_fill(i, &got[i], &s);
        struct target_settings of = *s.sparse;
        epoch_naive(&l, &of, NULL, s.params.seed, &want[i], &naive);
        epoch_assert_same(&want[i], &naive, "re-checked");
        of.recheck = TARGET_RECHECK_OFF;
        epoch_naive(&l, &of, NULL, s.params.seed, &want[i], &without);
        for (int j = 0; j < naive.n_lists; j++) {
            n_other += naive.list[j].n != without.list[j].n ||
                       memcmp(naive.list[j].kept, without.list[j].kept,
                              (size_t)naive.list[j].n * sizeof(int32_t)) != 0;
            n_short += naive.list[j].n < naive.list[0].n;
        }
        /* By surprise none may come up. */
        if (of.drop == 0 || of.reselect != TARGET_RESELECT_SURPRISE)
            assert_true((want[i].sparsity.n_dropped > 0) == (of.drop > 0));
        n_dropped += want[i].sparsity.n_dropped > 0;
    }
    epoch_loop_close(&l);
    assert_true(n_other > 5 && n_short > 5 && n_dropped > 0);
    o.max_rows = 17;
    o.draft_tokens = 5;
    epoch_run_all(&o, &recheck, N, false, false, got);
    for (int i = 0; i < N; i++) epoch_assert_same(&got[i], &want[i], "chunks of 17, lookup");
    o.max_rows = 64;
    o.n_threads = 2;
    epoch_run_all(&o, &recheck, N, true, false, got);
    for (int i = 0; i < N; i++) epoch_assert_same(&got[i], &want[i], "in a batch");
}

/* An exact answer whose lists were re-checked is the dense one. */
static void test_epochs_recheck_exact(void) {
    static struct epoch_record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of = epoch_settings(TARGET_OFF, TARGET_UNSET, 0);
    epoch_options(&o);
    struct engine *g = epoch_open(&o, &want);
    epoch_request(0, 700, 40, &want, &s);
    s.sparse = &of;
    epoch_run(g, &s, &want);
    engine_close(g);
    g = tiny_engine_open(&o, epoch_target());
    epoch_request(0, 700, 40, &got, &s);
    of = epoch_settings(TARGET_OBSERVED, 4, TARGET_UNSET);
    of.exact = 4;
    of.recheck = TARGET_RECHECK_BORDER;
    s.sparse = &of;
    struct engine_request *request = tiny_submit(g, &s);
    struct engine_progress p = tiny_wait(request);
    assert_int_equal(p.finish, ENGINE_LENGTH);
    assert_true(p.sparsity.n_selections > 3 && p.sparsity.n_kept < p.sparsity.n_blocks);
    assert_memory_equal(p.tokens, want.out, 40 * sizeof *want.out);
    engine_release(g, request);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- A scorer's file ---- */

/* Both kinds, at the prompt's end and inside answers: what a file says of layer, curve and
 * smoothing holds where nobody says otherwise. */
static void test_epochs_scorer(void) {
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
        struct engine *g = epoch_open(&o, records);
        unlink(o.scorer_path);
        assert_int_equal(engine_select_layer(g), SELECT_LAYER);
        assert_int_equal(engine_scorer(g)->kind, file->kind);
        assert_int_equal(engine_sparse_defaults(g).reselector, TARGET_SCORER);
        epoch_loop_open(&l, &loaded, file);
        for (int k = 0; k < 4; k++) {
            struct epoch_record *r = &records[k];
            struct target_settings of =
                epoch_settings(k == 1 ? TARGET_OBSERVED : TARGET_SCORER, k == 2 ? TARGET_UNSET : 5,
                               k == 3 ? TARGET_RESELECT_SURPRISE
                               : k    ? 9
                                      : 0);
            if (k == 2) of.keep = TARGET_CURVE, of.min_blocks = 1;
            epoch_request(k, 640 + 61 * k, TINY_SLOW ? 40 : 100, r, &s);
            s.sparse = &of;
            epoch_run(g, &s, r);
            if (k == 2 && !mlp) { /* the source's curve begins later */
                assert_int_equal(r->n_lists, 0);
                continue;
            }
            epoch_naive(&l, &of, &says, s.params.seed, r, &want);
            epoch_assert_same(r, &want, mlp ? "mlp" : "late");
            if (k == 2 && mlp)
                assert_in_range(r->list[0].n, 5, 8); /* .4 of 12 and a reserve of 2 */
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
    static const int points[] = {TARGET_RESELECT_SURPRISE, 1, TARGET_RESELECT_SURPRISE, 16,
                                 TARGET_RESELECT_SURPRISE, 7};
    static const int selectors[] = {TARGET_MEAN, TARGET_OBSERVED, TARGET_OBSERVED, TARGET_RANDOM};
    static struct target_settings of[MOST_REQUESTS];
    epoch_request(i, lengths[i % 6], TINY_SLOW ? 70 : 130 + i, r, s);
    /* A third repeats itself, so that lookup is right at times. */
    for (int k = 12; i % 3 == 0 && k < r->n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
    s->params.coupling = VERIFY_GUMBEL;
    s->params.temperature = i % 3 == 0 ? 0.2 : i % 3 == 1 ? 0 : 1;
    if (i % 4 == 2) s->params.frequency_penalty = 0.3;
    of[i] = epoch_settings(selectors[i % 4], 4 + i % 3, points[i % 6]);
    of[i].surprise = i % 4 ? 1e-3 : 0.05;
    s->sparse = &of[i];
}

static void fill_company(int i, int n, struct epoch_record *r, struct engine_submit_options *s) {
    fill((i + 5) % n, r, s);
}

static const struct epoch_crowd crowd = {
    .fill = fill, .company = fill_company, .company_tokens = 3};

static void test_epochs_same(void) {
    static struct epoch_record want[MOST_REQUESTS], got[MOST_REQUESTS];
    static const struct {
        int max_rows, n_threads, draft_tokens;
        bool draft, together, again;
        const char *what;
    } runs[] = {
        {17, 1, 0, false, false, false, "chunks of 17"},
        {48, 1, 3, false, false, false, "chunks of 48, lookup"},
        {192, 2, 0, false, false, true, "behind a hit"},
        {64, 2, 8, true, true, false, "in a batch, draft"},
        {100, 1, VERIFY_DRAFT_AUTO, true, true, false, "in a batch, auto"},
        {192, 1, 5, true, false, false, "draft"},
    };
    int n = TINY_SLOW ? 6 : 15, n_lists = 0, n_wide = 0, n_cut = 0;
    struct engine_options o;
    struct tiny_draft d;
    tiny_draft_default(&d, epoch_target());
    const char *draft = tiny_draft_file(epoch_target(), &d);
    epoch_options(&o);
    o.max_rows = 1100;
    epoch_run_all(&o, &crowd, n, false, false, want);
    for (int i = 0; i < n; i++) {
        n_lists += want[i].n_lists;
        n_wide += want[i].sparsity.n_wide;
        assert_int_equal(want[i].sparsity.n_cut, 0);
    }
    assert_true(n_lists > 10 * n && n_wide > 0);
    for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
        epoch_options(&o);
        o.max_rows = runs[k].max_rows;
        o.n_threads = runs[k].n_threads;
        o.draft_tokens = runs[k].draft_tokens;
        if (runs[k].draft) o.draft_path = draft, o.kv_memory_bytes *= 2;
        epoch_run_all(&o, &crowd, n, runs[k].together, runs[k].again, got);
        for (int i = 0; i < n; i++) {
            epoch_assert_same(&got[i], &want[i], runs[k].what);
            n_cut += got[i].sparsity.n_cut;
        }
    }
    assert_true(TINY_SLOW || n_cut > 0); /* rounds were cut at surprises */
    unlink(draft);
}

/* ---- Speculation ---- */

static void check_speculation(int reselect, bool gumbel, bool records, bool recheck) {
    static const int few[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    watch_reset(records);
    bed_tiny_sparse(&b, epoch_target(), SELECT_LAYER);
    b.o.sparse.reselect = reselect;
    b.o.sparse.surprise = 0.02;
    if (recheck) b.o.sparse.recheck = TARGET_RECHECK_BORDER, b.o.sparse.drop = 0.25;
    b.gumbel = gumbel;
    b.n_requests = TINY_SLOW ? 6 : 14;
    b.n_out = 96;
    bed_check(&b, few, 2, true);
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(!records || watch.n_replays > 100);
    bed_close_tiny(&b);
}

static void test_epochs_speculation(void) {
    check_speculation(TARGET_RESELECT_SURPRISE, false, false, false);
}
static void test_epochs_speculation_gumbel(void) {
    check_speculation(TARGET_RESELECT_SURPRISE, true, false, false);
}
static void test_epochs_speculation_number(void) {
    check_speculation(10, false, false, true);
}
static void test_epochs_speculation_device(void) {
    check_speculation(TARGET_RESELECT_SURPRISE, true, true, true);
}

/* ---- Dense, to the bit ---- */

/* Where all blocks are kept, by a share or by way of lists, and where a prompt is short. */
static void test_epochs_dense(void) {
    static struct epoch_record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of[6], off = epoch_settings(TARGET_OFF, TARGET_UNSET, 0);
    epoch_options(&o);
    o.draft_tokens = 3;
    struct engine *g = epoch_open(&o, &want);
    epoch_request(0, 900, 100, &want, &s);
    s.sparse = &off;
    epoch_run(g, &s, &want);
    engine_close(g);
    assert_int_equal(want.n_lists, 0);
    for (int i = 0; i < 6; i++) of[i] = epoch_settings(TARGET_MEAN, TARGET_UNSET, 1);
    of[0].keep = 1;
    of[1].keep = 0.1; /* the floor's 32 blocks are more */
    of[2].selector = TARGET_ALL;
    of[3].keep_blocks = 3; /* by way of lists: a reserve of everything */
    of[3].reserve = 1;
    of[4] = of[3];
    of[4].reselect = TARGET_RESELECT_SURPRISE;
    of[4].surprise = 1e-6;
    of[5] = of[3];
    of[5].selector = TARGET_OBSERVED;
    for (int i = 0; i < 6; i++) {
        g = epoch_open(&o, &got);
        epoch_request(0, 900, 100, &got, &s);
        s.sparse = &of[i];
        epoch_run(g, &s, &got);
        assert_true(i < 2 ? got.n_lists == 0 : i == 2 ? got.n_lists == 1 : got.n_lists > 1);
        if (i == 3) assert_int_equal(got.n_lists, n_points(100, 1));
        assert_int_equal(got.sparsity.kv_shallow_bytes + got.sparsity.kv_deep_bytes,
                         got.sparsity.kv_dense_bytes);
        got.n_lists = 0;
        epoch_assert_same(&got, &want, "all blocks");
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
    /* Lists that are made anew and stay equal change nothing either. */
    static struct epoch_record once;
    struct target_settings recent = epoch_settings(TARGET_RECENT, 3, 0);
    recent.reserve = 0;
    g = epoch_open(&o, &once);
    epoch_request(0, 900, 100, &once, &s);
    s.sparse = &recent;
    epoch_run(g, &s, &once);
    engine_close(g);
    recent.reselect = 4;
    g = epoch_open(&o, &got);
    epoch_request(0, 900, 100, &got, &s);
    s.sparse = &recent;
    epoch_run(g, &s, &got);
    engine_close(g);
    assert_int_equal(got.n_lists, n_points(100, 4));
    got.n_lists = 1;
    epoch_assert_same(&got, &once, "equal lists");
    assert_true(once.row[5] != want.row[5]);
}

/* ---- What is reserved, counted, refused ---- */

static size_t plan_bytes(const struct engine *g, const char *name) {
    const struct plan *p = engine_get_plan(g);
    for (int i = 0; i < p->n_lines; i++)
        if (!strcmp(p->lines[i].name, name)) return p->lines[i].bytes;
    return 0;
}

static void test_epochs_plan(void) {
    static struct epoch_record r;
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_stats st;
    epoch_options(&o);
    struct engine *g = epoch_open(&o, &r);
    const struct kvpool_page_shape *shape = engine_get_plan(g)->pool.shape;
    assert_int_equal(shape[KVPOOL_SHALLOW].state_bytes, 4 * 64 * 4);
    assert_int_equal(shape[KVPOOL_DEEP].state_bytes, 0);
    assert_int_equal(kvpool_page_bytes(&shape[KVPOOL_SHALLOW]), PAGE_BYTES + 1024);
    assert_int_equal(kvpool_state_offset(&shape[KVPOOL_SHALLOW]), PAGE_BYTES);
    /* A pass's states and rings, notes and scratch on top. */
    assert_true(plan_bytes(g, "states") >= (192 + 8 * 32) * 64 * 4);
    epoch_request(0, 700, 41, &r, &s);
    struct target_settings of = epoch_settings(TARGET_OBSERVED, 4, 10);
    s.sparse = &of;
    epoch_run(g, &s, &r);
    tiny_assert_pool_whole(g);
    engine_get_stats(g, &st);
    assert_int_equal(st.n_selections, 4);
    assert_int_equal(st.n_reselections, 3);
    assert_int_equal(st.n_sparse_requests, 1);
    assert_int_equal(st.n_blocks_selected, 4 * 11);
    assert_true(st.select_seconds > 0 && r.sparsity.select_ns > 0);
    engine_close(g);
    target_settings_unset(&o.sparse);
    g = epoch_open(&o, &r);
    assert_int_equal(engine_get_plan(g)->pool.shape[KVPOOL_SHALLOW].state_bytes, 0);
    assert_int_equal(plan_bytes(g, "states") + plan_bytes(g, "scorer"), 0);
    engine_close(g);
}

static void refused_open(const struct engine_options *o, int code, const char *says) {
    struct engine_options options = *o;
    struct engine *g;
    struct err e = {0};
    char path[256];
    snprintf(path, sizeof path, "%s", tiny_model_file(epoch_target()));
    options.model_path = path;
    assert_int_equal(engine_open(&g, &options, NULL, NULL, &e), code);
    if (!strstr(e.message, says)) fail_msg("\"%s\" does not say \"%s\"", e.message, says);
    unlink(path);
}

static void test_epochs_refused(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_request *request;
    struct err e = {0};
    struct target_settings of;
    static struct epoch_record r;
    epoch_options(&o);
    target_settings_unset(&o.sparse);
    struct engine *g = epoch_open(&o, &r);
    epoch_request(0, 700, 4, &r, &s);
    s.sparse = &of;
    of = epoch_settings(TARGET_MEAN, 4, 0);
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "--sparse mean"));
    of = epoch_settings(TARGET_OBSERVED, 4, 8);
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    of.reselector = TARGET_SCORER;
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "no scorer was loaded"));
    of = epoch_settings(TARGET_MINMAX, 4, 0);
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    of = epoch_settings(TARGET_OBSERVED, 4, 8);
    of.reselector = TARGET_RANDOM; /* needs no states */
    epoch_run(g, &s, &r);
    assert_int_equal(r.n_lists, 1);
    engine_close(g);
    o.sparse.selector = TARGET_MINMAX; /* states, but not for everybody */
    g = epoch_open(&o, &r);
    epoch_request(0, 700, 4, &r, &s);
    s.sparse = &of;
    of = epoch_settings(TARGET_RECENT, 4, 8);
    of.reselector = TARGET_BOUND;
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "as --sparse bound"));
    of.reselector = TARGET_MINMAX;
    epoch_run(g, &s, &r);
    engine_close(g);
    o.sparse.selector = TARGET_SCORER;
    refused_open(&o, E_INVALID, "no scorer file was named");
    o.sparse.selector = TARGET_MEAN;
    o.select_layer = 0;
    refused_open(&o, E_INVALID, "select_layer is 0");
    struct target_scorer_file *f = epoch_scorer(false);
    target_settings_unset(&o.sparse);
    o.select_layer = 1;
    o.scorer_path = epoch_scorer_file(f);
    refused_open(&o, E_INVALID, "select_layer is 1, the scorer ");
    o.select_layer = -1;
    f->fingerprint ^= 1;
    o.scorer_path = epoch_scorer_file(f);
    refused_open(&o, E_INVALID, "fingerprint");
    f->fingerprint ^= 1;
    f->a[7] = NAN;
    o.scorer_path = epoch_scorer_file(f);
    refused_open(&o, E_NUMERIC, "a.weight holds nan at 7");
    unlink(o.scorer_path);
    refused_open(&o, E_NOT_FOUND, o.scorer_path);
    target_scorer_free(f);
}

const struct test tests[] = {
    {"epochs_naive", TEST_QUICK, 120000, test_epochs_naive},
    {"epochs_look", TEST_QUICK, 20000, test_epochs_look},
    {"epochs_recheck", TEST_QUICK, 60000, test_epochs_recheck},
    {"epochs_recheck_exact", TEST_QUICK, 20000, test_epochs_recheck_exact},
    {"epochs_bounds", TEST_QUICK, 60000, test_epochs_bounds},
    {"epochs_quarters", TEST_QUICK, 60000, test_epochs_quarters},
    {"epochs_scorer", TEST_QUICK, 120000, test_epochs_scorer},
    {"epochs_dense", TEST_QUICK, 60000, test_epochs_dense},
    {"epochs_plan", TEST_QUICK, 20000, test_epochs_plan},
    {"epochs_refused", TEST_QUICK, 20000, test_epochs_refused},
    {"epochs_same", TEST_QUICK, 120000, test_epochs_same},
    {"epochs_speculation", TEST_FULL, 300000, test_epochs_speculation},
    {"epochs_speculation_gumbel", TEST_FULL, 300000, test_epochs_speculation_gumbel},
    {"epochs_speculation_number", TEST_FULL, 300000, test_epochs_speculation_number},
    {"epochs_speculation_device", TEST_FULL, 300000, test_epochs_speculation_device},
    {0},
};
