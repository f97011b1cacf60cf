/* engine/ with selections by states of the select layer, at the end of the prompt and inside
 * answers, over the tiny model. Goal: every list is what docs/sparsity.md says of the committed
 * tokens and the settings, and of nothing else. A naive loop of one-row passes notes states, scores
 * and selects at each point by itself; the engine's lists, tokens and logits are the same behind
 * chunks, hits of the cache, rounds of any length that are cut at the points, batches with
 * cancelled neighbours, and recordings; where all blocks are kept every bit is dense's; servers
 * that nobody asks for states keep none. */
#include "tests/engine_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "target/scorer.h"
#include "tests/speculation_bed.h"
#include "tests/watched_kern.h"

enum {
    N_LAYERS = 4,
    SELECT_LAYER = 2,
    MOST_PROMPT = 1100,
    MOST_OUT = 150,
    MOST_BLOCKS = (MOST_PROMPT + MOST_OUT) / 64 + 1,
    MOST_LISTS = MOST_OUT,
    FIRST_SEED = 100,
    MOST_REQUESTS = 16,
    PAGE_BYTES = 2 * 2 * 2 * 64 * 16 * 2, /* K and V of two layers */
};

static const struct tiny_options *target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = N_LAYERS;
    return &t;
}

static void epoch_options(struct engine_options *o) {
    tiny_engine_options(o);
    o->select_layer = SELECT_LAYER;
    o->kv_memory_bytes = (size_t)400 * TINY_BLOCK_BYTES;
    o->max_rows = 192;
    o->sparse.selector = TARGET_MEAN; /* so that states are kept */
}

static struct target_settings settings(int selector, int keep_blocks, int reselect) {
    struct target_settings s;
    target_settings_unset(&s);
    s.selector = selector;
    s.keep_blocks = keep_blocks;
    s.window_blocks = 1;
    s.reserve = 0.1;
    s.reselect = reselect;
    s.surprise = 0.05; /* the tiny model is rarely surprised */
    return s;
}

/* ---- What a request left ---- */

struct list {
    int n;
    int32_t kept[MOST_BLOCKS];
};

struct record {
    int n_prompt, n_out, n_lists, n_cached;
    int32_t prompt[MOST_PROMPT], out[MOST_OUT];
    float logprob[MOST_OUT];
    uint64_t row[MOST_OUT]; /* the newest logits behind each place */
    struct list list[MOST_LISTS];
    struct engine_sparsity sparsity;
};

static struct record *record_of(void *arg, const struct engine_request *r) {
    struct engine_progress p;
    engine_poll(r, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + MOST_REQUESTS) return NULL; /* company */
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
    assert_true(n_blocks == (r->n_prompt + 63) / 64 && r->n_lists < MOST_LISTS);
    struct list *l = &r->list[r->n_lists++];
    l->n = n_kept;
    memcpy(l->kept, kept, (size_t)n_kept * sizeof *kept);
}

static struct engine *open_engine(const struct engine_options *o, struct record *records) {
    struct engine *g = tiny_engine_open(o, target());
    engine_trace_logits(g, keep_row, records);
    engine_trace_selection(g, keep_list, records);
    return g;
}

static void make_request(int i, int n_prompt, int n_out, struct record *r,
                         struct engine_submit_options *s) {
    memset(r, 0, sizeof *r);
    r->n_prompt = n_prompt;
    tiny_prompt(60 + (uint64_t)i, r->prompt, n_prompt);
    tiny_submit_options(s, r->prompt, n_prompt);
    s->params.seed = FIRST_SEED + (uint64_t)i;
    s->params.max_tokens = n_out;
    s->params.logprobs = 0;
    s->params.ignore_eos = true;
}

static void keep_end(struct record *r, const struct engine_progress *p) {
    if (p->finish == ENGINE_FAILED) fail_msg("seed %d: %s", (int)p->seed, p->error);
    r->n_out = p->n_tokens;
    r->n_cached = p->n_cached_prompt;
    r->sparsity = p->sparsity;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
    for (int i = 0; i < p->n_tokens; i++) r->logprob[i] = p->logprobs[i].logprob;
    assert_int_equal(r->n_lists, p->sparsity.n_selections);
    if (r->n_lists == 0) return;
    assert_int_equal(r->list[0].n, p->sparsity.n_kept_first);
    assert_int_equal(r->list[r->n_lists - 1].n, p->sparsity.n_kept);
}

