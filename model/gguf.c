#include "model/gguf.h"

#include <stdlib.h>

#include "base/err.h"
#include "model/ggml_types.h"
#include "model/gguf_private.h"

enum {
    MAX_KEYS = 1 << 16,
    MAX_TENSORS = 1 << 20,
    MAX_KEY_BYTES = 65535, /* the format's own limit */
    MAX_NAME_BYTES = 255,
    MAX_ALIGNMENT = 1 << 20,
    DEFAULT_ALIGNMENT = 32,
    MIN_KEY_ENTRY = 8 + 1 + 4 + 1,            /* name length, a letter, type, a byte of value */
    MIN_TENSOR_ENTRY = 8 + 1 + 4 + 8 + 4 + 8, /* name, n_dims, one dim, type, offset */
};

/* Bytes not yet read. A length is compared with what is left, never added to a position. */
struct cursor {
    const uint8_t *start, *at;
    size_t left;
};

const char *const gguf__type_names[GGUF_N_TYPES] = {
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
const uint8_t gguf__type_bytes[GGUF_N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* ---- Reading numbers ---- */

static bool take(struct cursor *c, size_t n, const uint8_t **out) {
    if (n > c->left) return false;
    *out = c->at;
    c->at += n;
    c->left -= n;
    return true;
}

static bool take_number(struct cursor *c, size_t n, uint64_t *out) {
    const uint8_t *p;
    if (!take(c, n, &p)) return false;
    *out = gguf__little(p, n);
    return true;
}

static int err_ends(const struct cursor *c, const char *where, struct err *e) {
    return err_raise(e, E_FORMAT, "truncated at byte %zu, inside %s",
                     (size_t)(c->at - c->start) + c->left, where);
}

static int take_string(struct cursor *c, struct gguf_str *out, const char *where, struct err *e) {
    uint64_t n;
    const uint8_t *p;
    if (!take_number(c, 8, &n)) return err_ends(c, where, e);
    if (n > c->left)
        return err_raise(e, E_FORMAT, "%s at byte %zu has length %llu, %zu bytes are left", where,
                         (size_t)(c->at - c->start) - 8, (unsigned long long)n, c->left);
    take(c, (size_t)n, &p);
    *out = (struct gguf_str){(const char *)p, (size_t)n};
    return 0;
}

/* ---- Sorting: duplicates are neighbours, lookup is a bisection ---- */

static int compare_pairs(const void *a, const void *b, void *arg) {
    const struct gguf__pair *p = arg;
    return gguf__compare(p[*(const uint32_t *)a].key, p[*(const uint32_t *)b].key);
}

static int compare_names(const void *a, const void *b, void *arg) {
    const struct gguf_tensor *t = arg;
    return gguf__compare(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

/* By place in the file. */
static int compare_data(const void *a, const void *b, void *arg) {
    const uint64_t *offsets = arg;
    uint64_t x = offsets[*(const uint32_t *)a], y = offsets[*(const uint32_t *)b];
    return (x > y) - (x < y);
}

static uint32_t *sorted_order(size_t n, int (*compare)(const void *, const void *, void *),
                              void *arg) {
    uint32_t *order = malloc((n ? n : 1) * sizeof *order);
    if (!order) return NULL;
    for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
    qsort_r(order, n, sizeof *order, compare, arg);
    return order;
}

/* Room for one more of *items, grown by doubling as entries are really there. */
static bool grow(void **items, size_t n, size_t *cap, size_t size) {
    if (n < *cap) return true;
    size_t more = *cap ? *cap * 2 : 64;
    void *p = realloc(*items, more * size);
    if (!p) return false;
    *items = p;
    *cap = more;
    return true;
}

/* ---- Metadata ---- */

static int check_bools(const struct gguf__pair *p, const uint8_t *values, size_t n, struct err *e) {
    for (size_t i = 0; i < n; i++)
        if (values[i] > 1)
            return err_raise(e, E_FORMAT, "key %.*s: a bool of value %d", SHOW(p->key), values[i]);
    return 0;
}

static int take_array(struct cursor *c, struct gguf__pair *p, struct err *e) {
    uint64_t elem, n;
    if (!take_number(c, 4, &elem) || !take_number(c, 8, &n)) return err_ends(c, "an array", e);
    if (elem >= GGUF_N_TYPES)
        return err_raise(e, E_FORMAT, "key %.*s: unknown element type %llu", SHOW(p->key),
                         (unsigned long long)elem);
    if (elem == GGUF_ARRAY)
        return err_raise(e, E_UNSUPPORTED, "key %.*s: an array of arrays", SHOW(p->key));
    p->elem = (enum gguf_type)elem;
    p->n = n;
    p->data = c->at;
    size_t size = gguf__type_bytes[elem], least = size ? size : 8;
    if (n > c->left / least)
        return err_raise(e, E_FORMAT, "key %.*s: an array of %llu %s, %zu bytes are left",
                         SHOW(p->key), (unsigned long long)n, gguf__type_names[elem], c->left);
    const uint8_t *skipped;
    if (size) {
        take(c, (size_t)n * size, &skipped);
        return elem == GGUF_BOOL ? check_bools(p, p->data, (size_t)n, e) : 0;
    }
    for (uint64_t i = 0; i < n; i++) {
        struct gguf_str s;
        int rc = take_string(c, &s, "a string of an array", e);
        if (rc)
            return err_prefix(e, rc, "key %.*s, element %llu", SHOW(p->key), (unsigned long long)i);
    }
    return 0;
}

static int take_pair(struct cursor *c, struct gguf__pair *p, struct err *e) {
    uint64_t type;
    int rc = take_string(c, &p->key, "a key", e);
    if (rc) return rc;
    if (p->key.n == 0 || p->key.n > MAX_KEY_BYTES)
        return err_raise(e, E_FORMAT, "a key of %zu bytes", p->key.n);
    if (!take_number(c, 4, &type)) return err_ends(c, "the type of a value", e);
    if (type >= GGUF_N_TYPES)
        return err_raise(e, E_FORMAT, "key %.*s: unknown type %llu", SHOW(p->key),
                         (unsigned long long)type);
    p->type = (enum gguf_type)type;
    if (type == GGUF_ARRAY) return take_array(c, p, e);
    if (type == GGUF_STRING) {
        struct gguf_str s;
        rc = take_string(c, &s, "a string", e);
        if (rc) return err_prefix(e, rc, "key %.*s", SHOW(p->key));
        p->n = s.n;
        p->data = (const uint8_t *)s.data;
        return 0;
    }
    p->n = 1;
    if (!take(c, gguf__type_bytes[type], &p->data)) return err_ends(c, "a value", e);
    return type == GGUF_BOOL ? check_bools(p, p->data, 1, e) : 0;
}

static int read_pairs(struct gguf *g, struct cursor *c, uint64_t n, struct err *e) {
    size_t cap = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (!grow((void **)&g->pairs, g->n_pairs, &cap, sizeof *g->pairs))
            return err_raise(e, E_NOMEM, "no memory for key %zu", g->n_pairs);
        memset(&g->pairs[g->n_pairs], 0, sizeof *g->pairs);
        int rc = take_pair(c, &g->pairs[g->n_pairs], e);
        if (rc) return rc;
        g->n_pairs++;
    }
    g->pair_order = sorted_order(g->n_pairs, compare_pairs, g->pairs);
    if (!g->pair_order) return err_raise(e, E_NOMEM, "no memory for %zu keys", g->n_pairs);
    for (size_t i = 1; i < g->n_pairs; i++) {
        struct gguf_str key = g->pairs[g->pair_order[i]].key;
        if (gguf__compare(g->pairs[g->pair_order[i - 1]].key, key) == 0)
            return err_raise(e, E_FORMAT, "key %.*s occurs twice", SHOW(key));
    }
    return 0;
}

/* ---- Tensors ---- */

/* Type and dims of one entry; sets t->bytes. */
static int check_tensor(struct gguf_tensor *t, uint64_t type, struct err *e) {
    const struct ggml_type *info = type <= INT32_MAX ? ggml_type_find((int)type) : NULL;
    if (!info)
        return err_raise(e, E_FORMAT, "tensor %.*s: unknown type %llu", SHOW(t->name),
                         (unsigned long long)type);
    if (!info->block)
        return err_raise(e, E_UNSUPPORTED,
                         "tensor %.*s: type %s is not supported; supported are %s", SHOW(t->name),
                         info->name, ggml_type_supported_names());
    t->ggml_type = (int)type;
    size_t n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        if (t->dims[i] == 0)
            return err_raise(e, E_FORMAT, "tensor %.*s: dimension %d is 0", SHOW(t->name), i);
        if (t->dims[i] > INT64_MAX || !checked_mul(n, (size_t)t->dims[i], &n))
            return err_raise(e, E_FORMAT, "tensor %.*s: dimension %d is %llu, too large",
                             SHOW(t->name), i, (unsigned long long)t->dims[i]);
    }
    if (t->dims[0] % info->block)
        return err_raise(e, E_FORMAT,
                         "tensor %.*s: %llu columns are no multiple of %zu, the block of %s",
                         SHOW(t->name), (unsigned long long)t->dims[0], info->block, info->name);
    if (!checked_mul(n / info->block, info->block_bytes, &t->bytes) || t->bytes > INT64_MAX)
        return err_raise(e, E_FORMAT, "tensor %.*s: too large", SHOW(t->name));
    return 0;
}

static int take_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t *offset, struct err *e) {
    uint64_t n_dims, type;
    int rc = take_string(c, &t->name, "a tensor's name", e);
    if (rc) return rc;
    if (t->name.n == 0 || t->name.n > MAX_NAME_BYTES)
        return err_raise(e, E_FORMAT, "a tensor name of %zu bytes", t->name.n);
    if (!take_number(c, 4, &n_dims)) return err_ends(c, "the tensor list", e);
    if (n_dims < 1 || n_dims > 4)
        return err_raise(e, E_FORMAT, "tensor %.*s: %llu dimensions, 1 to 4 are possible",
                         SHOW(t->name), (unsigned long long)n_dims);
    t->n_dims = (int)n_dims;
    for (int i = 0; i < 4; i++) {
        t->dims[i] = 1;
        if (i < t->n_dims && !take_number(c, 8, &t->dims[i]))
            return err_ends(c, "the tensor list", e);
    }
    if (!take_number(c, 4, &type) || !take_number(c, 8, offset))
        return err_ends(c, "the tensor list", e);
    return check_tensor(t, type, e);
}

/* Where each tensor lies: aligned, inside the data, none over another. */
static int place_tensors(struct gguf *g, const struct cursor *c, const uint64_t *offsets,
                         size_t alignment, bool header_only, struct err *e) {
    size_t data_at, file_bytes = (size_t)(c->at - c->start) + c->left;
    if (!checked_align((size_t)(c->at - c->start), alignment, &data_at))
        return err_raise(e, E_FORMAT, "the tensor data begin past the end");
    size_t have = data_at < file_bytes ? file_bytes - data_at : 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        if (offsets[i] % alignment)
            return err_raise(e, E_FORMAT,
                             "tensor %.*s: offset %llu is no multiple of the alignment %zu",
                             SHOW(t->name), (unsigned long long)offsets[i], alignment);
        if (offsets[i] > INT64_MAX)
            return err_raise(e, E_FORMAT, "tensor %.*s: offset %llu is too large", SHOW(t->name),
                             (unsigned long long)offsets[i]);
        bool inside = offsets[i] <= have && t->bytes <= have - offsets[i];
        if (!inside && !header_only)
            return err_raise(
                e, E_FORMAT,
                "tensor %.*s: %zu bytes at offset %llu, the file has %zu bytes of tensor "
                "data (truncated?)",
                SHOW(t->name), t->bytes, (unsigned long long)offsets[i], have);
        t->data = inside ? c->start + data_at + offsets[i] : NULL;
    }
    uint32_t *order = sorted_order(g->n_tensors, compare_data, (void *)(uintptr_t)offsets);
    if (!order) return err_raise(e, E_NOMEM, "no memory for %zu tensors", g->n_tensors);
    int rc = 0;
    for (size_t i = 1; i < g->n_tensors && rc == 0; i++) {
        const struct gguf_tensor *a = &g->tensors[order[i - 1]], *b = &g->tensors[order[i]];
        if (offsets[order[i]] - offsets[order[i - 1]] < a->bytes)
            rc = err_raise(e, E_FORMAT, "tensors %.*s and %.*s overlap", SHOW(a->name),
                           SHOW(b->name));
    }
    free(order);
    return rc;
}

