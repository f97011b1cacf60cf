/* What do all matrix products of a pass cost, by generated rows: V(1..9) of products alone?
 *
 *   bench_products MODEL [--target FILE] [--threads N] [--isa NAME] [--reps N] [--max-rows N]
 *                  [--against NAME]
 *
 * The model's own packed matrices are multiplied in the order of a pass (layers, then the head for
 * all rows), with activations packed beforehand: norms, attention and sampling are left out. Beside
 * the time stands the bound max(bytes / bandwidth, rows x products / rate): bandwidth of reading as
 * many bytes, rate of the register-only loop of the format's instruction (VPDPBUSD), both measured
 * in this run on the same threads. A turn takes every row count and both floors once, so that the
 * machine's slow minutes hit all of them; minima and medians over --reps turns. --target names the
 * model that a draft borrows its embedding from. CSV on stdout.
 *
 * --against names another instruction set, whose passes take turns with the first one's; what is
 * printed is the sum over all products of each one's best time, of both, and their ratio. On a busy
 * machine a whole pass hardly ever runs undisturbed, one product does. */
#include <stdio.h>

#include "base/number.h"
#include "base/rng.h"
#include "bench/floors.h"
#include "model/model_private.h"
#include "tests/runner.h"

enum { MAX_ROWS = 16, MAX_REPS = 501 };

struct bench {
    struct kern *k;
    const struct kern_weight **w; /* in a pass's order */
    int n_w;
    struct kern_act act[MAX_ROWS + 1][4]; /* [rows][which width] */
    int cols[4], n_cols;
    float *out;
    double bytes, products; /* of one row */
};

static void add(struct bench *b, const struct kern_weight *w) {
    int i = 0;
    while (i < b->n_cols && b->cols[i] != w->cols) i++;
    if (i == b->n_cols) {
        ASSERT(i < 4);
        b->cols[b->n_cols++] = w->cols;
    }
    b->w[b->n_w++] = w;
    b->bytes += (double)w->bytes;
    b->products += (double)w->rows * w->cols;
}

static void add_linear(struct bench *b, const struct model_linear *l) {
    for (int i = 0; i < l->n_parts; i++) add(b, &l->part[i]);
}

static struct bench bench_open(const struct model *m, int max_rows) {
    struct bench b = {.k = m->k};
    int n = m->config.n_layers, widest = 0;
    b.w = malloc(sizeof *b.w * (size_t)(n * 4 * MODEL_MAX_PARTS + 1));
    ASSERT(b.w);
    for (int i = 0; i < n; i++) {
        add_linear(&b, &m->layers[i].qkv);
        add_linear(&b, &m->layers[i].o);
        add_linear(&b, &m->layers[i].gate_up);
        add_linear(&b, &m->layers[i].down);
    }
    add(&b, &m->head);
    for (int i = 0; i < b.n_w; i++) widest = b.w[i]->rows > widest ? b.w[i]->rows : widest;
    b.out = malloc(sizeof *b.out * (size_t)max_rows * (size_t)widest);
    ASSERT(b.out);
    for (int c = 0; c < b.n_cols; c++) {
        size_t values = (size_t)max_rows * (size_t)b.cols[c];
        float *x = malloc(sizeof *x * values);
        ASSERT(x);
        for (size_t i = 0; i < values; i++) x[i] = rng_uniform(3, i / 4, RNG_TEST, i % 4) - .5f;
        for (int r = 1; r <= max_rows; r++) {
            struct kern_rows rows = {.n_gen = r};
            size_t bytes = (b.k->ops->act_bytes(b.k, rows, b.cols[c]) + 63) / 64 * 64;
            b.act[r][c] = (struct kern_act){.data = aligned_alloc(64, bytes), .bytes = bytes};
            ASSERT(b.act[r][c].data);
            b.k->ops->pack(b.k, rows, b.cols[c], x, b.act[r][c]);
        }
        free(x);
    }
    return b;
}

static void bench_close(struct bench *b) {
    for (int r = 0; r <= MAX_ROWS; r++)
        for (int c = 0; c < 4; c++) free(b->act[r][c].data);
    free(b->out);
    free(b->w);
}

static void product(const struct bench *b, int rows, const struct kern_weight *w) {
    int c = 0;
    while (b->cols[c] != w->cols) c++;
    b->k->ops->matmul(b->k, (struct kern_rows){.n_gen = rows}, w, b->act[rows][c], b->out, w->rows,
                      0);
}

static double pass_ms(const struct bench *b, int rows) {
    int64_t start = clock_ns();
    for (int i = 0; i < b->n_w; i++) product(b, rows, b->w[i]);
    return clock_ms_since(start);
}

/* best_ns[n_w]: the least of what it was and what product i takes in this pass. */
static void pass_best(const struct bench *b, int rows, int64_t *best_ns) {
    for (int i = 0; i < b->n_w; i++) {
        int64_t start = clock_ns();
        product(b, rows, b->w[i]);
        int64_t ns = clock_ns() - start;
        best_ns[i] = ns < best_ns[i] ? ns : best_ns[i];
    }
}

