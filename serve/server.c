/* The loop: opens, wakes, ticks, drains, closes. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/err.h"
#include "base/log.h"
#include "serve/serve_private.h"

enum {
    TICK_MS = 250,
    FLUSH_MS = 2000, /* after a drain's deadline clients have so long to take their last bytes */
};

void serve_options_default(struct serve_options *o) {
    memset(o, 0, sizeof *o);
    o->socket_mode = 0600;
    o->metrics_host = "127.0.0.1";
    o->metrics_port = -1;
    o->max_connections = 256;
    o->max_streams = 64;
    o->hello_timeout_ms = 10000;
    o->idle_timeout_ms = 3600000;
    o->stall_timeout_ms = 30000;
    o->drain_timeout_ms = 30000;
    o->max_message_bytes = 16u << 20;
    o->high_bytes = 256u << 10;
    o->low_bytes = 64u << 10;
    o->hard_bytes = 64u << 20;
}

static int check_options(const struct serve_options *o, struct err *e) {
    if (o->n_listen < 1 || o->n_listen > SERVE_MAX_LISTEN)
        return err_raise(e, E_RANGE, "%d addresses to listen on, allowed is 1 to %d", o->n_listen,
                         SERVE_MAX_LISTEN);
    if (o->token && !o->token[0]) return err_raise(e, E_INVALID, "the token is empty");
    if (o->low_bytes >= o->high_bytes || o->high_bytes >= o->hard_bytes)
        return err_raise(e, E_RANGE, "marks of unsent bytes must rise: low %zu, high %zu, hard %zu",
                         o->low_bytes, o->high_bytes, o->hard_bytes);
    if (o->max_message_bytes < 1024 || o->max_message_bytes > (size_t)1 << 30)
        return err_raise(e, E_RANGE, "largest message %zu bytes, allowed is 1 KiB to 1 GiB",
                         o->max_message_bytes);
    if (o->max_connections < 1 || o->max_streams < 1 || o->hello_timeout_ms < 1 ||
        o->stall_timeout_ms < 1 || o->drain_timeout_ms < 0 || o->idle_timeout_ms < 0)
        return err_raise(e, E_RANGE, "limits and time-outs must be positive");
    return 0;
}

/* ---- Callbacks ---- */

/* Whoever runs has its error by the engine's own means; what is left is to say good-bye. */
static void check_engine(struct server *s) {
    struct err e = {0};
    if (s->failed || engine_failed(s->engine, &e) == 0) return;
    s->failed = true;
    log_error("%s", e.message);
    server__drain(s, FLUSH_MS);
}

/* Look at every live stream: the engine sent wake. */
static void poll_streams(struct server *s) {
    check_engine(s);
    for (struct connection *c = s->connections, *next; c; c = next) {
        next = c->next;
        if (c->closing) continue;
        for (struct stream *st = c->streams, *after; st; st = after) {
            after = st->next;
            stream__poll(st);
        }
        /* Its last answer: a draining server says good-bye. */
        if (s->draining && !c->streams && !c->prompt) connection__finish(c);
        connection__settle(c);
    }
}

static void on_wake(uv_async_t *h) {
    poll_streams(h->data);
}

static void on_tick(uv_timer_t *h) {
    struct server *s = h->data;
    check_engine(s);
    for (struct connection *c = s->connections, *next; c; c = next) {
        next = c->next;
        connection__tick(c);
    }
}

static void on_connection(uv_stream_t *stream, int status) {
    if (status < 0) log_debug("accept: %s", uv_strerror(status));
    else connection__accept(stream->data);
}

/* ---- Drain ---- */

void server__check_done(struct server *s) {
    if (!s->draining || s->connections) return;
    s->stopped = true;
    uv_stop(&s->loop);
}

static void close_all(struct server *s, const char *why) {
    for (struct connection *c = s->connections; c; c = c->next) {
        connection__doom(c, why);
        connection__close(c);
    }
}

static void on_flush_deadline(uv_timer_t *h) {
    close_all(h->data, "did not take its end in time");
}

/* Time is up: what runs is cut, each stream still gets its `done`. */
static void on_deadline(uv_timer_t *h) {
    struct server *s = h->data;
    int n = 0;
    for (struct connection *c = s->connections; c; c = c->next)
        for (struct stream *st = c->streams; st; st = st->next, n++) {
            st->aborted = true;
            engine_cancel(s->engine, st->request);
        }
    if (n > 0) log_info("drain: %d requests cut at the deadline", n);
    uv_timer_start(&s->deadline, on_flush_deadline, FLUSH_MS, 0);
    poll_streams(s);
}

void server__drain(struct server *s, int timeout_ms) {
    if (s->draining) return;
    s->draining = true;
    int n = 0;
    for (struct connection *c = s->connections; c; c = c->next) n += c->n_streams;
    log_info("draining: %d requests running, %d connections, at most %d ms", n, s->n_connections,
             timeout_ms);
    engine_drain(s->engine);
    for (int i = 0; i < s->options.n_listen; i++) listen__close(&s->listeners[i]);
    uv_timer_start(&s->deadline, on_deadline, (uint64_t)timeout_ms, 0);
    /* The connections without a request are finished at the next look, so that the one that asked
     * for this has its answer first. */
    uv_async_send(&s->wake);
    server__check_done(s);
}

