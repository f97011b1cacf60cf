#ifndef TANDEM_KERNELS_CUDA_QUANT_CUH
#define TANDEM_KERNELS_CUDA_QUANT_CUH

/* Quantised weights on the device: the layout, packing into it and reading it back. As many bytes
 * as the file's blocks, in an order made for mma.m16n8k16 with the weights as operand A.
 *
 * TILES. A matrix is cut into strips of 16 rows, a strip into tiles of K columns: K = 64, or 256
 * for the K formats. Tiles lie one behind the other, [strip][cols / K rounded up], each one
 * contiguous (a multiple of 16 bytes), so that any run of a strip is one linear copy. Rows behind
 * the last one and columns behind cols (where 32 are left over) have scale and minimum zero.
 *
 * LANES. In mma's A operand lane 4 g + t of a warp (g < 8, t < 4) holds weights of rows g and
 * g + 8. Of each block of 32 columns it owns 8 of each row, e = 0..7:
 *   column 8 t + e                             all formats but
 *   column 4 t + e, e < 4; 16 + 4 t + e - 4    Q6_K, whose scales change every 16 columns
 * and the product takes e 0..3 in a first mma (k 2t, 2t+1, 2t+8, 2t+9 of the instruction are e 0,
 * 1, 2, 3) and e 4..7 in a second one. Activations (operand B) are read in the same order: lane
 * 4 g + t takes the 8 values e = 0..7 of row g, 16 bytes in one piece, once quant_x_place has put
 * them into shared memory.
 *
 * A TILE holds planes for each group of 64 columns (u < K / 64; b < 2: its halves of 32; h < 2: row
 * g + 8 h), all groups of a plane before the next plane:
 *   low   8 bits: 1,024 bytes, value + 128 of (b, h, e) is byte 512 b + 16 lane + 8 h + e
 *         others: 512 bytes, word 2 b + e / 4 of lane's four holds low four bits of (h, e) at bit
 *         8 (e / 2 % 2) + 4 h + 16 (e % 2)
 *   high  5 bits: 128 bytes, one word a lane; bit 4 of (b, h, e) is its bit
 *         s + 4 h + 16 (e % 2), s = 0..3, 8..11 for 4 b + e / 2 = 0..7
 *         6 bits: 256 bytes, two words a lane, one for each b; bits 4, 5 of (h, e) begin at bit
 *         s + 4 h + 16 (e % 2), s = 0, 2, 8, 10 for e / 2 = 0..3
 * and the tile's scales:
 *   Q8_0 Q4_0 Q5_0   64 bytes: f16 d of (g, b, h) at 8 g + 4 b + 2 h
 *   Q4_1 Q5_1        128 bytes: f16 d, m at 16 g + 8 b + 4 h
 *   Q4_K Q5_K        256 bytes: the file's first 16 bytes of row r (d, dmin, 6-bit scales) at 16 r:
 *                    unpacking four scales at once takes so few instructions that 8-bit ones (4
 *                    bytes more in 144) would not pay
 *   Q6_K             288 bytes: 16 scales of row r, + 128, at 16 r; f16 d of (g, h) at
 *                    256 + 4 g + 2 h
 *
 * OPERANDS. One mask takes a pair e, e + 1 of a row out of a word: the stored bits as the low bits
 * of two f16, a subnormal number, stored * 2^-24 exactly, which tensor cores multiply as it is; the
 * rows g + 8 lie four bits higher, so theirs are stored * 2^-20. So no instruction converts; the
 * powers of two and the offsets of the signed formats are undone once, in the sums (quant_unit).
 *
 * Values, as kern_dequantize has them: dw * (stored - OFFSET) + mw.
 *
 * Everything but the mma also compiles for the host, where the layout can be simulated. */

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/kernels.h"

#define QUANT_FN __host__ __device__ static __forceinline__

