/* model/gguf: a tiny file is built in memory and read back value by value; then every kind of lie
 * is told in it, one at a time, and each must give its own error; then it is cut at every byte. The
 * inputs are heap blocks of exact size, so that the sanitizer build sees a read behind the end. */
#include "tests/harness.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/ggml_types.h"
#include "tests/gguf_builder.h"

/* What a test may lie about. Zero-initialised fields mean the truth. */
struct spec {
    uint32_t version, alignment, arch_type, array_elem, bool_value;
    uint64_t n_tensors, n_keys, array_n, key_length, name_length;
    bool same_key, same_name;
    uint32_t n_dims, a_type;
    uint64_t dims[5];
    uint64_t b_offset;
    uint32_t b_type;
    uint64_t b_cols;
};

static const struct spec truth = {.version = 3,
                                  .alignment = 32,
                                  .arch_type = GGUF_STRING,
                                  .array_elem = GGUF_I32,
                                  .bool_value = 1,
                                  .n_tensors = 2,
                                  .n_keys = 11,
                                  .array_n = 3,
                                  .n_dims = 2,
                                  .dims = {4, 2, 1, 1, 1},
                                  .b_offset = 32,
                                  .b_type = 2, /* Q4_0 */
                                  .b_cols = 32};

/* a.weight F32 [4, 2] (32 bytes) and b.weight Q4_0 [32, 3] (54 bytes), the end at the last byte. */
static void build(struct strbuf *b, const struct spec *s) {
    memset(b, 0, sizeof *b);
    put_header(b, s->version, s->n_tensors, s->n_keys);
    put_key(b, "general.architecture", s->arch_type);
    put_little(b, s->key_length ? s->key_length : 5, 8);
    strbuf_append_str(b, "llama");
    put_key_u32(b, "general.alignment", s->alignment);
    put_key(b, "t.u64", GGUF_U64);
    put_little(b, UINT64_MAX, 8);
    put_key(b, "t.i8", GGUF_I8);
    put_little(b, (uint8_t)-5, 1);
    put_key(b, "t.i64", GGUF_I64);
    put_little(b, (uint64_t)INT64_MIN, 8);
    put_key_f32(b, "t.f32", 0.5f);
    put_key(b, "t.f64", GGUF_F64);
    double seven = 7;
    strbuf_append(b, &seven, 8);
    put_key(b, "t.bool", GGUF_BOOL);
    put_little(b, s->bool_value, 1);
    put_array(b, "t.ints", s->array_elem, s->array_n);
    for (uint32_t i = 0; i < 3; i++) put_little(b, (uint32_t)-1 + i, 4);
    put_array(b, "t.words", GGUF_STRING, 3);
    put_str(b, "one");
    put_str(b, "");
    put_str(b, "three");
    put_key_str(b, s->same_key ? "t.words" : "t.text", "a\nb");
    put_little(b, s->name_length ? s->name_length : 8, 8);
    strbuf_append_str(b, "a.weight");
    put_little(b, s->n_dims, 4);
    for (uint32_t i = 0; i < s->n_dims && i < 5; i++) put_little(b, s->dims[i], 8);
    put_little(b, s->a_type, 4);
    put_little(b, 0, 8);
    uint64_t b_dims[2] = {s->b_cols, 3};
    put_tensor(b, s->same_name ? "a.weight" : "b.weight", 2, b_dims, s->b_type, s->b_offset);
    put_padding(b, 32);
    for (int i = 0; i < 8; i++) put_little(b, 0x3f800000, 4); /* ones */
    put_zeros(b, 54);
    assert_false(b->failed);
}

/* Open an exact copy of n bytes. */
static int open_copy(struct gguf **g, uint8_t **copy, const void *data, size_t n, struct err *e) {
    *copy = malloc(n ? n : 1);
    memcpy(*copy, data, n);
    return gguf_open_bytes(g, *copy, n, e);
}

