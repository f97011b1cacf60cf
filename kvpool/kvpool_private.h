#ifndef TANDEM_KVPOOL_PRIVATE_H
#define TANDEM_KVPOOL_PRIVATE_H

/* What the files of kvpool/ share: extents.c moves pages between free, used and cached; prefix.c
 * knows which tokens a cached page holds; registration.c adds a sequence's blocks to it;
 * admission.c opens sequences; seqs.c grows, rolls back and closes them; kvpool.c carves the one
 * block of host memory that all of it lives in. Indexes instead of pointers, -1 is none.
 *
 * ---- Why extend never fails within a reservation ----
 *
 * Per class c: used_c pages are referenced by sequences, reserved_c are promised, ppe_c fit in an
 * extent, pinned_c extents hold at least one used page, min_c extents are guaranteed. charged_c is
 * what used pages cost: in the target's classes 1 each, so charged_c = used_c. A draft page costs 1
 * for each windowed sequence (one that may hold fewer pages than it has blocks) that references it,
 * and 1 for all others together: a windowed sequence will give the page back while the others keep
 * it, and then needs another in its place. Always charged_c >= used_c. Let
 *     need_c = max(pinned_c, ceil((charged_c + reserved_c) / ppe_c), min_c).
 * Invariant (I): the sum of need_c over the classes is at most n_extents. It is checked where it
 * could break, at admission, and kept by everything else:
 *  - a windowed sequence that gives a draft page back, by truncate or forget_draft, turns one
 * charged page into a reserved one, whoever shares it: the sum charged + reserved stays, pinned_c
 * can only fall;
 *  - truncate by any other turns charged into reserved likewise, but where another that is not
 *    windowed shares the page: it stays charged, so its replacement is reserved only where (I)
 *    allows, else the limit falls by one;
 *  - forget_draft by a sequence that is not windowed gives its page away for good: the charge may
 *    fall, nothing is reserved (what is reserved reaches to the sequence's end without it);
 *  - close and drop_draft lower charged + reserved, pinned_c can only fall;
 *  - registration gives used pages a node, a draft page that joins a node late included: no count
 *    of need_c changes, since a page counts as cached only while nobody uses it;
 *  - eviction, of a node or of its draft page alone, turns cached into free, which need_c does not
 *    mention;
 *  - a hit adds charges and may pin extents: part of the admission check, for the target's pages
 * and for the draft's, which a hit takes all, in part or not at all;
 *  - extend turns one reserved page into a charged one. kvpool__page_take picks the page:
 *      1. a free page in a pinned extent of c: need_c unchanged;
 *      2. if (I) also holds with pinned_c + 1: a page of an unpinned extent (one of c that holds
 *         cached pages only, or an empty one). There is one, perhaps after evictions: by (I) with
 *         pinned_c + 1, the pinned extents are fewer than n_extents, and an unpinned extent holds
 *         only cached pages, each of which can be evicted;
 *      3. otherwise pinned_c + 1 exceeds ceil((charged_c + reserved_c) / ppe_c), so that
 *         pinned_c * ppe_c >= charged_c + reserved_c > charged_c >= used_c: some page of a pinned
 *         extent of c is not used; it is not free (case 1), so it is cached: it is evicted, then
 *         case 1.
 * Every cached page can be evicted: a draft page leaves its node, a target page takes its node
 * along with the subtree below it; a page of that subtree that a sequence uses merely stops being
 * findable. The loop of case 2 ends: a node with a cached page is on one of the two lists of
 * prefix.c, and each eviction frees at least one cached page and makes none.
 * So pages of a class that lie free in extents of other classes never matter: they are not counted.
 *
 * A sequence's reservation in class c is limit - n_held, never below zero: a page enters n_held by
 * a hit (admission reserves that much less) or by extend (which asserts that it is reserved). In
 * the target's classes n_held = n_blocks; in the draft class blocks that were given back leave
 * holes in the table, so a table may be longer than the limit. */

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
    uint64_t mark;            /* admission: n_new counts for this look-up */
    int32_t n_new;            /* scratch of admission: pages that a hit would make used */
    int8_t cls, list;         /* cls -1: empty */
};

