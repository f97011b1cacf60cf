/* serve/scan.c. Goal: it accepts exactly the well-formed messages within its limits, in any cutting
 * of the bytes, and refuses the known attacks at the earliest byte that shows them. Method: a list
 * of good messages, each one fed whole, byte by byte and truncated everywhere; a list of bad ones
 * with the byte at which they must be refused; random messages from a generator against msgpack-c's
 * own unpacker. */
#include "tests/harness.h"

#include <msgpack.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "serve/scan.h"

static const struct scan_limits normal = {.max_bytes = 1 << 20, .max_nodes = 10000};

struct bytes {
    const char *what;
    const char *data;
    size_t n;
};
/* clang-format off */
#define B(what, s) {what, s, sizeof(s) - 1}
/* clang-format on */

/* The formatter would break each literal after an escape. */
/* clang-format off */
static const struct bytes good[] = {
    B("fixint", "\x05"),
    B("negative", "\xe0"),
    B("nil", "\xc0"),
    B("false", "\xc2"),
    B("u8", "\xcc\xff"),
    B("u16", "\xcd\xff\xff"),
    B("u32", "\xce\xff\xff\xff\xff"),
    B("u64", "\xcf\xff\xff\xff\xff\xff\xff\xff\xff"),
    B("i8", "\xd0\x80"),
    B("i16", "\xd1\x80\x00"),
    B("i32", "\xd2\x80\x00\x00\x00"),
    B("i64", "\xd3\x80\x00\x00\x00\x00\x00\x00\x00"),
    B("f32", "\xca\x7f\x7f\xff\xff"),
    B("f64", "\xcb\x7f\xef\xff\xff\xff\xff\xff\xff"),
    B("fixstr", "\xa3" "abc"),
    B("empty str", "\xa0"),
    B("str8", "\xd9\x03" "abc"),
    B("str8 empty", "\xd9\x00"),
    B("str16", "\xda\x00\x02" "ab"),
    B("str32", "\xdb\x00\x00\x00\x01" "a"),
    B("bin8", "\xc4\x02\xff\xfe"),
    B("bin16", "\xc5\x00\x01\x80"),
    B("bin32", "\xc6\x00\x00\x00\x00"),
    B("utf8", "\xaf\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xed\x9f\xbf" "a\xc2\x80"),
    B("empty array", "\x90"),
    B("empty map", "\x80"),
    B("array16", "\xdc\x00\x02\x01\x02"),
    B("array32", "\xdd\x00\x00\x00\x01\xc0"),
    B("map16", "\xde\x00\x01\xa1" "a\x01"),
    B("map32", "\xdf\x00\x00\x00\x02\xa1" "a\x90\xa1" "b\x80"),
    B("bin key", "\x81\xc4\x01" "a\x01"),
    B("same key in two maps", "\x92\x81\xa1" "a\x01\x81\xa1" "a\x81\xa1" "a\x01"),
    B("key again after an inner map", "\x82\xa1" "a\x82\xa1" "x\x01\xa1" "y\x02\xa1" "x\x03"),
    B("request", "\x94\x00\x01\xa8" "generate\x92\xa2hi\x82\xaamax_tokens\x08\xa6stream\xc3"),
    B("16 deep", "\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x01"),
};

