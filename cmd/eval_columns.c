#include "cmd/eval_columns.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/number.h"

static const char *const names[EVAL_N_SELECTORS] = {
    [EVAL_DENSE] = "dense",   [EVAL_OBSERVED] = "observed", [EVAL_RECENT] = "recent",
    [EVAL_RANDOM] = "random", [EVAL_MEAN] = "mean",         [EVAL_MINMAX] = "minmax",
    [EVAL_BOUND] = "bound",   [EVAL_SCORER] = "scorer",     [EVAL_ORACLE] = "oracle",
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
    case EVAL_MINMAX:
        return TARGET_MINMAX;
    case EVAL_BOUND:
        return TARGET_BOUND;
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
                if (!number_in(word, n, 1, TARGET_MOST_BLOCKS, &k->s.keep_blocks))
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
                             "minmax, bound, scorer or oracle",
                             (int)(n > 32 ? 32 : n), word);
        wanted[found] = true;
    }
    return 0;
}

/* Numbers of [0, 1] with commas between; none: one that is unset. */
struct number_word {
    char text[16]; /* "" where it is the only one */
    double value;
};
static int read_numbers(const char *list, const char *name, struct number_word *out, int *n_out,
                        struct err *e) {
    const char *word, *at = list;
    size_t n;
    out[0] = (struct number_word){.value = TARGET_UNSET};
    *n_out = 0;
    while (next_word(&at, &word, &n)) {
        struct number_word *w = &out[*n_out];
        if (*n_out == EVAL_MAX_KEEPS)
            return err_raise(e, E_RANGE, "%s: more than %d", name, EVAL_MAX_KEEPS);
        snprintf(w->text, sizeof w->text, "%.*s", (int)(n > 15 ? 15 : n), word);
        if (n > 15 || !number_real(word, n, &w->value) || !(w->value >= 0 && w->value <= 1))
            return err_raise(e, E_RANGE, "%s is '%s', allowed is [0, 1]", name, w->text);
        ++*n_out;
    }
    if (*n_out <= 1) out[0].text[0] = 0;
    if (*n_out == 0) *n_out = 1;
    return 0;
}

/* Lists of one selection beyond one of whole blocks of 64. */
struct part_word {
    char text[24]; /* what a column's name ends with */
    int lists, select2, quarters, size;
    double drop;
    bool used;
};

static struct part_word *add_part(struct part_word *out, int *n, struct err *e) {
    if (*n == EVAL_MAX_PARTS) {
        err_raise(e, E_RANGE, "more than %d ways by lists, select2, quarters, sizes and drop",
                  EVAL_MAX_PARTS);
        return NULL;
    }
    out[*n] = (struct part_word){
        .lists = TARGET_UNSET, .select2 = TARGET_UNSET, .quarters = TARGET_UNSET};
    return &out[(*n)++];
}

/* The numbers of one list of words, each of [lo, hi]. */
static int part_number(const char *name, const char *word, size_t n, int lo, int hi, int *out,
                       struct err *e) {
    if (number_in(word, n, lo, hi, out)) return 0;
    return err_raise(e, E_RANGE, "%s is '%.*s', allowed is [%d, %d]", name, (int)(n > 32 ? 32 : n),
                     word, lo, hi);
}

static int read_parts(const struct eval_wishes *w, struct part_word *out, int *n_out,
                      struct err *e) {
    const struct target_deep *d = &w->deep;
    const char *const list[] = {w->lists, w->select2, w->quarters, w->sizes, w->drop};
    const char *word;
    size_t n;
    *n_out = 0;
    for (int kind = 0; kind < 5; kind++) {
        const char *at = list[kind];
        while (next_word(&at, &word, &n)) {
            struct part_word *p = add_part(out, n_out, e);
            const char *behind = "";
            int rc = p ? 0 : E_RANGE;
            if (!rc && kind == 0) rc = target_lists_parse(&p->lists, word, n, e);
            if (!rc && kind == 1)
                rc = part_number("select2", word, n, d->first + 1, d->first + d->n_layers - 1,
                                 &p->select2, e);
            if (!rc && kind == 2)
                rc = part_number("quarters", word, n, 1, TARGET_QUARTERS - 1, &p->quarters, e);
            if (!rc && kind == 3) rc = part_number("sizes", word, n, 16, 128, &p->size, e);
            if (!rc && kind == 3 && p->size != 16 && p->size != 32 && p->size != 128)
                rc = err_raise(e, E_RANGE, "sizes has %d, allowed are 16, 32 and 128", p->size);
            if (!rc && kind == 4 &&
                (!number_real(word, n, &p->drop) || !(p->drop > 0 && p->drop < 1)))
                rc = err_raise(e, E_RANGE, "drop is '%.*s', allowed is (0, 1)",
                               (int)(n > 32 ? 32 : n), word);
            if (rc) return rc;
            behind = kind == 0   ? " by "
                     : kind == 1 ? " from "
                     : kind == 2 ? " q"
                     : kind == 3 ? " of "
                                 : " drop ";
            snprintf(p->text, sizeof p->text, "%s%.*s", behind, (int)(n > 8 ? 8 : n), word);
        }
    }
    return 0;
}

