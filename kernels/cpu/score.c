/* Scores of blocks, compiled once for each instruction set with the same bits: multiply and add
 * rounded apart, sums in an order that the shape alone decides.
 *
 * All products have one form: 16 vectors in lanes, [cols][16], against rows of a weight, each read
 * once for 16 results. Lanes are queries, blocks (MLP) or quarters of four blocks (LATE); a lane's
 * sum does not know its neighbours. The MLP's LayerNorm is folded: with x = [q r ; q], mean m and
 * 1 / deviation d, a unit of W1 gives d (<w_a g_a, q r> + <w_b g_b, q> - m <w, g>) + <w, b> + b1,
 * so that a block costs one product of cols and the rest is done once. */
#include <math.h>

#include "base/threads.h"
#include "kernels/cpu/score.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vexp.h"

enum {
    LANES = 16,
    CHUNK = 128, /* terms summed one after another before they join the total */
    ROWS = VN == 1   ? 8
           : VN == 2 ? 4
                     : 2,
};

/* ---- Products and norms ---- */

/* out[r][lane] = sum over c of w[r][c] xt[c][lane], r < n <= ROWS. */
static void product(const float *w, size_t stride, int n, int cols, const float *xt, float *out) {
    const float *row[ROWS];
    vf total[ROWS][VN];
    for (int r = 0; r < ROWS; r++) {
        row[r] = w + (size_t)score_min(r, n - 1) * stride;
        for (int v = 0; v < VN; v++) total[r][v] = v_set1(0.f);
    }
    for (int begin = 0; begin < cols; begin += CHUNK) {
        vf acc[ROWS][VN];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VN; v++) acc[r][v] = v_set1(0.f);
        for (int c = begin, end = score_min(cols, begin + CHUNK); c < end; c++) {
            vf x[VN];
            for (int v = 0; v < VN; v++) x[v] = v_load(xt + (size_t)c * LANES + v * VL);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VN; v++)
                    acc[r][v] = v_add(acc[r][v], v_mul(v_set1(row[r][c]), x[v]));
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VN; v++) total[r][v] = v_add(total[r][v], acc[r][v]);
    }
    for (int r = 0; r < n; r++)
        for (int v = 0; v < VN; v++) v_store(out + r * LANES + v * VL, total[r][v]);
}

/* Sum of a[i] b[i] (b NULL: of a[i]): lane i % 16 takes element i, a tail counts as zeros. */
static float dot(const float *a, const float *b, int n) {
    vf acc[VN];
    for (int v = 0; v < VN; v++) acc[v] = v_set1(0.f);
    for (int i = 0; i < n; i += 16) {
        float ta[16] = {0}, tb[16];
        const float *pa = a + i, *pb = b ? b + i : tb;
        for (int k = 0; !b && k < 16; k++) tb[k] = 1;
        if (n - i < 16) {
            memcpy(ta, a + i, (size_t)(n - i) * sizeof *a);
            pa = ta;
            if (b) {
                memset(tb, 0, sizeof tb);
                memcpy(tb, b + i, (size_t)(n - i) * sizeof *b);
                pb = tb;
            }
        }
        for (int v = 0; v < VN; v++)
            acc[v] = v_add(acc[v], v_mul(v_load(pa + v * VL), v_load(pb + v * VL)));
    }
    return v_sum16(acc);
}

/* In place (x - mean) / sqrt(variance + 1e-5). */
static void standardise(float *x, int n) {
    const float mean = dot(x, NULL, n) / (float)n;
    for (int i = 0; i < n; i++) x[i] -= mean;
    const float scale = 1.f / sqrtf(dot(x, x, n) / (float)n + 1e-5f);
    for (int i = 0; i < n; i++) x[i] *= scale;
}

static void into_lane(float *xt, int lane, const float *x, int n) {
    for (int i = 0; i < n; i++) xt[(size_t)i * LANES + (size_t)lane] = x[i];
}

/* ---- Scratch ---- */

