/* One choice of draft lengths for several sequences, on machines whose times are known exactly.
 * Goal: what is chosen earns what the best of all settings would, tried one by one; limits and
 * fixed settings are kept; it is quick. */
#include "tests/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "draft/depth.h"
#include "tests/draft_machines.h"

enum { MOST_G = 4, MOST_CROWD = 4 };

struct crowd {
    struct draft_costs costs;
    struct draft_bid bid[DRAFT_MAX_BIDS];
    struct draft_rate rate[DRAFT_MAX_BIDS][DRAFT_N_SOURCES];
    struct draft_probe probe[DRAFT_MAX_BIDS];
    int n, n_other, max_rows;
};

/* A cost table that knows the machine exactly. */
static void know(struct draft_costs *c, const struct draft_machine *m, int n_seqs, double kv) {
    draft_cost_init(&c->target, 0);
    draft_cost_init(&c->draft, 0);
    c->fixed_ns = c->lag_row_ns = 0;
    for (int k = 0; k < 3; k++) {
        for (int rows = 1; rows <= 128; rows++)
            draft_cost_observe(&c->target, rows, kv, draft_machine_target_ns(m, rows, n_seqs, kv));
        for (int rows = 1; k == 2 && rows <= 12; rows++) /* none is stale */
            draft_cost_observe(&c->target, rows, kv, draft_machine_target_ns(m, rows, n_seqs, kv));
        for (int rows = 1; rows <= 64; rows++)
            draft_cost_observe(&c->draft, rows, kv, draft_machine_draft_ns(m, rows, kv));
    }
}

static void make_crowd(struct crowd *w, const struct draft_machine *m, int n, uint64_t seed) {
    static const double level[] = {0.9, 0.65, 0.3, 0.05};
    uint32_t idx = 0;
    memset(w, 0, sizeof *w);
    w->n = n;
    w->n_other = (int)(rng_u32(seed, 0, RNG_TEST, idx++) % 3);
    w->max_rows = 1000;
    know(&w->costs, m, n + w->n_other, 100.0 * (n + w->n_other));
    for (int i = 0; i < n; i++) {
        draft_rates_init(w->rate[i], NULL);
        w->rate[i][DRAFT_BY_LOOKUP].proven = true;
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
            make_crowd(&w, &draft_machines[i], n, seed);
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
                fail_msg("%s seed %d: one sequence must be exact, %f", draft_machines[i].name,
                         (int)seed, got);
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
            make_crowd(&w, &draft_machines[GPU], n, seed);
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
    struct draft_costs none = {0};
    struct draft_rate prior[DRAFT_N_SOURCES];
    draft_cost_init(&none.target, 0);
    draft_cost_init(&none.draft, 0);
    draft_rates_init(prior, NULL);
    make_crowd(&w, &draft_machines[GPU], 1, 1);
    draft_rates_init(w.rate[0], prior);
    w.bid[0].max_model = 8;
    w.bid[0].max_lookup = 0;
    draft_choose(&none, w.bid, 1, 0, 0, 100);
    assert_true(w.bid[0].n_draft >= 2 && w.bid[0].n_draft <= 3);
}

static void test_choice_is_quick(void) {
    struct crowd w;
    static const int sizes[] = {1, 8, 32, DRAFT_MAX_BIDS};
    for (int k = 0; k < 4; k++) {
        int n = sizes[k], rounds = 8000 / n;
        double sum = 0, least = 1e300;
        for (uint64_t seed = 1; seed <= 5; seed++) {
            make_crowd(&w, seed % 2 ? &draft_machines[GPU] : &draft_machines[CPU_MILD], n, seed);
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

/* What is 3,000 rows behind pays for it in rounds to come: too much where a row is priced as a
 * generated one, little where long ways were seen to be cheap; and too much for a few tokens. */
static int length_behind(int n_lag, int n_left, double lag_row_ns) {
    static struct crowd w;
    make_crowd(&w, &draft_machines[CPU_MILD], 1, 3);
    w.costs.lag_row_ns = lag_row_ns;
    for (int j = 0; j < KERN_MAX_DRAFT; j++) w.rate[0][DRAFT_BY_MODEL].prior[j] = .85f;
    w.bid[0].max_model = MOST_G;
    w.bid[0].max_lookup = 0;
    w.bid[0].n_lag = n_lag;
    w.bid[0].n_left = n_left;
    w.bid[0].probe = NULL;
    draft_choose(&w.costs, w.bid, 1, 0, 0, 16);
    return w.bid[0].n_draft;
}

static void test_choice_long_way(void) {
    double cheap_ns = draft_machine_draft_ns(&draft_machines[CPU_MILD], 1, 0) / 80;
    assert_true(length_behind(1, 256, cheap_ns) > 0);
    assert_int_equal(length_behind(3000, 256, 0), 0);
    assert_true(length_behind(3000, 256, cheap_ns) > 0);
    assert_int_equal(length_behind(3000, 8, cheap_ns), 0);
}

/* Lookup that was never right at length in this request offers two tokens, one that was or that a
 * setting asks for all it has. */
static void test_choice_unproven_lookup(void) {
    static struct crowd w;
    for (int proven = 0; proven < 2; proven++)
        for (int forced = -1; forced <= MOST_G; forced += MOST_G + 1) {
            make_crowd(&w, &draft_machines[GPU], 1, 5);
            draft_rates_init(w.rate[0], NULL);
            w.rate[0][DRAFT_BY_LOOKUP].proven = proven;
            w.bid[0].n_match = 20;
            w.bid[0].max_model = 0;
            w.bid[0].max_lookup = MOST_G;
            w.bid[0].forced = forced;
            draft_choose(&w.costs, w.bid, 1, 0, 0, 16);
            assert_int_equal(w.bid[0].n_draft, proven || forced > 0 ? MOST_G : 2);
        }
    int32_t right[4] = {1, 2, 3, 4};
    draft_rates_init(w.rate[0], NULL);
    draft_learn(&w.bid[0], NULL, 0, 0, right, 4, right, 2);
    assert_false(w.rate[0][DRAFT_BY_LOOKUP].proven);
    draft_learn(&w.bid[0], NULL, 0, 0, right, 4, right, 3);
    assert_true(w.rate[0][DRAFT_BY_LOOKUP].proven);
}

const struct test tests[] = {
    {"choice_long_way", TEST_QUICK, 5000, test_choice_long_way},
    {"choice_unproven_lookup", TEST_QUICK, 5000, test_choice_unproven_lookup},
    {"choice_of_many", TEST_QUICK, 20000, test_choice_of_many},
    {"choice_limits", TEST_QUICK, 20000, test_choice_limits},
    {"choice_is_quick", TEST_QUICK, 20000, test_choice_is_quick},
    {0},
};
