#include "tests/fake_engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"

enum { N_VOCAB = 258, EOS = 256, OPEN = 257, CONTEXT = 4096, MAX_QUEUE = 300, MAX_TALKS = 64 };

struct engine_request {
    struct engine_request *next;
    struct engine_submit_options o;
    int32_t *prompt, *tokens;
    struct engine_logprobs *logprobs;
    int max_tokens, n_tokens;
    bool cancelled, paused, released;
    enum engine_finish finish;
    int stop_idx;
    int64_t submitted_ns, first_ns, finished_ns;
    int n_cached;
    uint8_t *drafted;
    struct engine_speculation spec;
    enum engine_no_draft no_draft;
    struct engine_sparsity sparsity;
};

/* The last request of a conversation. */
struct talk {
    uint64_t salt, conversation;
    int32_t *ids;
    int n;
};

struct engine {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    struct engine_request *requests;
    bool closing;
    atomic_bool draining, failed;
    int step_us, run;
    struct talk talks[MAX_TALKS];
    int n_talks; /* ever; the oldest is forgotten */
    struct engine_stats stats;
    struct plan plan;
    int64_t opened_ns;
};

/* ---- Tokenizer and template ---- */

struct tokenizer {
    int unused;
};
static const struct tokenizer the_tokenizer;

int tokenizer_n_tokens(const struct tokenizer *t) {
    return (void)t, N_VOCAB;
}
uint64_t tokenizer_fingerprint(const struct tokenizer *t) {
    return (void)t, 0x0123456789abcdefull;
}
void tokens_deinit(struct tokens *v) {
    free(v->ids);
}

static int push(struct tokens *out, int32_t id, struct err *e) {
    if (out->limit && out->n == out->limit) return err_raise(e, E_TOO_LONG, "too many tokens");
    if (out->n == out->cap) {
        size_t cap = out->cap ? 2 * out->cap : 64;
        int32_t *ids = realloc(out->ids, cap * sizeof *ids);
        if (!ids) return err_raise(e, E_NOMEM, "tokens");
        out->ids = ids;
        out->cap = cap;
    }
    out->ids[out->n++] = id;
    return 0;
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, unsigned flags,
                     struct tokens *out, struct err *e) {
    (void)t, (void)flags;
    struct timespec slow = {.tv_nsec = 50000000};
    if (n > 16384) nanosleep(&slow, NULL); /* a long text takes its time */
    for (size_t i = 0; i < n; i++) {
        int rc = push(out, (unsigned char)text[i], e);
        if (rc != 0) return rc;
    }
    return 0;
}

void tokenizer_token_bytes(const struct tokenizer *t, int id, bool special, struct strbuf *out) {
    (void)t;
    if (id < 256) strbuf_append_char(out, (char)id);
    else if (special) strbuf_append_str(out, id == EOS ? "<eos>" : "<open>");
}

void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool special,
                      struct strbuf *out) {
    for (size_t i = 0; i < n; i++) tokenizer_token_bytes(t, ids[i], special, out);
}
bool tokenizer_is_control(const struct tokenizer *t, int id) {
    return (void)t, id >= 256;
}

const char *chat_family_name(const struct chat_family *f) {
    return (void)f, "fake";
}

int chat_render(const struct chat_family *f, const struct tokenizer *t,
                const struct chat_message *m, size_t n, bool open, struct tokens *out,
                struct err *e) {
    (void)f;
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        if (strcmp(m[i].role, "user") != 0 && strcmp(m[i].role, "assistant") != 0 &&
            strcmp(m[i].role, "system") != 0)
            return err_raise(e, E_INVALID, "role \"%s\" has no place", m[i].role);
        rc = tokenizer_encode(t, m[i].content, m[i].content_bytes, 0, out, e);
    }
    return rc == 0 && open ? push(out, OPEN, e) : rc;
}

/* ---- What it is ---- */

