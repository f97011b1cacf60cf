/* States of the select layer and scores of blocks: 2,048 blocks (128K tokens) of a 4,096-wide
 * model, eight sets of pages in turn, so that none is in the cache. `late` of 4 heads of 64 and 32
 * queries, `mlp` as wide as the model, with LayerNorm. Their floor is one product at the bf16 rate
 * of the run; for f32's accuracy three of half that rate are done. Checked on three blocks in
 * double. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/kernels_bench.h"

enum {
    COLS = 4096,
    BLOCKS = 2048,
    TOKENS = BLOCKS * KERN_BLOCK - 7,
    SETS = 8,
    HEADS = 4,
    HEAD_DIM = 64,
    PLANE = 8 * COLS, /* floats: quarters, bounds of both kinds */
    N_CHECKED = 3,
    NORM_CHECKED = 8, /* columns */
};

static struct kern_plane plane_at(float *base) {
    return (struct kern_plane){.base = base,
                               .page_stride = PLANE * sizeof(float),
                               .cols = COLS,
                               .has_minmax = true,
                               .has_spread = true};
}

struct scores {
    struct kbench *b;
    struct kern_scorer host, dev;
    float *planes, *ring; /* host: one set; every set holds the same */
    float *arena, *dev_ring, *out;
    int32_t *page; /* [SETS][BLOCKS] */
    void *scratch;
};

static const float *put(struct kbench *b, const float **host, size_t n, float scale) {
    *host = kbench_floats(b, n, scale);
    return kbench_put(b, *host, n * sizeof(float));
}

static struct scores open_scores(struct kbench *b) {
    struct scores s = {.b = b};
    struct err e = {0};
    const size_t set = (size_t)BLOCKS * PLANE;
    int32_t *page = kbench_host((size_t)SETS * BLOCKS * sizeof *page);
    s.planes = kbench_floats(b, set, 6);
    for (size_t i = 0; i < set; i++) /* sums of squares */
        if (i % PLANE / COLS == 7) s.planes[i] = fabsf(s.planes[i]);
    s.ring = kbench_floats(b, (size_t)KERN_STATE_QUERIES * COLS, 1.5);
    s.arena = kbench_reserve(b, SETS * set * sizeof(float));
    for (int i = 0; i < SETS; i++)
        kbench_must(
            b,
            b->k->ops->upload(b->k, s.arena + (size_t)i * set, s.planes, set * sizeof(float), &e),
            &e, "upload:");
    for (int i = 0; i < SETS * BLOCKS; i++) page[i] = i;
    s.page = kbench_put(b, page, (size_t)SETS * BLOCKS * sizeof *page);
    s.dev_ring = kbench_put(b, s.ring, (size_t)KERN_STATE_QUERIES * COLS * sizeof(float));
    s.out = kbench_reserve(b, BLOCKS * sizeof(float));
    free(page);
    return s;
}

static int call_score(void *arg, int i) {
    struct scores *s = arg;
    const struct kern_score_view v = {.plane = plane_at(s->arena),
                                      .page = s->page + (size_t)(i % SETS) * BLOCKS,
                                      .ring = s->dev_ring,
                                      .n_tokens = TOKENS};
    return s->b->k->ops->score(s->b->k, &s->dev, &v, s->scratch, s->out);
}

/* The twin on some blocks: a view of those pages alone. The last one is the list's end, so that it
 * is as short as ours; the ring's place follows from the tokens modulo 32. */
static void check(struct scores *s, const char *what) {
    struct kbench *b = s->b;
    const int block[N_CHECKED] = {0, BLOCKS / 2 + 1, BLOCKS - 1};
    const int tokens = N_CHECKED * KERN_BLOCK - (BLOCKS * KERN_BLOCK - TOKENS);
    const struct kern_score_view v = {
        .plane = plane_at(s->planes), .page = block, .ring = s->ring, .n_tokens = tokens};
    float want[N_CHECKED], *got = kbench_host(BLOCKS * sizeof *got);
    void *scratch = kbench_host(b->twin->ops->score_scratch_bytes(b->twin, &s->host, N_CHECKED));
    kbench_must(b, call_score(s, 0), NULL, what);
    kbench_get(b, got, s->out, BLOCKS * sizeof *got);
    if (b->twin->ops->score(b->twin, &s->host, &v, scratch, want)) kbench_die(what, "the twin");
    for (int i = 0; i < N_CHECKED; i++)
        kbench_check(what, block[i], (double)got[block[i]], (double)want[i],
                     2e-5 * (1 + fabs((double)want[i])));
    free(got), free(scratch);
}

