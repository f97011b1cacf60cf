/* From text to tokens. Encoding takes time that grows with the text, and one long text must not
 * hold up the streams of everybody else: beyond INLINE_BYTES it goes to a thread of libuv's pool.
 * Texts that no tokenizer could fit into the context are refused by their length alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "serve/serve_private.h"

enum {
    INLINE_BYTES = 16 << 10, /* a millisecond or two */
    MAX_CHAT_MESSAGES = 4096,
    MAX_ROLE_BYTES = 32,
    ARENA_CHUNK = 16 << 10,
    NORMALISED = 3,         /* NFC makes a text at most so many times shorter */
    TOKEN_LIMIT_FACTOR = 4, /* tokens are counted up to so many contexts */
};

struct prompt {
    uv_work_t work;
    struct server *server;
    struct connection *connection; /* NULL: it is gone */
    uint32_t msgid;
    enum prompt_kind kind;
    struct request_options options;
    struct arena arena; /* holds what is below */
    const char *text;
    struct chat_message *messages; /* PROMPT_CHAT */
    size_t n_messages;
    size_t n_bytes; /* of text or of all contents */
    struct tokens tokens;
    struct err err;
};

/* ---- Refusals ---- */

static size_t longest_token(struct server *s) {
    if (s->longest_token == 0) {
        const struct tokenizer *t = engine_tokenizer(s->engine);
        struct strbuf bytes = {0};
        s->longest_token = 1;
        for (int id = 0; id < tokenizer_n_tokens(t); id++) {
            strbuf_clear(&bytes);
            tokenizer_token_bytes(t, id, true, &bytes);
            if (bytes.n > s->longest_token) s->longest_token = bytes.n;
        }
        strbuf_deinit(&bytes);
    }
    return s->longest_token;
}

/* The prompt has at least n_prompt tokens. */
static void too_long(struct connection *c, uint32_t msgid, size_t n_prompt) {
    struct strbuf data = {0};
    msgpack_packer pk;
    int n_ctx = engine_context(c->server->engine);
    char text[160];
    rpc_packer(&pk, &data);
    rpc_pack_str(&pk, "n_prompt");
    msgpack_pack_uint64(&pk, n_prompt);
    rpc_pack_str(&pk, "n_ctx");
    msgpack_pack_int(&pk, n_ctx);
    snprintf(text, sizeof text, "the prompt has at least %zu tokens, the context holds %d",
             n_prompt, n_ctx);
    c->server->counters.n_bad_requests++;
    connection__error_data(c, msgid, RPC_TOO_LONG, text, &data, 2);
    strbuf_deinit(&data);
}

/* ---- Messages ---- */

/* Copies, since the request's message is gone when a thread looks at them. */
static int copy_value(const char **out, size_t *n_out, const msgpack_object *val, struct prompt *p,
                      uint32_t idx, const char *name, struct err *e) {
    const char *s;
    if (!rpc_text(val, &s, n_out))
        return err_raise(e, E_INVALID, "messages[%u].%s must be a str, not %s", idx, name,
                         rpc_type_name(val));
    *out = arena_strndup(&p->arena, s, *n_out);
    return *out ? 0 : err_raise(e, E_NOMEM, "no memory for messages");
}

