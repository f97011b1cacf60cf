/* model/safetensors: headers are written as text in a table, each with the error that it must give;
 * then a good file is cut at every byte and each of its bytes changed; then folders of shards.
 * Inputs are heap blocks of exact size, so that the sanitizer build sees a read behind the end. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "model/safetensors.h"

/* Length field, header and n_data bytes 0, 1, 2, ... */
static void build(struct strbuf *b, const char *header, uint64_t length, size_t n_data) {
    memset(b, 0, sizeof *b);
    for (int i = 0; i < 8; i++) strbuf_append_char(b, (char)(length >> 8 * i));
    strbuf_append_str(b, header);
    for (size_t i = 0; i < n_data; i++) strbuf_append_char(b, (char)i);
}

static int open_copy(struct safetensors **s, uint8_t **copy, const void *data, size_t n,
                     struct err *e) {
    *copy = malloc(n ? n : 1);
    memcpy(*copy, data, n);
    return safetensors_open_bytes(s, *copy, n, e);
}

static const char good[] =
    "{\"__metadata__\":{\"format\":\"pt\"},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[8,20]},"
    "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
    "\"none\":{\"dtype\":\"F16\",\"shape\":[0,7],\"data_offsets\":[20,20]},"
    "\"one\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[20,28]},"
    "\"six\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[28,31]}}   ";
enum { GOOD_DATA = 31 };

static void test_safetensors_reads(void) {
    struct strbuf b;
    build(&b, good, strlen(good), GOOD_DATA);
    struct safetensors *s;
    struct err e = {0};
    uint8_t *copy;
    assert_ok(open_copy(&s, &copy, b.data, b.n, &e), e);
    assert_int_equal(safetensors_n_tensors(s), 5);
    const struct safetensors_tensor *t = safetensors_find(s, "b");
    assert_non_null(t);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[0], 2);
    assert_int_equal(t->dims[1], 3);
    assert_int_equal(t->bytes, 12);
    assert_int_equal(t->data[0], 8);
    const char *key, *value;
    assert_true(safetensors_metadata_at(s, 0, &key, &value));
    assert_string_equal(key, "format");
    assert_string_equal(value, "pt");
    assert_false(safetensors_metadata_at(s, 1, &key, &value));
    enum kern_dtype type;
    assert_ok(safetensors_dtype(t, &type, &e), e);
    assert_int_equal(type, KERN_BF16);
    assert_int_equal(safetensors_find(s, "none")->bytes, 0);
    assert_int_equal(safetensors_find(s, "one")->n_dims, 0);
    assert_int_equal(safetensors_dtype(safetensors_find(s, "one"), &type, &e), E_UNSUPPORTED);
    assert_non_null(strstr(e.message, "tensor one: type I64"));
    assert_null(safetensors_find(s, "c"));
    assert_null(safetensors_find(s, ""));
    safetensors_close(s);
    free(copy);
    strbuf_deinit(&b);
}

#define T(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct lie {
    const char *header;
    size_t n_data;
    const char *text; /* NULL: a good file */
} lies[] = {
    {"{" T("a", "F32", "[2]", "[0,8]") "}", 8, NULL},
    {"{}", 0, NULL},
    {"{}", 1, "1 bytes behind the last tensor"},
    {" {}", 0, "does not begin with {"},
    {"[]", 0, "does not begin with {"},
    {"{\"a\":1}", 0, "tensor a: the entry is no object"},
    {"{\"a\":[]}", 0, "tensor a: the entry is no object"},
    {"{" T("a", "F32", "[2]", "[0,8]") "}}", 8, "JSON"},
    {"{" T("a", "F32", "[2]", "[0,8]"), 8, "JSON"},
    {"{" T("a", "F31", "[2]", "[0,8]") "}", 8, "tensor a: dtype F31 is unknown"},
    {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a: dtype (none) is unknown"},
    {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "tensor a: dtype (none)"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "tensor a: no shape"},
    {"{" T("a", "F32", "2", "[0,8]") "}", 8, "tensor a: no shape"},
    {"{" T("a", "F32", "[-2]", "[0,8]") "}", 8, "tensor a: dimension 0 is no count"},
    {"{" T("a", "F32", "[2.0]", "[0,8]") "}", 8, "tensor a: dimension 0 is no count"},
    {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]") "}", 8, "9 dimensions"},
    {"{" T("a", "F32", "[4611686018427387904,4]", "[0,8]") "}", 8, "the shape is too large"},
    {"{" T("a", "F32", "[2305843009213693952]", "[0,0]") "}", 0, "tensor a: 0 bytes for"},
    {"{" T("a", "F32", "[99999999999999999999]", "[0,8]") "}", 8, "JSON"},
    {"{" T("a", "F32", "[3]", "[0,8]") "}", 8, "tensor a: 8 bytes for 3 values of F32"},
    {"{" T("a", "F4", "[3]", "[0,2]") "}", 2, "tensor a: 2 bytes for 3 values of F4"},
    {"{" T("a", "F32", "[2]", "[8,0]") "}", 8, "tensor a: data_offsets 8..0"},
    {"{" T("a", "F32", "[2]", "[0,9223372036854775807]") "}", 8, "tensor a: data_offsets 0.."},
    {"{" T("a", "F32", "[2]", "[-8,0]") "}", 8, "tensor a: data_offsets are no two counts"},
    {"{" T("a", "F32", "[2]", "[0]") "}", 8, "tensor a: data_offsets are no two counts"},
    {"{" T("a", "F32", "[2]", "[0,8,8]") "}", 8, "tensor a: data_offsets are no two counts"},
    {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[2]", "[4,12]") "}", 12,
     "tensor b overlaps"},
    {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[2]", "[0,8]") "}", 8, "overlaps"},
    {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[9,13]") "}", 13,
     "a hole of 1 bytes before tensor b"},
    {"{" T("a", "F32", "[2]", "[1,9]") "}", 9, "a hole of 1 bytes before tensor a"},
    {"{" T("a", "F32", "[2]", "[0,8]") "," T("a", "F32", "[2]", "[8,16]") "}", 16, "duplicate"},
    {"{\"a\\u0000b\":{}}", 0, "JSON"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__: a is no string"},
    {"{\"__metadata__\":\"a\"}", 0, "__metadata__ is no object"},
};

