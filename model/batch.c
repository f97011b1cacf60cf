/* Filling the arrays of a pass. Nothing allocates; page tables go straight from the pool to the
 * backend. */
#include "model/batch.h"

#include <string.h>

#include "base/checked.h"
#include "base/err.h"

static void *take(uint8_t *base, size_t *used, size_t bytes) {
    void *p = base ? base + *used : NULL;
    *used += align_up(bytes, KERN_ACT_ALIGN);
    return p;
}

void *model_carve_host(struct model_carve *c, size_t bytes) {
    return take(c->host, &c->host_used, bytes);
}

void *model_carve_dev(struct model_carve *c, size_t bytes) {
    return take(c->dev, &c->dev_used, bytes);
}

void model_carve_array(struct model_carve *c, struct model_array *a, size_t n, size_t size) {
    a->bytes = n * size;
    a->host = model_carve_host(c, a->bytes);
    a->dev = model_carve_dev(c, a->bytes);
}

int model_array_put(struct kern *k, const struct model_array *a, int n, size_t size,
                    struct err *e) {
    size_t bytes = (size_t)n * size;
    ASSERT(bytes <= a->bytes);
    return bytes ? k->ops->upload(k, a->dev, a->host, bytes, e) : 0;
}

/* Counts are bounded by the caller's checks of rows, sequences and the model's config: no product
 * here overflows. */
void model_batch_layout(struct model_batch *b, struct model_carve *c, const struct model_caps *caps,
                        int n_groups) {
    size_t rows = (size_t)caps->max_rows, seqs = (size_t)caps->max_seqs, i32 = sizeof(int32_t);
    size_t blocks = (size_t)caps->max_blocks;
    b->caps = *caps;
    b->n_groups = n_groups;
    model_carve_array(c, &b->token, rows, i32);
    model_carve_array(c, &b->position, rows, i32);
    model_carve_array(c, &b->row_seq, rows, i32);
    model_carve_array(c, &b->seq_row, seqs, i32);
    model_carve_array(c, &b->seq_n_rows, seqs, i32);
    model_carve_array(c, &b->logit_row, (size_t)caps->max_logits, i32);
    for (int i = 0; i < n_groups; i++) {
        model_carve_array(c, &b->slot_page[i], rows, i32);
        model_carve_array(c, &b->n_blocks[i], seqs, i32);
        b->dev_list[i] = model_carve_dev(c, seqs * blocks * i32);
    }
    b->dev_block = model_carve_dev(c, seqs * blocks * i32);
    b->block = model_carve_host(c, blocks * i32);
    b->page = model_carve_host(c, blocks * i32);
    b->holed = model_carve_host(c, seqs * sizeof *b->holed);
    b->dev_kv_bytes = model_carve_dev(c, sizeof *b->dev_kv_bytes);
}

static int put_blocks(struct model_batch *b, struct kern *k, int seq_idx, const int32_t *block,
                      int n, struct err *e) {
    size_t at = (size_t)seq_idx * (size_t)b->caps.max_blocks;
    return k->ops->upload(k, b->dev_block + at, block, (size_t)n * sizeof *block, e);
}

int model_batch_init(struct model_batch *b, struct kern *k, struct err *e) {
    for (int i = 0; i < b->caps.max_blocks; i++) b->block[i] = i;
    memset(b->holed, 0, (size_t)b->caps.max_seqs * sizeof *b->holed);
    for (int i = 0; i < b->caps.max_seqs; i++) {
        int rc = put_blocks(b, k, i, b->block, b->caps.max_blocks, e);
        if (rc) return rc;
    }
    return 0;
}

void model_batch_begin(struct model_batch *b) {
    b->n_gen = b->n_prompt = b->n_seqs = b->n_logits = 0;
}

int model_batch_add(struct model_batch *b, const int32_t *ids, int n_rows, int first_position,
                    bool prompt, int *first_row) {
    int32_t *token = b->token.host, *position = b->position.host, *row_seq = b->row_seq.host;
    int row = b->n_gen + b->n_prompt, seq_idx = b->n_seqs++;
    ASSERT(n_rows > 0 && row + n_rows <= b->caps.max_rows && seq_idx < b->caps.max_seqs);
    ASSERT(prompt || b->n_prompt == 0); /* generated rows come first */
    ((int32_t *)b->seq_row.host)[seq_idx] = row;
    ((int32_t *)b->seq_n_rows.host)[seq_idx] = n_rows;
    memcpy(token + row, ids, (size_t)n_rows * sizeof *token);
    for (int i = 0; i < n_rows; i++) {
        position[row + i] = first_position + i;
        row_seq[row + i] = seq_idx;
    }
    if (prompt) b->n_prompt += n_rows;
    else b->n_gen += n_rows;
    *first_row = row;
    return seq_idx;
}

