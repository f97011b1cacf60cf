#ifndef TANDEM_KERNELS_CPU_MATMUL_AVX512_H
#define TANDEM_KERNELS_CPU_MATMUL_AVX512_H

/* Private to the AVX-512 and AMX products: what they share. Weights lie as formats.h says, in
 * panels of 16 outputs: a 64-byte vector holds 4 columns of all 16, one 32-bit lane an output, as
 * VPDPBUSD wants them. A unit is 32 columns.
 *
 * Activations of generated rows (and of prompt rows where AMX is missing): rows in as few groups of
 * at most MM_GROUP as they need, as even as can be; in a group one 64-byte record a unit and row:
 * [units][rows of the group]. A kernel then reads all rows of a group at constant distances from
 * one pointer. Behind all records, f32 [n][units * 32] for weights that are not quantised. */

#if defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>

#include "kernels/cpu/formats.h"

enum { MM_PANEL = 16, MM_UNIT = 32, MM_GROUP = 12, MM_FLOAT_GROUP = 8 };

static inline int mm_units(int cols) {
    return (cols + MM_UNIT - 1) / MM_UNIT;
}
/* Row groups of n rows; where group i begins (i may be the number of groups). */
static inline int mm_groups(int n) {
    return (n + MM_GROUP - 1) / MM_GROUP;
}
static inline int mm_group_begin(int n, int i) {
    return n * i / mm_groups(n);
}
static inline int mm_panels(int rows) {
    return (rows + MM_PANEL - 1) / MM_PANEL;
}

/* Sums of integers begin at the bits of 1.5 * 2^23, the f32 whose unit is 1: as an f32, a sum that
 * has reached `dot` is 1.5 * 2^23 + dot without any conversion (|dot| < 2^22; the largest is 32 *
 * 128 * 127). One fma then gives (float)dot * dw, rounded once: dw has at most 19 bits (an f16, or
 * an f16 times 8 bits), so 1.5 * 2^23 * dw, which it takes off, is exact. */
enum { MM_MAGIC = 0x4b400000 };
#define MM_MAGIC_VALUE 12582912.f

/* What a product needs of 32 activations of one row: one cache line. Names as in formats.h's law.
 */
struct mm_act {
    int8_t q[MM_UNIT];
    float da, sa;
    /* Where a dot begins: MM_MAGIC - 8 * sum, and so on, takes the offset of the stored weights
     * back. */
    int32_t minus8, minus16, minus128, minus32[2]; /* [2]: of the halves */
    int32_t unused;
};
_Static_assert(sizeof(struct mm_act) == 64 && offsetof(struct mm_act, minus32) == 52,
               "a record is a cache line, written as two vectors");

/* Constant types fold all of these to a few instructions. */
#define MM_INLINE static inline __attribute__((always_inline))

/* Loops over rows and groups, 12 turns at most. */
#ifdef __clang__
#define MM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MM_UNROLL _Pragma("GCC unroll 12")
#endif

/* Bytes of a unit's values, and of a record of scales (one unit; K: 8 units). */
MM_INLINE int mm_value_bytes(enum kern_dtype t) {
    switch (t) {
    case KERN_Q8_0:
        return 512;
    case KERN_Q4_0:
    case KERN_Q4_1:
    case KERN_Q4_K:
        return 256;
    case KERN_Q5_0:
    case KERN_Q5_1:
    case KERN_Q5_K:
        return 320;
    default:
        return 384;
    }
}

MM_INLINE int mm_record_bytes(enum kern_dtype t) {
    switch (t) {
    case KERN_Q8_0:
    case KERN_Q4_0:
    case KERN_Q5_0:
        return 32;
    case KERN_Q4_1:
    case KERN_Q5_1:
        return 64;
    case KERN_Q6_K:
        return 32 + 256;
    default:
        return 64 + 256;
    }
}

/* Bytes of scales that a unit brings on average. */
MM_INLINE int mm_unit_scale_bytes(enum kern_dtype t) {
    return t == KERN_Q4_K || t == KERN_Q5_K || t == KERN_Q6_K ? mm_record_bytes(t) / 8
                                                              : mm_record_bytes(t);
}

