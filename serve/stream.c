/* One running request: the engine's tokens on one side, notifications or one response on the other.
 */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "serve/serve_private.h"

enum {
    TOKEN_BYTES = 5,    /* of a packed token id, at most */
    LOGPROB_BYTES = 32, /* of a packed logprobs entry, about, and of each alternative */
    PIECE_BYTES = 4,    /* of a token's flag and length of text */
    UNSENT_LIMIT = 64 << 20,
};

/* Called on the engine's thread: only wakes the loop. */
static void wake(void *arg) {
    struct server *s = arg;
    uv_async_send(&s->wake);
}

/* ---- Life ---- */

void stream__free(struct stream *st) {
    struct connection *c = st->connection;
    struct stream **at = &c->streams;
    while (*at != st) at = &(*at)->next;
    *at = st->next;
    c->n_streams--;
    c->heard_ms = uv_now(&c->server->loop); /* idle begins now */
    if (st->request) engine_release(c->server->engine, st->request);
    verify_text_deinit(&st->text);
    strbuf_deinit(&st->unsent);
    strbuf_deinit(&st->pieces);
    free(st);
}

void stream__pause(struct stream *st, bool paused) {
    if (st->paused == paused) return;
    st->paused = paused;
    engine_pause(st->connection->server->engine, st->request, paused);
}

void stream__cancel(struct stream *st) {
    st->cancelled = true;
    strbuf_clear(&st->unsent);
    strbuf_clear(&st->pieces);
    engine_cancel(st->connection->server->engine, st->request);
}

static uint32_t new_id(struct connection *c) {
    for (;;) {
        uint32_t id = ++c->next_stream_id;
        struct stream *st = c->streams;
        while (st && st->id != id) st = st->next;
        if (id != 0 && !st) return id;
    }
}

/* The engine's refusal as an answer; a prompt that is too long comes with its numbers. */
static void refuse(struct connection *c, uint32_t msgid, const struct err *e, int n_prompt,
                   int max_tokens) {
    struct strbuf data = {0};
    msgpack_packer pk;
    int n_data = 0;
    rpc_packer(&pk, &data);
    if (e->code == E_TOO_LONG) {
        rpc_pack_str(&pk, "n_prompt");
        msgpack_pack_int(&pk, n_prompt);
        rpc_pack_str(&pk, "n_ctx");
        msgpack_pack_int(&pk, engine_context(c->server->engine));
        rpc_pack_str(&pk, "max_tokens");
        if (max_tokens >= 0) msgpack_pack_int(&pk, max_tokens);
        else msgpack_pack_nil(&pk);
        n_data = 3;
    } else if (rpc_code_of(e->code) == RPC_OVERLOADED) {
        rpc_pack_str(&pk, "retry_after");
        msgpack_pack_double(&pk, 1.0);
        n_data = 1;
    }
    connection__error_data(c, msgid, rpc_code_of(e->code), e->message, &data, n_data);
    strbuf_deinit(&data);
}

void stream__start(struct connection *c, uint32_t msgid, const struct request_options *o,
                   const int32_t *prompt, int n_prompt) {
    struct server *s = c->server;
    struct err e = {0};
    struct stream *st = calloc(1, sizeof *st);
    if (!st) {
        connection__error(c, msgid, RPC_OVERLOADED, "no memory for a stream");
        return;
    }
    st->connection = c;
    st->msgid = msgid;
    st->unary = !o->stream;
    st->show_drafted = o->drafted;
    st->params = o->verify;
    st->unsent.limit = UNSENT_LIMIT;
    struct engine_submit_options so = {
        .params = o->verify,
        .sparse = &o->sparse,
        .prompt = prompt,
        .n_prompt = n_prompt,
        .salt = o->salt,
        .conversation = o->has_conversation ? o->conversation
                                            : params__conversation_of(c->number, s->salt_seed),
        .no_prefix_cache = !o->prefix_cache,
        .show_special = !o->skip_special_tokens,
        .notify = wake,
        .notify_arg = s,
    };
    if (verify_text_init(&st->text, engine_tokenizer(s->engine), &st->params,
                         !o->skip_special_tokens, &e) != 0 ||
        engine_submit(s->engine, &so, &st->request, &e) != 0) {
        refuse(c, msgid, &e, n_prompt, o->verify.max_tokens);
        verify_text_deinit(&st->text);
        free(st);
        return;
    }
    s->counters.n_requests++;
    st->id = st->unary ? 0 : new_id(c);
    st->next = c->streams;
    c->streams = st;
    c->n_streams++;
    if (c->paused) stream__pause(st, true);
    if (!st->unary) {
        msgpack_packer *pk = connection__result(c, msgid);
        msgpack_pack_map(pk, 1);
        rpc_pack_str(pk, "stream");
        msgpack_pack_uint32(pk, st->id);
    }
}

