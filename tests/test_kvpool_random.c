/* kvpool/: random sequences of operations against a naive model.
 *
 * The model simulates what the pages hold: writing position i of a sequence stores, in the page
 * that the pool named, a hash of (salt, class, tokens[0..i]), and claims every 1,024-byte unit of
 * the page. A sequence is right when each of its positions reads back the hash of its own tokens
 * from units that are still its page's. A page handed out twice, shared under a false prefix,
 * overlapping another or overwritten while cached shows up as a wrong hash. */
#include "tests/harness.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kvpool/kvpool_private.h"
#include "tests/pool_helper.h"

enum { MAX_SEQS = 8, MAX_TOKENS = 16 * 64, MAX_UNITS = 4096, MAX_HISTORY = 32 };

struct model_seq {
    bool open, draft;
    uint64_t salt;
    int limit[3], n[3], committed;
    int32_t tokens[MAX_TOKENS];
    uint64_t hash[MAX_TOKENS]; /* of tokens[0..i] and salt */
};

struct model {
    struct kvpool *p;
    struct kvpool_options o;
    struct kvpool_geometry g;
    struct model_seq s[MAX_SEQS];
    uint64_t content[MAX_UNITS][64]; /* by page id */
    int32_t owner[MAX_UNITS];        /* page id * 4 + class of the last writer */
    /* Texts of closed sequences: a next turn starts with one of them. */
    struct {
        int n;
        uint64_t salt;
        int32_t tokens[MAX_TOKENS];
    } history[MAX_HISTORY];
    int n_history;
    uint64_t seed, counter;
    long n_full, n_hits, n_copies, n_ops;
};

static int draw(struct model *m, int below) {
    return (int)(rng_u32(m->seed, m->counter++, RNG_TEST, 0) % (uint32_t)below);
}

static bool uses(const struct model *m, const struct model_seq *s, int c) {
    return m->g.page_bytes[c] && (c != KVPOOL_DRAFT || s->draft);
}

/* New text from `from` on: blocks come from a few patterns, so that prefixes are shared by chance.
 */
static void make_text(struct model *m, struct model_seq *s, int from) {
    for (int i = from; i < MAX_TOKENS; i++) {
        if (i == from || i % 64 == 0) m->counter += (uint64_t)draw(m, 2);
        int pattern = i % 64 ? s->tokens[i - 1] / 1000 : draw(m, 3);
        if (i == from && i % 64) pattern = 3 + draw(m, 3);
        s->tokens[i] = pattern * 1000 + i % 64;
    }
}

static void hash_text(struct model_seq *s) {
    uint64_t h = 0x9e3779b97f4a7c15u ^ s->salt;
    for (int i = 0; i < MAX_TOKENS; i++) {
        h = (h ^ (uint64_t)s->tokens[i]) * 0xff51afd7ed558ccdu;
        h ^= h >> 29;
        s->hash[i] = h;
    }
}

static const int32_t *pages_of(const struct model *m, int i, int c, int *n) {
    return kvpool_seq_pages(m->p, i, (enum kvpool_class)c, n);
}

static void write_position(struct model *m, int i, int c, int pos) {
    int n;
    const int32_t *pages = pages_of(m, i, c, &n);
    assert_in_range(pos / 64, 0, n - 1);
    int32_t page = pages[pos / 64];
    int n_units = (int)(m->g.page_bytes[c] / KVPOOL_ALIGN);
    assert_in_range(page, 0, m->o.arena_bytes / KVPOOL_ALIGN - (size_t)n_units);
    m->content[page][pos % 64] = m->s[i].hash[pos] + (uint64_t)c;
    for (int u = 0; u < n_units; u++) m->owner[page + u] = page * 4 + c;
}

static void verify_seq(const struct model *m, int i) {
    const struct model_seq *s = &m->s[i];
    for (int c = 0; c < 3; c++) {
        int n;
        const int32_t *pages = pages_of(m, i, c, &n);
        if (!uses(m, s, c)) {
            assert_int_equal(n, 0);
            continue;
        }
        assert_int_equal(n, (s->n[c] + 63) / 64);
        for (int pos = 0; pos < s->n[c]; pos++) {
            int32_t page = pages[pos / 64];
            if (m->content[page][pos % 64] != s->hash[pos] + (uint64_t)c)
                fail_msg("op %ld: seq %d class %d position %d: page %d holds another prefix",
                         m->n_ops, i, c, pos, page);
            if (pos % 64) continue;
            for (size_t u = 0; u < m->g.page_bytes[c] / KVPOOL_ALIGN; u++)
                assert_int_equal(m->owner[page + (int)u], page * 4 + c);
        }
    }
}

