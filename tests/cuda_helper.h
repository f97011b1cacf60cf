#ifndef TANDEM_TESTS_CUDA_HELPER_H
#define TANDEM_TESTS_CUDA_HELPER_H

/* What the tests of the CUDA kernels share: a backend or a skip, arrays on the device, and the
 * CPU's reference twin beside it. */

#include "kernels/kernels.h"
#include "tests/harness.h"

/* The CUDA backend; leaves the test as skipped where this build or machine has none. */
struct kern *cuda_or_skip(void);
/* The double twin: kern_cpu_open with KERN_REFERENCE, one thread. */
struct kern *cpu_twin(void);

/* A new device array that holds a copy of n bytes (host NULL: bytes of 0xFF, which are NaNs as
 * floats, so that what nobody writes shows). Freed by k->ops->unreserve. */
void *dev_put(struct kern *k, const void *host, size_t n);
/* Copy n bytes back into a new heap block. */
void *dev_get(struct kern *k, const void *dev, size_t n);

/* Uniform in (-1, 1), a pure function of (seed, i). */
float test_signed(uint64_t seed, uint64_t i);
/* A heap array of n of them times scale. */
float *test_floats(uint64_t seed, size_t n, float scale);

/* max |got - want| / (atol + |want|) over n; NaN counts as infinite. */
double test_rel_error(const float *got, const float *want, size_t n, double atol);

#endif
