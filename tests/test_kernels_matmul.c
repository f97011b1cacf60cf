/* Goal: products are right, follow their law to the bit, and a row's bits depend on nothing but the
 * row. Method: every dtype over shapes that are odd in every direction, on every instruction set
 * that this machine has: (1) the reference table equals a naive double loop over dequantised
 * weights; (2) the fast tables are within the bound of 8-bit activations of it; (3) they equal a
 * model of the law (kernels/cpu/formats.h) that is written here from kern_dequantize alone; (4)
 * rows are compared byte for byte over row counts, places, classes and threads. Dequantisation is
 * held against goldens of the Python package gguf. */
#include "tests/harness.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/half.h"
#include "base/rng.h"
#include "kernels/kernels.h"

/* ---- Material ------------------------------------------------------------------------------ */

static uint32_t draw(uint64_t seed, size_t i) {
    return rng_u32(seed, i / 4, RNG_TEST, i % 4);
}

/* In (-1, 1). */
static float draw_signed(uint64_t seed, size_t i) {
    return (float)(int32_t)draw(seed, i) * 0x1p-31f;
}

/* f16 scales of a block: their byte offsets, -1 for none. */
static void scale_offsets(enum kern_dtype t, int at[2]) {
    at[0] = t == KERN_Q6_K ? 208 : kern_dtype_block(t) > 1 ? 0 : -1;
    at[1] = t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K ? 2 : -1;
}

static void put_f16(uint8_t *p, float v) {
    uint16_t h = f32_to_f16(v);
    p[0] = (uint8_t)h;
    p[1] = (uint8_t)(h >> 8);
}

/* A random matrix in file layout; every bit pattern of the packed values occurs. */
static uint8_t *make_weights(enum kern_dtype t, int rows, int cols, uint64_t seed) {
    size_t n = kern_dtype_bytes(t, (size_t)rows * (size_t)cols), size = kern_dtype_block_bytes(t);
    uint8_t *p = malloc(n);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)draw(seed, i);
    for (size_t b = 0; b < n / size; b++) {
        uint8_t *block = p + b * size;
        float v = draw_signed(seed + 1, b);
        uint32_t bits = half_f32_bits(v);
        int at[2];
        if (t == KERN_F32) memcpy(block, &v, 4);
        else if (t == KERN_F16) put_f16(block, v);
        else if (t == KERN_BF16) block[0] = (uint8_t)(bits >> 16), block[1] = (uint8_t)(bits >> 24);
        scale_offsets(t, at);
        for (int s = 0; s < 2; s++)
            if (at[s] >= 0)
                put_f16(block + at[s], 0.01f * draw_signed(seed + 2, 2 * b + (size_t)s));
    }
    return p;
}

static float *make_rows(int n, int cols, uint64_t seed) {
    float *x = malloc((size_t)n * (size_t)cols * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < (size_t)n * (size_t)cols; i++) {
        x[i] = draw_signed(seed, i) * (i % 37 == 5 ? 20.f : 1.f); /* outliers, as real ones have */
        if (i % 11 == 3) x[i] = 0;
    }
    return x;
}

/* ---- A backend with one matrix -------------------------------------------------------------- */

struct rig {
    struct kern *k;
    struct kern_weight w;
    void *memory, *act;
};

/* 0 where this machine or build has not got `isa`. */
static int rig_open(struct rig *g, const char *isa, int n_threads) {
    struct err e = {0};
    struct kern_options o = {.n_threads = n_threads, .isa = isa};
    if (!strcmp(isa, "reference"))
        o = (struct kern_options){.n_threads = n_threads, .precision = KERN_REFERENCE};
    *g = (struct rig){0};
    int rc = kern_cpu_open(&g->k, &o, &e);
    if (rc == E_UNSUPPORTED) return 0;
    assert_ok(rc, e);
    return 1;
}

static void rig_weight(struct rig *g, enum kern_dtype t, int rows, int cols, const void *src) {
    struct err e = {0};
    size_t bytes = g->k->ops->weight_bytes(g->k, t, rows, cols);
    assert_true(bytes > 0);
    if (g->memory) g->k->ops->unreserve(g->k, g->memory);
    assert_ok(g->k->ops->reserve(g->k, bytes, &g->memory, &e), e);
    assert_ok(g->k->ops->weight_pack(g->k, &g->w, g->memory, t, rows, cols, src, &e), e);
    assert_int_equal(g->w.bytes, bytes);
}

