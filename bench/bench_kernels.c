/* How far is each CUDA kernel from its byte floor?
 *
 *   bench_kernels [--only FAMILY] [--match TEXT] [--quick] [--reps N] [--device-index N]
 *
 * Families: products (--match BF16, --match "Q4_K 4096x": of these some), attention, rows,
 * drawing, scores. Each point is first checked: small ones against the
 * CPU's reference backend, large ones by a sample of outputs computed in double on the host. Then
 * it is timed: a train of calls over at least 1 GB of distinct data where the point's data is not
 * what a step has just written (the column distinct_mb says how much), recorded as a launch graph
 * and replayed back to back, 40 ms unmeasured (but of prompts); events on the stream, the median
 * and the least of --reps replays, a call each. Inputs are random and new in every run.
 *
 * The run's bandwidth is the better of a device copy (bytes read and written) and a read-only
 * sweep; its matrix rate that of cuBLASLt, bf16, 8192 cubed. floor_us = the larger of the bytes
 * that a call must move over the one and the operations it must do over the other. A run on an H200
 * below 4.2 TB/s does not count: column `counts`. CSV on stdout; `# ` lines are talk. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/number.h"
#include "bench/kernels_bench.h"

static const double h200_bandwidth = 4.2e12;

void kbench_say(const char *format, ...) {
    va_list a;
    va_start(a, format);
    printf("# ");
    vprintf(format, a);
    printf("\n");
    va_end(a);
    fflush(stdout);
}

void kbench_die(const char *what, const char *detail) {
    fflush(stdout);
    fprintf(stderr, "bench_kernels: %s %s\n", what, detail);
    exit(1);
}

void kbench_must(struct kbench *b, int rc, const struct err *e, const char *what) {
    struct err noted = {0};
    if (rc == 0) return;
    if (!e) b->k->ops->sync(b->k, &noted); /* an operation's own words come with the next sync */
    kbench_die(what, e ? e->message : noted.message);
}

void kbench_check(const char *what, long long place, double got, double want, double tolerance) {
    char text[200];
    if (fabs(got - want) <= tolerance) return;
    snprintf(text, sizeof text, "at %lld: got %.8g, want %.8g within %.3g", place, got, want,
             tolerance);
    kbench_die(what, text);
}

/* ---- Memory ---- */

void *kbench_host(size_t bytes) {
    void *p = aligned_alloc(KERN_ACT_ALIGN, (bytes + 63) / 64 * 64 + 64);
    if (!p) kbench_die("out of", "memory");
    memset(p, 0, bytes);
    return p;
}

void *kbench_reserve(struct kbench *b, size_t bytes) {
    struct err e = {0};
    void *p;
    kbench_must(b, b->k->ops->reserve(b->k, bytes, &p, &e), &e, "reserve:");
    return p;
}

void *kbench_put(struct kbench *b, const void *host, size_t bytes) {
    struct err e = {0};
    void *p = kbench_reserve(b, bytes);
    kbench_must(b, b->k->ops->upload(b->k, p, host, bytes, &e), &e, "upload:");
    kbench_must(b, b->k->ops->sync(b->k, &e), &e, "upload:");
    return p;
}

void kbench_get(struct kbench *b, void *host, const void *src, size_t bytes) {
    struct err e = {0};
    kbench_must(b, b->k->ops->download(b->k, host, src, bytes, &e), &e, "download:");
}

void kbench_free(struct kbench *b, void *p) {
    b->k->ops->unreserve(b->k, p);
}

/* ---- Random numbers ---- */

uint64_t kbench_seed(struct kbench *b) {
    return (b->seed ^ ++b->n_draws * 0x9E3779B97F4A7C15u) | 1;
}

uint64_t kbench_random(uint64_t *s) {
    *s ^= *s >> 12;
    *s ^= *s << 25;
    *s ^= *s >> 27;
    return *s * 0x2545F4914F6CDD1Du;
}

