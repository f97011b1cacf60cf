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
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "draft/depth.h"

#define STEP_NS 5e6 /* one row of the target on an empty context */

/* ---- Machines ---- */

struct machine {
    const char *name;
    double v[9];       /* rows 1..9, in units of a step; beyond: the last difference goes on */
    double draft;      /* a draft step of one row */
    double draft_row;  /* each further row of it */
    double per_kv;     /* growth of both by position, as a share of a step */
    double row_per_kv; /* the same for each further row */
};

static const struct machine cpu_typical = {
    "cpu", {1, 1.3, 1.8, 2.3, 2.75, 3.2, 3.65, 4.1, 4.6}, 0.18, 0.045, 0, 0};
static const struct machine cpu_mild = {
    "cpu mild", {1, 1.25, 1.6, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0}, 0.15, 0.04, 0, 0};
static const struct machine cpu_steep = {
    "cpu steep", {1, 1.4, 2.0, 2.55, 3.1, 3.75, 4.4, 5.0, 5.6}, 0.2, 0.05, 0, 0};
static const struct machine gpu = {
    "gpu", {1, 1.02, 1.03, 1.05, 1.06, 1.07, 1.09, 1.1, 1.12}, 0.2, 0.001, 0, 0};
static const struct machine gpu_tile = {
    "gpu tiles of 4", {1, 1.01, 1.02, 1.03, 1.5, 1.51, 1.52, 1.53, 2.0}, 0.12, 0.001, 0, 0};
static const struct machine cpu_long = {
    "cpu long", {1, 1.3, 1.8, 2.3, 2.75, 3.2, 3.65, 4.1, 4.6}, 0.18, 0.045, 1.0 / 2000, 1.0 / 2500};
static const struct machine *const machines[] = {&cpu_typical, &cpu_mild, &cpu_steep,
                                                 &gpu,         &gpu_tile, &cpu_long};
enum { N_MACHINES = sizeof machines / sizeof *machines };

/* kv summed over sequences, rows over all. */
static double target_ns(const struct machine *m, int rows, int n_seqs, double kv) {
    double v = rows <= 9 ? m->v[rows - 1] : m->v[8] + (rows - 9) * (m->v[8] - m->v[7]);
    double extra = (double)(rows - n_seqs) / n_seqs;
    return STEP_NS * (v + kv * (m->per_kv + extra * m->row_per_kv));
}

static double draft_ns(const struct machine *m, int rows, double kv) {
    return STEP_NS * (m->draft + m->draft_row * (rows - 1) + 0.1 * kv * m->per_kv);
}

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
    draft_cost_init(&s->costs.target);
    draft_cost_init(&s->costs.draft);
    s->costs.fixed_ns = 0;
    draft_rates_init(s->prior, NULL);
}

/* One request; its rates and probe may be watched between rounds. */
struct request {
    const struct machine *m;
    const struct text *t;
    uint64_t seed;
    struct learned *s;
    struct draft_rate rate[DRAFT_N_SOURCES];
    struct draft_probe probe;
    int pos, lag, first_pos, n_left, forced;
    uint32_t n_passes;
    double speed; /* of the machine: times are divided by it */
};

static void request_begin(struct request *q, const struct machine *m, const struct text *t,
                          uint64_t seed, struct learned *s, int forced) {
    *q = (struct request){.m = m, .t = t, .seed = seed, .s = s, .forced = forced, .speed = 1};
    q->lag = 1;
    draft_rates_init(q->rate, s->prior);
}

static double run_draft(struct request *q, int g) {
    double ns = 0;
    for (int pass = 0; pass < g; pass++) {
        int rows = pass == 0 ? q->lag : 1;
        double one = draft_ns(q->m, rows, q->pos) / q->speed;
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
    double pass = target_ns(q->m, 1 + g, 1, q->pos) / q->speed;
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
        r->probe_ns += ns - (a + 1) * target_ns(q->m, 1, 1, q->pos) / q->speed;
    }
    r->ns += ns;
    r->n_rounds++;
    r->g_sum += g;
    r->n_tokens += a + 1;
    q->pos += a + 1;
    return b;
}

