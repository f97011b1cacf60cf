/* Goal: products of 16-bit weights are right on the device, and a row's bits depend on nothing but
 * the row, whatever the weights' type.
 * Method: (1) small integers, whose sums are exact in f32: every output must be the very integer,
 * so one element missing, doubled or misplaced shows; (2) random floats, already rounded to 16 bits
 * by the test, against sums in double: only f32 accumulation is left; (3) weight_pack + pack +
 * matmul against the CPU's double twin, with the rounding of activations in the bound; (4) rows
 * compared byte for byte over counts, places and neighbours (NaN among them), for every dtype and
 * both classes. Around every output lie guards. Shapes meet every cut of skinny_plain.cu on a chip
 * of 132 multiprocessors, and are odd. */
#include "tests/cuda_helper.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/half.h"
#include "base/rng.h"

enum { GEN, PROMPT };
static const char *const class_name[] = {"generated", "prompt"};

struct shape {
    int rows, cols;
};
static const struct shape shapes[] = {
    {1, 1},       {17, 31},   {16, 64},   {50, 320},
    {100, 1000},  {576, 576}, {15, 4100}, /* tiles: fewer than blocks, many steps */
    {1000, 2100},                         /* 33..: small, K split 4 ways */
    {2000, 2100},                         /* 33..: mid, 4 ways */
    {6001, 1100},                         /* to 32: three tiles a block, ragged */
    {7700, 130},                          /* ranges of one block of K, one empty */
    {25400, 200},                         /* many passes; 33..: more blocks than fit */
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static uint64_t mix(uint64_t v) {
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9u;
    v = (v ^ v >> 27) * 0x94d049bb133111ebu;
    return v ^ v >> 31;
}
static int small_int(uint64_t seed, size_t i) {
    return (int)(mix(seed * 0x9e3779b97f4a7c15u + i) % 7) - 3;
}
static uint16_t to_16(float v, bool bf16) {
    return bf16 ? f32_to_bf16(v) : f32_to_f16(v);
}
static float from_16(uint16_t v, bool bf16) {
    return bf16 ? bf16_to_f32(v) : f16_to_f32(v);
}
static uint32_t bits_of(float v) {
    return half_f32_bits(v);
}

static void *heap(size_t n) {
    void *p = calloc(n ? n : 1, 1);
    assert_non_null(p);
    return p;
}

/* ---- A backend with one matrix -------------------------------------------------------------- */

struct rig {
    struct kern *k;
    struct kern_weight w;
    void *memory;
};

static void rig_drop(struct rig *g) {
    if (g->memory) g->k->ops->unreserve(g->k, g->memory);
    g->memory = NULL;
}
static void rig_close(struct rig *g) {
    rig_drop(g);
    g->k->ops->close(g->k);
}

static size_t stride_of(int cols) {
    return ((size_t)cols + 63) / 64 * 64;
}

/* Device array of n rows of 16-bit floats, stride_of(cols) apart, zeros behind each and up to
 * `padded` rows. */
static void *put_rows(struct kern *k, const float *v, int n, int padded, int cols, bool bf16) {
    size_t stride = stride_of(cols), bytes = (size_t)padded * stride * 2;
    uint16_t *p = heap(bytes);
    for (int r = 0; r < n; r++)
        for (int c = 0; c < cols; c++)
            p[(size_t)r * stride + (size_t)c] =
                to_16(v[(size_t)r * (size_t)cols + (size_t)c], bf16);
    void *dev = dev_put(k, p, bytes);
    free(p);
    return dev;
}

/* The matrix in the documented PLAIN layout, without weight_pack. */
static void rig_plain(struct rig *g, const float *w, int rows, int cols, bool bf16) {
    int padded = (rows + 15) / 16 * 16;
    rig_drop(g);
    g->memory = put_rows(g->k, w, rows, padded, cols, bf16);
    g->w = (struct kern_weight){.data = g->memory,
                                .dtype = bf16 ? KERN_BF16 : KERN_F16,
                                .rows = rows,
                                .cols = cols,
                                .bytes = (size_t)padded * stride_of(cols) * 2};
}

/* out[n][rows] of packed rows in device memory; guards checked. odd: no output row is aligned. */
static float *rig_run(struct rig *g, int n_gen, int n_prompt, void *act, enum kern_dtype partner,
                      bool odd) {
    struct kern_rows rows = {.n_gen = n_gen, .n_prompt = n_prompt};
    struct err e = {0};
    int n = n_gen + n_prompt, offset = odd ? 3 : 4;
    size_t stride = odd ? ((size_t)g->w.rows + 5) | 1 : ((size_t)g->w.rows + 11) / 4 * 4;
    size_t want = (size_t)g->w.rows;
    struct kern_act a = {
        .data = act, .bytes = g->k->ops->act_bytes(g->k, rows, g->w.cols), .partner = partner};
    void *dev = dev_put(g->k, NULL, (size_t)n * stride * 4);
    int rc = g->k->ops->matmul(g->k, rows, &g->w, a, dev, (int)stride, offset);
    int rc_sync = g->k->ops->sync(g->k, &e);
    if (rc || rc_sync) fail_msg("matmul %d, sync %d: %s", rc, rc_sync, e.message);
    uint32_t *wide = dev_get(g->k, dev, (size_t)n * stride * 4);
    g->k->ops->unreserve(g->k, dev);
    float *out = heap((size_t)n * want * 4);
    for (size_t r = 0; r < (size_t)n; r++)
        for (size_t i = 0; i < stride; i++) {
            uint32_t v = wide[r * stride + i];
            bool inside = i >= (size_t)offset && i < (size_t)offset + want;
            if (inside) memcpy(&out[r * want + i - (size_t)offset], &v, 4);
            else if (v != UINT32_MAX)
                fail_msg("%d x %d: wrote outside: row %zu, element %td", g->w.rows, g->w.cols, r,
                         (ptrdiff_t)i - offset);
        }
    free(wide);
    return out;
}

static float *run_class(struct rig *g, int cls, int n, void *act, enum kern_dtype partner,
                        bool odd) {
    return rig_run(g, cls == GEN ? n : 0, cls == GEN ? 0 : n, act, partner, odd);
}

/* ---- Integers -------------------------------------------------------------------------------- */

static void check_integers(struct rig *g, int cls, struct shape s, int n, bool w_bf16, bool x_bf16,
                           bool odd) {
    size_t rows = (size_t)s.rows, cols = (size_t)s.cols;
    int32_t *wi = heap(rows * cols * 4), *xi = heap((size_t)n * cols * 4);
    float *w = heap(rows * cols * 4), *x = heap((size_t)n * cols * 4);
    for (size_t i = 0; i < rows * cols; i++) w[i] = (float)(wi[i] = small_int(1, i));
    for (size_t i = 0; i < (size_t)n * cols; i++) x[i] = (float)(xi[i] = small_int(2, i));
    rig_plain(g, w, s.rows, s.cols, w_bf16);
    void *act = put_rows(g->k, x, n, n, s.cols, x_bf16);
    float *out = run_class(g, cls, n, act, x_bf16 ? KERN_BF16 : KERN_F16, odd);
    size_t n_bad = 0, first = 0;
    int32_t first_want = 0;
    for (size_t r = 0; r < (size_t)n; r++)
        for (size_t i = 0; i < rows; i++) {
            int32_t sum = 0;
            for (size_t c = 0; c < cols; c++) sum += wi[i * cols + c] * xi[r * cols + c];
            if (out[r * rows + i] == (float)sum) continue;
            if (!n_bad++) first = r * rows + i, first_want = sum;
        }
    if (n_bad)
        fail_msg("%s, %d rows x %d cols, W %s, x %s, n %d%s: %zu of %zu wrong; first at row %zu, "
                 "output %zu: got %g, want %d; the next ones got %g %g %g",
                 class_name[cls], s.rows, s.cols, w_bf16 ? "bf16" : "f16", x_bf16 ? "bf16" : "f16",
                 n, odd ? ", odd stride" : "", n_bad, (size_t)n * rows, first / rows, first % rows,
                 (double)out[first], first_want, (double)out[(first + 1) % ((size_t)n * rows)],
                 (double)out[(first + 2) % ((size_t)n * rows)],
                 (double)out[(first + 3) % ((size_t)n * rows)]);
    g->k->ops->unreserve(g->k, act);
    free(wi);
    free(xi);
    free(w);
    free(x);
    free(out);
}

static void test_matmul_integers(void) {
    static const int counts[] = {1, 3, 8, 9, 16, 21, 33, 70};
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < N_SHAPES; s++)
        for (int i = 0; i < 8; i++) {
            bool bf16 = (s + i) % 2;
            if (shapes[s].rows > 20000 && i % 3) continue; /* 1, 9, 33: the host's time */
            check_integers(&g, GEN, shapes[s], counts[i], bf16, bf16, i % 2);
        }
    check_integers(&g, GEN, (struct shape){130, 200}, 256, true, true, false);
    check_integers(&g, GEN, (struct shape){130, 200}, 256, false, false, true);
    check_integers(&g, GEN, (struct shape){25400, 65}, 65, true, true, true);
    rig_close(&g);
}

