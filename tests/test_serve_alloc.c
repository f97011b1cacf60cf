/* Allocation failure at the n-th call for the opens of serve/: an error in words, nothing leaked,
 * nothing left in the file system. Method: make allocation 1, 2, 3 ... of our own code fail until
 * the call succeeds. */
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static void test_alloc_client(void) {
    struct spawned s;
    struct serve_options o;
    peer_options(&o);
    spawn_server(&s, &o, 100, 4);
    struct client_options co = {.socket_path = s.socket, .timeout_ms = 5000};
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
    spawned_stop(&s);
}

const struct test tests[] = {
    {"alloc_serve_open", TEST_QUICK, 10000, test_alloc_serve_open},
    {"alloc_client", TEST_QUICK, 20000, test_alloc_client},
    {0},
};
