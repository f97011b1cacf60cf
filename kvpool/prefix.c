/* The prefix cache: a tree of blocks. A node's identity is (salt, owner, all tokens up to its end):
 * the tree gives the tokens before it (a node is compared with its parent's index), the node its
 * own
 * 64. Hashes only find candidates; what is returned was compared token by token, so a collision
 * costs time and never gives another prompt's pages. Salt and owner are compared too and enter the
 * hash as fields of fixed width, so no concatenation of one can look like another. XXH3 is not
 * meant to resist an adversary, and need not: see above. The owner tells the two laws apart by
 * which a block is computed: 0 for a prompt's, the conversation for an answer's and all that
 * follows it.
 *
 * A node always holds the target's pages; the draft's page may join it later and may leave it
 * earlier. */
#include "kvpool/kvpool_private.h"

#include <string.h>
#include <xxhash.h>

#include "base/err.h"

void kvpool__prefix_init(struct kvpool *p) {
    for (int i = 0; i < p->n_buckets; i++) p->buckets[i] = -1;
    for (int i = 0; i < p->max_nodes; i++) {
        p->nodes[i].live = false;
        p->nodes[i].serial = 0;
        p->nodes[i].mark = 0;
        p->nodes[i].bucket_next = i + 1 < p->max_nodes ? i + 1 : -1;
    }
    p->node_free = p->max_nodes ? 0 : -1;
    for (int i = 0; i < N_LRUS; i++) p->lru[i] = (struct list){-1, -1};
    p->hash_mask = UINT64_MAX;
}

void kvpool__set_hash_mask(struct kvpool *p, uint64_t mask) {
    ASSERT(p->n_nodes == 0);
    p->hash_mask = mask;
}

static void hash_block(const struct kvpool *p, int32_t parent, uint64_t salt, uint64_t owner,
                       const int32_t *tokens, uint64_t hash[2]) {
    struct {
        uint64_t tag, parent[2], salt, owner;
        int32_t tokens[KVPOOL_BLOCK];
    } in = {.tag = 0x4b56626c6f636b32u, .salt = salt, .owner = owner};
    _Static_assert(sizeof in == 5 * 8 + 4 * KVPOOL_BLOCK, "no padding may be hashed");
    if (parent >= 0) memcpy(in.parent, p->nodes[parent].hash, sizeof in.parent);
    memcpy(in.tokens, tokens, sizeof in.tokens);
    XXH128_hash_t h = XXH3_128bits(&in, sizeof in);
    hash[0] = h.low64 & p->hash_mask;
    hash[1] = h.high64 & p->hash_mask;
}

static int32_t *bucket_of(const struct kvpool *p, const uint64_t hash[2]) {
    return &p->buckets[hash[0] & (uint64_t)(p->n_buckets - 1)];
}

int32_t kvpool__prefix_find(const struct kvpool *p, int32_t parent, uint64_t salt, uint64_t owner,
                            const int32_t *tokens) {
    uint64_t hash[2];
    if (!p->n_nodes) return -1;
    hash_block(p, parent, salt, owner, tokens, hash);
    int32_t i = *bucket_of(p, hash);
    for (; i >= 0; i = p->nodes[i].bucket_next) {
        const struct prefix_node *n = &p->nodes[i];
        if (n->hash[0] == hash[0] && n->hash[1] == hash[1] && n->parent == parent &&
            n->salt == salt && n->owner == owner && !memcmp(n->tokens, tokens, sizeof n->tokens))
            return i;
    }
    return -1;
}

int32_t kvpool__prefix_next(const struct kvpool *p, int32_t parent, uint64_t salt,
                            uint64_t conversation, const int32_t *tokens) {
    if (parent < 0 || !p->nodes[parent].owner) {
        int32_t i = kvpool__prefix_find(p, parent, salt, 0, tokens);
        if (i >= 0 || !conversation) return i;
    }
    return kvpool__prefix_find(p, parent, salt, conversation, tokens);
}

bool kvpool_walk_next(const struct kvpool *p, struct kvpool_walk *w, const int32_t *tokens) {
    int32_t next = kvpool__prefix_next(p, w->node, w->salt, w->conversation, tokens);
    if (next < 0) return false;
    w->node = next;
    w->serial = p->nodes[next].serial;
    return true;
}

/* What is forgotten takes all behind it along. */
bool kvpool_walk_holds(const struct kvpool *p, const struct kvpool_walk *w) {
    return w->node < 0 || p->nodes[w->node].serial == w->serial;
}

/* ---- Order of last use: every node that holds an unused page, youngest first ---- */

static struct list *lru_of(struct kvpool *p, const struct prefix_node *n) {
    if (n->n_idle_target) return &p->lru[LRU_WHOLE];
    return n->idle_draft ? &p->lru[LRU_DRAFT] : NULL;
}

