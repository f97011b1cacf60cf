/* Lines of task files as LongBench has them: one JSON object a line. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cmd/eval_run.h"

/* The parser allocates tens of bytes a value; a task has a few dozen. */
enum { MAX_VALUES = 100000 };

/* Values that the text may hold, strings left out of account. */
static size_t count_values(const char *s, size_t n) {
    size_t count = 1;
    bool inside = false;
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '\\' && inside) i++;
        else if (s[i] == '"') inside = !inside;
        else if (!inside && strchr(",:[{", s[i]) && s[i]) count++;
    }
    return count;
}

static int take_string(char **out, const json_t *v, const char *key, bool needed, struct err *e) {
    if (!v && !needed) return 0;
    if (!json_is_string(v)) return err_raise(e, E_FORMAT, "\"%s\" is no string", key);
    *out = strdup(json_string_value(v)); /* bytes behind a NUL are left out */
    return *out ? 0 : err_raise(e, E_NOMEM, "no memory for \"%s\"", key);
}

static int take_answers(struct eval_task_line *t, const json_t *v, struct err *e) {
    const size_t most = sizeof t->answer / sizeof t->answer[0];
    if (json_is_string(v)) {
        t->n_answers = 1;
        return take_string(&t->answer[0], v, "answers", true, e);
    }
    if (!json_is_array(v) || json_array_size(v) == 0 || json_array_size(v) > most)
        return err_raise(e, E_FORMAT, "\"answers\" is no list of 1 to %zu strings", most);
    for (size_t i = 0; i < json_array_size(v); i++) {
        t->n_answers = (int)i + 1;
        int rc = take_string(&t->answer[i], json_array_get(v, i), "answers", true, e);
        if (rc) return rc;
    }
    return 0;
}

int eval_task_line_read(struct eval_task_line *out, const char *line, size_t n, struct err *e) {
    json_error_t why;
    *out = (struct eval_task_line){0};
    size_t values = count_values(line, n);
    if (values > MAX_VALUES) return err_raise(e, E_TOO_LONG, "more than %d values", MAX_VALUES);
    json_t *o = json_loadb(line, n, JSON_ALLOW_NUL, &why);
    if (!o) return err_raise(e, E_FORMAT, "no JSON: %s (column %d)", why.text, why.column);
    int rc = json_is_object(o) ? 0 : err_raise(e, E_FORMAT, "no JSON object");
    if (!rc) rc = take_string(&out->context, json_object_get(o, "context"), "context", true, e);
    if (!rc) rc = take_string(&out->input, json_object_get(o, "input"), "input", true, e);
    if (!rc) rc = take_string(&out->dataset, json_object_get(o, "dataset"), "dataset", false, e);
    if (!rc) rc = take_answers(out, json_object_get(o, "answers"), e);
    json_decref(o);
    if (rc) eval_task_line_close(out);
    return rc;
}

void eval_task_line_close(struct eval_task_line *t) {
    free(t->context);
    free(t->input);
    free(t->dataset);
    for (int i = 0; i < t->n_answers; i++) free(t->answer[i]);
    *t = (struct eval_task_line){0};
}
