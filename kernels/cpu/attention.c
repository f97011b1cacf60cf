/* Attention in f32, compiled once for each instruction set. Scores: lanes are the 64 columns of a K
 * page, a register tile of QT queries x CV vectors, products summed over head_dim in order. Values:
 * lanes are head_dim, summed over tokens in order. Where a tile has more queries than one register
 * tile, the page is widened to f32 once for all of them; that is exact, so it changes no bit. */
#include <math.h>

#include "kernels/cpu/attention_page.h"
#include "kernels/cpu/attention_q8.h"
#include "kernels/cpu/vexp.h"

enum {
    CHAINS = 4,
    LOOK = 2, /* blocks between the one in use and the one on its way */
};

/* A thread's scratch, carved. */
struct work {
    const struct attn_job *job;
    const struct attn_tile *tile;
    int n_q, hd, dim;
    float *q;     /* [n_q][hd], scaled; turned for 8-bit pages */
    float *score; /* [n_q][KERN_LEAF] scores, then weights */
    float *page;  /* [hd][64] or [64][dim]: a page in f32 */
    float *stack; /* unreduced nodes, [depth][n_q] slots */
    float *mass;  /* [group][capacity][2] */
    float *part;  /* [group][capacity][4] */
    struct attn_sight *sight;
    void *amx;
    struct q8_queries q8; /* of a tile that reads 8-bit pages as such */
    size_t token_bytes;   /* of K or V */
    uint64_t kv_bytes;
    /* The blocks (a head's K or V of a page) that the running leaf reads in their order, then the
     * first of what this thread reads behind it. */
    const uint8_t *route[2 * ATTN_ENTRIES + LOOK];
    int n_route, place;
};

static void carve(struct work *w, const struct attn_job *j, const struct attn_tile *t,
                  void *scratch) {
    struct attn_layout at = attn_layout(j->n_heads, j->kv->head_dim, j->lists->capacity);
    uint8_t *p = scratch;
    *w = (struct work){
        .job = j,
        .tile = t,
        .n_q = t->n_rows * j->group,
        .hd = j->kv->head_dim,
        .dim = j->dim,
        .q = (float *)(void *)(p + at.q),
        .score = (float *)(void *)(p + at.score),
        .page = (float *)(void *)(p + at.page),
        .stack = (float *)(void *)(p + at.stack),
        .mass = (float *)(void *)(p + at.mass),
        .part = (float *)(void *)(p + at.mass) + (size_t)j->group * (size_t)j->lists->capacity * 2,
        .sight = (struct attn_sight *)(void *)(p + at.sight),
        .amx = p + at.amx,
        .q8 = q8_carve(j->kv->head_dim, p + at.q8),
        .token_bytes = kern_kv_token_bytes(j->kv->dtype, j->kv->head_dim),
    };
}

/* ---- Writing ------------------------------------------------------------------------------- */

static void to_f16(const float *x, int n, uint16_t *out) {
    int i = 0;
#if defined(__AVX2__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) out[i] = f32_to_f16(x[i]);
}

static void kv_write(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                     const float *v) {
    uint8_t *kp = page + kv->k_offset + (size_t)head * kv->head_stride;
    uint8_t *vp = page + kv->v_offset + (size_t)head * kv->head_stride;
    size_t hd = (size_t)kv->head_dim;
    if (kv->dtype == KERN_F32) {
        float *kf = (float *)(void *)kp;
        for (size_t d = 0; d < hd; d++) kf[d * KERN_BLOCK + (size_t)t] = k[d];
        memcpy(vp + (size_t)t * hd * 4, v, hd * 4);
        return;
    }
    uint16_t *kh = (uint16_t *)(void *)kp + t, *vh = (uint16_t *)(void *)vp + (size_t)t * hd;
    uint16_t column[KERN_MAX_HEAD_DIM];
    if (kv->dtype == KERN_F16) {
        to_f16(k, kv->head_dim, column);
        to_f16(v, kv->head_dim, vh);
    } else
        for (size_t d = 0; d < hd; d++) {
            column[d] = f32_to_bf16(k[d]);
            vh[d] = f32_to_bf16(v[d]);
        }
    for (size_t d = 0; d < hd; d++) kh[d * KERN_BLOCK] = column[d];
}

