/* Admission: what a sequence needs, which part of a cached prefix it takes, and its first pages. */
#include "kvpool/kvpool_private.h"

#include <limits.h>

#include "base/err.h"

static int classes_of(const struct kvpool *p, bool with_draft) {
    int classes = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (p->cls[c].ppe && (c != KVPOOL_DRAFT || with_draft)) classes |= 1 << c;
    return classes;
}

void kvpool_need(const struct kvpool *p, int n_tokens, bool with_draft,
                 int need[KVPOOL_N_CLASSES]) {
    int classes = classes_of(p, with_draft);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        need[c] = kvpool__has(classes, c) && n_tokens > 0 ? kvpool__blocks_of(n_tokens) : 0;
}

static bool fits_empty(const struct kvpool *p, int n_blocks, int draft_blocks) {
    int want[KVPOOL_N_CLASSES] = {draft_blocks, n_blocks, n_blocks};
    long long n = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const struct class_state *s = &p->cls[c];
        if (!s->ppe) continue;
        int extents = want[c] / s->ppe + (want[c] % s->ppe != 0);
        n += extents > s->min_ext ? extents : s->min_ext;
    }
    return n_blocks <= p->max_blocks && n <= p->n_extents;
}

bool kvpool_can_ever_fit(const struct kvpool *p, int n_tokens, bool with_draft) {
    int n_blocks = n_tokens > 0 ? kvpool__blocks_of(n_tokens) : 0;
    return n_blocks == 0 || fits_empty(p, n_blocks, with_draft ? n_blocks : 0);
}

/* Most tokens of one sequence in an empty pool with at most draft_blocks of the draft's pages. */
static int max_tokens(const struct kvpool *p, int draft_blocks) {
    int low = 0, high = p->max_blocks;
    while (low < high) {
        int mid = low + (high - low + 1) / 2;
        if (fits_empty(p, mid, kvpool__min(mid, draft_blocks))) low = mid;
        else high = mid - 1;
    }
    return low * KVPOOL_BLOCK;
}

int kvpool_max_tokens(const struct kvpool *p, bool with_draft) {
    return max_tokens(p, with_draft ? INT_MAX : 0);
}

/* ---- Which part of a cached prefix ---- */

/* The draft's side of a hit of n_blocks leading blocks: their pages, or where these would take all
 * that the sequence may hold at once, the first and the newest of them. */
struct draft_hit {
    int most;     /* pages that the sequence may hold at once; 0: no draft */
    int n_blocks; /* leading blocks, whose nodes all have a draft page */
    int n_pages;  /* taken of those */
    int n_charged, n_pinned;
    bool windowed;
    int32_t behind; /* node before the oldest block taken, the first block aside */
    uint64_t mark;
};

/* What a hit does to the counts: `sign` 1 takes the page, -1 takes it not after all. */
static void count_page(struct kvpool *p, int32_t page, int sign, bool windowed, uint64_t mark,
                       int *charged, int *pinned) {
    const struct slot *t = kvpool__slot(p, page);
    struct extent *x = kvpool__extent(p, page);
    if (windowed || t->refs == t->n_windowed) *charged += sign;
    if (x->n_used) return;
    if (x->mark != mark) {
        x->mark = mark;
        x->n_new = 0;
    }
    if (sign > 0 ? x->n_new++ == 0 : --x->n_new == 0) *pinned += sign;
}

/* One block more; `node`, which the scratch field `down` of its parent names already, holds it. */
static void draft_hit_step(struct kvpool *p, struct draft_hit *h, int32_t node) {
    count_page(p, p->nodes[node].pages[KVPOOL_DRAFT], 1, h->windowed, h->mark, &h->n_charged,
               &h->n_pinned);
    if (h->n_blocks++ == 0) h->behind = node;
    if (++h->n_pages < h->most) return;
    h->behind = p->nodes[h->behind].down;
    count_page(p, p->nodes[h->behind].pages[KVPOOL_DRAFT], -1, h->windowed, h->mark, &h->n_charged,
               &h->n_pinned);
    h->n_pages--;
}

static long long draft_extents(const struct kvpool *p, const struct draft_hit *h) {
    return kvpool__extents_needed(p, KVPOOL_DRAFT, h->n_charged + h->most - h->n_pages,
                                  h->n_pinned);
}

struct hit {
    int n_blocks; /* -1: the reservation does not fit with any */
    int32_t node; /* of the last block, -1 */
    int draft_blocks;
};

