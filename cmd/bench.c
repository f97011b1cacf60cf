/* `tandem bench`: what a client sees of the engine in this process, over a grid of prompt lengths
 * and batch sizes: time to first token, time per token, inter-token latency, tokens a second, KV
 * bytes read and resident. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/number.h"
#include "base/rng.h"
#include "cmd/bell.h"
#include "cmd/bench_grid.h"
#include "cmd/bench_kinds.h"
#include "cmd/bench_prompts.h"
#include "cmd/cmd.h"
#include "cmd/engine_flags.h"
#include "cmd/sparsity.h"
#include "cmd/text.h"

enum {
    MAX_POINTS = GRID_MAX_LIST,
    MAX_BATCH = ENGINE_MAX_SEQS,
    GRID_KEEP_BLOCKS = 32,
    GRID_REPEATS = 5,
    SPEC_REPEATS = 7
};

struct point {
    int prompt, batch, n_tokens; /* asked for */
    double ttft_p50, ttft_max;   /* ms */
    double tpot;                 /* ms a token of one sequence, without the first */
    double itl_p50, itl_p99;     /* ms */
    double prompt_rate;          /* prompt tokens a second until all have their first token */
    double decode_rate;          /* tokens a second of all sequences after that */
    bool overlap;                /* all decoded at once for a while: what decode_rate is of; else it
                                    is of all the time from the first token to the last */
    double kv_shallow, kv_deep;  /* read per decoded token by the answers' own passes, by lists */
    double kernel_kv;            /* the same as the kernels count, of passes without prompt rows */
    int n_blocks, n_kept;        /* of the last prompt; 0: everything is read */
    size_t resident;             /* bytes of the process at the end */
};

struct client {
    struct engine_request *r;
    int64_t last_ns, first_ns;
    int seen;
    bool done;
};

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

static double at_share(const double *sorted, size_t n, double share) {
    return n ? sorted[min_size(n - 1, (size_t)(share * (double)n))] : 0;
}

/* Prompts of random ids, different for each client so that no prefix is shared. */
static void make_prompt(int32_t *ids, int n, int vocab, uint64_t seed) {
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)(rng_u32(seed, (uint64_t)i, RNG_TEST, 0) % (uint32_t)vocab);
}

/* Look at each client once; times of new tokens go to gaps. */
static int look(struct client *c, int n, double *gaps, size_t *n_gaps, struct point *out,
                double *ttft, int *n_done, struct err *e) {
    for (int i = 0; i < n; i++) {
        if (c[i].done) continue;
        struct engine_progress p;
        engine_poll(c[i].r, &p);
        int64_t now = clock_ns();
        for (; c[i].seen < p.n_tokens; c[i].seen++) {
            if (c[i].seen == 0) {
                ttft[i] = (double)(p.first_token_ns - p.submitted_ns) / 1e6;
                c[i].first_ns = p.first_token_ns;
            } else if (*n_gaps < (size_t)out->batch * (size_t)out->n_tokens)
                gaps[(*n_gaps)++] = (double)(now - c[i].last_ns) / 1e6;
            c[i].last_ns = now;
        }
        if (!p.finish) continue;
        if (p.finish == ENGINE_FAILED) return err_raise(e, p.error_code, "%s", p.error);
        int n_passes = p.n_tokens > 1 ? p.n_tokens - 1 : 1;
        out->kv_shallow += (double)p.sparsity.kv_shallow_bytes / n_passes / n;
        out->kv_deep += (double)p.sparsity.kv_deep_bytes / n_passes / n;
        out->n_blocks = p.sparsity.n_blocks;
        out->n_kept = p.sparsity.n_kept;
        c[i].last_ns = p.finished_ns;
        out->tpot += (double)(p.finished_ns - p.first_token_ns) / 1e6 /
                     (p.n_tokens > 1 ? p.n_tokens - 1 : 1) / n;
        c[i].done = true;
        ++*n_done;
    }
    return 0;
}

/* Tokens a second of all, firsts left out, from the earliest first token to the last end. */
static double whole_rate(const struct client *c, int n) {
    int64_t begin = INT64_MAX, end = 0;
    double tokens = 0;
    for (int i = 0; i < n; i++) {
        if (c[i].first_ns < begin) begin = c[i].first_ns;
        if (c[i].last_ns > end) end = c[i].last_ns;
        tokens += c[i].seen - 1;
    }
    return end > begin ? tokens / ((double)(end - begin) / 1e9) : 0;
}

