#include "serve/rpc.h"

#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/utf8.h"

const char *rpc_code_name(int code) {
    switch (code) {
#define RPC_NAME(number, name, word, text)                                                         \
    case number:                                                                                   \
        return word;
        RPC_ERRORS(RPC_NAME)
#undef RPC_NAME
    default:
        return "?";
    }
}

enum rpc_code rpc_code_of(int err_code) {
    switch (err_code) {
    case E_INVALID:
    case E_RANGE:
        return RPC_INVALID_PARAMS;
    case E_TOO_LONG:
        return RPC_TOO_LONG;
    case E_FULL:
    case E_BUSY:
    case E_NOMEM:
        return RPC_OVERLOADED;
    case E_CANCELLED:
        return RPC_CANCELLED;
    case E_CLOSED:
        return RPC_SHUTTING_DOWN;
    case E_UNSUPPORTED:
        return RPC_UNSUPPORTED;
    case E_NOT_FOUND:
        return RPC_NOT_FOUND;
    case E_AUTH:
        return RPC_UNAUTHORIZED;
    default:
        return RPC_INTERNAL;
    }
}

/* ---- Reading ---- */

static bool read_id(const msgpack_object *o, uint32_t *id) {
    if (o->type != MSGPACK_OBJECT_POSITIVE_INTEGER || o->via.u64 > UINT32_MAX) return false;
    *id = (uint32_t)o->via.u64;
    return true;
}

static int read_method(struct rpc_message *m, const msgpack_object *method,
                       const msgpack_object *params, struct err *e) {
    if (!rpc_text(method, &m->method, &m->method_n))
        return err_raise(e, E_PROTOCOL, "method must be a str, not %s", rpc_type_name(method));
    if (m->method_n > RPC_MAX_METHOD_BYTES)
        return err_raise(e, E_PROTOCOL, "method name of %zu bytes, at most %d", m->method_n,
                         RPC_MAX_METHOD_BYTES);
    if (params->type != MSGPACK_OBJECT_ARRAY)
        return err_raise(e, E_PROTOCOL, "params must be an array, not %s", rpc_type_name(params));
    m->params = params->via.array;
    return 0;
}

enum rpc_verdict rpc_read(struct rpc_message *m, const msgpack_object *o, struct err *e) {
    memset(m, 0, sizeof *m);
    if (o->type != MSGPACK_OBJECT_ARRAY || o->via.array.size < 1) {
        err_raise(e, E_PROTOCOL, "a message must be an array, not %s", rpc_type_name(o));
        return RPC_CLOSE;
    }
    const msgpack_object *v = o->via.array.ptr;
    uint32_t n = o->via.array.size;
    int64_t type;
    if (!rpc_int(&v[0], 0, 2, &type)) {
        err_raise(e, E_PROTOCOL, "a message's first element must be 0, 1 or 2");
        return RPC_CLOSE;
    }
    m->type = (enum rpc_type)type;
    if (m->type == RPC_NOTIFICATION) {
        if (n != 3) {
            err_raise(e, E_PROTOCOL, "a notification has 3 elements, not %u", n);
            return RPC_CLOSE;
        }
        return read_method(m, &v[1], &v[2], e) == 0 ? RPC_GOOD : RPC_CLOSE;
    }
    if (n < 2 || !read_id(&v[1], &m->id)) {
        err_raise(e, E_PROTOCOL, "an id must be an integer from 0 to 4294967295");
        return RPC_CLOSE;
    }
    if (m->type == RPC_RESPONSE) {
        if (n != 4) {
            err_raise(e, E_PROTOCOL, "a response has 4 elements, not %u", n);
            return RPC_CLOSE;
        }
        m->error = v[2];
        m->result = v[3];
        return RPC_GOOD;
    }
    if (n != 4) {
        err_raise(e, E_PROTOCOL, "a request has 4 elements, not %u", n);
        return RPC_ANSWER;
    }
    return read_method(m, &v[2], &v[3], e) == 0 ? RPC_GOOD : RPC_ANSWER;
}

