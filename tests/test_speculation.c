/* Speculation changes nothing but time. Requests of many kinds run once without speculation, alone;
 * then again with every draft length, auto, lookup alone, a windowed draft, in batches with
 * cancelled neighbours: tokens, log-probabilities, the hash of every committed logits row, of all
 * committed K and V, and how the answer ended must be the same to the bit, greedy or by Gumbel
 * coupling. Counters prove that acceptances, rejections and rollbacks across page borders happened.
 * Once over a tiny random pair, where everything is fast and the draft is wrong often; once over
 * the default pair. Then what goes wrong: a draft of another vocabulary, NaN in a draft, no memory
 * for drafts, a draft of a shorter context. */
#include "tests/engine_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/tokenizer.h"

enum {
    MAX_REQUESTS = 200,
    MAX_PROMPT = 400,
    MAX_OUT = 128,
    N_ROWS = MAX_PROMPT + MAX_OUT,
    FIRST_SEED = 1000,
    MAX_HEADS = 16,
};

struct record {
    int n_prompt, n_out;
    int32_t prompt[MAX_PROMPT], out[MAX_OUT];
    float logprob[MAX_OUT];
    uint64_t row[N_ROWS]; /* hash of the newest logits row computed at a position */
    uint64_t kv;          /* hash of all committed K and V */
    int n_kv;
    enum engine_finish finish;
    struct engine_speculation speculation;
};

/* What is tested: a pair, its requests, and the options that all runs share. */
struct bed {
    const char *target, *draft;
    struct engine_options o;
    int n_requests, n_out;
    bool gumbel;
    void (*make)(const struct bed *b, int i, struct record *r, struct engine_submit_options *s);
    int n_layers, n_kv_heads, head_dim;
    struct record *want, *got; /* [n_requests] */
};

/* ---- Requests ---- */

/* Settings that touch every branch: penalties, stops, log-probabilities, min_tokens, ends at the
 * context's end. */
static void vary(const struct bed *b, int i, struct record *r, struct engine_submit_options *s) {
    tiny_submit_options(s, r->prompt, r->n_prompt);
    s->params.seed = FIRST_SEED + (uint64_t)i;
    s->params.max_tokens = i % 5 == 4 ? b->n_out / 3 + i % 11 : b->n_out;
    s->params.ignore_eos = i % 6 == 3;
    if (i % 4 == 1) s->params.repetition_penalty = 1.2;
    if (i % 4 == 2) s->params.frequency_penalty = 0.3, s->params.presence_penalty = 0.2;
    if (i % 3 == 1) s->params.logprobs = 3;
    if (i % 7 == 5) s->params.min_tokens = 8;
    if (i % 8 == 6) {
        s->params.n_stops = 2;
        s->params.stops[0] = (struct verify_stop){.n = 2, .text = "\n\n"};
        s->params.stops[1] = (struct verify_stop){.n = 3, .text = "the"};
    }
    if (!b->gumbel) return;
    s->params.coupling = VERIFY_GUMBEL;
    s->params.temperature = i % 2 ? 1 : 0.7;
    if (i % 3 == 0) s->params.top_k = 30;
    if (i % 5 == 1) s->params.top_p = 0.9;
    if (i % 5 == 2) s->params.min_p = 0.05;
}

static void make_tiny(const struct bed *b, int i, struct record *r,
                      struct engine_submit_options *s) {
    static const int lengths[] = {1, 20, 60, 63, 64, 65, 120, 127, 128, 190, 250};
    r->n_prompt = lengths[i % 11];
    tiny_prompt(77 + (uint64_t)i, r->prompt, r->n_prompt);
    /* A third repeats itself, so that lookup has something to find. */
    for (int k = 12; i % 3 == 0 && k < r->n_prompt; k++) r->prompt[k] = r->prompt[k % 12];
    vary(b, i, r, s);
}

/* ---- Recording ---- */

static struct record *of_request(struct bed *b, const struct engine_request *request) {
    struct engine_progress p;
    engine_poll(request, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + (uint64_t)b->n_requests) return NULL;
    return &b->got[p.seed - FIRST_SEED];
}

