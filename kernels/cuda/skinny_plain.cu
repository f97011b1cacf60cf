/* out = x W^T for generated rows with weights of 16-bit floats: W [rows][stride], x [n][stride].
 * Up to 32 rows go to skinny_stream.cu and skinny_few.cu; here more.
 *
 * Bound by memory: 4096 x 14336 are 117 MB, 27 us at 4.3 TB/s, whatever n is up to 64 (tensor cores
 * do 64 rows of a tile in a third of the time that its bytes take). Little's law asks for 30 KB in
 * flight on each of 132 SMs; a block keeps up to 90 KB, and two blocks fit an SM. Activations come
 * from L2 once a tile of weight rows, so that the tiles are tall: 64 rows of x and 64 of W cost L2
 * as much as twice the weights.
 *
 * How the work is cut. A block owns a tile of 32 or 64 weight rows and walks K in stages of 64
 * columns through a ring of slots in shared memory, filled by cp.async many stages ahead. A slot
 * holds the tile's weights and the activations of all rows of the call (up to 64, more rows are
 * further blocks, scheduled next to each other so that the weights come from L2). The warps of a
 * block share the stage out: M_WARPS by weight rows, two by columns, a chain each. Where tiles are
 * few, a cluster of four blocks takes the four ranges of K. In the end the partial sums of both
 * chains and of the cluster's blocks meet in shared memory.
 *
 * mma.m16n8k16: A = 16 weight rows, B = 8 activation rows, so that a row of the call is a column of
 * B: its bits depend on no other column. Rows that a call has not got are never loaded; what stands
 * in their place flows into columns that nobody stores.
 *
 * The order of a sum is skinny.cuh's; a block that walks all ranges adds them up in registers. The
 * cut, the number of B tiles and of slots change no sum.
 *
 * Weights are constant, so the ring is filled with them before pdl_wait(): the first bytes are on
 * their way while the kernel before still runs. Its activations follow by plain loads; from then on
 * both go through cp.async. (One group for both at the start would make the first stage wait for
 * the weights of all others.)
 *
 * Shared memory: a row of a stage is 8 chunks of 16 bytes, chunk c of row r at c ^ (r & 7):
 * ldmatrix reads 8 rows of one chunk, cp.async writes 8 chunks of one row, both without conflicts.
 *
 * Mixed types (a bf16 matrix after f16 activations or the reverse; rare) are multiplied in f16,
 * converted after ldmatrix. */
#include "kernels/cuda/skinny.cuh"

/* ---- Cuts ---- */

enum {
    SMEM_LIMIT = 99 << 10, /* a block's, on every chip from sm_80; two blocks an SM on sm_90 */
    MAX_SLOTS = 16,
    MAX_N_TILES = 8, /* 64 rows a pass */
    RED_PAD = 4,
};

template <int M_WARPS_, int M_TILES_> struct cut {
    enum {
        M_WARPS = M_WARPS_,
        M_TILES = M_TILES_, /* tiles of 16 weight rows a warp */
        K_WARPS = CHAINS,
        K_STAGE = BLOCK_COLS,
        THREADS = 32 * M_WARPS * K_WARPS,
        ROWS = 16 * M_WARPS * M_TILES,
        K_WARP = K_STAGE / K_WARPS, /* columns of a stage that a warp multiplies */
        CHUNKS = K_STAGE / 8,       /* of 16 bytes a row */
        PITCH = K_STAGE * 2,
        ROW_STEP = THREADS / CHUNKS, /* rows that the block loads at once */
        W_BYTES = ROWS * PITCH,
        W_LOADS = ROWS / ROW_STEP,
    };
    static_assert(K_WARP == 32, "a pair of k16");
    static_assert(ROW_STEP % 8 == 0, "one swizzle for all of a thread's rows");
    static_assert(ROWS % ROW_STEP == 0, "whole loads");
};
typedef cut<2, 1> cut_small; /* 32 rows */
typedef cut<4, 1> cut_mid;   /* 64 */

