/* Goal: the CUDA backend's row-wise operations, rotation and KV writes do what the CPU's double
 * twins do, with the same bits for a row wherever it stands. Method: widths odd in every way
 * against kernels/cpu's reference functions; whole buffers compared, with NaN where nobody may
 * write; one row alone against the same row among many; recordings of a hundred calls, timed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/half.h"
#include "kernels/cpu/cpu.h"
#include "tests/cuda_helper.h"

static const struct cpu_rowwise_isa *const twin = &cpu_rowwise_reference;

static size_t stride_of(int cols) {
    return ((size_t)cols + 63) / 64 * 64;
}
static float from16(uint16_t bits, bool bf16) {
    return bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
static struct kern_act act_of(struct kern *k, int n, int cols, bool bf16) {
    size_t bytes = (size_t)n * stride_of(cols) * 2;
    return (struct kern_act){dev_put(k, NULL, bytes), bytes, bf16 ? KERN_BF16 : KERN_Q4_K};
}

/* got16, packed rows, against want: half an ulp of the type and what the arithmetic may lose
 * (`slack`, relative); columns behind the row are zero. f16's ulp is 2^-24 below 2^-14. */
static void check_act(const char *what, const uint16_t *got, const float *want, int n, int cols,
                      bool bf16, double slack) {
    double half_ulp = bf16 ? 0x1p-8 : 0x1p-11, atol = bf16 ? 1e-38 : 0x1p-25;
    for (int r = 0; r < n; r++)
        for (size_t i = 0; i < stride_of(cols); i++) {
            uint16_t bits = got[(size_t)r * stride_of(cols) + i];
            double g = (double)from16(bits, bf16), w = 0;
            if (i < (size_t)cols) w = (double)want[(size_t)r * (size_t)cols + i];
            if (i >= (size_t)cols ? bits == 0 : fabs(g - w) <= fabs(w) * (half_ulp + slack) + atol)
                continue;
            fail_msg("%s, %d columns, %s: row %d column %zu is %.9g (%04x), want %.9g", what, cols,
                     bf16 ? "bf16" : "f16", r, i, g, bits, w);
        }
}

static void check_bits(const char *what, const void *got, const void *want, size_t n) {
    const uint8_t *a = got, *b = want;
    for (size_t i = 0; i < n; i++)
        if (a[i] != b[i]) fail_msg("%s: byte %zu is %02x, want %02x", what, i, a[i], b[i]);
}

/* ---- Norm ---- */

struct norm_case {
    int n_gen, n_prompt, cols;
    bool bf16, delta, normed;
};

/* x after the addition has the CPU's bits. The sum of squares: at most 32 terms in a row, 5 levels
 * of lanes and 16 warps, 53 half ulps at worst; the square root halves that, and rsqrtf and two
 * products add 2e-7 and 1.2e-7: 2.2e-6 in all. */
static void check_norm(struct kern *k, const struct norm_case *c) {
    struct err e = {0};
    struct kern_rows rows = {c->n_gen, c->n_prompt};
    int n = c->n_gen + c->n_prompt;
    size_t cols = (size_t)c->cols, total = (size_t)n * cols;
    float *x = test_floats(1, total, 3), *delta = test_floats(2, total, 2);
    float *w = test_floats(3, cols, 2), *want = malloc(total * 4);
    assert_non_null(want);
    float *dx = dev_put(k, x, total * 4), *dw = dev_put(k, w, cols * 4);
    float *dd = c->delta ? dev_put(k, delta, total * 4) : NULL;
    float *dn = c->normed ? dev_put(k, NULL, total * 4) : NULL;
    struct kern_act act = act_of(k, n, c->cols, c->bf16);
    assert_int_equal(k->ops->norm_pack(k, rows, c->cols, dx, dd, dw, 1e-5f, act, dn), 0);
    assert_ok(k->ops->sync(k, &e), e);
    for (int r = 0; r < n; r++)
        twin->norm(x + (size_t)r * cols, c->delta ? delta + (size_t)r * cols : NULL, w, 1e-5f,
                   c->cols, want + (size_t)r * cols);
    float *got_x = dev_get(k, dx, total * 4), *got_n = dn ? dev_get(k, dn, total * 4) : NULL;
    uint16_t *got = dev_get(k, act.data, act.bytes);
    check_bits("norm: x", got_x, x, total * 4);
    check_act("norm", got, want, n, c->cols, c->bf16, 3e-6);
    if (got_n) assert_near(test_rel_error(got_n, want, total, 1e-30), 0, 3e-6);
    void *dev[] = {dx, dw, dd, dn, act.data};
    for (size_t i = 0; i < sizeof dev / sizeof *dev; i++) k->ops->unreserve(k, dev[i]);
    free(x), free(delta), free(w), free(want), free(got_x), free(got_n), free(got);
}