/* out[n_gen + n_prompt][rows] = x W^T. The act buffer is exactly as large as act_bytes says and
 * starts as garbage; so does out, with a guard before and behind each row. */
static void rig_matmul(struct rig *g, struct kern_rows rows, const float *x, float *out) {
    int n = rows.n_gen + rows.n_prompt, stride = g->w.rows + 5;
    size_t bytes = g->k->ops->act_bytes(g->k, rows, g->w.cols);
    void *act = aligned_alloc(64, (bytes + 63) / 64 * 64);
    float *wide = malloc((size_t)n * (size_t)stride * sizeof *wide);
    assert_non_null(act);
    assert_non_null(wide);
    memset(act, 0x7f, bytes);
    for (int i = 0; i < n * stride; i++) wide[i] = 12345.f;
    struct kern_act a = {.data = act, .bytes = bytes};
    assert_int_equal(g->k->ops->pack(g->k, rows, g->w.cols, x, a), 0);
    assert_int_equal(g->k->ops->matmul(g->k, rows, &g->w, a, wide, stride, 3), 0);
    for (int r = 0; r < n; r++) {
        float *row = wide + (size_t)r * (size_t)stride;
        memcpy(out + (size_t)r * (size_t)g->w.rows, row + 3, (size_t)g->w.rows * sizeof *out);
        for (int i = 0; i < 5; i++)
            if (row[i < 3 ? i : g->w.rows + i] != 12345.f) fail_msg("row %d wrote outside", r);
    }
    free(wide);
    free(act);
}

static void rig_close(struct rig *g) {
    if (g->memory) g->k->ops->unreserve(g->k, g->memory);
    g->k->ops->close(g->k);
}

static const char *const fast_isas[] = {"plain", "avx2", "avxvnni", "avx512", "amx"};
enum { N_FAST = 5 };

/* Shapes: rows off the panel of 8 and 16, every kind of tail in cols. */
struct shape {
    int rows, cols;
};
static int shapes_of(enum kern_dtype t, struct shape out[8]) {
    static const struct shape floats[] = {{1, 1}, {7, 3}, {17, 31}, {9, 64}, {33, 97}, {50, 320}};
    static const struct shape blocks[] = {{1, 32}, {7, 96}, {17, 160}, {33, 64}, {50, 576}};
    static const struct shape supers[] = {{1, 256}, {7, 768}, {33, 512}, {50, 256}};
    const struct shape *from = kern_dtype_block(t) == 1    ? floats
                               : kern_dtype_block(t) == 32 ? blocks
                                                           : supers;
    int n = kern_dtype_block(t) == 1 ? 6 : kern_dtype_block(t) == 32 ? 5 : 4;
    memcpy(out, from, (size_t)n * sizeof *out);
    return n;
}

/* ---- Dequantisation ------------------------------------------------------------------------- */

static void test_matmul_dequantize_goldens(void) {
    FILE *f = fopen(test_golden("dequant.bin"), "rb");
    assert_non_null(f);
    uint32_t head[2], n_name;
    int n_types = 0;
    while (fread(&n_name, 4, 1, f) == 1) {
        char name[16] = "";
        assert_in_range(n_name, 1, 15);
        assert_int_equal(fread(name, 1, n_name, f), n_name);
        assert_int_equal(fread(head, 4, 2, f), 2);
        uint8_t raw[1024];
        float want[1024], got[1024];
        assert_in_range(head[0], 1, sizeof raw);
        assert_in_range(head[1], 1, 1024);
        assert_int_equal(fread(raw, 1, head[0], f), head[0]);
        assert_int_equal(fread(want, 4, head[1], f), head[1]);
        int t = 0;
        while (t < KERN_N_DTYPES && strcmp(kern_dtype_name((enum kern_dtype)t), name)) t++;
        assert_int_not_equal(t, KERN_N_DTYPES);
        assert_int_equal(kern_dtype_bytes((enum kern_dtype)t, head[1]), head[0]);
        kern_dequantize((enum kern_dtype)t, raw, got, head[1]);
        for (uint32_t i = 0; i < head[1]; i++)
            if (got[i] != want[i]) fail_msg("%s[%u]: %a, golden %a", name, i, got[i], want[i]);
        n_types++;
    }
    fclose(f);
    assert_int_equal(n_types, KERN_N_DTYPES);
}

