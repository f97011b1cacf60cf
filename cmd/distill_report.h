#ifndef TANDEM_CMD_DISTILL_REPORT_H
#define TANDEM_CMD_DISTILL_REPORT_H

/* Private to `tandem distill`: what is printed of a run, as a table or as JSON. */

#include "base/strbuf.h"
#include "cmd/distill.h"

/* A candidate layer's outcome. */
struct distill_result {
    int layer;
    double cost; /* share of the KV that is read with --keep of the deep layers' */
    double loss; /* of training, at its end; NaN: it was over before this run */
    double worth;
    struct distill_table table;
};

struct distill_times {
    double texts_s, open_s, make_s, trace_s, train_s;
    double n_tokens; /* traced */
};

struct distill_report {
    const struct distill_texts *texts;
    const struct distill_result *results;
    int n_results, chosen;
    const struct distill_times *times;
    const char *out, *recipe;
    double keep;
};

void distill_report_text(const struct distill_report *r, struct strbuf *out);
void distill_report_json(const struct distill_report *r, struct strbuf *out);

#endif
