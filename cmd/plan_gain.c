#include "cmd/plan_gain.h"

#include <string.h>

#include "base/err.h"
#include "cmd/text.h"
#include "model/source.h"
#include "target/scorer.h"

enum { USUAL_BLOCKS = 32 };

/* ---- The model's numbers ---- */

static bool is_matrix(enum tensor_role r) {
    return r == TENSOR_TOKEN_EMBD || r == TENSOR_OUTPUT || r == TENSOR_ATTN_Q ||
           r == TENSOR_ATTN_K || r == TENSOR_ATTN_V || r == TENSOR_ATTN_O || r == TENSOR_FFN_GATE ||
           r == TENSOR_FFN_UP || r == TENSOR_FFN_DOWN;
}

/* Products of a row, and the share of the weights that they read: of an embedding that is not the
 * head, a row alone is looked up. */
static void read_weights(struct plan_gain *g, const struct model_source *s, double packed) {
    bool tied = model_source_config(s)->tied;
    double read = 0, all = 0;
    for (size_t i = 0; i < model_source_n_tensors(s); i++) {
        const struct tensor_view *t = model_source_tensor_at(s, i);
        bool lookup = t->role == TENSOR_TOKEN_EMBD && !tied;
        double values = (double)t->rows * t->cols;
        double bytes =
            values / kern_dtype_block(t->dtype) * (double)kern_dtype_block_bytes(t->dtype);
        all += bytes;
        if (lookup) continue;
        read += bytes;
        if (is_matrix(t->role)) g->in.weight_macs += values;
    }
    g->in.weight_bytes = all > 0 ? packed * (read / all) : packed;
}

/* The type of most of a pass's bytes. */
static enum kern_dtype main_type(const struct model_source *s) {
    struct tensor_view t;
    struct err none;
    if (model_source_find(s, TENSOR_FFN_UP, 0, &t, &none)) return KERN_F16;
    return t.dtype;
}

static double weight_line(const struct plan *p) {
    for (int i = 0; i < p->n_lines; i++)
        if (!strcmp(p->lines[i].name, "target weights")) return (double)p->lines[i].bytes;
    return 0;
}

/* ---- Settings ---- */

/* As a request that says nothing would be read, by the scorer's own curve where there is one. */
static int find_settings(struct plan_gain *g, const struct engine_options *o, struct err *e) {
    struct target_settings none, s = o->sparse;
    struct target_scorer_defaults own = {0};
    target_settings_unset(&none);
    if (o->scorer_path) {
        struct target_scorer_file *f;
        int rc = target_scorer_read(&f, o->scorer_path, e);
        if (rc) return rc;
        own = (struct target_scorer_defaults){.smoothing = f->smoothing, .curve = f->curve};
        target_scorer_free(f);
    }
    g->asked = s.selector != TARGET_UNSET && s.selector != TARGET_OFF;
    if (!g->asked) s.selector = TARGET_OBSERVED;
    g->settings = target_settings_resolve(&none, &s, o->scorer_path ? &own : NULL);
    return 0;
}

/* Blocks of n tokens that deep layers go on reading, reserve included. */
static int n_read_blocks(const struct target_settings *s, int n_tokens) {
    int n = target_n_kept(s, n_tokens) + target_n_reserve(s, n_tokens);
    int all = target_n_blocks(n_tokens);
    return n < all ? n : all;
}

static int kept_tokens(int n_blocks, int n_tokens) {
    long long n = (long long)n_blocks * TARGET_BLOCK;
    return n < n_tokens ? (int)n : n_tokens;
}

/* ---- All of it ---- */

static int measure(struct plan_gain *g, const struct engine_options *o,
                   const struct model_source *s, const struct plan_gain_options *how,
                   struct err *e) {
    struct kern *k;
    double bandwidth, rate;
    int rc = engine_open_device(&k, o, e);
    if (rc) return rc;
    rc = plan_measure(k, main_type(s), &bandwidth, &rate, e);
    k->ops->close(k);
    if (rc) return err_prefix(e, rc, "--measure");
    g->measured = how->bandwidth == 0 || how->rate == 0;
    if (how->bandwidth == 0) g->in.bandwidth = bandwidth;
    if (how->rate == 0) g->in.rate = rate;
    return 0;
}

