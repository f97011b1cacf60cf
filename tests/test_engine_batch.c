/* engine/ over the tiny model: many requests at once. One row, one result: every token and the hash
 * of every logits row of a request are the same alone and in any batch, with any chunk size, thread
 * count, cache and neighbours that come, pause and are cancelled. Then the queue, pausing,
 * draining, closing, and a soak from several threads after which every page is free or cached. */
#include "tests/engine_helper.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/allocguard.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"

/* ---- The same alone and in company ---- */

enum {
    N_REQUESTS = TINY_SLOW ? 10 : 20,
    MAX_PROMPT = 320,
    MAX_OUT = 48,
    FIRST_SEED = 1000,
    N_ROWS = MAX_PROMPT + MAX_OUT
};

struct record {
    int n_prompt, n_out, n_hashes;
    int32_t prompt[MAX_PROMPT], out[MAX_OUT];
    uint64_t hash[N_ROWS]; /* of the logits row at a position; 0: none was computed */
    enum engine_finish finish;
};

static void make_request(int i, struct record *r, struct engine_submit_options *s) {
    static const int lengths[] = {1, 40, 64, 65, 128, 150, 200, 255, 256, 300};
    /* Three families share their beginning, so that the cache has something to give. */
    r->n_prompt = lengths[i % 10] + (i >= 10);
    int own = r->n_prompt / 3;
    tiny_prompt((uint64_t)i % 3, r->prompt, r->n_prompt - own);
    tiny_prompt(500 + (uint64_t)i, r->prompt + r->n_prompt - own, own);
    tiny_submit_options(s, r->prompt, r->n_prompt);
    s->params.seed = FIRST_SEED + (uint64_t)i;
    s->params.max_tokens = 4 + i * 7 % (MAX_OUT - 4);
    s->params.temperature = i % 4 == 0 ? 0 : 0.5 + 0.1 * i;
    if (i % 4 == 1) s->params.top_k = 20;
    if (i % 5 == 2) s->params.top_p = 0.9;
    if (i % 6 == 3) s->params.repetition_penalty = 1.3;
    if (i % 6 == 4) s->params.frequency_penalty = 0.5;
    if (i % 7 == 5) s->params.logprobs = 4;
}

static void hash_row(void *arg, const struct engine_request *request, int position,
                     const float *logits, int n) {
    struct record *records = arg;
    struct engine_progress p;
    engine_poll(request, &p);
    if (p.seed < FIRST_SEED || p.seed >= FIRST_SEED + N_REQUESTS) return; /* company */
    struct record *r = &records[p.seed - FIRST_SEED];
    assert_in_range(position, r->n_prompt - 1, N_ROWS - 1);
    r->hash[position] = XXH3_64bits(logits, (size_t)n * sizeof *logits);
    r->n_hashes++;
}

static void keep_result(struct record *r, const struct engine_progress *p) {
    r->n_out = p->n_tokens;
    r->finish = p->finish;
    memcpy(r->out, p->tokens, (size_t)p->n_tokens * sizeof *r->out);
}

static void run_alone(const struct engine_options *o, const struct tiny_options *t,
                      struct record *records) {
    struct engine *g = tiny_engine_open(o, t);
    engine_trace_logits(g, hash_row, records);
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine_submit_options s;
        make_request(i, &records[i], &s);
        struct engine_request *r = tiny_submit(g, &s);
        struct engine_progress p = tiny_wait(r);
        keep_result(&records[i], &p);
        engine_release(g, r);
    }
    engine_close(g);
}

/* All at once in a random order, each with a neighbour that is cancelled after a few tokens or
 * paused for a while. */
static void run_together(const struct engine_options *o, const struct tiny_options *t,
                         struct record *records, uint64_t seed) {
    struct engine *g = tiny_engine_open(o, t);
    struct engine_request *r[N_REQUESTS], *other[N_REQUESTS];
    int order[N_REQUESTS];
    engine_trace_logits(g, hash_row, records);
    for (int i = 0; i < N_REQUESTS; i++) {
        int at = (int)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % (uint32_t)(i + 1));
        order[i] = order[at];
        order[at] = i;
    }
    for (int k = 0; k < N_REQUESTS; k++) {
        int i = order[k];
        struct engine_submit_options s;
        struct record neighbour;
        make_request(i, &records[i], &s);
        r[i] = tiny_submit(g, &s);
        make_request((i + 3) % N_REQUESTS, &neighbour, &s);
        s.params.seed = 5;
        s.params.max_tokens = 200;
        other[i] = tiny_submit(g, &s);
        if (k % 3 == 0) engine_pause(g, r[i], true);
        if (k % 4 == 1) engine_cancel(g, other[i]);
    }
    usleep(3000); /* paused ones keep their places and may block all others: go on before waiting */
    for (int k = 0; k < N_REQUESTS; k++) engine_pause(g, r[k], false);
    for (int k = 0; k < N_REQUESTS; k++) {
        if (k % 5 == 2) tiny_wait_tokens(other[k], 3);
        engine_cancel(g, other[k]);
    }
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        keep_result(&records[i], &p);
        engine_release(g, r[i]);
        tiny_wait(other[i]);
        engine_release(g, other[i]);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

