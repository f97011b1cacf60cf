/* Opening an engine as a person watches: a progress bar, then the lines that say what was opened.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "cmd/cmd.h"

static void show_progress(void *arg, size_t done, size_t total) {
    struct log_progress *p = arg;
    if (!p->what) log_progress_start(p, "packing weights", (long long)total);
    log_progress_at(p, (long long)done);
}

/* The draft and who proposes how much. */
static void log_speculation(const struct engine *g, const struct engine_options *o) {
    const struct model_config *d = engine_draft_config(g);
    char how_many[48], reach[80] = "";
    if (o->draft_tokens < 0)
        snprintf(how_many, sizeof how_many, "auto, up to %d", o->max_draft_tokens);
    else snprintf(how_many, sizeof how_many, "%d", o->draft_tokens);
    if (d) {
        if (o->draft_window > 0) snprintf(reach, sizeof reach, ", window %d", o->draft_window);
        if (d->context < engine_context(g))
            snprintf(reach + strlen(reach), sizeof reach - strlen(reach),
                     "; proposes nothing past %d tokens", d->context);
        log_info("draft %s: %s, %d layers, hidden %d, context %d%s", d->name, d->arch, d->n_layers,
                 d->hidden, d->context, reach);
    }
    if (o->draft_tokens == 0) log_info("speculation: off unless a request asks for it");
    else if (d || o->lookup)
        log_info("speculation: %s draft tokens a round, by %s%s%s", how_many, d ? "the draft" : "",
                 d && o->lookup ? " and " : "", o->lookup ? "prompt lookup" : "");
    else log_info("speculation: none, without a draft and prompt lookup");
}

int cmd_name_option(const struct engine_options *o, int rc, struct err *e) {
    if (rc != E_NOT_FOUND && rc != E_IO) return rc;
    bool model = o->model_path && access(o->model_path, R_OK) != 0;
    bool draft = o->draft_path && access(o->draft_path, R_OK) != 0;
    bool scorer = o->scorer_path && access(o->scorer_path, R_OK) != 0;
    return model    ? err_prefix(e, rc, "--model")
           : draft  ? err_prefix(e, rc, "--draft")
           : scorer ? err_prefix(e, rc, "--scorer")
                    : rc;
}

int cmd_open_engine(struct engine **out, const struct engine_options *o, struct err *e) {
    struct log_progress bar = {0};
    int rc = engine_open(out, o, show_progress, &bar, e);
    if (bar.what) log_progress_end(&bar);
    if (rc) return cmd_name_option(o, rc, e);
    /* Whatever else is quiet: nobody shall take these answers for a model's. */
    if (engine_is_dummy(*out))
        fprintf(stderr,
                "# %s: nothing was loaded, the answers mean nothing; only times, bytes and sizes "
                "are real%s\n",
                engine_model_name(*out),
                tokenizer_is_made_up(engine_tokenizer(*out))
                    ? "; no tokenizer either: ids below 256 are bytes, others read w<ID>"
                    : "");
    const struct model_config *c = engine_model_config(*out);
    log_info("model %s: %s, %d layers, hidden %d, context %d", engine_model_name(*out), c->arch,
             c->n_layers, c->hidden, engine_context(*out));
    log_speculation(*out, o);
    if (engine_scorer(*out))
        log_info("scorer %s: %s, select layer %d", o->scorer_path,
                 engine_scorer(*out)->kind == KERN_SCORE_LATE  ? "late"
                 : engine_scorer(*out)->kind == KERN_SCORE_MLP ? "mlp"
                                                               : "mean",
                 engine_select_layer(*out));
    struct strbuf table = {0};
    plan_render_text(engine_get_plan(*out), &table);
    for (char *line = table.data, *next; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        log_info("%s", line);
    }
    strbuf_deinit(&table);
    if (!engine_chat(*out) && engine_chat_error(*out)) log_warn("%s", engine_chat_error(*out));
    return 0;
}
