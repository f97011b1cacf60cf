/* Tables for people, and the heat map's data. */
#include "cmd/eval_report.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "cmd/eval_svg.h"

enum { NAME = 32 };

static int n_kept_mean(const int *kept, size_t stride, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += *(const int *)((const char *)kept + (size_t)i * stride);
    return n ? (int)lround(sum / n) : 0;
}

/* The number as `fmt` prints it, or a dash where one value tells nothing of a spread. */
static void put(struct strbuf *b, const char *fmt, int width, double x) {
    if (isnan(x)) {
        strbuf_printf(b, "%*s", width, "-");
        return;
    }
    char text[64];
    snprintf(text, sizeof text, fmt, width, x);
    strbuf_append_str(b, text);
}

static void put_interval(struct strbuf *b, const char *fmt, int width, double lo, double hi) {
    strbuf_append_str(b, "[");
    put(b, fmt, width, lo);
    strbuf_append_str(b, ", ");
    put(b, fmt, width, hi);
    strbuf_append_str(b, "]");
}

/* ---- Needles ---- */

static void found_head(struct strbuf *b, const struct eval_results *r) {
    const struct eval_find_options *o = r->find;
    strbuf_printf(b,
                  "\nNeedles: %d prompts, answers of up to %d tokens; share whose answer holds "
                  "the fact\n",
                  r->n_found, o->n_answer);
    strbuf_printf(b, "%-*s %11s %7s %15s %8s %6s %17s %13s\n", NAME, "", "kept/blocks", "found",
                  "95 %", "- dense", "s.e.", "95 %", "better/worse");
}

static void found_row(struct strbuf *b, const struct eval_results *r, int c) {
    struct eval_paired p = eval_sum_found(r, c, (struct eval_filter){-1, -1, -1});
    char kept[32] = "";
    snprintf(kept, sizeof kept, "%d/%d",
             n_kept_mean(&r->found[0].n_kept[c], sizeof r->found[0], r->n_found),
             n_kept_mean(&r->found[0].n_blocks, sizeof r->found[0], r->n_found));
    strbuf_printf(b, "%-*s %11s %7.3f  [%.3f, %.3f]", NAME, r->columns->at[c].name, kept, p.mean,
                  p.lo, p.hi);
    if (c) {
        strbuf_printf(b, " %+8.1f ", 100 * p.diff);
        put(b, "%*.1f", 6, 100 * p.se);
        strbuf_printf(b, "  [%+6.1f, %+6.1f] %7d/%d", 100 * p.diff_lo, 100 * p.diff_hi, p.n_better,
                      p.n_worse);
    }
    strbuf_append_str(b, "\n");
}

/* Shares by length, depth or kind: one row a column, one number a group. */
static void found_by(struct strbuf *b, const struct eval_results *r, const char *title,
                     int n_groups, int which) {
    const struct eval_find_options *o = r->find;
    strbuf_printf(b, "\n%-*s", NAME, title);
    for (int g = 0; g < n_groups; g++) {
        if (which == 0) strbuf_printf(b, " %9d", o->length[g]);
        else if (which == 1) strbuf_printf(b, " %7.0f %%", 100 * o->depth[g]);
        else strbuf_printf(b, " %9s", eval_needle_kind_name(o->kind[g]));
    }
    for (int c = 0; c < r->columns->n; c++) {
        strbuf_printf(b, "\n%-*s", NAME, r->columns->at[c].name);
        for (int g = 0; g < n_groups; g++) {
            struct eval_filter f = {which == 0 ? g : -1, which == 1 ? g : -1,
                                    which == 2 ? (int)o->kind[g] : -1};
            struct eval_paired p = eval_sum_found(r, c, f);
            if (p.n > 0) strbuf_printf(b, " %9.3f", p.mean);
            else strbuf_printf(b, " %9s", "-");
        }
    }
    strbuf_append_str(b, "\n");
}

/* Columns that read everything somewhere: silently right, but not what their name says. */
static void say_dense(struct strbuf *b, const struct eval_results *r) {
    for (int c = 1; c < r->columns->n; c++) {
        int n = 0;
        for (int i = 0; i < r->n_found; i++) n += r->found[i].n_kept[c] >= r->found[i].n_blocks;
        if (n)
            strbuf_printf(b,
                          "%s: %d of %d prompts have no more blocks than it keeps (at least %d) "
                          "and were read densely\n",
                          r->columns->at[c].name, n, r->n_found,
                          r->columns->at[c].settings.min_blocks);
    }
}

