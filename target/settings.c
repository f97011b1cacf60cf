/* What may be asked of a selection, and how a request's wish lies over the engine's. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/number.h"
#include "target/target.h"

static const char *const names[TARGET_N_SELECTORS] = {
    [TARGET_OFF] = "off",       [TARGET_ALL] = "all",       [TARGET_OBSERVED] = "observed",
    [TARGET_RECENT] = "recent", [TARGET_RANDOM] = "random", [TARGET_SCORER] = "scorer",
    [TARGET_MEAN] = "mean",     [TARGET_MINMAX] = "minmax", [TARGET_BOUND] = "bound",
};

const char *target_selector_name(int selector) {
    return (unsigned)selector < TARGET_N_SELECTORS ? names[selector] : "?";
}

/* ---- Texts ---- */

static int shown(size_t n) {
    return n > 32 ? 32 : (int)n;
}

static bool is_word(const char *s, size_t n, const char *word) {
    return strlen(word) == n && memcmp(s, word, n) == 0;
}

static int find_selector(const char *s, size_t n) {
    for (int i = 0; i < TARGET_N_SELECTORS; i++)
        if (is_word(s, n, names[i])) return i;
    return TARGET_UNSET;
}

int target_selector_parse(int *out, const char *s, size_t n, struct err *e) {
    int selector = find_selector(s, n);
    if (selector == TARGET_UNSET)
        return err_raise(e, E_RANGE,
                         "sparse is \"%.*s\", allowed is \"off\", \"all\", \"observed\", "
                         "\"scorer\", \"mean\", \"minmax\", \"bound\", \"recent\" or \"random\"",
                         shown(n), s);
    *out = selector;
    return 0;
}

/* Rows of the prompt are not there any more, and off is no way to select. */
static bool reselects(int selector) {
    return selector == TARGET_RECENT || selector == TARGET_RANDOM || target_by_states(selector);
}

int target_reselector_parse(int *out, const char *s, size_t n, struct err *e) {
    int selector = find_selector(s, n);
    if (!reselects(selector))
        return err_raise(e, E_RANGE,
                         "reselector is \"%.*s\", allowed is \"scorer\", \"mean\", "
                         "\"minmax\", \"bound\", \"recent\" or \"random\"",
                         shown(n), s);
    *out = selector;
    return 0;
}

int target_threshold_parse(double *out, const char *s, size_t n, struct err *e) {
    if (is_word(s, n, "off")) {
        *out = TARGET_NO_THRESHOLD;
        return 0;
    }
    if (number_real(s, n, out)) return 0;
    return err_raise(e, E_RANGE, "keep_threshold is \"%.*s\", allowed is \"off\" or a number",
                     shown(n), s);
}

const char *target_reselect_name(int reselect) {
    return reselect == TARGET_RESELECT_OFF        ? "off"
           : reselect == TARGET_RESELECT_STEP     ? "step"
           : reselect == TARGET_RESELECT_SURPRISE ? "surprise"
                                                  : NULL;
}

int target_reselect_parse(int *out, const char *s, size_t n, struct err *e) {
    if (is_word(s, n, "off")) *out = TARGET_RESELECT_OFF;
    else if (is_word(s, n, "step")) *out = TARGET_RESELECT_STEP;
    else if (is_word(s, n, "surprise")) *out = TARGET_RESELECT_SURPRISE;
    else if (!number_in(s, n, 1, TARGET_MOST_BLOCKS, out))
        return err_raise(e, E_RANGE,
                         "reselect is \"%.*s\", allowed is \"off\", \"step\", \"surprise\" or "
                         "[1, %d] tokens",
                         shown(n), s, TARGET_MOST_BLOCKS);
    return 0;
}

const char *target_recheck_name(int recheck) {
    return recheck == TARGET_RECHECK_BORDER ? "border" : "off";
}

int target_recheck_parse(int *out, const char *s, size_t n, struct err *e) {
    if (is_word(s, n, "off")) *out = TARGET_RECHECK_OFF;
    else if (is_word(s, n, "border")) *out = TARGET_RECHECK_BORDER;
    else
        return err_raise(e, E_RANGE, "recheck is \"%.*s\", allowed is \"off\" or \"border\"",
                         shown(n), s);
    return 0;
}

int target_exact_parse(int *out, const char *s, size_t n, struct err *e) {
    if (is_word(s, n, "off")) *out = 0;
    else if (is_word(s, n, "on")) *out = TARGET_MOST_EXACT;
    else if (!number_in(s, n, 0, TARGET_MOST_EXACT, out))
        return err_raise(e, E_RANGE,
                         "exact is \"%.*s\", allowed is \"on\", \"off\" or [0, %d] tokens",
                         shown(n), s, TARGET_MOST_EXACT);
    return 0;
}

