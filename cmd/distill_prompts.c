/* Prompts in which facts stand among filler, with one question after another at the end: about the
 * facts, and about how sentences of the filler itself go on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "cmd/distill.h"
#include "cmd/distill_words.h"

enum {
    TAIL_TOKENS = 300, /* more than a question, an answer and a frame have */
    FACT_TOKENS = 32,  /* of one, about */
    FEW_FACTS = 6,     /* of every second prompt */
    QUOTE_LEAST = 40,  /* bytes of a sentence whose end is asked for */
    QUOTE_REACH = 200, /* and how much longer it may be */
    MOST_QUOTES = TARGET_MAX_PLACES - DISTILL_MAX_FACTS,
    SNIPPET_LEAST = 16, /* tokens of an answer before a fact comes up in it */
    SNIPPET_MORE = 80,
    LATE_LEAD = 12, /* bytes that tell which fact it is */
};

/* What a prompt is made of. */
struct makings {
    const struct distill_frame *frame;
    int n_facts;  /* to be put in */
    int n_quotes; /* behind them in fact[]: sentences that are there */
    const struct distill_domain *domain;
    struct distill_dice *dice;
    struct distill_fact fact[TARGET_MAX_PLACES];
    struct strbuf filler, body;
};

/* ---- Sentences ---- */

/* The first end of a sentence or line in text[at..n), at most `reach` on; else the next blank. */
static size_t sentence_end(const char *text, size_t n, size_t at, size_t reach) {
    size_t end = at + reach < n ? at + reach : n;
    for (size_t i = at; i + 1 < end; i++)
        if (text[i] == '\n' ||
            ((text[i] == '.' || text[i] == '!' || text[i] == '?') && text[i + 1] == ' '))
            return i + 1;
    for (size_t i = at; i < end; i++)
        if (text[i] == ' ') return i;
    return end;
}

/* A frame with s[n] in the place of its %s. */
static void frame_quote(char *out, size_t size, const char *frame, const char *s, size_t n) {
    const char *slot = strstr(frame, "%s");
    snprintf(out, size, "%.*s%.*s%s", (int)(slot - frame), frame, (int)n, s, slot + 2);
}

/* A sentence of the filler of which the first part is quoted and the rest is the answer; false: not
 * there. */
static bool quote_at(struct distill_fact *f, const struct strbuf *filler, size_t at,
                     struct distill_dice *dice) {
    const char *text = filler->data;
    size_t n = filler->n, from = sentence_end(text, n, at, 2 * QUOTE_REACH);
    while (from < n && (text[from] == ' ' || text[from] == '\n')) from++;
    if (from + QUOTE_LEAST >= n) return false;
    size_t to = sentence_end(text, n, from + QUOTE_LEAST, QUOTE_REACH);
    while (to > from && (text[to - 1] == ' ' || text[to - 1] == '\n')) to--;
    size_t length = to - from;
    if (length < QUOTE_LEAST || length >= sizeof f->text || memchr(text + from, '\n', length) ||
        (to < n && ((unsigned char)text[to] & 0xc0) == 0x80))
        return false;
    size_t cut = length * (40 + distill_roll(dice, 25)) / 100;
    while (cut < length && text[from + cut] != ' ') cut++;
    if (cut + 8 > length) return false;
    *f = (struct distill_fact){.n_questions = 1};
    memcpy(f->text, text + from, length);
    frame_quote(f->question[0], sizeof f->question[0],
                distill_completions.at[distill_roll(dice, distill_completions.n)], text + from,
                cut);
    memcpy(f->answer[0], text + from + cut + 1, length - cut - 1);
    return true;
}

static void make_quotes(struct makings *m, int n, struct distill_dice *dice) {
    m->n_quotes = 0;
    for (int tries = 0; m->n_quotes < n && tries < 8 * n; tries++) {
        struct distill_fact *f = &m->fact[m->n_facts + m->n_quotes];
        m->n_quotes += quote_at(f, &m->filler, distill_roll(dice, (uint32_t)m->filler.n), dice);
    }
}

/* ---- The text ---- */

/* The filler with the facts in it, each somewhere in its share, behind a sentence: on the same line
 * or on one of its own. */
