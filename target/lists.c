/* What `observed` can tell beyond one list of whole blocks. Several lists an epoch: by deep layer,
 * by KV head of each, or two, before and from a second select layer. Which list is whose is all
 * there is to it: a list is made as if it were the only one. And quarters of its blocks. */
#include <math.h>
#include <string.h>

#include "base/err.h"
#include "target/target.h"

static const char *const names[TARGET_N_LISTS] = {
    [TARGET_LISTS_ONE] = "one", [TARGET_LISTS_LAYER] = "layer", [TARGET_LISTS_HEAD] = "head"};

const char *target_lists_name(int lists) {
    return (unsigned)lists < TARGET_N_LISTS ? names[lists] : "?";
}

int target_lists_parse(int *out, const char *s, size_t n, struct err *e) {
    for (int i = 0; i < TARGET_N_LISTS; i++)
        if (strlen(names[i]) == n && memcmp(s, names[i], n) == 0) {
            *out = i;
            return 0;
        }
    return err_raise(e, E_RANGE, "lists is \"%.*s\", allowed is \"one\", \"layer\" or \"head\"",
                     n > 32 ? 32 : (int)n, s);
}

bool target_has_lists(const struct target_settings *s) {
    return s->lists > TARGET_LISTS_ONE || s->select2 > 0;
}

static int check_layer(const struct target_settings *s, const struct target_deep *d,
                       struct err *e) {
    int last = d->first + d->n_layers - 1;
    if (s->select2 <= 0 || (s->select2 > d->first && s->select2 <= last)) return 0;
    if (d->n_layers < 2)
        return err_raise(e, E_RANGE, "select2 is %d, but no layer lies behind the first deep one",
                         s->select2);
    return err_raise(e, E_RANGE,
                     "select2 is %d, allowed are 0 (none) and the deep layers behind the first, "
                     "[%d, %d]",
                     s->select2, d->first + 1, last);
}

int target_lists_check(const struct target_settings *s, const struct target_deep *d,
                       struct err *e) {
    const char *why = s->select2 > 0                   ? "select2"
                      : s->lists == TARGET_LISTS_HEAD  ? "lists \"head\""
                      : s->lists == TARGET_LISTS_LAYER ? "lists \"layer\""
                                                       : "quarters";
    if (s->lists != TARGET_UNSET && (unsigned)s->lists >= TARGET_N_LISTS)
        return err_raise(e, E_RANGE, "lists is %d, allowed is one (0), layer (1) or head (2)",
                         s->lists);
    if (s->quarters != TARGET_UNSET && (s->quarters < 1 || s->quarters > TARGET_QUARTERS))
        return err_raise(e, E_RANGE, "quarters is %d, allowed is [1, %d]", s->quarters,
                         TARGET_QUARTERS);
    if (!target_has_lists(s) && !target_has_quarters(s)) return 0;
    if (s->lists > TARGET_LISTS_ONE && s->select2 > 0)
        return err_raise(e, E_INVALID, "lists \"%s\", select2 %d: each layer has its own list",
                         names[s->lists], s->select2);
    if (target_has_quarters(s) && s->selector > TARGET_OFF && !target_tells_quarters(s->selector))
        return err_raise(e, E_INVALID,
                         "sparse \"%s\", quarters %d: it measures blocks as a whole; \"observed\", "
                         "\"mean\" and a scorer that is late measure quarters",
                         target_selector_name(s->selector), s->quarters);
    if (target_has_lists(s) && s->selector > TARGET_OFF && !target_tells_apart(s->selector))
        return err_raise(e, E_INVALID,
                         "sparse \"%s\", %s: only \"observed\" sees what each layer and head "
                         "looks at, others make one list of blocks for all",
                         target_selector_name(s->selector), why);
    if (s->exact > 0)
        return err_raise(e, E_INVALID,
                         "exact %d, %s: exact answers propose by one list of blocks for all",
                         s->exact, why);
    if (s->recheck > TARGET_RECHECK_OFF || s->drop > 0)
        return err_raise(e, E_INVALID, "%s, %s: re-checks are of one list of blocks for all",
                         s->drop > 0 ? "drop" : "recheck \"border\"", why);
    return d ? check_layer(s, d, e) : 0;
}

int target_n_lists(const struct target_settings *s, const struct target_deep *d) {
    if (s->lists == TARGET_LISTS_HEAD) return d->n_layers * d->n_heads;
    if (s->lists == TARGET_LISTS_LAYER) return d->n_layers;
    return s->select2 > 0 ? 2 : 1;
}

int target_list_of(const struct target_settings *s, const struct target_deep *d, int layer,
                   int head) {
    ASSERT(layer >= 0 && layer < d->n_layers && head >= 0 && head < d->n_heads);
    if (s->lists == TARGET_LISTS_HEAD) return layer * d->n_heads + head;
    if (s->lists == TARGET_LISTS_LAYER) return layer;
    return s->select2 > 0 && d->first + layer >= s->select2;
}

/* ---- Quarters ---- */

/* Does quarter a of a block score better than b? */
static bool is_better(const float *mass, int a, int b) {
    if (isnan(mass[b])) return !isnan(mass[a]) || a < b;
    return mass[a] > mass[b] || (mass[a] == mass[b] && a < b);
}

int target_select_quarters(const struct target_settings *s, int n_tokens, const float *mass,
                           const int32_t *kept, int n_kept, uint8_t *out) {
    int n = target_n_blocks(n_tokens), count = 0;
    for (int i = 0; i < n_kept; i++) {
        int b = kept[i];
        bool whole = b == 0 || b >= n - s->window_blocks || s->selector == TARGET_ALL;
        out[i] = 0;
        for (int q = 0; q < TARGET_QUARTERS; q++) {
            int better = 0;
            for (int other = 0; other < TARGET_QUARTERS; other++)
                better += other != q && is_better(mass + (size_t)b * TARGET_QUARTERS, other, q);
            bool in = whole || better < s->quarters;
            out[i] |= (uint8_t)(in << q);
            count += in;
        }
    }
    return count;
}
