#ifndef TANDEM_BENCH_DEVICE_FLOOR_H
#define TANDEM_BENCH_DEVICE_FLOOR_H

/* What a CUDA device cannot go under (bytes a second, products a second), a clock on the backend's
 * stream, and random contents made on the device. device_floor.cu does it, device_floor_absent.c
 * stands in where the build has no CUDA. Owned by one thread, the one that uses the backend. */

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

struct err;
struct device_floor;

enum { DEVICE_MARKS = 130 };

/* k must be the CUDA backend's and outlive it. E_UNSUPPORTED in a build without CUDA. */
int device_floor_open(struct device_floor **out, struct kern *k, struct err *e);
void device_floor_close(struct device_floor *f);

/* Bytes a second: of a device-to-device copy (read and written), of a read-only sweep; over `bytes`
 * of random data each, medians of 15. The better one is the run's bandwidth. */
int device_floor_bandwidth(struct device_floor *f, size_t bytes, double *copy, double *sweep,
                           struct err *e);

/* Operations a second (two a product) of cuBLASLt, bf16, 8192 cubed, random data; median of 15. */
int device_floor_matrix_rate(struct device_floor *f, double *rate, struct err *e);

/* Note the time at which the stream gets here as mark i (0 .. DEVICE_MARKS - 1). Does not wait. */
int device_floor_mark(struct device_floor *f, int i, struct err *e);
/* Milliseconds between two marks; waits for the later one. */
int device_floor_between(struct device_floor *f, int from, int to, double *ms, struct err *e);

/* Regions of device memory get values uniform in (-scale, scale) of type F16, BF16 or F32: region
 * i of n begins at base + page[i] * 1024 (page: device memory), or at base + i * bytes where page
 * is NULL, and takes `bytes` bytes, a multiple of 16. A pure function of seed, region and place. */
int device_floor_fill(struct device_floor *f, void *base, const int32_t *page, int n, size_t bytes,
                      enum kern_dtype t, float scale, uint32_t seed, struct err *e);
/* Every byte of [p, p + bytes) becomes `value`: 0xFF makes NaNs. */
int device_floor_set(struct device_floor *f, void *p, int value, size_t bytes, struct err *e);

#ifdef __cplusplus
}
#endif
#endif
