/* How the arena is cut and what fits in it: pure functions of the options, shared by kvpool_open
 * and the memory plan so that the two cannot disagree. */
#include "kvpool/kvpool.h"

#include <limits.h>

#include "base/checked.h"
#include "base/err.h"

/* Extents of one page up to so many pages of a class are tried. */
enum { GEOMETRY_MAX_PAGES = 64, STATE_ALIGN = 64 };

const char *kvpool_class_name(enum kvpool_class c) {
    static const char *const names[KVPOOL_N_CLASSES] = {"draft", "shallow", "deep"};
    ASSERT((int)c >= 0 && c < KVPOOL_N_CLASSES);
    return names[c];
}

/* K and V of a page's layers; 0 where that is no size. */
static size_t kv_bytes(const struct kvpool_page_shape *s) {
    size_t bytes;
    if (s->n_layers <= 0 || s->n_kv_heads <= 0 || s->head_dim <= 0 || s->elem_bytes <= 0) return 0;
    if (s->scale_bytes < 0) return 0;
    if (!checked_mul((size_t)s->head_dim, (size_t)s->elem_bytes * KVPOOL_BLOCK, &bytes)) return 0;
    if (!checked_add(bytes, (size_t)s->scale_bytes, &bytes)) return 0;
    if (!checked_mul(bytes, (size_t)s->n_kv_heads, &bytes)) return 0;
    if (!checked_mul(bytes, 2, &bytes)) return 0; /* K and V */
    if (!checked_mul(bytes, (size_t)s->n_layers, &bytes)) return 0;
    return bytes;
}

size_t kvpool_state_offset(const struct kvpool_page_shape *s) {
    size_t at = kv_bytes(s);
    if (at == 0 || s->state_bytes <= 0 || !checked_align(at, STATE_ALIGN, &at)) return 0;
    return at;
}

size_t kvpool_page_bytes(const struct kvpool_page_shape *s) {
    size_t bytes = kv_bytes(s), total;
    if (bytes == 0 || s->state_bytes < 0) return 0;
    if (s->state_bytes > 0 && (!checked_align(bytes, STATE_ALIGN, &bytes) ||
                               !checked_add(bytes, (size_t)s->state_bytes, &bytes)))
        return 0;
    if (!checked_align(bytes, KVPOOL_ALIGN, &total)) return 0;
    return total;
}

/* What extents of `bytes` lose, in millionths of the arena: the largest unused end of an extent,
 * the arena's rest, and half an extent per class (the last extent of a class is half full on
 * average). */
static size_t extent_loss(size_t bytes, size_t arena, const size_t *page, int n_used) {
    double end = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (!page[c]) continue;
        double share = (double)(bytes % page[c]) / (double)bytes;
        if (share > end) end = share;
    }
    double rest = (double)(arena % bytes) / (double)arena;
    double half = .5 * n_used * (double)bytes / (double)arena;
    return (size_t)((end + rest + half) * 1e6);
}

static size_t choose_extent(size_t arena, const size_t *page, size_t largest, int n_used) {
    size_t best = largest, best_loss = extent_loss(largest, arena, page, n_used);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (!page[c]) continue;
        for (size_t k = 1; k <= GEOMETRY_MAX_PAGES; k++) {
            size_t bytes = k * page[c]; /* <= 64 * arena, which is below 2^41 */
            if (bytes < largest) continue;
            if (bytes > arena / (size_t)n_used) break; /* each class must get one */
            size_t loss = extent_loss(bytes, arena, page, n_used);
            if (loss < best_loss || (loss == best_loss && bytes < best)) {
                best = bytes;
                best_loss = loss;
            }
        }
    }
    return best;
}

static int read_shapes(const struct kvpool_options *o, struct kvpool_geometry *g, size_t *largest,
                       int *n_used, struct err *e) {
    *largest = 0;
    *n_used = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const struct kvpool_page_shape *s = &o->shape[c];
        if (s->n_layers == 0) continue;
        g->page_bytes[c] = kvpool_page_bytes(s);
        if (!g->page_bytes[c])
            return err_raise(
                e, E_RANGE,
                "KV page of class %s: %d layers x %d heads x %d x %d bytes + %d + %d is no size",
                kvpool_class_name((enum kvpool_class)c), s->n_layers, s->n_kv_heads, s->head_dim,
                s->elem_bytes, s->scale_bytes, s->state_bytes);
        *largest = max_size(*largest, g->page_bytes[c]);
        ++*n_used;
    }
    if (!*n_used) return err_raise(e, E_RANGE, "KV pool: no class has layers");
    return 0;
}