/* ---- Packing ---- */

size_t stream__unsent_bytes(const struct stream *st) {
    size_t n_tokens = (size_t)(st->n_seen - st->n_sent), each = TOKEN_BYTES;
    if (st->params.logprobs >= 0) each += LOGPROB_BYTES * (1 + (size_t)st->params.logprobs);
    if (st->show_drafted) each += PIECE_BYTES;
    return st->unsent.n + n_tokens * each;
}

static void pack_tokens(msgpack_packer *pk, const int32_t *tokens, int n) {
    msgpack_pack_array(pk, (size_t)n);
    for (int i = 0; i < n; i++) msgpack_pack_int32(pk, tokens[i]);
}

/* Two arrays as long as `tokens`: was it drafted, how many bytes of the text did it bring. */
enum { N_DRAFTED = 2 };
static void pack_drafted(msgpack_packer *pk, const struct stream *st,
                         const struct engine_progress *p, int first, int n) {
    rpc_pack_str(pk, "drafted");
    msgpack_pack_array(pk, (size_t)n);
    for (int i = 0; i < n; i++) msgpack_pack_int(pk, p->drafted && p->drafted[first + i]);
    rpc_pack_str(pk, "text_bytes");
    msgpack_pack_array(pk, (size_t)n);
    for (int i = 0; i < n; i++) {
        uint32_t bytes;
        memcpy(&bytes, st->pieces.data + (size_t)i * sizeof bytes, sizeof bytes);
        msgpack_pack_uint32(pk, bytes);
    }
}

static void pack_logprobs(msgpack_packer *pk, const struct engine_logprobs *l, int n) {
    msgpack_pack_array(pk, (size_t)n);
    for (int i = 0; i < n; i++) {
        msgpack_pack_map(pk, 2);
        rpc_pack_str(pk, "logprob");
        rpc_pack_real(pk, (double)l[i].logprob);
        rpc_pack_str(pk, "top");
        msgpack_pack_array(pk, (size_t)l[i].n_top);
        for (int k = 0; k < l[i].n_top; k++) {
            msgpack_pack_array(pk, 2);
            msgpack_pack_int32(pk, l[i].top_id[k]);
            rpc_pack_real(pk, (double)l[i].top_logprob[k]);
        }
    }
}

/* "text": str, or "bytes": bin where the model wrote no valid UTF-8. */
static void pack_text(msgpack_packer *pk, const struct strbuf *text, size_t n) {
    size_t before = ((struct strbuf *)pk->data)->n;
    rpc_pack_str(pk, "text");
    size_t at = ((struct strbuf *)pk->data)->n;
    rpc_pack_text(pk, n ? text->data : "", n);
    struct strbuf *out = pk->data;
    if (!out->failed && at < out->n && (uint8_t)out->data[at] >= 0xc4 &&
        (uint8_t)out->data[at] <= 0xc6) {
        out->n = before; /* it became a bin: take the key back */
        rpc_pack_str(pk, "bytes");
        rpc_pack_text(pk, text->data, n);
    }
}

