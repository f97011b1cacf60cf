/* Attention over pages. The twin here is written for clarity, in double, on plain arrays of keys
 * and values that never saw a page: positions it may see, softmax, weighted sum. Kernels are held
 * to |got - want| <= 2e-5 + 2e-5 |v|max in f32: scores sum up to 256 products of magnitude ~1 in
 * f32 (error some 1e-6, which the softmax turns into a relative error of the weights), sums of up
 * to 1300 weights alike. The AMX kernel rounds Q, K, P and V to bf16 (2^-9 relative each), hence
 * 3e-2 there.
 *
 * Pages: unlisted ones are made inaccessible, so a single touch ends the test; what lies behind a
 * sequence's end is NaN, so a single product with it shows. */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/half.h"
#include "kernels/cpu/cpu.h"

enum { MAX_SEQS = 8, MAX_ROWS = 160, OS_PAGE = 4096 };

/* ---- A case -------------------------------------------------------------------------------- */

/* One sequence: context of `length` tokens of which the last n_rows are the pass's rows, at
 * positions length - n_rows .. length - 1. keep_every: of the blocks before the rows' own, every
 * n-th is listed. */
struct seq {
    int length, n_rows;
    bool prompt;
    int keep_every;
    uint64_t salt; /* of its contents */
};

struct shape {
    int n_heads, n_kv, head_dim;
    enum kern_dtype dtype;
};

struct bench {
    struct shape s;
    int n_seqs, n_rows, capacity, per_head;
    struct seq seq[MAX_SEQS];
    struct kern_batch b;
    struct kern_lists lists;
    struct kern_kv kv;
    int32_t position[MAX_ROWS], row_seq[MAX_ROWS], slot_page[MAX_ROWS], token[MAX_ROWS];
    int32_t seq_row[MAX_SEQS], seq_n_rows[MAX_SEQS], *page, *block, n_blocks[MAX_SEQS * 8];
    uint8_t *arena;
    size_t arena_bytes;
    float *qkv, *out;
};

/* In [-1, 1), a mix of the arguments: many are wanted, Philox would take most of the test's time.
 */
static float value(uint64_t salt, int what, int position, int i) {
    uint64_t x = salt * 0x9e3779b97f4a7c15u + (uint64_t)position * 0xc2b2ae3d27d4eb4fu +
                 (uint64_t)(what * 100000 + i) * 0x94d049bb133111ebu;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 29) * 0x94d049bb133111ebu;
    return (float)(x >> 40) * 0x1p-23f - 1;
}

/* Query, key, value element of a token; queries large enough that the softmax is peaked. */
static float q_at(uint64_t salt, int position, int i) {
    return value(salt, 1, position, i) * 4;
}

static float rounded(enum kern_dtype t, float x) {
    return t == KERN_F16    ? f16_to_f32(f32_to_f16(x))
           : t == KERN_BF16 ? bf16_to_f32(f32_to_bf16(x))
                            : x;
}
static float k_at(const struct bench *c, int s, int position, int head, int d) {
    return rounded(c->s.dtype, value(c->seq[s].salt, 2, position, head * 256 + d));
}
static float v_at(const struct bench *c, int s, int position, int head, int d) {
    return rounded(c->s.dtype, value(c->seq[s].salt, 3, position, head * 256 + d));
}

static bool listed(const struct seq *q, int block) {
    int first_row_block = (q->length - q->n_rows) / KERN_BLOCK;
    return block >= first_row_block || block % q->keep_every == 0;
}

static size_t element_bytes(enum kern_dtype t) {
    return t == KERN_F32 ? 4 : 2;
}

static void put(enum kern_dtype t, uint8_t *p, size_t i, float x) {
    uint16_t h = t == KERN_F16 ? f32_to_f16(x) : f32_to_bf16(x);
    if (t == KERN_F32) memcpy(p + i * 4, &x, 4);
    else memcpy(p + i * 2, &h, 2);
}

/* Page ids are handed out in a scrambled order, and a page spans whole pages of the OS. */
static void fill_block(struct bench *c, int s, int block, int page) {
    for (int h = 0; h < c->s.n_kv; h++) {
        uint8_t *base = c->arena + (size_t)page * c->kv.page_stride + (size_t)h * c->kv.head_stride;
        uint8_t *k = base + c->kv.k_offset, *v = base + c->kv.v_offset;
        for (int t = 0; t < KERN_BLOCK; t++)
            for (int d = 0; d < c->s.head_dim; d++) {
                int position = block * KERN_BLOCK + t;
                bool real = position < c->seq[s].length;
                put(c->s.dtype, k, (size_t)(d * KERN_BLOCK + t),
                    real ? k_at(c, s, position, h, d) : NAN);
                put(c->s.dtype, v, (size_t)(t * c->s.head_dim + d),
                    real ? v_at(c, s, position, h, d) : NAN);
            }
    }
}

