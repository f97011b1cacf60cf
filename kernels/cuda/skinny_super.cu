/* Products of up to 8 generated rows with weights in the K formats: skinny_quant.cu's sums, bit for
 * bit, in fewer instructions and smaller pieces. (Its head says what bounds them.)
 *
 * PIECES. Slots of a warp's ring hold half a tile of two strips and of x. Behind the copies of the
 * last piece lies one half's work, not a tile's; and beside 8 rows of x three halves fit half of
 * an SM, but one tile. The scales of a tile have a ring of their own, as both halves want them.
 * Offsets in both are constants: the number of slots is odd or even by template, for with that is
 * known which half of a tile comes in place of one.
 *
 * ONE ROW has one column of eight in mma's operand B to fill. Here the eight hold x of the eight
 * blocks of a tile: lane 4 g + t keeps its values of block g, four registers for the whole tile,
 * and of the product with block b takes column b. That is one load and one sum of x a tile instead
 * of eight, and each lane unpacks scales of two blocks, not eight. Column b is in lane b / 2 of a
 * quad, so the sums so far go round the quad, one step for two blocks; the order stays.
 *
 * THE NEXT KERNEL is let in when a warp has `late` slots to ask for, where blocks end together:
 * then its first copies follow the last ones of this. Earlier they delay what this block waits for,
 * later DRAM has nothing to do while the kernels change. At the start instead: 10.7 for 9.5, 10.8
 * for 10.6; 1 slot or 2: 10.1, 11.2 and 9.9, 10.8; 5: 10.6, 11.5. Where blocks have several rounds
 * and end apart, any is worse than the start: 128256 x 4096 in Q6_K 113 at the start, 133 to 141
 * later.
 *
 * H200, us, 1 and 8 rows (bytes alone; skinny_quant.cu before): 4096 x 14336 in Q4_K 9.5, 10.7
 * (7.3; 10.8, 14.1), Q5_K 12.2, 13.4 (8.9; 13.8, 16.2), Q6_K 13.6, 14.7 (10.6; 17.4, 17.8); Q4_K
 * 28672 x 4096 19.6, 23.2 (14.5; 20.6, 25.3), 6144 x 4096 6.3, 7.1 (3.1; 6.4, 9.5), 4096 x
 * 4096 3.8, 4.2 (2.1; 3.8, 6.2); Q6_K 128256 x 4096 113, 135 (95; 128, 142). A tile of two strips
 * of Q4_K takes 528 and 657 instructions, where it took 626 and 703.
 *
 * Tried on an H200, with right results; Q4_K, 4096 x 14336, 1 and 8 rows:
 *   Whole tiles in the slots: 9.8, 11.9 (8 rows: one block an SM).
 *   x of the next tile from L2 into registers while this one is multiplied: one row 10.4 (three
 *   slots), 8 rows of Q6_K 28: a load queues behind all that is under way. The same into a place of
 *   shared memory, by halves or quarters, each filled anew when it is used: 13.7, 18.1 (8 rows).
 *   x by a bulk copy of each row: 8 rows 13.0 where cp.async of all lanes took 11.9: a bulk copy of
 *   a few hundred bytes costs what one of thousands does.
 *   16 warps of a strip each: 11.6 (1 row). A block that has all of an SM: 11.6, 11.9.
 *   In reduce(), divisions, and partial sums added as they come: .15 us more. */

#include "kernels/cuda/skinny_quant.cuh"
#include "kernels/cuda/skinny_super_tile.cuh"

