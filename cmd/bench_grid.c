/* What speculation and sparse reading gain, alone and together. Prompts go through in groups of a
 * batch; each group is answered by the four cells in turn, over and over, the order rotating, so
 * that a machine whose speed drifts drifts for all alike. In the first turn every cell computes its
 * prompts whole, which is where time to first token is measured; then they come from the prefix
 * cache, with the draft's pages where it had seen them, so that turns cost decoding alone
 * (o->prefill: otherwise). Gains are ratios of time per token within a turn; medians are shown. */
#include "cmd/bench_grid.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "cmd/bell.h"
#include "cmd/bench_prompts.h"
#include "kernels/kernels.h"

enum { MOST_GAPS = 1 << 20, SEED = 7 };

/* Numbers of one answer. */
struct answer {
    double ttft_ms, decode_ms;
    int64_t first_ns, end_ns;
    int n_tokens, n_cached; /* of the answer; of the prompt */
};

/* One point while it is measured. Arrays of [n_prompts] unless they say otherwise. */
struct run {
    struct engine *g;
    const struct bench_grid_options *o;
    struct grid_point *out;
    int n_turns;   /* 1 + n_repeats */
    uint64_t salt; /* of the first prompt: none finds another's pages, or an earlier point's */
    struct tokens *prompt;
    const struct bench_question **question;
    int32_t *text[GRID_CELLS]; /* [n_prompts][n_tokens] of the first turn; those of cells without
                                  speculation are what others are compared with */
    int *n_text[GRID_CELLS];
    struct answer *answer[GRID_CELLS]; /* [n_turns][n_prompts] */
    double *gap[GRID_CELLS];           /* [MOST_GAPS at most] ms between commits */
    size_t n_gaps[GRID_CELLS], cap_gaps;
};

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

static void sort(double *v, size_t n) {
    qsort(v, n, sizeof *v, by_value);
}

static double at_share(const double *sorted, size_t n, double share) {
    return n ? sorted[min_size(n - 1, (size_t)(share * (double)n))] : 0;
}

/* Of a sorted array; between the two middle ones of an even number. */
static double median(const double *sorted, size_t n) {
    return n ? (sorted[(n - 1) / 2] + sorted[n / 2]) / 2 : 0;
}

static struct answer *answer_of(const struct run *r, int cell, int turn, int prompt) {
    return &r->answer[cell][turn * r->out->n_prompts + prompt];
}

/* ---- One group in one cell ---- */

struct client {
    struct engine_request *r;
    struct engine_progress p;
    int n_seen;
    int64_t seen_ns;
};

/* One cell of the first turn leaves its prompt to the turns that follow. */
static bool computes_anew(const struct bench_grid_options *o, int cell, int turn) {
    if (o->prefill == GRID_PREFILL_TURN) return true;
    return o->prefill == GRID_PREFILL_CELL && turn == 0 && cell != GRID_SPEC;
}

/* Does a turn count for more than its first token? The first one warms up. */
static bool counts(const struct run *r, int turn) {
    return turn > 0 || r->o->prefill == GRID_PREFILL_TURN;
}

static int submit(struct run *r, int cell, int turn, int prompt, struct bell *bell,
                  struct client *c, struct err *e) {
    struct target_settings dense;
    target_settings_unset(&dense);
    dense.selector = TARGET_OFF;
    const struct tokens *ids = &r->prompt[prompt];
    struct engine_submit_options so = {
        .prompt = ids->ids,
        .n_prompt = (int)ids->n,
        .salt = r->salt + (uint64_t)prompt,
        .sparse = grid_reads_sparsely(cell) ? &r->o->sparse : &dense,
        .no_prefix_cache = computes_anew(r->o, cell, turn),
        .notify = bell_ring,
        .notify_arg = bell,
    };
    verify_params_default(&so.params);
    so.params.temperature = r->o->temperature;
    so.params.coupling = VERIFY_GUMBEL; /* so that sampled answers can be compared too */
    so.params.has_seed = true;
    so.params.seed = (uint64_t)(SEED + prompt);
    so.params.max_tokens = r->o->n_tokens;
    so.params.ignore_eos = engine_is_dummy(r->g);
    if (!grid_speculates(cell)) so.params.draft_tokens = 0;
    return engine_submit(r->g, &so, &c->r, e);
}

static void note_gap(struct run *r, int cell, struct client *c) {
    if (c->n_seen > 0 && c->p.n_tokens > c->n_seen && r->n_gaps[cell] < r->cap_gaps)
        r->gap[cell][r->n_gaps[cell]++] = (double)(c->p.committed_ns - c->seen_ns) / 1e6;
    if (c->p.n_tokens > c->n_seen) c->seen_ns = c->p.committed_ns;
    c->n_seen = c->p.n_tokens;
}

