#ifndef TANDEM_KERNELS_CPU_FORMATS_H
#define TANDEM_KERNELS_CPU_FORMATS_H

/* The forms in which the fast products keep weights and activations, and the law that says what a
 * product is, to the bit. Every table but `reference` (and the AMX prompt path) follows it, so that
 * `plain` checks the others exactly.
 *
 * THE LAW
 * Activations, quantised weights. A row x[cols] is cut into blocks of 32 (the last one padded with
 * zeros).
 *   amax = max |x|; not finite: q = 0, da = NaN; amax < 2^-100: q = 0, da = 0; else
 *   da = amax / 127, id = 127 / amax, q = round_half_even(x * id), in -127..127;
 *   half[h] = sum of q over 16 (h = 0, 1), sum = half[0] + half[1], sa = da * (float)sum.
 * Output i, one f32 accumulator, acc = 0, blocks in K order; every operation rounds to f32 once:
 *   dot  = sum (w - offset) * q in int32, exact; w unsigned as stored, the offset folded in the
 *          integers (dot = sum w q - offset * sum): 8 for Q4_0, 16 for Q5_0, 32 for Q6_K, else 0
 *          (Q8_0 is signed)
 *   acc  = fma((float)dot * dw, da, acc)
 *   acc  = fma(mw, sa, acc)                         (types with a minimum only)
 * with dw = d, mw = m (Q*_0, Q*_1); dw = d * sc, mw = -(dmin * mn) (Q4_K, Q5_K: both exact in f32).
 * Q6_K has a scale for every 16 weights: dot and the first fma once for each half, dw = d * sc[h],
 * half 0 first.
 *
 * F32, F16, BF16 weights against the f32 activations: two chains, both from 0,
 *   acc[k & 1] = fma(w[k], x[k], acc[k & 1]) for k in order; the output is acc[0] + acc[1].
 *
 * PACKED ACTIVATIONS of a row (law_row): f32 x, int8 q, f32 da, f32 sa, i32 sum, i32 half[0],
 * i32 half[1], one array behind the other, each at a multiple of 64 bytes. A class's part is n such
 * rows. A table may choose another form; the values are the law's.
 *
 * PACKED WEIGHTS of avx2, avxvnni and plain. Rows are taken in panels of P = 8, the last one padded
 * with zeros. A panel of a float type is [cols][P] elements. A panel of a quantised type is a plane
 * of values and, at the next multiple of 64 bytes, a plane of scales; both run over the blocks of
 * 32 in K order. In a block, k = 4 g + i (g < 8 groups, i < 4); a vector is 4 P bytes, byte 4 r + i
 * for row r:
 *   Q8_0         8 vectors: vector g holds group g, signed
 *   4, 5, 6 bits 4 vectors: vector v holds the low four bits of group v (low nibble) and v + 4
 *   5 bits       1 vector more: bit g of a byte is bit 4 of group g
 *   6 bits       2 vectors more: vector j holds bits 4, 5 of group 4 j + t at bits 2 t, 2 t + 1
 * Scales of a block: f16 d[P], then f16 m[P] for Q*_1. Of a super-block of 256: f16 d[P],
 * f16 dmin[P], u8 sc[8][P], u8 mn[8][P] (Q4_K, Q5_K); f16 d[P], i8 sc[16][P] (Q6_K). */

#include <string.h>

#include "base/checked.h"
#include "base/half.h"
#include "kernels/cpu/cpu.h"

struct cpu_format {
    int block;     /* weights that share a record of the scale plane: 32 or 256; 1: a float type */
    int element;   /* bytes of an element of a float type */
    int low, high; /* vectors of 4 P bytes in a block's values: low plane, high plane */
    int scales;    /* bytes of scales for one row and one record */
    int offset;    /* taken off the stored values */
    int min;       /* 1: has a minimum */
};
extern const struct cpu_format cpu_formats[KERN_N_DTYPES];

static inline bool cpu_format_is_float(enum kern_dtype t) {
    return cpu_formats[t].block == 1;
}

/* Bytes of the values of one block of 32 / of one record of scales, in a panel of P rows. */
static inline size_t cpu_block_bytes(enum kern_dtype t, int P) {
    return (size_t)(cpu_formats[t].low + cpu_formats[t].high) * 4 * (size_t)P;
}
static inline size_t cpu_record_bytes(enum kern_dtype t, int P) {
    return (size_t)cpu_formats[t].scales * (size_t)P;
}
/* Where a panel's scales begin, and the panel's size. */
static inline size_t cpu_panel_scales(enum kern_dtype t, int cols, int P) {
    return align_up((size_t)(cols / 32) * cpu_block_bytes(t, P), 64);
}
static inline size_t cpu_panel_bytes(enum kern_dtype t, int cols, int P) {
    const struct cpu_format *f = &cpu_formats[t];
    if (f->block == 1) return align_up((size_t)cols * (size_t)P * (size_t)f->element, 64);
    return align_up(
        cpu_panel_scales(t, cols, P) + (size_t)(cols / f->block) * cpu_record_bytes(t, P), 64);
}