static void keep_row(void *arg, const struct engine_request *request, int position,
                     const float *logits, int n) {
    struct record *r = of_request(arg, request);
    if (!r) return; /* company */
    assert_in_range(position, r->n_prompt - 1, N_ROWS - 1);
    r->row[position] = XXH3_64bits(logits, (size_t)n * sizeof *logits);
}

static void keep_kv(void *arg, const struct engine_request *request,
                    const struct engine_kv_view *v) {
    static float values[KERN_BLOCK * KERN_MAX_HEAD_DIM];
    struct bed *b = arg;
    struct record *r = of_request(b, request);
    if (!r) return;
    XXH3_state_t *state = XXH3_createState();
    XXH3_64bits_reset(state);
    size_t elem = kern_dtype_block_bytes(v->dtype);
    size_t head = (size_t)KERN_BLOCK * (size_t)b->head_dim * elem;
    for (int g = 0; g < v->n_groups; g++)
        for (int layer = 0; layer < v->group[g].n_layers; layer++) {
            size_t plane = head * (size_t)b->n_kv_heads;
            struct kern_kv kv = {.base = v->arena,
                                 .page_stride = KVPOOL_ALIGN,
                                 .k_offset = 2 * (size_t)layer * plane,
                                 .v_offset = (2 * (size_t)layer + 1) * plane,
                                 .head_stride = head,
                                 .dtype = v->dtype,
                                 .n_kv_heads = b->n_kv_heads,
                                 .head_dim = b->head_dim};
            for (int at = 0; at < v->n_kv; at += KERN_BLOCK)
                for (int which = 0; which < 2 * b->n_kv_heads; which++) {
                    int n = v->n_kv - at < KERN_BLOCK ? v->n_kv - at : KERN_BLOCK;
                    kern_cpu_read_kv(&kv, v->group[g].pages[at / KERN_BLOCK], which / 2, which % 2,
                                     values);
                    XXH3_64bits_update(state, values,
                                       (size_t)n * (size_t)b->head_dim * sizeof *values);
                }
        }
    r->kv = XXH3_64bits_digest(state);
    r->n_kv = v->n_kv;
    XXH3_freeState(state);
}

static void keep_result(struct record *r, const struct engine_progress *p) {
    if (p->finish == ENGINE_FAILED) fail_msg("seed %d: %s", (int)p->seed, p->error);
    r->n_out = p->n_tokens;
    r->finish = p->finish;
    r->speculation = p->speculation;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
    for (int i = 0; i < p->n_tokens && p->logprobs; i++) r->logprob[i] = p->logprobs[i].logprob;
    uint64_t n = 0;
    for (int i = 0; i < p->n_tokens; i++) n += p->drafted[i];
    assert_int_equal(n, p->speculation.n_accepted);
}

static struct engine *open_bed(struct bed *b, const struct engine_options *o) {
    struct engine *g;
    struct err e = {0};
    struct engine_options options = *o;
    options.model_path = b->target;
    assert_ok(engine_open(&g, &options, NULL, NULL, &e), e);
    const struct model_config *c = engine_model_config(g);
    b->n_layers = c->n_layers;
    b->n_kv_heads = c->n_kv_heads;
    b->head_dim = c->head_dim;
    engine_trace_logits(g, keep_row, b);
    engine_trace_kv(g, keep_kv, b);
    return g;
}

/* ---- Runs ---- */

static void run_alone(struct bed *b, const struct engine_options *o, struct engine_stats *stats) {
    struct engine *g = open_bed(b, o);
    for (int i = 0; i < b->n_requests; i++) {
        struct engine_submit_options s;
        b->make(b, i, &b->got[i], &s);
        struct engine_request *r = tiny_submit(g, &s);
        struct engine_progress p = tiny_wait(r);
        keep_result(&b->got[i], &p);
        engine_release(g, r);
    }
    tiny_assert_pool_whole(g);
    engine_get_stats(g, stats);
    engine_close(g);
}