/* The longest draft part, at most n_blocks from node `first` on, with which the draft class needs
 * at most `room` extents. Of h only what the sequence asked for counts. */
static int choose_draft(struct kvpool *p, const struct draft_hit *h, int n_blocks, int32_t first,
                        long long room) {
    struct draft_hit d = {.most = h->most, .windowed = h->windowed, .mark = ++p->mark};
    int best = 0;
    for (int32_t i = first; d.n_blocks < n_blocks; i = p->nodes[i].down) {
        draft_hit_step(p, &d, i);
        if (draft_extents(p, &d) <= room) best = d.n_blocks;
    }
    return best;
}

/* Follow the prompt's blocks through the cache: the deepest length, at most max_hit blocks, at
 * which the whole reservation of n_blocks fits with some part of the draft's pages, and with it the
 * longest such part. Changes nothing but marks and scratch. */
static struct hit choose_hit(struct kvpool *p, int classes, int n_blocks, int draft_most,
                             const struct kvpool_want *w, int max_hit) {
    int charged[KVPOOL_N_CLASSES] = {0}, pinned[KVPOOL_N_CLASSES] = {0};
    uint64_t mark = ++p->mark;
    struct draft_hit d = {.most = draft_most, .windowed = draft_most < n_blocks, .mark = mark};
    struct hit best = {.n_blocks = -1, .node = -1};
    long long least_draft = draft_extents(p, &d), room = 0;
    int32_t at = -1, first = -1;
    int h = 0;
    for (;; h++) {
        long long target = 0;
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            if (c == KVPOOL_DRAFT) continue;
            int more = kvpool__has(classes, c) ? charged[c] + n_blocks - h : 0;
            target += kvpool__extents_needed(p, c, more, pinned[c]);
        }
        if (target + least_draft <= p->n_extents) {
            best.n_blocks = h;
            best.node = at;
            room = p->n_extents - target;
        }
        if (h >= max_hit) break;
        int32_t next = kvpool__prefix_next(p, at, w->salt, w->conversation,
                                           w->prompt + (size_t)h * KVPOOL_BLOCK);
        if (next < 0) break;
        if (at >= 0) p->nodes[at].down = next;
        else first = next;
        at = next;
        for (int c = 0; c < KVPOOL_N_CLASSES; c++)
            if (c != KVPOOL_DRAFT && kvpool__has(classes, c))
                count_page(p, p->nodes[at].pages[c], 1, false, mark, &charged[c], &pinned[c]);
        /* A single page is the sink's and is left to be computed: there is no room for another. */
        if (d.most < 2 || d.n_blocks < h || p->nodes[at].pages[KVPOOL_DRAFT] < 0) continue;
        draft_hit_step(p, &d, at);
        long long n = draft_extents(p, &d);
        if (n < least_draft) least_draft = n;
    }
    if (best.n_blocks > 0 && d.n_blocks > 0)
        best.draft_blocks =
            choose_draft(p, &d, kvpool__min(best.n_blocks, d.n_blocks), first, room);
    return best;
}

/* ---- Opening ---- */

static int admit(const struct kvpool *p, const struct kvpool_want *w, int draft_most,
                 struct err *e) {
    if (w->n_tokens < 1 || w->n_prompt < 0 || w->n_prompt > w->n_tokens)
        return err_raise(e, E_RANGE, "a sequence of %d tokens with a prompt of %d", w->n_tokens,
                         w->n_prompt);
    if (w->draft_blocks < 0)
        return err_raise(e, E_RANGE, "a sequence with draft_blocks %d", w->draft_blocks);
    if (!fits_empty(p, kvpool__blocks_of(w->n_tokens), draft_most))
        return err_raise(e, E_TOO_LONG,
                         "a sequence of %d tokens can never fit: the KV pool holds at most %d",
                         w->n_tokens,
                         max_tokens(p, !w->with_draft    ? 0
                                       : w->draft_blocks ? w->draft_blocks
                                                         : INT_MAX));
    if (p->seq_free < 0)
        return err_raise(e, E_FULL, "all %d sequences of the KV pool are open", p->max_seqs);
    return 0;
}

/* The pages of a hit, from its end, so that a chain whose draft pages change lists stays in order.
 */
