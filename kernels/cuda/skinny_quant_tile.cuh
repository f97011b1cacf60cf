#ifndef TANDEM_KERNELS_CUDA_SKINNY_QUANT_TILE_CUH
#define TANDEM_KERNELS_CUDA_SKINNY_QUANT_TILE_CUH

/* Private to skinny_quant.cu: a warp's tile of quantised weights (quant.cuh) in shared memory times
 * 8 or 16 rows of x. */

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/quant.cuh"

/* ---- Instructions ---- */

/* d = a b + c */
__device__ static __forceinline__ void mma(float d[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b0, uint32_t b1,
                                           const float c[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}
__device__ static __forceinline__ void mma(float d[4], const uint32_t a[4], uint32_t b0,
                                           uint32_t b1, const float c[4]) {
    mma(d, a[0], a[1], a[2], a[3], b0, b1, c);
}
/* The same with bf16 operands, and its half with 8 columns. */
__device__ static __forceinline__ void mma_bf16(float d[4], const uint32_t a[2], uint32_t b0,
                                                uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %4, %5}, "
        "{%6, %7}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0), "r"(b1));
}
__device__ static __forceinline__ void mma_bf16(float d[4], const uint32_t a[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

/* ---- Activations ---- */

__device__ static __forceinline__ uint32_t half_of_bf16(uint32_t v) {
    __half2 h = to_act_half2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
    return *(uint32_t *)&h;
}
/* The lane's 8 values of one row in one block of 32 columns, in mma's order. */
template <enum kern_dtype T, bool BF16>
__device__ static __forceinline__ uint4 load_x(const uint8_t *at) {
    uint4 v;
    if (quant<T>::HALVES) {
        uint2 a = *(const uint2 *)at, b = *(const uint2 *)(at + 32);
        v = make_uint4(a.x, a.y, b.x, b.y);
    } else {
        v = *(const uint4 *)at;
    }
    if (BF16)
        v = make_uint4(half_of_bf16(v.x), half_of_bf16(v.y), half_of_bf16(v.z), half_of_bf16(v.w));
    return v;
}

/* ---- A group of 64 columns ---- */

/* Sums of a lane: rows g, g, g + 8, g + 8 by columns 2 t, 2 t + 1. */
struct sums_of {
    float scaled[4]; /* dw c */
    float added[4];  /* mw s */
};

/* What the sums of x over one block of 32 contribute, for all strips. init[half]: initial values of
 * the products; sums: s (formats with f16 minima). */
template <enum kern_dtype T>
__device__ static __forceinline__ void block_sums(const uint4 &b, float init[2][4], float sums[4]) {
    using Q = quant<T>;
    const float zero[4] = {0, 0, 0, 0};
    const uint32_t o0 = quant_minus_offset<T>(0), o1 = quant_minus_offset<T>(1), one = 0x3c003c00u;
    if (Q::OFFSET && Q::HALVES) {
        mma(init[0], o0, o1, o0, o1, b.x, b.y, zero);
        mma(init[1], o0, o1, o0, o1, b.z, b.w, zero);
    } else if (Q::OFFSET) {
        mma(init[0], o0, o1, o0, o1, b.x, b.y, zero);
        mma(init[0], o0, o1, o0, o1, b.z, b.w, init[0]);
    } else {
        for (int i = 0; i < 4; i++) init[0][i] = 0;
        if (Q::SUPER) return;
        mma(sums, one, one, one, one, b.x, b.y, zero);
        mma(sums, one, one, one, one, b.z, b.w, sums);
    }
}

/* Add one group of one strip times x. */
template <enum kern_dtype T, int NT>
__device__ static __forceinline__ void block_product(const quant_words<T> &words,
                                                     const quant_scales<T> &scales, int u, int half,
                                                     const uint4 x[NT], const float init[NT][2][4],
                                                     const float sums[NT][4], sums_of acc[NT]) {
    using Q = quant<T>;
    uint32_t a[2][4];
    words.operands(half, a);
    int s = 2 * u + half;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float c[4], c2[4];
        mma(c, a[0], x[nt].x, x[nt].y, init[nt][0]);
        if (Q::HALVES) mma(c2, a[1], x[nt].z, x[nt].w, init[nt][1]);
        else mma(c, a[1], x[nt].z, x[nt].w, c);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            acc[nt].scaled[i] = fmaf(scales.scale(s, 0, i / 2), c[i], acc[nt].scaled[i]);
            if (Q::HALVES)
                acc[nt].scaled[i] = fmaf(scales.scale(s, 1, i / 2), c2[i], acc[nt].scaled[i]);
            if (Q::MIN && !Q::SUPER)
                acc[nt].added[i] = fmaf(scales.min(s, i / 2), sums[nt][i % 2], acc[nt].added[i]);
        }
    }
}

/* ---- Minima of the K formats ---- */

/* The sum of x over a block of 32, of row g, in every lane of it (the registers of x are taken for
 * two rows of operand A). */
__device__ static __forceinline__ float row_sum(const uint4 &x) {
    const float zero[4] = {0, 0, 0, 0};
    const uint32_t one = 0x3c003c00u;
    float d[4];
    mma(d, x.x, x.y, x.z, x.w, one, one, zero);
    return d[0] + d[2];
}

/* The sums of a tile as three bf16 each: their sum is exact but for the last bit. */
struct split_sums {
    uint32_t part[3];
    __device__ __forceinline__ void from(float a, float b) {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
            part[i] = *(uint32_t *)&h;
            a -= __uint_as_float(part[i] << 16);
            b -= __uint_as_float(part[i] & 0xffff0000u);
        }
    }
};

