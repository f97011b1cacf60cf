#include "tests/peer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "serve/rpc.h"
#include "tests/fake_engine.h"
#include "tests/harness.h"

enum { WAIT_MS = 5000 };

/* ---- Server ---- */

void peer_options(struct serve_options *o) {
    serve_options_default(o);
    o->n_listen = 1;
}

static void run_server(const struct serve_options *o, int step_us, int run, int ready) {
    struct server *server = NULL;
    struct err e = {0};
    char text[4][160] = {{0}};
    struct engine_options eo;
    engine_options_default(&eo);
    eo.max_draft_tokens = 8; /* as the command line fills it */
    struct serve_options mine = *o;
    mine.engine = &eo;
    log_set_level(LOG_QUIET);
    struct engine *g = fake_engine_open(step_us, run);
    if (serve_open(&server, g, &mine, &e) != 0) {
        snprintf(text[0], sizeof text[0], "!%.150s", e.message);
        if (write(ready, text, sizeof text) < 0) _exit(98);
        engine_close(g);
        exit(1);
    }
    for (int i = 0; i < 3; i++) snprintf(text[i], sizeof text[i], "%s", serve_address(server, i));
    snprintf(text[3], sizeof text[3], "%s", serve_address(server, -1));
    if (write(ready, text, sizeof text) < 0) _exit(98);
    close(ready);
    int rc = serve_run(server);
    engine_close(g);
    serve_close(server);
    exit(rc);
}

static int port_of(const char *address) {
    const char *colon = strrchr(address, ':');
    return colon ? (int)strtol(colon + 1, NULL, 10) : -1;
}

void spawn_server(struct spawned *s, struct serve_options *o, int step_us, int run) {
    memset(s, 0, sizeof *s);
    snprintf(s->folder, sizeof s->folder, "/tmp/tandem-test-XXXXXX");
    assert_non_null(mkdtemp(s->folder));
    snprintf(s->socket, sizeof s->socket, "%s/socket", s->folder);
    o->listen[0].socket_path = s->socket;
    int p[2];
    assert_int_equal(pipe(p), 0);
    fflush(NULL);
    s->pid = fork();
    assert_true(s->pid >= 0);
    if (s->pid == 0) {
        close(p[0]);
        run_server(o, step_us, run, p[1]);
    }
    close(p[1]);
    char text[4][160];
    size_t n = 0;
    while (n < sizeof text) {
        ssize_t k = read(p[0], (char *)text + n, sizeof text - n);
        if (k <= 0) break;
        n += (size_t)k;
    }
    close(p[0]);
    assert_int_equal(n, sizeof text);
    memcpy(s->address, text, sizeof text);
    s->tcp_port = port_of(s->address[1]);
    s->metrics_port = port_of(s->address[3]);
}

