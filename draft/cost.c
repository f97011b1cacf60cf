/* What passes cost, learned from passes.
 *
 * Each row count of the grid has a line over the context: a level and a slope. All of them are in
 * units of a machine whose `speed` drifts, by a factor of two within seconds where others share it.
 * A time says something of the sum of the two logs, and which of them moved is a matter of how well
 * either is known: so levels and speed are one state with a covariance (a Kalman filter). A level
 * that is new takes what it sees, one that is known leaves it to speed, which moves the levels that
 * were not seen with it. (Running means beside a speed of their own pushed each other away: while
 * speed and the levels in use drifted apart, the others went with speed, and nine rows were
 * believed to cost twice as much beside five as they did.)
 *
 * What a row count costs is what its passes cost one after another. A pass behind one of another
 * row count finds caches and clocks as that one left them: on a CPU two rows behind four cost a
 * fifth more than behind two, nine behind one a tenth less. So lengths that change each round would
 * look alike, and none worth keeping to. The first dozen passes behind a prompt cost up to 1.7
 * times as much. A level that met these first would take them for its own and leave it to speed
 * that they end, the next new level take the more for it: three rows were believed to cost 2.9
 * times one, at 1.4. Both kinds of passes are noise to the filter, the more the nearer.
 *
 * Times err upwards: a pass is held up, by twice or tenfold, in bad phases every other one is. None
 * is too short. So what lies above counts a little, and what lies far below is believed: the table
 * was too sure of itself.
 *
 * A slope comes from sums that remember hundreds of passes, because a context grows slowly, and is
 * drawn to a slope alpha + beta * (rows - 1) shared by all points: attention reads K and V once a
 * sequence (alpha, all of it on a GPU) and multiplies once a row (beta, most of it on a CPU). These
 * two are drawn to what bytes say, alpha half of itself either way: without it, five rows that were
 * seen on an empty context alone cost no more than one row behind 6,400 positions.
 * Slopes are never negative.
 *
 * A curve is the points at one context, made monotone in rows by pooling neighbours that disagree
 * (isotonic regression weighted by evidence), then filled: linear between known points, beyond the
 * last with the growth seen so far. Where nothing tells, guesses are low on either side: what is
 * thought cheap is tried, and then known; what is thought dear would never be. */
#include "draft/depth_private.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Standard deviations of logs. A pass: */
#define PASS_NOISE 0.05
#define SPEED_STEP 0.02  /* of speed, from pass to pass */
#define LEVEL_STEP 0.001 /* of each level */
#define NEW_LEVEL 0.5    /* of a level that is guessed from its neighbours */
#define TURN_NOISE 0.3   /* of a pass, more, behind one of another row count */
#define PROMPT_NOISE 1.0 /* and behind a prompt */
#define SPEED_KEEP (1 - 1.0 / 5000)
/* In standard deviations of what was predicted: */
#define MOST_ABOVE 1.35 /* what a time above counts */
#define FAR_BELOW 3.0   /* beyond this the table was too sure */
#define SLOPE_KEEP (1 - 1.0 / 512)
#define SLOPE_CUT 1.3   /* of the level, what slopes take of a time */
#define YOUNG 8         /* passes: a level that is wrong, not the machine */
#define KV_SHARE 0.12   /* that a level's context moves to the newest pass's */
#define GUESS_ROW 0.12  /* growth a row, of one row's time, where nothing is known */
#define GUESS_DOWN 0.5  /* the same below the first known point */
#define LAG_STEP 0.25   /* of a long way's row, towards the newest pass */
#define SLOPE_SPAN 2000 /* positions over which a time might double, before anything is known */

enum {
    SPEED = DRAFT_COST_ROWS, /* its place in the covariance */
    TURN_PASSES = 3,         /* of one row count, until they cost what they do */
    PROMPT_PASSES = 12,
    STALE = 64,       /* passes, after which a row count is seen again */
    WELL_KNOWN = 120, /* passes of it, after which it may stay away for longer */
    LAG_LEAST = 64,   /* rows of a draft's long way of which a pass tells what a row costs */
};

