/* out = x W^T for 1..8 generated rows with weights of 16-bit floats, on chips with room for a large
 * ring (sm_90): skinny_few.cu's stream, asked for by warps of its own.
 *
 * Why. In skinny_few.cu the warps that multiply ask for the weights, too. A warp whose copies
 * memory has no room for stands still, so that a ring that lay ready before its activations came
 * was worked off no faster than memory fills one: what it held gained nothing. With warps that load
 * and warps that multiply, a ready ring of 160 KB took 1.9 us, 2.4 times memory's pace (by a
 * timeline of a step, of a first form of this file), and is in flight again meanwhile.
 *
 * Measured on an H200, ms of a step, in turns in one run (ef43bf8 in brackets, which was a little
 * faster than skinny_few.cu with 8B and 4 to 6 % with 1B): 8B one row 3.79 (3.87), behind 32K 4.79
 * (4.89), five rows 5.06 (5.19); 1B 0.76 to 0.81 (0.84), 1.06 to 1.10 (1.13), 1.21 to 1.24 (1.26).
 * A product of 4096 x 14336: 27.9 us at one row, 28.3 at eight (28.9); floor 25.8.
 *
 * - Copies are cp.async. By tensor maps (one thread a range asks) a steady stream of 1 GB came to
 *   4.33 TB/s, so to 4.58, and a product's first bytes came 1 us later.
 * - The first activations come by a loop of copies: 10 to 16 unrolled loads a thread took 1.5 to
 *   2.4 us. Blocks begin at different steps, or all would ask L2 for the same lines at a time.
 * - ef43bf8 ran a pass of zeros before pdl_wait(), so that the code would be near when
 *   activations come: a step of 1B took 5 % longer, 8B 1.5 %. What loads needs the same path.
 * - Steps are unrolled by four: 1 to 2 %. By two or eight: the same or less.
 * - The next kernel may start at once.
 * - Before pdl_wait() an SM waits for 64 KB at a time. What a step of 8B, of 1B takes longer with
 *   24 KB: 8, 16 %; 40 KB: 1, 3 %; 48 or 96 KB: 0.5 %; 128 KB: 1 %.
 * - The same binary's 1B steps differ by up to 5 % from process to process (where its code lies?).
 * - Two blocks an SM, half a ring each, took twice as long: the next product's blocks met in pairs
 *   on the SMs that were free first.
 *
 * How the work is cut. As in skinny_few.cu, a block owns a stretch of tiles of 16 weight rows and
 * walks them M_TILES at a time; its 8 multiplying warps are the 8 chains of skinny.cuh. The two
 * chains of a range share a ring, which the range's loader fills with steps of 64 columns of all
 * rows of a pass; ranges meet when a pass ends.
 *
 * mma.m16n8k16: A = 16 weight rows, B = 8 activation rows, so a row of the call is a column of B
 * and its bits depend on no other. Rows that the call has not got are never loaded; what stands in
 * their place flows into columns that nobody stores.
 *
 * A slot: rows of 128 bytes, chunk c (16 bytes) of row r at c ^ (r % 8): ldmatrix's 8 rows of a
 * chunk and cp.async's 4 rows of 8 chunks both meet every bank once. */
#include "kernels/cuda/barrier.cuh"
#include "kernels/cuda/skinny.cuh"

enum {
    WARPS = SKINNY_WARPS, /* that multiply */
    MULTIPLIERS = 32 * WARPS,
    THREADS = MULTIPLIERS + 32 * RANKS, /* and a warp a range that loads */
    PITCH = BLOCK_COLS * 2,
    CHUNKS = PITCH / 16,
    LOAD_ROWS = 32 / CHUNKS, /* that a warp copies at once */
    MAX_SLOTS = 16,
    SUMS_BARRIER = 1,       /* of all that multiply */
    RANGE_BARRIER = 2,      /* .. + rank: of a range's two */
    SMEM = 215 << 10,       /* one block an SM, and room for small kernels beside it */
    FILL_WINDOW = 64 << 10, /* bytes that an SM asks for at a time before pdl_wait */
};

template <int M_TILES_> struct cut {
    enum {
        M_TILES = M_TILES_, /* tiles of 16 weight rows a pass */
        W_BYTES = 16 * M_TILES * PITCH,
        SLOT = W_BYTES + STREAM_MAX * PITCH,
        STAGE = RANKS * SLOT,
        RED_BYTES = WARPS * M_TILES * 512,
        FIT = (SMEM - RED_BYTES) / STAGE,
        SLOTS = FIT < MAX_SLOTS ? FIT : MAX_SLOTS,
        /* slots that wait for memory at a time before pdl_wait */
        WINDOW = FILL_WINDOW / STAGE > 1 ? FILL_WINDOW / STAGE : 1,
    };
    static_assert(SLOTS >= 3, "a ring");
};

/* A range's ring: `full` once all lanes of its loader have their copies, `empty` once both chains
 * have read the slot. */
struct ring_bars {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS];
};

