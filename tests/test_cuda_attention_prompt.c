/* Goal: CUDA attention of prompt rows, and the mass of list entries, give what the double twin
 * gives, with the same bits for a row in any chunk and batch, and touch nothing that a row does not
 * see. Method: the same sequences in the CPU's pages and in CUDA's, run through both tables.
 *
 * Queries are rounded to the type of the cache, so only the weights p are rounded on the way: a
 * relative error of at most u = 2^-11 (f16) or 2^-8 (bf16) each, hence u |v|max in the output; f32
 * sums and exp2 add some 1e-5. |v| < 1, so the tolerance is u * 1.1 + 2e-5. Masses sum unrounded
 * weights: 3e-5.
 *
 * Pages that no list names and tokens behind a sequence's end are NaN. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/half.h"
#include "tests/cuda_helper.h"

enum { MAX_SEQS = 6, LAYERS = 2, UNIT = 1024, MASS_LINES = 2 }; /* lines a sequence */

/* ---- A pass -------------------------------------------------------------------------------- */

/* Rows at positions start .. start + n_rows - 1 of which the first n_gen are generated ones; tokens
 * up to `length` exist (0: up to the last row). keep_every: of the blocks before the rows' own,
 * every n-th is listed. idle: this row of it is idle (-1: none). */
struct seq {
    int start, n_rows, n_gen, keep_every, length, idle;
    uint64_t salt;
};

struct shape {
    int n_heads, n_kv, head_dim;
    enum kern_dtype dtype;
};

struct pass {
    struct shape s;
    int n_seqs, n_rows, capacity, n_lists, lists_per_seq, n_pages;
    struct seq seq[MAX_SEQS];
    struct kern_batch b;
    struct kern_lists lists;
    struct kern_kv kv;
    int32_t *position, *row_seq, seq_row[MAX_SEQS], seq_n_rows[MAX_SEQS];
    int32_t *page, *block, *n_blocks;
    size_t page_bytes, arena_bytes;
    uint8_t *cpu, *gpu; /* pages in either order, both on the host */
    float *qkv;
    uint64_t *ancestors; /* NULL: none */
    int32_t *mass_line;  /* NULL: none */
};

/* What a backend gave. */
struct result {
    float *out, *mass;   /* mass: [n_lists * MASS_LINES][capacity] */
    float *quarter_mass; /* [n_lists * MASS_LINES][capacity][4] */
    float *head_mass;    /* [n_seqs][n_heads][capacity] */
    uint64_t bytes;
};

/* In [-1, 1), a mix of the arguments. */
static float value(uint64_t salt, int what, int position, int i) {
    uint64_t x = salt * 0x9e3779b97f4a7c15u + (uint64_t)position * 0xc2b2ae3d27d4eb4fu +
                 (uint64_t)(what * 100000 + i) * 0x94d049bb133111ebu;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 29) * 0x94d049bb133111ebu;
    return (float)(x >> 40) * 0x1p-23f - 1;
}

static uint16_t to16(enum kern_dtype t, float x) {
    return t == KERN_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}
static float rounded(enum kern_dtype t, float x) {
    return t == KERN_F16 ? f16_to_f32(f32_to_f16(x)) : bf16_to_f32(f32_to_bf16(x));
}

/* page.cuh, said again: the place of element i of token t in a plane. */
static size_t plane_at(int t, int i, int head_dim) {
    int chunks = head_dim / 8, p = chunks & -chunks;
    if (p > 8) p = 8;
    int c = i / 8, chunk = c % p ^ ((t / (8 / p)) & (p - 1));
    return (size_t)(((c / p * 64 + t) * p + chunk) * 8 + i % 8);
}

static int length_of(const struct seq *q) {
    return q->length ? q->length : q->start + q->n_rows;
}
static bool listed(const struct seq *q, int block) {
    return block >= q->start / KERN_BLOCK || block % q->keep_every == 0;
}

/* Element d of head h's K or V of a token, in both arenas. */
static void put(struct pass *p, int page, int h, bool is_v, int t, int d, uint16_t bits) {
    size_t at = (size_t)page * p->kv.page_stride + (is_v ? p->kv.v_offset : p->kv.k_offset) +
                (size_t)h * p->kv.head_stride;
    size_t cpu = is_v ? (size_t)(t * p->s.head_dim + d) : (size_t)(d * KERN_BLOCK + t);
    memcpy(p->cpu + at + 2 * cpu, &bits, 2);
    memcpy(p->gpu + at + 2 * plane_at(t, d, p->s.head_dim), &bits, 2);
}

