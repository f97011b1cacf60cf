/* kernels/cpu/advance.c, the law that tests/test_cuda_advance.c holds the device to. Method: few
 * sequences, every field of the next pass's input spelled out. */
#include "tests/harness.h"

#include <string.h>
#include <time.h>

#include "base/err.h"
#include "kernels/kernels.h"

enum { N = 4, CAPACITY = 5, MAX_DRAFT = 4 };

static struct kern *open_cpu(void) {
    struct kern_options o = {.n_threads = 1};
    struct kern *k;
    struct err e = {0};
    assert_ok(kern_cpu_open(&k, &o, &e), e);
    return k;
}

static struct {
    struct kern_drawing drawing[N];
    struct kern_sample params[N];
    struct kern_sampled out[N];
    int32_t token[N], position[N], row_seq[N], slot_page[N], seq_row[N], seq_n_rows[N],
        logit_row[N], list[N * CAPACITY], drawn[N * MAX_DRAFT], target[32];
} a;

static void advance(struct kern *k, int32_t t0, int32_t t1, int32_t t2, int32_t t3) {
    const struct kern_next next = {a.token,      a.position,  a.row_seq, a.slot_page, a.seq_row,
                                   a.seq_n_rows, a.logit_row, a.params,  a.list,      CAPACITY};
    const int32_t token[N] = {t0, t1, t2, t3};
    for (int i = 0; i < N; i++) a.out[i].token = token[i];
    assert_int_equal(k->ops->advance(k, N, a.drawing, a.out, &next, a.drawn, a.target), 0);
}

static void assert_row(int i, int32_t token, int32_t position, int32_t slot) {
    assert_int_equal(a.token[i], token);
    assert_int_equal(a.position[i], position);
    assert_int_equal(a.row_seq[i], i);
    assert_int_equal(a.seq_row[i], i);
    assert_int_equal(a.seq_n_rows[i], 1);
    assert_int_equal(a.logit_row[i], i);
    assert_int_equal(a.slot_page[i], slot);
}

static void assert_idle(int i) {
    assert_int_equal(a.token[i], -1);
    assert_int_equal(a.row_seq[i], -1);
    assert_int_equal(a.seq_n_rows[i], 0);
    assert_int_equal(a.params[i].probs_row, -1);
}

/* Sequence 0 draws three tokens over a block's border, 1 one token behind a hole, 2 meets NaN, 3
 * draws nothing. */
static void test_kernels_advance_draws(void) {
    struct kern *k = open_cpu();
    memset(&a, 0, sizeof a);
    for (int i = 0; i < N * CAPACITY; i++) a.list[i] = 100 + i;
    for (int i = 0; i < N; i++) {
        a.drawing[i] =
            (struct kern_drawing){.first_drawn = i * MAX_DRAFT, .first_target = 8 * i + 1};
        a.params[i] = (struct kern_sample){.probs_row = i * MAX_DRAFT, .n_banned = 2};
        a.drawn[i * MAX_DRAFT + 3] = 7777;
    }
    a.params[0].position = 63;
    a.drawing[0].n_draft = 3;
    a.drawing[0].min_position = 65;
    a.params[1].position = 6 * 64;
    a.drawing[1].n_draft = 1;
    a.drawing[1].hole = 4;
    a.params[2].position = 10;
    a.params[2].probs_row = -1;
    a.drawing[2].n_draft = 3;

    advance(k, 5, 6, -1, 9);
    assert_row(0, 5, 63, 100);
    assert_int_equal(a.params[0].position, 64);
    assert_int_equal(a.params[0].n_recent, 1);
    assert_int_equal(a.params[0].probs_row, 1);
    assert_int_equal(a.params[0].n_banned, 2);
    for (int i = 1; i < N; i++) assert_idle(i);
    assert_int_equal(a.drawn[4], 6);
    assert_int_equal(a.target[9], 6);
    assert_int_equal(a.target[17], -1);
    assert_int_equal(a.target[25], 0);

    advance(k, 15, 16, 17, 18);
    assert_row(0, 15, 64, 101);
    assert_int_equal(a.params[0].n_banned, 0); /* position 65 may end it */
    assert_int_equal(a.drawn[5], 0);           /* sequence 1 was done */
    assert_idle(2);

    advance(k, 25, 26, 27, 28);
    for (int i = 0; i < N; i++) assert_idle(i);
    const int32_t want[N * MAX_DRAFT] = {5,  15, 25, 7777, 6, 0, 0, 7777,
                                         -1, -1, -1, 7777, 0, 0, 0, 7777};
    assert_memory_equal(a.drawn, want, sizeof want);
    assert_int_equal(a.target[1], 5);
    assert_int_equal(a.target[3], 25);
    assert_int_equal(a.target[19], -1);
    k->ops->close(k);
}

/* A token that comes twice counts twice, at the top counts stay, no id and no history are passed
 * over; what lies behind the accepted run is nobody's. */
static void test_kernels_advance_tally(void) {
    enum { VOCAB = 10 };
    struct kern *k = open_cpu();
    struct kern_round rounds[2] = {{.n_draft = 3, .first_row = 0}, {.first_row = 4}};
    struct kern_sample params[5] = {
        {.history = 1}, {.history = 1}, {.history = 1}, {.history = 1}, {.history = -1}};
    struct kern_sampled out[5] = {{.token = 3}, {.token = 3}, {.token = 9}, {.token = 4}, {0}};
    int32_t n_accepted[2] = {2, 0};
    uint16_t output[2 * VOCAB] = {0}, want[2 * VOCAB] = {0};
    output[VOCAB + 9] = want[VOCAB + 9] = UINT16_MAX;
    want[VOCAB + 3] = 2;
    assert_int_equal(k->ops->tally(k, 2, rounds, params, n_accepted, out, output, VOCAB), 0);
    assert_memory_equal(output, want, sizeof want);
    out[0].token = -1;
    out[1].token = VOCAB;
    assert_int_equal(k->ops->tally(k, 2, rounds, params, n_accepted, out, output, VOCAB), 0);
    assert_memory_equal(output, want, sizeof want);
    k->ops->close(k);
}

static void test_kernels_advance_marks(void) {
    struct kern *k = open_cpu();
    struct timespec pause = {.tv_nsec = 3000000};
    int64_t ns = -1;
    assert_int_equal(k->ops->mark(k, 0), 0);
    nanosleep(&pause, NULL);
    assert_int_equal(k->ops->mark(k, KERN_MAX_MARKS - 1), 0);
    assert_int_equal(k->ops->elapsed(k, 0, KERN_MAX_MARKS - 1, &ns), 0);
    assert_true(ns >= 3000000);
    assert_int_equal(k->ops->elapsed(k, 0, 0, &ns), 0);
    assert_int_equal(ns, 0);
    k->ops->close(k);
}

const struct test tests[] = {
    {"kernels_advance_draws", TEST_QUICK, 5000, test_kernels_advance_draws},
    {"kernels_advance_tally", TEST_QUICK, 5000, test_kernels_advance_tally},
    {"kernels_advance_marks", TEST_QUICK, 5000, test_kernels_advance_marks},
    {0},
};
