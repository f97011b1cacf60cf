/* Which chunks of a prompt are computed sparsely: a function of positions and settings alone, so
 * that a prompt's K and V do not depend on how it was cut into passes. */
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "target/target.h"

int target_prefill_parse(int *out, const char *s, size_t n, struct err *e) {
    if (n == 6 && memcmp(s, "sparse", 6) == 0) *out = TARGET_PREFILL_SPARSE;
    else if (n == 5 && memcmp(s, "dense", 5) == 0) *out = TARGET_PREFILL_DENSE;
    else
        return err_raise(e, E_RANGE, "prefill is \"%.*s\", allowed is \"dense\" or \"sparse\"",
                         n > 32 ? 32 : (int)n, s);
    return 0;
}

const char *target_prefill_name(int prefill) {
    return prefill == TARGET_PREFILL_SPARSE ? "sparse" : "dense";
}

static bool is_sparse(const struct target_settings *s) {
    return s->prefill == TARGET_PREFILL_SPARSE && s->selector != TARGET_OFF;
}

int target_prefill_first(const struct target_settings *s) {
    long long from = (long long)s->min_blocks * TARGET_BLOCK, n = s->prefill_chunk;
    if (!is_sparse(s)) return INT32_MAX;
    if (s->prefill_dense > from) from = s->prefill_dense;
    return (int)((from + n - 1) / n * n);
}

int target_prefill_border(const struct target_settings *s, int position) {
    int first = target_prefill_first(s);
    return position < first ? 0 : position - position % s->prefill_chunk;
}

bool target_prefill_selects(const struct target_settings *s, int border) {
    struct target_settings by = *s;
    if (border <= 0 || !is_sparse(s)) return false;
    if (s->selector == TARGET_ALL) return true;
    by.selector = s->reselector;
    return target_selects(&by, border);
}

int target_first_selector(const struct target_settings *s, int n_tokens) {
    int newest = n_tokens - 1, oldest = n_tokens > TARGET_ROWS ? n_tokens - TARGET_ROWS : 0;
    if (s->selector != TARGET_OBSERVED) return s->selector;
    return target_prefill_selects(s, target_prefill_border(s, newest)) ||
                   target_prefill_selects(s, target_prefill_border(s, oldest))
               ? s->reselector
               : s->selector;
}

uint64_t target_prefill_law(const struct target_settings *s) {
    struct {
        double keep, reserve, threshold, smooth;
        double point[2 * TARGET_CURVE_POINTS];
        int32_t all, keep_blocks, min_blocks, window_blocks, reselector, first, chunk, unused;
    } in = {.keep = s->keep_blocks > 0 ? TARGET_CURVE : s->keep,
            .reserve = s->reserve,
            .threshold = s->threshold,
            .smooth = s->smooth,
            .all = s->selector == TARGET_ALL,
            .keep_blocks = s->keep_blocks,
            .min_blocks = s->min_blocks,
            .window_blocks = s->window_blocks,
            .reselector = s->reselector,
            .first = target_prefill_first(s),
            .chunk = s->prefill_chunk};
    _Static_assert(sizeof in == (4 + 2 * TARGET_CURVE_POINTS) * 8 + 8 * 4,
                   "no padding may be hashed");
    if (!is_sparse(s)) return 0;
    for (int i = 0; i < s->curve.n && s->keep_blocks == 0 && s->keep == TARGET_CURVE; i++) {
        in.point[2 * i] = s->curve.at[i].tokens;
        in.point[2 * i + 1] = s->curve.at[i].keep;
    }
    uint64_t h = XXH3_64bits(&in, sizeof in);
    return h ? h : 1;
}