/* One page's place; slot index = extent * max_ppe + index in the extent. */
struct slot {
    int32_t refs;       /* sequences that reference it */
    int32_t n_windowed; /* of those, windowed */
    int32_t node;       /* prefix node that holds it, -1 none */
    int32_t next;       /* in the extent's free chain */
    int32_t seen;       /* scratch of kvpool_check, which counts both anew */
    int32_t seen_windowed;
};

/* Lists of nodes in order of last use. A node whose target pages are in use while its draft page is
 * not (its user goes without a draft) can give that page up and stay. */
enum { LRU_WHOLE, LRU_DRAFT, N_LRUS };

/* One cached block: its pages, and the tokens they were computed from. */
struct prefix_node {
    uint64_t hash[2]; /* of salt, owner and all tokens up to this block's end */
    uint64_t salt, serial;
    uint64_t owner; /* conversation whose answer it is; 0: a prompt's block, everybody's */
    int32_t tokens[KVPOOL_BLOCK];
    int32_t pages[KVPOOL_N_CLASSES]; /* page ids; -1: a class without layers, or no draft page */
    int32_t parent, first_child, prev_sibling, next_sibling;
    int32_t bucket_next;
    int32_t lru_prev, lru_next;
    int32_t down;         /* scratch: the next node of the chain being walked */
    uint64_t mark;        /* registration: on the chain being extended */
    int8_t n_idle_target; /* target pages that no sequence references: > 0: on LRU_WHOLE */
    bool idle_draft;      /* likewise; where it is the only one: on LRU_DRAFT */
    bool live;
};

struct seq {
    bool open;
    bool windowed;   /* may hold fewer draft pages at once than it has blocks */
    bool answered;   /* blocks from n_prompt_blocks on count as generated */
    uint8_t classes; /* bit per class that has pages here */
    uint64_t salt, conversation;
    int32_t n_tokens[KVPOOL_N_CLASSES]; /* addressable */
    int32_t n_blocks[KVPOOL_N_CLASSES]; /* entries of the table = ceil(n_tokens / block) */
    int32_t n_held[KVPOOL_N_CLASSES];   /* of those, with a page: all but in the draft class */
    int32_t limit[KVPOOL_N_CLASSES];    /* pages held + reserved */
    int32_t end[KVPOOL_N_CLASSES];      /* most entries */
    int32_t hole_first, hole_end;       /* these blocks' draft pages are given back */
    int32_t n_prompt_blocks;            /* leading blocks that were computed as a prompt */
    int32_t reg_blocks;                 /* leading blocks known to be in the cache */
    int32_t reg_tried;       /* blocks at the last try: a full cache is not asked again */
    int32_t reg_draft;       /* leading blocks whose nodes had a draft page when passed */
    int32_t reg_draft_tried; /* likewise: a hole is not tried again before the next block */
    int32_t reg_node;        /* node of reg_blocks - 1; valid while its serial is */
    uint64_t reg_serial;
    int32_t next_free;
};

struct class_state {
    size_t page_bytes;
    int ppe;     /* pages of an extent */
    int min_ext; /* guaranteed extents */
    int n_ext, n_pinned;
    int n_used, n_cached, n_reserved;
    int n_charged; /* see above */
};

struct list {
    int32_t head, tail;
};

struct kvpool {
    size_t extent_bytes, arena_bytes;
    int n_extents, max_ppe, n_extents_free;
    int max_seqs, max_blocks, max_nodes;
    struct class_state cls[KVPOOL_N_CLASSES];
    struct list lists[LIST_NONE]; /* of extents */
    uint64_t mark;                /* last one given out */

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
    int n_nodes, n_generated, n_draft_nodes;
    struct list lru[N_LRUS]; /* head = used last */
    uint64_t serial, hash_mask;

    long long n_lookups, n_hits, n_hit_tokens, n_lookup_tokens, n_hit_generated, n_hit_draft;
    long long n_evicted, n_evicted_draft, n_draft_dropped;
};

