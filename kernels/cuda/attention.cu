/* The operation `attention`: arguments as the kernels take them, then generated rows to
 * attention_gen.cu (bound by bytes: pages are shared out over the chip by leaves), prompt rows to
 * attention_prompt.cu (bound by products: tiles of many queries), and the attention mass where it
 * is wanted. Rows of both classes may share a call; each class's kernels see to their own rows and
 * use the whole scratch one after the other. */

#include "kernels/cuda/attention.cuh"

#include "base/err.h"

/* In front of the scratch, and left alone by all others that use it. */
static size_t attn_found_bytes(struct kern_rows rows, int n_seqs, int n_heads) {
    return rows.n_gen > 0 ? cuda_attention_gen_found_bytes(n_seqs, n_heads) : 0;
}

/* Behind it, for one call. */
static size_t attn_call_bytes(const struct cuda_ctx *c, struct kern_rows rows, int n_seqs,
                              int n_heads, int head_dim, int list_capacity) {
    size_t gen = cuda_attention_gen_bytes(c, rows.n_gen, n_seqs, n_heads, head_dim, list_capacity);
    size_t prompt = cuda_attention_prompt_bytes(c, rows.n_gen, rows.n_prompt, n_seqs, n_heads,
                                                head_dim, list_capacity);
    return gen > prompt ? gen : prompt;
}

size_t kern_cuda_attn_scratch_bytes(const struct kern *k, struct kern_rows rows, int n_seqs,
                                    int n_heads, int head_dim, int list_capacity) {
    return attn_found_bytes(rows, n_seqs, n_heads) +
           attn_call_bytes(cuda_ctx(k), rows, n_seqs, n_heads, head_dim, list_capacity);
}

static struct attn_args attn_args(const struct kern_batch *b, const struct kern_lists *lists,
                                  int n_heads, float scale, const float *qkv,
                                  const struct kern_kv *kv, const struct kern_attn_taps *taps,
                                  float *out) {
    struct attn_args a = {};
    a.n_gen = b->rows.n_gen, a.n_prompt = b->rows.n_prompt, a.n_seqs = b->n_seqs;
    a.position = b->position, a.row_seq = b->row_seq;
    a.seq_row = b->seq_row, a.seq_n_rows = b->seq_n_rows;
    a.page = lists->page, a.block = lists->block, a.n_blocks = lists->n_blocks;
    a.quarters = lists->quarters;
    a.capacity = lists->capacity;
    a.seq_stride = lists->seq_stride, a.head_stride = lists->head_stride;
    a.kv = (const uint8_t *)kv->base;
    a.page_stride = kv->page_stride, a.kv_head_stride = kv->head_stride;
    a.k_offset = kv->k_offset, a.v_offset = kv->v_offset;
    a.bf16 = kv->dtype == KERN_BF16;
    a.n_kv = kv->n_kv_heads, a.head_dim = kv->head_dim;
    a.n_heads = n_heads, a.group = n_heads / kv->n_kv_heads;
    a.scale_log2 = scale * 1.4426950408889634f;
    a.qkv = qkv;
    a.qkv_stride = (n_heads + 2 * kv->n_kv_heads) * kv->head_dim;
    a.out = out;
    if (taps) {
        if (taps->act.data) {
            a.act = (uint16_t *)taps->act.data;
            a.act_stride = act_stride(n_heads * kv->head_dim);
            a.act_bf16 = act_is_bf16(&taps->act);
        }
        a.mass = taps->mass_line ? taps->mass : NULL;
        a.head_mass = taps->mass_line ? taps->head_mass : NULL;
        a.mass_line = taps->mass_line;
        a.mass_head_stride = taps->mass_head_stride;
        a.quarter_mass = a.mass ? taps->quarter_mass : NULL;
        a.ancestors = taps->ancestors;
        a.kv_bytes = (unsigned long long *)taps->kv_bytes_read;
    }
    return a;
}

/* Prompt rows' packed form. */
static int attn_pack_prompt(struct kern *k, const struct kern_batch *b, int cols, const float *out,
                            struct kern_act act) {
    size_t before = (size_t)b->rows.n_gen * (size_t)act_stride(cols) * sizeof(uint16_t);
    ASSERT(before <= act.bytes);
    act.data = (uint8_t *)act.data + before;
    act.bytes -= before;
    return kern_cuda_pack(k, (struct kern_rows){0, b->rows.n_prompt}, cols,
                          out + (size_t)b->rows.n_gen * (size_t)cols, act);
}

int kern_cuda_attention(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                        int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                        const struct kern_attn_taps *taps, void *scratch, float *out) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT(kv->dtype == KERN_F16 || kv->dtype == KERN_BF16);
    ASSERT(kv->n_kv_heads > 0 && n_heads % kv->n_kv_heads == 0);
    ASSERT(n_heads / kv->n_kv_heads <= KERN_MAX_GROUP && kv->head_dim <= KERN_MAX_HEAD_DIM);
    ASSERT(kv->head_dim > 0 && kv->head_dim % 16 == 0);
    ASSERT(((uintptr_t)kv->base | kv->page_stride | kv->k_offset | kv->v_offset | kv->head_stride) %
               16 ==
           0);
    struct attn_args a = attn_args(b, lists, n_heads, scale, qkv, kv, taps, out);
    a.found = (uint8_t *)scratch, a.repeated = lists->repeated && lists->capacity > 0;
    a.scratch = (uint8_t *)scratch + attn_found_bytes(b->rows, b->n_seqs, n_heads);
    a.scratch_bytes =
        attn_call_bytes(c, b->rows, b->n_seqs, n_heads, kv->head_dim, lists->capacity);
    if (a.act) ASSERT(kern_cuda_act_bytes(k, b->rows, n_heads * kv->head_dim) <= taps->act.bytes);
    int rc = cuda_attention_gen(c, &a);
    if (!rc && a.n_prompt > 0) rc = cuda_attention_prompt(c, &a);
    if (!rc && (a.mass || a.head_mass)) rc = cuda_attention_mass(c, &a);
    if (!rc && a.act && a.n_prompt > 0)
        rc = attn_pack_prompt(k, b, n_heads * kv->head_dim, out, taps->act);
    return rc;
}
