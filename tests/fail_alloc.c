#include "tests/fail_alloc.h"

#include <stdlib.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t align, size_t n);
void __real_free(void *p);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t align, size_t n);
int __wrap_posix_memalign(void **out, size_t align, size_t n);
void __wrap_free(void *p);

static long countdown, n_failed, live;

void fail_alloc_at(long n) {
    countdown = n;
    n_failed = 0;
}

long fail_alloc_n_failed(void) {
    return n_failed;
}
long fail_alloc_live(void) {
    return live;
}

static int must_fail(void) {
    if (countdown == 0) return 0;
    if (countdown > 1) {
        countdown--;
        return 0;
    }
    n_failed++;
    return 1;
}

static void *counted(void *p) {
    if (p) live++;
    return p;
}

void *__wrap_malloc(size_t n) {
    return must_fail() ? NULL : counted(__real_malloc(n));
}

void *__wrap_calloc(size_t n, size_t size) {
    return must_fail() ? NULL : counted(__real_calloc(n, size));
}

void *__wrap_realloc(void *p, size_t n) {
    if (must_fail()) return NULL;
    void *q = __real_realloc(p, n);
    if (q && !p) live++;
    return q;
}

void *__wrap_aligned_alloc(size_t align, size_t n) {
    return must_fail() ? NULL : counted(__real_aligned_alloc(align, n));
}

/* Only so that the debug variant, which wraps it too, links. */
int __wrap_posix_memalign(void **out, size_t align, size_t n) {
    *out = __wrap_aligned_alloc(align, n);
    return *out ? 0 : 12;
}

void __wrap_free(void *p) {
    if (p) live--;
    __real_free(p);
}

void *fail_alloc_malloc(size_t n) {
    return __wrap_malloc(n);
}
void fail_alloc_free(void *p) {
    __wrap_free(p);
}
