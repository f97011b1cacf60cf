#ifndef TANDEM_SERVE_H
#define TANDEM_SERVE_H

/* The server: one libuv loop that speaks docs/protocol.md over Unix and TCP sockets in front of one
 * engine. The loop parses, enqueues and writes; the engine steps on its own thread and wakes the
 * loop.
 *
 *   open (binds) -> run (until drained) -> close
 *
 * Who may ask: a Unix socket is guarded by its file mode; a TCP listener needs `token` in `hello`,
 * but on loopback without a token configured. A client that does not read slows only itself: above
 * high_bytes unsent its sequences leave the batch, below low_bytes they go on, and one that takes
 * nothing for stall_timeout_ms, or passes hard_bytes, is closed and its requests cancelled. */

#include <stdbool.h>
#include <stddef.h>

#include "verify/verify.h"

struct engine;
struct engine_options;
struct err;
struct server;

enum { SERVE_MAX_LISTEN = 8 };

struct serve_listen {
    const char *socket_path; /* Unix socket; NULL: TCP */
    const char *host;
    int port; /* 0: any free one, see serve_address */
};

struct serve_options {
    int n_listen;
    struct serve_listen listen[SERVE_MAX_LISTEN];
    unsigned socket_mode;     /* file mode of Unix sockets, default 0600 */
    const char *token;        /* NULL: none, then TCP only on loopback */
    const char *metrics_host; /* default 127.0.0.1 */
    int metrics_port;         /* -1 (default): no metrics; 0: any free one */
    int max_connections;      /* 256 */
    int max_streams;          /* running requests of one connection, 64 */
    int hello_timeout_ms;     /* until the first good request (the first good hello where a token is
                                 needed), 10 s */
    int idle_timeout_ms;      /* without a request running or a byte coming, 1 h; 0: for ever */
    int stall_timeout_ms; /* no byte taken by a client that has some waiting, or none coming of a
                             message begun, 30 s */
    int drain_timeout_ms; /* running requests may finish after SIGTERM, 30 s */
    size_t max_message_bytes; /* 16 MiB */
    size_t high_bytes, low_bytes,
        hard_bytes;                /* unsent of one connection: 256 KiB, 64 KiB, 64 MiB */
    enum verify_coupling coupling; /* of requests that name none, default VERIFY_LOSSLESS */
    const struct engine_options
        *engine; /* what the engine was opened with, for `plan` and hello; NULL: no plan */
};
void serve_options_default(struct serve_options *o);

/* Bind all listeners and begin to listen; connections wait until serve_run. A Unix socket file that
 * nobody listens on any more is replaced, one that answers is not. E_BUSY (address in use),
 * E_TOO_LONG (socket path), E_AUTH (non-loopback TCP without a token), E_IO, E_NOT_FOUND (host),
 * E_NOMEM. The engine and the strings stay the caller's and must live until serve_close. */
int serve_open(struct server **out, struct engine *g, const struct serve_options *o, struct err *e);

/* "unix:/run/user/1000/tandem.sock", "127.0.0.1:8080", of listener idx; idx -1: metrics. "" where
 * there is none. */
const char *serve_address(const struct server *s, int idx);

/* Serve until a drain (SIGTERM, SIGINT or the method) has ended: no new connections, no new
 * requests, running ones finish or are cut at the deadline, every stream gets its `done`, every
 * byte is flushed. A second signal stops at once. An engine that failed (engine_failed) is logged
 * and drained: its requests have its error. Returns 0 after a drain, 1 where a second signal cut it
 * short or the engine failed. Ignores SIGPIPE for the process. On return every request is released;
 * close the engine next, since its thread may be about to wake this loop, and the server last. */
int serve_run(struct server *s);

/* NULL allowed. Does not touch the engine. */
void serve_close(struct server *s);

#endif
