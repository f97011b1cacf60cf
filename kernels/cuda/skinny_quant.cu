/* Products of generated rows with quantised weights: out = x W^T for 1..16 rows a pass.
 *
 * WHAT BOUNDS IT. Every weight is read once a pass, 0.56 (Q4_K) to 1.06 (Q8_0) bytes of it. An H200
 * gives an SM 18.5 bytes a clock, so 16 rows x 32 columns of Q4_K every 15.5 clocks: 62 issue slots
 * of the four schedulers together for what is 37 instructions of one warp (25 for the products, 7
 * for scales and minima, 5 for the ring). 34 KB must be under way on each SM all the time, also
 * while one kernel ends and the next begins.
 *
 * HOW. A block an SM takes a run of strips of 16 rows and all of K, two strips at once; its warps
 * cut K, and the strips too where they are many. Tiles (quant.cuh) come by bulk copies into a ring
 * of the warp's own in shared memory, asked for before pdl_wait(); x comes the same way, by
 * cp.async, into the same slots: loads on demand would queue behind all that is under way (some 3
 * us; reading x one group of 64 columns ahead took 18.7 us where this takes 10.9). A column of x
 * meets one warp of the block alone, so no block-wide barrier is needed before the end. A block
 * takes at most half of an SM, so that the next kernel's block fills its rings beside it: DRAM
 * stays busy over the end of a product and the start of the next (one block of twice the warps on
 * an SM: 17.5 us instead of 10.9).
 *
 * The stored integers become subnormal f16 by one mask a pair and are multiplied as they are by
 * mma.m16n8k16 into a fresh f32 accumulator for each block of 32 columns (16 for Q6_K), which is
 * then scaled and added in f32. The formats' offsets enter as that accumulator's initial value,
 * -OFFSET times the sum of x over the block, itself a product with a constant operand that the
 * strips share. Minima: the sums of x come from products with ones. Those of the K formats are
 * 6-bit integers, exact in bf16, and are multiplied with the sums of the eight blocks of a tile,
 * split into three bf16 each, by two mma. (The sums get into operand B's order by multiplying the
 * other way round: x as operand A.)
 *
 * ONE ORDER. The shape of the weight alone says how K is cut among the warps; a warp adds its
 * tiles one after another, and the warps' partial sums are added in their order. Which block takes
 * which strips, how many at once, the rings and the mma columns change no sum.
 *
 * H200, 4096 x 14336, us, 1 and 8 rows (bytes alone): Q8_0 16.2, 18.3 (13.7); Q4_K 10.9, 14.4
 * (7.3); Q4_0 10.3, 12.7 (7.3); Q4_1 11.4, 13.7 (8.1); Q5_0 12.9 (8.9); Q5_1 13.3 (9.7); Q5_K
 * 13.5, 15.9 (8.9); Q6_K 17.5, 17.9 (10.6).
 *
 * A profile (Q4_K, 8 rows; a variant that keeps the minima in registers and runs through the tile
 * without a loop): 43 % of the issue slots used, 836 instructions a tile of two strips; of a warp's
 * 4.4 clocks an instruction 1.0 its own, 1.1 wait for the result before, 0.9 for memory, 0.9 for
 * other warps and pipes. 29 % of L2, 39 % of DRAM, 20 % of shared memory in use: two warps a
 * scheduler are too few, and what unpacks is what bounds.
 *
 * Tried on an H200, with right results; Q4_K, 4096 x 14336, 1 and 8 rows, where this takes 10.7 and
 * 14.3 us. The reasons are guesses.
 *   x kept for all of a warp's tiles (1 row) or a place for x of one tile, filled anew by quarters
 *   (8 rows): two slots of the ring where this has one, 10.6, 14.7. That with the loop unrolled and
 *   a turn for each block of an SM (it asks for its ring when the one before has asked for all, by
 *   counts in memory): 10.1, 14.2; the turns alone 10.3, 15.3, and Q8_0 16.1, 19.0 for 15.9, 18.1.
 *   One block of 8 warps and 216 KB an SM: 13.0, 17.3.
 *   Pairs of warps that share a slot, a strip each, 64 registers: 12.8, 15.0; Q8_0 16.7, 18.2.
 *   Two blocks an SM with a strip at once each: 14.1, 17.6.
 *   A tile of whatever lies there before pdl_wait, so that the code is near: 10.8, 14.6.
 *   Q8_0, 49152 x 576 with x kept over a block's rounds: 9.7 for 9.5.
 *   All of a block's x at once, by bulk copies into a place that its warps share: 12.3.
 *   That, and clusters of 8 or 4 blocks that share K, for 8 rows: 26 and 21 (if fewer clusters than
 *   16 of 8 are on the chip at once, a second round of strips runs nearly empty).
 *   Half tiles as units of the ring, each with the scales: 14.3, 13.7 by bulk copies, 12.0, 13.8 by
 *   cp.async, whatever part of the ring is asked for at a time (a quarter more instructions).
 *   A warp's two strips one after another, tile by tile, with a ring of single tiles and one of x
 *   (by bulk copies, a row each), so that 80 registers do and twelve warps fit: 12.5, 15.1; eight
 *   warps 12.8, 15.1, fourteen 14.0, 18.0; Q6_K 16.0, 19.3 for 17.6, 17.8. It is 735 instructions
 *   a tile of two strips, at .67 a clock and scheduler (two warps a scheduler: .60), whether the
 *   loop is 52 of them or unrolled: fewer would help, more warps do not. With the products left
 *   out those rings take 8.9, 10.2. By clocks: x is there .4 us behind the wait, the products end
 *   9.5 behind it, the next call's wait 1.9 behind those.
 *   The next kernel let in when 0..4 slots are left to fill: from 0.5 us less, for 8 rows and half
 *   tiles, to 3 us more, for Q8_0 (where a block ends early its SM may get two blocks of the next
 *   kernel; with 128 blocks of equal shares, which leave SMs free, half tiles took 18.5). */

