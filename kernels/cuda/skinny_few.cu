/* out = x W^T for 1..32 generated rows with weights of 16-bit floats: a stream of W. (Up to 8 where
 * a block may hold a large ring: skinny_stream.cu.)
 *
 * 4096 x 14336 are 117 MB, 25.8 us at 4.55 TB/s. A step is a chain of such products with small
 * kernels between them, and what it loses it loses at the borders: a product ends (its last bytes
 * arrive, sums meet, the grid drains), the small kernel runs, the next product begins (launch,
 * activations, first bytes): some 5 us, or 23 MB not read. So:
 *
 * - One block an SM, which takes nearly all of its shared memory as a ring. Weights are constant:
 *   the next product's block starts when this one ends, on each SM for itself, and fills its ring
 *   before pdl_wait(), up to 20 MB on all SMs, while the small kernel between runs. What is lost at
 *   a border is 2 to 3 us, from a block's last bytes to the next one's first.
 * - Two blocks an SM, this product's and the next one's, each with half a ring, were slower: where
 *   blocks end at different times, an SM gets two blocks of the next product and another none.
 *   So was asking for lines to come into L2, those behind the ring or the next product's first:
 *   the way from L2 to the SMs is hardly wider than that from memory.
 * - Before pdl_wait a block waits for 40 KB at a time: 27 MB of requests in front of theirs cost
 *   the small kernels between two products, and a short attention, 2 to 4 us.
 *
 * Measured on an H200, us (byte floor): 4096 x 14336, 1 row 28.1, 8 rows 29.4 (25.8); 28672 x 4096
 * 55.4, 58.0 (51.6); 6144 x 4096 12.5, 13.3 (11.1); 4096 x 4096 8.9, 9.7 (7.4); 2048 x 8192 11.1,
 * 11.4 (7.4).
 *
 * How the work is cut. A block owns a stretch of tiles of 16 weight rows, at most one tile more
 * than another block, and walks them M_TILES at a time. Its 8 warps are the 8 chains of skinny.cuh:
 * a warp streams its own columns of all rows of a pass through a ring of its own, in steps of 32
 * columns, up to 16 steps ahead, waiting for nobody until the pass ends and the chains' sums meet.
 * Activations go through the ring as well. 132 x 100..160 KB in flight.
 *
 * mma.m16n8k16: A = 16 weight rows, B = 8 activation rows, so a row of the call is a column of B
 * and its bits depend on no other. Rows that the call has not got are never loaded.
 *
 * A slot: rows of 64 bytes, chunk c (16 bytes) of row r at c ^ (r / 2 % 4): ldmatrix's 8 rows of a
 * chunk and cp.async's 2 rows of 4 chunks both meet every bank once. */
#include "kernels/cuda/skinny.cuh"

enum {
    WARPS = SKINNY_WARPS,
    THREADS = 32 * WARPS,
    STEP_COLS = BLOCK_COLS / CHAINS,
    PITCH = STEP_COLS * 2,
    SMEM_SMALL = 99 << 10,  /* a block's, on every chip from sm_80 */
    SMEM_BIG = 216 << 10,   /* one block an SM, and room for small kernels beside it */
    FILL_WINDOW = 40 << 10, /* bytes that an SM asks for at a time before pdl_wait */
};

template <int M_TILES_, int N_TILES_, bool BIG> struct few {
    enum {
        M_TILES = M_TILES_, /* tiles of 16 weight rows a pass */
        N_TILES = N_TILES_, /* of 8 rows of the call */
        W_BYTES = 16 * M_TILES * PITCH,
        SLOT = W_BYTES + 8 * N_TILES * PITCH,
        RED_BYTES = WARPS * M_TILES * N_TILES * 512,
        FIT = ((BIG ? SMEM_BIG : SMEM_SMALL) - RED_BYTES) / (WARPS * SLOT),
        SLOTS = FIT < 16 ? FIT : 16,
        /* slots that wait for memory at a time before pdl_wait */
        WINDOW = FILL_WINDOW / (WARPS * SLOT) > 1 ? FILL_WINDOW / (WARPS * SLOT) : 1,
    };
    static_assert(SLOTS >= 3, "a ring");
};

/* ---- Where a warp is in its stream ---- */

/* Position in the stream: a step of a pass. The address is of the lane's first chunk of W. */
struct walker {
    const uint16_t *w;
    int step, tile;
};

