/* Pages of 8-bit keys and values (attention_q8.h says the law), compiled once for each instruction
 * set. A page's products stay in integers: 16 tokens x 4 dims, or 16 dims x 2 tokens, an
 * instruction of AVX-512 VNNI, a register tile of QT queries x CV vectors; the page's bytes are
 * read once a tile. AVX2 without VNNI multiplies |k| by q with k's sign, which fits VPMADDUBSW's
 * sums of 16 bits. */
#include <math.h>

#include "kernels/cpu/attention_q8.h"

#include "kernels/cpu/simd.h"

enum {
    ST = VL == 16 ? 3 : 2, /* queries of a register tile of scores, two sums each */
    QT = VL == 16 ? 6 : 3, /* of values */
    CV = VL == 16 ? 4 : 2, /* vectors of scores */
    COLS = CV * VL,
    GV = Q8_GROUP / VL, /* vectors of a value group */
    LINE = 64,
    BASE = 254,        /* of a query's two digits */
    MOST = BASE * 127, /* of its elements */
};

/* ---- Vectors of VL 32-bit integers ----------------------------------------------------------- */

/* A column: a vector of K, prepared for products with several queries. */
#if defined(__AVX512F__)

typedef __m512i iv;
typedef struct {
    iv u;
} column;

ALWAYS_INLINE iv i_load(const void *p) {
    return _mm512_loadu_si512(p);
}
ALWAYS_INLINE iv i_set1(int32_t x) {
    return _mm512_set1_epi32(x);
}
ALWAYS_INLINE column i_column(iv k) {
    return (column){k};
}
/* By hand, as the compiler copies sums that it need not and has no registers left for them. */
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(k.u), "v"(q));
    return acc;
}
/* VL pairs of bytes as pairs of 16 bits. */
ALWAYS_INLINE iv i_load_pairs(const void *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
ALWAYS_INLINE iv i_dot2(iv acc, iv v, iv w) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(v), "v"(w));
    return acc;
}
ALWAYS_INLINE vf i_to_f(iv a) {
    return _mm512_cvtepi32_ps(a);
}
/* Byte `i` of each lane, signed. */
ALWAYS_INLINE iv i_byte(iv a, const int i) {
    return _mm512_srai_epi32(_mm512_slli_epi32(a, (unsigned)(24 - 8 * i)), 24);
}
ALWAYS_INLINE iv i_xor(iv a, iv b) {
    return _mm512_xor_si512(a, b);
}
ALWAYS_INLINE iv i_load_u16(const void *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
/* 254 high + low. */
ALWAYS_INLINE iv i_join(iv high, iv low) {
    high = _mm512_sub_epi32(_mm512_slli_epi32(high, 8), _mm512_slli_epi32(high, 1));
    return _mm512_add_epi32(high, low);
}
/* The larger of each lane as unsigned, a by its bits; the largest lane. */
ALWAYS_INLINE iv i_max_bits(vf a, iv b) {
    return _mm512_max_epu32(_mm512_castps_si512(a), b);
}
ALWAYS_INLINE uint32_t i_max_lane(iv a) {
    return _mm512_reduce_max_epu32(a);
}
/* VL whole numbers, round_half_even(a). */
ALWAYS_INLINE void v_store_i16(int16_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)));
}

#elif defined(__AVX2__)

typedef __m256i iv;
#if defined(__AVXVNNI__)
typedef struct {
    iv u;
} column;
#else
typedef struct {
    iv magnitude, k;
} column;
#endif