int spawned_wait(struct spawned *s, int timeout_ms) {
    int64_t start = clock_ns();
    int status;
    for (;;) {
        pid_t got = waitpid(s->pid, &status, WNOHANG);
        if (got == s->pid) break;
        if (clock_ms_since(start) > timeout_ms) {
            kill(s->pid, SIGKILL);
            fail_msg("server did not end within %d ms", timeout_ms);
        }
        usleep(2000);
    }
    unlink(s->socket);
    rmdir(s->folder);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

void spawned_stop(struct spawned *s) {
    kill(s->pid, SIGTERM);
    int rc = spawned_wait(s, 10000);
    if (rc != 0) fail_msg("server ended with %d", rc);
}

/* ---- Text to MessagePack ---- */

static const char *blank(const char *t) {
    while (*t == ' ') t++;
    return t;
}

static const char *pack_value(msgpack_packer *pk, const char *t);

/* The items between brackets, packed into a buffer of their own to be counted. */
static const char *pack_items(msgpack_packer *pk, const char *t, char close) {
    struct strbuf items = {0};
    msgpack_packer inner;
    size_t n = 0;
    rpc_packer(&inner, &items);
    t = blank(t);
    while (*t != close) {
        t = pack_value(&inner, t);
        if (close == '}') {
            t = blank(t);
            assert_int_equal(*t, ':');
            t = pack_value(&inner, t + 1);
        }
        n++;
        t = blank(t);
        if (*t == ',') t = blank(t + 1);
    }
    if (close == '}') msgpack_pack_map(pk, n);
    else msgpack_pack_array(pk, n);
    if (items.n) pk->callback(pk->data, items.data, items.n);
    strbuf_deinit(&items);
    return t + 1;
}

static const char *pack_value(msgpack_packer *pk, const char *t) {
    t = blank(t);
    if (*t == '[') return pack_items(pk, t + 1, ']');
    if (*t == '{') return pack_items(pk, t + 1, '}');
    if (*t == '\'') {
        const char *end = strchr(t + 1, '\'');
        msgpack_pack_str_with_body(pk, t + 1, (size_t)(end - t - 1));
        return end + 1;
    }
    if (strncmp(t, "nil", 3) == 0) return (void)msgpack_pack_nil(pk), t + 3;
    if (strncmp(t, "true", 4) == 0) return (void)msgpack_pack_true(pk), t + 4;
    if (strncmp(t, "false", 5) == 0) return (void)msgpack_pack_false(pk), t + 5;
    if (strncmp(t, "h'", 2) == 0) {
        char bytes[256];
        size_t n = 0;
        for (t += 2; *t != '\''; t += 2) {
            unsigned b;
            sscanf(t, "%2x", &b);
            bytes[n++] = (char)b;
        }
        msgpack_pack_bin_with_body(pk, bytes, n);
        return t + 1;
    }
    char *end;
    size_t n = strspn(t, "+-0123456789");
    if (t[n] == '.' || t[n] == 'e') {
        msgpack_pack_double(pk, strtod(t, &end));
    } else if (*t == '-') {
        msgpack_pack_int64(pk, strtoll(t, &end, 10));
    } else {
        msgpack_pack_uint64(pk, strtoull(t, &end, 10));
    }
    if (end == t) fail_msg("cannot pack %s", t);
    return end;
}

void pack_text(struct strbuf *out, const char *text) {
    msgpack_packer pk;
    rpc_packer(&pk, out);
    while (*blank(text)) text = pack_value(&pk, text);
}

/* ---- Client ---- */

static void start(struct peer *p, int fd) {
    memset(p, 0, sizeof *p);
    p->fd = fd;
    msgpack_zone_init(&p->zone, 4096);
}

void peer_open(struct peer *p, const struct spawned *s) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", s->socket);
    start(p, socket(AF_UNIX, SOCK_STREAM, 0));
    if (connect(p->fd, (struct sockaddr *)&a, sizeof a) != 0)
        fail_msg("connect: %s", strerror(errno));
}

void peer_open_tcp(struct peer *p, int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    start(p, socket(AF_INET, SOCK_STREAM, 0));
    if (connect(p->fd, (struct sockaddr *)&a, sizeof a) != 0)
        fail_msg("connect: %s", strerror(errno));
}

void peer_close(struct peer *p) {
    close(p->fd);
    strbuf_deinit(&p->in);
    msgpack_zone_destroy(&p->zone);
}

void peer_start(struct spawned *s, struct peer *p, int step_us, int run) {
    struct serve_options o;
    peer_options(&o);
    spawn_server(s, &o, step_us, run);
    peer_open(p, s);
}

void peer_stop(struct spawned *s, struct peer *p) {
    peer_close(p);
    spawned_stop(s);
}

void peer_send_bytes(struct peer *p, const void *bytes, size_t n) {
    const char *b = bytes;
    while (n > 0) {
        ssize_t k = send(p->fd, b, n, MSG_NOSIGNAL);
        if (k < 0) fail_msg("send: %s", strerror(errno));
        b += k;
        n -= (size_t)k;
    }
}

void peer_send(struct peer *p, const char *fmt, ...) {
    struct strbuf text = {0}, out = {0};
    va_list ap;
    char *s = NULL;
    va_start(ap, fmt);
    assert_true(vasprintf(&s, fmt, ap) >= 0);
    va_end(ap);
    pack_text(&out, s);
    peer_send_bytes(p, out.data, out.n);
    free(s);
    strbuf_deinit(&text);
    strbuf_deinit(&out);
}

/* 1: more bytes came, 0: closed, -1: nothing within ms. */
static int receive(struct peer *p, int ms) {
    struct pollfd f = {.fd = p->fd, .events = POLLIN};
    int n = poll(&f, 1, ms);
    if (n == 0) return -1;
    char part[65536];
    ssize_t k = recv(p->fd, part, sizeof part, 0);
    if (k <= 0) return 0;
    strbuf_append(&p->in, part, (size_t)k);
    return 1;
}

