/* `tandem plan`: what a model, or a pair, needs and what fits, from headers alone: the code that a
 * server's start runs. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "cmd/cmd.h"
#include "cmd/engine_flags.h"
#include "cmd/text.h"

/* How many sequences of each length would fit: the table that a buyer reads. */
static void print_table(const struct plan *p) {
    printf("\nsequences at once, by tokens of each\n");
    for (int context = 1024; context <= p->context; context *= 2)
        printf("%10d tokens   %d\n", context, plan_seqs_for(p, context));
    printf("tokens of each, by sequences at once\n");
    for (int n = 1; n <= 256; n *= 4) {
        int fit = plan_context_for(p, n);
        printf("%10d at once     %d%s\n", n, fit < p->context ? fit : p->context,
               fit < p->context ? "" : " (the longest allowed)");
    }
}

int cmd_plan(int argc, char **argv) {
    struct engine_flags f;
    size_t memory = 0;
    int clients = 0;
    bool json = false;
    engine_flags_init(&f);
    const struct option table[] = {
        ENGINE_FLAGS(&f),
        {OPTION_GROUP, "Plan", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_BYTES, "device-memory", NULL, 0, &memory, "SIZE", 0, 9e15,
         "memory of the device that is planned for", "what is free here"},
        {OPTION_INT, "clients", NULL, 0, &clients, "N", 0, 1 << 20,
         "say what context N sequences at once can have", NULL},
        {OPTION_FLAG, "json", NULL, 0, &json, NULL, 0, 0, "one JSON object", NULL},
        {0},
    };
    struct options o = {.command = "plan",
                        .usage = "tandem plan MODEL [DRAFT] [options]",
                        .about = "Say what a model (and a draft) reserves, byte by byte, and what "
                                 "fits then. Reads headers\n"
                                 "or a config.json; no weights and no GPU are needed. For --device "
                                 "cuda the build must\n"
                                 "have the CUDA backend: how weights lie there is its own.",
                        .table = table,
                        .max_words = 2};
    int rc = options_parse(&o, argc, argv);
    if (rc >= 0) return rc;
    if (o.n_words > 0 && !f.o.model_path) f.o.model_path = o.words[0];
    if (o.n_words > 1 && !f.o.draft_path) f.o.draft_path = o.words[1];
    rc = engine_flags_finish(&f, &o);
    if (rc >= 0) return rc;
    struct err e = {0};
    struct plan plan;
    rc = engine_plan(&plan, &f.o, memory, &e);
    if (rc) {
        cmd_name_option(&f.o, rc, &e);
        return cmd_fail(&e);
    }
    struct strbuf out = {0};
    if (json) plan_render_json(&plan, &out);
    else plan_render_text(&plan, &out);
    if (out.n) fwrite(out.data, 1, out.n, stdout);
    if (json) printf("\n");
    strbuf_deinit(&out);
    if (!json) print_table(&plan);
    if (clients && !json)
        printf("\n%d clients at once: %d tokens each\n", clients, plan_context_for(&plan, clients));
    return plan.fits ? 0 : 1;
}
