#ifndef TANDEM_KERNELS_CPU_ATTENTION_Q8_H
#define TANDEM_KERNELS_CPU_ATTENTION_Q8_H

/* Private: pages of 8-bit keys and values (KERN_Q8_0).
 *
 * THE LAW. A token's K (or V) of a head is cut into groups of 32 along head_dim; the last one may
 * be shorter (head_dim 80: 32, 32, 16). With top the group's largest magnitude, its scale s is the
 * least f16 that is not below top / 127, so that nothing is clipped; an element is
 * round_half_even(x * (1 / s)), in -127..127, and reads as that times s, exact in f32. A group that
 * holds something not finite, or more than f16 can scale, has NaN for s and reads as NaN.
 *
 * K IS TURNED before it is rounded: of every whole group of 32 dims, H times it, over 8 (H the
 * Hadamard matrix, Sylvester's order, in f32 by its five stages of sums and differences); a query
 * is H times it, over 4. That leaves products as they are and spreads the few large dims that keys
 * have: of the default target's keys a third of the rounding's energy is left (2.5e-5 of theirs
 * instead of 6.6e-5). Values have none such (2.8e-5 instead of 3.3e-5) and stay as they are.
 *
 * A *plane* is one head's K or V of a block, 64 * kern_kv_token_bytes: `width` is head_dim rounded
 * up to 4, elements beyond head_dim are zero.
 *   K: u8 [width / 4][64][4], the element + 128: four dims of a token are what one lane of VPDPBUSD
 *      takes. f16 s[n_groups][64] behind them.
 *   V: i8 [16][width][4]: four tokens of a dim are a lane. f16 s[n_groups][64] behind them.
 *
 * GENERATED ROWS. The query (scaled, turned) is rounded to 16 bits: with top its largest magnitude,
 * d = top / 32258, n = round_half_even(q * (32258 / top)) = 254 high + low, both in -127..127. (So
 * nothing is lost but what K lost.) Of a top below 2^-100 all n are 0; of one that is NaN or above
 * 2^100 d is NaN. A score in units of d is, over groups in order, from 0, fma((f32) dot, s, score)
 * where dot = 254 (high . K) + low . K, in integers, is exact. Values go page by page: with w[t] =
 * p[t] * s[t] of a group and top the page's largest of those that the row sees (below 1e-30: the
 * page adds nothing), step = top * (1 / 32767), n[t] = round_half_even(w[t] * (32767 / top)), 0
 * where the row does not see t, o[d] = fma((f32) (sum over t of n[t] V[t][d]), step, o[d]) with the
 * sum in integers again. So a value's weight is off by at most 2^-16 of the page's largest, far
 * less than 8 bits of V are. A weight that is NaN makes o NaN.
 *
 * PROMPT ROWS read the page widened (exact): f32, or bf16 for AMX. */

#include <string.h>

#include "base/half.h"
#include "kernels/cpu/attention.h"

enum {
    Q8_GROUP = 32,
    Q8_MAX_GROUPS = KERN_MAX_HEAD_DIM / Q8_GROUP,
    Q8_QUAD = 4, /* tokens whose V lie side by side */
};

static inline size_t q8_width(int head_dim) {
    return align_up((size_t)head_dim, 4);
}
static inline int q8_n_groups(int head_dim) {
    return (head_dim + Q8_GROUP - 1) / Q8_GROUP;
}
/* In place: every whole group of x[head_dim] turned, times `by`. Stages 1 and 2 are within four
 * elements, the others between fours. */
static inline void q8_turn(float *x, int head_dim, float by) {
    typedef float four __attribute__((vector_size(16)));
    const four one = {1, -1, 1, -1}, two = {1, 1, -1, -1};
    enum { N = Q8_GROUP / 4 };
    for (int g = 0; g + Q8_GROUP <= head_dim; g += Q8_GROUP, x += Q8_GROUP) {
        four v[N];
        memcpy(v, x, sizeof v);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            four a = v[i];
            a = (four){a[1], a[0], a[3], a[2]} + a * one;
            v[i] = (four){a[2], a[3], a[0], a[1]} + a * two;
        }
#pragma GCC unroll 3
        for (int step = 1; step < N; step *= 2)
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
                if (i & step) continue;
                four a = v[i], b = v[i + step];
                v[i] = a + b;
                v[i + step] = a - b;
            }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) v[i] *= by;
        memcpy(x, v, sizeof v);
    }
}
static inline void q8_turn_key(float *k, int head_dim) {
    q8_turn(k, head_dim, 1.f / 8);
}
static inline void q8_turn_query(float *q, int head_dim) {
    q8_turn(q, head_dim, 1.f / 4);
}
/* Places in a plane. */
static inline size_t q8_k_at(int token, int d) {
    return ((size_t)(d / 4) * KERN_BLOCK + (size_t)token) * 4 + (size_t)(d % 4);
}
static inline size_t q8_v_at(int head_dim, int token, int d) {
    return ((size_t)(token / 4) * q8_width(head_dim) + (size_t)d) * 4 + (size_t)(token % 4);
}
static inline const uint16_t *q8_scales(const uint8_t *plane, int head_dim) {
    return (const uint16_t *)(const void *)(plane + KERN_BLOCK * q8_width(head_dim));
}