static void run(struct engine *g, const struct engine_submit_options *s, struct record *r) {
    struct engine_request *request = tiny_submit(g, s);
    struct engine_progress p = tiny_wait(request);
    keep_end(r, &p);
    engine_release(g, request);
}

static void assert_lists(const struct record *got, const struct record *want, const char *what) {
    int n = got->n_lists < want->n_lists ? got->n_lists : want->n_lists;
    for (int i = 0; i < n; i++)
        if (got->list[i].n != want->list[i].n ||
            memcmp(got->list[i].kept, want->list[i].kept,
                   (size_t)want->list[i].n * sizeof want->list[i].kept[0]) != 0)
            fail_msg("%s: list %d of %d differs (%d and %d blocks)", what, i, want->n_lists,
                     got->list[i].n, want->list[i].n);
    assert_int_equal(got->n_lists, want->n_lists);
}

static void assert_same(const struct record *got, const struct record *want, const char *what) {
    for (int i = 0; i < want->n_out; i++)
        if (got->out[i] != want->out[i] || got->row[i] != want->row[i])
            fail_msg("%s, prompt of %d: token %d is %d, want %d; logits %s", what, want->n_prompt,
                     i, got->out[i], want->out[i],
                     got->row[i] == want->row[i] ? "agree" : "differ");
    assert_int_equal(got->n_out, want->n_out);
    assert_lists(got, want, what);
}

/* ---- The naive loop ---- */

/* A model of its own, one row a pass, states noted one by one. */
struct loop {
    struct kern *k;
    struct model *m;
    void *arena;
    size_t page_bytes, plane_at;
    int32_t page[2][MOST_BLOCKS], all[MOST_BLOCKS];
    float mass[MOST_BLOCKS], score[MOST_BLOCKS], work[MOST_BLOCKS];
    float logits[TINY_VOCAB], state[64], *ring;
    void *scratch;
    const struct kern_scorer *scorer; /* of TARGET_SCORER */
    int n;                            /* positions so far */
};

static const struct kern_scorer mean = {
    .kind = KERN_SCORE_MEAN, .cols = 64, .n_queries = 32, .normed = true};

