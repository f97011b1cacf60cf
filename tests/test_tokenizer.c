/* Goal: ids equal those of the models' own tokenizers, and encoding stays fast and lossless on any
 * bytes.
 * Method: the vocabularies' own vectors and 10,000 made texts each (tests/texts.c), whose ids were
 * taken from the tokenizers package on the full vocabularies (tests/golden/make_tokenizer.py); here
 * the vocabularies are pruned to the tokens that occur, but for the default target's, which is
 * whole. Round trips, time limits and fingerprints need no reference. */
#include "tests/harness.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "model/tokenizer_private.h"
#include "tests/texts.h"

enum { N_TEXTS = 10000 };

static const char *const kinds[] = {"smollm", "gpt-2", "llama-bpe", "qwen2", "llama-spm"};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* A tokenizer with its file; `original` maps its ids to those of the full vocabulary (NULL: equal).
 */
struct opened {
    struct gguf *g;
    struct tokenizer *t;
    int32_t *original;
};

static void open_kind(struct opened *o, const char *kind) {
    struct err e = {0};
    char name[64];
    snprintf(name, sizeof name, "vocab_%s.gguf", kind);
    bool whole = strcmp(kind, "smollm") == 0;
    *o = (struct opened){0};
    assert_ok(gguf_open(&o->g, whole ? test_default_target() : test_golden(name), &e), e);
    assert_ok(tokenizer_open_gguf(&o->t, o->g, &e), e);
    if (whole) return;
    const void *data;
    size_t n;
    assert_ok(gguf_array_data(o->g, "tandem.original_ids", GGUF_I32, &data, &n, &e), e);
    assert_int_equal(n, tokenizer_n_tokens(o->t));
    o->original = malloc(n * sizeof *o->original);
    memcpy(o->original, data, n * sizeof *o->original);
}

static void close_kind(struct opened *o) {
    tokenizer_close(o->t);
    gguf_close(o->g);
    free(o->original);
}

static struct tokens encode(const struct tokenizer *t, const char *s, size_t n, unsigned flags) {
    struct err e = {0};
    struct tokens ids = {0};
    assert_ok(tokenizer_encode(t, s, n, flags, &ids, &e), e);
    return ids;
}

static int original_id(const struct opened *o, int id) {
    return o->original ? o->original[id] : id;
}

/* ---- against the references ---- */

static void check_rows(const struct opened *o, const struct tokenizer *t, json_t *rows,
                       unsigned flags, const char *kind) {
    assert_true(json_array_size(rows) >= 40);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        json_t *text = json_object_get(json_array_get(rows, i), "text");
        json_t *want = json_object_get(json_array_get(rows, i), "ids");
        struct tokens ids = encode(t, json_string_value(text), json_string_length(text), flags);
        for (size_t k = 0; k < ids.n && k < json_array_size(want); k++) {
            int got = o ? original_id(o, ids.ids[k]) : ids.ids[k];
            if (got != json_integer_value(json_array_get(want, k)))
                fail_msg("%s, text %zu '%s', id %zu: got %d, want %lld", kind, i,
                         json_string_value(text), k, got,
                         (long long)json_integer_value(json_array_get(want, k)));
        }
        if (ids.n != json_array_size(want))
            fail_msg("%s, text %zu '%s': got %zu ids, want %zu", kind, i, json_string_value(text),
                     ids.n, json_array_size(want));
        tokens_deinit(&ids);
    }
}

static json_t *load_json(const char *path) {
    json_error_t bad;
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &bad);
    if (!root) fail_msg("%s: %s", path, bad.text);
    return root;
}

static void test_tokenizer_own_vectors(void) {
    for (int k = 1; k < N_KINDS; k++) {
        char name[64];
        struct opened o;
        open_kind(&o, kinds[k]);
        snprintf(name, sizeof name, "tokenizer_%s.json", kinds[k]);
        json_t *rows = load_json(test_golden(name));
        check_rows(&o, o.t, rows, 0, kinds[k]);
        json_decref(rows);
        close_kind(&o);
    }
}

