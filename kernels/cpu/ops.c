#include "kernels/cpu/context.h"

#include <string.h>

#include "base/err.h"

/* Every operation: arguments checked, then one threads_run over the table's inner function. Splits
 * are by rows or by output panels, never inside a sum, so the number of threads cannot change a
 * bit. */

static int n_rows(struct kern_rows r) {
    ASSERT(r.n_gen >= 0 && r.n_prompt >= 0 && r.n_gen + r.n_prompt <= KERN_MAX_ROWS);
    return r.n_gen + r.n_prompt;
}

static void check_cols(int cols) {
    ASSERT(cols > 0 && cols <= CPU_MAX_COLS);
}

/* A single unit is done by the caller: waking the team would cost more. */
static void run_units(const struct cpu_ctx *c, int n, threads_fn *fn, void *arg) {
    if (n <= 0) return;
    if (n == 1) fn(arg, 0, 1);
    else threads_run(c->threads, fn, arg);
}

/* ---- Memory -------------------------------------------------------------------------------- */

static int op_copy(struct kern *k, void *dst, const void *src, size_t bytes, struct err *e) {
    (void)k, (void)e;
    ASSERT((dst && src) || bytes == 0);
    if (bytes) memcpy(dst, src, bytes);
    return 0;
}

static int op_sync(struct kern *k, struct err *e) {
    (void)k, (void)e;
    return 0;
}

/* There is one memory and no launch: host memory is the device's, and nothing is recorded. */
static int op_record_begin(struct kern *k, const uint64_t key[KERN_RECORD_KEY], bool *replayed,
                           struct err *e) {
    (void)k, (void)key, (void)e;
    *replayed = false;
    return 0;
}

static int op_copy_page(struct kern *k, void *dst, const void *src, size_t bytes) {
    return op_copy(k, dst, src, bytes, NULL);
}

/* ---- Weights ------------------------------------------------------------------------------- */

static size_t op_weight_bytes(const struct kern *k, enum kern_dtype t, int rows, int cols) {
    ASSERT((unsigned)t < KERN_N_DTYPES);
    if (rows <= 0 || cols <= 0 || cols > CPU_MAX_COLS || cols % kern_dtype_block(t)) return 0;
    return cpu_ctx(k)->isa->matmul->weight_bytes(t, rows, cols);
}

struct weight_job {
    const struct cpu_matmul_isa *isa;
    const struct kern_weight *w;
    void *dst;
    const void *src;
};

static void weight_share(void *arg, int idx, int n_threads) {
    const struct weight_job *j = arg;
    int begin, end;
    threads_split(cpu_n_panels(j->isa, j->w), 1, idx, n_threads, &begin, &end);
    j->isa->weight_pack(j->w, j->dst, j->src, begin, end);
}

static int op_weight_pack(struct kern *k, struct kern_weight *out, void *dst, enum kern_dtype t,
                          int rows, int cols, const void *src, struct err *e) {
    struct cpu_ctx *c = (struct cpu_ctx *)k;
    ASSERT(out && dst && src && (uintptr_t)dst % KERN_ACT_ALIGN == 0);
    size_t bytes = op_weight_bytes(k, t, rows, cols);
    if (!bytes)
        return err_raise(e, E_UNSUPPORTED, "a matrix of %d x %d %s is not supported", rows, cols,
                         kern_dtype_name(t));
    *out =
        (struct kern_weight){.data = dst, .dtype = t, .rows = rows, .cols = cols, .bytes = bytes};
    struct weight_job j = {c->isa->matmul, out, dst, src};
    threads_run(c->threads, weight_share, &j);
    c->f32_weights |= t == KERN_F32;
    c->float_weights |= kern_dtype_block(t) == 1;
    return 0;
}

struct embed_job {
    const struct cpu_matmul_isa *isa;
    const struct kern_weight *w;
    const int32_t *token;
    int n;
    float *x;
};

static void embed_share(void *arg, int idx, int n_threads) {
    const struct embed_job *j = arg;
    int begin, end;
    threads_split(j->n, 1, idx, n_threads, &begin, &end);
    for (int r = begin; r < end; r++) {
        float *out = j->x + (size_t)r * (size_t)j->w->cols;
        if (j->token[r] >= 0 && j->token[r] < j->w->rows)
            j->isa->weight_row(j->w, j->token[r], out);
        else memset(out, 0, (size_t)j->w->cols * sizeof *out);
    }
}

static int op_embed(struct kern *k, const struct kern_weight *w, const int32_t *token, int n,
                    float *x) {
    const struct cpu_ctx *c = cpu_ctx(k);
    ASSERT(w && w->data && token && x && n >= 0 && n <= KERN_MAX_ROWS);
    struct embed_job j = {c->isa->matmul, w, token, n, x};
    run_units(c, n, embed_share, &j);
    return 0;
}

