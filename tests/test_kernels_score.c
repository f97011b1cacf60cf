/* States of the select layer and scores of blocks on the CPU. Goal: planes and ring are the sums
 * that kernels.h names, whatever chunks, threads and batches brought the rows; scores follow their
 * law within f32's rounding and depend on nothing but states and weights. Method: naive loops over
 * the states themselves (tests/score_bed.c), equal bytes between instruction sets, threads, chunks
 * and places; memory that nobody named is NaN and stays as it is. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "tests/score_bed.h"

static const struct kern_options backends[] = {
    {.n_threads = 1, .isa = "plain"},  {.n_threads = 3, .isa = "plain"},
    {.n_threads = 2, .isa = "avx2"},   {.n_threads = 1, .isa = "avx512"},
    {.n_threads = 5, .isa = "avx512"}, {.n_threads = 2, .precision = KERN_REFERENCE},
};
enum { N_BACKENDS = sizeof backends / sizeof *backends };

/* NULL where the machine lacks it. */
static struct kern *backend(int i) {
    struct kern *k;
    return kern_cpu_open(&k, &backends[i], NULL) == 0 ? k : NULL;
}

static int pick(uint64_t at, int n) {
    return (int)(rng_u32(99, at, RNG_TEST, 0) % (uint32_t)n);
}

static void assert_bed(const struct score_bed *got, const struct score_bed *want,
                       const char *what) {
    const size_t ring = (size_t)KERN_STATE_QUERIES * (size_t)want->cols;
    for (size_t i = 0; i < want->arena_bytes; i++)
        if (got->arena[i] != want->arena[i])
            fail_msg("%s: byte %zu of page %zu differs", what, i % want->plane.page_stride,
                     i / want->plane.page_stride);
    for (size_t i = 0; i < ring; i++)
        if (memcmp(&got->ring[i], &want->ring[i], 4) != 0)
            fail_msg("%s: ring slot %zu, column %zu is %g, not %g", what, i / (size_t)want->cols,
                     i % (size_t)want->cols, (double)got->ring[i], (double)want->ring[i]);
}

/* ---- note_states ---- */

/* Every byte of the arena, so also that empty quarters, other pages and what lies around a plane
 * stay as they were. */
static void test_note_states_naive(void) {
    static const int shapes[][2] = {{1, 1},    {1, 64},  {15, 7},   {16, 100},
                                    {64, 576}, {65, 33}, {300, 577}};
    static const int most[] = {1, 5, 16, 70, 300};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int i = 0; i < N_BACKENDS; i++) {
            struct kern *k = backend(i);
            if (!k) continue;
            bool has_first = s % 2;
            struct score_bed want =
                score_bed_open(shapes[s][0], shapes[s][1], has_first, 1, 5 + (uint64_t)s);
            score_bed_naive_note(&want, 0, want.n_tokens);
            for (size_t c = 0; c < sizeof most / sizeof *most; c++) {
                struct score_bed got =
                    score_bed_open(shapes[s][0], shapes[s][1], has_first, 1, 5 + (uint64_t)s);
                score_bed_note(&got, k, 0, got.n_tokens, most[c], c);
                assert_bed(&got, &want, backends[i].isa ? backends[i].isa : "reference");
                score_bed_close(&got);
            }
            score_bed_close(&want);
            k->ops->close(k);
        }
}

/* Rounds of three sequences in one call: rows of all lie mixed, of each a part is accepted, some
 * notes are idle. What was rejected is never seen again. */
