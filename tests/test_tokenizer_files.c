/* Goal: a lying tokenizer in a file is refused with its key and value, and nothing else happens.
 * Method: a small good GGUF and a small good tokenizer.json, each spoilt in one place a row; the
 * message must name the place. Both are also cut at every byte. */
#include "tests/harness.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "model/tokenizer_private.h"
#include "tests/fail_alloc.h"

/* ---- GGUF ---- */

struct gguf_case {
    const char *what;
    int code;
    const char *message; /* part of it */
    const char *model, *pre;
    const char *token4; /* text of token 4, "ab" in the good file */
    const char *merge;  /* the second merge, "ab c" in the good file; NULL: no merges */
    int n_types, type4; /* n_types -1: no types */
    int n_scores;       /* -1: none */
    float score4;
    long long bos;
    const char *token5, *merge0; /* NULL: "abc", "a b" */
};

static void put_u32(struct strbuf *b, uint32_t v) {
    strbuf_append(b, &v, 4);
}
static void put_u64(struct strbuf *b, uint64_t v) {
    strbuf_append(b, &v, 8);
}
static void put_str(struct strbuf *b, const char *s) {
    put_u64(b, strlen(s));
    strbuf_append_str(b, s);
}
static void put_key(struct strbuf *b, const char *key, uint32_t type, unsigned *n) {
    put_str(b, key);
    put_u32(b, type);
    ++*n;
}

static void put_strings(struct strbuf *b, const char *const *s, size_t n) {
    put_u32(b, GGUF_STRING);
    put_u64(b, n);
    for (size_t i = 0; i < n; i++) put_str(b, s[i]);
}

/* The file of a row: tokens a b c <s> ab abc, ids 0..5. */
static void make_gguf(const struct gguf_case *c, struct strbuf *out) {
    const char *tokens[] = {"a", "b", "c", "<s>", c->token4, c->token5 ? c->token5 : "abc"};
    struct strbuf kv = {0};
    unsigned n = 0;
    put_key(&kv, "tokenizer.ggml.model", GGUF_STRING, &n);
    put_str(&kv, c->model);
    if (c->pre) {
        put_key(&kv, "tokenizer.ggml.pre", GGUF_STRING, &n);
        put_str(&kv, c->pre);
    }
    put_key(&kv, "tokenizer.ggml.tokens", GGUF_ARRAY, &n);
    put_strings(&kv, tokens, 6);
    if (c->n_types >= 0) {
        put_key(&kv, "tokenizer.ggml.token_type", GGUF_ARRAY, &n);
        put_u32(&kv, GGUF_I32);
        put_u64(&kv, (uint64_t)c->n_types);
        for (int i = 0; i < c->n_types; i++)
            put_u32(&kv, i == 3 ? TOKEN_CONTROL : i == 4 ? (uint32_t)c->type4 : TOKEN_NORMAL);
    }
    if (c->n_scores >= 0) {
        put_key(&kv, "tokenizer.ggml.scores", GGUF_ARRAY, &n);
        put_u32(&kv, GGUF_F32);
        put_u64(&kv, (uint64_t)c->n_scores);
        for (int i = 0; i < c->n_scores; i++) {
            float score = i == 4 ? c->score4 : (float)-i;
            strbuf_append(&kv, &score, 4);
        }
    }
    if (c->merge) {
        const char *merges[] = {c->merge0 ? c->merge0 : "a b", c->merge};
        put_key(&kv, "tokenizer.ggml.merges", GGUF_ARRAY, &n);
        put_strings(&kv, merges, 2);
    }
    put_key(&kv, "tokenizer.ggml.bos_token_id", GGUF_I64, &n);
    put_u64(&kv, (uint64_t)c->bos);
    strbuf_append_str(out, "GGUF");
    put_u32(out, 3);
    put_u64(out, 0);
    put_u64(out, n);
    strbuf_append(out, kv.data, kv.n);
    strbuf_deinit(&kv);
}

