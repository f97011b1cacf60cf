#ifndef TANDEM_SERVE_RPC_H
#define TANDEM_SERVE_RPC_H

/* MessagePack-RPC's three shapes and this protocol's error table, without any socket.
 *
 *   request       [0, id, method, params]
 *   response      [1, id, error, result]
 *   notification  [2, method, params]
 *
 * docs/protocol.md is the description for people who write a client. */

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"

struct err;

enum {
    RPC_PROTOCOL_VERSION = 1,
    RPC_MAX_METHOD_BYTES = 64,
};

/* Codes of the socket protocol: number, name, meaning. Never renumber; new ones go to the end. */
#define RPC_ERRORS(X)                                                                              \
    X(1, PARSE, "parse_error", "the bytes are no message; the connection closes")                  \
    X(2, INVALID_REQUEST, "invalid_request", "no request of the described shape")                  \
    X(3, UNKNOWN_METHOD, "unknown_method", "no such method")                                       \
    X(4, INVALID_PARAMS, "invalid_params", "a parameter is missing, unknown or out of range")      \
    X(5, TOO_LONG, "too_long", "prompt and answer do not fit the context or the pool")             \
    X(6, OVERLOADED, "overloaded", "no room in the queue; try again later")                        \
    X(7, CANCELLED, "cancelled", "ended by a cancel request")                                      \
    X(8, SHUTTING_DOWN, "shutting_down", "the server takes no new work")                           \
    X(9, UNAUTHORIZED, "unauthorized", "hello with the right token must come first")               \
    X(10, NOT_FOUND, "not_found", "no such stream")                                                \
    X(11, UNSUPPORTED, "unsupported", "this server or model cannot do that")                       \
    X(12, DUPLICATE_ID, "duplicate_id", "a request with this id is still unanswered")              \
    X(13, INTERNAL, "internal", "our fault")                                                       \
    X(14, TOO_MANY, "too_many", "too many streams on this connection")

enum rpc_code {
#define RPC_ENUM(number, name, word, text) RPC_##name = number,
    RPC_ERRORS(RPC_ENUM)
#undef RPC_ENUM
};

/* "invalid_params"; "?" for a number outside the table. */
const char *rpc_code_name(int code);

/* The protocol's code for a library error (E_RANGE -> invalid_params and so on). */
enum rpc_code rpc_code_of(int err_code);

/* ---- Reading ---- */

enum rpc_type { RPC_REQUEST, RPC_RESPONSE, RPC_NOTIFICATION };

struct rpc_message {
    enum rpc_type type;
    uint32_t id;        /* request, response */
    const char *method; /* request, notification; not terminated */
    size_t method_n;
    msgpack_object_array params;  /* request, notification */
    msgpack_object error, result; /* response */
};

/* What may be done with a message. */
enum rpc_verdict {
    RPC_GOOD,
    RPC_ANSWER, /* no valid request, but its id is known: answer with invalid_request, go on */
    RPC_CLOSE,  /* nothing to answer to: close */
};

/* Take an unpacked message apart. `e` says what is wrong. Pointers go into the object's zone or
 * buffer. */
enum rpc_verdict rpc_read(struct rpc_message *m, const msgpack_object *o, struct err *e);

/* The id of a request whose first bytes are these, although the rest is unreadable; false where the
 * beginning is none of a request's. */
bool rpc_peek_id(const uint8_t *bytes, size_t n, uint32_t *id);

/* Unpack one whole message that scan_feed() passed. Strings point into `bytes`. E_NOMEM,
 * E_PROTOCOL. */
int rpc_unpack(msgpack_zone *zone, msgpack_object *out, const void *bytes, size_t n, struct err *e);

/* ---- Writing ---- */

/* A packer that appends to `out`; a full buffer marks it failed. */
void rpc_packer(msgpack_packer *pk, struct strbuf *out);

void rpc_pack_str(msgpack_packer *pk, const char *s);
/* str where the bytes are valid UTF-8, else bin: clients that decode str strictly must not fall
 * over. */
void rpc_pack_text(msgpack_packer *pk, const char *bytes, size_t n);
void rpc_pack_bool(msgpack_packer *pk, bool b);
/* A finite double; nil for NaN and infinities, which the protocol does not carry. */
void rpc_pack_real(msgpack_packer *pk, double x);

/* Heads, to be followed by what they announce: [1, id, nil, <result>]; [2, method, <params>]. */
void rpc_pack_result_head(msgpack_packer *pk, uint32_t id);
void rpc_pack_notification_head(msgpack_packer *pk, const char *method);
void rpc_pack_request_head(msgpack_packer *pk, uint32_t id, const char *method);

/* [1, id, [code, message, data], nil]; `data` holds n_data packed key-value pairs (may be NULL, 0).
 * The same error array alone with rpc_pack_error. */
void rpc_pack_error_response(msgpack_packer *pk, uint32_t id, enum rpc_code code,
                             const char *message, const struct strbuf *data, int n_data);
void rpc_pack_error(msgpack_packer *pk, enum rpc_code code, const char *message,
                    const struct strbuf *data, int n_data);

/* ---- Values ---- */

/* Bytes of a str or bin. */
bool rpc_is_text(const msgpack_object *o);
bool rpc_text(const msgpack_object *o, const char **s, size_t *n);
bool rpc_text_is(const msgpack_object *o, const char *s);
/* Any integer encoding, also a float with an integral value (some languages have no other). */
bool rpc_int(const msgpack_object *o, int64_t lo, int64_t hi, int64_t *out);
bool rpc_u64(const msgpack_object *o, uint64_t *out);
bool rpc_real(const msgpack_object *o, double *out);
/* "map", "integer": for messages. */
const char *rpc_type_name(const msgpack_object *o);
/* Value of a map's key, NULL where it has none. */
const msgpack_object *rpc_get(const msgpack_object *map, const char *key);

/* The word of words[0..n) that `s` was probably meant to be, NULL where none is near. */
const char *rpc_suggest(const char *s, size_t s_n, const char *const *words, size_t n);

#endif