/* One {role, content} map. */
static int read_message(struct prompt *p, struct chat_message *m, const msgpack_object *o,
                        uint32_t idx, struct err *e) {
    if (o->type != MSGPACK_OBJECT_MAP)
        return err_raise(e, E_INVALID, "messages[%u] must be a map, not %s", idx, rpc_type_name(o));
    size_t role_bytes = 0;
    for (uint32_t i = 0; i < o->via.map.size; i++) {
        const msgpack_object *key = &o->via.map.ptr[i].key, *val = &o->via.map.ptr[i].val;
        int rc;
        if (rpc_text_is(key, "role")) {
            rc = copy_value(&m->role, &role_bytes, val, p, idx, "role", e);
        } else if (rpc_text_is(key, "content")) {
            rc = copy_value(&m->content, &m->content_bytes, val, p, idx, "content", e);
        } else {
            const char *s = "";
            size_t n = 0;
            rpc_text(key, &s, &n);
            rc = err_raise(e, E_INVALID,
                           "messages[%u] has a key \"%.*s\"; it takes role and content", idx,
                           n > 64 ? 64 : (int)n, s);
        }
        if (rc != 0) return rc;
    }
    if (!m->role || !m->content)
        return err_raise(e, E_INVALID, "messages[%u] needs role and content", idx);
    if (role_bytes > MAX_ROLE_BYTES || strlen(m->role) != role_bytes)
        return err_raise(e, E_INVALID, "messages[%u].role is no role", idx);
    p->n_bytes += m->content_bytes;
    return 0;
}

static int read_messages(struct prompt *p, const msgpack_object *o, struct err *e) {
    if (o->type != MSGPACK_OBJECT_ARRAY)
        return err_raise(e, E_INVALID, "messages must be an array, not %s", rpc_type_name(o));
    uint32_t n = o->via.array.size;
    if (n < 1 || n > MAX_CHAT_MESSAGES)
        return err_raise(e, E_RANGE, "%u messages, allowed is 1 to %d", n, MAX_CHAT_MESSAGES);
    p->messages = arena_take_zeroed(&p->arena, n, sizeof *p->messages);
    if (!p->messages) return err_raise(e, E_NOMEM, "no memory for messages");
    for (uint32_t i = 0; i < n; i++) {
        int rc = read_message(p, &p->messages[i], &o->via.array.ptr[i], i, e);
        if (rc != 0) return rc;
    }
    p->n_messages = n;
    return 0;
}

/* ---- Encoding ---- */

/* On any thread: touches the prompt alone; tokenizer and template are shared and constant. */
static void encode(struct prompt *p) {
    const struct engine *g = p->server->engine;
    const struct tokenizer *t = engine_tokenizer(g);
    unsigned flags = (p->options.add_special ? TOKENIZER_ADD_SPECIAL : 0u) |
                     (p->options.parse_special ? TOKENIZER_PARSE_SPECIAL : 0u);
    if (p->kind == PROMPT_CHAT)
        chat_render(engine_chat(g), t, p->messages, p->n_messages, p->options.add_generation_prompt,
                    &p->tokens, &p->err);
    else tokenizer_encode(t, p->text, p->n_bytes, flags, &p->tokens, &p->err);
}

static void prompt_free(struct prompt *p) {
    arena_deinit(&p->arena);
    tokens_deinit(&p->tokens);
    free(p);
}

void prompt__start(struct connection *c, uint32_t msgid, const struct request_options *o,
                   const int32_t *ids, size_t n) {
    struct err e = {0};
    if (n > 0 && n <= INT32_MAX) {
        stream__start(c, msgid, o, ids, (int)n);
        return;
    }
    err_raise(&e, E_INVALID, n ? "prompt is too long" : "prompt is empty");
    methods__invalid(c, msgid, "prompt", &e);
}

/* The tokens are there, or the error. */
static void finish(struct prompt *p) {
    struct connection *c = p->connection;
    static const char *const names[] = {"prompt", "messages", "text"};
    if (p->err.code == E_TOO_LONG) {
        too_long(c, p->msgid, p->tokens.limit + 1);
    } else if (p->err.code != 0) {
        methods__invalid(c, p->msgid, names[p->kind], &p->err);
    } else if (p->kind != PROMPT_TOKENIZE) {
        prompt__start(c, p->msgid, &p->options, p->tokens.ids, p->tokens.n);
    } else {
        msgpack_packer *pk = connection__result(c, p->msgid);
        msgpack_pack_map(pk, 2);
        rpc_pack_str(pk, "tokens");
        msgpack_pack_array(pk, p->tokens.n);
        for (size_t i = 0; i < p->tokens.n; i++) msgpack_pack_int32(pk, p->tokens.ids[i]);
        rpc_pack_str(pk, "count");
        msgpack_pack_uint64(pk, p->tokens.n);
    }
}