/* ---- Scores -------------------------------------------------------------------------------- */

static void score_quarters(const struct work *w, int n_q, const uint8_t *k, unsigned quarters,
                           float *score) {
    enum kern_dtype t = w->job->kv->dtype;
    if (t == KERN_F16) score_quarters_as(KERN_F16, w->q, n_q, w->hd, k, quarters, score);
    else if (t == KERN_BF16) score_quarters_as(KERN_BF16, w->q, n_q, w->hd, k, quarters, score);
    else score_quarters_as(KERN_F32, w->q, n_q, w->hd, k, quarters, score);
}

/* Of `quarters` at least; only 8-bit pages leave the others out. */
static void score_page(struct work *w, int n_q, const uint8_t *k, unsigned quarters, float *score,
                       const uint8_t *next, size_t next_row) {
    enum kern_dtype t = w->job->kv->dtype;
    const struct cpu_q8_isa *q8 = w->job->ctx->isa->q8;
    if (attn_uses_q8(w->job->kv, w->tile)) {
        q8->score(&w->q8, n_q, w->hd, k, quarters, score, next);
        return;
    }
    if (t == KERN_Q8_0) {
        q8->widen_k(k, w->hd, w->page);
        k = (const uint8_t *)w->page;
        t = KERN_F32;
    } else if (n_q > QT && t != KERN_F32) {
        widen(t, k, w->hd, KERN_BLOCK, KERN_BLOCK, w->page);
        k = (const uint8_t *)w->page;
        t = KERN_F32;
    }
    if (t == KERN_F16) score_tiles(KERN_F16, w->q, n_q, w->hd, k, score, next, next_row);
    else if (t == KERN_BF16) score_tiles(KERN_BF16, w->q, n_q, w->hd, k, score, next, next_row);
    else score_tiles(KERN_F32, w->q, n_q, w->hd, k, score, next, next_row);
}

/* Put -infinity over the columns that are not seen. */
static void mask_page(float *score, uint64_t seen) {
    for (int c = 0; c < KERN_BLOCK; c += VL)
        v_store(score + c, v_select((uint32_t)(seen >> c) & (uint32_t)((1u << VL) - 1u),
                                    v_load(score + c), v_set1(-INFINITY)));
}

/* ---- Values -------------------------------------------------------------------------------- */

/* The lowest run of set bits leaves `left`: [*t0, *t1). */
static inline void take_run(uint64_t *left, int *t0, int *t1) {
    *t0 = *t1 = __builtin_ctzll(*left);
    while (*t1 < KERN_BLOCK && *left >> *t1 & 1) *left &= ~((uint64_t)1 << (*t1)++);
}

/* All queries of the tile over one page of V; `all` and `any` say which tokens every row and some
 * row sees. Tokens that a row does not see are skipped, not multiplied by zero. */