/* Batches of up to 16 in random order, every third with a neighbour that is cancelled. */
static void run_together(struct bed *b, const struct engine_options *o, uint64_t seed,
                         struct engine_stats *stats) {
    struct engine *g = open_bed(b, o);
    struct engine_request *r[MAX_REQUESTS], *other[MAX_REQUESTS] = {0};
    int order[MAX_REQUESTS];
    for (int i = 0; i < b->n_requests; i++) {
        int at = (int)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % (uint32_t)(i + 1));
        order[i] = order[at];
        order[at] = i;
    }
    for (int k = 0; k < b->n_requests; k++) {
        int i = order[k];
        struct engine_submit_options s;
        static struct record neighbour;
        b->make(b, i, &b->got[i], &s);
        /* Drafts of different lengths in one pass. */
        if (o->draft_tokens > 1) s.params.draft_tokens = 1 + i % o->draft_tokens;
        r[i] = tiny_submit(g, &s);
        if (k % 3 != 0) continue;
        b->make(b, (i + 5) % b->n_requests, &neighbour, &s);
        s.params.seed = 5;
        other[i] = tiny_submit(g, &s);
        if (k % 6 == 0) engine_cancel(g, other[i]);
    }
    for (int i = 0; i < b->n_requests; i++) {
        if (!other[i]) continue;
        if (i % 2) tiny_wait_tokens(other[i], 3);
        engine_cancel(g, other[i]);
    }
    for (int i = 0; i < b->n_requests; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        keep_result(&b->got[i], &p);
        engine_release(g, r[i]);
        if (other[i]) engine_release(g, other[i]);
    }
    tiny_assert_pool_whole(g);
    engine_get_stats(g, stats);
    engine_close(g);
}

static void compare(const struct bed *b, const char *what) {
    for (int i = 0; i < b->n_requests; i++) {
        const struct record *w = &b->want[i], *r = &b->got[i];
        int same = 0;
        while (same < w->n_out && same < r->n_out && w->out[same] == r->out[same]) same++;
        if (same < w->n_out || r->n_out != w->n_out)
            fail_msg("%s, request %d: token %d is %d, without speculation %d (%d and %d tokens)",
                     what, i, same, same < r->n_out ? r->out[same] : -1,
                     same < w->n_out ? w->out[same] : -1, r->n_out, w->n_out);
        if (r->finish != w->finish)
            fail_msg("%s, request %d: ends with %s, without with %s", what, i,
                     engine_finish_name(r->finish), engine_finish_name(w->finish));
        if (memcmp(r->logprob, w->logprob, (size_t)w->n_out * sizeof *w->logprob) != 0)
            fail_msg("%s, request %d: log-probabilities differ", what, i);
        for (int k = w->n_prompt - 1; k < w->n_prompt + w->n_out - 1; k++)
            if (r->row[k] != w->row[k] || !r->row[k])
                fail_msg("%s, request %d: logits behind position %d differ (prompt %d)", what, i, k,
                         w->n_prompt);
        if (r->n_kv != w->n_kv || r->kv != w->kv)
            fail_msg("%s, request %d: K and V differ (%d and %d positions)", what, i, r->n_kv,
                     w->n_kv);
    }
}

static void clear(struct bed *b) {
    memset(b->got, 0, (size_t)b->n_requests * sizeof *b->got);
}

static void add(struct engine_speculation *sum, const struct engine_speculation *s) {
    sum->n_rounds += s->n_rounds;
    sum->n_drafted += s->n_drafted;
    sum->n_accepted += s->n_accepted;
    sum->n_lookup_accepted += s->n_lookup_accepted;
    sum->n_page_rollbacks += s->n_page_rollbacks;
}

