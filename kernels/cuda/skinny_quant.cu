/* Products of generated rows with quantised weights: out = x W^T for 1..16 rows a pass.
 *
 * WHAT BOUNDS IT. Every weight is read once a pass, 0.56 (Q4_K) to 1.06 (Q8_0) bytes of it. An H200
 * gives an SM 18.5 bytes a clock, so 512 weights of Q4_K (a strip of 16 rows x 32 columns) every
 * 15.5 clocks: 62 issue slots of each of the four schedulers for what is here ~40 instructions a
 * warp. 26..34 KB must be under way on each SM all the time.
 *
 * HOW. A warp takes one strip of 16 rows and a share of K. Tiles (quant.cuh) arrive in a ring of
 * its own in shared memory by cp.async, the first ones asked for before pdl_wait(). The stored
 * integers become subnormal f16 by one mask a pair and are multiplied as they are by mma.m16n8k16
 * into a fresh f32 accumulator for each block of 32 columns (16 for Q6_K), which is then scaled and
 * added in f32. What the rows' minima and the formats' offsets add is a product with the sum of x
 * over the block, kept in sums of its own:
 *   out = unit * sum dw c + sum mw s     or     unit * sum dw c - OFFSET * sum dw s
 * The sums s are made once a block, in f32, when x comes into shared memory. Scaling the weights in
 * f16 instead would take a subtraction and an HFMA2 for each pair (16 a block) where this takes 8
 * FFMA, round every weight once more (and dw = d * sc of the K formats a second time), and overflow
 * where f16 does.
 *
 * K is cut (by the shape of the weight alone) among `wk` warps of a block, tiles taking turns, and
 * `split` blocks of a cluster, one run of tiles each; their partial sums are added in that order.
 * Clusters share what else would be the bulk of the traffic where K is long: x, of which a block
 * then reads 1 / split for wm strips. Without clusters (before sm_90) wk alone cuts K.
 * Row counts change nothing in the order: they choose between one and two mma columns of 8 rows and
 * how often the weights are passed over. */

#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/quant.cuh"

namespace {

enum {
    MAX_WARPS = 16,    /* of a block */
    RING_BYTES = 5120, /* of a warp, about */
    RED_STRIDE = 20,   /* floats between two columns of partial sums: free of bank conflicts */
    MAX_SPLIT = 8,     /* blocks of a cluster that every chip allows */
    WANT_WARPS = 1480, /* enough to fill 132 SMs at ~11 warps */
};

struct job {
    const uint8_t *weights;
    const void *x;
    float *out;
    int n, rows, tiles; /* tiles of a strip */
    int x_stride, out_stride;
    int wm, wk, split; /* warps of a block: over strips, over K; blocks over K */
    int passes;        /* over the weights, of 8 * NT rows of x each */
    int x_rows;        /* rows of x that a pass may have: min(n, 8 * NT) */
    int slots;         /* tiles that a warp's ring holds */
    int chunk;         /* tiles whose columns of x are in shared memory at once */
    bool bf16;
};

/* Formats that need the sums of x: all but Q6_K, whose operands are signed. */
template <enum kern_dtype T> constexpr bool HAS_SUMS = T != KERN_Q6_K;
/* Tiles that a warp's ring holds where it has that many. */
template <enum kern_dtype T>
constexpr int STAGES = quant<T>::SUPER ? 2 : RING_BYTES / quant<T>::TILE;

/* ---- Instructions ---- */

__device__ __forceinline__ uint32_t smem_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy_16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_at(to)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
/* d = a b + c */
__device__ __forceinline__ void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1,
                                    float c0, float c1, float c2, float c3) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
          "f"(c3));
}
/* All blocks of the cluster, or the block where it is alone. */
__device__ __forceinline__ void sync_split(int split) {
#if __CUDA_ARCH__ >= 900
    if (split > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\n"
                     "barrier.cluster.wait.acquire.aligned;" ::
                         : "memory");
        return;
    }
