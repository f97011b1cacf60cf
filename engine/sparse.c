/* A request's epochs: which rows of its prompt are looked at, what they saw, which blocks the deep
 * layers read from then on. The law is target/'s; here it meets the step.
 *
 * `observed` looks at the prompt's last TARGET_ROWS rows. They may fall into several chunks, each
 * at another place of its pass: masses come back with every such step and their maximum is kept on
 * the host, so that neither chunks nor the pass's order matter. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/allocguard.h"
#include "base/clock.h"
#include "base/err.h"
#include "engine/engine_private.h"

/* Layers of the groups that a list may thin, and all. */
static int n_deep(const struct engine *g) {
    int n = 0;
    for (int i = 0; i < g->sizes.n_groups; i++)
        if (g->sizes.group_class[i] == KVPOOL_DEEP) n += g->sizes.group_layers[i];
    return n;
}

/* Deep layers and their KV heads. */
static struct target_deep deep_of(const struct engine *g) {
    return (struct target_deep){.first = g->sizes.o.select_layer,
                                .n_layers = n_deep(g),
                                .n_heads = model_get_config(g->model)->n_kv_heads};
}

static struct target_settings resolve(const struct engine *g, const struct target_settings *asked) {
    struct target_settings none;
    target_settings_unset(&none);
    return target_settings_resolve(&g->sizes.o.sparse, asked ? asked : &none,
                                   g->sizes.has_scorer ? &g->sizes.scorer : NULL);
}

struct target_settings engine_sparse_defaults(const struct engine *g) {
    return resolve(g, NULL);
}

/* Lists by layer and head lie in memory that was reserved at the start. */
static int check_lists(const struct engine *g, const struct target_settings *s, struct err *e) {
    const struct engine_sizes *z = &g->sizes;
    struct target_deep deep = deep_of(g);
    bool by_head = s->lists == TARGET_LISTS_HEAD && deep.n_heads > 1;
    if (s->drop > 0 && z->list_layers > 0)
        return err_raise(e, E_UNSUPPORTED,
                         "drop %g: a server that keeps room for lists by layer keeps none for "
                         "masses of all rows",
                         s->drop);
    if (!target_has_lists(s) && !target_has_quarters(s)) return 0;
    int rc = target_lists_check(s, &deep, e);
    if (rc) return rc;
    if (target_has_quarters(s) && !z->list_quarters)
        return err_raise(e, E_UNSUPPORTED,
                         "quarters %d: no room is kept for quarters of blocks; a server started "
                         "with --quarters 1 keeps it",
                         s->quarters);
    if (target_has_quarters(s) && s->selector == TARGET_SCORER &&
        !engine__states_tell_quarters(g, TARGET_SCORER))
        return err_raise(e, E_UNSUPPORTED,
                         "quarters %d: the scorer that was loaded is none that measures quarters, "
                         "as a late one does",
                         s->quarters);
    if (target_has_lists(s) && (z->list_layers == 0 || (by_head && z->list_heads == 1)))
        return err_raise(e, E_UNSUPPORTED,
                         "%s: no room is kept for so many lists; a server started with --lists %s "
                         "keeps it",
                         s->select2 > 0 ? "select2"
                         : by_head      ? "lists \"head\""
                                        : "lists \"layer\"",
                         by_head ? "head" : "layer");
    return 0;
}

