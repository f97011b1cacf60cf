/* The same figures for programs. */
#include <math.h>
#include <string.h>

#include "cmd/eval_report.h"

/* JSON has no NaN. */
static void number(struct strbuf *b, const char *key, double x) {
    if (isfinite(x)) strbuf_printf(b, "\"%s\": %.9g", key, x);
    else strbuf_printf(b, "\"%s\": null", key);
}

static void pair(struct strbuf *b, const struct eval_paired *p) {
    strbuf_printf(b, "\"n\": %d, ", p->n);
    number(b, "mean", p->mean);
    strbuf_append_str(b, ", ");
    number(b, "low", p->lo);
    strbuf_append_str(b, ", ");
    number(b, "high", p->hi);
    strbuf_append_str(b, ", ");
    number(b, "minus_dense", p->diff);
    strbuf_append_str(b, ", ");
    number(b, "standard_error", p->se);
    strbuf_append_str(b, ", ");
    number(b, "minus_dense_low", p->diff_lo);
    strbuf_append_str(b, ", ");
    number(b, "minus_dense_high", p->diff_hi);
    strbuf_printf(b, ", \"better\": %d, \"worse\": %d", p->n_better, p->n_worse);
}

static void string(struct strbuf *b, const char *key, const char *s) {
    strbuf_printf(b, "\"%s\": ", key);
    strbuf_append_json(b, s, strlen(s));
}

static void ints(struct strbuf *b, const char *key, const int *x, int n) {
    strbuf_printf(b, "\"%s\": [", key);
    for (int i = 0; i < n; i++) strbuf_printf(b, "%s%d", i ? ", " : "", x[i]);
    strbuf_append_str(b, "]");
}

static void kept_means(struct strbuf *b, const struct eval_kept_means *m) {
    strbuf_append_str(b, ", ");
    number(b, "agreement", m->agree);
    strbuf_append_str(b, ", ");
    number(b, "recall", m->recall);
    strbuf_append_str(b, ", ");
    number(b, "mass", m->mass);
}

static void columns(struct strbuf *b, const struct eval_results *r) {
    static const char *const anew[EVAL_N_ANEW] = {"once", "again", "each step"};
    strbuf_append_str(b, ",\n\"columns\": [");
    for (int c = 0; c < r->columns->n; c++) {
        const struct eval_column *col = &r->columns->at[c];
        const struct target_settings *s = &col->settings;
        strbuf_append_str(b, c ? ",\n  {" : "\n  {");
        string(b, "name", col->name);
        strbuf_append_str(b, ", ");
        string(b, "selector", eval_selector_name(col->selector));
        if (c)
            strbuf_printf(b,
                          ", \"keep\": %.9g, \"keep_blocks\": %d, \"min_blocks\": %d, "
                          "\"window_blocks\": %d, \"reserve\": %.9g, \"smooth\": %.9g, "
                          "\"selects\": \"%s\", \"lists\": \"%s\", \"select2\": %d, "
                          "\"quarters\": %d, \"block_tokens\": %d, \"drop\": %.9g",
                          s->keep, s->keep_blocks, s->min_blocks, s->window_blocks, s->reserve,
                          s->smooth, anew[col->anew], target_lists_name(s->lists), s->select2,
                          s->quarters, col->size ? col->size : TARGET_BLOCK, s->drop);
        strbuf_append_str(b, "}");
    }
    strbuf_append_str(b, "\n]");
}

/* ---- Needles ---- */

static void found_group(struct strbuf *b, const struct eval_results *r, int c, const char *key,
                        const char *value, struct eval_filter f, bool *first) {
    struct eval_paired p = eval_sum_found(r, c, f);
    if (p.n <= 0) return;
    strbuf_printf(b, "%s\n    {\"%s\": %s, ", *first ? "" : ",", key, value);
    pair(b, &p);
    strbuf_append_str(b, "}");
    *first = false;
}

