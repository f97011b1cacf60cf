#include "model/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/file.h"
#include "model/json_private.h"

enum {
    MAX_HEADER_BYTES = 100000000, /* the format's own limit */
    MAX_INDEX_BYTES = 64 << 20,
    MAX_TENSORS = 1 << 20,
    MAX_SHARD_NAME = 255,
    LENGTH_BYTES = 8,
};

/* Every type of the format: recorded, so that sizes can be checked; few can be computed with. */
static const struct {
    const char *name;
    unsigned bits;
    int dtype; /* enum kern_dtype, -1: none of ours */
} types[] = {
    {"F32", 32, KERN_F32}, {"F16", 16, KERN_F16}, {"BF16", 16, KERN_BF16}, {"F64", 64, -1},
    {"I64", 64, -1},       {"I32", 32, -1},       {"I16", 16, -1},         {"I8", 8, -1},
    {"U64", 64, -1},       {"U32", 32, -1},       {"U16", 16, -1},         {"U8", 8, -1},
    {"BOOL", 8, -1},       {"F8_E5M2", 8, -1},    {"F8_E4M3", 8, -1},      {"F8_E8M0", 8, -1},
    {"F6_E2M3", 6, -1},    {"F6_E3M2", 6, -1},    {"F4", 4, -1},           {"C64", 64, -1},
};

struct shard {
    struct file file; /* zero where the caller owns the bytes */
    size_t header_bytes;
};

struct safetensors {
    struct arena names;
    struct shard *shards;
    int n_shards;
    struct safetensors_tensor *tensors;
    uint32_t *order; /* sorted by name */
    size_t n_tensors, cap;
    struct metadata {
        const char *key, *value;
    } * metadata;
    size_t n_metadata, metadata_cap;
};

/* ---- JSON with a bounded cost ---- */

static bool read_u64(const json_t *v, uint64_t *out) {
    if (!json_is_integer(v) || json_integer_value(v) < 0) return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

/* ---- One header entry ---- */

static int read_type(struct safetensors_tensor *t, json_t *entry, unsigned *bits, struct err *e) {
    const char *name = json_string_value(json_object_get(entry, "dtype"));
    for (size_t i = 0; name && i < sizeof types / sizeof *types; i++)
        if (strcmp(name, types[i].name) == 0) {
            t->type = types[i].name;
            *bits = types[i].bits;
            return 0;
        }
    return err_raise(e, name ? E_UNSUPPORTED : E_FORMAT, "tensor %.100s: dtype %.20s is unknown",
                     t->name, name ? name : "(none)");
}

static int read_shape(struct safetensors_tensor *t, json_t *entry, size_t *n, struct err *e) {
    json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape)) return err_raise(e, E_FORMAT, "tensor %.100s: no shape", t->name);
    if (json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return err_raise(e, E_FORMAT, "tensor %.100s: %zu dimensions; %d is the limit", t->name,
                         json_array_size(shape), SAFETENSORS_MAX_DIMS);
    t->n_dims = (int)json_array_size(shape);
    *n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        if (!read_u64(json_array_get(shape, (size_t)i), &t->dims[i]))
            return err_raise(e, E_FORMAT, "tensor %.100s: dimension %d is no count", t->name, i);
        if (!checked_mul(*n, (size_t)t->dims[i], n))
            return err_raise(e, E_FORMAT, "tensor %.100s: the shape is too large", t->name);
    }
    return 0;
}

/* `buffer` is what follows the header. */
static int read_entry(struct safetensors_tensor *t, json_t *entry, const uint8_t *buffer,
                      size_t buffer_bytes, struct err *e) {
    unsigned bits = 0;
    size_t n = 0, total_bits = 0;
    uint64_t begin, end;
    if (!json_is_object(entry))
        return err_raise(e, E_FORMAT, "tensor %.100s: the entry is no object", t->name);
    int rc = read_type(t, entry, &bits, e);
    if (rc == 0) rc = read_shape(t, entry, &n, e);
    if (rc) return rc;
    json_t *offsets = json_object_get(entry, "data_offsets");
    if (json_array_size(offsets) != 2 || !read_u64(json_array_get(offsets, 0), &begin) ||
        !read_u64(json_array_get(offsets, 1), &end))
        return err_raise(e, E_FORMAT, "tensor %.100s: data_offsets are no two counts", t->name);
    if (begin > end || end > buffer_bytes)
        return err_raise(e, E_FORMAT,
                         "tensor %.100s: data_offsets %llu..%llu, the file has %zu bytes of data "
                         "(truncated?)",
                         t->name, (unsigned long long)begin, (unsigned long long)end, buffer_bytes);
    if (!checked_mul(n, bits, &total_bits) || total_bits % 8 || total_bits / 8 != end - begin)
        return err_raise(e, E_FORMAT, "tensor %.100s: %llu bytes for %zu values of %s", t->name,
                         (unsigned long long)(end - begin), n, t->type);
    t->data = buffer + begin;
    t->bytes = (size_t)(end - begin);
    return 0;
}

