#ifndef TANDEM_TESTS_PEER_H
#define TANDEM_TESTS_PEER_H

/* A server on a fake engine in a process of its own, and a raw client for it: messages are written
 * and compared as text like [0,1,'generate',['hi',{'max_tokens':3}]]. */

#include <msgpack.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/strbuf.h"
#include "serve/serve.h"

/* ---- Server ---- */

struct spawned {
    pid_t pid;
    char folder[64], socket[96];
    char address[4][160]; /* of the listeners; [3]: metrics */
    int tcp_port, metrics_port;
};

/* The Unix socket is listener 0; change `o` (from peer_options) as a test needs. */
void peer_options(struct serve_options *o);
void spawn_server(struct spawned *s, struct serve_options *o, int step_us, int run);
/* Wait for its end and give its exit code (a signal is 1000 + number). */
int spawned_wait(struct spawned *s, int timeout_ms);
/* SIGTERM, wait, assert exit 0 (leak checkers speak there). */
void spawned_stop(struct spawned *s);

/* ---- Client ---- */

struct peer {
    int fd;
    struct strbuf in;
    msgpack_zone zone;
    size_t n_message;
    char text[1 << 16]; /* last message printed */
};

void peer_open(struct peer *p, const struct spawned *s);
void peer_open_tcp(struct peer *p, int port);
void peer_close(struct peer *p);

/* A server with the usual options and one client; its end (spawned_stop) after the client's. */
void peer_start(struct spawned *s, struct peer *p, int step_us, int run);
void peer_stop(struct spawned *s, struct peer *p);

/* Text to MessagePack: nil true false numbers 'str' [..] {k:v}; h'ff' is bin. */
void pack_text(struct strbuf *out, const char *text);

void peer_send(struct peer *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void peer_send_bytes(struct peer *p, const void *bytes, size_t n);
/* The next message within 5 s; *out lives until the next. False: the server closed. */
bool peer_recv(struct peer *p, msgpack_object *out);
/* The next message must print as `want` ("%" stands for any run of characters). */
void peer_expect(struct peer *p, const char *want);
/* Nothing more must come within ms. */
void peer_expect_silence(struct peer *p, int ms);
/* The server must close within ms, sending nothing more. */
void peer_expect_closed(struct peer *p, int ms);

/* Collect stream `id` until its done: text (caller's), number of notifications; the done's map. */
void peer_collect(struct peer *p, int id, struct strbuf *text, int *n_notifications,
                  msgpack_object *done);

long long peer_stat(struct peer *p, const char *name); /* stats' integer `name` */
long long map_int(const msgpack_object *map, const char *key);
const msgpack_object *map_get(const msgpack_object *map, const char *key);

#endif