static struct engine_exact exact_since(const struct engine_exact *a, const struct engine_exact *b) {
    return (struct engine_exact){.n_passes = b->n_passes - a->n_passes,
                                 .n_provisional = b->n_provisional - a->n_provisional,
                                 .n_accepted = b->n_accepted - a->n_accepted,
                                 .n_tokens = b->n_tokens - a->n_tokens};
}

static int run_point(struct engine *g, struct point *out, struct err *e) {
    static struct bell bell = BELL_INIT;
    struct client clients[MAX_BATCH] = {{0}};
    int n = out->batch, n_done = 0, rc = 0;
    double ttft[MAX_BATCH] = {0};
    size_t n_gaps = 0;
    double *gaps = malloc(sizeof *gaps * (size_t)n * (size_t)out->n_tokens);
    int32_t *ids = malloc(sizeof *ids * (size_t)out->prompt);
    if (!gaps || !ids) {
        free(gaps);
        free(ids);
        return err_raise(e, E_NOMEM, "no memory for a point of the bench");
    }
    struct engine_stats before, after;
    struct strbuf exact = {0};
    engine_get_stats(g, &before);
    struct engine_submit_options so = {.prompt = ids,
                                       .n_prompt = out->prompt,
                                       .no_prefix_cache = true,
                                       .notify = bell_ring,
                                       .notify_arg = &bell};
    verify_params_default(&so.params);
    so.params.temperature = 0;
    so.params.ignore_eos = true;
    so.params.max_tokens = out->n_tokens;
    /* Lookup would feed on the loops that greedy answers to random tokens fall into. */
    if (!engine_draft_config(g)) so.params.draft_tokens = 0;
    /* Rates of the full batch: from when all have begun until the first of them is done. */
    int64_t start = clock_ns(), first = 0, last = 0;
    size_t n_before = 0, n_full = 0;
    for (int i = 0; i < n && !rc; i++) {
        make_prompt(ids, out->prompt, tokenizer_n_tokens(engine_tokenizer(g)), (uint64_t)i + 1);
        rc = engine_submit(g, &so, &clients[i].r, e);
    }
    while (!rc && n_done < n) {
        bell_wait(&bell);
        rc = look(clients, n, gaps, &n_gaps, out, ttft, &n_done, e);
        int begun = 0;
        for (int i = 0; i < n; i++) begun += clients[i].seen > 0;
        if (begun < n) continue;
        if (!first) {
            first = clock_ns();
            n_before = n_gaps;
        } else if (n_done == 0) {
            last = clock_ns();
            n_full = n_gaps - n_before;
        }
    }
    engine_get_stats(g, &after);
    for (int i = 0; i < n; i++)
        if (clients[i].r) engine_release(g, clients[i].r);
    if (!rc) {
        qsort(gaps, n_gaps, sizeof *gaps, by_value);
        qsort(ttft, (size_t)n, sizeof *ttft, by_value);
        double tokens = (double)(after.answers.n_tokens - before.answers.n_tokens);
        uint64_t kernel_kv = after.answers.shallow_bytes - before.answers.shallow_bytes +
                             after.answers.deep_bytes - before.answers.deep_bytes;
        out->ttft_p50 = at_share(ttft, (size_t)n, 0.5);
        out->ttft_max = ttft[n - 1];
        out->itl_p50 = at_share(gaps, n_gaps, 0.5);
        out->itl_p99 = at_share(gaps, n_gaps, 0.99);
        out->prompt_rate = (double)n * out->prompt / ((double)(first - start) / 1e9);
        out->overlap = last > first && n_full > 0;
        out->decode_rate =
            out->overlap ? (double)n_full / ((double)(last - first) / 1e9) : whole_rate(clients, n);
        out->kernel_kv = tokens > 0 ? (double)kernel_kv / tokens : 0;
        out->resident = after.resident_bytes;
        const struct engine_exact of = exact_since(&before.exact, &after.exact);
        sparsity_append_exact(&exact, &of);
        if (exact.n > 0) fprintf(stderr, "# exact: %s\n", exact.data);
    }
    strbuf_deinit(&exact);
    free(gaps);
    free(ids);
    return rc;
}

