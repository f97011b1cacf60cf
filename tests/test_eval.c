/* The parts of `tandem eval` that need no model: needles, prompts of an exact length, scores of
 * answers, intervals of pairs, columns, heat maps. Statistics are checked against figures worked
 * out by hand or by other software, named beside them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cmd/eval_apart.h"
#include "cmd/eval_needle.h"
#include "cmd/eval_stats.h"
#include "cmd/eval_svg.h"
#include "cmd/eval_text.h"
#include "tests/harness.h"

/* ---- Needles ---- */

/* Every needle: its fact holds the value, no other fact does, the question does not, and the same
 * (seed, index) gives the same again. */
static void test_eval_needles(void) {
    int seen[EVAL_N_NEEDLE_KINDS][8] = {{0}};
    for (int i = 0; i < 2000; i++) {
        struct eval_needle a, b;
        enum eval_needle_kind kind = (enum eval_needle_kind)(i % EVAL_N_NEEDLE_KINDS);
        eval_needle_make(&a, kind, 7, (uint32_t)i, .3);
        eval_needle_make(&b, kind, 7, (uint32_t)i, .3);
        assert_memory_equal(&a, &b, sizeof a);
        assert_true(a.n_facts == (kind == EVAL_NEEDLE_MANY || kind == EVAL_NEEDLE_HOP ? 4 : 1));
        assert_true(eval_says(a.fact[0].text, a.value));
        assert_false(eval_says(a.question, a.value));
        assert_near(a.fact[0].depth, .3, 0);
        for (int j = 1; j < a.n_facts; j++) {
            if (eval_says(a.fact[j].text, a.value))
                fail_msg("'%s' is told twice: %s", a.value, a.fact[j].text);
            assert_true(a.fact[j].depth >= 0 && a.fact[j].depth < 1);
        }
        seen[kind][a.wording]++;
        size_t end = strlen(a.fact[0].text);
        assert_true(a.fact[0].text[end - 1] == '.');
        assert_true(a.question[strlen(a.question) - 1] == '?');
    }
    for (int k = 0; k < EVAL_N_NEEDLE_KINDS; k++) {
        int n = 0;
        for (int w = 0; w < 8; w++) n += seen[k][w] > 40;
        assert_int_equal(n, k == EVAL_NEEDLE_HOP ? 3 : 5);
    }
}

static void test_eval_says(void) {
    assert_true(eval_says("It is 12345.", "12345"));
    assert_false(eval_says("It is 123456.", "12345"));
    assert_false(eval_says("It is 912345", "12345"));
    assert_true(eval_says("x912345 12345", "12345"));
    assert_true(eval_says("The Jasmine!", "jasmine"));
    assert_false(eval_says("jasmines", "jasmine"));
    assert_false(eval_says("", "a"));
    assert_false(eval_says("anything", ""));
}

/* ---- Statistics ---- */

/* 10 pairs, 3 better, 1 worse, 6 equal (4 of them right): rate .7, dense .5. Wilson's interval of
 * 7/10 is (.3968, .8922); Agresti and Min: b = 3.5, c = 1.5 of 12: 2/12 +- 1.95996 sqrt(5 - 4/12)
 * / 12. */
static void test_eval_pairs(void) {
    double a[] = {1, 1, 1, 0, 1, 1, 1, 1, 0, 0}, d[] = {0, 0, 0, 1, 1, 1, 1, 1, 0, 0};
    struct eval_paired p = eval_pair(a, d, 10, true);
    assert_int_equal(p.n_better, 3);
    assert_int_equal(p.n_worse, 1);
    assert_near(p.mean, .7, 1e-12);
    assert_near(p.lo, .39678, 1e-5);
    assert_near(p.hi, .89221, 1e-5);
    assert_near(p.diff, .2, 1e-12);
    assert_near(p.diff_lo, 2 / 12. - 1.959964 * sqrt(5 - 4 / 12.) / 12, 1e-6);
    assert_near(p.diff_hi, 2 / 12. + 1.959964 * sqrt(5 - 4 / 12.) / 12, 1e-6);
    /* Differences 1 1 1 -1 0...: sample deviation sqrt((4 - 10 * .04) / 9). */
    assert_near(p.se, sqrt((4 - .4) / 9 / 10), 1e-12);
    /* Nothing differs: no certainty all the same. */
    p = eval_pair(d, d, 10, true);
    assert_true(p.diff == 0 && p.diff_lo < -.05 && p.diff_hi > .05);
    /* Values: mean 2, deviation 1. */
    double x[] = {1, 2, 3}, zero[] = {0, 0, 0};
    p = eval_pair(x, zero, 3, false);
    assert_near(p.mean, 2, 1e-12);
    assert_near(p.hi - p.mean, 1.959964 / sqrt(3), 1e-6);
    assert_int_equal(eval_pair(NULL, NULL, 0, true).n, 0);
    p = eval_pair(x, zero, 1, false);
    assert_true(p.mean == 1 && isnan(p.se) && isnan(p.diff_lo) && isnan(p.hi));
    p = eval_pair(d, d, 1, true); /* of shares the intervals hold all the same */
    assert_true(isnan(p.se) && p.hi > .7 && p.diff_hi > .5);
}