static const char *after(const char *s, const char *end, char stop) {
    const char *at = memchr(s, stop, (size_t)(end - s));
    return at ? at : end;
}

/* "8192:1,16384:.15" */
static bool read_curve(const char *s, size_t n, struct target_curve *out) {
    const char *end = s + n;
    *out = (struct target_curve){0};
    for (; out->n < TARGET_CURVE_POINTS; s++) {
        const char *comma = after(s, end, ','), *colon = after(s, comma, ':');
        double tokens, keep;
        if (colon == comma || !number_real(s, (size_t)(colon - s), &tokens) ||
            !number_real(colon + 1, (size_t)(comma - colon - 1), &keep))
            return false;
        out->at[out->n].tokens = tokens;
        out->at[out->n++].keep = keep;
        s = comma;
        if (s == end) return true;
    }
    return false; /* more points than there is room for */
}

static bool is_curve(const struct target_curve *c) {
    if (c->n < 1 || c->n > TARGET_CURVE_POINTS) return false;
    for (int i = 0; i < c->n; i++)
        if (!(c->at[i].tokens >= 1 && c->at[i].tokens <= 1e9 && c->at[i].keep > 0 &&
              c->at[i].keep <= 1) ||
            (i > 0 && !(c->at[i].tokens > c->at[i - 1].tokens)))
            return false;
    return true;
}

int target_keep_parse(struct target_settings *s, const char *text, size_t n, struct err *e) {
    double x;
    struct target_curve curve;
    if (is_word(text, n, "curve")) {
        s->keep = TARGET_CURVE;
    } else if (number_real(text, n, &x) && x > 0 && x <= 1) {
        s->keep = x;
    } else if (read_curve(text, n, &curve) && is_curve(&curve)) {
        s->keep = TARGET_CURVE;
        s->curve = curve;
    } else {
        return err_raise(e, E_RANGE,
                         "keep is \"%.*s\", allowed is \"curve\", (0, 1] or up to %d points "
                         "TOKENS:KEEP, tokens ascending",
                         shown(n), text, TARGET_CURVE_POINTS);
    }
    return 0;
}

/* ---- Checking ---- */

void target_settings_unset(struct target_settings *s) {
    *s = (struct target_settings){.selector = TARGET_UNSET,
                                  .keep = TARGET_UNSET,
                                  .keep_blocks = TARGET_UNSET,
                                  .min_blocks = TARGET_UNSET,
                                  .window_blocks = TARGET_UNSET,
                                  .reserve = TARGET_UNSET,
                                  .threshold = TARGET_UNSET_THRESHOLD,
                                  .smooth = TARGET_UNSET,
                                  .reselect = TARGET_UNSET,
                                  .reselector = TARGET_UNSET,
                                  .surprise = TARGET_UNSET,
                                  .recheck = TARGET_UNSET,
                                  .drop = TARGET_UNSET,
                                  .exact = TARGET_UNSET,
                                  .prefill = TARGET_UNSET,
                                  .prefill_dense = TARGET_UNSET,
                                  .prefill_chunk = TARGET_UNSET,
                                  .lists = TARGET_UNSET,
                                  .select2 = TARGET_UNSET,
                                  .quarters = TARGET_UNSET};
}

static int check_count(const char *name, int value, int lo, struct err *e) {
    if (value == TARGET_UNSET || (value >= lo && value <= TARGET_MOST_BLOCKS)) return 0;
    return err_raise(e, E_RANGE, "%s is %d, allowed is [%d, %d]", name, value, lo,
                     TARGET_MOST_BLOCKS);
}

static int check_reselect(const struct target_settings *s, struct err *e) {
    int n = s->reselect;
    if (n != TARGET_UNSET && n != TARGET_RESELECT_SURPRISE && (n < 0 || n > TARGET_MOST_BLOCKS))
        return err_raise(e, E_RANGE,
                         "reselect is %d, allowed is off (0), [1, %d] tokens or surprise (%d)", n,
                         TARGET_MOST_BLOCKS, TARGET_RESELECT_SURPRISE);
    if (s->reselector != TARGET_UNSET && !reselects(s->reselector))
        return err_raise(e, E_RANGE,
                         "reselector is \"%s\", allowed is \"scorer\", \"mean\", \"minmax\", "
                         "\"bound\", \"recent\" or \"random\"",
                         target_selector_name(s->reselector));
    if (s->surprise != TARGET_UNSET && !(s->surprise > 0 && s->surprise <= 100))
        return err_raise(e, E_RANGE, "surprise is %g, allowed is (0, 100]", s->surprise);
    return 0;
}