static void fill_block(struct pass *p, const struct seq *q, int block, int page) {
    for (int h = 0; h < p->s.n_kv; h++)
        for (int t = 0; t < KERN_BLOCK && block * KERN_BLOCK + t < length_of(q); t++)
            for (int d = 0; d < p->s.head_dim; d++) {
                int at = block * KERN_BLOCK + t;
                put(p, page, h, false, t, d, to16(p->s.dtype, value(q->salt, 2, at, h * 256 + d)));
                put(p, page, h, true, t, d, to16(p->s.dtype, value(q->salt, 3, at, h * 256 + d)));
            }
}

/* The rows of a class, all sequences'. */
static void make_rows(struct pass *p, bool prompt) {
    int width = (p->s.n_heads + 2 * p->s.n_kv) * p->s.head_dim;
    for (int s = 0; s < p->n_seqs; s++) {
        const struct seq *q = &p->seq[s];
        int begin = prompt ? q->n_gen : 0, end = prompt ? q->n_rows : q->n_gen;
        for (int r = begin; r < end; r++) {
            int row = p->n_rows++;
            if (r == 0) p->seq_row[s] = row;
            assert_int_equal(row, p->seq_row[s] + r); /* rows of a sequence are consecutive */
            p->position[row] = q->start + r;
            p->row_seq[row] = r == q->idle ? -1 : s;
            for (int i = 0; i < p->s.n_heads * p->s.head_dim; i++)
                p->qkv[row * width + i] =
                    rounded(p->s.dtype, 4 * value(q->salt, 1, q->start + r, i));
            *(prompt ? &p->b.rows.n_prompt : &p->b.rows.n_gen) += 1;
        }
        p->seq_n_rows[s] = q->n_rows;
    }
}

/* Lists: lists_per_seq 1, or one for each KV head, of which head h drops every (h + 2)-th block
 * that is not the rows' own. Page ids descend and lie apart. */
static void make_lists(struct pass *p) {
    int unit = (int)(p->page_bytes / UNIT), next = p->n_pages;
    for (int s = 0; s < p->n_seqs; s++) {
        const struct seq *q = &p->seq[s];
        for (int b = 0; b * KERN_BLOCK < length_of(q); b++) {
            int page = --next * unit;
            if (!listed(q, b)) continue;
            fill_block(p, q, b, page);
            for (int l = 0; l < p->lists_per_seq; l++) {
                int list = s * p->lists_per_seq + l;
                if (l && b < q->start / KERN_BLOCK && b % (l + 2) == 0) continue;
                int at = list * p->capacity + p->n_blocks[list]++;
                p->page[at] = page;
                p->block[at] = b;
            }
        }
    }
}

static struct pass *make(struct shape s, const struct seq *seqs, int n_seqs, bool per_head) {
    struct pass *p = calloc(1, sizeof *p);
    assert_non_null(p);
    p->s = s;
    p->n_seqs = n_seqs;
    memcpy(p->seq, seqs, (size_t)n_seqs * sizeof *seqs);
    int n_rows = 0;
    for (int i = 0; i < n_seqs; i++) {
        int blocks = (length_of(&seqs[i]) + KERN_BLOCK - 1) / KERN_BLOCK;
        p->n_pages += blocks;
        if (blocks + 3 > p->capacity) p->capacity = blocks + 3;
        n_rows += seqs[i].n_rows;
    }
    p->lists_per_seq = per_head ? s.n_kv : 1;
    p->n_lists = n_seqs * p->lists_per_seq;
    size_t plane = (size_t)s.head_dim * KERN_BLOCK * 2, half = plane * (size_t)s.n_kv;
    p->page_bytes = 2 * half * LAYERS;
    p->arena_bytes = p->page_bytes * (size_t)p->n_pages;
    p->kv = (struct kern_kv){.page_stride = UNIT,
                             .k_offset = 2 * half, /* the second layer's */
                             .v_offset = 3 * half,
                             .head_stride = plane,
                             .dtype = s.dtype,
                             .n_kv_heads = s.n_kv,
                             .head_dim = s.head_dim};
    p->cpu = malloc(p->arena_bytes);
    p->gpu = malloc(p->arena_bytes);
    assert_true(p->cpu && p->gpu);
    memset(p->cpu, 0xff, p->arena_bytes);
    memset(p->gpu, 0xff, p->arena_bytes);
    p->position = calloc((size_t)n_rows, sizeof *p->position);
    p->row_seq = calloc((size_t)n_rows, sizeof *p->row_seq);
    p->qkv = calloc((size_t)(n_rows * (s.n_heads + 2 * s.n_kv) * s.head_dim), sizeof *p->qkv);
    size_t entries = (size_t)(p->n_lists * p->capacity);
    p->page = malloc(entries * sizeof *p->page);
    p->block = malloc(entries * sizeof *p->block);
    p->n_blocks = calloc((size_t)p->n_lists, sizeof *p->n_blocks);
    assert_true(p->position && p->row_seq && p->qkv && p->page && p->block && p->n_blocks);
    for (size_t i = 0; i < entries; i++) p->page[i] = 1 << 29, p->block[i] = 1 << 20;
    make_rows(p, false);
    make_rows(p, true);
    make_lists(p);
    return p;
}

