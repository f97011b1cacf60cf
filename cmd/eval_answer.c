/* What every part of an evaluation needs: time, a progress line, answers of all columns. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "cmd/eval_run.h"

bool eval_clock_is_up(const struct eval_clock *c) {
    return c->budget_ns > 0 && clock_ns() - c->start_ns > c->budget_ns;
}

void eval_progress_start(struct eval_progress *p, struct log_progress *bar, const char *name,
                         int total) {
    *p = (struct eval_progress){.name = name, .start_ns = clock_ns(), .total = total, .bar = bar};
    snprintf(p->what, sizeof p->what, "%s", name);
    log_progress_start(bar, p->what, total);
}

void eval_progress_at(struct eval_progress *p, int done) {
    double minutes = (double)(clock_ns() - p->start_ns) / 60e9;
    double left = done > 0 ? minutes / done * (p->total - done) : 0;
    p->done = done;
    snprintf(p->what, sizeof p->what, "%s %d/%d, %.1f min left", p->name, done, p->total, left);
    log_progress_at(p->bar, done);
}

void eval_progress_end(struct eval_progress *p) {
    snprintf(p->what, sizeof p->what, "%s %d of %d, %.1f min", p->name, p->done, p->total,
             (double)(clock_ns() - p->start_ns) / 60e9);
    log_progress_end(p->bar);
}

bool eval_columns_have(const struct eval_columns *c, enum eval_selector s) {
    for (int i = 0; i < c->n; i++)
        if (c->at[i].selector == s) return true;
    return false;
}

int eval_answer_dense(struct eval_bed *b, const int32_t *lead, int n_lead, int n, int32_t *out,
                      int *n_out, struct err *e) {
    const struct target_kept *dense = NULL;
    int rc = target_trace_rewind(b->trace, b->scores.n_tokens, e);
    if (rc) return rc;
    return target_trace_answers(b->trace, 1, &dense, lead, n_lead, n, b->stop, b->n_stop, out,
                                n_out, e);
}

static void decode(const struct eval_bed *b, const int32_t *ids, int n, struct strbuf *out) {
    strbuf_clear(out);
    tokenizer_decode(b->tokenizer, ids, (size_t)n, false, out);
    strbuf_append_char(out, 0);
}

/* A column that selects anew answers alone, since its states must be noted. */
static int answer_anew(struct eval_bed *b, const struct eval_column *c, int column,
                       const int32_t *lead, int n_lead, int n, int32_t *out, int *n_out,
                       struct err *e) {
    struct target_kept kept = *eval_bed_kept(b, column);
    int rc = target_trace_rewind(b->trace, b->scores.n_tokens, e), got = 1;
    *n_out = 0;
    if (!rc && n_lead > 0 && c->settings.drop > 0)
        rc = target_trace_force_used(b->trace, lead, n_lead, &kept, b->used, e);
    else if (!rc && n_lead > 0)
        rc = target_trace_force(b->trace, lead, n_lead, &kept, NULL, NULL, e);
    if (!rc && n_lead > 0) rc = eval_bed_again(b, c, &kept, e);
    if (!rc && c->anew == EVAL_AGAIN)
        rc = target_trace_generate(b->trace, n, &kept, b->stop, b->n_stop, out, n_out, e);
    for (; !rc && c->anew == EVAL_EACH_STEP && *n_out < n && got == 1; *n_out += got) {
        rc = target_trace_generate(b->trace, 1, &kept, b->stop, b->n_stop, out + *n_out, &got, e);
        if (!rc && got == 1 && *n_out > 0) rc = eval_bed_again(b, c, &kept, e);
        if (!rc && got == 1)
            rc = target_trace_force(b->trace, out + *n_out, 1, &kept, NULL, NULL, e);
    }
    return rc ? rc : target_trace_rewind(b->trace, b->scores.n_tokens, e);
}

/* Does a column answer in other ways than by the list that it has from the prompt's end? */
static bool is_anew(const struct eval_column *c, int n_lead) {
    return c->anew == EVAL_EACH_STEP || (c->anew == EVAL_AGAIN && n_lead > 0);
}

int eval_answer_all(struct eval_bed *b, const struct eval_columns *columns, const int32_t *lead,
                    int n_lead, int n, struct strbuf text[EVAL_MAX_COLUMNS], struct err *e) {
    const struct target_kept *kept[EVAL_MAX_COLUMNS];
    int column[EVAL_MAX_COLUMNS], n_out[EVAL_MAX_COLUMNS] = {0}, n_answers = 0;
    int32_t *ids = malloc(sizeof *ids * EVAL_MAX_COLUMNS * (size_t)n);
    if (!ids) return err_raise(e, E_NOMEM, "no memory for answers of %d tokens", n);
    int rc = target_trace_rewind(b->trace, b->scores.n_tokens, e);
    /* Whatever leaves nothing out answers as the first column, dense. */
    for (int i = 0; i < columns->n; i++) {
        if (i > 0 && (b->is_dense[i] || is_anew(&columns->at[i], n_lead))) continue;
        kept[n_answers] = eval_bed_kept(b, i);
        column[n_answers++] = i;
    }
    if (!rc)
        rc = target_trace_answers(b->trace, n_answers, kept, lead, n_lead, n, b->stop, b->n_stop,
                                  ids, n_out, e);
    for (int i = 0; i < n_answers && !rc; i++)
        decode(b, ids + (size_t)i * (size_t)n, n_out[i], &text[column[i]]);
    for (int i = 1; i < columns->n && !rc; i++) {
        if (b->is_dense[i]) {
            strbuf_clear(&text[i]);
            strbuf_append(&text[i], text[0].data, text[0].n);
        } else if (is_anew(&columns->at[i], n_lead)) {
            rc = answer_anew(b, &columns->at[i], i, lead, n_lead, n, ids, n_out, e);
            if (!rc) decode(b, ids, n_out[0], &text[i]);
        }
    }
    for (int i = 0; i < columns->n && !rc; i++)
        if (text[i].failed || !text[i].data) rc = err_raise(e, E_NOMEM, "no memory for an answer");
    free(ids);
    return rc;
}

void eval_write_answers(FILE *f, struct strbuf *s, const struct eval_columns *columns,
                        const struct strbuf *text) {
    strbuf_append_str(s, ", \"answers\": {");
    for (int i = 0; i < columns->n; i++) {
        if (i) strbuf_append_str(s, ", ");
        strbuf_append_json(s, columns->at[i].name, strlen(columns->at[i].name));
        strbuf_append_str(s, ": ");
        strbuf_append_json(s, text[i].data, strlen(text[i].data));
    }
    strbuf_append_str(s, "}}\n");
    if (!s->failed) fwrite(s->data, 1, s->n, f);
    strbuf_deinit(s);
}
