/* engine/ over the tiny model: what one request gets. Batches, cancels and races are in
 * test_engine_batch.c. */
#include "tests/engine_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/allocguard.h"
#include "base/err.h"
#include "model/gguf.h"

/* Greedy tokens equal those of a loop that shares none of the engine's code, on both numeric paths,
 * over matrices that are multiplied in f32 and in 8 bit. A border between prompt and answer in
 * every place of a block. */
static void test_engine_greedy_equals_naive(void) {
    enum kern_dtype dtypes[] = {KERN_F32, KERN_Q8_0, KERN_Q4_1};
    enum { N_OUT = TINY_SLOW ? 3 : 6, N_LENGTHS = 5 };
    static const int lengths[N_LENGTHS] = {1, 63, 64, 65, 150};
    int n_different = 0;
    for (int c = 0; c < 4; c++) {
        struct tiny_options t;
        struct engine_options o;
        tiny_model_default(&t);
        t.dtype = dtypes[c % 3];
        t.seed = (uint64_t)c + 10;
        tiny_engine_options(&o);
        o.precision = c == 3 ? KERN_REFERENCE : KERN_FAST;
        struct engine *g = tiny_engine_open(&o, &t);
        for (size_t i = 0; i < N_LENGTHS; i++) {
            /* The reference path is slow, and the loop's time grows with the square of the length.
             */
            if ((c == 3 && lengths[i] != 65) || (lengths[i] > 65 && (c != 0 || TINY_SLOW)))
                continue;
            int32_t prompt[150], want[N_OUT], got[N_OUT];
            struct engine_submit_options s;
            struct engine_progress p;
            tiny_prompt(i, prompt, lengths[i]);
            tiny_submit_options(&s, prompt, lengths[i]);
            s.params.max_tokens = N_OUT;
            s.params.ignore_eos = true;
            tiny_naive_greedy(&t, o.precision, prompt, lengths[i], want, N_OUT);
            assert_int_equal(tiny_run(g, &s, got, &p), N_OUT);
            assert_int_equal(p.finish, ENGINE_LENGTH);
            assert_memory_equal(got, want, sizeof want);
            for (int k = 1; k < N_OUT; k++) n_different += got[k] != got[0];
        }
        engine_close(g);
    }
    assert_true(n_different >
                (TINY_SLOW ? 16 : 40)); /* the text is no constant that would be right by chance */
}

/* ---- Stops, limits, end tokens ---- */

static char *text_of(struct engine *g, const int32_t *ids, int n, size_t *bytes) {
    struct strbuf b = {0};
    strbuf_append_str(&b, "");
    tokenizer_decode(engine_tokenizer(g), ids, (size_t)n, false, &b);
    *bytes = b.n;
    return b.data;
}