/* ---- Activations --------------------------------------------------------------------------- */

static size_t op_act_bytes(const struct kern *k, struct kern_rows rows, int cols) {
    const struct cpu_ctx *c = cpu_ctx(k);
    n_rows(rows);
    check_cols(cols);
    return c->isa->matmul->act_bytes(c, CPU_GEN, rows.n_gen, cols) +
           c->isa->matmul->act_bytes(c, CPU_PROMPT, rows.n_prompt, cols);
}

/* What the packing operations share: `make` gives row r as f32. */
struct pack_job {
    const struct cpu_ctx *c;
    struct kern_rows rows;
    int cols;
    uint8_t *gen, *prompt; /* the classes' parts */
    const float *in;       /* gate_pack: gate and up; pack: x */
    float *x;              /* norm_pack: in place */
    const float *delta, *weight;
    float eps;
    float *normed;
    enum { PACK_PLAIN, PACK_NORM, PACK_GATE } what;
};

static const float *pack_make_row(const struct pack_job *j, int r, float *scratch) {
    size_t cols = (size_t)j->cols, at = (size_t)r * cols;
    const struct cpu_rowwise_isa *rw = j->c->isa->rowwise;
    switch (j->what) {
    case PACK_NORM: {
        float *out = j->normed ? j->normed + at : scratch;
        rw->norm(j->x + at, j->delta ? j->delta + at : NULL, j->weight, j->eps, j->cols, out);
        return out;
    }
    case PACK_GATE:
        rw->gate(j->in + 2 * at, j->in + 2 * at + cols, j->cols, scratch);
        return scratch;
    case PACK_PLAIN:
        break;
    }
    return j->in + at;
}

static void pack_share(void *arg, int idx, int n_threads) {
    const struct pack_job *j = arg;
    const struct cpu_matmul_isa *mm = j->c->isa->matmul;
    int begin, end, n_gen = j->rows.n_gen;
    threads_split(n_gen + j->rows.n_prompt, 1, idx, n_threads, &begin, &end);
    for (int r = begin; r < end; r++) {
        const float *x = pack_make_row(j, r, j->c->matmul_scratch[idx]);
        if (r < n_gen) mm->act_row(j->c, CPU_GEN, j->gen, r, n_gen, j->cols, x);
        else mm->act_row(j->c, CPU_PROMPT, j->prompt, r - n_gen, j->rows.n_prompt, j->cols, x);
    }
}

static int pack_run(struct kern *k, struct pack_job *j, struct kern_act act) {
    const struct cpu_ctx *c = cpu_ctx(k);
    int n = n_rows(j->rows);
    if (n == 0) return 0;
    ASSERT(act.data && (uintptr_t)act.data % KERN_ACT_ALIGN == 0);
    ASSERT(op_act_bytes(k, j->rows, j->cols) <= act.bytes);
    j->c = c;
    j->gen = act.data;
    j->prompt = j->gen + c->isa->matmul->act_bytes(c, CPU_GEN, j->rows.n_gen, j->cols);
    run_units(c, n, pack_share, j);
    return 0;
}

static int op_norm_pack(struct kern *k, struct kern_rows rows, int cols, float *x,
                        const float *delta, const float *weight, float eps, struct kern_act act,
                        float *normed) {
    ASSERT(x && weight && cpu_ctx(k)->isa->rowwise);
    struct pack_job j = {.rows = rows,
                         .cols = cols,
                         .x = x,
                         .delta = delta,
                         .weight = weight,
                         .eps = eps,
                         .normed = normed,
                         .what = PACK_NORM};
    return pack_run(k, &j, act);
}

static int op_pack(struct kern *k, struct kern_rows rows, int cols, const float *x,
                   struct kern_act act) {
    ASSERT(x);
    struct pack_job j = {.rows = rows, .cols = cols, .in = x, .what = PACK_PLAIN};
    return pack_run(k, &j, act);
}

static int op_gate_pack(struct kern *k, struct kern_rows rows, int cols, const float *gate_up,
                        struct kern_act act) {
    ASSERT(gate_up && cpu_ctx(k)->isa->rowwise);
    struct pack_job j = {.rows = rows, .cols = cols, .in = gate_up, .what = PACK_GATE};
    return pack_run(k, &j, act);
}

/* ---- Products ------------------------------------------------------------------------------ */

struct matmul_job {
    const struct cpu_ctx *c;
    struct kern_rows rows;
    const struct kern_weight *w;
    const uint8_t *gen, *prompt;
    float *out;
    int out_stride, out_offset;
};