/* Sequences of generated rows must come first. */
static struct bench *make(struct shape s, const struct seq *seqs, int n_seqs) {
    struct bench *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->s = s;
    c->n_seqs = n_seqs;
    memcpy(c->seq, seqs, (size_t)n_seqs * sizeof *seqs);
    int n_pages = 0;
    for (int i = 0; i < n_seqs; i++) {
        int blocks = (seqs[i].length + KERN_BLOCK - 1) / KERN_BLOCK;
        n_pages += blocks;
        if (blocks > c->capacity) c->capacity = blocks;
        c->seq_row[i] = c->n_rows;
        c->seq_n_rows[i] = seqs[i].n_rows;
        for (int r = 0; r < seqs[i].n_rows; r++) {
            c->position[c->n_rows] = seqs[i].length - seqs[i].n_rows + r;
            c->row_seq[c->n_rows++] = i;
        }
        *(seqs[i].prompt ? &c->b.rows.n_prompt : &c->b.rows.n_gen) += seqs[i].n_rows;
    }
    assert_true(c->n_rows <= MAX_ROWS);
    size_t es = element_bytes(s.dtype), head = (size_t)s.head_dim * KERN_BLOCK * es;
    c->kv = (struct kern_kv){.page_stride =
                                 (2 * head * (size_t)s.n_kv + OS_PAGE - 1) / OS_PAGE * OS_PAGE,
                             .v_offset = head * (size_t)s.n_kv,
                             .head_stride = head,
                             .dtype = s.dtype,
                             .n_kv_heads = s.n_kv,
                             .head_dim = s.head_dim};
    c->arena_bytes = (size_t)n_pages * c->kv.page_stride;
    c->arena =
        mmap(NULL, c->arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(c->arena != MAP_FAILED);
    c->kv.base = c->arena;
    c->page = calloc((size_t)(n_seqs * c->capacity), sizeof *c->page);
    c->block = calloc((size_t)(n_seqs * c->capacity), sizeof *c->block);
    int id = 0;
    for (int i = 0; i < n_seqs; i++)
        for (int b = 0; b * KERN_BLOCK < seqs[i].length; b++, id++) {
            int page = n_pages - 1 - id; /* descending: order in memory is not order in the list */
            if (!listed(&seqs[i], b)) {
                assert_int_equal(mprotect(c->arena + (size_t)page * c->kv.page_stride,
                                          c->kv.page_stride, PROT_NONE),
                                 0);
                continue;
            }
            fill_block(c, i, b, page);
            int at = i * c->capacity + c->n_blocks[i]++;
            c->page[at] = page;
            c->block[at] = b;
        }
    c->lists = (struct kern_lists){c->page, c->block, c->n_blocks, c->capacity, 1, 0};
    int width = (s.n_heads + 2 * s.n_kv) * s.head_dim;
    c->qkv = calloc((size_t)(c->n_rows * width), sizeof *c->qkv);
    c->out = calloc((size_t)(c->n_rows * s.n_heads * s.head_dim), sizeof *c->out);
    for (int r = 0; r < c->n_rows; r++)
        for (int i = 0; i < s.n_heads * s.head_dim; i++)
            c->qkv[r * width + i] = q_at(c->seq[c->row_seq[r]].salt, c->position[r], i);
    c->b.token = c->token;
    c->b.position = c->position;
    c->b.row_seq = c->row_seq;
    c->b.slot_page = c->slot_page;
    c->b.n_seqs = n_seqs;
    c->b.seq_row = c->seq_row;
    c->b.seq_n_rows = c->seq_n_rows;
    return c;
}

static void discard(struct bench *c) {
    munmap(c->arena, c->arena_bytes);
    free(c->page);
    free(c->block);
    free(c->qkv);
    free(c->out);
    free(c);
}

static float scale_of(const struct bench *c) {
    return 1.f / sqrtf((float)c->s.head_dim);
}

/* The packed rows that attention itself makes are those that `pack` makes of `out`. */
static void check_packed(struct kern *k, const struct bench *c, void *scratch) {
    int cols = c->s.n_heads * c->s.head_dim;
    size_t bytes = (k->ops->act_bytes(k, c->b.rows, cols) + 63) / 64 * 64;
    size_t out_bytes = (size_t)(c->n_rows * cols) * sizeof(float);
    uint8_t *got = aligned_alloc(64, bytes), *want = aligned_alloc(64, bytes);
    float *spare = malloc(out_bytes);
    assert_true(got && want && spare);
    memset(got, 0xa5, bytes);
    memset(want, 0xa5, bytes);
    struct kern_attn_taps taps = {.act = {got, bytes, KERN_BF16}};
    assert_int_equal(k->ops->attention(k, &c->b, &c->lists, c->s.n_heads, scale_of(c), c->qkv,
                                       &c->kv, &taps, scratch, spare),
                     0);
    struct kern_act act = {want, bytes, KERN_BF16};
    assert_int_equal(k->ops->pack(k, c->b.rows, cols, c->out, act), 0);
    assert_memory_equal(got, want, bytes);
    free(spare);
    free(want);
    free(got);
}

static void run(struct kern *k, struct bench *c, const struct kern_attn_taps *taps) {
    struct kern_rows rows = c->b.rows;
    size_t bytes =
        k->ops->attn_scratch_bytes(k, rows, c->n_seqs, c->s.n_heads, c->s.head_dim, c->capacity);
    /* Bytes behind the scratch are watched. */
    size_t all = (bytes + 63) / 64 * 64 + 64;
    uint8_t *scratch = aligned_alloc(64, all);
    assert_non_null(scratch);
    memset(scratch, 0xa5, all);
    size_t n = (size_t)(c->n_rows * c->s.n_heads * c->s.head_dim);
    for (size_t i = 0; i < n; i++) c->out[i] = NAN;
    assert_int_equal(k->ops->attention(k, &c->b, &c->lists, c->s.n_heads, scale_of(c), c->qkv,
                                       &c->kv, taps, scratch, c->out),
                     0);
    for (size_t i = bytes; i < all; i++) assert_int_equal(scratch[i], 0xa5);
    if (!taps && c->n_rows <= 8) check_packed(k, c, scratch);
    free(scratch);
}

/* ---- The twin ------------------------------------------------------------------------------ */

static bool twin_sees(const struct bench *c, int row, int position, const uint64_t *ancestors) {
    int s = c->row_seq[row], first = c->seq[s].length - c->seq[s].n_rows;
    if (position > c->position[row] || !listed(&c->seq[s], position / KERN_BLOCK)) return false;
    if (!ancestors || position < first || position - first >= 64) return true;
    return ancestors[row] >> (position - first) & 1;
}

/* Output of one row and query head; share[block] (NULL: not) gets the attention mass by block. */
static void twin(const struct bench *c, int row, int head, const uint64_t *ancestors, double *o,
                 double *share) {
    int s = c->row_seq[row], hd = c->s.head_dim, kv_head = head / (c->s.n_heads / c->s.n_kv);
    const float *q =
        c->qkv + (size_t)row * (size_t)((c->s.n_heads + 2 * c->s.n_kv) * hd) + head * hd;
    double *score = malloc((size_t)c->seq[s].length * sizeof *score), top = -INFINITY, sum = 0;
    for (int p = 0; p < c->seq[s].length; p++) {
        score[p] = -INFINITY;
        if (!twin_sees(c, row, p, ancestors)) continue;
        score[p] = 0;
        for (int d = 0; d < hd; d++) score[p] += (double)q[d] * (double)k_at(c, s, p, kv_head, d);
        score[p] *= (double)scale_of(c);
        if (score[p] > top) top = score[p];
    }
    for (int d = 0; d < hd; d++) o[d] = 0;
    for (int b = 0; share && b < c->capacity; b++) share[b] = 0;
    for (int p = 0; p < c->seq[s].length; p++) {
        if (score[p] == -INFINITY) continue;
        double w = exp(score[p] - top);
        sum += w;
        if (share) share[p / KERN_BLOCK] += w;
        for (int d = 0; d < hd; d++) o[d] += w * (double)v_at(c, s, p, kv_head, d);
    }
    for (int d = 0; d < hd && sum > 0; d++) o[d] /= sum;
    for (int b = 0; share && b < c->capacity; b++) share[b] /= sum;
    free(score);
}

/* Every `step`-th (row, head) against the twin. */
static void check(const struct bench *c, const uint64_t *ancestors, double gen_tolerance,
                  double prompt_tolerance, int step) {
    double o[KERN_MAX_HEAD_DIM];
    int hd = c->s.head_dim;
    for (int i = 0; i < c->n_rows * c->s.n_heads; i += step) {
        int row = i / c->s.n_heads, head = i % c->s.n_heads;
        twin(c, row, head, ancestors, o, NULL);
        double tolerance = row < c->b.rows.n_gen ? gen_tolerance : prompt_tolerance;
        for (int d = 0; d < hd; d++)
            assert_near(c->out[(size_t)i * (size_t)hd + (size_t)d], o[d], tolerance);
    }
}

/* ---- Backends ------------------------------------------------------------------------------ */

static const char *const names[] = {"reference", "plain", "avx2", "avx512", "amx"};
enum { N_NAMES = sizeof names / sizeof *names };

static struct kern *open_kern(const char *name, int n_threads) {
    struct kern *k;
    bool reference = !strcmp(name, "reference");
    struct kern_options o = {.n_threads = n_threads,
                             .isa = reference ? NULL : name,
                             .precision = reference ? KERN_REFERENCE : KERN_FAST};
    return kern_cpu_open(&k, &o, NULL) == 0 ? k : NULL;
}

static const double F32_TOLERANCE = 4e-5;
static double prompt_tolerance(const char *name, enum kern_dtype t) {
    return strcmp(name, "amx") || t == KERN_F32 ? F32_TOLERANCE : 3e-2;
}

/* ---- Tests --------------------------------------------------------------------------------- */

/* Head sizes, groups, types and lengths around the edges of pages and leaves, both classes, on
 * every set. */
static void test_attention_shapes(void) {
    static const struct shape shapes[] = {
        {3, 3, 64, KERN_F16},  {9, 3, 64, KERN_F16},   {8, 2, 80, KERN_BF16},  {8, 1, 96, KERN_F16},
        {4, 1, 128, KERN_F32}, {3, 1, 256, KERN_BF16}, {6, 2, 24, KERN_F16},   {2, 1, 50, KERN_F32},
        {64, 1, 32, KERN_F16}, {20, 1, 64, KERN_BF16}, {4, 2, 128, KERN_BF16}, {2, 2, 8, KERN_F16},
    };
    static const int lengths[] = {1, 63, 64, 65, 511, 512, 513, 1300};
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 2);
        if (!k) continue;
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                if ((i + l + (size_t)n) % 3 && lengths[l] > 100)
                    continue; /* a third of the long ones */
                for (int prompt = 0; prompt < 2; prompt++) {
                    int rows = !prompt ? 5 : strcmp(names[n], "reference") ? 37 : 7;
                    if (rows > lengths[l]) rows = lengths[l];
                    struct seq q = {lengths[l], rows, prompt, 1, i + 1};
                    struct bench *c = make(shapes[i], &q, 1);
                    run(k, c, NULL);
                    check(c, NULL, F32_TOLERANCE, prompt_tolerance(names[n], shapes[i].dtype),
                          rows * shapes[i].n_heads / 5 + 1);
                    discard(c);
                }
            }
        k->ops->close(k);
    }
}

