/* States of the select layer and scores of blocks on the device. Goal: planes and rings are the
 * CPU's to the bit; scores are those of the reference twin (sums in double) within f32's rounding,
 * depend on nothing but states and weights, and touch nothing that nobody named. Method: the beds
 * of tests/score_bed.c on the device, whose every other byte is a NaN; a prompt's rows in chunks,
 * rounds of several sequences in one call; every kind and option in odd shapes and two large ones;
 * blocks in another order and number; NaN in one block, then in a query; a replayed recording. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "tests/cuda_helper.h"
#include "tests/score_bed.h"

/* A bed's memory on the device. */
struct dev_bed {
    struct kern *k;
    float *x, *ring;
    uint8_t *arena;
    int32_t *page;
    struct kern_plane plane;
};

static struct dev_bed to_device(struct kern *k, const struct score_bed *b) {
    struct dev_bed d = {.k = k, .plane = b->plane};
    d.x = dev_put(k, b->x, (size_t)b->n_tokens * (size_t)b->cols * 4);
    d.ring = dev_put(k, b->ring, (size_t)KERN_STATE_QUERIES * (size_t)b->cols * 4);
    d.arena = dev_put(k, b->arena, b->arena_bytes);
    d.page = dev_put(k, b->page, (size_t)b->n_pages * sizeof *b->page);
    d.plane.base = d.arena;
    return d;
}
static void free_device(struct dev_bed *d) {
    void *const all[] = {d->x, d->ring, d->arena, d->page};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) d->k->ops->unreserve(d->k, all[i]);
}

static void assert_bytes(const struct dev_bed *d, const struct score_bed *want, const char *what) {
    const size_t n_ring = (size_t)KERN_STATE_QUERIES * (size_t)want->cols;
    uint8_t *arena = dev_get(d->k, d->arena, want->arena_bytes);
    float *ring = dev_get(d->k, d->ring, n_ring * 4);
    for (size_t i = 0; i < want->arena_bytes; i++)
        if (arena[i] != want->arena[i])
            fail_msg("%s: byte %zu of page %zu is %02x, not %02x (plane at %zu, %d columns)", what,
                     i % want->plane.page_stride, i / want->plane.page_stride, arena[i],
                     want->arena[i], want->plane.plane_offset, want->cols);
    for (size_t i = 0; i < n_ring; i++)
        if (memcmp(&ring[i], &want->ring[i], 4) != 0)
            fail_msg("%s: ring slot %zu, column %zu is %g, not %g", what, i / (size_t)want->cols,
                     i % (size_t)want->cols, (double)ring[i], (double)want->ring[i]);
    free(arena), free(ring);
}

/* ---- note_states ---- */

static void note(struct dev_bed *d, const struct kern_note *notes, int n, int capacity) {
    struct kern_note *dev = dev_put(d->k, notes, (size_t)n * sizeof *notes);
    assert_int_equal(
        d->k->ops->note_states(d->k, n, dev, d->x, &d->plane, d->page, capacity, d->ring), 0);
    struct err e = {0};
    assert_ok(d->k->ops->sync(d->k, &e), e);
    d->k->ops->unreserve(d->k, dev);
}

static void test_cuda_note_states(void) {
    static const int shapes[][3] = {{1, 1, 1},      {15, 7, 4},      {64, 576, 64},    {65, 33, 9},
                                    {300, 577, 70}, {700, 512, 700}, {1100, 260, 1024}};
    struct kern *k = cuda_or_skip();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int n_tokens = shapes[s][0], most = shapes[s][2];
        struct score_bed b = score_bed_open(n_tokens, shapes[s][1], s % 2 == 0, 1, 7 + s);
        struct dev_bed d = to_device(k, &b);
        char what[80];
        for (int at = 0, n; at < n_tokens; at += n) {
            n = 1 + (int)(rng_u32(s, (uint64_t)at, RNG_TEST, 0) % (uint32_t)most);
            if (n > n_tokens - at) n = n_tokens - at;
            struct kern_note one = {.first_row = at, .position = at, .n_rows = n};
            note(&d, &one, 1, b.n_blocks);
        }
        score_bed_naive_note(&b, 0, n_tokens);
        snprintf(what, sizeof what, "%d tokens of %d", n_tokens, b.cols);
        assert_bytes(&d, &b, what);
        free_device(&d);
        score_bed_close(&b);
    }
    k->ops->close(k);
}

