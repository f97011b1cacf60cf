#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *err_text(int code) {
    switch (code) {
    case E_OK:
        return "ok";
#define ERR_CASE(name, text)                                                                       \
    case E_##name:                                                                                 \
        return text;
        ERR_TABLE(ERR_CASE)
#undef ERR_CASE
    }
    return "unknown error";
}

const char *err_name(int code) {
    switch (code) {
    case E_OK:
        return "OK";
#define ERR_CASE(name, text)                                                                       \
    case E_##name:                                                                                 \
        return #name;
        ERR_TABLE(ERR_CASE)
#undef ERR_CASE
    }
    return "UNKNOWN";
}

/* Control bytes would let a model file write to the reader's terminal. Bytes >= 0x80 stay: they are
 * UTF-8 in all text that we quote on purpose. */
static void make_printable(char *s) {
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f) *s = '?';
}

int err_raise_at(struct err *e, int code, const char *file, int line, const char *fmt, ...) {
    ASSERT(code < 0);
    if (!e) return code;
    e->code = code;
    e->file = file;
    e->line = line;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->message, sizeof e->message, fmt, ap);
    va_end(ap);
    make_printable(e->message);
    return code;
}

int err_prefix(struct err *e, int code, const char *fmt, ...) {
    if (!e) return code;
    char head[sizeof e->message];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof head - 3) return e->code;
    size_t at = (size_t)n, room = sizeof head - at - 3, len = strlen(e->message);
    if (len > room) len = room;
    memcpy(head + at, ": ", 2);
    memcpy(head + at + 2, e->message, len);
    head[at + 2 + len] = 0;
    memcpy(e->message, head, at + 3 + len);
    make_printable(e->message);
    return e->code;
}

void assert_fail(const char *file, int line, const char *expr) {
    fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, expr);
    fflush(stderr);
    abort();
}
