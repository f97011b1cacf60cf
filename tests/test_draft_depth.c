/* The choice of draft lengths on simulated machines.
 *
 * A machine is a table of times V(rows) for the target and the draft's step; a text is a chance of
 * acceptance by position and place, drawn from counters, so that every setting meets the same luck.
 * The controller sees times with noise (3 %, now and then tenfold) and outcomes, nothing else; it
 * is judged by the true times. Bounds: auto is at least 0.97 of off and 0.95 of the best fixed
 * setting on every machine and text (0.92 of it where the text keeps turning), a change is found
 * again in bounded rounds, trying in vain costs little. Each prints what it got. */
#include "tests/harness.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/rng.h"
#include "draft/depth.h"
#include "tests/draft_machines.h"

/* Three per cent, now and then tenfold. */
static double noise(uint64_t seed, uint32_t idx) {
    double u = rng_uniform(seed, 1, RNG_TEST, 2 * idx);
    if (rng_u32(seed, 1, RNG_TEST, 2 * idx + 1) % 200 == 0) return 10;
    return 1 + 0.06 * (u - 0.5);
}

/* ---- Texts ---- */

/* Chance that the model's token for position `pos` is accepted at place i. */
typedef double text_fn(int pos, int place);

static double high(int pos, int place) {
    (void)pos, (void)place;
    return 0.9;
}
static double mid(int pos, int place) {
    (void)pos, (void)place;
    return 0.65;
}
static double low(int pos, int place) {
    (void)pos, (void)place;
    return 0.3;
}
static double never(int pos, int place) {
    (void)pos, (void)place;
    return 0;
}
static double falling(int pos, int place) {
    (void)pos;
    return place < 4 ? 0.85 - 0.2 * place : 0.1;
}
static double switching(int pos, int place) {
    (void)place;
    return pos / 400 % 2 ? 0.25 : 0.9;
}
static double waves(int pos, int place) {
    (void)place;
    return 0.6 + 0.3 * sin(pos / 40.0);
}

static double bursts(int pos, int place) {
    (void)place; /* stretches of 12 tokens on average are easy or hard */
    return rng_u32(99, (uint64_t)(pos / 12), RNG_TEST, 0) % 2 ? 0.9 : 0.4;
}

struct text {
    const char *name;
    text_fn *model;    /* NULL: no draft model */
    int copy_percent;  /* of 64-token stretches that lookup foretells */
    double copy_right; /* how well */
    int noise_percent; /* of positions where a match of two says something else */
};

static const struct text texts[] = {
    {"high", high, 0, 0, 0},
    {"mid", mid, 0, 0, 0},
    {"low", low, 0, 0, 0},
    {"never", never, 0, 0, 0},
    {"falling", falling, 0, 0, 0},
    {"switching", switching, 0, 0, 0},
    {"waves", waves, 0, 0, 0},
    {"bursts", bursts, 0, 0, 0},
    {"lookup good", NULL, 100, 0.97, 0},
    {"lookup bad", NULL, 0, 0, 60},
    {"lookup half", NULL, 50, 0.95, 50},
    {"mid, edit", mid, 70, 0.96, 40},
    {"mid, lookup bad", mid, 0, 0, 60},
    {"high, lookup half", high, 50, 0.8, 50},
};
enum { N_TEXTS = sizeof texts / sizeof *texts };

/* Luck of a position: equal for every setting. */
static double luck(uint64_t seed, int pos, uint32_t what) {
    return rng_uniform(seed, (uint64_t)pos, RNG_TEST, what);
}

static bool model_right(const struct text *t, uint64_t seed, int pos, int place) {
    return luck(seed, pos, 100) < t->model(pos, place);
}

/* What lookup offers before position pos, and how long its match is. */
static int lookup_offer(const struct text *t, uint64_t seed, int pos, int *n_match) {
    bool copies = (int)(rng_u32(seed, (uint64_t)(pos / 64), RNG_TEST, 101) % 100) < t->copy_percent;
    *n_match = 0;
    if (copies && pos % 64 >= 3) {
        *n_match = pos % 64 < 32 ? pos % 64 : 32;
        return KERN_MAX_DRAFT;
    }
    if ((int)(rng_u32(seed, (uint64_t)pos, RNG_TEST, 102) % 100) >= t->noise_percent) return 0;
    *n_match = 2;
    return KERN_MAX_DRAFT;
}