/* A row taken out of the packed matrix is the file's row, on every table. */
static void test_matmul_embed_is_exact(void) {
    for (int s = -1; s < N_FAST; s++)
        for (int t = 0; t < KERN_N_DTYPES; t++) {
            struct rig g;
            struct shape shapes[8];
            if (!rig_open(&g, s < 0 ? "reference" : fast_isas[s], 2)) continue;
            int n = shapes_of((enum kern_dtype)t, shapes);
            for (int i = 0; i < n; i++) {
                int rows = shapes[i].rows, cols = shapes[i].cols;
                uint8_t *src = make_weights((enum kern_dtype)t, rows, cols, 40);
                float *want = malloc((size_t)rows * (size_t)cols * sizeof *want);
                float *got = malloc((size_t)(rows + 2) * (size_t)cols * sizeof *got);
                int32_t *token = malloc((size_t)(rows + 2) * sizeof *token);
                kern_dequantize((enum kern_dtype)t, src, want, (size_t)rows * (size_t)cols);
                rig_weight(&g, (enum kern_dtype)t, rows, cols, src);
                for (int r = 0; r < rows; r++) token[r] = rows - 1 - r;
                token[rows] = -1; /* outside: zeros */
                token[rows + 1] = rows;
                memset(got, 0x7f, (size_t)(rows + 2) * (size_t)cols * sizeof *got);
                assert_int_equal(g.k->ops->embed(g.k, &g.w, token, rows + 2, got), 0);
                for (int r = 0; r < rows + 2; r++)
                    for (int c = 0; c < cols; c++) {
                        float v = r < rows ? want[(size_t)token[r] * (size_t)cols + (size_t)c] : 0;
                        if (got[r * cols + c] != v)
                            fail_msg("%s row %d col %d: %a, file %a",
                                     kern_dtype_name((enum kern_dtype)t), r, c, got[r * cols + c],
                                     v);
                    }
                free(src);
                free(want);
                free(got);
                free(token);
            }
            rig_close(&g);
        }
}

/* ---- Against naive sums and the law ---------------------------------------------------------- */

struct expected {
    double sum, magnitude; /* sum w x, sum |w x| */
    double int8_bound;     /* sum |w| da / 2: the most that 8-bit activations can change */
    float law;             /* the law's result */
};

/* The stored integers, scales and minimum of one block of 32, from kern_dequantize alone: a copy of
 * the file's block with d = 1, minimum 0 gives sc * (u - offset); with values of 1 it gives sc; d =
 * 0, dmin = 1 gives -mn. */
struct law_block {
    int value[32];
    float dw[2], mw;
};
static void law_block(enum kern_dtype t, const uint8_t *block, int sub, struct law_block *out) {
    uint8_t copy[256];
    float v[256], sc[256], mn[256];
    int at[2];
    size_t size = kern_dtype_block_bytes(t), n = (size_t)kern_dtype_block(t);
    scale_offsets(t, at);
    memcpy(copy, block, size);
    put_f16(copy + at[0], 1);
    if (at[1] >= 0) put_f16(copy + at[1], 0);
    kern_dequantize(t, copy, v, n);
    float d = f16_to_f32((uint16_t)(block[at[0]] | block[at[0] + 1] << 8));
    float m = at[1] < 0 ? 0 : f16_to_f32((uint16_t)(block[at[1]] | block[at[1] + 1] << 8));
    for (size_t i = 0; i < n; i++) sc[i] = mn[i] = 1;
    if (t == KERN_Q6_K) { /* 33 - 32 */
        memset(copy, 0x11, 128);
        memset(copy + 128, 0xaa, 64);
        kern_dequantize(t, copy, sc, n);
    } else if (n == 256) {
        size_t high = t == KERN_Q5_K ? 32 : 0;
        memset(copy + 16, 0, high);
        memset(copy + 16 + high, 0x11, 128);
        kern_dequantize(t, copy, sc, n);
        put_f16(copy + at[0], 0);
        put_f16(copy + at[1], 1);
        kern_dequantize(t, copy, mn, n);
    }
    for (int k = 0; k < 32; k++) {
        float s = sc[sub * 32 + k];
        out->value[k] = s == 0 ? 0 : (int)(v[sub * 32 + k] / s);
    }
    out->dw[0] = d * sc[sub * 32];
    out->dw[1] = d * sc[sub * 32 + 16];
    out->mw = m * mn[sub * 32]; /* mn is negative for K types */
}

