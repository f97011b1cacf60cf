#include "tests/runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"

enum {
    MAX_SEQS = 64,
    PAGE_UNIT = 1024,
    MAX_GROUPS = 2,
    FEW_ROWS = 64, /* passes of so many have arrays of their own: one small upload */
};
#define POISON_MOST ((size_t)256 << 20) /* of a device's arena */

/* The arrays of a pass, host and backend, laid out alike. */
struct arrays {
    int32_t *token, *position, *row_seq, *logit_row, *slot[MAX_GROUPS]; /* [rows] */
    int32_t *seq_row, *seq_n, *n_blocks[MAX_GROUPS];                    /* [n_seqs] */
};

struct runner {
    struct runner_options o;
    struct kern *k;
    struct model *m, *target;
    size_t weight_bytes;
    struct kern_device_info info;
    int n_groups, group_layers[MAX_GROUPS], group_first[MAX_GROUPS];
    size_t page_bytes[MAX_GROUPS], arena_bytes[MAX_GROUPS];
    void *arena[MAX_GROUPS];
    int32_t *pages[MAX_GROUPS]; /* [cut_seqs][cut_blocks] */
    int n_pages, max_blocks;    /* most blocks of a sequence */
    int cut_seqs, cut_blocks;   /* as the pages are cut now */
    int length[MAX_SEQS];
    /* Small and full-sized arrays; lists, whose rows stay while a place keeps its sequence. */
    void *host[2], *dev[2];
    size_t array_bytes[2];
    int32_t *list[MAX_GROUPS], *block[MAX_GROUPS]; /* backend, [cut_seqs][cut_blocks] */
    int seq_at[MAX_SEQS];                          /* whose pages a row of `list` holds */
    int keep, n_of[MAX_SEQS]; /* blocks that deep layers read; of how many a row of `list` chose */
    int32_t *chosen;          /* [2][max_blocks] pages and blocks on their way */
    float *dev_logits;        /* where the backend's memory is not the host's */
    /* The pass that was set last. */
    struct model_pass pass;
    uint64_t key[KERN_RECORD_KEY];
};

/* A failure here ends the process: a test sees the signal and this line. */
static void must(int rc, const struct err *e) {
    if (rc == 0) return;
    fprintf(stderr, "runner: %s\n", e->message);
    abort();
}

static void *take(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    ASSERT(p);
    return p;
}

static void *reserve(struct runner *r, size_t bytes) {
    struct err e = {0};
    void *p;
    must(r->k->ops->reserve(r->k, bytes ? bytes : 64, &p, &e), &e);
    return p;
}

static void upload(struct runner *r, void *dst, const void *src, size_t bytes) {
    struct err e = {0};
    must(r->k->ops->upload(r->k, dst, src, bytes, &e), &e);
}

/* ---- Opening ---- */

static void shuffle_pages(struct runner *r, int g) {
    int n = r->n_pages;
    r->pages[g] = take((size_t)n, sizeof(int32_t));
    int stride = (int)(r->page_bytes[g] / PAGE_UNIT) + 1; /* a gap of one unit between pages */
    for (int i = 0; i < n; i++) r->pages[g][i] = i * stride + 1;
    for (int i = n - 1; i > 0; i--) {
        int j = (int)(rng_u32(7, (uint64_t)i, RNG_TEST, 0) % (uint32_t)(i + 1));
        int32_t t = r->pages[g][i];
        r->pages[g][i] = r->pages[g][j];
        r->pages[g][j] = t;
    }
    size_t bytes = ((size_t)n * (size_t)stride + 2) * PAGE_UNIT;
    r->arena_bytes[g] = bytes;
    r->arena[g] = reserve(r, bytes);
    /* NaN in f16, bf16 and f32. */
    if (r->info.is_host) memset(r->arena[g], 0xff, bytes);
    else if (bytes <= POISON_MOST) {
        void *ones = take(bytes, 1);
        memset(ones, 0xff, bytes);
        upload(r, r->arena[g], ones, bytes);
        free(ones);
    }
}

