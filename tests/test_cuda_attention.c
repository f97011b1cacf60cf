/* Attention of generated rows on the CUDA device, against the double twin on the CPU: the same
 * 16-bit keys and values in each backend's own order, queries that are exact in 16 bits.
 *
 * Tolerance. Products of 16-bit numbers are exact and sums run in f32, so scores are off by some
 * 1e-6; what shows is the rounding of the softmax's weights to 16 bits before they meet V: each is
 * off by up to 2^-11 (f16) or 2^-9 (bf16) of itself, so the weighted mean of values |v| <= 1 is off
 * by at most that, and by as much again of nothing else. Held to 1.2 times that.
 *
 * Memory. Pages hold a layer beside the one in use, and there are pages that no list names: both
 * are NaN everywhere, as is what lies behind a sequence's last token: a single product with it
 * shows. */
#include "tests/cuda_helper.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/half.h"

#define __host__
#define __device__
#define constexpr
#include "kernels/cuda/page.cuh"

enum { MAX_SEQS = 40, MAX_ROWS = 256 };

/* ---- A case -------------------------------------------------------------------------------- */

/* Context of `length` tokens of which the last n_rows are the pass's rows. keep_every: of the
 * blocks before the rows' own, every n-th is listed. */
struct seq {
    int length, n_rows, keep_every;
    uint64_t salt; /* of its contents */
};

struct shape {
    int n_heads, n_kv, head_dim;
    enum kern_dtype dtype;
};

struct bed {
    struct shape s;
    int n_seqs, n_rows, capacity, n_pages;
    struct seq seq[MAX_SEQS];
    int32_t position[MAX_ROWS], row_seq[MAX_ROWS], zeros[MAX_ROWS];
    int32_t seq_row[MAX_SEQS], seq_n_rows[MAX_SEQS];
    int32_t *page, *block, *n_blocks; /* [n_lists][capacity] */
    int per_seq;                      /* lists a sequence: 1, or n_kv */
    uint16_t *cpu_pages, *gpu_pages;
    struct kern_kv kv; /* without base */
    float *qkv;
    uint64_t *ancestors; /* NULL or [n_rows] */
    uint8_t *quarters;   /* NULL or [n_lists][capacity] */
};

static float value(uint64_t salt, int what, int position, int i) {
    uint64_t x = salt * 0x9e3779b97f4a7c15u + (uint64_t)position * 0xc2b2ae3d27d4eb4fu +
                 (uint64_t)(what * 100000 + i) * 0x94d049bb133111ebu;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 29) * 0x94d049bb133111ebu;
    return (float)(x >> 40) * 0x1p-23f - 1;
}

static uint16_t bits16(enum kern_dtype t, float x) {
    return t == KERN_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}
static float round16(enum kern_dtype t, float x) {
    return t == KERN_F16 ? f16_to_f32(f32_to_f16(x)) : bf16_to_f32(f32_to_bf16(x));
}

static bool listed(const struct seq *q, int list, int block) {
    int own = (q->length - q->n_rows) / KERN_BLOCK;
    return block >= own || (block + list) % q->keep_every == 0;
}

/* Elements of a page: two layers of K and V; the second one is ours. */
static size_t page_elements(const struct shape *s) {
    return 2 * (size_t)s->n_kv * 2 * KERN_BLOCK * (size_t)s->head_dim;
}

static void fill_block(struct bed *b, const struct seq *q, int block, int page) {
    const struct shape *s = &b->s;
    size_t hd = (size_t)s->head_dim, plane = KERN_BLOCK * hd;
    for (int h = 0; h < s->n_kv; h++)
        for (int v = 0; v < 2; v++) {
            size_t at = (size_t)page * page_elements(s) +
                        ((size_t)(2 + v) * (size_t)s->n_kv + (size_t)h) * plane;
            for (int t = 0; t < KERN_BLOCK && block * KERN_BLOCK + t < q->length; t++)
                for (int d = 0; d < s->head_dim; d++) {
                    uint16_t x = bits16(s->dtype,
                                        value(q->salt, 2 + v, block * KERN_BLOCK + t, h * 256 + d));
                    b->cpu_pages[at + (size_t)(v ? t * s->head_dim + d : d * KERN_BLOCK + t)] = x;
                    b->gpu_pages[at + (size_t)page_at(t, d, s->head_dim)] = x;
                }
        }
}

