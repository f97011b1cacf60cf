#include "cmd/options.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/number.h"

enum { MAX_NAME = 40 };

static size_t edit_distance(const char *a, const char *b) {
    size_t row[MAX_NAME + 1], n = strlen(b);
    if (n > MAX_NAME || strlen(a) > MAX_NAME) return MAX_NAME;
    for (size_t j = 0; j <= n; j++) row[j] = j;
    for (size_t i = 0; a[i]; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < n; j++) {
            size_t change = diagonal + (a[i] != b[j]);
            diagonal = row[j + 1];
            row[j + 1] = min_size(change, min_size(row[j], diagonal) + 1);
        }
    }
    return row[n];
}

const char *options_nearest(const char *word, const char *const *names, size_t n) {
    const char *best = NULL;
    size_t least = 4;
    for (size_t i = 0; i < n; i++) {
        size_t d = edit_distance(word, names[i]);
        if (d < least || (!best && strlen(word) >= 3 && !strncmp(names[i], word, strlen(word)))) {
            least = d < least ? d : least;
            best = names[i];
        }
    }
    return best;
}

int options_error(const struct options *o, const char *fmt, ...) {
    fprintf(stderr, "tandem %s: ", o->command);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fprintf(stderr, "\nTry 'tandem %s --help'.\n", o->command);
    return 2;
}

static void print_option(const struct option *t) {
    char left[96];
    int n = t->letter ? snprintf(left, sizeof left, "  -%c, --%s", t->letter, t->name)
                      : snprintf(left, sizeof left, "      --%s", t->name);
    if (t->arg && n > 0 && (size_t)n < sizeof left)
        snprintf(left + n, sizeof left - (size_t)n, " %s", t->arg);
    if (strlen(left) > 30) printf("%s\n%32s", left, "");
    else printf("%-32s", left);
    printf("%s", t->help);
    if (t->show) printf(" (default %s)", t->show);
    const char *w = t->alias;
    size_t n_word;
    for (const char *before = " [also "; w && (n_word = strcspn(w, " ")) > 0; before = ", ") {
        printf("%s%s%.*s", before, w[0] == '-' ? "" : "--", (int)n_word, w);
        w += n_word + (w[n_word] == ' ');
    }
    printf(t->alias ? "]\n" : "\n");
}

static int print_help(const struct options *o) {
    printf("Usage: %s\n\n%s\n", o->usage, o->about);
    for (const struct option *t = o->table; t->name; t++) {
        if (t->kind == OPTION_GROUP) printf("\n%s\n", t->name);
        else print_option(t);
    }
    printf("  -h, --help                    show this text\n");
    if (o->after) printf("\n%s\n", o->after);
    return 0;
}

/* Binary units whatever the spelling, as vLLM and llama.cpp users expect of memory. */
static bool parse_bytes(const char *s, double *out) {
    size_t n = strspn(s, "0123456789.eE+-");
    const char *end = s + n;
    double v;
    if (!number_real(s, n, &v)) return false;
    static const char units[] = "kmgt";
    char c = (char)(*end | 32);
    const char *u = *end ? strchr(units, c) : NULL;
    if (u) {
        for (long i = 0; i <= u - units; i++) v *= 1024;
        end++;
        if (*end == 'i') end++;
    }
    if (*end == 'B' || *end == 'b') end++;
    *out = v;
    return *end == 0;
}

