#include "kernels/kernels.h"

#include "base/err.h"
#include "base/half.h"

/* Layouts are those of GGUF files (ggml's block structures): little-endian, f16 scales. Every
 * expression rounds at most once to f32, so fusing or reordering would give the same bits. */

static const struct dtype {
    const char *name;
    int block;
    int bytes; /* of a block */
} dtypes[KERN_N_DTYPES] = {
    [KERN_F32] = {"F32", 1, 4},
    [KERN_F16] = {"F16", 1, 2},
    [KERN_BF16] = {"BF16", 1, 2},
    [KERN_Q8_0] = {"Q8_0", 32, 2 + 32},
    [KERN_Q4_0] = {"Q4_0", 32, 2 + 16},
    [KERN_Q4_1] = {"Q4_1", 32, 4 + 16},
    [KERN_Q5_0] = {"Q5_0", 32, 2 + 4 + 16},
    [KERN_Q5_1] = {"Q5_1", 32, 4 + 4 + 16},
    [KERN_Q4_K] = {"Q4_K", 256, 4 + 12 + 128},
    [KERN_Q5_K] = {"Q5_K", 256, 4 + 12 + 32 + 128},
    [KERN_Q6_K] = {"Q6_K", 256, 128 + 64 + 16 + 2},
};

static const struct dtype *dtype(enum kern_dtype t) {
    ASSERT((unsigned)t < KERN_N_DTYPES);
    return &dtypes[t];
}

const char *kern_dtype_name(enum kern_dtype t) {
    return dtype(t)->name;
}
int kern_dtype_block(enum kern_dtype t) {
    return dtype(t)->block;
}
size_t kern_dtype_block_bytes(enum kern_dtype t) {
    return (size_t)dtype(t)->bytes;
}

size_t kern_dtype_bytes(enum kern_dtype t, size_t n) {
    size_t block = (size_t)dtype(t)->block;
    ASSERT(n % block == 0);
    return n / block * (size_t)dtype(t)->bytes;
}

size_t kern_kv_token_bytes(enum kern_dtype t, int head_dim) {
    size_t n = (size_t)head_dim;
    if (t == KERN_Q8_0) return (n + 3) / 4 * 4 + (n + 31) / 32 * 2;
    return dtype(t)->block == 1 ? n * (size_t)dtype(t)->bytes : 0;
}

static uint16_t read_u16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}
static uint32_t read_u32(const uint8_t *p) {
    return (uint32_t)read_u16(p) | (uint32_t)read_u16(p + 2) << 16;
}
static float read_f16(const uint8_t *p) {
    return f16_to_f32(read_u16(p));
}

static void q8_0(const uint8_t *p, float *out) {
    float d = read_f16(p);
    for (int k = 0; k < 32; k++) out[k] = d * (float)(int8_t)p[2 + k];
}

/* Four and five bits: byte k holds the values k (low nibble) and k + 16 (high); bit k of `high` is
 * bit 4 of value k. */
static void q45(float d, float m, int offset, uint32_t high, const uint8_t *q, float *out) {
    for (int k = 0; k < 16; k++) {
        int lo = (q[k] & 15) | (int)(high >> k & 1) << 4;
        int hi = q[k] >> 4 | (int)(high >> (k + 16) & 1) << 4;
        out[k] = d * (float)(lo - offset) + m;
        out[k + 16] = d * (float)(hi - offset) + m;
    }
}

/* The eight 6-bit scales and minima of a K block's 12 bytes. */
static void k_scales(const uint8_t *p, int j, int *scale, int *min) {
    if (j < 4) {
        *scale = p[j] & 63;
        *min = p[j + 4] & 63;
    } else {
        *scale = (p[j + 4] & 15) | p[j - 4] >> 6 << 4;
        *min = p[j + 4] >> 4 | p[j] >> 6 << 4;
    }
}

/* Q4_K and Q5_K (high != NULL): sub-blocks 2c and 2c + 1 are the low and high nibbles of the same
 * 32 bytes; their fifth bits are bits 2c and 2c + 1 of the 32 bytes at `high`. */
static void q45_k(const uint8_t *p, const uint8_t *high, const uint8_t *q, float *out) {
    float d = read_f16(p), dmin = read_f16(p + 2);
    for (int j = 0; j < 8; j++) {
        int scale, min;
        k_scales(p + 4, j, &scale, &min);
        float dw = d * (float)scale, mw = dmin * (float)min;
        for (int k = 0; k < 32; k++) {
            int v = j & 1 ? q[j / 2 * 32 + k] >> 4 : q[j / 2 * 32 + k] & 15;
            if (high) v |= (high[k] >> j & 1) << 4;
            out[j * 32 + k] = dw * (float)v - mw;
        }
    }
}

/* Q6_K: each half of 128 has 64 bytes of low nibbles, 32 bytes of bit pairs and 8 signed scales
 * of 16. */
static void q6_k(const uint8_t *p, float *out) {
    float d = read_f16(p + 208);
    for (int half = 0; half < 2; half++) {
        const uint8_t *lo = p + 64 * half, *hi = p + 128 + 32 * half, *sc = p + 192 + 8 * half;
        for (int k = 0; k < 128; k++) {
            int quarter = k / 32, low = lo[k % 64];
            int v = (k < 64 ? low & 15 : low >> 4) | (hi[k % 32] >> 2 * quarter & 3) << 4;
            out[128 * half + k] = d * (float)(int8_t)sc[k / 16] * (float)(v - 32);
        }
    }
}

static void dequantize_block(enum kern_dtype t, const uint8_t *p, float *out) {
    switch (t) {
    case KERN_F32:
        *out = half_bits_to_f32(read_u32(p));
        return;
    case KERN_F16:
        *out = read_f16(p);
        return;
    case KERN_BF16:
        *out = bf16_to_f32(read_u16(p));
        return;
    case KERN_Q8_0:
        q8_0(p, out);
        return;
    case KERN_Q4_0:
        q45(read_f16(p), 0, 8, 0, p + 2, out);
        return;
    case KERN_Q4_1:
        q45(read_f16(p), read_f16(p + 2), 0, 0, p + 4, out);
        return;
    case KERN_Q5_0:
        q45(read_f16(p), 0, 16, read_u32(p + 2), p + 6, out);
        return;
    case KERN_Q5_1:
        q45(read_f16(p), read_f16(p + 2), 0, read_u32(p + 4), p + 8, out);
        return;
    case KERN_Q4_K:
        q45_k(p, NULL, p + 16, out);
        return;
    case KERN_Q5_K:
        q45_k(p, p + 16, p + 48, out);
        return;
    case KERN_Q6_K:
        q6_k(p, out);
        return;
    case KERN_N_DTYPES:
        break;
    }
    ASSERT(!"a dtype");
}

void kern_dequantize(enum kern_dtype t, const void *src, float *dst, size_t n) {
    const struct dtype *d = dtype(t);
    ASSERT(n % (size_t)d->block == 0);
    const uint8_t *p = src;
    for (size_t i = 0; i < n; i += (size_t)d->block, p += d->bytes) dequantize_block(t, p, dst + i);
}
