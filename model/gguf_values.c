#include "model/gguf.h"

#include <stdio.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "base/utf8.h"
#include "model/gguf_private.h"

/* ---- Values ---- */

static const struct gguf__pair *find_pair(const struct gguf *g, const char *key) {
    struct gguf_str k = {key, strlen(key)};
    size_t lo = 0, hi = g->n_pairs;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct gguf__pair *p = &g->pairs[g->pair_order[mid]];
        int c = gguf__compare(p->key, k);
        if (c == 0) return p;
        if (c < 0) lo = mid + 1;
        else hi = mid;
    }
    return NULL;
}

static int need_pair(const struct gguf *g, const char *key, const struct gguf__pair **out,
                     struct err *e) {
    *out = find_pair(g, key);
    return *out ? 0 : err_raise(e, E_NOT_FOUND, "key %s is missing", key);
}

static int err_type(const char *key, const struct gguf__pair *p, const char *wanted,
                    struct err *e) {
    if (p->type == GGUF_ARRAY)
        return err_raise(e, E_FORMAT, "key %s: an array of %llu %s, expected %s", key,
                         (unsigned long long)p->n, gguf__type_names[p->elem], wanted);
    return err_raise(e, E_FORMAT, "key %s: of type %s, expected %s", key, gguf__type_names[p->type],
                     wanted);
}

bool gguf_has(const struct gguf *g, const char *key) {
    return find_pair(g, key) != NULL;
}

/* A scalar as the file has it. */
struct number {
    enum { NUMBER_NONE, NUMBER_SIGNED, NUMBER_UNSIGNED, NUMBER_FLOAT } kind;
    int64_t i;
    uint64_t u;
    double f;
};

static struct number read_number(enum gguf_type type, const uint8_t *p) {
    struct number v = {NUMBER_UNSIGNED, 0, 0, 0};
    float f;
    switch (type) {
    case GGUF_U8:
    case GGUF_U16:
    case GGUF_U32:
    case GGUF_U64:
        v.u = gguf__little(p, gguf__type_bytes[type]);
        return v;
    case GGUF_I8:
        v.i = (int8_t)p[0];
        break;
    case GGUF_I16:
        v.i = (int16_t)gguf__little(p, 2);
        break;
    case GGUF_I32:
        v.i = (int32_t)gguf__little(p, 4);
        break;
    case GGUF_I64:
        v.i = (int64_t)gguf__little(p, 8);
        break;
    case GGUF_F32:
        memcpy(&f, p, 4);
        v.f = f;
        v.kind = NUMBER_FLOAT;
        return v;
    case GGUF_F64:
        memcpy(&v.f, p, 8);
        v.kind = NUMBER_FLOAT;
        return v;
    case GGUF_BOOL:
    case GGUF_STRING:
    case GGUF_ARRAY:
    case GGUF_N_TYPES:
        v.kind = NUMBER_NONE;
        return v;
    }
    v.kind = NUMBER_SIGNED;
    return v;
}

int gguf_get_int(const struct gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *out,
                 struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    struct number v = read_number(p->type, p->data);
    switch (v.kind) {
    case NUMBER_NONE:
        return err_type(key, p, "an integer", e);
    case NUMBER_FLOAT: /* 2^63 itself is the first double that int64_t does not hold */
        if (!(v.f >= -0x1p63 && v.f < 0x1p63) || v.f != (double)(int64_t)v.f)
            return err_raise(e, E_FORMAT, "key %s: %g is no integer", key, v.f);
        v.i = (int64_t)v.f;
        break;
    case NUMBER_UNSIGNED:
        if (v.u > INT64_MAX)
            return err_raise(e, E_FORMAT, "key %s: %llu is outside %lld..%lld", key,
                             (unsigned long long)v.u, (long long)lo, (long long)hi);
        v.i = (int64_t)v.u;
        break;
    case NUMBER_SIGNED:
        break;
    }
    if (v.i < lo || v.i > hi)
        return err_raise(e, E_FORMAT, "key %s: %lld is outside %lld..%lld", key, (long long)v.i,
                         (long long)lo, (long long)hi);
    *out = v.i;
    return 0;
}

int gguf_get_float(const struct gguf *g, const char *key, double lo, double hi, double *out,
                   struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    struct number v = read_number(p->type, p->data);
    double f = 0;
    switch (v.kind) {
    case NUMBER_NONE:
        return err_type(key, p, "a number", e);
    case NUMBER_SIGNED:
        f = (double)v.i;
        break;
    case NUMBER_UNSIGNED:
        f = (double)v.u;
        break;
    case NUMBER_FLOAT:
        f = v.f;
        break;
    }
    if (!(f >= lo && f <= hi)) /* NaN too */
        return err_raise(e, E_FORMAT, "key %s: %g is outside %g..%g", key, f, lo, hi);
    *out = f;
    return 0;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    if (p->type != GGUF_BOOL) return err_type(key, p, "a bool", e);
    *out = p->data[0] != 0;
    return 0;
}

int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    if (p->type != GGUF_STRING) return err_type(key, p, "a string", e);
    *out = (struct gguf_str){(const char *)p->data, (size_t)p->n};
    return 0;
}

