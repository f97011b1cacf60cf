/* base/: the promises of each header, by example and by exhaustive sweep where that is cheap. */
#include "tests/harness.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/file.h"
#include "base/half.h"
#include "base/number.h"
#include "base/rng.h"
#include "base/strbuf.h"
#include "base/threads.h"
#include "base/utf8.h"

/* Random123's kat_vectors for philox4x32-10. */
static void test_base_philox_known_answers(void) {
    static const uint32_t kat[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        philox4x32(kat[i], kat[i] + 4, out);
        assert_memory_equal(out, kat[i] + 6, 16);
    }
}

static void test_base_half_all_values(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = f16_to_f32((uint16_t)h);
        if (isnan(f)) assert_true(isnan(f16_to_f32(f32_to_f16(f))));
        else assert_int_equal(f32_to_f16(f), h);
        float b = bf16_to_f32((uint16_t)h);
        if (isnan(b)) assert_true(isnan(bf16_to_f32(f32_to_bf16(b))));
        else assert_int_equal(f32_to_bf16(b), h);
    }
    assert_int_equal(f32_to_f16(65519.f), 0x7bff); /* just below the tie */
    assert_int_equal(f32_to_f16(65520.f), 0x7c00);
    assert_int_equal(f32_to_f16(1.f + 0x1p-11f), 0x3c00); /* tie to even */
    assert_int_equal(f32_to_f16(1.f + 3 * 0x1p-11f), 0x3c02);
    assert_int_equal(f32_to_f16(0x1p-25f), 0);
    assert_int_equal(f32_to_f16(0x1.8p-25f), 1);
}

static void test_base_checked_overflow(void) {
    size_t x;
    assert_false(checked_add(SIZE_MAX, 1, &x));
    assert_false(checked_mul(SIZE_MAX / 2, 3, &x));
    assert_false(checked_align(SIZE_MAX - 3, 64, &x));
    assert_true(checked_align(65, 64, &x));
    assert_int_equal(x, 128);
}

static void test_base_arena_limits(void) {
    struct arena a;
    arena_init(&a, 1024, 4096);
    assert_non_null(arena_take(&a, 2000));
    assert_int_equal((uintptr_t)arena_take(&a, 1) % 64, 0);
    assert_null(arena_take(&a, 4000));
    assert_null(arena_take(&a, SIZE_MAX));
    assert_null(arena_take_zeroed(&a, SIZE_MAX / 2, 4));
    arena_deinit(&a);
    arena_init(&a, 256, 256);
    assert_non_null(arena_take(&a, 200));
    assert_null(arena_take(&a, 1));
    arena_deinit(&a);
    arena_deinit(&a);
}

struct count_job {
    atomic_int hits[64];
    int sum;
};

static void count_fn(void *arg, int idx, int n) {
    struct count_job *j = arg;
    int lo, hi;
    threads_split(64, 1, idx, n, &lo, &hi);
    for (int i = lo; i < hi; i++) atomic_fetch_add(&j->hits[i], 1);
}

static void test_base_threads_cover_once(void) {
    for (int n = 1; n <= 5; n++) {
        struct threads *t;
        struct err e = {0};
        assert_ok(threads_open(&t, n, &e), e);
        static struct count_job j;
        memset(&j, 0, sizeof j);
        for (int k = 0; k < 2000; k++) {
            static const uint8_t pieces[7 * 300];
            if (k % 3) threads_ahead(t, pieces + k % 2, k % 8, 300); /* leaves no trace */
            threads_run(t, count_fn, &j);
        }
        for (int i = 0; i < 64; i++) assert_int_equal(j.hits[i], 2000);
        threads_close(t);
    }
}

static void test_base_threads_split_grain(void) {
    for (int n = 0; n < 70; n++)
        for (int parts = 1; parts < 9; parts++) {
            int next = 0;
            for (int i = 0; i < parts; i++) {
                int lo, hi;
                threads_split(n, 16, i, parts, &lo, &hi);
                assert_int_equal(lo, next);
                assert_true(hi >= lo && (hi % 16 == 0 || hi == n));
                next = hi;
            }
            assert_int_equal(next, n);
        }
}

/* Two ranges dealt at once, of every size that a thread's part may have; thread 0 takes its time,
 * so that others come to its part from the back. */
struct deal_job {
    struct threads *t;
    atomic_int hits[2][70], stolen;
    int n;
};

static void deal_fn(void *arg, int idx, int n_threads) {
    struct deal_job *j = arg;
    for (int which = 0; which < THREADS_DEALS; which++) {
        int lo, hi, goes_on, own_lo, own_hi, n = j->n - which;
        threads_split(n, 1, idx, n_threads, &own_lo, &own_hi);
        while (threads_take(j->t, which, idx, &lo, &hi, &goes_on)) {
            assert_true(lo < hi && hi <= goes_on && goes_on <= n);
            if (lo < own_lo || lo >= own_hi) atomic_fetch_add(&j->stolen, 1);
            for (int i = lo; i < hi; i++) atomic_fetch_add(&j->hits[which][i], 1);
            if (idx == 0 && j->n % 16 == 0) usleep(100);
        }
    }
}

