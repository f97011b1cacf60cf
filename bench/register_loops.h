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

__attribute__((target("avx2,fma"))) static inline double loop_fma8(void) {
    __m256 a[12], u = _mm256_set1_ps(1), q = _mm256_set1_ps(1e-9f);
    for (int i = 0; i < 12; i++) a[i] = _mm256_setzero_ps();
    for (int n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __asm__ volatile("" : "+x"(u));
            a[i] = _mm256_fmadd_ps(u, q, a[i]);
        }
    }
    for (int i = 0; i < 12; i++) __asm__ volatile("" : : "x"(a[i]));
    return 12. * 8 * LOOPS;
}
__attribute__((target("avx2"))) static inline double loop_maddubs(void) {
    __m256i a[12], u = _mm256_set1_epi8(3), q = _mm256_set1_epi8(1);
    for (int i = 0; i < 12; i++) a[i] = _mm256_setzero_si256();
    for (int n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __asm__ volatile("" : "+x"(u));
            a[i] = _mm256_add_epi16(a[i], _mm256_maddubs_epi16(u, q));
        }
    }
    for (int i = 0; i < 12; i++) __asm__ volatile("" : : "x"(a[i]));
    return 12. * 32 * LOOPS;
}
__attribute__((target("avx2,avxvnni"))) static inline double loop_dpbusd8(void) {
    __m256i a[12], u = _mm256_set1_epi8(3), q = _mm256_set1_epi8(1);
    for (int i = 0; i < 12; i++) a[i] = _mm256_setzero_si256();
    for (int n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __asm__ volatile("" : "+x"(u));
            a[i] = _mm256_dpbusd_avx_epi32(a[i], u, q);
        }
    }
    for (int i = 0; i < 12; i++) __asm__ volatile("" : : "x"(a[i]));
    return 12. * 32 * LOOPS;
}
__attribute__((target("avx512f"))) static inline double loop_fma16(void) {
    __m512 a[12], u = _mm512_set1_ps(1), q = _mm512_set1_ps(1e-9f);
    for (int i = 0; i < 12; i++) a[i] = _mm512_setzero_ps();
    for (int n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __asm__ volatile("" : "+v"(u));
            a[i] = _mm512_fmadd_ps(u, q, a[i]);
        }
    }
    for (int i = 0; i < 12; i++) __asm__ volatile("" : : "v"(a[i]));
    return 12. * 16 * LOOPS;
}
__attribute__((target("avx512f,avx512vnni"))) static inline double loop_dpbusd(void) {
    __m512i a[12], u = _mm512_set1_epi8(3), q = _mm512_set1_epi8(1);
    for (int i = 0; i < 12; i++) a[i] = _mm512_setzero_si512();
    for (int n = 0; n < LOOPS; n++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __asm__ volatile("" : "+v"(u));
            a[i] = _mm512_dpbusd_epi32(a[i], u, q);
        }
    }
    for (int i = 0; i < 12; i++) __asm__ volatile("" : : "v"(a[i]));
    return 12. * 64 * LOOPS;
}
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