/* Can a selector (and scorer) be had so? */
static bool can_part(const struct eval_wishes *w, const struct part_word *p,
                     enum eval_selector selector, int scorer) {
    bool many = p->lists > TARGET_LISTS_ONE || p->select2 > 0;
    if (p->drop > 0)
        return selector == EVAL_OBSERVED || (selector >= EVAL_MEAN && selector <= EVAL_SCORER);
    if (selector == EVAL_OBSERVED) return true;
    if (many) return false;
    return selector == EVAL_MEAN || (selector == EVAL_SCORER && w->measures_quarters[scorer]);
}

/* ---- Columns ---- */

/* What a column differs by from the next. */
struct shape {
    enum eval_selector selector;
    int scorer; /* -1: none */
    const struct keep_word *keep;
    const struct number_word *reserve, *smooth;
    enum eval_anew anew;
    bool recheck;
    const struct part_word *part;
};

static void name_column(struct eval_column *c, const struct eval_wishes *w, const struct shape *s) {
    static const char *const anew[EVAL_N_ANEW] = {"", " again", " each step"};
    const char *path = s->scorer >= 0 ? w->scorers[s->scorer] : "";
    const char *base = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    int n_base = (int)strcspn(base, "."); /* late.safetensors: late */
    bool r = s->reserve && s->reserve->text[0], m = s->smooth && s->smooth->text[0];
    snprintf(c->name, sizeof c->name, "%s%s%.*s%s%s%s%s%s%s%s%s%s", names[s->selector],
             s->scorer >= 0 ? ":" : "", n_base > 24 ? 24 : n_base, base, s->keep ? " " : "",
             s->keep ? s->keep->text : "", r ? " r" : "", r ? s->reserve->text : "", m ? " s" : "",
             m ? s->smooth->text : "", anew[s->anew], s->recheck ? " border" : "",
             s->part ? s->part->text : "");
}

static int add_column(struct eval_columns *out, const struct eval_wishes *w, const struct shape *s,
                      struct err *e) {
    if (out->n == EVAL_MAX_COLUMNS)
        return err_raise(e, E_RANGE, "more than %d ways of reading", EVAL_MAX_COLUMNS);
    struct eval_column *c = &out->at[out->n++];
    struct target_settings wish = w->base, none;
    *c = (struct eval_column){.selector = s->selector, .scorer = s->scorer, .anew = s->anew};
    wish.selector = selector_of(s->selector);
    if (s->keep) {
        wish.keep = s->keep->s.keep;
        wish.keep_blocks = s->keep->s.keep_blocks;
        wish.curve = s->keep->s.curve;
    }
    if (s->reserve) wish.reserve = s->reserve->value;
    if (s->smooth) wish.smooth = s->smooth->value;
    if (s->recheck) wish.recheck = TARGET_RECHECK_BORDER;
    if (s->part) {
        c->size = s->part->size;
        wish.lists = s->part->lists;
        wish.select2 = s->part->select2;
        wish.quarters = s->part->quarters;
        wish.drop = s->part->drop > 0 ? s->part->drop : TARGET_UNSET;
        /* Its epoch ends where a late fact comes up. */
        if (s->part->drop > 0) wish.reselect = TARGET_MOST_BLOCKS;
    }
    int rc = target_settings_check(&wish, e);
    if (rc) return rc;
    target_settings_unset(&none);
    c->settings =
        target_settings_resolve(&none, &wish, s->scorer >= 0 ? &w->defaults[s->scorer] : NULL);
    name_column(c, w, s);
    return 0;
}

/* Columns of one selector (and scorer). */
struct lists {
    struct keep_word keep[EVAL_MAX_KEEPS];
    struct number_word reserve[EVAL_MAX_KEEPS], smooth[EVAL_MAX_KEEPS];
    struct part_word part[EVAL_MAX_PARTS];
    int n_keep, n_reserve, n_smooth, n_part;
};

static int add_selector(struct eval_columns *out, const struct eval_wishes *w, struct lists *l,
                        enum eval_selector selector, int scorer, struct err *e) {
    bool measures = selector != EVAL_RECENT && selector != EVAL_RANDOM;
    bool anew = measures && selector != EVAL_ORACLE;
    int n_smooth = measures ? l->n_smooth : 1, rc = 0;
    for (int a = 0; a <= EVAL_N_ANEW + l->n_part && !rc; a++) {
        bool recheck = a == EVAL_N_ANEW;
        struct part_word *part = a > EVAL_N_ANEW ? &l->part[a - EVAL_N_ANEW - 1] : NULL;
        if (part && !can_part(w, part, selector, scorer)) continue;
        if (a > 0 && !part && !(anew && (recheck ? w->recheck : w->anew[a]))) continue;
        if (part) part->used = true;
        for (int i = 0; !rc && i < l->n_keep * l->n_reserve * n_smooth; i++) {
            struct shape s = {.selector = selector,
                              .scorer = scorer,
                              .keep = &l->keep[i % l->n_keep],
                              .reserve = &l->reserve[i / l->n_keep % l->n_reserve],
                              .smooth = measures ? &l->smooth[i / l->n_keep / l->n_reserve] : NULL,
                              .anew = part && part->drop > 0 ? EVAL_AGAIN
                                      : recheck || part      ? EVAL_ONCE
                                                             : (enum eval_anew)a,
                              .recheck = recheck,
                              .part = part};
            rc = add_column(out, w, &s, e);
        }
    }
    return rc;
}