static void discard(struct pass *p) {
    void *all[] = {p->cpu,  p->gpu,   p->position, p->row_seq,   p->qkv,
                   p->page, p->block, p->n_blocks, p->ancestors, p->mass_line};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p);
}
static void discard_result(struct result *r) {
    free(r->out);
    free(r->mass);
    free(r->quarter_mass);
    free(r->head_mass);
}

/* ---- Running ------------------------------------------------------------------------------- */

static size_t out_floats(const struct pass *p) {
    return (size_t)(p->n_rows * p->s.n_heads * p->s.head_dim);
}
static float scale_of(const struct pass *p) {
    return 1.f / sqrtf((float)p->s.head_dim);
}

/* Arrays go to the backend's memory by dev_put, which works for the CPU's as well. */
static struct result run(struct kern *k, struct pass *p, const uint8_t *arena) {
    void *mine[24];
    int n = 0;
#define PUT(host, bytes) (mine[n++] = dev_put(k, (host), (bytes)))
    size_t rows4 = (size_t)p->n_rows * 4, entries4 = (size_t)(p->n_lists * p->capacity) * 4;
    size_t out_bytes = out_floats(p) * 4, lists4 = (size_t)p->n_lists * 4;
    struct kern_batch b = {.rows = p->b.rows, .n_seqs = p->n_seqs};
    b.position = PUT(p->position, rows4);
    b.row_seq = PUT(p->row_seq, rows4);
    b.token = b.slot_page = b.position; /* nobody's business here */
    b.seq_row = PUT(p->seq_row, (size_t)p->n_seqs * 4);
    b.seq_n_rows = PUT(p->seq_n_rows, (size_t)p->n_seqs * 4);
    struct kern_lists lists = {.capacity = p->capacity,
                               .seq_stride = p->lists_per_seq,
                               .head_stride = p->lists_per_seq > 1};
    lists.page = PUT(p->page, entries4);
    lists.block = PUT(p->block, entries4);
    lists.n_blocks = PUT(p->n_blocks, lists4);
    struct kern_kv kv = p->kv;
    kv.base = PUT(arena, p->arena_bytes);
    int width = (p->s.n_heads + 2 * p->s.n_kv) * p->s.head_dim;
    const float *qkv = PUT(p->qkv, (size_t)(p->n_rows * width) * 4);
    float *out = PUT(NULL, out_bytes + 256), *mass = NULL, *heads = NULL;
    float *quarters = NULL;
    size_t heads4 = (size_t)(p->n_seqs * p->s.n_heads * p->capacity) * 4;
    size_t scratch_bytes =
        k->ops->attn_scratch_bytes(k, b.rows, p->n_seqs, p->s.n_heads, p->s.head_dim, p->capacity);
    void *scratch = PUT(NULL, scratch_bytes + 64);
    uint64_t zero = 0, *bytes = PUT(&zero, 8);
    struct kern_attn_taps taps = {.kv_bytes_read = bytes};
    if (p->ancestors) taps.ancestors = PUT(p->ancestors, (size_t)p->n_rows * 8);
    size_t mass4 = MASS_LINES * entries4;
    if (p->mass_line) {
        float *zeros = calloc(1, 4 * mass4 + heads4);
        assert_non_null(zeros);
        taps.mass_line = PUT(p->mass_line, rows4);
        taps.mass = mass = PUT(zeros, mass4);
        taps.mass_head_stride = lists.head_stride;
        taps.quarter_mass = quarters = PUT(zeros, 4 * mass4);
        taps.head_mass = heads = PUT(zeros, heads4);
        free(zeros);
    }
    struct err e = {0};
    assert_int_equal(
        k->ops->attention(k, &b, &lists, p->s.n_heads, scale_of(p), qkv, &kv, &taps, scratch, out),
        0);
    assert_ok(k->ops->sync(k, &e), e);
    struct result r = {.out = dev_get(k, out, out_bytes + 256)};
    /* The packed rows that attention itself writes are those that `pack` makes of `out`. */
    int cols = p->s.n_heads * p->s.head_dim;
    size_t act_bytes = k->ops->act_bytes(k, b.rows, cols);
    float *spare = PUT(NULL, out_bytes);
    struct kern_act want = {PUT(NULL, act_bytes), act_bytes, p->s.dtype};
    struct kern_attn_taps packed = {.ancestors = taps.ancestors};
    packed.act = (struct kern_act){PUT(NULL, act_bytes), act_bytes, p->s.dtype};
    assert_int_equal(k->ops->attention(k, &b, &lists, p->s.n_heads, scale_of(p), qkv, &kv, &packed,
                                       scratch, spare),
                     0);
    assert_int_equal(k->ops->pack(k, b.rows, cols, out, want), 0);
    uint8_t *act_got = dev_get(k, packed.act.data, act_bytes);
    uint8_t *act_want = dev_get(k, want.data, act_bytes);
    assert_memory_equal(act_got, act_want, act_bytes);
    free(act_got);
    free(act_want);
    if (mass) r.mass = dev_get(k, mass, mass4);
    if (quarters) r.quarter_mass = dev_get(k, quarters, 4 * mass4);
    if (heads) r.head_mass = dev_get(k, heads, heads4);
    uint64_t *got = dev_get(k, bytes, 8);
    r.bytes = *got;
    free(got);
    for (size_t i = 0; i < 64; i++) assert_true(isnan(r.out[out_floats(p) + i]));
    for (int i = 0; i < n; i++) k->ops->unreserve(k, mine[i]);
    return r;
#undef PUT
}