namespace {

/* Bytes of what a warp's rings hold. A slot has half a tile of each of S strips, without the
 * scales, and x of the same columns; a head has the scales of a tile, and all its x where that is
 * one row. */
template <enum kern_dtype T, int S, int ROWS> struct unit {
    using Q = quant<T>;
    static constexpr bool ONE = ROWS == 1;
    static constexpr int COLS = 128, LOW = 2 * Q::LOW_BYTES, HIGH = 2 * Q::HIGH_BYTES;
    static constexpr int PITCH = LOW + HIGH; /* between strips */
    static constexpr int WEIGHTS = S * PITCH, SCALES = S * Q::SCALES;
    static constexpr int X_ROW = COLS * 2;
    static constexpr int SLOT = WEIGHTS + (ONE ? 0 : ROWS * X_ROW);
    static constexpr int HEAD = SCALES + (ONE ? 2 * X_ROW : 0);
    /* Heads for so many slots: in use, and asked for. */
    __host__ __device__ static constexpr int heads(int slots) { return slots / 2 + 1; }
    __host__ __device__ static constexpr int bytes(int slots) {
        return slots * SLOT + heads(slots) * HEAD;
    }
};

/* ---- The ring ---- */

/* What a warp reads, in turn: the halves of tiles of its run of K, first of S strips, then of the S
 * strips wm further on. */
template <enum kern_dtype T, int S, int ROWS> struct ring {
    using Q = quant<T>;
    using U = unit<T, S, ROWS>;
    const uint8_t *next; /* tile of the first of the strips at hand */
    const uint16_t *x;   /* of the lane's piece of 16 bytes of a row */
    size_t pitch;
    ptrdiff_t jump;            /* bytes from the end of a run to the next strips' */
    uint32_t slots, bars;      /* shared memory; a barrier a slot */
    uint32_t heads, heads_end; /* their ring */
    uint32_t scales_to, x_to;  /* heads of the next tile of weights and of x */
    int strips;                /* left of the block's, those at hand included */
    int w_left, x_left, run;   /* tiles of weights and of x to ask for; of a run */
    int step, n, x_stride;

    /* Weights of the next tile's half `half`, into slot i. All lanes. */
    __device__ __forceinline__ void fill_weights(int i, int half) {
        uint32_t to = slots + (uint32_t)(i * U::SLOT), bar = bars + 8u * (uint32_t)i;
        if (brings()) {
            int count = S == 2 && strips > 1 ? 2 : 1;
            expect(bar, count * (half == 0 ? U::PITCH + Q::SCALES : U::PITCH));
#pragma unroll
            for (int s = 0; s < S; s++) {
                if (s >= count) break;
                const uint8_t *from = next + (s ? pitch : 0);
                uint32_t at = to + (uint32_t)(s * U::PITCH);
                bring(at, from + half * U::LOW, U::LOW, bar);
                if (Q::HIGH) bring(at + U::LOW, from + Q::HIGH_AT + half * U::HIGH, U::HIGH, bar);
                if (half == 0)
                    bring(scales_to + (uint32_t)(s * Q::SCALES), from + Q::SCALES_AT, Q::SCALES,
                          bar);
            }
        }
        if (half == 0) return;
        if ((scales_to += U::HEAD) == heads_end) scales_to = heads;
        next += Q::TILE;
        if (--w_left == 0) {
            w_left = run;
            strips -= step;
            next += jump;
        }
    }
    /* x of the same. A half's: lane l brings piece l % 16 of 16 bytes of every other row. */
    __device__ __forceinline__ void fill_x(int i, int half) {
        int lane = (int)threadIdx.x % 32;
        if (U::ONE) {
            if (half == 0) copy_16(x_to + (uint32_t)(U::SCALES + 16 * lane), x);
            else if ((x_to += U::HEAD) == heads_end) x_to = heads;
        } else {
            uint32_t to = slots + (uint32_t)(i * U::SLOT + U::WEIGHTS + 16 * lane);
#pragma unroll
            for (int r = 0; r < ROWS; r += 2)
                if (r + lane / 16 < n)
                    copy_16(to + (uint32_t)(r * U::X_ROW), x + half * U::COLS + r * x_stride);
        }
        copies_arrive(bars + 8u * (uint32_t)i);
        if (half == 0) return;
        x += Q::K;
        if (--x_left == 0) x_left = run, x -= run * Q::K;
    }
};

/* ---- The kernel ---- */

template <enum kern_dtype T, int S, int ROWS, int ODD>
__global__ void __launch_bounds__(32 * WARPS<T>, 2)
    skinny_super_kernel(const __grid_constant__ quant_job j) {
    using Q = quant<T>;
    using U = unit<T, S, ROWS>;
    extern __shared__ __align__(128) uint8_t smem[];
    int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = (int)threadIdx.x % 32;
    int block = (int)blockIdx.x;
    int strip = j.strips * block / j.blocks, end = j.strips * (block + 1) / j.blocks;
    int m = warp / j.wk, k = warp - m * j.wk; /* the warp's place */
    int first = j.tiles * k / j.wk, run = j.tiles * (k + 1) / j.wk - first;
    int groups = (end - strip + S - 1) / S, rounds = (groups + j.wm - 1) / j.wm;
    int halves = (groups - m + j.wm - 1) / j.wm * run * 2; /* to read */
    uint8_t *own = smem + warp * j.region;

    if (j.late < 0 || halves - j.slots < j.late) pdl_trigger();
    ring<T, S, ROWS> r;
    r.pitch = j.pitch, r.step = S * j.wm;
    r.next = j.weights + (size_t)(strip + m * S) * j.pitch + (size_t)(first * Q::TILE);
    r.jump = r.step * (ptrdiff_t)j.pitch - (ptrdiff_t)(run * Q::TILE);
    r.slots = smem_addr(own);
    r.bars = smem_addr(smem) + (uint32_t)(j.wm * j.wk * j.region + warp * BAR_BYTES);
    r.heads = r.scales_to = r.x_to = r.slots + (uint32_t)(j.slots * U::SLOT);
    r.heads_end = r.heads + (uint32_t)(U::heads(j.slots) * U::HEAD);
    r.strips = end - strip - m * S, r.w_left = r.x_left = r.run = run;
    r.n = j.n, r.x_stride = j.x_stride;
    r.x = (const uint16_t *)j.x + first * Q::K;
    r.x += U::ONE ? 8 * lane : lane / 16 * j.x_stride + lane % 16 * 8;
    slots_init(r.bars, j.slots);
#pragma unroll 1
    for (int i = 0; i < j.slots && i < halves; i++) r.fill_weights(i, i % 2);
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < j.slots && i < halves; i++) r.fill_x(i, i % 2);