float *kbench_floats(struct kbench *b, size_t n, float scale) {
    float *x = kbench_host(n * sizeof *x);
    uint64_t s = kbench_seed(b);
    for (size_t i = 0; i < n; i++)
        x[i] = scale * (float)(int32_t)(kbench_random(&s) >> 32) * 0x1p-31f;
    return x;
}

/* ---- Timing ---- */

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

static void train(struct kbench *b, const uint64_t *key, int calls, int (*enqueue)(void *, int),
                  void *arg) {
    struct err e = {0};
    bool replayed;
    kbench_must(b, b->k->ops->record_begin(b->k, key, &replayed, &e), &e, "record_begin:");
    if (replayed) return;
    for (int i = 0; i < calls; i++) kbench_must(b, enqueue(arg, i), NULL, "operation:");
    kbench_must(b, b->k->ops->record_end(b->k, &e), &e, "record_end:");
}

/* A device that has idled runs slower at first: some 2 %, more where it has just been started. What
 * keeps the matrix units busy is not run longer for it: it would come to the limit of power. */
static const int64_t WARM_NS = 40000000;

/* Replays follow each other without a wait, so that the stream never runs dry between two marks. */
void kbench_measure(struct kbench *b, struct kbench_point *p, int calls,
                    int (*enqueue)(void *arg, int i), void *arg) {
    uint64_t key[KERN_RECORD_KEY] = {0x6b62656e6368, ++b->n_points};
    double us[KBENCH_MAX_REPS], ms;
    struct err e = {0};
    int64_t start = clock_ns();
    do {
        for (int i = 0; i < 4; i++) train(b, key, calls, enqueue, arg);
        kbench_must(b, b->k->ops->sync(b->k, &e), &e, "sync:");
    } while (p->flops == 0 && clock_ns() - start < WARM_NS);
    train(b, key, calls, enqueue, arg);
    for (int i = 0; i < b->reps; i++) {
        kbench_must(b, device_floor_mark(b->floor, i, &e), &e, "mark:");
        train(b, key, calls, enqueue, arg);
    }
    kbench_must(b, device_floor_mark(b->floor, b->reps, &e), &e, "mark:");
    for (int i = 0; i < b->reps; i++) {
        kbench_must(b, device_floor_between(b->floor, i, i + 1, &ms, &e), &e, "marks:");
        us[i] = ms * 1e3 / calls;
    }
    kbench_must(b, b->k->ops->sync(b->k, &e), &e, "sync:");
    qsort(us, (size_t)b->reps, sizeof *us, by_value);
    p->us = us[b->reps / 2];
    p->us_min = us[0];
}

void kbench_header(void) {
    printf(
        "counts,family,kernel,dtype,shape,rows,batch,context,us,us_min,floor_us,ratio,gb_s,tflop_"
        "s,goal_us,within,distinct_mb\n");
}

void kbench_print(const struct kbench *b, const struct kbench_point *p) {
    double floor = fmax(p->bytes / b->bandwidth, p->flops / b->matrix) * 1e6;
    double goal = p->goal > 0 ? fmax(floor / p->goal, p->goal_us > 0 ? floor + p->goal_us : 0) : 0;
    printf("%s,%s,%s,%s,%s,%d,%d,%d,%.3f,%.3f,%.3f,%.3f,%.0f,%.1f,%.3f,%s,%.0f\n",
           b->counts ? "yes" : "no", p->family, p->kernel, p->dtype, p->shape, p->rows, p->batch,
           p->context, p->us, p->us_min, floor, floor > 0 ? p->us / floor : 0,
           p->bytes / p->us / 1e3, p->flops / p->us / 1e6, goal,
           goal <= 0       ? "-"
           : p->us <= goal ? "yes"
                           : "no",
           p->distinct / 1e6);
    fflush(stdout);
}

/* ---- Main ---- */

