#ifndef TANDEM_BASE_CHECKED_H
#define TANDEM_BASE_CHECKED_H

/* Arithmetic that says when it would overflow. For every size that comes from a file, a socket or a
 * product of counts: `if (!checked_mul(a, b, &bytes)) return err_raise(...)`. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* *out = a + b, a * b; false (out undefined) on overflow. */
static inline bool checked_add(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}
static inline bool checked_mul(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}

/* *out = x rounded up to a multiple of `align` (a power of two). */
static inline bool checked_align(size_t x, size_t align, size_t *out) {
    if (!checked_add(x, align - 1, out)) return false;
    *out &= ~(align - 1);
    return true;
}

/* The same where the numbers are our own and known to be small. */
static inline size_t align_up(size_t x, size_t align) {
    return (x + align - 1) & ~(align - 1);
}
static inline size_t ceil_div(size_t a, size_t b) {
    return a / b + (a % b != 0);
}
static inline size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}
static inline size_t max_size(size_t a, size_t b) {
    return a > b ? a : b;
}

#endif