static void test_cuda_rowwise_norm(void) {
    struct kern *k = cuda_or_skip();
    static const int cols[] = {1,    3,    4,    5,    63,    64,    65,    100,  576,
                               1000, 1023, 1028, 2047, 2048,  2052,  4092,  4096, 4100,
                               7001, 8192, 8196, 9999, 14336, 16384, 16388, 20001};
    for (size_t i = 0; i < sizeof cols / sizeof *cols; i++)
        for (int mix = 0; mix < 4; mix++) {
            struct norm_case c = {3, 2, cols[i], mix & 1, mix != 2, mix >= 2};
            if (mix == 1) c.n_gen = 0;
            if (mix == 2) c.n_prompt = 0;
            check_norm(k, &c);
        }
    struct norm_case many = {1, 300, 1028, true, true, true}, none = {0, 0, 64, true, false, false};
    check_norm(k, &many);
    struct kern_act act = act_of(k, 1, none.cols, true);
    float *w = dev_put(k, NULL, 256);
    assert_int_equal(k->ops->norm_pack(k, (struct kern_rows){0}, 64, w, NULL, w, 1e-5f, act, NULL),
                     0);
    k->ops->close(k);
}

/* ---- Pack and gate ---- */

/* silu by approximations: 1e-5 beside a half ulp of 2e-3 or 5e-4. */
static void check_packs(struct kern *k, int n_gen, int n_prompt, int cols, bool bf16) {
    struct err e = {0};
    struct kern_rows rows = {n_gen, n_prompt};
    int n = n_gen + n_prompt;
    size_t width = (size_t)cols, total = (size_t)n * width;
    float *x = test_floats(4, 2 * total, 12), *want = malloc(total * 4);
    assert_non_null(want);
    float *dx = dev_put(k, x, 2 * total * 4);
    struct kern_act plain = act_of(k, n, cols, bf16), gated = act_of(k, n, cols, bf16);
    assert_int_equal(k->ops->pack(k, rows, cols, dx, plain), 0);
    assert_int_equal(k->ops->gate_pack(k, rows, cols, dx, gated), 0);
    assert_ok(k->ops->sync(k, &e), e);
    uint16_t *got = dev_get(k, plain.data, plain.bytes);
    check_act("pack", got, x, n, cols, bf16, 0);
    free(got);
    for (int r = 0; r < n; r++) {
        const float *g = x + 2 * (size_t)r * width;
        twin->gate(g, g + width, cols, want + (size_t)r * width);
    }
    got = dev_get(k, gated.data, gated.bytes);
    check_act("gate", got, want, n, cols, bf16, 1e-5);
    k->ops->unreserve(k, dx), k->ops->unreserve(k, plain.data), k->ops->unreserve(k, gated.data);
    free(x), free(want), free(got);
}

static void test_cuda_rowwise_pack(void) {
    struct kern *k = cuda_or_skip();
    static const int cols[] = {1, 3, 4, 63, 64, 65, 511, 512, 516, 1536, 2049, 4096, 11008, 14336};
    for (size_t i = 0; i < sizeof cols / sizeof *cols; i++) {
        check_packs(k, 3, 2, cols[i], i % 2);
        check_packs(k, 0, 1, cols[i], i % 2 == 0);
        if (cols[i] < 600) check_packs(k, 30, 100, cols[i], i % 2);
    }
    check_packs(k, 0, 130, 2052, true);
    k->ops->close(k);
}

