#ifndef TANDEM_CMD_BENCH_KINDS_H
#define TANDEM_CMD_BENCH_KINDS_H

#include <stdbool.h>

/* The prompts of `tandem bench --spec`. */

struct bench_kind {
    const char *name;
    const char *text; /* of one user message */
};
extern const struct bench_kind bench_kinds[]; /* ends in a zero entry */
bool bench_kind_exists(const char *name);

/* `tandem bench --spec` over an open engine that has a draft or prompt lookup. */
struct engine;
struct err;
struct bench_spec_options {
    int n_tokens, n_repeats; /* most tokens of an answer; runs of each way */
    double temperature;
    const char *kind; /* only this one; NULL: all */
    bool json;
};
int bench_spec(struct engine *g, const struct bench_spec_options *o, struct err *e);

#endif