static bool lookup_right(const struct text *t, uint64_t seed, int pos, int n_match) {
    return luck(seed, pos, 103) < (n_match > 2 ? t->copy_right : 0.08);
}

/* ---- One sequence ---- */

struct result {
    double ns;       /* true time */
    double probe_ns; /* of it: what probes cost above a plain round */
    int n_rounds, n_tokens, n_probes;
    double g_sum;
    int last_drafted; /* position at which the model last drafted */
};

struct learned {
    struct draft_costs costs;
    struct draft_rate prior[DRAFT_N_SOURCES];
};

static void learned_init(struct learned *s) {
    draft_cost_init(&s->costs.target, 0);
    draft_cost_init(&s->costs.draft, 0);
    s->costs.fixed_ns = s->costs.lag_row_ns = 0;
    draft_rates_init(s->prior, NULL);
}

/* One request; its rates and probe may be watched between rounds. */
struct request {
    const struct draft_machine *m;
    const struct text *t;
    uint64_t seed;
    struct learned *s;
    struct draft_rate rate[DRAFT_N_SOURCES];
    struct draft_probe probe;
    int pos, lag, first_pos, n_left, forced;
    uint32_t n_passes;
    double speed; /* of the machine: times are divided by it */
};

static void request_begin(struct request *q, const struct draft_machine *m, const struct text *t,
                          uint64_t seed, struct learned *s, int forced) {
    *q = (struct request){.m = m, .t = t, .seed = seed, .s = s, .forced = forced, .speed = 1};
    q->lag = 1;
    draft_rates_init(q->rate, s->prior);
}

static double run_draft(struct request *q, int g) {
    double ns = 0;
    for (int pass = 0; pass < g; pass++) {
        int rows = pass == 0 ? q->lag : 1;
        double one = draft_machine_draft_ns(q->m, rows, q->pos) / q->speed;
        draft_cost_observe(&q->s->costs.draft, rows, q->pos, one * noise(q->seed, q->n_passes++));
        ns += one;
    }
    return ns;
}

static struct draft_bid round_of(struct request *q, struct result *r) {
    int n_match, n_ready = lookup_offer(q->t, q->seed, q->pos, &n_match);
    struct draft_bid b = {.max_model = q->t->model ? 8 : 0,
                          .max_lookup = n_ready > 8 ? 8 : n_ready,
                          .n_match = n_match,
                          .kv_tokens = q->pos,
                          .n_lag = q->lag,
                          .n_left = q->n_left,
                          .rate = q->rate,
                          .probe = &q->probe,
                          .forced = q->forced};
    draft_choose(&q->s->costs, &b, 1, 0, 0, 16);
    int g = b.n_draft, a = 0;
    double ns = b.source == DRAFT_BY_MODEL ? run_draft(q, g) : 0;
    while (a < g && (b.source == DRAFT_BY_MODEL ? model_right(q->t, q->seed, q->pos + a, a)
                                                : lookup_right(q->t, q->seed, q->pos + a, n_match)))
        a++;
    double pass = draft_machine_target_ns(q->m, 1 + g, 1, q->pos) / q->speed;
    draft_cost_observe(&q->s->costs.target, 1 + g, q->pos, pass * noise(q->seed, q->n_passes++));
    ns += pass;
    /* Ids stand for themselves: position p's is p, a wrong guess is -1. */
    int32_t ready[8], emitted[9];
    for (int i = 0; i < b.max_lookup; i++)
        ready[i] = lookup_right(q->t, q->seed, q->pos + i, n_match) ? q->pos + i : -1;
    for (int i = 0; i <= a; i++) emitted[i] = q->pos + i;
    draft_learn(&b, q->s->prior, g, a, ready, b.max_lookup, emitted, a + 1);
    if (b.source == DRAFT_BY_MODEL && g > 0) {
        q->lag = a == g ? 2 : 1;
        r->last_drafted = q->pos;
    } else {
        q->lag += a + 1;
    }
    if (b.is_probe) {
        r->n_probes++;
        r->probe_ns += ns - (a + 1) * draft_machine_target_ns(q->m, 1, 1, q->pos) / q->speed;
    }
    r->ns += ns;
    r->n_rounds++;
    r->g_sum += g;
    r->n_tokens += a + 1;
    q->pos += a + 1;
    return b;
}

