/* Random weights in the place of a file's (--load-format dummy): for speed at real sizes, where a
 * config.json is all that there is. What each 64-bit word of a tensor draws is a pure function of
 * the tensor and the word's number (SplitMix64 over a counter), so that any number of threads makes
 * the same weights; a word gives four elements, so that a core makes a gigabyte or two a second.
 *
 * Matrices and biases are normal with mean 0 and standard deviation 0.02, as untrained models are
 * begun, so that activations stay finite at any depth; norms are 1. Quantised matrices are random
 * bits between scales that give them the same deviation: nothing is quantised. */
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/half.h"
#include "base/threads.h"
#include "model/model_private.h"
#include "model/source.h"

enum { N_QUANTILES = 4096, GRAIN = 1024 /* elements or blocks: whole words of all types */ };
#define DEVIATION 0.02f

/* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. */
static inline uint64_t word(uint64_t seed, uint64_t i) {
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* The normal distribution in steps of equal probability, as f32, f16 or bf16. */
union quantiles {
    float f[N_QUANTILES];
    uint16_t h[N_QUANTILES];
};

/* z with Phi(z) = p, p >= 1/2: Newton from 0, which comes from below since Phi is concave there. */
static double normal_quantile(double p) {
    double z = 0;
    for (int i = 0; i < 40; i++)
        z += (p - 0.5 * erfc(-z * M_SQRT1_2)) / (exp(-0.5 * z * z) * 0.39894228040143268);
    return z;
}

static void fill_quantiles(union quantiles *q, enum kern_dtype t) {
    for (int i = 0; i < N_QUANTILES / 2; i++) {
        double p = (i + 0.5) / N_QUANTILES;
        float v = (float)(DEVIATION * normal_quantile(1 - p));
        int mirror = N_QUANTILES - 1 - i;
        if (t == KERN_F32) q->f[i] = -v, q->f[mirror] = v;
        else if (t == KERN_F16) q->h[i] = f32_to_f16(-v), q->h[mirror] = f32_to_f16(v);
        else q->h[i] = f32_to_bf16(-v), q->h[mirror] = f32_to_bf16(v);
    }
}

/* A block of a quantised type: random bytes, then the f16 scales. With d and m as below the
 * deviation is DEVIATION and the mean 0; the block's sign is random, so that what the formats lack
 * in symmetry (-8..7) cancels. */
static const struct block_scales {
    int d_at, m_at; /* byte offsets in the block; m_at -1: no minimum */
    float d, m;
} block_scales[KERN_N_DTYPES] = {
    /* q uniform in -128..127, -8..7, -16..15: deviations 73.9, 4.61, 9.23. */
    [KERN_Q8_0] = {0, -1, DEVIATION / 73.9f, 0},
    [KERN_Q4_0] = {0, -1, DEVIATION / 4.64f, 0},
    [KERN_Q5_0] = {0, -1, DEVIATION / 9.25f, 0},
    /* w = d q + m, q in 0..15, 0..31. */
    [KERN_Q4_1] = {0, 2, DEVIATION / 4.61f, -7.5f * DEVIATION / 4.61f},
    [KERN_Q5_1] = {0, 2, DEVIATION / 9.23f, -15.5f * DEVIATION / 9.23f},
    /* w = d sc q - m mn, sc and mn in 0..63. */
    [KERN_Q4_K] = {0, 2, DEVIATION / 255.6f, 7.5f * DEVIATION / 255.6f},
    [KERN_Q5_K] = {0, 2, DEVIATION / 521.3f, 15.5f * DEVIATION / 521.3f},
    /* w = d sc q, sc in -128..127, q in -32..31. */
    [KERN_Q6_K] = {208, -1, DEVIATION / 1366.f, 0},
};

struct fill {
    enum kern_dtype dtype;
    uint64_t seed;
    uint8_t *dst;
    size_t n;           /* elements, or blocks */
    size_t block_bytes; /* of a quantised type */
    const union quantiles *q;
};

/* Four neighbours by the words' four 16-bit parts. */
static inline size_t quantile_of(uint64_t w, int part) {
    return (w >> 16 * part & 0xffff) / (65536 / N_QUANTILES);
}

/* Elements [begin, end), 4 a word; begin is a multiple of 4. */
static void fill_f32(const struct fill *f, size_t begin, size_t end) {
    float *out = (float *)(void *)f->dst;
    for (size_t i = begin; i < end; i += 4) {
        uint64_t w = word(f->seed, i / 4);
        for (size_t j = 0; j < 4 && i + j < end; j++) out[i + j] = f->q->f[quantile_of(w, (int)j)];
    }
}

static void fill_16(const struct fill *f, size_t begin, size_t end) {
    uint16_t *out = (uint16_t *)(void *)f->dst;
    size_t i = begin;
    for (; i + 4 <= end; i += 4) {
        uint64_t w = word(f->seed, i / 4);
        for (int j = 0; j < 4; j++) out[i + (size_t)j] = f->q->h[quantile_of(w, j)];
    }
    for (int j = 0; i < end; i++, j++) out[i] = f->q->h[quantile_of(word(f->seed, i / 4), j)];
}

static void put_scale(uint8_t *at, float value, bool negative) {
    uint16_t bits = (uint16_t)(f32_to_f16(value) ^ negative << 15);
    memcpy(at, &bits, sizeof bits);
}

/* Blocks [begin, end), which begin at whole words: 64 of them, then their scales, whose signs are
 * one word's bits. */
static void fill_blocks(const struct fill *f, size_t begin, size_t end) {
    const struct block_scales *s = &block_scales[f->dtype];
    for (size_t b = begin; b < end; b += 64) {
        size_t n = end - b < 64 ? end - b : 64, at = b * f->block_bytes;
        uint8_t *block = f->dst + at;
        uint64_t signs = word(~f->seed, b / 64), w;
        for (size_t stop = at + n * f->block_bytes; at < stop; at += sizeof w) {
            w = word(f->seed, at / sizeof w);
            if (stop - at >= sizeof w) memcpy(f->dst + at, &w, sizeof w);
            else memcpy(f->dst + at, &w, stop - at);
        }
        for (size_t i = 0; i < n; i++, block += f->block_bytes, signs >>= 1) {
            put_scale(block + s->d_at, s->d, signs & 1);
            if (s->m_at >= 0) put_scale(block + s->m_at, s->m, signs & 1);
        }
    }
}

static void fill_share(void *arg, int idx, int n_threads) {
    const struct fill *f = arg;
    size_t grain = GRAIN, units = (f->n + grain - 1) / grain;
    size_t begin = units * (size_t)idx / (size_t)n_threads * grain;
    size_t end = units * ((size_t)idx + 1) / (size_t)n_threads * grain;
    if (end > f->n) end = f->n;
    if (f->block_bytes) fill_blocks(f, begin, end);
    else if (f->dtype == KERN_F32) fill_f32(f, begin, end);
    else fill_16(f, begin, end);
}

static bool is_norm(enum tensor_role role) {
    return role == TENSOR_OUTPUT_NORM || role == TENSOR_ATTN_NORM || role == TENSOR_FFN_NORM ||
           role == TENSOR_Q_NORM || role == TENSOR_K_NORM || role == TENSOR_ROPE_FREQS;
}

static void fill_ones(enum kern_dtype t, void *dst, size_t n) {
    float *f32 = dst;
    uint16_t *f16 = dst, one = t == KERN_F16 ? f32_to_f16(1) : f32_to_bf16(1);
    for (size_t i = 0; i < n; i++)
        if (t == KERN_F32) f32[i] = 1;
        else f16[i] = one;
}

void model__dummy_fill(const struct tensor_view *v, void *dst, struct threads *t) {
    static const uint64_t seed = 0x7A6E64656D000001u;
    union quantiles q;
    int block = kern_dtype_block(v->dtype);
    size_t n = (size_t)v->rows * (size_t)v->cols;
    ASSERT(n % (size_t)block == 0 && (uintptr_t)dst % 4 == 0);
    if (is_norm(v->role)) {
        ASSERT(block == 1);
        fill_ones(v->dtype, dst, n);
        return;
    }
    struct fill f = {.dtype = v->dtype,
                     .seed = word(seed, (uint64_t)v->layer * TENSOR_N_ROLES + (uint64_t)v->role),
                     .dst = dst,
                     .n = n / (size_t)block,
                     .block_bytes = block > 1 ? kern_dtype_block_bytes(v->dtype) : 0,
                     .q = &q};
    if (block == 1) fill_quantiles(&q, v->dtype);
    threads_run(t, fill_share, &f);
}
