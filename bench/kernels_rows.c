/* The row-wise operations between products, at the width of an 8B model: norm_pack, pack,
 * gate_pack, rope_kv, embed. A step's rows were written a moment ago and lie in the cache, so few
 * rows are timed that way (distinct_mb is small, and what the row shows is launch and latency);
 * 4,096 rows go through memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "bench/kernels_bench.h"

enum {
    HIDDEN = 4096,
    FFN = 14336,
    HEADS = 32,
    KV_HEADS = 8,
    HEAD_DIM = 128,
    QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM,
    VOCAB = 128256,
    PAGE_BYTES = 2 * KV_HEADS * KERN_BLOCK * HEAD_DIM * 2, /* of one layer, f16 */
};

struct rows {
    struct kbench *b;
    int n, copies;
    struct kern_rows rows;
    size_t in, out; /* floats of one copy's input and second array */
    float *host, *x, *y, *weight, *host_weight;
    struct kern_act act; /* of copy 0 */
    size_t act_step;
    /* rope_kv and embed */
    struct kern_batch batch;
    struct kern_rope rope;
    struct kern_kv kv;
    struct kern_weight table;
    int32_t *token;
    int32_t *host_position, *host_slot;
};

static const int row_counts[] = {1, 5, 32, 4096};
enum { N_COUNTS = sizeof row_counts / sizeof *row_counts };

static struct rows open_rows(struct kbench *b, int n, size_t in, size_t out, int act_cols) {
    struct rows r = {.b = b, .n = n, .copies = n > 100 ? 8 : 64, .in = in, .out = out};
    r.rows = n > 100 ? (struct kern_rows){.n_prompt = n} : (struct kern_rows){.n_gen = n};
    size_t n_in = (size_t)n * in, n_out = (size_t)n * out;
    r.host = kbench_floats(b, n_in, 1);
    r.x = kbench_reserve(b, n_in * (size_t)r.copies * 4);
    struct err e = {0};
    for (int i = 0; i < r.copies; i++)
        kbench_must(b, b->k->ops->upload(b->k, r.x + (size_t)i * n_in, r.host, n_in * 4, &e), &e,
                    "upload:");
    r.y = n_out ? kbench_reserve(b, n_out * (size_t)r.copies * 4) : NULL;
    if (!act_cols) return r;
    r.act.bytes = b->k->ops->act_bytes(b->k, r.rows, act_cols);
    r.act.partner = KERN_BF16;
    r.act_step = (r.act.bytes + 255) / 256 * 256;
    r.act.data = kbench_reserve(b, r.act_step * (size_t)r.copies);
    return r;
}

static void close_rows(struct rows *r) {
    kbench_free(r->b, r->x);
    kbench_free(r->b, r->y);
    kbench_free(r->b, r->weight);
    kbench_free(r->b, r->act.data);
    free(r->host), free(r->host_weight);
}

static float *x_of(const struct rows *r, int i) {
    return r->x + (size_t)(i % r->copies) * (size_t)r->n * r->in;
}
static struct kern_act act_of(const struct rows *r, int i) {
    struct kern_act a = r->act;
    a.data = (uint8_t *)a.data + (size_t)(i % r->copies) * r->act_step;
    return a;
}

/* Row `row` of packed bf16 activations (kernels/cuda/cuda.cuh) against f32 values. */
static void check_act(const struct rows *r, const char *what, int cols, int row,
                      const double *want) {
    size_t stride = ((size_t)cols + 63) / 64 * 64;
    uint16_t *got = kbench_host((size_t)cols * 2);
    kbench_get(r->b, got, (uint8_t *)r->act.data + (size_t)row * stride * 2, (size_t)cols * 2);
    for (int i = 0; i < cols; i++)
        kbench_check(what, (long long)row * cols + i, (double)bf16_to_f32(got[i]), want[i],
                     ldexp(fabs(want[i]), -7) + 1e-6);
    free(got);
}