static bool unpack(struct peer *p, msgpack_object *out) {
    size_t at = 0;
    strbuf_consume(&p->in, p->n_message);
    p->n_message = 0;
    msgpack_zone_clear(&p->zone);
    if (p->in.n == 0) return false;
    msgpack_unpack_return r = msgpack_unpack(p->in.data, p->in.n, &at, &p->zone, out);
    if (r == MSGPACK_UNPACK_CONTINUE) return false;
    assert_true(r == MSGPACK_UNPACK_SUCCESS || r == MSGPACK_UNPACK_EXTRA_BYTES);
    p->n_message = at;
    msgpack_object_print_buffer(p->text, sizeof p->text, *out);
    return true;
}

bool peer_recv(struct peer *p, msgpack_object *out) {
    for (;;) {
        if (unpack(p, out)) return true;
        int rc = receive(p, WAIT_MS);
        if (rc < 0) fail_msg("no message within %d ms", WAIT_MS);
        if (rc == 0) return false;
    }
}

/* `%` stands for any run of characters. */
static bool matches(const char *got, const char *want) {
    const char *after = NULL, *again = NULL; /* the last % and where its run would end */
    for (;;) {
        if (*want == '%') {
            after = ++want;
            again = got;
        } else if (*got && *got == *want) {
            got++;
            want++;
        } else if (!*got && !*want) {
            return true;
        } else if (after && *again) {
            got = ++again;
            want = after;
        } else {
            return false;
        }
    }
}

void peer_expect(struct peer *p, const char *want) {
    msgpack_object o;
    if (!peer_recv(p, &o)) fail_msg("closed; want %s", want);
    if (!matches(p->text, want)) fail_msg("got  %s\nwant %s", p->text, want);
}

void peer_expect_silence(struct peer *p, int ms) {
    msgpack_object o;
    if (unpack(p, &o)) fail_msg("unexpected: %s", p->text);
    if (receive(p, ms) >= 0) fail_msg("%s", unpack(p, &o) ? p->text : "closed or bytes");
}

void peer_expect_closed(struct peer *p, int ms) {
    msgpack_object o;
    if (unpack(p, &o)) fail_msg("unexpected: %s", p->text);
    int rc = receive(p, ms);
    if (rc != 0) fail_msg("%s", rc < 0 ? "still open" : unpack(p, &o) ? p->text : "bytes");
}

const msgpack_object *map_get(const msgpack_object *map, const char *key) {
    const msgpack_object *v = rpc_get(map, key);
    if (!v) fail_msg("no key %s", key);
    return v;
}

long long map_int(const msgpack_object *map, const char *key) {
    int64_t v = 0;
    if (!rpc_int(map_get(map, key), INT64_MIN, INT64_MAX, &v)) fail_msg("%s is no integer", key);
    return v;
}

void peer_collect(struct peer *p, int id, struct strbuf *text, int *n_notifications,
                  msgpack_object *done) {
    *n_notifications = 0;
    for (;;) {
        msgpack_object o;
        if (!peer_recv(p, &o)) fail_msg("closed before stream %d ended", id);
        struct rpc_message m;
        struct err e = {0};
        assert_int_equal(rpc_read(&m, &o, &e), RPC_GOOD);
        if (m.type != RPC_NOTIFICATION || m.params.ptr[0].via.u64 != (uint64_t)id) continue;
        const msgpack_object *map = &m.params.ptr[1];
        if (m.method_n == 4 && memcmp(m.method, "done", 4) == 0) {
            *done = *map;
            return;
        }
        assert_int_equal(map_int(map, "seq"), *n_notifications);
        (*n_notifications)++;
        const msgpack_object *t = rpc_get(map, "text");
        if (!t) t = map_get(map, "bytes");
        const char *s;
        size_t n;
        assert_true(rpc_text(t, &s, &n));
        if (text) strbuf_append(text, s, n);
    }
}

long long peer_stat(struct peer *p, const char *name) {
    peer_send(p, "[0,999999,'stats',[]]");
    for (;;) {
        msgpack_object o;
        struct rpc_message m;
        assert_true(peer_recv(p, &o));
        if (rpc_read(&m, &o, NULL) == RPC_GOOD && m.type == RPC_RESPONSE && m.id == 999999)
            return rpc_get(&m.result, name) ? map_int(&m.result, name)
                                            : map_int(map_get(&m.result, "server"), name);
    }
}
