/* `tandem distill` over the tiny model: samples are what the trace sees, equal runs write equal
 * files whatever was kept and gone on from, what is trained is what is served, and what cannot be
 * done is named. */
#include "tests/distill_bed.h"

#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/threads.h"
#include "cmd/cmd.h"
#include "target/scorer.h"
#include "target/target.h"
#include "tests/harness.h"

/* cmd/main.c's, which brings a main of its own. */
int cmd_fail(const struct err *e) {
    fprintf(stderr, "# %s\n", e->message);
    return 1;
}

/* ---- Samples ---- */

/* What a place holds, from a trace of its own: states, representatives, labels. */
static void check_place(struct target_trace *t, const struct distill_trace_options *o,
                        const struct distill_window *w, int i, const struct target_window *got) {
    static float states[32 * HIDDEN], plane[20 * 5 * HIDDEN], label[32];
    const struct distill_place *p = &w->place[i];
    struct target_masses m;
    struct err e = {0};
    int common = w->is_facts ? w->n_common : p->n_tokens;
    assert_ok(target_trace_rewind(t, 0, &e), e);
    assert_ok(target_trace_prompt(t, w->ids.ids, common, 0, NULL, &e), e);
    if (w->is_facts) assert_ok(target_trace_prompt(t, p->tail, p->n_tail, 0, NULL, &e), e);
    int n = p->n_tokens, whole = n / 64;
    for (int l = 0; l < o->content.n_layers; l++) {
        const struct target_place *x = &got[l].place[i];
        assert_int_equal(x->n_tokens, n);
        assert_int_equal(x->first, 1);
        assert_true(x->n >= 1 && x->first + x->n <= target_n_blocks(n) - TARGET_WINDOW_BLOCKS);
        assert_ok(target_trace_states(t, l, n - x->n_queries, x->n_queries, states, &e), e);
        for (int q = 0; q < x->n_queries; q++) target_norm(states + q * HIDDEN, HIDDEN);
        assert_memory_equal(x->query, states, (size_t)(x->n_queries * HIDDEN) * 4);
        assert_ok(target_trace_plane(t, l, 0, whole, plane, &e), e);
        struct target_window own = {.n_blocks = x->first + x->n,
                                    .has_quarters = o->content.has_quarters};
        assert_ok(target_window_alloc(&own, HIDDEN, &e), e);
        target_window_represent(&own, plane, HIDDEN, o->by_first, o->by_first);
        assert_memory_equal(own.rep, got[l].rep, (size_t)(own.n_blocks * HIDDEN) * 4);
        if (o->content.has_quarters)
            assert_memory_equal(own.quarter, got[l].quarter,
                                (size_t)(4 * own.n_blocks * HIDDEN) * 4);
        target_window_free(&own);
    }
    assert_ok(target_trace_look(t, p->next, p->n_next, &m, &e), e);
    for (int l = 0; l < o->content.n_layers; l++) {
        const struct target_place *x = &got[l].place[i];
        double mark = 0, want = 0;
        for (int k = 0; k < TARGET_N_LABELS; k++) {
            bool has = o->content.labels >> k & 1;
            assert_true(has == (x->label[k] != NULL));
            if (!has || k == TARGET_LABEL_ACCUMULATED) continue;
            target_label_of((enum target_label)k, &m, o->content.layer[l], x->first + x->n, label);
            for (int c = 0; c < x->n; c++) assert_near(x->label[k][c], label[x->first + c], 1e-7);
        }
        for (int c = 0; c < x->n; c++) mark += (double)x->mark[c];
        for (int c = p->mark_first; c < p->mark_first + p->n_mark; c++)
            want += c / 64 >= x->first && c / 64 < x->first + x->n;
        assert_near(mark, p->n_mark ? want / p->n_mark : 0, 1e-5);
    }
}