static void test_gguf_reads_values(void) {
    struct strbuf b;
    build(&b, &truth);
    struct gguf *g;
    struct err e = {0};
    uint8_t *copy;
    int64_t v;
    double f;
    bool flag;
    struct gguf_str s, words[3];
    assert_ok(open_copy(&g, &copy, b.data, b.n, &e), e);
    assert_ok(gguf_get_int(g, "t.i8", -128, 127, &v, &e), e);
    assert_int_equal(v, -5);
    assert_ok(gguf_get_int(g, "t.i64", INT64_MIN, 0, &v, &e), e);
    assert_true(v == INT64_MIN);
    assert_ok(gguf_get_int(g, "t.f64", 0, 10, &v, &e), e); /* exact in a float: taken */
    assert_int_equal(v, 7);
    assert_ok(gguf_get_float(g, "t.f32", 0, 1, &f, &e), e);
    assert_near(f, 0.5, 0);
    assert_ok(gguf_get_bool(g, "t.bool", &flag, &e), e);
    assert_true(flag);
    assert_ok(gguf_get_str(g, "general.architecture", &s, &e), e);
    assert_int_equal(s.n, 5);
    assert_memory_equal(s.data, "llama", 5);

    assert_int_equal(gguf_get_int(g, "t.u64", 0, INT64_MAX, &v, &e), E_FORMAT); /* 2^64 - 1 */
    assert_non_null(strstr(e.message, "t.u64: 18446744073709551615"));
    assert_int_equal(gguf_get_int(g, "t.f32", 0, 10, &v, &e), E_FORMAT); /* 0.5 */
    assert_int_equal(gguf_get_int(g, "t.i8", 0, 127, &v, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "-5 is outside 0..127"));
    assert_int_equal(gguf_get_int(g, "t.none", 0, 1, &v, &e), E_NOT_FOUND);
    assert_int_equal(gguf_get_int(g, "t.text", 0, 1, &v, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "of type string, expected an integer"));
    assert_int_equal(gguf_get_str(g, "t.words", &s, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "an array of 3 string"));

    enum gguf_type type;
    size_t n;
    const void *data;
    int32_t ints[3];
    assert_ok(gguf_array(g, "t.ints", &type, &n, &e), e);
    assert_int_equal(type, GGUF_I32);
    assert_ok(gguf_array_data(g, "t.ints", GGUF_I32, &data, &n, &e), e);
    assert_int_equal(n, 3);
    memcpy(ints, data, sizeof ints);
    assert_int_equal(ints[0], -1);
    assert_int_equal(ints[2], 1);
    assert_int_equal(gguf_array_data(g, "t.ints", GGUF_F32, &data, &n, &e), E_FORMAT);
    assert_ok(gguf_array_str(g, "t.words", words, 3, &e), e);
    assert_int_equal(words[1].n, 0);
    assert_memory_equal(words[2].data, "three", 5);
    assert_int_equal(gguf_array_str(g, "t.words", words, 2, &e), E_FORMAT);

    const struct gguf_tensor *t = gguf_tensor_find(g, "a.weight");
    float one;
    assert_non_null(t);
    assert_int_equal(t->bytes, 32);
    memcpy(&one, t->data + 28, 4);
    assert_near(one, 1, 0);
    t = gguf_tensor_find(g, "b.weight");
    assert_int_equal(t->bytes, 54);
    assert_ptr_equal(t->data + 54, copy + b.n);
    assert_null(gguf_tensor_find(g, "a.weigh"));

    char line[200];
    size_t n_keys = 0;
    while (gguf_describe(g, n_keys, line, sizeof line)) n_keys++;
    assert_int_equal(n_keys, 11);
    assert_true(gguf_describe(g, 8, line, sizeof line));
    assert_string_equal(line, "t.ints = [3 i32: -1 0 1]");
    assert_true(gguf_describe(g, 10, line, sizeof line));
    assert_string_equal(line, "t.text = \"a b\"");
    gguf_close(g);
    free(copy);
    strbuf_deinit(&b);
}

