/* What `tandem eval` judges is what is served: for the same prompt and settings its columns say,
 * token for token, what the engine says with those settings, by every selector that both have. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/log.h"
#include "cmd/eval_run.h"
#include "tests/engine_helper.h"

enum { N_ANSWER = 24, MOST = 1100 };

static struct eval_bed *open_bed(const struct tiny_options *t, struct eval_wishes *w,
                                 struct eval_columns *c) {
    struct err e = {0};
    struct eval_bed *b;
    log_set_level(LOG_ERROR);
    const char *model = tiny_model_file(t);
    struct eval_bed_options o = {.max_tokens = MOST,
                                 .max_answers = EVAL_MAX_COLUMNS,
                                 .max_answer_tokens = N_ANSWER,
                                 .apart = true};
    engine_options_default(&o.engine);
    o.engine.model_path = model;
    o.engine.device = "cpu";
    o.engine.n_threads = 1;
    o.engine.select_layer = 1;
    assert_ok(eval_bed_read(&b, &o, &e), e);
    w->deep = eval_bed_deep(b);
    assert_ok(eval_columns_make(c, w, &e), e);
    assert_ok(eval_bed_open(b, &o, &e), e);
    unlink(model);
    b->n_stop = 0; /* as requests below ignore ends */
    return b;
}

static void serve(struct engine *g, const struct eval_bed *b, const struct eval_column *c,
                  const int32_t *ids, int n, struct strbuf *text) {
    struct engine_submit_options s;
    struct engine_progress end;
    int32_t out[N_ANSWER];
    tiny_submit_options(&s, ids, n);
    struct target_settings ask;
    target_settings_unset(&ask);
    ask.selector = c->settings.selector;
    if (c->settings.keep_blocks > 0) ask.keep_blocks = c->settings.keep_blocks;
    else if (c->selector != EVAL_DENSE) ask.keep = c->settings.keep;
    ask.recheck = c->settings.recheck;
    ask.reselect = TARGET_RESELECT_OFF;
    ask.lists = c->settings.lists;
    ask.select2 = c->settings.select2;
    ask.quarters = c->settings.quarters;
    s.sparse = &ask;
    s.params.max_tokens = N_ANSWER;
    s.params.ignore_eos = true;
    s.params.seed = 7;
    int n_out = tiny_run(g, &s, out, &end);
    assert_int_equal(n_out, N_ANSWER);
    assert_int_equal(end.finish, ENGINE_LENGTH);
    if (c->selector != EVAL_DENSE && target_selects(&c->settings, n))
        assert_true(end.sparsity.n_kept < end.sparsity.n_blocks);
    strbuf_clear(text);
    tokenizer_decode(b->tokenizer, out, (size_t)n_out, false, text);
    strbuf_append_char(text, 0);
}

static void test_eval_says_what_is_served(void) {
    static const int prompts[] = {450, 640, 700, 1023};
    static struct eval_columns c;
    struct eval_wishes w = {.selectors = "observed,recent,random,mean",
                            .keep_blocks = "6,5",
                            .keep = "1",
                            .recheck = true,
                            .lists = "layer,head",
                            .select2 = "2",
                            .quarters = "1,3"};
    struct tiny_options t;
    struct engine_options o;
    struct strbuf text[EVAL_MAX_COLUMNS] = {{0}}, served = {0};
    struct err e = {0};
    int32_t ids[MOST];
    int n_different = 0;
    target_settings_unset(&w.base);
    tiny_model_default(&t);
    struct eval_bed *b = open_bed(&t, &w, &c);
    tiny_engine_options(&o);
    o.select_layer = 1;
    o.sparse.selector = TARGET_OBSERVED; /* with room for lists and quarters, and states */
    o.sparse.lists = TARGET_LISTS_HEAD;
    o.sparse.quarters = 1;
    o.sparse.reselect = 64;
    o.sparse.reselector = TARGET_MEAN;
    struct engine *g = tiny_engine_open(&o, &t);
    for (size_t i = 0; i < sizeof prompts / sizeof prompts[0]; i++) {
        int n = prompts[i];
        tiny_prompt(i + 1, ids, n);
        assert_ok(eval_bed_prompt(b, &c, ids, n, 7, &e), e);
        assert_ok(eval_bed_select(b, &c, &e), e);
        assert_ok(eval_answer_all(b, &c, NULL, 0, N_ANSWER, text, &e), e);
        for (int k = 0; k < c.n; k++) {
            serve(g, b, &c.at[k], ids, n, &served);
            if (strcmp(served.data, text[k].data) != 0)
                fail_msg("%d tokens, %s: served '%s', here '%s'", n, c.at[k].name, served.data,
                         text[k].data);
            n_different += strcmp(text[k].data, text[0].data) != 0;
        }
    }
    assert_true(n_different > 16); /* lists mattered */
    for (int k = 0; k < c.n; k++) strbuf_deinit(&text[k]);
    strbuf_deinit(&served);
    engine_close(g);
    eval_bed_close(b);
}

const struct test tests[] = {
    {"eval_says_what_is_served", TEST_QUICK, 60000, test_eval_says_what_is_served},
    {0},
};
