/* What the server tells about itself: hello, models, stats, memory, plan. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "serve/serve_private.h"

static void pack_pair_int(msgpack_packer *pk, const char *name, long long v) {
    rpc_pack_str(pk, name);
    msgpack_pack_int64(pk, v);
}
static void pack_pair_u64(msgpack_packer *pk, const char *name, uint64_t v) {
    rpc_pack_str(pk, name);
    msgpack_pack_uint64(pk, v);
}
static void pack_pair_real(msgpack_packer *pk, const char *name, double v) {
    rpc_pack_str(pk, name);
    rpc_pack_real(pk, v);
}
static void pack_pair_str(msgpack_packer *pk, const char *name, const char *v) {
    rpc_pack_str(pk, name);
    if (v) rpc_pack_text(pk, v, strlen(v));
    else msgpack_pack_nil(pk);
}

/* 16 hex digits: languages whose integers end at 2^53 must keep it whole. */
static void pack_fingerprint(msgpack_packer *pk, const char *name, uint64_t v) {
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, v);
    pack_pair_str(pk, name, text);
}

/* ---- hello, models ---- */

/* -1 is "auto": what a client may send back. */
static void pack_draft_tokens(msgpack_packer *pk, int n) {
    if (n < 0) rpc_pack_str(pk, "auto");
    else msgpack_pack_int(pk, n);
}

/* The draft model, nil where there is none. */
static void pack_draft(const struct model_config *c, msgpack_packer *pk) {
    if (!c) {
        msgpack_pack_nil(pk);
        return;
    }
    msgpack_pack_map(pk, 4);
    pack_pair_str(pk, "name", c->name);
    pack_pair_str(pk, "architecture", c->arch);
    pack_pair_int(pk, "layers", c->n_layers);
    pack_pair_int(pk, "context", c->context);
}

/* What a request gets that names nothing of it; nil where the server was not told. */
static void pack_speculation_defaults(const struct server *s, msgpack_packer *pk) {
    const struct engine_options *o = s->options.engine;
    if (!o) {
        msgpack_pack_nil(pk);
        return;
    }
    msgpack_pack_map(pk, 4);
    rpc_pack_str(pk, "draft_tokens");
    pack_draft_tokens(pk, o->draft_tokens);
    rpc_pack_str(pk, "max_draft_tokens");
    if (o->max_draft_tokens > 0) msgpack_pack_int(pk, o->max_draft_tokens);
    else msgpack_pack_nil(pk);
    rpc_pack_str(pk, "lookup");
    rpc_pack_bool(pk, o->lookup);
    pack_pair_str(pk, "coupling", verify_coupling_name(s->options.coupling));
}

static void pack_sparsity_defaults(const struct server *s, msgpack_packer *pk);

enum { N_MODEL = 8 };
static void pack_model(struct server *s, msgpack_packer *pk) {
    const struct chat_family *chat = engine_chat(s->engine);
    msgpack_pack_map(pk, N_MODEL);
    pack_pair_str(pk, "name", engine_model_name(s->engine));
    pack_fingerprint(pk, "fingerprint", engine_model_fingerprint(s->engine));
    pack_pair_int(pk, "context", engine_context(s->engine));
    pack_pair_str(pk, "chat_template", chat ? chat_family_name(chat) : NULL);
    rpc_pack_str(pk, "tokenizer");
    msgpack_pack_map(pk, 2);
    pack_fingerprint(pk, "fingerprint", tokenizer_fingerprint(engine_tokenizer(s->engine)));
    pack_pair_int(pk, "n_tokens", tokenizer_n_tokens(engine_tokenizer(s->engine)));
    rpc_pack_str(pk, "draft");
    pack_draft(engine_draft_config(s->engine), pk);
    rpc_pack_str(pk, "speculation");
    pack_speculation_defaults(s, pk);
    rpc_pack_str(pk, "sparsity");
    pack_sparsity_defaults(s, pk);
}

void describe__hello(struct connection *c, msgpack_packer *pk) {
    struct server *s = c->server;
    const struct serve_options *o = &s->options;
    msgpack_pack_map(pk, 4);
    pack_pair_str(pk, "server", "tandem");
    pack_pair_int(pk, "protocol", RPC_PROTOCOL_VERSION);
    rpc_pack_str(pk, "model");
    pack_model(s, pk);
    rpc_pack_str(pk, "limits");
    msgpack_pack_map(pk, 7);
    pack_pair_u64(pk, "message_bytes", o->max_message_bytes);
    pack_pair_int(pk, "depth", SCAN_MAX_DEPTH);
    pack_pair_u64(pk, "values", c->scan.limits.max_nodes);
    pack_pair_int(pk, "streams", o->max_streams);
    pack_pair_int(pk, "stop_strings", VERIFY_MAX_STOPS);
    pack_pair_int(pk, "logprobs", KERN_MAX_LOGPROBS);
    pack_pair_int(pk, "draft_tokens", KERN_MAX_DRAFT);
}