int eval_columns_make(struct eval_columns *out, const struct eval_wishes *w, struct err *e) {
    bool wanted[EVAL_N_SELECTORS] = {0};
    struct lists l = {0};
    out->n = 0;
    int rc = read_selectors(w, wanted, e);
    if (!rc) rc = read_keeps(w, l.keep, &l.n_keep, e);
    if (!rc) rc = read_numbers(w->reserve, "reserve", l.reserve, &l.n_reserve, e);
    if (!rc) rc = read_numbers(w->smooth, "smooth", l.smooth, &l.n_smooth, e);
    if (!rc) rc = read_parts(w, l.part, &l.n_part, e);
    if (!rc && l.n_keep == 0)
        rc = err_raise(e, E_INVALID, "nothing says how much is kept: give keep_blocks or keep");
    if (!rc && wanted[EVAL_SCORER] && w->n_scorers == 0)
        rc = err_raise(e, E_INVALID, "the selector 'scorer' needs a scorer's file");
    if (!rc) rc = add_column(out, w, &(struct shape){.selector = EVAL_DENSE, .scorer = -1}, e);
    for (int s = EVAL_DENSE + 1; s < EVAL_N_SELECTORS; s++)
        for (int f = 0; wanted[s] && !rc && f < (s == EVAL_SCORER ? w->n_scorers : 1); f++)
            rc = add_selector(out, w, &l, (enum eval_selector)s, s == EVAL_SCORER ? f : -1, e);
    for (int i = 0; i < l.n_part && !rc; i++)
        if (!l.part[i].used)
            rc = err_raise(e, E_INVALID,
                           "'%s': lists and select2 are had of observed alone, quarters and sizes "
                           "of observed, mean and scorers that are late, drop of observed and "
                           "those by states; none of these is asked for",
                           l.part[i].text + 1);
    return rc;
}

bool eval_column_is_apart(const struct eval_column *c) {
    return c->size || target_has_lists(&c->settings) || target_has_quarters(&c->settings);
}

bool eval_columns_are_apart(const struct eval_columns *c) {
    for (int i = 0; i < c->n; i++)
        if (eval_column_is_apart(&c->at[i])) return true;
    return false;
}

bool eval_column_is_plain(const struct eval_column *c) {
    return c->anew == EVAL_ONCE && c->settings.recheck != TARGET_RECHECK_BORDER &&
           !eval_column_is_apart(c);
}

const float *eval_column_numbers(const struct eval_column *c, const struct eval_scores *s) {
    switch (c->selector) {
    case EVAL_OBSERVED:
        return s->observed;
    case EVAL_ORACLE:
        return s->oracle;
    case EVAL_MEAN:
        return s->mean;
    case EVAL_MINMAX:
        return s->minmax;
    case EVAL_BOUND:
        return s->bound;
    case EVAL_SCORER:
        return s->scorer[c->scorer];
    default:
        return NULL;
    }
}

const float *eval_column_quarters(const struct eval_column *c, const struct eval_scores *s) {
    return c->selector == EVAL_MEAN     ? s->mean_quarters
           : c->selector == EVAL_SCORER ? s->scorer_quarters[c->scorer]
                                        : NULL;
}

static struct target_view view_of(const struct eval_column *c, const struct eval_scores *s) {
    const float *numbers = eval_column_numbers(c, s);
    bool seen = c->selector == EVAL_OBSERVED || c->selector == EVAL_ORACLE;
    return (struct target_view){.n_tokens = s->n_tokens,
                                .seed = s->seed,
                                .mass = seen ? numbers : NULL,
                                .score = seen ? NULL : numbers,
                                .attention = s->attention,
                                .used = s->used};
}

int eval_column_recheck(const struct eval_column *c, const struct eval_scores *s, float *scratch,
                        int32_t *list) {
    const struct target_view v = view_of(c, s);
    if (!target_selects(&c->settings, s->n_tokens)) return 0;
    return target_recheck(&c->settings, &v, scratch, list);
}

int eval_column_select(const struct eval_column *c, const struct eval_scores *s, float *scratch,
                       int32_t *kept) {
    const struct target_view v = view_of(c, s);
    if (c->selector == EVAL_DENSE) return target_n_blocks(s->n_tokens);
    return target_select(&c->settings, &v, scratch, kept);
}
