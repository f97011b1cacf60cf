/* Goal: weights of every type arrive on the device as the file has them, and generated rows times
 * quantised weights are right to f32's rounding, each row's bits a function of the row alone.
 * Method: (1) embed gives kern_dequantize's values; (2) prompt rows of a unit matrix bring every
 * weight back through cuda_weight_rows, rounded once to f16; (3) products of small integers, exact
 * in f32 in any order, must equal the double twin's, so that one wrong bit of one weight shows; (4)
 * random ones lie within the bound of f32 sums; (5) rows are compared byte for byte over counts,
 * places and neighbours. Sources are unaligned; outputs have guards. Shapes meet every cut of the
 * product: tiles left half empty, one warp, K among the warps of a block and among the blocks of a
 * cluster, activations in several pieces. */
#include "tests/cuda_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/half.h"

enum { FIRST_QUANT = KERN_Q8_0, MAX_N = 40 };

struct shape {
    int rows, cols;
};
enum { N_SHAPES = 8, N_SUPER = 6 };
static const struct shape simple_shapes[N_SHAPES] = {
    {1, 32}, {17, 96}, {33, 160}, {50, 576}, {40, 1536}, {100, 2592}, {9, 14336}, {20, 32768}};
static const struct shape super_shapes[N_SUPER] = {{1, 256},   {17, 768},   {33, 1280},
                                                   {50, 2560}, {20, 14336}, {18, 32768}};
static int n_shapes(enum kern_dtype t) {
    return kern_dtype_block(t) == 256 ? N_SUPER : N_SHAPES;
}
static struct shape shape_of(enum kern_dtype t, int i) {
    return kern_dtype_block(t) == 256 ? super_shapes[i] : simple_shapes[i];
}

static uint64_t mix(uint64_t v) {
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9u;
    v = (v ^ v >> 27) * 0x94d049bb133111ebu;
    return v ^ v >> 31;
}
static float signed_at(uint64_t seed, size_t i) {
    return (float)(int32_t)(uint32_t)mix(seed * 0x9e3779b97f4a7c15u + i) * 0x1p-31f;
}
static void *heap(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    assert_non_null(p);
    return p;
}

/* ---- Weights in file layout ----------------------------------------------------------------- */

static void put_f16(uint8_t *p, float v) {
    uint16_t h = f32_to_f16(v);
    p[0] = (uint8_t)h;
    p[1] = (uint8_t)(h >> 8);
}
/* Byte offsets of a block's f16 scale and minimum; -1: none. */
static int scale_at(enum kern_dtype t) {
    return t == KERN_Q6_K ? 208 : 0;
}
static int min_at(enum kern_dtype t) {
    return t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K ? 2 : -1;
}
static void set_scales(enum kern_dtype t, uint8_t *block, float d, float m) {
    put_f16(block + scale_at(t), d);
    if (min_at(t) >= 0) put_f16(block + min_at(t), m);
}

/* A random matrix; every pattern of the packed values occurs. `whole`: scales are 1, minima small
 * integers (1 for the K formats, whose own scales multiply it). */
static uint8_t *make_weights(enum kern_dtype t, struct shape s, uint64_t seed, int whole) {
    size_t n = kern_dtype_bytes(t, (size_t)s.rows * (size_t)s.cols),
           size = kern_dtype_block_bytes(t);
    uint8_t *raw = heap(n + 9), *p = raw;
    for (size_t i = 0; i < n + 1; i += 8) {
        uint64_t v = mix(seed + i);
        memcpy(p + i, &v, 8);
    }
    for (size_t b = 0; b < n / size; b++, p += size) {
        float d = signed_at(seed + 1, b), m = signed_at(seed + 2, b);
        if (t == KERN_F32) memcpy(p, &d, 4);
        else if (t == KERN_F16) put_f16(p, d);
        else if (t == KERN_BF16) memcpy(p, (uint8_t[2]){0x12, (uint8_t)(0x3c + b % 3)}, 2);
        else if (!whole) set_scales(t, p, 0.01f * d, 0.01f * m);
        else set_scales(t, p, 1, kern_dtype_block(t) == 256 ? 1 : floorf(8 * m));
    }
    return raw;
}