#endif
    __syncthreads();
}
/* *p of the shared memory of block `rank` of the cluster. */
__device__ __forceinline__ float read_peer(const float *p, int rank, int split) {
#if __CUDA_ARCH__ >= 900
    if (split > 1) {
        uint32_t at;
        float v;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(at)
                     : "r"(smem_at(p)), "r"(rank));
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
        return v;
    }
#endif
    return *p;
}

/* ---- Activations into shared memory ---- */

__device__ __forceinline__ uint32_t half_of_bf16(uint32_t v) {
    __half2 h = __halves2half2(to_act_half(__uint_as_float(v << 16)),
                               to_act_half(__uint_as_float(v & 0xffff0000u)));
    return *(uint32_t *)&h;
}
__device__ __forceinline__ float sum_2(uint32_t v) {
    float2 f = __half22float2(*(__half2 *)&v);
    return f.x + f.y;
}

/* Columns from k0 on, `cols` of them (a multiple of 64), of n rows from x: xs [cols / 32][n][64
 * bytes] in mma's order; sums [cols / 32][8 * NT]. All threads; quads of lanes hold blocks of 32
 * columns. */
template <enum kern_dtype T, int NT>
__device__ __forceinline__ void stage_x(const job &j, const uint16_t *x, int n, int k0, int cols,
                                        uint8_t *xs, float *sums) {
    constexpr int AT_ONCE = 4;
    int row_pieces = cols / 8, total = n * row_pieces;
    for (int base = 0; base < total; base += AT_ONCE * (int)blockDim.x) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int p = base + i * (int)blockDim.x + (int)threadIdx.x, row = p / row_pieces;
            v[i] = make_uint4(0, 0, 0, 0);
            if (p < total)
                v[i] = __ldcg((const uint4 *)(x + (size_t)row * (size_t)j.x_stride + k0 +
                                              8 * (p - row * row_pieces)));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int p = base + i * (int)blockDim.x + (int)threadIdx.x, row = p / row_pieces;
            int piece = p - row * row_pieces, block = piece / 4, first, second;
            if (j.bf16)
                v[i] = make_uint4(half_of_bf16(v[i].x), half_of_bf16(v[i].y), half_of_bf16(v[i].z),
                                  half_of_bf16(v[i].w));
            quant_x_place<T>(piece % 4, &first, &second);
            uint8_t *to = xs + (size_t)(block * n + row) * 64;
            if (p < total) {
                *(uint2 *)(to + first) = make_uint2(v[i].x, v[i].y);
                *(uint2 *)(to + second) = make_uint2(v[i].z, v[i].w);
            }
            if (HAS_SUMS<T>) {
                float s = (sum_2(v[i].x) + sum_2(v[i].y)) + (sum_2(v[i].z) + sum_2(v[i].w));
                s += __shfl_xor_sync(~0u, s, 1);
                s += __shfl_xor_sync(~0u, s, 2);
                if (p < total && piece % 4 == 0) sums[block * 8 * NT + row] = s;
            }
        }
    }
}

/* ---- A tile ---- */

/* Sums of one mma column of a lane: rows g, g, g + 8, g + 8 by columns 2 t, 2 t + 1. */
struct sums_of {
    float scaled[4]; /* dw c */
    float added[4];  /* mw s, or dw s */
};

/* Add one tile times x. xs: the lane's 16 bytes of its row in the first block of 32, of mma column
 * nt at xs[nt]; x_step bytes between blocks. sums: at the lane's columns 2 t, 2 t + 1. */
