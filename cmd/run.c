/* `tandem run`: one prompt, one answer, in this process. The same engine as the server's, without
 * the socket. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "cmd/bell.h"
#include "cmd/cmd.h"
#include "cmd/engine_flags.h"
#include "cmd/sampling_flags.h"
#include "cmd/sparsity.h"
#include "cmd/speculation.h"
#include "cmd/terminal.h"
#include "cmd/text.h"

/* Ctrl-C cancels the answer. A handler may not take a mutex, so a thread waits for the signal and
 * rings. */
struct interrupt {
    sigset_t set;
    struct bell *bell;
    atomic_bool seen;
};

static void *interrupt_main(void *arg) {
    struct interrupt *it = arg;
    int sig;
    while (sigwait(&it->set, &sig) == 0) {
        atomic_store(&it->seen, true);
        bell_ring(it->bell);
    }
    return NULL;
}

static int make_prompt(struct tokens *out, const struct engine *g, const struct strbuf *text,
                       const char *system, bool raw, struct err *e) {
    const struct tokenizer *t = engine_tokenizer(g);
    if (raw) return tokenizer_encode(t, text->data, text->n, TOKENIZER_ADD_SPECIAL, out, e);
    if (!engine_chat(g))
        return err_raise(e, E_UNSUPPORTED, "%s (use --raw, or --chat-template NAME)",
                         engine_chat_error(g));
    struct chat_message m[2];
    size_t n = 0;
    if (system) m[n++] = (struct chat_message){"system", system, strlen(system)};
    m[n++] = (struct chat_message){"user", text->data, text->n};
    return chat_render(engine_chat(g), t, m, n, true, out, e);
}

static void print_summary(const struct engine_progress *p, bool stats) {
    double prompt_s = (double)(p->first_token_ns - p->submitted_ns) / 1e9;
    double decode_s = (double)(p->finished_ns - p->first_token_ns) / 1e9;
    log_info("%d prompt tokens in %.0f ms (%.0f tokens/s), time to first token %.0f ms",
             p->n_prompt, prompt_s * 1e3, p->n_prompt / (prompt_s > 0 ? prompt_s : 1),
             prompt_s * 1e3);
    struct strbuf more = {0};
    speculation_append_short(&more, &p->speculation);
    sparsity_append_short(&more, &p->sparsity);
    if (p->n_tokens > 1 && decode_s > 0)
        log_info("%d tokens, %.1f tokens/s (%.2f ms each)%s, finish: %s, seed %llu", p->n_tokens,
                 (p->n_tokens - 1) / decode_s, decode_s * 1e3 / (p->n_tokens - 1),
                 more.n ? more.data : "", engine_finish_name(p->finish),
                 (unsigned long long)p->seed);
    strbuf_clear(&more);
    speculation_append_long(&more, &p->speculation, engine_no_draft_name(p->no_draft));
    /* Asked for by name: --quiet does not take it away. */
    if (stats && more.n) fprintf(stderr, "# %s\n", more.data);
    strbuf_clear(&more);
    sparsity_append_long(&more, &p->sparsity);
    if (stats && more.n) fprintf(stderr, "# %s\n", more.data);
    strbuf_deinit(&more);
}

/* How the answer is shown. */
struct view {
    bool special, stats;
    struct speculation_marks marks;
};

static void append(struct strbuf *out, struct view *v, const struct strbuf *piece, bool drafted) {
    if (piece->n == 0) return;
    strbuf_append_str(out, speculation_mark(&v->marks, drafted));
    if (v->marks.tty) terminal_append(out, piece->data, piece->n);
    else strbuf_append(out, piece->data, piece->n);
}