/* Shared: queries [32][cols], their average [cols], lanes of the query's side [2 cols][16] (LATE:
 * two tiles of [cols]; MLP: g_b q, g, b), LATE: A q [32][heads * head_dim], MLP: the units' three
 * numbers [width][16]. Each thread: a vector [cols], a tile [cols][16], LATE: B r [heads *
 * head_dim][16] and the terms of 16 quarters [32 heads][16]. */
struct layout {
    float *queries, *average, *lanes, *rows, *own;
};
struct own {
    float *r, *tile, *br, *term;
};
static int projected(const struct kern_scorer *s) {
    return s->kind == KERN_SCORE_LATE ? s->n_heads * s->head_dim : 0;
}
static size_t up(size_t n) {
    return (n + 15) / 16 * 16;
}
static size_t n_row_floats(const struct kern_scorer *s) {
    if (s->kind == KERN_SCORE_LATE) return (size_t)KERN_STATE_QUERIES * (size_t)projected(s);
    return s->kind == KERN_SCORE_MLP ? (size_t)s->width * LANES : 0;
}
static size_t own_floats(const struct kern_scorer *s) {
    size_t cols = (size_t)s->cols, n = up(cols) + cols * LANES;
    if (s->kind != KERN_SCORE_LATE) return n;
    return n + (size_t)projected(s) * LANES + (size_t)KERN_STATE_QUERIES * s->n_heads * LANES;
}
static size_t shared_floats(const struct kern_scorer *s) {
    size_t cols = (size_t)s->cols;
    return (size_t)KERN_STATE_QUERIES * cols + up(cols) + 2 * cols * LANES + up(n_row_floats(s));
}
static size_t scratch_bytes(const struct kern_scorer *s, int n_threads) {
    return (shared_floats(s) + (size_t)n_threads * own_floats(s)) * sizeof(float);
}
static struct layout layout(const struct score_job *j) {
    struct layout l = {.queries = j->scratch};
    l.average = l.queries + (size_t)KERN_STATE_QUERIES * (size_t)j->s->cols;
    l.lanes = l.average + up((size_t)j->s->cols);
    l.rows = l.lanes + (size_t)2 * LANES * (size_t)j->s->cols;
    l.own = l.rows + up(n_row_floats(j->s));
    return l;
}
static struct own own_of(const struct score_job *j, int idx) {
    struct own o = {.r = layout(j).own + (size_t)idx * own_floats(j->s)};
    o.tile = o.r + up((size_t)j->s->cols);
    o.br = o.tile + (size_t)LANES * (size_t)j->s->cols;
    o.term = o.br + (size_t)LANES * (size_t)projected(j->s);
    return o;
}

/* ---- The query's side ---- */

static void average(const struct score_job *j, const struct layout *l) {
    const int cols = j->s->cols, n = j->n_queries;
    const float *newest = l->queries + (size_t)(n - 1) * (size_t)cols;
    float weight[KERN_STATE_QUERIES], most = -INFINITY, sum = 0;
    if (n == 1) {
        memcpy(l->average, newest, (size_t)cols * sizeof *newest);
        return;
    }
    for (int t = 0; t < n; t++) {
        weight[t] = dot(newest, l->queries + (size_t)t * (size_t)cols, cols) / sqrtf((float)cols);
        most = weight[t] > most ? weight[t] : most;
    }
    for (int t = 0; t < n; t++) sum += weight[t] = s_exp(weight[t] - most);
    memset(l->average, 0, (size_t)cols * sizeof *l->average);
    for (int t = 0; t < n; t++) {
        const float w = weight[t] / sum, *q = l->queries + (size_t)t * (size_t)cols;
        for (int i = 0; i < cols; i++) l->average[i] += w * q[i];
    }
}

static void mlp_lanes(const struct score_job *j, const struct layout *l) {
    const struct kern_scorer *s = j->s;
    const int cols = s->cols;
    memset(l->lanes, 0, (size_t)2 * LANES * (size_t)cols * sizeof *l->lanes);
    for (int i = 0; i < 2 * cols; i++) {
        float *lane = l->lanes + (size_t)i * LANES, g = s->ln_weight ? s->ln_weight[i] : 1.f;
        if (i >= cols) lane[0] = g * l->average[i - cols];
        if (!s->ln_weight) continue;
        lane[1] = g;
        lane[2] = s->ln_bias[i];
    }
}