/* In chunks and at once: equal bytes; the naive values within rounding (norms in f32: 4e-6 of the
 * largest), every other byte the CPU's. */
static void test_cuda_note_states_bounds(void) {
    static const int shapes[][3] = {{1, 1, 1},      {15, 7, 4},      {64, 576, 64},  {65, 33, 9},
                                    {300, 577, 70}, {700, 512, 700}, {450, 4096, 64}};
    struct kern *k = cuda_or_skip();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const int n_tokens = shapes[s][0], most = shapes[s][2];
        struct score_bed b = score_bed_open_bounds(n_tokens, shapes[s][1], s % 2 == 0, s % 3 != 1,
                                                   s % 3 != 2, s == 4 ? 50 : 1, 7 + s);
        struct dev_bed d = to_device(k, &b), whole = to_device(k, &b);
        struct kern_note one = {.n_rows = n_tokens};
        char what[80];
        snprintf(what, sizeof what, "bounds of %d tokens of %d", n_tokens, b.cols);
        note(&whole, &one, 1, b.n_blocks);
        for (int at = 0, n; at < n_tokens; at += n) {
            n = 1 + (int)(rng_u32(s, (uint64_t)at, RNG_TEST, 0) % (uint32_t)most);
            if (n > n_tokens - at) n = n_tokens - at;
            one = (struct kern_note){.first_row = at, .position = at, .n_rows = n};
            note(&d, &one, 1, b.n_blocks);
        }
        score_bed_naive_note(&b, 0, n_tokens);
        uint8_t *got = dev_get(k, d.arena, b.arena_bytes);
        uint8_t *at_once = dev_get(k, whole.arena, b.arena_bytes);
        for (size_t i = 0; i < b.arena_bytes; i++)
            if (got[i] != at_once[i])
                fail_msg("%s: byte %zu of page %zu depends on chunks", what,
                         i % b.plane.page_stride, i / b.plane.page_stride);
        score_bed_assert_bounds(&b, got, 4e-6, what);
        for (size_t i = 0; i < b.arena_bytes; i++)
            if (got[i] != b.arena[i])
                fail_msg("%s: byte %zu of page %zu is %02x, not %02x", what,
                         i % b.plane.page_stride, i / b.plane.page_stride, got[i], b.arena[i]);
        free(got), free(at_once);
        free_device(&d), free_device(&whole);
        score_bed_close(&b);
    }
    k->ops->close(k);
}

/* Four sequences in one call that share a bed: their pages are stretches of its list, one has no
 * rows, one is idle and has wild numbers, one runs beyond its list, one begins before position 0.
 * The CPU does the same. */
