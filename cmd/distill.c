/* `tandem distill`: a scorer of blocks for a target, from texts. The phases: texts to tokens,
 * windows through the target, a training for each candidate layer, recall on what was held out, the
 * best to a file. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/number.h"
#include "base/strbuf.h"
#include "base/threads.h"
#include "cmd/cmd.h"
#include "cmd/distill.h"
#include "cmd/distill_flags.h"
#include "cmd/distill_report.h"
#include "cmd/text.h"
#include "engine/engine.h"
#include "model/source.h"
#include "target/scorer.h"
#include "target/target.h"

/* Of a run that is limited by --budget, the share that tracing may take. */
#define TRACE_SHARE 0.6
/* A shallower layer is taken where it keeps at most so much less of the attention. */
#define WORTH_LESS 0.01

/* What it comes to. */
struct distill {
    const struct distill_flags *f;
    struct model_source *src;
    struct model_config c;
    uint64_t fingerprint;
    struct tokenizer *tokenizer;
    struct distill_texts texts;
    struct distill_trace_options how;
    int leave_out; /* domain that nothing is trained on, -1: none */
    struct target_train_options train;
    struct threads *threads;
    /* Windows of each candidate layer, [n_windows] once traced. */
    int n_windows, n_have[MODEL_MAX_TAPS];
    struct target_window *windows[MODEL_MAX_TAPS];
    const struct target_window **pointers; /* [n_windows] */
    uint64_t key;
    int64_t start_ns;
    char device[128];
    struct distill_times times;
    /* The best candidate so far. */
    struct target_scorer_file *best;
    struct distill_result results[MODEL_MAX_TAPS];
    int n_results, chosen;
};

static double seconds_since(int64_t ns) {
    return (double)(clock_ns() - ns) / 1e9;
}
static double budget_s(const struct distill *d) {
    return d->f->budget_minutes > 0 ? d->f->budget_minutes * 60 : INFINITY;
}

/* ---- Options to settings ---- */

/* "6,9,12", or "auto": five layers from an eighth of the depth to a half. */
static int parse_layers(struct distill *d, struct err *e) {
    struct target_samples_content *h = &d->how.content;
    int n = d->c.n_layers;
    if (!d->f->layer[0]) return err_raise(e, E_RANGE, "--layer '': 'auto', or numbers as 6,9,12");
    if (!strcmp(d->f->layer, "auto")) {
        for (int i = 0; i < 5; i++) {
            int layer = (int)lround(n / 8.0 + i * (n / 2.0 - n / 8.0) / 4);
            if (layer < 1) layer = 1;
            if (layer < n && (h->n_layers == 0 || layer > h->layer[h->n_layers - 1]))
                h->layer[h->n_layers++] = layer;
        }
    } else
        for (const char *p = d->f->layer; *p;) {
            size_t word = strcspn(p, ",");
            int layer;
            if (!number_in(p, word, -INT32_MAX, INT32_MAX, &layer) || h->n_layers == MODEL_MAX_TAPS)
                return err_raise(e, E_RANGE, "--layer %s: 'auto', or up to %d numbers as 6,9,12",
                                 d->f->layer, MODEL_MAX_TAPS);
            if (layer < 1 || layer >= n)
                return err_raise(e, E_RANGE,
                                 "--layer %d: the model has layers 0 to %d; 1 to %d "
                                 "can be the first of the deep ones",
                                 layer, n - 1, n - 1);
            if (h->n_layers && layer <= h->layer[h->n_layers - 1])
                return err_raise(e, E_RANGE, "--layer %s: numbers must ascend", d->f->layer);
            h->layer[h->n_layers++] = layer;
            p += word + (p[word] == ',');
        }
    return h->n_layers ? 0 : err_raise(e, E_RANGE, "a model of %d layers has none to select at", n);
}

