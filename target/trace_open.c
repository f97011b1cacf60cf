/* Opening a trace: what its options may be, and where everything lies. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "target/target.h"
#include "target/trace_private.h"

struct model_caps target_trace_caps(const struct target_trace_options *o) {
    return (struct model_caps){.max_rows = o->max_rows ? o->max_rows : TARGET_TRACE_ROWS,
                               .max_seqs = o->max_answers > 1 ? o->max_answers : 1,
                               .max_blocks = target_n_blocks(o->max_tokens),
                               .max_logits = TARGET_TRACE_LOOK};
}

static int check(const struct target_trace_options *o, const struct model *m, struct err *e) {
    const struct model_config *c = model_get_config(m);
    if (o->max_tokens < 1 || o->max_tokens > c->context)
        return err_raise(e, E_RANGE, "a trace of %d tokens: the model's context is %d",
                         o->max_tokens, c->context);
    if (o->max_rows && (o->max_rows < TARGET_TRACE_LOOK || o->max_rows > KERN_MAX_ROWS))
        return err_raise(e, E_RANGE, "%d rows a pass: %d to %d are allowed", o->max_rows,
                         TARGET_TRACE_LOOK, KERN_MAX_ROWS);
    if (o->select_layer < 0 || o->select_layer >= c->n_layers)
        return err_raise(e, E_RANGE, "select layer %d: the model has layers 0 to %d",
                         o->select_layer, c->n_layers - 1);
    if (o->n_taps < 0 || o->n_taps > MODEL_MAX_TAPS)
        return err_raise(e, E_RANGE, "states of %d layers: 0 to %d are allowed", o->n_taps,
                         MODEL_MAX_TAPS);
    if (o->max_answers < 0 || o->max_answers > TARGET_TRACE_LOOK || o->max_answer_tokens < 0 ||
        o->max_answer_tokens > o->max_tokens)
        return err_raise(e, E_RANGE,
                         "%d answers of %d tokens at once: 0 to %d of 0 to %d are allowed",
                         o->max_answers, o->max_answer_tokens, TARGET_TRACE_LOOK, o->max_tokens);
    for (int i = 0; i < o->n_taps; i++)
        if (o->tap_layer[i] < 0 || o->tap_layer[i] >= c->n_layers)
            return err_raise(e, E_RANGE, "states of layer %d: the model has layers 0 to %d",
                             o->tap_layer[i], c->n_layers - 1);
    if (model_head_ids(m))
        return err_raise(e, E_UNSUPPORTED, "%s is a draft: its head has %d of %d tokens", c->name,
                         c->n_head, c->vocab);
    return 0;
}

static int check_apart(const struct target_trace_options *o, const struct model_config *c,
                       const struct kern *k, struct err *e) {
    struct kern_device_info info;
    int most = KERN_MAX_LISTS / c->n_kv_heads;
    if (!o->apart) return 0;
    ASSERT(o->heads);
    k->ops->info(k, &info);
    if (!info.quarters)
        return err_raise(e, E_UNSUPPORTED, "quarters of blocks: %s reads whole blocks alone",
                         info.name);
    if (o->max_answers > most)
        return err_raise(e, E_RANGE,
                         "%d answers at once with lists of %d KV heads each: %d are allowed",
                         o->max_answers, c->n_kv_heads, most);
    return 0;
}

static void layout_groups(struct target_trace *t) {
    const struct model_config *c = t->c;
    int s = t->o.select_layer;
    t->n_groups = s ? 2 : 1;
    for (int g = 0; g < t->n_groups; g++) {
        bool deep = g == t->n_groups - 1;
        t->group_first[g] = deep ? s : 0;
        t->group_layers[g] = deep ? c->n_layers - s : s;
        t->page_bytes[g] =
            align_up(model_kv_offset(c, t->group_layers[g], false, t->o.kv_dtype), TRACE_PAGE_UNIT);
    }
}

/* Every pointer into the two blocks, or their sizes. All counts are bounded: tokens by
 * MODEL_MAX_CONTEXT, layers, heads and width by the model's config; 2^24 tokens of 256 layers of
 * 65,536 floats are 2^50. */