/* Constants of a format. */
template <enum kern_dtype T> struct quant {
    static constexpr bool BYTES = T == KERN_Q8_0;
    static constexpr bool HALVES = T == KERN_Q6_K; /* two scales in 32 columns */
    static constexpr bool SUPER = T == KERN_Q4_K || T == KERN_Q5_K || T == KERN_Q6_K;
    static constexpr bool MIN =
        T == KERN_Q4_1 || T == KERN_Q5_1 || T == KERN_Q4_K || T == KERN_Q5_K;
    static constexpr int HIGH = T == KERN_Q5_0 || T == KERN_Q5_1 || T == KERN_Q5_K ? 1 /* bits */
                                : T == KERN_Q6_K                                   ? 2
                                                                                   : 0;
    static constexpr int OFFSET = T == KERN_Q8_0   ? 128
                                  : T == KERN_Q4_0 ? 8
                                  : T == KERN_Q5_0 ? 16
                                  : T == KERN_Q6_K ? 32
                                                   : 0;
    static constexpr int K = SUPER ? 256 : 64;     /* columns of a tile */
    static constexpr int BLOCK = SUPER ? 256 : 32; /* of the file */
    static constexpr int FILE_BYTES = T == KERN_Q8_0   ? 34
                                      : T == KERN_Q4_0 ? 18
                                      : T == KERN_Q4_1 ? 20
                                      : T == KERN_Q5_0 ? 22
                                      : T == KERN_Q5_1 ? 24
                                      : T == KERN_Q4_K ? 144
                                      : T == KERN_Q5_K ? 176
                                                       : 210; /* of a block of the file */
    static constexpr int LOW_BYTES = BYTES ? 1024 : 512;      /* of a group of 64 columns */
    static constexpr int HIGH_BYTES = HIGH * 128;
    static constexpr int HIGH_AT = K / 64 * LOW_BYTES; /* in the tile */
    static constexpr int SCALES_AT = HIGH_AT + K / 64 * HIGH_BYTES;
    static constexpr int SCALES = HALVES ? 288 : SUPER ? 256 : MIN ? 128 : 64;
    static constexpr int TILE = SCALES_AT + SCALES; /* bytes */
    static_assert(TILE == 16 * (K / BLOCK) * FILE_BYTES, "the file's bytes per weight");
    static_assert(TILE % 16 == 0, "tiles are copied in pieces of 16 bytes");
};

static inline bool quant_is(enum kern_dtype t) {
    return t >= KERN_Q8_0 && t < KERN_N_DTYPES;
}
/* Columns and bytes of a tile, from the file's block. */
static inline int quant_tile_cols(enum kern_dtype t) {
    return kern_dtype_block(t) == 256 ? 256 : 64;
}
static inline size_t quant_tile_bytes(enum kern_dtype t) {
    return (size_t)16 * kern_dtype_bytes(t, (size_t)quant_tile_cols(t));
}

/* Call f.template run<T>() for a run-time type. */
template <typename F> static inline int quant_dispatch(enum kern_dtype t, F &&f) {
    switch (t) {
    case KERN_Q8_0:
        return f.template run<KERN_Q8_0>();
    case KERN_Q4_0:
        return f.template run<KERN_Q4_0>();
    case KERN_Q4_1:
        return f.template run<KERN_Q4_1>();
    case KERN_Q5_0:
        return f.template run<KERN_Q5_0>();
    case KERN_Q5_1:
        return f.template run<KERN_Q5_1>();
    case KERN_Q4_K:
        return f.template run<KERN_Q4_K>();
    case KERN_Q5_K:
        return f.template run<KERN_Q5_K>();
    default:
        return f.template run<KERN_Q6_K>();
    }
}

/* ---- Places ---- */

/* Column inside a block of 32 that lane part t owns as e. */
template <enum kern_dtype T> QUANT_FN int quant_col(int t, int e) {
    return quant<T>::HALVES ? (e / 4) * 16 + 4 * t + e % 4 : 8 * t + e;
}
/* The other way round. */
template <enum kern_dtype T> QUANT_FN void quant_owner(int col, int *t, int *e) {
    *t = quant<T>::HALVES ? col % 16 / 4 : col / 8;
    *e = quant<T>::HALVES ? col / 16 * 4 + col % 4 : col % 8;
}
/* First bit of (h, e) in word 2 b + e / 4 of the low plane (not Q8_0). */
QUANT_FN int quant_low_bit(int h, int e) {
    return 8 * (e / 2 % 2) + 4 * h + 16 * (e % 2);
}
/* First bit of (b, h, e) in its word of the high plane. */
template <enum kern_dtype T> QUANT_FN int quant_high_bit(int b, int h, int e) {
    int i = quant<T>::HIGH == 1 ? 4 * b + e / 2 : e / 2;
    int s = quant<T>::HIGH == 1 ? i + i / 4 * 4 : i / 2 * 8 + i % 2 * 2;
    return s + 4 * h + 16 * (e % 2);
}
/* What an operand of row g + 8 h must be multiplied by. */
template <enum kern_dtype T> QUANT_FN float quant_unit(int h) {
    return h && !quant<T>::BYTES ? 1048576.f : 16777216.f;
}
/* An operand of row g + 8 h that holds -OFFSET twice. */
template <enum kern_dtype T> QUANT_FN uint32_t quant_minus_offset(int h) {
    return 0x80008000u |
           (uint32_t)quant<T>::OFFSET * (h && !quant<T>::BYTES ? 0x00100010u : 0x00010001u);
}

