#include "kernels/cpu/cpu.h"

/* Products on AVX-512 with VNNI: the table, packing of activations, and quantised weights against
 * 8-bit activations. The law of formats.h, so the bits are those of the plain and AVX2 tables.
 *
 * One row is bound by memory: a panel is read as two streams, fetched ahead. Several rows share the
 * unpacked weights, up to 12 in registers: a row costs 8 VPDPBUSD, which take their activations
 * from memory (broadcast), and 2 or 3 float operations for 512 products.
 *
 * Measured where memory reads 13 to 19 GB/s, whole passes, 1 and 5 rows: fetching in two steps
 * takes .80 to .92 and .86 to .96 of what fetching 8 KiB ahead to the first cache at once does;
 * parts of which a faster thread may take, .98 and .92 of even ones. With both the worst of eight
 * row counts stood at 1.19 to 1.42 of the bound, by the quarter of an hour
 * (bench/results/cpu-products.csv). Tried and dropped: AMX int8 tiles for 6 to 8 rows (.77 to .9 of
 * this from cache on a quiet host, 1.04 to 1.18 of it here: half the float units stand still while
 * tiles are in use, and a neighbour on the core may use them too); fetching every second line, or
 * past all caches (1.35, 1.7); threads that still work reading on into the next product's weights
 * (.985; those that wait do: threads.h).
 */

#if defined(__x86_64__)
#include "kernels/cpu/matmul_avx512.h"

enum {
    /* Bytes of values that are fetched before their turn: to the second cache, from there to the
     * first. Not at once to the first: what is on its way there holds one of 16 buffers for as long
     * as memory takes, and 8 KiB of it push out the activations. The second step runs on into the
     * panel's scales: a cursor that does not was no faster. */
    AHEAD_BYTES = 8192,
    NEAR_BYTES = 2048,
    TWO_CHAINS = 3, /* rows whose sums are cut in two */
};

/* One panel against one group of rows. */
struct panel_job {
    const uint8_t *values, *scales;
    const struct mm_act *act; /* first record; a unit further is `rows` records further */
    int units;
    float *out; /* [rows][stride], 16 of `mask` */
    size_t stride;
    __mmask16 mask;
    /* What to fetch meanwhile: some units ahead, after `ahead_left` of them in the next panel. */
    const uint8_t *ahead_values, *ahead_scales;
    int ahead_left;
    size_t values_gap, scales_gap; /* from a plane's end to the next panel's plane */
};

MM_INLINE __m512i offset_start(enum kern_dtype t, const struct mm_act *a, int half) {
    switch (t) {
    case KERN_Q8_0:
        return _mm512_set1_epi32(a->minus128);
    case KERN_Q4_0:
        return _mm512_set1_epi32(a->minus8);
    case KERN_Q5_0:
        return _mm512_set1_epi32(a->minus16);
    case KERN_Q6_K:
        return _mm512_set1_epi32(a->minus32[half]);
    default:
        return _mm512_set1_epi32(MM_MAGIC);
    }
}

/* sum + w * q over 4 columns of 16 outputs, q broadcast by the load port. An asm statement, because
 * gcc 12 makes a load of its own of every broadcast. */
struct four_q {
    int8_t q[4];
};
MM_INLINE __m512i dpbusd(__m512i sum, __m512i w, const int8_t *q) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sum)
            : "v"(w), "m"(*(const struct four_q *)(const void *)q));
    return sum;
}

/* dot[r] = start + w * q over groups [begin, end). Group by group, all rows of each: a row's sum is
 * a chain in which every step waits five cycles, and a scheduler filled with one row's waiting
 * steps has no place for the next row's (row by row took 3.2 ns a row and unit where this takes
 * 2.2). Few rows make two chains each. */
