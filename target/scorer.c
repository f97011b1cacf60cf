/* A scorer in memory: which tensors it has, whether it suits a model, its weights on a backend. */
#include "target/scorer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "model/config.h"
#include "target/scorer_private.h"

/* ---- Shape ---- */

static int check_int(const char *name, int value, int lo, int hi, struct err *e) {
    if (value >= lo && value <= hi) return 0;
    if (lo == hi) return err_raise(e, E_RANGE, "%s is %d, it must be %d here", name, value, lo);
    return err_raise(e, E_RANGE, "%s is %d, allowed is [%d, %d]", name, value, lo, hi);
}

static int check_curve(const struct target_curve *c, struct err *e) {
    if (c->n < 0 || c->n > TARGET_CURVE_POINTS)
        return err_raise(e, E_RANGE, "curve has %d points, allowed are [0, %d]", c->n,
                         TARGET_CURVE_POINTS);
    for (int i = 0; i < c->n; i++)
        if (!(c->at[i].tokens >= 1 && c->at[i].tokens <= 1e9 && c->at[i].keep > 0 &&
              c->at[i].keep <= 1) ||
            (i > 0 && !(c->at[i].tokens > c->at[i - 1].tokens)))
            return err_raise(e, E_RANGE,
                             "curve: point %d is %g:%g, tokens must ascend in [1, 1e9], keep lies "
                             "in (0, 1]",
                             i, c->at[i].tokens, c->at[i].keep);
    return 0;
}

int scorer__check_shape(const struct target_scorer_file *f, struct err *e) {
    const bool is_late = f->kind == KERN_SCORE_LATE, is_mlp = f->kind == KERN_SCORE_MLP;
    int rc = check_int("kind", (int)f->kind, 0, KERN_SCORE_MLP, e);
    if (!rc) rc = check_int("layer", f->layer, 1, MODEL_MAX_LAYERS - 1, e);
    if (!rc) rc = check_int("hidden", f->hidden, 1, MODEL_MAX_HIDDEN, e);
    if (!rc) rc = check_int("heads", f->n_heads, is_late, is_late ? TARGET_SCORER_MAX_HEADS : 0, e);
    if (!rc)
        rc = check_int("head_dim", f->head_dim, is_late, is_late ? TARGET_SCORER_MAX_HEAD_DIM : 0,
                       e);
    if (!rc) rc = check_int("width", f->width, is_mlp, is_mlp ? TARGET_SCORER_MAX_WIDTH : 0, e);
    if (!rc) rc = check_int("queries", f->n_queries, 1, KERN_STATE_QUERIES, e);
    if (!rc) rc = check_int("by_first", f->by_first, 0, !is_late, e);
    if (!rc) rc = check_int("layernorm", f->has_layernorm, 0, is_mlp, e);
    if (!rc) rc = check_int("block", f->block, 1, 1 << 20, e);
    if (!rc && !(f->smoothing >= 0 && f->smoothing <= 1))
        rc = err_raise(e, E_RANGE, "smoothing is %g, allowed is [0, 1]", f->smoothing);
    if (!rc) rc = check_curve(&f->curve, e);
    if (!rc && !memchr(f->recipe, 0, sizeof f->recipe))
        rc = err_raise(e, E_RANGE, "recipe has no end within %zu bytes", sizeof f->recipe);
    if (!rc && target_scorer_file_bytes(f) > TARGET_SCORER_MAX_BYTES)
        rc = err_raise(e, E_RANGE, "the weights take %zu bytes, allowed are %d",
                       target_scorer_file_bytes(f), TARGET_SCORER_MAX_BYTES);
    return rc;
}

void scorer__tensors(struct target_scorer_file *f, struct scorer_tensor out[SCORER_N_TENSORS]) {
    const size_t hidden = (size_t)f->hidden, width = (size_t)f->width;
    const size_t projected = (size_t)f->n_heads * (size_t)f->head_dim;
    const int late = f->kind == KERN_SCORE_LATE, mlp = f->kind == KERN_SCORE_MLP;
    const int norm = mlp && f->has_layernorm;
    const struct scorer_tensor all[SCORER_N_TENSORS] = {
        {"a.weight", {projected, hidden}, 2 * late, 0, &f->a},
        {"b.weight", {projected, hidden}, 2 * late, 0, &f->b},
        {"norm.weight", {2 * hidden, 1}, norm, 0, &f->ln_weight},
        {"norm.bias", {2 * hidden, 1}, norm, 0, &f->ln_bias},
        {"up.weight", {width, 2 * hidden}, 2 * mlp, 0, &f->w1},
        {"up.bias", {width, 1}, mlp, 0, &f->b1},
        {"down.weight", {1, width}, 2 * mlp, 0, &f->w2},
        {"down.bias", {1, 1}, mlp, 0, &f->b2},
    };
    memcpy(out, all, sizeof all);
    for (int i = 0; i < SCORER_N_TENSORS; i++)
        out[i].n = out[i].n_dims ? out[i].dims[0] * out[i].dims[1] : 0;
}

size_t target_scorer_file_bytes(const struct target_scorer_file *f) {
    struct target_scorer_file shape = *f;
    struct scorer_tensor t[SCORER_N_TENSORS];
    size_t bytes = 0;
    scorer__tensors(&shape, t);
    for (int i = 0; i < SCORER_N_TENSORS; i++)
        bytes += align_up(t[i].n * sizeof(float), KERN_ACT_ALIGN);
    return bytes;
}

