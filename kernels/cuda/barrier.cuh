#ifndef TANDEM_KERNELS_CUDA_BARRIER_CUH
#define TANDEM_KERNELS_CUDA_BARRIER_CUH

/* Barriers in a block's shared memory (mbarrier) and named ones; addresses are 32-bit shared ones.
 */

#include <stdint.h>

__device__ static inline uint32_t smem_addr(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ static inline void bar_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
/* After bar_init by one thread, before the block's first __syncthreads. */
__device__ static inline void bar_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ static inline void bar_arrive(uint32_t bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
/* An arrival of this thread once all its cp.async so far have landed. */
__device__ static inline void copies_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ static inline void bar_wait(uint32_t bar, uint32_t parity) {
    uint32_t done = 0;
    while (!done)
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
#endif
}
/* One lane of a whole warp: unlike a test of the lane's number, the compiler knows that it is one.
 */
__device__ static inline bool elected() {
#if __CUDA_ARCH__ >= 900
    uint32_t one;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(one));
    return one;
#else
    return threadIdx.x % 32 == 0;
#endif
}
/* What this thread wrote to shared memory is there for bulk copies and wgmma of whoever passes the
 * next barrier. */
__device__ static inline void async_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/* Barrier `id` (0..15) of n threads; arriving waits for nobody. */
__device__ static inline void named_arrive(int id, int n) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
__device__ static inline void named_sync(int id, int n) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}

#endif