/* Sequences of all kinds in one pass, lists with gaps, unlisted pages inaccessible, NaN behind the
 * ends, an idle row. */
static const struct seq mix[] = {
    {700, 5, false, 3, 11}, {1, 1, false, 1, 12},  {1300, 9, false, 4, 13}, {65, 3, false, 1, 14},
    {640, 64, true, 2, 15}, {40, 40, true, 1, 16}, {513, 1, true, 5, 17},
};
enum { N_MIX = sizeof mix / sizeof *mix };

static void test_attention_mixed_lists(void) {
    for (int n = 0; n < N_NAMES; n++)
        for (int threads = 1; threads <= 3; threads += 2) {
            struct kern *k = open_kern(names[n], threads);
            if (!k) continue;
            struct bench *c = make((struct shape){9, 3, 64, KERN_F16}, mix, N_MIX);
            c->row_seq[3] = -1; /* idle: a row of zeros, seen by nobody's count */
            run(k, c, NULL);
            for (int i = 0; i < 9 * 64; i++) assert_true(c->out[3 * 9 * 64 + i] == 0);
            c->row_seq[3] = 0;
            run(k, c, NULL);
            check(c, NULL, F32_TOLERANCE, prompt_tolerance(names[n], KERN_F16), 23);
            discard(c);
            k->ops->close(k);
        }
}