int engine__sparse_check(const struct engine *g, const struct target_settings *asked,
                         struct err *e) {
    struct target_settings s = resolve(g, asked);
    if (n_deep(g) == 0) return 0;
    int rc = check_lists(g, &s, e);
    if (rc || !target_needs_states(&s)) return rc;
    if (target_asks(&s, TARGET_SCORER) && !g->sizes.has_scorer)
        return err_raise(e, E_UNSUPPORTED,
                         "sparse \"%s\", reselector \"%s\": no scorer was loaded (--scorer)",
                         target_selector_name(s.selector), target_selector_name(s.reselector));
    if (g->sizes.state_cols == 0)
        return err_raise(
            e, E_UNSUPPORTED,
            "sparse \"%s\", reselector \"%s\", recheck \"%s\": no states of blocks are "
            "kept; a server started with --scorer, --sparse mean, --recheck border or "
            "--sparse-prefill keeps them",
            target_selector_name(s.selector), target_selector_name(s.reselector),
            target_recheck_name(s.recheck));
    const int missing = target_asks(&s, TARGET_MINMAX) && !g->sizes.state_minmax  ? TARGET_MINMAX
                        : target_asks(&s, TARGET_BOUND) && !g->sizes.state_spread ? TARGET_BOUND
                                                                                  : TARGET_OFF;
    if (missing != TARGET_OFF)
        return err_raise(e, E_UNSUPPORTED,
                         "sparse \"%s\", reselector \"%s\": what %s goes by is kept of each block "
                         "where a server was started with it, as --sparse %s",
                         target_selector_name(s.selector), target_selector_name(s.reselector),
                         target_selector_name(missing), target_selector_name(missing));
    return 0;
}

bool engine__sparse_init(const struct engine *g, struct engine_request *r,
                         const struct target_settings *asked) {
    r->sparse = resolve(g, asked);
    r->sparse_law = target_settings_law(&r->sparse);
    if (n_deep(g) == 0) r->sparse.prefill = TARGET_PREFILL_DENSE;
    r->prefill_law = target_prefill_law(&r->sparse);
    r->sparse.selector = target_first_selector(&r->sparse, r->n_prompt);
    r->sparsity.settings = r->sparse;
    r->mass_line = -1;
    bool lists = target_selects(&r->sparse, r->n_prompt) || r->sparse.selector == TARGET_ALL;
    bool chunks = r->n_prompt > target_prefill_first(&r->sparse);
    if (!(lists || chunks) || n_deep(g) == 0) return true;
    size_t n_prompt = (size_t)target_n_blocks(r->n_prompt);
    size_t n_all = (size_t)target_n_blocks(r->n_prompt + r->max_tokens);
    struct target_deep deep = deep_of(g);
    size_t n = lists ? (size_t)target_n_lists(&r->sparse, &deep) : 1;
    r->read = malloc(n * n_all * sizeof *r->read);
    r->kept = calloc(n, sizeof *r->kept);
    if (!lists) return r->read && r->kept;
    if (target_has_quarters(&r->sparse)) {
        r->quarter_mass = calloc(n * n_prompt, TARGET_QUARTERS * sizeof *r->quarter_mass);
        r->quarters = malloc(n * n_all);
        if (!r->quarter_mass || !r->quarters) return false;
    }
    r->score = calloc(r->sparse.exact > 0 ? n_all : n * n_prompt, sizeof *r->score);
    return r->score && r->read && r->kept && engine__recheck_init(r);
}

uint64_t engine__sparse_owner(const struct engine_request *r) {
    uint64_t key[2] = {r->conversation, r->sparse_law};
    if (key[0] == 0 || key[1] == 0) return key[0];
    uint64_t h = XXH3_64bits(key, sizeof key);
    return h ? h : 1;
}

/* ---- Looking ---- */

/* Is `r` one whose prompt's end is looked at, and in this pass? */
static bool observes(const struct engine_request *r) {
    return !engine__decodes(r) && r->score && r->n_kv + r->n_rows > r->n_prompt - TARGET_ROWS &&
           target_observes(&r->sparse, r->n_prompt);
}

bool engine__sparse_looks_own(const struct engine *g, bool *at_quarters) {
    bool own = false;
    *at_quarters = false;
    for (int i = 0; i < g->n_turn; i++) {
        const struct engine_request *r = g->turn[i];
        if (!observes(r)) continue;
        own |= target_has_lists(&r->sparse) || r->quarters;
        *at_quarters |= r->quarters != NULL;
    }
    return own;
}

/* The pass's next n lines. */
static int take_lines(struct engine_batch *b, int n) {
    int32_t *line = b->mass_line.host;
    for (int i = 0; b->n_mass == 0 && i < b->pass.caps.max_rows; i++) line[i] = -1;
    b->n_mass += n;
    return b->n_mass - n;
}