static int open_source(struct model_source **s, const struct engine_options *o, struct err *e) {
    int type = 0;
    if (!o->dummy_weights) return model_source_plan_only(s, o->model_path, e);
    while (o->dummy_type && type < KERN_N_DTYPES &&
           strcasecmp(o->dummy_type, kern_dtype_name((enum kern_dtype)type)) != 0)
        type++;
    return model_source_open_dummy(s, o->model_path,
                                   o->dummy_type ? (enum kern_dtype)type : KERN_N_DTYPES, e);
}

int plan_gain(struct plan_gain *g, const struct engine_options *o, const struct plan *p,
              const struct plan_gain_options *how, struct err *e) {
    struct model_source *s = NULL;
    memset(g, 0, sizeof *g);
    int rc = find_settings(g, o, e);
    if (!rc) rc = open_source(&s, o, e);
    if (rc) return rc;
    const struct model_config *c = model_source_config(s);
    const struct kvpool_page_shape *shallow = &p->pool.shape[KVPOOL_SHALLOW];
    const struct kvpool_page_shape *deep = &p->pool.shape[KVPOOL_DEEP];
    const struct kvpool_page_shape *any = deep->n_layers ? deep : shallow;
    g->n_blocks = target_n_blocks(p->context);
    g->n_kept = n_read_blocks(&g->settings, p->context);
    g->in = (struct target_gain_input){
        .n_layers = c->n_layers,
        .n_shallow = shallow->n_layers,
        .n_heads = c->n_heads,
        .head_dim = c->head_dim,
        .kv_layer_bytes = 2 * (size_t)any->n_kv_heads *
                          ((size_t)any->head_dim * (size_t)any->elem_bytes +
                           (size_t)any->scale_bytes / KVPOOL_BLOCK),
        .n_tokens = p->context,
        .n_kept = kept_tokens(g->n_kept, p->context),
        .batch = how->batch,
        .bandwidth = how->bandwidth,
        .rate = how->rate,
    };
    read_weights(g, s, weight_line(p));
    if (how->measure) rc = measure(g, o, s, how, e);
    model_source_close(s);
    if (!rc) rc = target_gain(&g->out, &g->in, e);
    if (rc || g->n_kept < g->n_blocks || g->n_blocks <= USUAL_BLOCKS || !deep->n_layers) return rc;
    struct target_gain_input few = g->in;
    g->floor_kept = USUAL_BLOCKS;
    few.n_kept = kept_tokens(USUAL_BLOCKS, p->context);
    return target_gain(&g->floor, &few, e);
}

/* ---- Words ---- */

static void append_speed(const struct plan_gain *g, const struct target_gain *t,
                         struct strbuf *out) {
    if (g->in.bandwidth > 0)
        strbuf_printf(out, "a pass of %d row%s: %.3g ms dense, %.3g ms sparse, %.2fx", g->in.batch,
                      g->in.batch == 1 ? "" : "s", t->dense_seconds * 1e3, t->sparse_seconds * 1e3,
                      t->gain);
    else
        strbuf_printf(out, "a pass of %d row%s reads %.2fx less, weights included", g->in.batch,
                      g->in.batch == 1 ? "" : "s", t->gain);
}

static void append_questions(const struct plan_gain *g, struct strbuf *out) {
    const struct target_gain *t = &g->out;
    strbuf_printf(out, "  context long enough?  %-8s%d tokens; the source says %d and more\n",
                  target_answer_name(t->is_long), g->in.n_tokens, TARGET_LONG_CONTEXT);
    strbuf_printf(out, "  memory-bound?         %-8s%.1f products a byte of the dense pass",
                  target_answer_name(t->is_memory_bound), t->macs_per_byte);
    if (t->machine_macs_per_byte > 0)
        strbuf_printf(out, "; the machine does %.1f (%s/s, %.3g products/s%s)\n",
                      t->machine_macs_per_byte, cmd_bytes(g->in.bandwidth), g->in.rate,
                      g->measured ? ", measured" : "");
    else
        strbuf_append_str(out, "; yes where the machine does more: --measure, or --bandwidth and "
                               "--product-rate\n");
    strbuf_printf(out, "  KV the bottleneck?    %-8s%s of K and V beside %s of weights: %.0f %%",
                  target_answer_name(t->is_kv_bound), cmd_bytes(t->kv_bytes),
                  cmd_bytes(t->weight_bytes), 100 * t->kv_share);
    strbuf_printf(out, "; half at %.0f tokens%s\n", t->even_tokens,
                  g->in.batch > 1 ? " each" : " (fewer with more --clients)");
}

