#include "cmd/sparsity.h"

#include <string.h>

#include "base/err.h"
#include "cmd/text.h"

void sparsity_flags_init(struct sparsity_flags *f) {
    *f = (struct sparsity_flags){.sparse_prefill = -1};
    target_settings_unset(&f->s);
}

int sparsity_flags_finish(struct sparsity_flags *f, const struct options *o) {
    struct err e = {0};
    if (f->selector && target_selector_parse(&f->s.selector, f->selector, strlen(f->selector), &e))
        return options_error(
            o,
            "--sparse: '%s' is not one of off, all, observed, scorer, mean, minmax, bound, "
            "recent, random",
            f->selector);
    if (f->keep && target_keep_parse(&f->s, f->keep, strlen(f->keep), &e))
        return options_error(o,
                             "--keep: '%s' is neither curve, a share above 0, up to 1, nor "
                             "points TOKENS:KEEP,...",
                             f->keep);
    if (f->keep && f->s.keep_blocks > 0)
        return options_error(o, "--keep and --keep-blocks exclude each other");
    if (f->threshold &&
        target_threshold_parse(&f->s.threshold, f->threshold, strlen(f->threshold), &e))
        return options_error(o, "--keep-threshold: '%s' is neither off nor a number", f->threshold);
    if (f->reselect && target_reselect_parse(&f->s.reselect, f->reselect, strlen(f->reselect), &e))
        return options_error(o,
                             "--reselect: '%s' is none of off, step, surprise, or a number of "
                             "tokens from 1 to %d",
                             f->reselect, TARGET_MOST_BLOCKS);
    if (f->reselector &&
        target_reselector_parse(&f->s.reselector, f->reselector, strlen(f->reselector), &e))
        return options_error(
            o, "--reselector: '%s' is not one of scorer, mean, minmax, bound, recent, random",
            f->reselector);
    if (f->recheck && target_recheck_parse(&f->s.recheck, f->recheck, strlen(f->recheck), &e))
        return options_error(o, "--recheck: '%s' is neither off nor border", f->recheck);
    if (f->exact && target_exact_parse(&f->s.exact, f->exact, strlen(f->exact), &e))
        return options_error(o, "--exact: '%s' is none of on, off, or a number of tokens to %d",
                             f->exact, TARGET_MOST_EXACT);
    if (f->lists && target_lists_parse(&f->s.lists, f->lists, strlen(f->lists), &e))
        return options_error(o, "--lists: '%s' is not one of one, layer, head", f->lists);
    if (f->sparse_prefill >= 0)
        f->s.prefill = f->sparse_prefill ? TARGET_PREFILL_SPARSE : TARGET_PREFILL_DENSE;
    if (target_settings_check(&f->s, &e)) return options_error(o, "%s", e.message);
    return -1;
}

static bool left_out(const struct engine_sparsity *s) {
    return s->n_selections > 0 && s->n_kept < s->n_blocks;
}

void sparsity_append_short(struct strbuf *out, const struct engine_sparsity *s) {
    if (!left_out(s)) return;
    strbuf_printf(out, ", %d of %d blocks read (%s", s->n_kept, s->n_blocks,
                  target_selector_name(s->settings.selector));
    if (s->n_lists > 1) strbuf_printf(out, ", in each of %d lists", s->n_lists);
    strbuf_append_str(out, ")");
}

void sparsity_append_exact(struct strbuf *out, const struct engine_exact *x) {
    if (x->n_passes == 0) return;
    strbuf_printf(out, "%llu dense passes verified %llu provisional tokens and accepted %llu, ",
                  (unsigned long long)x->n_passes, (unsigned long long)x->n_provisional,
                  (unsigned long long)x->n_accepted);
    strbuf_printf(out, "%.1f tokens a pass", (double)x->n_tokens / (double)x->n_passes);
}

static void append_prefill(struct strbuf *out, const struct engine_prefill *p) {
    if (p->kv_dense_bytes == 0) return;
    strbuf_printf(out, "; prompt: %llu lists, its rows saw %.0f %% of dense's KV",
                  (unsigned long long)p->n_selections,
                  100.0 * (double)p->kv_bytes / (double)p->kv_dense_bytes);
}

void sparsity_append_long(struct strbuf *out, const struct engine_sparsity *s) {
    uint64_t read = s->kv_shallow_bytes + s->kv_deep_bytes;
    if (s->settings.selector == TARGET_OFF) return;
    strbuf_printf(out, "sparsity: %s", target_selector_name(s->settings.selector));
    if (left_out(s))
        strbuf_printf(out, " kept %d of %s %d blocks", s->n_kept,
                      s->exact.n_passes > 0 ? "the newest" : "the prompt's", s->n_blocks);
    else strbuf_append_str(out, " left nothing out");
    if (s->n_lists > 1)
        strbuf_printf(out, " in each of %d lists, %d in one or another", s->n_lists, s->n_union);
    if (s->n_selections > 1)
        strbuf_printf(
            out,
            "; selected %d times in %.1f ms (%d blocks at first, %d times wider, %d tokens "
            "drawn anew)",
            s->n_selections, (double)s->select_ns / 1e6, s->n_kept_first, s->n_wide, s->n_cut);
    if (s->n_dropped > 0) strbuf_printf(out, "; dropped %d blocks", s->n_dropped);
    if (s->exact.n_passes > 0) strbuf_append_str(out, "; exact: ");
    sparsity_append_exact(out, &s->exact);
    append_prefill(out, &s->prefill);
    if (s->kv_dense_bytes == 0) return;
    strbuf_printf(out, "; KV read: shallow layers %s,", cmd_bytes((double)s->kv_shallow_bytes));
    strbuf_printf(out, " deep layers %s,", cmd_bytes((double)s->kv_deep_bytes));
    strbuf_printf(out, " %.0f %% of dense's %s", 100.0 * (double)read / (double)s->kv_dense_bytes,
                  cmd_bytes((double)s->kv_dense_bytes));
}