void engine__sparse_mark(struct engine *g, struct engine_request *r, int first_row) {
    int32_t *line = g->batch.mass_line.host;
    int from = r->n_prompt - TARGET_ROWS, parts = g->batch.mass_parts;
    r->mass_line = -1;
    if ((r->is_dense && r->sparse.selector == TARGET_OBSERVED) || engine__recheck_marks(r)) {
        r->mass_line = take_lines(&g->batch, r->n_rows);
        for (int i = 0; i < r->n_rows; i++) line[first_row + i] = (r->mass_line + i) * parts;
        return;
    }
    if (!observes(r)) return;
    r->mass_line = take_lines(&g->batch, 1);
    for (int i = 0; i < r->n_rows; i++)
        if (r->n_kv + i >= from) line[first_row + i] = r->mass_line * parts;
}

/* Masses of one part of a line raise `out`: `each` numbers of each of n blocks. */
static void raise_part(const struct engine *g, const struct model_array *a, int each, int line,
                       int part, int n, float *out) {
    const struct engine_batch *b = &g->batch;
    size_t at = (size_t)line * (size_t)b->mass_parts + (size_t)part;
    const float *mass =
        (const float *)a->host + at * (size_t)b->pass.caps.max_blocks * (size_t)each;
    for (int i = 0; i < n * each; i++)
        if (mass[i] > out[i]) out[i] = mass[i];
}

void engine__sparse_raise(const struct engine *g, int line, int n, float *out) {
    for (int part = 0; part < g->batch.mass_parts; part++)
        raise_part(g, &g->batch.mass, 1, line, part, n, out);
}

void engine__sparse_see(struct engine *g, struct engine_request *r) {
    if (r->mass_line < 0 || engine__decodes(r)) return; /* answers': once rows are decided */
    const struct engine_batch *b = &g->batch;
    int n = target_n_blocks(r->n_prompt), heads = g->sizes.list_heads;
    struct target_deep deep = deep_of(g);
    bool many = target_has_lists(&r->sparse);
    ASSERT(!many || b->mass_parts == g->sizes.list_layers * heads);
    ASSERT(!r->quarters || b->looks_at_quarters);
    for (int i = 0; i < b->mass_parts; i++) {
        int list = many ? target_list_of(&r->sparse, &deep, i / heads, i % heads) : 0;
        size_t at = (size_t)list * (size_t)n;
        raise_part(g, &b->mass, 1, r->mass_line, i, n, r->score + at);
        if (!r->quarters) continue;
        raise_part(g, &b->quarter_mass, TARGET_QUARTERS, r->mass_line, i, n,
                   r->quarter_mass + TARGET_QUARTERS * at);
    }
    r->mass_line = -1;
}

/* ---- Selecting ---- */

static void count_time(struct engine *g, struct engine_request *r, int64_t ns) {
    r->sparsity.select_ns += ns;
    g->select_ns += ns;
    g->live.select_seconds += (double)ns / 1e9;
}

/* The i-th list. */
static int32_t *list_of(const struct engine_request *r, int i) {
    return r->read + (size_t)i * (size_t)target_n_blocks(r->n_prompt + r->max_tokens);
}

static void trace(struct engine *g, const struct engine_request *r) {
    if (!g->trace_selection) return;
    struct engine_kv_view kv = engine__kv_view(g, r);
    allocguard_leave(); /* the sink is a test's */
    for (int i = 0; i < r->n_lists; i++)
        g->trace_selection(g->trace_selection_arg, r, &kv, list_of(r, i), r->kept[i], r->n_ranked);
    allocguard_enter();
}

/* Blocks that one of the lists holds; scratch: as many numbers. */
static int count_union(const struct engine_request *r, float *scratch) {
    int n = 0;
    if (r->n_lists == 1) return r->n_kept;
    for (int b = 0; b < r->n_ranked; b++) scratch[b] = 0;
    for (int i = 0; i < r->n_lists; i++)
        for (int k = 0; k < r->kept[i]; k++) scratch[list_of(r, i)[k]] = 1;
    for (int b = 0; b < r->n_ranked; b++) n += scratch[b] > 0;
    return n;
}

/* Quarters of the i-th list. */
static uint8_t *quarters_of(const struct engine_request *r, int i) {
    return r->quarters + (list_of(r, i) - r->read);
}

