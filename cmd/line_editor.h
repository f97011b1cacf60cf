#ifndef TANDEM_CMD_LINE_EDITOR_H
#define TANDEM_CMD_LINE_EDITOR_H

/* One line of a person at a terminal, with editing and a history in a file (libedit). What is
 * pasted (where the terminal marks it, as most do) is one message however many lines it has: its
 * newlines stand as U+2424 in the line and are newlines in what is returned. */

#include <stdbool.h>
#include <stddef.h>

struct err;
struct line_editor;

enum line_result { LINE_TEXT, LINE_INTERRUPTED, LINE_END };

/* history_path NULL: none is kept. E_NOMEM. Sets the process's LC_CTYPE to one that knows UTF-8. */
int line_editor_open(struct line_editor **out, const char *history_path, struct err *e);
void line_editor_close(struct line_editor *l); /* NULL allowed */

/* Ask with `prompt`. LINE_TEXT: *line (NUL-terminated, without the newline, valid until the next
 * call). LINE_INTERRUPTED: Ctrl-C. LINE_END: Ctrl-D on an empty line, or the terminal is gone. */
enum line_result line_editor_read(struct line_editor *l, const char *prompt, const char **line,
                                  size_t *n);

/* The same for a question in between: nothing goes into the history. */
enum line_result line_editor_ask(struct line_editor *l, const char *prompt, const char **line,
                                 size_t *n);

/* For a SIGINT handler: end the line in hand. */
void line_editor_interrupt(void);

#endif
