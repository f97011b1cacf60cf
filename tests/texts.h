#ifndef TANDEM_TESTS_TEXTS_H
#define TANDEM_TESTS_TEXTS_H

/* Texts for tokenizer tests, a pure function of their number, so that only hashes of the expected
 * ids need to be stored. Eight kinds in turn: prose, code, white space, digits, scripts, emoji,
 * random code points, all mixed. Valid UTF-8 without NUL. */

#include <stddef.h>

enum { TEXTS_MAX_BYTES = 4096 };

/* Write text `idx` to buf[0..TEXTS_MAX_BYTES); returns its bytes. */
size_t texts_make(unsigned idx, char *buf);

#endif
