/* cmd/bench_grid.c over the tiny model: what the grid says of itself is true. Its JSON is read
 * back: sparse cells left blocks out and read less, kernels' bytes are the lists', speculation's
 * text is the one without, gains, product and share belong together; a prompt that is too short for
 * its settings is said to be read densely. And the prompts: as long as asked for, each its own. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "base/err.h"
#include "base/log.h"
#include "cmd/bench_grid.h"
#include "cmd/bench_prompts.h"
#include "tests/engine_helper.h"

static struct engine *open_engine(bool with_draft) {
    struct engine_options o;
    struct tiny_options t;
    struct tiny_draft d;
    tiny_model_default(&t);
    tiny_draft_default(&d, &t);
    tiny_engine_options(&o);
    log_set_level(LOG_ERROR);
    o.select_layer = 1;
    o.kv_memory_bytes = (size_t)600 * TINY_BLOCK_BYTES;
    o.draft_tokens =
        with_draft ? 4 : VERIFY_DRAFT_AUTO; /* auto may find that it does not pay here */
    o.lookup = true;
    if (with_draft) o.draft_path = tiny_draft_file(&t, &d);
    struct engine *g = tiny_engine_open(&o, &t);
    if (with_draft) unlink(o.draft_path);
    return g;
}

static void grid_options(struct bench_grid_options *o) {
    memset(o, 0, sizeof *o);
    o->depths[0] = 700;
    o->n_depths = o->n_batches = 1;
    o->batches[0] = 1;
    o->n_tokens = 20;
    o->n_repeats = 2;
    o->text = "fiction";
    o->json = true;
    target_settings_unset(&o->sparse);
    o->sparse.selector = TARGET_OBSERVED;
    o->sparse.keep_blocks = 4;
    o->sparse.reserve = 0;
}

/* The JSON that it prints. */
static json_t *run_grid(const struct bench_grid_options *o, bool with_draft) {
    static char said[200000];
    struct engine *g = open_engine(with_draft);
    struct err e = {0};
    FILE *keep = tmpfile();
    assert_non_null(keep);
    fflush(NULL);
    int out = dup(1);
    dup2(fileno(keep), 1);
    int rc = bench_grid(g, o, &e);
    fflush(NULL);
    dup2(out, 1);
    close(out);
    assert_ok(rc, e);
    engine_close(g);
    rewind(keep);
    said[fread(said, 1, sizeof said - 1, keep)] = 0;
    fclose(keep);
    json_error_t error;
    json_t *root = json_loads(said, JSON_REJECT_DUPLICATES, &error);
    if (!root) fail_msg("%s in %s", error.text, said);
    return root;
}

static json_int_t whole(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_integer(v)) fail_msg("no number %s", key);
    return json_integer_value(v);
}

static double real(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_number(v)) fail_msg("no number %s", key);
    return json_number_value(v);
}

static void assert_flag(const json_t *o, const char *key, bool want) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_boolean(v) || json_is_true(v) != want)
        fail_msg("%s is not %s", key, want ? "true" : "false");
}

static void check_cell(const json_t *c, int i, int n_blocks, int n_kept, int batch) {
    assert_string_equal(json_string_value(json_object_get(c, "speculation")),
                        grid_speculates(i) ? "on" : "off");
    assert_string_equal(json_string_value(json_object_get(c, "reading")),
                        grid_reads_sparsely(i) ? "sparse" : "dense");
    assert_flag(c, "same_text", true);
    assert_int_equal(whole(c, "kernel_shallow_bytes"), whole(c, "listed_shallow_bytes"));
    assert_int_equal(whole(c, "kernel_deep_bytes"), whole(c, "listed_deep_bytes"));
    assert_true(whole(c, "passes") > 0 && whole(c, "kernel_deep_bytes") > 0);
    bool loses = grid_reads_sparsely(i) && n_kept < n_blocks;
    assert_int_equal(whole(c, "kept_blocks"), loses ? n_kept : whole(c, "blocks"));
    assert_int_equal(whole(c, "prompts_read_sparsely") > 0, loses);
    assert_int_equal(real(c, "selection_share") > 0, loses);
    assert_true(whole(c, "accepted") <= whole(c, "drafted"));
    if (!grid_speculates(i)) assert_int_equal(whole(c, "drafted") + whole(c, "rounds"), 0);
    /* Alone, a pass without draft tokens gives one token. */
    if (!grid_speculates(i) && batch == 1)
        assert_int_equal(whole(c, "passes"), whole(c, "pass_tokens"));
    const char *const times[] = {"tpot_ms", "first_turn_tpot_ms", "tokens_per_s", "gain",
                                 "gain_low"};
    for (size_t k = 0; k < sizeof times / sizeof *times; k++) assert_true(real(c, times[k]) > 0);
    assert_true(real(c, "gain_low") <= real(c, "gain") && real(c, "gain") <= real(c, "gain_high"));
}