static double tolerance(enum kern_dtype t) {
    return (t == KERN_F16 ? 0x1p-11 : 0x1p-8) * 1.1 + 2e-5;
}

/* Prompt rows against the twin's, the first wrong element with its place. Returns the worst error.
 */
static double check(const char *what, const struct pass *p, const float *got, const float *want) {
    int width = p->s.n_heads * p->s.head_dim;
    double worst = 0;
    for (size_t i = (size_t)(p->b.rows.n_gen * width); i < out_floats(p); i++) {
        int row = (int)(i / (size_t)width), head = (int)i % width / p->s.head_dim;
        double d = fabs((double)got[i] - (double)want[i]);
        if (!(d <= tolerance(p->s.dtype)))
            fail_msg("%s, %d/%d heads of %d, %s: row %d (position %d), head %d, element %d is %.7g,"
                     " want %.7g (tolerance %.3g)",
                     what, p->s.n_heads, p->s.n_kv, p->s.head_dim, kern_dtype_name(p->s.dtype), row,
                     p->position[row], head, (int)i % p->s.head_dim, (double)got[i],
                     (double)want[i], tolerance(p->s.dtype));
        if (d > worst) worst = d;
    }
    return worst;
}

static uint64_t row_hash(const struct pass *p, const struct result *r, int row) {
    size_t width = (size_t)(p->s.n_heads * p->s.head_dim);
    return XXH64(r->out + (size_t)row * width, width * sizeof(float), 0);
}

/* Bits of a token tree whose every row sees all rows before it: what causal rows see, through the
 * kernel that knows masks. */