static void law_activations(const float *x, int n, int q[32], float *da, int half[2]) {
    float amax = 0;
    half[0] = half[1] = 0;
    for (int k = 0; k < n; k++) amax = fmaxf(amax, fabsf(x[k]));
    *da = amax / 127.f;
    float id = amax > 0 ? 127.f / amax : 0.f;
    for (int k = 0; k < 32; k++) {
        q[k] = k < n ? (int)nearbyintf(x[k] * id) : 0;
        half[k / 16] += q[k];
    }
}

static struct expected expect(enum kern_dtype t, const uint8_t *row, int cols, const float *x) {
    struct expected e = {0};
    float *w = malloc((size_t)cols * sizeof *w), two[2] = {0}, acc = 0;
    kern_dequantize(t, row, w, (size_t)cols);
    for (int k = 0; k < cols; k++) {
        e.sum += (double)w[k] * (double)x[k];
        e.magnitude += fabs((double)w[k] * (double)x[k]);
        two[k & 1] = fmaf(w[k], x[k], two[k & 1]);
    }
    e.law = two[0] + two[1];
    if (kern_dtype_block(t) > 1) {
        int per = kern_dtype_block(t) / 32, q[32], half[2];
        float da;
        for (int b = 0; b < cols / 32; b++) {
            struct law_block lb;
            law_block(t, row + (size_t)(b / per) * kern_dtype_block_bytes(t), b % per, &lb);
            law_activations(x + b * 32, 32, q, &da, half);
            int dot[2] = {0};
            for (int k = 0; k < 32; k++) {
                dot[k / 16] += lb.value[k] * q[k];
                e.int8_bound += fabs((double)w[b * 32 + k]) * (double)da / 2;
            }
            if (t == KERN_Q6_K) {
                acc = fmaf((float)dot[0] * lb.dw[0], da, acc);
                acc = fmaf((float)dot[1] * lb.dw[1], da, acc);
            } else acc = fmaf((float)(dot[0] + dot[1]) * lb.dw[0], da, acc);
            if (lb.mw != 0) acc = fmaf(lb.mw, da * (float)(half[0] + half[1]), acc);
        }
        e.law = acc;
    }
    free(w);
    return e;
}

/* The law binds generated rows of every table, and prompt rows but where AMX multiplies bf16 by
 * bf16 (two roundings of 2^-8 each a product). Sums of f32 lose at most (terms + 2) * 2^-24 of the
 * magnitude. */
static void check_product(const char *isa, enum kern_dtype t, int rows, int cols) {
    enum { N = 7 };
    struct rig g;
    if (!rig_open(&g, isa, 2)) return;
    uint8_t *src = make_weights(t, rows, cols, (uint64_t)(rows * 1000 + cols));
    float *x = make_rows(N, cols, 7), *out = malloc((size_t)(N * rows) * sizeof *out);
    rig_weight(&g, t, rows, cols, src);
    rig_matmul(&g, (struct kern_rows){.n_gen = 3, .n_prompt = 4}, x, out);
    size_t row_bytes = kern_dtype_bytes(t, (size_t)cols);
    bool reference = !strcmp(isa, "reference");
    for (int r = 0; r < N; r++)
        for (int i = 0; i < rows; i++) {
            struct expected e =
                expect(t, src + (size_t)i * row_bytes, cols, x + (size_t)r * (size_t)cols);
            float got = out[r * rows + i];
            bool amx_prompt = r >= 3 && !strcmp(isa, "amx");
            if (reference && got != (float)e.sum)
                fail_msg("reference %s %dx%d row %d out %d: %a, naive %a", kern_dtype_name(t), rows,
                         cols, r, i, got, (float)e.sum);
            if (!reference && !amx_prompt && got != e.law)
                fail_msg("%s %s %dx%d row %d out %d: %a, law %a", isa, kern_dtype_name(t), rows,
                         cols, r, i, got, e.law);
            double bound = e.int8_bound + e.magnitude * (double)(cols + 2) * 0x1p-24;
            if (amx_prompt) bound = e.magnitude * (0x1p-7 + 0x1p-16 + (double)(cols + 2) * 0x1p-24);
            if (!(fabs((double)got - e.sum) <= bound + 1e-12))
                fail_msg("%s %s %dx%d row %d out %d: %g, exact %g, bound %g", isa,
                         kern_dtype_name(t), rows, cols, r, i, got, e.sum, bound);
        }
    free(src);
    free(x);
    free(out);
    rig_close(&g);
}

