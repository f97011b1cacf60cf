/* What `tandem distill` trains on, over the tiny model: windows are what they are said to be, made
 * facts stand where their places say, and held-out ones are told in other words. */
#include "tests/distill_bed.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "cmd/distill_words.h"
#include "tests/harness.h"

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
    struct distill_bed b;
    struct distill_texts t;
    struct err e = {0};
    int held[3] = {0}, total[3] = {0};
    struct sorts sorts = {0};
    distill_bed_open(&b);
    distill_bed_texts(&t, &b);
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
    distill_bed_close(&b);
}

const struct test tests[] = {
    {"distill_windows", TEST_QUICK, 60000, test_distill_windows},
    {"distill_wordings", TEST_QUICK, 60000, test_distill_wordings},
    {0},
};
