#include "tests/watched_kern.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "tests/watched_call.h"
#include "tests/watched_lists.h"

enum {
    MAX_KEYS = 96,   /* as many as the CUDA backend keeps */
    MAX_CALLS = 128, /* of a recording */
    MAX_COPIES = 64, /* between two syncs */
    MAX_PINNED = 8,
    COPY_BYTES = 8 << 20,
};

struct watch watch;
static atomic_long fail_at;
static atomic_bool fail_late;

int __real_kern_cpu_open(struct kern **out, const struct kern_options *o, struct err *e);
int __wrap_kern_cpu_open(struct kern **out, const struct kern_options *o, struct err *e);

static const struct kern_ops *real;
static struct kern_ops table;

void watch_problem(const char *fmt, ...) {
    va_list ap;
    if (watch.problem[0]) return;
    va_start(ap, fmt);
    vsnprintf(watch.problem, sizeof watch.problem, fmt, ap);
    va_end(ap);
}

/* ---- Failing ---- */

enum state { WORKS, FAILS, LOST }; /* LOST: nothing is done, and only the sync tells */

static enum state count_op(void) {
    long at = atomic_load(&fail_at), n = atomic_fetch_add(&watch.n_ops, 1) + 1;
    if (at == 0 || n < at) return WORKS;
    return atomic_load(&fail_late) ? LOST : FAILS;
}

static int lost(struct err *e) {
    return err_raise(e, E_DEVICE, "the watched device is gone");
}

void watch_fail(long n, bool late) {
    atomic_store(&fail_late, late);
    atomic_store(&fail_at, n ? atomic_load(&watch.n_ops) + n : 0);
}

/* ---- One operation as data ---- */

static int execute(struct kern *k, const struct call *c) {
    const void *const *in = c->in;
    void *const *out = c->out;
    switch (c->op) {
    case OP_EMBED:
        return real->embed(k, &c->weight, in[0], c->n[0], out[0]);
    case OP_NORM_PACK:
        return real->norm_pack(k, c->rows, c->n[0], out[0], in[0], in[1], c->f, c->act, out[1]);
    case OP_PACK:
        return real->pack(k, c->rows, c->n[0], in[0], c->act);
    case OP_GATE_PACK:
        return real->gate_pack(k, c->rows, c->n[0], in[0], c->act);
    case OP_MATMUL:
        return real->matmul(k, c->rows, &c->weight, c->act, out[0], c->n[0], c->n[1]);
    case OP_GATHER:
        return real->gather(k, in[0], c->n[0], in[1], c->n[1], out[0]);
    case OP_ROPE_KV:
        return real->rope_kv(k, &c->batch, &c->rope, c->n[0], out[0], &c->kv);
    case OP_ATTENTION:
        watch_lists(&c->batch, &c->lists, c->kv.n_kv_heads, out[0]);
        return real->attention(k, &c->batch, &c->lists, c->n[0], c->f, in[0], &c->kv, &c->taps,
                               out[0], out[1]);
    case OP_NOTE_STATES:
        return real->note_states(k, c->n[0], in[0], in[1], &c->plane, in[2], c->n[1], out[0]);
    case OP_SCORE:
        return real->score(k, &c->scorer, &c->view, out[0], out[1]);
    case OP_COPY_PAGE:
        return real->copy_page(k, out[0], in[0], c->size[0]);
    case OP_SAMPLE:
        return real->sample(k, c->n[0], c->n[1], in[0], in[1], c->size[0], in[2], &c->history,
                            out[0], out[1], out[2]);
    case OP_ACCEPT:
        return real->accept(k, c->n[0], c->n[1], in[0], c->size[0], in[1], &c->history, in[2],
                            in[3], &c->q, out[0], out[1], out[2]);
    case OP_ADVANCE:
        return real->advance(k, c->n[0], out[0], in[0], &c->next, out[1], out[2]);
    case OP_TALLY:
        return real->tally(k, c->n[0], in[0], in[1], in[2], in[3], out[0], c->size[0]);
    }
    return E_INVALID;
}

/* ---- Recordings ---- */

