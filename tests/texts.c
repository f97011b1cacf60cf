#include "tests/texts.h"

#include <stdint.h>
#include <string.h>

#include "base/rng.h"
#include "base/utf8.h"

struct maker {
    unsigned idx, draws;
    char *buf;
    size_t n;
};

/* Uniform in 0..n-1 (the bias of a remainder is harmless here). */
static unsigned draw(struct maker *m, unsigned n) {
    return rng_u32(20240817, m->idx, RNG_TEST, m->draws++) % n;
}

static void put(struct maker *m, const char *s) {
    size_t n = strlen(s);
    if (m->n + n > TEXTS_MAX_BYTES) return;
    memcpy(m->buf + m->n, s, n);
    m->n += n;
}

static void put_code_point(struct maker *m, uint32_t cp) {
    char s[5] = {0};
    if (cp == 0 || cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000)) cp = 'x';
    utf8_encode(cp, s);
    put(m, s);
}

#define PICK(m, list) put(m, (list)[draw(m, sizeof(list) / sizeof *(list))])

static const char *const words[] = {"the",
                                    "of",
                                    "and",
                                    "The",
                                    "is",
                                    "was",
                                    "language",
                                    "model",
                                    "token",
                                    "Tandem",
                                    "speculative",
                                    "decoding",
                                    "house",
                                    "river",
                                    "HTTP",
                                    "README",
                                    "don't",
                                    "I'm",
                                    "We've",
                                    "it's",
                                    "they'll",
                                    "he'd",
                                    "you're",
                                    "DON'T",
                                    "IT'S",
                                    "We'Ve",
                                    "rock'n'roll",
                                    "O'Neill",
                                    "caf\xc3\xa9",
                                    "na\xc3\xafve",
                                    "Stra\303\237e",
                                    "a",
                                    "I",
                                    "x",
                                    "antidisestablishmentarianism",
                                    "supercalifragilistic",
                                    "e.g.",
                                    "well-known",
                                    "U.S.A.",
                                    "it\xe2\x80\x99s",
                                    "\xe2\x80\x9cquoted\xe2\x80\x9d",
                                    "\xe2\x80\x94",
                                    "...",
                                    "\xe2\x80\xa6",
                                    "100%",
                                    "$5.99",
                                    "3rd",
                                    "#hashtag",
                                    "@name",
                                    "user@example.com",
                                    "https://a.b/c?d=e"};

static const char *const marks[] = {". ", ", ",   "! ", "? ", "; ",  ": ",  " - ",
                                    "\n", "\n\n", " (", ") ", "\"",  "'",   " ",
                                    "  ", "/",    "!!", "?!", ".\n", "'\n", "\t"};

static void prose(struct maker *m) {
    for (unsigned i = draw(m, 30) + 1; i > 0; i--) {
        PICK(m, words);
        if (draw(m, 4) == 0) PICK(m, marks);
        else put(m, " ");
    }
}

static void code(struct maker *m) {
    static const char *const parts[] = {"int ",
                                        "for (",
                                        "i = 0; ",
                                        "i < n; ",
                                        "i++)",
                                        " {",
                                        "}",
                                        ";\n",
                                        "\n",
                                        "\n\n",
                                        "return ",
                                        "if (",
                                        "!= NULL",
                                        "->next",
                                        "def f(self, x):",
                                        "    ",
                                        "\t",
                                        "\t\t",
                                        "        ",
                                        "self.",
                                        "camelCase",
                                        "snake_case_name",
                                        "CONST_MAX",
                                        "0x1F",
                                        "1e-5",
                                        "3.14f",
                                        "// comment",
                                        "/* c */",
                                        "# note",
                                        "#include <stdio.h>",
                                        "\"str\\n\"",
                                        "'c'",
                                        "std::vector<int>",
                                        "a[i]",
                                        " && ",
                                        " || ",
                                        " == ",
                                        "<<",
                                        ">>=",
                                        "...",
                                        "=>",
                                        "::",
                                        "{}",
                                        "[]",
                                        "()",
                                        "<div class=\"x\">",
                                        "</div>",
                                        "SELECT * FROM t",
                                        "lambda x: x**2",
                                        "\r\n",
                                        "$var",
                                        "@decorator",
                                        "~/.config",
                                        "{{ x }}",
                                        "%d",
                                        "\\",
                                        "`x`",
                                        "'''"};
    for (unsigned i = draw(m, 40) + 1; i > 0; i--) PICK(m, parts);
}

