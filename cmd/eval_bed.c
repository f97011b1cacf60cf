#include "cmd/eval_bed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "model/source.h"

/* ---- What the model is ---- */

/* The template that was asked for or that the model brings; without one prompts are plain text. */
static int open_speech(struct eval_bed *b, const struct engine_options *o, struct err *e) {
    size_t n;
    struct err why = {0};
    const char *text = model_source_chat_template(b->src, &n);
    b->speech = (struct eval_speech){.tokenizer = b->tokenizer};
    if (o->chat_template) return chat_family_find(&b->speech.chat, o->chat_template, e);
    if (!text || chat_family_detect(&b->speech.chat, text, n, &why) != 0) b->speech.chat = NULL;
    return 0;
}

static int read_scorers(struct eval_bed *b, const struct eval_bed_options *o, struct err *e) {
    int layer = o->engine.select_layer;
    const char *by = "asked for";
    for (int i = 0; i < o->n_scorers; i++) {
        struct target_scorer_file **f = &b->scorer_file[i];
        int rc = target_scorer_read(f, o->scorers[i], e);
        if (!rc) b->n_scorers++;
        if (!rc) rc = target_scorer_check(*f, &b->c, b->fingerprint, e);
        if (rc) return err_prefix(e, rc, "%s", o->scorers[i]);
        if (layer >= 0 && (*f)->layer != layer)
            return err_raise(e, E_INVALID, "%s is a scorer of layer %d, %s is layer %d",
                             o->scorers[i], (*f)->layer, by, layer);
        layer = (*f)->layer;
        by = o->scorers[i];
    }
    b->select_layer = layer >= 0 ? layer : (3 * b->c.n_layers + 8) / 16;
    return 0;
}

int eval_bed_read(struct eval_bed **out, const struct eval_bed_options *o, struct err *e) {
    struct eval_bed *b = calloc(1, sizeof *b);
    if (!b) return err_raise(e, E_NOMEM, "no memory for an evaluation");
    int rc = model_source_open(&b->src, o->engine.model_path, e);
    if (!rc) {
        b->c = *model_source_config(b->src);
        b->fingerprint = model_source_fingerprint(b->src);
        if (b->c.n_head != b->c.vocab)
            rc = err_raise(e, E_UNSUPPORTED, "%s has a head of %d of %d tokens: it is a draft",
                           o->engine.model_path, b->c.n_head, b->c.vocab);
    }
    if (!rc) rc = model_open_tokenizer(&b->tokenizer, b->src, e);
    if (!rc) rc = open_speech(b, &o->engine, e);
    if (!rc) rc = read_scorers(b, o, e);
    if (rc) eval_bed_close(b);
    else *out = b;
    return rc;
}

/* ---- The device ---- */

static void show_progress(void *arg, size_t done, size_t total) {
    struct log_progress *p = arg;
    if (!p->what) log_progress_start(p, "packing weights", (long long)total);
    log_progress_at(p, (long long)done);
}

static int open_trace(struct eval_bed *b, const struct eval_bed_options *o, bool is_host,
                      struct err *e) {
    struct log_progress bar = {0};
    struct target_trace_options to = {.max_tokens = o->max_tokens,
                                      /* A GPU likes few large passes. */
                                      .max_rows = is_host ? 0 : KERN_MAX_ROWS,
                                      .select_layer = b->select_layer,
                                      .n_taps = 1,
                                      .tap_layer = {b->select_layer},
                                      .has_minmax = true,
                                      .has_spread = true,
                                      .heads = true,
                                      .apart = o->apart,
                                      .max_answers = o->max_answers,
                                      .max_answer_tokens = o->max_answer_tokens};
    int rc = engine_kv_dtype(o->engine.kv_type, o->engine.precision, b->k, &to.kv_dtype, e);
    if (rc) return rc;
    for (int i = 0; i < b->n_scorers; i++) to.has_first |= b->scorer_file[i]->by_first;
    struct model_caps caps = target_trace_caps(&to);
    rc = model_open(&b->m, b->src, NULL, b->k, &caps, show_progress, &bar, e);
    if (bar.what) log_progress_end(&bar);
    return rc ? rc : target_trace_open(&b->trace, &to, b->m, b->k, e);
}