static void test_note_states_rounds(void) {
    enum { N = 3, TOKENS = 500, COLS = 48, CAPACITY = 9, G = 5 };
    struct kern *k = backend(1);
    struct score_bed bed[N], want[N];
    static int32_t page[N * CAPACITY];
    static float ring[N * KERN_STATE_QUERIES * COLS], x[N * G * COLS];
    int done[N] = {0}, n_pages = 0;
    assert_non_null(k);
    for (int i = 0; i < N; i++) {
        bed[i] = score_bed_open(TOKENS, COLS, true, 1, 40 + (uint64_t)i);
        want[i] = score_bed_open(TOKENS, COLS, true, 1, 40 + (uint64_t)i);
        n_pages += bed[i].n_pages;
    }
    struct kern_plane plane = bed[0].plane;
    uint8_t *arena = aligned_alloc(64, (size_t)n_pages * plane.page_stride);
    assert_non_null(arena);
    memset(arena, 0xFF, (size_t)n_pages * plane.page_stride);
    memset(ring, 0xFF, sizeof ring);
    plane.base = arena;
    for (int i = 0; i < N; i++)
        for (int b = 0; b < CAPACITY; b++)
            page[i * CAPACITY + b] = b < bed[i].n_blocks ? i * bed[0].n_pages + bed[i].page[b] : -1;
    for (uint64_t round = 0; round < 120; round++) {
        struct kern_note notes[N + 1] = {{.seq = -1, .n_rows = 3, .first_row = 1 << 30}};
        memset(x, 0xFF, sizeof x);
        for (int i = 0; i < N; i++) {
            int seq = (int)((round + (uint64_t)i) % N), place = i * G;
            int left = TOKENS - done[seq], n = pick(round * N + (uint64_t)i, G + 1);
            if (n > left) n = left;
            for (int r = 0; r < G && r < left; r++)
                memcpy(x + (place + r) * COLS, bed[seq].x + (done[seq] + r) * COLS, COLS * 4);
            notes[i + 1] = (struct kern_note){seq, place, done[seq], n, N - 1 - seq};
            done[seq] += n;
        }
        assert_int_equal(k->ops->note_states(k, N + 1, notes, x, &plane, page, CAPACITY, ring), 0);
    }
    for (int i = 0; i < N; i++) {
        if (done[i] <= 200) fail_msg("sequence %d has %d tokens only", i, done[i]);
        score_bed_naive_note(&want[i], 0, done[i]);
        memcpy(bed[i].arena, arena + (size_t)i * bed[0].arena_bytes, bed[i].arena_bytes);
        memcpy(bed[i].ring, ring + (N - 1 - i) * KERN_STATE_QUERIES * COLS,
               (size_t)KERN_STATE_QUERIES * COLS * 4);
        assert_bed(&bed[i], &want[i], "rounds");
        score_bed_close(&bed[i]);
        score_bed_close(&want[i]);
    }
    free(arena);
    k->ops->close(k);
}

/* Equal bits whatever chunks and threads, the naive values within rounding (a mean goes on over 64
 * tokens), every other byte as it was; then a NaN in one token, which stays its block's. */
static void test_note_states_bounds(void) {
    static const struct {
        int n_tokens, cols;
        bool first, minmax, spread;
        float massive;
    } shapes[] = {{1, 1, true, true, true, 1},      {64, 7, false, true, false, 1},
                  {65, 100, true, false, true, 30}, {300, 577, false, true, true, 1},
                  {210, 64, true, true, true, 100}, {129, 320, false, false, true, 1}};
    static const int most[] = {1, 5, 70, 300};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct score_bed want = score_bed_open_bounds(
            shapes[s].n_tokens, shapes[s].cols, shapes[s].first, shapes[s].minmax, shapes[s].spread,
            shapes[s].massive, 5 + (uint64_t)s);
        uint8_t *first = NULL;
        score_bed_naive_note(&want, 0, want.n_tokens);
        for (int i = 0; i < N_BACKENDS; i++) {
            struct kern *k = backend(i);
            for (size_t c = 0; k && c < sizeof most / sizeof *most; c++) {
                struct score_bed got = score_bed_open_bounds(
                    shapes[s].n_tokens, shapes[s].cols, shapes[s].first, shapes[s].minmax,
                    shapes[s].spread, shapes[s].massive, 5 + (uint64_t)s);
                score_bed_note(&got, k, 0, got.n_tokens, most[c], c);
                if (!first) first = memcpy(malloc(got.arena_bytes), got.arena, got.arena_bytes);
                assert_memory_equal(got.arena, first, got.arena_bytes);
                score_bed_assert_bounds(&want, got.arena, 4e-7, "bounds");
                assert_bed(&got, &want, "bounds");
                score_bed_close(&got);
            }
            if (k) k->ops->close(k);
        }
        free(first);
        score_bed_close(&want);
    }
}

static void test_note_states_bounds_nan(void) {
    struct kern *k = backend(0);
    struct score_bed b = score_bed_open_bounds(200, 48, false, true, true, 1, 9);
    b.x[70 * 48 + 3] = NAN;
    score_bed_note(&b, k, 0, 200, 3, 1);
    for (int block = 0; block < 4; block++) {
        const float *plane =
            (const float *)(void *)(b.arena + (size_t)b.page[block] * b.plane.page_stride +
                                    b.plane.plane_offset);
        for (int i = 4 * 48; i < 8 * 48; i++)
            if (isnan(plane[i]) != (block == 1))
                fail_msg("block %d, row %d, column %d is %g", block, i / 48, i % 48,
                         (double)plane[i]);
    }
    score_bed_close(&b);
    k->ops->close(k);
}