/* Stream the answer to stdout until it is finished; the exit code. */
static int stream(struct engine *g, struct engine_request *r, struct interrupt *it,
                  const struct verify_params *params, struct view *v, struct err *e) {
    struct verify_text text;
    struct strbuf sink = {0}, piece = {0};
    struct engine_progress p;
    int rc = verify_text_init(&text, engine_tokenizer(g), params, v->special, e), done = 0;
    if (rc) return rc;
    do {
        bell_wait(it->bell);
        if (atomic_load(&it->seen)) engine_cancel(g, r);
        engine_poll(r, &p);
        for (; done < p.n_tokens; done++) {
            strbuf_clear(&piece);
            verify_text_push(&text, p.tokens[done], &piece);
            append(&sink, v, &piece, p.drafted && p.drafted[done]);
        }
        if (p.finish) {
            strbuf_clear(&piece);
            verify_text_finish(&text, &piece);
            append(&sink, v, &piece, v->marks.on);
            strbuf_append_str(&sink, speculation_mark(&v->marks, false));
        }
        if (sink.n) fwrite(sink.data, 1, sink.n, stdout);
        fflush(stdout);
        strbuf_clear(&sink);
    } while (!p.finish);
    putchar('\n');
    fflush(stdout);
    if (p.finish == ENGINE_FAILED) rc = err_raise(e, p.error_code, "%s", p.error);
    else print_summary(&p, v->stats);
    verify_text_deinit(&text);
    strbuf_deinit(&sink);
    strbuf_deinit(&piece);
    return rc;
}

int cmd_run(int argc, char **argv) {
    struct engine_flags f;
    struct sampling_flags s;
    const char *file = NULL, *system = NULL;
    bool raw = false;
    struct view view = {.marks.tty = isatty(STDOUT_FILENO)};
    engine_flags_init(&f);
    sampling_flags_init(&s);
    f.o.max_seqs = 1;
    const struct option table[] = {
        ENGINE_FLAGS(&f),
        {OPTION_GROUP, "Prompt", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_STRING, "file", NULL, 'f', &file, "PATH", 0, 0, "take the prompt from a file",
         NULL},
        {OPTION_STRING, "system", "system-prompt", 0, &system, "TEXT", 0, 0, "system message",
         "the template's own"},
        {OPTION_FLAG, "raw", "no-conversation", 0, &raw, NULL, 0, 0,
         "no chat template: complete the text", NULL},
        {OPTION_FLAG, "special", NULL, 0, &view.special, NULL, 0, 0, "show control tokens", NULL},
        {OPTION_FLAG, "show-spec", NULL, 0, &view.marks.show, NULL, 0, 0,
         "mark accepted draft tokens: green on a terminal, \xe2\x80\xb9so\xe2\x80\xba elsewhere",
         NULL},
        {OPTION_FLAG, "stats", NULL, 0, &view.stats, NULL, 0, 0,
         "say what speculation and sparse reading did", NULL},
        SAMPLING_FLAGS(&s),
        {0},
    };
    struct options o = {.command = "run",
                        .usage = "tandem run -m MODEL [PROMPT | -f FILE | < FILE] [options]",
                        .about = "Answer one prompt. The answer goes to stdout, timings to stderr.",
                        .table = table,
                        .max_words = 1};
    int rc = options_parse(&o, argc, argv);
    if (rc < 0) rc = engine_flags_finish(&f, &o);
    if (rc < 0) rc = sampling_flags_finish(&s, &o);
    if (rc >= 0) return rc;
    s.params.coupling = f.default_coupling;

    struct err e = {0};
    struct strbuf text = {0};
    struct tokens ids = {0};
    struct engine *g = NULL;
    static struct bell bell = BELL_INIT;
    static struct interrupt it; /* both outlive this function: the waiter may still look */
    struct engine_request *r = NULL;
    it.bell = &bell;
    sigemptyset(&it.set);
    sigaddset(&it.set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &it.set,
                    NULL); /* before any thread starts, so that all inherit it */
    rc = cmd_text(&text, o.n_words ? o.words[0] : NULL, file, &e);
    if (!rc) rc = cmd_open_engine(&g, &f.o, &e);
    if (!rc) rc = make_prompt(&ids, g, &text, system, raw, &e);
    pthread_t waiter;
    if (!rc && pthread_create(&waiter, NULL, interrupt_main, &it) == 0) pthread_detach(waiter);
    if (!rc) {
        struct engine_submit_options so = {.params = s.params,
                                           .prompt = ids.ids,
                                           .n_prompt = (int)ids.n,
                                           .notify = bell_ring,
                                           .notify_arg = &bell,
                                           .show_special = view.special};
        rc = engine_submit(g, &so, &r, &e);
    }
    if (!rc) rc = stream(g, r, &it, &s.params, &view, &e);
    if (r) engine_release(g, r);
    if (g) engine_close(g);
    tokens_deinit(&ids);
    strbuf_deinit(&text);
    return rc ? cmd_fail(&e) : 0;
}