static void test_eval_answer_scores(void) {
    assert_near(eval_f1("The cat sat.", "a cat sat down"), 2 * 2 / 5., 1e-12);
    assert_near(eval_f1("cat cat", "cat"), 2 * 1 / 3., 1e-12);
    assert_near(eval_f1("", "cat"), 0, 0);
    assert_near(eval_f1("the", "a"), 1, 0);
    assert_near(eval_exact("The  Cat!", "cat"), 1, 0);
    assert_near(eval_exact("cats", "cat"), 0, 0);
    /* police killed the gunman / police kill the gunman (Lin 2004): 3 of 4 in order. */
    assert_near(eval_rouge_l("police kill the gunman", "police killed the gunman"), .75, 1e-12);
    assert_near(eval_rouge_l("the gunman kill police", "police killed the gunman"), .5, 1e-12);
    char *far = malloc(20001); /* 10,000 words: cut, not overrun */
    assert_non_null(far);
    for (int i = 0; i < 20000; i++) far[i] = i % 2 ? ' ' : (char)('b' + i / 2 % 20);
    far[20000] = 0;
    assert_near(eval_rouge_l(far, far), 1, 0);
    assert_near(eval_f1(far, far), 1, 0);
    free(far);
}

/* ---- Texts and prompts ---- */

static void test_eval_texts(void) {
    struct err e = {0};
    struct tokenizer *t;
    static struct eval_texts v;
    assert_ok(tokenizer_open_bytes(&t, 256, &e), e);
    assert_ok(eval_texts_shipped(&v, t, &e), e);
    assert_int_equal(v.n, 5);
    for (int i = 0; i < v.n; i++) {
        assert_true(v.at[i].ids.n > 60000);
        assert_int_equal(v.at[i].bytes.n, v.at[i].ids.n); /* a token a byte */
        assert_int_equal(v.at[i].begin[100], 100);
    }
    int n_dropped;
    assert_ok(eval_texts_drop_short(&v, 100000, &n_dropped, &e), e);
    assert_int_equal(n_dropped, 1); /* technical */
    assert_int_equal(eval_texts_drop_short(&v, 500000, &n_dropped, &e), E_INVALID);
    assert_non_null(strstr(e.message, "500000"));

    struct eval_speech plain = {t, NULL};
    for (int i = 0; i < 40; i++) {
        struct eval_needle needle;
        struct tokens ids = {0};
        struct strbuf text = {0};
        int n_tokens = 1000 + 317 * i, n_used;
        double depth = i % 5 / 4.0;
        eval_needle_make(&needle, (enum eval_needle_kind)(i % EVAL_N_NEEDLE_KINDS), 3, (uint32_t)i,
                         depth);
        int first = eval_text_place(&v.at[i % v.n], n_tokens, 3, (uint32_t)i);
        assert_ok(
            eval_prompt_needle(&plain, &v.at[i % v.n], first, &needle, n_tokens, &ids, &n_used, &e),
            e);
        if ((int)ids.n > n_tokens || (int)ids.n < n_tokens - 8)
            fail_msg("%zu tokens, wanted %d", ids.n, n_tokens);
        tokenizer_decode(t, ids.ids, ids.n, false, &text);
        for (int j = 0; j < needle.n_facts; j++) {
            const char *at = strstr(text.data, needle.fact[j].text);
            assert_non_null(at);
            /* At its depth, but for the way to the next sentence and what the other facts push. */
            double where = (double)(at - text.data) / n_tokens;
            assert_near(where, needle.fact[j].depth, 600.0 / n_tokens + .02);
        }
        assert_int_equal(strstr(text.data, needle.question) != NULL,
                         needle.kind != EVAL_NEEDLE_LATE);
        strbuf_deinit(&text);
        tokens_deinit(&ids);
    }
    struct eval_needle needle;
    struct tokens ids = {0};
    eval_needle_make(&needle, EVAL_NEEDLE_MANY, 1, 1, .5);
    assert_int_equal(eval_prompt_needle(&plain, &v.at[0], 0, &needle, 64, &ids, NULL, &e),
                     E_INVALID);
    assert_non_null(strstr(e.message, "64 tokens"));
    tokens_deinit(&ids);
    eval_texts_close(&v);
    tokenizer_close(t);
}

