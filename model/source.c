#include "model/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/file.h"
#include "model/config_private.h"
#include "model/json_private.h"
#include "model/source_private.h"

enum {
    MAX_CONFIG_BYTES = 4 << 20,
    MAX_PATH_BYTES = 3800, /* leaves room for names inside a folder */
    ARENA_CHUNK = 1 << 16,
    ARENA_LIMIT = 1 << 26,
    SAMPLE_BYTES = 64,
};

static bool has_suffix(const char *s, const char *suffix) {
    size_t n = strlen(s), k = strlen(suffix);
    return n >= k && strcmp(s + n - k, suffix) == 0;
}

static bool exists_in(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return access(path, F_OK) == 0;
}

/* ---- What else people point at
 * ------------------------------------------------------------------- */

static int refuse_pickle(const char *path, struct err *e) {
    return err_raise(e, E_UNSUPPORTED,
                     "%s: PyTorch checkpoints are not read, since loading one can run code that it "
                     "carries; give a folder with safetensors or a GGUF file",
                     path);
}

/* A file that is no GGUF: say what it looks like. */
static int check_kind_of_file(const char *path, struct err *e) {
    static const char *const pickles[] = {".bin", ".pth", ".pt", ".ckpt"};
    struct file f;
    int rc = file_open(&f, path, 0, e);
    if (rc) return rc;
    bool gguf = f.bytes >= 4 && (memcmp(f.data, "GGUF", 4) == 0 || memcmp(f.data, "FUGG", 4) == 0);
    bool pickle = f.bytes >= 4 && (memcmp(f.data, "PK\3\4", 4) == 0 ||
                                   (f.data[0] == 0x80 && f.data[1] >= 2 && f.data[1] <= 5));
    for (size_t i = 0; i < 4 && !gguf; i++) pickle |= has_suffix(path, pickles[i]);
    file_close(&f);
    if (gguf || has_suffix(path, ".gguf")) return 0;
    if (pickle) return refuse_pickle(path, e);
    if (has_suffix(path, ".safetensors") || has_suffix(path, ".json"))
        return err_raise(e, E_UNSUPPORTED, "%s: give the folder that holds it with its config.json",
                         path);
    return 0; /* the GGUF reader names the first bytes */
}

static int refuse_split(const struct gguf *g, struct err *e) {
    int64_t n = 0;
    if (!gguf_has(g, "split.count")) return 0;
    int rc = gguf_get_int(g, "split.count", 0, 65535, &n, e);
    if (rc) return rc;
    return n > 1 ? err_raise(e, E_UNSUPPORTED,
                             "one of %lld parts of a split GGUF; merge them first", (long long)n)
                 : 0;
}

/* ---- Opening
 * ------------------------------------------------------------------------------------- */

/* What a draft says beyond its config. */
static int read_draft(struct model_source *s, struct err *e) {
    const struct model_config *c = &s->config;
    if (c->n_head < c->vocab) {
        s->head_ids = arena_take_zeroed(&s->arena, (size_t)c->n_head, sizeof *s->head_ids);
        if (!s->head_ids) return err_raise(e, E_NOMEM, "no memory for %d head ids", c->n_head);
        config__copy_head_ids(s->gguf, s->head_ids, c->n_head);
    }
    return c->borrows_embedding ? config__embedding_hash(s->gguf, &s->embedding_hash, e) : 0;
}

static int open_gguf(struct model_source *s, struct err *e) {
    int rc = check_kind_of_file(s->path, e);
    if (rc == 0) rc = (s->plan ? gguf_open_header : gguf_open)(&s->gguf, s->path, e);
    if (rc) return rc;
    s->planned_dtype = KERN_F16;
    rc = refuse_split(s->gguf, e);
    if (rc == 0) rc = model_config_from_gguf(&s->config, s->gguf, e);
    if (rc == 0) rc = read_draft(s, e);
    if (rc == 0) rc = source__map_tensors(s, e);
    if (rc == 0) rc = source__find_template(s, e);
    return rc ? err_prefix(e, rc, "%s", s->path) : 0;
}