/* Everything new in one notification. */
static void send_tokens(struct stream *st, const struct engine_progress *p) {
    struct connection *c = st->connection;
    int n = st->n_seen - st->n_sent;
    bool logprobs = st->params.logprobs >= 0 && p->logprobs != NULL;
    rpc_packer(&c->pk, &c->out);
    msgpack_packer *pk = &c->pk;
    rpc_pack_notification_head(pk, "token");
    msgpack_pack_array(pk, 2);
    msgpack_pack_uint32(pk, st->id);
    msgpack_pack_map(pk, 3u + logprobs + (st->show_drafted ? N_DRAFTED : 0));
    rpc_pack_str(pk, "seq");
    msgpack_pack_uint32(pk, st->seq++);
    pack_text(pk, &st->unsent, st->unsent.n);
    rpc_pack_str(pk, "tokens");
    pack_tokens(pk, p->tokens + st->n_sent, n);
    if (logprobs) {
        rpc_pack_str(pk, "logprobs");
        pack_logprobs(pk, p->logprobs + st->n_sent, n);
    }
    if (st->show_drafted) pack_drafted(pk, st, p, st->n_sent, n);
    if (c->commit_ns == 0) c->commit_ns = p->committed_ns;
    st->n_sent = st->n_seen;
    strbuf_clear(&st->unsent);
    strbuf_clear(&st->pieces);
}

static double ms_between(int64_t from_ns, int64_t to_ns) {
    return from_ns > 0 && to_ns >= from_ns ? (double)(to_ns - from_ns) / 1e6 : 0;
}

/* How the client is told that the answer ended: what was cancelled ended so, although the engine
 * was done just before, since its last tokens are not shown. */
static enum engine_finish end_of(const struct stream *st, const struct engine_progress *p) {
    if (st->aborted) return ENGINE_ABORTED;
    bool whole = p->finish == ENGINE_STOP || p->finish == ENGINE_LENGTH;
    return st->cancelled && whole ? ENGINE_CANCELLED : p->finish;
}

/* finish_reason, stop_reason, usage, timings, seed, speculation, sparsity: the N_END pairs
 * that end a request. */
enum { N_END = 7 };
static void pack_end(msgpack_packer *pk, const struct stream *st, const struct engine_progress *p) {
    enum engine_finish end = end_of(st, p);
    rpc_pack_str(pk, "finish_reason");
    rpc_pack_str(pk, engine_finish_name(end));
    rpc_pack_str(pk, "stop_reason");
    if (end == ENGINE_STOP && p->stop_idx >= 0 && p->stop_idx < st->params.n_stops)
        rpc_pack_text(pk, st->params.stops[p->stop_idx].text,
                      (size_t)st->params.stops[p->stop_idx].n);
    else msgpack_pack_nil(pk);

    rpc_pack_str(pk, "usage");
    msgpack_pack_map(pk, 4);
    rpc_pack_str(pk, "prompt_tokens");
    msgpack_pack_int(pk, p->n_prompt);
    rpc_pack_str(pk, "completion_tokens");
    msgpack_pack_int(pk, p->n_tokens);
    rpc_pack_str(pk, "total_tokens");
    msgpack_pack_int(pk, p->n_prompt + p->n_tokens);
    rpc_pack_str(pk, "cached_tokens");
    msgpack_pack_int(pk, p->n_cached_prompt);

    double decode_ms = ms_between(p->first_token_ns, p->finished_ns);
    rpc_pack_str(pk, "timings");
    msgpack_pack_map(pk, 5);
    rpc_pack_str(pk, "queue_ms");
    rpc_pack_real(pk, ms_between(p->submitted_ns, p->admitted_ns));
    rpc_pack_str(pk, "ttft_ms");
    rpc_pack_real(pk, ms_between(p->submitted_ns, p->first_token_ns));
    rpc_pack_str(pk, "decode_ms");
    rpc_pack_real(pk, decode_ms);
    rpc_pack_str(pk, "total_ms");
    rpc_pack_real(pk, ms_between(p->submitted_ns, p->finished_ns));
    rpc_pack_str(pk, "tokens_per_second"); /* after the first token */
    if (p->n_tokens > 1 && decode_ms > 0) rpc_pack_real(pk, (p->n_tokens - 1) * 1e3 / decode_ms);
    else msgpack_pack_nil(pk);

    rpc_pack_str(pk, "seed");
    msgpack_pack_uint64(pk, p->seed);
    rpc_pack_str(pk, "speculation");
    describe__speculation(&p->speculation, p->no_draft, pk);
    rpc_pack_str(pk, "sparsity");
    describe__sparsity(&p->sparsity, pk);
}

