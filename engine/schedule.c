/* Which rows a step computes. Every generating sequence that is not paused has its rows in each
 * step, the pending token and its draft tokens; prompt rows fill a share of the step's time beside
 * them, so that a long prompt slows the others' streams by a known factor and no more. The share is
 * turned into rows by running estimates of what a step of n generated rows and what one prompt row
 * cost. How rows are cut changes no row's result (kernels.h), only when it comes. */
#include "engine/engine_private.h"

enum { N_GEN_BUCKETS = 16 };

/* The bucket of n > 0 rows: the power of two at or above n. */
static int bucket_of(int n) {
    int i = 0;
    while (i < N_GEN_BUCKETS - 1 && (1 << i) < n) i++;
    return i;
}

/* Time of a step of n generated rows; the nearest known bucket serves for an unknown one (a few
 * rows cost nearly what one costs while weights are what is read). 0: nothing is known. */
static double gen_estimate(const struct engine_costs *c, int n) {
    int at = bucket_of(n);
    for (int d = 0; d < N_GEN_BUCKETS; d++) {
        if (at - d >= 0 && c->gen_ns[at - d] > 0) return c->gen_ns[at - d];
        if (at + d < N_GEN_BUCKETS && c->gen_ns[at + d] > 0) return c->gen_ns[at + d];
    }
    return 0;
}

static void blend(double *estimate, double seen) {
    *estimate = *estimate > 0 ? 0.8 * *estimate + 0.2 * seen : seen;
}

void engine__costs_update(struct engine_costs *c, int n_gen, int n_prompt, double ns) {
    if (n_prompt == 0) {
        if (n_gen > 0) blend(&c->gen_ns[bucket_of(n_gen)], ns);
        return;
    }
    if (n_gen == 0) {
        /* A handful of rows is mostly the step's fixed part and would make rows look dear. */
        if (n_prompt >= ENGINE_MIN_CHUNK || c->prompt_row_ns == 0)
            blend(&c->prompt_row_ns, ns / n_prompt);
        return;
    }
    double gen = gen_estimate(c, n_gen);
    if (gen > 0 && gen < ns) blend(&c->prompt_row_ns, (ns - gen) / n_prompt);
    else if (gen == 0 && c->prompt_row_ns > 0 && c->prompt_row_ns * n_prompt < ns)
        blend(&c->gen_ns[bucket_of(n_gen)], ns - c->prompt_row_ns * n_prompt);
}

int engine__prompt_budget(const struct engine_costs *c, int n_gen, int max_rows, double share) {
    int most = max_rows - n_gen;
    if (n_gen == 0 || share >= 1) return most;
    double gen = gen_estimate(c, n_gen), n = ENGINE_FIRST_CHUNK;
    if (gen > 0 && c->prompt_row_ns > 0) n = gen * share / (1 - share) / c->prompt_row_ns;
    if (n < ENGINE_MIN_CHUNK) n = ENGINE_MIN_CHUNK;
    if (n >= most) return most;
    return (int)n / ENGINE_MIN_CHUNK * ENGINE_MIN_CHUNK; /* whole tiles of the matrix units */
}

static int left(const struct engine_request *r) {
    return r->n_prompt - r->n_kv - r->n_rows;
}

/* Rows that this step may still give it: a list is made at a border, before the rows behind it. */
static int room(const struct engine_request *r) {
    int n = left(r), border = engine__prefill_left(r);
    return n < border ? n : border;
}

static int give(struct engine_request *r, int rows) {
    int n = room(r) < rows ? room(r) : rows;
    r->n_rows += n;
    return n;
}

/* Deal `budget` prompt rows: half to the sequence that came first, the rest to those with least
 * left to do, so that a short question passes a long document and the document still moves. */
static void deal(struct engine_request **prefill, int n, int budget) {
    if (n == 0) return;
    budget -= give(prefill[0], n == 1 ? budget : (budget + 1) / 2);
    while (budget > 0) {
        struct engine_request *best = NULL;
        for (int i = 0; i < n; i++)
            if (room(prefill[i]) > 0 && (!best || left(prefill[i]) < left(best))) best = prefill[i];
        if (!best) return;
        budget -= give(best, budget);
    }
}

void engine__collect(struct engine *g) {
    g->n_turn = g->n_dense_rows = 0;
    for (int i = 0; i < g->n_running; i++) {
        struct engine_request *r = g->running[i];
        r->n_rows = r->n_logits = r->n_draft = 0;
        r->first_q = -1;
        if (!engine__decodes(r) || atomic_load_explicit(&r->paused, memory_order_acquire)) continue;
        if (engine__exact_turn(g, r, &g->n_dense_rows)) g->turn[g->n_turn++] = r;
    }
}

int engine__schedule(struct engine *g) {
    struct engine_request *prefill[ENGINE_MAX_SEQS];
    int n_prefill = 0, n_gen = 0, n_rows = 0;
    for (int i = 0; i < g->n_turn; i++) {
        struct engine_request *r = g->turn[i];
        r->n_rows = r->n_logits = engine__n_tokens(r) - r->n_kv + r->n_draft;
        n_gen += r->n_rows;
    }
    for (int i = 0; i < g->n_running; i++) {
        struct engine_request *r = g->running[i];
        if (engine__decodes(r) || atomic_load_explicit(&r->paused, memory_order_acquire)) continue;
        prefill[n_prefill++] = r;
    }
    deal(prefill, n_prefill,
         engine__prompt_budget(&g->costs, n_gen, g->sizes.o.max_rows, g->sizes.o.prefill_share));
    for (int i = 0; i < n_prefill; i++) {
        struct engine_request *r = prefill[i];
        if (r->n_rows == 0) continue;
        r->n_logits = left(r) == 0; /* the prompt's last row gives the first token */
        n_rows += r->n_rows;
        g->turn[g->n_turn++] = r;
    }
    return n_gen + n_rows;
}