static void check_bed(struct bed *b, const int *lengths, int n_lengths, bool batches) {
    struct engine_stats stats;
    struct engine_speculation sum = {0}, looked = {0};
    struct engine_options plain = b->o;
    char what[64];
    b->want = calloc((size_t)b->n_requests, sizeof *b->want);
    b->got = calloc((size_t)b->n_requests, sizeof *b->got);
    assert_non_null(b->want);
    assert_non_null(b->got);
    plain.draft_tokens = 0;
    plain.draft_path = NULL;
    run_alone(b, &plain, &stats);
    assert_int_equal(stats.speculation.n_rounds, 0);
    memcpy(b->want, b->got, (size_t)b->n_requests * sizeof *b->want);
    for (int k = 0; k < n_lengths; k++) {
        struct engine_options o = b->o;
        o.draft_path = b->draft;
        o.draft_tokens = lengths[k];
        o.lookup = k % 2;
        for (int together = 0; together <= batches; together++) {
            snprintf(what, sizeof what, "draft %d%s", lengths[k], together ? ", in batches" : "");
            clear(b);
            if (together) run_together(b, &o, (uint64_t)k, &stats);
            else run_alone(b, &o, &stats);
            compare(b, what);
            add(&sum, &stats.speculation);
        }
    }
    struct engine_options lookup = b->o;
    lookup.draft_tokens = 4;
    clear(b);
    run_alone(b, &lookup, &stats);
    compare(b, "lookup alone");
    add(&looked, &stats.speculation);
    struct engine_options window = b->o;
    window.draft_path = b->draft;
    window.draft_tokens = 4;
    window.draft_window = 128;
    clear(b);
    run_alone(b, &window, &stats);
    compare(b, "windowed draft");
    add(&sum, &stats.speculation);
    assert_true(sum.n_rounds > 100);
    assert_true(sum.n_accepted > sum.n_drafted / 20);
    assert_true(sum.n_accepted < sum.n_drafted);
    assert_true(sum.n_page_rollbacks > 0);
    assert_true(looked.n_lookup_accepted > 0);
    free(b->want);
    free(b->got);
}

/* ---- The tiny pair ---- */

static const struct tiny_options *tiny_target(void) {
    static struct tiny_options t;
    tiny_model_default(&t);
    t.dtype = KERN_Q8_0;
    return &t;
}

static void tiny_bed(struct bed *b, const struct tiny_draft *d) {
    static char target[256], draft[256];
    memset(b, 0, sizeof *b);
    snprintf(target, sizeof target, "%s", tiny_model_file(tiny_target()));
    snprintf(draft, sizeof draft, "%s", tiny_draft_file(tiny_target(), d));
    tiny_engine_options(&b->o);
    b->target = target;
    b->draft = draft;
    b->o.max_seqs = 16;
    b->o.max_rows = 192;
    b->o.kv_memory_bytes = (size_t)400 * TINY_BLOCK_BYTES;
    b->n_requests = TINY_SLOW ? 12 : 48;
    b->n_out = TINY_SLOW ? 48 : 96;
    b->make = make_tiny;
}

static void close_bed(struct bed *b) {
    unlink(b->target);
    unlink(b->draft);
}

static const int all_lengths[] = {1, 2, 3, 4, 5, 6, 7, 8, VERIFY_DRAFT_AUTO};
enum { N_LENGTHS = sizeof all_lengths / sizeof *all_lengths };

static void check_tiny(bool gumbel, bool borrow) {
    struct bed b;
    struct tiny_draft d;
    int32_t ids[TINY_VOCAB];
    int n = 0;
    tiny_draft_default(&d, tiny_target());
    if (borrow) { /* every other id, and the end of turn */
        for (int i = 0; i < TINY_VOCAB; i++)
            if (i % 2 == 0 || i == TINY_IM_END) ids[n++] = i;
        d.borrow_embedding = true;
        d.head_ids = ids;
        d.n_head_ids = n;
    }
    tiny_bed(&b, &d);
    b.gumbel = gumbel;
    check_bed(&b, all_lengths, N_LENGTHS, true);
    close_bed(&b);
}

static void test_speculation_greedy(void) {
    check_tiny(false, false);
}
static void test_speculation_gumbel(void) {
    check_tiny(true, false);
}
static void test_speculation_reduced_head(void) {
    check_tiny(false, true);
}
static void test_speculation_reduced_head_gumbel(void) {
    check_tiny(true, true);
}

/* ---- Edges ---- */

