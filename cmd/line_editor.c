#include "cmd/line_editor.h"

#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "base/err.h"

enum { HISTORY_LINES = 1000, POLL_MS = 100 };

struct line_editor {
    EditLine *el;
    History *history;
    HistEvent event;
    const char *prompt;
    char *path;
    char *line;
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

/* libedit's own reader goes on after a signal; this one ends the line. Returns 1 character, 0 at
 * the end, -1 when interrupted. A signal between the look and poll() is seen a tenth of a second
 * later. */
static int read_char(EditLine *el, wchar_t *out) {
    mbstate_t state = {0};
    (void)el;
    for (;;) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        if (interrupted) return -1;
        int n = poll(&p, 1, POLL_MS);
        if (n < 0 && errno != EINTR) return -1;
        if (n <= 0) continue;
        char c;
        ssize_t k = read(STDIN_FILENO, &c, 1);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return (int)k;
        size_t used = mbrtowc(out, &c, 1, &state);
        if (used == (size_t)-2) continue; /* more bytes of the same character */
        if (used == (size_t)-1) {
            memset(&state, 0, sizeof state);
            continue; /* no character of this encoding */
        }
        if (used == 0) *out = 0;
        return 1;
    }
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

enum line_result line_editor_read(struct line_editor *l, const char *prompt, const char **line,
                                  size_t *n) {
    int count = 0;
    free(l->line);
    l->line = NULL;
    l->prompt = prompt;
    interrupted = 0;
    const char *got = el_gets(l->el, &count);
    if (interrupted) {
        interrupted = 0;
        el_reset(l->el);
        return LINE_INTERRUPTED;
    }
    if (!got || count <= 0) return LINE_END;
    size_t k = strlen(got);
    while (k > 0 && (got[k - 1] == '\n' || got[k - 1] == '\r')) k--;
    l->line = strndup(got, k);
    if (!l->line) return LINE_END;
    if (k > 0) {
        history(l->history, &l->event, H_ENTER, l->line);
        if (l->path) {
            mode_t old = umask(077);
            history(l->history, &l->event, H_SAVE, l->path);
            umask(old);
        }
    }
    *line = l->line;
    *n = k;
    return LINE_TEXT;
}

void line_editor_close(struct line_editor *l) {
    if (!l) return;
    if (l->el) el_end(l->el);
    if (l->history) history_end(l->history);
    free(l->path);
    free(l->line);
    free(l);
}
