/* Tokenizers out of a Hugging Face folder: tokenizer.json (source: its reader in the tokenizers
 * project), tokenizer_config.json for the names of bos and eos, generation_config.json for the ids
 * that end an answer. */
#include "model/tokenizer_hf.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { MAX_JSON_BYTES = 1 << 26, MAX_CONFIG_BYTES = 1 << 22, MAX_PATH_BYTES = 4096 };

/* One id's entry while vocab and added_tokens are brought together. */
struct entry {
    const char *text; /* belongs to the JSON; NULL: no token has this id */
    size_t n;
    uint8_t type, flags;
};

static int parse(json_t **out, const char *bytes, size_t n, const char *what, struct err *e) {
    json_error_t bad;
    *out = json_loadb(bytes, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &bad);
    if (!*out)
        return err_raise(e, json_error_code(&bad) == json_error_out_of_memory ? E_NOMEM : E_FORMAT,
                         "%s: line %d column %d: %s", what, bad.line, bad.column, bad.text);
    if (json_is_object(*out)) return 0;
    json_decref(*out);
    *out = NULL;
    return err_raise(e, E_FORMAT, "%s: not an object", what);
}

static int read_model(struct tokenizer *t, json_t *model, struct err *e) {
    const char *type = tokenizer_hf_str(model, "type");
    /* Old files leave the type out; only BPE has merges. */
    if (type ? strcmp(type, "BPE") != 0 : !json_object_get(model, "merges"))
        return err_raise(e, E_UNSUPPORTED, "tokenizer.json: model.type = '%.100s' (known: BPE)",
                         type ? type : "(missing)");
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++) {
        const char *affix = tokenizer_hf_str(model, affixes[i]);
        if (affix && *affix)
            return err_raise(e, E_UNSUPPORTED, "tokenizer.json: model.%s = '%.100s'", affixes[i],
                             affix);
    }
    if (json_number_value(json_object_get(model, "dropout")) != 0)
        return err_raise(e, E_UNSUPPORTED, "tokenizer.json: model.dropout");
    t->ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    t->byte_fallback = json_is_true(json_object_get(model, "byte_fallback"));
    t->fuse_unknown = json_is_true(json_object_get(model, "fuse_unk"));
    if (t->byte_fallback && t->algorithm == ALGORITHM_BYTE_BPE)
        return err_raise(e, E_UNSUPPORTED, "tokenizer.json: byte_fallback beside ByteLevel");
    return 0;
}

/* Highest id named anywhere, checked against how many entries there are. */
static int highest_id(json_t *vocab, json_t *added, size_t *n, struct err *e) {
    size_t count = json_object_size(vocab) + json_array_size(added);
    json_int_t max = -1;
    const char *text;
    json_t *value;
    json_object_foreach(vocab, text, value) {
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return err_raise(e, E_FORMAT, "tokenizer.json: id of '%.100s' is no number >= 0", text);
        if (json_integer_value(value) > max) max = json_integer_value(value);
    }
    for (size_t i = 0; i < json_array_size(added); i++) {
        json_t *id = json_object_get(json_array_get(added, i), "id");
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return err_raise(e, E_FORMAT, "tokenizer.json: added_tokens[%zu].id is no number >= 0",
                             i);
        if (json_integer_value(id) > max) max = json_integer_value(id);
    }
    if (max >= VOCAB_MAX_TOKENS || max >= (json_int_t)(4 * count + 1024))
        return err_raise(e, E_FORMAT, "tokenizer.json: id %lld among %zu tokens (at most %d)",
                         (long long)max, count, VOCAB_MAX_TOKENS);
    *n = (size_t)(max + 1);
    return 0;
}

static int place_vocab(const struct tokenizer *t, json_t *vocab, struct entry *entries,
                       struct err *e) {
    const char *text;
    json_t *value;
    json_object_foreach(vocab, text, value) {
        struct entry *entry = &entries[json_integer_value(value)];
        if (entry->text)
            return err_raise(e, E_FORMAT, "tokenizer.json: '%.100s' and '%.100s' both have id %lld",
                             entry->text, text, (long long)json_integer_value(value));
        *entry = (struct entry){text, strlen(text), TOKEN_NORMAL, 0};
        if (t->byte_fallback && vocab_parse_byte(entry->text, entry->n) >= 0)
            entry->type = TOKEN_BYTE;
    }
    return 0;
}