static struct recording {
    uint64_t key[KERN_RECORD_KEY];
    int n_uses, n_calls;
    struct call call[MAX_CALLS];
} recordings[MAX_KEYS];
static struct recording *open_recording;
static int n_at; /* calls since it was opened */
static uint64_t n_recorded, recorded_at[KERN_MAX_MARKS];
static bool waits[KERN_MAX_MARKS]; /* for a sync */

static struct recording *find(const uint64_t *key) {
    for (int i = 0; i < watch.n_keys; i++)
        if (!memcmp(recordings[i].key, key, sizeof recordings[i].key)) return &recordings[i];
    if (watch.n_keys == MAX_KEYS) return NULL;
    struct recording *r = &recordings[watch.n_keys++];
    memset(r, 0, sizeof *r);
    memcpy(r->key, key, sizeof r->key);
    return r;
}

static int record_begin(struct kern *k, const uint64_t key[KERN_RECORD_KEY], bool *replayed,
                        struct err *e) {
    enum state s = count_op();
    *replayed = false;
    if (open_recording) watch_problem("record_begin inside a recording");
    if (s == FAILS) return lost(e);
    struct recording *r = watch.records ? find(key) : NULL;
    if (!r) return 0;
    r->n_uses++;
    if (r->n_uses <= 2) {
        n_recorded += r->n_uses == 2;
        open_recording = r;
        n_at = 0;
        return 0;
    }
    *replayed = true;
    watch.n_replays++;
    int rc = 0;
    for (int i = 0; i < r->n_calls && !rc && s == WORKS; i++) rc = execute(k, &r->call[i]);
    return rc;
}

static int record_end(struct kern *k, struct err *e) {
    (void)k;
    if (count_op() == FAILS) return lost(e);
    struct recording *r = open_recording;
    if (r && n_at != r->n_calls)
        watch_problem("a recording of %d calls has now %d", r->n_calls, n_at);
    open_recording = NULL;
    return 0;
}

static void record(const struct call *c) {
    struct recording *r = open_recording;
    if (!r) return;
    if (n_at == MAX_CALLS) {
        watch_problem("more than %d calls in a recording", MAX_CALLS);
        return;
    }
    if (r->n_uses == 1) r->call[r->n_calls++] = *c;
    else if (n_at >= r->n_calls || memcmp(&r->call[n_at], c, sizeof *c) != 0)
        watch_problem(
            "call %d (operation %d) under key %llx %llu %llu %llu %llu %llu is not what it was",
            n_at, (int)c->op, (unsigned long long)r->key[0], (unsigned long long)r->key[1],
            (unsigned long long)r->key[2], (unsigned long long)r->key[3],
            (unsigned long long)r->key[4], (unsigned long long)r->key[5]);
    n_at++;
}

static int run(struct kern *k, const struct call *c) {
    enum state s = count_op();
    if (s == FAILS) return E_DEVICE;
    record(c);
    return s == LOST ? 0 : execute(k, c);
}

static void outside(const char *what) {
    if (open_recording) watch_problem("%s inside a recording", what);
}

/* ---- Operations ---- */

static struct call of(enum op op) {
    struct call c;
    memset(&c, 0, sizeof c);
    c.op = op;
    return c;
}

static int op_embed(struct kern *k, const struct kern_weight *w, const int32_t *token, int n,
                    float *x) {
    struct call c = of(OP_EMBED);
    copy_weight(&c.weight, w);
    c.in[0] = token;
    c.n[0] = n;
    c.out[0] = x;
    return run(k, &c);
}

static int op_norm_pack(struct kern *k, struct kern_rows rows, int cols, float *x,
                        const float *delta, const float *weight, float eps, struct kern_act act,
                        float *normed) {
    struct call c = of(OP_NORM_PACK);
    c.rows = rows;
    c.n[0] = cols;
    c.out[0] = x;
    c.in[0] = delta;
    c.in[1] = weight;
    c.f = eps;
    copy_act(&c.act, &act);
    c.out[1] = normed;
    return run(k, &c);
}

static int op_pack(struct kern *k, struct kern_rows rows, int cols, const float *x,
                   struct kern_act act) {
    struct call c = of(OP_PACK);
    c.rows = rows;
    c.n[0] = cols;
    c.in[0] = x;
    copy_act(&c.act, &act);
    return run(k, &c);
}

