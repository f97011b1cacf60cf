/* What passes cost, learned from passes.
 *
 * Each row count of the grid has a line over the context. Its level is a running mean of the newest
 * two dozen passes, what is far off the prediction cut (the machine was busy elsewhere). Its slope
 * comes from sums that remember hundreds of passes, because a context grows slowly, and is drawn to
 * a slope alpha + beta * (rows
 * - 1) shared by all points: attention reads K and V once a sequence (alpha, all of it on a GPU)
 * and multiplies once a row (beta, most of it on a CPU). Slopes are never negative.
 *
 * `speed` stands for the machine: when times of any row count lie off by more than 8 % for long, it
 * moves, and with it the points that were not seen lately. Otherwise a machine that got faster
 * while nothing was drafted would leave drafting looking expensive for good. The dead band keeps
 * noise from making it wander.
 *
 * A curve is the points at one context, made monotone in rows by pooling neighbours that disagree
 * (isotonic regression weighted by evidence), then filled: linear between known points, beyond the
 * last with the growth seen so far. Where nothing tells, guesses are low on either side: what is
 * thought cheap is tried, and then known; what is thought dear would never be. */
#include "draft/depth_private.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LEVEL_KEEP (1 - 1.0 / 24)
#define SLOPE_KEEP (1 - 1.0 / 512)
#define NEW_POINT 3.0   /* weight below which a point is new */
#define CUT 1.3         /* of the prediction, for a point that is known */
#define CUT_NEW 3.0     /* for one that is new */
#define COLD 0.6        /* below this a new point's first times were of a cold machine */
#define DEAD_BAND 0.08  /* of `trend` */
#define GUESS_ROW 0.12  /* growth a row, of one row's time, where nothing is known */
#define GUESS_DOWN 0.5  /* the same below the first known point */
#define NOISE 0.05      /* of a time, for weighing slopes */
#define SLOPE_SPAN 2000 /* positions over which a time might double, before anything is known */

static const int grid[DRAFT_COST_ROWS] = {1,  2,  3,  4,  5,  6,  7,  8,   9,   10,  12,  14,  16,
                                          20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512, 1024};

void draft_cost_init(struct draft_cost *c) {
    memset(c, 0, sizeof *c);
    c->speed = 1;
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

/* One point's evidence in units of its own time: weight and slope times weight. */
static void evidence(const struct draft_cost_point *p, double *weight, double *pull) {
    *weight = *pull = 0;
    if (p->slow_n < 2 || p->slow_ns <= 0) return;
    double kv = p->slow_kv / p->slow_n, ns = p->slow_ns / p->slow_n;
    double spread = p->slow_kv2 - kv * p->slow_kv;
    if (spread <= 0) return;
    *weight = spread / (ns * ns);
    *pull = (p->slow_kv_ns - kv * p->slow_ns) / (ns * ns);
}

struct shared_slope {
    double alpha, beta;
};

static struct shared_slope fit_shared(const struct draft_cost *c) {
    double w0 = 0, w1 = 0, w2 = 0, p0 = 0, p1 = 0, ns = 0;
    for (int i = 0; i < DRAFT_COST_ROWS; i++) {
        double w, p, more = grid[i] - 1;
        evidence(&c->at[i], &w, &p);
        if (w > 0 && ns == 0) ns = c->at[i].slow_ns / c->at[i].slow_n;
        w0 += w;
        w1 += w * more;
        w2 += w * more * more;
        p0 += p;
        p1 += p * more;
    }
    if (ns == 0) return (struct shared_slope){0, 0};
    double ridge = NOISE * SLOPE_SPAN / ns;
    w0 += ridge * ridge;
    w2 += ridge * ridge;
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
    double trust = NOISE * NOISE / (prior * prior / 9);
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
        if (p->n <= 0) continue;
        double slope = slope_of(c, &shared, i);
        if (n == 0) first_slope = slope;
        v[n] = c->speed * (p->ns + slope * (kv_tokens - p->kv));
        weight[n] = p->n;
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

/* Off by `ratio` where a time was expected: does the whole machine run at another speed? */
static void follow_speed(struct draft_cost *c, double ratio) {
    /* The very measure that levels follow: where a level rests, its passes pull `speed` nowhere. */
    double off = (ratio > CUT ? CUT : ratio < 1 / CUT ? 1 / CUT : ratio) - 1;
    c->trend += 0.1 * (off - c->trend);
    if (fabs(c->trend) <= DEAD_BAND) return;
    c->speed *= 1 + 0.3 * c->trend;
    c->trend *= 0.8;
}

static void remember(struct draft_cost_point *p, double kv, double ns, double weight) {
    p->kv += weight * (kv - p->kv);
    p->ns += weight * (ns - p->ns);
    p->slow_n = p->slow_n * SLOPE_KEEP + 1;
    p->slow_kv = p->slow_kv * SLOPE_KEEP + kv;
    p->slow_ns = p->slow_ns * SLOPE_KEEP + ns;
    p->slow_kv2 = p->slow_kv2 * SLOPE_KEEP + kv * kv;
    p->slow_kv_ns = p->slow_kv_ns * SLOPE_KEEP + kv * ns;
}

void draft_cost_observe(struct draft_cost *c, int n_rows, double kv_tokens, double ns) {
    if (n_rows < 1 || !(ns > 0) || !isfinite(ns) || !(kv_tokens >= 0) || !isfinite(kv_tokens))
        return;
    int i = nearest(n_rows);
    struct draft_cost_point *p = &c->at[i];
    ns = to_grid(c, i, n_rows, kv_tokens, ns);
    p->last = ++c->n_observed;
    if (p->n > 0) {
        struct shared_slope shared = fit_shared(c);
        double expect = p->ns + slope_of(c, &shared, i) * (kv_tokens - p->kv);
        bool is_new = p->n < NEW_POINT;
        if (!is_new) follow_speed(c, ns / (c->speed * expect));
        ns /= c->speed;
        if (!is_new || ns >= COLD * expect) {
            double most = expect * (is_new ? CUT_NEW : CUT), least = is_new ? 0 : expect / CUT;
            p->n = p->n * LEVEL_KEEP + 1;
            double weight = 1 / p->n;
            if (!is_new && fabs(c->trend) > DEAD_BAND / 2) weight /= 4; /* `speed` takes it */
            ns = ns > most ? most : ns < least ? least : ns;
            remember(p, kv_tokens, ns, weight < 1 ? weight : 1);
            return;
        }
        /* The first times were of something else; begin again. */
        *p = (struct draft_cost_point){.last = p->last};
    } else {
        struct draft__curve v;
        draft__curve_fit(c, kv_tokens, &v);
        if (v.ns[i] > 0 && ns > CUT_NEW * v.ns[i]) ns = CUT_NEW * v.ns[i];
        ns /= c->speed;
    }
    p->n = 0.5; /* what comes next outweighs it */
    remember(p, kv_tokens, ns, 1);
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
    return p->n > 0 && abs(grid[i] - n_rows) <= n_rows / 8 && fabs(kv_tokens - p->kv) <= near;
}

uint32_t draft__cost_age(const struct draft_cost *c, int n_rows) {
    const struct draft_cost_point *p = &c->at[nearest(n_rows)];
    return p->n > 0 ? c->n_observed - p->last : UINT32_MAX;
}