/* Bytes of pages that sequences hold now. */
static size_t pages_held(struct engine *g) {
    struct engine_stats s;
    size_t bytes = 0;
    engine_get_stats(g, &s);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        bytes += (size_t)s.pool.of[c].used * s.pool.of[c].page_bytes;
    return bytes;
}

/* Poll all until all are done. */
static int watch(struct run *r, int cell, int turn, struct client *c, int n, struct bell *bell,
                 struct err *e) {
    struct grid_cell *out = &r->out->cell[cell];
    bool looked = false;
    for (int n_done = 0, rc = 0; n_done < n;) {
        int n_begun = 0;
        bell_wait(bell);
        for (int i = 0; i < n; i++) {
            if (c[i].p.finish) continue;
            engine_poll(c[i].r, &c[i].p);
            if (counts(r, turn)) note_gap(r, cell, &c[i]);
            n_done += c[i].p.finish != ENGINE_RUNNING;
            if (c[i].p.finish == ENGINE_FAILED)
                rc = err_raise(e, c[i].p.error_code, "%s", c[i].p.error);
        }
        if (rc) return rc;
        for (int i = 0; i < n; i++) n_begun += c[i].p.n_tokens > 0;
        if (looked || n_begun < n || n_done) continue;
        out->kv_held = max_size(out->kv_held, pages_held(r->g));
        looked = true;
    }
    return 0;
}

static int n_equal(const int32_t *a, int n_a, const int32_t *b, int n_b) {
    int n = 0;
    while (n < n_a && n < n_b && a[n] == b[n]) n++;
    return n;
}

/* The text against the first one without speculation, the numbers to their places. */
static void keep(struct run *r, int cell, int turn, int prompt, const struct engine_progress *p) {
    struct grid_cell *out = &r->out->cell[cell];
    struct answer *a = answer_of(r, cell, turn, prompt);
    size_t at = (size_t)prompt * (size_t)r->o->n_tokens;
    if (turn == 0) {
        memcpy(r->text[cell] + at, p->tokens, (size_t)p->n_tokens * sizeof(int32_t));
        r->n_text[cell][prompt] = p->n_tokens;
    }
    int alone = cell & ~GRID_SPEC, n = r->n_text[alone][prompt];
    int same = n_equal(p->tokens, p->n_tokens, r->text[alone] + at, n);
    out->same_text &= same == n && same == p->n_tokens;
    *a = (struct answer){.ttft_ms = (double)(p->first_token_ns - p->submitted_ns) / 1e6,
                         .decode_ms = (double)(p->finished_ns - p->first_token_ns) / 1e6,
                         .first_ns = p->first_token_ns,
                         .end_ns = p->finished_ns,
                         .n_tokens = p->n_tokens,
                         .n_cached = p->n_cached_prompt};
    out->n_blocks = p->sparsity.n_blocks;
    out->n_kept = p->sparsity.n_kept;
    if (turn == 0) {
        out->n_left_out += p->sparsity.n_kept < p->sparsity.n_blocks;
        out->n_tokens += p->n_tokens;
    }
    if (!counts(r, turn)) return;
    out->n_rounds += p->speculation.n_rounds;
    out->n_plain_rounds += p->speculation.n_plain_rounds;
    out->n_drafted += p->speculation.n_drafted;
    out->n_accepted += p->speculation.n_accepted;
    out->select_share += (double)p->sparsity.select_ns / 1e6; /* ms, until finish_cell */
    out->shallow_bytes += p->sparsity.kv_shallow_bytes;
    out->deep_bytes += p->sparsity.kv_deep_bytes;
    out->dense_bytes += p->sparsity.kv_dense_bytes;
}

/* What the engine counted between two looks, added to the cell's. */
static void add_answers(struct engine_answer_kv *to, const struct engine_answer_kv *before,
                        const struct engine_answer_kv *after) {
    to->n_passes += after->n_passes - before->n_passes;
    to->n_tokens += after->n_tokens - before->n_tokens;
    to->shallow_bytes += after->shallow_bytes - before->shallow_bytes;
    to->deep_bytes += after->deep_bytes - before->deep_bytes;
    to->listed_shallow_bytes += after->listed_shallow_bytes - before->listed_shallow_bytes;
    to->listed_deep_bytes += after->listed_deep_bytes - before->listed_deep_bytes;
}

