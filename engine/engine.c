/* Opening and closing: everything is reserved here, then the step thread starts. */
#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/clock.h"
#include "base/err.h"
#include "engine/engine_private.h"
#include "model/source.h"

/* ---- Parts of opening ---- */

static size_t free_bytes(const struct kern *k, size_t given) {
    struct kern_device_info info;
    if (given) return given;
    k->ops->info(k, &info);
    return info.free_bytes + info.own_bytes; /* which are a line of the plan */
}

/* The files of a model, or its shapes where weights are random or not wanted. */
static int open_source(struct model_source **out, const char *path, const struct engine_options *o,
                       bool plan, struct err *e) {
    int type = 0;
    if (!o->dummy_weights)
        return plan ? model_source_plan_only(out, path, e) : model_source_open(out, path, e);
    while (o->dummy_type && type < KERN_N_DTYPES &&
           strcasecmp(o->dummy_type, kern_dtype_name((enum kern_dtype)type)) != 0)
        type++;
    if (o->dummy_type && type == KERN_N_DTYPES)
        return err_raise(e, E_INVALID,
                         "dummy type '%.40s': not one of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, "
                         "Q5_1, Q4_K, Q5_K, Q6_K",
                         o->dummy_type);
    return model_source_open_dummy(out, path, o->dummy_type ? (enum kern_dtype)type : KERN_N_DTYPES,
                                   e);
}

static int open_tokenizer(struct engine *g, const struct model_source *src, struct err *e) {
    int rc = model_open_tokenizer(&g->tokenizer, src, e);
    if (rc) return rc;
    int n = tokenizer_n_tokens(g->tokenizer), head = model_source_config(src)->vocab;
    g->vocab = n < head ? n : head; /* padding of the head is never drawn */
    for (int id = 0; id < g->vocab; id++) {
        if (!tokenizer_is_eog(g->tokenizer, id)) continue;
        if (g->n_eog < ENGINE_MAX_BANNED) g->eog[g->n_eog] = id;
        g->n_eog++;
    }
    return 0;
}

/* A template of no known family leaves raw prompts; a name that was asked for must exist. */
static int open_chat(struct engine *g, const struct engine_options *o,
                     const struct model_source *src, struct err *e) {
    size_t n;
    struct err why = {0};
    if (o->chat_template) return chat_family_find(&g->chat, o->chat_template, e);
    const char *text = model_source_chat_template(src, &n);
    if (!text)
        err_raise(&why, E_NOT_FOUND,
                  "the model brings no chat template; raw prompts go on working");
    else if (chat_family_detect(&g->chat, text, n, &why) == 0) return 0;
    g->chat = NULL;
    size_t len = strnlen(why.message, sizeof g->chat_error - 1);
    memcpy(g->chat_error, why.message, len);
    return 0;
}

/* A reduced head is a draft's: as a target it could not emit the tokens that it lacks. */
static int check_target(const struct model_source *src, struct err *e) {
    const struct model_config *c = model_source_config(src);
    if (c->n_head == c->vocab) return 0;
    return err_raise(e, E_UNSUPPORTED,
                     "%s has a head of %d of %d tokens: it is a draft, name it with --draft",
                     model_source_path(src), c->n_head, c->vocab);
}

/* What bytes say of contexts: K and V of a position beside the weights. All of them, though a pass
 * reads of an embedding's table only its rows, and a borrowed head is not among them: it is where
 * learning begins. */
static void init_costs(struct engine *g) {
    const struct engine_sizes *s = &g->sizes;
    double target = 0, draft = 0;
    for (int i = 0; i < s->n_groups; i++)
        target += (double)kvpool_page_bytes(&s->pool.shape[s->group_class[i]]) / KVPOOL_BLOCK;
    draft_cost_init(&g->passes.target, target / (double)s->weight_bytes);
    if (s->has_draft)
        draft = (double)kvpool_page_bytes(&s->pool.shape[KVPOOL_DRAFT]) / KVPOOL_BLOCK /
                (double)s->draft.weight_bytes;
    draft_cost_init(&g->passes.draft, draft);
}

