/* How long is one pass over the model: V(batch, rows, context)? Prints a CSV row a point with its
 * floors beside it, measured in this run: the packed weights and the KV that a pass must read over
 * the bandwidth of reading as many bytes; its products over the rate of register-only loops (AMX
 * for prompt rows, VPDPBUSD for weights and FMA for attention of generated rows).
 *
 *   bench_step MODEL [--threads N] [--isa NAME] [--reps N] [--points LIST] [--select-layer N]
 *              [--kv-type f16|q8_0]
 *   bench_step MODEL --device cuda [--load-format dummy] [--reps N] [--chunk ROWS] [--points LIST]
 *
 * On a CUDA device (step_device.c) MODEL may be a config.json whose weights are random. A point is
 * class:rows:depth[:batch[:keep]], as in gen:5:32768:1,prompt:8192:0 (a batch on a device only).
 * keep: so many blocks of 64 tokens are read by the layers from --select-layer on (default
 * round(3 L / 16)), generated rows only; 0: all. Generated rows want all their logits, prompt rows
 * the last one's. Depth is filled once a depth; each timing rolls back to it. Prints the minimum
 * and median over --reps. sum_floor_ms is the sum over the two kinds of operation, products and
 * attention, of the larger of bytes and multiplications: what a step can do where they do not
 * overlap. With --serve it reads points from stdin, one a line, and answers each with one timing,
 * and "floors POINT" with byte floor, product floor (ms) and GB/s: for interleaving with a peer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/number.h"
#include "base/rng.h"
#include "base/threads.h"
#include "bench/floors.h"
#include "bench/step.h"
#include "tests/runner.h"

enum { MAX_DEPTH = 8192, MAX_REPS = STEP_MAX_REPS };

struct bench {
    struct runner *r;
    int32_t *ids;
    float *logits;
    int vocab, threads;
    enum kern_dtype kv;
};

/* ---- Floors -------------------------------------------------------------------------------- */

/* Bytes a second of reading that many on huge pages, the best of 20 sweeps: caches count, as they
 * do for a step of as many bytes. */
static double read_bandwidth(size_t bytes, struct threads *t) {
    struct sweep s = sweep_open(bytes);
    double best = INFINITY;
    for (int i = 0; i < 20; i++) best = fmin(best, sweep_time(&s, t));
    best = sweep_bytes(&s) / best;
    sweep_close(&s);
    return best;
}

/* The best of 9. */
static double rate(register_loop *run, struct threads *t) {
    double best = 0;
    for (int i = 0; i < 9; i++) best = fmax(best, floor_rate(run, t));
    return best;
}

/* What a pass cannot go under on this machine now. */
struct floors {
    double gbs, bytes_ms;
    double macs_ms; /* 0: this device's instructions have no loop here */
    double sum_ms;
};

static struct floors floors(const struct bench *b, const struct step_point *p) {
    const struct model_config *c = runner_config(b->r);
    bool prompt = p->prompt;
    int rows = p->rows;
    struct err e = {0};
    struct threads *t;
    ASSERT(threads_open(&t, b->threads, &e) == 0);
    double tokens = step_read_tokens(p, runner_select_layer(b->r), c->n_layers) - rows;
    double kv = 2.0 * tokens * c->n_layers * c->n_kv_heads *
                (double)kern_kv_token_bytes(b->kv, c->head_dim);
    double bytes = (double)runner_weight_bytes(b->r) + kv;
    struct floors f = {.gbs = read_bandwidth((size_t)bytes, t) / 1e9};
    f.bytes_ms = bytes / f.gbs / 1e6;
    double q = (double)c->n_heads * c->head_dim, kvw = (double)c->n_kv_heads * c->head_dim;
    double layer = c->hidden * (2 * q + 2 * kvw) + 3.0 * c->hidden * c->ffn;
    double weights =
        layer * c->n_layers * rows + (double)c->vocab * c->hidden * (prompt ? 1 : rows);
    double attention = 2 * q * c->n_layers * rows * (tokens + (rows + 1) / 2.0);
    f.sum_ms = f.bytes_ms;
    register_loop *loop = loop_of_weights(runner_device(b->r), prompt);
    register_loop *attention_loop = loop_of_attention(runner_device(b->r), prompt);
    if (loop && attention_loop) {
        double of_weights = rate(loop, t), of_attention = rate(attention_loop, t);
        /* Scores by VPDPBUSD, values by VPDPWSSD, half as many products an instruction. */
        if (!prompt && b->kv == KERN_Q8_0) of_attention = of_weights / 1.5;
        f.macs_ms = (weights / of_weights + attention / of_attention) * 1e3;
        f.sum_ms = fmax((bytes - kv) / f.gbs / 1e6, weights / of_weights * 1e3) +
                   fmax(kv / f.gbs / 1e6, attention / of_attention * 1e3);
    }
    threads_close(t);
    return f;
}

