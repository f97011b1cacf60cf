/* Special and user-defined tokens, found in raw text before anything else is done to it. */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "model/tokenizer_private.h"

struct entry {
    const char *text;
    size_t n;
    int32_t id;
};

static int compare_entries(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    int c = memcmp(x->text, y->text, x->n < y->n ? x->n : y->n);
    if (c) return c;
    return x->n < y->n ? -1 : x->n > y->n;
}

static bool is_added(int type) {
    return type == TOKEN_CONTROL || type == TOKEN_UNKNOWN || type == TOKEN_USER_DEFINED;
}

int added_build(struct added *a, const struct vocab *v, const uint8_t *flags, struct err *e) {
    size_t n = 0, len;
    for (int id = 0; id < v->n; id++)
        n += is_added(v->type[id]) && v->offset[id + 1] > v->offset[id];
    if (n == 0) return 0;
    struct entry *entries = malloc(n * sizeof *entries);
    a->sorted = malloc(n * sizeof *a->sorted);
    a->flags = calloc(n, sizeof *a->flags);
    if (!entries || !a->sorted || !a->flags) {
        free(entries);
        return err_raise(e, E_NOMEM, "%zu added tokens", n);
    }
    n = 0;
    for (int id = 0; id < v->n; id++) {
        const char *text = vocab_text(v, id, &len);
        if (is_added(v->type[id]) && len) entries[n++] = (struct entry){text, len, id};
    }
    qsort(entries, n, sizeof *entries, compare_entries);
    for (size_t i = 0; i < n; i++) {
        a->sorted[i] = entries[i].id;
        if (flags) a->flags[i] = flags[entries[i].id];
        a->first[(uint8_t)entries[i].text[0]] = true;
    }
    a->n = (int)n;
    free(entries);
    return 0;
}

void added_deinit(struct added *a) {
    free(a->sorted);
    free(a->flags);
    *a = (struct added){0};
}

/* First index in sorted[lo..hi) whose byte `depth` is >= b; entries shorter than that come first.
 */
static int lower_bound(const struct added *a, const struct vocab *v, int lo, int hi, size_t depth,
                       int b) {
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        size_t n;
        const char *s = vocab_text(v, a->sorted[mid], &n);
        if (n <= depth || (uint8_t)s[depth] < b) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* Longest allowed entry that text[0..n) begins with: its place in sorted, or -1. Narrows the sorted
 * range byte by byte; the entry that ends at a depth is the range's first. */
static int longest_at(const struct added *a, const struct vocab *v, const char *text, size_t n,
                      bool special) {
    int lo = 0, hi = a->n, best = -1;
    for (size_t depth = 0; depth < n && lo < hi; depth++) {
        int b = (uint8_t)text[depth];
        lo = lower_bound(a, v, lo, hi, depth, b);
        hi = lower_bound(a, v, lo, hi, depth, b + 1);
        if (lo == hi) break;
        size_t len;
        vocab_text(v, a->sorted[lo], &len);
        bool allowed = special || v->type[a->sorted[lo]] == TOKEN_USER_DEFINED;
        if (len == depth + 1 && allowed) best = lo;
    }
    return best;
}

size_t added_space_at(const char *text, size_t n) {
    uint32_t cp;
    int used = n ? utf8_decode(text, n, &cp) : 0;
    if (used <= 0) return 0;
    bool space = (cp >= 9 && cp <= 13) || cp == 0x20 || cp == 0x85 || cp == 0xa0 || cp == 0x1680 ||
                 (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 || cp == 0x202f ||
                 cp == 0x205f || cp == 0x3000;
    return space ? (size_t)used : 0;
}

/* Where the white space that ends at `end` begins, not before `from`. */
static size_t space_before(const char *text, size_t from, size_t end) {
    while (end > from) {
        size_t start = end - 1;
        while (start > from && ((uint8_t)text[start] & 0xc0) == 0x80) start--;
        if (added_space_at(text + start, end - start) != end - start) break;
        end = start;
    }
    return end;
}

bool added_next(const struct added *a, const struct vocab *v, const char *text, size_t n,
                size_t from, bool special, struct added_match *m) {
    if (a->n == 0) return false;
    for (size_t i = from; i < n; i++) {
        if (!a->first[(uint8_t)text[i]]) continue;
        int at = longest_at(a, v, text + i, n - i, special);
        if (at < 0) continue;
        size_t len, space;
        m->id = a->sorted[at];
        vocab_text(v, m->id, &len);
        m->begin = i;
        m->end = i + len;
        if (a->flags[at] & ADDED_LSTRIP) m->begin = space_before(text, from, i);
        if (a->flags[at] & ADDED_RSTRIP)
            while ((space = added_space_at(text + m->end, n - m->end)) > 0) m->end += space;
        return true;
    }
    return false;
}
