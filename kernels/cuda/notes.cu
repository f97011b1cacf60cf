/* States of the select layer into the planes of their blocks and the rings of their sequences.
 *
 * A thread has 4 neighbouring columns (1 where rows are not whole vectors) of one quarter of one
 * note: it takes the quarter's sum so far and adds its rows in the order of positions, so that the
 * bits are those of noting row by row. How many quarters a note has is device memory: blockIdx.z
 * walks over them. A sequence has at most one note in a call; of rows 32 apart the last stands in
 * the ring.
 *
 * Bounds of normed states are a kernel of their own, where a plane has any: a thread block has one
 * block of one note. Its warps take the norms of the rows, a row a warp, then its threads walk down
 * their columns, each on its own, in the order of positions.
 *
 * Napkin: 512 rows of 4,096 are read once, 8.4 MB, and 8 blocks' planes written, 0.5 MB: 2 us. Five
 * rows: the launch. Bounds: 8 thread blocks read 1 MB each three times, from the L2 but for the
 * first: some 40 us beside a pass of 10 ms; five rows: 2 us. */
#include "kernels/cuda/cuda.cuh"

enum { THREADS = 128, MOST_Z = 64, BOUND_THREADS = 1024 };

struct note_args {
    const struct kern_note *notes;
    const float *x;
    struct kern_plane plane;
    const int32_t *page;
    int capacity;
    float *ring;
};

