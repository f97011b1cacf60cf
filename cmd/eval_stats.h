#ifndef TANDEM_CMD_EVAL_STATS_H
#define TANDEM_CMD_EVAL_STATS_H

/* Means, and differences of pairs, with how far chance may have moved them; scores of an answer
 * against what it should be. */

#include <stdbool.h>
#include <stddef.h>

/* One way of reading against dense on the same inputs. */
struct eval_paired {
    int n;                   /* pairs; 0: the rest is 0 */
    double mean;             /* of the scores themselves */
    double lo, hi;           /* 95 % interval of that: Wilson's for right or wrong, else normal */
    double diff;             /* mean of score minus dense */
    double se;               /* its standard error */
    double diff_lo, diff_hi; /* 95 % interval: Agresti and Min's (2005) for right or wrong, which
                                does not vanish where no pair differs, else normal */
    int n_better, n_worse;   /* pairs that differ, by direction */
};

/* score[n] and dense[n]; binary: all of them 0 or 1. Of a single pair the standard error, and the
 * intervals that come from it, are NaN. */
struct eval_paired eval_pair(const double *score, const double *dense, size_t n, bool binary);

/* Share of words that answer and reference have in common, as question answering sets count it
 * (SQuAD): lower case, punctuation and the articles dropped, F1 of precision and recall over words
 * with multiplicity. */
double eval_f1(const char *answer, const char *reference);
/* Are they the same under that normalisation? 1 or 0. */
double eval_exact(const char *answer, const char *reference);
/* ROUGE-L (Lin 2004): F1 over the longest common subsequence of words. Of longer texts than 2,048
 * words the first 2,048 count. */
double eval_rouge_l(const char *answer, const char *reference);

#endif
