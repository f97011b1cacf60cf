/* `tandem plan`: what a model, or a pair, needs and what fits, from headers alone: the code that a
 * server's start runs. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "cmd/cmd.h"
#include "cmd/engine_flags.h"
#include "cmd/plan_gain.h"
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

static void print_text(const struct plan *p, const struct plan_gain *gain, int clients) {
    struct strbuf out = {0};
    plan_render_text(p, &out);
    if (out.n) fwrite(out.data, 1, out.n, stdout);
    print_table(p);
    if (clients)
        printf("\n%d clients at once: %d tokens each\n", clients, plan_context_for(p, clients));
    strbuf_clear(&out);
    plan_gain_text(gain, &out);
    if (out.n) fwrite(out.data, 1, out.n, stdout);
    strbuf_deinit(&out);
}

/* The plan's object with one more key. */
static void print_json(const struct plan *p, const struct plan_gain *gain) {
    struct strbuf out = {0};
    plan_render_json(p, &out);
    while (out.n && out.data[out.n - 1] != '}') out.n--;
    if (out.n) out.n--;
    strbuf_append_str(&out, ",\"sparse_reading\":");
    plan_gain_json(gain, &out);
    strbuf_append_str(&out, "}\n");
    fwrite(out.data, 1, out.n, stdout);
    strbuf_deinit(&out);
}

int cmd_plan(int argc, char **argv) {
    struct engine_flags f;
    size_t memory = 0, bandwidth = 0;
    int clients = 0;
    bool json = false;
    struct plan_gain_options how = {0};
    engine_flags_init(&f);
    const struct option table[] = {
        ENGINE_FLAGS(&f),
        {OPTION_GROUP, "Plan", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_BYTES, "device-memory", NULL, 0, &memory, "SIZE", 0, 9e15,
         "memory of the device that is planned for", "what is free here"},
        {OPTION_INT, "clients", NULL, 0, &clients, "N", 0, 1 << 20,
         "say what context N sequences at once can have, and what sparse reading gains them", "1"},
        {OPTION_BYTES, "bandwidth", NULL, 0, &bandwidth, "SIZE", 0, 9e15,
         "bytes that its memory gives a second, for what sparse reading gains", "unknown"},
        {OPTION_DOUBLE, "product-rate", NULL, 0, &how.rate, "X", 0, 1e18,
         "products (multiply and add) a second of its arithmetic, as 3.4e10", "unknown"},
        {OPTION_FLAG, "measure", NULL, 0, &how.measure, NULL, 0, 0,
         "time both here, where they are not given: half a second, half a gigabyte", NULL},
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
    struct plan_gain gain;
    how.bandwidth = (double)bandwidth;
    how.batch = clients ? clients : 1;
    rc = plan_gain(&gain, &f.o, &plan, &how, &e);
    if (rc) return cmd_fail(&e);
    if (json) print_json(&plan, &gain);
    else print_text(&plan, &gain, clients);
    return plan.fits ? 0 : 1;
}
