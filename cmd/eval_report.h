#ifndef TANDEM_CMD_EVAL_REPORT_H
#define TANDEM_CMD_EVAL_REPORT_H

/* What was measured, added up: tables for people, JSON for programs, a heat map, and the curve that
 * calibration fits. */

#include "cmd/eval_exact.h"
#include "cmd/eval_run.h"
#include "cmd/eval_stats.h"

/* Everything of one evaluation; parts that were not run have no items. */
struct eval_results {
    const struct eval_bed *bed;
    const char *model;
    const struct eval_columns *columns;
    const struct eval_texts *texts;
    uint64_t seed;
    double minutes;
    bool is_cut; /* the time was over first */
    const struct eval_find_options *find;
    const struct eval_found *found;
    int n_found;
    const struct eval_read_options *read;
    const struct eval_loss *loss;
    int n_loss;
    const struct eval_attention *attention; /* [lengths of read] */
    const struct eval_task *task;
    int n_task;
    const struct target_curve *curve; /* NULL: not calibrated */
    const char *curve_of;             /* name of its selector */
    const struct eval_exact *exact;   /* NULL: not asked for */
};

/* Which items count: an index or kind, -1 all. */
struct eval_filter {
    int length, depth, kind;
};
enum { EVAL_ANY = -1 };

/* Found or not of one column, against dense. E_NOMEM is told by n = -1. */
struct eval_paired eval_sum_found(const struct eval_results *r, int column, struct eval_filter f);
/* Mean loss a token of the texts, nats; part -1: all of what follows. length -1: all. */
struct eval_paired eval_sum_loss(const struct eval_results *r, int column, int length, int part);
/* One of the scores of tasks; dataset NULL: all. */
struct eval_paired eval_sum_task(const struct eval_results *r, int column, int score,
                                 const char *dataset);
/* Mean of agreement, recall and mass over texts. */
struct eval_kept_means {
    int n;
    double agree, recall, mass;
};
struct eval_kept_means eval_sum_kept(const struct eval_results *r, int column, int length);

/* Names of datasets among the tasks, each once; returns how many (at most `most`). */
int eval_datasets(const struct eval_results *r, const char **out, int most);

void eval_report_text(struct strbuf *out, const struct eval_results *r);
void eval_report_json(struct strbuf *out, const struct eval_results *r);
void eval_report_svg(struct strbuf *out, const struct eval_results *r);

/* ---- Calibration ---- */

struct eval_calibration {
    double points; /* needles may lose so many of a hundred */
    double loss;   /* running text may cost so many nats a token more */
};

/* What one kept size of one length gave. */
struct eval_curve_trial {
    int n_tokens, n_kept; /* prompt and kept tokens */
    bool has_found, has_loss;
    double found, loss; /* minus dense */
};

/* The curve of keep by length: at each length the smallest kept size that stays within the limits,
 * as do all larger ones that were tried; everything where none does. Kept tokens never fall as a
 * prompt grows, between the points neither. Lengths beyond TARGET_CURVE_POINTS: the longest count.
 * n_trials > 0, in any order. */
void eval_curve_fit(struct target_curve *out, const struct eval_curve_trial *trials, int n_trials,
                    const struct eval_calibration *limits);

/* The trials of one selector's (and scorer's) plain columns among the results; returns how many of
 * `most`. */
int eval_curve_trials(const struct eval_results *r, enum eval_selector selector, int scorer,
                      struct eval_curve_trial *out, int most);

/* "4096:0.5,7800:0.26", as --keep takes it. */
void eval_curve_append(struct strbuf *out, const struct target_curve *c);

#endif