static void check_products(const char *isa) {
    for (int t = 0; t < KERN_N_DTYPES; t++) {
        struct shape shapes[8];
        int n = shapes_of((enum kern_dtype)t, shapes);
        for (int i = 0; i < n; i++)
            check_product(isa, (enum kern_dtype)t, shapes[i].rows, shapes[i].cols);
    }
}

static void test_matmul_reference_is_naive_double(void) {
    check_products("reference");
}
static void test_matmul_plain_follows_law(void) {
    check_products("plain");
}
static void test_matmul_avx2_follows_law(void) {
    check_products("avx2");
}
static void test_matmul_avxvnni_follows_law(void) {
    check_products("avxvnni");
}
static void test_matmul_avx512_follows_law(void) {
    check_products("avx512");
}
static void test_matmul_amx_within_bound(void) {
    check_products("amx");
}

/* The largest integers that each format allows: weights and activations at their extremes, both
 * signs. Sums of int16 pairs must not saturate. */
static void test_matmul_extremes_do_not_saturate(void) {
    for (int s = 0; s < N_FAST; s++)
        for (int t = KERN_Q8_0; t < KERN_N_DTYPES; t++)
            for (int fill = 0; fill < 4; fill++) {
                enum { ROWS = 9, COLS = 256 };
                struct rig g;
                if (!rig_open(&g, fast_isas[s], 1)) continue;
                uint8_t *src = make_weights((enum kern_dtype)t, ROWS, COLS, 3);
                size_t size = kern_dtype_block_bytes((enum kern_dtype)t);
                size_t n = kern_dtype_bytes((enum kern_dtype)t, ROWS * COLS);
                static const uint8_t bytes[] = {0xff, 0x00, 0x80, 0x7f};
                int at[2];
                scale_offsets((enum kern_dtype)t, at);
                for (size_t b = 0; b < n; b += size) {
                    memset(src + b, bytes[fill], size);
                    put_f16(src + b + at[0], 0.5f);
                    if (at[1] >= 0) put_f16(src + b + at[1], 0.25f);
                }
                rig_weight(&g, (enum kern_dtype)t, ROWS, COLS, src);
                float x[3 * COLS], out[3 * ROWS];
                for (int k = 0; k < COLS; k++) {
                    x[k] = 1.f;
                    x[COLS + k] = -1.f;
                    /* The scale is 1 and every value lies between two integers: ties to even. */
                    float tie = (float)(k * 5 % 120) + .5f;
                    x[2 * COLS + k] = k % 32 == 0 ? 127.f : k & 1 ? -tie : tie;
                }
                rig_matmul(&g, (struct kern_rows){.n_gen = 3}, x, out);
                for (int r = 0; r < 3; r++)
                    for (int i = 0; i < ROWS; i++) {
                        struct expected e = expect((enum kern_dtype)t, src, COLS, x + r * COLS);
                        if (out[r * ROWS + i] != e.law)
                            fail_msg("%s %s fill %02x: %g, law %g", fast_isas[s],
                                     kern_dtype_name((enum kern_dtype)t), bytes[fill],
                                     out[r * ROWS + i], e.law);
                    }
                free(src);
                rig_close(&g);
            }
}

/* ---- One row, one result -------------------------------------------------------------------- */

/* Rows 0..63 alone, then any number of them from any place, in either class, with rows of the other
 * class beside them, on 1, 2 and 3 threads. */
