/* Scores of blocks: one number for each block of a sequence.
 *
 * Every kind: the newest states, normalised where that is asked for, a block a state; all but LATE
 * then their average. MEAN, MINMAX and BOUND: what represents a block, times it. LATE: A q, and B
 * split for the matrix units, in one launch, then B times the quarters' sums as they lie in the
 * pages, with their means and deviations (score_late.cu; norming is linear, so B r = scale (B s) -
 * shift (B 1)), then the logsumexp, four blocks a thread block. MLP: x = q r g of each block and
 * the units' constants in one launch (kernels/cpu/score.c has the folded formula), the product with
 * GELU behind it (score_product.cu), and the sum over its tiles.
 *
 * Napkin for 2,048 blocks of 4,096: the planes are 134 MB, 31 us a pass; LATE and the MLP go
 * through them once, the MLP once more through W1 (134 MB). Each sum is one warp's or one block's,
 * its order fixed by the shapes. */
#include "kernels/cuda/score.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, POOL_THREADS = 1024, LATE_THREADS = 128 };
enum { LATE_BLOCKS = 4, QUERY_ROWS = 4 }; /* blocks, rows of A a thread block takes */
enum { MEAN_GRID = 528 };                 /* thread blocks, whatever the chip */
enum { BATCH = 8 };                       /* loads of a thread before it uses what they bring */

/* ---- Where what lies ---- */

struct score_args {
    score_planes planes;
    const float *ring;
    int n_queries;
    bool normed, by_first, by_quarter;
    int minmax, spread;       /* MINMAX, BOUND: first of the two rows of a plane, else 0 */
    int n_heads, head_dim, n; /* n: rows of A and B, or units */
    const float *a, *b, *ln_weight, *ln_bias, *w1, *b1, *w2, *b2;
    /* Scratch. */
    float *queries; /* [32][cols] */
    float *average; /* [cols], then its sum */
    float *aq;      /* LATE: [n][32] */
    float *ones;    /* LATE: [n], B 1 */
    __half *split;  /* LATE: [2][n][score_stride(cols)], and by [n] of b_unit: B */
    float *b_unit;
    score_row *row;   /* LATE: [4 n_blocks] shift, scale; MLP: [n_blocks] */
    float *x;         /* MLP: [n_blocks][cols]; without weights: a row a thread block */
    score_unit *unit; /* MLP: [n] */
    float *product;   /* LATE: [4 n_blocks][n]; MLP: [n_blocks][tiles] */
    float *out;
};

static int product_rows(const struct kern_scorer *s) {
    if (!kern_score_has_weights(s->kind)) return 0;
    return s->kind == KERN_SCORE_LATE ? s->n_heads * s->head_dim : s->width;
}
static int n_tiles(int n) {
    return (n + SCORE_TILE - 1) / SCORE_TILE;
}

static size_t mean_grid(int n_blocks) {
    return n_blocks < MEAN_GRID ? n_blocks : MEAN_GRID;
}

static void *take(uint8_t **at, size_t bytes) {
    void *p = *at;
    *at += (bytes + 255) / 256 * 256;
    return p;
}

/* Carve scratch from `at`; returns its bytes. */
static size_t carve(score_args *a, const struct kern_scorer *s, int n_blocks, uint8_t *scratch) {
    uint8_t *at = scratch;
    const size_t cols = (size_t)s->cols, n = (size_t)product_rows(s), blocks = (size_t)n_blocks;
    a->queries = (float *)take(&at, KERN_STATE_QUERIES * cols * 4);
    a->average = (float *)take(&at, (cols + 1) * 4);
    if (!kern_score_has_weights(s->kind)) a->x = (float *)take(&at, mean_grid(n_blocks) * cols * 4);
    if (s->kind == KERN_SCORE_LATE) {
        a->aq = (float *)take(&at, KERN_STATE_QUERIES * n * 4);
        a->ones = (float *)take(&at, n * 4);
        a->split = (__half *)take(&at, 2 * n * (size_t)score_stride(s->cols) * sizeof(__half));
        a->b_unit = (float *)take(&at, n * 4);
        a->row = (score_row *)take(&at, 4 * blocks * sizeof(score_row));
        a->product = (float *)take(&at, 4 * blocks * n * 4);
    }
    if (s->kind == KERN_SCORE_MLP) {
        a->row = (score_row *)take(&at, blocks * sizeof(score_row));
        a->unit = (score_unit *)take(&at, n * sizeof(score_unit));
        a->x = (float *)take(&at, blocks * cols * 4);
        a->product = (float *)take(&at, blocks * (size_t)n_tiles((int)n) * 4);
    }
    return (size_t)(at - scratch);
}