/* Bytes 0..7 and 8..15 of 16 bytes of a row of activations (columns 8 j .. 8 j + 7, j < 4 in a
 * block of 32) go to these bytes of the row's 64 of that block in shared memory. */
template <enum kern_dtype T> QUANT_FN void quant_x_place(int j, int *first, int *second) {
    *first = quant<T>::HALVES ? j % 2 * 32 + j / 2 * 8 : 16 * j;
    *second = quant<T>::HALVES ? *first + 16 : *first + 8;
}

/* ---- Packing ---- */

QUANT_FN uint32_t quant_u16(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}
QUANT_FN float quant_f16(uint32_t bits) {
    __half_raw r;
    r.x = (unsigned short)bits;
    return __half2float(__half(r));
}

/* The stored bits (Q8_0: + 128) of weight k of a file's block. */
template <enum kern_dtype T> QUANT_FN uint32_t quant_stored(const uint8_t *p, int k) {
    if (T == KERN_Q8_0) return p[2 + k] ^ 0x80u;
    if (T == KERN_Q4_K || T == KERN_Q5_K) {
        const uint8_t *q = p + (T == KERN_Q5_K ? 48 : 16);
        uint32_t v = q[k / 64 * 32 + k % 32];
        v = k / 32 % 2 ? v >> 4 : v & 15;
        if (T == KERN_Q5_K) v |= (uint32_t)(p[16 + k % 32] >> k / 32 & 1) << 4;
        return v;
    }
    if (T == KERN_Q6_K) {
        int half = k / 128, quarter = k % 128 / 32;
        uint32_t v = p[64 * half + k % 64];
        v = quarter < 2 ? v & 15 : v >> 4;
        return v | (uint32_t)(p[128 + 32 * half + k % 32] >> 2 * quarter & 3) << 4;
    }
    const uint8_t *high = p + (quant<T>::MIN ? 4 : 2), *q = high + (quant<T>::HIGH ? 4 : 0);
    uint32_t v = k < 16 ? q[k] & 15 : q[k - 16] >> 4;
    if (quant<T>::HIGH) v |= (uint32_t)(high[k / 8] >> k % 8 & 1) << 4;
    return v;
}

/* Weight k of a tile's row, from the file's blocks at p; NULL and columns behind `cols`: zero. */
template <enum kern_dtype T> QUANT_FN uint32_t quant_raw(const uint8_t *p, int k, int cols) {
    if (!p || k >= cols) return 0;
    return quant_stored<T>(p + k / quant<T>::BLOCK * quant<T>::FILE_BYTES, k % quant<T>::BLOCK);
}

/* The values of group u, half b that `lane` owns; row[h]: the file's bytes of row g + 8 h from the
 * tile's first column on. `high` gathers the bits of the high plane. */
template <enum kern_dtype T>
QUANT_FN void quant_pack_half(uint8_t *tile, int lane, int u, int b, const uint8_t *const row[2],
                              int cols, uint32_t *high) {
    using Q = quant<T>;
    uint32_t word[2] = {0, 0};
    uint8_t *to = tile + u * Q::LOW_BYTES + 16 * lane;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 8; e++) {
            uint32_t v = quant_raw<T>(row[h], 64 * u + 32 * b + quant_col<T>(lane % 4, e), cols);
            if (Q::BYTES) to[512 * b + 8 * h + e] = (uint8_t)v;
            word[e / 4] |= (v & 15) << quant_low_bit(h, e);
            if (Q::HIGH) *high |= v >> 4 << quant_high_bit<T>(b, h, e);
        }
    for (int i = 0; !Q::BYTES && i < 2; i++) *(uint32_t *)(to + 4 * (2 * b + i)) = word[i];
}

