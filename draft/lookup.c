/* Prompt lookup. One hash table for each n = 2..5, open addressing: a slot holds where its n-gram
 * ended last (plus one; 0 is free), the n-gram itself is in ids and is compared token by token, so
 * a hash decides nothing. Indexing position p finds the slot of the n-gram that ends there, keeps
 * what it held as "the place before", and puts p in: the answer to the next question is ready
 * before it is asked, and the position itself is never its own match.
 *
 * Tables are at most half full, slots are probed in order, at most WINDOW of them; where a window
 * is full of others the stalest gives way. Slots never become free again, so a key that is present
 * is always met before a free slot. Whoever knows the hash can crowd a window and lose proposals;
 * time stays constant.
 *
 * Occurrences of one 5-gram are chained, newest first: chain[p] is the one before p. A proposal
 * walks at most DRAFT_LOOKUP_PLACES of them and compares at most DRAFT_LOOKUP_REACH tokens each. */
#include "draft/lookup.h"

#include <stdbool.h>
#include <string.h>

#include "base/err.h"

enum { N_TABLES = DRAFT_LOOKUP_MAX - DRAFT_LOOKUP_MIN + 1, WINDOW = 16, MIN_SLOTS = 16 };

static size_t n_slots(int max_tokens) {
    size_t n = MIN_SLOTS;
    while (n < 2 * (size_t)max_tokens) n *= 2;
    return n;
}

size_t draft_lookup_bytes(int max_tokens) {
    ASSERT(max_tokens >= 0 && max_tokens <= 1 << 30);
    return (N_TABLES * n_slots(max_tokens) + (size_t)max_tokens) * sizeof(int32_t);
}

void draft_lookup_init(struct draft_lookup *l, void *memory, int max_tokens) {
    memset(memory, 0, draft_lookup_bytes(max_tokens));
    *l = (struct draft_lookup){
        .max_tokens = max_tokens, .memory = memory, .mask = (uint32_t)(n_slots(max_tokens) - 1)};
}

static int32_t *table(const struct draft_lookup *l, int idx) {
    return (int32_t *)l->memory + (size_t)idx * ((size_t)l->mask + 1);
}

static int32_t *chain(const struct draft_lookup *l) {
    return table(l, N_TABLES);
}

/* Tokens that agree backwards from positions a < b, at most `most`. */
static int agree(const int32_t *ids, int a, int b, int most) {
    int n = 0;
    while (n < most && n <= a && ids[a - n] == ids[b - n]) n++;
    return n;
}

/* Put position p, where an n-gram ends, into its slot; returns what that slot held for the same
 * n-gram. */
static int32_t put(int32_t *slots, uint32_t mask, uint64_t hash, const int32_t *ids, int p, int n) {
    int32_t *stalest = NULL;
    for (uint32_t i = 0; i < WINDOW; i++) {
        int32_t *s = &slots[((uint32_t)hash + i) & mask], was = *s;
        if (was == 0 || agree(ids, was - 1, p, n) == n) {
            *s = p + 1;
            return was;
        }
        if (!stalest || was < *stalest) stalest = s;
    }
    *stalest = p + 1;
    return 0;
}

static void index_position(struct draft_lookup *l, const int32_t *ids, int p) {
    uint64_t hash = 0;
    memset(l->earlier, 0, sizeof l->earlier);
    chain(l)[p] = 0;
    for (int n = 1; n <= DRAFT_LOOKUP_MAX && n <= p + 1; n++) {
        /* A step of a multiplicative hash; the high half, which the product mixes best, is folded
         * into the low one, which the mask takes. */
        hash = (hash ^ (uint32_t)ids[p - n + 1]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
        if (n < DRAFT_LOOKUP_MIN) continue;
        int idx = n - DRAFT_LOOKUP_MIN;
        l->earlier[idx] = put(table(l, idx), l->mask, hash, ids, p, n);
        if (n == DRAFT_LOOKUP_MAX) chain(l)[p] = l->earlier[idx];
    }
}

void draft_lookup_extend(struct draft_lookup *l, const int32_t *ids, int n_tokens) {
    ASSERT(n_tokens >= l->n_indexed && n_tokens <= l->max_tokens);
    for (int p = l->n_indexed; p < n_tokens; p++) index_position(l, ids, p);
    l->n_indexed = n_tokens;
}

/* Where the best match of the newest tokens ended, -1: nowhere. */
static int find(const struct draft_lookup *l, const int32_t *ids, int *n_match) {
    int end = l->n_indexed - 1, best = -1;
    *n_match = 0;
    for (int idx = N_TABLES - 1; idx >= 0 && best < 0; idx--) {
        int at = l->earlier[idx] - 1;
        if (at < 0) continue;
        best = at;
        *n_match = agree(ids, at, end, DRAFT_LOOKUP_REACH);
    }
    if (*n_match < DRAFT_LOOKUP_MAX) return best;
    int at = best;
    for (int i = 1; i < DRAFT_LOOKUP_PLACES && *n_match < DRAFT_LOOKUP_REACH; i++) {
        at = chain(l)[at] - 1;
        if (at < 0) break;
        int n = agree(ids, at, end, DRAFT_LOOKUP_REACH);
        if (n > *n_match) {
            best = at;
            *n_match = n;
        }
    }
    return best;
}

int draft_lookup_propose(const struct draft_lookup *l, const int32_t *ids, int n_tokens, int max,
                         int32_t *out, int *n_match) {
    ASSERT(n_tokens == l->n_indexed);
    int at = find(l, ids, n_match);
    if (at < 0) return 0;
    for (int i = 0; i < max; i++) {
        int from = at + 1 + i;
        out[i] = from < n_tokens ? ids[from] : out[from - n_tokens];
    }
    return max > 0 ? max : 0;
}