int model_batch_want(struct model_batch *b, int row) {
    ASSERT(b->n_logits < b->caps.max_logits && row < b->n_gen + b->n_prompt);
    ((int32_t *)b->logit_row.host)[b->n_logits] = row;
    return b->n_logits++;
}

/* Blocks without the hole: pages into b->page, indexes straight to the backend. */
static int put_holed(struct model_batch *b, struct kern *k, int seq_idx, const int32_t *pages,
                     int n_blocks, int hole_first, int hole_end, struct err *e) {
    size_t at = (size_t)seq_idx * (size_t)b->caps.max_blocks,
           behind = (size_t)(n_blocks - hole_end);
    memcpy(b->page, pages, (size_t)hole_first * sizeof *pages);
    memcpy(b->page + hole_first, pages + hole_end, behind * sizeof *pages);
    b->holed[seq_idx] = true;
    int rc = put_blocks(b, k, seq_idx, b->block, hole_first, e);
    if (!rc)
        rc = k->ops->upload(k, b->dev_block + at + hole_first, b->block + hole_end,
                            behind * sizeof *b->block, e);
    return rc;
}

int model_batch_pages(struct model_batch *b, struct kern *k, int seq_idx, int group,
                      const int32_t *pages, int n_blocks, int hole_first, int hole_end,
                      struct err *e) {
    int row = ((int32_t *)b->seq_row.host)[seq_idx];
    int n_rows = ((int32_t *)b->seq_n_rows.host)[seq_idx], rc = 0;
    const int32_t *position = (int32_t *)b->position.host + row;
    int32_t *slot = (int32_t *)b->slot_page[group].host + row;
    ASSERT(n_blocks <= b->caps.max_blocks && position[n_rows - 1] / KERN_BLOCK < n_blocks);
    ASSERT(0 <= hole_first && hole_first <= hole_end && hole_end < n_blocks);
    for (int i = 0; i < n_rows; i++) {
        slot[i] = pages[position[i] / KERN_BLOCK];
        ASSERT(slot[i] >= 0);
    }
    if (hole_first < hole_end) {
        rc = put_holed(b, k, seq_idx, pages, n_blocks, hole_first, hole_end, e);
        pages = b->page;
        n_blocks -= hole_end - hole_first;
    } else if (b->holed[seq_idx]) {
        rc = put_blocks(b, k, seq_idx, b->block, b->caps.max_blocks, e);
        b->holed[seq_idx] = false;
    }
    ((int32_t *)b->n_blocks[group].host)[seq_idx] = n_blocks;
    if (rc) return rc;
    return k->ops->upload(k, b->dev_list[group] + (size_t)seq_idx * (size_t)b->caps.max_blocks,
                          pages, (size_t)n_blocks * sizeof *pages, e);
}

static int upload_all(struct model_batch *b, struct kern *k, struct err *e) {
    int rows = b->n_gen + b->n_prompt, rc = 0;
    size_t i32 = sizeof(int32_t);
    uint64_t zero = 0;
    const struct {
        const struct model_array *array;
        int n;
    } list[] = {{&b->token, rows},           {&b->position, rows},
                {&b->row_seq, rows},         {&b->seq_row, b->n_seqs},
                {&b->seq_n_rows, b->n_seqs}, {&b->logit_row, b->n_logits}};
    for (size_t i = 0; i < sizeof list / sizeof *list && !rc; i++)
        rc = model_array_put(k, list[i].array, list[i].n, i32, e);
    for (int i = 0; i < b->n_groups && !rc; i++) {
        rc = model_array_put(k, &b->slot_page[i], rows, i32, e);
        if (!rc) rc = model_array_put(k, &b->n_blocks[i], b->n_seqs, i32, e);
    }
    return rc ? rc : k->ops->upload(k, b->dev_kv_bytes, &zero, sizeof zero, e);
}

int model_batch_finish(struct model_batch *b, struct kern *k, struct model_pass *pass,
                       struct err *e) {
    *pass = (struct model_pass){
        .batch = {.rows = {.n_gen = b->n_gen, .n_prompt = b->n_prompt},
                  .token = b->token.dev,
                  .position = b->position.dev,
                  .row_seq = b->row_seq.dev,
                  .n_seqs = b->n_seqs,
                  .seq_row = b->seq_row.dev,
                  .seq_n_rows = b->seq_n_rows.dev},
        .n_groups = b->n_groups,
        .n_logits = b->n_logits,
        .logit_row = b->logit_row.dev,
    };
    for (int i = 0; i < b->n_groups; i++)
        pass->group[i] = (struct model_group){
            .slot_page = b->slot_page[i].dev,
            .lists = {.page = b->dev_list[i],
                      .block = b->dev_block,
                      .n_blocks = b->n_blocks[i].dev,
                      .capacity = b->caps.max_blocks,
                      .seq_stride = 1,
                      .head_stride = 0},
            .taps = {.kv_bytes_read = b->dev_kv_bytes},
        };
    return upload_all(b, k, e);
}
