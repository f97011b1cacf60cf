/* Texts and the windows that are made of them: running text with places all along it, and prompts
 * in which facts stand among filler, with one question after another at the end. Window i is a pure
 * function of the texts, the seed and i. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/strbuf.h"
#include "cmd/distill.h"
#include "target/target.h"

enum { TEXT_LIMIT = 256 << 20, HELD_PERCENT = 15, TAIL_TOKENS = 200 };

/* ---- Domains ---- */

static void name_after(char out[64], const char *path) {
    const char *base = strrchr(path, '/');
    base = base ? base + 1 : path;
    size_t n = strcspn(base, ".");
    if (n == 0) n = strlen(base);
    if (n > 63) n = 63;
    memcpy(out, base, n);
    out[n] = 0;
}

int distill_texts_add(struct distill_texts *t, const char *path, struct err *e) {
    if (t->n_domains == DISTILL_MAX_DOMAINS)
        return err_raise(e, E_RANGE, "more than %d texts; %s is one too many", DISTILL_MAX_DOMAINS,
                         path);
    struct distill_domain *d = &t->domain[t->n_domains];
    struct file f;
    *d = (struct distill_domain){0};
    name_after(d->name, path);
    int rc = file_read(&f, path, TEXT_LIMIT, e);
    if (rc) return rc;
    rc = tokenizer_encode(t->tokenizer, (const char *)f.data, f.bytes, 0, &d->ids, e);
    file_close(&f);
    t->n_domains++;
    if (rc) return err_prefix(e, rc, "%s", path);
    if (d->ids.n > INT32_MAX) return err_raise(e, E_TOO_LONG, "%s: too many tokens", path);
    long long n = (long long)d->ids.n, held = n * HELD_PERCENT / 100;
    if (held < t->window) held = t->window;
    if (n - held < t->window)
        return err_raise(e, E_INVALID,
                         "%s is too short: %lld tokens, and a window of %d to train on and another "
                         "to hold out need %d; give a longer text or a smaller --window",
                         path, n, t->window, 2 * t->window);
    d->split = (int)(n - held);
    return 0;
}

void distill_texts_close(struct distill_texts *t) {
    for (int i = 0; i < t->n_domains; i++) tokens_deinit(&t->domain[i].ids);
    t->n_domains = 0;
}

uint64_t distill_texts_key(const struct distill_texts *t) {
    uint64_t h = tokenizer_fingerprint(t->tokenizer);
    int64_t how[] = {t->window,    t->n_places,  (int64_t)t->seed,
                     t->leave_out, t->n_domains, t->chat != NULL};
    h = XXH3_64bits_withSeed(how, sizeof how, h);
    for (int i = 0; i < t->n_domains; i++)
        h = XXH3_64bits_withSeed(t->domain[i].ids.ids, t->domain[i].ids.n * sizeof(int32_t), h);
    return h;
}

const char *distill_domain_name(const struct distill_texts *t, int domain) {
    return domain < t->n_domains ? t->domain[domain].name : "facts";
}

/* ---- Windows ---- */

struct dice {
    uint64_t seed;
    uint32_t window, n;
};
static uint32_t roll(struct dice *d, uint32_t below) {
    uint64_t at = ((uint64_t)2 << 32) + d->window;
    return below ? rng_u32(d->seed, at, RNG_TRAIN, d->n++) % below : 0;
}

static int append(struct tokens *out, const int32_t *ids, size_t n, struct err *e) {
    if (out->n + n > out->cap) {
        size_t cap = out->n + n + 256;
        int32_t *p = realloc(out->ids, cap * sizeof *p);
        if (!p) return err_raise(e, E_NOMEM, "no memory for a window of %zu tokens", cap);
        out->ids = p;
        out->cap = cap;
    }
    memcpy(out->ids + out->n, ids, n * sizeof *ids);
    out->n += n;
    return 0;
}

/* Where n tokens of a domain begin: on the side of its split that the window is on. */
static int begin_at(const struct distill_domain *d, bool held_out, int n, struct dice *dice) {
    int lo = held_out ? d->split : 0, hi = held_out ? (int)d->ids.n : d->split;
    return lo + (int)roll(dice, (uint32_t)(hi - lo - n + 1));
}

