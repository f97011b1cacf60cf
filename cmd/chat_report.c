#include "cmd/chat_report.h"

#include <math.h>
#include <string.h>

#include "cmd/sparsity.h"
#include "cmd/speculation.h"
#include "cmd/terminal.h"
#include "cmd/text.h"
#include "serve/rpc.h"

/* `text` into `out`, of which it is the caller's no more. */
static void give(struct strbuf *out, struct strbuf *text) {
    if (text->n) terminal_append(out, text->data, text->n);
    strbuf_deinit(text);
}

static int64_t number(const msgpack_object *map, const char *key) {
    const msgpack_object *v = map ? rpc_get(map, key) : NULL;
    int64_t n = 0;
    if (v) rpc_int(v, 0, INT64_MAX, &n);
    return n;
}

/* In one line. */
static void append_word(struct strbuf *out, const msgpack_object *word) {
    const char *s = "?";
    size_t n = 1;
    if (word) rpc_text(word, &s, &n);
    for (size_t i = 0; i < n; i++) strbuf_append_char(out, s[i] == '\n' ? ' ' : s[i]);
}

void chat_report_greeting(struct strbuf *out, const msgpack_object *hello) {
    const msgpack_object *model = hello ? rpc_get(hello, "model") : NULL;
    struct strbuf text = {0};
    append_word(&text, model ? rpc_get(model, "name") : NULL);
    strbuf_printf(&text, ", context %lld. /help lists the commands, Ctrl-D leaves.\n",
                  (long long)number(model, "context"));
    give(out, &text);
}

/* ---- An answer ---- */

static struct engine_speculation speculation_of(const struct client_speculation *s) {
    struct engine_speculation out = {
        .n_rounds = (uint64_t)s->rounds,
        .n_plain_rounds = (uint64_t)s->plain_rounds,
        .n_drafted = (uint64_t)s->drafted,
        .n_accepted = (uint64_t)s->accepted,
        .n_lookup_drafted = (uint64_t)s->lookup_drafted,
        .n_lookup_accepted = (uint64_t)s->lookup_accepted,
        .n_page_rollbacks = (uint64_t)s->page_rollbacks,
        .draft_ns = (int64_t)(fmin(fmax(s->draft_ms, 0), 1e12) * 1e6),
        .verify_ns = (int64_t)(fmin(fmax(s->verify_ms, 0), 1e12) * 1e6),
    };
    for (int i = 0; i < s->n_places && i < KERN_MAX_DRAFT; i++) {
        out.n_drafted_at[i] = (uint64_t)s->drafted_at[i];
        out.n_accepted_at[i] = (uint64_t)s->accepted_at[i];
    }
    return out;
}

static struct engine_sparsity sparsity_of(const struct client_sparsity *s) {
    struct engine_sparsity out = {.n_selections = (int)s->selections,
                                  .n_blocks = (int)s->blocks,
                                  .n_kept = (int)s->kept,
                                  .n_kept_first = (int)s->first_kept,
                                  .n_lists = (int)s->n_lists,
                                  .n_union = (int)s->n_union,
                                  .n_wide = (int)s->wide,
                                  .n_cut = (int)s->cut,
                                  .n_dropped = (int)s->dropped,
                                  .select_ns = (int64_t)(fmin(fmax(s->select_ms, 0), 1e12) * 1e6),
                                  .kv_shallow_bytes = (uint64_t)s->kv_shallow_bytes,
                                  .kv_deep_bytes = (uint64_t)s->kv_deep_bytes,
                                  .kv_dense_bytes = (uint64_t)s->kv_dense_bytes,
                                  .exact = {.n_passes = (uint64_t)s->exact_passes,
                                            .n_provisional = (uint64_t)s->exact_provisional,
                                            .n_accepted = (uint64_t)s->exact_accepted,
                                            .n_tokens = (uint64_t)s->exact_tokens},
                                  .prefill = {.n_selections = (uint64_t)s->prefill_selections,
                                              .kv_bytes = (uint64_t)s->prefill_bytes,
                                              .kv_dense_bytes = (uint64_t)s->prefill_dense_bytes}};
    /* A newer server's selector is shown as unknown. */
    if (target_selector_parse(&out.settings.selector, s->selector, strlen(s->selector), NULL))
        out.settings.selector = s->selector[0] ? TARGET_UNSET : TARGET_OFF;
    return out;
}

