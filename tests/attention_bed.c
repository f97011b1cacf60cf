#include "tests/attention_bed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/err.h"
#include "base/half.h"

enum { OS_PAGE = 4096 };

/* ---- A case -------------------------------------------------------------------------------- */

/* In [-1, 1), a mix of the arguments: many are wanted, Philox would take most of the test's time.
 */
float abed_value(uint64_t salt, int what, int position, int i) {
    uint64_t x = salt * 0x9e3779b97f4a7c15u + (uint64_t)position * 0xc2b2ae3d27d4eb4fu +
                 (uint64_t)(what * 100000 + i) * 0x94d049bb133111ebu;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 29) * 0x94d049bb133111ebu;
    return (float)(x >> 40) * 0x1p-23f - 1;
}

/* Query, key, value element of a token; queries large enough that the softmax is peaked. */
static float abed_q_at(uint64_t salt, int position, int i) {
    return abed_value(salt, 1, position, i) * 4;
}

float abed_rounded(enum kern_dtype t, float x) {
    return t == KERN_F16    ? f16_to_f32(f32_to_f16(x))
           : t == KERN_BF16 ? bf16_to_f32(f32_to_bf16(x))
                            : x;
}

/* A group of up to 32 elements by the law of 8 bits: the scale is returned. */
static uint16_t q8_group(const float *x, int n, int8_t *q) {
    float top = 0;
    for (int i = 0; i < n; i++) top = fmaxf(top, fabsf(x[i]));
    uint16_t h = f32_to_f16(top / 127);
    while (f16_to_f32(h) < top / 127) h++;
    for (int i = 0; i < n; i++) q[i] = h ? (int8_t)rintf(x[i] * (1 / f16_to_f32(h))) : 0;
    return h;
}

void abed_turn(const double *x, int hd, double *out) {
    for (int d = 0; d < hd; d++) {
        bool whole = d < hd / 32 * 32;
        out[d] = whole ? 0 : x[d];
        for (int i = d / 32 * 32; whole && i < d / 32 * 32 + 32; i++)
            out[d] += (__builtin_popcount((unsigned)(i & d & 31)) & 1 ? -x[i] : x[i]) / sqrt(32);
    }
}

void abed_round_head(enum kern_dtype t, const float *x, int hd, float *out) {
    int8_t q[32];
    for (int d = 0; d < hd && t != KERN_Q8_0; d++) out[d] = abed_rounded(t, x[d]);
    for (int d = 0; d < hd && t == KERN_Q8_0; d += 32) {
        int n = hd - d < 32 ? hd - d : 32;
        float scale = f16_to_f32(q8_group(x + d, n, q));
        for (int i = 0; i < n; i++) out[d + i] = scale * (float)q[i];
    }
}

/* Key (what 2) or value (3) of a token before the cache. */
static float raw_at(const struct abed *c, int s, int what, int position, int head, int d) {
    return abed_value(c->seq[s].salt, what, position, head * 256 + d);
}

/* And after it. Of 8 bits the last token is remembered, as elements are asked for in order. */
static float kept(const struct abed *c, int s, int what, int position, int head, int d) {
    static uint64_t last[2][4];
    static float values[2][KERN_MAX_HEAD_DIM];
    float raw[KERN_MAX_HEAD_DIM];
    int at = what - 2;
    if (c->s.dtype != KERN_Q8_0)
        return abed_rounded(c->s.dtype, raw_at(c, s, what, position, head, d));
    const uint64_t now[4] = {c->seq[s].salt, (uint64_t)position, (uint64_t)head,
                             (uint64_t)c->s.head_dim};
    if (memcmp(last[at], now, sizeof now) != 0) {
        for (int i = 0; i < c->s.head_dim; i++) raw[i] = raw_at(c, s, what, position, head, i);
        abed_round_head(KERN_Q8_0, raw, c->s.head_dim, values[at]);
        memcpy(last[at], now, sizeof now);
    }
    return values[at][d];
}
float abed_k_at(const struct abed *c, int s, int position, int head, int d) {
    return kept(c, s, 2, position, head, d);
}
float abed_v_at(const struct abed *c, int s, int position, int head, int d) {
    return kept(c, s, 3, position, head, d);
}

