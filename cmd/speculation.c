#include "cmd/speculation.h"

#include <string.h>

#include "base/err.h"
#include "base/number.h"

int speculation_parse_draft_tokens(const struct options *o, const char *text, int *out) {
    if (!text) return -1;
    if (!strcmp(text, "auto")) {
        *out = VERIFY_DRAFT_AUTO;
        return -1;
    }
    int n;
    if (!number_in(text, strlen(text), -INT32_MAX, INT32_MAX, &n))
        return options_error(o, "--draft-tokens: '%s' is neither auto nor an integer", text);
    if (n < 0 || n > KERN_MAX_DRAFT)
        return options_error(o, "--draft-tokens: %d is not in 0..%d (or auto)", n, KERN_MAX_DRAFT);
    *out = n;
    return -1;
}

int speculation_parse_coupling(const struct options *o, const char *text,
                               enum verify_coupling *out) {
    struct err e = {0};
    if (!text || verify_coupling_parse(out, text, strlen(text), &e) == 0) return -1;
    return options_error(o, "--coupling: '%s' is neither lossless nor gumbel", text);
}

const char *speculation_mark(struct speculation_marks *m, bool drafted) {
    if (!m->show || m->on == drafted) return "";
    m->on = drafted;
    if (m->tty) return drafted ? "\033[32m" : "\033[39m";
    return drafted ? "\xe2\x80\xb9" : "\xe2\x80\xba";
}

static double percent(uint64_t part, uint64_t whole) {
    return whole ? 100.0 * (double)part / (double)whole : 0;
}

static double tokens_per_round(const struct engine_speculation *s) {
    return s->n_rounds ? (double)(s->n_accepted + s->n_rounds) / (double)s->n_rounds : 0;
}

void speculation_append_short(struct strbuf *out, const struct engine_speculation *s) {
    if (s->n_drafted == 0) return;
    strbuf_printf(out, ", %.2f tokens a round (%.0f %% of %llu draft tokens)", tokens_per_round(s),
                  percent(s->n_accepted, s->n_drafted), (unsigned long long)s->n_drafted);
}

void speculation_append_long(struct strbuf *out, const struct engine_speculation *s,
                             const char *no_draft) {
    strbuf_printf(out, "speculation: %llu rounds", (unsigned long long)s->n_rounds);
    if (s->n_rounds) strbuf_printf(out, " of %.2f tokens", tokens_per_round(s));
    strbuf_printf(out, ", %llu without draft tokens", (unsigned long long)s->n_plain_rounds);
    if (s->n_drafted) {
        strbuf_printf(out, "; %llu of %llu draft tokens accepted (%.0f %%",
                      (unsigned long long)s->n_accepted, (unsigned long long)s->n_drafted,
                      percent(s->n_accepted, s->n_drafted));
        for (int i = 0; i < KERN_MAX_DRAFT && s->n_drafted_at[i]; i++)
            strbuf_printf(out, "%s%.0f", i ? " " : "; by place ",
                          percent(s->n_accepted_at[i], s->n_drafted_at[i]));
        strbuf_append_str(out, ")");
    }
    if (s->n_lookup_drafted)
        strbuf_printf(out, "; by lookup %llu of %llu", (unsigned long long)s->n_lookup_accepted,
                      (unsigned long long)s->n_lookup_drafted);
    strbuf_printf(out, "; draft %.0f ms, verify %.0f ms", (double)s->draft_ns / 1e6,
                  (double)s->verify_ns / 1e6);
    if (s->n_page_rollbacks)
        strbuf_printf(out, "; %llu page rollbacks", (unsigned long long)s->n_page_rollbacks);
    if (no_draft && no_draft[0]) strbuf_printf(out, "; without the draft: %s", no_draft);
}
