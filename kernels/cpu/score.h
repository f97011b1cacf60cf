#ifndef TANDEM_KERNELS_CPU_SCORE_H
#define TANDEM_KERNELS_CPU_SCORE_H

/* Private to kernels/cpu/: one call of `score` as its inner functions see it, and where states lie.
 * ops_score.c checks the arguments and runs a table's three functions one after another; each block
 * is one thread's from beginning to end, so the number of threads cannot change a bit. */

#include "kernels/cpu/cpu.h"

struct score_job {
    const struct cpu_score_isa *isa;
    const struct kern_scorer *s;
    const struct kern_score_view *v;
    int n_blocks;
    int n_queries; /* newest states that are there and asked for */
    void *scratch;
    float *out;
};

static inline int score_min(int a, int b) {
    return a < b ? a : b;
}

/* The plane of a page: f32 [4 or 5][cols]. */
static inline float *score_plane(const struct kern_plane *p, int page) {
    return (float *)(void *)((uint8_t *)p->base + (size_t)page * p->page_stride + p->plane_offset);
}
static inline const float *score_block(const struct score_job *j, int block) {
    return score_plane(&j->v->plane, j->v->page[block]);
}

/* Tokens of a block that were noted, 1..64, and of one of its quarters, 0..16. */
static inline int score_tokens(const struct score_job *j, int block) {
    return score_min(KERN_BLOCK, j->v->n_tokens - block * KERN_BLOCK);
}
static inline int score_quarter_tokens(int tokens, int quarter) {
    int n = tokens - quarter * KERN_QUARTER;
    return n < 0 ? 0 : score_min(n, KERN_QUARTER);
}

/* State i of the job's queries, the newest last. */
static inline const float *score_query(const struct score_job *j, int i) {
    int position = j->v->n_tokens - j->n_queries + i;
    return j->v->ring + (size_t)(position % KERN_STATE_QUERIES) * (size_t)j->s->cols;
}

#endif