static void queries(const struct score_job *j) {
    const struct layout l = layout(j);
    const size_t cols = (size_t)j->s->cols;
    for (int t = 0; t < j->n_queries; t++) {
        float *q = l.queries + (size_t)t * cols;
        memcpy(q, score_query(j, t), cols * sizeof *q);
        if (j->s->normed) standardise(q, j->s->cols);
        if (j->s->kind == KERN_SCORE_LATE)
            into_lane(l.lanes + (size_t)(t / LANES) * LANES * cols, t % LANES, q, j->s->cols);
    }
    for (int t = j->n_queries; j->s->kind == KERN_SCORE_LATE && t < KERN_STATE_QUERIES; t++)
        for (size_t i = 0; i < cols; i++)
            l.lanes[(size_t)(t / LANES) * LANES * cols + i * LANES + (size_t)(t % LANES)] = 0;
    if (j->s->kind == KERN_SCORE_LATE) return;
    average(j, &l);
    if (j->s->kind == KERN_SCORE_MLP) mlp_lanes(j, &l);
}

static void rows(const struct score_job *j, int idx, int n_threads) {
    const struct layout l = layout(j);
    const struct kern_scorer *s = j->s;
    const bool is_late = s->kind == KERN_SCORE_LATE;
    const int n = is_late ? projected(s) : s->width;
    float out[ROWS * LANES];
    int begin, end;
    threads_split(n, 8, idx, n_threads, &begin, &end);
    for (int i = begin; i < end; i += ROWS) {
        const int part = score_min(ROWS, end - i);
        if (!is_late)
            product(s->w1 + (size_t)i * 2 * (size_t)s->cols, 2 * (size_t)s->cols, part, 2 * s->cols,
                    l.lanes, l.rows + (size_t)i * LANES);
        for (int tile = 0; is_late && tile * LANES < j->n_queries; tile++) {
            product(s->a + (size_t)i * (size_t)s->cols, (size_t)s->cols, part, s->cols,
                    l.lanes + (size_t)tile * LANES * (size_t)s->cols, out);
            for (int r = 0; r < part; r++)
                for (int lane = 0; lane < LANES; lane++)
                    l.rows[(size_t)(tile * LANES + lane) * (size_t)n + (size_t)(i + r)] =
                        out[r * LANES + lane];
        }
    }
}

/* ---- Representatives ---- */

/* Mean of quarters [first, last), of which the first is not empty. */
static void mean(const struct score_job *j, int block, int first, int last, float *r) {
    const int cols = j->s->cols, tokens = score_tokens(j, block);
    const float *sum = score_block(j, block) + (size_t)first * (size_t)cols;
    int count = score_quarter_tokens(tokens, first);
    memcpy(r, sum, (size_t)cols * sizeof *r);
    for (int s = first + 1; s < last && score_quarter_tokens(tokens, s); s++) {
        sum += cols;
        count += score_quarter_tokens(tokens, s);
        for (int i = 0; i < cols; i++) r[i] += sum[i];
    }
    const float n = (float)count;
    for (int i = 0; i < cols; i++) r[i] /= n;
    if (j->s->normed) standardise(r, cols);
}

/* The corner of the block's box that q points to: at its least or largest values, or a standard
 * deviation off its mean. */
static void corner(const struct score_job *j, int block, const float *q, float *r) {
    const int cols = j->s->cols;
    const bool by_spread = j->s->kind == KERN_SCORE_BOUND;
    const struct kern_plane *p = &j->v->plane;
    const float *a =
        score_block(j, block) +
        (size_t)(by_spread ? kern_plane_spread(p) : kern_plane_minmax(p)) * (size_t)cols;
    const float *b = a + cols, n = (float)score_tokens(j, block);
    if (by_spread)
        for (int i = 0; i < cols; i++) r[i] = a[i] + copysignf(sqrtf(b[i] / n), q[i]);
    else
        for (int i = 0; i < cols; i++) r[i] = q[i] >= 0 ? b[i] : a[i];
}

