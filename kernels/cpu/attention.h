#ifndef TANDEM_KERNELS_CPU_ATTENTION_H
#define TANDEM_KERNELS_CPU_ATTENTION_H

/* Private: how one attention call is cut up.
 *
 * A *tile* is some consecutive rows of one sequence and class with all query heads of one KV head:
 * its queries share every key and value that is read. A tile's list entries form *leaves* of 8 (512
 * tokens); leaf i covers entries 8i..8i+7. Leaves are reduced over the aligned binary tree: node
 * (level, idx) covers leaves [idx << level, (idx + 1) << level), a node without a right half equals
 * its left half. An *item* is one node of the call's level for one tile; the thread that finishes a
 * tile's last item reduces its nodes. A query's bits depend on its own leaves alone, whatever the
 * tile, level or thread.
 *
 * Partials of a query are a *slot*: o[dim] (sum of p v, not normalised), then m (largest score) and
 * l (sum of p); m = -infinity with l = 0 is the empty node, identity of the reduction.
 *
 * What a row cannot see (later positions, the idle tail of a page, masked rows of a token tree) is
 * never multiplied in: its scores are replaced before use and its values skipped, whatever bytes
 * lie there.
 *
 * Bytes counted in kv_bytes_read, per tile and leaf: K's columns of the quarters that are listed
 * (all 64, nearly always) and of these quarters the rows of V up to the last token that a row of
 * the tile sees, for every page that holds such a token; the mass tap reads K again. */

#include <stdatomic.h>

#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/cpu.h"

enum {
    ATTN_GEN_Q = 48, /* queries of a tile of generated rows (more where one row has more heads) */
    ATTN_PROMPT_Q = 64, /* of prompt rows */
    ATTN_AMX_Q = 192,   /* of prompt rows on AMX */
    ATTN_MAX_Q = 192,
    ATTN_AMX_GROUP = 32,                   /* queries that AMX multiplies at a time */
    ATTN_ENTRIES = KERN_LEAF / KERN_BLOCK, /* list entries of a leaf */
    ATTN_MAX_DEPTH = 32,                   /* unreduced nodes that an item may hold */
    ATTN_ITEMS_PER_THREAD = 8,
    ATTN_GEN_ITEMS_PER_THREAD = 24, /* in a pass without prompt rows: its items are small */
};

/* The slots of items are laid out for ATTN_MAX_Q queries each; small tiles have more items. */
_Static_assert((int)ATTN_GEN_ITEMS_PER_THREAD *(int)KERN_MAX_GROUP <=
                       (int)ATTN_ITEMS_PER_THREAD * (int)ATTN_MAX_Q &&
                   (int)ATTN_GEN_Q <= (int)KERN_MAX_GROUP,
               "slots of generated rows");

struct attn_tile {
    int seq, head;   /* head: KV head */
    int row, n_rows; /* rows of the batch */
    bool prompt;
    size_t list;   /* index of its list */
    int n_entries; /* leading entries with a token that some row sees */
    int n_nodes;   /* at least 1 */
    int first_item;
    size_t slot;       /* its slots: [n_nodes][n_rows * group] */
    atomic_int n_left; /* items not finished */
};

struct attn_job {
    const struct cpu_ctx *ctx;
    const struct kern_batch *batch;
    const struct kern_lists *lists;
    const struct kern_kv *kv;
    const struct kern_attn_taps *taps; /* never NULL here */
    int n_heads, group;
    float scale;
    const float *qkv;
    int qkv_stride;  /* floats a row */
    float *out;      /* [n_rows][n_heads * head_dim] */
    int dim;         /* head_dim rounded up to 16 */
    int slot_floats; /* dim + 16: m at [dim], l at [dim + 1] */
    int level;       /* of an item's node */
    int n_tiles, n_items;
    struct attn_tile *tiles;
    float *slots;
    uint8_t *thread_scratch;
    size_t thread_scratch_bytes;
    atomic_int next; /* item to be taken */
    atomic_ullong kv_bytes;
};

static inline int attn_n_leaves(int n_entries) {
    return (n_entries + ATTN_ENTRIES - 1) / ATTN_ENTRIES;
}

/* Of an element; 8-bit pages have their own functions. */
static inline size_t attn_kv_bytes(enum kern_dtype t) {
    return t == KERN_F32 ? 4 : 2;
}

/* Do 8-bit pages go as such? Prompt rows read them widened. */
static inline bool attn_uses_q8(const struct kern_kv *kv, const struct attn_tile *t) {
    return kv->dtype == KERN_Q8_0 && !t->prompt;
}

static inline const uint8_t *attn_page(const struct attn_job *j, const struct attn_tile *t,
                                       int entry, bool value) {
    const struct kern_kv *kv = j->kv;
    int32_t page = j->lists->page[t->list * (size_t)j->lists->capacity + (size_t)entry];
    return (const uint8_t *)kv->base + (size_t)page * kv->page_stride +
           (value ? kv->v_offset : kv->k_offset) + (size_t)t->head * kv->head_stride;
}

