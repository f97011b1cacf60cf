/* `tandem eval`: what sparse reading costs in quality, dense beside sparse on the same prompts. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/number.h"
#include "cmd/cmd.h"
#include "cmd/eval_work.h"
#include "cmd/options.h"

enum { DEFAULT_NEEDLES = 40, DEFAULT_TEXTS = 8, MOST_CONTEXT = 32768 };

/* ---- Lists of words ---- */

static int parse_lengths(const char *s, int context, bool typed, int out[EVAL_MAX_LENGTHS],
                         int *n_out, struct err *e) {
    *n_out = 0;
    while (*s) {
        size_t word = strcspn(s, ",");
        int v;
        if (!number_in(s, word, 128, MODEL_MAX_CONTEXT, &v))
            return err_raise(e, E_RANGE, "--lengths: '%s' is no list of 128..%d tokens", s,
                             MODEL_MAX_CONTEXT);
        if (*n_out == EVAL_MAX_LENGTHS)
            return err_raise(e, E_RANGE, "--lengths: more than %d", EVAL_MAX_LENGTHS);
        /* Of the default what fits. */
        if (typed || v + TARGET_TRACE_LOOK <= context) out[(*n_out)++] = v;
        s += word + (s[word] == ',');
    }
    if (*n_out == 0) out[(*n_out)++] = context / 2;
    return 0;
}

static int parse_depths(const char *s, struct eval_find_options *o, struct err *e) {
    while (*s) {
        size_t word = strcspn(s, ",");
        double v;
        if (!number_real(s, word, &v) || !(v >= 0 && v <= 100))
            return err_raise(e, E_RANGE, "--depths: '%s' is no list of 0..100 (per cent)", s);
        if (o->n_depths == EVAL_MAX_DEPTHS)
            return err_raise(e, E_RANGE, "--depths: more than %d", EVAL_MAX_DEPTHS);
        o->depth[o->n_depths++] = v / 100;
        s += word + (s[word] == ',');
    }
    if (o->n_depths == 0) return err_raise(e, E_INVALID, "--depths: none");
    return 0;
}

static int parse_kinds(const char *s, struct eval_find_options *o, struct err *e) {
    while (*s) {
        size_t n = strcspn(s, ",");
        int found = -1;
        for (int k = 0; k < EVAL_N_NEEDLE_KINDS; k++) {
            const char *name = eval_needle_kind_name((enum eval_needle_kind)k);
            if (strlen(name) == n && !memcmp(name, s, n)) found = k;
        }
        for (int k = 0; found >= 0 && k < o->n_kinds; k++)
            if ((int)o->kind[k] == found) found = -1;
        if (found < 0)
            return err_raise(e, E_RANGE,
                             "--kinds: '%.*s' is not one of single, many, two-hop, "
                             "late, each once",
                             (int)(n > 32 ? 32 : n), s);
        o->kind[o->n_kinds++] = (enum eval_needle_kind)found;
        s += n + (s[n] == ',');
    }
    return o->n_kinds ? 0 : err_raise(e, E_INVALID, "--kinds: none");
}

static int parse_scorers(const char *s, struct eval_work *p, struct err *e) {
    int n_files = 0;
    while (s && *s) {
        size_t n = strcspn(s, ",");
        if (n == 0 || n >= sizeof p->scorer_paths[0] || n_files == EVAL_MAX_SCORERS)
            return err_raise(e, E_INVALID, "--scorer: '%s' is no list of up to %d files", s,
                             EVAL_MAX_SCORERS);
        memcpy(p->scorer_paths[n_files], s, n);
        p->scorer_path[n_files] = p->wishes.scorers[n_files] = p->scorer_paths[n_files];
        n_files++;
        s += n + (s[n] == ',');
    }
    p->wishes.n_scorers = p->bed_options.n_scorers = n_files;
    p->bed_options.scorers = p->scorer_path;
    return 0;
}

