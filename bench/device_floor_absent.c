#include "bench/device_floor.h"

#include "base/err.h"

/* Linked in place of device_floor.cu where the build has no CUDA. Nothing but open can be reached:
 * without a floor there is nothing to hand to the others. */
int device_floor_open(struct device_floor **out, struct kern *k, struct err *e) {
    (void)k;
    *out = NULL;
    return err_raise(e, E_UNSUPPORTED, "this build has no CUDA: nothing to measure a device with");
}

void device_floor_close(struct device_floor *f) {
    ASSERT(!f);
}

int device_floor_bandwidth(struct device_floor *f, size_t bytes, double *copy, double *sweep,
                           struct err *e) {
    (void)f, (void)bytes;
    *copy = *sweep = 0;
    return err_raise(e, E_UNSUPPORTED, "no CUDA in this build");
}

int device_floor_matrix_rate(struct device_floor *f, double *rate, struct err *e) {
    (void)f;
    *rate = 0;
    return err_raise(e, E_UNSUPPORTED, "no CUDA in this build");
}

int device_floor_mark(struct device_floor *f, int i, struct err *e) {
    (void)f, (void)i;
    return err_raise(e, E_UNSUPPORTED, "no CUDA in this build");
}

int device_floor_between(struct device_floor *f, int from, int to, double *ms, struct err *e) {
    (void)f, (void)from, (void)to;
    *ms = 0;
    return err_raise(e, E_UNSUPPORTED, "no CUDA in this build");
}

int device_floor_fill(struct device_floor *f, void *base, const int32_t *page, int n, size_t bytes,
                      enum kern_dtype t, float scale, uint32_t seed, struct err *e) {
    (void)f, (void)base, (void)page, (void)n, (void)bytes, (void)t, (void)scale, (void)seed;
    return err_raise(e, E_UNSUPPORTED, "no CUDA in this build");
}

int device_floor_set(struct device_floor *f, void *p, int value, size_t bytes, struct err *e) {
    (void)f, (void)p, (void)value, (void)bytes;
    return err_raise(e, E_UNSUPPORTED, "no CUDA in this build");
}
