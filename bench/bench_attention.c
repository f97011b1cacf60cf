/* What does attention cost per layer, and how far is it from its floors?
 *
 * Shape of the default target: 9 query and 3 KV heads of 64, f16 or 8 bits (--kv-type, or both, one
 * behind the other), pages that hold all layers. Each
 * point is first checked against the reference table, then timed over all layers in turn (so a
 * layer's pages come from wherever the model's would), minimum and median of --reps passes, a layer
 * each. Floors, measured in the same run on the same threads: the bytes that the kernel counted
 * over the bandwidth of reading those very pages; its products over the rate of a register-only
 * loop of the instruction (AMX: TDPBF16PS for prompt rows; 8 bits: VPDPBUSD for scores, half its
 * rate for values; else FMA). The exponentials are in
 * neither. CSV on stdout; `# ` lines are talk. */
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
#include "base/number.h"
#include "base/rng.h"
#include "base/threads.h"
#include "bench/register_loops.h"
#include "kernels/kernels.h"

enum {
    HEADS = 9,
    KV_HEADS = 3,
    HD = 64,
    MAX_ROWS = 512,
    MAX_DEPTH = 7680,
    WIDTH = (HEADS + 2 * KV_HEADS) * HD,
};

struct options {
    const char *isa, *kv_type;
    int threads, reps, layers;
};

__attribute__((noreturn)) static void die(const char *what, const char *detail) {
    fprintf(stderr, "bench_attention: %s %s\n", what, detail);
    exit(1);
}

static void *need(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) die("out of", "memory");
    memset(p, 0, bytes);
    return p;
}

/* ---- Floors --------------------------------------------------------------------------------- */

struct bench {
    struct options o;
    struct kern *k, *reference;
    struct threads *team;
    struct kern_kv kv; /* of layer 0 */
    size_t layer_bytes;
    uint8_t *arena;
    int32_t page[MAX_DEPTH / KERN_BLOCK], block[MAX_DEPTH / KERN_BLOCK];
    float *qkv, *out, *want;
    /* of the running floor job */
    int n_pages, kind;
    double got[256];
};

static void products_share(void *arg, int idx, int n_threads) {
    struct bench *b = arg;
    (void)n_threads;
    b->got[idx] = 0;
#if defined(__x86_64__)
    b->got[idx] = b->kind == 3   ? loop_dpbusd() / 1.5
                  : b->kind == 2 ? loop_amx()
                  : b->kind == 1 ? loop_fma16()
                                 : loop_fma8();
#endif
}

/* Every head's K and V of the listed pages of all layers, in the order of the list. */
static void read_share(void *arg, int idx, int n_threads) {
    struct bench *b = arg;
    uint64_t sum[8] = {0};
    int begin, end, n = b->o.layers * b->n_pages;
    threads_split(n, 1, idx, n_threads, &begin, &end);
    for (int i = begin; i < end; i++) {
        const uint64_t *p =
            (const uint64_t *)(const void *)(b->arena +
                                             (size_t)b->page[i % b->n_pages] * b->kv.page_stride +
                                             (size_t)(i / b->n_pages) * b->layer_bytes);
        for (size_t x = 0; x < b->layer_bytes / 8; x += 8)
            for (int y = 0; y < 8; y++) sum[y] += p[x + (size_t)y];
    }
    for (int y = 1; y < 8; y++) sum[0] += sum[y];
    b->got[idx] = (double)sum[0];
}

static double best_seconds(struct bench *b, threads_fn *fn) {
    double best = INFINITY;
    for (int i = 0; i < b->o.reps; i++) {
        int64_t t = clock_ns();
        threads_run(b->team, fn, b);
        best = fmin(best, (double)(clock_ns() - t) / 1e9);
    }
    return best;
}