static void test_cuda_note_states_batch(void) {
    enum { CAPACITY = 3, COLS = 132 };
    struct kern *k = cuda_or_skip(), *cpu = cpu_twin();
    struct score_bed b = score_bed_open_bounds(600, COLS, true, true, true, 1, 77);
    float *rings = malloc((size_t)4 * KERN_STATE_QUERIES * COLS * 4);
    assert_non_null(rings);
    memset(rings, 0xFF, (size_t)4 * KERN_STATE_QUERIES * COLS * 4);
    struct dev_bed d = to_device(k, &b);
    k->ops->unreserve(k, d.ring);
    d.ring = dev_put(k, rings, (size_t)4 * KERN_STATE_QUERIES * COLS * 4);
    const struct kern_note notes[2][5] = {
        {{.seq = 2, .first_row = 100, .position = 0, .n_rows = 150, .ring = 1},
         {.seq = 0, .first_row = 300, .position = 0, .n_rows = 0, .ring = 0},
         {.seq = -1, .first_row = 1 << 30, .position = -7, .n_rows = 1 << 20, .ring = 1 << 20},
         {.seq = 1, .first_row = 0, .position = -5, .n_rows = 40, .ring = 3},
         {.seq = 0, .first_row = 250, .position = 0, .n_rows = 70, .ring = 2}},
        {{.seq = 2, .first_row = 250, .position = 150, .n_rows = 100, .ring = 1},
         {.seq = 1, .first_row = 40, .position = 35, .n_rows = 1, .ring = 3},
         {.seq = -1},
         {.seq = -1},
         {.seq = 0, .first_row = 320, .position = 70, .n_rows = 5, .ring = 2}},
    };
    for (int i = 0; i < 2; i++) {
        note(&d, notes[i], 5, CAPACITY);
        assert_int_equal(
            cpu->ops->note_states(cpu, 5, notes[i], b.x, &b.plane, b.page, CAPACITY, rings), 0);
    }
    const size_t ring_bytes = (size_t)4 * KERN_STATE_QUERIES * COLS * 4;
    uint8_t *arena = dev_get(k, d.arena, b.arena_bytes), *got = dev_get(k, d.ring, ring_bytes);
    score_bed_assert_bounds(&b, arena, 4e-6, "a batch");
    for (size_t i = 0; i < b.arena_bytes; i++)
        if (arena[i] != b.arena[i])
            fail_msg("byte %zu of page %zu differs", i % b.plane.page_stride,
                     i / b.plane.page_stride);
    for (size_t i = 0; i < ring_bytes; i++)
        if (got[i] != ((uint8_t *)rings)[i])
            fail_msg("ring %zu, slot %zu differs", i / 4 / COLS / KERN_STATE_QUERIES,
                     i / 4 / COLS % KERN_STATE_QUERIES);
    free(arena), free(got), free(rings);
    free_device(&d);
    score_bed_close(&b);
    cpu->ops->close(cpu);
    k->ops->close(k);
}

/* ---- score ---- */