static void representative(const struct score_job *j, int block, float *r) {
    const int cols = j->s->cols;
    if (j->s->kind == KERN_SCORE_MINMAX || j->s->kind == KERN_SCORE_BOUND) {
        corner(j, block, layout(j).average, r);
        return;
    }
    if (!j->s->by_first) {
        mean(j, block, 0, 4, r);
        return;
    }
    memcpy(r, score_block(j, block) + 4 * (size_t)cols, (size_t)cols * sizeof *r);
    if (j->s->normed) standardise(r, cols);
}

/* ---- LATE: four blocks a tile ---- */

/* most[lane] and sum[lane] of exp(term - most) over n terms. NaN comes through the sums. */
static void log_sum(const float *term, int n, float most[LANES], float sum[LANES]) {
    vf m[VN], acc[VN];
    for (int v = 0; v < VN; v++) {
        m[v] = v_set1(-INFINITY);
        acc[v] = v_set1(0.f);
        for (int i = 0; i < n; i++) m[v] = v_max(v_load(term + i * LANES + v * VL), m[v]);
        for (int i = 0; i < n; i++)
            acc[v] = v_add(acc[v], v_exp(v_sub(v_load(term + i * LANES + v * VL), m[v])));
        v_store(most + v * VL, m[v]);
        v_store(sum + v * VL, acc[v]);
    }
}

static void late(const struct score_job *j, const struct layout *l, const struct own *o, int block,
                 int n_blocks) {
    const struct kern_scorer *s = j->s;
    const int n = projected(s), n_terms = j->n_queries * s->n_heads;
    const float scale = 1.f / sqrtf((float)s->head_dim);
    float most[LANES], sum[LANES];
    memset(o->tile, 0, (size_t)LANES * (size_t)s->cols * sizeof(float));
    for (int lane = 0; lane < 4 * n_blocks; lane++) {
        if (!score_quarter_tokens(score_tokens(j, block + lane / 4), lane % 4)) continue;
        mean(j, block + lane / 4, lane % 4, lane % 4 + 1, o->r);
        into_lane(o->tile, lane, o->r, s->cols);
    }
    for (int i = 0; i < n; i += ROWS)
        product(s->b + (size_t)i * (size_t)s->cols, (size_t)s->cols, score_min(ROWS, n - i),
                s->cols, o->tile, o->br + (size_t)i * LANES);
    for (int h = 0; h < s->n_heads; h++)
        for (int t = 0; t < j->n_queries; t += ROWS)
            product(l->rows + (size_t)t * (size_t)n + (size_t)h * (size_t)s->head_dim, (size_t)n,
                    score_min(ROWS, j->n_queries - t), s->head_dim,
                    o->br + (size_t)h * (size_t)s->head_dim * LANES,
                    o->term + ((size_t)h * (size_t)j->n_queries + (size_t)t) * LANES);
    for (size_t i = 0; i < (size_t)n_terms * LANES; i++) o->term[i] *= scale;
    log_sum(o->term, n_terms, most, sum);
    for (int lane = 0; s->by_quarter && lane < 4 * n_blocks; lane++)
        j->out[4 * block + lane] = score_quarter_tokens(score_tokens(j, block + lane / 4), lane % 4)
                                       ? most[lane] + logf(sum[lane])
                                       : -INFINITY;
    for (int b = 0; !s->by_quarter && b < n_blocks; b++) {
        const int tokens = score_tokens(j, block + b);
        const float *m = most + 4 * b;
        float top = m[0], all = 0;
        for (int q = 1; q < 4 && score_quarter_tokens(tokens, q); q++)
            top = m[q] > top ? m[q] : top;
        for (int q = 0; q < 4 && score_quarter_tokens(tokens, q); q++)
            all += sum[4 * b + q] * s_exp(m[q] - top);
        j->out[block + b] = top + logf(all);
    }
}

