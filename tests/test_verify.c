/* verify/: ranges of the sampling settings by table, and the text of a stream against a twin that
 * looks at everything again after every byte. The twin is quadratic and knows no automaton: it
 * compares each stop with the end of the text, and each proper prefix of each stop. Streams are
 * random over small alphabets, so that stops and their beginnings are met often, and are cut at
 * random places. */
#include "tests/harness.h"

#include <math.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "base/strbuf.h"
#include "base/utf8.h"
#include "verify/verify.h"

static void add_stop(struct verify_params *p, const char *s, size_t n) {
    struct verify_stop *stop = &p->stops[p->n_stops++];
    stop->n = (int)n;
    memcpy(stop->text, s, n);
}

static void test_verify_params_ranges(void) {
    struct verify_params p;
    struct err e = {0};
    verify_params_default(&p);
    assert_ok(verify_params_check(&p, &e), e);
#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        verify_params_default(&p);                                                                 \
        p.field = (value);                                                                         \
        e.message[0] = 0;                                                                          \
        assert_int_equal(verify_params_check(&p, &e), E_RANGE);                                    \
        if (!strstr(e.message, #field)) fail_msg("'%s' does not name %s", e.message, #field);      \
    } while (0)
#define TAKEN(field, value)                                                                        \
    do {                                                                                           \
        verify_params_default(&p);                                                                 \
        p.field = (value);                                                                         \
        assert_ok(verify_params_check(&p, &e), e);                                                 \
    } while (0)
    REFUSED(temperature, -0.001);
    REFUSED(temperature, 100.1);
    REFUSED(temperature, NAN);
    REFUSED(temperature, INFINITY);
    TAKEN(temperature, 0);
    TAKEN(temperature, 100);
    REFUSED(top_k, -1);
    TAKEN(top_k, 1 << 30);
    REFUSED(top_p, 0);
    REFUSED(top_p, 1.0001);
    REFUSED(top_p, NAN);
    TAKEN(top_p, 1e-6);
    REFUSED(min_p, -0.1);
    REFUSED(min_p, 1.1);
    TAKEN(min_p, 1);
    REFUSED(repetition_penalty, 0);
    REFUSED(repetition_penalty, 1e-45); /* logits divided by it would be infinite */
    REFUSED(repetition_penalty, 101);
    REFUSED(presence_penalty, 2.1);
    REFUSED(frequency_penalty, -2.1);
    REFUSED(logprobs, -2);
    REFUSED(logprobs, KERN_MAX_LOGPROBS + 1);
    TAKEN(logprobs, 0);
    REFUSED(max_tokens, 0);
    REFUSED(max_tokens, -2);
    TAKEN(max_tokens, 1);
    REFUSED(min_tokens, -1);
    TAKEN(min_tokens, 5);
    REFUSED(draft_tokens, -3);
    REFUSED(draft_tokens, KERN_MAX_DRAFT + 1);
    REFUSED(draft_tokens, INT32_MAX);
    TAKEN(draft_tokens, KERN_MAX_DRAFT);
    TAKEN(draft_tokens, 0);
    TAKEN(draft_tokens, VERIFY_DRAFT_AUTO);
    TAKEN(draft_tokens, VERIFY_DRAFT_DEFAULT);
    REFUSED(coupling, (enum verify_coupling)2);
    TAKEN(coupling, VERIFY_GUMBEL);
    TAKEN(lookup, false);
    verify_params_default(&p);
    p.max_tokens = 4;
    p.min_tokens = 5;
    assert_int_equal(verify_params_check(&p, &e), E_RANGE);
    p.min_tokens = 4;
    assert_ok(verify_params_check(&p, &e), e);
    verify_params_default(&p);
    p.n_stops = VERIFY_MAX_STOPS + 1;
    assert_int_equal(verify_params_check(&p, &e), E_RANGE);
    verify_params_default(&p);
    add_stop(&p, "", 0);
    assert_int_equal(verify_params_check(&p, &e), E_RANGE);
    verify_params_default(&p);
    add_stop(&p, "a\xf0\x9f", 3);
    assert_int_equal(verify_params_check(&p, &e), E_RANGE);
    verify_params_default(&p);
    p.n_stops = 1;
    p.stops[0].n = VERIFY_MAX_STOP_BYTES + 1;
    assert_int_equal(verify_params_check(&p, &e), E_RANGE);
}

/* What a request gets that names nothing of speculation; names there and back; the words of the
 * refusals, which clients show as they are. */
static void test_verify_params_speculation(void) {
    struct verify_params p;
    struct err e = {0};
    enum verify_coupling c = VERIFY_LOSSLESS;
    verify_params_default(&p);
    assert_int_equal(p.draft_tokens, VERIFY_DRAFT_DEFAULT);
    assert_int_equal(p.coupling, VERIFY_LOSSLESS);
    assert_true(p.lookup && p.draft_model);
    p.draft_tokens = 17;
    assert_int_equal(verify_params_check(&p, &e), E_RANGE);
    assert_string_equal(e.message, "draft_tokens is 17, allowed is \"auto\" or [0, 16]");
    assert_ok(verify_coupling_parse(&c, "gumbel!", 6, &e), e);
    assert_int_equal(c, VERIFY_GUMBEL);
    assert_string_equal(verify_coupling_name(c), "gumbel");
    assert_ok(verify_coupling_parse(&c, "lossless", 8, &e), e);
    assert_string_equal(verify_coupling_name(c), "lossless");
    assert_string_equal(verify_coupling_name((enum verify_coupling)9), "?");
    static const char *const wrong[] = {"", "Gumbel", "gumbe", "gumbel ", "lossless\n"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(verify_coupling_parse(&c, wrong[i], strlen(wrong[i]), &e), E_RANGE);
    assert_int_equal(verify_coupling_parse(&c, "tree", 4, &e), E_RANGE);
    assert_string_equal(e.message, "coupling is \"tree\", allowed is \"lossless\" or \"gumbel\"");
    assert_int_equal(c, VERIFY_LOSSLESS);
}

/* ---- The twin ---- */

struct twin {
    const struct verify_params *p;
    char text[4096];
    size_t n, shown;
    int stop_idx;
};

static bool ends_in(const struct twin *w, const char *s, size_t n) {
    return w->n >= n && memcmp(w->text + w->n - n, s, n) == 0;
}

static void twin_byte(struct twin *w, char c) {
    if (w->stop_idx >= 0) return;
    w->text[w->n++] = c;
    for (int i = 0; i < w->p->n_stops; i++) {
        const struct verify_stop *s = &w->p->stops[i];
        if (ends_in(w, s->text, (size_t)s->n) &&
            (w->stop_idx < 0 || s->n > w->p->stops[w->stop_idx].n))
            w->stop_idx = i;
    }
    if (w->stop_idx >= 0) w->shown = w->n - (size_t)w->p->stops[w->stop_idx].n;
}

/* What may be shown at a cut. */
static void twin_cut(struct twin *w) {
    if (w->stop_idx >= 0) return;
    size_t hold = w->n - utf8_complete_prefix(w->text, w->n);
    for (int i = 0; i < w->p->n_stops; i++)
        for (size_t k = 1; k < (size_t)w->p->stops[i].n; k++)
            if (k > hold && ends_in(w, w->p->stops[i].text, k)) hold = k;
    w->shown = w->n - hold;
}

/* Run s through both with cuts from `seed`; compares after every piece. */
static void compare(const struct verify_params *p, const char *s, size_t n, uint64_t seed) {
    struct verify_text t;
    struct strbuf sink = {0};
    struct err e = {0};
    static struct twin w;
    memset(&w, 0, sizeof w);
    w.p = p;
    w.stop_idx = -1;
    assert_ok(verify_text_init(&t, NULL, p, false, &e), e);
    uint32_t draw = 0;
    for (size_t at = 0; at < n;) {
        size_t len = 1 + rng_u32(seed, 1, RNG_TEST, draw++) % 5;
        if (len > n - at) len = n - at;
        bool was = t.stopped;
        bool now = verify_text_push_bytes(&t, s + at, len, &sink);
        for (size_t i = 0; i < len; i++) twin_byte(&w, s[at + i]);
        twin_cut(&w);
        assert_int_equal(now, !was && w.stop_idx >= 0);
        assert_int_equal(t.stop_idx, w.stop_idx);
        assert_int_equal(sink.n, w.shown);
        at += len;
    }
    verify_text_finish(&t, &sink);
    if (w.stop_idx < 0) w.shown = w.n;
    assert_int_equal(sink.n, w.shown);
    if (w.shown) assert_memory_equal(sink.data, w.text, w.shown);
    assert_false(sink.failed);
    strbuf_deinit(&sink);
    verify_text_deinit(&t);
}

static void test_verify_text_known_cases(void) {
    static const struct {
        const char *text, *stops[3];
    } cases[] = {
        {"aaab", {"aab"}},
        {"xaabaabaac", {"aabaac"}},
        {"abcd", {"abcd", "bc"}},
        {"xyz", {"xyz"}},
        {"xyzend", {"end", "nd"}},
        {"no stop at all", {"zz"}},
        {"caf\xc3\xa9!", {"\xc3\xa9"}},
        {"\xf0\x9f\x98\x80\xf0\x9f\x98\x81", {"\xf0\x9f\x98\x81"}},
        {"\xf0\x9f\x98", {"q"}},
        {"a\xff\xfe\xc3", {"q"}},
        {"\xc3(\xe2\x82", {"("}},
        {"\n\nUser:", {"\nUser:", "User"}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (uint64_t seed = 0; seed < 200; seed++) {
            struct verify_params p;
            verify_params_default(&p);
            for (int i = 0; i < 3 && cases[c].stops[i]; i++)
                add_stop(&p, cases[c].stops[i], strlen(cases[c].stops[i]));
            compare(&p, cases[c].text, strlen(cases[c].text), seed);
        }
}

static void test_verify_text_random_streams(void) {
    /* Pieces that combine into words, emoji whole and broken, and bytes that are never valid. */
    static const char *const alphabet[] = {
        "a",    "b",    "aa",   "ab",       "\xc3\xa9", "\xf0\x9f\x98\x80",
        "\xc3", "\xa9", "\xff", "\xf0\x9f", "\n"};
    static const int valid[] = {0, 1, 2, 3, 4, 5, 10};
    int n_stopped = 0;
    for (uint64_t round = 0; round < 20000; round++) {
        uint32_t draw = 0;
#define DRAW(n) (rng_u32(round, 0, RNG_TEST, draw++) % (n))
        struct verify_params p;
        verify_params_default(&p);
        uint32_t n_stops = DRAW(4), width = 2 + DRAW(10);
        for (uint32_t i = 0; i < n_stops; i++) {
            char stop[VERIFY_MAX_STOP_BYTES];
            size_t n = 0;
            for (uint32_t k = 0, len = 1 + DRAW(5); k < len; k++) {
                const char *piece = alphabet[valid[DRAW(width < 7 ? width : 7)]];
                memcpy(stop + n, piece, strlen(piece));
                n += strlen(piece);
            }
            add_stop(&p, stop, n);
        }
        char text[512];
        size_t n = 0;
        for (uint32_t k = 0, len = 1 + DRAW(60); k < len; k++) {
            const char *piece = alphabet[DRAW(width)];
            memcpy(text + n, piece, strlen(piece));
            n += strlen(piece);
        }
        compare(&p, text, n, round);
        for (uint32_t i = 0; i < n_stops; i++)
            if (memmem(text, n, p.stops[i].text, (size_t)p.stops[i].n)) {
                n_stopped++;
                break;
            }
    }
    assert_true(n_stopped > 4000 && n_stopped < 16000); /* both ends were met often */
}

/* A run of `a` against the stop "aaa...ab": the worst case of a search that starts over at each
 * byte. The longest stop, and a text whose time would be 256 times as long if it were not linear.
 */
static void test_verify_text_long_stop(void) {
    struct verify_params p;
    struct verify_text t;
    struct strbuf sink = {0};
    struct err e = {0};
    char stop[VERIFY_MAX_STOP_BYTES];
    verify_params_default(&p);
    memset(stop, 'a', sizeof stop);
    stop[sizeof stop - 1] = 'b';
    for (int i = 0; i < VERIFY_MAX_STOPS; i++) add_stop(&p, stop + i, sizeof stop - (size_t)i);
    p.stops[1].text[100] = 'c';
    assert_ok(verify_params_check(&p, &e), e);
    assert_ok(verify_text_init(&t, NULL, &p, false, &e), e);
    for (int i = 0; i < 200000; i++) assert_false(verify_text_push_bytes(&t, "a", 1, &sink));
    assert_int_equal(t.held.n, VERIFY_MAX_STOP_BYTES - 1);
    assert_true(verify_text_push_bytes(&t, "b", 1, &sink));
    assert_int_equal(t.stop_idx, 0);
    verify_text_finish(&t, &sink);
    assert_int_equal(sink.n, 200001 - VERIFY_MAX_STOP_BYTES);
    assert_false(verify_text_push_bytes(&t, "more", 4, &sink)); /* ignored after the stop */
    assert_int_equal(sink.n, 200001 - VERIFY_MAX_STOP_BYTES);
    strbuf_deinit(&sink);
    verify_text_deinit(&t);
}

/* A NULL sink drops the text and changes nothing else. */
static void test_verify_text_null_sink(void) {
    struct verify_params p;
    struct verify_text t;
    struct err e = {0};
    verify_params_default(&p);
    add_stop(&p, "ab", 2);
    assert_ok(verify_text_init(&t, NULL, &p, false, &e), e);
    assert_false(verify_text_push_bytes(&t, "xa", 2, NULL));
    assert_int_equal(t.held.n, 1);
    assert_true(verify_text_push_bytes(&t, "b", 1, NULL));
    verify_text_finish(&t, NULL);
    verify_text_deinit(&t);
}

const struct test tests[] = {
    {"verify_params_ranges", TEST_QUICK, 5000, test_verify_params_ranges},
    {"verify_params_speculation", TEST_QUICK, 1000, test_verify_params_speculation},
    {"verify_text_known_cases", TEST_QUICK, 5000, test_verify_text_known_cases},
    {"verify_text_random_streams", TEST_QUICK, 20000, test_verify_text_random_streams},
    {"verify_text_long_stop", TEST_QUICK, 5000, test_verify_text_long_stop},
    {"verify_text_null_sink", TEST_QUICK, 5000, test_verify_text_null_sink},
    {0},
};