/* f16 saturates, bf16 has room; NaN stays NaN in its place, and a norm's row alone is spoilt. */
static void test_cuda_rowwise_edges(void) {
    struct kern *k = cuda_or_skip();
    enum { COLS = 12 };
    static const float x[COLS] = {65504,     65519, 65520, 1e9f,     -1e9f,    INFINITY,
                                  -INFINITY, NAN,   -NAN,  0x1p-24f, 0x1p-26f, -0.f};
    float *dx = dev_put(k, x, sizeof x);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct kern_act act = act_of(k, 1, COLS, bf16);
        assert_int_equal(k->ops->pack(k, (struct kern_rows){1, 0}, COLS, dx, act), 0);
        uint16_t *got = dev_get(k, act.data, act.bytes);
        for (int i = 0; i < COLS; i++) {
            float v = from16(got[i], bf16), want = x[i];
            if (!bf16 && fabsf(want) > 65504) want = copysignf(65504, want);
            if (i == 10 && !bf16) want = 0;
            printf("%s: %g becomes %g\n", bf16 ? "bf16" : "f16", (double)x[i], (double)v);
            if (isnan(x[i])) assert_true(isnan(v));
            else if (isinf(want)) assert_true(v == want);
            else assert_near(v, want, fabsf(want) * 0x1p-8f);
        }
        free(got);
        k->ops->unreserve(k, act.data);
    }
    float gate[2][2 * COLS], rows[3][COLS];
    for (int i = 0; i < COLS; i++) {
        gate[0][i] = i == 3 ? NAN : 1, gate[0][COLS + i] = i == 4 ? NAN : 1;
        gate[1][i] = i == 3 ? -200 : i == 4 ? 200 : i == 5 ? -88.5f : i == 6 ? -1e30f : 1;
        gate[1][COLS + i] = 2;
        for (int r = 0; r < 3; r++) rows[r][i] = r == 1 && i == 5 ? NAN : 1;
    }
    float *dg = dev_put(k, gate, sizeof gate), *dr = dev_put(k, rows, sizeof rows);
    float ones[COLS];
    for (int i = 0; i < COLS; i++) ones[i] = 1;
    float *dw = dev_put(k, ones, sizeof ones);
    struct kern_act act = act_of(k, 3, COLS, false);
    assert_int_equal(k->ops->gate_pack(k, (struct kern_rows){1, 1}, COLS, dg, act), 0);
    uint16_t *got = dev_get(k, act.data, act.bytes);
    for (int i = 0; i < COLS; i++) {
        assert_int_equal(isnan(from16(got[i], false)), i == 3 || i == 4);
        float v = from16(got[64 + i], false);
        assert_near(v, i == 4 ? 400 : i == 3 || i == 5 || i == 6 ? 0 : 1.4621, 1e-3);
    }
    free(got);
    assert_int_equal(
        k->ops->norm_pack(k, (struct kern_rows){3, 0}, COLS, dr, NULL, dw, 0, act, NULL), 0);
    got = dev_get(k, act.data, act.bytes);
    for (int i = 0; i < 3 * 64; i++) {
        float v = from16(got[i], false);
        if (i % 64 >= COLS) assert_int_equal(got[i], 0);
        else if (i / 64 == 1) assert_true(isnan(v));
        else assert_near(v, 1, 1e-3);
    }
    k->ops->close(k);
}

/* ---- Copies ---- */

static void test_cuda_rowwise_gather(void) {
    struct kern *k = cuda_or_skip();
    static const int cols[] = {1, 3, 64, 65, 576, 1028, 4096};
    static const int32_t idx[] = {4, 0, 4, -1, 6, INT32_MIN, INT32_MAX, KERN_MAX_ROWS, 2};
    enum { N = sizeof idx / sizeof *idx, ROWS = 7 };
    int32_t *di = dev_put(k, idx, sizeof idx);
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        size_t w = (size_t)cols[c];
        float *x = test_floats(5, ROWS * w, 1);
        for (size_t i = 0; i < w; i++) x[w + i] = NAN; /* row 1 is not asked for */
        float *dx = dev_put(k, x, ROWS * w * 4), *out = dev_put(k, NULL, (N + 1) * w * 4);
        assert_int_equal(k->ops->gather(k, dx, cols[c], di, N, out), 0);
        float *got = dev_get(k, out, (N + 1) * w * 4);
        for (int r = 0; r < N; r++)
            for (size_t i = 0; i < w; i++) {
                bool known = idx[r] >= 0 && idx[r] < ROWS;
                assert_near(got[(size_t)r * w + i], known ? x[(size_t)idx[r] * w + i] : 0, 0);
            }
        for (size_t i = 0; i < w; i++) assert_true(isnan(got[N * w + i]));
        k->ops->unreserve(k, dx), k->ops->unreserve(k, out);
        free(x), free(got);
    }
    k->ops->close(k);
}