/* The same products by two instruction sets in turns. */
static void compare(const struct bench b[2], const char *device, const char *other, int max_rows,
                    int reps) {
    int64_t *best[2];
    printf("device,against,rows,ms,against_ms,ratio\n");
    for (int rows = 1; rows <= max_rows; rows++) {
        double ms[2] = {0};
        for (int s = 0; s < 2; s++) {
            best[s] = malloc(sizeof *best[s] * (size_t)b[s].n_w);
            ASSERT(best[s]);
            for (int i = 0; i < b[s].n_w; i++) best[s][i] = INT64_MAX;
        }
        for (int i = 0; i < 2 * reps; i++) {
            int s = (i + i / 2) % 2; /* either is first in every second turn */
            pass_best(&b[s], rows, best[s]);
        }
        for (int s = 0; s < 2; s++) {
            for (int i = 0; i < b[s].n_w; i++) ms[s] += (double)best[s][i] * 1e-6;
            free(best[s]);
        }
        printf("\"%s\",\"%s\",%d,%.3f,%.3f,%.3f\n", device, other, rows, ms[0], ms[1],
               ms[0] / ms[1]);
    }
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

/* -1: no number of [lo, hi]. */
static int number(const char *text, int lo, int hi) {
    int n = -1;
    number_in(text, strlen(text), lo, hi, &n);
    return n;
}

int main(int argc, char **argv) {
    struct runner_options o = {.max_tokens = 64, .n_seqs = 1, .max_rows = 64, .kv = KERN_F16};
    int reps = 51, max_rows = 9;
    const char *against = NULL;
    for (int i = 1; i < argc; i++) {
        const char *next = i + 1 < argc ? argv[i + 1] : NULL;
        if (argv[i][0] != '-' && !o.path) o.path = argv[i];
        else if (!next) o.path = NULL, i = argc;
        else if (!strcmp(argv[i], "--target")) o.target_path = argv[++i];
        else if (!strcmp(argv[i], "--isa")) o.isa = argv[++i];
        else if (!strcmp(argv[i], "--against")) against = argv[++i];
        else if (!strcmp(argv[i], "--threads")) o.n_threads = number(argv[++i], 0, 256);
        else if (!strcmp(argv[i], "--reps")) reps = number(argv[++i], 1, MAX_REPS);
        else if (!strcmp(argv[i], "--max-rows")) max_rows = number(argv[++i], 1, MAX_ROWS);
        else o.path = NULL, i = argc;
    }
    if (!o.path || reps < 0 || max_rows < 0 || o.n_threads < 0) {
        fprintf(stderr, "usage: bench_products MODEL [--target FILE] [--threads N] [--isa NAME] "
                        "[--reps N] [--max-rows N] [--against NAME]\n");
        return 2;
    }
    struct runner *r = runner_open(&o);
    struct bench b = bench_open(runner_model(r), max_rows);
    if (against) {
        struct runner_options other = o;
        other.isa = against;
        struct runner *r2 = runner_open(&other);
        struct bench both[2] = {b, bench_open(runner_model(r2), max_rows)};
        compare(both, runner_device(r), runner_device(r2), max_rows, reps);
        bench_close(&both[1]);
        runner_close(r2);
        bench_close(&b);
        runner_close(r);
        return 0;
    }
    struct err e = {0};
    struct threads *team;
    ASSERT(threads_open(&team, o.n_threads, &e) == 0);
    struct sweep sweep = sweep_open((size_t)b.bytes);
    register_loop *loop = loop_of_weights(runner_device(r), false);
    double(*ms)[MAX_REPS] = calloc(MAX_ROWS + 1, sizeof *ms), bandwidth = 0, rate = 0;
    ASSERT(ms);
    pass_ms(&b, max_rows);
    for (int i = 0; i < reps; i++) {
        for (int rows = 1; rows <= max_rows; rows++) ms[rows][i] = pass_ms(&b, rows);
        /* The first ones find this team asleep and the other one still spinning. */
        for (int f = 0; f < 4; f++) {
            bandwidth = fmax(bandwidth, sweep_bytes(&sweep) / sweep_time(&sweep, team));
            if (loop) rate = fmax(rate, floor_rate(loop, team));
        }
        /* The sweeps put the matrices out of the caches that passes leave them in. */
        for (int f = 0; f < 3; f++) pass_ms(&b, max_rows);
    }
    printf("# %d products, %.1f MB, %.1f M multiply-adds a row; reads %.1f GB/s, registers %.0f "
           "GMAC/s\n",
           b.n_w, b.bytes / 1e6, b.products / 1e6, bandwidth / 1e9, rate / 1e9);
    printf("device,rows,ms_min,ms_median,byte_floor_ms,mac_floor_ms,min_times_bound\n");
    for (int rows = 1; rows <= max_rows; rows++) {
        double bytes_ms = b.bytes / bandwidth * 1e3;
        double macs_ms = loop ? rows * b.products / rate * 1e3 : 0;
        qsort(ms[rows], (size_t)reps, sizeof ms[0][0], by_value);
        printf("\"%s\",%d,%.3f,%.3f,%.3f,%.3f,%.2f\n", runner_device(r), rows, ms[rows][0],
               ms[rows][reps / 2], bytes_ms, macs_ms, ms[rows][0] / fmax(bytes_ms, macs_ms));
    }
    free(ms);
    sweep_close(&sweep);
    threads_close(team);
    bench_close(&b);
    runner_close(r);
    return 0;
}