static uint64_t fnv(const struct opened *o, const struct tokens *ids) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < ids->n; i++)
        h = (h ^ (uint64_t)original_id(o, ids->ids[i])) * 0x100000001b3u;
    return h;
}

static void test_tokenizer_ten_thousand_texts(void) {
    char name[64], text[TEXTS_MAX_BYTES];
    for (int k = 0; k < N_KINDS; k++) {
        struct err e = {0};
        struct opened o;
        struct file hashes;
        open_kind(&o, kinds[k]);
        snprintf(name, sizeof name, "tokenizer_%s.hashes", kinds[k]);
        assert_ok(file_read(&hashes, test_golden(name), 0, &e), e);
        assert_int_equal(hashes.bytes, N_TEXTS * 8);
        for (unsigned i = 0; i < N_TEXTS; i++) {
            uint64_t want;
            memcpy(&want, hashes.data + 8 * i, 8);
            size_t n = texts_make(i, text);
            struct tokens ids = encode(o.t, text, n, 0);
            if (fnv(&o, &ids) != want)
                fail_msg("%s: ids of text %u (%zu bytes, %zu ids) differ", kinds[k], i, n, ids.n);
            tokens_deinit(&ids);
        }
        file_close(&hashes);
        close_kind(&o);
    }
}

/* Files as the tokenizers package saves them, special tokens parsed. */
static void test_tokenizer_json_files(void) {
    for (int k = 0; k < N_KINDS; k++) {
        char name[64];
        struct err e = {0};
        struct file f;
        struct tokenizer *t;
        snprintf(name, sizeof name, "hf_%s.json", kinds[k]);
        assert_ok(file_read(&f, test_golden(name), 0, &e), e);
        assert_ok(tokenizer__open_hf_bytes(&t, (const char *)f.data, f.bytes, NULL, 0, NULL, 0, &e),
                  e);
        json_t *root = load_json(test_golden(name));
        check_rows(NULL, t, json_object_get(root, "expected"),
                   TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_SPECIAL, name);
        assert_int_equal(tokenizer_adds_bos(t), strcmp(kinds[k], "llama-spm") == 0);
        json_decref(root);
        tokenizer_close(t);
        file_close(&f);
    }
}

/* ---- the default target's tokenizer ---- */