/* ---- Sums ---- */

__device__ static inline float warp_sum(float x) {
#pragma unroll
    for (int k = 16; k; k /= 2) x += __shfl_xor_sync(~0u, x, k);
    return x;
}

/* Of a block of n_warps full warps; every thread gets it. `smem`: [32]. */
__device__ static inline float block_sum(float x, float *smem) {
    const int n_warps = blockDim.x / 32;
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    __syncthreads();
    float all = 0;
    for (int w = 0; w < n_warps; w++) all += smem[w];
    return all;
}

/* The largest; a NaN is passed over. */
__device__ static inline float block_max(float x, float *smem) {
    const int n_warps = blockDim.x / 32;
#pragma unroll
    for (int k = 16; k; k /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, k));
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < n_warps; w++) x = fmaxf(x, smem[w]);
    return x;
}

/* In place over x[cols], each thread its own elements: (x - mean) / sqrt(variance + 1e-5). */
__device__ static void standardise(float *x, int cols, float *smem) {
    float sum = 0, square = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += x[i];
    const float mean = block_sum(sum, smem) / cols;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float d = x[i] - mean;
        square += d * d;
    }
    const float scale = 1.f / sqrtf(block_sum(square, smem) / cols + 1e-5f);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) x[i] = (x[i] - mean) * scale;
}

/* ---- Queries ---- */

/* A query a block: copied, then normalised where it lies. */
static __global__ void queries_kernel(score_args a) {
    __shared__ float smem[32];
    pdl_wait();
    pdl_trigger();
    const int cols = a.planes.cols;
    const int position = a.planes.n_tokens - a.n_queries + (int)blockIdx.x;
    const float *from = a.ring + (size_t)(position % KERN_STATE_QUERIES) * cols;
    float *q = a.queries + (size_t)blockIdx.x * cols, sum = 0, square = 0;
    for (int i = threadIdx.x; i < cols; i += BATCH * THREADS) {
        float x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) x[k] = i + k * THREADS < cols ? from[i + k * THREADS] : 0.f;
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            if (i + k * THREADS < cols) q[i + k * THREADS] = x[k];
            sum += x[k];
        }
    }
    if (!a.normed) return;
    const float mean = block_sum(sum, smem) / cols;
#pragma unroll 8
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        const float d = from[i] - mean;
        square += d * d;
    }
    const float scale = 1.f / sqrtf(block_sum(square, smem) / cols + 1e-5f);
    for (int i = threadIdx.x; i < cols; i += BATCH * THREADS) {
        float x[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) x[k] = i + k * THREADS < cols ? from[i + k * THREADS] : 0.f;
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (i + k * THREADS < cols) q[i + k * THREADS] = (x[k] - mean) * scale;
    }
}

/* The average by softmax(<newest, q> / sqrt(cols)), and its sum. A warp a query; one alone has
 * weight 1. */
static __global__ void pool_kernel(score_args a) {
    __shared__ float weight[KERN_STATE_QUERIES], smem[32];
    pdl_wait();
    pdl_trigger();
    const int cols = a.planes.cols, n = a.n_queries, warp = threadIdx.x / 32;
    const float *newest = a.queries + (size_t)(n - 1) * cols;
    if (warp < n) {
        const float *q = a.queries + (size_t)warp * cols;
        float dot = 0;
        for (int i = threadIdx.x % 32; i < cols; i += 32) dot = fmaf(newest[i], q[i], dot);
        dot = warp_sum(dot);
        if (threadIdx.x % 32 == 0) weight[warp] = n == 1 ? 0.f : dot / sqrtf((float)cols);
    }
    __syncthreads();
    float most = -INFINITY, all = 0, sum = 0;
    for (int t = 0; t < n; t++) most = fmaxf(most, weight[t]);
    for (int t = 0; t < n; t++) all += expf(weight[t] - most);
    for (int i = threadIdx.x; i < cols; i += POOL_THREADS) {
        float x = 0;
        for (int t = 0; t < n; t++)
            x = fmaf(expf(weight[t] - most) / all, a.queries[(size_t)t * cols + i], x);
        a.average[i] = x;
        sum += x;
    }
    sum = block_sum(sum, smem);
    if (threadIdx.x == 0) a.average[cols] = sum;
}