ALWAYS_INLINE iv i_load(const void *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}
ALWAYS_INLINE iv i_set1(int32_t x) {
    return _mm256_set1_epi32(x);
}
ALWAYS_INLINE iv i_xor(iv a, iv b) {
    return _mm256_xor_si256(a, b);
}
ALWAYS_INLINE iv i_load_pairs(const void *p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
#if defined(__AVXVNNI__)
ALWAYS_INLINE column i_column(iv k) {
    return (column){k};
}
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    return _mm256_dpbusd_avx_epi32(acc, k.u, q);
}
ALWAYS_INLINE iv i_dot2(iv acc, iv v, iv w) {
    return _mm256_dpwssd_avx_epi32(acc, v, w);
}
#else
ALWAYS_INLINE column i_column(iv k) {
    k = i_xor(k, _mm256_set1_epi8(-128));
    return (column){_mm256_abs_epi8(k), k};
}
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    iv twos = _mm256_maddubs_epi16(k.magnitude, _mm256_sign_epi8(q, k.k));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
ALWAYS_INLINE iv i_dot2(iv acc, iv v, iv w) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(v, w));
}
#endif
ALWAYS_INLINE vf i_to_f(iv a) {
    return _mm256_cvtepi32_ps(a);
}
ALWAYS_INLINE iv i_byte(iv a, const int i) {
    return _mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * i), 24);
}
ALWAYS_INLINE iv i_load_u16(const void *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
ALWAYS_INLINE iv i_join(iv high, iv low) {
    high = _mm256_sub_epi32(_mm256_slli_epi32(high, 8), _mm256_slli_epi32(high, 1));
    return _mm256_add_epi32(high, low);
}
ALWAYS_INLINE iv i_max_bits(vf a, iv b) {
    return _mm256_max_epu32(_mm256_castps_si256(a), b);
}
ALWAYS_INLINE uint32_t i_max_lane(iv a) {
    __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1)));
}
ALWAYS_INLINE void v_store_i16(int16_t *p, vf a) {
    iv n = _mm256_cvtps_epi32(a);
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1)));
}

#else

typedef vi iv;
typedef struct {
    iv byte[4]; /* signed */
} column;

ALWAYS_INLINE iv i_load(const void *p) {
    iv a;
    memcpy(&a, p, sizeof a);
    return a;
}
ALWAYS_INLINE iv i_set1(int32_t x) {
    return (iv){x, x, x, x};
}
ALWAYS_INLINE iv i_xor(iv a, iv b) {
    return a ^ b;
}
ALWAYS_INLINE iv i_byte(iv a, const int i) {
    return (iv)((vu)a << (24 - 8 * i)) >> 24;
}
ALWAYS_INLINE column i_column(iv k) {
    k ^= i_set1((int32_t)0x80808080);
    return (column){{i_byte(k, 0), i_byte(k, 1), i_byte(k, 2), i_byte(k, 3)}};
}
ALWAYS_INLINE iv i_dot4(iv acc, column k, iv q) {
    for (int i = 0; i < 4; i++) acc += k.byte[i] * i_byte(q, i);
    return acc;
}
ALWAYS_INLINE iv i_load_u16(const void *p) {
    uint16_t h[VL];
    memcpy(h, p, sizeof h);
    return (iv){h[0], h[1], h[2], h[3]};
}
ALWAYS_INLINE iv i_load_pairs(const void *p) {
    iv a = i_load_u16(p);
    return (i_byte(a, 0) & 0xffff) | i_byte(a, 1) << 16;
}
ALWAYS_INLINE iv i_low(iv a) {
    return (iv)((vu)a << 16) >> 16;
}
ALWAYS_INLINE iv i_dot2(iv acc, iv v, iv w) {
    return acc + i_low(v) * i_low(w) + (v >> 16) * (w >> 16);
}
ALWAYS_INLINE vf i_to_f(iv a) {
    return __builtin_convertvector(a, vf);
}
ALWAYS_INLINE iv i_join(iv high, iv low) {
    return high * 254 + low;
}
ALWAYS_INLINE iv i_max_bits(vf a, iv b) {
    iv on = (vu)a > (vu)b;
    return (on & (iv)a) | (~on & b);
}
ALWAYS_INLINE uint32_t i_max_lane(iv a) {
    uint32_t most = 0;
    for (int i = 0; i < VL; i++) most = (uint32_t)a[i] > most ? (uint32_t)a[i] : most;
    return most;
}
/* 1.5 * 2^23 leaves the whole number in the low bits. */
ALWAYS_INLINE void v_store_i16(int16_t *p, vf a) {
    vu bits = (vu)(a + v_set1(0x1.8p23f));
    for (int i = 0; i < VL; i++) p[i] = (int16_t)(uint16_t)bits[i];
}

#endif

/* What a dot of u8 columns with q starts from: columns are 128 too large where they are not
 * prepared. */
#if defined(__AVX512F__) || defined(__AVXVNNI__)
enum { K_EXCESS = 128 };
#else
enum { K_EXCESS = 0 };
#endif

/* ---- Quantising ------------------------------------------------------------------------------ */

/* Largest magnitude of 32; NaN where one of them is not a number. */
static float magnitude(const float *x) {
    vf top[VN];
    bool nan = false;
    for (int v = 0; v < VN; v++) top[v] = v_set1(0.f);
    for (int i = 0; i < Q8_GROUP; i += 16)
        for (int v = 0; v < VN; v++) {
            vf a = v_load(x + i + v * VL);
            nan |= v_any_nan(a);
            top[v] = v_max(v_max(a, v_sub(v_set1(0.f), a)), top[v]);
        }
    return nan ? NAN : v_max16(top);
}

