#ifndef TANDEM_BENCH_KERNELS_BENCH_H
#define TANDEM_BENCH_KERNELS_BENCH_H

/* What the families of bench_kernels share: the backend and its twin, the run's floors, memory,
 * timing of a train of recorded operations, and the CSV row. Any error ends the process. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "bench/device_floor.h"
#include "kernels/kernels.h"

enum { KBENCH_MAX_REPS = 101 };

struct kbench {
    struct kern *k, *twin; /* CUDA; the CPU's reference, sums in double */
    struct device_floor *floor;
    double bandwidth; /* bytes a second of this run */
    double matrix;    /* operations a second of this run */
    bool counts;      /* the bandwidth is what the chip should give */
    bool quick;
    const char *match; /* products: only those whose "dtype shape" holds it; NULL: all */
    int reps;
    uint64_t seed; /* of this run */
    uint64_t n_points, n_draws;
};

/* One line of output. us is filled by kbench_measure; 0 in floor_us: none. */
struct kbench_point {
    const char *family, *kernel, *dtype, *shape;
    int rows, batch, context;
    double us, us_min;
    double bytes;    /* that one call must move: its byte floor */
    double flops;    /* that one call must do on the matrix units; 0: not counted */
    double distinct; /* bytes of distinct data that one timing goes through */
    double goal;     /* share of the floor's speed that is aimed at; 0: no goal */
    double goal_us;  /* beside it: floor plus so many microseconds will do too */
};

/* Twin of printf for `# ` lines. */
void kbench_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
__attribute__((noreturn)) void kbench_die(const char *what, const char *detail);
/* rc of a call that fills e; of an operation that has none (e NULL). */
void kbench_must(struct kbench *b, int rc, const struct err *e, const char *what);

void *kbench_host(size_t bytes); /* zeroed, 64-byte aligned */
void *kbench_reserve(struct kbench *b, size_t bytes);
void *kbench_put(struct kbench *b, const void *host, size_t bytes);
void kbench_get(struct kbench *b, void *host, const void *src, size_t bytes);
void kbench_free(struct kbench *b, void *p);

/* A seed that no other call and no other run gets; the next 64 bits from it (xorshift64*); n
 * floats, uniform in (-scale, scale). */
uint64_t kbench_seed(struct kbench *b);
uint64_t kbench_random(uint64_t *state);
float *kbench_floats(struct kbench *b, size_t n, float scale);

/* Record `calls` calls of enqueue(arg, i), replay them --reps times back to back, and note the
 * median and least microseconds of one call. */
void kbench_measure(struct kbench *b, struct kbench_point *p, int calls,
                    int (*enqueue)(void *arg, int i), void *arg);
void kbench_header(void);
void kbench_print(const struct kbench *b, const struct kbench_point *p);

/* |got - want| <= tolerance, or the process ends with place and values. */
void kbench_check(const char *what, long long place, double got, double want, double tolerance);

/* The families. */
void kbench_products(struct kbench *b);  /* kernels_products.c */
void kbench_attention(struct kbench *b); /* kernels_attention.c */
void kbench_rows(struct kbench *b);      /* kernels_rows.c */
void kbench_drawing(struct kbench *b);   /* kernels_drawing.c */
void kbench_scores(struct kbench *b);    /* kernels_scores.c */

#endif
