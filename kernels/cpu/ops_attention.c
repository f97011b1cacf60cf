/* The operations rope_kv and attention of the CPU backend: what is cut into which pieces, and the
 * threads that take them. */
#include <string.h>

#include "kernels/cpu/attention_q8.h"

#include "base/err.h"

/* ---- Rotation and writing K, V ------------------------------------------------------------- */

struct rope_job {
    const struct cpu_ctx *c;
    const struct kern_batch *b;
    const struct kern_rope *rope;
    int n_heads, n_rows;
    float *qkv;
    const struct kern_kv *kv;
};

/* Heads first, first + step, .. of one row: the KV heads come first, then the query heads. */
static void rope_row(const struct rope_job *j, int row, int first, int step, const float *cos,
                     const float *sin) {
    const struct cpu_rowwise_isa *rw = j->c->isa->rowwise;
    const struct kern_rope *p = j->rope;
    const struct kern_kv *kv = j->kv;
    int n_kv = kv->n_kv_heads;
    size_t hd = (size_t)kv->head_dim;
    float *q = j->qkv + (size_t)row * (size_t)(j->n_heads + 2 * n_kv) * hd;
    float *k = q + (size_t)j->n_heads * hd, *v = k + (size_t)n_kv * hd;
    uint8_t *page = (uint8_t *)kv->base + (size_t)j->b->slot_page[row] * kv->page_stride;
    for (int i = first; i < n_kv + j->n_heads; i += step) {
        if (i >= n_kv) {
            size_t at = (size_t)(i - n_kv) * hd;
            rw->rope_head(q + at, kv->head_dim, p->q_bias ? p->q_bias + at : NULL, p->q_norm,
                          p->norm_eps, cos, sin, p->dim, p->interleaved);
            continue;
        }
        size_t at = (size_t)i * hd;
        rw->rope_head(k + at, kv->head_dim, p->k_bias ? p->k_bias + at : NULL, p->k_norm,
                      p->norm_eps, cos, sin, p->dim, p->interleaved);
        if (p->v_bias)
            for (size_t d = 0; d < hd; d++) v[at + d] += p->v_bias[at + d];
        if (kv->dtype == KERN_Q8_0)
            j->c->isa->q8->write(kv, page, i, j->b->position[row] % KERN_BLOCK, k + at, v + at);
        else
            j->c->isa->attn->kv_write(kv, page, i, j->b->position[row] % KERN_BLOCK, k + at,
                                      v + at);
    }
}

/* Neighbouring rows write the same cache lines of K, a line for each of a head's dimensions. Many
 * rows are cut into whole runs of lines; few are cut by heads, always the same to the same thread,
 * so that the lines stay with one core from row to row and from pass to pass. */
static void rope_share(void *arg, int idx, int n_threads) {
    const struct rope_job *j = arg;
    float cos[KERN_MAX_HEAD_DIM / 2], sin[KERN_MAX_HEAD_DIM / 2];
    bool by_head = j->n_rows < 64;
    int begin = 0, end = j->n_rows;
    if (!by_head) threads_split(j->n_rows, 32, idx, n_threads, &begin, &end);
    else if (idx >= j->n_heads + j->kv->n_kv_heads) return;
    for (int row = begin; row < end; row++) {
        if (j->b->row_seq[row] < 0) continue;
        bool turn = j->rope->inv_freq != NULL;
        if (turn)
            j->c->isa->rowwise->rope_angles(j->rope->inv_freq, j->rope->dim / 2,
                                            j->b->position[row], j->rope->scale, cos, sin);
        rope_row(j, row, by_head ? idx : 0, by_head ? n_threads : 1, turn ? cos : NULL,
                 turn ? sin : NULL);
    }
}

int kern_cpu_rope_kv(struct kern *k, const struct kern_batch *b, const struct kern_rope *rope,
                     int n_heads, float *qkv, const struct kern_kv *kv) {
    const struct cpu_ctx *c = cpu_ctx(k);
    ASSERT(kv->head_dim <= KERN_MAX_HEAD_DIM && rope->dim <= kv->head_dim && rope->dim % 2 == 0);
    struct rope_job j = {.c = c,
                         .b = b,
                         .rope = rope,
                         .n_heads = n_heads,
                         .n_rows = b->rows.n_gen + b->rows.n_prompt,
                         .qkv = qkv,
                         .kv = kv};
    threads_run(c->threads, rope_share, &j);
    return 0;
}

/* ---- Attention ----------------------------------------------------------------------------- */

static int rows_per_tile(const struct attn_job *j, bool prompt) {
    bool amx = attn_uses_amx(j->ctx, j->kv->dtype, prompt);
    int n = (amx ? ATTN_AMX_Q : prompt ? ATTN_PROMPT_Q : ATTN_GEN_Q) / j->group;
    return n < 1 ? 1 : n;
}

/* Tiles for any number of KV heads: a tile holds at least half of ATTN_GEN_Q queries but at the
 * ends of a sequence's rows in each of the two classes. */
