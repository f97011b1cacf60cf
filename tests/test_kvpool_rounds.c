/* kvpool/: what rounds of speculation do, at random, against the naive model of pool_model.h.
 *
 * 16 small pools, 2,000 events each: admit with or without a draft, a conversation, a bound on the
 * draft's pages; a prompt's chunk, the draft lagging; a round (the draft catches up, proposes g,
 * the target verifies g + 1, 0..g are accepted, both roll back to exactly the committed tokens);
 * cancel in the middle of a round; take back drafts when a sequence finds no room; register now or
 * later. After every event every page, count and reservation equals the model's, and of each class
 * free + used + cached is its total. A round never needs a private copy and never runs out, however
 * full the pool: the pool asserts both. */
#include "tests/harness.h"

#include "kvpool/kvpool_private.h"
#include "tests/pool_helper.h"
#include "tests/pool_model.h"

enum { MAX_G = 8, CHUNK = 96 };

enum event {
    EV_ADMIT,
    EV_REFUSED,
    EV_CHUNK,
    EV_ROUND,
    EV_ALL_ACCEPTED,
    EV_NONE_ACCEPTED,
    EV_PAGE_BACK,
    EV_LAGGED,
    EV_FORGOT,
    EV_CANCEL_IN_ROUND,
    EV_STARVED,
    EV_FINISHED,
    EV_HIT,
    EV_HIT_GENERATED,
    EV_HIT_LESS_DRAFT,
    EV_HIT_HOLES,
    N_EVENTS
};
static const char *const names[N_EVENTS] = {
    "admitted",  "refused",     "chunks",           "rounds",     "all accepted", "none accepted",
    "page back", "lagged",      "draft forgotten",  "cancels",    "starved",      "finished",
    "hits",      "answer hits", "hits, less draft", "hits, holes"};

struct run {
    struct model m;
    long count[N_EVENTS];
};

static int most_tokens(const struct model *m, int i) {
    int n = MODEL_TOKENS;
    for (int c = 1; c < 3; c++)
        if (model_uses(m, &m->s[i], c) && model_limit(m, i, c) < n) n = model_limit(m, i, c);
    return n;
}

static void extend_target(struct model *m, int i, int to) {
    for (int c = 1; c < 3; c++)
        if (model_uses(m, &m->s[i], c)) model_write(m, i, c, to);
}

/* The draft writes up to `to`, a page at a time where it has a bound, as its passes do: what is
 * behind its window goes first. Its window is what the bound leaves: a page for the first block,
 * one for the block being written, one more for a block that is only partly behind. */
static void extend_draft(struct run *r, int i, int to) {
    struct model *m = &r->m;
    struct model_seq *s = &m->s[i];
    if (!model_uses(m, s, KVPOOL_DRAFT)) return;
    if (s->windowed && s->most < 4) { /* no window fits: forget all but what is written */
        to = to < s->n[KVPOOL_DRAFT] + 64 ? to : s->n[KVPOOL_DRAFT] + 64;
        model_forget(m, i, 0, s->n[KVPOOL_DRAFT] / 64);
        if (to > model_limit(m, i, KVPOOL_DRAFT)) to = model_limit(m, i, KVPOOL_DRAFT);
        model_write(m, i, KVPOOL_DRAFT, to);
        return;
    }
    while (s->n[KVPOOL_DRAFT] < to) {
        int n = s->n[KVPOOL_DRAFT], next = n - n % 64 + 64;
        if (next > to) next = to;
        if (s->windowed && n / 64 - (s->most - 3) > 1) {
            model_forget(m, i, 1, n / 64 - (s->most - 3));
            r->count[EV_FORGOT]++;
        }
        assert_true(next <= model_limit(m, i, KVPOOL_DRAFT));
        model_write(m, i, KVPOOL_DRAFT, next);
    }
}

static void register_some(struct model *m, int i, bool now) {
    const struct model_seq *s = &m->s[i];
    int n_prompt = s->committed < s->n_prompt ? s->committed : s->n_prompt;
    if (!now && model_draw(m, 3)) return;
    model_register(m, i, KVPOOL_PROMPT, n_prompt);
    if (s->committed > s->n_prompt) model_register(m, i, KVPOOL_GENERATED, s->committed);
}

static void finish(struct run *r, int i) {
    register_some(&r->m, i, true);
    model_end(&r->m, i);
    r->count[EV_FINISHED]++;
}

static void chunk(struct run *r, int i) {
    struct model *m = &r->m;
    struct model_seq *s = &m->s[i];
    int to = s->committed + 1 + model_draw(m, CHUNK);
    if (to > s->n_prompt) to = s->n_prompt;
    extend_target(m, i, to);
    s->committed = to;
    if (model_draw(m, 3)) extend_draft(r, i, to - model_draw(m, to / 4 + 1));
    r->count[EV_CHUNK]++;
    register_some(m, i, to == s->n_prompt);
}

