#include "base/err.h"
#include "kernels/cpu/cpu.h"

/* Products of MM_TILE_MIN..MM_TILE_MAX generated rows by AMX int8 tiles: the sums of integers of
 * matmul_avx512.c by other means. They are exact, and the floats behind them are the same
 * operations in the same order, so the bits are the same and the number of rows may choose.
 *
 * Two units of a panel, unpacked, are a tile as they lie: 16 rows of 16 outputs x 4 columns. Of the
 * other tile a row of activations has two lines, [unit | 0] and [0 | next unit], so that TDPBSUD
 * makes the sums of both: storing a tile of sums costs 16 cycles however many rows are of use. A
 * tile's operations take long and must not be waited for; four pairs of units are in work at any
 * time, their values and sums in this thread's scratch:
 *   unpack pair s | multiply pair s - 2 | store the sums of s - 3 | add s - 4 to the f32 sums
 * in a stream that runs through all panels.
 *
 * While tiles are in use the core multiplies floats at one port of two (measured; also conversions
 * and VPDPBUSD, not additions), so a unit cannot take less than 3 cycles a row; with VPDPBUSD it
 * takes 5.5. Unpacking, which shares a port with that and stores what it makes, is therefore set
 * between the rows.
 *
 * Expected of 8 rows of Q4_1: 27 cycles a unit by the floats, 16 by the stores, under each other;
 * VPDPBUSD 52. Measured: 41 to 46 against 55. Over VPDPBUSD, weights in the second cache, 6, 7, 8
 * rows: Q4_1 .87 .81 .77 of 576 columns, .92 .87 .86 of 1,536; Q8_0 .99 .88 .86
 * (bench/results/cpu-products.csv). Tried: a tile a unit, which needs no second form of the
 * activations, .86 at 8 rows and .75 at 12, but 1.2 beside a busy neighbour; two panels at once
 * (registers spill); the sums' start loaded into the tiles; units in phases, tiles first (floats
 * get their second port back 100 ns behind the last tile, but the sums leave the first cache). */

#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

enum {
    UNIT_BYTES = 512, /* of unpacked values */
    PAIR_BYTES = 2 * UNIT_BYTES,
    SUM_BYTES = 1024, /* of a tile of sums */
    TO_MULTIPLY = 2,  /* steps from unpacking a pair to its product */
    TO_STORE = 3,
    TO_ADD = 4,
    VALUE_SLOTS = 4, /* the next powers of two above the steps that a slot is held */
    SUM_SLOTS = 2,
    SUMS = VALUE_SLOTS * PAIR_BYTES, /* where they begin in scratch */
};
_Static_assert(SUMS + SUM_SLOTS * SUM_BYTES == MM_TILE_SCRATCH, "scratch holds both rings");

/* Tile 0 sums, 1 activations, 2 weights. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_a_row[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "LDTILECFG reads 64 bytes");

static inline void load_tile_config(int rows) {
    struct tile_config c = {.palette = 1, .bytes_a_row = {64, 64, 64}};
    c.rows[0] = c.rows[1] = (uint8_t)(2 * rows);
    c.rows[2] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(c) : "memory");
}

/* Loads of tiles are asm statements that do not say what they read. */
static inline void in_order(void) {
    __asm__ volatile("" : : : "memory");
}

/* The pairs of units of some panels, one behind the other. It stays at the last one. */
struct cursor {
    const uint8_t *values, *scales;
    int left;  /* units of this panel from here on */
    int pairs; /* behind this one, in all panels */
};

/* What stays the same. */
struct job {
    int units;                        /* of a panel */
    ptrdiff_t values_gap, scales_gap; /* from behind the last pair to the next panel's plane */
    const uint8_t *lines;             /* of activations */
    uint8_t *scratch;
};

/* The stream: what each stage takes next. */
struct stream {
    unsigned step;
    struct cursor unpack, ahead;
    const uint8_t *multiply;
    int multiply_left; /* pairs of this panel */
};