static int parse_names(struct distill *d, struct err *e) {
    const struct distill_flags *f = d->f;
    struct target_train_shape *s = &d->train.shape;
    bool late = !strcmp(f->scorer, "late");
    if (!late && strcmp(f->scorer, "mlp") != 0)
        return err_raise(e, E_RANGE, "--scorer %s: late or mlp", f->scorer);
    s->kind = late ? KERN_SCORE_LATE : KERN_SCORE_MLP;
    d->how.by_first = !strcmp(f->representative, "first");
    if (!d->how.by_first && strcmp(f->representative, "mean") != 0)
        return err_raise(e, E_RANGE, "--representative %s: mean or first", f->representative);
    if (d->how.by_first && late)
        return err_raise(e, E_INVALID, "--representative first: late reads means of quarters");
    d->how.content.has_quarters = late;
    d->how.content.n_queries = d->train.n_queries = f->n_queries ? f->n_queries
                                                    : late       ? KERN_STATE_QUERIES
                                                                 : 1;
    s->loss = late ? TARGET_LOSS_KL : TARGET_LOSS_BCE_RANK;
    int rc = target_label_parse(&d->train.label, f->label, e);
    /* What one look tells of is told by all labels; another training may want another. */
    d->how.content.labels =
        1U << TARGET_LABEL_LAST | 1U << TARGET_LABEL_DEEP | 1U << TARGET_LABEL_STRONGEST;
    if (!rc) d->how.content.labels |= 1U << d->train.label;
    if (!rc && f->loss) rc = target_loss_parse(&s->loss, f->loss, e);
    if (!rc && late && s->loss != TARGET_LOSS_KL)
        rc = err_raise(e, E_INVALID, "--loss %s: late trains by kl", f->loss);
    return rc;
}

static void set_steps(struct distill *d, int n) {
    d->train.n_steps = n;
    d->train.n_warmup = n / 20 > 0 ? n / 20 : 1;
}

static int settle(struct distill *d, struct err *e) {
    const struct distill_flags *f = d->f;
    struct target_train_shape *s = &d->train.shape;
    int rc = parse_names(d, e);
    if (!rc) rc = parse_layers(d, e);
    if (rc) return rc;
    bool late = s->kind == KERN_SCORE_LATE;
    s->hidden = d->c.hidden;
    if (late) {
        s->n_heads = f->n_heads;
        s->head_dim = f->head_dim;
    } else {
        s->width = f->width ? f->width : d->c.hidden;
        s->has_layernorm = f->layernorm;
    }
    set_steps(d, f->n_steps ? f->n_steps : late ? 500 : 300);
    d->train.learning_rate = f->learning_rate > 0 ? f->learning_rate : late ? 2e-3 : 1e-3;
    d->train.batch = f->batch;
    d->train.weight_decay = f->weight_decay;
    d->train.keep = f->keep;
    d->train.aim = f->aim;
    d->train.seed = (uint64_t)f->seed;
    if (f->window > d->c.context)
        return err_raise(e, E_RANGE, "--window %d: the model's context is %d", f->window,
                         d->c.context);
    d->texts.tokenizer = d->tokenizer;
    d->texts.window = (f->window             ? f->window
                       : d->c.context < 8192 ? d->c.context
                                             : 8192) /
                      TARGET_BLOCK * TARGET_BLOCK;
    d->texts.n_places = f->n_places;
    d->texts.n_questions = f->n_questions;
    d->texts.inside = f->inside;
    d->texts.seed = (uint64_t)f->seed;
    d->leave_out = -1;
    if (d->texts.window < DISTILL_MIN_WINDOW)
        return err_raise(e, E_RANGE, "a context of %d tokens: windows have at least %d",
                         d->texts.window, DISTILL_MIN_WINDOW);
    return 0;
}

/* ---- Opening ---- */

