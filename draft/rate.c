/* How often draft tokens are accepted, by place.
 *
 * The model's counts decay with each round in which it proposed: what was seen 25 rounds ago counts
 * a third. An estimate is drawn to a prior as if that were five rounds more: for the first place
 * the rate that the sequence began with (the engine's running one), for each later place the
 * estimate of the place before it, moved by what the prior says lies between the two. So one round
 * tells about all places, a place that was not reached lately follows its neighbours instead of its
 * past, and a few unlucky rounds swing nothing.
 *
 * Lookup is right many times over or not at all: where a text repeats itself, a whole proposal is
 * right, and a rate between the two tells of neither. Its proposals are taken for a mixture of
 * levels, each with one chance for all of its tokens, and what is learned is how often each level
 * comes. A round's outcome says of which level it likely was (Bayes' rule over the shares so far),
 * and the shares move towards that, a sixth of the way in a request's first round, a twelfth later
 * on: a step of the online expectation-maximisation of a mixture (Titterington 1984). After a few
 * tokens that were right the level is all but known, so the chances hardly fall with the place, and
 * two or three whole proposals outweigh what requests of another kind taught. */
#include "draft/depth_private.h"

#include <math.h>
#include <string.h>

#include "base/err.h"

#define PRIOR_ROUNDS 5.0f
#define FIRST_ROUNDS 15.0f /* that what is usual counts more, before anything was seen */

#define USUAL_TOKENS 2.0f /* of a round */
#define KIND_SPREAD 0.2
#define LEVEL_KEEP 0.92
#define LEAST_SHARE 0.002 /* no kind of proposal is ever ruled out */

/* Chance of each token of a proposal of a level. */
static const double level[DRAFT_N_LEVELS] = {0.03, 0.2, 0.4, 0.6, 0.75, 0.87, 0.94, 0.98, 0.997};

static double clamp(double x, double low, double high) {
    return x < low ? low : x > high ? high : x;
}

int draft_rate_idx(enum draft_source source, int n_match) {
    if (source == DRAFT_BY_MODEL) return DRAFT_BY_MODEL;
    return DRAFT_BY_LOOKUP + (n_match < 3    ? 0
                              : n_match < 4  ? 1
                              : n_match < 8  ? 2
                              : n_match < 16 ? 3
                                             : 4);
}

static void init_flat(struct draft_rate *r, float rate) {
    memset(r, 0, sizeof *r);
    r->tried[0] = FIRST_ROUNDS;
    r->accepted[0] = rate * FIRST_ROUNDS;
    r->n_own = PRIOR_ROUNDS;
    r->n_tokens = USUAL_TOKENS * PRIOR_ROUNDS;
    for (int i = 0; i < KERN_MAX_DRAFT; i++) r->prior[i] = rate;
}

/* Of two kinds, with that share of the better one: levels near 1, and levels near 0. */
static void init_levels(struct draft_rate *r, double good) {
    double bad_sum = 0, good_sum = 0;
    memset(r, 0, sizeof *r);
    r->by_level = true;
    r->n_rounds = FIRST_ROUNDS;
    for (int k = 0; k < DRAFT_N_LEVELS; k++) {
        bad_sum += exp(-level[k] / KIND_SPREAD);
        good_sum += exp(-(1 - level[k]) / KIND_SPREAD);
    }
    for (int k = 0; k < DRAFT_N_LEVELS; k++)
        r->share[k] = (float)((1 - good) * exp(-level[k] / KIND_SPREAD) / bad_sum +
                              good * exp(-(1 - level[k]) / KIND_SPREAD) / good_sum);
}

/* A proposal of which n_accepted tokens were right and, if `ended`, the next one wrong: of which
 * level was it likely? Shares move towards that. */
static void update_levels(struct draft_rate *r, double keep, int n_accepted, bool ended) {
    double likely[DRAFT_N_LEVELS], sum = 0, most = 1 / (1 - keep);
    for (int k = 0; k < DRAFT_N_LEVELS; k++) {
        likely[k] = r->share[k] > LEAST_SHARE ? r->share[k] : LEAST_SHARE;
        for (int i = 0; i < n_accepted; i++) likely[k] *= level[k];
        if (ended) likely[k] *= 1 - level[k];
        sum += likely[k];
    }
    double n = r->n_rounds + 1 < most ? r->n_rounds + 1 : most;
    for (int k = 0; k < DRAFT_N_LEVELS; k++)
        r->share[k] = (float)(r->share[k] + (likely[k] / sum - r->share[k]) / n);
    r->n_rounds = (float)n;
}

