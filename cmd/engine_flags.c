#include "cmd/engine_flags.h"

#include <string.h>

#include "base/log.h"
#include "cmd/cmd.h"

void engine_flags_init(struct engine_flags *f) {
    memset(f, 0, sizeof *f);
    engine_options_default(&f->o);
    f->precision = "fast";
}

int engine_flags_finish(struct engine_flags *f, const struct options *o) {
    if (!f->o.model_path) return options_error(o, "--model is needed");
    if (!strcmp(f->precision, "f32") || !strcmp(f->precision, "reference"))
        f->o.precision = KERN_REFERENCE;
    else if (!strcmp(f->precision, "fast")) f->o.precision = KERN_FAST;
    else return options_error(o, "--cpu-precision: '%s' is neither fast nor f32", f->precision);
    if (f->quiet) log_set_level(LOG_ERROR);
    return -1;
}

static void show_progress(void *arg, size_t done, size_t total) {
    struct log_progress *p = arg;
    if (!p->what) log_progress_start(p, "packing weights", (long long)total);
    log_progress_at(p, (long long)done);
}

int cmd_open_engine(struct engine **out, const struct engine_options *o, struct err *e) {
    struct log_progress bar = {0};
    int rc = engine_open(out, o, show_progress, &bar, e);
    if (bar.what) log_progress_end(&bar);
    if (rc) return rc;
    const struct model_config *c = engine_model_config(*out);
    log_info("model %s: %s, %d layers, hidden %d, context %d", engine_model_name(*out), c->arch,
             c->n_layers, c->hidden, engine_context(*out));
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