static void check_rows(const char *isa, enum kern_dtype t, int rows, int cols) {
    enum { N = 64 };
    static const int counts[] = {2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33, 63, 64};
    uint8_t *src = make_weights(t, rows, cols, 91);
    float *x = make_rows(N, cols, 17);
    size_t row = (size_t)rows * sizeof(float);
    float *alone[2] = {malloc(N * row), malloc(N * row)}, *out = malloc(N * row);
    for (int threads = 1; threads <= 3; threads++) {
        struct rig g;
        if (!rig_open(&g, isa, threads)) break;
        rig_weight(&g, t, rows, cols, src);
        for (int cls = 0; cls < 2 && threads == 1; cls++)
            for (int r = 0; r < N; r++)
                rig_matmul(&g,
                           cls ? (struct kern_rows){.n_prompt = 1} : (struct kern_rows){.n_gen = 1},
                           x + (size_t)r * (size_t)cols, alone[cls] + (size_t)r * (size_t)rows);
        for (size_t c = threads == 1 ? 0 : (size_t)threads; c < sizeof counts / sizeof *counts;
             c += threads == 1 ? 1 : 3)
            for (int split = 0; split < 3; split++) { /* all generated, all prompt, a mix */
                int n = counts[c], first = (int)draw(5, c) % (N - n + 1);
                if (first < 0) first = -first;
                int gen = split == 0 ? n : split == 1 ? 0 : n / 3;
                rig_matmul(&g, (struct kern_rows){gen, n - gen}, x + (size_t)first * (size_t)cols,
                           out);
                for (int r = 0; r < n; r++)
                    if (memcmp(out + (size_t)r * (size_t)rows,
                               alone[r >= gen] + (size_t)(first + r) * (size_t)rows, row))
                        fail_msg("%s %s: row %d of %d (%d generated, %d threads) differs from "
                                 "itself alone",
                                 isa, kern_dtype_name(t), r, n, gen, threads);
            }
        rig_close(&g);
    }
    free(src);
    free(x);
    free(out);
    free(alone[0]);
    free(alone[1]);
}

static void test_matmul_row_bits_depend_on_row_only(void) {
    for (int s = -1; s < N_FAST; s++)
        for (int t = 0; t < KERN_N_DTYPES; t++)
            check_rows(s < 0 ? "reference" : fast_isas[s], (enum kern_dtype)t, 41,
                       kern_dtype_block((enum kern_dtype)t) == 256 ? 256 : 96);
}

/* ---- Hostile numbers ------------------------------------------------------------------------ */

static void test_matmul_zero_nan_inf_denormal(void) {
    static const float bad[] = {0.f,     -0.f,     NAN,    INFINITY, -INFINITY,
                                FLT_MAX, -FLT_MAX, 1e-40f, FLT_MIN};
    enum { N = 9, ROWS = 19, COLS = 256 };
    for (int s = -1; s < N_FAST; s++)
        for (int t = 0; t < KERN_N_DTYPES; t++) {
            struct rig g;
            if (!rig_open(&g, s < 0 ? "reference" : fast_isas[s], 1)) continue;
            uint8_t *src = make_weights((enum kern_dtype)t, ROWS, COLS, 55);
            float *x = make_rows(2 * N, COLS, 5), *out = malloc(2 * N * ROWS * sizeof *out);
            rig_weight(&g, (enum kern_dtype)t, ROWS, COLS, src);
            for (int r = 0; r < N; r++) {
                for (int k = 0; k < COLS; k++) x[r * COLS + k] = r < 2 ? bad[r] : x[r * COLS + k];
                x[r * COLS + 40] = bad[r];
                memcpy(x + (N + r) * COLS, x + r * COLS, COLS * sizeof *x);
            }
            rig_matmul(&g, (struct kern_rows){N, N}, x, out);
            for (int r = 0; r < 2 * N; r++)
                for (int i = 0; i < ROWS; i++) {
                    float v = out[r * ROWS + i], b = bad[r % N];
                    /* A weight of zero times infinity is NaN as well, so a non-finite x never
                     * hides. */
                    if (!isfinite(b) && isfinite(v)) fail_msg("%g in, %g out", b, v);
                    if (b == 0 && v != 0) fail_msg("zeros in, %g out", v);
                    if (isfinite(b) && fabsf(b) < 1 && !isfinite(v))
                        fail_msg("%g in, %g out", b, v);
                }
            free(src);
            free(x);
            free(out);
            rig_close(&g);
        }
}

/* ---- Packing with the arithmetic before it --------------------------------------------------- */

