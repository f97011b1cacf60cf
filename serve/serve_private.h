#ifndef TANDEM_SERVE_PRIVATE_H
#define TANDEM_SERVE_PRIVATE_H

/* What server.c, listen.c, connection.c, stream.c, methods.c, params.c and metrics.c share. All of
 * it is touched by the loop's thread alone, but for server.wake, which the engine's step thread
 * sends.
 *
 * Life of a connection: accepted -> (callbacks) -> doomed or finishing -> closed -> freed in its
 * close callback. Callbacks never close in the middle of their work: they doom (at once, unsent
 * bytes are lost) or finish (after what is queued was sent), and connection_settle() at the
 * callback's end acts on it. */

#include <msgpack.h>
#include <uv.h>

#include "base/strbuf.h"
#include "engine/engine.h"
#include "serve/rpc.h"
#include "serve/scan.h"
#include "serve/serve.h"

struct connection;
struct http_client;
struct prompt;

/* ---- Streams: one running request each ---- */

struct stream {
    struct stream *next;
    struct connection *connection;
    uint32_t id;    /* of the stream; 0: unary */
    uint32_t msgid; /* of the request */
    bool unary;
    bool cancelled; /* by a cancel request: no more tokens are shown */
    bool aborted;   /* by a drain's deadline */
    bool paused;    /* engine_pause is on */
    struct engine_request *request;
    struct verify_params params; /* the text's stop strings */
    struct verify_text text;
    int n_seen;           /* tokens turned into text */
    int n_sent;           /* tokens in notifications so far */
    bool show_drafted;    /* say of each token whether it was drafted, and its bytes of text */
    uint32_t seq;         /* of the next notification */
    struct strbuf unsent; /* text not in a notification yet (unary: all of it) */
    struct strbuf pieces; /* show_drafted: u32 each, bytes of `unsent` that a token brought */
};

/* ---- Connections ---- */

struct connection {
    struct connection *prev, *next;
    struct server *server;
    union {
        uv_handle_t handle;
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } uv;
    uv_shutdown_t shutdown;
    uint64_t number; /* for the log */
    bool tcp, needs_token;
    bool authorised; /* token shown, or none needed */
    bool greeted;    /* the hello time-out is over */
    bool reading, paused, finishing, shut, closing;
    const char *doom; /* why it must close, NULL */

    struct scan scan;
    struct strbuf in; /* received; [0, scanned) was looked at */
    size_t scanned;
    struct strbuf out; /* packed in this callback, not handed to libuv yet */
    int64_t commit_ns; /* when the oldest of the tokens in `out` was committed; 0: none is there */
    msgpack_packer pk; /* onto out */

    struct stream *streams;
    int n_streams;
    uint32_t next_stream_id;
    struct prompt *prompt; /* being turned into tokens on another thread: its requests wait */

    uint64_t submitted_bytes; /* handed to libuv in all */
    uint64_t taken_bytes;     /* of these, taken by the kernel when last looked */
    uint64_t taken_ms;        /* loop time when taken_bytes last changed */
    uint64_t heard_ms;        /* loop time of the last byte received */
    uint64_t opened_ms;
    uint64_t shut_ms; /* our side is closed since; 0: it is not */
};

/* ---- The server ---- */

struct listener {
    union {
        uv_handle_t handle;
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } uv;
    struct server *server;
    bool open, tcp, needs_token;
    char address[160];
    const char *path; /* Unix: to unlink, if it is still ours */
    unsigned long long dev, ino;
};

struct server_counters {
    uint64_t n_accepted, n_refused, n_bad_frames, n_bad_requests, n_unauthorised, n_stalled,
        n_timed_out;
    uint64_t n_requests, n_paused, bytes_in, bytes_out;
    struct engine_histogram delivery; /* from a token's commit until the kernel has its bytes; only
                                         those of clients that keep up */
};

struct server {
    uv_loop_t loop;
    bool loop_ready;
    struct engine *engine;
    struct serve_options options;
    uv_async_t wake; /* sent by the engine's step thread */
    uv_timer_t tick;
    uv_timer_t deadline; /* of a drain */
    uv_signal_t sigterm, sigint;
    struct listener listeners[SERVE_MAX_LISTEN];
    struct listener metrics;
    struct connection *connections;
    int n_connections;
    struct http_client *http_clients;
    int n_http_clients;
    bool draining, cut, stopped;
    bool failed;        /* the engine can compute no more */
    uint64_t salt_seed; /* cache_salt strings become numbers with it */
    uint64_t next_number;
    int n_prompts;        /* on other threads */
    size_t longest_token; /* bytes; 0: not looked for yet */
    struct server_counters counters;
    char read_buffer[65536]; /* lent to one read callback at a time */
};

/* server.c */
void server__drain(struct server *s, int timeout_ms);
void server__check_done(struct server *s);

/* listen.c */
int listen__open(struct listener *l, struct server *s, const struct serve_listen *where,
                 uv_connection_cb on_connection, struct err *e);
void listen__close(struct listener *l);

/* connection.c */
void connection__accept(struct listener *l);
/* Must close: at the callback's end (doom), or when all is sent (finish). */
void connection__doom(struct connection *c, const char *why);
void connection__finish(struct connection *c);
/* End of a callback: hand c->out to libuv, set or lift the pressure, close if doomed. The
 * connection may be gone afterwards in the sense that c->closing is set; it is freed only by the
 * loop. */
