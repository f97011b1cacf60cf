/* Exact answers beside dense ones, as served: the prompts of the needles go through an engine of
 * their own, a few at once, each computed once (the second request finds its pages). */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cmd/bell.h"
#include "cmd/eval_exact.h"

enum { AT_ONCE = 8 };

/* One prompt and its two answers. */
struct pair {
    struct tokens ids;
    int32_t *dense;
    int n_dense;
    struct engine_request *request;
};

struct serving {
    struct engine *g;
    const struct eval_exact_options *o;
    struct bell bell;
    struct pair pair[AT_ONCE];
};

/* ---- Opening ---- */

/* Pages for so many sequences, twice: what was cached of a prompt must not be forgotten before its
 * second answer. */
static size_t kv_bytes(const struct eval_bed *b, bool is_f32, int n_tokens) {
    enum kern_dtype kv = is_f32 ? KERN_F32 : KERN_F16; /* 8 bits need less */
    size_t block = model_kv_offset(&b->c, b->c.n_layers, false, kv) + 4096;
    return 2 * AT_ONCE * block * (size_t)(target_n_blocks(n_tokens) + 2);
}

static int open_engine(struct serving *s, const struct eval_bed *b, int longest, struct err *e) {
    struct engine_options o = s->o->engine;
    o.context = longest + s->o->n_answer + 1;
    if (o.context > b->c.context) o.context = b->c.context;
    o.max_seqs = AT_ONCE;
    o.lookup = false;
    o.kv_memory_bytes = kv_bytes(b, o.precision == KERN_REFERENCE, o.context);
    o.select_layer = b->select_layer;
    int rc = engine_open(&s->g, &o, NULL, NULL, e);
    return rc ? err_prefix(e, rc, "an engine for exact answers") : 0;
}

/* ---- Answers ---- */

static int submit(struct serving *s, struct pair *p, int exact, struct err *e) {
    struct target_settings ask;
    struct engine_submit_options o = {.prompt = p->ids.ids,
                                      .n_prompt = (int)p->ids.n,
                                      .sparse = &ask,
                                      .notify = bell_ring,
                                      .notify_arg = &s->bell};
    target_settings_unset(&ask);
    if (exact) {
        ask = s->o->keep;
        ask.selector = TARGET_OBSERVED;
        ask.exact = exact;
    } else ask.selector = TARGET_OFF;
    verify_params_default(&o.params);
    o.params.temperature = 0;
    o.params.max_tokens = s->o->n_answer;
    o.params.ignore_eos = true;
    o.params.has_seed = true;
    return engine_submit(s->g, &o, &p->request, e);
}

/* Wait for a request's end; the bell is everybody's, so look once before each sleep. */
static int finish(struct serving *s, struct pair *p, struct engine_progress *out, struct err *e) {
    for (engine_poll(p->request, out); out->finish == ENGINE_RUNNING; engine_poll(p->request, out))
        bell_wait(&s->bell);
    if (out->finish == ENGINE_FAILED) return err_raise(e, out->error_code, "%s", out->error);
    return 0;
}

static void drop(struct serving *s, struct pair *p) {
    if (p->request) engine_release(s->g, p->request);
    p->request = NULL;
}

static double answer_s(const struct engine_progress *p) {
    return (double)(p->finished_ns - p->first_token_ns) / 1e9;
}

static void compare(struct pair *p, const struct engine_progress *got, struct eval_exact *out) {
    const struct engine_exact *x = &got->sparsity.exact;
    bool same = got->n_tokens == p->n_dense &&
                !memcmp(got->tokens, p->dense, sizeof *p->dense * (size_t)p->n_dense);
    out->n++;
    out->n_same += same;
    out->n_sparse += got->sparsity.n_kept < got->sparsity.n_blocks;
    out->n_tokens += (uint64_t)got->n_tokens;
    out->passes.n_passes += x->n_passes;
    out->passes.n_provisional += x->n_provisional;
    out->passes.n_accepted += x->n_accepted;
    out->passes.n_tokens += x->n_tokens;
    out->exact_s += answer_s(got);
}

/* The pairs at hand, all dense, then all exact. */
static int answer(struct serving *s, int n, struct eval_exact *out, struct err *e) {
    int rc = 0;
    for (int turn = 0; turn < 2 && !rc; turn++) {
        for (int i = 0; i < n && !rc; i++) rc = submit(s, &s->pair[i], turn ? s->o->exact : 0, e);
        for (int i = 0; i < n && !rc; i++) {
            struct pair *p = &s->pair[i];
            struct engine_progress got;
            rc = finish(s, p, &got, e);
            if (rc) break;
            if (turn) compare(p, &got, out);
            else {
                p->n_dense = got.n_tokens;
                memcpy(p->dense, got.tokens, sizeof *p->dense * (size_t)got.n_tokens);
                out->dense_s += answer_s(&got);
            }
        }
        for (int i = 0; i < n; i++) drop(s, &s->pair[i]);
    }
    return rc;
}