static void send_done(struct stream *st, const struct engine_progress *p) {
    struct connection *c = st->connection;
    bool failed = p->finish == ENGINE_FAILED;
    rpc_packer(&c->pk, &c->out);
    rpc_pack_notification_head(&c->pk, "done");
    msgpack_pack_array(&c->pk, 2);
    msgpack_pack_uint32(&c->pk, st->id);
    msgpack_pack_map(&c->pk, N_END + failed);
    pack_end(&c->pk, st, p);
    if (failed) {
        rpc_pack_str(&c->pk, "error");
        rpc_pack_error(&c->pk, rpc_code_of(p->error_code), p->error, NULL, 0);
    }
}

static void send_response(struct stream *st, const struct engine_progress *p) {
    struct connection *c = st->connection;
    if (p->finish == ENGINE_FAILED) {
        connection__error(c, st->msgid, rpc_code_of(p->error_code), "%s", p->error);
        return;
    }
    if (st->aborted || p->finish == ENGINE_ABORTED) {
        connection__error(c, st->msgid, RPC_SHUTTING_DOWN, "cut off after %d tokens", p->n_tokens);
        return;
    }
    if (st->cancelled) {
        connection__error(c, st->msgid, RPC_CANCELLED, "cancelled after %d tokens", p->n_tokens);
        return;
    }
    bool logprobs = st->params.logprobs >= 0 && p->logprobs != NULL;
    msgpack_packer *pk = connection__result(c, st->msgid);
    msgpack_pack_map(pk, N_END + 2u + logprobs + (st->show_drafted ? N_DRAFTED : 0));
    pack_text(pk, &st->unsent, st->unsent.n);
    rpc_pack_str(pk, "tokens");
    pack_tokens(pk, p->tokens, p->n_tokens);
    if (logprobs) {
        rpc_pack_str(pk, "logprobs");
        pack_logprobs(pk, p->logprobs, p->n_tokens);
    }
    if (st->show_drafted) pack_drafted(pk, st, p, 0, p->n_tokens);
    pack_end(pk, st, p);
}

/* ---- News ---- */

static void take_text(struct stream *st, const struct engine_progress *p) {
    for (; st->n_seen < p->n_tokens; st->n_seen++) {
        if (st->cancelled) continue;
        size_t before = st->unsent.n;
        verify_text_push(&st->text, p->tokens[st->n_seen], &st->unsent);
        uint32_t bytes = (uint32_t)(st->unsent.n - before);
        if (st->show_drafted) strbuf_append(&st->pieces, &bytes, sizeof bytes);
    }
    if (p->finish != ENGINE_RUNNING && !st->cancelled) verify_text_finish(&st->text, &st->unsent);
    if (st->unsent.failed || st->pieces.failed)
        connection__doom(st->connection, "no memory for its text");
}

void stream__flush(struct stream *st) {
    if (st->unary || st->cancelled || st->n_sent == st->n_seen) return;
    struct engine_progress p;
    engine_poll(st->request, &p);
    send_tokens(st, &p);
}

void stream__poll(struct stream *st) {
    struct engine_progress p;
    engine_poll(st->request, &p);
    take_text(st, &p);
    if (st->connection->doom) return; /* what it kept of the tokens is not whole */
    bool finished = p.finish != ENGINE_RUNNING;
    if (!st->unary && !st->cancelled) {
        /* The last tokens never wait, and neither does text that the end released. */
        bool news = st->n_seen > st->n_sent || (finished && st->unsent.n > 0);
        if (news && (finished || connection__ready(st->connection))) send_tokens(st, &p);
    }
    if (!finished) return;
    if (st->unary) send_response(st, &p);
    else send_done(st, &p);
    stream__free(st);
}