static int place_added(json_t *added, struct entry *entries, struct err *e) {
    for (size_t i = 0; i < json_array_size(added); i++) {
        json_t *token = json_array_get(added, i), *content = json_object_get(token, "content");
        const char *text = json_string_value(content);
        size_t n = json_string_length(content);
        if (!text || n == 0)
            return err_raise(e, E_FORMAT, "tokenizer.json: added_tokens[%zu] has no content", i);
        struct entry *entry = &entries[json_integer_value(json_object_get(token, "id"))];
        if (entry->text && (entry->n != n || memcmp(entry->text, text, n) != 0))
            return err_raise(e, E_FORMAT,
                             "tokenizer.json: added token '%.100s' has the id of '%.100s'", text,
                             entry->text);
        if (json_is_true(json_object_get(token, "single_word")))
            return err_raise(e, E_UNSUPPORTED,
                             "tokenizer.json: added token '%.100s' is single_word", text);
        int type =
            json_is_true(json_object_get(token, "special")) ? TOKEN_CONTROL : TOKEN_USER_DEFINED;
        *entry = (struct entry){text, n, (uint8_t)tokenizer__type(text, n, type), 0};
        if (json_is_true(json_object_get(token, "lstrip"))) entry->flags |= ADDED_LSTRIP;
        if (json_is_true(json_object_get(token, "rstrip"))) entry->flags |= ADDED_RSTRIP;
    }
    return 0;
}

/* Fill t->vocab; `flags` (heap, the caller's) gets the ADDED_* flags by id. */
static int read_vocab(struct tokenizer *t, json_t *root, uint8_t **flags, struct err *e) {
    json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
    json_t *added = json_object_get(root, "added_tokens");
    if (!json_is_object(vocab))
        return err_raise(e, E_FORMAT, "tokenizer.json: model.vocab is missing");
    size_t n = 0;
    int rc = highest_id(vocab, added, &n, e);
    if (rc) return rc;
    struct entry *entries = calloc(n + 1, sizeof *entries);
    *flags = calloc(n + 1, 1);
    if (!entries || !*flags) rc = err_raise(e, E_NOMEM, "%zu tokens", n);
    if (!rc) rc = place_vocab(t, vocab, entries, e);
    if (!rc) rc = place_added(added, entries, e);
    for (size_t i = 0; i < n && !rc; i++) {
        const struct entry *entry = &entries[i];
        (*flags)[i] = entry->flags;
        if (entry->text)
            rc = vocab_add(&t->vocab, entry->text, entry->n, entry->type, 0,
                           t->algorithm == ALGORITHM_BYTE_BPE, e);
        else rc = vocab_add(&t->vocab, "", 0, TOKEN_UNUSED, 0, false, e);
    }
    free(entries);
    if (!rc) rc = tokenizer__index(t, e);
    if (rc) return err_prefix(e, rc, "tokenizer.json");
    const char *unknown = tokenizer_hf_str(model, "unk_token");
    if (unknown && (t->unknown = tokenizer_find(t, unknown)) < 0)
        return err_raise(e, E_FORMAT, "tokenizer.json: unk_token '%.100s' is no token", unknown);
    return 0;
}

static int read_merges(struct tokenizer *t, json_t *merges, struct err *e) {
    if (!json_is_array(merges))
        return err_raise(e, E_FORMAT, "tokenizer.json: model.merges is missing");
    size_t n = json_array_size(merges);
    int rc = bpe_init(&t->bpe, n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        json_t *merge = json_array_get(merges, i);
        const char *left, *right;
        size_t left_n, right_n;
        if (json_is_string(merge)) {
            size_t len = json_string_length(merge);
            left = json_string_value(merge);
            const char *space = len > 2 ? memchr(left + 1, ' ', len - 1) : NULL;
            if (!space)
                return err_raise(e, E_FORMAT, "tokenizer.json: merge %zu is '%.100s'", i, left);
            left_n = (size_t)(space - left);
            right = space + 1;
            right_n = len - left_n - 1;
        } else {
            json_t *a = json_array_get(merge, 0), *b = json_array_get(merge, 1);
            if (json_array_size(merge) != 2 || !json_is_string(a) || !json_is_string(b))
                return err_raise(e, E_FORMAT, "tokenizer.json: merge %zu is no pair of strings", i);
            left = json_string_value(a);
            left_n = json_string_length(a);
            right = json_string_value(b);
            right_n = json_string_length(b);
        }
        rc = tokenizer__add_merge(t, i, left, left_n, right, right_n, e);
    }
    return rc ? err_prefix(e, rc, "tokenizer.json") : 0;
}

/* "bos_token": null, "<s>" or {"content": "<s>"}. */
static int named_token(const struct tokenizer *t, json_t *config, const char *key, int *id,
                       struct err *e) {
    json_t *value = json_object_get(config, key);
    const char *text =
        json_is_object(value) ? tokenizer_hf_str(value, "content") : json_string_value(value);
    if (!text) return 0;
    *id = tokenizer_find(t, text);
    if (*id < 0)
        return err_raise(e, E_FORMAT, "tokenizer_config.json: %s '%.100s' is no token", key, text);
    return 0;
}

