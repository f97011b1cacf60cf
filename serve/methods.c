/* What a client may ask for, by name. Each method checks its parameters, then answers on c->out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/utf8.h"
#include "serve/serve_private.h"

enum {
    MAX_TOKENIZE_BYTES = 1 << 20,
};

struct call {
    struct connection *c;
    uint32_t id;
    const msgpack_object *params;
    uint32_t n;
};

void methods__invalid(struct connection *c, uint32_t id, const char *param, const struct err *e) {
    struct strbuf data = {0};
    msgpack_packer pk;
    rpc_packer(&pk, &data);
    if (param) {
        rpc_pack_str(&pk, "param");
        rpc_pack_str(&pk, param);
    }
    c->server->counters.n_bad_requests++;
    connection__error_data(c, id, rpc_code_of(e->code), e->message, &data, param != NULL);
    strbuf_deinit(&data);
}

/* n_positional values, then perhaps a map of options, which is read into `out` by `table`. */
static bool read_params(const struct call *k, const char *usage, uint32_t n_positional,
                        const struct param *table, void *out) {
    struct err e = {0};
    const char *bad = NULL;
    if (k->n < n_positional || k->n > n_positional + 1) {
        err_raise(&e, E_INVALID, "%u parameters; the form is %s", k->n, usage);
        methods__invalid(k->c, k->id, NULL, &e);
        return false;
    }
    if (k->n == n_positional) return true;
    if (params__read(table, out, &k->params[n_positional], k->c->server->salt_seed, &bad, &e) == 0)
        return true;
    methods__invalid(k->c, k->id, bad, &e);
    return false;
}

static const struct param no_options[] = {{0}};

/* ---- hello ---- */

struct hello_options {
    int protocol;
    struct param_text token, client;
};
static const struct param hello_params[] = {
    {"protocol", PARAM_INT, offsetof(struct hello_options, protocol), 1, 1000, false},
    {"token", PARAM_TEXT, offsetof(struct hello_options, token), 0, 0, false},
    {"client", PARAM_TEXT, offsetof(struct hello_options, client), 0, 0, false},
    {0},
};

/* The time that this takes tells the length of our token and nothing else. */
static bool same_token(const char *want, const struct param_text *got) {
    size_t n = strlen(want);
    unsigned differ = got->n != n;
    for (size_t i = 0; i < n; i++)
        differ |= (unsigned)((unsigned char)want[i] ^ (unsigned char)(i < got->n ? got->s[i] : 0));
    return differ == 0;
}

static void hello(const struct call *k) {
    struct connection *c = k->c;
    struct hello_options o = {.protocol = RPC_PROTOCOL_VERSION, .token = {.s = "", .n = 0}};
    if (!read_params(k, "hello [options]", 0, hello_params, &o)) return;
    if (c->needs_token && !same_token(c->server->options.token, &o.token)) {
        c->server->counters.n_unauthorised++;
        log_debug("connection %llu: wrong token", (unsigned long long)c->number);
        connection__error(c, k->id, RPC_UNAUTHORIZED, "wrong or missing token");
        connection__finish(c); /* one guess a connection */
        return;
    }
    if (o.protocol != RPC_PROTOCOL_VERSION) {
        connection__error(c, k->id, RPC_UNSUPPORTED, "protocol %d; this server speaks %d",
                          o.protocol, RPC_PROTOCOL_VERSION);
        return;
    }
    c->authorised = true;
    c->greeted = true;
    describe__hello(c, connection__result(c, k->id));
}

/* ---- generate, chat ---- */

/* May one more stream begin? Answers where not. */
static bool may_start(const struct call *k) {
    struct connection *c = k->c;
    if (c->server->draining) {
        connection__error(c, k->id, RPC_SHUTTING_DOWN, "the server is draining");
        return false;
    }
    if (c->n_streams >= c->server->options.max_streams) {
        connection__error(c, k->id, RPC_TOO_MANY, "%d requests run on this connection, at most %d",
                          c->n_streams, c->server->options.max_streams);
        return false;
    }
    return true;
}

