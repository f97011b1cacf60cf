/* States of the select layer and scores of blocks: arguments checked, then threads over columns
 * (states: a column's sums are one thread's) or over blocks (scores). */
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
    /* A few rows of decoding are done sooner than a team is woken. */
    if (work * plane->cols < 1 << 16) note_share(&j, 0, 1);
    else threads_run(cpu_ctx(k)->threads, note_share, &j);
    return 0;
}

/* ---- Scores -------------------------------------------------------------------------------- */

static void check_scorer(const struct kern_scorer *s) {
    ASSERT(s && (unsigned)s->kind < KERN_N_SCORES && s->cols > 0 && s->cols <= CPU_MAX_COLS);
    ASSERT(s->n_queries >= 1 && s->n_queries <= KERN_STATE_QUERIES);
    if (s->kind == KERN_SCORE_LATE)
        ASSERT(s->n_heads > 0 && s->head_dim > 0 && s->n_heads <= CPU_MAX_COLS / s->head_dim &&
               !s->by_first);
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
    if (s->kind != KERN_SCORE_MEAN) threads_run(c->threads, rows_share, &j);
    threads_run(c->threads, blocks_share, &j);
    return 0;
}
