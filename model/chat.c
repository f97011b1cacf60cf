/* Which family a template belongs to, and how its marks and texts become ids. */
#include "model/chat.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "model/chat_private.h"

/* ---- recognition ---- */

const char *chat_family_name(const struct chat_family *f) {
    return f->name;
}

static void known_names(char *buf, size_t n) {
    size_t at = 0;
    buf[0] = 0;
    for (const struct chat_family *f = chat_families; f->name && at < n; f++)
        at += (size_t)snprintf(buf + at, n - at, "%s%s", at ? ", " : "", f->name);
}

int chat_family_find(const struct chat_family **out, const char *name, struct err *e) {
    for (const struct chat_family *f = chat_families; f->name; f++) {
        if (strcmp(f->name, name) != 0) continue;
        *out = f;
        return 0;
    }
    char names[500];
    known_names(names, sizeof names);
    return err_raise(e, E_NOT_FOUND, "no chat template '%.100s' (known: %s)", name, names);
}

struct template {
    const char *s;
    size_t n;
};

static const char *find(struct template t, const char *mark) {
    return memmem(t.s, t.n, mark, strlen(mark));
}

/* Does the template hold this text? */
static bool has(struct template t, const char *mark) {
    return find(t, mark) != NULL;
}

/* The default system message in a ChatML template: the literal text between its "system" line and
 * its end mark. The line's end is an escape or a real newline. */
static struct chat_span default_system(struct template t, bool *found) {
    static const char opening[] = "<|im_start|>system";
    struct template rest = t;
    const char *at;
    *found = false;
    while ((at = find(rest, opening)) != NULL) {
        const char *begin = at + sizeof opening - 1;
        rest = (struct template){begin, (size_t)(t.s + t.n - begin)};
        size_t newline = rest.n && *begin == '\n'                 ? 1
                         : rest.n > 1 && !memcmp(begin, "\\n", 2) ? 2
                                                                  : 0;
        begin += newline;
        const char *end = find(rest, "<|im_end|>");
        /* A quote right behind means that the message's own content follows. */
        if (!newline || !end || begin >= end || *begin == '\'' || *begin == '"') continue;
        *found = true;
        return (struct chat_span){begin, (size_t)(end - begin)};
    }
    return (struct chat_span){NULL, 0};
}

static const char *detect_chatml(struct template t, const char **why) {
    static const char *const foreign[] = {"<|im_sep|>",       "<|im_middle|>", "<end_of_utterance>",
                                          "<|vision_start|>", "<function=",    "[gMASK]"};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        if (!has(t, foreign[i])) continue;
        *why = foreign[i];
        return NULL;
    }
    if (has(t, "## Metadata") && has(t, "Reasoning Mode: "))
        return has(t, "Today Date: ") ? "smollm3" : "smollm3-undated";
    if (has(t, "enable_thinking") && has(t, "reasoning_content") && has(t, "last_query_index") &&
        has(t, "multi_step_tool") && !has(t, "bos_token"))
        return "qwen3";
    if (has(t, "<think>")) {
        *why = "<think> in a form that no known family has";
        return NULL;
    }
    bool found;
    struct chat_span system = default_system(t, &found);
    if (!found) return has(t, "bos_token") ? "chatml-bos" : "chatml";
    for (const struct chat_family *f = chat_families; f->name; f++)
        if (f->default_system && strlen(f->default_system) == system.n &&
            memcmp(f->default_system, system.s, system.n) == 0)
            return f->name;
    *why = "ChatML with an unknown default system message";
    return NULL;
}

static const char *detect_inst(struct template t, const char **why) {
    if (has(t, "default_system_message")) {
        *why = "[INST] with a default system message";
        return NULL;
    }
    if (has(t, "[SYSTEM_PROMPT]"))
        return has(t, "'[SYSTEM_PROMPT] '") && has(t, "'[INST] '") ? "mistral-v7"
                                                                   : "mistral-v7-tekken";
    if (has(t, "[AVAILABLE_TOOLS]")) {
        if (has(t, "\"[INST]\"")) return "mistral-v3-tekken";
        if (has(t, "\"[INST] \"")) return "mistral-v3";
    }
    if (has(t, "' [INST] ' + system_message")) return "mistral-v1";
    if (has(t, "<<SYS>>") && has(t, "bos_token + '[INST] ' + content.strip() + ' [/INST]'") &&
        has(t, "' '  + content.strip() + ' ' + eos_token"))
        return "llama2";
    if (!has(t, "<<SYS>>") && has(t, "'[INST] ' + message['content'] + ' [/INST]'") &&
        has(t, "message['content'] + eos_token"))
        return "mistral-v0";
    *why = "[INST] in a form that no known family has";
    return NULL;
}