/* What the device should hold, f32: F32 files are rounded to f16. */
static float *values_of(enum kern_dtype t, struct shape s, const uint8_t *src) {
    size_t n = (size_t)s.rows * (size_t)s.cols;
    float *v = heap(n * sizeof *v);
    kern_dequantize(t, src, v, n);
    for (size_t i = 0; i < n && t == KERN_F32; i++) v[i] = f16_to_f32(f32_to_f16(v[i]));
    return v;
}

/* ---- A backend with one matrix --------------------------------------------------------------- */

struct rig {
    struct kern *k;
    struct kern_weight w;
    void *memory;
};

static void rig_weight(struct rig *g, enum kern_dtype t, struct shape s, const uint8_t *src) {
    struct err e = {0};
    size_t bytes = g->k->ops->weight_bytes(g->k, t, s.rows, s.cols);
    size_t n = kern_dtype_bytes(t, (size_t)s.rows * (size_t)s.cols);
    uint8_t *odd = heap(n + 1); /* no alignment is promised */
    if (bytes == 0) fail_msg("%s [%d][%d]: no product", kern_dtype_name(t), s.rows, s.cols);
    memcpy(odd + 1, src, n);
    if (g->memory) g->k->ops->unreserve(g->k, g->memory);
    g->memory = dev_put(g->k, NULL, bytes); /* every byte must be written */
    assert_ok(g->k->ops->weight_pack(g->k, &g->w, g->memory, t, s.rows, s.cols, odd + 1, &e), e);
    assert_int_equal(g->w.bytes, bytes);
    int kept_as = t == KERN_F32 && !strcmp(g->k->ops->backend, "cuda") ? KERN_F16 : t;
    assert_int_equal(g->w.dtype, kept_as);
    free(odd);
}
static void rig_close(struct rig *g) {
    if (g->memory) g->k->ops->unreserve(g->k, g->memory);
    g->k->ops->close(g->k);
}

static float *rig_embed(struct rig *g, const int32_t *token, int n) {
    size_t bytes = (size_t)n * (size_t)g->w.cols * sizeof(float);
    void *x = dev_put(g->k, NULL, bytes), *id = dev_put(g->k, token, (size_t)n * sizeof *token);
    assert_int_equal(g->k->ops->embed(g->k, &g->w, id, n, x), 0);
    float *got = dev_get(g->k, x, bytes);
    g->k->ops->unreserve(g->k, x);
    g->k->ops->unreserve(g->k, id);
    return got;
}

/* out[n_gen + n_prompt][rows] = x W^T, on either backend; guards around every row must stay. */
static float *rig_matmul(struct rig *g, struct kern_rows rows, const float *x) {
    int n = rows.n_gen + rows.n_prompt, stride = g->w.rows + 5;
    size_t out_bytes = (size_t)n * (size_t)stride * sizeof(float);
    struct kern_act act = {.bytes = g->k->ops->act_bytes(g->k, rows, g->w.cols),
                           .partner = g->w.dtype};
    void *dx = dev_put(g->k, x, (size_t)n * (size_t)g->w.cols * sizeof *x);
    void *dout = dev_put(g->k, NULL, out_bytes);
    act.data = dev_put(g->k, NULL, act.bytes);
    assert_int_equal(g->k->ops->pack(g->k, rows, g->w.cols, dx, act), 0);
    assert_int_equal(g->k->ops->matmul(g->k, rows, &g->w, act, dout, stride, 3), 0);
    float *wide = dev_get(g->k, dout, out_bytes);
    float *out = heap((size_t)n * (size_t)g->w.rows * sizeof *out);
    for (int r = 0; r < n; r++) {
        const float *row = wide + (size_t)r * (size_t)stride;
        memcpy(out + (size_t)r * (size_t)g->w.rows, row + 3, (size_t)g->w.rows * sizeof *out);
        for (int i = 0; i < 5; i++)
            if (half_f32_bits(row[i < 3 ? i : g->w.rows + i]) != 0xffffffff)
                fail_msg("%s [%d][%d], %d rows: row %d wrote outside of its outputs",
                         kern_dtype_name(g->w.dtype), g->w.rows, g->w.cols, n, r);
    }
    free(wide);
    g->k->ops->unreserve(g->k, dx);
    g->k->ops->unreserve(g->k, dout);
    g->k->ops->unreserve(g->k, act.data);
    return out;
}

