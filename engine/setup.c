/* What opening will reserve, from options and headers alone: the one computation behind start-up,
 * `tandem plan` and the refusal of what does not fit. */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "engine/engine_private.h"
#include "model/source.h"

enum { DEFAULT_SEQS = 32, DEFAULT_QUEUE = 256, DEFAULT_ROWS = 512 };
#define MIN_MARGIN_BYTES ((size_t)512 << 20)

void engine_options_default(struct engine_options *o) {
    memset(o, 0, sizeof *o);
    o->device = "cpu";
    o->max_queue = -1;
    o->select_layer = -1;
    o->prefix_cache = true;
    o->draft_tokens = VERIFY_DRAFT_AUTO;
    o->lookup = true;
    target_settings_unset(&o->sparse);
}

static int check_int(const char *name, int value, int lo, int hi, struct err *e) {
    if (value >= lo && value <= hi) return 0;
    return err_raise(e, E_RANGE, "%s is %d, allowed is %d..%d", name, value, lo, hi);
}

/* Defaults and ranges; none of them needs the backend. */
static int fill_options(struct engine_options *o, const struct model_config *c,
                        const struct target_scorer_file *scorer, struct err *e) {
    if (o->context == 0) o->context = c->context;
    if (o->max_rows == 0) o->max_rows = DEFAULT_ROWS;
    if (o->max_seqs == 0) o->max_seqs = o->max_rows > DEFAULT_SEQS ? DEFAULT_SEQS : o->max_rows - 1;
    if (o->max_queue < 0) o->max_queue = DEFAULT_QUEUE;
    if (o->max_queue == 0) o->max_queue = 1;
    if (o->prefill_share == 0) o->prefill_share = 0.5;
    if (o->select_layer < 0) o->select_layer = scorer ? scorer->layer : (3 * c->n_layers + 8) / 16;
    if (o->max_draft_tokens == 0)
        o->max_draft_tokens = o->draft_tokens > ENGINE_DEFAULT_DRAFT_TOKENS
                                  ? o->draft_tokens
                                  : ENGINE_DEFAULT_DRAFT_TOKENS;
    int rc = check_int("context", o->context, 2, c->context, e);
    if (!rc) rc = check_int("max_rows", o->max_rows, ENGINE_MIN_CHUNK, KERN_MAX_ROWS, e);
    if (!rc) rc = check_int("max_seqs", o->max_seqs, 1, ENGINE_MAX_SEQS, e);
    if (!rc) rc = check_int("select_layer", o->select_layer, 0, c->n_layers, e);
    if (!rc && scorer && scorer->layer != o->select_layer)
        rc = err_raise(e, E_INVALID,
                       "select_layer is %d, the scorer %s is of layer %d: leave one of them out",
                       o->select_layer, o->scorer_path, scorer->layer);
    if (!rc) rc = check_int("max_draft_tokens", o->max_draft_tokens, 1, KERN_MAX_DRAFT, e);
    if (!rc && o->draft_tokens != VERIFY_DRAFT_AUTO)
        rc = check_int("draft_tokens", o->draft_tokens, 0, o->max_draft_tokens, e);
    if (!rc && o->max_rows <= o->max_seqs)
        rc = err_raise(e, E_RANGE,
                       "max_rows is %d; %d sequences at once need more than %d rows a step",
                       o->max_rows, o->max_seqs, o->max_seqs);
    if (!rc && o->draft_window != 0 &&
        (o->draft_window < 2 * KVPOOL_BLOCK || o->draft_window % KVPOOL_BLOCK != 0))
        rc = err_raise(e, E_RANGE,
                       "draft_window is %d, allowed are 0 (everything) and multiples of %d, "
                       "at least %d",
                       o->draft_window, KVPOOL_BLOCK, 2 * KVPOOL_BLOCK);
    if (!rc && !(o->prefill_share > 0 && o->prefill_share <= 1))
        rc = err_raise(e, E_RANGE, "prefill_share is %g, allowed is (0, 1]", o->prefill_share);
    return rc ? rc : target_settings_check(&o->sparse, e);
}

