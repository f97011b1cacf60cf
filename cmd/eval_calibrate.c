/* `tandem eval --calibrate`: how many blocks a selector must keep, fitted to what was measured. */
#include <string.h>

#include "base/err.h"
#include "base/file.h"
#include "cmd/eval_work.h"

int eval_calibrated_selector(const struct eval_flags *f, struct err *e) {
    for (int s = EVAL_DENSE + 1; s < EVAL_N_SELECTORS; s++)
        if (!strcmp(f->calibrate, eval_selector_name((enum eval_selector)s))) return s;
    return err_raise(e, E_RANGE, "--calibrate: '%s' is no selector", f->calibrate);
}

static bool leaves_out(const struct eval_column *col, const struct eval_work *p) {
    for (int l = 0; l < p->find.n_lengths; l++)
        if (target_n_kept(&col->settings, p->find.length[l]) < target_n_blocks(p->find.length[l]))
            return true;
    return false;
}

int eval_check_calibration(const struct eval_flags *f, const struct eval_work *p, struct err *e) {
    struct target_scorer_file *file;
    int selector = eval_calibrated_selector(f, e), first = selector == EVAL_SCORER ? 0 : -1;
    bool is_there = false;
    if (selector < 0) return selector;
    for (int i = 1; i < p->columns.n; i++) {
        const struct eval_column *col = &p->columns.at[i];
        is_there |= (int)col->selector == selector && col->scorer == first &&
                    eval_column_is_plain(col) && leaves_out(col, p);
    }
    if (!is_there || (p->find.n == 0 && p->read.n == 0))
        return err_raise(e, E_INVALID,
                         "--calibrate %s: nothing would be left out of any prompt; give it as one "
                         "of --selectors, with --keep-blocks below the prompts' blocks, and "
                         "needles or texts",
                         f->calibrate);
    if (!f->into) return 0;
    int rc = target_scorer_read(&file, f->into, e);
    if (rc) return rc;
    rc = target_scorer_check(file, &p->bed->c, p->bed->fingerprint, e);
    target_scorer_free(file);
    return rc ? rc : file_check_writable(f->into, e);
}

int eval_calibrate(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    struct eval_curve_trial trials[EVAL_MAX_COLUMNS * 2 * EVAL_MAX_LENGTHS];
    int selector = eval_calibrated_selector(f, e);
    if (selector < 0) return selector;
    int n = eval_curve_trials(&p->results, (enum eval_selector)selector,
                              selector == EVAL_SCORER ? 0 : -1, trials,
                              sizeof trials / sizeof trials[0]);
    if (n == 0)
        return err_raise(e, E_INVALID,
                         "--calibrate %s: nothing was left out of any prompt; give it as one of "
                         "--selectors, with --keep-blocks below the prompts' blocks",
                         f->calibrate);
    eval_curve_fit(&p->curve, trials, n, &f->limits);
    p->results.curve = &p->curve;
    p->results.curve_of = f->calibrate;
    if (!f->into) return 0;
    struct target_scorer_file *file;
    int rc = target_scorer_read(&file, f->into, e);
    if (rc) return rc;
    rc = target_scorer_check(file, &p->bed->c, p->bed->fingerprint, e);
    file->curve = p->curve;
    if (!rc) rc = target_scorer_write(f->into, file, e);
    target_scorer_free(file);
    return rc;
}