/* ---- Packing and reading back ---------------------------------------------------------------- */

static void check_embed(struct rig *g, enum kern_dtype t, struct shape s, const uint8_t *src) {
    float *want = values_of(t, s, src);
    int n = s.rows + 3;
    int32_t *token = heap((size_t)n * sizeof *token);
    for (int r = 0; r < s.rows; r++) token[r] = s.rows - 1 - r;
    token[s.rows] = -1; /* outside: zeros */
    token[s.rows + 1] = s.rows;
    token[s.rows + 2] = INT32_MAX;
    rig_weight(g, t, s, src);
    float *got = rig_embed(g, token, n);
    for (int r = 0; r < n; r++)
        for (int c = 0; c < s.cols; c++) {
            size_t at = (size_t)(r < s.rows ? token[r] : 0) * (size_t)s.cols + (size_t)c;
            float v = got[(size_t)r * (size_t)s.cols + (size_t)c];
            if (v != (r < s.rows ? want[at] : 0))
                fail_msg("%s [%d][%d] row %d (token %d) column %d: %a, file %a", kern_dtype_name(t),
                         s.rows, s.cols, r, token[r], c, (double)v,
                         (double)(r < s.rows ? want[at] : 0));
        }
    free(want);
    free(token);
    free(got);
}

static void test_cuda_quant_embed_is_exact(void) {
    struct rig g = {.k = cuda_or_skip()};
    for (int t = 0; t < KERN_N_DTYPES; t++)
        for (int i = 0; i < n_shapes((enum kern_dtype)t); i++) {
            struct shape s = shape_of((enum kern_dtype)t, i);
            if (kern_dtype_block((enum kern_dtype)t) == 1 && i < 4) s.cols -= 3 + i;
            uint8_t *src = make_weights((enum kern_dtype)t, s, 10 + (uint64_t)i, 0);
            check_embed(&g, (enum kern_dtype)t, s, src);
            free(src);
        }
    rig_close(&g);
}

/* 4,096 rows of a matrix that needs several slices on its way. */
static void test_cuda_quant_many_slices(void) {
    static const struct {
        enum kern_dtype t;
        struct shape s;
    } big[] = {{KERN_Q8_0, {6005, 16384}}, {KERN_F32, {3001, 8200}}, {KERN_Q6_K, {4097, 28672}}};
    enum { N = 4096, SEEN = 61 };
    struct rig g = {.k = cuda_or_skip()};
    int32_t *token = heap(N * sizeof *token);
    for (int i = 0; i < 3; i++) {
        enum kern_dtype t = big[i].t;
        struct shape s = big[i].s, one = {1, s.cols};
        uint8_t *src = make_weights(t, s, 77, 0);
        size_t row = kern_dtype_bytes(t, (size_t)s.cols);
        for (int r = 0; r < N; r++) token[r] = (int32_t)(mix((uint64_t)r) % (unsigned)s.rows);
        token[N - 1] = s.rows - 1;
        rig_weight(&g, t, s, src);
        float *got = rig_embed(&g, token, N);
        for (int r = 0; r < N; r += r + SEEN < N || r == N - 1 ? SEEN : N - 1 - r) {
            float *want = values_of(t, one, src + (size_t)token[r] * row);
            for (int c = 0; c < s.cols; c++) {
                float v = got[(size_t)r * (size_t)s.cols + (size_t)c];
                if (v != want[c])
                    fail_msg("%s token %d column %d: %a, file %a", kern_dtype_name(t), token[r], c,
                             (double)v, (double)want[c]);
            }
            free(want);
        }
        free(src);
        free(got);
    }
    free(token);
    rig_close(&g);
}

/* A unit matrix as prompt rows: output (r, i) is W[i][r] as the prompt products see it, and the
 * products with the zeros around it add nothing. */
