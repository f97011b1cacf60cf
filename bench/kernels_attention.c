/* Attention of one layer over paged KV. Pages hold up to 32 layers, as a model's do, and calls take
 * the layers in turn, so that a train goes through at least 1 GB of listed keys and values; where
 * that is less, several sets of sequences take turns as well. Dense: every block of the context,
 * pages in the pool's first order. Sparse: one block in ten, drawn at random, ascending in
 * position, pages scattered over an arena that holds all blocks; every page that is not listed is
 * poisoned with NaN, so that the check also finds a kernel that reads one.
 *
 * The floor is the listed bytes, and for prompt rows the products of what each row sees. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "bench/kernels_bench.h"

enum {
    UNIT = 1024, /* of page ids */
    MAX_LAYERS = 32,
    SPARSE = 10, /* one block in so many */
    CHECKED = 3, /* (row, head) pairs of a point */
};
static const double arena_most = 44e9, arena_share = 0.4, distinct_least = 1.05e9;
/* Queries of +-6 against keys of +-1 make scores of deviation 2 at any head_dim: a softmax with
 * some shape, far from overflow. */
static const float query_scale = 6;

struct shape {
    const char *name;
    int n_heads, n_kv_heads, head_dim;
};
static const struct shape of_8b = {"32/8x128", 32, 8, 128}, of_1b = {"32/8x64", 32, 8, 64},
                          of_7b = {"32/32x128", 32, 32, 128};

/* Pages of all points, taken once, as a server takes its pool. */
struct arena {
    uint8_t *at;
    double bytes;
};

struct attention {
    struct kbench *b;
    struct shape s;
    int rows, batch, context; /* rows of a sequence; tokens that the last one sees */
    bool prompt, sparse;
    int n_blocks, n_listed, layers, sets;
    size_t plane, layer_bytes, page_bytes;
    int32_t *host_page, *host_block; /* [sets][batch][n_listed] */
    struct arena arena;
    struct kern_lists lists; /* of set 0 */
    struct kern_batch batch_rows;
    struct kern_kv kv; /* of layer 0 */
    float *host_qkv, *qkv, *out;
    void *scratch;
};

static int width(const struct attention *a) {
    return (a->s.n_heads + 2 * a->s.n_kv_heads) * a->s.head_dim;
}

/* ---- Making ---- */

static void sizes(struct attention *a) {
    const struct shape *s = &a->s;
    double arena = a->arena.bytes;
    a->n_blocks = (a->context + KERN_BLOCK - 1) / KERN_BLOCK;
    a->n_listed = a->sparse ? (a->n_blocks + SPARSE - 1) / SPARSE : a->n_blocks;
    a->plane = (size_t)KERN_BLOCK * (size_t)s->head_dim * 2;
    a->layer_bytes = 2 * (size_t)s->n_kv_heads * a->plane;
    double all = (double)a->layer_bytes * a->batch * a->n_blocks; /* of a layer */
    double listed = (double)a->layer_bytes * a->batch * a->n_listed;
    a->layers = (int)fmin(MAX_LAYERS, fmax(1, floor(arena / all)));
    a->sets = (int)ceil(distinct_least / (listed * a->layers));
    if (a->prompt) a->layers = 4, a->sets = 1; /* not bound by bytes */
    while (a->sets > 1 && all * a->layers * a->sets > arena) a->sets--;
    a->page_bytes =
        a->layer_bytes * (size_t)a->layers; /* a multiple of UNIT for every shape here */
}

/* n of `of` numbers in ascending order, at random. */
static void draw_ascending(uint64_t *seed, int of, int n, int32_t *out) {
    for (int i = 0, left = n; i < of && left > 0; i++)
        if (kbench_random(seed) % (uint64_t)(of - i) < (uint64_t)left) out[n - left--] = i;
}

