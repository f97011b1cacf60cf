#include "tests/cuda_helper.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"

struct kern *cuda_or_skip(void) {
    struct kern_options o = {.precision = KERN_FAST};
    struct kern *k = NULL;
    struct err e = {0};
    int rc = kern_cuda_open(&k, &o, &e);
    if (rc == E_UNSUPPORTED) test_skip(e.message);
    assert_ok(rc, e);
    return k;
}

struct kern *cpu_twin(void) {
    struct kern_options o = {.n_threads = 1, .precision = KERN_REFERENCE};
    struct kern *k = NULL;
    struct err e = {0};
    assert_ok(kern_cpu_open(&k, &o, &e), e);
    return k;
}

void *dev_put(struct kern *k, const void *host, size_t n) {
    void *p = NULL, *ones = NULL;
    struct err e = {0};
    assert_ok(k->ops->reserve(k, n, &p, &e), e);
    if (!host) {
        ones = malloc(n);
        assert_non_null(ones);
        memset(ones, 0xFF, n);
    }
    assert_ok(k->ops->upload(k, p, host ? host : ones, n, &e), e);
    assert_ok(k->ops->sync(k, &e), e);
    free(ones);
    return p;
}

void *dev_get(struct kern *k, const void *dev, size_t n) {
    void *p = malloc(n);
    struct err e = {0};
    assert_non_null(p);
    assert_ok(k->ops->download(k, p, dev, n, &e), e);
    return p;
}

float test_signed(uint64_t seed, uint64_t i) {
    return (float)(int32_t)rng_u32(seed, i / 4, RNG_TEST, (uint32_t)(i % 4)) * 0x1p-31f;
}

float *test_floats(uint64_t seed, size_t n, float scale) {
    float *x = malloc(n * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = scale * test_signed(seed, i);
    return x;
}

double test_rel_error(const float *got, const float *want, size_t n, double atol) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - (double)want[i]) / (atol + fabs((double)want[i]));
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
    }
    return worst;
}