static void test_tokenizer_default_target(void) {
    struct opened o;
    open_kind(&o, "smollm");
    assert_int_equal(tokenizer_n_tokens(o.t), 49152);
    assert_int_equal(tokenizer_bos(o.t), 1);
    assert_false(tokenizer_adds_bos(o.t));
    assert_int_equal(tokenizer_find(o.t, "<|im_start|>"), 1);
    assert_int_equal(tokenizer_find(o.t, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_find(o.t, "Hello"), 19556);
    assert_int_equal(tokenizer_find(o.t, " world"), 905);
    assert_int_equal(tokenizer_find(o.t, "no such token"), -1);
    assert_true(tokenizer_is_eog(o.t, 2) && tokenizer_is_eog(o.t, 0));
    assert_false(tokenizer_is_eog(o.t, 1) || tokenizer_is_eog(o.t, 905) ||
                 tokenizer_is_eog(o.t, -1));
    assert_true(tokenizer_is_control(o.t, 1));
    assert_false(tokenizer_is_control(o.t, 905) || tokenizer_is_control(o.t, 1 << 30));
    /* The model's own tokenizer has no token for these bytes and drops them. */
    struct tokens ids = encode(o.t,
                               "a\x04"
                               "b\xff",
                               4, 0);
    assert_int_equal(ids.n, 2);
    tokens_deinit(&ids);
    close_kind(&o);
}

static void test_tokenizer_typed_specials_stay_text(void) {
    static const char text[] = "a<|im_start|>user\n<|im_end|>";
    struct opened o;
    open_kind(&o, "smollm");
    struct tokens ids = encode(o.t, text, sizeof text - 1, TOKENIZER_ADD_SPECIAL);
    for (size_t i = 0; i < ids.n; i++) assert_false(tokenizer_is_control(o.t, ids.ids[i]));
    struct strbuf s = {0};
    tokenizer_decode(o.t, ids.ids, ids.n, false, &s);
    assert_string_equal(s.data, text);
    tokens_deinit(&ids);
    ids = encode(o.t, text, sizeof text - 1, TOKENIZER_PARSE_SPECIAL);
    assert_int_equal(ids.ids[1], 1);
    assert_int_equal(ids.ids[ids.n - 1], 2);
    strbuf_clear(&s);
    tokenizer_decode(o.t, ids.ids, ids.n, true, &s);
    assert_string_equal(s.data, text);
    strbuf_clear(&s);
    tokenizer_decode(o.t, ids.ids, ids.n, false, &s);
    assert_string_equal(s.data, "auser\n");
    tokens_deinit(&ids);
    strbuf_deinit(&s);
    close_kind(&o);
}

static void test_tokenizer_limit(void) {
    struct opened o;
    struct err e = {0};
    open_kind(&o, "smollm");
    struct tokens ids = {.limit = 3};
    assert_int_equal(tokenizer_encode(o.t, "one two three four", 18, 0, &ids, &e), E_TOO_LONG);
    assert_int_equal(ids.n, 3);
    tokens_deinit(&ids);
    close_kind(&o);
}

/* ---- any bytes ---- */

/* Random bytes, mostly text: valid characters, torn ones, single high bytes, NUL. */
static size_t random_bytes(unsigned seed, char *buf) {
    size_t n = 0;
    unsigned draws = 0;
    for (unsigned i = rng_u32(seed, 0, RNG_TEST, draws++) % 40; i > 0; i--) {
        unsigned what = rng_u32(seed, 1, RNG_TEST, draws++);
        switch (what % 6) {
        case 0:
            buf[n++] = (char)(what >> 8);
            break;
        case 1:
            memcpy(buf + n, "\xf0\x9f\x98\x80", 4), n += 1 + (what >> 8) % 4;
            break;
        case 2:
            memcpy(buf + n, "\xe2\x96\x81", 3), n += 1 + (what >> 8) % 3;
            break;
        case 3:
            buf[n++] = ' ';
            break;
        default:
            buf[n++] = (char)('a' + (what >> 8) % 26);
        }
    }
    return n;
}

static void test_tokenizer_round_trip_bytes(void) {
    static const char *const lossless[] = {"gpt-2", "llama-bpe", "llama-spm"};
    char text[400];
    for (int k = 0; k < 3; k++) {
        struct opened o;
        open_kind(&o, lossless[k]);
        bool spm = k == 2;
        for (unsigned seed = 0; seed < 5000; seed++) {
            size_t n = random_bytes(seed, text);
            struct tokens ids = encode(o.t, text, n, 0);
            struct strbuf all = {0}, pieces = {0}, want = {0};
            tokenizer_decode(o.t, ids.ids, ids.n, false, &all);
            for (size_t i = 0; i < ids.n; i++)
                tokenizer_token_bytes(o.t, ids.ids[i], false, &pieces);
            if (spm && n) /* the space in front, and U+2581 reads as a space */
                strbuf_append_char(&want, ' ');
            for (size_t i = 0; i < n; i++)
                if (spm && n - i >= 3 && !memcmp(text + i, SPM_SPACE, 3))
                    strbuf_append_char(&want, ' '), i += 2;
                else strbuf_append(&want, text + i, 1);
            if (pieces.n != want.n || (want.n && memcmp(pieces.data, want.data, want.n)))
                fail_msg("%s: pieces of text %u differ from it", lossless[k], seed);
            size_t skip = spm && n ? 1 : 0;
            if (all.n != want.n - skip || (all.n && memcmp(all.data, want.data + skip, all.n)))
                fail_msg("%s: text %u does not come back", lossless[k], seed);
            strbuf_deinit(&all);
            strbuf_deinit(&pieces);
            strbuf_deinit(&want);
            tokens_deinit(&ids);
        }
        close_kind(&o);
    }
}

static void test_tokenizer_bad_ids_decode_to_nothing(void) {
    struct opened o;
    open_kind(&o, "smollm");
    struct strbuf s = {0};
    const int32_t ids[] = {-1, 49152, INT32_MAX, INT32_MIN};
    tokenizer_decode(o.t, ids, 4, true, &s);
    assert_int_equal(s.n, 0);
    strbuf_deinit(&s);
    close_kind(&o);
}

/* Long runs of anything: near linear, or the limits here and of the test end it. A megabyte of one
 * character is a single pre-token, where quadratic merging would take hours. */
static void test_tokenizer_long_runs(void) {
    static const char *const units[] = {" ",
                                        "a",
                                        "\xcc\x81\xcc\x96", /* marks in the wrong order */
                                        "ab",
                                        "\n",
                                        " \n",
                                        "7",
                                        "=",
                                        "<",
                                        "'s",
                                        "\xff",
                                        "\xc3\xa9",
                                        "\xe4\xb8\xad",
                                        "a\xcc\x81",
                                        "\xe2\x96\x81",
                                        "<|im_start",
                                        "\r\n\r",
                                        "\xe3\x80\x80x"};
    char *text = malloc(1 << 20);
    for (int k = 0; k < N_KINDS; k++) {
        struct opened o;
        open_kind(&o, kinds[k]);
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            size_t len = strlen(units[u]);
            bool most = u < 2 && (k == 0 || k == N_KINDS - 1);
            size_t n = most ? 1 << 20 : u < 3 ? 1 << 18 : 1 << 16;
            for (size_t i = 0; i < n; i++) text[i] = units[u][i % len];
            int64_t start = clock_ns();
            struct tokens ids = encode(o.t, text, n, TOKENIZER_PARSE_SPECIAL);
            double ms = clock_ms_since(start);
            if (ms > 8000)
                fail_msg("%s: %zu bytes of '%s' took %.0f ms", kinds[k], n, units[u], ms);
            assert_true(ids.n > 0 ||
                        strcmp(units[u], "\xff") == 0); /* SmolLM2 has no token for it */
            tokens_deinit(&ids);
        }
        close_kind(&o);
    }
    free(text);
}

