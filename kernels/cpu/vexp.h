#ifndef TANDEM_KERNELS_CPU_VEXP_H
#define TANDEM_KERNELS_CPU_VEXP_H

/* Private: e^x on the vectors of simd.h, the same bits in every instruction set and in one lane as
 * in all. Relative error at most 2e-7 (tests/test_kernels_rowwise.c sweeps it), exactly 0 below
 * -87.33 (subnormal results cost hundreds of cycles and every masked column would be one), exactly
 * 1 at 0, infinity above 88.73, NaN for NaN.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2; n comes from adding 1.5 * 2^23, which leaves the nearest
 * whole number in the low bits; ln 2 is taken off in two parts, the first short enough that n times
 * it is exact (Cody and Waite). e^r by a polynomial of degree 6, a least-maximum fit whose first
 * two coefficients are 1. */

#include "kernels/cpu/simd.h"

ALWAYS_INLINE vf v_exp(vf arg) {
    const vf magic = v_set1(0x1.8p23f), lowest = v_set1(-87.33f);
    vf x = v_max(lowest, arg);
    x = v_min(v_set1(90.f), x);
    vf n = v_sub(v_add(v_mul(x, v_set1(0x1.715476p0f)), magic), magic);
    vf r = v_sub(x, v_mul(n, v_set1(0x1.62e4p-1f)));
    r = v_sub(r, v_mul(n, v_set1(0x1.7f7d1cp-20f)));
    vf p = v_set1(0x1.6a235p-10f);
    p = v_add(v_mul(p, r), v_set1(0x1.123a6cp-7f));
    p = v_add(v_mul(p, r), v_set1(0x1.5558f4p-5f));
    p = v_add(v_mul(p, r), v_set1(0x1.55549p-3f));
    p = v_add(v_mul(p, r), v_set1(0x1.fffffcp-2f));
    p = v_add(r, v_mul(v_mul(r, r), p));
    p = v_add(p, v_set1(1.f));
    return v_zero_below(v_scale2(p, n), arg, lowest);
}

/* 2^(x * unit) for x <= 0 and unit > 0, NaN where either is, for weights: relative error
 * 5e-7 + |x unit| * 1e-7, exactly 0 below 2^-125, exactly 1 at 0. Uses v_fma, so that its bits
 * differ between sets; half the work of v_exp. */
#if defined(__AVX512F__)
/* 2^(i / 16) by a table, as one instruction looks up 16 lanes, and 2^f, |f| <= 1/32, by a parabola.
 * 1.5 * 2^19 leaves 16 t rounded in the low bits. */
ALWAYS_INLINE vf v_exp_weight(vf x, vf unit) {
    static const _Alignas(64) uint32_t sixteenth[16] = {
        /* the bits of 2^(i / 16) less i << 19, what the shift below adds too much */
        0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
        0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
        0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
    const vf magic = v_set1(0x1.8p19f), lowest = v_set1(-125.f);
    vf t = v_mul(x, unit);
    vf clamped = v_max(lowest, t);
    vf n = v_add(clamped, magic), f = v_sub(clamped, v_sub(n, magic));
    __m512i bits = _mm512_castps_si512(n);
    __m512i table = _mm512_permutexvar_epi32(bits, _mm512_load_si512(sixteenth));
    vf two = _mm512_castsi512_ps(_mm512_add_epi32(table, _mm512_slli_epi32(bits, 19)));
    vf p = v_mul(f, v_fma(f, v_set1(0x1.ebfbd6p-3f), v_set1(0x1.62e98p-1f)));
    return v_zero_below(v_fma(p, two, two), t, lowest);
}
#else
ALWAYS_INLINE vf v_exp_weight(vf x, vf unit) {
    const vf magic = v_set1(0x1.8p23f), lowest = v_set1(-125.f);
    vf t = v_mul(x, unit);
    vf clamped = v_max(lowest, t);
    vf n = v_sub(v_add(clamped, magic), magic), f = v_sub(clamped, n);
    vf p = v_fma(f, v_set1(0x1.5bba14p-10f), v_set1(0x1.3cea88p-7f));
    p = v_fma(p, f, v_set1(0x1.c6b752p-5f));
    p = v_fma(p, f, v_set1(0x1.ebf9bcp-3f));
    p = v_fma(p, f, v_set1(0x1.62e42ap-1f));
    p = v_fma(p, f, v_set1(1.f));
    return v_zero_below(v_scale_normal(p, n), t, lowest);
}
#endif

static inline float s_exp(float x) {
    float a[VL];
    v_store(a, v_exp(v_set1(x)));
    return a[0];
}

#endif
