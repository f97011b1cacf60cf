/* `tandem bench --spec`: what speculation gains, by kind of prompt. Off, fixed draft lengths,
 * lookup alone and auto answer the same prompts in turn, over and over (interleaved, each turn
 * beginning with another of them, so that a machine whose speed drifts drifts for all alike);
 * medians are compared, and every answer with the one without speculation, token for token. Answers
 * end where the model ends them: what they repeat of themselves is printed, since a loop is easy to
 * draft.
 *
 * `auto` is compared with the best fixed way, and the best of many noisy medians is partly the
 * luckiest. So in each turn its opponent is the way that was best in all the other turns. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmd/bell.h"
#include "cmd/bench_kinds.h"
#include "cmd/cmd.h"
#include "cmd/text.h"
#include "kernels/kernels.h"

enum { MAX_WAYS = 12, MAX_REPEATS = 101, MAX_KINDS = 16, REPEAT_GRAM = 4 };

/* One way to answer. */
struct way {
    const char *name;
    int draft_tokens;
    bool model, lookup;
    bool fixed; /* competes for "best fixed" */
};

struct result {
    double rate[MAX_REPEATS];    /* tokens a second after the first, by repeat */
    double against[MAX_REPEATS]; /* rate by that without speculation, by repeat */
    double ratio; /* to those without speculation: median of the repeats' own ratios */
    int n_tokens;
    bool same;                   /* tokens equal to those without speculation, each time */
    struct engine_speculation s; /* of the last run */
};

struct kind_result {
    const struct bench_kind *kind;
    double repetition; /* share of its 4-grams that stood in it before */
    int n_prompt;
    struct result way[MAX_WAYS];
};

static int make_ways(const struct engine *g, struct way *w) {
    int n = 0;
    bool model = engine_draft_config(g) != NULL;
    static const struct way off = {"off", 0, false, false, true};
    static const struct way fixed[] = {{"g=1", 1, true, true, true}, {"g=2", 2, true, true, true},
                                       {"g=3", 3, true, true, true}, {"g=4", 4, true, true, true},
                                       {"g=6", 6, true, true, true}, {"g=8", 8, true, true, true}};
    w[n++] = off;
    if (model) {
        for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) w[n++] = fixed[i];
        w[n++] = (struct way){"draft=4", 4, true, false, true};
    }
    w[n++] = (struct way){"lookup", 8, false, true, true};
    w[n++] = (struct way){"auto", VERIFY_DRAFT_AUTO, model, true, false};
    return n;
}

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

static double median(const double *v, int n) {
    double sorted[MAX_REPEATS];
    memcpy(sorted, v, (size_t)n * sizeof *v);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return sorted[n / 2];
}

/* The same without v[left_out]; -1: with all. */
static double median_without(const double *v, int n, int left_out) {
    double rest[MAX_REPEATS];
    int m = 0;
    for (int i = 0; i < n; i++)
        if (i != left_out || n == 1) rest[m++] = v[i];
    return median(rest, m);
}

/* How far the runs without speculation lie apart: the fastest over the slowest. */
static double spread(const struct result *r, int n) {
    double low = r->rate[0], high = r->rate[0];
    for (int i = 1; i < n; i++) {
        if (r->rate[i] < low) low = r->rate[i];
        if (r->rate[i] > high) high = r->rate[i];
    }
    return low > 0 ? high / low : 0;
}

static double repetition(const int32_t *ids, int n) {
    int n_again = 0, n_grams = n - REPEAT_GRAM + 1;
    for (int i = 1; i < n_grams; i++)
        for (int k = 0; k < i; k++)
            if (!memcmp(ids + i, ids + k, REPEAT_GRAM * sizeof *ids)) {
                n_again++;
                break;
            }
    return n_grams > 0 ? (double)n_again / n_grams : 0;
}

/* One answer; its tokens to out[]. */
static int answer(struct engine *g, const struct bench_spec_options *o, const struct tokens *prompt,
                  const struct way *w, int32_t *out, int *n, double *rate,
                  struct engine_speculation *s, struct err *e) {
    static struct bell bell = BELL_INIT;
    struct engine_request *r;
    struct engine_progress p;
    struct engine_submit_options so = {.prompt = prompt->ids,
                                       .n_prompt = (int)prompt->n,
                                       .notify = bell_ring,
                                       .notify_arg = &bell};
    verify_params_default(&so.params);
    so.params.temperature = o->temperature;
    so.params.coupling = VERIFY_GUMBEL; /* so that sampled answers can be compared too */
    so.params.has_seed = true;
    so.params.seed = 7;
    so.params.max_tokens = o->n_tokens;
    so.params.draft_tokens = w->draft_tokens;
    so.params.draft_model = w->model;
    so.params.lookup = w->lookup;
    int rc = engine_submit(g, &so, &r, e);
    if (rc) return rc;
    do {
        bell_wait(&bell);
        engine_poll(r, &p);
    } while (p.finish == ENGINE_RUNNING);
    if (p.finish == ENGINE_FAILED) rc = err_raise(e, p.error_code, "%s", p.error);
    *n = p.n_tokens;
    memcpy(out, p.tokens, (size_t)p.n_tokens * sizeof *out);
    double seconds = (double)(p.finished_ns - p.first_token_ns) / 1e9;
    *rate = seconds > 0 ? (p.n_tokens - 1) / seconds : 0;
    *s = p.speculation;
    engine_release(g, r);
    return rc;
}

