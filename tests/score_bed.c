#include "tests/score_bed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

static float signed_at(uint64_t seed, uint64_t i) {
    return rng_uniform(seed, i, RNG_TEST, 0) * 2 - 1;
}

static float *floats(uint64_t seed, size_t n, double scale) {
    float *x = malloc(n * sizeof *x + 4);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = (float)((double)signed_at(seed, i) * scale);
    return x;
}

/* ---- States and pages ---- */

struct score_bed score_bed_open(int n_tokens, int cols, bool has_first, float massive,
                                uint64_t seed) {
    return score_bed_open_bounds(n_tokens, cols, has_first, false, false, massive, seed);
}

struct score_bed score_bed_open_bounds(int n_tokens, int cols, bool has_first, bool has_minmax,
                                       bool has_spread, float massive, uint64_t seed) {
    struct score_bed b = {.n_tokens = n_tokens, .cols = cols, .has_first = has_first};
    b.n_blocks = (n_tokens + KERN_BLOCK - 1) / KERN_BLOCK;
    b.n_pages = b.n_blocks + 3;
    b.x = floats(seed, (size_t)n_tokens * (size_t)cols, 1.5);
    for (int i = 0; i < n_tokens; i++)
        b.x[(size_t)i * (size_t)cols + (size_t)(cols / 3)] *= massive;
    b.plane = (struct kern_plane){.plane_offset = 192,
                                  .cols = cols,
                                  .has_first = has_first,
                                  .has_minmax = has_minmax,
                                  .has_spread = has_spread};
    int rows = 4 + has_first + 2 * has_minmax + 2 * has_spread;
    b.plane.page_stride = (192 + (size_t)rows * (size_t)cols * 4 + 64 + 1023) / 1024 * 1024;
    b.arena_bytes = b.plane.page_stride * (size_t)b.n_pages;
    b.arena = aligned_alloc(64, b.arena_bytes);
    b.page = malloc((size_t)b.n_pages * sizeof *b.page);
    b.ring = aligned_alloc(64, (size_t)KERN_STATE_QUERIES * (size_t)cols * 4);
    assert_true(b.arena && b.page && b.ring);
    memset(b.arena, 0xFF, b.arena_bytes);
    memset(b.ring, 0xFF, (size_t)KERN_STATE_QUERIES * (size_t)cols * 4);
    b.plane.base = b.arena;
    for (int i = 0; i < b.n_pages; i++) b.page[i] = i;
    for (int i = b.n_pages - 1; i > 0; i--) {
        int o = (int)(rng_u32(seed + 1, (uint64_t)i, RNG_TEST, 0) % (uint32_t)(i + 1));
        int32_t t = b.page[i];
        b.page[i] = b.page[o];
        b.page[o] = t;
    }
    return b;
}

void score_bed_close(struct score_bed *b) {
    free(b->x), free(b->arena), free(b->page), free(b->ring);
}

void score_bed_note(struct score_bed *b, struct kern *k, int from, int to, int most,
                    uint64_t seed) {
    for (int at = from, n; at < to; at += n) {
        n = 1 + (int)(rng_u32(seed, (uint64_t)at, RNG_TEST, 0) % (uint32_t)most);
        if (n > to - at) n = to - at;
        struct kern_note note = {.seq = 0, .first_row = at, .position = at, .n_rows = n};
        assert_int_equal(
            k->ops->note_states(k, 1, &note, b->x, &b->plane, b->page, b->n_blocks, b->ring), 0);
    }
}

static void norm(double *x, int n) {
    double m = 0, v = 0;
    for (int i = 0; i < n; i++) m += x[i];
    m /= n;
    for (int i = 0; i < n; i++) v += (x[i] - m) * (x[i] - m);
    v = sqrt(v / n + 1e-5);
    for (int i = 0; i < n; i++) x[i] = (x[i] - m) / v;
}

/* Mean of the states of [from, to). */
static double *state(const struct score_bed *b, bool normed, int from, int to) {
    double *r = calloc((size_t)b->cols, sizeof *r);
    assert_non_null(r);
    for (int t = from; t < to; t++)
        for (int i = 0; i < b->cols; i++)
            r[i] += (double)b->x[(size_t)t * (size_t)b->cols + (size_t)i];
    for (int i = 0; i < b->cols; i++) r[i] /= to - from;
    if (normed) norm(r, b->cols);
    return r;
}

