/* kvpool/: random operations, each class grown and rolled back at will, against the naive model of
 * pool_model.h. test_kvpool_rounds.c applies what rounds of speculation do. */
#include "tests/harness.h"

#include <string.h>

#include "base/err.h"
#include "kvpool/kvpool_private.h"
#include "tests/pool_helper.h"
#include "tests/pool_model.h"

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
    int more = 1 + (model_draw(m, 2) ? model_draw(m, 20) : model_draw(m, 500));
    for (int c = 0; c < 3; c++) {
        if (!model_uses(m, s, c) || model_draw(m, 8) == 0) continue;
        int to = s->n[c] + more, limit = model_limit(m, i, c);
        if (to > limit) to = limit;
        if (to <= s->n[c] || !make_writable(m, i, c)) continue;
        model_write(m, i, c, to);
    }
}

static void op_truncate(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int n = model_least(m, s);
    /* Mostly a rollback above what is committed; sometimes into committed text, or of one class. */
    int low = model_draw(m, 8) ? (s->committed < n ? s->committed : n) : 0;
    int to = low + model_draw(m, n - low + 1);
    if (model_draw(m, 3) == 0) to -= to % 64;
    int only = model_draw(m, 6) ? -1 : model_draw(m, 3);
    for (int c = 0; c < 3; c++)
        if (only < 0 || c == only) model_truncate(m, i, c, to);
    if (s->committed > model_least(m, s)) s->committed = model_least(m, s);
    if (only < 0 && model_draw(m, 2)) model_text(m, s, to); /* what follows is other text */
}

static void op_register(struct model *m, int i) {
    struct model_seq *s = &m->s[i];
    int n = model_least(m, s);
    if (n > s->committed)
        s->committed += model_draw(m, 3) ? n - s->committed : model_draw(m, n - s->committed);
    n = s->committed < s->n_prompt ? s->committed : s->n_prompt;
    if (s->committed < s->n_prompt || model_draw(m, 4)) model_register(m, i, KVPOOL_PROMPT, n);
    if (s->committed > s->n_prompt) model_register(m, i, KVPOOL_GENERATED, s->committed);
}

static void op_forget(struct model *m, int i) {
    int n = (m->s[i].n[KVPOOL_DRAFT] + 63) / 64, first = model_draw(m, n + 1);
    model_forget(m, i, model_draw(m, 2) ? 1 : first, first + model_draw(m, n + 2 - first));
}

static void run_model(const struct kvpool_options *o, uint64_t seed, long n_ops, uint64_t hash_mask,
                      long totals[6]) {
    static struct model m;
    model_open(&m, o, seed, hash_mask);
    for (m.n_ops = 0; m.n_ops < n_ops; m.n_ops++) {
        int i = model_draw(&m, o->max_seqs), op = model_draw(&m, 100);
        if (!m.s[i].open) {
            model_admit(&m, seed % 2 == 0);
        } else {
            if (op < 50) op_extend(&m, i);
            else if (op < 60) op_truncate(&m, i);
            else if (op < 83) op_register(&m, i);
            else if (op < 90) model_end(&m, i);
            else if (op < 94) op_forget(&m, i);
            else if (op < 96) model_drop_draft(&m, i);
            else if (model_draw(&m, 60) == 0) kvpool_cache_clear(m.p);
            if (m.s[i].open) model_verify_seq(&m, i);
        }
        if (m.n_ops % 8 == 0) model_verify(&m);
    }
    long n[] = {m.n_full,      m.n_hits, m.n_copies, m.n_generated_hits, m.n_partial_draft_hits,
                m.n_holed_hits};
    for (int i = 0; i < 6; i++) totals[i] += n[i];
    model_close(&m);
}

/* 48 seeds over tiny and middling pools, page sizes equal, nested and awkward, with and without
 * guarantees, cache and draft; 240,000 operations. Every kind of event must have happened. */
static void test_kvpool_random_ops(void) {
    long totals[6] = {0};
    for (uint64_t seed = 0; seed < 48; seed++) {
        struct kvpool_options o;
        switch (seed % 8) {
        case 0:
            o = options(1, 1, 1, 96);
            break;
        case 1:
            o = options(1, 2, 3, 500);
            break;
        case 2:
            o = options(3, 5, 7, 1100);
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
        run_model(&o, seed, 5000, seed % 4 == 2 ? 1 : seed % 4 == 3 ? 4 : 0, totals);
    }
    print_message("%ld refused; %ld hits, %ld of them in an answer, %ld with less of the draft, "
                  "%ld with holes; %ld private copies\n",
                  totals[0], totals[1], totals[3], totals[4], totals[5], totals[2]);
    assert_true(totals[0] > 1000);
    assert_true(totals[1] > 1000);
    assert_true(totals[2] > 10);
    assert_true(totals[3] > 100);
    assert_true(totals[4] > 50);
    assert_true(totals[5] > 5);
}

const struct test tests[] = {
    {"kvpool_random_ops", TEST_QUICK, 60000, test_kvpool_random_ops},
    {0},
};
