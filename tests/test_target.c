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

static int selector_of(const struct target_settings *s, const struct target_view *v) {
    return v->epoch > 0 ? s->reselector : s->selector;
}

static bool naive_measures(const struct target_settings *s, const struct target_view *v) {
    int selector = selector_of(s, v);
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL) return false;
    return s->threshold != TARGET_NO_THRESHOLD && selector != TARGET_RECENT &&
           selector != TARGET_RANDOM;
}

static double naive_score(const struct target_settings *s, const struct target_view *v, int i,
                          int n) {
    int selector = selector_of(s, v), n_neighbours = 0;
    const float *raw = selector == TARGET_OBSERVED ? v->mass : v->score;
    double sum = 0;
    if (selector == TARGET_RECENT) return i;
    if (selector == TARGET_RANDOM)
        return rng_u32(v->seed, (uint64_t)v->epoch, RNG_SELECTION, 0x80000000u + (uint32_t)i) >> 8;
    for (int k = i - 1; k <= i + 1; k += 2)
        if (k >= 0 && k < n && !isnan(raw[k])) {
            sum += (double)raw[k];
            n_neighbours++;
        }
    if (s->smooth == 0 || n_neighbours == 0) return (double)raw[i];
    return (double)(float)((double)raw[i] + s->smooth * sum / n_neighbours);
}

/* Which blocks may not come: one after another, the least used of the last list. */
static int naive_drop(const struct target_settings *s, const struct target_view *v, int n,
                      const bool *pinned, bool *out) {
    int n_used = 0, n_out = 0;
    memset(out, 0, MOST * sizeof *out);
    for (int i = 0; v->used && i < n; i++) n_used += !pinned[i] && !isnan(v->used[i]);
    for (; n_out < s->drop * n_used - 1e-9; n_out++) {
        int worst = -1;
        for (int i = 0; i < n; i++)
            if (!pinned[i] && !out[i] && !isnan(v->used[i]) &&
                (worst < 0 || v->used[i] <= v->used[worst]))
                worst = i;
        out[worst] = true;
    }
    return n_out;
}

/* The rank of the best of what is left, and so on: [n] blocks by rank from 0, -1 where none is. */
static void naive_border(const struct target_settings *s, const struct target_view *v, int n,
                         int n_pinned, int n_kept, bool *in, const bool *out) {
    int selector = selector_of(s, v), b = n_kept - n_pinned, rank = 0;
    static bool taken[MOST];
    if (s->recheck != TARGET_RECHECK_BORDER || selector == TARGET_RECENT ||
        selector == TARGET_RANDOM || !v->attention)
        return;
    for (int i = 0; i < n; i++) taken[i] = out[i] || i == 0 || n - i <= s->window_blocks;
    static int candidate[MOST];
    int n_candidates = 0, n_left = b - (b + 1) / 2;
    for (; rank < 2 * b; rank++) {
        int best = -1;
        double best_score = 0;
        for (int i = 0; i < n; i++) {
            double score = naive_score(s, v, i, n);
            if (isnan(score)) score = -INFINITY;
            if (taken[i] || (best >= 0 && score <= best_score)) continue;
            best = i;
            best_score = score;
        }
        if (best < 0) break;
        taken[best] = true;
        in[best] = rank < (b + 1) / 2;
        if (!in[best]) candidate[n_candidates++] = best;
    }
    for (; n_left > 0; n_left--) {
        int best = -1;
        for (int c = 0; c < n_candidates; c++) {
            int i = candidate[c];
            if (in[i]) continue;
            if (best < 0 || v->attention[i] > v->attention[best] ||
                (v->attention[i] == v->attention[best] && i < best))
                best = i;
        }
        in[best] = true;
    }
}