void describe__models(struct server *s, msgpack_packer *pk) {
    msgpack_pack_array(pk, 1);
    pack_model(s, pk);
}

/* ---- speculation ---- */

static void pack_places(msgpack_packer *pk, const char *name, const uint64_t *at, int n) {
    rpc_pack_str(pk, name);
    msgpack_pack_array(pk, (size_t)n);
    for (int i = 0; i < n; i++) msgpack_pack_uint64(pk, at[i]);
}

static void pack_share(msgpack_packer *pk, const char *name, double part, double whole) {
    rpc_pack_str(pk, name);
    if (whole > 0) rpc_pack_real(pk, part / whole);
    else msgpack_pack_nil(pk);
}

void describe__speculation(const struct engine_speculation *s, enum engine_no_draft no_draft,
                           msgpack_packer *pk) {
    int n_places = KERN_MAX_DRAFT;
    while (n_places > 0 && s->n_drafted_at[n_places - 1] == 0) n_places--;
    msgpack_pack_map(pk, 13u + (no_draft != ENGINE_DRAFT_OK));
    pack_pair_u64(pk, "rounds", s->n_rounds);
    pack_pair_u64(pk, "plain_rounds", s->n_plain_rounds);
    pack_pair_u64(pk, "drafted", s->n_drafted);
    pack_pair_u64(pk, "accepted", s->n_accepted);
    pack_share(pk, "acceptance", (double)s->n_accepted, (double)s->n_drafted);
    /* of a round with draft tokens: those accepted and the target's own behind them */
    pack_share(pk, "tokens_per_round", (double)(s->n_accepted + s->n_rounds), (double)s->n_rounds);
    pack_places(pk, "drafted_by_position", s->n_drafted_at, n_places);
    pack_places(pk, "accepted_by_position", s->n_accepted_at, n_places);
    pack_pair_u64(pk, "lookup_drafted", s->n_lookup_drafted);
    pack_pair_u64(pk, "lookup_accepted", s->n_lookup_accepted);
    pack_pair_real(pk, "draft_ms", (double)s->draft_ns / 1e6);
    pack_pair_real(pk, "verify_ms", (double)s->verify_ns / 1e6);
    pack_pair_u64(pk, "page_rollbacks", s->n_page_rollbacks);
    if (no_draft != ENGINE_DRAFT_OK) pack_pair_str(pk, "no_draft", engine_no_draft_name(no_draft));
}

/* ---- sparsity ---- */

static void pack_keep(msgpack_packer *pk, const struct target_settings *s) {
    rpc_pack_str(pk, "keep");
    if (s->keep_blocks > 0) msgpack_pack_nil(pk);
    else if (s->keep == TARGET_CURVE) rpc_pack_str(pk, "curve");
    else rpc_pack_real(pk, s->keep);
    rpc_pack_str(pk, "keep_blocks");
    if (s->keep_blocks > 0) msgpack_pack_int(pk, s->keep_blocks);
    else msgpack_pack_nil(pk);
}

/* Three pairs of a map. */
static void pack_lists(msgpack_packer *pk, const struct target_settings *s) {
    pack_pair_str(pk, "lists", target_lists_name(s->lists));
    pack_pair_int(pk, "select2", s->select2);
    pack_pair_int(pk, "quarters", s->quarters);
}

static void pack_reselect(msgpack_packer *pk, const struct target_settings *s) {
    const char *name = target_reselect_name(s->reselect);
    if (name) pack_pair_str(pk, "reselect", name);
    else pack_pair_int(pk, "reselect", s->reselect);
    pack_pair_str(pk, "reselector", target_selector_name(s->reselector));
}

static double per_pass(const struct engine_exact *x) {
    return x->n_passes > 0 ? (double)x->n_tokens / (double)x->n_passes : 0;
}

/* Five pairs of a map. */
static void pack_exact(msgpack_packer *pk, const struct engine_exact *x) {
    pack_pair_u64(pk, "passes", x->n_passes);
    pack_pair_u64(pk, "provisional", x->n_provisional);
    pack_pair_u64(pk, "accepted", x->n_accepted);
    pack_pair_u64(pk, "tokens", x->n_tokens);
    pack_pair_real(pk, "tokens_per_pass", per_pass(x));
}

