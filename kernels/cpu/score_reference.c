/* Scores of blocks in double, term by term as kernels.h writes them: the twin of score.c and of the
 * CUDA backend. */
#include <math.h>

#include "base/threads.h"
#include "kernels/cpu/score.h"

/* What the functions share, in doubles: queries [32][cols], their average [cols], LATE: A q
 * [32][heads * head_dim]; then for each thread r [cols], features [2 cols], B r [heads * head_dim]
 * and the terms of one block's logsumexp [4][32][heads]. */
struct layout {
    double *queries, *average, *aq, *own;
};
static int projected(const struct kern_scorer *s) {
    return s->kind == KERN_SCORE_LATE ? s->n_heads * s->head_dim : 0;
}
static size_t own_doubles(const struct kern_scorer *s) {
    size_t terms = s->kind == KERN_SCORE_LATE ? (size_t)4 * KERN_STATE_QUERIES * s->n_heads : 0;
    return 3 * (size_t)s->cols + (size_t)projected(s) + terms;
}
static size_t scratch_bytes(const struct kern_scorer *s, int n_threads) {
    size_t shared = (size_t)(KERN_STATE_QUERIES + 1) * (size_t)s->cols +
                    (size_t)KERN_STATE_QUERIES * (size_t)projected(s);
    return (shared + (size_t)n_threads * own_doubles(s)) * sizeof(double);
}
static struct layout layout(const struct score_job *j) {
    struct layout l = {.queries = j->scratch};
    l.average = l.queries + (size_t)KERN_STATE_QUERIES * (size_t)j->s->cols;
    l.aq = l.average + j->s->cols;
    l.own = l.aq + (size_t)KERN_STATE_QUERIES * (size_t)projected(j->s);
    return l;
}

static void standardise(double *x, int n) {
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++) mean += x[i] / n;
    for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
    for (int i = 0; i < n; i++) x[i] = (x[i] - mean) / sqrt(square + 1e-5);
}

static double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static double dot_weight(const float *w, const double *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)w[i] * x[i];
    return sum;
}

/* ---- Queries ---- */

static void queries(const struct score_job *j) {
    const struct layout l = layout(j);
    const int cols = j->s->cols, n = j->n_queries;
    double weight[KERN_STATE_QUERIES], most = -INFINITY, sum = 0;
    for (int t = 0; t < n; t++) {
        double *q = l.queries + (size_t)t * (size_t)cols;
        for (int i = 0; i < cols; i++) q[i] = (double)score_query(j, t)[i];
        if (j->s->normed) standardise(q, cols);
    }
    const double *newest = l.queries + (size_t)(n - 1) * (size_t)cols;
    for (int t = 0; t < n; t++) {
        weight[t] = dot(newest, l.queries + (size_t)t * (size_t)cols, cols) / sqrt(cols);
        if (!(weight[t] <= most)) most = weight[t];
    }
    for (int t = 0; t < n; t++) sum += weight[t] = n == 1 ? 1 : exp(weight[t] - most);
    for (int i = 0; i < cols; i++) {
        l.average[i] = 0;
        for (int t = 0; t < n; t++)
            l.average[i] += weight[t] / sum * l.queries[(size_t)t * (size_t)cols + (size_t)i];
    }
}

static void rows(const struct score_job *j, int idx, int n_threads) {
    const struct layout l = layout(j);
    const int n = projected(j->s), cols = j->s->cols;
    int begin, end;
    threads_split(n, 1, idx, n_threads, &begin, &end);
    for (int t = 0; t < j->n_queries; t++)
        for (int i = begin; i < end; i++)
            l.aq[t * n + i] = dot_weight(j->s->a + (size_t)i * (size_t)cols,
                                         l.queries + (size_t)t * (size_t)cols, cols);
}

/* ---- Blocks ---- */

/* Mean of quarters [first, last) of a block into r. */
static void mean(const struct score_job *j, int block, int first, int last, double *r) {
    const int cols = j->s->cols, tokens = score_tokens(j, block);
    const float *plane = score_block(j, block);
    int count = 0;
    for (int i = 0; i < cols; i++) r[i] = 0;
    for (int s = first; s < last; s++) {
        int n = score_quarter_tokens(tokens, s);
        for (int i = 0; n && i < cols; i++) r[i] += (double)plane[(size_t)s * (size_t)cols + i];
        count += n;
    }
    for (int i = 0; i < cols; i++) r[i] /= count;
    if (j->s->normed) standardise(r, cols);
}

