/* The draft model's rounds. Which kernels serve a catch-up row is free here: a draft's bits decide
 * what is proposed, never what is emitted, so that a long way is caught up on the prompt kernels
 * whatever its tokens are. */
#include "draft/proposer.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "draft/depth.h"
#include "model/batch.h"
#include "model/source.h"

enum { SHORT_WAY = DRAFT_LONG_WAY }; /* rows of a catch-up that decode kernels serve */

struct proposer {
    struct proposer_options o;
    struct kern *k;
    struct model *model;
    void *arena;
    struct model_batch b;
    struct model_array drawing;       /* kern_drawing [max_seqs], by place */
    struct model_array sample;        /* kern_sample [max_seqs] */
    struct kern_sampled *dev_sampled; /* [max_seqs] */
    float *dev_logits;                /* [max_seqs][n_head] */
    float *dev_probs;                 /* [max_seqs][max_draft][n_head] */
    void *sample_scratch;
    int32_t *turn_at;      /* [max_seqs] host: turn of each place, a sequence of the batch */
    int32_t *read;         /* [max_blocks] host: what a turn with a window reads */
    int n_head, n_columns; /* of the head; of those, ids that may be drawn */
    void *dev_base, *host_base;
    /* This round. */
    int n_passes, first_mark;
    int n_places[KERN_MAX_DRAFT]; /* of each pass behind the first: leading places that still draw,
                                     rounded up */
    struct proposer_pass numbers[KERN_MAX_DRAFT];
    struct model_pass pass; /* the first */
};

/* ---- Sizes ---- */

