#if defined(__x86_64__)
#include "kernels/cpu/formats.h"

#include <immintrin.h>

#include "base/err.h"

/* The law of formats.h with AVX2: 8 outputs in the lanes of a register. Compiled twice: with
 * CPU_AVXVNNI, VPDPBUSD adds four products of bytes to an int32 in one operation (client machines
 * without AVX-512 have it), and none of what follows about int16 matters.
 *
 * Four bits: VPMADDUBSW multiplies 4 columns of 8 outputs (unsigned) by 4 activations (signed,
 * broadcast by the load port) into pairs of int16. A pair is at most 2 * 15 * 127, so all 8 groups
 * of a block sum in int16 (30,480) before one VPMADDWD makes int32 of them: two operations for 32
 * products. 5 bits: two sums of 4 groups (31,496). 6 bits: sums of 2 groups (32,004). 8 bits: a
 * byte is split into its nibbles and both halves go like four bits; that is one operation in six
 * fewer than the sign trick and never saturates.
 *
 * Up to MAX_ROWS rows share a panel's loads and unpacking. Each row's operations are the same
 * whatever the number of rows, so are its bits. */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum {
    P = 8,
    MAX_ROWS = 6,
    PANELS = 4, /* whose values stay in L1 while blocks of rows pass by */
    /* Bytes that are asked for ahead, scales included. 1,536 of the values alone keep a core of an
     * AMD Zen 3 at a third of what memory gives it: 16 GB/s, where these get 27 of 36. */
    AHEAD = 8192,
    AHEAD_FLOATS = 1536,
};

/* n rows (at most MAX_ROWS) of packed activations against one panel. */
struct task {
    const uint8_t *values, *scales;
    const uint8_t *act; /* first row */
    struct law_row l;
    int cols;
};

INLINE __m256i load(const uint8_t *p) {
    return _mm256_load_si256((const __m256i *)(const void *)p);
}

INLINE __m256i broadcast4(const uint8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

/* s + u * q over 4 columns of 8 outputs: in pairs of int16, of which finish() makes int32. */
#ifdef CPU_AVXVNNI
enum { INT16_SUMS = 0 };
INLINE __m256i mac(__m256i s, __m256i u, __m256i q) {
    return _mm256_dpbusd_avx_epi32(s, u, q);
}
INLINE __m256i finish(__m256i s) {
    return s;
}
#else
enum { INT16_SUMS = 1 };
INLINE __m256i mac(__m256i s, __m256i u, __m256i q) {
    s = _mm256_add_epi16(s, _mm256_maddubs_epi16(u, q));
    /* Sums stay chains: gcc would turn them into trees whose leaves do not fit in 16 registers. */
    __asm__("" : "+x"(s));
    return s;
}
INLINE __m256i finish(__m256i s) {
    return _mm256_madd_epi16(s, _mm256_set1_epi16(1));
}
#endif

/* ---- Integer dots of one block: dot[r] for R rows; q points at row 0's bytes ---------------- */

INLINE void dot_4(const int R, const uint8_t *p, const uint8_t *q, size_t stride, __m256i *dot) {
    const __m256i low = _mm256_set1_epi8(15);
    UNROLL for (int r = 0; r < R; r++) dot[r] = _mm256_setzero_si256();
    UNROLL for (int v = 0; v < 4; v++) {
        __m256i x = load(p + 32 * v), lo = _mm256_and_si256(x, low);
        __m256i hi = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        UNROLL for (int r = 0; r < R; r++) {
            const uint8_t *a = q + (size_t)r * stride + 4 * v;
            dot[r] = mac(mac(dot[r], lo, broadcast4(a)), hi, broadcast4(a + 16));
        }
    }
    UNROLL for (int r = 0; r < R; r++) dot[r] = finish(dot[r]);
}

INLINE void dot_5(const int R, const uint8_t *p, const uint8_t *q, size_t stride, __m256i *dot) {
    const __m256i low = _mm256_set1_epi8(15), bit = _mm256_set1_epi8(16);
    const __m256i high = load(p + 128);
    __m256i s[MAX_ROWS];
    UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int r = 0; r < R; r++) {
            if (half == 0 || INT16_SUMS) s[r] = _mm256_setzero_si256();
        }
        UNROLL for (int v = 0; v < 4; v++) {
            __m256i x = load(p + 32 * v), h;
            if (half) {
                x = _mm256_srli_epi16(x, 4);
                h = _mm256_srli_epi16(high, v);
            } else h = _mm256_slli_epi16(high, 4 - v);
            x = _mm256_or_si256(_mm256_and_si256(x, low), _mm256_and_si256(h, bit));
            UNROLL for (int r = 0; r < R; r++) {
                s[r] = mac(s[r], x, broadcast4(q + (size_t)r * stride + 16 * half + 4 * v));
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            if (!INT16_SUMS || half == 0) dot[r] = finish(s[r]);
            else dot[r] = _mm256_add_epi32(dot[r], finish(s[r]));
        }
    }
}

