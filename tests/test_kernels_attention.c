/* Attention over pages, of every instruction set, beside its twin (attention_bed.h): shapes,
 * batches, chunks and threads, what lies behind a row, token trees, masses, bytes; and what rope_kv
 * writes. */
#include "tests/attention_bed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Head sizes, groups, types and lengths around the edges of pages and leaves, both classes, on
 * every set. */
static void test_attention_shapes(void) {
    static const struct abed_shape shapes[] = {
        {3, 3, 64, KERN_F16},  {9, 3, 64, KERN_F16},   {8, 2, 80, KERN_BF16},  {8, 1, 96, KERN_F16},
        {4, 1, 128, KERN_F32}, {3, 1, 256, KERN_BF16}, {6, 2, 24, KERN_F16},   {2, 1, 50, KERN_F32},
        {64, 1, 32, KERN_F16}, {20, 1, 64, KERN_BF16}, {4, 2, 128, KERN_BF16}, {2, 2, 8, KERN_F16},
    };
    static const int lengths[] = {1, 63, 64, 65, 511, 512, 513, 1300};
    for (int n = 0; n < ABED_N_NAMES; n++) {
        struct kern *k = abed_open(abed_names[n], 2);
        if (!k) continue;
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                if ((i + l + (size_t)n) % (TEST_SANITIZED ? 6 : 3) && lengths[l] > 100)
                    continue;                                    /* a third of the long ones */
                if (TEST_RACES && (i + (size_t)n) % 4) continue; /* types share threads alike */
                for (int prompt = 0; prompt < 2; prompt++) {
                    int rows = !prompt ? 5 : strcmp(abed_names[n], "reference") ? 37 : 7;
                    if (rows > lengths[l]) rows = lengths[l];
                    struct abed_seq q = {lengths[l], rows, prompt, 1, i + 1};
                    struct abed *c = abed_make(shapes[i], &q, 1);
                    abed_run(k, c, NULL);
                    abed_check(c, NULL, ABED_F32_TOLERANCE,
                               abed_prompt_tolerance(abed_names[n], shapes[i].dtype),
                               rows * shapes[i].n_heads / 5 + 1);
                    abed_discard(c);
                }
            }
        k->ops->close(k);
    }
}

/* Sequences of all kinds in one pass, lists with gaps, unlisted pages inaccessible, NaN behind the
 * ends, an idle row. */
static const struct abed_seq mix[] = {
    {700, 5, false, 3, 11}, {1, 1, false, 1, 12},  {1300, 9, false, 4, 13}, {65, 3, false, 1, 14},
    {640, 64, true, 2, 15}, {40, 40, true, 1, 16}, {513, 1, true, 5, 17},
};
enum { N_MIX = sizeof mix / sizeof *mix };

static void test_attention_mixed_lists(void) {
    for (int n = 0; n < ABED_N_NAMES; n++)
        for (int threads = 1; threads <= 3; threads += 2) {
            struct kern *k = abed_open(abed_names[n], threads);
            if (!k) continue;
            struct abed *c = abed_make((struct abed_shape){9, 3, 64, KERN_F16}, mix, N_MIX);
            c->row_seq[3] = -1; /* idle: a row of zeros, seen by nobody's count */
            abed_run(k, c, NULL);
            for (int i = 0; i < 9 * 64; i++) assert_true(c->out[3 * 9 * 64 + i] == 0);
            c->row_seq[3] = 0;
            abed_run(k, c, NULL);
            abed_check(c, NULL, ABED_F32_TOLERANCE, abed_prompt_tolerance(abed_names[n], KERN_F16),
                       23);
            abed_discard(c);
            k->ops->close(k);
        }
}

/* One row, one result: a row's bits alone, among 1..64 rows of its sequence, in a mixed batch, in
 * any prompt chunk, on 1..3 threads. */