static void print(struct rows *r, const char *kernel, const char *shape, double bytes,
                  int (*call)(void *, int)) {
    struct kbench_point p = {.family = "rows",
                             .kernel = kernel,
                             .dtype = "BF16",
                             .shape = shape,
                             .rows = r->n,
                             .batch = 1,
                             .bytes = bytes,
                             .distinct = bytes * r->copies};
    kbench_measure(r->b, &p, r->copies, call, r);
    kbench_print(r->b, &p);
}

/* ---- norm_pack, pack, gate_pack ---- */

static const float norm_eps = 1e-5f;

static int call_norm(void *arg, int i) {
    struct rows *r = arg;
    return r->b->k->ops->norm_pack(r->b->k, r->rows, HIDDEN, x_of(r, i), r->y, r->weight, norm_eps,
                                   act_of(r, i), NULL);
}

static void point_norm(struct kbench *b, int n) {
    struct rows r = open_rows(b, n, HIDDEN, 0, HIDDEN);
    float *delta = kbench_floats(b, (size_t)n * HIDDEN, 1);
    r.host_weight = kbench_floats(b, HIDDEN, 1);
    r.weight = kbench_put(b, r.host_weight, HIDDEN * 4);
    r.y = kbench_put(b, delta, (size_t)n * HIDDEN * 4); /* the delta: read by all, kept */
    kbench_must(b, call_norm(&r, 0), NULL, "norm_pack:");
    /* The twin, on its rows: first and last. */
    for (int k = 0; k < 2; k++) {
        int row = k ? n - 1 : 0;
        struct kern_rows one = {.n_gen = 1};
        size_t bytes = b->twin->ops->act_bytes(b->twin, one, HIDDEN);
        struct kern_act act = {.data = kbench_host(bytes), .bytes = bytes, .partner = KERN_BF16};
        float *normed = kbench_host(HIDDEN * 4);
        double want[HIDDEN];
        b->twin->ops->norm_pack(b->twin, one, HIDDEN, r.host + (size_t)row * HIDDEN,
                                delta + (size_t)row * HIDDEN, r.host_weight, norm_eps, act, normed);
        for (int i = 0; i < HIDDEN; i++) want[i] = (double)normed[i];
        check_act(&r, "norm_pack is wrong", HIDDEN, row, want);
        free(act.data), free(normed);
        if (n == 1) break;
    }
    print(&r, "norm_pack", "4096", (double)n * HIDDEN * (4 + 4 + 4 + 2), call_norm);
    free(delta);
    close_rows(&r);
}

static int call_pack(void *arg, int i) {
    struct rows *r = arg;
    return r->b->k->ops->pack(r->b->k, r->rows, HIDDEN, x_of(r, i), act_of(r, i));
}

static void point_pack(struct kbench *b, int n) {
    struct rows r = open_rows(b, n, HIDDEN, 0, HIDDEN);
    double want[HIDDEN];
    kbench_must(b, call_pack(&r, 0), NULL, "pack:");
    for (int i = 0; i < HIDDEN; i++) want[i] = (double)r.host[(size_t)(n - 1) * HIDDEN + (size_t)i];
    check_act(&r, "pack is wrong", HIDDEN, n - 1, want);
    print(&r, "pack", "4096", (double)n * HIDDEN * (4 + 2), call_pack);
    close_rows(&r);
}

static int call_gate(void *arg, int i) {
    struct rows *r = arg;
    return r->b->k->ops->gate_pack(r->b->k, r->rows, FFN, x_of(r, i), act_of(r, i));
}

static void point_gate(struct kbench *b, int n) {
    struct rows r = open_rows(b, n, 2 * FFN, 0, FFN);
    double *want = kbench_host(FFN * sizeof *want);
    kbench_must(b, call_gate(&r, 0), NULL, "gate_pack:");
    const float *row = r.host + (size_t)(n - 1) * 2 * FFN;
    for (int i = 0; i < FFN; i++) {
        double g = (double)row[i];
        want[i] = g / (1 + exp(-g)) * (double)row[FFN + i];
    }
    check_act(&r, "gate_pack is wrong", FFN, n - 1, want);
    print(&r, "gate_pack", "14336", (double)n * FFN * (8 + 2), call_gate);
    free(want);
    close_rows(&r);
}

/* ---- rope_kv ---- */

