/* Texts and the windows that are made of them: running text with places all along it, and prompts
 * with facts (distill_prompts.c). Window i is a pure function of the texts, the seed and i. */
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

enum { TEXT_LIMIT = 256 << 20, HELD_PERCENT = 15 };

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
    int64_t how[] = {t->window,    t->n_places,     t->n_questions, (int64_t)t->seed,
                     t->n_domains, t->chat != NULL, t->inside};
    h = XXH3_64bits_withSeed(how, sizeof how, h);
    for (int i = 0; i < t->n_domains; i++)
        h = XXH3_64bits_withSeed(t->domain[i].ids.ids, t->domain[i].ids.n * sizeof(int32_t), h);
    return h;
}

const char *distill_domain_name(const struct distill_texts *t, int domain) {
    return domain < t->n_domains ? t->domain[domain].name : "facts";
}

/* ---- Windows ---- */

uint32_t distill_roll(struct distill_dice *d, uint32_t below) {
    uint64_t at = ((uint64_t)2 << 32) + d->window;
    return below ? rng_u32(d->seed, at, RNG_TRAIN, d->n++) % below : 0;
}

int distill_append(struct tokens *out, const int32_t *ids, size_t n, struct err *e) {
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

int distill_begin_at(const struct distill_domain *d, bool held_out, int n,
                     struct distill_dice *dice) {
    int lo = held_out ? d->split : 0, hi = held_out ? (int)d->ids.n : d->split;
    return lo + (int)distill_roll(dice, (uint32_t)(hi - lo - n + 1));
}

/* Blocks at which a text's places stand: one in each of n_places equal parts, two apart. */
static int make_text(struct distill_window *w, const struct distill_texts *t,
                     struct distill_dice *dice, struct err *e) {
    const struct distill_domain *d = &t->domain[w->domain];
    int blocks = t->window / TARGET_BLOCK, least = blocks / 8 < 8 ? 8 : blocks / 8, before = 0;
    int rc =
        distill_append(&w->ids, d->ids.ids + distill_begin_at(d, w->is_held_out, t->window, dice),
                       (size_t)t->window, e);
    for (int i = 0; i < t->n_places; i++) {
        int lo = least + (blocks - least) * i / t->n_places;
        int hi = least + (blocks - least) * (i + 1) / t->n_places;
        int at = lo + (int)distill_roll(dice, (uint32_t)(hi - lo));
        if (before && at < before + 2) at = before + 2;
        if (at >= blocks) break;
        w->place[w->n_places++] =
            (struct distill_place){.n_tokens = at * TARGET_BLOCK, .n_next = TARGET_TRACE_LOOK};
        before = at;
    }
    w->n_common = (int)w->ids.n;
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
    struct distill_dice dice = {.seed = t->seed, .window = (uint32_t)i};
    int of_kind = i / 2, turn = of_kind / t->n_domains;
    *w = (struct distill_window){.domain = of_kind % t->n_domains, .is_facts = i % 2 == 1};
    w->source = w->domain;
    w->is_held_out = turn % DISTILL_HOLD == 1;
    int rc = w->is_facts ? distill_prompt_make(w, t, &dice, e) : make_text(w, t, &dice, e);
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
