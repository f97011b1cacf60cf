#ifndef TANDEM_BASE_UTF8_H
#define TANDEM_BASE_UTF8_H

/* UTF-8 as RFC 3629 has it: no surrogates, no overlong forms, nothing above U+10FFFF. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Read one code point of s[0..n), n > 0. Returns its length 1..4 and sets *cp; 0 where the bytes
 * are invalid; -1 where they are a valid beginning that ends too early. */
int utf8_decode(const char *s, size_t n, uint32_t *cp);

/* Write cp to out, returns the length 1..4. cp must be a scalar value. */
int utf8_encode(uint32_t cp, char out[4]);

bool utf8_valid(const char *s, size_t n);

/* How many bytes of s[0..n) may be shown now: n without an incomplete (not invalid) tail of at most
 * three bytes. */
size_t utf8_complete_prefix(const char *s, size_t n);

#endif