/* goal_us 0: none. */
static void point(struct scores *s, const char *kernel, const char *shape, double bytes,
                  double flops, double goal_us) {
    struct kbench *b = s->b;
    const double floor = fmax(bytes / b->bandwidth, flops / b->matrix) * 1e6;
    struct kbench_point p = {.family = "scores",
                             .kernel = kernel,
                             .dtype = "F32",
                             .shape = shape,
                             .rows = BLOCKS,
                             .batch = 1,
                             .context = TOKENS,
                             .bytes = bytes,
                             .flops = flops,
                             .distinct = (double)SETS * BLOCKS * PLANE * sizeof(float),
                             .goal = goal_us > 0,
                             .goal_us = goal_us - floor};
    s->scratch = kbench_reserve(b, b->k->ops->score_scratch_bytes(b->k, &s->dev, BLOCKS));
    check(s, kernel);
    kbench_measure(b, &p, SETS, call_score, s);
    kbench_print(b, &p);
    kbench_free(b, s->scratch);
}

static const double plane_bytes = (double)BLOCKS * 4 * COLS * sizeof(float);

/* Without weights: `mean` reads the quarters, the others their two rows. */
static void point_plain(struct scores *s, enum kern_score kind, const char *name) {
    s->host = s->dev = (struct kern_scorer){
        .kind = kind, .cols = COLS, .n_queries = KERN_STATE_QUERIES, .normed = true};
    point(s, name, "2048x4096", kind == KERN_SCORE_MEAN ? plane_bytes : plane_bytes / 2, 0, 0);
}

static void point_late(struct scores *s) {
    const size_t n = (size_t)HEADS * HEAD_DIM * COLS;
    const float scale = 3 / sqrtf(COLS);
    s->host = s->dev = (struct kern_scorer){.kind = KERN_SCORE_LATE,
                                            .cols = COLS,
                                            .n_queries = KERN_STATE_QUERIES,
                                            .normed = true,
                                            .n_heads = HEADS,
                                            .head_dim = HEAD_DIM};
    s->dev.a = put(s->b, &s->host.a, n, scale);
    s->dev.b = put(s->b, &s->host.b, n, scale);
    point(s, "score late", "2048x4096 4x64", plane_bytes + 2.0 * (double)n * sizeof(float),
          2.0 * 4 * BLOCKS * (double)n, 300);
    kbench_free(s->b, (void *)(uintptr_t)s->dev.a);
    kbench_free(s->b, (void *)(uintptr_t)s->dev.b);
    free((void *)(uintptr_t)s->host.a), free((void *)(uintptr_t)s->host.b);
}

static void point_mlp(struct scores *s) {
    const size_t n = (size_t)COLS * 2 * COLS;
    struct kern_scorer *h = &s->host, *d = &s->dev;
    *h = *d = (struct kern_scorer){.kind = KERN_SCORE_MLP,
                                   .cols = COLS,
                                   .n_queries = KERN_STATE_QUERIES,
                                   .normed = true,
                                   .width = COLS};
    d->w1 = put(s->b, &h->w1, n, 2 / sqrtf(2 * COLS));
    d->b1 = put(s->b, &h->b1, COLS, 1);
    d->w2 = put(s->b, &h->w2, COLS, 3 / sqrtf(COLS));
    d->b2 = put(s->b, &h->b2, 1, 1);
    d->ln_weight = put(s->b, &h->ln_weight, (size_t)2 * COLS, 2);
    d->ln_bias = put(s->b, &h->ln_bias, (size_t)2 * COLS, 1);
    point(s, "score mlp", "2048x4096 4096", plane_bytes + (double)n * sizeof(float),
          2.0 * BLOCKS * COLS * COLS, 3000);
    const float *dev[] = {d->w1, d->b1, d->w2, d->b2, d->ln_weight, d->ln_bias};
    const float *host[] = {h->w1, h->b1, h->w2, h->b2, h->ln_weight, h->ln_bias};
    for (size_t i = 0; i < sizeof dev / sizeof *dev; i++) {
        kbench_free(s->b, (void *)(uintptr_t)dev[i]);
        free((void *)(uintptr_t)host[i]);
    }
}

/* ---- note_states ---- */

struct notes {
    struct kbench *b;
    struct scores *s;
    const struct kern_note *note;
    const float *x;
    bool bounds;
};

static int call_note(void *arg, int i) {
    struct notes *n = arg;
    struct kern_plane plane = plane_at(n->s->arena);
    plane.has_minmax = plane.has_spread = n->bounds;
    return n->b->k->ops->note_states(n->b->k, 1, n->note, n->x, &plane,
                                     n->s->page + (size_t)(i % SETS) * BLOCKS, BLOCKS,
                                     n->s->dev_ring);
}

