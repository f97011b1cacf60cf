/* `tandem eval` as a whole over the tiny model (tests/tiny_model.h), whose answers mean nothing:
 * what must hold of them all the same. What leaves nothing out is dense to the bit; what leaves
 * something out is not; one seed gives one result; counts add up; bad input is named. And the parts
 * that judge: calibration by hand-made trials, task files as hostile bytes. */
#include "tests/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "base/log.h"
#include "base/rng.h"
#include "cmd/cmd.h"
#include "cmd/eval_report.h"
#include "model/source.h"
#include "tests/tiny_model.h"

/* The command's error, which main.c would print. */
static char said[1000];
int cmd_fail(const struct err *e) {
    snprintf(said, sizeof said, "%s", e->message);
    return 1;
}

static char folder[64];

static const char *in_folder(const char *name) {
    static char path[8][160];
    static int turn;
    char *p = path[turn++ % 8];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

/* Run `tandem eval -m TINY --device cpu -q words...`; the tables go to a file. */
static int eval(const char *words) {
    static char line[2000];
    char *argv[64];
    int argc = 0;
    struct tiny_options t;
    tiny_model_default(&t);
    const char *model = tiny_model_file(&t);
    snprintf(line, sizeof line, "-m %s --device cpu --threads 1 --select-layer 1 -q %s", model,
             words);
    char *save;
    for (char *w = strtok_r(line, " ", &save); w && argc < 64; w = strtok_r(NULL, " ", &save))
        argv[argc++] = w;
    int keep = dup(STDOUT_FILENO);
    fflush(stdout);
    assert_non_null(freopen(in_folder("tables"), "w", stdout));
    said[0] = 0;
    int rc = cmd_eval(argc, argv);
    fflush(stdout);
    dup2(keep, STDOUT_FILENO);
    close(keep);
    unlink(model);
    return rc;
}

static char *read_all(const char *name) {
    FILE *f = fopen(in_folder(name), "r");
    assert_non_null(f);
    char *text = calloc(1, 1 << 20);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 20) - 1, f) > 0);
    fclose(f);
    return text;
}

static void make_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/tandem-eval-XXXXXX");
    assert_non_null(mkdtemp(folder));
}

static void remove_folder(void) {
    static const char *const names[] = {"tables", "a.json", "b.json", "a.svg", "answers", "in"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) unlink(in_folder(names[i]));
    rmdir(folder);
}

static json_t *column(json_t *part, const char *name) {
    size_t i;
    json_t *c;
    json_array_foreach(
        json_object_get(part, "columns"), i,
        c) if (!strcmp(json_string_value(json_object_get(c, "name")), name)) return c;
    fail_msg("no column %s", name);
    return NULL;
}

static double value(const json_t *o, const char *key) {
    const json_t *v = json_object_get(o, key);
    if (!json_is_number(v)) fail_msg("no number %s", key);
    return json_number_value(v);
}

/* What `words`, which must ask for --json a.json, write there; the caller's. */
static json_t *eval_json(const char *words) {
    if (eval(words) != 0) fail_msg("%s", said);
    char *text = read_all("a.json");
    json_t *j = json_loads(text, 0, NULL);
    assert_non_null(j);
    free(text);
    return j;
}

static void check_needles(json_t *j, int n_prompts) {
    json_t *needles = json_object_get(j, "needles"), *all = column(needles, "observed 1"), *g;
    size_t i;
    assert_int_equal(value(needles, "prompts"), n_prompts);
    assert_int_equal(value(all, "n"), n_prompts);
    assert_true(value(all, "minus_dense") == 0 && value(all, "better") == 0);
    assert_true(value(all, "worse") == 0);
    static const char *const by[] = {"by_tokens", "by_depth", "by_kind", "cells"};
    for (int k = 0; k < 4; k++) {
        int n = 0;
        json_array_foreach(json_object_get(all, by[k]), i, g) n += (int)value(g, "n");
        assert_int_equal(n, n_prompts);
    }
}

