#ifndef TANDEM_CMD_TERMINAL_H
#define TANDEM_CMD_TERMINAL_H

/* The terminal while an answer is printed: what is typed meanwhile is kept for the next prompt and
 * not shown amid the answer. */

#include <stdbool.h>

#include "base/strbuf.h"

/* Echo of standard input off; nothing where it is no terminal. */
void terminal_quiet(void);
/* A model's text must not command the terminal: append s[0..n), whole characters, without control
 * characters but newline and tab. */
void terminal_append(struct strbuf *out, const char *s, size_t n);
/* As it was before, colours too where `colours`. Also for a signal handler, and twice. */
void terminal_restore(bool colours);

#endif