static void test_matmul_integers_mixed_types(void) {
    static const int counts[] = {1, 8, 13, 33};
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < N_SHAPES; s++)
        for (int i = 0; i < 4; i++) {
            bool w_bf16 = (s + i) % 2;
            if (shapes[s].rows > 20000 && i > 1) continue;
            check_integers(&g, GEN, shapes[s], counts[i], w_bf16, !w_bf16, i % 2);
        }
    for (int s = 0; s < N_SHAPES - 2; s++)
        for (int b = 0; b < 2; b++) check_integers(&g, PROMPT, shapes[s], 19, b, !b, s % 2);
    rig_close(&g);
}

static void test_matmul_integers_prompt(void) {
    static const int counts[] = {1, 5, 64, 129};
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < N_SHAPES; s++)
        for (int i = 0; i < 4; i++) {
            bool bf16 = (s + i) % 2;
            if (shapes[s].rows > 20000 && i > 1) continue;
            check_integers(&g, PROMPT, shapes[s], counts[i], bf16, bf16, (s / 2 + i) % 2);
        }
    rig_close(&g);
}

/* ---- Floats ---------------------------------------------------------------------------------- */

/* f32 accumulation in tensor cores truncates at every group of 16 columns or less: an error of at
 * most 2^-22 of the running sum for each of cols / 8 groups. Terms have random signs, so a running
 * sum exceeds 6 standard deviations of the whole sum about never. */