static int open_model(struct distill *d, struct err *e) {
    size_t n;
    int rc = model_source_open(&d->src, d->f->engine.model_path, e);
    if (rc) return rc;
    d->c = *model_source_config(d->src);
    d->fingerprint = model_source_fingerprint(d->src);
    if (d->c.n_head != d->c.vocab)
        return err_raise(e, E_UNSUPPORTED, "%s has a head of %d of %d tokens: it is a draft",
                         d->f->engine.model_path, d->c.n_head, d->c.vocab);
    rc = model_open_tokenizer(&d->tokenizer, d->src, e);
    const char *text = model_source_chat_template(d->src, &n);
    struct err why = {0};
    if (!rc && d->f->engine.chat_template)
        rc = chat_family_find(&d->texts.chat, d->f->engine.chat_template, e);
    else if (!rc && (!text || chat_family_detect(&d->texts.chat, text, n, &why) != 0))
        d->texts.chat = NULL;
    return rc;
}

/* A list with commas, and words. */
static int read_texts(struct distill *d, struct err *e) {
    char path[4096];
    int rc = 0;
    for (const char *p = d->f->text ? d->f->text : ""; *p && !rc;) {
        size_t n = strcspn(p, ",");
        if (n == 0 || n >= sizeof path)
            return err_raise(e, E_INVALID, "--text %s: files with commas between", d->f->text);
        memcpy(path, p, n);
        path[n] = 0;
        rc = distill_texts_add(&d->texts, path, e);
        p += n + (p[n] == ',');
    }
    for (int i = 0; i < d->f->n_words && !rc; i++)
        rc = distill_texts_add(&d->texts, d->f->words[i], e);
    for (int i = 0; i < d->texts.n_domains && d->f->leave_out && !rc; i++)
        if (!strcmp(d->texts.domain[i].name, d->f->leave_out)) d->leave_out = i;
    if (!rc && d->f->leave_out && d->leave_out < 0)
        return err_raise(e, E_NOT_FOUND, "--leave-out %s: no text of that name (%s is the first)",
                         d->f->leave_out, d->texts.domain[0].name);
    if (!rc && d->leave_out >= 0 && d->texts.n_domains == 1)
        return err_raise(e, E_INVALID, "--leave-out %s: it is the only text", d->f->leave_out);
    if (!rc && d->f->n_windows < 4 * d->texts.n_domains)
        return err_raise(e, E_RANGE,
                         "--windows %d: %d texts need at least %d, half of them made "
                         "prompts and one of each held out",
                         d->f->n_windows, d->texts.n_domains, 4 * d->texts.n_domains);
    return rc;
}

/* Floats that a window's samples take at most. */
static double window_bytes(const struct distill *d) {
    double h = d->c.hidden, blocks = d->texts.window / TARGET_BLOCK;
    int places =
        d->texts.n_places > d->texts.n_questions ? d->texts.n_places : d->texts.n_questions;
    int lines = 2 + __builtin_popcount(d->how.content.labels);
    double of = blocks * h * (d->how.content.has_quarters ? 5 : 1) +
                places * (d->how.content.n_queries * h + lines * blocks);
    return 4 * of * d->how.content.n_layers;
}

static int check_memory(const struct distill *d, struct err *e) {
    double need = window_bytes(d) * d->f->n_windows;
    size_t most = d->f->memory;
    if (most == 0) most = (size_t)sysconf(_SC_PHYS_PAGES) / 2 * (size_t)sysconf(_SC_PAGESIZE);
    log_info("samples: %s of memory for %d windows of %d tokens (of %s)", cmd_bytes(need),
             d->f->n_windows, d->texts.window, cmd_bytes((double)most));
    if (need <= (double)most) return 0;
    return err_raise(e, E_FULL,
                     "%d windows need %s of memory, %s may be used: --windows %d fit, or give "
                     "fewer layers or --places, or more --memory",
                     d->f->n_windows, cmd_bytes(need), cmd_bytes((double)most),
                     (int)((double)most / window_bytes(d)));
}

/* ---- Windows ---- */