static int open_gguf(const struct strbuf *b, size_t n, struct tokenizer **t, struct err *e) {
    struct gguf *g = NULL;
    /* Of its own size, so that a sanitizer sees a read past its end. */
    uint8_t *copy = malloc(n + !n);
    if (!copy) return err_raise(e, E_NOMEM, "a copy of the file");
    memcpy(copy, b->data, n);
    int rc = gguf_open_bytes(&g, copy, n, e);
    if (!rc) rc = tokenizer_open_gguf(t, g, e);
    if (!rc) { /* it must not hold on to the file's bytes */
        gguf_close(g);
        free(copy);
        return 0;
    }
    gguf_close(g);
    free(copy);
    return rc;
}

#define GOOD                                                                                       \
    .model = "gpt2", .pre = "gpt-2", .token4 = "ab", .merge = "ab c", .n_types = 6, .type4 = 1,    \
    .n_scores = -1, .bos = 3
#define GOOD_SPM                                                                                   \
    .model = "llama", .token4 = "ab", .n_types = 6, .type4 = 1, .n_scores = 6, .score4 = -4,       \
    .bos = 3

static const struct gguf_case gguf_cases[] = {
    {"good", 0, "", GOOD},
    {"good spm", 0, "", GOOD_SPM},
    {"no types", 0, "", .model = "gpt2", .pre = "gpt-2", .token4 = "ab", .merge = "ab c",
     .n_types = -1, .n_scores = -1, .bos = 3},
    {"no bos", 0, "", .model = "gpt2", .pre = "gpt-2", .token4 = "ab", .merge = "ab c",
     .n_types = 6, .type4 = 1, .n_scores = -1, .bos = UINT32_MAX},
    {"model", E_UNSUPPORTED, "model = 'bert'", .model = "bert", .pre = "gpt-2", .token4 = "ab",
     .merge = "ab c", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"pre", E_UNSUPPORTED, "pre = 'deepseek-llm'", .model = "gpt2", .pre = "deepseek-llm",
     .token4 = "ab", .merge = "ab c", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"no pre", E_NOT_FOUND, "tokenizer.ggml.pre", .model = "gpt2", .token4 = "ab", .merge = "ab c",
     .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"twin", E_FORMAT, "tokens 1 and 4 are both 'b'", .model = "gpt2", .pre = "gpt-2",
     .token4 = "b", .merge = "ab c", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"merge of no token", E_FORMAT, "merge 1, 'ab' + 'x'", .model = "gpt2", .pre = "gpt-2",
     .token4 = "ab", .merge = "ab x", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"merge to no token", E_FORMAT, "'ca' is no token", .model = "gpt2", .pre = "gpt-2",
     .token4 = "ab", .merge = "c a", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"merge of one part", E_FORMAT, "merge 1 is 'abc'", .model = "gpt2", .pre = "gpt-2",
     .token4 = "ab", .merge = "abc", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"no merges", E_NOT_FOUND, "tokenizer.ggml.merges", .model = "gpt2", .pre = "gpt-2",
     .token4 = "ab", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 3},
    {"few types", E_FORMAT, "token_type has 5 elements for 6 tokens", .model = "gpt2",
     .pre = "gpt-2", .token4 = "ab", .merge = "ab c", .n_types = 5, .type4 = 1, .n_scores = -1,
     .bos = 3},
    {"bad type", E_FORMAT, "token 4 has type 9", .model = "gpt2", .pre = "gpt-2", .token4 = "ab",
     .merge = "ab c", .n_types = 6, .type4 = 9, .n_scores = -1, .bos = 3},
    {"bos outside", E_FORMAT, "bos_token_id = 6", .model = "gpt2", .pre = "gpt-2", .token4 = "ab",
     .merge = "ab c", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = 6},
    {"bos negative", E_FORMAT, "bos_token_id", .model = "gpt2", .pre = "gpt-2", .token4 = "ab",
     .merge = "ab c", .n_types = 6, .type4 = 1, .n_scores = -1, .bos = -7},
    {"no scores", E_FORMAT, "scores is missing", .model = "llama", .token4 = "ab", .n_types = 6,
     .type4 = 1, .n_scores = -1, .bos = 3},
    {"many scores", E_FORMAT, "scores has 7 elements for 6 tokens", .model = "llama",
     .token4 = "ab", .n_types = 6, .type4 = 1, .n_scores = 7, .bos = 3},
    {"score", E_FORMAT, "token 4 has score nan", .model = "llama", .token4 = "ab", .n_types = 6,
     .type4 = 1, .n_scores = 6, .score4 = NAN, .bos = 3},
    {"byte token", E_FORMAT, "byte token 4 reads 'ab'", .model = "llama", .token4 = "ab",
     .n_types = 6, .type4 = 6, .n_scores = 6, .score4 = -4, .bos = 3},
};

