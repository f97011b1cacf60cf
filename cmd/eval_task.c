/* Tasks from files: each prompt answered by every column, the best of its reference answers counts.
 */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/file.h"
#include "cmd/eval_run.h"
#include "cmd/eval_stats.h"

enum { FILE_LIMIT = 1 << 30 };

/* A task's prompt in the model's words. Where context and all are longer than `room` tokens, the
 * context's middle is left out, the same number of tokens from either side of it. */
static int write_prompt(struct eval_bed *b, const struct eval_task_line *t, int room,
                        struct tokens *out, bool *is_cut, struct err *e) {
    struct tokens context = {0};
    struct strbuf s = {0};
    int rc = tokenizer_encode(b->tokenizer, t->context, strlen(t->context), 0, &context, e);
    size_t keep = context.n;
    *is_cut = false;
    /* Borders of tokens move where text is joined: a second look may be needed. */
    for (int turn = 0; turn < 4 && !rc; turn++) {
        strbuf_clear(&s);
        tokenizer_decode(b->tokenizer, context.ids, keep == context.n ? keep : keep / 2, false, &s);
        if (keep < context.n) {
            strbuf_append_str(&s, "\n[...]\n");
            tokenizer_decode(b->tokenizer, context.ids + context.n - keep / 2, keep / 2, false, &s);
        }
        strbuf_append_str(&s, "\n\n---\n\n");
        if (t->input[0])
            strbuf_printf(&s,
                          "According to the text above: %s\nAnswer in as few words as possible.",
                          t->input);
        else strbuf_append_str(&s, "Summarise the text above.");
        out->n = 0;
        rc = s.failed ? err_raise(e, E_NOMEM, "no memory for a task")
                      : eval_speech_user(&b->speech, s.data, s.n, out, e);
        size_t over = out->n > (size_t)room ? out->n - (size_t)room : 0;
        if (rc || over == 0) break;
        if (over + 16 > keep || turn == 3) {
            rc = err_raise(e, E_INVALID, "the question alone is longer than %d tokens", room);
            break;
        }
        *is_cut = true;
        keep -= over + 8;
    }
    strbuf_deinit(&s);
    tokens_deinit(&context);
    return rc;
}

static void score(struct eval_task *item, int column, const char *answer,
                  const struct eval_task_line *t) {
    double *to = item->score[column];
    for (int i = 0; i < t->n_answers; i++) {
        double s[EVAL_N_TASK_SCORES] = {eval_f1(answer, t->answer[i]),
                                        eval_rouge_l(answer, t->answer[i]),
                                        eval_exact(answer, t->answer[i])};
        for (int k = 0; k < EVAL_N_TASK_SCORES; k++)
            if (s[k] > to[k]) to[k] = s[k];
    }
}

static int look(struct eval_bed *b, int n_answer, struct err *e) {
    int32_t answer[EVAL_FOLLOWING];
    int n;
    int rc = eval_answer_dense(b, NULL, 0, n_answer, answer, &n, e);
    if (n > TARGET_TRACE_LOOK) n = TARGET_TRACE_LOOK;
    return rc || n == 0 ? rc : eval_bed_look(b, NULL, 0, answer, n, NULL, e);
}

static void write_answers(FILE *f, const struct eval_columns *columns,
                          const struct eval_task_line *t, const struct eval_task *item,
                          const struct strbuf *text) {
    struct strbuf s = {0};
    strbuf_append_str(&s, "{\"dataset\": ");
    strbuf_append_json(&s, item->dataset, strlen(item->dataset));
    strbuf_append_str(&s, ", \"input\": ");
    strbuf_append_json(&s, t->input, strlen(t->input));
    eval_write_answers(f, &s, columns, text);
}

static int task_one(struct eval_bed *b, const struct eval_columns *columns,
                    const struct eval_task_options *o, const struct eval_task_line *t,
                    const char *name, struct tokens *ids, struct strbuf *text,
                    struct eval_task *item, struct err *e) {
    *item = (struct eval_task){0};
    snprintf(item->dataset, sizeof item->dataset, "%s", t->dataset ? t->dataset : name);
    int rc = write_prompt(b, t, b->max_tokens - o->n_answer, ids, &item->is_cut, e);
    if (!rc) rc = eval_bed_prompt(b, columns, ids->ids, (int)ids->n, o->seed, e);
    if (!rc && eval_columns_have(columns, EVAL_ORACLE)) rc = look(b, o->n_answer, e);
    if (!rc) rc = eval_bed_select(b, columns, e);
    if (rc) return rc;
    rc = eval_answer_all(b, columns, NULL, 0, o->n_answer, text, e);
    item->n_tokens = (int)ids->n;
    item->n_blocks = target_n_blocks(item->n_tokens);
    for (int c = 0; c < columns->n && !rc; c++) {
        item->n_kept[c] = c ? b->n_kept[c] : item->n_blocks;
        score(item, c, text[c].data, t);
    }
    if (!rc && o->answers) write_answers(o->answers, columns, t, item, text);
    return rc;
}

/* ---- Files ---- */

