#ifndef TANDEM_CMD_EVAL_NEEDLE_H
#define TANDEM_CMD_EVAL_NEEDLE_H

/* Facts to be found in a long text: what is hidden, what is asked, what must be in the answer. A
 * needle is a pure function of (seed, index) and its kind; names, wordings and values are this
 * file's own, none of what `tandem distill` trains on. */

#include <stdbool.h>
#include <stdint.h>

enum eval_needle_kind {
    EVAL_NEEDLE_SINGLE, /* one fact */
    EVAL_NEEDLE_MANY,   /* four of one wording, other keys: which one is asked for matters */
    EVAL_NEEDLE_HOP,    /* two facts that must be put together, beside another such pair */
    EVAL_NEEDLE_LATE,   /* one fact, asked for only after a long answer has begun */
    EVAL_N_NEEDLE_KINDS
};
const char *eval_needle_kind_name(enum eval_needle_kind kind); /* "single" */

enum { EVAL_NEEDLE_FACTS = 4 };

struct eval_needle {
    enum eval_needle_kind kind;
    int wording;
    int n_facts;
    struct {
        char text[160]; /* one sentence */
        double depth;   /* 0 the text's beginning, 1 its end */
    } fact[EVAL_NEEDLE_FACTS];
    char question[200];
    char value[32]; /* what the answer must hold */
};

/* The index-th needle of `seed`, the fact that is asked for at `depth` of [0, 1]. Others (of MANY
 * and HOP) lie at places that chance chose. */
void eval_needle_make(struct eval_needle *out, enum eval_needle_kind kind, uint64_t seed,
                      uint32_t index, double depth);

/* Does the answer say the value, as a word of its own (letters and digits do not touch it), in
 * whatever case? */
bool eval_says(const char *answer, const char *value);

#endif