static void on_work(uv_work_t *w) {
    encode((struct prompt *)w);
}

static void on_worked(uv_work_t *w, int status) {
    struct prompt *p = (struct prompt *)w;
    struct connection *c = p->connection;
    p->server->n_prompts--;
    if (c && !c->closing) {
        c->prompt = NULL;
        c->heard_ms = uv_now(&p->server->loop);
        if (status < 0) connection__error(c, p->msgid, RPC_INTERNAL, "%s", uv_strerror(status));
        else finish(p);
        if (p->server->draining && !c->streams) connection__finish(c);
        connection__settle(c);
    }
    prompt_free(p);
}

void prompt__forget(struct connection *c) {
    if (!c->prompt) return;
    c->prompt->connection = NULL;
    uv_cancel((uv_req_t *)&c->prompt->work); /* not begun yet, perhaps */
    c->prompt = NULL;
}

/* Encode here or elsewhere, then go on; takes the prompt over. */
static void run(struct prompt *p) {
    struct server *s = p->server;
    struct connection *c = p->connection;
    if (p->n_bytes > INLINE_BYTES && uv_queue_work(&s->loop, &p->work, on_work, on_worked) == 0) {
        c->prompt = p;
        s->n_prompts++;
        return;
    }
    encode(p);
    finish(p);
    prompt_free(p);
}

/* NULL: answered. */
static struct prompt *prompt_new(struct connection *c, uint32_t msgid, enum prompt_kind kind,
                                 const struct request_options *o) {
    struct prompt *p = calloc(1, sizeof *p);
    if (!p) {
        connection__error(c, msgid, RPC_OVERLOADED, "no memory for a prompt");
        return NULL;
    }
    p->server = c->server;
    p->connection = c;
    p->msgid = msgid;
    p->kind = kind;
    p->options = *o;
    arena_init(&p->arena, ARENA_CHUNK, 2 * c->server->options.max_message_bytes + (1 << 20));
    if (kind != PROMPT_TOKENIZE)
        p->tokens.limit = (size_t)engine_context(c->server->engine) * TOKEN_LIMIT_FACTOR;
    return p;
}

/* So many bytes need more tokens than the context has: answered. */
static bool refuse_by_length(struct prompt *p) {
    if (p->kind == PROMPT_TOKENIZE || p->n_bytes <= INLINE_BYTES) return false;
    size_t longest = longest_token(p->server), n = p->n_bytes / NORMALISED / longest;
    if (n <= (size_t)engine_context(p->server->engine)) return false;
    too_long(p->connection, p->msgid, n);
    return true;
}

void prompt__text(struct connection *c, uint32_t msgid, enum prompt_kind kind,
                  const struct request_options *o, const char *text, size_t n) {
    struct prompt *p = prompt_new(c, msgid, kind, o);
    if (!p) return;
    p->n_bytes = n;
    if (refuse_by_length(p)) {
        prompt_free(p);
    } else if (!(p->text = arena_strndup(&p->arena, text, n))) {
        connection__error(c, msgid, RPC_OVERLOADED, "no memory for a prompt");
        prompt_free(p);
    } else {
        run(p);
    }
}

void prompt__messages(struct connection *c, uint32_t msgid, const struct request_options *o,
                      const msgpack_object *messages) {
    struct prompt *p = prompt_new(c, msgid, PROMPT_CHAT, o);
    if (!p) return;
    if (read_messages(p, messages, &p->err) != 0) {
        methods__invalid(c, msgid, "messages", &p->err);
        prompt_free(p);
    } else if (refuse_by_length(p)) {
        prompt_free(p);
    } else {
        run(p);
    }
}