static void value_page(struct work *w, int entry, uint64_t any, uint64_t all, const float *p,
                       float *o, const uint8_t *next, size_t next_row) {
    const struct attn_job *j = w->job;
    const uint8_t *v = attn_page(j, w->tile, entry, true);
    enum kern_dtype t = j->kv->dtype;
    int width = w->hd, group = j->group, t0, t1;
    size_t stride = (size_t)j->slot_floats;
    if (attn_uses_q8(j->kv, w->tile)) {
        const struct q8_values values = {.plane = v,
                                         .head_dim = w->hd,
                                         .dim = w->dim,
                                         .any = any,
                                         .whole = all == ~(uint64_t)0,
                                         .p = p,
                                         .n_q = w->n_q,
                                         .group = group,
                                         .seen = &w->sight->row[0][entry % ATTN_ENTRIES],
                                         .o = o,
                                         .o_stride = stride};
        j->ctx->isa->q8->value(&values, next);
        return;
    }
    if (t == KERN_Q8_0) {
        j->ctx->isa->q8->widen_v(v, w->hd, attn_n_tokens(any), w->dim, w->page);
        v = (const uint8_t *)w->page;
        width = w->dim;
        t = KERN_F32;
    } else if (w->hd != w->dim || (w->n_q > QT && t != KERN_F32)) {
        for (uint64_t left = any; left;) {
            take_run(&left, &t0, &t1);
            widen(t, v + (size_t)t0 * (size_t)w->hd * attn_kv_bytes(t), t1 - t0, w->hd, w->dim,
                  w->page + (size_t)t0 * (size_t)w->dim);
        }
        v = (const uint8_t *)w->page;
        width = w->dim;
        t = KERN_F32;
    }
    if (all == ~(uint64_t)0) {
        value_range(t, w->n_q, p, 0, KERN_BLOCK, v, width, w->dim, o, stride, next, next_row);
        return;
    }
    for (int r = 0; r < w->tile->n_rows; r++) {
        uint64_t left = w->sight->row[r][entry % ATTN_ENTRIES];
        while (left) {
            take_run(&left, &t0, &t1);
            value_range(t, group, p + (size_t)(r * group) * KERN_LEAF, t0, t1, v, width, w->dim,
                        o + (size_t)(r * group) * stride, stride, NULL, 0);
        }
    }
}

/* ---- Leaves and nodes ---------------------------------------------------------------------- */

/* What a query's scores are multiples of. */
static float score_unit(const struct work *w, int q) {
    return attn_uses_q8(w->job->kv, w->tile) ? w->q8.scale[q] : 1.f;
}

/* Largest score m, weights exp(score - m) in place and their sum; scores come in multiples of
 * `unit`; n_cols a multiple of 64. CHAINS vectors in turn over the columns in order, as one would
 * wait for itself. */
static void softmax_leaf(float *score, int n_cols, float unit, float *m_out, float *l_out) {
    const vf log2e = v_set1(unit * 0x1.715476p0f);
    vf top[CHAINS], sum[CHAINS];
#pragma GCC unroll 4
    for (int x = 0; x < CHAINS; x++) {
        top[x] = v_set1(-INFINITY);
        sum[x] = v_set1(0.f);
    }
    for (int c = 0; c < n_cols; c += CHAINS * VL)
#pragma GCC unroll 4
        for (int x = 0; x < CHAINS; x++) top[x] = v_max(v_load(score + c + x * VL), top[x]);
#pragma GCC unroll 2
    for (int n = CHAINS / 2; n >= VN; n /= 2)
#pragma GCC unroll 2
        for (int x = 0; x < n; x++) top[x] = v_max(top[x], top[x + n]);
    float m = v_max16(top);
    for (int c = 0; c < n_cols; c += CHAINS * VL)
#pragma GCC unroll 4
        for (int x = 0; x < CHAINS; x++) {
            vf p = v_exp_weight(v_sub(v_load(score + c + x * VL), v_set1(m)), log2e);
            v_store(score + c + x * VL, p);
            sum[x] = v_add(sum[x], p);
        }
#pragma GCC unroll 2
    for (int n = CHAINS / 2; n >= VN; n /= 2)
#pragma GCC unroll 2
        for (int x = 0; x < n; x++) sum[x] = v_add(sum[x], sum[x + n]);
    *m_out = m * unit;
    *l_out = v_sum16(sum);
}

/* `then`, `then_leaf`: what this thread reads behind it (NULL: nothing). */
static void plan_route(struct work *w, const struct attn_tile *then, int then_leaf) {
    const struct attn_sight *see = w->sight;
    const struct kern_kv *kv = w->job->kv;
    int n = 0;
    for (int e = see->e0; e < see->e1; e++)
        if (see->any[e - see->e0])
            w->route[n++] =
                see->quarters[e - see->e0] == 15 ? attn_page(w->job, w->tile, e, false) : NULL;
    for (int i = 0; i < n; i++)
        w->route[n + i] = w->route[i] ? w->route[i] + (kv->v_offset - kv->k_offset) : NULL;
    w->n_route = 2 * n;
    w->place = 0;
    for (int i = 0, e = then_leaf * ATTN_ENTRIES; then && i < LOOK && e < then->n_entries; i++, e++)
        w->route[w->n_route++] =
            attn_quarters(w->job, then, e) == 15 ? attn_page(w->job, then, e, false) : NULL;
}

