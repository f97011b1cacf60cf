#include "tests/sparse_bed.h"

#include <string.h>

#include <xxhash.h>

const struct tiny_options *sparse_target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = N_LAYERS;
    return &t;
}

void sparse_options(struct engine_options *o) {
    tiny_engine_options(o);
    o->select_layer = SELECT_LAYER;
    o->kv_memory_bytes = (size_t)300 * TINY_BLOCK_BYTES;
    o->max_rows = 192;
}

/* ---- What a request left ---- */

static struct sparse_record *record_of(void *arg, const struct engine_request *r) {
    struct engine_progress p;
    engine_poll(r, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + MOST_REQUESTS) return NULL; /* company */
    return (struct sparse_record *)arg + (p.seed - FIRST_SEED);
}

static void keep_row(void *arg, const struct engine_request *request, int position,
                     const float *logits, int n) {
    struct sparse_record *r = record_of(arg, request);
    if (!r || position < r->n_prompt - 1 || position >= r->n_prompt - 1 + MOST_OUT) return;
    r->row[position - r->n_prompt + 1] = XXH3_64bits(logits, (size_t)n * sizeof *logits);
}

static void keep_list(void *arg, const struct engine_request *request,
                      const struct engine_kv_view *v, const int32_t *kept, int n_kept,
                      int n_blocks) {
    struct sparse_record *r = record_of(arg, request);
    if (!r) return;
    assert_true(n_blocks <= MOST_BLOCKS && r->n_lists < MOST_LISTS);
    struct sparse_list *l = &r->list[r->n_lists++];
    l->n_kv = v->n_kv;
    l->n_blocks = n_blocks;
    l->n = n_kept;
    memcpy(l->kept, kept, (size_t)n_kept * sizeof *kept);
}

const struct sparse_list *sparse_newest(const struct sparse_record *r) {
    assert_true(r->n_lists > 0);
    return &r->list[r->n_lists - 1];
}

void sparse_trace_rows(struct engine *g, struct sparse_record *records) {
    engine_trace_logits(g, keep_row, records);
}

struct engine *sparse_open(const struct engine_options *o, struct sparse_record *records) {
    struct engine *g = tiny_engine_open(o, sparse_target());
    sparse_trace_rows(g, records);
    engine_trace_selection(g, keep_list, records);
    return g;
}

void sparse_request(int i, int n_prompt, int n_out, struct sparse_record *r,
                    struct engine_submit_options *s) {
    memset(r, 0, sizeof *r);
    r->n_prompt = n_prompt;
    tiny_prompt(60 + (uint64_t)i, r->prompt, n_prompt);
    tiny_submit_options(s, r->prompt, n_prompt);
    s->params.seed = FIRST_SEED + (uint64_t)i;
    s->params.max_tokens = n_out;
    s->params.ignore_eos = true;
}

void sparse_end(struct sparse_record *r, const struct engine_progress *p) {
    if (p->finish == ENGINE_FAILED) fail_msg("seed %d: %s", (int)p->seed, p->error);
    r->n_out = p->n_tokens;
    r->n_cached = p->n_cached_prompt;
    r->finish = p->finish;
    r->sparsity = p->sparsity;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
}

void sparse_run(struct engine *g, const struct engine_submit_options *s, struct sparse_record *r) {
    struct engine_request *request = tiny_submit(g, s);
    struct engine_progress p = tiny_wait(request);
    sparse_end(r, &p);
    engine_release(g, request);
}

void sparse_run_all(const struct engine_options *o,
                    void (*fill)(int i, struct sparse_record *r, struct engine_submit_options *s),
                    int n, bool together, bool again, struct sparse_record *r) {
    struct engine *g = sparse_open(o, r);
    struct engine_request *request[MOST_REQUESTS];
    struct engine_submit_options s;
    for (int pass = 0; pass <= again; pass++)
        for (int i = 0; i < n; i++) {
            fill(i, &r[i], &s);
            if (together) {
                request[i] = tiny_submit(g, &s);
                continue;
            }
            sparse_run(g, &s, &r[i]);
            if (pass) assert_true(r[i].n_cached >= r[i].n_prompt - 32 - 63);
        }
    for (int i = 0; i < n && together; i++) {
        struct engine_progress p = tiny_wait(request[i]);
        sparse_end(&r[i], &p);
        engine_release(g, request[i]);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

void sparse_assert_lists(const struct sparse_record *got, const struct sparse_record *want,
                         const char *what) {
    if (got->n_lists != want->n_lists)
        fail_msg("%s: %d lists, want %d", what, got->n_lists, want->n_lists);
    for (int i = 0; i < want->n_lists; i++)
        if (got->list[i].n != want->list[i].n ||
            memcmp(got->list[i].kept, want->list[i].kept,
                   (size_t)want->list[i].n * sizeof *want->list[i].kept) != 0)
            fail_msg("%s: list %d is another (%d and %d blocks of %d)", what, i, got->list[i].n,
                     want->list[i].n, want->list[i].n_blocks);
}

void sparse_assert_rows(const struct sparse_record *got, const struct sparse_record *want,
                        const char *what) {
    assert_int_equal(got->n_out, want->n_out);
    for (int i = 0; i < want->n_out; i++)
        if (got->out[i] != want->out[i] || got->row[i] != want->row[i])
            fail_msg("%s: token %d is %d, want %d%s", what, i, got->out[i], want->out[i],
                     got->out[i] == want->out[i] ? ", of other logits" : "");
}