static XXH64_hash_t row_hash(const struct bench *c, int row) {
    size_t n = (size_t)(c->s.n_heads * c->s.head_dim);
    return XXH64(c->out + (size_t)row * n, n * sizeof *c->out, 0);
}

/* Some rows of a case's sequences as a pass of their own: hash[] gets every row's, in the parts'
 * order. What the other rows wrote stays in the pages, as if it came later. */
struct part {
    int seq, first, n;
};

static void run_parts(struct kern *k, const struct bench *c, const struct part *part, int n_parts,
                      XXH64_hash_t *hash) {
    struct bench p = *c;
    size_t width = (size_t)((c->s.n_heads + 2 * c->s.n_kv) * c->s.head_dim);
    p.n_rows = 0;
    memset(p.seq_n_rows, 0, sizeof p.seq_n_rows);
    p.qkv = calloc((size_t)c->n_rows * width, sizeof *p.qkv);
    p.out = calloc((size_t)(c->n_rows * c->s.n_heads * c->s.head_dim), sizeof *p.out);
    for (int i = 0; i < n_parts; i++) {
        p.seq_row[part[i].seq] = p.n_rows;
        p.seq_n_rows[part[i].seq] = part[i].n;
        for (int r = 0; r < part[i].n; r++, p.n_rows++) {
            int from = c->seq_row[part[i].seq] + part[i].first + r;
            p.position[p.n_rows] = c->position[from];
            p.row_seq[p.n_rows] = part[i].seq;
            memcpy(p.qkv + (size_t)p.n_rows * width, c->qkv + (size_t)from * width,
                   width * sizeof *p.qkv);
        }
    }
    bool prompt = c->b.rows.n_prompt > 0;
    p.b.rows = (struct kern_rows){prompt ? 0 : p.n_rows, prompt ? p.n_rows : 0};
    p.b.position = p.position;
    p.b.row_seq = p.row_seq;
    p.b.seq_row = p.seq_row;
    p.b.seq_n_rows = p.seq_n_rows;
    run(k, &p, NULL);
    for (int r = 0; r < p.n_rows; r++) hash[r] = row_hash(&p, r);
    free(p.qkv);
    free(p.out);
}