static void test_cuda_quant_prompt_rows_see_rounded_weights(void) {
    struct rig g = {.k = cuda_or_skip()};
    for (int t = FIRST_QUANT; t < KERN_N_DTYPES; t++)
        for (int i = 0; i < 4; i++) {
            struct shape s = shape_of((enum kern_dtype)t, i);
            uint8_t *src = make_weights((enum kern_dtype)t, s, 20 + (uint64_t)i, 0);
            float *want = values_of((enum kern_dtype)t, s, src);
            float *x = heap((size_t)s.cols * (size_t)s.cols * sizeof *x);
            for (int r = 0; r < s.cols; r++) x[(size_t)r * (size_t)s.cols + (size_t)r] = 1;
            rig_weight(&g, (enum kern_dtype)t, s, src);
            float *got = rig_matmul(&g, (struct kern_rows){0, s.cols}, x);
            for (int r = 0; r < s.cols; r++)
                for (int c = 0; c < s.rows; c++) {
                    float w = want[(size_t)c * (size_t)s.cols + (size_t)r];
                    float v = got[(size_t)r * (size_t)s.rows + (size_t)c];
                    if (v != f16_to_f32(f32_to_f16(w)))
                        fail_msg("%s [%d][%d] weight (%d, %d): %a, file %a",
                                 kern_dtype_name((enum kern_dtype)t), s.rows, s.cols, c, r,
                                 (double)v, (double)w);
                }
            free(src);
            free(want);
            free(x);
            free(got);
        }
    rig_close(&g);
}

static void test_cuda_quant_what_cannot_be_is_refused(void) {
    static const float bad[] = {65505.f, -1e30f, INFINITY, -INFINITY, NAN};
    enum { ROWS = 37, COLS = 70, AT = 31 * COLS + 69 };
    struct rig g = {.k = cuda_or_skip()};
    struct err e = {0};
    struct kern_weight w;
    float *v = test_floats(3, (size_t)ROWS * COLS, 1);
    void *dst = dev_put(g.k, NULL, g.k->ops->weight_bytes(g.k, KERN_F32, ROWS, COLS));
    for (int i = 0; i < 5; i++) {
        e = (struct err){0};
        v[AT] = bad[i];
        v[AT + 5] = INFINITY; /* a later one: the first is named */
        int rc = g.k->ops->weight_pack(g.k, &w, dst, KERN_F32, ROWS, COLS, v, &e);
        assert_int_equal(rc, E_UNSUPPORTED);
        if (!strstr(e.message, "row 31, column 69"))
            fail_msg("the place is not told: %s", e.message);
    }
    v[AT] = 65504.f;
    v[AT + 5] = -65504.f;
    assert_ok(g.k->ops->weight_pack(g.k, &w, dst, KERN_F32, ROWS, COLS, v, &e), e);
    assert_int_equal(w.dtype, KERN_F16);
    for (int t = 0; t < KERN_N_DTYPES; t++) {
        int block = kern_dtype_block((enum kern_dtype)t);
        if (block > 1)
            assert_int_equal(g.k->ops->weight_bytes(g.k, (enum kern_dtype)t, 16, block + block / 2),
                             0);
        assert_int_equal(g.k->ops->weight_bytes(g.k, (enum kern_dtype)t, 0, block), 0);
        assert_int_equal(g.k->ops->weight_bytes(g.k, (enum kern_dtype)t, 16, INT32_MAX), 0);
    }
    g.k->ops->unreserve(g.k, dst);
    free(v);
    rig_close(&g);
}

/* ---- Products -------------------------------------------------------------------------------- */

/* Activations that f16 holds: small integers, or anything with outliers and zeros. */
static float *make_rows(int n, int cols, uint64_t seed, int whole) {
    float *x = heap((size_t)n * (size_t)cols * sizeof *x);
    for (size_t i = 0; i < (size_t)n * (size_t)cols; i++) {
        float v = signed_at(seed, i) * (i % 37 == 5 ? 20.f : 1.f);
        x[i] = i % 11 == 3 ? 0 : f16_to_f32(f32_to_f16(v));
        if (whole) x[i] = floorf(7 * (0.5f + 0.5f * signed_at(seed, i))) - 3;
    }
    return x;
}