/* One product of 5 generated and 4 prompt rows, packed by `how`: 0 norm_pack, 1 pack of its
 * `normed`, 2 gate_pack. x is [9][cols], gate_up [9][2 cols]. */
enum { PACK_N = 9, PACK_ROWS = 24, PACK_COLS = 96 };
static void packed_product(struct rig *g, int how, float *x, const float *delta,
                           const float *weight, const float *gate_up, float *normed, float *out) {
    struct kern_rows rows = {5, 4};
    const struct kern_ops *ops = g->k->ops;
    size_t bytes = ops->act_bytes(g->k, rows, PACK_COLS);
    struct kern_act act = {.data = aligned_alloc(64, (bytes + 63) / 64 * 64), .bytes = bytes};
    assert_non_null(act.data);
    if (how == 0) ops->norm_pack(g->k, rows, PACK_COLS, x, delta, weight, 1e-5f, act, normed);
    else if (how == 1) ops->pack(g->k, rows, PACK_COLS, normed, act);
    else ops->gate_pack(g->k, rows, PACK_COLS, gate_up, act);
    assert_int_equal(ops->matmul(g->k, rows, &g->w, act, out, PACK_ROWS, 0), 0);
    free(act.data);
}

/* x + delta in place, RMSNorm against doubles (16 partial sums of f32: 100 terms of 2^-24), the
 * packed form equal to packing what was returned, silu(gate) * up through an identity matrix, one
 * and three threads alike. */
static void test_matmul_norm_and_gate_pack(void) {
    float *delta = make_rows(PACK_N, PACK_COLS, 71), *weight = make_rows(1, PACK_COLS, 72);
    float *gate_up = make_rows(PACK_N, 2 * PACK_COLS, 73), *x0 = make_rows(PACK_N, PACK_COLS, 70);
    float eye[PACK_ROWS * PACK_COLS] = {0};
    for (int i = 0; i < PACK_ROWS; i++) eye[i * PACK_COLS + 4 * i] = 1;
    for (int s = -1; s < N_FAST; s++) {
        float x[PACK_N * PACK_COLS], normed[PACK_N * PACK_COLS];
        float out[3][PACK_N * PACK_ROWS], first[2][PACK_N * PACK_ROWS];
        for (int threads = 1; threads <= 3; threads += 2) {
            struct rig g;
            if (!rig_open(&g, s < 0 ? "reference" : fast_isas[s], threads)) break;
            rig_weight(&g, KERN_F32, PACK_ROWS, PACK_COLS, eye);
            memcpy(x, x0, sizeof x);
            packed_product(&g, 0, x, delta, weight, NULL, normed, out[0]);
            for (int r = 0; r < PACK_N; r++) {
                double sum = 0;
                for (int k = r * PACK_COLS; k < (r + 1) * PACK_COLS; k++) {
                    assert_true(x[k] == x0[k] + delta[k]);
                    sum += (double)x[k] * (double)x[k];
                }
                double scale = 1 / sqrt(sum / PACK_COLS + 1e-5);
                for (int k = 0; k < PACK_COLS; k++) {
                    double want = (double)x[r * PACK_COLS + k] * scale * (double)weight[k];
                    assert_near(normed[r * PACK_COLS + k], want, fabs(want) * 1e-5 + 1e-9);
                }
            }
            packed_product(&g, 1, NULL, NULL, NULL, NULL, normed, out[1]);
            assert_memory_equal(out[0], out[1], sizeof out[0]);
            packed_product(&g, 2, NULL, NULL, NULL, gate_up, NULL, out[2]);
            for (int r = 0; r < PACK_N; r++)
                for (int i = 0; i < PACK_ROWS; i++) {
                    const float *in = gate_up + r * 2 * PACK_COLS + 4 * i;
                    double gate = (double)in[0],
                           want = gate / (1 + exp(-gate)) * (double)in[PACK_COLS];
                    /* AMX has 8 bits for a product's operand. */
                    assert_near(out[2][r * PACK_ROWS + i], want, fabs(want) * 0x1p-8 + 1e-6);
                }
            if (threads == 1) memcpy(first[0], out[0], sizeof out[0]);
            if (threads == 1) memcpy(first[1], out[2], sizeof out[2]);
            assert_memory_equal(first[0], out[0], sizeof out[0]);
            assert_memory_equal(first[1], out[2], sizeof out[2]);
            rig_close(&g);
        }
    }
    free(delta);
    free(weight);
    free(gate_up);
    free(x0);
}

