/* What each family writes around messages. Sources: the chat templates that the models are
 * published with; checked against Jinja2's rendering of them (tests/golden/make_chat.py). Where a
 * template asks for today's date and has a fixed fallback, the fallback is written, so that a
 * prompt depends on its messages alone; SmolLM3's has none. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "model/chat_private.h"

/* Role in front, else E_INVALID: a role is text that the renderer writes itself. */
static bool known_role(struct chat_writer *w, const struct chat_message *m, size_t idx, bool tool) {
    if (chat_role_is(m, "system") || chat_role_is(m, "user") || chat_role_is(m, "assistant") ||
        (tool && chat_role_is(m, "tool")))
        return true;
    chat_invalid(w, "message %zu has role '%.40s'", idx, m->role);
    return false;
}

/* [system] then user, assistant, user, ...: index of the first message behind the system's. */
static size_t check_turns(struct chat_writer *w, const struct chat_message *m, size_t n) {
    size_t first = chat_role_is(m, "system") ? 1 : 0;
    for (size_t i = first; i < n; i++) {
        const char *want = (i - first) % 2 == 0 ? "user" : "assistant";
        if (chat_role_is(&m[i], want)) continue;
        chat_invalid(w,
                     "message %zu has role '%.40s' where '%s' belongs: roles alternate after an "
                     "optional system message",
                     i, m[i].role, want);
        break;
    }
    if (first == n) chat_invalid(w, "there is no user message");
    return first;
}

/* ---- ChatML ---- */

static void chatml_open(struct chat_writer *w, const char *role) {
    chat_mark(w, "<|im_start|>");
    chat_text(w, role);
    chat_text(w, "\n");
}

static void chatml_close(struct chat_writer *w) {
    chat_mark(w, "<|im_end|>");
    chat_text(w, "\n");
}

static void chatml_message(struct chat_writer *w, const char *role, struct chat_span content) {
    chatml_open(w, role);
    chat_span(w, content);
    chatml_close(w);
}

static struct chat_span literal(const char *s) {
    return (struct chat_span){s, strlen(s)};
}

static void render_chatml(struct chat_writer *w, const struct chat_message *m, size_t n,
                          bool open) {
    if (w->family->bos) chat_bos(w);
    if (w->family->default_system && !chat_role_is(m, "system"))
        chatml_message(w, "system", literal(w->family->default_system));
    /* Templates without a default system message differ in what they do with a tool's answer. */
    bool tool = w->family->default_system != NULL;
    for (size_t i = 0; i < n; i++)
        if (known_role(w, &m[i], i, tool)) chatml_message(w, m[i].role, chat_content(&m[i]));
    if (open) chatml_open(w, "assistant");
}

/* Answers of tools: consecutive ones share a user turn. */
static void qwen_tool(struct chat_writer *w, const struct chat_message *m, size_t n, size_t i) {
    if (i == 0 || !chat_role_is(&m[i - 1], "tool")) {
        chat_mark(w, "<|im_start|>");
        chat_text(w, "user");
    }
    chat_text(w, "\n<tool_response>\n");
    chat_span(w, chat_content(&m[i]));
    chat_text(w, "\n</tool_response>");
    if (i + 1 == n || !chat_role_is(&m[i + 1], "tool")) chatml_close(w);
}

static void render_qwen2_5(struct chat_writer *w, const struct chat_message *m, size_t n,
                           bool open) {
    if (!chat_role_is(m, "system")) chatml_message(w, "system", literal(w->family->default_system));
    for (size_t i = 0; i < n; i++) {
        if (!known_role(w, &m[i], i, true)) return;
        if (chat_role_is(&m[i], "tool")) qwen_tool(w, m, n, i);
        else chatml_message(w, m[i].role, chat_content(&m[i]));
    }
    if (open) chatml_open(w, "assistant");
}

/* ---- Qwen3: thoughts of earlier turns are left out ---- */

