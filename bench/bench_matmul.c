/* How far are the products from what the machine can do?
 *
 * Every point is first checked against the reference table, then timed: minimum and median of
 * --reps runs. Beside it stand two floors measured in the same run on the same threads: the
 * matrix's bytes over the read bandwidth of the same bytes, and its products over the rate of a
 * loop of the format's own instruction that touches registers only (AVX2: VPMADDUBSW + VPADDW, once
 * for 4 to 6 bits and twice for 8; AVX2 VNNI and AVX-512: VPDPBUSD; floats: FMA; AMX prompt rows:
 * TDPBF16PS). A matrix is used as often as a model's layers use theirs: copies of it cycle through
 * --megabytes, so that a small one is not simply read from the nearest cache. CSV on stdout; `# `
 * lines are talk. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/clock.h"
#include "base/err.h"
#include "base/half.h"
#include "base/number.h"
#include "base/rng.h"
#include "base/threads.h"
#include "bench/register_loops.h"
#include "kernels/kernels.h"

struct options {
    const char *isa, *dtype;
    int threads, reps;
    size_t megabytes;
};

__attribute__((noreturn)) static void die(const char *what, const char *detail) {
    fprintf(stderr, "bench_matmul: %s %s\n", what, detail);
    exit(1);
}

static void *need(void *p) {
    if (!p) die("out of", "memory");
    return p;
}

/* ---- Floors --------------------------------------------------------------------------------- */

enum floor_kind {
    FLOOR_NONE,
    FLOOR_MADDUBS,
    FLOOR_DPBUSD8,
    FLOOR_FMA8,
    FLOOR_DPBUSD,
    FLOOR_FMA16,
    FLOOR_AMX,
    N_FLOORS
};
static const char *const floor_names[] = {"-",        "maddubs+add", "vpdpbusd ymm", "fma x8",
                                          "vpdpbusd", "fma x16",     "tdpbf16ps"};

static double loop_run(enum floor_kind kind) {
    switch (kind) {
#if defined(__x86_64__)
    case FLOOR_MADDUBS:
        return loop_maddubs();
    case FLOOR_DPBUSD8:
        return loop_dpbusd8();
    case FLOOR_FMA8:
        return loop_fma8();
    case FLOOR_DPBUSD:
        return loop_dpbusd();
    case FLOOR_FMA16:
        return loop_fma16();
    case FLOOR_AMX:
        return loop_amx();
#endif
    default:
        return 0;
    }
}

struct floors {
    struct threads *team;
    int reps;
    double macs[N_FLOORS]; /* products a second, all threads; 0: not measured yet */
    double bandwidth;      /* bytes a second, all threads */
    enum floor_kind kind;  /* of the running job */
    double products[256];
    uint8_t *buffer;
    size_t bytes;
};

static void floor_share(void *arg, int idx, int n_threads) {
    struct floors *f = arg;
    (void)n_threads;
    f->products[idx] = loop_run(f->kind);
}

static double floor_macs(struct floors *f, enum floor_kind kind) {
    if (kind == FLOOR_NONE || f->macs[kind] > 0) return f->macs[kind];
    f->kind = kind;
    for (int i = 0; i < f->reps; i++) {
        int64_t t = clock_ns();
        threads_run(f->team, floor_share, f);
        double s = (double)(clock_ns() - t) / 1e9, n = 0;
        for (int k = 0; k < threads_n(f->team); k++) n += f->products[k];
        f->macs[kind] = fmax(f->macs[kind], n / s);
    }
    return f->macs[kind];
}

static void read_share(void *arg, int idx, int n_threads) {
    struct floors *f = arg;
    size_t part = f->bytes / 64 / (size_t)n_threads * 64;
    const uint64_t *p = (const uint64_t *)(const void *)(f->buffer + part * (size_t)idx);
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < part / 8; i += 8)
        for (int k = 0; k < 8; k++) sum[k] += p[i + (size_t)k];
    for (int k = 1; k < 8; k++) sum[0] += sum[k];
    f->products[idx] = (double)sum[0];
}

/* Of the very bytes that the products read, next to them in time: bandwidth is shared with
 * neighbours and changes by the minute. */
