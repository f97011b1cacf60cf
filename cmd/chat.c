/* `tandem chat`: a conversation with a server, in the terminal or for one message. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "cmd/chat_report.h"
#include "cmd/cmd.h"
#include "cmd/line_editor.h"
#include "cmd/sampling_flags.h"
#include "cmd/socket_path.h"
#include "cmd/sparsity.h"
#include "cmd/speculation.h"
#include "cmd/terminal.h"
#include "cmd/text.h"
#include "serve/client.h"
#include "serve/rpc.h"

enum {
    MAX_TURNS = 4096,
    RC_INTERRUPTED = 130,
    RC_TOO_LONG = 1000, /* of ask(): the context is full */
    MAX_KEY = 4096,
};

struct turn {
    const char *role;
    char *text;
    size_t n;
};

struct chat {
    struct client_options where;
    struct client *client;
    struct client_settings settings;
    struct turn turns[MAX_TURNS]; /* [0] is the system message where there is one */
    int n_turns;
    bool tty; /* the answer goes to a terminal */
    bool quiet;
    bool stats; /* print them after the answer */
    bool recompute_answers;
    struct speculation_marks marks;
    struct strbuf answer;
    bool at_line_start;
};

/* ---- Ctrl-C ---- */

static struct client *volatile streaming_client; /* NULL: no answer is running */
static volatile sig_atomic_t colours;            /* the answer may leave one switched on */
static volatile sig_atomic_t n_interrupts;

static void on_sigint(int sig) {
    (void)sig;
    struct client *c = streaming_client;
    if (!c) {
        line_editor_interrupt();
        return;
    }
    if (n_interrupts++ > 0) {
        terminal_restore(colours);
        _exit(RC_INTERRUPTED);
    }
    client_interrupt(c);
}

static void catch_sigint(void) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = on_sigint;
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
}

/* ---- The conversation ---- */

static void drop_turns(struct chat *c, int keep) {
    while (c->n_turns > keep) free(c->turns[--c->n_turns].text);
}

static bool has_system(const struct chat *c) {
    return c->n_turns > 0 && strcmp(c->turns[0].role, "system") == 0;
}

/* False: memory, or too many turns. */
static bool add_turn(struct chat *c, const char *role, const char *text, size_t n) {
    char *copy = c->n_turns < MAX_TURNS ? malloc(n + 1) : NULL;
    if (!copy) return false;
    memcpy(copy, text, n);
    copy[n] = 0;
    c->turns[c->n_turns++] = (struct turn){role, copy, n};
    return true;
}

/* A new system message begins a new conversation. */
static void set_system(struct chat *c, const char *text) {
    drop_turns(c, 0);
    if (text && text[0]) add_turn(c, "system", text, strlen(text));
}

/* ---- An answer ---- */

static void print_text(const struct chat *c, const char *s, size_t n) {
    struct strbuf safe = {0};
    if (c->tty) terminal_append(&safe, s, n);
    if (!c->tty) fwrite(s, 1, n, stdout);
    else if (safe.n) fwrite(safe.data, 1, safe.n, stdout);
    strbuf_deinit(&safe);
}

static void on_tokens(void *arg, const struct client_piece *p) {
    struct chat *c = arg;
    if (p->n == 0) return;
    /* Text without a token was held back and is of the one before. */
    fputs(speculation_mark(&c->marks, p->n_tokens > 0 ? p->drafted : c->marks.on), stdout);
    print_text(c, p->text, p->n);
    fflush(stdout);
    strbuf_append(&c->answer, p->text, p->n);
    c->at_line_start = p->text[p->n - 1] == '\n';
}

