/* The prefix cache: a tree of blocks. A node's identity is (salt, classes, all tokens up to its
 * end): the tree gives the tokens before it (a node is compared with its parent's index), the node
 * its own
 * 64. Hashes only find candidates; what is returned was compared token by token, so a collision
 * costs time and never gives another prompt's pages. Salt and class set are compared too and enter
 * the hash as fields of fixed width, so no concatenation of one can look like another. XXH3 is not
 * meant to resist an adversary, and need not: see above. */
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
    p->lru = (struct list){-1, -1};
    p->hash_mask = UINT64_MAX;
}

void kvpool__set_hash_mask(struct kvpool *p, uint64_t mask) {
    ASSERT(p->n_nodes == 0);
    p->hash_mask = mask;
}

static void hash_block(const struct kvpool *p, int32_t parent, uint64_t salt, int classes,
                       const int32_t *tokens, uint64_t hash[2]) {
    struct {
        uint64_t tag, parent[2], salt, classes;
        int32_t tokens[KVPOOL_BLOCK];
    } in = {.tag = 0x4b56626c6f636b31u, .salt = salt, .classes = (uint64_t)classes};
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

static int32_t find_hashed(const struct kvpool *p, const uint64_t hash[2], int32_t parent,
                           uint64_t salt, int classes, const int32_t *tokens) {
    int32_t i = *bucket_of(p, hash);
    for (; i >= 0; i = p->nodes[i].bucket_next) {
        const struct prefix_node *n = &p->nodes[i];
        if (n->hash[0] == hash[0] && n->hash[1] == hash[1] && n->parent == parent &&
            n->salt == salt && n->classes == classes &&
            !memcmp(n->tokens, tokens, sizeof n->tokens))
            return i;
    }
    return -1;
}

int32_t kvpool__prefix_find(const struct kvpool *p, int32_t parent, uint64_t salt, int classes,
                            const int32_t *tokens) {
    uint64_t hash[2];
    if (!p->n_nodes) return -1;
    hash_block(p, parent, salt, classes, tokens, hash);
    return find_hashed(p, hash, parent, salt, classes, tokens);
}

/* ---- Order of last use: every node that holds an unused page, youngest first ---- */

static void lru_remove(struct kvpool *p, struct prefix_node *n) {
    if (n->lru_prev >= 0) p->nodes[n->lru_prev].lru_next = n->lru_next;
    else p->lru.head = n->lru_next;
    if (n->lru_next >= 0) p->nodes[n->lru_next].lru_prev = n->lru_prev;
    else p->lru.tail = n->lru_prev;
}

static void lru_push(struct kvpool *p, struct prefix_node *n) {
    int32_t i = (int32_t)(n - p->nodes);
    n->lru_prev = -1;
    n->lru_next = p->lru.head;
    if (p->lru.head >= 0) p->nodes[p->lru.head].lru_prev = i;
    else p->lru.tail = i;
    p->lru.head = i;
}

void kvpool__prefix_idle(struct kvpool *p, int32_t node) {
    if (p->nodes[node].n_idle++ == 0) lru_push(p, &p->nodes[node]);
}

void kvpool__prefix_busy(struct kvpool *p, int32_t node) {
    ASSERT(p->nodes[node].n_idle > 0);
    if (--p->nodes[node].n_idle == 0) lru_remove(p, &p->nodes[node]);
}

/* Ends of chains become older than their beginnings, so the oldest node is a leaf, and a chain is
 * forgotten from its end. */
void kvpool__prefix_touch(struct kvpool *p, int32_t node) {
    for (; node >= 0; node = p->nodes[node].parent) {
        struct prefix_node *n = &p->nodes[node];
        if (!n->n_idle) continue;
        lru_remove(p, n);
        lru_push(p, n);
    }
}

/* ---- Forgetting ---- */

static void drop_leaf(struct kvpool *p, int32_t node) {
    struct prefix_node *n = &p->nodes[node];
    ASSERT(n->live && n->first_child < 0);
    if (n->n_idle) lru_remove(p, n);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (n->pages[c] >= 0) kvpool__page_uncache(p, n->pages[c]);
    int32_t *link = bucket_of(p, n->hash);
    while (*link != node) link = &p->nodes[*link].bucket_next;
    *link = n->bucket_next;
    if (n->prev_sibling >= 0) p->nodes[n->prev_sibling].next_sibling = n->next_sibling;
    else if (n->parent >= 0) p->nodes[n->parent].first_child = n->next_sibling;
    if (n->next_sibling >= 0) p->nodes[n->next_sibling].prev_sibling = n->prev_sibling;
    p->n_generated -= n->origin == KVPOOL_GENERATED;
    n->live = false;
    n->serial = 0;
    n->n_idle = 0;
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

bool kvpool__prefix_evict(struct kvpool *p) {
    if (p->lru.tail < 0) return false;
    kvpool__prefix_drop(p, p->lru.tail);
    return true;
}

void kvpool_cache_clear(struct kvpool *p) {
    while (kvpool__prefix_evict(p)) {
    }
}

/* ---- Registration ---- */

/* A free node, if need be by forgetting the oldest, but never one that carries the mark: it is on
 * the chain that the new node will hang on. */
static int32_t node_take(struct kvpool *p, uint64_t mark) {
    if (p->node_free < 0) {
        if (p->lru.tail < 0 || p->nodes[p->lru.tail].mark == mark) return -1;
        kvpool__prefix_drop(p, p->lru.tail);
    }
    int32_t i = p->node_free;
    p->node_free = p->nodes[i].bucket_next;
    return i;
}

static int32_t node_add(struct kvpool *p, int seq, int block, int32_t parent, uint64_t mark,
                        const int32_t *tokens, enum kvpool_origin origin) {
    const struct seq *s = &p->seqs[seq];
    /* Whatever was computed behind a generated block depends on how that block was computed. */
    if (parent >= 0 && p->nodes[parent].origin == KVPOOL_GENERATED) origin = KVPOOL_GENERATED;
    int32_t i = node_take(p, mark);
    if (i < 0) return -1;
    struct prefix_node *n = &p->nodes[i];
    *n = (struct prefix_node){.salt = s->salt,
                              .serial = ++p->serial,
                              .parent = parent,
                              .first_child = -1,
                              .prev_sibling = -1,
                              .next_sibling = -1,
                              .mark = mark,
                              .classes = s->classes,
                              .origin = (uint8_t)origin,
                              .live = true};
    memcpy(n->tokens, tokens, sizeof n->tokens);
    hash_block(p, parent, s->salt, s->classes, tokens, n->hash);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        n->pages[c] = -1;
        if (!kvpool__has(s->classes, c)) continue;
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
    p->n_generated += origin == KVPOOL_GENERATED;
    return i;
}

void kvpool_seq_register(struct kvpool *p, int seq, const int32_t *tokens, int n_committed,
                         enum kvpool_origin origin, uint64_t salt) {
    ASSERT(seq >= 0 && seq < p->max_seqs && p->seqs[seq].open);
    struct seq *s = &p->seqs[seq];
    ASSERT(salt == s->salt && n_committed >= 0);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (kvpool__has(s->classes, c) && s->n_tokens[c] < n_committed)
            n_committed = s->n_tokens[c];
    int n_full = n_committed / KVPOOL_BLOCK;
    if (!p->max_nodes || n_full <= s->reg_blocks) return;
    /* The cursor's node was forgotten: start over. */
    if (s->reg_blocks && p->nodes[s->reg_node].serial != s->reg_serial) s->reg_blocks = 0;
    int32_t chain = s->reg_blocks ? s->reg_node : -1;
    uint64_t mark = ++p->mark;
    kvpool__prefix_touch(p, chain);
    for (int32_t i = chain; i >= 0; i = p->nodes[i].parent) p->nodes[i].mark = mark;
    for (int b = s->reg_blocks; b < n_full; b++) {
        const int32_t *block = tokens + (size_t)b * KVPOOL_BLOCK;
        int32_t i = kvpool__prefix_find(p, chain, salt, s->classes, block);
        if (i < 0) i = node_add(p, seq, b, chain, mark, block, origin);
        if (i < 0) break;
        p->nodes[i].mark = mark;
        chain = i;
        s->reg_blocks = b + 1;
        s->reg_node = i;
        s->reg_serial = p->nodes[i].serial;
    }
}

/* ---- Check ---- */

void kvpool__prefix_check(const struct kvpool *p) {
    int n_live = 0, n_generated = 0, n_listed = 0, n_idle_nodes = 0;
    for (int i = 0; i < p->max_nodes; i++) {
        const struct prefix_node *n = &p->nodes[i];
        if (!n->live) continue;
        int n_idle = 0;
        n_live++;
        n_generated += n->origin == KVPOOL_GENERATED;
        ASSERT(n->parent < 0 || (p->nodes[n->parent].live && p->nodes[n->parent].salt == n->salt &&
                                 p->nodes[n->parent].classes == n->classes));
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            /* Not `(pages >= 0) == has`: gcc 12 at -O1 compiles that wrong in a loop. */
            if (n->pages[c] < 0) {
                ASSERT(!kvpool__has(n->classes, c));
                continue;
            }
            ASSERT(kvpool__has(n->classes, c));
            const struct slot *t = kvpool__slot(p, n->pages[c]);
            ASSERT(t->node == i && kvpool__extent(p, n->pages[c])->cls == c);
            n_idle += t->refs == 0;
        }
        ASSERT(n->n_idle == n_idle);
        n_idle_nodes += n_idle > 0;
        ASSERT(kvpool__prefix_find(p, n->parent, n->salt, n->classes, n->tokens) == i);
        for (int32_t k = n->first_child; k >= 0; k = p->nodes[k].next_sibling)
            ASSERT(p->nodes[k].live && p->nodes[k].parent == i);
    }
    for (int32_t i = p->lru.head; i >= 0; i = p->nodes[i].lru_next) {
        ASSERT(p->nodes[i].live && p->nodes[i].n_idle > 0 && ++n_listed <= n_live);
        ASSERT(p->nodes[i].lru_next >= 0 || p->lru.tail == i);
    }
    ASSERT(n_listed == n_idle_nodes && n_live == p->n_nodes && n_generated == p->n_generated);
}
