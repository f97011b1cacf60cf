/* Filling the arrays of a pass. Nothing allocates. */
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

size_t model_array_span(const struct model_array *first, const struct model_array *last, int n,
                        size_t size) {
    size_t before = (size_t)((uint8_t *)last->dev - (uint8_t *)first->dev);
    ASSERT((size_t)((uint8_t *)last->host - (uint8_t *)first->host) == before);
    ASSERT(n >= 0 && (size_t)n * size <= last->bytes);
    return before + (size_t)n * size;
}

/* ---- Layout ---- */

/* Counts are bounded by the caller's checks of rows, sequences and the model's config: no product
 * here overflows. */
void model_batch_arrays(struct model_batch *b, struct model_carve *c, const struct model_caps *caps,
                        int n_groups) {
    size_t rows = (size_t)caps->max_rows, seqs = (size_t)caps->max_seqs, i32 = sizeof(int32_t);
    b->caps = *caps;
    b->n_groups = n_groups;
    model_carve_array(c, &b->token, rows, i32);
    model_carve_array(c, &b->position, rows, i32);
    model_carve_array(c, &b->row_seq, rows, i32);
    for (int i = 0; i < n_groups; i++) model_carve_array(c, &b->slot_page[i], rows, i32);
    for (int i = 0; i < n_groups; i++) model_carve_array(c, &b->n_blocks[i], seqs, i32);
    model_carve_array(c, &b->seq_row, seqs, i32);
    model_carve_array(c, &b->seq_n_rows, seqs, i32);
    model_carve_array(c, &b->logit_row, (size_t)caps->max_logits, i32);
}

static void carve_list(struct model_carve *c, struct model_list *l, size_t n) {
    l->host = model_carve_host(c, n * sizeof *l->host);
    l->dev = model_carve_dev(c, n * sizeof *l->dev);
    l->lo = l->hi = 0;
}

void model_batch_lists(struct model_batch *b, struct model_carve *c) {
    size_t seqs = (size_t)b->caps.max_seqs, blocks = (size_t)b->caps.max_blocks;
    for (int i = 0; i < b->n_groups; i++) carve_list(c, &b->page[i], seqs * blocks);
    carve_list(c, &b->block, seqs * blocks);
    b->counting = model_carve_host(c, blocks * sizeof *b->counting);
    b->holed = model_carve_host(c, seqs * sizeof *b->holed);
}

static int put_list(struct model_list *l, struct kern *k, struct err *e) {
    if (l->lo == l->hi) return 0;
    size_t bytes = (l->hi - l->lo) * sizeof *l->host, lo = l->lo;
    l->lo = l->hi = 0;
    return k->ops->upload(k, l->dev + lo, l->host + lo, bytes, e);
}

int model_batch_init(struct model_batch *b, struct kern *k, struct err *e) {
    struct kern_device_info info;
    k->ops->info(k, &info);
    b->records = info.records;
    for (int i = 0; i < b->caps.max_blocks; i++) b->counting[i] = i;
    for (int i = 0; i < b->caps.max_seqs; i++)
        memcpy(b->block.host + (size_t)i * (size_t)b->caps.max_blocks, b->counting,
               (size_t)b->caps.max_blocks * sizeof *b->counting);
    b->block.hi = (size_t)b->caps.max_seqs * (size_t)b->caps.max_blocks;
    int rc = put_list(&b->block, k, e);
    return rc ? rc : k->ops->sync(k, e);
}

/* ---- Rows ---- */

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

/* ---- Lists ---- */

/* Entries at.. of a list are v[0..n) now. Pages of one sequence change at its end alone; another
 * sequence in its place changes all. */
static void set_list(struct model_list *l, size_t at, const int32_t *v, int n) {
    int32_t *to = l->host + at;
    int first = 0, end = n;
    if (memcmp(to, v, (size_t)n * sizeof *v) == 0) return;
    while (to[first] == v[first]) first++;
    while (to[end - 1] == v[end - 1]) end--;
    memcpy(to + first, v + first, (size_t)(end - first) * sizeof *v);
    size_t lo = at + (size_t)first, hi = at + (size_t)end;
    if (l->lo == l->hi || lo < l->lo) l->lo = lo;
    if (hi > l->hi) l->hi = hi;
}

/* v without [hole_first, hole_end). */
static void set_holed(struct model_list *l, size_t at, const int32_t *v, int n, int hole_first,
                      int hole_end) {
    set_list(l, at, v, hole_first);
    set_list(l, at + (size_t)hole_first, v + hole_end, n - hole_end);
}

