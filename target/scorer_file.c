/* A scorer's file: docs/scorer-format.md read and written. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/number.h"
#include "base/strbuf.h"
#include "model/safetensors.h"
#include "target/scorer_private.h"

#define PREFIX "tandem.scorer."

/* Those that a file may hold stand first among enum kern_score. */
static const char *const kinds[] = {"mean", "late", "mlp"};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* ---- Values as text ---- */

static int parse_int(const char *key, const char *text, int *out, struct err *e) {
    if (number_in(text, strlen(text), 0, 1 << 30, out)) return 0;
    return err_raise(e, E_FORMAT, "%s is \"%.40s\", not a whole number of [0, 2^30]", key, text);
}

static int parse_bool(const char *key, const char *text, bool *out, struct err *e) {
    *out = !strcmp(text, "true");
    if (*out || !strcmp(text, "false")) return 0;
    return err_raise(e, E_FORMAT, "%s is \"%.40s\", neither true nor false", key, text);
}

static int parse_hex(const char *key, const char *text, uint64_t *out, struct err *e) {
    *out = 0;
    for (int i = 0; i < 17; i++) {
        const char *digits = "0123456789abcdef", *at = text[i] ? strchr(digits, text[i]) : NULL;
        if (i == 16 && !text[i]) return 0;
        if (i == 16 || !at) break;
        *out = *out << 4 | (uint64_t)(at - digits);
    }
    return err_raise(e, E_FORMAT, "%s is \"%.40s\", not 16 digits of 0..9, a..f", key, text);
}

static int parse_number(const char *key, const char *text, double *out, struct err *e) {
    if (number_real(text, strlen(text), out) && *out >= 0) return 0;
    return err_raise(e, E_FORMAT, "%s is \"%.40s\", not a number of 0 or more", key, text);
}

static int parse_curve(const char *key, const char *text, struct target_curve *out, struct err *e) {
    struct target_settings s;
    target_settings_unset(&s);
    if (target_keep_parse(&s, text, strlen(text), NULL) || s.curve.n == 0)
        return err_raise(e, E_FORMAT,
                         "%s is \"%.100s\", not 1..%d points TOKENS:KEEP with tokens ascending",
                         key, text, TARGET_CURVE_POINTS);
    *out = s.curve;
    return 0;
}

/* ---- Metadata ---- */

enum key {
    VERSION,
    KIND,
    LAYER,
    HIDDEN,
    HEADS,
    HEAD_DIM,
    WIDTH,
    QUERIES,
    NORMED,
    BY_FIRST,
    LAYERNORM,
    BLOCK,
    SMOOTHING,
    FINGERPRINT,
    CURVE,
    RECIPE,
    N_KEYS
};

static const struct {
    const char *name;
    bool optional;
} keys[N_KEYS] = {
    [VERSION] = {PREFIX "version", false},    [KIND] = {PREFIX "kind", false},
    [LAYER] = {PREFIX "layer", false},        [HIDDEN] = {PREFIX "hidden", false},
    [HEADS] = {PREFIX "heads", true},         [HEAD_DIM] = {PREFIX "head_dim", true},
    [WIDTH] = {PREFIX "width", true},         [QUERIES] = {PREFIX "queries", false},
    [NORMED] = {PREFIX "normed", false},      [BY_FIRST] = {PREFIX "by_first", false},
    [LAYERNORM] = {PREFIX "layernorm", true}, [BLOCK] = {PREFIX "block", false},
    [SMOOTHING] = {PREFIX "smoothing", true}, [FINGERPRINT] = {PREFIX "fingerprint", false},
    [CURVE] = {PREFIX "curve", true},         [RECIPE] = {PREFIX "recipe", true},
};

static int read_kind(struct target_scorer_file *f, const char *text, struct err *e) {
    for (int i = 0; i < N_KINDS; i++)
        if (!strcmp(text, kinds[i])) {
            f->kind = (enum kern_score)i;
            return 0;
        }
    return err_raise(e, E_UNSUPPORTED, PREFIX "kind is \"%.40s\": mean, late or mlp", text);
}

static int read_recipe(struct target_scorer_file *f, const char *text, struct err *e) {
    size_t n = strlen(text);
    if (n >= sizeof f->recipe)
        return err_raise(e, E_TOO_LONG, PREFIX "recipe has %zu bytes, allowed are %zu", n,
                         sizeof f->recipe - 1);
    memcpy(f->recipe, text, n + 1);
    return 0;
}

