/* The draft model's rounds. Which kernels serve a catch-up row is free here: a draft's bits decide
 * what is proposed, never what is emitted, so that a long way is caught up on the prompt kernels
 * whatever its tokens are. */
#include "draft/proposer.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/rng.h"
#include "model/batch.h"
#include "model/source.h"

enum { SHORT_WAY = KERN_MAX_DRAFT + 1 }; /* rows of a catch-up that decode kernels serve */

struct proposer {
    struct proposer_options o;
    struct kern *k;
    struct model *model;
    void *arena;
    struct model_batch b;
    struct model_array sample;                  /* kern_sample [max_seqs] */
    struct model_array recent;                  /* i32 [max_seqs][max_draft]: this round's tokens */
    struct kern_sampled *dev_sampled, *sampled; /* [max_seqs] */
    float *dev_logits;                          /* [max_seqs][n_head] */
    float *dev_probs;                           /* [max_seqs][max_draft][n_head] */
    void *sample_scratch;
    int32_t *drawer;       /* [max_seqs] host: turn of each logits row */
    int n_head, n_columns; /* of the head; of those, ids that may be drawn */
    void *dev_base, *host_base;
};

/* ---- Sizes ---- */

static void layout(struct proposer *p, struct model_carve *c, const struct model_caps *caps,
                   size_t scratch, struct proposer_sizes *s) {
    size_t seqs = (size_t)p->o.max_seqs, drafts = seqs * (size_t)p->o.max_draft;
    size_t head = (size_t)p->n_head, start = c->dev_used;
    model_batch_layout(&p->b, c, caps, 1);
    model_carve_array(c, &p->sample, seqs, sizeof(struct kern_sample));
    model_carve_array(c, &p->recent, drafts, sizeof(int32_t));
    p->dev_sampled = model_carve_dev(c, seqs * sizeof *p->dev_sampled);
    p->sampled = model_carve_host(c, seqs * sizeof *p->sampled);
    p->drawer = model_carve_host(c, seqs * sizeof *p->drawer);
    p->dev_logits = model_carve_dev(c, seqs * head * sizeof(float));
    p->sample_scratch = model_carve_dev(c, scratch);
    if (s) s->batch_bytes = c->dev_used - start;
    start = c->dev_used;
    p->dev_probs = model_carve_dev(c, drafts * head * sizeof(float));
    if (s) s->prob_bytes = c->dev_used - start;
}

static struct model_caps caps_of(const struct proposer_options *o) {
    return (struct model_caps){.max_rows = o->max_rows,
                               .max_seqs = o->max_seqs,
                               .max_blocks = o->max_blocks,
                               .max_logits = o->max_seqs};
}

int proposer_sizes(struct proposer_sizes *out, const struct proposer_options *o,
                   const struct model_source *src, const struct model_borrow *borrow,
                   const struct kern *k, struct err *e) {
    const struct model_config *c = model_source_config(src);
    struct model_caps caps = caps_of(o);
    memset(out, 0, sizeof *out);
    int rc = model_weight_bytes(src, borrow, k, &out->weight_bytes, e);
    if (!rc) rc = model_workspace_bytes(c, k, &caps, &out->workspace_bytes, e);
    if (rc) return rc;
    struct proposer none = {.o = *o, .n_head = c->n_head};
    struct model_carve carve = {0};
    layout(&none, &carve, &caps, k->ops->sample_scratch_bytes(k, o->max_seqs, c->n_head), out);
    out->host_bytes = carve.host_used;
    return 0;
}

int proposer_blocks(const struct proposer_options *o, int n_tokens) {
    int all = (n_tokens + KVPOOL_BLOCK - 1) / KVPOOL_BLOCK;
    /* The sink, the window, what one pass adds, and a partly used block at either end. */
    int most = 1 + (o->window + o->max_rows) / KVPOOL_BLOCK + 2;
    return o->window > 0 && most < all ? most : all;
}

