/* A leaf of a prompt tile by AMX bf16 tiles: S = Q K^T and O = P V, softmax in f32 between them. K
 * and V of the leaf are rounded to bf16 and paired once for all queries of the tile; queries then
 * go 32 at a time, so that their scores stay near. Both of the cache's layouts ([head_dim][64] and
 * [64][head_dim]) are rows of the product's inner dimension, so one packing serves K and V.
 *
 * A query's bits depend on itself and on what it sees alone: an element of a product is summed over
 * the inner dimension in order; columns that it does not see have weight exactly 0, which adds
 * nothing; values behind the last token that the tile sees are packed as zeros. Where a page that
 * only some rows see holds a value that is not finite (0 times it would be NaN), every row gets a
 * packing of its own without what it does not see. */
#include <math.h>

#include "kernels/cpu/attention_q8.h"
#include "kernels/cpu/simd.h"

enum { G = ATTN_AMX_GROUP };

/* Scratch, carved; attn_amx_bytes says how much. */
struct amx {
    int kdim, dim; /* head_dim rounded up to 32 and to 16 */
    uint16_t *q;   /* [ATTN_AMX_Q + G][kdim] */
    uint16_t *k;   /* [8 pages][kdim / 2][64][2]: pairs of d */
    uint16_t *v;   /* [KERN_LEAF / 2][dim][2]: pairs of tokens */
    float *s;      /* [G][ATTN_AMX_S] */
    uint16_t *p;   /* [G][ATTN_AMX_P] */
    float *o;      /* [G][dim] */
};

static struct amx carve(int head_dim, void *scratch) {
    struct amx a = {.kdim = (int)align_up((size_t)head_dim, 32),
                    .dim = (int)align_up((size_t)head_dim, 16)};
    size_t kdim = (size_t)a.kdim, dim = (size_t)a.dim;
    uint8_t *at = scratch;
    a.q = (uint16_t *)(void *)at, at += (ATTN_AMX_Q + G) * kdim * 2;
    a.k = (uint16_t *)(void *)at, at += KERN_LEAF * kdim * 2;
    a.v = (uint16_t *)(void *)at, at += KERN_LEAF * dim * 2;
    a.s = (float *)(void *)at, at += G * ATTN_AMX_S * sizeof(float);
    a.p = (uint16_t *)(void *)at, at += G * ATTN_AMX_P * 2;
    a.o = (float *)(void *)at;
    return a;
}

/* ---- Packing ------------------------------------------------------------------------------- */

/* 16 elements of a row as bf16; `lanes` of them exist. */
ALWAYS_INLINE __m256i load_bf16(enum kern_dtype t, const uint16_t *src, __mmask16 lanes) {
    __m256i h = _mm256_maskz_loadu_epi16(lanes, src);
    return t == KERN_BF16 ? h : (__m256i)_mm512_cvtneps_pbh(_mm512_cvtph_ps(h));
}

/* n rows of `width` elements to pairs of rows, [n_out / 2][stride][2]; zeros beyond. A row whose
 * bit in `keep` is clear counts as zeros (bit i for row i; rows from 64 on are kept). */
ALWAYS_INLINE void pack_as(enum kern_dtype t, const uint16_t *src, int n, int width, int n_out,
                           int stride, uint64_t keep, uint16_t *dst) {
    for (int i = 0; i < n_out; i += 2) {
        bool first = i < n && (i >= 64 || keep >> i & 1);
        bool second = i + 1 < n && (i + 1 >= 64 || keep >> (i + 1) & 1);
        const uint16_t *row = src + (size_t)i * (size_t)width;
        for (int x = 0; x < stride; x += 16) {
            int left = width - x;
            __mmask16 lanes = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1u) : 0;
            __m256i a = load_bf16(t, row + x, first ? lanes : 0);
            __m256i b = load_bf16(t, row + width + x, second ? lanes : 0);
            __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(a),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
            _mm512_storeu_si512(dst + ((size_t)(i / 2) * (size_t)stride + (size_t)x) * 2, pairs);
        }
    }
}