static const float *put_weights(struct kern *k, const float *w, size_t n) {
    return w ? dev_put(k, w, n * sizeof *w) : NULL;
}
static struct kern_scorer scorer_on(struct kern *k, const struct kern_scorer *s) {
    const size_t cols = (size_t)s->cols, w = (size_t)s->width;
    const size_t n = (size_t)s->n_heads * (size_t)s->head_dim;
    struct kern_scorer d = *s;
    d.a = put_weights(k, s->a, n * cols), d.b = put_weights(k, s->b, n * cols);
    d.ln_weight = put_weights(k, s->ln_weight, 2 * cols);
    d.ln_bias = put_weights(k, s->ln_bias, 2 * cols);
    d.w1 = put_weights(k, s->w1, w * 2 * cols), d.b1 = put_weights(k, s->b1, w);
    d.w2 = put_weights(k, s->w2, w), d.b2 = put_weights(k, s->b2, 1);
    return d;
}
static void free_scorer_on(struct kern *k, struct kern_scorer *d) {
    const float *all[] = {d->a, d->b, d->w1, d->b1, d->w2, d->b2, d->ln_weight, d->ln_bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        k->ops->unreserve(k, (void *)(uintptr_t)all[i]);
}

/* Scores on the device; one more float behind them must stay as it is. */
static float *scores(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                     int n_blocks) {
    const size_t bytes = k->ops->score_scratch_bytes(k, s, s->by_quarter ? n_blocks / 4 : n_blocks);
    void *scratch = dev_put(k, NULL, bytes + 64);
    float *out = dev_put(k, NULL, ((size_t)n_blocks + 1) * 4);
    assert_int_equal(k->ops->score(k, s, v, scratch, out), 0);
    float *got = dev_get(k, out, ((size_t)n_blocks + 1) * 4);
    uint8_t *behind = dev_get(k, (uint8_t *)scratch + bytes, 64);
    uint32_t last;
    memcpy(&last, &got[n_blocks], 4);
    assert_int_equal(last, 0xFFFFFFFF);
    for (int i = 0; i < 64; i++)
        if (behind[i] != 0xFF) fail_msg("byte %d behind the scratch was written", i);
    free(behind);
    k->ops->unreserve(k, scratch);
    k->ops->unreserve(k, out);
    return got;
}

static float *twin_scores(const struct kern_scorer *s, const struct score_bed *b) {
    struct kern *cpu = cpu_twin();
    struct kern_score_view v = score_bed_view(b);
    size_t bytes = cpu->ops->score_scratch_bytes(cpu, s, b->n_blocks);
    void *scratch = aligned_alloc(64, bytes / 64 * 64 + 64);
    float *want = malloc((size_t)score_bed_n(b, s) * 4);
    assert_true(scratch && want);
    assert_int_equal(cpu->ops->score(cpu, s, &v, scratch, want), 0);
    free(scratch);
    cpu->ops->close(cpu);
    return want;
}

static struct kern_score_view view_on(const struct dev_bed *d, int n_tokens) {
    return (struct kern_score_view){
        .plane = d->plane, .page = d->page, .ring = d->ring, .n_tokens = n_tokens};
}

/* f32 sums of up to some thousand terms, the products' in parts of 32: 2e-5 of the score and of 1,
 * five times that where one column is up to 100 times the others. */
static void check_numbers(struct kern *k, const struct score_case *c, bool by_quarter) {
    struct score_bed b;
    struct kern_scorer s;
    score_bed_case(c, &b, &s);
    s.by_quarter = by_quarter;
    score_bed_naive_note(&b, 0, b.n_tokens);
    struct dev_bed d = to_device(k, &b);
    struct kern_scorer on = scorer_on(k, &s);
    struct kern_score_view v = view_on(&d, b.n_tokens);
    const int n_all = score_bed_n(&b, &s);
    float *got = scores(k, &on, &v, n_all), *want = twin_scores(&s, &b);
    const double tolerance = c->massive > 1 ? 1e-4 : 2e-5;
    double worst = 0;
    for (int i = 0; i < n_all; i++) {
        if (got[i] == want[i]) continue; /* an empty quarter */
        const double off = fabs((double)got[i] - (double)want[i]) / (1 + fabs((double)want[i]));
        if (!(off <= tolerance))
            fail_msg("%s: number %d of %d is %.9g, not %.9g", score_case_name(c), i, n_all,
                     (double)got[i], (double)want[i]);
        worst = fmax(worst, off);
    }
    print_message("%s: off by %.2g at most\n", score_case_name(c), worst);
    free(got), free(want);
    free_scorer_on(k, &on);
    free_device(&d);
    score_bed_free_scorer(&s);
    score_bed_close(&b);
}

static void check_case(struct kern *k, const struct score_case *c) {
    const struct kern_scorer s = {.kind = c->kind, .by_first = c->by_first};
    check_numbers(k, c, false);
    if (score_bed_has_quarters(&s)) check_numbers(k, c, true);
}

static void test_cuda_score_cases(void) {
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < n_score_cases; i++) check_case(k, &score_cases[i]);
    k->ops->close(k);
}

