#ifndef TANDEM_KVPOOL_PRIVATE_H
#define TANDEM_KVPOOL_PRIVATE_H

/* What the files of kvpool/ share: extents.c moves pages between free, used and cached; prefix.c
 * knows which tokens a cached page holds; seqs.c owns sequences and reservations; kvpool.c carves
 * the one block of host memory that all of it lives in. Indexes instead of pointers, -1 is none.
 *
 * ---- Why extend never fails within a reservation ----
 *
 * Per class c: used_c pages are referenced by sequences, reserved_c are promised, ppe_c fit in an
 * extent, pinned_c extents hold at least one used page, min_c extents are guaranteed. Let
 *     need_c = max(pinned_c, ceil((used_c + reserved_c) / ppe_c), min_c).
 * Invariant (I): the sum of need_c over the classes is at most n_extents. It is checked where it
 * could break, at admission, and kept by everything else:
 *  - truncate turns used into reserved: the sum used + reserved stays, pinned_c can only fall; a
 * page that another sequence shares stays used, so its replacement is reserved only where (I)
 * allows;
 *  - close and shrink lower used + reserved, pinned_c can only fall;
 *  - eviction turns cached into free, which need_c does not mention;
 *  - a hit turns cached into used and may pin extents: part of the admission check;
 *  - extend turns one reserved page into used. kvpool__page_take picks the page:
 *      1. a free page in a pinned extent of c: need_c unchanged;
 *      2. if (I) also holds with pinned_c + 1: a page of an unpinned extent (one of c that holds
 *         cached pages only, or an empty one). There is one, perhaps after evictions: by (I) with
 *         pinned_c + 1, the pinned extents are fewer than n_extents, and an unpinned extent holds
 *         only cached pages, each of which can be evicted;
 *      3. otherwise pinned_c + 1 exceeds ceil((used_c + reserved_c) / ppe_c), so that
 *         pinned_c * ppe_c >= used_c + reserved_c > used_c: some page of a pinned extent of c is
 *         not used; it is not free (case 1), so it is cached: its node is evicted, then case 1.
 * Every cached page can be evicted: its node is dropped with the subtree below it; a page of that
 * subtree that a sequence uses merely stops being findable.
 * So pages of a class that lie free in extents of other classes never matter: they are not counted.
 */

#include "kvpool/kvpool.h"

/* Lists that an extent can be on; the per-class ones are list + class. */
enum {
    LIST_FREE,                                 /* no class, no page */
    LIST_ROOM,                                 /* pinned, with a free page */
    LIST_MIXED = LIST_ROOM + KVPOOL_N_CLASSES, /* pinned, nothing free, something cached */
    LIST_IDLE = LIST_MIXED + KVPOOL_N_CLASSES, /* only cached pages, with a free one */
    LIST_NONE = LIST_IDLE + KVPOOL_N_CLASSES,  /* pinned and full, or cached and full */
};

struct extent {
    int32_t prev, next;
    int32_t n_used, n_cached; /* pages; the others are free */
    int32_t n_fresh;          /* pages 0..n_fresh-1 were handed out since it got its class */
    int32_t free_head;        /* freed slots below n_fresh, chained by slot.next */
    uint64_t mark;            /* admission: already counted as newly pinned */
    int8_t cls, list;         /* cls -1: empty */
};

/* One page's place; slot index = extent * max_ppe + index in the extent. */
struct slot {
    int32_t refs; /* sequences that reference it */
    int32_t node; /* prefix node that holds it, -1 none */
    int32_t next; /* in the extent's free chain */
    int32_t seen; /* scratch of kvpool_check */
};

/* One cached block: its pages, and the tokens they were computed from. */
struct prefix_node {
    uint64_t hash[2]; /* of salt, classes and all tokens up to this block's end */
    uint64_t salt, serial;
    int32_t tokens[KVPOOL_BLOCK];
    int32_t pages[KVPOOL_N_CLASSES]; /* page ids; -1 where the class is not part of the pair */
    int32_t parent, first_child, prev_sibling, next_sibling;
    int32_t bucket_next;
    int32_t lru_prev, lru_next; /* on the list while n_idle > 0 */
    uint64_t mark;              /* registration: on the chain being extended */
    int8_t n_idle;              /* pages that no sequence references */
    uint8_t classes;            /* bit per class */
    uint8_t origin;
    bool live;
};