/* ---- Passes -------------------------------------------------------------------------------- */

static void fill(struct bench *b, int depth) {
    runner_keep(b->r, 0);
    if (runner_length(b->r, 0) > depth) runner_truncate(b->r, 0, depth);
    while (runner_length(b->r, 0) < depth) {
        int at = runner_length(b->r, 0), n = depth - at < 512 ? depth - at : 512;
        struct runner_piece p = {.ids = b->ids + at, .n = n, .prompt = true};
        runner_pass(b->r, &p, 1, NULL);
    }
}

static double time_pass(struct bench *b, const struct step_point *at) {
    struct runner_piece p = {.ids = b->ids + at->depth, .n = at->rows, .prompt = at->prompt};
    int64_t start = clock_ns();
    runner_pass_last(b->r, &p, 1, b->logits, at->prompt ? 1 : at->rows);
    double ms = clock_ms_since(start);
    runner_truncate(b->r, 0, at->depth);
    return ms;
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

/* 0: no number of [1, 100000]. */
static int read_count(const char *s) {
    int v = 0;
    number_in(s, strlen(s), 1, 100000, &v);
    return v;
}

/* Each behind a colon, as ":5:7168": how many, -1 where there is anything else. */
static int read_numbers(const char *s, int *const out[], int most) {
    int n = 0;
    for (; *s == ':' && n < most; n++) {
        size_t word = strcspn(++s, ":,\n");
        if (!number_in(s, word, 0, 1 << 20, out[n])) return -1;
        s += word;
    }
    return *s && *s != ',' && *s != '\n' ? -1 : n;
}

bool step_parse(const char *s, struct step_point *out) {
    *out = (struct step_point){.batch = 1};
    int *const numbers[] = {&out->rows, &out->depth, &out->batch, &out->keep};
    out->prompt = !strncmp(s, "prompt:", 7);
    if (!out->prompt && strncmp(s, "gen:", 4) != 0) return false;
    return read_numbers(strchr(s, ':'), numbers, 4) >= 2 && out->rows > 0 && out->batch > 0 &&
           out->batch <= STEP_MAX_BATCH && (!out->prompt || (out->batch == 1 && out->keep == 0)) &&
           (out->prompt || out->rows * out->batch <= KERN_MAX_ROWS) &&
           (out->keep == 0 || (out->keep >= 5 && out->rows <= 2 * KERN_BLOCK));
}

int step_select_layer(const struct step_options *o) {
    struct step_point p;
    for (const char *s = o->points; s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL)
        if (step_parse(s, &p) && p.keep > 0) return o->select_layer > 0 ? o->select_layer : -1;
    return 0;
}

double step_read_tokens(const struct step_point *p, int select_layer, int n_layers) {
    int n = p->depth + p->rows, n_blocks = (n + KERN_BLOCK - 1) / KERN_BLOCK;
    if (p->keep == 0 || n_blocks <= p->keep) return n;
    double kept = n - (double)(n_blocks - p->keep) * KERN_BLOCK;
    return ((double)select_layer * n + (n_layers - select_layer) * kept) / n_layers;
}

static bool parse_point(const char *s, struct step_point *p) {
    return step_parse(s, p) && p->batch == 1 && p->rows <= 512 && p->depth + p->rows <= MAX_DEPTH;
}

struct words {
    const char *isa, *device;
    enum kern_dtype kv;
    int threads;
    bool serve;
    struct step_options step;
};

static bool parse_words(int argc, char **argv, struct words *w) {
    for (int i = 2; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!strcmp(argv[i], "--serve")) w->serve = true;
        else if (more && !strcmp(argv[i], "--threads")) w->threads = read_count(argv[++i]);
        else if (more && !strcmp(argv[i], "--reps")) w->step.reps = read_count(argv[++i]);
        else if (more && !strcmp(argv[i], "--isa")) w->isa = argv[++i];
        else if (more && !strcmp(argv[i], "--points")) w->step.points = argv[++i];
        else if (more && !strcmp(argv[i], "--kv-type") && !strcmp(argv[i + 1], "f16")) i++;
        else if (more && !strcmp(argv[i], "--kv-type") && !strcmp(argv[i + 1], "q8_0"))
            w->kv = KERN_Q8_0, i++;
        else if (more && !strcmp(argv[i], "--device")) w->device = argv[++i];
        else if (more && !strcmp(argv[i], "--load-format"))
            w->step.dummy = !strcmp(argv[++i], "dummy");
        else if (more && !strcmp(argv[i], "--select-layer"))
            w->step.select_layer = read_count(argv[++i]);
        else if (more && !strcmp(argv[i], "--chunk")) w->step.chunk = read_count(argv[++i]);
        else return fprintf(stderr, "bench_step: unknown word '%s'\n", argv[i]), false;
    }
    if (w->step.reps < 1 || w->step.reps > MAX_REPS) w->step.reps = 7;
    if (w->step.chunk < 1 || w->step.chunk > KERN_MAX_ROWS) w->step.chunk = KERN_MAX_ROWS;
    if (w->kv == KERN_Q8_0 && strcmp(w->device, "cpu") != 0)
        return fprintf(stderr, "bench_step: --kv-type q8_0 is the CPU's\n"), false;
    if (!strcmp(w->device, "cpu") || !strcmp(w->device, "cuda")) return true;
    fprintf(stderr, "bench_step: no device '%s'\n", w->device);
    return false;
}