static int call_rope(void *arg, int i) {
    struct rows *r = arg;
    return r->b->k->ops->rope_kv(r->b->k, &r->batch, &r->rope, HEADS, x_of(r, i), &r->kv);
}

/* The twin on the last row, f32 pages on the host; then K as it lies in the device's page. */
static void check_rope(struct rows *r, const float *inv_freq) {
    struct kbench *b = r->b;
    int32_t zero = 0, one = 1, position = r->host_position[r->n - 1];
    float *qkv = kbench_host(QKV * 4), *got = kbench_host(QKV * 4);
    struct kern_batch host = {.rows = {.n_gen = 1},
                              .position = &position,
                              .row_seq = &zero,
                              .slot_page = &zero,
                              .n_seqs = 1,
                              .seq_row = &zero,
                              .seq_n_rows = &one};
    struct kern_kv kv = r->kv;
    struct kern_rope rope = r->rope;
    rope.inv_freq = inv_freq;
    kv.base = kbench_host(2 * PAGE_BYTES);
    kv.dtype = KERN_F32;
    kv.head_stride *= 2;
    kv.v_offset *= 2;
    memcpy(qkv, r->host + (size_t)(r->n - 1) * QKV, QKV * 4);
    b->twin->ops->rope_kv(b->twin, &host, &rope, HEADS, qkv, &kv);
    kbench_get(b, got, r->x + (size_t)(r->n - 1) * QKV, QKV * 4);
    for (int i = 0; i < QKV; i++)
        kbench_check("rope_kv is wrong", i, (double)got[i], (double)qkv[i], 1e-3);
    uint16_t *raw = kbench_host(PAGE_BYTES);
    float *tile = kbench_host(KERN_BLOCK * HEAD_DIM * 4);
    const uint8_t *page = (uint8_t *)r->kv.base + (size_t)r->host_slot[r->n - 1] * 1024;
    kbench_get(b, raw, page, PAGE_BYTES);
    for (int value = 0; value < 2; value++)
        for (int head = 0; head < KV_HEADS; head++) {
            size_t at = value ? r->kv.v_offset : r->kv.k_offset;
            kern_cuda_read_kv((uint8_t *)raw + at + (size_t)head * r->kv.head_stride, KERN_F16,
                              HEAD_DIM, tile);
            for (int i = 0; i < HEAD_DIM; i++)
                kbench_check("a page is wrong after rope_kv", head * HEAD_DIM + i,
                             (double)tile[position % KERN_BLOCK * HEAD_DIM + i],
                             (double)qkv[(HEADS + (value ? KV_HEADS : 0) + head) * HEAD_DIM + i],
                             2e-3);
        }
    free(qkv), free(got), free(kv.base), free(raw), free(tile);
}

static void point_rope(struct kbench *b, int n) {
    struct rows r = open_rows(b, n, QKV, 0, 0);
    float inv_freq[HEAD_DIM / 2];
    size_t bytes = (size_t)n * 4;
    int n_pages = n / KERN_BLOCK + 1;
    int32_t *position = kbench_host(bytes), *seq = kbench_host(bytes), *slot = kbench_host(bytes);
    int32_t first[1] = {0}, count[1] = {n};
    for (int i = 0; i < HEAD_DIM / 2; i++) inv_freq[i] = (float)pow(500000, -2.0 * i / HEAD_DIM);
    for (int i = 0; i < n; i++) {
        position[i] = 1000 * (n < 100) + i;
        slot[i] = position[i] / KERN_BLOCK % n_pages * (PAGE_BYTES / 1024);
    }
    r.host_position = position;
    r.host_slot = slot;
    r.rope = (struct kern_rope){
        .inv_freq = kbench_put(b, inv_freq, sizeof inv_freq), .dim = HEAD_DIM, .scale = 1};
    r.kv = (struct kern_kv){.base = kbench_reserve(b, (size_t)n_pages * PAGE_BYTES),
                            .page_stride = 1024,
                            .v_offset = PAGE_BYTES / 2,
                            .head_stride = (size_t)KERN_BLOCK * HEAD_DIM * 2,
                            .dtype = KERN_F16,
                            .n_kv_heads = KV_HEADS,
                            .head_dim = HEAD_DIM};
    r.batch = (struct kern_batch){.rows = r.rows,
                                  .position = kbench_put(b, position, bytes),
                                  .row_seq = kbench_put(b, seq, bytes),
                                  .slot_page = kbench_put(b, slot, bytes),
                                  .n_seqs = 1,
                                  .seq_row = kbench_put(b, first, 4),
                                  .seq_n_rows = kbench_put(b, count, 4)};
    kbench_must(b, call_rope(&r, 0), NULL, "rope_kv:");
    check_rope(&r, inv_freq);
    /* Queries and keys are read and written, values read; keys and values go to pages as f16. */
    double floats = 2.0 * (HEADS + KV_HEADS) + KV_HEADS;
    print(&r, "rope_kv", "32/8x128", (double)n * HEAD_DIM * (4 * floats + 2 * 2 * KV_HEADS),
          call_rope);
    const void *device[] = {r.rope.inv_freq,   r.kv.base,       r.batch.position,  r.batch.row_seq,
                            r.batch.slot_page, r.batch.seq_row, r.batch.seq_n_rows};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        kbench_free(b, (void *)(uintptr_t)device[i]);
    free(position), free(seq), free(slot);
    close_rows(&r);
}