static bool asks_for_reselect(const struct target_settings *s) {
    return s->reselect != TARGET_UNSET && s->reselect != TARGET_RESELECT_OFF;
}

static int check_exact(const struct target_settings *s, struct err *e) {
    int n = s->exact;
    if (n != TARGET_UNSET && (n < 0 || n > TARGET_MOST_EXACT))
        return err_raise(e, E_RANGE, "exact is %d, allowed is [0, %d]", n, TARGET_MOST_EXACT);
    if (n > 0 && s->selector == TARGET_OFF)
        return err_raise(e, E_INVALID,
                         "exact %d, sparse \"off\": exact verifies what sparse reading proposes",
                         n);
    if (n > 0 && asks_for_reselect(s)) {
        const char *name = target_reselect_name(s->reselect);
        char tokens[16];
        snprintf(tokens, sizeof tokens, "%d", s->reselect);
        return err_raise(e, E_INVALID,
                         "exact %d, reselect %s: exact selects anew after each dense pass", n,
                         name ? name : tokens);
    }
    return 0;
}

static int check_prefill(const struct target_settings *s, struct err *e) {
    int chunk = s->prefill_chunk, rc = check_count("prefill_dense", s->prefill_dense, 0, e);
    bool sparse = s->prefill == TARGET_PREFILL_SPARSE;
    if (rc) return rc;
    if (s->prefill != TARGET_UNSET && s->prefill != TARGET_PREFILL_DENSE && !sparse)
        return err_raise(e, E_RANGE, "prefill is %d, allowed is dense (%d) or sparse (%d)",
                         s->prefill, TARGET_PREFILL_DENSE, TARGET_PREFILL_SPARSE);
    if (chunk != TARGET_UNSET &&
        (chunk < TARGET_BLOCK || chunk > TARGET_MOST_BLOCKS || chunk % TARGET_BLOCK != 0))
        return err_raise(e, E_RANGE, "prefill_chunk is %d, allowed are multiples of %d in [%d, %d]",
                         chunk, TARGET_BLOCK, TARGET_BLOCK, TARGET_MOST_BLOCKS);
    if (sparse && s->selector == TARGET_OFF)
        return err_raise(
            e, E_INVALID,
            "prefill \"sparse\", sparse \"off\": who reads densely computes his prompt "
            "densely");
    if (sparse && s->exact > 0)
        return err_raise(e, E_INVALID,
                         "exact %d, prefill \"sparse\": an exact answer is that of a dense prompt",
                         s->exact);
    return 0;
}

static int check_scores(const struct target_settings *s, struct err *e) {
    if (s->threshold == (double)INFINITY)
        return err_raise(e, E_RANGE, "keep_threshold is %g, allowed is a number", s->threshold);
    if (s->smooth != TARGET_UNSET && !(s->smooth >= 0 && s->smooth <= 1))
        return err_raise(e, E_RANGE, "smooth is %g, allowed is [0, 1]", s->smooth);
    if (s->recheck != TARGET_UNSET && s->recheck != TARGET_RECHECK_OFF &&
        s->recheck != TARGET_RECHECK_BORDER)
        return err_raise(e, E_RANGE, "recheck is %d, allowed is off (%d) or border (%d)",
                         s->recheck, TARGET_RECHECK_OFF, TARGET_RECHECK_BORDER);
    if (s->drop != TARGET_UNSET && !(s->drop >= 0 && s->drop < 1))
        return err_raise(e, E_RANGE, "drop is %g, allowed is [0, 1)", s->drop);
    if (s->curve.n != 0 && !is_curve(&s->curve))
        return err_raise(e, E_RANGE,
                         "keep's curve of %d points: allowed are up to %d, tokens of [1, 1e9] "
                         "ascending, keep in (0, 1]",
                         s->curve.n, TARGET_CURVE_POINTS);
    return 0;
}