static void found_column(struct strbuf *b, const struct eval_results *r, int c) {
    const struct eval_find_options *o = r->find;
    struct eval_paired p = eval_sum_found(r, c, (struct eval_filter){-1, -1, -1});
    bool first = true;
    char value[64];
    strbuf_append_str(b, c ? ",\n  {" : "\n  {");
    string(b, "name", r->columns->at[c].name);
    strbuf_append_str(b, ", ");
    pair(b, &p);
    strbuf_append_str(b, ",\n   \"by_tokens\": [");
    for (int l = 0; l < o->n_lengths; l++) {
        snprintf(value, sizeof value, "%d", o->length[l]);
        found_group(b, r, c, "tokens", value, (struct eval_filter){l, -1, -1}, &first);
    }
    strbuf_append_str(b, "],\n   \"by_depth\": [");
    first = true;
    for (int d = 0; d < o->n_depths; d++) {
        snprintf(value, sizeof value, "%.9g", o->depth[d]);
        found_group(b, r, c, "depth", value, (struct eval_filter){-1, d, -1}, &first);
    }
    strbuf_append_str(b, "],\n   \"by_kind\": [");
    first = true;
    for (int k = 0; k < o->n_kinds; k++) {
        snprintf(value, sizeof value, "\"%s\"", eval_needle_kind_name(o->kind[k]));
        found_group(b, r, c, "kind", value, (struct eval_filter){-1, -1, (int)o->kind[k]}, &first);
    }
    strbuf_append_str(b, "],\n   \"cells\": [");
    first = true;
    for (int l = 0; l < o->n_lengths; l++)
        for (int d = 0; d < o->n_depths; d++) {
            snprintf(value, sizeof value, "%d, \"depth\": %.9g", o->length[l], o->depth[d]);
            found_group(b, r, c, "tokens", value, (struct eval_filter){l, d, -1}, &first);
        }
    strbuf_append_str(b, "]}");
}

static void found(struct strbuf *b, const struct eval_results *r) {
    strbuf_printf(b,
                  ",\n\"needles\": {\"prompts\": %d, \"answer_tokens\": %d, \"late_tokens\": %d,"
                  " \"columns\": [",
                  r->n_found, r->find->n_answer, r->find->n_late);
    for (int c = 0; c < r->columns->n; c++) found_column(b, r, c);
    strbuf_append_str(b, "\n]}");
}

/* ---- Running text ---- */

static void loss_column(struct strbuf *b, const struct eval_results *r, int c) {
    const struct eval_read_options *o = r->read;
    struct eval_paired p = eval_sum_loss(r, c, -1, -1);
    struct eval_kept_means m = eval_sum_kept(r, c, -1);
    strbuf_append_str(b, c ? ",\n  {" : "\n  {");
    string(b, "name", r->columns->at[c].name);
    strbuf_append_str(b, ", ");
    pair(b, &p);
    kept_means(b, &m);
    strbuf_append_str(b, ",\n   \"by_tokens\": [");
    for (int l = 0; l < o->n_lengths; l++) {
        p = eval_sum_loss(r, c, l, -1);
        m = eval_sum_kept(r, c, l);
        strbuf_printf(b, "%s\n    {\"tokens\": %d, ", l ? "," : "", o->length[l]);
        pair(b, &p);
        kept_means(b, &m);
        strbuf_append_str(b, "}");
    }
    strbuf_append_str(b, "],\n   \"by_part\": [");
    for (int i = 0; i < EVAL_PARTS; i++) {
        p = eval_sum_loss(r, c, -1, i);
        strbuf_printf(b, "%s\n    {\"part\": %d, ", i ? "," : "", i);
        pair(b, &p);
        strbuf_append_str(b, "}");
    }
    strbuf_append_str(b, "]}");
}

