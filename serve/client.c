#include "serve/client.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "serve/client_private.h"
#include "serve/rpc.h"
#include "serve/scan.h"

enum {
    DEFAULT_TIMEOUT_MS = 30000,
    MAX_ANSWER_BYTES = 256 << 20,
    MAX_ANSWER_VALUES = 16 << 20,
};

struct client {
    int fd;
    int wake[2]; /* a pipe: client_interrupt writes, poll() wakes */
    atomic_bool streaming, interrupted;
    int timeout_ms;
    uint32_t next_id;
    int refusal;
    double retry_after;
    struct scan scan;
    struct strbuf in;
    size_t scanned, message_n; /* the message in hand is in[0, message_n) */
    msgpack_zone zone;         /* of the message in hand */
    msgpack_zone hello_zone;
    msgpack_object hello;
    struct strbuf hello_bytes;
};

/* ---- Settings ---- */

static msgpack_packer setting(struct client_settings *s, const char *name) {
    msgpack_packer pk;
    rpc_packer(&pk, &s->packed);
    rpc_pack_str(&pk, name);
    s->n++;
    return pk;
}

void client_set_int(struct client_settings *s, const char *name, int64_t value) {
    msgpack_packer pk = setting(s, name);
    msgpack_pack_int64(&pk, value);
}
void client_set_seed(struct client_settings *s, uint64_t value) {
    msgpack_packer pk = setting(s, "seed");
    msgpack_pack_uint64(&pk, value);
}
void client_set_real(struct client_settings *s, const char *name, double value) {
    msgpack_packer pk = setting(s, name);
    rpc_pack_real(&pk, value);
}
void client_set_bool(struct client_settings *s, const char *name, bool value) {
    msgpack_packer pk = setting(s, name);
    rpc_pack_bool(&pk, value);
}
void client_set_text(struct client_settings *s, const char *name, const char *value, size_t n) {
    msgpack_packer pk = setting(s, name);
    rpc_pack_text(&pk, value, n);
}
void client_set_texts(struct client_settings *s, const char *name, const char *const *values,
                      int n) {
    msgpack_packer pk = setting(s, name);
    msgpack_pack_array(&pk, (size_t)n);
    for (int i = 0; i < n; i++) rpc_pack_text(&pk, values[i], strlen(values[i]));
}
void client_settings_deinit(struct client_settings *s) {
    strbuf_deinit(&s->packed);
    s->n = 0;
}

/* ---- Bytes ---- */

/* Wait until the socket is ready for `events`, or, where `wakes`, client_interrupt was called;
 * deadline_ns 0: no end. */
static int wait_for(struct client *c, short events, int64_t deadline_ns, bool wakes,
                    struct err *e) {
    for (;;) {
        int ms = -1;
        if (deadline_ns) {
            int64_t left = deadline_ns - clock_ns();
            if (left <= 0) return err_raise(e, E_TIMEOUT, "the server does not answer");
            ms = (int)(left / 1000000) + 1;
        }
        struct pollfd p[2] = {{.fd = c->fd, .events = events},
                              {.fd = c->wake[0], .events = POLLIN}};
        int n = poll(p, wakes ? 2 : 1, ms);
        if (n < 0 && errno != EINTR) return err_raise(e, E_IO, "poll: %s", strerror(errno));
        if (n <= 0) continue;
        if (wakes && p[1].revents) {
            char drop[16];
            while (read(c->wake[0], drop, sizeof drop) > 0) {
            }
            return 0;
        }
        if (p[0].revents) return 0;
    }
}

static int64_t deadline_of(const struct client *c) {
    return clock_ns() + (int64_t)c->timeout_ms * 1000000;
}

/* Answers are not read meanwhile; the server reads on while it has few bytes for us, so both sides
 * cannot wait for each other but for its time-out. */
