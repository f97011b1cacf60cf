/* What may be asked of a selection, and how a request's wish lies over the engine's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "target/target.h"

static const char *const names[TARGET_N_SELECTORS] = {
    [TARGET_OFF] = "off",       [TARGET_ALL] = "all",       [TARGET_OBSERVED] = "observed",
    [TARGET_RECENT] = "recent", [TARGET_RANDOM] = "random",
};

const char *target_selector_name(int selector) {
    return (unsigned)selector < TARGET_N_SELECTORS ? names[selector] : "?";
}

int target_selector_parse(int *out, const char *s, size_t n, struct err *e) {
    for (int i = 0; i < TARGET_N_SELECTORS; i++)
        if (strlen(names[i]) == n && memcmp(names[i], s, n) == 0) {
            *out = i;
            return 0;
        }
    return err_raise(e, E_RANGE,
                     "sparse is \"%.*s\", allowed is \"off\", \"all\", \"observed\", \"recent\" or "
                     "\"random\"",
                     n > 32 ? 32 : (int)n, s);
}

static int refuse_keep(const char *s, size_t n, struct err *e) {
    return err_raise(e, E_RANGE, "keep is \"%.*s\", allowed is \"curve\" or (0, 1]",
                     n > 32 ? 32 : (int)n, s);
}

int target_keep_parse(double *out, const char *s, size_t n, struct err *e) {
    char text[32], *end;
    if (n == 5 && memcmp(s, "curve", 5) == 0) {
        *out = TARGET_CURVE;
        return 0;
    }
    if (n < 1 || n >= sizeof text || (s[0] != '.' && (s[0] < '0' || s[0] > '9')))
        return refuse_keep(s, n, e);
    memcpy(text, s, n);
    text[n] = 0;
    double x = strtod(text, &end);
    if (*end || !(x > 0) || !(x <= 1)) return refuse_keep(s, n, e);
    *out = x;
    return 0;
}

void target_settings_unset(struct target_settings *s) {
    *s = (struct target_settings){.selector = TARGET_UNSET,
                                  .keep = TARGET_UNSET,
                                  .keep_blocks = TARGET_UNSET,
                                  .min_blocks = TARGET_UNSET,
                                  .window_blocks = TARGET_UNSET,
                                  .reserve = TARGET_UNSET};
}

static int check_count(const char *name, int value, int lo, struct err *e) {
    if (value == TARGET_UNSET || (value >= lo && value <= TARGET_MOST_BLOCKS)) return 0;
    return err_raise(e, E_RANGE, "%s is %d, allowed is [%d, %d]", name, value, lo,
                     TARGET_MOST_BLOCKS);
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
    return rc;
}

static int first_set(int request, int base, int otherwise) {
    return request != TARGET_UNSET ? request : base != TARGET_UNSET ? base : otherwise;
}

struct target_settings target_settings_resolve(const struct target_settings *base,
                                               const struct target_settings *request) {
    struct target_settings below = *base, s;
    if (request->keep_blocks > 0) below.keep = TARGET_UNSET;
    if (request->keep != TARGET_UNSET) below.keep_blocks = TARGET_UNSET;
    s.selector = first_set(request->selector, below.selector, TARGET_OFF);
    s.keep = request->keep != TARGET_UNSET ? request->keep
             : below.keep != TARGET_UNSET  ? below.keep
                                           : TARGET_CURVE;
    s.keep_blocks = first_set(request->keep_blocks, below.keep_blocks, 0);
    bool few = s.keep_blocks > 0 && s.keep_blocks < TARGET_MIN_BLOCKS;
    s.min_blocks =
        first_set(request->min_blocks, below.min_blocks, few ? s.keep_blocks : TARGET_MIN_BLOCKS);
    s.window_blocks = first_set(request->window_blocks, below.window_blocks, TARGET_WINDOW_BLOCKS);
    s.reserve = request->reserve != TARGET_UNSET ? request->reserve
                : below.reserve != TARGET_UNSET  ? below.reserve
                                                 : TARGET_RESERVE;
    return s;
}

uint64_t target_settings_law(const struct target_settings *s) {
    struct {
        double keep, reserve;
        int32_t selector, keep_blocks, min_blocks, window_blocks;
    } in = {.keep = s->keep_blocks > 0 ? TARGET_CURVE : s->keep,
            .reserve = s->reserve,
            .selector = s->selector,
            .keep_blocks = s->keep_blocks,
            .min_blocks = s->min_blocks,
            .window_blocks = s->window_blocks};
    _Static_assert(sizeof in == 2 * 8 + 4 * 4, "no padding may be hashed");
    if (s->selector == TARGET_OFF) return 0;
    uint64_t h = XXH3_64bits(&in, sizeof in);
    return h ? h : 1;
}