void connection__settle(struct connection *c);
/* Nothing is waiting in libuv's queue: a notification sent now goes out now. */
bool connection__ready(const struct connection *c);
void connection__tick(struct connection *c);
void connection__close(struct connection *c);

/* Answers, packed onto c->out. */
msgpack_packer *connection__result(struct connection *c, uint32_t id);
void connection__error(struct connection *c, uint32_t id, enum rpc_code code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The same with n_data packed pairs of `data`. */
void connection__error_data(struct connection *c, uint32_t id, enum rpc_code code,
                            const char *message, const struct strbuf *data, int n_data);

/* stream.c */
struct request_options;
/* Submit `prompt`, add the stream, answer [stream id] unless unary; errors are answered too. */
void stream__start(struct connection *c, uint32_t msgid, const struct request_options *o,
                   const int32_t *prompt, int n_prompt);
/* News of the engine: turn tokens into text, send what may be sent. May end and free the stream. */
void stream__poll(struct stream *st);
/* Send what was held back while the queue was full. */
void stream__flush(struct stream *st);
void stream__pause(struct stream *st, bool paused);
void stream__cancel(struct stream *st);
void stream__free(struct stream *st); /* unlinks, cancels, releases */
size_t stream__unsent_bytes(const struct stream *st);

/* methods.c */
void methods__call(struct connection *c, const struct rpc_message *m);
/* Answer with e's code and text; `param` (may be NULL) names the parameter that was wrong. */
void methods__invalid(struct connection *c, uint32_t id, const char *param, const struct err *e);

/* prompt.c: from text to tokens, then to a stream (generate, chat) or an answer (tokenize). A long
 * text is encoded on a thread of libuv's pool; the connection's later requests wait meanwhile, so
 * that one connection never holds more than one. All of these answer errors themselves. */
enum prompt_kind { PROMPT_GENERATE, PROMPT_CHAT, PROMPT_TOKENIZE };
void prompt__text(struct connection *c, uint32_t msgid, enum prompt_kind kind,
                  const struct request_options *o, const char *text, size_t n);
void prompt__messages(struct connection *c, uint32_t msgid, const struct request_options *o,
                      const msgpack_object *messages);
void prompt__start(struct connection *c, uint32_t msgid, const struct request_options *o,
                   const int32_t *ids, size_t n);
/* The connection closes: its prompt's result will be dropped. */
void prompt__forget(struct connection *c);

/* params.c: what the options map of generate and chat may hold. */
struct request_options {
    struct verify_params verify;
    struct target_settings sparse;
    bool stream, prefix_cache, skip_special_tokens;
    bool add_special, parse_special; /* generate */
    bool add_generation_prompt;      /* chat */
    bool drafted;                    /* tell the tokens that were drafted */
    uint64_t salt;
    uint64_t conversation; /* 0: nobody's, where has_conversation; else the connection's */
    bool has_conversation;
};

enum param_kind {
    PARAM_BOOL,
    PARAM_INT,
    PARAM_REAL,
    PARAM_BELOW, /* a PARAM_REAL below hi */
    PARAM_SIZE,
    PARAM_SEED,
    PARAM_STOP,
    PARAM_SALT,
    PARAM_CONVERSATION,
    PARAM_DRAFT_TOKENS,
    PARAM_COUPLING,
    PARAM_SPARSE,
    PARAM_LISTS,
    PARAM_KEEP,
    PARAM_THRESHOLD,
    PARAM_RESELECT,
    PARAM_RESELECTOR,
    PARAM_RECHECK,
    PARAM_EXACT,
    PARAM_PREFILL,
    PARAM_LOGPROBS,
    PARAM_ONE,
    PARAM_TEXT
};
struct param {
    const char *name;
    enum param_kind kind;
    size_t offset; /* of the field in the struct that is filled */
    double lo, hi; /* PARAM_INT, PARAM_REAL, PARAM_SIZE: inclusive but PARAM_BELOW's hi */
    bool above_lo; /* lo itself is not allowed */
};
/* Fill the fields that `map` (a map or nil) names. E_INVALID, E_RANGE with name and value; *bad
 * gets the name where it is one of the table. Keys that begin with "x_" are ignored. */
int params__read(const struct param *table, void *out, const msgpack_object *map,
                 uint64_t salt_seed, const char **bad, struct err *e);
void params__defaults(struct request_options *o);
/* The conversation of a connection's requests that name none. */
uint64_t params__conversation_of(uint64_t connection, uint64_t salt_seed);
extern const struct param params__generate[], params__chat[];

/* A str or bin that a PARAM_TEXT field points to; lives as long as the request's message. */
struct param_text {
    const char *s; /* NULL: not given */
    size_t n;
};

/* metrics.c */
void metrics__accept(uv_stream_t *listener, int status);
void metrics__close_all(struct server *s);

/* describe.c: the results of hello, stats, memory, plan, models */
void describe__hello(struct connection *c, msgpack_packer *pk);
void describe__stats(struct server *s, msgpack_packer *pk);
void describe__memory(struct server *s, msgpack_packer *pk);
void describe__models(struct server *s, msgpack_packer *pk);
void describe__plan(const struct plan *p, msgpack_packer *pk);
/* A map of what sparse reading did for one request. */
void describe__sparsity(const struct engine_sparsity *s, msgpack_packer *pk);
/* A map of what speculation did, of one request or of all; no_draft: see engine.h. */
void describe__speculation(const struct engine_speculation *s, enum engine_no_draft no_draft,
                           msgpack_packer *pk);

#endif
