/* SentencePiece's BPE: neighbours whose joined text is an entry are merged, best score first,
 * leftmost among equals (source: sentencepiece, bpe_model.cc). Byte fallback happens in
 * tokenizer.c, on what found no entry. As in bpe.c, stale heap entries are recognised by looking
 * the pair up again. */
#include <string.h>

#include "model/tokenizer_private.h"

/* Bits that ascend while the score descends. */
static uint32_t score_order(float score) {
    uint32_t bits;
    if (score == 0) score = 0; /* -0 */
    memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

/* Only what may come from plain text: ordinary and user-defined entries. */
static int find_piece(const struct vocab *v, const char *s, size_t n) {
    if (n > v->max_bytes) return -1;
    int id = vocab_find(v, s, n);
    if (id >= 0) return id;
    id = vocab_find_special(v, s, n);
    return id >= 0 && v->type[id] == TOKEN_USER_DEFINED ? id : -1;
}

static int find_pair(const struct vocab *v, const struct merge_scratch *s, int32_t left,
                     const char *text) {
    const struct merge_symbol *a = &s->symbol[left];
    return find_piece(v, text + a->begin, (size_t)a->n + s->symbol[a->next].n);
}

static void push_pair(const struct vocab *v, struct merge_scratch *s, int32_t left,
                      const char *text) {
    int id = find_pair(v, s, left, text);
    if (id >= 0) merge_heap_push(s, (uint64_t)score_order(v->score[id]) << 32 | (uint32_t)left);
}

void spm_merge(const struct vocab *v, struct merge_scratch *s, size_t n, const char *text) {
    merge_link(s, n);
    s->heap_n = 0;
    for (size_t i = 0; i < n; i++)
        s->symbol[i].id = find_piece(v, text + s->symbol[i].begin, s->symbol[i].n);
    for (size_t i = 0; i + 1 < n; i++) push_pair(v, s, (int32_t)i, text);
    while (s->heap_n > 0) {
        uint64_t key = merge_heap_pop(s);
        int32_t at = (int32_t)(uint32_t)key;
        struct merge_symbol *left = &s->symbol[at];
        if (left->n == 0 || left->next < 0) continue;
        int id = find_pair(v, s, at, text);
        if (id < 0 || score_order(v->score[id]) != key >> 32) continue;
        struct merge_symbol *right = &s->symbol[left->next];
        left->id = id;
        left->n += right->n;
        right->n = 0;
        left->next = right->next;
        if (right->next >= 0) s->symbol[right->next].prev = at;
        if (left->prev >= 0) push_pair(v, s, left->prev, text);
        if (left->next >= 0) push_pair(v, s, at, text);
    }
}