template <class C, int N_TILES> struct ring {
    enum {
        X_BYTES = 8 * N_TILES * C::PITCH,
        SLOT = C::W_BYTES + X_BYTES,
        FIT = SMEM_LIMIT / SLOT,
        SLOTS = FIT < MAX_SLOTS ? FIT : MAX_SLOTS,
        X_LOADS = (8 * N_TILES + C::ROW_STEP - 1) / C::ROW_STEP,
        AT_ONCE = X_LOADS > 8 ? 1 : 16 / X_LOADS,
        BATCH = AT_ONCE < SLOTS ? AT_ONCE : SLOTS - 1, /* stages whose first x load together */
        RED_PITCH = C::ROWS + RED_PAD,
        RED_BYTES = C::K_WARPS * 8 * N_TILES * RED_PITCH * 4,
    };
    static_assert(SLOTS >= 3, "two stages in flight at least");
    static_assert(RED_BYTES <= SLOTS * SLOT, "partial sums take the ring's place");
};

/* ---- Instructions ---- */

__device__ static inline void copy_async(uint32_t dst, const void *src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src)
                 : "memory");
}

/* All threads of the cluster: shared memory written before is visible behind it. */
__device__ static inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}
/* Orders nothing: no block ends before all have come here. */
__device__ static inline void cluster_meet() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::
                     : "memory");
#endif
}
/* The float at `address` of our shared memory in that of the cluster's block `rank`. */
__device__ static inline float cluster_load(uint32_t address, int rank) {
    float v = 0;
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
#endif
    return v;
}

/* ---- Pieces of the kernel ---- */

/* What a thread loads: chunk `chunk` of rows first, first + ROW_STEP, ... of a stage. */
template <class C, int N_TILES> struct loader {
    typedef ring<C, N_TILES> R;
    const uint16_t *w, *x;   /* the thread's first chunk of stage 0 */
    size_t w_step, x_step;   /* elements between a thread's rows */
    int w_rows, x_rows;      /* rows that exist from the thread's first on */
    uint32_t w_smem, x_smem; /* in slot 0 */

    __device__ loader(const skinny_args &a, int tile, int pass, uint32_t smem) {
        int row = threadIdx.x / C::CHUNKS, chunk = threadIdx.x % C::CHUNKS;
        int first = tile * C::ROWS + row;
        w = a.w + (size_t)first * a.stride + chunk * 8;
        x = a.x + (size_t)(pass * a.chunk + row) * a.stride + chunk * 8;
        w_step = x_step = (size_t)C::ROW_STEP * a.stride;
        w_rows = a.rows16 - first;
        x_rows = min(a.chunk, a.n - pass * a.chunk) - row;
        w_smem = smem + row * C::PITCH + ((chunk ^ (row & 7)) << 4);
        x_smem = w_smem + C::W_BYTES;
    }
    __device__ void load_w(int stage, int slot) const {
        int at = stage * C::K_STAGE;
#pragma unroll
        for (int i = 0; i < C::W_LOADS; i++)
            if (i * C::ROW_STEP < w_rows)
                copy_async(w_smem + slot * R::SLOT + i * C::ROW_STEP * C::PITCH,
                           w + i * w_step + at);
    }
    __device__ void load_x(int stage, int slot) const {
        int at = stage * C::K_STAGE;
#pragma unroll
        for (int i = 0; i < R::X_LOADS; i++)
            if (i * C::ROW_STEP < x_rows)
                copy_async(x_smem + slot * R::SLOT + i * C::ROW_STEP * C::PITCH,
                           x + i * x_step + at);
    }
    /* Activations of stages [first, first + BATCH) that lie before `end` into slots `slot`.. by
     * plain loads: they have arrived when this returns. */
    __device__ void store_x(int first, int end, int slot) const {
        uint4 v[R::BATCH][R::X_LOADS];
#pragma unroll
        for (int s = 0; s < R::BATCH; s++)
#pragma unroll
            for (int i = 0; i < R::X_LOADS; i++) {
                int at = (first + s) * C::K_STAGE;
                bool any = first + s < end && i * C::ROW_STEP < x_rows;
                v[s][i] = make_uint4(0, 0, 0, 0);
                if (any) v[s][i] = __ldcg((const uint4 *)(x + i * x_step + at));
            }
#pragma unroll
        for (int s = 0; s < R::BATCH; s++)
#pragma unroll
            for (int i = 0; i < R::X_LOADS; i++)
                if (first + s < end && i * C::ROW_STEP < x_rows)
                    store_shared16(x_smem + (slot + s) * R::SLOT + i * C::ROW_STEP * C::PITCH,
                                   v[s][i]);
    }
};