/* Lines of `numbers`. */
enum { OBSERVED, ORACLE, MEAN, MINMAX, BOUND, ATTENTION, FIRST_SCORER };
enum { QUARTER_LINES = TARGET_QUARTERS * (1 + EVAL_MAX_SCORERS) };

struct target_deep eval_bed_deep(const struct eval_bed *b) {
    return (struct target_deep){.first = b->select_layer,
                                .n_layers = b->c.n_layers - b->select_layer,
                                .n_heads = b->c.n_kv_heads};
}

static int open_memory(struct eval_bed *b, const struct eval_bed_options *o, struct err *e) {
    const struct target_deep deep = eval_bed_deep(b);
    /* Behind the numbers of blocks, those of quarters. */
    size_t lines = FIRST_SCORER + EVAL_MAX_SCORERS + (o->apart ? QUARTER_LINES : 0);
    b->n_blocks = target_n_blocks(o->max_tokens);
    b->numbers = calloc(lines * (size_t)b->n_blocks, sizeof *b->numbers);
    b->scratch = calloc((size_t)b->n_blocks, sizeof *b->scratch);
    b->used = calloc((size_t)b->n_blocks, sizeof *b->used);
    b->lists = calloc((EVAL_MAX_COLUMNS + 1) * (size_t)b->n_blocks, sizeof *b->lists);
    if (!b->numbers || !b->scratch || !b->used || !b->lists)
        return err_raise(e, E_NOMEM, "no memory for %d lists", EVAL_MAX_COLUMNS);
    return o->apart ? eval_apart_open(&b->apart, &deep, o->max_answers, b->n_blocks, e) : 0;
}

int eval_bed_open(struct eval_bed *b, const struct eval_bed_options *o, struct err *e) {
    struct kern_device_info info;
    b->max_tokens = o->max_tokens;
    int rc = open_memory(b, o, e);
    if (!rc) rc = engine_open_device(&b->k, &o->engine, e);
    if (rc) return rc;
    b->k->ops->info(b->k, &info);
    snprintf(b->device, sizeof b->device, "%s", info.name);
    rc = open_trace(b, o, info.is_host, e);
    for (int i = 0; i < b->n_scorers && !rc; i++)
        rc = target_scorer_load(&b->scorer[i], b->scorer_file[i], b->k, e);
    for (int id = 0; id < tokenizer_n_tokens(b->tokenizer) && b->n_stop < EVAL_MAX_STOP; id++)
        if (tokenizer_is_eog(b->tokenizer, id)) b->stop[b->n_stop++] = id;
    model_source_close(b->src);
    b->src = NULL;
    return rc;
}

void eval_bed_close(struct eval_bed *b) {
    if (!b) return;
    for (int i = 0; i < b->n_scorers; i++) {
        target_scorer_close(b->scorer[i]);
        target_scorer_free(b->scorer_file[i]);
    }
    target_trace_close(b->trace);
    if (b->m) model_close(b->m);
    if (b->k) b->k->ops->close(b->k);
    tokenizer_close(b->tokenizer);
    model_source_close(b->src);
    eval_apart_close(&b->apart);
    free(b->numbers);
    free(b->scratch);
    free(b->used);
    free(b->lists);
    free(b);
}

/* ---- One prompt ---- */

static float *numbers_of(const struct eval_bed *b, int line) {
    return b->numbers + (size_t)line * (size_t)b->n_blocks;
}

/* Scores of a selector that needs no file, into its line. */
static int score_plain(struct eval_bed *b, int selector, int line, const float **out,
                       struct err *e) {
    const struct kern_scorer plain = target_scorer_plain(selector, b->c.hidden);
    *out = numbers_of(b, line);
    return target_trace_score(b->trace, 0, &plain, numbers_of(b, line), e);
}

/* Numbers of the quarters: 0 the mean's, then each scorer's. */
static float *quarters_of(const struct eval_bed *b, int i) {
    return numbers_of(b, FIRST_SCORER + EVAL_MAX_SCORERS + TARGET_QUARTERS * i);
}

