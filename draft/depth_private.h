#ifndef TANDEM_DRAFT_DEPTH_PRIVATE_H
#define TANDEM_DRAFT_DEPTH_PRIVATE_H

/* What cost.c and rate.c give the choice beside draft/depth.h. */

#include "draft/depth.h"

/* A cost table at one context: ns at every row count of the grid, monotone. */
struct draft__curve {
    double ns[DRAFT_COST_ROWS]; /* all 0: nothing is known */
};
void draft__curve_fit(const struct draft_cost *c, double kv_tokens, struct draft__curve *out);
/* Linear between the grid's rows, which need not be whole; proportional beyond its end. */
double draft__curve_at(const struct draft__curve *v, double n_rows);
/* A curve of the usual growth, for what is not known yet. */
void draft__curve_guess(double ns_of_one_row, struct draft__curve *out);

/* Should a pass of about n_rows be seen again? Yes when it was never seen, or not for 64 passes,
 * more where more than a hundred tell of it. */
bool draft__cost_stale(const struct draft_cost *c, int n_rows);

/* chance[i], i < n: that places 0..i are all accepted. */
void draft__rate_chances(const struct draft_rate *r, int n, double *chance);
/* draft_rate_update with memory of about 1 / (1 - keep) rounds. */
void draft__rate_update(struct draft_rate *r, double keep, int n_drafted, int n_accepted);
/* A round emitted n_tokens; own: not by lookup. Memory as above. */
void draft__rate_count(struct draft_rate *r, double keep, bool own, int n_tokens);
/* Rounds that the model will have among those of n_tokens more tokens, at least 1. */
double draft__rate_rounds(const struct draft_rate *r, int n_tokens);
/* Let at most n_tried rounds of what is known count. */
void draft__rate_fade(struct draft_rate *r, double n_tried);

/* Memory of a request's rates of the model. Of the engine's running rates by rounds that drafted,
 * and by sequence rounds that did not: what nobody tries is forgotten, or requests that begin with
 * the model off would keep it off. Of the engine's share of rounds that lookup does not fill. */
#define DRAFT__KEEP 0.96
#define DRAFT__KEEP_PRIOR 0.995
#define DRAFT__KEEP_IDLE 0.998
#define DRAFT__KEEP_SHARE 0.99

#endif