/* One half of a 6-bit block: its four groups in two int16 sums. */
INLINE void dot_6(const int R, const int half, const uint8_t *p, const uint8_t *q, size_t stride,
                  __m256i *dot) {
    const __m256i low = _mm256_set1_epi8(15), bits = _mm256_set1_epi8(48);
    const __m256i high = load(p + 128 + 32 * half);
    UNROLL for (int pair = 0; pair < 2; pair++) {
        __m256i u[2];
        UNROLL for (int i = 0; i < 2; i++) {
            int v = 2 * pair + i;
            __m256i x = load(p + 32 * v);
            if (half) x = _mm256_srli_epi16(x, 4);
            __m256i h = v == 0   ? _mm256_slli_epi16(high, 4)
                        : v == 1 ? _mm256_slli_epi16(high, 2)
                        : v == 2 ? high
                                 : _mm256_srli_epi16(high, 2);
            u[i] = _mm256_or_si256(_mm256_and_si256(x, low), _mm256_and_si256(h, bits));
        }
        UNROLL for (int r = 0; r < R; r++) {
            const uint8_t *a = q + (size_t)r * stride + 16 * half + 8 * pair;
            __m256i s = mac(_mm256_setzero_si256(), u[0], broadcast4(a));
            s = finish(mac(s, u[1], broadcast4(a + 4)));
            dot[r] = pair ? _mm256_add_epi32(dot[r], s) : s;
        }
    }
}

/* Of w + 128. */
#ifdef CPU_AVXVNNI
INLINE void dot_8(const int R, const uint8_t *p, const uint8_t *q, size_t stride, __m256i *dot) {
    const __m256i sign = _mm256_set1_epi8(-128);
    UNROLL for (int r = 0; r < R; r++) dot[r] = _mm256_setzero_si256();
    UNROLL for (int g = 0; g < 8; g++) {
        __m256i x = _mm256_xor_si256(load(p + 32 * g), sign);
        UNROLL for (int r = 0; r < R; r++) {
            dot[r] = mac(dot[r], x, broadcast4(q + (size_t)r * stride + 4 * g));
        }
    }
}
#else /* w + 128 = 16 hi + lo */
INLINE void dot_8(const int R, const uint8_t *p, const uint8_t *q, size_t stride, __m256i *dot) {
    const __m256i low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
    __m256i s[MAX_ROWS];
    UNROLL for (int r = 0; r < R; r++) s[r] = dot[r] = _mm256_setzero_si256();
    UNROLL for (int g = 0; g < 8; g++) {
        __m256i x = _mm256_xor_si256(load(p + 32 * g), sign), lo = _mm256_and_si256(x, low);
        __m256i hi = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        UNROLL for (int r = 0; r < R; r++) {
            __m256i a = broadcast4(q + (size_t)r * stride + 4 * g);
            dot[r] = mac(dot[r], lo, a);
            s[r] = mac(s[r], hi, a);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        dot[r] = _mm256_add_epi32(finish(dot[r]), _mm256_madd_epi16(s[r], _mm256_set1_epi16(16)));
    }
}
#endif

/* ---- Scales --------------------------------------------------------------------------------- */

INLINE __m256 load_f16(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}
INLINE __m256 load_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}
INLINE __m256 load_i8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p)));
}

INLINE __m256 broadcast_f32(const uint8_t *p) {
    return _mm256_broadcast_ss((const float *)(const void *)p);
}

/* acc += dot * dw * da for R rows, the stored values' offset (1 << shift) taken off in the
 * integers. */
INLINE void add_scaled(const int R, const int shift, __m256 *acc, const __m256i *dot, __m256 dw,
                       const uint8_t *da, const uint8_t *sum, size_t stride) {
    UNROLL for (int r = 0; r < R; r++) {
        __m256i d = dot[r];
        if (shift)
            d = _mm256_sub_epi32(d, _mm256_slli_epi32(broadcast4(sum + (size_t)r * stride), shift));
        __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(d), dw);
        acc[r] = _mm256_fmadd_ps(scaled, broadcast_f32(da + (size_t)r * stride), acc[r]);
    }
}

