#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"

/* The only mutable global of the project: what a person asked to hear. Written once before threads
 * start. */
static enum log_level current_level = LOG_INFO;

void log_set_level(enum log_level level) {
    current_level = level;
}
enum log_level log_level(void) {
    return current_level;
}

static void write_all(const char *s, size_t n) {
    while (n > 0) {
        ssize_t k = write(STDERR_FILENO, s, n);
        if (k <= 0) return;
        s += k;
        n -= (size_t)k;
    }
}

void log_at(enum log_level level, const char *fmt, ...) {
    static const char *const heads[] = {"", "error: ", "warning: ", "# ", "debug: "};
    if (level > current_level) return;
    char line[2048];
    int n = snprintf(line, sizeof line, "%s", heads[level]);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    va_end(ap);
    if (m < 0) return;
    size_t len = (size_t)n + (size_t)m;
    if (len > sizeof line - 2) len = sizeof line - 2;
    line[len++] = '\n';
    write_all(line, len);
}

void log_progress_start(struct log_progress *p, const char *what, long long total) {
    *p = (struct log_progress){.what = what, .total = total > 0 ? total : 1, .last_tenth = -1};
    log_progress_at(p, 0);
}

void log_progress_at(struct log_progress *p, long long done) {
    if (current_level < LOG_INFO) return;
    int percent = (int)(done * 100 / p->total);
    char line[160];
    int n;
    if (isatty(STDERR_FILENO)) {
        long long now = clock_ns();
        if (done < p->total && done > 0 && now - p->last_ns < 100000000) return;
        p->last_ns = now;
        char bar[31];
        for (int i = 0; i < 30; i++) bar[i] = i * 100 < percent * 30 ? '#' : '.';
        bar[30] = 0;
        n = snprintf(line, sizeof line, "\r# %s [%s] %3d%%", p->what, bar, percent);
    } else {
        if (percent / 10 == p->last_tenth) return;
        p->last_tenth = percent / 10;
        n = snprintf(line, sizeof line, "# %s %d%%\n", p->what, percent);
    }
    if (n > 0) write_all(line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

void log_progress_end(struct log_progress *p) {
    log_progress_at(p, p->total);
    if (current_level >= LOG_INFO && isatty(STDERR_FILENO)) write_all("\n", 1);
}
