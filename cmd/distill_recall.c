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

static void add(struct distill_table *t, int domain, int selector, const struct target_place *p,
                const float *score) {
    for (int k = 0; k < DISTILL_N_KEEPS; k++) {
        int n = n_picked(p, k);
        if (n == 0) continue;
        double mass, recall = target_recall(score, p->label, p->n, n, &mass);
        for (int i = 0; i < 2; i++) {
            struct distill_recall *r = &t->at[k][i ? TARGET_MAX_DOMAINS : domain][selector];
            r->n_places++;
            r->recall += recall;
            r->mass += mass;
        }
    }
}

static void add_place(struct distill_table *t, const struct target_window *w, int i, int hidden,
                      const float *scores, uint32_t salt, uint64_t seed, double *pooled,
                      float *own) {
    const struct target_place *p = &w->place[i];
    add(t, w->domain, DISTILL_SCORER, p, scores + (size_t)i * (size_t)w->n_blocks + p->first);
    mean_scores(w, p, hidden, pooled, own);
    add(t, w->domain, DISTILL_MEAN, p, own);
    if (!isnan(p->observed[0])) add(t, w->domain, DISTILL_OBSERVED, p, p->observed);
    for (int b = 0; b < p->n; b++) own[b] = (float)b;
    add(t, w->domain, DISTILL_RECENT, p, own);
    for (int b = 0; b < p->n; b++)
        own[b] = rng_uniform(seed, ((uint64_t)3 << 32) + salt, RNG_TRAIN, (uint32_t)b);
    add(t, w->domain, DISTILL_RANDOM, p, own);
    add(t, w->domain, DISTILL_ORACLE, p, p->label);
}

int distill_table_fill(struct distill_table *out, struct target_train *train,
                       const struct target_window *const *windows, int n, int hidden, uint64_t seed,
                       struct err *e) {
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
            add_place(out, w, p, hidden, scores, (uint32_t)(i * TARGET_MAX_PLACES + p), seed,
                      pooled, scores + TARGET_MAX_PLACES * most);
    }
    for (int k = 0; k < DISTILL_N_KEEPS; k++)
        for (int d = 0; d <= TARGET_MAX_DOMAINS; d++)
            for (int s = 0; s < DISTILL_N_SELECTORS; s++) {
                struct distill_recall *r = &out->at[k][d][s];
                if (r->n_places == 0) continue;
                r->recall /= r->n_places;
                r->mass /= r->n_places;
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
