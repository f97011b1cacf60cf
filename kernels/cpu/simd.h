#ifndef TANDEM_KERNELS_CPU_SIMD_H
#define TANDEM_KERNELS_CPU_SIMD_H

/* Private: f32 vectors of the instruction set that a source is compiled for, so that one source
 * serves all of them. VL lanes: 16 (AVX-512), 8 (AVX2), 4 (plain: the compiler's generic vectors).
 * v_mul, v_add and v_sub round once each everywhere; v_fma is fused where the machine fuses, so a
 * source that must give the same bits in every set does not use it. A source is built with
 * -DCPU_ISA=<plain|avx2|avx512>; CPU_NAME(cpu_attn) is then the table's name. */

#include <stdint.h>
#include <string.h>

#include "base/half.h"
#include "kernels/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define CPU_CAT_(a, b) a##_##b
#define CPU_CAT(a, b) CPU_CAT_(a, b)
#define CPU_NAME(x) CPU_CAT(x, CPU_ISA)

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)

enum { VL = 16 };
typedef __m512 vf;

ALWAYS_INLINE vf v_load(const float *p) {
    return _mm512_loadu_ps(p);
}
ALWAYS_INLINE void v_store(float *p, vf a) {
    _mm512_storeu_ps(p, a);
}
ALWAYS_INLINE vf v_set1(float x) {
    return _mm512_set1_ps(x);
}
ALWAYS_INLINE vf v_add(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
ALWAYS_INLINE vf v_sub(vf a, vf b) {
    return _mm512_sub_ps(a, b);
}
ALWAYS_INLINE vf v_mul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
ALWAYS_INLINE vf v_div(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
ALWAYS_INLINE vf v_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
/* a > b ? a : b, so a NaN in b comes through and one in a does not. */
ALWAYS_INLINE vf v_max(vf a, vf b) {
    return _mm512_max_ps(a, b);
}
ALWAYS_INLINE vf v_min(vf a, vf b) {
    return _mm512_min_ps(a, b);
}
ALWAYS_INLINE vf v_load_f16(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
ALWAYS_INLINE vf v_load_bf16(const void *p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
/* a * 2^n, n whole, rounded once. */
ALWAYS_INLINE vf v_scale2(vf a, vf n) {
    return _mm512_scalef_ps(a, n);
}
/* The same for n in [-126, 127]. */
ALWAYS_INLINE vf v_scale_normal(vf a, vf n) {
    return _mm512_scalef_ps(a, n);
}
/* a, and 0 where x < bound (NaN is not). */
ALWAYS_INLINE vf v_zero_below(vf a, vf x, vf bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a);
}
/* Lane i of a where bit i is set, else `other`. */
ALWAYS_INLINE vf v_select(uint32_t bits, vf a, vf other) {
    return _mm512_mask_blend_ps((__mmask16)bits, other, a);
}
ALWAYS_INLINE bool v_any_nan(vf a) {
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0;
}

#elif defined(__AVX2__)

enum { VL = 8 };
typedef __m256 vf;

ALWAYS_INLINE vf v_load(const float *p) {
    return _mm256_loadu_ps(p);
}
ALWAYS_INLINE void v_store(float *p, vf a) {
    _mm256_storeu_ps(p, a);
}
ALWAYS_INLINE vf v_set1(float x) {
    return _mm256_set1_ps(x);
}
ALWAYS_INLINE vf v_add(vf a, vf b) {
    return _mm256_add_ps(a, b);
}
ALWAYS_INLINE vf v_sub(vf a, vf b) {
    return _mm256_sub_ps(a, b);
}
ALWAYS_INLINE vf v_mul(vf a, vf b) {
    return _mm256_mul_ps(a, b);
}
ALWAYS_INLINE vf v_div(vf a, vf b) {
    return _mm256_div_ps(a, b);
}
ALWAYS_INLINE vf v_fma(vf a, vf b, vf c) {
    return _mm256_fmadd_ps(a, b, c);
}
ALWAYS_INLINE vf v_max(vf a, vf b) {
    return _mm256_max_ps(a, b);
}
ALWAYS_INLINE vf v_min(vf a, vf b) {
    return _mm256_min_ps(a, b);
}
ALWAYS_INLINE vf v_load_f16(const void *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
ALWAYS_INLINE vf v_load_bf16(const void *p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
ALWAYS_INLINE vf v_scale2(vf a, vf n) {
    __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1);
    __m256i bias = _mm256_set1_epi32(127), rest = _mm256_sub_epi32(i, half);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a,
                         _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
ALWAYS_INLINE vf v_scale_normal(vf a, vf n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}
ALWAYS_INLINE vf v_zero_below(vf a, vf x, vf bound) {
    return _mm256_and_ps(a, _mm256_cmp_ps(x, bound, _CMP_NLT_UQ));
}
ALWAYS_INLINE vf v_select(uint32_t bits, vf a, vf other) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i on = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane);
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(on));
}
ALWAYS_INLINE bool v_any_nan(vf a) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0;
}

#else

enum { VL = 4 };
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

ALWAYS_INLINE vf v_load(const float *p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
ALWAYS_INLINE void v_store(float *p, vf a) {
    memcpy(p, &a, sizeof a);
}
ALWAYS_INLINE vf v_set1(float x) {
    return (vf){x, x, x, x};
}
ALWAYS_INLINE vf v_add(vf a, vf b) {
    return a + b;
}
ALWAYS_INLINE vf v_sub(vf a, vf b) {
    return a - b;
}
ALWAYS_INLINE vf v_mul(vf a, vf b) {
    return a * b;
}
ALWAYS_INLINE vf v_div(vf a, vf b) {
    return a / b;
}
ALWAYS_INLINE vf v_fma(vf a, vf b, vf c) {
    return a * b + c;
}
ALWAYS_INLINE vf v_blend(vi on, vf a, vf b) {
    return (vf)((on & (vi)a) | (~on & (vi)b));
}
ALWAYS_INLINE vf v_max(vf a, vf b) {
    return v_blend(a > b, a, b);
}
ALWAYS_INLINE vf v_min(vf a, vf b) {
    return v_blend(a < b, a, b);
}
/* Exponent and fraction moved into place and scaled by 2^112: exact for normal and subnormal
 * halves. */
ALWAYS_INLINE vf v_load_f16(const void *p) {
    uint16_t h[4];
    memcpy(h, p, sizeof h);
    vu w = {h[0], h[1], h[2], h[3]}, mag = w & 0x7fff;
    vf a = (vf)(mag << 13) * 0x1p112f;
    vu special = (vu)((vi)mag >= 0x7c00) & 0x7f800000u;
    return (vf)((vu)a | special | (w & 0x8000) << 16);
}
ALWAYS_INLINE vf v_load_bf16(const void *p) {
    uint16_t h[4];
    memcpy(h, p, sizeof h);
    return (vf)((vu){h[0], h[1], h[2], h[3]} << 16);
}
ALWAYS_INLINE vf v_scale2(vf a, vf n) {
    vi i = {(int32_t)n[0], (int32_t)n[1], (int32_t)n[2], (int32_t)n[3]}, half = i >> 1;
    a = a * (vf)((half + 127) << 23);
    return a * (vf)((i - half + 127) << 23);
}
/* n + 2^23 + 2^22 holds n in its low bits; anything for NaN, as a is NaN then. */
ALWAYS_INLINE vf v_scale_normal(vf a, vf n) {
    vu bits = (vu)(n + 0x1.8p23f);
    return a * (vf)((bits << 23) + (127u << 23));
}
ALWAYS_INLINE vf v_zero_below(vf a, vf x, vf bound) {
    return (vf)((vi)a & ~(x < bound));
}
ALWAYS_INLINE vf v_select(uint32_t bits, vf a, vf other) {
    const vu lane = {1, 2, 4, 8};
    return v_blend((vi)((lane & bits) != 0), a, other);
}
ALWAYS_INLINE bool v_any_nan(vf a) {
    vi un = a != a;
    return (un[0] | un[1] | un[2] | un[3]) != 0;
}

#endif

enum { VN = 16 / VL }; /* vectors of 16 lanes */

/* Sum of 16 lanes by halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1; the same in every set. Largest lane alike;
 * NaN in some lane may or may not come through. */
#if defined(__AVX2__)
ALWAYS_INLINE float v_sum8(__m256 a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
ALWAYS_INLINE float v_max8(__m256 a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
#endif
#if defined(__AVX512F__)
ALWAYS_INLINE __m256 v_upper(__m512 a) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}
ALWAYS_INLINE float v_sum16(const vf acc[VN]) {
    return v_sum8(_mm256_add_ps(_mm512_castps512_ps256(acc[0]), v_upper(acc[0])));
}
ALWAYS_INLINE float v_max16(const vf acc[VN]) {
    return v_max8(_mm256_max_ps(_mm512_castps512_ps256(acc[0]), v_upper(acc[0])));
}
#elif defined(__AVX2__)
ALWAYS_INLINE float v_sum16(const vf acc[VN]) {
    return v_sum8(_mm256_add_ps(acc[0], acc[1]));
}
ALWAYS_INLINE float v_max16(const vf acc[VN]) {
    return v_max8(_mm256_max_ps(acc[0], acc[1]));
}
#else
ALWAYS_INLINE float v_sum16(const vf acc[VN]) {
    vf a = (acc[0] + acc[2]) + (acc[1] + acc[3]);
    return (a[0] + a[2]) + (a[1] + a[3]);
}
ALWAYS_INLINE float v_max16(const vf acc[VN]) {
    vf a = v_max(v_max(acc[0], acc[2]), v_max(acc[1], acc[3]));
    float m = a[0];
    for (int i = 1; i < 4; i++) m = a[i] > m ? a[i] : m;
    return m;
}
#endif

/* VL elements of a cache's type. */
ALWAYS_INLINE vf v_load_kv(enum kern_dtype t, const void *p) {
    return t == KERN_F16 ? v_load_f16(p) : t == KERN_BF16 ? v_load_bf16(p) : v_load(p);
}

/* Cases of a switch over the queries of a register tile, of at most QT = (VL == 16 ? 6 : 3): DO(n)
 * for each number as a constant. */
#define TILE_CASE(n, DO)                                                                           \
    case n:                                                                                        \
        DO(n);                                                                                     \
        break;
#if defined(__AVX512F__)
#define TILE_CASES(DO)                                                                             \
    TILE_CASE(1, DO)                                                                               \
    TILE_CASE(2, DO)                                                                               \
    TILE_CASE(3, DO)                                                                               \
    TILE_CASE(4, DO)                                                                               \
    TILE_CASE(5, DO)                                                                               \
    default:                                                                                       \
        DO(QT)
#else
#define TILE_CASES(DO)                                                                             \
    TILE_CASE(1, DO)                                                                               \
    TILE_CASE(2, DO)                                                                               \
    default:                                                                                       \
        DO(QT)
#endif

#endif