#include "kernels/cuda/barrier.cuh"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/skinny_quant_tile.cuh"

namespace {

enum {
    MOST_WARPS = 8,      /* of a block: 128 registers a thread, two blocks on an SM */
    MAX_SLOTS = 15,      /* of a warp's ring */
    BAR_BYTES = 128,     /* their barriers and a word */
    RED_STRIDE = 20,     /* floats between two columns of partial sums: free of bank conflicts */
    HALF_SM = 113 << 10, /* shared memory of a block of which two fit an SM of the H200 */
};

struct job {
    const uint8_t *weights;
    const void *x;
    float *out;
    int n, rows, strips, tiles; /* tiles of a strip */
    int x_stride, out_stride;
    int wm, wk;      /* warps of a block: over strips, over K */
    int blocks;      /* of a pass; each takes a run of strips, S at once */
    int passes;      /* over the weights, of 8 * NT rows of x each */
    int x_step;      /* rows of x that a warp copies at once */
    int per;         /* groups of 64 columns that a slot of the ring holds */
    int slot, slots; /* bytes; of a warp's ring */
    size_t pitch;    /* bytes of a strip */
    int rounds;      /* of S strips, whose partial sums are kept until the block adds them */
    int red, region; /* bytes of a warp: where partial sums begin, all */
    bool bf16;
};

/* Warps of a block: rings of two slots of K formats in half of an SM. */
template <enum kern_dtype T>
constexpr int WARPS = quant<T>::SUPER &&HALF_SM / (4 * quant<T>::TILE) < MOST_WARPS
                          ? HALF_SM / (4 * quant<T>::TILE)
                          : MOST_WARPS;

/* ---- Instructions ---- */

__device__ __forceinline__ void copy_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
#endif
/* Each lane arrives at a slot's barrier when its copies are done; so does who asks for a bulk copy.
 */
__device__ __forceinline__ void slot_init(uint32_t bar) {
#if __CUDA_ARCH__ >= 900
    bar_init(bar, 33);
#else
    bar_init(bar, 32);
#endif
}

/* ---- The ring ---- */

/* What a warp reads, in turn: units of `per` groups of 64 columns of its run of K, first of S
 * strips, then of the S strips wm further on. A slot holds a unit of S strips, [S][per / (K / 64)]
 * tiles, and of x, [per][2][n][32] in plain order. */
template <enum kern_dtype T, int S> struct feeder {
    static constexpr int TILE = quant<T>::TILE;
    const uint8_t *weights;  /* next tile of the first of the strips at hand */
    const uint16_t *x;       /* next of the lane's pieces */
    uint32_t slots, bars;    /* shared memory; a barrier a slot */
    uint32_t x_at;           /* the lane's first place behind the weights of a slot */
    int x_row, x_tile;       /* the lane's first row of x, its tile in a slot */
    int strips;              /* left of the block's, those at hand included */
    int w_left, x_left, run; /* tiles of the run to ask for; its length */

    /* Weights of what comes next, into slot i. All lanes. */
    __device__ __forceinline__ void fill_weights(const job &j, int i) {
        int per = quant<T>::SUPER ? 1 : j.per, n = quant<T>::SUPER ? 1 : min(per, w_left);
        int bytes = n * TILE;
        uint32_t to = slots + (uint32_t)(i * j.slot), bar = bars + 8u * (uint32_t)i;
#if __CUDA_ARCH__ >= 900
        if (elected()) {
            bool both = S == 2 && strips > 1;
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar),
                         "r"(both ? 2 * bytes : bytes)
                         : "memory");
            copy_bulk(to, weights, bytes, bar);
            if (both) copy_bulk(to + (uint32_t)(per * TILE), weights + j.pitch, bytes, bar);
        }
#else
        (void)bar;
        for (int s = 0; s < S && s < strips; s++)
            for (int b = 16 * (int)(threadIdx.x % 32); b < bytes; b += 512)
                copy_16(to + (uint32_t)(s * per * TILE + b), weights + s * j.pitch + b);
#endif
        weights += bytes;
        w_left -= n;
        if (w_left == 0) {
            w_left = run;
            strips -= S * j.wm;
            weights += (size_t)(S * j.wm) * j.pitch - (size_t)(run * TILE);
        }
    }
    /* x of the same: lane l brings piece l % (8 per) of 16 bytes of every (4 / per)th row. */
    __device__ __forceinline__ void fill_x(const job &j, int i, int n) {
        int step = quant<T>::SUPER ? 1 : j.x_step;
        uint32_t to = x_at + (uint32_t)(i * j.slot);
        const uint16_t *at = x;
        if (quant<T>::SUPER || x_tile < x_left)
#pragma unroll 1
            for (int row = x_row; row < n;
                 row += step, to += 64u * (uint32_t)step, at += step * j.x_stride)
                copy_16(to, at);
        copies_arrive(bars + 8u * (uint32_t)i);
        int n_tiles = quant<T>::SUPER ? 1 : j.per;
        x += n_tiles * quant<T>::K;
        x_left -= n_tiles;
        if (x_left <= 0) {
            x -= (run - x_left) * quant<T>::K;
            x_left = run;
        }
    }
};