/* ---- Columns ---- */

static void test_eval_columns(void) {
    struct err e = {0};
    struct eval_wishes w = {
        .selectors = "observed,recent,dense,oracle", .keep_blocks = "32,12", .keep = ".25"};
    static struct eval_columns c;
    target_settings_unset(&w.base);
    assert_ok(eval_columns_make(&c, &w, &e), e);
    assert_int_equal(c.n, 10);
    assert_string_equal(c.at[0].name, "dense");
    assert_string_equal(c.at[2].name, "observed 12");
    assert_string_equal(c.at[3].name, "observed .25");
    assert_string_equal(c.at[9].name, "oracle .25");

    w.selectors = "observed,recent";
    w.reserve = "0,.02";
    w.smooth = "0,.5";
    w.anew[EVAL_AGAIN] = true;
    w.keep = NULL;
    assert_ok(eval_columns_make(&c, &w, &e), e);
    assert_int_equal(c.n, 1 + 2 * 2 * 2 * 2 + 2 * 2);
    assert_string_equal(c.at[1].name, "observed 32 r0 s0");
    assert_string_equal(c.at[16].name, "observed 12 r.02 s.5 again");
    assert_near(c.at[16].settings.reserve, .02, 1e-12);
    assert_near(c.at[16].settings.smooth, .5, 1e-12);
    assert_int_equal(c.at[16].settings.keep_blocks, 12);
    assert_string_equal(c.at[20].name, "recent 12 r.02");
    assert_true(eval_column_is_plain(&c.at[20]) && !eval_column_is_plain(&c.at[16]));
    w.anew[EVAL_AGAIN] = false;
    w.recheck = true;
    w.smooth = w.reserve = NULL;
    assert_ok(eval_columns_make(&c, &w, &e), e);
    assert_int_equal(c.n, 1 + 2 + 2 + 2);
    assert_string_equal(c.at[4].name, "observed 12 border");
    assert_int_equal(c.at[4].settings.recheck, TARGET_RECHECK_BORDER);
    assert_int_equal(c.at[2].settings.recheck, TARGET_RECHECK_OFF);
    assert_true(eval_column_is_plain(&c.at[2]) && !eval_column_is_plain(&c.at[4]));
    w = (struct eval_wishes){.selectors = "observed,oracle", .keep_blocks = "32,12", .keep = ".25"};
    target_settings_unset(&w.base);
    assert_ok(eval_columns_make(&c, &w, &e), e);

    /* 100 blocks whose mass grows to the middle: 12 kept are the first, the newest three, the best
     * eight of the middle; reserve one more. */
    float mass[100], scratch[100];
    int32_t kept[100];
    for (int i = 0; i < 100; i++) mass[i] = i < 50 ? (float)i : (float)(99 - i);
    struct eval_scores s = {.n_tokens = 6400, .seed = 5, .observed = mass, .oracle = mass};
    int n = eval_column_select(&c.at[2], &s, scratch, kept);
    assert_int_equal(n, 13);
    assert_int_equal(kept[0], 0);
    assert_int_equal(kept[n - 1], 99);
    int near = 0;
    for (int i = 0; i < n; i++) near += kept[i] >= 46 && kept[i] <= 53;
    assert_int_equal(near, 8);
    assert_int_equal(eval_column_select(&c.at[0], &s, scratch, kept), 100);
    s.n_tokens = 2000; /* below the floor of 32 blocks */
    assert_int_equal(eval_column_select(&c.at[3], &s, scratch, kept), 32);

    static const struct {
        const char *selectors, *blocks, *keep, *says;
        int code;
    } bad[] = {
        {"observd", "32", NULL, "'observd' is no selector", E_RANGE},
        {"observed", "0", NULL, "'0' is no number of blocks", E_RANGE},
        {"observed", "12x", NULL, "'12x' is no number of blocks", E_RANGE},
        {"observed", "1048577", NULL, "[1, 1048576]", E_RANGE},
        {"observed", NULL, "1.5", "1.5", E_RANGE},
        {"observed", NULL, "0", "\"0\"", E_RANGE},
        {"observed", NULL, NULL, "nothing says how much", E_INVALID},
        {"scorer", "32", NULL, "needs a scorer's file", E_INVALID},
        {"observed", "1,2,3,4,5,6,7,8,9", NULL, "'9' is one too many", E_RANGE},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        w = (struct eval_wishes){
            .selectors = bad[i].selectors, .keep_blocks = bad[i].blocks, .keep = bad[i].keep};
        target_settings_unset(&w.base);
        assert_int_equal(eval_columns_make(&c, &w, &e), bad[i].code);
        if (!strstr(e.message, bad[i].says)) fail_msg("%s: not %s", e.message, bad[i].says);
    }
}

