#ifndef TANDEM_KERNELS_CUDA_WGMMA_CUH
#define TANDEM_KERNELS_CUDA_WGMMA_CUH

/* Matrix products of a warpgroup (wgmma), which sm_90a alone has: HAVE_WGMMA tells. They run beside
 * what the warps do then, read shared memory by themselves, and write registers that nobody may
 * touch before wgmma_wait; so a product goes: wgmma_fence, the products, wgmma_commit, ..,
 * wgmma_wait, hold. What threads wrote to shared memory is seen behind async_fence and a barrier.
 */

#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1
#else
#define HAVE_WGMMA 0
#endif

#if HAVE_WGMMA
__device__ static inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ static inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until all groups but the newest N are done. */
template <int N> __device__ static inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
#endif

/* Keeps the compiler from moving uses of registers that wgmma works on across this place. */
template <int N> __device__ static inline void hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> __device__ static inline void hold(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++) hold(x[i]);
}
template <int N> __device__ static inline void hold(uint32_t (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}

/* Descriptor of a matrix in shared memory; strides in bytes; mode 1, 2, 3: columns of 128, 64, 32
 * bytes, swizzled. PTX ISA, "Matrix descriptor format". */
__device__ static inline uint64_t matrix(uint32_t addr, uint32_t leading, uint32_t stride,
                                         uint64_t mode) {
    return (uint64_t)(addr >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | mode << 62;
}

#endif