static void go_back(struct run *r, int i, int c, int to) {
    int before, after;
    kvpool_seq_pages(r->m.p, i, (enum kvpool_class)c, &before);
    model_truncate(&r->m, i, c, to);
    kvpool_seq_pages(r->m.p, i, (enum kvpool_class)c, &after);
    r->count[EV_PAGE_BACK] += after < before;
}

/* The pending token stands at position `committed`. */
static void play_round(struct run *r, int i) {
    struct model *m = &r->m;
    struct model_seq *s = &m->s[i];
    int g = model_draw(m, MAX_G + 1), room = most_tokens(m, i) - s->committed - 1;
    if (room < 0) {
        finish(r, i);
        return;
    }
    if (g > room) g = room;
    if (s->n[KVPOOL_DRAFT] < s->committed) {
        /* It catches up on part of it, or at once, and then proposes; a lookup may propose beside
         * it. */
        int lag = s->committed - s->n[KVPOOL_DRAFT];
        int to = model_draw(m, 3) ? s->committed + g : s->n[KVPOOL_DRAFT] + model_draw(m, lag + 1);
        extend_draft(r, i, to);
        r->count[EV_LAGGED] += s->draft;
    } else if (g > 0) {
        extend_draft(r, i, s->committed + g);
    }
    extend_target(m, i, s->committed + 1 + g);
    r->count[EV_ROUND]++;
    if (model_draw(m, 40) == 0) { /* cancelled before anything was accepted */
        model_end(m, i);
        r->count[EV_CANCEL_IN_ROUND]++;
        return;
    }
    int accepted = model_draw(m, 4) ? model_draw(m, g + 1) : model_draw(m, 2) ? g : 0;
    r->count[EV_ALL_ACCEPTED] += g > 0 && accepted == g;
    r->count[EV_NONE_ACCEPTED] += g > 0 && accepted == 0;
    s->committed += 1 + accepted;
    for (int c = 0; c < 3; c++) go_back(r, i, c, s->committed);
    model_text(m, s, s->committed);
    for (int c = 0; c < 3; c++)
        if (model_uses(m, s, c)) assert_true(c == 0 || s->n[c] == s->committed);
    register_some(m, i, false);
}

/* A sequence, and where it finds no room the draft of one that runs. */
static void admit(struct run *r) {
    struct model *m = &r->m;
    long n_full = m->n_full;
    model_admit(m, true);
    r->count[m->n_full == n_full ? EV_ADMIT : EV_REFUSED]++;
    if (m->n_full == n_full || model_draw(m, 2)) return;
    for (int i = m->o.max_seqs - 1; i >= 0; i--) {
        if (!m->s[i].open || !model_uses(m, &m->s[i], KVPOOL_DRAFT)) continue;
        model_drop_draft(m, i);
        r->count[EV_STARVED]++;
        return;
    }
}

static void play(struct run *r, const struct kvpool_options *o, uint64_t seed, int n_events,
                 uint64_t hash_mask) {
    struct model *m = &r->m;
    model_open(m, o, seed, hash_mask);
    for (m->n_ops = 0; m->n_ops < n_events; m->n_ops++) {
        int i = model_draw(m, o->max_seqs);
        if (!m->s[i].open) admit(r);
        else if (m->s[i].committed < m->s[i].n_prompt) chunk(r, i);
        else if (model_draw(m, 60) == 0) finish(r, i);
        else play_round(r, i);
        if (model_draw(m, 500) == 0) kvpool_cache_clear(m->p);
        model_verify(m);
    }
    r->count[EV_HIT] += m->n_hits;
    r->count[EV_HIT_GENERATED] += m->n_generated_hits;
    r->count[EV_HIT_LESS_DRAFT] += m->n_partial_draft_hits;
    r->count[EV_HIT_HOLES] += m->n_holed_hits;
    model_close(m);
}

static void test_kvpool_rounds(void) {
    static struct run r;
    for (uint64_t seed = 0; seed < 16; seed++) {
        struct kvpool_options o;
        switch (seed % 4) {
        case 0:
            o = options(1, 1, 1, 360);
            break;
        case 1:
            o = options(1, 3, 5, 1000);
            break;
        case 2:
            o = options(2, 7, 5, 1500);
            break;
        default:
            o = options(3, 1, 2, 240);
            break;
        }
        if (seed % 3 == 1) o.min_bytes[KVPOOL_DRAFT] = o.arena_bytes / 5;
        if (seed % 5 == 1) o.max_cached = 7;
        if (seed % 7 == 3) o.max_seqs = 3;
        play(&r, &o, 1000 + seed, 2000, seed % 8 == 6 ? 4 : 0);
    }
    for (int i = 0; i < N_EVENTS; i++)
        print_message("%ld %s%s", r.count[i], names[i], i + 1 < N_EVENTS ? ", " : "\n");
    for (int i = 0; i < N_EVENTS; i++)
        if (r.count[i] < 20) fail_msg("only %ld events: %s", r.count[i], names[i]);
}

const struct test tests[] = {
    {"kvpool_rounds", TEST_QUICK, 60000, test_kvpool_rounds},
    {0},
};
