#ifndef TANDEM_KERNELS_CUDA_PHILOX_CUH
#define TANDEM_KERNELS_CUDA_PHILOX_CUH

/* The random numbers of base/rng.h on the device: the same bits for (seed, position, purpose,
 * index). */

#include "base/rng.h"

struct philox_block {
    uint32_t r[4];
};

/* Draws 4 * block .. 4 * block + 3. */
__device__ static inline philox_block philox(uint64_t seed, uint64_t position, uint32_t purpose,
                                             uint32_t block) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = purpose, c3 = block;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

/* Uniform in (0, 1): (r0 + (r1 + 1/2) / 2^32) / 2^32. */
__device__ static inline double philox_uniform(uint64_t seed, uint64_t position, uint32_t purpose) {
    philox_block b = philox(seed, position, purpose, 0);
    return ((double)b.r[0] + ((double)b.r[1] + 0.5) * 0x1p-32) * 0x1p-32;
}

#endif
