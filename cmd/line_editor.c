#include "cmd/line_editor.h"

#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "base/err.h"

enum {
    HISTORY_LINES = 1000,
    POLL_MS = 100,
    ESCAPE_MS = 50, /* between the bytes of one key's sequence */
    MAX_QUEUE = 8,
    CTRL_D = 0x04,
    CTRL_V = 0x16,
    SHOWN_NEWLINE = 0x2424,
};
/* The terminal's words around a paste, once asked to say them. */
static const char paste_on[] = "\033[?2004h", paste_off[] = "\033[?2004l";
static const char paste_begin[] = "\033[200~", paste_end[] = "\033[201~";

struct line_editor {
    EditLine *el;
    History *history;
    HistEvent event;
    const char *prompt;
    char *path;
    char *line;
    mbstate_t state; /* of a character whose bytes come one by one */
    bool pasting;
    wchar_t queue[MAX_QUEUE]; /* characters read and not given yet */
    int n_queue;
};

/* Set by the handler: signals know no arguments. */
static volatile sig_atomic_t interrupted;
void line_editor_interrupt(void) {
    interrupted = 1;
}

static char *prompt_of(EditLine *el) {
    struct line_editor *l;
    el_get(el, EL_CLIENTDATA, &l);
    return (char *)(uintptr_t)l->prompt;
}

/* One byte within `ms` (-1: whenever). 1, 0 at the end of input or, with a limit, of the time, -1
 * when interrupted. A signal between the look and poll() is seen a tenth of a second later. */
static int read_byte(char *c, int ms) {
    for (;;) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        if (interrupted) return -1;
        int n = poll(&p, 1, ms < 0 ? POLL_MS : ms);
        if (n < 0 && errno != EINTR) return -1;
        if (n == 0 && ms >= 0) return 0;
        if (n <= 0) continue;
        ssize_t k = read(STDIN_FILENO, c, 1);
        if (k >= 0 || errno != EINTR) return (int)k;
    }
}

/* One character of the locale's encoding; what is none is skipped. */
static int read_wide(struct line_editor *l, wchar_t *out, int ms) {
    for (;;) {
        char c;
        int rc = read_byte(&c, ms);
        if (rc <= 0) return rc;
        size_t used = mbrtowc(out, &c, 1, &l->state);
        if (used == (size_t)-2) continue; /* more bytes of the same character */
        if (used == (size_t)-1) {
            memset(&l->state, 0, sizeof l->state);
            continue;
        }
        /* Ctrl-D that came before the editor listened: Linux hands it over as a zero. */
        if (used == 0) *out = CTRL_D;
        return 1;
    }
}

/* After an escape: is it `want` of the terminal? Where not, what was read waits in the queue. */
static bool follows(struct line_editor *l, const char *want) {
    l->queue[0] = L'\033';
    l->n_queue = 1;
    for (int i = 1; want[i]; i++) {
        wchar_t c;
        if (read_wide(l, &c, ESCAPE_MS) != 1) return false;
        l->queue[l->n_queue++] = c;
        if (c != (wchar_t)want[i]) return false;
    }
    l->n_queue = 0;
    return true;
}

static wchar_t from_queue(struct line_editor *l) {
    wchar_t c = l->queue[0];
    memmove(l->queue, l->queue + 1, (size_t)--l->n_queue * sizeof c);
    return c;
}

/* A character of a paste as the editor may have it: no key of a paste is a command. 0: none. */
static wchar_t pasted(struct line_editor *l, wchar_t c) {
    if (c == L'\n' || c == L'\r') return SHOWN_NEWLINE;
    if (c == L'\t') { /* as itself, not to complete a word */
        l->queue[l->n_queue++] = c;
        return CTRL_V;
    }
    return c < 0x20 || c == 0x7f ? 0 : c;
}

/* libedit's own reader goes on after a signal; this one ends the line. Returns 1 character, 0 at
 * the end, -1 when interrupted. */
