/* Attention over pages of 8 bits (kernels/cpu/attention_q8.h) beside its twin (attention_bed.h):
 * head sizes that groups divide and others, lengths around pages and leaves, both classes on every
 * set; a row's bits alone and in any company; what no row sees; masses, quarters, bytes; and the
 * law of what is written. */
#include "tests/attention_bed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "kernels/cpu/attention_q8.h"

static const char *const names[] = {"reference", "plain", "avx2", "avxvnni", "avx512", "amx"};
enum { N_NAMES = sizeof names / sizeof *names };

static void check(const char *name, const struct abed *c, const uint64_t *ancestors, int step) {
    abed_check(c, ancestors, abed_gen_tolerance(name, KERN_Q8_0),
               abed_prompt_tolerance(name, KERN_Q8_0), step);
}

static void test_q8_shapes(void) {
    static const struct abed_shape shapes[] = {
        {9, 3, 64, KERN_Q8_0}, {8, 2, 80, KERN_Q8_0}, {5, 1, 96, KERN_Q8_0},
        {64, 1, 8, KERN_Q8_0}, {4, 2, 50, KERN_Q8_0}, {3, 1, 256, KERN_Q8_0},
    };
    static const int lengths[] = {1, 63, 64, 65, 512, 513, 1300};
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = abed_open(names[n], 2);
        if (!k) continue;
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                if ((i + l + (size_t)n) % (TEST_SANITIZED ? 6 : 3) && lengths[l] > 100)
                    continue; /* a third of the long ones */
                for (int prompt = 0; prompt < 2; prompt++) {
                    int rows = !prompt ? 5 : strcmp(names[n], "reference") ? 37 : 7;
                    if (rows > lengths[l]) rows = lengths[l];
                    struct abed_seq q = {lengths[l], rows, prompt, 1, i + 1};
                    struct abed *c = abed_make(shapes[i], &q, 1);
                    abed_run(k, c, NULL);
                    check(names[n], c, NULL, rows * shapes[i].n_heads / 5 + 1);
                    abed_discard(c);
                }
            }
        k->ops->close(k);
    }
}

/* Sequences of all kinds in one pass, lists with gaps, an idle row; then the masses of every third
 * row, which change no bit. */
static const struct abed_seq mix[] = {{700, 5, false, 3, 11},
                                      {1, 1, false, 1, 12},
                                      {1300, 9, false, 4, 13},
                                      {640, 40, true, 2, 15},
                                      {513, 1, true, 5, 17}};
enum { N_MIX = sizeof mix / sizeof *mix };

static void check_mass(const struct abed *c, const int32_t *line, const float *mass) {
    double want[ABED_MAX_SEQS][ABED_MAX_BLOCKS] = {{0}}, share[ABED_MAX_BLOCKS];
    double o[KERN_MAX_HEAD_DIM];
    for (int r = 0; r < c->n_rows; r++)
        for (int h = 0; h < c->s.n_heads && line[r] >= 0; h++) {
            abed_twin(c, r, h, NULL, o, share);
            double *w = want[line[r]];
            for (int b = 0; b < c->capacity; b++) w[b] = fmax(w[b], share[b]);
        }
    for (int s = 0; s < N_MIX; s++)
        for (int e = 0; e < c->n_blocks[s]; e++)
            assert_near(mass[s * c->capacity + e], want[s][c->block[s * c->capacity + e]], 1e-5);
}

static void test_q8_mixed_lists_and_mass(void) {
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = abed_open(names[n], n % 2 ? 3 : 1);
        if (!k) continue;
        struct abed *c = abed_make((struct abed_shape){6, 2, 64, KERN_Q8_0}, mix, N_MIX);
        c->row_seq[3] = -1;
        abed_run(k, c, NULL);
        for (int i = 0; i < 6 * 64; i++) assert_true(c->out[3 * 6 * 64 + i] == 0);
        c->row_seq[3] = 0;
        abed_run(k, c, NULL);
        check(names[n], c, NULL, 23);
        int32_t line[ABED_MAX_ROWS];
        XXH64_hash_t row[ABED_MAX_ROWS];
        for (int r = 0; r < c->n_rows; r++) {
            row[r] = abed_row_hash(c, r);
            line[r] = r % 3 == 0 ? c->row_seq[r] : -1;
        }
        float *mass = calloc((size_t)(N_MIX * c->capacity), sizeof *mass);
        struct kern_attn_taps taps = {.mass = mass, .mass_line = line};
        abed_run(k, c, &taps);
        for (int r = 0; r < c->n_rows; r++) assert_true(abed_row_hash(c, r) == row[r]);
        check_mass(c, line, mass);
        free(mass);
        abed_discard(c);
        k->ops->close(k);
    }
}