static int op_gate_pack(struct kern *k, struct kern_rows rows, int cols, const float *gate_up,
                        struct kern_act act) {
    struct call c = of(OP_GATE_PACK);
    c.rows = rows;
    c.n[0] = cols;
    c.in[0] = gate_up;
    copy_act(&c.act, &act);
    return run(k, &c);
}

static int op_matmul(struct kern *k, struct kern_rows rows, const struct kern_weight *w,
                     struct kern_act act, float *out, int out_stride, int out_offset) {
    struct call c = of(OP_MATMUL);
    c.rows = rows;
    copy_weight(&c.weight, w);
    copy_act(&c.act, &act);
    c.out[0] = out;
    c.n[0] = out_stride;
    c.n[1] = out_offset;
    return run(k, &c);
}

static int op_gather(struct kern *k, const float *x, int cols, const int32_t *row_idx, int n,
                     float *x_out) {
    struct call c = of(OP_GATHER);
    c.in[0] = x;
    c.n[0] = cols;
    c.in[1] = row_idx;
    c.n[1] = n;
    c.out[0] = x_out;
    return run(k, &c);
}

static int op_rope_kv(struct kern *k, const struct kern_batch *b, const struct kern_rope *rope,
                      int n_heads, float *qkv, const struct kern_kv *kv) {
    struct call c = of(OP_ROPE_KV);
    copy_batch(&c.batch, b);
    copy_rope(&c.rope, rope);
    c.n[0] = n_heads;
    c.out[0] = qkv;
    copy_kv(&c.kv, kv);
    return run(k, &c);
}

static int op_attention(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                        int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                        const struct kern_attn_taps *taps, void *scratch, float *out) {
    struct call c = of(OP_ATTENTION);
    copy_batch(&c.batch, b);
    copy_lists(&c.lists, lists);
    c.n[0] = n_heads;
    c.f = scale;
    c.in[0] = qkv;
    copy_kv(&c.kv, kv);
    if (taps) copy_taps(&c.taps, taps);
    c.out[0] = scratch;
    c.out[1] = out;
    return run(k, &c);
}

static int op_note_states(struct kern *k, int n, const struct kern_note *notes, const float *x,
                          const struct kern_plane *plane, const int32_t *page, int capacity,
                          float *ring) {
    struct call c = of(OP_NOTE_STATES);
    c.n[0] = n;
    c.n[1] = capacity;
    c.in[0] = notes;
    c.in[1] = x;
    copy_plane(&c.plane, plane);
    c.in[2] = page;
    c.out[0] = ring;
    return run(k, &c);
}

static int op_score(struct kern *k, const struct kern_scorer *s, const struct kern_score_view *v,
                    void *scratch, float *out) {
    struct call c = of(OP_SCORE);
    copy_scorer(&c.scorer, s);
    copy_view(&c.view, v);
    c.out[0] = scratch;
    c.out[1] = out;
    return run(k, &c);
}

static int op_copy_page(struct kern *k, void *dst, const void *src, size_t bytes) {
    struct call c = of(OP_COPY_PAGE);
    c.out[0] = dst;
    c.in[0] = src;
    c.size[0] = bytes;
    return run(k, &c);
}

static int op_sample(struct kern *k, int n_rows, int vocab, const int32_t *ids, const float *logits,
                     size_t stride, const struct kern_sample *params,
                     const struct kern_history *history, void *scratch, struct kern_sampled *out,
                     float *probs) {
    struct call c = of(OP_SAMPLE);
    c.n[0] = n_rows;
    c.n[1] = vocab;
    c.in[0] = ids;
    c.in[1] = logits;
    c.size[0] = stride;
    c.in[2] = params;
    copy_history(&c.history, history);
    c.out[0] = scratch;
    c.out[1] = out;
    c.out[2] = probs;
    return run(k, &c);
}