static int read_alignment(const struct gguf *g, size_t *out, struct err *e) {
    int64_t v = DEFAULT_ALIGNMENT;
    if (gguf_has(g, "general.alignment")) {
        int rc = gguf_get_int(g, "general.alignment", 1, MAX_ALIGNMENT, &v, e);
        if (rc) return rc;
    }
    if (v & (v - 1))
        return err_raise(e, E_FORMAT, "key general.alignment: %lld is no power of two",
                         (long long)v);
    *out = (size_t)v;
    return 0;
}

static int read_tensors(struct gguf *g, struct cursor *c, uint64_t n, bool header_only,
                        struct err *e) {
    uint64_t *offsets = NULL;
    size_t cap = 0, offset_cap = 0, alignment = 0;
    int rc = read_alignment(g, &alignment, e);
    for (uint64_t i = 0; i < n && rc == 0; i++) {
        if (!grow((void **)&g->tensors, g->n_tensors, &cap, sizeof *g->tensors) ||
            !grow((void **)&offsets, g->n_tensors, &offset_cap, sizeof *offsets)) {
            rc = err_raise(e, E_NOMEM, "no memory for tensor %zu", g->n_tensors);
            break;
        }
        memset(&g->tensors[g->n_tensors], 0, sizeof *g->tensors);
        rc = take_tensor(c, &g->tensors[g->n_tensors], &offsets[g->n_tensors], e);
        if (rc == 0) g->n_tensors++;
    }
    if (rc == 0) {
        g->header_bytes = (size_t)(c->at - c->start);
        g->tensor_order = sorted_order(g->n_tensors, compare_names, g->tensors);
        if (!g->tensor_order) rc = err_raise(e, E_NOMEM, "no memory for %zu tensors", g->n_tensors);
    }
    for (size_t i = 1; i < g->n_tensors && rc == 0; i++) {
        struct gguf_str name = g->tensors[g->tensor_order[i]].name;
        if (gguf__compare(g->tensors[g->tensor_order[i - 1]].name, name) == 0)
            rc = err_raise(e, E_FORMAT, "tensor %.*s occurs twice", SHOW(name));
    }
    if (rc == 0) rc = place_tensors(g, c, offsets, alignment, header_only, e);
    free(offsets);
    return rc;
}