/* One row, one result: a row's bits alone, among 1..64 rows of its sequence, in a mixed batch, in
 * any prompt chunk, on 1..3 threads. */
enum { LAST = 64, OTHERS = 9 };

static void check_chunks(struct kern *k, const struct bench *c, int chunk,
                         const XXH64_hash_t *want) {
    XXH64_hash_t got[LAST + OTHERS];
    for (int done = 0, n, turn = 0; done < LAST; done += n, turn++) {
        n = chunk < LAST - done ? chunk : LAST - done;
        struct part mine = {0, done, n}, near = {1, turn % 7, 2}, far = {2, 0, 1};
        struct part mixes[3][3] = {{mine}, {near, mine}, {far, mine, near}};
        int n_before = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 2 : 1;
        run_parts(k, c, mixes[turn % 3], 1 + turn % 3, got);
        for (int r = 0; r < n; r++) assert_true(got[n_before + r] == want[done + r]);
    }
}

static void test_attention_invariance(void) {
    static const struct shape shapes[] = {
        {6, 2, 64, KERN_F16}, {6, 2, 64, KERN_BF16}, {2, 1, 64, KERN_F32}, {5, 1, 96, KERN_F16}};
    static const int chunks[] = {1, 2, 3, 5, 8, 17, 33};
    for (int n = 1; n < N_NAMES; n++) /* the reference's rows are alone by construction */
        for (size_t t = 0; t < sizeof shapes / sizeof *shapes; t++)
            for (int prompt = 0; prompt < 2; prompt++) {
                struct seq seqs[3] = {
                    {1157, LAST, prompt, 1, 21}, {300, 8, prompt, 2, 22}, {513, 1, prompt, 1, 23}};
                struct bench *c = make(shapes[t], seqs, 3);
                XXH64_hash_t want[LAST], got[LAST];
                for (int threads = 1; threads <= 3; threads++) {
                    struct kern *k = open_kern(names[n], threads);
                    if (!k) break;
                    run_parts(k, c, &(struct part){0, 0, LAST}, 1, got);
                    if (threads == 1) memcpy(want, got, sizeof want);
                    assert_memory_equal(got, want, sizeof want);
                    for (size_t i = threads == 1 ? 0 : (size_t)threads + 2;
                         i < sizeof chunks / sizeof *chunks; i++)
                        check_chunks(k, c, chunks[i], want);
                    k->ops->close(k);
                }
                discard(c);
            }
}

/* As many items of as many queries as the scratch has slots for (48 leaves, 64 heads of a KV head,
 * 2 threads), and one more leaf. */
static void test_attention_most_items(void) {
    for (int n = 1; n < N_NAMES; n++)
        for (int more = 0; more < 2; more++) {
            struct seq q = {48 * KERN_LEAF + more, 1, false, 1, 41};
            struct bench *c = make((struct shape){64, 1, 8, KERN_F16}, &q, 1);
            XXH64_hash_t want = 0;
            for (int threads = 1; threads <= 3; threads++) {
                struct kern *k = open_kern(names[n], threads);
                if (!k) break;
                run(k, c, NULL);
                if (threads == 1) {
                    check(c, NULL, F32_TOLERANCE, F32_TOLERANCE, 21);
                    want = row_hash(c, 0);
                }
                assert_true(row_hash(c, 0) == want);
                k->ops->close(k);
            }
            discard(c);
        }
}

/* A context long enough for many nodes: every level of the tree, so every number of threads, gives
 * the same bits and the right ones; one KV head, so that only the tree can be shared out. */
static void test_attention_long(void) {
    for (int n = 0; n < N_NAMES; n++) {
        XXH64_hash_t want = 0;
        for (int threads = 1; threads <= 7; threads += 2) {
            struct kern *k = open_kern(names[n], threads);
            if (!k) continue;
            struct seq q = {20011, 2, false, 1, 31};
            struct bench *c = make((struct shape){2, 1, 32, KERN_F16}, &q, 1);
            run(k, c, NULL);
            XXH64_hash_t got = row_hash(c, 0) ^ row_hash(c, 1) * 3;
            if (threads == 1) {
                check(c, NULL, F32_TOLERANCE, 0, 1);
                want = got;
            } else assert_true(got == want);
            discard(c);
            k->ops->close(k);
        }
    }
}

/* Something that is not a number in a row's future, or in a sibling of a token tree, changes
 * nothing. */