/* ---- MLP: 16 blocks a tile ---- */

static void mlp(const struct score_job *j, const struct layout *l, const struct own *o, int block,
                int n_blocks) {
    const struct kern_scorer *s = j->s;
    const int cols = s->cols;
    float m[LANES] = {0}, d[LANES], score[LANES], unit[ROWS * LANES];
    memset(o->tile, 0, (size_t)LANES * (size_t)cols * sizeof(float));
    for (int lane = 0; lane < LANES; lane++) {
        d[lane] = 1;
        score[lane] = s->b2[0];
        if (lane >= n_blocks) continue;
        representative(j, block + lane, o->r);
        for (int i = 0; i < cols; i++) o->r[i] *= l->average[i];
        if (s->ln_weight) {
            /* Mean, then variance about it, over q r and q together. */
            const float n = (float)(2 * cols);
            m[lane] = (dot(o->r, NULL, cols) + dot(l->average, NULL, cols)) / n;
            float *about = o->tile + (size_t)lane; /* before it holds the lane */
            float square[16] = {0};
            for (int i = 0; i < cols; i++) {
                const float a = o->r[i] - m[lane], b = l->average[i] - m[lane];
                square[i % 16] += a * a + b * b;
            }
            for (int k = 8; k; k /= 2)
                for (int i = 0; i < k; i++) square[i] += square[i + k];
            d[lane] = 1.f / sqrtf(square[0] / n + 1e-5f);
            for (int i = 0; i < cols; i++) about[(size_t)i * LANES] = o->r[i] * s->ln_weight[i];
        } else into_lane(o->tile, lane, o->r, cols);
    }
    for (int w = 0; w < s->width; w += ROWS) {
        const int part = score_min(ROWS, s->width - w);
        product(s->w1 + (size_t)w * 2 * (size_t)cols, 2 * (size_t)cols, part, cols, o->tile, unit);
        for (int r = 0; r < part; r++) {
            const float *of = l->rows + (size_t)(w + r) * LANES;
            for (int lane = 0; lane < n_blocks; lane++) {
                float y = d[lane] * (unit[r * LANES + lane] + of[0] - m[lane] * of[1]) + of[2] +
                          s->b1[w + r];
                score[lane] += s->w2[w + r] * (0.5f * y * (1.f + erff(y * (float)M_SQRT1_2)));
            }
        }
    }
    memcpy(j->out + block, score, (size_t)n_blocks * sizeof *score);
}

/* What represents a block, or each of its quarters, times the query. */
static void plain(const struct score_job *j, const struct layout *l, int block, float *r) {
    const float scale = sqrtf((float)j->s->cols);
    for (int q = 0; j->s->by_quarter && q < 4; q++) {
        float *out = j->out + 4 * block + q;
        *out = -INFINITY;
        if (!score_quarter_tokens(score_tokens(j, block), q)) continue;
        mean(j, block, q, q + 1, r);
        *out = dot(l->average, r, j->s->cols) / scale;
    }
    if (j->s->by_quarter) return;
    representative(j, block, r);
    j->out[block] = dot(l->average, r, j->s->cols) / scale;
}

static void blocks(const struct score_job *j, int idx, int n_threads) {
    const struct layout l = layout(j);
    const struct own o = own_of(j, idx);
    const int tile = j->s->kind == KERN_SCORE_MLP ? LANES : LANES / 4;
    int begin, end;
    threads_split(j->n_blocks, tile, idx, n_threads, &begin, &end);
    for (int b = begin; b < end; b += tile) {
        const int n = score_min(tile, end - b);
        if (j->s->kind == KERN_SCORE_LATE) late(j, &l, &o, b, n);
        else if (j->s->kind == KERN_SCORE_MLP) mlp(j, &l, &o, b, n);
        else
            for (int i = b; i < b + n; i++) plain(j, &l, i, o.r);
    }
}

const struct cpu_score_isa CPU_NAME(cpu_score) = {
    .scratch_bytes = scratch_bytes,
    .queries = queries,
    .rows = rows,
    .blocks = blocks,
};
