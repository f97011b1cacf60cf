/* Several answers to one prompt at once: sequences that share the prompt's full pages and have
 * their own from the block on in which it ends. A row's bits do not depend on its neighbours, so
 * each gets what it would get alone. States are not noted: nobody can go on from here. */
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "target/target.h"
#include "target/trace_private.h"

struct answers {
    int n;                                 /* answers */
    const struct target_kept *const *kept; /* [n] */
    int first_block;                       /* that answers write */
    bool is_apart;                         /* one of them has lists by layer and head */
    uint64_t first_id;                     /* of the first one's lists, then counting */
    int n_tokens[TARGET_TRACE_LOOK];       /* of each, the prompt among them */
    bool is_done[TARGET_TRACE_LOOK];
    int live[TARGET_TRACE_LOOK], n_live; /* in the order of the last pass's logits */
};

/* Page id of an answer's block. */
static int32_t page_of(const struct target_trace *t, int group, int answer, int block_behind) {
    size_t at = (size_t)t->n_blocks + (size_t)answer * (size_t)t->answer_tail;
    return (int32_t)((at + (size_t)block_behind) * (t->page_bytes[group] / TRACE_PAGE_UNIT));
}

/* Each answer's own copy of the block in which the prompt ends. */
static int copy_last(struct target_trace *t, const struct answers *a, struct err *e) {
    if (t->n_tokens % TARGET_BLOCK == 0) return 0;
    for (int g = 0; g < t->n_groups; g++)
        for (int i = 0; i < a->n; i++) {
            uint8_t *arena = t->group_arena[g];
            size_t from = (size_t)t->pages[g][a->first_block] * TRACE_PAGE_UNIT;
            size_t to = (size_t)page_of(t, g, i, 0) * TRACE_PAGE_UNIT;
            int rc = t->k->ops->copy_page(t->k, arena + to, arena + from, t->page_bytes[g]);
            if (rc) return err_raise(e, rc, "copying a page of an answer failed");
        }
    return 0;
}

/* Add answer i's next rows to the batch. */
static void add(struct target_trace *t, const struct answers *a, int i, const int32_t *ids, int n) {
    int row, n_all = target_n_blocks(a->n_tokens[i] + n);
    int idx = model_batch_add(&t->batch, ids, n, a->n_tokens[i], false, &row);
    model_batch_want(&t->batch, row + n - 1);
    for (int g = 0; g < t->n_groups; g++) {
        int32_t *pages = t->answer_pages[g];
        memcpy(pages, t->pages[g], sizeof *pages * (size_t)a->first_block);
        for (int b = a->first_block; b < n_all; b++)
            pages[b] = page_of(t, g, i, b - a->first_block);
        if (g < t->n_groups - 1) model_batch_pages(&t->batch, idx, g, pages, NULL, n_all);
        else target__trace_deep_pages(t, idx, pages, a->kept[i], n_all, a->first_id + (uint64_t)i);
    }
}

/* Run what the batch holds; logits of the live answers stand behind the trace's own row. */
static int run(struct target_trace *t, bool record, struct err *e) {
    struct model_pass p;
    int rc =
        model_batch_finish(&t->batch, t->k, &t->params, 0, sizeof(struct kern_sample), NULL, &p, e);
    if (rc) return rc;
    for (int g = 0; g < t->n_groups; g++) {
        p.group[g].first_layer = t->group_first[g];
        p.group[g].n_layers = t->group_layers[g];
        p.group[g].arena = t->group_arena[g];
        p.group[g].kv_dtype = t->o.kv_dtype;
    }
    p.logits = t->logits + (size_t)trace_vocab_of(t);
    p.logits_stride = (size_t)trace_vocab_of(t);
    t->is_enqueued = true;
    if (!record) return model_forward(t->m, &p, e);
    bool replayed = false;
    uint64_t key[KERN_RECORD_KEY];
    model_batch_key(&t->batch, &p, t->batch.own.used, key);
    rc = t->k->ops->record_begin(t->k, key, &replayed, e);
    if (rc || replayed) return rc;
    rc = model_forward(t->m, &p, e);
    return rc ? rc : t->k->ops->record_end(t->k, e);
}

/* One pass of n rows for every live answer: ids[n], the same for all, or (n 1) answer i's ids[i].
 */
static int append(struct target_trace *t, struct answers *a, const int32_t *ids, int n,
                  bool same_for_all, struct err *e) {
    int rc = target__trace_settle(t, e), n_live = 0;
    model_batch_begin(&t->batch);
    if (a->is_apart) model_batch_use_own(&t->batch);
    for (int i = 0; !rc && i < a->n; i++) {
        if (a->is_done[i]) continue;
        add(t, a, i, same_for_all ? ids : &ids[i], n);
        a->n_tokens[i] += n;
        a->live[n_live++] = i;
    }
    a->n_live = n_live;
    if (rc || n_live == 0) return rc;
    /* One shape, one recording, however many answers are still going on. */
    bool record = n == 1 && t->batch.records;
    if (record) model_batch_pad(&t->batch, a->n, a->n, a->n);
    return run(t, record, e);
}