static struct chat_span strip_newlines(struct chat_span s, bool left, bool right) {
    while (left && s.n && s.s[0] == '\n') s.s++, s.n--;
    while (right && s.n && s.s[s.n - 1] == '\n') s.n--;
    return s;
}

static const char *last_of(struct chat_span s, const char *mark) {
    size_t len = strlen(mark);
    for (size_t i = s.n; s.n >= len && i-- > 0;)
        if (i + len <= s.n && memcmp(s.s + i, mark, len) == 0) return s.s + i;
    return NULL;
}

/* "<think>a</think>b" -> thought a, content b; without the end mark all is content. */
static void split_thought(struct chat_span *content, struct chat_span *thought) {
    static const char open[] = "<think>", shut[] = "</think>";
    struct chat_span all = *content;
    *thought = (struct chat_span){all.s, 0};
    const char *first = all.n ? memmem(all.s, all.n, shut, sizeof shut - 1) : NULL;
    if (!first) return;
    const char *last = last_of(all, shut) + sizeof shut - 1;
    *content =
        strip_newlines((struct chat_span){last, (size_t)(all.s + all.n - last)}, true, false);
    *thought = strip_newlines((struct chat_span){all.s, (size_t)(first - all.s)}, false, true);
    const char *begin = last_of(*thought, open);
    if (begin) {
        begin += sizeof open - 1;
        thought->n = (size_t)(thought->s + thought->n - begin);
        thought->s = begin;
    }
    *thought = strip_newlines(*thought, true, false);
}

static bool is_tool_response(struct chat_span s) {
    static const char open[] = "<tool_response>", shut[] = "</tool_response>";
    return s.n >= sizeof open - 1 && s.n >= sizeof shut - 1 &&
           !memcmp(s.s, open, sizeof open - 1) &&
           !memcmp(s.s + s.n - (sizeof shut - 1), shut, sizeof shut - 1);
}

static void render_qwen3(struct chat_writer *w, const struct chat_message *m, size_t n, bool open) {
    size_t last_query = n - 1;
    for (size_t i = n; i-- > 0;)
        if (chat_role_is(&m[i], "user") && !is_tool_response(chat_content(&m[i]))) {
            last_query = i;
            break;
        }
    for (size_t i = 0; i < n; i++) {
        if (!known_role(w, &m[i], i, true)) return;
        if (chat_role_is(&m[i], "tool")) {
            qwen_tool(w, m, n, i);
            continue;
        }
        if (!chat_role_is(&m[i], "assistant")) {
            chatml_message(w, m[i].role, chat_content(&m[i]));
            continue;
        }
        struct chat_span content = chat_content(&m[i]), thought;
        split_thought(&content, &thought);
        chatml_open(w, "assistant");
        if (i > last_query && (i + 1 == n || thought.n)) {
            chat_text(w, "<think>\n");
            chat_span(w, strip_newlines(thought, true, true));
            chat_text(w, "\n</think>\n\n");
            content = strip_newlines(content, true, false);
        }
        chat_span(w, content);
        chatml_close(w);
    }
    if (open) chatml_open(w, "assistant");
}

/* ---- SmolLM3: a metadata header, a thinking mode switched by the system message ---- */

#define SMOLLM3_NAME "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
#define SMOLLM3_THINK                                                                              \
    SMOLLM3_NAME                                                                                   \
    " Your role as an assistant involves thoroughly exploring questions through a systematic "     \
    "thinking process before providing the final precise and accurate solutions. This requires "   \
    "engaging in a comprehensive cycle of analysis, summarizing, exploration, reassessment, "      \
    "reflection, backtracking, and iteration to develop well-considered thinking process. Please " \
    "structure your response into two main sections: Thought and Solution using the specified "    \
    "format: <think> Thought section </think> Solution section. In the Thought section, detail "   \
    "your reasoning process in steps. Each step should include detailed considerations such as "   \
    "analysing questions, summarizing relevant findings, brainstorming new ideas, verifying the "  \
    "accuracy of the current steps, refining any errors, and revisiting previous steps. In the "   \
    "Solution section, based on various attempts, explorations, and reflections from the Thought " \
    "section, systematically present the final solution that you deem correct. The Solution "      \
    "section should be logical, accurate, and concise and detail necessary steps needed to reach " \
    "the conclusion."

