#ifndef TANDEM_SERVE_CLIENT_H
#define TANDEM_SERVE_CLIENT_H

/* A client of docs/protocol.md for one thread: connect, ask, read a stream. Plain sockets and
 * poll(), no event loop. Only client_interrupt() may be called from elsewhere.
 *
 *   open (hello is said) -> call / generate / chat ... -> close */

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"

struct err;
struct client;

struct client_options {
    const char *socket_path; /* Unix socket; NULL: TCP */
    const char *host;
    int port;
    const char *token; /* NULL: none */
    const char *name;  /* told to the server; NULL: "tandem" */
    int timeout_ms;    /* for connecting and for each answer; 0: 30 s. A stream may run longer. */
};

/* Connect and say hello. E_NOT_FOUND (no such socket or host), E_CLOSED (nobody listens there),
 * E_TIMEOUT, E_AUTH, E_PROTOCOL (no tandem server), E_TOO_LONG (socket path). */
int client_open(struct client **out, const struct client_options *o, struct err *e);

/* NULL allowed. The server cancels what still runs. */
void client_close(struct client *c);

/* What hello answered: a map, the client's. */
const msgpack_object *client_hello(const struct client *c);

/* Code of the protocol (enum rpc_code) of the last refusal by the server; 0: it refused nothing. */
int client_refusal(const struct client *c);
/* Seconds after which that refusal may be over; 0: the server did not say. */
double client_retry_after(const struct client *c);

/* Options of a request, packed as they are set; the server checks them. Zero it first. */
struct client_settings {
    struct strbuf packed;
    int n;
};
void client_set_int(struct client_settings *s, const char *name, int64_t value);
void client_set_seed(struct client_settings *s, uint64_t value);
void client_set_real(struct client_settings *s, const char *name, double value);
void client_set_bool(struct client_settings *s, const char *name, bool value);
void client_set_text(struct client_settings *s, const char *name, const char *value, size_t n);
void client_set_texts(struct client_settings *s, const char *name, const char *const *values,
                      int n);
void client_settings_deinit(struct client_settings *s);

/* Call `method` with n_params packed values and, where `settings` is not NULL, a map behind them.
 * *result lives until the next use of the client. E_TIMEOUT, E_CLOSED, E_PROTOCOL; a refusal
 * becomes the nearest E_ code with the server's text. */
int client_call(struct client *c, const char *method, const struct strbuf *params, int n_params,
                const struct client_settings *settings, msgpack_object *result, struct err *e);

/* Text that may be shown now, and its tokens: one notification, or, where the setting "drafted" is
 * true, a run of one that holds accepted draft tokens alone or the target's own alone. */
struct client_piece {
    const char *text; /* not terminated, may be empty: held back until it is clear */
    size_t n;
    int n_tokens;
    bool drafted;
};
typedef void client_tokens_fn(void *arg, const struct client_piece *piece);

enum { CLIENT_MAX_PLACES = 64 };
/* What speculation did, of one answer or (from `stats`) of all; see docs/protocol.md. */
struct client_speculation {
    int64_t rounds, plain_rounds, drafted, accepted, lookup_drafted, lookup_accepted;
    int64_t page_rollbacks;
    int n_places; /* of a round */
    int64_t drafted_at[CLIENT_MAX_PLACES], accepted_at[CLIENT_MAX_PLACES];
    double draft_ms, verify_ms;
    char no_draft[64]; /* why there was no draft, "" where there was */
};
/* From the map that `done` and `stats` carry under "speculation"; NULL or another type: all zero.
 */
void client_read_speculation(struct client_speculation *out, const msgpack_object *map);

/* What sparse reading did for one answer. */
struct client_sparsity {
    char selector[24]; /* "" where the server says nothing of it */
    int64_t selections, wide, blocks, kept, first_kept, cut, dropped;
    int64_t n_lists, n_union; /* of the newest selection; blocks that one of its lists holds */
    double select_ms;
    int64_t kv_shallow_bytes, kv_deep_bytes, kv_dense_bytes;
    int64_t
        exact; /* most provisional tokens, 0: not exact; dense passes, what they verified, ... */
    int64_t prefill_selections, prefill_bytes, prefill_dense_bytes; /* of the prompt's chunks */
    int64_t exact_passes, exact_provisional, exact_accepted, exact_tokens;
};

/* How a stream ended. */
struct client_done {
    char finish_reason[24]; /* "stop", "length", "cancelled", "error", "aborted" */
    char error[256];        /* with "error" */
    int64_t prompt_tokens, completion_tokens, cached_tokens;
    double queue_ms, ttft_ms, decode_ms, total_ms, tokens_per_second; /* 0: not told */
    uint64_t seed;
    int n_notifications;
    struct client_speculation speculation;
    struct client_sparsity sparsity;
};

/* Ask and read the whole stream. A stream that was cancelled or failed is no error here: see
 * finish_reason. */
int client_generate(struct client *c, const char *prompt, size_t n,
                    const struct client_settings *settings, client_tokens_fn *on_tokens, void *arg,
                    struct client_done *done, struct err *e);

struct client_message {
    const char *role, *content;
    size_t content_n;
};
int client_chat(struct client *c, const struct client_message *messages, int n,
                const struct client_settings *settings, client_tokens_fn *on_tokens, void *arg,
                struct client_done *done, struct err *e);

/* Cancel the stream that is being read: it ends with "cancelled" soon after. Safe in a signal
 * handler and from any thread; without a stream it does nothing. */
void client_interrupt(struct client *c);

#endif