static void check_point(const json_t *p, int n_kept, int batch) {
    const json_t *cells = json_object_get(p, "cells");
    int n_blocks = target_n_blocks((int)whole(p, "longest_prompt"));
    bool loses = n_kept < n_blocks;
    assert_int_equal(json_array_size(cells), GRID_CELLS);
    assert_int_equal(whole(p, "batch"), batch);
    for (int i = 0; i < GRID_CELLS; i++)
        check_cell(json_array_get(cells, (size_t)i), i, n_blocks, n_kept, batch);
    assert_flag(p, "same_text", true);
    assert_flag(p, "bytes_agree", true);
    assert_flag(p, "sparse_ran", loses);
    double product = real(p, "speculation_gain") * real(p, "sparse_gain");
    assert_near(real(p, "product"), product, 1e-3 * product);
    assert_near(real(p, "share_of_product"), real(p, "combination") / product, 1e-3);
    assert_true(real(json_array_get(cells, GRID_PLAIN), "gain") == 1);
}

static void test_grid_says_what_is(void) {
    struct bench_grid_options o;
    grid_options(&o);
    o.depths[1] = 1000;
    o.batches[1] = 3;
    o.n_depths = o.n_batches = 2;
    if (TINY_SLOW) o.n_depths = 1, o.n_repeats = 1;
    json_t *root = run_grid(&o, true), *points = json_object_get(root, "points");
    assert_int_equal(json_array_size(points), o.n_depths * o.n_batches);
    for (int i = 0; i < o.n_depths * o.n_batches; i++) {
        const json_t *p = json_array_get(points, (size_t)i);
        check_point(p, 4, o.batches[i % 2]);
        assert_int_equal(whole(p, "prompt_tokens"), o.depths[i / 2]);
        assert_int_equal(whole(p, "prompts"), i % 2 ? 6 : 4);
    }
    /* The tiny draft guesses two of three: something was accepted. */
    const json_t *spec = json_array_get(json_object_get(json_array_get(points, 0), "cells"), 1);
    assert_true(whole(spec, "drafted") > 0 && whole(spec, "accepted") > 0);
    json_decref(root);
}

/* Sampled answers, computed anew in every turn, by lookup alone. */
static void test_grid_sampled_and_cold(void) {
    struct bench_grid_options o;
    grid_options(&o);
    o.temperature = 1;
    o.prefill = GRID_PREFILL_TURN;
    o.kind = "quote";
    o.n_repeats = 1;
    json_t *root = run_grid(&o, false);
    const json_t *p = json_array_get(json_object_get(root, "points"), 0);
    check_point(p, 4, 1);
    assert_int_equal(whole(p, "prompts"), 1);
    assert_true(json_is_null(json_object_get(root, "draft")));
    json_decref(root);
}

/* 256 tokens are the four blocks that stay anyway: no sparse cell is sparse, and it says so. */
static void test_grid_too_short(void) {
    struct bench_grid_options o;
    grid_options(&o);
    o.depths[0] = 250;
    o.n_repeats = 1;
    json_t *root = run_grid(&o, true);
    check_point(json_array_get(json_object_get(root, "points"), 0), 4, 1);
    json_decref(root);
}

/* Time to first token is of prompts that were computed whole, never of cached ones, also where an
 * earlier point had the same prompts. */
static void test_grid_prefill(void) {
    static const struct {
        enum grid_prefill prefill;
        bool has[GRID_CELLS];
    } cases[] = {{GRID_PREFILL_CELL, {true, true, true, true}},
                 {GRID_PREFILL_TURN, {true, true, true, true}},
                 {GRID_PREFILL_ONCE, {true, false, false, false}}};
    struct bench_grid_options o;
    grid_options(&o);
    o.batches[1] = 4;
    o.n_batches = 2;
    o.n_repeats = 1;
    json_t *root = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        o.prefill = cases[i].prefill;
        root = run_grid(&o, true);
        for (size_t k = 0; k < 2; k++) {
            const json_t *p = json_array_get(json_object_get(root, "points"), k);
            const json_t *cells = json_object_get(p, "cells");
            check_point(p, 4, o.batches[k]);
            for (size_t c = 0; c < GRID_CELLS; c++) {
                const json_t *t = json_object_get(json_array_get(cells, c), "ttft_ms");
                if (cases[i].has[c]) assert_true(json_number_value(t) > 0);
                else assert_true(json_is_null(t));
            }
        }
        if (i + 1 < sizeof cases / sizeof *cases) json_decref(root);
    }
    json_decref(root);
}

/* ---- The page ---- */

static int count_of(const char *text, const char *what) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at += strlen(what)) n++;
    return n;
}

