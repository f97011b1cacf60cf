#ifndef TANDEM_KVPOOL_H
#define TANDEM_KVPOOL_H

/* One pool of KV pages for a draft and a target together. A page holds one block (64 tokens) of one
 * class: all draft layers, the target's shallow layers, or its deep layers. The arena is cut into
 * extents; an extent serves one class until it is empty again, so memory moves between draft and
 * target with load; each class has a guaranteed minimum, the rest floats. Pages are
 * reference-counted and shared by prefix.
 *
 * Admission reserves: a sequence is admitted only when every page that it may ever need (prompt +
 * max_tokens + look-ahead) is set aside, so that a running sequence never runs out. Cached prefixes
 * hold no reservation: they are forgotten, oldest first, when a reservation needs their pages.
 *
 * Invariant, asserted on every change and tested against a naive model: for every class
 * free + used + cached = total of its extents, and reserved <= free + cached + what empty extents
 * give.
 *
 * The pool is bookkeeping: it never touches the pages' bytes. Owned by the step thread; not thread
 * safe. Nothing allocates after open. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;
struct kvpool;

enum kvpool_class { KVPOOL_DRAFT, KVPOOL_SHALLOW, KVPOOL_DEEP, KVPOOL_N_CLASSES };
const char *kvpool_class_name(enum kvpool_class c); /* "draft", "shallow", "deep" */

enum {
    KVPOOL_BLOCK = 64,       /* tokens a page */
    KVPOOL_ALIGN = 1024,     /* bytes; page sizes are multiples */
    KVPOOL_SHARED_TAIL = 32, /* after a prefix hit at least so many prompt tokens are recomputed */
};

/* Geometry of one class's page: [layer][K or V][kv head] of 64 x head_dim elements, and behind them
 * what else a block is remembered by: bytes that its user alone interprets. */
struct kvpool_page_shape {
    int n_layers; /* 0: the class is not used */
    int n_kv_heads, head_dim;
    int elem_bytes;  /* 1, 2 or 4 */
    int scale_bytes; /* behind the elements of each (layer, K or V, head): scales of 8-bit KV */
    int state_bytes; /* behind K and V: representatives of the block (target/); 0: none */
};
/* Bytes of a page, rounded up to KVPOOL_ALIGN; 0 where the product overflows. */
size_t kvpool_page_bytes(const struct kvpool_page_shape *s);
/* Where the state bytes begin in a page, 64-byte aligned; 0 where there are none. */
size_t kvpool_state_offset(const struct kvpool_page_shape *s);

struct kvpool_options {
    struct kvpool_page_shape shape[KVPOOL_N_CLASSES];
    size_t arena_bytes;                 /* of all pages; rounded down to whole extents */
    size_t min_bytes[KVPOOL_N_CLASSES]; /* guaranteed, rounded down to whole extents; sum <=
                                           arena_bytes */
    int max_seqs;                       /* sequences that may be open at once */
    int max_blocks;                     /* blocks of the longest sequence */
    int max_cached;                     /* prefix-cache nodes (blocks); 0: no cache */
};

/* How the arena will be cut: a pure function of the options, used by open and by the plan. An
 * extent holds whole pages of every class; its size is chosen so that the unused end of an extent,
 * the arena's rest and half an extent per class (lost on average to rounding) are least. */
struct kvpool_geometry {
    size_t extent_bytes;
    int n_extents;
    size_t page_bytes[KVPOOL_N_CLASSES];
    int pages_per_extent[KVPOOL_N_CLASSES];
    int min_extents[KVPOOL_N_CLASSES];
};
int kvpool_geometry(const struct kvpool_options *o, struct kvpool_geometry *out, struct err *e);

/* Most blocks b such that n_seqs sequences of b blocks each fit in an empty pool (not limited by
 * max_blocks). */
int kvpool_geometry_max_blocks(const struct kvpool_geometry *g, int n_seqs, bool with_draft);

/* Most sequences of n_tokens each that fit in an empty pool (not limited by max_seqs). */
int kvpool_geometry_max_seqs(const struct kvpool_geometry *g, int n_tokens, bool with_draft);

/* Carve the bookkeeping (host memory, one allocation). The arena itself is the backend's; see
 * kvpool_page_offset. E_NOMEM, E_RANGE with names and values. */
int kvpool_open(struct kvpool **out, const struct kvpool_options *o, struct err *e);
void kvpool_close(struct kvpool *p);

/* Host bytes that kvpool_open takes for these options (the plan prints them; open takes exactly
 * that); 0 for options that open refuses. */