static void measure_bandwidth(struct floors *f, void *buffer, size_t bytes) {
    f->buffer = buffer;
    f->bytes = bytes;
    f->bandwidth = 0;
    for (int i = 0; i < f->reps; i++) {
        int64_t t = clock_ns();
        threads_run(f->team, read_share, f);
        f->bandwidth = fmax(f->bandwidth, (double)f->bytes * 1e9 / (double)(clock_ns() - t));
    }
}

/* ---- One point ------------------------------------------------------------------------------ */

static uint8_t *random_weights(enum kern_dtype t, size_t n) {
    size_t bytes = kern_dtype_bytes(t, n), size = kern_dtype_block_bytes(t);
    uint8_t *p = need(malloc(bytes));
    uint32_t draw[4] = {0};
    for (size_t i = 0; i < bytes; i++) {
        if (i % 16 == 0) philox4x32((uint32_t[4]){(uint32_t)(i / 16)}, (uint32_t[2]){1}, draw);
        p[i] = ((uint8_t *)draw)[i % 16];
    }
    uint16_t scale = f32_to_f16(0.01f);
    int at = t == KERN_Q6_K ? 208 : 0;
    for (size_t b = 0; b < bytes; b += size) {
        float v = (float)(int8_t)p[b] / 128.f;
        uint16_t h = f32_to_f16(v);
        uint32_t bits = half_f32_bits(v) >> 16;
        if (t == KERN_F32) memcpy(p + b, &v, 4);
        else if (t == KERN_F16) memcpy(p + b, &h, 2);
        else if (t == KERN_BF16) memcpy(p + b, &bits, 2);
        else memcpy(p + b + at, &scale, 2);
        if (t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K)
            memcpy(p + b + 2, &scale, 2);
    }
    return p;
}

struct matrix {
    struct kern *k;
    enum kern_dtype t;
    int rows, cols, copies;
    struct kern_weight w[1024];
    void *memory;
};

static void matrix_make(struct matrix *m, struct kern *k, enum kern_dtype t, int rows, int cols,
                        size_t total, const void *src) {
    struct err e = {0};
    size_t bytes = k->ops->weight_bytes(k, t, rows, cols);
    if (!bytes) die("no such product:", kern_dtype_name(t));
    size_t copies = total / bytes < 1 ? 1 : total / bytes > 1024 ? 1024 : total / bytes;
    *m = (struct matrix){.k = k, .t = t, .rows = rows, .cols = cols, .copies = (int)copies};
    if (k->ops->reserve(k, copies * bytes, &m->memory, &e)) die("reserve:", e.message);
    for (size_t i = 0; i < copies; i++)
        if (k->ops->weight_pack(k, &m->w[i], (uint8_t *)m->memory + i * bytes, t, rows, cols, src,
                                &e))
            die("pack:", e.message);
}

/* Mean relative error against the reference table: 8-bit activations and bf16 both stay far below
 * 0.05. */
