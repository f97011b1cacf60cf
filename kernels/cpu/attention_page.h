#ifndef TANDEM_KERNELS_CPU_ATTENTION_PAGE_H
#define TANDEM_KERNELS_CPU_ATTENTION_PAGE_H

/* Private to attention.c: queries and one page of f32, f16 or bf16, compiled once for each
 * instruction set. Scores: lanes are the page's 64 columns, products summed over head_dim in order.
 * Values: lanes are head_dim, summed over tokens in order. */

#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd.h"

enum {
    QT = VL == 16 ? 6 : 3, /* queries of a register tile */
    CV = 4,                /* vectors */
    COLS = CV * VL,
};

/* ---- Pages --------------------------------------------------------------------------------- */

/* Into the second-level cache: the first level's few miss buffers are what the loads themselves
 * need. */
ALWAYS_INLINE void prefetch(const uint8_t *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

/* Part i of n of a block of n rows of `row` bytes: its halves go side by side, as two streams are
 * a little faster than one. */
ALWAYS_INLINE void prefetch_part(const uint8_t *block, size_t i, size_t n, size_t row) {
    size_t half = row / 2;
    prefetch(block + i * half, half);
    prefetch(block + (n + i) * half, half);
}

/* n x width elements to f32 rows of `stride` floats, the rest of a row zero. */
ALWAYS_INLINE void widen_as(enum kern_dtype t, const uint8_t *src, int n, int width, int stride,
                            float *dst) {
    size_t es = attn_kv_bytes(t);
    for (int i = 0; i < n; i++) {
        const uint8_t *s = src + (size_t)i * (size_t)width * es;
        float *d = dst + (size_t)i * (size_t)stride;
        int x = 0;
        for (; x + VL <= width; x += VL) v_store(d + x, v_load_kv(t, s + (size_t)x * es));
        if (x < width) {
            uint8_t tail[VL * 4] = {0};
            memcpy(tail, s + (size_t)x * es, (size_t)(width - x) * es);
            v_store(d + x, v_load_kv(t, tail));
            x += VL;
        }
        for (; x < stride; x += VL) v_store(d + x, v_set1(0.f));
    }
}

static void widen(enum kern_dtype t, const uint8_t *src, int n, int width, int stride, float *dst) {
    if (t == KERN_F16) widen_as(KERN_F16, src, n, width, stride, dst);
    else if (t == KERN_BF16) widen_as(KERN_BF16, src, n, width, stride, dst);
    else widen_as(KERN_F32, src, n, width, stride, dst);
}

/* ---- Scores -------------------------------------------------------------------------------- */

/* nq queries against cv vectors of columns of a K page [hd][64], from column c on. The block `next`
 * is read ahead meanwhile, next_row bytes a step. */
ALWAYS_INLINE void score_columns(const int nq, const int cv, const enum kern_dtype t,
                                 const float *q, int hd, const uint8_t *k, int c, float *score,
                                 const uint8_t *next, size_t next_row) {
    const size_t es = attn_kv_bytes(t);
    vf acc[QT][CV];
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 4
        for (int j = 0; j < cv; j++) acc[i][j] = v_set1(0.f);
    for (int d = 0; d < hd; d++) {
        const uint8_t *row = k + ((size_t)d * KERN_BLOCK + (size_t)c) * es;
        if (next) prefetch_part(next, (size_t)d, (size_t)hd, next_row);
        vf x[QT];
#pragma GCC unroll 8
        for (int i = 0; i < nq; i++) x[i] = v_set1(q[(size_t)i * (size_t)hd + (size_t)d]);
#pragma GCC unroll 4
        for (int j = 0; j < cv; j++) {
            vf col = v_load_kv(t, row + (size_t)(j * VL) * es);
#pragma GCC unroll 8
            for (int i = 0; i < nq; i++) acc[i][j] = v_fma(x[i], col, acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 4
        for (int j = 0; j < cv; j++) v_store(score + (size_t)i * KERN_LEAF + c + j * VL, acc[i][j]);
}

ALWAYS_INLINE void score_tile(const int nq, const enum kern_dtype t, const float *q, int hd,
                              const uint8_t *k, float *score, const uint8_t *next,
                              size_t next_row) {
    for (int c = 0; c < KERN_BLOCK; c += COLS)
        score_columns(nq, CV, t, q, hd, k, c, score, c == 0 ? next : NULL, next_row);
}

/* Of some quarters alone: the same bits, as every column is summed by itself. */
ALWAYS_INLINE void score_quarters_as(const enum kern_dtype t, const float *q, int n_q, int hd,
                                     const uint8_t *k, unsigned quarters, float *score) {
    for (int c = 0; c < KERN_BLOCK; c += KERN_QUARTER) {
        int i = 0;
        if (!(quarters >> (c / KERN_QUARTER) & 1)) continue;
        for (; i + QT <= n_q; i += QT)
            score_columns(QT, VN, t, q + (size_t)i * (size_t)hd, hd, k, c,
                          score + (size_t)i * KERN_LEAF, NULL, 0);
        for (; i < n_q; i++)
            score_columns(1, VN, t, q + (size_t)i * (size_t)hd, hd, k, c,
                          score + (size_t)i * KERN_LEAF, NULL, 0);
    }
}

ALWAYS_INLINE void score_tiles(const enum kern_dtype t, const float *q, int n_q, int hd,
                               const uint8_t *k, float *score, const uint8_t *next,
                               size_t next_row) {
    for (int i = 0; i < n_q; i += QT, next = NULL) {
        const float *qi = q + (size_t)i * (size_t)hd;
        float *si = score + (size_t)i * KERN_LEAF;
#define SCORE(n) score_tile(n, t, qi, hd, k, si, next, next_row)
        switch (n_q - i < QT ? n_q - i : QT) { TILE_CASES(SCORE); }
#undef SCORE
    }
}

/* ---- Values -------------------------------------------------------------------------------- */

/* o[i][..] += sum over t of p[i][t] * V[t][..] for t in [t0, t1), nv vectors from element d on. */
ALWAYS_INLINE void value_tile(const int nq, const int nv, const enum kern_dtype t, const float *p,
                              int t0, int t1, const uint8_t *v, size_t v_row, float *o,
                              size_t o_stride, const uint8_t *next, size_t next_row) {
    const size_t es = attn_kv_bytes(t);
    vf acc[QT][CV];
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) acc[i][j] = v_load(o + (size_t)i * o_stride + j * VL);
    for (int x = t0; x < t1; x++) {
        const uint8_t *row = v + (size_t)x * v_row;
        if (next) prefetch_part(next, (size_t)x, KERN_BLOCK, next_row);
        vf weight[QT];
#pragma GCC unroll 8
        for (int i = 0; i < nq; i++) weight[i] = v_set1(p[(size_t)i * KERN_LEAF + (size_t)x]);
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            vf val = v_load_kv(t, row + (size_t)(j * VL) * es);
#pragma GCC unroll 8
            for (int i = 0; i < nq; i++) acc[i][j] = v_fma(weight[i], val, acc[i][j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) v_store(o + (size_t)i * o_stride + j * VL, acc[i][j]);
}

ALWAYS_INLINE void value_row(const int nq, const enum kern_dtype t, const float *p, int t0, int t1,
                             const uint8_t *v, int width, int dim, float *o, size_t o_stride,
                             const uint8_t *next, size_t next_row) {
    const size_t es = attn_kv_bytes(t), v_row = (size_t)width * es;
    int d = 0;
    for (; d + COLS <= dim; d += COLS, next = NULL)
        value_tile(nq, CV, t, p, t0, t1, v + (size_t)d * es, v_row, o + d, o_stride, next,
                   next_row);
    for (; d < dim; d += VL, next = NULL)
        value_tile(nq, 1, t, p, t0, t1, v + (size_t)d * es, v_row, o + d, o_stride, next, next_row);
}

ALWAYS_INLINE void value_tiles(const enum kern_dtype t, int n_q, const float *p, int t0, int t1,
                               const uint8_t *v, int width, int dim, float *o, size_t o_stride,
                               const uint8_t *next, size_t next_row) {
    for (int i = 0; i < n_q; i += QT, next = NULL) {
        const float *pi = p + (size_t)i * KERN_LEAF;
        float *oi = o + (size_t)i * o_stride;
#define VALUES(n) value_row(n, t, pi, t0, t1, v, width, dim, oi, o_stride, next, next_row)
        switch (n_q - i < QT ? n_q - i : QT) { TILE_CASES(VALUES); }
#undef VALUES
    }
}

static void value_range(enum kern_dtype t, int n_q, const float *p, int t0, int t1,
                        const uint8_t *v, int width, int dim, float *o, size_t o_stride,
                        const uint8_t *next, size_t next_row) {
    if (t == KERN_F16)
        value_tiles(KERN_F16, n_q, p, t0, t1, v, width, dim, o, o_stride, next, next_row);
    else if (t == KERN_BF16)
        value_tiles(KERN_BF16, n_q, p, t0, t1, v, width, dim, o, o_stride, next, next_row);
    else value_tiles(KERN_F32, n_q, p, t0, t1, v, width, dim, o, o_stride, next, next_row);
}

#endif