/* per_seq: 1, or n_kv lists of different blocks. spare: entries of lists beyond the longest. */
static struct bed *make(struct shape s, const struct seq *seqs, int n_seqs, int per_seq,
                        int spare) {
    struct bed *b = calloc(1, sizeof *b);
    assert_non_null(b);
    assert_true(n_seqs <= MAX_SEQS);
    b->s = s, b->n_seqs = n_seqs, b->per_seq = per_seq, b->n_pages = 3;
    memcpy(b->seq, seqs, (size_t)n_seqs * sizeof *seqs);
    for (int i = 0; i < n_seqs; i++) {
        int blocks = (seqs[i].length + KERN_BLOCK - 1) / KERN_BLOCK;
        b->n_pages += blocks;
        if (blocks + spare > b->capacity) b->capacity = blocks + spare;
        b->seq_row[i] = b->n_rows;
        b->seq_n_rows[i] = seqs[i].n_rows;
        assert_true(b->n_rows + seqs[i].n_rows <= MAX_ROWS);
        for (int r = 0; r < seqs[i].n_rows; r++) {
            b->position[b->n_rows] = seqs[i].length - seqs[i].n_rows + r;
            b->row_seq[b->n_rows++] = i;
        }
    }
    size_t n = (size_t)b->n_pages * page_elements(&s), lists = (size_t)(n_seqs * per_seq);
    b->cpu_pages = malloc(n * 2);
    b->gpu_pages = malloc(n * 2);
    b->page = malloc(lists * (size_t)b->capacity * sizeof *b->page);
    b->block = malloc(lists * (size_t)b->capacity * sizeof *b->block);
    b->n_blocks = calloc(lists, sizeof *b->n_blocks);
    assert_true(b->cpu_pages && b->gpu_pages && b->page && b->block && b->n_blocks);
    memset(b->cpu_pages, 0xFF, n * 2);
    memset(b->gpu_pages, 0xFF, n * 2);
    for (size_t i = 0; i < lists * (size_t)b->capacity; i++)
        b->page[i] = b->n_pages - 1, b->block[i] = 1 << 24; /* behind n_blocks */
    int id = 0;
    for (int i = 0; i < n_seqs; i++)
        for (int k = 0; k * KERN_BLOCK < seqs[i].length; k++, id++) {
            int page = b->n_pages - 2 - id; /* order in memory is not order in the list */
            bool any = false;
            for (int j = 0; j < per_seq; j++) {
                if (!listed(&seqs[i], j, k)) continue;
                size_t list = (size_t)(i * per_seq + j);
                size_t at = list * (size_t)b->capacity + (size_t)b->n_blocks[list]++;
                b->page[at] = page, b->block[at] = k;
                any = true;
            }
            if (any) fill_block(b, &seqs[i], k, page);
        }
    size_t plane = KERN_BLOCK * (size_t)s.head_dim * 2;
    b->kv = (struct kern_kv){.page_stride = page_elements(&s) * 2,
                             .k_offset = 2 * (size_t)s.n_kv * plane,
                             .v_offset = 3 * (size_t)s.n_kv * plane,
                             .head_stride = plane,
                             .dtype = s.dtype,
                             .n_kv_heads = s.n_kv,
                             .head_dim = s.head_dim};
    int width = (s.n_heads + 2 * s.n_kv) * s.head_dim;
    b->qkv = malloc((size_t)(b->n_rows * width) * sizeof *b->qkv);
    assert_non_null(b->qkv);
    for (int r = 0; r < b->n_rows; r++)
        for (int i = 0; i < width; i++)
            b->qkv[r * width + i] =
                i < s.n_heads * s.head_dim
                    ? round16(s.dtype, value(seqs[b->row_seq[r]].salt, 1, b->position[r], i) * 4)
                    : NAN;
    return b;
}

static void discard(struct bed *b) {
    free(b->cpu_pages), free(b->gpu_pages);
    free(b->page), free(b->block), free(b->n_blocks);
    free(b->qkv), free(b->ancestors), free(b->quarters);
    free(b);
}

static float scale_of(const struct bed *b) {
    return 1.f / sqrtf((float)b->s.head_dim);
}
static size_t out_floats(const struct bed *b) {
    return (size_t)b->n_rows * (size_t)(b->s.n_heads * b->s.head_dim);
}