static int read_dtype(const char *key, const json_t *value, enum kern_dtype *out, struct err *e) {
    static const struct {
        const char *name;
        enum kern_dtype type;
    } names[] = {{"float32", KERN_F32},   {"float", KERN_F32},   {"auto", KERN_F32},
                 {"bfloat16", KERN_BF16}, {"float16", KERN_F16}, {"half", KERN_F16}};
    const char *type = json_string_value(value);
    *out = KERN_F32;
    if (!value || json_is_null(value)) return 0;
    if (!type)
        return err_raise(e, E_FORMAT, "%s is no string; expected \"bfloat16\" or the like", key);
    if (!strncmp(type, "torch.", 6)) type += 6;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(type, names[i].name) != 0) continue;
        *out = names[i].type;
        return 0;
    }
    return err_raise(e, E_UNSUPPORTED, "%s is \"%.40s\": not one of float32, float16, bfloat16",
                     key, type);
}

/* The type that a config.json promises for its weights: torch_dtype, dtype in newer files; f32 as
 * in transformers where neither is there. */
static int promised_dtype(const struct file *config, enum kern_dtype *out, struct err *e) {
    json_t *root;
    int rc = json__parse_object(&root, (const char *)config->data, config->bytes, e);
    if (rc) return rc;
    const char *key = "torch_dtype";
    const json_t *value = json_object_get(root, key);
    if (!value || json_is_null(value)) value = json_object_get(root, key = "dtype");
    rc = read_dtype(key, value, out, e);
    json_decref(root);
    return rc;
}

static int read_config(struct model_source *s, const char *path, struct err *e) {
    struct file f;
    int rc = file_read(&f, path, MAX_CONFIG_BYTES, e);
    if (rc) return rc;
    const char *text = f.data ? (const char *)f.data : "";
    rc = model_config_from_json(&s->config, text, f.bytes, e);
    if (rc == 0) rc = promised_dtype(&f, &s->planned_dtype, e);
    if (rc == 0) s->fingerprint = XXH3_64bits(text, f.bytes);
    else err_prefix(e, rc, "%s", path);
    file_close(&f);
    return rc;
}

static int open_folder(struct model_source *s, struct err *e) {
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", s->folder);
    if (access(path, F_OK) != 0)
        return err_raise(e, E_NOT_FOUND,
                         "%s: no config.json in it; give a GGUF file or a Hugging Face folder",
                         s->folder);
    int rc = read_config(s, path, e);
    if (rc) return rc;
    rc = safetensors_open(&s->tensors, s->folder, e);
    if (rc == E_NOT_FOUND && !s->tensors) {
        bool pickle = exists_in(s->folder, "pytorch_model.bin") ||
                      exists_in(s->folder, "pytorch_model.bin.index.json") ||
                      exists_in(s->folder, "consolidated.00.pth");
        if (!s->plan) return pickle ? refuse_pickle(s->folder, e) : rc;
        rc = 0;
    }
    if (rc == 0) rc = source__map_tensors(s, e);
    if (rc) return err_prefix(e, rc, "%s", s->folder);
    return source__find_template(s, e);
}

static int open_config_alone(struct model_source *s, struct err *e) {
    int rc = read_config(s, s->path, e);
    if (rc == 0) rc = source__map_tensors(s, e);
    return rc;
}

/* Headers, sizes, and the first bytes of each tensor, so that two trainings of one shape differ. */
static void fingerprint(struct model_source *s) {
    uint64_t h = s->fingerprint + s->dummy;
    if (s->gguf && gguf_file(s->gguf)->data) {
        const struct file *f = gguf_file(s->gguf);
        h = XXH3_64bits_withSeed(f->data, gguf_header_bytes(s->gguf), h);
    }
    for (int i = 0; s->tensors && i < safetensors_n_shards(s->tensors); i++) {
        size_t n;
        const struct file *f = safetensors_shard(s->tensors, i, &n);
        h = XXH3_64bits_withSeed(f->data, n, h);
    }
    for (size_t i = 0; i < s->n_views; i++) {
        const struct tensor_view *v = &s->views[i];
        uint64_t n = v->bytes;
        h = XXH3_64bits_withSeed(&n, sizeof n, h);
        if (v->data) h = XXH3_64bits_withSeed(v->data, min_size(v->bytes, SAMPLE_BYTES), h);
    }
    s->fingerprint = h;
}