/* "512,2048" into out[]; the count, or 0 where it is no such list. */
static int parse_list(const char *s, int lo, int hi, int out[MAX_POINTS]) {
    int n = 0;
    while (*s) {
        size_t word = strcspn(s, ",");
        if (n == MAX_POINTS || !number_in(s, word, lo, hi, &out[n])) return 0;
        n++;
        s += word + (s[word] == ',');
    }
    return n;
}

static void print_json(const struct point *p, int n, const struct engine *g) {
    struct strbuf b = {0};
    strbuf_append_str(&b, "{\"model\": ");
    strbuf_append_json(&b, engine_model_name(g), strlen(engine_model_name(g)));
    strbuf_append_str(&b, ", \"points\": [");
    for (int i = 0; i < n; i++)
        strbuf_printf(
            &b,
            "%s\n  {\"prompt_tokens\": %d, \"batch\": %d, \"tokens\": %d, \"ttft_p50_ms\": %.3f, "
            "\"ttft_max_ms\": %.3f, \"tpot_ms\": %.3f, \"itl_p50_ms\": %.3f, \"itl_p99_ms\": %.3f, "
            "\"prompt_tokens_per_s\": %.2f, \"decode_tokens_per_s\": %.2f, "
            "\"decode_overlap\": %s, \"kv_bytes_read_per_token\": %.0f, "
            "\"kv_shallow_bytes_per_token\": %.0f, "
            "\"kv_deep_bytes_per_token\": %.0f, \"blocks\": %d, \"kept_blocks\": %d, "
            "\"resident_bytes\": %zu}",
            i ? "," : "", p[i].prompt, p[i].batch, p[i].n_tokens, p[i].ttft_p50, p[i].ttft_max,
            p[i].tpot, p[i].itl_p50, p[i].itl_p99, p[i].prompt_rate, p[i].decode_rate,
            p[i].overlap ? "true" : "false", p[i].kernel_kv, p[i].kv_shallow, p[i].kv_deep,
            p[i].n_blocks, p[i].n_kept, p[i].resident);
    strbuf_append_str(&b, "\n]}\n");
    fwrite(b.data, 1, b.n, stdout);
    strbuf_deinit(&b);
}

static void print_point(const struct point *p) {
    char blocks[32] = "all";
    if (p->n_kept > 0) snprintf(blocks, sizeof blocks, "%d/%d", p->n_kept, p->n_blocks);
    printf("%8d %6d %10.1f %10.1f %9.2f %9.2f %9.2f %11.1f %11.1f %12s %9s %10s\n", p->prompt,
           p->batch, p->ttft_p50, p->ttft_max, p->tpot, p->itl_p50, p->itl_p99, p->prompt_rate,
           p->decode_rate, cmd_bytes(p->kv_shallow + p->kv_deep), blocks,
           cmd_bytes((double)p->resident));
}

/* A sparse cell where nothing was said: what `observed` keeps of a long prompt. */
static void sparse_defaults(struct target_settings *s) {
    if (s->selector == TARGET_UNSET) s->selector = TARGET_OBSERVED;
    if (s->keep == TARGET_UNSET && s->keep_blocks == TARGET_UNSET)
        s->keep_blocks = GRID_KEEP_BLOCKS;
}

static bool parse_prefill(const char *s, enum grid_prefill *out) {
    *out = !strcmp(s, "turn")   ? GRID_PREFILL_TURN
           : !strcmp(s, "once") ? GRID_PREFILL_ONCE
                                : GRID_PREFILL_CELL;
    return *out != GRID_PREFILL_CELL || !strcmp(s, "cell");
}

/* What was typed. */
struct bench_args {
    const char *prompts, *batches, *kind, *prefill;
    int n_tokens, n_repeats; /* 0: as usual */
    double temperature;
    bool json, spec, with_grid;
    struct bench_grid_options grid; /* text and page as typed; the rest is filled in later */
    int lengths[MAX_POINTS], sizes[MAX_POINTS], n_lengths, n_sizes;
};

