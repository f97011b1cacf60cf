#ifndef TANDEM_BASE_HALF_H
#define TANDEM_BASE_HALF_H

/* f16 and bf16 <-> f32, in plain C and exact: round to nearest even, subnormals kept. For file
 * readers and reference paths; kernels use the machine's instructions. */

#include <stdint.h>
#include <string.h>

static inline float half_bits_to_f32(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint32_t half_f32_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, frac = h & 0x3ff;
    if (exp == 31) return half_bits_to_f32(sign | 0x7f800000 | frac << 13);
    if (exp) return half_bits_to_f32(sign | (exp + 112) << 23 | frac << 13);
    float v = (float)frac * 0x1p-24f;
    return sign ? -v : v;
}

static inline uint16_t f32_to_f16(float f) {
    uint32_t x = half_f32_bits(f), sign = x >> 16 & 0x8000, mag = x & 0x7fffffff;
    if (mag > 0x7f800000) return (uint16_t)(sign | 0x7e00);  /* NaN */
    if (mag >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (mag < 0x38800000) {                     /* subnormal or zero: let the FPU round at 2^-24 */
        float v = half_bits_to_f32(mag) + 0.5f; /* ulp of [0.5, 1) is 2^-24 */
        return (uint16_t)(sign | (half_f32_bits(v) - 0x3f000000));
    }
    uint32_t odd = mag >> 13 & 1;
    return (uint16_t)(sign | (mag - 0x38000000 + 0xfff + odd) >> 13);
}

static inline float bf16_to_f32(uint16_t b) {
    return half_bits_to_f32((uint32_t)b << 16);
}

static inline uint16_t f32_to_bf16(float f) {
    uint32_t x = half_f32_bits(f);
    if ((x & 0x7fffffff) > 0x7f800000) return (uint16_t)(x >> 16 | 0x40); /* quiet NaN */
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

#endif
