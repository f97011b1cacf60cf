/* Goal: what stands between passes does on the device what the CPU does. Method: the same arrays on
 * both backends, compared byte for byte after every step: draft passes of 77 sequences with ragged
 * lengths, tokens of -1, bans that end and lists with holes, alone and through a recording; counts
 * of random rounds that saturate; marks around copies of known size. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "tests/cuda_helper.h"

enum { N = 77, MAX_DRAFT = 9, CAPACITY = 40, N_TARGET = N * (MAX_DRAFT + 1), N_PASSES = 11 };

static int32_t pick(uint64_t seed, uint64_t i, int n) {
    return (int32_t)(rng_u32(seed, i, RNG_TEST, 0) % (uint32_t)n);
}

/* ---- advance ---- */

/* Everything that it reads and writes, in one piece so that it is compared at once. */
struct arrays {
    struct kern_drawing drawing[N];
    struct kern_sample params[N];
    int32_t token[N], position[N], row_seq[N], slot_page[N], seq_row[N], seq_n_rows[N],
        logit_row[N];
    int32_t list[N * CAPACITY], drawn[N * MAX_DRAFT], target[N_TARGET];
};

static void fill(struct arrays *a) {
    memset(a, 0, sizeof *a);
    for (int i = 0; i < N * CAPACITY; i++) a->list[i] = 100 + i;
    memset(a->drawn, 0x55, sizeof a->drawn);
    memset(a->target, 0x66, sizeof a->target);
    for (int i = 0; i < N; i++) {
        uint64_t at = 8 * (uint64_t)i;
        int hole = i % 3 ? 0 : pick(1, at, 20), room = (CAPACITY + hole) * KERN_BLOCK;
        int first = hole * KERN_BLOCK + KERN_BLOCK;
        int position = first + pick(1, at + 1, room - first - MAX_DRAFT);
        a->drawing[i] = (struct kern_drawing){.n_draft = pick(1, at + 2, MAX_DRAFT + 1),
                                              .first_drawn = i * MAX_DRAFT,
                                              .first_target = i * (MAX_DRAFT + 1) + 1,
                                              .min_position = position + pick(1, at + 3, 12) - 4,
                                              .hole = hole};
        a->params[i] = (struct kern_sample){.temperature = 0.5f,
                                            .seed = at,
                                            .position = position,
                                            .first_recent = i * MAX_DRAFT,
                                            .probs_row = i % 2 ? i * MAX_DRAFT : -1,
                                            .history = -1,
                                            .n_banned = i % 4};
    }
}

static void sample(struct kern_sampled *out, int pass) {
    memset(out, 0, N * sizeof *out);
    for (int i = 0; i < N; i++) {
        int32_t t = pick(2 + (uint64_t)pass, (uint64_t)i, 50000);
        out[i].token = t % 11 ? t : -1;
    }
}

static void advance(struct kern *k, struct arrays *dev, const struct kern_sampled *out, int n) {
    const struct kern_next next = {dev->token,   dev->position,   dev->row_seq,   dev->slot_page,
                                   dev->seq_row, dev->seq_n_rows, dev->logit_row, dev->params,
                                   dev->list,    CAPACITY};
    assert_int_equal(k->ops->advance(k, n, dev->drawing, out, &next, dev->drawn, dev->target), 0);
}

/* The first byte that differs, by its place in the struct. */
static void assert_arrays(const struct arrays *got, const struct arrays *want, int pass) {
    const uint8_t *g = (const uint8_t *)got, *w = (const uint8_t *)want;
    for (size_t i = 0; i < sizeof *got; i++)
        if (g[i] != w[i])
            fail_msg("pass %d: byte %zu is %d, not %d (params at %zu, token at %zu, position %zu, "
                     "row_seq %zu, slot_page %zu, drawn %zu, target %zu)",
                     pass, i, g[i], w[i], offsetof(struct arrays, params),
                     offsetof(struct arrays, token), offsetof(struct arrays, position),
                     offsetof(struct arrays, row_seq), offsetof(struct arrays, slot_page),
                     offsetof(struct arrays, drawn), offsetof(struct arrays, target));
}

static void check_advance(bool recorded) {
    static struct arrays want;
    static struct kern_sampled out[N];
    struct kern *cuda = cuda_or_skip(), *cpu = cpu_twin();
    struct err e = {0};
    fill(&want);
    struct arrays *dev = dev_put(cuda, &want, sizeof want);
    struct kern_sampled *dev_out = dev_put(cuda, NULL, sizeof out);
    const uint64_t key[KERN_RECORD_KEY] = {77};
    for (int pass = 0; pass < N_PASSES; pass++) {
        int n = recorded ? N : N - 5 * (pass % 3);
        bool replayed = false;
        sample(out, pass);
        advance(cpu, &want, out, n);
        assert_ok(cuda->ops->upload(cuda, dev_out, out, sizeof out, &e), e);
        if (recorded) assert_ok(cuda->ops->record_begin(cuda, key, &replayed, &e), e);
        if (!replayed) {
            advance(cuda, dev, dev_out, n);
            if (recorded) assert_ok(cuda->ops->record_end(cuda, &e), e);
        }
        struct arrays *got = dev_get(cuda, dev, sizeof *got);
        assert_arrays(got, &want, pass);
        free(got);
    }
    cuda->ops->unreserve(cuda, dev);
    cuda->ops->unreserve(cuda, dev_out);
    cuda->ops->close(cuda);
    cpu->ops->close(cpu);
}

static void test_cuda_advance_passes(void) {
    check_advance(false);
}
static void test_cuda_advance_recorded(void) {
    check_advance(true);
}

/* ---- tally ---- */

