/* Sampling settings: defaults and ranges. */
#include <string.h>

#include "base/err.h"
#include "base/utf8.h"
#include "verify/verify.h"

void verify_params_default(struct verify_params *p) {
    memset(p, 0, sizeof *p);
    p->temperature = 1;
    p->top_p = 1;
    p->repetition_penalty = 1;
    p->logprobs = -1;
    p->max_tokens = -1;
    p->draft_tokens = VERIFY_DRAFT_DEFAULT;
    p->coupling = VERIFY_LOSSLESS;
    p->draft_model = true;
    p->lookup = true;
}

static const char *const couplings[] = {
    [VERIFY_LOSSLESS] = "lossless",
    [VERIFY_GUMBEL] = "gumbel",
};
enum { N_COUPLINGS = sizeof couplings / sizeof *couplings };

const char *verify_coupling_name(enum verify_coupling c) {
    return (unsigned)c < N_COUPLINGS ? couplings[c] : "?";
}

int verify_coupling_parse(enum verify_coupling *out, const char *s, size_t n, struct err *e) {
    for (int i = 0; i < N_COUPLINGS; i++)
        if (strlen(couplings[i]) == n && memcmp(couplings[i], s, n) == 0) {
            *out = (enum verify_coupling)i;
            return 0;
        }
    return err_raise(e, E_RANGE, "coupling is \"%.*s\", allowed is \"lossless\" or \"gumbel\"",
                     n > 32 ? 32 : (int)n, s);
}

int verify_draft_tokens_check(long long n, struct err *e) {
    if (n == VERIFY_DRAFT_DEFAULT || n == VERIFY_DRAFT_AUTO || (n >= 0 && n <= KERN_MAX_DRAFT))
        return 0;
    return err_raise(e, E_RANGE, "draft_tokens is %lld, allowed is \"auto\" or [0, %d]", n,
                     KERN_MAX_DRAFT);
}

/* One number with its range: lo <= value <= hi, or lo < value where `open`. NaN fails every
 * comparison. */
struct range {
    const char *name;
    double value, lo, hi;
    bool open;
};

static int check_ranges(const struct range *r, size_t n, struct err *e) {
    for (size_t i = 0; i < n; i++) {
        bool low_ok = r[i].open ? r[i].value > r[i].lo : r[i].value >= r[i].lo;
        if (!low_ok || !(r[i].value <= r[i].hi))
            return err_raise(e, E_RANGE, "%s is %g, allowed is %c%g, %g]", r[i].name, r[i].value,
                             r[i].open ? '(' : '[', r[i].lo, r[i].hi);
    }
    return 0;
}

static int check_stops(const struct verify_params *p, struct err *e) {
    if (p->n_stops < 0 || p->n_stops > VERIFY_MAX_STOPS)
        return err_raise(e, E_RANGE, "stop has %d strings, allowed is [0, %d]", p->n_stops,
                         VERIFY_MAX_STOPS);
    for (int i = 0; i < p->n_stops; i++) {
        const struct verify_stop *s = &p->stops[i];
        if (s->n < 1 || s->n > VERIFY_MAX_STOP_BYTES)
            return err_raise(e, E_RANGE, "stop[%d] has %d bytes, allowed is [1, %d]", i, s->n,
                             VERIFY_MAX_STOP_BYTES);
        if (!utf8_valid(s->text, (size_t)s->n))
            return err_raise(e, E_RANGE, "stop[%d] is not valid UTF-8", i);
    }
    return 0;
}

int verify_params_check(const struct verify_params *p, struct err *e) {
    double most_tokens = p->max_tokens < 0 ? INT32_MAX : p->max_tokens;
    const struct range ranges[] = {
        {"temperature", p->temperature, 0, 100, false},
        {"top_k", p->top_k, 0, INT32_MAX, false},
        {"top_p", p->top_p, 0, 1, true},
        {"min_p", p->min_p, 0, 1, false},
        {"repetition_penalty", p->repetition_penalty, 0.01, 100, false},
        {"presence_penalty", p->presence_penalty, -2, 2, false},
        {"frequency_penalty", p->frequency_penalty, -2, 2, false},
        {"logprobs", p->logprobs, -1, KERN_MAX_LOGPROBS, false},
        {"max_tokens", p->max_tokens == -1 ? 1 : p->max_tokens, 1, INT32_MAX, false},
        {"min_tokens", p->min_tokens, 0, most_tokens, false},
    };
    int rc = check_ranges(ranges, sizeof ranges / sizeof *ranges, e);
    if (!rc) rc = verify_draft_tokens_check(p->draft_tokens, e);
    if (!rc && (unsigned)p->coupling >= N_COUPLINGS)
        rc = err_raise(e, E_RANGE, "coupling is %d, allowed is %d (lossless) or %d (gumbel)",
                       (int)p->coupling, VERIFY_LOSSLESS, VERIFY_GUMBEL);
    return rc ? rc : check_stops(p, e);
}