static double macs_per_second(struct bench *b, bool prompt) {
    bool amx = !strcmp(b->o.isa, "amx");
    bool wide = amx || !strcmp(b->o.isa, "avx512"), q8 = b->kv.dtype == KERN_Q8_0;
    b->kind = amx && prompt ? 2 : wide && q8 && !prompt ? 3 : wide ? 1 : 0;
    double s = best_seconds(b, products_share), n = 0;
    for (int i = 0; i < b->o.threads; i++) n += b->got[i];
    return n / s;
}

/* ---- One point ------------------------------------------------------------------------------ */

struct pass {
    struct kern_batch batch;
    struct kern_lists lists;
    int32_t position[MAX_ROWS], row_seq[MAX_ROWS], seq_row[3], seq_n_rows[3], n_blocks[3];
    int depth, n_rows; /* rows stand at depth .. depth + n_rows - 1 */
};

static void pass_make(struct bench *b, struct pass *p, int depth, struct kern_rows rows) {
    *p = (struct pass){.depth = depth, .n_rows = rows.n_gen + rows.n_prompt};
    p->batch = (struct kern_batch){.rows = rows,
                                   .position = p->position,
                                   .row_seq = p->row_seq,
                                   .n_seqs = 1,
                                   .seq_row = p->seq_row,
                                   .seq_n_rows = p->seq_n_rows};
    p->seq_n_rows[0] = p->n_rows;
    for (int r = 0; r < p->n_rows; r++) p->position[r] = depth + r;
    p->n_blocks[0] = (depth + p->n_rows + KERN_BLOCK - 1) / KERN_BLOCK;
    p->lists = (struct kern_lists){.page = b->page,
                                   .block = b->block,
                                   .n_blocks = p->n_blocks,
                                   .capacity = MAX_DEPTH / KERN_BLOCK,
                                   .seq_stride = 1};
}

static void attend(struct bench *b, struct kern *k, const struct pass *p, int layer, void *scratch,
                   const float *qkv, uint64_t *bytes, float *out) {
    struct kern_kv kv = b->kv;
    kv.k_offset += (size_t)layer * b->layer_bytes;
    kv.v_offset += (size_t)layer * b->layer_bytes;
    struct kern_attn_taps taps = {.kv_bytes_read = bytes};
    k->ops->attention(k, &p->batch, &p->lists, HEADS, 0.125f, qkv, &kv, &taps, scratch, out);
}

static void *scratch_of(struct kern *k, const struct pass *p) {
    return need(k->ops->attn_scratch_bytes(k, p->batch.rows, 1, HEADS, HD, p->lists.capacity));
}

