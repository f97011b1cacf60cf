/* The memory plan: adding up, dividing what is left, and advice. plan_render.c prints it. */
#include "kvpool/plan.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

/* The options that the advice names, as `tandem serve --help` spells them. */
#define FLAG_KV "--kv-memory"
#define FLAG_CONTEXT "--ctx-size"
#define FLAG_SEQS "--max-num-seqs"
#define FLAG_ROWS "--max-num-batched-tokens"

enum { MIN_CONTEXT = 2 }; /* a token of the prompt and one of the answer: no advice below it */

static void copy_text(char *to, size_t cap, const char *from) {
    snprintf(to, cap, "%s", from ? from : "");
}

static int add_line(struct plan *p, const struct plan_item *item, struct err *e) {
    size_t *sum = item->place == PLAN_DEVICE ? &p->device_bytes : &p->host_bytes;
    size_t both;
    if (!item->bytes) return 0;
    if (!checked_add(*sum, item->bytes, sum) || !checked_add(p->device_bytes, p->host_bytes, &both))
        return err_raise(e, E_RANGE, "memory plan: %s of %zu bytes overflows the sum", item->name,
                         item->bytes);
    ASSERT(p->n_lines < PLAN_MAX_LINES);
    struct plan_line *l = &p->lines[p->n_lines++];
    copy_text(l->name, sizeof l->name, item->name);
    copy_text(l->note, sizeof l->note, item->note);
    l->bytes = item->bytes;
    l->place = item->place;
    l->knob = item->knob;
    return 0;
}

/* Everything but the pool. */
static int add_fixed(struct plan *p, const struct plan_input *in, struct err *e) {
    const struct plan_item fixed[] = {
        {"target weights", in->target_weight_bytes, PLAN_DEVICE, PLAN_KNOB_NONE, NULL},
        {"draft weights", in->draft_weight_bytes, PLAN_DEVICE, PLAN_KNOB_DRAFT, NULL},
        {"workspace", in->workspace_bytes, PLAN_DEVICE, PLAN_KNOB_ROWS, "activations of one step"},
        {"logits", in->logits_bytes, PLAN_DEVICE, PLAN_KNOB_SEQS, NULL},
        {"draft probabilities", in->draft_prob_bytes, PLAN_DEVICE, PLAN_KNOB_DRAFT, NULL},
        {"host bookkeeping", in->host_bytes, PLAN_HOST, PLAN_KNOB_SEQS, NULL},
    };
    _Static_assert(sizeof fixed / sizeof *fixed + PLAN_MAX_EXTRA + 2 <= PLAN_MAX_LINES,
                   "every line has a place");
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        int rc = add_line(p, &fixed[i], e);
        if (rc) return rc;
    }
    for (int i = 0; i < PLAN_MAX_EXTRA && in->extra[i].name; i++) {
        int rc = add_line(p, &in->extra[i], e);
        if (rc) return rc;
    }
    return 0;
}

/* ---- The arena ---- */

static size_t block_bytes(const struct kvpool_options *o) {
    size_t sum = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        size_t page = kvpool_page_bytes(&o->shape[c]);
        if (!checked_add(sum, page, &sum)) return 0;
    }
    return sum;
}

/* Make p->pool the pool of `arena` bytes. 0, or the error of kvpool_geometry. */
static int set_arena(struct plan *p, const struct plan_input *in, size_t arena, struct err *e) {
    p->pool.arena_bytes = arena;
    if (in->pool.max_cached < 0)
        p->pool.max_cached = (int)min_size(arena / max_size(block_bytes(&p->pool), 1), 1 << 28);
    /* What open would round away is not reserved at all. With the smaller arena another extent size
     * may be the best; each round makes it smaller still, so this ends. */
    for (;;) {
        int rc = kvpool_geometry(&p->pool, &p->geometry, e);
        if (rc) return rc;
        size_t whole = p->geometry.extent_bytes * (size_t)p->geometry.n_extents;
        if (whole == p->pool.arena_bytes) break;
        p->pool.arena_bytes = whole;
    }
    p->pool_host_bytes = kvpool_host_bytes(&p->pool);
    if (!p->pool_host_bytes)
        return err_raise(e, E_RANGE, "KV pool: max_seqs %d or max_blocks %d is out of range",
                         p->pool.max_seqs, p->pool.max_blocks);
    return 0;
}