static void test_distill_samples(void) {
    struct distill_bed b;
    struct distill_texts texts;
    struct err e = {0};
    distill_bed_open(&b);
    distill_bed_texts(&texts, &b);
    texts.n_questions = 4;
    for (int label = 0; label < TARGET_N_LABELS; label++) {
        struct distill_trace_options o = {.by_first = label % 2,
                                          .content = {.labels = 1U << label | label % 3,
                                                      .has_quarters = label % 2 == 0,
                                                      .n_queries = label % 2 ? 1 : 32,
                                                      .n_layers = 2,
                                                      .layer = {1, 3}}};
        struct target_trace_options to = {.max_tokens = WINDOW + TARGET_TRACE_LOOK,
                                          .select_layer = 1,
                                          .n_taps = 2,
                                          .tap_layer = {1, 3},
                                          .has_first = o.by_first,
                                          .heads = true,
                                          .kv_dtype = KERN_F16};
        struct target_trace *t;
        assert_ok(target_trace_open(&t, &to, b.m, b.k, &e), e);
        for (int i = 0; i < 6; i += 1 + label % 2) {
            struct distill_window w;
            struct target_window got[MODEL_MAX_TAPS];
            assert_ok(distill_window_make(&w, &texts, i, &e), e);
            assert_ok(distill_trace_window(t, &o, &w, HIDDEN, got, &e), e);
            assert_int_equal(got[1].n_places, w.n_places);
            assert_int_equal(got[0].is_held_out, w.is_held_out);
            for (int p = 0; p < w.n_places; p++) {
                check_place(t, &o, &w, p, got);
                assert_int_equal(isnan(got[0].place[p].observed[0]), !w.is_held_out);
            }
            for (int l = 0; l < 2; l++) target_window_free(&got[l]);
            distill_window_deinit(&w);
        }
        target_trace_close(t);
    }
    distill_texts_close(&texts);
    distill_bed_close(&b);
}

/* What `observed` selects by is in held-out windows' samples, the prompt's last 32 rows. */
static void test_distill_observed(void) {
    struct distill_bed b;
    struct distill_texts texts;
    struct err e = {0};
    distill_bed_open(&b);
    distill_bed_texts(&texts, &b);
    texts.n_questions = 4;
    struct distill_trace_options o = {
        .content = {
            .labels = 1U << TARGET_LABEL_DEEP, .n_queries = 1, .n_layers = 1, .layer = {2}}};
    struct target_trace_options to = {.max_tokens = WINDOW + TARGET_TRACE_LOOK,
                                      .select_layer = 2,
                                      .n_taps = 1,
                                      .tap_layer = {2},
                                      .heads = true,
                                      .kv_dtype = KERN_F16};
    struct target_trace *t;
    assert_ok(target_trace_open(&t, &to, b.m, b.k, &e), e);
    int n_held = 0;
    for (int i = 0; i < 8; i++) {
        struct distill_window w;
        struct target_window got[MODEL_MAX_TAPS];
        assert_ok(distill_window_make(&w, &texts, i, &e), e);
        assert_ok(distill_trace_window(t, &o, &w, HIDDEN, got, &e), e);
        for (int p = 0; p < w.n_places && w.is_held_out; p++, n_held++) {
            const struct distill_place *x = &w.place[p];
            const struct target_place *s = &got[0].place[p];
            int32_t ids[WINDOW];
            const float *mass;
            int common = w.is_facts ? w.n_common : x->n_tokens;
            memcpy(ids, w.ids.ids, (size_t)common * sizeof *ids);
            if (w.is_facts) memcpy(ids + common, x->tail, (size_t)x->n_tail * sizeof *ids);
            assert_ok(target_trace_rewind(t, 0, &e), e);
            assert_ok(target_trace_prompt(t, ids, x->n_tokens, TARGET_ROWS, &mass, &e), e);
            assert_memory_equal(s->observed, mass + s->first, (size_t)s->n * sizeof *mass);
        }
        target_window_free(&got[0]);
        distill_window_deinit(&w);
    }
    assert_true(n_held >= 8);
    target_trace_close(t);
    distill_texts_close(&texts);
    distill_bed_close(&b);
}

