/* One client: bytes in, bytes out, and when to stop listening to it.
 *
 * In: reads are appended to c->in and scanned once; each whole message is unpacked into a zone of
 * its own, dispatched, dropped. Out: answers and notifications of one callback are packed onto
 * c->out and handed over together: first by uv_try_write (no allocation while the client keeps up),
 * the rest queued. While anything is queued, token notifications are not made: tokens gather in
 * their streams (stream.c) and leave as one notification when the queue is empty. What waits for a
 * client is the queue and what the streams hold; that sum meets the marks. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"
#include "serve/serve_private.h"

enum {
    KEEPALIVE_SECONDS = 60,
    MESSAGE_CHARS = 1000,
    LINGER_MS = 1000,        /* after our last byte a client may take so long to close, too */
    KEPT_BYTES = 256 * 1024, /* of a buffer that is empty again */
};

/* A write that libuv holds; the bytes lie behind it. */
struct pending_write {
    uv_write_t req;
    char *data;
};

/* ---- Closing ---- */

void connection__doom(struct connection *c, const char *why) {
    if (!c->doom) c->doom = why;
}

void connection__finish(struct connection *c) {
    c->finishing = true;
}

static void on_closed(uv_handle_t *handle) {
    struct connection *c = handle->data;
    struct server *s = c->server;
    if (c->prev) c->prev->next = c->next;
    else s->connections = c->next;
    if (c->next) c->next->prev = c->prev;
    s->n_connections--;
    strbuf_deinit(&c->in);
    strbuf_deinit(&c->out);
    free(c);
    server__check_done(s);
}

void connection__close(struct connection *c) {
    if (c->closing) return;
    c->closing = true;
    log_debug("connection %llu closed: %s", (unsigned long long)c->number,
              c->doom ? c->doom : "finished");
    while (c->streams) stream__free(c->streams);
    prompt__forget(c);
    uv_close(&c->uv.handle, on_closed);
}

/* ---- Out ---- */

/* An empty buffer that once held something large gives it back. */
static void trim(struct strbuf *b) {
    if (b->n > 0 || b->cap <= KEPT_BYTES) return;
    size_t limit = b->limit;
    strbuf_deinit(b);
    b->limit = limit;
}

static size_t queued_bytes(const struct connection *c) {
    return uv_stream_get_write_queue_size(&c->uv.stream);
}

bool connection__ready(const struct connection *c) {
    return queued_bytes(c) == 0;
}

static size_t waiting_bytes(const struct connection *c) {
    size_t n = queued_bytes(c) + c->out.n;
    for (const struct stream *st = c->streams; st; st = st->next)
        if (!st->unary) n += stream__unsent_bytes(st);
    return n;
}

static void on_written(uv_write_t *req, int status) {
    struct pending_write *w = (struct pending_write *)req;
    struct connection *c = req->handle->data;
    free(w->data);
    free(w);
    if (c->closing) return;
    if (status < 0) connection__doom(c, uv_strerror(status));
    connection__settle(c);
}

/* Hand c->out over. Its memory moves to the write when libuv cannot take all of it at once. */
static void hand_over(struct connection *c) {
    if (c->out.failed) {
        connection__doom(c, "no memory for its answers");
        return;
    }
    if (c->out.n == 0) return;
    size_t n = c->out.n, done = 0;
    int64_t commit_ns = c->commit_ns;
    c->commit_ns = 0;
    c->submitted_bytes += n;
    c->server->counters.bytes_out += n;
    if (queued_bytes(c) == 0) {
        uv_buf_t buf = uv_buf_init(c->out.data, (unsigned)n);
        int rc = uv_try_write(&c->uv.stream, &buf, 1);
        if (rc < 0 && rc != UV_EAGAIN) {
            connection__doom(c, uv_strerror(rc));
            return;
        }
        if (rc > 0) done = (size_t)rc;
    }
    if (done == n) {
        if (commit_ns)
            engine_histogram_add(&c->server->counters.delivery,
                                 (double)(clock_ns() - commit_ns) / 1e9);
        strbuf_clear(&c->out);
        trim(&c->out);
        return;
    }
    struct pending_write *w = malloc(sizeof *w);
    if (!w) {
        connection__doom(c, "no memory for its answers");
        return;
    }
    w->data = c->out.data;
    memset(&c->out, 0, sizeof c->out);
    c->out.limit = c->server->options.hard_bytes * 2;
    uv_buf_t buf = uv_buf_init(w->data + done, (unsigned)(n - done));
    int rc = uv_write(&w->req, &c->uv.stream, &buf, 1, on_written);
    if (rc < 0) {
        free(w->data);
        free(w);
        connection__doom(c, uv_strerror(rc));
    }
}

/* All was sent. Closing now, with bytes of the client unread, could make the kernel drop what it
 * has not read: wait for its end of file, for a moment. */