static int send_all(struct client *c, const struct strbuf *b, struct err *e) {
    int64_t deadline = deadline_of(c);
    if (b->failed) return err_raise(e, E_NOMEM, "no memory for a request");
    for (size_t at = 0; at < b->n;) {
        ssize_t n = send(c->fd, b->data + at, b->n - at, MSG_NOSIGNAL);
        if (n >= 0) {
            at += (size_t)n;
        } else if (errno == EAGAIN) {
            int rc = wait_for(c, POLLOUT, deadline, false, e);
            if (rc != 0) return rc;
        } else if (errno != EINTR) {
            return err_raise(e, E_CLOSED, "the connection broke: %s", strerror(errno));
        }
    }
    return 0;
}

/* The next message of the server, unpacked into c->zone; the one before is gone. Where
 * `interrupted` is not NULL it may be set instead. */
static int next_message(struct client *c, int64_t deadline, bool *interrupted, msgpack_object *out,
                        struct err *e) {
    msgpack_zone_clear(&c->zone);
    strbuf_consume(&c->in, c->message_n);
    c->scanned -= c->message_n;
    c->message_n = 0;
    for (;;) {
        size_t used;
        enum scan_result r = SCAN_NEED_MORE;
        /* Asked each time: a fast server would never let us reach poll(). */
        if (interrupted && atomic_exchange(&c->interrupted, false)) {
            *interrupted = true;
            return 0;
        }
        if (c->scanned < c->in.n) {
            r = scan_feed(&c->scan, (const uint8_t *)c->in.data + c->scanned, c->in.n - c->scanned,
                          &used);
            c->scanned += used;
        }
        if (r == SCAN_REFUSED)
            return err_raise(e, E_PROTOCOL, "the server sent what is no message: %s",
                             scan_error_text(c->scan.error));
        if (r == SCAN_MESSAGE) {
            c->message_n = c->scanned;
            return rpc_unpack(&c->zone, out, c->in.data, c->message_n, e);
        }
        char part[65536];
        ssize_t n = recv(c->fd, part, sizeof part, 0);
        if (n > 0) {
            strbuf_append(&c->in, part, (size_t)n);
            if (c->in.failed) return err_raise(e, E_NOMEM, "no memory for an answer");
        } else if (n == 0) {
            return err_raise(e, E_CLOSED, "the server closed the connection");
        } else if (errno == EAGAIN) {
            int rc = wait_for(c, POLLIN, deadline, interrupted != NULL, e);
            if (rc != 0) return rc;
        } else if (errno != EINTR) {
            return err_raise(e, E_CLOSED, "the connection broke: %s", strerror(errno));
        }
    }
}

/* ---- Calls ---- */

static int send_request(struct client *c, const char *method, const struct strbuf *params,
                        int n_params, const struct client_settings *settings, uint32_t *id,
                        struct err *e) {
    struct strbuf b = {0};
    msgpack_packer pk;
    *id = c->next_id++;
    rpc_packer(&pk, &b);
    rpc_pack_request_head(&pk, *id, method);
    msgpack_pack_array(&pk, (size_t)n_params + (settings != NULL));
    if (n_params > 0) strbuf_append(&b, params->data, params->n);
    if (settings) {
        msgpack_pack_map(&pk, (size_t)settings->n);
        if (settings->n > 0) strbuf_append(&b, settings->packed.data, settings->packed.n);
    }
    if ((params && params->failed) || (settings && settings->packed.failed)) b.failed = true;
    int rc = send_all(c, &b, e);
    strbuf_deinit(&b);
    return rc;
}

static int err_of(int code) {
    switch (code) {
    case RPC_INVALID_PARAMS:
    case RPC_INVALID_REQUEST:
        return E_INVALID;
    case RPC_UNKNOWN_METHOD:
    case RPC_UNSUPPORTED:
        return E_UNSUPPORTED;
    case RPC_TOO_LONG:
        return E_TOO_LONG;
    case RPC_OVERLOADED:
    case RPC_TOO_MANY:
        return E_FULL;
    case RPC_CANCELLED:
        return E_CANCELLED;
    case RPC_SHUTTING_DOWN:
        return E_CLOSED;
    case RPC_UNAUTHORIZED:
        return E_AUTH;
    case RPC_NOT_FOUND:
        return E_NOT_FOUND;
    default:
        return E_PROTOCOL;
    }
}