/* More tiles than one in both directions, and sums as long as a large model's. */
static void test_cuda_score_large(void) {
    static const struct score_case cases[] = {
        {KERN_SCORE_LATE, 4096, 64 * 70 + 17, 32, 4, 64, 0, true, false, false, 1},
        {KERN_SCORE_MLP, 1024, 64 * 290 + 1, 32, 0, 0, 400, true, false, true, 1},
        {KERN_SCORE_MEAN, 4096, 64 * 600, 32, 0, 0, 0, true, false, false, 1},
        {KERN_SCORE_MINMAX, 4096, 64 * 20 + 3, 32, 0, 0, 0, true, false, false, 1},
        {KERN_SCORE_BOUND, 4096, 64 * 20 + 3, 32, 0, 0, 0, true, false, false, 1},
    };
    struct kern *k = cuda_or_skip();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(k, &cases[i]);
    k->ops->close(k);
}

static void test_cuda_score_places(void) {
    enum { BLOCKS = 37, FEWER = 29, TURN = 11 };
    struct kern *k = cuda_or_skip();
    for (int c = 0; c < n_score_cases; c++) {
        struct score_case sc = score_cases[c];
        struct score_bed b;
        struct kern_scorer s;
        int32_t turned[BLOCKS];
        sc.n_tokens = BLOCKS * 64;
        score_bed_case(&sc, &b, &s);
        score_bed_naive_note(&b, 0, b.n_tokens);
        struct dev_bed d = to_device(k, &b);
        struct kern_scorer on = scorer_on(k, &s);
        struct kern_score_view v = view_on(&d, b.n_tokens), other = view_on(&d, FEWER * 64);
        for (int n = 0; n < BLOCKS; n++) turned[n] = b.page[(n + TURN) % BLOCKS];
        int32_t *page = dev_put(k, turned, sizeof turned);
        other.page = page;
        float *all = scores(k, &on, &v, BLOCKS), *got = scores(k, &on, &other, FEWER);
        for (int n = 0; n < FEWER; n++)
            if (memcmp(&got[n], &all[(n + TURN) % BLOCKS], 4) != 0)
                fail_msg("%s: block %d at place %d is %.9g, not %.9g", score_case_name(&sc),
                         (n + TURN) % BLOCKS, n, (double)got[n], (double)all[(n + TURN) % BLOCKS]);
        free(all), free(got);
        k->ops->unreserve(k, page);
        free_scorer_on(k, &on);
        free_device(&d);
        score_bed_free_scorer(&s);
        score_bed_close(&b);
    }
    k->ops->close(k);
}

static void test_cuda_score_nan(void) {
    enum { BAD = 5 };
    struct kern *k = cuda_or_skip();
    struct err e = {0};
    const float nan = NAN;
    for (int c = 0; c < n_score_cases; c++) {
        struct score_case sc = score_cases[c];
        struct score_bed b;
        struct kern_scorer s;
        sc.n_tokens = 18 * 64 + 40;
        score_bed_case(&sc, &b, &s);
        score_bed_naive_note(&b, 0, b.n_tokens);
        struct dev_bed d = to_device(k, &b);
        struct kern_scorer on = scorer_on(k, &s);
        struct kern_score_view v = view_on(&d, b.n_tokens);
        float *clean = scores(k, &on, &v, b.n_blocks);
        int n_at, at = score_bed_element(&b, &s, &n_at);
        float *plane = (float *)(void *)(d.arena + (size_t)b.page[BAD] * b.plane.page_stride +
                                         b.plane.plane_offset);
        for (int n = 0; n < n_at; n++)
            assert_ok(k->ops->upload(k, plane + at + n * s.cols, &nan, 4, &e), e);
        float *got = scores(k, &on, &v, b.n_blocks);
        for (int n = 0; n < b.n_blocks; n++)
            if (isnan(clean[n]) || (n == BAD ? !isnan(got[n]) : got[n] != clean[n]))
                fail_msg("%s: a NaN in block %d, block %d is %g, was %g", score_case_name(&sc), BAD,
                         n, (double)got[n], (double)clean[n]);
        free(got);
        float *newest = d.ring + (size_t)((b.n_tokens - 1) % 32) * (size_t)s.cols;
        assert_ok(k->ops->upload(k, newest, &nan, 4, &e), e);
        got = scores(k, &on, &v, b.n_blocks);
        for (int n = 0; n < b.n_blocks; n++)
            if (!isnan(got[n]))
                fail_msg("%s: a NaN query, block %d is %g", score_case_name(&sc), n,
                         (double)got[n]);
        free(got), free(clean);
        free_scorer_on(k, &on);
        free_device(&d);
        score_bed_free_scorer(&s);
        score_bed_close(&b);
    }
    k->ops->close(k);
}

