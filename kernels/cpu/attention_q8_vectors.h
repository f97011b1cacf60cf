#ifndef TANDEM_KERNELS_CPU_ATTENTION_Q8_VECTORS_H
#define TANDEM_KERNELS_CPU_ATTENTION_Q8_VECTORS_H

/* Private to attention_q8.c: vectors of VL 32-bit integers and what they do with 8-bit keys and
 * values, for each instruction set.
 *
 * A *column* is a vector of K, prepared for products with several queries. *Values*: a vector of V,
 * four tokens of VL dims, prepared alike. The weights of a page's tokens, 0..32767 each, lie in two
 * halves of 64 bytes, 4 bytes of each for a vector of V: with VNNI the tokens' high digits of base
 * 256, then the low ones, summed apart (SUMS); else of 16 bits those of the even tokens, then those
 * of the odd ones. weights_at: where a vector's four bytes lie. store_weights: round_half_even(w *
 * inverse). */

#include "kernels/cpu/attention_q8.h"
#include "kernels/cpu/simd.h"

enum {
    BLOCK_V = KERN_BLOCK / VL, /* vectors of a page's tokens */
    Q8_BASE = 254,             /* of a query's two digits */
};

typedef float float4 __attribute__((vector_size(16)));

#if defined(__AVX512F__)

typedef __m512i iv;
typedef struct {
    iv u;
} column;
enum { SUMS = 2 };

ALWAYS_INLINE iv i_load(const void *p) {
    return _mm512_loadu_si512(p);
}
ALWAYS_INLINE iv i_set1(int32_t x) {
    return _mm512_set1_epi32(x);
}
ALWAYS_INLINE column i_column(iv k) {
    return (column){k};
}
/* By hand, as the compiler copies sums that it need not and has no registers left for them. */
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(k.u), "v"(q));
    return acc;
}
ALWAYS_INLINE vf i_to_f(iv a) {
    return _mm512_cvtepi32_ps(a);
}
/* 256 high + low. */
ALWAYS_INLINE iv i_total(const iv acc[2]) {
    return _mm512_add_epi32(_mm512_slli_epi32(acc[0], 8), acc[1]);
}
/* Byte `i` of each lane, signed. */
ALWAYS_INLINE iv i_byte(iv a, const int i) {
    return _mm512_srai_epi32(_mm512_slli_epi32(a, (unsigned)(24 - 8 * i)), 24);
}
ALWAYS_INLINE iv i_xor(iv a, iv b) {
    return _mm512_xor_si512(a, b);
}
/* 254 high + low, rounded once. */
ALWAYS_INLINE vf i_join(iv high, iv low) {
    return v_fma(i_to_f(high), v_set1(Q8_BASE), i_to_f(low));
}
/* The larger of each lane as unsigned, a by its bits. */
ALWAYS_INLINE iv i_max_bits(vf a, iv b) {
    return _mm512_max_epu32(_mm512_castps_si512(a), b);
}
/* The largest lane of each of four. */
ALWAYS_INLINE float4 i_max_lanes(const iv a[4]) {
    iv x = _mm512_max_epu32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    iv y = _mm512_max_epu32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    iv z = _mm512_max_epu32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
    __m256i h = _mm256_max_epu32(_mm512_castsi512_si256(z), _mm512_extracti64x4_epi64(z, 1));
    return (float4)_mm_max_epu32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}
ALWAYS_INLINE void store_weights(const vf w[BLOCK_V], vf inverse, uint8_t *to) {
    const iv split =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    iv n[BLOCK_V];
    for (int i = 0; i < BLOCK_V; i++) n[i] = _mm512_cvtps_epi32(v_mul(w[i], inverse));
    iv a = _mm512_shuffle_epi8(_mm512_packus_epi32(n[0], n[1]), split);
    iv b = _mm512_shuffle_epi8(_mm512_packus_epi32(n[2], n[3]), split);
    _mm512_store_si512(to, _mm512_unpackhi_epi64(a, b));
    _mm512_store_si512(to + KERN_BLOCK, _mm512_unpacklo_epi64(a, b));
}
/* Of these packs, tokens 16 i + 4 n lie in four bytes i of 16 bytes n. */
ALWAYS_INLINE int weights_at(int quad) {
    return (quad % 4 * 4 + quad / 4) * 4;
}