int kvpool_geometry(const struct kvpool_options *o, struct kvpool_geometry *out, struct err *e) {
    struct kvpool_geometry g = {0};
    size_t largest, sum = 0, least;
    int n_used;
    int rc = read_shapes(o, &g, &largest, &n_used, e);
    if (rc) return rc;
    /* Page ids are 32-bit in units of KVPOOL_ALIGN. */
    if (o->arena_bytes / KVPOOL_ALIGN > INT32_MAX)
        return err_raise(e, E_RANGE, "KV arena of %zu bytes: at most %zu", o->arena_bytes,
                         (size_t)INT32_MAX * KVPOOL_ALIGN);
    if (!checked_mul(largest, (size_t)n_used, &least) || o->arena_bytes < least)
        return err_raise(
            e, E_RANGE,
            "KV arena of %zu bytes: one block of %d tokens needs %d extents of %zu bytes",
            o->arena_bytes, KVPOOL_BLOCK, n_used, largest);
    g.extent_bytes = choose_extent(o->arena_bytes, g.page_bytes, largest, n_used);
    g.n_extents = (int)(o->arena_bytes / g.extent_bytes);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (!g.page_bytes[c]) continue;
        if (!checked_add(sum, o->min_bytes[c], &sum) || sum > o->arena_bytes)
            return err_raise(e, E_RANGE,
                             "guaranteed KV bytes %zu + %zu + %zu exceed the arena's %zu",
                             o->min_bytes[KVPOOL_DRAFT], o->min_bytes[KVPOOL_SHALLOW],
                             o->min_bytes[KVPOOL_DEEP], o->arena_bytes);
        g.pages_per_extent[c] = (int)(g.extent_bytes / g.page_bytes[c]);
        g.min_extents[c] = (int)(o->min_bytes[c] / g.extent_bytes);
    }
    *out = g;
    return 0;
}

/* Do so many pages of each class fit in an empty pool? */
static bool fits(const struct kvpool_geometry *g, const long long need[KVPOOL_N_CLASSES]) {
    long long n = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (!g->page_bytes[c]) continue;
        long long ppe = g->pages_per_extent[c];
        long long extents = need[c] / ppe + (need[c] % ppe != 0);
        if (extents < g->min_extents[c]) extents = g->min_extents[c];
        if (extents > g->n_extents) return false;
        n += extents;
    }
    return n <= g->n_extents;
}

static bool fits_blocks(const struct kvpool_geometry *g, long long n_seqs, long long n_blocks,
                        bool with_draft) {
    long long pages = n_seqs * n_blocks; /* each < 2^31 */
    long long need[KVPOOL_N_CLASSES] = {with_draft ? pages : 0, pages, pages};
    return fits(g, need);
}

int kvpool_geometry_max_blocks(const struct kvpool_geometry *g, int n_seqs, bool with_draft) {
    long long low = 0,
              high = INT_MAX / KVPOOL_BLOCK; /* low fits; binary search, fits is monotone */
    ASSERT(n_seqs > 0);
    while (low < high) {
        long long mid = (low + high + 1) / 2;
        if (fits_blocks(g, n_seqs, mid, with_draft)) low = mid;
        else high = mid - 1;
    }
    return (int)low;
}

int kvpool_geometry_max_seqs(const struct kvpool_geometry *g, int n_tokens, bool with_draft) {
    long long low = 0, high = INT_MAX;
    long long n_blocks = n_tokens / KVPOOL_BLOCK + (n_tokens % KVPOOL_BLOCK != 0);
    ASSERT(n_tokens > 0);
    while (low < high) {
        long long mid = (low + high + 1) / 2;
        if (fits_blocks(g, mid, n_blocks, with_draft)) low = mid;
        else high = mid - 1;
    }
    return (int)low;
}
