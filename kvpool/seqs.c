/* Sequences: page tables, growing, rolling back, closing. A sequence's reservation in class c is
 * limit[c] - n_held[c] pages; class_state.n_reserved is their sum. */
#include "kvpool/kvpool_private.h"

#include "base/err.h"

static struct seq *get(const struct kvpool *p, int seq) {
    ASSERT(seq >= 0 && seq < p->max_seqs && p->seqs[seq].open);
    return &p->seqs[seq];
}

void kvpool__seqs_init(struct kvpool *p) {
    for (int i = 0; i < p->max_seqs; i++) {
        p->seqs[i].open = false;
        p->seqs[i].next_free = i + 1 < p->max_seqs ? i + 1 : -1;
    }
    p->seq_free = 0;
}

static bool is_windowed(const struct seq *s, int c) {
    return c == KVPOOL_DRAFT && s->windowed;
}

/* ---- Growing and rolling back ---- */

void kvpool_seq_extend(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens) {
    struct seq *s = get(p, seq);
    if (!kvpool__has(s->classes, c)) {
        /* A class without layers needs no page; a draft that was not asked for is a bug. */
        ASSERT(!p->cls[c].ppe);
        return;
    }
    int32_t *table = kvpool__table(p, seq, c);
    if (n_tokens <= s->n_tokens[c]) return;
    int n_blocks = kvpool__blocks_of(n_tokens);
    ASSERT(n_blocks <= s->end[c]);
    ASSERT(n_blocks - s->n_blocks[c] <= s->limit[c] - s->n_held[c]);
    if (s->n_tokens[c] % KVPOOL_BLOCK) {
        /* About to be written: see kvpool_seq_writable. Never a hole: see kvpool_seq_truncate. */
        const struct slot *t = kvpool__slot(p, table[s->n_blocks[c] - 1]);
        ASSERT(t->refs == 1 && t->node < 0);
    }
    while (s->n_blocks[c] < n_blocks) {
        int32_t page = kvpool__page_take(p, c, is_windowed(s, c));
        table[s->n_blocks[c]++] = page;
        s->n_held[c]++;
    }
    s->n_tokens[c] = n_tokens;
}

/* What registration knows ends with the first n whole blocks of class c. */
static void forget_registered(struct seq *s, int c, int n) {
    if (c == KVPOOL_DRAFT) {
        s->reg_draft = kvpool__min(s->reg_draft, n);
        s->reg_draft_tried = kvpool__min(s->reg_draft_tried, n);
        return;
    }
    /* Once something was generated, what is written anew counts as generated too. */
    if (n < s->n_prompt_blocks) s->n_prompt_blocks = n;
    /* What is behind will be other text: the cursor must not vouch for it. */
    s->reg_tried = kvpool__min(s->reg_tried, n);
    if (n >= s->reg_blocks) return;
    s->reg_blocks = s->reg_draft = s->reg_tried = s->reg_draft_tried = 0;
}

void kvpool_seq_truncate(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens) {
    struct seq *s = get(p, seq);
    ASSERT(n_tokens >= 0);
    if (!kvpool__has(s->classes, c) || n_tokens >= s->n_tokens[c]) return;
    const int32_t *table = kvpool__table(p, seq, c);
    /* A block that was given back cannot be addressable in part. */
    int at = n_tokens / KVPOOL_BLOCK;
    if (n_tokens % KVPOOL_BLOCK && table[at] < 0) n_tokens = at * KVPOOL_BLOCK;
    while (s->n_blocks[c] > kvpool__blocks_of(n_tokens)) {
        int32_t page = table[--s->n_blocks[c]];
        if (page < 0) continue;
        const struct slot *t = kvpool__slot(p, page);
        /* A page that another sequence keeps stays charged: reserving another in its place is one
         * page more than before, which the invariant must allow. */
        bool more = !is_windowed(s, c) && t->refs - t->n_windowed > 1;
        kvpool__page_unref(p, page, is_windowed(s, c));
        s->n_held[c]--;
        if (more && !kvpool__fits(p, c, 1, 0)) s->limit[c]--;
        else p->cls[c].n_reserved++;
    }
    s->n_tokens[c] = n_tokens;
    if (c == KVPOOL_DRAFT) s->hole_end = kvpool__min(s->hole_end, s->n_blocks[c]);
    forget_registered(s, c, n_tokens / KVPOOL_BLOCK);
}

int kvpool_seq_writable(struct kvpool *p, int seq, enum kvpool_class c, int block_idx,
                        bool *must_copy, int32_t *src, int32_t *dst, struct err *e) {
    struct seq *s = get(p, seq);
    ASSERT(kvpool__has(s->classes, c) && block_idx >= 0 && block_idx < s->n_blocks[c]);
    int32_t *entry = &kvpool__table(p, seq, c)[block_idx];
    ASSERT(*entry >= 0);
    const struct slot *t = kvpool__slot(p, *entry);
    *must_copy = t->refs > 1;
    *src = *dst = *entry;
    if (*must_copy) {
        if (!kvpool__fits(p, c, 1, 0))
            return err_raise(e, E_FULL, "no room in the KV pool for a private copy of a %s page",
                             kvpool_class_name(c));
        p->cls[c].n_reserved++;
        /* May evict, never the page *src: it is used. */
        *dst = kvpool__page_take(p, c, is_windowed(s, c));
        kvpool__page_unref(p, *src, is_windowed(s, c));
        *entry = *dst;
    } else if (t->node >= 0 && c == KVPOOL_DRAFT) {
        kvpool__prefix_drop_draft(p, t->node);
    } else if (t->node >= 0) {
        kvpool__prefix_drop(p, t->node);
    }
    forget_registered(s, c, block_idx);
    return 0;
}