size_t kvpool_host_bytes(const struct kvpool_options *o);

/* A page id is the page's byte offset in the arena in units of KVPOOL_ALIGN, whatever its class: a
 * kernel addresses page p at arena + p * KVPOOL_ALIGN, and an extent of any class may lie anywhere.
 */
static inline size_t kvpool_page_offset(int page) {
    return (size_t)page * KVPOOL_ALIGN;
}

/* ---- Sequences ---- */

/* How many pages of each class a sequence of n_tokens needs. */
void kvpool_need(const struct kvpool *p, int n_tokens, bool with_draft, int need[KVPOOL_N_CLASSES]);

/* Could n_tokens ever fit (an empty pool)? For refusal at admission. */
bool kvpool_can_ever_fit(const struct kvpool *p, int n_tokens, bool with_draft);

/* Most tokens of one sequence in an empty pool. */
int kvpool_max_tokens(const struct kvpool *p, bool with_draft);

/* What a sequence asks for. */
struct kvpool_want {
    int n_tokens;          /* most that it will ever hold, prompt included */
    bool with_draft;       /* pages of the draft class too */
    int draft_blocks;      /* most draft blocks at once (a sink and a window), 0: all of n_tokens */
    const int32_t *prompt; /* [n_prompt] to look up; NULL: no lookup. Not kept */
    int n_prompt;
    uint64_t salt;         /* tenant: prefixes are shared inside it only */
    uint64_t conversation; /* generated blocks are found and registered under it; 0: neither */
};

/* Open a sequence and reserve its pages; forgets cached prefixes where it must. With a prompt and a
 * cache, the longest cached prefix of prompt[0..n_prompt) under `salt` is taken first (its pages
 * shared, reference counted), never more than n_prompt - KVPOOL_SHARED_TAIL tokens rounded down to
 * blocks; *n_hit gets its tokens: positions below it are addressable in the target's classes. Draft
 * pages are part of a cached prefix where the draft had seen it: *n_draft_hit <= *n_hit tokens from
 * the start are addressable in the draft class; where that would be draft_blocks pages or more, the
 * first block and the newest draft_blocks - 2 of them are, and the table entries between are -1.
 * Blocks that an answer wrote are only taken by a sequence of the same conversation. The hit is
 * shorter than what is cached where taking all of it would not fit. E_FULL: no room now (nothing
 * changed); E_TOO_LONG: can never fit; E_RANGE: n_tokens < 1, n_prompt outside 0..n_tokens or
 * draft_blocks < 0. */
int kvpool_seq_open(struct kvpool *p, const struct kvpool_want *want, int *seq, int *n_hit,
                    int *n_draft_hit, struct err *e);

/* Take back a sequence's draft pages and their reservation: it goes on without a draft. Nothing
 * happens where it has none. */
void kvpool_seq_drop_draft(struct kvpool *p, int seq);
bool kvpool_seq_has_draft(const struct kvpool *p, int seq);

/* Give back the draft pages of blocks [first, end), which the draft will not read again (behind its
 * window); their table entries become -1. They count against draft_blocks no longer: as many pages
 * are reserved again. Without draft_blocks nothing is: what is reserved reaches to the end of the
 * sequence anyway. Blocks given back already are passed over; a partly filled last block stays. A
 * block that is given back before it was registered ends the part of the draft that is cached. */
void kvpool_seq_forget_draft(struct kvpool *p, int seq, int first, int end);

/* Make positions < n_tokens of class c addressable: takes pages from the reservation. Never fails
 * within the reservation (asserted). Nothing happens where n_tokens are addressable already.
 * Asserts that a partly filled last block, which the caller is about to write, is not shared: see
 * kvpool_seq_writable. */
void kvpool_seq_extend(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens);

/* Roll class c back to n_tokens: pages that become empty go back to the reservation. Nothing
 * happens where it is shorter already. A whole block that another sequence shares (never one above
 * what is committed) goes back only where a page more can be promised; see kvpool_seq_limit. */
void kvpool_seq_truncate(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens);

/* Make the page of block `block_idx` this sequence's own. Needed only before rewriting positions in
 * a block that is shared or cached, i.e. after a truncate into a block that came from a hit or was
 * registered. The round never does that: hits are whole blocks, only committed whole blocks are
 * registered, and a rollback stays at or above what is committed. A page that only the cache shares
 * is taken out of the cache (with all cached blocks behind it; a draft page alone). A page that
 * another sequence uses is replaced: *must_copy is true, and the caller copies the bytes of page
 * *src to page *dst before the write. E_FULL: no page to copy to (nothing changed). */