bool rpc_peek_id(const uint8_t *b, size_t n, uint32_t *id) {
    /* The array's head as any library writes it: 0x94, or a count of 2 or 4 bytes. */
    size_t at = n == 0 ? 0 : b[0] == 0x94 ? 1 : b[0] == 0xdc ? 3 : b[0] == 0xdd ? 5 : 0;
    if (at == 0 || n < at + 2 || b[at] != 0) return false;
    if (at > 1 && (b[at - 1] != 4 || b[at - 2] != 0 || (at == 5 && (b[1] | b[2]) != 0)))
        return false;
    uint8_t head = b[++at];
    size_t n_bytes = head <= 0x7f   ? 0
                     : head == 0xcc ? 1
                     : head == 0xcd ? 2
                     : head == 0xce ? 4
                     : head == 0xcf ? 8
                                    : SIZE_MAX;
    if (n_bytes == SIZE_MAX || n - at - 1 < n_bytes) return false;
    uint64_t v = n_bytes ? 0 : head;
    for (size_t i = 0; i < n_bytes; i++) v = v << 8 | b[at + 1 + i];
    *id = (uint32_t)v;
    return v <= UINT32_MAX;
}

int rpc_unpack(msgpack_zone *zone, msgpack_object *out, const void *bytes, size_t n,
               struct err *e) {
    size_t at = 0;
    switch (msgpack_unpack(bytes, n, &at, zone, out)) {
    case MSGPACK_UNPACK_SUCCESS:
        return 0;
    case MSGPACK_UNPACK_NOMEM_ERROR:
        return err_raise(e, E_NOMEM, "no memory for a message");
    default:
        return err_raise(e, E_PROTOCOL, "a message of %zu bytes does not unpack", n);
    }
}

/* ---- Writing ---- */

static int append(void *data, const char *bytes, size_t n) {
    struct strbuf *out = data;
    strbuf_append(out, bytes, n);
    return out->failed ? -1 : 0;
}

void rpc_packer(msgpack_packer *pk, struct strbuf *out) {
    msgpack_packer_init(pk, out, append);
}

void rpc_pack_str(msgpack_packer *pk, const char *s) {
    msgpack_pack_str_with_body(pk, s, strlen(s));
}

void rpc_pack_text(msgpack_packer *pk, const char *bytes, size_t n) {
    if (utf8_valid(bytes, n)) msgpack_pack_str_with_body(pk, bytes, n);
    else msgpack_pack_bin_with_body(pk, bytes, n);
}

void rpc_pack_bool(msgpack_packer *pk, bool b) {
    if (b) msgpack_pack_true(pk);
    else msgpack_pack_false(pk);
}

void rpc_pack_real(msgpack_packer *pk, double x) {
    if (isfinite(x)) msgpack_pack_double(pk, x);
    else msgpack_pack_nil(pk);
}

void rpc_pack_result_head(msgpack_packer *pk, uint32_t id) {
    msgpack_pack_array(pk, 4);
    msgpack_pack_int(pk, RPC_RESPONSE);
    msgpack_pack_uint32(pk, id);
    msgpack_pack_nil(pk);
}

void rpc_pack_notification_head(msgpack_packer *pk, const char *method) {
    msgpack_pack_array(pk, 3);
    msgpack_pack_int(pk, RPC_NOTIFICATION);
    rpc_pack_str(pk, method);
}

void rpc_pack_request_head(msgpack_packer *pk, uint32_t id, const char *method) {
    msgpack_pack_array(pk, 4);
    msgpack_pack_int(pk, RPC_REQUEST);
    msgpack_pack_uint32(pk, id);
    rpc_pack_str(pk, method);
}

/* A message for people is always a str: where it quotes a client's bytes, or cut a character in
 * two, '?' stands for each byte that is no UTF-8. */
static void pack_message(msgpack_packer *pk, const char *s) {
    size_t n = strlen(s);
    if (utf8_valid(s, n)) {
        rpc_pack_str(pk, s);
        return;
    }
    msgpack_pack_str(pk, n);
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(s + i, n - i, &cp);
        if (len > 0) msgpack_pack_str_body(pk, s + i, (size_t)len);
        else msgpack_pack_str_body(pk, "?", 1);
        i += len > 0 ? (size_t)len : 1;
    }
}

void rpc_pack_error(msgpack_packer *pk, enum rpc_code code, const char *message,
                    const struct strbuf *data, int n_data) {
    msgpack_pack_array(pk, 3);
    msgpack_pack_int(pk, (int)code);
    pack_message(pk, message);
    msgpack_pack_map(pk, (size_t)n_data + 1);
    rpc_pack_str(pk, "name");
    rpc_pack_str(pk, rpc_code_name((int)code));
    if (n_data > 0) pk->callback(pk->data, data->data, data->n);
}

void rpc_pack_error_response(msgpack_packer *pk, uint32_t id, enum rpc_code code,
                             const char *message, const struct strbuf *data, int n_data) {
    msgpack_pack_array(pk, 4);
    msgpack_pack_int(pk, RPC_RESPONSE);
    msgpack_pack_uint32(pk, id);
    rpc_pack_error(pk, code, message, data, n_data);
    msgpack_pack_nil(pk);
}