static void test_attention_invariance(void) {
    static const struct abed_shape shapes[] = {
        {6, 2, 64, KERN_F16}, {6, 2, 64, KERN_BF16}, {2, 1, 64, KERN_F32}, {5, 1, 96, KERN_F16}};
    static const int all_chunks[] = {1, 2, 3, 5, 8, 17, 33}, few_chunks[] = {2, 5, 17};
    const int *chunks = TEST_SANITIZED ? few_chunks : all_chunks;
    size_t n_chunks = TEST_SANITIZED ? 3 : 7;
    for (int n = 1; n < ABED_N_NAMES; n++) /* the reference's rows are alone by construction */
        for (size_t t = 0; t < sizeof shapes / sizeof *shapes; t += TEST_RACES ? 3 : 1)
            for (int prompt = 0; prompt < 2; prompt++) {
                struct abed_seq seqs[3] = {{1157, ABED_LAST, prompt, 1, 21},
                                           {300, 8, prompt, 2, 22},
                                           {513, 1, prompt, 1, 23}};
                struct abed *c = abed_make(shapes[t], seqs, 3);
                XXH64_hash_t want[ABED_LAST], got[ABED_LAST];
                for (int threads = 1; threads <= 3; threads++) {
                    struct kern *k = abed_open(abed_names[n], threads);
                    if (!k) break;
                    abed_run_parts(k, c, &(struct abed_part){0, 0, ABED_LAST}, 1, got);
                    if (threads == 1) memcpy(want, got, sizeof want);
                    assert_memory_equal(got, want, sizeof want);
                    /* With threads the longer ones, which have something to share out. */
                    size_t n_long =
                        threads == 1 ? n_chunks : (size_t)(5 - TEST_SANITIZED - threads);
                    for (size_t i = n_chunks - n_long; i < n_chunks; i++)
                        abed_check_chunks(k, c, chunks[i], want);
                    k->ops->close(k);
                }
                abed_discard(c);
            }
}

/* As many items of as many queries as the scratch has slots for (48 leaves, 64 heads of a KV head,
 * 2 threads), and one more leaf. */
static void test_attention_most_items(void) {
    for (int n = 1; n < ABED_N_NAMES; n++)
        for (int more = 0; more < 2; more++) {
            struct abed_seq q = {48 * KERN_LEAF + more, 1, false, 1, 41};
            struct abed *c = abed_make((struct abed_shape){64, 1, 8, KERN_F16}, &q, 1);
            XXH64_hash_t want = 0;
            for (int threads = 1; threads <= 3; threads++) {
                struct kern *k = abed_open(abed_names[n], threads);
                if (!k) break;
                abed_run(k, c, NULL);
                if (threads == 1) {
                    abed_check(c, NULL, ABED_F32_TOLERANCE, ABED_F32_TOLERANCE, 21);
                    want = abed_row_hash(c, 0);
                }
                assert_true(abed_row_hash(c, 0) == want);
                k->ops->close(k);
            }
            abed_discard(c);
        }
}

/* A context long enough for many nodes: every level of the tree, so every number of threads, gives
 * the same bits and the right ones; one KV head, so that only the tree can be shared out. */
static void test_attention_long(void) {
    for (int n = 0; n < ABED_N_NAMES; n++) {
        XXH64_hash_t want = 0;
        for (int threads = 1; threads <= 7; threads += 2) {
            struct kern *k = abed_open(abed_names[n], threads);
            if (!k) continue;
            struct abed_seq q = {20011, 2, false, 1, 31};
            struct abed *c = abed_make((struct abed_shape){2, 1, 32, KERN_F16}, &q, 1);
            abed_run(k, c, NULL);
            XXH64_hash_t got = abed_row_hash(c, 0) ^ abed_row_hash(c, 1) * 3;
            if (threads == 1) {
                abed_check(c, NULL, ABED_F32_TOLERANCE, 0, 1);
                want = got;
            } else assert_true(got == want);
            abed_discard(c);
            k->ops->close(k);
        }
    }
}

/* Something that is not a number in a row's future, or in a sibling of a token tree, changes
 * nothing. */
static void poison(struct abed *c, int seq, int position) {
    int at = 0;
    while (c->block[seq * c->capacity + at] != position / KERN_BLOCK) at++;
    uint8_t *page = c->arena + (size_t)c->page[seq * c->capacity + at] * c->kv.page_stride;
    for (int h = 0; h < c->s.n_kv; h++)
        for (int d = 0; d < c->s.head_dim; d++) {
            int t = position % KERN_BLOCK;
            abed_put(c->s.dtype, page + c->kv.k_offset + (size_t)h * c->kv.head_stride,
                     (size_t)(d * KERN_BLOCK + t), NAN);
            abed_put(c->s.dtype, page + c->kv.v_offset + (size_t)h * c->kv.head_stride,
                     (size_t)(t * c->s.head_dim + d), d % 2 ? NAN : INFINITY);
        }
}

