/* A request's epochs: which rows of its prompt are looked at, what they saw, which blocks the deep
 * layers read from then on. The law is target/'s; here it meets the step.
 *
 * `observed` looks at the prompt's last TARGET_ROWS rows. They may fall into several chunks, each
 * at another place of its pass: masses come back with every such step and their maximum is kept on
 * the host, so that neither chunks nor the pass's order matter. */
#include <stdlib.h>
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

static struct target_settings resolve(const struct engine *g, const struct target_settings *asked) {
    struct target_settings none;
    target_settings_unset(&none);
    return target_settings_resolve(&g->sizes.o.sparse, asked ? asked : &none,
                                   g->sizes.has_scorer ? &g->sizes.scorer : NULL);
}

struct target_settings engine_sparse_defaults(const struct engine *g) {
    return resolve(g, NULL);
}

int engine__sparse_check(const struct engine *g, const struct target_settings *asked,
                         struct err *e) {
    struct target_settings s = resolve(g, asked);
    if (n_deep(g) == 0 || !target_needs_states(&s)) return 0;
    if (target_asks(&s, TARGET_SCORER) && !g->sizes.has_scorer)
        return err_raise(e, E_UNSUPPORTED,
                         "sparse \"%s\", reselector \"%s\": no scorer was loaded (--scorer)",
                         target_selector_name(s.selector), target_selector_name(s.reselector));
    if (g->sizes.state_cols == 0)
        return err_raise(e, E_UNSUPPORTED,
                         "sparse \"%s\", reselector \"%s\": no states of blocks are kept; a server "
                         "started with --scorer, --sparse mean or --sparse-prefill keeps them",
                         target_selector_name(s.selector), target_selector_name(s.reselector));
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
    r->read = malloc(n_all * sizeof *r->read);
    if (!lists) return r->read != NULL;
    r->score = calloc(r->sparse.exact > 0 ? n_all : n_prompt, sizeof *r->score);
    return r->score && r->read;
}

uint64_t engine__sparse_owner(const struct engine_request *r) {
    uint64_t key[2] = {r->conversation, r->sparse_law};
    if (key[0] == 0 || key[1] == 0) return key[0];
    uint64_t h = XXH3_64bits(key, sizeof key);
    return h ? h : 1;
}

/* ---- Looking ---- */

/* The pass's next n lines. */
static int take_lines(struct engine_batch *b, int n) {
    int32_t *line = b->mass_line.host;
    for (int i = 0; b->n_mass == 0 && i < b->pass.caps.max_rows; i++) line[i] = -1;
    b->n_mass += n;
    return b->n_mass - n;
}

void engine__sparse_mark(struct engine *g, struct engine_request *r, int first_row) {
    int32_t *line = g->batch.mass_line.host;
    int from = r->n_prompt - TARGET_ROWS, end = r->n_kv + r->n_rows;
    r->mass_line = -1;
    if (r->is_dense && r->sparse.selector == TARGET_OBSERVED) {
        r->mass_line = take_lines(&g->batch, r->n_rows);
        for (int i = 0; i < r->n_rows; i++) line[first_row + i] = r->mass_line + i;
        return;
    }
    if (engine__decodes(r) || !r->score || end <= from || !target_observes(&r->sparse, r->n_prompt))
        return;
    r->mass_line = take_lines(&g->batch, 1);
    for (int i = 0; i < r->n_rows; i++)
        if (r->n_kv + i >= from) line[first_row + i] = r->mass_line;
}

void engine__sparse_see(struct engine *g, struct engine_request *r) {
    if (r->mass_line < 0 || r->is_dense) return; /* a dense pass: once its rows are decided */
    const float *line = (const float *)g->batch.mass.host +
                        (size_t)r->mass_line * (size_t)g->batch.pass.caps.max_blocks;
    int n = target_n_blocks(r->n_prompt);
    for (int i = 0; i < n; i++)
        if (line[i] > r->score[i]) r->score[i] = line[i];
    r->mass_line = -1;
}

/* ---- Selecting ---- */

static void count_time(struct engine *g, struct engine_request *r, int64_t ns) {
    r->sparsity.select_ns += ns;
    g->select_ns += ns;
    g->live.select_seconds += (double)ns / 1e9;
}

static void trace(struct engine *g, const struct engine_request *r) {
    if (!g->trace_selection) return;
    struct engine_kv_view kv = engine__kv_view(g, r);
    allocguard_leave(); /* the sink is a test's */
    g->trace_selection(g->trace_selection_arg, r, &kv, r->read, r->n_kept, r->n_ranked);
    allocguard_enter();
}

/* Begin an epoch. What is ranked are the prompt's blocks, by the prefix as it is now; after a dense
 * pass of an exact answer, all that is final. */
