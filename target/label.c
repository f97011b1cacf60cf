/* From attention masses to a number a block that a scorer should rank by. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "target/train.h"

static const char *const label_names[TARGET_N_LABELS] = {"last", "deep", "strongest",
                                                         "accumulated"};
static const char *const loss_names[TARGET_N_LOSSES] = {"kl", "bce", "bce+rank"};

const char *target_label_name(enum target_label l) {
    return (unsigned)l < TARGET_N_LABELS ? label_names[l] : "?";
}

const char *target_loss_name(enum target_loss l) {
    return (unsigned)l < TARGET_N_LOSSES ? loss_names[l] : "?";
}

int target_label_parse(enum target_label *out, const char *s, struct err *e) {
    for (int i = 0; i < TARGET_N_LABELS; i++)
        if (!strcmp(s, label_names[i])) {
            *out = (enum target_label)i;
            return 0;
        }
    return err_raise(e, E_RANGE, "label '%s': last, deep, strongest or accumulated", s);
}

int target_loss_parse(enum target_loss *out, const char *s, struct err *e) {
    for (int i = 0; i < TARGET_N_LOSSES; i++)
        if (!strcmp(s, loss_names[i])) {
            *out = (enum target_loss)i;
            return 0;
        }
    return err_raise(e, E_RANGE, "loss '%s': kl, bce or bce+rank", s);
}

/* Keep the TARGET_STRONGEST largest, descending. */
static void insert(float *best, float x) {
    int i = TARGET_STRONGEST;
    for (; i > 0 && best[i - 1] < x; i--)
        if (i < TARGET_STRONGEST) best[i] = best[i - 1];
    if (i < TARGET_STRONGEST) best[i] = x;
}

static const float *line(const struct target_masses *m, int layer, int head) {
    size_t i = (size_t)(layer - m->first_layer) * (size_t)m->n_heads + (size_t)head;
    return m->mass + i * (size_t)m->stride;
}

void target_label_of(enum target_label l, const struct target_masses *m, int select_layer,
                     int n_blocks, float *out) {
    int end = m->first_layer + m->n_layers;
    int first = l == TARGET_LABEL_DEEP || l == TARGET_LABEL_STRONGEST ? select_layer : end - 1;
    ASSERT(first >= m->first_layer && first < end && n_blocks <= m->n_blocks);
    for (int b = 0; b < n_blocks; b++) {
        float best[TARGET_STRONGEST] = {0};
        double sum = 0;
        int n_lines = (end - first) * m->n_heads;
        for (int layer = first; layer < end; layer++)
            for (int h = 0; h < m->n_heads; h++) {
                float x = line(m, layer, h)[b];
                sum += (double)x;
                if (l == TARGET_LABEL_STRONGEST) insert(best, x);
            }
        if (l == TARGET_LABEL_STRONGEST) {
            n_lines = n_lines < TARGET_STRONGEST ? n_lines : TARGET_STRONGEST;
            sum = 0;
            for (int i = 0; i < n_lines; i++) sum += (double)best[i];
        }
        double rows = l == TARGET_LABEL_ACCUMULATED ? 1 : m->n_rows;
        out[b] = (float)(sum / (n_lines * rows));
    }
}

/* ---- Recall ---- */

struct ranked {
    float x;
    int b;
};

/* Largest first, equal ones by block; a NaN is last. */
static int before(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (isnan(x->x) != isnan(y->x)) return isnan(x->x) ? 1 : -1;
    if (x->x > y->x) return -1;
    if (x->x < y->x) return 1;
    return x->b - y->b;
}

void target_best(const float *x, int n, int n_best, uint8_t *best) {
    struct ranked at[TARGET_MAX_TRAIN_BLOCKS];
    ASSERT(n >= 0 && n <= TARGET_MAX_TRAIN_BLOCKS);
    for (int b = 0; b < n; b++) at[b] = (struct ranked){x[b], b};
    qsort(at, (size_t)n, sizeof *at, before);
    for (int i = 0; i < n; i++) best[at[i].b] = i < n_best;
}

double target_recall(const float *score, const float *label, int n, int n_best, double *mass) {
    uint8_t chosen[TARGET_MAX_TRAIN_BLOCKS], wanted[TARGET_MAX_TRAIN_BLOCKS];
    int found = 0;
    double held = 0, all = 0;
    if (n_best > n) n_best = n;
    target_best(score, n, n_best, chosen);
    target_best(label, n, n_best, wanted);
    for (int b = 0; b < n; b++) {
        found += chosen[b] && wanted[b];
        all += (double)label[b];
        if (chosen[b]) held += (double)label[b];
    }
    if (mass) *mass = all > 0 ? held / all : 1;
    return n_best > 0 ? (double)found / n_best : 1;
}