static bool listed(const struct abed_seq *q, int block) {
    int first_row_block = (q->length - q->n_rows) / KERN_BLOCK;
    return block >= first_row_block || block % q->keep_every == 0;
}

size_t abed_element_bytes(enum kern_dtype t) {
    return t == KERN_F32 ? 4 : 2;
}

void abed_put(enum kern_dtype t, uint8_t *p, size_t i, float x) {
    uint16_t h = t == KERN_F16 ? f32_to_f16(x) : f32_to_bf16(x);
    if (t == KERN_F32) memcpy(p + i * 4, &x, 4);
    else memcpy(p + i * 2, &h, 2);
}

void abed_put_q8(int hd, uint8_t *plane, bool is_v, int t, const float *x, bool poison) {
    int width = (hd + 3) / 4 * 4;
    for (int d = 0; d < hd; d += 32) {
        int8_t q[32] = {0};
        int n = hd - d < 32 ? hd - d : 32;
        uint16_t scale = poison ? 0x7e00 : q8_group(x + d, n, q);
        memcpy(plane + KERN_BLOCK * width + (d / 32 * KERN_BLOCK + t) * 2, &scale, 2);
        for (int i = d; i < d + n; i++) {
            int at = is_v ? (t / 4 * width + i) * 4 + t % 4 : (i / 4 * KERN_BLOCK + t) * 4 + i % 4;
            plane[at] = (uint8_t)(is_v ? q[i - d] : q[i - d] + 128);
        }
    }
}

static void fill_head_q8(const struct abed *c, int s, int block, int h, uint8_t *k, uint8_t *v) {
    float x[2][KERN_MAX_HEAD_DIM];
    for (int t = 0; t < KERN_BLOCK; t++) {
        int position = block * KERN_BLOCK + t;
        bool real = position < c->seq[s].length;
        for (int i = 0; i < 2; i++)
            for (int d = 0; d < c->s.head_dim; d++) x[i][d] = raw_at(c, s, 2 + i, position, h, d);
        abed_put_q8(c->s.head_dim, k, false, t, x[0], !real);
        abed_put_q8(c->s.head_dim, v, true, t, x[1], !real);
    }
}

/* Page ids are handed out in a scrambled order, and a page spans whole pages of the OS. */
static void fill_block(struct abed *c, int s, int block, int page) {
    for (int h = 0; h < c->s.n_kv; h++) {
        uint8_t *base = c->arena + (size_t)page * c->kv.page_stride + (size_t)h * c->kv.head_stride;
        uint8_t *k = base + c->kv.k_offset, *v = base + c->kv.v_offset;
        if (c->s.dtype == KERN_Q8_0) fill_head_q8(c, s, block, h, k, v);
        for (int t = 0; t < KERN_BLOCK && c->s.dtype != KERN_Q8_0; t++)
            for (int d = 0; d < c->s.head_dim; d++) {
                int position = block * KERN_BLOCK + t;
                bool real = position < c->seq[s].length;
                abed_put(c->s.dtype, k, (size_t)(d * KERN_BLOCK + t),
                         real ? abed_k_at(c, s, position, h, d) : NAN);
                abed_put(c->s.dtype, v, (size_t)(t * c->s.head_dim + d),
                         real ? abed_v_at(c, s, position, h, d) : NAN);
            }
    }
}

/* Sequences of generated rows must come first. */
struct abed *abed_make(struct abed_shape s, const struct abed_seq *seqs, int n_seqs) {
    struct abed *c = calloc(1, sizeof *c);
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
    assert_true(c->n_rows <= ABED_MAX_ROWS);
    size_t head = KERN_BLOCK * kern_kv_token_bytes(s.dtype, s.head_dim);
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
    c->lists = (struct kern_lists){.page = c->page,
                                   .block = c->block,
                                   .n_blocks = c->n_blocks,
                                   .capacity = c->capacity,
                                   .seq_stride = 1};
    int width = (s.n_heads + 2 * s.n_kv) * s.head_dim;
    c->qkv = calloc((size_t)(c->n_rows * width), sizeof *c->qkv);
    c->out = calloc((size_t)(c->n_rows * s.n_heads * s.head_dim), sizeof *c->out);
    for (int r = 0; r < c->n_rows; r++)
        for (int i = 0; i < s.n_heads * s.head_dim; i++)
            c->qkv[r * width + i] = abed_q_at(c->seq[c->row_seq[r]].salt, c->position[r], i);
    c->b.token = c->token;
    c->b.position = c->position;
    c->b.row_seq = c->row_seq;
    c->b.slot_page = c->slot_page;
    c->b.n_seqs = n_seqs;
    c->b.seq_row = c->seq_row;
    c->b.seq_n_rows = c->seq_n_rows;
    return c;
}

