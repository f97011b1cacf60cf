/* `tandem distill` over the tiny model: windows are what they are said to be, samples are what the
 * trace sees, equal runs write equal files whatever was kept and gone on from, and what cannot be
 * done is named. */
#include "tests/harness.h"

#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/file.h"
#include "base/log.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cmd/cmd.h"
#include "cmd/distill.h"
#include "cmd/distill_words.h"
#include "model/source.h"
#include "target/scorer.h"
#include "target/target.h"
#include "tests/tiny_model.h"

/* cmd/main.c's, which brings a main of its own. */
int cmd_fail(const struct err *e) {
    fprintf(stderr, "# %s\n", e->message);
    return 1;
}

enum { LAYERS = 5, HIDDEN = 64, WINDOW = 1024, TEXT = 9000 };

static struct tiny_options tiny(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = LAYERS;
    return t;
}

/* A file of n bytes of made-up sentences; static buffers, two in turn. */
static const char *text_file(const char *name, uint64_t seed, int n) {
    static char path[2][96];
    static int turn;
    char *p = path[turn++ % 2];
    snprintf(p, sizeof path[0], "/tmp/tandem-%d-%s.txt", (int)getpid(), name);
    FILE *f = fopen(p, "w");
    assert_non_null(f);
    for (int i = 0, word = 0; i < n; i++) {
        uint32_t r = rng_u32(seed, 0, RNG_TEST, (uint32_t)i);
        if (word > 2 && r % 5 == 0) {
            fputs(r % 7 == 0 ? ". " : " ", f);
            word = 0;
        } else {
            fputc('a' + (int)(r >> 8) % 26, f);
            word++;
        }
    }
    fclose(f);
    return p;
}

struct bed {
    struct kern *k;
    struct model *m;
    struct tokenizer *tokenizer;
    const struct chat_family *chat;
};

static void bed_open(struct bed *b) {
    struct tiny_options t = tiny();
    struct target_trace_options o = {.max_tokens = WINDOW + TARGET_TRACE_LOOK};
    struct model_caps caps = target_trace_caps(&o);
    struct kern_options ko = {.n_threads = 1};
    struct model_source *src;
    struct err e = {0}, why = {0};
    const char *path = tiny_model_file(&t);
    size_t n;
    *b = (struct bed){0};
    assert_ok(kern_cpu_open(&b->k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&b->m, src, NULL, b->k, &caps, NULL, NULL, &e), e);
    assert_ok(model_open_tokenizer(&b->tokenizer, src, &e), e);
    const char *text = model_source_chat_template(src, &n);
    if (!text || chat_family_detect(&b->chat, text, n, &why) != 0) b->chat = NULL;
    model_source_close(src);
}

static void bed_close(struct bed *b) {
    tokenizer_close(b->tokenizer);
    model_close(b->m);
    b->k->ops->close(b->k);
}

static void texts_open(struct distill_texts *t, const struct bed *b) {
    struct err e = {0};
    *t = (struct distill_texts){.tokenizer = b->tokenizer,
                                .chat = b->chat,
                                .window = WINDOW,
                                .n_places = 4,
                                .n_questions = 9,
                                .inside = true,
                                .seed = 3};
    const char *first = text_file("one", 1, TEXT), *second = text_file("two", 2, TEXT);
    assert_ok(distill_texts_add(t, first, &e), e);
    assert_ok(distill_texts_add(t, second, &e), e);
    unlink(first);
    unlink(second);
}

/* ---- Windows ---- */

static bool stands_in(const int32_t *ids, int n, const struct tokens *all, int lo, int hi) {
    for (int at = lo; at + n <= hi; at++)
        if (memcmp(all->ids + at, ids, (size_t)n * sizeof *ids) == 0) return true;
    return false;
}

