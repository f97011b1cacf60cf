#ifndef TANDEM_KVPOOL_H
#define TANDEM_KVPOOL_H

/* One pool of KV pages for a draft and a target together. A page holds one block (64 tokens) of one class:
 * all draft layers, the target's shallow layers, or its deep layers. The arena is cut into extents; an
 * extent serves one class until it is empty again, so memory moves between draft and target with load;
 * each class has a guaranteed minimum, the rest floats. Pages are reference-counted and shared by prefix.
 *
 * Admission reserves: a sequence is admitted only when every page that it may ever need (prompt +
 * max_tokens + look-ahead) is set aside, so that a running sequence never runs out. Cached prefixes hold no
 * reservation: they are forgotten, oldest first, when a reservation needs their pages.
 *
 * Invariant, asserted on every change and tested against a naive model: for every class
 * free + used + cached = total of its extents, and reserved <= free + cached + what empty extents give.
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

/* Geometry of one class's page: [layer][K or V][kv head][64][head_dim] elements. */
struct kvpool_page_shape {
    int n_layers; /* 0: the class is not used */
    int n_kv_heads, head_dim;
    int elem_bytes;  /* 2 or 4 */
    int scale_bytes; /* bytes of a scale plane per (layer, K or V, head); 0 until 8-bit KV */
};
/* Bytes of a page, rounded up to KVPOOL_ALIGN; 0 where the product overflows. */
size_t kvpool_page_bytes(const struct kvpool_page_shape *s);

struct kvpool_options {
    struct kvpool_page_shape shape[KVPOOL_N_CLASSES];
    size_t arena_bytes;                     /* of all pages; rounded down to whole extents */
    size_t min_bytes[KVPOOL_N_CLASSES];     /* guaranteed; sum <= arena_bytes */
    int max_seqs;                           /* sequences that may be open at once */
    int max_blocks;                         /* blocks of the longest sequence */
    int max_cached;                         /* prefix-cache nodes; 0: no cache */
};

/* Carve the bookkeeping (host memory). The arena itself is the backend's; see
 * kvpool_page_offset. E_NOMEM, E_RANGE with names and values. */
int kvpool_open(struct kvpool **out, const struct kvpool_options *o, struct err *e);
void kvpool_close(struct kvpool *p);

/* Host bytes that kvpool_open takes for these options (the plan prints them; open takes exactly that). */
size_t kvpool_host_bytes(const struct kvpool_options *o);

/* A page id is the page's byte offset in the arena in units of KVPOOL_ALIGN, whatever its class: a kernel
 * addresses page p at arena + p * KVPOOL_ALIGN, and an extent of any class may lie anywhere. */
static inline size_t kvpool_page_offset(int page) { return (size_t)page * KVPOOL_ALIGN; }

/* ---- Sequences ---- */

/* How many pages of each class a sequence of n_tokens needs. */
void kvpool_need(const struct kvpool *p, int n_tokens, bool with_draft, int need[KVPOOL_N_CLASSES]);

/* Could n_tokens ever fit (an empty pool)? For refusal at admission. */
bool kvpool_can_ever_fit(const struct kvpool *p, int n_tokens, bool with_draft);

/* Most tokens of one sequence in an empty pool. */
int kvpool_max_tokens(const struct kvpool *p, bool with_draft);

/* Open a sequence and reserve pages for n_tokens in all; forgets cached prefixes where it must. With a
 * prompt and a cache, the longest cached prefix of prompt[0..n_prompt) under `salt` is taken first (its pages
 * shared, reference counted), never more than n_prompt - KVPOOL_SHARED_TAIL tokens rounded down to blocks;
 * *n_hit gets its tokens. E_FULL: no room now (nothing changed); E_TOO_LONG: can never fit. */
int kvpool_seq_open(struct kvpool *p, int n_tokens, bool with_draft, const int32_t *prompt,
                    int n_prompt, uint64_t salt, int *seq, int *n_hit, struct err *e);

/* Make positions < n_tokens of class c addressable: takes pages from the reservation. Never fails
 * within the reservation (asserted). */
void kvpool_seq_extend(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens);

/* Roll class c back to n_tokens: pages that become empty go back to the reservation. */
void kvpool_seq_truncate(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens);

/* Page table of a class: ids of blocks 0..n-1, valid until the next call that changes the sequence. */
const int32_t *kvpool_seq_pages(const struct kvpool *p, int seq, enum kvpool_class c, int *n_blocks);

/* Register the full blocks of tokens[0..n_committed) in the prefix cache: only committed tokens, only
 * whole blocks; pages stay the sequence's too. `kind` says by which law they were computed. */
enum kvpool_origin { KVPOOL_PROMPT, KVPOOL_GENERATED };
void kvpool_seq_register(struct kvpool *p, int seq, const int32_t *tokens, int n_committed,
                         enum kvpool_origin origin, uint64_t salt);

/* Close: references dropped, reservation returned; pages that the cache holds stay cached. */
void kvpool_seq_close(struct kvpool *p, int seq);

/* Give back what is reserved beyond n_tokens (an answer that ends early keeps nothing). */
void kvpool_seq_shrink(struct kvpool *p, int seq, int n_tokens);

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
    int n_seqs, n_cached_nodes;
    long long n_lookups, n_hits, n_hit_tokens, n_lookup_tokens, n_evicted;
};
void kvpool_get_stats(const struct kvpool *p, struct kvpool_stats *out);

/* Walk everything and ASSERT each invariant (tests, debug builds, end of a soak). */
void kvpool_check(const struct kvpool *p);

#endif