/* Every block of every sequence has a page of its own, at its place in order or anywhere. */
static void make_lists(struct attention *a) {
    struct kbench *b = a->b;
    size_t seqs = (size_t)a->sets * (size_t)a->batch, n = seqs * (size_t)a->n_listed;
    size_t pages = seqs * (size_t)a->n_blocks;
    uint64_t seed = kbench_seed(b);
    int32_t *place = kbench_host(pages * sizeof *place);
    for (size_t i = 0; i < pages; i++) place[i] = (int32_t)i;
    for (size_t i = pages - 1; a->sparse && i > 0; i--) {
        size_t j = kbench_random(&seed) % (i + 1);
        int32_t t = place[i];
        place[i] = place[j];
        place[j] = t;
    }
    a->host_page = kbench_host(n * sizeof *a->host_page);
    a->host_block = kbench_host(n * sizeof *a->host_block);
    for (size_t q = 0; q < seqs; q++) {
        int32_t *block = a->host_block + q * (size_t)a->n_listed;
        draw_ascending(&seed, a->n_blocks, a->n_listed, block);
        block[a->n_listed - 1] = a->n_blocks - 1; /* the newest is always there */
        for (int i = 0; i < a->n_listed; i++)
            a->host_page[q * (size_t)a->n_listed + (size_t)i] =
                place[q * (size_t)a->n_blocks + (size_t)block[i]] * (int32_t)(a->page_bytes / UNIT);
    }
    free(place);
    int32_t *counts = kbench_host((size_t)a->batch * sizeof *counts);
    for (int i = 0; i < a->batch; i++) counts[i] = a->n_listed;
    a->lists = (struct kern_lists){.page = kbench_put(b, a->host_page, n * sizeof(int32_t)),
                                   .block = kbench_put(b, a->host_block, n * sizeof(int32_t)),
                                   .n_blocks = kbench_put(b, counts, (size_t)a->batch * 4),
                                   .capacity = a->n_listed,
                                   .seq_stride = 1};
    free(counts);
}

static void fill_arena(struct attention *a) {
    struct kbench *b = a->b;
    struct err e = {0};
    size_t seqs = (size_t)a->sets * (size_t)a->batch, bytes = seqs * (size_t)a->n_blocks;
    bytes *= a->page_bytes;
    kbench_must(b, device_floor_set(b->floor, a->arena.at, 0xFF, bytes, &e), &e, "poison:");
    kbench_must(b,
                device_floor_fill(b->floor, a->arena.at, a->lists.page,
                                  (int)(seqs * (size_t)a->n_listed), a->page_bytes, KERN_F16, 1,
                                  (uint32_t)kbench_seed(b), &e),
                &e, "fill:");
    a->kv = (struct kern_kv){.base = a->arena.at,
                             .page_stride = UNIT,
                             .k_offset = 0,
                             .v_offset = a->layer_bytes / 2,
                             .head_stride = a->plane,
                             .dtype = KERN_F16,
                             .n_kv_heads = a->s.n_kv_heads,
                             .head_dim = a->s.head_dim};
}

/* The rows stand at the context's end. */
static void make_rows(struct attention *a) {
    struct kbench *b = a->b;
    int n = a->rows * a->batch;
    int32_t *position = kbench_host((size_t)n * 4), *row_seq = kbench_host((size_t)n * 4);
    int32_t *first = kbench_host((size_t)a->batch * 4), *count = kbench_host((size_t)a->batch * 4);
    for (int r = 0; r < n; r++) {
        position[r] = a->context - a->rows + r % a->rows;
        row_seq[r] = r / a->rows;
    }
    for (int i = 0; i < a->batch; i++) {
        first[i] = i * a->rows;
        count[i] = a->rows;
    }
    a->batch_rows =
        (struct kern_batch){.rows = {.n_gen = a->prompt ? 0 : n, .n_prompt = a->prompt ? n : 0},
                            .position = kbench_put(b, position, (size_t)n * 4),
                            .row_seq = kbench_put(b, row_seq, (size_t)n * 4),
                            .n_seqs = a->batch,
                            .seq_row = kbench_put(b, first, (size_t)a->batch * 4),
                            .seq_n_rows = kbench_put(b, count, (size_t)a->batch * 4)};
    free(position), free(row_seq), free(first), free(count);
    a->host_qkv = kbench_floats(b, (size_t)n * (size_t)width(a), query_scale);
    a->qkv = kbench_put(b, a->host_qkv, (size_t)n * (size_t)width(a) * 4);
    a->out = kbench_reserve(b, (size_t)n * (size_t)a->s.n_heads * (size_t)a->s.head_dim * 4);
    size_t bytes = b->k->ops->attn_scratch_bytes(b->k, a->batch_rows.rows, a->batch, a->s.n_heads,
                                                 a->s.head_dim, a->lists.capacity);
    a->scratch = kbench_reserve(b, bytes ? bytes : 64);
}