/* The scales of row g + 8 h; one lane of the four of a g calls it for both h. */
template <enum kern_dtype T>
QUANT_FN void quant_pack_scales(uint8_t *tile, int g, int h, const uint8_t *row, int cols) {
    using Q = quant<T>;
    uint8_t *s = tile + Q::SCALES_AT;
    for (int b = 0; !Q::SUPER && b < 2; b++) {
        const uint8_t *p = row && 32 * b < cols ? row + b * Q::FILE_BYTES : NULL;
        uint8_t *to = s + (Q::MIN ? 16 * g + 8 * b + 4 * h : 8 * g + 4 * b + 2 * h);
        *(uint16_t *)to = (uint16_t)(p ? quant_u16(p) : 0);
        if (Q::MIN) *(uint16_t *)(to + 2) = (uint16_t)(p ? quant_u16(p + 2) : 0);
    }
    if (Q::SUPER) {
        const int from = T == KERN_Q6_K ? 192 : 0, flip = T == KERN_Q6_K ? 0x80 : 0;
        for (int i = 0; i < 16; i++)
            s[16 * (g + 8 * h) + i] = (uint8_t)(row ? row[from + i] ^ flip : 0);
    }
    if (T == KERN_Q6_K)
        *(uint16_t *)(s + 256 + 4 * g + 2 * h) = (uint16_t)(row ? quant_u16(row + 208) : 0);
}

/* A lane's share of a tile that has `cols` columns. */
template <enum kern_dtype T>
QUANT_FN void quant_pack_lane(uint8_t *tile, int lane, const uint8_t *const row[2], int cols) {
    using Q = quant<T>;
    for (int u = 0; u < Q::K / 64; u++) {
        uint32_t high = 0;
        uint8_t *to = tile + Q::HIGH_AT + u * Q::HIGH_BYTES;
        for (int b = 0; b < 2; b++) {
            quant_pack_half<T>(tile, lane, u, b, row, cols, &high);
            if (Q::HIGH == 2) {
                *(uint32_t *)(to + 8 * lane + 4 * b) = high;
                high = 0;
            }
        }
        if (Q::HIGH == 1) *(uint32_t *)(to + 4 * lane) = high;
    }
    int h = lane % 4; /* two lanes of a quad bring the scales */
    if (h < 2) quant_pack_scales<T>(tile, lane / 4, h, h ? row[1] : row[0], cols);
}

/* ---- Scales ---- */

QUANT_FN float quant_as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    union {
        uint32_t u;
        float f;
    } v = {bits};
    return v.f;
#endif
}
/* (w & mask) | v, in one instruction. */
QUANT_FN uint32_t quant_lop(uint32_t w, uint32_t mask, uint32_t v) {
#ifdef __CUDA_ARCH__
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(w), "r"(mask), "r"(v));
    return r;
#else
    return (w & mask) | v;
#endif
}
QUANT_FN uint32_t quant_perm(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, selector);
#else
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
#endif
}
/* (byte i of a word - offset) * d for an f16 d, exact. magic: 0x47000000 in a register (as a
 * constant it would take the place of the selector, which then has to be loaded each time). */
QUANT_FN float quant_times_byte(uint32_t word, int i, float d, int offset, uint32_t magic) {
#ifdef __CUDA_ARCH__
    /* The byte becomes bits 8..15 of 2^15, whose unit is 1; 2^15 + offset times an f16 is exact, so
     * one fused operation takes it off. */
    float v = __uint_as_float(__byte_perm(word, magic, 0x7404u | (uint32_t)i << 4));
    return fmaf(v, d, -(32768.f + (float)offset) * d);
#else
    (void)magic;
    return (float)((int)(word >> 8 * i & 255) - offset) * d;
#endif
}

