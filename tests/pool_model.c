#include "tests/pool_model.h"

#include <stdlib.h>
#include <string.h>

#include "tests/harness.h"

#include "base/err.h"
#include "base/rng.h"
#include "kvpool/kvpool_private.h"
#include "tests/pool_helper.h"

int model_draw(struct model *m, int below) {
    return (int)(rng_u32(m->seed, m->counter++, RNG_TEST, 0) % (uint32_t)below);
}

bool model_uses(const struct model *m, const struct model_seq *s, int c) {
    return m->g.page_bytes[c] && (c != KVPOOL_DRAFT || s->draft);
}

static int blocks_of(int n_tokens) {
    return (n_tokens + KVPOOL_BLOCK - 1) / KVPOOL_BLOCK;
}

static void hash_text(struct model_seq *s) {
    uint64_t h = 0x9e3779b97f4a7c15u ^ s->salt;
    for (int i = 0; i < MODEL_TOKENS; i++) {
        h = (h ^ (uint64_t)s->tokens[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 29;
        s->hash[i] = h;
    }
}

void model_text(struct model *m, struct model_seq *s, int from) {
    for (int i = from; i < MODEL_TOKENS; i++) {
        if (i == from || i % 64 == 0) m->counter += (uint64_t)model_draw(m, 2);
        int pattern = i % 64 ? s->tokens[i - 1] / 1000 : model_draw(m, 3);
        if (i == from && i % 64) pattern = 3 + model_draw(m, 3);
        s->tokens[i] = pattern * 1000 + i % 64;
    }
    if (s->n_known > from) s->n_known = from;
    hash_text(s);
}

/* ---- Pages and what they hold ---- */

static const int32_t *pages_of(const struct model *m, int i, int c, int *n) {
    return kvpool_seq_pages(m->p, i, (enum kvpool_class)c, n);
}

/* Positions behind the prompt, and all behind a generated one, are the answer's law. */
static void know_laws(struct model_seq *s, int to) {
    for (int i = s->n_known; i < to; i++) {
        bool prompt = i < s->n_prompt && (i == 0 || !s->law_at[i - 1]);
        s->law_at[i] = prompt ? 0 : s->law;
    }
    if (s->n_known < to) s->n_known = to;
}

static int n_units(const struct model *m, int c) {
    return (int)(m->g.page_bytes[c] / KVPOOL_ALIGN);
}

static void claim(struct model *m, int32_t page, int c) {
    assert_in_range(page, 0, m->o.arena_bytes / KVPOOL_ALIGN - (size_t)n_units(m, c));
    for (int u = 0; u < n_units(m, c); u++) m->owner[page + u] = page * 4 + c;
}

void model_write(struct model *m, int i, int c, int to) {
    struct model_seq *s = &m->s[i];
    int n;
    if (to <= s->n[c]) return;
    kvpool_seq_extend(m->p, i, (enum kvpool_class)c, to);
    know_laws(s, to);
    const int32_t *pages = pages_of(m, i, c, &n);
    assert_int_equal(n, blocks_of(to));
    for (int pos = s->n[c]; pos < to; pos++) {
        int32_t page = pages[pos / 64];
        if (pos % 64 == 0 || pos == s->n[c]) claim(m, page, c);
        m->content[page][pos % 64].hash = s->hash[pos] + (uint64_t)c;
        m->content[page][pos % 64].law = c == KVPOOL_DRAFT ? 0 : s->law_at[pos];
    }
    s->n[c] = to;
}

void model_verify_seq(const struct model *m, int i) {
    const struct model_seq *s = &m->s[i];
    assert_int_equal(kvpool_seq_has_draft(m->p, i), s->draft && m->g.page_bytes[KVPOOL_DRAFT]);
    for (int c = 0; c < 3; c++) {
        int n;
        const int32_t *pages = pages_of(m, i, c, &n);
        if (!model_uses(m, s, c)) {
            assert_int_equal(n, 0);
            continue;
        }
        assert_int_equal(n, blocks_of(s->n[c]));
        assert_int_equal(kvpool_seq_n_tokens(m->p, i, (enum kvpool_class)c), s->n[c]);
        for (int b = 0; b < n; b++) {
            int32_t page = pages[b];
            assert_int_equal(page < 0, c == KVPOOL_DRAFT && s->hole[b]);
            if (page < 0) continue;
            for (int u = 0; u < n_units(m, c); u++)
                assert_int_equal(m->owner[page + u], page * 4 + c);
            for (int pos = b * 64; pos < s->n[c] && pos < b * 64 + 64; pos++) {
                uint64_t law = c == KVPOOL_DRAFT ? 0 : s->law_at[pos];
                if (m->content[page][pos % 64].hash != s->hash[pos] + (uint64_t)c ||
                    m->content[page][pos % 64].law != law)
                    fail_msg("op %ld: seq %d class %d position %d: page %d holds another prefix",
                             m->n_ops, i, c, pos, page);
            }
        }
    }
}

/* ---- Counts, from page tables alone ---- */

struct counts {
    int used[3], charged[3], reserved[3], pinned[3];
    int refs[MODEL_UNITS], windowed[MODEL_UNITS]; /* by page id */
    int in_extent[MODEL_UNITS];                   /* used pages */
};

static int held(const struct model_seq *s, int c) {
    int n = blocks_of(s->n[c]);
    for (int b = 0; c == KVPOOL_DRAFT && b < blocks_of(s->n[c]); b++) n -= s->hole[b];
    return n;
}

/* One more reference; what it costs by the rule in kvpool_private.h, said another way: windowed
 * ones pay each, the first of the others pays for all. */
static void count_ref(const struct model *m, struct counts *k, int c, int32_t page, bool windowed) {
    size_t x = kvpool_page_offset(page) / m->g.extent_bytes;
    if (windowed || k->refs[page] == k->windowed[page]) k->charged[c]++;
    if (k->refs[page]++ == 0) {
        k->used[c]++;
        if (k->in_extent[x]++ == 0) k->pinned[c]++;
    }
    k->windowed[page] += windowed;
}

static void uncount_ref(const struct model *m, struct counts *k, int c, int32_t page,
                        bool windowed) {
    size_t x = kvpool_page_offset(page) / m->g.extent_bytes;
    k->windowed[page] -= windowed;
    if (--k->refs[page] == 0) {
        k->used[c]--;
        if (--k->in_extent[x] == 0) k->pinned[c]--;
    }
    if (windowed || k->refs[page] == k->windowed[page]) k->charged[c]--;
}

static void count(const struct model *m, struct counts *k) {
    memset(k, 0, sizeof *k);
    for (int i = 0; i < m->o.max_seqs; i++) {
        const struct model_seq *s = &m->s[i];
        if (!s->open) continue;
        for (int c = 0; c < 3; c++) {
            int n;
            const int32_t *pages = pages_of(m, i, c, &n);
            if (!model_uses(m, s, c)) continue;
            k->reserved[c] += s->limit[c] - held(s, c);
            for (int b = 0; b < n; b++)
                if (pages[b] >= 0) count_ref(m, k, c, pages[b], c == KVPOOL_DRAFT && s->windowed);
        }
    }
}

static bool counts_fit(const struct model *m, const struct counts *k, const int more[3]) {
    int n = 0;
    for (int c = 0; c < 3; c++) {
        int ppe = m->g.pages_per_extent[c];
        if (!ppe) continue;
        int need = (k->charged[c] + k->reserved[c] + more[c] + ppe - 1) / ppe;
        if (need < k->pinned[c]) need = k->pinned[c];
        if (need < m->g.min_extents[c]) need = m->g.min_extents[c];
        n += need;
    }
    return n <= m->g.n_extents;
}

void model_verify(const struct model *m) {
    static struct counts k;
    struct kvpool_stats st;
    kvpool_check(m->p);
    kvpool_get_stats(m->p, &st);
    count(m, &k);
    for (int c = 0; c < 3; c++) {
        assert_int_equal(st.of[c].used, k.used[c]);
        assert_int_equal(st.of[c].reserved, k.reserved[c]);
        assert_int_equal(m->p->cls[c].n_charged, k.charged[c]);
        assert_int_equal(st.of[c].free + st.of[c].used + st.of[c].cached, st.of[c].total);
        assert_true(st.of[c].free >= 0);
    }
    for (int i = 0; i < m->o.max_seqs; i++)
        if (m->s[i].open) model_verify_seq(m, i);
}

/* ---- Admission ---- */

/* The block by its tokens among all that are cached. */
static int32_t find_block(const struct model *m, int32_t parent, uint64_t salt, uint64_t owner,
                          const int32_t *tokens) {
    for (int i = 0; i < m->p->max_nodes; i++) {
        const struct prefix_node *n = &m->p->nodes[i];
        if (n->live && n->parent == parent && n->salt == salt && n->owner == owner &&
            !memcmp(n->tokens, tokens, sizeof n->tokens))
            return i;
    }
    return -1;
}

/* Is draft block b's page among those that a hit of d blocks takes? */
static bool takes_draft(const struct model_seq *s, int d, int b) {
    return b < d && (d < s->most || b == 0 || b >= d - (s->most - 2));
}

/* References of a hit of h and d blocks, added or taken away again. */
static void count_hit(const struct model *m, struct counts *k, const struct model_seq *s,
                      const int32_t *path, int h, int d, bool add) {
    for (int b = 0; b < h; b++)
        for (int c = 0; c < 3; c++) {
            if (!model_uses(m, s, c) || (c == KVPOOL_DRAFT && !takes_draft(s, d, b))) continue;
            int32_t page = m->p->nodes[path[b]].pages[c];
            (add ? count_ref : uncount_ref)(m, k, c, page, c == KVPOOL_DRAFT && s->windowed);
        }
}

/* The longest hit that fits, and with it the longest draft part; false: nothing fits. */
static bool predict(const struct model *m, const struct model_seq *s, int *hit, int *draft_hit) {
    static struct counts k;
    int32_t path[MODEL_BLOCKS], at = -1;
    int n_path = 0, n_draft = 0, n_open = 0;
    for (int i = 0; i < m->o.max_seqs; i++) n_open += m->s[i].open;
    if (n_open == m->o.max_seqs) return false;
    while ((n_path + 1) * 64 + KVPOOL_SHARED_TAIL <= s->n_prompt) {
        const int32_t *block = s->tokens + n_path * 64;
        int32_t next = find_block(m, at, s->salt, 0, block);
        if (next < 0 && s->conversation) next = find_block(m, at, s->salt, s->conversation, block);
        if (next < 0) break;
        path[n_path++] = at = next;
    }
    if (model_uses(m, s, KVPOOL_DRAFT) && s->most > 1)
        while (n_draft < n_path && m->p->nodes[path[n_draft]].pages[KVPOOL_DRAFT] >= 0) n_draft++;
    count(m, &k);
    for (*hit = n_path; *hit >= 0; --*hit)
        for (*draft_hit = *hit < n_draft ? *hit : n_draft; *draft_hit >= 0; --*draft_hit) {
            int more[3], n_taken = 0;
            for (int b = 0; b < *draft_hit; b++) n_taken += takes_draft(s, *draft_hit, b);
            for (int c = 0; c < 3; c++)
                more[c] = !model_uses(m, s, c) ? 0
                          : c == KVPOOL_DRAFT  ? s->most - n_taken
                                               : s->end[c] - *hit;
            count_hit(m, &k, s, path, *hit, *draft_hit, true);
            bool fits = counts_fit(m, &k, more);
            count_hit(m, &k, s, path, *hit, *draft_hit, false);
            if (fits) return true;
        }
    return false;
}

/* The pool's whole memory but for marks and scratch. */
static void *snapshot(const struct kvpool *p, size_t bytes) {
    char *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, p, bytes);
    ((struct kvpool *)copy)->mark = 0;
    struct extent *x = (struct extent *)(copy + ((const char *)p->extents - (const char *)p));
    for (int i = 0; i < p->n_extents; i++) x[i].mark = 0, x[i].n_new = 0;
    struct prefix_node *n =
        (struct prefix_node *)(copy + ((const char *)p->nodes - (const char *)p));
    for (int i = 0; i < p->max_nodes; i++) n[i].down = 0;
    return copy;
}

/* A prompt: new, or a known text as it was or cut, with a new end. */
static int draw_prompt(struct model *m, struct model_seq *s) {
    int n_prompt = 1 + model_draw(m, m->o.max_blocks * 64 / 3), from = 0;
    s->salt = (uint64_t)model_draw(m, 2);
    s->conversation = (uint64_t)model_draw(m, 4);
    if (m->n_history && model_draw(m, 4)) {
        int h = model_draw(m, 3) ? m->last_history : model_draw(m, m->n_history);
        from = m->history[h].n;
        if (model_draw(m, 3) == 0) from = model_draw(m, from + 1);
        memcpy(s->tokens, m->history[h].tokens, sizeof(int32_t) * (size_t)from);
        if (model_draw(m, 8)) s->salt = m->history[h].salt; /* else: under another salt */
        if (model_draw(m, 3)) s->conversation = m->history[h].conversation;
        n_prompt = from + 1 + model_draw(m, 80);
    }
    model_text(m, s, from);
    return n_prompt;
}

/* Lengths, pages and laws of what was hit. */
static void take_hit(struct model *m, int seq, struct model_seq *s, int hit, int draft_hit) {
    int n, len[3] = {draft_hit * 64, hit * 64, hit * 64};
    for (int c = 0; c < 3; c++) {
        if (!model_uses(m, s, c)) continue;
        s->limit[c] = c == KVPOOL_DRAFT ? s->most : s->end[c];
        s->n[c] = len[c];
    }
    for (int b = 0; b < draft_hit; b++) s->hole[b] = !takes_draft(s, draft_hit, b);
    s->committed = hit * 64;
    const int32_t *pages = pages_of(m, seq, KVPOOL_DEEP, &n);
    if (!m->g.page_bytes[KVPOOL_DEEP]) pages = pages_of(m, seq, KVPOOL_SHALLOW, &n);
    bool generated = false;
    for (int pos = 0; pos < hit * 64; pos++) {
        uint64_t law = m->content[pages[pos / 64]][pos % 64].law;
        s->law_at[pos] = law;
        assert_true(law == 0 || (s->conversation && law == s->conversation));
        generated |= law != 0;
    }
    s->n_known = hit * 64;
    m->n_hits += hit > 0;
    m->n_generated_hits += generated;
    m->n_partial_draft_hits += draft_hit > 0 && draft_hit < hit;
    m->n_holed_hits += draft_hit > 0 && draft_hit >= s->most;
}

void model_admit(struct model *m, bool window) {
    static struct model_seq s;
    struct err e = {0};
    memset(&s, 0, sizeof s);
    s.open = true;
    s.draft = model_draw(m, 3) > 0;
    s.n_prompt = draw_prompt(m, &s);
    s.law = s.conversation ? s.conversation : 1000 + ++m->n_laws;
    int n_tokens = s.n_prompt + model_draw(m, 200), seq = -7, n_hit = -7, n_draft_hit = -7;
    if (n_tokens > MODEL_TOKENS) return;
    s.end[0] = s.end[1] = s.end[2] = s.most = blocks_of(n_tokens);
    struct kvpool_want want = {.n_tokens = n_tokens,
                               .with_draft = s.draft,
                               .prompt = s.tokens,
                               .n_prompt = s.n_prompt,
                               .salt = s.salt,
                               .conversation = s.conversation};
    if (window && model_draw(m, 2)) {
        want.draft_blocks = 1 + model_draw(m, 6);
        if (want.draft_blocks < s.most) s.most = want.draft_blocks;
    }
    s.windowed = model_uses(m, &s, KVPOOL_DRAFT) && s.most < s.end[0];
    int hit = 0, draft_hit = 0;
    bool fits = predict(m, &s, &hit, &draft_hit);
    size_t bytes = kvpool_host_bytes(&m->o);
    void *before = snapshot(m->p, bytes);
    int rc = kvpool_seq_open(m->p, &want, &seq, &n_hit, &n_draft_hit, &e);
    if (!s.windowed)
        assert_int_equal(rc == E_TOO_LONG, !kvpool_can_ever_fit(m->p, n_tokens, s.draft));
    if (rc) {
        void *after = snapshot(m->p, bytes);
        assert_true(rc == E_TOO_LONG || rc == E_FULL);
        assert_memory_equal(before, after, bytes);
        assert_false(fits && rc == E_FULL);
        m->n_full++;
        free(after);
        free(before);
        return;
    }
    free(before);
    assert_true(fits);
    assert_in_range(seq, 0, m->o.max_seqs - 1);
    assert_false(m->s[seq].open);
    assert_int_equal(n_hit, hit * 64);
    assert_int_equal(n_draft_hit, draft_hit * 64);
    take_hit(m, seq, &s, hit, draft_hit);
    m->s[seq] = s;
}

/* ---- Rolling back, giving back ---- */

int model_limit(const struct model *m, int i, int c) {
    const struct model_seq *s = &m->s[i];
    int n = blocks_of(s->n[c]) + s->limit[c] - held(s, c);
    if (n > s->end[c]) n = s->end[c];
    if (!model_uses(m, s, c)) n = 0;
    assert_int_equal(kvpool_seq_limit(m->p, i, (enum kvpool_class)c), n * 64);
    return n * 64;
}

int model_least(const struct model *m, const struct model_seq *s) {
    int n = MODEL_TOKENS;
    for (int c = 1; c < 3; c++)
        if (model_uses(m, s, c) && s->n[c] < n) n = s->n[c];
    return n;
}

/* Does another sequence whose reference is paid for by the first of its kind use a page of a block
 * that begins at or behind `to`? */
static bool shared_behind(const struct model *m, int i, int c, int to) {
    int n, n_other;
    const int32_t *pages = pages_of(m, i, c, &n);
    for (int b = blocks_of(to); b < n; b++)
        for (int k = 0; k < m->o.max_seqs; k++) {
            if (k == i || !m->s[k].open || (c == KVPOOL_DRAFT && m->s[k].windowed)) continue;
            const int32_t *other = pages_of(m, k, c, &n_other);
            if (b < n_other && pages[b] >= 0 && other[b] == pages[b]) return true;
        }
    return false;
}

void model_truncate(struct model *m, int i, int c, int to) {
    struct model_seq *s = &m->s[i];
    if (!model_uses(m, s, c) || to >= s->n[c]) return;
    bool may_fall = shared_behind(m, i, c, to) && !(c == KVPOOL_DRAFT && s->windowed);
    kvpool_seq_truncate(m->p, i, (enum kvpool_class)c, to);
    if (c == KVPOOL_DRAFT) {
        if (to % 64 && s->hole[to / 64]) to -= to % 64;
        for (int b = blocks_of(to); b < MODEL_BLOCKS; b++) s->hole[b] = false;
    }
    s->n[c] = to;
    int limit = m->p->seqs[i].limit[c];
    if (may_fall && limit < s->limit[c]) s->limit[c] = limit;
    assert_int_equal(limit, s->limit[c]);
    model_limit(m, i, c);
}

void model_forget(struct model *m, int i, int first, int end) {
    struct model_seq *s = &m->s[i];
    kvpool_seq_forget_draft(m->p, i, first, end);
    if (!model_uses(m, s, KVPOOL_DRAFT)) return;
    for (int b = first; b < end && (b + 1) * 64 <= s->n[KVPOOL_DRAFT]; b++) {
        if (s->hole[b]) continue;
        s->hole[b] = true;
        if (!s->windowed) s->limit[KVPOOL_DRAFT]--;
    }
    model_limit(m, i, KVPOOL_DRAFT);
}

void model_drop_draft(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    kvpool_seq_drop_draft(m->p, i);
    s->draft = s->windowed = false;
    s->n[KVPOOL_DRAFT] = s->limit[KVPOOL_DRAFT] = 0;
    memset(s->hole, 0, sizeof s->hole);
    model_limit(m, i, KVPOOL_DRAFT);
}

void model_end(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int h = m->n_history < MODEL_HISTORY ? m->n_history++ : model_draw(m, MODEL_HISTORY);
    m->last_history = h;
    m->history[h].n = s->committed;
    m->history[h].salt = s->salt;
    m->history[h].conversation = s->conversation;
    memcpy(m->history[h].tokens, s->tokens, sizeof s->tokens);
    kvpool_seq_close(m->p, i);
    s->open = false;
}

/* ---- Registration ---- */

/* The chain that a sequence registered says its own text, and where nothing was ever forgotten it
 * is complete, the draft's part up to the first block that was given back. */
static void verify_registered(const struct model *m, int i, int n, const struct kvpool_stats *st) {
    const struct model_seq *s = &m->s[i];
    const struct seq *q = &m->p->seqs[i];
    int32_t chain[MODEL_BLOCKS];
    int n_draft = 0;
    if (!m->p->max_nodes) return;
    if (q->reg_blocks && m->p->nodes[q->reg_node].serial != q->reg_serial) return;
    assert_in_range(q->reg_blocks, 0, s->committed / 64);
    int32_t node = q->reg_node;
    for (int b = q->reg_blocks - 1; b >= 0; b--, node = m->p->nodes[node].parent) {
        chain[b] = node;
        assert_memory_equal(m->p->nodes[node].tokens, s->tokens + b * 64, 256);
        assert_true(m->p->nodes[node].owner == 0 || m->p->nodes[node].owner == s->conversation);
    }
    assert_true(q->reg_blocks == 0 || node < 0);
    if (st->n_evicted || st->n_evicted_draft || st->n_cached_nodes == m->p->max_nodes) return;
    if (s->conversation) assert_true(q->reg_blocks >= n / 64);
    if (!model_uses(m, s, KVPOOL_DRAFT)) return;
    while (n_draft < q->reg_blocks && m->p->nodes[chain[n_draft]].pages[KVPOOL_DRAFT] >= 0)
        n_draft++;
    if (n_draft < q->reg_blocks && (n_draft + 1) * 64 <= kvpool__min(n, s->n[KVPOOL_DRAFT]))
        assert_true(s->hole[n_draft] || (q->reg_draft < n_draft && s->hole[q->reg_draft]));
}

void model_register(struct model *m, int i, enum kvpool_origin origin, int n) {
    struct model_seq *s = &m->s[i];
    struct kvpool_stats st;
    kvpool_seq_register(m->p, i, s->tokens, n, origin);
    kvpool_get_stats(m->p, &st);
    verify_registered(m, i, n, &st);
}

/* ---- Life ---- */

void model_open(struct model *m, const struct kvpool_options *o, uint64_t seed,
                uint64_t hash_mask) {
    struct err e = {0};
    memset(m, 0, sizeof *m);
    m->o = *o;
    m->seed = seed;
    assert_true(o->arena_bytes / KVPOOL_ALIGN <= MODEL_UNITS && o->max_seqs <= MODEL_SEQS);
    assert_true(o->max_blocks <= MODEL_BLOCKS);
    assert_ok(kvpool_geometry(o, &m->g, &e), e);
    m->p = open_pool(o);
    if (hash_mask) kvpool__set_hash_mask(m->p, hash_mask - 1);
}

void model_close(struct model *m) {
    struct kvpool_stats st;
    for (int i = 0; i < m->o.max_seqs; i++)
        if (m->s[i].open) model_end(m, i);
    model_verify(m);
    kvpool_cache_clear(m->p);
    kvpool_check(m->p);
    kvpool_get_stats(m->p, &st);
    assert_int_equal(st.n_extents_free, st.n_extents);
    assert_int_equal(st.n_cached_nodes, 0);
    assert_int_equal(st.n_draft_nodes, 0);
    kvpool_close(m->p);
}