static double accumulation_bound(int cols, double sum_squares) {
    return ((double)cols / 8 + 16) * 0x1p-22 * 6 * sqrt(sum_squares);
}

static void check_floats(struct rig *g, int cls, struct shape s, int n, bool w_bf16, bool x_bf16) {
    size_t rows = (size_t)s.rows, cols = (size_t)s.cols;
    float *w = test_floats(11, rows * cols, 1.f), *x = test_floats(12, (size_t)n * cols, 4.f);
    for (size_t i = 0; i < rows * cols; i++) w[i] = from_16(to_16(w[i], w_bf16), w_bf16);
    for (size_t i = 0; i < (size_t)n * cols; i++) x[i] = from_16(to_16(x[i], x_bf16), x_bf16);
    rig_plain(g, w, s.rows, s.cols, w_bf16);
    void *act = put_rows(g->k, x, n, n, s.cols, x_bf16);
    float *out = run_class(g, cls, n, act, x_bf16 ? KERN_BF16 : KERN_F16, false);
    double worst = 0;
    for (size_t r = 0; r < (size_t)n; r++)
        for (size_t i = 0; i < rows; i++) {
            double sum = 0, squares = 0, magnitude = 0, x_sum = 0;
            for (size_t c = 0; c < cols; c++) {
                double p = (double)w[i * cols + c] * (double)x[r * cols + c];
                sum += p;
                squares += p * p;
                magnitude += fabs(p);
                x_sum += fabs((double)x[r * cols + c]);
            }
            double bound = accumulation_bound(s.cols, squares);
            if (w_bf16 != x_bf16) { /* bf16 to f16 may go below its normal range, by 2^-25 */
                bound += 0x1p-25 * (x_sum + (double)cols);
                /* prompt rows: f16 weights become bf16 */
                if (cls == PROMPT && x_bf16) bound += 0x1p-8 * magnitude;
            }
            double error = fabs((double)out[r * rows + i] - sum);
            if (!(error <= bound))
                fail_msg("%s, %d x %d, W %s, x %s, n %d: row %zu, output %zu: got %.9g, want %.9g, "
                         "off by %g, allowed %g",
                         class_name[cls], s.rows, s.cols, w_bf16 ? "bf16" : "f16",
                         x_bf16 ? "bf16" : "f16", n, r, i, (double)out[r * rows + i], sum, error,
                         bound);
            if (bound > 0 && error / bound > worst) worst = error / bound;
        }
    print_message("%-9s %5d x %5d W %-4s x %-4s n %3d: worst error %.3f of the bound\n",
                  class_name[cls], s.rows, s.cols, w_bf16 ? "bf16" : "f16", x_bf16 ? "bf16" : "f16",
                  n, worst);
    g->k->ops->unreserve(g->k, act);
    free(w);
    free(x);
    free(out);
}