static void attention(struct strbuf *b, const struct eval_results *r) {
    strbuf_append_str(b, ",\n\"attention\": [");
    for (int l = 0; l < r->read->n_lengths; l++) {
        const struct eval_attention *a = &r->attention[l];
        double n = a->n ? a->n : 1;
        strbuf_printf(b,
                      "%s\n  {\"tokens\": %d, \"texts\": %d, \"first_layer\": %d, \"best_blocks\": "
                      "%d",
                      l ? "," : "", r->read->length[l], a->n, r->bed->select_layer, a->n_best);
        for (int i = 0; i < EVAL_SIZES; i++)
            if (a->by_size[i] > 0)
                strbuf_printf(b, ", \"blocks_of_%d\": %.6f", KERN_QUARTER << i, a->by_size[i] / n);
        strbuf_append_str(b, ", \"layers\": [");
        for (int i = 0; i < a->n_layers; i++)
            strbuf_printf(b,
                          "%s\n    {\"layer\": %d, \"top_5\": %.6f, \"top_10\": %.6f, \"top_20\": "
                          "%.6f, \"overlap\": %.6f}",
                          i ? "," : "", r->bed->select_layer + i, a->top[i][0] / n,
                          a->top[i][1] / n, a->top[i][2] / n, a->overlap[i] / n);
        strbuf_append_str(b, "]}");
    }
    strbuf_append_str(b, "\n]");
}

static void loss(struct strbuf *b, const struct eval_results *r) {
    strbuf_printf(b, ",\n\"text\": {\"texts\": %d, \"following_tokens\": %d, \"columns\": [",
                  r->n_loss, r->read->n_following);
    for (int c = 0; c < r->columns->n; c++) loss_column(b, r, c);
    strbuf_append_str(b, "\n]}");
    attention(b, r);
}

/* ---- Tasks ---- */

static void tasks(struct strbuf *b, const struct eval_results *r) {
    enum { MOST = 64 };
    static const char *const score[EVAL_N_TASK_SCORES] = {"f1", "rouge_l", "exact"};
    const char *names[MOST];
    int n = eval_datasets(r, names, MOST), n_cut = 0;
    for (int i = 0; i < r->n_task; i++) n_cut += r->task[i].is_cut;
    strbuf_printf(b, ",\n\"tasks\": {\"prompts\": %d, \"cut\": %d, \"datasets\": [", r->n_task,
                  n_cut);
    for (int d = 0; d < n; d++) {
        strbuf_append_str(b, d ? ",\n  {" : "\n  {");
        string(b, "dataset", names[d]);
        strbuf_append_str(b, ", \"columns\": [");
        for (int c = 0; c < r->columns->n; c++) {
            strbuf_append_str(b, c ? ",\n    {" : "\n    {");
            string(b, "name", r->columns->at[c].name);
            for (int s = 0; s < EVAL_N_TASK_SCORES; s++) {
                struct eval_paired p = eval_sum_task(r, c, s, names[d]);
                strbuf_printf(b, ", \"%s\": {", score[s]);
                pair(b, &p);
                strbuf_append_str(b, "}");
            }
            strbuf_append_str(b, "}");
        }
        strbuf_append_str(b, "]}");
    }
    strbuf_append_str(b, "\n]}");
}

void eval_report_json(struct strbuf *b, const struct eval_results *r) {
    strbuf_append_str(b, "{");
    string(b, "model", r->model);
    strbuf_append_str(b, ", ");
    string(b, "device", r->bed->device);
    strbuf_printf(b,
                  ", \"select_layer\": %d, \"layers\": %d, \"seed\": %llu, \"minutes\": %.2f, "
                  "\"is_cut\": %s,\n",
                  r->bed->select_layer, r->bed->c.n_layers, (unsigned long long)r->seed, r->minutes,
                  r->is_cut ? "true" : "false");
    ints(b, "lengths", r->find->length, r->find->n_lengths);
    columns(b, r);
    if (r->n_found > 0) found(b, r);
    if (r->n_loss > 0) loss(b, r);
    if (r->n_task > 0) tasks(b, r);
    if (r->exact) eval_exact_json(b, r->exact);
    if (r->curve) {
        strbuf_append_str(b, ",\n\"curve\": {");
        string(b, "of", r->curve_of);
        strbuf_append_str(b, ", \"points\": [");
        for (int i = 0; i < r->curve->n; i++)
            strbuf_printf(b, "%s{\"tokens\": %.0f, \"keep\": %.9g}", i ? ", " : "",
                          r->curve->at[i].tokens, r->curve->at[i].keep);
        strbuf_append_str(b, "], \"as_flag\": \"--keep ");
        eval_curve_append(b, r->curve);
        strbuf_append_str(b, "\"}");
    }
    strbuf_append_str(b, "\n}\n");
}