static void check_texts(json_t *j) {
    json_t *text = json_object_get(j, "text"), *all = column(text, "observed 1");
    json_t *few = column(text, "observed 6"), *dense = column(text, "dense");
    assert_true(value(all, "minus_dense") == 0 && value(all, "standard_error") == 0);
    assert_true(value(all, "agreement") == 1 && value(all, "mass") == 1);
    assert_true(value(few, "minus_dense") != 0 && value(few, "agreement") < 1);
    assert_true(value(few, "mass") > 0 && value(few, "mass") < 1);
    /* Lists of each one's own hold more of what each looks at, a quarter of each block less. */
    assert_true(value(column(text, "observed 6 by head"), "mass") > value(few, "mass"));
    assert_true(json_is_null(json_object_get(column(text, "mean 6 q1"), "recall")));
    assert_true(value(column(text, "mean 6 q1"), "mass") < value(column(text, "mean 6"), "mass"));
    assert_true(value(column(text, "observed 6 of 16"), "mass") < 1);
    static const char *const apart[] = {"by layer", "by head", "q1", "of 16", "of 128"};
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "observed 6 %s", apart[i]);
        assert_true(value(column(text, name), "minus_dense") != value(few, "minus_dense"));
        assert_true(value(column(text, name), "agreement") < 1);
        snprintf(name, sizeof name, "observed 1 %s", apart[i]);
        assert_true(value(column(text, name), "minus_dense") == 0);
    }
    assert_true(value(dense, "mean") > 0);
    json_t *attention = json_object_get(j, "attention"), *a, *l;
    size_t i, k;
    json_array_foreach(attention, i, a) {
        assert_int_equal(json_array_size(json_object_get(a, "layers")), 2);
        json_array_foreach(json_object_get(a, "layers"), k, l) {
            assert_true(value(l, "top_5") > 0 && value(l, "top_5") <= value(l, "top_10"));
            assert_true(value(l, "top_10") <= value(l, "top_20") && value(l, "top_20") <= 1);
            assert_true(k > 0 || value(l, "overlap") == 1);
        }
        /* As many tokens in smaller blocks hold at least as much. */
        assert_true(value(a, "blocks_of_64") >= value(a, "blocks_of_128") - 1e-9);
        assert_true(value(a, "blocks_of_32") >= value(a, "blocks_of_64") - 1e-6);
        assert_true(value(a, "blocks_of_16") > value(a, "blocks_of_32") - 1e-6);
        assert_true(value(a, "blocks_of_16") < 1);
    }
}

static void test_eval_run_all(void) {
    char words[600];
    make_folder();
    for (int turn = 0; turn < 2; turn++) {
        snprintf(words, sizeof words,
                 "--lengths 640,900 --needles 9 --texts 3 --following 64 --late-tokens 16 "
                 "--answer-tokens 8 --keep-blocks 6 --keep 1 --again --each-step --drop .5 --lists "
                 "layer,head "
                 "--quarters 1 --sizes 16,128 --json %s --svg %s --answers %s",
                 in_folder(turn ? "b.json" : "a.json"), in_folder("a.svg"), in_folder("answers"));
        if (eval(words) != 0) fail_msg("%s", said);
    }
    char *text = read_all("a.json"), *again = read_all("b.json"), *map = read_all("a.svg");
    char *tables = read_all("tables"), *answers = read_all("answers");
    json_t *j = json_loads(text, JSON_REJECT_DUPLICATES, NULL), *k = json_loads(again, 0, NULL);
    assert_non_null(j);
    check_needles(j, 18);
    check_texts(j);
    /* Selecting anew inside an answer changes it where blocks are left out, and only there. */
    json_t *needles = json_object_get(j, "needles");
    assert_true(value(column(needles, "mean 1 each step"), "minus_dense") == 0);
    assert_non_null(column(needles, "observed 6 again"));
    json_object_del(j, "minutes");
    json_object_del(k, "minutes");
    assert_true(json_equal(j, k)); /* one seed, one result */
    assert_true(strncmp(map, "<svg ", 5) == 0 && strstr(map, "oracle 6"));
    assert_non_null(strstr(tables, "Needles: 18 prompts"));
    assert_non_null(strstr(tables, "observed 1: 18 of 18 prompts have no more blocks"));
    int n = 0, n_anew = 0;
    char *save;
    for (char *l = strtok_r(answers, "\n", &save); l; l = strtok_r(NULL, "\n", &save), n++) {
        json_t *o = json_loads(l, 0, NULL), *a = json_object_get(o, "answers");
        assert_int_equal(json_object_size(a), json_array_size(json_object_get(j, "columns")));
        assert_string_equal(json_string_value(json_object_get(a, "dense")),
                            json_string_value(json_object_get(a, "observed 1")));
        n_anew += strcmp(json_string_value(json_object_get(a, "mean 6")),
                         json_string_value(json_object_get(a, "mean 6 each step"))) != 0;
        if (strcmp(json_string_value(json_object_get(o, "kind")), "late"))
            assert_string_equal(json_string_value(json_object_get(a, "mean 6")),
                                json_string_value(json_object_get(a, "mean 6 again")));
        json_decref(o);
    }
    assert_int_equal(n, 18);
    assert_true(n_anew > 0);
    json_decref(j);
    json_decref(k);
    free(text);
    free(again);
    free(map);
    free(tables);
    free(answers);
    remove_folder();
}