static void let_go(struct attention *a) {
    void *device[] = {(void *)(uintptr_t)a->lists.page,
                      (void *)(uintptr_t)a->lists.block,
                      (void *)(uintptr_t)a->lists.n_blocks,
                      (void *)(uintptr_t)a->batch_rows.position,
                      (void *)(uintptr_t)a->batch_rows.row_seq,
                      (void *)(uintptr_t)a->batch_rows.seq_row,
                      (void *)(uintptr_t)a->batch_rows.seq_n_rows,
                      a->qkv,
                      a->out,
                      a->scratch};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) kbench_free(a->b, device[i]);
    free(a->host_page), free(a->host_block), free(a->host_qkv);
}

/* ---- Calling and checking ---- */

static int call(void *arg, int i) {
    struct attention *a = arg;
    struct kern_kv kv = a->kv;
    struct kern_lists lists = a->lists;
    struct kern_attn_taps none = {0};
    size_t layer = (size_t)(i % a->layers), set = (size_t)(i / a->layers % a->sets);
    kv.k_offset += layer * a->layer_bytes;
    kv.v_offset += layer * a->layer_bytes;
    lists.page += set * (size_t)a->batch * (size_t)a->n_listed;
    lists.block += set * (size_t)a->batch * (size_t)a->n_listed;
    lists.repeated = layer > 0; /* as in a step: a set is a pass of so many layers */
    return a->b->k->ops->attention(a->b->k, &a->batch_rows, &lists, a->s.n_heads,
                                   1.0f / sqrtf((float)a->s.head_dim), a->qkv, &kv, &none,
                                   a->scratch, a->out);
}

/* Scores of one row and head over its list; K and V of the visible tokens as f32. */
struct seen {
    int n;
    float *k, *v; /* [n][head_dim] */
    double *p;
};

static void gather(const struct attention *a, int row, int kv_head, struct seen *s) {
    int seq = row / a->rows, position = a->context - a->rows + row % a->rows;
    size_t hd = (size_t)a->s.head_dim, tile = KERN_BLOCK * hd;
    const int32_t *page = a->host_page + (size_t)seq * (size_t)a->n_listed;
    const int32_t *block = a->host_block + (size_t)seq * (size_t)a->n_listed;
    uint16_t *raw = kbench_host(a->plane);
    s->n = 0;
    s->k = kbench_host((size_t)a->n_listed * tile * 4);
    s->v = kbench_host((size_t)a->n_listed * tile * 4);
    for (int i = 0; i < a->n_listed; i++) {
        int left = position + 1 - block[i] * KERN_BLOCK;
        if (left <= 0) break;
        const uint8_t *at = a->arena.at + (size_t)page[i] * UNIT + (size_t)kv_head * a->plane;
        kbench_get(a->b, raw, at + a->kv.k_offset, a->plane);
        kern_cuda_read_kv(raw, KERN_F16, a->s.head_dim, s->k + (size_t)s->n * hd);
        kbench_get(a->b, raw, at + a->kv.v_offset, a->plane);
        kern_cuda_read_kv(raw, KERN_F16, a->s.head_dim, s->v + (size_t)s->n * hd);
        s->n += left < KERN_BLOCK ? left : KERN_BLOCK;
    }
    s->p = kbench_host((size_t)(s->n + 1) * sizeof *s->p);
    free(raw);
}

/* One (row, head) in double. Tolerance: queries, and probabilities before they meet V, are rounded
 * to 16 bits (bf16 at worst: 2^-9 each, and 2^-9 of a score of 8 moves its probability by 2 %); the
 * errors of different tokens are independent: 5 % of sqrt(sum of squares), while one wrong page
 * among many shows as NaN (sparse) or fails at the short contexts. */