/* Four pairs of a map. */
static void pack_prefill(msgpack_packer *pk, const struct engine_prefill *p) {
    pack_pair_u64(pk, "blocks", p->n_blocks);
    pack_pair_u64(pk, "kept", p->n_kept);
    pack_pair_u64(pk, "kv_bytes", p->kv_bytes);
    pack_pair_u64(pk, "kv_dense_bytes", p->kv_dense_bytes);
}

static void pack_own_prefill(msgpack_packer *pk, const struct engine_sparsity *s) {
    rpc_pack_str(pk, "prefill");
    if (s->settings.prefill != TARGET_PREFILL_SPARSE) {
        msgpack_pack_nil(pk);
        return;
    }
    msgpack_pack_map(pk, 7);
    pack_pair_int(pk, "dense", s->settings.prefill_dense);
    pack_pair_int(pk, "chunk", s->settings.prefill_chunk);
    pack_pair_u64(pk, "selections", s->prefill.n_selections);
    pack_prefill(pk, &s->prefill);
}

void describe__sparsity(const struct engine_sparsity *s, msgpack_packer *pk) {
    bool off = s->settings.selector == TARGET_OFF;
    msgpack_pack_map(pk, off ? 1 : 25);
    pack_pair_str(pk, "selector", target_selector_name(s->settings.selector));
    if (off) return;
    pack_keep(pk, &s->settings);
    pack_pair_int(pk, "selections", s->n_selections);
    pack_pair_int(pk, "blocks", s->n_blocks);
    pack_pair_int(pk, "kept", s->n_kept);
    pack_pair_int(pk, "first_kept", s->n_kept_first);
    pack_lists(pk, &s->settings);
    pack_pair_int(pk, "n_lists", s->n_lists);
    pack_pair_int(pk, "union", s->n_union);
    pack_reselect(pk, &s->settings);
    pack_pair_str(pk, "recheck", target_recheck_name(s->settings.recheck));
    pack_pair_real(pk, "drop", s->settings.drop);
    pack_pair_int(pk, "dropped", s->n_dropped);
    pack_pair_int(pk, "wide", s->n_wide);
    pack_pair_int(pk, "cut", s->n_cut);
    pack_pair_real(pk, "select_ms", (double)s->select_ns / 1e6);
    pack_pair_u64(pk, "kv_shallow_bytes", s->kv_shallow_bytes);
    pack_pair_u64(pk, "kv_deep_bytes", s->kv_deep_bytes);
    pack_pair_u64(pk, "kv_dense_bytes", s->kv_dense_bytes);
    pack_own_prefill(pk, s);
    rpc_pack_str(pk, "exact");
    if (s->settings.exact == 0) {
        msgpack_pack_nil(pk);
        return;
    }
    msgpack_pack_map(pk, 6);
    pack_pair_int(pk, "limit", s->settings.exact);
    pack_exact(pk, &s->exact);
}

/* What a request gets that names nothing of it. */
static void pack_sparsity_defaults(const struct server *s, msgpack_packer *pk) {
    const struct target_settings all = engine_sparse_defaults(s->engine);
    msgpack_pack_map(pk, 20);
    pack_pair_str(pk, "selector", target_selector_name(all.selector));
    pack_keep(pk, &all);
    pack_pair_int(pk, "min_blocks", all.min_blocks);
    pack_pair_int(pk, "window_blocks", all.window_blocks);
    pack_pair_real(pk, "reserve", all.reserve);
    rpc_pack_str(pk, "keep_threshold");
    if (all.threshold == TARGET_NO_THRESHOLD) msgpack_pack_nil(pk);
    else rpc_pack_real(pk, all.threshold);
    pack_pair_real(pk, "smooth", all.smooth);
    pack_reselect(pk, &all);
    pack_pair_real(pk, "surprise", all.surprise);
    pack_pair_str(pk, "recheck", target_recheck_name(all.recheck));
    pack_pair_real(pk, "drop", all.drop);
    pack_pair_int(pk, "exact", all.exact);
    pack_pair_str(pk, "prefill", target_prefill_name(all.prefill));
    pack_pair_int(pk, "prefill_dense", all.prefill_dense);
    pack_pair_int(pk, "prefill_chunk", all.prefill_chunk);
    pack_lists(pk, &all);
}

/* ---- stats ---- */