__device__ static inline float add(float a, float b) {
    return a + b;
}
__device__ static inline float4 add(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Positions [from, to) of one quarter; row `from` is x's row `row`. T at column `col` of cols, all
 * in units of T. end: the note's. */
template <typename T>
__device__ static void note_quarter(const note_args &a, const kern_note &note, int64_t from,
                                    int64_t to, int64_t end, size_t row, int cols, int col) {
    const int64_t block = from / KERN_BLOCK;
    const int page = a.page[(size_t)note.seq * a.capacity + block];
    T *plane =
        (T *)((uint8_t *)a.plane.base + (size_t)page * a.plane.page_stride + a.plane.plane_offset) +
        col;
    T *sum = plane + (size_t)(from % KERN_BLOCK / KERN_QUARTER) * cols;
    T *ring = (T *)a.ring + (size_t)note.ring * KERN_STATE_QUERIES * cols + col;
    const T *x = (const T *)a.x + row * cols + col;
    const int n = (int)(to - from);
    T rows[KERN_QUARTER];
#pragma unroll
    for (int i = 0; i < KERN_QUARTER; i++)
        if (i < n) rows[i] = x[(size_t)i * cols];
    T all = rows[0];
    if (from % KERN_QUARTER) all = add(*sum, all);
    else if (from % KERN_BLOCK == 0 && a.plane.has_first) plane[(size_t)4 * cols] = rows[0];
#pragma unroll
    for (int i = 1; i < KERN_QUARTER; i++)
        if (i < n) all = add(all, rows[i]);
    *sum = all;
#pragma unroll
    for (int i = 0; i < KERN_QUARTER; i++)
        if (i < n && from + i + KERN_STATE_QUERIES >= end)
            ring[(size_t)((from + i) % KERN_STATE_QUERIES) * cols] = rows[i];
}

template <typename T> static __global__ void note_kernel(note_args a, int cols) {
    const int col = (int)(blockIdx.x * THREADS + threadIdx.x);
    pdl_wait();
    pdl_trigger();
    const kern_note note = a.notes[blockIdx.y];
    if (note.seq < 0 || note.n_rows <= 0 || col >= cols) return;
    const int64_t most = (int64_t)a.capacity * KERN_BLOCK;
    const int64_t begin = max(note.position, 0);
    const int64_t end = min((int64_t)note.position + note.n_rows, most);
    for (int64_t q = begin / KERN_QUARTER + blockIdx.z; q * KERN_QUARTER < end; q += gridDim.z) {
        const int64_t from = max(begin, q * KERN_QUARTER), to = min(end, (q + 1) * KERN_QUARTER);
        const size_t row = (size_t)(note.first_row + (from - note.position));
        note_quarter<T>(a, note, from, to, end, row, cols, col);
    }
}

/* ---- Bounds ---- */

__device__ static inline float warp_sum(float x) {
#pragma unroll
    for (int k = 16; k; k /= 2) x += __shfl_xor_sync(~0u, x, k);
    return x;
}

/* Of a row, by one warp. */
__device__ static void norm_of(const float *x, int cols, float *mean, float *scale) {
    const int lane = threadIdx.x % 32;
    float sum = 0, square = 0;
#pragma unroll 8
    for (int c = lane; c < cols; c += 32) sum += x[c];
    const float m = warp_sum(sum) / cols;
#pragma unroll 8
    for (int c = lane; c < cols; c += 32) {
        const float d = x[c] - m;
        square = fmaf(d, d, square);
    }
    square = warp_sum(square);
    if (lane) return;
    *mean = m;
    *scale = 1.f / sqrtf(square / cols + 1e-5f);
}

/* NaN stays. is_first: the first row is the block's first token. */
__device__ static void widen(float *low, float *high, const float *x, size_t stride,
                             const float *mean, const float *scale, int n, bool is_first) {
    float a = is_first ? INFINITY : *low, b = is_first ? -INFINITY : *high;
    for (int i = 0; i < n; i++) {
        const float y = (x[i * stride] - mean[i]) * scale[i];
        if (y < a || isnan(y)) a = y;
        if (y > b || isnan(y)) b = y;
    }
    *low = a;
    *high = b;
}

/* first: the block's tokens before. */
__device__ static void spread(float *to_mean, float *to_square, const float *x, size_t stride,
                              const float *mean, const float *scale, int n, int first) {
    float m = first ? *to_mean : 0.f, square = first ? *to_square : 0.f;
    for (int i = 0; i < n; i++) {
        const float y = (x[i * stride] - mean[i]) * scale[i], off = y - m;
        m += off / (float)(first + i + 1);
        square = fmaf(off, y - m, square);
    }
    *to_mean = m;
    *to_square = square;
}

static __global__ void __launch_bounds__(BOUND_THREADS) bounds_kernel(note_args a) {
    __shared__ float mean[KERN_BLOCK], scale[KERN_BLOCK];
    pdl_wait();
    pdl_trigger();
    const kern_note note = a.notes[blockIdx.x];
    if (note.seq < 0 || note.n_rows <= 0) return;
    const size_t cols = (size_t)a.plane.cols;
    const size_t first = 4 + a.plane.has_first, second = first + (a.plane.has_minmax ? 2 : 0);
    const int64_t most = (int64_t)a.capacity * KERN_BLOCK;
    const int64_t begin = max(note.position, 0);
    const int64_t end = min((int64_t)note.position + note.n_rows, most);
    for (int64_t b = begin / KERN_BLOCK + blockIdx.y; b * KERN_BLOCK < end; b += gridDim.y) {
        const int64_t from = max(begin, b * KERN_BLOCK), to = min(end, (b + 1) * KERN_BLOCK);
        const int n = (int)(to - from), place = (int)(from % KERN_BLOCK);
        const float *x = a.x + (size_t)(note.first_row + (from - note.position)) * cols;
        const int page = a.page[(size_t)note.seq * a.capacity + b];
        float *plane = (float *)((uint8_t *)a.plane.base + (size_t)page * a.plane.page_stride +
                                 a.plane.plane_offset);
        __syncthreads();
        for (int i = threadIdx.x / 32; i < n; i += BOUND_THREADS / 32)
            norm_of(x + i * cols, (int)cols, &mean[i], &scale[i]);
        __syncthreads();
        for (size_t c = threadIdx.x; c < cols; c += BOUND_THREADS) {
            float *low = plane + first * cols + c, *middle = plane + second * cols + c;
            if (a.plane.has_minmax) widen(low, low + cols, x + c, cols, mean, scale, n, place == 0);
            if (a.plane.has_spread)
                spread(middle, middle + cols, x + c, cols, mean, scale, n, place);
        }
    }
}

/* Enough thread blocks for a long prompt's rows; what each does does not depend on it. */
static int note_bounds(struct cuda_ctx *c, int n, const note_args &a) {
    int deep = 2 * c->n_sms / n;
    if (deep < 1) deep = 1;
    if (deep > MOST_Z) deep = MOST_Z;
    return CUDA_LAUNCH(c, bounds_kernel, dim3(n, deep), BOUND_THREADS, 0, a);
}

/* ---- The operation ---- */

int kern_cuda_note_states(struct kern *k, int n, const struct kern_note *notes, const float *x,
                          const struct kern_plane *plane, const int32_t *page, int capacity,
                          float *ring) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT(n >= 0 && n <= KERN_MAX_ROWS && capacity >= 0);
    ASSERT(plane && plane->base && plane->cols > 0 && plane->page_stride % sizeof(float) == 0);
    ASSERT(plane->plane_offset % KERN_ACT_ALIGN == 0);
    if (n == 0) return 0;
    ASSERT(notes && x && page && ring);
    const note_args a = {notes, x, *plane, page, capacity, ring};
    const bool quads = plane->cols % 4 == 0 && plane->page_stride % 16 == 0 &&
                       ((uintptr_t)plane->base | (uintptr_t)x | (uintptr_t)ring) % 16 == 0;
    const int cols = quads ? plane->cols / 4 : plane->cols;
    const int wide = (cols + THREADS - 1) / THREADS;
    /* Enough blocks to fill the chip; what a block does with its quarters does not depend on it. */
    int deep = 2 * c->n_sms / (wide * n);
    if (deep < 1) deep = 1;
    if (deep > MOST_Z) deep = MOST_Z;
    const dim3 grid(wide, n, deep);
    const int rc = quads ? CUDA_LAUNCH(c, note_kernel<float4>, grid, THREADS, 0, a, cols)
                         : CUDA_LAUNCH(c, note_kernel<float>, grid, THREADS, 0, a, cols);
    return rc || !(plane->has_minmax || plane->has_spread) ? rc : note_bounds(c, n, a);
}