MM_INLINE void dot_rows(enum kern_dtype t, int rows, int half, const uint8_t *values,
                        const struct mm_act *act, int begin, int end, __m512i *dot) {
    const bool two = rows <= TWO_CHAINS;
    __m512i odd[MM_GROUP];
    MM_UNROLL for (int r = 0; r < rows; r++) {
        dot[r] = offset_start(t, act + r, half);
        odd[r] = _mm512_setzero_si512();
    }
    MM_UNROLL for (int g = begin; g < end; g++) {
        __m512i w = mm_load_group(t, values, g);
        MM_UNROLL for (int r = 0; r < rows; r++) {
            __m512i *sum = two && g % 2 ? &odd[r] : &dot[r];
            *sum = dpbusd(*sum, w, act[r].q + 4 * g);
        }
    }
    if (!two) return;
    MM_UNROLL for (int r = 0; r < rows; r++) dot[r] = _mm512_add_epi32(dot[r], odd[r]);
}

/* acc[r] += dot[r] * dw * da, of dots that began at MM_MAGIC. */
MM_INLINE void add_scaled(int rows, const struct mm_act *act, const __m512i *dot, __m512 dw,
                          __m512 *acc) {
    const __m512 back = _mm512_mul_ps(dw, _mm512_set1_ps(-MM_MAGIC_VALUE));
    MM_UNROLL for (int r = 0; r < rows; r++) {
        __m512 scaled = _mm512_fmadd_ps(_mm512_castsi512_ps(dot[r]), dw, back);
        acc[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(act[r].da), acc[r]);
    }
}

MM_INLINE void quant_panel(enum kern_dtype t, int rows, const struct panel_job *j) {
    const struct mm_act *act = j->act;
    const uint8_t *values = j->values;
    const bool has_min = t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K;
    const char *ahead_values = (const char *)j->ahead_values;
    const char *ahead_scales = (const char *)j->ahead_scales;
    int ahead_left = j->ahead_left;
    __m512 acc[MM_GROUP];
    MM_UNROLL for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    for (int u = 0; u < j->units; u++) {
        for (int i = 0; i < mm_value_bytes(t); i += 64) {
            _mm_prefetch(ahead_values + i, _MM_HINT_T1);
            _mm_prefetch((const char *)values + NEAR_BYTES + i, _MM_HINT_T0);
        }
        _mm_prefetch(ahead_scales, _MM_HINT_T1);
        ahead_values += mm_value_bytes(t);
        ahead_scales += mm_unit_scale_bytes(t);
        if (--ahead_left == 0) {
            ahead_values += j->values_gap;
            ahead_scales += j->scales_gap;
        }
        __m512 dw[2], mw;
        mm_load_scales(t, j->scales, u, dw, &mw);
        __m512i dot[MM_GROUP];
        if (t == KERN_Q6_K) {
            for (int h = 0; h < 2; h++) {
                dot_rows(t, rows, h, values, act, 4 * h, 4 * h + 4, dot);
                add_scaled(rows, act, dot, dw[h], acc);
            }
        } else {
            dot_rows(t, rows, 0, values, act, 0, 8, dot);
            add_scaled(rows, act, dot, dw[0], acc);
        }
        if (has_min) {
            MM_UNROLL for (int r = 0; r < rows; r++) acc[r] =
                _mm512_fmadd_ps(mw, _mm512_set1_ps(act[r].sa), acc[r]);
        }
        act += rows;
        values += mm_value_bytes(t);
    }
    MM_UNROLL for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(j->out + (size_t)r * j->stride, j->mask, acc[r]);
}

typedef void panel_fn(const struct panel_job *j);

#define PANEL(type, rows)                                                                          \
    static void panel_##type##_##rows(const struct panel_job *j) {                                 \
        quant_panel(KERN_##type, rows, j);                                                         \
    }
#define PANELS(type)                                                                               \
    PANEL(type, 1)                                                                                 \
    PANEL(type, 2)                                                                                 \
    PANEL(type, 3)                                                                                 \
    PANEL(type, 4)                                                                                 \
    PANEL(type, 5)                                                                                 \
    PANEL(type, 6)                                                                                 \
    PANEL(type, 7)                                                                                 \
    PANEL(type, 8)                                                                                 \
    PANEL(type, 9)                                                                                 \
    PANEL(type, 10)                                                                                \
    PANEL(type, 11)                                                                                \
    PANEL(type, 12)
