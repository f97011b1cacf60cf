#ifndef TANDEM_CMD_OPTIONS_H
#define TANDEM_CMD_OPTIONS_H

/* Command lines: one table a subcommand gives parsing, ranges, defaults and --help. Numbers are
 * decimal (base/number.h); an unknown or bad word is named on stderr with the nearest option, exit
 * code 2.
 */

#include <stdbool.h>
#include <stddef.h>

enum option_kind {
    OPTION_FLAG,   /* bool *: set to true; --no-NAME sets false */
    OPTION_SWITCH, /* int *: set to 1; --no-NAME sets 0; what it was says that neither was typed */
    OPTION_INT,    /* int * in [lo, hi] */
    OPTION_DOUBLE, /* double * in [lo, hi] */
    OPTION_BELOW,  /* double * in [lo, hi) */
    OPTION_BYTES,  /* size_t *: "512M", "2GiB", "1.5g"; in [lo, hi] bytes */
    OPTION_STRING, /* const char ** */
    OPTION_GROUP   /* a heading in --help; name is its text */
};

struct option {
    enum option_kind kind;
    const char *name;  /* "max-tokens", without dashes */
    const char *alias; /* "n-predict" or NULL: the names that users of other engines type, with a
                          space between them; "-md" is one with a single dash */
    char letter;       /* 'm' for -m, or 0 */
    void *out;         /* holds the default before parsing */
    const char *arg;   /* "N", "PATH"; NULL for a flag */
    double lo, hi;     /* of numbers; both 0: any */
    const char *help; /* what, with unit; the default is printed by the parser where it says "%d" */
    const char *show; /* default as text, NULL: none shown */
};

struct options {
    const char *command;        /* "serve" */
    const char *usage;          /* "tandem serve --model PATH [options]" */
    const char *about;          /* a paragraph */
    const struct option *table; /* ends in a zero entry (name NULL) */
    const char *after;          /* text behind the options (environment, examples) or NULL */
    int max_words;              /* positional words allowed */
    /* results */
    int n_words;
    const char *words[64];
};

/* Returns -1 to go on, else the exit code (0 after --help on stdout, 2 after a usage error). */
int options_parse(struct options *o, int argc, char **argv);

/* Complain about a value that the table cannot check: prints to stderr, returns 2. */
int options_error(const struct options *o, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Nearest of names[0..n) to `word` (edit distance <= 3), or NULL. */
const char *options_nearest(const char *word, const char *const *names, size_t n);

#endif