/* Prompts first..first + n - 1 at once. */
static int run_group(struct run *r, int cell, int turn, int first, int n, struct err *e) {
    static struct bell bell = BELL_INIT;
    static struct client clients[GRID_MAX_PROMPTS];
    struct engine_stats before, after;
    int rc = 0, n_open = 0;
    memset(clients, 0, sizeof clients);
    engine_get_stats(r->g, &before);
    while (n_open < n && !rc) {
        rc = submit(r, cell, turn, first + n_open, &bell, &clients[n_open], e);
        n_open += !rc;
    }
    if (!rc) rc = watch(r, cell, turn, clients, n, &bell, e);
    engine_get_stats(r->g, &after);
    for (int i = 0; i < n && !rc; i++) keep(r, cell, turn, first + i, &clients[i].p);
    for (int i = 0; i < n_open; i++) engine_release(r->g, clients[i].r);
    if (rc) return rc;
    if (counts(r, turn)) add_answers(&r->out->cell[cell].kv, &before.answers, &after.answers);
    r->out->cell[cell].resident_bytes = after.resident_bytes;
    return 0;
}

/* ---- What it comes to ---- */

/* Ms a token of the prompts of one question (NULL: of all) in a turn. */
static double time_per_token(const struct run *r, int cell, int turn,
                             const struct bench_question *of) {
    double ms = 0, tokens = 0;
    for (int i = 0; i < r->out->n_prompts; i++) {
        const struct answer *a = answer_of(r, cell, turn, i);
        if (of && r->question[i] != of) continue;
        ms += a->decode_ms;
        tokens += a->n_tokens - 1;
    }
    return tokens > 0 ? ms / tokens : 0;
}

/* Tokens a second of groups at once, without each answer's first. */
static double rate(const struct run *r, int cell, int turn) {
    double seconds = 0, tokens = 0;
    int n = r->out->n_prompts, batch = r->out->batch;
    for (int first = 0; first < n; first += batch) {
        int64_t begin = INT64_MAX, end = 0;
        for (int i = first; i < n && i < first + batch; i++) {
            const struct answer *a = answer_of(r, cell, turn, i);
            if (a->first_ns < begin) begin = a->first_ns;
            if (a->end_ns > end) end = a->end_ns;
            tokens += a->n_tokens - 1;
        }
        seconds += (double)(end - begin) / 1e9;
    }
    return seconds > 0 ? tokens / seconds : 0;
}

/* Medians are over the turns that count. */
static int first_turn(const struct run *r) {
    return counts(r, 0) ? 0 : 1;
}

static double gain(const struct run *r, int cell, const struct bench_question *of, double *low,
                   double *high) {
    double ratio[GRID_MAX_REPEATS + 1];
    size_t n = 0;
    for (int t = first_turn(r); t < r->n_turns; t++) {
        double mine = time_per_token(r, cell, t, of);
        if (mine > 0) ratio[n++] = time_per_token(r, GRID_PLAIN, t, of) / mine;
    }
    sort(ratio, n);
    if (low) *low = n ? ratio[0] : 0;
    if (high) *high = n ? ratio[n - 1] : 0;
    return median(ratio, n);
}

static void finish_cell(const struct run *r, int cell) {
    struct grid_cell *out = &r->out->cell[cell];
    double tpot[GRID_MAX_REPEATS + 1], rates[GRID_MAX_REPEATS + 1];
    static double ttft[GRID_MAX_PROMPTS * (GRID_MAX_REPEATS + 1)];
    size_t n = 0, n_ttft = 0;
    for (int t = first_turn(r); t < r->n_turns; t++) {
        tpot[n] = time_per_token(r, cell, t, NULL);
        rates[n++] = rate(r, cell, t);
    }
    for (int t = 0; t < r->n_turns; t++)
        for (int i = 0; i < r->out->n_prompts; i++)
            if (answer_of(r, cell, t, i)->n_cached == 0)
                ttft[n_ttft++] = answer_of(r, cell, t, i)->ttft_ms;
    sort(tpot, n);
    sort(rates, n);
    sort(ttft, n_ttft);
    sort(r->gap[cell], r->n_gaps[cell]);
    out->tpot_ms = median(tpot, n);
    out->tokens_per_s = median(rates, n);
    out->ttft_ms = median(ttft, n_ttft);
    out->ttft_worst_ms = n_ttft ? ttft[n_ttft - 1] : 0;
    out->first_tpot_ms = time_per_token(r, cell, 0, NULL);
    out->itl_p50_ms = at_share(r->gap[cell], r->n_gaps[cell], 0.5);
    out->itl_p99_ms = at_share(r->gap[cell], r->n_gaps[cell], 0.99);
    out->gain = gain(r, cell, NULL, &out->gain_low, &out->gain_high);
    double decoding = 0;
    for (int t = first_turn(r); t < r->n_turns; t++)
        for (int i = 0; i < r->out->n_prompts; i++) decoding += answer_of(r, cell, t, i)->decode_ms;
    out->select_share = decoding > 0 ? out->select_share / decoding : 0;
    double alike = 0, tokens = 0;
    for (int i = 0; i < r->out->n_prompts; i++) {
        size_t at = (size_t)i * (size_t)r->o->n_tokens;
        alike += n_equal(r->text[cell] + at, r->n_text[cell][i], r->text[GRID_PLAIN] + at,
                         r->n_text[GRID_PLAIN][i]);
        tokens += r->n_text[cell][i];
    }
    out->like_dense = tokens > 0 ? alike / tokens : 0;
}