static void check_one(const struct attention *a, int row, int head) {
    size_t hd = (size_t)a->s.head_dim;
    int n_out = a->s.n_heads * a->s.head_dim;
    int group = a->s.n_heads / a->s.n_kv_heads;
    struct seen s;
    gather(a, row, head / group, &s);
    const float *q = a->host_qkv + (size_t)row * (size_t)width(a) + (size_t)head * hd;
    double most = -INFINITY, sum = 0;
    for (int t = 0; t < s.n; t++) {
        double dot = 0;
        for (size_t x = 0; x < hd; x++) dot += (double)q[x] * (double)s.k[(size_t)t * hd + x];
        s.p[t] = dot / sqrt((double)a->s.head_dim);
        most = fmax(most, s.p[t]);
    }
    for (int t = 0; t < s.n; t++) sum += s.p[t] = exp(s.p[t] - most);
    float got[KERN_MAX_HEAD_DIM];
    double want[KERN_MAX_HEAD_DIM] = {0}, squares[KERN_MAX_HEAD_DIM] = {0};
    kbench_get(a->b, got, a->out + (size_t)row * (size_t)n_out + (size_t)head * hd, hd * 4);
    for (int t = 0; t < s.n; t++)
        for (size_t x = 0; x < hd; x++) {
            double term = s.p[t] / sum * (double)s.v[(size_t)t * hd + x];
            want[x] += term;
            squares[x] += term * term;
        }
    for (size_t x = 0; x < hd; x++)
        kbench_check(a->prompt ? "prompt attention is wrong" : "attention is wrong",
                     (long long)row * n_out + head * a->s.head_dim + (long long)x, (double)got[x],
                     want[x], 5e-2 * sqrt(squares[x]) + 1e-5);
    free(s.k), free(s.v), free(s.p);
}

static void check(struct attention *a) {
    int n = a->rows * a->batch;
    kbench_must(a->b, call(a, 0), NULL, "attention:");
    const int rows[CHECKED] = {0, n / 2, n - 1};
    const int heads[CHECKED] = {0, a->s.n_heads / 2 + 1, a->s.n_heads - 1};
    for (int i = 0; i < CHECKED; i++) check_one(a, rows[i], heads[i]);
}

static void point(struct kbench *b, struct arena arena, struct shape s, int rows, int batch,
                  int context, bool prompt, bool sparse) {
    struct attention a = {.b = b,
                          .arena = arena,
                          .s = s,
                          .rows = rows,
                          .batch = batch,
                          .context = context,
                          .prompt = prompt,
                          .sparse = sparse};
    sizes(&a);
    double need = (double)a.page_bytes * a.sets * batch * a.n_blocks;
    if (need > arena.bytes) {
        kbench_say("attention %s, batch %d, context %d: left out, needs %.1f GB", s.name, batch,
                   context, need / 1e9);
        return;
    }
    make_lists(&a);
    fill_arena(&a);
    make_rows(&a);
    check(&a);
    double listed = (double)a.layer_bytes * batch * a.n_listed, before = context - rows;
    struct kbench_point p = {.family = "attention",
                             .kernel = prompt   ? "prompt"
                                       : sparse ? "sparse 1/10"
                                                : "dense",
                             .dtype = "F16",
                             .shape = s.name,
                             .rows = rows,
                             .batch = batch,
                             .context = context,
                             .bytes = listed,
                             .distinct = listed * a.layers * a.sets};
    if (prompt)
        p.flops = 4.0 * s.head_dim * s.n_heads * batch * (rows * before + rows * (rows + 1.0) / 2);
    else if (s.n_heads != s.n_kv_heads && s.head_dim == 128) {
        p.goal = sparse ? 0.75 : 0.87;
        p.goal_us = 6;
    }
    kbench_measure(b, &p, a.layers * a.sets, call, &a);
    kbench_print(b, &p);
    let_go(&a);
}

void kbench_attention(struct kbench *b) {
    static const int contexts[] = {8192, 32768, 131072}, batches[] = {1, 32}, rows[] = {1, 5};
    struct kern_device_info info;
    struct arena m;
    b->k->ops->info(b->k, &info);
    m.bytes = fmin(arena_most, arena_share * (double)info.free_bytes);
    m.at = kbench_reserve(b, (size_t)m.bytes);
    for (int c = 0; c < 3; c++)
        for (int n = 0; n < 2; n++)
            for (int sparse = 0; sparse < 2; sparse++)
                for (int r = 0; r < 2; r++) {
                    if (b->quick && (contexts[c] == 131072) && n) continue;
                    point(b, m, of_8b, rows[r], batches[n], contexts[c], false, sparse);
                }
    for (int r = 0; r < 2; r++) {
        point(b, m, of_1b, rows[r], 1, 32768, false, false);
        point(b, m, of_7b, rows[r], 1, 32768, false, false);
    }
    point(b, m, of_1b, 1, 1, 131072, false, false);
    point(b, m, of_8b, 9, 16, 2048, false, false); /* verification of a full batch */
    point(b, m, of_8b, 4096, 1, 4096, true, false);
    point(b, m, of_8b, 4096, 1, 28672 + 4096, true, false);
    kbench_free(b, m.at);
}
