#ifndef TANDEM_BASE_LOG_H
#define TANDEM_BASE_LOG_H

/* Talk for people on stderr: one line a call, "# " in front of notes as start-up prints them.
 * Only cmd/ and serve/ log; the libraries below return errors instead. Thread safe: one write(2) a
 * line. */

enum log_level { LOG_QUIET, LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

/* Lines above `level` are dropped. Default LOG_INFO. Set once at start, before threads. */
void log_set_level(enum log_level level);

void log_at(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define log_error(...) log_at(LOG_ERROR, __VA_ARGS__)
#define log_warn(...) log_at(LOG_WARN, __VA_ARGS__)
#define log_info(...) log_at(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_at(LOG_DEBUG, __VA_ARGS__)

/* A progress line on stderr with the time that is left. On a terminal it is rewritten in place (at
 * most 10 times a second); elsewhere a line is printed at each tenth; with LOG_QUIET nothing. */
struct log_progress {
    const char *what;          /* "loading weights" */
    long long total;           /* units; > 0 */
    long long last_ns;         /* internal */
    int last_tenth;            /* internal */
    long long first, first_ns; /* internal: where it stood when first anything was done */
};
void log_progress_start(struct log_progress *p, const char *what, long long total);
void log_progress_at(struct log_progress *p, long long done);
void log_progress_end(struct log_progress *p);

#endif