/* Append s without each occurrence of `mark`. */
static void append_without(struct strbuf *out, struct chat_span s, const char *mark) {
    size_t len = strlen(mark);
    const char *at;
    while (s.n && (at = memmem(s.s, s.n, mark, len)) != NULL) {
        strbuf_append(out, s.s, (size_t)(at - s.s));
        s.n -= (size_t)(at - s.s) + len;
        s.s = at + len;
    }
    strbuf_append(out, s.s, s.n);
}

static bool contains(struct chat_span s, const char *mark) {
    return s.n && memmem(s.s, s.n, mark, strlen(mark)) != NULL;
}

/* Without white space at its end. */
static struct chat_span trim_end(struct chat_span s) {
    struct chat_span trimmed = chat_trim(s);
    s.n = trimmed.n ? (size_t)(trimmed.s + trimmed.n - s.s) : 0;
    return s;
}

/* "16 August 2026", in local time. */
static void append_date(struct chat_writer *w) {
    static const char *const months[] = {"January",   "February", "March",    "April",
                                         "May",       "June",     "July",     "August",
                                         "September", "October",  "November", "December"};
    char text[40];
    struct tm tm;
    time_t now = time(NULL);
    if (!localtime_r(&now, &tm)) return;
    snprintf(text, sizeof text, "%02d %s %d", tm.tm_mday, months[tm.tm_mon % 12],
             tm.tm_year + 1900);
    chat_text(w, text);
}

/* The system turn; `think` is the mode that the message asks for. The dated template leaves the
 * turn open where there are no tools: so it was trained, so it is written. */
static void smollm3_system(struct chat_writer *w, const struct chat_message *m, bool think,
                           bool dated) {
    struct strbuf once = {0}, custom = {0};
    struct chat_span given = {NULL, 0};
    if (chat_role_is(m, "system")) {
        given = chat_content(m);
        append_without(&once, given, "/no_think");
        append_without(&custom, (struct chat_span){once.data, once.n}, "/think");
    }
    bool override = dated && contains(given, "/system_override");
    if (override) {
        struct strbuf rest = {0};
        append_without(&rest, (struct chat_span){custom.data, custom.n}, "/system_override");
        strbuf_deinit(&custom);
        custom = rest;
    }
    struct chat_span text = trim_end((struct chat_span){custom.data, custom.n});
    chatml_open(w, "system");
    if (!override) {
        chat_text(w, "## Metadata\n\nKnowledge Cutoff Date: June 2025\n");
        if (dated) {
            chat_text(w, "Today Date: ");
            append_date(w);
            chat_text(w, "\n");
        }
        chat_text(w, "Reasoning Mode: ");
        chat_text(w, think ? "/think\n\n" : "/no_think\n\n");
        chat_text(w, "## Custom Instructions\n\n");
    }
    if (text.n || override) chat_span(w, text);
    else chat_text(w, think ? SMOLLM3_THINK : SMOLLM3_NAME);
    if (!override) chat_text(w, "\n\n");
    if (override || !dated) chatml_close(w);
    if ((once.failed || custom.failed) && !w->rc) w->rc = err_raise(w->e, E_NOMEM, "chat text");
    strbuf_deinit(&once);
    strbuf_deinit(&custom);
}