/* ---- Results ---- */

/* Partial sums of one warp and round: [S][n][RED_STRIDE]. */
template <enum kern_dtype T, int S, int NT>
__device__ __forceinline__ void store_partial(float *red, int n, int lane,
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
__device__ __forceinline__ void reduce(const job &j, const uint8_t *red, int strip, int strips,
                                       int row0, int n) {
    for (int e = (int)threadIdx.x; e < strips * 16 * n; e += (int)blockDim.x) {
        int rest = e / 16, row = e % 16, s = rest / n, col = rest - s * n; /* rest: [strip][col] */
        int group = s / S, round = group / j.wm, m = group - round * j.wm;
        const uint8_t *at =
            red + m * j.wk * j.region + (((round * S + s % S) * n + col) * RED_STRIDE + row) * 4;
        float sum = *(const float *)at;
#pragma unroll 4
        for (int k = 1; k < j.wk; k++) sum += *(const float *)(at + k * j.region);
        int i = (strip + s) * 16 + row;
        if (i < j.rows) j.out[(size_t)(row0 + col) * (size_t)j.out_stride + i] = sum;
    }
}

/* ---- The kernel ---- */

template <enum kern_dtype T, int S, int NT, bool BF16>
__global__ void __launch_bounds__(32 * WARPS<T>, NT == 1 ? 2 : 1)
    skinny_quant_kernel(const __grid_constant__ job j) {
    using Q = quant<T>;
    constexpr int GROUPS = Q::K / 64;
    extern __shared__ __align__(128) uint8_t smem[];
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32;
    int pass = (int)blockIdx.x % j.passes, block = (int)blockIdx.x / j.passes;
    int strip = j.strips * block / j.blocks, end = j.strips * (block + 1) / j.blocks;
    int m = warp / j.wk, k = warp - m * j.wk; /* the warp's place */
    int first = j.tiles * k / j.wk, run = j.tiles * (k + 1) / j.wk - first;
    int row0 = pass * 8 * NT, n = min(j.n - row0, 8 * NT);
    int per = Q::SUPER ? 1 : j.per; /* tiles of a slot */
    int units = (run + per - 1) / per, groups = (end - strip + S - 1) / S;
    int items = (groups - m + j.wm - 1) / j.wm * units, rounds = (groups + j.wm - 1) / j.wm;
    uint8_t *own = smem + warp * j.region, *x_own = own + S * per * Q::TILE;

    pdl_trigger();
    feeder<T, S> feed;
    feed.weights = j.weights + (size_t)(strip + m * S) * j.pitch + (size_t)(first * Q::TILE);
    feed.slots = smem_addr(own);
    feed.bars = smem_addr(smem) + (uint32_t)(j.wm * j.wk * j.region + warp * BAR_BYTES);
    feed.strips = end - strip - m * S, feed.w_left = feed.x_left = feed.run = run;
    if (elected()) {
#pragma unroll 1
        for (int i = 0; i < j.slots; i++) slot_init(feed.bars + 8u * (uint32_t)i);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(feed.bars + 8 * MAX_SLOTS), "r"(0x47000000)
                     : "memory");
        async_fence();
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < j.slots && i < items; i++) feed.fill_weights(j, i);
    int pieces = Q::SUPER ? 32 : 8 * j.per, piece = lane & (pieces - 1);
    feed.x_row = lane / pieces, feed.x_tile = piece / 8;
    feed.x = (const uint16_t *)j.x + (size_t)(row0 + feed.x_row) * (size_t)j.x_stride +
             first * Q::K + 8 * piece;
    feed.x_at = smem_addr(x_own) + (uint32_t)((piece / 4 * n + feed.x_row) * 64 + piece % 4 * 16);
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < j.slots && i < items; i++) feed.fill_x(j, i, n);

    uint32_t magic; /* what quant_times_byte wants, no constant to the compiler */
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(magic) : "r"(feed.bars + 8 * MAX_SLOTS));
    int slot = 0, x_offset[NT];
    uint32_t parity = 0;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        x_offset[nt] = min(8 * nt + lane / 4, n - 1) * 64 + lane % 4 * (Q::HALVES ? 8 : 16);
    float *red = (float *)(own + j.red);
    for (int item = 0, round = 0; round < rounds; round++) {
        sums_of acc[S][NT] = {};
        for (int u = 0; u < units && item < items; u++, item++) {
            const uint8_t *tile = own + slot * j.slot;
            places<NT> xs;
            xs.block = n * 64;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) xs.at[nt] = x_own + slot * j.slot + x_offset[nt];
            bar_wait(feed.bars + 8u * (uint32_t)slot, parity);
            int count = min(per, run - u * per);
#pragma unroll 1
            for (int i = 0; i < count; i++, tile += Q::TILE) {
                tile_product<T, S, NT, BF16>(tile, per * Q::TILE, xs, magic, acc);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) xs.at[nt] += 2 * GROUPS * xs.block;
            }
            __syncwarp();
            if (item + j.slots < items) {
                feed.fill_weights(j, slot);
                feed.fill_x(j, slot, n);
            }
            if (++slot == j.slots) slot = 0, parity ^= 1;
        }
        store_partial<T, S, NT>(red, n, lane, acc);
        red += S * n * RED_STRIDE;
        if ((round + 1) % j.rounds != 0 && round + 1 < rounds) continue;
        __syncthreads();
        int done = min(j.rounds * S * j.wm, end - strip);
        reduce<S>(j, smem + j.red, strip, done, row0, n);
        if (round + 1 == rounds) break;
        __syncthreads();
        strip += done;
        red = (float *)(own + j.red);
    }
}