static void test_base_threads_take_once(void) {
    int stolen = 0;
    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        static struct deal_job j;
        struct err e = {0};
        assert_ok(threads_open(&j.t, n_threads, &e), e);
        for (j.n = 1; j.n <= 70; j.n++) {
            memset(j.hits, 0, sizeof j.hits);
            for (int k = 0; k < 20; k++) {
                for (int which = 0; which < THREADS_DEALS; which++)
                    threads_deal(j.t, which, j.n - which);
                threads_run(j.t, deal_fn, &j);
            }
            for (int which = 0; which < THREADS_DEALS; which++)
                for (int i = 0; i < 70; i++)
                    assert_int_equal(j.hits[which][i], i < j.n - which ? 20 : 0);
        }
        if (n_threads == 1) assert_int_equal(j.stolen, 0);
        stolen += atomic_exchange(&j.stolen, 0);
        threads_close(j.t);
    }
    assert_true(stolen > 0);
}

static void test_base_utf8_every_code_point(void) {
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xd800 && cp < 0xe000) continue;
        char s[4];
        uint32_t back = 0;
        int n = utf8_encode(cp, s);
        assert_int_equal(utf8_decode(s, (size_t)n, &back), n);
        assert_int_equal(back, cp);
        for (int cut = 1; cut < n; cut++) {
            assert_int_equal(utf8_decode(s, (size_t)cut, &back), -1);
            assert_int_equal(utf8_complete_prefix(s, (size_t)cut), 0);
        }
        assert_int_equal(utf8_complete_prefix(s, (size_t)n), n);
    }
    assert_false(utf8_valid("\xed\xa0\x80", 3)); /* surrogate */
    assert_false(utf8_valid("\xc0\x80", 2));     /* overlong */
    assert_false(utf8_valid("\xf4\x90\x80\x80", 4));
    assert_int_equal(utf8_complete_prefix("a\xff", 2), 2); /* invalid is not incomplete */
}