/* ---- Planning ---- */

static bool asks_late(const struct eval_find_options *o) {
    for (int k = 0; k < o->n_kinds; k++)
        if (o->kind[k] == EVAL_NEEDLE_LATE) return true;
    return false;
}

/* Tokens of the trace: what the longest prompt and all that follows need. */
static int plan_tokens(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    int context = p->bed->c.context, longest = 0, rc, most = 0;
    if (f->context > context)
        return err_raise(e, E_RANGE, "--ctx-size %d: the model's context is %d", f->context,
                         context);
    if (f->context) context = f->context;
    rc = parse_lengths(f->lengths ? f->lengths : "2048,4096,7680", context, f->lengths,
                       p->find.length, &p->find.n_lengths, e);
    if (rc) return rc;
    memcpy(p->read.length, p->find.length, sizeof p->read.length);
    p->read.n_lengths = p->find.n_lengths;
    for (int i = 0; i < p->find.n_lengths; i++)
        if (p->find.length[i] > longest) longest = p->find.length[i];
    bool late = p->find.n > 0 && asks_late(&p->find);
    int behind = f->n_answer + (late ? f->n_late + EVAL_QUESTION_TOKENS : 0);
    int room = context - longest;
    p->read.n_following = f->n_following < room ? f->n_following : room;
    if (p->find.n > 0 && behind > room)
        return err_raise(e, E_RANGE,
                         "a prompt of %d tokens and %d behind it%s: the context is %d tokens; ask "
                         "for shorter --lengths",
                         longest, behind, late ? " (late facts among them)" : "", context);
    if (f->exact && f->n_exact > room)
        return err_raise(e, E_RANGE,
                         "a prompt of %d tokens and an exact answer of %d: the context is %d "
                         "tokens; ask for shorter --lengths or --exact-tokens",
                         longest, f->n_exact, context);
    if (p->read.n > 0 && p->read.n_following < TARGET_TRACE_LOOK)
        return err_raise(e, E_RANGE,
                         "a prompt of %d tokens leaves %d of the context's %d; running text needs "
                         "%d behind it",
                         longest, room, context, TARGET_TRACE_LOOK);
    if (p->find.n > 0) most = longest + behind;
    if (p->read.n > 0 && longest + p->read.n_following > most) most = longest + p->read.n_following;
    if (f->tasks && most < context)
        most = f->context || context < MOST_CONTEXT ? context : MOST_CONTEXT;
    p->bed_options.max_tokens = most;
    p->bed_options.max_answer_tokens = behind > f->n_task_answer ? behind : f->n_task_answer;
    return 0;
}

static int plan_texts(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    int longest = 0, n_dropped = 0, behind = 0;
    if (p->find.n == 0 && p->read.n == 0) return 0;
    for (int i = 0; i < p->find.n_lengths; i++)
        if (p->find.length[i] > longest) longest = p->find.length[i];
    if (p->find.n > 0) behind = p->find.n_late;
    if (p->read.n > 0 && p->read.n_following > behind) behind = p->read.n_following;
    int rc = f->text ? eval_texts_files(&p->texts, f->text, p->bed->tokenizer, e)
                     : eval_texts_shipped(&p->texts, p->bed->tokenizer, e);
    if (!rc) rc = eval_texts_drop_short(&p->texts, longest + behind, &n_dropped, e);
    if (!rc && n_dropped)
        log_info("%d of %d texts are shorter than the %d tokens that are needed: left out",
                 n_dropped, n_dropped + p->texts.n, longest + behind);
    return rc;
}