static int take(void *arg, int layer_idx, struct target_window *w, struct err *e) {
    struct distill *d = arg;
    if (layer_idx >= d->how.content.n_layers || d->n_have[layer_idx] == d->n_windows) {
        target_window_free(w); /* more than are asked for now */
        return 0;
    }
    (void)e;
    d->windows[layer_idx][d->n_have[layer_idx]++] = *w;
    return 0;
}

/* Of everything that decides samples, but what they are asked for. */
static uint64_t samples_key(const struct distill *d) {
    int64_t how[] = {(int64_t)d->fingerprint, d->how.by_first};
    return XXH3_64bits_withSeed(how, sizeof how, distill_texts_key(&d->texts));
}

static void show_packing(void *arg, size_t done, size_t total) {
    struct log_progress *p = arg;
    if (!p->what) log_progress_start(p, "packing weights", (long long)total);
    log_progress_at(p, (long long)done);
}

struct device {
    struct kern *k;
    struct model *m;
    struct target_trace *t;
};

static int open_device(struct device *v, struct distill *d, struct err *e) {
    struct kern_device_info info;
    struct log_progress bar = {0};
    int rc = engine_open_device(&v->k, &d->f->engine, e);
    if (rc) return rc;
    v->k->ops->info(v->k, &info);
    snprintf(d->device, sizeof d->device, "%s", info.name);
    struct target_trace_options to = {
        .max_tokens = d->texts.window + TARGET_TRACE_LOOK < d->c.context
                          ? d->texts.window + TARGET_TRACE_LOOK
                          : d->c.context,
        .max_rows = info.is_host ? 0 : KERN_MAX_ROWS,
        .select_layer = d->how.content.layer[0],
        .n_taps = d->how.content.n_layers,
        .has_first = d->how.by_first,
        .heads = true,
        .kv_dtype = d->f->engine.precision == KERN_REFERENCE ? KERN_F32 : KERN_F16};
    for (int i = 0; i < to.n_taps; i++) to.tap_layer[i] = d->how.content.layer[i];
    struct model_caps caps = target_trace_caps(&to);
    rc = model_open(&v->m, d->src, NULL, v->k, &caps, show_packing, &bar, e);
    if (bar.what) log_progress_end(&bar);
    if (!rc) rc = target_trace_open(&v->t, &to, v->m, v->k, e);
    if (!rc)
        log_info("tracing on %s: %s of weights, %s for a text", d->device,
                 cmd_bytes((double)model_reserved_bytes(v->m)),
                 cmd_bytes((double)target_trace_bytes(v->t)));
    return rc;
}

static void close_device(struct device *v) {
    target_trace_close(v->t);
    if (v->m) model_close(v->m);
    if (v->k) v->k->ops->close(v->k);
}

/* Windows from number `first` on, until all are there or the budget says so. */
static int trace_from(struct distill *d, int first, struct target_samples *s, struct err *e) {
    struct device v = {0};
    struct log_progress bar;
    int64_t began = clock_ns();
    int rc = open_device(&v, d, e), i = first, least = 4 * d->texts.n_domains;
    d->times.open_s = seconds_since(began);
    log_progress_start(&bar, "tracing windows", d->n_windows);
    for (; i < d->n_windows && !rc; i++) {
        struct distill_window w;
        struct target_window out[MODEL_MAX_TAPS];
        if (i >= least && seconds_since(d->start_ns) > budget_s(d) * TRACE_SHARE) break;
        int64_t t0 = clock_ns();
        rc = distill_window_make(&w, &d->texts, i, e);
        d->times.make_s += seconds_since(t0);
        t0 = clock_ns();
        if (rc) break;
        rc = distill_trace_window(v.t, &d->how, &w, d->c.hidden, out, e);
        d->times.trace_s += seconds_since(t0);
        d->times.n_tokens += (double)w.ids.n;
        distill_window_deinit(&w);
        for (int l = 0; l < d->how.content.n_layers && !rc; l++) {
            rc = target_samples_append(s, l, &out[l], e);
            d->windows[l][d->n_have[l]++] = out[l];
        }
        log_progress_at(&bar, i + 1);
    }
    log_progress_end(&bar);
    if (!rc && i < d->n_windows)
        log_info("the budget ends tracing at %d of %d windows (--windows %d repeats it)", i,
                 d->n_windows, i);
    d->n_windows = i;
    close_device(&v);
    return rc;
}