/* ---- Life ---- */

/* Ids of padding stand at the end of an ascending list, so the ones that may be drawn are a prefix
 * of the columns. */
static int count_columns(struct proposer *p, struct err *e) {
    const int32_t *dev = model_head_ids(p->model);
    p->n_columns = p->n_head < p->o.vocab ? p->n_head : p->o.vocab;
    if (!dev) return 0;
    int32_t *ids = malloc((size_t)p->n_head * sizeof *ids);
    if (!ids) return err_raise(e, E_NOMEM, "no memory for %d head ids", p->n_head);
    int rc = p->k->ops->download(p->k, ids, dev, (size_t)p->n_head * sizeof *ids, e);
    for (p->n_columns = 0; !rc && p->n_columns < p->n_head; p->n_columns++)
        if (ids[p->n_columns] >= p->o.vocab) break;
    if (!rc && p->n_columns == 0)
        rc = err_raise(
            e, E_INVALID,
            "key tandem.draft.head_ids: the lowest id is %d, the tokenizer has %d tokens: "
            "such a draft could never propose one",
            ids[0], p->o.vocab);
    free(ids);
    return rc;
}

int proposer_open(struct proposer **out, const struct proposer_options *o,
                  const struct model_source *src, const struct model_borrow *borrow, struct kern *k,
                  void *arena, struct err *e) {
    struct proposer *p = calloc(1, sizeof *p);
    if (!p) return err_raise(e, E_NOMEM, "no memory for the draft");
    struct model_caps caps = caps_of(o);
    struct model_carve c = {0};
    p->o = *o;
    p->k = k;
    p->arena = arena;
    p->n_head = model_source_config(src)->n_head;
    size_t scratch = k->ops->sample_scratch_bytes(k, o->max_seqs, p->n_head);
    int rc = model_open(&p->model, src, borrow, k, &caps, NULL, NULL, e);
    if (!rc) rc = count_columns(p, e);
    if (!rc) {
        layout(p, &c, &caps, scratch, NULL);
        rc = k->ops->reserve(k, c.dev_used, &p->dev_base, e);
    }
    if (!rc && !(p->host_base = aligned_alloc(KERN_ACT_ALIGN, c.host_used)))
        rc = err_raise(e, E_NOMEM, "no memory for the draft's batch");
    if (!rc) {
        c = (struct model_carve){.host = p->host_base, .dev = p->dev_base};
        layout(p, &c, &caps, scratch, NULL);
        rc = model_batch_init(&p->b, k, e);
    }
    if (rc) {
        proposer_close(p);
        return err_prefix(e, rc, "draft");
    }
    *out = p;
    return 0;
}

void proposer_close(struct proposer *p) {
    if (!p) return;
    if (p->dev_base) p->k->ops->unreserve(p->k, p->dev_base);
    free(p->host_base);
    model_close(p->model);
    free(p);
}

const struct model_config *proposer_config(const struct proposer *p) {
    return model_get_config(p->model);
}

struct kern_draft_probs proposer_probs(const struct proposer *p) {
    return (struct kern_draft_probs){.probs = p->dev_probs,
                                     .stride = (size_t)p->n_columns,
                                     .n = p->n_columns,
                                     .ids = model_head_ids(p->model)};
}

/* ---- A pass ---- */

/* What a run needs everywhere. */
struct run {
    struct proposer *p;
    struct kvpool *pool;
    const int *eog;
    int n_eog;
    struct proposer_turn *turn;
    struct proposer_pass pass;
};

/* Blocks [1, *end) that turn i does not read: behind its window, and whatever was given back
 * before, since a rollback moves the window's edge back but brings no page. */