static struct kern_batch batch_of(const struct bed *b) {
    return (struct kern_batch){.rows = {.n_gen = b->n_rows},
                               .token = b->zeros,
                               .position = b->position,
                               .row_seq = b->row_seq,
                               .slot_page = b->zeros,
                               .n_seqs = b->n_seqs,
                               .seq_row = b->seq_row,
                               .seq_n_rows = b->seq_n_rows};
}
static struct kern_lists lists_of(const struct bed *b) {
    return (struct kern_lists){.page = b->page,
                               .block = b->block,
                               .n_blocks = b->n_blocks,
                               .capacity = b->capacity,
                               .seq_stride = b->per_seq,
                               .head_stride = b->per_seq > 1,
                               .quarters = b->quarters};
}

/* ---- Both backends ------------------------------------------------------------------------- */

static float *run_twin(const struct bed *b) {
    struct kern *k = cpu_twin();
    struct kern_batch batch = batch_of(b);
    struct kern_lists lists = lists_of(b);
    struct kern_kv kv = b->kv;
    struct kern_attn_taps taps = {.ancestors = b->ancestors};
    kv.base = b->cpu_pages;
    size_t bytes = k->ops->attn_scratch_bytes(k, batch.rows, b->n_seqs, b->s.n_heads, b->s.head_dim,
                                              b->capacity);
    void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    float *out = malloc(out_floats(b) * sizeof *out);
    assert_true(scratch && out);
    assert_int_equal(k->ops->attention(k, &batch, &lists, b->s.n_heads, scale_of(b), b->qkv, &kv,
                                       &taps, scratch, out),
                     0);
    free(scratch);
    k->ops->close(k);
    return out;
}

/* The packed rows that attention itself writes are those that `pack` makes of `out`. out: backend
 * memory, as attention left it. */
static void check_packed(struct kern *k, const struct bed *b, const struct kern_batch *batch,
                         const struct kern_lists *lists, const float *qkv, const struct kern_kv *kv,
                         struct kern_attn_taps taps, void *scratch, const float *out) {
    int cols = b->s.n_heads * b->s.head_dim;
    size_t bytes = k->ops->act_bytes(k, batch->rows, cols);
    float *spare = dev_put(k, NULL, out_floats(b) * sizeof *out);
    for (int i = 0; i < 2; i++) {
        enum kern_dtype partner = i ? KERN_BF16 : KERN_F16;
        struct kern_act want = {dev_put(k, NULL, bytes), bytes, partner};
        taps.act = (struct kern_act){dev_put(k, NULL, bytes), bytes, partner};
        assert_int_equal(k->ops->attention(k, batch, lists, b->s.n_heads, scale_of(b), qkv, kv,
                                           &taps, scratch, spare),
                         0);
        assert_int_equal(k->ops->pack(k, batch->rows, cols, out, want), 0);
        uint16_t *x = dev_get(k, taps.act.data, bytes), *y = dev_get(k, want.data, bytes);
        for (size_t at = 0; at < bytes / sizeof *x; at++)
            if (x[at] != y[at])
                fail_msg("packed for %s, %d heads of %d: element %zu of %zu is %04x, want %04x",
                         kern_dtype_name(partner), b->s.n_heads, b->s.head_dim, at,
                         bytes / sizeof *x, x[at], y[at]);
        free(x);
        free(y);
        k->ops->unreserve(k, taps.act.data);
        k->ops->unreserve(k, want.data);
    }
    k->ops->unreserve(k, spare);
}

/* Runs three times into buffers that start as NaNs: the second run finds the scratch as the first
 * left it; the third goes on with what the second found out about rows and lists, and may start
 * while that one runs. kv_bytes (NULL: not wanted): what the counter grew by in one run. */