/* ---- Whole runs ---- */

static char model_path[256], text_path[2][96], out_path[3][96], keep_path[96];

static void run_begin(void) {
    struct tiny_options t = distill_bed_target();
    snprintf(model_path, sizeof model_path, "%s", tiny_model_file(&t));
    snprintf(text_path[0], sizeof text_path[0], "%s", distill_bed_file("one", 1, TEXT));
    snprintf(text_path[1], sizeof text_path[1], "%s", distill_bed_file("two", 2, TEXT));
    for (int i = 0; i < 3; i++)
        snprintf(out_path[i], sizeof out_path[i], "/tmp/tandem-%d-out%d.safetensors", (int)getpid(),
                 i);
    snprintf(keep_path, sizeof keep_path, "/tmp/tandem-%d-windows", (int)getpid());
    log_set_level(LOG_QUIET);
}

/* Trainings that were kept beside the windows; how many there were. */
static int drop_trainings(void) {
    char pattern[128];
    glob_t g;
    snprintf(pattern, sizeof pattern, "%s.layer*", keep_path);
    int n = glob(pattern, 0, NULL, &g) == 0 ? (int)g.gl_pathc : 0;
    for (int i = 0; i < n; i++) unlink(g.gl_pathv[i]);
    if (n) globfree(&g);
    return n;
}

static void run_end(void) {
    unlink(model_path);
    for (int i = 0; i < 2; i++) unlink(text_path[i]);
    for (int i = 0; i < 3; i++) unlink(out_path[i]);
    unlink(keep_path);
    drop_trainings();
}

/* The command with some more words; its exit code. */
static int distill(const char *out, const char *const *more) {
    const char *words[48] = {"-m",         model_path,    "-o",      out,         text_path[0],
                             text_path[1], "--window",    "1024",    "--windows", "20",
                             "--places",   "4",           "--batch", "4",         "--steps",
                             "12",         "--device",    "cpu",     "--quiet",   "--head-dim",
                             "8",          "--questions", "5"};
    int n = 0;
    while (words[n]) n++;
    for (; *more; more++) words[n++] = *more;
    return cmd_distill(n, (char **)words);
}

static void assert_same_file(const char *a, const char *b, bool same) {
    struct file x, y;
    struct err e = {0};
    assert_ok(file_read(&x, a, 1 << 24, &e), e);
    assert_ok(file_read(&y, b, 1 << 24, &e), e);
    bool equal = x.bytes == y.bytes && memcmp(x.data, y.data, x.bytes) == 0;
    assert_true(equal == same);
    file_close(&x);
    file_close(&y);
}

/* One seed, one file: by one thread or two, in one go or from windows that were kept, where the end
 * of the file is torn and a training was done already. */