static bool read_token_ids(const struct call *k, const msgpack_object *o, struct tokens *out,
                           struct err *e) {
    int n_vocab = tokenizer_n_tokens(engine_tokenizer(k->c->server->engine));
    uint32_t n = o->via.array.size;
    out->ids = malloc(n ? n * sizeof *out->ids : 1); /* n values were received: no lie */
    if (!out->ids) {
        err_raise(e, E_NOMEM, "no memory for %u tokens", n);
        return false;
    }
    out->cap = n;
    for (uint32_t i = 0; i < n; i++) {
        int64_t id;
        if (!rpc_int(&o->via.array.ptr[i], 0, n_vocab - 1, &id)) {
            err_raise(e, E_RANGE, "token %u is no id from 0 to %d", i, n_vocab - 1);
            return false;
        }
        out->ids[out->n++] = (int32_t)id;
    }
    return true;
}

/* What a request gets that names nothing. */
static void start_defaults(const struct call *k, struct request_options *o) {
    params__defaults(o);
    o->verify.coupling = k->c->server->options.coupling;
}

static void generate(const struct call *k) {
    struct request_options o;
    const char *text;
    size_t n;
    start_defaults(k, &o);
    if (!may_start(k) || !read_params(k, "generate [prompt, options]", 1, params__generate, &o))
        return;
    if (k->params[0].type == MSGPACK_OBJECT_ARRAY) {
        struct tokens ids = {0};
        struct err e = {0};
        if (!read_token_ids(k, &k->params[0], &ids, &e))
            methods__invalid(k->c, k->id, "prompt", &e);
        else prompt__start(k->c, k->id, &o, ids.ids, ids.n);
        tokens_deinit(&ids);
    } else if (rpc_text(&k->params[0], &text, &n)) {
        prompt__text(k->c, k->id, PROMPT_GENERATE, &o, text, n);
    } else {
        struct err e = {0};
        err_raise(&e, E_INVALID, "prompt must be a str or an array of token ids, not %s",
                  rpc_type_name(&k->params[0]));
        methods__invalid(k->c, k->id, "prompt", &e);
    }
}

static void chat(const struct call *k) {
    struct engine *g = k->c->server->engine;
    struct request_options o;
    start_defaults(k, &o);
    if (!may_start(k) || !read_params(k, "chat [messages, options]", 1, params__chat, &o)) return;
    if (!engine_chat(g))
        connection__error(k->c, k->id, RPC_UNSUPPORTED, "this model cannot chat (%s); use generate",
                          engine_chat_error(g));
    else prompt__messages(k->c, k->id, &o, &k->params[0]);
}

/* ---- cancel ---- */

struct cancel_options {
    bool unary;
};
static const struct param cancel_params[] = {
    {"unary", PARAM_BOOL, offsetof(struct cancel_options, unary), 0, 0, false},
    {0},
};

static void cancel(const struct call *k) {
    struct cancel_options o = {0};
    struct err e = {0};
    int64_t id;
    if (!read_params(k, "cancel [stream, options]", 1, cancel_params, &o)) return;
    if (!rpc_int(&k->params[0], 0, UINT32_MAX, &id)) {
        err_raise(&e, E_INVALID, "stream must be the id that generate or chat answered with");
        methods__invalid(k->c, k->id, "stream", &e);
        return;
    }
    struct stream *st = k->c->streams;
    while (st && !(st->unary == o.unary && (o.unary ? st->msgid : st->id) == (uint32_t)id))
        st = st->next;
    bool live = st && !st->cancelled;
    if (live) stream__cancel(st);
    msgpack_packer *pk = connection__result(k->c, k->id);
    msgpack_pack_map(pk, 1);
    rpc_pack_str(pk, "cancelled");
    rpc_pack_bool(pk, live);
}

/* ---- tokenize, detokenize ---- */