template <enum kern_dtype T, int NT>
__device__ __forceinline__ void tile_product(const uint8_t *tile, int lane,
                                             const uint8_t *const xs[NT], int x_step,
                                             const float *sums, sums_of acc[NT]) {
    using Q = quant<T>;
    quant_scales<T> scales;
    quant_words<T> words;
    scales.load(tile, lane / 4);
#pragma unroll
    for (int s = 0; s < Q::K / 32; s++) {
        uint32_t a[2][4];
        if (s % 2 == 0) words.load(tile, s / 2, lane);
        words.operands(s % 2, a);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint4 b = *(const uint4 *)(xs[nt] + s * x_step);
            float c[4], c2[4];
            mma(c, a[0], b.x, b.y, 0, 0, 0, 0);
            if (Q::HALVES) mma(c2, a[1], b.z, b.w, 0, 0, 0, 0);
            else mma(c, a[1], b.z, b.w, c[0], c[1], c[2], c[3]);
            float2 sum = make_float2(0, 0);
            if (HAS_SUMS<T>) sum = *(const float2 *)(sums + (s * NT + nt) * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float dw = scales.scale(s, 0, i / 2), with = Q::MIN ? scales.min(s, i / 2) : dw;
                acc[nt].scaled[i] = fmaf(dw, c[i], acc[nt].scaled[i]);
                if (Q::HALVES)
                    acc[nt].scaled[i] = fmaf(scales.scale(s, 1, i / 2), c2[i], acc[nt].scaled[i]);
                if (HAS_SUMS<T>)
                    acc[nt].added[i] = fmaf(with, i % 2 ? sum.y : sum.x, acc[nt].added[i]);
            }
        }
    }
}

/* The lane's results: partial sums of the output. */
template <enum kern_dtype T> __device__ __forceinline__ float total(const sums_of &acc, int i) {
    float v = acc.scaled[i] * quant_unit<T>(i / 2);
    if (!HAS_SUMS<T>) return v;
    return fmaf(quant<T>::MIN ? 1.f : -(float)quant<T>::OFFSET, acc.added[i], v);
}

/* ---- The kernel ---- */

/* The warp's way through its tiles, every `wk`-th of a strip. */
template <enum kern_dtype T> struct ring {
    const uint8_t *from; /* the lane's first piece of the next tile to ask for */
    size_t step;         /* bytes to the one after it */
    int left;            /* tiles to ask for */

    /* Ask for the next one, into the slot at `to`. */
    __device__ __forceinline__ void fill(uint8_t *to, int lane) {
        constexpr int PIECES = quant<T>::TILE / 16;
        if (left > 0) {
#pragma unroll
            for (int i = 0; i < (PIECES + 31) / 32; i++)
                if (32 * i + 32 <= PIECES || 32 * i + lane < PIECES)
                    copy_16(to + 16 * (32 * i + lane), from + 512 * i);
            from += step;
            left--;
        }
        copy_commit();
    }
};

/* Add the warps' partial sums red [wk][wm][8 * NT][RED_STRIDE] of all blocks of the cluster, block
 * after block, and write them; each block does its share. */
template <int NT>
__device__ __forceinline__ void reduce(const job &j, const float *red, int rank, int group,
                                       int row0, int n) {
    int width = 16 * j.wm, total = width * n;
    for (int e = rank * (int)blockDim.x + (int)threadIdx.x; e < total;
         e += j.split * (int)blockDim.x) {
        int col = e / width, place = e - col * width, i = group * width + place;
        const float *at = red + (place / 16 * 8 * NT + col) * RED_STRIDE + place % 16;
        float sum = 0;
        for (int c = 0; c < j.split; c++)
            for (int k = 0; k < j.wk; k++)
                sum += read_peer(at + k * j.wm * 8 * NT * RED_STRIDE, c, j.split);
        if (i < j.rows) j.out[(size_t)(row0 + col) * (size_t)j.out_stride + i] = sum;
    }
}