static const struct {
    struct bytes b;
    enum scan_error error;
    size_t at; /* refused when this many bytes were seen */
} bad[] = {
    {B("array32 of 4 G from 5 bytes", "\xdd\xff\xff\xff\xff"), SCAN_TOO_BIG, 5},
    {B("map32 of 4 G", "\xdf\xff\xff\xff\xff"), SCAN_MAP_SIZE, 5},
    {B("str32 of 4 GiB", "\xdb\xff\xff\xff\xff"), SCAN_TOO_BIG, 5},
    {B("bin32 of 1 MiB", "\xc6\x00\x10\x00\x00"), SCAN_TOO_BIG, 5},
    {B("inner str beyond the sum", "\x92\xc6\x00\x0f\xff\xfa"), SCAN_TOO_BIG, 6},
    {B("array16 beyond the nodes", "\xdc\x27\x10"), SCAN_TOO_MANY, 3},
    {B("17 deep", "\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91\x91"),
     SCAN_TOO_DEEP, 17},
    {B("map of 65", "\xde\x00\x41"), SCAN_MAP_SIZE, 3},
    {B("integer key", "\x81\x01"), SCAN_KEY_TYPE, 2},
    {B("nil key", "\x81\xc0"), SCAN_KEY_TYPE, 2},
    {B("array key", "\x81\x91"), SCAN_KEY_TYPE, 2},
    {B("second key no string", "\x82\xa1" "a\x01\xc3"), SCAN_KEY_TYPE, 5},
    {B("key twice", "\x82\xa1" "a\x01\xa1" "a"), SCAN_KEY_TWICE, 6},
    {B("key twice as bin", "\x82\xa1" "a\x01\xc4\x01" "a"), SCAN_KEY_TWICE, 7},
    {B("empty key twice", "\x82\xa0\x01\xa0"), SCAN_KEY_TWICE, 4},
    {B("key twice around a map", "\x82\xa1" "a\x81\xa1" "b\x01\xa1" "a"), SCAN_KEY_TWICE, 9},
    {B("ext8", "\xc7"), SCAN_EXTENSION, 1},
    {B("ext32", "\xc9"), SCAN_EXTENSION, 1},
    {B("fixext1", "\xd4"), SCAN_EXTENSION, 1},
    {B("fixext16", "\x91\xd8"), SCAN_EXTENSION, 2},
    {B("c1", "\xc1"), SCAN_RESERVED, 1},
    {B("utf8 continuation alone", "\xa1\x80"), SCAN_UTF8, 1},
    {B("utf8 overlong", "\xa2\xc0\x80"), SCAN_UTF8, 1},
    {B("utf8 overlong 3", "\xa3\xe0\x9f\x80"), SCAN_UTF8, 2},
    {B("utf8 surrogate", "\xa3\xed\xa0\x80"), SCAN_UTF8, 2},
    {B("utf8 above 10ffff", "\xa4\xf4\x90\x80\x80"), SCAN_UTF8, 2},
    {B("utf8 ff", "\xa1\xff"), SCAN_UTF8, 1},
    {B("utf8 cut by the str's end", "\x92\xa1\xc3\xa1\xa9"), SCAN_UTF8, 3},
    {B("f32 nan", "\xca\x7f\xc0\x00\x00"), SCAN_NOT_FINITE, 5},
    {B("f32 -inf", "\xca\xff\x80\x00\x00"), SCAN_NOT_FINITE, 5},
    {B("f64 inf", "\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00"), SCAN_NOT_FINITE, 9},
    {B("f64 nan", "\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"), SCAN_NOT_FINITE, 9},
};
/* clang-format on */
#define N_OF(a) (sizeof(a) / sizeof *(a))

static const uint8_t *u8(const char *s) {
    return (const uint8_t *)s;
}

static void test_scan_good_whole(void) {
    for (size_t i = 0; i < N_OF(good); i++) {
        struct scan s;
        scan_init(&s, &normal);
        char two[256]; /* the message, then the head of another */
        memcpy(two, good[i].data, good[i].n);
        memcpy(two + good[i].n, "\x94\x00", 2);
        size_t used;
        if (scan_feed(&s, u8(two), good[i].n + 2, &used) != SCAN_MESSAGE)
            fail_msg("%s: %s", good[i].what, scan_error_text(s.error));
        assert_int_equal(used, good[i].n);
        assert_int_equal(s.n_bytes, good[i].n);
        assert_int_equal(scan_feed(&s, u8(two) + used, 2, &used), SCAN_NEED_MORE);
        assert_int_equal(used, 2);
    }
}

/* The same scanner takes all of them one after the other, a byte at a time, and says "message"
 * exactly at each last byte: which is also truncation at every byte. */
static void test_scan_good_bytewise(void) {
    struct scan s;
    scan_init(&s, &normal);
    for (size_t i = 0; i < N_OF(good); i++)
        for (size_t k = 0; k < good[i].n; k++) {
            size_t used;
            enum scan_result r = scan_feed(&s, u8(good[i].data) + k, 1, &used);
            if (r != (k + 1 < good[i].n ? SCAN_NEED_MORE : SCAN_MESSAGE))
                fail_msg("%s: byte %zu gave %d (%s)", good[i].what, k, r, scan_error_text(s.error));
            assert_int_equal(used, 1);
        }
}

