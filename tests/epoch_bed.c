#include "tests/epoch_bed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "tests/one_row.h"

const struct tiny_options *epoch_target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = N_LAYERS;
    return &t;
}

void epoch_options(struct engine_options *o) {
    tiny_engine_options(o);
    o->select_layer = SELECT_LAYER;
    o->kv_memory_bytes = (size_t)400 * TINY_BLOCK_BYTES;
    o->max_rows = 192;
    o->sparse.selector = TARGET_MEAN; /* so that states are kept */
}

struct target_settings epoch_settings(int selector, int keep_blocks, int reselect) {
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

static struct epoch_record *record_of(void *arg, const struct engine_request *r) {
    struct engine_progress p;
    engine_poll(r, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + MOST_REQUESTS) return NULL; /* company */
    return (struct epoch_record *)arg + (p.seed - FIRST_SEED);
}

static void keep_row(void *arg, const struct engine_request *request, int position,
                     const float *logits, int n) {
    struct epoch_record *r = record_of(arg, request);
    if (!r || position < r->n_prompt - 1 || position >= r->n_prompt - 1 + MOST_OUT) return;
    r->row[position - r->n_prompt + 1] = XXH3_64bits(logits, (size_t)n * sizeof *logits);
}

static void keep_list(void *arg, const struct engine_request *request,
                      const struct engine_kv_view *v, const int32_t *kept, int n_kept,
                      int n_blocks) {
    struct epoch_record *r = record_of(arg, request);
    if (!r) return;
    bool chunk = n_blocks * 64 == v->n_kv && v->n_kv < r->n_prompt;
    assert_true(chunk || n_blocks == (r->n_prompt + 63) / 64);
    assert_true(r->n_lists < MOST_LISTS && r->n_chunks < MOST_BLOCKS);
    struct epoch_list *l = chunk ? &r->chunk[r->n_chunks++] : &r->list[r->n_lists++];
    l->n = n_kept;
    memcpy(l->kept, kept, (size_t)n_kept * sizeof *kept);
}

struct engine *epoch_open(const struct engine_options *o, struct epoch_record *records) {
    struct engine *g = tiny_engine_open(o, epoch_target());
    engine_trace_logits(g, keep_row, records);
    engine_trace_selection(g, keep_list, records);
    return g;
}

void epoch_request(int i, int n_prompt, int n_out, struct epoch_record *r,
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

void epoch_end(struct epoch_record *r, const struct engine_progress *p) {
    if (p->finish == ENGINE_FAILED) fail_msg("seed %d: %s", (int)p->seed, p->error);
    r->n_out = p->n_tokens;
    r->n_cached = p->n_cached_prompt;
    r->sparsity = p->sparsity;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
    for (int i = 0; i < p->n_tokens; i++) r->logprob[i] = p->logprobs[i].logprob;
    assert_int_equal(r->n_lists, p->sparsity.n_selections);
    assert_int_equal(r->n_chunks, p->sparsity.prefill.n_selections);
    if (r->n_lists == 0) return;
    assert_int_equal(r->list[0].n, p->sparsity.n_kept_first);
    assert_int_equal(r->list[r->n_lists - 1].n, p->sparsity.n_kept);
}

void epoch_run(struct engine *g, const struct engine_submit_options *s, struct epoch_record *r) {
    struct engine_request *request = tiny_submit(g, s);
    struct engine_progress p = tiny_wait(request);
    epoch_end(r, &p);
    engine_release(g, request);
}

static void assert_list(const struct epoch_list *got, const struct epoch_list *want, int i,
                        const char *kind, const char *what) {
    if (got->n != want->n ||
        memcmp(got->kept, want->kept, (size_t)want->n * sizeof want->kept[0]) != 0)
        fail_msg("%s: %s %d differs (%d and %d blocks)", what, kind, i, got->n, want->n);
}

static void assert_lists(const struct epoch_record *got, const struct epoch_record *want,
                         const char *what) {
    int n = got->n_lists < want->n_lists ? got->n_lists : want->n_lists;
    int n_cached = want->n_chunks - got->n_chunks;
    for (int i = 0; i < n; i++) assert_list(&got->list[i], &want->list[i], i, "list", what);
    assert_int_equal(got->n_lists, want->n_lists);
    assert_true(n_cached == 0 || (n_cached > 0 && got->n_cached > 0));
    for (int i = 0; i < got->n_chunks; i++)
        assert_list(&got->chunk[i], &want->chunk[n_cached + i], n_cached + i, "chunk's list", what);
}

void epoch_run_all(const struct engine_options *o, const struct epoch_crowd *c, int n,
                   bool together, bool again, struct epoch_record *r) {
    assert_true(n <= MOST_REQUESTS);
    struct engine *g = epoch_open(o, r);
    struct engine_request *request[MOST_REQUESTS], *company[MOST_REQUESTS];
    struct engine_submit_options s;
    static struct epoch_record other;
    for (int pass = 0; pass <= again; pass++)
        for (int i = 0; i < n; i++) {
            if (together) {
                c->company(i, n, &other, &s);
                s.params.seed = 5;
                company[i] = tiny_submit(g, &s);
                if (i % 2) engine_cancel(g, company[i]);
            }
            c->fill(i, &r[i], &s);
            if (together) {
                request[i] = tiny_submit(g, &s);
                continue;
            }
            epoch_run(g, &s, &r[i]);
            if (pass) assert_true(r[i].n_cached >= r[i].n_prompt - 32 - 63);
        }
    for (int i = 0; i < n && together; i += 2) {
        tiny_wait_tokens(company[i], c->company_tokens);
        engine_cancel(g, company[i]);
    }
    for (int i = 0; i < n && together; i++) {
        struct engine_progress p = tiny_wait(request[i]);
        epoch_end(&r[i], &p);
        engine_release(g, request[i]);
        engine_release(g, company[i]);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

void epoch_assert_same(const struct epoch_record *got, const struct epoch_record *want,
                       const char *what) {
    for (int i = 0; i < want->n_out; i++)
        if (got->out[i] != want->out[i] || got->row[i] != want->row[i])
            fail_msg("%s, prompt of %d: token %d is %d, want %d; logits %s", what, want->n_prompt,
                     i, got->out[i], want->out[i],
                     got->row[i] == want->row[i] ? "agree" : "differ");
    assert_int_equal(got->n_out, want->n_out);
    assert_lists(got, want, what);
}

/* ---- A scorer's file ---- */

static uint64_t target_fingerprint(void) {
    struct engine_options o;
    epoch_options(&o);
    struct engine *g = tiny_engine_open(&o, epoch_target());
    uint64_t f = engine_model_fingerprint(g);
    engine_close(g);
    return f;
}

struct target_scorer_file *epoch_scorer(bool mlp) {
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

const char *epoch_scorer_file(const struct target_scorer_file *f) {
    static char path[64];
    struct err e = {0};
    snprintf(path, sizeof path, "/tmp/tandem_scorer_%d.safetensors", (int)getpid());
    assert_ok(target_scorer_write(path, f, &e), e);
    return path;
}

/* ---- The naive loop ---- */

void epoch_loop_open(struct epoch_loop *l, struct target_scorer **loaded,
                     const struct target_scorer_file *file) {
    struct tiny_options t = *epoch_target();
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
    l->page_bytes = PAGE_BYTES + 3072;
    l->plane_at = PAGE_BYTES;
    assert_ok(l->k->ops->reserve(l->k, l->page_bytes * 2 * MOST_BLOCKS, &l->arena, &e), e);
    l->ring = calloc(32 * 64, sizeof *l->ring);
    const struct kern_scorer mean = target_scorer_plain(TARGET_MEAN, 64);
    size_t scratch = l->k->ops->score_scratch_bytes(l->k, &mean, MOST_BLOCKS);
    if (file) {
        assert_ok(target_scorer_load(loaded, file, l->k, &e), e);
        l->scorer = target_scorer_kern(*loaded);
        scratch += l->k->ops->score_scratch_bytes(l->k, l->scorer, MOST_BLOCKS);
    }
    assert_ok(l->k->ops->reserve(l->k, scratch, &l->scratch, &e), e);
    assert_non_null(l->ring);
}

static void loop_begin(struct epoch_loop *l) {
    memset(l->mass, 0, sizeof l->mass);
    l->n = 0;
    for (int i = 0; i < MOST_BLOCKS; i++) {
        l->all[i] = i;
        for (int g = 0; g < 2; g++)
            l->page[g][i] =
                (int32_t)((size_t)((i * 7 % MOST_BLOCKS) * 2 + g) * l->page_bytes / KVPOOL_ALIGN);
    }
}

void epoch_loop_close(struct epoch_loop *l) {
    free(l->ring);
    l->k->ops->unreserve(l->k, l->scratch);
    l->k->ops->unreserve(l->k, l->arena);
    model_close(l->m);
    l->k->ops->close(l->k);
}

static struct kern_plane plane_of(const struct epoch_loop *l) {
    return (struct kern_plane){.base = l->arena,
                               .page_stride = KVPOOL_ALIGN,
                               .plane_offset = l->plane_at,
                               .cols = 64,
                               .has_first = true,
                               .has_minmax = true,
                               .has_spread = true};
}

/* Append one token; its row of deep layers reads the list's of the blocks before `border` and all
 * behind; list NULL: all. */
static void loop_row(struct epoch_loop *l, int32_t token, int n_prompt, int border,
                     const struct epoch_list *list) {
    struct err e = {0};
    int32_t zero = 0, at = l->n, n_all = at / 64 + 1, n_deep = n_all;
    int32_t block[MOST_BLOCKS], page[MOST_BLOCKS];
    uint8_t quarters[MOST_BLOCKS];
    bool generated = l->n >= n_prompt;
    bool mark = at >= n_prompt - 32; /* a generated row: its own */
    memcpy(block, l->all, sizeof block);
    memset(quarters, 15, sizeof quarters);
    for (int i = 0; list && i < list->n; i++)
        if (list->quarters[i]) quarters[i] = list->quarters[i];
    if (list) {
        int first = (border + 63) / 64;
        n_deep = list->n;
        memcpy(block, list->kept, (size_t)list->n * sizeof *block);
        for (int i = first; i < n_all; i++) block[n_deep++] = i;
    }
    for (int i = 0; i < n_deep; i++) page[i] = l->page[1][block[i]];
    struct model_pass pass = one_row_pass(&token, &at, generated, l->logits, 2);
    pass.group[0] = one_row_group(0, SELECT_LAYER, l->arena, &l->page[0][at / 64], l->page[0],
                                  l->all, &n_all, MOST_BLOCKS);
    pass.group[1] = one_row_group(SELECT_LAYER, N_LAYERS - SELECT_LAYER, l->arena,
                                  &l->page[1][at / 64], page, block, &n_deep, MOST_BLOCKS);
    pass.group[1].lists.quarters = quarters;
    pass.group[1].taps.mass = generated ? l->row_mass : mark ? l->mass : NULL;
    pass.group[1].taps.mass_line = mark ? &zero : NULL;
    pass.n_taps = 1;
    pass.tap[0] = (struct model_tap){SELECT_LAYER, l->state};
    memset(l->row_mass, 0, sizeof l->row_mass);
    assert_ok(model_forward(l->m, &pass, &e), e);
    memcpy(l->states[at], l->state, sizeof l->state);
    struct kern_note note = {.n_rows = 1, .position = at};
    struct kern_plane plane = plane_of(l);
    assert_int_equal(
        l->k->ops->note_states(l->k, 1, &note, l->state, &plane, l->page[0], MOST_BLOCKS, l->ring),
        0);
    l->n++;
}

void epoch_loop_look(struct epoch_loop *l, int position, const int32_t *list, int n, float *mass) {
    struct err e = {0};
    int32_t zero = 0, one = 1, at = position, n_list = n, page[MOST_BLOCKS];
    float seen[MOST_BLOCKS] = {0};
    for (int i = 0; i < n; i++) page[i] = l->page[1][list[i]];
    struct model_pass pass = {.batch = {.rows = {.n_gen = 1},
                                        .token = &zero,
                                        .position = &at,
                                        .row_seq = &zero,
                                        .n_seqs = 1,
                                        .seq_row = &zero,
                                        .seq_n_rows = &one},
                              .n_groups = 2,
                              .group[1] = {.first_layer = SELECT_LAYER,
                                           .n_layers = N_LAYERS - SELECT_LAYER,
                                           .arena = l->arena,
                                           .kv_dtype = KERN_F16,
                                           .slot_page = &l->page[1][at / 64],
                                           .lists = {.page = page,
                                                     .block = list,
                                                     .n_blocks = &n_list,
                                                     .capacity = MOST_BLOCKS,
                                                     .seq_stride = 1},
                                           .taps = {.mass = seen, .mass_line = &zero}}};
    assert_ok(model_look(l->m, &pass, 1, l->states[at], 1, 0, &e), e);
    for (int i = 0; i < n; i++)
        if (seen[i] > mass[i]) mass[i] = seen[i];
}

/* By the newest 16 rows, one by one. */
static void loop_recheck(struct epoch_loop *l, const struct target_settings *s,
                         struct target_view *view, float *attention) {
    int32_t list[MOST_BLOCKS];
    float mass[MOST_BLOCKS] = {0};
    int n = target_recheck(s, view, l->work, list), n_list = n;
    if (n == 0 || l->n < l->n_prompt) return;
    for (int i = (view->n_tokens + 63) / 64; i < (l->n + 63) / 64; i++) list[n_list++] = i;
    for (int at = l->n - 16; at < l->n; at++) epoch_loop_look(l, at, list, n_list, mass);
    for (int i = 0; i < MOST_BLOCKS; i++) attention[i] = NAN;
    for (int i = 0; i < n; i++) attention[list[i]] = mass[i];
    view->attention = attention;
}

static void loop_use(struct epoch_loop *l, const struct epoch_list *list) {
    for (int i = 0; i < list->n; i++)
        if (l->row_mass[i] > l->used[list->kept[i]]) l->used[list->kept[i]] = l->row_mass[i];
}

static void loop_select(struct epoch_loop *l, const struct target_settings *s, int n_tokens,
                        uint64_t seed, int epoch, bool wide, struct epoch_list *out) {
    struct kern_score_view v = {plane_of(l), l->page[0], l->ring, l->n};
    int selector = epoch > 0 ? s->reselector : s->selector;
    const struct kern_scorer plain = target_scorer_plain(
        selector == TARGET_MINMAX || selector == TARGET_BOUND ? selector : TARGET_MEAN, 64);
    const struct kern_scorer *scorer = selector == TARGET_SCORER ? l->scorer : &plain;
    assert_int_equal(l->k->ops->score(l->k, scorer, &v, l->scratch, l->score), 0);
    struct target_view view = {.n_tokens = n_tokens,
                               .seed = seed,
                               .epoch = epoch,
                               .mass = l->mass,
                               .score = l->score,
                               .wide = wide};
    float attention[MOST_BLOCKS];
    if (epoch > 0 && l->n >= l->n_prompt && s->drop > 0) view.used = l->used;
    loop_recheck(l, s, &view, attention);
    out->n = target_select(s, &view, l->work, out->kept);
    memset(out->quarters, 0, sizeof out->quarters);
    if (target_has_quarters(s) && l->n >= l->n_prompt &&
        (selector == TARGET_MEAN || selector == TARGET_SCORER)) {
        float score[4 * MOST_BLOCKS];
        struct kern_scorer by = *scorer;
        by.by_quarter = true;
        assert_int_equal(l->k->ops->score(l->k, &by, &v, l->scratch, score), 0);
        target_select_quarters(s, n_tokens, score, out->kept, out->n, out->quarters);
    }
    for (int i = 0; i < MOST_BLOCKS; i++) l->used[i] = NAN;
    for (int i = 0; i < out->n; i++) l->used[out->kept[i]] = 0;
}

/* The prompt, chunk by chunk where it is computed sparsely: is a list made for the one that begins
 * with the next token? */
static bool wants_chunk(const struct target_settings *s, int at) {
    struct target_settings by = *s;
    int start = s->prefill_dense > 64 * s->min_blocks ? s->prefill_dense : 64 * s->min_blocks;
    if (s->prefill != TARGET_PREFILL_SPARSE || at < start || at % s->prefill_chunk != 0)
        return false;
    by.selector = s->reselector;
    return s->selector == TARGET_ALL || target_selects(&by, at);
}

static void loop_prompt(struct epoch_loop *l, struct target_settings *s,
                        const struct epoch_record *got, struct epoch_record *want) {
    const struct epoch_list *list = NULL;
    int border = 0;
    bool thin = false; /* the last rows read fewer */
    for (int i = 0; i < got->n_prompt; i++) {
        if (i > 0 && i % s->prefill_chunk == 0) list = NULL;
        if (wants_chunk(s, i)) {
            struct epoch_list *made = &want->chunk[want->n_chunks++];
            loop_select(l, s, i, 0, i, false, made);
            list = made;
            border = i;
        }
        thin |= i >= got->n_prompt - 32 && list;
        loop_row(l, got->prompt[i], got->n_prompt, border, list);
    }
    if (thin && s->selector == TARGET_OBSERVED) s->selector = s->reselector;
}

void epoch_naive(struct epoch_loop *l, const struct target_settings *asked,
                 const struct target_scorer_defaults *file, uint64_t seed,
                 const struct epoch_record *got, struct epoch_record *want) {
    struct target_settings none, s;
    struct target_epoch epoch = {0};
    bool wide = false;
    target_settings_unset(&none);
    s = target_settings_resolve(&none, asked, file);
    *want = *got;
    want->n_lists = want->n_chunks = 0;
    loop_begin(l);
    l->n_prompt = got->n_prompt;
    loop_prompt(l, &s, got, want);
    want->row[0] = XXH3_64bits(l->logits, sizeof l->logits);
    loop_select(l, &s, got->n_prompt, seed, want->n_lists++, wide, &want->list[0]);
    for (int i = 1; i < got->n_out; i++) {
        loop_row(l, got->out[i - 1], got->n_prompt, got->n_prompt, &want->list[want->n_lists - 1]);
        want->row[i] = XXH3_64bits(l->logits, sizeof l->logits);
        loop_use(l, &want->list[want->n_lists - 1]);
        if (i == got->n_out - 1 || !target_epoch_token(&epoch, &s, -got->logprob[i], &wide))
            continue;
        loop_select(l, &s, got->n_prompt, seed, want->n_lists, wide, &want->list[want->n_lists]);
        want->n_lists++;
        epoch = (struct target_epoch){.wide = wide};
    }
}