static void compare_records(const struct record *want, const struct record *got, int config) {
    for (int i = 0; i < N_REQUESTS; i++) {
        if (got[i].n_out != want[i].n_out || got[i].finish != want[i].finish)
            fail_msg("config %d, request %d: %d tokens (%s), alone %d (%s)", config, i,
                     got[i].n_out, engine_finish_name(got[i].finish), want[i].n_out,
                     engine_finish_name(want[i].finish));
        assert_int_equal(got[i].n_hashes, want[i].n_hashes);
        assert_int_equal(got[i].n_hashes, want[i].n_out);
        for (int k = 0; k < want[i].n_out; k++) {
            int position = want[i].n_prompt - 1 + k;
            if (got[i].hash[position] != want[i].hash[position])
                fail_msg("config %d, request %d: other logits at position %d, answer token %d",
                         config, i, position, k);
            assert_int_equal(got[i].out[k], want[i].out[k]);
        }
    }
}

static void rows_equal(enum kern_dtype dtype, const char *kv_type) {
    static const struct {
        int max_rows, max_seqs, n_threads;
        bool cache;
        int select_layer;
    } configs[] = {{16, 8, 1, false, 1},
                   {17, 3, 2, true, 0},
                   {33, 24, 2, true, 1},
                   {64, 16, 2, false, 3},
                   {512, 16, 1, true, 2}};
    static struct record want[N_REQUESTS], got[N_REQUESTS];
    struct tiny_options t;
    struct engine_options o;
    tiny_model_default(&t);
    t.dtype = dtype;
    tiny_engine_options(&o);
    o.kv_type = kv_type;
    o.kv_memory_bytes = (size_t)96 * TINY_BLOCK_BYTES; /* not for all at once */
    o.max_rows = 512;
    o.prefix_cache = false;
    run_alone(&o, &t, want);
    for (int c = 0; c < (TINY_SLOW ? 2 : (int)(sizeof configs / sizeof *configs)); c++) {
        memset(got, 0, sizeof got);
        o.max_rows = configs[c].max_rows;
        o.max_seqs = configs[c].max_seqs;
        o.n_threads = configs[c].n_threads;
        o.prefix_cache = configs[c].cache;
        o.select_layer = configs[c].select_layer;
        run_together(&o, &t, got, (uint64_t)c);
        compare_records(want, got, c);
    }
}

static void test_engine_rows_equal_f32(void) {
    rows_equal(KERN_F32, "f16");
}
static void test_engine_rows_equal_q4_1_kv_q8_0(void) {
    rows_equal(KERN_Q4_1, "q8_0");
}
static void test_engine_rows_equal_q8_0_bf16(void) {
    rows_equal(KERN_Q8_0, "bf16");
}

/* ---- Queue ---- */

/* A long-running request that fills the only place; it ends when it is cancelled. */
static struct engine_request *occupy(struct engine *g) {
    int32_t prompt[4] = {1, 2, 3, 4};
    struct engine_submit_options s;
    tiny_submit_options(&s, prompt, 4);
    s.params.max_tokens = 2000;
    s.params.ignore_eos = true;
    struct engine_request *r = tiny_submit(g, &s);
    tiny_wait_tokens(r, 1);
    return r;
}