/* First, middle and last row alone on the reference table. */
static void check(struct bench *b, const struct pass *p, double tolerance) {
    int rows[3] = {0, p->n_rows / 2, p->n_rows - 1};
    for (int i = 0; i < 3; i++) {
        struct pass one;
        pass_make(b, &one, p->depth + rows[i], (struct kern_rows){.n_gen = 1});
        void *scratch = scratch_of(b->reference, &one);
        attend(b, b->reference, &one, 0, scratch, b->qkv + (size_t)rows[i] * WIDTH, NULL, b->want);
        for (int x = 0; x < HEADS * HD; x++) {
            double d =
                fabs((double)b->want[x] - (double)b->out[(size_t)rows[i] * HEADS * HD + (size_t)x]);
            if (!(d <= tolerance)) die("wrong answer in", "a row");
        }
        free(scratch);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void point(struct bench *b, int depth, struct kern_rows rows) {
    struct pass p;
    pass_make(b, &p, depth, rows);
    bool prompt = rows.n_prompt > 0;
    void *scratch = scratch_of(b->k, &p);
    uint64_t bytes = 0;
    attend(b, b->k, &p, 0, scratch, b->qkv, &bytes, b->out);
    bool q8 = b->kv.dtype == KERN_Q8_0; /* generated rows quantise their query */
    check(b, &p, prompt ? !strcmp(b->o.isa, "amx") ? 3e-2 : 4e-5 : q8 ? 2e-2 : 4e-5);
    b->n_pages = p.n_blocks[0];
    double read =
        (double)b->n_pages * (double)b->layer_bytes * b->o.layers / best_seconds(b, read_share);
    double *ms = need((size_t)b->o.reps * sizeof *ms), macs = 0;
    for (int i = 0; i < b->o.reps; i++) {
        int64_t t = clock_ns();
        for (int l = 0; l < b->o.layers; l++) attend(b, b->k, &p, l, scratch, b->qkv, NULL, b->out);
        ms[i] = (double)(clock_ns() - t) / 1e6 / b->o.layers;
    }
    qsort(ms, (size_t)b->o.reps, sizeof *ms, by_value);
    for (int r = 0; r < p.n_rows; r++) macs += 2. * HEADS * HD * (p.position[r] + 1);
    double rate = macs_per_second(b, prompt);
    /* A tile that reads again what another read finds it in a cache: the floor counts a layer's
     * bytes once. */
    double once = fmin((double)bytes, (double)b->n_pages * (double)b->layer_bytes);
    double byte_floor = once / read * 1e3, mac_floor = rate > 0 ? macs / rate * 1e3 : 0;
    printf("%s,%s,%d,%s,%d,%d,%.4f,%.4f,%.2f,%.2f,%.3f,%.2f,%.4f,%.4f,%.2f\n", b->o.isa,
           q8 ? "q8_0" : "f16", b->o.threads, prompt ? "prompt" : "generated", depth, p.n_rows,
           ms[0], ms[b->o.reps / 2], macs / ms[0] / 1e6, (double)bytes / ms[0] / 1e6,
           (double)bytes / 1e6, read / 1e9, byte_floor, mac_floor,
           ms[0] / fmax(byte_floor, mac_floor));
    fflush(stdout);
    free(ms);
    free(scratch);
}

/* ---- Main ----------------------------------------------------------------------------------- */

/* 8-bit planes: any elements, scales that make magnitudes up to 2. */
static void fill_q8(struct bench *b, size_t arena_bytes) {
    size_t head = b->kv.head_stride, scales = (size_t)KERN_BLOCK * HD;
    for (size_t i = 0; i < arena_bytes; i++) b->arena[i] = (uint8_t)(i * 2654435761u >> 13 | 1);
    for (size_t plane = 0; plane < arena_bytes; plane += head)
        for (size_t i = scales; i < head; i += 2) {
            uint16_t s = (uint16_t)(0x2000 + (plane * 31 + i * 7) % 0x400);
            memcpy(b->arena + plane + i, &s, 2);
        }
}

/* Every element of the arena a plausible half, queries that make a softmax of some contrast. */
static void fill(struct bench *b, size_t arena_bytes) {
    static const uint16_t halves[16] = {0x3c00, 0xbc00, 0x3800, 0xb800, 0x3400, 0xb400,
                                        0x3a00, 0xba00, 0x3000, 0xb000, 0x3900, 0xb900,
                                        0x2c00, 0xac00, 0x3b00, 0xbb00};
    uint16_t *h = (uint16_t *)(void *)b->arena;
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i < arena_bytes / 2; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        h[i] = halves[x >> 60];
    }
    if (b->kv.dtype == KERN_Q8_0) fill_q8(b, arena_bytes);
    for (size_t i = 0; i < (size_t)MAX_ROWS * WIDTH; i++)
        b->qkv[i] = rng_uniform(9, i / 4, RNG_TEST, i % 4) * 4 - 2;
}

static int number(const char *text) {
    int n = 0;
    if (!number_in(text, strlen(text), 0, 10000, &n)) die("not a number that fits:", text);
    return n;
}

static void run_type(struct bench *b, enum kern_dtype t) {
    struct err e = {0};
    size_t head = KERN_BLOCK * kern_kv_token_bytes(t, HD);
    int n_pages = MAX_DEPTH / KERN_BLOCK;
    void *memory;
    b->layer_bytes = 2 * KV_HEADS * head;
    b->kv = (struct kern_kv){.page_stride = b->layer_bytes * (size_t)b->o.layers,
                             .v_offset = KV_HEADS * head,
                             .head_stride = head,
                             .dtype = t,
                             .n_kv_heads = KV_HEADS,
                             .head_dim = HD};
    if (b->k->ops->reserve(b->k, (size_t)n_pages * b->kv.page_stride, &memory, &e))
        die("reserve:", e.message);
    b->arena = b->kv.base = memory;
    fill(b, (size_t)n_pages * b->kv.page_stride);
    static const int depths[] = {512, 7160};
    for (int d = 0; d < 2; d++)
        for (int rows = 1; rows <= 5; rows += 2)
            point(b, depths[d], (struct kern_rows){.n_gen = rows});
    point(b, 0, (struct kern_rows){.n_prompt = 512});
    point(b, MAX_DEPTH - 512, (struct kern_rows){.n_prompt = 512});
    b->k->ops->unreserve(b->k, memory);
}

int main(int argc, char **argv) {
    static struct bench b = {.o = {.isa = "amx", .kv_type = "f16", .reps = 9, .layers = 30}};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            die("usage:", "[--isa plain|avx2|avx512|amx] [--threads N] [--reps N] "
                          "[--layers N] [--kv-type f16|q8_0|both]");
        if (!strcmp(argv[i], "--isa")) b.o.isa = argv[i + 1];
        else if (!strcmp(argv[i], "--threads")) b.o.threads = number(argv[i + 1]);
        else if (!strcmp(argv[i], "--reps")) b.o.reps = number(argv[i + 1]);
        else if (!strcmp(argv[i], "--layers")) b.o.layers = number(argv[i + 1]);
        else if (!strcmp(argv[i], "--kv-type")) b.o.kv_type = argv[i + 1];
        else die("unknown option", argv[i]);
    }
    if (b.o.threads == 0) b.o.threads = threads_n_usable();
    if (b.o.reps < 1 || b.o.layers < 1 || b.o.threads > 256) die("a number is", "out of range");
    struct err e = {0};
    struct kern_options ko = {.n_threads = b.o.threads, .isa = b.o.isa};
    struct kern_options kr = {.n_threads = 1, .precision = KERN_REFERENCE};
    if (kern_cpu_open(&b.k, &ko, &e) || kern_cpu_open(&b.reference, &kr, &e))
        die("open:", e.message);
    if (threads_open(&b.team, b.o.threads, &e)) die("threads:", e.message);
    bool both = !strcmp(b.o.kv_type, "both"), f16 = !strcmp(b.o.kv_type, "f16");
    if (!both && !f16 && strcmp(b.o.kv_type, "q8_0") != 0) die("unknown type", b.o.kv_type);
    int n_pages = MAX_DEPTH / KERN_BLOCK;
    for (int i = 0; i < n_pages; i++) {
        b.page[i] = (i * 37 + 11) % n_pages; /* 37 and 120 have no common factor */
        b.block[i] = i;
    }
    b.qkv = need((size_t)MAX_ROWS * WIDTH * sizeof(float));
    b.out = need((size_t)MAX_ROWS * HEADS * HD * sizeof(float));
    b.want = need((size_t)HEADS * HD * sizeof(float));
    struct kern_device_info info;
    b.k->ops->info(b.k, &info);
    printf("# %s; %d layers of 9 query and 3 KV heads of 64\n", info.name, b.o.layers);
    printf(
        "isa,kv,threads,class,depth,rows,ms_min,ms_median,GMAC/s,GB/s,MB,read_GB/s,byte_floor_ms,"
        "mac_floor_ms,times_floor\n");
    if (both || f16) run_type(&b, KERN_F16);
    if (both || !f16) run_type(&b, KERN_Q8_0);
    threads_close(b.team);
    b.reference->ops->close(b.reference);
    b.k->ops->close(b.k);
    return 0;
}
