#include "kernels/cpu/formats.h"

#include <math.h>

/* The law of formats.h in portable C: what a machine without our instruction sets runs, and what
 * the others are compared with, bit for bit. */

enum { P = 8 };

/* a * b + c rounded once. Without an FMA instruction the library's fmaf is slow; in double the
 * product is exact and the sum is rounded to 53 bits, so rounding that to f32 is right unless it
 * lies exactly between two floats (or the result is subnormal, where the border is elsewhere): then
 * ask fmaf. */
static inline float law_fma(float a, float b, float c) {
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    double s = (double)a * (double)b + (double)c;
    uint64_t bits;
    memcpy(&bits, &s, 8);
    if ((bits & 0x1fffffff) == 0x10000000 || fabs(s) < 0x1p-126) return fmaf(a, b, c);
    return (float)s;
#endif
}

static size_t weight_bytes(enum kern_dtype t, int rows, int cols) {
    return cpu_format_weight_bytes(t, rows, cols, P);
}
static void weight_pack(const struct kern_weight *w, void *dst, const void *src, int begin,
                        int end) {
    cpu_format_pack(w, dst, src, P, begin, end);
}
static void weight_row(const struct kern_weight *w, int row, float *out) {
    cpu_format_row(w, P, row, out);
}

static size_t act_bytes(const struct cpu_ctx *c, enum cpu_class cls, int n, int cols) {
    (void)c, (void)cls;
    return (size_t)n * law_row(cols).bytes;
}
static void act_row(const struct cpu_ctx *c, enum cpu_class cls, void *act, int r, int n, int cols,
                    const float *x) {
    (void)c, (void)cls, (void)n;
    struct law_row l = law_row(cols);
    law_pack_row(&l, cols, x, (uint8_t *)act + (size_t)r * l.bytes);
}

/* One block against one row; acc[lane] goes on. */
static void block_times_row(const struct cpu_format *f, const struct cpu_block *w,
                            const struct law_row *l, const uint8_t *row, int b, float acc[P]) {
    const int8_t *q = (const int8_t *)row + l->q + (size_t)b * 32;
    float da = ((const float *)(const void *)(row + l->da))[b];
    float sa = ((const float *)(const void *)(row + l->sa))[b];
    int half[2], by_half = f->block == 256 && !f->min;
    for (int h = 0; h < 2; h++) half[h] = ((const int32_t *)(const void *)(row + l->half[h]))[b];
    for (int lane = 0; lane < P; lane++) {
        int32_t dot[2] = {-f->offset * half[0], -f->offset * half[1]};
        for (int k = 0; k < 16; k++) dot[0] += w->value[lane][k] * q[k];
        for (int k = 16; k < 32; k++) dot[1] += w->value[lane][k] * q[k];
        float a = acc[lane];
        if (by_half) {
            a = law_fma((float)dot[0] * w->dw[0][lane], da, a);
            a = law_fma((float)dot[1] * w->dw[1][lane], da, a);
        } else a = law_fma((float)(dot[0] + dot[1]) * w->dw[0][lane], da, a);
        if (f->min) a = law_fma(w->mw[lane], sa, a);
        acc[lane] = a;
    }
}

/* A block is unpacked once for this many rows. */
enum { ROWS = 32 };

static void panel_quantised(const struct kern_weight *w, const uint8_t *panel, const uint8_t *act,
                            int n, float out[ROWS][P]) {
    struct law_row l = law_row(w->cols);
    struct cpu_block block;
    for (int r = 0; r < n; r++)
        for (int lane = 0; lane < P; lane++) out[r][lane] = 0;
    for (int b = 0; b < l.blocks; b++) {
        cpu_format_block(w->dtype, w->cols, P, panel, b, &block);
        for (int r = 0; r < n; r++)
            block_times_row(&cpu_formats[w->dtype], &block, &l, act + (size_t)r * l.bytes, b,
                            out[r]);
    }
}

static void panel_float(const struct kern_weight *w, const uint8_t *panel, const uint8_t *act,
                        int n, float out[ROWS][P]) {
    struct law_row l = law_row(w->cols);
    float odd[ROWS][P];
    for (int r = 0; r < n; r++)
        for (int lane = 0; lane < P; lane++) out[r][lane] = odd[r][lane] = 0;
    size_t step = (size_t)P * (size_t)cpu_formats[w->dtype].element;
    for (int k = 0; k < w->cols; k++) {
        float v[P];
        kern_dequantize(w->dtype, panel + (size_t)k * step, v, P);
        for (int r = 0; r < n; r++) {
            float x = ((const float *)(const void *)(act + (size_t)r * l.bytes))[k];
            float *acc = k & 1 ? odd[r] : out[r];
            for (int lane = 0; lane < P; lane++) acc[lane] = law_fma(v[lane], x, acc[lane]);
        }
    }
    for (int r = 0; r < n; r++)
        for (int lane = 0; lane < P; lane++) out[r][lane] += odd[r][lane];
}

/* One panel for all rows. */
static void panel_rows(int n, const struct kern_weight *w, const uint8_t *act, float *out,
                       size_t out_stride, int i) {
    size_t row_bytes = law_row(w->cols).bytes, bytes = cpu_panel_bytes(w->dtype, w->cols, P);
    const uint8_t *panel = (const uint8_t *)w->data + (size_t)i * bytes;
    int lanes = w->rows - i * P < P ? w->rows - i * P : P;
    for (int r = 0; r < n; r += ROWS) {
        float y[ROWS][P];
        int rows = n - r < ROWS ? n - r : ROWS;
        const uint8_t *a = act + (size_t)r * row_bytes;
        if (cpu_format_is_float(w->dtype)) panel_float(w, panel, a, rows, y);
        else panel_quantised(w, panel, a, rows, y);
        for (int j = 0; j < rows; j++)
            memcpy(out + (size_t)(r + j) * out_stride + (size_t)(i * P), y[j],
                   (size_t)lanes * sizeof(float));
    }
}

static void matmul(const struct cpu_ctx *c, enum cpu_class cls, int n, const struct kern_weight *w,
                   const void *act, float *out, int out_stride, int out_offset, void *scratch,
                   int idx, int n_threads) {
    (void)scratch, (void)n_threads;
    int begin, end, goes_on;
    while (threads_take(c->threads, cls, idx, &begin, &end, &goes_on))
        for (int i = begin; i < end; i++)
            panel_rows(n, w, act, out + out_offset, (size_t)out_stride, i);
}

const struct cpu_matmul_isa cpu_matmul_plain = {
    .weight_bytes = weight_bytes,
    .panel_rows = P,
    .weight_pack = weight_pack,
    .weight_row = weight_row,
    .act_bytes = act_bytes,
    .act_row = act_row,
    .matmul = matmul,
};