/* The last word of a path, without config.json: a name for a model that has none. */
static void name_from_path(char *out, size_t room, const char *path) {
    static const char config[] = "/config.json";
    size_t n = strlen(path), begin;
    if (has_suffix(path, config)) n -= sizeof config - 1;
    while (n > 1 && path[n - 1] == '/') n--;
    for (begin = n; begin > 0 && path[begin - 1] != '/';) begin--;
    snprintf(out, room, "%.*s", (int)(n - begin), path + begin);
}

/* Whoever shows the name says that the weights are random. */
static void mark_name(struct model_source *s) {
    static const char mark[] = " (random weights)";
    char *name = s->config.name;
    size_t room = sizeof s->config.name - sizeof mark, n;
    if (!name[0]) name_from_path(name, room + 1, s->path);
    n = strlen(name);
    for (; n > room || (n > 0 && ((unsigned char)name[n] & 0xc0) == 0x80);) n--; /* whole letters */
    memcpy(name + n, mark, sizeof mark);
}

/* `how`: plan, dummy and dummy_type are taken from it. */
static int open_any(struct model_source **out, const char *path, const struct model_source *how,
                    struct err *e) {
    *out = NULL;
    struct stat st;
    if (strlen(path) > MAX_PATH_BYTES) return err_raise(e, E_TOO_LONG, "the path %.100s...", path);
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    struct model_source *s = calloc(1, sizeof *s);
    if (!s) return err_raise(e, E_NOMEM, "no memory for a model source");
    arena_init(&s->arena, ARENA_CHUNK, ARENA_LIMIT);
    s->plan = how->plan;
    s->dummy = how->dummy;
    s->dummy_type = how->dummy_type;
    s->path = arena_strndup(&s->arena, path, strlen(path));
    if (folder) s->folder = s->path;
    int rc;
    if (!s->path) rc = err_raise(e, E_NOMEM, "no memory for a path");
    else if (folder) rc = open_folder(s, e);
    else if (s->plan && has_suffix(path, ".json")) rc = open_config_alone(s, e);
    else rc = open_gguf(s, e);
    if (rc) {
        model_source_close(s);
        return rc;
    }
    fingerprint(s);
    if (s->dummy) mark_name(s);
    *out = s;
    return 0;
}

int model_source_open(struct model_source **out, const char *path, struct err *e) {
    const struct model_source how = {0};
    return open_any(out, path, &how, e);
}

int model_source_plan_only(struct model_source **out, const char *path, struct err *e) {
    const struct model_source how = {.plan = true};
    return open_any(out, path, &how, e);
}

int model_source_open_dummy(struct model_source **out, const char *path, enum kern_dtype type,
                            struct err *e) {
    const struct model_source how = {.plan = true, .dummy = true, .dummy_type = type};
    return open_any(out, path, &how, e);
}

void model_source_close(struct model_source *s) {
    if (!s) return;
    gguf_close(s->gguf);
    safetensors_close(s->tensors);
    arena_deinit(&s->arena);
    free(s);
}

/* ---- Questions
 * ----------------------------------------------------------------------------------- */

const struct model_config *model_source_config(const struct model_source *s) {
    return &s->config;
}
const char *model_source_path(const struct model_source *s) {
    return s->path;
}
bool model_source_has_weights(const struct model_source *s) {
    return s->has_weights;
}
bool model_source_is_dummy(const struct model_source *s) {
    return s->dummy;
}
size_t model_source_n_tensors(const struct model_source *s) {
    return s->n_views;
}
uint64_t model_source_n_params(const struct model_source *s) {
    return s->n_params;
}
size_t model_source_bytes(const struct model_source *s) {
    return s->bytes;
}
const int32_t *model_source_head_ids(const struct model_source *s) {
    return s->head_ids;
}
uint64_t model_source_embedding_hash(const struct model_source *s) {
    return s->embedding_hash;
}
const struct gguf *model_source_gguf(const struct model_source *s) {
    return s->gguf;
}
const char *model_source_folder(const struct model_source *s) {
    return s->folder;
}
uint64_t model_source_fingerprint(const struct model_source *s) {
    return s->fingerprint;
}

const struct tensor_view *model_source_tensor_at(const struct model_source *s, size_t idx) {
    return idx < s->n_views ? &s->views[idx] : NULL;
}

const char *model_source_chat_template(const struct model_source *s, size_t *n) {
    *n = s->chat_template_bytes;
    return s->chat_template;
}