static int open_memory(struct engine *g, struct err *e) {
    int rc = g->kern->ops->reserve(g->kern, g->sizes.pool.arena_bytes, &g->arena, e);
    if (rc) return err_prefix(e, rc, "KV pool");
    rc = kvpool_open(&g->pool, &g->sizes.pool, e);
    if (rc) return rc;
    g->pool_tokens = kvpool_max_tokens(g->pool, false);
    rc = engine__prefill_open(g, e);
    if (rc) return rc;
    init_costs(g);
    draft_rates_init(g->prior, NULL);
    for (int i = g->sizes.o.max_seqs - 1; i >= 0; i--) g->free_slot[g->n_free_slots++] = i;
    return engine__batch_open(g, e);
}

/* The draft, where one was named: it must fit the target before anything is served. */
static int open_draft(struct engine *g, const struct model_source *src,
                      const struct model_source *draft, struct err *e) {
    if (!draft) return 0;
    const struct model_borrow borrow = {.target = g->model, .target_src = src};
    struct proposer_options o = g->sizes.proposer;
    o.vocab = g->vocab;
    return proposer_open(&g->proposer, &o, draft, &borrow, g->kern, g->arena, e);
}

/* The scorer's file, where one was named, held against the model. Headers alone have no
 * fingerprint. */
static int open_scorer(struct target_scorer_file **out, const struct engine_options *o,
                       const struct model_source *src, bool plan, struct err *e) {
    *out = NULL;
    if (!o->scorer_path) return 0;
    int rc = target_scorer_read(out, o->scorer_path, e);
    if (rc) return rc;
    rc = target_scorer_check(*out, model_source_config(src),
                             plan ? (*out)->fingerprint : model_source_fingerprint(src), e);
    return rc ? err_prefix(e, rc, "%s", o->scorer_path) : 0;
}

static int start_thread(struct engine *g, struct err *e) {
    g->opened_ns = clock_ns();
    engine__stats_init(&g->live);
    pthread_mutex_init(&g->lock, NULL);
    pthread_mutex_init(&g->stats_lock, NULL);
    pthread_cond_init(&g->wake, NULL);
    g->has_lock = true;
    engine__stats_publish(g);
    if (pthread_create(&g->thread, NULL, engine__thread, g))
        return err_raise(e, E_NOMEM, "cannot start the step thread");
    g->has_thread = true;
    return 0;
}

/* ---- Life ---- */

static void destroy(struct engine *g) {
    if (g->kern) {
        engine__batch_close(g);
        engine__prefill_close(g);
        kvpool_close(g->pool);
        proposer_close(g->proposer);
        target_scorer_close(g->scorer);
        g->kern->ops->unreserve(g->kern, g->arena);
        model_close(g->model);
        g->kern->ops->close(g->kern);
    }
    tokenizer_close(g->tokenizer);
    if (g->has_lock) {
        pthread_cond_destroy(&g->wake);
        pthread_mutex_destroy(&g->stats_lock);
        pthread_mutex_destroy(&g->lock);
    }
    free(g->trace_row);
    free(g);
}

int engine_open(struct engine **out, const struct engine_options *o,
                void (*progress)(void *arg, size_t done, size_t total), void *arg, struct err *e) {
    *out = NULL;
    if (!o->model_path) return err_raise(e, E_INVALID, "no model was named");
    struct engine *g = calloc(1, sizeof *g);
    if (!g) return err_raise(e, E_NOMEM, "no memory for the engine");
    struct model_source *src = NULL, *draft = NULL;
    struct target_scorer_file *scorer = NULL;
    int rc = engine__open_device(&g->kern, o, false, e);
    if (!rc) rc = open_source(&src, o->model_path, o, false, e);
    if (!rc && o->draft_path) rc = open_source(&draft, o->draft_path, o, false, e);
    size_t device_free = rc ? 0 : free_bytes(g->kern, 0);
    if (!rc) rc = open_tokenizer(g, src, e);
    if (!rc) rc = open_chat(g, o, src, e);
    if (!rc) rc = check_target(src, e);
    if (!rc && draft && (rc = model_check_pair(src, g->tokenizer, draft, e)) != 0)
        err_prefix(e, rc, "draft %s", o->draft_path);
    if (!rc) rc = open_scorer(&scorer, o, src, false, e);
    if (!rc)
        rc = engine__sizes(&g->sizes, &g->plan, o, src, draft, scorer, g->kern, device_free, e);
    if (!rc) rc = engine__check_plan(&g->sizes, &g->plan, o->context != 0, e);
    if (!rc) g->fingerprint = model_source_fingerprint(src);
    if (!rc) rc = model_open(&g->model, src, NULL, g->kern, &g->sizes.caps, progress, arg, e);
    if (!rc) rc = open_memory(g, e);
    if (!rc && scorer) rc = target_scorer_load(&g->scorer, scorer, g->kern, e);
    if (!rc) rc = open_draft(g, src, draft, e);
    target_scorer_free(scorer);
    model_source_close(draft);
    model_source_close(src);
    if (!rc) rc = start_thread(g, e);
    if (rc) {
        destroy(g);
        return rc;
    }
    /* The caller's strings may go now. */
    g->sizes.o.model_path = g->sizes.o.device = g->sizes.o.chat_template = NULL;
    g->sizes.o.draft_path = g->sizes.o.scorer_path = NULL;
    g->sizes.o.isa = g->sizes.o.kv_type = g->sizes.o.dummy_type = NULL;
    *out = g;
    return 0;
}

