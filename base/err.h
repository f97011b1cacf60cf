#ifndef TANDEM_BASE_ERR_H
#define TANDEM_BASE_ERR_H

/* The one error convention of the project.
 *
 * A function that can fail returns `int`: 0 is success, a negative value is a code from the table
 * below. What the world did wrong (a bad file, a full pool, a rude client) is told in words through
 * a caller-owned `struct err *`, built at the place where the fact is known; what we did wrong is
 * an ASSERT. Libraries never print and never exit. Every `struct err *` parameter may be NULL. */

#include <stdbool.h>
#include <stddef.h>

/* name, text. The order is part of nothing: codes never leave the process (the socket protocol has
 * its own numbers, serve/rpc.h). */
#define ERR_TABLE(X)                                                                               \
    X(NOMEM, "out of memory")                                                                      \
    X(IO, "input/output error")                                                                    \
    X(FORMAT, "malformed file")                                                                    \
    X(UNSUPPORTED, "not supported")                                                                \
    X(INVALID, "invalid argument")                                                                 \
    X(RANGE, "out of range")                                                                       \
    X(TOO_LONG, "too long")                                                                        \
    X(FULL, "no room")                                                                             \
    X(BUSY, "busy")                                                                                \
    X(NOT_FOUND, "not found")                                                                      \
    X(CANCELLED, "cancelled")                                                                      \
    X(CLOSED, "closed")                                                                            \
    X(TIMEOUT, "timed out")                                                                        \
    X(AUTH, "not authorised")                                                                      \
    X(PROTOCOL, "protocol violation")                                                              \
    X(NUMERIC, "not a number in the model's output")                                               \
    X(DEVICE, "device error")

enum err_index {
#define ERR_ENUM(name, text) ERR_INDEX_##name,
    ERR_TABLE(ERR_ENUM)
#undef ERR_ENUM
        ERR_N_CODES
};

enum err_code {
    E_OK = 0,
#define ERR_ENUM(name, text) E_##name = -1 - ERR_INDEX_##name,
    ERR_TABLE(ERR_ENUM)
#undef ERR_ENUM
};

/* One failure told in words. Zero it before use (`struct err e = {0}`); code 0 means none. */
struct err {
    int code;           /* E_* */
    int line;           /* where it was raised */
    const char *file;   /* static string */
    char message[1000]; /* UTF-8, no newline at the end */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Short fixed text of `code` ("out of memory"); "ok" for 0. Never NULL. */
const char *err_text(int code);

/* Name of `code` without the prefix ("NOMEM"). Never NULL. */
const char *err_name(int code);

/* Fill `e` (may be NULL) and return `code`. Use the macro. Non-printable bytes of the finished
 * message are replaced by '?', so values from hostile files can be quoted. */
int err_raise_at(struct err *e, int code, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
#define err_raise(e, code, ...) err_raise_at((e), (code), __FILE__, __LINE__, __VA_ARGS__)

/* Put "context: " in front of e's message, keeping code and place; returns e's code, or `code`
 * where e is NULL. For a caller that knows the file name or the request. */
int err_prefix(struct err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Print the broken expression and abort. */
__attribute__((noreturn)) void assert_fail(const char *file, int line, const char *expr);

#ifdef __cplusplus
}
#endif

/* ASSERT stays in release builds: for our own bugs, at most a few a step. DASSERT is for hot loops
 * and vanishes unless the build is debug. */
#define ASSERT(x) ((x) ? (void)0 : assert_fail(__FILE__, __LINE__, #x))
#ifdef TANDEM_DEBUG
#define DASSERT(x) ASSERT(x)
#else
#define DASSERT(x) ((void)sizeof(x))
#endif

#endif