static void corner(const struct score_job *j, int block, const double *q, double *r) {
    const size_t cols = (size_t)j->s->cols;
    const struct kern_plane *p = &j->v->plane;
    const float *low = score_block(j, block) + (size_t)kern_plane_minmax(p) * cols;
    const float *middle = score_block(j, block) + (size_t)kern_plane_spread(p) * cols;
    for (size_t i = 0; i < cols; i++) {
        if (j->s->kind == KERN_SCORE_MINMAX) {
            r[i] = (double)(q[i] >= 0 ? low[cols + i] : low[i]);
            continue;
        }
        double s = sqrt((double)middle[cols + i] / score_tokens(j, block));
        r[i] = (double)middle[i] + (q[i] >= 0 ? s : -s);
    }
}

static void representative(const struct score_job *j, int block, double *r) {
    const int cols = j->s->cols;
    if (j->s->kind == KERN_SCORE_MINMAX || j->s->kind == KERN_SCORE_BOUND) {
        corner(j, block, layout(j).average, r);
        return;
    }
    if (!j->s->by_first) {
        mean(j, block, 0, 4, r);
        return;
    }
    const float *first = score_block(j, block) + 4 * (size_t)cols;
    for (int i = 0; i < cols; i++) r[i] = (double)first[i];
    if (j->s->normed) standardise(r, cols);
}

/* Of quarters [first, last). */
static double late(const struct score_job *j, const struct layout *l, int block, int first,
                   int last, double *own) {
    const struct kern_scorer *s = j->s;
    const int n = projected(s), tokens = score_tokens(j, block);
    double *r = own, *br = own + 3 * (size_t)s->cols, *term = br + n, most = -INFINITY, sum = 0;
    int n_terms = 0;
    for (int quarter = first; quarter < last && score_quarter_tokens(tokens, quarter); quarter++) {
        mean(j, block, quarter, quarter + 1, r);
        for (int i = 0; i < n; i++)
            br[i] = dot_weight(s->b + (size_t)i * (size_t)s->cols, r, s->cols);
        for (int t = 0; t < j->n_queries; t++)
            for (int h = 0; h < s->n_heads; h++)
                term[n_terms++] =
                    dot(l->aq + t * n + h * s->head_dim, br + h * s->head_dim, s->head_dim) /
                    sqrt(s->head_dim);
    }
    for (int i = 0; i < n_terms; i++)
        if (!(term[i] <= most)) most = term[i];
    for (int i = 0; i < n_terms; i++) sum += exp(term[i] - most);
    return most + log(sum);
}

static double mlp(const struct score_job *j, const struct layout *l, int block, double *own) {
    const struct kern_scorer *s = j->s;
    const int cols = s->cols;
    double *r = own, *x = own + cols, out = (double)s->b2[0];
    representative(j, block, r);
    for (int i = 0; i < cols; i++) {
        x[i] = l->average[i] * r[i];
        x[cols + i] = l->average[i];
    }
    if (s->ln_weight) {
        standardise(x, 2 * cols);
        for (int i = 0; i < 2 * cols; i++)
            x[i] = x[i] * (double)s->ln_weight[i] + (double)s->ln_bias[i];
    }
    for (int w = 0; w < s->width; w++) {
        double y = (double)s->b1[w] + dot_weight(s->w1 + (size_t)w * 2 * (size_t)cols, x, 2 * cols);
        out += (double)s->w2[w] * (y / 2 * (1 + erf(y * M_SQRT1_2)));
    }
    return out;
}

static void quarters(const struct score_job *j, const struct layout *l, int block, double *own) {
    for (int q = 0; q < 4; q++) {
        double score = -INFINITY;
        if (score_quarter_tokens(score_tokens(j, block), q)) {
            if (j->s->kind == KERN_SCORE_LATE) score = late(j, l, block, q, q + 1, own);
            else {
                mean(j, block, q, q + 1, own);
                score = dot(l->average, own, j->s->cols) / sqrt(j->s->cols);
            }
        }
        j->out[4 * block + q] = (float)score;
    }
}

static void blocks(const struct score_job *j, int idx, int n_threads) {
    const struct layout l = layout(j);
    double *own = l.own + (size_t)idx * own_doubles(j->s);
    int begin, end;
    threads_split(j->n_blocks, 1, idx, n_threads, &begin, &end);
    for (int b = begin; b < end; b++) {
        double score;
        if (j->s->by_quarter) {
            quarters(j, &l, b, own);
            continue;
        }
        if (j->s->kind == KERN_SCORE_LATE) score = late(j, &l, b, 0, 4, own);
        else if (j->s->kind == KERN_SCORE_MLP) score = mlp(j, &l, b, own);
        else {
            representative(j, b, own);
            score = dot(l.average, own, j->s->cols) / sqrt(j->s->cols);
        }
        j->out[b] = (float)score;
    }
}

const struct cpu_score_isa cpu_score_reference = {
    .scratch_bytes = scratch_bytes,
    .queries = queries,
    .rows = rows,
    .blocks = blocks,
};
