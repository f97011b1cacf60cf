/* What a machine's memory and arithmetic do in the backend's own product. */
#include <stdlib.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/err.h"
#include "cmd/plan_gain.h"

enum { COLS = 4096, ROWS = 1 << 15, MANY = 16 };
#define LEAST_NS 200000000

struct bed {
    struct kern *k;
    struct kern_weight w;
    void *matrix, *act, *x, *out, *file;
};

static void bed_close(struct bed *b) {
    const struct kern_ops *ops = b->k->ops;
    void *const taken[] = {b->matrix, b->act, b->x, b->out};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (taken[i]) ops->unreserve(b->k, taken[i]);
    free(b->file);
}

static int bed_open(struct bed *b, enum kern_dtype t, struct err *e) {
    const struct kern_ops *ops = b->k->ops;
    size_t packed = ops->weight_bytes(b->k, t, ROWS, COLS);
    size_t file = (size_t)ROWS * COLS / (size_t)kern_dtype_block(t) * kern_dtype_block_bytes(t);
    struct kern_rows most = {.n_gen = MANY};
    if (!packed)
        return err_raise(e, E_UNSUPPORTED, "no product of %s to measure", kern_dtype_name(t));
    b->file = calloc(1, file);
    if (!b->file) return err_raise(e, E_NOMEM, "no memory for a matrix of %zu bytes", file);
    int rc = ops->reserve(b->k, packed, &b->matrix, e);
    if (!rc) rc = ops->reserve(b->k, ops->act_bytes(b->k, most, COLS), &b->act, e);
    if (!rc) rc = ops->reserve(b->k, (size_t)MANY * COLS * sizeof(float), &b->x, e);
    if (!rc) rc = ops->reserve(b->k, (size_t)MANY * ROWS * sizeof(float), &b->out, e);
    return rc ? rc : ops->weight_pack(b->k, &b->w, b->matrix, t, ROWS, COLS, b->file, e);
}

/* Seconds of one product with n generated rows: the fastest of some. */
static int time_product(struct bed *b, int n, double *seconds, struct err *e) {
    const struct kern_ops *ops = b->k->ops;
    struct kern_rows rows = {.n_gen = n};
    struct kern_act act = {b->act, ops->act_bytes(b->k, rows, COLS), b->w.dtype};
    int rc = ops->pack(b->k, rows, COLS, b->x, act);
    int64_t begin = clock_ns(), best = INT64_MAX;
    for (int i = 0; !rc && (i < 3 || clock_ns() - begin < LEAST_NS); i++) {
        int64_t start = clock_ns();
        rc = ops->matmul(b->k, rows, &b->w, act, b->out, ROWS, 0);
        if (!rc) rc = ops->sync(b->k, e);
        if (clock_ns() - start < best) best = clock_ns() - start;
    }
    *seconds = (double)best / 1e9;
    return rc;
}

int plan_measure(struct kern *k, enum kern_dtype t, double *bytes_per_s, double *macs_per_s,
                 struct err *e) {
    struct bed b = {.k = k};
    double one = 0, many = 0;
    int rc = bed_open(&b, t, e);
    if (!rc) rc = time_product(&b, 1, &one, e);
    if (!rc) rc = time_product(&b, MANY, &many, e);
    if (!rc) {
        *bytes_per_s = (double)b.w.bytes / one;
        *macs_per_s = (double)MANY * ROWS * COLS / many;
    }
    bed_close(&b);
    return rc;
}