/* The pair with a fixed draft length; 0: the target alone. */
static struct engine *open_pair(struct bed *b, int draft_tokens) {
    struct err e = {0};
    struct engine *g;
    b->o.model_path = b->target;
    b->o.draft_path = draft_tokens ? b->draft : NULL;
    b->o.draft_tokens = draft_tokens;
    assert_ok(engine_open(&g, &b->o, NULL, NULL, &e), e);
    return g;
}

/* An answer that runs into the context's end, whatever is drafted. */
static void test_speculation_context_end(void) {
    struct bed b;
    struct tiny_draft d;
    tiny_draft_default(&d, tiny_target());
    tiny_bed(&b, &d);
    b.o.context = 200;
    struct engine_submit_options s;
    int32_t prompt[150], want[50], got[50];
    tiny_prompt(9, prompt, 150);
    tiny_submit_options(&s, prompt, 150);
    s.params.max_tokens = 100;
    s.params.ignore_eos = true;
    for (int g = 0; g <= 8; g++) {
        struct engine_progress p;
        struct engine *engine = open_pair(&b, g);
        int n = tiny_run(engine, &s, g ? got : want, &p);
        assert_int_equal(n, 50);
        assert_int_equal(p.finish, ENGINE_LENGTH);
        if (g) assert_memory_equal(got, want, sizeof want);
        tiny_assert_pool_whole(engine);
        engine_close(engine);
    }
    close_bed(&b);
}

/* A draft of a shorter context stops proposing there and says so; the answer is the same. */
static void test_speculation_short_draft(void) {
    struct bed b;
    struct tiny_draft d;
    tiny_draft_default(&d, tiny_target());
    d.context = 128;
    tiny_bed(&b, &d);
    struct engine_submit_options s;
    int32_t prompt[100], want[90], got[90];
    tiny_prompt(10, prompt, 100);
    tiny_submit_options(&s, prompt, 100);
    s.params.max_tokens = 90;
    s.params.ignore_eos = true;
    s.params.lookup = false;
    for (int g = 0; g <= 4; g += 4) {
        struct engine_progress p;
        struct engine *engine = open_pair(&b, g);
        assert_int_equal(tiny_run(engine, &s, g ? got : want, &p), 90);
        if (g) {
            assert_memory_equal(got, want, sizeof want);
            assert_int_equal(p.no_draft, ENGINE_DRAFT_CONTEXT);
            assert_true(p.speculation.n_rounds > 2);
            assert_true(p.speculation.n_plain_rounds > 40);
        }
        engine_close(engine);
    }
    close_bed(&b);
}

/* Requests that ask for drafts where the engine has none by itself: whoever's prompt ends in the
 * same step still finds a row of logits. */
