#ifndef TANDEM_CMD_EVAL_EXACT_H
#define TANDEM_CMD_EVAL_EXACT_H

/* Exact answers (docs/sparsity.md) to the prompts of an evaluation's needles: are they the dense
 * ones, and how many tokens does a dense pass emit? Both come from an engine, as served. */

#include "cmd/eval_run.h"

struct eval_exact_options {
    struct engine_options engine; /* model, device, threads, precision */
    int exact;                    /* tokens committed provisionally, 1..TARGET_MOST_EXACT */
    int n_answer;                 /* tokens of an answer, which goes on past its end */
    struct target_settings keep;  /* how much is kept, as a column has it; else unset */
};

/* Sums over prompts. */
struct eval_exact {
    int exact, n_answer;
    int n, n_same; /* prompts; of these, with both answers alike */
    int n_sparse;  /* that lost blocks */
    bool is_cut;   /* the time was over first */
    uint64_t n_tokens;
    struct engine_exact passes;
    double dense_s, exact_s; /* from the first token to the last, of requests that ran together */
};

/* Answer every prompt of `find` densely and exactly. */
int eval_exact_run(struct eval_bed *b, const struct eval_texts *texts,
                   const struct eval_find_options *find, const struct eval_exact_options *o,
                   const struct eval_clock *clock, struct eval_exact *out, struct err *e);

void eval_exact_text(struct strbuf *b, const struct eval_exact *x);
void eval_exact_json(struct strbuf *b, const struct eval_exact *x);

#endif