static void lru_remove(struct kvpool *p, struct list *l, struct prefix_node *n) {
    if (!l) return;
    if (n->lru_prev >= 0) p->nodes[n->lru_prev].lru_next = n->lru_next;
    else l->head = n->lru_next;
    if (n->lru_next >= 0) p->nodes[n->lru_next].lru_prev = n->lru_prev;
    else l->tail = n->lru_prev;
}

static void lru_push(struct kvpool *p, struct list *l, struct prefix_node *n) {
    int32_t i = (int32_t)(n - p->nodes);
    if (!l) return;
    n->lru_prev = -1;
    n->lru_next = l->head;
    if (l->head >= 0) p->nodes[l->head].lru_prev = i;
    else l->tail = i;
    l->head = i;
}

static void change_idle(struct kvpool *p, int32_t node, int c, bool idle) {
    struct prefix_node *n = &p->nodes[node];
    struct list *before = lru_of(p, n);
    if (c == KVPOOL_DRAFT) {
        ASSERT(n->idle_draft != idle);
        n->idle_draft = idle;
    } else {
        n->n_idle_target = (int8_t)(n->n_idle_target + (idle ? 1 : -1));
        ASSERT(n->n_idle_target >= 0);
    }
    struct list *after = lru_of(p, n);
    if (after == before) return;
    lru_remove(p, before, n);
    lru_push(p, after, n);
}

void kvpool__prefix_idle(struct kvpool *p, int32_t node, int c) {
    change_idle(p, node, c, true);
}

void kvpool__prefix_busy(struct kvpool *p, int32_t node, int c) {
    change_idle(p, node, c, false);
}

/* Ends of chains become older than their beginnings, so the oldest node is a leaf, and a chain is
 * forgotten from its end. */
void kvpool__prefix_touch(struct kvpool *p, int32_t node) {
    for (; node >= 0; node = p->nodes[node].parent) {
        struct prefix_node *n = &p->nodes[node];
        lru_remove(p, lru_of(p, n), n);
        lru_push(p, lru_of(p, n), n);
    }
}

/* ---- Forgetting ---- */

static void drop_leaf(struct kvpool *p, int32_t node) {
    struct prefix_node *n = &p->nodes[node];
    ASSERT(n->live && n->first_child < 0);
    lru_remove(p, lru_of(p, n), n);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (n->pages[c] >= 0) kvpool__page_uncache(p, n->pages[c]);
    int32_t *link = bucket_of(p, n->hash);
    while (*link != node) link = &p->nodes[*link].bucket_next;
    *link = n->bucket_next;
    if (n->prev_sibling >= 0) p->nodes[n->prev_sibling].next_sibling = n->next_sibling;
    else if (n->parent >= 0) p->nodes[n->parent].first_child = n->next_sibling;
    if (n->next_sibling >= 0) p->nodes[n->next_sibling].prev_sibling = n->prev_sibling;
    p->n_generated -= n->owner != 0;
    p->n_draft_nodes -= n->pages[KVPOOL_DRAFT] >= 0;
    n->live = false;
    n->serial = 0;
    n->n_idle_target = 0;
    n->idle_draft = false;
    n->bucket_next = p->node_free;
    p->node_free = node;
    p->n_nodes--;
    p->n_evicted++;
}

void kvpool__prefix_drop(struct kvpool *p, int32_t node) {
    int32_t i = node;
    for (;;) {
        while (p->nodes[i].first_child >= 0) i = p->nodes[i].first_child;
        int32_t parent = p->nodes[i].parent;
        drop_leaf(p, i);
        if (i == node) return;
        i = parent;
    }
}

void kvpool__prefix_drop_draft(struct kvpool *p, int32_t node) {
    struct prefix_node *n = &p->nodes[node];
    int32_t page = n->pages[KVPOOL_DRAFT];
    ASSERT(n->live && page >= 0);
    if (n->idle_draft) change_idle(p, node, KVPOOL_DRAFT, false);
    n->pages[KVPOOL_DRAFT] = -1;
    kvpool__page_uncache(p, page);
    p->n_draft_nodes--;
    p->n_evicted_draft++;
}

/* A draft page whose node is in use otherwise goes first: it serves nobody now, is the cheapest to
 * compute again, and the node stays findable. */
bool kvpool__prefix_evict(struct kvpool *p) {
    if (p->lru[LRU_DRAFT].tail >= 0) kvpool__prefix_drop_draft(p, p->lru[LRU_DRAFT].tail);
    else if (p->lru[LRU_WHOLE].tail >= 0) kvpool__prefix_drop(p, p->lru[LRU_WHOLE].tail);
    else return false;
    return true;
}

void kvpool_cache_clear(struct kvpool *p) {
    while (kvpool__prefix_evict(p)) {
    }
}

/* ---- Adding ---- */

/* A free node, if need be by forgetting the oldest, but never one that carries the mark: it is on
 * the chain that the new node will hang on. */
static int32_t node_take(struct kvpool *p, uint64_t mark) {
    if (p->node_free < 0) {
        int32_t oldest = p->lru[LRU_WHOLE].tail;
        if (oldest < 0 || p->nodes[oldest].mark == mark) return -1;
        kvpool__prefix_drop(p, oldest);
    }
    int32_t i = p->node_free;
    p->node_free = p->nodes[i].bucket_next;
    return i;
}