/* ---- embed ---- */

static int call_embed(void *arg, int i) {
    struct rows *r = arg;
    return r->b->k->ops->embed(r->b->k, &r->table,
                               r->token + (size_t)(i % r->copies) * (size_t)r->n, r->n, r->x);
}

static void point_embed(struct kbench *b, int n, const struct kern_weight *w, const uint16_t *src) {
    struct rows r = open_rows(b, n, HIDDEN, 0, 0);
    size_t all = (size_t)n * (size_t)r.copies;
    int32_t *token = kbench_host(all * 4);
    uint64_t seed = kbench_seed(b);
    for (size_t i = 0; i < all; i++) token[i] = (int32_t)(kbench_random(&seed) % VOCAB);
    float *got = kbench_host(HIDDEN * 4);
    r.table = *w;
    r.token = kbench_put(b, token, all * 4);
    kbench_must(b, call_embed(&r, 0), NULL, "embed:");
    kbench_get(b, got, r.x + (size_t)(n - 1) * HIDDEN, HIDDEN * 4);
    for (int i = 0; i < HIDDEN; i++) {
        float want = bf16_to_f32(src[(size_t)token[n - 1] * HIDDEN + (size_t)i]);
        kbench_check("embed is wrong", i, (double)got[i], (double)want, 0);
    }
    print(&r, "embed", "128256x4096", (double)n * HIDDEN * (2 + 4), call_embed);
    kbench_free(b, r.token);
    free(token), free(got);
    close_rows(&r);
}

static void points_embed(struct kbench *b) {
    size_t n = (size_t)VOCAB * HIDDEN;
    uint16_t *src = kbench_host(n * 2);
    uint64_t seed = kbench_seed(b);
    struct kern_weight w;
    struct err e = {0};
    for (size_t i = 0; i < n; i += 4) {
        uint64_t r = (kbench_random(&seed) & 0x80FF80FF80FF80FF) | 0x3C003C003C003C00;
        memcpy(src + i, &r, 8);
    }
    void *dst = kbench_reserve(b, b->k->ops->weight_bytes(b->k, KERN_BF16, VOCAB, HIDDEN));
    kbench_must(b, b->k->ops->weight_pack(b->k, &w, dst, KERN_BF16, VOCAB, HIDDEN, src, &e), &e,
                "weight_pack:");
    for (int i = 0; i < N_COUNTS; i++) point_embed(b, row_counts[i], &w, src);
    kbench_free(b, dst);
    free(src);
}

void kbench_rows(struct kbench *b) {
    for (int i = 0; i < N_COUNTS; i++) point_norm(b, row_counts[i]);
    for (int i = 0; i < N_COUNTS; i++) point_pack(b, row_counts[i]);
    for (int i = 0; i < N_COUNTS; i++) point_gate(b, row_counts[i]);
    for (int i = 0; i < N_COUNTS; i++) point_rope(b, row_counts[i]);
    points_embed(b);
}