template <enum kern_dtype T, int NT>
__device__ static __forceinline__ void add_minima(const quant_scales<T> &scales,
                                                  const split_sums split[NT], sums_of acc[NT]) {
    uint32_t a[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t bias = 0x43004300u, v = scales.min_pair((int)threadIdx.x % 4, h);
        __nv_bfloat162 m = __hsub2(*(__nv_bfloat162 *)&v, *(__nv_bfloat162 *)&bias);
        a[h] = *(uint32_t *)&m;
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float c[4] = {0, 0, 0, 0};
        mma_bf16(c, a, split[nt].part[2]);
        mma_bf16(c, a, split[nt].part[0], split[nt].part[1]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[nt].added[i] = fmaf(scales.dmin[i / 2], c[i], acc[nt].added[i]);
    }
}

/* ---- A tile ---- */

/* Where the lane finds its values of x: row nt's in block 0 of the tile at at[nt]. */
template <int NT> struct places {
    const uint8_t *at[NT];
    int block; /* bytes to the next block of 32 columns */
};

/* Add 64 columns of each of S strips times x: group u of the tile, group v of what scales tell. */
template <enum kern_dtype T, int S, int NT, bool BF16>
__device__ static __forceinline__ void
group_product(const uint8_t *tile, int pitch, int u, int v, const quant_scales<T> scales[S],
              const places<NT> &xs, float pair[NT][2], sums_of acc[S][NT]) {
    using Q = quant<T>;
    quant_words<T> words[S];
#pragma unroll
    for (int s = 0; s < S; s++) words[s].load(tile + s * pitch, u, (int)threadIdx.x % 32);
#pragma unroll
    for (int b = 0; b < 2; b++) {
        uint4 x[NT];
        float init[NT][2][4], sums[NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            x[nt] = load_x<T, BF16>(xs.at[nt] + (2 * u + b) * xs.block);
            block_sums<T>(x[nt], init[nt], sums[nt]);
            if (Q::SUPER && Q::MIN) {
                float sum = row_sum(x[nt]);
                if ((int)threadIdx.x % 4 == u) pair[nt][b] = sum;
            }
        }
#pragma unroll
        for (int s = 0; s < S; s++)
            block_product<T, NT>(words[s], scales[s], v, b, x, init, sums, acc[s]);
    }
}

/* Add a tile of each of S strips, `pitch` bytes apart in shared memory, times x. */
template <enum kern_dtype T, int S, int NT, bool BF16>
__device__ static __forceinline__ void tile_product(const uint8_t *tile, int pitch,
                                                    const places<NT> &xs, uint32_t magic,
                                                    sums_of acc[S][NT]) {
    using Q = quant<T>;
    int g = (int)threadIdx.x % 32 / 4;
    quant_scales<T> scales[S];
    float pair[NT][2] = {}; /* sums of x over blocks 2 t and 2 t + 1, row g */
#pragma unroll
    for (int s = 0; s < S; s++) scales[s].magic = magic, scales[s].load(tile + s * pitch, g);
    if (!Q::SUPER) {
        group_product<T, S, NT, BF16>(tile, pitch, 0, 0, scales, xs, pair, acc);
        return;
    }
#pragma unroll 1
    for (int u = 0; u < 4; u += 2) {
        group_product<T, S, NT, BF16>(tile, pitch, u, 0, scales, xs, pair, acc);
        group_product<T, S, NT, BF16>(tile, pitch, u + 1, 1, scales, xs, pair, acc);
#pragma unroll
        for (int s = 0; s < S; s++) scales[s].next_half();
    }
    if (!Q::MIN) return;
    split_sums split[NT];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) split[nt].from(pair[nt][0], pair[nt][1]);
    asm volatile("" ::: "memory"); /* the minima are loaded here, not kept in registers */
#pragma unroll
    for (int s = 0; s < S; s++) {
        scales[s].load(tile + s * pitch, g);
        add_minima<T, NT>(scales[s], split, acc[s]);
    }
}

#endif