__device__ static inline void copy_often(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

/* ---- A range's part of a block ---- */

template <class F> struct range {
    int begin, steps; /* blocks of 64 columns of the range */
    int tile, tile_end, passes;
    int total, used; /* steps of all passes; those that fill the ring before pdl_wait */
    uint32_t ring, full, empty;

    __device__ range(const skinny_args &a, int rank, uint32_t smem, ring_bars *bars) {
        int n_tiles = a.rows16 / 16, each = n_tiles / (int)gridDim.x, b = blockIdx.x;
        int more = n_tiles - each * (int)gridDim.x; /* the first `more` blocks have a tile more */
        begin = rank_begin(a.n_blocks, rank);
        steps = rank_begin(a.n_blocks, rank + 1) - begin;
        tile = b * each + min(b, more);
        tile_end = tile + each + (b < more);
        passes = (tile_end - tile + F::M_TILES - 1) / F::M_TILES;
        total = passes * steps;
        used = min(total, a.slots);
        ring = smem + rank * a.slots * F::SLOT;
        full = smem_addr(bars[rank].full);
        empty = smem_addr(bars[rank].empty);
    }
};

/* ---- Loading ---- */

/* The loader's warp: lane l copies chunk l % 8 of rows l / 8, l / 8 + 4, .. of a step. */
template <class F>
__device__ static inline void load_range(const skinny_args &a, const range<F> &r) {
    int row = threadIdx.x % 32 / CHUNKS, chunk = threadIdx.x % CHUNKS, tile = r.tile, step = 0;
    size_t turn = (size_t)LOAD_ROWS * a.stride; /* to a lane's next row */
    size_t first = (size_t)r.begin * BLOCK_COLS + chunk * 8 + (size_t)row * a.stride;
    const uint16_t *w = a.w + (size_t)tile * 16 * a.stride + first, *x = a.x + first;
    uint32_t even = row * PITCH + (chunk ^ row) * 16, odd = row * PITCH + (chunk ^ (row + 4)) * 16;
    uint64_t policy = read_once_policy();
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int i = 0; i < r.total; i++) {
        bool filled = i >= r.used; /* the ring has been, once */
        if (!filled && i >= F::WINDOW) bar_wait(r.full + 8 * (i - F::WINDOW), 0);
        if (i == r.used) pdl_wait(); /* x */
        if (filled) bar_wait(r.empty + 8 * slot, parity);
        uint32_t dst = r.ring + slot * F::SLOT;
        int n = (r.tile_end - tile) * (16 / LOAD_ROWS);
#pragma unroll
        for (int j = 0; j < F::M_TILES * 16 / LOAD_ROWS; j++)
            if (j < 16 / LOAD_ROWS || j < n)
                copy_once(dst + j * LOAD_ROWS * PITCH + (j % 2 ? odd : even), w + j * turn, policy);
        if (filled)
#pragma unroll
            for (int j = 0; j < STREAM_MAX / LOAD_ROWS; j++)
                if (row + j * LOAD_ROWS < a.n)
                    copy_often(dst + F::W_BYTES + j * LOAD_ROWS * PITCH + (j % 2 ? odd : even),
                               x + j * turn + step * BLOCK_COLS);
        copies_arrive(r.full + 8 * slot);
        w += BLOCK_COLS;
        if (++step == r.steps) {
            step = 0;
            tile += F::M_TILES;
            w += 16 * F::M_TILES * (size_t)a.stride - (size_t)r.steps * BLOCK_COLS;
        }
        if (++slot == a.slots) slot = 0, parity ^= (uint32_t)filled;
    }
    copy_commit();
    copy_wait<0>(); /* before the warp ends */
}

/* Activations of the first `used` steps, by the range's two multiplying warps; `place` of 64. A
 * (step, row) takes 8 lanes. Blocks begin at different steps, or all would ask for the same lines
 * at a time. */
template <class F>
__device__ static inline void load_first_x(const skinny_args &a, const range<F> &r, int place) {
    int chunk = place % CHUNKS, from = min((int)(blockIdx.x & (MAX_SLOTS - 1)), r.used);
#pragma unroll 1
    for (int p = place / CHUNKS; p < r.used << a.log_n; p += 64 / CHUNKS) {
        int row = p & ((1 << a.log_n) - 1), s = (p >> a.log_n) + from;
        if (s >= r.used) s -= r.used;
        int step = s;
        while (step >= r.steps) step -= r.steps;
        if (row < a.n)
            copy_often(r.ring + s * F::SLOT + F::W_BYTES + row * PITCH + ((chunk ^ (row & 7)) << 4),
                       a.x + (size_t)row * a.stride + (r.begin + step) * BLOCK_COLS + chunk * 8);
    }
    copy_commit();
    copy_wait<0>();
}

/* ---- Multiplying ---- */

/* A step of a chain: M_TILES products of 16 x 8 over 32 columns, from the slot into
 * registers, then the slot is free, then multiplied. */
