/* serve/rpc.c. Goal: messages are told apart by the rules of docs/protocol.md, whatever encoding a
 * client's library chose, and nothing but a request is ever to be answered. Method: tables of
 * packed bytes. */
#include "tests/harness.h"

#include <math.h>
#include <string.h>

#include "base/err.h"
#include "serve/rpc.h"

#define N_OF(a) (sizeof(a) / sizeof *(a))
#define B(s) s, sizeof(s) - 1

static void test_rpc_read(void) {
    /* clang-format off */
    static const struct {
        const char *what, *data;
        size_t n;
        enum rpc_verdict verdict;
        enum rpc_type type;
        uint32_t id;
    } t[] = {
        {"request", B("\x94\x00\x01\xa5hello\x90"), RPC_GOOD, RPC_REQUEST, 1},
        {"method as bin", B("\x94\x00\x01\xc4\x05hello\x90"), RPC_GOOD, RPC_REQUEST, 1},
        {"id as u64", B("\x94\x00\xcf\0\0\0\0\xff\xff\xff\xff\xa5hello\x90"), RPC_GOOD, RPC_REQUEST,
         UINT32_MAX},
        {"id as i32", B("\x94\x00\xd2\0\0\1\0\xa5hello\x90"), RPC_GOOD, RPC_REQUEST, 256},
        {"type as u16", B("\x94\xcd\0\0\x01\xa5hello\x90"), RPC_GOOD, RPC_REQUEST, 1},
        {"array32 frame", B("\xdd\0\0\0\4\x00\x01\xa5hello\x90"), RPC_GOOD, RPC_REQUEST, 1},
        {"id too large", B("\x94\x00\xcf\0\0\0\1\0\0\0\0\xa5hello\x90"), RPC_CLOSE, RPC_REQUEST, 0},
        {"id negative", B("\x94\x00\xff\xa5hello\x90"), RPC_CLOSE, RPC_REQUEST, 0},
        {"id float", B("\x94\x00\xca\0\0\0\0\xa5hello\x90"), RPC_CLOSE, RPC_REQUEST, 0},
        {"id str", B("\x94\x00\xa1" "1\xa5hello\x90"), RPC_CLOSE, RPC_REQUEST, 0},
        {"three elements", B("\x93\x00\x07\xa5hello"), RPC_ANSWER, RPC_REQUEST, 7},
        {"method an integer", B("\x94\x00\x07\x05\x90"), RPC_ANSWER, RPC_REQUEST, 7},
        {"method of 65", B("\x94\x00\x07\xd9\x41"
                           "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\x90"),
         RPC_ANSWER, RPC_REQUEST, 7},
        {"params a map", B("\x94\x00\x07\xa5hello\x80"), RPC_ANSWER, RPC_REQUEST, 7},
        {"params nil", B("\x94\x00\x07\xa5hello\xc0"), RPC_ANSWER, RPC_REQUEST, 7},
        {"type 3", B("\x94\x03\x07\xa5hello\x90"), RPC_CLOSE, RPC_REQUEST, 0},
        {"no array", B("\x07"), RPC_CLOSE, RPC_REQUEST, 0},
        {"a map", B("\x80"), RPC_CLOSE, RPC_REQUEST, 0},
        {"empty", B("\x90"), RPC_CLOSE, RPC_REQUEST, 0},
        {"type alone", B("\x91\x00"), RPC_CLOSE, RPC_REQUEST, 0},
        {"response", B("\x94\x01\x02\xc0\x05"), RPC_GOOD, RPC_RESPONSE, 2},
        {"short response", B("\x93\x01\x02\xc0"), RPC_CLOSE, RPC_RESPONSE, 2},
        {"notification", B("\x93\x02\xa1x\x90"), RPC_GOOD, RPC_NOTIFICATION, 0},
        {"bad notification", B("\x93\x02\xa1x\x01"), RPC_CLOSE, RPC_NOTIFICATION, 0},
        {"notification of 4", B("\x94\x02\xa1x\x90\x01"), RPC_CLOSE, RPC_NOTIFICATION, 0},
    };
    /* clang-format on */
    for (size_t i = 0; i < N_OF(t); i++) {
        msgpack_zone zone;
        msgpack_object o;
        struct err e = {0};
        struct rpc_message m;
        msgpack_zone_init(&zone, 512);
        assert_ok(rpc_unpack(&zone, &o, t[i].data, t[i].n, &e), e);
        enum rpc_verdict v = rpc_read(&m, &o, &e);
        if (v != t[i].verdict) fail_msg("%s: verdict %d (%s)", t[i].what, v, e.message);
        if (v == RPC_CLOSE) assert_int_equal(e.code, E_PROTOCOL);
        if (v != RPC_CLOSE) {
            assert_int_equal(m.type, t[i].type);
            assert_int_equal(m.id, t[i].id);
        }
        msgpack_zone_destroy(&zone);
    }
}