/* One stage of a warp: M_TILES x N_TILES products of 16 x 8 over K_WARP columns. */
template <class C, int N_TILES, int FORM>
__device__ static inline void multiply(float acc[C::M_TILES][N_TILES][4], uint32_t slot, int m_warp,
                                       int k_warp) {
    int lane = threadIdx.x % 32;
    uint32_t w_row = slot + (m_warp * C::M_TILES * 16 + lane % 16) * C::PITCH;
    uint32_t x_row = slot + C::W_BYTES + lane % 8 * C::PITCH;
#pragma unroll
    for (int k = 0; k < C::K_WARP; k += 32) {
        int chunk = k_warp * (C::K_WARP / 8) + k / 8;
        uint32_t a[2][C::M_TILES][4], b[4];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int m = 0; m < C::M_TILES; m++) {
                int at = (chunk + 2 * h + lane / 16) ^ (lane & 7);
                load_matrix4(a[h][m], w_row + m * 16 * C::PITCH + at * 16);
                if (FORM == FORM_W_BF16) bf16_to_f16(a[h][m]);
            }
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            int at = (chunk + lane / 8) ^ (lane & 7);
            load_matrix4(b, x_row + n * 8 * C::PITCH + at * 16);
            if (FORM == FORM_X_BF16) bf16_to_f16(b);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int m = 0; m < C::M_TILES; m++)
                    mma<FORM == FORM_BF16>(acc[m][n], a[h][m], b[2 * h], b[2 * h + 1]);
        }
    }
}

/* Partial sums: [K_WARPS][8 * N_TILES columns][RED_PITCH rows]. */
template <class C, int N_TILES>
__device__ static inline void store_partial(float *red, const float acc[C::M_TILES][N_TILES][4],
                                            int m_warp, int k_warp) {
    typedef ring<C, N_TILES> R;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int col = n * 8 + 2 * t + i % 2;
                int row = (m_warp * C::M_TILES + m) * 16 + g + i / 2 * 8;
                red[(k_warp * 8 * N_TILES + col) * R::RED_PITCH + row] = acc[m][n][i];
            }
}

/* Add the partial sums in order and store them; the cluster's blocks take turns at the elements. */
template <class C, int N_TILES>
__device__ static inline void store_sums(const float *red, const skinny_args &a, int tile,
                                         int pass) {
    typedef ring<C, N_TILES> R;
    int split = gridDim.x, n = min(a.chunk, a.n - pass * a.chunk);
    int left = a.rows - tile * C::ROWS;
    float *out = a.out + (size_t)pass * a.chunk * a.out_stride + (size_t)tile * C::ROWS;
    for (int e = blockIdx.x * C::THREADS + threadIdx.x; e < n * C::ROWS; e += split * C::THREADS) {
        int row = e % C::ROWS, col = e / C::ROWS;
        const float *p = red + col * R::RED_PITCH + row;
        float v[RANKS][CHAINS];
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++)
#pragma unroll
            for (int k = 0; k < CHAINS; k++) {
                const float *at = p + k * 8 * N_TILES * R::RED_PITCH;
                if (split == 1 && rank == 0) v[rank][k] = *at;
                else if (rank < split) v[rank][k] = cluster_load(smem_addr(at), rank);
            }
#pragma unroll
        for (int rank = 1; rank < RANKS; rank++)
#pragma unroll
            for (int k = 0; k < CHAINS; k++)
                if (rank < split) v[0][k] += v[rank][k];
        if (row < left) out[(size_t)col * a.out_stride + row] = v[0][0] + v[0][1];
    }
}

