#ifndef TANDEM_BASE_NUMBER_H
#define TANDEM_BASE_NUMBER_H

/* Numbers in text that people and files send: decimal digits and nothing beside them. strtol and
 * strtod also take leading blanks, a plus, hexadecimal, "inf" and "nan", and what does not fit;
 * none of these passes here. Each function answers whether text[0..n) as a whole is such a number
 * (no zero byte is needed behind it) and leaves *out alone where it is not.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* "-12": digits, behind at most one minus; of a magnitude up to INT64_MAX. */
bool number_int(const char *text, size_t n, int64_t *out);

/* The same in [lo, hi]. */
bool number_in(const char *text, size_t n, int lo, int hi, int *out);

/* Digits of `base`, 8 or 10, alone. */
bool number_u64(const char *text, size_t n, int base, uint64_t *out);

/* "-1.5", "3", ".25", "1e-6", of fewer than 64 characters, finite. */
bool number_real(const char *text, size_t n, double *out);

#endif