static void poison(struct bench *c, int seq, int position) {
    int at = 0;
    while (c->block[seq * c->capacity + at] != position / KERN_BLOCK) at++;
    uint8_t *page = c->arena + (size_t)c->page[seq * c->capacity + at] * c->kv.page_stride;
    for (int h = 0; h < c->s.n_kv; h++)
        for (int d = 0; d < c->s.head_dim; d++) {
            int t = position % KERN_BLOCK;
            put(c->s.dtype, page + c->kv.k_offset + (size_t)h * c->kv.head_stride,
                (size_t)(d * KERN_BLOCK + t), NAN);
            put(c->s.dtype, page + c->kv.v_offset + (size_t)h * c->kv.head_stride,
                (size_t)(t * c->s.head_dim + d), d % 2 ? NAN : INFINITY);
        }
}

static void test_attention_future_is_never_used(void) {
    for (int n = 0; n < N_NAMES; n++)
        for (int prompt = 0; prompt < 2; prompt++) {
            struct kern *k = open_kern(names[n], 2);
            if (!k) continue;
            struct seq q = {200, 40, prompt, 1, 41};
            struct bench *c = make((struct shape){6, 2, 64, KERN_F16}, &q, 1);
            run(k, c, NULL);
            XXH64_hash_t want[40];
            for (int r = 0; r < 40; r++) want[r] = row_hash(c, r);
            poison(c, 0, 160 + 25);
            run(k, c, NULL);
            for (int r = 0; r < 25; r++) assert_true(row_hash(c, r) == want[r]);
            /* and it does show where it is seen */
            for (int r = 25; r < 40; r++) assert_true(isnan(c->out[r * 6 * 64]));
            discard(c);
            k->ops->close(k);
        }
}

/* A token tree: rows 0-1-2 and 0-3-4 of a pass; siblings do not see each other. */
static void test_attention_ancestors(void) {
    for (int n = 0; n < N_NAMES; n++)
        for (int prompt = 0; prompt < 2; prompt++) {
            struct kern *k = open_kern(names[n], 2);
            if (!k) continue;
            struct seq q[2] = {{67, 5, prompt, 1, 51}, {600, 2, prompt, 1, 52}};
            struct bench *c = make((struct shape){6, 2, 64, KERN_F16}, q, 2);
            uint64_t ancestors[7] = {0x01, 0x03, 0x07, 0x09, 0x19, 0x01, 0x03};
            struct kern_attn_taps taps = {.ancestors = ancestors};
            run(k, c, &taps);
            check(c, ancestors, F32_TOLERANCE, prompt_tolerance(names[n], KERN_F16), 1);
            XXH64_hash_t want = row_hash(c, 4);
            poison(c, 0, 62 + 2);
            run(k, c, &taps);
            assert_true(row_hash(c, 4) == want);
            discard(c);
            k->ops->close(k);
        }
}

/* Mass: maximum over heads and the rows of a line of each entry's share, beside the twin's, every
 * third row in one of its sequence's two lines; sums by head over both. Generated rows are among
 * them, and looking changes no bit of any row. */
static void test_attention_mass(void) {
    enum { HEADS = 6 };
    for (int n = 0; n < N_NAMES; n++)
        for (int threads = 1; threads <= 2; threads++) {
            struct kern *k = open_kern(names[n], threads);
            if (!k) continue;
            struct bench *c = make((struct shape){HEADS, 2, 64, KERN_F16}, mix, N_MIX);
            int32_t line[MAX_ROWS];
            XXH64_hash_t row[MAX_ROWS];
            run(k, c, NULL);
            for (int r = 0; r < c->n_rows; r++) {
                row[r] = row_hash(c, r);
                line[r] = r % 3 == 0 ? 2 * c->row_seq[r] + r % 2 : -1;
            }
            assert_true(c->b.rows.n_gen > 3);
            size_t entries = (size_t)(N_MIX * c->capacity);
            float *mass = calloc(2 * entries, sizeof *mass), *by_head[2];
            for (int i = 0; i < 2; i++) by_head[i] = calloc(HEADS * entries, sizeof(float));
            struct kern_attn_taps taps = {.mass = mass, .mass_line = line, .head_mass = by_head[0]};
            run(k, c, &taps);
            for (int r = 0; r < c->n_rows; r++) assert_true(row_hash(c, r) == row[r]);
            double want[2 * MAX_SEQS][32] = {{0}}, sum[MAX_SEQS][HEADS][32] = {{{0}}}, share[32];
            double o[KERN_MAX_HEAD_DIM];
            int n_marked[MAX_SEQS] = {0};
            for (int r = 0; r < c->n_rows; r++) {
                n_marked[c->row_seq[r]] += line[r] >= 0;
                for (int h = 0; h < HEADS && line[r] >= 0; h++) {
                    twin(c, r, h, NULL, o, share);
                    double *w = want[line[r]], *x = sum[c->row_seq[r]][h];
                    for (int b = 0; b < c->capacity; b++) {
                        w[b] = fmax(w[b], share[b]);
                        x[b] += share[b];
                    }
                }
            }
            for (int s = 0; s < N_MIX; s++)
                for (int h = 0; h < HEADS; h++) {
                    const float *sums = by_head[0] + (s * HEADS + h) * c->capacity;
                    double total = 0;
                    for (int e = 0; e < c->n_blocks[s]; e++) {
                        int block = c->block[s * c->capacity + e];
                        for (int l = 2 * s; h == 0 && l < 2 * s + 2; l++)
                            assert_near(mass[l * c->capacity + e], want[l][block], 1e-5);
                        assert_near(sums[e], sum[s][h][block], 1e-5 * (1 + n_marked[s]));
                        total += (double)sums[e];
                    }
                    assert_near(total, n_marked[s], 1e-5 * (1 + n_marked[s]));
                }
            /* Alone it gives the same bits, and by itself asks for no other mass. */
            taps = (struct kern_attn_taps){.mass_line = line, .head_mass = by_head[1]};
            run(k, c, &taps);
            assert_memory_equal(by_head[0], by_head[1], HEADS * entries * sizeof(float));
            for (int i = 0; i < 2; i++) free(by_head[i]);
            free(mass);
            discard(c);
            k->ops->close(k);
        }
}