/* ---- LATE ---- */

/* Rows [first, first + 4) of A times all queries. A warp has 4 queries; T of each row and query at
 * a time, four times that under way: there are few blocks. */
template <typename T> __device__ static void query_rows(const score_args &a, int first) {
    constexpr int PER = sizeof(T) / 4;
    const int cols = a.planes.cols / PER, lane = threadIdx.x % 32, t = threadIdx.x / 32 * 4;
    const T *w[QUERY_ROWS], *q[4];
    float acc[QUERY_ROWS][4] = {};
    if (t >= a.n_queries) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = (const T *)(a.a + (size_t)min(first + i, a.n - 1) * a.planes.cols);
        q[i] = (const T *)(a.queries + (size_t)min(t + i, a.n_queries - 1) * a.planes.cols);
    }
#pragma unroll 4
    for (int c = lane; c < cols; c += 32) {
        T x[QUERY_ROWS], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = w[i][c], y[i] = q[i][c];
#pragma unroll
        for (int k = 0; k < PER; k++)
#pragma unroll
            for (int r = 0; r < QUERY_ROWS; r++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    acc[r][i] =
                        fmaf((&(const float &)x[r])[k], (&(const float &)y[i])[k], acc[r][i]);
    }
#pragma unroll
    for (int r = 0; r < QUERY_ROWS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sum = warp_sum(acc[r][i]);
            if (lane == 0 && first + r < a.n && t + i < a.n_queries)
                a.aq[(size_t)(first + r) * KERN_STATE_QUERIES + t + i] = sum;
        }
}

/* A row of B as two f16 for each number, and its sum. */
__device__ static void split_row(const score_args &a, int row, float *smem) {
    const int cols = a.planes.cols, stride = score_stride(cols);
    const float *b = a.b + (size_t)row * cols;
    __half *hi = a.split + (size_t)row * stride, *lo = hi + (size_t)a.n * stride;
    float sum = 0, most = 0;
#pragma unroll 8
    for (int c = threadIdx.x; c < cols; c += THREADS) {
        sum += b[c];
        most = fmaxf(most, fabsf(b[c]));
    }
    sum = block_sum(sum, smem);
    const score_scale scale = score_scale_of(block_max(most, smem));
#pragma unroll 8
    for (int c = threadIdx.x; c < stride; c += THREADS) {
        const float x = c < cols ? b[c] * scale.up : 0.f;
        hi[c] = __float2half_rn(x);
        lo[c] = __float2half_rn(x - __half2float(hi[c]));
    }
    if (threadIdx.x != 0) return;
    a.ones[row] = sum;
    a.b_unit[row] = scale.down;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    late_prepare_kernel(score_args a, int n_row_blocks) {
    __shared__ float smem[32];
    pdl_wait();
    pdl_trigger();
    const int block = blockIdx.x;
    if (block < n_row_blocks) query_rows<T>(a, block * QUERY_ROWS);
    else split_row(a, block - n_row_blocks, smem);
}

/* e^(x - most); 1 where both are the same infinity. */
__device__ static inline float weight_of(float x, float most) {
    return x == most ? 1.f : expf(x - most);
}
struct log_sum {
    float most, sum;
};
__device__ static inline log_sum join(log_sum a, log_sum b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.sum * weight_of(a.most, most) + b.sum * weight_of(b.most, most)};
}

enum { LATE_ROWS = 4 * LATE_BLOCKS };

