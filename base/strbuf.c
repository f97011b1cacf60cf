#include "base/strbuf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/utf8.h"

enum { STRBUF_MIN = 256 };

bool strbuf_reserve(struct strbuf *b, size_t n) {
    size_t limit = b->limit ? b->limit : (size_t)1 << 30;
    if (n > limit) return false;
    if (n < b->cap) return true;
    size_t cap = b->cap ? b->cap : STRBUF_MIN;
    while (cap <= n) cap *= 2; /* n <= limit <= 2^63, so this ends */
    char *p = realloc(b->data, cap);
    if (!p) return false;
    b->data = p;
    b->cap = cap;
    return true;
}

void strbuf_append(struct strbuf *b, const void *bytes, size_t n) {
    size_t total;
    if (b->failed) return;
    if (!checked_add(b->n, n, &total) || !strbuf_reserve(b, total)) {
        b->failed = true;
        return;
    }
    if (n) memcpy(b->data + b->n, bytes, n);
    b->n = total;
    b->data[total] = 0;
}

void strbuf_append_str(struct strbuf *b, const char *s) {
    strbuf_append(b, s, strlen(s));
}
void strbuf_append_char(struct strbuf *b, char c) {
    strbuf_append(b, &c, 1);
}

void strbuf_printf(struct strbuf *b, const char *fmt, ...) {
    char small[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(small, sizeof small, fmt, ap);
    va_end(ap);
    if (n < 0) {
        b->failed = true;
    } else if ((size_t)n < sizeof small) {
        strbuf_append(b, small, (size_t)n);
    } else {
        size_t total;
        if (b->failed || !checked_add(b->n, (size_t)n, &total) || !strbuf_reserve(b, total)) {
            b->failed = true;
            return;
        }
        va_start(ap, fmt);
        vsnprintf(b->data + b->n, (size_t)n + 1, fmt, ap);
        va_end(ap);
        b->n = total;
    }
}

void strbuf_append_json(struct strbuf *b, const char *s, size_t n) {
    strbuf_append_char(b, '"');
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int k = utf8_decode(s + i, n - i, &cp);
        if (k <= 0) {
            strbuf_append_str(b, "\\ufffd");
            i++;
            continue;
        }
        if (cp == '"' || cp == '\\') strbuf_printf(b, "\\%c", (char)cp);
        else if (cp == '\n') strbuf_append_str(b, "\\n");
        else if (cp == '<') strbuf_append_str(b, "\\u003c"); /* safe inside <script> */
        else if (cp < 0x20 || cp == 0x7f) strbuf_printf(b, "\\u%04x", cp);
        else strbuf_append(b, s + i, (size_t)k);
        i += (size_t)k;
    }
    strbuf_append_char(b, '"');
}

void strbuf_consume(struct strbuf *b, size_t n) {
    if (n > b->n) n = b->n;
    if (n == 0) return;
    memmove(b->data, b->data + n, b->n - n);
    b->n -= n;
    b->data[b->n] = 0;
}

void strbuf_clear(struct strbuf *b) {
    b->n = 0;
    b->failed = false;
    if (b->data) b->data[0] = 0;
}

void strbuf_deinit(struct strbuf *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}