/* Positions that the i-th list leaves out. */
static int n_left_of(const struct engine_request *r, int i) {
    int n = (r->n_ranked - r->kept[i]) * KVPOOL_BLOCK;
    for (int k = 0; k < r->kept[i] && r->has_quarters; k++)
        n += KERN_QUARTER * (TARGET_QUARTERS - __builtin_popcount(quarters_of(r, i)[k]));
    return n;
}

void engine__sparse_changed(struct engine *g, struct engine_request *r, int n_lists,
                            bool quarters) {
    struct target_deep deep = deep_of(g);
    int n_all = target_n_blocks(r->n_prompt + r->max_tokens);
    r->has_quarters = quarters;
    r->n_lists = n_lists;
    r->list_id = ++g->n_list_ids;
    r->n_kept = 0;
    r->n_left = 0;
    for (int i = 0; i < n_lists; i++) {
        /* Every block from here on is read. */
        int32_t *behind = list_of(r, i) + r->kept[i];
        for (int b = r->n_ranked; b < n_all; b++) behind[b - r->n_ranked] = b;
        if (quarters) memset(quarters_of(r, i) + r->kept[i], 15, (size_t)(n_all - r->n_ranked));
        if (r->kept[i] > r->n_kept) r->n_kept = r->kept[i];
    }
    for (int layer = 0; layer < deep.n_layers; layer++)
        for (int head = 0; head < deep.n_heads; head++) {
            int i = n_lists == 1 ? 0 : target_list_of(&r->sparse, &deep, layer, head);
            r->n_left += (uint64_t)n_left_of(r, i);
        }
}

/* Begin an epoch. What is ranked are the prompt's blocks, by the prefix as it is now; after a dense
 * pass of an exact answer, all that is final. */
static int select_blocks(struct engine *g, struct engine_request *r, const float *score,
                         const float *quarter_score, float *scratch, struct err *e) {
    struct engine_sparsity *c = &r->sparsity;
    bool again = r->seen && c->n_selections > 0;
    struct target_view view = {.n_tokens = again ? r->n_kv : r->n_prompt,
                               .seed = r->seed,
                               .epoch = again ? r->n_kv : c->n_selections,
                               .score = score,
                               .wide = r->wants_wide};
    int64_t start = clock_ns();
    int n = target_n_blocks(view.n_tokens);
    struct target_deep deep = deep_of(g);
    bool first = !again && c->n_selections == 0;
    /* One who saw nothing of layers and heads makes one list for all. */
    bool saw = first && r->sparse.selector == TARGET_OBSERVED;
    int n_lists = saw ? target_n_lists(&r->sparse, &deep) : 1;
    const float *by_quarter = saw && r->quarters ? r->quarter_mass : quarter_score;
    if (again && r->sparse.selector == TARGET_OBSERVED) engine__exact_masses(r, n);
    else if (r->seen && r->sparse.selector == TARGET_OBSERVED) engine__exact_keep_prompt(r);
    view.mass = r->score;
    int rc = engine__recheck(g, r, &view, scratch, e);
    if (rc) return rc;
    c->n_dropped += target_n_dropped(&r->sparse, &view);
    for (int i = 0; i < n_lists; i++) {
        float *own = r->score + (size_t)i * (size_t)n;
        view.mass = own;
        r->kept[i] = target_select(&r->sparse, &view, own, list_of(r, i));
        if (by_quarter)
            target_select_quarters(&r->sparse, view.n_tokens,
                                   by_quarter + TARGET_QUARTERS * (size_t)i * (size_t)n,
                                   list_of(r, i), r->kept[i], quarters_of(r, i));
    }
    r->n_ranked = n;
    engine__sparse_changed(g, r, n_lists, by_quarter != NULL);
    r->epoch = (struct target_epoch){.wide = r->wants_wide};
    g->live.n_sparse_requests += r->n_kept < n && c->n_selections == 0;
    g->live.n_selections++;
    g->live.n_reselections += c->n_selections > 0;
    g->live.n_wide += r->wants_wide;
    g->live.n_blocks_selected += (uint64_t)n;
    g->live.n_blocks_kept += (uint64_t)r->n_kept;
    if (c->n_selections++ == 0) c->n_kept_first = r->n_kept;
    c->n_wide += r->wants_wide;
    c->n_blocks = n;
    c->n_kept = r->n_kept;
    c->n_lists = r->n_lists;
    c->n_union = count_union(r, r->score);
    r->wants_selection = r->wants_wide = false;
    engine__recheck_begin(r);
    count_time(g, r, clock_ns() - start);
    trace(g, r);
    return 0;
}

