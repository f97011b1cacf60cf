/* Compiled once for each instruction set; random bits are whole numbers and sums double, so that
 * all give the same token. */
#include "kernels/cpu/gumbel.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/cpu/simd.h"

enum { GROUP = 64 }; /* candidates that are looked at together, a multiple of 16 */

/* Philox's 32-bit words in the lower halves of 64-bit lanes, one block a lane; what the upper
 * halves hold does not matter, as products take the lower ones alone. */
#if defined(__AVX512F__)
enum { LANES = 8 };
typedef __m512i words;
ALWAYS_INLINE words w_set1(uint32_t x) {
    return _mm512_set1_epi64((int64_t)x);
}
ALWAYS_INLINE words w_mul(words a, words b) {
    return _mm512_mul_epu32(a, b);
}
ALWAYS_INLINE words w_upper(words a) {
    return _mm512_srli_epi64(a, 32);
}
ALWAYS_INLINE words w_xor3(words a, words b, words c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
/* Blocks in the order that lets w_store unpack within 128 bits. */
ALWAYS_INLINE words w_load(const uint32_t *p) {
    words a = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), a);
}
ALWAYS_INLINE void w_store(uint32_t *p, words a, words b, words c, words d) {
    words ab = _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
    words cd = _mm512_mask_blend_epi32(0xaaaa, c, _mm512_slli_epi64(d, 32));
    _mm512_storeu_si512(p, _mm512_unpacklo_epi64(ab, cd));
    _mm512_storeu_si512(p + 16, _mm512_unpackhi_epi64(ab, cd));
}
#elif defined(__AVX2__)
enum { LANES = 4 };
typedef __m256i words;
ALWAYS_INLINE words w_set1(uint32_t x) {
    return _mm256_set1_epi64x((int64_t)x);
}
ALWAYS_INLINE words w_mul(words a, words b) {
    return _mm256_mul_epu32(a, b);
}
ALWAYS_INLINE words w_upper(words a) {
    return _mm256_srli_epi64(a, 32);
}
ALWAYS_INLINE words w_xor3(words a, words b, words c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}
ALWAYS_INLINE words w_load(const uint32_t *p) {
    words a = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_permute4x64_epi64(a, _MM_SHUFFLE(3, 1, 2, 0));
}
ALWAYS_INLINE void w_store(uint32_t *p, words a, words b, words c, words d) {
    words ab = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
    words cd = _mm256_blend_epi32(c, _mm256_slli_epi64(d, 32), 0xaa);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_unpacklo_epi64(ab, cd));
    _mm256_storeu_si256((__m256i *)(void *)(p + 8), _mm256_unpackhi_epi64(ab, cd));
}
#else
enum { LANES = 1 };
typedef uint64_t words;
ALWAYS_INLINE words w_set1(uint32_t x) {
    return x;
}
ALWAYS_INLINE words w_mul(words a, words b) {
    return (a & UINT32_MAX) * (b & UINT32_MAX);
}
ALWAYS_INLINE words w_upper(words a) {
    return a >> 32;
}
ALWAYS_INLINE words w_xor3(words a, words b, words c) {
    return a ^ b ^ c;
}
ALWAYS_INLINE words w_load(const uint32_t *p) {
    return *p;
}
ALWAYS_INLINE void w_store(uint32_t *p, words a, words b, words c, words d) {
    p[0] = (uint32_t)a;
    p[1] = (uint32_t)b;
    p[2] = (uint32_t)c;
    p[3] = (uint32_t)d;
}
#endif

/* out[4 b ..] = the four draws of block[b], b < n; reads and writes up to a multiple of 8. The same
 * rounds as base/rng.h's. */