/* <A q, B s> of one query and head for the thread block's quarters, and <A q, B 1>. */
template <typename T>
__device__ static inline float head_dots(const score_args &a, int first, int t, int h,
                                         float (&dot)[LATE_ROWS]) {
    constexpr int per = sizeof(T) / 4;
    const int last = 4 * a.planes.n_blocks - 1;
    const float *q = a.aq + (size_t)h * a.head_dim * KERN_STATE_QUERIES + t;
    const float *ones = a.ones + h * a.head_dim;
    float shift = 0;
#pragma unroll
    for (int i = 0; i < LATE_ROWS; i++) dot[i] = 0;
    for (int d = 0; d < a.head_dim; d += per) {
        const T one = *(const T *)(ones + d);
        float x[per];
#pragma unroll
        for (int k = 0; k < per; k++) {
            x[k] = q[(size_t)(d + k) * KERN_STATE_QUERIES];
            shift = fmaf(x[k], (&(const float &)one)[k], shift);
        }
#pragma unroll
        for (int i = 0; i < LATE_ROWS; i++) {
            const size_t row = (size_t)min(first + i, last) * a.n + h * a.head_dim + d;
            const T y = *(const T *)(a.product + row);
#pragma unroll
            for (int k = 0; k < per; k++) dot[i] = fmaf(x[k], (&(const float &)y)[k], dot[i]);
        }
    }
    return shift;
}

/* A thread has one query of one head, or several; its terms of four blocks, joined by block or by
 * quarter. */
template <typename T, bool QUARTERS>
static __global__ void __launch_bounds__(LATE_THREADS) late_kernel(score_args a) {
    constexpr int N = QUARTERS ? LATE_ROWS : LATE_BLOCKS, EACH = QUARTERS ? 1 : 4;
    __shared__ log_sum part[LATE_THREADS / 32][N];
    pdl_wait();
    pdl_trigger();
    const int first = blockIdx.x * LATE_ROWS, n_terms = a.n_queries * a.n_heads;
    const float scale = 1.f / sqrtf((float)a.head_dim);
    log_sum s[N];
#pragma unroll
    for (int b = 0; b < N; b++) s[b] = {-INFINITY, 0.f};
    for (int i = threadIdx.x; i < n_terms; i += LATE_THREADS) {
        float dot[LATE_ROWS];
        const float shift = head_dots<T>(a, first, i % a.n_queries, i / a.n_queries, dot);
#pragma unroll
        for (int r = 0; r < LATE_ROWS; r++) {
            const int block = (first + r) / 4;
            if (block >= a.planes.n_blocks || !score_quarter_tokens(a.planes, block, r % 4))
                continue;
            const score_row row = a.row[first + r];
            s[r / EACH] = join(s[r / EACH], {(row.d * dot[r] - row.mean * shift) * scale, 1.f});
        }
    }
#pragma unroll
    for (int b = 0; b < N; b++) {
#pragma unroll
        for (int k = 16; k; k /= 2)
            s[b] =
                join(s[b], {__shfl_xor_sync(~0u, s[b].most, k), __shfl_xor_sync(~0u, s[b].sum, k)});
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32][b] = s[b];
    }
    __syncthreads();
    const int b = threadIdx.x, at = first / EACH + b;
    if (b >= N || at >= a.planes.n_blocks * (QUARTERS ? 4 : 1)) return;
    log_sum all = part[0][b];
    for (int w = 1; w < LATE_THREADS / 32; w++) all = join(all, part[w][b]);
    a.out[at] = all.most + logf(all.sum); /* -infinity of an empty quarter */
}

/* ---- Without weights, and MLP ---- */

/* A block's representative into r[cols] of global memory, each thread its own elements. */
__device__ static void representative(const score_args &a, int block, float *r, float *smem) {
    const int cols = a.planes.cols;
    const float *plane = score_plane(a.planes, block);
    int quarters = 1, tokens = score_quarter_tokens(a.planes, block, 0);
    while (quarters < 4 && score_quarter_tokens(a.planes, block, quarters))
        tokens += score_quarter_tokens(a.planes, block, quarters++);
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        float x = a.by_first ? plane[(size_t)4 * cols + i] : plane[i];
        if (!a.by_first) {
            if (quarters > 1) x += plane[(size_t)cols + i];
            if (quarters > 2) x += plane[(size_t)2 * cols + i];
            if (quarters > 3) x += plane[(size_t)3 * cols + i];
            x /= tokens;
        }
        r[i] = x;
    }
    if (a.normed) standardise(r, cols, smem);
}