static void matmul_share(void *arg, int idx, int n_threads) {
    const struct matmul_job *j = arg;
    const struct cpu_matmul_isa *mm = j->c->isa->matmul;
    void *scratch = j->c->matmul_scratch[idx];
    if (j->rows.n_gen)
        mm->matmul(j->c, CPU_GEN, j->rows.n_gen, j->w, j->gen, j->out, j->out_stride, j->out_offset,
                   scratch, idx, n_threads);
    if (j->rows.n_prompt)
        mm->matmul(j->c, CPU_PROMPT, j->rows.n_prompt, j->w, j->prompt,
                   j->out + (size_t)j->rows.n_gen * (size_t)j->out_stride, j->out_stride,
                   j->out_offset, scratch, idx, n_threads);
}

static int op_matmul(struct kern *k, struct kern_rows rows, const struct kern_weight *w,
                     struct kern_act act, float *out, int out_stride, int out_offset) {
    const struct cpu_ctx *c = cpu_ctx(k);
    if (n_rows(rows) == 0) return 0;
    ASSERT(w && w->data && act.data && out);
    ASSERT(out_offset >= 0 && out_stride >= out_offset + w->rows);
    ASSERT(op_act_bytes(k, rows, w->cols) <= act.bytes);
    struct matmul_job j = {c, rows, w, act.data, NULL, out, out_stride, out_offset};
    j.prompt = j.gen + c->isa->matmul->act_bytes(c, CPU_GEN, rows.n_gen, w->cols);
    int panels = cpu_n_panels(c->isa->matmul, w);
    if (rows.n_gen) threads_deal(c->threads, CPU_GEN, panels);
    if (rows.n_prompt) threads_deal(c->threads, CPU_PROMPT, panels);
    if (w->next) {
        int then = cpu_n_panels(c->isa->matmul, w->next);
        threads_ahead(c->threads, w->next->data, then, w->next->bytes / (size_t)then);
    }
    threads_run(c->threads, matmul_share, &j);
    return 0;
}

static int op_gather(struct kern *k, const float *x, int cols, const int32_t *row_idx, int n,
                     float *x_out) {
    (void)k;
    ASSERT(x && row_idx && x_out && cols > 0 && n >= 0 && n <= KERN_MAX_ROWS);
    for (int i = 0; i < n; i++) {
        ASSERT(row_idx[i] >= 0 && row_idx[i] < KERN_MAX_ROWS);
        memcpy(x_out + (size_t)i * (size_t)cols, x + (size_t)row_idx[i] * (size_t)cols,
               (size_t)cols * sizeof *x);
    }
    return 0;
}

static int op_attention(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                        int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                        const struct kern_attn_taps *taps, void *scratch, float *out) {
    int rc = kern_cpu_attention(k, b, lists, n_heads, scale, qkv, kv, taps, scratch, out);
    if (rc || !taps || !taps->act.data) return rc;
    return op_pack(k, b->rows, n_heads * kv->head_dim, out, taps->act);
}

const struct kern_ops cpu_ops = {
    .backend = "cpu",
    .close = cpu_close,
    .info = cpu_info,
    .reserve = cpu_reserve,
    .unreserve = cpu_unreserve,
    .host_reserve = cpu_reserve,
    .host_unreserve = cpu_unreserve,
    .upload = op_copy,
    .download = op_copy,
    .fetch = op_copy,
    .sync = op_sync,
    .record_begin = op_record_begin,
    .record_end = op_sync,
    .mark = kern_cpu_mark,
    .elapsed = kern_cpu_elapsed,
    .weight_bytes = op_weight_bytes,
    .weight_pack = op_weight_pack,
    .embed = op_embed,
    .act_bytes = op_act_bytes,
    .norm_pack = op_norm_pack,
    .pack = op_pack,
    .gate_pack = op_gate_pack,
    .matmul = op_matmul,
    .gather = op_gather,
    .rope_kv = kern_cpu_rope_kv,
    .attn_scratch_bytes = kern_cpu_attn_scratch_bytes,
    .attention = op_attention,
    .note_states = kern_cpu_note_states,
    .score_scratch_bytes = kern_cpu_score_scratch_bytes,
    .score = kern_cpu_score,
    .sample_scratch_bytes = kern_cpu_sample_scratch_bytes,
    .sample = kern_cpu_sample,
    .accept_scratch_bytes = kern_cpu_accept_scratch_bytes,
    .accept = kern_cpu_accept,
    .advance = kern_cpu_advance,
    .tally = kern_cpu_tally,
    .copy_page = op_copy_page,
};