static void mix(struct makings *m, struct distill_dice *dice) {
    const struct strbuf *filler = &m->filler;
    size_t from = 0;
    strbuf_clear(&m->body);
    for (int i = 0; i < m->n_facts; i++) {
        double part = (i + (double)distill_roll(dice, 1000) / 1000) / m->n_facts;
        size_t to = sentence_end(filler->data, filler->n, (size_t)(part * (double)filler->n), 400);
        bool line = distill_roll(dice, 3) == 0;
        if (to < from) to = from;
        strbuf_append(&m->body, filler->data + from, to - from);
        strbuf_printf(&m->body, line ? "\n%s\n" : " %s ", m->fact[i].text);
        from = to;
    }
    strbuf_append(&m->body, filler->data + from, filler->n - from);
}

/* The prompt that asks: the model's chat template around it where there is one. */
static int render(struct tokens *out, const struct distill_texts *t, const struct distill_frame *f,
                  const char *body, size_t n, const char *question, struct err *e) {
    struct strbuf first = {0}, second = {0};
    strbuf_append_str(&first, f->head);
    strbuf_append(&first, body, n);
    struct strbuf *asks = f->reply ? &second : &first;
    strbuf_printf(asks, "%s%s%s", f->middle, question, f->end);
    int rc = first.failed || second.failed ? err_raise(e, E_NOMEM, "no memory for a prompt") : 0;
    struct chat_message m[3] = {{"user", first.data, first.n},
                                {"assistant", f->reply, f->reply ? strlen(f->reply) : 0},
                                {"user", second.data, second.n}};
    if (!rc && t->chat) rc = chat_render(t->chat, t->tokenizer, m, f->reply ? 3 : 1, true, out, e);
    if (!rc && !t->chat) {
        if (f->reply) strbuf_printf(&first, "\n\n%s\n\n%s", f->reply, second.data);
        strbuf_append_str(&first, "\n");
        rc = first.failed ? err_raise(e, E_NOMEM, "no memory for a prompt")
                          : tokenizer_encode(t->tokenizer, first.data, first.n,
                                             TOKENIZER_ADD_SPECIAL, out, e);
    }
    strbuf_deinit(&first);
    strbuf_deinit(&second);
    return rc;
}

/* ---- Questions ---- */

static size_t common_end(const struct tokens *a, const struct tokens *b) {
    size_t n = 0;
    while (n < a->n && n < b->n && a->ids[a->n - 1 - n] == b->ids[b->n - 1 - n]) n++;
    return n;
}

/* Where the common tokens' bytes are. */
struct byte_map {
    struct strbuf bytes;
    size_t *begin; /* [n_common + 1] */
};

static int map_bytes(struct byte_map *m, const struct distill_window *w,
                     const struct distill_texts *t, struct err *e) {
    m->begin = malloc(((size_t)w->n_common + 1) * sizeof *m->begin);
    for (int i = 0; m->begin && i < w->n_common; i++) {
        m->begin[i] = m->bytes.n;
        tokenizer_token_bytes(t->tokenizer, w->ids.ids[i], false, &m->bytes);
    }
    if (!m->begin || m->bytes.failed) return err_raise(e, E_NOMEM, "no memory for a prompt");
    m->begin[w->n_common] = m->bytes.n;
    return 0;
}

/* Tokens that hold any byte of the text; of none where it does not stand there as it is. */
static void mark(struct distill_place *p, const struct byte_map *m, int n_common,
                 const char *text) {
    size_t n = strlen(text);
    const char *at = m->bytes.n ? memmem(m->bytes.data, m->bytes.n, text, n) : NULL;
    if (!at || n == 0) return;
    size_t from = (size_t)(at - m->bytes.data);
    int first = 0;
    while (first < n_common && m->begin[first + 1] <= from) first++;
    int end = first;
    while (end < n_common && m->begin[end] < from + n) end++;
    p->mark_first = first;
    p->n_mark = end - first;
}

/* How a fact is come to. Selections are made at the end of a prompt, and inside an answer. */
enum way {
    ASKED,  /* the answer begins */
    INSIDE, /* the answer has come as far as the value */
    LATE,   /* nobody asks: an answer that goes on with the text comes to speak of it */
};