static int make_prompt(const struct engine *g, const struct bench_kind *k, struct tokens *out,
                       struct err *e) {
    struct chat_message m = {.role = "user", .content = k->text, .content_bytes = strlen(k->text)};
    if (engine_chat(g))
        return chat_render(engine_chat(g), engine_tokenizer(g), &m, 1, true, out, e);
    return tokenizer_encode(engine_tokenizer(g), k->text, m.content_bytes, TOKENIZER_ADD_SPECIAL,
                            out, e);
}

/* Each way by the one without speculation (way 0) of the same turn: what a machine whose speed
 * drifts leaves of a comparison. */
static void compare(struct kind_result *k, int n_ways, int n_repeats) {
    const struct result *off = &k->way[0];
    for (int i = 0; i < n_ways; i++) {
        struct result *r = &k->way[i];
        for (int t = 0; t < n_repeats; t++)
            r->against[t] = off->rate[t] > 0 ? r->rate[t] / off->rate[t] : 0;
        r->ratio = median(r->against, n_repeats);
    }
}

/* Repeat 0 warms up (pages, caches, what the choice of draft lengths learns) and is not kept. */
static int run_kind(struct engine *g, const struct bench_spec_options *o,
                    const struct bench_kind *k, const struct way *ways, int n_ways,
                    struct kind_result *out, struct err *e) {
    struct tokens prompt = {0};
    size_t bytes = (size_t)o->n_tokens * sizeof(int32_t);
    int32_t *want = malloc(bytes), *got = malloc(bytes);
    int n_want = 0;
    int rc = want && got ? make_prompt(g, k, &prompt, e) : err_raise(e, E_NOMEM, "no memory");
    out->n_prompt = (int)prompt.n;
    for (int i = 0; i < n_ways; i++) out->way[i].same = true;
    for (int repeat = 0; repeat <= o->n_repeats && !rc; repeat++)
        for (int turn = 0; turn < n_ways && !rc; turn++) {
            int i = (turn + repeat) % n_ways, n = 0;
            struct result *r = &out->way[i];
            double rate = 0;
            rc = answer(g, o, &prompt, &ways[i], got, &n, &rate, &r->s, e);
            if (repeat > 0) r->rate[repeat - 1] = rate;
            if (repeat == 0 && i == 0) {
                memcpy(want, got, bytes);
                n_want = n;
            }
            r->n_tokens = n;
            r->same &= n == n_want && !memcmp(want, got, (size_t)n * sizeof *got);
        }
    out->repetition = repetition(want, n_want);
    compare(out, n_ways, o->n_repeats);
    tokens_deinit(&prompt);
    free(want);
    free(got);
    return rc;
}

/* The fixed way that was fastest in all turns but one (-1: in all). */
static int best_fixed(const struct kind_result *k, const struct way *ways, int n_ways,
                      int n_repeats, int left_out) {
    int best = 0;
    double most = 0;
    for (int i = 0; i < n_ways; i++) {
        double ratio = median_without(k->way[i].against, n_repeats, left_out);
        if (!ways[i].fixed || ratio <= most) continue;
        most = ratio;
        best = i;
    }
    return best;
}

/* Median over the turns of auto (the last way) by the way that was best in the others. */
static double against_best(const struct kind_result *k, const struct way *ways, int n_ways,
                           int n_repeats) {
    double ratio[MAX_REPEATS];
    for (int t = 0; t < n_repeats; t++) {
        double best = k->way[best_fixed(k, ways, n_ways, n_repeats, t)].rate[t];
        ratio[t] = best > 0 ? k->way[n_ways - 1].rate[t] / best : 0;
    }
    return median(ratio, n_repeats);
}

static bool all_same(const struct kind_result *k, int n_ways) {
    bool same = true;
    for (int i = 0; i < n_ways; i++) same &= k->way[i].same;
    return same;
}

