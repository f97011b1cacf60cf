#ifndef TANDEM_KERNELS_CUDA_SKINNY_QUANT_CUH
#define TANDEM_KERNELS_CUDA_SKINNY_QUANT_CUH

/* What the two kernels of quantised weights share: skinny_super.cu (K formats, up to 8 rows) and
 * skinny_quant.cu (everything else).
 *
 * ONE ORDER. The shape of the weight alone says how K is cut among the warps; a warp adds its
 * tiles one after another, and the warps' partial sums are added in their order. Which block takes
 * which strips, how many at once, the rings and the mma columns change no sum. */

#include "kernels/cuda/barrier.cuh"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/skinny_quant_tile.cuh"

enum {
    MOST_WARPS = 8,      /* of a block: 128 registers a thread, two blocks on an SM */
    MAX_SLOTS = 15,      /* of a warp's ring */
    BAR_BYTES = 128,     /* their barriers and a word */
    RED_STRIDE = 20,     /* floats between two columns of partial sums: free of bank conflicts */
    HALF_SM = 113 << 10, /* shared memory of a block of which two fit an SM of the H200 */
};

/* A product and how it is cut. */
struct quant_job {
    const uint8_t *weights;
    const void *x;
    float *out;
    int n, rows, strips, tiles; /* tiles of a strip */
    int x_stride, out_stride;
    int wm, log_wm, wk; /* warps of a block: over strips (2^log_wm), over K */
    int blocks;         /* of a pass; each takes a run of strips, S at once */
    int passes;         /* over the weights, of 8 * NT rows of x each */
    int slots;          /* of a warp's ring */
    int rounds;         /* of S strips, whose partial sums are kept until the block adds them */
    int red, region;    /* bytes of a warp: where partial sums begin, all */
    int late;           /* slots a warp has yet to ask for when the next kernel may start; below 0:
                         * it may at the start (skinny_super.cu) */
    int slot;           /* bytes (skinny_quant.cu) */
    int per;            /* groups of 64 columns that a slot holds (skinny_quant.cu) */
    int x_step;         /* rows of x that a warp copies at once (skinny_quant.cu) */
    size_t pitch;       /* bytes of a strip */
    bool bf16;
};

/* Warps of a block: rings of two slots of K formats in half of an SM. */
template <enum kern_dtype T>
constexpr int WARPS = quant<T>::SUPER &&HALF_SM / (4 * quant<T>::TILE) < MOST_WARPS
                          ? HALF_SM / (4 * quant<T>::TILE)
                          : MOST_WARPS;

/* ---- Instructions ---- */

__device__ static __forceinline__ void copy_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/* Weights come by bulk copies, which one lane asks for; chips without them have all lanes copy.
 * bring() is for the lanes that brings() is true of, behind expect() of the sum of its bytes. */
__device__ static __forceinline__ bool brings() {
#if __CUDA_ARCH__ >= 900
    return elected();
#else
    return true;
#endif
}
__device__ static __forceinline__ void expect(uint32_t bar, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
#else
    (void)bar, (void)bytes;
#endif
}
__device__ static __forceinline__ void bring(uint32_t to, const uint8_t *from, int bytes,
                                             uint32_t bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
#else
    (void)bar;
    for (int b = 16 * (int)(threadIdx.x % 32); b < bytes; b += 512)
        copy_16(to + (uint32_t)b, from + b);
#endif
}
/* The barriers of a warp's slots, and behind them what quant_times_byte wants: at each barrier the
 * lanes arrive when their copies are done, and who asked for bulk copies. One warp. */
__device__ static __forceinline__ void slots_init(uint32_t bars, int slots) {
    if (elected()) {
#pragma unroll 1
        for (int i = 0; i < slots; i++)
#if __CUDA_ARCH__ >= 900
            bar_init(bars + 8u * (uint32_t)i, 33);
#else
            bar_init(bars + 8u * (uint32_t)i, 32);
#endif
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(bars + 8 * MAX_SLOTS), "r"(0x47000000)
                     : "memory");
        async_fence();
    }
    __syncwarp();
}
/* That word, no constant to the compiler. */
__device__ static __forceinline__ uint32_t slots_magic(uint32_t bars) {
    uint32_t magic;
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(magic) : "r"(bars + 8 * MAX_SLOTS));
    return magic;
}