static void check_text(const struct distill_window *w, const struct distill_texts *t) {
    const struct distill_domain *d = &t->domain[w->domain];
    int n = (int)d->ids.n, before = 0;
    assert_int_equal(w->ids.n, WINDOW);
    assert_true(stands_in(w->ids.ids, WINDOW, &d->ids, w->is_held_out ? d->split : 0,
                          w->is_held_out ? n : d->split));
    assert_true(w->n_places > 1);
    for (int i = 0; i < w->n_places; i++) {
        const struct distill_place *p = &w->place[i];
        assert_int_equal(p->n_tokens % 64, 0);
        assert_true(p->n_tokens >= before + 64 && p->n_tokens + p->n_next <= WINDOW);
        assert_ptr_equal(p->next, w->ids.ids + p->n_tokens);
        assert_int_equal(p->n_next, 64);
        before = p->n_tokens + p->n_next;
    }
}

/* The fact that a question is about, or that is being told; -1: none of the prompt's. */
static int asked(const struct distill_fact *f, int n, const char *tail, const char *lead,
                 const char *text, int *question) {
    for (int i = 0; i < n; i++)
        for (int q = 0; q < f[i].n_questions; q++)
            if (strstr(tail, f[i].question[q]) || (strlen(lead) > 8 && strstr(text, f[i].text) &&
                                                   !strncmp(f[i].answer[q], lead, strlen(lead)))) {
                *question = q;
                return i;
            }
    return -1;
}

/* How often each sort of place was met. */
struct sorts {
    int quotes, inside, late;
};

/* Of every place: what it is about stands in the common part, where the mark says, the question
 * behind it, the answer after that, of which some may have been given; of a late one no question,
 * but the answer's beginning behind other text. */
static void check_facts(const struct distill_window *w, const struct distill_texts *t, int i,
                        struct sorts *sorts) {
    static struct distill_fact f[DISTILL_MAX_FACTS];
    struct strbuf common = {0}, tail = {0}, next = {0}, marked = {0}, lead = {0};
    assert_true(w->n_places > 0 && w->n_places <= t->n_questions);
    assert_int_equal(w->domain, t->n_domains);
    assert_in_range(w->source, 0, t->n_domains - 1);
    assert_true(w->ids.n < INT32_MAX && w->n_common < WINDOW);
    tokenizer_decode(t->tokenizer, w->ids.ids, (size_t)w->n_common, false, &common);
    strbuf_append_char(&common, 0);
    distill_facts_make(f, DISTILL_MAX_FACTS, t->seed, (uint32_t)i, w->is_held_out);
    for (int p = 0; p < w->n_places; p++) {
        const struct distill_place *x = &w->place[p];
        struct strbuf *all[] = {&tail, &next, &marked, &lead};
        for (int k = 0; k < 4; k++) strbuf_clear(all[k]);
        tokenizer_decode(t->tokenizer, x->tail, (size_t)x->n_tail, false, &tail);
        tokenizer_decode(t->tokenizer, x->next, (size_t)x->n_next, false, &next);
        assert_in_range(x->n_mark, 1, w->n_common);
        assert_in_range(x->mark_first, 0, w->n_common - x->n_mark);
        tokenizer_decode(t->tokenizer, w->ids.ids + x->mark_first, (size_t)x->n_mark, false,
                         &marked);
        assert_in_range(x->n_lead, 0, x->n_tail - 1);
        tokenizer_decode(t->tokenizer, x->next - x->n_lead, (size_t)x->n_lead, false, &lead);
        for (int k = 0; k < 4; k++) strbuf_append_char(all[k], 0);
        assert_ptr_equal(x->next, x->tail + x->n_tail);
        assert_int_equal(x->n_tokens, w->n_common + x->n_tail);
        assert_true(x->n_tokens + x->n_next <= WINDOW && x->n_next > 0);
        int question = 0,
            which = asked(f, DISTILL_MAX_FACTS, tail.data, lead.data, common.data, &question);
        if (which < 0) { /* a sentence's beginning is quoted, its rest is the answer */
            char begin[13];
            assert_true(strlen(marked.data) > 24);
            snprintf(begin, sizeof begin, "%s", marked.data + 1);
            assert_non_null(strstr(tail.data, begin));
            assert_non_null(strstr(marked.data, next.data));
            sorts->quotes++;
            continue;
        }
        assert_non_null(strstr(common.data, f[which].text));
        assert_non_null(strstr(marked.data, f[which].text));
        assert_null(strstr(common.data, f[which].question[question]));
        const char *answer = f[which].answer[question];
        assert_int_equal(strncmp(answer, lead.data, strlen(lead.data)), 0);
        assert_int_equal(strncmp(answer + strlen(lead.data), next.data, strlen(next.data)), 0);
        if (x->n_lead == 0) assert_non_null(strstr(tail.data, f[which].question[question]));
        else if (strstr(tail.data, f[which].question[question])) sorts->inside++;
        else sorts->late++;
    }
    strbuf_deinit(&common);
    strbuf_deinit(&tail);
    strbuf_deinit(&next);
    strbuf_deinit(&marked);
    strbuf_deinit(&lead);
}