/* sum |dw (q - offset) x| + |mw x| of each output: what f32's rounding is relative to. */
static float *magnitudes(enum kern_dtype t, struct shape s, const uint8_t *src, const float *x,
                         int n) {
    size_t size = kern_dtype_block_bytes(t), block = (size_t)kern_dtype_block(t);
    float *sum = heap((size_t)n * (size_t)s.rows * sizeof *sum), part[2][256];
    uint8_t copy[256];
    for (int i = 0; i < s.rows; i++)
        for (size_t b = 0; b < (size_t)s.cols / block; b++) {
            const uint8_t *from = src + ((size_t)i * (size_t)s.cols / block + b) * size;
            for (int p = 0; p < 2; p++) {
                memcpy(copy, from, size);
                if (p == 1) memset(copy + scale_at(t), 0, 2);
                else if (min_at(t) >= 0) memset(copy + min_at(t), 0, 2);
                kern_dequantize(t, copy, part[p], block);
            }
            for (int r = 0; r < n; r++) {
                const float *v = x + (size_t)r * (size_t)s.cols + b * block;
                float *to = &sum[(size_t)r * (size_t)s.rows + (size_t)i];
                for (size_t k = 0; k < block; k++)
                    *to += (fabsf(part[0][k]) + fabsf(part[1][k])) * fabsf(v[k]);
            }
        }
    return sum;
}

/* Generated rows against the double twin. whole: to the bit. Otherwise within 1.2e-5 of the
 * magnitude: tensor cores add the exact products of 16 columns after cutting each at 2^-24 or less
 * of the largest, 17 cuts of one sign at worst, and stored values carry their format's offset,
 * which makes them some three times as large as the weights (3 * 17 * 2^-24 = 3e-6), more in a
 * block whose outliers meet weights near zero: 4.8e-6 was seen in a matrix of one block. Scaling
 * and adding blocks rounds to f32 (2^-24), with errors of either sign. Returns the largest error
 * over the magnitude. */
static double check_product(struct rig *cuda, struct rig *cpu, enum kern_dtype t, struct shape s,
                            int n, int whole) {
    uint8_t *src = make_weights(t, s, 30 + (uint64_t)n, whole);
    float *x = make_rows(n, s.cols, 40 + (uint64_t)n, whole);
    rig_weight(cuda, t, s, src);
    rig_weight(cpu, t, s, src);
    float *got = rig_matmul(cuda, (struct kern_rows){n, 0}, x);
    float *want = rig_matmul(cpu, (struct kern_rows){n, 0}, x);
    float *size = magnitudes(t, s, src, x, n);
    double worst = 0;
    for (int i = 0; i < n * s.rows; i++) {
        double off = fabs((double)got[i] - (double)want[i]) / ((double)size[i] + 1e-30);
        if (off > worst) worst = off;
        if (whole ? got[i] != want[i] : !(off <= 1.2e-5))
            fail_msg("%s [%d][%d] row %d of %d, output %d: %.9g, want %.9g (off by %.3g of the "
                     "magnitude %g)",
                     kern_dtype_name(t), s.rows, s.cols, i / s.rows, n, i % s.rows, (double)got[i],
                     (double)want[i], off, (double)size[i]);
    }
    free(src);
    free(x);
    free(got);
    free(want);
    free(size);
    return worst;
}

static void products(int whole) {
    static const int counts[] = {1, 2, 3, 5, 8, 9, 16, 17, MAX_N};
    struct rig cuda = {.k = cuda_or_skip()}, cpu = {.k = cpu_twin()};
    for (int t = FIRST_QUANT; t < KERN_N_DTYPES; t++) {
        double worst = 0;
        for (int i = 0; i < n_shapes((enum kern_dtype)t); i++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                struct shape s = shape_of((enum kern_dtype)t, i);
                double off = check_product(&cuda, &cpu, (enum kern_dtype)t, s, counts[c], whole);
                worst = off > worst ? off : worst;
            }
        printf("%s: off by at most %.3g of the magnitude\n", kern_dtype_name((enum kern_dtype)t),
               worst);
    }
    rig_close(&cuda);
    rig_close(&cpu);
}
static void test_cuda_quant_integers_are_exact(void) {
    products(1);
}
static void test_cuda_quant_products_are_near(void) {
    products(0);
}