static void finish_kinds(const struct run *r) {
    struct grid_point *p = r->out;
    for (int i = 0; i < p->n_prompts; i++) {
        int k = 0;
        while (k < p->n_kinds && p->kind[k].name != r->question[i]->name) k++;
        if (k == (int)(sizeof p->kind / sizeof *p->kind)) continue;
        if (k == p->n_kinds) {
            p->n_kinds++;
            p->kind[k] = (struct grid_kind){.name = r->question[i]->name};
            for (int c = 0; c < GRID_CELLS; c++)
                p->kind[k].gain[c] = gain(r, c, r->question[i], NULL, NULL);
        }
        p->kind[k].n_prompts++;
    }
}

static void finish(const struct run *r) {
    struct grid_point *p = r->out;
    p->same_text = p->bytes_agree = p->ran_sparse = true;
    for (int c = 0; c < GRID_CELLS; c++) {
        const struct engine_answer_kv *kv = &p->cell[c].kv;
        finish_cell(r, c);
        p->same_text &= p->cell[c].same_text;
        p->bytes_agree &= kv->n_passes > 0 && kv->shallow_bytes == kv->listed_shallow_bytes &&
                          kv->deep_bytes == kv->listed_deep_bytes;
        if (!grid_reads_sparsely(c)) continue;
        const struct engine_answer_kv *dense = &p->cell[c & ~GRID_SPARSE].kv;
        double mine = (double)kv->deep_bytes / (double)(kv->n_passes + !kv->n_passes);
        double whole = (double)dense->deep_bytes / (double)(dense->n_passes + !dense->n_passes);
        p->ran_sparse &= p->cell[c].n_left_out == p->n_prompts && mine < whole;
    }
    p->product = p->cell[GRID_SPEC].gain * p->cell[GRID_SPARSE].gain;
    p->share = p->product > 0 ? p->cell[GRID_BOTH].gain / p->product : 0;
    finish_kinds(r);
}

/* ---- A point ---- */

/* Questions in turn; each prompt begins elsewhere in the text, so that none shares a prefix. */
static int make_prompts(struct run *r, const struct strbuf *text, struct err *e) {
    struct grid_point *p = r->out;
    int rc = 0;
    for (int i = 0, q = 0; i < p->n_prompts && !rc; q++) {
        if (!bench_questions[q].name) q = 0;
        if (r->o->kind && strcmp(r->o->kind, bench_questions[q].name) != 0) continue;
        size_t start = text->n / (size_t)p->n_prompts * (size_t)i;
        r->question[i] = &bench_questions[q];
        rc = bench_prompt(&r->prompt[i], r->g, text, start, r->question[i], p->depth,
                          &p->repeats_text, e);
        if ((int)r->prompt[i].n > p->n_prompt_tokens) p->n_prompt_tokens = (int)r->prompt[i].n;
        i++;
    }
    return rc;
}

static int run_open(struct run *r, struct err *e) {
    size_t n = (size_t)r->out->n_prompts, n_tokens = (size_t)r->o->n_tokens;
    bool ok = true;
    r->n_turns = 1 + r->o->n_repeats;
    r->cap_gaps = min_size(MOST_GAPS, n * n_tokens * (size_t)r->n_turns);
    r->prompt = calloc(n, sizeof *r->prompt);
    r->question = calloc(n, sizeof *r->question);
    for (int c = 0; c < GRID_CELLS; c++) {
        r->text[c] = calloc(n * n_tokens, sizeof *r->text[c]);
        r->n_text[c] = calloc(n, sizeof *r->n_text[c]);
        r->answer[c] = calloc(n * (size_t)r->n_turns, sizeof *r->answer[c]);
        r->gap[c] = calloc(r->cap_gaps, sizeof *r->gap[c]);
        ok &= r->text[c] && r->n_text[c] && r->answer[c] && r->gap[c];
        r->out->cell[c].same_text = true;
    }
    if (ok && r->prompt && r->question) return 0;
    return err_raise(e, E_NOMEM, "no memory for %zu answers of %zu tokens", n, n_tokens);
}

