/* Planes of 8-bit keys and values (attention_q8.h) as what attention_amx.c multiplies: widened,
 * which is exact, rounded to bf16 once, in pairs of rows of the product's inner dimension. */
#include "kernels/cpu/attention_q8.h"

#include <immintrin.h>

enum { LANES = 16 };

/* Byte `i` of each lane, signed, times `scale`, as bf16 in the lower half of each lane. */
static inline __m512i bf16_of(__m512i bytes, int i, __m512 scale) {
    __m512i n = _mm512_srai_epi32(_mm512_sllv_epi32(bytes, _mm512_set1_epi32(24 - 8 * i)), 24);
    __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(n), scale);
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
}

static inline __m512i pair(__m512i low, __m512i high) {
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Dims beyond head_dim, up to `width`, are zero in the plane; they count as zero even under a scale
 * that is NaN, as the query has zeros there and 0 times it would be NaN. */
void attn_amx_q8_k(const uint8_t *plane, int hd, int kdim, uint16_t *dst) {
    const uint16_t *scales = q8_scales(plane, hd);
    const __m512i excess = _mm512_set1_epi8(-128);
    for (int d = 0; d < kdim; d += 2, dst += KERN_BLOCK * 2)
        for (int c = 0; c < KERN_BLOCK; c += LANES) {
            __m512i out = _mm512_setzero_si512();
            if (d < hd) {
                __m512i four =
                    _mm512_xor_si512(_mm512_loadu_si512(plane + q8_k_at(c, d / 4 * 4)), excess);
                __m512 s = _mm512_cvtph_ps(_mm256_loadu_si256(
                    (const __m256i *)(const void *)(scales + d / Q8_GROUP * KERN_BLOCK + c)));
                out = bf16_of(four, d % 4, s);
                if (d + 1 < hd) out = pair(out, bf16_of(four, d % 4 + 1, s));
            }
            _mm512_storeu_si512(dst + c * 2, out);
        }
}

void attn_amx_q8_v(const uint8_t *plane, int hd, int n, int dim, uint64_t keep, uint16_t *dst) {
    const uint16_t *scales = q8_scales(plane, hd);
    const uint64_t on = n < KERN_BLOCK ? keep & (((uint64_t)1 << n) - 1) : keep;
    for (int t = 0; t < KERN_BLOCK; t += Q8_QUAD)
        for (int d = 0; d < dim; d += LANES) {
            __mmask16 lanes = hd - d >= LANES ? 0xffff : (__mmask16)((1u << (hd - d)) - 1u);
            const uint16_t *s = scales + d / Q8_GROUP * KERN_BLOCK + t;
            __m512i four = _mm512_loadu_si512(plane + q8_v_at(hd, t, d)), one[Q8_QUAD];
            for (int i = 0; i < Q8_QUAD; i++)
                one[i] = on >> (t + i) & 1 ? bf16_of(four, i, _mm512_set1_ps(f16_to_f32(s[i])))
                                           : _mm512_setzero_si512();
            for (int i = 0; i < Q8_QUAD; i += 2)
                _mm512_storeu_si512(dst + ((size_t)((t + i) / 2) * (size_t)dim + (size_t)d) * 2,
                                    _mm512_maskz_mov_epi32(lanes, pair(one[i], one[i + 1])));
        }
}
