#ifndef TANDEM_CMD_EVAL_SVG_H
#define TANDEM_CMD_EVAL_SVG_H

/* Heat maps, one a way of reading: lengths across, depths down, the share found in each cell. One
 * self-contained SVG. */

#include "base/strbuf.h"

struct eval_heat {
    const char *title, *subtitle;
    int n_maps, n_lengths, n_depths;
    const char *const *names; /* [n_maps] */
    const int *lengths;       /* tokens */
    const double *depths;     /* 0..1 */
    const double *share;      /* [n_maps][n_depths][n_lengths], 0..1; NaN: nothing was asked */
    const double *whole;      /* [n_maps] share over all cells */
    const int *count;         /* [n_depths][n_lengths] prompts of a cell */
};

void eval_svg_append(struct strbuf *out, const struct eval_heat *h);

#endif
