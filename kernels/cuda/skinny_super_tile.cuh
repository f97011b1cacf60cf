#ifndef TANDEM_KERNELS_CUDA_SKINNY_SUPER_TILE_CUH
#define TANDEM_KERNELS_CUDA_SKINNY_SUPER_TILE_CUH

/* Private to skinny_super.cu: a warp's tiles of a K format times up to 8 rows of x, or one. The
 * same sums in the same order as tile_product's. */

#include "kernels/cuda/skinny_quant_tile.cuh"

/* Scales of a tile of each of S strips, one behind the other in shared memory. */
template <enum kern_dtype T, int S>
__device__ static __forceinline__ void load_scales(const uint8_t *at, uint32_t magic,
                                                   quant_scales<T> scales[S]) {
    int g = (int)threadIdx.x % 32 / 4;
#pragma unroll
    for (int s = 0; s < S; s++) {
        scales[s].magic = magic;
        scales[s].load(at + s * quant<T>::SCALES - quant<T>::SCALES_AT, g);
    }
}

/* A tile of each of S strips times x, half by half. */
template <enum kern_dtype T, int S, int ROWS> struct tile_sums {
    using Q = quant<T>;
    quant_scales<T> scales[S];
    float pair[2]; /* sums of x over blocks 2 t and 2 t + 1, row g */

    __device__ __forceinline__ void begin(const uint8_t *head, const uint8_t *, uint32_t magic) {
        load_scales<T, S>(head, magic, scales);
        pair[0] = pair[1] = 0;
    }
    /* Groups 2 half and 2 half + 1: their planes at low and high, each strip's `pitch` bytes behind
     * the one before; x: the lane's values in the first block of its row. */
    __device__ __forceinline__ void add_groups(const uint8_t *low, int pitch, const uint8_t *high,
                                               const uint8_t *x, int half, sums_of acc[S][1]) {
        int lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            quant_words<T> words[S];
#pragma unroll
            for (int s = 0; s < S; s++) words[s].load(low + s * pitch, high + s * pitch, u, lane);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                uint4 xs[1] = {load_x<T, false>(x + 64 * (2 * u + b))};
                float init[1][2][4], sums[1][4];
                block_sums<T>(xs[0], init[0], sums[0]);
                if (Q::MIN) {
                    float sum = row_sum(xs[0]);
                    if (lane % 4 == 2 * half + u) pair[b] = sum;
                }
#pragma unroll
                for (int s = 0; s < S; s++)
                    block_product<T, 1>(words[s], scales[s], 2 * half + u, b, xs, init, sums,
                                        acc[s]);
            }
        }
    }
    /* What the minima contribute. The scales are loaded once more, not kept. */
    __device__ __forceinline__ void end(const uint8_t *head, uint32_t magic, sums_of acc[S][1]) {
        if (!Q::MIN) return;
        split_sums split[1];
        split[0].from(pair[0], pair[1]);
        asm volatile("" ::: "memory");
        load_scales<T, S>(head, magic, scales);
#pragma unroll
        for (int s = 0; s < S; s++) add_minima<T, 1>(scales[s], split, acc[s]);
    }
};

/* The same for one row. Lane 4 g + t has x of block g alone, so of a product with block b column b
 * is right alone, which lane b / 2 of each quad holds; there are the sums so far when block b's
 * turn comes, for they go round the quad. */
template <enum kern_dtype T, int S> struct tile_sums<T, S, 1> {
    using Q = quant<T>;
    static constexpr int PER = Q::HALVES ? 2 : 1; /* scales of a block */
    quant_scales<T> scales[S];
    float own[S][2][2 * PER]; /* [strip][h]: scales of blocks 2 t and 2 t + 1 */
    uint4 x;                  /* of block g */
    float init[2][4];

    __device__ __forceinline__ void begin(const uint8_t *head, const uint8_t *x_at,
                                          uint32_t magic) {
        int t = (int)threadIdx.x % 4;
        load_scales<T, S>(head, magic, scales);
#pragma unroll
        for (int s = 0; s < S; s++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t w = scales[s].scales_of(t, h);
#pragma unroll
                for (int i = 0; i < 2 * PER; i++)
                    own[s][h][i] =
                        quant_times_byte(w, i, scales[s].d[h], Q::HALVES ? 128 : 0, magic);
            }
        x = load_x<T, false>(x_at);
        float sums[4];
        block_sums<T>(x, init, sums);
    }
    __device__ __forceinline__ void add_groups(const uint8_t *low, int pitch, const uint8_t *high,
                                               const uint8_t *, int, sums_of acc[S][1]) {
        int lane = (int)threadIdx.x % 32, before = lane / 4 * 4 + (lane + 3) % 4;
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int s = 0; s < S; s++) {
                quant_words<T> words;
                words.load(low + s * pitch, high + s * pitch, u, lane);
                float c[2 * PER][4];
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    uint32_t a[2][4];
                    words.operands(b, a);
                    float *last = c[PER * b + PER - 1];
                    mma(c[PER * b], a[0], x.x, x.y, init[0]);
                    mma(last, a[1], x.z, x.w, Q::HALVES ? init[1] : last);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float sum = acc[s][0].scaled[2 * h];
#pragma unroll
                    for (int i = 0; i < 2 * PER; i++)
                        sum = fmaf(own[s][h][i], c[i][2 * h + i / PER], sum);
                    acc[s][0].scaled[2 * h] = __shfl_sync(~0u, sum, before);
                }
            }
    }
    __device__ __forceinline__ void end(const uint8_t *, uint32_t, sums_of acc[S][1]) {
        if (!Q::MIN) return;
        int t = (int)threadIdx.x % 4;
        float sum = row_sum(x);
        split_sums split[1];
        split[0].from(__shfl_sync(~0u, sum, 8 * t), __shfl_sync(~0u, sum, 8 * t + 4));
#pragma unroll
        for (int s = 0; s < S; s++) add_minima<T, 1>(scales[s], split, acc[s]);
    }
};

#endif