static void layout(struct target_trace *t, struct model_carve *c) {
    struct model_caps caps = target_trace_caps(&t->o);
    size_t h = (size_t)t->c->hidden, blocks = (size_t)t->n_blocks, taps = (size_t)t->o.n_taps;
    size_t vocab = (size_t)trace_vocab_of(t), f = sizeof(float), look = TARGET_TRACE_LOOK;
    model_batch_arrays(&t->batch, c, &caps, t->n_groups);
    model_carve_array(c, &t->note, 1, sizeof(struct kern_note));
    model_carve_array(c, &t->params, look, sizeof(struct kern_sample));
    model_carve_array(c, &t->recent, look, sizeof(int32_t));
    model_carve_array(c, &t->mark, (size_t)caps.max_rows, sizeof(int32_t));
    model_batch_lists(&t->batch, c);
    model_batch_own(&t->batch, c, t->n_groups - 1, t->o.apart ? trace_n_deep(t) : 0,
                    t->c->n_kv_heads, t->o.apart);
    model_carve_array(c, &t->sampled, look, sizeof(struct kern_sampled));
    model_carve_array(c, &t->seen, trace_mass_floats(t), f);
    model_carve_array(c, &t->seen_quarters, trace_quarter_floats(t), f);
    t->mass = t->seen.dev;
    t->quarter_mass = t->seen_quarters.dev;
    size_t zeros = trace_quarter_floats(t) > trace_mass_floats(t) ? trace_quarter_floats(t)
                                                                  : trace_mass_floats(t);
    t->no_mass = model_carve_dev(c, zeros * f);
    for (int g = 0; g < t->n_groups; g++)
        t->pages[g] = model_carve_host(c, blocks * sizeof *t->pages[g]);
    for (int g = 0; g < t->n_groups; g++)
        t->answer_pages[g] = model_carve_host(c, blocks * sizeof *t->answer_pages[g]);
    t->read = model_carve_host(c, blocks * sizeof *t->read);
    t->quarters = model_carve_host(c, blocks * sizeof *t->quarters);
    t->identity = model_carve_dev(c, blocks * sizeof *t->identity);
    t->states = model_carve_dev(c, taps * (size_t)t->o.max_tokens * h * f);
    const struct kern_plane plane = trace_plane_of(t, 0);
    t->plane_stride = align_up(kern_plane_bytes(&plane), KERN_ACT_ALIGN);
    t->planes = model_carve_dev(c, taps * blocks * t->plane_stride);
    t->rings = model_carve_dev(c, taps * KERN_STATE_QUERIES * h * f);
    t->logits = model_carve_dev(c, (1 + look) * vocab * f);
    t->prompt_logits = model_carve_dev(c, vocab * f);
    t->no_history = model_carve_dev(c, vocab * sizeof *t->no_history);
    t->sample_scratch = model_carve_dev(
        c, t->k->ops->sample_scratch_bytes(t->k, TARGET_TRACE_LOOK, trace_vocab_of(t)));
}

static int fill_pages(struct target_trace *t, struct err *e) {
    for (int g = 0; g < t->n_groups; g++)
        for (int b = 0; b < t->n_blocks; b++)
            t->pages[g][b] = (int32_t)((size_t)b * (t->page_bytes[g] / TRACE_PAGE_UNIT));
    for (int b = 0; b < t->n_blocks; b++) t->read[b] = b;
    int rc =
        t->k->ops->upload(t->k, t->identity, t->read, (size_t)t->n_blocks * sizeof *t->identity, e);
    return rc ? rc : model_batch_init(&t->batch, t->k, e);
}

static int reserve(struct target_trace *t, struct err *e) {
    const struct kern_ops *ops = t->k->ops;
    struct model_carve c = {0};
    size_t kv = 0, at[TRACE_GROUPS];
    size_t blocks = (size_t)t->n_blocks + (size_t)t->o.max_answers * (size_t)t->answer_tail;
    for (int g = 0; g < t->n_groups; g++) {
        at[g] = kv;
        kv += blocks * t->page_bytes[g];
        if (blocks * (t->page_bytes[g] / TRACE_PAGE_UNIT) > INT32_MAX)
            return err_raise(e, E_RANGE, "a trace of %d tokens needs more pages than ids go",
                             t->o.max_tokens);
    }
    layout(t, &c);
    t->bytes = kv + c.dev_used;
    int rc = ops->reserve(t->k, kv, &t->arena, e);
    if (!rc) rc = ops->reserve(t->k, c.dev_used, &t->block, e);
    if (!rc) rc = ops->host_reserve(t->k, c.host_used, &t->host_block, e);
    if (rc) return err_prefix(e, rc, "a trace of %d tokens (%zu bytes)", t->o.max_tokens, t->bytes);
    c = (struct model_carve){.host = t->host_block, .dev = t->block};
    layout(t, &c);
    for (int g = 0; g < t->n_groups; g++) t->group_arena[g] = (uint8_t *)t->arena + at[g];
    return fill_pages(t, e);
}

int target_trace_open(struct target_trace **out, const struct target_trace_options *o,
                      struct model *m, struct kern *k, struct err *e) {
    int rc = check(o, m, e);
    if (!rc) rc = check_apart(o, model_get_config(m), k, e);
    if (rc) return rc;
    struct target_trace *t = calloc(1, sizeof *t);
    if (!t) return err_raise(e, E_NOMEM, "no memory for a trace");
    t->o = *o;
    t->m = m;
    t->k = k;
    t->c = model_get_config(m);
    t->n_blocks = target_n_blocks(o->max_tokens);
    /* An answer begins anywhere in a block. */
    t->answer_tail = target_n_blocks(o->max_answer_tokens + TARGET_BLOCK - 1);
    t->prompt_end = -1;
    layout_groups(t);
    rc = reserve(t, e);
    if (rc) target_trace_close(t);
    else *out = t;
    return rc;
}

void target_trace_close(struct target_trace *t) {
    if (!t) return;
    const struct kern_ops *ops = t->k->ops;
    ops->sync(t->k, NULL);
    ops->unreserve(t->k, t->arena);
    ops->unreserve(t->k, t->block);
    ops->unreserve(t->k, t->score_scratch);
    ops->host_unreserve(t->k, t->host_block);
    free(t);
}

size_t target_trace_bytes(const struct target_trace *t) {
    return t->bytes + t->score_scratch_bytes;
}