static void test_scan_bad(void) {
    for (size_t i = 0; i < N_OF(bad); i++) {
        for (int bytewise = 0; bytewise < 2; bytewise++) {
            struct scan s;
            scan_init(&s, &normal);
            size_t used, n = 0;
            enum scan_result r = SCAN_NEED_MORE;
            if (!bytewise) {
                r = scan_feed(&s, u8(bad[i].b.data), bad[i].b.n, &n);
            } else {
                while (n < bad[i].b.n && r == SCAN_NEED_MORE) {
                    r = scan_feed(&s, u8(bad[i].b.data) + n, 1, &used);
                    n += used;
                }
            }
            if (r != SCAN_REFUSED || s.error != bad[i].error)
                fail_msg("%s (%d): %d, %s", bad[i].b.what, bytewise, r, scan_error_text(s.error));
            if (n != bad[i].at)
                fail_msg("%s: refused after %zu, want %zu", bad[i].b.what, n, bad[i].at);
            /* and it stays refused */
            assert_int_equal(scan_feed(&s, u8("\x01"), 1, &used), SCAN_REFUSED);
            assert_int_equal(used, 0);
        }
    }
}

/* Exactly at the limit passes, one byte more does not; the limit counts the heads too. */
static void test_scan_size_limit(void) {
    struct scan_limits l = {.max_bytes = 10, .max_nodes = 4};
    struct scan s;
    size_t used;
    scan_init(&s, &l);
    /* clang-format off */
    assert_int_equal(scan_feed(&s, u8("\x93\xa5" "abcde\x01\x02"), 9, &used), SCAN_MESSAGE);
    assert_int_equal(scan_feed(&s, u8("\x93\xa6" "abcdef\x01\x02"), 10, &used), SCAN_MESSAGE);
    assert_int_equal(scan_feed(&s, u8("\x93\xa7" "abcdefg\x01\x02"), 11, &used), SCAN_REFUSED);
    /* clang-format on */
    assert_int_equal(used, 2); /* known from the str's head: two values are owed behind it */
    assert_int_equal(s.error, SCAN_TOO_BIG);
    scan_init(&s, &l);
    assert_int_equal(scan_feed(&s, u8("\x91\x92\x01\x02"), 4, &used), SCAN_MESSAGE);
    assert_int_equal(scan_feed(&s, u8("\x91\x93\x01\x02\x03"), 5, &used), SCAN_REFUSED);
    assert_int_equal(s.error, SCAN_TOO_MANY);
}

/* 64 keys in each of four nested maps fit, a fifth map of 64 is refused at its head. */
static void test_scan_many_keys(void) {
    uint8_t m[4096];
    size_t n = 0, used;
    for (int level = 0; level < 5; level++) {
        m[n++] = 0xde, m[n++] = 0, m[n++] = 64;
        for (int k = 0; k < 64; k++) {
            m[n++] = 0xa2, m[n++] = (uint8_t)('a' + k / 8), m[n++] = (uint8_t)('a' + k % 8);
            if (k < 63) m[n++] = 1;
        }
    }
    struct scan s;
    scan_init(&s, &normal);
    assert_int_equal(scan_feed(&s, m, n, &used), SCAN_REFUSED);
    assert_int_equal(s.error, SCAN_MAP_SIZE);
    assert_int_equal(used, 4 * (3 + 64 * 4 - 1) + 3);
}

/* A bomb of 0x91 and one of "[[[[...": refused at depth 17 whatever follows. */
static void test_scan_bombs(void) {
    static uint8_t bomb[10000];
    struct scan s;
    size_t used;
    memset(bomb, 0x91, sizeof bomb);
    scan_init(&s, &normal);
    assert_int_equal(scan_feed(&s, bomb, sizeof bomb, &used), SCAN_REFUSED);
    assert_int_equal(used, SCAN_MAX_DEPTH + 1);
    memset(bomb, 0x9f, sizeof bomb);
    scan_init(&s, &normal);
    assert_int_equal(scan_feed(&s, bomb, sizeof bomb, &used), SCAN_REFUSED);
    assert_int_equal(used, SCAN_MAX_DEPTH + 1);
}

/* ---- Random messages ---- */

struct gen {
    uint64_t run;
    uint32_t used;
    msgpack_packer *pk;
};
static uint32_t draw(struct gen *g, uint32_t n) {
    return rng_u32(7, g->run, RNG_TEST, g->used++) % n;
}

