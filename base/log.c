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

/* ", 3:05 left", or nothing where that is not known yet or a few seconds. */
static void time_left(char *out, size_t size, struct log_progress *p, long long done) {
    long long now = clock_ns();
    out[0] = 0;
    if (done > 0 && p->first_ns == 0) p->first = done, p->first_ns = now;
    if (done <= p->first || done >= p->total || p->first_ns == 0) return;
    double s =
        (double)(now - p->first_ns) / 1e9 * (double)(p->total - done) / (double)(done - p->first);
    if (s < 3 || s > 1e8) return;
    long long left = (long long)s;
    if (left < 3600) snprintf(out, size, ", %lld:%02lld left", left / 60, left % 60);
    else snprintf(out, size, ", %lld:%02lld:%02lld left", left / 3600, left / 60 % 60, left % 60);
}

void log_progress_at(struct log_progress *p, long long done) {
    if (current_level < LOG_INFO) return;
    int percent = (int)(done * 100 / p->total);
    char line[200], left[48];
    int n;
    time_left(left, sizeof left, p, done);
    if (isatty(STDERR_FILENO)) {
        long long now = clock_ns();
        if (done < p->total && done > 0 && now - p->last_ns < 100000000) return;
        p->last_ns = now;
        char bar[31];
        for (int i = 0; i < 30; i++) bar[i] = i * 100 < percent * 30 ? '#' : '.';
        bar[30] = 0;
        n = snprintf(line, sizeof line, "\r# %s [%s] %3d%%%-20s", p->what, bar, percent, left);
    } else {
        if (percent / 10 == p->last_tenth) return;
        p->last_tenth = percent / 10;
        n = snprintf(line, sizeof line, "# %s %d%%%s\n", p->what, percent, left);
    }
    if (n > 0) write_all(line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

void log_progress_end(struct log_progress *p) {
    log_progress_at(p, p->total);
    if (current_level >= LOG_INFO && isatty(STDERR_FILENO)) write_all("\n", 1);
}
