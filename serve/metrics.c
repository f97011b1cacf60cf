/* Prometheus text over a very small HTTP: GET /metrics and GET /health, one answer a connection.
 * Names are vLLM's where the meaning is the same, so that its dashboards work; our own begin with
 * tandem_. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "serve/serve_private.h"

enum { MAX_CLIENTS = 16, MAX_REQUEST = 8192, CLIENT_MS = 5000 };

struct http_client {
    struct http_client *next;
    struct server *server;
    uv_tcp_t tcp;
    uv_timer_t timeout;
    uv_write_t write;
    int n_open; /* handles not closed yet */
    bool answered;
    size_t n_in;
    char in[MAX_REQUEST];
    struct strbuf out;
};

/* ---- Text ---- */

static void head(struct strbuf *b, const char *name, const char *type, const char *help) {
    strbuf_printf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* model_name="...", with the three characters escaped that the format names. */
static void label(struct strbuf *b, const char *model) {
    strbuf_append_str(b, "model_name=\"");
    for (; *model; model++) {
        if (*model == '\\' || *model == '"') strbuf_append_char(b, '\\');
        if (*model == '\n') strbuf_append_str(b, "\\n");
        else strbuf_append_char(b, *model);
    }
    strbuf_append_char(b, '"');
}

static void one(struct strbuf *b, const char *model, const char *name, const char *type,
                const char *help, double value) {
    head(b, name, type, help);
    strbuf_append_str(b, name);
    strbuf_append_char(b, '{');
    label(b, model);
    strbuf_printf(b, "} %.17g\n", value);
}

static void histogram(struct strbuf *b, const char *model, const char *name, const char *help,
                      const struct engine_histogram *h) {
    head(b, name, "histogram", help);
    for (int i = 0; i < ENGINE_N_BUCKETS; i++) {
        if (i + 1 < ENGINE_N_BUCKETS && !(h->bound[i] < 1e300)) continue; /* unused tail */
        strbuf_printf(b, "%s_bucket{", name);
        label(b, model);
        if (i + 1 == ENGINE_N_BUCKETS) strbuf_printf(b, ",le=\"+Inf\"} %" PRIu64 "\n", h->n);
        else strbuf_printf(b, ",le=\"%g\"} %" PRIu64 "\n", h->bound[i], h->count[i]);
    }
    strbuf_printf(b, "%s_sum{", name);
    label(b, model);
    strbuf_printf(b, "} %.17g\n%s_count{", h->sum, name);
    label(b, model);
    strbuf_printf(b, "} %" PRIu64 "\n", h->n);
}

static void finished(struct strbuf *b, const char *model, const struct engine_stats *st) {
    static const char name[] = "vllm:request_success_total";
    head(b, name, "counter", "Requests that ended, by reason.");
    for (int f = ENGINE_STOP; f <= ENGINE_ABORTED; f++) {
        strbuf_printf(b, "%s{", name);
        label(b, model);
        strbuf_printf(b, ",finished_reason=\"%s\"} %" PRIu64 "\n",
                      engine_finish_name((enum engine_finish)f), st->n_finished[f]);
    }
}

/* Pages that hold something, by bytes over all classes. */
static double pool_usage(const struct kvpool_stats *p) {
    double used = 0;
    for (int c = 0; c < KVPOOL_N_CLASSES; c++)
        used += (double)p->of[c].used * (double)p->of[c].page_bytes;
    return p->arena_bytes ? used / (double)p->arena_bytes : 0;
}

static void pool_pages(struct strbuf *b, const struct kvpool_stats *p) {
    static const char *const states[] = {"free", "used", "cached", "reserved"};
    head(b, "tandem_pool_pages", "gauge", "KV pages by class and state.");
    for (int c = 0; c < KVPOOL_N_CLASSES; c++) {
        if (p->of[c].page_bytes == 0) continue;
        const int n[] = {p->of[c].free, p->of[c].used, p->of[c].cached, p->of[c].reserved};
        for (int i = 0; i < 4; i++)
            strbuf_printf(b, "tandem_pool_pages{class=\"%s\",state=\"%s\"} %d\n",
                          kvpool_class_name((enum kvpool_class)c), states[i], n[i]);
    }
}

static void by_position(struct strbuf *b, const char *model, const char *name, const char *help,
                        const uint64_t *at) {
    head(b, name, "counter", help);
    for (int i = 0; i < KERN_MAX_DRAFT; i++) {
        strbuf_printf(b, "%s{", name);
        label(b, model);
        strbuf_printf(b, ",position=\"%d\"} %" PRIu64 "\n", i, at[i]);
    }
}

/* vLLM has the first four, by these names and meanings; its rounds have one length, ours do not,
 * hence a count of draft tokens by position too: accepted / drafted is the rate there. */
static void speculation(struct strbuf *b, const char *m, const struct engine_stats *st) {
    const struct engine_speculation *s = &st->speculation;
    one(b, m, "vllm:spec_decode_num_drafts_total", "counter", "Rounds with draft tokens.",
        (double)s->n_rounds);
    one(b, m, "vllm:spec_decode_num_draft_tokens_total", "counter", "Draft tokens proposed.",
        (double)s->n_drafted);
    one(b, m, "vllm:spec_decode_num_accepted_tokens_total", "counter", "Of these, emitted.",
        (double)s->n_accepted);
    by_position(b, m, "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "Emitted draft tokens by their place in the round, from 0.", s->n_accepted_at);
    by_position(b, m, "tandem_spec_draft_tokens_per_pos_total",
                "Draft tokens proposed by their place in the round, from 0.", s->n_drafted_at);
    one(b, m, "tandem_spec_plain_rounds_total", "counter",
        "Passes of the target for one token of a request, without draft tokens.",
        (double)s->n_plain_rounds);
    one(b, m, "tandem_spec_lookup_draft_tokens_total", "counter",
        "Draft tokens that prompt lookup proposed.", (double)s->n_lookup_drafted);
    one(b, m, "tandem_spec_lookup_accepted_tokens_total", "counter", "Of these, emitted.",
        (double)s->n_lookup_accepted);
    one(b, m, "tandem_spec_page_rollbacks_total", "counter",
        "Rejections that gave whole KV pages back.", (double)s->n_page_rollbacks);
    one(b, m, "tandem_spec_draft_starved_total", "counter",
        "Requests that went on without a draft for want of memory.", (double)st->n_draft_starved);
    one(b, m, "tandem_spec_draft_seconds_total", "counter", "Time in passes of the draft model.",
        (double)s->draft_ns / 1e9);
    one(b, m, "tandem_spec_verify_seconds_total", "counter",
        "Time in the target's passes that verified.", (double)s->verify_ns / 1e9);
}

static void sparsity(struct strbuf *b, const char *m, const struct engine_stats *st) {
    one(b, m, "tandem_kv_read_shallow_bytes_total", "counter",
        "Of the KV bytes read, those of shallow layers.", (double)st->kv_shallow_bytes_read);
    one(b, m, "tandem_kv_read_deep_bytes_total", "counter",
        "Of the KV bytes read, those of deep layers, which read selected blocks.",
        (double)st->kv_deep_bytes_read);
    one(b, m, "tandem_sparse_requests_total", "counter",
        "Requests whose deep layers left blocks out.", (double)st->n_sparse_requests);
    one(b, m, "tandem_sparse_selections_total", "counter", "Lists of blocks made.",
        (double)st->n_selections);
    one(b, m, "tandem_sparse_blocks_total", "counter", "Blocks that selections chose from.",
        (double)st->n_blocks_selected);
    one(b, m, "tandem_sparse_kept_blocks_total", "counter", "Of these, kept.",
        (double)st->n_blocks_kept);
    one(b, m, "tandem_sparse_reselections_total", "counter",
        "Of the lists, those made inside an answer.", (double)st->n_reselections);
    one(b, m, "tandem_sparse_surprises_total", "counter",
        "Of the lists, those made wider by surprise.", (double)st->n_wide);
    one(b, m, "tandem_sparse_cut_tokens_total", "counter",
        "Verified tokens drawn anew because a new list began before them.", (double)st->n_cut);
    one(b, m, "tandem_sparse_prefill_selections_total", "counter",
        "Lists of blocks made for chunks of prompts.", (double)st->prefill.n_selections);
    one(b, m, "tandem_sparse_prefill_blocks_total", "counter", "Blocks that they chose from.",
        (double)st->prefill.n_blocks);
    one(b, m, "tandem_sparse_prefill_kept_blocks_total", "counter", "Of these, kept.",
        (double)st->prefill.n_kept);
    one(b, m, "tandem_sparse_prefill_kv_bytes_total", "counter",
        "KV bytes of the positions that rows of sparsely computed prompts saw, row by row.",
        (double)st->prefill.kv_bytes);
    one(b, m, "tandem_sparse_prefill_kv_dense_bytes_total", "counter",
        "The same, had no list left anything out.", (double)st->prefill.kv_dense_bytes);
    one(b, m, "tandem_exact_passes_total", "counter",
        "Dense passes that verified exact answers' provisional tokens.",
        (double)st->exact.n_passes);
    one(b, m, "tandem_exact_provisional_tokens_total", "counter",
        "Tokens of sparse rounds that dense passes verified.", (double)st->exact.n_provisional);
    one(b, m, "tandem_exact_accepted_tokens_total", "counter", "Of these, emitted.",
        (double)st->exact.n_accepted);
    one(b, m, "tandem_exact_tokens_total", "counter",
        "Tokens that such passes emitted, their own included.", (double)st->exact.n_tokens);
    one(b, m, "tandem_sparse_select_seconds_total", "counter", "Time spent scoring and selecting.",
        st->select_seconds);
}

static void append_text(struct server *s, struct strbuf *b) {
    struct engine_stats st;
    const char *m = engine_model_name(s->engine);
    engine_get_stats(s->engine, &st);
    one(b, m, "vllm:num_requests_running", "gauge", "Requests in the batch.", st.n_running);
    one(b, m, "vllm:num_requests_waiting", "gauge", "Requests waiting for admission.",
        st.n_waiting);
    one(b, m, "vllm:kv_cache_usage_perc", "gauge", "Share of the KV pool in use, 1 is full.",
        pool_usage(&st.pool));
    one(b, m, "vllm:prompt_tokens_total", "counter", "Prompt tokens taken.",
        (double)st.n_prompt_tokens);
    one(b, m, "vllm:generation_tokens_total", "counter", "Tokens committed.",
        (double)st.n_generated_tokens);
    finished(b, m, &st);
    histogram(b, m, "vllm:time_to_first_token_seconds", "From submission to the first token.",
              &st.ttft);
    histogram(b, m, "vllm:inter_token_latency_seconds", "Between two tokens of a request.",
              &st.itl);
    histogram(b, m, "vllm:e2e_request_latency_seconds", "From submission to the end.", &st.e2e);
    histogram(b, m, "tandem_commit_to_socket_seconds",
              "From a token's commit until its bytes are with the kernel.", &s->counters.delivery);
    one(b, m, "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up.",
        (double)st.pool.n_lookup_tokens);
    one(b, m, "vllm:prefix_cache_hits_total", "counter", "Of these, found.",
        (double)st.pool.n_hit_tokens);

    const struct server_counters *n = &s->counters;
    one(b, m, "tandem_requests_paused", "gauge", "Requests held for a slow reader.", st.n_paused);
    one(b, m, "tandem_steps_total", "counter", "Passes through the model.", (double)st.n_steps);
    one(b, m, "tandem_rows_total", "counter", "Rows in these passes.", (double)st.n_rows);
    one(b, m, "tandem_step_seconds_total", "counter", "Time spent in passes.", st.step_seconds);
    one(b, m, "tandem_step_overhead_seconds_total", "counter",
        "Of these, outside the backend's operations.", st.overhead_seconds);
    speculation(b, m, &st);
    one(b, m, "tandem_kv_read_bytes_total", "counter", "KV bytes that attention read.",
        (double)st.kv_bytes_read);
    sparsity(b, m, &st);
    one(b, m, "tandem_resident_bytes", "gauge", "Resident memory of the process.",
        (double)st.resident_bytes);
    one(b, m, "tandem_uptime_seconds", "gauge", "Since the engine opened.", st.uptime_seconds);
    one(b, m, "tandem_prefix_evictions_total", "counter", "Cached pages forgotten.",
        (double)st.pool.n_evicted);
    pool_pages(b, &st.pool);
    one(b, m, "tandem_connections", "gauge", "Open connections.", s->n_connections);
    one(b, m, "tandem_connections_total", "counter", "Connections accepted.",
        (double)n->n_accepted);
    one(b, m, "tandem_connections_refused_total", "counter", "Closed at once: too many.",
        (double)n->n_refused);
    one(b, m, "tandem_bad_frames_total", "counter", "Connections closed for unreadable bytes.",
        (double)n->n_bad_frames);
    one(b, m, "tandem_bad_requests_total", "counter", "Requests answered with an error.",
        (double)n->n_bad_requests);
    one(b, m, "tandem_unauthorised_total", "counter", "Requests without the right token.",
        (double)n->n_unauthorised);
    one(b, m, "tandem_slow_readers_paused_total", "counter",
        "Times a connection met the high mark.", (double)n->n_paused);
    one(b, m, "tandem_slow_readers_closed_total", "counter", "Connections closed for not reading.",
        (double)n->n_stalled);
    one(b, m, "tandem_received_bytes_total", "counter", "Bytes from clients.", (double)n->bytes_in);
    one(b, m, "tandem_sent_bytes_total", "counter", "Bytes to clients.", (double)n->bytes_out);
    one(b, m, "tandem_draining", "gauge", "1 while the server takes no new work.", s->draining);
}

/* ---- HTTP ---- */

static void on_closed(uv_handle_t *h) {
    struct http_client *k = h->data;
    if (--k->n_open > 0) return;
    struct http_client **at = &k->server->http_clients;
    while (*at != k) at = &(*at)->next;
    *at = k->next;
    k->server->n_http_clients--;
    strbuf_deinit(&k->out);
    free(k);
}

static void hang_up(struct http_client *k) {
    if (uv_is_closing((uv_handle_t *)&k->tcp)) return;
    uv_close((uv_handle_t *)&k->tcp, on_closed);
    uv_close((uv_handle_t *)&k->timeout, on_closed);
}

static void on_written(uv_write_t *req, int status) {
    (void)status;
    hang_up(req->handle->data);
}

static void answer(struct http_client *k) {
    struct strbuf body = {0};
    const char *status = "200 OK", *type = "text/plain; charset=utf-8";
    bool is_head = strncmp(k->in, "HEAD ", 5) == 0;
    const char *path = is_head ? k->in + 5 : k->in + 4;
    size_t n = strcspn(path, " ?\r\n");
    k->answered = true;
    if (!is_head && strncmp(k->in, "GET ", 4) != 0) {
        status = "405 Method Not Allowed";
        strbuf_append_str(&body, "GET only\n");
    } else if (n == 8 && memcmp(path, "/metrics", 8) == 0) {
        type = "text/plain; version=0.0.4; charset=utf-8";
        append_text(k->server, &body);
    } else if (n == 7 && memcmp(path, "/health", 7) == 0) {
        if (k->server->draining) status = "503 Service Unavailable";
        strbuf_append_str(&body, k->server->draining ? "draining\n" : "ok\n");
    } else {
        status = "404 Not Found";
        strbuf_append_str(&body, "/metrics and /health are here\n");
    }
    strbuf_printf(&k->out,
                  "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
                  "Connection: close\r\n\r\n",
                  status, type, body.n);
    if (!is_head) strbuf_append(&k->out, body.data, body.n);
    bool failed = body.failed || k->out.failed;
    strbuf_deinit(&body);
    uv_buf_t buf = uv_buf_init(k->out.data, (unsigned)k->out.n);
    if (failed || uv_write(&k->write, (uv_stream_t *)&k->tcp, &buf, 1, on_written) < 0) hang_up(k);
}

static void on_alloc(uv_handle_t *h, size_t hint, uv_buf_t *buf) {
    struct http_client *k = h->data;
    (void)hint;
    *buf = uv_buf_init(k->in + k->n_in, (unsigned)(MAX_REQUEST - 1 - k->n_in));
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
    struct http_client *k = stream->data;
    (void)buf;
    if (n < 0) { /* also UV_ENOBUFS: a request without an end */
        hang_up(k);
        return;
    }
    k->n_in += (size_t)n;
    k->in[k->n_in] = 0;
    if (strstr(k->in, "\r\n\r\n") || strstr(k->in, "\n\n")) {
        uv_read_stop(stream);
        if (!k->answered) answer(k);
    }
}

static void on_timeout(uv_timer_t *t) {
    hang_up(t->data);
}

void metrics__accept(uv_stream_t *listener, int status) {
    struct server *s = ((struct listener *)listener->data)->server;
    if (status < 0) return;
    struct http_client *k = calloc(1, sizeof *k);
    if (!k) return;
    k->server = s;
    uv_tcp_init(&s->loop, &k->tcp);
    uv_timer_init(&s->loop, &k->timeout);
    k->tcp.data = k->timeout.data = k;
    k->n_open = 2;
    k->next = s->http_clients;
    s->http_clients = k;
    s->n_http_clients++;
    if (uv_accept(listener, (uv_stream_t *)&k->tcp) < 0 || s->n_http_clients > MAX_CLIENTS ||
        uv_timer_start(&k->timeout, on_timeout, CLIENT_MS, 0) < 0 ||
        uv_read_start((uv_stream_t *)&k->tcp, on_alloc, on_read) < 0)
        hang_up(k);
}

void metrics__close_all(struct server *s) {
    for (struct http_client *k = s->http_clients; k; k = k->next) hang_up(k);
}
