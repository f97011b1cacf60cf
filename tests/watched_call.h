#ifndef TANDEM_TESTS_WATCHED_CALL_H
#define TANDEM_TESTS_WATCHED_CALL_H

/* One operation of a backend as data: what tests/watched_kern.c records, compares and replays. */

#include "kernels/kernels.h"

enum op {
    OP_EMBED = 1,
    OP_NORM_PACK,
    OP_PACK,
    OP_GATE_PACK,
    OP_MATMUL,
    OP_GATHER,
    OP_ROPE_KV,
    OP_ATTENTION,
    OP_NOTE_STATES,
    OP_SCORE,
    OP_COPY_PAGE,
    OP_SAMPLE,
    OP_ACCEPT,
    OP_ADVANCE,
    OP_TALLY
};

/* Everything that the host hands over, by value; compared as bytes, so that every struct is filled
 * field by field over zeros. */
struct call {
    enum op op;
    int n[3];
    float f;
    size_t size[1];
    struct kern_rows rows;
    const void *in[6];
    void *out[4];
    struct kern_weight weight;
    struct kern_act act;
    struct kern_batch batch;
    struct kern_rope rope;
    struct kern_kv kv;
    struct kern_lists lists;
    struct kern_attn_taps taps;
    struct kern_plane plane;
    struct kern_scorer scorer;
    struct kern_score_view view;
    struct kern_history history;
    struct kern_draft_probs q;
    struct kern_next next;
};

#define COPY(field) to->field = from->field
static void copy_weight(struct kern_weight *to, const struct kern_weight *from) {
    COPY(data), COPY(dtype), COPY(rows), COPY(cols), COPY(bytes);
}
static void copy_act(struct kern_act *to, const struct kern_act *from) {
    COPY(data), COPY(bytes), COPY(partner);
}
static void copy_batch(struct kern_batch *to, const struct kern_batch *from) {
    COPY(rows), COPY(token), COPY(position), COPY(row_seq), COPY(slot_page), COPY(n_seqs);
    COPY(seq_row), COPY(seq_n_rows);
}
static void copy_rope(struct kern_rope *to, const struct kern_rope *from) {
    COPY(inv_freq), COPY(dim), COPY(interleaved), COPY(scale), COPY(q_norm), COPY(k_norm);
    COPY(norm_eps), COPY(q_bias), COPY(k_bias), COPY(v_bias);
}
static void copy_kv(struct kern_kv *to, const struct kern_kv *from) {
    COPY(base), COPY(page_stride), COPY(k_offset), COPY(v_offset), COPY(head_stride), COPY(dtype);
    COPY(n_kv_heads), COPY(head_dim);
}
static void copy_lists(struct kern_lists *to, const struct kern_lists *from) {
    COPY(page), COPY(block), COPY(n_blocks), COPY(capacity), COPY(seq_stride), COPY(head_stride);
    COPY(quarters), COPY(repeated);
}
static void copy_taps(struct kern_attn_taps *to, const struct kern_attn_taps *from) {
    COPY(mass), COPY(mass_line), COPY(mass_head_stride), COPY(quarter_mass), COPY(head_mass),
        COPY(ancestors), COPY(kv_bytes_read);
    copy_act(&to->act, &from->act);
}
static void copy_plane(struct kern_plane *to, const struct kern_plane *from) {
    COPY(base), COPY(page_stride), COPY(plane_offset), COPY(cols), COPY(has_first);
    COPY(has_minmax), COPY(has_spread);
}
static void copy_scorer(struct kern_scorer *to, const struct kern_scorer *from) {
    COPY(kind), COPY(cols), COPY(n_queries), COPY(normed), COPY(by_first), COPY(n_heads);
    COPY(by_quarter);
    COPY(head_dim), COPY(a), COPY(b), COPY(width), COPY(ln_weight), COPY(ln_bias);
    COPY(w1), COPY(b1), COPY(w2), COPY(b2);
}
static void copy_view(struct kern_score_view *to, const struct kern_score_view *from) {
    copy_plane(&to->plane, &from->plane);
    COPY(page), COPY(ring), COPY(n_tokens);
}
static void copy_history(struct kern_history *to, const struct kern_history *from) {
    COPY(prompt), COPY(output), COPY(stride), COPY(recent);
}
static void copy_q(struct kern_draft_probs *to, const struct kern_draft_probs *from) {
    COPY(probs), COPY(stride), COPY(n), COPY(ids);
}
static void copy_next(struct kern_next *to, const struct kern_next *from) {
    COPY(token), COPY(position), COPY(row_seq), COPY(slot_page), COPY(seq_row), COPY(seq_n_rows);
    COPY(logit_row), COPY(params), COPY(list), COPY(list_capacity);
}

#undef COPY

#endif