static const struct tokenizer *const chat_mark = &the_tokenizer; /* any address */
void engine_options_default(struct engine_options *o) {
    memset(o, 0, sizeof *o);
    o->draft_tokens = o->select_layer = -1;
    o->lookup = true;
    target_settings_unset(&o->sparse);
}
const struct model_config *engine_draft_config(const struct engine *g) {
    static const struct model_config draft = {
        .arch = "llama", .name = "fake draft", .n_layers = 2, .context = 2048};
    return (void)g, &draft;
}
const char *engine_no_draft_name(enum engine_no_draft n) {
    static const char *const names[] = {"", "no draft model", "off", "draft memory short",
                                        "beyond the draft's context"};
    return names[n];
}
const struct tokenizer *engine_tokenizer(const struct engine *g) {
    return (void)g, &the_tokenizer;
}
const struct chat_family *engine_chat(const struct engine *g) {
    (void)g;
    return (const struct chat_family *)(const void *)chat_mark;
}
const char *engine_chat_error(const struct engine *g) {
    return (void)g, "";
}
const struct plan *engine_get_plan(const struct engine *g) {
    return &g->plan;
}
int engine_context(const struct engine *g) {
    return (void)g, CONTEXT;
}
const char *engine_model_name(const struct engine *g) {
    return (void)g, "fake \"model\"";
}
uint64_t engine_model_fingerprint(const struct engine *g) {
    return (void)g, 0xfedcba9876543210ull;
}
const char *engine_finish_name(enum engine_finish f) {
    static const char *const names[] = {"running",   "stop",  "length",
                                        "cancelled", "error", "aborted"};
    return names[f];
}
const char *kvpool_class_name(enum kvpool_class c) {
    static const char *const names[] = {"draft", "shallow", "deep"};
    return names[c];
}
int engine_plan(struct plan *out, const struct engine_options *o, size_t free_bytes,
                struct err *e) {
    (void)e;
    memset(out, 0, sizeof *out);
    out->context = o->context;
    out->budget_bytes = free_bytes;
    out->n_lines = 1;
    memcpy(out->lines[0].name, "weights", sizeof "weights");
    out->lines[0].bytes = 1000;
    out->fits = true;
    return 0;
}

/* ---- Requests ---- */

static struct talk *find_talk(struct engine *g, const struct engine_submit_options *o) {
    for (int i = 0; i < MAX_TALKS; i++)
        if (o->conversation && !o->no_prefix_cache && g->talks[i].ids &&
            g->talks[i].conversation == o->conversation && g->talks[i].salt == o->salt)
            return &g->talks[i];
    return NULL;
}

static void look_up(struct engine *g, struct engine_request *r) {
    const struct talk *t = find_talk(g, &r->o);
    int n = t ? t->n : 0;
    if (n > r->o.n_prompt) n = r->o.n_prompt;
    while (r->n_cached < n && t->ids[r->n_cached] == r->prompt[r->n_cached]) r->n_cached++;
}

static void remember(struct engine *g, const struct engine_request *r) {
    struct talk *t = find_talk(g, &r->o);
    if (!r->o.conversation || r->o.no_prefix_cache) return;
    if (!t) t = &g->talks[g->n_talks++ % MAX_TALKS];
    size_t n_prompt = (size_t)r->o.n_prompt, n = n_prompt + (size_t)r->n_tokens;
    free(t->ids);
    *t = (struct talk){r->o.salt, r->o.conversation, malloc(n * sizeof *t->ids), (int)n};
    memcpy(t->ids, r->prompt, n_prompt * sizeof *t->ids);
    memcpy(t->ids + n_prompt, r->tokens, (size_t)r->n_tokens * sizeof *t->ids);
}

struct target_settings engine_sparse_defaults(const struct engine *g) {
    struct target_settings none;
    (void)g;
    target_settings_unset(&none);
    return target_settings_resolve(&none, &none, NULL);
}

/* As if each token of the prompt were a block. */
static void select_blocks(const struct engine_submit_options *o, struct engine_sparsity *out) {
    struct target_settings none;
    target_settings_unset(&none);
    out->settings = target_settings_resolve(&none, o->sparse, NULL);
    if (out->settings.selector == TARGET_OFF) return;
    out->n_selections = 1;
    out->n_blocks = o->n_prompt;
    out->n_kept = target_n_kept(&out->settings, o->n_prompt * TARGET_BLOCK);
    out->n_kept_first = out->n_union = out->n_kept;
    out->n_lists = out->settings.lists == TARGET_LISTS_LAYER ? 3 : 1;
    out->n_dropped = out->settings.drop > 0 ? 2 : 0;
    out->kv_shallow_bytes = 1000;
    out->kv_deep_bytes = 500;
    out->kv_dense_bytes = 3000;
    if (out->settings.exact > 0)
        out->exact = (struct engine_exact){2, 2 * (uint64_t)out->settings.exact, 21, 23};
    if (out->settings.prefill == TARGET_PREFILL_SPARSE)
        out->prefill = (struct engine_prefill){3, 10, 6, 700, 900};
}