MM_INLINE void advance(enum kern_dtype t, const struct job *j, struct cursor *c) {
    if (c->pairs == 0) return;
    c->pairs--;
    c->values += 2 * mm_value_bytes(t);
    c->scales += 2 * mm_unit_scale_bytes(t);
    c->left -= 2;
    if (c->left > 0) return;
    c->left = j->units;
    c->values += j->values_gap;
    c->scales += j->scales_gap;
}

/* What is taken off the stored values: then they are signed. 0: they are not. */
MM_INLINE int offset(enum kern_dtype t) {
    return t == KERN_Q8_0 ? 128 : t == KERN_Q4_0 ? 8 : t == KERN_Q5_0 ? 16 : 0;
}

/* Groups i and i + 4 of a unit, which may lie in the same bytes. */
MM_INLINE void unpack_two(enum kern_dtype t, const uint8_t *values, int i, uint8_t *to) {
    for (int g = i; g < 8; g += 4) {
        __m512i v = mm_load_group(t, values, g);
        if (offset(t)) v = _mm512_sub_epi8(v, _mm512_set1_epi8((char)offset(t)));
        _mm512_store_si512(to + 64 * g, v);
    }
}

/* Where the second unit of a pair is; behind an odd panel's last one itself, against zeros. */
MM_INLINE const uint8_t *second(enum kern_dtype t, const struct cursor *c) {
    return c->values + (c->left > 1 ? mm_value_bytes(t) : 0);
}

/* One pair's product. The loads stand before the store, which waits for its tile. */
MM_INLINE void multiply(enum kern_dtype t, const struct job *j, struct stream *s, int rows) {
    const uint8_t *values = j->scratch + (s->step - TO_MULTIPLY) % VALUE_SLOTS * PAIR_BYTES;
    in_order();
    _tile_loadd(1, s->multiply, 64);
    _tile_loadd(2, values, 64);
    _tile_stored(0, j->scratch + SUMS + (s->step - TO_STORE) % SUM_SLOTS * SUM_BYTES, 64);
    _tile_zero(0);
    if (offset(t)) {
        _tile_dpbssd(0, 1, 2);
    } else {
        _tile_dpbsud(0, 1, 2);
    }
    in_order();
    if (s->step < TO_MULTIPLY) return;
    s->multiply += (size_t)(2 * rows) * MM_LINE_BYTES;
    if (--s->multiply_left > 0) return;
    s->multiply_left = (j->units + 1) / 2;
    s->multiply = j->lines;
}

/* acc[r] += one unit; meanwhile another one is unpacked. Between the rows: it stores, they compute.
 */
MM_INLINE void add_unit(enum kern_dtype t, int rows, const float *scale, const uint8_t *sums,
                        const uint8_t *scales, int u, __m512 *acc, const uint8_t *values,
                        uint8_t *to) {
    __m512 dw[2], mw;
    mm_load_scales(t, scales, u, dw, &mw);
    const __m512 back = _mm512_mul_ps(dw[0], _mm512_set1_ps(-MM_MAGIC_VALUE));
    MM_UNROLL for (int r = 0; r < MM_TILE_MAX; r++) {
        if (r % 2 == 0) unpack_two(t, values, r / 2, to);
        if (r >= rows) continue;
        __m512i dot = _mm512_load_si512(sums + 2 * 64 * r);
        dot = _mm512_add_epi32(dot, _mm512_set1_epi32(MM_MAGIC));
        __m512 scaled = _mm512_fmadd_ps(_mm512_castsi512_ps(dot), dw[0], back);
        acc[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(scale[2 * r]), acc[r]);
        if (mm_has_min(t)) acc[r] = _mm512_fmadd_ps(mw, _mm512_set1_ps(scale[2 * r + 1]), acc[r]);
        in_order();
    }
}