static uint64_t *all_ancestors(int n_rows) {
    uint64_t *a = malloc((size_t)n_rows * sizeof *a);
    assert_non_null(a);
    memset(a, 0xff, (size_t)n_rows * sizeof *a);
    return a;
}

/* Both kernels (causal rows, rows of trees) against the twin. */
static void check_both(struct kern *k, struct kern *twin, const char *what, struct pass *p) {
    struct result want = run(twin, p, p->cpu), got = run(k, p, p->gpu);
    double worst = check(what, p, got.out, want.out);
    discard_result(&got);
    p->ancestors = all_ancestors(p->n_rows);
    got = run(k, p, p->gpu);
    double worst_tree = check("as a tree", p, got.out, want.out);
    discard_result(&got);
    discard_result(&want);
    free(p->ancestors);
    p->ancestors = NULL;
    printf("# %s, %d/%d heads of %d, %s, %d rows: worst %.2g, as a tree %.2g (of %.2g)\n", what,
           p->s.n_heads, p->s.n_kv, p->s.head_dim, kern_dtype_name(p->s.dtype), p->n_rows, worst,
           worst_tree, tolerance(p->s.dtype));
}

/* ---- Tests --------------------------------------------------------------------------------- */

static const struct shape shapes[] = {
    {2, 2, 128, KERN_F16}, {8, 2, 128, KERN_BF16}, {3, 3, 64, KERN_F16},  {9, 3, 64, KERN_BF16},
    {8, 2, 80, KERN_F16},  {5, 1, 80, KERN_BF16},  {4, 2, 96, KERN_F16},  {7, 1, 96, KERN_BF16},
    {4, 1, 256, KERN_F16}, {2, 2, 256, KERN_BF16}, {64, 1, 64, KERN_F16}, {34, 1, 128, KERN_F16},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* Head sizes, groups and types; chunks around the edges of tiles and pages, starting anywhere. */
static void test_cuda_prompt_shapes(void) {
    static const struct seq seqs[] = {
        {.start = 0, .n_rows = 1},   {.start = 0, .n_rows = 64},  {.start = 1, .n_rows = 63},
        {.start = 63, .n_rows = 67}, {.start = 64, .n_rows = 33}, {.start = 150, .n_rows = 41},
        {.start = 0, .n_rows = 150}, {.start = 319, .n_rows = 2}, {.start = 500, .n_rows = 17},
    };
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    for (int i = 0; i < N_SHAPES; i++)
        for (size_t j = 0; j < sizeof seqs / sizeof *seqs; j++) {
            struct seq q = seqs[j];
            if (shapes[i].n_heads > 9 && (q.n_rows > 70 || q.start > 200)) continue;
            q.keep_every = 1, q.idle = -1, q.salt = 11 + j;
            struct pass *p = make(shapes[i], &q, 1, false);
            check_both(k, twin, "shapes", p);
            discard(p);
        }
    k->ops->close(k);
    twin->ops->close(twin);
}

/* Generated rows first, a sequence of both classes in the middle, idle rows, sparse lists, tokens
 * behind the last row. */
static const struct seq mix[] = {
    {.start = 300, .n_rows = 3, .n_gen = 3, .keep_every = 2, .idle = -1, .salt = 21},
    {.start = 130, .n_rows = 9, .n_gen = 4, .keep_every = 1, .idle = -1, .salt = 22},
    {.start = 0, .n_rows = 70, .keep_every = 1, .idle = 5, .salt = 23},
    {.start = 777, .n_rows = 50, .keep_every = 3, .idle = 49, .length = 900, .salt = 24},
    {.start = 64, .n_rows = 1, .keep_every = 1, .idle = -1, .salt = 25},
    {.start = 191, .n_rows = 2, .keep_every = 2, .idle = 0, .salt = 26},
};
enum { N_MIX = sizeof mix / sizeof *mix };

static void test_cuda_prompt_mixed(void) {
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    for (int i = 0; i < 10; i++)
        for (int per_head = 0; per_head < 2; per_head++) {
            if (per_head && shapes[i].n_kv == 1) continue;
            struct pass *p = make(shapes[i], mix, N_MIX, per_head);
            check_both(k, twin, per_head ? "a list per head" : "mixed", p);
            discard(p);
        }
    k->ops->close(k);
    twin->ops->close(twin);
}

/* Lists longer than any step of the walk, dense and sparse. */
static void test_cuda_prompt_long(void) {
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    for (int every = 1; every <= 5; every += 4) {
        struct seq q = {.start = 20011, .n_rows = 70, .keep_every = every, .idle = -1, .salt = 31};
        struct pass *p = make((struct shape){2, 1, 64, KERN_F16}, &q, 1, false);
        check_both(k, twin, every == 1 ? "long" : "long, sparse", p);
        discard(p);
    }
    k->ops->close(k);
    twin->ops->close(twin);
}

/* A row's bits are the same in one chunk, in any other, beside other sequences, and where its list
 * goes on behind it. */
static void test_cuda_prompt_invariance(void) {
    enum { FIRST = 37, N = 210 };
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 10; i++)
        for (int tree = 0; tree < 2; tree++) {
            struct seq whole = {
                .start = FIRST, .n_rows = N, .keep_every = 1, .idle = -1, .salt = 41};
            struct pass *p = make(shapes[i], &whole, 1, false);
            if (tree) p->ancestors = all_ancestors(N);
            struct result r = run(k, p, p->gpu);
            uint64_t want[N];
            for (int row = 0; row < N; row++) want[row] = row_hash(p, &r, row);
            discard_result(&r);
            discard(p);
            static const int cuts[] = {1, 7, 64, 65, 130};
            for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++)
                for (int at = 0; at < N; at += cuts[c] * (cuts[c] == 1   ? 29
                                                          : cuts[c] == 7 ? 3
                                                                         : 1)) {
                    int n = cuts[c] < N - at ? cuts[c] : N - at;
                    struct seq q[3] = {mix[2], whole, mix[5]};
                    q[1].start = FIRST + at, q[1].n_rows = n;
                    q[1].length = c % 2 ? FIRST + N : 0;
                    p = make(shapes[i], q, c == 0 ? 2 : 3, false);
                    if (tree) p->ancestors = all_ancestors(p->n_rows);
                    r = run(k, p, p->gpu);
                    for (int row = 0; row < n; row++)
                        if (row_hash(p, &r, p->seq_row[1] + row) != want[at + row])
                            fail_msg("%d/%d heads of %d, tree %d: position %d in a chunk of %d from"
                                     " %d has other bits",
                                     shapes[i].n_heads, shapes[i].n_kv, shapes[i].head_dim, tree,
                                     FIRST + at + row, n, FIRST + at);
                    discard_result(&r);
                    discard(p);
                }
        }
    k->ops->close(k);
}