template <class F, bool BF16> struct operands {
    uint32_t a[2][F::M_TILES][4], b[4];

    __device__ void load(uint32_t slot, int chain) {
        int lane = threadIdx.x % 32, row = lane % 16, turn = lane % 8, first = chain * CHUNKS / 2;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < F::M_TILES; m++)
                load_matrix4(a[h][m], slot + (m * 16 + row) * PITCH +
                                          ((first + 2 * h + lane / 16) ^ turn) * 16);
        load_matrix4(b, slot + F::W_BYTES + turn * PITCH + ((first + lane / 8) ^ turn) * 16);
    }
    __device__ void multiply(float acc[F::M_TILES][1][4]) const {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < F::M_TILES; m++)
                mma<BF16>(acc[m][0], a[h][m], b[2 * h], b[2 * h + 1]);
    }
};

/* A chain's warp. */
template <class F, bool BF16>
__device__ static inline void multiply_range(const skinny_args &a, const range<F> &r, float *red) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = warp / CHAINS;
    int chain = warp % CHAINS, slot = 0;
    uint32_t parity = 0;
    pdl_wait();
    load_first_x(a, r, chain * 32 + lane);
    named_sync(RANGE_BARRIER + rank, 32 * CHAINS);
#pragma unroll 1
    for (int pass = 0; pass < r.passes; pass++) {
        float acc[F::M_TILES][1][4] = {};
#pragma unroll 4
        for (int step = 0; step < r.steps; step++) {
            operands<F, BF16> o;
            bar_wait(r.full + 8 * slot, parity);
            o.load(r.ring + slot * F::SLOT, chain);
            __syncwarp();
            if (lane == 0) bar_arrive(r.empty + 8 * slot);
            o.multiply(acc);
            if (++slot == a.slots) slot = 0, parity ^= 1;
        }
        named_sync(SUMS_BARRIER, MULTIPLIERS); /* the sums before have been read */
        skinny_store_sums<F::M_TILES, 1>(a, red, r.tile + pass * F::M_TILES, r.tile_end, acc,
                                         SUMS_BARRIER);
    }
}

template <class F, bool BF16>
__global__ void __launch_bounds__(THREADS, 1)
    skinny_stream_kernel(const __grid_constant__ skinny_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ ring_bars bars[RANKS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool loads = warp >= WARPS;
    int rank = loads ? warp - WARPS : warp / CHAINS;
    range<F> r(a, rank, smem_addr(smem), bars);
    pdl_trigger();
    if (loads && lane < a.slots) {
        bar_init(r.full + 8 * lane, 32);
        bar_init(r.empty + 8 * lane, CHAINS);
    }
    __syncthreads();
    if (loads) load_range(a, r);
    else multiply_range<F, BF16>(a, r, (float *)(smem + RANKS * a.slots * F::SLOT));
}

/* ---- Choice and launch: cuts here change no bits ---- */

template <class F, bool BF16> static int launch(struct cuda_ctx *c, struct skinny_args a) {
    static uint64_t allowed; /* a bit a device: more than 48 KiB of shared memory */
    auto kernel = skinny_stream_kernel<F, BF16>;
    uint64_t bit = 1ull << (c->device & 63);
    if (!(allowed & bit)) {
        int rc = cuda_allow_smem(c, kernel, F::SLOTS * F::STAGE + F::RED_BYTES);
        if (rc) return rc;
        allowed |= bit;
    }
    int tiles = a.rows16 / 16, each = (tiles + c->n_sms - 1) / c->n_sms;
    int blocks = (tiles + each - 1) / each;
    int passes = (each + F::M_TILES - 1) / F::M_TILES;
    int longest = passes * ((a.n_blocks + RANKS - 1) / RANKS);
    /* Less than a ring: then the next product's blocks find room beside these. */
    a.slots = longest < F::SLOTS ? longest : (int)F::SLOTS;
    for (a.log_n = 0; 1 << a.log_n < a.n;) a.log_n++;
    size_t smem = (size_t)a.slots * F::STAGE + F::RED_BYTES;
    return CUDA_LAUNCH(c, kernel, dim3(blocks), dim3(THREADS), smem, a);
}

/* Three tiles a pass where that is all; else two, for the memory's streams. */
template <bool BF16> static int launch_rows(struct cuda_ctx *c, const struct skinny_args *a) {
    int each = (a->rows16 / 16 + c->n_sms - 1) / c->n_sms; /* tiles of a block */
    if (each == 3) return launch<cut<3>, BF16>(c, *a);
    return each > 1 ? launch<cut<2>, BF16>(c, *a) : launch<cut<1>, BF16>(c, *a);
}

bool cuda_skinny_streams(const struct cuda_ctx *c, int n) {
    return n <= STREAM_MAX && c->sm >= 90 && c->max_smem >= SMEM + sizeof(ring_bars) * RANKS;
}

int cuda_skinny_stream(struct cuda_ctx *c, const struct skinny_args *a, bool bf16) {
    return bf16 ? launch_rows<true>(c, a) : launch_rows<false>(c, a);
}