static int score_quarters(struct eval_bed *b, const struct eval_columns *columns, struct err *e) {
    bool mean = false, scorer[EVAL_MAX_SCORERS] = {0};
    int rc = 0;
    for (int i = 0; i < columns->n; i++) {
        const struct eval_column *c = &columns->at[i];
        if (!eval_column_is_apart(c)) continue;
        mean |= c->selector == EVAL_MEAN;
        if (c->selector == EVAL_SCORER) scorer[c->scorer] = true;
    }
    for (int i = 0; i <= b->n_scorers && !rc; i++) {
        if (i ? !scorer[i - 1] : !mean) continue;
        struct kern_scorer by = i ? *target_scorer_kern(b->scorer[i - 1])
                                  : target_scorer_plain(TARGET_MEAN, b->c.hidden);
        by.by_quarter = true;
        rc = target_trace_score(b->trace, 0, &by, quarters_of(b, i), e);
        if (i) b->scores.scorer_quarters[i - 1] = quarters_of(b, i);
        else b->scores.mean_quarters = quarters_of(b, i);
    }
    return rc;
}

/* Compute it, and look at its end where `observed` asks. */
static int run_prompt(struct eval_bed *b, const int32_t *ids, int n, bool observed, struct err *e) {
    const float *mass = NULL;
    float *to = numbers_of(b, OBSERVED);
    if (!observed || b->apart.n_blocks == 0) {
        int rc = target_trace_prompt(b->trace, ids, n, observed ? TARGET_ROWS : 0, &mass, e);
        if (!rc && mass) memcpy(to, mass, sizeof *mass * (size_t)target_n_blocks(n));
        return rc;
    }
    struct target_seen seen;
    int rc = target_trace_prompt_apart(b->trace, ids, n, TARGET_ROWS, &seen, e);
    if (!rc) eval_apart_see(&b->apart, &seen, target_n_blocks(n), to);
    return rc;
}

int eval_bed_prompt(struct eval_bed *b, const struct eval_columns *columns, const int32_t *ids,
                    int n, uint64_t seed, struct err *e) {
    bool wanted[EVAL_N_SELECTORS] = {0};
    for (int i = 0; i < columns->n; i++) wanted[columns->at[i].selector] = true;
    b->scores = (struct eval_scores){.n_tokens = n, .seed = seed};
    int rc = target_trace_rewind(b->trace, 0, e);
    if (!rc) rc = run_prompt(b, ids, n, wanted[EVAL_OBSERVED], e);
    if (!rc && wanted[EVAL_OBSERVED]) b->scores.observed = numbers_of(b, OBSERVED);
    if (!rc && wanted[EVAL_MEAN]) rc = score_plain(b, TARGET_MEAN, MEAN, &b->scores.mean, e);
    if (!rc && wanted[EVAL_MINMAX])
        rc = score_plain(b, TARGET_MINMAX, MINMAX, &b->scores.minmax, e);
    if (!rc && wanted[EVAL_BOUND]) rc = score_plain(b, TARGET_BOUND, BOUND, &b->scores.bound, e);
    for (int i = 0; !rc && wanted[EVAL_SCORER] && i < b->n_scorers; i++) {
        float *to = numbers_of(b, FIRST_SCORER + i);
        rc = target_trace_score(b->trace, 0, target_scorer_kern(b->scorer[i]), to, e);
        b->scores.scorer[i] = to;
    }
    return rc ? rc : score_quarters(b, columns, e);
}

int eval_bed_look(struct eval_bed *b, const int32_t *lead, int n_lead, const int32_t *ids, int n,
                  struct target_masses *masses, struct err *e) {
    struct target_masses m;
    int n_prompt = b->scores.n_tokens, n_blocks = target_n_blocks(n_prompt);
    float *to = numbers_of(b, ORACLE);
    int rc = target_trace_rewind(b->trace, n_prompt, e);
    if (!rc && n_lead > 0) rc = target_trace_force(b->trace, lead, n_lead, NULL, NULL, NULL, e);
    if (!rc) rc = target_trace_look(b->trace, ids, n, &m, e);
    if (rc) return rc;
    memset(to, 0, sizeof *to * (size_t)n_blocks);
    for (int i = 0; i < m.n_layers * m.n_heads; i++)
        for (int j = 0; j < n_blocks; j++) {
            float mass = m.mass[(size_t)i * (size_t)m.stride + (size_t)j];
            if (mass > to[j]) to[j] = mass;
        }
    b->scores.oracle = to;
    if (masses) *masses = m;
    return 0;
}

