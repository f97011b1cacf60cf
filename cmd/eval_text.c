#include "cmd/eval_text.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"

enum { TEXT_LIMIT = 256 << 20 };

/* ---- The texts in the program ---- */

/* The files as bytes of the program, so that it needs none beside it; build.ninja knows that this
 * object depends on them. */
#define SHIPPED(what)                                                                              \
    __asm__(".section .rodata\n"                                                                   \
            ".global tandem_eval_text_" #what "\n"                                                 \
            ".global tandem_eval_text_" #what "_end\n"                                             \
            "tandem_eval_text_" #what ":\n"                                                        \
            ".incbin \"bench/texts/" #what ".txt\"\n"                                              \
            "tandem_eval_text_" #what "_end:\n"                                                    \
            ".byte 0\n"                                                                            \
            ".previous\n");                                                                        \
    extern const char tandem_eval_text_##what[], tandem_eval_text_##what##_end[]
SHIPPED(code);
SHIPPED(dialogue);
SHIPPED(fiction);
SHIPPED(news);
SHIPPED(technical);

#define ENTRY(what)                                                                                \
    { #what, tandem_eval_text_##what, tandem_eval_text_##what##_end }

int eval_texts_shipped(struct eval_texts *out, const struct tokenizer *t, struct err *e) {
    static const struct {
        const char *name, *begin, *end;
    } texts[] = {ENTRY(code), ENTRY(dialogue), ENTRY(fiction), ENTRY(news), ENTRY(technical)};
    int rc = 0;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0] && !rc; i++)
        rc = eval_texts_add(out, texts[i].name, texts[i].begin,
                            (size_t)(texts[i].end - texts[i].begin), t, e);
    return rc;
}

/* ---- Reading ---- */

int eval_texts_add(struct eval_texts *out, const char *name, const char *text, size_t n,
                   const struct tokenizer *t, struct err *e) {
    if (out->n == EVAL_MAX_TEXTS)
        return err_raise(e, E_RANGE, "more than %d texts, '%s' is one too many", EVAL_MAX_TEXTS,
                         name);
    struct eval_text *v = &out->at[out->n];
    *v = (struct eval_text){0};
    size_t n_name = strlen(name);
    if (n_name >= sizeof v->name) n_name = sizeof v->name - 1;
    memcpy(v->name, name, n_name);
    int rc = tokenizer_encode(t, text, n, 0, &v->ids, e);
    if (!rc && !(v->begin = malloc(sizeof *v->begin * (v->ids.n + 1)))) rc = E_NOMEM;
    for (size_t i = 0; !rc && i < v->ids.n; i++) {
        v->begin[i] = v->bytes.n;
        tokenizer_token_bytes(t, v->ids.ids[i], false, &v->bytes);
    }
    if (!rc) v->begin[v->ids.n] = v->bytes.n;
    if (!rc && v->bytes.failed) rc = E_NOMEM;
    out->n++; /* closed with the others in any case */
    if (rc == E_NOMEM) return err_raise(e, E_NOMEM, "no memory for the text '%s'", name);
    return rc;
}

int eval_texts_files(struct eval_texts *out, const char *paths, const struct tokenizer *t,
                     struct err *e) {
    char path[4096];
    for (const char *p = paths; *p;) {
        size_t n = strcspn(p, ",");
        if (n == 0 || n >= sizeof path)
            return err_raise(e, E_INVALID, "'%s' is no list of files with commas between", paths);
        memcpy(path, p, n);
        path[n] = 0;
        struct file f;
        int rc = file_read(&f, path, TEXT_LIMIT, e);
        if (rc) return rc;
        const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        rc = eval_texts_add(out, name, (const char *)f.data, f.bytes, t, e);
        file_close(&f);
        if (rc) return rc;
        p += n + (p[n] == ',');
    }
    return 0;
}

static void text_close(struct eval_text *v) {
    strbuf_deinit(&v->bytes);
    tokens_deinit(&v->ids);
    free(v->begin);
    *v = (struct eval_text){0};
}

void eval_texts_close(struct eval_texts *v) {
    for (int i = 0; i < v->n; i++) text_close(&v->at[i]);
    v->n = 0;
}

int eval_texts_drop_short(struct eval_texts *v, int need, int *n_dropped, struct err *e) {
    int n = 0, longest = 0;
    for (int i = 1; i < v->n; i++)
        if (v->at[i].ids.n > v->at[longest].ids.n) longest = i;
    if (v->n == 0) return err_raise(e, E_INVALID, "no text");
    if (v->at[longest].ids.n < (size_t)need)
        return err_raise(e, E_INVALID,
                         "%d tokens of text are needed, the longest text ('%s') has %zu: give a "
                         "longer one or ask for shorter contexts",
                         need, v->at[longest].name, v->at[longest].ids.n);
    for (int i = 0; i < v->n; i++) {
        if (v->at[i].ids.n >= (size_t)need) v->at[n++] = v->at[i];
        else text_close(&v->at[i]);
    }
    *n_dropped = v->n - n;
    v->n = n;
    return 0;
}