/* The block that goes on its way during the next stretch of work; NULL: none. The softmax is a
 * stretch too, so that memory does not idle meanwhile. */
static const uint8_t *look_ahead(struct work *w) {
    int at = w->place++ + LOOK;
    return at < w->n_route ? w->route[at] : NULL;
}

static void leaf(struct work *w, int idx, const struct attn_tile *then, int then_leaf,
                 float *slot) {
    const struct attn_job *j = w->job;
    const struct attn_tile *t = w->tile;
    size_t stride = (size_t)j->slot_floats, v_row = w->token_bytes;
    size_t k_row = KERN_BLOCK * v_row / (size_t)w->hd; /* as steps of a read-ahead */
    attn_look(j, t, idx, w->sight);
    plan_route(w, then, then_leaf);
    const struct attn_sight *see = w->sight;
    int e0 = see->e0, e1 = see->e1;
    int n_cols = (e1 - e0) * KERN_BLOCK;
    for (int e = e0; e < e1; e++) {
        float *score = w->score + (e - e0) * KERN_BLOCK;
        if (see->any[e - e0]) {
            const uint8_t *k = attn_page(j, t, e, false), *next = look_ahead(w);
            unsigned quarters = see->quarters[e - e0];
            if (quarters == 15 || j->kv->dtype == KERN_Q8_0)
                score_page(w, w->n_q, k, quarters, score, next, k_row);
            else score_quarters(w, w->n_q, k, quarters, score);
            w->kv_bytes += attn_n_read(quarters, see->any[e - e0]) * v_row;
        }
        if (see->all[e - e0] == ~(uint64_t)0) continue;
        for (int q = 0; q < w->n_q; q++)
            mask_page(score + (size_t)q * KERN_LEAF, see->row[q / j->group][e - e0]);
    }
    const uint8_t *next = look_ahead(w);
    size_t share = KERN_BLOCK * v_row / (size_t)w->n_q; /* of it, a query */
    for (int q = 0; q < w->n_q; q++) {
        float *s = slot + (size_t)q * stride;
        if (next) prefetch(next + share * (size_t)q, share);
        memset(s, 0, stride * sizeof *s);
        s[w->dim] = -INFINITY;
        if (see->row_any[q / j->group])
            softmax_leaf(w->score + (size_t)q * KERN_LEAF, n_cols, score_unit(w, q), &s[w->dim],
                         &s[w->dim + 1]);
    }
    for (int e = e0; e < e1; e++)
        if (see->any[e - e0])
            value_page(w, e, see->any[e - e0], see->all[e - e0], w->score + (e - e0) * KERN_BLOCK,
                       slot, look_ahead(w), v_row);
}

/* a = a combined with b, a the left one. */
static void reduce(int dim, size_t n_q, size_t stride, float *a, const float *b) {
    for (size_t q = 0; q < n_q; q++, a += stride, b += stride) {
        float ma = a[dim], la = a[dim + 1], mb = b[dim], lb = b[dim + 1];
        if (lb == 0.f && mb == -INFINITY) continue;
        if (la == 0.f && ma == -INFINITY) {
            memcpy(a, b, stride * sizeof *a);
            continue;
        }
        float m = ma > mb ? ma : mb, ea = s_exp(ma - m), eb = s_exp(mb - m);
        vf va = v_set1(ea), vb = v_set1(eb);
        for (int d = 0; d < dim; d += VL)
            v_store(a + d, v_add(v_mul(v_load(a + d), va), v_mul(v_load(b + d), vb)));
        a[dim] = m;
        a[dim + 1] = la * ea + lb * eb;
    }
}