int kvpool_seq_writable(struct kvpool *p, int seq, enum kvpool_class c, int block_idx,
                        bool *must_copy, int32_t *src, int32_t *dst, struct err *e);

/* Up to how many tokens extend cannot fail. Constant but for a truncate that gives back blocks
 * shared with another sequence in a pool that is full, and with draft_blocks, where it moves with
 * the pages held: draft_blocks never shrinks, whoever shares them. */
int kvpool_seq_limit(const struct kvpool *p, int seq, enum kvpool_class c);

/* Tokens addressable in class c. */
int kvpool_seq_n_tokens(const struct kvpool *p, int seq, enum kvpool_class c);

/* Page table of a class: ids of blocks 0..n-1 (-1: a draft block given back), valid until the next
 * call that changes the sequence. */
const int32_t *kvpool_seq_pages(const struct kvpool *p, int seq, enum kvpool_class c,
                                int *n_blocks);

/* Register the full blocks of tokens[0..n_committed) in the prefix cache: only committed tokens,
 * only whole blocks; pages stay the sequence's too. A block is registered once its target pages are
 * full; its draft page joins it when the draft has seen it too (a draft that lags is caught up by a
 * later call). `origin` says by which law the blocks new in this call were computed; register a
 * prompt with KVPOOL_PROMPT before the first answer token is committed, so that only the block on
 * the border counts as generated (and all that follow it, whatever their own origin: they depend on
 * it). Generated blocks are registered under the sequence's conversation and found by it alone;
 * conversation 0 registers none. The first call with KVPOOL_GENERATED ends the prompt: later calls
 * cannot extend it. A block that is cached already keeps its older page. Cheap when no new block is
 * complete. A full cache forgets the node unused longest; one full of nodes in use registers
 * nothing. See docs/kvpool.md, "Generated pages". */
enum kvpool_origin { KVPOOL_PROMPT, KVPOOL_GENERATED };
void kvpool_seq_register(struct kvpool *p, int seq, const int32_t *tokens, int n_committed,
                         enum kvpool_origin origin);

/* A walk along the cached blocks of a prompt as kvpool_seq_open would find them, for what its
 * caller knows of them. Begin with node -1; where the pool has changed since, ask
 * kvpool_walk_holds. */
struct kvpool_walk {
    uint64_t salt, conversation;
    int32_t node;
    uint64_t serial; /* of the block reached: no other block of this pool ever has it */
};
/* Step to the block of the next tokens[KVPOOL_BLOCK]; false: it is not cached. Blocks are compared
 * token by token: an equal serial is an equal text from the prompt's first token on. */
bool kvpool_walk_next(const struct kvpool *p, struct kvpool_walk *w, const int32_t *tokens);
/* Is the block that it came to cached still, and so all before it? Then it can go on. */
bool kvpool_walk_holds(const struct kvpool *p, const struct kvpool_walk *w);

/* Close: references dropped, reservation returned; pages that the cache holds stay cached. */
void kvpool_seq_close(struct kvpool *p, int seq);

/* Forget every cached prefix that no sequence uses. */
void kvpool_cache_clear(struct kvpool *p);

/* ---- What it holds ---- */

struct kvpool_stats {
    size_t arena_bytes;
    int n_extents, n_extents_free;
    struct kvpool_class_stats {
        size_t page_bytes;
        int total;    /* pages in extents of this class */
        int free;     /* in those extents, nobody's */
        int used;     /* referenced by at least one sequence */
        int cached;   /* held by the cache alone */
        int reserved; /* promised to open sequences, not yet taken */
    } of[KVPOOL_N_CLASSES];
    size_t extent_bytes;
    int n_seqs, n_cached_nodes;
    int n_generated_nodes; /* of those, KVPOOL_GENERATED */
    int n_draft_nodes;     /* of those, with a draft page */
    /* admitted sequences that brought a prompt; of those with a hit; tokens; nodes forgotten */
    long long n_lookups, n_hits, n_hit_tokens, n_lookup_tokens, n_evicted;
    long long n_hit_generated_tokens; /* of n_hit_tokens, in KVPOOL_GENERATED blocks */
    long long n_hit_draft_tokens;     /* of n_hit_tokens, the draft's too */
    long long n_evicted_draft;        /* draft pages that a node lost while it stayed */
    long long n_draft_dropped;        /* sequences that went on without a draft */
};
void kvpool_get_stats(const struct kvpool *p, struct kvpool_stats *out);

/* Walk everything and ASSERT each invariant (tests, debug builds, end of a soak). */
void kvpool_check(const struct kvpool *p);

#endif