static void take_hit(struct kvpool *p, int seq, const struct hit *hit) {
    struct seq *s = &p->seqs[seq];
    int32_t node = hit->node;
    for (int b = hit->n_blocks - 1; b >= 0; b--) {
        const struct prefix_node *n = &p->nodes[node];
        if (n->owner) {
            s->answered = true;
            p->n_hit_generated += KVPOOL_BLOCK;
        } else {
            s->n_prompt_blocks++;
        }
        for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
            if (!kvpool__has(s->classes, c) || b >= s->n_blocks[c]) continue;
            int32_t *entry = &kvpool__table(p, seq, c)[b];
            if (c == KVPOOL_DRAFT && b >= s->hole_first && b < s->hole_end) {
                *entry = -1;
                continue;
            }
            *entry = n->pages[c];
            kvpool__page_ref(p, *entry, s->windowed && c == KVPOOL_DRAFT);
            s->n_held[c]++;
        }
        node = n->parent;
    }
    ASSERT(node < 0);
}

int kvpool_seq_open(struct kvpool *p, const struct kvpool_want *want, int *seq, int *n_hit,
                    int *n_draft_hit, struct err *e) {
    int classes = classes_of(p, want->with_draft), draft_most = 0, max_hit = 0;
    int n_blocks = want->n_tokens > 0 ? kvpool__blocks_of(want->n_tokens) : 0;
    if (kvpool__has(classes, KVPOOL_DRAFT))
        draft_most = want->draft_blocks ? kvpool__min(want->draft_blocks, n_blocks) : n_blocks;
    int rc = admit(p, want, draft_most, e);
    if (rc) return rc;
    bool look = want->prompt && want->n_prompt > 0 && p->max_nodes > 0;
    if (look && want->n_prompt > KVPOOL_SHARED_TAIL)
        max_hit = (want->n_prompt - KVPOOL_SHARED_TAIL) / KVPOOL_BLOCK;
    struct hit hit = choose_hit(p, classes, n_blocks, draft_most, want, max_hit);
    if (hit.n_blocks < 0)
        return err_raise(
            e, E_FULL,
            "no room in the KV pool for %d tokens now: %d blocks wanted; of %d extents "
            "%d are empty, %d/%d/%d pages in use and %d/%d/%d reserved "
            "(draft/shallow/deep)",
            want->n_tokens, n_blocks, p->n_extents, p->n_extents_free, p->cls[0].n_used,
            p->cls[1].n_used, p->cls[2].n_used, p->cls[0].n_reserved, p->cls[1].n_reserved,
            p->cls[2].n_reserved);

    *seq = p->seq_free;
    struct seq *s = &p->seqs[*seq];
    p->seq_free = s->next_free;
    p->n_seqs++;
    *s = (struct seq){.open = true,
                      .windowed = draft_most > 0 && draft_most < n_blocks,
                      .classes = (uint8_t)classes,
                      .salt = want->salt,
                      .conversation = want->conversation,
                      .reg_blocks = hit.n_blocks,
                      .reg_draft = hit.draft_blocks,
                      .reg_node = hit.node,
                      .reg_serial = hit.node >= 0 ? p->nodes[hit.node].serial : 0};
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (!kvpool__has(classes, c)) continue;
        s->limit[c] = c == KVPOOL_DRAFT ? draft_most : n_blocks;
        s->end[c] = n_blocks;
        s->n_blocks[c] = c == KVPOOL_DRAFT ? hit.draft_blocks : hit.n_blocks;
        s->n_tokens[c] = s->n_blocks[c] * KVPOOL_BLOCK;
    }
    if (hit.draft_blocks >= draft_most && hit.draft_blocks > 0) {
        s->hole_first = 1;
        s->hole_end = hit.draft_blocks - (draft_most - 2);
    }
    take_hit(p, *seq, &hit);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) p->cls[c].n_reserved += s->limit[c] - s->n_held[c];
    ASSERT(kvpool__fits(p, 0, 0, 0));
    if (look) {
        p->n_lookups++;
        p->n_lookup_tokens += want->n_prompt;
        p->n_hits += hit.n_blocks > 0;
        p->n_hit_tokens += hit.n_blocks * KVPOOL_BLOCK;
        p->n_hit_draft += hit.draft_blocks * KVPOOL_BLOCK;
    }
    *n_hit = hit.n_blocks * KVPOOL_BLOCK;
    *n_draft_hit = hit.draft_blocks * KVPOOL_BLOCK;
    return 0;
}