static int refusal(struct client *c, const msgpack_object *error, struct err *e) {
    int64_t code = RPC_INTERNAL;
    const char *text = "the server refused";
    size_t n = strlen(text);
    if (error->type == MSGPACK_OBJECT_ARRAY && error->via.array.size >= 2) {
        rpc_int(&error->via.array.ptr[0], INT32_MIN, INT32_MAX, &code);
        rpc_text(&error->via.array.ptr[1], &text, &n);
        if (error->via.array.size >= 3)
            client__take_real(&error->via.array.ptr[2], "retry_after", &c->retry_after);
    }
    c->refusal = (int)code;
    return err_raise(e, err_of((int)code), "%.*s (%s)", n > 800 ? 800 : (int)n, text,
                     rpc_code_name((int)code));
}

int client_call(struct client *c, const char *method, const struct strbuf *params, int n_params,
                const struct client_settings *settings, msgpack_object *result, struct err *e) {
    uint32_t id;
    int64_t deadline = deadline_of(c);
    int rc = send_request(c, method, params, n_params, settings, &id, e);
    c->refusal = 0;
    c->retry_after = 0;
    while (rc == 0) {
        msgpack_object o;
        struct rpc_message m;
        if ((rc = next_message(c, deadline, NULL, &o, e)) != 0) break;
        if (rpc_read(&m, &o, e) != RPC_GOOD) return E_PROTOCOL;
        if (m.type != RPC_RESPONSE || m.id != id) continue; /* the tail of an older stream */
        if (m.error.type != MSGPACK_OBJECT_NIL) return refusal(c, &m.error, e);
        *result = m.result;
        return 0;
    }
    return rc;
}

/* ---- Streams ---- */

/* [id, {...}] of the stream `id`? */
static const msgpack_object *for_stream(const struct rpc_message *m, const char *method,
                                        int64_t id) {
    int64_t got;
    if (m->type != RPC_NOTIFICATION || m->params.size < 2 || m->method_n != strlen(method) ||
        memcmp(m->method, method, m->method_n) != 0)
        return NULL;
    if (!rpc_int(&m->params.ptr[0], 0, UINT32_MAX, &got) || got != id) return NULL;
    return m->params.ptr[1].type == MSGPACK_OBJECT_MAP ? &m->params.ptr[1] : NULL;
}

static int send_cancel(struct client *c, int64_t stream, struct err *e) {
    struct strbuf params = {0};
    msgpack_packer pk;
    uint32_t id;
    rpc_packer(&pk, &params);
    msgpack_pack_int64(&pk, stream);
    int rc = send_request(c, "cancel", &params, 1, NULL, &id, e);
    strbuf_deinit(&params);
    return rc;
}

static int read_stream(struct client *c, int64_t stream, client_tokens_fn *on_tokens, void *arg,
                       struct client_done *done, struct err *e) {
    bool cancelled = false;
    for (;;) {
        msgpack_object o;
        struct rpc_message m;
        const msgpack_object *map;
        bool interrupted = false;
        /* After a cancel the end must come in time. */
        int rc = next_message(c, cancelled ? deadline_of(c) : 0, &interrupted, &o, e);
        if (rc != 0) return rc;
        if (interrupted) {
            if (!cancelled && (rc = send_cancel(c, stream, e)) != 0) return rc;
            cancelled = true;
            continue;
        }
        if (rpc_read(&m, &o, e) != RPC_GOOD) return E_PROTOCOL;
        if ((map = for_stream(&m, "token", stream))) {
            done->n_notifications++;
            if (on_tokens && (rc = client__give_pieces(map, on_tokens, arg, e)) != 0) return rc;
        } else if ((map = for_stream(&m, "done", stream))) {
            client__take_done(done, map);
            return 0;
        }
    }
}

static int ask(struct client *c, const char *method, const struct strbuf *params,
               const struct client_settings *settings, client_tokens_fn *on_tokens, void *arg,
               struct client_done *done, struct err *e) {
    msgpack_object result;
    int64_t stream;
    char drop[16];
    memset(done, 0, sizeof *done);
    while (read(c->wake[0], drop, sizeof drop) > 0) {
    } /* interrupts of before */
    atomic_store(&c->interrupted, false);
    atomic_store(&c->streaming, true);
    int rc = client_call(c, method, params, 1, settings, &result, e);
    if (rc == 0) {
        const msgpack_object *id = rpc_get(&result, "stream");
        if (!id || !rpc_int(id, 0, UINT32_MAX, &stream))
            rc = err_raise(e, E_PROTOCOL, "the server gave no stream id");
        else rc = read_stream(c, stream, on_tokens, arg, done, e);
    }
    atomic_store(&c->streaming, false);
    return rc;
}