static void test_matmul_floats(void) {
    static const struct shape some[] = {
        {17, 31}, {50, 320}, {300, 14336}, {1000, 4096}, {25400, 96}};
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < 5; s++)
        for (int b = 0; b < 4; b++) {
            check_floats(&g, GEN, some[s], 5, b & 1, b >> 1);
            if (s < 4) check_floats(&g, PROMPT, some[s], 9, b & 1, b >> 1);
        }
    rig_close(&g);
}

/* ---- From f32 to f32, against the twin --------------------------------------------------------
 */

/* Activations of F32 and F16 weights become f16 (2^-11), those of BF16 weights bf16 (2^-8); F32
 * weights f16. f16 rounds values below 2^-14 by 2^-25 at most. */
static void check_twin(struct rig *g, struct kern *twin, enum kern_dtype t, int rows, int cols) {
    enum { N = 6 };
    struct kern_rows classes = {.n_gen = 2, .n_prompt = N - 2};
    size_t n_w = (size_t)rows * (size_t)cols;
    float *w = test_floats(21, n_w, 1.f), *x = test_floats(22, (size_t)(N * cols), 3.f);
    uint16_t *w16 = heap(n_w * 2);
    for (size_t i = 0; i < n_w && t != KERN_F32; i++)
        w[i] = from_16(w16[i] = to_16(w[i], t == KERN_BF16), t == KERN_BF16);
    const void *file = t == KERN_F32 ? (const void *)w : w16;
    struct err e = {0};
    float *out[2];
    for (int i = 0; i < 2; i++) {
        struct kern *k = i ? twin : g->k;
        const struct kern_ops *o = k->ops;
        size_t bytes = o->weight_bytes(k, t, rows, cols), act_bytes;
        struct kern_weight packed;
        struct kern_act act = {.bytes = act_bytes = o->act_bytes(k, classes, cols), .partner = t};
        assert_true(bytes > 0);
        void *dst = dev_put(k, NULL, bytes), *dev_x = dev_put(k, x, (size_t)(N * cols) * 4);
        void *dev_out = dev_put(k, NULL, (size_t)(N * rows) * 4);
        act.data = dev_put(k, NULL, act_bytes);
        assert_ok(o->weight_pack(k, &packed, dst, t, rows, cols, file, &e), e);
        assert_int_equal(o->pack(k, classes, cols, dev_x, act), 0);
        assert_int_equal(o->matmul(k, classes, &packed, act, dev_out, rows, 0), 0);
        out[i] = dev_get(k, dev_out, (size_t)(N * rows) * 4);
        o->unreserve(k, dst);
        o->unreserve(k, dev_x);
        o->unreserve(k, dev_out);
        o->unreserve(k, act.data);
    }
    double unit = t == KERN_BF16 ? 0x1p-8 : t == KERN_F16 ? 0x1p-11 : 0x1.01p-10;
    for (int r = 0; r < N; r++)
        for (int i = 0; i < rows; i++) {
            double magnitude = 0, squares = 0, w_sum = 0;
            for (int c = 0; c < cols; c++) {
                double p =
                    (double)w[(size_t)i * (size_t)cols + (size_t)c] * (double)x[r * cols + c];
                magnitude += fabs(p);
                squares += p * p;
                w_sum += fabs((double)w[(size_t)i * (size_t)cols + (size_t)c]) + 3;
            }
            double bound = unit * magnitude + accumulation_bound(cols, squares) + 0x1p-25 * w_sum;
            double error = fabs((double)out[0][r * rows + i] - (double)out[1][r * rows + i]);
            if (!(error <= bound))
                fail_msg("%s %d x %d, row %d, output %d: got %.9g, twin %.9g, allowed %g",
                         kern_dtype_name(t), rows, cols, r, i, (double)out[0][r * rows + i],
                         (double)out[1][r * rows + i], bound);
        }
    free(w);
    free(w16);
    free(x);
    free(out[0]);
    free(out[1]);
}

