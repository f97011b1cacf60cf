/* Whole steps on a CUDA device: V(batch, rows, context) beside the floors of the same run.
 *
 * Generated rows: the pass is recorded as the engine records it and replayed; device_ms is the time
 * between events around each of a train of replays that follow without a wait, host_ms what the
 * host sees of one step: arrays up, the launch, the wait. KV of the depth is random, not computed
 * (it changes no time), each sequence has pages of its own in scattered order. Prompt rows go in
 * passes of --chunk rows, events around all of them.
 *
 * Byte floor: packed weights that a pass reads (an embedding that is not the head's is not: a row
 * of it is) and the KV of every listed token, over the run's bandwidth (the better of a device copy
 * and a read-only sweep). Product floor: operations over the run's matrix rate (cuBLASLt, bf16,
 * 8192 cubed). A run on an H200 below 4.2 TB/s does not count. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "bench/device_floor.h"
#include "bench/step.h"
#include "tests/runner.h"

enum { MAX_POINTS = 64 };
static const double h200_bandwidth = 4.2e12;

struct device_bench {
    const struct step_options *o;
    struct runner *r;
    struct device_floor *floor;
    const struct model_config *c;
    double bandwidth, matrix; /* a second */
    bool counts;
    int32_t *ids; /* of the longest point */
};

static void must(int rc, const struct err *e) {
    if (rc == 0) return;
    fprintf(stderr, "bench_step: %s\n", e->message);
    exit(1);
}

/* ---- Floors ---- */

static double weight_bytes(const struct device_bench *b) {
    struct model *m = runner_model(b->r);
    const struct kern_weight *in = model_embedding(m), *head = model_head(m);
    return (double)runner_weight_bytes(b->r) - (in->data == head->data ? 0 : (double)in->bytes);
}

static double kv_bytes(const struct device_bench *b, const struct step_point *p) {
    const struct model_config *c = b->c;
    double token = 2.0 * c->n_layers * c->n_kv_heads * c->head_dim * 2;
    return token * p->batch * step_read_tokens(p, runner_select_layer(b->r), c->n_layers);
}

static double operations(const struct device_bench *b, const struct step_point *p) {
    const struct model_config *c = b->c;
    double q = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim;
    double layer = c->hidden * (2 * q + 2 * kv) + 3.0 * c->hidden * c->ffn;
    double rows = (double)p->rows * p->batch;
    double weights =
        layer * c->n_layers * rows + (double)c->vocab * c->hidden * (p->prompt ? p->batch : rows);
    double tokens = step_read_tokens(p, runner_select_layer(b->r), c->n_layers) - p->rows;
    double attention = 2 * q * c->n_layers * rows * (tokens + (p->rows + 1) / 2.0);
    return 2 * (weights + attention);
}

/* ---- Passes ---- */

static void set_pass(struct device_bench *b, const struct step_point *p, int done, int n) {
    struct runner_piece piece[STEP_MAX_BATCH];
    for (int i = 0; i < p->batch; i++) {
        runner_pretend(b->r, i, p->depth + done);
        piece[i] = (struct runner_piece){
            .seq = i, .ids = b->ids + p->depth + done, .n = n, .prompt = p->prompt};
    }
    bool last = done + n == p->rows;
    runner_set(b->r, piece, p->batch, p->prompt ? (last ? 1 : 0) : p->batch * n);
}