static int serve(struct bench *b) {
    char line[64];
    struct step_point p;
    while (fgets(line, sizeof line, stdin)) {
        bool ask_floors = !strncmp(line, "floors ", 7);
        if (!parse_point(line + (ask_floors ? 7 : 0), &p) || p.keep > 0) return 2;
        if (ask_floors) {
            struct floors f = floors(b, &p);
            printf("%.4f %.4f %.2f\n", f.bytes_ms, f.macs_ms, f.gbs);
        } else {
            fill(b, p.depth);
            printf("%.4f\n", time_pass(b, &p));
        }
        fflush(stdout);
    }
    return 0;
}

static int run_points(struct bench *b, const char *points, int reps) {
    struct step_point p;
    printf(
        "device,kv,class,rows,depth,keep,ms_min,ms_median,byte_floor_ms,mac_floor_ms,sum_floor_ms,"
        "times_floor,read_gbs\n");
    for (const char *s = points; s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL) {
        if (!parse_point(s, &p)) return fprintf(stderr, "bad point '%s'\n", s), 2;
        fill(b, p.depth);
        runner_keep(b->r, p.keep);
        double ms[MAX_REPS];
        time_pass(b, &p);
        for (int i = 0; i < reps; i++) ms[i] = time_pass(b, &p);
        qsort(ms, (size_t)reps, sizeof *ms, by_value);
        struct floors f = floors(b, &p);
        printf("\"%s\",%s,%s,%d,%d,%d,%.3f,%.3f,%.3f,%.3f,%.3f,%.2f,%.1f\n", runner_device(b->r),
               b->kv == KERN_Q8_0 ? "q8_0" : "f16", p.prompt ? "prompt" : "gen", p.rows, p.depth,
               p.keep, ms[0], ms[reps / 2], f.bytes_ms, f.macs_ms, f.sum_ms,
               ms[reps / 2] / fmax(f.bytes_ms, f.macs_ms), f.gbs);
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv) {
    struct words w = {.device = "cpu",
                      .kv = KERN_F16,
                      .step = {.points = "gen:1:0,gen:5:0,prompt:512:0,gen:1:7168,gen:5:7168",
                               .reps = 7,
                               .chunk = KERN_MAX_ROWS}};
    if (argc < 2) {
        fprintf(stderr,
                "usage: bench_step MODEL [--threads N] [--isa NAME] [--reps N] [--points LIST] "
                "[--select-layer N] [--kv-type f16|q8_0] [--serve]\n"
                "       bench_step MODEL --device cuda [--load-format dummy] [--reps N] "
                "[--chunk ROWS] [--points LIST]\n");
        return 2;
    }
    if (!parse_words(argc, argv, &w)) return 2;
    w.step.model = argv[1];
    if (!strcmp(w.device, "cuda")) return step_device(&w.step);
    struct runner_options o = {.path = argv[1],
                               .dummy = w.step.dummy,
                               .isa = w.isa,
                               .n_threads = w.threads,
                               .max_tokens = MAX_DEPTH,
                               .n_seqs = 1,
                               .max_rows = 512,
                               .kv = w.kv,
                               .select_layer = step_select_layer(&w.step)};
    struct bench b = {.r = runner_open(&o), .threads = w.threads, .kv = w.kv};
    b.vocab = runner_config(b.r)->vocab;
    b.ids = malloc(sizeof *b.ids * MAX_DEPTH);
    b.logits = malloc(sizeof(float) * 512 * (size_t)b.vocab);
    ASSERT(b.ids && b.logits);
    for (uint32_t i = 0; i < MAX_DEPTH; i++)
        b.ids[i] = (int32_t)(rng_u32(1, i, RNG_TEST, 0) % (uint32_t)(b.vocab - 200)) + 100;
    int rc = w.serve ? serve(&b) : run_points(&b, w.step.points, w.step.reps);
    free(b.ids);
    free(b.logits);
    runner_close(b.r);
    return rc;
}