static void check(const struct matrix *m, struct kern *reference, const void *src,
                  struct kern_rows rows, const float *x, const float *out) {
    int n = rows.n_gen + rows.n_prompt, used = n < 3 ? n : 3;
    struct matrix *r = need(malloc(sizeof *r));
    matrix_make(r, reference, m->t, m->rows, m->cols, 0, src);
    struct kern_rows few = {.n_gen = used};
    size_t bytes = reference->ops->act_bytes(reference, few, m->cols);
    struct kern_act act = {.data = need(aligned_alloc(64, (bytes + 63) / 64 * 64)), .bytes = bytes};
    float *want = need(malloc((size_t)used * (size_t)m->rows * sizeof *want));
    double error = 0, norm = 0;
    reference->ops->pack(reference, few, m->cols, x, act);
    reference->ops->matmul(reference, few, &r->w[0], act, want, m->rows, 0);
    for (size_t i = 0; i < (size_t)used * (size_t)m->rows; i++) {
        error += pow((double)out[i] - (double)want[i], 2);
        norm += pow((double)want[i], 2);
    }
    if (!(error <= norm * 0.0025)) die("wrong answer:", kern_dtype_name(m->t));
    reference->ops->unreserve(reference, r->memory);
    free(want);
    free(act.data);
    free(r);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static enum floor_kind floor_of(const char *isa, enum kern_dtype t, bool prompt, double *factor) {
    bool is_float = kern_dtype_block(t) == 1;
    *factor = 1;
    if (!strcmp(isa, "amx") && prompt) return FLOOR_AMX;
    if (!strcmp(isa, "amx") || !strcmp(isa, "avx512")) return is_float ? FLOOR_FMA16 : FLOOR_DPBUSD;
    if (!strcmp(isa, "avxvnni")) return is_float ? FLOOR_FMA8 : FLOOR_DPBUSD8;
    if (strcmp(isa, "avx2")) return FLOOR_NONE;
    if (t == KERN_Q8_0) *factor = 2;
    return is_float ? FLOOR_FMA8 : FLOOR_MADDUBS;
}

static void point(const struct options *o, struct floors *f, struct kern *reference,
                  const struct matrix *m, const void *src, struct kern_rows rows) {
    struct kern *k = m->k;
    int n = rows.n_gen + rows.n_prompt;
    size_t bytes = k->ops->act_bytes(k, rows, m->cols);
    struct kern_act act = {.data = need(aligned_alloc(64, (bytes + 63) / 64 * 64)), .bytes = bytes};
    float *x = need(malloc((size_t)n * (size_t)m->cols * sizeof *x));
    float *out = need(malloc((size_t)n * (size_t)m->rows * sizeof *out));
    double *ms = need(malloc((size_t)o->reps * sizeof *ms));
    for (size_t i = 0; i < (size_t)n * (size_t)m->cols; i++)
        x[i] = rng_uniform(9, i / 4, RNG_TEST, i % 4) - .5f;
    k->ops->pack(k, rows, m->cols, x, act);
    k->ops->matmul(k, rows, &m->w[0], act, out, m->rows, 0);
    check(m, reference, src, rows, x, out);
    /* Enough products for about a millisecond a run. */
    double work = (double)n * m->rows * m->cols;
    int calls = (int)(4e7 / work);
    if (calls < 1) calls = 1;
    if (calls < m->copies && n <= 8) calls = m->copies < 64 ? m->copies : 64;
    int next = 0;
    for (int i = 0; i < o->reps; i++) {
        int64_t t = clock_ns();
        for (int c = 0; c < calls; c++, next = (next + 1) % m->copies)
            k->ops->matmul(k, rows, &m->w[next], act, out, m->rows, 0);
        ms[i] = (double)(clock_ns() - t) / 1e6 / calls;
    }
    qsort(ms, (size_t)o->reps, sizeof *ms, by_value);
    double factor, rate = floor_macs(f, floor_of(o->isa, m->t, rows.n_prompt > 0, &factor));
    double byte_floor = (double)m->w[0].bytes / f->bandwidth * 1e3;
    double mac_floor = rate > 0 ? work * factor / rate * 1e3 : 0,
           best = fmax(byte_floor, mac_floor);
    printf("%s,%d,%s,%d,%d,%d,%s,%.4f,%.4f,%.2f,%.2f,%.2f,%.4f,%.4f,%.2f\n", o->isa, o->threads,
           kern_dtype_name(m->t), m->rows, m->cols, n, rows.n_prompt ? "prompt" : "generated",
           ms[0], ms[o->reps / 2], work / ms[0] / 1e6, (double)m->w[0].bytes / ms[0] / 1e6,
           f->bandwidth / 1e9, byte_floor, mac_floor, ms[0] / best);
    fflush(stdout);
    free(ms);
    free(out);
    free(x);
    free(act.data);
}

/* ---- Main ----------------------------------------------------------------------------------- */

static const struct {
    int rows, cols;
    const char *types; /* names, each between spaces */
} cases[] = {
    {576, 576, " Q4_1 Q8_0 F16 "},
    {960, 576, " Q4_1 "},
    {3072, 576, " Q4_1 "},
    {576, 1536, " Q4_1 Q4_0 Q5_0 Q5_1 Q8_0 F16 BF16 F32 "},
    {2048, 2048, " Q4_K Q5_K Q6_K "},
    {49152, 576, " Q8_0 Q4_1 "},
};

static int number(const char *text, int lo, int hi) {
    int n = 0;
    if (!number_in(text, strlen(text), lo, hi, &n)) die("not a number that fits:", text);
    return n;
}

int main(int argc, char **argv) {
    struct options o = {.isa = "avx2", .threads = 0, .reps = 15, .megabytes = 64};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            die("usage: [--isa plain|avx2|avxvnni|avx512|amx] [--threads N] [--reps N]",
                "[--dtype NAME] [--megabytes N]");
        if (!strcmp(argv[i], "--isa")) o.isa = argv[i + 1];
        else if (!strcmp(argv[i], "--dtype")) o.dtype = argv[i + 1];
        else if (!strcmp(argv[i], "--threads")) o.threads = number(argv[i + 1], 0, 256);
        else if (!strcmp(argv[i], "--reps")) o.reps = number(argv[i + 1], 1, 1000000);
        else if (!strcmp(argv[i], "--megabytes"))
            o.megabytes = (size_t)number(argv[i + 1], 1, 1 << 20);
        else die("unknown option", argv[i]);
    }
    if (o.threads == 0) o.threads = threads_n_usable();
    struct err e = {0};
    struct kern *k, *reference;
    struct kern_options ko = {.n_threads = o.threads, .isa = o.isa};
    struct kern_options kr = {.n_threads = o.threads, .precision = KERN_REFERENCE};
    /* Opened first: AMX is permitted to threads that start later. */
    if (kern_cpu_open(&k, &ko, &e) || kern_cpu_open(&reference, &kr, &e)) die("open:", e.message);
    struct floors *f = need(calloc(1, sizeof *f));
    f->reps = o.reps;
    if (threads_open(&f->team, o.threads, &e)) die("threads:", e.message);
    struct kern_device_info info;
    k->ops->info(k, &info);
    printf("# %s; matrices of %zu MiB in all\n", info.name, o.megabytes);
    for (int kind = 1; kind < N_FLOORS; kind++) {
        double factor;
        bool used = false;
        for (int t = 0; t < KERN_N_DTYPES; t++)
            for (int p = 0; p < 2; p++)
                used |= (int)floor_of(o.isa, (enum kern_dtype)t, p, &factor) == kind;
        if (used)
            printf("# %s: %.1f GMAC/s\n", floor_names[kind],
                   floor_macs(f, (enum floor_kind)kind) / 1e9);
    }
    printf("isa,threads,dtype,outputs,cols,rows,class,ms_min,ms_median,GMAC/s,GB/s,read_GB/s,"
           "byte_floor_ms,mac_floor_ms,times_floor\n");
    struct matrix *m = need(malloc(sizeof *m));
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int t = 0; t < KERN_N_DTYPES; t++) {
            char word[16];
            snprintf(word, sizeof word, " %s ", kern_dtype_name((enum kern_dtype)t));
            if (!strstr(cases[c].types, word)) continue;
            if (o.dtype && strcmp(o.dtype, kern_dtype_name((enum kern_dtype)t))) continue;
            int rows = cases[c].rows, cols = cases[c].cols;
            uint8_t *src = random_weights((enum kern_dtype)t, (size_t)rows * (size_t)cols);
            matrix_make(m, k, (enum kern_dtype)t, rows, cols, o.megabytes << 20, src);
            measure_bandwidth(f, m->memory, (size_t)m->copies * m->w[0].bytes);
            static const int gen[] = {1, 2, 3, 5, 6, 7, 8};
            for (size_t i = 0; i < sizeof gen / sizeof *gen; i++)
                point(&o, f, reference, m, src, (struct kern_rows){.n_gen = gen[i]});
            if (rows < 10000) point(&o, f, reference, m, src, (struct kern_rows){.n_prompt = 512});
            k->ops->unreserve(k, m->memory);
            free(src);
        }
    threads_close(f->team);
    free(f);
    free(m);
    reference->ops->close(reference);
    k->ops->close(k);
    return 0;
}