static int trace_all(struct distill *d, struct err *e) {
    struct target_samples *s;
    int n_records, rc = 0;
    d->n_windows = d->f->n_windows;
    d->pointers = calloc((size_t)d->n_windows, sizeof *d->pointers);
    if (!d->pointers) return err_raise(e, E_NOMEM, "no memory for %d windows", d->n_windows);
    for (int l = 0; l < d->how.content.n_layers; l++) {
        d->windows[l] = calloc((size_t)d->n_windows, sizeof *d->windows[l]);
        if (!d->windows[l]) return err_raise(e, E_NOMEM, "no memory for %d windows", d->n_windows);
    }
    d->key = samples_key(d);
    rc = target_samples_open(&s, d->f->checkpoint, d->key, d->c.hidden, &d->how.content, take, d,
                             &n_records, e);
    if (rc) return rc;
    int whole = d->n_have[0];
    if (whole > 0) log_info("%d windows from %s", whole, d->f->checkpoint);
    if (!rc && whole < d->n_windows) rc = trace_from(d, whole, s, e);
    target_samples_close(s);
    /* A made prompt is left out with its filler. */
    for (int l = 0; l < d->how.content.n_layers && d->leave_out >= 0; l++)
        for (int i = 0; i < d->n_have[l]; i++)
            if (d->windows[l][i].source == d->leave_out) d->windows[l][i].is_held_out = true;
    return rc;
}

/* ---- Training ---- */

/* As many steps as the budget has time for, by the time of a few. */
static int fit_steps(struct distill *d, int n_layers_left, struct err *e) {
    struct target_train *t;
    double left = budget_s(d) - seconds_since(d->start_ns);
    if (!isfinite(left) || d->f->resume) return 0;
    int rc = target_train_open(&t, &d->train, d->pointers, d->n_windows, d->threads, e);
    if (rc) return rc;
    target_train_step(t, NULL);
    int64_t began = clock_ns();
    for (int i = 0; i < 3; i++) target_train_step(t, NULL);
    double step = seconds_since(began) / 3;
    target_train_close(t);
    int fit = (int)fmax(10, left * 0.95 / n_layers_left / step);
    if (fit >= d->train.n_steps) return 0;
    log_info("the budget has time for %d steps (--steps %d repeats it)", fit, fit);
    set_steps(d, fit);
    return 0;
}

/* Where a layer's training stands is kept beside the windows, every half minute, in a file of its
 * own for each way to train. */
static int run_training(struct distill *d, struct target_train *t, int layer, double *loss,
                        struct err *e) {
    struct strbuf path = {0};
    struct log_progress bar;
    char what[64];
    int rc = 0;
    int64_t saved = clock_ns();
    uint64_t key[] = {d->key, (uint64_t)layer, (uint64_t)d->leave_out};
    uint64_t of_all = XXH3_64bits(key, sizeof key);
    if (d->f->checkpoint)
        strbuf_printf(&path, "%s.layer%d.%08x", d->f->checkpoint, layer,
                      (unsigned)(target_train_key(t, of_all) >> 32));
    if (path.failed) rc = err_raise(e, E_NOMEM, "no memory for a path");
    if (!rc && d->f->resume && path.data && access(path.data, F_OK) == 0) {
        rc = target_train_restore(t, path.data, of_all, e);
        if (!rc) log_info("layer %d goes on from step %d", layer, target_train_steps_done(t));
    }
    snprintf(what, sizeof what, "training layer %d", layer);
    log_progress_start(&bar, what, d->train.n_steps);
    double mean = NAN; /* where all was done before */
    for (double now; !rc && target_train_step(t, &now);) {
        int n = target_train_steps_done(t);
        mean = isnan(mean) ? now : mean + (now - mean) / 20;
        log_progress_at(&bar, n);
        if (path.data && (seconds_since(saved) > 30 || n == d->train.n_steps)) {
            rc = target_train_save(t, path.data, of_all, e);
            saved = clock_ns();
        }
    }
    log_progress_end(&bar);
    *loss = mean;
    strbuf_deinit(&path);
    return rc;
}