/* Counts of used and reserved pages and of pinned extents, from page tables alone. */
static void count(const struct model *m, int used[3], int reserved[3], int pinned[3]) {
    static bool seen[MAX_UNITS], ext[MAX_UNITS];
    memset(seen, 0, sizeof seen);
    memset(ext, 0, sizeof ext);
    for (int c = 0; c < 3; c++) used[c] = reserved[c] = pinned[c] = 0;
    for (int i = 0; i < m->o.max_seqs; i++) {
        if (!m->s[i].open) continue;
        for (int c = 0; c < 3; c++) {
            int n;
            const int32_t *pages = pages_of(m, i, c, &n);
            reserved[c] += m->s[i].limit[c] - n;
            for (int b = 0; b < n; b++) {
                size_t x = kvpool_page_offset(pages[b]) / m->g.extent_bytes;
                if (!seen[pages[b]]) used[c]++;
                if (!ext[x]) pinned[c]++;
                seen[pages[b]] = ext[x] = true;
            }
        }
    }
}

static void verify_all(const struct model *m) {
    int used[3], reserved[3], pinned[3];
    struct kvpool_stats st;
    kvpool_check(m->p);
    kvpool_get_stats(m->p, &st);
    count(m, used, reserved, pinned);
    for (int c = 0; c < 3; c++) {
        assert_int_equal(st.of[c].used, used[c]);
        assert_int_equal(st.of[c].reserved, reserved[c]);
        assert_int_equal(st.of[c].free + st.of[c].used + st.of[c].cached, st.of[c].total);
        assert_true(st.of[c].free >= 0);
    }
    for (int i = 0; i < m->o.max_seqs; i++)
        if (m->s[i].open) verify_seq(m, i);
}

/* The pool's whole memory but for the marks, which are scratch. */
static void *snapshot(const struct kvpool *p, size_t bytes) {
    char *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, p, bytes);
    ((struct kvpool *)copy)->mark = 0;
    struct extent *x = (struct extent *)(copy + ((const char *)p->extents - (const char *)p));
    for (int i = 0; i < p->n_extents; i++) x[i].mark = 0;
    return copy;
}

/* A refusal is right when even without a hit the reservation does not fit by the model's count. */
static void verify_full(const struct model *m, int n_tokens, bool draft) {
    int used[3], reserved[3], pinned[3], n = 0, n_open = 0;
    count(m, used, reserved, pinned);
    for (int i = 0; i < m->o.max_seqs; i++) n_open += m->s[i].open;
    if (n_open == m->o.max_seqs) return;
    for (int c = 0; c < 3; c++) {
        int ppe = m->g.pages_per_extent[c];
        if (!ppe) continue;
        int pages = used[c] + reserved[c] + (c || draft ? (n_tokens + 63) / 64 : 0);
        int need = (pages + ppe - 1) / ppe;
        if (need < pinned[c]) need = pinned[c];
        if (need < m->g.min_extents[c]) need = m->g.min_extents[c];
        n += need;
    }
    assert_true(n > m->g.n_extents);
}

static void op_open(struct model *m) {
    static struct model_seq s;
    struct err e = {0};
    memset(&s, 0, sizeof s);
    s.open = true;
    s.draft = draw(m, 3) > 0;
    s.salt = (uint64_t)draw(m, 2);
    int n_prompt = 1 + draw(m, m->o.max_blocks * 64 / 3), from = 0;
    if (m->n_history && draw(m, 4)) {
        int h = draw(m, m->n_history);
        from = m->history[h].n;
        if (draw(m, 2)) from = draw(m, from + 1);
        memcpy(s.tokens, m->history[h].tokens, sizeof(int32_t) * (size_t)from);
        if (draw(m, 8)) s.salt = m->history[h].salt; /* else: same text under another salt */
        n_prompt = from + 1 + draw(m, 80);
    }
    make_text(m, &s, from);
    hash_text(&s);
    int n_tokens = n_prompt + draw(m, 200), seq = -7, n_hit = -7;
    if (n_tokens > MAX_TOKENS) return;
    size_t bytes = kvpool_host_bytes(&m->o);
    void *before = snapshot(m->p, bytes);
    int rc = kvpool_seq_open(m->p, n_tokens, s.draft, s.tokens, n_prompt, s.salt, &seq, &n_hit, &e);
    assert_int_equal(rc == E_TOO_LONG, !kvpool_can_ever_fit(m->p, n_tokens, s.draft));
    if (rc) {
        void *after = snapshot(m->p, bytes);
        assert_true(rc == E_FULL || rc == E_TOO_LONG);
        assert_memory_equal(before, after, bytes);
        if (rc == E_FULL) verify_full(m, n_tokens, s.draft);
        m->n_full++;
        free(after);
        free(before);
        return;
    }
    free(before);
    assert_in_range(seq, 0, m->o.max_seqs - 1);
    assert_false(m->s[seq].open);
    assert_int_equal(n_hit % 64, 0);
    assert_true(n_hit == 0 || n_hit <= n_prompt - KVPOOL_SHARED_TAIL);
    for (int c = 0; c < 3; c++) {
        if (!uses(m, &s, c)) continue;
        s.limit[c] = (n_tokens + 63) / 64;
        s.n[c] = n_hit;
        assert_int_equal(kvpool_seq_n_tokens(m->p, seq, (enum kvpool_class)c), n_hit);
    }
    s.committed = n_hit;
    m->n_hits += n_hit > 0;
    m->s[seq] = s;
}