void abed_discard(struct abed *c) {
    munmap(c->arena, c->arena_bytes);
    free(c->page);
    free(c->block);
    free(c->qkv);
    free(c->out);
    free(c);
}

static float scale_of(const struct abed *c) {
    return 1.f / sqrtf((float)c->s.head_dim);
}

/* The packed rows that attention itself makes are those that `pack` makes of `out`. */
static void check_packed(struct kern *k, const struct abed *c, void *scratch) {
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

void abed_run(struct kern *k, struct abed *c, const struct kern_attn_taps *taps) {
    struct kern_rows rows = c->b.rows;
    size_t bytes =
        k->ops->attn_scratch_bytes(k, rows, c->n_seqs, c->s.n_heads, c->s.head_dim, c->capacity);
    /* Bytes behind the scratch are watched. */
    size_t all = (bytes + 63) / 64 * 64 + 64;
    uint8_t *scratch = aligned_alloc(64, all);
    assert_non_null(scratch);
    memset(scratch, 0xa5, all);
    c->fast = cpu_ctx(k)->precision == KERN_FAST;
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

static bool twin_sees(const struct abed *c, int row, int position, const uint64_t *ancestors) {
    int s = c->row_seq[row], first = c->seq[s].length - c->seq[s].n_rows;
    int block = position / KERN_BLOCK;
    if (position > c->position[row] || !listed(&c->seq[s], block)) return false;
    for (int e = s * c->capacity; c->lists.quarters && e < s * c->capacity + c->n_blocks[s]; e++)
        if (c->block[e] == block && !(c->quarters[e] >> (position / 16 % 4) & 1)) return false;
    if (!ancestors || position < first || position - first >= 64) return true;
    return ancestors[row] >> (position - first) & 1;
}

/* The query of a row, scaled. */
static void twin_query(const struct abed *c, int row, int head, double *out) {
    int hd = c->s.head_dim;
    const float *q =
        c->qkv + (size_t)row * (size_t)((c->s.n_heads + 2 * c->s.n_kv) * hd) + head * hd;
    bool quantized = c->s.dtype == KERN_Q8_0 && c->fast && row < c->b.rows.n_gen;
    for (int d = 0; d < hd; d++) out[d] = (double)q[d] * (double)scale_of(c);
    if (c->s.dtype != KERN_Q8_0) return;
    double plain[KERN_MAX_HEAD_DIM];
    memcpy(plain, out, (size_t)hd * sizeof *out);
    abed_turn(plain, hd, out);
    for (int d = 0; d < hd / 32 * 32; d++) out[d] *= sqrt(2); /* over 4 */
    float top = 0;
    for (int d = 0; d < hd; d++) top = fmaxf(top, (float)fabs(out[d]));
    if (top < 0x1p-100f) top = 1; /* tells tokens not apart */
    for (int d = 0; d < hd && quantized; d++)
        out[d] = (double)(rintf((float)out[d] * (32258 / top)) * (top / 32258));
}

/* Output of one row and query head; share[block] (NULL: not) gets the attention mass by block,
 * abed_quarter_share[4 block + i] that of its quarters. */
double abed_quarter_share[32 * 4];

void abed_twin(const struct abed *c, int row, int head, const uint64_t *ancestors, double *o,
               double *share) {
    int s = c->row_seq[row], hd = c->s.head_dim, kv_head = head / (c->s.n_heads / c->s.n_kv);
    double q[KERN_MAX_HEAD_DIM];
    twin_query(c, row, head, q);
    double *score = malloc((size_t)c->seq[s].length * sizeof *score), top = -INFINITY, sum = 0;
    for (int p = 0; p < c->seq[s].length; p++) {
        score[p] = -INFINITY;
        if (!twin_sees(c, row, p, ancestors)) continue;
        score[p] = 0;
        for (int d = 0; d < hd; d++) score[p] += q[d] * (double)abed_k_at(c, s, p, kv_head, d);
        if (score[p] > top) top = score[p];
    }
    for (int d = 0; d < hd; d++) o[d] = 0;
    for (int b = 0; share && b < c->capacity; b++) share[b] = 0;
    memset(abed_quarter_share, 0, sizeof abed_quarter_share);
    for (int p = 0; p < c->seq[s].length; p++) {
        if (score[p] == -INFINITY) continue;
        double w = exp(score[p] - top);
        sum += w;
        if (share) share[p / KERN_BLOCK] += w;
        if (share) abed_quarter_share[p / KERN_QUARTER] += w;
        for (int d = 0; d < hd; d++) o[d] += w * (double)abed_v_at(c, s, p, kv_head, d);
    }
    for (int d = 0; d < hd && sum > 0; d++) o[d] /= sum;
    for (int b = 0; share && b < c->capacity; b++) share[b] /= sum;
    for (int i = 0; i < 32 * 4; i++) abed_quarter_share[i] /= sum;
    free(score);
}

/* Every `step`-th (row, head) against the twin. */
void abed_check(const struct abed *c, const uint64_t *ancestors, double gen_tolerance,
                double prompt_tolerance, int step) {
    double o[KERN_MAX_HEAD_DIM];
    int hd = c->s.head_dim;
    for (int i = 0; i < c->n_rows * c->s.n_heads; i += step) {
        int row = i / c->s.n_heads, head = i % c->s.n_heads;
        abed_twin(c, row, head, ancestors, o, NULL);
        double tolerance = row < c->b.rows.n_gen ? gen_tolerance : prompt_tolerance;
        for (int d = 0; d < hd; d++)
            assert_near(c->out[(size_t)i * (size_t)hd + (size_t)d], o[d], tolerance);
    }
}

/* ---- Backends ------------------------------------------------------------------------------ */

const char *const abed_names[ABED_N_NAMES] = {"reference", "plain", "avx2", "avx512", "amx"};

struct kern *abed_open(const char *name, int n_threads) {
    struct kern *k;
    bool reference = !strcmp(name, "reference");
    struct kern_options o = {.n_threads = n_threads,
                             .isa = reference ? NULL : name,
                             .precision = reference ? KERN_REFERENCE : KERN_FAST};
    return kern_cpu_open(&k, &o, NULL) == 0 ? k : NULL;
}

double abed_prompt_tolerance(const char *name, enum kern_dtype t) {
    return strcmp(name, "amx") || t == KERN_F32 ? ABED_F32_TOLERANCE : 3e-2;
}

double abed_gen_tolerance(const char *name, enum kern_dtype t) {
    return t == KERN_Q8_0 && strcmp(name, "reference") ? 3e-4 : ABED_F32_TOLERANCE;
}

XXH64_hash_t abed_row_hash(const struct abed *c, int row) {
    size_t n = (size_t)(c->s.n_heads * c->s.head_dim);
    return XXH64(c->out + (size_t)row * n, n * sizeof *c->out, 0);
}

void abed_run_parts(struct kern *k, const struct abed *c, const struct abed_part *part, int n_parts,
                    XXH64_hash_t *hash) {
    struct abed p = *c;
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
    abed_run(k, &p, NULL);
    for (int r = 0; r < p.n_rows; r++) hash[r] = abed_row_hash(&p, r);
    free(p.qkv);
    free(p.out);
}

void abed_check_chunks(struct kern *k, const struct abed *c, int chunk, const XXH64_hash_t *want) {
    enum { OTHERS = 3 };
    XXH64_hash_t got[ABED_LAST + OTHERS];
    int n_last = c->seq[0].n_rows;
    assert_true(n_last <= ABED_LAST);
    for (int done = 0, n, turn = 0; done < n_last; done += n, turn++) {
        n = chunk < n_last - done ? chunk : n_last - done;
        struct abed_part mine = {0, done, n}, near = {1, turn % 7, 2}, far = {2, 0, 1};
        struct abed_part mixes[3][3] = {{mine}, {near, mine}, {far, mine, near}};
        int n_before = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 2 : 1;
        abed_run_parts(k, c, mixes[turn % 3], 1 + turn % 3, got);
        for (int r = 0; r < n; r++) assert_true(got[n_before + r] == want[done + r]);
    }
}