static void test_cuda_rowwise_copy_page(void) {
    struct kern *k = cuda_or_skip();
    static const size_t bytes[] = {1, 15, 16, 17, 1000, 65536, (5 << 20) + 3};
    for (size_t c = 0; c < sizeof bytes / sizeof *bytes; c++)
        for (size_t shift = 0; shift < 3; shift++) {
            size_t n = bytes[c], room = n + 64, to = 16 + (shift == 1), from = shift == 2 ? 3 : 0;
            uint8_t *src = malloc(room);
            assert_non_null(src);
            for (size_t i = 0; i < room; i++) src[i] = (uint8_t)(i * 131 + i / 256);
            uint8_t *ds = dev_put(k, src, room), *dd = dev_put(k, NULL, room);
            assert_int_equal(k->ops->copy_page(k, dd + to, ds + from, n), 0);
            uint8_t *got = dev_get(k, dd, room);
            for (size_t i = 0; i < room; i++) {
                uint8_t want = i >= to && i < to + n ? src[i - to + from] : 0xFF;
                if (got[i] != want)
                    fail_msg("%zu bytes to +%zu from +%zu: byte %zu is %02x, want %02x", n, to,
                             from, i, got[i], want);
            }
            k->ops->unreserve(k, ds), k->ops->unreserve(k, dd);
            free(src), free(got);
        }
    k->ops->close(k);
}

/* ---- Rotation and KV ---- */

struct rope_case {
    int n_heads, n_kv, head_dim, dim;
    bool interleaved, bias, norm, nope, bf16;
    float scale;
};

static const struct rope_case rope_cases[] = {
    {32, 8, 128, 128, false, false, false, false, false, 1}, /* Llama 8B, safetensors */
    {32, 8, 128, 128, true, false, false, false, true, 1},   /* the same from GGUF */
    {32, 8, 64, 64, true, true, false, false, false, 1},
    {9, 3, 64, 64, false, false, true, false, true, 1.1386f},
    {8, 1, 256, 64, false, true, true, false, false, 1},
    {4, 4, 80, 32, false, true, true, false, true, 1},
    {3, 1, 96, 96, true, true, true, false, false, 0.75f},
    {16, 2, 256, 256, false, true, true, false, false, 1},
    {6, 2, 256, 256, true, false, true, false, true, 1},
    {2, 1, 16, 16, false, true, true, false, false, 1},
    {5, 1, 32, 20, false, true, true, false, false, 1}, /* halves that split quads */
    {4, 2, 48, 30, true, true, true, false, true, 1},   /* a quad with one pair that turns */
    {7, 7, 112, 6, false, false, false, false, true, 1},
    {32, 8, 128, 128, false, true, true, true, false, 1}, /* NoPE */
    {4, 2, 64, 0, false, false, false, false, true, 1},
};

enum { ROPE_ROWS = 13, ROPE_PAGES = 9, UNIT = 1024 };

/* Arrays of a case on one backend; base and strides have gaps on purpose. */
struct rope_setup {
    struct kern_batch batch;
    struct kern_rope rope;
    struct kern_kv kv;
    float *qkv;
    size_t arena_bytes;
    void *owned[16];
    int n_owned;
};

static void *own(struct rope_setup *s, struct kern *k, const void *host, size_t n) {
    assert_true(s->n_owned < 16);
    return s->owned[s->n_owned++] = dev_put(k, host, n);
}
static void rope_free(struct rope_setup *s, struct kern *k) {
    for (int i = 0; i < s->n_owned; i++) k->ops->unreserve(k, s->owned[i]);
}

/* n rows; row r stands at position[r] in page slot[r]. Contents come from `seed` + source[r], so
 * that equal sources give equal rows. */
static void rope_setup(struct rope_setup *s, struct kern *k, const struct rope_case *c,
                       struct kern_rows rows, const int32_t *position, const int32_t *row_seq,
                       const int32_t *slot, const int *source, int n_pages, enum kern_dtype kv) {
    memset(s, 0, sizeof *s);
    size_t n = (size_t)(rows.n_gen + rows.n_prompt), hd = (size_t)c->head_dim, elem = kv ? 2 : 4;
    size_t width = (size_t)(c->n_heads + 2 * c->n_kv) * hd;
    float *x = malloc(n * width * 4), inv[128];
    assert_non_null(x);
    for (size_t r = 0; r < n; r++)
        for (size_t i = 0; i < width; i++)
            x[r * width + i] = 2 * test_signed(100 + (uint64_t)source[r], i);
    for (int i = 0; i < c->dim / 2; i++) inv[i] = (float)pow(10000, -2.0 * i / c->dim);
    float *bias = test_floats(7, width, 1), *norm = test_floats(8, 2 * hd, 2);
    s->qkv = own(s, k, x, n * width * 4);
    float *dbias = own(s, k, bias, width * 4), *dnorm = own(s, k, norm, 2 * hd * 4);
    float *dinv = own(s, k, inv, sizeof inv);
    s->rope = (struct kern_rope){.inv_freq = c->nope ? NULL : dinv,
                                 .dim = c->dim,
                                 .interleaved = c->interleaved,
                                 .scale = c->scale,
                                 .norm_eps = 1e-5f};
    if (c->norm) s->rope.q_norm = dnorm, s->rope.k_norm = dnorm + hd;
    if (c->bias) {
        s->rope.q_bias = dbias;
        s->rope.k_bias = dbias + (size_t)c->n_heads * hd;
        s->rope.v_bias = dbias + (size_t)(c->n_heads + c->n_kv) * hd;
    }
    size_t plane = (size_t)KERN_BLOCK * hd * elem, stride = plane + 64;
    size_t page = (2 * (size_t)c->n_kv * stride + 64 + UNIT - 1) / UNIT * UNIT;
    s->arena_bytes = page * (size_t)n_pages;
    s->kv = (struct kern_kv){.base = own(s, k, NULL, s->arena_bytes),
                             .page_stride = page,
                             .k_offset = 64,
                             .v_offset = 64 + (size_t)c->n_kv * stride,
                             .head_stride = stride,
                             .dtype = kv,
                             .n_kv_heads = c->n_kv,
                             .head_dim = c->head_dim};
    s->batch = (struct kern_batch){.rows = rows,
                                   .position = own(s, k, position, n * 4),
                                   .row_seq = own(s, k, row_seq, n * 4),
                                   .slot_page = own(s, k, slot, n * 4)};
    free(x), free(bias), free(norm);
}