static void test_engine_queue_full(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_request *r[3], *none = NULL;
    struct err e = {0};
    int32_t prompt[10];
    tiny_engine_options(&o);
    o.max_seqs = 1;
    o.max_queue = 3;
    struct engine *g = tiny_engine_open(&o, NULL);
    struct engine_request *first = occupy(g);
    tiny_prompt(1, prompt, 10);
    tiny_submit_options(&s, prompt, 10);
    for (int i = 0; i < 3; i++) r[i] = tiny_submit(g, &s);
    assert_int_equal(engine_submit(g, &s, &none, &e), E_FULL);
    assert_non_null(strstr(e.message, "3"));
    assert_null(none);
    /* Cancelled while waiting: ends although nobody before it moved, and its place is free again.
     */
    engine_cancel(g, r[1]);
    struct engine_progress p = tiny_wait(r[1]);
    assert_int_equal(p.finish, ENGINE_CANCELLED);
    assert_int_equal(p.n_tokens, 0);
    assert_int_equal(p.admitted_ns, 0);
    engine_release(g, r[1]);
    r[1] = tiny_submit(g, &s);
    struct engine_stats stats;
    engine_get_stats(g, &stats);
    assert_int_equal(stats.n_running, 1);
    assert_int_equal(stats.n_waiting, 3);
    engine_cancel(g, first);
    p = tiny_wait(first);
    assert_int_equal(p.finish, ENGINE_CANCELLED);
    assert_true(p.n_tokens > 0);
    for (int i = 0; i < 3; i++) {
        p = tiny_wait(r[i]);
        assert_int_equal(p.n_tokens, 16);
        engine_release(g, r[i]);
    }
    engine_release(g, first);
    tiny_assert_pool_whole(g);
    engine_get_stats(g, &stats);
    assert_int_equal(stats.n_requests, 5);
    assert_int_equal(stats.n_finished[ENGINE_CANCELLED], 2);
    assert_int_equal(stats.n_finished[ENGINE_STOP] + stats.n_finished[ENGINE_LENGTH], 3);
    assert_int_equal(stats.ttft.n, 4);
    assert_int_equal(stats.e2e.count[ENGINE_N_BUCKETS - 1], 5);
    engine_close(g);
}

/* First in, first out: a request that needs the whole pool waits at the head; small ones behind it
 * do not pass, so it starts as soon as the pool is empty. */