/* More strips than the chip has room for at once; K cut in every way that the cut of a wide matrix
 * knows. */
static void test_cuda_quant_large(void) {
    static const struct shape big[] = {
        {2050, 4096}, {8200, 2304}, {24010, 512}, {4096, 5120}, {43001, 256}};
    struct rig cuda = {.k = cuda_or_skip()}, cpu = {.k = cpu_twin()};
    for (int i = 0; i < 5; i++) {
        check_product(&cuda, &cpu, KERN_Q8_0, big[i], 3, 1);
        check_product(&cuda, &cpu, KERN_Q4_K, big[i], 2, 1);
        check_product(&cuda, &cpu, KERN_Q6_K, big[i], 1, 1);
        check_product(&cuda, &cpu, KERN_Q4_1, big[i], 11, 0);
    }
    rig_close(&cuda);
    rig_close(&cpu);
}

/* ---- One row, one result --------------------------------------------------------------------- */

static void same_bits(struct rig *g, const float *all, const float *x, int first, int n) {
    size_t cols = (size_t)g->w.cols, rows = (size_t)g->w.rows;
    float *got = rig_matmul(g, (struct kern_rows){n, 0}, x + (size_t)first * cols);
    for (int r = 0; r < n; r++)
        if (memcmp(got + (size_t)r * rows, all + (size_t)(first + r) * rows, rows * sizeof *got))
            fail_msg("%s [%d][%d]: row %d changed its bits as number %d of %d",
                     kern_dtype_name(g->w.dtype), g->w.rows, g->w.cols, first + r, r, n);
    free(got);
}

static void test_cuda_quant_one_row_one_result(void) {
    struct rig g = {.k = cuda_or_skip()};
    for (int t = FIRST_QUANT; t < KERN_N_DTYPES; t++)
        for (int i = 1; i < n_shapes((enum kern_dtype)t); i += 2) {
            struct shape s = shape_of((enum kern_dtype)t, i);
            uint8_t *src = make_weights((enum kern_dtype)t, s, 50, 0);
            float *x = make_rows(MAX_N, s.cols, 60, 0);
            rig_weight(&g, (enum kern_dtype)t, s, src);
            float *all = rig_matmul(&g, (struct kern_rows){MAX_N, 0}, x);
            for (int n = 1; n < MAX_N; n += n < 18 ? 1 : 7) {
                same_bits(&g, all, x, 0, n);
                same_bits(&g, all, x, MAX_N - n, n);
            }
            for (int c = 0; c < s.cols; c++) /* neighbours that are not numbers */
                x[c] = x[(size_t)(MAX_N - 1) * (size_t)s.cols + (size_t)c] = NAN;
            float *got = rig_matmul(&g, (struct kern_rows){MAX_N, 0}, x);
            if (memcmp(got + s.rows, all + s.rows,
                       (size_t)(MAX_N - 2) * (size_t)s.rows * sizeof *got))
                fail_msg("%s: a row of NaN changed its neighbours",
                         kern_dtype_name((enum kern_dtype)t));
            free(src);
            free(x);
            free(all);
            free(got);
        }
    rig_close(&g);
}

const struct test tests[] = {
    {"cuda_quant_embed_is_exact", TEST_GPU, 60000, test_cuda_quant_embed_is_exact},
    {"cuda_quant_many_slices", TEST_GPU, 60000, test_cuda_quant_many_slices},
    {"cuda_quant_prompt_rows_see_rounded_weights", TEST_GPU, 60000,
     test_cuda_quant_prompt_rows_see_rounded_weights},
    {"cuda_quant_what_cannot_be_is_refused", TEST_GPU, 60000,
     test_cuda_quant_what_cannot_be_is_refused},
    {"cuda_quant_integers_are_exact", TEST_GPU, 60000, test_cuda_quant_integers_are_exact},
    {"cuda_quant_products_are_near", TEST_GPU, 60000, test_cuda_quant_products_are_near},
    {"cuda_quant_large", TEST_GPU, 60000, test_cuda_quant_large},
    {"cuda_quant_one_row_one_result", TEST_GPU, 60000, test_cuda_quant_one_row_one_result},
    {0},
};