static void test_attention_future_is_never_used(void) {
    for (int n = 0; n < ABED_N_NAMES; n++)
        for (int prompt = 0; prompt < 2; prompt++) {
            struct kern *k = abed_open(abed_names[n], 2);
            if (!k) continue;
            struct abed_seq q = {200, 40, prompt, 1, 41};
            struct abed *c = abed_make((struct abed_shape){6, 2, 64, KERN_F16}, &q, 1);
            abed_run(k, c, NULL);
            XXH64_hash_t want[40];
            for (int r = 0; r < 40; r++) want[r] = abed_row_hash(c, r);
            poison(c, 0, 160 + 25);
            abed_run(k, c, NULL);
            for (int r = 0; r < 25; r++) assert_true(abed_row_hash(c, r) == want[r]);
            /* and it does show where it is seen */
            for (int r = 25; r < 40; r++) assert_true(isnan(c->out[r * 6 * 64]));
            abed_discard(c);
            k->ops->close(k);
        }
}

/* A token tree: rows 0-1-2 and 0-3-4 of a pass; siblings do not see each other. */
static void test_attention_ancestors(void) {
    for (int n = 0; n < ABED_N_NAMES; n++)
        for (int prompt = 0; prompt < 2; prompt++) {
            struct kern *k = abed_open(abed_names[n], 2);
            if (!k) continue;
            struct abed_seq q[2] = {{67, 5, prompt, 1, 51}, {600, 2, prompt, 1, 52}};
            struct abed *c = abed_make((struct abed_shape){6, 2, 64, KERN_F16}, q, 2);
            uint64_t ancestors[7] = {0x01, 0x03, 0x07, 0x09, 0x19, 0x01, 0x03};
            struct kern_attn_taps taps = {.ancestors = ancestors};
            abed_run(k, c, &taps);
            abed_check(c, ancestors, ABED_F32_TOLERANCE,
                       abed_prompt_tolerance(abed_names[n], KERN_F16), 1);
            XXH64_hash_t want = abed_row_hash(c, 4);
            poison(c, 0, 62 + 2);
            abed_run(k, c, &taps);
            assert_true(abed_row_hash(c, 4) == want);
            abed_discard(c);
            k->ops->close(k);
        }
}

/* Mass: maximum over heads and the rows of a line of each entry's share, beside the twin's, every
 * third row in one of its sequence's two lines; sums by head over both. Generated rows are among
 * them, and looking changes no bit of any row. */
static void test_attention_mass(void) {
    enum { HEADS = 6 };
    for (int n = 0; n < ABED_N_NAMES; n++)
        for (int threads = 1; threads <= 2; threads++) {
            struct kern *k = abed_open(abed_names[n], threads);
            if (!k) continue;
            struct abed *c = abed_make((struct abed_shape){HEADS, 2, 64, KERN_F16}, mix, N_MIX);
            int32_t line[ABED_MAX_ROWS];
            XXH64_hash_t row[ABED_MAX_ROWS];
            abed_run(k, c, NULL);
            for (int r = 0; r < c->n_rows; r++) {
                row[r] = abed_row_hash(c, r);
                line[r] = r % 3 == 0 ? 2 * c->row_seq[r] + r % 2 : -1;
            }
            assert_true(c->b.rows.n_gen > 3);
            size_t entries = (size_t)(N_MIX * c->capacity);
            float *mass = calloc(2 * entries, sizeof *mass), *by_head[2];
            float *quarters = calloc(2 * entries, 4 * sizeof *quarters);
            for (int i = 0; i < 2; i++) by_head[i] = calloc(HEADS * entries, sizeof(float));
            struct kern_attn_taps taps = {
                .mass = mass, .mass_line = line, .head_mass = by_head[0], .quarter_mass = quarters};
            abed_run(k, c, &taps);
            for (int r = 0; r < c->n_rows; r++) assert_true(abed_row_hash(c, r) == row[r]);
            double want[2 * ABED_MAX_SEQS][32] = {{0}}, sum[ABED_MAX_SEQS][HEADS][32] = {{{0}}},
                            share[32];
            double o[KERN_MAX_HEAD_DIM];
            static double part[2 * ABED_MAX_SEQS][32 * 4];
            memset(part, 0, sizeof part);
            int n_marked[ABED_MAX_SEQS] = {0};
            for (int r = 0; r < c->n_rows; r++) {
                n_marked[c->row_seq[r]] += line[r] >= 0;
                for (int h = 0; h < HEADS && line[r] >= 0; h++) {
                    abed_twin(c, r, h, NULL, o, share);
                    double *w = want[line[r]], *x = sum[c->row_seq[r]][h];
                    for (int b = 0; b < c->capacity; b++) {
                        w[b] = fmax(w[b], share[b]);
                        x[b] += share[b];
                    }
                    for (int i = 0; i < 4 * c->capacity; i++)
                        part[line[r]][i] = fmax(part[line[r]][i], abed_quarter_share[i]);
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
                        for (int i = 8 * s; h == 0 && i < 8 * s + 8; i++)
                            assert_near(quarters[(i / 4 * c->capacity + e) * 4 + i % 4],
                                        part[i / 4][4 * block + i % 4], 1e-5);
                        assert_near(sums[e], sum[s][h][block], 1e-5 * (1 + n_marked[s]));
                        total += (double)sums[e];
                    }
                    assert_near(total, n_marked[s], 1e-5 * (1 + n_marked[s]));
                }
            /* Alone it gives the same bits, and by itself asks for no other mass. */
            taps = (struct kern_attn_taps){.mass_line = line, .head_mass = by_head[1]};
            abed_run(k, c, &taps);
            assert_memory_equal(by_head[0], by_head[1], HEADS * entries * sizeof(float));
            for (int i = 0; i < 2; i++) free(by_head[i]);
            free(quarters);
            free(mass);
            abed_discard(c);
            k->ops->close(k);
        }
}