/* Lists and what excludes what. -1 to go on, else the exit code. */
static int check_args(const struct options *o, struct bench_args *a) {
    if (!a->prompts) a->prompts = a->with_grid ? "4096" : "512";
    if (!a->batches) a->batches = a->with_grid ? "1" : "1,4";
    a->n_lengths = parse_list(a->prompts, 1, MODEL_MAX_CONTEXT, a->lengths);
    a->n_sizes = parse_list(a->batches, 1, MAX_BATCH, a->sizes);
    if (!a->n_lengths)
        return options_error(o, "--prompt-tokens: '%s' is not a list of lengths", a->prompts);
    if (!a->n_sizes)
        return options_error(o, "--batch: '%s' is not a list of 1..%d", a->batches, MAX_BATCH);
    if (a->spec && a->with_grid) return options_error(o, "--spec and --grid exclude each other");
    if (a->kind && !a->spec && !a->with_grid)
        return options_error(o, "--kind belongs to --spec or --grid");
    if (a->kind && a->spec && !bench_kind_exists(a->kind))
        return options_error(o,
                             "--kind: '%s' is not one of chat, code, summary, edit, list, "
                             "translation, maths, story",
                             a->kind);
    const char *of_grid = a->grid.text        ? "text"
                          : a->grid.html_path ? "html"
                          : a->prefill        ? "prefill"
                                              : NULL;
    if (of_grid && !a->with_grid) return options_error(o, "--%s belongs to --grid", of_grid);
    return -1;
}

/* What the grid needs beside: a->grid is filled in, and the engine's settings are its sparse
 * cells', so that whatever they select by is kept. */
static int check_grid(const struct options *po, struct engine_options *eo, struct bench_args *a) {
    struct bench_grid_options *o = &a->grid;
    if (a->prefill && !parse_prefill(a->prefill, &o->prefill))
        return options_error(po, "--prefill: '%s' is not one of cell, turn, once", a->prefill);
    if (a->kind && !bench_question_exists(a->kind))
        return options_error(po, "--kind: '%s' is not one of summary, extract, continue, quote",
                             a->kind);
    if (eo->sparse.selector == TARGET_OFF)
        return options_error(po, "--sparse off leaves --grid no sparse cells");
    if (eo->draft_tokens == 0)
        return options_error(po, "--draft-tokens 0 leaves --grid no cells with speculation");
    if (!eo->draft_path && !eo->lookup)
        return options_error(po, "--grid needs a --draft or prompt lookup");
    sparse_defaults(&eo->sparse);
    memcpy(o->depths, a->lengths, sizeof a->lengths);
    memcpy(o->batches, a->sizes, sizeof a->sizes);
    o->n_depths = a->n_lengths;
    o->n_batches = a->n_sizes;
    o->n_tokens = a->n_tokens;
    o->n_repeats = a->n_repeats ? a->n_repeats : GRID_REPEATS;
    o->temperature = a->temperature;
    o->kind = a->kind;
    o->json = a->json;
    o->sparse = eo->sparse;
    return -1;
}

/* Every length with every batch size. */
static int run_points(struct engine *g, const struct bench_args *a, struct err *e) {
    static struct point points[MAX_POINTS * MAX_POINTS];
    struct point warm = {.prompt = 16, .batch = 1, .n_tokens = 8};
    int n = 0, rc = run_point(g, &warm, e);
    if (!a->json)
        printf("%8s %6s %10s %10s %9s %9s %9s %11s %11s %12s %9s %10s\n", "prompt", "batch",
               "TTFT ms", "worst", "TPOT ms", "ITL p50", "ITL p99", "prompt t/s", "decode t/s",
               "KV read/t", "blocks", "resident");
    for (int i = 0; i < a->n_lengths && !rc; i++)
        for (int j = 0; j < a->n_sizes && !rc; j++) {
            struct point *p = &points[n++];
            *p = (struct point){
                .prompt = a->lengths[i], .batch = a->sizes[j], .n_tokens = a->n_tokens};
            rc = run_point(g, p, e);
            if (!rc && !a->json) print_point(p);
            fflush(stdout);
        }
    if (!rc && a->json) print_json(points, n, g);
    return rc;
}

static int run(struct engine *g, const struct bench_args *a, struct err *e) {
    struct bench_spec_options so = {a->n_tokens, a->n_repeats ? a->n_repeats : SPEC_REPEATS,
                                    a->temperature, a->kind, a->json};
    if (!a->json && engine_is_dummy(g)) printf("%s\n", engine_model_name(g));
    if (a->spec) return bench_spec(g, &so, e);
    return a->with_grid ? bench_grid(g, &a->grid, e) : run_points(g, a, e);
}

