#ifndef TANDEM_TESTS_POOL_HELPER_H
#define TANDEM_TESTS_POOL_HELPER_H

/* Small pools for the tests of kvpool/. */

#include "base/err.h"
#include "kvpool/kvpool.h"
#include "tests/harness.h"

/* One head of 8 elements of 2 bytes is 1,024 bytes for K; a layer of a page is 2,048. */
static inline struct kvpool_page_shape shape(int n_layers) {
    return (struct kvpool_page_shape){
        .n_layers = n_layers, .n_kv_heads = 1, .head_dim = 8, .elem_bytes = 2};
}

static inline struct kvpool_options options(int draft, int shallow, int deep, size_t arena_kib) {
    return (struct kvpool_options){.shape = {shape(draft), shape(shallow), shape(deep)},
                                   .arena_bytes = arena_kib * 1024,
                                   .max_seqs = 8,
                                   .max_blocks = 16,
                                   .max_cached = 64};
}

static inline struct kvpool *open_pool(const struct kvpool_options *o) {
    struct err e = {0};
    struct kvpool *p;
    assert_ok(kvpool_open(&p, o, &e), e);
    return p;
}

static inline void fill(int32_t *t, int n, int first) {
    for (int i = 0; i < n; i++) t[i] = first + i;
}

/* With a prompt, a look-up; the draft's hit is left aside. */
static inline int open_seq(struct kvpool *p, int n_tokens, bool draft, const int32_t *prompt,
                           int n_prompt, uint64_t salt, int *seq, int *hit, struct err *e) {
    int draft_hit = -7;
    struct kvpool_want want = {.n_tokens = n_tokens,
                               .with_draft = draft,
                               .prompt = prompt,
                               .n_prompt = n_prompt,
                               .salt = salt};
    int rc = kvpool_seq_open(p, &want, seq, hit, &draft_hit, e);
    if (!rc) assert_true(draft ? draft_hit <= *hit && draft_hit >= 0 : draft_hit == 0);
    return rc;
}

static inline void extend_all(struct kvpool *p, int seq, bool draft, int n) {
    if (draft) kvpool_seq_extend(p, seq, KVPOOL_DRAFT, n);
    kvpool_seq_extend(p, seq, KVPOOL_SHALLOW, n);
    kvpool_seq_extend(p, seq, KVPOOL_DEEP, n);
}

/* Open, compute all n tokens, register, close: n tokens are then cached. */
static inline int serve(struct kvpool *p, const int32_t *tokens, int n, bool draft, uint64_t salt) {
    struct err e = {0};
    int seq, hit;
    assert_ok(open_seq(p, n, draft, tokens, n, salt, &seq, &hit, &e), e);
    extend_all(p, seq, draft, n);
    kvpool_seq_register(p, seq, tokens, n, KVPOOL_PROMPT);
    kvpool_seq_close(p, seq);
    kvpool_check(p);
    return hit;
}

#endif