    uint32_t magic = slots_magic(r.bars);
    /* The lane's row of x; of the only one, its block. */
    int x_at = lane % 4 * (Q::HALVES ? 8 : 16);
    x_at += U::ONE ? U::SCALES + lane / 4 * 64 : U::WEIGHTS + min(lane / 4, j.n - 1) * U::X_ROW;
    const uint8_t *heads = own + j.slots * U::SLOT, *head = heads;
    int slot = 0;
    uint32_t parity = 0;
    float *red = (float *)(own + j.red);
    for (int done = 0, round = 0; round < rounds; round++) {
        sums_of acc[S][1] = {};
        for (int u = 0; u < run && done < halves; u++) {
            tile_sums<T, S, ROWS> tile;
#pragma unroll
            for (int half = 0; half < 2; half++, done++) {
                const uint8_t *at = own + slot * U::SLOT;
                if (halves - done - j.slots == j.late) pdl_trigger();
                bar_wait(r.bars + 8u * (uint32_t)slot, parity);
                if (half == 0) tile.begin(head, head + x_at, magic);
                tile.add_groups(at, U::PITCH, at + U::LOW, at + x_at, half, acc);
                if (half == 1) tile.end(head, magic, acc);
                __syncwarp();
                if (done + j.slots < halves) {
                    r.fill_weights(slot, half ^ ODD);
                    r.fill_x(slot, half ^ ODD);
                }
                if (++slot == j.slots) slot = 0, parity ^= 1;
            }
            if ((head += U::HEAD) == heads + U::heads(j.slots) * U::HEAD) head = heads;
        }
        store_partial<T, S, 1>(red, j.n, lane, acc);
        red += S * j.n * RED_STRIDE;
        if ((round + 1) % j.rounds != 0 && round + 1 < rounds) continue;
        __syncthreads();
        int summed = min(j.rounds * S * j.wm, end - strip);
        reduce<S>(j, smem + j.red, strip, summed, 0, j.n);
        if (round + 1 == rounds) break;
        __syncthreads();
        strip += summed;
        red = (float *)(own + j.red);
    }
}

/* ---- How the work is cut ---- */

template <enum kern_dtype T, int S, int ROWS> void plan(const struct cuda_ctx *c, quant_job *j) {
    using U = unit<T, S, ROWS>;
    int red = S * j->n * RED_STRIDE * 4, halves = div_up(j->tiles, j->wk) * 2;
    int rounds = cut_strips(j, S, c), kept = rounds > 1 ? red : 0;
    int room = room_in(j, half_smem(c));
    j->passes = 1;
    j->pitch = (size_t)j->tiles * quant<T>::TILE;
    if (room < U::bytes(2) + kept) room = room_in(j, c->max_smem);
    for (j->slots = 1; j->slots < MAX_SLOTS && j->slots < rounds * halves; j->slots++)
        if (U::bytes(j->slots + 1) + kept > room) break;
    int ring = U::bytes(j->slots);
    j->rounds = (room - ring) / red < rounds ? (room - ring) / red : rounds;
    if (j->rounds < 1) j->rounds = 1;
    place_partials(j, ring, rounds, red);
    /* Where a block has several rounds, blocks end apart, and an SM whose first block has ended
     * would get two of the next kernel's while another has none. */
    j->late = rounds > 1 ? -1 : T == KERN_Q6_K ? 1 : 3;
}

template <enum kern_dtype T, int S, int ROWS, int ODD>
int launch_as(struct cuda_ctx *c, quant_job *j) {
    static int allowed = -1; /* the device that knows of the most shared memory */
    return quant_launch(c, skinny_super_kernel<T, S, ROWS, ODD>, &allowed, j);
}
template <enum kern_dtype T, int S, int ROWS> int launch(struct cuda_ctx *c, quant_job *j) {
    plan<T, S, ROWS>(c, j);
    return j->slots % 2 ? launch_as<T, S, ROWS, 1>(c, j) : launch_as<T, S, ROWS, 0>(c, j);
}

struct launcher {
    struct cuda_ctx *c;
    quant_job *j;
    template <enum kern_dtype T, int S> int run_strips() {
        return j->n == 1 ? launch<T, S, 1>(c, j) : launch<T, S, 8>(c, j);
    }
    template <enum kern_dtype T> int run() {
        if constexpr (quant<T>::SUPER)
            return j->strips > c->n_sms ? run_strips<T, 2>() : run_strips<T, 1>();
        ASSERT(false);
        return 0;
    }
};

} // namespace

int cuda_skinny_super(struct cuda_ctx *c, enum kern_dtype type, quant_job *j) {
    launcher l = {c, j};
    return quant_dispatch(type, l);
}