static void gen_value(struct gen *g, int depth) {
    static const char *const texts[] = {"", "a", "h\xc3\xa9", "\xf0\x9f\x98\x80",
                                        "a longer text, of more "
                                        "than thirty-one bytes for str8"};
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz";
    switch (draw(g, depth > 0 ? 10 : 8)) {
    case 0:
        msgpack_pack_nil(g->pk);
        break;
    case 1:
        msgpack_pack_true(g->pk);
        break;
    case 2:
        msgpack_pack_uint64(g->pk, (uint64_t)draw(g, UINT32_MAX) << draw(g, 33));
        break;
    case 3:
        msgpack_pack_int64(g->pk, -(int64_t)draw(g, UINT32_MAX));
        break;
    case 4:
        msgpack_pack_double(g->pk, draw(g, 1000) / 7.0);
        break;
    case 5:
        msgpack_pack_float(g->pk, (float)draw(g, 1000));
        break;
    case 6: {
        const char *t = texts[draw(g, 5)];
        msgpack_pack_str_with_body(g->pk, t, strlen(t));
        break;
    }
    case 7: {
        static const char noise[300] = "\xff\xc1";
        msgpack_pack_bin_with_body(g->pk, noise, draw(g, sizeof noise));
        break;
    }
    case 8: {
        uint32_t n = draw(g, 20);
        msgpack_pack_array(g->pk, n);
        while (n-- > 0) gen_value(g, depth - 1);
        break;
    }
    default: {
        uint32_t n = draw(g, 6);
        msgpack_pack_map(g->pk, n);
        for (uint32_t i = 0; i < n; i++) {
            msgpack_pack_str_with_body(g->pk, letters + i * 3, 3);
            gen_value(g, depth - 1);
        }
    }
    }
}

/* Whatever the packer makes passes, in random cuts; with one byte flipped, what the scanner passes
 * msgpack-c unpacks to the same length. */
static void test_scan_random(void) {
    struct scan_limits l = {.max_bytes = 1 << 20, .max_nodes = 1 << 20};
    int n_passed = 0;
    for (uint64_t run = 0; run < 3000; run++) {
        msgpack_sbuffer buf;
        msgpack_packer pk;
        msgpack_sbuffer_init(&buf);
        msgpack_packer_init(&pk, &buf, msgpack_sbuffer_write);
        struct gen g = {.run = run, .pk = &pk};
        gen_value(&g, 4);
        struct scan s;
        size_t used, at = 0;
        scan_init(&s, &l);
        enum scan_result r = SCAN_NEED_MORE;
        while (r == SCAN_NEED_MORE) {
            size_t n = 1 + draw(&g, 40);
            if (n > buf.size - at) n = buf.size - at;
            r = scan_feed(&s, u8(buf.data) + at, n, &used);
            at += used;
            if (r == SCAN_NEED_MORE) assert_true(at < buf.size);
        }
        if (r != SCAN_MESSAGE) fail_msg("run %d: %s", (int)run, scan_error_text(s.error));
        assert_int_equal(at, buf.size);

        buf.data[draw(&g, (uint32_t)buf.size)] ^= (char)(1 << draw(&g, 8));
        scan_init(&s, &l);
        if (scan_feed(&s, u8(buf.data), buf.size, &used) == SCAN_MESSAGE) {
            msgpack_zone zone;
            msgpack_object o;
            size_t end = 0;
            msgpack_zone_init(&zone, 1024);
            int rc = msgpack_unpack(buf.data, used, &end, &zone, &o);
            if (rc != MSGPACK_UNPACK_SUCCESS) fail_msg("run %d: unpack says %d", (int)run, rc);
            msgpack_zone_destroy(&zone);
            n_passed++;
        }
        msgpack_sbuffer_destroy(&buf);
    }
    assert_true(n_passed > 500);
}

const struct test tests[] = {
    {"scan_good_whole", TEST_QUICK, 5000, test_scan_good_whole},
    {"scan_good_bytewise", TEST_QUICK, 5000, test_scan_good_bytewise},
    {"scan_bad", TEST_QUICK, 5000, test_scan_bad},
    {"scan_size_limit", TEST_QUICK, 5000, test_scan_size_limit},
    {"scan_many_keys", TEST_QUICK, 5000, test_scan_many_keys},
    {"scan_bombs", TEST_QUICK, 5000, test_scan_bombs},
    {"scan_random", TEST_QUICK, 20000, test_scan_random},
    {0},
};