static void spaces(struct maker *m) {
    static const char *const blank[] = {" ",
                                        " ",
                                        " ",
                                        " ",
                                        "  ",
                                        "    ",
                                        "\n",
                                        "\n",
                                        "\t",
                                        "\r",
                                        "\r\n",
                                        "\x0b",
                                        "\x0c",
                                        "\xc2\x85",
                                        "\xc2\xa0",
                                        "\xe1\x9a\x80",
                                        "\xe1\xa0\x8e",
                                        "\xe2\x80\x83",
                                        "\xe2\x80\x89",
                                        "\xe2\x80\x8b",
                                        "\xe2\x80\xa8",
                                        "\xe2\x80\xa9",
                                        "\xe2\x80\xaf",
                                        "\xe2\x81\x9f",
                                        "\xe3\x80\x80",
                                        "\xef\xbb\xbf"};
    static const char *const between[] = {"a", "7",  ".",       "word", "\xe2\x96\x81",
                                          "(", "'s", "\xc3\xa9"};
    for (unsigned i = draw(m, 20) + 1; i > 0; i--) {
        const char *one = blank[draw(m, sizeof blank / sizeof *blank)];
        unsigned times = draw(m, 5) == 0 ? draw(m, 100) : draw(m, 4);
        for (unsigned k = 0; k < times; k++) put(m, one);
        if (draw(m, 2)) PICK(m, between);
    }
}

static void digits(struct maker *m) {
    static const uint32_t zero[] = {'0',   '0',   '0',   '0',    0x660,
                                    0x6f0, 0x966, 0xe50, 0xff10, 0x1d7ce};
    static const uint32_t other[] = {0xb2,   0xb3,   0xb9,   0xbc,   0xbd,  0x2160, 0x2167,
                                     0x2460, 0x2474, 0x3007, 0x2189, 0x9f4, 0x3280, 0x10107};
    static const char *const between[] = {" ", ".", ",", "-",  "/", ":", "  ",
                                          "x", "e", "%", "\n", "'", " a"};
    for (unsigned i = draw(m, 12) + 1; i > 0; i--) {
        uint32_t from = zero[draw(m, sizeof zero / sizeof *zero)];
        for (unsigned k = draw(m, 12) + 1; k > 0; k--) put_code_point(m, from + draw(m, 10));
        if (draw(m, 5) == 0) put_code_point(m, other[draw(m, sizeof other / sizeof *other)]);
        PICK(m, between);
    }
}

/* First and last code point of ranges of letters and marks. */
static const uint32_t scripts[][2] = {
    {0xc0, 0x24f},    {0x250, 0x2af},     {0x300, 0x36f},     {0x391, 0x3c9},    {0x400, 0x4ff},
    {0x531, 0x556},   {0x5d0, 0x5ea},     {0x591, 0x5bd},     {0x620, 0x64a},    {0x64b, 0x65f},
    {0x710, 0x72f},   {0x904, 0x94d},     {0x985, 0x9b9},     {0xa05, 0xa39},    {0xb85, 0xbcd},
    {0xc05, 0xc39},   {0xd05, 0xd4d},     {0xe01, 0xe4e},     {0xe81, 0xec6},    {0xf40, 0xf84},
    {0x1000, 0x104f}, {0x10d0, 0x10f0},   {0x1100, 0x11ff},   {0x1200, 0x1248},  {0x13a0, 0x13f4},
    {0x1780, 0x17d3}, {0x1e00, 0x1eff},   {0x1f00, 0x1f15},   {0x2c00, 0x2c2e},  {0x2126, 0x212b},
    {0x3041, 0x3096}, {0x3099, 0x309a},   {0x30a1, 0x30fa},   {0x3105, 0x312f},  {0x4e00, 0x9fa5},
    {0x4e00, 0x9fa5}, {0xac00, 0xd7a3},   {0xf900, 0xfa6d},   {0xfb1d, 0xfb36},  {0xff21, 0xff5a},
    {0xff66, 0xff9d}, {0x10400, 0x1044f}, {0x1d400, 0x1d454}, {0x20000, 0x2a6d6}};