static void test_tokenizer_gguf_refusals(void) {
    for (size_t i = 0; i < sizeof gguf_cases / sizeof *gguf_cases; i++) {
        const struct gguf_case *c = &gguf_cases[i];
        struct err e = {0};
        struct strbuf b = {0};
        struct tokenizer *t = NULL;
        make_gguf(c, &b);
        int rc = open_gguf(&b, b.n, &t, &e);
        if (rc != c->code || !strstr(e.message, c->message))
            fail_msg("%s: %d '%s', want %d '%s'", c->what, rc, e.message, c->code, c->message);
        if (rc == 0) {
            struct tokens ids = {0};
            assert_ok(tokenizer_encode(t, "abcx", 4, 0, &ids, &e), e);
            /* x is no token and dropped; by score it becomes the unknown token 0, as does the space
             * that is put in front. */
            bool spm = strcmp(c->model, "llama") == 0;
            assert_int_equal(ids.n, spm ? 3 : 1);
            assert_int_equal(ids.ids[spm], 5);
            tokens_deinit(&ids);
        }
        tokenizer_close(t);
        strbuf_deinit(&b);
    }
}

static void test_tokenizer_gguf_truncated(void) {
    for (int spm = 0; spm < 2; spm++) {
        struct strbuf b = {0};
        make_gguf(&gguf_cases[spm], &b);
        for (size_t n = 0; n < b.n; n++) {
            struct err e = {0};
            struct tokenizer *t = NULL;
            assert_int_not_equal(open_gguf(&b, n, &t, &e), 0);
            assert_true(e.message[0] != 0);
        }
        strbuf_deinit(&b);
    }
}

/* ---- tokenizer.json ---- */

#define NORMALIZER "null"
#define PRE "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define POST "null"
#define DECODER "{\"type\":\"ByteLevel\"}"
#define ADDED "{\"id\":5,\"content\":\"<s>\",\"special\":true}"
#define MODEL "\"type\":\"BPE\""
#define VOCAB "\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abc\":4"
#define MERGES "\"a b\",[\"ab\",\"c\"]"
#define FILE_OF(normalizer, pre, post, decoder, added, model, vocab, merges)                       \
    "{\"normalizer\":" normalizer ",\"pre_tokenizer\":" pre ",\"post_processor\":" post            \
    ",\"decoder\":" decoder ",\"added_tokens\":[" added "],\"model\":{" model ",\"vocab\":{" vocab \
    "},\"merges\":[" merges "]}}"
#define SPLIT(pattern)                                                                             \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"        \
    "\"" pattern "\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\",\"add_"  \
    "prefix_space\":false,"                                                                        \
    "\"use_regex\":false}]}"