static int plan_columns(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    struct eval_wishes *w = &p->wishes;
    w->selectors = f->selectors              ? f->selectors
                   : p->wishes.n_scorers > 0 ? "observed,recent,random,mean,scorer,oracle"
                                             : "observed,recent,random,mean,oracle";
    w->keep = f->keep;
    w->keep_blocks = f->keep_blocks || f->keep ? f->keep_blocks : "32";
    w->base = f->base;
    w->reserve = f->reserve;
    w->smooth = f->smooth;
    w->anew[EVAL_AGAIN] = f->again;
    w->anew[EVAL_EACH_STEP] = f->each_step;
    w->recheck = f->recheck;
    w->lists = f->lists;
    w->select2 = f->select2;
    w->quarters = f->quarters;
    w->sizes = f->sizes;
    w->drop = f->drop;
    w->deep = eval_bed_deep(p->bed);
    for (int i = 0; i < w->n_scorers; i++) {
        w->measures_quarters[i] = p->bed->scorer_file[i]->kind == KERN_SCORE_LATE;
        w->defaults[i] = (struct target_scorer_defaults){p->bed->scorer_file[i]->smoothing,
                                                         p->bed->scorer_file[i]->curve};
    }
    return eval_columns_make(&p->columns, w, e);
}

static int plan_all(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    bool only_tasks = f->tasks && f->n_needles < 0 && f->n_texts < 0;
    p->find.n = f->n_needles >= 0 ? f->n_needles : only_tasks ? 0 : DEFAULT_NEEDLES;
    p->read.n = f->n_texts >= 0 ? f->n_texts : only_tasks ? 0 : DEFAULT_TEXTS;
    p->find.n_answer = f->n_answer;
    p->find.seed = p->read.seed = p->task.seed = (uint64_t)f->seed;
    p->task.paths = f->tasks;
    p->task.n = f->n_task;
    p->task.n_answer = f->n_task_answer;
    p->bed_options.engine = f->engine;
    if (p->find.n == 0 && p->read.n == 0 && !f->tasks)
        return err_raise(e, E_INVALID, "nothing to do: --needles 0, --texts 0 and no --longbench");
    int rc = parse_depths(f->depths, &p->find, e);
    if (!rc) rc = parse_kinds(f->kinds, &p->find, e);
    p->find.n_late = asks_late(&p->find) ? f->n_late : 0;
    if (!rc) rc = parse_scorers(f->scorers, p, e);
    if (!rc) rc = eval_bed_read(&p->bed, &p->bed_options, e);
    if (!rc) rc = plan_tokens(f, p, e);
    if (!rc) rc = plan_columns(f, p, e);
    if (!rc) rc = plan_texts(f, p, e);
    if (rc) return rc;
    p->bed_options.max_answers = p->columns.n;
    p->bed_options.apart = eval_columns_are_apart(&p->columns);
    p->found = calloc((size_t)p->find.n * (size_t)p->find.n_lengths + 1, sizeof *p->found);
    p->loss = calloc((size_t)p->read.n * (size_t)p->read.n_lengths + 1, sizeof *p->loss);
    if (!p->found || !p->loss) return err_raise(e, E_NOMEM, "no memory for so many prompts");
    return 0;
}

/* ---- Output ---- */

static int write_file(const char *path, const struct strbuf *b, struct err *e) {
    if (b->failed) return err_raise(e, E_NOMEM, "no memory for %s", path);
    FILE *f = fopen(path, "w");
    if (!f) return err_raise(e, E_IO, "%s: %s", path, strerror(errno));
    bool ok = fwrite(b->data, 1, b->n, f) == b->n;
    ok = fclose(f) == 0 && ok;
    return ok ? 0 : err_raise(e, E_IO, "%s: cannot be written", path);
}

static int write_results(const struct eval_flags *f, const struct eval_work *p, struct err *e) {
    struct strbuf b = {0};
    int rc = 0;
    bool json_only = f->json && !strcmp(f->json, "-");
    if (json_only) eval_report_json(&b, &p->results);
    else eval_report_text(&b, &p->results);
    if (b.n) fwrite(b.data, 1, b.n, stdout);
    if (f->json && !json_only) {
        strbuf_clear(&b);
        eval_report_json(&b, &p->results);
        rc = write_file(f->json, &b, e);
    }
    if (!rc && f->svg && p->results.n_found > 0) {
        strbuf_clear(&b);
        eval_report_svg(&b, &p->results);
        rc = write_file(f->svg, &b, e);
    }
    strbuf_deinit(&b);
    return rc;
}