/* One tokenizer, many threads: the same ids in each (and no race, where the sanitizer looks). */
struct shared {
    const struct tokenizer *t;
    uint64_t hash[4]; /* one a thread */
};

static void encode_share(void *arg, int thread_idx, int n_threads) {
    struct shared *s = arg;
    const struct opened plain = {0};
    char text[TEXTS_MAX_BYTES];
    (void)n_threads;
    for (unsigned i = 0; i < 400; i++) {
        size_t n = texts_make(i, text);
        struct tokens ids = {0};
        if (tokenizer_encode(s->t, text, n, 0, &ids, NULL)) abort();
        s->hash[thread_idx] = s->hash[thread_idx] * 31 + fnv(&plain, &ids);
        tokens_deinit(&ids);
    }
}

static void test_tokenizer_threads(void) {
    for (int k = 0; k < N_KINDS; k += 3) { /* a plain byte-level one, and NFC */
        struct opened o;
        struct threads *team;
        struct err e = {0};
        open_kind(&o, kinds[k]);
        assert_ok(threads_open(&team, 4, &e), e);
        struct shared s = {.t = o.t};
        threads_run(team, encode_share, &s);
        for (int i = 1; i < 4; i++) assert_true(s.hash[i] == s.hash[0]);
        threads_close(team);
        close_kind(&o);
    }
}

/* ---- fingerprints ---- */

#define SMALL_VOCAB "\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"bc\":4"
#define SMALL_REST                                                                                 \
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"                       \
    "\"added_tokens\":[{\"id\":5,\"content\":\"<s>\",\"special\":true},"                           \
    "{\"id\":6,\"content\":\"<t>\",\"special\":true}]"