int engine_kv_dtype(const char *name, enum kern_precision precision, const struct kern *k,
                    enum kern_dtype *out, struct err *e) {
    static const struct {
        const char *name;
        enum kern_dtype t;
    } types[] = {{"f16", KERN_F16}, {"bf16", KERN_BF16}, {"q8_0", KERN_Q8_0}};
    struct kern_device_info info;
    if (!name) name = types[0].name;
    int i = 0, n = sizeof types / sizeof *types;
    while (i < n && strcmp(types[i].name, name)) i++;
    if (i == n) return err_raise(e, E_INVALID, "kv type '%.40s': not one of f16, bf16, q8_0", name);
    *out =
        precision == KERN_REFERENCE ? KERN_F32 : types[i].t; /* the reference path has no other */
    k->ops->info(k, &info);
    if (info.kv_types >> *out & 1) return 0;
    char reads[64] = "";
    for (int t = 0; t < n; t++)
        if (info.kv_types >> types[t].t & 1)
            snprintf(reads + strlen(reads), sizeof reads - strlen(reads), " %s", types[t].name);
    return err_raise(e, E_UNSUPPORTED,
                     "kv type %s: the %s backend does not read it; of these it reads:%s (--kv-type)"
                     "; --device cpu reads all",
                     name, k->ops->backend, reads);
}

/* A page of n_layers layers of a model. */
static struct kvpool_page_shape page_shape(const struct model_config *c, int n_layers,
                                           enum kern_dtype kv) {
    size_t head = model_kv_head_bytes(c, kv);
    int elem = kv == KERN_Q8_0 ? 1 : (int)kern_dtype_block_bytes(kv);
    return (struct kvpool_page_shape){
        .n_layers = n_layers,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .elem_bytes = elem,
        .scale_bytes = (int)(head - (size_t)(KERN_BLOCK * c->head_dim * elem)),
    };
}

static void split_layers(struct engine_sizes *s, const struct model_config *c) {
    int border = s->o.select_layer;
    const struct {
        enum kvpool_class cls;
        int first, n;
    } groups[] = {{KVPOOL_SHALLOW, 0, border}, {KVPOOL_DEEP, border, c->n_layers - border}};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        if (groups[i].n == 0) continue;
        s->group_class[s->n_groups] = groups[i].cls;
        s->group_first[s->n_groups] = groups[i].first;
        s->group_layers[s->n_groups++] = groups[i].n;
        s->pool.shape[groups[i].cls] = page_shape(c, groups[i].n, s->kv_dtype);
    }
    /* Every row reads the shallow pages, so they are what is always there. */
    const struct kern_plane plane = engine__states_shape(s);
    if (s->state_cols > 0)
        s->pool.shape[KVPOOL_SHALLOW].state_bytes = (int)kern_plane_bytes(&plane);
}

/* Is room for lists by deep layer and KV head to be kept? */
static int choose_lists(struct engine_sizes *s, const struct model_config *c, const struct kern *k,
                        struct err *e) {
    struct kern_device_info info;
    const struct target_settings *o = &s->o.sparse;
    struct target_deep deep = {.first = s->o.select_layer,
                               .n_layers = c->n_layers - s->o.select_layer,
                               .n_heads = c->n_kv_heads};
    bool by_head = o->lists == TARGET_LISTS_HEAD;
    if (deep.n_layers == 0 || !(target_has_lists(o) || target_has_quarters(o))) return 0;
    k->ops->info(k, &info);
    s->list_quarters = target_has_quarters(o);
    if (s->list_quarters && !info.quarters)
        return err_raise(e, E_UNSUPPORTED, "quarters %d: device %s reads whole blocks alone",
                         o->quarters, s->o.device);
    s->list_layers = deep.n_layers;
    s->list_heads = by_head ? deep.n_heads : 1;
    if (by_head && s->o.max_seqs * deep.n_heads > KERN_MAX_LISTS)
        return err_raise(e, E_RANGE,
                         "lists \"head\": %d sequences of %d KV heads, allowed are %d sequences",
                         s->o.max_seqs, deep.n_heads, KERN_MAX_LISTS / deep.n_heads);
    return target_lists_check(o, &deep, e);
}