static void test_rpc_peek_id(void) {
    uint32_t id = 0;
    assert_true(rpc_peek_id((const uint8_t *)"\x94\x00\x05", 3, &id));
    assert_int_equal(id, 5);
    assert_true(rpc_peek_id((const uint8_t *)"\x94\x00\xcd\x01\x02", 5, &id));
    assert_int_equal(id, 0x102);
    assert_true(rpc_peek_id((const uint8_t *)"\x94\x00\xce\xff\x01\x02\x03", 7, &id));
    assert_int_equal(id, 0xff010203);
    assert_false(rpc_peek_id((const uint8_t *)"\x94\x00\xcd\x01", 4, &id));
    assert_false(
        rpc_peek_id((const uint8_t *)"\x94\x01\x05", 3, &id)); /* a response: never answered */
    assert_false(rpc_peek_id((const uint8_t *)"\x93\x02\xa1", 3, &id));
    assert_false(rpc_peek_id((const uint8_t *)"\x94\x00", 2, &id));
    /* Heads and ids that some libraries always write wide. */
    assert_true(rpc_peek_id((const uint8_t *)"\xdd\0\0\0\4\x00\x09", 7, &id));
    assert_int_equal(id, 9);
    assert_true(rpc_peek_id((const uint8_t *)"\xdc\0\4\x00\xcf\0\0\0\0\0\0\1\2", 13, &id));
    assert_int_equal(id, 0x102);
    assert_false(rpc_peek_id((const uint8_t *)"\xdd\1\0\0\4\x00\x09", 7, &id));
    assert_false(rpc_peek_id((const uint8_t *)"\xdc\0\3\x00\x09", 5, &id));
    assert_false(rpc_peek_id((const uint8_t *)"\xdd\0\0\0\4", 5, &id));
    assert_false(rpc_peek_id((const uint8_t *)"\x94\x00\xcf\0\0\0\1\0\0\0\0", 11, &id));
}

/* Error responses are what pynvim and Neovim need: an array with a str at index 1. */
static void test_rpc_error_shape(void) {
    struct strbuf out = {0}, data = {0};
    msgpack_packer pk;
    rpc_packer(&pk, &data);
    rpc_pack_str(&pk, "n_ctx");
    msgpack_pack_int(&pk, 8192);
    rpc_packer(&pk, &out);
    rpc_pack_error_response(&pk, 3, RPC_TOO_LONG, "prompt too long", &data, 1);
    static const char want[] = "\x94\x01\x03\x93\x05\xafprompt too long\x82\xa4name\xa8too_long"
                               "\xa5n_ctx\xcd\x20\x00\xc0";
    assert_int_equal(out.n, sizeof want - 1);
    assert_memory_equal(out.data, want, sizeof want - 1);
    strbuf_deinit(&out);
    strbuf_deinit(&data);
}

