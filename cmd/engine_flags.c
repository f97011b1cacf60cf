#include "cmd/engine_flags.h"

#include <string.h>

#include "base/log.h"
#include "cmd/speculation.h"

enum { DEFAULT_MAX_DRAFT = 8, BLOCK = KVPOOL_BLOCK };

void engine_flags_init(struct engine_flags *f) {
    memset(f, 0, sizeof *f);
    engine_options_default(&f->o);
    sparsity_flags_init(&f->sparsity);
    f->o.device = "auto";
    f->precision = "fast";
    f->load_format = "auto";
}

static bool is_number(const char *s) {
    return s[0] && s[strspn(s, "0123456789")] == 0;
}

/* llama.cpp's --draft is a number of tokens, ours a model: say so. */
static int finish_speculation(struct engine_flags *f, const struct options *o) {
    struct engine_options *e = &f->o;
    if (e->draft_path && (is_number(e->draft_path) || !strcmp(e->draft_path, "auto")))
        return options_error(o,
                             "--draft: '%s' is no model; --draft takes the draft model's path, "
                             "--draft-tokens how many tokens it proposes",
                             e->draft_path);
    int rc = speculation_parse_draft_tokens(o, f->draft_tokens, &e->draft_tokens);
    if (rc < 0) rc = speculation_parse_coupling(o, f->coupling, &f->default_coupling);
    if (rc >= 0) return rc;
    if (e->max_draft_tokens > 0 && e->draft_tokens > e->max_draft_tokens)
        return options_error(o, "--draft-tokens %d is more than --max-draft-tokens %d",
                             e->draft_tokens, e->max_draft_tokens);
    if (e->max_draft_tokens == 0)
        e->max_draft_tokens =
            e->draft_tokens > DEFAULT_MAX_DRAFT ? e->draft_tokens : DEFAULT_MAX_DRAFT;
    if (e->draft_window != 0 && (e->draft_window < 2 * BLOCK || e->draft_window % BLOCK != 0))
        return options_error(
            o, "--draft-window: %d must be 0 (everything) or a multiple of %d, at least %d",
            e->draft_window, BLOCK, 2 * BLOCK);
    return -1;
}

/* What was typed and does nothing is said, not swallowed. */
static void warn_idle(const struct engine_flags *f, bool asked_most) {
    const struct engine_options *e = &f->o;
    bool lonely = !e->draft_path && !e->lookup;
    if (e->draft_window != 0 && !e->draft_path)
        log_warn("--draft-window %d does nothing without --draft", e->draft_window);
    if (lonely && f->draft_tokens && e->draft_tokens != 0)
        log_warn("--draft-tokens %s does nothing: --no-lookup and no --draft leave nobody to "
                 "propose",
                 f->draft_tokens);
    if (asked_most && (lonely || e->draft_tokens == 0))
        log_warn("--max-draft-tokens %d does nothing %s", e->max_draft_tokens,
                 lonely ? "without --draft and with --no-lookup"
                        : "with --draft-tokens 0 unless a request asks for more");
}

int engine_flags_finish(struct engine_flags *f, const struct options *o) {
    if (!f->o.model_path) return options_error(o, "--model is needed");
    if (!strcmp(f->precision, "f32") || !strcmp(f->precision, "reference"))
        f->o.precision = KERN_REFERENCE;
    else if (!strcmp(f->precision, "fast")) f->o.precision = KERN_FAST;
    else return options_error(o, "--cpu-precision: '%s' is neither fast nor f32", f->precision);
    if (!strcmp(f->load_format, "dummy")) f->o.dummy_weights = true;
    else if (strcmp(f->load_format, "auto") != 0)
        return options_error(o, "--load-format: '%s' is neither auto nor dummy", f->load_format);
    if (f->o.dummy_type && !f->o.dummy_weights)
        return options_error(o, "--dummy-type belongs to --load-format dummy");
    bool asked_most = f->o.max_draft_tokens > 0;
    int rc = finish_speculation(f, o);
    if (rc < 0) rc = sparsity_flags_finish(&f->sparsity, o);
    if (rc >= 0) return rc;
    f->o.sparse = f->sparsity.s;
    if (f->quiet) log_set_level(LOG_ERROR);
    warn_idle(f, asked_most);
    return -1;
}