/* What is no number in a row's future changes no bit of it, and shows where it is seen. */
static void test_cuda_prompt_future(void) {
    enum { FIRST = 100, N = 100, BAD = 57 }; /* position 157, in the middle of a block */
    struct kern *k = cuda_or_skip();
    for (int i = 0; i < 10; i++)
        for (int tree = 0; tree < 2; tree++)
            for (int kind = 0; kind < 3; kind++) {
                struct seq q = {
                    .start = FIRST, .n_rows = N, .keep_every = 1, .idle = -1, .salt = 51};
                struct pass *p = make(shapes[i], &q, 1, false);
                if (tree) p->ancestors = all_ancestors(N);
                struct result r = run(k, p, p->gpu);
                uint64_t want[N];
                for (int row = 0; row < N; row++) want[row] = row_hash(p, &r, row);
                discard_result(&r);
                /* K, V, or one element of V infinite. */
                int at = FIRST + BAD, page = p->page[at / KERN_BLOCK];
                for (int h = 0; h < p->s.n_kv; h++)
                    for (int d = 0; d < p->s.head_dim; d++)
                        if (kind < 2 || d == 13)
                            put(p, page, h, kind > 0, at % KERN_BLOCK, d,
                                to16(p->s.dtype, kind < 2 ? NAN : INFINITY));
                r = run(k, p, p->gpu);
                for (int row = 0; row < N; row++) {
                    float x = r.out[(size_t)(row * p->s.n_heads * p->s.head_dim) + 13];
                    if (row < BAD ? row_hash(p, &r, row) != want[row] : isfinite(x))
                        fail_msg(
                            "%d/%d heads of %d, tree %d, kind %d: row %d, %s the bad token: %g",
                            shapes[i].n_heads, shapes[i].n_kv, shapes[i].head_dim, tree, kind, row,
                            row < BAD ? "before" : "behind", (double)x);
                }
                discard_result(&r);
                discard(p);
            }
    k->ops->close(k);
}

