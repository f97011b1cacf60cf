#ifndef TANDEM_TARGET_TRACE_PRIVATE_H
#define TANDEM_TARGET_TRACE_PRIVATE_H

/* A trace from the inside: trace_open.c lays it out, trace.c appends one text, trace_answers.c
 * several answers to it. */

#include "model/batch.h"
#include "target/target.h"
#include "target/trace.h"

enum { TRACE_GROUPS = 2 /* shallow, deep */, TRACE_PAGE_UNIT = 1024 };

struct target_trace {
    struct target_trace_options o;
    struct model *m;
    struct kern *k;
    const struct model_config *c;
    int n_blocks;    /* capacity */
    int answer_tail; /* blocks that one of several answers may write */
    int n_groups;    /* 1 where every layer is deep */
    int group_first[TRACE_GROUPS], group_layers[TRACE_GROUPS];
    size_t page_bytes[TRACE_GROUPS];
    size_t bytes;

    /* What stands. */
    int n_tokens;
    int prompt_end;   /* where prompt_logits were computed, -1: nowhere */
    bool has_last;    /* logits' first row predicts the token at n_tokens */
    bool is_enqueued; /* the batch is in use until the next sync */

    /* Backend memory. */
    void *arena, *block, *score_scratch;
    size_t score_scratch_bytes;
    uint8_t *group_arena[TRACE_GROUPS];
    int32_t *identity; /* [n_blocks] 0, 1, 2, ...: pages of planes */
    float *states;     /* [n_taps][max_tokens][H] */
    uint8_t *planes;   /* [n_taps][n_blocks] of plane_stride bytes */
    float *rings;      /* [n_taps][KERN_STATE_QUERIES][H] */
    size_t plane_stride;
    float *logits;        /* [1 + TARGET_TRACE_LOOK][vocab] */
    float *prompt_logits; /* [vocab] */
    /* [n_deep * n_heads][n_blocks]; a prompt's is the first line, or (apart) one of each KV head of
     * each deep layer, with its quarters beside. no_mass has as many zeros as the larger. */
    float *mass, *no_mass, *quarter_mass;
    uint16_t *no_history; /* [vocab] zeros */
    void *sample_scratch;

    /* Host memory, with the backend's copies. */
    void *host_block;
    struct model_batch batch;
    struct model_array note, params, recent, mark, sampled, seen, seen_quarters;
    int32_t *pages[TRACE_GROUPS];        /* [n_blocks] */
    int32_t *answer_pages[TRACE_GROUPS]; /* [n_blocks], of one of several answers */
    int32_t *read;                       /* [n_blocks] */
    uint8_t *quarters;                   /* [n_blocks] of those */
    uint64_t own_id;                     /* of the newest lists by layer and head */
};

/* ---- Sizes ---- */

static inline int trace_vocab_of(const struct target_trace *t) {
    return t->c->n_head;
}

static inline int trace_n_deep(const struct target_trace *t) {
    return t->c->n_layers - t->o.select_layer;
}

static inline size_t trace_mass_floats(const struct target_trace *t) {
    size_t lines = t->o.heads ? (size_t)trace_n_deep(t) * (size_t)t->c->n_heads : 1;
    return lines * (size_t)t->n_blocks;
}

/* Lists, or lines of masses, of those that may have their own. */
static inline size_t trace_n_apart(const struct target_trace *t) {
    return t->o.apart ? (size_t)trace_n_deep(t) * (size_t)t->c->n_kv_heads : 0;
}

static inline size_t trace_quarter_floats(const struct target_trace *t) {
    return trace_n_apart(t) * (size_t)t->n_blocks * TARGET_QUARTERS;
}

static inline struct kern_plane trace_plane_of(const struct target_trace *t, int tap) {
    return (struct kern_plane){.base =
                                   t->planes + (size_t)tap * (size_t)t->n_blocks * t->plane_stride,
                               .page_stride = t->plane_stride,
                               .cols = t->c->hidden,
                               .has_first = t->o.has_first,
                               .has_minmax = t->o.has_minmax,
                               .has_spread = t->o.has_spread};
}

/* ---- Passes ---- */

/* Nothing of the batch may be touched while a pass is under way. */
int target__trace_settle(struct target_trace *t, struct err *e);

/* Does it need lists by layer and head? NULL: no. */
bool target__trace_is_apart(const struct target_kept *kept);

/* What sequence seq_idx of the batch reads of its n_all blocks in the deep group: `kept`, NULL:
 * all. id: of what is kept, where the batch has own lists. */
void target__trace_deep_pages(struct target_trace *t, int seq_idx, const int32_t *pages,
                              const struct target_kept *kept, int n_all, uint64_t id);

#endif