/* ---- Values ---- */

bool rpc_text(const msgpack_object *o, const char **s, size_t *n) {
    if (o->type == MSGPACK_OBJECT_STR) {
        *s = o->via.str.ptr;
        *n = o->via.str.size;
        return true;
    }
    if (o->type == MSGPACK_OBJECT_BIN) {
        *s = o->via.bin.ptr;
        *n = o->via.bin.size;
        return true;
    }
    return false;
}

bool rpc_is_text(const msgpack_object *o) {
    return o->type == MSGPACK_OBJECT_STR || o->type == MSGPACK_OBJECT_BIN;
}

bool rpc_text_is(const msgpack_object *o, const char *s) {
    const char *t;
    size_t n;
    return rpc_text(o, &t, &n) && n == strlen(s) && memcmp(t, s, n) == 0;
}

bool rpc_int(const msgpack_object *o, int64_t lo, int64_t hi, int64_t *out) {
    int64_t v;
    switch (o->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        if (o->via.u64 > INT64_MAX) return false;
        v = (int64_t)o->via.u64;
        break;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        v = o->via.i64;
        break;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        if (!(fabs(o->via.f64) <= 0x1p53) || o->via.f64 != floor(o->via.f64)) return false;
        v = (int64_t)o->via.f64;
        break;
    default:
        return false;
    }
    if (v < lo || v > hi) return false;
    *out = v;
    return true;
}

bool rpc_u64(const msgpack_object *o, uint64_t *out) {
    int64_t v;
    if (o->type == MSGPACK_OBJECT_POSITIVE_INTEGER) *out = o->via.u64;
    else if (rpc_int(o, 0, INT64_MAX, &v)) *out = (uint64_t)v;
    else return false;
    return true;
}

bool rpc_real(const msgpack_object *o, double *out) {
    switch (o->type) {
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        *out = (double)o->via.u64;
        return true;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        *out = (double)o->via.i64;
        return true;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        *out = o->via.f64;
        return isfinite(*out);
    default:
        return false;
    }
}

const char *rpc_type_name(const msgpack_object *o) {
    switch (o->type) {
    case MSGPACK_OBJECT_NIL:
        return "nil";
    case MSGPACK_OBJECT_BOOLEAN:
        return "a boolean";
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
        return "an integer";
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
        return "a float";
    case MSGPACK_OBJECT_STR:
        return "a str";
    case MSGPACK_OBJECT_BIN:
        return "a bin";
    case MSGPACK_OBJECT_ARRAY:
        return "an array";
    case MSGPACK_OBJECT_MAP:
        return "a map";
    default:
        return "an extension";
    }
}

const msgpack_object *rpc_get(const msgpack_object *map, const char *key) {
    if (map->type != MSGPACK_OBJECT_MAP) return NULL;
    for (uint32_t i = 0; i < map->via.map.size; i++)
        if (rpc_text_is(&map->via.map.ptr[i].key, key)) return &map->via.map.ptr[i].val;
    return NULL;
}

/* Edits (insert, delete, replace, swap neighbours) between two short words; one row of the table at
 * a time with the two before it. */
static size_t distance(const char *a, size_t an, const char *b, size_t bn) {
    enum { MAX = 40 };
    size_t row[3][MAX + 1];
    if (an > MAX || bn > MAX) return MAX;
    for (size_t j = 0; j <= bn; j++) row[0][j] = j;
    for (size_t i = 1; i <= an; i++) {
        size_t *now = row[i % 3], *up = row[(i + 2) % 3], *up2 = row[(i + 1) % 3];
        now[0] = i;
        for (size_t j = 1; j <= bn; j++) {
            size_t d = up[j - 1] + (a[i - 1] != b[j - 1]);
            if (up[j] + 1 < d) d = up[j] + 1;
            if (now[j - 1] + 1 < d) d = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                up2[j - 2] + 1 < d)
                d = up2[j - 2] + 1;
            now[j] = d;
        }
    }
    return row[an % 3][bn];
}

const char *rpc_suggest(const char *s, size_t s_n, const char *const *words, size_t n) {
    const char *best = NULL;
    size_t best_d = s_n / 3 + 2; /* "max_token" -> "max_tokens", but nothing for noise */
    for (size_t i = 0; i < n; i++) {
        size_t w = strlen(words[i]);
        size_t d = distance(s, s_n, words[i], w);
        if (d < best_d && d < w) {
            best_d = d;
            best = words[i];
        }
    }
    return best;
}