PANELS(Q8_0)
PANELS(Q4_0)
PANELS(Q4_1)
PANELS(Q5_0)
PANELS(Q5_1)
PANELS(Q4_K)
PANELS(Q5_K)
PANELS(Q6_K)

#define PANEL_ROW(type)                                                                            \
    [KERN_##type] = {NULL,                                                                         \
                     panel_##type##_1,                                                             \
                     panel_##type##_2,                                                             \
                     panel_##type##_3,                                                             \
                     panel_##type##_4,                                                             \
                     panel_##type##_5,                                                             \
                     panel_##type##_6,                                                             \
                     panel_##type##_7,                                                             \
                     panel_##type##_8,                                                             \
                     panel_##type##_9,                                                             \
                     panel_##type##_10,                                                            \
                     panel_##type##_11,                                                            \
                     panel_##type##_12}
static panel_fn *const panel_fns[KERN_N_DTYPES][MM_GROUP + 1] = {
    PANEL_ROW(Q8_0), PANEL_ROW(Q4_0), PANEL_ROW(Q4_1), PANEL_ROW(Q5_0),
    PANEL_ROW(Q5_1), PANEL_ROW(Q4_K), PANEL_ROW(Q5_K), PANEL_ROW(Q6_K),
};

static void quant_matmul(int n, const struct kern_weight *w, const struct mm_act *act, float *out,
                         size_t out_stride, int begin, int end, int goes_on) {
    size_t panel_bytes = cpu_panel_bytes(w->dtype, w->cols, MM_PANEL);
    size_t scales = cpu_panel_scales(w->dtype, w->cols, MM_PANEL);
    size_t value_bytes = (size_t)mm_value_bytes(w->dtype);
    size_t scale_bytes = (size_t)mm_unit_scale_bytes(w->dtype);
    int units = mm_units(w->cols);
    struct panel_job j = {.units = units,
                          .stride = out_stride,
                          .values_gap = panel_bytes - (size_t)units * value_bytes,
                          .scales_gap = panel_bytes - (size_t)units * scale_bytes};
    int ahead_units = AHEAD_BYTES / (int)value_bytes;
    for (int p = begin; p < end; p++) {
        int left = w->rows - p * MM_PANEL;
        j.mask = (__mmask16)(left >= MM_PANEL ? 0xffff : (1u << left) - 1);
        j.values = (const uint8_t *)w->data + (size_t)p * panel_bytes;
        j.scales = j.values + scales;
        int ahead_panels = ahead_units / units, ahead = ahead_units % units;
        /* What lies behind this thread's part is not for it to fetch. */
        if (p + ahead_panels >= goes_on) ahead_panels = ahead = 0;
        j.ahead_values =
            j.values + (size_t)ahead_panels * panel_bytes + (size_t)ahead * value_bytes;
        j.ahead_scales =
            j.scales + (size_t)ahead_panels * panel_bytes + (size_t)ahead * scale_bytes;
        j.ahead_left = units - ahead;
        for (int g = 0; g < mm_groups(n); g++) {
            int r = mm_group_begin(n, g), rows = mm_group_begin(n, g + 1) - r;
            j.act = act + (size_t)r * (size_t)j.units;
            j.out = out + (size_t)r * out_stride + (size_t)p * MM_PANEL;
            panel_fns[w->dtype][rows](&j);
        }
    }
}

/* ---- Activations --------------------------------------------------------------------------- */

static size_t records_bytes(int n, int cols) {
    return (size_t)n * (size_t)mm_units(cols) * sizeof(struct mm_act);
}

static float *records_f32(const void *act, int n, int cols) {
    return (float *)(void *)((uint8_t *)act + records_bytes(n, cols));
}

static size_t act_bytes(const struct cpu_ctx *c, enum cpu_class cls, int n, int cols) {
    if (cls == CPU_PROMPT && c->amx) return cpu_mm_amx_act_bytes(n, cols);
    return records_bytes(n, cols) + (size_t)n * (size_t)mm_units(cols) * MM_UNIT * sizeof(float);
}

/* 32 activations of unit u; zeros behind the last column. */
static inline void load_unit(const float *x, int cols, int u, __m512 v[2]) {
    x += u * MM_UNIT;
    int left = cols - u * MM_UNIT;
    if (left >= MM_UNIT) {
        v[0] = _mm512_loadu_ps(x);
        v[1] = _mm512_loadu_ps(x + 16);
        return;
    }
    uint32_t mask = (1u << left) - 1;
    v[0] = _mm512_maskz_loadu_ps((__mmask16)mask, x);
    v[1] = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), x + 16);
}