static int op_accept(struct kern *k, int n_rounds, int vocab, const float *logits, size_t stride,
                     const struct kern_sample *params, const struct kern_history *history,
                     const struct kern_round *rounds, const int32_t *draft,
                     const struct kern_draft_probs *q, void *scratch, int32_t *n_accepted,
                     struct kern_sampled *out) {
    struct call c = of(OP_ACCEPT);
    c.n[0] = n_rounds;
    c.n[1] = vocab;
    c.in[0] = logits;
    c.size[0] = stride;
    c.in[1] = params;
    copy_history(&c.history, history);
    c.in[2] = rounds;
    c.in[3] = draft;
    copy_q(&c.q, q);
    c.out[0] = scratch;
    c.out[1] = n_accepted;
    c.out[2] = out;
    return run(k, &c);
}

static int op_advance(struct kern *k, int n, struct kern_drawing *drawing,
                      const struct kern_sampled *out, const struct kern_next *next, int32_t *drawn,
                      int32_t *target) {
    struct call c = of(OP_ADVANCE);
    c.n[0] = n;
    c.out[0] = drawing;
    c.in[0] = out;
    copy_next(&c.next, next);
    c.out[1] = drawn;
    c.out[2] = target;
    return run(k, &c);
}

static int op_tally(struct kern *k, int n_rounds, const struct kern_round *rounds,
                    const struct kern_sample *params, const int32_t *n_accepted,
                    const struct kern_sampled *out, uint16_t *output, size_t stride) {
    struct call c = of(OP_TALLY);
    c.n[0] = n_rounds;
    c.in[0] = rounds;
    c.in[1] = params;
    c.in[2] = n_accepted;
    c.in[3] = out;
    c.out[0] = output;
    c.size[0] = stride;
    return run(k, &c);
}

/* ---- Memory ---- */

static struct {
    uint8_t *at;
    size_t bytes;
} pinned[MAX_PINNED];
static int n_pinned;

/* What waits for the sync: uploads' sources as they were, fetches' bytes as they will be. */
static struct {
    uint8_t *host;
    size_t bytes, at;
    bool fetch;
} copies[MAX_COPIES];
static int n_copies;
static long n_uploads;
static uint8_t copied[COPY_BYTES];
static size_t n_copied;

static bool is_pinned(const void *p, size_t bytes) {
    for (int i = 0; i < n_pinned; i++)
        if ((const uint8_t *)p >= pinned[i].at &&
            (const uint8_t *)p + bytes <= pinned[i].at + pinned[i].bytes)
            return true;
    return false;
}

static void keep(void *host, const void *bytes_of, size_t bytes, bool fetch) {
    if (n_copies == MAX_COPIES || n_copied + bytes > COPY_BYTES) {
        watch_problem("%d copies, %zu bytes between two syncs", n_copies, n_copied + bytes);
        return;
    }
    copies[n_copies].host = host;
    copies[n_copies].bytes = bytes;
    copies[n_copies].at = n_copied;
    copies[n_copies++].fetch = fetch;
    memcpy(copied + n_copied, bytes_of, bytes);
    n_copied += bytes;
}

static int op_host_reserve(struct kern *k, size_t bytes, void **out, struct err *e) {
    int rc = real->host_reserve(k, bytes, out, e);
    if (rc || n_pinned == MAX_PINNED) return rc;
    pinned[n_pinned].at = *out;
    pinned[n_pinned++].bytes = bytes;
    return 0;
}

static void op_host_unreserve(struct kern *k, void *p) {
    for (int i = 0; i < n_pinned; i++)
        if (pinned[i].at == p) pinned[i--] = pinned[--n_pinned];
    real->host_unreserve(k, p);
}

static int op_upload(struct kern *k, void *dst, const void *host, size_t bytes, struct err *e) {
    enum state s = count_op();
    outside("an upload");
    if (s == FAILS) return lost(e);
    atomic_fetch_add(&watch.n_uploads, 1);
    if (++n_uploads > watch.most_uploads) watch.most_uploads = n_uploads;
    if (is_pinned(host, bytes)) keep((void *)(uintptr_t)host, host, bytes, false);
    return s == LOST ? 0 : real->upload(k, dst, host, bytes, e);
}