/* The greedy token of n rows of logits from `first` on, into token[n]. */
static int draw(struct target_trace *t, int first, int n, int32_t *token, struct err *e) {
    const struct kern_sampled *drawn = t->sampled.host;
    struct kern_sample p[TARGET_TRACE_LOOK];
    int rc = target__trace_settle(t, e);
    for (int i = 0; i < n; i++)
        p[i] = (struct kern_sample){.top_p = 1,
                                    .repetition_penalty = 1,
                                    .purpose = RNG_SAMPLE,
                                    .history = -1,
                                    .probs_row = -1};
    if (!rc) rc = t->k->ops->upload(t->k, t->params.dev, p, sizeof p[0] * (size_t)n, e);
    if (!rc)
        rc = t->k->ops->sample(t->k, n, trace_vocab_of(t), NULL,
                               t->logits + (size_t)first * (size_t)trace_vocab_of(t),
                               (size_t)trace_vocab_of(t), t->params.dev, NULL, t->sample_scratch,
                               t->sampled.dev, NULL);
    if (!rc)
        rc = t->k->ops->download(t->k, t->sampled.host, t->sampled.dev, sizeof *drawn * (size_t)n,
                                 e);
    if (rc) return err_prefix(e, rc, "drawing behind token %d", t->n_tokens);
    for (int i = 0; i < n; i++) {
        if (drawn[i].token < 0)
            return err_raise(e, E_NUMERIC, "logits hold NaN behind token %d", t->n_tokens);
        token[i] = drawn[i].token;
    }
    return 0;
}

static bool is_stop(int32_t token, const int32_t *stop, int n_stop) {
    for (int i = 0; i < n_stop; i++)
        if (token == stop[i]) return true;
    return false;
}

/* Draw a token for every live answer, or, where nothing of theirs was computed yet, one for all. */
static int draw_all(struct target_trace *t, struct answers *a, bool first, int32_t *next,
                    struct err *e) {
    int32_t token[TARGET_TRACE_LOOK];
    int rc = draw(t, first ? 0 : 1, first ? 1 : a->n_live, token, e);
    for (int i = 0; !rc && i < (first ? a->n : a->n_live); i++)
        next[first ? i : a->live[i]] = token[first ? 0 : i];
    return rc;
}

static int check(const struct target_trace *t, int n_answers, int n_lead, int n, struct err *e) {
    ASSERT(n_answers >= 1 && n_answers <= t->o.max_answers && n_lead >= 0 && n >= 1);
    if (n_lead > t->o.max_answer_tokens - n)
        return err_raise(e, E_TOO_LONG, "answers of %d + %d tokens: room is for %d", n_lead, n,
                         t->o.max_answer_tokens);
    if (n_lead + n > t->o.max_tokens - t->n_tokens)
        return err_raise(e, E_TOO_LONG, "%d more tokens behind %d: the trace has room for %d",
                         n_lead + n, t->n_tokens, t->o.max_tokens);
    if (n_lead == 0 && !t->has_last)
        return err_raise(e, E_INVALID, "nothing tells what follows token %d: append one first",
                         t->n_tokens);
    return 0;
}

int target_trace_answers(struct target_trace *t, int n_answers,
                         const struct target_kept *const *kept, const int32_t *lead, int n_lead,
                         int n, const int32_t *stop, int n_stop, int32_t *out, int *n_out,
                         struct err *e) {
    struct answers a = {.n = n_answers,
                        .kept = kept,
                        .first_block = t->n_tokens / TARGET_BLOCK,
                        .first_id = t->own_id + 1};
    int32_t next[TARGET_TRACE_LOOK] = {0};
    int rc = check(t, n_answers, n_lead, n, e);
    int most = target_trace_caps(&t->o).max_rows / n_answers; /* rows of each in a pass, >= 1 */
    if (rc) return rc;
    if (most > TARGET_TRACE_LOOK) most = TARGET_TRACE_LOOK;
    for (int i = 0; i < n_answers; i++) {
        a.n_tokens[i] = t->n_tokens;
        a.is_apart |= target__trace_is_apart(kept[i]);
        n_out[i] = 0;
    }
    t->own_id += (uint64_t)n_answers;
    rc = copy_last(t, &a, e);
    for (int at = 0; !rc && at < n_lead; at += most)
        rc = append(t, &a, lead + at, n_lead - at < most ? n_lead - at : most, true, e);
    for (int step = 0; !rc && step < n; step++) {
        if (step > 0) rc = append(t, &a, next, 1, false, e);
        if (rc || (step > 0 && a.n_live == 0)) break;
        rc = draw_all(t, &a, step == 0 && n_lead == 0, next, e);
        for (int i = 0; !rc && i < n_answers; i++) {
            if (a.is_done[i]) continue;
            a.is_done[i] = is_stop(next[i], stop, n_stop);
            if (!a.is_done[i]) out[(size_t)i * (size_t)n + (size_t)n_out[i]++] = next[i];
        }
    }
    return rc ? rc : target__trace_settle(t, e);
}