/* A model of two deep layers with two KV heads, a prompt of 100 blocks: the j-th quarter of layer
 * l's head h measures by a number that tells which it is. */
static void test_eval_apart(void) {
    static const char *const bad[] = {"heads", "0", "4", "64", "1.5"};
    static struct eval_columns c;
    struct eval_wishes w = {.selectors = "observed,recent",
                            .keep_blocks = "12",
                            .reserve = "0",
                            .lists = "layer,head",
                            .select2 = "6",
                            .quarters = "2",
                            .sizes = "16,32,128",
                            .deep = {.first = 5, .n_layers = 2, .n_heads = 2}};
    struct err e = {0};
    struct eval_apart a;
    float mass[4][100], quarter[4][100][4], most[100];
    target_settings_unset(&w.base);
    assert_ok(eval_columns_make(&c, &w, &e), e);
    assert_int_equal(c.n, 1 + 1 + 7 + 1);
    assert_string_equal(c.at[2].name, "observed 12 by layer");
    assert_string_equal(c.at[4].name, "observed 12 from 6");
    assert_string_equal(c.at[5].name, "observed 12 q2");
    assert_string_equal(c.at[8].name, "observed 12 of 128");
    assert_true(!eval_column_is_apart(&c.at[1]) && eval_column_is_apart(&c.at[8]));
    for (int i = 1; i < c.n; i++)
        assert_int_equal(eval_column_is_plain(&c.at[i]), i == 1 || i == 9);

    /* Blocks 20 + 10 i .. 27 + 10 i are the i-th's best; of each block the quarter b % 4, then the
     * one behind it. */
    for (int i = 0; i < 4; i++)
        for (int b = 0; b < 100; b++) {
            mass[i][b] = b / 10 == 2 + i && b % 10 < 8 ? 1.0f : .001f * (float)(b % 7);
            for (int q = 0; q < 4; q++)
                quarter[i][b][q] = mass[i][b] * (q == b % 4 ? 1 : q == (b + 1) % 4 ? .5f : .1f);
        }
    struct target_seen seen = {&mass[0][0], &quarter[0][0][0], 2, 2, 100};
    struct eval_scores s = {.n_tokens = 6400 - 10, .seed = 5, .observed = most};
    assert_ok(eval_apart_open(&a, &w.deep, c.n, 100, &e), e);
    eval_apart_see(&a, &seen, 100, most);
    assert_true(most[20] == 1 && most[57] == 1 && most[58] < 1);

    struct target_kept k;
    assert_int_equal(eval_apart_select(&a, 3, &c.at[3], &s, &k), 12); /* by head */
    assert_non_null(k.own);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(k.own[i].n, 12);
        assert_int_equal(k.own[i].block[1], 20 + 10 * i);
        assert_int_equal(k.own[i].block[8], 27 + 10 * i);
    }
    assert_int_equal(eval_apart_select(&a, 2, &c.at[2], &s, &k), 12); /* by layer: ties go down */
    assert_ptr_equal(k.own[0].block, k.own[1].block);
    assert_int_equal(k.own[0].block[1], 20);
    assert_int_equal(k.own[3].block[1], 40);
    assert_int_equal(eval_apart_select(&a, 4, &c.at[4], &s, &k), 12); /* from 6 */
    assert_int_equal(k.own[1].block[1], 20);
    assert_int_equal(k.own[2].block[1], 40);

    assert_int_equal(eval_apart_select(&a, 5, &c.at[5], &s, &k), 8); /* 4 whole, 8 half */
    assert_int_equal(k.n, 12);
    for (int i = 0; i < 12; i++) {
        int b = k.block[i];
        bool pinned = b == 0 || b >= 97;
        assert_int_equal(k.quarters[i], pinned ? 15 : 1 << b % 4 | 1 << (b + 1) % 4);
    }

    /* Of 16: the first 16 tokens, the newest 192, the best quarters of the blocks from 20 on: 12
     * times 4 in all, of which 32 measure 1; the next best 3 measure a half. Whole is the newest.
     */
    assert_int_equal(eval_apart_select(&a, 6, &c.at[6], &s, &k), 12);
    int n_best = 0, n_half = 0, n_quarters = 0;
    for (int i = 0; i < k.n; i++) {
        int b = k.block[i], bits = k.quarters[i];
        n_quarters += __builtin_popcount((unsigned)bits);
        if (b == 0) assert_int_equal(bits, 1);
        if (b >= 97) assert_int_equal(bits, 15);
        if (b < 20 || b > 57) continue;
        n_best += bits >> b % 4 & 1;
        n_half += bits >> (b + 1) % 4 & 1;
    }
    assert_int_equal(n_quarters, 48);
    assert_int_equal(n_best, 32);
    assert_int_equal(n_half, 3);
    assert_int_equal(eval_apart_select(&a, 7, &c.at[7], &s, &k), 12); /* of 32: halves */
    for (int i = 0; i < k.n; i++)
        if (k.block[i] >= 20 && k.block[i] <= 57)
            assert_true(k.quarters[i] == 3 || k.quarters[i] == 12 || k.quarters[i] == 15);
    assert_int_equal(eval_apart_select(&a, 8, &c.at[8], &s, &k), 12); /* of 128: pairs */
    assert_int_equal(k.n, 12);
    for (int i = 0; i < k.n; i += 2)
        assert_true(k.block[i] % 2 == 0 && k.block[i + 1] == k.block[i] + 1);
    s.n_tokens = 12 * 64; /* nothing is left out */
    assert_int_equal(eval_apart_select(&a, 3, &c.at[3], &s, &k), 0);
    eval_apart_close(&a);

    for (int i = 0; i < 5; i++) {
        w.drop = i == 4 ? bad[i] : NULL;
        w.lists = i == 0 ? bad[i] : NULL;
        w.select2 = i == 1 ? bad[i] : NULL;
        w.quarters = i == 2 ? bad[i] : NULL;
        w.sizes = i == 3 ? bad[i] : NULL;
        assert_int_equal(eval_columns_make(&c, &w, &e), E_RANGE);
        assert_non_null(strstr(e.message, bad[i]));
    }
    w = (struct eval_wishes){.selectors = "recent", .keep_blocks = "12", .sizes = "16"};
    target_settings_unset(&w.base);
    assert_int_equal(eval_columns_make(&c, &w, &e), E_INVALID);
    assert_non_null(strstr(e.message, "'of 16'"));
}