static void test_cuda_advance_tally(void) {
    enum { ROUNDS = 150, VOCAB = 300, HISTORIES = 20, ROWS = ROUNDS * (KERN_MAX_DRAFT + 1) };
    static struct kern_round rounds[ROUNDS];
    static struct kern_sample params[ROWS];
    static struct kern_sampled out[ROWS];
    static int32_t n_accepted[ROUNDS];
    static uint16_t want[HISTORIES * VOCAB];
    struct kern *cuda = cuda_or_skip(), *cpu = cpu_twin();
    for (int i = 0; i < HISTORIES * VOCAB; i++)
        want[i] = (uint16_t)(i % 7 ? pick(3, (uint64_t)i, 5) : UINT16_MAX - i % 3);
    for (int i = 0; i < ROUNDS; i++) {
        rounds[i].first_row = i * (KERN_MAX_DRAFT + 1);
        n_accepted[i] = pick(4, (uint64_t)i, KERN_MAX_DRAFT + 1);
        /* A history is of one round at a time. */
        for (int r = 0; r <= KERN_MAX_DRAFT; r++)
            params[rounds[i].first_row + r].history = i < HISTORIES ? i : -1;
    }
    for (int i = 0; i < ROWS; i++) {
        int32_t t = pick(5, (uint64_t)i, VOCAB / 20) * 20;
        out[i].token = t % 7 == 3 ? -1 : i % 50 == 0 ? VOCAB : t;
    }
    struct kern_round *d_rounds = dev_put(cuda, rounds, sizeof rounds);
    struct kern_sample *d_params = dev_put(cuda, params, sizeof params);
    struct kern_sampled *d_out = dev_put(cuda, out, sizeof out);
    int32_t *d_n = dev_put(cuda, n_accepted, sizeof n_accepted);
    uint16_t *d_counts = dev_put(cuda, want, sizeof want);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(
            cuda->ops->tally(cuda, ROUNDS, d_rounds, d_params, d_n, d_out, d_counts, VOCAB), 0);
        assert_int_equal(cpu->ops->tally(cpu, ROUNDS, rounds, params, n_accepted, out, want, VOCAB),
                         0);
    }
    uint16_t *got = dev_get(cuda, d_counts, sizeof want);
    for (int i = 0; i < HISTORIES * VOCAB; i++)
        if (got[i] != want[i])
            fail_msg("history %d, token %d: %d, not %d", i / VOCAB, i % VOCAB, got[i], want[i]);
    free(got);
    void *all[] = {d_rounds, d_params, d_out, d_n, d_counts};
    for (int i = 0; i < 5; i++) cuda->ops->unreserve(cuda, all[i]);
    cuda->ops->close(cuda);
    cpu->ops->close(cpu);
}

/* ---- Marks ---- */

/* Ten copies take longer than one and neither stands still; a recording in between leaves no time;
 * a replay does. */
static void test_cuda_advance_marks(void) {
    struct kern *k = cuda_or_skip();
    struct err e = {0};
    size_t bytes = (size_t)64 << 20;
    uint8_t *p = dev_put(k, NULL, 2 * bytes);
    const uint64_t key[KERN_RECORD_KEY] = {5};
    int64_t ns[6], all;
    for (int i = 0; i < 3; i++) k->ops->copy_page(k, p + bytes, p, bytes);
    assert_int_equal(k->ops->mark(k, 0), 0);
    k->ops->copy_page(k, p + bytes, p, bytes);
    assert_int_equal(k->ops->mark(k, 1), 0);
    for (int i = 0; i < 10; i++) k->ops->copy_page(k, p + bytes, p, bytes);
    assert_int_equal(k->ops->mark(k, 2), 0);
    for (int i = 3; i < 6; i++) { /* plain, recorded, replayed */
        bool replayed;
        assert_ok(k->ops->record_begin(k, key, &replayed, &e), e);
        assert_int_equal(replayed, i == 5);
        if (!replayed) {
            k->ops->copy_page(k, p + bytes, p, bytes);
            assert_ok(k->ops->record_end(k, &e), e);
        }
        assert_int_equal(k->ops->mark(k, i), 0);
    }
    assert_ok(k->ops->sync(k, &e), e);
    for (int i = 0; i < 5; i++) assert_int_equal(k->ops->elapsed(k, i, i + 1, &ns[i]), 0);
    assert_int_equal(k->ops->elapsed(k, 0, 2, &all), 0);
    printf("a copy of 64 MiB: %.1f us; ten: %.1f us; plain %.1f, recorded %.1f, replayed %.1f us\n",
           (double)ns[0] / 1e3, (double)ns[1] / 1e3, (double)ns[2] / 1e3, (double)ns[3] / 1e3,
           (double)ns[4] / 1e3);
    assert_true(ns[0] > 5000 && ns[0] < 50000000); /* 128 MiB at no more than 25 TB/s */
    assert_true(ns[1] > 4 * ns[0]);
    assert_true(all >= ns[1] && all < 2 * (ns[0] + ns[1]));
    assert_true(ns[2] > 0);
    assert_int_equal(ns[3], 0);
    assert_true(ns[4] > 0);
    k->ops->unreserve(k, p);
    k->ops->close(k);
}

const struct test tests[] = {
    {"cuda_advance_passes", TEST_GPU, 20000, test_cuda_advance_passes},
    {"cuda_advance_recorded", TEST_GPU, 20000, test_cuda_advance_recorded},
    {"cuda_advance_tally", TEST_GPU, 20000, test_cuda_advance_tally},
    {"cuda_advance_marks", TEST_GPU, 20000, test_cuda_advance_marks},
    {0},
};
