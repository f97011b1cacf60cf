#ifndef TANDEM_BASE_ARENA_H
#define TANDEM_BASE_ARENA_H

/* A bump allocator: what is taken together is freed together. For what a loaded file or a request's
 * message owns. */

#include <stdbool.h>
#include <stddef.h>

struct arena_chunk;

struct arena {
    struct arena_chunk *chunk; /* newest first; NULL until the first take */
    size_t chunk_bytes;        /* size of the next chunk, at least */
    size_t limit_bytes;        /* total that it may ever hold */
    size_t held_bytes;         /* allocated from the heap so far */
};

/* An arena that never holds more than `limit_bytes`. Allocates nothing yet. */
void arena_init(struct arena *a, size_t chunk_bytes, size_t limit_bytes);

/* `bytes` (0 allowed) aligned to 64, uninitialised; NULL where the limit or the heap says no. */
void *arena_take(struct arena *a, size_t bytes);

/* The same, zeroed, for n x size with the product checked. */
void *arena_take_zeroed(struct arena *a, size_t n, size_t size);

/* Copy of `s[0..n)` with a NUL behind. */
char *arena_strndup(struct arena *a, const char *s, size_t n);

/* Free everything. Safe on a zeroed struct, and twice. */
void arena_deinit(struct arena *a);

#endif