static void load_queries(struct work *w, int first_row, int n_rows) {
    const struct attn_job *j = w->job;
    for (int r = 0; r < n_rows; r++) {
        const float *src = j->qkv + (size_t)(first_row + r) * (size_t)j->qkv_stride +
                           (size_t)(w->tile->head * j->group) * (size_t)w->hd;
        float *dst = w->q + (size_t)(r * j->group) * (size_t)w->hd;
        for (int i = 0; i < j->group * w->hd; i++) dst[i] = src[i] * j->scale;
        for (int g = 0; g < j->group && j->kv->dtype == KERN_Q8_0; g++)
            q8_turn_query(dst + (size_t)g * (size_t)w->hd, w->hd);
    }
    if (attn_uses_q8(j->kv, w->tile))
        j->ctx->isa->q8->queries(w->q, n_rows * j->group, w->hd, &w->q8);
}

/* Only the AVX-512 table of a context with AMX gets here. */
static void load_queries_amx(struct work *w) {
#if defined(__AVX512F__)
    attn_amx_queries(w->job, w->tile, w->amx);
#else
    (void)w;
#endif
}

static void leaf_amx(struct work *w, int idx, float *slot) {
#if defined(__AVX512F__)
    attn_look(w->job, w->tile, idx, w->sight);
    w->kv_bytes += attn_amx_leaf(w->job, w->tile, w->sight, w->amx, slot);
#else
    (void)w, (void)idx, (void)slot;
#endif
}

static void item(struct attn_job *j, const struct attn_tile *t, int node,
                 const struct attn_tile *then, int then_node, bool held, void *scratch) {
    struct work w;
    carve(&w, j, t, scratch);
    bool amx = attn_uses_amx(j->ctx, j->kv->dtype, t->prompt);
    if (amx && !held) load_queries_amx(&w);
    else if (!held) load_queries(&w, t->row, t->n_rows);
    size_t n_q = (size_t)w.n_q, stride = (size_t)j->slot_floats;
    int n_leaves = attn_n_leaves(t->n_entries);
    int64_t begin = (int64_t)node << j->level, end = begin + ((int64_t)1 << j->level);
    if (end > n_leaves) end = n_leaves;
    float *bottom = attn_slots(j, t, node), *at[ATTN_MAX_DEPTH];
    int level[ATTN_MAX_DEPTH], depth = 0;
    for (size_t q = 0; begin == end && q < n_q; q++) {
        memset(bottom + q * stride, 0, stride * sizeof *bottom);
        bottom[q * stride + (size_t)w.dim] = -INFINITY;
    }
    /* A binary counter of unreduced nodes: equal levels merge at once, the rest from the right. */
    for (int64_t i = begin; i < end; i++) {
        at[depth] = depth ? w.stack + (size_t)(depth - 1) * n_q * stride : bottom;
        if (amx) leaf_amx(&w, (int)i, at[depth]);
        else if (i + 1 < end) leaf(&w, (int)i, t, (int)i + 1, at[depth]);
        else leaf(&w, (int)i, then, then_node << j->level, at[depth]);
        level[depth++] = 0;
        for (; depth > 1 && level[depth - 1] == level[depth - 2]; depth--) {
            reduce(w.dim, n_q, stride, at[depth - 2], at[depth - 1]);
            level[depth - 2]++;
        }
    }
    for (; depth > 1; depth--) reduce(w.dim, n_q, stride, at[depth - 2], at[depth - 1]);
    atomic_fetch_add_explicit(&j->kv_bytes, w.kv_bytes, memory_order_relaxed);
}