int32_t kvpool__prefix_add(struct kvpool *p, int seq, int block, int32_t parent, uint64_t owner,
                           uint64_t mark, const int32_t *tokens) {
    const struct seq *s = &p->seqs[seq];
    ASSERT(parent < 0 || !p->nodes[parent].owner || p->nodes[parent].owner == owner);
    int32_t i = node_take(p, mark);
    if (i < 0) return -1;
    struct prefix_node *n = &p->nodes[i];
    *n = (struct prefix_node){.salt = s->salt,
                              .owner = owner,
                              .serial = ++p->serial,
                              .parent = parent,
                              .first_child = -1,
                              .prev_sibling = -1,
                              .next_sibling = -1,
                              .mark = mark,
                              .live = true};
    memcpy(n->tokens, tokens, sizeof n->tokens);
    hash_block(p, parent, s->salt, owner, tokens, n->hash);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        n->pages[c] = -1;
        if (c == KVPOOL_DRAFT || !kvpool__has(s->classes, c)) continue;
        n->pages[c] = kvpool__table(p, seq, c)[block];
        struct slot *t = kvpool__slot(p, n->pages[c]);
        ASSERT(t->node < 0 && t->refs > 0);
        t->node = i;
    }
    int32_t *bucket = bucket_of(p, n->hash);
    n->bucket_next = *bucket;
    *bucket = i;
    if (parent >= 0) {
        n->next_sibling = p->nodes[parent].first_child;
        if (n->next_sibling >= 0) p->nodes[n->next_sibling].prev_sibling = i;
        p->nodes[parent].first_child = i;
    }
    p->n_nodes++;
    p->n_generated += owner != 0;
    return i;
}

void kvpool__prefix_attach_draft(struct kvpool *p, int32_t node, int32_t page) {
    struct prefix_node *n = &p->nodes[node];
    struct slot *t = kvpool__slot(p, page);
    ASSERT(n->live && n->pages[KVPOOL_DRAFT] < 0 && !n->idle_draft);
    ASSERT(t->node < 0 && t->refs > 0);
    n->pages[KVPOOL_DRAFT] = page;
    t->node = node;
    p->n_draft_nodes++;
}

/* ---- Check ---- */

static void check_lru(const struct kvpool *p, int which, int n_want) {
    int n_listed = 0;
    for (int32_t i = p->lru[which].head, prev = -1; i >= 0; prev = i, i = p->nodes[i].lru_next) {
        const struct prefix_node *n = &p->nodes[i];
        ASSERT(n->live && n->lru_prev == prev && ++n_listed <= n_want);
        if (which == LRU_WHOLE) ASSERT(n->n_idle_target > 0);
        else ASSERT(n->n_idle_target == 0 && n->idle_draft);
        ASSERT(n->lru_next >= 0 || p->lru[which].tail == i);
    }
    ASSERT(n_listed == n_want && (n_want > 0 || p->lru[which].tail < 0));
}

void kvpool__prefix_check(const struct kvpool *p) {
    int n_live = 0, n_generated = 0, n_draft = 0, n_listed[N_LRUS] = {0};
    for (int i = 0; i < p->max_nodes; i++) {
        const struct prefix_node *n = &p->nodes[i];
        if (!n->live) continue;
        int n_idle = 0;
        n_live++;
        n_generated += n->owner != 0;
        if (n->parent >= 0) {
            const struct prefix_node *parent = &p->nodes[n->parent];
            ASSERT(parent->live && parent->salt == n->salt);
            ASSERT(!parent->owner || parent->owner == n->owner);
        }
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            if (n->pages[c] < 0) {
                ASSERT(c == KVPOOL_DRAFT || !p->cls[c].ppe);
                if (c == KVPOOL_DRAFT) ASSERT(!n->idle_draft);
                continue;
            }
            const struct slot *t = kvpool__slot(p, n->pages[c]);
            ASSERT(t->node == i && kvpool__extent(p, n->pages[c])->cls == c);
            if (c != KVPOOL_DRAFT) {
                n_idle += t->refs == 0;
                continue;
            }
            n_draft++;
            ASSERT(n->idle_draft == (t->refs == 0));
        }
        ASSERT(n->n_idle_target == n_idle);
        n_listed[LRU_WHOLE] += n_idle > 0;
        n_listed[LRU_DRAFT] += n_idle == 0 && n->idle_draft;
        ASSERT(kvpool__prefix_find(p, n->parent, n->salt, n->owner, n->tokens) == i);
        for (int32_t k = n->first_child; k >= 0; k = p->nodes[k].next_sibling)
            ASSERT(p->nodes[k].live && p->nodes[k].parent == i);
    }
    for (int i = 0; i < N_LRUS; i++) check_lru(p, i, n_listed[i]);
    ASSERT(n_live == p->n_nodes && n_generated == p->n_generated && n_draft == p->n_draft_nodes);
}