static void report_found(struct strbuf *b, const struct eval_results *r) {
    found_head(b, r);
    for (int c = 0; c < r->columns->n; c++) found_row(b, r, c);
    say_dense(b, r);
    if (r->find->n_lengths > 1) found_by(b, r, "by tokens of the prompt", r->find->n_lengths, 0);
    if (r->find->n_depths > 1) found_by(b, r, "by depth", r->find->n_depths, 1);
    if (r->find->n_kinds > 1) found_by(b, r, "by kind", r->find->n_kinds, 2);
}

/* ---- Running text ---- */

static void report_loss(struct strbuf *b, const struct eval_results *r) {
    const struct eval_read_options *o = r->read;
    strbuf_printf(b,
                  "\nRunning text: %d texts, loss of the %d tokens behind a prompt (nats a token), "
                  "perplexity, rise over dense; most likely token as dense's;\nrecall of the "
                  "blocks that the next %d tokens attend to most (pinned ones aside), and the "
                  "attention that kept blocks hold\n",
                  r->n_loss, o->n_following, TARGET_TRACE_LOOK);
    strbuf_printf(b, "%-*s %8s %8s %9s %8s %19s %7s %7s %7s", NAME, "", "loss", "ppl", "rise",
                  "s.e.", "95 %", "agree", "recall", "mass");
    for (int l = 0; o->n_lengths > 1 && l < o->n_lengths; l++)
        strbuf_printf(b, " %6d", o->length[l]);
    strbuf_append_str(b, o->n_lengths > 1 ? " (rise by tokens of the prompt)\n" : "\n");
    for (int c = 0; c < r->columns->n; c++) {
        struct eval_paired p = eval_sum_loss(r, c, -1, -1);
        struct eval_kept_means m = eval_sum_kept(r, c, -1);
        strbuf_printf(b, "%-*s %8.4f %8.3f", NAME, r->columns->at[c].name, p.mean, exp(p.mean));
        if (c) {
            strbuf_printf(b, " %+9.4f ", p.diff);
            put(b, "%*.4f", 8, p.se);
            strbuf_append_str(b, " ");
            put_interval(b, "%+*.4f", 7, p.diff_lo, p.diff_hi);
            strbuf_printf(b, " %7.3f ", m.agree);
            put(b, "%*.3f", 7, m.recall);
            strbuf_append_str(b, " ");
            put(b, "%*.3f", 7, m.mass);
        }
        for (int l = 0; c && o->n_lengths > 1 && l < o->n_lengths; l++)
            strbuf_printf(b, " %+6.3f", eval_sum_loss(r, c, l, -1).diff);
        strbuf_append_str(b, "\n");
    }
}

static void report_attention(struct strbuf *b, const struct eval_results *r) {
    const struct eval_read_options *o = r->read;
    for (int l = 0; l < o->n_lengths; l++) {
        const struct eval_attention *a = &r->attention[l];
        double top[EVAL_SHARES] = {0};
        if (a->n == 0) continue;
        for (int i = 0; i < a->n_layers; i++)
            for (int s = 0; s < EVAL_SHARES; s++) top[s] += a->top[i][s] / a->n / a->n_layers;
        strbuf_printf(b,
                      "\nAttention behind %d tokens, deep layers: a head's best 5 / 10 / 20 %% of "
                      "blocks hold %.3f / %.3f / %.3f of it\n",
                      o->length[l], top[0], top[1], top[2]);
        strbuf_printf(b,
                      "best %d blocks of layer %d that are also a deeper layer's best:", a->n_best,
                      r->bed->select_layer);
        for (int i = 1; i < a->n_layers; i++)
            strbuf_printf(b, "%s %d: %.2f", i % 8 == 1 ? "\n " : "", r->bed->select_layer + i,
                          a->overlap[i] / a->n);
        strbuf_append_str(b, "\nas many tokens in the best blocks of");
        for (int i = 0; i < EVAL_SIZES; i++)
            if (a->by_size[i] > 0)
                strbuf_printf(b, " %d hold %.3f%s", KERN_QUARTER << i, a->by_size[i] / a->n,
                              i == EVAL_SIZES - 1 ? "" : ",");
        strbuf_append_str(b, a->by_size[0] > 0 ? "\n" : " (of 16 and 32: with --sizes)\n");
    }
}