int engine_submit(struct engine *g, const struct engine_submit_options *o,
                  struct engine_request **out, struct err *e) {
    int rc = engine_failed(g, e);
    if (!rc) rc = verify_params_check(&o->params, e);
    if (!rc && o->sparse) rc = target_settings_check(o->sparse, e);
    if (rc != 0) return rc;
    if (atomic_load(&g->draining)) return err_raise(e, E_CLOSED, "draining");
    int room = CONTEXT - o->n_prompt;
    if (room < 1)
        return err_raise(e, E_TOO_LONG, "prompt of %d tokens, context %d", o->n_prompt, CONTEXT);
    if (fake_engine_n_live(g) >= MAX_QUEUE) return err_raise(e, E_FULL, "queue is full");
    struct engine_request *r = calloc(1, sizeof *r);
    r->o = *o;
    r->max_tokens =
        o->params.max_tokens > 0 && o->params.max_tokens < room ? o->params.max_tokens : room;
    r->prompt = malloc((size_t)o->n_prompt * sizeof *r->prompt);
    memcpy(r->prompt, o->prompt, (size_t)o->n_prompt * sizeof *r->prompt);
    r->tokens = malloc((size_t)r->max_tokens * sizeof *r->tokens);
    r->drafted = calloc((size_t)r->max_tokens, 1);
    if (o->params.draft_tokens == 0) r->no_draft = ENGINE_DRAFT_OFF;
    if (o->sparse) select_blocks(o, &r->sparsity);
    if (o->prompt[0] == 5) r->no_draft = ENGINE_DRAFT_MEMORY;
    if (o->params.logprobs >= 0) r->logprobs = calloc((size_t)r->max_tokens, sizeof *r->logprobs);
    r->stop_idx = -1;
    r->submitted_ns = clock_ns();
    pthread_mutex_lock(&g->mutex);
    look_up(g, r);
    g->stats.n_draft_starved += r->no_draft == ENGINE_DRAFT_MEMORY;
    r->next = g->requests;
    g->requests = r;
    g->stats.n_requests++;
    g->stats.n_prompt_tokens += (uint64_t)o->n_prompt;
    pthread_cond_signal(&g->cond);
    pthread_mutex_unlock(&g->mutex);
    *out = r;
    return 0;
}

/* The requests' fields are guarded by the engine's mutex; polls take it through this. */
static struct engine *the_engine;

void engine_poll(const struct engine_request *r, struct engine_progress *out) {
    struct engine *g = the_engine;
    pthread_mutex_lock(&g->mutex);
    *out = (struct engine_progress){
        .n_tokens = r->n_tokens,
        .tokens = r->tokens,
        .logprobs = r->logprobs,
        .drafted = r->drafted,
        .finish = r->finish,
        .stop_idx = r->stop_idx,
        .error_code = r->finish == ENGINE_FAILED ? E_DEVICE : 0,
        .error = r->finish == ENGINE_FAILED ? "the fake device failed" : "",
        .n_prompt = r->o.n_prompt,
        .n_cached_prompt = r->n_cached,
        .no_draft = r->finish ? r->no_draft : ENGINE_DRAFT_OK,
        .seed = r->o.params.has_seed ? r->o.params.seed : 99,
        .submitted_ns = r->submitted_ns,
        .admitted_ns = r->submitted_ns,
        .first_token_ns = r->first_ns,
        .finished_ns = r->finished_ns,
    };
    if (r->finish) out->speculation = r->spec;
    if (r->finish) out->sparsity = r->sparsity;
    pthread_mutex_unlock(&g->mutex);
}