/* A server measures what passes cost before its first client comes; a bench that began at once
 * would show rounds chosen blindly, and times measured beside its own tokenizer. */
static void wait_calibrated(struct engine *g) {
    const struct timespec pause = {.tv_nsec = 2000000};
    for (struct engine_stats s;; nanosleep(&pause, NULL)) {
        engine_get_stats(g, &s);
        if (s.is_calibrated || engine_failed(g, NULL)) return;
    }
}

int cmd_bench(int argc, char **argv) {
    struct engine_flags f;
    static struct bench_args a = {.n_tokens = 64};
    engine_flags_init(&f);
    const struct option table[] = {
        ENGINE_FLAGS(&f),
        {OPTION_GROUP, "Bench", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_STRING, "prompt-tokens", "n-prompt depth", 'p', &a.prompts, "LIST", 0, 0,
         "prompt lengths, as 512,4096", "512, with --grid 4096"},
        {OPTION_STRING, "batch", "npl", 0, &a.batches, "LIST", 0, 0, "sequences at once, as 1,8",
         "1,4, with --grid 1"},
        {OPTION_INT, "tokens", "n-gen", 'n', &a.n_tokens, "N", 2, 100000,
         "tokens that each generates", "64"},
        {OPTION_FLAG, "spec", NULL, 0, &a.spec, NULL, 0, 0,
         "what speculation gains: eight kinds of prompts, off against fixed draft lengths, lookup "
         "and auto",
         NULL},
        {OPTION_FLAG, "grid", NULL, 0, &a.with_grid, NULL, 0, 0,
         "{speculation off, on} x {dense, sparse} on long prompts: each gain, their product, both "
         "together; sparse cells by --sparse (observed), --keep-blocks (32)",
         NULL},
        {OPTION_INT, "repeats", NULL, 0, &a.n_repeats, "N", 1, GRID_MAX_REPEATS,
         "with --spec, --grid: runs of each, interleaved; medians are shown", "7, 5"},
        {OPTION_STRING, "kind", NULL, 0, &a.kind, "NAME", 0, 0,
         "only this one (--spec: chat, code, summary, edit, list, translation, maths, story; "
         "--grid: summary, extract, continue, quote)",
         "all"},
        {OPTION_DOUBLE, "temperature", "temp", 0, &a.temperature, "T", 0, 100,
         "with --spec, --grid: of the answers (0: greedy)", "0"},
        {OPTION_STRING, "text", NULL, 0, &a.grid.text, "NAME", 0, 0,
         "with --grid: what the prompts are cut from: code, dialogue, fiction, news, technical "
         "(shipped), or a file",
         "all shipped ones"},
        {OPTION_STRING, "prefill", NULL, 0, &a.prefill, "WHEN", 0, 0,
         "with --grid: who computes prompts whole: every cell in its first turn (cell), in every "
         "turn (turn), the first cell alone (once)",
         "cell"},
        {OPTION_STRING, "html", NULL, 0, &a.grid.html_path, "FILE", 0, 0,
         "with --grid: a page with plots as well", NULL},
        {OPTION_FLAG, "json", NULL, 0, &a.json, NULL, 0, 0,
         "one JSON object on stdout instead of the table", NULL},
        {0},
    };
    struct options o = {.command = "bench",
                        .usage = "tandem bench -m MODEL [options]",
                        .about = "Time the engine as a client sees it, over prompt lengths and "
                                 "batch sizes. Prompts are random\n"
                                 "tokens, greedy, end tokens ignored, no prefix shared.",
                        .table = table};
    int rc = options_parse(&o, argc, argv);
    if (rc < 0) rc = engine_flags_finish(&f, &o);
    if (rc < 0) rc = check_args(&o, &a);
    if (rc < 0 && a.with_grid) rc = check_grid(&o, &f.o, &a);
    if (rc >= 0) return rc;
    int most = 1;
    for (int i = 0; i < a.n_sizes; i++) most = a.sizes[i] > most ? a.sizes[i] : most;
    if (!f.o.max_seqs) f.o.max_seqs = most;
    struct err e = {0};
    struct engine *g;
    rc = cmd_open_engine(&g, &f.o, &e);
    if (rc) return cmd_fail(&e);
    wait_calibrated(g);
    rc = run(g, &a, &e);
    engine_close(g);
    return rc ? cmd_fail(&e) : 0;
}