static int fill_file(struct distill *d, const struct target_train *t, int layer,
                     struct target_scorer_file **out, struct err *e) {
    const struct target_train_shape *s = &d->train.shape;
    const struct distill_flags *f = d->f;
    struct target_scorer_file shape = {.kind = s->kind,
                                       .layer = layer,
                                       .hidden = s->hidden,
                                       .n_heads = s->n_heads,
                                       .head_dim = s->head_dim,
                                       .width = s->width,
                                       .n_queries = d->train.n_queries,
                                       .normed = true,
                                       .by_first = d->how.by_first,
                                       .has_layernorm = s->has_layernorm,
                                       .block = TARGET_BLOCK,
                                       .fingerprint = d->fingerprint};
    snprintf(
        shape.recipe, sizeof shape.recipe,
        "tandem distill: label %s, aim %g, loss %s, %d windows of %d tokens from %d texts, half "
        "of them made prompts, %d places or %d questions each; %d steps of %d windows, learning "
        "rate %g, weight decay %g, seed %d%s%s",
        target_label_name(d->train.label), d->train.aim, target_loss_name(s->loss), d->n_windows,
        d->texts.window, d->texts.n_domains, d->texts.n_places, d->texts.n_questions,
        d->train.n_steps, d->train.batch, d->train.learning_rate, d->train.weight_decay, f->seed,
        f->leave_out ? ", left out " : "", f->leave_out ? f->leave_out : "");
    int rc = target_scorer_make(out, &shape, e);
    if (rc) return rc;
    struct target_train_weights to = {.a = (*out)->a,
                                      .b = (*out)->b,
                                      .w1 = (*out)->w1,
                                      .b1 = (*out)->b1,
                                      .w2 = (*out)->w2,
                                      .b2 = (*out)->b2,
                                      .ln_weight = (*out)->ln_weight,
                                      .ln_bias = (*out)->ln_bias};
    target_train_weights(t, &to);
    return target_scorer_check(*out, &d->c, d->fingerprint, e);
}

/* Train at candidate i; keep its scorer where it is the best so far: the shallowest of those that
 * are nearly as good. */
static int train_layer(struct distill *d, int i, struct err *e) {
    struct distill_result *r = &d->results[i];
    struct target_train *t = NULL;
    struct target_scorer_file *file = NULL;
    int64_t began = clock_ns();
    for (int w = 0; w < d->n_windows; w++) d->pointers[w] = &d->windows[i][w];
    r->layer = d->how.content.layer[i];
    r->cost = (r->layer + d->f->keep * (d->c.n_layers - r->layer)) / d->c.n_layers;
    int rc = fit_steps(d, d->how.content.n_layers - i, e);
    if (!rc) rc = target_train_open(&t, &d->train, d->pointers, d->n_windows, d->threads, e);
    if (!rc) rc = run_training(d, t, r->layer, &r->loss, e);
    if (!rc)
        rc = distill_table_fill(&r->table, t, d->train.label, d->pointers, d->n_windows,
                                d->c.hidden, d->train.seed, e);
    if (!rc) rc = fill_file(d, t, r->layer, &file, e);
    d->times.train_s += seconds_since(began);
    if (!rc) {
        r->worth = distill_table_worth(&r->table);
        d->n_results = i + 1;
        if (i == 0 || r->worth > d->results[d->chosen].worth + WORTH_LESS) {
            target_scorer_free(d->best);
            d->best = file;
            file = NULL;
            d->chosen = i;
        }
    }
    target_scorer_free(file);
    target_train_close(t);
    return rc;
}