void chat_report_done(struct strbuf *out, const struct client_done *d) {
    struct strbuf text = {0};
    struct engine_speculation spec = speculation_of(&d->speculation);
    struct engine_sparsity sparsity = sparsity_of(&d->sparsity);
    strbuf_printf(&text, "%lld tokens", (long long)d->completion_tokens);
    if (d->tokens_per_second > 0) strbuf_printf(&text, ", %.1f tokens/s", d->tokens_per_second);
    strbuf_printf(&text, ", first after %.0f ms, prompt %lld tokens (%lld cached)", d->ttft_ms,
                  (long long)d->prompt_tokens, (long long)d->cached_tokens);
    speculation_append_short(&text, &spec);
    sparsity_append_short(&text, &sparsity);
    if (strcmp(d->finish_reason, "stop") != 0)
        strbuf_printf(&text, ", ended by: %.24s", d->finish_reason);
    give(out, &text);
}

void chat_report_speculation(struct strbuf *out, const struct client_done *d) {
    struct strbuf text = {0};
    struct engine_speculation spec = speculation_of(&d->speculation);
    speculation_append_long(&text, &spec, d->speculation.no_draft);
    give(out, &text);
}

void chat_report_sparsity(struct strbuf *out, const struct client_done *d) {
    struct strbuf text = {0};
    struct engine_sparsity sparsity = sparsity_of(&d->sparsity);
    sparsity_append_long(&text, &sparsity);
    give(out, &text);
}

/* ---- The server ---- */

static void append_class(struct strbuf *out, const msgpack_object_kv *kv) {
    size_t begin = out->n + 2;
    strbuf_append_str(out, "  ");
    append_word(out, &kv->key);
    while (!out->failed && out->n < begin + 8) strbuf_append_char(out, ' ');
    strbuf_printf(out, " pages of %s: %lld used, %lld cached, %lld free\n",
                  cmd_bytes((double)number(&kv->val, "page_bytes")),
                  (long long)number(&kv->val, "used"), (long long)number(&kv->val, "cached"),
                  (long long)number(&kv->val, "free"));
}

void chat_report_stats(struct strbuf *out, const msgpack_object *stats) {
    const msgpack_object *pool = rpc_get(stats, "pool"), *server = rpc_get(stats, "server");
    const msgpack_object *classes = pool ? rpc_get(pool, "classes") : NULL;
    struct client_speculation all;
    struct strbuf text = {0};
    strbuf_printf(&text, "running %lld, waiting %lld, paused %lld, connections %lld\n",
                  (long long)number(stats, "running"), (long long)number(stats, "waiting"),
                  (long long)number(stats, "paused"), (long long)number(server, "connections"));
    strbuf_printf(&text, "prompt tokens %lld (%lld from the cache), generated %lld\n",
                  (long long)number(stats, "prompt_tokens"),
                  (long long)number(stats, "cached_prompt_tokens"),
                  (long long)number(stats, "generated_tokens"));
    client_read_speculation(&all, rpc_get(stats, "speculation"));
    struct engine_speculation spec = speculation_of(&all);
    speculation_append_long(&text, &spec, "");
    strbuf_printf(&text, "\nresident %s, ", cmd_bytes((double)number(stats, "resident_bytes")));
    strbuf_printf(&text, "pool %s\n", cmd_bytes((double)number(pool, "arena_bytes")));
    if (classes && classes->type == MSGPACK_OBJECT_MAP)
        for (uint32_t i = 0; i < classes->via.map.size; i++)
            append_class(&text, &classes->via.map.ptr[i]);
    give(out, &text);
}