static void test_distill_repeats(void) {
    static const char *const kinds[2] = {"late", "mlp"};
    struct err e = {0};
    char path[128];
    run_begin();
    for (int kind = 0; kind < 2; kind++) {
#define RUN(out, ...)                                                                              \
    assert_int_equal(distill(out, (const char *const[]){"--scorer", kinds[kind], "--layer", "1,3", \
                                                        __VA_ARGS__, NULL}),                       \
                     0)
        RUN(out_path[0], "--threads", "1");
        RUN(out_path[1], "--threads", "2");
        assert_same_file(out_path[0], out_path[1], true);
        if (!TEST_SANITIZED) { /* the same ways with other numbers */
            RUN(out_path[1], "--threads", "1", "--seed", "2");
            assert_same_file(out_path[0], out_path[1], false);
        }
        RUN(out_path[1], "--threads", "1", "--checkpoint", keep_path);
        assert_same_file(out_path[0], out_path[1], true);
        struct file f;
        assert_ok(file_read(&f, keep_path, 1 << 26, &e), e);
        size_t bytes = f.bytes;
        file_close(&f);
        assert_int_equal(truncate(keep_path, (long)(bytes * 2 / 3)), 0);
        RUN(out_path[2], "--threads", "1", "--checkpoint", keep_path, "--resume");
        assert_same_file(out_path[0], out_path[2], true);
        assert_ok(file_read(&f, keep_path, 1 << 26, &e), e);
        assert_int_equal(f.bytes, bytes);
        file_close(&f);
        /* Not without being told, not what belongs to other options. */
        assert_int_equal(
            distill(out_path[2], (const char *const[]){"--checkpoint", keep_path, NULL}), 1);
        assert_int_equal(
            distill(out_path[2], (const char *const[]){"--checkpoint", keep_path, "--resume",
                                                       "--seed", "9", NULL}),
            1);
        /* Nor where the result would take the place of what is kept. */
        snprintf(path, sizeof path, "%s.layer1", keep_path);
        for (int i = 0; i < 2; i++)
            assert_int_equal(
                distill(i ? path : keep_path,
                        (const char *const[]){"--checkpoint", keep_path, "--resume", NULL}),
                1);
        assert_ok(file_read(&f, keep_path, 1 << 26, &e), e);
        assert_int_equal(f.bytes, bytes);
        file_close(&f);
        struct target_scorer_file *s;
        assert_ok(target_scorer_read(&s, out_path[0], &e), e);
        assert_int_equal(s->kind, kind ? KERN_SCORE_MLP : KERN_SCORE_LATE);
        assert_int_equal(s->hidden, HIDDEN);
        assert_true(s->layer == 1 || s->layer == 3);
        target_scorer_free(s);
        unlink(keep_path);
        assert_int_equal(drop_trainings(), 2);
    }
#undef RUN
    run_end();
}

/* One tracing serves trainings of other kinds, labels, layers and domains: each gives the file that
 * it gives from a tracing of its own, beside the others' checkpoints. */
static void test_distill_shares_windows(void) {
    static const char *const ways[][11] = {
        {"--layer", "3", "--label", "deep", "--heads", "2", "--aim", "0"},
        {"--layer", "1", "--leave-out", "/"}, /* the first text's name comes below */
        {"--layer", "1", "--scorer", "mlp", "--label", "last", "--queries", "2", "--width", "24"},
    };
    char name[96];
    run_begin();
    snprintf(name, sizeof name, "%s", strrchr(text_path[0], '/') + 1);
    *strchr(name, '.') = 0;
    assert_int_equal(distill(out_path[2], (const char *const[]){"--layer", "1,3", "--windows", "12",
                                                                "--checkpoint", keep_path, NULL}),
                     0);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const char *alone[16], *shared[24];
        int n = 0;
        for (; ways[i][n]; n++) alone[n] = shared[n] = ways[i][n][0] == '/' ? name : ways[i][n];
        alone[n] = shared[n] = "--windows";
        alone[n + 1] = shared[n + 1] = "12";
        n += 2;
        alone[n] = NULL;
        shared[n] = "--checkpoint";
        shared[n + 1] = keep_path;
        shared[n + 2] = "--resume";
        shared[n + 3] = NULL;
        assert_int_equal(distill(out_path[0], alone), 0);
        assert_int_equal(distill(out_path[1], shared), 0);
        assert_same_file(out_path[0], out_path[1], true);
        assert_same_file(out_path[0], out_path[2], false);
        if (i > 0) continue;
        /* Nothing can be traced into a file that has more. */
        shared[n + 3] = "--windows";
        shared[n + 4] = "16";
        shared[n + 5] = NULL;
        assert_int_equal(distill(out_path[1], shared), 1);
    }
    assert_int_equal(drop_trainings(), 5);
    /* What it has not cannot be trained on. */
    static const char *const more[][2] = {
        {"--layer", "2"}, {"--label", "accumulated"}, {"--representative", "first"}};
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(
            distill(out_path[1],
                    (const char *const[]){more[i][0], more[i][1], "--scorer", "mlp", "--checkpoint",
                                          keep_path, "--resume", NULL}),
            1);
    run_end();
}