static void pack(enum kern_dtype t, const void *src, int n, int width, int n_out, int stride,
                 uint64_t keep, uint16_t *dst) {
    if (t == KERN_F16) pack_as(KERN_F16, src, n, width, n_out, stride, keep, dst);
    else pack_as(KERN_BF16, src, n, width, n_out, stride, keep, dst);
}

/* Does packed bf16 hold an infinity or NaN? n a multiple of 32. */
static bool any_not_finite(const uint16_t *x, size_t n) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 bad = 0;
    for (size_t i = 0; i < n; i += 32)
        bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(x + i), exponent),
                                       exponent);
    return bad != 0;
}

static uint16_t *v_page(const struct amx *a, int entry) {
    return a->v + (size_t)entry * KERN_BLOCK * (size_t)a->dim;
}

static void pack_values(const struct attn_job *j, const struct attn_tile *t,
                        const struct attn_sight *see, const struct amx *a, int entry,
                        uint64_t keep) {
    uint64_t any = see->any[entry];
    if (any && j->kv->dtype == KERN_Q8_0) {
        attn_amx_q8_v(attn_page(j, t, see->e0 + entry, true), j->kv->head_dim, attn_n_tokens(any),
                      a->dim, keep, v_page(a, entry));
        return;
    }
    const void *src = any ? (const void *)attn_page(j, t, see->e0 + entry, true) : a->p;
    pack(j->kv->dtype, src, any ? attn_n_tokens(any) : 0, j->kv->head_dim, KERN_BLOCK, a->dim, keep,
         v_page(a, entry));
}

void attn_amx_queries(const struct attn_job *j, const struct attn_tile *t, void *scratch) {
    struct amx a = carve(j->kv->head_dim, scratch);
    int hd = j->kv->head_dim;
    uint16_t *dst = a.q;
    for (int r = 0; r < t->n_rows; r++)
        for (int g = 0; g < j->group; g++, dst += a.kdim) {
            const float *src = j->qkv + (size_t)(t->row + r) * (size_t)j->qkv_stride +
                               (size_t)(t->head * j->group + g) * (size_t)hd;
            float turned[KERN_MAX_HEAD_DIM];
            if (j->kv->dtype == KERN_Q8_0) {
                memcpy(turned, src, (size_t)hd * sizeof *src);
                q8_turn_query(turned, hd);
                src = turned;
            }
            for (int x = 0; x < a.kdim; x += 16) {
                int left = hd - x;
                __mmask16 lanes = left >= 16 ? 0xffff
                                  : left > 0 ? (__mmask16)((1u << left) - 1u)
                                             : 0;
                __m512 q =
                    _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, src + x), _mm512_set1_ps(j->scale));
                _mm256_storeu_si256((__m256i *)(void *)(dst + x), (__m256i)_mm512_cvtneps_pbh(q));
            }
        }
}

/* ---- Products ------------------------------------------------------------------------------ */