/* One head's plane of one page as f32 [64][head_dim]. */
static void read_plane(const struct rope_setup *s, const uint8_t *arena, int page, int head,
                       bool value, float *out) {
    kern_cuda_read_kv(arena + (size_t)page * s->kv.page_stride +
                          (value ? s->kv.v_offset : s->kv.k_offset) +
                          (size_t)head * s->kv.head_stride,
                      s->kv.dtype, s->kv.head_dim, out);
}

/* Written places of all pages against the twin's; elements that are no longer 0xFFFF are counted.
 */
static void check_pages(const struct rope_setup *s, const uint8_t *arena,
                        const struct rope_setup *cpu, const int32_t *position,
                        const int32_t *row_seq, const int32_t *slot, int n, const char *name) {
    size_t hd = (size_t)s->kv.head_dim, n_written = 0, n_want = 0;
    float *got = malloc(64 * hd * 4), *want = malloc(64 * hd * 4);
    bool bf16 = s->kv.dtype == KERN_BF16;
    double ulp = bf16 ? 0x1p-8 : 0x1p-11;
    assert_true(got && want);
    for (int r = 0; r < n; r++) {
        if (row_seq[r] < 0 || slot[r] < 0) continue;
        size_t at = (size_t)(position[r] % KERN_BLOCK) * hd;
        for (int h = 0; h < 2 * s->kv.n_kv_heads; h++) {
            read_plane(s, arena, slot[r], h / 2, h % 2, got);
            kern_cpu_read_kv(&cpu->kv, slot[r], h / 2, h % 2, want);
            n_want += hd;
            for (size_t i = 0; i < hd; i++) {
                double g = (double)got[at + i], w = (double)want[at + i];
                if (!(fabs(g - w) <= fabs(w) * ulp + 8e-6 * (1 + fabs(w))))
                    fail_msg("%s: row %d, %s of head %d, element %zu is %.9g, want %.9g", name, r,
                             h % 2 ? "V" : "K", h / 2, i, g, w);
            }
        }
    }
    for (size_t i = 0; i < s->arena_bytes / 2; i++)
        n_written += arena[2 * i] != 0xFF || arena[2 * i + 1] != 0xFF;
    if (n_written != n_want)
        fail_msg("%s: %zu elements of the arena were written, want %zu", name, n_written, n_want);
    free(got), free(want);
}

/* q and k in qkv: a norm loses 2e-6 of a value, an angle 1e-7 of its pair, whose norm may be three
 * times a value, and products and sum of the rotation 2e-7. */