/* The longest piece of a wording between slots. */
static const char *longest_piece(const char *wording) {
    static char best[200];
    best[0] = 0;
    for (const char *p = wording; *p;) {
        size_t n = strcspn(p, "{}");
        if (n > strlen(best)) snprintf(best, sizeof best, "%.*s", (int)n, p);
        p += n + (p[n] != 0);
    }
    return best;
}

/* Wordings of held-out windows are others than those that are trained on, and none is one by which
 * `tandem eval` judges. */
static void test_distill_wordings(void) {
    static const char *const judges[] = {
        "lucky number",       "assword", "ruit of", "last train", "According to the text above",
        "A question about it"};
    static struct distill_fact f[2][400][8];
    int seen[2] = {0};
    for (int held = 0; held < 2; held++)
        for (uint32_t i = 0; i < 400; i++) {
            distill_facts_make(f[held][i], 8, 5, i, held);
            for (int k = 0; k < 8; k++) {
                const struct distill_fact *x = &f[held][i][k];
                assert_in_range(x->n_questions, 1, DISTILL_QUESTIONS);
                assert_true(strlen(x->text) > 8 && !strchr(x->text, '{') + !!strchr(x->text, ':'));
                for (size_t j = 0; j < sizeof judges / sizeof *judges; j++) {
                    assert_null(strstr(x->text, judges[j]));
                    for (int q = 0; q < x->n_questions; q++)
                        assert_null(strstr(x->question[q], judges[j]));
                }
            }
        }
    for (uint32_t e = 0; e < distill_n_events; e++) {
        const char *piece = longest_piece(distill_events[e].text);
        for (int held = 0; held < 2; held++) {
            int n = 0;
            for (int i = 0; i < 400; i++)
                for (int k = 0; k < 8; k++) n += strstr(f[held][i][k].text, piece) != NULL;
            if (held != (e % 6 == 5) && n) fail_msg("event %u on the other side", e);
            seen[held] += n > 0;
        }
    }
    assert_int_equal(seen[1], distill_n_events / 6);
    assert_true(seen[0] >= (int)(distill_n_events - distill_n_events / 6) - 3);
    for (uint32_t i = 0; i < distill_statements.n; i++)
        assert_string_not_equal(distill_statements.at[i], "The {A} of {K} is {V}.");
    for (uint32_t i = 0; i < distill_questions.n; i++)
        assert_string_not_equal(distill_questions.at[i], "What is the {A} of {K}?");
    for (uint32_t i = 0; i < distill_n_frames; i++) {
        const struct distill_frame *x = &distill_frames[i];
        for (size_t j = 0; j < sizeof judges / sizeof *judges; j++)
            assert_true(!strstr(x->head, judges[j]) && !strstr(x->middle, judges[j]));
    }
    for (uint32_t i = 0; i < distill_completions.n; i++)
        assert_non_null(strstr(distill_completions.at[i], "%s"));
}