/* What a lane knows of a tile's scales: rows g and g + 8. */
template <enum kern_dtype T> struct quant_scales {
    uint32_t raw[2][4]; /* [h]; K formats: scales, scales, minima, minima; Q6_K: scales */
    float d[2], dmin[2];
    uint32_t magic;

    __host__ __device__ __forceinline__ explicit quant_scales(uint32_t magic_ = 0x47000000u)
        : magic(magic_) {}
    /* From a tile in shared or device memory. */
    __host__ __device__ __forceinline__ void load(const uint8_t *tile, int g) {
        using Q = quant<T>;
        const uint8_t *s = tile + Q::SCALES_AT;
        if (!Q::SUPER && Q::MIN) {
            uint4 v = *(const uint4 *)(s + 16 * g);
            raw[0][0] = v.x, raw[1][0] = v.y, raw[0][1] = v.z, raw[1][1] = v.w;
        } else if (!Q::SUPER) {
            uint2 v = *(const uint2 *)(s + 8 * g);
            raw[0][0] = v.x, raw[0][1] = v.y;
        } else {
            for (int h = 0; h < 2; h++) load_super(s, g, h);
        }
    }
    __host__ __device__ __forceinline__ void load_super(const uint8_t *s, int g, int h) {
        uint4 v = *(const uint4 *)(s + 16 * (g + 8 * h));
        if (T == KERN_Q6_K) {
            raw[h][0] = v.x, raw[h][1] = v.y, raw[h][2] = v.z, raw[h][3] = v.w;
            d[h] = quant_f16(*(const uint16_t *)(s + 256 + 4 * g + 2 * h));
            return;
        }
        d[h] = quant_f16(v.x & 0xffff);
        dmin[h] = -quant_f16(v.x >> 16);
        raw[h][0] = v.y & 0x3f3f3f3fu;
        raw[h][1] = quant_lop(v.y >> 2, 0x30303030u, v.w & 0x0f0f0f0fu);
        raw[h][2] = v.z & 0x3f3f3f3fu;
        raw[h][3] = quant_lop(v.z >> 2, 0x30303030u, v.w >> 4 & 0x0f0f0f0fu);
    }
    /* dw of block s of 32 (0..K / 32 - 1), its half `half` (Q6_K only), row h. Exact. */
    __host__ __device__ __forceinline__ float scale(int s, int half, int h) const {
        if (T == KERN_Q6_K) {
            int i = 2 * s + half;
            return quant_times_byte(raw[h][i / 4], i % 4, d[h], 128, magic);
        }
        if (quant<T>::SUPER) return quant_times_byte(raw[h][s / 4], s % 4, d[h], 0, magic);
        if (quant<T>::MIN) return quant_f16(raw[h][s] & 0xffff);
        return quant_f16(h ? raw[0][s] >> 16 : raw[0][s] & 0xffff);
    }
    /* K formats: the integers that scale() multiplies with d for blocks 2 t, 2 t + 1, a byte each.
     */
    __host__ __device__ __forceinline__ uint32_t scales_of(int t, int h) const {
        if (T == KERN_Q6_K) {
            uint32_t low = t % 2 ? raw[h][1] : raw[h][0], high = t % 2 ? raw[h][3] : raw[h][2];
            return t / 2 ? high : low;
        }
        return quant_perm(raw[h][0], raw[h][1], (uint32_t)(0x0010 + 0x0022 * t));
    }
    /* K formats: scale() then answers for the tile's second half as it did for the first. */
    __host__ __device__ __forceinline__ void next_half() {
        for (int h = 0; h < 2; h++) {
            raw[h][0] = raw[h][T == KERN_Q6_K ? 2 : 1];
            raw[h][1] = raw[h][T == KERN_Q6_K ? 3 : 1];
        }
    }
    /* The 6-bit minima of blocks 2 t, 2 t + 1 as an operand of 16-bit floats: 0x43004300 makes them
     * 128 + minimum in bf16. */
    __host__ __device__ __forceinline__ uint32_t min_pair(int t, int h) const {
        uint32_t w = quant_perm(raw[h][2], raw[h][3], (uint32_t)(0x0100 + 0x0202 * t));
        return quant_lop(w, 0x003f003fu, 0x43004300u);
    }
    /* mw of block s, row h: what is added. Exact. */
    __host__ __device__ __forceinline__ float min(int s, int h) const {
        if (!quant<T>::MIN) return 0;
        if (quant<T>::SUPER) return quant_times_byte(raw[h][2 + s / 4], s % 4, dmin[h], 0, magic);
        return quant_f16(raw[h][s] >> 16);
    }
};

/* ---- Values ---- */

