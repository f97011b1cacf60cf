/* Prompts that are computed sparsely: which blocks the deep layers of a chunk's rows read.
 *
 * A list is made where a chunk of the law begins, of the blocks before it and by the states before
 * it, so that it is a function of the prefix alone: passes end at such borders (schedule.c), scores
 * are fetched there, and the next pass reads the list. The chunk's own states have no say: they
 * would be known in the middle of its pass, and prompts that share a prefix and part in the middle
 * of a chunk could not share its pages.
 *
 * Who finds cached pages goes on in the middle of a chunk, whose list needs states that are gone.
 * So lists are remembered in a table of fixed size, under the cached block that ends at their
 * border, which the pool found by comparing tokens; where one is not known (any more) less of what
 * is cached is taken, down to where it is not needed. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/checked.h"
#include "base/err.h"
#include "engine/engine_private.h"

enum { N_SETS = 256, N_WAYS = 4, WORD_BITS = 64 };

struct engine_known {
    uint64_t serial; /* of the cached block at the border; 0: an empty place */
    uint64_t used;   /* the greater, the later */
};

/* ---- Lists that are known ---- */

static size_t n_words(const struct engine_sizes *z) {
    return ((size_t)z->pool.max_blocks + WORD_BITS - 1) / WORD_BITS;
}

size_t engine__prefill_bytes(const struct engine_sizes *z) {
    if (z->o.select_layer == z->model_layers || !z->o.prefix_cache) return 0;
    return (size_t)N_SETS * N_WAYS * (sizeof(struct engine_known) + n_words(z) * sizeof(uint64_t));
}

int engine__prefill_open(struct engine *g, struct err *e) {
    size_t bytes = engine__prefill_bytes(&g->sizes);
    if (bytes == 0) return 0;
    g->known.entry = calloc(1, bytes);
    if (!g->known.entry) return err_raise(e, E_NOMEM, "no memory for the lists of prompts");
    g->known.bits = (uint64_t *)(void *)(g->known.entry + N_SETS * N_WAYS);
    return 0;
}

void engine__prefill_close(struct engine *g) {
    free(g->known.entry);
}

/* The place of a serial in its set; the one to be taken for it where it is not there. */
static size_t place_of(const struct engine *g, uint64_t serial, bool *found) {
    size_t set = (size_t)(XXH3_64bits(&serial, sizeof serial) % N_SETS);
    size_t first = set * N_WAYS, oldest = first;
    for (size_t i = first; i < first + N_WAYS; i++) {
        const struct engine_known *k = &g->known.entry[i];
        *found = k->serial == serial;
        if (*found) return i;
        if (k->used < g->known.entry[oldest].used) oldest = i;
    }
    return oldest;
}

static bool is_known(const struct engine *g, uint64_t serial) {
    bool found;
    place_of(g, serial, &found);
    return found;
}

static uint64_t *bits_of(const struct engine *g, size_t place) {
    return g->known.bits + place * n_words(&g->sizes);
}

/* ---- Cached blocks ---- */

static struct kvpool_walk walk_of(const struct engine_request *r) {
    return (struct kvpool_walk){
        .salt = engine__prefill_salt(r), .conversation = engine__sparse_owner(r), .node = -1};
}

/* Along the blocks of its prompt to `to`, *at tokens of which were passed; false: not all are
 * cached. */
static bool walk_to(const struct engine *g, const struct engine_request *r, struct kvpool_walk *w,
                    int *at, int to) {
    for (; *at < to; *at += KVPOOL_BLOCK)
        if (!kvpool_walk_next(g->pool, w, r->ids + *at)) return false;
    return true;
}

/* The block of its prompt that ends at `to`, as r->place; false: not all up to it are cached. Goes
 * on from where the last call came to, so that a prompt is walked once and not once a border. */
static bool reach(const struct engine *g, struct engine_request *r, int to) {
    if (r->n_placed == 0 || r->n_placed > to || !kvpool_walk_holds(g->pool, &r->place)) {
        r->place = walk_of(r);
        r->n_placed = 0;
    }
    return walk_to(g, r, &r->place, &r->n_placed, to);
}

/* A prompt whose blocks the full cache did not take needs no list: nobody will find its pages. */
static void remember(struct engine *g, struct engine_request *r, int border) {
    bool found;
    if (!g->known.entry || !reach(g, r, border)) return;
    size_t i = place_of(g, r->place.serial, &found);
    uint64_t *bits = bits_of(g, i);
    g->known.entry[i].serial = r->place.serial;
    g->known.entry[i].used = ++g->known.clock;
    memset(bits, 0, n_words(&g->sizes) * sizeof *bits);
    for (int k = 0; k < r->n_kept; k++)
        bits[r->read[k] / WORD_BITS] |= (uint64_t)1 << (r->read[k] % WORD_BITS);
}

static bool recall(struct engine *g, struct engine_request *r, int border) {
    bool found;
    if (!reach(g, r, border)) return false;
    size_t i = place_of(g, r->place.serial, &found);
    const uint64_t *bits = bits_of(g, i);
    if (!found) return false;
    g->known.entry[i].used = ++g->known.clock;
    r->n_kept = 0;
    for (int b = 0; b < r->n_ranked; b++)
        if (bits[b / WORD_BITS] >> (b % WORD_BITS) & 1) r->read[r->n_kept++] = b;
    return true;
}

