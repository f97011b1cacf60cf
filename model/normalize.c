/* Unicode normalisation form C. The tables and the composition are utf8proc's; the ordering of
 * combining marks is done here, because the library's own is quadratic in a run of marks and a
 * megabyte of them would hang a server. */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "model/tokenizer_private.h"

static bool is_ascii(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)s[i] >= 0x80) return false;
    return true;
}

static int combining_class(utf8proc_int32_t cp) {
    return utf8proc_get_property(cp)->combining_class;
}

/* Stable sort of marks[0..n) by combining class (1..255): insertion for the usual few, counting into
 * `spare` for long runs. */
static void order_marks(utf8proc_int32_t *marks, size_t n, utf8proc_int32_t *spare) {
    if (n <= 16) {
        for (size_t i = 1; i < n; i++) {
            utf8proc_int32_t mark = marks[i];
            int class = combining_class(mark);
            size_t k = i;
            for (; k > 0 && combining_class(marks[k - 1]) > class; k--) marks[k] = marks[k - 1];
            marks[k] = mark;
        }
        return;
    }
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++) start[combining_class(marks[i]) + 1]++;
    for (int c = 0; c < 256; c++) start[c + 1] += start[c];
    for (size_t i = 0; i < n; i++) spare[start[combining_class(marks[i])]++] = marks[i];
    memcpy(marks, spare, n * sizeof *marks);
}

int normalize_nfc(const char *text, size_t n, struct strbuf *out, struct err *e) {
    if (is_ascii(text, n)) {
        strbuf_append(out, text, n);
        return out->failed ? err_raise(e, E_NOMEM, "normalising %zu bytes", n) : 0;
    }
    int rc = 0;
    /* A code point of two bytes decomposes into at most three others, one of three or four bytes into
     * at most four, one of one byte into itself. */
    size_t cap = 2 * n + 32, len = 0;
    utf8proc_int32_t *cp = malloc(2 * cap * sizeof *cp), *spare = cp ? cp + cap : NULL;
    if (!cp) return err_raise(e, E_NOMEM, "normalising %zu bytes", n);
    for (size_t i = 0; i < n;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(n - i), &c);
        utf8proc_ssize_t made = -1;
        int boundary = 0;
        if (used > 0)
            made = utf8proc_decompose_char(c, cp + len, (utf8proc_ssize_t)(cap - len),
                                           UTF8PROC_STABLE | UTF8PROC_COMPOSE, &boundary);
        if (made < 0 || (size_t)made > cap - len) {
            rc = err_raise(e, E_INVALID, "text at byte %zu cannot be normalised", i);
            goto done;
        }
        len += (size_t)made;
        i += (size_t)used;
    }
    for (size_t i = 0; i < len;) {
        size_t end = i;
        while (end < len && combining_class(cp[end]) > 0) end++;
        if (end - i > 1) order_marks(cp + i, end - i, spare);
        i = end + 1;
    }
    utf8proc_ssize_t kept =
        utf8proc_normalize_utf32(cp, (utf8proc_ssize_t)len, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    for (utf8proc_ssize_t i = 0; i < kept; i++) {
        utf8proc_uint8_t bytes[4];
        strbuf_append(out, bytes, (size_t)utf8proc_encode_char(cp[i], bytes));
    }
    if (kept < 0 || out->failed) rc = err_raise(e, E_NOMEM, "normalising %zu bytes", n);
done:
    free(cp);
    return rc;
}