/* Talk below an answer: faint on a terminal, a note elsewhere. */
static void print_note(const struct strbuf *text) {
    if (text->n == 0) return;
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\033[2m%s\033[0m\n", text->data);
    else fprintf(stderr, "# %s\n", text->data);
}

static void print_summary(const struct chat *c, const struct client_done *d) {
    struct strbuf text = {0};
    if (c->quiet && !c->stats) return; /* asked for by name: --quiet does not take it away */
    chat_report_done(&text, d);
    print_note(&text);
    strbuf_clear(&text);
    chat_report_speculation(&text, d);
    if (c->stats) print_note(&text);
    strbuf_clear(&text);
    chat_report_sparsity(&text, d);
    if (c->stats) print_note(&text);
    strbuf_deinit(&text);
}

static int connect_to(struct chat *c, struct err *e) {
    client_close(c->client);
    c->client = NULL;
    int rc = client_open(&c->client, &c->where, e);
    if (rc == E_NOT_FOUND || rc == E_CLOSED)
        err_raise(e, rc, "no server at %s; start one with: tandem serve --model PATH%s%s",
                  c->where.socket_path ? c->where.socket_path : c->where.host,
                  c->where.socket_path ? " --socket " : " --port N",
                  c->where.socket_path ? c->where.socket_path : "");
    return rc;
}

static int ask_once(struct chat *c, struct client_done *d, struct err *e) {
    static struct client_message m[MAX_TURNS]; /* one conversation a process */
    for (int i = 0; i < c->n_turns; i++)
        m[i] = (struct client_message){c->turns[i].role, c->turns[i].text, c->turns[i].n};
    strbuf_clear(&c->answer);
    c->at_line_start = true;
    n_interrupts = 0;
    terminal_quiet();
    colours = c->marks.show && c->tty;
    streaming_client = c->client;
    int rc = client_chat(c->client, m, c->n_turns, &c->settings, on_tokens, c, d, e);
    streaming_client = NULL;
    if (c->marks.on) {
        fputs(speculation_mark(&c->marks, false), stdout);
        c->at_line_start = c->at_line_start && c->tty;
    }
    if (!c->at_line_start) putchar('\n');
    fflush(stdout);
    terminal_restore(false);
    return rc;
}

/* Why there was no answer. */
static void print_failure(const struct chat *c, const struct err *e) {
    double after = c->client ? client_retry_after(c->client) : 0;
    struct err text = *e;
    if (after > 0) {
        size_t n = strlen(text.message);
        snprintf(text.message + n, sizeof text.message - n, "; try again in %.3g s", after);
    }
    cmd_fail(&text);
}

/* Send the message and print the answer; both become part of the conversation unless that failed.
 * The exit code, or RC_TOO_LONG, which the caller reports. */
static int ask(struct chat *c, const char *text, size_t n) {
    struct client_done d;
    struct err e = {0};
    int keep = c->n_turns;
    if (c->n_turns + 2 > MAX_TURNS || !add_turn(c, "user", text, n)) {
        log_error("the conversation is too long; /reset begins another");
        return 1;
    }
    bool fresh = !c->client;
    int rc = fresh ? connect_to(c, &e) : 0;
    if (rc == 0) rc = ask_once(c, &d, &e);
    /* An idle connection may have been closed meanwhile: once more on a new one. */
    if (rc == E_CLOSED && !fresh && client_refusal(c->client) == 0 && c->answer.n == 0) {
        e = (struct err){0};
        if ((rc = connect_to(c, &e)) == 0) rc = ask_once(c, &d, &e);
    }
    /* No refusal but a broken connection: nothing can be read from it any more. */
    if (rc != 0 && c->client && client_refusal(c->client) == 0) {
        client_close(c->client);
        c->client = NULL;
    }
    if (rc == 0 && strcmp(d.finish_reason, "error") == 0)
        rc = err_raise(&e, E_PROTOCOL, "the server failed: %s", d.error);
    if (rc != 0) {
        drop_turns(c, keep);
        if (rc == E_TOO_LONG && c->n_turns > has_system(c)) return RC_TOO_LONG;
        print_failure(c, &e);
        return 1;
    }
    if (!add_turn(c, "assistant", c->answer.n ? c->answer.data : "", c->answer.n))
        drop_turns(c, keep);
    print_summary(c, &d);
    return strcmp(d.finish_reason, "cancelled") == 0 ? RC_INTERRUPTED : 0;
}

/* Forget the older half of the turns, question and answer together; the system message stays. */
static void drop_oldest(struct chat *c) {
    int first = has_system(c), n = (c->n_turns - first + 3) / 4 * 2;
    if (n > c->n_turns - first) n = c->n_turns - first;
    for (int i = first; i < first + n; i++) free(c->turns[i].text);
    memmove(&c->turns[first], &c->turns[first + n],
            (size_t)(c->n_turns - first - n) * sizeof c->turns[0]);
    c->n_turns -= n;
}

/* As ask(), but where the context is full `l` asks whether the oldest turns may go. */
static void ask_or_drop(struct chat *c, struct line_editor *l, const char *line, size_t n) {
    static const char question[] = "The conversation fills the context. Forget its older half and "
                                   "ask again? [Y/n] ";
    char *text = malloc(n + 1); /* the question takes the line's place */
    if (!text) {
        log_error("no memory for the message");
        return;
    }
    memcpy(text, line, n + 1);
    while (ask(c, text, n) == RC_TOO_LONG) {
        const char *answer;
        size_t n_answer;
        enum line_result r = line_editor_ask(l, question, &answer, &n_answer);
        if (r != LINE_TEXT || (n_answer > 0 && answer[0] != 'y' && answer[0] != 'Y')) {
            printf("not sent; /reset begins another conversation\n");
            break;
        }
        drop_oldest(c);
    }
    free(text);
}

/* ---- Commands ---- */

static const char help_text[] =
    "  /reset          forget the conversation (the system message stays)\n"
    "  /system TEXT    begin a new conversation with this system message; without TEXT: none\n"
    "  /stats          what the server does\n"
    "  /help           this\n"
    "  /quit           leave, as Ctrl-D\n"
    "Ctrl-C stops the running answer, twice leaves. A line that begins with // is sent with one "
    "/.\n";

/* What the server does, to stdout for the command, to stderr beside an answer. */
static void print_stats(struct chat *c, FILE *to) {
    msgpack_object r;
    struct err e = {0};
    struct strbuf text = {0};
    if ((!c->client && connect_to(c, &e) != 0) ||
        client_call(c->client, "stats", NULL, 0, NULL, &r, &e) != 0) {
        cmd_fail(&e);
        return;
    }
    chat_report_stats(&text, &r);
    if (text.n) fwrite(text.data, 1, text.n, to);
    strbuf_deinit(&text);
}

/* "/word rest": true where it was a command; *leave is set by /quit. */
static bool command(struct chat *c, const char *line, bool *leave) {
    static const char *const names[] = {"/reset", "/system", "/stats", "/help", "/quit", "/exit"};
    if (line[0] != '/' || line[1] == '/') return false;
    size_t n = strcspn(line, " \t");
    const char *rest = line + n + strspn(line + n, " \t");
    int idx = 0;
    while (idx < 6 && !(strlen(names[idx]) == n && memcmp(names[idx], line, n) == 0)) idx++;
    switch (idx) {
    case 0:
        drop_turns(c, has_system(c) ? 1 : 0);
        printf("forgotten\n");
        break;
    case 1:
        set_system(c, rest);
        printf(rest[0] ? "a new conversation under this system message\n"
                       : "a new conversation without a system message\n");
        break;
    case 2:
        print_stats(c, stdout);
        break;
    case 3:
        fputs(help_text, stdout);
        break;
    case 4:
    case 5:
        *leave = true;
        break;
    default: {
        const char *near = rpc_suggest(line, n, names, 6);
        printf("no command %.*s%s%s; /help lists them\n", (int)n, line,
               near ? ", did you mean " : "", near ? near : "");
    }
    }
    return true;
}

/* ---- Modes ---- */

static void print_greeting(const struct chat *c) {
    struct strbuf text = {0};
    chat_report_greeting(&text, client_hello(c->client));
    if (!c->quiet && text.n) fwrite(text.data, 1, text.n, stdout);
    strbuf_deinit(&text);
}

/* $XDG_STATE_HOME/tandem_history, else ~/.local/state/tandem_history; NULL where there is no home.
 */
static const char *history_default(char *out, size_t n) {
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    if (state && state[0] == '/') {
        snprintf(out, n, "%s/tandem_history", state);
        return out;
    }
    if (!home || home[0] != '/') return NULL;
    snprintf(out, n, "%s/.local", home);
    mkdir(out, 0700);
    snprintf(out, n, "%s/.local/state", home);
    mkdir(out, 0700);
    snprintf(out, n, "%s/.local/state/tandem_history", home);
    return out;
}

static int talk(struct chat *c, const char *history) {
    struct line_editor *l;
    struct err e = {0};
    char path[600];
    if (!history) history = history_default(path, sizeof path);
    else if (!history[0]) history = NULL;
    if (line_editor_open(&l, history, &e) != 0) return cmd_fail(&e);
    print_greeting(c);
    bool leave = false, warned = false;
    while (!leave) {
        const char *line;
        size_t n;
        enum line_result r = line_editor_read(l, "> ", &line, &n);
        if (r == LINE_END) {
            putchar('\n');
            break;
        }
        if (r == LINE_INTERRUPTED) {
            printf(warned ? "\n" : "\n(Ctrl-C again or Ctrl-D leaves)\n");
            if (warned) break;
            warned = true;
            continue;
        }
        warned = false;
        if (n == 0 || command(c, line, &leave)) continue;
        if (line[0] == '/') line++, n--;
        ask_or_drop(c, l, line, n);
    }
    line_editor_close(l);
    return 0;
}

static int answer_once(struct chat *c, const struct options *o) {
    struct strbuf text = {0};
    struct err e = {0};
    int rc = 0;
    for (int i = 0; i < o->n_words; i++) {
        if (i > 0) strbuf_append_char(&text, ' ');
        strbuf_append_str(&text, o->words[i]);
    }
    if (o->n_words == 0 || (o->n_words == 1 && strcmp(o->words[0], "-") == 0)) {
        strbuf_clear(&text);
        rc = cmd_text(&text, NULL, "-", &e);
    }
    /* the newline of `echo` is no part of the message */
    if (rc == 0 && o->n_words == 0 && text.n > 0 && text.data[text.n - 1] == '\n') text.n--;
    if (rc == 0 && text.n == 0) rc = err_raise(&e, E_INVALID, "the message is empty");
    rc = rc != 0 ? cmd_fail(&e) : ask(c, text.data, text.n);
    ASSERT(rc != RC_TOO_LONG); /* there is no turn but this one */
    if (rc == 0 && c->stats) print_stats(c, stderr);
    strbuf_deinit(&text);
    return rc;
}

/* ---- Options ---- */

/* What the answers of this process are cached under; a new connection goes on with it. */
static void set_conversation(struct client_settings *s) {
    unsigned char id[16];
    char text[2 * sizeof id + 1];
    if (getrandom(id, sizeof id, 0) != sizeof id) return; /* the connection's, then */
    for (size_t i = 0; i < sizeof id; i++) snprintf(text + 2 * i, 3, "%02x", id[i]);
    client_set_text(s, "conversation", text, strlen(text));
}

static void set_sparsity(struct client_settings *s, const struct sparsity_flags *f) {
    if (f->selector) client_set_text(s, "sparse", f->selector, strlen(f->selector));
    if (f->keep && f->s.keep == TARGET_CURVE) client_set_text(s, "keep", f->keep, strlen(f->keep));
    else if (f->keep) client_set_real(s, "keep", f->s.keep);
    if (f->s.keep_blocks >= 0) client_set_int(s, "keep_blocks", f->s.keep_blocks);
    if (f->s.min_blocks >= 0) client_set_int(s, "min_blocks", f->s.min_blocks);
    if (f->s.window_blocks >= 0) client_set_int(s, "window_blocks", f->s.window_blocks);
    if (f->s.reserve >= 0) client_set_real(s, "reserve", f->s.reserve);
    if (f->threshold && f->s.threshold == TARGET_NO_THRESHOLD)
        client_set_text(s, "keep_threshold", "off", 3);
    else if (f->threshold) client_set_real(s, "keep_threshold", f->s.threshold);
    if (f->s.smooth >= 0) client_set_real(s, "smooth", f->s.smooth);
    if (f->reselect && f->s.reselect > 0) client_set_int(s, "reselect", f->s.reselect);
    else if (f->reselect) client_set_text(s, "reselect", f->reselect, strlen(f->reselect));
    if (f->reselector) client_set_text(s, "reselector", f->reselector, strlen(f->reselector));
    if (f->s.surprise >= 0) client_set_real(s, "surprise", f->s.surprise);
    if (f->recheck) client_set_text(s, "recheck", f->recheck, strlen(f->recheck));
    if (f->s.drop >= 0) client_set_real(s, "drop", f->s.drop);
    if (f->exact) client_set_int(s, "exact", f->s.exact);
    if (f->sparse_prefill > 0) client_set_text(s, "prefill", "sparse", 6);
    if (f->sparse_prefill == 0) client_set_text(s, "prefill", "dense", 5);
    if (f->s.prefill_dense >= 0) client_set_int(s, "prefill_dense", f->s.prefill_dense);
    if (f->s.prefill_chunk >= 0) client_set_int(s, "prefill_chunk", f->s.prefill_chunk);
    if (f->lists) client_set_text(s, "lists", f->lists, strlen(f->lists));
    if (f->s.select2 >= 0) client_set_int(s, "select2", f->s.select2);
    if (f->s.quarters >= 1) client_set_int(s, "quarters", f->s.quarters);
}

static void make_settings(struct chat *c, const struct sampling_flags *f,
                          const struct sparsity_flags *sparsity) {
    const struct verify_params *p = &f->params;
    struct client_settings *s = &c->settings;
    if (c->recompute_answers) client_set_bool(s, "conversation", false);
    else set_conversation(s);
    if (c->marks.show) client_set_bool(s, "drafted", true);
    if (f->draft_tokens && p->draft_tokens >= 0) client_set_int(s, "draft_tokens", p->draft_tokens);
    else if (f->draft_tokens) client_set_text(s, "draft_tokens", "auto", 4);
    if (f->coupling) client_set_text(s, "coupling", f->coupling, strlen(f->coupling));
    if (!p->lookup) client_set_bool(s, "lookup", false);
    set_sparsity(s, sparsity);
    client_set_real(s, "temperature", p->temperature);
    if (p->max_tokens > 0) client_set_int(s, "max_tokens", p->max_tokens);
    if (p->top_k > 0) client_set_int(s, "top_k", p->top_k);
    if (p->top_p < 1) client_set_real(s, "top_p", p->top_p);
    if (p->min_p > 0) client_set_real(s, "min_p", p->min_p);
    client_set_real(s, "repetition_penalty", p->repetition_penalty);
    client_set_real(s, "presence_penalty", p->presence_penalty);
    client_set_real(s, "frequency_penalty", p->frequency_penalty);
    if (p->has_seed) client_set_seed(s, p->seed);
    if (p->n_stops > 0) client_set_text(s, "stop", p->stops[0].text, (size_t)p->stops[0].n);
    if (p->ignore_eos) client_set_bool(s, "ignore_eos", true);
}

struct chat_flags {
    const char *socket, *connect, *system, *api_key, *api_key_file, *history;
    char host[256], path[256], key[MAX_KEY + 1];
};

static int make_address(struct chat *c, struct chat_flags *f, const struct options *o) {
    struct err e = {0};
    if (f->socket && f->connect)
        return options_error(o, "--socket and --connect exclude each other");
    if (f->api_key_file) {
        struct strbuf text = {0};
        if (cmd_text(&text, NULL, f->api_key_file, &e) != 0) return cmd_fail(&e);
        size_t n = text.n ? strcspn(text.data, "\r\n") : 0;
        if (n < 1 || n > MAX_KEY)
            return options_error(o, "--api-key-file: no key in the first line");
        memcpy(f->key, text.data, n);
        f->key[n] = 0;
        f->api_key = f->key;
        strbuf_deinit(&text);
    }
    c->where.token = f->api_key;
    c->where.name = "tandem chat";
    if (f->connect) {
        if (socket_path_split(f->connect, f->host, sizeof f->host, &c->where.port, &e) != 0)
            return options_error(o, "--connect: %s", e.message);
        c->where.host = f->host;
        return -1;
    }
    c->where.socket_path = f->socket;
    if (!f->socket) {
        socket_path_default(f->path, sizeof f->path);
        if (socket_path_check_owner(f->path, &e) != 0) return cmd_fail(&e);
        c->where.socket_path = f->path;
    }
    return -1;
}

int cmd_chat(int argc, char **argv) {
    static struct chat c; /* large, and lives as long as the process */
    static struct chat_flags f;
    struct sampling_flags s;
    struct sparsity_flags sparsity;
    sampling_flags_init(&s);
    sparsity_flags_init(&sparsity);
    const struct option table[] = {
        {OPTION_GROUP, "Server", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_STRING, "socket", NULL, 0, &f.socket, "PATH", 0, 0, "Unix socket",
         "$XDG_RUNTIME_DIR/tandem.sock, else /tmp/tandem-UID.sock"},
        {OPTION_STRING, "connect", NULL, 0, &f.connect, "HOST:PORT", 0, 0, "TCP instead", NULL},
        {OPTION_STRING, "api-key", NULL, 0, &f.api_key, "TOKEN", 0, 0, "token for TCP", NULL},
        {OPTION_STRING, "api-key-file", NULL, 0, &f.api_key_file, "PATH", 0, 0,
         "the same from a file's first line", NULL},
        {OPTION_GROUP, "Conversation", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},
        {OPTION_STRING, "system", "system-prompt", 0, &f.system, "TEXT", 0, 0, "system message",
         "the template's own"},
        {OPTION_STRING, "history", NULL, 0, &f.history, "PATH", 0, 0,
         "where typed lines are kept; '' keeps none",
         "$XDG_STATE_HOME or ~/.local/state, /tandem_history"},
        {OPTION_FLAG, "show-spec", NULL, 0, &c.marks.show, NULL, 0, 0,
         "mark accepted draft tokens: green on a terminal, \xe2\x80\xb9so\xe2\x80\xba elsewhere",
         NULL},
        {OPTION_FLAG, "stats", NULL, 0, &c.stats, NULL, 0, 0,
         "say what speculation and sparse reading did; after one answer, what the server did and "
         "its pool holds",
         NULL},
        {OPTION_FLAG, "recompute-answers", NULL, 0, &c.recompute_answers, NULL, 0, 0,
         "compute earlier answers anew as prompts instead of reusing their cache", NULL},
        {OPTION_FLAG, "quiet", NULL, 'q', &c.quiet, NULL, 0, 0, "the answer alone", NULL},
        REQUEST_SPECULATION_FLAGS(&s),
        SPARSITY_FLAGS(&sparsity,
                       "Sparse reading (what is not given: the server's, else the default)",
                       "the server's"),
        SAMPLING_FLAGS(&s),
        {0},
    };
    struct options o = {
        .command = "chat",
        .usage = "tandem chat [options] [MESSAGE]",
        .about =
            "Talk to a server. With a MESSAGE, or one piped in, print the answer and leave; on a "
            "terminal begin a conversation. Exit code 130 where Ctrl-C cut the answer.",
        .table = table,
        .after = "Environment: XDG_RUNTIME_DIR, XDG_STATE_HOME, HOME.",
        .max_words = 64,
    };
    int rc = options_parse(&o, argc, argv);
    if (rc < 0) rc = sampling_flags_finish(&s, &o);
    if (rc < 0) rc = sparsity_flags_finish(&sparsity, &o);
    if (rc < 0) rc = make_address(&c, &f, &o);
    if (rc >= 0) return rc;

    struct err e = {0};
    make_settings(&c, &s, &sparsity);
    c.tty = c.marks.tty = isatty(STDOUT_FILENO);
    if (c.quiet) log_set_level(LOG_ERROR);
    set_system(&c, f.system);
    if (connect_to(&c, &e) != 0) return cmd_fail(&e);
    catch_sigint();
    rc = o.n_words == 0 && isatty(STDIN_FILENO) ? talk(&c, f.history) : answer_once(&c, &o);
    client_close(c.client);
    client_settings_deinit(&c.settings);
    drop_turns(&c, 0);
    strbuf_deinit(&c.answer);
    return rc;
}