static int read_char(EditLine *el, wchar_t *out) {
    struct line_editor *l;
    el_get(el, EL_CLIENTDATA, &l);
    for (;;) {
        if (l->n_queue > 0) {
            *out = from_queue(l);
            return 1;
        }
        int rc = read_wide(l, out, -1);
        if (rc <= 0) return rc;
        if (*out == L'\033') {
            if (!follows(l, l->pasting ? paste_end : paste_begin)) {
                if (l->pasting) l->n_queue = 0; /* a sequence inside a paste: dropped */
                continue;
            }
            l->pasting = !l->pasting;
        } else if (l->pasting) {
            if ((*out = pasted(l, *out)) != 0) return 1;
        } else {
            return 1;
        }
    }
}

static void say(const char *s) {
    ssize_t n = write(STDOUT_FILENO, s, strlen(s));
    (void)n; /* a terminal that is gone: the next read says so */
}

int line_editor_open(struct line_editor **out, const char *history_path, struct err *e) {
    *out = NULL;
    setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    struct line_editor *l = calloc(1, sizeof *l);
    if (!l) return err_raise(e, E_NOMEM, "no memory for the line editor");
    l->el = el_init("tandem", stdin, stdout, stderr);
    l->history = history_init();
    if (!l->el || !l->history) {
        line_editor_close(l);
        return err_raise(e, E_IO, "the terminal cannot be edited on; pipe the message in instead");
    }
    el_set(l->el, EL_CLIENTDATA, l);
    el_set(l->el, EL_PROMPT, prompt_of);
    el_set(l->el, EL_EDITOR, "emacs");
    el_set(l->el, EL_SIGNAL, 0);
    el_set(l->el, EL_GETCFN, read_char);
    history(l->history, &l->event, H_SETSIZE, HISTORY_LINES);
    history(l->history, &l->event, H_SETUNIQUE, 1);
    el_set(l->el, EL_HIST, history, l->history);
    el_source(l->el, NULL); /* ~/.editrc */
    if (history_path) {
        l->path = strdup(history_path);
        history(l->history, &l->event, H_LOAD, history_path);
    }
    *out = l;
    return 0;
}

/* The line with its newlines, without the one at its end. */
static char *copy_line(const char *got, size_t *n) {
    static const char shown[] = "\xe2\x90\xa4"; /* SHOWN_NEWLINE in UTF-8 */
    size_t k = strlen(got), at = 0;
    while (k > 0 && (got[k - 1] == '\n' || got[k - 1] == '\r')) k--;
    char *line = malloc(k + 1);
    if (!line) return NULL;
    for (size_t i = 0; i < k; at++) {
        bool newline = k - i >= 3 && memcmp(got + i, shown, 3) == 0;
        line[at] = newline ? '\n' : got[i];
        i += newline ? 3 : 1;
    }
    line[at] = 0;
    *n = at;
    return line;
}

static void remember(struct line_editor *l, const char *got) {
    char *text = strdup(got);
    if (!text) return;
    text[strcspn(text, "\r\n")] = 0;
    history(l->history, &l->event, H_ENTER, text);
    free(text);
    if (!l->path) return;
    mode_t old = umask(077);
    history(l->history, &l->event, H_SAVE, l->path);
    umask(old);
}

static enum line_result read_line(struct line_editor *l, const char *prompt, bool kept,
                                  const char **line, size_t *n) {
    int count = 0;
    free(l->line);
    l->line = NULL;
    l->prompt = prompt;
    interrupted = 0;
    l->pasting = false;
    l->n_queue = 0;
    say(paste_on);
    const char *got = el_gets(l->el, &count);
    say(paste_off);
    if (interrupted) {
        interrupted = 0;
        el_reset(l->el);
        return LINE_INTERRUPTED;
    }
    if (!got || count <= 0 || !(l->line = copy_line(got, n))) return LINE_END;
    if (kept && *n > 0) remember(l, got);
    *line = l->line;
    return LINE_TEXT;
}

enum line_result line_editor_read(struct line_editor *l, const char *prompt, const char **line,
                                  size_t *n) {
    return read_line(l, prompt, true, line, n);
}

enum line_result line_editor_ask(struct line_editor *l, const char *prompt, const char **line,
                                 size_t *n) {
    return read_line(l, prompt, false, line, n);
}

void line_editor_close(struct line_editor *l) {
    if (!l) return;
    if (l->el) el_end(l->el);
    if (l->history) history_end(l->history);
    free(l->path);
    free(l->line);
    free(l);
}
