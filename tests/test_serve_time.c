/* serve/: time-outs, drains, signals, sockets in the file system, tokens, metrics. Method as in
 * tests/test_serve.c; the waits are short ones set by the test. */
#include "tests/harness.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "serve/rpc.h"
#include "tests/peer.h"

/* ---- Time-outs ---- */

static void test_serve_hello_timeout(void) {
    struct spawned s;
    struct serve_options o;
    struct peer mute, half, good, bad;
    peer_options(&o);
    o.hello_timeout_ms = 800;
    spawn_server(&s, &o, 1000, 1);
    peer_open(&mute, &s);
    peer_open(&half, &s);
    peer_open(&good, &s);
    peer_open(&bad, &s);
    peer_send_bytes(&half, "\x94\x00\x01", 3); /* a request that never ends */
    peer_send(&good, "[0,1,'hello',[]]");
    peer_expect(&good, "[1, 1, nil, {%}]");
    peer_send(&bad, "[2,'hello',[]]"); /* a notification is no hello */
    peer_expect_closed(&mute, 2000);
    peer_expect_closed(&half, 2000);
    peer_expect_closed(&bad, 2000);
    peer_expect_silence(&good, 500);
    peer_close(&mute);
    peer_close(&half);
    peer_close(&bad);
    peer_close(&good);
    spawned_stop(&s);
}

/* Idle counts from the last byte or the end of the last stream, whichever is later. */
static void test_serve_idle_timeout(void) {
    struct spawned s;
    struct serve_options o;
    struct peer idle, busy;
    msgpack_object done;
    int n;
    peer_options(&o);
    o.idle_timeout_ms = 400;
    spawn_server(&s, &o, 10000, 1);
    peer_open(&idle, &s);
    peer_open(&busy, &s);
    peer_send(&idle, "[0,1,'hello',[]]");
    peer_expect(&idle, "[1, 1, nil, {%}]");
    peer_send(&busy, "[0,1,'generate',['ab',{'max_tokens':120}]]"); /* 1.2 s and more */
    peer_expect_closed(&idle, 2000);
    peer_expect(&busy, "[1, 1, nil, {\"stream\"=>1}]");
    peer_collect(&busy, 1, NULL, &n, &done);
    peer_expect_silence(&busy, 100);
    peer_expect_closed(&busy, 2000);
    peer_close(&idle);
    peer_close(&busy);
    spawned_stop(&s);
}

/* A client that takes nothing is closed and its requests end; one that only begins a message, too.
 */
static void test_serve_stall(void) {
    struct spawned s;
    struct serve_options o;
    struct peer dead, half, other;
    peer_options(&o);
    o.high_bytes = 4096;
    o.low_bytes = 1024;
    o.stall_timeout_ms = 500;
    spawn_server(&s, &o, 200, 8);
    peer_open(&dead, &s);
    peer_open(&half, &s);
    peer_open(&other, &s);
    for (int i = 0; i < 60; i++)
        peer_send(&dead, "[0,%d,'generate',['abcdefgh',{'logprobs':1}]]", i);
    peer_send(&half, "[0,1,'hello',[]]");
    peer_expect(&half, "[1, 1, nil, {%}]");
    peer_send_bytes(&half, "\x94\x00\x01", 3);
    int64_t start_ns = clock_ns();
    while (peer_stat(&other, "connections") != 1) {
        if (clock_ms_since(start_ns) > 6000) fail_msg("still there");
        usleep(20000);
    }
    assert_int_equal(peer_stat(&other, "running") + peer_stat(&other, "paused"), 0);
    assert_int_equal(peer_stat(&other, "closed_readers"), 1);
    peer_close(&dead);
    peer_close(&half);
    peer_close(&other);
    spawned_stop(&s);
}

/* ---- Drain ---- */

/* SIGTERM in the middle: the stream goes to its end, new requests are refused, new connections too,
 * the idle client is let go, the file disappears, exit 0. */
