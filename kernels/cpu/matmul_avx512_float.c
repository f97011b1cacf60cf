#include "kernels/cpu/cpu.h"

/* F32, F16 and BF16 weights against f32 activations on AVX-512: 16 outputs a vector, one fused
 * multiply-add a column and row, two chains as formats.h's law has it. */

#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

enum { PREFETCH = 4096 }; /* bytes ahead */

struct float_job {
    const uint8_t *panel;
    const float *x; /* [rows][x_stride] */
    size_t x_stride;
    int cols;
    float *out; /* [rows][stride], 16 of `mask` */
    size_t stride;
    __mmask16 mask;
};

MM_INLINE __m512 load_weights(enum kern_dtype t, const uint8_t *panel, int col) {
    if (t == KERN_F32) return _mm512_load_ps(panel + (size_t)col * 64);
    if (t == KERN_F16) return mm_load_f16(panel + (size_t)col * 32);
    const void *p = panel + (size_t)col * 32;
    __m512i v = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
}

MM_INLINE void float_panel(enum kern_dtype t, int rows, const struct float_job *j) {
    __m512 even[MM_FLOAT_GROUP], odd[MM_FLOAT_GROUP];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) even[r] = odd[r] = _mm512_setzero_ps();
    for (int k = 0; k + 1 < j->cols; k += 2) {
        const char *ahead =
            (const char *)j->panel + (size_t)k * (t == KERN_F32 ? 64 : 32) + PREFETCH;
        _mm_prefetch(ahead, _MM_HINT_T0);
        if (t == KERN_F32) _mm_prefetch(ahead + 64, _MM_HINT_T0);
        __m512 w0 = load_weights(t, j->panel, k), w1 = load_weights(t, j->panel, k + 1);
        const float *x = j->x + k;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            even[r] = _mm512_fmadd_ps(w0, _mm512_set1_ps(x[(size_t)r * j->x_stride]), even[r]);
            odd[r] = _mm512_fmadd_ps(w1, _mm512_set1_ps(x[(size_t)r * j->x_stride + 1]), odd[r]);
        }
    }
    if (j->cols & 1) {
        __m512 w0 = load_weights(t, j->panel, j->cols - 1);
        const float *x = j->x + j->cols - 1;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            even[r] = _mm512_fmadd_ps(w0, _mm512_set1_ps(x[(size_t)r * j->x_stride]), even[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(j->out + (size_t)r * j->stride, j->mask,
                              _mm512_add_ps(even[r], odd[r]));
}

typedef void float_fn(const struct float_job *j);

#define PANEL(type, rows)                                                                          \
    static void float_##type##_##rows(const struct float_job *j) {                                 \
        float_panel(KERN_##type, rows, j);                                                         \
    }
#define PANELS(type)                                                                               \
    PANEL(type, 1)                                                                                 \
    PANEL(type, 2) PANEL(type, 3) PANEL(type, 4) PANEL(type, 5) PANEL(type, 6) PANEL(type, 7)      \
        PANEL(type, 8)
PANELS(F32)
PANELS(F16)
PANELS(BF16)

#define PANEL_ROW(type)                                                                            \
    [KERN_##type] = {NULL,                                                                         \
                     float_##type##_1,                                                             \
                     float_##type##_2,                                                             \
                     float_##type##_3,                                                             \
                     float_##type##_4,                                                             \
                     float_##type##_5,                                                             \
                     float_##type##_6,                                                             \
                     float_##type##_7,                                                             \
                     float_##type##_8}
static float_fn *const float_fns[][MM_FLOAT_GROUP + 1] = {PANEL_ROW(F32), PANEL_ROW(F16),
                                                    PANEL_ROW(BF16)};

void cpu_mm512_float(int n, const struct kern_weight *w, const float *x, size_t x_stride,
                     float *out, size_t out_stride, int begin, int end) {
    size_t panel_bytes = cpu_panel_bytes(w->dtype, w->cols, MM_PANEL);
    struct float_job j = {.x_stride = x_stride, .cols = w->cols, .stride = out_stride};
    for (int p = begin; p < end; p++) {
        int left = w->rows - p * MM_PANEL;
        j.mask = (__mmask16)(left >= MM_PANEL ? 0xffff : (1u << left) - 1);
        j.panel = (const uint8_t *)w->data + (size_t)p * panel_bytes;
        for (int r = 0; r < n; r += MM_FLOAT_GROUP) {
            j.x = x + (size_t)r * x_stride;
            j.out = out + (size_t)r * out_stride + (size_t)p * MM_PANEL;
            float_fns[w->dtype][n - r < MM_FLOAT_GROUP ? n - r : MM_FLOAT_GROUP](&j);
        }
    }
}

#else
typedef int cpu_matmul_avx512_float_is_for_x86;
#endif