void model_batch_pages(struct model_batch *b, int seq_idx, int group, const int32_t *pages,
                       int n_blocks, int hole_first, int hole_end) {
    int row = ((int32_t *)b->seq_row.host)[seq_idx];
    int n_rows = ((int32_t *)b->seq_n_rows.host)[seq_idx];
    size_t at = (size_t)seq_idx * (size_t)b->caps.max_blocks;
    const int32_t *position = (int32_t *)b->position.host + row;
    int32_t *slot = (int32_t *)b->slot_page[group].host + row;
    bool holed = hole_first < hole_end;
    ASSERT(n_blocks <= b->caps.max_blocks && position[n_rows - 1] / KERN_BLOCK < n_blocks);
    ASSERT(0 <= hole_first && hole_first <= hole_end && hole_end < n_blocks);
    for (int i = 0; i < n_rows; i++) {
        slot[i] = pages[position[i] / KERN_BLOCK];
        ASSERT(slot[i] >= 0);
    }
    ((int32_t *)b->n_blocks[group].host)[seq_idx] = n_blocks - (hole_end - hole_first);
    set_holed(&b->page[group], at, pages, n_blocks, hole_first, hole_end);
    if (holed) set_holed(&b->block, at, b->counting, n_blocks, hole_first, hole_end);
    else if (b->holed[seq_idx]) set_list(&b->block, at, b->counting, b->caps.max_blocks);
    b->holed[seq_idx] = holed;
}

/* ---- The end ---- */

int model_batch_round(const struct model_batch *b, int n) {
    int step = 1;
    if (!b->records || n <= 4) return n;
    while (8 * step <= n) step *= 2;
    return (n + step - 1) / step * step;
}

void model_batch_pad(struct model_batch *b, int n_rows, int n_seqs, int n_logits) {
    int idle = b->n_gen;
    ASSERT(n_rows <= b->caps.max_rows && n_seqs <= b->caps.max_seqs);
    ASSERT(n_logits <= b->caps.max_logits);
    ASSERT(b->n_prompt == 0 || (n_rows <= b->n_gen + b->n_prompt && n_seqs <= b->n_seqs));
    for (; b->n_gen + b->n_prompt < n_rows; b->n_gen++) {
        ((int32_t *)b->token.host)[b->n_gen] = ((int32_t *)b->row_seq.host)[b->n_gen] = -1;
        ((int32_t *)b->position.host)[b->n_gen] = 0;
        for (int i = 0; i < b->n_groups; i++) ((int32_t *)b->slot_page[i].host)[b->n_gen] = 0;
    }
    for (; b->n_seqs < n_seqs; b->n_seqs++) {
        ((int32_t *)b->seq_row.host)[b->n_seqs] = b->n_gen;
        ((int32_t *)b->seq_n_rows.host)[b->n_seqs] = 0;
        for (int i = 0; i < b->n_groups; i++) ((int32_t *)b->n_blocks[i].host)[b->n_seqs] = 0;
    }
    for (; b->n_logits < n_logits; b->n_logits++)
        ((int32_t *)b->logit_row.host)[b->n_logits] = idle < b->n_gen ? idle++ : 0;
}

int model_batch_finish(struct model_batch *b, struct kern *k, const struct model_array *last,
                       int n_last, size_t size_last, uint64_t *kv_bytes, struct model_pass *pass,
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
    int rc = put_list(&b->block, k, e);
    for (int i = 0; i < b->n_groups; i++) {
        pass->group[i] = (struct model_group){
            .slot_page = b->slot_page[i].dev,
            .lists = {.page = b->page[i].dev,
                      .block = b->block.dev,
                      .n_blocks = b->n_blocks[i].dev,
                      .capacity = b->caps.max_blocks,
                      .seq_stride = 1,
                      .head_stride = 0},
            .taps = {.kv_bytes_read = kv_bytes},
        };
        if (!rc) rc = put_list(&b->page[i], k, e);
    }
    return rc ? rc
              : k->ops->upload(k, b->token.dev, b->token.host,
                               model_array_span(&b->token, last, n_last, size_last), e);
}

void model_batch_key(const struct model_batch *b, const struct model_pass *pass, uint64_t more,
                     uint64_t key[KERN_RECORD_KEY]) {
    ASSERT(pass->batch.rows.n_prompt == 0);
    key[0] = (uint64_t)(uintptr_t)b;
    key[1] = (uint64_t)pass->batch.rows.n_gen;
    key[2] = (uint64_t)pass->batch.n_seqs;
    key[3] = (uint64_t)pass->n_logits;
    key[4] = pass->group[0].taps.kv_bytes_read != NULL;
    key[5] = more;
}