/* The way of the next question: of eight five, two and one. */
static enum way way_of(const struct distill_window *w, const struct distill_texts *t,
                       const struct distill_fact *f, int turn) {
    int n = t->inside ? w->n_places % 8 : 0;
    if (n == 7 && f->lead[turn] >= LATE_LEAD) return LATE;
    return (n == 2 || n == 5) && f->lead[turn] > 0 ? INSIDE : ASKED;
}

/* Tokens that end within the first `lead` bytes of a text. */
static int tokens_within(const struct distill_texts *t, const struct tokens *ids, int lead) {
    struct strbuf bytes = {0};
    int n = 0;
    for (; n < (int)ids->n; n++) {
        tokenizer_token_bytes(t->tokenizer, ids->ids[n], false, &bytes);
        if (bytes.failed || bytes.n > (size_t)lead) break;
    }
    strbuf_deinit(&bytes);
    return n;
}

/* Some of the domain's text, from the window's side. */
static int add_snippet(struct tokens *out, const struct makings *m, const struct distill_window *w,
                       struct err *e) {
    int n = SNIPPET_LEAST + (int)distill_roll(m->dice, SNIPPET_MORE);
    int at = distill_begin_at(m->domain, w->is_held_out, n, m->dice);
    return distill_append(out, m->domain->ids.ids + at, (size_t)n, e);
}

/* Move the answer's beginning from `answer` to the end of `tail`; returns its tokens. */
static int move_lead(struct tokens *tail, struct tokens *answer, const struct distill_texts *t,
                     int lead, struct err *e) {
    int n = tokens_within(t, answer, lead);
    if (distill_append(tail, answer->ids, (size_t)n, e) != 0) return -1;
    answer->n -= (size_t)n;
    memmove(answer->ids, answer->ids + n, answer->n * sizeof *answer->ids);
    return n;
}

/* Put the place's tail and what follows into tokens: `tail` has the question, `answer` its answer.
 */
static int add_place(struct distill_window *w, const struct distill_texts *t,
                     const struct tokens *tail, const struct tokens *answer, struct distill_place p,
                     struct err *e) {
    size_t n = answer->n < TARGET_TRACE_LOOK ? answer->n : TARGET_TRACE_LOOK;
    p.n_tail = (int)tail->n;
    p.n_tokens = w->n_common + p.n_tail;
    p.n_next = (int)n;
    if (n == 0 || p.n_tokens + TARGET_TRACE_LOOK > t->window) return 0;
    int rc = distill_append(&w->ids, tail->ids, tail->n, e);
    if (!rc) rc = distill_append(&w->ids, answer->ids, n, e);
    if (!rc) w->place[w->n_places++] = p;
    return rc;
}

/* Ask question `turn` of fact i, where it has one: its tokens are the end of a short prompt whose
 * beginning, head tokens, is as that of `brief`. A sentence that another fact was put into is none
 * of the text any more. */
static int ask(struct distill_window *w, const struct distill_texts *t, const struct makings *m,
               const struct byte_map *map, int i, int turn, const struct tokens *brief, size_t head,
               struct err *e) {
    const struct distill_fact *f = &m->fact[i];
    struct tokens own = {0}, answer = {0}, tail = {0};
    struct distill_place p = {0};
    if (turn >= f->n_questions) return 0;
    mark(&p, map, w->n_common, f->text);
    if (i >= m->n_facts && p.n_mark == 0) return 0;
    enum way way = way_of(w, t, f, turn);
    const char *question = f->question[turn], *says = f->answer[turn];
    if (way == LATE)
        question = distill_continuations.at[distill_roll(m->dice, distill_continuations.n)];
    int rc = render(&own, t, m->frame, "None.", 5, question, e);
    bool alike = !rc && own.n > head && !memcmp(own.ids, brief->ids, head * sizeof *own.ids);
    if (alike) {
        rc = distill_append(&tail, own.ids + head, own.n - head, e);
        if (!rc && way == LATE) rc = add_snippet(&tail, m, w, e);
        if (!rc && way == LATE) rc = tokenizer_encode(t->tokenizer, "\n\n", 2, 0, &tail, e);
        if (!rc) rc = tokenizer_encode(t->tokenizer, says, strlen(says), 0, &answer, e);
        if (!rc && way != ASKED) p.n_lead = move_lead(&tail, &answer, t, f->lead[turn], e);
        if (p.n_lead < 0) rc = E_NOMEM;
        if (!rc) rc = add_place(w, t, &tail, &answer, p, e);
    }
    tokens_deinit(&own);
    tokens_deinit(&answer);
    tokens_deinit(&tail);
    return rc;
}