#define LIE(field, value, code, text)                                                              \
    { #field " = " #value, offsetof(struct spec, field), sizeof truth.field, (value), code, text }

static const struct lie {
    const char *label;
    size_t at, size;
    uint64_t value;
    int code;
    const char *text;
} lies[] = {
    LIE(version, 1, E_UNSUPPORTED, "version 1"),
    LIE(version, 4, E_UNSUPPORTED, "version 4"),
    LIE(version, 0, E_UNSUPPORTED, "version 0"),
    LIE(version, 0x03000000, E_UNSUPPORTED, "byte-swapped"),
    LIE(n_tensors, 1ull << 63, E_FORMAT, "9223372036854775808 tensors"),
    LIE(n_tensors, UINT64_MAX, E_FORMAT, "tensors in"),
    LIE(n_tensors, 3, E_FORMAT, ""), /* padding and weights read as a third entry */
    LIE(n_tensors, 20, E_FORMAT, "20 tensors in"),
    LIE(n_keys, 1ull << 63, E_FORMAT, "9223372036854775808 keys"),
    LIE(n_keys, 12, E_FORMAT, ""), /* the first tensor read as a key */
    LIE(key_length, 1ull << 63, E_FORMAT, "key general.architecture: a string"),
    LIE(key_length, UINT64_MAX, E_FORMAT, "length 18446744073709551615"),
    LIE(name_length, UINT64_MAX - 7, E_FORMAT, "a tensor's name"),
    LIE(arch_type, 13, E_FORMAT, "key general.architecture: unknown type 13"),
    LIE(arch_type, UINT32_MAX, E_FORMAT, "unknown type 4294967295"),
    LIE(array_elem, 13, E_FORMAT, "key t.ints: unknown element type 13"),
    LIE(array_elem, GGUF_ARRAY, E_UNSUPPORTED, "key t.ints: an array of arrays"),
    LIE(array_n, 1ull << 63, E_FORMAT, "key t.ints: an array of 9223372036854775808 i32"),
    LIE(array_n, 1ull << 62, E_FORMAT, "key t.ints: an array"), /* x 4 wraps to 0 */
    LIE(bool_value, 2, E_FORMAT, "key t.bool: a bool of value 2"),
    LIE(alignment, 0, E_FORMAT, "general.alignment: 0 is outside"),
    LIE(alignment, 48, E_FORMAT, "48 is no power of two"),
    LIE(alignment, 2 << 20, E_FORMAT, "general.alignment: 2097152 is outside"),
    LIE(alignment, 64, E_FORMAT, "tensor b.weight: offset 32 is no multiple of the alignment 64"),
    LIE(same_key, 1, E_FORMAT, "key t.words occurs twice"),
    LIE(same_name, 1, E_FORMAT, "tensor a.weight occurs twice"),
    LIE(n_dims, 0, E_FORMAT, "tensor a.weight: 0 dimensions"),
    LIE(n_dims, 5, E_FORMAT, "tensor a.weight: 5 dimensions"),
    LIE(n_dims, UINT32_MAX, E_FORMAT, "tensor a.weight: 4294967295 dimensions"),
    LIE(dims[0], 0, E_FORMAT, "tensor a.weight: dimension 0 is 0"),
    LIE(dims[1], 0, E_FORMAT, "tensor a.weight: dimension 1 is 0"),
    LIE(dims[0], 1ull << 63, E_FORMAT, "tensor a.weight: dimension 0"),
    LIE(dims[1], 1ull << 62, E_FORMAT, "tensor a.weight: dimension 1"), /* x 4 wraps to 0 */
    LIE(dims[0], 1ull << 61, E_FORMAT, "tensor a.weight: too large"),   /* fits, its bytes do not */
    LIE(dims[1], 3, E_FORMAT, "tensors a.weight and b.weight overlap"),
    LIE(dims[1], 600, E_FORMAT, "truncated?"),
    LIE(a_type, 43, E_FORMAT, "tensor a.weight: unknown type 43"),
    LIE(a_type, UINT32_MAX, E_FORMAT, "tensor a.weight: unknown type 4294967295"),
    LIE(a_type, 23, E_UNSUPPORTED, "tensor a.weight: type IQ4_XS is not supported"),
    LIE(a_type, 24, E_UNSUPPORTED, "type I8 is not supported"),
    LIE(b_cols, 31, E_FORMAT,
        "tensor b.weight: 31 columns are no multiple of 32, the block of Q4_0"),
    LIE(b_type, 12, E_FORMAT, "no multiple of 256, the block of Q4_K"),
    LIE(b_offset, 0, E_FORMAT, "overlap"),
    LIE(b_offset, 31, E_FORMAT, "tensor b.weight: offset 31"),
    LIE(b_offset, 64, E_FORMAT, "tensor b.weight: 54 bytes at offset 64"),
    LIE(b_offset, 0xffffffffffffffe0, E_FORMAT, "tensor b.weight: offset"),
};

static void test_gguf_names_every_lie(void) {
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct spec s = truth;
        memcpy((char *)&s + lies[i].at, &lies[i].value, lies[i].size); /* little-endian host */
        struct strbuf b;
        build(&b, &s);
        struct gguf *g;
        struct err e = {0};
        uint8_t *copy;
        int rc = open_copy(&g, &copy, b.data, b.n, &e);
        if (rc != lies[i].code || !strstr(e.message, lies[i].text))
            fail_msg("%s: %s \"%s\", wanted %s with \"%s\"", lies[i].label, err_name(rc), e.message,
                     err_name(lies[i].code), lies[i].text);
        assert_null(g);
        free(copy);
        strbuf_deinit(&b);
    }
}