/* Quarters of the list entry that are read, and the tokens of quarters. */
static inline unsigned attn_quarters(const struct attn_job *j, const struct attn_tile *t,
                                     int entry) {
    const uint8_t *q = j->lists->quarters;
    return q ? q[t->list * (size_t)j->lists->capacity + (size_t)entry] & 15 : 15;
}
static inline uint64_t attn_quarter_tokens(unsigned quarters) {
    uint64_t tokens = 0;
    for (int i = 0; i < 4; i++)
        if (quarters >> i & 1) tokens |= (((uint64_t)1 << KERN_QUARTER) - 1) << (KERN_QUARTER * i);
    return tokens;
}

/* Bit i: does `row` see token i of the list entry? */
static inline uint64_t attn_visible(const struct attn_job *j, const struct attn_tile *t, int row,
                                    int entry) {
    const struct kern_batch *b = j->batch;
    if (b->row_seq[row] < 0) return 0;
    int32_t block = j->lists->block[t->list * (size_t)j->lists->capacity + (size_t)entry];
    int64_t n = (int64_t)b->position[row] - (int64_t)block * KERN_BLOCK + 1;
    if (n <= 0) return 0;
    uint64_t seen = n >= KERN_BLOCK ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1;
    if (j->lists->quarters) seen &= attn_quarter_tokens(attn_quarters(j, t, entry));
    if (!j->taps->ancestors) return seen;
    /* A token tree: rows of this pass are seen by their bit, everything older by position. */
    uint64_t mask = j->taps->ancestors[row];
    int first = b->seq_row[t->seq], n_pass = b->seq_n_rows[t->seq];
    for (int i = 0; i < n_pass && i < 64; i++) {
        int32_t at = b->position[first + i];
        if (at / KERN_BLOCK == block && !(mask >> i & 1))
            seen &= ~((uint64_t)1 << (at % KERN_BLOCK));
    }
    return seen;
}

/* What the rows of a tile see of a leaf. */
struct attn_sight {
    int e0, e1;                                    /* its entries */
    uint64_t any[ATTN_ENTRIES], all[ATTN_ENTRIES]; /* tokens that some row and every row sees */
    uint64_t row[ATTN_MAX_Q][ATTN_ENTRIES];
    bool row_any[ATTN_MAX_Q];
    unsigned quarters[ATTN_ENTRIES];
};

static inline void attn_look(const struct attn_job *j, const struct attn_tile *t, int leaf,
                             struct attn_sight *s) {
    s->e0 = leaf * ATTN_ENTRIES;
    s->e1 = s->e0 + ATTN_ENTRIES < t->n_entries ? s->e0 + ATTN_ENTRIES : t->n_entries;
    for (int r = 0; r < t->n_rows; r++) s->row_any[r] = false;
    for (int e = 0; e < s->e1 - s->e0; e++) {
        s->any[e] = 0;
        s->all[e] = ~(uint64_t)0;
        s->quarters[e] = attn_quarters(j, t, s->e0 + e);
        for (int r = 0; r < t->n_rows; r++) {
            uint64_t seen = attn_visible(j, t, t->row + r, s->e0 + e);
            s->row[r][e] = seen;
            s->row_any[r] |= seen != 0;
            s->any[e] |= seen;
            s->all[e] &= seen;
        }
    }
}

/* Tokens of a page up to the last one in `any` (not 0). */
static inline int attn_n_tokens(uint64_t any) {
    return KERN_BLOCK - __builtin_clzll(any);
}

/* Columns of K and rows of V that a tile reads of an entry of which it sees `any` (not 0). */
static inline uint64_t attn_n_read(unsigned quarters, uint64_t any) {
    uint64_t listed = attn_quarter_tokens(quarters);
    uint64_t until = ~(uint64_t)0 >> (KERN_BLOCK - attn_n_tokens(any));
    return (uint64_t)(__builtin_popcountll(listed) + __builtin_popcountll(listed & until));
}

static inline float *attn_slots(const struct attn_job *j, const struct attn_tile *t, int node) {
    size_t n_q = (size_t)t->n_rows * (size_t)j->group;
    return j->slots + (t->slot + (size_t)node * n_q) * (size_t)j->slot_floats;
}

