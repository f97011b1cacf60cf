/* States of the select layer and scores of blocks: arguments checked, then threads over columns
 * (states: a column's sums are one thread's) or over blocks (bounds of normed states, scores). */
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/score.h"

/* ---- States -------------------------------------------------------------------------------- */

struct note_job {
    int n;
    const struct kern_note *notes;
    const float *x;
    const struct kern_plane *plane;
    const int32_t *page;
    int capacity;
    float *ring;
};

/* Columns [begin, end) of one state. */
static void note_row(const struct note_job *j, const struct kern_note *note, int i, int begin,
                     int end) {
    const size_t cols = (size_t)j->plane->cols, bytes = (size_t)(end - begin) * sizeof(float);
    const int64_t position = (int64_t)note->position + i;
    const int64_t block = position / KERN_BLOCK;
    if (position < 0 || block >= j->capacity) return;
    const float *x = j->x + ((size_t)note->first_row + (size_t)i) * cols;
    const size_t entry = (size_t)note->seq * (size_t)j->capacity + (size_t)block;
    float *plane = score_plane(j->plane, j->page[entry]);
    float *sum = plane + (size_t)(position % KERN_BLOCK / KERN_QUARTER) * cols;
    if (position % KERN_QUARTER == 0) memcpy(sum + begin, x + begin, bytes);
    else
        for (int c = begin; c < end; c++) sum[c] += x[c];
    if (j->plane->has_first && position % KERN_BLOCK == 0)
        memcpy(plane + 4 * cols + begin, x + begin, bytes);
    const size_t slot =
        (size_t)note->ring * KERN_STATE_QUERIES + (size_t)(position % KERN_STATE_QUERIES);
    memcpy(j->ring + slot * cols + begin, x + begin, bytes);
}

static void note_share(void *arg, int idx, int n_threads) {
    const struct note_job *j = arg;
    int begin, end;
    threads_split(j->plane->cols, 64, idx, n_threads, &begin, &end);
    if (begin >= end) return;
    for (int k = 0; k < j->n; k++)
        for (int i = 0; j->notes[k].seq >= 0 && i < j->notes[k].n_rows; i++)
            note_row(j, &j->notes[k], i, begin, end);
}

/* ---- Bounds of normed states ---- */

/* Mean and 1 / deviation of a state. */
struct norm {
    double mean, scale;
};
static struct norm norm_of(const float *x, int cols) {
    double sum = 0, square = 0;
    for (int c = 0; c < cols; c++) sum += (double)x[c];
    const double mean = sum / cols;
    for (int c = 0; c < cols; c++) square += ((double)x[c] - mean) * ((double)x[c] - mean);
    return (struct norm){mean, 1 / sqrt(square / cols + 1e-5)};
}

static float normed(const struct norm *m, float x) {
    return (float)(((double)x - m->mean) * m->scale);
}

/* NaN stays. */
static void widen(float *low, float *high, const float *x, const struct norm *m, int cols,
                  bool is_first) {
    for (int c = 0; c < cols; c++) {
        const float y = normed(m, x[c]);
        if (is_first || y < low[c] || isnan(y)) low[c] = y;
        if (is_first || y > high[c] || isnan(y)) high[c] = y;
    }
}

/* Token n of the block, counted from 1. */
static void spread(float *mean, float *square, const float *x, const struct norm *m, int cols,
                   int n) {
    for (int c = 0; c < cols; c++) {
        const float y = normed(m, x[c]), before = n == 1 ? 0.f : mean[c], off = y - before;
        mean[c] = n == 1 ? y : before + off / (float)n;
        square[c] = n == 1 ? 0 * y : square[c] + off * (y - mean[c]);
    }
}

/* Positions [from, to) of one block. */
static void bound_block(const struct note_job *j, const struct kern_note *note, int64_t from,
                        int64_t to) {
    const size_t cols = (size_t)j->plane->cols;
    const size_t entry = (size_t)note->seq * (size_t)j->capacity + (size_t)(from / KERN_BLOCK);
    float *plane = score_plane(j->plane, j->page[entry]);
    float *low = plane + (size_t)kern_plane_minmax(j->plane) * cols;
    float *mean = plane + (size_t)kern_plane_spread(j->plane) * cols;
    for (int64_t at = from; at < to; at++) {
        const float *x = j->x + (size_t)(note->first_row + (at - note->position)) * cols;
        const struct norm m = norm_of(x, j->plane->cols);
        const int place = (int)(at % KERN_BLOCK);
        if (j->plane->has_minmax) widen(low, low + cols, x, &m, j->plane->cols, place == 0);
        if (j->plane->has_spread) spread(mean, mean + cols, x, &m, j->plane->cols, place + 1);
    }
}