/* The estimate of place i, `before` being that of the place before it. */
static double estimate(const struct draft_rate *r, int i, double before) {
    double prior = r->prior[i];
    if (i > 0) prior = clamp(before + prior - (double)r->prior[i - 1], 0.01, 0.99);
    return clamp((r->accepted[i] + PRIOR_ROUNDS * prior) / (r->tried[i] + PRIOR_ROUNDS), 0, 1);
}

void draft_rate_init(struct draft_rate *r, const struct draft_rate *prior) {
    if (!prior) {
        init_flat(r, 0.6f);
        return;
    }
    if (prior->by_level) {
        *r = *prior;
        if (r->n_rounds > PRIOR_ROUNDS) r->n_rounds = PRIOR_ROUNDS;
        return;
    }
    memset(r, 0, sizeof *r);
    float part = PRIOR_ROUNDS * USUAL_TOKENS / fmaxf(prior->n_tokens, PRIOR_ROUNDS * USUAL_TOKENS);
    r->n_own = part * prior->n_own;
    r->n_tokens = part * prior->n_tokens;
    double before = 0;
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        before = estimate(prior, i, before);
        r->prior[i] = (float)before;
    }
}

void draft_rates_init(struct draft_rate *rate, const struct draft_rate *prior) {
    static const float usual[DRAFT_N_SOURCES] = {0.6f, 0.2f, 0.4f, 0.65f, 0.8f, 0.95f};
    for (int i = 0; i < DRAFT_N_SOURCES; i++) {
        if (prior) draft_rate_init(&rate[i], &prior[i]);
        else if (i < DRAFT_BY_LOOKUP) init_flat(&rate[i], usual[i]);
        else init_levels(&rate[i], usual[i]);
    }
}

void draft__rate_update(struct draft_rate *r, double keep, int n_drafted, int n_accepted) {
    ASSERT(n_accepted >= 0 && n_accepted <= n_drafted && n_drafted <= KERN_MAX_DRAFT);
    if (n_drafted == 0) return;
    if (r->by_level) {
        update_levels(r, keep, n_accepted, n_accepted < n_drafted);
        return;
    }
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        r->accepted[i] = (float)(r->accepted[i] * keep + (i < n_accepted));
        r->tried[i] = (float)(r->tried[i] * keep + (i <= n_accepted && i < n_drafted));
    }
}

void draft_rate_update(struct draft_rate *r, int n_drafted, int n_accepted) {
    draft__rate_update(r, r->by_level ? LEVEL_KEEP : DRAFT__KEEP, n_drafted, n_accepted);
}

void draft__rate_count(struct draft_rate *r, double keep, bool own, int n_tokens) {
    r->n_own = (float)(r->n_own * keep + own);
    r->n_tokens = (float)(r->n_tokens * keep + n_tokens);
}

double draft__rate_rounds(const struct draft_rate *r, int n_tokens) {
    double rounds = r->n_tokens > 0 ? n_tokens * (double)r->n_own / (double)r->n_tokens : n_tokens;
    return rounds > 1 ? rounds : 1;
}

void draft__rate_fade(struct draft_rate *r, double n_tried) {
    if (r->tried[0] <= n_tried) return;
    float factor = (float)(n_tried / r->tried[0]);
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        r->accepted[i] *= factor;
        r->tried[i] *= factor;
    }
}

void draft__rate_chances(const struct draft_rate *r, int n, double *chance) {
    double rate = 0, all = 1, part[DRAFT_N_LEVELS];
    for (int k = 0; k < DRAFT_N_LEVELS; k++) part[k] = r->share[k];
    for (int i = 0; i < n; i++) {
        if (r->by_level) {
            all = 0;
            for (int k = 0; k < DRAFT_N_LEVELS; k++) all += part[k] *= level[k];
        } else {
            rate = estimate(r, i, rate);
            all *= rate;
        }
        chance[i] = all;
    }
}

double draft_rate_at(const struct draft_rate *r, int place) {
    ASSERT(place >= 0 && place < KERN_MAX_DRAFT);
    double chance[KERN_MAX_DRAFT];
    draft__rate_chances(r, place + 1, chance);
    if (place == 0) return chance[0];
    return chance[place - 1] > 0 ? chance[place] / chance[place - 1] : 0;
}
