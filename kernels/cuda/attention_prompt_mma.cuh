#ifndef TANDEM_KERNELS_CUDA_ATTENTION_PROMPT_MMA_CUH
#define TANDEM_KERNELS_CUDA_ATTENTION_PROMPT_MMA_CUH

/* What attention_prompt.cu and attention_mass.cu share: blocks of four warps with 64 queries, 16 a
 * warp, whose scores against a page in shared memory come from mma.m16n8k16. */

#include "kernels/cuda/attention_prompt.cuh"

enum { PROMPT_Q = 64, PROMPT_THREADS = 128 };

template <int HD> struct prompt_shape {
    static constexpr int K_STEPS = HD / 16;
    static constexpr int PLANE = KERN_BLOCK * HD * 2; /* bytes of a head's K or V of a page */
    static constexpr bool Q_IN_SMEM = HD > 128;       /* registers do not hold them beside o */
    static constexpr int Q_BYTES = Q_IN_SMEM ? PROMPT_Q * HD * 2 : 0;
    static constexpr int SMEM = 2 * PLANE + Q_BYTES;
};

/* ---- Copies ---- */

__device__ static inline void async_16(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst),
                 "l"(__cvta_generic_to_global(src))
                 : "memory");
}
__device__ static inline void async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* All but the newest group have landed; all threads' after the barrier. */
__device__ static inline void async_wait_older() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
}

template <int HD>
__device__ static inline void load_plane(uint32_t dst, const attn_args &a, size_t list, int entry,
                                         int n_entries, int head, bool value) {
    if (entry < n_entries) {
        const uint8_t *src = attn_plane(a, a.page[list + entry], head, value);
#pragma unroll
        for (int i = 0; i < HD / 16; i++) {
            uint32_t at = (i * PROMPT_THREADS + threadIdx.x) * 16;
            async_16(dst + at, src + at);
        }
    }
    async_commit();
}

/* ---- Queries ---- */

/* One query of a thread's two. */
struct query_place {
    int row, head, position; /* position -1: sees nothing; row -1: there is none */
};

/* line NULL, or which rows count: those that have one. */
__device__ static inline void find_queries(const attn_args &a, const prompt_tile &t, int kv_head,
                                           const int32_t *line, query_place (&q)[2]) {
    int i = threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int h = 0; h < 2; h++, i += 8) {
        q[h] = {-1, kv_head * a.group + i % a.group, -1};
        if (i / a.group >= t.n_rows) continue;
        q[h].row = t.row + i / a.group;
        if (!line || line[q[h].row] >= 0) q[h].position = prompt_position(a, q[h].row);
    }
}

template <typename T, int HD> struct queries {
    uint32_t r[prompt_shape<HD>::Q_IN_SMEM ? 1 : prompt_shape<HD>::K_STEPS][4];
    uint32_t smem; /* of this lane: k-step k at + k * 512 */

    __device__ void load(const attn_args &a, const query_place (&at)[2], uint32_t q_smem) {
        int t = (threadIdx.x & 3) * 2;
        const float *src[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            src[h] = at[h].position < 0
                         ? NULL
                         : a.qkv + (size_t)at[h].row * a.qkv_stride + (size_t)at[h].head * HD + t;
        smem = q_smem + (threadIdx.x / 32) * (prompt_shape<HD>::K_STEPS * 512) +
               (threadIdx.x & 31) * 16;
#pragma unroll
        for (int k = 0; k < prompt_shape<HD>::K_STEPS; k++) {
            uint32_t x[4];
            load_query<T>(src[0] ? src[0] + k * 16 : NULL, &x[0], &x[2]);
            load_query<T>(src[1] ? src[1] + k * 16 : NULL, &x[1], &x[3]);
            if (prompt_shape<HD>::Q_IN_SMEM)
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem + k * 512),
                             "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                             : "memory");
            else
#pragma unroll
                for (int i = 0; i < 4; i++) r[prompt_shape<HD>::Q_IN_SMEM ? 0 : k][i] = x[i];
        }
    }
    __device__ void get(int k, uint32_t (&x)[4]) const {
        if (prompt_shape<HD>::Q_IN_SMEM)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(smem + k * 512)
                         : "memory");
        else
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = r[prompt_shape<HD>::Q_IN_SMEM ? 0 : k][i];
    }
};

/* ---- Scores ---- */

/* s[16 x 64] = q K^T of a loaded page. */
template <typename T, int HD>
__device__ static inline void score_page(const queries<T, HD> &q, uint32_t k_smem, float (&s)[32]) {
    int lane = threadIdx.x & 31;
    /* Matrices of a load: tokens 0..7 and 8..15 (lane / 16), chunks 0 and 1 (lane / 8 % 2). */
    int token = lane / 16 * 8 + lane % 8, c = lane / 8 & 1;
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = 0.f;
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        uint32_t x[4], b[4];
        q.get(k, x);
        uint32_t at = k_smem + page_chunk(token, 2 * k + c, HD);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            ldmatrix4(b, at + n * 16 * page_width(HD));
            mma16816<T>(*(float(*)[4]) & s[8 * n], x, b[0], b[1]);
            mma16816<T>(*(float(*)[4]) & s[8 * n + 4], x, b[2], b[3]);
        }
    }
}

#endif