static const struct {
    const char *what;
    int code;
    const char *message, *json, *config, *generation;
} json_cases[] = {
    {"good", 0, "", FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES),
     "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"<s>\"}", "{\"eos_token_id\":[5]}"},
    {"good metaspace", 0, "",
     FILE_OF(NORMALIZER,
             "{\"type\":\"Metaspace\",\"replacement\":\"\\u2581\",\"prepend_scheme\":\"never\","
             "\"split\":true}",
             POST, "null", ADDED, MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"not JSON", E_FORMAT, "line 1", "{\"model\":", NULL, NULL},
    {"an array", E_FORMAT, "not an object", "[]", NULL, NULL},
    {"nothing", E_UNSUPPORTED, "ByteLevel", "{}", NULL, NULL},
    {"normalizer", E_UNSUPPORTED, "normalizer 'NFKC'",
     FILE_OF("{\"type\":\"NFKC\"}", PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES), NULL, NULL},
    {"normalizer in a sequence", E_UNSUPPORTED, "normalizer 'Lowercase'",
     FILE_OF(
         "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Lowercase\"}]}",
         PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"pattern", E_UNSUPPORTED, "Split': \\p{L}+|\\d+",
     FILE_OF(NORMALIZER, SPLIT("\\\\p{L}+|\\\\d+"), POST, DECODER, ADDED, MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"pre-tokenizer", E_UNSUPPORTED, "pre_tokenizer 'Whitespace'",
     FILE_OF(NORMALIZER, "{\"type\":\"Whitespace\"}", POST, DECODER, ADDED, MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"prefix space", E_UNSUPPORTED, "add_prefix_space",
     FILE_OF(NORMALIZER, "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}", POST, DECODER, ADDED,
             MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"digits in groups", E_UNSUPPORTED, "individual_digits",
     FILE_OF(NORMALIZER,
             "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":"
             "false}," PRE "]}",
             POST, DECODER, ADDED, MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"decoder", E_UNSUPPORTED, "decoder 'WordPiece'",
     FILE_OF(NORMALIZER, PRE, POST, "{\"type\":\"WordPiece\"}", ADDED, MODEL, VOCAB, MERGES), NULL,
     NULL},
    {"post-processor", E_UNSUPPORTED, "post_processor 'BertProcessing'",
     FILE_OF(NORMALIZER, PRE, "{\"type\":\"BertProcessing\"}", DECODER, ADDED, MODEL, VOCAB,
             MERGES),
     NULL, NULL},
    {"template names no token", E_FORMAT, "'<x>', which is no token",
     FILE_OF(NORMALIZER, PRE,
             "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<x>\"}},"
             "{\"Sequence\":{\"id\":\"A\"}}]}",
             DECODER, ADDED, MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"model", E_UNSUPPORTED, "model.type = 'WordPiece'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, "\"type\":\"WordPiece\"", VOCAB, MERGES), NULL,
     NULL},
    {"suffix", E_UNSUPPORTED, "end_of_word_suffix = '</w>'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL ",\"end_of_word_suffix\":\"</w>\"", VOCAB,
             MERGES),
     NULL, NULL},
    {"unknown token", E_FORMAT, "unk_token '<unk>'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL ",\"unk_token\":\"<unk>\"", VOCAB,
             MERGES),
     NULL, NULL},
    {"twice one key", E_FORMAT, "duplicate",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB ",\"a\":9", MERGES), NULL, NULL},
    {"twice one id", E_FORMAT, "both have id 4",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB ",\"z\":4", MERGES), NULL, NULL},
    {"huge id", E_FORMAT, "id 2000000000",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB ",\"z\":2000000000", MERGES), NULL,
     NULL},
    {"sparse ids", E_FORMAT, "id 90000 among 7 tokens",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB ",\"z\":90000", MERGES), NULL,
     NULL},
    {"negative id", E_FORMAT, "id of 'z'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB ",\"z\":-1", MERGES), NULL, NULL},
    {"merge of no token", E_FORMAT, "merge 2, 'x' + 'y'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES ",\"x y\""), NULL, NULL},
    {"merge of three", E_FORMAT, "merge 2 is no pair",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES ",[\"a\",\"b\",\"c\"]"),
     NULL, NULL},
    {"merge of numbers", E_FORMAT, "merge 2 is no pair",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES ",7"), NULL, NULL},
    {"single word", E_UNSUPPORTED, "single_word",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, "{\"id\":5,\"content\":\"<s>\",\"single_word\":true}",
             MODEL, VOCAB, MERGES),
     NULL, NULL},
    {"added over another", E_FORMAT, "'<s>' has the id of 'c'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, "{\"id\":2,\"content\":\"<s>\"}", MODEL, VOCAB,
             MERGES),
     NULL, NULL},
    {"bos", E_FORMAT, "bos_token '<x>'",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES),
     "{\"bos_token\":\"<x>\"}", NULL},
    {"eos ids", E_FORMAT, "eos_token_id 6",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES), NULL,
     "{\"eos_token_id\":[5,6]}"},
    {"eos text", E_FORMAT, "eos_token_id",
     FILE_OF(NORMALIZER, PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES), NULL,
     "{\"eos_token_id\":\"five\"}"},
};