static int read_special(struct tokenizer *t, json_t *root, json_t *config, struct err *e) {
    const char *before, *after;
    int rc = tokenizer_hf_template(root, &before, &after, e);
    if (!rc) rc = named_token(t, config, "bos_token", &t->bos, e);
    if (!rc) rc = named_token(t, config, "eos_token", &t->eos, e);
    if (rc) return rc;
    int first = before ? tokenizer_find(t, before) : -1,
        last = after ? tokenizer_find(t, after) : -1;
    if ((before && first < 0) || (after && last < 0))
        return err_raise(e, E_FORMAT,
                         "tokenizer.json: post_processor adds '%.100s', which is no token",
                         before && first < 0 ? before : after);
    if (first >= 0) t->bos = first;
    if (last >= 0) t->eos = last;
    json_t *add_bos = json_object_get(config, "add_bos_token");
    json_t *add_eos = json_object_get(config, "add_eos_token");
    t->add_bos = t->bos >= 0 && (json_is_boolean(add_bos) ? json_is_true(add_bos) : first >= 0);
    t->add_eos = t->eos >= 0 && (json_is_boolean(add_eos) ? json_is_true(add_eos) : last >= 0);
    return 0;
}

static int add_eog(struct tokenizer *t, json_t *id, struct err *e) {
    if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) >= t->vocab.n)
        return err_raise(e, E_FORMAT,
                         "generation_config.json: eos_token_id %lld, the vocabulary has %d",
                         (long long)json_integer_value(id), t->vocab.n);
    if (!tokenizer__add_eog(t, (int)json_integer_value(id)))
        return err_raise(e, E_FORMAT, "generation_config.json: more than %d ids in eos_token_id",
                         TOKENIZER_MAX_EOG);
    return 0;
}

static int read_eog(struct tokenizer *t, json_t *generation, struct err *e) {
    json_t *ids = json_object_get(generation, "eos_token_id");
    int rc = 0;
    if (json_is_array(ids))
        for (size_t i = 0; i < json_array_size(ids) && !rc; i++)
            rc = add_eog(t, json_array_get(ids, i), e);
    else if (ids && !json_is_null(ids)) rc = add_eog(t, ids, e);
    if (rc) return rc;
    (void)tokenizer__add_eog(t, t->eos);
    tokenizer__add_known_eog(t);
    return 0;
}

int tokenizer__open_hf_bytes(struct tokenizer **out, const char *json, size_t n, const char *config,
                             size_t config_n, const char *generation, size_t generation_n,
                             struct err *e) {
    json_t *root = NULL, *config_root = NULL, *generation_root = NULL;
    uint8_t *flags = NULL;
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t) return err_raise(e, E_NOMEM, "tokenizer");
    t->bos = t->eos = t->unknown = t->padding = -1;
    int rc = parse(&root, json, n, "tokenizer.json", e);
    if (!rc && config) rc = parse(&config_root, config, config_n, "tokenizer_config.json", e);
    if (!rc && generation)
        rc = parse(&generation_root, generation, generation_n, "generation_config.json", e);
    if (!rc) rc = tokenizer_hf_steps(t, root, e);
    json_t *model = json_object_get(root, "model");
    if (!rc) rc = read_model(t, model, e);
    if (!rc) rc = read_vocab(t, root, &flags, e);
    if (!rc) rc = read_merges(t, json_object_get(model, "merges"), e);
    if (!rc) rc = read_special(t, root, config_root, e);
    if (!rc) rc = read_eog(t, generation_root, e);
    if (!rc) rc = tokenizer__finish(t, flags, e);
    free(flags);
    json_decref(root);
    json_decref(config_root);
    json_decref(generation_root);
    if (rc) {
        tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

/* Read folder/name; a file that is not there leaves `f` zeroed, unless it is required. */
static int read_file(struct file *f, const char *folder, const char *name, size_t limit,
                     bool required, struct err *e) {
    char path[MAX_PATH_BYTES];
    size_t folder_n = strlen(folder);
    if (folder_n + strlen(name) + 2 > sizeof path)
        return err_raise(e, E_TOO_LONG, "path of %s", name);
    memcpy(path, folder, folder_n);
    path[folder_n] = '/';
    memcpy(path + folder_n + 1, name, strlen(name) + 1);
    struct err missing = {0};
    int rc = file_read(f, path, limit, &missing);
    if (rc == E_NOT_FOUND && !required) return 0;
    return rc ? err_raise(e, rc, "%s", missing.message) : 0;
}

int tokenizer_open_hf(struct tokenizer **out, const char *folder, struct err *e) {
    struct file json = {0}, config = {0}, generation = {0};
    int rc = read_file(&json, folder, "tokenizer.json", MAX_JSON_BYTES, true, e);
    if (!rc) rc = read_file(&config, folder, "tokenizer_config.json", MAX_CONFIG_BYTES, false, e);
    if (!rc)
        rc = read_file(&generation, folder, "generation_config.json", MAX_CONFIG_BYTES, false, e);
    if (!rc) {
        rc = tokenizer__open_hf_bytes(out, (const char *)json.data, json.bytes,
                                      (const char *)config.data, config.bytes,
                                      (const char *)generation.data, generation.bytes, e);
        if (rc) err_prefix(e, rc, "%s", folder);
    }
    file_close(&json);
    file_close(&config);
    file_close(&generation);
    return rc;
}
