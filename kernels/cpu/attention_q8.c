/* Pages of 8-bit keys and values (attention_q8.h says the law), compiled once for each instruction
 * set. A page's products stay in integers: 16 tokens x 4 dims, or 16 dims x 4 tokens, an
 * instruction of AVX-512 VNNI, for each of the two digits of a query's element or of a weight; the
 * page's bytes are read once a register tile. AVX2 without VNNI multiplies |k| by q with k's sign,
 * which fits VPMADDUBSW's sums of 16 bits, and values by 16 bits.
 *
 * On a Xeon of 2023, 3 queries, pages in the second-level cache: 740 tsc cycles a page and all that
 * stands around it (890 at first), of which VPDPBUSD at its full rate 2 x 196 and the softmax 93.
 * What binds are ports 0 and 5, hence few instructions an element. Tried and dropped: both products
 * on AMX int8 tiles (1 row 1.36 of the time, 3 rows 1.10, 5 rows .98: tiles wait for a page from
 * the second-level cache, the epilogues stay); reading ahead every second or fourth line
 * (1.24, 1.36), to the first level (1.11), nothing at all (1.8), or 1 and 4 planes ahead instead of
 * 2 (1.01, 1.02); a weight's high digits of all tokens before the low ones (1 row 1.01, 5 rows
 * .96); items of three heads in turn (.985 from memory alone, and each would load its queries
 * anew). */
#include <math.h>

#include "kernels/cpu/attention_q8_vectors.h"

enum {
    ST = VL == 16 ? 3 : 2, /* queries of a register tile of scores, two sums each */
    QT = VL == 16 ? 6 : 3, /* of values */
    FOURS = (QT + 3) / 4 * 4,
    CV = VL == 16 ? 4 : 2, /* vectors of scores */
    COLS = CV * VL,
    GV = Q8_GROUP / VL, /* vectors of a value group */
    LINE = 64,
    MOST = Q8_BASE * 127, /* of its elements */
    MOST_WEIGHT = 32767,
};

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

/* Other threads may write the other tokens of the same V lanes meanwhile: bytes alone are stored.
 */
static void write_token(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                        const float *v) {
    uint8_t *kp = page + kv->k_offset + (size_t)head * kv->head_stride;
    uint8_t *vp = page + kv->v_offset + (size_t)head * kv->head_stride;
    int hd = kv->head_dim, width = (int)q8_width(hd);
    size_t scales = KERN_BLOCK * (size_t)width;
    float turned[KERN_MAX_HEAD_DIM];
    memcpy(turned, k, (size_t)hd * sizeof *k);
    q8_turn_key(turned, hd);
    for (int g = 0; g < q8_n_groups(hd); g++) {
        int d = g * Q8_GROUP, n = hd - d < Q8_GROUP ? hd - d : Q8_GROUP;
        int end = width - d < Q8_GROUP ? width - d : Q8_GROUP;
        size_t at = scales + (size_t)(g * KERN_BLOCK + t) * 2;
        int8_t q[Q8_GROUP];
        uint16_t h = quantize(turned + d, n, q);
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
        for (int i = 0; i < end; i++) to[Q8_QUAD * i] = (uint8_t)q[i];
    }
}