/* A short training of each kind. */
static struct target_train_options served_training(bool mlp) {
    return (struct target_train_options){.shape = {.kind = mlp ? KERN_SCORE_MLP : KERN_SCORE_LATE,
                                                   .loss = mlp ? TARGET_LOSS_BCE : TARGET_LOSS_KL,
                                                   .hidden = HIDDEN,
                                                   .n_heads = mlp ? 0 : 2,
                                                   .head_dim = mlp ? 0 : 16,
                                                   .width = mlp ? 40 : 0,
                                                   .has_layernorm = mlp},
                                         .n_steps = 10,
                                         .n_warmup = 1,
                                         .batch = 2,
                                         .label = TARGET_LABEL_STRONGEST,
                                         .aim = .5,
                                         .n_queries = mlp ? 3 : 0,
                                         .learning_rate = 1e-2,
                                         .keep = .1,
                                         .seed = 1};
}

/* What was trained, as serving loads it. */
static struct target_scorer *load_trained(const struct target_train *train,
                                          const struct target_train_options *o, struct kern *k) {
    struct target_scorer_file shape = {.kind = o->shape.kind,
                                       .layer = 2,
                                       .hidden = HIDDEN,
                                       .n_heads = o->shape.n_heads,
                                       .head_dim = o->shape.head_dim,
                                       .width = o->shape.width,
                                       .n_queries = o->n_queries ? o->n_queries : 32,
                                       .normed = true,
                                       .has_layernorm = o->shape.has_layernorm,
                                       .block = 64},
                              *file;
    struct target_scorer *scorer;
    struct err e = {0};
    assert_ok(target_scorer_make(&file, &shape, &e), e);
    target_train_weights(train, &(struct target_train_weights){file->a, file->b, file->w1, file->b1,
                                                               file->w2, file->b2, file->ln_weight,
                                                               file->ln_bias});
    assert_ok(target_scorer_load(&scorer, file, k, &e), e);
    target_scorer_free(file);
    return scorer;
}

/* The operation's scores of every place of a window, over the trace, beside the trainer's. */
static void check_scores(struct target_trace *t, const struct kern_scorer *scorer,
                         struct target_train *train, const struct distill_window *w,
                         const struct target_window *got) {
    static float score[TARGET_MAX_PLACES * 32], op[32];
    struct err e = {0};
    target_train_score(train, got, score);
    for (int p = 0; p < w->n_places; p++) {
        const struct distill_place *x = &w->place[p];
        const struct target_place *s = &got->place[p];
        int common = w->is_facts ? w->n_common : x->n_tokens;
        assert_ok(target_trace_rewind(t, 0, &e), e);
        assert_ok(target_trace_prompt(t, w->ids.ids, common, 0, NULL, &e), e);
        if (w->is_facts) assert_ok(target_trace_prompt(t, x->tail, x->n_tail, 0, NULL, &e), e);
        assert_ok(target_trace_score(t, 0, scorer, op, &e), e);
        for (int c = s->first; c < s->first + s->n; c++)
            assert_near(score[p * got->n_blocks + c], op[c], 1e-4 * (1 + fabs((double)op[c])));
    }
}

/* The file's scorer, run by the operation over a trace, and the trainer's own scores of the window
 * that the trace gave: what is trained is what is served. */