/* One row, one result: alone, among others of its sequence, in a mixed batch, in any prompt chunk,
 * on 1..3 threads. */
static void test_q8_invariance(void) {
    static const struct abed_shape shapes[] = {{6, 2, 64, KERN_Q8_0}, {5, 1, 80, KERN_Q8_0}};
    static const int chunks[] = {1, 2, 3, 5, 17};
    for (int n = 1; n < N_NAMES; n++)
        for (int i = 0; i < 4; i++) {
            bool prompt = i % 2;
            struct abed_seq seqs[3] = {
                {1157, ABED_LAST, prompt, 1, 21}, {300, 8, prompt, 2, 22}, {513, 1, prompt, 1, 23}};
            struct abed *c = abed_make(shapes[i / 2], seqs, 3);
            XXH64_hash_t want[ABED_LAST], got[ABED_LAST];
            for (int threads = 1; threads <= 3; threads++) {
                struct kern *k = abed_open(names[n], threads);
                if (!k) break;
                abed_run_parts(k, c, &(struct abed_part){0, 0, ABED_LAST}, 1, got);
                if (threads == 1) memcpy(want, got, sizeof want);
                assert_memory_equal(got, want, sizeof want);
                for (size_t x = threads == 1 ? TEST_SANITIZED * 2 : 4; x < 5; x++)
                    abed_check_chunks(k, c, chunks[x], want);
                k->ops->close(k);
            }
            abed_discard(c);
        }
}

/* Many nodes of the tree, any number of threads. */
static void test_q8_long(void) {
    for (int n = 1; n < N_NAMES; n++) {
        XXH64_hash_t want = 0;
        struct abed_seq q = {TEST_SANITIZED ? 4011 : 16011, 2, false, 1, 31};
        struct abed *c = abed_make((struct abed_shape){2, 1, 32, KERN_Q8_0}, &q, 1);
        for (int threads = 1; threads <= 5; threads += 2) {
            struct kern *k = abed_open(names[n], threads);
            if (!k) break;
            abed_run(k, c, NULL);
            XXH64_hash_t got = abed_row_hash(c, 0) ^ abed_row_hash(c, 1) * 3;
            if (threads == 1) check(names[n], c, NULL, 1);
            if (threads == 1) want = got;
            assert_true(got == want);
            k->ops->close(k);
        }
        abed_discard(c);
    }
}

static uint8_t *head_of(const struct abed *c, int entry, int h) {
    return c->arena + (size_t)c->page[entry] * c->kv.page_stride + (size_t)h * c->kv.head_stride;
}

static void poison(const struct abed *c, int entry, int t) {
    for (int h = 0; h < c->s.n_kv; h++) {
        uint8_t *at = head_of(c, entry, h);
        abed_put_q8(c->s.head_dim, at + c->kv.k_offset, false, t, NULL, true);
        abed_put_q8(c->s.head_dim, at + c->kv.v_offset, true, t, NULL, true);
    }
}

/* What is not a number in a row's future, or in a sibling of a token tree, changes nothing, and
 * shows where it is seen. */
static void test_q8_unseen(void) {
    for (int n = 0; n < N_NAMES; n++)
        for (int prompt = 0; prompt < 2; prompt++) {
            struct kern *k = abed_open(names[n], 2);
            if (!k) continue;
            struct abed_seq q[2] = {{200, 40, prompt, 1, 41}, {67, 5, prompt, 1, 51}};
            struct abed *c = abed_make((struct abed_shape){6, 2, 64, KERN_Q8_0}, q, 1);
            XXH64_hash_t want[40];
            abed_run(k, c, NULL);
            for (int r = 0; r < 40; r++) want[r] = abed_row_hash(c, r);
            poison(c, 185 / 64, 185 % 64);
            abed_run(k, c, NULL);
            for (int r = 0; r < 25; r++) assert_true(abed_row_hash(c, r) == want[r]);
            for (int r = 25; r < 40; r++) assert_true(isnan(c->out[r * 6 * 64]));
            abed_discard(c);
            c = abed_make((struct abed_shape){6, 2, 64, KERN_Q8_0}, q + 1, 1);
            uint64_t ancestors[5] = {0x01, 0x03, 0x07, 0x09, 0x19};
            struct kern_attn_taps taps = {.ancestors = ancestors};
            abed_run(k, c, &taps);
            check(names[n], c, ancestors, 1);
            want[0] = abed_row_hash(c, 4);
            poison(c, 1, 0); /* position 64: row 2, a sibling of 3 and 4 */
            abed_run(k, c, &taps);
            assert_true(abed_row_hash(c, 4) == want[0]);
            abed_discard(c);
            k->ops->close(k);
        }
}