/* Bounds of a few columns, gone on with from what the block held at place `first`. */
static void check_bounds(const float *before, const float *got, const float *x, int rows,
                         int first) {
    for (int c = 0; c < NORM_CHECKED; c++) {
        double low = (double)before[4 * COLS + c], high = (double)before[5 * COLS + c];
        double mean = (double)before[6 * COLS + c], square = (double)before[7 * COLS + c];
        for (int i = 0; i < rows && first + i < KERN_BLOCK; i++) {
            double m = 0, v = 0;
            for (int k = 0; k < COLS; k++) m += (double)x[i * COLS + k] / COLS;
            for (int k = 0; k < COLS; k++) {
                double d = (double)x[i * COLS + k] - m;
                v += d * d / COLS;
            }
            double y = ((double)x[i * COLS + c] - m) / sqrt(v + 1e-5), off = y - mean;
            low = fmin(low, y), high = fmax(high, y);
            mean += off / (first + i + 1);
            square += off * (y - mean);
        }
        const double want[] = {low, high, mean, square};
        for (int k = 0; k < 4; k++)
            kbench_check("bounds are wrong", k * COLS + c, (double)got[(4 + k) * COLS + c], want[k],
                         1e-5 * (1 + fabs(want[k])));
    }
}

/* Rows of one sequence that a pass has just made, in a block's middle. */
static void point_note(struct scores *s, int rows, bool bounds) {
    struct kbench *b = s->b;
    const struct kern_note note = {.position = 1000, .n_rows = rows};
    float *host = kbench_floats(b, (size_t)rows * COLS, 1), *got = kbench_host(PLANE * 4);
    struct notes n = {.b = b,
                      .s = s,
                      .note = kbench_put(b, &note, sizeof note),
                      .x = kbench_put(b, host, (size_t)rows * COLS * sizeof(float)),
                      .bounds = bounds};
    const int block = note.position / KERN_BLOCK,
              quarter = note.position % KERN_BLOCK / KERN_QUARTER;
    const int first = note.position % KERN_QUARTER;
    /* Sums go on from what the planes held: from the host's again, whatever ran before. */
    kbench_must(b,
                b->k->ops->upload(b->k, s->arena + (size_t)block * PLANE,
                                  s->planes + (size_t)block * PLANE, PLANE * sizeof(float), NULL),
                NULL, "upload:");
    kbench_must(b, call_note(&n, 0), NULL, "note_states:");
    kbench_get(b, got, s->arena + (size_t)block * PLANE, PLANE * sizeof(float));
    for (int c = 0; c < COLS; c++) {
        float want = s->planes[(size_t)block * PLANE + (size_t)quarter * COLS + (size_t)c];
        for (int i = 0; i < rows && first + i < KERN_QUARTER; i++) want += host[i * COLS + c];
        kbench_check("note_states is wrong", c, (double)got[quarter * COLS + c], (double)want, 0);
    }
    if (bounds)
        check_bounds(s->planes + (size_t)block * PLANE, got, host, rows,
                     note.position % KERN_BLOCK);
    struct kbench_point p = {.family = "scores",
                             .kernel = bounds ? "note_states, bounds" : "note_states",
                             .dtype = "F32",
                             .shape = "4096",
                             .rows = rows,
                             .batch = 1,
                             .bytes = (double)(rows + rows / KERN_QUARTER + 2 +
                                               (bounds ? 8 * (rows / KERN_BLOCK + 1) : 0)) *
                                      COLS * 4,
                             .distinct = (double)SETS * rows / KERN_QUARTER * COLS * 4};
    kbench_measure(b, &p, SETS, call_note, &n);
    kbench_print(b, &p);
    kbench_free(b, (void *)(uintptr_t)n.note);
    kbench_free(b, (void *)(uintptr_t)n.x);
    free(host), free(got);
}

void kbench_scores(struct kbench *b) {
    struct scores s = open_scores(b);
    point_plain(&s, KERN_SCORE_MEAN, "score mean");
    point_plain(&s, KERN_SCORE_MINMAX, "score minmax");
    point_plain(&s, KERN_SCORE_BOUND, "score bound");
    point_late(&s);
    point_mlp(&s);
    point_note(&s, 512, false);
    point_note(&s, 5, false);
    point_note(&s, 512, true);
    point_note(&s, 5, true);
    void *const dev[] = {s.arena, s.page, s.dev_ring, s.out};
    for (size_t i = 0; i < sizeof dev / sizeof *dev; i++) kbench_free(b, dev[i]);
    free(s.planes), free(s.ring);
}
