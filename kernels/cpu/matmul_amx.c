#include "kernels/cpu/cpu.h"

/* Products of prompt rows by AMX: bf16 activations and weights, f32 sums in tiles over the whole K
 * in order. More exact than the 8-bit activations of generated rows, and some six times their rate.
 *
 * Activations: [row tiles of 16][units][16 rows][32] bf16, a KiB a tile; rows behind the last one
 * hold whatever they held, a tile's rows do not mix. Weights: two panels (32 outputs) at a time
 * become tiles of 16 column pairs x 16 outputs in this thread's scratch, MM_AMX_SLAB units at most,
 * and meet all row tiles while they lie in the core's cache; 2 x 2 tiles of sums in registers. F16
 * weights lose three bits; F32 weights do not come here: their rows keep an f32 copy behind the
 * tiles, written only where the model has such weights.
 *
 * TDPBF16PS takes denormals as zero and rounds to nearest even. */

#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 1024,
    SLAB = 64, /* units whose tiles lie in scratch at once: 2,048 columns, 128 KiB */
    SCRATCH_SUMS = SLAB * 2 * TILE_BYTES, /* behind them: 2 x 2 tiles of sums for ragged edges */
};

/* Eight full tiles: 0..3 sums, 4, 5 activations, 6, 7 weights. Loaded by an asm statement of our
 * own: gcc 12's intrinsic declares 8 bytes of it as read and the rest may be optimised away. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "LDTILECFG reads 64 bytes");

static const struct tile_config full_tiles = {
    .palette = 1,
    .bytes_a_row = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

static inline void load_tile_config(void) {
    __asm__ volatile("ldtilecfg %0" : : "m"(full_tiles) : "memory");
}

/* ---- Activations --------------------------------------------------------------------------- */

static size_t tiles_bytes(int n, int cols) {
    size_t row_tiles = ((size_t)n + TILE_ROWS - 1) / TILE_ROWS;
    return row_tiles * (size_t)mm_units(cols) * TILE_BYTES;
}

size_t cpu_mm_amx_act_bytes(int n, int cols) {
    return tiles_bytes(n, cols) + (size_t)n * (size_t)mm_units(cols) * MM_UNIT * sizeof(float);
}

const float *cpu_mm_amx_f32(const void *act, int n, int cols) {
    return (const float *)(const void *)((const uint8_t *)act + tiles_bytes(n, cols));
}

void cpu_mm_amx_act_row(void *act, int r, int n, int cols, const float *x, bool f32_copy) {
    int units = mm_units(cols);
    uint8_t *to = (uint8_t *)act + (size_t)(r / TILE_ROWS) * (size_t)units * TILE_BYTES +
                  (size_t)(r % TILE_ROWS) * 64;
    for (int u = 0; u < units; u++, to += TILE_BYTES) {
        int left = cols - u * MM_UNIT;
        __mmask32 mask = left >= MM_UNIT ? 0xffffffffu : (1u << left) - 1;
        __m512 x0 = _mm512_maskz_loadu_ps((__mmask16)mask, x + u * MM_UNIT);
        __m512 x1 = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), x + u * MM_UNIT + 16);
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(x1, x0));
    }
    if (f32_copy)
        memcpy((uint8_t *)act + tiles_bytes(n, cols) +
                   (size_t)r * (size_t)units * MM_UNIT * sizeof(float),
               x, (size_t)cols * sizeof(float));
}

/* ---- Weights to tiles ---------------------------------------------------------------------- */

/* Row of a tile: two columns of 16 outputs, side by side a lane. */
MM_INLINE void store_pair(uint8_t *to, __m512 even, __m512 odd) {
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i v = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_store_si512(to, _mm512_permutexvar_epi16(interleave, v));
}