/* The result must not go where windows and trainings are kept: PATH and PATH.layerN. */
static int check_paths(const struct distill_flags *f, struct err *e) {
    static const char layer[] = ".layer";
    size_t n = f->checkpoint ? strlen(f->checkpoint) : 0;
    bool same =
        f->checkpoint &&
        (!strcmp(f->out, f->checkpoint) || file_is_same(f->out, f->checkpoint) ||
         (!strncmp(f->out, f->checkpoint, n) && !strncmp(f->out + n, layer, sizeof layer - 1)));
    if (same)
        return err_raise(e, E_INVALID, "--out %s would overwrite --checkpoint %s: give two files",
                         f->out, f->checkpoint);
    return file_check_writable(f->out, e); /* not found out behind hours of training */
}

static int run(struct distill *d, struct err *e) {
    int64_t began = clock_ns();
    int rc = check_paths(d->f, e);
    if (!rc) rc = open_model(d, e);
    if (!rc) rc = settle(d, e);
    if (!rc) rc = read_texts(d, e);
    if (!rc) rc = check_memory(d, e);
    if (!rc && d->f->checkpoint && !d->f->resume && access(d->f->checkpoint, F_OK) == 0)
        rc = err_raise(e, E_INVALID, "%s is there: give --resume to go on from it, or another file",
                       d->f->checkpoint);
    d->times.texts_s = seconds_since(began);
    if (!rc) rc = trace_all(d, e);
    if (!rc) rc = threads_open(&d->threads, d->f->engine.n_threads, e);
    for (int i = 0; i < d->how.content.n_layers && !rc; i++) rc = train_layer(d, i, e);
    if (!rc) rc = target_scorer_write(d->f->out, d->best, e);
    return rc;
}

static void close_all(struct distill *d) {
    for (int l = 0; l < d->how.content.n_layers; l++) {
        for (int w = 0; d->windows[l] && w < d->n_have[l]; w++)
            target_window_free(&d->windows[l][w]);
        free(d->windows[l]);
    }
    free(d->pointers);
    target_scorer_free(d->best);
    if (d->threads) threads_close(d->threads);
    distill_texts_close(&d->texts);
    tokenizer_close(d->tokenizer);
    model_source_close(d->src);
}

static void report(const struct distill *d) {
    struct distill_report r = {.texts = &d->texts,
                               .results = d->results,
                               .n_results = d->n_results,
                               .chosen = d->chosen,
                               .times = &d->times,
                               .out = d->f->out,
                               .recipe = d->best->recipe,
                               .keep = d->f->keep};
    struct strbuf out = {0};
    if (d->f->json) distill_report_json(&r, &out);
    else distill_report_text(&r, &out);
    fwrite(out.data, 1, out.n, stdout);
    strbuf_deinit(&out);
    log_info("%.1f s: texts %.1f, opening %.1f, making windows %.1f, tracing %.1f (%.0f tokens/s), "
             "training %.1f",
             seconds_since(d->start_ns), d->times.texts_s, d->times.open_s, d->times.make_s,
             d->times.trace_s, d->times.trace_s > 0 ? d->times.n_tokens / d->times.trace_s : 0,
             d->times.train_s);
}

int cmd_distill(int argc, char **argv) {
    static struct distill d;
    struct distill_flags f;
    struct err e = {0};
    int rc = distill_flags_read(&f, argc, argv);
    if (rc >= 0) return rc;
    if (f.quiet) log_set_level(LOG_ERROR);
    d = (struct distill){.f = &f, .start_ns = clock_ns()};
    rc = run(&d, &e);
    if (!rc) report(&d);
    close_all(&d);
    return rc ? cmd_fail(&e) : 0;
}