static void test_engine_stop_strings(void) {
    struct engine_options o;
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    int n_found = 0;
    for (uint64_t seed = 0; seed < (TINY_SLOW ? 4 : 12); seed++) {
        int32_t prompt[40], all[200], cut[200];
        struct engine_submit_options s;
        struct engine_progress p;
        tiny_prompt(seed, prompt, 40);
        tiny_submit_options(&s, prompt, 40);
        s.params.temperature = 1.5;
        s.params.seed = seed;
        s.params.max_tokens = 200;
        s.params.ignore_eos = true;
        int n = tiny_run(g, &s, all, NULL);
        size_t bytes;
        char *text = text_of(g, all, n, &bytes);
        /* Two printable characters in a row from the middle: they end the second run. */
        size_t at = bytes / 2;
        while (at + 2 < bytes &&
               !(text[at] >= 32 && text[at] < 127 && text[at + 1] >= 32 && text[at + 1] < 127))
            at++;
        if (at + 2 >= bytes) {
            free(text);
            continue;
        }
        n_found++;
        s.params.n_stops = 2;
        s.params.stops[0] = (struct verify_stop){.n = 12, .text = "never comes."};
        s.params.stops[1].n = 2;
        memcpy(s.params.stops[1].text, text + at, 2);
        const char *first = memmem(text, bytes, text + at, 2);
        int n_cut = tiny_run(g, &s, cut, &p);
        assert_int_equal(p.finish, ENGINE_STOP);
        assert_int_equal(p.stop_idx, 1);
        assert_memory_equal(cut, all, (size_t)n_cut * sizeof *cut);
        /* The last token completes the stop, the one before does not. */
        size_t cut_bytes;
        char *cut_text = text_of(g, cut, n_cut, &cut_bytes);
        assert_true(cut_bytes >= (size_t)(first - text) + 2);
        free(cut_text);
        cut_text = text_of(g, cut, n_cut - 1, &cut_bytes);
        assert_true(cut_bytes < (size_t)(first - text) + 2);
        free(cut_text);
        /* What a reader of the same tokens shows. */
        struct verify_text vt;
        struct strbuf sink = {0};
        struct err e = {0};
        strbuf_append_str(&sink, "");
        assert_ok(verify_text_init(&vt, engine_tokenizer(g), &s.params, false, &e), e);
        for (int i = 0; i < n_cut; i++) verify_text_push(&vt, cut[i], &sink);
        verify_text_finish(&vt, &sink);
        assert_int_equal(sink.n, first - text);
        assert_memory_equal(sink.data, text, sink.n);
        strbuf_deinit(&sink);
        verify_text_deinit(&vt);
        free(text);
    }
    assert_true(n_found >= (TINY_SLOW ? 2 : 6));
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* A hot sampler over few tokens meets an end token soon: then min_tokens must hold it off, and
 * ignore_eos must go on through it with the very same tokens up to there. */
static void test_engine_end_tokens(void) {
    struct engine_options o;
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    int n_ended = 0;
    for (uint64_t seed = 0; seed < 20 && n_ended < (TINY_SLOW ? 2 : 5); seed++) {
        int32_t prompt[3], ended[300], on[300],
            held[300]; /* a banned id moves the draws: other text */
        struct engine_submit_options s;
        struct engine_progress p;
        tiny_prompt(seed, prompt, 3);
        tiny_submit_options(&s, prompt, 3);
        s.params.temperature = 3;
        s.params.seed = seed;
        s.params.max_tokens = 300;
        int n = tiny_run(g, &s, ended, &p);
        if (p.finish != ENGINE_STOP) continue;
        n_ended++;
        assert_int_equal(p.stop_idx, -1);
        assert_true(tokenizer_is_eog(engine_tokenizer(g), ended[n - 1]));
        s.params.ignore_eos = true;
        assert_int_equal(tiny_run(g, &s, on, &p), 300);
        assert_int_equal(p.finish, ENGINE_LENGTH);
        assert_memory_equal(on, ended, (size_t)n * sizeof *on);
        s.params.ignore_eos = false;
        s.params.min_tokens = n < 290 ? n + 10 : 300;
        int n_held = tiny_run(g, &s, held, &p);
        assert_true(n_held >= s.params.min_tokens);
        for (int i = 0; i < s.params.min_tokens; i++)
            assert_false(tokenizer_is_eog(engine_tokenizer(g), held[i]));
    }
    assert_int_equal(n_ended, TINY_SLOW ? 2 : 5);
    engine_close(g);
}

/* ---- Log probabilities ---- */

struct last_rows {
    float logits[64][TINY_VOCAB];
    int n;
};

static void keep_row(void *arg, const struct engine_request *r, int position, const float *logits,
                     int n) {
    struct last_rows *l = arg;
    (void)r;
    (void)position;
    if (l->n < 64) memcpy(l->logits[l->n++], logits, (size_t)n * sizeof *logits);
}

static void test_engine_logprobs(void) {
    struct engine_options o;
    static struct last_rows rows;
    int32_t prompt[20];
    struct engine_submit_options s;
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    engine_trace_logits(g, keep_row, &rows);
    tiny_prompt(7, prompt, 20);
    tiny_submit_options(&s, prompt, 20);
    s.params.temperature = 0.7;
    s.params.top_k = 3; /* the logprobs are the model's own all the same */
    s.params.logprobs = 5;
    s.params.max_tokens = 24;
    s.params.ignore_eos = true;
    struct engine_request *r = tiny_submit(g, &s);
    struct engine_progress p = tiny_wait(r);
    assert_int_equal(p.n_tokens, 24);
    for (int i = 0; i < p.n_tokens; i++) {
        const float *x = rows.logits[i];
        double max = x[0], sum = 0;
        for (int k = 1; k < TINY_VOCAB; k++) max = fmax(max, x[k]);
        for (int k = 0; k < TINY_VOCAB; k++) sum += exp(x[k] - max);
        const struct engine_logprobs *lp = &p.logprobs[i];
        assert_near(lp->logprob, x[p.tokens[i]] - max - log(sum), 1e-4);
        assert_int_equal(lp->n_top, 5);
        for (int k = 0; k < 5; k++) {
            assert_near(lp->top_logprob[k], x[lp->top_id[k]] - max - log(sum), 1e-4);
            assert_true(k == 0 || lp->top_logprob[k] <= lp->top_logprob[k - 1]);
            assert_true(k < 3 || p.tokens[i] != lp->top_id[k]); /* top_k 3 was kept to */
        }
    }
    engine_release(g, r);
    engine_close(g);
}

/* ---- What is refused ---- */

static int refused(struct engine *g, const struct engine_submit_options *s, struct err *e) {
    struct engine_request *r = NULL;
    memset(e, 0, sizeof *e);
    int rc = engine_submit(g, s, &r, e);
    assert_null(r);
    return rc;
}

static void test_engine_refusals(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct err e;
    static int32_t prompt[2048];
    tiny_engine_options(&o);
    o.kv_memory_bytes = 8 * TINY_BLOCK_BYTES; /* 512 tokens at most, of 2,048 */
    struct engine *g = tiny_engine_open(&o, NULL);
    int context = engine_context(g);
    assert_in_range(context, 64, 512);
    char number[16];
    snprintf(number, sizeof number, "%d", context);
    tiny_prompt(1, prompt, 2048);
    tiny_submit_options(&s, prompt, context);
    assert_int_equal(refused(g, &s, &e), E_TOO_LONG);
    assert_non_null(strstr(e.message, number));
    tiny_submit_options(&s, prompt, 2047);
    assert_int_equal(refused(g, &s, &e), E_TOO_LONG);
    assert_non_null(strstr(e.message, "2047"));
    assert_non_null(strstr(e.message, number));
    tiny_submit_options(&s, prompt, 0);
    assert_int_equal(refused(g, &s, &e), E_RANGE);
    tiny_submit_options(&s, prompt, 10);
    s.params.top_p = NAN;
    assert_int_equal(refused(g, &s, &e), E_RANGE);
    prompt[3] = TINY_VOCAB;
    tiny_submit_options(&s, prompt, 10);
    assert_int_equal(refused(g, &s, &e), E_RANGE);
    prompt[3] = -1;
    assert_int_equal(refused(g, &s, &e), E_RANGE);
    /* A default max_tokens is cut to what fits, an explicit one to the context. */
    prompt[3] = 1;
    struct engine_progress p;
    s.params.max_tokens = -1;
    s.params.ignore_eos = true;
    int n = tiny_run(g, &s, NULL, &p);
    assert_int_equal(n, context - 10);
    assert_int_equal(p.finish, ENGINE_LENGTH);
    engine_drain(g);
    assert_int_equal(refused(g, &s, &e), E_CLOSED);
    engine_close(g);
    tiny_engine_options(&o);
    o.context = 100;
    g = tiny_engine_open(&o, NULL);
    s.params.max_tokens = 5000;
    assert_int_equal(tiny_run(g, &s, NULL, &p), 90);
    assert_int_equal(p.finish, ENGINE_LENGTH);
    engine_close(g);
}

static void test_engine_open_refusals(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    const char *path = tiny_model_file(&t);
    static const struct {
        const char *what;
        int rc;
    } want[] = {{"context", E_RANGE},      {"max_rows", E_RANGE},    {"max_seqs", E_RANGE},
                {"select_layer", E_RANGE}, {"kv type", E_INVALID},   {"device", E_INVALID},
                {"draft", E_NOT_FOUND},    {"nowhere", E_NOT_FOUND}, {"prefill_share", E_RANGE},
                {"--ctx-size", E_FULL},    {"--kv-memory", E_FULL}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        struct engine_options o;
        struct engine *g = NULL;
        struct err e = {0};
        tiny_engine_options(&o);
        o.model_path = path;
        if (i == 0) o.context = 4096;
        if (i == 1) o.max_rows = 8;
        if (i == 2) o.max_seqs = ENGINE_MAX_SEQS + 1;
        if (i == 3) o.select_layer = 4;
        if (i == 4) o.kv_type = "f17";
        if (i == 5) o.device = "abacus";
        if (i == 6) o.draft_path = "/nowhere/draft.gguf";
        if (i == 7) o.model_path = "/nowhere/at/all.gguf";
        if (i == 8) o.prefill_share = 1.5;
        if (i == 9) o.kv_memory_bytes = 8 * TINY_BLOCK_BYTES, o.context = 600;
        if (i == 10) o.kv_memory_bytes = (size_t)1 << 40;
        int rc = engine_open(&g, &o, NULL, NULL, &e);
        if (rc != want[i].rc) fail_msg("%s: %d %s", want[i].what, rc, e.message);
        if (!strstr(e.message, want[i].what))
            fail_msg("'%s' does not name %s", e.message, want[i].what);
        assert_null(g);
    }
    unlink(path);
}

/* As many rows a step as a pass may have: the workspace is sized, and the answer is the same. */
static void test_engine_most_rows(void) {
    int32_t prompt[300], want[16], got[16];
    tiny_prompt(7, prompt, 300);
    struct engine_submit_options s;
    tiny_submit_options(&s, prompt, 300);
    static const int rows[] = {64, KERN_MAX_ROWS / 2 + 1, KERN_MAX_ROWS};
    int n_want = 0;
    for (int i = 0; i < 3; i++) {
        struct engine_options o;
        tiny_engine_options(&o);
        o.max_rows = rows[i];
        struct engine *g = tiny_engine_open(&o, NULL);
        int n = tiny_run(g, &s, i ? got : want, NULL);
        engine_close(g);
        if (i == 0) n_want = n;
        assert_int_equal(n, n_want);
        if (i) assert_memory_equal(got, want, (size_t)n * sizeof *got);
    }
}

/* An embedding row of NaN: the request whose prompt holds that token fails, its neighbours do not
 * notice. */
static void test_engine_nan_fails_one(void) {
    enum { POISON = 200 };
    struct tiny_options t;
    struct strbuf b = {0};
    struct gguf *file;
    struct err e = {0};
    tiny_model_default(&t);
    tiny_model_bytes(&t, &b);
    assert_ok(gguf_open_bytes(&file, (const uint8_t *)b.data, b.n, &e), e);
    const struct gguf_tensor *embd = gguf_tensor_find(file, "token_embd.weight");
    const struct gguf_tensor *head = gguf_tensor_find(file, "output.weight");
    size_t row = (size_t)t.hidden * 4,
           at = (size_t)(embd->data - (const uint8_t *)b.data) + POISON * row;
    size_t head_at = (size_t)(head->data - (const uint8_t *)b.data) + POISON * row;
    gguf_close(file);
    memset(b.data + at, 0xff, row);
    memset(b.data + head_at, 0,
           row); /* a logit of 0 is far from the largest: nobody generates it */
    char path[] = "/tmp/tandem-nan-XXXXXX.gguf";
    int fd = mkstemps(path, 5);
    assert_int_equal(write(fd, b.data, b.n), b.n);
    close(fd);
    strbuf_deinit(&b);
    struct engine_options o;
    struct engine *g;
    tiny_engine_options(&o);
    o.model_path = path;
    assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
    unlink(path);
    struct engine_request *r[6];
    int32_t prompt[6][30], alone[16];
    struct engine_submit_options s;
    for (int i = 0; i < 6; i++) {
        tiny_prompt((uint64_t)i, prompt[i], 30);
        for (int k = 0; k < 30; k++)
            if (prompt[i][k] == POISON) prompt[i][k] = 1;
        tiny_submit_options(&s, prompt[i], 30);
        s.no_prefix_cache = true;
        s.params.ignore_eos = true;
        if (i == 5) tiny_run(g, &s, alone, NULL);
        if (i == 2) prompt[i][7] = POISON;
        r[i] = tiny_submit(g, &s);
    }
    for (int i = 0; i < 6; i++) {
        struct engine_progress p = tiny_wait(r[i]);
        assert_int_equal(p.finish, i == 2 ? ENGINE_FAILED : ENGINE_LENGTH);
        if (i == 2) assert_int_equal(p.error_code, E_NUMERIC);
        if (i == 5) assert_memory_equal(p.tokens, alone, sizeof alone);
        engine_release(g, r[i]);
    }
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- The next turn ---- */

/* A second turn that repeats the first with its answer and adds little: all whole blocks but the
 * last 32 tokens come from the cache, whoever computed them, and another tenant gets nothing. */
static void test_engine_second_turn(void) {
    struct engine_options o;
    struct engine_submit_options s;
    struct engine_progress p;
    struct engine_stats before, after;
    static int32_t ids[1400];
    tiny_engine_options(&o);
    o.kv_memory_bytes = (size_t)256 * TINY_BLOCK_BYTES;
    struct engine *g = tiny_engine_open(&o, NULL);
    tiny_prompt(3, ids, 1000);
    tiny_submit_options(&s, ids, 1000);
    s.params.max_tokens = 100;
    s.params.ignore_eos = true;
    s.salt = 77;
    s.conversation = 5;
    assert_int_equal(tiny_run(g, &s, ids + 1000, &p), 100);
    assert_int_equal(p.n_cached_prompt, 0);
    tiny_prompt(4, ids + 1100, 50);
    engine_get_stats(g, &before);
    s.n_prompt = 1150;
    s.params.max_tokens = 1;
    tiny_run(g, &s, NULL, &p);
    assert_int_equal(p.n_cached_prompt, 1099 / 64 * 64); /* the last answer token had no K and V */
    engine_get_stats(g, &after);
    assert_int_equal(after.n_rows - before.n_rows, 1150 - 1099 / 64 * 64);
    assert_int_equal(after.n_cached_prompt_tokens - before.n_cached_prompt_tokens,
                     p.n_cached_prompt);
    s.n_prompt = 1100; /* a regenerated answer: the last 32 tokens are computed again */
    tiny_run(g, &s, NULL, &p);
    assert_int_equal(p.n_cached_prompt, (1100 - 32) / 64 * 64);
    s.salt = 78;
    tiny_run(g, &s, NULL, &p);
    assert_int_equal(p.n_cached_prompt, 0);
    s.salt = 77;
    s.conversation = 6; /* somebody else's: the prompt's blocks alone, the border is the answer's */
    tiny_run(g, &s, NULL, &p);
    assert_int_equal(p.n_cached_prompt, 1000 / 64 * 64);
    s.no_prefix_cache = true;
    tiny_run(g, &s, NULL, &p);
    assert_int_equal(p.n_cached_prompt, 0);
    tiny_assert_pool_whole(g);
    engine_close(g);
}

/* ---- The plan ---- */

/* What headers alone say is what was opened, to the byte, for a pool of a given size and for one
 * that takes what is free (bounded by what all sequences could use). */
static void test_engine_plan_is_kept(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    for (int i = 0; i < 2; i++) {
        struct engine_options o;
        struct engine_stats stats;
        struct plan planned;
        struct err e = {0};
        struct engine *g;
        tiny_engine_options(&o);
        if (i) o.kv_memory_bytes = 0;
        o.model_path = tiny_model_file(&t);
        assert_ok(engine_plan(&planned, &o, 0, &e), e);
        assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
        unlink(o.model_path);
        const struct plan *opened = engine_get_plan(g);
        engine_get_stats(g, &stats);
        assert_true(planned.fits || !i);
        assert_int_equal(opened->n_lines, planned.n_lines);
        for (int k = 0; k < opened->n_lines; k++) {
            assert_string_equal(opened->lines[k].name, planned.lines[k].name);
            assert_int_equal(opened->lines[k].bytes, planned.lines[k].bytes);
        }
        assert_int_equal(stats.pool.arena_bytes, planned.pool.arena_bytes);
        if (i) assert_int_equal(planned.seqs_at_context, o.max_seqs);
        if (i)
            assert_in_range(planned.pool.arena_bytes, 8 * 32 * TINY_BLOCK_BYTES,
                            10 * 32 * TINY_BLOCK_BYTES);
        engine_close(g);
    }
    /* A machine with less than the margin free has no pool. */
    struct engine_options o;
    struct plan planned;
    struct err e = {0};
    tiny_engine_options(&o);
    o.kv_memory_bytes = 0;
    o.model_path = tiny_model_file(&t);
    assert_ok(engine_plan(&planned, &o, (size_t)400 << 20, &e), e);
    assert_false(planned.fits);
    assert_true(planned.n_advice > 0);
    unlink(o.model_path);
}

/* ---- Penalties reach the sampler ---- */

static void test_engine_penalties(void) {
    struct engine_options o;
    struct engine_submit_options s;
    int32_t prompt[8], out[120];
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    tiny_prompt(5, prompt, 8);
    tiny_submit_options(&s, prompt, 8);
    s.params.max_tokens = 120;
    s.params.ignore_eos = true;
    s.params.repetition_penalty =
        100; /* no token of prompt or answer comes again while others are positive */
    s.params.presence_penalty = 2;
    s.params.frequency_penalty = 2;
    for (int round = 0; round < 2; round++) { /* the second one takes a used slot */
        int n_again = 0;
        assert_int_equal(tiny_run(g, &s, out, NULL), 120);
        for (int i = 0; i < 40; i++) {
            for (int k = 0; k < i; k++) n_again += out[k] == out[i];
            for (int k = 0; k < 8; k++) n_again += prompt[k] == out[i];
        }
        assert_int_equal(n_again, 0);
    }
    engine_close(g);
}

static void test_engine_guard_is_live(void) {
    struct engine_options o;
    struct engine_submit_options s;
    int32_t prompt[8];
    tiny_engine_options(&o);
    struct engine *g = tiny_engine_open(&o, NULL);
    tiny_prompt(5, prompt, 8);
    tiny_submit_options(&s, prompt, 8);
    s.params.repetition_penalty = 1.1;
    s.params.logprobs = 3;
    s.params.n_stops = 1;
    s.params.stops[0] = (struct verify_stop){.n = 3, .text = "abc"};
    tiny_run(g, &s, NULL, NULL);
#ifdef TANDEM_ALLOC_GUARD
    assert_true(allocguard_n_regions() > 5); /* a step each */
#endif
    engine_close(g);
}

const struct test tests[] = {
    {"engine_greedy_equals_naive", TEST_QUICK, 60000, test_engine_greedy_equals_naive},
    {"engine_stop_strings", TEST_QUICK, 60000, test_engine_stop_strings},
    {"engine_end_tokens", TEST_QUICK, 60000, test_engine_end_tokens},
    {"engine_logprobs", TEST_QUICK, 60000, test_engine_logprobs},
    {"engine_refusals", TEST_QUICK, 60000, test_engine_refusals},
    {"engine_open_refusals", TEST_QUICK, 60000, test_engine_open_refusals},
    {"engine_nan_fails_one", TEST_QUICK, 60000, test_engine_nan_fails_one},
    {"engine_second_turn", TEST_QUICK, 60000, test_engine_second_turn},
    {"engine_most_rows", TEST_QUICK, 60000, test_engine_most_rows},
    {"engine_plan_is_kept", TEST_QUICK, 60000, test_engine_plan_is_kept},
    {"engine_penalties", TEST_QUICK, 60000, test_engine_penalties},
    {"engine_guard_is_live", TEST_QUICK, 60000, test_engine_guard_is_live},
    {0},
};