/* ---- How the work is cut ---- */

int div_up(int a, int b) {
    return (a + b - 1) / b;
}

/* Everything but wk: where the strips go and how large the rings are; changes no sum. */
template <enum kern_dtype T, int S, int NT> void plan(job *j, size_t max_smem, int n_sms) {
    using Q = quant<T>;
    int n = j->n < 8 * NT ? j->n : 8 * NT, red = S * n * RED_STRIDE * 4;
    int room = (int)max_smem < HALF_SM ? (int)max_smem : HALF_SM, run = div_up(j->tiles, j->wk);
    j->blocks = j->strips < n_sms ? j->strips : n_sms;
    j->passes = div_up(j->n, 8 * NT);
    int warps = j->wm * j->wk, rounds = div_up(div_up(div_up(j->strips, j->blocks), S), j->wm);
    int group = S * (Q::TILE / (Q::K / 64)) + n * 128; /* bytes of 64 columns */
    j->pitch = (size_t)j->tiles * Q::TILE;
    if (warps * 2 * (Q::K / 64) * group > room) room = (int)max_smem;
    room = room / warps / 128 * 128 - BAR_BYTES;
    j->rounds = room / 4 / red;
    if (j->rounds > rounds) j->rounds = rounds;
    if (j->rounds < 1) j->rounds = 1;
    /* One round: partial sums take the ring's place, when all of it has been used. */
    int kept = rounds > 1 ? j->rounds * red : 0;
    j->per = Q::SUPER ? 4 : 1;
    while (j->per < 4 && 2 * j->per <= run && (room - kept) / (2 * j->per * group) >= 2)
        j->per *= 2;
    j->x_step = 4 / j->per;
    j->slot = j->per * group;
    j->slots = (room - kept) / j->slot;
    int most_slots = rounds * div_up(run, j->per * 64 / Q::K > 0 ? j->per * 64 / Q::K : 1);
    if (j->slots > most_slots) j->slots = most_slots;
    if (j->slots > MAX_SLOTS) j->slots = MAX_SLOTS;
    if (j->slots < 1) j->slots = 1;
    int ring = j->slots * j->slot;
    j->red = rounds > 1 ? ring : 0;
    j->region = rounds > 1 ? ring + kept : ring > red ? ring : red;
    j->region = (j->region + 127) & ~127;
}