static inline bool kvpool__has(int classes, int c) {
    return classes >> c & 1;
}

/* ---- extents.c ---- */

void kvpool__extents_init(struct kvpool *p);
struct slot *kvpool__slot(const struct kvpool *p, int32_t page);
struct extent *kvpool__extent(const struct kvpool *p, int32_t page);

/* need_c of the proof with so many pages (used or reserved) and pinned extents more. */
long long kvpool__extents_needed(const struct kvpool *p, int c, int more_pages, int more_pinned);

/* Would the invariant (I) hold with so many pages and pinned extents of class c more? */
bool kvpool__fits(const struct kvpool *p, int c, int more_pages, int more_pinned);

/* One reserved page of class c becomes used, with one reference. Evicts where it must. */
int32_t kvpool__page_take(struct kvpool *p, int c, bool windowed);

/* One more or one less reference by a sequence. */
void kvpool__page_ref(struct kvpool *p, int32_t page, bool windowed);
void kvpool__page_unref(struct kvpool *p, int32_t page, bool windowed);

/* The cache lets go of a page (slot.node is cleared). */
void kvpool__page_uncache(struct kvpool *p, int32_t page);

/* ---- prefix.c ---- */

void kvpool__prefix_init(struct kvpool *p);

/* Node of the block `tokens[0..64)` of this owner behind node `parent` (-1: the first block), or
 * -1.
 */
int32_t kvpool__prefix_find(const struct kvpool *p, int32_t parent, uint64_t salt, uint64_t owner,
                            const int32_t *tokens);

/* One step of a look-up by a sequence of `conversation`: the prompt's block that everybody shares,
 * else the conversation's own, else -1. Behind a generated block there are only generated ones. */
int32_t kvpool__prefix_next(const struct kvpool *p, int32_t parent, uint64_t salt,
                            uint64_t conversation, const int32_t *tokens);

/* A page of `node`, of class c, went from used to cached, or back. */
void kvpool__prefix_idle(struct kvpool *p, int32_t node, int c);
void kvpool__prefix_busy(struct kvpool *p, int32_t node, int c);

/* Move the chain that ends in `node` to the young end, its first block youngest. */
void kvpool__prefix_touch(struct kvpool *p, int32_t node);

/* Forget `node` and all nodes behind it. */
void kvpool__prefix_drop(struct kvpool *p, int32_t node);

/* `node` loses its draft page and stays. */
void kvpool__prefix_drop_draft(struct kvpool *p, int32_t node);

/* Free at least one cached page: the draft page unused longest of a node whose target is in use,
 * where there is none the node unused longest. False: nothing is cached. */
bool kvpool__prefix_evict(struct kvpool *p);

/* The pages of a sequence's block become a node behind `parent`; owner 0: a prompt's. Nodes that
 * carry `mark` are not forgotten for it. -1: no node can be had. */
int32_t kvpool__prefix_add(struct kvpool *p, int seq, int block, int32_t parent, uint64_t owner,
                           uint64_t mark, const int32_t *tokens);

/* `page`, which a sequence uses, becomes the draft page of `node`, which has none. */
void kvpool__prefix_attach_draft(struct kvpool *p, int32_t node, int32_t page);

void kvpool__prefix_check(const struct kvpool *p);

/* For tests: only these bits of a hash count, so that collisions become frequent. Call before
 * anything is registered. */
void kvpool__set_hash_mask(struct kvpool *p, uint64_t mask);

/* ---- admission.c, registration.c, seqs.c ---- */

void kvpool__seqs_init(struct kvpool *p);
void kvpool__seqs_check(const struct kvpool *p);

static inline int kvpool__blocks_of(int n_tokens) {
    return n_tokens / KVPOOL_BLOCK + (n_tokens % KVPOOL_BLOCK != 0);
}

static inline int32_t kvpool__min(int32_t a, int32_t b) {
    return a < b ? a : b;
}

static inline int32_t *kvpool__table(const struct kvpool *p, int seq, int c) {
    return p->tables + ((size_t)seq * KVPOOL_N_CLASSES + (size_t)c) * (size_t)p->max_blocks;
}

#endif