static float *run_cuda(struct kern *k, const struct bed *b, uint64_t *kv_bytes) {
    struct kern_batch batch = batch_of(b);
    struct kern_lists lists = lists_of(b);
    struct kern_kv kv = b->kv;
    struct kern_attn_taps taps = {0};
    struct err e = {0};
    size_t n_lists = (size_t)(b->n_seqs * b->per_seq), rows = (size_t)b->n_rows * 4;
    size_t entries = n_lists * (size_t)b->capacity * 4;
    uint64_t counter = 5;
    void *dev[20];
    int n = 0;
    batch.position = dev[n++] = dev_put(k, b->position, rows);
    batch.row_seq = dev[n++] = dev_put(k, b->row_seq, rows);
    batch.seq_row = dev[n++] = dev_put(k, b->seq_row, (size_t)b->n_seqs * 4);
    batch.seq_n_rows = dev[n++] = dev_put(k, b->seq_n_rows, (size_t)b->n_seqs * 4);
    lists.page = dev[n++] = dev_put(k, b->page, entries);
    lists.block = dev[n++] = dev_put(k, b->block, entries);
    lists.n_blocks = dev[n++] = dev_put(k, b->n_blocks, n_lists * 4);
    if (b->quarters) lists.quarters = dev[n++] = dev_put(k, b->quarters, entries / 4);
    kv.base = dev[n++] = dev_put(k, b->gpu_pages, (size_t)b->n_pages * b->kv.page_stride);
    float *qkv = dev[n++] =
        dev_put(k, b->qkv, rows * (size_t)((b->s.n_heads + 2 * b->s.n_kv) * b->s.head_dim));
    if (b->ancestors) taps.ancestors = dev[n++] = dev_put(k, b->ancestors, (size_t)b->n_rows * 8);
    taps.kv_bytes_read = dev[n++] = dev_put(k, &counter, sizeof counter);
    size_t bytes = k->ops->attn_scratch_bytes(k, batch.rows, b->n_seqs, b->s.n_heads, b->s.head_dim,
                                              b->capacity);
    void *scratch = dev[n++] = dev_put(k, NULL, bytes);
    float *out[3], *got[3];
    for (int i = 0; i < 3; i++) {
        out[i] = dev[n++] = dev_put(k, NULL, out_floats(b) * sizeof *out[i]);
        lists.repeated = i == 2;
        assert_int_equal(k->ops->attention(k, &batch, &lists, b->s.n_heads, scale_of(b), qkv, &kv,
                                           &taps, scratch, out[i]),
                         0);
        if (i == 0) assert_ok(k->ops->sync(k, &e), e);
    }
    assert_ok(k->ops->sync(k, &e), e);
    for (int i = 0; i < 3; i++) got[i] = dev_get(k, out[i], out_floats(b) * sizeof *out[i]);
    assert_memory_equal(got[0], got[1], out_floats(b) * sizeof **out);
    assert_memory_equal(got[0], got[2], out_floats(b) * sizeof **out);
    uint64_t *after = dev_get(k, taps.kv_bytes_read, sizeof *after);
    if (kv_bytes) *kv_bytes = (*after - counter) / 3;
    assert_true((*after - counter) % 3 == 0);
    free(after);
    lists.repeated = false;
    check_packed(k, b, &batch, &lists, qkv, &kv, taps, scratch, out[0]);
    free(got[1]), free(got[2]);
    while (n) k->ops->unreserve(k, dev[--n]);
    return got[0];
}

static double tolerance(const struct bed *b) {
    return 1.2 * (b->s.dtype == KERN_F16 ? 0x1p-11 : 0x1p-9);
}

static void check(const char *name, const struct bed *b, const float *got, const float *want) {
    int hd = b->s.head_dim, n_bad = 0, first = -1;
    double worst = 0;
    for (size_t i = 0; i < out_floats(b); i++) {
        double d = fabs((double)got[i] - (double)want[i]);
        if (d > worst) worst = d;
        if (d <= tolerance(b)) continue;
        if (first < 0) first = (int)i;
        n_bad++;
    }
    if (first < 0) return;
    int r = first / (b->s.n_heads * hd);
    fail_msg("%s: %d heads, %d kv, head_dim %d, %s: %d of %zu wrong, worst %g (allowed %g); first: "
             "row %d (sequence %d of length %d, %d rows, position %d), head %d, element %d: got "
             "%.9g, want %.9g",
             name, b->s.n_heads, b->s.n_kv, hd, kern_dtype_name(b->s.dtype), n_bad, out_floats(b),
             worst, tolerance(b), r, b->row_seq[r], b->seq[b->row_seq[r]].length,
             b->seq[b->row_seq[r]].n_rows, b->position[r], first / hd % b->s.n_heads, first % hd,
             (double)got[first], (double)want[first]);
}

