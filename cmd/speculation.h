#ifndef TANDEM_CMD_SPECULATION_H
#define TANDEM_CMD_SPECULATION_H

/* Speculation on the command line: flags read from text, marks around accepted draft tokens, and
 * what it did in a line for people. */

#include "base/strbuf.h"
#include "cmd/options.h"
#include "engine/engine.h"

/* "auto" or 0..KERN_MAX_DRAFT; text NULL: *out stays. -1 to go on, else the exit code. */
int speculation_parse_draft_tokens(const struct options *o, const char *text, int *out);
/* "lossless" or "gumbel"; likewise. */
int speculation_parse_coupling(const struct options *o, const char *text,
                               enum verify_coupling *out);

/* ---- Marks: green on a terminal, between ‹ and › elsewhere ---- */

struct speculation_marks {
    bool show, tty;
    bool on; /* inside marked text */
};
/* What goes before text that is, or is not, of accepted draft tokens; "" where nothing changes. */
const char *speculation_mark(struct speculation_marks *m, bool drafted);

/* ---- What it did ---- */

/* ", 2.9 tokens a round (76 % of 80 draft tokens)"; nothing where nothing was proposed. */
void speculation_append_short(struct strbuf *out, const struct engine_speculation *s);
/* Everything that is counted; no_draft as in engine_no_draft_name. */
void speculation_append_long(struct strbuf *out, const struct engine_speculation *s,
                             const char *no_draft);

#endif