template <class F> struct stream {
    const uint16_t *x;
    size_t stride;
    int steps, tile_end, n; /* steps of a pass; tiles of the block end here; rows of the call */
    uint32_t ring, lane_smem;
    uint64_t policy;

    __device__ void next(walker &at) const {
        at.w += BLOCK_COLS;
        if (++at.step < steps) return;
        at.step = 0;
        at.tile += F::M_TILES;
        at.w += 16 * F::M_TILES * stride - (size_t)steps * BLOCK_COLS;
    }
    __device__ void load_w(const walker &at, int slot) const {
        uint32_t dst = ring + slot * F::SLOT + lane_smem;
        int n_loads = 2 * (tile_end - at.tile);
#pragma unroll
        for (int i = 0; i < 2 * F::M_TILES; i++)
            if (i < 2 || i < n_loads) copy_once(dst + i * 8 * PITCH, at.w + i * 8 * stride, policy);
    }
    __device__ void load_x(int step, int slot) const {
        uint32_t dst = ring + slot * F::SLOT + F::W_BYTES + lane_smem;
        int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < F::N_TILES; i++)
            if (row + i * 8 < n)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + i * 8 * PITCH),
                             "l"(x + i * 8 * stride + step * BLOCK_COLS)
                             : "memory");
    }
    /* Activations of slots that were filled before pdl_wait(), by plain loads: they have not to
     * wait for the weights that were asked for before. */
    __device__ uint4 fetch_x(int s, int i) const {
        int row = threadIdx.x % 32 / 4 + i * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < n) /* volatile: asked for here, not where it is stored */
            asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "l"(x + i * 8 * stride + s % steps * BLOCK_COLS)
                         : "memory");
        return v;
    }
    __device__ void store_x(int s, int i, uint4 v) const {
        store_shared16(ring + s * F::SLOT + F::W_BYTES + lane_smem + i * 8 * PITCH, v);
    }
};

/* ---- The kernel ---- */

/* A step: M_TILES x N_TILES products of 16 x 8 over 32 columns, from the slot into registers,
 * then the slot is free, then multiplied. */
template <class F> struct operands {
    uint32_t a[2][F::M_TILES][4], b[F::N_TILES][4];

    __device__ void load(uint32_t slot) {
        int lane = threadIdx.x % 32, row = lane % 16, turn = lane / 2 % 4;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < F::M_TILES; m++)
                load_matrix4(a[h][m],
                             slot + (m * 16 + row) * PITCH + ((2 * h + lane / 16) ^ turn) * 16);
#pragma unroll
        for (int n = 0; n < F::N_TILES; n++)
            load_matrix4(b[n],
                         slot + F::W_BYTES + (n * 8 + lane % 8) * PITCH + ((lane / 8) ^ turn) * 16);
    }
    template <int FORM> __device__ void multiply(float acc[F::M_TILES][F::N_TILES][4]) {
#pragma unroll
        for (int n = 0; n < F::N_TILES; n++)
            if (FORM == FORM_X_BF16) bf16_to_f16(b[n]);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < F::M_TILES; m++) {
                if (FORM == FORM_W_BF16) bf16_to_f16(a[h][m]);
#pragma unroll
                for (int n = 0; n < F::N_TILES; n++)
                    mma<FORM == FORM_BF16>(acc[m][n], a[h][m], b[n][2 * h], b[n][2 * h + 1]);
            }
    }
};

template <class F, int FORM>
__global__ void __launch_bounds__(THREADS, 1)
    skinny_few_kernel(const __grid_constant__ skinny_args a) {
    extern __shared__ __align__(128) uint8_t smem[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = warp / CHAINS;
    int chain = warp % CHAINS;
    int n_tiles = a.rows16 / 16, n_each = n_tiles / (int)gridDim.x, b = blockIdx.x;
    int more = n_tiles - n_each * (int)gridDim.x; /* the first `more` blocks have a tile more */
    int tile = b * n_each + min(b, more);
    int begin = rank_begin(a.n_blocks, rank),
        col = begin * BLOCK_COLS + chain * STEP_COLS + lane % 4 * 8;
    stream<F> s;
    s.stride = a.stride;
    s.x = a.x + (size_t)(lane / 4) * s.stride + col;
    s.steps = rank_begin(a.n_blocks, rank + 1) - begin;
    s.tile_end = tile + n_each + (b < more);
    s.n = a.n;
    s.ring = smem_addr(smem) + warp * a.slots * F::SLOT;
    s.lane_smem = lane / 4 * PITCH + ((lane % 4) ^ (lane / 8)) * 16;
    s.policy = read_once_policy();
    walker ahead = {a.w + (size_t)(tile * 16 + lane / 4) * s.stride + col, 0, tile};
    int passes = (s.tile_end - tile + F::M_TILES - 1) / F::M_TILES;
    int to_load = passes * s.steps, used = min(to_load, a.slots);

#pragma unroll 1
    for (int i = 0; i < F::SLOTS; i++) {
        if (i < used) {
            s.load_w(ahead, i);
            s.next(ahead);
        }
        copy_commit();
        copy_wait<F::WINDOW>();
    }
    to_load -= used;
    pdl_trigger();
    pdl_wait();
    uint4 x[F::SLOTS][F::N_TILES];
#pragma unroll
    for (int i = 0; i < F::SLOTS * F::N_TILES; i++)
        x[i / F::N_TILES][i % F::N_TILES] = i / F::N_TILES < used
                                                ? s.fetch_x(i / F::N_TILES, i % F::N_TILES)
                                                : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < F::SLOTS * F::N_TILES; i++)
        if (i / F::N_TILES < used)
            s.store_x(i / F::N_TILES, i % F::N_TILES, x[i / F::N_TILES][i % F::N_TILES]);
    __syncwarp();
    float *red = (float *)(smem + WARPS * a.slots * F::SLOT);
    for (int pass = 0, slot = 0; pass < passes; pass++) {
        float acc[F::M_TILES][F::N_TILES][4] = {};
        for (int step = 0; step < s.steps; step++) {
            operands<F> o;
            copy_wait<F::SLOTS - 1>(); /* ours are here ... */
            __syncwarp();              /* ... and those of all lanes */
            o.load(s.ring + slot * F::SLOT);
            __syncwarp(); /* the slot has been read */
            if (to_load > 0) {
                s.load_w(ahead, slot);
                s.load_x(ahead.step, slot);
                s.next(ahead);
            }
            copy_commit();
            to_load--;
            o.template multiply<FORM>(acc);
            if (++slot == a.slots) slot = 0;
        }
        if (pass > 0) __syncthreads(); /* the sums before have been read */
        skinny_store_sums<F::M_TILES, F::N_TILES>(a, red, tile + pass * F::M_TILES, s.tile_end, acc,
                                                  0);
    }
}