/* weight_bytes, weight_pack and weight_row of a table whose panels have P rows. Packing reads the
 * file's rows as they lie there (kern_dtype_bytes each). */
size_t cpu_format_weight_bytes(enum kern_dtype t, int rows, int cols, int P);
void cpu_format_pack(const struct kern_weight *w, void *dst, const void *src, int P, int begin,
                     int end);
void cpu_format_row(const struct kern_weight *w, int P, int row, float *out);

/* One block of a panel in plain form: value[r][k] as stored (signed for Q8_0), dw[h][r], mw[r], for
 * P <= 16. */
struct cpu_block {
    int16_t value[16][32];
    float dw[2][16]; /* [1] equals [0] but for Q6_K */
    float mw[16];    /* 0 without a minimum */
};
void cpu_format_block(enum kern_dtype t, int cols, int P, const void *panel, int block,
                      struct cpu_block *out);

/* ---- Activations --------------------------------------------------------------------------- */

/* Byte offsets of the arrays of one packed row. */
struct law_row {
    int blocks;
    size_t q, da, sa, sum, half[2], bytes; /* x lies at 0 */
};
static inline struct law_row law_row(int cols) {
    struct law_row l = {.blocks = (int)ceil_div((size_t)cols, 32)};
    size_t b = (size_t)l.blocks, scale = align_up(b * 4, 64);
    l.q = b * 32 * 4;
    l.da = l.q + align_up(b * 32, 64);
    l.sa = l.da + scale;
    l.sum = l.sa + scale;
    l.half[0] = l.sum + scale;
    l.half[1] = l.half[0] + scale;
    l.bytes = l.half[1] + scale;
    return l;
}

/* Round to the nearest integer, ties to even, |v| <= 2^21: adding 1.5 * 2^23 leaves it in the low
 * bits. */
static inline int32_t law_round(float v) {
    return (int32_t)(half_f32_bits(v + 12582912.f) - 0x4b400000u);
}

/* Pack one row. Inline, so that each table compiles it for its own instructions: the same bits. */
static inline void law_pack_row(const struct law_row *l, int cols, const float *x, uint8_t *row) {
    float *xs = (float *)(void *)row, *da = (float *)(void *)(row + l->da);
    float *sa = (float *)(void *)(row + l->sa);
    int8_t *q = (int8_t *)(row + l->q);
    int32_t *sum = (int32_t *)(void *)(row + l->sum);
    int32_t *half0 = (int32_t *)(void *)(row + l->half[0]);
    int32_t *half1 = (int32_t *)(void *)(row + l->half[1]);
    memcpy(xs, x, (size_t)cols * sizeof *x);
    memset(xs + cols, 0, ((size_t)l->blocks * 32 - (size_t)cols) * sizeof *x);
    for (int b = 0; b < l->blocks; b++) {
        const float *v = xs + (size_t)b * 32;
        int8_t *out = q + (size_t)b * 32;
        int32_t bits = 0; /* of max |x|: as integers, so that NaN wins over everything */
        for (int k = 0; k < 32; k++) {
            int32_t m = (int32_t)(half_f32_bits(v[k]) & 0x7fffffff);
            bits = m > bits ? m : bits;
        }
        float amax = half_bits_to_f32((uint32_t)bits), scale, inverse;
        if (bits >= 0x7f800000 || amax < 0x1p-100f) {
            memset(out, 0, 32);
            da[b] = sa[b] = bits >= 0x7f800000 ? half_bits_to_f32(0x7fc00000) : 0.f;
            sum[b] = half0[b] = half1[b] = 0;
            continue;
        }
        scale = amax / 127.f;
        inverse = 127.f / amax;
        int32_t s0 = 0, s1 = 0;
        int32_t t[32];
        for (int k = 0; k < 32; k++) t[k] = law_round(v[k] * inverse);
        for (int k = 0; k < 16; k++) s0 += t[k];
        for (int k = 16; k < 32; k++) s1 += t[k];
        for (int k = 0; k < 32; k++) out[k] = (int8_t)t[k];
        da[b] = scale;
        half0[b] = s0;
        half1[b] = s1;
        sum[b] = s0 + s1;
        sa[b] = scale * (float)(s0 + s1);
    }
}

#endif