/* Row ra of a against row rb of b, bit for bit. */
static void same_row(const char *name, const struct bed *a, const float *x, int ra,
                     const struct bed *b, const float *y, int rb) {
    int n = a->s.n_heads * a->s.head_dim;
    assert_int_equal(n, b->s.n_heads * b->s.head_dim);
    for (int i = 0; i < n; i++) {
        uint32_t p, q;
        memcpy(&p, x + ra * n + i, 4);
        memcpy(&q, y + rb * n + i, 4);
        if (p != q)
            fail_msg("%s: head_dim %d: row %d of %d and row %d of %d differ first at head %d, "
                     "element %d: %.9g (%08x) and %.9g (%08x)",
                     name, a->s.head_dim, ra, a->n_rows, rb, b->n_rows, i / a->s.head_dim,
                     i % a->s.head_dim, (double)x[ra * n + i], p, (double)y[rb * n + i], q);
    }
}

static void compare(const char *name, struct kern *k, struct bed *b) {
    float *want = run_twin(b), *got = run_cuda(k, b, NULL);
    check(name, b, got, want);
    free(want);
    free(got);
    discard(b);
}

/* ---- Tests --------------------------------------------------------------------------------- */

/* Every head_dim's own kernel and those that share one, groups, types, lengths around the edges of
 * pages and leaves. */
static void test_cuda_attention_shapes(void) {
    static const struct shape shapes[] = {
        {3, 3, 64, KERN_F16},   {9, 3, 64, KERN_F16},  {8, 2, 64, KERN_BF16},
        {8, 2, 80, KERN_F16},   {8, 1, 80, KERN_BF16}, {8, 2, 96, KERN_F16},
        {3, 1, 96, KERN_BF16},  {8, 2, 128, KERN_F16}, {16, 2, 128, KERN_BF16},
        {4, 4, 128, KERN_BF16}, {4, 1, 256, KERN_F16}, {3, 1, 256, KERN_BF16},
        {4, 1, 16, KERN_F16},   {6, 2, 48, KERN_BF16}, {4, 2, 112, KERN_F16},
        {4, 1, 160, KERN_BF16}, {2, 2, 240, KERN_F16}, {14, 2, 64, KERN_F16},
    };
    static const int lengths[] = {1, 17, 63, 64, 65, 129, 511, 512, 513, 1100};
    static const int rows[] = {1, 5, 9, 17, 2};
    struct kern *k = cuda_or_skip();
    int n = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++, n++) {
            if (lengths[l] > 200 && (i + l) % 3) continue; /* a third of the long ones */
            int m = rows[n % 5] < lengths[l] ? rows[n % 5] : lengths[l];
            struct seq q = {lengths[l], m, 1, i + 1};
            compare("shapes", k, make(shapes[i], &q, 1, 1, n % 3));
        }
    k->ops->close(k);
}

/* Sequences of all kinds in one pass, lists with gaps, an idle row inside and one behind. */
static const struct seq mix[] = {
    {700, 5, 3, 11},  {1, 1, 1, 12},   {1300, 9, 4, 13}, {65, 3, 1, 14},
    {640, 17, 2, 15}, {40, 12, 1, 16}, {513, 1, 5, 17},  {2999, 2, 1, 18},
};
enum { N_MIX = sizeof mix / sizeof *mix };

static void test_cuda_attention_mixed(void) {
    static const struct shape shapes[] = {
        {9, 3, 64, KERN_F16}, {8, 2, 128, KERN_BF16}, {6, 2, 96, KERN_F16}, {3, 3, 256, KERN_BF16}};
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 4; i++) {
        struct bed *b = make(shapes[i], mix, N_MIX, 1, 2);
        b->row_seq[3] = b->row_seq[b->n_rows - 1] = -1;
        int width = shapes[i].n_heads * shapes[i].head_dim;
        float *want = run_twin(b), *got = run_cuda(k, b, NULL);
        check("mixed", b, got, want);
        for (int d = 0; d < width; d++) assert_true(got[3 * width + d] == 0);
        free(got);
        free(want);
        discard(b);
    }
    k->ops->close(k);
}

/* Lists of their own for each KV head. */
static void test_cuda_attention_list_per_head(void) {
    static const struct shape shapes[] = {{9, 3, 64, KERN_F16}, {8, 2, 128, KERN_BF16}};
    static const struct seq seqs[] = {{900, 4, 3, 71}, {64, 1, 1, 72}, {2000, 9, 2, 73}};
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 2; i++) {
        compare("list per head", k, make(shapes[i], seqs, 3, shapes[i].n_kv, 1));
    }
    k->ops->close(k);
}

/* Of the blocks before the rows' own some quarters; NaN where no list of any head reads. Returns
 * the bytes that the lists name, where each sequence's queries go through a page once. */