/* The long prompt is put into tokens once; of the others only their ends, taken from short prompts
 * that end alike. First what is quoted and every fact once. */
static int ask_all(struct distill_window *w, const struct distill_texts *t, const struct makings *m,
                   struct err *e) {
    struct tokens whole = {0}, brief = {0};
    struct byte_map map = {0};
    int n_all = m->n_facts + m->n_quotes;
    int rc = render(&whole, t, m->frame, m->body.data, m->body.n, m->fact[0].question[0], e);
    if (!rc) rc = render(&brief, t, m->frame, "None.", 5, m->fact[0].question[0], e);
    size_t tail = common_end(&whole, &brief), head = brief.n - tail;
    w->n_common = (int)(whole.n - tail);
    if (!rc) rc = distill_append(&w->ids, whole.ids, whole.n - tail, e);
    if (!rc) rc = map_bytes(&map, w, t, e);
    for (int turn = 0; turn < DISTILL_QUESTIONS && !rc; turn++)
        for (int i = n_all; i-- > 0 && w->n_places < t->n_questions && !rc;)
            rc = ask(w, t, m, &map, i, turn, &brief, head, e);
    tokens_deinit(&whole);
    tokens_deinit(&brief);
    strbuf_deinit(&map.bytes);
    free(map.begin);
    return rc;
}

/* ---- Making ---- */

/* Half of the prompts have few facts, as what is asked for in life stands alone; in the others they
 * have each other to be told from. */
static void plan(struct makings *m, const struct distill_texts *t, const struct distill_window *w,
                 struct distill_dice *dice, int *n_quotes) {
    int most = t->n_questions < DISTILL_MAX_FACTS ? t->n_questions : DISTILL_MAX_FACTS;
    int few = most < FEW_FACTS ? most : FEW_FACTS;
    m->n_facts = 1 + (int)distill_roll(dice, (uint32_t)(distill_roll(dice, 2) ? few : most));
    *n_quotes = (t->n_questions + 3) / 4 < MOST_QUOTES ? (t->n_questions + 3) / 4 : MOST_QUOTES;
    m->domain = &t->domain[w->domain];
    m->dice = dice;
    m->frame = &distill_frames[distill_roll(dice, distill_n_frames)];
    distill_facts_make(m->fact, m->n_facts, t->seed, dice->window, w->is_held_out);
}

int distill_prompt_make(struct distill_window *w, const struct distill_texts *t,
                        struct distill_dice *dice, struct err *e) {
    const struct distill_domain *d = &t->domain[w->domain];
    struct makings *m = calloc(1, sizeof *m);
    if (!m) return err_raise(e, E_NOMEM, "no memory for a prompt");
    int n_quotes, rc = 0;
    plan(m, t, w, dice, &n_quotes);
    /* Between half a window and all of it, less what facts and questions take. */
    int n = t->window / 2 + (int)distill_roll(dice, (uint32_t)(t->window / 2));
    int least = t->window / 4, room = n - TAIL_TOKENS - FACT_TOKENS * m->n_facts;
    if (room < least) room = least;
    int first = distill_begin_at(d, w->is_held_out, room, dice);
    for (;;) {
        strbuf_clear(&m->filler);
        tokenizer_decode(t->tokenizer, d->ids.ids + first, (size_t)room, false, &m->filler);
        if (m->filler.n == 0 || m->filler.failed) {
            rc = err_raise(e, E_INVALID, "%s: tokens without text", d->name);
            break;
        }
        make_quotes(m, n_quotes, dice);
        mix(m, dice);
        w->n_places = 0;
        w->ids.n = 0;
        rc = m->body.failed ? err_raise(e, E_NOMEM, "no memory for a prompt") : ask_all(w, t, m, e);
        /* Filler may need more tokens in its new place than it had. */
        if (rc || w->n_places > 0 || room <= 64) break;
        room = room * 7 / 8;
    }
    strbuf_deinit(&m->filler);
    strbuf_deinit(&m->body);
    free(m);
    return rc;
}