static void philox_blocks(const struct cpu_gumbel_row *g, const uint32_t *block, int n,
                          uint32_t *out) {
    const words m0 = w_set1(0xD2511F53u), m1 = w_set1(0xCD9E8D57u);
    for (int b = 0; b < n; b += LANES) {
        words c0 = w_set1((uint32_t)g->position), c1 = w_set1((uint32_t)(g->position >> 32));
        words c2 = w_set1(RNG_GUMBEL), c3 = w_load(block + b);
        uint32_t k0 = (uint32_t)g->seed, k1 = (uint32_t)(g->seed >> 32);
        for (int round = 0; round < 10; round++) {
            words p0 = w_mul(c0, m0), p1 = w_mul(c2, m1);
            c0 = w_xor3(w_upper(p1), c1, w_set1(k0));
            c2 = w_xor3(w_upper(p0), c3, w_set1(k1));
            c1 = p1;
            c3 = p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        w_store(out + 4 * b, c0, c1, c2, c3);
    }
}

static uint32_t token(const struct cpu_gumbel_row *g, int i) {
    int32_t col = g->col ? g->col[i] : i;
    return (uint32_t)(g->ids ? g->ids[col] : col);
}

/* The draws of candidates begin..begin + n. Neighbours share blocks. */
static void group_draws(const struct cpu_gumbel_row *g, int begin, int n, uint32_t r[GROUP]) {
    uint32_t block[GROUP], draw[4 * GROUP];
    int n_blocks = 0, at[GROUP];
    if (!g->col && !g->ids) {
        for (int b = 0; b < GROUP / 4; b++) block[b] = (uint32_t)(begin / 4 + b);
        philox_blocks(g, block, GROUP / 4, r);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint32_t t = token(g, begin + i);
        if (n_blocks == 0 || block[n_blocks - 1] != t / 4) block[n_blocks++] = t / 4;
        at[i] = 4 * (n_blocks - 1) + (int)(t % 4);
    }
    for (int b = n_blocks; b % 8; b++) block[b] = 0; /* read, and not used */
    philox_blocks(g, block, n_blocks, draw);
    for (int i = 0; i < n; i++) r[i] = draw[at[i]];
}

static float group_max(const float *w) {
    vf top[VN];
    for (int v = 0; v < VN; v++) top[v] = v_load(w + v * VL);
    for (int i = 16; i < GROUP; i += 16)
        for (int v = 0; v < VN; v++) top[v] = v_max(top[v], v_load(w + i + v * VL));
    return v_max16(top);
}

/* (1 - u) rounded down, and w exp(-b) rounded up by reach's slack. */
static bool can_win(uint32_t r, float w, float reach) {
    return (float)(int32_t)(~r >> 1) * 0x1p-31f < w * reach;
}

/* exp(-best), and beyond it the relative error of the weights (3e-6 where a candidate can win, less
 * than 27 below the largest) and of this arithmetic. */
static float reach_of(double best) {
    return (float)(exp(-best) * 1.0001);
}

static double noise(uint32_t r) {
    return -log(-log(((double)r + 0.5) * 0x1p-32));
}

int CPU_NAME(cpu_gumbel)(const struct cpu_gumbel_row *g) {
    int best_idx = g->best;
    double best = noise(rng_u32(g->seed, g->position, RNG_GUMBEL, token(g, best_idx)));
    float reach = reach_of(best);
    for (int begin = 0; begin < g->n; begin += GROUP) {
        int n = GROUP < g->n - begin ? GROUP : g->n - begin, hit = 0;
        float tail[GROUP];
        const float *w = g->w + begin;
        if (n < GROUP) {
            memset(tail, 0, sizeof tail);
            w = memcpy(tail, w, (size_t)n * sizeof *w);
        }
        if (!(group_max(w) * reach > 0x1p-33f)) continue;
        uint32_t r[GROUP] = {0};
        group_draws(g, begin, n, r);
        for (int i = 0; i < GROUP; i++) hit |= can_win(r[i], w[i], reach);
        for (int i = 0; hit && i < n; i++) {
            if (!can_win(r[i], w[i], reach)) continue;
            int idx = begin + i;
            double sum = ((double)g->x[idx] - (double)g->max) * (double)g->inv_t + noise(r[i]);
            if (sum > best || (sum == best && idx < best_idx)) {
                best = sum;
                best_idx = idx;
                reach = reach_of(best);
            }
        }
    }
    return best_idx;
}