static void test_grid_page(void) {
    static const char *const balanced[] = {"svg",  "figure", "table", "div", "tr", "td",  "th",
                                           "html", "body",   "style", "h2",  "p",  "text"};
    char path[] = "/tmp/tandem-grid-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    struct bench_grid_options o;
    grid_options(&o);
    o.html_path = path;
    o.kind = "summary";
    o.n_repeats = 1;
    o.depths[1] = 1000;
    o.n_depths = 2;
    json_decref(run_grid(&o, true));
    static char page[200000];
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    page[fread(page, 1, sizeof page - 1, f)] = 0;
    fclose(f);
    unlink(path);
    assert_int_equal(strncmp(page, "<!DOCTYPE html>", 15), 0);
    for (size_t i = 0; i < sizeof balanced / sizeof *balanced; i++) {
        char open[16], open_with[16], closed[16];
        snprintf(open, sizeof open, "<%s>", balanced[i]);
        snprintf(open_with, sizeof open_with, "<%s ", balanced[i]);
        snprintf(closed, sizeof closed, "</%s>", balanced[i]);
        int n = count_of(page, open) + count_of(page, open_with);
        if (n == 0 || n != count_of(page, closed)) fail_msg("<%s> is not balanced", balanced[i]);
    }
    assert_int_equal(count_of(page, "<svg"), 2 * 4 + 1); /* four plots a point, one over depths */
    /* Nothing from elsewhere, nothing that runs, no number that is none. */
    static const char *const never[] = {"http",    "<script", "src=", "url(",
                                        "@import", "nan",     "inf\""};
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        if (strstr(page, never[i])) fail_msg("the page holds %s", never[i]);
}

/* ---- Prompts ---- */

static void test_grid_prompts(void) {
    struct engine *g = open_engine(false);
    struct strbuf text = {0};
    struct tokens ids = {0}, other = {0};
    struct err e = {0};
    bool repeats = false;
    assert_ok(bench_text(&text, "news", engine_tokenizer(g), &e), e);
    assert_true(text.n > 100000);
    for (int n = 200; n < 1800; n += 133)
        for (int q = 0; bench_questions[q].name; q++) {
            assert_ok(
                bench_prompt(&ids, g, &text, (size_t)n * 17, &bench_questions[q], n, &repeats, &e),
                e);
            assert_in_range(ids.n, n - 40, n); /* a byte is a token here; words are whole */
        }
    assert_false(repeats);
    /* Another place, another beginning (behind the template's first tokens). */
    assert_ok(bench_prompt(&ids, g, &text, 0, &bench_questions[0], 600, &repeats, &e), e);
    assert_ok(bench_prompt(&other, g, &text, text.n / 2, &bench_questions[0], 600, &repeats, &e),
              e);
    assert_memory_not_equal(ids.ids, other.ids, 60 * sizeof *ids.ids);
    /* Shorter than a prompt: it goes on from its beginning, and says so. */
    struct strbuf few = {0};
    strbuf_append_str(&few, "One line.\nAnother line of it.\n");
    assert_ok(bench_prompt(&ids, g, &few, 11, &bench_questions[0], 400, &repeats, &e), e);
    assert_true(repeats);
    assert_in_range(ids.n, 360, 400);
    /* No room for the question. */
    assert_int_equal(bench_prompt(&ids, g, &text, 0, &bench_questions[1], 30, &repeats, &e),
                     E_RANGE);
    assert_non_null(strstr(e.message, "no room for the question \"extract\""));
    strbuf_deinit(&few);
    strbuf_deinit(&text);
    tokens_deinit(&ids);
    tokens_deinit(&other);
    engine_close(g);
}

static void test_grid_refusals(void) {
    struct engine *g = open_engine(false);
    struct bench_grid_options o;
    struct strbuf text = {0};
    struct err e = {0};
    grid_options(&o);
    o.depths[0] = engine_context(g) - 19;
    assert_int_equal(bench_grid(g, &o, &e), E_RANGE);
    assert_non_null(strstr(e.message, "--prompt-tokens: 2029 and 20 tokens"));
    assert_int_equal(bench_text(&text, "/nowhere/text", engine_tokenizer(g), &e), E_NOT_FOUND);
    assert_non_null(strstr(e.message, "--text"));
    char path[] = "/tmp/tandem-blank-XXXXXX";
    int fd = mkstemp(path);
    assert_int_equal(write(fd, " \n\t\n", 4), 4);
    close(fd);
    assert_int_equal(bench_text(&text, path, engine_tokenizer(g), &e), E_INVALID);
    assert_non_null(strstr(e.message, "holds no text"));
    unlink(path);
    strbuf_deinit(&text);
    engine_close(g);
}

const struct test tests[] = {
    {"grid_says_what_is", TEST_QUICK, 120000, test_grid_says_what_is},
    {"grid_sampled_and_cold", TEST_QUICK, 60000, test_grid_sampled_and_cold},
    {"grid_too_short", TEST_QUICK, 60000, test_grid_too_short},
    {"grid_prefill", TEST_QUICK, 120000, test_grid_prefill},
    {"grid_page", TEST_QUICK, 60000, test_grid_page},
    {"grid_prompts", TEST_QUICK, 60000, test_grid_prompts},
    {"grid_refusals", TEST_QUICK, 60000, test_grid_refusals},
    {0},
};