/* One record: the bytes, and behind them what their sums and da make. */
static inline void pack_record(const __m512 v[2], float id, float da, struct mm_act *a) {
    /* The conversion rounds half to even, as the law asks. NaN and infinity, whose id is 0, become
     * the integer whose low byte is 0. */
    __m512 scale = _mm512_set1_ps(id), tail_da = _mm512_set1_ps(da);
    __m128i q0 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v[0], scale)));
    __m128i q1 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v[1], scale)));
    __m256i q = _mm256_inserti128_si256(_mm256_castsi128_si256(q0), q1, 1);
    _mm256_store_si256((__m256i *)(void *)a, q);
    /* Sums of four; of each half, 0 in lanes 0 to 3; the other way round; of all. */
    __m256i s = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0xb1));
    __m256i turned = _mm256_permute2x128_si256(s, s, 1), sum = _mm256_add_epi32(s, turned);
    /* Lanes 2 to 4 begin dots from the sum of all, 5 and 6 from the halves'. */
    __m256i starts = _mm256_blend_epi32(_mm256_blend_epi32(sum, turned, 1 << 5), s, 1 << 6);
    starts = _mm256_sllv_epi32(starts, _mm256_setr_epi32(0, 0, 3, 4, 7, 5, 5, 0));
    starts = _mm256_sub_epi32(_mm256_set1_epi32(MM_MAGIC), starts);
    __m256 d = _mm512_castps512_ps256(tail_da), sa = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum));
    __m256 tail = _mm256_blend_ps(_mm256_castsi256_ps(starts), d, 1);
    _mm256_store_ps((float *)(void *)a + 8, _mm256_blend_ps(tail, sa, 2));
}

/* The law's quantisation of up to 16 units from u on, records `step` apart. In three rounds, so
 * that no unit waits for its own maximum and division: all maxima, all scales at once, all bytes
 * (15.5 -> 8.4 ns a unit). */
static void pack_records(const float *x, int cols, int u, int n, struct mm_act *a, int step) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512 top = _mm512_set1_ps(127.f);
    _Alignas(64) int32_t bits[16] = {0};
    _Alignas(64) float da[16], id[16];
    __m512 v[2];
    for (int i = 0; i < n; i++) {
        load_unit(x, cols, u + i, v);
        /* As integers, so that NaN wins over everything. */
        __m512i m0 = _mm512_and_si512(_mm512_castps_si512(v[0]), magnitude);
        __m512i m1 = _mm512_and_si512(_mm512_castps_si512(v[1]), magnitude);
        bits[i] = _mm512_reduce_max_epi32(_mm512_max_epi32(m0, m1));
    }
    __m512i b = _mm512_load_si512(bits);
    __m512 amax = _mm512_castsi512_ps(b);
    __mmask16 bad = _mm512_cmpge_epi32_mask(b, _mm512_set1_epi32(0x7f800000));
    __mmask16 some =
        _mm512_cmp_ps_mask(amax, _mm512_set1_ps(0x1p-100f), _CMP_GE_OQ) & (__mmask16)~bad;
    __m512 scale = _mm512_maskz_div_ps(some, amax, top);
    _mm512_store_ps(id, _mm512_maskz_div_ps(some, top, amax));
    _mm512_store_ps(da, _mm512_castsi512_ps(
                            _mm512_mask_set1_epi32(_mm512_castps_si512(scale), bad, 0x7fc00000)));
    for (int i = 0; i < n; i++) {
        load_unit(x, cols, u + i, v);
        pack_record(v, id[i], da[i], a + (size_t)i * (size_t)step);
    }
}

