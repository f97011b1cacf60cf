/* engine/ over the default target: an answer that makes sense, and what the prefix cache is for:
 * the next turn of a long conversation. */
#include "tests/engine_helper.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"

static struct engine *open_default(int context, int n_threads) {
    struct engine_options o;
    struct engine *g = NULL;
    struct err e = {0};
    engine_options_default(&o);
    o.model_path = test_default_target();
    o.context = context;
    o.max_seqs = 2;
    o.n_threads = n_threads;
    o.kv_memory_bytes = (size_t)256 << 20;
    assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
    return g;
}

static void test_engine_real_answer(void) {
    struct engine *g = open_default(1024, 0);
    engine_assert_answers(g);
    engine_close(g);
}

static double ttft_ms(const struct engine_progress *p) {
    return (double)(p->first_token_ns - p->submitted_ns) / 1e6;
}

/* 4,096 tokens of conversation, an answer of 32, 24 new tokens: the second turn computes what is
 * new and at most two blocks before it, so its time to first token is below a tenth of the first's
 * (a fortieth of the rows). One thread: where others use the cores too, a step of few rows waits
 * for its team at each of some three hundred places, and the ratio would measure the scheduler. */
static void test_engine_real_second_turn(void) {
    enum { TURN = 4096, ANSWER = 32, NEW = 24 };
    struct engine *g = open_default(8192, 1);
    struct engine_submit_options s;
    struct engine_progress first, second;
    struct engine_stats before, after;
    static int32_t ids[TURN + ANSWER + NEW];
    for (int i = 0; i < TURN; i++) ids[i] = 1000 + i * 7919 % 40000;
    tiny_submit_options(&s, ids, TURN);
    s.params.max_tokens = ANSWER;
    s.params.ignore_eos = true;
    tiny_run(g, &s, ids + TURN, &first);
    for (int i = 0; i < NEW; i++) ids[TURN + ANSWER + i] = 2000 + i;
    s.n_prompt = TURN + ANSWER + NEW;
    engine_get_stats(g, &before);
    tiny_run(g, &s, NULL, &second);
    engine_get_stats(g, &after);
    fprintf(stderr, "time to first token: %.0f ms, second turn %.0f ms, %d of %d tokens cached\n",
            ttft_ms(&first), ttft_ms(&second), second.n_cached_prompt, second.n_prompt);
    assert_int_equal(second.n_cached_prompt, (TURN + ANSWER + NEW - 32) / 64 * 64);
    assert_true(after.n_rows - before.n_rows < 200);
    assert_true(ttft_ms(&second) * 10 < ttft_ms(&first));
    engine_close(g);
}

const struct test tests[] = {
    {"engine_real_answer", TEST_FULL, 60000, test_engine_real_answer},
    {"engine_real_second_turn", TEST_FULL, 120000, test_engine_real_second_turn},
    {0},
};