static void test_engine_no_starvation(void) {
    struct engine_options o;
    struct engine_submit_options s;
    static int32_t prompt[400];
    tiny_engine_options(&o);
    o.kv_memory_bytes = 8 * TINY_BLOCK_BYTES;
    struct engine *g = tiny_engine_open(&o, NULL);
    int context = engine_context(g);
    tiny_prompt(1, prompt, 400);
    tiny_submit_options(&s, prompt, 40);
    s.params.max_tokens = 100;
    s.params.ignore_eos = true;
    struct engine_request *small = tiny_submit(g, &s);
    tiny_wait_tokens(small, 1);
    s.n_prompt = 100;
    s.params.max_tokens = context - 100;
    struct engine_request *large = tiny_submit(g, &s), *late[4];
    s.n_prompt = 10;
    s.params.max_tokens = 4;
    for (int i = 0; i < 4; i++) late[i] = tiny_submit(g, &s);
    struct engine_progress a = tiny_wait(small), b = tiny_wait(large);
    assert_int_equal(b.n_tokens, context - 100);
    assert_true(b.admitted_ns >= a.finished_ns);
    for (int i = 0; i < 4; i++) {
        struct engine_progress p = tiny_wait(late[i]);
        assert_true(p.admitted_ns >=
                    b.finished_ns); /* the large one holds the whole pool until then */
        engine_release(g, late[i]);
    }
    engine_release(g, small);
    engine_release(g, large);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- Pause, drain, close ---- */

static void test_engine_pause_keeps_place(void) {
    struct engine_options o;
    struct engine_submit_options s;
    int32_t prompt[10], want[300];
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    tiny_prompt(1, prompt, 10);
    tiny_submit_options(&s, prompt, 10);
    s.params.max_tokens = 300;
    s.params.ignore_eos = true;
    tiny_run(g, &s, want, NULL);
    struct engine_request *r = tiny_submit(g, &s);
    tiny_wait_tokens(r, 5);
    engine_pause(g, r, true);
    usleep(20000); /* the step that ran when it was asked is over */
    struct engine_progress a, b;
    struct engine_stats stats;
    engine_poll(r, &a);
    usleep(50000);
    engine_poll(r, &b);
    assert_int_equal(a.n_tokens, b.n_tokens);
    assert_int_equal(b.finish, ENGINE_RUNNING);
    engine_get_stats(g, &stats);
    assert_int_equal(stats.n_running, 1);
    assert_int_equal(stats.n_paused, 1);
    s.params.max_tokens = 3; /* others go on meanwhile */
    assert_int_equal(tiny_run(g, &s, NULL, NULL), 3);
    engine_pause(g, r, false);
    b = tiny_wait(r);
    assert_int_equal(b.n_tokens, 300);
    assert_memory_equal(b.tokens, want, sizeof want);
    engine_release(g, r);
    /* Cancelled while paused. */
    s.params.max_tokens = 300;
    r = tiny_submit(g, &s);
    engine_pause(g, r, true);
    engine_cancel(g, r);
    assert_int_equal(tiny_wait(r).finish, ENGINE_CANCELLED);
    engine_release(g, r);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

static void test_engine_drain_then_close(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_request *r, *running[4], *none = NULL;
    struct err e = {0};
    int32_t prompt[10];
    tiny_engine_options(&o);
    o.max_seqs = 2; /* two wait */
    struct engine *g = tiny_engine_open(&o, NULL);
    assert_true(engine_idle(g));
    tiny_prompt(1, prompt, 10);
    tiny_submit_options(&s, prompt, 10);
    r = tiny_submit(g, &s);
    engine_drain(g);
    assert_int_equal(engine_submit(g, &s, &none, &e), E_CLOSED);
    assert_int_equal(tiny_wait(r).n_tokens, 16);
    tiny_assert_pool_whole(g);
    assert_true(engine_idle(g));
    engine_release(g, r);
    engine_close(g);
    /* Closed with work in hand; released after. */
    g = tiny_engine_open(&o, NULL);
    s.params.max_tokens = 1500;
    s.params.ignore_eos = true;
    for (int i = 0; i < 4; i++) running[i] = tiny_submit(g, &s);
    tiny_wait_tokens(running[0], 3);
    engine_close(g);
    for (int i = 0; i < 4; i++) {
        struct engine_progress p;
        engine_poll(running[i], &p);
        assert_int_equal(p.finish, ENGINE_ABORTED);
        assert_true(i > 0 || p.n_tokens >= 3);
        engine_release(NULL, running[i]);
    }
}

/* ---- A long prompt beside a stream ---- */

/* While one sequence decodes, the prompt of another is cut small, and the stream gets a token in
 * every step. */
static void test_engine_prefill_share(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_stats before, after;
    static int32_t prompt[1500];
    tiny_engine_options(&o);
    o.max_rows = 512;
    o.prefill_share = 0.05;
    o.kv_memory_bytes = (size_t)64 * TINY_BLOCK_BYTES;
    struct engine *g = tiny_engine_open(&o, NULL);
    tiny_prompt(9, prompt, 1500);
    struct engine_request *stream = occupy(g);
    tiny_wait_tokens(stream, 20); /* step times are known */
    tiny_submit_options(&s, prompt, 1500);
    s.params.max_tokens = 1;
    s.no_prefix_cache = true;
    tiny_run(g, &s, NULL, NULL); /* the first estimate of a prompt row's cost */
    struct engine_progress p;
    engine_get_stats(g, &before);
    struct engine_request *r = tiny_submit(g, &s);
    tiny_wait(r);
    engine_get_stats(g, &after); /* steps and tokens of one snapshot: this thread may be put off */
    engine_poll(stream, &p);
    engine_release(g, r);
    uint64_t steps = after.n_steps - before.n_steps;
    uint64_t tokens = after.n_generated_tokens - before.n_generated_tokens;
    assert_true(p.finish == ENGINE_RUNNING);
    assert_true(steps >= 1500 / 512 * 4); /* cut smaller than max_rows */
    assert_true(tokens >= steps);         /* the stream's, and the one of the long prompt */
    engine_release(g, stream);
    engine_close(g);
}

/* ---- Notification ---- */

struct bell {
    atomic_int n_rings;
    atomic_bool gone; /* the owner has released: no ring is allowed */
    atomic_int n_late;
};

static void ring(void *arg) {
    struct bell *b = arg;
    if (atomic_load(&b->gone)) atomic_fetch_add(&b->n_late, 1);
    atomic_fetch_add(&b->n_rings, 1);
}

static void test_engine_notify(void) {
    struct engine_options o;
    struct engine_submit_options s;
    static struct bell bells[40];
    int32_t prompt[10];
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    tiny_prompt(1, prompt, 10);
    tiny_submit_options(&s, prompt, 10);
    s.params.ignore_eos = true;
    s.notify = ring;
    s.notify_arg = &bells[0];
    struct engine_request *r = tiny_submit(g, &s);
    tiny_wait(r);
    int64_t start = clock_ns();
    while (atomic_load(&bells[0].n_rings) < 16 && clock_ms_since(start) < 20000) usleep(100);
    assert_int_equal(bells[0].n_rings, 16); /* one a step, the last with the end */
    engine_release(g, r);
    for (int i = 1; i < 40; i++) { /* released in the middle */
        s.notify_arg = &bells[i];
        s.params.max_tokens = 1000;
        r = tiny_submit(g, &s);
        tiny_wait_tokens(r, i % 5);
        engine_release(g, r);
        atomic_store(&bells[i].gone, true);
    }
    tiny_assert_pool_whole(g);
    for (int i = 0; i < 40; i++) assert_int_equal(bells[i].n_late, 0);
    engine_close(g);
}

/* ---- Soak ---- */

enum { N_CLIENTS = 3, SOAK_MS = 3000 };

struct client {
    struct engine *g;
    uint64_t seed;
    int n_done, n_full, n_bad;
};

/* Submits, then waits, cancels, pauses or walks away at random. No cmocka here: its asserts are for
 * the main thread. */
static void *client_run(void *arg) {
    struct client *c = arg;
    int64_t start = clock_ns();
    for (uint32_t i = 0; clock_ms_since(start) < SOAK_MS; i++) {
        int32_t prompt[300];
        struct engine_submit_options s;
        struct engine_request *r;
        struct err e = {0};
        uint32_t draw = rng_u32(c->seed, i, RNG_TEST, 0);
        tiny_prompt(draw % 7, prompt, 300);
        tiny_submit_options(&s, prompt, 1 + (int)(draw >> 3) % 299);
        s.params.max_tokens = 1 + (int)(draw >> 12) % 60;
        s.params.temperature = 1;
        s.params.frequency_penalty = draw & 1;
        s.params.logprobs = draw & 2 ? 2 : -1;
        s.params.seed = draw;
        int rc = engine_submit(c->g, &s, &r, &e);
        if (rc == E_FULL) {
            c->n_full++;
            usleep(1000);
            continue;
        }
        if (rc) {
            c->n_bad++;
            continue;
        }
        uint32_t act = rng_u32(c->seed, i, RNG_TEST, 1);
        struct engine_progress p = {0};
        if (act % 8 == 0) engine_pause(c->g, r, true);
        if (act % 4 == 1) usleep((act >> 8) % 5000);
        if (act % 8 == 0) engine_pause(c->g, r, false);
        if (act % 4 == 2) engine_cancel(c->g, r);
        if (act % 4 != 3 || act % 16 == 3) do {
                engine_poll(r, &p);
                if (p.finish == ENGINE_RUNNING) usleep(200);
            } while (p.finish == ENGINE_RUNNING);
        if (p.finish == ENGINE_FAILED) c->n_bad++;
        engine_release(c->g, r);
        c->n_done++;
    }
    return NULL;
}

static void test_engine_soak(void) {
    struct engine_options o;
    tiny_engine_options(&o);
    o.n_threads = 2;
    o.max_queue = 4;
    o.kv_memory_bytes = (size_t)16 * TINY_BLOCK_BYTES; /* pages come and go */
    struct engine *g = tiny_engine_open(&o, NULL);
    pthread_t threads[N_CLIENTS];
    struct client clients[N_CLIENTS];
    for (int i = 0; i < N_CLIENTS; i++) {
        clients[i] = (struct client){.g = g, .seed = (uint64_t)i};
        assert_int_equal(pthread_create(&threads[i], NULL, client_run, &clients[i]), 0);
    }
    for (int i = 0; i < N_CLIENTS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(clients[i].n_bad, 0);
        assert_true(clients[i].n_done > (TINY_SLOW ? 0 : 5));
    }
    tiny_assert_pool_whole(g);
    struct engine_stats s;
    engine_get_stats(g, &s);
    uint64_t n = 0;
    for (int i = 0; i < 6; i++) n += s.n_finished[i];
    assert_int_equal(n, s.n_requests);
    assert_int_equal(s.n_finished[ENGINE_FAILED], 0);
    assert_true(TINY_SLOW || s.pool.n_evicted > 0);
#ifdef TANDEM_ALLOC_GUARD
    assert_true(allocguard_n_regions() > 100);
#endif
    engine_close(g);
}

const struct test tests[] = {
    {"engine_rows_equal_f32", TEST_QUICK, 60000, test_engine_rows_equal_f32},
    {"engine_rows_equal_q4_1_kv_q8_0", TEST_QUICK, 60000, test_engine_rows_equal_q4_1_kv_q8_0},
    {"engine_rows_equal_q8_0_bf16", TEST_QUICK, 60000, test_engine_rows_equal_q8_0_bf16},
    {"engine_queue_full", TEST_QUICK, 60000, test_engine_queue_full},
    {"engine_no_starvation", TEST_QUICK, 60000, test_engine_no_starvation},
    {"engine_pause_keeps_place", TEST_QUICK, 60000, test_engine_pause_keeps_place},
    {"engine_drain_then_close", TEST_QUICK, 60000, test_engine_drain_then_close},
    {"engine_prefill_share", TEST_QUICK, 60000, test_engine_prefill_share},
    {"engine_notify", TEST_QUICK, 60000, test_engine_notify},
    {"engine_soak", TEST_QUICK, 60000, test_engine_soak},
    {0},
};