static void script_words(struct maker *m) {
    static const char *const between[] = {" ", " ",  ", ", "\xe3\x80\x82", "\xd8\x8c ", "-",
                                          "",  "\n", " '"};
    for (unsigned i = draw(m, 10) + 1; i > 0; i--) {
        const uint32_t *range = scripts[draw(m, sizeof scripts / sizeof *scripts)];
        for (unsigned k = draw(m, 8) + 1; k > 0; k--) {
            put_code_point(m, range[0] + draw(m, range[1] - range[0] + 1));
            if (draw(m, 8) == 0) put_code_point(m, 0x300 + draw(m, 0x70)); /* marks to compose */
            if (draw(m, 16) == 0) put_code_point(m, "aeiouAEIOUnscNSC"[draw(m, 16)]);
        }
        PICK(m, between);
    }
}

static void emoji(struct maker *m) {
    static const char *const fixed[] = {"\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb",
                                        "\xf0\x9f\x91\x8d\xf0\x9f\x8f\xbd",
                                        "1\xef\xb8\x8f\xe2\x83\xa3",
                                        "\xe2\x9d\xa4\xef\xb8\x8f",
                                        "\xf0\x9f\x87\xa9\xf0\x9f\x87\xaa",
                                        "\xe2\x9c\x85",
                                        "\xf0\x9f\xa6\x99",
                                        "\xf0\x9f\x98\x80",
                                        "\xf0\x9f\x98\x81",
                                        "\xf0\x9f\x9a\x80",
                                        " ",
                                        " ",
                                        "ok",
                                        "!",
                                        "\xe2\x84\xa2",
                                        "\n"};
    for (unsigned i = draw(m, 25) + 1; i > 0; i--) {
        if (draw(m, 2)) PICK(m, fixed);
        else put_code_point(m, draw(m, 2) ? 0x1f300 + draw(m, 0x2f0) : 0x2600 + draw(m, 0x1b0));
    }
}

static void random_code_points(struct maker *m) {
    for (unsigned i = draw(m, 60) + 1; i > 0; i--) {
        switch (draw(m, 6)) {
        case 0:
            put_code_point(m, 1 + draw(m, 0x7f));
            break;
        case 1:
            put_code_point(m, 1 + draw(m, 0x7ff));
            break;
        case 2:
        case 3:
            put_code_point(m, 1 + draw(m, 0xffff));
            break;
        case 4:
            put_code_point(m, 0x10000 + draw(m, 0x20000));
            break;
        default:
            put_code_point(m, 0x10000 + draw(m, 0x100000));
            break;
        }
    }
}

size_t texts_make(unsigned idx, char *buf) {
    static void (*const kinds[])(struct maker *) = {
        prose, code, spaces, digits, script_words, emoji, random_code_points};
    struct maker m = {.idx = idx, .buf = buf};
    unsigned n_kinds = sizeof kinds / sizeof *kinds;
    if (idx % (n_kinds + 1) < n_kinds) kinds[idx % (n_kinds + 1)](&m);
    else
        for (unsigned i = draw(&m, 5) + 1; i > 0; i--) kinds[draw(&m, n_kinds)](&m);
    return m.n;
}
