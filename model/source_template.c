/* The chat template's text: a key of the GGUF; of a folder, chat_template.jinja before
 * tokenizer_config.json, as transformers reads them. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "model/json_private.h"
#include "model/source_private.h"

enum { MAX_TEMPLATE_BYTES = 1 << 20, MAX_TOKENIZER_CONFIG_BYTES = 64 << 20 };

static int keep(struct model_source *s, const char *text, size_t n, struct err *e) {
    if (n > MAX_TEMPLATE_BYTES)
        return err_raise(e, E_TOO_LONG, "a chat template of %zu bytes; %d is the limit", n,
                         MAX_TEMPLATE_BYTES);
    s->chat_template = arena_strndup(&s->arena, text, n);
    s->chat_template_bytes = n;
    return s->chat_template ? 0 : err_raise(e, E_NOMEM, "no memory for the chat template");
}

/* A string, or a list of {name, template} of which "default" counts. */
static const char *template_in(json_t *config) {
    json_t *v = json_object_get(config, "chat_template"), *entry;
    if (json_is_string(v)) return json_string_value(v);
    for (size_t i = 0; i < json_array_size(v); i++) {
        entry = json_array_get(v, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(entry, "template"));
    }
    return NULL;
}

static int read_tokenizer_config(struct model_source *s, const char *path, struct err *e) {
    struct file f;
    int rc = file_read(&f, path, MAX_TOKENIZER_CONFIG_BYTES, e);
    if (rc) return rc;
    json_t *root;
    rc = json__parse_object(&root, f.data ? (const char *)f.data : "", f.bytes, e);
    file_close(&f);
    if (rc) return err_prefix(e, rc, "%s", path);
    const char *text = template_in(root);
    rc = text ? keep(s, text, strlen(text), e) : 0;
    json_decref(root);
    return rc ? err_prefix(e, rc, "%s", path) : 0;
}

static int read_folder(struct model_source *s, struct err *e) {
    char path[4096];
    struct file f;
    snprintf(path, sizeof path, "%s/chat_template.jinja", s->folder);
    if (access(path, F_OK) == 0) {
        int rc = file_read(&f, path, MAX_TEMPLATE_BYTES, e);
        if (rc) return rc;
        rc = keep(s, f.data ? (const char *)f.data : "", f.bytes, e);
        file_close(&f);
        return rc;
    }
    snprintf(path, sizeof path, "%s/tokenizer_config.json", s->folder);
    return access(path, F_OK) == 0 ? read_tokenizer_config(s, path, e) : 0;
}

int source__find_template(struct model_source *s, struct err *e) {
    if (!s->gguf) return s->folder ? read_folder(s, e) : 0;
    struct gguf_str text;
    if (!gguf_has(s->gguf, "tokenizer.chat_template")) return 0;
    int rc = gguf_get_str(s->gguf, "tokenizer.chat_template", &text, e);
    return rc ? rc : keep(s, text.data, text.n, e);
}