static int read_metadata(struct safetensors *s, json_t *metadata, struct err *e) {
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) return err_raise(e, E_FORMAT, "__metadata__ is no object");
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value))
            return err_raise(e, E_FORMAT, "__metadata__: %.100s is no string", key);
        if (s->n_metadata == s->metadata_cap) {
            size_t cap = s->metadata_cap ? s->metadata_cap * 2 : 16;
            void *p = realloc(s->metadata, cap * sizeof *s->metadata);
            if (!p) return err_raise(e, E_NOMEM, "no memory for metadata");
            s->metadata = p;
            s->metadata_cap = cap;
        }
        struct metadata *m = &s->metadata[s->n_metadata];
        m->key = arena_strndup(&s->names, key, strlen(key));
        m->value = arena_strndup(&s->names, json_string_value(value), json_string_length(value));
        if (!m->key || !m->value) return err_raise(e, E_NOMEM, "no memory for metadata");
        s->n_metadata++;
    }
    return 0;
}

/* ---- One file ---- */

static int compare_place(const void *a, const void *b) {
    const struct safetensors_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* empty ones first */
}

/* Tensors [from, n_tensors) must fill the buffer: sorted by place, each begins where the last
 * ended. */
static int check_cover(struct safetensors *s, size_t from, const uint8_t *buffer, size_t bytes,
                       struct err *e) {
    size_t n = s->n_tensors - from;
    if (n > 0) qsort(s->tensors + from, n, sizeof *s->tensors, compare_place);
    const uint8_t *at = buffer;
    for (size_t i = from; i < s->n_tensors; i++) {
        const struct safetensors_tensor *t = &s->tensors[i];
        if (t->data < at)
            return err_raise(e, E_FORMAT, "tensor %.100s overlaps the one before it", t->name);
        if (t->data > at)
            return err_raise(e, E_FORMAT, "a hole of %zu bytes before tensor %.100s",
                             (size_t)(t->data - at), t->name);
        at += t->bytes;
    }
    if (at != buffer + bytes)
        return err_raise(e, E_FORMAT, "%zu bytes behind the last tensor",
                         (size_t)(buffer + bytes - at));
    return 0;
}

static int add_tensor(struct safetensors *s, const char *name, json_t *entry, const uint8_t *buffer,
                      size_t bytes, struct err *e) {
    if (s->n_tensors == MAX_TENSORS)
        return err_raise(e, E_TOO_LONG, "more than %d tensors", MAX_TENSORS);
    if (s->n_tensors == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 256;
        void *p = realloc(s->tensors, cap * sizeof *s->tensors);
        if (!p) return err_raise(e, E_NOMEM, "no memory for %zu tensors", cap);
        s->tensors = p;
        s->cap = cap;
    }
    struct safetensors_tensor *t = &s->tensors[s->n_tensors];
    memset(t, 0, sizeof *t);
    t->shard = s->n_shards;
    t->name = arena_strndup(&s->names, name, strlen(name));
    if (!t->name) return err_raise(e, E_NOMEM, "no memory for tensor names");
    int rc = read_entry(t, entry, buffer, bytes, e);
    if (rc == 0) s->n_tensors++;
    return rc;
}

static int read_header(struct safetensors *s, const uint8_t *data, size_t n, size_t *header_bytes,
                       struct err *e) {
    uint64_t length = 0;
    if (n < LENGTH_BYTES) return err_raise(e, E_FORMAT, "%zu bytes are no safetensors file", n);
    for (int i = 0; i < LENGTH_BYTES; i++) length |= (uint64_t)data[i] << 8 * i;
    if (length > MAX_HEADER_BYTES || length > n - LENGTH_BYTES)
        return err_raise(e, E_FORMAT,
                         "a header of %llu bytes in a file of %zu (the limit is %d; truncated?)",
                         (unsigned long long)length, n, MAX_HEADER_BYTES);
    const char *text = (const char *)data + LENGTH_BYTES;
    if (length == 0 || text[0] != '{')
        return err_raise(e, E_FORMAT, "no safetensors file: the header does not begin with {");
    *header_bytes = LENGTH_BYTES + (size_t)length;
    const uint8_t *buffer = data + *header_bytes;
    size_t bytes = n - *header_bytes, from = s->n_tensors;
    json_t *root, *entry;
    const char *name;
    int rc = json__parse_object(&root, text, (size_t)length, e);
    if (rc) return rc;
    json_object_foreach(root, name, entry) {
        if (strcmp(name, "__metadata__") == 0) rc = read_metadata(s, entry, e);
        else rc = add_tensor(s, name, entry, buffer, bytes, e);
        if (rc) break;
    }
    json_decref(root);
    return rc ? rc : check_cover(s, from, buffer, bytes, e);
}