static void run_close(struct run *r) {
    for (int i = 0; r->prompt && i < r->out->n_prompts; i++) tokens_deinit(&r->prompt[i]);
    for (int c = 0; c < GRID_CELLS; c++) {
        free(r->text[c]);
        free(r->n_text[c]);
        free(r->answer[c]);
        free(r->gap[c]);
    }
    free(r->prompt);
    free(r->question);
}

static int n_questions(const char *kind) {
    int n = 0;
    while (bench_questions[n].name) n++;
    return kind ? 1 : n;
}

static int run_point(struct engine *g, const struct bench_grid_options *o,
                     const struct strbuf *text, uint64_t salt, struct grid_point *out,
                     struct err *e) {
    struct run r = {.g = g, .o = o, .out = out, .salt = salt};
    int n_groups = (n_questions(o->kind) + out->batch - 1) / out->batch, rc;
    out->n_prompts = n_groups * out->batch;
    rc = run_open(&r, e);
    if (!rc) rc = make_prompts(&r, text, e);
    struct log_progress bar = {0};
    long long n_all = (long long)n_groups * r.n_turns * GRID_CELLS, n_done = 0;
    if (!rc) log_progress_start(&bar, "measuring", n_all);
    for (int first = 0; first < out->n_prompts && !rc; first += out->batch)
        for (int t = 0; t < r.n_turns && !rc; t++)
            for (int i = 0; i < GRID_CELLS && !rc; i++) {
                /* The first turn makes the texts that the others are compared with. */
                rc = run_group(&r, (i + t) % GRID_CELLS, t, first, out->batch, e);
                log_progress_at(&bar, ++n_done);
            }
    if (bar.what) log_progress_end(&bar);
    if (!rc) finish(&r);
    run_close(&r);
    return rc;
}

static int check(const struct engine *g, const struct bench_grid_options *o, struct err *e) {
    for (int i = 0; i < o->n_depths; i++)
        if (o->depths[i] > engine_context(g) - o->n_tokens)
            return err_raise(e, E_RANGE,
                             "--prompt-tokens: %d and %d tokens of an answer do not fit into the "
                             "context of %d",
                             o->depths[i], o->n_tokens, engine_context(g));
    return 0;
}

static int write_page(const char *path, const struct strbuf *b, struct err *e) {
    FILE *f = b->failed ? NULL : fopen(path, "we");
    if (b->failed) return err_raise(e, E_NOMEM, "no memory for the page");
    if (!f) return err_raise(e, E_IO, "--html: cannot write %s", path);
    bool ok = fwrite(b->data, 1, b->n, f) == b->n;
    ok &= fclose(f) == 0;
    return ok ? 0 : err_raise(e, E_IO, "--html: cannot write all of %s", path);
}

int bench_grid(struct engine *g, const struct bench_grid_options *o, struct err *e) {
    static struct grid_point points[GRID_MAX_LIST * GRID_MAX_LIST];
    struct strbuf text = {0}, out = {0};
    int n = 0;
    int rc = check(g, o, e);
    if (!rc && o->html_path) rc = file_check_writable(o->html_path, e);
    if (!rc) rc = bench_text(&text, o->text, engine_tokenizer(g), e);
    if (!rc && !o->json) bench__grid_head(g, o);
    for (int i = 0; i < o->n_depths && !rc; i++)
        for (int j = 0; j < o->n_batches && !rc; j++) {
            struct grid_point *p = &points[n];
            *p = (struct grid_point){.depth = o->depths[i], .batch = o->batches[j]};
            rc = run_point(g, o, &text, (uint64_t)(n + 1) * GRID_MAX_PROMPTS, p, e);
            n += !rc;
            if (!rc && !o->json) bench__grid_point(p, o);
        }
    if (!rc && o->json) {
        bench__grid_json(&out, g, o, points, n);
        fwrite(out.data, 1, out.n, stdout);
    }
    strbuf_clear(&out);
    if (!rc && o->html_path) {
        bench__grid_html(&out, g, o, points, n);
        rc = write_page(o->html_path, &out, e);
    }
    strbuf_deinit(&out);
    strbuf_deinit(&text);
    return rc;
}