/* One element as it reads. */
static inline float q8_element(const uint8_t *plane, int head_dim, bool value, int token, int d) {
    int n = value ? (int8_t)plane[q8_v_at(head_dim, token, d)] : plane[q8_k_at(token, d)] - 128;
    return (float)n * f16_to_f32(q8_scales(plane, head_dim)[(d / Q8_GROUP) * KERN_BLOCK + token]);
}

/* Queries of a tile of generated rows, in a thread's scratch. */
struct q8_queries {
    int8_t *q;      /* by query and group, 32 high bytes, 32 low ones, zero beyond head_dim */
    float *scale;   /* by query, d > 0 */
    int32_t *start; /* by query and group, what the two dots start from (the table's own) */
};
/* At most KERN_MAX_GROUP of them, see ATTN_GEN_Q; ATTN_Q8_BYTES * 32 * groups bytes. */
static inline struct q8_queries q8_carve(int head_dim, void *scratch) {
    size_t n = KERN_MAX_GROUP * (size_t)q8_n_groups(head_dim);
    float *scale = (float *)(void *)((int8_t *)scratch + n * 2 * Q8_GROUP);
    return (struct q8_queries){scratch, scale, (int32_t *)(void *)(scale + n)};
}

/* A page of V and the weights of its tokens. */
struct q8_values {
    const uint8_t *plane;
    int head_dim, dim;    /* dim: head_dim rounded up to 16 */
    uint64_t any;         /* tokens that some row sees */
    bool whole;           /* every row sees all 64 */
    const float *p;       /* [n_q][KERN_LEAF]; this page's 64 first */
    int n_q, group;       /* group: queries of a row */
    const uint64_t *seen; /* [n_q / group][ATTN_ENTRIES]: by row, what it sees; this page's first */
    float *o;             /* [n_q] x o_stride, added to */
    size_t o_stride;
};

/* kernels/cpu/attention_q8.c, compiled once for each instruction set. `next`: a plane to be read
 * ahead meanwhile, NULL: none. */
struct cpu_q8_isa {
    /* kv_write of struct cpu_attn_isa. */
    void (*write)(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                  const float *v);
    /* f32 [head_dim][64] of a plane of K, [n_tokens][stride] of one of V (rows are written by four;
     * stride a multiple of 16, not below head_dim; the rest of a row is anything finite). */
    void (*widen_k)(const uint8_t *plane, int head_dim, float *out);
    void (*widen_v)(const uint8_t *plane, int head_dim, int n_tokens, int stride, float *out);
    /* Quantise q f32 [n_q][head_dim], turned. */
    void (*queries)(const float *q, int n_q, int head_dim, const struct q8_queries *out);
    /* score[i][0..63], rows of KERN_LEAF floats, of queries i < n_q and of the quarters marked, in
     * units of q->scale[i]. */
    void (*score)(const struct q8_queries *q, int n_q, int head_dim, const uint8_t *plane,
                  unsigned quarters, float *score, const uint8_t *next);
    void (*value)(const struct q8_values *v, const uint8_t *next);
};

/* attention_amx_q8.c: planes to what attention_amx.c multiplies, bf16 K [kdim / 2][64][2] and
 * V [32][dim][2]; zeros beyond head_dim, behind n tokens and where the token's bit in `keep` is
 * clear. */
void attn_amx_q8_k(const uint8_t *plane, int head_dim, int kdim, uint16_t *dst);
void attn_amx_q8_v(const uint8_t *plane, int head_dim, int n, int dim, uint64_t keep,
                   uint16_t *dst);

#endif