int target_scorer_make(struct target_scorer_file **out, const struct target_scorer_file *shape,
                       struct err *e) {
    struct scorer_tensor t[SCORER_N_TENSORS];
    *out = NULL;
    int rc = scorer__check_shape(shape, e);
    if (rc) return rc;
    const size_t bytes = target_scorer_file_bytes(shape);
    const size_t head = align_up(sizeof **out, KERN_ACT_ALIGN);
    struct target_scorer_file *f = calloc(1, head + bytes);
    if (!f) return err_raise(e, E_NOMEM, "no memory for a scorer of %zu bytes", bytes);
    *f = *shape;
    scorer__tensors(f, t);
    uint8_t *at = (uint8_t *)f + head;
    for (int i = 0; i < SCORER_N_TENSORS; i++) {
        *t[i].at = t[i].n ? (float *)(void *)at : NULL;
        at += align_up(t[i].n * sizeof(float), KERN_ACT_ALIGN);
    }
    *out = f;
    return 0;
}

void target_scorer_free(struct target_scorer_file *f) {
    free(f);
}

/* ---- Does it suit? ---- */

static int differs(const char *what, long long file, long long model, struct err *e) {
    return err_raise(e, E_INVALID, "the scorer was trained for %s %lld, the model has %lld", what,
                     file, model);
}

int target_scorer_check(const struct target_scorer_file *f, const struct model_config *c,
                        uint64_t fingerprint, struct err *e) {
    struct target_scorer_file all = *f;
    struct scorer_tensor t[SCORER_N_TENSORS];
    int rc = scorer__check_shape(f, e);
    if (rc) return rc;
    if (f->hidden != c->hidden) return differs("a hidden size of", f->hidden, c->hidden, e);
    if (f->layer >= c->n_layers)
        return err_raise(e, E_INVALID,
                         "the scorer's select layer is %d, the model has layers 0..%d", f->layer,
                         c->n_layers - 1);
    if (f->block != KERN_BLOCK)
        return err_raise(e, E_INVALID,
                         "the scorer was trained for blocks of %d tokens, ours are %d", f->block,
                         KERN_BLOCK);
    if (f->fingerprint != fingerprint)
        return err_raise(
            e, E_INVALID,
            "the scorer was trained for the model of fingerprint %016llx, this one has "
            "%016llx",
            (unsigned long long)f->fingerprint, (unsigned long long)fingerprint);
    scorer__tensors(&all, t);
    for (int i = 0; i < SCORER_N_TENSORS; i++)
        for (size_t k = 0; k < t[i].n; k++)
            if (!isfinite((*t[i].at)[k]))
                return err_raise(e, E_NUMERIC, "the scorer's %s holds %g at %zu", t[i].name,
                                 (double)(*t[i].at)[k], k);
    return 0;
}

/* ---- On a backend ---- */

struct kern_scorer target_scorer_plain(int selector, int cols) {
    ASSERT(target_by_states(selector) && selector != TARGET_SCORER);
    return (struct kern_scorer){.kind = selector == TARGET_MINMAX  ? KERN_SCORE_MINMAX
                                        : selector == TARGET_BOUND ? KERN_SCORE_BOUND
                                                                   : KERN_SCORE_MEAN,
                                .cols = cols,
                                .n_queries = KERN_STATE_QUERIES,
                                .normed = true};
}

struct target_scorer {
    struct kern *k;
    struct kern_scorer kern;
    void *memory; /* NULL: no weights */
    size_t bytes;
};

struct kern_scorer target_scorer_shape(const struct target_scorer_file *f) {
    return (struct kern_scorer){.kind = f->kind,
                                .cols = f->hidden,
                                .n_queries = f->n_queries,
                                .normed = f->normed,
                                .by_first = f->by_first,
                                .n_heads = f->n_heads,
                                .head_dim = f->head_dim,
                                .width = f->width};
}

int target_scorer_load(struct target_scorer **out, const struct target_scorer_file *f,
                       struct kern *k, struct err *e) {
    struct target_scorer_file all = *f;
    struct scorer_tensor t[SCORER_N_TENSORS];
    const float *placed[SCORER_N_TENSORS] = {0};
    *out = NULL;
    int rc = scorer__check_shape(f, e);
    if (rc) return rc;
    struct target_scorer *s = calloc(1, sizeof *s);
    if (!s) return err_raise(e, E_NOMEM, "no memory for a scorer");
    s->k = k;
    s->bytes = target_scorer_file_bytes(f);
    if (s->bytes) rc = k->ops->reserve(k, s->bytes, &s->memory, e);
    scorer__tensors(&all, t);
    uint8_t *at = s->memory;
    for (int i = 0; i < SCORER_N_TENSORS && !rc; i++) {
        if (!t[i].n) continue;
        placed[i] = (const float *)(void *)at;
        rc = k->ops->upload(k, at, *t[i].at, t[i].n * sizeof(float), e);
        at += align_up(t[i].n * sizeof(float), KERN_ACT_ALIGN);
    }
    if (!rc) rc = k->ops->sync(k, e);
    if (rc) {
        target_scorer_close(s);
        return rc;
    }
    s->kern = target_scorer_shape(f);
    s->kern.a = placed[0];
    s->kern.b = placed[1];
    s->kern.ln_weight = placed[2];
    s->kern.ln_bias = placed[3];
    s->kern.w1 = placed[4];
    s->kern.b1 = placed[5];
    s->kern.w2 = placed[6];
    s->kern.b2 = placed[7];
    *out = s;
    return 0;
}

const struct kern_scorer *target_scorer_kern(const struct target_scorer *s) {
    return &s->kern;
}

size_t target_scorer_bytes(const struct target_scorer *s) {
    return s->bytes;
}

void target_scorer_close(struct target_scorer *s) {
    if (!s) return;
    if (s->memory) s->k->ops->unreserve(s->k, s->memory);
    free(s);
}