INLINE void quantised(const enum kern_dtype t, const int R, const struct task *j, __m256 *acc) {
    const bool k_type = t == KERN_Q4_K || t == KERN_Q5_K || t == KERN_Q6_K;
    const bool min = t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K;
    const int shift = t == KERN_Q4_0 ? 3 : t == KERN_Q5_0 ? 4 : t == KERN_Q8_0 ? 7 : 0;
    const size_t block_bytes = t == KERN_Q8_0                                       ? 256
                               : t == KERN_Q6_K                                     ? 192
                               : t == KERN_Q4_0 || t == KERN_Q4_1 || t == KERN_Q4_K ? 128
                                                                                    : 160;
    const size_t record = t == KERN_Q6_K ? 18 * P : k_type ? 20 * P : min ? 4 * P : 2 * P;
    const struct law_row l = j->l;
    const uint8_t *p = j->values, *scales = j->scales, *act = j->act;
    /* Panels lie one behind the other, each with its scales: a block's share of one. */
    const size_t share = block_bytes + (k_type ? record / 8 : record);
    const uint8_t *ahead = p + AHEAD;
    UNROLL for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
    for (int b = 0; b < l.blocks; b++, p += block_bytes, ahead += share) {
        const uint8_t *q = act + l.q + (size_t)b * 32, *at = act + (size_t)b * 4;
        __m256i dot[MAX_ROWS];
        UNROLL for (size_t i = 0; i < share; i += 64) {
            _mm_prefetch((const char *)ahead + i, _MM_HINT_T0);
        }
        const uint8_t *rec =
            k_type ? scales + (size_t)(b / 8) * record : scales + (size_t)b * record;
        __m256 dw = load_f16(rec);
        if (t == KERN_Q6_K) {
            for (int h = 0; h < 2; h++) {
                dot_6(R, h, p, q, l.bytes, dot);
                add_scaled(R, 5, acc, dot,
                           _mm256_mul_ps(dw, load_i8(rec + 16 + (2 * (b % 8) + h) * P)), at + l.da,
                           at + l.half[h], l.bytes);
            }
            continue;
        }
        if (t == KERN_Q8_0) dot_8(R, p, q, l.bytes, dot);
        else if (block_bytes == 128) dot_4(R, p, q, l.bytes, dot);
        else dot_5(R, p, q, l.bytes, dot);
        if (k_type) dw = _mm256_mul_ps(dw, load_u8(rec + 32 + (b % 8) * P));
        add_scaled(R, shift, acc, dot, dw, at + l.da, at + l.sum, l.bytes);
        if (!min) continue;
        __m256 mw = load_f16(rec + 16);
        if (k_type)
            mw = _mm256_xor_ps(_mm256_mul_ps(mw, load_u8(rec + 96 + (b % 8) * P)),
                               _mm256_set1_ps(-0.f));
        UNROLL for (int r = 0; r < R; r++) {
            acc[r] = _mm256_fmadd_ps(mw, broadcast_f32(at + l.sa + (size_t)r * l.bytes), acc[r]);
        }
    }
}

/* ---- Float weights -------------------------------------------------------------------------- */