/* A range of K has been walked: its sum joins those before, and the next begins. */
template <class C, int N_TILES>
__device__ static inline void end_range(float sum[C::M_TILES][N_TILES][4],
                                        float acc[C::M_TILES][N_TILES][4], bool first) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; m++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[m][n][i] = first ? acc[m][n][i] : sum[m][n][i] + acc[m][n][i];
                acc[m][n][i] = 0;
            }
}

/* Grid: (blocks of a cluster, passes over the rows of the call, tiles of weight rows). */
template <class C, int N_TILES, int FORM>
__global__ void __launch_bounds__(C::THREADS, 512 / C::THREADS)
    skinny_plain_kernel(const __grid_constant__ skinny_args a) {
    typedef ring<C, N_TILES> R;
    extern __shared__ __align__(128) uint8_t smem[];
    int tile = blockIdx.z, pass = blockIdx.y, ranks = RANKS >> a.log_split;
    int rank = blockIdx.x * ranks, last = rank + ranks;
    int begin = rank_begin(a.n_blocks, rank), end = rank_begin(a.n_blocks, last);
    int warp = threadIdx.x / 32, m_warp = warp % C::M_WARPS, k_warp = warp / C::M_WARPS;
    loader<C, N_TILES> load(a, tile, pass, smem_addr(smem));
    float acc[C::M_TILES][N_TILES][4] = {}, sum[C::M_TILES][N_TILES][4];

    pdl_trigger();
    for (int s = 0; s < R::SLOTS - 1; s++) {
        if (begin + s < end) load.load_w(begin + s, s);
        copy_commit();
    }
    pdl_wait();
    int first_end = min(end, begin + R::SLOTS - 1);
#pragma unroll 1
    for (int s = begin; s < first_end; s += R::BATCH) load.store_x(s, first_end, s - begin);
    int s = begin, slot = 0;
#pragma unroll 1
    for (int r = rank; r < last; r++) {
        for (int range_end = rank_begin(a.n_blocks, r + 1); s < range_end; s++) {
            copy_wait<R::SLOTS - 2>(); /* stage s is here ... */
            __syncthreads();           /* ... for all, and all have left the slot before it */
            int before = slot == 0 ? R::SLOTS - 1 : slot - 1, next = s + R::SLOTS - 1;
            if (next < end) {
                load.load_w(next, before);
                load.load_x(next, before);
            }
            copy_commit();
            multiply<C, N_TILES, FORM>(acc, smem_addr(smem) + slot * R::SLOT, m_warp, k_warp);
            if (++slot == R::SLOTS) slot = 0;
        }
        end_range<C, N_TILES>(sum, acc, r == rank);
    }
    copy_wait<0>();
    __syncthreads();
    store_partial<C, N_TILES>((float *)smem, sum, m_warp, k_warp);
    if (gridDim.x > 1) cluster_sync();
    else __syncthreads();
    store_sums<C, N_TILES>((const float *)smem, a, tile, pass);
    if (gridDim.x > 1) cluster_meet(); /* nobody leaves while others read from it */
}

/* ---- Choice and launch: cuts change no bits ---- */

enum cut_kind { CUT_SMALL, CUT_MID };
struct skinny_plan {
    enum cut_kind kind;
    int split; /* 1 or RANKS: blocks that share K */
};

/* The tallest tiles (activations are read once a tile) whose blocks, with K split among four or
 * not, occupy the chip and fit it at once. */