static int check_outputs(const struct eval_flags *f, struct err *e) {
    const char *const path[] = {f->json && strcmp(f->json, "-") ? f->json : NULL, f->svg,
                                f->answers};
    int rc = 0;
    for (size_t i = 0; i < sizeof path / sizeof path[0] && !rc; i++)
        if (path[i]) rc = file_check_writable(path[i], e);
    return rc;
}

/* ---- Running ---- */

/* By how much the first column beside dense keeps. */
static int measure_exact(const struct eval_flags *f, struct eval_work *p,
                         const struct eval_clock *clock, struct err *e) {
    struct eval_exact_options o = {.engine = f->engine, .exact = f->exact, .n_answer = f->n_exact};
    target_settings_unset(&o.keep);
    if (p->columns.n > 1) {
        const struct target_settings *s = &p->columns.at[1].settings;
        o.keep.keep_blocks = s->keep_blocks;
        if (s->keep_blocks == 0) {
            o.keep.keep_blocks = TARGET_UNSET;
            o.keep.keep = s->keep;
            o.keep.curve = s->curve;
        }
        o.keep.min_blocks = s->min_blocks;
        o.keep.window_blocks = s->window_blocks;
        o.keep.reserve = s->reserve;
    }
    int rc = eval_exact_run(p->bed, &p->texts, &p->find, &o, clock, &p->exact, e);
    p->results.exact = &p->exact;
    return rc;
}

static int measure(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    struct eval_results *r = &p->results;
    long long start = clock_ns(), budget = (long long)(f->budget * 60e9);
    /* Needles may take three fifths where something comes behind them. */
    struct eval_clock whole = {start, budget};
    struct eval_clock first = {start,
                               p->read.n > 0 || f->tasks || f->exact ? budget * 3 / 5 : budget};
    int rc = 0;
    FILE *answers = NULL;
    if (f->answers && !(answers = fopen(f->answers, "w")))
        return err_raise(e, E_IO, "%s: %s", f->answers, strerror(errno));
    if (answers) setvbuf(answers, NULL, _IOLBF, 0); /* to be looked at on the way */
    p->find.answers = p->task.answers = answers;
    if (p->find.n > 0)
        rc = eval_find(p->bed, &p->columns, &p->texts, &p->find, &first, p->found, &r->n_found, e);
    if (!rc && p->read.n > 0)
        rc = eval_read(p->bed, &p->columns, &p->texts, &p->read, &whole, p->loss, &r->n_loss,
                       p->attention, e);
    if (!rc && f->tasks)
        rc = eval_tasks(p->bed, &p->columns, &p->task, &whole, &p->tasks, &r->n_task, e);
    if (!rc && f->exact) rc = measure_exact(f, p, &whole, e);
    if (answers && fclose(answers) != 0 && !rc)
        rc = err_raise(e, E_IO, "%s: cannot be written", f->answers);
    r->found = p->found;
    r->loss = p->loss;
    r->task = p->tasks;
    r->attention = p->attention;
    r->minutes = (double)(clock_ns() - start) / 60e9;
    r->is_cut = r->n_found < p->find.n * p->find.n_lengths ||
                r->n_loss < p->read.n * p->read.n_lengths || p->exact.is_cut ||
                eval_clock_is_up(&whole);
    return rc;
}

static void say_start(const struct eval_work *p) {
    const struct eval_bed *b = p->bed;
    log_info("model %s: %s, %d layers, context %d; deep layers from %d on", b->c.name, b->c.arch,
             b->c.n_layers, b->c.context, b->select_layer);
    log_info("device %s; %d ways of reading; a text takes %zu MiB", b->device, p->columns.n,
             target_trace_bytes(b->trace) >> 20);
    if (!b->speech.chat) log_warn("no chat template: prompts are plain text");
}