static void check_served(const struct distill_bed *b, const struct distill_texts *texts,
                         struct threads *threads, bool mlp) {
    struct distill_trace_options o = {.content = {.labels = 1U << TARGET_LABEL_STRONGEST,
                                                  .has_quarters = !mlp,
                                                  .n_queries = mlp ? 5 : 32,
                                                  .n_layers = 1,
                                                  .layer = {2}}};
    struct target_trace_options to = {.max_tokens = WINDOW + TARGET_TRACE_LOOK,
                                      .select_layer = 2,
                                      .n_taps = 1,
                                      .tap_layer = {2},
                                      .heads = true,
                                      .kv_dtype = KERN_F16};
    struct target_train_options how = served_training(mlp);
    struct target_trace *t;
    struct target_train *train;
    struct distill_window w[3];
    struct target_window got[3];
    const struct target_window *windows[] = {&got[0], &got[1], &got[2]};
    struct err e = {0};
    assert_ok(target_trace_open(&t, &to, b->m, b->k, &e), e);
    for (int i = 0; i < 3; i++) {
        assert_ok(distill_window_make(&w[i], texts, i, &e), e);
        assert_ok(distill_trace_window(t, &o, &w[i], HIDDEN, &got[i], &e), e);
    }
    assert_ok(target_train_open(&train, &how, windows, 3, threads, &e), e);
    while (target_train_step(train, NULL)) {
    }
    struct target_scorer *scorer = load_trained(train, &how, b->k);
    for (int i = 0; i < 3; i++) {
        check_scores(t, target_scorer_kern(scorer), train, &w[i], &got[i]);
        target_window_free(&got[i]);
        distill_window_deinit(&w[i]);
    }
    target_scorer_close(scorer);
    target_train_close(train);
    target_trace_close(t);
}

static void test_distill_served(void) {
    struct distill_bed b;
    struct distill_texts texts;
    struct threads *threads;
    struct err e = {0};
    distill_bed_open(&b);
    distill_bed_texts(&texts, &b);
    texts.n_questions = 4;
    assert_ok(threads_open(&threads, 1, &e), e);
    for (int mlp = 0; mlp < 2; mlp++) check_served(&b, &texts, threads, mlp);
    threads_close(threads);
    distill_texts_close(&texts);
    distill_bed_close(&b);
}

/* ---- Refusals ---- */

static void test_distill_refuses(void) {
    struct distill_bed b;
    struct distill_texts t;
    struct err e = {0};
    distill_bed_open(&b);
    distill_bed_texts(&t, &b);
    const char *brief = distill_bed_file("brief", 4, 1500);
    assert_int_equal(distill_texts_add(&t, brief, &e), E_INVALID);
    assert_non_null(strstr(e.message, "too short"));
    assert_non_null(strstr(e.message, "need 2048"));
    unlink(brief);
    assert_int_equal(distill_texts_add(&t, "/tmp/tandem-no-such-text", &e), E_NOT_FOUND);
    distill_texts_close(&t);
    distill_bed_close(&b);
    run_begin();
    static const char *const bad[][5] = {
        {"--scorer", "best"},
        {"--label", "worst"},
        {"--loss", "l2"},
        {"--layer", "0"},
        {"--layer", "5"},
        {"--layer", "3,1"},
        {"--layer", "1,x"},
        {"--representative", "all"},
        {"--representative", "first"},
        {"--windows", "5"},
        {"--aim", "1.5"},
        {"--questions", "65"},
        {"--window", "4096"},
        {"--leave-out", "three"},
        {"--loss", "bce"},
        {"--memory", "1K"},
        {"--cpu-precision", "f16"},
        {"--text", "a,,b"},
        {"--resume"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (distill(out_path[0], bad[i]) == 0) fail_msg("%s %s passed", bad[i][0], bad[i][1]);
    assert_int_equal(access(out_path[0], F_OK), -1);
    run_end();
}

const struct test tests[] = {
    {"distill_samples", TEST_QUICK, 120000, test_distill_samples},
    {"distill_observed", TEST_QUICK, 60000, test_distill_observed},
    {"distill_repeats", TEST_QUICK, 240000, test_distill_repeats},
    {"distill_shares_windows", TEST_QUICK, 240000, test_distill_shares_windows},
    {"distill_served", TEST_QUICK, 60000, test_distill_served},
    {"distill_refuses", TEST_QUICK, 60000, test_distill_refuses},
    {0},
};