struct seq {
    bool open, with_draft;
    uint8_t classes; /* bit per class that has pages here */
    uint64_t salt;
    int32_t n_tokens[KVPOOL_N_CLASSES]; /* addressable */
    int32_t n_blocks[KVPOOL_N_CLASSES]; /* pages held = ceil(n_tokens / block) */
    int32_t limit[KVPOOL_N_CLASSES];    /* pages held + reserved */
    int32_t reg_blocks;                 /* leading blocks known to be in the cache */
    int32_t reg_node;                   /* node of the last of them; valid while its serial is */
    uint64_t reg_serial;
    int32_t next_free;
};

struct class_state {
    size_t page_bytes;
    int ppe;     /* pages of an extent */
    int min_ext; /* guaranteed extents */
    int n_ext, n_pinned;
    int n_used, n_cached, n_reserved;
};

struct list {
    int32_t head, tail;
};

struct kvpool {
    size_t extent_bytes, arena_bytes;
    int n_extents, max_ppe, n_extents_free;
    int max_seqs, max_blocks, max_nodes;
    struct class_state cls[KVPOOL_N_CLASSES];
    struct list lists[LIST_NONE];
    uint64_t mark; /* last one given out */

    struct extent *extents; /* [n_extents] */
    struct slot *slots;     /* [n_extents][max_ppe] */

    struct seq *seqs; /* [max_seqs] */
    int32_t *tables;  /* [max_seqs][KVPOOL_N_CLASSES][max_blocks] */
    int32_t seq_free; /* chained by seq.next_free */
    int n_seqs;

    struct prefix_node *nodes; /* [max_nodes] */
    int32_t *buckets;          /* [n_buckets], a power of two */
    int n_buckets;
    int32_t node_free; /* chained by bucket_next */
    int n_nodes, n_generated;
    struct list lru; /* head = used last */
    uint64_t serial, hash_mask;

    long long n_lookups, n_hits, n_hit_tokens, n_lookup_tokens, n_evicted, n_hit_generated;
};

static inline bool kvpool__has(int classes, int c) {
    return classes >> c & 1;
}

/* ---- extents.c ---- */

void kvpool__extents_init(struct kvpool *p);
struct slot *kvpool__slot(const struct kvpool *p, int32_t page);
struct extent *kvpool__extent(const struct kvpool *p, int32_t page);

/* Would the invariant (I) hold with so many pages used, extents pinned and pages reserved more? */
bool kvpool__fits(const struct kvpool *p, const int more_used[KVPOOL_N_CLASSES],
                  const int more_pinned[KVPOOL_N_CLASSES],
                  const int more_reserved[KVPOOL_N_CLASSES]);

/* One reserved page of class c becomes used, with one reference. Evicts where it must. */
int32_t kvpool__page_take(struct kvpool *p, int c);

/* One more or one less reference by a sequence. */
void kvpool__page_ref(struct kvpool *p, int32_t page);
void kvpool__page_unref(struct kvpool *p, int32_t page);

/* The cache lets go of a page (slot.node is cleared). */
void kvpool__page_uncache(struct kvpool *p, int32_t page);

/* ---- prefix.c ---- */

void kvpool__prefix_init(struct kvpool *p);

/* Node of the block `tokens[0..64)` behind node `parent` (-1: the first block), or -1. */
int32_t kvpool__prefix_find(const struct kvpool *p, int32_t parent, uint64_t salt, int classes,
                            const int32_t *tokens);

/* A page of `node` went from used to cached, or back. */
void kvpool__prefix_idle(struct kvpool *p, int32_t node);
void kvpool__prefix_busy(struct kvpool *p, int32_t node);

/* Move the chain that ends in `node` to the young end, its first block youngest. */
void kvpool__prefix_touch(struct kvpool *p, int32_t node);

/* Forget `node` and all nodes behind it. */
void kvpool__prefix_drop(struct kvpool *p, int32_t node);

/* Forget the node that was used longest ago among those that hold an unused page; false: none. */
bool kvpool__prefix_evict(struct kvpool *p);

void kvpool__prefix_check(const struct kvpool *p);

/* For tests: only these bits of a hash count, so that collisions become frequent. Call before
 * anything is registered. */
void kvpool__set_hash_mask(struct kvpool *p, uint64_t mask);

/* ---- seqs.c ---- */

void kvpool__seqs_init(struct kvpool *p);
void kvpool__seqs_check(const struct kvpool *p);

static inline int32_t *kvpool__table(const struct kvpool *p, int seq, int c) {
    return p->tables + ((size_t)seq * KVPOOL_N_CLASSES + (size_t)c) * (size_t)p->max_blocks;
}

#endif