static void test_distill_windows(void) {
    struct bed b;
    struct distill_texts t;
    struct err e = {0};
    int held[3] = {0}, total[3] = {0};
    struct sorts sorts = {0};
    bed_open(&b);
    texts_open(&t, &b);
    uint64_t key = distill_texts_key(&t);
    for (int i = 0; i < 64; i++) {
        struct distill_window w, again;
        assert_ok(distill_window_make(&w, &t, i, &e), e);
        assert_ok(distill_window_make(&again, &t, i, &e), e);
        assert_int_equal(w.ids.n, again.ids.n);
        assert_memory_equal(w.ids.ids, again.ids.ids, w.ids.n * sizeof *w.ids.ids);
        assert_int_equal(w.is_facts, i % 2);
        if (w.is_facts) check_facts(&w, &t, i, &sorts);
        else check_text(&w, &t);
        held[w.domain] += w.is_held_out;
        total[w.domain]++;
        distill_window_deinit(&w);
        distill_window_deinit(&again);
    }
    for (int d = 0; d < 3; d++) assert_int_equal(held[d], total[d] / DISTILL_HOLD);
    assert_string_equal(distill_domain_name(&t, 2), "facts");
    assert_true(sorts.quotes > 10 && sorts.inside > 5 && sorts.late > 0);
    t.inside = false;
    assert_true(distill_texts_key(&t) != key);
    for (int i = 1; i < 16; i += 2) {
        struct distill_window w;
        assert_ok(distill_window_make(&w, &t, i, &e), e);
        for (int p = 0; p < w.n_places; p++) assert_int_equal(w.place[p].n_lead, 0);
        distill_window_deinit(&w);
    }
    key = distill_texts_key(&t);
    t.n_questions++;
    assert_true(distill_texts_key(&t) != key);
    distill_texts_close(&t);
    bed_close(&b);
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
    struct bed b;
    struct distill_texts texts;
    struct err e = {0};
    bed_open(&b);
    texts_open(&texts, &b);
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
    bed_close(&b);
}

/* What `observed` selects by is in held-out windows' samples, the prompt's last 32 rows. */
static void test_distill_observed(void) {
    struct bed b;
    struct distill_texts texts;
    struct err e = {0};
    bed_open(&b);
    texts_open(&texts, &b);
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
    bed_close(&b);
}

/* ---- Whole runs ---- */

static char model_path[256], text_path[2][96], out_path[3][96], keep_path[96];