static const char *verdict(const struct plan_gain *g) {
    if (g->out.n_no >= 2) return "two no's: batch and fuse first; sparse reading pays after that";
    if (g->n_kept >= g->n_blocks) return "nothing is left out at this length by these settings";
    if (g->out.n_no == 1) return "one no: it may pay; measure (tandem bench --grid)";
    return g->out.is_memory_bound == TARGET_UNKNOWN ? "it pays where the machine is memory-bound"
                                                    : "it pays";
}

void plan_gain_text(const struct plan_gain *g, struct strbuf *out) {
    strbuf_printf(out, "\nsparse reading at %d tokens, %d at once (%s%s)\n", g->in.n_tokens,
                  g->in.batch, target_selector_name(g->settings.selector),
                  g->asked ? "" : ", were it on: --sparse");
    if (g->in.n_shallow == g->in.n_layers)
        strbuf_printf(out, "  all %d layers are shallow (--select-layer): ", g->in.n_layers);
    else
        strbuf_printf(out, "  %d of %d blocks stay for layers %d..%d: ", g->n_kept, g->n_blocks,
                      g->in.n_shallow, g->in.n_layers - 1);
    strbuf_printf(out, "%.1f %% of K and V are read; ", 100 * g->out.share);
    append_speed(g, &g->out, out);
    strbuf_append_char(out, '\n');
    if (g->floor_kept) {
        strbuf_printf(out, "  with --keep-blocks %d: %.1f %%; ", g->floor_kept,
                      100 * g->floor.share);
        append_speed(g, &g->floor, out);
        strbuf_append_char(out, '\n');
    }
    append_questions(g, out);
    strbuf_printf(out, "  %s\n", verdict(g));
}

/* null: not known */
static void json_ms(const char *key, double seconds, struct strbuf *out) {
    if (seconds > 0) strbuf_printf(out, ",\"%s\":%.6f", key, seconds * 1e3);
    else strbuf_printf(out, ",\"%s\":null", key);
}

static void json_gain(const struct target_gain *t, int n_kept, struct strbuf *out) {
    strbuf_printf(out,
                  "\"kept_blocks\":%d,\"kv_share_read\":%.6f,\"kv_bytes_dense\":%.0f,"
                  "\"kv_bytes_sparse\":%.0f,\"gain\":%.4f",
                  n_kept, t->share, t->kv_bytes, t->kv_bytes_sparse, t->gain);
    json_ms("dense_ms", t->dense_seconds, out);
    json_ms("sparse_ms", t->sparse_seconds, out);
}

void plan_gain_json(const struct plan_gain *g, struct strbuf *out) {
    const struct target_gain *t = &g->out;
    strbuf_printf(out,
                  "{\"selector\":\"%s\",\"asked\":%s,\"context\":%d,\"batch\":%d,"
                  "\"select_layer\":%d,\"layers\":%d,\"blocks\":%d,",
                  target_selector_name(g->settings.selector), g->asked ? "true" : "false",
                  g->in.n_tokens, g->in.batch, g->in.n_shallow, g->in.n_layers, g->n_blocks);
    json_gain(t, g->n_kept, out);
    strbuf_printf(out,
                  ",\"weight_bytes_read\":%.0f,\"bandwidth\":%.0f,\"product_rate\":%.0f,"
                  "\"measured\":%s,\"macs_per_byte\":%.4f,\"machine_macs_per_byte\":%.4f,"
                  "\"kv_share_of_pass\":%.6f,\"even_tokens\":%.0f,"
                  "\"long_enough\":\"%s\",\"memory_bound\":\"%s\",\"kv_bottleneck\":\"%s\","
                  "\"noes\":%d,\"verdict\":",
                  t->weight_bytes, g->in.bandwidth, g->in.rate, g->measured ? "true" : "false",
                  t->macs_per_byte, t->machine_macs_per_byte, t->kv_share, t->even_tokens,
                  target_answer_name(t->is_long), target_answer_name(t->is_memory_bound),
                  target_answer_name(t->is_kv_bound), t->n_no);
    strbuf_append_json(out, verdict(g), strlen(verdict(g)));
    if (g->floor_kept) {
        strbuf_append_str(out, ",\"with_usual_blocks\":{");
        json_gain(&g->floor, g->floor_kept, out);
        strbuf_append_char(out, '}');
    }
    strbuf_append_char(out, '}');
}
