/* Registration: a sequence's committed blocks join the prefix cache, the target's pages first, the
 * draft's when the draft has caught up. A sequence remembers how far it got and at which node. */
#include "kvpool/kvpool_private.h"

#include <string.h>

#include "base/err.h"

/* Whole blocks of n_committed tokens that are addressable in all of the target's classes. */
static int target_blocks(const struct seq *s, int n_committed) {
    int n = n_committed;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        if (c != KVPOOL_DRAFT && kvpool__has(s->classes, c)) n = kvpool__min(n, s->n_tokens[c]);
    return n / KVPOOL_BLOCK;
}

/* The node that a page of this block belongs to already, from a hit or an earlier registration. A
 * chain that is walked anew must come through it: a look-up by tokens could prefer a prompt's node
 * that another sequence registered since, and a page has one node. */
static int32_t node_of_block(const struct kvpool *p, int seq, int block, const int32_t *tokens) {
    const struct seq *s = &p->seqs[seq];
    for (int c = KVPOOL_N_CLASSES - 1; c >= 0; c--) {
        int32_t page = block < s->n_blocks[c] ? kvpool__table(p, seq, c)[block] : -1;
        int32_t node = page >= 0 ? kvpool__slot(p, page)->node : -1;
        if (node < 0) continue;
        ASSERT(!memcmp(p->nodes[node].tokens, tokens, sizeof p->nodes[node].tokens));
        return node;
    }
    return -1;
}

static bool cursor_is_stale(const struct kvpool *p, const struct seq *s) {
    return s->reg_blocks && p->nodes[s->reg_node].serial != s->reg_serial;
}

static void register_target(struct kvpool *p, int seq, const int32_t *tokens, int n_full) {
    struct seq *s = &p->seqs[seq];
    if (cursor_is_stale(p, s)) {
        s->reg_blocks = s->reg_draft = s->reg_draft_tried = 0;
    }
    int32_t chain = s->reg_blocks ? s->reg_node : -1;
    uint64_t mark = ++p->mark;
    kvpool__prefix_touch(p, chain);
    for (int32_t i = chain; i >= 0; i = p->nodes[i].parent) p->nodes[i].mark = mark;
    for (int b = s->reg_blocks; b < n_full; b++) {
        const int32_t *block = tokens + (size_t)b * KVPOOL_BLOCK;
        bool prompt = b < s->n_prompt_blocks && (chain < 0 || !p->nodes[chain].owner);
        uint64_t owner = prompt ? 0 : s->conversation;
        int32_t i = node_of_block(p, seq, b, block);
        if (i < 0) i = kvpool__prefix_next(p, chain, s->salt, owner, block);
        if (i < 0) i = kvpool__prefix_add(p, seq, b, chain, owner, mark, block);
        if (i < 0) break;
        /* Mostly one step; all of them where the block's own node hangs on another chain. */
        for (int32_t k = i; k >= 0 && p->nodes[k].mark != mark; k = p->nodes[k].parent)
            p->nodes[k].mark = mark;
        chain = i;
        s->reg_blocks = b + 1;
        s->reg_node = i;
        s->reg_serial = p->nodes[i].serial;
    }
    s->reg_tried = n_full;
}

/* The draft's pages of blocks reg_draft..n_full-1 join the nodes of the chain that have none. */
static void register_draft(struct kvpool *p, int seq, int n_full) {
    struct seq *s = &p->seqs[seq];
    const int32_t *table = kvpool__table(p, seq, KVPOOL_DRAFT);
    int32_t node = s->reg_node;
    for (int b = s->reg_blocks - 1; b > s->reg_draft; b--) {
        p->nodes[p->nodes[node].parent].down = node;
        node = p->nodes[node].parent;
    }
    for (int b = s->reg_draft; b < n_full; b++, node = p->nodes[node].down) {
        if (p->nodes[node].pages[KVPOOL_DRAFT] < 0) {
            if (table[b] < 0) break; /* given back before it could be registered */
            kvpool__prefix_attach_draft(p, node, table[b]);
        }
        s->reg_draft = b + 1;
    }
    s->reg_draft_tried = n_full;
}

void kvpool_seq_register(struct kvpool *p, int seq, const int32_t *tokens, int n_committed,
                         enum kvpool_origin origin) {
    ASSERT(seq >= 0 && seq < p->max_seqs && p->seqs[seq].open);
    ASSERT(n_committed >= 0);
    struct seq *s = &p->seqs[seq];
    if (!p->max_nodes) return;
    int n_full = target_blocks(s, n_committed);
    if (origin == KVPOOL_GENERATED && n_committed > s->n_prompt_blocks * KVPOOL_BLOCK)
        s->answered = true;
    if (!s->answered && n_full > s->n_prompt_blocks) s->n_prompt_blocks = n_full;
    if (!s->conversation) n_full = kvpool__min(n_full, s->n_prompt_blocks);
    if (n_full > s->reg_blocks && n_full > s->reg_tried) register_target(p, seq, tokens, n_full);

    if (!kvpool__has(s->classes, KVPOOL_DRAFT) || cursor_is_stale(p, s)) return;
    int n_draft = kvpool__min(n_committed, s->n_tokens[KVPOOL_DRAFT]) / KVPOOL_BLOCK;
    n_draft = kvpool__min(n_draft, s->reg_blocks);
    if (n_draft > s->reg_draft && n_draft > s->reg_draft_tried) register_draft(p, seq, n_draft);
}
