#ifndef TANDEM_BASE_STRBUF_H
#define TANDEM_BASE_STRBUF_H

/* A growing byte buffer with a limit. A failed append leaves it unchanged and marks it failed, so
 * that a long run of appends is checked once at its end. Always NUL-terminated when non-empty. */

#include <stdbool.h>
#include <stddef.h>

struct strbuf {
    char *data; /* heap, owned */
    size_t n;   /* bytes used, without the NUL */
    size_t cap;
    size_t limit; /* most bytes it may hold; 0 means 1 GiB */
    bool failed;  /* an append did not fit or memory ran out */
};

void strbuf_append(struct strbuf *b, const void *bytes, size_t n);
void strbuf_append_str(struct strbuf *b, const char *s);
void strbuf_append_char(struct strbuf *b, char c);
void strbuf_printf(struct strbuf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Append s[0..n) as a JSON string with quotes; invalid UTF-8 becomes U+FFFD. */
void strbuf_append_json(struct strbuf *b, const char *s, size_t n);

/* Make room for n bytes in all now, so that appends up to there never allocate. */
bool strbuf_reserve(struct strbuf *b, size_t n);

/* Drop the first n bytes. */
void strbuf_consume(struct strbuf *b, size_t n);

void strbuf_clear(struct strbuf *b);
void strbuf_deinit(struct strbuf *b);

#endif