#elif defined(__AVX2__)

typedef __m256i iv;
#if defined(__AVXVNNI__)
enum { SUMS = 2 };
typedef struct {
    iv u;
} column;
#else
enum { SUMS = 1 };
typedef struct {
    iv magnitude, k;
} column;
typedef struct {
    iv even, odd;
} values;
#endif

ALWAYS_INLINE iv i_load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}
ALWAYS_INLINE iv i_set1(int32_t x) {
    return _mm256_set1_epi32(x);
}
ALWAYS_INLINE iv i_xor(iv a, iv b) {
    return _mm256_xor_si256(a, b);
}
#if defined(__AVXVNNI__)
ALWAYS_INLINE column i_column(iv k) {
    return (column){k};
}
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    return _mm256_dpbusd_avx_epi32(acc, k.u, q);
}
ALWAYS_INLINE iv i_total(const iv acc[2]) {
    return _mm256_add_epi32(_mm256_slli_epi32(acc[0], 8), acc[1]);
}
ALWAYS_INLINE void store_weights(const vf w[BLOCK_V], vf inverse, uint8_t *to) {
    const iv byte = _mm256_set1_epi16(255), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int v = 0; v < BLOCK_V; v += 4, to += 4 * VL) {
        iv n[4];
        for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(v_mul(w[v + i], inverse));
        iv a = _mm256_packus_epi32(n[0], n[1]), b = _mm256_packus_epi32(n[2], n[3]);
        iv high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        iv low = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
        v_store((float *)(void *)to, (vf)_mm256_permutevar8x32_epi32(high, order));
        v_store((float *)(void *)(to + KERN_BLOCK), (vf)_mm256_permutevar8x32_epi32(low, order));
    }
}
#else
ALWAYS_INLINE column i_column(iv k) {
    k = i_xor(k, _mm256_set1_epi8(-128));
    return (column){_mm256_abs_epi8(k), k};
}
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    iv twos = _mm256_maddubs_epi16(k.magnitude, _mm256_sign_epi8(q, k.k));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
ALWAYS_INLINE iv i_total(const iv acc[1]) {
    return acc[0];
}
/* Tokens 0 and 2 of each lane, 1 and 3, as 16 bits. */
ALWAYS_INLINE values i_values(iv v) {
    return (values){_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}
ALWAYS_INLINE void i_weigh(iv acc[1], values v, iv w0, iv w1) {
    acc[0] = _mm256_add_epi32(acc[0], _mm256_madd_epi16(v.even, w0));
    acc[0] = _mm256_add_epi32(acc[0], _mm256_madd_epi16(v.odd, w1));
}
ALWAYS_INLINE void store_weights(const vf w[BLOCK_V], vf inverse, uint8_t *to) {
    const iv split = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const iv order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int v = 0; v < BLOCK_V; v += 2, to += 2 * VL) {
        iv n = _mm256_packs_epi32(_mm256_cvtps_epi32(v_mul(w[v], inverse)),
                                  _mm256_cvtps_epi32(v_mul(w[v + 1], inverse)));
        n = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(n, split), order);
        _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(n));
        _mm_storeu_si128((__m128i *)(void *)(to + KERN_BLOCK), _mm256_extracti128_si256(n, 1));
    }
}
#endif
ALWAYS_INLINE vf i_to_f(iv a) {
    return _mm256_cvtepi32_ps(a);
}
ALWAYS_INLINE iv i_byte(iv a, const int i) {
    return _mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * i), 24);
}
ALWAYS_INLINE vf i_join(iv high, iv low) {
    return v_fma(i_to_f(high), v_set1(Q8_BASE), i_to_f(low));
}
ALWAYS_INLINE iv i_max_bits(vf a, iv b) {
    return _mm256_max_epu32(_mm256_castps_si256(a), b);
}
ALWAYS_INLINE float4 i_max_lanes(const iv a[4]) {
    iv x = _mm256_max_epu32(_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1]));
    iv y = _mm256_max_epu32(_mm256_unpacklo_epi32(a[2], a[3]), _mm256_unpackhi_epi32(a[2], a[3]));
    iv z = _mm256_max_epu32(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
    return (float4)_mm_max_epu32(_mm256_castsi256_si128(z), _mm256_extracti128_si256(z, 1));
}