static void smollm3(struct chat_writer *w, const struct chat_message *m, size_t n, bool open,
                    bool dated) {
    bool think = !(chat_role_is(m, "system") && contains(chat_content(m), "/no_think"));
    smollm3_system(w, m, think, dated);
    for (size_t i = 0; i < n; i++) {
        if (!known_role(w, &m[i], i, true)) return;
        if (chat_role_is(&m[i], "assistant")) {
            chatml_open(w, "assistant");
            if (!think) chat_text(w, "<think>\n\n</think>\n");
            chat_span(w, strip_newlines(chat_content(&m[i]), true, false));
            chatml_close(w);
        } else if (!chat_role_is(&m[i], "system")) {
            chatml_message(w, "user", chat_content(&m[i]));
        } else if (i > 0) {
            chat_invalid(w, "message %zu is a second system message", i);
        }
    }
    if (open) chatml_open(w, "assistant");
    if (open && !think) chat_text(w, "<think>\n\n</think>\n");
}

static void render_smollm3(struct chat_writer *w, const struct chat_message *m, size_t n,
                           bool open) {
    smollm3(w, m, n, open, true);
}

static void render_smollm3_undated(struct chat_writer *w, const struct chat_message *m, size_t n,
                                   bool open) {
    smollm3(w, m, n, open, false);
}

/* ---- Llama 3 ---- */

static void llama3_open(struct chat_writer *w, const char *role) {
    chat_mark(w, "<|start_header_id|>");
    chat_text(w, role);
    chat_mark(w, "<|end_header_id|>");
    chat_text(w, "\n\n");
}

static void llama3_messages(struct chat_writer *w, const struct chat_message *m, size_t from,
                            size_t n, bool open) {
    for (size_t i = from; i < n; i++) {
        if (!known_role(w, &m[i], i, false)) return;
        llama3_open(w, m[i].role);
        chat_span(w, chat_trim(chat_content(&m[i])));
        chat_mark(w, "<|eot_id|>");
    }
    if (open) llama3_open(w, "assistant");
}

static void render_llama3(struct chat_writer *w, const struct chat_message *m, size_t n,
                          bool open) {
    chat_bos(w);
    llama3_messages(w, m, 0, n, open);
}