static void test_matmul_twin(void) {
    static const struct shape some[] = {{1, 1}, {17, 31}, {50, 320}, {577, 1000}};
    struct rig g = {.k = cuda_or_skip()};
    struct kern *twin = cpu_twin();
    for (int s = 0; s < 4; s++)
        for (int t = KERN_F32; t <= KERN_BF16; t++)
            check_twin(&g, twin, (enum kern_dtype)t, some[s].rows, some[s].cols);
    twin->ops->close(twin);
    rig_close(&g);
}

/* ---- One row, one result --------------------------------------------------------------------- */

/* Rows `pick[0..n)` of base (16-bit, stride_of(cols) apart) as a device array. */
static void *put_picked(struct kern *k, const uint16_t *base, const int *pick, int n, int cols) {
    size_t row = stride_of(cols) * 2;
    uint8_t *p = heap((size_t)n * row);
    for (int i = 0; i < n; i++)
        memcpy(p + (size_t)i * row, (const uint8_t *)base + (size_t)pick[i] * row, row);
    void *dev = dev_put(k, p, (size_t)n * row);
    free(p);
    return dev;
}

enum { N_BASE = 40, NAN_ROW = N_BASE - 1 };

/* Row pick[i] of `out` must have the bits of `want`. */
static void compare_rows(const struct rig *g, const float *out, const float *want, const int *pick,
                         int first, int n, const char *what) {
    size_t rows = (size_t)g->w.rows;
    for (int r = first; r < first + n; r++)
        for (size_t i = 0; i < rows; i++) {
            float got = out[(size_t)r * rows + i], alone = want[(size_t)pick[r] * rows + i];
            if (pick[r] == NAN_ROW ? !isnan(got) : bits_of(got) != bits_of(alone))
                fail_msg("%s %d x %d: %s: place %d holds row %d, output %zu: got %a, want %a",
                         kern_dtype_name(g->w.dtype), g->w.rows, g->w.cols, what, r, pick[r], i,
                         (double)got, (double)alone);
        }
}

/* The matrix stands in g. Base rows alone, then in company of every size, in other places, beside a
 * row of NaN, and both classes in one call. */