/* Least, largest, mean and summed squares about it of a block's normed states, [4][cols]. */
static double *bounds(const struct score_bed *b, int from, int to) {
    const int cols = b->cols;
    double *x[KERN_BLOCK], *out = calloc((size_t)4 * (size_t)cols, sizeof *out);
    assert_non_null(out);
    for (int t = from; t < to; t++) x[t - from] = state(b, true, t, t + 1);
    for (int i = 0; i < cols; i++) {
        double low = INFINITY, high = -INFINITY, sum = 0, square = 0;
        for (int t = 0; t < to - from; t++) {
            low = fmin(low, x[t][i]);
            high = fmax(high, x[t][i]);
            sum += x[t][i] / (to - from);
        }
        for (int t = 0; t < to - from; t++) square += (x[t][i] - sum) * (x[t][i] - sum);
        const double all[4] = {low, high, sum, square};
        for (int k = 0; k < 4; k++) out[k * cols + i] = all[k];
    }
    for (int t = from; t < to; t++) free(x[t - from]);
    return out;
}

static float *bounds_in(const struct score_bed *b, uint8_t *arena, int block, int k) {
    uint8_t *page = arena + (size_t)b->page[block] * b->plane.page_stride + b->plane.plane_offset;
    int row = 4 + b->has_first + (k < 2 ? k : 2 * b->plane.has_minmax + k - 2);
    return (float *)(void *)page + (size_t)row * (size_t)b->cols;
}

static bool has_bounds(const struct score_bed *b, int k) {
    return k < 2 ? b->plane.has_minmax : b->plane.has_spread;
}

/* Of the blocks that tokens before `to` reach. */
static void naive_bounds(struct score_bed *b, int to) {
    for (int block = 0; block * 64 < to; block++) {
        double *of = bounds(b, block * 64, block * 64 + 64 < to ? block * 64 + 64 : to);
        for (int k = 0; k < 4; k++)
            for (int i = 0; has_bounds(b, k) && i < b->cols; i++)
                bounds_in(b, b->arena, block, k)[i] = (float)of[k * b->cols + i];
        free(of);
    }
}

void score_bed_assert_bounds(const struct score_bed *b, uint8_t *arena, double tolerance,
                             const char *what) {
    static const char *const names[] = {"least", "largest", "mean", "sum of squares"};
    const double most = sqrt(b->cols); /* a normed state is no longer in any direction */
    for (int block = 0; block < b->n_blocks; block++)
        for (int k = 0; k < 4; k++)
            for (int i = 0; has_bounds(b, k) && i < b->cols; i++) {
                float *got = &bounds_in(b, arena, block, k)[i];
                float want = bounds_in(b, b->arena, block, k)[i];
                double slack = tolerance * most * (k == 3 ? 64 * most : 1);
                if (memcmp(got, &want, 4) != 0 && !(fabs((double)*got - (double)want) <= slack))
                    fail_msg("%s: %s of column %d, block %d is %.9g, not %.9g", what, names[k], i,
                             block, (double)*got, (double)want);
                *got = want;
            }
}

void score_bed_naive_note(struct score_bed *b, int from, int to) {
    if (b->plane.has_minmax || b->plane.has_spread) naive_bounds(b, to);
    const size_t cols = (size_t)b->cols;
    for (int t = from; t < to; t++) {
        uint8_t *page = b->arena + (size_t)b->page[t / 64] * b->plane.page_stride;
        float *plane = (float *)(void *)(page + b->plane.plane_offset);
        float *quarter = plane + (size_t)(t % 64 / 16) * cols;
        for (size_t i = 0; i < cols; i++) {
            float x = b->x[(size_t)t * cols + i];
            quarter[i] = t % 16 ? quarter[i] + x : x;
            if (b->has_first && t % 64 == 0) plane[4 * cols + i] = x;
            b->ring[(size_t)(t % 32) * cols + i] = x;
        }
    }
}

struct kern_score_view score_bed_view(const struct score_bed *b) {
    return (struct kern_score_view){
        .plane = b->plane, .page = b->page, .ring = b->ring, .n_tokens = b->n_tokens};
}

/* ---- Scorers ---- */

void score_bed_scorer(struct kern_scorer *s, uint64_t seed) {
    const size_t cols = (size_t)s->cols, n = (size_t)s->n_heads * (size_t)s->head_dim;
    const size_t width = (size_t)s->width;
    if (s->kind == KERN_SCORE_LATE) {
        s->a = floats(seed, n * cols, 3 / sqrt((double)cols));
        s->b = floats(seed + 1, n * cols, 3 / sqrt((double)cols));
    }
    if (s->kind != KERN_SCORE_MLP) return;
    s->w1 = floats(seed + 2, width * 2 * cols, 2 / sqrt(2 * (double)cols));
    s->b1 = floats(seed + 3, width, 1);
    s->w2 = floats(seed + 4, width, 3 / sqrt((double)width));
    s->b2 = floats(seed + 5, 1, 1);
    if (!s->ln_weight) return;
    s->ln_weight = floats(seed + 6, 2 * cols, 2);
    s->ln_bias = floats(seed + 7, 2 * cols, 1);
}