int eval_exact_run(struct eval_bed *b, const struct eval_texts *texts,
                   const struct eval_find_options *find, const struct eval_exact_options *o,
                   const struct eval_clock *clock, struct eval_exact *out, struct err *e) {
    struct serving *s = calloc(1, sizeof *s);
    struct log_progress bar;
    struct eval_progress progress;
    int n = find->n * find->n_lengths, longest = 0, rc = 0;
    *out = (struct eval_exact){.exact = o->exact, .n_answer = o->n_answer};
    if (!s) return err_raise(e, E_NOMEM, "no memory for exact answers");
    s->o = o;
    s->bell = (struct bell)BELL_INIT;
    for (int i = 0; i < find->n_lengths; i++)
        if (find->length[i] > longest) longest = find->length[i];
    for (int i = 0; i < AT_ONCE && !rc; i++) {
        s->pair[i].dense = malloc(sizeof *s->pair[i].dense * (size_t)o->n_answer);
        if (!s->pair[i].dense) rc = err_raise(e, E_NOMEM, "no memory for exact answers");
    }
    if (!rc) rc = open_engine(s, b, longest, e);
    eval_progress_start(&progress, &bar, "exact answers", n);
    for (int i = 0; i < n && !rc && !eval_clock_is_up(clock);) {
        int k = 0;
        for (; k < AT_ONCE && i < n && !rc; k++, i++)
            rc = eval_find_prompt(b, texts, find, i, &s->pair[k].ids, e);
        if (!rc) rc = answer(s, k, out, e);
        eval_progress_at(&progress, i);
    }
    eval_progress_end(&progress);
    out->is_cut = out->n < n;
    if (s->g) engine_close(s->g);
    for (int i = 0; i < AT_ONCE; i++) {
        tokens_deinit(&s->pair[i].ids);
        free(s->pair[i].dense);
    }
    free(s);
    return rc;
}

/* ---- Report ---- */

static double per_pass(const struct eval_exact *x) {
    return x->passes.n_passes ? (double)x->passes.n_tokens / (double)x->passes.n_passes : 0;
}

void eval_exact_text(struct strbuf *b, const struct eval_exact *x) {
    strbuf_printf(b,
                  "\nExact answers, up to %d tokens at once, %d tokens each, %d prompts at once: "
                  "%d of %d equal the dense ones, token for token\n",
                  x->exact, x->n_answer, AT_ONCE, x->n_same, x->n);
    if (x->passes.n_passes == 0) {
        strbuf_append_str(b, "no prompt lost any block: all was dense\n");
        return;
    }
    strbuf_printf(b,
                  "%d prompts lost blocks; %.2f tokens a dense pass (%llu passes), %.1f %% of the "
                  "provisional ones were emitted; %.2f x the dense answers' speed\n",
                  x->n_sparse, per_pass(x), (unsigned long long)x->passes.n_passes,
                  100.0 * (double)x->passes.n_accepted / (double)x->passes.n_provisional,
                  x->exact_s > 0 ? x->dense_s / x->exact_s : 0);
}

void eval_exact_json(struct strbuf *b, const struct eval_exact *x) {
    strbuf_printf(b,
                  ",\n\"exact\": {\"at_most\": %d, \"answer_tokens\": %d, \"at_once\": %d, "
                  "\"prompts\": %d, \"equal\": %d, \"sparse\": %d, \"tokens\": %llu, "
                  "\"passes\": %llu, \"provisional\": %llu, \"accepted\": %llu, "
                  "\"tokens_of_passes\": %llu, \"tokens_a_pass\": %.9g, \"dense_seconds\": %.9g, "
                  "\"exact_seconds\": %.9g}",
                  x->exact, x->n_answer, AT_ONCE, x->n, x->n_same, x->n_sparse,
                  (unsigned long long)x->n_tokens, (unsigned long long)x->passes.n_passes,
                  (unsigned long long)x->passes.n_provisional,
                  (unsigned long long)x->passes.n_accepted, (unsigned long long)x->passes.n_tokens,
                  per_pass(x), x->dense_s, x->exact_s);
}