static struct result run(const struct draft_machine *m, const struct text *t, uint64_t seed,
                         struct learned *s, int forced, int n_tokens) {
    struct result r = {0};
    struct request q;
    request_begin(&q, m, t, seed, s, forced);
    while (r.n_tokens < n_tokens) round_of(&q, &r);
    return r;
}

static double ns_a_token(const struct result *r) {
    return r->ns / r->n_tokens;
}

/* A fixed setting proposes by lookup where that matches, else by the model, as --draft-tokens N. */
static double best_fixed(const struct draft_machine *m, const struct text *t, uint64_t seed,
                         int n_tokens, int *best_g) {
    double best = 1e300;
    for (int g = 0; g <= 8; g++) {
        struct learned s;
        learned_init(&s);
        struct result r = run(m, t, seed, &s, g, n_tokens);
        if (ns_a_token(&r) >= best) continue;
        best = ns_a_token(&r);
        *best_g = g;
    }
    return best;
}

/* ---- Regret ---- */

static void regret(int n_requests, int n_tokens, double least_off, double least_best,
                   const char *what) {
    int n_bad = 0;
    double worst_off = 9, worst_best = 9;
    for (int i = 0; i < N_MACHINES; i++) {
        for (int k = 0; k < N_TEXTS; k++) {
            struct learned s, plain;
            double off = 0, best = 0, got = 0, probes = 0, g = 0;
            int best_g = 0;
            learned_init(&s);
            learned_init(&plain);
            for (int n = 0; n < n_requests; n++) {
                uint64_t seed = (uint64_t)(1000 * n + 17);
                struct result r = run(&draft_machines[i], &texts[k], seed, &s, -1, n_tokens);
                struct result o = run(&draft_machines[i], &texts[k], seed, &plain, 0, n_tokens);
                got += ns_a_token(&r);
                off += ns_a_token(&o);
                best += best_fixed(&draft_machines[i], &texts[k], seed, n_tokens, &best_g);
                probes += r.probe_ns / r.ns / n_requests;
                g += r.g_sum / r.n_rounds / n_requests;
            }
            /* A fixed setting that never turns off is ahead where the text turns and turns. */
            bool turns = texts[k].model == switching || texts[k].model == waves;
            bool bad = off / got < least_off || best / got < least_best - (turns ? 0.03 : 0);
            fprintf(
                stderr,
                "%s %-14s %-18s x off %.3f  x best (g=%d) %.3f  mean g %.2f  probes %.2f %%%s\n",
                what, draft_machines[i].name, texts[k].name, off / got, best_g, best / got, g,
                100 * probes, bad ? "  BAD" : "");
            n_bad += bad;
            worst_off = fmin(worst_off, off / got);
            worst_best = fmin(worst_best, best / got);
        }
    }
    fprintf(stderr, "%s worst: %.3f of off, %.3f of the best fixed setting\n", what, worst_off,
            worst_best);
    assert_int_equal(n_bad, 0);
}

/* A long answer from a cold start. */
static void test_depth_regret_long(void) {
    regret(1, 2500, 0.97, 0.95, "long ");
}

/* Short answers one after the other: what one learned serves the next. */
static void test_depth_regret_short(void) {
    regret(6, 250, 0.97, 0.95, "short");
}

/* ---- Change ---- */

static double before_600(int pos, int place) {
    (void)place;
    return pos < 600 ? 0.9 : 0;
}
static double after_600(int pos, int place) {
    (void)place;
    return pos < 600 ? 0 : 0.9;
}
static double after_300(int pos, int place) {
    (void)place;
    return pos < 300 ? 0 : 0.9;
}
static const struct text turns_good_early = {"good from 300", after_300, 0, 0, 0};
static const struct text turns_bad = {"bad from 600", before_600, 0, 0, 0};
static const struct text turns_good = {"good from 600", after_600, 0, 0, 0};

