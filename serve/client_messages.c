/* What the server's messages say to the client library: `done`, `token`, the counters of
 * speculation. Everything is optional and checked: a server may be older or newer than this. */
#include <string.h>

#include "base/err.h"
#include "serve/client_private.h"
#include "serve/rpc.h"

static void take_int(const msgpack_object *map, const char *key, int64_t *out) {
    const msgpack_object *v = map ? rpc_get(map, key) : NULL;
    if (v) rpc_int(v, 0, INT64_MAX, out);
}
void client__take_real(const msgpack_object *map, const char *key, double *out) {
    const msgpack_object *v = map ? rpc_get(map, key) : NULL;
    if (v) rpc_real(v, out);
}

static void take_text(const msgpack_object *o, char *out, size_t size) {
    const char *s;
    size_t n;
    if (!o || !rpc_text(o, &s, &n)) return;
    if (n >= size) n = size - 1;
    memcpy(out, s, n);
    out[n] = 0;
}

static int take_places(const msgpack_object *map, const char *key, int64_t *out) {
    const msgpack_object *v = rpc_get(map, key);
    if (!v || v->type != MSGPACK_OBJECT_ARRAY) return 0;
    int n = v->via.array.size < CLIENT_MAX_PLACES ? (int)v->via.array.size : CLIENT_MAX_PLACES;
    for (int i = 0; i < n; i++) rpc_int(&v->via.array.ptr[i], 0, INT64_MAX, &out[i]);
    return n;
}

void client_read_speculation(struct client_speculation *out, const msgpack_object *map) {
    memset(out, 0, sizeof *out);
    if (!map || map->type != MSGPACK_OBJECT_MAP) return;
    take_int(map, "rounds", &out->rounds);
    take_int(map, "plain_rounds", &out->plain_rounds);
    take_int(map, "drafted", &out->drafted);
    take_int(map, "accepted", &out->accepted);
    take_int(map, "lookup_drafted", &out->lookup_drafted);
    take_int(map, "lookup_accepted", &out->lookup_accepted);
    take_int(map, "page_rollbacks", &out->page_rollbacks);
    client__take_real(map, "draft_ms", &out->draft_ms);
    client__take_real(map, "verify_ms", &out->verify_ms);
    out->n_places = take_places(map, "drafted_by_position", out->drafted_at);
    take_places(map, "accepted_by_position", out->accepted_at);
    take_text(rpc_get(map, "no_draft"), out->no_draft, sizeof out->no_draft);
}

static void take_sparsity(struct client_sparsity *out, const msgpack_object *map) {
    if (!map || map->type != MSGPACK_OBJECT_MAP) return;
    take_text(rpc_get(map, "selector"), out->selector, sizeof out->selector);
    take_int(map, "selections", &out->selections);
    take_int(map, "blocks", &out->blocks);
    take_int(map, "kept", &out->kept);
    take_int(map, "first_kept", &out->first_kept);
    take_int(map, "n_lists", &out->n_lists);
    take_int(map, "union", &out->n_union);
    take_int(map, "wide", &out->wide);
    take_int(map, "cut", &out->cut);
    take_int(map, "dropped", &out->dropped);
    client__take_real(map, "select_ms", &out->select_ms);
    take_int(map, "kv_shallow_bytes", &out->kv_shallow_bytes);
    take_int(map, "kv_deep_bytes", &out->kv_deep_bytes);
    take_int(map, "kv_dense_bytes", &out->kv_dense_bytes);
    const msgpack_object *exact = rpc_get(map, "exact"), *prefill = rpc_get(map, "prefill");
    if (prefill && prefill->type == MSGPACK_OBJECT_MAP) {
        take_int(prefill, "selections", &out->prefill_selections);
        take_int(prefill, "kv_bytes", &out->prefill_bytes);
        take_int(prefill, "kv_dense_bytes", &out->prefill_dense_bytes);
    }
    if (!exact || exact->type != MSGPACK_OBJECT_MAP) return;
    take_int(exact, "limit", &out->exact);
    take_int(exact, "passes", &out->exact_passes);
    take_int(exact, "provisional", &out->exact_provisional);
    take_int(exact, "accepted", &out->exact_accepted);
    take_int(exact, "tokens", &out->exact_tokens);
}

void client__take_done(struct client_done *d, const msgpack_object *map) {
    const msgpack_object *usage = rpc_get(map, "usage"), *timings = rpc_get(map, "timings");
    const msgpack_object *error = rpc_get(map, "error"), *seed = rpc_get(map, "seed");
    take_text(rpc_get(map, "finish_reason"), d->finish_reason, sizeof d->finish_reason);
    if (error && error->type == MSGPACK_OBJECT_ARRAY && error->via.array.size >= 2)
        take_text(&error->via.array.ptr[1], d->error, sizeof d->error);
    take_int(usage, "prompt_tokens", &d->prompt_tokens);
    take_int(usage, "completion_tokens", &d->completion_tokens);
    take_int(usage, "cached_tokens", &d->cached_tokens);
    client__take_real(timings, "queue_ms", &d->queue_ms);
    client__take_real(timings, "ttft_ms", &d->ttft_ms);
    client__take_real(timings, "decode_ms", &d->decode_ms);
    client__take_real(timings, "total_ms", &d->total_ms);
    client__take_real(timings, "tokens_per_second", &d->tokens_per_second);
    if (seed) rpc_u64(seed, &d->seed);
    client_read_speculation(&d->speculation, rpc_get(map, "speculation"));
    take_sparsity(&d->sparsity, rpc_get(map, "sparsity"));
}

static uint32_t array_size(const msgpack_object *o) {
    return o && o->type == MSGPACK_OBJECT_ARRAY ? o->via.array.size : 0;
}

int client__give_pieces(const msgpack_object *map, client_tokens_fn *on_tokens, void *arg,
                        struct err *e) {
    const msgpack_object *text = rpc_get(map, "text"), *flags = rpc_get(map, "drafted");
    const msgpack_object *bytes = rpc_get(map, "text_bytes");
    struct client_piece piece = {.text = ""};
    uint32_t n_tokens = array_size(rpc_get(map, "tokens"));
    size_t left = 0;
    if (!text) text = rpc_get(map, "bytes");
    if (text) rpc_text(text, &piece.text, &left);
    if (!flags || n_tokens == 0) {
        piece.n = left;
        piece.n_tokens = (int)n_tokens;
        on_tokens(arg, &piece);
        return 0;
    }
    if (array_size(flags) != n_tokens || array_size(bytes) != n_tokens)
        return err_raise(e, E_PROTOCOL, "\"drafted\" is not as long as \"tokens\"");
    for (uint32_t i = 0; i < n_tokens; i++) {
        int64_t drafted, n;
        if (!rpc_int(&flags->via.array.ptr[i], 0, 1, &drafted) ||
            !rpc_int(&bytes->via.array.ptr[i], 0, (int64_t)left, &n))
            return err_raise(e, E_PROTOCOL, "\"drafted\" or \"text_bytes\" is wrong");
        if (piece.n_tokens > 0 && piece.drafted != (drafted == 1)) {
            on_tokens(arg, &piece);
            piece = (struct client_piece){.text = piece.text + piece.n};
        }
        piece.drafted = drafted == 1;
        piece.n_tokens++;
        piece.n += (size_t)n;
        left -= (size_t)n;
    }
    piece.n += left;
    on_tokens(arg, &piece);
    return 0;
}