/* A message is a str whatever bytes of a client it quotes. */
static void test_rpc_error_message_is_str(void) {
    struct strbuf out = {0};
    msgpack_packer pk;
    rpc_packer(&pk, &out);
    rpc_pack_error(&pk, RPC_INVALID_PARAMS, "\xc3\xa9 \xff\xc3\"", NULL, 0);
    static const char want[] = "\x93\x04\xa6\xc3\xa9 ??\"\x81\xa4name\xaeinvalid_params";
    assert_int_equal(out.n, sizeof want - 1);
    assert_memory_equal(out.data, want, sizeof want - 1);
    strbuf_deinit(&out);
}

static void test_rpc_text_str_or_bin(void) {
    struct strbuf out = {0};
    msgpack_packer pk;
    rpc_packer(&pk, &out);
    rpc_pack_text(&pk, "\xc3\xa9", 2);
    rpc_pack_text(&pk, "\xc3", 1);
    rpc_pack_real(&pk, NAN);
    assert_int_equal(out.n, 7);
    assert_memory_equal(out.data, "\xa2\xc3\xa9\xc4\x01\xc3\xc0", 7);
    strbuf_deinit(&out);
}

static void test_rpc_numbers(void) {
    int64_t v = 0;
    uint64_t u = 0;
    double d = 0;
    msgpack_object o = {.type = MSGPACK_OBJECT_FLOAT64, .via.f64 = 16.0};
    assert_true(rpc_int(&o, 1, 100, &v));
    assert_int_equal(v, 16);
    assert_false(rpc_int(&o, 17, 100, &v));
    o.via.f64 = 16.5;
    assert_false(rpc_int(&o, 1, 100, &v));
    o.via.f64 = 1e300;
    assert_false(rpc_int(&o, INT64_MIN, INT64_MAX, &v));
    o = (msgpack_object){.type = MSGPACK_OBJECT_POSITIVE_INTEGER, .via.u64 = UINT64_MAX};
    assert_false(rpc_int(&o, INT64_MIN, INT64_MAX, &v));
    assert_true(rpc_u64(&o, &u));
    assert_true(u == UINT64_MAX);
    o = (msgpack_object){.type = MSGPACK_OBJECT_NEGATIVE_INTEGER, .via.i64 = -1};
    assert_false(rpc_u64(&o, &u));
    assert_true(rpc_real(&o, &d));
    assert_true(d == -1);
    o = (msgpack_object){.type = MSGPACK_OBJECT_BOOLEAN, .via.boolean = true};
    assert_false(rpc_int(&o, 0, 1, &v));
    assert_false(rpc_real(&o, &d));
}

static void test_rpc_suggest(void) {
    static const char *const words[] = {"max_tokens", "temperature", "top_p",
                                        "top_k",      "stop",        "repetition_penalty"};
    assert_string_equal(rpc_suggest("max_token", 9, words, 6), "max_tokens");
    assert_string_equal(rpc_suggest("temprature", 10, words, 6), "temperature");
    assert_string_equal(rpc_suggest("tpo_p", 5, words, 6), "top_p");
    assert_string_equal(rpc_suggest("repeat_penalty", 14, words, 6), "repetition_penalty");
    assert_null(rpc_suggest("zzzzzz", 6, words, 6));
    assert_null(rpc_suggest("", 0, words, 6));
    char longer[5000];
    memset(longer, 'a', sizeof longer);
    assert_null(rpc_suggest(longer, sizeof longer, words, 6));
}

const struct test tests[] = {
    {"rpc_read", TEST_QUICK, 5000, test_rpc_read},
    {"rpc_peek_id", TEST_QUICK, 5000, test_rpc_peek_id},
    {"rpc_error_shape", TEST_QUICK, 5000, test_rpc_error_shape},
    {"rpc_error_message_is_str", TEST_QUICK, 5000, test_rpc_error_message_is_str},
    {"rpc_text_str_or_bin", TEST_QUICK, 5000, test_rpc_text_str_or_bin},
    {"rpc_numbers", TEST_QUICK, 5000, test_rpc_numbers},
    {"rpc_suggest", TEST_QUICK, 5000, test_rpc_suggest},
    {0},
};
