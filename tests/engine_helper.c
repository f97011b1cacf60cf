#include "tests/engine_helper.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "tests/one_row.h"

void tiny_engine_options(struct engine_options *o) {
    engine_options_default(o);
    o->n_threads = 1;
    o->max_seqs = 8;
    o->max_rows = 64;
    o->kv_memory_bytes = (size_t)64 * TINY_BLOCK_BYTES;
    o->draft_tokens = 0;
}

struct engine *tiny_engine_open(const struct engine_options *o, const struct tiny_options *t) {
    struct tiny_options defaults;
    struct engine_options options = *o;
    struct engine *g;
    struct err e = {0};
    tiny_model_default(&defaults);
    options.model_path = tiny_model_file(t ? t : &defaults);
    int rc = engine_open(&g, &options, NULL, NULL, &e);
    unlink(options.model_path);
    if (rc) fail_msg("engine_open: %s", e.message);
    return g;
}

void tiny_prompt(uint64_t seed, int32_t *ids, int n) {
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % TINY_IM_START);
}

void tiny_submit_options(struct engine_submit_options *s, const int32_t *prompt, int n_prompt) {
    memset(s, 0, sizeof *s);
    verify_params_default(&s->params);
    s->params.temperature = 0;
    s->params.max_tokens = 16;
    s->params.has_seed = true;
    s->params.seed = 1;
    s->prompt = prompt;
    s->n_prompt = n_prompt;
}

struct engine_request *tiny_submit(struct engine *g, const struct engine_submit_options *s) {
    struct engine_request *r = NULL;
    struct err e = {0};
    assert_ok(engine_submit(g, s, &r, &e), e);
    return r;
}

/* What hangs is what gets no token for so long, on a machine that does other things as well; how
 * long an answer may take in all is the test's own limit. */
struct engine_progress tiny_wait_tokens(const struct engine_request *r, int n) {
    int64_t start = clock_ns();
    struct engine_progress p;
    for (int before = 0;; usleep(100)) {
        engine_poll(r, &p);
        if (p.finish != ENGINE_RUNNING || p.n_tokens >= n) return p;
        if (p.n_tokens > before) start = clock_ns();
        before = p.n_tokens;
        if (clock_ms_since(start) > (TINY_SLOW ? 110000 : 60000))
            fail_msg("a request hangs at %d tokens", p.n_tokens);
    }
}

struct engine_progress tiny_wait(const struct engine_request *r) {
    return tiny_wait_tokens(r, INT32_MAX);
}

int tiny_run(struct engine *g, const struct engine_submit_options *s, int32_t *out,
             struct engine_progress *final) {
    struct engine_request *r = tiny_submit(g, s);
    struct engine_progress p = tiny_wait(r);
    if (out) memcpy(out, p.tokens, (size_t)p.n_tokens * sizeof *out);
    if (final) *final = p;
    engine_release(g, r);
    return p.n_tokens;
}

void tiny_assert_pool_whole(struct engine *g) {
    struct engine_stats s;
    int64_t start = clock_ns();
    while (!engine_idle(g)) {
        if (clock_ms_since(start) > (TINY_SLOW ? 110000 : 60000))
            fail_msg("the engine does not come to rest");
        usleep(200);
    }
    engine_get_stats(g, &s);
    assert_int_equal(s.n_running, 0);
    assert_int_equal(s.n_waiting, 0);
    assert_int_equal(s.pool.n_seqs, 0);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        assert_int_equal(s.pool.of[c].used, 0);
        assert_int_equal(s.pool.of[c].reserved, 0);
        assert_int_equal(s.pool.of[c].free + s.pool.of[c].cached, s.pool.of[c].total);
    }
}

/* ---- The naive loop ---- */

struct naive {
    struct kern *k;
    struct model *m;
    uint8_t *arena;
    int32_t pages[64], blocks[64], n_blocks;
    float logits[TINY_VOCAB];
    enum kern_dtype kv_dtype;
};

/* One row at `position`, whose K and V go to their page. */
static void naive_row(struct naive *v, int32_t token, int32_t position, bool generated) {
    struct err e = {0};
    int32_t slot = v->pages[position / 64];
    v->n_blocks = position / 64 + 1;
    struct model_pass pass = one_row_pass(&token, &position, generated, v->logits, 1);
    pass.group[0] = (struct model_group){
        .n_layers = model_get_config(v->m)->n_layers,
        .arena = v->arena,
        .kv_dtype = v->kv_dtype,
        .slot_page = &slot,
        .lists = {.page = v->pages,
                  .block = v->blocks,
                  .n_blocks = &v->n_blocks,
                  .capacity = 64,
                  .seq_stride = 1},
    };
    assert_ok(model_forward(v->m, &pass, &e), e);
}