template <enum kern_dtype T, int NT>
__global__ void __launch_bounds__(32 * MAX_WARPS, 1) skinny_quant_kernel(const job j) {
    using Q = quant<T>;
    extern __shared__ __align__(128) uint8_t smem[];
    int warps = j.wm * j.wk, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    uint8_t *xs = smem + warps * j.slots * Q::TILE;
    float *sums = (float *)(xs + (size_t)j.chunk * Q::K * 2 * j.x_rows);
    float *red = sums + (HAS_SUMS<T> ? j.chunk * (Q::K / 32) * 8 * NT : 0);

    int rank = (int)blockIdx.x % j.split, rest = (int)blockIdx.x / j.split;
    int pass = rest % j.passes, group = rest / j.passes;
    int strip = group * j.wm + warp % j.wm, wk = warp / j.wm;
    int begin = (int)((long long)j.tiles * rank / j.split);
    int end = (int)((long long)j.tiles * (rank + 1) / j.split);
    int row0 = pass * 8 * NT, n = min(j.n - row0, 8 * NT);

    pdl_trigger();
    uint8_t *slots = smem + warp * j.slots * Q::TILE, *slot = slots;
    int tile = begin + wk,
        stop = 16 * strip < j.rows ? end : begin; /* tile, tile + wk, .. < stop */
    ring<T> r = {j.weights + ((size_t)strip * (size_t)j.tiles + (size_t)tile) * Q::TILE + 16 * lane,
                 (size_t)j.wk * Q::TILE, (stop - tile + j.wk - 1) / j.wk};
    for (int i = 0; i < STAGES<T>; i++) r.fill(slots + i * Q::TILE, lane);

    pdl_wait();
    const uint16_t *x = (const uint16_t *)j.x + (size_t)row0 * (size_t)j.x_stride;
    sums_of acc[NT] = {};
    for (int from = begin; from < end; from += j.chunk) {
        int upto = min(from + j.chunk, end);
        if (from > begin) __syncthreads();
        stage_x<T, NT>(j, x, n, from * Q::K, (upto - from) * Q::K, xs, sums);
        __syncthreads();
        const uint8_t *at[NT];
        for (int nt = 0; nt < NT; nt++)
            at[nt] = xs + ((tile - from) * (Q::K / 32) * n + min(8 * nt + lane / 4, n - 1)) * 64 +
                     lane % 4 * 16;
        const float *sums_at = sums + (tile - from) * (Q::K / 32) * 8 * NT + lane % 4 * 2;
        for (; tile < min(upto, stop); tile += j.wk) {
            copy_wait<STAGES<T> - 1>();
            __syncwarp();
            tile_product<T, NT>(slot, lane, at, 64 * n, sums_at, acc);
            __syncwarp();
            r.fill(slot, lane);
            slot = slot == slots + (STAGES<T> - 1) * Q::TILE ? slots : slot + Q::TILE;
            for (int nt = 0; nt < NT; nt++) at[nt] += j.wk * (Q::K / 32) * 64 * n;
            sums_at += j.wk * (Q::K / 32) * 8 * NT;
        }
    }

    float *to = red + (warp * 8 * NT + lane % 4 * 2) * RED_STRIDE + lane / 4;
    for (int nt = 0; nt < NT; nt++)
        for (int i = 0; i < 4; i++)
            to[(8 * nt + i % 2) * RED_STRIDE + 8 * (i / 2)] = total<T>(acc[nt], i);
    sync_split(j.split);
    reduce<NT>(j, red, rank, group, row0, n);
    if (j.split > 1) sync_split(j.split); /* a block's memory lives until its peers have read it */
}

/* ---- How the work is cut ---- */

int div_up(int a, int b) {
    return (a + b - 1) / b;
}

/* How many times blocks take turns on the chip, at 16 warps an SM. */
int turns_of(const job *j, int wm, int n_sms) {
    int blocks = div_up(div_up(j->rows, 16), wm) * j->split;
    return div_up(blocks, n_sms * (16 / (wm * j->wk)));
}

/* wk and split by the shape alone; wm, which changes no sum, so that blocks fill the chip: as large
 * as it can be without another turn, but blocks for every SM first. */
