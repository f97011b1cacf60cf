#ifndef TANDEM_TESTS_SCORE_BED_H
#define TANDEM_TESTS_SCORE_BED_H

/* What the tests of states and scores share: random states in shuffled pages of an arena whose
 * every other byte is 0xFF (a NaN as f32), random scorers, and their law in double straight from
 * the states. Host memory throughout. */

#include "kernels/kernels.h"
#include "tests/harness.h"

struct score_bed {
    int n_tokens, n_blocks, n_pages, cols;
    bool has_first;
    float *x; /* [n_tokens][cols] */
    uint8_t *arena;
    size_t arena_bytes;
    int32_t *page; /* [n_blocks] */
    float *ring;   /* [KERN_STATE_QUERIES][cols] */
    struct kern_plane plane;
};

/* Nothing noted yet. One column of the states is `massive` times as large as the others. */
struct score_bed score_bed_open(int n_tokens, int cols, bool has_first, float massive,
                                uint64_t seed);
/* The same with what minmax and bound go by. */
struct score_bed score_bed_open_bounds(int n_tokens, int cols, bool has_first, bool has_minmax,
                                       bool has_spread, float massive, uint64_t seed);
void score_bed_close(struct score_bed *b);
/* Note [from, to) in chunks of 1..most tokens by chance. */
void score_bed_note(struct score_bed *b, struct kern *k, int from, int to, int most, uint64_t seed);
struct kern_score_view score_bed_view(const struct score_bed *b);
/* What note_states should leave, by itself: the arena and the ring as they would be, bounds of
 * normed states within f32's rounding. */
void score_bed_naive_note(struct score_bed *b, int from, int to);
/* Bounds in `arena` (laid out as b's) against those that naive notes left in b: f32's rounding of
 * `tolerance` of the largest normed state. Then they are made equal, so that bytes may be compared.
 */
void score_bed_assert_bounds(const struct score_bed *b, uint8_t *arena, double tolerance,
                             const char *what);

/* Random weights for a scorer whose shape and options are set; freed by score_bed_free_scorer. */
void score_bed_scorer(struct kern_scorer *s, uint64_t seed);
void score_bed_free_scorer(struct kern_scorer *s);

/* An element of a plane, and how many a row further, that a NaN in a token leaves its mark in and s
 * goes by. */
int score_bed_element(const struct score_bed *b, const struct kern_scorer *s, int *n);

/* How many numbers a scorer gives, and scores by kernels.h's law. */
static inline int score_bed_n(const struct score_bed *b, const struct kern_scorer *s) {
    return s->by_quarter ? 4 * b->n_blocks : b->n_blocks;
}
static inline bool score_bed_has_quarters(const struct kern_scorer *s) {
    return s->kind == KERN_SCORE_LATE || (s->kind == KERN_SCORE_MEAN && !s->by_first);
}
void score_bed_naive(const struct score_bed *b, const struct kern_scorer *s, double *out);

/* Kinds, options and shapes that the backends' tests go through. */
struct score_case {
    enum kern_score kind;
    int cols, n_tokens, n_queries, n_heads, head_dim, width;
    bool normed, by_first, layernorm;
    float massive;
};
extern const struct score_case score_cases[];
extern const int n_score_cases;
/* "late 100x77 ..." in a static buffer. */
const char *score_case_name(const struct score_case *c);
void score_bed_case(const struct score_case *c, struct score_bed *b, struct kern_scorer *s);

#endif