static uint64_t fingerprint_of(const char *json, const char *config, const char *generation) {
    struct err e = {0};
    struct tokenizer *t;
    assert_ok(tokenizer__open_hf_bytes(&t, json, strlen(json), config, config ? strlen(config) : 0,
                                       generation, generation ? strlen(generation) : 0, &e),
              e);
    uint64_t f = tokenizer_fingerprint(t);
    tokenizer_close(t);
    return f;
}

static void test_tokenizer_fingerprint(void) {
    static const char *const files[][3] = {
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{" SMALL_VOCAB
         "},\"merges\":[\"a b\",\"b c\"]}," SMALL_REST "}",
         NULL, NULL},
        /* another text, another order of merges, whole words first */
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"bc\":4,\"d\":"
         "7},"
         "\"merges\":[\"a b\",\"b c\"]}," SMALL_REST "}",
         NULL, NULL},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{" SMALL_VOCAB
         "},\"merges\":[\"b c\",\"a b\"]}," SMALL_REST "}",
         NULL, NULL},
        {"{\"model\":{\"type\":\"BPE\",\"ignore_merges\":true,\"vocab\":{" SMALL_VOCAB
         "},\"merges\":[\"a b\",\"b c\"]}," SMALL_REST "}",
         NULL, NULL},
        /* another normalisation, and special ids */
        {"{\"normalizer\":{\"type\":\"NFC\"},\"model\":{\"type\":\"BPE\",\"vocab\":{" SMALL_VOCAB
         "},\"merges\":[\"a b\",\"b c\"]}," SMALL_REST "}",
         NULL, NULL},
        {NULL, "{\"bos_token\":\"<s>\"}", NULL},
        {NULL, "{\"bos_token\":\"<t>\"}", NULL},
        {NULL, "{\"bos_token\":\"<s>\",\"add_bos_token\":true}", NULL},
        {NULL, "{\"eos_token\":\"<s>\"}", NULL},
        {NULL, NULL, "{\"eos_token_id\":[5,6]}"},
    };
    uint64_t seen[16];
    size_t n = sizeof files / sizeof *files;
    for (size_t i = 0; i < n; i++) {
        const char *json = files[i][0] ? files[i][0] : files[0][0];
        seen[i] = fingerprint_of(json, files[i][1], files[i][2]);
        assert_true(seen[i] == fingerprint_of(json, files[i][1], files[i][2]));
        for (size_t k = 0; k < i; k++)
            if (seen[i] == seen[k]) fail_msg("files %zu and %zu have one fingerprint", k, i);
    }
}

const struct test tests[] = {
    {"tokenizer_own_vectors", TEST_QUICK, 20000, test_tokenizer_own_vectors},
    {"tokenizer_ten_thousand_texts", TEST_QUICK, 60000, test_tokenizer_ten_thousand_texts},
    {"tokenizer_json_files", TEST_QUICK, 20000, test_tokenizer_json_files},
    {"tokenizer_default_target", TEST_QUICK, 20000, test_tokenizer_default_target},
    {"tokenizer_typed_specials_stay_text", TEST_QUICK, 20000,
     test_tokenizer_typed_specials_stay_text},
    {"tokenizer_limit", TEST_QUICK, 20000, test_tokenizer_limit},
    {"tokenizer_round_trip_bytes", TEST_QUICK, 20000, test_tokenizer_round_trip_bytes},
    {"tokenizer_bad_ids_decode_to_nothing", TEST_QUICK, 20000,
     test_tokenizer_bad_ids_decode_to_nothing},
    {"tokenizer_long_runs", TEST_QUICK, 60000, test_tokenizer_long_runs},
    {"tokenizer_threads", TEST_QUICK, 20000, test_tokenizer_threads},
    {"tokenizer_fingerprint", TEST_QUICK, 20000, test_tokenizer_fingerprint},
    {0},
};