static void pack_histogram(msgpack_packer *pk, const char *name, const struct engine_histogram *h) {
    int n = 0;
    for (int i = 0; i < ENGINE_N_BUCKETS - 1; i++) n += h->bound[i] < 1e300;
    rpc_pack_str(pk, name);
    msgpack_pack_map(pk, 3);
    pack_pair_u64(pk, "count", h->n);
    pack_pair_real(pk, "sum", h->sum);
    rpc_pack_str(pk, "buckets"); /* [upper bound in seconds, count up to it] */
    msgpack_pack_array(pk, (size_t)n);
    for (int i = 0; i < ENGINE_N_BUCKETS - 1; i++) {
        if (!(h->bound[i] < 1e300)) continue;
        msgpack_pack_array(pk, 2);
        rpc_pack_real(pk, h->bound[i]);
        msgpack_pack_uint64(pk, h->count[i]);
    }
}

static void pack_pool(msgpack_packer *pk, const struct kvpool_stats *p) {
    int n = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) n += p->of[c].page_bytes > 0;
    msgpack_pack_map(pk, 11);
    pack_pair_u64(pk, "arena_bytes", p->arena_bytes);
    pack_pair_int(pk, "block_tokens", KVPOOL_BLOCK);
    pack_pair_int(pk, "extents", p->n_extents);
    pack_pair_int(pk, "extents_free", p->n_extents_free);
    pack_pair_int(pk, "sequences", p->n_seqs);
    pack_pair_int(pk, "cached_nodes", p->n_cached_nodes);
    pack_pair_int(pk, "prefix_lookups", p->n_lookups);
    pack_pair_int(pk, "prefix_lookup_tokens", p->n_lookup_tokens);
    pack_pair_int(pk, "prefix_hit_tokens", p->n_hit_tokens);
    pack_pair_int(pk, "prefix_evicted", p->n_evicted);
    rpc_pack_str(pk, "classes");
    msgpack_pack_map(pk, (size_t)n);
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        const struct kvpool_class_stats *k = &p->of[c];
        if (k->page_bytes == 0) continue;
        rpc_pack_str(pk, kvpool_class_name((enum kvpool_class)c));
        msgpack_pack_map(pk, 6);
        pack_pair_u64(pk, "page_bytes", k->page_bytes);
        pack_pair_int(pk, "total", k->total);
        pack_pair_int(pk, "free", k->free);
        pack_pair_int(pk, "used", k->used);
        pack_pair_int(pk, "cached", k->cached);
        pack_pair_int(pk, "reserved", k->reserved);
    }
}

