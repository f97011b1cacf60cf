/* Calibration: how much must be kept at which length. */
#include <math.h>
#include <stdlib.h>

#include "cmd/eval_report.h"

static int by_length(const void *a, const void *b) {
    const struct eval_curve_trial *x = a, *y = b;
    if (x->n_tokens != y->n_tokens) return x->n_tokens - y->n_tokens;
    return y->n_kept - x->n_kept; /* most first */
}

static bool is_within(const struct eval_curve_trial *t, const struct eval_calibration *c) {
    return (!t->has_found || t->found >= -c->points / 100 - 1e-12) &&
           (!t->has_loss || t->loss <= c->loss + 1e-12);
}

/* Between two points keep is linear in log(n), and kept(n) = keep(n) n does not fall where keep at
 * the second is at least keep at the first / (1 + log(n2 / n1)): there its slope, which falls all
 * the way, is zero at the second. */
static double least_keep(double keep, double from, double to) {
    return keep / (1 + log(to / from));
}

void eval_curve_fit(struct target_curve *out, const struct eval_curve_trial *trials, int n_trials,
                    const struct eval_calibration *limits) {
    struct target_curve c = {0};
    struct eval_curve_trial *t = malloc(sizeof *t * (size_t)n_trials);
    *out = (struct target_curve){.n = 1, .at = {{1, 1}}};
    if (!t) return; /* dense: nothing is lost */
    for (int i = 0; i < n_trials; i++) t[i] = trials[i];
    qsort(t, (size_t)n_trials, sizeof *t, by_length);
    for (int i = 0, end; i < n_trials; i = end) {
        int n_tokens = t[i].n_tokens, kept = n_tokens;
        bool going = true;
        for (end = i; end < n_trials && t[end].n_tokens == n_tokens; end++) {
            going = going && is_within(&t[end], limits);
            if (going && t[end].n_kept < kept) kept = t[end].n_kept;
        }
        double keep = (double)kept / n_tokens;
        if (c.n > 0)
            keep = fmax(keep, least_keep(c.at[c.n - 1].keep, c.at[c.n - 1].tokens, n_tokens));
        if (c.n == TARGET_CURVE_POINTS) {
            for (int k = 1; k < c.n; k++) c.at[k - 1] = c.at[k];
            c.n--;
        }
        c.at[c.n].tokens = n_tokens;
        c.at[c.n++].keep = fmin(ceil(keep * 1e4 - 1e-9) / 1e4, 1); /* as it is printed */
    }
    free(t);
    *out = c;
}

int eval_curve_trials(const struct eval_results *r, enum eval_selector selector, int scorer,
                      struct eval_curve_trial *out, int most) {
    int n = 0;
    for (int c = 1; c < r->columns->n; c++) {
        const struct eval_column *col = &r->columns->at[c];
        if (col->selector != selector || col->scorer != scorer || !eval_column_is_plain(col))
            continue;
        for (int l = 0; r->n_found > 0 && l < r->find->n_lengths && n < most; l++) {
            struct eval_paired p = eval_sum_found(r, c, (struct eval_filter){l, -1, -1});
            int tokens = r->find->length[l], all = target_n_blocks(tokens);
            int kept = target_n_kept(&col->settings, tokens) * TARGET_BLOCK;
            if (p.n <= 0 || kept >= all * TARGET_BLOCK) continue;
            out[n++] = (struct eval_curve_trial){
                .n_tokens = tokens, .n_kept = kept, .has_found = true, .found = p.diff};
        }
        for (int l = 0; r->n_loss > 0 && l < r->read->n_lengths && n < most; l++) {
            struct eval_paired p = eval_sum_loss(r, c, l, -1);
            int tokens = r->read->length[l], all = target_n_blocks(tokens), same = n;
            int kept = target_n_kept(&col->settings, tokens) * TARGET_BLOCK;
            if (p.n <= 0 || kept >= all * TARGET_BLOCK) continue;
            for (int i = 0; i < n; i++)
                if (out[i].n_tokens == tokens && out[i].n_kept == kept) same = i;
            if (same == n) out[n++] = (struct eval_curve_trial){.n_tokens = tokens, .n_kept = kept};
            out[same].has_loss = true;
            out[same].loss = p.diff;
        }
    }
    return n;
}

void eval_curve_append(struct strbuf *out, const struct target_curve *c) {
    for (int i = 0; i < c->n; i++)
        strbuf_printf(out, "%s%.0f:%.4g", i ? "," : "", c->at[i].tokens, c->at[i].keep);
}
