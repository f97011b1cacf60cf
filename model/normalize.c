/* Unicode normalisation form C. The tables and the composition are utf8proc's; the ordering of
 * combining marks is done here, because the library's own is quadratic in a run of marks and a
 * megabyte of them would hang a server.
 *
 * The models' own tokenizers normalise by Unicode 9 (measured on every code point against the
 * tokenizers package 0.23). Marks that are newer are starters to them: `newer` lists those. */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "model/tokenizer_private.h"

static bool is_ascii(const char *s, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)s[i] >= 0x80) return false;
    return true;
}

/* First and last code point of what utf8proc 2.8 (Unicode 15) orders or composes and Unicode 9 does
 * not. */
static const utf8proc_int32_t newer[][2] = {
    {0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},
    {0xc3c, 0xc3c},     {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},
    {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x10d24, 0x10d27},
    {0x10eab, 0x10eac}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85},
    {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e}, {0x11839, 0x1183a},
    {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943},
    {0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99},
    {0x11d42, 0x11d42}, {0x11d44, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42},
    {0x16ff0, 0x16ff1}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae},
    {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}};

static bool is_newer(utf8proc_int32_t cp) {
    size_t lo = 0, hi = sizeof newer / sizeof *newer;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (newer[mid][1] < cp) lo = mid + 1;
        else hi = mid;
    }
    return lo < sizeof newer / sizeof *newer && newer[lo][0] <= cp;
}

static int combining_class(utf8proc_int32_t cp) {
    int class = utf8proc_get_property(cp)->combining_class;
    return class > 0 && is_newer(cp) ? 0 : class;
}

/* Compose cp[0..n) between newer marks, which compose with nothing and let nothing compose across.
 */
static utf8proc_ssize_t compose(utf8proc_int32_t *cp, size_t n) {
    size_t kept = 0;
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && !is_newer(cp[end])) end++;
        utf8proc_ssize_t made = utf8proc_normalize_utf32(cp + i, (utf8proc_ssize_t)(end - i),
                                                         UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        if (made < 0) return made;
        memmove(cp + kept, cp + i, (size_t)made * sizeof *cp);
        kept += (size_t)made;
        if (end < n) cp[kept++] = cp[end++];
        i = end;
    }
    return (utf8proc_ssize_t)kept;
}

/* Stable sort of marks[0..n) by combining class (1..255): insertion for the usual few, counting
 * into `spare` for long runs. */
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
    /* A code point of two bytes decomposes into at most three others, one of three or four bytes
     * into at most four, one of one byte into itself. */
    size_t cap = 2 * n + 32, len = 0;
    utf8proc_int32_t *cp = malloc(2 * cap * sizeof *cp), *spare = cp ? cp + cap : NULL;
    if (!cp) return err_raise(e, E_NOMEM, "normalising %zu bytes", n);
    for (size_t i = 0; i < n;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(n - i), &c);
        utf8proc_ssize_t made = -1;
        int boundary = 0;
        if (used > 0 && is_newer(c)) {
            cp[len] = c;
            made = 1;
        } else if (used > 0) {
            made = utf8proc_decompose_char(c, cp + len, (utf8proc_ssize_t)(cap - len),
                                           UTF8PROC_STABLE | UTF8PROC_COMPOSE, &boundary);
        }
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
    utf8proc_ssize_t kept = compose(cp, len);
    for (utf8proc_ssize_t i = 0; i < kept; i++) {
        utf8proc_uint8_t bytes[4];
        strbuf_append(out, bytes, (size_t)utf8proc_encode_char(cp[i], bytes));
    }
    if (kept < 0 || out->failed) rc = err_raise(e, E_NOMEM, "normalising %zu bytes", n);
done:
    free(cp);
    return rc;
}