static void test_tokenizer_json_refusals(void) {
    for (size_t i = 0; i < sizeof json_cases / sizeof *json_cases; i++) {
        struct err e = {0};
        struct tokenizer *t = NULL;
        const char *config = json_cases[i].config, *generation = json_cases[i].generation;
        int rc = tokenizer__open_hf_bytes(&t, json_cases[i].json, strlen(json_cases[i].json),
                                          config, config ? strlen(config) : 0, generation,
                                          generation ? strlen(generation) : 0, &e);
        if (rc != json_cases[i].code || !strstr(e.message, json_cases[i].message))
            fail_msg("%s: %d '%s', want %d '%s'", json_cases[i].what, rc, e.message,
                     json_cases[i].code, json_cases[i].message);
        if (rc == 0) {
            struct tokens ids = {0};
            assert_ok(tokenizer_encode(t, "abc", 3, 0, &ids, &e), e);
            assert_int_equal(ids.n, 1);
            assert_int_equal(ids.ids[0], 4);
            assert_int_equal(tokenizer_find(t, "<s>"), 5);
            assert_int_equal(tokenizer_is_eog(t, 5), generation != NULL);
            tokens_deinit(&ids);
        }
        tokenizer_close(t);
    }
}

static void test_tokenizer_json_truncated(void) {
    const char *json = json_cases[0].json;
    for (size_t n = 0; n < strlen(json); n++) {
        struct err e = {0};
        struct tokenizer *t = NULL;
        assert_int_equal(tokenizer__open_hf_bytes(&t, json, n, NULL, 0, NULL, 0, &e), E_FORMAT);
    }
}

static void test_tokenizer_folder_without_file(void) {
    struct err e = {0};
    struct tokenizer *t = NULL;
    assert_int_equal(tokenizer_open_hf(&t, "tests/golden/no-such-folder", &e), E_NOT_FOUND);
    assert_non_null(strstr(e.message, "no-such-folder/tokenizer.json"));
}

/* A file that calls a mark of turns ordinary or user-defined does not make it typeable, and what
 * converters pad with is no token. */
static void test_tokenizer_careless_types(void) {
    struct gguf_case c = gguf_cases[0];
    struct err e = {0};
    for (int type = TOKEN_NORMAL; type <= TOKEN_USER_DEFINED; type += 3)
        for (int padding = 0; padding < 2; padding++) {
            struct strbuf b = {0};
            struct tokenizer *t;
            struct tokens ids = {0};
            c.token4 = padding ? "[PAD4]" : "<|im_start|>";
            c.merge = "b c", c.token5 = "bc", c.merge0 = "b c";
            c.type4 = type;
            make_gguf(&c, &b);
            assert_ok(open_gguf(&b, b.n, &t, &e), e);
            assert_ok(tokenizer_encode(t, c.token4, strlen(c.token4), 0, &ids, &e), e);
            for (size_t i = 0; i < ids.n; i++) assert_int_not_equal(ids.ids[i], 4);
            assert_int_equal(tokenizer_find(t, c.token4), padding ? -1 : 4);
            assert_int_equal(tokenizer_is_control(t, 4), !padding);
            tokens_deinit(&ids);
            tokenizer_close(t);
            strbuf_deinit(&b);
        }
}

/* One tokenizer in both formats is one tokenizer: a draft may come as a folder, its target as a
 * file; and padding at the end does not count. */
static void test_tokenizer_fingerprint_of_both_formats(void) {
    static const char json[] =
        FILE_OF(NORMALIZER, PRE, POST, DECODER, "{\"id\":3,\"content\":\"<s>\",\"special\":true}",
                MODEL, "\"a\":0,\"b\":1,\"c\":2,\"ab\":4,\"abc\":5", MERGES);
    static const char config[] = "{\"bos_token\":\"<s>\"}";
    struct gguf_case c = gguf_cases[0];
    struct tokenizer *a, *b;
    struct strbuf file = {0};
    struct err e = {0};
    make_gguf(&c, &file);
    assert_ok(open_gguf(&file, file.n, &a, &e), e);
    assert_ok(
        tokenizer__open_hf_bytes(&b, json, sizeof json - 1, config, sizeof config - 1, NULL, 0, &e),
        e);
    assert_true(tokenizer_fingerprint(a) == tokenizer_fingerprint(b));
    tokenizer_close(a);
    tokenizer_close(b);
    strbuf_clear(&file);
    /* Token 5 as padding against a vocabulary without it. */
    c.token5 = "[PAD5]", c.merge = "a b";
    make_gguf(&c, &file);
    assert_ok(open_gguf(&file, file.n, &a, &e), e);
    assert_int_equal(tokenizer_n_tokens(a), 6);
    static const char shorter[] =
        FILE_OF(NORMALIZER, PRE, POST, DECODER, "{\"id\":3,\"content\":\"<s>\",\"special\":true}",
                MODEL, "\"a\":0,\"b\":1,\"c\":2,\"ab\":4", "\"a b\"");
    assert_ok(tokenizer__open_hf_bytes(&b, shorter, sizeof shorter - 1, config, sizeof config - 1,
                                       NULL, 0, &e),
              e);
    assert_int_equal(tokenizer_n_tokens(b), 5);
    assert_true(tokenizer_fingerprint(a) == tokenizer_fingerprint(b));
    tokenizer_close(a);
    tokenizer_close(b);
    strbuf_deinit(&file);
}