MM_INLINE void fetch_pair(enum kern_dtype t, const struct job *j, struct cursor *c) {
    for (int i = 0; i < 2 * mm_value_bytes(t); i += 64)
        _mm_prefetch((const char *)c->values + i, _MM_HINT_T0);
    for (int i = 0; i < 2 * mm_unit_scale_bytes(t); i += 64)
        _mm_prefetch((const char *)c->scales + i, _MM_HINT_T0);
    advance(t, j, c);
}

/* Behind a group's lines, da and sa: [units][rows][2]. */
static inline float *scales_of(const uint8_t *lines, int rows, int cols) {
    size_t pairs = ((size_t)mm_units(cols) + 1) / 2;
    return (float *)(uintptr_t)(lines + pairs * 2 * (size_t)rows * MM_LINE_BYTES);
}

MM_INLINE void panels(enum kern_dtype t, int rows, const struct kern_weight *w,
                      const uint8_t *lines, float *out, size_t stride, uint8_t *scratch, int begin,
                      int end) {
    const size_t bytes = cpu_panel_bytes(t, w->cols, MM_PANEL);
    const size_t scales_at = cpu_panel_scales(t, w->cols, MM_PANEL);
    const int units = mm_units(w->cols), even = (units + 1) / 2 * 2;
    const struct job j = {
        .units = units,
        .values_gap = (ptrdiff_t)bytes - (ptrdiff_t)even * mm_value_bytes(t),
        .scales_gap = (ptrdiff_t)bytes - (ptrdiff_t)even * mm_unit_scale_bytes(t),
        .lines = lines,
        .scratch = scratch,
    };
    const uint8_t *panel = (const uint8_t *)w->data + (size_t)begin * bytes;
    const struct cursor first = {panel, panel + scales_at, units, (end - begin) * (even / 2) - 1};
    struct stream s = {
        .unpack = first, .ahead = first, .multiply = lines, .multiply_left = even / 2};
    for (int i = 0; i < MM_AHEAD_BYTES / (2 * mm_value_bytes(t)); i++) advance(t, &j, &s.ahead);
    load_tile_config(rows);
    for (; s.step < TO_ADD; s.step++) {
        uint8_t *to = scratch + s.step % VALUE_SLOTS * PAIR_BYTES;
        multiply(t, &j, &s, rows);
        for (int i = 0; i < 4; i++) {
            unpack_two(t, s.unpack.values, i, to);
            unpack_two(t, second(t, &s.unpack), i, to + UNIT_BYTES);
        }
        advance(t, &j, &s.unpack);
    }
    for (int p = begin; p < end; p++) {
        const uint8_t *scales = panel + scales_at;
        const float *a = scales_of(lines, rows, w->cols);
        __m512 acc[MM_TILE_MAX];
        MM_UNROLL for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
        for (int u = 0; u < units; u += 2, s.step++) {
            const uint8_t *sums = scratch + SUMS + (s.step - TO_ADD) % SUM_SLOTS * SUM_BYTES;
            uint8_t *to = scratch + s.step % VALUE_SLOTS * PAIR_BYTES;
            fetch_pair(t, &j, &s.ahead);
            multiply(t, &j, &s, rows);
            add_unit(t, rows, a, sums, scales, u, acc, s.unpack.values, to);
            a += 2 * rows;
            if (u + 1 < units)
                add_unit(t, rows, a, sums + 64, scales, u + 1, acc, second(t, &s.unpack),
                         to + UNIT_BYTES);
            else
                for (int i = 0; i < 4; i++) unpack_two(t, second(t, &s.unpack), i, to + UNIT_BYTES);
            a += 2 * rows;
            advance(t, &j, &s.unpack);
        }
        int left = w->rows - p * MM_PANEL;
        __mmask16 mask = (__mmask16)(left >= MM_PANEL ? 0xffff : (1u << left) - 1);
        MM_UNROLL for (int r = 0; r < rows; r++)
            _mm512_mask_storeu_ps(out + (size_t)r * stride + (size_t)p * MM_PANEL, mask, acc[r]);
        panel += bytes;
    }
    _tile_release();
}