void engine__sparse_select(struct engine *g, struct engine_request *r) {
    r->n_kept = 0; /* what the prompt's last chunk read */
    if (!r->score) return;
    r->wants_selection =
        target_by_states(r->sparse.selector) || r->sparse.recheck != TARGET_RECHECK_OFF;
    if (r->wants_selection) return;
    int rc = select_blocks(g, r, NULL, NULL, NULL, NULL);
    ASSERT(rc == 0); /* nothing is asked of the device */
}

bool engine__sparse_wants_logprob(const struct engine_request *r) {
    return r->score && r->sparse.reselect == TARGET_RESELECT_SURPRISE;
}

bool engine__sparse_token(struct engine_request *r, float logprob) {
    if (!r->score || r->sparse.selector == TARGET_ALL) return false;
    r->wants_selection = target_epoch_token(&r->epoch, &r->sparse, -logprob, &r->wants_wide);
    return r->wants_selection;
}

int engine__sparse_left(const struct engine_request *r) {
    if (!r->score || r->sparse.selector == TARGET_ALL) return INT32_MAX;
    return target_epoch_left(&r->epoch, &r->sparse);
}

static int selector_of(const struct engine_request *r) {
    if (!engine__decodes(r)) return engine__prefill_selector(r);
    return r->sparsity.n_selections > 0 ? r->sparse.reselector : r->sparse.selector;
}

/* Will its next list, of an answer, by states, be of quarters? */
static bool scores_quarters(const struct engine *g, const struct engine_request *r) {
    return r->quarters && engine__decodes(r) && engine__states_tell_quarters(g, selector_of(r));
}

/* Scores of those that ask for a selection by states, in the lines of the masses, which were taken
 * in long since: score all, one way back, one wait. */
static int score_all(struct engine *g, int *n_scored, struct err *e) {
    const struct kern_ops *ops = g->kern->ops;
    struct engine_batch *b = &g->batch;
    size_t blocks = (size_t)b->pass.caps.max_blocks, n = 0;
    bool quarters = false;
    int rc = 0;
    for (int i = 0; i < g->n_running && !rc; i++) {
        struct engine_request *r = g->running[i];
        if (!r->wants_selection || !target_by_states(selector_of(r))) continue;
        float *own = (float *)b->quarter_mass.dev + TARGET_QUARTERS * n * blocks;
        quarters |= scores_quarters(g, r);
        rc = engine__states_score(g, r, selector_of(r), (float *)b->mass.dev + n++ * blocks,
                                  scores_quarters(g, r) ? own : NULL, e);
    }
    *n_scored = (int)n;
    if (rc || n == 0) return rc;
    size_t bytes = n * blocks * sizeof(float);
    rc = ops->fetch(g->kern, b->mass.host, b->mass.dev, bytes, e);
    if (!rc && quarters)
        rc = ops->fetch(g->kern, b->quarter_mass.host, b->quarter_mass.dev, TARGET_QUARTERS * bytes,
                        e);
    return rc ? rc : ops->sync(g->kern, e);
}

int engine__sparse_renew(struct engine *g, struct err *e) {
    size_t blocks = (size_t)g->batch.pass.caps.max_blocks;
    int64_t start = clock_ns();
    int n_scored, line = 0, rc = score_all(g, &n_scored, e);
    if (rc) return rc;
    int64_t wait = n_scored > 0 ? (clock_ns() - start) / n_scored : 0;
    for (int i = 0; i < g->n_running; i++) {
        struct engine_request *r = g->running[i];
        if (!r->wants_selection) continue;
        float *lines = g->batch.mass.host, *free_line = lines + (size_t)n_scored * blocks;
        float *score = NULL, *quarters = NULL;
        if (target_by_states(selector_of(r))) {
            if (scores_quarters(g, r))
                quarters =
                    (float *)g->batch.quarter_mass.host + TARGET_QUARTERS * (size_t)line * blocks;
            score = lines + (size_t)line++ * blocks;
            count_time(g, r, wait);
        }
        if (!engine__decodes(r)) {
            engine__prefill_select(g, r, score, free_line);
            trace(g, r);
        } else if ((rc = select_blocks(g, r, score, quarters, free_line, e)) != 0) return rc;
    }
    return 0;
}

