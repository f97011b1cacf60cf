#include "cmd/bench_prompts.h"

#include <string.h>

#include "base/err.h"
#include "base/file.h"
#include "cmd/eval_text.h"
#include "engine/engine.h"

enum { TEXT_LIMIT = 64 << 20, MOST_TOKEN_BYTES = 16 };

const struct bench_question bench_questions[] = {
    {"summary", "Summarize the text above in five sentences."},
    {"extract", "List the people who are named in the text above, one a line, each with what the "
                "text says of them."},
    {"continue", "Write the next two paragraphs of the text above, in its own style."},
    {"quote", "Repeat the last paragraph of the text above word for word."},
    {0},
};

bool bench_question_exists(const char *name) {
    for (int i = 0; bench_questions[i].name; i++)
        if (!strcmp(bench_questions[i].name, name)) return true;
    return false;
}

/* ---- Text ---- */

static int read_text(struct strbuf *out, const char *path, struct err *e) {
    struct file f;
    int rc = file_read(&f, path, TEXT_LIMIT, e);
    if (rc)
        return err_prefix(e, rc,
                          "--text is no shipped text (code, dialogue, fiction, news, "
                          "technical)");
    strbuf_append(out, f.data, f.bytes);
    file_close(&f);
    if (!out->failed && strspn(out->n ? out->data : "", " \t\r\n") == out->n)
        return err_raise(e, E_INVALID, "--text: %s holds no text", path);
    return 0;
}

int bench_text(struct strbuf *out, const char *name, const struct tokenizer *t, struct err *e) {
    static struct eval_texts shipped;
    int rc = eval_texts_shipped(&shipped, t, e), n_taken = 0;
    out->limit = TEXT_LIMIT;
    for (int i = 0; i < shipped.n && !rc; i++) {
        if (name && strcmp(name, shipped.at[i].name) != 0) continue;
        strbuf_append(out, shipped.at[i].bytes.data, shipped.at[i].bytes.n);
        strbuf_append_char(out, '\n');
        n_taken++;
    }
    eval_texts_close(&shipped);
    if (!rc && n_taken == 0) rc = read_text(out, name, e);
    if (!rc && out->failed) rc = err_raise(e, E_NOMEM, "no memory for the prompts' text");
    return rc;
}

/* ---- A prompt ---- */

/* Content of the message: n bytes of the text from `start` on, round its end, cut back to a blank,
 * then the question. */
static void fill(struct strbuf *out, const struct strbuf *text, size_t start, size_t n,
                 const char *question) {
    strbuf_clear(out);
    for (size_t at = start; n > 0;) {
        size_t part = text->n - at < n ? text->n - at : n;
        strbuf_append(out, text->data + at, part);
        n -= part;
        at = 0;
    }
    size_t cut = out->n;
    while (cut > 0 && out->data[cut - 1] != ' ' && out->data[cut - 1] != '\n') cut--;
    while (cut > 0 && (out->data[cut - 1] == ' ' || out->data[cut - 1] == '\n')) cut--;
    if (cut > 0) out->data[out->n = cut] = 0;
    if (out->n) strbuf_append_str(out, "\n\n");
    strbuf_append_str(out, question);
}

static int encode(struct tokens *out, const struct engine *g, const struct strbuf *content,
                  struct err *e) {
    struct chat_message m = {.role = "user", .content = content->data, .content_bytes = content->n};
    out->n = 0;
    if (content->failed) return err_raise(e, E_NOMEM, "no memory for a prompt");
    if (engine_chat(g))
        return chat_render(engine_chat(g), engine_tokenizer(g), &m, 1, true, out, e);
    return tokenizer_encode(engine_tokenizer(g), content->data, content->n, TOKENIZER_ADD_SPECIAL,
                            out, e);
}

/* Beginning of the line that byte `start` is in, so that no character is cut. */
static size_t line_start(const struct strbuf *text, size_t start) {
    start %= text->n;
    while (start > 0 && text->data[start - 1] != '\n') start--;
    return start;
}

int bench_prompt(struct tokens *out, const struct engine *g, const struct strbuf *text,
                 size_t start, const struct bench_question *q, int n_tokens, bool *repeats,
                 struct err *e) {
    struct strbuf content = {0};
    fill(&content, text, 0, 0, q->text);
    int rc = encode(out, g, &content, e);
    if (!rc && out->n > (size_t)n_tokens)
        rc = err_raise(e, E_RANGE,
                       "a prompt of %d tokens has no room for the question \"%s\" (%zu tokens)",
                       n_tokens, q->name, out->n);
    start = line_start(text, start);
    /* The longest stretch that is not too long: bytes are searched, tokens decide. */
    size_t fits = 0, too_many = (size_t)n_tokens * MOST_TOKEN_BYTES + 1;
    while (!rc && too_many - fits > 1) {
        size_t n = fits + (too_many - fits) / 2;
        fill(&content, text, start, n, q->text);
        rc = encode(out, g, &content, e);
        if (out->n > (size_t)n_tokens) too_many = n;
        else fits = n;
    }
    fill(&content, text, start, fits, q->text);
    if (!rc) rc = encode(out, g, &content, e);
    *repeats |= fits > text->n;
    strbuf_deinit(&content);
    return rc;
}