static struct arrays carve(const struct runner *r, void *base, int rows, size_t *bytes) {
    size_t row = ((size_t)rows * 4 + 63) / 64 * 64, seq = ((size_t)r->o.n_seqs * 4 + 63) / 64 * 64;
    uint8_t *p = base;
    struct arrays a = {.token = (int32_t *)(void *)p,
                       .position = (int32_t *)(void *)(p + row),
                       .row_seq = (int32_t *)(void *)(p + 2 * row),
                       .logit_row = (int32_t *)(void *)(p + 3 * row)};
    for (int g = 0; g < MAX_GROUPS; g++) a.slot[g] = (int32_t *)(void *)(p + (4 + (size_t)g) * row);
    p += (4 + MAX_GROUPS) * row;
    a.seq_row = (int32_t *)(void *)p;
    a.seq_n = (int32_t *)(void *)(p + seq);
    for (int g = 0; g < MAX_GROUPS; g++)
        a.n_blocks[g] = (int32_t *)(void *)(p + (2 + (size_t)g) * seq);
    if (bytes) *bytes = (4 + MAX_GROUPS) * row + (2 + MAX_GROUPS) * seq;
    return a;
}

static int rows_of(const struct runner *r, int which) {
    return which || r->o.max_rows < FEW_ROWS ? r->o.max_rows : FEW_ROWS;
}

static void open_arrays(struct runner *r) {
    size_t n = (size_t)r->n_pages, logits = (size_t)r->o.max_logits;
    struct err e = {0};
    for (int i = 0; i < 2; i++) {
        static char nowhere[64];
        carve(r, nowhere, rows_of(r, i), &r->array_bytes[i]);
        must(r->k->ops->host_reserve(r->k, r->array_bytes[i], &r->host[i], &e), &e);
        r->dev[i] = reserve(r, r->array_bytes[i]);
    }
    r->chosen = take(2 * (size_t)r->max_blocks, sizeof *r->chosen);
    for (int g = 0; g < r->n_groups; g++) {
        r->list[g] = reserve(r, n * sizeof(int32_t));
        r->block[g] = reserve(r, n * sizeof(int32_t));
    }
    logits *= (size_t)model_get_config(r->m)->vocab;
    if (!r->info.is_host) r->dev_logits = reserve(r, logits * sizeof *r->dev_logits);
}

/* Block lists name every block; whose pages, the next pass says. */
static void list_all(struct runner *r) {
    size_t n = (size_t)r->cut_seqs * (size_t)r->cut_blocks;
    int32_t *block = take(n, sizeof *block);
    struct err e = {0};
    for (size_t i = 0; i < n; i++) block[i] = (int32_t)(i % (size_t)r->cut_blocks);
    for (int g = 0; g < r->n_groups; g++) upload(r, r->block[g], block, n * sizeof *block);
    must(r->k->ops->sync(r->k, &e), &e);
    free(block);
    for (int i = 0; i < MAX_SEQS; i++) r->seq_at[i] = -1;
}

void runner_recut(struct runner *r, int n_seqs, int max_tokens) {
    int blocks = (max_tokens + KERN_BLOCK - 1) / KERN_BLOCK;
    ASSERT(n_seqs <= r->o.n_seqs && blocks <= r->max_blocks && n_seqs * blocks <= r->n_pages);
    r->cut_seqs = n_seqs;
    r->cut_blocks = blocks;
    memset(r->length, 0, sizeof r->length);
    list_all(r);
}

void runner_keep(struct runner *r, int n) {
    ASSERT(n == 0 || (n >= 5 && r->n_groups == 2));
    r->keep = n;
    list_all(r);
}

static struct model_source *open_source(const struct runner_options *o, const char *path) {
    struct model_source *src;
    struct err e = {0};
    if (o->dummy) must(model_source_open_dummy(&src, path, KERN_N_DTYPES, &e), &e);
    else must(model_source_open(&src, path, &e), &e);
    return src;
}

static void open_backend(struct runner *r) {
    const struct runner_options *o = &r->o;
    struct kern_options ko = {.n_threads = o->n_threads, .precision = o->precision, .isa = o->isa};
    struct err e = {0};
    bool cuda = o->device && !strcmp(o->device, "cuda");
    must(cuda ? kern_cuda_open(&r->k, &ko, &e) : kern_cpu_open(&r->k, &ko, &e), &e);
    r->k->ops->info(r->k, &r->info);
}

