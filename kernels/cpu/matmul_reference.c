#include "kernels/cpu/cpu.h"

#include <string.h>

#include "base/checked.h"

/* The twin that everything is checked against: weights dequantised to f32 once, activations as they
 * are, every product summed in double in K order. Panels of one row; both classes alike. */

static size_t weight_bytes(enum kern_dtype t, int rows, int cols) {
    (void)t;
    return align_up((size_t)rows * (size_t)cols * sizeof(float), 64);
}

static void weight_pack(const struct kern_weight *w, void *dst, const void *src, int begin,
                        int end) {
    size_t cols = (size_t)w->cols, row_bytes = kern_dtype_bytes(w->dtype, cols);
    for (int i = begin; i < end; i++)
        kern_dequantize(w->dtype, (const uint8_t *)src + (size_t)i * row_bytes,
                        (float *)dst + (size_t)i * cols, cols);
}

static void weight_row(const struct kern_weight *w, int row, float *out) {
    size_t cols = (size_t)w->cols;
    memcpy(out, (const float *)w->data + (size_t)row * cols, cols * sizeof *out);
}

/* Activations lie in groups of LANES rows, [group][k][lane], so that the sums of a group's rows go
 * side by side through the vector unit, each of them still one sum in K order. */
enum { LANES = 8 };

static size_t act_bytes(const struct cpu_ctx *c, enum cpu_class cls, int n, int cols) {
    (void)c, (void)cls;
    return (size_t)(n + LANES - 1) / LANES * LANES * (size_t)cols * sizeof(float);
}

static void act_row(const struct cpu_ctx *c, enum cpu_class cls, void *act, int r, int n, int cols,
                    const float *x) {
    (void)c, (void)cls, (void)n;
    float *to = (float *)act + (size_t)(r / LANES) * LANES * (size_t)cols + r % LANES;
    for (int k = 0; k < cols; k++) to[(size_t)k * LANES] = x[k];
}

/* sum[lane] = the products of one weight row with a group. No contraction (build flags): the
 * versions for wider vectors give the same bits. */
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) &&                 \
    !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void
dot_group(const float *row, const float *group, int cols, double sum[LANES]) {
    double s[LANES] = {0};
    for (int k = 0; k < cols; k++)
        for (int a = 0; a < LANES; a++)
            s[a] += (double)row[k] * (double)group[(size_t)k * LANES + (size_t)a];
    for (int a = 0; a < LANES; a++) sum[a] = s[a];
}

static void matmul(const struct cpu_ctx *c, enum cpu_class cls, int n, const struct kern_weight *w,
                   const void *act, float *out, int out_stride, int out_offset, void *scratch,
                   int idx, int n_threads) {
    (void)c, (void)cls, (void)scratch;
    int begin, end, cols = w->cols;
    threads_split(w->rows, 1, idx, n_threads, &begin, &end);
    for (int i = begin; i < end; i++) {
        const float *row = (const float *)w->data + (size_t)i * (size_t)cols;
        for (int r = 0; r < n; r += LANES) {
            double sum[LANES]; /* lanes past the last row hold anything and are not stored */
            dot_group(row, (const float *)act + (size_t)r * (size_t)cols, cols, sum);
            for (int a = 0; a < LANES && r + a < n; a++)
                out[(size_t)(r + a) * (size_t)out_stride + (size_t)(out_offset + i)] =
                    (float)sum[a];
        }
    }
}

const struct cpu_matmul_isa cpu_matmul_reference = {
    .weight_bytes = weight_bytes,
    .panel_rows = 1,
    .weight_pack = weight_pack,
    .weight_row = weight_row,
    .act_bytes = act_bytes,
    .act_row = act_row,
    .matmul = matmul,
};
