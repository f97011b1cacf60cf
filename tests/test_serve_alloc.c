/* Allocation failure at the n-th call for the opens of serve/: an error in words, nothing leaked,
 * nothing left in the file system. Method: make allocation 1, 2, 3 ... of our own code fail until
 * the call succeeds. */
#include "tests/harness.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "serve/client.h"
#include "serve/serve.h"
#include "tests/fail_alloc.h"
#include "tests/peer.h"

static void test_alloc_serve_open(void) {
    char folder[] = "/tmp/tandem-test-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/socket", folder);
    struct serve_options o;
    peer_options(&o);
    o.n_listen = 2;
    o.listen[0].socket_path = path;
    o.listen[1] = (struct serve_listen){.host = "127.0.0.1", .port = 0};
    o.metrics_port = 0;
    int n = 0, rc;
    do {
        struct server *s = NULL;
        struct err e = {0};
        long live = fail_alloc_live();
        fail_alloc_at(++n);
        rc = serve_open(&s, NULL, &o, &e);
        fail_alloc_at(0);
        if (rc != 0) {
            assert_null(s);
            assert_true(e.message[0] != 0);
        }
        serve_close(s);
        assert_int_equal(access(path, F_OK), -1);
        assert_int_equal(fail_alloc_live(), live);
        assert_true(n < 1000);
    } while (rc != 0);
    assert_true(n > 1);
    rmdir(folder);
}

/* The server in a program of its own: the counting allocator here knows no threads. */
static pid_t start_server(const char *socket) {
    char tool[512], line[64];
    ssize_t n = readlink("/proc/self/exe", tool, sizeof tool - 32);
    assert_true(n > 0);
    tool[n] = 0;
    char *slash = strrchr(tool, '/');
    assert_non_null(slash);
    snprintf(slash + 1, 32, "tool_serve_fake");
    int p[2];
    assert_int_equal(pipe(p), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(p[1], STDOUT_FILENO);
        close(p[0]);
        execl(tool, tool, socket, (char *)NULL);
        _exit(99);
    }
    close(p[1]);
    assert_true(read(p[0], line, sizeof line) > 0); /* "ready ..." */
    close(p[0]);
    return pid;
}

static void test_alloc_client(void) {
    char folder[] = "/tmp/tandem-test-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/socket", folder);
    pid_t server = start_server(path);
    struct client_options co = {.socket_path = path, .timeout_ms = 5000};
    int n = 0, rc;
    do {
        struct client *c = NULL;
        struct client_settings set = {0};
        struct client_done done;
        struct err e = {0};
        long live = fail_alloc_live();
        fail_alloc_at(++n);
        rc = client_open(&c, &co, &e);
        if (rc == 0) {
            client_set_int(&set, "max_tokens", 50);
            rc = client_generate(c, "abc", 3, &set, NULL, NULL, &done, &e);
        }
        fail_alloc_at(0);
        if (rc != 0) assert_true(e.message[0] != 0);
        client_settings_deinit(&set);
        client_close(c);
        assert_int_equal(fail_alloc_live(), live);
        assert_true(n < 1000);
    } while (rc != 0);
    assert_true(n > 3);
    int status;
    kill(server, SIGTERM);
    waitpid(server, &status, 0);
    assert_int_equal(status, 0);
    rmdir(folder);
}

const struct test tests[] = {
    {"alloc_serve_open", TEST_QUICK, 10000, test_alloc_serve_open},
    {"alloc_client", TEST_QUICK, 20000, test_alloc_client},
    {0},
};
