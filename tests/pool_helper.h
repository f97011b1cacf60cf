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

#endif