static const int grid[DRAFT_COST_ROWS] = {1,  2,  3,  4,  5,  6,  7,  8,   9,   10,  12,  14,  16,
                                          20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024};

void draft_cost_init(struct draft_cost *c, double kv_share) {
    memset(c, 0, sizeof *c);
    c->speed = 1;
    c->kv_share = kv_share;
}

/* The last grid index whose rows are <= n_rows. */
static int below(double n_rows) {
    if (n_rows < 10) return n_rows < 1 ? 0 : (int)n_rows - 1;
    int i = 9;
    while (i + 1 < DRAFT_COST_ROWS && grid[i + 1] <= n_rows) i++;
    return i;
}

static int nearest(int n_rows) {
    int i = below(n_rows);
    return i + 1 < DRAFT_COST_ROWS && grid[i + 1] - n_rows < n_rows - grid[i] ? i + 1 : i;
}

/* ---- Slopes ---- */

/* One point's evidence in units of its own level: weight and slope times weight. The sums are of
 * times as they were, since `speed` takes what a growing context adds for its own; over hundreds of
 * passes contexts fall as well as grow. */
static void evidence(const struct draft_cost_point *p, double *weight, double *pull) {
    *weight = *pull = 0;
    if (p->slow_n < 2 || p->slow_ns <= 0) return;
    double kv = p->slow_kv / p->slow_n, ns = p->slow_ns / p->slow_n;
    double spread = p->slow_kv2 - kv * p->slow_kv;
    if (spread <= 0) return;
    double slope = (p->slow_kv_ns - kv * p->slow_ns) / spread;
    double here = ns + slope * (p->kv - kv); /* their line where the level stands */
    if (here < 0.05 * ns) here = 0.05 * ns;
    *weight = spread / (p->ns * p->ns);
    *pull = *weight * slope * p->ns / here;
}

struct shared_slope {
    double alpha, beta;
};

static struct shared_slope fit_shared(const struct draft_cost *c) {
    double w0 = 0, w1 = 0, w2 = 0, p0 = 0, p1 = 0;
    const struct draft_cost_point *first = NULL; /* that tells of slopes, or else that is known */
    for (int i = 0; i < DRAFT_COST_ROWS; i++) {
        double w, p, more = grid[i] - 1;
        evidence(&c->at[i], &w, &p);
        if (c->at[i].ns > 0 && (!first || (w > 0 && w0 == 0))) first = &c->at[i];
        w0 += w;
        w1 += w * more;
        w2 += w * more * more;
        p0 += p;
        p1 += p * more;
    }
    if (!first) return (struct shared_slope){0, 0};
    double ridge = PASS_NOISE * fmax(SLOPE_SPAN, c->kv_share > 0 ? 2 / c->kv_share : 0) / first->ns;
    double alpha = c->kv_share * first->ns / (1 + c->kv_share * first->kv),
           beta = GUESS_ROW * alpha;
    w0 += ridge * ridge;
    w2 += ridge * ridge;
    p0 += ridge * ridge * alpha;
    p1 += ridge * ridge * beta;
    double det = w0 * w2 - w1 * w1; /* > 0: Cauchy and Schwarz, and the ridge */
    struct shared_slope s = {(p0 * w2 - p1 * w1) / det, (p1 * w0 - p0 * w1) / det};
    if (s.alpha < 0) s = (struct shared_slope){0, p1 / w2};
    if (s.beta < 0) s = (struct shared_slope){p0 / w0, 0};
    if (s.alpha < 0) s.alpha = 0;
    return s;
}