/* Every n_threads-th block of all notes. */
static void bounds_share(void *arg, int idx, int n_threads) {
    const struct note_job *j = arg;
    int unit = 0;
    for (int k = 0; k < j->n; k++) {
        const struct kern_note *note = &j->notes[k];
        const int64_t most = (int64_t)j->capacity * KERN_BLOCK;
        int64_t at = note->position < 0 ? 0 : note->position;
        int64_t end = (int64_t)note->position + note->n_rows;
        if (note->seq < 0) continue;
        if (end > most) end = most;
        for (int64_t to; at < end; at = to) {
            to = (at / KERN_BLOCK + 1) * KERN_BLOCK;
            if (to > end) to = end;
            if (unit++ % n_threads == idx) bound_block(j, note, at, to);
        }
    }
}

/* ---- The operation ---- */

int kern_cpu_note_states(struct kern *k, int n, const struct kern_note *notes, const float *x,
                         const struct kern_plane *plane, const int32_t *page, int capacity,
                         float *ring) {
    ASSERT(n >= 0 && n <= KERN_MAX_ROWS && capacity >= 0);
    ASSERT(plane && plane->base && plane->cols > 0 && plane->cols <= CPU_MAX_COLS);
    ASSERT(plane->plane_offset % KERN_ACT_ALIGN == 0 && plane->page_stride % sizeof(float) == 0);
    if (n == 0) return 0;
    ASSERT(notes && x && page && ring);
    struct note_job j = {n, notes, x, plane, page, capacity, ring};
    long long work = 0;
    for (int i = 0; i < n; i++) work += notes[i].seq >= 0 ? notes[i].n_rows : 0;
    const bool bounds = plane->has_minmax || plane->has_spread;
    /* A few rows of decoding are done sooner than a team is woken. */
    if (work * plane->cols < 1 << 16) {
        note_share(&j, 0, 1);
        if (bounds) bounds_share(&j, 0, 1);
        return 0;
    }
    threads_run(cpu_ctx(k)->threads, note_share, &j);
    if (bounds) threads_run(cpu_ctx(k)->threads, bounds_share, &j);
    return 0;
}

/* ---- Scores -------------------------------------------------------------------------------- */

static void check_scorer(const struct kern_scorer *s) {
    ASSERT(s && (unsigned)s->kind < KERN_N_SCORES && s->cols > 0 && s->cols <= CPU_MAX_COLS);
    ASSERT(s->n_queries >= 1 && s->n_queries <= KERN_STATE_QUERIES);
    if (s->kind == KERN_SCORE_LATE)
        ASSERT(s->n_heads > 0 && s->head_dim > 0 && s->n_heads <= CPU_MAX_COLS / s->head_dim &&
               !s->by_first);
    ASSERT(!s->by_quarter || (s->kind == KERN_SCORE_LATE) ||
           (s->kind == KERN_SCORE_MEAN && !s->by_first));
    if (s->kind == KERN_SCORE_MINMAX || s->kind == KERN_SCORE_BOUND)
        ASSERT(s->normed && !s->by_first);
    if (s->kind == KERN_SCORE_MLP)
        ASSERT(s->width > 0 && s->width <= CPU_MAX_COLS && !s->ln_weight == !s->ln_bias);
}

size_t kern_cpu_score_scratch_bytes(const struct kern *k, const struct kern_scorer *s,
                                    int n_blocks) {
    check_scorer(s);
    ASSERT(n_blocks >= 0);
    const struct cpu_ctx *c = cpu_ctx(k);
    return c->isa->score->scratch_bytes(s, threads_n(c->threads));
}

static void rows_share(void *arg, int idx, int n_threads) {
    const struct score_job *j = arg;
    j->isa->rows(j, idx, n_threads);
}

static void blocks_share(void *arg, int idx, int n_threads) {
    const struct score_job *j = arg;
    j->isa->blocks(j, idx, n_threads);
}

int kern_cpu_score(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                   void *scratch, float *out) {
    const struct cpu_ctx *c = cpu_ctx(k);
    check_scorer(s);
    ASSERT(v && v->n_tokens >= 0 && v->plane.cols == s->cols);
    if (v->n_tokens == 0) return 0;
    ASSERT(v->plane.base && v->page && v->ring && out);
    ASSERT(scratch && (uintptr_t)scratch % KERN_ACT_ALIGN == 0);
    ASSERT(!s->by_first || v->plane.has_first);
    ASSERT(s->kind != KERN_SCORE_MINMAX || v->plane.has_minmax);
    ASSERT(s->kind != KERN_SCORE_BOUND || v->plane.has_spread);
    if (s->kind == KERN_SCORE_LATE) ASSERT(s->a && s->b);
    if (s->kind == KERN_SCORE_MLP) ASSERT(s->w1 && s->b1 && s->w2 && s->b2);
    struct score_job j = {.isa = c->isa->score,
                          .s = s,
                          .v = v,
                          .n_blocks = (int)(((int64_t)v->n_tokens + KERN_BLOCK - 1) / KERN_BLOCK),
                          .n_queries = score_min(s->n_queries, v->n_tokens),
                          .scratch = scratch,
                          .out = out};
    j.isa->queries(&j);
    if (kern_score_has_weights(s->kind)) threads_run(c->threads, rows_share, &j);
    threads_run(c->threads, blocks_share, &j);
    return 0;
}