MM_INLINE void quant_tile(enum kern_dtype t, const uint8_t *values, const uint8_t *scales, int u,
                          uint8_t *tile) {
    const __m512i byte = _mm512_set1_epi32(255);
    const float offset = t == KERN_Q8_0   ? -128
                         : t == KERN_Q4_0 ? -8
                         : t == KERN_Q5_0 ? -16
                         : t == KERN_Q6_K ? -32
                                          : 0;
    __m512i w[8];
    __m512 dw[2], min[2];
    MM_UNROLL for (int g = 0; g < 8; g++) w[g] = mm_load_group(t, values, g);
    mm_load_scales(t, scales, u, dw, &min[0]);
    min[1] = min[0];
    if (offset != 0)
        for (int h = 0; h < 2; h++) min[h] = _mm512_mul_ps(dw[h], _mm512_set1_ps(offset));
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m512 d = dw[g / 4], m = min[g / 4];
        __m512i i0 = _mm512_and_si512(w[g], byte);
        __m512i i1 = _mm512_and_si512(_mm512_srli_epi32(w[g], 8), byte);
        __m512i i2 = _mm512_and_si512(_mm512_srli_epi32(w[g], 16), byte);
        __m512i i3 = _mm512_srli_epi32(w[g], 24);
        store_pair(tile + 128 * g, _mm512_fmadd_ps(_mm512_cvtepi32_ps(i0), d, m),
                   _mm512_fmadd_ps(_mm512_cvtepi32_ps(i1), d, m));
        store_pair(tile + 128 * g + 64, _mm512_fmadd_ps(_mm512_cvtepi32_ps(i2), d, m),
                   _mm512_fmadd_ps(_mm512_cvtepi32_ps(i3), d, m));
    }
}

/* Column `col` of an F16 or BF16 panel; zeros behind the last one. */
static inline __m512 float_column(enum kern_dtype t, const uint8_t *panel, int col, int cols) {
    if (col >= cols) return _mm512_setzero_ps();
    if (t == KERN_F16) return mm_load_f16(panel + (size_t)col * 32);
    const void *p = panel + (size_t)col * 32;
    __m512i v = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
}

/* Tiles of units [begin, end) of one panel, `step` bytes apart. */
MM_INLINE void quant_tiles(enum kern_dtype t, const uint8_t *panel, int cols, int begin, int end,
                           uint8_t *tile, size_t step) {
    const uint8_t *scales = panel + cpu_panel_scales(t, cols, MM_PANEL);
    for (int u = begin; u < end; u++, tile += step)
        quant_tile(t, panel + (size_t)u * (size_t)mm_value_bytes(t), scales, u, tile);
}