static size_t max_tiles(struct kern_rows rows, int n_seqs, int n_heads) {
    size_t n_rows = (size_t)rows.n_gen + (size_t)rows.n_prompt;
    size_t ends = 2 * (size_t)n_seqs;
    return (size_t)n_heads * (2 * n_rows / ATTN_GEN_Q + (ends < n_rows ? ends : n_rows) + 1);
}

static size_t max_slots(size_t n_rows, int n_heads, int n_threads) {
    return n_rows * (size_t)n_heads + (size_t)n_threads * ATTN_ITEMS_PER_THREAD * ATTN_MAX_Q;
}

size_t kern_cpu_attn_scratch_bytes(const struct kern *k, struct kern_rows rows, int n_seqs,
                                   int n_heads, int head_dim, int list_capacity) {
    int n_threads = threads_n(cpu_ctx(k)->threads);
    size_t n_rows = (size_t)rows.n_gen + (size_t)rows.n_prompt;
    size_t slot_bytes = (size_t)((head_dim + 15) / 16 * 16 + 16) * sizeof(float);
    return align_up(max_tiles(rows, n_seqs, n_heads) * sizeof(struct attn_tile), 64) +
           max_slots(n_rows, n_heads, n_threads) * slot_bytes +
           (size_t)n_threads * attn_layout(n_heads, head_dim, list_capacity).bytes;
}

/* Leading entries of a list that begin at or before `position`; blocks ascend. */
static int entries_until(const struct kern_lists *l, size_t list, int32_t position) {
    const int32_t *block = l->block + list * (size_t)l->capacity;
    int lo = 0, hi = l->n_blocks[list];
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if ((int64_t)block[mid] * KERN_BLOCK <= position) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

static void add_tile(struct attn_job *j, int seq, int head, int row, int n_rows) {
    const struct kern_batch *b = j->batch;
    struct attn_tile *t = &j->tiles[j->n_tiles++];
    *t = (struct attn_tile){
        .seq = seq, .head = head, .row = row, .n_rows = n_rows, .prompt = row >= b->rows.n_gen};
    t->list =
        (size_t)seq * (size_t)j->lists->seq_stride + (size_t)head * (size_t)j->lists->head_stride;
    int32_t last = -1;
    for (int r = row; r < row + n_rows; r++)
        if (b->row_seq[r] >= 0 && b->position[r] > last) last = b->position[r];
    t->n_entries = last < 0 ? 0 : entries_until(j->lists, t->list, last);
}

static void cut_tiles(struct attn_job *j) {
    const struct kern_batch *b = j->batch;
    for (int s = 0; s < b->n_seqs; s++)
        for (int head = 0; head < j->kv->n_kv_heads; head++) {
            int end = b->seq_row[s] + b->seq_n_rows[s];
            for (int row = b->seq_row[s], n; row < end; row += n) {
                bool prompt = row >= b->rows.n_gen;
                int stop = !prompt && end > b->rows.n_gen ? b->rows.n_gen : end;
                n = rows_per_tile(j, prompt);
                if (n > stop - row) n = stop - row;
                add_tile(j, s, head, row, n);
            }
        }
}

/* The smallest level that leaves a few items a thread; any level gives the same bits. */
static void cut_items(struct attn_job *j, int n_threads) {
    int64_t leaves = 0;
    for (int i = 0; i < j->n_tiles; i++) leaves += attn_n_leaves(j->tiles[i].n_entries);
    int64_t items = (int64_t)n_threads *
                    (j->batch->rows.n_prompt ? ATTN_ITEMS_PER_THREAD : ATTN_GEN_ITEMS_PER_THREAD);
    while (items << j->level < leaves) j->level++;
    /* Double sums have no tree: one item a tile. */
    if (j->ctx->isa->attn == &cpu_attn_reference) j->level = 30;
    size_t slot = 0;
    for (int i = 0; i < j->n_tiles; i++) {
        struct attn_tile *t = &j->tiles[i];
        int n = attn_n_leaves(t->n_entries);
        t->n_nodes = n ? (int)(((int64_t)n + ((int64_t)1 << j->level) - 1) >> j->level) : 1;
        t->first_item = j->n_items;
        t->slot = slot;
        atomic_init(&t->n_left, t->n_nodes);
        j->n_items += t->n_nodes;
        slot += (size_t)t->n_nodes * (size_t)t->n_rows * (size_t)j->group;
    }
}

static struct attn_tile *tile_of_item(struct attn_job *j, int item) {
    int lo = 0, hi = j->n_tiles - 1;
    while (lo < hi) {
        int mid = hi - (hi - lo) / 2;
        if (j->tiles[mid].first_item <= item) lo = mid;
        else hi = mid - 1;
    }
    return &j->tiles[lo];
}

/* Tile i's masses. Where they are summed by head, tiles of one sequence and KV head are summed into
 * one line: the first of them does all, in the order of rows. */
static void add_mass(struct attn_job *j, int i, void *scratch) {
    const struct attn_tile *t = j->tiles + i;
    const struct cpu_attn_isa *isa = j->ctx->isa->attn;
    if (!j->taps->head_mass) {
        isa->mass(j, t, scratch);
        return;
    }
    if (i > 0 && t[-1].seq == t->seq && t[-1].head == t->head) return;
    for (int n = i; n < j->n_tiles && j->tiles[n].seq == t->seq && j->tiles[n].head == t->head; n++)
        isa->mass(j, &j->tiles[n], scratch);
}

/* Items from the last to the first, so that a prompt's longest rows start first; then the masses.
 * A thread takes an item before it does the one in hand, to read ahead of it. */
static void attention_share(void *arg, int idx, int n_threads) {
    struct attn_job *j = arg;
    const struct cpu_attn_isa *isa = j->ctx->isa->attn;
    void *scratch = j->thread_scratch + (size_t)idx * j->thread_scratch_bytes;
    int begin, end, n_rows = j->batch->rows.n_gen + j->batch->rows.n_prompt;
    size_t width = (size_t)j->n_heads * (size_t)j->kv->head_dim;
    threads_split(n_rows, 1, idx, n_threads, &begin, &end);
    for (int row = begin; row < end; row++)
        if (j->batch->row_seq[row] < 0)
            memset(j->out + (size_t)row * width, 0, width * sizeof(float));
    bool mass = (j->taps->mass || j->taps->head_mass) && j->taps->mass_line;
    int n = j->n_items + (mass ? j->n_tiles : 0);
    const struct attn_tile *held = NULL;
    int at = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed), then;
    for (; at < n; at = then) {
        then = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
        if (at >= j->n_items) {
            add_mass(j, n - 1 - at, scratch);
            continue;
        }
        int item = j->n_items - 1 - at, later = j->n_items - 1 - then;
        struct attn_tile *t = tile_of_item(j, item);
        const struct attn_tile *t2 = later >= 0 ? tile_of_item(j, later) : NULL;
        isa->item(j, t, item - t->first_item, t2, t2 ? later - t2->first_item : 0, t == held,
                  scratch);
        held = t;
        if (atomic_fetch_sub_explicit(&t->n_left, 1, memory_order_acq_rel) == 1) isa->combine(j, t);
    }
}