/* A list of two blocks: positions from 128 on leave nothing, not in the ring either. */
static void test_note_states_capacity(void) {
    struct kern *k = backend(0);
    struct score_bed got = score_bed_open(200, 20, false, 1, 3),
                     want = score_bed_open(200, 20, false, 1, 3);
    struct kern_note note = {.position = 100, .first_row = 100, .n_rows = 100};
    score_bed_note(&got, k, 0, 100, 200, 1);
    assert_int_equal(k->ops->note_states(k, 1, &note, got.x, &got.plane, got.page, 2, got.ring), 0);
    score_bed_naive_note(&want, 0, 128);
    assert_bed(&got, &want, "capacity");
    score_bed_close(&got);
    score_bed_close(&want);
    k->ops->close(k);
}

/* ---- score ---- */

static float *scores(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                     int n_blocks) {
    int n = s->by_quarter ? n_blocks / 4 : n_blocks;
    size_t bytes = k->ops->score_scratch_bytes(k, s, n);
    uint8_t *scratch = aligned_alloc(64, bytes / 64 * 64 + 128);
    float *out = malloc(((size_t)n_blocks + 1) * 4);
    assert_true(scratch && out);
    memset(scratch, 0xFF, bytes / 64 * 64 + 128);
    out[n_blocks] = 77;
    assert_int_equal(k->ops->score(k, s, v, scratch, out), 0);
    assert_true(out[n_blocks] == 77);
    for (size_t i = bytes; i < bytes / 64 * 64 + 128; i++)
        if (scratch[i] != 0xFF) fail_msg("byte %zu behind %zu of scratch was written", i, bytes);
    free(scratch);
    return out;
}

/* f32 sums of a few thousand terms: 2e-5 of the score and of 1, five times that where one column is
 * up to 100 times the others; the reference rounds once. */
static void check_naive(const struct score_case *c, bool by_quarter) {
    struct score_bed b;
    struct kern_scorer s;
    score_bed_case(c, &b, &s);
    s.by_quarter = by_quarter;
    score_bed_naive_note(&b, 0, b.n_tokens);
    struct kern_score_view v = score_bed_view(&b);
    int n_all = score_bed_n(&b, &s);
    double *want = calloc((size_t)n_all, sizeof *want);
    assert_non_null(want);
    score_bed_naive(&b, &s, want);
    float *first = NULL;
    for (int i = 0; i < N_BACKENDS; i++) {
        struct kern *k = backend(i);
        if (!k) continue;
        float *got = scores(k, &s, &v, n_all);
        bool exact = backends[i].precision == KERN_REFERENCE;
        double tolerance = exact ? 2e-6 : c->massive > 1 ? 1e-4 : 2e-5;
        for (int n = 0; n < n_all; n++)
            if ((double)got[n] != want[n] &&
                !(fabs((double)got[n] - want[n]) <= tolerance * (1 + fabs(want[n]))))
                fail_msg("%s%s, backend %d: number %d is %.9g, not %.9g", score_case_name(c),
                         by_quarter ? ", quarters" : "", i, n, (double)got[n], want[n]);
        if (first && !exact && memcmp(first, got, (size_t)n_all * 4) != 0)
            fail_msg("%s: backend %d has other bits", score_case_name(c), i);
        if (first) free(got);
        else first = got;
        k->ops->close(k);
    }
    free(first), free(want);
    score_bed_free_scorer(&s);
    score_bed_close(&b);
}

static void test_score_naive(void) {
    for (int c = 0; c < n_score_cases; c++) check_naive(&score_cases[c], false);
}

static void test_score_quarters(void) {
    for (int c = 0; c < n_score_cases; c++) {
        const struct kern_scorer s = {.kind = score_cases[c].kind,
                                      .by_first = score_cases[c].by_first};
        if (score_bed_has_quarters(&s)) check_naive(&score_cases[c], true);
    }
}

/* Blocks in another order and a shorter list (the ring's turn is 32, so the queries stay) give each
 * block the bits that it had. */
