#ifndef TANDEM_TESTS_GOLDEN_LOGITS_H
#define TANDEM_TESTS_GOLDEN_LOGITS_H

/* tests/golden/logits.bin: prompts and the default target's log-probabilities behind each, by an
 * independent implementation (make_logits.py); and what tests of either device do with them. */

#include <stdbool.h>
#include <stdint.h>

#include "tests/runner.h"

struct golden {
    int n_ids;
    const int32_t *ids;
    float min, step;
    const uint16_t *q; /* [golden_vocab] log-probabilities */
};

enum { GOLDEN_ROWS = 200 };

extern int golden_n, golden_vocab;
void golden_load(void);
const struct golden *golden_at(int i);

/* KL(golden || softmax(z)). */
double golden_kl(const struct golden *g, const float *z);

/* Mean and worst KL at the last position of the first n prompts, and where the likeliest token is
 * the golden's. device, isa, precision are o's; as_prompt is the row class of all tokens. */
void golden_measure(const struct runner_options *o, bool as_prompt, int n, double *mean,
                    double *worst, int *n_top);

/* Feed GOLDEN_ROWS tokens of a prompt in pieces of `chunk` rows beside n_others other sequences.
 * record: note every row's hash; else fail where one differs from what was noted. Returns the hash
 * of its K and V. device, isa and n_threads are o's. */
uint64_t golden_feed(const struct runner_options *o, int chunk, int n_others, bool prompt,
                     bool record);

#endif