static const struct {
    uint8_t palette, start, zero[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} full_tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

/* c = a b for nm x nn tiles of 16 x 16 over nk steps of 32; strides in bytes. The intrinsics tell
 * the compiler of no memory, hence the barriers. */
ALWAYS_INLINE void product(int nm, int nn, int nk, const uint16_t *a, size_t a_stride,
                           const uint16_t *b, size_t b_stride, float *c, size_t c_stride) {
    const uint8_t *a0 = (const uint8_t *)a, *a1 = a0 + 16 * a_stride, *b0 = (const uint8_t *)b;
    uint8_t *c0 = (uint8_t *)c, *c1 = c0 + 16 * c_stride;
    __asm__ volatile("" : : : "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < nk; k++, a0 += 64, a1 += 64, b0 += 16 * b_stride) {
        _tile_loadd(4, a0, a_stride);
        _tile_loadd(6, b0, b_stride);
        _tile_dpbf16ps(0, 4, 6);
        if (nn > 1) {
            _tile_loadd(7, b0 + 64, b_stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (nm > 1) {
            _tile_loadd(5, a1, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            if (nn > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c0, c_stride);
    if (nn > 1) _tile_stored(1, c0 + 64, c_stride);
    if (nm > 1) {
        _tile_stored(2, c1, c_stride);
        if (nn > 1) _tile_stored(3, c1 + 64, c_stride);
    }
    __asm__ volatile("" : : : "memory");
}

/* ---- Softmax ------------------------------------------------------------------------------- */

/* 2^t for t <= 0 or NaN, relative error 3e-6, far under bf16's; 0 below -120. */
ALWAYS_INLINE __m512 exp2_weight(__m512 t) {
    __mmask16 on = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-120.f), _CMP_NLT_UQ);
    __m512 n = _mm512_roundscale_ps(t, 0), f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0x1.3a02ccp-7f), _mm512_set1_ps(0x1.c9fc46p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ec0378p-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e12cp-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
    return _mm512_maskz_scalef_ps(on, p, n);
}

/* Largest of n scores (a multiple of 32), weights exp(s - m) as bf16, their sum before rounding. */
static void softmax(const float *s, int n, uint16_t *p, float *m_out, float *l_out) {
    __m512 top = _mm512_set1_ps(-INFINITY), low = top;
    for (int c = 0; c < n; c += 32) {
        top = _mm512_max_ps(_mm512_loadu_ps(s + c), top);
        low = _mm512_max_ps(_mm512_loadu_ps(s + c + 16), low);
    }
    vf both = _mm512_max_ps(top, low);
    float m = v_max16(&both);
    const __m512 log2e = _mm512_set1_ps(0x1.715476p0f), shift = _mm512_set1_ps(m * 0x1.715476p0f);
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int c = 0; c < n; c += 32) {
        __m512 a = exp2_weight(_mm512_fmsub_ps(_mm512_loadu_ps(s + c), log2e, shift));
        __m512 b = exp2_weight(_mm512_fmsub_ps(_mm512_loadu_ps(s + c + 16), log2e, shift));
        even = _mm512_add_ps(even, a);
        odd = _mm512_add_ps(odd, b);
        _mm512_storeu_si512(p + c, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    *m_out = m;
    both = _mm512_add_ps(even, odd);
    *l_out = v_sum16(&both);
}

static void mask_page(float *s, uint64_t seen) {
    for (int c = 0; c < KERN_BLOCK; c += 16)
        _mm512_storeu_ps(s + c, v_select((uint32_t)(seen >> c) & 0xffff, _mm512_loadu_ps(s + c),
                                         _mm512_set1_ps(-INFINITY)));
}

/* ---- A leaf -------------------------------------------------------------------------------- */

/* Queries [q0, q0 + n) of the tile, n <= 32. */
static void group(const struct attn_job *j, const struct attn_sight *see, const struct amx *a,
                  int q0, int n, float *slot) {
    int n_entries = see->e1 - see->e0, nm = n > 16 ? 2 : 1, last = -1;
    size_t kdim = (size_t)a->kdim, dim = (size_t)a->dim, stride = (size_t)j->slot_floats;
    int r0 = q0 / j->group, r1 = (q0 + n - 1) / j->group;
    for (int e = 0; e < n_entries; e++)
        for (int r = r0; r <= r1; r++)
            if (see->row[r][e]) last = e;
    int n_cols = (last + 1) * KERN_BLOCK; /* weights behind them are 0 for all of these queries */
    for (int e = 0; e <= last; e++) {
        float *s = a->s + e * KERN_BLOCK;
        const uint16_t *k = a->k + (size_t)e * KERN_BLOCK * kdim;
        for (int c = 0; c < KERN_BLOCK && see->any[e]; c += 32)
            product(nm, 2, a->kdim / 32, a->q + (size_t)q0 * kdim, kdim * 2, k + c * 2,
                    KERN_BLOCK * 4, s + c, ATTN_AMX_S * sizeof(float));
        for (int i = 0; i < n && see->all[e] != ~(uint64_t)0; i++)
            mask_page(s + (size_t)i * ATTN_AMX_S, see->row[(q0 + i) / j->group][e]);
    }
    for (int i = 0; i < n; i++) {
        float *out = slot + (size_t)(q0 + i) * stride;
        uint16_t *p = a->p + (size_t)i * ATTN_AMX_P;
        out[dim] = -INFINITY;
        out[dim + 1] = 0.f;
        if (see->row_any[(q0 + i) / j->group])
            softmax(a->s + (size_t)i * ATTN_AMX_S, n_cols, p, &out[dim], &out[dim + 1]);
        else memset(p, 0, (size_t)n_cols * sizeof *p);
    }
    /* Whole groups straight to their slots; the rest by way of a->o, as tiles have 16 rows. */
    bool whole = n == G;
    float *o = whole ? slot + (size_t)q0 * stride : a->o;
    size_t o_stride = (whole ? stride : dim) * sizeof(float);
    for (int d = 0; d < a->dim; d += 32)
        product(nm, d + 16 < a->dim ? 2 : 1, n_cols / 32, a->p, ATTN_AMX_P * 2, a->v + d * 2,
                dim * 4, o + d, o_stride);
    for (int i = 0; i < n && !whole; i++)
        memcpy(slot + (size_t)(q0 + i) * stride, o + (size_t)i * dim, dim * sizeof(float));
}

/* Each row by itself, over values in which what it does not see is zero. */
static void rows_apart(const struct attn_job *j, const struct attn_tile *t,
                       const struct attn_sight *see, const struct amx *a, float *slot) {
    for (int r = 0; r < t->n_rows; r++) {
        for (int e = 0; e < see->e1 - see->e0; e++)
            if (see->all[e] != ~(uint64_t)0) pack_values(j, t, see, a, e, see->row[r][e]);
        int end = (r + 1) * j->group;
        for (int q = r * j->group; q < end; q += G)
            group(j, see, a, q, end - q < G ? end - q : G, slot);
    }
}

uint64_t attn_amx_leaf(const struct attn_job *j, const struct attn_tile *t, struct attn_sight *see,
                       void *scratch, float *slot) {
    struct amx a = carve(j->kv->head_dim, scratch);
    int hd = j->kv->head_dim, n_q = t->n_rows * j->group;
    uint64_t bytes = 0, token = kern_kv_token_bytes(j->kv->dtype, hd);
    bool apart = false;
    for (int e = 0; e < see->e1 - see->e0; e++) {
        pack_values(j, t, see, &a, e, ~(uint64_t)0);
        if (!see->any[e]) continue;
        const uint8_t *k = attn_page(j, t, see->e0 + e, false);
        uint16_t *to = a.k + (size_t)e * KERN_BLOCK * (size_t)a.kdim;
        if (j->kv->dtype == KERN_Q8_0) attn_amx_q8_k(k, hd, a.kdim, to);
        else pack(j->kv->dtype, k, hd, KERN_BLOCK, a.kdim, KERN_BLOCK, ~(uint64_t)0, to);
        if (see->all[e] != ~(uint64_t)0)
            apart |= any_not_finite(v_page(&a, e), KERN_BLOCK * (size_t)a.dim);
        bytes += (uint64_t)(KERN_BLOCK + attn_n_tokens(see->any[e])) * token;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(full_tiles) : "memory");
    if (apart) rows_apart(j, t, see, &a, slot);
    else
        for (int q = 0; q < n_q; q += G) group(j, see, &a, q, n_q - q < G ? n_q - q : G, slot);
    _tile_release();
    return bytes;
}