void plan(job *j, enum kern_dtype t, bool clusters, int n_sms) {
    int strips = div_up(j->rows, 16), cols = j->tiles * quant_tile_cols(t);
    int most = quant_tile_cols(t) == 256 ? 8 : MAX_WARPS; /* warps of a block */
    j->split = j->wk = j->wm = 1;
    if (clusters && cols > 2048)
        while (j->split < MAX_SPLIT && 2 * j->split <= j->tiles && j->split * strips < WANT_WARPS)
            j->split *= 2;
    if (strips * j->split < WANT_WARPS) {
        int tiles = div_up(j->tiles, j->split), parts = 16 * n_sms / (strips * j->split);
        parts = parts > most ? most : parts;
        parts = parts > tiles ? tiles : parts;
        j->wk = div_up(tiles, div_up(tiles, parts)); /* no warp idle in the last turn */
    }
    for (int wm = 2; wm * j->wk <= 8; wm++)
        if (turns_of(j, wm, n_sms) <= turns_of(j, j->wm, n_sms) &&
            div_up(strips, wm) * j->split >= n_sms)
            j->wm = wm;
}

/* Shared memory of a block. */
template <enum kern_dtype T, int NT> size_t smem_bytes(const job *j) {
    using Q = quant<T>;
    size_t warps = (size_t)(j->wm * j->wk), chunk = (size_t)j->chunk;
    return warps * (size_t)j->slots * Q::TILE + chunk * Q::K * 2 * (size_t)j->x_rows +
           (HAS_SUMS<T> ? chunk * (Q::K / 32) * 8 * NT * 4 : 0) + warps * 8 * NT * RED_STRIDE * 4;
}

template <enum kern_dtype T, int NT> int launch(struct cuda_ctx *c, job *j) {
    static int allowed = -1; /* the device that knows of the most shared memory */
    /* two blocks on an SM where it has much of it */
    size_t budget = c->max_smem > (150u << 10) ? c->max_smem / 2 : c->max_smem;
    int part = div_up(j->tiles, j->split), turns = div_up(part, j->wk);
    j->slots = turns < STAGES<T> ? turns : STAGES<T>;
    j->x_rows = j->n < 8 * NT ? j->n : 8 * NT;
    j->passes = div_up(j->n, 8 * NT);
    j->chunk = part;
    if (smem_bytes<T, NT>(j) > budget) {
        size_t whole = smem_bytes<T, NT>(j);
        j->chunk = 1;
        size_t one = smem_bytes<T, NT>(j), each = part > 1 ? (whole - one) / (size_t)(part - 1) : 1;
        if (budget > one) j->chunk += (int)((budget - one) / each);
    }
    if (allowed != c->device) {
        int rc = cuda_allow_smem(c, skinny_quant_kernel<T, NT>, c->max_smem);
        if (rc) return rc;
        allowed = c->device;
    }
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attr[2];
    config.gridDim = dim3((unsigned)(div_up(div_up(j->rows, 16), j->wm) * j->passes * j->split));
    config.blockDim = dim3((unsigned)(32 * j->wm * j->wk));
    config.dynamicSmemBytes = smem_bytes<T, NT>(j);
    config.stream = c->stream;
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributeClusterDimension;
    attr[1].val.clusterDim.x = (unsigned)j->split;
    attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
    config.attrs = attr;
    config.numAttrs = c->sm < 90 ? 0 : j->split > 1 ? 2 : 1;
    return CUDA_NOTE(c, cudaLaunchKernelEx(&config, skinny_quant_kernel<T, NT>, (const job)*j));
}

struct launcher {
    struct cuda_ctx *c;
    job *j;
    template <enum kern_dtype T> int run() {
        return j->n <= 8 ? launch<T, 1>(c, j) : launch<T, 2>(c, j);
    }
};

} // namespace

int cuda_skinny_quant(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                      bool x_bf16, float *out, int out_stride) {
    ASSERT(quant_is(w->dtype));
    if (n == 0) return 0;
    job j = {};
    j.weights = (const uint8_t *)w->data;
    j.x = x;
    j.out = out;
    j.n = n;
    j.rows = w->rows;
    j.tiles = div_up(w->cols, quant_tile_cols(w->dtype));
    j.x_stride = act_stride(w->cols);
    j.out_stride = out_stride;
    j.bf16 = x_bf16;
    plan(&j, w->dtype, c->sm >= 90, 132);
    launcher l = {c, &j};
    return quant_dispatch(w->dtype, l);
}