static void check_rope(struct kern *k, struct kern *cpu, const struct rope_case *c) {
    static const int32_t position[ROPE_ROWS] = {0,     63,     64,    131071, 12345, 77, 100,
                                                70000, 999999, 65535, 200,    201,   202};
    static const int32_t slot[ROPE_ROWS] = {0, 0, 1, 2, 3, -1, 4, 5, 5, 6, 7, 7, 7};
    int32_t cpu_slot[ROPE_ROWS], row_seq[ROPE_ROWS];
    int source[ROPE_ROWS];
    char name[80];
    snprintf(name, sizeof name, "rope of %d+2x%d heads of %d, dim %d%s%s", c->n_heads, c->n_kv,
             c->head_dim, c->dim, c->interleaved ? ", interleaved" : "", c->nope ? ", NoPE" : "");
    for (int r = 0; r < ROPE_ROWS; r++) {
        row_seq[r] = r == 6 ? -1 : r / 4;
        source[r] = r;
        cpu_slot[r] = slot[r] < 0 ? ROPE_PAGES - 1 : slot[r];
    }
    struct kern_rows rows = {6, ROPE_ROWS - 6};
    struct rope_setup g, w;
    struct err e = {0};
    rope_setup(&g, k, c, rows, position, row_seq, slot, source, ROPE_PAGES,
               c->bf16 ? KERN_BF16 : KERN_F16);
    rope_setup(&w, cpu, c, rows, position, row_seq, cpu_slot, source, ROPE_PAGES, KERN_F32);
    assert_int_equal(k->ops->rope_kv(k, &g.batch, &g.rope, c->n_heads, g.qkv, &g.kv), 0);
    assert_ok(k->ops->sync(k, &e), e);
    assert_int_equal(cpu->ops->rope_kv(cpu, &w.batch, &w.rope, c->n_heads, w.qkv, &w.kv), 0);
    size_t hd = (size_t)c->head_dim, width = (size_t)(c->n_heads + 2 * c->n_kv) * hd;
    size_t n_v = (size_t)c->n_kv * hd;
    float *got = dev_get(k, g.qkv, ROPE_ROWS * width * 4);
    uint8_t *arena = dev_get(k, g.kv.base, g.arena_bytes);
    for (size_t r = 0; r < ROPE_ROWS; r++)
        for (size_t i = 0; i < width - n_v; i++) {
            double a = (double)got[r * width + i], b = (double)w.qkv[r * width + i];
            if (!(fabs(a - b) <= 8e-6 * (1 + fabs(b))))
                fail_msg("%s: row %zu, head %zu, element %zu is %.9g, want %.9g", name, r, i / hd,
                         i % hd, a, b);
        }
    check_bits("idle row", got + 6 * width, w.qkv + 6 * width, width * 4);
    check_pages(&g, arena, &w, position, row_seq, slot, ROPE_ROWS, name);
    rope_free(&g, k), rope_free(&w, cpu);
    free(got), free(arena);
}

static void test_cuda_rope_kv(void) {
    struct kern *k = cuda_or_skip(), *cpu = cpu_twin();
    for (size_t i = 0; i < sizeof rope_cases / sizeof *rope_cases; i++)
        check_rope(k, cpu, &rope_cases[i]);
    k->ops->close(k), cpu->ops->close(cpu);
}

static void test_cuda_rope_unsupported(void) {
    struct kern *k = cuda_or_skip();
    struct rope_case c = rope_cases[3];
    const int32_t zero = 0;
    const int source = 0;
    struct rope_setup s;
    rope_setup(&s, k, &c, (struct kern_rows){1, 0}, &zero, &zero, &zero, &source, 1, KERN_F16);
    s.kv.dtype = KERN_F32;
    assert_int_equal(k->ops->rope_kv(k, &s.batch, &s.rope, c.n_heads, s.qkv, &s.kv), E_UNSUPPORTED);
    s.kv.dtype = KERN_F16;
    s.kv.head_dim = 72;
    assert_int_equal(k->ops->rope_kv(k, &s.batch, &s.rope, c.n_heads, s.qkv, &s.kv), E_UNSUPPORTED);
    k->ops->close(k);
}

/* ---- One row, one result ---- */

enum { MANY = 700, N_PLACES = 4 };
static const int places[N_PLACES] = {0, 1, 63, MANY - 1};