/* Token trees: rows 0-1-2 and 0-3-4 of a pass, siblings apart, also across a page's edge. */
static void test_cuda_prompt_ancestors(void) {
    static const uint64_t tree[7] = {0x01, 0x03, 0x07, 0x09, 0x19, 0x01, 0x03};
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    for (int i = 0; i < 10; i++) {
        struct seq q[2] = {{.start = 62, .n_rows = 5, .keep_every = 1, .idle = -1, .salt = 61},
                           {.start = 598, .n_rows = 2, .keep_every = 1, .idle = -1, .salt = 62}};
        struct pass *p = make(shapes[i], q, 2, false);
        p->ancestors = malloc(sizeof tree);
        assert_non_null(p->ancestors);
        memcpy(p->ancestors, tree, sizeof tree);
        struct result want = run(twin, p, p->cpu), got = run(k, p, p->gpu);
        check("trees", p, got.out, want.out);
        uint64_t bits = row_hash(p, &got, 4);
        discard_result(&got);
        /* A sibling's NaN. */
        for (int d = 0; d < p->s.head_dim; d++)
            put(p, p->page[1], 0, true, (62 + 2) % 64, d, to16(p->s.dtype, NAN));
        got = run(k, p, p->gpu);
        assert_true(row_hash(p, &got, 4) == bits);
        assert_true(isnan(got.out[2 * p->s.n_heads * p->s.head_dim]));
        discard_result(&got);
        discard_result(&want);
        discard(p);
    }
    k->ops->close(k);
    twin->ops->close(twin);
}

/* Idle rows are zeros, those of no sequence too; the bytes are counted as the twin counts them
 * where a sequence's rows are one tile. */
static void test_cuda_prompt_idle_and_bytes(void) {
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    struct seq q[2] = {{.start = 64 * 20 + 62, .n_rows = 3, .keep_every = 4, .idle = 1, .salt = 71},
                       {.start = 64, .n_rows = 2, .keep_every = 1, .idle = -1, .salt = 72}};
    for (int i = 0; i < 10; i++) {
        struct pass *p = make(shapes[i], q, 2, false);
        struct result want = run(twin, p, p->cpu), got = run(k, p, p->gpu);
        check("idle", p, got.out, want.out);
        if (got.bytes != want.bytes)
            fail_msg("%d/%d heads of %d: %llu bytes counted, want %llu", shapes[i].n_heads,
                     shapes[i].n_kv, shapes[i].head_dim, (unsigned long long)got.bytes,
                     (unsigned long long)want.bytes);
        discard_result(&got);
        /* The second sequence has no rows any more. */
        p->seq_n_rows[1] = 0;
        p->row_seq[3] = p->row_seq[4] = -1;
        got = run(k, p, p->gpu);
        size_t width = (size_t)(p->s.n_heads * p->s.head_dim);
        for (size_t x = 3 * width; x < 5 * width; x++) assert_true(got.out[x] == 0);
        for (size_t x = width; x < 2 * width; x++) assert_true(got.out[x] == 0);
        discard_result(&got);
        discard_result(&want);
        discard(p);
    }
    k->ops->close(k);
    twin->ops->close(twin);
}

/* Each head's sums over the marked rows beside the twin's; twice the same bits. */
static void check_heads(const struct pass *p, const struct result *got, const struct result *want,
                        int n_marked) {
    for (int x = 0; x < p->n_seqs * p->s.n_heads * p->capacity; x++) {
        double g = (double)got->head_mass[x], w = (double)want->head_mass[x];
        if (!(fabs(g - w) <= 3e-5 * n_marked))
            fail_msg("%d/%d heads of %d: line %d, entry %d has %.7g, want %.7g", p->s.n_heads,
                     p->s.n_kv, p->s.head_dim, x / p->capacity, x % p->capacity, g, w);
    }
}

