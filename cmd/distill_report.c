#include "cmd/distill_report.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const keep_name[DISTILL_N_KEEPS] = {"a tenth of the blocks", "32 blocks"};
static const char *const keep_key[DISTILL_N_KEEPS] = {"tenth", "blocks_32"};

/* The domains that were looked at, then all. */
static int next_domain(const struct distill_table *t, int keep, int domain) {
    for (domain++; domain <= TARGET_MAX_DOMAINS; domain++)
        if (t->at[keep][domain][DISTILL_ORACLE].n_places > 0) return domain;
    return -1;
}

static const char *domain_name(const struct distill_report *r, int domain) {
    return domain == TARGET_MAX_DOMAINS ? "all" : distill_domain_name(r->texts, domain);
}

/* ---- A table ---- */

static void append_line(struct strbuf *out, const struct distill_recall line[DISTILL_N_SELECTORS],
                        bool mass) {
    for (int s = 0; s < DISTILL_N_SELECTORS; s++) {
        if (line[s].n_places == 0) strbuf_printf(out, " %8s", "-");
        else strbuf_printf(out, " %8.3f", mass ? line[s].mass : line[s].recall);
    }
    strbuf_append_char(out, '\n');
}

static void append_table(const struct distill_report *r, struct strbuf *out, int keep, bool mass) {
    const struct distill_table *t = &r->results[r->chosen].table;
    if (next_domain(t, keep, -1) < 0) return;
    strbuf_printf(out, "\n%s, keeping %s\n%-12s %6s",
                  mass ? "Share of the labelled attention" : "Recall of the best blocks",
                  keep_name[keep], "held out", "places");
    for (int s = 0; s < DISTILL_N_SELECTORS; s++)
        strbuf_printf(out, " %8s", distill_selector_name[s]);
    strbuf_append_char(out, '\n');
    for (int d = -1; (d = next_domain(t, keep, d)) >= 0;) {
        strbuf_printf(out, "%-12.12s %6d", domain_name(r, d),
                      t->at[keep][d][DISTILL_ORACLE].n_places);
        append_line(out, t->at[keep][d], mass);
    }
}

/* Of what was asked, how much is kept. */
static void append_marks(const struct distill_report *r, struct strbuf *out, int keep) {
    const struct distill_recall *all = r->results[r->chosen].table.at[keep][TARGET_MAX_DOMAINS];
    if (all[DISTILL_ORACLE].n_marked == 0) return;
    strbuf_printf(out, "\nFacts kept of those that are asked for, keeping %s\n%-12s %6d",
                  keep_name[keep], "questions", all[DISTILL_ORACLE].n_marked);
    for (int s = 0; s < DISTILL_N_SELECTORS; s++) {
        if (all[s].n_marked == 0) strbuf_printf(out, " %8s", "-");
        else strbuf_printf(out, " %8.3f", all[s].mark);
    }
    strbuf_append_char(out, '\n');
}

void distill_report_text(const struct distill_report *r, struct strbuf *out) {
    strbuf_printf(out, "layer  KV read  loss     recall  attention  (scorer, all that was held "
                       "out; a tenth kept)\n");
    for (int i = 0; i < r->n_results; i++) {
        const struct distill_result *x = &r->results[i];
        const struct distill_recall *all = &x->table.at[0][TARGET_MAX_DOMAINS][DISTILL_SCORER];
        char loss[24] = "      -";
        if (!isnan(x->loss)) snprintf(loss, sizeof loss, "%.5f", x->loss);
        strbuf_printf(out, "%5d  %6.1f%%  %s  %.3f   %.3f%s\n", x->layer, 100 * x->cost, loss,
                      all->recall, all->mass, i == r->chosen ? "      <- written" : "");
    }
    for (int keep = 0; keep < DISTILL_N_KEEPS; keep++)
        for (int mass = 0; mass < 2; mass++) append_table(r, out, keep, mass);
    for (int keep = 0; keep < DISTILL_N_KEEPS; keep++) append_marks(r, out, keep);
    strbuf_printf(out, "\n%s: layer %d\n", r->out, r->results[r->chosen].layer);
}

/* ---- JSON ---- */

static void append_json_table(const struct distill_report *r, const struct distill_table *t,
                              struct strbuf *out, int keep) {
    bool first = true;
    strbuf_printf(out, "\"%s\": {", keep_key[keep]);
    for (int d = -1; (d = next_domain(t, keep, d)) >= 0;) {
        strbuf_append_str(out, first ? "" : ", ");
        strbuf_append_json(out, domain_name(r, d), strlen(domain_name(r, d)));
        strbuf_printf(out, ": {\"places\": %d", t->at[keep][d][DISTILL_ORACLE].n_places);
        for (int s = 0; s < DISTILL_N_SELECTORS; s++) {
            const struct distill_recall *x = &t->at[keep][d][s];
            if (x->n_places == 0) continue;
            strbuf_printf(out, ", \"%s\": {\"recall\": %.5f, \"attention\": %.5f",
                          distill_selector_name[s], x->recall, x->mass);
            if (x->n_marked) strbuf_printf(out, ", \"facts\": %.5f", x->mark);
            strbuf_append_char(out, '}');
        }
        strbuf_append_char(out, '}');
        first = false;
    }
    strbuf_append_char(out, '}');
}

void distill_report_json(const struct distill_report *r, struct strbuf *out) {
    strbuf_append_str(out, "{\"scorer\": ");
    strbuf_append_json(out, r->out, strlen(r->out));
    strbuf_append_str(out, ", \"recipe\": ");
    strbuf_append_json(out, r->recipe, strlen(r->recipe));
    strbuf_printf(out,
                  ", \"layer\": %d, \"keep\": %g, \"seconds\": {\"texts\": %.3f, \"open\": %.3f, "
                  "\"make\": %.3f, \"trace\": %.3f, \"train\": %.3f}, \"candidates\": [",
                  r->results[r->chosen].layer, r->keep, r->times->texts_s, r->times->open_s,
                  r->times->make_s, r->times->trace_s, r->times->train_s);
    for (int i = 0; i < r->n_results; i++) {
        const struct distill_result *x = &r->results[i];
        strbuf_printf(out, "%s\n  {\"layer\": %d, \"kv_read\": %.5f, ", i ? "," : "", x->layer,
                      x->cost);
        if (!isnan(x->loss)) strbuf_printf(out, "\"loss\": %.6f, ", x->loss);
        for (int keep = 0; keep < DISTILL_N_KEEPS; keep++) {
            if (keep) strbuf_append_str(out, ", ");
            append_json_table(r, &x->table, out, keep);
        }
        strbuf_append_char(out, '}');
    }
    strbuf_append_str(out, "\n]}\n");
}