int target_settings_check(const struct target_settings *s, struct err *e) {
    int rc = 0;
    if (s->selector != TARGET_UNSET && (unsigned)s->selector >= TARGET_N_SELECTORS)
        rc = err_raise(e, E_RANGE, "sparse is %d, allowed is [0, %d]", s->selector,
                       TARGET_N_SELECTORS - 1);
    /* NaN fails every comparison. */
    if (!rc && s->keep != TARGET_UNSET && s->keep != TARGET_CURVE && !(s->keep > 0 && s->keep <= 1))
        rc = err_raise(e, E_RANGE, "keep is %g, allowed is \"curve\" or (0, 1]", s->keep);
    if (!rc) rc = check_count("keep_blocks", s->keep_blocks, 0, e);
    if (!rc) rc = check_count("min_blocks", s->min_blocks, 1, e);
    if (!rc) rc = check_count("window_blocks", s->window_blocks, 1, e);
    if (!rc && s->reserve != TARGET_UNSET && !(s->reserve >= 0 && s->reserve <= 1))
        rc = err_raise(e, E_RANGE, "reserve is %g, allowed is [0, 1]", s->reserve);
    if (!rc && s->keep != TARGET_UNSET && s->keep_blocks > 0)
        rc = err_raise(e, E_INVALID, "keep and keep_blocks %d: one of them decides, not both",
                       s->keep_blocks);
    if (!rc) rc = check_scores(s, e);
    if (!rc) rc = check_exact(s, e);
    if (!rc) rc = check_prefill(s, e);
    if (!rc) rc = check_count("select2", s->select2, 0, e);
    if (!rc) rc = target_lists_check(s, NULL, e);
    return rc ? rc : check_reselect(s, e);
}

/* ---- Whose wish counts ---- */

static int first_set(int request, int base, int otherwise) {
    return request != TARGET_UNSET ? request : base != TARGET_UNSET ? base : otherwise;
}

static double first_real(double request, double base, double otherwise) {
    return request != TARGET_UNSET ? request : base != TARGET_UNSET ? base : otherwise;
}

static struct target_curve first_curve(const struct target_settings *request,
                                       const struct target_settings *base,
                                       const struct target_scorer_defaults *scorer) {
    if (request->curve.n > 0) return request->curve;
    if (base->curve.n > 0) return base->curve;
    return scorer && scorer->curve.n > 0 ? scorer->curve : target_source_curve;
}

/* Who selects inside an answer where nobody says. */
static int own_reselector(int selector, const struct target_scorer_defaults *scorer) {
    return reselects(selector) ? selector : scorer ? TARGET_SCORER : TARGET_MEAN;
}

struct target_settings target_settings_resolve(const struct target_settings *base,
                                               const struct target_settings *request,
                                               const struct target_scorer_defaults *scorer) {
    struct target_settings below = *base, s;
    if (request->keep_blocks > 0) below.keep = TARGET_UNSET;
    if (request->keep != TARGET_UNSET) below.keep_blocks = TARGET_UNSET;
    bool sparse_prefill = request->prefill == TARGET_PREFILL_SPARSE;
    if ((request->exact > 0 || sparse_prefill) && below.selector == TARGET_OFF)
        below.selector = TARGET_UNSET;
    if (asks_for_reselect(request) || sparse_prefill) below.exact = TARGET_UNSET;
    if (request->exact > 0)
        below.prefill = below.lists = below.select2 = below.quarters = TARGET_UNSET;
    if (request->selector != TARGET_UNSET && !target_tells_apart(request->selector))
        below.lists = below.select2 = TARGET_UNSET;
    if (request->selector != TARGET_UNSET && !target_tells_quarters(request->selector))
        below.quarters = TARGET_UNSET;
    if (request->select2 > 0) below.lists = TARGET_UNSET;
    if (request->lists > TARGET_LISTS_ONE) below.select2 = TARGET_UNSET;
    if (request->recheck > TARGET_RECHECK_OFF || request->drop > 0)
        below.lists = below.select2 = below.quarters = TARGET_UNSET;
    if (target_has_lists(request) || target_has_quarters(request)) {
        below.exact = below.recheck = TARGET_UNSET;
        below.drop = TARGET_UNSET;
    }
    s.lists = first_set(request->lists, below.lists, TARGET_LISTS_ONE);
    s.select2 = first_set(request->select2, below.select2, 0);
    s.quarters = first_set(request->quarters, below.quarters, TARGET_QUARTERS);
    s.exact = first_set(request->exact, below.exact, 0);
    s.prefill = first_set(request->prefill, below.prefill, TARGET_PREFILL_DENSE);
    s.prefill_dense = first_set(request->prefill_dense, below.prefill_dense, TARGET_PREFILL_START);
    s.prefill_chunk = first_set(request->prefill_chunk, below.prefill_chunk, TARGET_PREFILL_CHUNK);
    bool reads_less = s.exact > 0 || s.prefill == TARGET_PREFILL_SPARSE;
    s.selector =
        first_set(request->selector, below.selector, reads_less ? TARGET_OBSERVED : TARGET_OFF);
    s.keep = first_real(request->keep, below.keep, TARGET_CURVE);
    s.keep_blocks = first_set(request->keep_blocks, below.keep_blocks, 0);
    bool few = s.keep_blocks > 0 && s.keep_blocks < TARGET_MIN_BLOCKS;
    s.min_blocks =
        first_set(request->min_blocks, below.min_blocks, few ? s.keep_blocks : TARGET_MIN_BLOCKS);
    s.window_blocks = first_set(request->window_blocks, below.window_blocks, TARGET_WINDOW_BLOCKS);
    s.reserve = first_real(request->reserve, below.reserve, TARGET_RESERVE);
    s.threshold = !isnan(request->threshold) ? request->threshold
                  : !isnan(below.threshold)  ? below.threshold
                                             : TARGET_NO_THRESHOLD;
    s.smooth = first_real(request->smooth, below.smooth,
                          scorer && s.selector == TARGET_SCORER ? scorer->smoothing : 0);
    s.reselect = first_set(request->reselect, below.reselect, TARGET_RESELECT_OFF);
    s.reselector =
        first_set(request->reselector, below.reselector, own_reselector(s.selector, scorer));
    s.surprise = first_real(request->surprise, below.surprise, TARGET_SURPRISE);
    s.recheck = first_set(request->recheck, below.recheck, TARGET_RECHECK_OFF);
    s.drop = first_real(request->drop, below.drop, 0);
    if (s.selector == TARGET_OFF || s.selector == TARGET_ALL) s.recheck = TARGET_RECHECK_OFF;
    if (s.selector == TARGET_OFF) {
        s.exact = 0;
        s.prefill = TARGET_PREFILL_DENSE;
        s.lists = TARGET_LISTS_ONE;
        s.select2 = 0;
        s.quarters = TARGET_QUARTERS;
    }
    if (s.exact > 0) {
        s.reselect = TARGET_RESELECT_OFF;
        s.reselector = s.selector;
    }
    if (s.reselect == TARGET_RESELECT_OFF) s.drop = 0; /* no epoch follows */
    s.curve = first_curve(request, &below, scorer);
    return s;
}

