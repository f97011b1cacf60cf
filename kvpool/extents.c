/* Extents and pages. An extent serves one class from its first page to its last; when its last page
 * is neither used nor cached it belongs to nobody again. Why a reserved page can always be taken is
 * proved in kvpool_private.h. */
#include "kvpool/kvpool_private.h"

#include "base/err.h"

static int list_of(const struct kvpool *p, const struct extent *x) {
    if (x->cls < 0) return LIST_FREE;
    int n_free = p->cls[x->cls].ppe - x->n_used - x->n_cached;
    if (x->n_used) {
        if (n_free) return LIST_ROOM + x->cls;
        return x->n_cached ? LIST_MIXED + x->cls : LIST_NONE;
    }
    return n_free ? LIST_IDLE + x->cls : LIST_NONE;
}

static void list_remove(struct kvpool *p, struct extent *x) {
    if (x->list == LIST_NONE) return;
    struct list *l = &p->lists[x->list];
    if (x->prev >= 0) p->extents[x->prev].next = x->next;
    else l->head = x->next;
    if (x->next >= 0) p->extents[x->next].prev = x->prev;
    else l->tail = x->prev;
    x->list = LIST_NONE;
}

/* At the tail: the extent at the head is filled up first, so that others can run empty. */
static void list_append(struct kvpool *p, struct extent *x, int list) {
    x->list = (int8_t)list;
    if (list == LIST_NONE) return;
    struct list *l = &p->lists[list];
    int32_t idx = (int32_t)(x - p->extents);
    x->prev = l->tail;
    x->next = -1;
    if (l->tail >= 0) p->extents[l->tail].next = idx;
    else l->head = idx;
    l->tail = idx;
}

void kvpool__extents_init(struct kvpool *p) {
    for (int i = 0; i < LIST_NONE; i++) p->lists[i] = (struct list){-1, -1};
    for (int i = 0; i < p->n_extents; i++) {
        p->extents[i] = (struct extent){.cls = -1, .list = LIST_NONE, .free_head = -1};
        list_append(p, &p->extents[i], LIST_FREE);
    }
    p->n_extents_free = p->n_extents;
    size_t n_slots = (size_t)p->n_extents * (size_t)p->max_ppe;
    for (size_t i = 0; i < n_slots; i++) p->slots[i] = (struct slot){.node = -1, .next = -1};
}

struct extent *kvpool__extent(const struct kvpool *p, int32_t page) {
    size_t idx = kvpool_page_offset(page) / p->extent_bytes;
    ASSERT(page >= 0 && idx < (size_t)p->n_extents);
    return &p->extents[idx];
}

static int slot_index(const struct kvpool *p, int32_t page, const struct extent *x) {
    ASSERT(x->cls >= 0);
    size_t in_extent = kvpool_page_offset(page) % p->extent_bytes;
    return (int)(in_extent / p->cls[x->cls].page_bytes);
}

struct slot *kvpool__slot(const struct kvpool *p, int32_t page) {
    const struct extent *x = kvpool__extent(p, page);
    return &p->slots[(x - p->extents) * p->max_ppe + slot_index(p, page, x)];
}

long long kvpool__extents_needed(const struct kvpool *p, int c, int more_pages, int more_pinned) {
    const struct class_state *s = &p->cls[c];
    if (!s->ppe) return 0;
    long long pages = (long long)s->n_charged + s->n_reserved + more_pages;
    long long need = (pages + s->ppe - 1) / s->ppe;
    if (need < s->n_pinned + more_pinned) need = s->n_pinned + more_pinned;
    return need < s->min_ext ? s->min_ext : need;
}

bool kvpool__fits(const struct kvpool *p, int c, int more_pages, int more_pinned) {
    long long n = 0;
    for (int i = 0; i < KVPOOL_N_CLASSES; i++)
        n += kvpool__extents_needed(p, i, i == c ? more_pages : 0, i == c ? more_pinned : 0);
    return n <= p->n_extents;
}

/* Counts of one page's move; afterwards the extent is on the list that its counts say. */
static void extent_move(struct kvpool *p, struct extent *x, int d_used, int d_cached) {
    struct class_state *s = &p->cls[x->cls];
    bool was_pinned = x->n_used > 0;
    x->n_used += d_used;
    x->n_cached += d_cached;
    s->n_used += d_used;
    s->n_cached += d_cached;
    ASSERT(x->n_used >= 0 && x->n_cached >= 0 && x->n_used + x->n_cached <= s->ppe);
    s->n_pinned += (x->n_used > 0) - was_pinned;
    if (!x->n_used && !x->n_cached) {
        s->n_ext--;
        p->n_extents_free++;
        x->cls = -1;
    }
    int list = list_of(p, x);
    if (list != x->list) {
        list_remove(p, x);
        list_append(p, x, list);
    }
}

static void extent_claim(struct kvpool *p, struct extent *x, int c) {
    ASSERT(x->cls < 0 && !x->n_used && !x->n_cached);
    list_remove(p, x);
    x->cls = (int8_t)c;
    x->n_fresh = 0;
    x->free_head = -1;
    p->n_extents_free--;
    p->cls[c].n_ext++;
}