static int read_value(struct target_scorer_file *f, enum key k, const char *text, struct err *e) {
    const char *name = keys[k].name;
    switch (k) {
    case VERSION:
        if (!strcmp(text, "1")) return 0;
        return err_raise(e, E_UNSUPPORTED, "%s is \"%.40s\", we read 1", name, text);
    case KIND:
        return read_kind(f, text, e);
    case LAYER:
        return parse_int(name, text, &f->layer, e);
    case HIDDEN:
        return parse_int(name, text, &f->hidden, e);
    case HEADS:
        return parse_int(name, text, &f->n_heads, e);
    case HEAD_DIM:
        return parse_int(name, text, &f->head_dim, e);
    case WIDTH:
        return parse_int(name, text, &f->width, e);
    case QUERIES:
        return parse_int(name, text, &f->n_queries, e);
    case NORMED:
        return parse_bool(name, text, &f->normed, e);
    case BY_FIRST:
        return parse_bool(name, text, &f->by_first, e);
    case LAYERNORM:
        return parse_bool(name, text, &f->has_layernorm, e);
    case BLOCK:
        return parse_int(name, text, &f->block, e);
    case SMOOTHING:
        return parse_number(name, text, &f->smoothing, e);
    case FINGERPRINT:
        return parse_hex(name, text, &f->fingerprint, e);
    case CURVE:
        return parse_curve(name, text, &f->curve, e);
    case RECIPE:
        return read_recipe(f, text, e);
    case N_KEYS:
        break;
    }
    return 0;
}

static int read_metadata(struct target_scorer_file *f, const struct safetensors *s, struct err *e) {
    const char *key, *value;
    bool seen[N_KEYS] = {0};
    for (size_t i = 0; safetensors_metadata_at(s, i, &key, &value); i++) {
        if (strncmp(key, PREFIX, strlen(PREFIX)) != 0) continue;
        int k = 0;
        while (k < N_KEYS && strcmp(key, keys[k].name) != 0) k++;
        if (k == N_KEYS) return err_raise(e, E_UNSUPPORTED, "the key %.80s is unknown", key);
        int rc = read_value(f, (enum key)k, value, e);
        if (rc) return rc;
        seen[k] = true;
    }
    for (int k = 0; k < N_KEYS; k++)
        if (!seen[k] && !keys[k].optional)
            return err_raise(e, E_FORMAT, "no scorer: the key %s is missing", keys[k].name);
    return 0;
}

/* ---- Reading ---- */

static int read_tensor(const struct safetensors *s, const struct scorer_tensor *want,
                       struct err *e) {
    const struct safetensors_tensor *t = safetensors_find(s, want->name);
    if (!t) return err_raise(e, E_FORMAT, "tensor %s is missing", want->name);
    if (strcmp(t->type, "F32") != 0)
        return err_raise(e, E_UNSUPPORTED, "tensor %s is of %s, it must be of F32", t->name,
                         t->type);
    bool same = t->n_dims == want->n_dims;
    for (int i = 0; same && i < t->n_dims; i++) same = t->dims[i] == want->dims[i];
    if (!same) {
        const unsigned long long rows = t->n_dims > 0 ? t->dims[0] : 1;
        const unsigned long long cols = t->n_dims > 1 ? t->dims[1] : 1;
        return err_raise(e, E_FORMAT,
                         "tensor %s has %d dimensions, %llu x %llu, the metadata ask for %d, "
                         "%zu x %zu",
                         t->name, t->n_dims, rows, cols, want->n_dims, want->dims[0],
                         want->dims[1]);
    }
    memcpy(*want->at, t->data, want->n * sizeof(float));
    return 0;
}

static int read_tensors(struct target_scorer_file *f, const struct safetensors *s, struct err *e) {
    struct scorer_tensor want[SCORER_N_TENSORS];
    int rc = 0;
    scorer__tensors(f, want);
    for (size_t i = 0; i < safetensors_n_tensors(s); i++) {
        const char *name = safetensors_tensor_at(s, i)->name;
        int k = 0;
        while (k < SCORER_N_TENSORS && (!want[k].n_dims || strcmp(name, want[k].name) != 0)) k++;
        if (k == SCORER_N_TENSORS)
            return err_raise(e, E_FORMAT, "tensor %.80s has no place in a %s scorer", name,
                             kinds[f->kind]);
    }
    for (int k = 0; k < SCORER_N_TENSORS && !rc; k++)
        if (want[k].n_dims) rc = read_tensor(s, &want[k], e);
    return rc;
}

static int read_open(struct target_scorer_file **out, const struct safetensors *s, struct err *e) {
    struct target_scorer_file shape = {0};
    int rc = read_metadata(&shape, s, e);
    if (!rc) rc = target_scorer_make(out, &shape, e);
    if (!rc) rc = read_tensors(*out, s, e);
    if (!rc) return 0;
    target_scorer_free(*out);
    *out = NULL;
    return rc;
}

int target_scorer_read_bytes(struct target_scorer_file **out, const uint8_t *data, size_t n,
                             struct err *e) {
    struct safetensors *s;
    *out = NULL;
    int rc = safetensors_open_bytes(&s, data, n, e);
    if (rc) return rc;
    rc = read_open(out, s, e);
    safetensors_close(s);
    return rc;
}

int target_scorer_read(struct target_scorer_file **out, const char *path, struct err *e) {
    struct safetensors *s;
    *out = NULL;
    int rc = safetensors_open(&s, path, e);
    if (rc) return rc;
    rc = read_open(out, s, e);
    safetensors_close(s);
    return rc ? err_prefix(e, rc, "%s", path) : 0;
}

/* ---- Writing ---- */