int kern_cpu_attention(struct kern *k, const struct kern_batch *b, const struct kern_lists *lists,
                       int n_heads, float scale, const float *qkv, const struct kern_kv *kv,
                       const struct kern_attn_taps *taps, void *scratch, float *out) {
    static const struct kern_attn_taps none = {0};
    const struct cpu_ctx *c = cpu_ctx(k);
    ASSERT(kv->n_kv_heads > 0 && n_heads % kv->n_kv_heads == 0);
    ASSERT(n_heads / kv->n_kv_heads <= KERN_MAX_GROUP && kv->head_dim <= KERN_MAX_HEAD_DIM);
    int n_threads = threads_n(c->threads), dim = (kv->head_dim + 15) / 16 * 16;
    size_t n_rows = (size_t)b->rows.n_gen + (size_t)b->rows.n_prompt;
    struct attn_job j = {
        .ctx = c,
        .batch = b,
        .lists = lists,
        .kv = kv,
        .taps = taps ? taps : &none,
        .n_heads = n_heads,
        .group = n_heads / kv->n_kv_heads,
        .scale = scale,
        .qkv = qkv,
        .qkv_stride = (n_heads + 2 * kv->n_kv_heads) * kv->head_dim,
        .out = out,
        .dim = dim,
        .slot_floats = dim + 16,
    };
    size_t tile_bytes = max_tiles(b->rows, b->n_seqs, n_heads) * sizeof(struct attn_tile);
    j.tiles = scratch;
    j.slots = (float *)(void *)((uint8_t *)scratch + align_up(tile_bytes, 64));
    size_t n_slots = max_slots(n_rows, n_heads, n_threads);
    j.thread_scratch = (uint8_t *)(j.slots + n_slots * (size_t)j.slot_floats);
    j.thread_scratch_bytes = attn_layout(n_heads, kv->head_dim, lists->capacity).bytes;
    cut_tiles(&j);
    cut_items(&j, n_threads);
    threads_run(c->threads, attention_share, &j);
    if (j.taps->kv_bytes_read) *j.taps->kv_bytes_read += atomic_load(&j.kv_bytes);
    return 0;
}

void kern_cpu_read_kv(const struct kern_kv *kv, int page, int head, bool value, float *out) {
    const uint8_t *at = (const uint8_t *)kv->base + (size_t)page * kv->page_stride +
                        (value ? kv->v_offset : kv->k_offset) + (size_t)head * kv->head_stride;
    for (int t = 0; t < KERN_BLOCK; t++)
        for (int d = 0; d < kv->head_dim; d++) {
            size_t i = value ? (size_t)t * (size_t)kv->head_dim + (size_t)d
                             : (size_t)d * KERN_BLOCK + (size_t)t;
            uint16_t h;
            if (kv->dtype == KERN_Q8_0) *out++ = q8_element(at, kv->head_dim, value, t, d);
            else if (kv->dtype == KERN_F32) memcpy(out++, at + i * 4, 4);
            else {
                memcpy(&h, at + i * 2, 2);
                *out++ = kv->dtype == KERN_F16 ? f16_to_f32(h) : bf16_to_f32(h);
            }
        }
}