static void test_serve_drain_finishes(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p, idle;
    struct strbuf text = {0};
    msgpack_object m;
    peer_options(&o);
    spawn_server(&s, &o, 5000, 1);
    peer_open(&p, &s);
    peer_open(&idle, &s);
    peer_send(&idle, "[0,1,'hello',[]]");
    peer_expect(&idle, "[1, 1, nil, {%}]");
    peer_send(&p, "[0,1,'generate',['abc',{'max_tokens':60}]] [0,2,'generate',['z',{'max_tokens':9,"
                  "'stream':false}]]");
    peer_expect(&p, "[1, 1, nil, {\"stream\"=>1}]");
    kill(s.pid, SIGTERM);
    peer_expect_closed(&idle, 2000);
    assert_int_equal(access(s.socket, F_OK), -1);
    peer_send(&p, "[0,3,'generate',['abc']]");
    int n_refused = 0, n_unary = 0, n_done = 0;
    while (peer_recv(&p, &m)) {
        struct rpc_message r;
        struct err e = {0};
        assert_int_equal(rpc_read(&r, &m, &e), RPC_GOOD);
        if (r.type == RPC_RESPONSE && r.id == 3) {
            assert_string_equal(p.text, "[1, 3, [8, \"the server is draining\", "
                                        "{\"name\"=>\"shutting_down\"}], nil]");
            n_refused++;
        } else if (r.type == RPC_RESPONSE) {
            assert_int_equal(r.id, 2);
            assert_true(rpc_text_is(map_get(&r.result, "text"), "zzzzzzzzz"));
            n_unary++;
        } else if (r.method_n == 4) {
            n_done++;
            assert_true(rpc_text_is(map_get(&r.params.ptr[1], "finish_reason"), "length"));
        } else {
            const msgpack_object *t = map_get(&r.params.ptr[1], "text");
            strbuf_append(&text, t->via.str.ptr, t->via.str.size);
        }
    }
    assert_int_equal(text.n, 60);
    assert_int_equal(n_refused, 1);
    assert_int_equal(n_unary, 1);
    assert_int_equal(n_done, 1);
    peer_close(&p);
    peer_close(&idle);
    strbuf_deinit(&text);
    assert_int_equal(spawned_wait(&s, 3000), 0);
}

/* Past the deadline streams are cut, with their done. */
static void test_serve_drain_deadline(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p;
    msgpack_object m, done;
    int n;
    peer_options(&o);
    o.drain_timeout_ms = 200;
    spawn_server(&s, &o, 5000, 1);
    peer_open(&p, &s);
    peer_send(&p, "[0,1,'generate',['abc']]");
    assert_true(peer_recv(&p, &m));
    kill(s.pid, SIGTERM);
    peer_collect(&p, 1, NULL, &n, &done);
    assert_true(rpc_text_is(map_get(&done, "finish_reason"), "aborted"));
    peer_expect_closed(&p, 2000);
    peer_close(&p);
    assert_int_equal(spawned_wait(&s, 3000), 0);
}

static void test_serve_drain_method(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p, tcp;
    msgpack_object m, done;
    int n;
    peer_options(&o);
    o.n_listen = 2;
    o.listen[1] = (struct serve_listen){.host = "127.0.0.1", .port = 0};
    spawn_server(&s, &o, 2000, 1);
    peer_open_tcp(&tcp, s.tcp_port);
    peer_send(&tcp, "[0,1,'drain',[]]");
    peer_expect(
        &tcp, "[1, 1, [9, \"drain needs the Unix socket or a connection with a token\", %], nil]");
    peer_open(&p, &s);
    peer_send(&p, "[0,1,'generate',['abc',{'max_tokens':20}]]");
    assert_true(peer_recv(&p, &m));
    peer_send(&p, "[0,2,'drain',[{'timeout_ms':5000}]]");
    peer_collect(&p, 1, NULL, &n, &done); /* passes over the answer to drain */
    assert_true(rpc_text_is(map_get(&done, "finish_reason"), "length"));
    peer_expect_closed(&p, 2000);
    peer_expect_closed(&tcp, 2000);
    peer_close(&p);
    peer_close(&tcp);
    assert_int_equal(spawned_wait(&s, 3000), 0);
}

/* A client that does not read cannot hold a drain up for ever. */
static void test_serve_drain_dead_client(void) {
    struct spawned s;
    struct serve_options o;
    struct peer dead;
    peer_options(&o);
    o.high_bytes = 4096;
    o.low_bytes = 1024;
    o.drain_timeout_ms = 100;
    spawn_server(&s, &o, 200, 8);
    peer_open(&dead, &s);
    for (int i = 0; i < 60; i++)
        peer_send(&dead, "[0,%d,'generate',['abcdefgh',{'logprobs':1}]]", i);
    usleep(300000);
    kill(s.pid, SIGTERM);
    assert_int_equal(spawned_wait(&s, 6000), 0);
    peer_close(&dead);
}

/* The device is lost under two requests: both are told, and the server ends with 1 by itself,
 * whoever else is connected. */
