/* Selections against a naive model that follows docs/sparsity.md word by word: counts by trying
 * k = 1, 2, ..., blocks by picking the best one that is left, one at a time. Thousands of random
 * settings and prefixes, scores with many ties, infinities and NaN. Then the ranges and the way
 * that a request's settings lie over the engine's. */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "target/target.h"

enum { MOST = 600 };

static uint32_t draw_idx;
static uint32_t draw(uint32_t n) {
    return rng_u32(77, 0, RNG_TEST, draw_idx++) % n;
}

/* ---- The twin ---- */

static double naive_keep(const struct target_settings *s, int n_tokens) {
    static const double tokens[] = {8192, 16384, 32768, 131072}, keep[] = {1, .15, .1, .05};
    if (s->keep != TARGET_CURVE) return s->keep;
    if (n_tokens <= tokens[0]) return 1;
    for (int i = 1; i < 4; i++)
        if (n_tokens <= tokens[i])
            return keep[i - 1] + (keep[i] - keep[i - 1]) * log2(n_tokens / tokens[i - 1]) /
                                     log2(tokens[i] / tokens[i - 1]);
    return .05;
}

static int naive_n_kept(const struct target_settings *s, int n_tokens, int n) {
    int k = 0, pinned = 0;
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL) return n;
    if (s->keep_blocks > 0) k = s->keep_blocks;
    else
        while (k < naive_keep(s, n_tokens) * n - 1e-9) k++;
    for (int i = 0; i < n; i++) pinned += i == 0 || n - i <= s->window_blocks;
    if (k < s->min_blocks) k = s->min_blocks;
    if (k < pinned) k = pinned;
    return k < n ? k : n;
}

static int naive_select(const struct target_settings *s, const struct target_view *v,
                        int32_t *kept) {
    static bool in[MOST];
    int n = 0, n_kept = 0, reserve = 0;
    while (n * 64 < v->n_tokens) n++;
    int k = naive_n_kept(s, v->n_tokens, n);
    for (int i = 0; i < n; i++) n_kept += in[i] = i == 0 || n - i <= s->window_blocks;
    for (; n_kept < k; n_kept++) {
        int best = -1;
        double best_score = 0;
        for (int i = 0; i < n; i++) {
            double score = 0;
            if (s->selector == TARGET_OBSERVED) score = (double)v->mass[i];
            if (s->selector == TARGET_RECENT) score = i;
            if (s->selector == TARGET_RANDOM)
                score = rng_u32(v->seed, (uint64_t)v->epoch, RNG_SELECTION,
                                0x80000000u + (uint32_t)i) >>
                        8;
            if (isnan(score)) score = -INFINITY; /* the tests use no other */
            if (in[i] || (best >= 0 && score <= best_score)) continue;
            best = i;
            best_score = score;
        }
        in[best] = true;
    }
    while (reserve < s->reserve * n - 1e-9 && n_kept < n) {
        int best = -1;
        uint32_t most = 0;
        for (int i = 0; i < n; i++) {
            uint32_t u = rng_u32(v->seed, (uint64_t)v->epoch, RNG_SELECTION, (uint32_t)i);
            if (in[i] || (best >= 0 && u <= most)) continue;
            best = i;
            most = u;
        }
        in[best] = true;
        reserve++;
        n_kept++;
    }
    n_kept = 0;
    for (int i = 0; i < n; i++)
        if (in[i]) kept[n_kept++] = i;
    return n_kept;
}

/* ---- Against it ---- */

static float draw_score(uint32_t kind) {
    switch (kind) {
    case 0: /* few values: ties everywhere */
        return (float)draw(3) - 1;
    case 1:
        return draw(8) ? (float)draw(1000) / 1000 : NAN;
    case 2:
        return draw(2) ? 0.0f : -0.0f;
    default: /* neighbours in f32, where bf16 would tie */
        return 0.5f + (float)draw(1000) * 0x1p-24f;
    }
}

static void draw_settings(struct target_settings *s) {
    struct target_settings none, some;
    target_settings_unset(&none);
    target_settings_unset(&some);
    some.selector = (int)draw(TARGET_N_SELECTORS);
    if (draw(3) == 0) some.keep_blocks = 1 + (int)draw(60);
    else if (draw(4)) some.keep = (1 + draw(100)) / 100.0;
    if (draw(2)) some.min_blocks = 1 + (int)draw(40);
    if (draw(2)) some.window_blocks = 1 + (int)draw(8);
    if (draw(2)) some.reserve = draw(5) / 50.0;
    *s = target_settings_resolve(&none, &some);
}