void engine_close(struct engine *g) {
    if (!g) return;
    engine_drain(g);
    pthread_mutex_lock(&g->lock);
    g->closing = true;
    pthread_mutex_unlock(&g->lock);
    engine__wake(g);
    if (g->has_thread) pthread_join(g->thread, NULL);
    destroy(g);
}

int engine_plan(struct plan *out, const struct engine_options *o, size_t device_free_bytes,
                struct err *e) {
    if (!o->model_path) return err_raise(e, E_INVALID, "no model was named");
    struct kern *k = NULL;
    struct model_source *src = NULL, *draft = NULL;
    struct target_scorer_file *scorer = NULL;
    struct engine_sizes s;
    int rc = engine__open_device(&k, o, device_free_bytes > 0, e);
    if (!rc) rc = open_source(&src, o->model_path, o, true, e);
    if (!rc && o->draft_path) rc = open_source(&draft, o->draft_path, o, true, e);
    if (!rc) rc = open_scorer(&scorer, o, src, true, e);
    if (!rc)
        rc = engine__sizes(&s, out, o, src, draft, scorer, k, free_bytes(k, device_free_bytes), e);
    target_scorer_free(scorer);
    model_source_close(draft);
    model_source_close(src);
    if (k) k->ops->close(k);
    return rc;
}

/* ---- What was opened ---- */

const struct model_config *engine_model_config(const struct engine *g) {
    return model_get_config(g->model);
}
const struct model_config *engine_draft_config(const struct engine *g) {
    return g->proposer ? proposer_config(g->proposer) : NULL;
}
const struct tokenizer *engine_tokenizer(const struct engine *g) {
    return g->tokenizer;
}
const struct chat_family *engine_chat(const struct engine *g) {
    return g->chat;
}
const char *engine_chat_error(const struct engine *g) {
    return g->chat ? NULL : g->chat_error;
}
const struct plan *engine_get_plan(const struct engine *g) {
    return &g->plan;
}
int engine_context(const struct engine *g) {
    return g->sizes.o.context;
}
const char *engine_model_name(const struct engine *g) {
    return engine_model_config(g)->name;
}
bool engine_is_dummy(const struct engine *g) {
    return g->sizes.o.dummy_weights;
}
int engine_select_layer(const struct engine *g) {
    return g->sizes.o.select_layer;
}
const struct kern_scorer *engine_scorer(const struct engine *g) {
    return g->scorer ? target_scorer_kern(g->scorer) : NULL;
}
uint64_t engine_model_fingerprint(const struct engine *g) {
    return g->fingerprint;
}

void engine_trace_logits(struct engine *g,
                         void (*sink)(void *arg, const struct engine_request *r, int position,
                                      const float *logits, int n),
                         void *arg) {
    /* Before the first request the step thread sleeps and reads none of this; the lock inside
     * submission makes it visible. */
    if (!g->trace_row) g->trace_row = malloc((size_t)g->vocab * sizeof *g->trace_row);
    g->trace_arg = arg;
    g->trace = g->trace_row ? sink : NULL;
}

void engine_trace_kv(struct engine *g,
                     void (*sink)(void *arg, const struct engine_request *r,
                                  const struct engine_kv_view *v),
                     void *arg) {
    g->trace_kv_arg = arg;
    g->trace_kv = sink;
}

void engine_trace_selection(struct engine *g,
                            void (*sink)(void *arg, const struct engine_request *r,
                                         const struct engine_kv_view *v, const int32_t *kept,
                                         int n_kept, int n_blocks),
                            void *arg) {
    g->trace_selection_arg = arg;
    g->trace_selection = sink;
}
