/* Sequences: page tables, reservations, admission. A sequence's reservation in class c is
 * limit[c] - n_blocks[c] pages; class_state.n_reserved is their sum. */
#include "kvpool/kvpool_private.h"

#include <limits.h>

#include "base/err.h"

static int blocks_of(int n_tokens) {
    return n_tokens / KVPOOL_BLOCK + (n_tokens % KVPOOL_BLOCK != 0);
}

static struct seq *get(const struct kvpool *p, int seq) {
    ASSERT(seq >= 0 && seq < p->max_seqs && p->seqs[seq].open);
    return &p->seqs[seq];
}

static int classes_of(const struct kvpool *p, bool with_draft) {
    int classes = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (p->cls[c].ppe && (c != KVPOOL_DRAFT || with_draft)) classes |= 1 << c;
    return classes;
}

void kvpool__seqs_init(struct kvpool *p) {
    for (int i = 0; i < p->max_seqs; i++) {
        p->seqs[i].open = false;
        p->seqs[i].next_free = i + 1 < p->max_seqs ? i + 1 : -1;
    }
    p->seq_free = 0;
}

/* ---- Admission ---- */

void kvpool_need(const struct kvpool *p, int n_tokens, bool with_draft,
                 int need[KVPOOL_N_CLASSES]) {
    int classes = classes_of(p, with_draft);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        need[c] = kvpool__has(classes, c) && n_tokens > 0 ? blocks_of(n_tokens) : 0;
}

static bool fits_empty(const struct kvpool *p, int n_blocks, bool with_draft) {
    int classes = classes_of(p, with_draft);
    long long n = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const struct class_state *s = &p->cls[c];
        if (!s->ppe) continue;
        int extents = kvpool__has(classes, c) ? n_blocks / s->ppe + (n_blocks % s->ppe != 0) : 0;
        n += extents > s->min_ext ? extents : s->min_ext;
    }
    return n_blocks <= p->max_blocks && n <= p->n_extents;
}

bool kvpool_can_ever_fit(const struct kvpool *p, int n_tokens, bool with_draft) {
    return n_tokens <= 0 || fits_empty(p, blocks_of(n_tokens), with_draft);
}

int kvpool_max_tokens(const struct kvpool *p, bool with_draft) {
    int low = 0, high = p->max_blocks;
    while (low < high) {
        int mid = low + (high - low + 1) / 2;
        if (fits_empty(p, mid, with_draft)) low = mid;
        else high = mid - 1;
    }
    return low * KVPOOL_BLOCK;
}

/* Follow the prompt's blocks through the cache. Returns the deepest length in blocks, at most
 * max_hit, at which the whole reservation of n_blocks fits, -1 where none does, and the node there.
 * Changes nothing but marks: a page counts as newly used, and its extent as newly pinned, where no
 * sequence references it yet. */
static int choose_hit(struct kvpool *p, int classes, int n_blocks, const int32_t *prompt,
                      int max_hit, uint64_t salt, int32_t *node) {
    int used[KVPOOL_N_CLASSES] = {0}, pinned[KVPOOL_N_CLASSES] = {0};
    int reserved[KVPOOL_N_CLASSES] = {0};
    uint64_t mark = ++p->mark;
    int best = -1;
    int32_t at = -1;
    *node = -1;
    for (int h = 0;; h++) {
        for (int c = 0; c < KVPOOL_N_CLASSES; c++)
            if (kvpool__has(classes, c)) reserved[c] = n_blocks - h;
        if (kvpool__fits(p, used, pinned, reserved)) {
            best = h;
            *node = at;
        }
        if (h >= max_hit) return best;
        at = kvpool__prefix_find(p, at, salt, classes, prompt + (size_t)h * KVPOOL_BLOCK);
        if (at < 0) return best;
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            if (!kvpool__has(classes, c)) continue;
            int32_t page = p->nodes[at].pages[c];
            struct extent *x = kvpool__extent(p, page);
            if (kvpool__slot(p, page)->refs) continue;
            used[c]++;
            if (x->n_used || x->mark == mark) continue;
            x->mark = mark;
            pinned[c]++;
        }
    }
}

