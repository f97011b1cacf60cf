#ifndef TANDEM_BASE_CLOCK_H
#define TANDEM_BASE_CLOCK_H

#include <stdint.h>

/* Monotonic time in nanoseconds since an arbitrary start. Never goes back; thread safe. */
int64_t clock_ns(void);

static inline double clock_ms_since(int64_t start_ns) {
    return (double)(clock_ns() - start_ns) / 1e6;
}

#endif