/* 32 elements times `inverse` to two digits of base 254. */
static void split32(const float *x, float inverse, int8_t *high, int8_t *low) {
    const vf magic = v_set1(0x1.8p23f);
    uint32_t bits[2][Q8_GROUP];
    for (int i = 0; i < Q8_GROUP; i += VL) {
        vf n = v_sub(v_add(v_mul(v_load(x + i), v_set1(inverse)), magic), magic);
        vf h = v_add(v_mul(n, v_set1(1.f / Q8_BASE)), magic);
        vf l = v_add(v_sub(n, v_mul(v_sub(h, magic), v_set1(Q8_BASE))), magic);
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
    for (int i = 0; i < n_q; i++) {
        float pad[Q8_MAX_GROUPS * Q8_GROUP], top = 0;
        memcpy(pad, q + (size_t)i * (size_t)hd, (size_t)hd * sizeof *q);
        memset(pad + hd, 0, (size_t)(groups * Q8_GROUP - hd) * sizeof *q);
        for (int g = 0; g < groups; g++) {
            float of_group = magnitude(pad + g * Q8_GROUP);
            if (!(of_group <= top)) top = of_group;
            if (isnan(of_group)) break;
        }
        float inverse = MOST / top;
        /* Of a top below 2^-100 the inverse may be none; such a query tells tokens not apart. */
        if (top < 0x1p-100f) top = 0x1p-100f, inverse = 0.f;
        if (!(top <= 0x1p100f)) top = NAN, inverse = 0.f;
        out->scale[i] = top / MOST;
        for (int g = 0; g < groups; g++) {
            size_t at = (size_t)(i * groups + g);
            int8_t *to = out->q + at * 2 * Q8_GROUP;
            split32(pad + g * Q8_GROUP, inverse, to, to + Q8_GROUP);
            int32_t high = 0, low = 0;
            for (int x = 0; x < Q8_GROUP; x++) high += to[x], low += to[Q8_GROUP + x];
            out->start[2 * at] = -K_EXCESS * high;
            out->start[2 * at + 1] = -K_EXCESS * low;
        }
    }
}

/* ---- Reading ahead --------------------------------------------------------------------------- */

/* A plane on its way to the second-level cache, some lines at each of a number of steps. */
struct ahead {
    const uint8_t *at, *end;
    int lines; /* a step */
};

ALWAYS_INLINE struct ahead read_ahead(const uint8_t *plane, int hd, int steps) {
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
                vf dot = i_join(acc[2 * i][v], acc[2 * i + 1][v]);
                v_store(to, g ? v_fma(dot, s, v_load(to)) : v_mul(dot, s));
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

/* Weights of a tile's queries by group, as store_weights leaves them, and their steps. */
struct weights {
    uint8_t n[Q8_MAX_GROUPS][QT][2 * KERN_BLOCK];
    float step[Q8_MAX_GROUPS][FOURS];
};

/* Of queries [i0, i0 + nq) and group g; whole: they see every token. Weights are not negative, so
 * that their bits order like them, and a NaN's are above all. A page whose largest is below 1e-30
 * adds nothing: weights of other pages are near 1. */
ALWAYS_INLINE void weigh(const int nq, const bool whole, const struct q8_values *j, int i0, int g,
                         struct weights *out) {
    const uint16_t *scales = q8_scales(j->plane, j->head_dim) + g * KERN_BLOCK;
    vf w[QT][BLOCK_V];
    iv top[FOURS];
#pragma GCC unroll 8
    for (int i = nq; i < FOURS; i++) top[i] = i_set1(0);
#pragma GCC unroll 16
    for (int v = 0; v < BLOCK_V; v++) {
        vf s = v_load_f16(scales + v * VL);
#pragma GCC unroll 8
        for (int i = 0; i < nq; i++) {
            w[i][v] = v_mul(v_load(j->p + (size_t)(i0 + i) * KERN_LEAF + v * VL), s);
            if (!whole) {
                uint64_t seen = j->seen[(size_t)((i0 + i) / j->group) * ATTN_ENTRIES];
                uint32_t on = (uint32_t)(seen >> (v * VL)) & (uint32_t)((1u << VL) - 1u);
                w[i][v] = v_select(on, w[i][v], v_set1(0.f));
            }
            if (v == 0) memcpy(&top[i], &w[i][0], sizeof top[i]);
            else top[i] = i_max_bits(w[i][v], top[i]);
        }
    }
    float inverse[FOURS];
#pragma GCC unroll 2
    for (int i = 0; i < nq; i += 4) {
        float4 most = i_max_lanes(top + i), step = most * (1.f / MOST_WEIGHT);
        float4 by = (float)MOST_WEIGHT / most;
        by = (float4)((most >= 1e-30f) & (__typeof__(most >= most))by);
        memcpy(inverse + i, &by, sizeof by);
        memcpy(out->step[g] + i, &step, sizeof step);
    }
    /* To be spread from memory: in registers that would take shuffles. */
    __asm__("" : "+m"(inverse));
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++) store_weights(w[i], v_set1(inverse[i]), out->n[g][i]);
}

/* Queries [i0, i0 + nq), nv vectors of output from `first` on. Tokens go by 8, where some row sees
 * one of them; the weights of those that none sees are 0. */
ALWAYS_INLINE void value_tile(const int nq, const int nv, const struct q8_values *j, int i0,
                              int first, const struct weights *w, struct ahead *ahead) {
    const size_t row_bytes = q8_width(j->head_dim) * Q8_QUAD;
    const uint8_t *row = j->plane + (size_t)(first * VL) * Q8_QUAD;
    const int g = first / GV;
    iv acc[QT][2 * GV][SUMS];
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++)
#pragma GCC unroll 2
            for (int x = 0; x < SUMS; x++) acc[i][v][x] = i_set1(0);
    int quad = 0;
    for (uint64_t left = j->any; left; left >>= 8, quad += 2) {
        if (!(left & 0xff)) {
            row += 2 * row_bytes;
            continue;
        }
        read_more(ahead);
#pragma GCC unroll 2
        for (int y = 0; y < 2; y++, row += row_bytes) {
            const uint8_t *n = w->n[g][0] + weights_at(quad + y);
            iv weight[QT][2];
#pragma GCC unroll 8
            for (int v = 0; v < nv; v++) {
                values val = i_values(i_load(row + (size_t)(v * VL) * Q8_QUAD));
#pragma GCC unroll 8
                for (int i = 0; i < nq; i++) {
                    if (v % GV == 0) { /* another group */
                        int32_t half[2];
                        const uint8_t *at = n + (v / GV * QT + i) * 2 * KERN_BLOCK;
                        memcpy(&half[0], at, 4);
                        memcpy(&half[1], at + KERN_BLOCK, 4);
                        weight[i][0] = i_set1(half[0]);
                        weight[i][1] = i_set1(half[1]);
                    }
                    i_weigh(acc[i][v], val, weight[i][0], weight[i][1]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < nq; i++)
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) {
            float *o = j->o + (size_t)(i0 + i) * j->o_stride + (first + v) * VL;
            float step = w->step[g + v / GV][i];
            v_store(o, v_fma(i_to_f(i_total(acc[i][v])), v_set1(step), v_load(o)));
        }
}

ALWAYS_INLINE void value_queries(const int nq, const struct q8_values *j, int i0,
                                 const uint8_t *next) {
    const int groups = q8_n_groups(j->head_dim), vectors = j->dim / VL;
    /* Vectors at a time: as many as there are registers for, or each sum would wait for the one
     * before it. */
    const int wide = VL == 16 ? nq <= 3 ? 4 : 2 : SUMS * nq <= 3 ? 4 : 2;
    int eights = 0;
    for (uint64_t left = j->any; left; left >>= 8) eights += (left & 0xff) != 0;
    struct ahead ahead = read_ahead(next, j->head_dim, eights * ((vectors + wide - 1) / wide));
    _Alignas(64) struct weights w;
    for (int g = 0; g < groups; g++)
        if (j->whole) weigh(nq, true, j, i0, g, &w);
        else weigh(nq, false, j, i0, g, &w);
    int v = 0;
    for (; v + wide <= vectors; v += wide) value_tile(nq, wide, j, i0, v, &w, &ahead);
    for (; v + 2 <= vectors; v += 2) value_tile(nq, 2, j, i0, v, &w, &ahead);
    if (v < vectors) value_tile(nq, 1, j, i0, v, &w, &ahead);
}

static void value(const struct q8_values *j, const uint8_t *next) {
#define VALUES(n) value_queries(n, j, i, next)
    for (int i = 0; i < j->n_q; i += QT, next = NULL) switch (j->n_q - i < QT ? j->n_q - i : QT) {
            TILE_CASES(VALUES);
        }
#undef VALUES
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
    for (int t = 0; t < n_tokens; t += Q8_QUAD)
        for (int d = 0; d < stride; d += VL) {
            const uint16_t *s = scales + d / Q8_GROUP * KERN_BLOCK + t;
            iv v = i_load(plane + q8_v_at(hd, t, d));
            iv one[4] = {i_byte(v, 0), i_byte(v, 1), i_byte(v, 2), i_byte(v, 3)};
            for (int i = 0; i < Q8_QUAD; i++)
                v_store(out + (size_t)(t + i) * (size_t)stride + d,
                        v_mul(i_to_f(one[i]), v_set1(f16_to_f32(s[i]))));
        }
}

const struct cpu_q8_isa CPU_NAME(cpu_q8) = {.write = write_token,
                                            .widen_k = widen_k,
                                            .widen_v = widen_v,
                                            .queries = queries,
                                            .score = score,
                                            .value = value};