struct tokenize_options {
    bool add_special, parse_special, special;
};
static const struct param tokenize_params[] = {
    {"add_special_tokens", PARAM_BOOL, offsetof(struct tokenize_options, add_special), 0, 0, false},
    {"parse_special_tokens", PARAM_BOOL, offsetof(struct tokenize_options, parse_special), 0, 0,
     false},
    {0},
};
static const struct param detokenize_params[] = {
    {"skip_special_tokens", PARAM_BOOL, offsetof(struct tokenize_options, special), 0, 0, false},
    {0},
};

static void tokenize(const struct call *k) {
    struct tokenize_options o = {.add_special = true};
    struct request_options r;
    struct err e = {0};
    const char *text = "";
    size_t n = 0;
    if (!read_params(k, "tokenize [text, options]", 1, tokenize_params, &o)) return;
    if (!rpc_text(&k->params[0], &text, &n))
        err_raise(&e, E_INVALID, "text must be a str, not %s", rpc_type_name(&k->params[0]));
    else if (n > MAX_TOKENIZE_BYTES)
        err_raise(&e, E_RANGE, "text has %zu bytes, at most %d", n, MAX_TOKENIZE_BYTES);
    if (e.code != 0) {
        methods__invalid(k->c, k->id, "text", &e);
        return;
    }
    params__defaults(&r);
    r.add_special = o.add_special;
    r.parse_special = o.parse_special;
    prompt__text(k->c, k->id, PROMPT_TOKENIZE, &r, text, n);
}

static void detokenize(const struct call *k) {
    struct tokenize_options o = {.special = true}; /* holds skip_special_tokens */
    struct tokens ids = {0};
    struct err e = {0};
    struct strbuf text = {.limit = 64u << 20};
    if (!read_params(k, "detokenize [tokens, options]", 1, detokenize_params, &o)) return;
    if (k->params[0].type != MSGPACK_OBJECT_ARRAY)
        err_raise(&e, E_INVALID, "tokens must be an array, not %s", rpc_type_name(&k->params[0]));
    else if (read_token_ids(k, &k->params[0], &ids, &e)) {
        tokenizer_decode(engine_tokenizer(k->c->server->engine), ids.ids, ids.n, !o.special, &text);
        if (text.failed) err_raise(&e, E_NOMEM, "no memory for the text");
    }
    if (e.code != 0) {
        methods__invalid(k->c, k->id, "tokens", &e);
    } else {
        msgpack_packer *pk = connection__result(k->c, k->id);
        bool valid = utf8_valid(text.n ? text.data : "", text.n);
        msgpack_pack_map(pk, 1);
        rpc_pack_str(pk, valid ? "text" : "bytes");
        rpc_pack_text(pk, text.n ? text.data : "", text.n);
    }
    strbuf_deinit(&text);
    tokens_deinit(&ids);
}

/* ---- What it is and how it does ---- */

static void stats(const struct call *k) {
    if (!read_params(k, "stats []", 0, no_options, NULL)) return;
    describe__stats(k->c->server, connection__result(k->c, k->id));
}

static void memory(const struct call *k) {
    if (!read_params(k, "memory []", 0, no_options, NULL)) return;
    describe__memory(k->c->server, connection__result(k->c, k->id));
}

static void models(const struct call *k) {
    if (!read_params(k, "models []", 0, no_options, NULL)) return;
    describe__models(k->c->server, connection__result(k->c, k->id));
}

struct plan_options {
    int context, max_seqs;
    size_t kv_memory, free_memory;
};
static const struct param plan_params[] = {
    {"context", PARAM_INT, offsetof(struct plan_options, context), 1, 1 << 28, false},
    {"max_seqs", PARAM_INT, offsetof(struct plan_options, max_seqs), 1, ENGINE_MAX_SEQS, false},
    {"kv_memory", PARAM_SIZE, offsetof(struct plan_options, kv_memory), 1, 0x1p50, false},
    {"free_memory", PARAM_SIZE, offsetof(struct plan_options, free_memory), 1, 0x1p50, false},
    {0},
};

