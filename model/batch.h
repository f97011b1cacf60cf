#ifndef TANDEM_MODEL_BATCH_H
#define TANDEM_MODEL_BATCH_H

/* The arrays of a pass: the host fills its copies sequence by sequence, uploads what is used, and
 * gets a model_pass that points at the backend's. Target and draft have one each. Buffers are
 * carved from two blocks of the caller's, so that one layout counts (the plan prints the sums) and
 * carves. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/model.h"

/* Two cursors, over host and backend memory; a NULL base only counts. */
struct model_carve {
    uint8_t *host, *dev;
    size_t host_used, dev_used;
};
void *model_carve_host(struct model_carve *c, size_t bytes);
void *model_carve_dev(struct model_carve *c, size_t bytes);

/* An array that the host fills and the backend reads. */
struct model_array {
    void *host, *dev;
    size_t bytes; /* capacity */
};
void model_carve_array(struct model_carve *c, struct model_array *a, size_t n, size_t size);
/* Upload the first n entries of `size` bytes. */
int model_array_put(struct kern *k, const struct model_array *a, int n, size_t size, struct err *e);

struct model_batch {
    struct model_caps caps;
    int n_groups;
    struct model_array token, position, row_seq, seq_row, seq_n_rows, logit_row;
    struct model_array slot_page[MODEL_MAX_GROUPS], n_blocks[MODEL_MAX_GROUPS];
    int32_t *dev_list[MODEL_MAX_GROUPS]; /* [max_seqs][max_blocks] page ids */
    int32_t *dev_block;                  /* the same shape: block indexes, 0, 1, 2, ... */
    int32_t *block;                      /* host, [max_blocks]: 0, 1, 2, ... */
    int32_t *page;                       /* host, [max_blocks], staging of a list with a hole */
    bool *holed;                         /* [max_seqs] dev_block's row is not 0, 1, 2, ... now */
    uint64_t *dev_kv_bytes;              /* bytes of K and V that the pass read */
    int n_gen, n_prompt, n_seqs, n_logits;
};

/* Lay out every array for caps and n_groups at the carve's cursors. */
void model_batch_layout(struct model_batch *b, struct model_carve *c, const struct model_caps *caps,
                        int n_groups);
/* After carving: the block indexes. */
int model_batch_init(struct model_batch *b, struct kern *k, struct err *e);

/* Empty it. */
void model_batch_begin(struct model_batch *b);

/* Add a sequence's next n_rows rows: tokens ids[0..n_rows) at positions first_position onwards.
 * Generated ones must be added before prompt ones. Returns the sequence's index; *first_row gets
 * its first row. */
int model_batch_add(struct model_batch *b, const int32_t *ids, int n_rows, int first_position,
                    bool prompt, int *first_row);

/* Ask for a row's logits; returns their index. */
int model_batch_want(struct model_batch *b, int row);

/* The pages of sequence seq_idx in a group: blocks 0..n_blocks-1, all that its rows write among
 * them. Blocks [hole_first, hole_end) are not read (hole_first == hole_end: none). The list goes to
 * the backend at once. */
int model_batch_pages(struct model_batch *b, struct kern *k, int seq_idx, int group,
                      const int32_t *pages, int n_blocks, int hole_first, int hole_end,
                      struct err *e);

/* Upload the arrays and describe the pass: batch, groups' lists and slots, logits rows. The caller
 * fills in the groups' layers, arena and type, and where logits go. */
int model_batch_finish(struct model_batch *b, struct kern *k, struct model_pass *pass,
                       struct err *e);

#endif