static void test_target_select(void) {
    static float mass[MOST], score[MOST];
    static int32_t got[MOST], want[MOST], in_place[MOST];
    for (int t = 0; t < 4000; t++) {
        struct target_settings s;
        draw_settings(&s);
        int n_tokens = 1 + (int)draw(t % 4 ? 64 * 100 : 64 * MOST), n = target_n_blocks(n_tokens);
        struct target_view v = {
            .n_tokens = n_tokens, .seed = draw(4), .epoch = (int)draw(3), .mass = mass};
        uint32_t kind = draw(4);
        for (int i = 0; i < n; i++) mass[i] = draw_score(kind);
        int n_want = naive_select(&s, &v, want), n_got = target_select(&s, &v, score, got);
        assert_int_equal(n_got, n_want);
        assert_memory_equal(got, want, (size_t)n_want * sizeof *want);
        /* What the counts say before is what comes out, and what is pinned is in it. */
        assert_int_equal(n_got, target_n_kept(&s, n_tokens) + target_n_reserve(&s, n_tokens));
        assert_int_equal(target_selects(&s, n_tokens), target_n_kept(&s, n_tokens) < n);
        assert_int_equal(got[0], 0);
        assert_int_equal(got[n_got - 1], n - 1);
        for (int i = 1; i < n_got; i++) assert_true(got[i - 1] < got[i]);
        /* The scores may lie where the scratch is. */
        assert_int_equal(target_select(&s, &(struct target_view){n_tokens, v.seed, v.epoch, mass},
                                       mass, in_place),
                         n_want);
        assert_memory_equal(in_place, want, (size_t)n_want * sizeof *want);
    }
}

/* A number in each block's place, by hand. */
static void test_target_select_known(void) {
    struct target_settings none, some, s;
    float mass[12] = {9, 1, 5, 5, 5, 2, NAN, 0, 5, 0, 0, 0}, score[12];
    int32_t kept[12];
    target_settings_unset(&none);
    some = none;
    some.selector = TARGET_OBSERVED;
    some.keep_blocks = 6;
    some.window_blocks = 2;
    some.reserve = 0;
    s = target_settings_resolve(&none, &some);
    struct target_view v = {.n_tokens = 12 * 64 - 5, .mass = mass};
    static const int32_t want[] = {0, 2, 3, 4, 10, 11}; /* block 8 loses the tie of four */
    assert_int_equal(target_select(&s, &v, score, kept), 6);
    assert_memory_equal(kept, want, sizeof want);
    s.selector = TARGET_RECENT;
    static const int32_t recent[] = {0, 7, 8, 9, 10, 11};
    assert_int_equal(target_select(&s, &v, score, kept), 6);
    assert_memory_equal(kept, recent, sizeof recent);
    /* NaN is kept last of all. */
    s.selector = TARGET_OBSERVED;
    s.keep_blocks = 11;
    assert_int_equal(target_select(&s, &v, score, kept), 11);
    for (int i = 0; i < 11; i++) assert_true(kept[i] != 6);
}

/* Reserve and `random` change with the seed and the epoch, and with nothing else. */
static void test_target_chance(void) {
    struct target_settings none, some, s;
    static float score[400];
    static int32_t a[400], b[400];
    int n_in = 0, n_same_epoch = 0;
    target_settings_unset(&none);
    some = none;
    some.selector = TARGET_RANDOM;
    some.keep = 0.25;
    s = target_settings_resolve(&none, &some);
    static int seen[400];
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct target_view v = {.n_tokens = 400 * 64, .seed = seed};
        int n = target_select(&s, &v, score, a);
        assert_int_equal(n, 104);
        for (int i = 0; i < n; i++) seen[a[i]]++;
        v.epoch = 1;
        assert_int_equal(target_select(&s, &v, score, b), n);
        n_same_epoch += memcmp(a, b, (size_t)n * sizeof *a) == 0;
        n_in += n;
    }
    assert_int_equal(n_same_epoch, 0);
    /* 396 blocks are free, 100 of them taken: about 50 of 200 times each, +- 6.1; 6 sigma. */
    for (int i = 1; i < 397; i++) assert_in_range(seen[i], 13, 88);
    assert_int_equal(seen[0], 200);
    assert_int_equal(seen[399], 200);
}

/* The curve's own points, and that it falls between them. */
static void test_target_curve(void) {
    const struct target_curve *c = &target_source_curve;
    static const double at[][2] = {{100, 1},      {8192, 1},     {16384, .15},  {32768, .10},
                                   {65536, .075}, {131072, .05}, {1 << 20, .05}};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        assert_true(fabs(target_curve_keep(c, at[i][0]) - at[i][1]) < 1e-12);
    for (int n = 1; n < 140000; n += 13)
        assert_true(target_curve_keep(c, n) >= target_curve_keep(c, n + 13));
}