/* Row 0 alone, then at some places among many others: norm, pack and gate. */
static void test_cuda_rowwise_places(void) {
    struct kern *k = cuda_or_skip();
    static const int cols[] = {65, 576, 1024, 4096, 8192, 16392};
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        size_t w = (size_t)cols[c], stride = stride_of(cols[c]);
        int n = w > 5000 ? 70 : MANY;
        float *one = test_floats(11, 2 * w, 3), *x = test_floats(12, 2 * w * (size_t)n, 3);
        float *gate = malloc(2 * w * (size_t)n * 4);
        assert_non_null(gate);
        memcpy(gate, x, 2 * w * (size_t)n * 4);
        for (int p = 0; p < N_PLACES; p++) {
            int at = places[p] < n ? places[p] : n - 1;
            memcpy(x + (size_t)at * w, one, w * 4);
            memcpy(gate + 2 * (size_t)at * w, one, 2 * w * 4);
        }
        float *dw = dev_put(k, one + w, w * 4);
        void *out[2][3];
        for (int many = 0; many < 2; many++) {
            struct kern_rows rows = {many ? 2 : 1, many ? n - 2 : 0};
            int m = many ? n : 1;
            float *dx = dev_put(k, many ? x : one, w * (size_t)m * 4);
            float *dg = dev_put(k, many ? gate : one, 2 * w * (size_t)m * 4);
            struct kern_act a = act_of(k, m, cols[c], true);
            k->ops->pack(k, rows, cols[c], dx, a);
            out[many][0] = dev_get(k, a.data, a.bytes);
            k->ops->gate_pack(k, rows, cols[c], dg, a);
            out[many][1] = dev_get(k, a.data, a.bytes);
            a.partner = KERN_F16;
            k->ops->norm_pack(k, rows, cols[c], dx, NULL, dw, 1e-6f, a, NULL);
            out[many][2] = dev_get(k, a.data, a.bytes);
            k->ops->unreserve(k, dx), k->ops->unreserve(k, dg), k->ops->unreserve(k, a.data);
        }
        static const char *const names[] = {"pack among many", "gate among many",
                                            "norm among many"};
        for (int op = 0; op < 3; op++)
            for (int p = 0; p < N_PLACES; p++) {
                int at = places[p] < n ? places[p] : n - 1;
                check_bits(names[op], (uint16_t *)out[1][op] + (size_t)at * stride, out[0][op],
                           stride * 2);
            }
        for (int i = 0; i < 6; i++) free(out[i / 3][i % 3]);
        k->ops->unreserve(k, dw);
        free(one), free(x), free(gate);
    }
    k->ops->close(k);
}

/* The same of rope_kv: one row is cut into blocks by heads, 700 rows are not. */
static void test_cuda_rope_places(void) {
    struct kern *k = cuda_or_skip();
    static int32_t position[MANY], row_seq[MANY], slot[MANY];
    static int source[MANY];
    for (size_t i = 0; i < sizeof rope_cases / sizeof *rope_cases; i += 3) {
        const struct rope_case *c = &rope_cases[i];
        enum kern_dtype t = c->bf16 ? KERN_BF16 : KERN_F16;
        for (int r = 0; r < MANY; r++) {
            position[r] = r % 64 + 64 * (r / 64 % 3) + 4096;
            slot[r] = 4 + r / 64;
            source[r] = 1 + r;
        }
        for (int p = 0; p < N_PLACES; p++) {
            source[places[p]] = 0;
            position[places[p]] = 70003;
            slot[places[p]] = p;
        }
        int n_pages = 5 + MANY / 64;
        struct rope_setup one, many;
        int zero = 0;
        int32_t slot_zero = 0, position_zero = 70003;
        rope_setup(&one, k, c, (struct kern_rows){1, 0}, &position_zero, row_seq, &slot_zero, &zero,
                   1, t);
        rope_setup(&many, k, c, (struct kern_rows){2, MANY - 2}, position, row_seq, slot, source,
                   n_pages, t);
        assert_int_equal(k->ops->rope_kv(k, &one.batch, &one.rope, c->n_heads, one.qkv, &one.kv),
                         0);
        assert_int_equal(
            k->ops->rope_kv(k, &many.batch, &many.rope, c->n_heads, many.qkv, &many.kv), 0);
        size_t width = (size_t)(c->n_heads + 2 * c->n_kv) * (size_t)c->head_dim * 4;
        uint8_t *a = dev_get(k, one.qkv, width), *b = dev_get(k, many.qkv, MANY * width);
        uint8_t *pa = dev_get(k, one.kv.base, one.arena_bytes);
        uint8_t *pb = dev_get(k, many.kv.base, many.arena_bytes);
        for (int p = 0; p < N_PLACES; p++) {
            check_bits("rope among many: qkv", b + (size_t)places[p] * width, a, width);
            check_bits("rope among many: page", pb + (size_t)p * many.kv.page_stride, pa,
                       one.arena_bytes);
        }
        rope_free(&one, k), rope_free(&many, k);
        free(a), free(b), free(pa), free(pb);
    }
    k->ops->close(k);
}

/* ---- Recordings and time ---- */

enum { REPEAT = 100 };

struct timed {
    struct kern_rows rows;
    int cols;
    float *in, *delta, *weight; /* `in` has room for gate and up */
    struct kern_act act;
    struct rope_setup rope;
    int n_heads;
};