/* All of a prompt, in passes. */
static void prompt_passes(struct device_bench *b, const struct step_point *p) {
    for (int done = 0; done < p->rows;) {
        int n = p->rows - done < b->o->chunk ? p->rows - done : b->o->chunk;
        set_pass(b, p, done, n);
        runner_enqueue(b->r);
        runner_finish(b->r, NULL);
        done += n;
    }
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

struct times {
    double device, device_min, host; /* ms */
};

static void between(struct device_bench *b, int n, double *ms) {
    struct err e = {0};
    for (int i = 0; i < n; i++) must(device_floor_between(b->floor, i, i + 1, &ms[i], &e), &e);
    qsort(ms, (size_t)n, sizeof *ms, by_value);
}

static struct times time_generated(struct device_bench *b, const struct step_point *p) {
    double ms[STEP_MAX_REPS];
    int reps = b->o->reps;
    struct err e = {0};
    struct times t;
    set_pass(b, p, 0, p->rows);
    for (int i = 0; i < 4; i++) runner_enqueue(b->r);
    runner_finish(b->r, NULL);
    runner_enqueue(b->r); /* so that the stream is busy at the first mark */
    for (int i = 0; i < reps; i++) {
        must(device_floor_mark(b->floor, i, &e), &e);
        runner_enqueue(b->r);
    }
    must(device_floor_mark(b->floor, reps, &e), &e);
    between(b, reps, ms);
    t.device = ms[reps / 2];
    t.device_min = ms[0];
    runner_finish(b->r, NULL);
    for (int i = 0; i < reps; i++) {
        int64_t start = clock_ns();
        set_pass(b, p, 0, p->rows);
        runner_enqueue(b->r);
        runner_finish(b->r, NULL);
        ms[i] = clock_ms_since(start);
    }
    qsort(ms, (size_t)reps, sizeof *ms, by_value);
    t.host = ms[reps / 2];
    return t;
}

static struct times time_prompt(struct device_bench *b, const struct step_point *p) {
    double ms[STEP_MAX_REPS], host[STEP_MAX_REPS];
    int reps = b->o->reps < 7 ? b->o->reps : 7;
    struct err e = {0};
    for (int i = -3; i < reps; i++) {
        int64_t start = clock_ns();
        must(device_floor_mark(b->floor, 0, &e), &e);
        prompt_passes(b, p);
        must(device_floor_mark(b->floor, 1, &e), &e);
        double got;
        must(device_floor_between(b->floor, 0, 1, &got, &e), &e);
        if (i < 0) continue;
        ms[i] = got;
        host[i] = clock_ms_since(start);
    }
    qsort(ms, (size_t)reps, sizeof *ms, by_value);
    qsort(host, (size_t)reps, sizeof *host, by_value);
    return (struct times){ms[reps / 2], ms[0], host[reps / 2]};
}

static void run_point(struct device_bench *b, const struct step_point *p) {
    runner_recut(b->r, p->batch, p->depth + p->rows);
    runner_keep(b->r, p->keep);
    struct times t = p->prompt ? time_prompt(b, p) : time_generated(b, p);
    double bytes = weight_bytes(b) + kv_bytes(b, p), ops = operations(b, p);
    double byte_floor = bytes / b->bandwidth * 1e3, mac_floor = ops / b->matrix * 1e3;
    printf("%s,\"%s\",%s,%d,%d,%d,%d,%.4f,%.4f,%.4f,%.4f,%.4f,%.3f,%.0f,%.1f\n",
           b->counts ? "yes" : "no", b->c->name, p->prompt ? "prompt" : "gen", p->rows, p->depth,
           p->batch, p->keep, t.device, t.device_min, t.host, byte_floor, mac_floor,
           t.device / fmax(byte_floor, mac_floor), bytes / t.device / 1e6, ops / t.device / 1e9);
    fflush(stdout);
}

/* ---- Opening ---- */

static int parse_all(const struct step_options *o, struct step_point *list) {
    int n = 0;
    for (const char *s = o->points; s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL) {
        if (n == MAX_POINTS || !step_parse(s, &list[n])) {
            fprintf(stderr, "bench_step: bad point '%s'\n", s);
            exit(2);
        }
        n++;
    }
    return n;
}

/* What is missing, in a line, before anything is read or made. */
static void check_device(void) {
    struct kern_options o = {.precision = KERN_FAST};
    struct kern *k;
    struct err e = {0};
    must(kern_cuda_open(&k, &o, &e), &e);
    k->ops->close(k);
}

/* A runner that holds the largest point. */
static void open_runner(struct device_bench *b, const struct step_point *list, int n) {
    struct runner_options o = {.device = "cuda",
                               .path = b->o->model,
                               .dummy = b->o->dummy,
                               .max_logits = 1,
                               .kv = KERN_F16,
                               .select_layer = step_select_layer(b->o)};
    for (int i = 0; i < n; i++) {
        const struct step_point *p = &list[i];
        int tokens = p->depth + p->rows, rows = p->rows * p->batch;
        int pages = (tokens + KERN_BLOCK - 1) / KERN_BLOCK * p->batch;
        if (p->prompt && rows > b->o->chunk) rows = b->o->chunk;
        if (tokens > o.max_tokens) o.max_tokens = tokens;
        if (p->batch > o.n_seqs) o.n_seqs = p->batch;
        if (rows > o.max_rows) o.max_rows = rows;
        if (pages > o.max_pages) o.max_pages = pages;
        if (!p->prompt && rows > o.max_logits) o.max_logits = rows;
    }
    uint64_t seed = (uint64_t)clock_ns();
    b->r = runner_open(&o);
    b->c = runner_config(b->r);
    b->ids = malloc((size_t)o.max_tokens * sizeof *b->ids);
    ASSERT(b->ids);
    for (int i = 0; i < o.max_tokens; i++)
        b->ids[i] = (int32_t)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % (uint32_t)b->c->vocab);
}