static struct result run(const struct machine *m, const struct text *t, uint64_t seed,
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
static double best_fixed(const struct machine *m, const struct text *t, uint64_t seed, int n_tokens,
                         int *best_g) {
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
                struct result r = run(machines[i], &texts[k], seed, &s, -1, n_tokens);
                struct result o = run(machines[i], &texts[k], seed, &plain, 0, n_tokens);
                got += ns_a_token(&r);
                off += ns_a_token(&o);
                best += best_fixed(machines[i], &texts[k], seed, n_tokens, &best_g);
                probes += r.probe_ns / r.ns / n_requests;
                g += r.g_sum / r.n_rounds / n_requests;
            }
            /* A fixed setting that never turns off is ahead where the text turns and turns. */
            bool turns = texts[k].model == switching || texts[k].model == waves;
            bool bad = off / got < least_off || best / got < least_best - (turns ? 0.03 : 0);
            fprintf(
                stderr,
                "%s %-14s %-18s x off %.3f  x best (g=%d) %.3f  mean g %.2f  probes %.2f %%%s\n",
                what, machines[i]->name, texts[k].name, off / got, best_g, best / got, g,
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
    request_begin(&q, &gpu, &turns_bad, 5, &s, -1);
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
        request_begin(&q, k ? &gpu_tile : &gpu, &turns_good, 6, &s, -1);
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
    request_begin(&q, &cpu_typical, &turns_good_early, 7, &s, -1);
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
    static const struct machine *const dear[] = {&cpu_typical, &gpu};
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
static double after_moment(const struct machine *m, enum moment moment) {
    struct learned s;
    struct result skipped = {0}, after = {0};
    struct request q;
    learned_init(&s);
    request_begin(&q, m, &texts[0], 11, &s, -1);
    for (int k = 0; k < 200; k++) round_of(&q, &skipped);
    for (int k = 0; k < 40 && moment != NO_MOMENT; k++)
        for (int rows = moment == HELD_UP ? 2 : 1; rows <= 9; rows++) {
            double ns = target_ns(m, rows, 1, q.pos);
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
            double ratio = after_moment(machines[i], NO_MOMENT) / after_moment(machines[i], k);
            fprintf(stderr, "after a bad moment (%s) on %-14s %.3f of the speed without\n", name[k],
                    machines[i]->name, ratio);
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
    request_begin(&q, &cpu_typical, &bad, 5, &s, -1);
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
        struct result r = run(machines[i], &texts[3], 9, &s, -1, 3000);
        double share = r.probe_ns / r.ns;
        fprintf(stderr, "probes in vain on %-14s %3d in 3000 rounds, %.2f %% of the time\n",
                machines[i]->name, r.n_probes, 100 * share);
        assert_true(r.n_probes >= 1);
        /* One catch-up of 512 tokens on a CPU is what is paid for the chance at all. */
        assert_true(share <= (machines[i]->draft_row > 0.01 ? 0.025 : 0.015));
    }
}

/* ---- Several sequences against trying everything ---- */

enum { MOST_G = 4, MOST_CROWD = 4 };

struct crowd {
    struct draft_costs costs;
    struct draft_bid bid[DRAFT_MAX_BIDS];
    struct draft_rate rate[DRAFT_MAX_BIDS][DRAFT_N_SOURCES];
    struct draft_probe probe[DRAFT_MAX_BIDS];
    int n, n_other, max_rows;
};

/* A cost table that knows the machine exactly. */
static void know(struct draft_costs *c, const struct machine *m, int n_seqs, double kv) {
    draft_cost_init(&c->target);
    draft_cost_init(&c->draft);
    c->fixed_ns = 0;
    for (int k = 0; k < 3; k++) {
        for (int rows = 1; rows <= 128; rows++)
            draft_cost_observe(&c->target, rows, kv, target_ns(m, rows, n_seqs, kv));
        for (int rows = 1; k == 2 && rows <= 12; rows++) /* none is stale */
            draft_cost_observe(&c->target, rows, kv, target_ns(m, rows, n_seqs, kv));
        for (int rows = 1; rows <= 64; rows++)
            draft_cost_observe(&c->draft, rows, kv, draft_ns(m, rows, kv));
    }
}

static void make_crowd(struct crowd *w, const struct machine *m, int n, uint64_t seed) {
    static const double level[] = {0.9, 0.65, 0.3, 0.05};
    uint32_t idx = 0;
    memset(w, 0, sizeof *w);
    w->n = n;
    w->n_other = (int)(rng_u32(seed, 0, RNG_TEST, idx++) % 3);
    w->max_rows = 1000;
    know(&w->costs, m, n + w->n_other, 100.0 * (n + w->n_other));
    for (int i = 0; i < n; i++) {
        draft_rates_init(w->rate[i], NULL);
        for (int k = 0; k < DRAFT_N_SOURCES; k++) {
            uint32_t which = rng_u32(seed, 0, RNG_TEST, idx++) % 4;
            for (int j = 0; j < KERN_MAX_DRAFT; j++) w->rate[i][k].prior[j] = (float)level[which];
            for (int j = 0; j < DRAFT_N_LEVELS; j++)
                w->rate[i][k].share[j] = j == 0 ? 0.3f : j == 2 * (int)which + 2 ? 0.7f : 0;
        }
        uint32_t dice[4]; /* drawn in order: an initialiser has none */
        for (int k = 0; k < 4; k++) dice[k] = rng_u32(seed, 0, RNG_TEST, idx++);
        w->bid[i] = (struct draft_bid){.max_model = dice[0] % 4 ? MOST_G : 0,
                                       .max_lookup = dice[1] % 3 ? 0 : MOST_G,
                                       .n_match = 2 + (int)(dice[2] % 9),
                                       .kv_tokens = 100,
                                       .n_lag = 1 + (int)(dice[3] % 2),
                                       .rate = w->rate[i],
                                       .probe = &w->probe[i],
                                       .forced = -1};
    }
}

/* What the tables say, asked once. */
struct prices {
    double target[MOST_CROWD * MOST_G + 8];           /* [rows] */
    double draft[2 * MOST_CROWD + 1][MOST_CROWD + 1]; /* [rows][sequences] */
    double earned[MOST_CROWD][2][MOST_G + 1];         /* [bid][source][g] */
};

static void ask_prices(const struct crowd *w, struct prices *p) {
    double kv = 100.0 * (w->n + w->n_other);
    for (int rows = 1; rows < MOST_CROWD * MOST_G + 8; rows++)
        p->target[rows] = draft_cost_predict(&w->costs.target, rows, kv);
    for (int rows = 1; rows <= 2 * MOST_CROWD; rows++)
        for (int n = 1; n <= MOST_CROWD; n++)
            p->draft[rows][n] = draft_cost_predict(&w->costs.draft, rows, 100.0 * n);
    for (int i = 0; i < w->n; i++) {
        for (int source = 0; source < 2; source++) {
            int idx = draft_rate_idx(source, w->bid[i].n_match);
            double all = 1, sum = 0;
            p->earned[i][source][0] = 0;
            for (int j = 0; j < MOST_G; j++) {
                all *= draft_rate_at(&w->bid[i].rate[idx], j);
                p->earned[i][source][j + 1] = sum += all;
            }
        }
    }
}

/* Tokens by ns of settings; -g means lookup. Written from the definition, not from the code. */
static double price(const struct crowd *w, const struct prices *p, const int *g) {
    double tokens = w->n + w->n_other;
    int rows = w->n + w->n_other, n_at[MOST_G] = {0}, lag = 0;
    for (int i = 0; i < w->n; i++) {
        tokens += p->earned[i][g[i] < 0][abs(g[i])];
        rows += abs(g[i]);
        for (int j = 0; j < g[i]; j++) n_at[j]++;
        if (g[i] > 0) lag += w->bid[i].n_lag;
    }
    double ns = p->target[rows];
    for (int j = 0; j < MOST_G && n_at[j] > 0; j++) ns += p->draft[j == 0 ? lag : n_at[j]][n_at[j]];
    return tokens / ns;
}

/* The best price of all settings, counted through like the digits of a number. */
static double brute(const struct crowd *w, const struct prices *p) {
    int g[MOST_CROWD], i = 0;
    double best = 0;
    for (int k = 0; k < w->n; k++) g[k] = -w->bid[k].max_lookup;
    while (i < w->n) {
        best = fmax(best, price(w, p, g));
        for (i = 0; i < w->n && ++g[i] > w->bid[i].max_model; i++) g[i] = -w->bid[i].max_lookup;
    }
    return best;
}

static void test_choice_of_many(void) {
    double worst = 1, sum = 0;
    int n_cases = 0, n_drafting = 0, n_lookup = 0;
    for (int i = 0; i < N_MACHINES; i++) {
        for (uint64_t seed = 1; seed <= 60; seed++) {
            struct crowd w;
            int chosen[MOST_CROWD], n = 1 + (int)(seed % MOST_CROWD);
            make_crowd(&w, machines[i], n, seed);
            struct prices p;
            ask_prices(&w, &p);
            double best = brute(&w, &p);
            for (int k = 0; k < n; k++) w.probe[k].wait = 1000; /* off: no probes, no staying */
            draft_choose(&w.costs, w.bid, n, w.n_other, 100.0 * w.n_other, w.max_rows);
            for (int k = 0; k < n; k++) {
                const struct draft_bid *b = &w.bid[k];
                chosen[k] = b->source == DRAFT_BY_LOOKUP ? -b->n_draft : b->n_draft;
                n_drafting += b->n_draft > 0;
                n_lookup += chosen[k] < 0;
            }
            double got = price(&w, &p, chosen) / best;
            sum += got;
            n_cases++;
            worst = fmin(worst, got);
            if (n == 1 && got < 1 - 1e-6)
                fail_msg("%s seed %d: one sequence must be exact, %f", machines[i]->name, (int)seed,
                         got);
        }
    }
    fprintf(stderr,
            "choice against brute force: mean %.4f, worst %.4f of %d; %d drafting, %d by lookup\n",
            sum / n_cases, worst, n_cases, n_drafting, n_lookup);
    assert_true(worst >= 0.97 && sum / n_cases >= 0.998);
    assert_true(n_drafting > 100 && n_lookup > 20);
}

/* Limits and fixed settings. */
static void test_choice_limits(void) {
    struct crowd w;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        for (int max_rows = -1; max_rows < 30; max_rows += 3) {
            int n = 1 + (int)(seed % 9), sum = 0;
            make_crowd(&w, &gpu, n, seed);
            for (int i = 0; i < n; i++) w.bid[i].forced = i % 3 == 0 ? (int)(seed % 17) : -1;
            draft_choose(&w.costs, w.bid, n, w.n_other, 100, max_rows);
            for (int i = 0; i < n; i++) {
                const struct draft_bid *b = &w.bid[i];
                int most = b->source == DRAFT_BY_LOOKUP ? b->max_lookup : b->max_model;
                assert_true(b->n_draft >= 0 && b->n_draft <= most);
                if (b->forced < 0) continue;
                assert_false(b->is_probe);
                if (max_rows < 30 - 3) continue;
                assert_int_equal(b->source == DRAFT_BY_LOOKUP, b->max_lookup > 0 && b->forced > 0);
                assert_int_equal(b->n_draft, b->forced < most ? b->forced : most);
            }
            for (int i = 0; i < n; i++) sum += w.bid[i].n_draft;
            assert_true(sum <= (max_rows > 0 ? max_rows : 0));
        }
    }
    draft_choose(&w.costs, w.bid, 0, 3, 100, 10);
    /* Nothing known yet: the model drafts two or three. */
    struct learned s;
    learned_init(&s);
    make_crowd(&w, &gpu, 1, 1);
    draft_rates_init(w.rate[0], s.prior);
    w.bid[0].max_model = 8;
    w.bid[0].max_lookup = 0;
    draft_choose(&s.costs, w.bid, 1, 0, 0, 100);
    assert_true(w.bid[0].n_draft >= 2 && w.bid[0].n_draft <= 3);
}

static void test_choice_is_quick(void) {
    struct crowd w;
    static const int sizes[] = {1, 8, 32, DRAFT_MAX_BIDS};
    for (int k = 0; k < 4; k++) {
        int n = sizes[k], rounds = 8000 / n;
        double sum = 0, least = 1e300;
        for (uint64_t seed = 1; seed <= 5; seed++) {
            make_crowd(&w, seed % 2 ? &gpu : &cpu_mild, n, seed);
            for (int i = 0; i < n; i++) w.bid[i].max_model *= 2;
            clock_t start = clock(); /* CPU time: others may be busy */
            for (int i = 0; i < rounds; i++)
                draft_choose(&w.costs, w.bid, n, w.n_other, 100.0 * w.n_other, w.max_rows);
            double us = (double)(clock() - start) * 1e6 / CLOCKS_PER_SEC / rounds;
            sum += us / 5;
            least = fmin(least, us);
        }
        fprintf(stderr, "choice of %3d bids: %.1f us on average, least %.1f\n", n, sum, least);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        assert_true(n > 32 || least < 1000);
#else
        assert_true(n > 32 || least < 60); /* 10 measured; a slow machine may take longer */
#endif
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
    {"choice_of_many", TEST_QUICK, 20000, test_choice_of_many},
    {"choice_limits", TEST_QUICK, 20000, test_choice_limits},
    {"choice_is_quick", TEST_QUICK, 20000, test_choice_is_quick},
    {0},
};