/* Columns 4 g .. 4 g + 3 of a unit's values (g < 8) as unsigned bytes; Q8_0 becomes value + 128. */
MM_INLINE __m512i mm_load_group(enum kern_dtype t, const uint8_t *p, int g) {
    const __m512i low = _mm512_set1_epi8(15);
    if (t == KERN_Q8_0)
        return _mm512_xor_si512(_mm512_set1_epi8(-128), _mm512_load_si512(p + 64 * g));
    __m512i v = _mm512_load_si512(p + 64 * (g % 4));
    if (g >= 4) v = _mm512_srli_epi16(v, 4);
    v = _mm512_and_si512(v, low);
    /* Function 0xf8 is a | (b & c). */
    if (t == KERN_Q5_0 || t == KERN_Q5_1 || t == KERN_Q5_K) {
        __m512i h = _mm512_load_si512(p + 256); /* bit g to bit 4 */
        h = g == 0   ? _mm512_slli_epi16(h, 4)
            : g == 1 ? _mm512_slli_epi16(h, 3)
            : g == 2 ? _mm512_slli_epi16(h, 2)
            : g == 3 ? _mm512_slli_epi16(h, 1)
            : g == 4 ? h
            : g == 5 ? _mm512_srli_epi16(h, 1)
            : g == 6 ? _mm512_srli_epi16(h, 2)
                     : _mm512_srli_epi16(h, 3);
        v = _mm512_ternarylogic_epi32(v, h, _mm512_set1_epi8(16), 0xf8);
    }
    if (t == KERN_Q6_K) {
        __m512i h = _mm512_load_si512(p + 256 + 64 * (g / 4));
        h = g % 4 == 0   ? _mm512_slli_epi16(h, 4)
            : g % 4 == 1 ? _mm512_slli_epi16(h, 2)
            : g % 4 == 2 ? h
                         : _mm512_srli_epi16(h, 2);
        v = _mm512_ternarylogic_epi32(v, h, _mm512_set1_epi8(48), 0xf8);
    }
    return v;
}

/* 16 halves of a scale plane. */
MM_INLINE __m512 mm_load_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(const void *)p));
}

/* Scales of unit u: dw of each half (the same but for Q6_K) and mw (0 without a minimum). */
MM_INLINE void mm_load_scales(enum kern_dtype t, const uint8_t *scales, int u, __m512 dw[2],
                              __m512 *mw) {
    *mw = _mm512_setzero_ps();
    if (t != KERN_Q4_K && t != KERN_Q5_K && t != KERN_Q6_K) {
        const uint8_t *p = scales + (size_t)u * (size_t)mm_record_bytes(t);
        dw[0] = dw[1] = mm_load_f16(p);
        if (t == KERN_Q4_1 || t == KERN_Q5_1) *mw = mm_load_f16(p + 32);
        return;
    }
    const uint8_t *p = scales + (size_t)(u / 8) * (size_t)mm_record_bytes(t);
    __m512 d = mm_load_f16(p);
    if (t == KERN_Q6_K) {
        for (int h = 0; h < 2; h++) {
            const void *sc = p + 32 + 16 * (u % 8 * 2 + h);
            __m512i i = _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)sc));
            dw[h] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(i));
        }
        return;
    }
    const void *sc = p + 64 + 16 * (u % 8), *mn = p + 64 + 128 + 16 * (u % 8);
    __m512i s = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)sc));
    __m512i m = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)mn));
    dw[0] = dw[1] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(s));
    __m512 dmin = mm_load_f16(p + 32);
    const __m512 minus = _mm512_set1_ps(-0.f); /* flipping the sign is exact */
    *mw = _mm512_xor_ps(_mm512_mul_ps(dmin, _mm512_cvtepi32_ps(m)), minus);
}

/* ---- Between the files ---------------------------------------------------------------------- */

/* n rows of f32 [n][x_stride] times panels [begin, end); matmul_avx512_float.c. */
void cpu_mm512_float(int n, const struct kern_weight *w, const float *x, size_t x_stride,
                     float *out, size_t out_stride, int begin, int end);

/* Prompt rows by bf16 tiles; matmul_amx.c. */
size_t cpu_mm_amx_act_bytes(int n, int cols);
void cpu_mm_amx_act_row(void *act, int r, int n, int cols, const float *x, bool f32_copy);
const float *cpu_mm_amx_f32(const void *act, int n, int cols); /* the copy, [n][units * 32] */
void cpu_mm_amx(int n, const struct kern_weight *w, const void *act, float *out, size_t out_stride,
                void *scratch, int idx, int n_threads);

#endif
#endif