/* out[i] = round_half_even(x[i] * inverse) of 32: 1.5 * 2^23 leaves the whole number in the low
 * bits. */
static void round32(const float *x, float inverse, int8_t *out) {
    uint32_t bits[Q8_GROUP];
    for (int i = 0; i < Q8_GROUP; i += VL) {
        vf a = v_add(v_mul(v_load(x + i), v_set1(inverse)), v_set1(0x1.8p23f));
        memcpy(bits + i, &a, sizeof a);
    }
    for (int i = 0; i < Q8_GROUP; i++) out[i] = (int8_t)(uint8_t)bits[i];
}

/* n <= 32 elements to a group; the f16 scale is returned. */
static uint16_t quantize(const float *x, int n, int8_t *out) {
    float pad[Q8_GROUP] = {0};
    memcpy(pad, x, (size_t)n * sizeof *x);
    float s = magnitude(pad) / 127.f;
    if (!(s <= 65504.f)) {
        memset(out, 0, Q8_GROUP);
        return 0x7e00;
    }
    uint16_t h = f32_to_f16(s);
    if (f16_to_f32(h) < s) h++;
    round32(pad, h ? 1.f / f16_to_f32(h) : 0.f, out);
    return h;
}

/* Other threads may write the other tokens of the same V pairs meanwhile: bytes alone are stored.
 */
static void write_token(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                        const float *v) {
    uint8_t *kp = page + kv->k_offset + (size_t)head * kv->head_stride;
    uint8_t *vp = page + kv->v_offset + (size_t)head * kv->head_stride;
    int hd = kv->head_dim, width = (int)q8_width(hd);
    size_t scales = KERN_BLOCK * (size_t)width;
    for (int g = 0; g < q8_n_groups(hd); g++) {
        int d = g * Q8_GROUP, n = hd - d < Q8_GROUP ? hd - d : Q8_GROUP;
        int end = width - d < Q8_GROUP ? width - d : Q8_GROUP;
        size_t at = scales + (size_t)(g * KERN_BLOCK + t) * 2;
        int8_t q[Q8_GROUP];
        uint16_t h = quantize(k + d, n, q);
        memcpy(kp + at, &h, 2);
        for (int i = 0; i < end; i += 4) {
            uint32_t four;
            memcpy(&four, q + i, 4);
            four ^= 0x80808080;
            memcpy(kp + q8_k_at(t, d + i), &four, 4);
        }
        h = quantize(v + d, n, q);
        memcpy(vp + at, &h, 2);
        uint8_t *to = vp + q8_v_at(hd, t, d);
        for (int i = 0; i < end; i++) to[2 * i] = (uint8_t)q[i];
    }
}

/* 32 elements times `inverse` to two digits of base 254. */
static void split32(const float *x, float inverse, int8_t *high, int8_t *low) {
    const vf magic = v_set1(0x1.8p23f);
    uint32_t bits[2][Q8_GROUP];
    for (int i = 0; i < Q8_GROUP; i += VL) {
        vf n = v_sub(v_add(v_mul(v_load(x + i), v_set1(inverse)), magic), magic);
        vf h = v_add(v_mul(n, v_set1(1.f / BASE)), magic);
        vf l = v_add(v_sub(n, v_mul(v_sub(h, magic), v_set1(BASE))), magic);
        memcpy(bits[0] + i, &h, sizeof h);
        memcpy(bits[1] + i, &l, sizeof l);
    }
    for (int i = 0; i < Q8_GROUP; i++) {
        high[i] = (int8_t)(uint8_t)bits[0][i];
        low[i] = (int8_t)(uint8_t)bits[1][i];
    }
}