void engine_cancel(struct engine *g, struct engine_request *r) {
    pthread_mutex_lock(&g->mutex);
    r->cancelled = true;
    pthread_cond_signal(&g->cond);
    pthread_mutex_unlock(&g->mutex);
}
void engine_pause(struct engine *g, struct engine_request *r, bool paused) {
    pthread_mutex_lock(&g->mutex);
    r->paused = paused;
    pthread_cond_signal(&g->cond);
    pthread_mutex_unlock(&g->mutex);
}
void engine_release(struct engine *g, struct engine_request *r) {
    pthread_mutex_lock(&g->mutex);
    r->released = true;
    pthread_cond_signal(&g->cond);
    pthread_mutex_unlock(&g->mutex);
}
void engine_drain(struct engine *g) {
    atomic_store(&g->draining, true);
}
int engine_failed(const struct engine *g, struct err *e) {
    return atomic_load(&g->failed) ? err_raise(e, E_DEVICE, "the fake device failed") : 0;
}

int fake_engine_n_live(const struct engine *cg) {
    struct engine *g = (struct engine *)(uintptr_t)cg;
    int n = 0;
    pthread_mutex_lock(&g->mutex);
    for (const struct engine_request *r = g->requests; r; r = r->next) n += !r->released;
    pthread_mutex_unlock(&g->mutex);
    return n;
}

void engine_get_stats(struct engine *g, struct engine_stats *out) {
    pthread_mutex_lock(&g->mutex);
    *out = g->stats;
    for (const struct engine_request *r = g->requests; r; r = r->next) {
        bool runs = r->finish == ENGINE_RUNNING && !r->released;
        out->n_running += runs && !r->paused;
        out->n_paused += runs && r->paused;
    }
    pthread_mutex_unlock(&g->mutex);
    out->pool.arena_bytes = 1 << 20;
    out->pool.of[KVPOOL_DEEP].page_bytes = 1024;
    out->pool.of[KVPOOL_DEEP].total = 100;
    out->pool.of[KVPOOL_DEEP].used = 25;
    out->uptime_seconds = (double)(clock_ns() - g->opened_ns) / 1e9;
}

/* ---- Steps ---- */

static void destroy(struct engine_request *r) {
    free(r->prompt);
    free(r->tokens);
    free(r->drafted);
    free(r->logprobs);
    free(r);
}

static void end(struct engine *g, struct engine_request *r, enum engine_finish f) {
    r->finish = f;
    r->finished_ns = clock_ns();
    g->stats.n_finished[f]++;
    remember(g, r);
}

static bool ends_in_stop(struct engine_request *r) {
    const struct verify_params *p = &r->o.params;
    for (int s = 0; s < p->n_stops; s++) {
        int n = p->stops[s].n, k = 0;
        if (n > r->n_tokens) continue;
        while (k < n && r->tokens[r->n_tokens - n + k] == (unsigned char)p->stops[s].text[k]) k++;
        if (k == n) {
            r->stop_idx = s;
            return true;
        }
    }
    return false;
}

/* The step's tokens as a round of `n_drafted` accepted draft tokens, `n_refused` refused ones and
 * the target's own. */
static void count_round(struct engine_speculation *s, int n_drafted, int n_refused, bool lookup) {
    int n = n_drafted + n_refused;
    if (n == 0) {
        s->n_plain_rounds++;
        return;
    }
    s->n_rounds++;
    s->n_drafted += (uint64_t)n;
    s->n_accepted += (uint64_t)n_drafted;
    s->n_lookup_drafted += lookup ? (uint64_t)n : 0;
    s->n_lookup_accepted += lookup ? (uint64_t)n_drafted : 0;
    for (int i = 0; i < n; i++) s->n_drafted_at[i]++;
    for (int i = 0; i < n_drafted; i++) s->n_accepted_at[i]++;
    s->n_page_rollbacks += n_refused > 0;
    s->draft_ns += 1000000;
    s->verify_ns += 3000000;
}