/* ---- Open ---- */

static int check_magic(const struct cursor *c, struct err *e) {
    if (c->left < 8) return err_raise(e, E_FORMAT, "%zu bytes are no GGUF file", c->left);
    if (memcmp(c->at, "FUGG", 4) == 0)
        return err_raise(e, E_UNSUPPORTED, "a byte-swapped GGUF file (magic FUGG)");
    if (memcmp(c->at, "tjgg", 4) == 0 || memcmp(c->at, "fmgg", 4) == 0 ||
        memcmp(c->at, "lmgg", 4) == 0)
        return err_raise(e, E_UNSUPPORTED,
                         "a file of the time before GGUF; convert the model anew");
    if (memcmp(c->at, "GGUF", 4) != 0)
        return err_raise(e, E_FORMAT, "no GGUF file (first bytes %02x %02x %02x %02x)", c->at[0],
                         c->at[1], c->at[2], c->at[3]);
    return 0;
}

static int read_header(struct gguf *g, struct cursor *c, bool header_only, struct err *e) {
    uint64_t version, n_tensors, n_pairs;
    int rc = check_magic(c, e);
    if (rc) return rc;
    c->at += 4;
    c->left -= 4;
    if (!take_number(c, 4, &version)) return err_ends(c, "the version", e);
    if (version != 0 && (version & 0xffff) == 0)
        return err_raise(e, E_UNSUPPORTED,
                         "a byte-swapped (big-endian) GGUF file: version reads 0x%08llx",
                         (unsigned long long)version);
    if (version != 2 && version != 3)
        return err_raise(e, E_UNSUPPORTED, "GGUF version %llu; 2 and 3 are supported",
                         (unsigned long long)version);
    if (!take_number(c, 8, &n_tensors) || !take_number(c, 8, &n_pairs))
        return err_ends(c, "the counts", e);
    if (n_pairs > MAX_KEYS || n_pairs > c->left / MIN_KEY_ENTRY)
        return err_raise(e, E_FORMAT, "%llu keys in %zu bytes", (unsigned long long)n_pairs,
                         c->left);
    if (n_tensors > MAX_TENSORS || n_tensors > c->left / MIN_TENSOR_ENTRY)
        return err_raise(e, E_FORMAT, "%llu tensors in %zu bytes", (unsigned long long)n_tensors,
                         c->left);
    rc = read_pairs(g, c, n_pairs, e);
    return rc ? rc : read_tensors(g, c, n_tensors, header_only, e);
}