static void test_gguf_truncated_everywhere(void) {
    struct strbuf b;
    build(&b, &truth);
    for (size_t n = 0; n < b.n; n++) {
        struct gguf *g;
        struct err e = {0};
        uint8_t *copy;
        int rc = open_copy(&g, &copy, b.data, n, &e);
        if (rc != E_FORMAT || !e.message[0])
            fail_msg("%zu of %zu bytes: %d %s", n, b.n, rc, e.message);
        free(copy);
    }
    strbuf_deinit(&b);
}

/* Any one byte may be anything: no crash, and what opens can be asked everything. */
static void test_gguf_survives_every_byte(void) {
    struct strbuf b;
    build(&b, &truth);
    for (size_t i = 0; i < b.n; i++)
        for (int k = 0; k < 6; k++) {
            static const uint8_t with[] = {0, 1, 0x7f, 0x80, 0xff, 9};
            struct gguf *g;
            uint8_t *copy;
            char saved = b.data[i], line[300];
            b.data[i] = (char)with[k];
            if (open_copy(&g, &copy, b.data, b.n, NULL) == 0) {
                for (size_t j = 0; gguf_describe(g, j, line, sizeof line); j++) {
                }
                for (size_t j = 0; j < gguf_n_tensors(g); j++) {
                    const struct gguf_tensor *t = gguf_tensor_at(g, j);
                    assert_true(t->data >= copy && t->data + t->bytes <= copy + b.n);
                }
                gguf_close(g);
            }
            free(copy);
            b.data[i] = saved;
        }
    strbuf_deinit(&b);
}

static void test_gguf_magic(void) {
    static const struct {
        const char *bytes;
        int code;
        const char *text;
    } cases[] = {
        {"FUGG\0\0\0\3........", E_UNSUPPORTED, "byte-swapped"},
        {"tjgg\1\0\0\0........", E_UNSUPPORTED, "before GGUF"},
        {"PK\3\4............", E_FORMAT, "first bytes 50 4b 03 04"},
    };
    for (size_t i = 0; i < 3; i++) {
        struct gguf *g;
        struct err e = {0};
        assert_int_equal(gguf_open_bytes(&g, (const uint8_t *)cases[i].bytes, 16, &e),
                         cases[i].code);
        assert_non_null(strstr(e.message, cases[i].text));
    }
}

/* Duplicates are found by sorting: 60,000 keys and 100,000 tensors open well under the time limit
 * even with sanitizers, where comparing all pairs would take minutes. */
static void test_gguf_many_names(void) {
    enum { KEYS = 60000, TENSORS = 100000 };
    struct strbuf b = {0};
    char name[64];
    put_header(&b, 2, TENSORS, KEYS);
    for (int i = 0; i < KEYS; i++) {
        snprintf(name, sizeof name, "key.with.one.long.prefix.%d", KEYS - i);
        put_key_u32(&b, name, (uint32_t)i);
    }
    for (int i = 0; i < TENSORS; i++) {
        snprintf(name, sizeof name, "tensor.with.one.long.prefix.%d", TENSORS - i);
        put_tensor(&b, name, 1, (uint64_t[]){8}, 0, 32 * (uint64_t)(TENSORS - 1 - i));
    }
    put_padding(&b, 32);
    put_zeros(&b, 32 * (size_t)TENSORS);
    struct gguf *g;
    struct err e = {0};
    int64_t v;
    assert_ok(gguf_open_bytes(&g, (const uint8_t *)b.data, b.n, &e), e);
    assert_ok(gguf_get_int(g, "key.with.one.long.prefix.1", 0, KEYS, &v, &e), e);
    assert_int_equal(v, KEYS - 1);
    assert_non_null(gguf_tensor_find(g, "tensor.with.one.long.prefix.77777"));
    gguf_close(g);
    strbuf_deinit(&b);
}