static void print_head(const struct way *ways, int n_ways) {
    printf("Each answer in turn by every way, over and over; ratios are to `off` of the same turn, "
           "medians of the turns.\n"
           "g=N: N draft tokens a round, lookup first where it matches; draft=4: the model alone; "
           "lookup: no model, up to 8. auto/best: by the way that was best in the other turns.\n"
           "again: 4-grams of the answer that stood in it before. spread: fastest over slowest run "
           "of `off`; far above 1, the machine was busy.\n\n");
    printf("%-12s %6s %6s %6s %9s %7s", "kind", "prompt", "tokens", "again", "off tok/s", "spread");
    for (int i = 1; i < n_ways; i++) printf(" %7s", ways[i].name);
    printf("  %-8s %9s %9s %s\n", "best", "auto/best", "tok/round", "same text");
    fflush(stdout);
}

static void print_row(const struct kind_result *k, const struct way *ways, int n_ways, int n) {
    int best = best_fixed(k, ways, n_ways, n, -1), last = n_ways - 1;
    const struct engine_speculation *s = &k->way[last].s;
    double rounds = (double)(s->n_rounds + s->n_plain_rounds);
    printf("%-12s %6d %6d %5.0f%% %9.1f %6.2fx", k->kind->name, k->n_prompt, k->way[0].n_tokens,
           100 * k->repetition, median(k->way[0].rate, n), spread(&k->way[0], n));
    for (int i = 1; i < n_ways; i++) printf(" %6.2fx", k->way[i].ratio);
    printf("  %-8s %9.3f %9.2f %s\n", ways[best].name, against_best(k, ways, n_ways, n),
           rounds > 0 ? ((double)s->n_accepted + rounds) / rounds : 1,
           all_same(k, n_ways) ? "yes" : "NO");
    fflush(stdout);
}

static void print_json(const struct engine *g, const struct bench_spec_options *o,
                       const struct way *ways, int n_ways, const struct kind_result *k, int n_kinds,
                       double overhead) {
    struct strbuf b = {0};
    strbuf_append_str(&b, "{\"model\": ");
    strbuf_append_json(&b, engine_model_name(g), strlen(engine_model_name(g)));
    strbuf_printf(&b,
                  ", \"repeats\": %d, \"temperature\": %g, \"engine_share\": %.4f, \"kinds\": [",
                  o->n_repeats, o->temperature, overhead);
    for (int i = 0; i < n_kinds; i++) {
        strbuf_printf(&b,
                      "%s\n  {\"kind\": \"%s\", \"prompt_tokens\": %d, \"tokens\": %d, "
                      "\"repetition\": %.4f, \"best\": \"%s\", \"auto_over_best\": %.4f, "
                      "\"ways\": [",
                      i ? "," : "", k[i].kind->name, k[i].n_prompt, k[i].way[0].n_tokens,
                      k[i].repetition, ways[best_fixed(&k[i], ways, n_ways, o->n_repeats, -1)].name,
                      against_best(&k[i], ways, n_ways, o->n_repeats));
        for (int j = 0; j < n_ways; j++) {
            const struct result *r = &k[i].way[j];
            strbuf_printf(&b,
                          "%s\n    {\"way\": \"%s\", \"tokens_per_s\": %.2f, \"ratio\": %.4f, "
                          "\"same_text\": %s, \"rounds\": %llu, \"plain_rounds\": %llu, "
                          "\"drafted\": %llu, \"accepted\": %llu}",
                          j ? "," : "", ways[j].name, median(r->rate, o->n_repeats), r->ratio,
                          r->same ? "true" : "false", (unsigned long long)r->s.n_rounds,
                          (unsigned long long)r->s.n_plain_rounds,
                          (unsigned long long)r->s.n_drafted, (unsigned long long)r->s.n_accepted);
        }
        strbuf_append_str(&b, "]}");
    }
    strbuf_append_str(&b, "\n]}\n");
    fwrite(b.data, 1, b.n, stdout);
    strbuf_deinit(&b);
}

int bench_spec(struct engine *g, const struct bench_spec_options *o, struct err *e) {
    static struct kind_result results[MAX_KINDS];
    struct way ways[MAX_WAYS];
    struct engine_stats before, after;
    int n_ways = make_ways(g, ways), n_kinds = 0, rc = 0;
    engine_get_stats(g, &before);
    if (!o->json) print_head(ways, n_ways);
    for (int i = 0; bench_kinds[i].name && !rc; i++) {
        if (o->kind && strcmp(o->kind, bench_kinds[i].name) != 0) continue;
        struct kind_result *k = &results[n_kinds++];
        k->kind = &bench_kinds[i];
        rc = run_kind(g, o, k->kind, ways, n_ways, k, e);
        if (!rc && !o->json) print_row(k, ways, n_ways, o->n_repeats);
    }
    engine_get_stats(g, &after);
    double seconds = after.step_seconds - before.step_seconds;
    double overhead = (after.overhead_seconds - before.overhead_seconds) / seconds;
    if (!rc && o->json) print_json(g, o, ways, n_ways, results, n_kinds, overhead);
    if (!rc && !o->json)
        printf("engine outside kernels and sampling: %.1f %% of the steps' time\n", 100 * overhead);
    return rc;
}