/* Attention in the select layer, where the column re-checks by it; `list`: room for its blocks. */
static int recheck(struct eval_bed *b, const struct eval_column *c, int32_t *list, struct err *e) {
    const float *mass;
    float *of = numbers_of(b, ATTENTION);
    b->scores.attention = NULL;
    int n = eval_column_recheck(c, &b->scores, b->scratch, list), rc = 0;
    if (n == 0) return 0;
    if (target_trace_n_tokens(b->trace) != b->scores.n_tokens)
        rc = target_trace_rewind(b->trace, b->scores.n_tokens, e);
    if (!rc) rc = target_trace_recheck(b->trace, 0, list, n, &mass, e);
    for (int i = 0; i < n && !rc; i++) of[list[i]] = mass[i];
    b->scores.attention = of;
    return rc;
}

int eval_bed_select(struct eval_bed *b, const struct eval_columns *columns, struct err *e) {
    int n_blocks = target_n_blocks(b->scores.n_tokens);
    for (int i = 0; i < columns->n; i++) {
        int32_t *to = b->lists + (size_t)i * (size_t)b->n_blocks;
        bool blind = columns->at[i].selector == EVAL_ORACLE && !b->scores.oracle;
        if (eval_column_is_apart(&columns->at[i])) {
            int n = eval_apart_select(&b->apart, i, &columns->at[i], &b->scores, &b->kept[i]);
            b->is_dense[i] = n == 0;
            b->n_kept[i] = n ? n : n_blocks;
            continue;
        }
        int rc = blind ? 0 : recheck(b, &columns->at[i], to, e);
        if (rc) return rc;
        int n = blind ? n_blocks : eval_column_select(&columns->at[i], &b->scores, b->scratch, to);
        b->kept[i] = (struct target_kept){.block = to, .n = n, .n_blocks = n_blocks};
        b->n_kept[i] = n;
        b->is_dense[i] = n == n_blocks;
    }
    return 0;
}

int eval_bed_again(struct eval_bed *b, const struct eval_column *c, struct target_kept *out,
                   struct err *e) {
    int plain = c->selector == EVAL_MINMAX  ? TARGET_MINMAX
                : c->selector == EVAL_BOUND ? TARGET_BOUND
                                            : TARGET_MEAN;
    const struct kern_scorer unweighed = target_scorer_plain(plain, b->c.hidden);
    struct eval_scores s = {.n_tokens = b->scores.n_tokens,
                            .seed = b->scores.seed,
                            .used = c->settings.drop > 0 ? b->used : NULL};
    int scorer = c->selector == EVAL_OBSERVED && b->n_scorers ? 0 : c->scorer;
    const struct kern_scorer *by = scorer >= 0 ? target_scorer_kern(b->scorer[scorer]) : &unweighed;
    int32_t *to = b->lists + EVAL_MAX_COLUMNS * (size_t)b->n_blocks;
    /* A line that nobody needs any more: the oracle's list was made already. */
    float *numbers = numbers_of(b, ORACLE);
    ASSERT(c->selector != EVAL_DENSE && c->selector != EVAL_ORACLE && c->selector != EVAL_RECENT &&
           c->selector != EVAL_RANDOM);
    int rc = target_trace_score(b->trace, 0, by, numbers, e);
    if (rc) return rc;
    s.mean = s.minmax = s.bound = s.observed = numbers;
    for (int i = 0; i < EVAL_MAX_SCORERS; i++) s.scorer[i] = numbers;
    *out = (struct target_kept){.block = to,
                                .n = eval_column_select(c, &s, b->scratch, to),
                                .n_blocks = target_n_blocks(s.n_tokens)};
    return 0;
}

const struct target_kept *eval_bed_kept(const struct eval_bed *b, int column) {
    return b->is_dense[column] ? NULL : &b->kept[column];
}