static void naive_open(struct naive *v, const struct tiny_options *t,
                       const struct kern_options *ko) {
    struct err e = {0};
    struct model_caps caps = {.max_rows = 1, .max_seqs = 1, .max_blocks = 64, .max_logits = 1};
    const char *path = tiny_model_file(t);
    struct model_source *src;
    assert_ok(kern_cpu_open(&v->k, ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&v->m, src, NULL, v->k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
}

static void naive_close(struct naive *v, void *arena) {
    v->k->ops->unreserve(v->k, arena);
    model_close(v->m);
    v->k->ops->close(v->k);
}

void tiny_naive_greedy(const struct tiny_options *t, enum kern_precision precision,
                       const int32_t *prompt, int n_prompt, int32_t *out, int n_out) {
    struct err e = {0};
    static struct naive v;
    struct kern_options ko = {.n_threads = 1, .precision = precision};
    void *arena;
    naive_open(&v, t, &ko);
    v.kv_dtype = precision == KERN_REFERENCE ? KERN_F32 : KERN_F16;
    struct kvpool_page_shape shape = {.n_layers = t->n_layers,
                                      .n_kv_heads = t->n_kv_heads,
                                      .head_dim = t->head_dim,
                                      .elem_bytes = v.kv_dtype == KERN_F32 ? 4 : 2};
    size_t page = kvpool_page_bytes(&shape);
    assert_ok(v.k->ops->reserve(v.k, page * 64, &arena, &e), e);
    v.arena = arena;
    for (int i = 0; i < 64; i++) {
        v.blocks[i] = i;
        v.pages[i] = (int32_t)((size_t)(i * 37 % 64) * page / KVPOOL_ALIGN);
    }
    for (int n = 0; n < n_out; n++) {
        memset(v.arena, 0x7e, page * 64); /* what an earlier round left must not matter */
        for (int i = 0; i < n_prompt; i++) naive_row(&v, prompt[i], i, false);
        for (int i = 0; i < n; i++) naive_row(&v, out[i], n_prompt + i, true);
        int best = 0;
        for (int id = 1; id < TINY_VOCAB; id++)
            if (v.logits[id] > v.logits[best]) best = id;
        out[n] = best;
    }
    naive_close(&v, arena);
}

/* Position i of ids by a pass of one dense row, layers of two groups in pages of their own; what it
 * pays to each block in the deep ones goes to mass[n_blocks]. */
static void naive_mass_row(struct naive *v, const struct tiny_options *t, int select_layer,
                           const int32_t *ids, int n_prompt, int32_t i, float *mass) {
    struct err e = {0};
    int32_t zero = 0;
    int32_t *const pages[2] = {v->pages, v->pages + 32};
    v->n_blocks = i / 64 + 1;
    struct model_pass pass = one_row_pass(&ids[i], &i, i >= n_prompt, v->logits, 2);
    for (int g = 0; g < 2; g++)
        pass.group[g] = (struct model_group){
            .first_layer = g ? select_layer : 0,
            .n_layers = g ? t->n_layers - select_layer : select_layer,
            .arena = v->arena,
            .kv_dtype = KERN_F16,
            .slot_page = &pages[g][i / 64],
            .lists = {.page = pages[g],
                      .block = v->blocks,
                      .n_blocks = &v->n_blocks,
                      .capacity = 32,
                      .seq_stride = 1},
            .taps = {.mass = g ? mass : NULL, .mass_line = g ? &zero : NULL},
        };
    assert_ok(model_forward(v->m, &pass, &e), e);
}

void tiny_naive_masses(const struct tiny_options *t, int select_layer, const int32_t *ids,
                       int n_prompt, int n, int n_blocks, float *mass) {
    struct err e = {0};
    static struct naive v;
    struct kern_options ko = {.n_threads = 1};
    void *arena;
    assert_true(n_blocks <= 32 && n <= 64 * n_blocks && t->n_kv_heads == 2 && t->head_dim == 16);
    naive_open(&v, t, &ko);
    size_t page = (size_t)2 * (size_t)t->n_layers * 2 * 64 * 16 * 2;
    assert_ok(v.k->ops->reserve(v.k, page * 64, &arena, &e), e);
    v.arena = arena;
    for (int i = 0; i < 64; i++) {
        v.blocks[i] = i;
        v.pages[i] = (int32_t)((size_t)(i * 37 % 64) * page / KVPOOL_ALIGN);
    }
    float row[32];
    memset(mass, 0, (size_t)n * (size_t)n_blocks * sizeof *mass);
    for (int32_t i = 0; i < n; i++) {
        memset(row, 0, sizeof row);
        naive_mass_row(&v, t, select_layer, ids, n_prompt, i, row);
        memcpy(mass + (size_t)i * (size_t)n_blocks, row, (size_t)n_blocks * sizeof *mass);
    }
    naive_close(&v, arena);
}

/* Greedy; how many of these a file of the default target's size answers well depends on the last
 * bits of its arithmetic: on CPUs without AVX-512 the first one's answer begins in French. */
static bool answers(struct engine *g, const char *question, const char *want, struct strbuf *text) {
    struct engine_submit_options s;
    struct tokens prompt = {0};
    struct err e = {0};
    struct engine_progress p;
    int32_t out[24];
    const struct chat_message m = {"user", question, strlen(question)};
    assert_ok(chat_render(engine_chat(g), engine_tokenizer(g), &m, 1, true, &prompt, &e), e);
    tiny_submit_options(&s, prompt.ids, (int)prompt.n);
    s.params.max_tokens = 24;
    int n = tiny_run(g, &s, out, &p);
    text->n = 0;
    tokenizer_decode(engine_tokenizer(g), out, (size_t)n, false, text);
    strbuf_append_char(text, 0);
    tokens_deinit(&prompt);
    return strstr(text->data, want) && p.finish == ENGINE_STOP;
}

void engine_assert_answers(struct engine *g) {
    static const char *const asked[][2] = {{"What is the capital of France?", "Paris"},
                                           {"Name the capital city of France.", "Paris"},
                                           {"What is the capital of Germany?", "Berlin"}};
    enum { N = sizeof asked / sizeof *asked };
    struct strbuf text = {0};
    int right = 0;
    assert_non_null(engine_chat(g));
    for (int i = 0; i < N; i++) right += answers(g, asked[i][0], asked[i][1], &text);
    if (right < N - 1)
        fail_msg("%d of %d answers are right, the last is '%s'", right, N, text.data);
    strbuf_deinit(&text);
}