/* The first bytes of a download are enough to plan with, and not to load. */
static void test_gguf_header_only(void) {
    struct strbuf b;
    build(&b, &truth);
    char path[] = "/tmp/tandem_test_gguf_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_true(write(fd, b.data, b.n - 54 - 20) == (ssize_t)(b.n - 54 - 20));
    close(fd);
    struct gguf *g;
    struct err e = {0};
    assert_int_equal(gguf_open(&g, path, &e), E_FORMAT);
    assert_memory_equal(e.message, path, strlen(path)); /* the message names the file */
    assert_ok(gguf_open_header(&g, path, &e), e);
    assert_null(gguf_tensor_find(g, "a.weight")->data);
    assert_int_equal(gguf_tensor_find(g, "b.weight")->bytes, 54);
    gguf_close(g);
    unlink(path);
    assert_int_equal(gguf_open(&g, path, &e), E_NOT_FOUND);
    strbuf_deinit(&b);
}

/* Block sizes against what the format says of each type (bits a weight x 256). */
static void test_gguf_type_sizes(void) {
    static const struct {
        int type;
        const char *name;
        size_t bytes_of_256;
    } cases[] = {{0, "F32", 1024},  {1, "F16", 512},   {30, "BF16", 512}, {8, "Q8_0", 272},
                 {2, "Q4_0", 144},  {3, "Q4_1", 160},  {6, "Q5_0", 176},  {7, "Q5_1", 192},
                 {12, "Q4_K", 144}, {13, "Q5_K", 176}, {14, "Q6_K", 210}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct ggml_type *t = ggml_type_find(cases[i].type);
        assert_string_equal(t->name, cases[i].name);
        assert_int_equal(256 / t->block * t->block_bytes, cases[i].bytes_of_256);
    }
    assert_null(ggml_type_find(-1));
    assert_null(ggml_type_find(43));
}

static void test_gguf_default_target(void) {
    struct gguf *g;
    struct err e = {0};
    struct gguf_str s;
    size_t n;
    enum gguf_type type;
    assert_ok(gguf_open(&g, test_default_target(), &e), e);
    assert_int_equal(gguf_n_tensors(g), 272);
    const struct gguf_tensor *t = gguf_tensor_find(g, "token_embd.weight");
    assert_int_equal(t->dims[0], 576);
    assert_int_equal(t->dims[1], 49152);
    assert_string_equal(ggml_type_find(t->ggml_type)->name, "Q8_0");
    t = gguf_tensor_find(g, "blk.29.ffn_up.weight");
    assert_string_equal(ggml_type_find(t->ggml_type)->name, "Q4_1");
    assert_int_equal(t->bytes, 576 / 32 * 20 * 1536);
    assert_ok(gguf_array(g, "tokenizer.ggml.tokens", &type, &n, &e), e);
    assert_int_equal(n, 49152);
    assert_ok(gguf_get_str(g, "tokenizer.ggml.pre", &s, &e), e);
    assert_memory_equal(s.data, "smollm", s.n);
    gguf_close(g);
}

const struct test tests[] = {
    {"gguf_reads_values", TEST_QUICK, 5000, test_gguf_reads_values},
    {"gguf_names_every_lie", TEST_QUICK, 5000, test_gguf_names_every_lie},
    {"gguf_truncated_everywhere", TEST_QUICK, 10000, test_gguf_truncated_everywhere},
    {"gguf_survives_every_byte", TEST_QUICK, 20000, test_gguf_survives_every_byte},
    {"gguf_magic", TEST_QUICK, 2000, test_gguf_magic},
    {"gguf_many_names", TEST_QUICK, 20000, test_gguf_many_names},
    {"gguf_header_only", TEST_QUICK, 5000, test_gguf_header_only},
    {"gguf_type_sizes", TEST_QUICK, 2000, test_gguf_type_sizes},
    {"gguf_default_target", TEST_QUICK, 5000, test_gguf_default_target},
    {0},
};