/* Queries of nothing, or of less than a scale can say: the mean of what is seen, no more. */
static void test_q8_no_query(void) {
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = abed_open(names[n], 1);
        if (!k) continue;
        struct abed_seq q = {100, 3, false, 1, 61};
        struct abed *c = abed_make((struct abed_shape){2, 1, 64, KERN_Q8_0}, &q, 1);
        for (int i = 0; i < 2 * 64; i++) c->qkv[i] = i < 64 ? 0 : i % 2 ? 1e-36f : -3e-32f;
        abed_run(k, c, NULL);
        check(names[n], c, NULL, 1);
        abed_discard(c);
        k->ops->close(k);
    }
}

/* Quarters: what is not listed holds NaN, is not seen and not counted; and bytes of whole lists:
 * 64 + 2 * 2 a token. */
static void test_q8_quarters_and_bytes(void) {
    static const struct abed_seq seqs[] = {{1300, 5, false, 1, 91}, {700, 1, false, 2, 92}};
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = abed_open(names[n], 2);
        if (!k) continue;
        struct abed *c = abed_make((struct abed_shape){6, 2, 64, KERN_Q8_0}, seqs, 2);
        uint64_t all = 0, want = 0, bytes = 0;
        struct kern_attn_taps taps = {.kv_bytes_read = &bytes};
        for (int e = 0; e < 2 * c->capacity; e++) {
            int s = e / c->capacity;
            if (e % c->capacity >= c->n_blocks[s]) continue;
            int first = seqs[s].length - seqs[s].n_rows, block = c->block[e];
            int seen = seqs[s].length - 64 * block < 64 ? seqs[s].length - 64 * block : 64;
            c->quarters[e] = block >= first / 64 ? 15 : (uint8_t)(1 + (unsigned)e * 7 % 15);
            all += (uint64_t)(2 * (64 + seen) * 68);
            for (int i = 0; i < 4; i++) {
                int rows = seen - 16 * i < 0 ? 0 : seen - 16 * i < 16 ? seen - 16 * i : 16;
                if (c->quarters[e] >> i & 1) want += (uint64_t)(2 * (16 + rows) * 68);
            }
        }
        abed_run(k, c, &taps);
        assert_int_equal(bytes, all);
        for (int e = 0; e < 2 * c->capacity; e++)
            for (int t = 0; e % c->capacity < c->n_blocks[e / c->capacity] && t < 64; t++)
                if (!(c->quarters[e] >> (t / 16) & 1)) poison(c, e, t);
        bytes = 0;
        c->lists.quarters = c->quarters;
        abed_run(k, c, &taps);
        check(names[n], c, NULL, 1);
        assert_int_equal(bytes, want);
        abed_discard(c);
        k->ops->close(k);
    }
}

/* Every table writes the same bytes; nothing is clipped, an error is at most half a step, and what
 * has no scale reads as NaN, in its own group alone. */
static void check_token(const struct kern_kv *kv, int t, float x[2][80]) {
    static float got[KERN_BLOCK * 80];
    for (int is_v = 0; is_v < 2; is_v++) {
        double want[80], plain[80];
        for (int d = 0; d < 80; d++) want[d] = plain[d] = (double)x[is_v][d];
        if (!is_v) abed_turn(plain, 80, want);
        for (int d = 0; d < 64 && !is_v; d++) want[d] /= sqrt(2); /* over 8 */
        kern_cpu_read_kv(kv, 0, 0, is_v, got);
        for (int d = 0; d < 80; d++) {
            float top = 0, back = got[t * 80 + d];
            bool number = true;
            for (int i = d / 32 * 32; i < 80 && i < d / 32 * 32 + 32; i++) {
                number &= isfinite(want[i]) != 0;
                top = fmaxf(top, (float)fabs(want[i]));
            }
            if (!number || top > 65504.f * 127) assert_true(isnan(back));
            else /* half a step: the scale is rounded up, by 2^-24 where f16 ends */
                assert_near(back, want[d], (top / 126.8 + 0x1p-24) / 2);
        }
    }
}