/* Are states of blocks to be kept? Only where somebody may ask for them. */
static int choose_states(struct engine_sizes *s, const struct model_config *c, struct err *e) {
    struct target_settings none, all;
    target_settings_unset(&none);
    all = target_settings_resolve(&s->o.sparse, &none, s->has_scorer ? &s->scorer : NULL);
    if (target_asks(&all, TARGET_SCORER) && !s->has_scorer)
        return err_raise(e, E_INVALID, "sparse \"%s\", reselector \"%s\": no scorer file was named",
                         target_selector_name(all.selector), target_selector_name(all.reselector));
    if (!s->has_scorer && !target_needs_states(&all)) return 0;
    if (s->o.select_layer == c->n_layers) return 0; /* no layer is deep */
    if (s->o.select_layer == 0)
        return err_raise(
            e, E_INVALID,
            "select_layer is 0: states of blocks lie beside the pages of layers before "
            "it, so that at least one is needed");
    s->state_cols = c->hidden;
    s->state_minmax = target_asks(&all, TARGET_MINMAX);
    s->state_spread = target_asks(&all, TARGET_BOUND);
    return 0;
}

/* Arena bytes that all sequences at full context could fill; extents round, and one more sequence's
 * worth is enough for that. */
static size_t most_arena_bytes(const struct engine_sizes *s) {
    size_t block = 0, most;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) block += kvpool_page_bytes(&s->pool.shape[c]);
    return checked_mul(block, (size_t)(s->o.max_seqs + 1) * (size_t)s->pool.max_blocks, &most)
               ? most
               : SIZE_MAX;
}

int engine__check_plan(struct engine_sizes *s, const struct plan *p, bool asked_context,
                       struct err *e) {
    size_t used = p->device_bytes + (p->device_is_host ? p->host_bytes : 0) + p->margin_bytes;
    if (!p->fits && (asked_context || p->largest_context < 2 || used > p->budget_bytes))
        return plan_check(p, e);
    if (s->o.context > p->largest_context) s->o.context = p->largest_context;
    return 0;
}

static int make_plan(struct engine_sizes *s, struct plan *plan, size_t free_bytes,
                     const struct kern *k, struct err *e) {
    struct kern_device_info info;
    k->ops->info(k, &info);
    struct plan_input in = {
        .target_weight_bytes = s->weight_bytes,
        .draft_weight_bytes = s->draft.weight_bytes,
        .draft_prob_bytes = s->draft.prob_bytes,
        .workspace_bytes = s->workspace_bytes + s->draft.workspace_bytes,
        .logits_bytes = s->logits_bytes,
        .host_bytes = s->batch_host_bytes + s->draft.host_bytes,
        .margin_bytes = s->o.kv_memory_bytes ? 0 : max_size(free_bytes / 10, MIN_MARGIN_BYTES),
        .extra = {{"batch", s->batch_bytes + s->draft.batch_bytes, PLAN_DEVICE, PLAN_KNOB_SEQS,
                   "rows, block lists"},
                  {"sampling", s->sample_bytes, PLAN_DEVICE, PLAN_KNOB_SEQS, NULL},
                  {"selection", s->selection_bytes, PLAN_DEVICE, PLAN_KNOB_SEQS,
                   "attention mass of blocks"},
                  {"scorer", s->scorer_bytes, PLAN_DEVICE, PLAN_KNOB_NONE, "of blocks"},
                  {"states", s->states_bytes, PLAN_DEVICE, PLAN_KNOB_SEQS,
                   "of a pass, newest of each sequence"},
                  {"penalty counts", s->history_bytes, PLAN_DEVICE, PLAN_KNOB_SEQS,
                   "touched by requests with penalties only"},
                  {info.own_bytes ? "kernels" : NULL, info.own_bytes, PLAN_DEVICE, PLAN_KNOB_NONE,
                   "slices of quantised weights, cuBLAS"}},
        .pool = s->pool,
        .max_arena_bytes = most_arena_bytes(s),
        .budget_bytes = free_bytes,
        .device_is_host = info.is_host,
        .context = s->o.context,
        /* A round never drafts beyond max_tokens, and the last answer token has no K and V: what a
           sequence reserves for itself holds every row. */
        .lookahead = 0,
        .max_rows = s->o.max_rows,
    };
    in.pool.arena_bytes = s->o.kv_memory_bytes;
    in.pool.max_cached = s->o.prefix_cache ? -1 : 0;
    int rc = plan_make(plan, &in, e);
    s->pool = plan->pool;
    return rc;
}