struct runner *runner_open(const struct runner_options *o) {
    struct runner *r = take(1, sizeof *r);
    struct err e = {0};
    r->o = *o;
    if (r->o.max_logits == 0) r->o.max_logits = o->max_rows;
    ASSERT(o->n_seqs <= MAX_SEQS);
    open_backend(r);
    struct model_source *src = open_source(o, o->path), *target_src = NULL;
    r->max_blocks = (o->max_tokens + KERN_BLOCK - 1) / KERN_BLOCK;
    r->n_pages = o->max_pages ? o->max_pages : o->n_seqs * r->max_blocks;
    struct model_caps caps = {.max_rows = o->max_rows,
                              .max_seqs = o->n_seqs,
                              .max_blocks = r->max_blocks,
                              .max_logits = r->o.max_logits};
    if (o->target_path) {
        target_src = open_source(o, o->target_path);
        must(model_open(&r->target, target_src, NULL, r->k, &caps, NULL, NULL, &e), &e);
    }
    struct model_borrow borrow = {r->target, target_src}, *b = target_src ? &borrow : NULL;
    must(model_open(&r->m, src, b, r->k, &caps, NULL, NULL, &e), &e);
    must(model_weight_bytes(src, b, r->k, &r->weight_bytes, &e), &e);
    model_source_close(src);
    model_source_close(target_src);
    const struct model_config *c = model_get_config(r->m);
    if (o->select_layer < 0) r->o.select_layer = (3 * c->n_layers + 8) / 16;
    r->n_groups = r->o.select_layer > 0 ? 2 : 1;
    r->group_layers[0] = r->n_groups == 2 ? r->o.select_layer : c->n_layers;
    r->group_first[1] = r->group_layers[0];
    r->group_layers[1] = c->n_layers - r->group_layers[0];
    for (int g = 0; g < r->n_groups; g++) {
        size_t bytes = model_kv_offset(c, r->group_layers[g], false, o->kv);
        r->page_bytes[g] = (bytes + PAGE_UNIT - 1) / PAGE_UNIT * PAGE_UNIT;
        shuffle_pages(r, g);
    }
    open_arrays(r);
    int most = r->n_pages / o->n_seqs < r->max_blocks ? r->n_pages / o->n_seqs : r->max_blocks;
    runner_recut(r, o->n_seqs, most * KERN_BLOCK);
    return r;
}

void runner_close(struct runner *r) {
    for (int g = 0; g < r->n_groups; g++) {
        r->k->ops->unreserve(r->k, r->arena[g]);
        r->k->ops->unreserve(r->k, r->list[g]);
        r->k->ops->unreserve(r->k, r->block[g]);
        free(r->pages[g]);
    }
    for (int i = 0; i < 2; i++) {
        r->k->ops->host_unreserve(r->k, r->host[i]);
        r->k->ops->unreserve(r->k, r->dev[i]);
    }
    free(r->chosen);
    r->k->ops->unreserve(r->k, r->dev_logits);
    model_close(r->m);
    model_close(r->target);
    r->k->ops->close(r->k);
    free(r);
}

/* ---- What it is ---- */

const struct model_config *runner_config(const struct runner *r) {
    return model_get_config(r->m);
}
struct model *runner_model(struct runner *r) {
    return r->m;
}
struct kern *runner_kern(struct runner *r) {
    return r->k;
}
void *runner_arena(struct runner *r, int group, size_t *bytes) {
    if (group >= r->n_groups) return NULL;
    *bytes = r->arena_bytes[group];
    return r->arena[group];
}
size_t runner_weight_bytes(const struct runner *r) {
    return r->weight_bytes;
}
const char *runner_device(const struct runner *r) {
    return r->info.name;
}
int runner_select_layer(const struct runner *r) {
    return r->n_groups == 2 ? r->group_first[1] : 0;
}
int runner_length(const struct runner *r, int seq) {
    return r->length[seq];
}

void runner_truncate(struct runner *r, int seq, int n) {
    ASSERT(n <= r->length[seq]);
    r->length[seq] = n;
}

void runner_pretend(struct runner *r, int seq, int n) {
    ASSERT(n <= r->cut_blocks * KERN_BLOCK);
    r->length[seq] = n;
}

/* ---- A pass ---- */

