/* How long is one pass over the model: V(rows, depth)? Prints a CSV row a point with the byte floor
 * beside it: the packed weights and the KV that a pass must read, over the read bandwidth measured
 * in this run.
 *
 *   bench_step MODEL [--threads N] [--isa NAME] [--reps N] [--points
 * gen:1:0,gen:5:0,prompt:512:0,...]
 *
 * A point is class:rows:depth. Generated rows want all their logits, prompt rows the last one's.
 * Depth is filled once a depth; each timing rolls back to it. Prints the minimum and median over
 * --reps. With --serve it reads points from stdin, one a line, and answers each with one timing:
 * for interleaving with a peer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "base/threads.h"
#include "tests/runner.h"

enum { MAX_DEPTH = 8192, MAX_REPS = 101 };

struct bench {
    struct runner *r;
    int32_t *ids;
    float *logits;
    int vocab;
};

/* Every thread reads its share once. */
struct sweep {
    const uint64_t *data;
    size_t n;
    uint64_t sum[256];
};

static void sweep_fn(void *arg, int idx, int n_threads) {
    struct sweep *s = arg;
    size_t lo = s->n * (size_t)idx / (size_t)n_threads,
           hi = s->n * (size_t)(idx + 1) / (size_t)n_threads;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = lo; i + 4 <= hi; i += 4) {
        a ^= s->data[i];
        b ^= s->data[i + 1];
        c ^= s->data[i + 2];
        d ^= s->data[i + 3];
    }
    s->sum[idx] = a ^ b ^ c ^ d;
}

static double read_bandwidth(size_t bytes, int n_threads) {
    struct threads *t;
    struct err e = {0};
    if (threads_open(&t, n_threads, &e)) return 0;
    struct sweep s = {.n = bytes / 8};
    uint64_t *data = malloc(s.n * 8);
    ASSERT(data);
    for (size_t i = 0; i < s.n; i++) data[i] = i;
    s.data = data;
    double best = 0;
    for (int i = 0; i < 20; i++) {
        int64_t start = clock_ns();
        threads_run(t, sweep_fn, &s);
        double gbs = (double)s.n * 8 / (double)(clock_ns() - start);
        best = gbs > best ? gbs : best;
    }
    free(data);
    threads_close(t);
    return best;
}

static void fill(struct bench *b, int depth) {
    if (runner_length(b->r, 0) > depth) runner_truncate(b->r, 0, depth);
    while (runner_length(b->r, 0) < depth) {
        int at = runner_length(b->r, 0), n = depth - at < 512 ? depth - at : 512;
        struct runner_piece p = {.ids = b->ids + at, .n = n, .prompt = true};
        runner_pass(b->r, &p, 1, NULL);
    }
}

static double time_pass(struct bench *b, bool prompt, int rows, int depth) {
    struct runner_piece p = {.ids = b->ids + depth, .n = rows, .prompt = prompt};
    int64_t start = clock_ns();
    runner_pass_last(b->r, &p, 1, b->logits, prompt ? 1 : rows);
    double ms = clock_ms_since(start);
    runner_truncate(b->r, 0, depth);
    return ms;
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

static int atoi_checked(const char *s) {
    char *end;
    long v = strtol(s, &end, 10);
    return *s && !*end && v > 0 && v <= 100000 ? (int)v : 0;
}

static double floor_ms(const struct bench *b, int depth, double gbs) {
    const struct model_config *c = runner_config(b->r);
    double kv = 2.0 * depth * c->n_layers * c->n_kv_heads * c->head_dim * 2;
    return ((double)runner_weight_bytes(b->r) + kv) / gbs / 1e6;
}

static bool parse_point(const char *s, bool *prompt, int *rows, int *depth) {
    char kind[8];
    return sscanf(s, "%7[a-z]:%d:%d", kind, rows, depth) == 3 &&
           (*prompt = !strcmp(kind, "prompt"), true) && *rows > 0 && *rows <= 512 && *depth >= 0 &&
           *depth + *rows <= MAX_DEPTH;
}

int main(int argc, char **argv) {
    const char *isa = NULL, *points = "gen:1:0,gen:5:0,prompt:512:0,gen:1:7168,gen:5:7168";
    int threads = 0, reps = 7, serve = 0;
    if (argc < 2) {
        fprintf(stderr,
                "usage: bench_step MODEL [--threads N] [--isa NAME] [--reps N] [--points LIST] "
                "[--serve]\n");
        return 2;
    }
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "--serve")) serve = 1;
        else if (i + 1 < argc && !strcmp(argv[i], "--threads")) threads = atoi_checked(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--reps")) reps = atoi_checked(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--isa")) isa = argv[++i];
        else if (i + 1 < argc && !strcmp(argv[i], "--points")) points = argv[++i];
        else return fprintf(stderr, "bench_step: unknown word '%s'\n", argv[i]), 2;
    }
    if (reps < 1 || reps > MAX_REPS) reps = 7;
    struct runner_options o = {.path = argv[1],
                               .isa = isa,
                               .n_threads = threads,
                               .max_tokens = MAX_DEPTH,
                               .n_seqs = 1,
                               .max_rows = 512,
                               .kv = KERN_F16};
    struct bench b = {.r = runner_open(&o)};
    b.vocab = runner_config(b.r)->vocab;
    double gbs = serve ? 0 : read_bandwidth(runner_weight_bytes(b.r), threads);
    b.ids = malloc(sizeof *b.ids * MAX_DEPTH);
    b.logits = malloc(sizeof(float) * 512 * (size_t)b.vocab);
    ASSERT(b.ids && b.logits);
    for (uint32_t i = 0; i < MAX_DEPTH; i++)
        b.ids[i] = (int32_t)(rng_u32(1, i, RNG_TEST, 0) % (uint32_t)(b.vocab - 200)) + 100;
    bool prompt;
    int rows, depth;
    if (serve) {
        char line[64];
        while (fgets(line, sizeof line, stdin)) {
            if (!parse_point(line, &prompt, &rows, &depth)) return 2;
            fill(&b, depth);
            printf("%.4f\n", time_pass(&b, prompt, rows, depth));
            fflush(stdout);
        }
        return 0;
    }
    printf("device,class,rows,depth,ms_min,ms_median,floor_ms,ratio,read_gbs\n");
    for (const char *s = points; s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL) {
        if (!parse_point(s, &prompt, &rows, &depth))
            return fprintf(stderr, "bad point '%s'\n", s), 2;
        fill(&b, depth);
        double ms[MAX_REPS];
        time_pass(&b, prompt, rows, depth);
        for (int i = 0; i < reps; i++) ms[i] = time_pass(&b, prompt, rows, depth);
        qsort(ms, (size_t)reps, sizeof *ms, by_value);
        double f = floor_ms(&b, depth, gbs);
        printf("\"%s\",%s,%d,%d,%.3f,%.3f,%.3f,%.2f,%.1f\n", runner_device(b.r),
               prompt ? "prompt" : "gen", rows, depth, ms[0], ms[reps / 2], f, ms[reps / 2] / f,
               gbs);
        fflush(stdout);
    }
    free(b.ids);
    free(b.logits);
    runner_close(b.r);
    return 0;
}