static void test_serve_engine_fails(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p[2], idle;
    msgpack_object done;
    int n;
    peer_options(&o);
    spawn_server(&s, &o, 2000, 1);
    peer_open(&idle, &s);
    peer_send(&idle, "[0,1,'tokenize',['a']]");
    peer_expect(&idle, "[1, 1, nil, %]");
    for (int i = 0; i < 2; i++) {
        peer_open(&p[i], &s);
        peer_send(&p[i], "[0,1,'generate',[[%d,97,98],{'max_tokens':3000}]]", 96 - 90 * i);
        peer_expect(&p[i], "[1, 1, nil, {\"stream\"=>1}]");
    }
    for (int i = 0; i < 2; i++) {
        peer_collect(&p[i], 1, NULL, &n, &done);
        assert_true(rpc_text_is(map_get(&done, "finish_reason"), "error"));
        const msgpack_object *error = map_get(&done, "error");
        assert_true(rpc_text_is(&error->via.array.ptr[1], "the fake device failed"));
        peer_expect_closed(&p[i], 2000);
        peer_close(&p[i]);
    }
    assert_int_equal(spawned_wait(&s, 5000), 1);
    peer_expect_closed(&idle, 1000);
    peer_close(&idle);
}

static void test_serve_second_signal(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p;
    msgpack_object m;
    peer_options(&o);
    spawn_server(&s, &o, 5000, 1);
    peer_open(&p, &s);
    peer_send(&p, "[0,1,'generate',['abc']]");
    assert_true(peer_recv(&p, &m));
    kill(s.pid, SIGTERM);
    usleep(100000);
    int64_t start_ns = clock_ns();
    kill(s.pid, SIGINT);
    assert_int_equal(spawned_wait(&s, 3000), 1);
    assert_true(clock_ms_since(start_ns) < 2000);
    peer_close(&p);
}

/* ---- Sockets in the file system ---- */

static int try_open(const char *path, struct err *e) {
    struct serve_options o;
    struct server *server = NULL;
    memset(e, 0, sizeof *e);
    peer_options(&o);
    o.listen[0].socket_path = path;
    int rc = serve_open(&server, NULL, &o, e);
    serve_close(server);
    return rc;
}

