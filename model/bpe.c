/* Byte-pair merges by rank, in O(n log n) for any text: a linked list of symbols and a heap of
 * candidate pairs. An entry of the heap is only (rank, position); when it is popped the pair that
 * now stands at the position is looked up again, and the entry counts only if the rank still
 * agrees, so that stale entries need no bookkeeping. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"
#include "model/tokenizer_private.h"

int merge_scratch_reserve(struct merge_scratch *s, size_t n_symbols, struct err *e) {
    if (n_symbols > s->symbol_cap) {
        size_t cap = max_size(n_symbols, 256);
        struct merge_symbol *symbol = realloc(s->symbol, cap * sizeof *symbol);
        if (!symbol) return err_raise(e, E_NOMEM, "%zu symbols", cap);
        s->symbol = symbol;
        s->symbol_cap = cap;
    }
    /* Each neighbouring pair once, and at most one more for each merge than the merge takes out. */
    size_t heap = 2 * n_symbols + 2;
    if (heap > s->heap_cap) {
        size_t cap = max_size(heap, 512);
        uint64_t *grown = realloc(s->heap, cap * sizeof *grown);
        if (!grown) return err_raise(e, E_NOMEM, "%zu merge candidates", cap);
        s->heap = grown;
        s->heap_cap = cap;
    }
    s->heap_n = 0;
    return 0;
}

void merge_scratch_deinit(struct merge_scratch *s) {
    free(s->symbol);
    free(s->heap);
    *s = (struct merge_scratch){0};
}

void merge_heap_push(struct merge_scratch *s, uint64_t key) {
    DASSERT(s->heap_n < s->heap_cap);
    size_t i = s->heap_n++;
    while (i > 0 && s->heap[(i - 1) / 2] > key) {
        s->heap[i] = s->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    s->heap[i] = key;
}

uint64_t merge_heap_pop(struct merge_scratch *s) {
    uint64_t top = s->heap[0], key = s->heap[--s->heap_n];
    size_t i = 0, n = s->heap_n;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n) break;
        if (child + 1 < n && s->heap[child + 1] < s->heap[child]) child++;
        if (s->heap[child] >= key) break;
        s->heap[i] = s->heap[child];
        i = child;
    }
    s->heap[i] = key;
    return top;
}

void merge_link(struct merge_scratch *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        s->symbol[i].prev = (int32_t)i - 1;
        s->symbol[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    }
}

int bpe_init(struct bpe *b, size_t n_merges, struct err *e) {
    if (n_merges > BPE_MAX_MERGES)
        return err_raise(e, E_FORMAT, "%zu merges, more than %d", n_merges, BPE_MAX_MERGES);
    uint32_t n_slots = 16;
    while (n_slots < n_merges + n_merges / 2) n_slots *= 2;
    b->slot = malloc(n_slots * sizeof *b->slot);
    if (!b->slot) return err_raise(e, E_NOMEM, "table of %u merges", n_slots);
    memset(b->slot, 0xff, n_slots * sizeof *b->slot);
    b->mask = n_slots - 1;
    b->seed = (uint64_t)clock_ns() | 1;
    return 0;
}

void bpe_deinit(struct bpe *b) {
    free(b->slot);
    *b = (struct bpe){0};
}

static uint64_t pair_hash(const struct bpe *b, int left, int right) {
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) ^ b->seed;
    h = (h ^ h >> 32) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9u;
    return h ^ h >> 32;
}

static struct bpe_slot *pair_slot(const struct bpe *b, int left, int right) {
    for (uint64_t h = pair_hash(b, left, right);; h++) {
        struct bpe_slot *slot = &b->slot[h & b->mask];
        if (slot->left < 0 || (slot->left == left && slot->right == right)) return slot;
    }
}

void bpe_add(struct bpe *b, int left, int right, int merged, int rank) {
    struct bpe_slot *slot = pair_slot(b, left, right);
    if (slot->left >= 0) return;
    ASSERT((uint32_t)b->n < b->mask);
    *slot = (struct bpe_slot){left, right, rank, merged};
    b->n++;
}

static void push_pair(const struct bpe *b, struct merge_scratch *s, int32_t left) {
    int32_t right = s->symbol[left].next;
    const struct bpe_slot *slot = pair_slot(b, s->symbol[left].id, s->symbol[right].id);
    if (slot->left >= 0) merge_heap_push(s, (uint64_t)(uint32_t)slot->rank << 32 | (uint32_t)left);
}

void bpe_merge(const struct bpe *b, struct merge_scratch *s, size_t n) {
    merge_link(s, n);
    s->heap_n = 0;
    if (b->n == 0) return;
    for (size_t i = 0; i + 1 < n; i++) push_pair(b, s, (int32_t)i);
    while (s->heap_n > 0) {
        uint64_t key = merge_heap_pop(s);
        int32_t at = (int32_t)(uint32_t)key;
        struct merge_symbol *left = &s->symbol[at];
        if (left->id < 0 || left->next < 0) continue;
        struct merge_symbol *right = &s->symbol[left->next];
        const struct bpe_slot *slot = pair_slot(b, left->id, right->id);
        if (slot->left < 0 || (uint32_t)slot->rank != key >> 32) continue;
        left->id = slot->merged;
        right->id = -1;
        left->next = right->next;
        if (right->next >= 0) s->symbol[right->next].prev = at;
        if (left->prev >= 0) push_pair(b, s, left->prev);
        if (left->next >= 0) push_pair(b, s, at);
    }
}
