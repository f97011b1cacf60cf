#include "base/number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool number_u64(const char *text, size_t n, int base, uint64_t *out) {
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) {
        int digit = text[i] - '0';
        if (digit < 0 || digit >= base) return false;
        if (__builtin_mul_overflow(v, (uint64_t)base, &v)) return false;
        if (__builtin_add_overflow(v, (uint64_t)digit, &v)) return false;
    }
    if (n > 0) *out = v;
    return n > 0;
}

bool number_int(const char *text, size_t n, int64_t *out) {
    bool minus = n > 0 && text[0] == '-';
    uint64_t v;
    if (!number_u64(text + minus, n - minus, 10, &v) || v > INT64_MAX) return false;
    *out = minus ? -(int64_t)v : (int64_t)v;
    return true;
}

bool number_in(const char *text, size_t n, int lo, int hi, int *out) {
    int64_t v;
    if (!number_int(text, n, &v) || v < lo || v > hi) return false;
    *out = (int)v;
    return true;
}

static size_t count_digits(const char *s) {
    return strspn(s, "0123456789");
}

bool number_real(const char *text, size_t n, double *out) {
    char copy[64];
    if (n < 1 || n >= sizeof copy || memchr(text, 0, n)) return false;
    memcpy(copy, text, n);
    copy[n] = 0;
    /* The form first: strtod reads more than it. */
    const char *s = copy + (copy[0] == '-');
    size_t whole = count_digits(s), part = 0;
    s += whole;
    if (*s == '.') {
        part = count_digits(++s);
        s += part;
    }
    if (whole + part == 0) return false;
    if (*s == 'e' || *s == 'E') {
        s += s[1] == '-' || s[1] == '+' ? 2 : 1;
        size_t power = count_digits(s);
        if (power == 0) return false;
        s += power;
    }
    if (*s) return false;
    double v = strtod(copy, NULL);
    if (!isfinite(v)) return false;
    *out = v;
    return true;
}