int eval_text_place(const struct eval_text *v, int n, uint64_t seed, uint32_t index) {
    uint32_t room = (uint32_t)v->ids.n - (uint32_t)n + 1;
    ASSERT((size_t)n <= v->ids.n);
    return (int)(rng_u32(seed, index, RNG_EVAL, 2000) % room);
}

/* ---- Prompts ---- */

int eval_speech_user(const struct eval_speech *s, const char *text, size_t n, struct tokens *out,
                     struct err *e) {
    if (!s->chat) return tokenizer_encode(s->tokenizer, text, n, TOKENIZER_ADD_SPECIAL, out, e);
    struct chat_message m = {"user", text, n};
    return chat_render(s->chat, s->tokenizer, &m, 1, true, out, e);
}

/* Where a sentence may be put at or shortly behind byte `at`: after the end of one, else between
 * words, else right there. */
static size_t between_sentences(const char *s, size_t n, size_t at) {
    enum { FAR = 400 };
    size_t end = n - at > FAR ? at + FAR : n;
    for (size_t i = at; i + 1 < end; i++)
        if ((strchr(".!?", s[i]) && isspace((unsigned char)s[i + 1])) ||
            (s[i] == '\n' && s[i + 1] == '\n'))
            return i + 1;
    for (size_t i = at; i < end; i++)
        if (isspace((unsigned char)s[i])) return i;
    return at;
}

/* text[0..n) with the facts at their depths, what will be or is asked behind it. */
static void write_content(const char *text, size_t n, const struct eval_needle *needle,
                          struct strbuf *out) {
    bool done[EVAL_NEEDLE_FACTS] = {0};
    size_t from = 0;
    strbuf_clear(out);
    /* Small models go on with a text that they were not told the end of. */
    strbuf_append_str(out, "Read this text. A question about it follows.\n\n---\n");
    for (int k = 0; k < needle->n_facts; k++) {
        int next = -1;
        for (int i = 0; i < needle->n_facts; i++)
            if (!done[i] && (next < 0 || needle->fact[i].depth < needle->fact[next].depth))
                next = i;
        done[next] = true;
        size_t at = between_sentences(text, n, (size_t)(needle->fact[next].depth * (double)n));
        if (at > n) at = n;
        if (at < from) at = from;
        strbuf_append(out, text + from, at - from);
        strbuf_append_char(out, ' ');
        strbuf_append_str(out, needle->fact[next].text);
        from = at;
    }
    strbuf_append(out, text + from, n - from);
    if (needle->kind == EVAL_NEEDLE_LATE)
        strbuf_append_str(out,
                          "\n\n---\n\nGo on with the text above in the same manner. A question "
                          "about it comes later.");
    else strbuf_printf(out, "\n\n---\n\nAccording to the text above: %s", needle->question);
}

int eval_prompt_needle(const struct eval_speech *s, const struct eval_text *v, int first,
                       const struct eval_needle *needle, int n_tokens, struct tokens *out,
                       int *n_used, struct err *e) {
    struct strbuf content = {0};
    size_t before = out->n;
    int rc = 0, n = (int)(v->ids.n - (size_t)first);
    n = n < n_tokens ? n : n_tokens;
    /* What is too much is taken from the text's end; cutting elsewhere moves borders of tokens, so
     * a second or third look is needed. */
    for (int turn = 0; turn < 8; turn++) {
        out->n = before;
        size_t from = v->begin[first], to = v->begin[first + n];
        write_content(v->bytes.data + from, to - from, needle, &content);
        rc = content.failed ? err_raise(e, E_NOMEM, "no memory for a prompt")
                            : eval_speech_user(s, content.data, content.n, out, e);
        int over = (int)(out->n - before) - n_tokens;
        if (rc || (over <= 0 && (over > -8 || turn >= 3 || first + n == (int)v->ids.n))) break;
        n -= over > 0 ? over : over + 4;
        if (first + n > (int)v->ids.n) n = (int)v->ids.n - first;
        if (n < 1) {
            rc = err_raise(e, E_INVALID,
                           "a prompt of %d tokens has no room for a question and %d facts",
                           n_tokens, needle->n_facts);
            break;
        }
    }
    if (!rc && (int)(out->n - before) > n_tokens)
        rc = err_raise(e, E_INVALID, "the text '%s' cannot be cut to %d tokens", v->name, n_tokens);
    strbuf_deinit(&content);
    if (n_used) *n_used = n;
    return rc;
}