static size_t counted(const struct plan *p, size_t device, size_t host) {
    return p->device_is_host ? device + host : device;
}

/* The most that the budget leaves. The bookkeeping grows with the arena and counts against the same
 * memory where the device is the host: a few rounds settle it. False where nothing is left. */
static bool arena_from_budget(struct plan *p, const struct plan_input *in) {
    size_t fixed, left;
    if (!checked_add(counted(p, p->device_bytes, p->host_bytes), p->margin_bytes, &fixed) ||
        fixed >= p->budget_bytes)
        return false;
    left = p->budget_bytes - fixed;
    if (in->max_arena_bytes) left = min_size(left, in->max_arena_bytes);
    size_t arena = left;
    for (int i = 0; i < 16; i++) {
        if (set_arena(p, in, arena, NULL)) return false;
        size_t need = counted(p, p->pool.arena_bytes, p->pool_host_bytes);
        if (need <= p->budget_bytes - fixed) return true;
        size_t over = need - (p->budget_bytes - fixed);
        if (over >= p->pool.arena_bytes) return false;
        arena = p->pool.arena_bytes - over;
    }
    return false;
}

static int add_pool_lines(struct plan *p, struct err *e) {
    char note[96];
    const struct kvpool_geometry *g = &p->geometry;
    snprintf(note, sizeof note, "%d extents of %zu bytes", g->n_extents, g->extent_bytes);
    int rc = add_line(
        p, &(struct plan_item){"KV pool", p->pool.arena_bytes, PLAN_DEVICE, PLAN_KNOB_NONE, note},
        e);
    if (rc) return rc;
    snprintf(note, sizeof note, "page tables of %d sequences, %d cached blocks", p->pool.max_seqs,
             p->pool.max_cached);
    return add_line(
        p,
        &(struct plan_item){"KV bookkeeping", p->pool_host_bytes, PLAN_HOST, PLAN_KNOB_SEQS, note},
        e);
}

/* ---- What fits ---- */

int plan_context_for(const struct plan *p, int n_seqs) {
    if (!p->geometry.n_extents || n_seqs < 1) return 0;
    int blocks = kvpool_geometry_max_blocks(&p->geometry, n_seqs, p->with_draft);
    int tokens = blocks * KVPOOL_BLOCK - p->lookahead;
    return tokens > 0 ? tokens : 0;
}

int plan_seqs_for(const struct plan *p, int context) {
    if (!p->geometry.n_extents || context < 1 || context > INT_MAX - p->lookahead) return 0;
    return kvpool_geometry_max_seqs(&p->geometry, context + p->lookahead, p->with_draft);
}

size_t plan_arena_for(const struct plan *p, int n_seqs, int context) {
    struct kvpool_options o = p->pool;
    size_t blocks = ceil_div((size_t)context + (size_t)p->lookahead, KVPOOL_BLOCK), bytes;
    if (!checked_mul(block_bytes(&o), blocks, &bytes) ||
        !checked_mul(bytes, (size_t)n_seqs, &bytes))
        return 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) o.min_bytes[c] = min_size(o.min_bytes[c], bytes / 4);
    /* From the sum of the pages upwards: geometry decides how much rounding costs. */
    while (bytes / KVPOOL_ALIGN <= INT_MAX) {
        struct kvpool_geometry g;
        o.arena_bytes = bytes;
        if (kvpool_geometry(&o, &g, NULL) == 0 &&
            (size_t)kvpool_geometry_max_blocks(&g, n_seqs, p->with_draft) >= blocks)
            return bytes;
        bytes = align_up(bytes + max_size(bytes / 64, KVPOOL_ALIGN), KVPOOL_ALIGN);
    }
    return 0;
}

