#ifndef TANDEM_MODEL_BATCH_H
#define TANDEM_MODEL_BATCH_H

/* The arrays of a pass: the host fills its copies sequence by sequence, uploads what is used, and
 * gets a model_pass that points at the backend's. Target and draft have one each. Buffers are
 * carved from two blocks of the caller's, so that one layout counts (the plan prints the sums) and
 * carves. The host's block is kern_ops.host_reserve's: nothing in it may be written between an
 * upload and the next sync, so a batch is filled once a sync. */

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

/* An array that host and backend both have. Arrays that are carved one after another, with nothing
 * else between, lie as far apart on both sides: one copy moves them all. */
struct model_array {
    void *host, *dev;
    size_t bytes; /* capacity */
};
void model_carve_array(struct model_carve *c, struct model_array *a, size_t n, size_t size);
/* Bytes from the start of `first` to the end of the first n entries of `last`, an array carved
 * after it. */
size_t model_array_span(const struct model_array *first, const struct model_array *last, int n,
                        size_t size);

/* What the backend holds of every sequence's list, kept by the host, too, so that only what changed
 * is uploaded. */
struct model_list {
    int32_t *host, *dev; /* [max_seqs][max_blocks] */
    size_t lo, hi;       /* entries [lo, hi) changed since the last upload */
};

/* Lists of one group that differ by layer, and by KV head where n_heads > 1, beside its common
 * ones: a pass uses the ones or the others. */
struct model_own_lists {
    int group, n_layers, n_heads;                 /* n_layers 0: there are none */
    bool used;                                    /* in this pass */
    int32_t *page, *block, *dev_page, *dev_block; /* [max_seqs][n_layers][n_heads][max_blocks] */
    uint8_t *quarters, *dev_quarters;             /* the same; NULL: all of every block is read */
    struct model_array n_blocks;                  /* i32 [max_seqs][n_layers][n_heads] */
    struct model_own_seq {
        uint64_t id;       /* of the lists that stand there */
        int n_pages;       /* of the sequence then */
        bool stale, fresh; /* its pages changed since; to be uploaded */
    } * seq;               /* host, [max_seqs] */
};

struct model_batch {
    struct model_caps caps;
    int n_groups;
    bool records; /* the backend keeps recordings: see model_batch_finish */
    struct model_array token, position, row_seq, seq_row, seq_n_rows, logit_row;
    struct model_array slot_page[MODEL_MAX_GROUPS], n_blocks[MODEL_MAX_GROUPS];
    struct model_list page[MODEL_MAX_GROUPS];  /* page ids */
    struct model_list block[MODEL_MAX_GROUPS]; /* block indexes: 0, 1, 2, ... or fewer */
    int32_t *counting;                         /* host, [max_blocks]: 0, 1, 2, ... */
    bool *fewer[MODEL_MAX_GROUPS];             /* [max_seqs] block's row is not 0, 1, 2, ... now */
    struct model_own_lists own;
    int n_gen, n_prompt, n_seqs, n_logits;
};

/* Lay out every array for caps and n_groups at the carve's cursors, then, behind arrays of the
 * caller's that are uploaded with them, the lists. */
void model_batch_arrays(struct model_batch *b, struct model_carve *c, const struct model_caps *caps,
                        int n_groups);
void model_batch_lists(struct model_batch *b, struct model_carve *c);
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

/* What sequence seq_idx reads in a group: the blocks read[0..n_read), ascending, all that its rows
 * write among them; NULL: 0..n_read-1. pages: of blocks 0 onwards, -1 where nothing may be read. */
void model_batch_pages(struct model_batch *b, int seq_idx, int group, const int32_t *pages,
                       const int32_t *read, int n_read);

/* Own lists (own.c). Lay them out, behind the common ones; n_layers 0: there are none. */
void model_batch_own(struct model_batch *b, struct model_carve *c, int group, int n_layers,
                     int n_heads, bool quarters);
/* Behind model_batch_begin: this pass reads by them. Every sequence then needs model_batch_pages of
 * their group with all its blocks, and its lists as follows. */
void model_batch_use_own(struct model_batch *b);
/* Lists of sequence seq_idx, that has n_pages pages, are to be those of `id` (0: of everything):
 * false where they stand there already, else put those of each layer and KV head. Equal ids mean
 * equal lists but for what grew behind the selected blocks since. */
bool model_batch_begin_own(struct model_batch *b, int seq_idx, uint64_t id, int n_pages);
/* As model_batch_pages, which must have come before. quarters: [n_read] of each block, NULL: all.
 */
void model_batch_put_own(struct model_batch *b, int seq_idx, int layer, int head,
                         const int32_t *pages, const int32_t *read, const uint8_t *quarters,
                         int n_read);
/* Of sequences [first, end): they read nothing. Then: upload what changed, and the group's lists.
 */
void model_batch_idle_own(struct model_batch *b, int first, int end);
int model_batch_finish_own(struct model_batch *b, struct kern *k, struct model_group *g,
                           struct err *e);

/* A count of rows or sequences to which others are rounded up where the backend records, so that
 * few shapes occur: exact where small, then in steps of an eighth to a quarter. */
int model_batch_round(const struct model_batch *b, int n);

/* Add idle rows, sequences without rows, and logits of idle rows (of row 0 where there is none), up
 * to these counts. Generated rows alone. */
void model_batch_pad(struct model_batch *b, int n_rows, int n_seqs, int n_logits);

/* Upload what is used and describe the pass: batch, groups' lists and slots, logits rows. Arrays of
 * the caller's go along: everything from `token` to n_last entries of `last` (of size_last bytes)
 * in one copy; lists where they changed. kv_bytes: [n_groups] counters of what attention reads, or
 * NULL. The caller fills in the groups' layers, arena and type, and where logits go. */
int model_batch_finish(struct model_batch *b, struct kern *k, const struct model_array *last,
                       int n_last, size_t size_last, uint64_t *kv_bytes, struct model_pass *pass,
                       struct err *e);

/* Name of a pass's recording: its batch and shape; what else tells recordings apart is the
 * caller's, in `more`. */
void model_batch_key(const struct model_batch *b, const struct model_pass *pass, uint64_t more,
                     uint64_t key[KERN_RECORD_KEY]);

#endif