static int number(const char *word, const char *value) {
    int v = 0;
    if (!number_in(value, strlen(value), 0, 1000, &v)) kbench_die("not a number after", word);
    return v;
}

static void measure_floors(struct kbench *b) {
    struct kern_device_info info;
    struct err e = {0};
    double copy, sweep;
    b->k->ops->info(b->k, &info);
    size_t bytes = (size_t)4 << 30;
    if (bytes > info.free_bytes / 4) bytes = info.free_bytes / 4;
    kbench_must(b, device_floor_bandwidth(b->floor, bytes, &copy, &sweep, &e), &e, "bandwidth:");
    kbench_must(b, device_floor_matrix_rate(b->floor, &b->matrix, &e), &e, "matrix rate:");
    b->bandwidth = fmax(copy, sweep);
    b->counts = !strstr(info.name, "H200") || b->bandwidth >= h200_bandwidth;
    kbench_say("%s, %.1f GB", info.name, (double)info.memory_bytes / 1e9);
    kbench_say("bandwidth of this run: copy %.0f GB/s, read-only sweep %.0f GB/s; the floor is the "
               "better",
               copy / 1e9, sweep / 1e9);
    kbench_say("matrix rate of this run: bf16 8192^3 %.1f TFLOP/s", b->matrix / 1e12);
    if (!b->counts) kbench_say("below 4,200 GB/s on an H200: the rows of this run do not count");
}

static const struct {
    const char *name;
    void (*run)(struct kbench *b);
} families[] = {
    {"products", kbench_products}, {"attention", kbench_attention}, {"rows", kbench_rows},
    {"drawing", kbench_drawing},   {"scores", kbench_scores},
};
enum { N_FAMILIES = sizeof families / sizeof *families };

int main(int argc, char **argv) {
    struct kbench b = {.reps = 21};
    struct kern_options o = {.precision = KERN_FAST}, reference = {.precision = KERN_REFERENCE};
    const char *only = NULL;
    struct err e = {0};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick")) b.quick = true;
        else if (i + 1 < argc && !strcmp(argv[i], "--only")) only = argv[++i];
        else if (i + 1 < argc && !strcmp(argv[i], "--match")) b.match = argv[++i];
        else if (i + 1 < argc && !strcmp(argv[i], "--reps"))
            b.reps = number(argv[i], argv[i + 1]), i++;
        else if (i + 1 < argc && !strcmp(argv[i], "--device-index"))
            o.device = number(argv[i], argv[i + 1]), i++;
        else {
            fprintf(stderr,
                    "bench_kernels: unknown word '%s'\nusage: bench_kernels [--only "
                    "products|attention|rows|drawing|scores] [--match TEXT] [--quick] [--reps N] "
                    "[--device-index N]\n",
                    argv[i]);
            return 2;
        }
    }
    bool known = !only;
    for (int i = 0; i < N_FAMILIES; i++) known |= only && !strcmp(only, families[i].name);
    if (!known) return fprintf(stderr, "bench_kernels: no family '%s'\n", only), 2;
    if (b.reps < 3 || b.reps > KBENCH_MAX_REPS) b.reps = 21;
    if (b.quick && b.reps > 9) b.reps = 9;
    b.seed = (uint64_t)clock_ns();
    kbench_must(&b, kern_cuda_open(&b.k, &o, &e), &e, "cannot run:");
    kbench_must(&b, kern_cpu_open(&b.twin, &reference, &e), &e, "the CPU twin:");
    kbench_must(&b, device_floor_open(&b.floor, b.k, &e), &e, "cannot measure:");
    measure_floors(&b);
    kbench_header();
    for (int i = 0; i < N_FAMILIES; i++)
        if (!only || !strcmp(only, families[i].name)) families[i].run(&b);
    device_floor_close(b.floor);
    b.twin->ops->close(b.twin);
    b.k->ops->close(b.k);
    return 0;
}
