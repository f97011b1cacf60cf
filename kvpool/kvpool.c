/* Opening, closing and looking at a pool. All bookkeeping is one allocation: `layout` names every
 * array once, for the size that the plan prints and for the pointers. */
#include "kvpool/kvpool_private.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

enum { REGION_ALIGN = 64 };

struct layout {
    struct kvpool_geometry g;
    int max_ppe, n_nodes, n_buckets;
    size_t extents, slots, seqs, tables, nodes, buckets; /* offsets */
    size_t bytes;
};

static bool add_region(struct layout *l, size_t *offset, size_t n, size_t size) {
    size_t bytes;
    *offset = l->bytes;
    return checked_mul(n, size, &bytes) && checked_add(l->bytes, bytes, &bytes) &&
           checked_align(bytes, REGION_ALIGN, &l->bytes);
}

static int layout_make(const struct kvpool_options *o, struct layout *l, struct err *e) {
    memset(l, 0, sizeof *l);
    int rc = kvpool_geometry(o, &l->g, e);
    if (rc) return rc;
    if (o->max_seqs < 1 || o->max_seqs > 1 << 20)
        return err_raise(e, E_RANGE, "KV pool: max_seqs %d outside 1..%d", o->max_seqs, 1 << 20);
    if (o->max_blocks < 1 || o->max_blocks > INT_MAX / KVPOOL_BLOCK)
        return err_raise(e, E_RANGE, "KV pool: max_blocks %d outside 1..%d", o->max_blocks,
                         INT_MAX / KVPOOL_BLOCK);
    if (o->max_cached < 0 || o->max_cached > 1 << 28)
        return err_raise(e, E_RANGE, "KV pool: max_cached %d outside 0..%d", o->max_cached,
                         1 << 28);
    /* A node holds a page of every target class: more nodes than pages of the class with the fewest
     * could never be in use. */
    size_t most_nodes = SIZE_MAX;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        int ppe = l->g.pages_per_extent[c];
        if (!ppe) continue;
        if (ppe > l->max_ppe) l->max_ppe = ppe;
        if (c != KVPOOL_DRAFT)
            most_nodes = min_size(most_nodes, (size_t)l->g.n_extents * (size_t)ppe);
    }
    /* A draft alone has nothing that a node could hold. */
    l->n_nodes = most_nodes == SIZE_MAX ? 0 : (int)min_size(most_nodes, (size_t)o->max_cached);
    l->n_buckets = 1;
    while (l->n_buckets < l->n_nodes) l->n_buckets *= 2;
    l->bytes = align_up(sizeof(struct kvpool), REGION_ALIGN);
    size_t n_slots, n_entries;
    if (!checked_mul((size_t)l->g.n_extents, (size_t)l->max_ppe, &n_slots) || n_slots > INT32_MAX ||
        !checked_mul((size_t)o->max_seqs * KVPOOL_N_CLASSES, (size_t)o->max_blocks, &n_entries) ||
        !add_region(l, &l->extents, (size_t)l->g.n_extents, sizeof(struct extent)) ||
        !add_region(l, &l->slots, n_slots, sizeof(struct slot)) ||
        !add_region(l, &l->seqs, (size_t)o->max_seqs, sizeof(struct seq)) ||
        !add_region(l, &l->tables, n_entries, sizeof(int32_t)) ||
        !add_region(l, &l->nodes, (size_t)l->n_nodes, sizeof(struct prefix_node)) ||
        !add_region(l, &l->buckets, (size_t)l->n_buckets, sizeof(int32_t)))
        return err_raise(e, E_RANGE, "KV pool: %d extents, %d sequences of %d blocks are too many",
                         l->g.n_extents, o->max_seqs, o->max_blocks);
    return 0;
}

size_t kvpool_host_bytes(const struct kvpool_options *o) {
    struct layout l;
    return layout_make(o, &l, NULL) ? 0 : l.bytes;
}

int kvpool_open(struct kvpool **out, const struct kvpool_options *o, struct err *e) {
    struct layout l;
    *out = NULL;
    int rc = layout_make(o, &l, e);
    if (rc) return rc;
    char *base = aligned_alloc(REGION_ALIGN, l.bytes);
    if (!base) return err_raise(e, E_NOMEM, "cannot allocate %zu bytes of KV bookkeeping", l.bytes);
    /* All of it, so that no page of host memory is touched first in the step loop. */
    memset(base, 0, l.bytes);
    struct kvpool *p = (struct kvpool *)base;
    p->extent_bytes = l.g.extent_bytes;
    p->n_extents = l.g.n_extents;
    p->arena_bytes = l.g.extent_bytes * (size_t)l.g.n_extents;
    p->max_ppe = l.max_ppe;
    p->max_seqs = o->max_seqs;
    p->max_blocks = o->max_blocks;
    p->max_nodes = l.n_nodes;
    p->n_buckets = l.n_buckets;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        p->cls[c].page_bytes = l.g.page_bytes[c];
        p->cls[c].ppe = l.g.pages_per_extent[c];
        p->cls[c].min_ext = l.g.min_extents[c];
    }
    p->extents = (struct extent *)(base + l.extents);
    p->slots = (struct slot *)(base + l.slots);
    p->seqs = (struct seq *)(base + l.seqs);
    p->tables = (int32_t *)(base + l.tables);
    p->nodes = (struct prefix_node *)(base + l.nodes);
    p->buckets = (int32_t *)(base + l.buckets);
    kvpool__extents_init(p);
    kvpool__prefix_init(p);
    kvpool__seqs_init(p);
    *out = p;
    return 0;
}