#else

typedef vi iv;
enum { SUMS = 1 };
typedef struct {
    iv byte[4]; /* signed */
} column;
typedef struct {
    iv token[4];
} values;

ALWAYS_INLINE iv i_load(const void *p) {
    iv a;
    memcpy(&a, p, sizeof a);
    return a;
}
ALWAYS_INLINE iv i_set1(int32_t x) {
    return (iv){x, x, x, x};
}
ALWAYS_INLINE iv i_xor(iv a, iv b) {
    return a ^ b;
}
ALWAYS_INLINE iv i_byte(iv a, const int i) {
    return (iv)((vu)a << (24 - 8 * i)) >> 24;
}
ALWAYS_INLINE column i_column(iv k) {
    k ^= i_set1((int32_t)0x80808080);
    return (column){{i_byte(k, 0), i_byte(k, 1), i_byte(k, 2), i_byte(k, 3)}};
}
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    for (int i = 0; i < 4; i++) acc += k.byte[i] * i_byte(q, i);
    return acc;
}
ALWAYS_INLINE vf i_to_f(iv a) {
    return __builtin_convertvector(a, vf);
}
ALWAYS_INLINE iv i_total(const iv acc[1]) {
    return acc[0];
}
ALWAYS_INLINE values i_values(iv v) {
    return (values){{i_byte(v, 0), i_byte(v, 1), i_byte(v, 2), i_byte(v, 3)}};
}
ALWAYS_INLINE iv i_low(iv a) {
    return (iv)((vu)a << 16) >> 16;
}
ALWAYS_INLINE void i_weigh(iv acc[1], values v, iv w0, iv w1) {
    acc[0] += v.token[0] * i_low(w0) + v.token[2] * (w0 >> 16);
    acc[0] += v.token[1] * i_low(w1) + v.token[3] * (w1 >> 16);
}
ALWAYS_INLINE vf i_join(iv high, iv low) {
    return i_to_f(high * Q8_BASE + low);
}
ALWAYS_INLINE iv i_max_bits(vf a, iv b) {
    iv on = (vu)a > (vu)b;
    return (on & (iv)a) | (~on & b);
}
ALWAYS_INLINE float4 i_max_lanes(const iv a[4]) {
    uint32_t most[4] = {0};
    for (int x = 0; x < 4; x++)
        for (int i = 0; i < VL; i++)
            most[x] = (uint32_t)a[x][i] > most[x] ? (uint32_t)a[x][i] : most[x];
    return (float4)(vu){most[0], most[1], most[2], most[3]};
}
/* 1.5 * 2^23 leaves the whole number in the low bits. */
ALWAYS_INLINE void store_weights(const vf w[BLOCK_V], vf inverse, uint8_t *to) {
    for (int v = 0; v < BLOCK_V; v++, to += 4) {
        vu bits = (vu)(w[v] * inverse + v_set1(0x1.8p23f));
        for (int i = 0; i < VL; i++) {
            uint16_t n = (uint16_t)bits[i];
            memcpy(to + i % 2 * KERN_BLOCK + i / 2 * 2, &n, 2);
        }
    }
}

#endif

#if !defined(__AVX512F__)
ALWAYS_INLINE int weights_at(int quad) {
    return quad * 4;
}
#endif

/* What a dot of u8 columns with q starts from: columns are 128 too large where they are not
 * prepared. */
#if defined(__AVX512F__) || defined(__AVXVNNI__)
enum { K_EXCESS = 128 };
typedef iv values;
ALWAYS_INLINE values i_values(iv v) {
    return v;
}
ALWAYS_INLINE void i_weigh(iv acc[2], values v, iv high, iv low) {
    acc[0] = i_dot4(acc[0], (column){high}, v);
    acc[1] = i_dot4(acc[1], (column){low}, v);
}
#else
enum { K_EXCESS = 0 };
#endif

#endif