static void test_score_places(void) {
    for (int c = 0; c < n_score_cases; c++) {
        struct score_case sc = score_cases[c];
        struct score_bed b;
        struct kern_scorer s;
        sc.n_tokens = 37 * 64;
        score_bed_case(&sc, &b, &s);
        score_bed_naive_note(&b, 0, b.n_tokens);
        struct kern_score_view v = score_bed_view(&b);
        for (int i = 0; i < N_BACKENDS; i++) {
            struct kern *k = backend(i);
            if (!k) continue;
            int32_t turned[37];
            float *all = scores(k, &s, &v, 37);
            for (int n = 0; n < 37; n++) turned[n] = b.page[(n + 11) % 37];
            struct kern_score_view other = v;
            other.page = turned;
            other.n_tokens = 29 * 64;
            float *got = scores(k, &s, &other, 29);
            for (int n = 0; n < 29; n++)
                if (memcmp(&got[n], &all[(n + 11) % 37], 4) != 0)
                    fail_msg("%s, backend %d: block %d at place %d is %.9g, not %.9g",
                             score_case_name(&sc), i, (n + 11) % 37, n, (double)got[n],
                             (double)all[(n + 11) % 37]);
            free(all), free(got);
            k->ops->close(k);
        }
        score_bed_free_scorer(&s);
        score_bed_close(&b);
    }
}

/* A NaN state makes its own block's score NaN and no other's; a NaN among the queries makes all of
 * them so. */
static void test_score_nan(void) {
    for (int c = 0; c < n_score_cases; c++) {
        struct score_case sc = score_cases[c];
        struct score_bed b;
        struct kern_scorer s;
        sc.n_tokens = 18 * 64 + 40;
        score_bed_case(&sc, &b, &s);
        score_bed_naive_note(&b, 0, b.n_tokens);
        struct kern_score_view v = score_bed_view(&b);
        for (int i = 0; i < N_BACKENDS; i++) {
            struct kern *k = backend(i);
            if (!k) continue;
            float *clean = scores(k, &s, &v, b.n_blocks);
            const int bad = 5;
            int n_at, at = score_bed_element(&b, &s, &n_at);
            float *plane = (float *)(void *)(b.arena + (size_t)b.page[bad] * b.plane.page_stride +
                                             b.plane.plane_offset);
            const float kept[2] = {plane[at], plane[at + s.cols]};
            for (int n = 0; n < n_at; n++) plane[at + n * s.cols] = NAN;
            float *got = scores(k, &s, &v, b.n_blocks);
            for (int n = 0; n < n_at; n++) plane[at + n * s.cols] = kept[n];
            for (int n = 0; n < b.n_blocks; n++)
                if (isnan(clean[n]) || (n == bad ? !isnan(got[n]) : got[n] != clean[n]))
                    fail_msg("%s, backend %d: a NaN in block %d, block %d is %g, was %g",
                             score_case_name(&sc), i, bad, n, (double)got[n], (double)clean[n]);
            free(got);
            float *newest = b.ring + (size_t)((b.n_tokens - 1) % 32) * (size_t)s.cols;
            const float state = newest[0];
            newest[0] = NAN;
            got = scores(k, &s, &v, b.n_blocks);
            newest[0] = state;
            for (int n = 0; n < b.n_blocks; n++)
                if (!isnan(got[n]))
                    fail_msg("%s, backend %d: a NaN query, block %d is %g", score_case_name(&sc), i,
                             n, (double)got[n]);
            free(got), free(clean);
            k->ops->close(k);
        }
        score_bed_free_scorer(&s);
        score_bed_close(&b);
    }
}

/* No tokens: nothing is scored. */
static void test_score_nothing(void) {
    struct kern *k = backend(0);
    struct kern_scorer s = {.kind = KERN_SCORE_MEAN, .cols = 8, .n_queries = 4};
    struct kern_score_view v = {.plane = {.cols = 8}};
    assert_int_equal(k->ops->score(k, &s, &v, NULL, NULL), 0);
    k->ops->close(k);
}

const struct test tests[] = {
    {"note_states_naive", TEST_QUICK, 20000, test_note_states_naive},
    {"note_states_rounds", TEST_QUICK, 20000, test_note_states_rounds},
    {"note_states_bounds", TEST_QUICK, 20000, test_note_states_bounds},
    {"note_states_bounds_nan", TEST_QUICK, 20000, test_note_states_bounds_nan},
    {"note_states_capacity", TEST_QUICK, 20000, test_note_states_capacity},
    {"score_naive", TEST_QUICK, 60000, test_score_naive},
    {"score_quarters", TEST_QUICK, 60000, test_score_quarters},
    {"score_places", TEST_QUICK, 60000, test_score_places},
    {"score_nan", TEST_QUICK, 60000, test_score_nan},
    {"score_nothing", TEST_QUICK, 20000, test_score_nothing},
    {0},
};