static int admit(const struct kvpool *p, int n_tokens, bool with_draft, int n_prompt,
                 struct err *e) {
    if (n_tokens < 1 || n_prompt < 0 || n_prompt > n_tokens)
        return err_raise(e, E_RANGE, "a sequence of %d tokens with a prompt of %d", n_tokens,
                         n_prompt);
    if (!fits_empty(p, blocks_of(n_tokens), with_draft))
        return err_raise(e, E_TOO_LONG,
                         "a sequence of %d tokens can never fit: the KV pool holds at most %d",
                         n_tokens, kvpool_max_tokens(p, with_draft));
    if (p->seq_free < 0)
        return err_raise(e, E_FULL, "all %d sequences of the KV pool are open", p->max_seqs);
    return 0;
}

int kvpool_seq_open(struct kvpool *p, int n_tokens, bool with_draft, const int32_t *prompt,
                    int n_prompt, uint64_t salt, int *seq, int *n_hit, struct err *e) {
    int rc = admit(p, n_tokens, with_draft, n_prompt, e);
    if (rc) return rc;
    int n_blocks = blocks_of(n_tokens), classes = classes_of(p, with_draft), max_hit = 0;
    bool look = prompt && n_prompt > 0 && p->max_nodes > 0;
    if (look && n_prompt > KVPOOL_SHARED_TAIL)
        max_hit = (n_prompt - KVPOOL_SHARED_TAIL) / KVPOOL_BLOCK;
    int32_t node;
    int hit = choose_hit(p, classes, n_blocks, prompt, max_hit, salt, &node);
    if (hit < 0)
        return err_raise(
            e, E_FULL,
            "no room in the KV pool for %d tokens now: %d blocks wanted; of %d extents "
            "%d are empty, %d/%d/%d pages in use and %d/%d/%d reserved "
            "(draft/shallow/deep)",
            n_tokens, n_blocks, p->n_extents, p->n_extents_free, p->cls[0].n_used, p->cls[1].n_used,
            p->cls[2].n_used, p->cls[0].n_reserved, p->cls[1].n_reserved, p->cls[2].n_reserved);

    *seq = p->seq_free;
    struct seq *s = &p->seqs[*seq];
    p->seq_free = s->next_free;
    p->n_seqs++;
    *s = (struct seq){.open = true,
                      .with_draft = with_draft,
                      .classes = (uint8_t)classes,
                      .salt = salt,
                      .reg_blocks = hit,
                      .reg_node = node,
                      .reg_serial = node >= 0 ? p->nodes[node].serial : 0};
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (!kvpool__has(classes, c)) continue;
        s->limit[c] = n_blocks;
        s->n_blocks[c] = hit;
        s->n_tokens[c] = hit * KVPOOL_BLOCK;
        p->cls[c].n_reserved += n_blocks - hit;
    }
    for (int b = hit - 1; b >= 0; b--) {
        const struct prefix_node *n = &p->nodes[node];
        if (n->origin == KVPOOL_GENERATED) p->n_hit_generated += KVPOOL_BLOCK;
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            if (!kvpool__has(classes, c)) continue;
            kvpool__table(p, *seq, c)[b] = n->pages[c];
            kvpool__page_ref(p, n->pages[c]);
        }
        node = n->parent;
    }
    ASSERT(node < 0);
    if (look) {
        p->n_lookups++;
        p->n_lookup_tokens += n_prompt;
        p->n_hits += hit > 0;
        p->n_hit_tokens += hit * KVPOOL_BLOCK;
    }
    *n_hit = hit * KVPOOL_BLOCK;
    return 0;
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
    ASSERT(blocks_of(n_tokens) <= s->limit[c]);
    if (s->n_tokens[c] % KVPOOL_BLOCK) {
        const struct slot *t = kvpool__slot(p, table[s->n_blocks[c] - 1]);
        ASSERT(t->refs == 1 && t->node < 0); /* about to be written: see kvpool_seq_writable */
    }
    while (s->n_blocks[c] < blocks_of(n_tokens)) {
        int32_t page = kvpool__page_take(p, c);
        table[s->n_blocks[c]++] = page;
    }
    s->n_tokens[c] = n_tokens;
}