/* The same model under other settings: never another file, whose path would come from a client. */
static void plan(const struct call *k) {
    struct server *s = k->c->server;
    struct plan_options p = {0};
    struct plan result;
    struct err e = {0};
    if (!read_params(k, "plan [options]", 0, plan_params, &p)) return;
    if (!s->options.engine) {
        connection__error(k->c, k->id, RPC_UNSUPPORTED, "this server cannot plan");
        return;
    }
    struct engine_options o = *s->options.engine;
    if (p.context) o.context = p.context;
    if (p.max_seqs) o.max_seqs = p.max_seqs;
    if (p.kv_memory) o.kv_memory_bytes = p.kv_memory;
    if (engine_plan(&result, &o, p.free_memory, &e) != 0) {
        methods__invalid(k->c, k->id, NULL, &e);
        return;
    }
    describe__plan(&result, connection__result(k->c, k->id));
}

/* ---- drain ---- */

struct drain_options {
    int timeout_ms;
};
static const struct param drain_params[] = {
    {"timeout_ms", PARAM_INT, offsetof(struct drain_options, timeout_ms), 0, 86400000, false},
    {0},
};

/* Ending the server is for who could send it a signal, or holds the token: not for any local user.
 */
static void drain(const struct call *k) {
    struct server *s = k->c->server;
    struct drain_options o = {.timeout_ms = s->options.drain_timeout_ms};
    if (!read_params(k, "drain [options]", 0, drain_params, &o)) return;
    if (k->c->tcp && !k->c->needs_token) {
        connection__error(k->c, k->id, RPC_UNAUTHORIZED,
                          "drain needs the Unix socket or a connection with a token");
        return;
    }
    msgpack_packer *pk = connection__result(k->c, k->id);
    msgpack_pack_map(pk, 1);
    rpc_pack_str(pk, "draining");
    rpc_pack_bool(pk, true);
    server__drain(s, o.timeout_ms);
}

/* ---- The table ---- */

static const struct method {
    const char *name;
    void (*fn)(const struct call *k);
} methods[] = {
    {"hello", hello},       {"generate", generate},     {"chat", chat},   {"cancel", cancel},
    {"tokenize", tokenize}, {"detokenize", detokenize}, {"stats", stats}, {"memory", memory},
    {"plan", plan},         {"models", models},         {"drain", drain},
};
enum { N_METHODS = sizeof methods / sizeof methods[0] };

static const struct method *find(const char *name, size_t n) {
    for (int i = 0; i < N_METHODS; i++)
        if (strlen(methods[i].name) == n && memcmp(methods[i].name, name, n) == 0)
            return &methods[i];
    return NULL;
}

static void no_method(const struct call *k, const char *name, size_t n) {
    const char *names[N_METHODS];
    for (int i = 0; i < N_METHODS; i++) names[i] = methods[i].name;
    const char *near = rpc_suggest(name, n, names, N_METHODS);
    k->c->server->counters.n_bad_requests++;
    if (near)
        connection__error(k->c, k->id, RPC_UNKNOWN_METHOD,
                          "no method \"%.*s\"; did you mean \"%s\"?", (int)n, name, near);
    else connection__error(k->c, k->id, RPC_UNKNOWN_METHOD, "no method \"%.*s\"", (int)n, name);
}

void methods__call(struct connection *c, const struct rpc_message *m) {
    /* Notifications and responses are never answered; none means anything to us yet. */
    if (m->type != RPC_REQUEST) return;
    struct call k = {.c = c, .id = m->id, .params = m->params.ptr, .n = m->params.size};
    const struct method *method = find(m->method, m->method_n);
    if (!c->authorised && !(method && method->fn == hello)) {
        c->server->counters.n_unauthorised++;
        connection__error(c, m->id, RPC_UNAUTHORIZED, "hello with the token must come first");
        connection__finish(c);
        return;
    }
    for (const struct stream *st = c->streams; st; st = st->next)
        if (st->unary && st->msgid == m->id) {
            connection__error(c, m->id, RPC_DUPLICATE_ID, "request %u is still unanswered", m->id);
            return;
        }
    if (!method) {
        no_method(&k, m->method, m->method_n);
        return;
    }
    method->fn(&k);
    if (c->authorised && !c->finishing) c->greeted = true;
}