static void write_in(const char *text) {
    FILE *f = fopen(in_folder("in"), "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_eval_run_bad_input(void) {
    static const struct {
        const char *words, *says;
    } bad[] = {
        {"--selectors observd", "'observd' is no selector"},
        {"--keep 1.5", "1.5"},
        {"--keep 0", "\"0\""},
        {"--keep-blocks 0", "'0' is no number of blocks"},
        {"--lengths 64", "128"},
        {"--lengths 2040", "the context is 2048 tokens"},
        {"--needles 0 --lengths 2040", "leaves 8 of the context's 2048"},
        {"--needles 0 --texts 0", "nothing to do"},
        {"--depths 101", "0..100"},
        {"--kinds single,double", "'double' is not one of"},
        {"--text IN --lengths 700 --late-tokens 16 --following 64",
         "764 tokens of text are needed, the longest text ('in') has 600"},
        {"--text nothing-there", "nothing-there"},
        {"--scorer nothing-there", "nothing-there"},
        {"--selectors scorer", "needs a scorer's file"},
        {"--calibrate oracl", "'oracl' is no selector"},
        {"--longbench IN", "line 1"},
        {"--longbench /", "not a regular file"},
        {"--json nothing-there/a", "nothing-there/a: cannot be written"},
        {"--svg /", "Is a directory"},
        {"--calibrate observed --selectors recent", "nothing would be left out"},
        {"--calibrate recent --keep-blocks 2048 --lengths 640", "nothing would be left out"},
        {"--calibrate recent --keep-blocks 4 --lengths 640 --calibrate-into nothing-there",
         "nothing-there"},
        {"--ctx-size 4096", "the model's context is 2048"},
        {"--texts 0 --lengths 2000 --kinds single --exact 4", "exact answer of 64"},
    };
    char text[601], words[400];
    make_folder();
    memset(text, 'a', 600);
    text[600] = 0;
    write_in(text);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const char *in = strstr(bad[i].words, "IN");
        if (in)
            snprintf(words, sizeof words, "%.*s%s%s", (int)(in - bad[i].words), bad[i].words,
                     in_folder("in"), in + 2);
        else snprintf(words, sizeof words, "%s", bad[i].words);
        assert_int_equal(eval(words), 1);
        if (!strstr(said, bad[i].says)) fail_msg("%s: '%s', not '%s'", words, said, bad[i].says);
    }
    remove_folder();
}

/* Exact answers come from an engine: all equal dense ones, and where blocks are lost dense passes
 * emit more than a token each. */
static void test_eval_run_exact(void) {
    char words[400];
    make_folder();
    snprintf(words, sizeof words,
             "--lengths 640,900 --needles 5 --texts 0 --kinds single --answer-tokens 4 "
             "--selectors recent --keep-blocks 6 --exact 4 --exact-tokens 12 --json %s",
             in_folder("a.json"));
    json_t *j = eval_json(words), *x = json_object_get(j, "exact");
    char *tables = read_all("tables");
    assert_int_equal(value(x, "prompts"), 10);
    assert_int_equal(value(x, "equal"), 10);
    assert_int_equal(value(x, "sparse"), 10);
    assert_int_equal(value(x, "tokens"), 120);
    assert_int_equal(value(x, "tokens_of_passes"), 110); /* the first is the prompt's */
    assert_in_range((int)value(x, "passes"), 30, 110);
    assert_true(value(x, "accepted") <= value(x, "provisional"));
    assert_non_null(strstr(tables, "10 of 10 equal the dense ones"));
    json_decref(j);
    free(tables);
    remove_folder();
}

