#ifndef TANDEM_KERNELS_CUDA_TEAM_CUH
#define TANDEM_KERNELS_CUDA_TEAM_CUH

/* A team: the TEAM thread blocks of a cluster (sm_90 and later), which reach into each other's
 * shared memory and have a barrier of their own; or one block, on any chip. Code written for a team
 * runs with either. */

#include "kernels/cuda/cuda.cuh"

enum { TEAM_THREADS = 512, TEAM_WARPS = TEAM_THREADS / 32, TEAM_MAX = 8 };

/* In front of a kernel of TEAM blocks. Chips without clusters are only given teams of one block. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TEAM_CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define TEAM_CLUSTER(n)
#endif

/* Blocks a row of n columns should have: results do not depend on it. */
static inline int team_wanted(const struct cuda_ctx *c, int n) {
    return c->sm >= 90 && n > 4096 ? TEAM_MAX : 1;
}

/* Place of this block in its team. */
template <int TEAM> __device__ static inline int team_rank() {
    if (TEAM == 1) return 0;
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return (int)rank;
}

/* This block's team in the grid. */
template <int TEAM> __device__ static inline int team_idx() {
    return (int)blockIdx.x / TEAM;
}

/* All threads of the team come here before one goes on; what they wrote before is seen after. */
template <int TEAM> __device__ static inline void team_arrive() {
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (TEAM > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
template <int TEAM> __device__ static inline void team_wait() {
#if __CUDA_ARCH__ >= 900
    if (TEAM > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    if (TEAM == 1) __syncthreads();
}
template <int TEAM> __device__ static inline void team_sync() {
    team_arrive<TEAM>();
    team_wait<TEAM>();
}

/* The same variable in the shared memory of block `rank`. */
template <int TEAM, typename T> __device__ static inline T *team_at(T *p, int rank) {
    if (TEAM == 1) return p;
    uint64_t at = (uint64_t)p;
#if __CUDA_ARCH__ >= 900
    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"((uint64_t)p), "r"(rank));
#endif
    return (T *)at;
}

#endif