static void step_tokens(struct engine *g, struct engine_request *r, int n) {
    for (int k = 0; k < n && r->finish == ENGINE_RUNNING; k++) {
        int32_t id = r->prompt[r->n_tokens % r->o.n_prompt];
        if (id == OPEN) id = EOS;
        if (id == 4) {
            end(g, r, ENGINE_STOP);
            return;
        }
        if (r->n_tokens == 0) r->first_ns = clock_ns();
        if (r->logprobs)
            r->logprobs[r->n_tokens] = (struct engine_logprobs){.logprob = -0.5f,
                                                                .n_top = r->o.params.logprobs > 0,
                                                                .top_id = {id},
                                                                .top_logprob = {-0.5f}};
        r->drafted[r->n_tokens] = n > 1 && k + 1 < n;
        r->tokens[r->n_tokens++] = id;
        g->stats.n_generated_tokens++;
        if (id == EOS || ends_in_stop(r)) end(g, r, ENGINE_STOP);
        else if (r->n_tokens == r->max_tokens) end(g, r, ENGINE_LENGTH);
    }
}

static void step(struct engine *g, struct engine_request *r) {
    if (r->prompt[0] == 6 && r->n_tokens > 3) atomic_store(&g->failed, true);
    if (atomic_load(&g->failed)) {
        end(g, r, ENGINE_FAILED);
        return;
    }
    int first = r->n_tokens, n = g->run, n_accepted = 0;
    int most = r->no_draft ? 0 : r->o.params.draft_tokens; /* below 0: auto */
    if (most >= 0 && n > most + 1) n = most + 1;
    int32_t id = r->prompt[r->n_tokens % r->o.n_prompt];
    bool letter = (id >= 'a' && id <= 'z') || (id >= 'A' && id <= 'Z');
    step_tokens(g, r, n);
    for (int i = first; i < r->n_tokens; i++) n_accepted += r->drafted[i];
    if (r->n_tokens == first) return;
    int n_refused = n > 1 && r->finish == ENGINE_RUNNING;
    count_round(&r->spec, n_accepted, n_refused, !letter && r->o.params.lookup);
    count_round(&g->stats.speculation, n_accepted, n_refused, !letter && r->o.params.lookup);
    g->stats.overhead_seconds += 0.001;
}

static void *step_loop(void *arg) {
    struct engine *g = arg;
    pthread_mutex_lock(&g->mutex);
    while (!g->closing) {
        bool idle = true;
        for (struct engine_request **at = &g->requests; *at;) {
            struct engine_request *r = *at;
            if (r->released) {
                *at = r->next;
                destroy(r);
                continue;
            }
            if (r->finish == ENGINE_RUNNING && (r->cancelled || !r->paused)) {
                idle = false;
                if (r->cancelled) end(g, r, ENGINE_CANCELLED);
                else step(g, r);
                r->o.notify(r->o.notify_arg);
            }
            at = &r->next;
        }
        g->stats.n_steps++;
        if (idle) {
            pthread_cond_wait(&g->cond, &g->mutex);
            continue;
        }
        pthread_mutex_unlock(&g->mutex);
        struct timespec t = {.tv_nsec = (long)g->step_us * 1000};
        if (g->step_us > 0) nanosleep(&t, NULL);
        pthread_mutex_lock(&g->mutex);
    }
    pthread_mutex_unlock(&g->mutex);
    return NULL;
}

struct engine *fake_engine_open(int step_us, int run) {
    struct engine *g = calloc(1, sizeof *g);
    g->step_us = step_us;
    g->run = run;
    g->opened_ns = clock_ns();
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->cond, NULL);
    g->stats.ttft.bound[0] = 0.1;
    for (int i = 1; i < ENGINE_N_BUCKETS; i++) g->stats.ttft.bound[i] = 1e308 * 10;
    g->stats.itl = g->stats.e2e = g->stats.ttft;
    g->plan.fits = true;
    the_engine = g;
    pthread_create(&g->thread, NULL, step_loop, g);
    return g;
}

void engine_close(struct engine *g) {
    pthread_mutex_lock(&g->mutex);
    g->closing = true;
    pthread_cond_signal(&g->cond);
    pthread_mutex_unlock(&g->mutex);
    pthread_join(g->thread, NULL);
    while (g->requests) {
        struct engine_request *r = g->requests;
        g->requests = r->next;
        destroy(r);
    }
    for (int i = 0; i < MAX_TALKS; i++) free(g->talks[i].ids);
    pthread_cond_destroy(&g->cond);
    pthread_mutex_destroy(&g->mutex);
    free(g);
}
