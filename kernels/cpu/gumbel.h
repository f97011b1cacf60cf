#ifndef TANDEM_KERNELS_CPU_GUMBEL_H
#define TANDEM_KERNELS_CPU_GUMBEL_H

/* Private: the largest of log weight + Gumbel noise over a row's candidates, which follows the
 * weights' distribution (the Gumbel-max trick; Maddison, Tarlow and Minka, "A* sampling", 2014).
 * The noise of a token is -log(-log(u)), u = (r + 1/2) / 2^32, r the 32-bit draw (seed, position,
 * RNG_GUMBEL, token id): nothing else decides it, so whoever holds the same distribution draws the
 * same token. Equal sums go to the lower candidate.
 *
 * Exact and cheap: sums are compared in double, from the logits, for the few candidates that can
 * still win. With E = -log(u) >= 1 - u, a candidate beats the best sum b only where 1 - u < w
 * exp(-b): one comparison of f32 on random bits, and no random bits at all for a group whose
 * largest weight cannot do it at the smallest 1 - u, 2^-33. Every instruction set gives the same
 * candidate for the same weights. */

#include "kernels/cpu/cpu.h"

struct cpu_gumbel_row {
    uint64_t seed, position;
    int n;              /* candidates */
    const int32_t *col; /* [n] their columns; NULL: themselves */
    const int32_t *ids; /* token ids of the columns; NULL: the columns themselves */
    const float *w;     /* [n] weights exp((x - max) * inv_t), the largest 1 */
    const float *x;     /* [n] logits */
    float max, inv_t;
    int best; /* the lowest candidate with x = max */
};

#endif