static double slope_of(const struct draft_cost *c, const struct shared_slope *shared, int i) {
    const struct draft_cost_point *p = &c->at[i];
    double prior = shared->alpha + shared->beta * (grid[i] - 1), weight, pull;
    if (prior <= 0) return 0;
    evidence(p, &weight, &pull);
    /* The shared slope may be off by a third. */
    double trust = PASS_NOISE * PASS_NOISE / (prior * prior / 9);
    double s = (pull + trust * prior) / (weight + trust);
    double most = p->kv > 0 ? 0.95 * p->ns / p->kv : s; /* no negative time at context 0 */
    return s < 0 ? 0 : s > most ? most : s;
}

/* ---- Curves ---- */

void draft__curve_guess(double ns_of_one_row, struct draft__curve *out) {
    for (int i = 0; i < DRAFT_COST_ROWS; i++)
        out->ns[i] = ns_of_one_row * (1 + GUESS_ROW * (grid[i] - 1));
}

/* Pool neighbours among v[0..n) that fall: each block gets its weighted mean. */
static void make_monotone(double *v, const double *weight, int n) {
    double mean[DRAFT_COST_ROWS], sum[DRAFT_COST_ROWS];
    int length[DRAFT_COST_ROWS], n_blocks = 0;
    for (int i = 0; i < n; i++) {
        mean[n_blocks] = v[i];
        sum[n_blocks] = weight[i];
        length[n_blocks++] = 1;
        while (n_blocks > 1 && mean[n_blocks - 2] > mean[n_blocks - 1]) {
            int a = n_blocks - 2, b = n_blocks - 1;
            mean[a] = (mean[a] * sum[a] + mean[b] * sum[b]) / (sum[a] + sum[b]);
            sum[a] += sum[b];
            length[a] += length[b];
            n_blocks--;
        }
    }
    for (int b = 0, i = 0; b < n_blocks; b++)
        for (int k = 0; k < length[b]; k++) v[i++] = mean[b];
}

/* Growth a row beyond the last known point, as a share of its time: what was seen from the first to
 * the last, at the last one's context. It must not depend on the context asked for, or the curve
 * would not be monotone in it. */
static double growth_beyond(const struct draft_cost *c, int first, int last, double first_slope) {
    const struct draft_cost_point *a = &c->at[first], *b = &c->at[last];
    if (first == last) return GUESS_ROW / (1 + GUESS_ROW * (grid[last] - 1));
    double from = a->ns + first_slope * (b->kv - a->kv);
    double growth = (b->ns - from) / (grid[last] - grid[first]) / b->ns;
    double most = 1.0 / grid[last];
    return growth < 0 ? 0 : growth > most ? most : growth;
}

void draft__curve_fit(const struct draft_cost *c, double kv_tokens, struct draft__curve *out) {
    int known[DRAFT_COST_ROWS], n = 0;
    double v[DRAFT_COST_ROWS], weight[DRAFT_COST_ROWS], first_slope = 0;
    struct shared_slope shared = fit_shared(c);
    for (int i = 0; i < DRAFT_COST_ROWS; i++) {
        const struct draft_cost_point *p = &c->at[i];
        if (p->ns <= 0) continue;
        double slope = slope_of(c, &shared, i);
        if (n == 0) first_slope = slope;
        v[n] = c->speed * (p->ns + slope * (kv_tokens - p->kv));
        weight[n] = 1 / c->cov[i][i];
        known[n++] = i;
    }
    memset(out, 0, sizeof *out);
    if (n == 0) return;
    make_monotone(v, weight, n);
    int first = known[0], last = known[n - 1];
    for (int i = 0; i < first; i++)
        out->ns[i] = v[0] * (1 + GUESS_DOWN * (grid[i] - 1)) / (1 + GUESS_DOWN * (grid[first] - 1));
    for (int k = 0; k < n; k++) {
        out->ns[known[k]] = v[k];
        if (k + 1 == n) break;
        int a = known[k], b = known[k + 1];
        for (int i = a + 1; i < b; i++)
            out->ns[i] =
                v[k] + (v[k + 1] - v[k]) * (grid[i] - grid[a]) / (double)(grid[b] - grid[a]);
    }
    double growth = growth_beyond(c, first, last, first_slope);
    for (int i = last + 1; i < DRAFT_COST_ROWS; i++)
        out->ns[i] = v[n - 1] * (1 + growth * (grid[i] - grid[last]));
}