static void render_llama3_1(struct chat_writer *w, const struct chat_message *m, size_t n,
                            bool open) {
    bool system = chat_role_is(m, "system");
    chat_bos(w);
    llama3_open(w, "system");
    chat_text(w, "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
    if (system) chat_span(w, chat_trim(chat_content(m)));
    chat_mark(w, "<|eot_id|>");
    llama3_messages(w, m, system, n, open);
}

/* ---- [INST] ---- */

static void render_llama2(struct chat_writer *w, const struct chat_message *m, size_t n,
                          bool open) {
    (void)open; /* "[/INST]" opens the answer */
    size_t first = check_turns(w, m, n);
    for (size_t i = first; i < n; i++) {
        struct chat_span content = chat_content(&m[i]);
        if (chat_role_is(&m[i], "assistant")) {
            chat_text(w, " ");
            chat_span(w, chat_trim(content));
            chat_text(w, " ");
            chat_eos(w);
            continue;
        }
        chat_bos(w);
        chat_mark_or_text(w, "[INST]");
        chat_text(w, " ");
        if (i == first && first) { /* stripped as one text, so only the message's end is */
            chat_text(w, "<<SYS>>\n");
            chat_span(w, chat_content(m));
            chat_text(w, "\n<</SYS>>\n\n");
            content = trim_end(content);
            if (content.n == 0) chat_invalid(w, "the first user message is empty");
            chat_span(w, content);
        } else {
            chat_span(w, chat_trim(content));
        }
        chat_text(w, " ");
        chat_mark_or_text(w, "[/INST]");
    }
}

/* How the versions of Mistral's template differ. */
struct mistral_style {
    const char *before; /* of [INST] */
    const char *inside; /* behind [INST] */
    const char *end;    /* in front of [/INST] */
    const char *answer; /* in front of an answer */
    bool trim_answer;
    bool system_last; /* the system message goes to the last turn, not the first */
};

static void render_mistral(struct chat_writer *w, const struct chat_message *m, size_t n,
                           const struct mistral_style *style) {
    size_t first = check_turns(w, m, n);
    chat_bos(w);
    for (size_t i = first; i < n; i++) {
        struct chat_span content = chat_content(&m[i]);
        if (chat_role_is(&m[i], "assistant")) {
            chat_text(w, style->answer);
            chat_span(w, style->trim_answer ? chat_trim(content) : content);
            chat_eos(w);
            continue;
        }
        chat_text(w, style->before);
        chat_mark_or_text(w, "[INST]");
        chat_text(w, style->inside);
        if (first && (style->system_last ? i + 1 == n : i == first)) {
            chat_span(w, chat_content(m));
            chat_text(w, "\n\n");
        }
        chat_span(w, content);
        chat_text(w, style->end);
        chat_mark_or_text(w, "[/INST]");
    }
}

static void render_mistral_v0(struct chat_writer *w, const struct chat_message *m, size_t n,
                              bool open) {
    (void)open;
    if (chat_role_is(m, "system")) chat_invalid(w, "has no place for a system message");
    render_mistral(w, m, n, &(struct mistral_style){"", " ", " ", "", false, false});
}

static void render_mistral_v1(struct chat_writer *w, const struct chat_message *m, size_t n,
                              bool open) {
    (void)open;
    render_mistral(w, m, n, &(struct mistral_style){" ", " ", " ", " ", false, false});
}

static void render_mistral_v3(struct chat_writer *w, const struct chat_message *m, size_t n,
                              bool open) {
    (void)open;
    render_mistral(w, m, n, &(struct mistral_style){"", " ", "", " ", true, true});
}

static void render_mistral_tekken(struct chat_writer *w, const struct chat_message *m, size_t n,
                                  bool open) {
    (void)open;
    render_mistral(w, m, n, &(struct mistral_style){"", "", "", "", false, true});
}

static void mistral_v7(struct chat_writer *w, const struct chat_message *m, size_t n,
                       const char *space) {
    chat_bos(w);
    for (size_t i = 0; i < n; i++) {
        if (!known_role(w, &m[i], i, false)) return;
        bool assistant = chat_role_is(&m[i], "assistant"), system = chat_role_is(&m[i], "system");
        if (!assistant) chat_mark(w, system ? "[SYSTEM_PROMPT]" : "[INST]");
        chat_text(w, space);
        chat_span(w, chat_content(&m[i]));
        if (assistant) chat_eos(w);
        else chat_mark(w, system ? "[/SYSTEM_PROMPT]" : "[/INST]");
    }
}

static void render_mistral_v7(struct chat_writer *w, const struct chat_message *m, size_t n,
                              bool open) {
    (void)open;
    mistral_v7(w, m, n, " ");
}

static void render_mistral_v7_tekken(struct chat_writer *w, const struct chat_message *m, size_t n,
                                     bool open) {
    (void)open;
    mistral_v7(w, m, n, "");
}

const struct chat_family chat_families[] = {
    {"chatml", render_chatml, NULL, false},
    {"chatml-bos", render_chatml, NULL, true},
    {"smollm2", render_chatml,
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face", false},
    {"qwen1.5", render_chatml, "You are a helpful assistant", false},
    {"qwen2", render_chatml, "You are a helpful assistant.", false},
    {"qwen2.5", render_qwen2_5,
     "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", false},
    {"qwen3", render_qwen3, NULL, false},
    {"smollm3", render_smollm3, NULL, false},
    {"smollm3-undated", render_smollm3_undated, NULL, false},
    {"llama2", render_llama2, NULL, false},
    {"llama3", render_llama3, NULL, false},
    {"llama3.1", render_llama3_1, NULL, false},
    {"mistral-v0", render_mistral_v0, NULL, false},
    {"mistral-v1", render_mistral_v1, NULL, false},
    {"mistral-v3", render_mistral_v3, NULL, false},
    {"mistral-v3-tekken", render_mistral_tekken, NULL, false},
    {"mistral-v7", render_mistral_v7, NULL, false},
    {"mistral-v7-tekken", render_mistral_v7_tekken, NULL, false},
    {0},
};