/* Lines for every so-many-th row, of its sequence's MASS_LINES in turn. */
static void give_lines(struct pass *p, int every) {
    p->mass_line = calloc((size_t)p->n_rows, sizeof *p->mass_line);
    assert_non_null(p->mass_line);
    for (int r = 0; r < p->n_rows; r++) {
        int line = p->row_seq[r] * MASS_LINES + r % MASS_LINES;
        p->mass_line[r] = r % every || p->row_seq[r] < 0 ? -1 : line * p->lists_per_seq;
    }
}

/* Masses of both classes' rows that have lines beside the twin's, neighbours' lines the same or
 * not; looking changes no bit. */
static void test_cuda_mass(void) {
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    for (int i = 0; i < 10; i++)
        for (int per_head = 0; per_head < 2; per_head++) {
            struct pass *p = make(shapes[i], mix, N_MIX, per_head);
            struct result plain = run(k, p, p->gpu);
            give_lines(p, 3);
            struct result want = run(twin, p, p->cpu), got = run(k, p, p->gpu);
            assert_memory_equal(got.out, plain.out, out_floats(p) * sizeof *got.out);
            discard_result(&plain);
            double worst = 0;
            for (int x = 0; x < MASS_LINES * p->n_lists * p->capacity; x++) {
                double d = fabs((double)got.mass[x] - (double)want.mass[x]);
                if (!(d <= 3e-5))
                    fail_msg("%d/%d heads of %d: list %d, entry %d has mass %.7g, want %.7g",
                             shapes[i].n_heads, shapes[i].n_kv, shapes[i].head_dim, x / p->capacity,
                             x % p->capacity, (double)got.mass[x], (double)want.mass[x]);
                if (d > worst) worst = d;
            }
            for (int x = 0; x < 4 * MASS_LINES * p->n_lists * p->capacity; x++)
                assert_near(got.quarter_mass[x], want.quarter_mass[x], 3e-5);
            check_heads(p, &got, &want, (p->n_rows + 2) / 3);
            printf("# mass, %d/%d heads of %d: worst %.2g\n", shapes[i].n_heads, shapes[i].n_kv,
                   shapes[i].head_dim, worst);
            discard_result(&got);
            discard_result(&want);
            discard(p);
        }
    k->ops->close(k);
    twin->ops->close(twin);
}

/* A long list's masses: more leaves than parts. */
static void test_cuda_mass_long(void) {
    struct kern *k = cuda_or_skip(), *twin = cpu_twin();
    struct seq q = {.start = 20011, .n_rows = 40, .keep_every = 1, .idle = -1, .salt = 81};
    struct pass *p = make((struct shape){4, 2, 64, KERN_F16}, &q, 1, false);
    p->mass_line = calloc((size_t)p->n_rows, sizeof *p->mass_line);
    assert_non_null(p->mass_line);
    for (int r = 0; r < 24; r++) p->mass_line[r] = -1;
    struct result want = run(twin, p, p->cpu), got = run(k, p, p->gpu), again = run(k, p, p->gpu);
    for (int x = 0; x < p->capacity; x++) {
        assert_near(got.mass[x], want.mass[x], 3e-5);
        assert_true(got.mass[x] == again.mass[x]);
    }
    check_heads(p, &got, &want, p->n_rows - 24);
    assert_memory_equal(got.head_mass, again.head_mass, (size_t)(4 * p->capacity) * sizeof(float));
    discard_result(&got);
    discard_result(&want);
    discard_result(&again);
    discard(p);
    k->ops->close(k);
    twin->ops->close(twin);
}

const struct test tests[] = {
    {"cuda_prompt_shapes", TEST_GPU, 120000, test_cuda_prompt_shapes},
    {"cuda_prompt_mixed", TEST_GPU, 120000, test_cuda_prompt_mixed},
    {"cuda_prompt_long", TEST_GPU, 120000, test_cuda_prompt_long},
    {"cuda_prompt_invariance", TEST_GPU, 120000, test_cuda_prompt_invariance},
    {"cuda_prompt_future", TEST_GPU, 120000, test_cuda_prompt_future},
    {"cuda_prompt_ancestors", TEST_GPU, 120000, test_cuda_prompt_ancestors},
    {"cuda_prompt_idle_and_bytes", TEST_GPU, 120000, test_cuda_prompt_idle_and_bytes},
    {"cuda_mass", TEST_GPU, 120000, test_cuda_mass},
    {"cuda_mass_long", TEST_GPU, 120000, test_cuda_mass_long},
    {0},
};