void kvpool_seq_truncate(struct kvpool *p, int seq, enum kvpool_class c, int n_tokens) {
    static const int none[KVPOOL_N_CLASSES];
    int one[KVPOOL_N_CLASSES] = {0};
    one[c] = 1;
    struct seq *s = get(p, seq);
    ASSERT(n_tokens >= 0);
    if (!kvpool__has(s->classes, c) || n_tokens >= s->n_tokens[c]) return;
    const int32_t *table = kvpool__table(p, seq, c);
    while (s->n_blocks[c] > blocks_of(n_tokens)) {
        int32_t page = table[--s->n_blocks[c]];
        bool shared = kvpool__slot(p, page)->refs > 1;
        kvpool__page_unref(p, page);
        /* A shared page stays used by the other sequence: reserving another in its place is one
         * page more than before, which the invariant must allow. */
        if (shared && !kvpool__fits(p, none, none, one)) s->limit[c]--;
        else p->cls[c].n_reserved++;
    }
    s->n_tokens[c] = n_tokens;
    /* What is behind n_tokens will be other text: the cursor must not vouch for it. */
    if (n_tokens / KVPOOL_BLOCK < s->reg_blocks) s->reg_blocks = 0;
}

int kvpool_seq_writable(struct kvpool *p, int seq, enum kvpool_class c, int block_idx,
                        bool *must_copy, int32_t *src, int32_t *dst, struct err *e) {
    static const int none[KVPOOL_N_CLASSES];
    struct seq *s = get(p, seq);
    ASSERT(kvpool__has(s->classes, c) && block_idx >= 0 && block_idx < s->n_blocks[c]);
    int32_t *entry = &kvpool__table(p, seq, c)[block_idx];
    const struct slot *t = kvpool__slot(p, *entry);
    *must_copy = t->refs > 1;
    *src = *dst = *entry;
    if (*must_copy) {
        int one[KVPOOL_N_CLASSES] = {0};
        one[c] = 1;
        if (!kvpool__fits(p, none, none, one))
            return err_raise(e, E_FULL, "no room in the KV pool for a private copy of a %s page",
                             kvpool_class_name(c));
        p->cls[c].n_reserved++;
        *dst = kvpool__page_take(p, c); /* may evict, never the page *src: it is used */
        kvpool__page_unref(p, *src);
        *entry = *dst;
    } else if (t->node >= 0) {
        kvpool__prefix_drop(p, t->node);
    }
    if (block_idx < s->reg_blocks) s->reg_blocks = 0;
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
    return get(p, seq)->limit[c] * KVPOOL_BLOCK;
}

void kvpool_seq_shrink(struct kvpool *p, int seq, int n_tokens) {
    struct seq *s = get(p, seq);
    ASSERT(n_tokens >= 0);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        int limit = blocks_of(n_tokens);
        if (!kvpool__has(s->classes, c)) continue;
        if (limit < s->n_blocks[c]) limit = s->n_blocks[c];
        if (limit >= s->limit[c]) continue;
        p->cls[c].n_reserved -= s->limit[c] - limit;
        s->limit[c] = limit;
    }
}

void kvpool_seq_close(struct kvpool *p, int seq) {
    struct seq *s = get(p, seq);
    int32_t deepest = -1;
    kvpool_seq_shrink(p, seq, 0);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const int32_t *table = kvpool__table(p, seq, c);
        for (int b = s->n_blocks[c] - 1; b >= 0; b--) {
            int32_t node = kvpool__slot(p, table[b])->node;
            if (deepest < 0) deepest = node;
            kvpool__page_unref(p, table[b]);
        }
    }
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
            ASSERT(s->n_blocks[c] == blocks_of(s->n_tokens[c]) && s->n_blocks[c] <= s->limit[c]);
            ASSERT(kvpool__has(s->classes, c) || s->limit[c] == 0);
            reserved[c] += s->limit[c] - s->n_blocks[c];
            for (int b = 0; b < s->n_blocks[c]; b++) {
                int32_t page = kvpool__table(p, i, c)[b];
                ASSERT(kvpool__extent(p, page)->cls == c);
                kvpool__slot(p, page)->seen++;
            }
        }
    }
    ASSERT(n_open == p->n_seqs);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) ASSERT(reserved[c] == p->cls[c].n_reserved);
}