/* ---- Results ---- */

/* Partial sums of one warp and round: [S][n][RED_STRIDE]. */
template <enum kern_dtype T, int S, int NT>
__device__ static __forceinline__ void store_partial(float *red, int n, int lane,
                                                     const sums_of acc[S][NT]) {
#pragma unroll
    for (int s = 0; s < S; s++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int col = 8 * nt + lane % 4 * 2 + i % 2;
                float v = acc[s][nt].scaled[i] * quant_unit<T>(i / 2);
                if (quant<T>::MIN) v += acc[s][nt].added[i];
                if (col < n) red[(s * n + col) * RED_STRIDE + lane / 4 + 8 * (i / 2)] = v;
            }
}

/* Add the warps' partial sums of `strips` strips in their order and write them. */
template <int S>
__device__ static __forceinline__ void reduce(const quant_job &j, const uint8_t *red, int strip,
                                              int strips, int row0, int n) {
    int row = (int)threadIdx.x % 16, col = (int)threadIdx.x / 16, s = 0;
    for (;; col += (int)blockDim.x / 16) {
        while (col >= n) col -= n, s++; /* few times: quicker than a division */
        if (s >= strips) break;
        int group = s / S, round = group >> j.log_wm, m = group - (round << j.log_wm);
        const uint8_t *at =
            red + m * j.wk * j.region + (((round * S + s % S) * n + col) * RED_STRIDE + row) * 4;
        float part[MOST_WARPS];
#pragma unroll
        for (int k = 0; k < MOST_WARPS; k++)
            if (k < j.wk) part[k] = *(const float *)(at + k * j.region);
        float sum = part[0];
#pragma unroll
        for (int k = 1; k < MOST_WARPS; k++)
            if (k < j.wk) sum += part[k];
        int i = (strip + s) * 16 + row;
        if (i < j.rows) j.out[(size_t)(row0 + col) * (size_t)j.out_stride + i] = sum;
    }
}

/* ---- How the work is cut ---- */

static inline int div_up(int a, int b) {
    return (a + b - 1) / b;
}

/* Bytes of a warp for its ring and partial sums, where a block has `smem`. */
static inline int room_in(const quant_job *j, size_t smem) {
    return (int)smem / (j->wm * j->wk) / 128 * 128 - BAR_BYTES;
}
static inline size_t half_smem(const struct cuda_ctx *c) {
    return c->max_smem < HALF_SM ? c->max_smem : (size_t)HALF_SM;
}
/* The blocks of a pass, each with a run of strips that it takes S at once; returns their rounds. */
static inline int cut_strips(quant_job *j, int S, const struct cuda_ctx *c) {
    j->blocks = j->strips < c->n_sms ? j->strips : c->n_sms;
    return div_up(div_up(div_up(j->strips, j->blocks), S), j->wm);
}
/* Partial sums, `red` bytes a round, behind a ring of so many; those of the only round take the
 * ring's place, when all of it has been used. */
static inline void place_partials(quant_job *j, int ring, int rounds, int red) {
    j->red = rounds > 1 ? ring : 0;
    j->region = rounds > 1 ? ring + j->rounds * red : ring > red ? ring : red;
    j->region = (j->region + 127) & ~127;
}

/* Enqueue kernel(*j); *allowed: the device that knows of its shared memory, -1 at first. */
template <typename K>
static inline int quant_launch(struct cuda_ctx *c, K kernel, int *allowed, const quant_job *j) {
    size_t smem = (size_t)(j->wm * j->wk) * (size_t)(j->region + BAR_BYTES);
    if (*allowed != c->device) {
        int rc = cuda_allow_smem(c, kernel, c->max_smem);
        if (!rc)
            rc = CUDA_NOTE(c, cudaFuncSetAttribute(kernel,
                                                   cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared));
        if (rc) return rc;
        *allowed = c->device;
    }
    return CUDA_LAUNCH(c, kernel, dim3((unsigned)(j->blocks * j->passes)),
                       dim3((unsigned)(32 * j->wm * j->wk)), smem, *j);
}

/* skinny_super.cu: a K format, f16 activations, 1 <= n <= 8; wm and wk are cut. */
int cuda_skinny_super(struct cuda_ctx *c, enum kern_dtype type, quant_job *j);

#endif
