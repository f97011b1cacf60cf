#include "base/allocguard.h"

#ifdef TANDEM_ALLOC_GUARD
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static _Thread_local int depth;
static atomic_llong n_regions;

void allocguard_enter(void) {
    depth++;
    atomic_fetch_add(&n_regions, 1);
}
void allocguard_leave(void) {
    depth--;
}
int allocguard_active(void) {
    return depth > 0;
}
long long allocguard_n_regions(void) {
    return atomic_load(&n_regions);
}

static void check(const char *who) {
    if (depth == 0) return;
    depth = 0; /* fprintf may allocate */
    fprintf(stderr, "allocguard: %s inside the step loop\n", who);
    abort();
}

void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__real_aligned_alloc(size_t, size_t);
int __real_posix_memalign(void **, size_t, size_t);
void __real_free(void *);

void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t align, size_t n);
int __wrap_posix_memalign(void **out, size_t align, size_t n);
void __wrap_free(void *p);

void *__wrap_malloc(size_t n) {
    check("malloc");
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t size) {
    check("calloc");
    return __real_calloc(n, size);
}
void *__wrap_realloc(void *p, size_t n) {
    check("realloc");
    return __real_realloc(p, n);
}
void *__wrap_aligned_alloc(size_t align, size_t n) {
    check("aligned_alloc");
    return __real_aligned_alloc(align, n);
}
int __wrap_posix_memalign(void **out, size_t align, size_t n) {
    check("posix_memalign");
    return __real_posix_memalign(out, align, n);
}
void __wrap_free(void *p) {
    if (p) check("free");
    __real_free(p);
}
#else
typedef int allocguard_empty; /* ISO C wants a declaration in every file */
#endif