static int add_file(struct safetensors *s, const char *path, struct err *e) {
    if (s->n_shards == SAFETENSORS_MAX_SHARDS)
        return err_raise(e, E_TOO_LONG, "more than %d shards", SAFETENSORS_MAX_SHARDS);
    struct shard *shard = &s->shards[s->n_shards];
    int rc = file_open(&shard->file, path, 0, e);
    if (rc) return rc;
    static const uint8_t none;
    const uint8_t *data = shard->file.data ? shard->file.data : &none;
    rc = read_header(s, data, shard->file.bytes, &shard->header_bytes, e);
    s->n_shards++; /* closed with the rest */
    return rc ? err_prefix(e, rc, "%s", path) : 0;
}

/* ---- Lookup ---- */

static int compare_names(const void *a, const void *b, void *arg) {
    const struct safetensors_tensor *t = arg;
    return strcmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

/* Build the index; the same name in two shards is an error. */
static int sort_names(struct safetensors *s, struct err *e) {
    s->order = malloc((s->n_tensors + 1) * sizeof *s->order);
    if (!s->order) return err_raise(e, E_NOMEM, "no memory for %zu tensors", s->n_tensors);
    for (size_t i = 0; i < s->n_tensors; i++) s->order[i] = (uint32_t)i;
    qsort_r(s->order, s->n_tensors, sizeof *s->order, compare_names, s->tensors);
    for (size_t i = 1; i < s->n_tensors; i++) {
        const char *name = s->tensors[s->order[i]].name;
        if (strcmp(s->tensors[s->order[i - 1]].name, name) == 0)
            return err_raise(e, E_FORMAT, "tensor %.100s is in two shards", name);
    }
    return 0;
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *s, const char *name) {
    size_t lo = 0, hi = s->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct safetensors_tensor *t = &s->tensors[s->order[mid]];
        int c = strcmp(t->name, name);
        if (c == 0) return t;
        if (c < 0) lo = mid + 1;
        else hi = mid;
    }
    return NULL;
}

/* ---- A folder of shards ---- */

static int check_shard_name(const char *name, struct err *e) {
    size_t n = strlen(name), suffix = strlen(".safetensors");
    if (n <= suffix || n > MAX_SHARD_NAME || strchr(name, '/') || strstr(name, "..") ||
        strcmp(name + n - suffix, ".safetensors") != 0)
        return err_raise(e, E_FORMAT, "weight_map names the shard \"%.100s\": refused", name);
    return 0;
}

/* Open the shard of the weight_map's entry unless it is open; `shards` maps names to numbers. */
static int add_shard(struct safetensors *s, json_t *shards, const char *folder, const char *name,
                     struct err *e) {
    char path[4096];
    if (json_object_get(shards, name)) return 0;
    int rc = check_shard_name(name, e);
    if (rc) return rc;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return err_raise(e, E_TOO_LONG, "the path of shard %s", name);
    if (json_object_set_new(shards, name, json_integer(s->n_shards)) != 0)
        return err_raise(e, E_NOMEM, "no memory for shard names");
    return add_file(s, path, e);
}

static int read_weight_map(struct safetensors *s, json_t *map, const char *folder, struct err *e) {
    const char *name;
    json_t *value, *shards = json_object();
    int rc = 0;
    if (!shards) return err_raise(e, E_NOMEM, "no memory for shard names");
    if (!json_is_object(map)) rc = err_raise(e, E_FORMAT, "weight_map is no object");
    json_object_foreach(map, name, value) {
        if (!json_is_string(value))
            rc = err_raise(e, E_FORMAT, "weight_map: %.100s has no file name", name);
        if (rc == 0) rc = add_shard(s, shards, folder, json_string_value(value), e);
        if (rc) break;
    }
    if (rc == 0) rc = sort_names(s, e);
    if (rc == 0) json_object_foreach(map, name, value) {
            const struct safetensors_tensor *t = safetensors_find(s, name);
            const char *shard = json_string_value(value);
            if (t && json_integer_value(json_object_get(shards, shard)) == t->shard) continue;
            rc = err_raise(e, E_FORMAT, "tensor %.100s is not in %.100s, where weight_map puts it",
                           name, shard);
            break;
        }
    json_decref(shards);
    return rc;
}