static int run(const struct eval_flags *f, struct eval_work *p, struct err *e) {
    struct eval_results *r = &p->results;
    /* A wrong word must not cost an evaluation. */
    int rc = f->calibrate ? eval_calibrated_selector(f, e) : 0;
    if (rc >= 0) rc = check_outputs(f, e);
    if (!rc) rc = plan_all(f, p, e);
    if (!rc && f->calibrate) rc = eval_check_calibration(f, p, e);
    if (!rc && f->tasks) rc = eval_tasks_check(f->tasks, f->n_task, e);
    if (!rc) rc = eval_bed_open(p->bed, &p->bed_options, e);
    if (rc) return rc;
    say_start(p);
    *r = (struct eval_results){.bed = p->bed,
                               .model = p->bed->c.name,
                               .columns = &p->columns,
                               .texts = &p->texts,
                               .seed = (uint64_t)f->seed,
                               .find = &p->find,
                               .read = &p->read};
    rc = measure(f, p, e);
    if (!rc && f->calibrate) rc = eval_calibrate(f, p, e);
    if (!rc) rc = write_results(f, p, e);
    return rc;
}

static void work_close(struct eval_work *p) {
    eval_texts_close(&p->texts);
    eval_bed_close(p->bed);
    free(p->found);
    free(p->loss);
    free(p->tasks);
}

static int finish_flags(struct eval_flags *f, const struct options *o) {
    if (!f->engine.model_path) return options_error(o, "--model is needed");
    if (!strcmp(f->precision, "f32") || !strcmp(f->precision, "reference"))
        f->engine.precision = KERN_REFERENCE;
    else if (strcmp(f->precision, "fast") != 0)
        return options_error(o, "--cpu-precision: '%s' is neither fast nor f32", f->precision);
    const char *kv = f->engine.kv_type;
    if (kv && strcmp(kv, "f16") && strcmp(kv, "bf16") && strcmp(kv, "q8_0"))
        return options_error(o, "--kv-type: '%s' is not one of f16, bf16, q8_0", kv);
    if (f->into && !f->calibrate) return options_error(o, "--calibrate-into needs --calibrate");
    if (f->svg && f->n_needles == 0)
        return options_error(o, "--svg is a map of needles; --needles is 0");
    if (f->exact && f->n_needles == 0)
        return options_error(o, "--exact answers the needles' prompts; --needles is 0");
    if (f->quiet) log_set_level(LOG_ERROR);
    return -1;
}

static const char about[] =
    "Measure what sparse reading costs: each prompt is computed once and answered densely and by\n"
    "every selector and kept size, so that differences are differences of the same prompts.\n\n"
    "  needles   facts hidden in a long text and asked for: one fact; one of four; two that must\n"
    "            be put together; one needed late in a long answer\n"
    "  texts     loss of the tokens behind a prompt of running text, agreement with dense, and\n"
    "            where dense attention goes: recall, mass, overlap of layers, is it sparse at all\n"
    "  tasks     LongBench's files: JSON lines with context, input, answers\n"
    "  exact     do exact answers equal dense ones, and how many tokens does a dense pass emit?\n\n"
    "Without --text, five kinds of text that the program carries.";

static const char after[] =
    "Selectors: observed (attention of the prompt's end), recent, random, mean, minmax, bound "
    "(states\n"
    "of blocks), scorer (a file of `tandem distill`), oracle (attention of what follows, from a "
    "dense pass).\n"
    "A prompt of fewer blocks than are kept is read densely, and the table says how often.\n\n"
    "  tandem eval -m model.gguf --lengths 7800 --needles 1000 --texts 0 --keep-blocks 32,12\n"
    "  tandem eval -m model.gguf --scorer late.safetensors --json out.json --svg map.svg\n"
    "  tandem eval -m model.gguf --scorer late.safetensors --selectors scorer \\\n"
    "      --keep-blocks 64,48,32,24,16 --calibrate scorer --calibrate-into late.safetensors\n"
    "  tandem eval -m model.gguf --longbench qasper.jsonl,hotpotqa.jsonl";