/* ---- Tasks ---- */

static void report_tasks(struct strbuf *b, const struct eval_results *r) {
    enum { MOST = 64 };
    const char *names[MOST];
    int n = eval_datasets(r, names, MOST), n_cut = 0;
    for (int i = 0; i < r->n_task; i++) n_cut += r->task[i].is_cut;
    strbuf_printf(b, "\nTasks: %d prompts", r->n_task);
    if (n_cut) strbuf_printf(b, ", of which %d were too long and lost their middle", n_cut);
    strbuf_append_str(b, "\n");
    for (int d = 0; d < n + (n > 1); d++) {
        const char *dataset = d < n ? names[d] : NULL;
        strbuf_printf(b, "%-*s %6s %8s %8s %8s %9s %6s %17s\n", NAME, dataset ? dataset : "all",
                      "n", "F1", "ROUGE-L", "exact", "F1-dense", "s.e.", "95 %");
        for (int c = 0; c < r->columns->n; c++) {
            struct eval_paired p = eval_sum_task(r, c, EVAL_TASK_F1, dataset);
            strbuf_printf(b, "%-*s %6d %8.3f %8.3f %8.3f", NAME, r->columns->at[c].name, p.n,
                          p.mean, eval_sum_task(r, c, EVAL_TASK_ROUGE_L, dataset).mean,
                          eval_sum_task(r, c, EVAL_TASK_EXACT, dataset).mean);
            if (c) {
                strbuf_printf(b, " %+9.3f ", p.diff);
                put(b, "%*.3f", 6, p.se);
                strbuf_append_str(b, "  ");
                put_interval(b, "%+*.3f", 6, p.diff_lo, p.diff_hi);
            }
            strbuf_append_str(b, "\n");
        }
    }
}

void eval_report_text(struct strbuf *b, const struct eval_results *r) {
    if (r->n_found > 0) report_found(b, r);
    if (r->n_loss > 0) {
        report_loss(b, r);
        report_attention(b, r);
    }
    if (r->n_task > 0) report_tasks(b, r);
    if (r->exact) eval_exact_text(b, r->exact);
    if (r->curve) {
        strbuf_printf(b, "\nCurve of %s: ", r->curve_of);
        eval_curve_append(b, r->curve);
        strbuf_append_str(b, "\n");
    }
    if (r->is_cut) strbuf_append_str(b, "\nThe time was over before everything was asked.\n");
}

/* ---- Heat map ---- */

void eval_report_svg(struct strbuf *b, const struct eval_results *r) {
    enum { CELLS = EVAL_MAX_DEPTHS * EVAL_MAX_LENGTHS };
    static _Thread_local double share[EVAL_MAX_COLUMNS * CELLS];
    const struct eval_find_options *o = r->find;
    const char *names[EVAL_MAX_COLUMNS];
    double whole[EVAL_MAX_COLUMNS];
    int count[CELLS];
    char title[192], under[256];
    for (int c = 0; c < r->columns->n; c++) {
        struct eval_paired all = eval_sum_found(r, c, (struct eval_filter){-1, -1, -1});
        names[c] = r->columns->at[c].name;
        whole[c] = all.n > 0 ? all.mean : NAN;
        for (int d = 0; d < o->n_depths; d++)
            for (int l = 0; l < o->n_lengths; l++) {
                int cell = d * o->n_lengths + l;
                struct eval_paired p = eval_sum_found(r, c, (struct eval_filter){l, d, -1});
                share[c * o->n_depths * o->n_lengths + cell] = p.n > 0 ? p.mean : NAN;
                count[cell] = p.n;
            }
    }
    snprintf(title, sizeof title, "Needles: %s", r->model);
    snprintf(under, sizeof under, "%d prompts, select layer %d of %d, seed %llu", r->n_found,
             r->bed->select_layer, r->bed->c.n_layers, (unsigned long long)r->seed);
    eval_svg_append(b, &(struct eval_heat){title, under, r->columns->n, o->n_lengths, o->n_depths,
                                           names, o->length, o->depth, share, whole, count});
}