static int open_index(struct safetensors *s, const char *folder, const char *path, struct err *e) {
    struct file f;
    json_t *root;
    int rc = file_read(&f, path, MAX_INDEX_BYTES, e);
    if (rc) return rc;
    rc = json__parse_object(&root, f.data ? (const char *)f.data : "", f.bytes, e);
    file_close(&f);
    if (rc == 0) {
        rc = read_weight_map(s, json_object_get(root, "weight_map"), folder, e);
        json_decref(root);
    }
    return rc ? err_prefix(e, rc, "%s", path) : 0;
}

static int open_folder(struct safetensors *s, const char *folder, struct err *e) {
    char path[4096], index[4096];
    int n = snprintf(path, sizeof path, "%s/model.safetensors", folder);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", folder);
    if (n >= (int)sizeof path - 16) return err_raise(e, E_TOO_LONG, "the path %.100s...", folder);
    if (access(path, F_OK) == 0) {
        int rc = add_file(s, path, e);
        return rc ? rc : sort_names(s, e);
    }
    if (access(index, F_OK) == 0) return open_index(s, folder, index, e);
    return err_raise(e, E_NOT_FOUND,
                     "%s: neither model.safetensors nor model.safetensors.index.json", folder);
}

/* ---- Open and close
 * ------------------------------------------------------------------------------ */

static struct safetensors *allocate(struct err *e) {
    struct safetensors *s = calloc(1, sizeof *s);
    if (s) s->shards = calloc(SAFETENSORS_MAX_SHARDS, sizeof *s->shards);
    if (s && s->shards) {
        arena_init(&s->names, 1 << 16, (size_t)1 << 30);
        return s;
    }
    free(s);
    err_raise(e, E_NOMEM, "no memory for a safetensors header");
    return NULL;
}

int safetensors_open(struct safetensors **out, const char *path, struct err *e) {
    *out = NULL;
    struct safetensors *s = allocate(e);
    if (!s) return E_NOMEM;
    char dot[4096];
    bool folder =
        snprintf(dot, sizeof dot, "%s/.", path) < (int)sizeof dot && access(dot, F_OK) == 0;
    int rc = folder ? open_folder(s, path, e) : add_file(s, path, e);
    if (rc == 0 && !folder) rc = sort_names(s, e);
    if (rc) safetensors_close(s);
    else *out = s;
    return rc;
}

int safetensors_open_bytes(struct safetensors **out, const uint8_t *data, size_t n, struct err *e) {
    *out = NULL;
    struct safetensors *s = allocate(e);
    if (!s) return E_NOMEM;
    int rc = read_header(s, data, n, &s->shards[0].header_bytes, e);
    if (rc == 0) rc = sort_names(s, e);
    s->n_shards = 1;
    if (rc) safetensors_close(s);
    else *out = s;
    return rc;
}

void safetensors_close(struct safetensors *s) {
    if (!s) return;
    for (int i = 0; i < SAFETENSORS_MAX_SHARDS; i++) file_close(&s->shards[i].file);
    arena_deinit(&s->names);
    free(s->shards);
    free(s->tensors);
    free(s->order);
    free(s->metadata);
    free(s);
}

/* ---- Questions ---- */

size_t safetensors_n_tensors(const struct safetensors *s) {
    return s->n_tensors;
}

const struct safetensors_tensor *safetensors_tensor_at(const struct safetensors *s, size_t idx) {
    return idx < s->n_tensors ? &s->tensors[idx] : NULL;
}

bool safetensors_metadata_at(const struct safetensors *s, size_t idx, const char **key,
                             const char **value) {
    if (idx >= s->n_metadata) return false;
    *key = s->metadata[idx].key;
    *value = s->metadata[idx].value;
    return true;
}

int safetensors_dtype(const struct safetensors_tensor *t, enum kern_dtype *out, struct err *e) {
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].name == t->type && types[i].dtype >= 0) {
            *out = (enum kern_dtype)types[i].dtype;
            return 0;
        }
    return err_raise(e, E_UNSUPPORTED, "tensor %.100s: type %s is not supported (F32, F16, BF16)",
                     t->name, t->type);
}

int safetensors_n_shards(const struct safetensors *s) {
    return s->n_shards;
}

const struct file *safetensors_shard(const struct safetensors *s, int shard, size_t *header_bytes) {
    ASSERT(shard >= 0 && shard < s->n_shards);
    *header_bytes = s->shards[shard].header_bytes;
    return &s->shards[shard].file;
}
