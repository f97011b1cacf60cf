/* Lists that differ by layer and KV head. A sequence has many, and they seldom change: when another
 * selection is made, and at their ends when a page joins. So what stands there is known by the
 * selection's number and the page table, and a sequence's lists are uploaded together. */
#include <string.h>

#include "base/err.h"
#include "model/batch.h"

static size_t n_of_seq(const struct model_own_lists *o) {
    return (size_t)o->n_layers * (size_t)o->n_heads;
}

void model_batch_own(struct model_batch *b, struct model_carve *c, int group, int n_layers,
                     int n_heads, bool quarters) {
    struct model_own_lists *o = &b->own;
    *o = (struct model_own_lists){.group = group, .n_layers = n_layers, .n_heads = n_heads};
    if (n_layers == 0) return;
    size_t seqs = (size_t)b->caps.max_seqs, lists = seqs * n_of_seq(o);
    size_t bytes = lists * (size_t)b->caps.max_blocks * sizeof *o->page;
    o->page = model_carve_host(c, bytes);
    o->dev_page = model_carve_dev(c, bytes);
    o->block = model_carve_host(c, bytes);
    o->dev_block = model_carve_dev(c, bytes);
    if (quarters) {
        o->quarters = model_carve_host(c, bytes / sizeof *o->page);
        o->dev_quarters = model_carve_dev(c, bytes / sizeof *o->page);
    }
    model_carve_array(c, &o->n_blocks, lists, sizeof(int32_t));
    o->seq = model_carve_host(c, seqs * sizeof *o->seq);
}

void model_batch_use_own(struct model_batch *b) {
    ASSERT(b->own.n_layers > 0 && b->n_seqs == 0);
    b->own.used = true;
}

bool model_batch_begin_own(struct model_batch *b, int seq_idx, uint64_t id, int n_pages) {
    struct model_own_seq *s = &b->own.seq[seq_idx];
    ASSERT(b->own.used && seq_idx < b->n_seqs);
    /* n_pages 0: nothing stands there yet. */
    if (s->n_pages == n_pages && s->id == id && !s->stale) return false;
    *s = (struct model_own_seq){.id = id, .n_pages = n_pages, .fresh = true};
    return true;
}

static size_t list_at(const struct model_own_lists *o, int seq_idx, int layer, int head) {
    return (size_t)seq_idx * n_of_seq(o) + (size_t)layer * (size_t)o->n_heads + (size_t)head;
}

void model_batch_put_own(struct model_batch *b, int seq_idx, int layer, int head,
                         const int32_t *pages, const int32_t *read, const uint8_t *quarters,
                         int n_read) {
    struct model_own_lists *o = &b->own;
    size_t list = list_at(o, seq_idx, layer, head), at = list * (size_t)b->caps.max_blocks;
    const int32_t *which = read ? read : b->counting;
    ASSERT(o->seq[seq_idx].fresh && layer < o->n_layers && head < o->n_heads);
    ASSERT(n_read > 0 && n_read <= b->caps.max_blocks);
    for (int i = 0; i < n_read; i++) {
        ASSERT(pages[which[i]] >= 0 && (i == 0 || which[i - 1] < which[i]));
        o->page[at + (size_t)i] = pages[which[i]];
    }
    memcpy(o->block + at, which, (size_t)n_read * sizeof *which);
    ASSERT(!quarters || o->quarters);
    if (quarters) memcpy(o->quarters + at, quarters, (size_t)n_read);
    else if (o->quarters) memset(o->quarters + at, 15, (size_t)n_read);
    ((int32_t *)o->n_blocks.host)[list] = n_read;
}

void model_batch_idle_own(struct model_batch *b, int first, int end) {
    struct model_own_lists *o = &b->own;
    for (int s = first; s < end; s++) {
        o->seq[s].n_pages = 0;
        memset((int32_t *)o->n_blocks.host + list_at(o, s, 0, 0), 0, n_of_seq(o) * sizeof(int32_t));
    }
}

static int put_seq(const struct model_batch *b, struct kern *k, int seq_idx, struct err *e) {
    const struct model_own_lists *o = &b->own;
    size_t n = n_of_seq(o) * (size_t)b->caps.max_blocks, at = (size_t)seq_idx * n;
    int rc = k->ops->upload(k, o->dev_page + at, o->page + at, n * sizeof *o->page, e);
    if (!rc) rc = k->ops->upload(k, o->dev_block + at, o->block + at, n * sizeof *o->block, e);
    if (rc || !o->quarters) return rc;
    return k->ops->upload(k, o->dev_quarters + at, o->quarters + at, n, e);
}

int model_batch_finish_own(struct model_batch *b, struct kern *k, struct model_group *g,
                           struct err *e) {
    struct model_own_lists *o = &b->own;
    int rc = 0;
    for (int s = 0; s < b->n_seqs && !rc; s++) {
        if (!o->seq[s].fresh) continue;
        o->seq[s].fresh = false;
        rc = put_seq(b, k, s, e);
    }
    if (!rc)
        rc = k->ops->upload(k, o->n_blocks.dev, o->n_blocks.host,
                            (size_t)b->n_seqs * n_of_seq(o) * sizeof(int32_t), e);
    g->lists = (struct kern_lists){.page = o->dev_page,
                                   .block = o->dev_block,
                                   .n_blocks = o->n_blocks.dev,
                                   .capacity = b->caps.max_blocks,
                                   .seq_stride = (int)n_of_seq(o),
                                   .head_stride = o->n_heads > 1,
                                   .quarters = o->dev_quarters};
    g->layer_lists = (size_t)o->n_heads;
    return rc;
}