static void act_row(const struct cpu_ctx *c, enum cpu_class cls, void *act, int r, int n, int cols,
                    const float *x) {
    if (cls == CPU_PROMPT && c->amx) {
        cpu_mm_amx_act_row(act, r, n, cols, x, c->f32_weights);
        return;
    }
    /* The group that holds r: begins are rounded down, so this is the last that begins by r. */
    int units = mm_units(cols), g = ((r + 1) * mm_groups(n) - 1) / n;
    int group = mm_group_begin(n, g), step = mm_group_begin(n, g + 1) - group;
    struct mm_act *a = (struct mm_act *)act + (size_t)group * (size_t)units + (r - group);
    for (int u = 0; u < units; u += 16)
        pack_records(x, cols, u, units - u < 16 ? units - u : 16, a + (size_t)u * (size_t)step,
                     step);
    if (!c->float_weights) return;
    float *copy = records_f32(act, n, cols) + (size_t)r * (size_t)units * MM_UNIT;
    memcpy(copy, x, (size_t)cols * sizeof *x);
    memset(copy + cols, 0, ((size_t)units * MM_UNIT - (size_t)cols) * sizeof *x);
}

/* ---- The table ----------------------------------------------------------------------------- */

static size_t weight_bytes(enum kern_dtype t, int rows, int cols) {
    return cpu_format_weight_bytes(t, rows, cols, MM_PANEL);
}

static void weight_pack(const struct kern_weight *w, void *dst, const void *src, int begin,
                        int end) {
    cpu_format_pack(w, dst, src, MM_PANEL, begin, end);
}

static void weight_row(const struct kern_weight *w, int row, float *out) {
    cpu_format_row(w, MM_PANEL, row, out);
}

static void matmul(const struct cpu_ctx *c, enum cpu_class cls, int n, const struct kern_weight *w,
                   const void *act, float *out, int out_stride, int out_offset, void *scratch,
                   int idx, int n_threads) {
    if (n <= 0) return;
    out += out_offset;
    bool amx = cls == CPU_PROMPT && c->amx;
    if (amx && w->dtype != KERN_F32) {
        cpu_mm_amx(n, w, act, out, (size_t)out_stride, scratch, idx, n_threads);
        return;
    }
    const bool floats = cpu_format_is_float(w->dtype);
    const float *x = !floats ? NULL
                     : amx   ? cpu_mm_amx_f32(act, n, w->cols)
                             : records_f32(act, n, w->cols);
    int begin, end, goes_on;
    while (threads_take(c->threads, cls, idx, &begin, &end, &goes_on)) {
        if (floats)
            cpu_mm512_float(n, w, x, (size_t)mm_units(w->cols) * MM_UNIT, out, (size_t)out_stride,
                            begin, end);
        else quant_matmul(n, w, act, out, (size_t)out_stride, begin, end, goes_on);
    }
}

const struct cpu_matmul_isa cpu_matmul_avx512 = {
    .weight_bytes = weight_bytes,
    .panel_rows = MM_PANEL,
    .weight_pack = weight_pack,
    .weight_row = weight_row,
    .act_bytes = act_bytes,
    .act_row = act_row,
    .matmul = matmul,
};

#else
/* Never reached: isa.c finds no avx512 table elsewhere. */
typedef int cpu_matmul_avx512_is_for_x86;
#endif
