/* Prompt lookup against a search that compares everything with everything.
 *
 * Random sequences of many shapes (small and large alphabets, copies of earlier parts with errors,
 * loops) are indexed in random pieces; after each piece the naive search says how long the longest
 * match of the newest tokens is and where it ended last. Up to DRAFT_LOOKUP_MAX tokens both must be
 * equal; beyond, the match must be true, at least that long, and the longest of the newest eight.
 * Then inputs made to hurt: ids that collide in the index, equal tokens, extreme ids. */
#include "tests/harness.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "draft/lookup.h"

enum { MOST = 700 };

static uint32_t draw_idx;

static uint32_t draw(uint64_t seed, uint32_t n) {
    return rng_u32(seed, 0, RNG_TEST, draw_idx++) % n;
}

static void *open_lookup(struct draft_lookup *l, int max_tokens) {
    size_t bytes = draft_lookup_bytes(max_tokens);
    void *memory = malloc(bytes);
    assert_non_null(memory);
    memset(memory, 0xA5, bytes); /* init must not count on zeroes */
    draft_lookup_init(l, memory, max_tokens);
    return memory;
}

/* ---- The twin ---- */

static int agree(const int32_t *ids, int a, int b) {
    int n = 0;
    while (n < DRAFT_LOOKUP_REACH && n <= a && ids[a - n] == ids[b - n]) n++;
    return n;
}

/* Longest match of the end, the latest of equals; among matches of DRAFT_LOOKUP_MAX and more only
 * the newest DRAFT_LOOKUP_PLACES are looked at. *at: where it ended, -1: nowhere. */
static int naive(const int32_t *ids, int n, int *at) {
    int best = 0, n_long = 0;
    *at = -1;
    for (int p = n - 2; p >= 0 && n_long < DRAFT_LOOKUP_PLACES; p--) {
        int m = agree(ids, p, n - 1);
        n_long += m >= DRAFT_LOOKUP_MAX;
        if (m <= best) continue;
        best = m;
        *at = p;
    }
    if (best >= DRAFT_LOOKUP_MIN) return best;
    *at = -1;
    return 0;
}

static void check(const struct draft_lookup *l, const int32_t *ids, int n, int max) {
    int32_t out[64];
    int at, m, want = naive(ids, n, &at);
    for (int i = 0; i < 64; i++) out[i] = 123456789;
    int got = draft_lookup_propose(l, ids, n, max, out, &m);
    assert_int_equal(m, want);
    assert_int_equal(got, at < 0 ? 0 : max);
    for (int i = 0; i < got; i++) {
        int period = n - 1 - at; /* what follows, over and over */
        assert_int_equal(out[i], ids[at + 1 + i % period]);
    }
    assert_int_equal(out[got], 123456789);
}

/* ---- Random text ---- */

static void make_text(uint64_t seed, int32_t *ids, int n) {
    static const uint32_t alphabets[] = {1, 2, 3, 5, 20, 300, 50000};
    uint32_t alphabet = alphabets[draw(seed, 7)], copies = draw(seed, 4),
             errors = 3 + draw(seed, 40);
    for (int i = 0; i < n;) {
        if (i > 4 && draw(seed, 4) < copies) {
            int from = (int)draw(seed, (uint32_t)i), len = 1 + (int)draw(seed, 60);
            for (int k = 0; k < len && i < n; k++, i++)
                ids[i] = draw(seed, errors) ? ids[from + k] : (int32_t)draw(seed, alphabet);
        } else {
            ids[i++] = (int32_t)draw(seed, alphabet) - (int32_t)(alphabet / 2);
        }
    }
}

static void test_lookup_equals_naive(void) {
    static int32_t ids[MOST];
    int n_matches[DRAFT_LOOKUP_REACH + 1] = {0};
    for (uint64_t seed = 1; seed <= 300; seed++) {
        struct draft_lookup l;
        int n = 2 + (int)draw(seed, MOST - 2), most = n + (int)draw(seed, 50);
        void *memory = open_lookup(&l, most);
        make_text(seed, ids, n);
        for (int at = 0; at < n;) {
            at += 1 + (int)draw(seed, draw(seed, 10) ? 3 : 60);
            if (at > n) at = n;
            draft_lookup_extend(&l, ids, at);
            int where;
            n_matches[naive(ids, at, &where)]++;
            check(&l, ids, at, (int)draw(seed, 18));
        }
        free(memory);
    }
    /* Every length was met, or the test shows less than it says. */
    assert_true(n_matches[0] > 100);
    for (int m = DRAFT_LOOKUP_MIN; m <= DRAFT_LOOKUP_REACH; m++) assert_true(n_matches[m] > 3);
}

static void test_lookup_edges(void) {
    struct draft_lookup l;
    int32_t out[20], ids[40];
    int m = 99;
    void *memory = open_lookup(&l, 0);
    draft_lookup_extend(&l, ids, 0);
    assert_int_equal(draft_lookup_propose(&l, ids, 0, 8, out, &m), 0);
    assert_int_equal(m, 0);
    free(memory);
    memory = open_lookup(&l, 3);
    ids[0] = ids[1] = ids[2] = 7;
    draft_lookup_extend(&l, ids, 1);
    assert_int_equal(draft_lookup_propose(&l, ids, 1, 8, out, &m), 0);
    draft_lookup_extend(&l, ids, 2); /* 7 7: the only pair is the newest itself */
    assert_int_equal(draft_lookup_propose(&l, ids, 2, 8, out, &m), 0);
    draft_lookup_extend(&l, ids, 3);
    draft_lookup_extend(&l, ids, 3); /* nothing new changes nothing */
    assert_int_equal(draft_lookup_propose(&l, ids, 3, 8, out, &m), 8);
    assert_int_equal(m, 2);
    for (int i = 0; i < 8; i++) assert_int_equal(out[i], 7);
    assert_int_equal(draft_lookup_propose(&l, ids, 3, 0, out, &m), 0);
    free(memory);
    /* A loop of three, proposed right behind the tokens themselves. */
    memory = open_lookup(&l, 32);
    for (int i = 0; i < 12; i++) ids[i] = i % 3 - 1;
    draft_lookup_extend(&l, ids, 12);
    assert_int_equal(draft_lookup_propose(&l, ids, 12, 10, ids + 12, &m), 10);
    assert_int_equal(m, 9);
    for (int i = 12; i < 22; i++) assert_int_equal(ids[i], i % 3 - 1);
    free(memory);
}