static void test_safetensors_names_every_lie(void) {
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        struct strbuf b;
        struct safetensors *s;
        struct err e = {0};
        uint8_t *copy;
        build(&b, lies[i].header, strlen(lies[i].header), lies[i].n_data);
        int rc = open_copy(&s, &copy, b.data, b.n, &e);
        if (lies[i].text ? rc == 0 || !strstr(e.message, lies[i].text) : rc != 0)
            fail_msg("%s: %s \"%s\", wanted \"%s\"", lies[i].header, err_name(rc), e.message,
                     lies[i].text ? lies[i].text : "ok");
        safetensors_close(s);
        free(copy);
        strbuf_deinit(&b);
    }
}

static void test_safetensors_lengths(void) {
    static const uint64_t lengths[] = {0, 1, UINT64_MAX, 1ull << 63, 100000001, sizeof good + 40};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct strbuf b;
        struct safetensors *s;
        struct err e = {0};
        uint8_t *copy;
        build(&b, good, lengths[i], GOOD_DATA);
        assert_int_equal(open_copy(&s, &copy, b.data, b.n, &e), E_FORMAT);
        assert_true(e.message[0]);
        free(copy);
        strbuf_deinit(&b);
    }
}

static void test_safetensors_truncated_everywhere(void) {
    struct strbuf b;
    build(&b, good, strlen(good), GOOD_DATA);
    for (size_t n = 0; n < b.n; n++) {
        struct safetensors *s;
        struct err e = {0};
        uint8_t *copy;
        int rc = open_copy(&s, &copy, b.data, n, &e);
        if (rc != E_FORMAT || !e.message[0])
            fail_msg("%zu of %zu bytes: %d %s", n, b.n, rc, e.message);
        free(copy);
    }
    strbuf_deinit(&b);
}

static void test_safetensors_survives_every_byte(void) {
    struct strbuf b;
    build(&b, good, strlen(good), GOOD_DATA);
    for (size_t i = 0; i < b.n - GOOD_DATA; i++)
        for (int k = 0; k < 8; k++) {
            static const char with[] = {0, '9', '"', '{', ']', ',', '\\', '\xff'};
            char saved = b.data[i];
            struct safetensors *s;
            uint8_t *copy;
            b.data[i] = with[k];
            if (open_copy(&s, &copy, b.data, b.n, NULL) == 0)
                for (size_t j = 0; j < safetensors_n_tensors(s); j++) {
                    const struct safetensors_tensor *t = safetensors_tensor_at(s, j);
                    assert_true(t->data >= copy && t->data + t->bytes <= copy + b.n);
                }
            safetensors_close(s);
            free(copy);
            b.data[i] = saved;
        }
    strbuf_deinit(&b);
}

/* A header that would cost the JSON parser gigabytes is refused before it is parsed, and so is one
 * that is nested deeply. */
static void test_safetensors_bounds_the_parser(void) {
    enum { N = 9 << 20 };
    static const struct {
        const char *begin, *repeat;
    } cases[] = {{"{\"a\":[0", ",0"}, {"{\"a\":", "["}};
    for (size_t i = 0; i < 2; i++) {
        struct strbuf text = {0}, b;
        strbuf_append_str(&text, cases[i].begin);
        size_t most = i ? 4 << 20 : N; /* the second: just under the count, over the depth */
        while (text.n < most - 16) strbuf_append_str(&text, cases[i].repeat);
        build(&b, text.data, text.n, 0);
        struct safetensors *s;
        struct err e = {0};
        int rc = safetensors_open_bytes(&s, (const uint8_t *)b.data, b.n, &e);
        assert_int_equal(rc, i ? E_FORMAT : E_TOO_LONG);
        strbuf_deinit(&b);
        strbuf_deinit(&text);
    }
}

