#ifndef TANDEM_CMD_EVAL_WORK_H
#define TANDEM_CMD_EVAL_WORK_H

/* Private to `tandem eval`: what was typed, what it comes to, and the fit of a curve at its end. */

#include "cmd/engine_flags.h"
#include "cmd/eval_report.h"

/* What was typed. */
struct eval_flags {
    struct engine_options engine;
    const char *precision, *lengths, *depths, *kinds, *text, *tasks, *selectors, *scorers, *json,
        *svg, *answers, *calibrate, *into, *keep, *keep_blocks, *reserve, *smooth, *lists, *select2,
        *quarters, *sizes, *drop;
    int n_needles, n_texts, n_answer, n_late, n_following, n_task_answer, n_task, context, seed,
        exact, n_exact;
    double budget;
    struct target_settings base;
    struct eval_calibration limits;
    bool again, each_step, recheck, quiet;
};

/* What it comes to. */
struct eval_work {
    struct eval_bed *bed;
    struct eval_bed_options bed_options;
    struct eval_wishes wishes;
    struct eval_columns columns;
    struct eval_texts texts;
    struct eval_find_options find;
    struct eval_read_options read;
    struct eval_task_options task;
    struct eval_found *found;
    struct eval_loss *loss;
    struct eval_task *tasks;
    struct eval_exact exact;
    struct eval_attention attention[EVAL_MAX_LENGTHS];
    struct eval_results results;
    struct target_curve curve;
    char scorer_paths[EVAL_MAX_SCORERS][1024];
    const char *scorer_path[EVAL_MAX_SCORERS];
};

/* --calibrate's selector, an enum eval_selector; E_RANGE where it is none. */
int eval_calibrated_selector(const struct eval_flags *f, struct err *e);
/* Whether there is anything to fit, and whether it may be written where it shall:
 * asked before hours of work. E_RANGE, E_INVALID, what reading the scorer file finds. */
int eval_check_calibration(const struct eval_flags *f, const struct eval_work *p, struct err *e);
/* Fit the curve to the results, which point to it then, and write it into the scorer file if one
 * was named. */
int eval_calibrate(const struct eval_flags *f, struct eval_work *p, struct err *e);

#endif