/* ---- Choice and launch: cuts here change no bits ---- */

template <class F, int FORM> static int launch(struct cuda_ctx *c, struct skinny_args a) {
    static uint64_t allowed; /* a bit a device: more than 48 KiB of shared memory */
    auto kernel = skinny_few_kernel<F, FORM>;
    uint64_t bit = 1ull << (c->device & 63);
    if (!(allowed & bit)) {
        int rc = cuda_allow_smem(c, kernel, F::SLOTS * WARPS * F::SLOT + F::RED_BYTES);
        if (rc) return rc;
        allowed |= bit;
    }
    int tiles = a.rows16 / 16, each = (tiles + c->n_sms - 1) / c->n_sms;
    int blocks = (tiles + each - 1) / each;
    int passes = (each + F::M_TILES - 1) / F::M_TILES;
    int longest = passes * ((a.n_blocks + RANKS - 1) / RANKS);
    /* Less than a ring: then the next product's blocks find room beside these. */
    a.slots = longest < F::SLOTS ? longest : (int)F::SLOTS;
    size_t smem = a.slots * WARPS * F::SLOT + F::RED_BYTES;
    return CUDA_LAUNCH(c, kernel, dim3(blocks), dim3(THREADS), smem, a);
}

template <int N_TILES, int FORM>
static int launch_rows(struct cuda_ctx *c, const struct skinny_args &a) {
    bool big = c->max_smem >= SMEM_BIG;
    int each = (a.rows16 / 16 + c->n_sms - 1) / c->n_sms; /* tiles of a block */
    /* Four where that is one pass, or rows are short; else fewer streams for the memory. */
    bool four = each > 2 && (each <= 4 || a.n_blocks <= 32);
    if (N_TILES > 2) four = each > 2;
    if (big && four) return launch<few<4, N_TILES, true>, FORM>(c, a);
    if (big && each > 1) return launch<few<2, N_TILES, true>, FORM>(c, a);
    if (big) return launch<few<1, N_TILES, true>, FORM>(c, a);
    if (each > 1) return launch<few<N_TILES <= 2 ? 2 : 1, N_TILES, false>, FORM>(c, a);
    return launch<few<1, N_TILES, false>, FORM>(c, a);
}

template <int FORM> static int launch_form(struct cuda_ctx *c, const struct skinny_args &a) {
    const bool own = FORM == FORM_BF16 || FORM == FORM_F16; /* mixed types are rare: one instance */
    if (own && a.n <= 8) return launch_rows < own ? 1 : 4, FORM > (c, a);
    if (own && a.n <= 16) return launch_rows < own ? 2 : 4, FORM > (c, a);
    return launch_rows<4, FORM>(c, a);
}

int cuda_skinny_few(struct cuda_ctx *c, const struct skinny_args *a, enum form form) {
    switch (form) {
    case FORM_BF16:
        return launch_form<FORM_BF16>(c, *a);
    case FORM_F16:
        return launch_form<FORM_F16>(c, *a);
    case FORM_W_BF16:
        return launch_form<FORM_W_BF16>(c, *a);
    default:
        return launch_form<FORM_X_BF16>(c, *a);
    }
}