static void check_rows(struct rig *g, bool x_bf16, bool odd, const int *counts, int n_counts) {
    int cols = g->w.cols, pick[600];
    size_t stride = stride_of(cols), rows = (size_t)g->w.rows;
    enum kern_dtype partner = x_bf16 ? KERN_BF16 : KERN_F16;
    uint16_t *base = heap((size_t)N_BASE * stride * 2);
    for (int r = 0; r < N_BASE; r++)
        for (int c = 0; c < cols; c++)
            base[(size_t)r * stride + (size_t)c] =
                r == NAN_ROW
                    ? 0x7fff
                    : to_16(test_signed(31, (uint64_t)(r * cols + c)) * (c % 37 == 5 ? 20.f : 1.f),
                            x_bf16);
    /* f16 activations are never NaN: mixed types saturate. */
    bool plain = g->w.dtype == partner;
    float *alone[2];
    for (int cls = 0; cls < 2; cls++) {
        alone[cls] = heap(N_BASE * rows * 4);
        for (int r = 0; r < N_BASE; r++) {
            void *act = put_picked(g->k, base, &r, 1, cols);
            float *one = run_class(g, cls, 1, act, partner, odd);
            memcpy(alone[cls] + (size_t)r * rows, one, rows * 4);
            free(one);
            g->k->ops->unreserve(g->k, act);
        }
        for (int i = 0; i < n_counts; i++) {
            char what[64];
            int n = counts[i], most = plain ? N_BASE : NAN_ROW;
            snprintf(what, sizeof what, "%s, n %d", class_name[cls], n);
            for (int r = 0; r < n; r++)
                pick[r] = (int)(mix((uint64_t)(n * 1000 + r)) % (uint64_t)most);
            void *act = put_picked(g->k, base, pick, n, cols);
            float *out = run_class(g, cls, n, act, partner, odd);
            compare_rows(g, out, alone[cls], pick, 0, n, what);
            free(out);
            g->k->ops->unreserve(g->k, act);
        }
    }
    for (int r = 0; r < 30; r++) pick[r] = (r * 7 + 3) % NAN_ROW;
    void *act = put_picked(g->k, base, pick, 30, cols);
    float *out = rig_run(g, 11, 19, act, partner, odd);
    compare_rows(g, out, alone[GEN], pick, 0, 11, "11 generated before 19 prompt");
    compare_rows(g, out, alone[PROMPT], pick, 11, 19, "19 prompt behind 11 generated");
    g->k->ops->unreserve(g->k, act);
    free(out);
    free(alone[0]);
    free(alone[1]);
    free(base);
}

static const int row_counts[] = {2, 5, 8, 9, 16, 17, 31, 33, 64, 65, 144, 256, 300, 513};

static void test_matmul_rows_plain(void) {
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < N_SHAPES; s++)
        for (int b = 0; b < 2; b++) {
            size_t n = (size_t)shapes[s].rows * (size_t)shapes[s].cols;
            float *w = test_floats(41, n, 1.f);
            rig_plain(&g, w, shapes[s].rows, shapes[s].cols, b);
            check_rows(&g, b, (s + b) % 2, row_counts, shapes[s].rows > 5000 ? 9 : 14);
            if (s < 6) check_rows(&g, !b, (s + b) % 2, row_counts, 11);
            free(w);
        }
    rig_close(&g);
}

/* Shapes whose blocks go through their ring of slots more than once, with several tiles, and over
 * several passes (by an H200's 132 SMs). */
static void test_matmul_rings(void) {
    static const struct shape some[] = {
        {6001, 2100}, /* three tiles, 9 steps for 7 slots */
        {8200, 2100}, /* two tiles, two passes */
        {9001, 1100}, /* two tiles, three passes */
    };
    static const int counts[] = {3, 7, 8};
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < 3; s++)
        for (int b = 0; b < 2; b++) {
            for (int i = 0; i < 3; i++) check_integers(&g, GEN, some[s], counts[i], b, b, i % 2);
            float *w = test_floats(43, (size_t)some[s].rows * (size_t)some[s].cols, 1.f);
            rig_plain(&g, w, some[s].rows, some[s].cols, b);
            check_rows(&g, b, s % 2, counts, 3);
            free(w);
        }
    rig_close(&g);
}

/* Larger shapes of models, where cuBLASLt has more to choose from. */
static void test_matmul_rows_prompt_large(void) {
    static const struct shape some[] = {{4096, 4096}, {1536, 576}, {576, 1536}, {3072, 2048}};
    static const int few[] = {2, 17, 128, 130, 513};
    struct rig g = {.k = cuda_or_skip()};
    for (int s = 0; s < 4; s++)
        for (int b = 0; b < 2; b++) {
            size_t n = (size_t)some[s].rows * (size_t)some[s].cols;
            float *w = heap(n * 4);
            for (size_t i = 0; i < n; i++) w[i] = (float)(mix(i) >> 40) * 0x1p-24f - 0.5f;
            rig_plain(&g, w, some[s].rows, some[s].cols, b);
            check_rows(&g, b, false, few, 5);
            free(w);
        }
    rig_close(&g);
}