/* Blocks at which a text's places stand: one in each of n_places equal parts, two apart. */
static int make_text(struct distill_window *w, const struct distill_texts *t, struct dice *dice,
                     struct err *e) {
    const struct distill_domain *d = &t->domain[w->domain];
    int blocks = t->window / TARGET_BLOCK, least = blocks / 8 < 8 ? 8 : blocks / 8, before = 0;
    int rc = append(&w->ids, d->ids.ids + begin_at(d, w->is_held_out, t->window, dice),
                    (size_t)t->window, e);
    for (int i = 0; i < t->n_places; i++) {
        int lo = least + (blocks - least) * i / t->n_places;
        int hi = least + (blocks - least) * (i + 1) / t->n_places;
        int at = lo + (int)roll(dice, (uint32_t)(hi - lo));
        if (before && at < before + 2) at = before + 2;
        if (at >= blocks) break;
        w->place[w->n_places++] =
            (struct distill_place){.n_tokens = at * TARGET_BLOCK, .n_next = TARGET_TRACE_LOOK};
        before = at;
    }
    w->n_common = (int)w->ids.n;
    return rc;
}

/* ---- Prompts with facts ---- */

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

static void mix(struct strbuf *out, const struct strbuf *filler, const struct distill_fact *f,
                int n_facts, struct dice *dice) {
    size_t from = 0;
    for (int i = 0; i < n_facts; i++) {
        double part = (i + (double)roll(dice, 1000) / 1000) / n_facts;
        size_t to = sentence_end(filler->data, filler->n, (size_t)(part * (double)filler->n), 400);
        if (to < from) to = from;
        strbuf_append(out, filler->data + from, to - from);
        strbuf_printf(out, " %s ", f[i].text);
        from = to;
    }
    strbuf_append(out, filler->data + from, filler->n - from);
}

/* The prompt that asks: the model's chat template around it where there is one. */
static int render(struct tokens *out, const struct distill_texts *t, const char *body, size_t n,
                  const char *question, struct err *e) {
    struct strbuf text = {0};
    strbuf_printf(&text, "Read this and answer the question behind it.\n\n");
    strbuf_append(&text, body, n);
    strbuf_printf(&text, "\n\n%s", question);
    if (!t->chat) strbuf_printf(&text, "\n");
    int rc = text.failed ? err_raise(e, E_NOMEM, "no memory for a prompt") : 0;
    struct chat_message m = {"user", text.data, text.n};
    if (!rc)
        rc = t->chat
                 ? chat_render(t->chat, t->tokenizer, &m, 1, true, out, e)
                 : tokenizer_encode(t->tokenizer, text.data, text.n, TOKENIZER_ADD_SPECIAL, out, e);
    strbuf_deinit(&text);
    return rc;
}

static size_t common_end(const struct tokens *a, const struct tokens *b) {
    size_t n = 0;
    while (n < a->n && n < b->n && a->ids[a->n - 1 - n] == b->ids[b->n - 1 - n]) n++;
    return n;
}

/* A question's tokens behind the common ones, and its answer's. */
static int add_question(struct distill_window *w, const struct distill_texts *t,
                        const struct distill_fact *f, const int32_t *tail, size_t n_tail,
                        struct err *e) {
    struct tokens answer = {0};
    int rc = tokenizer_encode(t->tokenizer, f->answer, strlen(f->answer), 0, &answer, e);
    size_t n = answer.n < TARGET_TRACE_LOOK ? answer.n : TARGET_TRACE_LOOK;
    struct distill_place p = {
        .n_tokens = w->n_common + (int)n_tail, .n_tail = (int)n_tail, .n_next = (int)n};
    if (!rc) rc = append(&w->ids, tail, n_tail, e);
    if (!rc) rc = append(&w->ids, answer.ids, n, e);
    if (!rc && n > 0) w->place[w->n_places++] = p;
    tokens_deinit(&answer);
    return rc;
}

/* The long prompt is put into tokens once; of the others only their ends, taken from short prompts
 * that end alike. */
