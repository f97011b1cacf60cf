#include "cmd/terminal.h"

#include <errno.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

static struct termios before;
static volatile sig_atomic_t quiet;

void terminal_quiet(void) {
    struct termios t;
    if (quiet || !isatty(STDIN_FILENO) || tcgetattr(STDIN_FILENO, &before) != 0) return;
    t = before;
    t.c_lflag &= ~(tcflag_t)ECHO;
    quiet = 1;
    if (tcsetattr(STDIN_FILENO, TCSADRAIN, &t) != 0) quiet = 0;
}

void terminal_append(struct strbuf *out, const char *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char b = (unsigned char)s[i];
        bool c1 = b == 0xc2 && i + 1 < n && (unsigned char)s[i + 1] >= 0x80 &&
                  (unsigned char)s[i + 1] <= 0x9f;
        if (c1) i++;
        else if (b >= 0x20 ? b != 0x7f : b == '\n' || b == '\t') strbuf_append_char(out, s[i]);
    }
}

void terminal_restore(bool colours) {
    static const char plain[] = "\033[0m";
    int saved = errno;
    if (colours && write(STDOUT_FILENO, plain, sizeof plain - 1) < 0) errno = saved;
    if (quiet) tcsetattr(STDIN_FILENO, TCSADRAIN, &before);
    quiet = 0;
    errno = saved;
}