static void layout(struct proposer *p, struct model_carve *c, const struct model_caps *caps,
                   size_t scratch, struct proposer_sizes *s) {
    size_t seqs = (size_t)p->o.max_seqs, drafts = seqs * (size_t)p->o.max_draft;
    size_t head = (size_t)p->n_head, start = c->dev_used;
    model_batch_arrays(&p->b, c, caps, 1);
    model_carve_array(c, &p->drawing, seqs, sizeof(struct kern_drawing));
    model_carve_array(c, &p->sample, seqs, sizeof(struct kern_sample));
    model_batch_lists(&p->b, c);
    p->dev_sampled = model_carve_dev(c, seqs * sizeof *p->dev_sampled);
    p->turn_at = model_carve_host(c, seqs * sizeof *p->turn_at);
    p->read = model_carve_host(c, (size_t)caps->max_blocks * sizeof *p->read);
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
    /* The sink, the window, what one round adds, and a partly used block at either end. */
    int most = 1 + (o->window + o->max_rows + o->max_draft) / KVPOOL_BLOCK + 2;
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
    if (!rc) rc = k->ops->host_reserve(k, c.host_used, &p->host_base, e);
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
    if (p->host_base) p->k->ops->host_unreserve(p->k, p->host_base);
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

/* ---- Laying out a round ---- */

int proposer_first(const struct proposer *p, int turn) {
    return turn * p->o.max_draft;
}

/* What prepare needs everywhere. */
struct run {
    struct proposer *p;
    struct kvpool *pool;
    const int *eog;
    int n_eog;
    struct proposer_turn *turn;
};

/* Blocks [1, *end) that turn t does not read: behind its window, and whatever was given back
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

/* A draw that nobody reads. */
static const struct kern_sample no_draw = {
    .top_p = 1, .repetition_penalty = 1, .purpose = RNG_SAMPLE, .history = -1, .probs_row = -1};

/* The draws of a place; t: NULL where nobody sits there. */
static void fill_draw(struct run *r, int place, const struct proposer_turn *t) {
    struct proposer *p = r->p;
    struct kern_sample *s = &((struct kern_sample *)p->sample.host)[place];
    struct kern_drawing *d = &((struct kern_drawing *)p->drawing.host)[place];
    *d = (struct kern_drawing){0};
    *s = no_draw;
    if (!t || t->n_proposed == 0) return;
    int first = proposer_first(p, p->turn_at[place]);
    d->n_draft = t->n_proposed;
    d->first_drawn = first;
    d->first_target = t->first_target;
    d->min_position = t->min_position;
    *s = t->sample;
    s->position = t->n_tokens;
    s->purpose = RNG_DRAFT;
    s->first_recent = first;
    s->n_recent = 0;
    s->probs_row = t->wants_probs ? first : -1;
    s->n_logprobs = s->want_logprob = s->n_banned = 0;
    if (t->n_tokens >= t->min_position) return;
    s->n_banned = r->n_eog;
    for (int j = 0; j < r->n_eog; j++) s->banned[j] = r->eog[j];
}

/* Rows of a turn's first pass. */
static int n_first_rows(const struct proposer_turn *t) {
    int lag = t->n_tokens - t->n_kv;
    return lag < t->n_rows ? lag : t->n_rows;
}

/* Who has what place: short ways first, which go as generated rows; of either kind who draws most,
 * so that later passes are of leading places. Those that draw no more leave a hole only where long
 * ways stand behind them. Returns the number of places. */
static int order(const struct run *r, int n_turns) {
    int n = 0;
    for (int prompt = 0; prompt < 2; prompt++)
        for (int n_draft = r->p->o.max_draft; n_draft >= 0; n_draft--)
            for (int i = 0; i < n_turns; i++) {
                int rows = n_first_rows(&r->turn[i]);
                if (rows > 0 && (rows > SHORT_WAY) == prompt && r->turn[i].n_proposed == n_draft)
                    r->p->turn_at[n++] = i;
            }
    return n;
}

/* All blocks of a place but [1, hole_end). */
static void fill_pages(struct proposer *p, int place, const int32_t *pages, int n_blocks,
                       int hole_end) {
    int n = n_blocks - hole_end + 1;
    p->read[0] = 0;
    for (int i = 1; i < n; i++) p->read[i] = hole_end + i - 1;
    model_batch_pages(&p->b, place, 0, pages, hole_end > 1 ? p->read : NULL, n);
}

/* Rows of the sequence at the next place: its tokens from n_kv on. One list serves them and the
 * passes behind: with a window, a later row sees a little more than the window. */
static void add_rows(struct run *r, struct proposer_turn *t, bool wants_logits) {
    struct proposer *p = r->p;
    int first_row, n_blocks, hole_end, n = n_first_rows(t);
    int more = t->n_proposed > 0 ? t->n_proposed - 1 : 0;
    give_back(r, t, &hole_end);
    kvpool_seq_extend(r->pool, t->seq, KVPOOL_DRAFT, t->n_kv + n + more);
    int place = model_batch_add(&p->b, t->ids + t->n_kv, n, t->n_kv, n > SHORT_WAY, &first_row);
    const int32_t *pages = kvpool_seq_pages(r->pool, t->seq, KVPOOL_DRAFT, &n_blocks);
    fill_pages(p, place, pages, n_blocks, hole_end);
    if (wants_logits) {
        fill_draw(r, model_batch_want(&p->b, first_row + n - 1), t);
        ((struct kern_drawing *)p->drawing.host)[place].hole = hole_end - 1;
    }
    p->numbers[0].n_rows += n;
    if (n > SHORT_WAY) p->numbers[0].n_prompt += n;
    t->n_kv += n;
    p->numbers[0].kv_tokens += t->n_kv;
    for (int i = 1; i <= more; i++) {
        p->n_places[i] = place + 1;
        p->numbers[i].n_rows++;
        p->numbers[i].kv_tokens += ++t->n_kv;
    }
}

static int least(int a, int b) {
    return a < b ? a : b;
}

/* Idle rows where they make shapes few. */
static void pad(struct run *r) {
    struct proposer *p = r->p;
    struct model_batch *b = &p->b;
    int rows = b->n_gen + b->n_prompt, seqs = b->n_seqs, n = b->n_logits;
    if (b->n_prompt == 0) {
        rows = least(model_batch_round(b, rows), p->o.max_rows);
        seqs = least(model_batch_round(b, seqs), p->o.max_seqs);
    }
    model_batch_pad(b, rows, seqs, least(model_batch_round(b, n), p->o.max_seqs));
    for (; n < b->n_logits; n++) fill_draw(r, n, NULL);
    for (int i = 1; i < p->n_passes; i++)
        p->n_places[i] = least(model_batch_round(b, p->n_places[i]), b->n_logits);
}

static void begin(struct run *r, int n_turns) {
    struct proposer *p = r->p;
    ASSERT(n_turns <= p->o.max_seqs);
    model_batch_begin(&p->b);
    p->n_passes = 0;
    memset(p->numbers, 0, sizeof p->numbers);
    memset(p->n_places, 0, sizeof p->n_places);
    for (int i = 0; i < n_turns; i++) {
        struct proposer_turn *t = &r->turn[i];
        ASSERT(t->n_draft <= p->o.max_draft && t->n_kv < t->n_tokens);
        t->n_proposed = n_first_rows(t) < t->n_tokens - t->n_kv ? 0 : t->n_draft;
    }
}

int proposer_prepare(struct proposer *p, struct kvpool *pool, const int *eog, int n_eog,
                     struct proposer_turn *turn, int n_turns, struct err *e) {
    struct run r = {.p = p, .pool = pool, .eog = eog, .n_eog = n_eog, .turn = turn};
    int n_draws = 0;
    begin(&r, n_turns);
    int n = order(&r, n_turns);
    if (n == 0) return 0;
    for (int i = 0; i < n; i++) {
        int n_draft = turn[p->turn_at[i]].n_proposed;
        if (n_draft > 0) n_draws = i + 1;
        if (n_draft > p->n_passes) p->n_passes = n_draft;
    }
    if (p->n_passes == 0) p->n_passes = 1;
    for (int i = 0; i < n; i++) add_rows(&r, &turn[p->turn_at[i]], i < n_draws);
    pad(&r);
    int rc = model_batch_finish(&p->b, p->k, &p->sample, p->b.n_logits, sizeof(struct kern_sample),
                                NULL, &p->pass, e);
    p->pass.group[0].n_layers = model_get_config(p->model)->n_layers;
    p->pass.group[0].arena = p->arena;
    p->pass.group[0].kv_dtype = p->o.kv_dtype;
    p->pass.logits = p->dev_logits;
    p->pass.logits_stride = (size_t)p->n_head;
    return rc;
}

/* ---- Passes ---- */

/* The pass, a token for every row that draws one, and the next pass's input. */
static int compute(struct proposer *p, const struct model_pass *pass,
                   const struct kern_history *history, int32_t *drawn, int32_t *target,
                   struct err *e) {
    struct kern *k = p->k;
    struct model_batch *b = &p->b;
    const struct kern_next next = {.token = b->token.dev,
                                   .position = b->position.dev,
                                   .row_seq = b->row_seq.dev,
                                   .slot_page = b->slot_page[0].dev,
                                   .seq_row = b->seq_row.dev,
                                   .seq_n_rows = b->seq_n_rows.dev,
                                   .logit_row = b->logit_row.dev,
                                   .params = p->sample.dev,
                                   .list = b->page[0].dev,
                                   .list_capacity = b->caps.max_blocks};
    struct kern_history h = *history;
    int n = pass->n_logits;
    h.recent = drawn;
    int rc = model_forward(p->model, pass, e);
    if (rc || n == 0) return rc;
    rc = k->ops->sample(k, n, p->n_columns, model_head_ids(p->model), p->dev_logits,
                        (size_t)p->n_head, p->sample.dev, &h, p->sample_scratch, p->dev_sampled,
                        p->dev_probs);
    if (rc) return err_raise(e, rc, "sampling of %d draft rows failed", n);
    rc = k->ops->advance(k, n, p->drawing.dev, p->dev_sampled, &next, drawn, target);
    return rc ? err_raise(e, rc, "advancing %d draft rows failed", n) : 0;
}

int proposer_run(struct proposer *p, const struct kern_history *history, int32_t *drawn,
                 int32_t *target, int *mark, struct err *e) {
    const struct kern_ops *ops = p->k->ops;
    p->first_mark = *mark;
    for (int i = 0; i < p->n_passes; i++) {
        struct model_pass pass = p->pass;
        uint64_t key[KERN_RECORD_KEY];
        bool replayed = false, records = pass.batch.rows.n_prompt == 0 || i > 0;
        int rc = 0;
        if (i > 0) {
            pass.batch.rows = (struct kern_rows){.n_gen = p->n_places[i]};
            pass.batch.n_seqs = pass.n_logits = p->n_places[i];
        }
        if (records) {
            model_batch_key(&p->b, &pass, 0, key);
            rc = ops->record_begin(p->k, key, &replayed, e);
        }
        if (!rc && !replayed) {
            rc = compute(p, &pass, history, drawn, target, e);
            if (!rc && records) rc = ops->record_end(p->k, e);
        }
        if (!rc && (rc = ops->mark(p->k, ++*mark)) != 0) err_raise(e, rc, "no mark of time");
        if (rc) return rc;
    }
    return 0;
}

int proposer_done(struct proposer *p, void (*observe)(void *arg, const struct proposer_pass *pass),
                  void *arg) {
    for (int i = 0; i < p->n_passes; i++) {
        struct proposer_pass *n = &p->numbers[i];
        int rc = p->k->ops->elapsed(p->k, p->first_mark + i, p->first_mark + i + 1, &n->ns);
        if (rc) return rc;
        observe(arg, n);
    }
    return 0;
}
