#include "base/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

enum { ARENA_ALIGN = 64 };

struct arena_chunk {
    struct arena_chunk *older;
    size_t bytes; /* usable */
    size_t used;
    _Alignas(64) unsigned char data[];
};

void arena_init(struct arena *a, size_t chunk_bytes, size_t limit_bytes) {
    ASSERT(chunk_bytes > 0);
    *a = (struct arena){.chunk_bytes = chunk_bytes, .limit_bytes = limit_bytes};
}

static struct arena_chunk *chunk_open(struct arena *a, size_t bytes) {
    size_t total, held;
    if (!checked_align(bytes, ARENA_ALIGN, &bytes)) return NULL;
    if (!checked_add(bytes, sizeof(struct arena_chunk), &total)) return NULL;
    if (!checked_add(a->held_bytes, bytes, &held) || held > a->limit_bytes) return NULL;
    struct arena_chunk *c = aligned_alloc(ARENA_ALIGN, align_up(total, ARENA_ALIGN));
    if (!c) return NULL;
    c->older = a->chunk;
    c->bytes = bytes;
    c->used = 0;
    a->chunk = c;
    a->held_bytes = held;
    return c;
}

void *arena_take(struct arena *a, size_t bytes) {
    size_t need;
    if (!checked_align(bytes, ARENA_ALIGN, &need)) return NULL;
    struct arena_chunk *c = a->chunk;
    if (!c || c->bytes - c->used < need) {
        c = chunk_open(a, max_size(need, a->chunk_bytes));
        if (!c) return NULL;
    }
    void *p = c->data + c->used;
    c->used += need;
    return p;
}

void *arena_take_zeroed(struct arena *a, size_t n, size_t size) {
    size_t bytes;
    if (!checked_mul(n, size, &bytes)) return NULL;
    void *p = arena_take(a, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

char *arena_strndup(struct arena *a, const char *s, size_t n) {
    size_t bytes;
    if (!checked_add(n, 1, &bytes)) return NULL;
    char *p = arena_take(a, bytes);
    if (!p) return NULL;
    if (n) memcpy(p, s, n);
    p[n] = 0;
    return p;
}

void arena_deinit(struct arena *a) {
    while (a->chunk) {
        struct arena_chunk *older = a->chunk->older;
        free(a->chunk);
        a->chunk = older;
    }
    memset(a, 0, sizeof *a);
}