template <enum kern_dtype T, int S, int NT, bool BF16 = false>
int launch(struct cuda_ctx *c, job *j) {
    static int allowed = -1; /* the device that knows of the most shared memory */
    plan<T, S, NT>(j, c->max_smem, c->n_sms);
    size_t smem = (size_t)(j->wm * j->wk) * (size_t)(j->region + BAR_BYTES);
    if (allowed != c->device) {
        int rc = cuda_allow_smem(c, skinny_quant_kernel<T, S, NT, BF16>, c->max_smem);
        if (!rc)
            rc = CUDA_NOTE(c, cudaFuncSetAttribute(skinny_quant_kernel<T, S, NT, BF16>,
                                                   cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared));
        if (rc) return rc;
        allowed = c->device;
    }
    return CUDA_LAUNCH(c, (skinny_quant_kernel<T, S, NT, BF16>),
                       dim3((unsigned)(j->blocks * j->passes)),
                       dim3((unsigned)(32 * j->wm * j->wk)), smem, *j);
}

struct launcher {
    struct cuda_ctx *c;
    job *j;
    /* Whether a block with rings of one slot fits. */
    template <enum kern_dtype T, int S, int NT> bool fits() const {
        int n = j->n < 8 * NT ? j->n : 8 * NT;
        return (size_t)(j->wm * j->wk) * (size_t)(S * quant<T>::TILE + n * quant<T>::K * 2 + 256) <=
               c->max_smem;
    }
    template <enum kern_dtype T> int run() {
        /* By the shape alone, so not by the number of multiprocessors of this chip. */
        for (j->wm = 1; j->wm < 4 && 5 * j->wm * 2 * 132 <= j->strips;) j->wm *= 2;
        j->wk = div_up(j->tiles, div_up(j->tiles, WARPS<T> / j->wm));
        if (j->bf16) return launch<T, 1, 1, true>(c, j); /* rare: one instance */
        bool two = j->strips > c->n_sms, wide = j->n > 8;
        if (two && wide && fits<T, 2, 2>()) return launch<T, 2, 2>(c, j);
        if (two && fits<T, 2, 1>()) return launch<T, 2, 1>(c, j);
        if (wide && fits<T, 1, 2>()) return launch<T, 1, 2>(c, j);
        return launch<T, 1, 1>(c, j);
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
    j.strips = div_up(w->rows, 16);
    j.tiles = div_up(w->cols, quant_tile_cols(w->dtype));
    j.x_stride = act_stride(w->cols);
    j.out_stride = out_stride;
    j.bf16 = x_bf16;
    launcher l = {c, &j};
    return quant_dispatch(w->dtype, l);
}