static void on_shutdown(uv_shutdown_t *req, int status) {
    struct connection *c = req->handle->data;
    if (c->closing) return;
    c->shut_ms = uv_now(&c->server->loop);
    if (status < 0) connection__close(c);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf);

static void on_alloc(uv_handle_t *handle, size_t hint, uv_buf_t *buf) {
    struct server *s = ((struct connection *)handle->data)->server;
    (void)hint;
    *buf = uv_buf_init(s->read_buffer, sizeof s->read_buffer);
}

static void read_from(struct connection *c, bool on) {
    if (on == c->reading) return;
    c->reading = on;
    if (!on) uv_read_stop(&c->uv.stream);
    else if (uv_read_start(&c->uv.stream, on_alloc, on_read) < 0)
        connection__doom(c, "cannot read");
}

/* Above the high mark its requests and tokens wait; below the low one they go on. A closed peer is
 * still noticed while we do not read: what is queued fails, or stalls. */
static void press(struct connection *c) {
    const struct serve_options *o = &c->server->options;
    size_t n = waiting_bytes(c);
    if (queued_bytes(c) > o->hard_bytes) {
        c->server->counters.n_stalled++;
        connection__doom(c, "too much unsent");
        return;
    }
    bool paused = c->paused ? n > o->low_bytes : n > o->high_bytes;
    if (paused != c->paused) {
        c->paused = paused;
        if (paused) c->server->counters.n_paused++;
        log_debug("connection %llu %s with %zu bytes unsent", (unsigned long long)c->number,
                  paused ? "paused" : "goes on", n);
        for (struct stream *st = c->streams; st; st = st->next) stream__pause(st, paused);
    }
    read_from(c, (!paused && !c->prompt) || c->finishing);
}

/* Take the requests that are in c->in. */
static void process(struct connection *c);

void connection__settle(struct connection *c) {
    while (!c->closing) {
        if (!c->doom && connection__ready(c))
            for (struct stream *st = c->streams; st; st = st->next) stream__flush(st);
        if (!c->doom) hand_over(c);
        if (!c->doom) press(c);
        if (c->doom) {
            connection__close(c);
            return;
        }
        /* Requests that came while it was paused. */
        if (c->paused || c->prompt || c->finishing || c->scanned == c->in.n) break;
        process(c);
    }
    if (c->finishing && !c->shut && !c->closing && queued_bytes(c) == 0) {
        c->shut = true;
        if (uv_shutdown(&c->shutdown, &c->uv.stream, on_shutdown) < 0) connection__close(c);
    }
}

/* ---- In ---- */

static void count_bad_frame(struct connection *c, const char *text) {
    c->server->counters.n_bad_frames++;
    log_info("connection %llu: %s; closed", (unsigned long long)c->number, text);
}

/* Beyond repair: answer if the request's id can still be read, then close. */
static void refuse_frame(struct connection *c, const char *text) {
    uint32_t id;
    count_bad_frame(c, text);
    c->finishing = true;
    while (c->streams) stream__free(c->streams);
    if (rpc_peek_id((const uint8_t *)c->in.data, c->in.n, &id))
        connection__error(c, id, RPC_PARSE, "%s", text);
}

static void take_message(struct connection *c, const char *bytes, size_t n) {
    msgpack_zone zone;
    msgpack_object o;
    struct rpc_message m;
    struct err e = {0};
    if (!msgpack_zone_init(&zone, 4096)) {
        connection__doom(c, "no memory for a message");
        return;
    }
    if (rpc_unpack(&zone, &o, bytes, n, &e) != 0) {
        refuse_frame(c, e.message);
    } else {
        switch (rpc_read(&m, &o, &e)) {
        case RPC_GOOD:
            methods__call(c, &m);
            break;
        case RPC_ANSWER:
            c->server->counters.n_bad_requests++;
            connection__error(c, m.id, RPC_INVALID_REQUEST, "%s", e.message);
            break;
        case RPC_CLOSE:
            /* Never through the id: this may be a response, and those are not answered. */
            count_bad_frame(c, e.message);
            c->finishing = true;
            while (c->streams) stream__free(c->streams);
            break;
        }
    }
    msgpack_zone_destroy(&zone);
}