/* ---- The context ---------------------------------------------------------------------------- */

static void test_matmul_open_and_memory(void) {
    struct err e = {0};
    struct kern *k = NULL;
    struct kern_options o = {.n_threads = 2, .isa = "sse9"};
    assert_int_equal(kern_cpu_open(&k, &o, &e), E_INVALID);
    assert_non_null(strstr(e.message, "sse9"));
    assert_null(k);
    o.isa = NULL;
    o.n_threads = 100000;
    assert_int_equal(kern_cpu_open(&k, &o, &e), E_RANGE);
    o.n_threads = 2;
    assert_ok(kern_cpu_open(&k, &o, &e), e);
    struct kern_device_info info;
    k->ops->info(k, &info);
    assert_non_null(strstr(info.name, "CPU "));
    assert_non_null(strstr(info.name, "; 2 threads"));
    assert_true(info.memory_bytes >= info.free_bytes && info.free_bytes > 0);
    void *p;
    assert_ok(k->ops->reserve(k, 3000000, &p, &e), e);
    assert_int_equal((uintptr_t)p % 64, 0);
    for (int i = 0; i < 3000000; i++)
        if (((char *)p)[i]) fail_msg("reserve did not zero byte %d", i);
    memset(p, 1, 3000000);
    k->ops->unreserve(k, p);
    assert_int_equal(k->ops->reserve(k, SIZE_MAX - 5, &p, &e), E_NOMEM);
    assert_int_equal(k->ops->reserve(k, (size_t)1 << 60, &p, &e), E_NOMEM);
    assert_int_equal(k->ops->weight_bytes(k, KERN_Q4_1, 8, 33), 0);
    assert_int_equal(k->ops->weight_bytes(k, KERN_Q4_K, 8, 128), 0);
    assert_int_equal(k->ops->weight_bytes(k, KERN_F32, 0, 128), 0);
    struct kern_weight w;
    char some[64 * 4];
    assert_int_equal(k->ops->weight_pack(k, &w, (void *)(((uintptr_t)some + 63) & ~(uintptr_t)63),
                                         KERN_Q4_1, 1, 33, some, &e),
                     E_UNSUPPORTED);
    const float x[6] = {1, 2, 3, 4, 5, 6};
    const int32_t idx[3] = {2, 0, 2};
    float y[6];
    assert_int_equal(k->ops->gather(k, x, 2, idx, 3, y), 0);
    assert_true(y[0] == 5 && y[1] == 6 && y[2] == 1 && y[3] == 2 && y[4] == 5 && y[5] == 6);
    k->ops->close(k);
}

const struct test tests[] = {
    {"matmul_dequantize_goldens", TEST_QUICK, 10000, test_matmul_dequantize_goldens},
    {"matmul_embed_is_exact", TEST_QUICK, 20000, test_matmul_embed_is_exact},
    {"matmul_reference_is_naive_double", TEST_QUICK, 20000, test_matmul_reference_is_naive_double},
    {"matmul_plain_follows_law", TEST_QUICK, 20000, test_matmul_plain_follows_law},
    {"matmul_avx2_follows_law", TEST_QUICK, 20000, test_matmul_avx2_follows_law},
    {"matmul_avxvnni_follows_law", TEST_QUICK, 20000, test_matmul_avxvnni_follows_law},
    {"matmul_avx512_follows_law", TEST_QUICK, 20000, test_matmul_avx512_follows_law},
    {"matmul_amx_within_bound", TEST_QUICK, 20000, test_matmul_amx_within_bound},
    {"matmul_extremes_do_not_saturate", TEST_QUICK, 20000, test_matmul_extremes_do_not_saturate},
    {"matmul_row_bits_depend_on_row_only", TEST_QUICK, 120000,
     test_matmul_row_bits_depend_on_row_only},
    {"matmul_zero_nan_inf_denormal", TEST_QUICK, 20000, test_matmul_zero_nan_inf_denormal},
    {"matmul_norm_and_gate_pack", TEST_QUICK, 10000, test_matmul_norm_and_gate_pack},
    {"matmul_open_and_memory", TEST_QUICK, 10000, test_matmul_open_and_memory},
    {0},
};