static void test_q8_law(void) {
    static uint8_t page[2][2 * KERN_BLOCK * (80 + 2 * 3)];
    struct kern_kv kv = {
        .v_offset = sizeof page[0] / 2, .dtype = KERN_Q8_0, .n_kv_heads = 1, .head_dim = 80};
    assert_int_equal(kern_kv_token_bytes(KERN_Q8_0, 80), 80 + 2 * 3);
    assert_int_equal(kern_kv_token_bytes(KERN_Q8_0, 50), 52 + 2 * 2);
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = abed_open(names[n], 1);
        if (!k) continue;
        kv.base = page[n > 0];
        for (int t = 0; t < KERN_BLOCK; t++) {
            float x[2][80], size = t < 8 ? 1e-9f : t < 16 ? 3e8f : ldexpf(1, t - 40);
            for (int d = 0; d < 80; d++) {
                x[0][d] = abed_value(91, t, d, 0) * size;
                x[1][d] = abed_value(92, t, d, 0) * (t % 5 == 0 && d >= 64 ? 0.f : size);
            }
            if (t == 20) x[0][40] = NAN;
            if (t == 21) x[1][79] = INFINITY;
            cpu_ctx(k)->isa->q8->write(&kv, page[n > 0], 0, t, x[0], x[1]);
            check_token(&kv, t, x);
        }
        assert_memory_equal(page[0], page[n > 0], sizeof page[0]);
        k->ops->close(k);
    }
}

/* What rope_kv leaves in the pages is the law of each row at its place, nothing beside it. */
static void test_q8_rope_kv(void) {
    enum { HEADS = 4, KV = 2, HD = 64, ROWS = 70, WIDTH = (HEADS + 2 * KV) * HD };
    for (int n = 0; n < N_NAMES; n++) {
        struct kern *k = abed_open(names[n], 2);
        if (!k) continue;
        struct abed_seq q = {130, ROWS, true, 1, 81};
        struct abed *c = abed_make((struct abed_shape){HEADS, KV, HD, KERN_Q8_0}, &q, 1);
        for (int r = 0; r < ROWS; r++) c->slot_page[r] = c->page[c->position[r] / KERN_BLOCK];
        for (int i = 0; i < ROWS * WIDTH; i++) c->qkv[i] = abed_value(82, 1, i, 0) * 2;
        struct kern_rope rope = {.dim = HD, .scale = 1};
        assert_int_equal(k->ops->rope_kv(k, &c->b, &rope, HEADS, c->qkv, &c->kv), 0);
        float got[64 * HD], new[HD];
        for (int i = 0; i < 3 * KV * 2; i++) {
            int b = i / 4, h = i / 2 % 2, is_v = i % 2;
            kern_cpu_read_kv(&c->kv, c->page[b], h, is_v, got);
            for (int p = b * 64; p < b * 64 + 64 && p < 130; p++) {
                int r = p - (130 - ROWS);
                if (r >= 0) {
                    float x[HD];
                    memcpy(x, c->qkv + r * WIDTH + (HEADS + is_v * KV + h) * HD, sizeof x);
                    if (!is_v) q8_turn_key(x, HD);
                    abed_round_head(KERN_Q8_0, x, HD, new);
                }
                for (int d = 0; d < HD; d++) {
                    float old = is_v ? abed_v_at(c, 0, p, h, d) : abed_k_at(c, 0, p, h, d);
                    assert_true(got[p % 64 * HD + d] == (r >= 0 ? new[d] : old));
                }
            }
        }
        abed_discard(c);
        k->ops->close(k);
    }
}

const struct test tests[] = {
    {"q8_shapes", TEST_QUICK, 240000, test_q8_shapes},
    {"q8_mixed_lists_and_mass", TEST_QUICK, 240000, test_q8_mixed_lists_and_mass},
    {"q8_invariance", TEST_QUICK, 240000, test_q8_invariance},
    {"q8_long", TEST_QUICK, 240000, test_q8_long},
    {"q8_unseen", TEST_QUICK, 240000, test_q8_unseen},
    {"q8_no_query", TEST_QUICK, 240000, test_q8_no_query},
    {"q8_quarters_and_bytes", TEST_QUICK, 240000, test_q8_quarters_and_bytes},
    {"q8_law", TEST_QUICK, 240000, test_q8_law},
    {"q8_rope_kv", TEST_QUICK, 240000, test_q8_rope_kv},
    {0},
};
