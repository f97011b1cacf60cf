#ifndef TANDEM_BASE_ALLOCGUARD_H
#define TANDEM_BASE_ALLOCGUARD_H

/* Proof that the step loop allocates nothing. In debug builds malloc, calloc, realloc,
 * aligned_alloc, posix_memalign and free are wrapped by the linker (--wrap); a call from a thread
 * that is inside a guarded region aborts with its name. In release builds these are empty. */

#ifdef TANDEM_ALLOC_GUARD
void allocguard_enter(void); /* nests */
void allocguard_leave(void);
int allocguard_active(void);          /* this thread is inside a region */
long long allocguard_n_regions(void); /* regions entered so far: shows that the guard was live */
#else
static inline void allocguard_enter(void) {}
static inline void allocguard_leave(void) {}
static inline int allocguard_active(void) {
    return 0;
}
static inline long long allocguard_n_regions(void) {
    return 0;
}
#endif

#endif
