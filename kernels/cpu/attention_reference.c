/* Attention in double, one query at a time, softmax in two passes: what the other tables are
 * checked against. A tile is one item. */
#include <math.h>

#include "kernels/cpu/attention_q8.h"

/* Element d of a token's K or V. */
static double element(const struct kern_kv *kv, const uint8_t *p, bool value, int token, int d) {
    if (kv->dtype == KERN_Q8_0) return (double)q8_element(p, kv->head_dim, value, token, d);
    size_t i = value ? (size_t)token * (size_t)kv->head_dim + (size_t)d
                     : (size_t)d * KERN_BLOCK + (size_t)token;
    if (kv->dtype == KERN_F32) return (double)((const float *)(const void *)p)[i];
    uint16_t h = ((const uint16_t *)(const void *)p)[i];
    return (double)(kv->dtype == KERN_F16 ? f16_to_f32(h) : bf16_to_f32(h));
}

static void kv_write(const struct kern_kv *kv, uint8_t *page, int head, int t, const float *k,
                     const float *v) {
    cpu_attn_plain.kv_write(kv, page, head, t, k, v);
}

static double score(const struct attn_job *j, const float *q, const uint8_t *k, int token) {
    double s = 0;
    for (int d = 0; d < j->kv->head_dim; d++)
        s += (double)q[d] * element(j->kv, k, false, token, d);
    return s * (double)j->scale;
}

/* Turned in `own` [KERN_MAX_HEAD_DIM], where keys are. */
static const float *query(const struct attn_job *j, const struct attn_tile *t, int row, int g,
                          float *own) {
    int hd = j->kv->head_dim;
    const float *q = j->qkv + (size_t)row * (size_t)j->qkv_stride +
                     (size_t)(t->head * j->group + g) * (size_t)hd;
    if (j->kv->dtype != KERN_Q8_0) return q;
    memcpy(own, q, (size_t)hd * sizeof *q);
    q8_turn_query(own, hd);
    return own;
}

/* Largest score of a query; -infinity where it sees nothing. */
static double top_score(const struct attn_job *j, const struct attn_tile *t, int row,
                        const float *q) {
    double top = -INFINITY;
    for (int e = 0; e < t->n_entries; e++) {
        uint64_t seen = attn_visible(j, t, row, e);
        for (int x = 0; x < KERN_BLOCK; x++)
            if (seen >> x & 1) top = fmax(top, score(j, q, attn_page(j, t, e, false), x));
    }
    return top;
}

static void attend(const struct attn_job *j, const struct attn_tile *t, int row, const float *q,
                   float *slot) {
    double o[KERN_MAX_HEAD_DIM] = {0}, l = 0, top = top_score(j, t, row, q);
    int hd = j->kv->head_dim;
    for (int e = 0; e < t->n_entries; e++) {
        uint64_t seen = attn_visible(j, t, row, e);
        for (int x = 0; x < KERN_BLOCK; x++) {
            if (!(seen >> x & 1)) continue;
            double p = exp(score(j, q, attn_page(j, t, e, false), x) - top);
            l += p;
            const uint8_t *v = attn_page(j, t, e, true);
            for (int d = 0; d < hd; d++) o[d] += p * element(j->kv, v, true, x, d);
        }
    }
    for (int d = 0; d < hd; d++) slot[d] = l == 0 ? 0.f : (float)(o[d] / l);
}

static uint64_t tile_bytes(const struct attn_job *j, const struct attn_tile *t) {
    uint64_t n = 0, row = kern_kv_token_bytes(j->kv->dtype, j->kv->head_dim);
    for (int e = 0; e < t->n_entries; e++) {
        uint64_t any = 0;
        for (int r = 0; r < t->n_rows; r++) any |= attn_visible(j, t, t->row + r, e);
        if (any) n += row * attn_n_read(attn_quarters(j, t, e), any);
    }
    return n;
}

static void item(struct attn_job *j, const struct attn_tile *t, int node,
                 const struct attn_tile *then, int then_node, bool held, void *scratch) {
    (void)then, (void)then_node, (void)held, (void)scratch;
    float *slot = attn_slots(j, t, node), own[KERN_MAX_HEAD_DIM];
    for (int r = 0; r < t->n_rows; r++)
        for (int g = 0; g < j->group; g++, slot += j->slot_floats)
            attend(j, t, t->row + r, query(j, t, t->row + r, g, own), slot);
    atomic_fetch_add_explicit(&j->kv_bytes, tile_bytes(j, t), memory_order_relaxed);
}

static void combine(const struct attn_job *j, const struct attn_tile *t) {
    const float *slot = attn_slots(j, t, 0);
    size_t hd = (size_t)j->kv->head_dim;
    for (int r = 0; r < t->n_rows; r++)
        for (int g = 0; g < j->group; g++, slot += j->slot_floats) {
            if (j->batch->row_seq[t->row + r] < 0) continue;
            size_t head =
                (size_t)(t->row + r) * (size_t)j->n_heads + (size_t)(t->head * j->group + g);
            memcpy(j->out + head * hd, slot, hd * sizeof *slot);
        }
}

/* Sum of exp(score - top) over the tokens of the entry's quarters that the row sees. */
static double entry_sum(const struct attn_job *j, const struct attn_tile *t, int row,
                        const float *q, double top, int e, unsigned quarters) {
    uint64_t seen = attn_visible(j, t, row, e) & attn_quarter_tokens(quarters);
    double sum = 0;
    for (int x = 0; x < KERN_BLOCK; x++)
        if (seen >> x & 1) sum += exp(score(j, q, attn_page(j, t, e, false), x) - top);
    return sum;
}

static void mass(struct attn_job *j, const struct attn_tile *t, void *scratch) {
    (void)scratch;
    for (int r = 0; r < t->n_rows; r++) {
        int row = t->row + r;
        if (!attn_is_looked_at(j, row)) continue;
        for (int g = 0; g < j->group; g++) {
            float own[KERN_MAX_HEAD_DIM];
            const float *q = query(j, t, row, g, own);
            double top = top_score(j, t, row, q), sum = 0;
            for (int e = 0; e < t->n_entries; e++) sum += entry_sum(j, t, row, q, top, e, 15);
            for (int e = 0; e < t->n_entries && sum > 0; e++) {
                float part[4];
                for (unsigned i = 0; i < 4 && j->taps->quarter_mass; i++)
                    part[i] = (float)entry_sum(j, t, row, q, top, e, 1u << i);
                attn_add_mass(j, t, row, g, e, entry_sum(j, t, row, q, top, e, 15) / sum);
                if (j->taps->quarter_mass) attn_add_quarters(j, t, row, e, part, sum);
            }
        }
    }
}

const struct cpu_attn_isa cpu_attn_reference = {
    .kv_write = kv_write, .item = item, .combine = combine, .mass = mass};