static uint64_t cut_quarters(struct bed *b) {
    size_t n = (size_t)(b->n_seqs * b->per_seq * b->capacity), hd = (size_t)b->s.head_dim;
    uint64_t bytes = 0;
    b->quarters = malloc(n);
    assert_non_null(b->quarters);
    memset(b->quarters, 15, n);
    for (size_t at = 0; at < n; at++) {
        size_t list = at / (size_t)b->capacity;
        const struct seq *q = &b->seq[list / (size_t)b->per_seq];
        if ((int)(at % (size_t)b->capacity) >= b->n_blocks[list]) continue;
        int block = b->block[at], own = (q->length - q->n_rows) / KERN_BLOCK;
        int heads = b->per_seq > 1 ? 1 : b->s.n_kv;
        if (block < own) b->quarters[at] = (uint8_t)(1 + at * 7 % 15);
        for (int i = 0; i < 4; i++) {
            int rows = q->length - block * KERN_BLOCK - 16 * i;
            rows = rows < 0 ? 0 : rows > 16 ? 16 : rows;
            if (b->quarters[at] >> i & 1) bytes += (uint64_t)(heads * (16 + rows)) * hd * 2;
        }
        for (int h = 0; h < b->s.n_kv; h++) {
            if (b->per_seq > 1 && h != (int)(list % (size_t)b->per_seq)) continue;
            for (int v = 0; v < 2; v++)
                for (int t = 0; t < KERN_BLOCK; t++)
                    for (int d = 0; d < b->s.head_dim && !(b->quarters[at] >> (t / 16) & 1); d++) {
                        size_t plane =
                            (size_t)b->page[at] * page_elements(&b->s) +
                            ((size_t)(2 + v) * (size_t)b->s.n_kv + (size_t)h) * KERN_BLOCK * hd;
                        size_t cpu = (size_t)(v ? t * b->s.head_dim + d : d * KERN_BLOCK + t);
                        b->cpu_pages[plane + cpu] = 0xFFFF;
                        b->gpu_pages[plane + (size_t)page_at(t, d, b->s.head_dim)] = 0xFFFF;
                    }
        }
    }
    return bytes;
}

static void test_cuda_attention_quarters(void) {
    static const struct shape shapes[] = {{9, 3, 64, KERN_F16},
                                          {8, 2, 128, KERN_BF16},
                                          {6, 2, 96, KERN_F16},
                                          {2, 2, 256, KERN_F16},
                                          {4, 4, 16, KERN_BF16}};
    static const struct seq seqs[] = {
        {900, 5, 3, 71}, {69, 5, 1, 72}, {2000, 5, 2, 73}, {131, 5, 1, 74}};
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 5; i++)
        for (int per_head = 0; per_head < 2; per_head++) {
            struct bed *b = make(shapes[i], seqs, 4, per_head ? shapes[i].n_kv : 1, 1);
            uint64_t want_bytes = cut_quarters(b), bytes;
            float *want = run_twin(b), *got = run_cuda(k, b, &bytes);
            check("quarters", b, got, want);
            assert_int_equal(bytes, want_bytes);
            free(got);
            free(want);
            discard(b);
        }
    k->ops->close(k);
}

/* More queries than go through a page together: groups of up to 64, up to 64 rows. */
static void test_cuda_attention_many_queries(void) {
    static const struct {
        struct shape s;
        int n_rows;
    } at[] = {
        {{64, 1, 32, KERN_F16}, 3},   {{64, 1, 128, KERN_BF16}, 17}, {{8, 2, 128, KERN_F16}, 64},
        {{16, 1, 256, KERN_F16}, 33}, {{20, 1, 64, KERN_BF16}, 13},  {{7, 1, 128, KERN_F16}, 9},
        {{12, 1, 64, KERN_F16}, 4},   {{6, 1, 256, KERN_BF16}, 9},
    };
    struct kern *k = cuda_or_skip();
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        struct seq q = {700, at[i].n_rows, 1, 31 + i};
        compare("many queries", k, make(at[i].s, &q, 1, 1, 0));
    }
    k->ops->close(k);
}

/* A row's bits alone, with fewer rows, in a batch, at another place, with longer lists than needed
 * (which also makes blocks join leaves themselves: capacities of 30,000 and 130,000 entries). */