/* The counter: per tile, K's whole page and V up to the last token that is seen. One generated row
 * of 65 tokens: two pages of K, 65 rows of V, for each KV head. */
static void test_attention_bytes(void) {
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 2);
        if (!k) continue;
        struct seq q = {65, 1, false, 1, 61}, sparse = {64 * 20 + 65, 3, false, 4, 62};
        uint64_t bytes = 5;
        struct kern_attn_taps taps = {.kv_bytes_read = &bytes};
        struct bench *c = make((struct shape){6, 2, 64, KERN_F16}, &q, 1);
        run(k, c, &taps);
        assert_int_equal(bytes, 5 + 2 * (2 * 64 + 65) * 64 * 2);
        discard(c);
        bytes = 0;
        c = make((struct shape){6, 2, 64, KERN_F16}, &sparse, 1);
        run(k, c, &taps);
        /* blocks 0, 4, 8, 12, 16 whole; 20 and 21 hold the rows: 20 whole, 21 with one token */
        assert_int_equal(bytes, 2 * (7 * 64 + 6 * 64 + 1) * 64 * 2);
        discard(c);
        k->ops->close(k);
    }
}

/* A list for each KV head: head 1 sees only the newest blocks. */
static void test_attention_list_per_head(void) {
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = open_kern(names[n], 2);
        if (!k) continue;
        struct seq q = {500, 4, false, 1, 71};
        struct bench *c = make((struct shape){4, 2, 64, KERN_F16}, &q, 1);
        run(k, c, NULL);
        float all[2 * 64];
        memcpy(all, c->out, sizeof all);
        int32_t page[2 * 8], block[2 * 8], n_blocks[2] = {8, 3};
        for (int i = 0; i < 8; i++) {
            page[i] = c->page[i];
            block[i] = c->block[i];
            page[8 + i] = i < 3 ? c->page[5 + i] : -1000000; /* beyond n_blocks: never read */
            block[8 + i] = i < 3 ? c->block[5 + i] : 0;
        }
        c->lists = (struct kern_lists){page, block, n_blocks, 8, 2, 1};
        run(k, c, NULL);
        assert_memory_equal(c->out, all, sizeof all); /* head 0 */
        c->seq[0].keep_every = 1000;                  /* the twin's blocks: 0 and the rows' own */
        double o[64], w[64];
        for (int i = 0; i < 64; i++) o[i] = w[i] = 0;
        /* head 1 (query head 2) of row 3 by hand over positions 320..499 */
        const float *query = c->qkv + 3 * 8 * 64 + 2 * 64;
        double top = -INFINITY, sum = 0, score[180];
        for (int p = 320; p < 500; p++) {
            score[p - 320] = 0;
            for (int d = 0; d < 64; d++)
                score[p - 320] += (double)query[d] * (double)k_at(c, 0, p, 1, d);
            score[p - 320] /= 8;
            top = fmax(top, score[p - 320]);
        }
        for (int p = 320; p < 500; p++) {
            double x = exp(score[p - 320] - top);
            sum += x;
            for (int d = 0; d < 64; d++) o[d] += x * (double)v_at(c, 0, p, 1, d);
        }
        for (int d = 0; d < 64; d++)
            assert_near(c->out[3 * 4 * 64 + 2 * 64 + d], o[d] / sum, F32_TOLERANCE);
        discard(c);
        k->ops->close(k);
    }
}

/* rope_kv: biases, norms and rotation reach q and k, v takes its bias, and what lands in the pages
 * is the rounded row at its place, nothing beside it. */