/* file: of the scorer, NULL: none. */
static void loop_open(struct loop *l, struct target_scorer **loaded,
                      const struct target_scorer_file *file) {
    struct tiny_options t = *target();
    struct err e = {0};
    struct kern_options ko = {.n_threads = 1};
    struct model_caps caps = {
        .max_rows = 1, .max_seqs = 1, .max_blocks = MOST_BLOCKS, .max_logits = 1};
    struct model_source *src;
    const char *path = tiny_model_file(&t);
    memset(l, 0, sizeof *l);
    assert_ok(kern_cpu_open(&l->k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&l->m, src, NULL, l->k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
    l->page_bytes = PAGE_BYTES + 2048;
    l->plane_at = PAGE_BYTES;
    assert_ok(l->k->ops->reserve(l->k, l->page_bytes * 2 * MOST_BLOCKS, &l->arena, &e), e);
    l->ring = calloc(32 * 64, sizeof *l->ring);
    size_t scratch = l->k->ops->score_scratch_bytes(l->k, &mean, MOST_BLOCKS);
    if (file) {
        assert_ok(target_scorer_load(loaded, file, l->k, &e), e);
        l->scorer = target_scorer_kern(*loaded);
        scratch += l->k->ops->score_scratch_bytes(l->k, l->scorer, MOST_BLOCKS);
    }
    assert_ok(l->k->ops->reserve(l->k, scratch, &l->scratch, &e), e);
    assert_non_null(l->ring);
}

static void loop_begin(struct loop *l) {
    memset(l->mass, 0, sizeof l->mass);
    l->n = 0;
    for (int i = 0; i < MOST_BLOCKS; i++) {
        l->all[i] = i;
        for (int g = 0; g < 2; g++)
            l->page[g][i] =
                (int32_t)((size_t)((i * 7 % MOST_BLOCKS) * 2 + g) * l->page_bytes / KVPOOL_ALIGN);
    }
}

static void loop_close(struct loop *l) {
    free(l->ring);
    l->k->ops->unreserve(l->k, l->scratch);
    l->k->ops->unreserve(l->k, l->arena);
    model_close(l->m);
    l->k->ops->close(l->k);
}

/* Append one token; generated rows of deep layers read kept[0..n_kept) of the prompt's blocks. */
static void loop_row(struct loop *l, int32_t token, int n_prompt, const struct list *list) {
    struct err e = {0};
    int32_t zero = 0, one = 1, at = l->n, n_all = at / 64 + 1, n_deep = n_all;
    int32_t block[MOST_BLOCKS], page[MOST_BLOCKS];
    bool generated = l->n >= n_prompt;
    bool mark = !generated && at >= n_prompt - 32;
    memcpy(block, l->all, sizeof block);
    if (generated && list) {
        int first = (n_prompt + 63) / 64;
        n_deep = list->n;
        memcpy(block, list->kept, (size_t)list->n * sizeof *block);
        for (int i = first; i < n_all; i++) block[n_deep++] = i;
    }
    for (int i = 0; i < n_deep; i++) page[i] = l->page[1][block[i]];
    struct model_pass pass = {
        .batch = {.rows = {.n_gen = generated, .n_prompt = !generated},
                  .token = &token,
                  .position = &at,
                  .row_seq = &zero,
                  .n_seqs = 1,
                  .seq_row = &zero,
                  .seq_n_rows = &one},
        .n_groups = 2,
        .group = {{.first_layer = 0,
                   .n_layers = SELECT_LAYER,
                   .arena = l->arena,
                   .kv_dtype = KERN_F16,
                   .slot_page = &l->page[0][at / 64],
                   .lists = {l->page[0], l->all, &n_all, MOST_BLOCKS, 1, 0}},
                  {.first_layer = SELECT_LAYER,
                   .n_layers = N_LAYERS - SELECT_LAYER,
                   .arena = l->arena,
                   .kv_dtype = KERN_F16,
                   .slot_page = &l->page[1][at / 64],
                   .lists = {page, block, &n_deep, MOST_BLOCKS, 1, 0},
                   .taps = {.mass = mark ? l->mass : NULL, .mass_line = mark ? &zero : NULL}}},
        .n_logits = 1,
        .logit_row = &zero,
        .logits = l->logits,
        .logits_stride = TINY_VOCAB,
        .n_taps = 1,
        .tap = {{SELECT_LAYER, l->state}},
    };
    assert_ok(model_forward(l->m, &pass, &e), e);
    struct kern_note note = {.n_rows = 1, .position = at};
    struct kern_plane plane = {l->arena, KVPOOL_ALIGN, l->plane_at, 64, true};
    assert_int_equal(
        l->k->ops->note_states(l->k, 1, &note, l->state, &plane, l->page[0], MOST_BLOCKS, l->ring),
        0);
    l->n++;
}

static void loop_select(struct loop *l, const struct target_settings *s, int n_prompt,
                        uint64_t seed, int epoch, bool wide, struct list *out) {
    struct kern_score_view v = {
        {l->arena, KVPOOL_ALIGN, l->plane_at, 64, true}, l->page[0], l->ring, l->n};
    int selector = epoch > 0 ? s->reselector : s->selector;
    const struct kern_scorer *scorer = selector == TARGET_SCORER ? l->scorer : &mean;
    assert_int_equal(l->k->ops->score(l->k, scorer, &v, l->scratch, l->score), 0);
    struct target_view view = {.n_tokens = n_prompt,
                               .seed = seed,
                               .epoch = epoch,
                               .mass = l->mass,
                               .score = l->score,
                               .wide = wide};
    out->n = target_select(s, &view, l->work, out->kept);
}

/* All lists of a request whose answer is known, and its logits. */
static void naive_epochs(struct loop *l, const struct target_settings *asked,
                         const struct target_scorer_defaults *file, uint64_t seed,
                         const struct record *got, struct record *want) {
    struct target_settings none, s;
    struct target_epoch epoch = {0};
    bool wide = false;
    target_settings_unset(&none);
    s = target_settings_resolve(&none, asked, file);
    *want = *got;
    want->n_lists = 0;
    loop_begin(l);
    for (int i = 0; i < got->n_prompt; i++) loop_row(l, got->prompt[i], got->n_prompt, NULL);
    want->row[0] = XXH3_64bits(l->logits, sizeof l->logits);
    loop_select(l, &s, got->n_prompt, seed, want->n_lists++, wide, &want->list[0]);
    for (int i = 1; i < got->n_out; i++) {
        loop_row(l, got->out[i - 1], got->n_prompt, &want->list[want->n_lists - 1]);
        want->row[i] = XXH3_64bits(l->logits, sizeof l->logits);
        if (i == got->n_out - 1 || !target_epoch_token(&epoch, &s, -got->logprob[i], &wide))
            continue;
        loop_select(l, &s, got->n_prompt, seed, want->n_lists, wide, &want->list[want->n_lists]);
        want->n_lists++;
        epoch = (struct target_epoch){.wide = wide};
    }
}

/* By hand for the rule's first part: a list every `reselect` tokens that a generated row drew. */
static int n_points(int n_out, int reselect) {
    return reselect > 0 ? 1 + (n_out - 2) / reselect : 1;
}

static void test_epochs_naive(void) {
    static struct record records[MOST_REQUESTS], want;
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
    static struct loop l;
    int n_wide = 0, n_changes = 0, n_short = 0;
    epoch_options(&o);
    struct engine *g = open_engine(&o, records);
    loop_open(&l, NULL, NULL);
    for (size_t i = 0; i < (TINY_SLOW ? 2 : sizeof lengths / sizeof *lengths); i++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            struct record *r = &records[k];
            struct target_settings of = settings(kinds[k].selector, 5, kinds[k].reselect);
            of.reselector = kinds[k].reselector;
            of.smooth = kinds[k].smooth;
            of.threshold = kinds[k].threshold;
            if (k == 6) of.min_blocks = 2;
            make_request((int)k, lengths[i], 120, r, &s);
            if (k == 3) s.params.temperature = 1;
            s.sparse = &of;
            run(g, &s, r);
            if (kinds[k].reselect >= 0)
                assert_int_equal(r->n_lists, n_points(r->n_out, kinds[k].reselect));
            naive_epochs(&l, &of, NULL, s.params.seed, r, &want);
            assert_same(r, &want, target_selector_name(of.selector));
            for (int j = 1; j < r->n_lists; j++)
                n_changes += r->list[j].n != r->list[0].n ||
                             memcmp(r->list[j].kept, r->list[j - 1].kept,
                                    (size_t)r->list[j].n * sizeof(int32_t)) != 0;
            n_wide += r->sparsity.n_wide;
            /* Fewer than the five and the reserve. */
            for (int j = 0; j < r->n_lists && k == 6; j++) n_short += r->list[j].n < 6;
        }
    assert_true(n_wide >= 3 && n_changes > 100 && n_short > 0);
    loop_close(&l);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- A scorer's file ---- */

static uint64_t target_fingerprint(void) {
    struct engine_options o;
    epoch_options(&o);
    struct engine *g = tiny_engine_open(&o, target());
    uint64_t f = engine_model_fingerprint(g);
    engine_close(g);
    return f;
}

/* Random weights; the mlp goes by blocks' first tokens and brings a curve and smoothing. */
static struct target_scorer_file *make_scorer(bool mlp) {
    struct target_scorer_file shape = {.kind = KERN_SCORE_LATE,
                                       .layer = SELECT_LAYER,
                                       .hidden = 64,
                                       .n_heads = 2,
                                       .head_dim = 16,
                                       .n_queries = 32,
                                       .block = 64,
                                       .fingerprint = target_fingerprint()};
    struct target_scorer_file *f;
    struct err e = {0};
    if (mlp) {
        shape.kind = KERN_SCORE_MLP;
        shape.n_heads = shape.head_dim = 0;
        shape.width = 24;
        shape.n_queries = 4;
        shape.normed = shape.by_first = shape.has_layernorm = true;
        shape.smoothing = 0.25;
        shape.curve = (struct target_curve){.n = 1, .at = {{64, .4}}};
    }
    assert_ok(target_scorer_make(&f, &shape, &e), e);
    float *const parts[] = {f->a, f->b, f->ln_weight, f->ln_bias, f->w1, f->b1, f->w2, f->b2};
    const size_t n[] = {32 * 64, 32 * 64, 128, 128, 24 * 128, 24, 24, 1};
    for (size_t i = 0; i < 8; i++)
        for (size_t k = 0; parts[i] && k < n[i]; k++)
            parts[i][k] = (float)((int)(rng_u32(9, k, RNG_TEST, (uint32_t)i) % 2001) - 1000) / 2000;
    return f;
}

static const char *scorer_file(const struct target_scorer_file *f) {
    static char path[64];
    struct err e = {0};
    snprintf(path, sizeof path, "/tmp/tandem_scorer_%d.safetensors", (int)getpid());
    assert_ok(target_scorer_write(path, f, &e), e);
    return path;
}

/* Both kinds, at the prompt's end and inside answers: what a file says of layer, curve and
 * smoothing holds where nobody says otherwise. */
static void test_epochs_scorer(void) {
    static struct record records[MOST_REQUESTS], want;
    static struct loop l;
    struct engine_options o;
    struct engine_submit_options s;
    for (int mlp = 0; mlp < 2; mlp++) {
        struct target_scorer *loaded;
        struct target_scorer_file *file = make_scorer(mlp);
        struct target_scorer_defaults says = {file->smoothing, file->curve};
        epoch_options(&o);
        target_settings_unset(&o.sparse);
        o.select_layer = -1;
        o.scorer_path = scorer_file(file);
        struct engine *g = open_engine(&o, records);
        unlink(o.scorer_path);
        assert_int_equal(engine_select_layer(g), SELECT_LAYER);
        assert_int_equal(engine_scorer(g)->kind, file->kind);
        assert_int_equal(engine_sparse_defaults(g).reselector, TARGET_SCORER);
        loop_open(&l, &loaded, file);
        for (int k = 0; k < 4; k++) {
            struct record *r = &records[k];
            struct target_settings of =
                settings(k == 1 ? TARGET_OBSERVED : TARGET_SCORER, k == 2 ? TARGET_UNSET : 5,
                         k == 3 ? TARGET_RESELECT_SURPRISE
                         : k    ? 9
                                : 0);
            if (k == 2) of.keep = TARGET_CURVE, of.min_blocks = 1;
            make_request(k, 640 + 61 * k, TINY_SLOW ? 40 : 100, r, &s);
            s.sparse = &of;
            run(g, &s, r);
            if (k == 2 && !mlp) { /* the source's curve begins later */
                assert_int_equal(r->n_lists, 0);
                continue;
            }
            naive_epochs(&l, &of, &says, s.params.seed, r, &want);
            assert_same(r, &want, mlp ? "mlp" : "late");
            if (k == 2 && mlp)
                assert_in_range(r->list[0].n, 5, 8); /* .4 of 12 and a reserve of 2 */
        }
        target_scorer_close(loaded);
        target_scorer_free(file);
        loop_close(&l);
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
}

/* ---- The same whatever goes on around ---- */

static void fill(int i, struct record *r, struct engine_submit_options *s) {
    static const int lengths[] = {600, 650, 703, 960, 1100, 400};
    static const int points[] = {TARGET_RESELECT_SURPRISE, 1, TARGET_RESELECT_SURPRISE, 16,
                                 TARGET_RESELECT_SURPRISE, 7};
    static const int selectors[] = {TARGET_MEAN, TARGET_OBSERVED, TARGET_OBSERVED, TARGET_RANDOM};
    static struct target_settings of[MOST_REQUESTS];
    make_request(i, lengths[i % 6], TINY_SLOW ? 70 : 130 + i, r, s);
    /* A third repeats itself, so that lookup is right at times. */
    for (int k = 12; i % 3 == 0 && k < r->n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
    s->params.coupling = VERIFY_GUMBEL;
    s->params.temperature = i % 3 == 0 ? 0.2 : i % 3 == 1 ? 0 : 1;
    if (i % 4 == 2) s->params.frequency_penalty = 0.3;
    of[i] = settings(selectors[i % 4], 4 + i % 3, points[i % 6]);
    of[i].surprise = i % 4 ? 1e-3 : 0.05;
    s->sparse = &of[i];
}

static void run_all(const struct engine_options *o, int n, bool together, bool again,
                    struct record *r) {
    struct engine *g = open_engine(o, r);
    struct engine_request *request[MOST_REQUESTS], *company[MOST_REQUESTS];
    struct engine_submit_options s;
    static struct record other;
    for (int pass = 0; pass <= again; pass++)
        for (int i = 0; i < n; i++) {
            if (together) {
                fill((i + 5) % n, &other, &s);
                s.params.seed = 5;
                company[i] = tiny_submit(g, &s);
                if (i % 2) engine_cancel(g, company[i]);
            }
            fill(i, &r[i], &s);
            if (together) {
                request[i] = tiny_submit(g, &s);
                continue;
            }
            run(g, &s, &r[i]);
            if (pass) assert_true(r[i].n_cached >= r[i].n_prompt - 32 - 63);
        }
    for (int i = 0; i < n && together; i += 2) {
        tiny_wait_tokens(company[i], 3);
        engine_cancel(g, company[i]);
    }
    for (int i = 0; i < n && together; i++) {
        struct engine_progress p = tiny_wait(request[i]);
        keep_end(&r[i], &p);
        engine_release(g, request[i]);
        engine_release(g, company[i]);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

static void test_epochs_same(void) {
    static struct record want[MOST_REQUESTS], got[MOST_REQUESTS];
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
    tiny_draft_default(&d, target());
    const char *draft = tiny_draft_file(target(), &d);
    epoch_options(&o);
    o.max_rows = 1100;
    run_all(&o, n, false, false, want);
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
        run_all(&o, n, runs[k].together, runs[k].again, got);
        for (int i = 0; i < n; i++) {
            assert_same(&got[i], &want[i], runs[k].what);
            n_cut += got[i].sparsity.n_cut;
        }
    }
    assert_true(n_cut > 0); /* rounds were cut at surprises */
    unlink(draft);
}

/* ---- Speculation ---- */

static void check_speculation(int reselect, bool gumbel, bool records) {
    static const int few[] = {3, VERIFY_DRAFT_AUTO};
    struct bed b;
    struct tiny_draft d;
    struct tiny_options t = *target();
    t.dtype = KERN_Q8_0;
    tiny_draft_default(&d, &t);
    watch_reset(records);
    bed_tiny(&b, &t, &d);
    b.o.kv_memory_bytes *= 2;
    b.o.select_layer = SELECT_LAYER;
    bed_sparse(&b);
    b.o.sparse.reselect = reselect;
    b.o.sparse.surprise = 0.02;
    b.gumbel = gumbel;
    b.n_requests = TINY_SLOW ? 6 : 14;
    b.n_out = 96;
    bed_check(&b, few, 2, true);
    if (watch.problem[0]) fail_msg("%s", watch.problem);
    assert_true(!records || watch.n_replays > 100);
    bed_close_tiny(&b);
}

static void test_epochs_speculation(void) {
    check_speculation(TARGET_RESELECT_SURPRISE, false, false);
}
static void test_epochs_speculation_gumbel(void) {
    check_speculation(TARGET_RESELECT_SURPRISE, true, false);
}
static void test_epochs_speculation_number(void) {
    check_speculation(10, false, false);
}
static void test_epochs_speculation_device(void) {
    check_speculation(TARGET_RESELECT_SURPRISE, true, true);
}

/* ---- Dense, to the bit ---- */

/* Where all blocks are kept, by a share or by way of lists, and where a prompt is short. */
static void test_epochs_dense(void) {
    static struct record want, got;
    struct engine_options o;
    struct engine_submit_options s;
    struct target_settings of[6], off = settings(TARGET_OFF, TARGET_UNSET, 0);
    epoch_options(&o);
    o.draft_tokens = 3;
    struct engine *g = open_engine(&o, &want);
    make_request(0, 900, 100, &want, &s);
    s.sparse = &off;
    run(g, &s, &want);
    engine_close(g);
    assert_int_equal(want.n_lists, 0);
    for (int i = 0; i < 6; i++) of[i] = settings(TARGET_MEAN, TARGET_UNSET, 1);
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
        g = open_engine(&o, &got);
        make_request(0, 900, 100, &got, &s);
        s.sparse = &of[i];
        run(g, &s, &got);
        assert_true(i < 2 ? got.n_lists == 0 : i == 2 ? got.n_lists == 1 : got.n_lists > 1);
        if (i == 3) assert_int_equal(got.n_lists, n_points(100, 1));
        assert_int_equal(got.sparsity.kv_shallow_bytes + got.sparsity.kv_deep_bytes,
                         got.sparsity.kv_dense_bytes);
        got.n_lists = 0;
        assert_same(&got, &want, "all blocks");
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
    /* Lists that are made anew and stay equal change nothing either. */
    static struct record once;
    struct target_settings recent = settings(TARGET_RECENT, 3, 0);
    recent.reserve = 0;
    g = open_engine(&o, &once);
    make_request(0, 900, 100, &once, &s);
    s.sparse = &recent;
    run(g, &s, &once);
    engine_close(g);
    recent.reselect = 4;
    g = open_engine(&o, &got);
    make_request(0, 900, 100, &got, &s);
    s.sparse = &recent;
    run(g, &s, &got);
    engine_close(g);
    assert_int_equal(got.n_lists, n_points(100, 4));
    got.n_lists = 1;
    assert_same(&got, &once, "equal lists");
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
    static struct record r;
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_stats st;
    epoch_options(&o);
    struct engine *g = open_engine(&o, &r);
    const struct kvpool_page_shape *shape = engine_get_plan(g)->pool.shape;
    assert_int_equal(shape[KVPOOL_SHALLOW].state_bytes, 4 * 64 * 4);
    assert_int_equal(shape[KVPOOL_DEEP].state_bytes, 0);
    assert_int_equal(kvpool_page_bytes(&shape[KVPOOL_SHALLOW]), PAGE_BYTES + 1024);
    assert_int_equal(kvpool_state_offset(&shape[KVPOOL_SHALLOW]), PAGE_BYTES);
    /* A pass's states and rings, notes and scratch on top. */
    assert_true(plan_bytes(g, "states") >= (192 + 8 * 32) * 64 * 4);
    make_request(0, 700, 41, &r, &s);
    struct target_settings of = settings(TARGET_OBSERVED, 4, 10);
    s.sparse = &of;
    run(g, &s, &r);
    tiny_assert_pool_whole(g);
    engine_get_stats(g, &st);
    assert_int_equal(st.n_selections, 4);
    assert_int_equal(st.n_reselections, 3);
    assert_int_equal(st.n_sparse_requests, 1);
    assert_int_equal(st.n_blocks_selected, 4 * 11);
    assert_true(st.select_seconds > 0 && r.sparsity.select_ns > 0);
    engine_close(g);
    target_settings_unset(&o.sparse);
    g = open_engine(&o, &r);
    assert_int_equal(engine_get_plan(g)->pool.shape[KVPOOL_SHALLOW].state_bytes, 0);
    assert_int_equal(plan_bytes(g, "states") + plan_bytes(g, "scorer"), 0);
    engine_close(g);
}

static void refused_open(const struct engine_options *o, int code, const char *says) {
    struct engine_options options = *o;
    struct engine *g;
    struct err e = {0};
    char path[256];
    snprintf(path, sizeof path, "%s", tiny_model_file(target()));
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
    static struct record r;
    epoch_options(&o);
    target_settings_unset(&o.sparse);
    struct engine *g = open_engine(&o, &r);
    make_request(0, 700, 4, &r, &s);
    s.sparse = &of;
    of = settings(TARGET_MEAN, 4, 0);
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "--sparse mean"));
    of = settings(TARGET_OBSERVED, 4, 8);
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    of.reselector = TARGET_SCORER;
    assert_int_equal(engine_submit(g, &s, &request, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "no scorer was loaded"));
    of.reselector = TARGET_RANDOM; /* needs no states */
    run(g, &s, &r);
    assert_int_equal(r.n_lists, 1);
    engine_close(g);
    o.sparse.selector = TARGET_SCORER;
    refused_open(&o, E_INVALID, "no scorer file was named");
    o.sparse.selector = TARGET_MEAN;
    o.select_layer = 0;
    refused_open(&o, E_INVALID, "select_layer is 0");
    struct target_scorer_file *f = make_scorer(false);
    target_settings_unset(&o.sparse);
    o.select_layer = 1;
    o.scorer_path = scorer_file(f);
    refused_open(&o, E_INVALID, "select_layer is 1, the scorer ");
    o.select_layer = -1;
    f->fingerprint ^= 1;
    o.scorer_path = scorer_file(f);
    refused_open(&o, E_INVALID, "fingerprint");
    f->fingerprint ^= 1;
    f->a[7] = NAN;
    o.scorer_path = scorer_file(f);
    refused_open(&o, E_NUMERIC, "a.weight holds nan at 7");
    unlink(o.scorer_path);
    refused_open(&o, E_NOT_FOUND, o.scorer_path);
    target_scorer_free(f);
}

const struct test tests[] = {
    {"epochs_naive", TEST_QUICK, 120000, test_epochs_naive},
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