static void answer(struct plan *p) {
    if (!p->geometry.n_extents) return;
    int cap = p->pool.max_blocks * KVPOOL_BLOCK - p->lookahead;
    p->tokens_fit =
        (long long)kvpool_geometry_max_blocks(&p->geometry, 1, p->with_draft) * KVPOOL_BLOCK;
    p->largest_context = plan_context_for(p, 1);
    p->context_for_all = plan_context_for(p, p->pool.max_seqs);
    if (p->largest_context > cap) p->largest_context = cap > 0 ? cap : 0;
    if (p->context_for_all > cap) p->context_for_all = cap > 0 ? cap : 0;
    int n = plan_seqs_for(p, p->context);
    p->seqs_at_context = n < p->pool.max_seqs ? n : p->pool.max_seqs;
}

/* ---- Advice ---- */

__attribute__((format(printf, 2, 3))) static void advise(struct plan *p, const char *fmt, ...) {
    va_list ap;
    if (p->n_advice == PLAN_MAX_ADVICE) return;
    va_start(ap, fmt);
    vsnprintf(p->advice[p->n_advice++], sizeof p->advice[0], fmt, ap);
    va_end(ap);
}

static size_t knob_bytes(const struct plan *p, enum plan_knob knob) {
    size_t sum = 0;
    for (int i = 0; i < p->n_lines; i++)
        if (p->lines[i].knob == knob && (p->lines[i].place == PLAN_DEVICE || p->device_is_host))
            sum += p->lines[i].bytes;
    return sum;
}

/* Which fixed bytes could shrink. */
static void advise_fixed(struct plan *p, const struct plan_input *in) {
    size_t rows = knob_bytes(p, PLAN_KNOB_ROWS), seqs = knob_bytes(p, PLAN_KNOB_SEQS);
    size_t draft = knob_bytes(p, PLAN_KNOB_DRAFT);
    if (rows && in->max_rows > 1)
        advise(p, "%zu bytes grow with the rows of a step: " FLAG_ROWS " %d halves them", rows,
               in->max_rows / 2);
    if (seqs && p->pool.max_seqs > 1)
        advise(p, "%zu bytes grow with the sequences at once: " FLAG_SEQS " %d halves them", seqs,
               p->pool.max_seqs / 2);
    if (draft) advise(p, "without the draft %zu bytes are free", draft);
}

/* Tokens of one sequence in the same arena without the draft's pages. */
static int tokens_without_draft(const struct plan *p) {
    struct kvpool_options o = p->pool;
    struct kvpool_geometry g;
    o.shape[KVPOOL_DRAFT].n_layers = 0;
    o.min_bytes[KVPOOL_DRAFT] = 0;
    if (kvpool_geometry(&o, &g, NULL)) return 0;
    return kvpool_geometry_max_blocks(&g, 1, false) * KVPOOL_BLOCK;
}

