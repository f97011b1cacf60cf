#include "model/json_private.h"

#include "base/err.h"

enum { MAX_VALUES = 4 << 20 };

int json__parse_object(json_t **out, const char *text, size_t n, struct err *e) {
    size_t values = 0;
    *out = NULL;
    /* Each value but the first follows one of these; those inside strings only count too much. */
    for (size_t i = 0; i < n; i++) values += text[i] == ',' || text[i] == '[' || text[i] == '{';
    if (values > MAX_VALUES)
        return err_raise(e, E_TOO_LONG, "JSON with %zu values; %d is the limit", values,
                         MAX_VALUES);
    json_error_t why = {.line = -1};
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    /* jansson leaves the text empty where it could not even allocate its first object. */
    if (!root && (json_error_code(&why) == json_error_out_of_memory || !why.text[0]))
        return err_raise(e, E_NOMEM, "no memory for JSON of %zu bytes", n);
    if (!root) return err_raise(e, E_FORMAT, "JSON, line %d: %s", why.line, why.text);
    if (!json_is_object(root)) {
        json_decref(root);
        return err_raise(e, E_FORMAT, "the JSON is no object");
    }
    *out = root;
    return 0;
}