static void test_eval_run_tasks(void) {
    char words[400];
    make_folder();
    FILE *f = fopen(in_folder("in"), "w");
    assert_non_null(f);
    fprintf(f, "{\"context\": \"The cat sat.\", \"input\": \"Who sat?\", \"answers\": [\"the "
               "cat\", \"a cat\"], \"dataset\": \"d1\", \"length\": 3}\n\n");
    fprintf(f, "{\"context\": \"");
    for (int i = 0; i < 4000; i++) fputc(i % 7 ? 'x' : ' ', f);
    fprintf(f, "\", \"input\": \"\", \"answers\": \"x\", \"dataset\": \"d2\"}\n");
    fclose(f);
    snprintf(words, sizeof words, "--longbench %s --task-tokens 8 --keep-blocks 4 --json %s",
             in_folder("in"), in_folder("a.json"));
    json_t *j = eval_json(words), *tasks = json_object_get(j, "tasks");
    char *tables = read_all("tables");
    assert_int_equal(value(tasks, "prompts"), 2);
    assert_int_equal(value(tasks, "cut"), 1);
    assert_int_equal(json_array_size(json_object_get(tasks, "datasets")), 2);
    assert_non_null(strstr(tables, "1 were too long and lost their middle"));
    assert_null(strstr(tables, "nan")); /* one task of each file: no spread is a dash */
    assert_non_null(strstr(tables, "[     -,      -]"));
    json_decref(j);
    free(tables);
    /* A bad line is named before the work begins, needles or not; a file of nothing, too. */
    write_in("{\"context\": \"\", \"input\": \"\", \"answers\": [\"a\"]}\n{\n");
    snprintf(words, sizeof words,
             "--needles 1 --lengths 640 --kinds single --answers %s "
             "--longbench %s",
             in_folder("answers"), in_folder("in"));
    assert_int_equal(eval(words), 1);
    assert_non_null(strstr(said, "line 2: no JSON"));
    assert_int_equal(access(in_folder("answers"), F_OK), -1);
    write_in("\n  \n");
    snprintf(words, sizeof words, "--longbench %s", in_folder("in"));
    assert_int_equal(eval(words), 1);
    assert_non_null(strstr(said, "holds no task"));
    remove_folder();
}

/* Where one layer is deep, lists by layer are one list: it is judged as such. (It was taken for one
 * of quarters, which it has not.) */
static void test_eval_run_one_deep_layer(void) {
    char words[400];
    make_folder();
    snprintf(words, sizeof words,
             "--select-layer 2 --lengths 640 --needles 0 --texts 1 --following 64 --selectors "
             "observed --keep-blocks 6 --lists layer,head --json %s",
             in_folder("a.json"));
    json_t *j = eval_json(words), *found = json_object_get(j, "text");
    json_t *one = column(found, "observed 6"), *layer = column(found, "observed 6 by layer");
    static const char *const same[] = {"mass", "recall", "mean"};
    for (int i = 0; i < 3; i++) assert_true(value(one, same[i]) == value(layer, same[i]));
    assert_true(value(column(found, "observed 6 by head"), "mass") > value(one, "mass"));
    json_decref(j);
    remove_folder();
}

static void test_eval_run_calibrates(void) {
    char words[400];
    make_folder();
    snprintf(words, sizeof words,
             "--lengths 640,1280 --needles 2 --texts 1 --following 64 --kinds single "
             "--selectors recent --keep-blocks 8,6,4 --calibrate recent --json %s",
             in_folder("a.json"));
    json_t *j = eval_json(words);
    json_t *points = json_object_get(json_object_get(j, "curve"), "points");
    assert_int_equal(json_array_size(points), 2);
    double a = value(json_array_get(points, 0), "keep"),
           b = value(json_array_get(points, 1), "keep");
    assert_true(a > 0 && a <= 1 && b > 0 && b <= 1 && b * 1280 >= a * 640 - 1e-6);
    json_decref(j);
    remove_folder();
}

/* ---- A scorer ---- */

