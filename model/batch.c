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
    for (int i = 0; i < b->n_groups; i++) carve_list(c, &b->block[i], seqs * blocks);
    b->counting = model_carve_host(c, blocks * sizeof *b->counting);
    for (int i = 0; i < b->n_groups; i++)
        b->fewer[i] = model_carve_host(c, seqs * sizeof *b->fewer[i]);
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
    size_t n = (size_t)b->caps.max_blocks;
    for (int g = 0; g < b->n_groups; g++) {
        for (size_t i = 0; i < (size_t)b->caps.max_seqs; i++)
            memcpy(b->block[g].host + i * n, b->counting, n * sizeof *b->counting);
        b->block[g].hi = (size_t)b->caps.max_seqs * n;
        int rc = put_list(&b->block[g], k, e);
        if (rc) return rc;
    }
    return k->ops->sync(k, e);
}

/* ---- Rows ---- */

void model_batch_begin(struct model_batch *b) {
    b->n_gen = b->n_prompt = b->n_seqs = b->n_logits = 0;
    b->own.used = false;
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

/* Entries [lo, hi) changed. */
static void note_change(struct model_list *l, size_t lo, size_t hi) {
    if (l->lo == l->hi || lo < l->lo) l->lo = lo;
    if (hi > l->hi) l->hi = hi;
}

/* Entries at.. of a list are v[0..n) now; returns whether they were others. Pages of one sequence
 * change at its end alone; another sequence in its place changes all. */
static bool set_list(struct model_list *l, size_t at, const int32_t *v, int n) {
    int32_t *to = l->host + at;
    int first = 0, end = n;
    if (memcmp(to, v, (size_t)n * sizeof *v) == 0) return false;
    while (to[first] == v[first]) first++;
    while (to[end - 1] == v[end - 1]) end--;
    memcpy(to + first, v + first, (size_t)(end - first) * sizeof *v);
    note_change(l, at + (size_t)first, at + (size_t)end);
    return true;
}

/* The same with v[pick[0]], v[pick[1]], ... */
static bool set_picked(struct model_list *l, size_t at, const int32_t *v, const int32_t *pick,
                       int n) {
    int32_t *to = l->host + at;
    int first = n, end = 0;
    for (int i = 0; i < n; i++) {
        if (to[i] == v[pick[i]]) continue;
        to[i] = v[pick[i]];
        if (first == n) first = i;
        end = i + 1;
    }
    if (first >= end) return false;
    note_change(l, at + (size_t)first, at + (size_t)end);
    return true;
}

static void check_read(const int32_t *pages, const int32_t *read, int n_read) {
    for (int i = 0; i < n_read; i++)
        ASSERT(pages[read[i]] >= 0 && (i == 0 || read[i - 1] < read[i]));
}

void model_batch_pages(struct model_batch *b, int seq_idx, int group, const int32_t *pages,
                       const int32_t *read, int n_read) {
    int row = ((int32_t *)b->seq_row.host)[seq_idx];
    int n_rows = ((int32_t *)b->seq_n_rows.host)[seq_idx];
    size_t at = (size_t)seq_idx * (size_t)b->caps.max_blocks;
    const int32_t *position = (int32_t *)b->position.host + row;
    int32_t *slot = (int32_t *)b->slot_page[group].host + row;
    bool *fewer = &b->fewer[group][seq_idx], changed;
    ASSERT(n_read > 0 && n_read <= b->caps.max_blocks);
    ASSERT(position[n_rows - 1] / KERN_BLOCK <= (read ? read[n_read - 1] : n_read - 1));
    for (int i = 0; i < n_rows; i++) {
        slot[i] = pages[position[i] / KERN_BLOCK];
        ASSERT(slot[i] >= 0);
    }
    ((int32_t *)b->n_blocks[group].host)[seq_idx] = n_read;
    if (read) {
        check_read(pages, read, n_read);
        changed = set_picked(&b->page[group], at, pages, read, n_read);
        set_list(&b->block[group], at, read, n_read);
    } else {
        changed = set_list(&b->page[group], at, pages, n_read);
        if (*fewer) set_list(&b->block[group], at, b->counting, b->caps.max_blocks);
    }
    *fewer = read != NULL;
    if (changed && b->own.n_layers > 0 && group == b->own.group) b->own.seq[seq_idx].stale = true;
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
        if (b->own.used) model_batch_idle_own(b, b->n_seqs, b->n_seqs + 1);
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
    int rc = 0;
    for (int i = 0; i < b->n_groups; i++) {
        pass->group[i] = (struct model_group){
            .slot_page = b->slot_page[i].dev,
            .lists = {.page = b->page[i].dev,
                      .block = b->block[i].dev,
                      .n_blocks = b->n_blocks[i].dev,
                      .capacity = b->caps.max_blocks,
                      .seq_stride = 1,
                      .head_stride = 0},
            .taps = {.kv_bytes_read = kv_bytes ? kv_bytes + i : NULL},
        };
        if (!rc) rc = put_list(&b->block[i], k, e);
        if (!rc) rc = put_list(&b->page[i], k, e);
    }
    if (!rc && b->own.used) rc = model_batch_finish_own(b, k, &pass->group[b->own.group], e);
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