static void on_signal(uv_signal_t *h, int signum) {
    struct server *s = h->data;
    (void)signum;
    if (!s->draining) {
        server__drain(s, s->options.drain_timeout_ms);
        return;
    }
    log_info("second signal: stopping at once");
    s->cut = true;
    close_all(s, "stopped");
    s->stopped = true;
    uv_stop(&s->loop);
}

/* ---- Life ---- */

static int start_handles(struct server *s) {
    int rc;
    s->wake.data = s->tick.data = s->deadline.data = s->sigterm.data = s->sigint.data = s;
    if ((rc = uv_async_init(&s->loop, &s->wake, on_wake)) < 0) return rc;
    if ((rc = uv_timer_init(&s->loop, &s->tick)) < 0) return rc;
    if ((rc = uv_timer_init(&s->loop, &s->deadline)) < 0) return rc;
    if ((rc = uv_signal_init(&s->loop, &s->sigterm)) < 0) return rc;
    if ((rc = uv_signal_init(&s->loop, &s->sigint)) < 0) return rc;
    if ((rc = uv_signal_start(&s->sigterm, on_signal, SIGTERM)) < 0) return rc;
    if ((rc = uv_signal_start(&s->sigint, on_signal, SIGINT)) < 0) return rc;
    return uv_timer_start(&s->tick, on_tick, TICK_MS, TICK_MS);
}

/* Seconds; the last bucket is +inf. */
static const double delivery_bounds[ENGINE_N_BUCKETS] = {2e-5, 3e-5, 5e-5, 7.5e-5,  1e-4, 1.5e-4,
                                                         2e-4, 3e-4, 5e-4, 1e-3,    2e-3, 5e-3,
                                                         .01,  .05,  .25,  INFINITY};

int serve_open(struct server **out, struct engine *g, const struct serve_options *o,
               struct err *e) {
    *out = NULL;
    int rc = check_options(o, e);
    if (rc != 0) return rc;
    struct server *s = calloc(1, sizeof *s);
    if (!s) return err_raise(e, E_NOMEM, "no memory for the server");
    s->engine = g;
    s->options = *o;
    memcpy(s->counters.delivery.bound, delivery_bounds, sizeof delivery_bounds);
    if (getrandom(&s->salt_seed, sizeof s->salt_seed, 0) != sizeof s->salt_seed) {
        rc = err_raise(e, E_IO, "no random bytes from the system");
        goto fail;
    }
    if ((rc = uv_loop_init(&s->loop)) < 0) {
        rc = err_raise(e, E_NOMEM, "event loop: %s", uv_strerror(rc));
        goto fail;
    }
    s->loop_ready = true;
    if ((rc = start_handles(s)) < 0) {
        rc = err_raise(e, E_NOMEM, "event loop: %s", uv_strerror(rc));
        goto fail;
    }
    for (int i = 0; i < o->n_listen; i++)
        if ((rc = listen__open(&s->listeners[i], s, &o->listen[i], on_connection, e)) != 0)
            goto fail;
    if (o->metrics_port >= 0) {
        struct serve_listen at = {.host = o->metrics_host, .port = o->metrics_port};
        if ((rc = listen__open(&s->metrics, s, &at, metrics__accept, e)) != 0) {
            err_prefix(e, rc, "metrics");
            goto fail;
        }
    }
    *out = s;
    return 0;
fail:
    serve_close(s);
    return rc;
}

const char *serve_address(const struct server *s, int idx) {
    if (idx == -1) return s->metrics.address;
    return idx >= 0 && idx < s->options.n_listen ? s->listeners[idx].address : "";
}

int serve_run(struct server *s) {
    signal(SIGPIPE, SIG_IGN);
    while (!s->stopped) uv_run(&s->loop, UV_RUN_DEFAULT);
    /* Threads that still encode a prompt use the engine's tokenizer. */
    while (s->n_prompts > 0) uv_run(&s->loop, UV_RUN_ONCE);
    return s->cut || s->failed ? 1 : 0;
}

static void close_handle(uv_handle_t *h, void *arg) {
    (void)arg;
    if (!uv_is_closing(h)) uv_close(h, NULL);
}

void serve_close(struct server *s) {
    if (!s) return;
    if (s->loop_ready) {
        close_all(s, "server closed");
        metrics__close_all(s);
        for (int i = 0; i < s->options.n_listen; i++) listen__close(&s->listeners[i]);
        listen__close(&s->metrics);
        uv_walk(&s->loop, close_handle, NULL);
        uv_run(&s->loop, UV_RUN_DEFAULT);
        ASSERT(uv_loop_close(&s->loop) == 0);
    }
    free(s);
}