/* What is whole, what is not, and that what is not leaves the place alone. */
static void test_base_number(void) {
    static const struct {
        const char *text;
        bool is_int, is_u64, is_real;
        double value;
    } cases[] = {
        {"0", true, true, true, 0},
        {"-0", true, false, true, 0},
        {"007", true, true, true, 7},
        {"-12", true, false, true, -12},
        {"2147483647", true, true, true, 2147483647.},
        {"1.5", false, false, true, 1.5},
        {".25", false, false, true, .25},
        {"3.", false, false, true, 3},
        {"1e3", false, false, true, 1000},
        {"-2.5E-1", false, false, true, -.25},
        {"1e+1", false, false, true, 10},
        {"1e-400", false, false, true, 0},
        {"1e400", false, false, false, 0},
        {"99999999999999999999", false, false, true, 1e20},
        {"", false, false, false, 0},
        {"-", false, false, false, 0},
        {".", false, false, false, 0},
        {"--1", false, false, false, 0},
        {"+1", false, false, false, 0},
        {" 1", false, false, false, 0},
        {"\t1", false, false, false, 0},
        {"1 ", false, false, false, 0},
        {"0x10", false, false, false, 0},
        {"0X1p3", false, false, false, 0},
        {"1e", false, false, false, 0},
        {"1e+", false, false, false, 0},
        {"e5", false, false, false, 0},
        {"1.2.3", false, false, false, 0},
        {"1,5", false, false, false, 0},
        {"inf", false, false, false, 0},
        {"nan", false, false, false, 0},
        {"1/", false, false, false, 0},
        {"1:", false, false, false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *s = cases[i].text;
        size_t n = strlen(s);
        int64_t a = 77;
        uint64_t b = 77;
        double c = 77;
        if (number_int(s, n, &a) != cases[i].is_int) fail_msg("int \"%s\"", s);
        if (number_u64(s, n, 10, &b) != cases[i].is_u64) fail_msg("u64 \"%s\"", s);
        if (number_real(s, n, &c) != cases[i].is_real) fail_msg("real \"%s\"", s);
        assert_true((double)a == (cases[i].is_int ? cases[i].value : 77));
        assert_true((double)b == (cases[i].is_u64 ? cases[i].value : 77));
        assert_true(c == (cases[i].is_real ? cases[i].value : 77));
    }
    int64_t i64;
    uint64_t u64;
    double real = 0;
    int n = 5;
    assert_true(number_int("9223372036854775807", 19, &i64) && i64 == INT64_MAX);
    assert_false(number_int("9223372036854775808", 19, &i64));
    assert_true(number_u64("18446744073709551615", 20, 10, &u64) && u64 == UINT64_MAX);
    assert_false(number_u64("18446744073709551616", 20, 10, &u64));
    assert_true(number_u64("0755", 4, 8, &u64) && u64 == 0755);
    assert_false(number_u64("0758", 4, 8, &u64));
    assert_true(number_in("-3", 2, -3, 4, &n) && n == -3);
    assert_false(number_in("-4", 2, -3, 4, &n));
    assert_false(number_in("5", 1, -3, 4, &n));
    assert_int_equal(n, -3);
    /* A part of a text, one with a zero byte, one that is too long. */
    assert_true(number_real("12,5", 2, &real) && real == 12);
    assert_false(number_real("1\0", 2, &real));
    assert_false(number_int("1\0", 2, &i64));
    char many[80];
    memset(many, '1', sizeof many);
    assert_true(number_real(many, 63, &real));
    assert_false(number_real(many, 64, &real));
}

static void test_base_strbuf_limit(void) {
    struct strbuf b = {.limit = 300};
    for (int i = 0; i < 100; i++) strbuf_append_str(&b, "abc");
    assert_int_equal(b.n, 300);
    assert_false(b.failed);
    strbuf_append_char(&b, 'x');
    assert_true(b.failed);
    assert_int_equal(b.n, 300);
    strbuf_clear(&b);
    strbuf_append_json(&b, "a\"\\\n\x01\xff<", 7);
    assert_string_equal(b.data, "\"a\\\"\\\\\\n\\u0001\\ufffd\\u003c\"");
    strbuf_deinit(&b);
}

static void test_base_err_quotes_hostile_bytes(void) {
    struct err e = {0};
    assert_int_equal(err_raise(&e, E_FORMAT, "key %s", "a\x1b[31m\n"), E_FORMAT);
    assert_string_equal(e.message, "key a?[31m?");
    err_prefix(&e, E_FORMAT, "file %s", "x.gguf");
    assert_string_equal(e.message, "file x.gguf: key a?[31m?");
    assert_string_equal(err_name(E_FORMAT), "FORMAT");
    assert_string_equal(err_text(-9999), "unknown error");
}

static void test_base_file_writable(void) {
    char folder[] = "/tmp/tandem-base-XXXXXX", path[64];
    struct err e = {0};
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a", folder);
    assert_int_equal(file_check_writable(path, &e), 0);
    assert_int_equal(access(path, F_OK), -1); /* nothing is made */
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(file_check_writable(path, &e), 0);
    assert_int_equal(file_check_writable(folder, &e), E_IO);
    assert_non_null(strstr(e.message, folder));
    snprintf(path, sizeof path, "%s/a/b", folder); /* a file is no folder */
    assert_int_equal(file_check_writable(path, &e), E_IO);
    snprintf(path, sizeof path, "%s/no/a", folder);
    assert_int_equal(file_check_writable(path, &e), E_NOT_FOUND);
    assert_int_equal(file_check_writable("", &e), E_NOT_FOUND);
    assert_int_equal(file_check_writable("no-such-folder/", &e), E_NOT_FOUND);
    assert_int_equal(file_check_writable("tandem-no-such-file", &e), 0);
    snprintf(path, sizeof path, "%s/a", folder);
    unlink(path);
    rmdir(folder);
}

/* One file by two names, there or not yet; what only looks alike is another. */
static void test_base_file_same(void) {
    char folder[] = "/tmp/tandem-base-XXXXXX", a[64], b[64], link_to_a[64];
    assert_non_null(mkdtemp(folder));
    snprintf(a, sizeof a, "%s/a", folder);
    snprintf(b, sizeof b, "%s/../%s/a", folder, strrchr(folder, '/') + 1);
    snprintf(link_to_a, sizeof link_to_a, "%s/b", folder);
    for (int is_there = 0; is_there < 2; is_there++) {
        assert_true(file_is_same(a, a) && file_is_same(a, b) && file_is_same(b, a));
        assert_false(file_is_same(a, folder) || file_is_same(a, link_to_a));
        assert_false(file_is_same(a, "a") || file_is_same("no-such-folder/a", a));
        if (is_there) break;
        FILE *f = fopen(a, "w");
        assert_non_null(f);
        fclose(f);
    }
    assert_int_equal(symlink(a, link_to_a), 0);
    assert_true(file_is_same(a, link_to_a));
    unlink(link_to_a);
    unlink(a);
    rmdir(folder);
}

const struct test tests[] = {
    {"base_philox_known_answers", TEST_QUICK, 2000, test_base_philox_known_answers},
    {"base_half_all_values", TEST_QUICK, 5000, test_base_half_all_values},
    {"base_checked_overflow", TEST_QUICK, 2000, test_base_checked_overflow},
    {"base_arena_limits", TEST_QUICK, 2000, test_base_arena_limits},
    {"base_threads_cover_once", TEST_QUICK, 60000, test_base_threads_cover_once},
    {"base_threads_split_grain", TEST_QUICK, 5000, test_base_threads_split_grain},
    {"base_threads_take_once", TEST_QUICK, 20000, test_base_threads_take_once},
    {"base_utf8_every_code_point", TEST_QUICK, 10000, test_base_utf8_every_code_point},
    {"base_number", TEST_QUICK, 2000, test_base_number},
    {"base_strbuf_limit", TEST_QUICK, 2000, test_base_strbuf_limit},
    {"base_err_quotes_hostile_bytes", TEST_QUICK, 2000, test_base_err_quotes_hostile_bytes},
    {"base_file_writable", TEST_QUICK, 2000, test_base_file_writable},
    {"base_file_same", TEST_QUICK, 2000, test_base_file_same},
    {0},
};