const int32_t *kvpool_seq_pages(const struct kvpool *p, int seq, enum kvpool_class c,
                                int *n_blocks) {
    const struct seq *s = get(p, seq);
    *n_blocks = s->n_blocks[c];
    return kvpool__table(p, seq, c);
}

int kvpool_seq_n_tokens(const struct kvpool *p, int seq, enum kvpool_class c) {
    return get(p, seq)->n_tokens[c];
}

int kvpool_seq_limit(const struct kvpool *p, int seq, enum kvpool_class c) {
    const struct seq *s = get(p, seq);
    int n_blocks = s->n_blocks[c] + s->limit[c] - s->n_held[c];
    return kvpool__min(n_blocks, s->end[c]) * KVPOOL_BLOCK;
}

/* ---- Giving back ---- */

/* All of a class: pages from the end, so that the beginning of a chain becomes idle last. */
static void give_back(struct kvpool *p, int seq, int c) {
    struct seq *s = get(p, seq);
    const int32_t *table = kvpool__table(p, seq, c);
    for (int b = s->n_blocks[c] - 1; b >= 0; b--)
        if (table[b] >= 0) kvpool__page_unref(p, table[b], is_windowed(s, c));
    p->cls[c].n_reserved -= s->limit[c] - s->n_held[c];
    s->n_tokens[c] = s->n_blocks[c] = s->n_held[c] = s->limit[c] = s->end[c] = 0;
    s->classes &= (uint8_t) ~(1 << c);
}

bool kvpool_seq_has_draft(const struct kvpool *p, int seq) {
    return kvpool__has(get(p, seq)->classes, KVPOOL_DRAFT);
}

void kvpool_seq_drop_draft(struct kvpool *p, int seq) {
    if (!kvpool_seq_has_draft(p, seq)) return;
    give_back(p, seq, KVPOOL_DRAFT);
    p->n_draft_dropped++;
}

void kvpool_seq_forget_draft(struct kvpool *p, int seq, int first, int end) {
    struct seq *s = get(p, seq);
    ASSERT(first >= 0);
    if (!kvpool__has(s->classes, KVPOOL_DRAFT)) return;
    /* The block that is being written stays. */
    end = kvpool__min(end, s->n_tokens[KVPOOL_DRAFT] / KVPOOL_BLOCK);
    /* A window moves up: called round after round from the same block on, it skips what is gone. */
    bool joins = first >= s->hole_first && first <= s->hole_end;
    if (joins) first = s->hole_end;
    if (first >= end) return;
    int32_t *table = kvpool__table(p, seq, KVPOOL_DRAFT);
    for (int b = end - 1; b >= first; b--) {
        if (table[b] < 0) continue;
        kvpool__page_unref(p, table[b], s->windowed);
        table[b] = -1;
        s->n_held[KVPOOL_DRAFT]--;
        if (s->windowed) p->cls[KVPOOL_DRAFT].n_reserved++;
        else s->limit[KVPOOL_DRAFT]--;
    }
    if (!joins) s->hole_first = first;
    s->hole_end = end;
}

void kvpool_seq_close(struct kvpool *p, int seq) {
    struct seq *s = get(p, seq);
    int32_t deepest = -1;
    int n_deepest = 0;
    if (s->reg_blocks && p->nodes[s->reg_node].serial == s->reg_serial) {
        deepest = s->reg_node;
        n_deepest = s->reg_blocks;
    }
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const int32_t *table = kvpool__table(p, seq, c);
        for (int b = s->n_blocks[c] - 1; b >= n_deepest; b--) {
            int32_t node = table[b] < 0 ? -1 : kvpool__slot(p, table[b])->node;
            if (node < 0) continue;
            deepest = node;
            n_deepest = b + 1;
        }
    }
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (kvpool__has(s->classes, c)) give_back(p, seq, c);
    /* The whole chain, also the blocks whose pages are another sequence's, was used just now. */
    kvpool__prefix_touch(p, deepest);
    s->open = false;
    s->next_free = p->seq_free;
    p->seq_free = seq;
    p->n_seqs--;
}

/* ---- Check ---- */

void kvpool__seqs_check(const struct kvpool *p) {
    int n_open = 0;
    long long reserved[KVPOOL_N_CLASSES] = {0};
    for (int i = 0; i < p->max_seqs; i++) {
        const struct seq *s = &p->seqs[i];
        if (!s->open) continue;
        n_open++;
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            int n_held = 0;
            ASSERT(s->n_blocks[c] == kvpool__blocks_of(s->n_tokens[c]));
            ASSERT(s->n_blocks[c] <= s->end[c] && s->n_held[c] <= s->limit[c]);
            ASSERT(kvpool__has(s->classes, c) || (s->limit[c] == 0 && s->end[c] == 0));
            reserved[c] += s->limit[c] - s->n_held[c];
            for (int b = 0; b < s->n_blocks[c]; b++) {
                int32_t page = kvpool__table(p, i, c)[b];
                if (page < 0) {
                    ASSERT(c == KVPOOL_DRAFT && (b + 1) * KVPOOL_BLOCK <= s->n_tokens[c]);
                    continue;
                }
                ASSERT(kvpool__extent(p, page)->cls == c);
                ASSERT(c != KVPOOL_DRAFT || b < s->hole_first || b >= s->hole_end);
                n_held++;
                kvpool__slot(p, page)->seen++;
                kvpool__slot(p, page)->seen_windowed += is_windowed(s, c);
            }
            ASSERT(n_held == s->n_held[c]);
        }
    }
    ASSERT(n_open == p->n_seqs);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) ASSERT(reserved[c] == p->cls[c].n_reserved);
}