static int naive_select(const struct target_settings *s, const struct target_view *v,
                        int32_t *kept) {
    static bool in[MOST], out[MOST];
    int n = 0, n_kept = 0, reserve = 0;
    while (n * 64 < v->n_tokens) n++;
    int k = naive_n_kept(s, v->n_tokens, n);
    for (int i = 0; i < n; i++) n_kept += in[i] = i == 0 || n - i <= s->window_blocks;
    int least = s->min_blocks > n_kept ? s->min_blocks : n_kept, n_pinned = n_kept;
    bool none = s->selector == TARGET_OFF || s->selector == TARGET_ALL;
    if (v->wide) k = k + (k + 1) / 2 < n ? k + (k + 1) / 2 : n;
    int n_out = none ? 0 : naive_drop(s, v, n, in, out);
    if (none) memset(out, 0, sizeof out);
    if (least > n - n_out) least = n - n_out;
    k -= n_out;
    if (k < least) k = least;
    for (; n_kept < k; n_kept++) {
        int best = -1;
        double best_score = 0;
        for (int i = 0; i < n; i++) {
            double score = naive_score(s, v, i, n);
            bool low = isnan(score) || score < (double)(float)s->threshold;
            if (isnan(score)) score = -INFINITY; /* the tests use no other */
            if (n_kept >= least && low && naive_measures(s, v)) continue;
            if (in[i] || out[i] || (best >= 0 && score <= best_score)) continue;
            best = i;
            best_score = score;
        }
        if (best < 0) break;
        in[best] = true;
    }
    if (!none) naive_border(s, v, n, n_pinned, n_kept, in, out);
    while (reserve < s->reserve * n - 1e-9 && n_kept < n - n_out) {
        int best = -1;
        uint32_t most = 0;
        for (int i = 0; i < n; i++) {
            uint32_t u = rng_u32(v->seed, (uint64_t)v->epoch, RNG_SELECTION, (uint32_t)i);
            if (in[i] || out[i] || (best >= 0 && u <= most)) continue;
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
    if (draw(3) == 0) some.threshold = draw(8) / 4.0 - 1;
    if (draw(3) == 0) some.smooth = (1 + draw(4)) / 4.0;
    if (draw(2)) some.reselector = TARGET_RECENT + (int)draw(6);
    if (draw(3) == 0) some.recheck = TARGET_RECHECK_BORDER;
    if (draw(3) == 0) some.drop = draw(10) / 10.0;
    if (draw(2)) some.reselect = TARGET_RESELECT_STEP;
    *s = target_settings_resolve(&none, &some, NULL);
}

/* What a re-check looks at is what would be kept, or twice as much beside the pinned ones, and the
 * newest rows' own blocks. */
static void check_recheck(const struct target_settings *s, const struct target_view *v, int n,
                          float *score, int32_t *list) {
    static int32_t kept[MOST];
    struct target_settings by = *s, twice;
    by.reserve = 0;
    int n_list = target_recheck(s, v, score, list), at = 0;
    if (n_list == 0) {
        int selector = selector_of(s, v);
        assert_true(s->recheck == TARGET_RECHECK_OFF || selector == TARGET_RECENT ||
                    selector == TARGET_RANDOM);
        return;
    }
    int n_kept = naive_select(&by, v, kept), pinned = 1 + s->window_blocks;
    for (int i = 0; i < n_kept; i++) {
        while (at < n_list && list[at] < kept[i]) at++;
        assert_true(at < n_list && list[at] == kept[i]);
    }
    for (int i = 1; i < n_list; i++) assert_true(list[i - 1] < list[i]);
    if (s->threshold != TARGET_NO_THRESHOLD || target_n_dropped(s, v) > 0 || v->wide || pinned > n)
        return;
    twice = by;
    twice.keep_blocks = 2 * n_kept - pinned;
    int n_twice = naive_select(&twice, v, kept), own = (v->n_tokens - 16) / 64;
    if (own >= 0 && own < n - s->window_blocks) { /* may be in it anyway */
        bool has = false;
        for (int i = 0; i < n_twice; i++) has |= kept[i] == own;
        n_twice += !has;
    }
    assert_int_equal(n_list, n_twice);
}

static void test_target_select(void) {
    static float mass[MOST], score[MOST], used[MOST], attention[MOST];
    static int32_t got[MOST], want[MOST], in_place[MOST];
    int n_rechecked = 0, n_dropped = 0;
    for (int t = 0; t < 4000; t++) {
        struct target_settings s;
        draw_settings(&s);
        int n_tokens = 1 + (int)draw(t % 4 ? 64 * 100 : 64 * MOST), n = target_n_blocks(n_tokens);
        struct target_view v = {.n_tokens = n_tokens,
                                .seed = draw(4),
                                .epoch = (int)draw(3),
                                .mass = mass,
                                .score = mass,
                                .wide = draw(3) == 0};
        uint32_t kind = draw(4);
        for (int i = 0; i < n; i++) {
            mass[i] = draw_score(kind);
            used[i] = draw(3) ? (float)draw(20) / 20 : NAN;
            attention[i] = (float)draw(30) / 30;
        }
        if (v.epoch > 0 && draw(2)) v.used = used;
        check_recheck(&s, &v, n, score, in_place);
        if (draw(4)) v.attention = attention;
        n_dropped += target_n_dropped(&s, &v) > 0;
        n_rechecked += v.attention && s.recheck;
        int n_want = naive_select(&s, &v, want), n_got = target_select(&s, &v, score, got);
        assert_int_equal(n_got, n_want);
        assert_memory_equal(got, want, (size_t)n_want * sizeof *want);
        /* What the counts say before is what comes out, and what is pinned is in it. */
        if (s.threshold == TARGET_NO_THRESHOLD && target_n_dropped(&s, &v) == 0) {
            int n_least = target_n_kept(&s, n_tokens) + target_n_reserve(&s, n_tokens);
            assert_true(v.wide ? n_got >= n_least : n_got == n_least);
            assert_int_equal(target_selects(&s, n_tokens), target_n_kept(&s, n_tokens) < n);
        }
        assert_true(target_selects(&s, n_tokens) || v.epoch > 0 || n_got == n);
        assert_int_equal(got[0], 0);
        assert_int_equal(got[n_got - 1], n - 1);
        for (int i = 1; i < n_got; i++) assert_true(got[i - 1] < got[i]);
        /* The scores may lie where the scratch is. */
        assert_int_equal(target_select(&s, &v, mass, in_place), n_want);
        assert_memory_equal(in_place, want, (size_t)n_want * sizeof *want);
    }
    assert_true(n_rechecked > 300 && n_dropped > 100);
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
    s = target_settings_resolve(&none, &some, NULL);
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
    s = target_settings_resolve(&none, &some, NULL);
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
    target_settings_unset(&base);
    target_settings_unset(&request);
    s = target_settings_resolve(&base, &request, NULL);
    assert_int_equal(s.selector, TARGET_OFF);
    assert_true(s.keep == TARGET_CURVE && s.reserve == TARGET_RESERVE);
    assert_int_equal(s.min_blocks, 32);
    assert_int_equal(s.window_blocks, 3);
    assert_true(target_settings_law(&s) == 0);
    /* A few kept blocks lower the floor unless it was named. */
    request.keep_blocks = 12;
    assert_int_equal(target_settings_resolve(&base, &request, NULL).min_blocks, 12);
    base.min_blocks = 20;
    assert_int_equal(target_settings_resolve(&base, &request, NULL).min_blocks, 20);
    /* What the request says of one way to count takes back what the engine says of the other. */
    base.keep = 0.5;
    s = target_settings_resolve(&base, &request, NULL);
    assert_int_equal(s.keep_blocks, 12);
    base.keep = TARGET_UNSET;
    base.keep_blocks = 40;
    request.keep_blocks = TARGET_UNSET;
    request.keep = 0.25;
    s = target_settings_resolve(&base, &request, NULL);
    assert_int_equal(s.keep_blocks, 0);
    assert_true(s.keep == 0.25);
}

/* Laws: equal for equal settings, different for each field. */
static void test_target_laws(void) {
    struct target_settings base, request, s;
    target_settings_unset(&base);
    target_settings_unset(&request);
    base.min_blocks = 20;
    request.keep = 0.25;
    request.selector = TARGET_OBSERVED;
    s = target_settings_resolve(&base, &request, NULL);
    struct target_settings other[14];
    for (int i = 0; i < 14; i++) other[i] = s;
    other[0].selector = TARGET_RECENT;
    other[1].keep = 0.26;
    other[2].keep_blocks = 5;
    other[3].min_blocks++;
    other[4].window_blocks++;
    other[5].reserve = 0;
    other[6].threshold = 0;
    other[7].smooth = .5;
    other[8].reselect = 64;
    other[9].reselect = TARGET_RESELECT_SURPRISE;
    other[10] = other[9];
    other[10].surprise = 1;
    other[11].keep = TARGET_CURVE;
    other[12].recheck = TARGET_RECHECK_BORDER;
    other[13].drop = .25;
    struct target_settings again = target_settings_resolve(&base, &request, NULL);
    assert_true(target_settings_law(&s) == target_settings_law(&again));
    for (int i = 0; i < 14; i++)
        for (int k = 0; k <= i; k++)
            assert_true(target_settings_law(k < i ? &other[k] : &s) !=
                        target_settings_law(&other[i]));
    s = other[11];
    s.curve.at[0].tokens = 4096;
    assert_true(target_settings_law(&s) != target_settings_law(&other[11]));
    s = other[0];
    s.reselector = TARGET_RANDOM; /* where nothing is selected anew it does not count */
    assert_true(target_settings_law(&s) == target_settings_law(&other[0]));
}

static void test_target_ranges(void) {
    struct target_settings s;
    struct err e = {0};
    static const char *const says[] = {
        "sparse is 9",
        "keep is 1.5, allowed is \"curve\" or (0, 1]",
        "keep is ",
        "keep_blocks is -2, allowed is [0, 1048576]",
        "min_blocks is 0, allowed is [1, 1048576]",
        "window_blocks is 0, allowed is [1, 1048576]",
        "reserve is 1.01, allowed is [0, 1]",
        "keep and keep_blocks 8: one of them decides, not both",
        "keep_threshold is inf, allowed is a number",
        "smooth is 1.5, allowed is [0, 1]",
        "reselect is -3, allowed is off (0), [1, 1048576] tokens or surprise (-2)",
        "reselector is \"observed\", allowed is \"scorer\", \"mean\", \"minmax\", \"bound\", "
        "\"recent\" or \"random\"",
        "surprise is 0, allowed is (0, 100]",
        "keep's curve of 2 points",
        "keep's curve of 9 points",
        "recheck is 2, allowed is off (0) or border (1)",
        "drop is 1, allowed is [0, 1)",
        "recheck \"border\", lists \"layer\": re-checks are of one list",
        "drop, quarters: re-checks are of one list",
    };
    enum { N_BAD = sizeof says / sizeof *says };
    struct target_settings bad[N_BAD];
    for (int i = 0; i < N_BAD; i++) target_settings_unset(&bad[i]);
    bad[0].selector = 9;
    bad[1].keep = 1.5;
    bad[2].keep = NAN;
    bad[3].keep_blocks = -2;
    bad[4].min_blocks = 0;
    bad[5].window_blocks = 0;
    bad[6].reserve = 1.01;
    bad[7].keep = 0.5;
    bad[7].keep_blocks = 8;
    bad[8].threshold = INFINITY;
    bad[9].smooth = 1.5;
    bad[10].reselect = -3;
    bad[11].reselector = TARGET_OBSERVED;
    bad[12].surprise = 0;
    bad[13].curve = (struct target_curve){.n = 2, .at = {{100, .5}, {100, .4}}};
    bad[14].curve.n = 9;
    bad[15].recheck = 2;
    bad[16].drop = 1;
    bad[17].recheck = TARGET_RECHECK_BORDER;
    bad[17].lists = TARGET_LISTS_LAYER;
    bad[18].drop = .5;
    bad[18].quarters = 2;
    for (int i = 0; i < N_BAD; i++) {
        assert_true(target_settings_check(&bad[i], &e) != 0);
        if (!strstr(e.message, says[i])) fail_msg("%d: %s", i, e.message);
    }
    target_settings_unset(&s);
    assert_int_equal(target_settings_check(&s, &e), 0);
}

static void test_target_names(void) {
    struct err e = {0};
    int selector;
    struct target_settings s;
    target_settings_unset(&s);
    for (int i = 0; i < TARGET_N_SELECTORS; i++) {
        const char *name = target_selector_name(i);
        assert_int_equal(target_selector_parse(&selector, name, strlen(name), &e), 0);
        assert_int_equal(selector, i);
    }
    assert_int_equal(target_selector_parse(&selector, "observe", 7, &e), E_RANGE);
    assert_non_null(strstr(e.message, "sparse is \"observe\""));
    assert_string_equal(target_selector_name(-1), "?");
    assert_int_equal(target_keep_parse(&s, "curve", 5, &e), 0);
    assert_true(s.keep == TARGET_CURVE && s.curve.n == 0);
    assert_int_equal(target_keep_parse(&s, ".25xx", 3, &e), 0);
    assert_true(s.keep == 0.25);
    assert_int_equal(target_keep_parse(&s, "8192:1,16384:.25", 16, &e), 0);
    assert_true(s.keep == TARGET_CURVE && s.curve.n == 2);
    assert_true(s.curve.at[1].tokens == 16384 && s.curve.at[1].keep == .25);
    static const char *const bad[] = {
        "",         "0",        "1.1",      "nan",     "inf",
        "-0.5",     "0.5x",     " 1",       "curves",  "1:1,",
        "8:1,8:.5", "9:1,8:.5", "8:",       ":1",      "8:2",
        "0x1",      "0x8:1",    "8:0x1p-1", "8:1;9:1", "1:1,2:1,3:1,4:1,5:1,6:1,7:1,8:1,9:1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (target_keep_parse(&s, bad[i], strlen(bad[i]), &e) != E_RANGE)
            fail_msg("keep \"%s\" was taken", bad[i]);
    static const struct {
        const char *text;
        int n;
    } points[] = {{"off", 0}, {"step", 1}, {"surprise", TARGET_RESELECT_SURPRISE}, {"64", 64}};
    int n;
    double x;
    assert_int_equal(target_threshold_parse(&x, "-1.5", 4, &e), 0);
    assert_true(x == -1.5);
    assert_int_equal(target_threshold_parse(&x, "off", 3, &e), 0);
    assert_true(x == TARGET_NO_THRESHOLD);
    assert_int_equal(target_threshold_parse(&x, "-", 1, &e), E_RANGE);
    assert_int_equal(target_threshold_parse(&x, "", 0, &e), E_RANGE);
    assert_int_equal(target_threshold_parse(&x, "9e999", 5, &e), E_RANGE);
    assert_string_equal(target_reselect_name(1), "step");
    assert_null(target_reselect_name(2));
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        assert_int_equal(target_reselect_parse(&n, points[i].text, strlen(points[i].text), &e), 0);
        assert_int_equal(n, points[i].n);
    }
    static const char *const no_points[] = {"",      "0",       "1.5", "-1",
                                            "stepp", "2000000", "1e9", "0x10"};
    for (size_t i = 0; i < sizeof no_points / sizeof *no_points; i++)
        assert_int_equal(target_reselect_parse(&n, no_points[i], strlen(no_points[i]), &e),
                         E_RANGE);
    assert_int_equal(target_reselector_parse(&n, "mean", 4, &e), 0);
    assert_int_equal(n, TARGET_MEAN);
    assert_int_equal(target_reselector_parse(&n, "observed", 8, &e), E_RANGE);
    assert_int_equal(target_reselector_parse(&n, "off", 3, &e), E_RANGE);
}

/* Who decides where nobody says: the scorer that is loaded, by what its file says. */
static void test_target_defaults(void) {
    struct target_settings none, some, s;
    struct target_scorer_defaults file = {.smoothing = .25, .curve = {.n = 1, .at = {{4096, .5}}}};
    target_settings_unset(&none);
    target_settings_unset(&some);
    some.selector = TARGET_OBSERVED;
    s = target_settings_resolve(&none, &some, NULL);
    assert_int_equal(s.reselector, TARGET_MEAN);
    assert_int_equal(s.curve.n, 4);
    assert_false(target_needs_states(&s));
    s = target_settings_resolve(&none, &some, &file);
    assert_int_equal(s.reselector, TARGET_SCORER);
    assert_true(s.curve.n == 1 && s.smooth == 0);
    assert_int_equal(target_n_kept(&s, 128 * 64), 64);
    assert_false(target_asks(&s, TARGET_SCORER));
    some.drop = .25;
    some.recheck = TARGET_RECHECK_BORDER;
    s = target_settings_resolve(&none, &some, &file);
    assert_true(s.drop == 0 && target_needs_states(&s)); /* no epoch follows */
    some.recheck = TARGET_UNSET;
    some.reselect = 8;
    s = target_settings_resolve(&none, &some, &file);
    assert_true(s.drop == .25);
    assert_true(target_asks(&s, TARGET_SCORER) && target_needs_states(&s));
    some.reselector = TARGET_RANDOM;
    s = target_settings_resolve(&none, &some, &file);
    assert_false(target_asks(&s, TARGET_SCORER) || target_needs_states(&s));
    some.selector = TARGET_SCORER;
    s = target_settings_resolve(&none, &some, &file);
    assert_true(s.smooth == .25 && target_asks(&s, TARGET_SCORER));
    none.smooth = 0;
    none.curve = (struct target_curve){.n = 1, .at = {{100, .25}}};
    s = target_settings_resolve(&none, &some, &file);
    assert_true(s.smooth == 0 && s.curve.at[0].keep == .25);
}

/* Ends of epochs over drawn surprises against the rule in words: by number; by surprise the first
 * token from the 32nd on whose newest 16 have a mean that lies far enough above the first 16's or
 * the whole epoch's; after it one of 64 tokens. */
static void test_target_epochs(void) {
    struct target_settings s;
    enum { N = 20000 };
    static float nll[N];
    int n_surprises = 0, first = 0;
    bool wide = false, next;
    target_settings_unset(&s);
    s.reselect = 5;
    struct target_epoch e = {0};
    for (int i = 1; i <= 5; i++) {
        assert_int_equal(target_epoch_left(&e, &s), 6 - i);
        assert_int_equal(target_epoch_token(&e, &s, 1, &next), i == 5);
        assert_false(next);
    }
    s.reselect = TARGET_RESELECT_OFF;
    assert_false(target_epoch_token(&e, &s, 1e9f, &next));
    assert_int_equal(target_epoch_left(&e, &s), INT32_MAX);
    s.reselect = TARGET_RESELECT_SURPRISE;
    s.surprise = .5;
    e = (struct target_epoch){0};
    for (int i = 0; i < N; i++) {
        nll[i] = (float)draw(1000) / 400.0f + (i / 100 % 3 == 2 ? .6f : 0);
        int n = i + 1 - first; /* of this epoch, with this token */
        double start = 0, now = 0, all = 0;
        for (int k = first; k <= i; k++) all += (double)nll[k] / n;
        for (int k = 0; k < 16 && n >= 16; k++) {
            start += (double)nll[first + k] / 16;
            now += (double)nll[i - k] / 16;
        }
        double level = start < all ? start : all;
        bool ends = wide ? n == 64 : n >= 32 && now >= level + .5;
        assert_true(wide || fabs(now - level - .5) > 1e-9); /* sums may differ in the last bit */
        assert_int_equal(target_epoch_left(&e, &s), wide ? 65 - n : INT32_MAX);
        assert_int_equal(target_epoch_token(&e, &s, nll[i], &next), ends);
        assert_int_equal(next, ends && !wide);
        if (!ends) continue;
        n_surprises += next;
        wide = next;
        first = i + 1;
        e = (struct target_epoch){.wide = wide};
    }
    assert_in_range(n_surprises, 20, N / 96);
}

const struct test tests[] = {
    {"target_select", TEST_QUICK, 20000, test_target_select},
    {"target_select_known", TEST_QUICK, 5000, test_target_select_known},
    {"target_chance", TEST_QUICK, 20000, test_target_chance},
    {"target_curve", TEST_QUICK, 5000, test_target_curve},
    {"target_settings", TEST_QUICK, 5000, test_target_settings},
    {"target_laws", TEST_QUICK, 5000, test_target_laws},
    {"target_ranges", TEST_QUICK, 5000, test_target_ranges},
    {"target_names", TEST_QUICK, 5000, test_target_names},
    {"target_defaults", TEST_QUICK, 5000, test_target_defaults},
    {"target_epochs", TEST_QUICK, 5000, test_target_epochs},
    {0},
};