/* A late scorer of random weights for the tiny model. */
static void write_scorer(int layer) {
    struct target_scorer_file shape = {.kind = KERN_SCORE_LATE,
                                       .layer = layer,
                                       .hidden = 64,
                                       .n_heads = 2,
                                       .head_dim = 8,
                                       .n_queries = 32,
                                       .normed = true,
                                       .block = 64},
                              *f;
    struct tiny_options t;
    struct model_source *src;
    struct err e = {0};
    tiny_model_default(&t);
    const char *model = tiny_model_file(&t);
    assert_ok(model_source_open(&src, model, &e), e);
    shape.fingerprint = model_source_fingerprint(src);
    model_source_close(src);
    unlink(model);
    assert_ok(target_scorer_make(&f, &shape, &e), e);
    for (uint32_t i = 0; i < 16 * 64; i++) {
        f->a[i] = rng_uniform(1, 0, RNG_TEST, i) - .5f;
        f->b[i] = rng_uniform(2, 0, RNG_TEST, i) - .5f;
    }
    assert_ok(target_scorer_write(in_folder("in"), f, &e), e);
    target_scorer_free(f);
}

/* A file's scorer is a column, once and selecting anew; its curve is fitted and written into it,
 * and read as what `--keep curve` means from then on. */
static void test_eval_run_scorer(void) {
    char words[500];
    struct err e = {0};
    make_folder();
    write_scorer(1);
    snprintf(words, sizeof words,
             "--lengths 640,1280 --needles 4 --texts 1 --following 64 --late-tokens 16 --scorer %s "
             "--selectors scorer,recent --keep-blocks 8,6 --again --calibrate scorer --within 100 "
             "--within-loss 10 --calibrate-into %s --json %s",
             in_folder("in"), in_folder("in"), in_folder("a.json"));
    json_t *j = eval_json(words), *found = json_object_get(j, "text");
    assert_true(value(column(found, "scorer:in 6"), "mass") > 0);
    assert_true(value(column(found, "scorer:in 6"), "mean") !=
                value(column(found, "recent 6"), "mean"));
    assert_non_null(column(json_object_get(j, "needles"), "scorer:in 8 again"));
    json_decref(j);
    struct target_scorer_file *f;
    assert_ok(target_scorer_read(&f, in_folder("in"), &e), e);
    assert_int_equal(f->curve.n,
                     2); /* everything is within: 6 of 10 blocks, then what must not fall */
    assert_near(f->curve.at[0].keep, .6, 1e-4);
    assert_near(f->curve.at[1].keep, .6 / (1 + log(2)), 1e-4);
    target_scorer_free(f);
    snprintf(words, sizeof words,
             "--lengths 1280 --needles 1 --texts 0 --kinds single --scorer %s --selectors scorer "
             "--keep curve --min-blocks 2 --reserve 0 --json %s",
             in_folder("in"), in_folder("a.json"));
    if (eval(words) != 0) fail_msg("%s", said);
    char *tables = read_all("tables");
    assert_non_null(strstr(tables, " 8/20 ")); /* ceil(.3544 * 20) */
    free(tables);
    write_scorer(2);
    snprintf(words, sizeof words, "--scorer %s", in_folder("in"));
    assert_int_equal(eval(words), 1);
    assert_non_null(strstr(said, "a scorer of layer 2, asked for is layer 1"));
    remove_folder();
}

/* ---- Calibration by hand ---- */

static void test_eval_curve(void) {
    /* 4,096: 32 blocks lose 1 point, 24 lose 5, 16 none (by chance: it does not count).
     * 8,192: 16 lose nothing, but tokens kept may not fall. 16,384: none is good enough. */
    static const struct eval_curve_trial t[] = {
        {4096, 16 * 64, true, false, 0, 0},     {4096, 24 * 64, true, false, -.05, 0},
        {8192, 16 * 64, true, true, .01, .001}, {4096, 32 * 64, true, true, -.01, .02},
        {16384, 32 * 64, true, true, 0, .2},    {8192, 32 * 64, true, true, 0, 0},
    };
    struct eval_calibration limits = {2, .03};
    struct target_curve c;
    eval_curve_fit(&c, t, 6, &limits);
    assert_int_equal(c.n, 3);
    assert_near(c.at[0].keep, .5, 1e-9);
    assert_near(c.at[1].keep, .5 / (1 + log(2)), 1e-4);
    assert_near(c.at[2].keep, 1, 0);
    /* Kept tokens never fall, between the points neither. */
    double before = 0;
    for (int n = 4096; n <= 16384; n += 8) {
        double kept = target_curve_keep(&c, n) * n;
        if (kept < before - 1e-6) fail_msg("%d tokens keep %f, fewer keep %f", n, kept, before);
        before = kept;
    }
    limits.loss = 1;
    eval_curve_fit(&c, t, 6, &limits);
    assert_near(c.at[2].keep, .5 / (1 + log(2)) / (1 + log(2)), 1e-4);
    struct strbuf b = {0};
    eval_curve_append(&b, &c);
    assert_true(strncmp(b.data, "4096:0.5,8192:0.2954,16384:0.17", 31) == 0);
    struct target_settings s;
    struct err e = {0};
    target_settings_unset(&s);
    assert_ok(target_keep_parse(&s, b.data, b.n, &e), e); /* as the flag reads it */
    assert_int_equal(s.curve.n, 3);
    strbuf_deinit(&b);
}