static void queries(const float *q, int n_q, int hd, const struct q8_queries *out) {
    int groups = q8_n_groups(hd);
    for (int i = 0; i < n_q; i++)
        for (int g = 0; g < groups; g++) {
            int d = g * Q8_GROUP, n = hd - d < Q8_GROUP ? hd - d : Q8_GROUP;
            size_t at = (size_t)(i * groups + g);
            int8_t *to = out->q + at * 2 * Q8_GROUP;
            float pad[Q8_GROUP] = {0};
            memcpy(pad, q + (size_t)i * (size_t)hd + d, (size_t)n * sizeof *q);
            float top = magnitude(pad), inverse = MOST / top;
            /* Of a top below 2^-100 the inverse may be none; such a query tells tokens not apart.
             */
            if (top < 0x1p-100f) top = inverse = 0.f;
            if (!(top <= 0x1p100f)) top = NAN, inverse = 0.f;
            split32(pad, inverse, to, to + Q8_GROUP);
            int32_t high = 0, low = 0;
            for (int x = 0; x < Q8_GROUP; x++) high += to[x], low += to[Q8_GROUP + x];
            out->scale[at] = top / MOST;
            out->start[2 * at] = -K_EXCESS * high;
            out->start[2 * at + 1] = -K_EXCESS * low;
        }
}

/* ---- Reading ahead ----------------------------------------------------------------------------
 */

/* A plane on its way to the second-level cache, some lines at each of a number of steps. */
struct ahead {
    const uint8_t *at, *end;
    int lines; /* a step */
};

static struct ahead read_ahead(const uint8_t *plane, int hd, int steps) {
    size_t bytes = plane ? KERN_BLOCK * kern_kv_token_bytes(KERN_Q8_0, hd) : 0;
    int lines = (int)(bytes / LINE);
    return (struct ahead){plane, plane + bytes, (lines + steps - 1) / steps};
}

ALWAYS_INLINE void read_more(struct ahead *a) {
    for (int i = 0; i < a->lines && a->at < a->end; i++, a->at += LINE)
        __builtin_prefetch(a->at, 0, 2);
}

/* ---- Scores ---------------------------------------------------------------------------------- */

struct score_job {
    const struct q8_queries *q;
    int hd;
    const uint8_t *plane;
    unsigned quarters;
    float *score;
};

