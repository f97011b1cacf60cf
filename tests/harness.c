/* Runner of one test binary: forks each test, enforces its time limit, prints one line a test and
 * the closing count. `--list`, `--only SUBSTRING` (any of several), `--tier quick|full|gpu|long`,
 * `--slower N`: time limits times N, for a run under compute-sanitizer. */
#include "tests/harness.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/number.h"

/* Limits are given for a release build; sanitizers slow a test down tenfold and more. */
enum { RC_SKIP = 77, MAX_ONLY = 64, MAX_SLOWER = 1000 };
static int slower = TEST_SANITIZED ? 15 : 1;

static void run_one(void **state) {
    const struct test *t = *state;
    t->fn();
}

void test_skip(const char *why) {
    fprintf(stderr, "SKIP %s\n", why);
    fflush(NULL);
    _exit(RC_SKIP);
}

static const char *existing(const char *path, const char *what) {
    if (access(path, R_OK) != 0) fail_msg("%s %s: %s", what, path, strerror(errno));
    return path;
}

const char *test_golden(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, "tests/golden/%s", name);
    return existing(path, "golden file");
}

const char *test_default_draft(void) {
    return existing("draft/default-draft.gguf", "default draft");
}

const char *test_default_target(void) {
    return existing("models/SmolLM2-135M-Instruct.Q4_1.gguf", "default target");
}

void test_assert_near(double got, double want, double tolerance, const char *what, const char *file,
                      int line) {
    double d = got - want;
    if (d < 0) d = -d;
    if (!(d <= tolerance)) {
        print_error("%s: got %.9g, want %.9g +- %.3g\n", what, got, want, tolerance);
        _fail(file, line);
    }
}

/* 0 passed, 1 failed, 2 skipped. */
static int run_forked(const struct test *t) {
    fflush(NULL);
    int64_t start = clock_ns();
    pid_t pid = fork();
    if (pid < 0) {
        printf("FAIL %s: fork: %s\n", t->name, strerror(errno));
        return 1;
    }
    if (pid == 0) {
        setpgid(0, 0);
        alarm((unsigned)(t->timeout_ms / 1000 + 1) * (unsigned)slower);
        const struct CMUnitTest unit = {
            .name = t->name, .test_func = run_one, .initial_state = (void *)(uintptr_t)t};
        cmocka_set_message_output(CM_OUTPUT_STDOUT);
        /* cmocka's own lines are noise unless the test fails */
        if (!freopen("/dev/null", "w", stdout)) _exit(99);
        setenv("CMOCKA_MESSAGE_OUTPUT", "STDOUT", 1);
        int n_failed = _cmocka_run_group_tests(t->name, &unit, 1, NULL, NULL);
        fflush(NULL);
        _exit(n_failed ? 1 : 0);
    }
    int status;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    kill(-pid, SIGKILL); /* whatever it left running */
    double ms = clock_ms_since(start);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        printf("ok   %s (%.0f ms)\n", t->name, ms);
        return 0;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == RC_SKIP) {
        printf("skip %s\n", t->name);
        return 2;
    }
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        printf("FAIL %s: over its limit of %lld ms\n", t->name, (long long)t->timeout_ms * slower);
    else if (WIFSIGNALED(status)) printf("FAIL %s: signal %d\n", t->name, WTERMSIG(status));
    else printf("FAIL %s: exit %d\n", t->name, WEXITSTATUS(status));
    return 1;
}

static const char *only[MAX_ONLY];
static int n_only;

static bool is_wanted(const char *name) {
    for (int i = 0; i < n_only; i++)
        if (strstr(name, only[i])) return true;
    return n_only == 0;
}

/* A part of a name that no test has: a typing error, or a test that is gone. */
static const char *unknown_name(void) {
    for (int i = 0; i < n_only; i++) {
        const struct test *t = tests;
        while (t->name && !strstr(t->name, only[i])) t++;
        if (!t->name) return only[i];
    }
    return NULL;
}

int main(int argc, char **argv) {
    static const char *const tiers[] = {"quick", "full", "gpu", "long"};
    const char *tier = NULL;
    int list = 0, times, counts[3] = {0};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--list")) list = 1;
        else if (!strcmp(argv[i], "--only") && i + 1 < argc && n_only < MAX_ONLY)
            only[n_only++] = argv[++i];
        else if (!strcmp(argv[i], "--tier") && i + 1 < argc) tier = argv[++i];
        else if (!strcmp(argv[i], "--slower") && i + 1 < argc && slower < MAX_SLOWER &&
                 number_in(argv[i + 1], strlen(argv[i + 1]), 1, MAX_SLOWER, &times))
            slower *= times, i++;
        else {
            fprintf(stderr,
                    "usage: %s [--list] [--only SUBSTRING]... [--tier quick|full|gpu|long] "
                    "[--slower N]\n",
                    argv[0]);
            return 2;
        }
    }
    if (unknown_name()) {
        fprintf(stderr, "%s: --only %s: no test has it in its name\n", argv[0], unknown_name());
        return 2;
    }
    for (const struct test *t = tests; t->name; t++) {
        if (!is_wanted(t->name)) continue;
        if (tier ? strcmp(tier, tiers[t->tier]) != 0 : t->tier == TEST_LONG && !list) continue;
        if (list) printf("%s %s %d\n", t->name, tiers[t->tier], t->timeout_ms);
        else counts[run_forked(t)]++;
    }
    if (list) return 0;
    printf("%d passed, %d failed, %d skipped\n", counts[0], counts[1], counts[2]);
    return counts[1] ? 1 : 0;
}
