/* Products of generated rows with quantised weights: out = x W^T for 1..16 rows a pass. (Up to 8
 * rows with K formats are skinny_super.cu's.)
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
 * H200, 4096 x 14336, us, 1 and 8 rows (bytes alone): Q8_0 16.2, 18.1 (13.7); Q4_0 10.3, 12.6
 * (7.3); Q4_1 11.4, 13.9 (8.1); Q5_0 12.9, 15.5 (8.9); Q5_1 13.3 (9.7); 16 rows of Q4_K 19.7 (7.3).
 *
 * Tried on an H200, with right results; Q4_K, 4096 x 14336, 1 and 8 rows, where this took 10.7 and
 * 14.3 us (skinny_super.cu takes 9.5 and 10.7). The reasons are guesses.
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
 *   A warp's two strips one after another, tile by tile, with a ring of single tiles and one of x
 *   (by bulk copies, a row each), so that 80 registers do and twelve warps fit: 12.5, 15.1; eight
 *   warps 12.8, 15.1, fourteen 14.0, 18.0; Q6_K 16.0, 19.3 for 17.6, 17.8. With the products left
 *   out those rings take 8.9, 10.2. By clocks: x is there .4 us behind the wait, the products end
 *   9.5 behind it, the next call's wait 1.9 behind those.
 *   The next kernel let in when a warp has 0, 1 or 2 slots to ask for: Q8_0 16.9, 17.4, 17.7 for
 *   16.2 (8 rows 19.0 to 21.0 for 18.1); Q4_0 10.1, 11.0, 11.5 for 10.3; Q4_1 11.3, 11.7, 12.5 for
 *   11.4; Q5_0 12.5, 13.3, 14.0 for 12.9; Q8_0, 49152 x 576, 10.8 for 9.8. (Where a block ends
 *   early its SM may get two blocks of the next kernel.) */

#include "kernels/cuda/skinny_quant.cuh"

namespace {

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
    __device__ __forceinline__ void fill_weights(const quant_job &j, int i) {
        int per = quant<T>::SUPER ? 1 : j.per, n = quant<T>::SUPER ? 1 : min(per, w_left);
        int bytes = n * TILE;
        uint32_t to = slots + (uint32_t)(i * j.slot), bar = bars + 8u * (uint32_t)i;
        if (brings()) {
            bool both = S == 2 && strips > 1;
            expect(bar, both ? 2 * bytes : bytes);
            bring(to, weights, bytes, bar);
            if (both) bring(to + (uint32_t)(per * TILE), weights + j.pitch, bytes, bar);
        }
        weights += bytes;
        w_left -= n;
        if (w_left == 0) {
            w_left = run;
            strips -= S * j.wm;
            weights += (size_t)(S * j.wm) * j.pitch - (size_t)(run * TILE);
        }
    }
    /* x of the same: lane l brings piece l % (8 per) of 16 bytes of every (4 / per)th row. */
    __device__ __forceinline__ void fill_x(const quant_job &j, int i, int n) {
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

/* ---- The kernel ---- */

template <enum kern_dtype T, int S, int NT, bool BF16>
__global__ void __launch_bounds__(32 * WARPS<T>, NT == 1 ? 2 : 1)
    skinny_quant_kernel(const __grid_constant__ quant_job j) {
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
    slots_init(feed.bars, j.slots);
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

    uint32_t magic = slots_magic(feed.bars);
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

/* Everything but wk: where the strips go and how large the rings are; changes no sum. */
template <enum kern_dtype T, int S, int NT> void plan(const struct cuda_ctx *c, quant_job *j) {
    using Q = quant<T>;
    int n = j->n < 8 * NT ? j->n : 8 * NT, red = S * n * RED_STRIDE * 4;
    int run = div_up(j->tiles, j->wk), rounds = cut_strips(j, S, c);
    int group = S * (Q::TILE / (Q::K / 64)) + n * 128; /* bytes of 64 columns */
    size_t two = (size_t)(j->wm * j->wk * 2 * (Q::K / 64) * group);
    int room = room_in(j, two > half_smem(c) ? c->max_smem : half_smem(c));
    j->passes = div_up(j->n, 8 * NT);
    j->pitch = (size_t)j->tiles * Q::TILE;
    j->rounds = room / 4 / red;
    if (j->rounds > rounds) j->rounds = rounds;
    if (j->rounds < 1) j->rounds = 1;
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
    place_partials(j, j->slots * j->slot, rounds, red);
}

template <enum kern_dtype T, int S, int NT, bool BF16 = false>
int launch(struct cuda_ctx *c, quant_job *j) {
    static int allowed = -1; /* the device that knows of the most shared memory */
    plan<T, S, NT>(c, j);
    return quant_launch(c, skinny_quant_kernel<T, S, NT, BF16>, &allowed, j);
}

struct launcher {
    struct cuda_ctx *c;
    quant_job *j;
    /* Whether a block with rings of one slot fits. */
    template <enum kern_dtype T, int S, int NT> bool fits() const {
        int n = j->n < 8 * NT ? j->n : 8 * NT;
        return (size_t)(j->wm * j->wk) * (size_t)(S * quant<T>::TILE + n * quant<T>::K * 2 + 256) <=
               c->max_smem;
    }
    template <enum kern_dtype T> int run() {
        /* By the shape alone, so not by the number of multiprocessors of this chip. */
        for (j->wm = 1; j->wm < 4 && 5 * j->wm * 2 * 132 <= j->strips;) j->wm *= 2, j->log_wm++;
        j->wk = div_up(j->tiles, div_up(j->tiles, WARPS<T> / j->wm));
        if (j->bf16) return launch<T, 1, 1, true>(c, j); /* rare: one instance */
        if constexpr (quant<T>::SUPER) {
            if (j->n <= 8) return cuda_skinny_super(c, T, j);
            bool two = j->strips > c->n_sms && fits<T, 2, 2>();
            return two ? launch<T, 2, 2>(c, j) : launch<T, 1, 2>(c, j);
        }
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
    quant_job j = {};
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