const int32_t *engine__sparse_list(const struct engine_request *r, enum kvpool_class c,
                                   int *n_read) {
    if (c != KVPOOL_DEEP || r->n_kept == 0 || r->is_dense) return NULL;
    ASSERT(*n_read >= r->n_ranked && r->n_lists == 1 && !r->has_quarters);
    *n_read -= r->n_ranked - r->n_kept;
    return r->read;
}

uint64_t engine__sparse_id(const struct engine_request *r) {
    return r->n_kept == 0 || r->is_dense ? 0 : r->list_id;
}

bool engine__sparse_reads_own(const struct engine *g) {
    for (int i = 0; i < g->n_turn; i++)
        if (engine__sparse_id(g->turn[i]) != 0 &&
            (g->turn[i]->n_lists > 1 || g->turn[i]->has_quarters))
            return true;
    return false;
}

const int32_t *engine__sparse_own(const struct engine *g, const struct engine_request *r, int layer,
                                  int head, int *n_read, const uint8_t **quarters) {
    struct target_deep deep = deep_of(g);
    *quarters = NULL;
    if (engine__sparse_id(r) == 0) return NULL;
    int i = r->n_lists == 1 ? 0 : target_list_of(&r->sparse, &deep, layer, head);
    ASSERT(*n_read >= r->n_ranked);
    *n_read -= r->n_ranked - r->kept[i];
    if (r->has_quarters) *quarters = quarters_of(r, i);
    return list_of(r, i);
}

/* ---- Numbers ---- */

/* Positions that deep layers leave out, summed over layers and KV heads: of whole blocks, never of
 * the last one. */
static uint64_t n_left_out(const struct engine_request *r) {
    return engine__sparse_id(r) ? r->n_left : 0;
}

double engine__sparse_kv(const struct engine *g, const struct engine_request *r, int n_tokens) {
    const struct model_config *c = model_get_config(g->model);
    return n_tokens - (double)n_left_out(r) / (c->n_layers * c->n_kv_heads);
}

void engine__sparse_count(struct engine *g, struct engine_request *r) {
    const struct model_config *c = model_get_config(g->model);
    uint64_t n = (uint64_t)(r->n_kv + r->n_rows);
    uint64_t head = 2 * kern_kv_token_bytes(g->sizes.kv_dtype, c->head_dim);
    uint64_t layer = (uint64_t)c->n_kv_heads * head;
    uint64_t deep = (uint64_t)n_deep(g), all = (uint64_t)c->n_layers;
    if (!engine__decodes(r)) {
        engine__prefill_count(g, r, layer, (int)deep, (int)all);
        return;
    }
    r->sparsity.kv_shallow_bytes += (all - deep) * layer * n;
    r->sparsity.kv_deep_bytes += deep * layer * n - head * n_left_out(r);
    r->sparsity.kv_dense_bytes += all * layer * n;
}

void engine__sparse_listed(const struct engine *g, const struct engine_request *r,
                           struct engine_answer_kv *out) {
    const struct model_config *c = model_get_config(g->model);
    int n = r->n_kv + r->n_rows, n_blocks = target_n_blocks(n);
    uint64_t half = kern_kv_token_bytes(g->sizes.kv_dtype, c->head_dim);
    uint64_t heads = (uint64_t)c->n_kv_heads, deep = (uint64_t)n_deep(g);
    uint64_t both =
        (uint64_t)(n_blocks * KVPOOL_BLOCK + n); /* K's page whole, V as far as it goes */
    out->listed_shallow_bytes += ((uint64_t)c->n_layers - deep) * heads * half * both;
    out->listed_deep_bytes += half * (deep * heads * both - 2 * n_left_out(r));
}