/* clang-format off */
#define EVAL_FLAGS(f)                                                                              \
    {OPTION_GROUP, "Model", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                                \
    {OPTION_STRING, "model", "target", 'm', &(f)->engine.model_path, "PATH", 0, 0,                 \
     "GGUF file or Hugging Face folder", NULL},                                                    \
    {OPTION_STRING, "chat-template", NULL, 0, &(f)->engine.chat_template, "NAME", 0, 0,            \
     "force a chat template (chatml, llama3, ...)", "the model's own"},                            \
    {OPTION_INT, "ctx-size", "max-model-len", 'c', &(f)->context, "N", 0, MODEL_MAX_CONTEXT,       \
     "most tokens of a text", "the model's"},                                                      \
    {OPTION_INT, "select-layer", NULL, 0, &(f)->engine.select_layer, "N", 0, 1024,                 \
     "first of the deep layers", "the scorer's, else 3/16 of all"},                                \
    {OPTION_GROUP, "What is measured", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                     \
    {OPTION_INT, "needles", NULL, 0, &(f)->n_needles, "N", 0, 100000,                              \
     "prompts with a fact, of each length; 0: none", "40"},                                        \
    {OPTION_INT, "texts", "windows", 0, &(f)->n_texts, "N", 0, 10000,                              \
     "running texts, of each length; 0: none", "8"},                                               \
    {OPTION_STRING, "longbench", "tasks", 0, &(f)->tasks, "FILES", 0, 0,                           \
     "files of JSON lines, commas between (alone unless --needles or --texts are given)", NULL},   \
    {OPTION_STRING, "lengths", NULL, 0, &(f)->lengths, "LIST", 0, 0, "tokens of a prompt",         \
     "2048,4096,7680 as far as they fit"},                                                         \
    {OPTION_STRING, "depths", NULL, 0, &(f)->depths, "LIST", 0, 0,                                 \
     "where facts lie, per cent of the text", "10,30,50,70,90"},                                   \
    {OPTION_STRING, "kinds", NULL, 0, &(f)->kinds, "LIST", 0, 0, "kinds of needles",               \
     "single,many,two-hop,late"},                                                                  \
    {OPTION_STRING, "text", NULL, 0, &(f)->text, "FILES", 0, 0,                                    \
     "text files, commas between, instead of the ones inside", NULL},                              \
    {OPTION_INT, "answer-tokens", NULL, 0, &(f)->n_answer, "N", 4, 256,                  \
     "most of a needle's answer",  \
     "24"},                                                                                        \
    {OPTION_INT, "late-tokens", NULL, 0, &(f)->n_late, "N", 16, EVAL_FOLLOWING,                    \
     "of an answer before a late fact comes up", "192"},                                          \
    {OPTION_INT, "following", NULL, 0, &(f)->n_following, "N", TARGET_TRACE_LOOK, EVAL_FOLLOWING,  \
     "tokens of running text whose loss is taken", "512"},                                         \
    {OPTION_INT, "task-tokens", NULL, 0, &(f)->n_task_answer, "N", 1, EVAL_FOLLOWING,              \
     "most of a task's answer", "64"},                                                             \
    {OPTION_INT, "task-limit", NULL, 0, &(f)->n_task, "N", 0, EVAL_MAX_TASKS,                      \
     "tasks of each file; 0: all", "0"},                                                           \
    {OPTION_GROUP, "Ways of reading", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                      \
    {OPTION_STRING, "selectors", "sparse", 0, &(f)->selectors, "LIST", 0, 0,                       \
     "beside dense: observed, recent, random, mean, minmax, bound, scorer, oracle",                \
     "all that can be but minmax and bound"},                                                      \
    {OPTION_STRING, "scorer", NULL, 0, &(f)->scorers, "FILES", 0, 0,                               \
     "scorer files, commas between", NULL},                                                        \
    {OPTION_STRING, "keep-blocks", NULL, 0, &(f)->keep_blocks, "LIST", 0, 0,                       \
     "blocks of 64 tokens that are kept, as 32,16,12", "32"},                                      \
    {OPTION_STRING, "keep", NULL, 0, &(f)->keep, "LIST", 0, 0,                                     \
     "shares of the blocks, as .25,.1, or curve (at least --min-blocks stay)", NULL},              \
    {OPTION_INT, "min-blocks", NULL, 0, &(f)->base.min_blocks, "N", 1, TARGET_MOST_BLOCKS,         \
     "never fewer", "32, or --keep-blocks if less"},                                               \
    {OPTION_INT, "window-blocks", NULL, 0, &(f)->base.window_blocks, "N", 1, TARGET_MOST_BLOCKS,   \
     "newest blocks that always stay (the first one does, too)", "3"},                             \
    {OPTION_STRING, "reserve", NULL, 0, &(f)->reserve, "LIST", 0, 0,                               \
     "share of the blocks that stay by chance, on top; several: a column each", "0.01"},           \
    {OPTION_STRING, "smooth", NULL, 0, &(f)->smooth, "LIST", 0, 0,                                 \
     "share of its neighbours' mean score that a block gets", "0, or the scorer file's"},          \
    {OPTION_FLAG, "again", NULL, 0, &(f)->again, NULL, 0, 0,                                       \
     "those by attention and states once more, selecting anew at a late fact", NULL},              \
    {OPTION_FLAG, "each-step", NULL, 0, &(f)->each_step, NULL, 0, 0,                               \
     "and once more, selecting anew before every token of a needle's answer (slow)", NULL},        \
    {OPTION_FLAG, "recheck", NULL, 0, &(f)->recheck, NULL, 0, 0,                                   \
     "and once more, re-checked at the border by attention in the select layer", NULL},            \
    {OPTION_STRING, "drop", NULL, 0, &(f)->drop, "LIST", 0, 0,                                     \
     "as --again, each less such a share of the list until then, what was used least", NULL},      \
    {OPTION_STRING, "lists", NULL, 0, &(f)->lists, "LIST", 0, 0,                                   \
     "and observed once more each by lists of its own per: layer, head", NULL},                    \
    {OPTION_STRING, "select2", NULL, 0, &(f)->select2, "LIST", 0, 0,                               \
     "and observed once more each with a second list for layers from that one on", NULL},          \
    {OPTION_STRING, "quarters", NULL, 0, &(f)->quarters, "LIST", 0, 0,                             \
     "observed, mean, late scorers once more each, reading so many quarters of a block", NULL},    \
    {OPTION_STRING, "sizes", NULL, 0, &(f)->sizes, "LIST", 0, 0,                                   \
     "and the same each selecting blocks of 16, 32 or 128 tokens, as many tokens", NULL},          \
    {OPTION_INT, "exact", NULL, 0, &(f)->exact, "N", 0, TARGET_MOST_EXACT,                         \
     "needles' prompts also by exact answers of up to N tokens at once, beside dense", "0: not"},  \
    {OPTION_INT, "exact-tokens", NULL, 0, &(f)->n_exact, "N", 1, 4096, "of such an answer", "64"}, \
    {OPTION_GROUP, "Calibration", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                          \
    {OPTION_STRING, "calibrate", NULL, 0, &(f)->calibrate, "SELECTOR", 0, 0,                       \
     "fit its curve: the smallest kept size of each length that stays within", NULL},              \
    {OPTION_DOUBLE, "within", NULL, 0, &(f)->limits.points, "POINTS", 0, 100,                      \
     "of needles, of a hundred", "2"},                                                             \
    {OPTION_DOUBLE, "within-loss", NULL, 0, &(f)->limits.loss, "NATS", 0, 10,                      \
     "a token of running text", "0.03"},                                                           \
    {OPTION_STRING, "calibrate-into", NULL, 0, &(f)->into, "FILE", 0, 0,                           \
     "scorer file that gets the curve", NULL},                                                     \
    {OPTION_GROUP, "Machine", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                              \
    {OPTION_STRING, "device", NULL, 0, &(f)->engine.device, "NAME", 0, 0,                          \
     "cpu, cuda, cuda:N, or auto: a GPU where there is one", "auto"},                              \
    {OPTION_INT, "threads", NULL, 't', &(f)->engine.n_threads, "N", 0, 256, "threads of a pass",   \
     "all cores that the process may use"},                                                        \
    {OPTION_STRING, "cpu-precision", NULL, 0, &(f)->precision, "P", 0, 0,                          \
     "fast, or f32: the slow reference path", "fast"},                                             \
    {OPTION_STRING, "cpu-isa", NULL, 0, &(f)->engine.isa, "NAME", 0, 0,                            \
     "amx, avx512, avxvnni, avx2 or plain", "the best that runs here"},                            \
    KV_TYPE_FLAG(&(f)->engine.kv_type),                                                            \
    {OPTION_DOUBLE, "budget", NULL, 0, &(f)->budget, "MINUTES", 0, 100000,                         \
     "stop asking then; what was asked stays balanced. 0: no limit", "0"},                         \
    {OPTION_INT, "seed", NULL, 0, &(f)->seed, "N", 0, 2147483647,                             \
     "of all chance; one seed, one result",                                                        \
     "1"},                                                                                         \
    {OPTION_GROUP, "Output", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                               \
    {OPTION_STRING, "json", NULL, 0, &(f)->json, "FILE", 0, 0,                                     \
     "all figures; -: on stdout instead of the tables", NULL},                                     \
    {OPTION_STRING, "svg", NULL, 0, &(f)->svg, "FILE", 0, 0,                                       \
     "heat maps of needles, length by depth", NULL},                                               \
    {OPTION_STRING, "answers", NULL, 0, &(f)->answers, "FILE", 0, 0,                               \
     "a JSON line a prompt with every answer", NULL},                                              \
    {OPTION_FLAG, "quiet", NULL, 'q', &(f)->quiet, NULL, 0, 0, "errors alone on stderr", NULL}
/* clang-format on */

int cmd_eval(int argc, char **argv) {
    struct eval_flags f = {.precision = "fast",
                           .depths = "10,30,50,70,90",
                           .kinds = "single,many,two-hop,late",
                           .n_needles = -1,
                           .n_texts = -1,
                           .n_answer = 24,
                           .n_late = 192,
                           .n_following = EVAL_FOLLOWING,
                           .n_task_answer = 64,
                           .n_exact = 64,
                           .seed = 1,
                           .limits = {2, .03}};
    engine_options_default(&f.engine);
    f.engine.device = "auto";
    target_settings_unset(&f.base);
    const struct option table[] = {EVAL_FLAGS(&f), {0}};
    struct options o = {.command = "eval",
                        .usage = "tandem eval -m MODEL [options]",
                        .about = about,
                        .table = table,
                        .after = after};
    int rc = options_parse(&o, argc, argv);
    if (rc < 0) rc = finish_flags(&f, &o);
    if (rc >= 0) return rc;
    struct eval_work *p = calloc(1, sizeof *p);
    struct err e = {0};
    rc = p ? run(&f, p, &e) : err_raise(&e, E_NOMEM, "no memory for an evaluation");
    if (p) work_close(p);
    free(p);
    return rc ? cmd_fail(&e) : 0;
}