void describe__stats(struct server *s, msgpack_packer *pk) {
    struct engine_stats st;
    engine_get_stats(s->engine, &st);
    msgpack_pack_map(pk, 27);
    pack_pair_int(pk, "running", st.n_running);
    pack_pair_int(pk, "waiting", st.n_waiting);
    pack_pair_int(pk, "paused", st.n_paused);
    pack_pair_u64(pk, "requests", st.n_requests);
    rpc_pack_str(pk, "finished");
    msgpack_pack_map(pk, ENGINE_ABORTED - ENGINE_STOP + 1);
    for (int f = ENGINE_STOP; f <= ENGINE_ABORTED; f++)
        pack_pair_u64(pk, engine_finish_name((enum engine_finish)f), st.n_finished[f]);
    pack_pair_u64(pk, "prompt_tokens", st.n_prompt_tokens);
    pack_pair_u64(pk, "generated_tokens", st.n_generated_tokens);
    pack_pair_u64(pk, "cached_prompt_tokens", st.n_cached_prompt_tokens);
    pack_pair_u64(pk, "steps", st.n_steps);
    pack_pair_u64(pk, "rows", st.n_rows);
    pack_pair_u64(pk, "kv_bytes_read", st.kv_bytes_read);
    pack_pair_u64(pk, "kv_shallow_bytes_read", st.kv_shallow_bytes_read);
    pack_pair_u64(pk, "kv_deep_bytes_read", st.kv_deep_bytes_read);
    rpc_pack_str(pk, "sparsity");
    msgpack_pack_map(pk, 10);
    pack_pair_u64(pk, "requests", st.n_sparse_requests);
    pack_pair_u64(pk, "selections", st.n_selections);
    pack_pair_u64(pk, "blocks", st.n_blocks_selected);
    pack_pair_u64(pk, "kept", st.n_blocks_kept);
    pack_pair_u64(pk, "reselections", st.n_reselections);
    pack_pair_u64(pk, "wide", st.n_wide);
    pack_pair_u64(pk, "cut", st.n_cut);
    pack_pair_real(pk, "select_seconds", st.select_seconds);
    rpc_pack_str(pk, "prefill");
    msgpack_pack_map(pk, 5);
    pack_pair_u64(pk, "selections", st.prefill.n_selections);
    pack_prefill(pk, &st.prefill);
    rpc_pack_str(pk, "exact");
    msgpack_pack_map(pk, 5);
    pack_exact(pk, &st.exact);
    pack_pair_real(pk, "step_seconds", st.step_seconds);
    pack_pair_real(pk, "overhead_seconds", st.overhead_seconds);
    rpc_pack_str(pk, "speculation");
    describe__speculation(&st.speculation, ENGINE_DRAFT_OK, pk);
    pack_pair_u64(pk, "draft_starved", st.n_draft_starved);
    pack_pair_real(pk, "uptime_seconds", st.uptime_seconds);
    pack_pair_u64(pk, "resident_bytes", st.resident_bytes);
    pack_histogram(pk, "ttft_seconds", &st.ttft);
    pack_histogram(pk, "itl_seconds", &st.itl);
    pack_histogram(pk, "e2e_seconds", &st.e2e);
    pack_histogram(pk, "commit_to_socket_seconds", &s->counters.delivery);
    rpc_pack_str(pk, "pool");
    pack_pool(pk, &st.pool);
    rpc_pack_str(pk, "server");
    const struct server_counters *n = &s->counters;
    msgpack_pack_map(pk, 10);
    pack_pair_int(pk, "connections", s->n_connections);
    pack_pair_u64(pk, "accepted", n->n_accepted);
    pack_pair_u64(pk, "refused", n->n_refused);
    pack_pair_u64(pk, "bad_frames", n->n_bad_frames);
    pack_pair_u64(pk, "bad_requests", n->n_bad_requests);
    pack_pair_u64(pk, "unauthorised", n->n_unauthorised);
    pack_pair_u64(pk, "paused_readers", n->n_paused);
    pack_pair_u64(pk, "closed_readers", n->n_stalled);
    pack_pair_u64(pk, "bytes_in", n->bytes_in);
    pack_pair_u64(pk, "bytes_out", n->bytes_out);
    rpc_pack_str(pk, "draining");
    rpc_pack_bool(pk, s->draining);
}

/* ---- memory, plan ---- */

void describe__plan(const struct plan *p, msgpack_packer *pk) {
    msgpack_pack_map(pk, 13);
    rpc_pack_str(pk, "fits");
    rpc_pack_bool(pk, p->fits);
    rpc_pack_str(pk, "lines");
    msgpack_pack_array(pk, (size_t)p->n_lines);
    for (int i = 0; i < p->n_lines; i++) {
        msgpack_pack_map(pk, 4);
        pack_pair_str(pk, "name", p->lines[i].name);
        pack_pair_u64(pk, "bytes", p->lines[i].bytes);
        pack_pair_str(pk, "place",
                      p->lines[i].place == PLAN_DEVICE && !p->device_is_host ? "device" : "host");
        pack_pair_str(pk, "note", p->lines[i].note);
    }
    pack_pair_u64(pk, "device_bytes", p->device_bytes);
    pack_pair_u64(pk, "host_bytes", p->host_bytes);
    pack_pair_u64(pk, "budget_bytes", p->budget_bytes);
    pack_pair_u64(pk, "arena_bytes", p->pool.arena_bytes);
    pack_pair_int(pk, "context", p->context);
    pack_pair_int(pk, "max_seqs", p->pool.max_seqs);
    pack_pair_int(pk, "tokens_fit", p->tokens_fit);
    pack_pair_int(pk, "largest_context", p->largest_context);
    pack_pair_int(pk, "context_for_all", p->context_for_all);
    pack_pair_int(pk, "seqs_at_context", p->seqs_at_context);
    rpc_pack_str(pk, "advice");
    msgpack_pack_array(pk, (size_t)p->n_advice);
    for (int i = 0; i < p->n_advice; i++) rpc_pack_text(pk, p->advice[i], strlen(p->advice[i]));
}

void describe__memory(struct server *s, msgpack_packer *pk) {
    struct engine_stats st;
    engine_get_stats(s->engine, &st);
    msgpack_pack_map(pk, 3);
    rpc_pack_str(pk, "plan");
    describe__plan(engine_get_plan(s->engine), pk);
    pack_pair_u64(pk, "resident_bytes", st.resident_bytes);
    rpc_pack_str(pk, "pool");
    pack_pool(pk, &st.pool);
}