double draft__curve_at(const struct draft__curve *v, double n_rows) {
    if (n_rows <= 1) return v->ns[0];
    int i = below(n_rows);
    if (i == DRAFT_COST_ROWS - 1) return v->ns[i] * n_rows / grid[i];
    double part = (n_rows - grid[i]) / (grid[i + 1] - grid[i]);
    return v->ns[i] + (v->ns[i + 1] - v->ns[i]) * part;
}

/* ---- Observation ---- */

/* A time of n_rows as one of grid row i, by the proportion predicted between the two. */
static double to_grid(const struct draft_cost *c, int i, int n_rows, double kv, double ns) {
    if (grid[i] == n_rows) return ns;
    struct draft__curve v;
    draft__curve_fit(c, kv, &v);
    if (v.ns[0] <= 0) draft__curve_guess(1, &v);
    return ns * v.ns[i] / draft__curve_at(&v, n_rows);
}

/* Variance of a pass of row i for what ran before it. A level that is new cannot wait for better
 * passes. */
static double unsettled(struct draft_cost *c, int i) {
    double turn = 0, prompt = PROMPT_NOISE * c->n_cold / PROMPT_PASSES;
    if (i != c->newest) c->n_turned = TURN_PASSES;
    if (c->at[i].slow_n >= YOUNG) turn = TURN_NOISE * c->n_turned / TURN_PASSES;
    c->newest = i;
    c->n_turned -= c->n_turned > 0;
    c->n_cold -= c->n_cold > 0;
    return turn * turn + prompt * prompt;
}

/* The log of a time of row i lies `off` from the prediction. */
static void follow(struct draft_cost *c, int i, double off) {
    double with[SPEED + 1], gain[SPEED + 1]; /* covariance with the prediction */
    c->cov[SPEED][SPEED] += SPEED_STEP * SPEED_STEP;
    for (int j = 0; j < SPEED; j++)
        if (c->at[j].ns > 0) c->cov[j][j] += LEVEL_STEP * LEVEL_STEP;
    double spread =
        c->cov[i][i] + 2 * c->cov[i][SPEED] + c->cov[SPEED][SPEED] + PASS_NOISE * PASS_NOISE;
    if (off > MOST_ABOVE * sqrt(spread)) off = MOST_ABOVE * sqrt(spread);
    if (off < -FAR_BELOW * sqrt(spread)) {
        double more = off * off / (FAR_BELOW * FAR_BELOW) - spread;
        double speed = c->cov[SPEED][SPEED], both = c->cov[i][SPEED];
        double level = c->cov[i][i] - both * both / speed; /* were speed known */
        double share = c->at[i].slow_n < YOUNG ? 1 : level / (level + speed);
        c->cov[i][i] += more * share;
        c->cov[SPEED][SPEED] += more * (1 - share);
        spread += more;
    }
    spread += unsettled(c, i);
    for (int j = 0; j <= SPEED; j++) {
        with[j] = c->cov[j][i] + c->cov[j][SPEED];
        gain[j] = with[j] / spread;
    }
    for (int j = 0; j < SPEED; j++)
        if (c->at[j].ns > 0) c->at[j].ns *= exp(gain[j] * off);
    c->speed *= exp(gain[SPEED] * off);
    for (int j = 0; j <= SPEED; j++)
        for (int k = 0; k <= SPEED; k++) c->cov[j][k] -= gain[j] * with[k];
}

/* All levels and speed against each other cannot be seen: speed goes back to 1, slowly, or both
 * would wander without end. */