static void test_cuda_attention_invariance(void) {
    static const struct shape shapes[] = {
        {9, 3, 64, KERN_F16}, {8, 2, 128, KERN_BF16}, {4, 1, 256, KERN_F16}, {14, 2, 80, KERN_F16}};
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 4; i++) {
        struct bed *all = make(shapes[i], mix, N_MIX, 1, 0);
        float *x = run_cuda(k, all, NULL);
        for (int s = 0; s < N_MIX; s++)
            for (int m = 1; m <= mix[s].n_rows; m += 3) {
                /* The first m rows of the sequence, alone; then the same behind others. */
                struct seq few[3] = {{333, 7, 1, 99}, mix[s], {90, 2, 1, 98}};
                few[1].length -= mix[s].n_rows - m;
                few[1].n_rows = m;
                struct bed *alone = make(shapes[i], few + 1, 1, 1, m % 5);
                struct bed *behind = make(shapes[i], few, 3, 1, 0);
                float *y = run_cuda(k, alone, NULL), *z = run_cuda(k, behind, NULL);
                for (int r = 0; r < m; r++) {
                    same_row("alone", all, x, all->seq_row[s] + r, alone, y, r);
                    same_row("behind", all, x, all->seq_row[s] + r, behind, z, 7 + r);
                }
                free(y), free(z);
                discard(alone), discard(behind);
            }
        for (int spare = 30000; spare <= 130000; spare += 100000) {
            struct bed *roomy = make(shapes[i], mix, N_MIX, 1, spare);
            float *y = run_cuda(k, roomy, NULL);
            for (int r = 0; r < all->n_rows; r++) same_row("roomy", all, x, r, roomy, y, r);
            free(y);
            discard(roomy);
        }
        free(x);
        discard(all);
    }
    k->ops->close(k);
}

/* Longer than a block's share of leaves: several leaves a block in one run, ends dealt out, more
 * lists than a warp looks at together. */
static void test_cuda_attention_long(void) {
    struct kern *k = cuda_or_skip();
    struct seq one = {70001, 5, 1, 41}, many[MAX_SEQS];
    struct bed *b = make((struct shape){8, 4, 64, KERN_F16}, &one, 1, 1, 0);
    /* The twin takes long: every row's bits against the row alone, one row against the twin. */
    float *x = run_cuda(k, b, NULL);
    struct seq last = {70001, 1, 1, 41};
    struct bed *alone = make((struct shape){8, 4, 64, KERN_F16}, &last, 1, 1, 500);
    float *y = run_cuda(k, alone, NULL), *want = run_twin(alone);
    check("long", alone, y, want);
    same_row("long", b, x, 4, alone, y, 0);
    free(x), free(y), free(want);
    discard(b), discard(alone);
    for (int i = 0; i < MAX_SEQS; i++)
        many[i] = (struct seq){1 + i * 37, i % 5 + 1, 1 + i % 3, 200 + (uint64_t)i};
    compare("many", k, make((struct shape){6, 3, 64, KERN_BF16}, many, MAX_SEQS, 1, 0));
    compare("many lists", k, make((struct shape){6, 3, 64, KERN_F16}, many, MAX_SEQS, 3, 0));
    k->ops->close(k);
}

/* Blocks with 32 pages in a row: nodes wait in registers, in shared memory and in the scratch. The
 * same bits as one row alone, whose pages many blocks share and whose products other instructions
 * make. */
static void test_cuda_attention_waiting(void) {
    struct kern *k = cuda_or_skip();
    struct shape s = {4, 1, 128, KERN_F16};
    struct seq q[17];
    for (int i = 0; i < 17; i++) q[i] = (struct seq){32001 - i, 5, 1, 300 + (uint64_t)i};
    struct bed *all = make(s, q, 17, 1, 0);
    float *x = run_cuda(k, all, NULL);
    for (int i = 0; i < 17; i += 8) {
        q[i].n_rows = 1;
        struct bed *alone = make(s, q + i, 1, 1, 0);
        float *y = run_cuda(k, alone, NULL), *want = i ? NULL : run_twin(alone);
        if (want) check("waiting", alone, y, want);
        same_row("waiting", all, x, all->seq_row[i] + 4, alone, y, 0);
        free(y), free(want);
        discard(alone);
    }
    free(x);
    discard(all);
    k->ops->close(k);
}

/* A token tree: rows 0-1-2 and 0-3-4 of a pass; siblings do not see each other, and what a row does
 * not see does not change its bits. The pass's rows lie on both sides of a page's edge. */