int score_bed_element(const struct score_bed *b, const struct kern_scorer *s, int *n) {
    bool minmax = s->kind == KERN_SCORE_MINMAX, bound = s->kind == KERN_SCORE_BOUND;
    int bounds = 4 + b->has_first;
    int row = bound ? bounds + 2 * b->plane.has_minmax : minmax ? bounds : s->by_first ? 4 : 2;
    *n = minmax || bound ? 2 : 1;
    return row * b->cols + b->cols / 2;
}

void score_bed_free_scorer(struct kern_scorer *s) {
    const float *all[] = {s->a, s->b, s->w1, s->b1, s->w2, s->b2, s->ln_weight, s->ln_bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free((void *)(uintptr_t)all[i]);
}

/* ---- The law ---- */

static double product(const float *w, const double *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)w[i] * x[i];
    return sum;
}

static double naive_late(const struct score_bed *b, const struct kern_scorer *s, double **q,
                         int n_queries, int from, int end) {
    const int cols = s->cols;
    double sum = 0;
    for (; from < end; from += 16) {
        double *r = state(b, s->normed, from, from + 16 < end ? from + 16 : end);
        for (int h = 0; h < s->n_heads; h++) {
            double dots[KERN_STATE_QUERIES] = {0};
            for (int d = 0; d < s->head_dim; d++) {
                size_t at = ((size_t)h * (size_t)s->head_dim + (size_t)d) * (size_t)cols;
                double br = product(s->b + at, r, cols);
                for (int t = 0; t < n_queries; t++) dots[t] += product(s->a + at, q[t], cols) * br;
            }
            for (int t = 0; t < n_queries; t++) sum += exp(dots[t] / sqrt(s->head_dim));
        }
        free(r);
    }
    return log(sum);
}

static double naive_mlp(const struct kern_scorer *s, const double *q, const double *r) {
    const int n = 2 * s->cols;
    double *x = calloc((size_t)n, sizeof *x), out = (double)s->b2[0];
    assert_non_null(x);
    for (int i = 0; i < s->cols; i++) x[i] = q[i] * r[i], x[s->cols + i] = q[i];
    if (s->ln_weight) {
        norm(x, n);
        for (int i = 0; i < n; i++) x[i] = x[i] * (double)s->ln_weight[i] + (double)s->ln_bias[i];
    }
    for (int w = 0; w < s->width; w++) {
        double y = product(s->w1 + (size_t)w * (size_t)n, x, n) + (double)s->b1[w];
        out += (double)s->w2[w] * y * 0.5 * (1 + erf(y / sqrt(2)));
    }
    free(x);
    return out;
}

static void naive_corner(const struct score_bed *b, enum kern_score kind, const double *q, int from,
                         int to, double *r) {
    double *of = bounds(b, from, to);
    for (int i = 0, n = b->cols; i < n; i++) {
        const double s = sqrt(of[3 * n + i] / (to - from));
        if (kind == KERN_SCORE_MINMAX) r[i] = fmax(q[i] * of[i], q[i] * of[n + i]) / q[i];
        else r[i] = of[2 * n + i] + (q[i] > 0 ? s : -s);
    }
    free(of);
}

void score_bed_naive(const struct score_bed *b, const struct kern_scorer *s, double *out) {
    int n = s->n_queries < b->n_tokens ? s->n_queries : b->n_tokens, cols = b->cols;
    double *q[KERN_STATE_QUERIES], weight[KERN_STATE_QUERIES], all = 0;
    for (int t = 0; t < n; t++)
        q[t] = state(b, s->normed, b->n_tokens - n + t, b->n_tokens - n + t + 1);
    double *mean = calloc((size_t)cols, sizeof *mean);
    assert_non_null(mean);
    for (int t = 0; t < n; t++) {
        weight[t] = 0;
        for (int i = 0; i < cols; i++)
            weight[t] += (q[t][i] - q[n - 1][i]) * q[n - 1][i] / sqrt(cols);
        all += weight[t] = exp(weight[t]);
    }
    for (int t = 0; t < n; t++)
        for (int i = 0; i < cols; i++) mean[i] += weight[t] / all * q[t][i];
    for (int k = 0; k < score_bed_n(b, s); k++) {
        int size = s->by_quarter ? 16 : 64, from = k * size;
        int to = from + size < b->n_tokens ? from + size : b->n_tokens;
        out[k] = -INFINITY;
        if (from >= to) continue;
        double *r = state(b, s->normed, from, s->by_first ? from + 1 : to);
        if (s->kind == KERN_SCORE_LATE) out[k] = naive_late(b, s, q, n, from, to);
        else if (s->kind == KERN_SCORE_MLP) out[k] = naive_mlp(s, mean, r);
        else {
            if (!kern_score_has_weights(s->kind) && s->kind != KERN_SCORE_MEAN)
                naive_corner(b, s->kind, mean, from, to, r);
            out[k] = 0;
            for (int i = 0; i < cols; i++) out[k] += mean[i] * r[i] / sqrt(cols);
        }
        free(r);
    }
    for (int t = 0; t < n; t++) free(q[t]);
    free(mean);
}