/* The model turns bad: nothing but probes is drafted soon after. It turns good: found again. */
static void test_depth_follows_text(void) {
    struct learned s;
    struct result r = {0};
    struct request q;
    int n_wasted = 0;
    learned_init(&s);
    request_begin(&q, &draft_machines[GPU], &turns_bad, 5, &s, -1);
    while (q.pos < 600) round_of(&q, &r);
    for (int i = 0; i < 400; i++) {
        struct draft_bid b = round_of(&q, &r);
        if (b.n_draft > 0 && !b.is_probe) n_wasted++;
    }
    fprintf(stderr, "turned bad: %d rounds drafted in vain\n", n_wasted);
    assert_true(n_wasted > 0 && n_wasted <= 50);
    for (int k = 0; k < 2; k++) {
        int n_late = 0, n_good = 0;
        learned_init(&s);
        request_begin(&q, k ? &draft_machines[GPU_TILE] : &draft_machines[GPU], &turns_good, 6, &s,
                      -1);
        while (q.pos < 600) round_of(&q, &r);
        while (n_good < 5 && n_late < 1000) {
            struct draft_bid b = round_of(&q, &r);
            n_good = b.n_draft > 0 && !b.is_probe ? n_good + 1 : 0;
            n_late++;
        }
        fprintf(stderr, "turned good on %s: drafting again after %d rounds\n", q.m->name, n_late);
        assert_true(n_late <= 160);
    }
    /* Where catching up is dear, the long way round: once after 512 idle rounds. */
    int n_late = 0, n_good = 0;
    learned_init(&s);
    request_begin(&q, &draft_machines[CPU_TYPICAL], &turns_good_early, 7, &s, -1);
    while (q.pos < 300) round_of(&q, &r);
    while (n_good < 5 && n_late < 3000) {
        struct draft_bid b = round_of(&q, &r);
        n_good = b.n_draft > 0 && !b.is_probe ? n_good + 1 : 0;
        n_late++;
    }
    fprintf(stderr, "turned good on cpu: drafting again after %d rounds\n", n_late);
    assert_true(n_late <= 300);
}

/* Requests of a text without hope teach the engine to begin with the model off; when requests of
 * another kind follow, it finds out, although none of them begins with it. */
static void test_depth_engine_recovers(void) {
    static const struct draft_machine *const dear[] = {&draft_machines[CPU_TYPICAL],
                                                       &draft_machines[GPU]};
    for (int i = 0; i < 2; i++) {
        struct learned s;
        learned_init(&s);
        run(dear[i], &texts[3], 30, &s, 2, 1000); /* a fixed setting, so that it learns well */
        int n = 0;
        double g = 0;
        while (g < 0.8 && n < 40) {
            struct result r = run(dear[i], &texts[0], 60 + (uint64_t)n++, &s, -1, 300);
            g = r.g_sum / r.n_rounds;
        }
        fprintf(stderr, "requests until the model is on again on %s: %d\n", dear[i]->name, n);
        assert_true(n <= 15);
    }
}

enum moment { NO_MOMENT, SLOW_MACHINE, HELD_UP };

/* ns a token of 400 rounds that come 400 after a bad moment (or none): the whole machine at a third
 * of its speed, or every other pass held up by 15 ms of somebody else's work, while only rounds
 * with drafts ran. */
static double after_moment(const struct draft_machine *m, enum moment moment) {
    struct learned s;
    struct result skipped = {0}, after = {0};
    struct request q;
    learned_init(&s);
    request_begin(&q, m, &texts[0], 11, &s, -1);
    for (int k = 0; k < 200; k++) round_of(&q, &skipped);
    for (int k = 0; k < 40 && moment != NO_MOMENT; k++)
        for (int rows = moment == HELD_UP ? 2 : 1; rows <= 9; rows++) {
            double ns = draft_machine_target_ns(m, rows, 1, q.pos);
            if (moment == SLOW_MACHINE) ns *= 3;
            else if (rng_u32(5, (uint64_t)(16 * k + rows), RNG_TEST, 0) % 2) ns += 15e6;
            draft_cost_observe(&s.costs.target, rows, q.pos, ns);
        }
    for (int k = 0; k < 400; k++) round_of(&q, &skipped);
    for (int k = 0; k < 400; k++) round_of(&q, &after);
    return ns_a_token(&after);
}