static void combine(const struct attn_job *j, const struct attn_tile *t) {
    size_t stride = (size_t)j->slot_floats, n_q = (size_t)(t->n_rows * j->group);
    for (int step = 1; step < t->n_nodes; step *= 2)
        for (int i = 0; i + step < t->n_nodes; i += 2 * step)
            reduce(j->dim, n_q, stride, attn_slots(j, t, i), attn_slots(j, t, i + step));
    const float *s = attn_slots(j, t, 0);
    for (size_t q = 0; q < n_q; q++, s += stride) {
        size_t row = (size_t)t->row + q / (size_t)j->group;
        size_t head = (size_t)t->head * (size_t)j->group + q % (size_t)j->group;
        if (j->batch->row_seq[row] < 0) continue;
        float *out = j->out + (row * (size_t)j->n_heads + head) * (size_t)j->kv->head_dim;
        float l = s[j->dim + 1], inv = l == 0.f ? 0.f : 1.f / l;
        for (int d = 0; d < j->kv->head_dim; d++) out[d] = s[d] * inv;
    }
}

/* ---- Attention mass ------------------------------------------------------------------------ */

/* Sums of the quarters' weights of a page. */
static void sum_quarters(const float *weight, float part[4]) {
    for (int i = 0; i < 4; i++) {
        vf sum[VN];
        for (int v = 0; v < VN; v++) sum[v] = v_load(weight + KERN_QUARTER * i + v * VL);
        part[i] = v_sum16(sum);
    }
}

/* Rows of the tile that are looked at, one after another, to the lines of the masses: every entry's
 * largest score and sum, then the share of each in the row's total. */
static void mass(struct attn_job *j, const struct attn_tile *t, void *scratch) {
    struct work w;
    carve(&w, j, t, scratch);
    for (int r = 0; r < t->n_rows; r++) {
        if (!attn_is_looked_at(j, t->row + r)) continue;
        load_queries(&w, t->row + r, 1);
        float top[KERN_MAX_GROUP];
        for (int g = 0; g < j->group; g++) top[g] = -INFINITY;
        for (int e = 0; e < t->n_entries; e++) {
            uint64_t seen = attn_visible(j, t, t->row + r, e);
            if (seen) {
                score_page(&w, j->group, attn_page(j, t, e, false), 15, w.score, NULL, 0);
                w.kv_bytes += KERN_BLOCK * w.token_bytes;
            }
            for (int g = 0; g < j->group; g++) {
                size_t at = (size_t)g * (size_t)j->lists->capacity + (size_t)e;
                float *pair = w.mass + at * 2, *part = w.part + at * 4;
                float *s = w.score + (size_t)g * KERN_LEAF;
                pair[0] = -INFINITY;
                pair[1] = 0.f;
                memset(part, 0, 4 * sizeof *part);
                if (!seen) continue;
                mask_page(s, seen);
                softmax_leaf(s, KERN_BLOCK, score_unit(&w, g), &pair[0], &pair[1]);
                if (j->taps->quarter_mass) sum_quarters(s, part);
                top[g] = pair[0] > top[g] ? pair[0] : top[g];
            }
        }
        for (int g = 0; g < j->group; g++) {
            float *pair = w.mass + (size_t)g * (size_t)j->lists->capacity * 2;
            float *part = w.part + (size_t)g * (size_t)j->lists->capacity * 4;
            double sum = 0;
            for (int e = 0; e < t->n_entries; e++) {
                float by = pair[2 * e + 1] != 0.f ? s_exp(pair[2 * e] - top[g]) : 0.f;
                if (pair[2 * e + 1] != 0.f) pair[2 * e + 1] *= by;
                for (int i = 0; i < 4 && j->taps->quarter_mass; i++) part[4 * e + i] *= by;
                sum += (double)pair[2 * e + 1];
            }
            if (!(sum > 0)) continue;
            for (int e = 0; e < t->n_entries; e++) {
                attn_add_mass(j, t, t->row + r, g, e, (double)pair[2 * e + 1] / sum);
                if (j->taps->quarter_mass)
                    attn_add_quarters(j, t, t->row + r, e, part + 4 * e, sum);
            }
        }
    }
    atomic_fetch_add_explicit(&j->kv_bytes, w.kv_bytes, memory_order_relaxed);
}

const struct cpu_attn_isa CPU_NAME(cpu_attn) = {
    .kv_write = kv_write, .item = item, .combine = combine, .mass = mass};