/* The corner of a block's box that the query points to, each thread its own elements. */
__device__ static void corner(const score_args &a, int block, float *r) {
    const int cols = a.planes.cols,
              tokens = min(a.planes.n_tokens - block * KERN_BLOCK, (int)KERN_BLOCK);
    const float *plane = score_plane(a.planes, block);
    const float *low = plane + (size_t)a.minmax * cols, *mean = plane + (size_t)a.spread * cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        const float q = a.average[i];
        if (a.minmax) r[i] = q >= 0 ? low[cols + i] : low[i];
        else r[i] = mean[i] + copysignf(sqrtf(mean[cols + i] / tokens), q);
    }
}

/* The mean of a quarter that is not empty, likewise. */
__device__ static void quarter_mean(const score_args &a, int block, int quarter, float *r,
                                    float *smem) {
    const int cols = a.planes.cols, tokens = score_quarter_tokens(a.planes, block, quarter);
    const float *sum = score_plane(a.planes, block) + (size_t)quarter * cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) r[i] = sum[i] / tokens;
    if (a.normed) standardise(r, cols, smem);
}

static __global__ void __launch_bounds__(THREADS, 4) mean_quarters_kernel(score_args a) {
    __shared__ float smem[32];
    pdl_wait();
    pdl_trigger();
    const int cols = a.planes.cols;
    float *r = a.x + (size_t)blockIdx.x * cols;
    for (int row = blockIdx.x; row < 4 * a.planes.n_blocks; row += gridDim.x) {
        const bool empty = !score_quarter_tokens(a.planes, row / 4, row % 4);
        float dot = 0;
        if (!empty) {
            quarter_mean(a, row / 4, row % 4, r, smem);
            for (int i = threadIdx.x; i < cols; i += THREADS) dot = fmaf(a.average[i], r[i], dot);
            dot = block_sum(dot, smem);
        }
        if (threadIdx.x == 0) a.out[row] = empty ? -INFINITY : dot / sqrtf((float)cols);
    }
}

/* MEAN_GRID is four blocks an SM of 132. */
static __global__ void __launch_bounds__(THREADS, 4) mean_kernel(score_args a) {
    __shared__ float smem[32];
    pdl_wait();
    pdl_trigger();
    const int cols = a.planes.cols;
    float *r = a.x + (size_t)blockIdx.x * cols;
    for (int block = blockIdx.x; block < a.planes.n_blocks; block += gridDim.x) {
        float dot = 0;
        if (a.minmax || a.spread) corner(a, block, r);
        else representative(a, block, r, smem);
        for (int i = threadIdx.x; i < cols; i += THREADS) dot = fmaf(a.average[i], r[i], dot);
        dot = block_sum(dot, smem);
        if (threadIdx.x == 0) a.out[block] = dot / sqrtf((float)cols);
    }
}

/* x = q r g, and mean and 1 / deviation of [q r ; q]. */
__device__ static void mlp_block(const score_args &a, int block, float *smem) {
    const int cols = a.planes.cols;
    float *x = a.x + (size_t)block * cols, sum = 0, square = 0;
    score_row row = {0.f, 1.f};
    representative(a, block, x, smem);
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        x[i] *= a.average[i];
        sum += x[i];
    }
    if (a.ln_weight) {
        row.mean = (block_sum(sum, smem) + a.average[cols]) / (2.f * cols);
        for (int i = threadIdx.x; i < cols; i += THREADS) {
            const float u = x[i] - row.mean, v = a.average[i] - row.mean;
            square += u * u + v * v;
            x[i] *= a.ln_weight[i];
        }
        row.d = 1.f / sqrtf(block_sum(square, smem) / (2.f * cols) + 1e-5f);
    }
    if (threadIdx.x == 0) a.row[block] = row;
}