static int set_value(const struct options *o, const struct option *t, const char *s) {
    bool bounded = t->lo != 0 || t->hi != 0;
    double v = 0;
    int whole;
    switch (t->kind) {
    case OPTION_STRING:
        *(const char **)t->out = s;
        return -1;
    case OPTION_INT:
        if (!number_in(s, strlen(s), -INT32_MAX, INT32_MAX, &whole))
            return options_error(o, "--%s: '%s' is not an integer", t->name, s);
        v = whole;
        break;
    case OPTION_DOUBLE:
    case OPTION_BELOW:
        if (!number_real(s, strlen(s), &v))
            return options_error(o, "--%s: '%s' is not a number", t->name, s);
        break;
    case OPTION_BYTES:
        if (!parse_bytes(s, &v) || v < 0 || v > 9e15)
            return options_error(o, "--%s: '%s' is not a size (512M, 2GiB)", t->name, s);
        break;
    case OPTION_FLAG:
    case OPTION_SWITCH:
    case OPTION_GROUP:
        return options_error(o, "--%s takes no value ('%s')", t->name, s);
    }
    bool below = t->kind == OPTION_BELOW;
    if (bounded && !(v >= t->lo && v <= t->hi && !(below && v == t->hi)))
        return options_error(o, "--%s: %s is not in %.15g..%s%.15g", t->name, s, t->lo,
                             below ? "below " : "", t->hi);
    if (t->kind == OPTION_INT) *(int *)t->out = (int)v;
    else if (t->kind == OPTION_BYTES) *(size_t *)t->out = (size_t)v;
    else *(double *)t->out = v;
    return -1;
}

/* Is name[0..n) one of the words of `list` (NULL: none)? */
static bool is_alias(const char *list, const char *name, size_t n) {
    for (const char *w = list; w && *w;) {
        size_t n_word = strcspn(w, " ");
        if (n_word == n && !strncmp(w, name, n)) return true;
        w += n_word + (w[n_word] == ' ');
    }
    return false;
}

static const struct option *find(const struct options *o, const char *name, size_t n,
                                 bool *negated) {
    for (int pass = 0; pass < 2; pass++) {
        for (const struct option *t = o->table; t->name; t++) {
            if (t->kind == OPTION_GROUP) continue;
            if ((strlen(t->name) == n && !strncmp(t->name, name, n)) ||
                is_alias(t->alias, name, n)) {
                *negated = pass == 1;
                return pass == 1 && t->kind != OPTION_FLAG && t->kind != OPTION_SWITCH ? NULL : t;
            }
        }
        if (n < 4 || strncmp(name, "no-", 3) != 0) return NULL;
        name += 3;
        n -= 3;
    }
    return NULL;
}

static int unknown(const struct options *o, const char *word) {
    const char *names[128];
    size_t n = 0;
    for (const struct option *t = o->table; t->name && n < 128; t++)
        if (t->kind != OPTION_GROUP) names[n++] = t->name;
    const char *near = options_nearest(word + strspn(word, "-"), names, n);
    if (near) return options_error(o, "unknown option '%s'; did you mean --%s?", word, near);
    return options_error(o, "unknown option '%s'", word);
}

int options_parse(struct options *o, int argc, char **argv) {
    bool only_words = false;
    for (int i = 0; i < argc; i++) {
        const char *w = argv[i];
        if (only_words || w[0] != '-' || w[1] == 0) {
            if (o->n_words >= o->max_words) return options_error(o, "unexpected word '%s'", w);
            o->words[o->n_words++] = w;
            continue;
        }
        if (!strcmp(w, "--")) {
            only_words = true;
            continue;
        }
        if (!strcmp(w, "--help") || !strcmp(w, "-h")) return print_help(o);
        const struct option *t = NULL;
        const char *value = NULL;
        bool negated = false;
        if (w[1] == '-') {
            const char *eq = strchr(w, '=');
            t = find(o, w + 2, eq ? (size_t)(eq - w - 2) : strlen(w + 2), &negated);
            if (eq) value = eq + 1;
        } else {
            for (const struct option *x = o->table; x->name && !t; x++)
                if (is_alias(x->alias, w, strlen(w))) t = x; /* -md, before -m with "d" */
            bool whole = t != NULL;
            for (const struct option *x = o->table; x->name && !t; x++)
                if (x->letter == w[1] && w[1]) t = x;
            if (t && !whole && w[2]) value = w + 2;
        }
        if (!t) return unknown(o, w);
        if (t->kind == OPTION_FLAG && !value) {
            *(bool *)t->out = !negated;
            continue;
        }
        if (t->kind == OPTION_SWITCH && !value) {
            *(int *)t->out = !negated;
            continue;
        }
        if (!value) {
            if (i + 1 >= argc) return options_error(o, "--%s needs a value (%s)", t->name, t->arg);
            value = argv[++i];
        }
        int rc = set_value(o, t, value);
        if (rc >= 0) return rc;
    }
    return -1;
}