static void select_blocks(struct engine *g, struct engine_request *r, const float *score) {
    struct engine_sparsity *c = &r->sparsity;
    bool again = r->seen && c->n_selections > 0;
    struct target_view view = {.n_tokens = again ? r->n_kv : r->n_prompt,
                               .seed = r->seed,
                               .epoch = again ? r->n_kv : c->n_selections,
                               .mass = r->score,
                               .score = score,
                               .wide = r->wants_wide};
    int64_t start = clock_ns();
    int n = target_n_blocks(view.n_tokens), n_all = target_n_blocks(r->n_prompt + r->max_tokens);
    if (again && r->sparse.selector == TARGET_OBSERVED) engine__exact_masses(r, n);
    else if (r->seen && r->sparse.selector == TARGET_OBSERVED) engine__exact_keep_prompt(r);
    r->n_kept = target_select(&r->sparse, &view, r->score, r->read);
    /* Every block from here on is read. */
    for (int i = n; i < n_all; i++) r->read[r->n_kept + i - n] = i;
    r->n_ranked = n;
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
    r->wants_selection = r->wants_wide = false;
    count_time(g, r, clock_ns() - start);
}

void engine__sparse_select(struct engine *g, struct engine_request *r) {
    r->n_kept = 0; /* what the prompt's last chunk read */
    if (!r->score) return;
    r->wants_selection = target_by_states(r->sparse.selector);
    if (r->wants_selection) return;
    select_blocks(g, r, NULL);
    trace(g, r);
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

/* Scores of those that ask for a selection by states, in the lines of the masses, which were taken
 * in long since: score all, one way back, one wait. */
static int score_all(struct engine *g, int *n_scored, struct err *e) {
    const struct kern_ops *ops = g->kern->ops;
    struct engine_batch *b = &g->batch;
    size_t blocks = (size_t)b->pass.caps.max_blocks;
    int n = 0, rc = 0;
    for (int i = 0; i < g->n_running && !rc; i++) {
        struct engine_request *r = g->running[i];
        if (!r->wants_selection || !target_by_states(selector_of(r))) continue;
        rc = engine__states_score(g, r, selector_of(r), (float *)b->mass.dev + (size_t)n++ * blocks,
                                  e);
    }
    *n_scored = n;
    if (rc || n == 0) return rc;
    rc = ops->fetch(g->kern, b->mass.host, b->mass.dev, (size_t)n * blocks * sizeof(float), e);
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
        float *lines = g->batch.mass.host, *score = NULL;
        if (target_by_states(selector_of(r))) {
            score = lines + (size_t)line++ * blocks;
            count_time(g, r, wait);
        }
        if (engine__decodes(r)) select_blocks(g, r, score);
        else engine__prefill_select(g, r, score, score ? score : lines + (size_t)n_scored * blocks);
        trace(g, r);
    }
    return 0;
}

const int32_t *engine__sparse_list(const struct engine_request *r, enum kvpool_class c,
                                   int *n_read) {
    if (c != KVPOOL_DEEP || r->n_kept == 0 || r->is_dense) return NULL;
    ASSERT(*n_read >= r->n_ranked);
    *n_read -= r->n_ranked - r->n_kept;
    return r->read;
}

/* ---- Numbers ---- */

static int n_left_out(const struct engine_request *r) {
    return r->n_kept && !r->is_dense ? r->n_ranked - r->n_kept : 0;
}

/* Of n_tokens positions, those that deep layers read: whole blocks go, never the last one. */
static int deep_tokens(const struct engine_request *r, int n_tokens) {
    return n_tokens - n_left_out(r) * KVPOOL_BLOCK;
}

double engine__sparse_kv(const struct engine *g, const struct engine_request *r, int n_tokens) {
    int all = model_get_config(g->model)->n_layers, deep = n_deep(g);
    return ((double)(all - deep) * n_tokens + (double)deep * deep_tokens(r, n_tokens)) / all;
}

void engine__sparse_count(struct engine *g, struct engine_request *r) {
    const struct model_config *c = model_get_config(g->model);
    uint64_t n = (uint64_t)(r->n_kv + r->n_rows);
    uint64_t layer = 2 * (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim *
                     kern_dtype_block_bytes(g->sizes.kv_dtype);
    uint64_t deep = (uint64_t)n_deep(g), all = (uint64_t)c->n_layers;
    if (!engine__decodes(r)) {
        engine__prefill_count(g, r, layer, (int)deep, (int)all);
        return;
    }
    r->sparsity.kv_shallow_bytes += (all - deep) * layer * n;
    r->sparsity.kv_deep_bytes += deep * layer * (uint64_t)deep_tokens(r, (int)n);
    r->sparsity.kv_dense_bytes += all * layer * n;
}

void engine__sparse_listed(const struct engine *g, const struct engine_request *r,
                           struct engine_answer_kv *out) {
    const struct model_config *c = model_get_config(g->model);
    int n = r->n_kv + r->n_rows, n_blocks = target_n_blocks(n);
    uint64_t half =
        (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim * kern_dtype_block_bytes(g->sizes.kv_dtype);
    uint64_t deep = (uint64_t)n_deep(g), shallow = (uint64_t)c->n_layers - deep;
    out->listed_shallow_bytes += shallow * half * (uint64_t)(n_blocks * KVPOOL_BLOCK + n);
    out->listed_deep_bytes +=
        deep * half * (uint64_t)((n_blocks - n_left_out(r)) * KVPOOL_BLOCK + deep_tokens(r, n));
}
