#ifndef TANDEM_BENCH_FLOORS_H
#define TANDEM_BENCH_FLOORS_H

/* What a team of threads cannot go under: bytes a second of reading a buffer, products a second of
 * a loop that touches registers only (register_loops.h). */

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/threads.h"
#include "bench/register_loops.h"

enum { FLOOR_PAGE = 2 << 20, FLOOR_AHEAD = 4096 };

/* A buffer on huge pages; every thread reads its share once, as four streams that are read ahead:
 * the fastest way found. */
struct sweep {
    uint64_t *data;
    size_t n; /* words */
    uint64_t sum[256];
};

static void sweep_fn(void *arg, int idx, int n_threads) {
    struct sweep *s = arg;
    size_t share = s->n / (size_t)n_threads, quarter = share / 4 / 8 * 8;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < quarter; i += 8)
        for (size_t k = 0; k < 4; k++) {
            const uint64_t *p = s->data + share * (size_t)idx + quarter * k + i;
            __builtin_prefetch((const char *)p + FLOOR_AHEAD, 0, 2);
            for (int y = 0; y < 8; y++) sum[y] ^= p[y];
        }
    for (int y = 1; y < 8; y++) sum[0] ^= sum[y];
    s->sum[idx] = sum[0];
}

static inline struct sweep sweep_open(size_t bytes) {
    bytes = bytes / FLOOR_PAGE * FLOOR_PAGE + FLOOR_PAGE;
    struct sweep s = {.n = bytes / 8, .data = aligned_alloc(FLOOR_PAGE, bytes + FLOOR_PAGE)};
    ASSERT(s.data);
    madvise(s.data, bytes + FLOOR_PAGE, MADV_HUGEPAGE);
    memset(s.data, 1, bytes + FLOOR_PAGE);
    return s;
}

/* Seconds of one sweep over sweep_bytes. */
static inline double sweep_time(struct sweep *s, struct threads *t) {
    int64_t start = clock_ns();
    threads_run(t, sweep_fn, s);
    return (double)(clock_ns() - start) / 1e9;
}

static inline double sweep_bytes(const struct sweep *s) {
    return (double)s->n * 8;
}

static inline void sweep_close(struct sweep *s) {
    free(s->data);
}

struct floor_loop {
    register_loop *run;
    double got[256];
};

static void floor_loop_fn(void *arg, int idx, int n_threads) {
    struct floor_loop *l = arg;
    (void)n_threads;
    l->got[idx] = l->run();
}

/* Products a second of a register-only loop on all threads, one run of it. */
static inline double floor_rate(register_loop *run, struct threads *t) {
    struct floor_loop l = {.run = run};
    double n = 0;
    int64_t start = clock_ns();
    threads_run(t, floor_loop_fn, &l);
    double s = (double)(clock_ns() - start) / 1e9;
    for (int k = 0; k < threads_n(t); k++) n += l.got[k];
    return n / s;
}

#endif