static void give_back(struct run *r, const struct proposer_turn *t, int *end) {
    int window = r->p->o.window, n_blocks;
    *end = 1;
    if (window <= 0) return;
    if (t->n_kv > window) *end = (t->n_kv - window) / KVPOOL_BLOCK;
    if (*end > 1) kvpool_seq_forget_draft(r->pool, t->seq, 1, *end);
    const int32_t *pages = kvpool_seq_pages(r->pool, t->seq, KVPOOL_DRAFT, &n_blocks);
    if (*end < 1) *end = 1;
    while (*end < n_blocks && pages[*end] < 0) ++*end;
}

/* Rows of turn i: n of its tokens from n_kv on. One list serves all rows: with a window, a later
 * row sees a little more than the window. */
static int add_rows(struct run *r, int i, const int32_t *ids, int n, bool prompt, bool draws,
                    struct err *e) {
    struct proposer *p = r->p;
    struct proposer_turn *t = &r->turn[i];
    int first_row, n_blocks, hole_end;
    give_back(r, t, &hole_end);
    kvpool_seq_extend(r->pool, t->seq, KVPOOL_DRAFT, t->n_kv + n);
    int idx = model_batch_add(&p->b, ids, n, t->n_kv, prompt, &first_row);
    const int32_t *pages = kvpool_seq_pages(r->pool, t->seq, KVPOOL_DRAFT, &n_blocks);
    t->n_kv += n;
    r->pass.n_rows += n;
    r->pass.prompt |= prompt;
    r->pass.kv_tokens += t->n_kv;
    if (draws) p->drawer[model_batch_want(&p->b, first_row + n - 1)] = i;
    int hole_first = hole_end > 1 ? 1 : 0;
    return model_batch_pages(&p->b, p->k, idx, 0, pages, n_blocks, hole_first,
                             hole_first ? hole_end : 0, e);
}

static int probs_row(const struct proposer *p, int turn, int place) {
    return turn * p->o.max_draft + place;
}

static void fill_sample(struct run *r, int row) {
    int i = r->p->drawer[row];
    const struct proposer_turn *t = &r->turn[i];
    struct kern_sample *s = &((struct kern_sample *)r->p->sample.host)[row];
    *s = t->sample;
    s->position = t->n_kv;
    s->purpose = RNG_DRAFT;
    s->first_recent = probs_row(r->p, i, 0);
    s->n_recent = t->n_proposed;
    s->probs_row = t->wants_probs ? probs_row(r->p, i, t->n_proposed) : -1;
    s->n_logprobs = s->want_logprob = s->n_banned = 0;
    if (t->n_kv >= t->min_position) return;
    s->n_banned = r->n_eog;
    for (int j = 0; j < r->n_eog; j++) s->banned[j] = r->eog[j];
}

/* The pass over the batch as it was filled, and a token for every row that draws one. */
static int compute(struct run *r, const struct kern_history *history, struct err *e) {
    struct proposer *p = r->p;
    struct kern *k = p->k;
    struct model_pass pass;
    int n = p->b.n_logits;
    for (int i = 0; i < n; i++) fill_sample(r, i);
    int rc = model_batch_finish(&p->b, k, &pass, e);
    if (!rc) rc = model_array_put(k, &p->sample, n, sizeof(struct kern_sample), e);
    pass.group[0].n_layers = model_get_config(p->model)->n_layers;
    pass.group[0].arena = p->arena;
    pass.group[0].kv_dtype = p->o.kv_dtype;
    pass.logits = p->dev_logits;
    pass.logits_stride = (size_t)p->n_head;
    int64_t start = clock_ns();
    if (!rc) rc = model_forward(p->model, &pass, e);
    if (!rc && n > 0) {
        struct kern_history h = *history;
        h.recent = p->recent.dev;
        rc = k->ops->sample(k, n, p->n_columns, model_head_ids(p->model), p->dev_logits,
                            (size_t)p->n_head, p->sample.dev, &h, p->sample_scratch, p->dev_sampled,
                            p->dev_probs);
        if (rc) err_raise(e, rc, "sampling of %d draft rows failed", n);
    }
    if (!rc) rc = k->ops->sync(k, e);
    r->pass.kernel_ns = clock_ns() - start;
    return !rc && n > 0
               ? k->ops->download(k, p->sampled, p->dev_sampled, (size_t)n * sizeof *p->sampled, e)
               : rc;
}