/* What a bad moment taught of single row counts does not stay. */
static void test_depth_forgets_bad_times(void) {
    static const char *const name[] = {[SLOW_MACHINE] = "slow", [HELD_UP] = "held up"};
    for (int i = 0; i < N_MACHINES; i++)
        for (enum moment k = SLOW_MACHINE; k <= HELD_UP; k++) {
            double ratio =
                after_moment(&draft_machines[i], NO_MOMENT) / after_moment(&draft_machines[i], k);
            fprintf(stderr, "after a bad moment (%s) on %-14s %.3f of the speed without\n", name[k],
                    draft_machines[i].name, ratio);
            assert_true(ratio > 0.95);
        }
}

/* A lookup that turns good is found at once: it is judged without being tried. */
static void test_depth_watches_lookup(void) {
    struct learned s;
    struct result r = {0};
    struct request q;
    static const struct text bad = {"lookup bad", NULL, 0, 0, 100},
                             good = {"good", NULL, 100, 1, 0};
    learned_init(&s);
    request_begin(&q, &draft_machines[CPU_TYPICAL], &bad, 5, &s, -1);
    int n = 0;
    for (int i = 0; i < 200; i++) n += round_of(&q, &r).n_draft > 0;
    fprintf(stderr, "bad lookup used in %d of 200 rounds\n", n);
    assert_true(n <= 15);
    /* Its own class was bad for long; now matches of two are right. */
    struct draft_rate *two = &q.rate[draft_rate_idx(DRAFT_BY_LOOKUP, 2)];
    assert_true(draft_rate_at(two, 0) < 0.2);
    int32_t ready[2] = {1, 2}, emitted[1] = {1};
    struct draft_bid b = {.source = DRAFT_BY_MODEL, .n_match = 2, .rate = q.rate, .forced = -1};
    for (int i = 0; i < 40; i++) draft_learn(&b, NULL, 0, 0, ready, 2, emitted, 1);
    assert_true(draft_rate_at(two, 0) > 0.65);
    q.t = &good;
    n = 0;
    for (int i = 0; i < 100; i++) n += round_of(&q, &r).n_draft > 0;
    assert_true(n > 80);
}

/* What a text that is never foretold costs in probes, on every machine. */
static void test_depth_probes_are_cheap(void) {
    for (int i = 0; i < N_MACHINES; i++) {
        struct learned s;
        learned_init(&s);
        struct result r = run(&draft_machines[i], &texts[3], 9, &s, -1, 3000);
        double share = r.probe_ns / r.ns;
        fprintf(stderr, "probes in vain on %-14s %3d in 3000 rounds, %.2f %% of the time\n",
                draft_machines[i].name, r.n_probes, 100 * share);
        assert_true(r.n_probes >= 1);
        /* One catch-up of 512 tokens on a CPU is what is paid for the chance at all. */
        assert_true(share <= (draft_machines[i].draft_row > 0.01 ? 0.025 : 0.015));
    }
}

const struct test tests[] = {
    {"depth_regret_long", TEST_QUICK, 20000, test_depth_regret_long},
    {"depth_regret_short", TEST_QUICK, 20000, test_depth_regret_short},
    {"depth_follows_text", TEST_QUICK, 20000, test_depth_follows_text},
    {"depth_engine_recovers", TEST_QUICK, 20000, test_depth_engine_recovers},
    {"depth_forgets_bad_times", TEST_QUICK, 20000, test_depth_forgets_bad_times},
    {"depth_watches_lookup", TEST_QUICK, 20000, test_depth_watches_lookup},
    {"depth_probes_are_cheap", TEST_QUICK, 20000, test_depth_probes_are_cheap},
    {0},
};
