#include "cmd/eval_columns.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"

static const char *const names[EVAL_N_SELECTORS] = {
    [EVAL_DENSE] = "dense",   [EVAL_OBSERVED] = "observed", [EVAL_RECENT] = "recent",
    [EVAL_RANDOM] = "random", [EVAL_MEAN] = "mean",         [EVAL_SCORER] = "scorer",
    [EVAL_ORACLE] = "oracle",
};

const char *eval_selector_name(enum eval_selector s) {
    return names[s];
}

/* Scores of the oracle are chosen by as those of `observed` are. */
static int selector_of(enum eval_selector s) {
    switch (s) {
    case EVAL_RECENT:
        return TARGET_RECENT;
    case EVAL_RANDOM:
        return TARGET_RANDOM;
    case EVAL_MEAN:
        return TARGET_MEAN;
    case EVAL_SCORER:
        return TARGET_SCORER;
    case EVAL_DENSE:
        return TARGET_OFF;
    default:
        return TARGET_OBSERVED;
    }
}

/* ---- Lists of words ---- */

/* The next word of a list with commas: true while there is one. */
static bool next_word(const char **at, const char **word, size_t *n) {
    if (!*at || !**at) return false;
    *word = *at;
    *n = strcspn(*at, ",");
    *at += *n + ((*at)[*n] == ',');
    return true;
}

struct keep_word {
    char text[32];
    struct target_settings s; /* keep or keep_blocks alone is set */
};

static int read_keeps(const struct eval_wishes *w, struct keep_word *out, int *n_out,
                      struct err *e) {
    const char *word;
    size_t n;
    int count = 0;
    for (int kind = 0; kind < 2; kind++) {
        const char *at = kind ? w->keep : w->keep_blocks;
        while (next_word(&at, &word, &n)) {
            struct keep_word *k = &out[count];
            if (count == EVAL_MAX_KEEPS)
                return err_raise(e, E_RANGE, "more than %d kept sizes: '%.*s' is one too many",
                                 EVAL_MAX_KEEPS, (int)(n > 32 ? 32 : n), word);
            target_settings_unset(&k->s);
            snprintf(k->text, sizeof k->text, "%.*s", (int)(n > 31 ? 31 : n), word);
            if (kind) {
                int rc = target_keep_parse(&k->s, word, n, e);
                if (rc) return rc;
            } else {
                int end = 0;
                if (n == 0 || n > 7 || sscanf(k->text, "%d%n", &k->s.keep_blocks, &end) != 1 ||
                    (size_t)end != n || k->s.keep_blocks < 1 ||
                    k->s.keep_blocks > TARGET_MOST_BLOCKS)
                    return err_raise(e, E_RANGE,
                                     "keep_blocks '%s' is no number of blocks, allowed is [1, %d]",
                                     k->text, TARGET_MOST_BLOCKS);
            }
            count++;
        }
    }
    *n_out = count;
    return 0;
}

static int read_selectors(const struct eval_wishes *w, bool wanted[EVAL_N_SELECTORS],
                          struct err *e) {
    const char *at = w->selectors, *word;
    size_t n;
    while (next_word(&at, &word, &n)) {
        int found = -1;
        for (int i = 0; i < EVAL_N_SELECTORS; i++)
            if (strlen(names[i]) == n && !memcmp(names[i], word, n)) found = i;
        if (found < 0)
            return err_raise(e, E_RANGE,
                             "'%.*s' is no selector: dense, observed, recent, random, mean, "
                             "scorer or oracle",
                             (int)(n > 32 ? 32 : n), word);
        wanted[found] = true;
    }
    return 0;
}

/* ---- Columns ---- */

static int add_column(struct eval_columns *out, const struct eval_wishes *w,
                      enum eval_selector selector, int scorer, const struct keep_word *k,
                      bool again, struct err *e) {
    if (out->n == EVAL_MAX_COLUMNS)
        return err_raise(e, E_RANGE, "more than %d ways of reading", EVAL_MAX_COLUMNS);
    struct eval_column *c = &out->at[out->n++];
    struct target_settings wish = w->base;
    *c = (struct eval_column){.selector = selector, .scorer = scorer, .again = again};
    wish.selector = selector_of(selector);
    if (k) {
        wish.keep = k->s.keep;
        wish.keep_blocks = k->s.keep_blocks;
        wish.curve = k->s.curve;
    }
    int rc = target_settings_check(&wish, e);
    if (rc) return rc;
    struct target_settings none;
    target_settings_unset(&none);
    c->settings = target_settings_resolve(&none, &wish, scorer >= 0 ? &w->defaults[scorer] : NULL);
    c->settings.reselector = c->settings.selector;
    const char *path = scorer >= 0 ? w->scorers[scorer] : "";
    const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    int n_base = (int)strcspn(base, "."); /* late.safetensors: late */
    snprintf(c->name, sizeof c->name, "%s%s%.*s%s%s%s", names[selector], scorer >= 0 ? ":" : "",
             n_base > 24 ? 24 : n_base, base, k ? " " : "", k ? k->text : "",
             again ? " again" : "");
    return 0;
}

int eval_columns_make(struct eval_columns *out, const struct eval_wishes *w, struct err *e) {
    bool wanted[EVAL_N_SELECTORS] = {0};
    struct keep_word keeps[EVAL_MAX_KEEPS];
    int n_keeps = 0;
    out->n = 0;
    int rc = read_selectors(w, wanted, e);
    if (!rc) rc = read_keeps(w, keeps, &n_keeps, e);
    if (!rc && n_keeps == 0)
        rc = err_raise(e, E_INVALID, "nothing says how much is kept: give keep_blocks or keep");
    if (!rc && wanted[EVAL_SCORER] && w->n_scorers == 0)
        rc = err_raise(e, E_INVALID, "the selector 'scorer' needs a scorer's file");
    if (!rc) rc = add_column(out, w, EVAL_DENSE, -1, NULL, false, e);
    for (int s = EVAL_DENSE + 1; s < EVAL_N_SELECTORS; s++) {
        bool states = s == EVAL_SCORER || s == EVAL_MEAN;
        for (int f = 0; wanted[s] && f < (s == EVAL_SCORER ? w->n_scorers : 1); f++)
            for (int again = 0; again <= (w->again && states); again++)
                for (int k = 0; k < n_keeps && !rc; k++)
                    rc = add_column(out, w, (enum eval_selector)s, s == EVAL_SCORER ? f : -1,
                                    &keeps[k], again, e);
    }
    return rc;
}

int eval_column_select(const struct eval_column *c, const struct eval_scores *s, float *scratch,
                       int32_t *kept) {
    struct target_view v = {.n_tokens = s->n_tokens, .seed = s->seed};
    switch (c->selector) {
    case EVAL_OBSERVED:
        v.mass = s->observed;
        break;
    case EVAL_ORACLE:
        v.mass = s->oracle;
        break;
    case EVAL_MEAN:
        v.score = s->mean;
        break;
    case EVAL_SCORER:
        v.score = s->scorer[c->scorer];
        break;
    case EVAL_DENSE:
        return target_n_blocks(s->n_tokens);
    default:
        break;
    }
    return target_select(&c->settings, &v, scratch, kept);
}