/* A lane's stored bits of a group of 64 columns. */
template <enum kern_dtype T> struct quant_words {
    uint32_t low[quant<T>::BYTES ? 8 : 4], high[2];

    __host__ __device__ __forceinline__ void load(const uint8_t *tile, int u, int lane) {
        load(tile, tile + quant<T>::HIGH_AT, u, lane);
    }
    /* Of the u-th group of these planes. */
    __host__ __device__ __forceinline__ void load(const uint8_t *low_plane,
                                                  const uint8_t *high_plane, int u, int lane) {
        using Q = quant<T>;
        const uint8_t *l = low_plane + u * Q::LOW_BYTES + 16 * lane;
        const uint8_t *h = high_plane + u * Q::HIGH_BYTES;
        for (int i = 0; i < (Q::BYTES ? 2 : 1); i++) {
            uint4 v = *(const uint4 *)(l + 512 * i);
            low[4 * i] = v.x, low[4 * i + 1] = v.y, low[4 * i + 2] = v.z, low[4 * i + 3] = v.w;
        }
        if (Q::HIGH == 1) high[0] = *(const uint32_t *)(h + 4 * lane);
        if (Q::HIGH == 2) {
            uint2 v = *(const uint2 *)(h + 8 * lane);
            high[0] = v.x, high[1] = v.y;
        }
    }
    /* Stored bits of half b as f16, which times quant_unit are the stored values: A operands of the
     * mma of e 0..3 and of e 4..7. */
    __host__ __device__ __forceinline__ void operands(int b, uint32_t a[2][4]) const {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                if (quant<T>::BYTES) {
                    uint32_t selector = pair ? 0x4342 : 0x4140;
                    a[i][2 * pair] = quant_perm(low[4 * b + i], 0, selector);
                    a[i][2 * pair + 1] = quant_perm(low[4 * b + 2 + i], 0, selector);
                } else {
                    nibbles(b, i, pair, &a[i][2 * pair]);
                }
            }
    }

  private:
    /* Pair 4 i + 2 pair of rows g and g + 8. */
    __host__ __device__ __forceinline__ void nibbles(int b, int i, int pair, uint32_t *a) const {
        using Q = quant<T>;
        constexpr uint32_t MASK = (1u << Q::HIGH) - 1;
        uint32_t w = low[2 * b + i] >> 8 * pair;
        a[0] = w & 0x000f000fu;
        a[1] = w & 0x00f000f0u;
        if (Q::HIGH) {
            int s = quant_high_bit<T>(b, 0, 4 * i + 2 * pair);
            uint32_t from = high[Q::HIGH == 2 ? b : 0];
            uint32_t bits = s < 4 ? from << (4 - s) : from >> (s - 4);
            a[0] = quant_lop(bits, MASK * 0x00100010u, a[0]);
            a[1] = quant_lop(bits, MASK * 0x01000100u, a[1]);
        }
    }
};

/* Weight (r, k) of a tile, as kern_dequantize gives it. */
template <enum kern_dtype T> QUANT_FN float quant_value(const uint8_t *tile, int r, int k) {
    using Q = quant<T>;
    int u = k / 64, b = k / 32 % 2, h = r / 8, t, e;
    quant_owner<T>(k % 32, &t, &e);
    int lane = r % 8 * 4 + t;
    const uint8_t *low = tile + u * Q::LOW_BYTES + 16 * lane;
    const uint8_t *high = tile + Q::HIGH_AT + u * Q::HIGH_BYTES;
    uint32_t v;
    if (Q::BYTES) v = low[512 * b + 8 * h + e];
    else v = *(const uint32_t *)(low + 4 * (2 * b + e / 4)) >> quant_low_bit(h, e) & 15;
    if (Q::HIGH) {
        uint32_t word =
            *(const uint32_t *)(Q::HIGH == 1 ? high + 4 * lane : high + 8 * lane + 4 * b);
        v |= (word >> quant_high_bit<T>(b, h, e) & ((1u << Q::HIGH) - 1)) << 4;
    }
    quant_scales<T> s;
    s.load(tile, r % 8);
    float q = (float)((int)v - Q::OFFSET);
    float dw = s.scale(k / 32, k / 16 % 2, h);
    return Q::MIN ? fmaf(dw, q, s.min(k / 32, h)) : dw * q;
}

#endif