static struct skinny_plan plan_of(const struct cuda_ctx *c, int rows, int n_blocks) {
    int enough = c->n_sms - c->n_sms / 4, most = 2 * c->n_sms;
    bool can_split = c->sm >= 90 && n_blocks >= 4 * RANKS;
    int tiles = (rows + cut_mid::ROWS - 1) / cut_mid::ROWS;
    if (tiles >= enough) return {CUT_MID, 1};
    if (can_split && tiles * RANKS >= enough && tiles * RANKS <= most) return {CUT_MID, RANKS};
    tiles = (rows + cut_small::ROWS - 1) / cut_small::ROWS;
    return {CUT_SMALL, can_split && tiles * RANKS <= most ? RANKS : 1};
}

template <class C, int N_TILES, int FORM>
static int launch(struct cuda_ctx *c, struct skinny_args a, int split) {
    typedef ring<C, N_TILES> R;
    static uint64_t allowed; /* a bit a device: more than 48 KiB of shared memory */
    auto kernel = skinny_plain_kernel<C, N_TILES, FORM>;
    uint64_t bit = 1ull << (c->device & 63);
    if (!(allowed & bit)) {
        int rc = cuda_allow_smem(c, kernel, R::SLOTS * R::SLOT);
        if (!rc) /* two blocks an SM */
            rc = CUDA_NOTE(c, cudaFuncSetAttribute(kernel,
                                                   cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared));
        if (rc) return rc;
        allowed |= bit;
    }
    a.log_split = split == RANKS ? 2 : 0;
    int longest = (a.n_blocks + split - 1) / split;
    int slots = longest < R::SLOTS ? longest : (int)R::SLOTS;
    int bytes = slots * R::SLOT > R::RED_BYTES ? slots * R::SLOT : (int)R::RED_BYTES;

    cudaLaunchAttribute attr[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(split, (a.n + a.chunk - 1) / a.chunk, (a.rows + C::ROWS - 1) / C::ROWS);
    config.blockDim = dim3(C::THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = c->stream;
    config.attrs = attr;
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributeClusterDimension;
    attr[1].val.clusterDim.x = split;
    attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
    config.numAttrs = c->sm < 90 ? 0 : split > 1 ? 2 : 1;
    return CUDA_NOTE(c, cudaLaunchKernelEx(&config, kernel, a));
}

template <int FORM> static int launch_form(struct cuda_ctx *c, struct skinny_args a) {
    const bool own = FORM == FORM_BF16 || FORM == FORM_F16;
    const int n_tiles = own ? MAX_N_TILES : 4; /* of mixed types */
    if (own && cuda_skinny_streams(c, a.n)) return cuda_skinny_stream(c, &a, FORM == FORM_BF16);
    if (a.n <= FEW_MAX) return cuda_skinny_few(c, &a, (enum form)FORM);
    struct skinny_plan plan = plan_of(c, a.rows, a.n_blocks);
    int passes = (a.n + n_tiles * 8 - 1) / (n_tiles * 8);
    a.chunk = ((a.n + passes - 1) / passes + 7) & ~7;
    if (plan.kind == CUT_MID) return launch<cut_mid, n_tiles, FORM>(c, a, plan.split);
    return launch<cut_small, n_tiles, FORM>(c, a, plan.split);
}

int cuda_skinny_plain(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                      bool x_bf16, float *out, int out_stride) {
    struct skinny_args a = {};
    if (n <= 0) return 0;
    a.w = (const uint16_t *)w->data;
    a.x = (const uint16_t *)x;
    a.out = out;
    a.rows = w->rows;
    a.rows16 = (w->rows + 15) & ~15;
    a.stride = plain_stride(w->cols);
    a.n_blocks = a.stride / BLOCK_COLS;
    a.n = n;
    a.out_stride = out_stride;
    if (w->dtype == KERN_BF16)
        return x_bf16 ? launch_form<FORM_BF16>(c, a) : launch_form<FORM_W_BF16>(c, a);
    return x_bf16 ? launch_form<FORM_X_BF16>(c, a) : launch_form<FORM_F16>(c, a);
}