static int op_fetch(struct kern *k, void *host, const void *src, size_t bytes, struct err *e) {
    (void)k;
    enum state s = count_op();
    outside("a fetch");
    if (s == FAILS) return lost(e);
    atomic_fetch_add(&watch.n_fetches, 1);
    if (!is_pinned(host, bytes)) watch_problem("a fetch to memory that is not pinned");
    keep(host, src, bytes, true);
    memset(host, 0xA5, bytes);
    return 0;
}

static int op_sync(struct kern *k, struct err *e) {
    (void)k;
    enum state s = count_op();
    outside("a sync");
    open_recording = NULL;
    if (s != WORKS) return lost(e);
    atomic_fetch_add(&watch.n_syncs, 1);
    for (int i = 0; i < n_copies; i++) {
        if (copies[i].fetch) memcpy(copies[i].host, copied + copies[i].at, copies[i].bytes);
        else if (memcmp(copies[i].host, copied + copies[i].at, copies[i].bytes) != 0)
            watch_problem("the source of upload %d (%zu bytes) changed before the sync", i,
                          copies[i].bytes);
    }
    memset(waits, 0, sizeof waits);
    n_copies = 0;
    n_copied = 0;
    n_uploads = 0;
    return 0;
}

static int op_download(struct kern *k, void *host, const void *src, size_t bytes, struct err *e) {
    enum state s = count_op();
    outside("a download");
    if (s != WORKS) return lost(e);
    atomic_fetch_add(&watch.n_downloads, 1);
    return real->download(k, host, src, bytes, e);
}

/* ---- Time ---- */

static int op_mark(struct kern *k, int i) {
    if (count_op() == FAILS) return E_DEVICE;
    outside("a mark");
    waits[i] = true;
    recorded_at[i] = n_recorded;
    return real->mark(k, i);
}

static int op_elapsed(struct kern *k, int from, int to, int64_t *ns) {
    if (waits[from] || waits[to])
        watch_problem("the time of marks %d and %d before a sync", from, to);
    int rc = real->elapsed(k, from, to, ns);
    if (recorded_at[from] != recorded_at[to]) *ns = 0;
    return rc;
}

/* ---- Opening ---- */

static void op_info(const struct kern *k, struct kern_device_info *out) {
    real->info(k, out);
    out->records = watch.records;
    if (watch.kv_types) out->kv_types = watch.kv_types;
}

void watch_reset(bool records) {
    watch_fail(0, false);
    watch.records = records;
    watch.kv_types = 0;
    watch.n_keys = watch.n_replays = watch.most_uploads = 0;
    atomic_store(&watch.n_ops, 0);
    atomic_store(&watch.n_syncs, 0);
    atomic_store(&watch.n_uploads, 0);
    atomic_store(&watch.n_fetches, 0);
    atomic_store(&watch.n_downloads, 0);
    watch.problem[0] = 0;
    watch_lists_reset();
    open_recording = NULL;
    n_copies = n_at = 0;
    n_copied = 0;
    n_uploads = 0;
}

int __wrap_kern_cpu_open(struct kern **out, const struct kern_options *o, struct err *e) {
    int rc = __real_kern_cpu_open(out, o, e);
    if (rc) return rc;
    watch.n_keys = 0; /* of another context */
    real = (*out)->ops;
    table = *real;
    table.info = op_info;
    table.host_reserve = op_host_reserve;
    table.host_unreserve = op_host_unreserve;
    table.upload = op_upload;
    table.download = op_download;
    table.fetch = op_fetch;
    table.sync = op_sync;
    table.record_begin = record_begin;
    table.record_end = record_end;
    table.mark = op_mark;
    table.elapsed = op_elapsed;
    table.embed = op_embed;
    table.norm_pack = op_norm_pack;
    table.pack = op_pack;
    table.gate_pack = op_gate_pack;
    table.matmul = op_matmul;
    table.gather = op_gather;
    table.rope_kv = op_rope_kv;
    table.attention = op_attention;
    table.note_states = op_note_states;
    table.score = op_score;
    table.copy_page = op_copy_page;
    table.sample = op_sample;
    table.accept = op_accept;
    table.advance = op_advance;
    table.tally = op_tally;
    (*out)->ops = &table;
    return 0;
}