int client_generate(struct client *c, const char *prompt, size_t n,
                    const struct client_settings *settings, client_tokens_fn *on_tokens, void *arg,
                    struct client_done *done, struct err *e) {
    struct strbuf params = {0};
    msgpack_packer pk;
    rpc_packer(&pk, &params);
    rpc_pack_text(&pk, prompt, n);
    int rc = ask(c, "generate", &params, settings, on_tokens, arg, done, e);
    strbuf_deinit(&params);
    return rc;
}

int client_chat(struct client *c, const struct client_message *messages, int n,
                const struct client_settings *settings, client_tokens_fn *on_tokens, void *arg,
                struct client_done *done, struct err *e) {
    struct strbuf params = {0};
    msgpack_packer pk;
    rpc_packer(&pk, &params);
    msgpack_pack_array(&pk, (size_t)n);
    for (int i = 0; i < n; i++) {
        msgpack_pack_map(&pk, 2);
        rpc_pack_str(&pk, "role");
        rpc_pack_str(&pk, messages[i].role);
        rpc_pack_str(&pk, "content");
        rpc_pack_text(&pk, messages[i].content, messages[i].content_n);
    }
    int rc = ask(c, "chat", &params, settings, on_tokens, arg, done, e);
    strbuf_deinit(&params);
    return rc;
}

void client_interrupt(struct client *c) {
    int saved = errno;
    if (atomic_load(&c->streaming)) {
        atomic_store(&c->interrupted, true);
        ssize_t n = write(c->wake[1], "", 1);
        (void)n; /* full: it is awake already */
    }
    errno = saved;
}

/* ---- Opening ---- */

/* Connect without blocking longer than the deadline. Returns 0 or an errno. */
static int connect_in_time(struct client *c, const struct sockaddr *a, socklen_t n,
                           int64_t deadline) {
    if (connect(c->fd, a, n) == 0) return 0;
    if (errno == EAGAIN) return ETIMEDOUT; /* a Unix socket whose queue is full */
    if (errno != EINPROGRESS) return errno;
    if (wait_for(c, POLLOUT, deadline, false, NULL) != 0) return ETIMEDOUT;
    int why = 0;
    socklen_t size = sizeof why;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &why, &size);
    return why;
}

static int raise_connect(int why, const char *where, struct err *e) {
    int code = why == ENOENT                            ? E_NOT_FOUND
               : why == ETIMEDOUT                       ? E_TIMEOUT
               : why == ECONNREFUSED || why == ENOTSOCK ? E_CLOSED
                                                        : E_IO;
    return err_raise(e, code, "%s: %s", where, strerror(why));
}

static int open_socket(struct client *c, int family, struct err *e) {
    c->fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return c->fd < 0 ? err_raise(e, E_IO, "socket: %s", strerror(errno)) : 0;
}

static int connect_unix(struct client *c, const char *path, struct err *e) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n >= sizeof a.sun_path)
        return err_raise(e, E_TOO_LONG, "socket path %s has %zu bytes, the system allows %zu", path,
                         n, sizeof a.sun_path - 1);
    memcpy(a.sun_path, path, n + 1);
    int rc = open_socket(c, AF_UNIX, e);
    if (rc != 0) return rc;
    int why = connect_in_time(c, (struct sockaddr *)&a, sizeof a, deadline_of(c));
    return why ? raise_connect(why, path, e) : 0;
}