static void test_serve_socket_file(void) {
    struct spawned s;
    struct serve_options o;
    struct err e;
    struct stat st;
    char path[128], longer[300];
    peer_options(&o);
    o.socket_mode = 0660;
    spawn_server(&s, &o, 1000, 1);
    assert_int_equal(stat(s.socket, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0660);
    /* a live server's socket is not taken */
    assert_int_equal(try_open(s.socket, &e), E_BUSY);
    assert_non_null(strstr(e.message, "already listens"));
    struct peer p;
    peer_open(&p, &s);
    peer_send(&p, "[0,1,'tokenize',['a']]");
    peer_expect(&p, "[1, 1, nil, %]");
    peer_close(&p);
    /* a killed server's is */
    kill(s.pid, SIGKILL);
    char keep[96];
    snprintf(keep, sizeof keep, "%s", s.socket);
    s.socket[0] = 0; /* leave the file to us */
    assert_int_equal(spawned_wait(&s, 3000), 1000 + SIGKILL);
    assert_int_equal(access(keep, F_OK), 0);
    assert_ok(try_open(keep, &e), e);
    assert_int_equal(access(keep, F_OK), -1); /* and removed at the close */
    /* another file is never removed */
    snprintf(path, sizeof path, "%s/file", s.folder);
    mkdir(s.folder, 0700);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(try_open(path, &e), E_BUSY);
    assert_int_equal(access(path, F_OK), 0);
    unlink(path);
    /* default mode */
    struct server *server = NULL;
    peer_options(&o);
    o.listen[0].socket_path = path;
    assert_ok(serve_open(&server, NULL, &o, &e), e);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    /* somebody put another file in its place: it stays */
    unlink(path);
    fd = open(path, O_CREAT | O_WRONLY, 0600);
    close(fd);
    serve_close(server);
    assert_int_equal(access(path, F_OK), 0);
    unlink(path);
    rmdir(s.folder);
    memset(longer, 'a', sizeof longer);
    memcpy(longer, "/tmp/", 5);
    longer[110] = 0;
    assert_int_equal(try_open(longer, &e), E_TOO_LONG);
    assert_non_null(strstr(e.message, "the system allows 107"));
    assert_int_equal(try_open("/tmp/no-such-folder-here/socket", &e), E_IO);
    assert_int_equal(try_open("", &e), E_INVALID);
}

/* ---- Tokens ---- */

static void test_serve_token(void) {
    struct spawned s;
    struct serve_options o;
    struct peer p;
    struct err e = {0};
    struct server *server = NULL;
    peer_options(&o);
    o.n_listen = 2;
    o.listen[1] = (struct serve_listen){.host = "127.0.0.1", .port = 0};
    o.token = "secret";
    o.hello_timeout_ms = 1000;
    spawn_server(&s, &o, 1000, 1);
    static const char *const wrong[] = {
        "[0,1,'generate',['a']]",
        "[0,1,'stats',[]]",
        "[0,1,'xyz',[]]",
        "[0,1,'hello',[]]",
        "[0,1,'hello',[{'token':'secreT'}]]",
        "[0,1,'hello',[{'token':'secret1'}]]",
        "[0,1,'hello',[{'token':''}]]",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        peer_open_tcp(&p, s.tcp_port);
        peer_send(&p, "%s [0,2,'stats',[]]", wrong[i]);
        peer_expect(&p, "[1, 1, [9, %, {\"name\"=>\"unauthorized\"}], nil]");
        peer_expect_closed(&p, 2000);
        peer_close(&p);
    }
    peer_open_tcp(&p, s.tcp_port);
    peer_expect_closed(&p, 2000); /* silent: the hello time-out */
    peer_close(&p);
    peer_open_tcp(&p, s.tcp_port);
    peer_send(&p, "[0,1,'hello',[{'token':'secret'}]] "
                  "[0,2,'generate',['ab',{'max_tokens':2,'stream':false}]]");
    peer_expect(&p, "[1, 1, nil, {%}]");
    peer_expect(&p, "[1, 2, nil, {\"text\"=>\"ab\"%}]");
    assert_int_equal(peer_stat(&p, "unauthorised"), 7);
    peer_close(&p);
    peer_open(&p, &s); /* the Unix socket needs none */
    peer_send(&p, "[0,1,'tokenize',['a']]");
    peer_expect(&p, "[1, 1, nil, {%}]");
    peer_close(&p);
    spawned_stop(&s);
    /* reachable from outside: never without a token */
    peer_options(&o);
    o.listen[0] = (struct serve_listen){.host = "0.0.0.0", .port = 0};
    assert_int_equal(serve_open(&server, NULL, &o, &e), E_AUTH);
    o.listen[0].host = "no.such.host.invalid";
    assert_int_equal(serve_open(&server, NULL, &o, &e), E_NOT_FOUND);
    o.listen[0].host = "127.0.0.1";
    o.token = "";
    assert_int_equal(serve_open(&server, NULL, &o, &e), E_INVALID);
}

/* ---- Metrics ---- */

static void http(int port, const char *request, struct strbuf *out) {
    struct peer p;
    char part[4096];
    ssize_t n;
    peer_open_tcp(&p, port);
    peer_send_bytes(&p, request, strlen(request));
    strbuf_clear(out);
    while ((n = recv(p.fd, part, sizeof part, 0)) > 0) strbuf_append(out, part, (size_t)n);
    peer_close(&p);
}

static void test_serve_metrics(void) {
    static const char *const lines[] = {
        "HTTP/1.1 200 OK\r\n",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n",
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"fake "
        "\\\"model\\\"\"} 0\n",
        "vllm:kv_cache_usage_perc{model_name=\"fake \\\"model\\\"\"} 0.0244140625\n",
        "vllm:prompt_tokens_total{model_name=\"fake \\\"model\\\"\"} 4\n",
        "vllm:generation_tokens_total{model_name=\"fake \\\"model\\\"\"} 7\n",
        "vllm:request_success_total{model_name=\"fake \\\"model\\\"\",finished_reason=\"length\"} "
        "2\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"fake \\\"model\\\"\",le=\"0.1\"} 0\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"fake \\\"model\\\"\",le=\"+Inf\"} "
        "0\n",
        "# TYPE vllm:inter_token_latency_seconds histogram\n",
        "vllm:e2e_request_latency_seconds_count{",
        "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{",
        "tandem_pool_pages{class=\"deep\",state=\"used\"} 25\n",
        "# TYPE vllm:spec_decode_num_drafts_total counter\n"
        "vllm:spec_decode_num_drafts_total{model_name=\"fake \\\"model\\\"\"} 3\n",
        "vllm:spec_decode_num_draft_tokens_total{model_name=\"fake \\\"model\\\"\"} 5\n",
        "vllm:spec_decode_num_accepted_tokens_total{model_name=\"fake \\\"model\\\"\"} 3\n",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"fake "
        "\\\"model\\\"\",position=\"0\"} 3\n",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"fake "
        "\\\"model\\\"\",position=\"1\"} 0\n",
        "tandem_spec_draft_tokens_per_pos_total{model_name=\"fake \\\"model\\\"\",position=\"1\"} "
        "2\n",
        "tandem_spec_draft_tokens_per_pos_total{model_name=\"fake \\\"model\\\"\",position=\"15\"} "
        "0\n",
        "tandem_spec_plain_rounds_total{model_name=\"fake \\\"model\\\"\"} 1\n",
        "tandem_spec_lookup_draft_tokens_total{model_name=\"fake \\\"model\\\"\"} 0\n",
        "tandem_spec_draft_starved_total{model_name=\"fake \\\"model\\\"\"} 0\n",
        "tandem_spec_page_rollbacks_total{model_name=\"fake \\\"model\\\"\"} 2\n",
        "tandem_spec_draft_seconds_total{model_name=\"fake \\\"model\\\"\"} 0.003",
        "tandem_spec_verify_seconds_total{model_name=\"fake \\\"model\\\"\"} 0.00",
        "tandem_step_overhead_seconds_total{model_name=\"fake \\\"model\\\"\"} 0.00",
        "tandem_connections{model_name=\"fake \\\"model\\\"\"} 1\n",
    };
    struct spawned s;
    struct serve_options o;
    struct peer p, half;
    struct strbuf out = {0};
    peer_options(&o);
    o.metrics_port = 0;
    spawn_server(&s, &o, 100, 2);
    peer_open(&p, &s);
    /* rounds of two: three with a draft token each, two of them with a refused one; then one token
     */
    peer_send(&p, "[0,1,'generate',['ab',{'max_tokens':6,'stream':false}]]");
    peer_expect(&p, "[1, 1, nil, %]");
    peer_send(&p, "[0,2,'generate',['ab',{'max_tokens':1,'stream':false,'draft_tokens':0}]]");
    peer_expect(&p, "[1, 2, nil, %]");
    http(s.metrics_port, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", &out);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(out.data, lines[i])) fail_msg("no %s in\n%s", lines[i], out.data);
    http(s.metrics_port, "GET /health HTTP/1.0\r\n\r\n", &out);
    assert_non_null(strstr(out.data, "200 OK"));
    http(s.metrics_port, "GET / HTTP/1.0\r\n\r\n", &out);
    assert_non_null(strstr(out.data, "404 Not Found"));
    http(s.metrics_port, "POST /metrics HTTP/1.0\r\n\r\n", &out);
    assert_non_null(strstr(out.data, "405"));
    http(s.metrics_port, "HEAD /metrics HTTP/1.0\r\n\r\n", &out);
    assert_string_equal(strstr(out.data, "\r\n\r\n"), "\r\n\r\n");
    /* a request that never ends is cut at 8 KiB, and one that waits does not hold the server up */
    char *junk = malloc(9000);
    memset(junk, 'a', 9000);
    junk[8999] = 0;
    http(s.metrics_port, junk, &out);
    assert_int_equal(out.n, 0);
    free(junk);
    peer_open_tcp(&half, s.metrics_port);
    peer_send_bytes(&half, "GET ", 4);
    peer_close(&p);
    spawned_stop(&s);
    peer_close(&half);
    strbuf_deinit(&out);
}

const struct test tests[] = {
    {"serve_hello_timeout", TEST_QUICK, 10000, test_serve_hello_timeout},
    {"serve_idle_timeout", TEST_QUICK, 15000, test_serve_idle_timeout},
    {"serve_stall", TEST_QUICK, 15000, test_serve_stall},
    {"serve_drain_finishes", TEST_QUICK, 10000, test_serve_drain_finishes},
    {"serve_drain_deadline", TEST_QUICK, 10000, test_serve_drain_deadline},
    {"serve_drain_method", TEST_QUICK, 10000, test_serve_drain_method},
    {"serve_drain_dead_client", TEST_QUICK, 15000, test_serve_drain_dead_client},
    {"serve_engine_fails", TEST_QUICK, 15000, test_serve_engine_fails},
    {"serve_second_signal", TEST_QUICK, 10000, test_serve_second_signal},
    {"serve_socket_file", TEST_QUICK, 10000, test_serve_socket_file},
    {"serve_token", TEST_QUICK, 10000, test_serve_token},
    {"serve_metrics", TEST_QUICK, 10000, test_serve_metrics},
    {0},
};
