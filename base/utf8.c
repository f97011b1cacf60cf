#include "base/utf8.h"

int utf8_decode(const char *str, size_t n, uint32_t *cp) {
    const unsigned char *s = (const unsigned char *)str;
    unsigned char c = s[0];
    if (c < 0x80) {
        *cp = c;
        return 1;
    }
    if (c < 0xc2 || c > 0xf4) return 0;
    int len = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    /* The second byte's range excludes overlong forms, surrogates and what lies above U+10FFFF. */
    unsigned char lo = 0x80, hi = 0xbf;
    if (c == 0xe0) lo = 0xa0;
    if (c == 0xed) hi = 0x9f;
    if (c == 0xf0) lo = 0x90;
    if (c == 0xf4) hi = 0x8f;
    uint32_t v = c & (0x7fu >> len);
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n) return -1;
        if (s[i] < lo || s[i] > hi) return 0;
        lo = 0x80;
        hi = 0xbf;
        v = v << 6 | (s[i] & 0x3f);
    }
    *cp = v;
    return len;
}

int utf8_encode(uint32_t cp, char out[4]) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

bool utf8_valid(const char *s, size_t n) {
    while (n > 0) {
        uint32_t cp;
        int k = utf8_decode(s, n, &cp);
        if (k <= 0) return false;
        s += k;
        n -= (size_t)k;
    }
    return true;
}

size_t utf8_complete_prefix(const char *s, size_t n) {
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = (unsigned char)s[n - back];
        if ((c & 0xc0) == 0x80) continue; /* continuation: look for its head */
        uint32_t cp;
        return utf8_decode(s + n - back, back, &cp) == -1 ? n - back : n;
    }
    return n;
}
