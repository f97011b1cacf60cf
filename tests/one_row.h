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

#endif