static void test_target_settings(void) {
    struct target_settings base, request, s;
    struct err e = {0};
    target_settings_unset(&base);
    target_settings_unset(&request);
    s = target_settings_resolve(&base, &request);
    assert_int_equal(s.selector, TARGET_OFF);
    assert_true(s.keep == TARGET_CURVE && s.reserve == TARGET_RESERVE);
    assert_int_equal(s.min_blocks, 32);
    assert_int_equal(s.window_blocks, 3);
    assert_true(target_settings_law(&s) == 0);
    /* A few kept blocks lower the floor unless it was named. */
    request.keep_blocks = 12;
    assert_int_equal(target_settings_resolve(&base, &request).min_blocks, 12);
    base.min_blocks = 20;
    assert_int_equal(target_settings_resolve(&base, &request).min_blocks, 20);
    /* What the request says of one way to count takes back what the engine says of the other. */
    base.keep = 0.5;
    s = target_settings_resolve(&base, &request);
    assert_int_equal(s.keep_blocks, 12);
    base.keep = TARGET_UNSET;
    base.keep_blocks = 40;
    request.keep_blocks = TARGET_UNSET;
    request.keep = 0.25;
    s = target_settings_resolve(&base, &request);
    assert_int_equal(s.keep_blocks, 0);
    assert_true(s.keep == 0.25);
    /* Laws: equal for equal settings, different for each field. */
    request.selector = TARGET_OBSERVED;
    s = target_settings_resolve(&base, &request);
    struct target_settings other[] = {s, s, s, s, s, s};
    other[0].selector = TARGET_RECENT;
    other[1].keep = 0.26;
    other[2].keep_blocks = 5;
    other[3].min_blocks++;
    other[4].window_blocks++;
    other[5].reserve = 0;
    struct target_settings again = target_settings_resolve(&base, &request);
    assert_true(target_settings_law(&s) == target_settings_law(&again));
    for (int i = 0; i < 6; i++)
        assert_true(target_settings_law(&s) != target_settings_law(&other[i]));
    /* Ranges. */
    const struct {
        struct target_settings s;
        const char *says;
    } bad[] = {
        {{9, -1, -1, -1, -1, -1}, "sparse is 9"},
        {{1, 1.5, -1, -1, -1, -1}, "keep is 1.5, allowed is \"curve\" or (0, 1]"},
        {{1, NAN, -1, -1, -1, -1}, "keep is "},
        {{1, -1, -2, -1, -1, -1}, "keep_blocks is -2, allowed is [0, 1048576]"},
        {{1, -1, -1, 0, -1, -1}, "min_blocks is 0, allowed is [1, 1048576]"},
        {{1, -1, -1, -1, 0, -1}, "window_blocks is 0, allowed is [1, 1048576]"},
        {{1, -1, -1, -1, -1, 1.01}, "reserve is 1.01, allowed is [0, 1]"},
        {{1, 0.5, 8, -1, -1, -1}, "keep and keep_blocks 8: one of them decides, not both"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_true(target_settings_check(&bad[i].s, &e) != 0);
        assert_non_null(strstr(e.message, bad[i].says));
    }
    target_settings_unset(&s);
    assert_int_equal(target_settings_check(&s, &e), 0);
}

static void test_target_names(void) {
    struct err e = {0};
    int selector;
    double keep;
    for (int i = 0; i < TARGET_N_SELECTORS; i++) {
        const char *name = target_selector_name(i);
        assert_int_equal(target_selector_parse(&selector, name, strlen(name), &e), 0);
        assert_int_equal(selector, i);
    }
    assert_int_equal(target_selector_parse(&selector, "observe", 7, &e), E_RANGE);
    assert_non_null(strstr(e.message, "sparse is \"observe\""));
    assert_string_equal(target_selector_name(-1), "?");
    assert_int_equal(target_keep_parse(&keep, "curve", 5, &e), 0);
    assert_true(keep == TARGET_CURVE);
    assert_int_equal(target_keep_parse(&keep, ".25xx", 3, &e), 0);
    assert_true(keep == 0.25);
    static const char *const bad[] = {"", "0", "1.1", "nan", "inf", "-0.5", "0.5x", " 1", "curves"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(target_keep_parse(&keep, bad[i], strlen(bad[i]), &e), E_RANGE);
}

const struct test tests[] = {
    {"target_select", TEST_QUICK, 20000, test_target_select},
    {"target_select_known", TEST_QUICK, 5000, test_target_select_known},
    {"target_chance", TEST_QUICK, 20000, test_target_chance},
    {"target_curve", TEST_QUICK, 5000, test_target_curve},
    {"target_settings", TEST_QUICK, 5000, test_target_settings},
    {"target_names", TEST_QUICK, 5000, test_target_names},
    {0},
};