/* A unit a warp: <w_b g_b, q>, <w, g>, <w, bias>. */
__device__ static void mlp_unit(const score_args &a, int unit) {
    const int cols = a.planes.cols, lane = threadIdx.x % 32;
    if (unit >= a.n) return;
    const float *w = a.w1 + (size_t)unit * 2 * cols;
    float query = 0, weight = 0, bias = 0;
    if (a.ln_weight) {
#pragma unroll 8
        for (int c = lane; c < cols; c += 32) {
            weight = fmaf(w[c], a.ln_weight[c], weight);
            bias = fmaf(w[c], a.ln_bias[c], bias);
        }
    }
#pragma unroll 4
    for (int c = lane; c < cols; c += 32) {
        const float g = a.ln_weight ? a.ln_weight[cols + c] : 1.f, wg = w[cols + c] * g;
        query = fmaf(wg, a.average[c], query);
        if (!a.ln_weight) continue;
        weight += wg;
        bias = fmaf(w[cols + c], a.ln_bias[cols + c], bias);
    }
    query = warp_sum(query), weight = warp_sum(weight), bias = warp_sum(bias);
    if (lane == 0) a.unit[unit] = {query, weight, bias + a.b1[unit], a.w2[unit]};
}

static __global__ void mlp_prepare_kernel(score_args a, int n_unit_blocks) {
    __shared__ float smem[32];
    pdl_wait();
    pdl_trigger();
    const int block = blockIdx.x;
    if (block < n_unit_blocks) mlp_unit(a, block * WARPS + threadIdx.x / 32);
    else mlp_block(a, block - n_unit_blocks, smem);
}

static __global__ void mlp_finish_kernel(score_args a, int tiles) {
    pdl_wait();
    pdl_trigger();
    const int block = blockIdx.x * THREADS + threadIdx.x;
    if (block >= a.planes.n_blocks) return;
    float sum = a.b2[0];
    for (int i = 0; i < tiles; i++) sum += a.product[(size_t)block * tiles + i];
    a.out[block] = sum;
}

/* ---- The operation ---- */

static void check(const struct kern_scorer *s) {
    ASSERT(s && (unsigned)s->kind < KERN_N_SCORES && s->cols > 0);
    ASSERT(s->n_queries >= 1 && s->n_queries <= KERN_STATE_QUERIES);
    if (s->kind == KERN_SCORE_LATE) ASSERT(s->n_heads > 0 && s->head_dim > 0 && !s->by_first);
    if (s->kind == KERN_SCORE_MLP) ASSERT(s->width > 0 && !s->ln_weight == !s->ln_bias);
    if (s->kind == KERN_SCORE_MINMAX || s->kind == KERN_SCORE_BOUND)
        ASSERT(s->normed && !s->by_first);
    if (s->by_quarter)
        ASSERT((s->kind == KERN_SCORE_LATE || s->kind == KERN_SCORE_MEAN) && !s->by_first);
}

size_t kern_cuda_score_scratch_bytes(const struct kern *k, const struct kern_scorer *s,
                                     int n_blocks) {
    score_args a = {};
    (void)k;
    check(s);
    ASSERT(n_blocks >= 0);
    return carve(&a, s, n_blocks, (uint8_t *)NULL);
}

static int late(struct cuda_ctx *c, const score_args &a, bool aligned) {
    const int n_blocks = a.planes.n_blocks, n_row_blocks = (a.n + QUERY_ROWS - 1) / QUERY_ROWS;
    const int n_prepare = n_row_blocks + a.n;
    const bool quads = a.planes.cols % 4 == 0 && (uintptr_t)a.a % 16 == 0;
    int rc =
        quads ? CUDA_LAUNCH(c, late_prepare_kernel<float4>, n_prepare, THREADS, 0, a, n_row_blocks)
              : CUDA_LAUNCH(c, late_prepare_kernel<float>, n_prepare, THREADS, 0, a, n_row_blocks);
    if (rc) return rc;
    rc = cuda_score_late_product(c, aligned,
                                 {a.planes, a.n, a.normed, a.split, a.b_unit, a.row, a.product});
    if (rc) return rc;
    const int grid = (n_blocks + LATE_BLOCKS - 1) / LATE_BLOCKS;
    const bool wide = a.head_dim % 4 == 0;
    if (a.by_quarter && wide)
        return CUDA_LAUNCH(c, (late_kernel<float4, true>), grid, LATE_THREADS, 0, a);
    if (a.by_quarter) return CUDA_LAUNCH(c, (late_kernel<float, true>), grid, LATE_THREADS, 0, a);
    if (wide) return CUDA_LAUNCH(c, (late_kernel<float4, false>), grid, LATE_THREADS, 0, a);
    return CUDA_LAUNCH(c, (late_kernel<float, false>), grid, LATE_THREADS, 0, a);
}