typedef void panels_fn(const struct kern_weight *w, const uint8_t *lines, float *out, size_t stride,
                       uint8_t *scratch, int begin, int end);

#define PANELS_ROWS(type, rows)                                                                    \
    static void panels_##type##_##rows(const struct kern_weight *w, const uint8_t *lines,          \
                                       float *out, size_t stride, uint8_t *scratch, int begin,     \
                                       int end) {                                                  \
        panels(KERN_##type, rows, w, lines, out, stride, scratch, begin, end);                     \
    }
#define PANELS(type)                                                                               \
    PANELS_ROWS(type, 6)                                                                           \
    PANELS_ROWS(type, 7)                                                                           \
    PANELS_ROWS(type, 8)
PANELS(Q8_0)
PANELS(Q4_0)
PANELS(Q4_1)
PANELS(Q5_0)
PANELS(Q5_1)
PANELS(Q4_K)
PANELS(Q5_K)

#define PANELS_ROW(type) [KERN_##type] = {panels_##type##_6, panels_##type##_7, panels_##type##_8}
/* Not Q6_K: the two scales of a unit would want sums apart. */
static panels_fn *const panels_fns[KERN_N_DTYPES][MM_TILE_MAX - MM_TILE_MIN + 1] = {
    PANELS_ROW(Q8_0), PANELS_ROW(Q4_0), PANELS_ROW(Q4_1), PANELS_ROW(Q5_0),
    PANELS_ROW(Q5_1), PANELS_ROW(Q4_K), PANELS_ROW(Q5_K),
};
_Static_assert(MM_TILE_MIN == 6 && MM_TILE_MAX == 8, "the table has all of them");

bool cpu_mm_has_tiles(enum kern_dtype t, int rows) {
    return rows >= MM_TILE_MIN && rows <= MM_TILE_MAX && panels_fns[t][rows - MM_TILE_MIN];
}

void cpu_mm_tiles(int rows, const struct kern_weight *w, const uint8_t *lines, float *out,
                  size_t out_stride, void *scratch, int begin, int end) {
    ASSERT(cpu_mm_has_tiles(w->dtype, rows));
    if (begin >= end) return;
    panels_fns[w->dtype][rows - MM_TILE_MIN](w, lines, out, out_stride, scratch, begin, end);
}

/* ---- Activations ---------------------------------------------------------------------------- */

/* A row's part of a group is a multiple of 64 bytes, so that groups begin at one. */
size_t cpu_mm_tiles_bytes(int n, int cols) {
    size_t pairs = ((size_t)mm_units(cols) + 1) / 2;
    return (size_t)n * (pairs * 2 * MM_LINE_BYTES + align_up(pairs * 2 * 2 * sizeof(float), 64));
}

void cpu_mm_tiles_row(uint8_t *lines, int r, int rows, const struct mm_act *act, int cols) {
    const int units = mm_units(cols), even = (units + 1) / 2 * 2;
    float *scales = scales_of(lines, rows, cols) + 2 * r;
    for (int u = 0; u < even; u++, act += rows, scales += 2 * rows) {
        uint8_t *line = lines + (size_t)(u / 2 * 2 * rows + 2 * r + u % 2) * MM_LINE_BYTES;
        __m512i v = _mm512_setzero_si512();
        if (u < units) {
            __m256i q = _mm256_load_si256((const __m256i *)(const void *)act->q);
            v = u % 2 ? _mm512_inserti64x4(v, q, 1) : _mm512_zextsi256_si512(q);
            scales[0] = act->da;
            scales[1] = act->sa;
        }
        _mm512_store_si512(line, v);
    }
}

#else
typedef int cpu_matmul_tiles_is_for_x86;
#endif