/* Before positions behind n[c] are written: the block that they begin in must be this sequence's.
 * False where the pool has no page for the copy. */
static bool make_writable(struct model *m, int i, int c) {
    struct err e = {0};
    bool must_copy;
    int32_t src, dst;
    int n = m->s[i].n[c];
    if (n % 64 == 0) return true;
    int rc = kvpool_seq_writable(m->p, i, (enum kvpool_class)c, n / 64, &must_copy, &src, &dst, &e);
    if (rc) {
        assert_int_equal(rc, E_FULL);
        m->n_full++;
        return false;
    }
    if (must_copy) {
        memcpy(m->content[dst], m->content[src], sizeof m->content[dst]);
        for (size_t u = 0; u < m->g.page_bytes[c] / KVPOOL_ALIGN; u++)
            m->owner[dst + (int)u] = dst * 4 + c;
        m->n_copies++;
    }
    return true;
}

static void op_extend(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int more = 1 + (draw(m, 2) ? draw(m, 20) : draw(m, 500));
    for (int c = 0; c < 3; c++) {
        if (!uses(m, s, c) || draw(m, 8) == 0) continue;
        int to = s->n[c] + more;
        if (to > s->limit[c] * 64) to = s->limit[c] * 64;
        if (to <= s->n[c] || !make_writable(m, i, c)) continue;
        kvpool_seq_extend(m->p, i, (enum kvpool_class)c, to);
        for (int pos = s->n[c]; pos < to; pos++) write_position(m, i, c, pos);
        s->n[c] = to;
    }
}

static int least(const struct model *m, const struct model_seq *s) {
    int n = MAX_TOKENS;
    for (int c = 0; c < 3; c++)
        if (uses(m, s, c) && s->n[c] < n) n = s->n[c];
    return n;
}

/* Does another sequence use a page of a block that begins at or behind `to`? */
static bool shared_behind(const struct model *m, int i, int c, int to) {
    int n, n_other;
    const int32_t *pages = pages_of(m, i, c, &n);
    for (int b = (to + 63) / 64; b < n; b++)
        for (int k = 0; k < m->o.max_seqs; k++) {
            if (k == i || !m->s[k].open) continue;
            const int32_t *other = pages_of(m, k, c, &n_other);
            if (b < n_other && other[b] == pages[b]) return true;
        }
    return false;
}

static void op_truncate(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int n = least(m, s);
    /* Mostly a rollback above what is committed; sometimes into committed text, or of one class. */
    int low = draw(m, 8) ? (s->committed < n ? s->committed : n) : 0;
    int to = low + draw(m, n - low + 1);
    if (draw(m, 3) == 0) to -= to % 64;
    int only = draw(m, 6) ? -1 : draw(m, 3);
    bool rewrite = only < 0 && draw(m, 2);
    for (int c = 0; c < 3; c++) {
        if (!uses(m, s, c) || (only >= 0 && c != only)) continue;
        bool shared = shared_behind(m, i, c, to);
        kvpool_seq_truncate(m->p, i, (enum kvpool_class)c, to);
        s->n[c] = to;
        int limit = kvpool_seq_limit(m->p, i, (enum kvpool_class)c) / 64;
        if (shared) s->limit[c] = limit < s->limit[c] ? limit : s->limit[c];
        assert_int_equal(limit, s->limit[c]);
    }
    if (s->committed > to) s->committed = to;
    if (!rewrite) return;
    make_text(m, s, to); /* what follows is other text */
    hash_text(s);
}

static void op_register(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int n = least(m, s);
    if (n > s->committed) s->committed += draw(m, 3) ? n - s->committed : draw(m, n - s->committed);
    kvpool_seq_register(m->p, i, s->tokens, s->committed,
                        draw(m, 2) ? KVPOOL_PROMPT : KVPOOL_GENERATED, s->salt);
}