static void test_cuda_attention_ancestors(void) {
    static const uint64_t masks[] = {0x01, 0x03, 0x07, 0x09, 0x19, 0x01, 0x03};
    static const struct shape shapes[] = {{6, 2, 64, KERN_F16}, {8, 2, 128, KERN_BF16}};
    static const struct seq seqs[] = {{67, 5, 1, 51}, {600, 2, 1, 52}};
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 2; i++) {
        struct bed *b = make(shapes[i], seqs, 2, 1, 0);
        b->ancestors = malloc(sizeof masks);
        assert_non_null(b->ancestors);
        memcpy(b->ancestors, masks, sizeof masks);
        float *want = run_twin(b), *got = run_cuda(k, b, NULL);
        check("ancestors", b, got, want);
        /* Position 64 is row 2: rows 3 and 4 do not see it. Other values there. */
        struct seq other = {65, 1, 1, 77};
        fill_block(b, &other, 1, b->page[1]);
        float *then = run_cuda(k, b, NULL);
        same_row("tree, row 4", b, got, 4, b, then, 4);
        int width = b->s.n_heads * b->s.head_dim;
        assert_true(memcmp(got + 2 * width, then + 2 * width, (size_t)width * 4) != 0);
        free(want), free(got), free(then);
        discard(b);
    }
    k->ops->close(k);
}

/* The counter, as kernels/cpu/attention.h says: K's whole page, V up to the last token seen. */
static void test_cuda_attention_bytes(void) {
    struct kern *k = cuda_or_skip();
    struct seq q = {65, 1, 1, 61}, sparse = {64 * 20 + 65, 3, 4, 62};
    struct shape s = {6, 2, 64, KERN_F16};
    uint64_t bytes;
    struct bed *b = make(s, &q, 1, 1, 3);
    free(run_cuda(k, b, &bytes));
    assert_int_equal(bytes, 2 * (2 * 64 + 65) * 64 * 2);
    discard(b);
    b = make(s, &sparse, 1, 1, 0);
    free(run_cuda(k, b, &bytes));
    /* blocks 0, 4, 8, 12, 16 whole; 20 and 21 hold the rows: 20 whole, 21 with one token */
    assert_int_equal(bytes, 2 * (7 * 64 + 6 * 64 + 1) * 64 * 2);
    discard(b);
    k->ops->close(k);
}

/* Rows and lists that lie: sequences out of range, negative counts, rows beyond the batch. Nothing
 * outside the buffers may be touched (compute-sanitizer sees it), rows without a sequence are 0. */
static void test_cuda_attention_hostile(void) {
    struct kern *k = cuda_or_skip();
    struct bed *b = make((struct shape){6, 2, 64, KERN_F16}, mix, N_MIX, 1, 0);
    b->row_seq[0] = 1000, b->row_seq[1] = -7;
    b->seq_row[1] = -3;
    b->seq_n_rows[2] = 1 << 20;
    b->seq_row[3] = 1 << 20;
    b->n_blocks[4] = -1;
    b->n_blocks[0] = 1 << 20;
    b->position[20] = -5;
    /* beyond n_blocks the lists name no real block, but a page that exists */
    float *x = run_cuda(k, b, NULL);
    for (int i = 0; i < 2 * 6 * 64; i++) assert_true(x[i] == 0);
    free(x);
    discard(b);
    k->ops->close(k);
}

const struct test tests[] = {
    {"cuda_attention_shapes", TEST_GPU, 120000, test_cuda_attention_shapes},
    {"cuda_attention_mixed", TEST_GPU, 120000, test_cuda_attention_mixed},
    {"cuda_attention_list_per_head", TEST_GPU, 120000, test_cuda_attention_list_per_head},
    {"cuda_attention_quarters", TEST_GPU, 120000, test_cuda_attention_quarters},
    {"cuda_attention_many_queries", TEST_GPU, 120000, test_cuda_attention_many_queries},
    {"cuda_attention_invariance", TEST_GPU, 120000, test_cuda_attention_invariance},
    {"cuda_attention_long", TEST_GPU, 120000, test_cuda_attention_long},
    {"cuda_attention_waiting", TEST_GPU, 120000, test_cuda_attention_waiting},
    {"cuda_attention_ancestors", TEST_GPU, 120000, test_cuda_attention_ancestors},
    {"cuda_attention_bytes", TEST_GPU, 120000, test_cuda_attention_bytes},
    {"cuda_attention_hostile", TEST_GPU, 120000, test_cuda_attention_hostile},
    {0},
};