static void run_begin(void) {
    struct tiny_options t = tiny();
    snprintf(model_path, sizeof model_path, "%s", tiny_model_file(&t));
    snprintf(text_path[0], sizeof text_path[0], "%s", text_file("one", 1, TEXT));
    snprintf(text_path[1], sizeof text_path[1], "%s", text_file("two", 2, TEXT));
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

/* The file's scorer, run by the operation over a trace, and the trainer's own scores of the window
 * that the trace gave: what is trained is what is served. */
static void test_distill_served(void) {
    struct bed b;
    struct distill_texts texts;
    struct threads *threads;
    struct err e = {0};
    bed_open(&b);
    texts_open(&texts, &b);
    texts.n_questions = 4;
    assert_ok(threads_open(&threads, 1, &e), e);
    for (int kind = 0; kind < 2; kind++) {
        struct distill_trace_options o = {.content = {.labels = 1U << TARGET_LABEL_STRONGEST,
                                                      .has_quarters = kind == 0,
                                                      .n_queries = kind ? 5 : 32,
                                                      .n_layers = 1,
                                                      .layer = {2}}};
        struct target_trace_options to = {.max_tokens = WINDOW + TARGET_TRACE_LOOK,
                                          .select_layer = 2,
                                          .n_taps = 1,
                                          .tap_layer = {2},
                                          .heads = true,
                                          .kv_dtype = KERN_F16};
        struct target_train_options to_train = {
            .shape = {.kind = kind ? KERN_SCORE_MLP : KERN_SCORE_LATE,
                      .loss = kind ? TARGET_LOSS_BCE : TARGET_LOSS_KL,
                      .hidden = HIDDEN,
                      .n_heads = kind ? 0 : 2,
                      .head_dim = kind ? 0 : 16,
                      .width = kind ? 40 : 0,
                      .has_layernorm = kind},
            .n_steps = 10,
            .n_warmup = 1,
            .batch = 2,
            .label = TARGET_LABEL_STRONGEST,
            .aim = .5,
            .n_queries = kind ? 3 : 0,
            .learning_rate = 1e-2,
            .keep = .1,
            .seed = 1};
        struct target_trace *t;
        struct target_train *train;
        struct distill_window w[3];
        struct target_window got[3];
        const struct target_window *windows[] = {&got[0], &got[1], &got[2]};
        static float score[TARGET_MAX_PLACES * 32], op[32];
        assert_ok(target_trace_open(&t, &to, b.m, b.k, &e), e);
        for (int i = 0; i < 3; i++) {
            assert_ok(distill_window_make(&w[i], &texts, i, &e), e);
            assert_ok(distill_trace_window(t, &o, &w[i], HIDDEN, &got[i], &e), e);
        }
        assert_ok(target_train_open(&train, &to_train, windows, 3, threads, &e), e);
        while (target_train_step(train, NULL)) {
        }
        struct target_scorer_file shape = {.kind = to_train.shape.kind,
                                           .layer = 2,
                                           .hidden = HIDDEN,
                                           .n_heads = to_train.shape.n_heads,
                                           .head_dim = to_train.shape.head_dim,
                                           .width = to_train.shape.width,
                                           .n_queries = kind ? 3 : 32,
                                           .normed = true,
                                           .has_layernorm = to_train.shape.has_layernorm,
                                           .block = 64},
                                  *file;
        struct target_scorer *scorer;
        assert_ok(target_scorer_make(&file, &shape, &e), e);
        target_train_weights(train, &(struct target_train_weights){file->a, file->b, file->w1,
                                                                   file->b1, file->w2, file->b2,
                                                                   file->ln_weight, file->ln_bias});
        assert_ok(target_scorer_load(&scorer, file, b.k, &e), e);
        for (int i = 0; i < 3; i++) {
            target_train_score(train, &got[i], score);
            for (int p = 0; p < w[i].n_places; p++) {
                const struct distill_place *x = &w[i].place[p];
                const struct target_place *s = &got[i].place[p];
                int common = w[i].is_facts ? w[i].n_common : x->n_tokens;
                assert_ok(target_trace_rewind(t, 0, &e), e);
                assert_ok(target_trace_prompt(t, w[i].ids.ids, common, 0, NULL, &e), e);
                if (w[i].is_facts)
                    assert_ok(target_trace_prompt(t, x->tail, x->n_tail, 0, NULL, &e), e);
                assert_ok(target_trace_score(t, 0, target_scorer_kern(scorer), op, &e), e);
                for (int c = s->first; c < s->first + s->n; c++)
                    assert_near(score[p * got[i].n_blocks + c], op[c],
                                1e-4 * (1 + fabs((double)op[c])));
            }
        }
        target_scorer_close(scorer);
        target_scorer_free(file);
        target_train_close(train);
        for (int i = 0; i < 3; i++) {
            target_window_free(&got[i]);
            distill_window_deinit(&w[i]);
        }
        target_trace_close(t);
    }
    threads_close(threads);
    distill_texts_close(&texts);
    bed_close(&b);
}

/* ---- Refusals ---- */

static void test_distill_refuses(void) {
    struct bed b;
    struct distill_texts t;
    struct err e = {0};
    bed_open(&b);
    texts_open(&t, &b);
    const char *brief = text_file("brief", 4, 1500);
    assert_int_equal(distill_texts_add(&t, brief, &e), E_INVALID);
    assert_non_null(strstr(e.message, "too short"));
    assert_non_null(strstr(e.message, "need 2048"));
    unlink(brief);
    assert_int_equal(distill_texts_add(&t, "/tmp/tandem-no-such-text", &e), E_NOT_FOUND);
    distill_texts_close(&t);
    bed_close(&b);
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
    {"distill_windows", TEST_QUICK, 60000, test_distill_windows},
    {"distill_wordings", TEST_QUICK, 60000, test_distill_wordings},
    {"distill_samples", TEST_QUICK, 120000, test_distill_samples},
    {"distill_observed", TEST_QUICK, 60000, test_distill_observed},
    {"distill_repeats", TEST_QUICK, 240000, test_distill_repeats},
    {"distill_shares_windows", TEST_QUICK, 240000, test_distill_shares_windows},
    {"distill_served", TEST_QUICK, 60000, test_distill_served},
    {"distill_refuses", TEST_QUICK, 60000, test_distill_refuses},
    {0},
};
