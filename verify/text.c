/* The text side of a stream.
 *
 * Every byte that arrives goes through one small automaton per stop string, whose state is how many
 * of the stop's first bytes the text now ends in. The largest state is what must be held back; a
 * state that reaches its stop's length ends the answer. An incomplete UTF-8 tail can only be longer
 * than that while no stop has begun, since stops are valid UTF-8 and begin with a head byte; the
 * longer of the two is held. */
#include <string.h>

#include "base/err.h"
#include "base/utf8.h"
#include "verify/verify.h"

/* border[k]: length of the longest proper prefix of s[0..k] that is also its suffix. */
static void fill_border(uint8_t *border, const struct verify_stop *s) {
    int len = 0;
    border[0] = 0;
    for (int k = 1; k < s->n; k++) {
        while (len > 0 && s->text[k] != s->text[len]) len = border[len - 1];
        if (s->text[k] == s->text[len]) len++;
        border[k] = (uint8_t)len; /* < s->n <= 256 */
    }
}

int verify_text_init(struct verify_text *t, const struct tokenizer *tokenizer,
                     const struct verify_params *params, bool special, struct err *e) {
    memset(t, 0, sizeof *t);
    t->tokenizer = tokenizer;
    t->params = params;
    t->special = special;
    t->first = true;
    t->stop_idx = -1;
    for (int i = 0; i < params->n_stops; i++) fill_border(t->border[i], &params->stops[i]);
    size_t room = VERIFY_MAX_STOP_BYTES + VERIFY_MAX_TOKEN_BYTES;
    if (!strbuf_reserve(&t->held, room))
        return err_raise(e, E_NOMEM, "no %zu bytes for a stream's held text", room);
    return 0;
}

/* Advance stop i by one byte; true when the text now ends in the whole stop. */
static bool advance(struct verify_text *t, int i, char c) {
    const struct verify_stop *s = &t->params->stops[i];
    int k = t->n_matched[i];
    while (k > 0 && s->text[k] != c) k = t->border[i][k - 1];
    if (s->text[k] == c) k++;
    t->n_matched[i] = k;
    return k == s->n;
}

/* Release the first n held bytes. */
static void release(struct verify_text *t, size_t n, struct strbuf *sink) {
    if (sink) strbuf_append(sink, t->held.data, n);
    strbuf_consume(&t->held, n);
}

/* Let the held bytes from `from` on, which are new, run through the automata; release what may be
 * shown. */
static bool scan(struct verify_text *t, size_t from, struct strbuf *sink) {
    const struct verify_params *p = t->params;
    for (size_t at = from; at < t->held.n; at++) {
        for (int i = 0; i < p->n_stops; i++)
            if (advance(t, i, t->held.data[at]) &&
                (t->stop_idx < 0 || p->stops[i].n > p->stops[t->stop_idx].n))
                t->stop_idx = i;
        if (t->stop_idx >= 0) {
            t->stopped = true;
            release(t, at + 1 - (size_t)p->stops[t->stop_idx].n, sink);
            strbuf_clear(&t->held);
            return true;
        }
    }
    size_t hold = t->held.n - utf8_complete_prefix(t->held.data, t->held.n);
    for (int i = 0; i < p->n_stops; i++)
        if ((size_t)t->n_matched[i] > hold) hold = (size_t)t->n_matched[i];
    release(t, t->held.n - hold, sink);
    return false;
}

bool verify_text_push_bytes(struct verify_text *t, const char *bytes, size_t n,
                            struct strbuf *sink) {
    if (t->stopped || n == 0) return false;
    size_t from = t->held.n;
    strbuf_append(&t->held, bytes, n);
    return scan(t, from, sink);
}

bool verify_text_push(struct verify_text *t, int token, struct strbuf *sink) {
    if (t->stopped) return false;
    size_t from = t->held.n;
    int32_t id = token;
    tokenizer_token_bytes(t->tokenizer, token, t->special, &t->held);
    if (t->held.n == from) return false;
    if (t->first) { /* the first token with any text: SentencePiece's space goes, if only that was
                       there too */
        strbuf_clear(&t->held);
        tokenizer_decode(t->tokenizer, &id, 1, t->special, &t->held);
        t->first = false;
    }
    return scan(t, from, sink);
}

void verify_text_copy(struct verify_text *to, const struct verify_text *from) {
    struct strbuf held = to->held;
    ASSERT(to->params == from->params && to->special == from->special);
    *to = *from;
    to->held = held;
    strbuf_clear(&to->held);
    strbuf_append(&to->held, from->held.data, from->held.n);
}

void verify_text_finish(struct verify_text *t, struct strbuf *sink) {
    if (!t->stopped) release(t, t->held.n, sink);
    strbuf_clear(&t->held);
}

void verify_text_deinit(struct verify_text *t) {
    strbuf_deinit(&t->held);
}