static void test_rope_kv_writes(void) {
    for (int n = 0; n < N_NAMES; n++)
        for (int type = 0; type < 3; type++) {
            struct kern *k = open_kern(names[n], 2);
            if (!k) continue;
            enum { HEADS = 4, KV = 2, HD = 64, ROWS = 70, WIDTH = (HEADS + 2 * KV) * HD };
            static const enum kern_dtype types[] = {KERN_F16, KERN_BF16, KERN_F32};
            enum kern_dtype t = types[type];
            struct seq q = {130, ROWS, true, 1, 81};
            struct bench *c = make((struct shape){HEADS, KV, HD, t}, &q, 1);
            for (int r = 0; r < ROWS; r++) c->slot_page[r] = c->page[c->position[r] / KERN_BLOCK];
            for (int i = 0; i < ROWS * WIDTH; i++) c->qkv[i] = value(82, 1, i, 0) * 2;
            c->row_seq[7] = -1; /* idle: its slot stays as it was */
            float inv[HD / 2], bias[HEADS * HD], norm[HD], before[64 * HD], after[64 * HD];
            for (int i = 0; i < HD / 2; i++) inv[i] = powf(100000, (float)-i / (HD / 2));
            for (int i = 0; i < HEADS * HD; i++) bias[i] = value(83, 1, i, 0);
            for (int i = 0; i < HD; i++) norm[i] = 1 + value(84, 1, i, 0);
            struct kern_rope rope = {.inv_freq = inv,
                                     .dim = HD,
                                     .interleaved = type == 1,
                                     .scale = 1.1f,
                                     .q_norm = norm,
                                     .k_norm = norm,
                                     .norm_eps = 1e-6f,
                                     .q_bias = bias,
                                     .k_bias = bias,
                                     .v_bias = bias};
            float *raw = malloc((size_t)(ROWS * WIDTH) * sizeof *raw);
            memcpy(raw, c->qkv, (size_t)(ROWS * WIDTH) * sizeof *raw);
            kern_cpu_read_kv(&c->kv, c->page[1], 1, false, before);
            assert_int_equal(k->ops->rope_kv(k, &c->b, &rope, HEADS, c->qkv, &c->kv), 0);
            for (int r = 0; r < ROWS; r++) {
                if (r == 7) {
                    assert_memory_equal(c->qkv + r * WIDTH, raw + r * WIDTH, WIDTH * 4);
                    continue;
                }
                float cs[HD / 2], sn[HD / 2], x[HD];
                const struct cpu_rowwise_isa *rw = &cpu_rowwise_reference;
                rw->rope_angles(inv, HD / 2, c->position[r], 1.1f, cs, sn);
                for (int h = 0; h < HEADS + 2 * KV; h++) {
                    memcpy(x, raw + r * WIDTH + h * HD, sizeof x);
                    const float *b = bias + (h < HEADS ? h : (h - HEADS) % KV) * HD;
                    bool is_v = h >= HEADS + KV;
                    rw->rope_head(x, HD, b, is_v ? NULL : norm, 1e-6f, is_v ? NULL : cs, sn, HD,
                                  type == 1);
                    for (int d = 0; d < HD; d++)
                        assert_near(c->qkv[r * WIDTH + h * HD + d], x[d], 4e-6);
                }
            }
            for (int b = 0; b < 3; b++)
                for (int h = 0; h < KV; h++)
                    for (int is_v = 0; is_v < 2; is_v++) {
                        kern_cpu_read_kv(&c->kv, c->page[b], h, is_v, after);
                        for (int p = b * 64; p < b * 64 + 64 && p < 130; p++) {
                            int r = p - (130 - ROWS);
                            for (int d = 0; d < HD; d++) {
                                float got = after[(p % 64) * HD + d];
                                bool kept = r < 0 || r == 7;
                                float want =
                                    kept
                                        ? is_v ? v_at(c, 0, p, h, d) : k_at(c, 0, p, h, d)
                                        : rounded(
                                              t,
                                              c->qkv[r * WIDTH + (HEADS + is_v * KV + h) * HD + d]);
                                assert_true(got == want);
                            }
                        }
                    }
            free(raw);
            discard(c);
            k->ops->close(k);
        }
}

const struct test tests[] = {
    {"attention_shapes", TEST_QUICK, 240000, test_attention_shapes},
    {"attention_mixed_lists", TEST_QUICK, 240000, test_attention_mixed_lists},
    {"attention_invariance", TEST_QUICK, 240000, test_attention_invariance},
    {"attention_most_items", TEST_QUICK, 240000, test_attention_most_items},
    {"attention_long", TEST_QUICK, 240000, test_attention_long},
    {"attention_future_is_never_used", TEST_QUICK, 240000, test_attention_future_is_never_used},
    {"attention_ancestors", TEST_QUICK, 240000, test_attention_ancestors},
    {"attention_mass", TEST_QUICK, 240000, test_attention_mass},
    {"attention_bytes", TEST_QUICK, 240000, test_attention_bytes},
    {"attention_list_per_head", TEST_QUICK, 240000, test_attention_list_per_head},
    {"rope_kv_writes", TEST_QUICK, 240000, test_rope_kv_writes},
    {0},
};