static void test_eval_recall(void) {
    /* Pinned: 0, 8, 9 of ten; the best two others are 4 and 6. */
    static const float truth[] = {9, 1, 2, 1, 8, 1, 7, 1, 9, 9};
    static const int32_t half[] = {0, 2, 4, 8, 9}, none[] = {0, 8, 9}, both[] = {0, 4, 6, 8, 9};
    assert_near(eval_recall(truth, 10, half, 5, 2), .5, 0);
    assert_near(eval_recall(truth, 10, both, 5, 2), 1, 0);
    assert_near(eval_recall(truth, 10, none, 3, 2), 1, 0);
}

/* ---- Task files ---- */

static void test_eval_task_lines(void) {
    static const char good[] = "{\"context\": \"c \\u00e9\", \"input\": \"i\", \"answers\": "
                               "[\"x\", \"y\"], \"length\": 5, \"all_classes\": null}";
    static const char *const bad[] = {
        "",
        "[]",
        "{}",
        "{\"context\": 1, \"input\": \"\", \"answers\": [\"\"]}",
        "{\"context\": \"\", \"answers\": [\"\"]}",
        "{\"context\": \"\", \"input\": \"\", \"answers\": []}",
        "{\"context\": \"\", \"input\": \"\", \"answers\": [1]}",
        "{\"context\": \"\", \"input\": \"\", \"answers\": [\"a\"], \"dataset\": 3}"};
    struct eval_task_line t;
    struct err e = {0};
    assert_ok(eval_task_line_read(&t, good, sizeof good - 1, &e), e);
    assert_string_equal(t.context, "c \xc3\xa9");
    assert_int_equal(t.n_answers, 2);
    assert_null(t.dataset);
    eval_task_line_close(&t);
    for (size_t n = 0; n < sizeof good - 1; n++) { /* cut at every byte */
        char *cut = malloc(n ? n : 1);
        assert_non_null(cut);
        memcpy(cut, good, n);
        assert_int_equal(eval_task_line_read(&t, cut, n, &e), E_FORMAT);
        free(cut);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(eval_task_line_read(&t, bad[i], strlen(bad[i]), &e), E_FORMAT);
    char *many = malloc(400001); /* a million values would cost tens of megabytes */
    assert_non_null(many);
    for (int i = 0; i < 200000; i++) memcpy(many + 2 * i, i ? ",0" : "[0", 2);
    assert_int_equal(eval_task_line_read(&t, many, 400000, &e), E_TOO_LONG);
    free(many);
}

const struct test tests[] = {
    {"eval_run_all", TEST_QUICK, 60000, test_eval_run_all},
    {"eval_run_bad_input", TEST_QUICK, 60000, test_eval_run_bad_input},
    {"eval_run_exact", TEST_QUICK, 60000, test_eval_run_exact},
    {"eval_run_tasks", TEST_QUICK, 60000, test_eval_run_tasks},
    {"eval_run_one_deep_layer", TEST_QUICK, 60000, test_eval_run_one_deep_layer},
    {"eval_run_calibrates", TEST_QUICK, 60000, test_eval_run_calibrates},
    {"eval_run_scorer", TEST_QUICK, 60000, test_eval_run_scorer},
    {"eval_curve", TEST_QUICK, 20000, test_eval_curve},
    {"eval_recall", TEST_QUICK, 20000, test_eval_recall},
    {"eval_task_lines", TEST_QUICK, 20000, test_eval_task_lines},
    {0},
};
