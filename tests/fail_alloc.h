#ifndef TANDEM_TESTS_FAIL_ALLOC_H
#define TANDEM_TESTS_FAIL_ALLOC_H

/* Make the n-th allocation of our own code fail. A test that uses it links tests/fail_alloc.o with
 * `ldflags = $ldflags $fail_alloc_ldflags`. Not for threads. */

#include <stddef.h>

/* The allocation number `n` from now on (1 is the next) and all later ones fail; 0: none. */
void fail_alloc_at(long n);

/* Allocations that failed since. */
long fail_alloc_n_failed(void);

/* Blocks allocated and not freed since the start. */
long fail_alloc_live(void);

/* For libraries that take allocation functions (jansson's json_set_alloc_funcs). */
void *fail_alloc_malloc(size_t n);
void fail_alloc_free(void *p);

#endif