/* Row i of the deep group's list: `keep` of the sequence's n blocks. */
static void choose_blocks(struct runner *r, int i, int seq, int n) {
    int cap = r->cut_blocks, spread = r->keep - 4;
    int32_t *page = r->chosen, *block = r->chosen + r->max_blocks;
    if (r->n_of[i] == n) return;
    r->n_of[i] = n;
    for (int j = 0; j < r->keep; j++) {
        int32_t at = j == 0       ? 0
                     : j > spread ? n - (r->keep - j)
                                  : 1 + (int)((long long)(j - 1) * (n - 4) / spread);
        block[j] = at;
        page[j] = r->pages[1][seq * cap + at];
    }
    upload(r, r->list[1] + i * cap, page, (size_t)r->keep * sizeof *page);
    upload(r, r->block[1] + i * cap, block, (size_t)r->keep * sizeof *block);
}

/* Rows of piece i, from row `row` on. */
static void fill_piece(struct runner *r, const struct arrays *a, const struct runner_piece *p,
                       int i, int row) {
    int at = r->length[p->seq], cap = r->cut_blocks;
    ASSERT(p->seq < r->cut_seqs && at + p->n <= cap * KERN_BLOCK);
    a->seq_row[i] = row;
    a->seq_n[i] = p->n;
    int n_blocks = (at + p->n + KERN_BLOCK - 1) / KERN_BLOCK;
    bool fewer = r->keep > 0 && n_blocks > r->keep;
    ASSERT(r->keep == 0 || !p->prompt); /* prompts are filled in before */
    for (int g = 0; g < r->n_groups; g++) a->n_blocks[g][i] = g && fewer ? r->keep : n_blocks;
    for (int j = 0; j < p->n; j++) {
        a->token[row + j] = p->ids[j];
        a->position[row + j] = at + j;
        a->row_seq[row + j] = i;
        a->logit_row[row + j] = row + j;
        for (int g = 0; g < r->n_groups; g++)
            a->slot[g][row + j] = r->pages[g][p->seq * cap + (at + j) / KERN_BLOCK];
    }
    r->length[p->seq] = at + p->n;
    if (r->seq_at[i] != p->seq) {
        r->seq_at[i] = p->seq;
        r->n_of[i] = 0;
        for (int g = 0; g < r->n_groups; g++)
            upload(r, r->list[g] + i * cap, r->pages[g] + p->seq * cap,
                   (size_t)cap * sizeof *r->list[g]);
    }
    if (fewer) choose_blocks(r, i, p->seq, n_blocks);
}

void runner_set(struct runner *r, const struct runner_piece *pieces, int n_pieces, int n_logits) {
    struct kern_rows rows = {0};
    for (int i = 0; i < n_pieces; i++) {
        ASSERT(pieces[i].prompt || rows.n_prompt == 0);
        *(pieces[i].prompt ? &rows.n_prompt : &rows.n_gen) += pieces[i].n;
    }
    int n = rows.n_gen + rows.n_prompt, row = 0, which = n > rows_of(r, 0);
    if (n_logits < 0) n_logits = n;
    ASSERT(n <= r->o.max_rows && n_logits <= r->o.max_logits && n_pieces <= r->cut_seqs);
    struct arrays a = carve(r, r->host[which], rows_of(r, which), NULL);
    for (int i = 0; i < n_pieces; row += pieces[i].n, i++) fill_piece(r, &a, &pieces[i], i, row);
    upload(r, r->dev[which], r->host[which], r->array_bytes[which]);
    a = carve(r, r->dev[which], rows_of(r, which), NULL);
    r->pass = (struct model_pass){
        .batch = {.rows = rows,
                  .token = a.token,
                  .position = a.position,
                  .row_seq = a.row_seq,
                  .n_seqs = n_pieces,
                  .seq_row = a.seq_row,
                  .seq_n_rows = a.seq_n},
        .n_groups = r->n_groups,
        .n_logits = n_logits,
        .logit_row = a.logit_row + (n - n_logits),
        .logits = r->dev_logits,
        .logits_stride = (size_t)runner_config(r)->vocab,
    };
    for (int g = 0; g < r->n_groups; g++)
        r->pass.group[g] = (struct model_group){.first_layer = r->group_first[g],
                                                .n_layers = r->group_layers[g],
                                                .arena = r->arena[g],
                                                .kv_dtype = r->o.kv,
                                                .slot_page = a.slot[g],
                                                .lists = {.page = r->list[g],
                                                          .block = r->block[g],
                                                          .n_blocks = a.n_blocks[g],
                                                          .capacity = r->cut_blocks,
                                                          .seq_stride = 1}};
    const uint64_t key[KERN_RECORD_KEY] = {
        (uint64_t)(uintptr_t)r, (uint64_t)rows.n_gen, (uint64_t)rows.n_prompt,
        (uint64_t)n_pieces,     (uint64_t)n_logits,   (uint64_t)(which << 24 | r->cut_blocks)};
    memcpy(r->key, key, sizeof key);
}

