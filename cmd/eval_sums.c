/* Items added up by column. */
#include <stdlib.h>
#include <string.h>

#include "cmd/eval_report.h"

/* Two numbers an item, its column's and dense's. */
struct pairs {
    double *score, *dense;
    size_t n;
};

static bool pairs_open(struct pairs *p, int most) {
    size_t n = most > 0 ? (size_t)most : 1;
    *p = (struct pairs){.score = malloc(sizeof(double) * n), .dense = malloc(sizeof(double) * n)};
    return p->score && p->dense;
}

static void pairs_add(struct pairs *p, double score, double dense) {
    p->score[p->n] = score;
    p->dense[p->n++] = dense;
}

static struct eval_paired pairs_close(struct pairs *p, bool ok, bool binary) {
    struct eval_paired sum = {.n = -1};
    if (ok) sum = eval_pair(p->score, p->dense, p->n, binary);
    free(p->score);
    free(p->dense);
    return sum;
}

struct eval_paired eval_sum_found(const struct eval_results *r, int column, struct eval_filter f) {
    struct pairs p;
    bool ok = pairs_open(&p, r->n_found);
    for (int i = 0; ok && i < r->n_found; i++) {
        const struct eval_found *x = &r->found[i];
        if ((f.length >= 0 && x->length != f.length) || (f.depth >= 0 && x->depth != f.depth) ||
            (f.kind >= 0 && (int)x->kind != f.kind))
            continue;
        pairs_add(&p, x->right[column], x->right[0]);
    }
    return pairs_close(&p, ok, true);
}

static double loss_of(const struct eval_loss *x, int column, int part) {
    double nll = 0;
    int n = 0;
    for (int i = 0; i < EVAL_PARTS; i++) {
        if (part >= 0 && part != i) continue;
        nll += x->nll[column][i];
        n += x->n_part[i];
    }
    return n ? nll / n : 0;
}

struct eval_paired eval_sum_loss(const struct eval_results *r, int column, int length, int part) {
    struct pairs p;
    bool ok = pairs_open(&p, r->n_loss);
    for (int i = 0; ok && i < r->n_loss; i++)
        if (length < 0 || r->loss[i].length == length)
            pairs_add(&p, loss_of(&r->loss[i], column, part), loss_of(&r->loss[i], 0, part));
    return pairs_close(&p, ok, false);
}

struct eval_kept_means eval_sum_kept(const struct eval_results *r, int column, int length) {
    struct eval_kept_means m = {0};
    for (int i = 0; i < r->n_loss; i++) {
        const struct eval_loss *x = &r->loss[i];
        int n = 0;
        if (length >= 0 && x->length != length) continue;
        for (int k = 0; k < EVAL_PARTS; k++) n += x->n_part[k];
        m.agree += n ? (double)x->n_agree[column] / n : 0;
        m.recall += x->recall[column];
        m.mass += x->mass[column];
        m.n++;
    }
    if (m.n) {
        m.agree /= m.n;
        m.recall /= m.n;
        m.mass /= m.n;
    }
    return m;
}

struct eval_paired eval_sum_task(const struct eval_results *r, int column, int score,
                                 const char *dataset) {
    struct pairs p;
    bool ok = pairs_open(&p, r->n_task);
    for (int i = 0; ok && i < r->n_task; i++)
        if (!dataset || !strcmp(dataset, r->task[i].dataset))
            pairs_add(&p, r->task[i].score[column][score], r->task[i].score[0][score]);
    return pairs_close(&p, ok, false);
}

int eval_datasets(const struct eval_results *r, const char **out, int most) {
    int n = 0;
    for (int i = 0; i < r->n_task; i++) {
        int known = 0;
        for (int j = 0; j < n; j++) known |= !strcmp(out[j], r->task[i].dataset);
        if (!known && n < most) out[n++] = r->task[i].dataset;
    }
    return n;
}