static int mlp(struct cuda_ctx *c, const score_args &a, bool aligned) {
    const int n_blocks = a.planes.n_blocks, n_unit_blocks = (a.n + WARPS - 1) / WARPS;
    int rc =
        CUDA_LAUNCH(c, mlp_prepare_kernel, n_unit_blocks + n_blocks, THREADS, 0, a, n_unit_blocks);
    if (rc) return rc;
    score_product p = {};
    p.rows = n_blocks, p.n = a.n, p.cols = a.planes.cols, p.x = a.x;
    p.w = a.w1, p.w_stride = 2 * (size_t)a.planes.cols;
    p.row = a.row, p.unit = a.unit, p.out = a.product;
    rc = cuda_score_product(c, aligned, p);
    if (rc) return rc;
    return CUDA_LAUNCH(c, mlp_finish_kernel, (n_blocks + THREADS - 1) / THREADS, THREADS, 0, a,
                       n_tiles(a.n));
}

int kern_cuda_score(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                    void *scratch, float *out) {
    struct cuda_ctx *c = cuda_ctx(k);
    check(s);
    ASSERT(v && v->n_tokens >= 0 && v->plane.cols == s->cols);
    if (v->n_tokens == 0) return 0;
    ASSERT(v->plane.base && v->page && v->ring && out && scratch);
    ASSERT((uintptr_t)scratch % KERN_ACT_ALIGN == 0 && v->plane.plane_offset % KERN_ACT_ALIGN == 0);
    ASSERT(v->plane.page_stride % 4 == 0 && (!s->by_first || v->plane.has_first));
    ASSERT(s->kind != KERN_SCORE_MINMAX || v->plane.has_minmax);
    ASSERT(s->kind != KERN_SCORE_BOUND || v->plane.has_spread);
    const int n_blocks = (int)(((int64_t)v->n_tokens + KERN_BLOCK - 1) / KERN_BLOCK);
    score_args a = {};
    a.planes = {(const uint8_t *)v->plane.base + v->plane.plane_offset,
                v->plane.page_stride,
                v->page,
                n_blocks,
                v->n_tokens,
                s->cols};
    a.ring = v->ring;
    a.n_queries = s->n_queries < v->n_tokens ? s->n_queries : v->n_tokens;
    a.normed = s->normed, a.by_first = s->by_first, a.by_quarter = s->by_quarter;
    if (s->kind == KERN_SCORE_MINMAX) a.minmax = kern_plane_minmax(&v->plane);
    if (s->kind == KERN_SCORE_BOUND) a.spread = kern_plane_spread(&v->plane);
    a.n_heads = s->n_heads, a.head_dim = s->head_dim, a.n = product_rows(s);
    a.a = s->a, a.b = s->b, a.ln_weight = s->ln_weight, a.ln_bias = s->ln_bias;
    a.w1 = s->w1, a.b1 = s->b1, a.w2 = s->w2, a.b2 = s->b2, a.out = out;
    carve(&a, s, n_blocks, (uint8_t *)scratch);
    const uintptr_t places =
        (uintptr_t)v->plane.base | v->plane.page_stride | (uintptr_t)s->b | (uintptr_t)s->w1;
    const bool aligned = s->cols % 4 == 0 && places % 16 == 0;
    int rc = CUDA_LAUNCH(c, queries_kernel, a.n_queries, THREADS, 0, a);
    if (rc) return rc;
    if (s->kind == KERN_SCORE_LATE) return late(c, a, aligned);
    rc = CUDA_LAUNCH(c, pool_kernel, 1, POOL_THREADS, 0, a);
    if (rc) return rc;
    if (s->kind == KERN_SCORE_MLP) return mlp(c, a, aligned);
    const unsigned grid = (unsigned)mean_grid(n_blocks);
    if (s->by_quarter) return CUDA_LAUNCH(c, mean_quarters_kernel, grid, THREADS, 0, a);
    return CUDA_LAUNCH(c, mean_kernel, grid, THREADS, 0, a);
}