static void op_shrink(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int n = draw(m, MAX_TOKENS);
    kvpool_seq_shrink(m->p, i, n);
    for (int c = 0; c < 3; c++) {
        int limit = (n + 63) / 64, held = (s->n[c] + 63) / 64;
        if (limit < held) limit = held;
        if (limit < s->limit[c]) s->limit[c] = limit;
    }
}

static void op_close(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int h = m->n_history < MAX_HISTORY ? m->n_history++ : draw(m, MAX_HISTORY);
    m->history[h].n = s->committed;
    m->history[h].salt = s->salt;
    memcpy(m->history[h].tokens, s->tokens, sizeof s->tokens);
    kvpool_seq_close(m->p, i);
    s->open = false;
}

static void run_model(struct kvpool_options o, uint64_t seed, long n_ops, uint64_t hash_mask,
                      long totals[3]) {
    static struct model m;
    struct err e = {0};
    memset(&m, 0, sizeof m);
    m.o = o;
    m.seed = seed;
    assert_true(o.arena_bytes / KVPOOL_ALIGN <= MAX_UNITS && o.max_seqs <= MAX_SEQS);
    assert_true(o.max_blocks * 64 <= MAX_TOKENS);
    assert_ok(kvpool_geometry(&o, &m.g, &e), e);
    m.p = open_pool(&o);
    if (hash_mask) kvpool__set_hash_mask(m.p, hash_mask - 1);
    for (m.n_ops = 0; m.n_ops < n_ops; m.n_ops++) {
        int i = draw(&m, o.max_seqs), op = draw(&m, 100);
        if (!m.s[i].open) {
            op_open(&m);
        } else {
            if (op < 50) op_extend(&m, i);
            else if (op < 60) op_truncate(&m, i);
            else if (op < 80) op_register(&m, i);
            else if (op < 83) op_shrink(&m, i);
            else if (op < 90) op_close(&m, i);
            else if (draw(&m, 60) == 0) kvpool_cache_clear(m.p);
            if (m.s[i].open) verify_seq(&m, i);
        }
        if (m.n_ops % 8 == 0) verify_all(&m);
    }
    for (int i = 0; i < o.max_seqs; i++)
        if (m.s[i].open) op_close(&m, i);
    verify_all(&m);
    kvpool_cache_clear(m.p);
    kvpool_check(m.p);
    struct kvpool_stats st;
    kvpool_get_stats(m.p, &st);
    assert_int_equal(st.n_extents_free, st.n_extents);
    assert_int_equal(st.n_cached_nodes, 0);
    totals[0] += m.n_full;
    totals[1] += m.n_hits;
    totals[2] += m.n_copies;
    kvpool_close(m.p);
}

/* 48 seeds over tiny and middling pools, page sizes equal, nested and awkward, with and without
 * guarantees, cache and draft; 240,000 operations. Every kind of event must have happened. */
static void test_kvpool_random_ops(void) {
    long totals[3] = {0};
    for (uint64_t seed = 0; seed < 48; seed++) {
        struct kvpool_options o;
        switch (seed % 8) {
        case 0:
            o = options(1, 1, 1, 96);
            break;
        case 1:
            o = options(1, 2, 3, 256);
            break;
        case 2:
            o = options(3, 5, 7, 600);
            break;
        case 3:
            o = options(0, 1, 2, 200);
            break;
        case 4:
            o = options(0, 0, 3, 120);
            break;
        case 5:
            o = options(2, 7, 5, 400);
            break;
        case 6:
            o = options(1, 1, 1, 6);
            break; /* one block */
        default:
            o = options(4, 1, 1, 1200);
            break;
        }
        if (seed % 3 == 1)
            o.min_bytes[seed % 8 == 4 ? 2 : seed % 8 == 3 ? 1 : 0] = o.arena_bytes / 4;
        if (seed % 5 == 1) o.max_cached = 5;
        if (seed % 11 == 1) o.max_cached = 0;
        if (seed % 7 == 3) o.max_seqs = 2;
        run_model(o, seed, 5000, seed % 4 == 2 ? 1 : seed % 4 == 3 ? 4 : 0, totals);
    }
    print_message("%ld refused, %ld hits, %ld private copies\n", totals[0], totals[1], totals[2]);
    assert_true(totals[0] > 1000);
    assert_true(totals[1] > 1000);
    assert_true(totals[2] > 10);
}

const struct test tests[] = {
    {"kvpool_random_ops", TEST_QUICK, 60000, test_kvpool_random_ops},
    {0},
};