int gguf_array(const struct gguf *g, const char *key, enum gguf_type *type, size_t *n,
               struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    if (p->type != GGUF_ARRAY) return err_type(key, p, "an array", e);
    *type = p->elem;
    *n = (size_t)p->n;
    return 0;
}

int gguf_array_str(const struct gguf *g, const char *key, struct gguf_str *out, size_t n,
                   struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    if (p->type != GGUF_ARRAY || p->elem != GGUF_STRING)
        return err_type(key, p, "an array of strings", e);
    if (p->n != n)
        return err_raise(e, E_FORMAT, "key %s: %llu strings, expected %zu", key,
                         (unsigned long long)p->n, n);
    const uint8_t *at = p->data; /* lengths were checked when the file was opened */
    for (size_t i = 0; i < n; i++) {
        size_t len = (size_t)gguf__little(at, 8);
        out[i] = (struct gguf_str){(const char *)at + 8, len};
        at += 8 + len;
    }
    return 0;
}

int gguf_array_data(const struct gguf *g, const char *key, enum gguf_type type, const void **data,
                    size_t *n, struct err *e) {
    const struct gguf__pair *p;
    int rc = need_pair(g, key, &p, e);
    if (rc) return rc;
    ASSERT(type < GGUF_N_TYPES && gguf__type_bytes[type] > 0);
    if (p->type != GGUF_ARRAY || p->elem != type) {
        char wanted[32];
        snprintf(wanted, sizeof wanted, "an array of %s", gguf__type_names[type]);
        return err_type(key, p, wanted, e);
    }
    *data = p->data;
    *n = (size_t)p->n;
    return 0;
}

/* ---- Listing ---- */

size_t gguf_n_tensors(const struct gguf *g) {
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t idx) {
    return idx < g->n_tensors ? &g->tensors[idx] : NULL;
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name) {
    struct gguf_str k = {name, strlen(name)};
    size_t lo = 0, hi = g->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const struct gguf_tensor *t = &g->tensors[g->tensor_order[mid]];
        int c = gguf__compare(t->name, k);
        if (c == 0) return t;
        if (c < 0) lo = mid + 1;
        else hi = mid;
    }
    return NULL;
}

/* ---- For people ---- */

/* At most `most` bytes of s, cut between characters, controls as spaces. */
static void describe_bytes(struct strbuf *b, struct gguf_str s, size_t most) {
    size_t n = s.n < most ? s.n : utf8_complete_prefix(s.data, most);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s.data[i];
        strbuf_append_char(b, c < 0x20 || c == 0x7f ? ' ' : (char)c);
    }
    if (n < s.n) strbuf_append_str(b, "...");
}

static void describe_str(struct strbuf *b, struct gguf_str s, size_t most) {
    strbuf_append_char(b, '"');
    describe_bytes(b, s, most);
    strbuf_append_char(b, '"');
}

static void describe_scalar(struct strbuf *b, enum gguf_type type, const uint8_t *p) {
    struct number v = read_number(type, p);
    switch (v.kind) {
    case NUMBER_NONE:
        strbuf_append_str(b, p[0] ? "true" : "false");
        break;
    case NUMBER_SIGNED:
        strbuf_printf(b, "%lld", (long long)v.i);
        break;
    case NUMBER_UNSIGNED:
        strbuf_printf(b, "%llu", (unsigned long long)v.u);
        break;
    case NUMBER_FLOAT:
        strbuf_printf(b, "%g", v.f);
        break;
    }
}

static void describe_array(struct strbuf *b, const struct gguf__pair *p) {
    enum { SHOWN = 4 };
    const uint8_t *at = p->data;
    strbuf_printf(b, "[%llu %s:", (unsigned long long)p->n, gguf__type_names[p->elem]);
    for (uint64_t i = 0; i < p->n && i < SHOWN; i++) {
        strbuf_append_char(b, ' ');
        if (p->elem == GGUF_STRING) {
            size_t n = (size_t)gguf__little(at, 8);
            describe_str(b, (struct gguf_str){(const char *)at + 8, n}, 20);
            at += 8 + n;
        } else {
            describe_scalar(b, p->elem, at);
            at += gguf__type_bytes[p->elem];
        }
    }
    strbuf_append_str(b, p->n > SHOWN ? " ...]" : "]");
}

bool gguf_describe(const struct gguf *g, size_t idx, char *buf, size_t n) {
    if (idx >= g->n_pairs) return false;
    const struct gguf__pair *p = &g->pairs[idx];
    struct strbuf b = {0};
    describe_bytes(&b, p->key, 80);
    strbuf_append_str(&b, " = ");
    if (p->type == GGUF_STRING)
        describe_str(&b, (struct gguf_str){(const char *)p->data, (size_t)p->n}, 100);
    else if (p->type == GGUF_ARRAY) describe_array(&b, p);
    else describe_scalar(&b, p->type, p->data);
    snprintf(buf, n, "%s", b.data ? b.data : "");
    strbuf_deinit(&b);
    return true;
}
