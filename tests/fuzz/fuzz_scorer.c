/* Any bytes as a scorer's file: refused with a message, or a scorer whose fields are in range,
 * whose weights are as many as they say and which is held against a model. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/err.h"
#include "model/config.h"
#include "target/scorer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Touches each; NULL where there must be none. */
static float sum(const float *at, size_t n) {
    float s = 0;
    if ((at == NULL) != (n == 0)) abort();
    for (size_t i = 0; i < n; i++) s += at[i];
    return s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct target_scorer_file *f = NULL;
    struct err e = {0};
    if (target_scorer_read_bytes(&f, data, n, &e)) {
        if (!e.message[0] || f) abort();
        return 0;
    }
    if (f->n_queries < 1 || f->n_queries > KERN_STATE_QUERIES || f->layer < 1) abort();
    if (f->curve.n < 0 || f->curve.n > TARGET_CURVE_POINTS) abort();
    const size_t h = (size_t)f->hidden, w = f->kind == KERN_SCORE_MLP ? (size_t)f->width : 0;
    const size_t p = f->kind == KERN_SCORE_LATE ? (size_t)f->n_heads * (size_t)f->head_dim * h : 0;
    const size_t norm = w && f->has_layernorm ? 2 * h : 0;
    if ((2 * p + 2 * norm + w * (2 * h + 2) + (w > 0)) * sizeof(float) > TARGET_SCORER_MAX_BYTES)
        abort();
    volatile float all = sum(f->a, p) + sum(f->b, p) + sum(f->ln_weight, norm) +
                         sum(f->ln_bias, norm) + sum(f->w1, w * 2 * h) + sum(f->b1, w) +
                         sum(f->w2, w) + sum(f->b2, w > 0);
    (void)all;
    struct model_config c = {.hidden = f->hidden, .n_layers = 32};
    e = (struct err){0};
    if (target_scorer_check(f, &c, f->fingerprint, &e) && !e.message[0]) abort();
    if (!target_scorer_check(f, &c, ~f->fingerprint, &e)) abort(); /* another model's */
    target_scorer_free(f);
    return 0;
}