/* Note the drawn tokens. A token of -1 ends the turn like an end token does. */
static int take_tokens(struct run *r, struct err *e) {
    struct proposer *p = r->p;
    int32_t *recent = p->recent.host;
    for (int row = 0; row < p->b.n_logits; row++) {
        int i = p->drawer[row];
        struct proposer_turn *t = &r->turn[i];
        int32_t token = p->sampled[row].token;
        bool ends = token < 0;
        for (int j = 0; j < r->n_eog && t->stop_at_eog; j++) ends |= token == r->eog[j];
        recent[probs_row(p, i, t->n_proposed)] = token;
        t->token[t->n_proposed++] = token;
        if (ends) t->n_draft = t->n_proposed;
    }
    return model_array_put(p->k, &p->recent, p->o.max_seqs * p->o.max_draft, sizeof *recent, e);
}

/* The first pass: everybody catches up; who has then seen all draws a token. Short ways go first,
 * as generated rows. False in *any where nobody had anything to do. */
static int fill_catch_up(struct run *r, int n_turns, bool *any, struct err *e) {
    for (int prompt = 0; prompt < 2; prompt++) {
        for (int i = 0; i < n_turns; i++) {
            struct proposer_turn *t = &r->turn[i];
            int lag = t->n_tokens - t->n_kv, n = lag < t->n_rows ? lag : t->n_rows;
            /* n_proposed is -1 until the turn was looked at. */
            if (t->n_proposed >= 0 || (n > SHORT_WAY) != prompt) continue;
            t->n_proposed = 0;
            if (n < lag) t->n_draft = 0;
            if (n == 0) continue;
            *any = true;
            int rc = add_rows(r, i, t->ids + t->n_kv, n, prompt, t->n_draft > 0, e);
            if (rc) return rc;
        }
    }
    return 0;
}

static int fill_next(struct run *r, int n_turns, bool *any, struct err *e) {
    for (int i = 0; i < n_turns; i++) {
        struct proposer_turn *t = &r->turn[i];
        if (t->n_proposed == 0 || t->n_proposed >= t->n_draft) continue;
        *any = true;
        int rc = add_rows(r, i, &t->token[t->n_proposed - 1], 1, false, true, e);
        if (rc) return rc;
    }
    return 0;
}

int proposer_run(struct proposer *p, struct kvpool *pool, const struct kern_history *history,
                 const int *eog, int n_eog, struct proposer_turn *turn, int n_turns,
                 void (*observe)(void *arg, const struct proposer_pass *pass), void *arg,
                 struct err *e) {
    struct run r = {.p = p, .pool = pool, .eog = eog, .n_eog = n_eog, .turn = turn};
    ASSERT(n_turns <= p->o.max_seqs);
    for (int i = 0; i < n_turns; i++) {
        ASSERT(turn[i].n_draft <= p->o.max_draft && turn[i].n_kv <= turn[i].n_tokens);
        turn[i].n_proposed = -1;
        turn[i].first_q = turn[i].wants_probs ? probs_row(p, i, 0) : -1;
    }
    for (int place = 0;; place++) {
        bool any = false;
        int64_t start = clock_ns();
        r.pass = (struct proposer_pass){0};
        model_batch_begin(&p->b);
        int rc = place == 0 ? fill_catch_up(&r, n_turns, &any, e) : fill_next(&r, n_turns, &any, e);
        if (rc || !any) return rc;
        rc = compute(&r, history, e);
        if (!rc) rc = take_tokens(&r, e);
        if (rc) return rc;
        r.pass.ns = clock_ns() - start;
        if (observe) observe(arg, &r.pass);
    }
}