static const char *detect_llama3(struct template t, const char **why) {
    static const char *const foreign[] = {"functools", ">>>", "<function=", "<think>", "recipient"};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        if (!has(t, foreign[i])) continue;
        *why = foreign[i];
        return NULL;
    }
    if (has(t, "Cutting Knowledge Date: December 2023\\n\" }}") && has(t, "26 Jul 2024"))
        return "llama3.1";
    if (has(t, "message['content'] | trim + '<|eot_id|>'") && !has(t, "tools")) return "llama3";
    *why = "<|start_header_id|> in a form that no known family has";
    return NULL;
}

int chat_family_detect(const struct chat_family **out, const char *template_text, size_t n,
                       struct err *e) {
    struct template t = {template_text, n};
    const char *name = NULL, *why = "no known mark";
    if (has(t, "<|im_start|>")) name = detect_chatml(t, &why);
    else if (has(t, "[INST]")) name = detect_inst(t, &why);
    else if (has(t, "<|start_header_id|>") && has(t, "<|end_header_id|>") && has(t, "<|eot_id|>"))
        name = detect_llama3(t, &why);
    if (name) return chat_family_find(out, name, e);
    char names[500];
    known_names(names, sizeof names);
    return err_raise(
        e, E_UNSUPPORTED,
        "the chat template is of no known family: %s (known: %s); --chat-template forces "
        "one, raw prompts go on working",
        why, names);
}

/* ---- writing ---- */

static void flush(struct chat_writer *w) {
    if (w->rc || w->text.n == 0) return;
    if (w->text.failed) {
        w->rc = err_raise(w->e, E_NOMEM, "chat text of %zu bytes", w->text.n);
        return;
    }
    w->rc = tokenizer_encode(w->t, w->text.data, w->text.n, w->any ? TOKENIZER__CONTINUES : 0,
                             w->out, w->e);
    w->any = true;
    strbuf_clear(&w->text);
}

static void push(struct chat_writer *w, int id) {
    flush(w);
    if (w->rc) return;
    w->rc = tokenizer__push(w->out, id, w->e);
    w->any = true;
}

void chat_text(struct chat_writer *w, const char *s) {
    strbuf_append_str(&w->text, s);
}

void chat_span(struct chat_writer *w, struct chat_span s) {
    strbuf_append(&w->text, s.s, s.n);
}

void chat_mark(struct chat_writer *w, const char *name) {
    int id = vocab_find_special(&w->t->vocab, name, strlen(name));
    if (id >= 0) push(w, id);
    else if (!w->rc)
        w->rc = err_raise(w->e, E_UNSUPPORTED,
                          "chat template %s needs the token '%s', which the "
                          "tokenizer lacks",
                          w->family->name, name);
}

void chat_mark_or_text(struct chat_writer *w, const char *name) {
    int id = vocab_find_special(&w->t->vocab, name, strlen(name));
    if (id >= 0) push(w, id);
    else chat_text(w, name);
}

static void push_named(struct chat_writer *w, int id, const char *what) {
    if (id >= 0) push(w, id);
    else if (!w->rc)
        w->rc = err_raise(w->e, E_UNSUPPORTED,
                          "chat template %s needs a %s token, which the tokenizer "
                          "lacks",
                          w->family->name, what);
}

void chat_bos(struct chat_writer *w) {
    push_named(w, w->t->bos, "bos");
}
void chat_eos(struct chat_writer *w) {
    push_named(w, w->t->eos, "eos");
}

void chat_invalid(struct chat_writer *w, const char *fmt, ...) {
    char text[300];
    va_list args;
    if (w->rc) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    w->rc = err_raise(w->e, E_INVALID, "chat template %s: %s", w->family->name, text);
}

bool chat_role_is(const struct chat_message *m, const char *role) {
    return strcmp(m->role, role) == 0;
}

struct chat_span chat_content(const struct chat_message *m) {
    return (struct chat_span){m->content, m->content_bytes};
}

/* Python strips what Unicode calls White_Space and the four separators of ASCII. */
static size_t space_at(const char *s, size_t n) {
    if (n && *s >= 0x1c && *s <= 0x1f) return 1;
    return added_space_at(s, n);
}

struct chat_span chat_trim(struct chat_span s) {
    size_t len;
    while ((len = space_at(s.s, s.n)) > 0) {
        s.s += len;
        s.n -= len;
    }
    while (s.n > 0) {
        size_t start = s.n - 1;
        while (start > 0 && ((unsigned char)s.s[start] & 0xc0) == 0x80) start--;
        if (space_at(s.s + start, s.n - start) != s.n - start) break;
        s.n = start;
    }
    return s;
}

int chat_render(const struct chat_family *f, const struct tokenizer *t,
                const struct chat_message *messages, size_t n_messages, bool add_generation_prompt,
                struct tokens *out, struct err *e) {
    struct chat_writer w = {.family = f, .t = t, .out = out, .e = e};
    size_t before = out->n;
    if (n_messages == 0) chat_invalid(&w, "there is no message");
    if (!w.rc) f->render(&w, messages, n_messages, add_generation_prompt);
    flush(&w);
    strbuf_deinit(&w.text);
    if (w.rc) out->n = before; /* nothing rather than half a conversation */
    return w.rc;
}