/* Largest of the marked rows' masses so far; floats that are not negative order like their bits. */
static inline void attn_mass_max(float *at, float mass) {
    uint32_t now, want;
    memcpy(&want, &mass, 4);
    uint32_t *bits = (uint32_t *)(void *)at;
    now = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (now < want && !__atomic_compare_exchange_n(bits, &now, want, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
    }
}

/* Does the mass tap look at `row`? */
static inline bool attn_is_looked_at(const struct attn_job *j, int row) {
    return j->taps->mass_line[row] >= 0 && j->batch->row_seq[row] >= 0;
}

/* Share of list entry `entry` that query head g of the tile's KV head pays in `row`, to the taps.
 */
static inline void attn_add_mass(const struct attn_job *j, const struct attn_tile *t, int row,
                                 int g, int entry, double share) {
    size_t capacity = (size_t)j->lists->capacity, e = (size_t)entry;
    size_t line = (size_t)(j->taps->mass_line[row] + t->head * j->taps->mass_head_stride);
    if (j->taps->mass) attn_mass_max(&j->taps->mass[line * capacity + e], (float)share);
    if (!j->taps->head_mass) return;
    size_t head = (size_t)t->seq * (size_t)j->n_heads + (size_t)(t->head * j->group + g);
    j->taps->head_mass[head * capacity + e] += (float)share;
}

/* The same of the entry's quarters: parts of `sum`. */
static inline void attn_add_quarters(const struct attn_job *j, const struct attn_tile *t, int row,
                                     int entry, const float part[4], double sum) {
    size_t line = (size_t)(j->taps->mass_line[row] + t->head * j->taps->mass_head_stride);
    float *at = j->taps->quarter_mass + (line * (size_t)j->lists->capacity + (size_t)entry) * 4;
    for (int i = 0; i < 4; i++) attn_mass_max(at + i, (float)((double)part[i] / sum));
}

/* Scratch of attention_amx.c: packed queries, keys and values of a leaf, scores, weights, outputs.
 */
enum {
    ATTN_AMX_S = KERN_LEAF + 16,
    ATTN_AMX_P = KERN_LEAF + 32
}; /* strides that spread over cache sets */
static inline size_t attn_amx_bytes(int head_dim) {
    size_t kdim = align_up((size_t)head_dim, 32), dim = align_up((size_t)head_dim, 16);
    return (ATTN_AMX_Q + ATTN_AMX_GROUP) * kdim * 2 + KERN_LEAF * kdim * 2 + KERN_LEAF * dim * 2 +
           ATTN_AMX_GROUP * (ATTN_AMX_S * 4 + ATTN_AMX_P * 2 + dim * 4);
}

/* Scratch of attention_q8.c, for each element of a head: KERN_MAX_GROUP queries, 2 bytes each and
 * 12 for every 32. */
enum { ATTN_Q8_BYTES = KERN_MAX_GROUP * 2 + KERN_MAX_GROUP * 12 / 32 };

/* Offsets in a thread's scratch, and its bytes. */
struct attn_layout {
    size_t q;     /* f32 [ATTN_MAX_Q][dim] */
    size_t score; /* f32 [ATTN_MAX_Q][KERN_LEAF] */
    size_t page;  /* f32 [64][dim] */
    size_t sight; /* struct attn_sight */
    size_t stack; /* slots [depth][ATTN_MAX_Q]: one level a power of two of leaves */
    size_t mass;  /* f32 [group][list_capacity][2], then [group][list_capacity][4] of quarters */
    size_t amx;   /* attention_amx.c's */
    size_t q8;    /* attention_q8.h's queries */
    size_t bytes;
};

static inline struct attn_layout attn_layout(int n_heads, int head_dim, int list_capacity) {
    size_t dim = align_up((size_t)head_dim, 16), f = sizeof(float), depth = 2;
    size_t group = (size_t)(n_heads < KERN_MAX_GROUP ? n_heads : KERN_MAX_GROUP);
    while ((size_t)ATTN_ENTRIES << (depth - 2) < (size_t)list_capacity) depth++;
    struct attn_layout at = {0};
    at.score = align_up(ATTN_MAX_Q * dim * f, 64);
    at.page = at.score + ATTN_MAX_Q * KERN_LEAF * f;
    at.sight = at.page + KERN_BLOCK * dim * f;
    at.stack = at.sight + align_up(sizeof(struct attn_sight), 64);
    at.mass = at.stack + depth * ATTN_MAX_Q * (dim + 16) * f;
    at.amx = at.mass + align_up(group * (size_t)list_capacity * 6 * f, 64);
    at.q8 = align_up(at.amx + attn_amx_bytes(head_dim), 64);
    at.bytes = align_up(at.q8 + ATTN_Q8_BYTES * align_up((size_t)head_dim, 32), 64);
    return at;
}

/* Prompt rows go by AMX bf16 tiles where the machine has them. */
static inline bool attn_uses_amx(const struct cpu_ctx *c, enum kern_dtype t, bool prompt) {
    return prompt && c->amx && t != KERN_F32;
}

/* Of an item of a prompt tile: pack its queries once, then leaves to slots. attn_amx_leaf returns
 * the bytes of K and V read. */
void attn_amx_queries(const struct attn_job *job, const struct attn_tile *tile, void *amx_scratch);
uint64_t attn_amx_leaf(const struct attn_job *job, const struct attn_tile *tile,
                       struct attn_sight *sight, void *amx_scratch, float *slot);

#endif