static int open_bytes(struct gguf **out, const uint8_t *data, size_t n, bool header_only,
                      struct err *e) {
    *out = NULL;
    struct gguf *g = calloc(1, sizeof *g);
    if (!g) return err_raise(e, E_NOMEM, "no memory for a GGUF header");
    static const uint8_t none;
    struct cursor c = {data ? data : &none, data ? data : &none, n};
    int rc = read_header(g, &c, header_only, e);
    if (rc) gguf_close(g);
    else *out = g;
    return rc;
}

int gguf_open_bytes(struct gguf **out, const uint8_t *data, size_t n, struct err *e) {
    return open_bytes(out, data, n, false, e);
}

static int open_path(struct gguf **out, const char *path, bool header_only, struct err *e) {
    struct file f;
    *out = NULL;
    int rc = file_open(&f, path, 0, e);
    if (rc) return rc;
    rc = open_bytes(out, f.data, f.bytes, header_only, e);
    if (rc) {
        file_close(&f);
        return err_prefix(e, rc, "%s", path);
    }
    (*out)->file = f;
    return 0;
}

int gguf_open(struct gguf **out, const char *path, struct err *e) {
    return open_path(out, path, false, e);
}

int gguf_open_header(struct gguf **out, const char *path, struct err *e) {
    return open_path(out, path, true, e);
}

void gguf_close(struct gguf *g) {
    if (!g) return;
    free(g->pairs);
    free(g->pair_order);
    free(g->tensors);
    free(g->tensor_order);
    file_close(&g->file);
    free(g);
}

size_t gguf_header_bytes(const struct gguf *g) {
    return g->header_bytes;
}

const struct file *gguf_file(const struct gguf *g) {
    return &g->file;
}