bool target_asks(const struct target_settings *s, int selector) {
    if (s->selector == TARGET_OFF || s->selector == TARGET_ALL) return false;
    bool again = s->reselect != TARGET_RESELECT_OFF || s->prefill == TARGET_PREFILL_SPARSE;
    return s->selector == selector || (again && s->reselector == selector);
}

bool target_needs_states(const struct target_settings *s) {
    for (int i = 0; i < TARGET_N_SELECTORS; i++)
        if (target_by_states(i) && target_asks(s, i)) return true;
    return s->recheck != TARGET_RECHECK_OFF;
}

uint64_t target_settings_law(const struct target_settings *s) {
    struct {
        double keep, reserve, threshold, smooth, surprise, drop;
        double point[2 * TARGET_CURVE_POINTS];
        int32_t selector, keep_blocks, min_blocks, window_blocks, reselect, reselector;
        int32_t recheck, lists, select2, quarters;
    } in = {.keep = s->keep_blocks > 0 ? TARGET_CURVE : s->keep,
            .reserve = s->reserve,
            .threshold = s->threshold,
            .smooth = s->smooth,
            .surprise = s->reselect == TARGET_RESELECT_SURPRISE ? s->surprise : 0,
            .drop = s->drop,
            .selector = s->selector,
            .keep_blocks = s->keep_blocks,
            .min_blocks = s->min_blocks,
            .window_blocks = s->window_blocks,
            .reselect = s->reselect,
            .reselector = s->reselect != TARGET_RESELECT_OFF ? s->reselector : 0,
            .recheck = s->recheck,
            .lists = s->lists,
            .select2 = s->select2,
            .quarters = s->quarters};
    _Static_assert(sizeof in == (6 + 2 * TARGET_CURVE_POINTS) * 8 + 10 * 4,
                   "no padding may be hashed");
    if (s->selector == TARGET_OFF || s->exact > 0) return 0;
    for (int i = 0; i < s->curve.n && s->keep_blocks == 0 && s->keep == TARGET_CURVE; i++) {
        in.point[2 * i] = s->curve.at[i].tokens;
        in.point[2 * i + 1] = s->curve.at[i].keep;
    }
    uint64_t h = XXH3_64bits(&in, sizeof in);
    return h ? h : 1;
}