static void settle(struct draft_cost *c) {
    c->speed = pow(c->speed, SPEED_KEEP);
    for (int j = 0; j <= SPEED; j++) {
        c->cov[j][SPEED] *= SPEED_KEEP;
        c->cov[SPEED][j] *= SPEED_KEEP;
    }
}

/* A level that was never seen: what its neighbours say, or else its first time. */
static void begin(struct draft_cost *c, int i, double kv, double ns) {
    struct draft__curve v;
    draft__curve_fit(c, kv, &v);
    c->at[i].kv = kv;
    c->at[i].ns = (v.ns[i] > 0 ? v.ns[i] : ns) / c->speed;
    c->cov[i][i] = NEW_LEVEL * NEW_LEVEL;
}

static void remember(struct draft_cost_point *p, double kv, double ns) {
    p->slow_n = p->slow_n * SLOPE_KEEP + 1;
    p->slow_kv = p->slow_kv * SLOPE_KEEP + kv;
    p->slow_ns = p->slow_ns * SLOPE_KEEP + ns;
    p->slow_kv2 = p->slow_kv2 * SLOPE_KEEP + kv * kv;
    p->slow_kv_ns = p->slow_kv_ns * SLOPE_KEEP + kv * ns;
}

void draft_cost_observe(struct draft_cost *c, int n_rows, double kv_tokens, double ns) {
    if (n_rows < 1 || !(ns >= 1) || !isfinite(ns) || !(kv_tokens >= 0) || !isfinite(kv_tokens))
        return;
    int i = nearest(n_rows);
    struct draft_cost_point *p = &c->at[i];
    ns = to_grid(c, i, n_rows, kv_tokens, ns);
    p->last = ++c->n_observed;
    if (p->ns <= 0) begin(c, i, kv_tokens, ns);
    struct shared_slope shared = fit_shared(c);
    double slope = slope_of(c, &shared, i), step = KV_SHARE * (kv_tokens - p->kv);
    if (p->ns + slope * step > p->ns / 2) {
        p->ns += slope * step;
        p->kv += step;
    }
    double ahead = slope * (kv_tokens - p->kv); /* >= -0.95 ns: slope_of sees to it */
    double was = p->ns, level = was + ahead;
    settle(c);
    follow(c, i, log(ns / (c->speed * level)));
    level *= p->ns / was;
    level *= c->speed;
    if (ns > SLOPE_CUT * level) ns = SLOPE_CUT * level;
    if (ns < level / SLOPE_CUT) ns = level / SLOPE_CUT;
    remember(p, kv_tokens, ns);
}

void draft_costs_observe_lag(struct draft_costs *c, int n_rows, double ns) {
    if (n_rows < LAG_LEAST || !(ns >= 1) || !isfinite(ns)) return;
    c->lag_row_ns += (c->lag_row_ns > 0 ? LAG_STEP : 1) * (ns / n_rows - c->lag_row_ns);
}

void draft_cost_disturb(struct draft_cost *c) {
    c->n_cold = PROMPT_PASSES;
}

double draft_cost_predict(const struct draft_cost *c, int n_rows, double kv_tokens) {
    struct draft__curve v;
    draft__curve_fit(c, kv_tokens, &v);
    return draft__curve_at(&v, n_rows);
}

bool draft_cost_known(const struct draft_cost *c, int n_rows, double kv_tokens) {
    int i = nearest(n_rows);
    const struct draft_cost_point *p = &c->at[i];
    double near = p->kv / 2 > 512 ? p->kv / 2 : 512;
    return p->ns > 0 && abs(grid[i] - n_rows) <= n_rows / 8 && fabs(kv_tokens - p->kv) <= near;
}

bool draft__cost_stale(const struct draft_cost *c, int n_rows) {
    const struct draft_cost_point *p = &c->at[nearest(n_rows)];
    double most = p->slow_n > WELL_KNOWN ? STALE + 2 * (p->slow_n - WELL_KNOWN) : STALE;
    return p->ns <= 0 || c->n_observed - p->last > most;
}