/* ---- Cases ---- */

const struct score_case score_cases[] = {
    {KERN_SCORE_MEAN, 64, 640, 1, 0, 0, 0, true, false, false, 1},
    {KERN_SCORE_MEAN, 1, 70, 3, 0, 0, 0, false, true, false, 1},
    {KERN_SCORE_MEAN, 77, 1, 32, 0, 0, 0, true, true, false, 1},
    {KERN_SCORE_MEAN, 333, 1100, 32, 0, 0, 0, true, false, false, 100},
    {KERN_SCORE_MEAN, 576, 200, 7, 0, 0, 0, false, false, false, 1},
    {KERN_SCORE_LATE, 64, 640, 32, 4, 16, 0, true, false, false, 1},
    {KERN_SCORE_LATE, 100, 77, 32, 3, 5, 0, true, false, false, 1},
    {KERN_SCORE_LATE, 33, 1, 32, 1, 1, 0, false, false, false, 1},
    {KERN_SCORE_LATE, 576, 1090, 32, 4, 64, 0, true, false, false, 50},
    {KERN_SCORE_LATE, 160, 19, 32, 2, 64, 0, true, false, false, 1},
    {KERN_SCORE_LATE, 129, 400, 9, 7, 24, 0, false, false, false, 1},
    {KERN_SCORE_MLP, 64, 640, 1, 0, 0, 64, true, false, true, 1},
    {KERN_SCORE_MLP, 100, 77, 32, 0, 0, 33, true, true, true, 1},
    {KERN_SCORE_MLP, 35, 1, 8, 0, 0, 1, true, false, false, 1},
    {KERN_SCORE_MLP, 192, 1100, 17, 0, 0, 300, false, false, true, 1},
    {KERN_SCORE_MLP, 576, 1090, 32, 0, 0, 65, true, false, true, 50},
    {KERN_SCORE_MLP, 130, 450, 1, 0, 0, 96, true, true, false, 1},
    {KERN_SCORE_MINMAX, 64, 640, 32, 0, 0, 0, true, false, false, 1},
    {KERN_SCORE_MINMAX, 77, 1, 3, 0, 0, 0, true, false, false, 1},
    {KERN_SCORE_MINMAX, 333, 1100, 1, 0, 0, 0, true, false, false, 100},
    {KERN_SCORE_BOUND, 576, 200, 32, 0, 0, 0, true, false, false, 1},
    {KERN_SCORE_BOUND, 35, 65, 7, 0, 0, 0, true, false, false, 1},
    {KERN_SCORE_BOUND, 130, 1090, 32, 0, 0, 0, true, false, false, 50},
};
const int n_score_cases = (int)(sizeof score_cases / sizeof *score_cases);

const char *score_case_name(const struct score_case *c) {
    static const char *const kinds[] = {"mean", "late", "mlp", "minmax", "bound"};
    static char text[160];
    snprintf(text, sizeof text, "%s of %d tokens of %d, %d queries, %dx%d, width %d%s%s%s",
             kinds[c->kind], c->n_tokens, c->cols, c->n_queries, c->n_heads, c->head_dim, c->width,
             c->normed ? ", normed" : "", c->by_first ? ", by first" : "",
             c->layernorm ? ", LayerNorm" : "");
    return text;
}

void score_bed_case(const struct score_case *c, struct score_bed *b, struct kern_scorer *s) {
    static const float asked = 0;
    /* Planes with an odd number of columns have the other's bounds, too. */
    bool minmax = c->kind == KERN_SCORE_MINMAX, bound = c->kind == KERN_SCORE_BOUND;
    bool both = (minmax || bound) && c->cols % 2;
    *b = score_bed_open_bounds(c->n_tokens, c->cols, c->by_first, minmax || both, bound || both,
                               c->massive, 31 + (uint64_t)c->cols);
    *s = (struct kern_scorer){.kind = c->kind,
                              .cols = c->cols,
                              .n_queries = c->n_queries,
                              .normed = c->normed,
                              .by_first = c->by_first,
                              .n_heads = c->n_heads,
                              .head_dim = c->head_dim,
                              .width = c->width,
                              .ln_weight = c->layernorm ? &asked : NULL};
    score_bed_scorer(s, 17 + (uint64_t)c->cols);
}
