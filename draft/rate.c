/* How often draft tokens are accepted, by place.
 *
 * Counts decay with each round in which the source proposed: what was seen 25 rounds ago counts a
 * third. An estimate is drawn to a prior as if that were five rounds more: for the first place the
 * rate that the sequence began with (the engine's running one), for each later place the estimate
 * of the place before it, moved by what the prior says lies between the two. So one round tells
 * about all places, a place that was not reached lately follows its neighbours instead of its past,
 * and a few unlucky rounds swing nothing. */
#include "draft/depth_private.h"

#include <string.h>

#include "base/err.h"

#define KEEP 0.96
#define PRIOR_ROUNDS 5.0
#define FIRST_ROUNDS 15.0f /* that what is usual counts more, before anything was seen */

static double clamp(double x, double low, double high) {
    return x < low ? low : x > high ? high : x;
}

int draft_rate_idx(enum draft_source source, int n_match) {
    if (source == DRAFT_BY_MODEL) return DRAFT_BY_MODEL;
    return DRAFT_BY_LOOKUP + (n_match < 3 ? 0 : n_match < 4 ? 1 : n_match < 8 ? 2 : 3);
}

static void init_flat(struct draft_rate *r, float rate) {
    memset(r, 0, sizeof *r);
    r->tried[0] = FIRST_ROUNDS;
    r->accepted[0] = rate * FIRST_ROUNDS;
    for (int i = 0; i < KERN_MAX_DRAFT; i++) r->prior[i] = rate;
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
    memset(r, 0, sizeof *r);
    double before = 0;
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        before = estimate(prior, i, before);
        r->prior[i] = (float)before;
    }
}

void draft_rates_init(struct draft_rate *rate, const struct draft_rate *prior) {
    static const float usual[DRAFT_N_SOURCES] = {0.6f, 0.3f, 0.45f, 0.65f, 0.85f};
    for (int i = 0; i < DRAFT_N_SOURCES; i++) {
        if (prior) draft_rate_init(&rate[i], &prior[i]);
        else init_flat(&rate[i], usual[i]);
    }
}

void draft__rate_update(struct draft_rate *r, double keep, int n_drafted, int n_accepted) {
    ASSERT(n_accepted >= 0 && n_accepted <= n_drafted && n_drafted <= KERN_MAX_DRAFT);
    if (n_drafted == 0) return;
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        r->accepted[i] = (float)(r->accepted[i] * keep + (i < n_accepted));
        r->tried[i] = (float)(r->tried[i] * keep + (i <= n_accepted && i < n_drafted));
    }
}

void draft_rate_update(struct draft_rate *r, int n_drafted, int n_accepted) {
    draft__rate_update(r, KEEP, n_drafted, n_accepted);
}

void draft__rate_fade(struct draft_rate *r, double n_tried) {
    if (r->tried[0] <= n_tried) return;
    float factor = (float)(n_tried / r->tried[0]);
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        r->accepted[i] *= factor;
        r->tried[i] *= factor;
    }
}

double draft_rate_at(const struct draft_rate *r, int place) {
    ASSERT(place >= 0 && place < KERN_MAX_DRAFT);
    double rate = 0;
    for (int i = 0; i <= place; i++) rate = estimate(r, i, rate);
    return rate;
}

void draft__rate_chances(const struct draft_rate *r, int n, double *chance) {
    double rate = 0, all = 1;
    for (int i = 0; i < n; i++) {
        rate = estimate(r, i, rate);
        all *= rate;
        chance[i] = all;
    }
}