/* A common phrase is continued as where more before it agrees: the older place here. */
static void test_lookup_prefers_longer(void) {
    static const int32_t ids[] = {90, 91, 1, 2, 3, 4, 5, 70, 71, /* the long match */
                                  80, 81, 1, 2, 3, 4, 5, 72, 73, /* the newer one */
                                  90, 91, 1, 2, 3, 4, 5};
    struct draft_lookup l;
    int32_t out[2];
    int m, n = sizeof ids / sizeof *ids;
    void *memory = open_lookup(&l, n);
    draft_lookup_extend(&l, ids, n);
    assert_int_equal(draft_lookup_propose(&l, ids, n, 2, out, &m), 2);
    assert_int_equal(m, 7);
    assert_int_equal(out[0], 70);
    assert_int_equal(out[1], 71);
    free(memory);
}

/* ---- Inputs made to hurt ---- */

/* Pairs whose hashes agree in the low bits, found by trying: all crowd one window of the table for
 * n = 2. What is reported must be true all the same. */
static void test_lookup_collisions(void) {
    enum { N = 3000 };
    static int32_t ids[2 * N + 2];
    struct draft_lookup l;
    void *memory = open_lookup(&l, 2 * N + 2);
    int n = 0;
    uint64_t last = (uint32_t)5;
    for (uint32_t x = 0; n < 2 * N; x++) {
        /* The index's hash, written anew: newest id first. */
        uint64_t h = last * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
        h = (h ^ x) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
        if ((h & l.mask) >= 4) continue;
        ids[n++] = (int32_t)x;
        ids[n++] = 5;
    }
    int n_found = 0;
    for (int at = 2; at <= n; at += 2) {
        int32_t out[4];
        int m;
        draft_lookup_extend(&l, ids, at);
        n_found += draft_lookup_propose(&l, ids, at, 4, out, &m) > 0;
        assert_int_equal(m, 0); /* all pairs differ */
    }
    assert_int_equal(n_found, 0);
    /* The newest pairs are still in their window, so a repeat is found. */
    ids[n] = ids[n - 2];
    ids[n + 1] = 5;
    draft_lookup_extend(&l, ids, n + 2);
    int32_t out[4];
    int m;
    assert_int_equal(draft_lookup_propose(&l, ids, n + 2, 4, out, &m), 4);
    assert_true(m >= 2);
    free(memory);
}

/* ns a token of index and proposal together; printed, and held to a bound that only a walk that
 * grows with the sequence would break. */
static double time_a_token(const char *name, const int32_t *ids, int n) {
    struct draft_lookup l;
    void *memory = open_lookup(&l, n);
    int64_t start = clock_ns();
    for (int at = 1; at <= n; at++) {
        int32_t out[16];
        int m;
        draft_lookup_extend(&l, ids, at);
        draft_lookup_propose(&l, ids, at, 16, out, &m);
    }
    double ns = (double)(clock_ns() - start) / n;
    fprintf(stderr, "lookup: %-24s %6d tokens, %4.0f ns a token\n", name, n, ns);
    free(memory);
    return ns;
}

static void test_lookup_constant_time(void) {
    enum { N = 1 << 17 };
    int32_t *ids = malloc(N * sizeof *ids);
    assert_non_null(ids);
    for (int i = 0; i < N; i++) ids[i] = -1;
    double equal = time_a_token("all equal", ids, N);
    for (int i = 0; i < N; i++) ids[i] = i % 2 ? INT32_MIN : INT32_MAX;
    double two = time_a_token("two extreme ids", ids, N);
    for (int i = 0; i < N; i++)
        ids[i] = (int32_t)((uint32_t)i << 16); /* multiples: low bits equal */
    double shifted = time_a_token("ids of equal low bits", ids, N);
    /* One 5-gram everywhere, each time after something else. */
    for (int i = 0; i < N; i++) ids[i] = i % 6 ? i % 6 : 100 + i;
    double phrase = time_a_token("one phrase everywhere", ids, N);
    for (int i = 0; i < N; i++) ids[i] = (int32_t)draw(77, 50000);
    double chance = time_a_token("random", ids, N);
    free(ids);
    assert_true(equal < 20000 && two < 20000 && shifted < 20000 && phrase < 20000 &&
                chance < 20000);
}

const struct test tests[] = {
    {"lookup_equals_naive", TEST_QUICK, 20000, test_lookup_equals_naive},
    {"lookup_edges", TEST_QUICK, 5000, test_lookup_edges},
    {"lookup_prefers_longer", TEST_QUICK, 5000, test_lookup_prefers_longer},
    {"lookup_collisions", TEST_QUICK, 20000, test_lookup_collisions},
    {"lookup_constant_time", TEST_QUICK, 20000, test_lookup_constant_time},
    {0},
};