static void test_speculation_asked_for(void) {
    enum { N = 24, N_OUT = 12 };
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    struct engine_request *r[N];
    uint64_t n_rounds = 0;
    tiny_draft_default(&d, tiny_target());
    tiny_bed(&b, &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 0;
    for (b.o.max_seqs = 1; b.o.max_seqs <= 3; b.o.max_seqs++) {
        assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
        for (int i = 0; i < N; i++) {
            struct engine_submit_options s;
            int32_t prompt[40];
            tiny_prompt(500 + (uint64_t)i, prompt, 40);
            tiny_submit_options(&s, prompt, 1 + i % 40);
            s.params.max_tokens = N_OUT + i % 5;
            s.params.ignore_eos = true;
            s.params.draft_tokens = 8;
            r[i] = tiny_submit(g, &s);
        }
        for (int i = 0; i < N; i++) {
            struct engine_progress p = tiny_wait(r[i]);
            assert_int_equal(p.n_tokens, N_OUT + i % 5);
            n_rounds += p.speculation.n_rounds;
            engine_release(g, r[i]);
        }
        assert_true(n_rounds > 0);
        tiny_assert_pool_whole(g);
        engine_close(g);
    }
    close_bed(&b);
}

/* Long rounds of many sequences leave a small step's rows to a prompt, too: it is answered while
 * they go on. */
static void test_speculation_prompts_go_on(void) {
    enum { N = 8 };
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    struct engine_submit_options s;
    struct engine_request *r[N];
    int32_t prompt[100];
    tiny_draft_default(&d, tiny_target());
    tiny_bed(&b, &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 8;
    b.o.max_seqs = N + 1;
    b.o.max_rows = 9 * N;
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    for (int i = 0; i < N; i++) {
        tiny_prompt(600 + (uint64_t)i, prompt, 10);
        tiny_submit_options(&s, prompt, 10);
        s.params.max_tokens = 240;
        s.params.ignore_eos = true;
        r[i] = tiny_submit(g, &s);
    }
    for (int i = 0; i < N; i++) tiny_wait_tokens(r[i], 2);
    tiny_prompt(700, prompt, 100);
    tiny_submit_options(&s, prompt, 100);
    s.params.max_tokens = 1;
    struct engine_request *late = tiny_submit(g, &s);
    struct engine_progress p = tiny_wait(late);
    assert_int_equal(p.n_tokens, 1);
    for (int i = 0; i < N; i++) {
        struct engine_progress q = tiny_wait(r[i]);
        assert_int_equal(q.n_tokens, 240);
        assert_true(q.finished_ns > p.finished_ns);
        engine_release(g, r[i]);
    }
    engine_release(g, late);
    tiny_assert_pool_whole(g);
    engine_close(g);
    close_bed(&b);
}

/* Where pages run short, drafts are given up before anybody waits or fails. */
static void test_speculation_starved(void) {
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    tiny_draft_default(&d, tiny_target());
    tiny_bed(&b, &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 4;
    b.o.kv_memory_bytes = (size_t)30 * TINY_BLOCK_BYTES;
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    enum { N = 12 };
    struct engine_request *r[N];
    int n_without = 0;
    for (int i = 0; i < N; i++) {
        struct engine_submit_options s;
        int32_t prompt[200];
        tiny_prompt(300 + (uint64_t)i, prompt, 200);
        tiny_submit_options(&s, prompt, 200);
        s.params.max_tokens = 120;
        s.params.ignore_eos = true;
        r[i] = tiny_submit(g, &s);
    }
    for (int i = 0; i < N; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        assert_int_equal(p.finish, ENGINE_LENGTH);
        assert_int_equal(p.n_tokens, 120);
        n_without += p.no_draft == ENGINE_DRAFT_MEMORY;
        engine_release(g, r[i]);
    }
    tiny_assert_pool_whole(g);
    struct engine_stats s;
    engine_get_stats(g, &s);
    assert_true(n_without > 0);
    assert_int_equal(s.n_draft_starved, n_without);
    engine_close(g);
    close_bed(&b);
}

/* NaN in the draft's weights: that request fails with a clear error, one without a draft goes on.
 */
static void test_speculation_nan_draft(void) {
    struct bed b;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g;
    tiny_draft_default(&d, tiny_target());
    d.noise = INFINITY;
    tiny_bed(&b, &d);
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 3;
    b.o.lookup = false;
    assert_ok(engine_open(&g, &b.o, NULL, NULL, &e), e);
    struct engine_submit_options s;
    struct engine_progress p;
    int32_t prompt[20];
    tiny_prompt(4, prompt, 20);
    tiny_submit_options(&s, prompt, 20);
    struct engine_request *r = tiny_submit(g, &s);
    p = tiny_wait(r);
    assert_int_equal(p.finish, ENGINE_FAILED);
    assert_int_equal(p.error_code, E_NUMERIC);
    assert_non_null(strstr(p.error, "draft"));
    engine_release(g, r);
    s.params.draft_tokens = 0;
    assert_int_equal(tiny_run(g, &s, NULL, &p), 16);
    assert_int_equal(p.finish, ENGINE_LENGTH);
    tiny_assert_pool_whole(g);
    engine_close(g);
    close_bed(&b);
}

/* Refused at start, naming what is wrong; and ranges of the settings. */
static void test_speculation_refusals(void) {
    struct bed b;
    struct tiny_draft d;
    struct tiny_options other;
    struct err e = {0};
    struct engine *g = NULL;
    tiny_draft_default(&d, tiny_target());
    tiny_bed(&b, &d);
    tiny_model_default(&other);
    other.hidden = 128;
    other.seed = 99;
    b.o.model_path = b.target;
    b.o.draft_path = b.draft;
    b.o.draft_tokens = 17;
    assert_int_equal(engine_open(&g, &b.o, NULL, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "17"));
    b.o.draft_tokens = 3;
    b.o.draft_window = 100;
    assert_int_equal(engine_open(&g, &b.o, NULL, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "100"));
    b.o.draft_window = 0;
    b.o.draft_path = "/nonexistent/draft.gguf";
    assert_int_not_equal(engine_open(&g, &b.o, NULL, NULL, &e), 0);
    assert_non_null(strstr(e.message, "nonexistent"));
    /* A borrowing draft that was made for another target. */
    char *wrong = strdup(b.target);
    d.borrow_embedding = true;
    char *borrower = strdup(tiny_draft_file(&other, &d));
    b.o.draft_path = borrower;
    assert_int_not_equal(engine_open(&g, &b.o, NULL, NULL, &e), 0);
    assert_non_null(strstr(e.message, "embedding"));
    assert_null(g);
    unlink(borrower);
    free(borrower);
    free(wrong);
    close_bed(&b);
}

/* A head of padding alone has nothing that may be drawn; beside one token it is no harm. */
static void test_speculation_head_of_padding(void) {
    static const int32_t ids[] = {'a', TINY_VOCAB - 1};
    struct tiny_options t = *tiny_target();
    struct engine_options o;
    struct tiny_draft d;
    struct err e = {0};
    struct engine *g = NULL;
    t.padded = true;
    tiny_engine_options(&o);
    o.draft_tokens = 4;
    o.model_path = tiny_model_file(&t);
    tiny_draft_default(&d, &t);
    d.borrow_embedding = true;
    for (int n = 2; n > 0; n--) {
        d.head_ids = ids + 2 - n;
        d.n_head_ids = n;
        o.draft_path = tiny_draft_file(&t, &d);
        int rc = engine_open(&g, &o, NULL, NULL, &e);
        unlink(o.draft_path);
        if (n == 1) break;
        struct engine_submit_options s;
        struct engine_progress p;
        int32_t prompt[20];
        assert_ok(rc, e);
        tiny_prompt(4, prompt, 20);
        tiny_submit_options(&s, prompt, 20);
        s.params.lookup = false;
        s.params.ignore_eos = true;
        assert_int_equal(tiny_run(g, &s, NULL, &p), 16);
        assert_true(p.speculation.n_drafted > 0);
        engine_close(g);
        g = NULL;
    }
    unlink(o.model_path);
    assert_null(g);
    assert_non_null(strstr(e.message, "tandem.draft.head_ids"));
}

/* ---- The default pair ---- */

static const char *const questions[] = {
    "Write a short story about a lighthouse keeper who finds a map.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List ten things to pack for a week in the mountains.",
    "Explain why the sky is blue to a child of eight.",
    "Translate into French: The train leaves at nine and arrives before noon.",
    "A shop sells pens at 3 for 2 dollars. What do 18 pens cost? Show each step.",
    "Summarize: Bees live in colonies. Each colony has one queen, some hundred drones and many "
    "thousand workers. Workers gather nectar, feed the larvae and keep the hive warm in winter.",
    "Correct the spelling and repeat the text: Teh quick brwon fox jumps ovr the lazy dog. It was "
    "a "
    "sunny day and the fox was verry happy to be outsde in the feilds.",
    "What is the capital of Australia, and what is it known for?",
    "Give me a recipe for a lentil soup with carrots.",
};

static struct tokenizer *words; /* of the default target */

static void make_chat(const struct bed *b, int i, struct record *r,
                      struct engine_submit_options *s) {
    char text[1024];
    struct err e = {0};
    struct tokens ids = {0};
    int n = (int)(sizeof questions / sizeof *questions);
    static const char *const hints[] = {"", " Be brief.", " Give details.", " Use simple words.",
                                        " Answer in two parts."};
    snprintf(text, sizeof text, "<|im_start|>user\n%s%s%s<|im_end|>\n<|im_start|>assistant\n",
             questions[i % n], hints[i / n % 5], i / (5 * n) ? " Think first." : "");
    assert_ok(tokenizer_encode(words, text, strlen(text), TOKENIZER_PARSE_SPECIAL, &ids, &e), e);
    assert_true(ids.n < MAX_PROMPT);
    r->n_prompt = (int)ids.n;
    memcpy(r->prompt, ids.ids, ids.n * sizeof *r->prompt);
    tokens_deinit(&ids);
    vary(b, i, r, s);
}

static void check_default(int n_requests, int n_out, bool gumbel, const int *lengths,
                          int n_lengths) {
    struct bed b = {.n_requests = n_requests, .n_out = n_out, .gumbel = gumbel, .make = make_chat};
    struct err e = {0};
    struct gguf *file;
    engine_options_default(&b.o);
    b.target = test_default_target();
    b.draft = test_default_draft();
    b.o.max_seqs = 16;
    b.o.max_queue = 2 * MAX_REQUESTS;
    b.o.context = 1024;
    b.o.kv_memory_bytes = (size_t)600 << 20;
    assert_ok(gguf_open(&file, b.target, &e), e);
    assert_ok(tokenizer_open_gguf(&words, file, &e), e);
    check_bed(&b, lengths, n_lengths, true);
    tokenizer_close(words);
    gguf_close(file);
}

static void test_speculation_default_pair(void) {
    static const int lengths[] = {3, VERIFY_DRAFT_AUTO};
    if (TINY_SLOW) test_skip("the default pair takes minutes under a sanitizer");
    check_default(10, 48, false, lengths, 2);
}
static void test_speculation_default_pair_gumbel(void) {
    static const int lengths[] = {4};
    if (TINY_SLOW) test_skip("the default pair takes minutes under a sanitizer");
    check_default(10, 40, true, lengths, 1);
}
static void test_speculation_default_pair_all(void) {
    check_default(200, 128, false, all_lengths, N_LENGTHS);
}
static void test_speculation_default_pair_all_gumbel(void) {
    static const int lengths[] = {4, VERIFY_DRAFT_AUTO};
    check_default(200, 128, true, lengths, 2);
}

const struct test tests[] = {
    {"speculation_greedy", TEST_QUICK, 120000, test_speculation_greedy},
    {"speculation_gumbel", TEST_QUICK, 120000, test_speculation_gumbel},
    {"speculation_reduced_head", TEST_QUICK, 120000, test_speculation_reduced_head},
    {"speculation_reduced_head_gumbel", TEST_QUICK, 120000, test_speculation_reduced_head_gumbel},
    {"speculation_context_end", TEST_QUICK, 60000, test_speculation_context_end},
    {"speculation_short_draft", TEST_QUICK, 60000, test_speculation_short_draft},
    {"speculation_asked_for", TEST_QUICK, 60000, test_speculation_asked_for},
    {"speculation_prompts_go_on", TEST_QUICK, 60000, test_speculation_prompts_go_on},
    {"speculation_starved", TEST_QUICK, 60000, test_speculation_starved},
    {"speculation_nan_draft", TEST_QUICK, 60000, test_speculation_nan_draft},
    {"speculation_refusals", TEST_QUICK, 60000, test_speculation_refusals},
    {"speculation_head_of_padding", TEST_QUICK, 60000, test_speculation_head_of_padding},
    {"speculation_default_pair", TEST_FULL, 240000, test_speculation_default_pair},
    {"speculation_default_pair_gumbel", TEST_FULL, 240000, test_speculation_default_pair_gumbel},
    {"speculation_default_pair_all", TEST_LONG, 7200000, test_speculation_default_pair_all},
    {"speculation_default_pair_all_gumbel", TEST_LONG, 7200000,
     test_speculation_default_pair_all_gumbel},
    {0},
};