void runner_enqueue(struct runner *r) {
    struct err e = {0};
    bool replayed;
    must(r->k->ops->record_begin(r->k, r->key, &replayed, &e), &e);
    if (replayed) return;
    if (r->pass.n_logits && !r->pass.logits) { /* nobody's yet: a host's pass that was only set */
        size_t n = (size_t)r->o.max_logits * r->pass.logits_stride;
        if (!r->dev_logits) r->dev_logits = reserve(r, n * sizeof *r->dev_logits);
        r->pass.logits = r->dev_logits;
    }
    must(model_forward(r->m, &r->pass, &e), &e);
    must(r->k->ops->record_end(r->k, &e), &e);
}

void runner_finish(struct runner *r, float *logits) {
    struct err e = {0};
    size_t bytes = (size_t)r->pass.n_logits * r->pass.logits_stride * sizeof *logits;
    if (logits && !r->info.is_host)
        must(r->k->ops->download(r->k, logits, r->dev_logits, bytes, &e), &e);
    else must(r->k->ops->sync(r->k, &e), &e);
}

void runner_pass(struct runner *r, const struct runner_piece *pieces, int n_pieces, float *logits) {
    runner_pass_last(r, pieces, n_pieces, logits, logits ? -1 : 0);
}

void runner_pass_last(struct runner *r, const struct runner_piece *pieces, int n_pieces,
                      float *logits, int n_logits) {
    runner_set(r, pieces, n_pieces, n_logits);
    if (r->info.is_host) r->pass.logits = logits;
    runner_enqueue(r);
    runner_finish(r, logits);
}

/* ---- What it wrote ---- */

/* One head's K or V of a page, f32 [64][head_dim]. */
static void read_plane(const struct runner *r, const struct kern_kv *kv, int page, int head,
                       bool value, float *tile) {
    static uint8_t raw[KERN_BLOCK * KERN_MAX_HEAD_DIM * 4];
    struct err e = {0};
    if (r->info.is_host) {
        kern_cpu_read_kv(kv, page, head, value, tile);
        return;
    }
    const uint8_t *at = (const uint8_t *)kv->base + (size_t)page * kv->page_stride +
                        (value ? kv->v_offset : kv->k_offset) + (size_t)head * kv->head_stride;
    must(r->k->ops->download(r->k, raw, at, kv->head_stride, &e), &e);
    kern_cuda_read_kv(raw, kv->dtype, kv->head_dim, tile);
}

uint64_t runner_kv_hash(struct runner *r, int seq, int n) {
    const struct model_config *c = runner_config(r);
    float *tile = take((size_t)KERN_BLOCK * (size_t)c->head_dim, sizeof(float));
    XXH3_state_t *h = XXH3_createState();
    XXH3_64bits_reset(h);
    for (int g = 0; g < r->n_groups; g++)
        for (int layer = 0; layer < r->group_layers[g]; layer++) {
            struct kern_kv kv = {.base = r->arena[g],
                                 .page_stride = PAGE_UNIT,
                                 .k_offset = model_kv_offset(c, layer, false, r->o.kv),
                                 .v_offset = model_kv_offset(c, layer, true, r->o.kv),
                                 .head_stride = model_kv_head_bytes(c, r->o.kv),
                                 .dtype = r->o.kv,
                                 .n_kv_heads = c->n_kv_heads,
                                 .head_dim = c->head_dim};
            for (int at = 0; at < n; at += KERN_BLOCK)
                for (int head = 0; head < c->n_kv_heads; head++)
                    for (int value = 0; value < 2; value++) {
                        int take_n = n - at < KERN_BLOCK ? n - at : KERN_BLOCK;
                        read_plane(r, &kv, r->pages[g][seq * r->cut_blocks + at / KERN_BLOCK], head,
                                   value, tile);
                        XXH3_64bits_update(h, tile, (size_t)take_n * (size_t)c->head_dim * 4);
                    }
        }
    uint64_t out = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    free(tile);
    return out;
}