static int ask_all(struct distill_window *w, const struct distill_texts *t,
                   const struct strbuf *body, const struct distill_fact *f, int n_facts,
                   struct err *e) {
    struct tokens whole = {0}, brief = {0};
    int rc = render(&whole, t, body->data, body->n, f[0].question, e);
    if (!rc) rc = render(&brief, t, "None.", 5, f[0].question, e);
    size_t tail = common_end(&whole, &brief), head = brief.n - tail;
    w->n_common = (int)(whole.n - tail);
    if (!rc) rc = append(&w->ids, whole.ids, whole.n - tail, e);
    for (int i = 0; i < n_facts && i < t->n_places && !rc; i++) {
        struct tokens other = {0};
        rc = render(&other, t, "None.", 5, f[i].question, e);
        bool alike =
            !rc && other.n > head && memcmp(other.ids, brief.ids, head * sizeof *brief.ids) == 0;
        if (alike && (int)(other.n - head) + w->n_common + TARGET_TRACE_LOOK <= t->window)
            rc = add_question(w, t, &f[i], other.ids + head, other.n - head, e);
        tokens_deinit(&other);
    }
    tokens_deinit(&whole);
    tokens_deinit(&brief);
    return rc;
}

static int make_facts(struct distill_window *w, const struct distill_texts *t, struct dice *dice,
                      struct err *e) {
    const struct distill_domain *d = &t->domain[w->domain];
    struct distill_fact f[DISTILL_MAX_FACTS];
    struct strbuf filler = {0}, body = {0};
    int n_facts = 6 + (int)roll(dice, DISTILL_MAX_FACTS - 5), rc = 0;
    if (n_facts < t->n_places)
        n_facts = t->n_places < DISTILL_MAX_FACTS ? t->n_places : DISTILL_MAX_FACTS;
    /* Between half a window and all of it, less what facts and questions take. */
    int n = t->window / 2 + (int)roll(dice, (uint32_t)(t->window / 2));
    int least = t->window / 4, room = n - TAIL_TOKENS - 25 * n_facts;
    if (room < least) room = least;
    int first = begin_at(d, w->is_held_out, room, dice);
    distill_facts_make(f, n_facts, t->seed, dice->window);
    for (;;) {
        strbuf_clear(&filler);
        strbuf_clear(&body);
        tokenizer_decode(t->tokenizer, d->ids.ids + first, (size_t)room, false, &filler);
        if (filler.n == 0 || filler.failed) {
            rc = err_raise(e, E_INVALID, "%s: tokens without text", d->name);
            break;
        }
        mix(&body, &filler, f, n_facts, dice);
        w->n_places = 0;
        w->ids.n = 0;
        rc = body.failed ? err_raise(e, E_NOMEM, "no memory for a prompt")
                         : ask_all(w, t, &body, f, n_facts, e);
        /* Filler may need more tokens in its new place than it had. */
        if (rc || w->n_places > 0 || room <= 64) break;
        room = room * 7 / 8;
    }
    strbuf_deinit(&filler);
    strbuf_deinit(&body);
    return rc;
}

/* Pointers into the tokens, which stay where they are now. */
static void point(struct distill_window *w) {
    const int32_t *at = w->ids.ids + w->n_common;
    for (int i = 0; i < w->n_places; i++) {
        struct distill_place *p = &w->place[i];
        if (!w->is_facts) {
            p->next = w->ids.ids + p->n_tokens;
            continue;
        }
        p->tail = at;
        p->next = at + p->n_tail;
        at = p->next + p->n_next;
    }
}

int distill_window_make(struct distill_window *w, const struct distill_texts *t, int i,
                        struct err *e) {
    struct dice dice = {.seed = t->seed, .window = (uint32_t)i};
    int of_kind = i / 2, turn = of_kind / t->n_domains;
    *w = (struct distill_window){.domain = of_kind % t->n_domains, .is_facts = i % 2 == 1};
    w->is_held_out = turn % DISTILL_HOLD == 1 || w->domain == t->leave_out;
    int rc = w->is_facts ? make_facts(w, t, &dice, e) : make_text(w, t, &dice, e);
    if (rc) {
        distill_window_deinit(w);
        return rc;
    }
    point(w);
    if (w->is_facts) w->domain = t->n_domains;
    return 0;
}

void distill_window_deinit(struct distill_window *w) {
    tokens_deinit(&w->ids);
}