/* ---- memory ---- */

/* Open, encode, decode; every block is given back whatever happens. */
static int use(const char *json, const struct strbuf *file, struct err *e) {
    static const char text[] = "abc \xc3\xa9\xcc\x81 ab<s> abcabc";
    struct tokenizer *t = NULL;
    struct tokens ids = {0};
    struct strbuf out = {0};
    int rc = json ? tokenizer__open_hf_bytes(&t, json, strlen(json), NULL, 0, NULL, 0, e)
                  : open_gguf(file, file->n, &t, e);
    if (!rc) rc = tokenizer_encode(t, text, sizeof text - 1, 3, &ids, e);
    if (!rc) tokenizer_decode(t, ids.ids, ids.n, true, &out);
    if (out.failed) rc = err_raise(e, E_NOMEM, "decoding");
    strbuf_deinit(&out);
    tokens_deinit(&ids);
    tokenizer_close(t);
    return rc;
}

/* The n-th allocation and all after it fail, for every n until nothing fails: each time E_NOMEM,
 * and nothing is left behind. */
static void test_tokenizer_out_of_memory(void) {
    json_set_alloc_funcs(fail_alloc_malloc, fail_alloc_free);
    static const char nfc[] =
        FILE_OF("{\"type\":\"NFC\"}", PRE, POST, DECODER, ADDED, MODEL, VOCAB, MERGES);
    const char *const jsons[] = {nfc, json_cases[1].json, NULL, NULL};
    for (int which = 0; which < 4; which++) {
        struct strbuf file = {0};
        if (!jsons[which]) make_gguf(&gguf_cases[which - 2], &file);
        long before = fail_alloc_live();
        for (long n = 1;; n++) {
            struct err e = {0};
            fail_alloc_at(n);
            int rc = use(jsons[which], &file, &e);
            long failed = fail_alloc_n_failed();
            fail_alloc_at(0);
            if (fail_alloc_live() != before)
                fail_msg("file %d: %ld blocks left when allocation %ld fails", which,
                         fail_alloc_live() - before, n);
            if (failed == 0) {
                if (rc) fail_msg("file %d: %s", which, e.message);
                assert_true(n > 10); /* the hooks are live */
                break;
            }
            /* jansson's lexer tells a failed allocation as a syntax error. */
            bool lexer = rc == E_FORMAT && strstr(e.message, "line ");
            if (rc != E_NOMEM && !lexer)
                fail_msg("file %d: %s '%s' when allocation %ld fails", which, err_name(rc),
                         e.message, n);
        }
        strbuf_deinit(&file);
    }
}

const struct test tests[] = {
    {"tokenizer_careless_types", TEST_QUICK, 20000, test_tokenizer_careless_types},
    {"tokenizer_fingerprint_of_both_formats", TEST_QUICK, 20000,
     test_tokenizer_fingerprint_of_both_formats},
    {"tokenizer_out_of_memory", TEST_QUICK, 20000, test_tokenizer_out_of_memory},
    {"tokenizer_gguf_refusals", TEST_QUICK, 20000, test_tokenizer_gguf_refusals},
    {"tokenizer_gguf_truncated", TEST_QUICK, 20000, test_tokenizer_gguf_truncated},
    {"tokenizer_json_refusals", TEST_QUICK, 20000, test_tokenizer_json_refusals},
    {"tokenizer_json_truncated", TEST_QUICK, 20000, test_tokenizer_json_truncated},
    {"tokenizer_folder_without_file", TEST_QUICK, 20000, test_tokenizer_folder_without_file},
    {0},
};