static void advise_all(struct plan *p, const struct plan_input *in) {
    size_t used = counted(p, p->device_bytes, p->host_bytes), all;
    bool in_budget =
        checked_add(used, p->margin_bytes, &all) && (!p->budget_bytes || all <= p->budget_bytes);
    p->fits = in_budget && p->geometry.n_extents && p->seqs_at_context >= 1 &&
              p->largest_context >= p->context;
    size_t one = plan_arena_for(p, 1, p->context);
    if (!p->geometry.n_extents) {
        advise(
            p,
            "no room for a KV pool: %zu bytes are used without it and %zu kept free, of %zu; one "
            "sequence of %d tokens needs %zu more",
            used, p->margin_bytes, p->budget_bytes, p->context, one);
        advise_fixed(p, in);
        return;
    }
    if (!in_budget) {
        size_t rest = used - counted(p, p->pool.arena_bytes, p->pool_host_bytes);
        if (rest + p->margin_bytes < p->budget_bytes)
            advise(p, "over the budget by %zu bytes: " FLAG_KV " %zu is what it leaves",
                   all - p->budget_bytes, p->budget_bytes - rest - p->margin_bytes);
        else
            advise(p, "over the budget by %zu bytes even without a KV pool",
                   rest + p->margin_bytes - p->budget_bytes);
        advise_fixed(p, in);
    }
    if (p->largest_context < p->context) {
        char shorter[48] = "";
        if (p->largest_context >= MIN_CONTEXT)
            snprintf(shorter, sizeof shorter, ", or " FLAG_CONTEXT " %d is the most",
                     p->largest_context);
        advise(p, "a sequence of %d tokens does not fit: " FLAG_KV " %zu makes room%s", p->context,
               one, shorter);
        advise_fixed(p, in);
    } else if (p->seqs_at_context < p->pool.max_seqs) {
        char shorter[48] = "";
        if (p->context_for_all >= MIN_CONTEXT)
            snprintf(shorter, sizeof shorter, " or " FLAG_CONTEXT " %d", p->context_for_all);
        advise(p,
               "%d of %d sequences fit at once with %d tokens each (others wait); for all of "
               "them: " FLAG_KV " %zu%s; or " FLAG_SEQS " %d",
               p->seqs_at_context, p->pool.max_seqs, p->context,
               plan_arena_for(p, p->pool.max_seqs, p->context), shorter, p->seqs_at_context);
    }
    if (p->with_draft && p->seqs_at_context < p->pool.max_seqs)
        advise(p, "without the draft's cache %d tokens fit instead of %lld",
               tokens_without_draft(p), p->tokens_fit);
}

int plan_make(struct plan *out, const struct plan_input *in, struct err *e) {
    memset(out, 0, sizeof *out);
    out->pool = in->pool;
    out->budget_bytes = in->budget_bytes;
    out->margin_bytes = in->margin_bytes;
    out->device_is_host = in->device_is_host;
    out->with_draft = in->pool.shape[KVPOOL_DRAFT].n_layers > 0;
    out->context = in->context;
    out->lookahead = in->lookahead;
    if (in->context < 1 || in->lookahead < 0 || in->lookahead > INT_MAX - in->context)
        return err_raise(e, E_RANGE, "memory plan: a context of %d tokens and %d ahead",
                         in->context, in->lookahead);
    if (in->pool.max_seqs < 1)
        return err_raise(e, E_RANGE, "memory plan: %d sequences", in->pool.max_seqs);
    if (!block_bytes(&in->pool))
        return err_raise(e, E_RANGE, "memory plan: the page shapes have no size");
    if (!in->pool.arena_bytes && !in->budget_bytes)
        return err_raise(e, E_RANGE, "memory plan: neither KV bytes nor a budget is given");
    int rc = add_fixed(out, in, e);
    if (rc) return rc;
    bool has_pool = true;
    if (in->pool.arena_bytes) {
        rc = set_arena(out, in, in->pool.arena_bytes, e);
        if (rc) return rc;
    } else if (!arena_from_budget(out, in)) {
        has_pool = false;
        out->pool.arena_bytes = 0;
        out->pool.max_cached = 0;
        out->pool_host_bytes = 0;
        memset(&out->geometry, 0, sizeof out->geometry);
    }
    if (has_pool) rc = add_pool_lines(out, e);
    if (rc) return rc;
    answer(out);
    advise_all(out, in);
    return 0;
}

int plan_check(const struct plan *p, struct err *e) {
    if (p->fits) return 0;
    return err_raise(e, E_FULL, "%s", p->n_advice ? p->advice[0] : "the memory plan does not fit");
}