/* The counter: per tile, K's whole page and V up to the last token that is seen. One generated row
 * of 65 tokens: two pages of K, 65 rows of V, for each KV head. */
static void test_attention_bytes(void) {
    for (int n = 0; n < ABED_N_NAMES; n++) {
        struct kern *k = abed_open(abed_names[n], 2);
        if (!k) continue;
        struct abed_seq q = {65, 1, false, 1, 61}, sparse = {64 * 20 + 65, 3, false, 4, 62};
        uint64_t bytes = 5;
        struct kern_attn_taps taps = {.kv_bytes_read = &bytes};
        struct abed *c = abed_make((struct abed_shape){6, 2, 64, KERN_F16}, &q, 1);
        abed_run(k, c, &taps);
        assert_int_equal(bytes, 5 + 2 * (2 * 64 + 65) * 64 * 2);
        abed_discard(c);
        bytes = 0;
        c = abed_make((struct abed_shape){6, 2, 64, KERN_F16}, &sparse, 1);
        abed_run(k, c, &taps);
        /* blocks 0, 4, 8, 12, 16 whole; 20 and 21 hold the rows: 20 whole, 21 with one token */
        assert_int_equal(bytes, 2 * (7 * 64 + 6 * 64 + 1) * 64 * 2);
        abed_discard(c);
        k->ops->close(k);
    }
}

/* rope_kv: biases, norms and rotation reach q and k, v takes its bias, and what lands in the pages
 * is the rounded row at its place, nothing beside it. */
static void test_rope_kv_writes(void) {
    for (int n = 0; n < ABED_N_NAMES; n++)
        for (int type = 0; type < 3; type++) {
            struct kern *k = abed_open(abed_names[n], 2);
            if (!k) continue;
            enum { HEADS = 4, KV = 2, HD = 64, ROWS = 70, WIDTH = (HEADS + 2 * KV) * HD };
            static const enum kern_dtype types[] = {KERN_F16, KERN_BF16, KERN_F32};
            enum kern_dtype t = types[type];
            struct abed_seq q = {130, ROWS, true, 1, 81};
            struct abed *c = abed_make((struct abed_shape){HEADS, KV, HD, t}, &q, 1);
            for (int r = 0; r < ROWS; r++) c->slot_page[r] = c->page[c->position[r] / KERN_BLOCK];
            for (int i = 0; i < ROWS * WIDTH; i++) c->qkv[i] = abed_value(82, 1, i, 0) * 2;
            c->row_seq[7] = -1; /* idle: its slot stays as it was */
            float inv[HD / 2], bias[HEADS * HD], norm[HD], before[64 * HD], after[64 * HD];
            for (int i = 0; i < HD / 2; i++) inv[i] = powf(100000, (float)-i / (HD / 2));
            for (int i = 0; i < HEADS * HD; i++) bias[i] = abed_value(83, 1, i, 0);
            for (int i = 0; i < HD; i++) norm[i] = 1 + abed_value(84, 1, i, 0);
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
                                        ? is_v ? abed_v_at(c, 0, p, h, d) : abed_k_at(c, 0, p, h, d)
                                        : abed_rounded(
                                              t,
                                              c->qkv[r * WIDTH + (HEADS + is_v * KV + h) * HD + d]);
                                assert_true(got == want);
                            }
                        }
                    }
            free(raw);
            abed_discard(c);
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
    {"rope_kv_writes", TEST_QUICK, 240000, test_rope_kv_writes},
    {0},
};