static void process(struct connection *c) {
    size_t begin = 0; /* of the message in hand */
    while (!c->doom && !c->finishing && c->scanned < c->in.n) {
        /* Answers that pile up within one read count too. */
        if (c->paused || c->prompt || waiting_bytes(c) > c->server->options.high_bytes) break;
        size_t used;
        enum scan_result r = scan_feed(&c->scan, (const uint8_t *)c->in.data + c->scanned,
                                       c->in.n - c->scanned, &used);
        c->scanned += used;
        if (r == SCAN_REFUSED) {
            strbuf_consume(&c->in, begin);
            refuse_frame(c, scan_error_text(c->scan.error));
            return;
        }
        if (r == SCAN_NEED_MORE) break;
        take_message(c, c->in.data + begin, c->scanned - begin);
        begin = c->scanned;
    }
    strbuf_consume(&c->in, begin);
    c->scanned -= begin;
    trim(&c->in);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
    struct connection *c = stream->data;
    struct server *s = c->server;
    if (c->closing) return;
    if (n < 0) {
        connection__doom(c, n == UV_EOF ? "client left" : uv_strerror((int)n));
    } else if (n > 0 && !c->finishing) {
        s->counters.bytes_in += (uint64_t)n;
        c->heard_ms = uv_now(&s->loop);
        strbuf_append(&c->in, buf->base, (size_t)n);
        if (c->in.failed) connection__doom(c, "no memory for its requests");
        else process(c);
    }
    connection__settle(c);
}

/* ---- Time ---- */

void connection__tick(struct connection *c) {
    const struct serve_options *o = &c->server->options;
    uint64_t now = uv_now(&c->server->loop);
    if (c->closing) return;
    uint64_t taken = c->submitted_bytes - queued_bytes(c);
    if (taken != c->taken_bytes || queued_bytes(c) == 0) {
        c->taken_bytes = taken;
        c->taken_ms = now;
    }
    const char *why = NULL;
    if (now - c->taken_ms > (uint64_t)o->stall_timeout_ms) {
        why = "does not read";
        c->server->counters.n_stalled++;
    } else if (!c->greeted && now - c->opened_ms > (uint64_t)o->hello_timeout_ms) {
        why = "no hello in time";
    } else if (c->reading && c->in.n > 0 && now - c->heard_ms > (uint64_t)o->stall_timeout_ms) {
        why = "a message without its end";
    } else if (c->shut_ms && now - c->shut_ms > LINGER_MS) {
        connection__doom(c, "finished");
    } else if (o->idle_timeout_ms > 0 && !c->streams && !c->prompt &&
               now - c->heard_ms > (uint64_t)o->idle_timeout_ms) {
        why = "idle";
    }
    if (why) {
        c->server->counters.n_timed_out++;
        connection__doom(c, why);
    }
    connection__settle(c);
}

/* ---- Opening ---- */

void connection__accept(struct listener *l) {
    struct server *s = l->server;
    struct connection *c = calloc(1, sizeof *c);
    if (!c) {
        log_error("no memory for a connection");
        return;
    }
    c->server = s;
    c->number = ++s->next_number;
    int rc = l->tcp ? uv_tcp_init(&s->loop, &c->uv.tcp) : uv_pipe_init(&s->loop, &c->uv.pipe, 0);
    if (rc < 0) {
        free(c);
        return;
    }
    c->uv.handle.data = c;
    c->tcp = l->tcp;
    c->needs_token = l->needs_token;
    c->authorised = !l->needs_token;
    c->opened_ms = c->heard_ms = c->taken_ms = uv_now(&s->loop);
    c->in.limit = s->options.max_message_bytes + sizeof s->read_buffer;
    c->out.limit = s->options.hard_bytes * 2;
    scan_init(&c->scan, &(struct scan_limits){.max_bytes = s->options.max_message_bytes,
                                              .max_nodes = 1u << 20});
    c->next = s->connections;
    if (c->next) c->next->prev = c;
    s->connections = c;
    s->n_connections++;
    s->counters.n_accepted++;
    if (uv_accept(&l->uv.stream, &c->uv.stream) < 0) {
        connection__doom(c, "accept failed");
    } else if (s->n_connections > s->options.max_connections) {
        s->counters.n_refused++;
        connection__doom(c, "too many connections");
    } else if (s->draining) {
        connection__doom(c, "draining");
    } else if (c->tcp) {
        uv_tcp_nodelay(&c->uv.tcp, 1);
        uv_tcp_keepalive(&c->uv.tcp, 1, KEEPALIVE_SECONDS);
    }
    log_debug("connection %llu on %s", (unsigned long long)c->number, l->address);
    connection__settle(c);
}

/* ---- Answers ---- */

msgpack_packer *connection__result(struct connection *c, uint32_t id) {
    rpc_packer(&c->pk, &c->out);
    rpc_pack_result_head(&c->pk, id);
    return &c->pk;
}

void connection__error_data(struct connection *c, uint32_t id, enum rpc_code code,
                            const char *message, const struct strbuf *data, int n_data) {
    rpc_packer(&c->pk, &c->out);
    rpc_pack_error_response(&c->pk, id, code, message, data, n_data);
}

void connection__error(struct connection *c, uint32_t id, enum rpc_code code, const char *fmt,
                       ...) {
    char message[MESSAGE_CHARS];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    connection__error_data(c, id, code, message, NULL, 0);
}