/* ---- Where a request may go on ---- */

uint64_t engine__prefill_salt(const struct engine_request *r) {
    uint64_t key[2] = {r->salt, r->prefill_law};
    if (r->prefill_law == 0) return r->salt;
    uint64_t h = XXH3_64bits(key, sizeof key);
    return h ? h : 1;
}

static bool by_states(const struct engine_request *r) {
    return r->sparse.selector != TARGET_ALL && target_by_states(r->sparse.reselector);
}

int engine__prefill_hit(const struct engine *g, const struct engine_request *r, int most) {
    int chunk = r->sparse.prefill_chunk, first = target_prefill_first(&r->sparse), border = 0;
    struct kvpool_walk w = walk_of(r);
    if (r->prefill_law == 0 || !by_states(r) || most < first) return most;
    /* A block before each border is computed anew, which fills the ring of states. */
    int n = first - KVPOOL_BLOCK, at = 0;
    for (; border + chunk <= most; border += chunk) {
        int next = border + chunk;
        if (!walk_to(g, r, &w, &at, next)) break;
        if (next < first || (target_prefill_selects(&r->sparse, next) && !is_known(g, w.serial)))
            continue;
        n = next + chunk - KVPOOL_BLOCK;
    }
    return n < most ? n : most;
}

int engine__prefill_left(const struct engine_request *r) {
    int first = target_prefill_first(&r->sparse), at = r->n_kv + r->n_rows;
    if (r->prefill_law == 0) return INT32_MAX;
    if (at < first) return first - at;
    /* Rows of this step end at a border: none of them comes behind it. */
    if (r->n_rows > 0 && at % r->sparse.prefill_chunk == 0) return 0;
    return r->sparse.prefill_chunk - at % r->sparse.prefill_chunk;
}

/* ---- Selecting ---- */

static void read_list(struct engine *g, struct engine_request *r, bool made) {
    struct engine_prefill *c = &r->sparsity.prefill;
    r->kept[0] = r->n_kept;
    engine__sparse_changed(g, r, 1, false);
    c->n_blocks = (uint64_t)r->n_ranked;
    c->n_kept = (uint64_t)r->n_kept;
    if (!made) return;
    c->n_selections++;
    g->live.prefill.n_selections++;
    g->live.prefill.n_blocks += (uint64_t)r->n_ranked;
    g->live.prefill.n_kept += (uint64_t)r->n_kept;
}

/* Chance draws by the position and no seed: prompts are shared, whatever the seed. */
static void select_blocks(struct engine_request *r, int border, const float *score,
                          float *scratch) {
    struct target_view view = {.n_tokens = border, .epoch = border, .score = score};
    r->n_ranked = target_n_blocks(border);
    r->n_kept = target_select(&r->sparse, &view, scratch, r->read);
}

void engine__prefill_select(struct engine *g, struct engine_request *r, const float *score,
                            float *scratch) {
    select_blocks(r, r->n_kv, score, scratch);
    r->wants_selection = false;
    if (by_states(r) && r->use_cache) remember(g, r, r->n_kv);
    read_list(g, r, true);
}

void engine__prefill_advance(struct engine_request *r) {
    if (r->prefill_law == 0 || target_prefill_border(&r->sparse, r->n_kv) != r->n_kv) return;
    r->n_kept = 0; /* the chunk's list is made, or it is dense */
    r->wants_selection = target_prefill_selects(&r->sparse, r->n_kv);
}

void engine__prefill_resume(struct engine *g, struct engine_request *r) {
    int border = target_prefill_border(&r->sparse, r->n_kv);
    if (r->prefill_law == 0 || !target_prefill_selects(&r->sparse, border)) return;
    if (!by_states(r)) {
        select_blocks(r, border, NULL, g->batch.mass.host);
        read_list(g, r, false);
        return;
    }
    r->n_ranked = target_n_blocks(border);
    bool known = recall(g, r, border);
    ASSERT(known); /* engine__prefill_hit saw to it */
    read_list(g, r, false);
}

int engine__prefill_selector(const struct engine_request *r) {
    return r->sparse.selector == TARGET_ALL ? TARGET_ALL : r->sparse.reselector;
}

void engine__prefill_count(struct engine *g, struct engine_request *r, uint64_t layer_bytes,
                           int n_deep, int n_layers) {
    uint64_t n = (uint64_t)r->n_rows, left = 0, sum;
    if (r->prefill_law == 0) return;
    sum = n * (uint64_t)r->n_kv + n * (n + 1) / 2; /* positions that rows see, their own included */
    if (r->n_kept > 0) left = n * (uint64_t)(r->n_ranked - r->n_kept) * KVPOOL_BLOCK;
    uint64_t dense = layer_bytes * (uint64_t)n_layers * sum;
    uint64_t read = dense - layer_bytes * (uint64_t)n_deep * left;
    r->sparsity.prefill.kv_bytes += read;
    r->sparsity.prefill.kv_dense_bytes += dense;
    g->live.prefill.kv_bytes += read;
    g->live.prefill.kv_dense_bytes += dense;
}