/* A random matrix in file layout: random bytes, but scales of moderate size. */
static uint8_t *file_weights(enum kern_dtype t, int rows, int cols) {
    size_t n = kern_dtype_bytes(t, (size_t)rows * (size_t)cols), size = kern_dtype_block_bytes(t);
    uint8_t *p = heap(n);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(mix(i + 77) >> 20);
    for (size_t b = 0; b < n / size; b++) {
        float v = test_signed(51, b);
        uint32_t bits = bits_of(v);
        uint16_t h = f32_to_f16(t == KERN_F16 ? v : 0.01f * v);
        bool two = t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K;
        uint8_t *block = p + b * size, *scale = block + (t == KERN_Q6_K ? 208 : 0);
        if (t == KERN_F32) memcpy(block, &v, 4);
        else if (t == KERN_BF16) block[0] = (uint8_t)(bits >> 16), block[1] = (uint8_t)(bits >> 24);
        else memcpy(scale, &h, 2);
        if (two) memcpy(scale + 2, &h, 2);
    }
    return p;
}

static void test_matmul_rows_every_dtype(void) {
    static const struct shape some[] = {{50, 512}, {33, 768}, {300, 2048}};
    static const int few[] = {2, 8, 9, 17, 64, 65, 144, 256};
    struct rig g = {.k = cuda_or_skip()};
    for (int t = 0; t < KERN_N_DTYPES; t++)
        for (int s = 0; s < 3; s++) {
            struct err e = {0};
            enum kern_dtype type = (enum kern_dtype)t;
            size_t bytes = g.k->ops->weight_bytes(g.k, type, some[s].rows, some[s].cols);
            assert_true(bytes > 0);
            uint8_t *file = file_weights(type, some[s].rows, some[s].cols);
            rig_drop(&g);
            g.memory = dev_put(g.k, NULL, bytes);
            assert_ok(g.k->ops->weight_pack(g.k, &g.w, g.memory, type, some[s].rows, some[s].cols,
                                            file, &e),
                      e);
            check_rows(&g, type == KERN_BF16, s % 2, few, 8);
            if (s == 0) check_rows(&g, type != KERN_BF16, false, few, 4);
            free(file);
        }
    rig_close(&g);
}

/* No rows: nothing happens, nothing is read. */
static void test_matmul_no_rows(void) {
    struct rig g = {.k = cuda_or_skip()};
    struct err e = {0};
    float w[6] = {1, 2, 3, 4, 5, 6};
    rig_plain(&g, w, 2, 3, false);
    struct kern_act a = {.data = NULL, .bytes = 0, .partner = KERN_F16};
    struct kern_rows none = {0};
    assert_int_equal(g.k->ops->act_bytes(g.k, none, 3), 0);
    assert_int_equal(g.k->ops->matmul(g.k, none, &g.w, a, NULL, 2, 0), 0);
    assert_ok(g.k->ops->sync(g.k, &e), e);
    rig_close(&g);
}

const struct test tests[] = {
    {"cuda_matmul_integers", TEST_GPU, 60000, test_matmul_integers},
    {"cuda_matmul_integers_mixed_types", TEST_GPU, 60000, test_matmul_integers_mixed_types},
    {"cuda_matmul_integers_prompt", TEST_GPU, 60000, test_matmul_integers_prompt},
    {"cuda_matmul_floats", TEST_GPU, 60000, test_matmul_floats},
    {"cuda_matmul_twin", TEST_GPU, 60000, test_matmul_twin},
    {"cuda_matmul_rows_plain", TEST_GPU, 60000, test_matmul_rows_plain},
    {"cuda_matmul_rings", TEST_GPU, 120000, test_matmul_rings},
    {"cuda_matmul_rows_prompt_large", TEST_GPU, 60000, test_matmul_rows_prompt_large},
    {"cuda_matmul_rows_every_dtype", TEST_GPU, 60000, test_matmul_rows_every_dtype},
    {"cuda_matmul_no_rows", TEST_GPU, 20000, test_matmul_no_rows},
    {0},
};
