/* Scores of blocks as kern_scorer has them, the losses and their gradients. See train_maths.h.
 *
 * One product serves all: C += A B with A read at any strides and B's rows packed by panels, so
 * that transposed operands cost no copy of A. Every sum runs in an order that the shapes decide. */
#include "target/train_maths.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)

#ifdef TRAIN_DOUBLE
typedef double real;
enum { VECTOR_BYTES = 16 };
#else
typedef float real;
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX2__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif
#endif

typedef real vr __attribute__((vector_size(VECTOR_BYTES)));
typedef real vu __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

enum {
    LANES = VECTOR_BYTES / (int)sizeof(real),
    MR = 6,         /* rows of C at a time */
    NR = 2 * LANES, /* columns */
    KC = 256,       /* terms of a panel */
};

/* ---- e^x ---- */

#ifdef TRAIN_DOUBLE
static inline real fast_exp(real x) {
    return exp(x);
}
#else
/* Relative error some 1e-7 for x in [-87, 88]; below, 0. Written for loops over many. */
static inline real fast_exp(real x) {
    const float magic = 0x1.8p23f;
    float c = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
    float n = (c * 0x1.715476p0f + magic) - magic;
    float r = (c - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    float p = 0x1.6a235p-10f;
    p = p * r + 0x1.123a6cp-7f;
    p = p * r + 0x1.5558f4p-5f;
    p = p * r + 0x1.55549p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = r + r * r * p + 1.f;
    union {
        int32_t i;
        float f;
    } two = {.i = ((int32_t)n + 127) << 23};
    return x < -87.f ? 0.f : p * two.f;
}
#endif

/* ---- Products ---- */

/* C[m][NR] += A[m][k] B[k][NR], m <= MR; missing rows repeat the first. */
static void kernel(int m, int k, const real *a, size_t a_row, size_t a_col, const real *b, real *c,
                   size_t c_row) {
    vr acc[MR][2];
    const real *row[MR];
    for (int r = 0; r < MR; r++) {
        row[r] = a + (r < m ? (size_t)r : 0) * a_row;
        acc[r][0] = acc[r][1] = (vr){0};
    }
    for (int i = 0; i < k; i++, b += NR) {
        vr b0 = *(const vu *)b, b1 = *(const vu *)(b + LANES);
        for (int r = 0; r < MR; r++) {
            real x = row[r][(size_t)i * a_col];
            acc[r][0] += x * b0;
            acc[r][1] += x * b1;
        }
    }
    for (int r = 0; r < m; r++) {
        *(vu *)(c + (size_t)r * c_row) += acc[r][0];
        *(vu *)(c + (size_t)r * c_row + LANES) += acc[r][1];
    }
}

/* Rows b[0..k)[0..n), n <= NR, side by side with zeros behind. */
static void pack(real *out, const real *b, size_t b_row, int k, int n) {
    for (int i = 0; i < k; i++, out += NR) {
        for (int j = 0; j < n; j++) out[j] = b[(size_t)i * b_row + (size_t)j];
        for (int j = n; j < NR; j++) out[j] = 0;
    }
}

/* C[m][n] += A[m][k] B[k][n]; A(i, j) at a[i a_row + j a_col]. panel: [KC][NR]. */
static void product(int m, int n, int k, const real *a, size_t a_row, size_t a_col, const real *b,
                    size_t b_row, real *c, size_t c_row, real *panel) {
    for (int k0 = 0; k0 < k; k0 += KC) {
        int kn = k - k0 < KC ? k - k0 : KC;
        for (int j = 0; j < n; j += NR) {
            int nn = n - j < NR ? n - j : NR;
            pack(panel, b + (size_t)k0 * b_row + (size_t)j, b_row, kn, nn);
            for (int i = 0; i < m; i += MR) {
                int mm = m - i < MR ? m - i : MR;
                const real *at = a + (size_t)i * a_row + (size_t)k0 * a_col;
                real *to = c + (size_t)i * c_row + (size_t)j;
                if (nn == NR) {
                    kernel(mm, kn, at, a_row, a_col, panel, to, c_row);
                    continue;
                }
                real edge[MR * NR] = {0};
                kernel(mm, kn, at, a_row, a_col, panel, edge, NR);
                for (int r = 0; r < mm; r++)
                    for (int x = 0; x < nn; x++)
                        to[(size_t)r * c_row + (size_t)x] += edge[r * NR + x];
            }
        }
    }
}

static void zero(real *x, size_t n) {
    memset(x, 0, n * sizeof *x);
}

/* ---- Losses ---- */

static double softplus(double x) {
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}
static double sigmoid(double x) {
    return x > 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

/* KL of softmax(score) to the label; d: its gradient. */
static double loss_kl(const struct train_place *p, const real *score, real *d) {
    double top = -INFINITY, sum = 0, loss = 0;
    for (int i = 0; i < p->n; i++) top = fmax(top, (double)score[i]);
    for (int i = 0; i < p->n; i++) sum += exp((double)score[i] - top);
    for (int i = 0; i < p->n; i++) {
        double y = (double)p->label[i], log_p = (double)score[i] - top - log(sum);
        if (y > 0) loss += y * (log(y) - log_p);
        d[i] = (real)(exp(log_p) - y);
    }
    return loss;
}

/* Cross-entropy of "is among the best", averaged over blocks. */
static double loss_bce(const struct train_place *p, const real *score, real *d) {
    double loss = 0;
    for (int i = 0; i < p->n; i++) {
        double s = (double)score[i];
        loss += (softplus(s) - (p->positive[i] ? s : 0)) / p->n;
        d[i] = (real)((sigmoid(s) - (p->positive[i] ? 1 : 0)) / p->n);
    }
    return loss;
}

/* On top: every positive above every other block, averaged over pairs. */
static double loss_rank(const struct train_place *p, const real *score, real *d) {
    int n_pos = 0;
    double loss = 0;
    for (int i = 0; i < p->n; i++) n_pos += p->positive[i] != 0;
    double pairs = (double)n_pos * (p->n - n_pos);
    if (pairs == 0) return 0;
    for (int i = 0; i < p->n; i++)
        for (int j = 0; p->positive[i] && j < p->n; j++) {
            if (p->positive[j]) continue;
            double apart = (double)score[j] - (double)score[i], g = sigmoid(apart) / pairs;
            loss += softplus(apart) / pairs;
            d[i] -= (real)g;
            d[j] += (real)g;
        }
    return loss;
}

/* The place's loss times weight; d gets the gradient by score. */
static double loss_of(const struct target_train_shape *s, const struct train_place *p,
                      const real *score, double weight, real *d) {
    double loss = s->loss == TARGET_LOSS_KL ? loss_kl(p, score, d) : loss_bce(p, score, d);
    if (s->loss == TARGET_LOSS_BCE_RANK) loss += loss_rank(p, score, d);
    for (int i = 0; i < p->n; i++) d[i] *= (real)weight;
    return loss * weight;
}

/* ---- Scratch ---- */

/* A cursor over the scratch; without a base it only counts. */
struct space {
    real *base;
    size_t used;
};
static real *take(struct space *s, size_t n) {
    real *p = s->base ? s->base + s->used : NULL;
    s->used += align_up(n, 16);
    return p;
}

/* LATE: with D = heads * head_dim, N = 4 n_blocks, Q = KERN_STATE_QUERIES. */
struct late_space {
    real *panel, *br, *br_t, *d_br; /* B r: [N][D], [D][N]; its gradient [N][D] */
    real *aq, *d_aq;                /* [Q][D] */
    real *term;                     /* [heads Q][N] scores, then weights, then gradients */
    real *top, *sum, *d;            /* [N]; by block */
};
static size_t late_layout(const struct target_train_shape *s, int n_blocks, void *base,
                          struct late_space *l) {
    size_t d = (size_t)(s->n_heads * s->head_dim), n = 4 * (size_t)n_blocks;
    struct space w = {.base = base};
    l->panel = take(&w, (size_t)KC * NR);
    l->br = take(&w, n * d);
    l->br_t = take(&w, n * d);
    l->d_br = take(&w, n * d);
    l->aq = take(&w, KERN_STATE_QUERIES * d);
    l->d_aq = take(&w, KERN_STATE_QUERIES * d);
    l->term = take(&w, (size_t)s->n_heads * KERN_STATE_QUERIES * n);
    l->top = take(&w, n);
    l->sum = take(&w, n);
    l->d = take(&w, n);
    return w.used * sizeof(real);
}

/* MLP: X = 2H features, W units. */
struct mlp_space {
    real *panel, *w1g, *c; /* W1 with the LayerNorm's weight [X][W]; its bias' share and b1 [W] */
    real *x, *z, *dz;      /* [n_blocks][X], [n_blocks][W] */
    real *g, *dz_sum;      /* X^T dZ of all places [X][W]; [W] */
    real *q, *d;           /* [H]; [n_blocks] */
};
static size_t mlp_layout(const struct target_train_shape *s, int n_blocks, void *base,
                         struct mlp_space *l) {
    size_t x = 2 * (size_t)s->hidden, width = (size_t)s->width, n = (size_t)n_blocks;
    struct space w = {.base = base};
    l->panel = take(&w, (size_t)KC * NR);
    l->w1g = take(&w, x * width);
    l->c = take(&w, width);
    l->x = take(&w, n * x);
    l->z = take(&w, n * width);
    l->dz = take(&w, n * width);
    l->g = take(&w, x * width);
    l->dz_sum = take(&w, width);
    l->q = take(&w, (size_t)s->hidden);
    l->d = take(&w, n);
    return w.used * sizeof(real);
}

static size_t scratch_bytes(const struct target_train_shape *s, int n_blocks) {
    struct late_space late;
    struct mlp_space mlp;
    return s->kind == KERN_SCORE_LATE ? late_layout(s, n_blocks, NULL, &late)
                                      : mlp_layout(s, n_blocks, NULL, &mlp);
}

/* ---- LATE ---- */

/* Scores of a place's blocks; terms become their weights in each block's sum. */
static void late_scores(const struct target_train_shape *s, const struct train_place *p,
                        int n_blocks, struct late_space *l, real *score) {
    int hd = s->head_dim, d = s->n_heads * hd, n = 4 * p->n, rows = s->n_heads * p->n_queries;
    size_t all = 4 * (size_t)n_blocks, line = (size_t)n;
    real scale = (real)(1 / sqrt((double)hd));
    zero(l->term, (size_t)rows * line);
    for (int h = 0; h < s->n_heads; h++)
        product(p->n_queries, n, hd, l->aq + h * hd, (size_t)d, 1,
                l->br_t + (size_t)(h * hd) * all + 4 * (size_t)p->first, all,
                l->term + (size_t)(h * p->n_queries) * line, line, l->panel);
    for (int i = 0; i < n; i++) l->top[i] = -INFINITY, l->sum[i] = 0;
    for (int r = 0; r < rows; r++) {
        real *t = l->term + (size_t)r * line;
        for (int i = 0; i < n; i++) {
            t[i] *= scale;
            l->top[i] = t[i] > l->top[i] ? t[i] : l->top[i];
        }
    }
    for (int b = 0; b < n; b += 4) {
        real top = l->top[b];
        for (int i = 1; i < 4; i++) top = l->top[b + i] > top ? l->top[b + i] : top;
        for (int i = 0; i < 4; i++) l->top[b + i] = top;
    }
    for (int r = 0; r < rows; r++) {
        real *t = l->term + (size_t)r * line;
        for (int i = 0; i < n; i++) {
            t[i] = fast_exp(t[i] - l->top[i]);
            l->sum[i] += t[i];
        }
    }
    for (int b = 0; b < p->n; b++) {
        real *x = l->sum + 4 * b, sum = (x[0] + x[1]) + (x[2] + x[3]);
        score[b] = l->top[4 * b] + (real)log((double)sum);
        for (int i = 0; i < 4; i++) x[i] = 1 / sum;
    }
}

/* From d [n] by score to gradients of A q and B r. */
static void late_back(const struct target_train_shape *s, const struct train_place *p,
                      struct late_space *l) {
    int hd = s->head_dim, d = s->n_heads * hd, n = 4 * p->n, rows = s->n_heads * p->n_queries;
    real scale = (real)(1 / sqrt((double)hd));
    for (int i = 0; i < n; i++) l->sum[i] *= l->d[i / 4] * scale;
    for (int r = 0; r < rows; r++) {
        real *t = l->term + (size_t)r * (size_t)n;
        for (int i = 0; i < n; i++) t[i] *= l->sum[i];
    }
    zero(l->d_aq, (size_t)p->n_queries * (size_t)d);
    size_t at = 4 * (size_t)p->first * (size_t)d;
    for (int h = 0; h < s->n_heads; h++) {
        const real *t = l->term + (size_t)(h * p->n_queries) * (size_t)n;
        product(p->n_queries, hd, n, t, (size_t)n, 1, l->br + at + h * hd, (size_t)d,
                l->d_aq + h * hd, (size_t)d, l->panel);
        product(n, hd, p->n_queries, t, 1, (size_t)n, l->aq + h * hd, (size_t)d,
                l->d_br + at + h * hd, (size_t)d, l->panel);
    }
}

static double late(const struct target_train_shape *s, const real *params,
                   const struct train_item *it, void *scratch, real *grad, real *scores) {
    struct late_space l;
    int h = s->hidden, d = s->n_heads * s->head_dim, n = 4 * it->n_blocks;
    const real *a = params, *b = params + (size_t)h * (size_t)d, *rep = it->rep;
    double loss = 0;
    late_layout(s, it->n_blocks, scratch, &l);
    zero(l.br, (size_t)n * (size_t)d);
    product(n, d, h, rep, (size_t)h, 1, b, (size_t)d, l.br, (size_t)d, l.panel);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < d; j++)
            l.br_t[(size_t)j * (size_t)n + (size_t)i] = l.br[(size_t)i * (size_t)d + (size_t)j];
    if (grad) zero(grad, 2 * (size_t)h * (size_t)d);
    if (grad) zero(l.d_br, (size_t)n * (size_t)d);
    for (int i = 0; i < it->n_places; i++) {
        const struct train_place *p = &it->place[i];
        const real *q = p->query;
        real own[4096],
            *score = scores ? scores + (size_t)i * (size_t)it->n_blocks + p->first : own;
        ASSERT(scores || p->n <= 4096);
        zero(l.aq, (size_t)p->n_queries * (size_t)d);
        product(p->n_queries, d, h, q, (size_t)h, 1, a, (size_t)d, l.aq, (size_t)d, l.panel);
        late_scores(s, p, it->n_blocks, &l, score);
        loss += loss_of(s, p, score, it->weight, l.d);
        if (!grad) continue;
        late_back(s, p, &l);
        product(h, d, p->n_queries, q, 1, (size_t)h, l.d_aq, (size_t)d, grad, (size_t)d, l.panel);
    }
    if (grad)
        product(h, d, n, rep, 1, (size_t)h, l.d_br, (size_t)d, grad + (size_t)h * (size_t)d,
                (size_t)d, l.panel);
    return loss;
}

/* ---- MLP ---- */

struct mlp_params {
    const real *w1, *b1, *w2, *b2, *weight, *bias; /* weight NULL: no LayerNorm */
};
static struct mlp_params mlp_params(const struct target_train_shape *s, const real *p) {
    size_t x = 2 * (size_t)s->hidden, w = (size_t)s->width;
    struct mlp_params m = {.w1 = p, .b1 = p + x * w, .w2 = p + x * w + w, .b2 = p + x * w + 2 * w};
    if (s->has_layernorm) m.weight = m.b2 + 1, m.bias = m.weight + x;
    return m;
}

/* The newest query, or the queries' average by softmax(<newest, q_i> / sqrt(H)). */
static void pool(const struct train_place *p, int h, real *out) {
    const real *q = p->query, *newest = q + (size_t)(p->n_queries - 1) * (size_t)h;
    double weight[KERN_STATE_QUERIES], top = -INFINITY, sum = 0;
    for (int t = 0; t < p->n_queries; t++) {
        double dot = 0;
        for (int i = 0; i < h; i++)
            dot += (double)newest[i] * (double)q[(size_t)t * (size_t)h + (size_t)i];
        weight[t] = dot / sqrt((double)h);
        top = fmax(top, weight[t]);
    }
    for (int t = 0; t < p->n_queries; t++) sum += weight[t] = exp(weight[t] - top);
    for (int i = 0; i < h; i++) {
        double x = 0;
        for (int t = 0; t < p->n_queries; t++)
            x += weight[t] / sum * (double)q[(size_t)t * (size_t)h + (size_t)i];
        out[i] = (real)x;
    }
}

/* Features [q r ; q] of a place's blocks, standardised where there is a LayerNorm. */
static void features(const struct target_train_shape *s, const struct train_item *it,
                     const struct train_place *p, struct mlp_space *l) {
    int h = s->hidden;
    pool(p, h, l->q);
    for (int b = 0; b < p->n; b++) {
        const real *r = (const real *)it->rep + (size_t)(p->first + b) * (size_t)h;
        real *x = l->x + (size_t)b * 2 * (size_t)h;
        for (int i = 0; i < h; i++) {
            x[i] = l->q[i] * r[i];
            x[h + i] = l->q[i];
        }
        if (!s->has_layernorm) continue;
        double mean = 0, square = 0;
        for (int i = 0; i < 2 * h; i++) mean += (double)x[i];
        mean /= 2 * h;
        for (int i = 0; i < 2 * h; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean);
        double inv = 1 / sqrt(square / (2 * h) + 1e-5);
        for (int i = 0; i < 2 * h; i++) x[i] = (real)(((double)x[i] - mean) * inv);
    }
}

/* GELU(x) = x cdf(x). */
static double normal_cdf(double x) {
    return .5 * (1 + erf(x * 0.70710678118654752440));
}

/* Score of a place's blocks from their units' inputs z; their cdf stays in dz. */
static void mlp_scores(const struct mlp_params *m, const struct mlp_space *l, int n, int width,
                       real *score) {
    for (int b = 0; b < n; b++) {
        const real *z = l->z + (size_t)b * (size_t)width;
        real *cdf = l->dz + (size_t)b * (size_t)width;
        double sum = (double)m->b2[0];
        for (int j = 0; j < width; j++) {
            cdf[j] = (real)normal_cdf((double)z[j]);
            sum += (double)m->w2[j] * (double)(z[j] * cdf[j]);
        }
        score[b] = (real)sum;
    }
}

/* From d [n] by score to gradients of the units' inputs; of w2 and b2 [width + 1], added. */
static void mlp_back(const struct mlp_params *m, struct mlp_space *l, int n, int width,
                     real *d_w2) {
    for (int b = 0; b < n; b++) {
        const real *z = l->z + (size_t)b * (size_t)width, d = l->d[b];
        real *dz = l->dz + (size_t)b * (size_t)width;
        for (int j = 0; j < width; j++) {
            real cdf = dz[j],
                 pdf = (real)0.39894228040143267794 * fast_exp((real)-.5 * z[j] * z[j]);
            d_w2[j] += d * z[j] * cdf;
            dz[j] = d * m->w2[j] * (cdf + z[j] * pdf);
            l->dz_sum[j] += dz[j];
        }
        d_w2[width] += d;
    }
}

/* From the sums over places to parameters' gradients. */
static void mlp_grad(const struct target_train_shape *s, const struct mlp_params *m,
                     const struct mlp_space *l, real *grad) {
    size_t x = 2 * (size_t)s->hidden, w = (size_t)s->width;
    real *d_weight = grad + x * w + 2 * w + 1, *d_bias = d_weight + x;
    for (size_t i = 0; i < x; i++) {
        const real *g = l->g + i * w, *row = m->w1 + i * w;
        real scale = m->weight ? m->weight[i] : 1, shift = m->weight ? m->bias[i] : 0;
        for (size_t j = 0; j < w; j++) grad[i * w + j] = scale * g[j] + shift * l->dz_sum[j];
        if (!m->weight) continue;
        double by_weight = 0, by_bias = 0;
        for (size_t j = 0; j < w; j++) {
            by_weight += (double)row[j] * (double)g[j];
            by_bias += (double)row[j] * (double)l->dz_sum[j];
        }
        d_weight[i] = (real)by_weight;
        d_bias[i] = (real)by_bias;
    }
    memcpy(grad + x * w, l->dz_sum, w * sizeof *grad);
}

/* Fold the LayerNorm into the first product. */
static void mlp_fold(const struct target_train_shape *s, const struct mlp_params *m,
                     struct mlp_space *l) {
    size_t x = 2 * (size_t)s->hidden, w = (size_t)s->width;
    memcpy(l->c, m->b1, w * sizeof *l->c);
    if (!m->weight) {
        memcpy(l->w1g, m->w1, x * w * sizeof *l->w1g);
        return;
    }
    for (size_t i = 0; i < x; i++)
        for (size_t j = 0; j < w; j++) {
            l->w1g[i * w + j] = m->weight[i] * m->w1[i * w + j];
            l->c[j] += m->bias[i] * m->w1[i * w + j];
        }
}

static double mlp(const struct target_train_shape *s, const real *params,
                  const struct train_item *it, void *scratch, real *grad, real *scores) {
    struct mlp_space l;
    struct mlp_params m = mlp_params(s, params);
    int x = 2 * s->hidden, w = s->width;
    double loss = 0;
    mlp_layout(s, it->n_blocks, scratch, &l);
    mlp_fold(s, &m, &l);
    if (grad) zero(grad, target__train_n_params(s));
    zero(l.g, (size_t)x * (size_t)w);
    zero(l.dz_sum, (size_t)w);
    real *d_w2 = grad ? grad + (size_t)(x + 1) * (size_t)w : NULL;
    for (int i = 0; i < it->n_places; i++) {
        const struct train_place *p = &it->place[i];
        real own[4096],
            *score = scores ? scores + (size_t)i * (size_t)it->n_blocks + p->first : own;
        ASSERT(scores || p->n <= 4096);
        features(s, it, p, &l);
        for (int b = 0; b < p->n; b++)
            memcpy(l.z + (size_t)b * (size_t)w, l.c, (size_t)w * sizeof *l.z);
        product(p->n, w, x, l.x, (size_t)x, 1, l.w1g, (size_t)w, l.z, (size_t)w, l.panel);
        mlp_scores(&m, &l, p->n, w, score);
        loss += loss_of(s, p, score, it->weight, l.d);
        if (!grad) continue;
        mlp_back(&m, &l, p->n, w, d_w2);
        product(x, w, p->n, l.x, 1, (size_t)x, l.dz, (size_t)w, l.g, (size_t)w, l.panel);
    }
    if (grad) mlp_grad(s, &m, &l, grad);
    return loss;
}

static double item(const struct target_train_shape *s, const void *params,
                   const struct train_item *it, void *scratch, void *grad, void *scores) {
    return s->kind == KERN_SCORE_LATE ? late(s, params, it, scratch, grad, scores)
                                      : mlp(s, params, it, scratch, grad, scores);
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
const struct train_maths CAT(train_maths, TRAIN_ISA) = {.isa = TEXT(TRAIN_ISA),
                                                        .real_bytes = sizeof(real),
                                                        .scratch_bytes = scratch_bytes,
                                                        .item = item};