/* Queries [i0, i0 + nq), cv vectors of columns from c on. */
ALWAYS_INLINE void score_columns(const int nq, const int cv, const struct score_job *j, int i0,
                                 int c, struct ahead *ahead) {
    const int groups = q8_n_groups(j->hd), fours = (int)q8_width(j->hd) / 4;
    const uint16_t *scales = q8_scales(j->plane, j->hd);
    for (int g = 0; g < groups; g++) {
        const int n = fours - 8 * g < 8 ? fours - 8 * g : 8;
        const size_t at = (size_t)(i0 * groups + g);
        const uint8_t *row = j->plane + ((size_t)(8 * g) * KERN_BLOCK + (size_t)c) * 4;
        const int8_t *q = j->q->q + at * 2 * Q8_GROUP;
        iv acc[2 * ST][CV]; /* high, low */
#pragma GCC unroll 8
        for (int i = 0; i < 2 * nq; i++)
#pragma GCC unroll 4
            for (int v = 0; v < cv; v++)
                acc[i][v] = i_set1(j->q->start[2 * (at + (size_t)(i / 2 * groups)) + i % 2]);
        for (int f = 0; f < n; f++, row += KERN_BLOCK * 4, q += 4) {
            read_more(ahead);
            iv x[2 * ST];
#pragma GCC unroll 8
            for (int i = 0; i < 2 * nq; i++) {
                int32_t four;
                memcpy(&four, q + (size_t)(2 * (i / 2) * groups + i % 2) * Q8_GROUP, 4);
                x[i] = i_set1(four);
            }
#pragma GCC unroll 4
            for (int v = 0; v < cv; v++) {
                column k = i_column(i_load(row + (size_t)(v * VL) * 4));
#pragma GCC unroll 8
                for (int i = 0; i < 2 * nq; i++) acc[i][v] = i_dot4(acc[i][v], k, x[i]);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < cv; v++) {
            vf s = v_load_f16(scales + g * KERN_BLOCK + c + v * VL);
#pragma GCC unroll 8
            for (int i = 0; i < nq; i++) {
                float *to = j->score + (size_t)(i0 + i) * KERN_LEAF + c + v * VL;
                vf both = v_mul(s, v_set1(j->q->scale[at + (size_t)(i * groups)]));
                vf before = g ? v_load(to) : v_set1(0.f);
                vf dot = i_to_f(i_join(acc[2 * i][v], acc[2 * i + 1][v]));
                v_store(to, v_fma(dot, both, before));
            }
        }
    }
}

ALWAYS_INLINE void score_tile(const int nq, const struct score_job *j, int i0,
                              const uint8_t *next) {
    struct ahead ahead = read_ahead(next, j->hd, (int)q8_width(j->hd) / 4 * (KERN_BLOCK / COLS));
    for (int c = 0; c < KERN_BLOCK && j->quarters == 15; c += COLS)
        score_columns(nq, CV, j, i0, c, &ahead);
    const int cv = KERN_QUARTER / VL < CV ? KERN_QUARTER / VL : CV;
    for (int c = 0; c < KERN_BLOCK && j->quarters != 15; c += cv * VL)
        if (j->quarters >> (c / KERN_QUARTER) & 1) score_columns(nq, cv, j, i0, c, &ahead);
}

static void score(const struct q8_queries *q, int n_q, int hd, const uint8_t *plane,
                  unsigned quarters, float *score, const uint8_t *next) {
    const struct score_job j = {
        .q = q, .hd = hd, .plane = plane, .quarters = quarters, .score = score};
    for (int i = 0; i < n_q; i += ST, next = NULL) switch (n_q - i < ST ? n_q - i : ST) {
        case 1:
            score_tile(1, &j, i, next);
            break;
#if defined(__AVX512F__)
        case 2:
            score_tile(2, &j, i, next);
            break;
#endif
        default:
            score_tile(ST, &j, i, next);
        }
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* Weights of a tile's queries by group, as 16-bit integers, and their steps. */
struct weights {
    int16_t n[Q8_MAX_GROUPS][QT][KERN_BLOCK];
    float step[Q8_MAX_GROUPS][QT];
};

/* Of one query and group. Weights are not negative, so that their bits order like them, and a NaN's
 * are above all. A page whose largest is below 1e-30 adds nothing: weights of other pages are near
 * 1. */
ALWAYS_INLINE float weigh(const float *p, const uint16_t *s, uint64_t seen, int16_t *n) {
    vf w[KERN_BLOCK / VL];
    iv top = i_set1(0);
#pragma GCC unroll 16
    for (int i = 0; i < KERN_BLOCK / VL; i++) {
        uint32_t on = (uint32_t)(seen >> (i * VL)) & (uint32_t)((1u << VL) - 1u);
        w[i] = v_select(on, v_mul(v_load(p + i * VL), v_load_f16(s + i * VL)), v_set1(0.f));
        top = i_max_bits(w[i], top);
    }
    float most = half_bits_to_f32(i_max_lane(top));
    float inverse = most >= 1e-30f ? 32767.f / most : 0.f;
#pragma GCC unroll 16
    for (int i = 0; i < KERN_BLOCK / VL; i++) v_store_i16(n + i * VL, v_mul(w[i], v_set1(inverse)));
    return most * (1.f / 32767.f);
}

/* Queries [i0, i0 + nq), nv vectors of output from group g's first on. Tokens go by 8, where some
 * row sees one of them; the weights of those that none sees are 0. */
ALWAYS_INLINE void value_tile(const int nq, const int nv, const struct q8_values *j, int i0, int g,
                              const struct weights *w, struct ahead *ahead) {
    const size_t row_bytes = q8_width(j->head_dim) * Q8_PAIR;
    const uint8_t *row = j->plane + (size_t)(g * Q8_GROUP) * Q8_PAIR;
    const int16_t *n = w->n[g][0];
    iv acc[QT][2 * GV];
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) acc[i][v] = i_set1(0);
    for (uint64_t left = j->any; left; left >>= 8) {
        if (!(left & 0xff)) {
            row += 4 * row_bytes;
            n += 4 * Q8_PAIR;
            continue;
        }
        read_more(ahead);
#pragma GCC unroll 4
        for (int y = 0; y < 4; y++, row += row_bytes, n += Q8_PAIR) {
            iv weight[QT];
#pragma GCC unroll 8
            for (int v = 0; v < nv; v++) {
                const int in = v / GV; /* its group, 0 or 1 */
                iv val = i_load_pairs(row + (size_t)(v * VL) * Q8_PAIR);
#pragma GCC unroll 8
                for (int i = 0; i < nq; i++) {
                    if (v % GV == 0) {
                        int32_t two;
                        memcpy(&two, n + (in * QT + i) * KERN_BLOCK, 4);
                        weight[i] = i_set1(two);
                    }
                    acc[i][v] = i_dot2(acc[i][v], val, weight[i]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) {
            float *o = j->o + (size_t)(i0 + i) * j->o_stride + g * Q8_GROUP + v * VL;
            float step = w->step[g + v / GV][i];
            v_store(o, v_fma(i_to_f(acc[i][v]), v_set1(step), v_load(o)));
        }
}

ALWAYS_INLINE void value_groups(const int nq, const struct q8_values *j, int i0,
                                const uint8_t *next) {
    const uint16_t *scales = q8_scales(j->plane, j->head_dim);
    const int groups = q8_n_groups(j->head_dim), vectors = j->dim / VL;
    int eights = 0;
    for (uint64_t left = j->any; left; left >>= 8) eights += (left & 0xff) != 0;
    /* Few queries take two groups at once, or each sum would wait for the one before it. */
    const int wide = VL == 16 && nq <= 3 ? 2 : 1;
    struct ahead ahead = read_ahead(next, j->head_dim, eights * ((groups + wide - 1) / wide));
    _Alignas(64) struct weights w;
    for (int g = 0; g < groups; g++)
#pragma GCC unroll 8
        for (int i = 0; i < nq; i++)
            w.step[g][i] = weigh(j->p + (size_t)(i0 + i) * KERN_LEAF, scales + g * KERN_BLOCK,
                                 j->seen[(size_t)((i0 + i) / j->group) * ATTN_ENTRIES], w.n[g][i]);
    int g = 0;
    for (; wide == 2 && (g + 2) * GV <= vectors; g += 2)
        value_tile(nq, 2 * GV, j, i0, g, &w, &ahead);
    for (; (g + 1) * GV <= vectors; g++) value_tile(nq, GV, j, i0, g, &w, &ahead);
    if (g * GV < vectors) /* head_dim is a multiple of 16 and no more */
        value_tile(nq, GV / 2, j, i0, g, &w, &ahead);
}

static void value(const struct q8_values *j, const uint8_t *next) {
    for (int i = 0; i < j->n_q; i += QT, next = NULL) switch (j->n_q - i < QT ? j->n_q - i : QT) {
        case 1:
            value_groups(1, j, i, next);
            break;
        case 2:
            value_groups(2, j, i, next);
            break;
#if defined(__AVX512F__)
        case 3:
            value_groups(3, j, i, next);
            break;
        case 4:
            value_groups(4, j, i, next);
            break;
        case 5:
            value_groups(5, j, i, next);
            break;
#endif
        default:
            value_groups(QT, j, i, next);
        }
}

/* ---- Widening -------------------------------------------------------------------------------- */

static void widen_k(const uint8_t *plane, int hd, float *out) {
    const uint16_t *scales = q8_scales(plane, hd);
    for (int f = 0; f < (int)q8_width(hd) / 4; f++) {
        const uint8_t *row = plane + (size_t)f * KERN_BLOCK * 4;
        const uint16_t *s = scales + f / 8 * KERN_BLOCK;
        float *to = out + (size_t)f * 4 * KERN_BLOCK;
        int n = hd - 4 * f < 4 ? hd - 4 * f : 4;
        for (int c = 0; c < KERN_BLOCK; c += VL) {
            iv four = i_xor(i_load(row + (size_t)c * 4), i_set1((int32_t)0x80808080));
            vf scale = v_load_f16(s + c);
            iv one[4] = {i_byte(four, 0), i_byte(four, 1), i_byte(four, 2), i_byte(four, 3)};
            for (int i = 0; i < n; i++)
                v_store(to + i * KERN_BLOCK + c, v_mul(i_to_f(one[i]), scale));
        }
    }
}

static void widen_v(const uint8_t *plane, int hd, int n_tokens, int stride, float *out) {
    const uint16_t *scales = q8_scales(plane, hd);
    const size_t row_bytes = q8_width(hd) * Q8_PAIR;
    for (int t = 0; t < n_tokens; t += Q8_PAIR)
        for (int d = 0; d < stride; d += VL) {
            const uint16_t *s = scales + d / Q8_GROUP * KERN_BLOCK + t;
            iv two = i_load_u16(plane + (size_t)(t / Q8_PAIR) * row_bytes + (size_t)d * Q8_PAIR);
            float *to = out + (size_t)t * (size_t)stride + d;
            v_store(to, v_mul(i_to_f(i_byte(two, 0)), v_set1(f16_to_f32(s[0]))));
            v_store(to + stride, v_mul(i_to_f(i_byte(two, 1)), v_set1(f16_to_f32(s[1]))));
        }
}

const struct cpu_q8_isa CPU_NAME(cpu_q8) = {.write = write_token,
                                            .widen_k = widen_k,
                                            .widen_v = widen_v,
                                            .queries = queries,
                                            .score = score,
                                            .value = value};