/* ---- Heat map ---- */

static void test_eval_svg(void) {
    struct strbuf b = {0};
    const char *names[] = {"dense", "a<b & \"c\""};
    int lengths[] = {2048, 7800}, count[] = {3, 3, 3, 0};
    double depths[] = {.1, .9}, share[] = {0, .5, 1, NAN, .25, .75, .333, NAN}, whole[] = {.5, .4};
    struct eval_heat h = {"Title", "sub", 2, 2, 2, names, lengths, depths, share, whole, count};
    eval_svg_append(&b, &h);
    assert_false(b.failed);
    assert_true(strncmp(b.data, "<svg ", 5) == 0);
    assert_non_null(strstr(b.data, "a&lt;b &amp; &quot;c&quot;"));
    assert_null(strstr(b.data, "nan"));
    int cells = 0;
    for (const char *p = b.data; (p = strstr(p, "class=\"cell\"")); p++) cells++;
    assert_int_equal(cells, 8);
    assert_non_null(strstr(b.data, "fill=\"#301254\"")); /* 0 */
    assert_non_null(strstr(b.data, "fill=\"#fde725\"")); /* 1 */
    assert_string_equal(b.data + b.n - 7, "</svg>\n");
    strbuf_deinit(&b);
}

const struct test tests[] = {
    {"eval_needles", TEST_QUICK, 20000, test_eval_needles},
    {"eval_says", TEST_QUICK, 20000, test_eval_says},
    {"eval_pairs", TEST_QUICK, 20000, test_eval_pairs},
    {"eval_answer_scores", TEST_QUICK, 20000, test_eval_answer_scores},
    {"eval_texts", TEST_QUICK, 20000, test_eval_texts},
    {"eval_columns", TEST_QUICK, 20000, test_eval_columns},
    {"eval_apart", TEST_QUICK, 20000, test_eval_apart},
    {"eval_svg", TEST_QUICK, 20000, test_eval_svg},
    {0},
};