/* A recording of notes and scores, replayed over other states: what the same calls give. */
static void test_cuda_score_recorded(void) {
    const struct score_case c = {KERN_SCORE_LATE, 160, 200, 32, 2, 64, 0, true, false, false, 1};
    const uint64_t key[KERN_RECORD_KEY] = {4711};
    struct kern *k = cuda_or_skip();
    struct score_bed b;
    struct kern_scorer s;
    struct err e = {0};
    score_bed_case(&c, &b, &s);
    struct dev_bed d = to_device(k, &b);
    struct kern_scorer on = scorer_on(k, &s);
    struct kern_score_view v = view_on(&d, b.n_tokens);
    struct kern_note one = {.n_rows = b.n_tokens}, *note_at = dev_put(k, &one, sizeof one);
    void *scratch = dev_put(k, NULL, k->ops->score_scratch_bytes(k, &on, b.n_blocks));
    float *out = dev_put(k, NULL, (size_t)b.n_blocks * 4);
    const size_t n = (size_t)b.n_tokens * (size_t)b.cols;
    for (int turn = 0; turn < 4; turn++) {
        bool replayed;
        for (size_t i = 0; i < n; i++) b.x[i] = test_signed(50 + (uint64_t)turn, i);
        assert_ok(k->ops->upload(k, d.x, b.x, n * 4, &e), e);
        assert_ok(k->ops->record_begin(k, key, &replayed, &e), e);
        if (!replayed) {
            assert_int_equal(
                k->ops->note_states(k, 1, note_at, d.x, &d.plane, d.page, b.n_blocks, d.ring), 0);
            assert_int_equal(k->ops->score(k, &on, &v, scratch, out), 0);
            assert_ok(k->ops->record_end(k, &e), e);
        }
        assert_true(replayed || turn < 3);
        float *got = dev_get(k, out, (size_t)b.n_blocks * 4), *direct;
        direct = scores(k, &on, &v, b.n_blocks);
        assert_memory_equal(got, direct, (size_t)b.n_blocks * 4);
        score_bed_naive_note(&b, 0, b.n_tokens);
        float *want = twin_scores(&s, &b);
        assert_true(test_rel_error(got, want, (size_t)b.n_blocks, 1) < 2e-5);
        free(got), free(direct), free(want);
    }
    void *const all[] = {note_at, scratch, out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) k->ops->unreserve(k, all[i]);
    free_scorer_on(k, &on);
    free_device(&d);
    score_bed_free_scorer(&s);
    score_bed_close(&b);
    k->ops->close(k);
}

const struct test tests[] = {
    {"cuda_note_states", TEST_GPU, 60000, test_cuda_note_states},
    {"cuda_note_states_bounds", TEST_GPU, 60000, test_cuda_note_states_bounds},
    {"cuda_note_states_batch", TEST_GPU, 60000, test_cuda_note_states_batch},
    {"cuda_score_cases", TEST_GPU, 60000, test_cuda_score_cases},
    {"cuda_score_large", TEST_GPU, 60000, test_cuda_score_large},
    {"cuda_score_places", TEST_GPU, 60000, test_cuda_score_places},
    {"cuda_score_nan", TEST_GPU, 60000, test_cuda_score_nan},
    {"cuda_score_recorded", TEST_GPU, 60000, test_cuda_score_recorded},
    {0},
};