static void measure_floors(struct device_bench *b) {
    struct kern *k = runner_kern(b->r);
    struct kern_device_info info;
    struct err e = {0};
    double copy, sweep;
    size_t bytes = (size_t)4 << 30, arena_bytes;
    must(device_floor_open(&b->floor, k, &e), &e);
    k->ops->info(k, &info);
    if (bytes > info.free_bytes / 4) bytes = info.free_bytes / 4;
    must(device_floor_bandwidth(b->floor, bytes, &copy, &sweep, &e), &e);
    must(device_floor_matrix_rate(b->floor, &b->matrix, &e), &e);
    b->bandwidth = fmax(copy, sweep);
    b->counts = !strstr(info.name, "H200") || b->bandwidth >= h200_bandwidth;
    void *arena;
    for (int i = 0; (arena = runner_arena(b->r, i, &arena_bytes)) != NULL; i++)
        must(device_floor_fill(b->floor, arena, NULL, (int)(arena_bytes / 1024), 1024, KERN_F16, 1,
                               (uint32_t)clock_ns(), &e),
             &e);
    printf("# %s; %s%s\n", info.name, b->o->model, b->o->dummy ? ", random weights" : "");
    printf("# bandwidth of this run: copy %.0f GB/s, read-only sweep %.0f GB/s; matrix rate %.1f "
           "TFLOP/s\n",
           copy / 1e9, sweep / 1e9, b->matrix / 1e12);
    if (!b->counts) printf("# below 4,200 GB/s on an H200: the rows of this run do not count\n");
    printf("# weights of a pass %.3f GB, KV %.0f bytes a token\n", weight_bytes(b) / 1e9,
           kv_bytes(b, &(struct step_point){.rows = 1, .batch = 1}));
}

int step_device(const struct step_options *o) {
    struct step_point list[MAX_POINTS];
    struct device_bench b = {.o = o};
    int n = parse_all(o, list);
    check_device();
    open_runner(&b, list, n);
    measure_floors(&b);
    printf("counts,model,class,rows,depth,batch,keep,device_ms,device_ms_min,host_ms,byte_floor_ms,"
           "mac_"
           "floor_ms,times_floor,gb_s,tflop_s\n");
    for (int i = 0; i < n; i++) run_point(&b, &list[i]);
    free(b.ids);
    device_floor_close(b.floor);
    runner_close(b.r);
    return 0;
}
