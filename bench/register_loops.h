#ifndef TANDEM_BENCH_REGISTER_LOOPS_H
#define TANDEM_BENCH_REGISTER_LOOPS_H

/* Loops that touch registers only: the rate of an instruction with nothing in its way, which is the
 * floor that a kernel's products are set beside. Each returns how many products it made. The caller
 * must have checked that the machine has the instruction (and, for AMX, been granted its state). */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef double register_loop(void);
enum { LOOPS = 1 << 16 };

#if defined(__x86_64__)
#include <immintrin.h>

/* name: twelve independent chains of one multiply-accumulate of `products` each: a[i] = op. `reg`
 * is the constraint of the vector registers; that u may have changed keeps it from being hoisted.
 */
#define REGISTER_LOOP(name, isa, reg, vector, zero, u_is, q_is, op, products)                      \
    __attribute__((target(isa))) static inline double name(void) {                                 \
        vector a[12], u = u_is, q = q_is;                                                          \
        for (int i = 0; i < 12; i++) a[i] = zero;                                                  \
        for (int n = 0; n < LOOPS; n++) {                                                          \
            _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) {                                \
                __asm__ volatile("" : "+" reg(u));                                                 \
                a[i] = op;                                                                         \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; i < 12; i++) __asm__ volatile("" : : "x"(a[i]));                           \
        return 12. * products * LOOPS;                                                             \
    }
REGISTER_LOOP(loop_fma8, "avx2,fma", "x", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1),
              _mm256_set1_ps(1e-9f), _mm256_fmadd_ps(u, q, a[i]), 8)
REGISTER_LOOP(loop_maddubs, "avx2", "x", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(3),
              _mm256_set1_epi8(1), _mm256_add_epi16(a[i], _mm256_maddubs_epi16(u, q)), 32)
REGISTER_LOOP(loop_dpbusd8, "avx2,avxvnni", "x", __m256i, _mm256_setzero_si256(),
              _mm256_set1_epi8(3), _mm256_set1_epi8(1), _mm256_dpbusd_avx_epi32(a[i], u, q), 32)
REGISTER_LOOP(loop_fma16, "avx512f", "v", __m512, _mm512_setzero_ps(), _mm512_set1_ps(1),
              _mm512_set1_ps(1e-9f), _mm512_fmadd_ps(u, q, a[i]), 16)
REGISTER_LOOP(loop_dpbusd, "avx512f,avx512vnni", "v", __m512i, _mm512_setzero_si512(),
              _mm512_set1_epi8(3), _mm512_set1_epi8(1), _mm512_dpbusd_epi32(a[i], u, q), 64)
#undef REGISTER_LOOP

/* Two tiles of 16 x 32 by 32 x 16 into four accumulators. */
__attribute__((target("amx-tile,amx-bf16"))) static inline double loop_amx(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t colsb[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.colsb[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
    for (int n = 0; n < LOOPS / 16; n++)
        __asm__ volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
                         "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n tdpbf16ps %%tmm7, %%tmm5, %%tmm3"
                         :
                         :);
    __asm__ volatile("tilerelease");
    return 4. * 16 * 16 * 32 * (LOOPS / 16);
}
#endif

/* The loop of the instruction that a device (as its backend names it) multiplies quantised weights
 * with, of generated rows or of prompts; NULL: there is none here. */
static inline register_loop *loop_of_weights(const char *device, bool prompt) {
#if defined(__x86_64__)
    if (prompt && strstr(device, "AMX")) return loop_amx;
    if (strstr(device, "AVX-512")) return loop_dpbusd;
    if (strstr(device, "AVX2 VNNI")) return loop_dpbusd8;
    if (strstr(device, "AVX2")) return loop_maddubs;
#endif
    (void)device, (void)prompt;
    return NULL;
}
/* The same of attention over 16-bit keys and values. */
static inline register_loop *loop_of_attention(const char *device, bool prompt) {
#if defined(__x86_64__)
    if (prompt && strstr(device, "AMX")) return loop_amx;
    if (strstr(device, "AVX-512")) return loop_fma16;
    if (strstr(device, "AVX2")) return loop_fma8;
#endif
    (void)device, (void)prompt;
    return NULL;
}

#endif