struct task_run {
    struct eval_bed *b;
    const struct eval_columns *columns;
    const struct eval_task_options *o;
    const struct eval_clock *clock;
    struct tokens ids;
    struct strbuf text[EVAL_MAX_COLUMNS];
    struct eval_task **items;
    int *n_items, cap;
};

static int grow(struct task_run *r, struct err *e) {
    if (*r->n_items < r->cap) return 0;
    if (r->cap >= EVAL_MAX_TASKS)
        return err_raise(e, E_TOO_LONG, "more than %d tasks", EVAL_MAX_TASKS);
    int cap = r->cap ? 2 * r->cap : 64;
    struct eval_task *p = realloc(*r->items, sizeof *p * (size_t)cap);
    if (!p) return err_raise(e, E_NOMEM, "no memory for %d tasks", cap);
    *r->items = p;
    r->cap = cap;
    return 0;
}

static int count_lines(const struct file *f) {
    int n = 0;
    for (size_t i = 0; i < f->bytes; i++) n += f->data[i] == '\n' && n < EVAL_MAX_TASKS;
    return n + (f->bytes > 0 && f->data[f->bytes - 1] != '\n');
}

static bool is_blank(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!strchr(" \t\r", s[i]) || !s[i]) return false;
    return true;
}

static int run_file(struct task_run *r, const char *path, struct err *e) {
    struct file f;
    struct log_progress bar;
    struct eval_progress progress;
    int rc = file_open(&f, path, FILE_LIMIT, e), number = 0, done = 0;
    if (rc) return rc;
    const char *slash = strrchr(path, '/'), *at = (const char *)f.data, *end = at + f.bytes;
    const char *name = slash ? slash + 1 : path;
    int n = count_lines(&f), most = r->o->n && r->o->n < n ? r->o->n : n;
    eval_progress_start(&progress, &bar, name, most);
    while (!rc && at < end && done < most && !eval_clock_is_up(r->clock)) {
        const char *eol = memchr(at, '\n', (size_t)(end - at));
        size_t bytes = (size_t)((eol ? eol : end) - at);
        struct eval_task_line line;
        number++;
        if (!is_blank(at, bytes)) {
            rc = grow(r, e);
            if (!rc) rc = eval_task_line_read(&line, at, bytes, e);
            if (!rc) {
                rc = task_one(r->b, r->columns, r->o, &line, name, &r->ids, r->text,
                              &(*r->items)[*r->n_items], e);
                eval_task_line_close(&line);
            }
            if (rc) err_prefix(e, rc, "%s, line %d", path, number);
            *r->n_items += !rc;
            done++;
        }
        eval_progress_at(&progress, done);
        at += bytes + 1;
    }
    eval_progress_end(&progress);
    file_close(&f);
    return rc;
}

/* Call `each` with every path of a list with commas between. */
static int each_path(const char *paths, int (*each)(void *arg, const char *path, struct err *e),
                     void *arg, struct err *e) {
    char path[4096];
    const char *p = paths;
    do {
        size_t n = strcspn(p, ",");
        if (n == 0 || n >= sizeof path)
            return err_raise(e, E_INVALID, "'%s' is no list of files with commas between", paths);
        memcpy(path, p, n);
        path[n] = 0;
        int rc = each(arg, path, e);
        if (rc) return rc;
        p += n + (p[n] == ',');
    } while (*p);
    return 0;
}

static int check_file(void *arg, const char *path, struct err *e) {
    struct file f;
    int rc = file_open(&f, path, FILE_LIMIT, e), number = 0, done = 0, most = *(const int *)arg;
    if (rc) return rc;
    size_t at = 0;
    while (!rc && at < f.bytes && (most == 0 || done < most)) {
        const char *line = (const char *)f.data + at;
        const char *eol = memchr(line, '\n', f.bytes - at);
        size_t bytes = eol ? (size_t)(eol - line) : f.bytes - at;
        struct eval_task_line t;
        number++;
        if (!is_blank(line, bytes)) {
            rc = eval_task_line_read(&t, line, bytes, e);
            if (rc) err_prefix(e, rc, "%s, line %d", path, number);
            else eval_task_line_close(&t);
            done++;
        }
        at += bytes + (eol != NULL);
    }
    if (!rc && done == 0) rc = err_raise(e, E_FORMAT, "%s: holds no task", path);
    file_close(&f);
    return rc;
}

int eval_tasks_check(const char *paths, int n, struct err *e) {
    return each_path(paths, check_file, &n, e);
}

static int run_path(void *arg, const char *path, struct err *e) {
    return run_file(arg, path, e);
}

int eval_tasks(struct eval_bed *b, const struct eval_columns *columns,
               const struct eval_task_options *o, const struct eval_clock *clock,
               struct eval_task **items, int *n_items, struct err *e) {
    struct task_run r = {
        .b = b, .columns = columns, .o = o, .clock = clock, .items = items, .n_items = n_items};
    *items = NULL;
    *n_items = 0;
    int rc = each_path(o->paths, run_path, &r, e);
    tokens_deinit(&r.ids);
    for (int i = 0; i < EVAL_MAX_COLUMNS; i++) strbuf_deinit(&r.text[i]);
    return rc;
}