void kvpool_close(struct kvpool *p) {
    free(p);
}

void kvpool_get_stats(const struct kvpool *p, struct kvpool_stats *out) {
    *out = (struct kvpool_stats){.arena_bytes = p->arena_bytes,
                                 .extent_bytes = p->extent_bytes,
                                 .n_extents = p->n_extents,
                                 .n_extents_free = p->n_extents_free,
                                 .n_seqs = p->n_seqs,
                                 .n_cached_nodes = p->n_nodes,
                                 .n_generated_nodes = p->n_generated,
                                 .n_draft_nodes = p->n_draft_nodes,
                                 .n_lookups = p->n_lookups,
                                 .n_hits = p->n_hits,
                                 .n_hit_tokens = p->n_hit_tokens,
                                 .n_lookup_tokens = p->n_lookup_tokens,
                                 .n_evicted = p->n_evicted,
                                 .n_hit_generated_tokens = p->n_hit_generated,
                                 .n_hit_draft_tokens = p->n_hit_draft,
                                 .n_evicted_draft = p->n_evicted_draft,
                                 .n_draft_dropped = p->n_draft_dropped};
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const struct class_state *s = &p->cls[c];
        struct kvpool_class_stats *t = &out->of[c];
        t->page_bytes = s->page_bytes;
        t->total = s->n_ext * s->ppe;
        t->used = s->n_used;
        t->cached = s->n_cached;
        t->free = t->total - t->used - t->cached;
        t->reserved = s->n_reserved;
    }
}

/* ---- Check ---- */

/* Slots of one extent against its counts, its free chain and the references just counted. */
static void check_extent(const struct kvpool *p, int idx) {
    const struct extent *x = &p->extents[idx];
    const struct slot *slots = &p->slots[(size_t)idx * (size_t)p->max_ppe];
    int n_used = 0, n_cached = 0, n_free = 0, n_chained = 0;
    if (x->cls < 0) {
        ASSERT(x->list == LIST_FREE && !x->n_used && !x->n_cached);
        for (int i = 0; i < p->max_ppe; i++) ASSERT(!slots[i].refs && slots[i].node < 0);
        return;
    }
    int ppe = p->cls[x->cls].ppe;
    for (int i = 0; i < p->max_ppe; i++) {
        ASSERT(slots[i].refs == slots[i].seen && slots[i].n_windowed == slots[i].seen_windowed);
        ASSERT(i < x->n_fresh || (!slots[i].refs && slots[i].node < 0));
        if (slots[i].refs) n_used++;
        else if (slots[i].node >= 0) n_cached++;
        else if (i < x->n_fresh) n_free++;
    }
    ASSERT(n_used == x->n_used && n_cached == x->n_cached && n_used + n_cached > 0);
    ASSERT(x->n_fresh <= ppe);
    for (int32_t i = x->free_head; i >= 0; i = slots[i].next) {
        ASSERT(i < x->n_fresh && !slots[i].refs && slots[i].node < 0 && ++n_chained <= n_free);
    }
    ASSERT(n_chained == n_free);
    bool room = n_used + n_cached < ppe;
    int list = n_used ? (room       ? LIST_ROOM
                         : n_cached ? LIST_MIXED
                                    : LIST_NONE)
                      : (room ? LIST_IDLE : LIST_NONE);
    ASSERT(x->list == (list == LIST_NONE ? LIST_NONE : list + x->cls));
}

void kvpool_check(const struct kvpool *p) {
    struct class_state want[KVPOOL_N_CLASSES] = {0};
    int n_free = 0, n_listed = 0, n_unlisted = 0;
    size_t n_slots = (size_t)p->n_extents * (size_t)p->max_ppe;
    for (size_t i = 0; i < n_slots; i++) p->slots[i].seen = p->slots[i].seen_windowed = 0;
    kvpool__seqs_check(p);
    for (int i = 0; i < p->n_extents; i++) {
        const struct extent *x = &p->extents[i];
        check_extent(p, i);
        n_unlisted += x->list == LIST_NONE;
        n_free += x->cls < 0;
        if (x->cls < 0) continue;
        want[x->cls].n_ext++;
        want[x->cls].n_pinned += x->n_used > 0;
        want[x->cls].n_used += x->n_used;
        want[x->cls].n_cached += x->n_cached;
        const struct slot *slots = &p->slots[(size_t)i * (size_t)p->max_ppe];
        for (int k = 0; k < p->cls[x->cls].ppe; k++)
            want[x->cls].n_charged += slots[k].n_windowed + (slots[k].refs > slots[k].n_windowed);
    }
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const struct class_state *s = &p->cls[c];
        ASSERT(s->n_ext == want[c].n_ext && s->n_pinned == want[c].n_pinned);
        ASSERT(s->n_used == want[c].n_used && s->n_cached == want[c].n_cached);
        ASSERT(s->n_charged == want[c].n_charged && s->n_charged >= s->n_used);
        ASSERT(c == KVPOOL_DRAFT || s->n_charged == s->n_used);
        ASSERT(s->n_reserved >= 0);
    }
    for (int l = 0; l < LIST_NONE; l++)
        for (int32_t i = p->lists[l].head, prev = -1; i >= 0; prev = i, i = p->extents[i].next)
            ASSERT(p->extents[i].list == l && p->extents[i].prev == prev &&
                   ++n_listed <= p->n_extents);
    ASSERT(n_listed + n_unlisted == p->n_extents && n_free == p->n_extents_free);
    ASSERT(kvpool__fits(p, 0, 0, 0));
    kvpool__prefix_check(p);
}