/* What the references to a page cost: see kvpool_private.h. */
static int charge_of(const struct slot *t) {
    return t->n_windowed + (t->refs > t->n_windowed);
}

static void change_refs(struct class_state *s, struct slot *t, int d, bool windowed) {
    s->n_charged -= charge_of(t);
    t->refs += d;
    t->n_windowed += windowed ? d : 0;
    ASSERT(t->n_windowed >= 0 && t->refs >= t->n_windowed);
    s->n_charged += charge_of(t);
}

/* A free slot of x becomes a used page. */
static int32_t slot_take(struct kvpool *p, struct extent *x, bool windowed) {
    struct class_state *s = &p->cls[x->cls];
    size_t e_idx = (size_t)(x - p->extents);
    struct slot *slots = &p->slots[e_idx * (size_t)p->max_ppe];
    int idx = x->free_head;
    if (idx >= 0) x->free_head = slots[idx].next;
    else idx = x->n_fresh++;
    ASSERT(idx < s->ppe && slots[idx].refs == 0 && slots[idx].node < 0);
    change_refs(s, &slots[idx], 1, windowed);
    slots[idx].next = -1;
    extent_move(p, x, 1, 0);
    return (int32_t)((e_idx * p->extent_bytes + (size_t)idx * s->page_bytes) / KVPOOL_ALIGN);
}

/* Make a page of a mixed extent free: the cached one whose node was registered first. The order of
 * last use does not decide here: the page must lie in an extent that is pinned already. A draft
 * page goes alone. */
static void evict_in(struct kvpool *p, const struct extent *x) {
    const struct slot *slots = &p->slots[(x - p->extents) * p->max_ppe];
    int32_t victim = -1;
    for (int i = 0; i < x->n_fresh; i++) {
        if (slots[i].refs || slots[i].node < 0) continue;
        if (victim < 0 || p->nodes[slots[i].node].serial < p->nodes[victim].serial)
            victim = slots[i].node;
    }
    ASSERT(victim >= 0);
    if (x->cls == KVPOOL_DRAFT) kvpool__prefix_drop_draft(p, victim);
    else kvpool__prefix_drop(p, victim);
}

int32_t kvpool__page_take(struct kvpool *p, int c, bool windowed) {
    struct class_state *s = &p->cls[c];
    ASSERT(s->n_reserved > 0);
    int32_t idx;
    for (;;) {
        if ((idx = p->lists[LIST_ROOM + c].head) >= 0) break;
        if (!kvpool__fits(p, c, 0, 1)) {
            /* Case 3 of the proof. */
            idx = p->lists[LIST_MIXED + c].head;
            ASSERT(idx >= 0);
            evict_in(p, &p->extents[idx]);
            continue;
        }
        if ((idx = p->lists[LIST_IDLE + c].head) >= 0) break;
        if ((idx = p->lists[LIST_FREE].head) >= 0) {
            extent_claim(p, &p->extents[idx], c);
            break;
        }
        bool evicted = kvpool__prefix_evict(p);
        ASSERT(evicted); /* case 2 of the proof */
    }
    s->n_reserved--;
    int32_t page = slot_take(p, &p->extents[idx], windowed);
    ASSERT(kvpool__fits(p, c, 0, 0));
    return page;
}

static void slot_free(struct kvpool *p, int32_t page) {
    struct extent *x = kvpool__extent(p, page);
    int idx = slot_index(p, page, x);
    p->slots[(x - p->extents) * p->max_ppe + idx].next = x->free_head;
    x->free_head = idx;
}

void kvpool__page_ref(struct kvpool *p, int32_t page, bool windowed) {
    struct slot *t = kvpool__slot(p, page);
    struct extent *x = kvpool__extent(p, page);
    change_refs(&p->cls[x->cls], t, 1, windowed);
    if (t->refs > 1) return;
    ASSERT(t->node >= 0); /* a free page is taken, not referenced */
    extent_move(p, x, 1, -1);
    kvpool__prefix_busy(p, t->node, x->cls);
}

void kvpool__page_unref(struct kvpool *p, int32_t page, bool windowed) {
    struct slot *t = kvpool__slot(p, page);
    struct extent *x = kvpool__extent(p, page);
    ASSERT(t->refs > 0);
    change_refs(&p->cls[x->cls], t, -1, windowed);
    if (t->refs > 0) return;
    if (t->node < 0) slot_free(p, page);
    extent_move(p, x, -1, t->node >= 0);
    if (t->node >= 0) kvpool__prefix_idle(p, t->node, x->cls);
}

void kvpool__page_uncache(struct kvpool *p, int32_t page) {
    struct slot *t = kvpool__slot(p, page);
    ASSERT(t->node >= 0);
    t->node = -1;
    if (t->refs > 0) return;
    slot_free(p, page);
    extent_move(p, kvpool__extent(p, page), 0, -1);
}
