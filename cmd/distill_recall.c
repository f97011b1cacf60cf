/* How many of the blocks that mattered would have been kept, by the trained scorer and by selectors
 * that need no training, at the same places of windows that were held out. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "cmd/distill.h"
#include "target/target.h"

const char *const distill_selector_name[DISTILL_N_SELECTORS] = {"scorer", "mean",   "observed",
                                                                "recent", "random", "oracle"};

/* <pooled query, representative>: the mean selector, as kern_scorer's MEAN has it. */
static void mean_scores(const struct target_window *w, const struct target_place *p, int h,
                        double *pooled, float *out) {
    double weight[KERN_STATE_QUERIES], top = -INFINITY, sum = 0;
    const float *newest = p->query + (size_t)(p->n_queries - 1) * (size_t)h;
    for (int t = 0; t < p->n_queries; t++) {
        weight[t] = 0;
        for (int i = 0; i < h; i++)
            weight[t] += (double)newest[i] * (double)p->query[(size_t)t * (size_t)h + (size_t)i];
        weight[t] /= sqrt(h);
        top = fmax(top, weight[t]);
    }
    for (int t = 0; t < p->n_queries; t++) sum += weight[t] = exp(weight[t] - top);
    for (int i = 0; i < h; i++) {
        pooled[i] = 0;
        for (int t = 0; t < p->n_queries; t++)
            pooled[i] += weight[t] / sum * (double)p->query[(size_t)t * (size_t)h + (size_t)i];
    }
    for (int b = 0; b < p->n; b++) {
        const float *r = w->rep + (size_t)(p->first + b) * (size_t)h;
        double dot = 0;
        for (int i = 0; i < h; i++) dot += pooled[i] * (double)r[i];
        out[b] = (float)(dot / sqrt(h));
    }
}

/* Blocks that a selection of a prefix picks besides the pinned ones; 0: nothing is left out. */
static int n_picked(const struct target_place *p, int keep) {
    int n = target_n_blocks(p->n_tokens), pinned = 1 + TARGET_WINDOW_BLOCKS;
    int kept = keep == 0 ? (n + 9) / 10 : TARGET_MIN_BLOCKS;
    if (kept - pinned < 1) return keep == 0 ? 1 : 0;
    return kept - pinned < p->n ? kept - pinned : 0;
}

/* The share of a mark that the n_best blocks hold; *any: is there one? */
static double share_kept(const float *score, const float *mark, int n, int n_best, bool *any) {
    uint8_t chosen[TARGET_MAX_TRAIN_BLOCKS];
    double held = 0, all = 0;
    for (int b = 0; b < n; b++) all += (double)mark[b];
    *any = all > 0;
    if (!*any) return 0;
    target_best(score, n, n_best, chosen);
    for (int b = 0; b < n; b++) held += chosen[b] ? (double)mark[b] : 0;
    return held / all;
}

static void add(struct distill_table *t, int domain, int selector, const struct target_place *p,
                const float *label, const float *score) {
    for (int k = 0; k < DISTILL_N_KEEPS; k++) {
        int n = n_picked(p, k);
        if (n == 0) continue;
        double mass, recall = target_recall(score, label, p->n, n, &mass);
        bool marked = false;
        double mark = share_kept(score, p->mark, p->n, n, &marked);
        for (int i = 0; i < 2; i++) {
            struct distill_recall *r = &t->at[k][i ? TARGET_MAX_DOMAINS : domain][selector];
            r->n_places++;
            r->recall += recall;
            r->mass += mass;
            r->n_marked += marked;
            r->mark += mark;
        }
    }
}

static void add_place(struct distill_table *t, const struct target_window *w, int i, int hidden,
                      enum target_label which, const float *scores, uint32_t salt, uint64_t seed,
                      double *pooled, float *own) {
    const struct target_place *p = &w->place[i];
    const float *label = p->label[which];
    add(t, w->domain, DISTILL_SCORER, p, label,
        scores + (size_t)i * (size_t)w->n_blocks + p->first);
    mean_scores(w, p, hidden, pooled, own);
    add(t, w->domain, DISTILL_MEAN, p, label, own);
    if (!isnan(p->observed[0])) add(t, w->domain, DISTILL_OBSERVED, p, label, p->observed);
    for (int b = 0; b < p->n; b++) own[b] = (float)b;
    add(t, w->domain, DISTILL_RECENT, p, label, own);
    for (int b = 0; b < p->n; b++)
        own[b] = rng_uniform(seed, ((uint64_t)3 << 32) + salt, RNG_TRAIN, (uint32_t)b);
    add(t, w->domain, DISTILL_RANDOM, p, label, own);
    add(t, w->domain, DISTILL_ORACLE, p, label, label);
}

int distill_table_fill(struct distill_table *out, struct target_train *train,
                       enum target_label label, const struct target_window *const *windows, int n,
                       int hidden, uint64_t seed, struct err *e) {
    size_t most = TARGET_MAX_TRAIN_BLOCKS;
    float *scores = malloc((TARGET_MAX_PLACES + 1) * most * sizeof *scores);
    double *pooled = malloc((size_t)hidden * sizeof *pooled);
    memset(out, 0, sizeof *out);
    int rc = scores && pooled ? 0 : err_raise(e, E_NOMEM, "no memory for scores");
    for (int i = 0; i < n && !rc; i++) {
        const struct target_window *w = windows[i];
        if (!w->is_held_out || w->n_places == 0) continue;
        target_train_score(train, w, scores);
        for (int p = 0; p < w->n_places; p++)
            add_place(out, w, p, hidden, label, scores, (uint32_t)(i * TARGET_MAX_PLACES + p), seed,
                      pooled, scores + TARGET_MAX_PLACES * most);
    }
    for (int k = 0; k < DISTILL_N_KEEPS; k++)
        for (int d = 0; d <= TARGET_MAX_DOMAINS; d++)
            for (int s = 0; s < DISTILL_N_SELECTORS; s++) {
                struct distill_recall *r = &out->at[k][d][s];
                if (r->n_places == 0) continue;
                r->recall /= r->n_places;
                r->mass /= r->n_places;
                if (r->n_marked) r->mark /= r->n_marked;
            }
    free(scores);
    free(pooled);
    return rc;
}

double distill_table_worth(const struct distill_table *t) {
    double sum = 0;
    int n = 0, k = t->at[1][TARGET_MAX_DOMAINS][DISTILL_SCORER].n_places > 0;
    for (int d = 0; d < TARGET_MAX_DOMAINS; d++) {
        const struct distill_recall *r = &t->at[k][d][DISTILL_SCORER];
        if (r->n_places == 0) continue;
        sum += r->mass;
        n++;
    }
    return n ? sum / n : 0;
}