/* What a draft beside the target takes: its weights, its workspace, dense pages of all its layers,
 * the distributions that acceptance needs. A draft of a shorter context is no error: it stops
 * proposing there. */
static int add_draft(struct engine_sizes *s, const struct model_source *src,
                     const struct model_source *draft, const struct kern *k, struct err *e) {
    const struct model_config *c = model_source_config(draft);
    const struct model_borrow borrow = {.target_src = src};
    s->has_draft = true;
    s->draft_context = c->context;
    s->draft_layers = c->n_layers;
    s->proposer = (struct proposer_options){
        .max_seqs = s->o.max_seqs,
        .max_draft = s->o.max_draft_tokens,
        .max_rows = s->o.max_rows,
        .max_blocks = s->pool.max_blocks,
        .vocab = s->vocab, /* the tokenizer's count, once it is open */
        .window = s->o.draft_window,
        .kv_dtype = s->kv_dtype,
    };
    s->pool.shape[KVPOOL_DRAFT] = page_shape(c, c->n_layers, s->kv_dtype);
    int rc = proposer_sizes(&s->draft, &s->proposer, draft, &borrow, k, e);
    return rc ? err_prefix(e, rc, "draft") : 0;
}

/* Rows of a pass that want logits: every sequence with a full round, but no more than rows. Where
 * rounds are off unless a request asks for them, one full round beside everybody's row is enough.
 * And one dense pass of an exact answer, which is a longer round, has room in any case. */
static int max_logits(const struct engine_options *o) {
    int n_full = o->draft_tokens == 0 && o->sparse.exact <= 0 ? 1 : o->max_seqs;
    int n_draft = n_full * o->max_draft_tokens;
    int n = o->max_seqs + (n_draft > TARGET_MOST_EXACT ? n_draft : TARGET_MOST_EXACT);
    return n < o->max_rows ? n : o->max_rows;
}

int engine__sizes(struct engine_sizes *s, struct plan *plan, const struct engine_options *o,
                  const struct model_source *src, const struct model_source *draft,
                  const struct target_scorer_file *scorer, const struct kern *k,
                  size_t device_free_bytes, struct err *e) {
    const struct model_config *c = model_source_config(src);
    memset(s, 0, sizeof *s);
    s->o = *o;
    int rc = fill_options(&s->o, c, scorer, e);
    if (!rc) rc = engine_kv_dtype(s->o.kv_type, s->o.precision, k, &s->kv_dtype, e);
    if (rc) return rc;
    s->vocab = c->vocab;
    s->model_layers = c->n_layers;
    s->pool.max_seqs = s->o.max_seqs;
    s->pool.max_blocks = (s->o.context + KVPOOL_BLOCK - 1) / KVPOOL_BLOCK;
    if (scorer) engine__states_scorer(s, scorer);
    rc = choose_states(s, c, e);
    if (!rc) rc = choose_lists(s, c, k, e);
    if (rc) return rc;
    split_layers(s, c);
    s->caps = (struct model_caps){
        .max_rows = s->o.max_rows,
        .max_seqs = s->o.max_seqs,
        .max_blocks = s->pool.max_blocks,
        .max_logits = max_logits(&s->o),
    };
    rc = model_weight_bytes(src, NULL, k, &s->weight_bytes, e);
    if (!rc) rc = model_workspace_bytes(c, k, &s->caps, &s->workspace_bytes, e);
    if (rc) return rc;
    if (draft && (rc = add_draft(s, src, draft, k, e)) != 0) return rc;
    engine__batch_sizes(s, k);
    return make_plan(s, plan, device_free_bytes, k, e);
}
