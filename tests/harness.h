#ifndef TANDEM_TESTS_HARNESS_H
#define TANDEM_TESTS_HARNESS_H

/* Every test binary is tests/test_<module>.c linked with tests/harness.c. The file ends in one
 * table:
 *
 *   const struct test tests[] = {
 *       {"pool_random_ops", TEST_QUICK, 20000, test_pool_random_ops},
 *       {0},
 *   };
 *
 * Each test runs in a process of its own under its time limit; asserts are cmocka's. A test that
 * cannot run here (no GPU) calls test_skip("why"), which is counted and printed, never a pass. */

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Is this a sanitizer's build, and which? Beds are smaller there: numbers are proven by the release
 * build; a sanitizer looks at each way through the code, once, and races need two threads that do
 * the same, not every type of every instruction set. */
#if defined(__SANITIZE_THREAD__)
enum { TEST_SANITIZED = 1, TEST_RACES = 1 };
#elif defined(__SANITIZE_ADDRESS__)
enum { TEST_SANITIZED = 1, TEST_RACES = 0 };
#else
enum { TEST_SANITIZED = 0, TEST_RACES = 0 };
#endif

/* A test of the long tier runs only when asked for: --tier long. */
enum test_tier { TEST_QUICK, TEST_FULL, TEST_GPU, TEST_LONG };

struct test {
    const char *name;
    enum test_tier tier;
    int timeout_ms;
    void (*fn)(void);
};

extern const struct test tests[]; /* ends in a zero entry */

/* Leave the running test as skipped. */
__attribute__((noreturn)) void test_skip(const char *why);

/* Path of a file under tests/golden/, or of the default target (fetched by configure.py test into
 * models/). Static buffer. Fails the test where the file is missing. */
const char *test_golden(const char *name);
const char *test_default_target(void);
const char *test_default_draft(void);

/* |got - want| <= tolerance, both printed on failure. */
#define assert_near(got, want, tolerance)                                                          \
    test_assert_near((double)(got), (double)(want), (double)(tolerance), #got, __FILE__, __LINE__)
void test_assert_near(double got, double want, double tolerance, const char *what, const char *file,
                      int line);

/* A call that returns 0 or an error code with text in `struct err e`. */
#define assert_ok(call, e)                                                                         \
    do {                                                                                           \
        int test_rc = (call);                                                                      \
        if (test_rc != 0) fail_msg("%s: %d %s", #call, test_rc, (e).message);                      \
    } while (0)

#endif