/* ---- Folders ---- */

static char folder[64];

static void make_folder(void) {
    snprintf(folder, sizeof folder, "/tmp/tandem_test_st_XXXXXX");
    assert_non_null(mkdtemp(folder));
}

static const char *in_folder(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const void *data, size_t n) {
    FILE *f = fopen(in_folder(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void write_shard(const char *name, const char *header, size_t n_data) {
    struct strbuf b;
    build(&b, header, strlen(header), n_data);
    write_file(name, b.data, b.n);
    strbuf_deinit(&b);
}

static void remove_folder(void) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json",
                                        "one.safetensors", "two.safetensors"};
    for (size_t i = 0; i < 4; i++) unlink(in_folder(names[i]));
    assert_int_equal(rmdir(folder), 0);
}

static const struct {
    const char *index;
    const char *text; /* NULL: good */
} indexes[] = {
    {"{\"metadata\":{\"total_size\":12},\"weight_map\":{\"a\":\"one.safetensors\","
     "\"b\":\"two.safetensors\"}}",
     NULL},
    {"{\"weight_map\":{\"a\":\"two.safetensors\",\"b\":\"one.safetensors\"}}", "is not in"},
    {"{\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"two.safetensors\"}}",
     "tensor c is not in two.safetensors"},
    {"{\"weight_map\":{\"a\":\"../one.safetensors\"}}", "refused"},
    {"{\"weight_map\":{\"a\":\"/etc/one.safetensors\"}}", "refused"},
    {"{\"weight_map\":{\"a\":\"..safetensors\"}}", "refused"},
    {"{\"weight_map\":{\"a\":\".safetensors\"}}", "refused"},
    {"{\"weight_map\":{\"a\":\"one.bin\"}}", "refused"},
    {"{\"weight_map\":{\"a\":7}}", "a has no file name"},
    {"{\"weight_map\":[]}", "weight_map is no object"},
    {"{}", "weight_map is no object"},
    {"{\"weight_map\":{\"a\":\"three.safetensors\"}}", "three.safetensors: No such file"},
    {"{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"two.safetensors\"}}", "duplicate"},
};

static void test_safetensors_shards(void) {
    make_folder();
    struct safetensors *s;
    struct err e = {0};
    assert_int_equal(safetensors_open(&s, folder, &e), E_NOT_FOUND);
    write_shard("one.safetensors", "{" T("a", "F32", "[2]", "[0,8]") "}", 8);
    write_shard("two.safetensors", "{" T("b", "F16", "[2]", "[0,4]") "}", 4);
    for (size_t i = 0; i < sizeof indexes / sizeof *indexes; i++) {
        e = (struct err){0};
        write_file("model.safetensors.index.json", indexes[i].index, strlen(indexes[i].index));
        int rc = safetensors_open(&s, folder, &e);
        if (indexes[i].text ? rc == 0 || !strstr(e.message, indexes[i].text) : rc != 0)
            fail_msg("%s: %s \"%s\"", indexes[i].index, err_name(rc), e.message);
        if (rc == 0) {
            assert_int_equal(safetensors_n_shards(s), 2);
            assert_int_equal(safetensors_find(s, "b")->shard, 1);
            assert_int_equal(safetensors_find(s, "b")->data[3], 3);
        }
        safetensors_close(s);
    }
    /* The same name in two shards. */
    write_file("model.safetensors.index.json", indexes[0].index, strlen(indexes[0].index));
    write_shard("two.safetensors",
                "{" T("b", "F16", "[2]", "[0,4]") "," T("a", "F16", "[2]", "[4,8]") "}", 8);
    assert_int_equal(safetensors_open(&s, folder, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "tensor a is in two shards"));
    /* A single file wins over an index, as in transformers; the message of a bad one names it. */
    write_shard("model.safetensors", "{" T("a", "F32", "[2]", "[0,8]") "}", 7);
    assert_int_equal(safetensors_open(&s, folder, &e), E_FORMAT);
    assert_non_null(strstr(e.message, "model.safetensors: tensor a"));
    remove_folder();
}

const struct test tests[] = {
    {"safetensors_reads", TEST_QUICK, 5000, test_safetensors_reads},
    {"safetensors_names_every_lie", TEST_QUICK, 5000, test_safetensors_names_every_lie},
    {"safetensors_lengths", TEST_QUICK, 5000, test_safetensors_lengths},
    {"safetensors_truncated_everywhere", TEST_QUICK, 10000, test_safetensors_truncated_everywhere},
    {"safetensors_survives_every_byte", TEST_QUICK, 20000, test_safetensors_survives_every_byte},
    {"safetensors_bounds_the_parser", TEST_QUICK, 20000, test_safetensors_bounds_the_parser},
    {"safetensors_shards", TEST_QUICK, 10000, test_safetensors_shards},
    {0},
};