static void enqueue(struct kern *k, struct timed *t, int op) {
    if (op == 0)
        k->ops->norm_pack(k, t->rows, t->cols, t->in, t->delta, t->weight, 1e-5f, t->act, NULL);
    else if (op == 1) k->ops->pack(k, t->rows, t->cols, t->in, t->act);
    else if (op == 2) k->ops->gate_pack(k, t->rows, t->cols, t->in, t->act);
    else k->ops->rope_kv(k, &t->rope.batch, &t->rope.rope, t->n_heads, t->rope.qkv, &t->rope.kv);
}

/* ns of one call inside a recording of REPEAT calls, replayed. */
static double time_op(struct kern *k, struct timed *t, int op, uint64_t id) {
    uint64_t key[KERN_RECORD_KEY] = {id, (uint64_t)op};
    struct err e = {0};
    int64_t best = INT64_MAX;
    for (int round = 0; round < 6; round++) {
        bool replayed = false;
        int64_t start = clock_ns();
        assert_ok(k->ops->record_begin(k, key, &replayed, &e), e);
        if (!replayed) {
            for (int i = 0; i < REPEAT; i++) enqueue(k, t, op);
            assert_ok(k->ops->record_end(k, &e), e);
        }
        assert_ok(k->ops->sync(k, &e), e);
        int64_t ns = clock_ns() - start;
        if (replayed && ns < best) best = ns;
    }
    assert_true(best < INT64_MAX); /* was replayed */
    return (double)best / REPEAT;
}

/* Prints; what fails is a recording that is never replayed. */
static void time_rows(struct kern *k, int n_rows, int cols, int ffn) {
    static const char *const names[] = {"norm_pack", "pack", "gate_pack", "rope_kv"};
    struct timed t = {.rows = {n_rows <= 64 ? n_rows : 0, n_rows <= 64 ? 0 : n_rows},
                      .n_heads = 32};
    size_t n = (size_t)n_rows;
    t.in = dev_put(k, NULL, n * 2 * (size_t)ffn * 4);
    t.delta = dev_put(k, NULL, n * (size_t)cols * 4);
    t.weight = dev_put(k, NULL, (size_t)cols * 4);
    t.act = act_of(k, n_rows, ffn, true);
    int32_t *position = calloc(n, 4), *slot = calloc(n, 4), *seq = calloc(n, 4);
    int *source = calloc(n, sizeof *source);
    assert_true(position && slot && seq && source);
    for (int r = 0; r < n_rows; r++) position[r] = r, slot[r] = r / 64;
    rope_setup(&t.rope, k, &rope_cases[0], t.rows, position, seq, slot, source, n_rows / 64 + 1,
               KERN_F16);
    const double per_row[] = {14.0 * cols, 6.0 * cols, 10.0 * ffn,
                              4.0 * (48 + 40) * 128 + 2.0 * 16 * 128};
    for (int op = 0; op < 4; op++) {
        t.cols = op == 2 ? ffn : cols;
        double ns = time_op(k, &t, op, (uint64_t)n_rows);
        printf("%-10s %5d rows of %5d: %8.2f us, %5.0f GB/s\n", names[op], n_rows,
               op == 3 ? 6144 : t.cols, ns / 1e3, per_row[op] * n_rows / ns);
    }
    k->ops->unreserve(k, t.in), k->ops->unreserve(k, t.delta), k->ops->unreserve(k, t.weight);
    k->ops->unreserve(k, t.act.data);
    rope_free(&t.rope, k);
    free(position), free(slot), free(seq), free(source);
}

static void test_cuda_rowwise_time(void) {
    struct kern *k = cuda_or_skip();
    static const int rows[] = {1, 5, 64, 512, 4096};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) time_rows(k, rows[i], 4096, 14336);
    k->ops->close(k);
}

const struct test tests[] = {
    {"cuda_rowwise_norm", TEST_GPU, 120000, test_cuda_rowwise_norm},
    {"cuda_rowwise_pack", TEST_GPU, 120000, test_cuda_rowwise_pack},
    {"cuda_rowwise_edges", TEST_GPU, 60000, test_cuda_rowwise_edges},
    {"cuda_rowwise_gather", TEST_GPU, 60000, test_cuda_rowwise_gather},
    {"cuda_rowwise_copy_page", TEST_GPU, 60000, test_cuda_rowwise_copy_page},
    {"cuda_rope_kv", TEST_GPU, 120000, test_cuda_rope_kv},
    {"cuda_rope_unsupported", TEST_GPU, 60000, test_cuda_rope_unsupported},
    {"cuda_rowwise_places", TEST_GPU, 120000, test_cuda_rowwise_places},
    {"cuda_rope_places", TEST_GPU, 120000, test_cuda_rope_places},
    {"cuda_rowwise_time", TEST_GPU, 120000, test_cuda_rowwise_time},
    {0},
};