static void put(struct strbuf *b, enum key k, const char *text) {
    strbuf_append_str(b, k == VERSION ? "" : ",");
    strbuf_append_json(b, keys[k].name, strlen(keys[k].name));
    strbuf_append_char(b, ':');
    strbuf_append_json(b, text, strlen(text));
}

static void put_number(struct strbuf *b, enum key k, double v) {
    char text[40];
    snprintf(text, sizeof text, "%.17g", v);
    put(b, k, text);
}

static void put_bool(struct strbuf *b, enum key k, bool v) {
    put(b, k, v ? "true" : "false");
}

static void put_curve(struct strbuf *b, const struct target_curve *c) {
    char text[TARGET_CURVE_POINTS * 60] = "";
    size_t n = 0;
    for (int i = 0; i < c->n; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%.17g:%.17g", i ? "," : "",
                              c->at[i].tokens, c->at[i].keep);
    if (c->n) put(b, CURVE, text);
}

static void put_metadata(struct strbuf *b, const struct target_scorer_file *f) {
    char hex[17];
    put(b, VERSION, "1");
    put(b, KIND, kinds[f->kind]);
    put_number(b, LAYER, f->layer);
    put_number(b, HIDDEN, f->hidden);
    if (f->kind == KERN_SCORE_LATE) {
        put_number(b, HEADS, f->n_heads);
        put_number(b, HEAD_DIM, f->head_dim);
    }
    if (f->kind == KERN_SCORE_MLP) {
        put_number(b, WIDTH, f->width);
        put_bool(b, LAYERNORM, f->has_layernorm);
    }
    put_number(b, QUERIES, f->n_queries);
    put_bool(b, NORMED, f->normed);
    put_bool(b, BY_FIRST, f->by_first);
    put_number(b, BLOCK, f->block);
    put_number(b, SMOOTHING, f->smoothing);
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)f->fingerprint);
    put(b, FINGERPRINT, hex);
    put_curve(b, &f->curve);
    if (f->recipe[0]) put(b, RECIPE, f->recipe);
}

/* The header, its length field first, padded with blanks so that the data are aligned. */
static void put_header(struct strbuf *b, const struct target_scorer_file *f,
                       const struct scorer_tensor t[SCORER_N_TENSORS]) {
    size_t offset = 0;
    strbuf_append(b, "\0\0\0\0\0\0\0\0", 8);
    strbuf_append_str(b, "{\"__metadata__\":{");
    put_metadata(b, f);
    strbuf_append_char(b, '}');
    for (int i = 0; i < SCORER_N_TENSORS; i++) {
        if (!t[i].n_dims) continue;
        size_t end = offset + t[i].n * sizeof(float);
        strbuf_printf(b, ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%zu", t[i].name, t[i].dims[0]);
        if (t[i].n_dims == 2) strbuf_printf(b, ",%zu", t[i].dims[1]);
        strbuf_printf(b, "],\"data_offsets\":[%zu,%zu]}", offset, end);
        offset = end;
    }
    strbuf_append_char(b, '}');
    while (!b->failed && b->n % KERN_ACT_ALIGN) strbuf_append_char(b, ' ');
    if (b->failed) return;
    for (int i = 0; i < 8; i++) b->data[i] = (char)((uint64_t)(b->n - 8) >> 8 * i);
}

static int write_all(int fd, const void *data, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t k = write(fd, (const char *)data + done, n - done);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return -1;
        done += (size_t)k;
    }
    return 0;
}

static int write_file(int fd, const struct strbuf *header,
                      const struct scorer_tensor t[SCORER_N_TENSORS]) {
    if (write_all(fd, header->data, header->n)) return -1;
    for (int i = 0; i < SCORER_N_TENSORS; i++)
        if (t[i].n && write_all(fd, *t[i].at, t[i].n * sizeof(float))) return -1;
    return fsync(fd);
}

int target_scorer_write(const char *path, const struct target_scorer_file *f, struct err *e) {
    struct target_scorer_file all = *f;
    struct scorer_tensor t[SCORER_N_TENSORS];
    struct strbuf header = {0};
    char beside[4096];
    int rc = scorer__check_shape(f, e);
    if (rc) return rc;
    if (snprintf(beside, sizeof beside, "%s.%ld.part", path, (long)getpid()) >= (int)sizeof beside)
        return err_raise(e, E_TOO_LONG, "the path %.100s...", path);
    scorer__tensors(&all, t);
    put_header(&header, f, t);
    if (header.failed) {
        rc = err_raise(e, E_NOMEM, "no memory for a scorer's header");
        goto done;
    }
    int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        rc = err_raise(e, E_IO, "%s: cannot be written: %s", beside, strerror(errno));
        goto done;
    }
    bool failed = write_file(fd, &header, t) != 0;
    int cause = errno;
    if (close(fd) != 0 && !failed) failed = true, cause = errno;
    if (!failed && rename(beside, path) != 0) failed = true, cause = errno;
    if (failed) {
        unlink(beside);
        rc = err_raise(e, E_IO, "%s: cannot be written: %s", path, strerror(cause));
    }
done:
    strbuf_deinit(&header);
    return rc;
}
