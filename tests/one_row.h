#ifndef TANDEM_TESTS_ONE_ROW_H
#define TANDEM_TESTS_ONE_ROW_H

/* The pass of one row of one sequence, which naive loops over a tiny model are made of. */

#include "model/model.h"
#include "tests/tiny_model.h"

/* A pass whose row has logits [TINY_VOCAB]; which layers read what (pass.group) is the caller's.
 * token and position must live as long as it. */
static inline struct model_pass one_row_pass(const int32_t *token, const int32_t *position,
                                             bool generated, float *logits, int n_groups) {
    static const int32_t zero = 0, one = 1;
    return (struct model_pass){
        .batch = {.rows = {.n_gen = generated, .n_prompt = !generated},
                  .token = token,
                  .position = position,
                  .row_seq = &zero,
                  .n_seqs = 1,
                  .seq_row = &zero,
                  .seq_n_rows = &one},
        .n_groups = n_groups,
        .n_logits = 1,
        .logit_row = &zero,
        .logits = logits,
        .logits_stride = TINY_VOCAB,
    };
}

/* Layers [first, first + n_layers) of it, f16, that read one list [*n_blocks] of at most `capacity`
 * blocks: page and block. Its own K and V go to *slot_page. All must live as long as the pass. */
static inline struct model_group one_row_group(int first, int n_layers, void *arena,
                                               const int32_t *slot_page, const int32_t *page,
                                               const int32_t *block, const int32_t *n_blocks,
                                               int capacity) {
    return (struct model_group){
        .first_layer = first,
        .n_layers = n_layers,
        .arena = arena,
        .kv_dtype = KERN_F16,
        .slot_page = slot_page,
        .lists = {.page = page,
                  .block = block,
                  .n_blocks = n_blocks,
                  .capacity = capacity,
                  .seq_stride = 1},
    };
}

#endif