INLINE __m256 load_weight(const enum kern_dtype t, const uint8_t *p) {
    if (t == KERN_F32) return _mm256_load_ps((const float *)(const void *)p);
    if (t == KERN_F16) return load_f16(p);
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

INLINE void floats(const enum kern_dtype t, const int R, const struct task *j, __m256 *acc) {
    const size_t step = t == KERN_F32 ? 4 * P : 2 * P, stride = j->l.bytes;
    const uint8_t *p = j->values, *act = j->act;
    __m256 odd[MAX_ROWS];
    UNROLL for (int r = 0; r < R; r++) acc[r] = odd[r] = _mm256_setzero_ps();
    int k = 0;
    for (; k + 2 <= j->cols; k += 2, p += 2 * step) {
        __m256 w0 = load_weight(t, p), w1 = load_weight(t, p + step);
        const uint8_t *x = act + (size_t)k * 4;
        _mm_prefetch((const char *)p + AHEAD_FLOATS, _MM_HINT_T0);
        UNROLL for (int r = 0; r < R; r++) {
            acc[r] = _mm256_fmadd_ps(w0, broadcast_f32(x + (size_t)r * stride), acc[r]);
            odd[r] = _mm256_fmadd_ps(w1, broadcast_f32(x + (size_t)r * stride + 4), odd[r]);
        }
    }
    if (k < j->cols) {
        __m256 w0 = load_weight(t, p);
        UNROLL for (int r = 0; r < R; r++) {
            acc[r] = _mm256_fmadd_ps(w0, broadcast_f32(act + (size_t)k * 4 + (size_t)r * stride),
                                     acc[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) acc[r] = _mm256_add_ps(acc[r], odd[r]);
}

/* ---- One function for each type and number of rows ------------------------------------------- */

typedef void panel_fn(const struct task *j, float *out, size_t out_stride, int lanes);

INLINE void store(const int R, const __m256 *acc, float *out, size_t out_stride, int lanes) {
    if (lanes == P) {
        UNROLL for (int r = 0; r < R; r++) _mm256_storeu_ps(out + (size_t)r * out_stride, acc[r]);
        return;
    }
    __m256i mask =
        _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    UNROLL for (int r = 0; r < R; r++) {
        _mm256_maskstore_ps(out + (size_t)r * out_stride, mask, acc[r]);
    }
}

#define PANEL(body, t, R)                                                                          \
    static void panel_##t##_##R(const struct task *j, float *out, size_t out_stride, int lanes) {  \
        __m256 acc[MAX_ROWS];                                                                      \
        body(KERN_##t, R, j, acc);                                                                 \
        store(R, acc, out, out_stride, lanes);                                                     \
    }
#define PANELS_OF(body, t)                                                                         \
    PANEL(body, t, 1)                                                                              \
    PANEL(body, t, 2)                                                                              \
    PANEL(body, t, 3)                                                                              \
    PANEL(body, t, 4)                                                                              \
    PANEL(body, t, 5)                                                                              \
    PANEL(body, t, 6)
PANELS_OF(floats, F32)
PANELS_OF(floats, F16)
PANELS_OF(floats, BF16)
PANELS_OF(quantised, Q8_0)
PANELS_OF(quantised, Q4_0)
PANELS_OF(quantised, Q4_1)
PANELS_OF(quantised, Q5_0)
PANELS_OF(quantised, Q5_1)
PANELS_OF(quantised, Q4_K)
PANELS_OF(quantised, Q5_K)
PANELS_OF(quantised, Q6_K)

#define ROW_OF(t)                                                                                  \
    [KERN_##t] = {panel_##t##_1, panel_##t##_2, panel_##t##_3,                                     \
                  panel_##t##_4, panel_##t##_5, panel_##t##_6}
static panel_fn *const panel_fns[KERN_N_DTYPES][MAX_ROWS] = {
    ROW_OF(F32),  ROW_OF(F16),  ROW_OF(BF16), ROW_OF(Q8_0), ROW_OF(Q4_0), ROW_OF(Q4_1),
    ROW_OF(Q5_0), ROW_OF(Q5_1), ROW_OF(Q4_K), ROW_OF(Q5_K), ROW_OF(Q6_K),
};

/* ---- The table ------------------------------------------------------------------------------ */

static size_t weight_bytes(enum kern_dtype t, int rows, int cols) {
    return cpu_format_weight_bytes(t, rows, cols, P);
}
static void weight_pack(const struct kern_weight *w, void *dst, const void *src, int begin,
                        int end) {
    cpu_format_pack(w, dst, src, P, begin, end);
}
static void weight_row(const struct kern_weight *w, int row, float *out) {
    cpu_format_row(w, P, row, out);
}

static size_t act_bytes(const struct cpu_ctx *c, enum cpu_class cls, int n, int cols) {
    (void)c, (void)cls;
    return (size_t)n * law_row(cols).bytes;
}
INLINE __m128i fold(__m256i v) {
    return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

/* law_pack_row's block `b`, of the f32 values that already lie in the row. */
static void act_block(const struct law_row *l, uint8_t *row, int b) {
    const float *v = (const float *)(const void *)row + (size_t)b * 32;
    uint8_t *at = row + (size_t)b * 4;
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 x[4];
    __m256i m = _mm256_setzero_si256(), t[4];
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_load_ps(v + 8 * i);
        m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
    }
    __m128i top = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
    uint32_t bits = (uint32_t)_mm_cvtsi128_si32(top);
    float amax = half_bits_to_f32(bits), da = amax / 127.f, inverse = 127.f / amax;
    if (bits >= 0x7f800000 || amax < 0x1p-100f) {
        da = bits >= 0x7f800000 ? half_bits_to_f32(0x7fc00000) : 0.f;
        for (int i = 0; i < 4; i++) t[i] = _mm256_setzero_si256();
    } else {
        for (int i = 0; i < 4; i++)
            t[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(inverse)));
    }
    /* Packing works within 128-bit lanes; the last step puts the words of four back in order. */
    __m256i words =
        _mm256_packs_epi16(_mm256_packs_epi32(t[0], t[1]), _mm256_packs_epi32(t[2], t[3]));
    words = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_store_si256((__m256i *)(void *)(row + l->q + (size_t)b * 32), words);
    /* Both halves' sums at once: lanes 0 and 1 of the second addition. */
    __m128i s =
        _mm_hadd_epi32(fold(_mm256_add_epi32(t[0], t[1])), fold(_mm256_add_epi32(t[2], t[3])));
    s = _mm_hadd_epi32(s, s);
    int32_t half0 = _mm_cvtsi128_si32(s), half1 = _mm_extract_epi32(s, 1), sum = half0 + half1;
    float sa = da * (float)sum;
    memcpy(at + l->da, &da, 4);
    memcpy(at + l->sa, &sa, 4);
    memcpy(at + l->sum, &sum, 4);
    memcpy(at + l->half[0], &half0, 4);
    memcpy(at + l->half[1], &half1, 4);
}

static void act_row(const struct cpu_ctx *c, enum cpu_class cls, void *act, int r, int n, int cols,
                    const float *x) {
    (void)c, (void)cls, (void)n;
    struct law_row l = law_row(cols);
    uint8_t *row = (uint8_t *)act + (size_t)r * l.bytes;
    float *xs = (float *)(void *)row;
    memcpy(xs, x, (size_t)cols * sizeof *x);
    memset(xs + cols, 0, ((size_t)l.blocks * 32 - (size_t)cols) * sizeof *x);
    for (int b = 0; b < l.blocks; b++) act_block(&l, row, b);
}

/* Panels [begin, end). Rows in even parts of at most MAX_ROWS; a few panels at a time, so that both
 * a part's activations and the panels are read from L1 while prompts of many rows pass. */
static void some_panels(int n, const struct kern_weight *w, const uint8_t *act, float *out,
                        size_t stride, int begin, int end) {
    const int parts = (n + MAX_ROWS - 1) / MAX_ROWS;
    size_t bytes = cpu_panel_bytes(w->dtype, w->cols, P);
    size_t scales = cpu_format_is_float(w->dtype) ? 0 : cpu_panel_scales(w->dtype, w->cols, P);
    struct task j = {.l = law_row(w->cols), .cols = w->cols};
    for (int first = begin; first < end; first += PANELS) {
        int last = first + PANELS < end ? first + PANELS : end;
        for (int part = 0; part < parts; part++) {
            int row, row_end;
            threads_split(n, 1, part, parts, &row, &row_end);
            panel_fn *fn = panel_fns[w->dtype][row_end - row - 1];
            j.act = act + (size_t)row * j.l.bytes;
            for (int i = first; i < last; i++) {
                int lanes = w->rows - i * P < P ? w->rows - i * P : P;
                j.values = (const uint8_t *)w->data + (size_t)i * bytes;
                j.scales = j.values + scales;
                fn(&j, out + (size_t)row * stride + (size_t)(i * P), stride, lanes);
            }
        }
    }
}

static void matmul(const struct cpu_ctx *c, enum cpu_class cls, int n, const struct kern_weight *w,
                   const void *act, float *out, int out_stride, int out_offset, void *scratch,
                   int idx, int n_threads) {
    (void)scratch, (void)n_threads;
    int begin, end, goes_on;
    while (threads_take(c->threads, cls, idx, &begin, &end, &goes_on))
        some_panels(n, w, act, out + out_offset, (size_t)out_stride, begin, end);
}

#ifdef CPU_AVXVNNI
const struct cpu_matmul_isa cpu_matmul_avxvnni = {
#else
const struct cpu_matmul_isa cpu_matmul_avx2 = {
#endif
    .weight_bytes = weight_bytes,
    .panel_rows = P,
    .weight_pack = weight_pack,
    .weight_row = weight_row,
    .act_bytes = act_bytes,
    .act_row = act_row,
    .matmul = matmul,
};
#endif