static int connect_tcp(struct client *c, const char *host, int port, struct err *e) {
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found = NULL;
    char text[16], where[300];
    snprintf(text, sizeof text, "%d", port);
    snprintf(where, sizeof where, "%s:%d", host, port);
    int rc = getaddrinfo(host, text, &hints, &found), why = ENOENT;
    if (rc != 0) return err_raise(e, E_NOT_FOUND, "host %s: %s", host, gai_strerror(rc));
    rc = 0;
    for (struct addrinfo *a = found; a && why; a = a->ai_next) {
        if (c->fd >= 0) close(c->fd);
        if ((rc = open_socket(c, a->ai_family, e)) != 0) break;
        why = connect_in_time(c, a->ai_addr, a->ai_addrlen, deadline_of(c));
    }
    freeaddrinfo(found);
    if (rc != 0) return rc;
    if (why) return raise_connect(why, where, e);
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return 0;
}

static int say_hello(struct client *c, const struct client_options *o, struct err *e) {
    struct client_settings s = {0};
    msgpack_object result;
    const char *name = o->name ? o->name : "tandem";
    client_set_int(&s, "protocol", RPC_PROTOCOL_VERSION);
    client_set_text(&s, "client", name, strlen(name));
    if (o->token) client_set_text(&s, "token", o->token, strlen(o->token));
    int rc = client_call(c, "hello", NULL, 0, &s, &result, e);
    client_settings_deinit(&s);
    if (rc != 0) return rc;
    if (result.type != MSGPACK_OBJECT_MAP)
        return err_raise(e, E_PROTOCOL, "hello was answered with %s", rpc_type_name(&result));
    /* Keep it: the message is copied and unpacked again where it stays. */
    size_t at = 0;
    strbuf_append(&c->hello_bytes, c->in.data, c->message_n);
    if (c->hello_bytes.failed ||
        msgpack_unpack(c->hello_bytes.data, c->hello_bytes.n, &at, &c->hello_zone, &c->hello) !=
            MSGPACK_UNPACK_SUCCESS)
        return err_raise(e, E_NOMEM, "no memory for the server's hello");
    c->hello = c->hello.via.array.ptr[3];
    return 0;
}

int client_open(struct client **out, const struct client_options *o, struct err *e) {
    int rc;
    *out = NULL;
    struct client *c = calloc(1, sizeof *c);
    if (!c) return err_raise(e, E_NOMEM, "no memory for a client");
    c->fd = c->wake[0] = c->wake[1] = -1;
    c->timeout_ms = o->timeout_ms > 0 ? o->timeout_ms : DEFAULT_TIMEOUT_MS;
    c->next_id = 1;
    c->in.limit = MAX_ANSWER_BYTES + 65536;
    scan_init(&c->scan,
              &(struct scan_limits){.max_bytes = MAX_ANSWER_BYTES, .max_nodes = MAX_ANSWER_VALUES});
    if (!msgpack_zone_init(&c->zone, 8192)) {
        free(c);
        return err_raise(e, E_NOMEM, "no memory for a client");
    }
    if (!msgpack_zone_init(&c->hello_zone, 2048)) {
        msgpack_zone_destroy(&c->zone);
        free(c);
        return err_raise(e, E_NOMEM, "no memory for a client");
    }
    if (pipe2(c->wake, O_CLOEXEC | O_NONBLOCK) != 0) {
        rc = err_raise(e, E_IO, "pipe: %s", strerror(errno));
        goto fail;
    }
    rc = o->socket_path ? connect_unix(c, o->socket_path, e) : connect_tcp(c, o->host, o->port, e);
    if (rc != 0) goto fail;
    if ((rc = say_hello(c, o, e)) != 0) goto fail;
    *out = c;
    return 0;
fail:
    client_close(c);
    return rc;
}

void client_close(struct client *c) {
    if (!c) return;
    if (c->fd >= 0) close(c->fd);
    if (c->wake[0] >= 0) close(c->wake[0]);
    if (c->wake[1] >= 0) close(c->wake[1]);
    msgpack_zone_destroy(&c->zone);
    msgpack_zone_destroy(&c->hello_zone);
    strbuf_deinit(&c->in);
    strbuf_deinit(&c->hello_bytes);
    free(c);
}

const msgpack_object *client_hello(const struct client *c) {
    return &c->hello;
}
int client_refusal(const struct client *c) {
    return c->refusal;
}
double client_retry_after(const struct client *c) {
    return c->retry_after;
}