static void panel_tiles(const struct kern_weight *w, int panel_idx, int begin, int end,
                        uint8_t *tile, size_t step) {
    if (panel_idx >= mm_panels(w->rows)) {
        for (int u = begin; u < end; u++, tile += step) memset(tile, 0, TILE_BYTES);
        return;
    }
    const uint8_t *panel =
        (const uint8_t *)w->data + (size_t)panel_idx * cpu_panel_bytes(w->dtype, w->cols, MM_PANEL);
    switch (w->dtype) {
    case KERN_Q8_0:
        quant_tiles(KERN_Q8_0, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q4_0:
        quant_tiles(KERN_Q4_0, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q4_1:
        quant_tiles(KERN_Q4_1, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q5_0:
        quant_tiles(KERN_Q5_0, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q5_1:
        quant_tiles(KERN_Q5_1, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q4_K:
        quant_tiles(KERN_Q4_K, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q5_K:
        quant_tiles(KERN_Q5_K, panel, w->cols, begin, end, tile, step);
        return;
    case KERN_Q6_K:
        quant_tiles(KERN_Q6_K, panel, w->cols, begin, end, tile, step);
        return;
    default:
        break;
    }
    for (int u = begin; u < end; u++, tile += step)
        for (int i = 0; i < 16; i++)
            store_pair(tile + 64 * i, float_column(w->dtype, panel, u * MM_UNIT + 2 * i, w->cols),
                       float_column(w->dtype, panel, u * MM_UNIT + 2 * i + 1, w->cols));
}

/* ---- Products ------------------------------------------------------------------------------ */

/* 32 x 32 sums at `sums` (+=, or = where first): activations of two row tiles, weights [units][2].
 * The lines of the block that comes next are fetched meanwhile: outputs of many rows are larger
 * than the core's cache, and a store that misses waits (1.25 -> 1.17 ms for 512 rows of 3072 x
 * 576). */
static void block(int units, const uint8_t *a0, const uint8_t *a1, const uint8_t *weights,
                  float *sums, const float *next, size_t stride, bool first) {
    size_t bytes = stride * sizeof *sums;
    float *lower = sums + TILE_ROWS * stride;
    const char *ahead = (const char *)next;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + 16, bytes);
        _tile_loadd(2, lower, bytes);
        _tile_loadd(3, lower + 16, bytes);
    }
    for (int u = 0; u < units; u++) {
        if (u < 16)
            for (int i = 0; i < 2; i++, ahead += bytes) {
                _mm_prefetch(ahead, _MM_HINT_T1);
                _mm_prefetch(ahead + 64, _MM_HINT_T1);
            }
        _tile_loadd(6, weights, 64);
        _tile_loadd(4, a0, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        a0 += TILE_BYTES;
        a1 += TILE_BYTES;
        weights += 2 * TILE_BYTES;
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + 16, bytes);
    _tile_stored(2, lower, bytes);
    _tile_stored(3, lower + 16, bytes);
}

/* The same at the ragged edges: through a full block in scratch. */
static void edge_block(int units, const uint8_t *a0, const uint8_t *a1, const uint8_t *weights,
                       float *sums, size_t stride, int n_rows, int n_outputs, float *full,
                       bool first) {
    size_t row_bytes = (size_t)n_outputs * sizeof *full;
    if (!first)
        for (int r = 0; r < n_rows; r++)
            memcpy(full + r * 32, sums + (size_t)r * stride, row_bytes);
    block(units, a0, a1, weights, full, full, 32, first);
    for (int r = 0; r < n_rows; r++) memcpy(sums + (size_t)r * stride, full + r * 32, row_bytes);
}

/* Outputs of panels 2 * pair, 2 * pair + 1 for rows of the pairs of row tiles [begin, end). */
static void pair_product(int n, const struct kern_weight *w, const uint8_t *act, float *out,
                         size_t stride, uint8_t *scratch, int pair, int begin, int end) {
    int units = mm_units(w->cols), n_outputs = w->rows - pair * 32 < 32 ? w->rows - pair * 32 : 32;
    size_t tile_row = (size_t)units * TILE_BYTES;
    float *full = (float *)(void *)(scratch + SCRATCH_SUMS);
    for (int slab = 0; slab < units; slab += SLAB) {
        int last = units - slab < SLAB ? units : slab + SLAB;
        panel_tiles(w, 2 * pair, slab, last, scratch, 2 * TILE_BYTES);
        panel_tiles(w, 2 * pair + 1, slab, last, scratch + TILE_BYTES, 2 * TILE_BYTES);
        for (int rt = begin; rt < end; rt++) {
            int n_rows = n - rt * 32 < 32 ? n - rt * 32 : 32;
            const uint8_t *a0 = act + (size_t)(2 * rt) * tile_row + (size_t)slab * TILE_BYTES;
            const uint8_t *a1 = n_rows > TILE_ROWS ? a0 + tile_row : a0;
            float *sums = out + (size_t)rt * 32 * stride + (size_t)pair * 32;
            if (n_rows == 32 && n_outputs == 32)
                block(last - slab, a0, a1, scratch, sums,
                      rt + 1 < end ? sums + 32 * stride
                                   : out + (size_t)begin * 32 * stride + (size_t)(pair + 1) * 32,
                      stride, slab == 0);
            else
                edge_block(last - slab, a0, a1, scratch, sums, stride, n_rows, n_outputs, full,
                           slab == 0);
        }
    }
}

void cpu_mm_amx(int n, const struct kern_weight *w, const void *act, float *out, size_t out_stride,
                void *scratch, int idx, int n_threads) {
    int pairs = (mm_panels(w->rows) + 1) / 2, row_pairs = (n + 31) / 32;
    int whole = pairs / n_threads, rest = pairs % n_threads;
    load_tile_config();
    for (int p = idx * whole; p < (idx + 1) * whole; p++)
        pair_product(n, w, act, out, out_stride, scratch, p, 0, row_pairs);
    /* Threads share what is left over: some threads a pair, each with a part of the rows. */
    if (rest > 0) {
        int pair = idx % rest, part = idx / rest;
        int parts = n_threads / rest + (pair < n_threads % rest ? 1 : 0);
        int begin, end;
        threads_split(row_pairs, 1, part, parts, &begin, &end);
        if (begin < end)
            pair_product(n, w, act, out, out_stride, scratch, whole * n_threads + pair, begin, end);
    }
    _tile_release();
}

#else
typedef int cpu_matmul_amx_is_for_x86;
#endif
