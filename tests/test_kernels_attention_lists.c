/* Lists by KV head, and quarters of blocks: what a head reads is what its own list names, to the
 * bit and to the byte, whatever the others' say. */
#include "tests/attention_bed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A list for each KV head: head 1 sees only the newest blocks. */
static void test_attention_list_per_head(void) {
    for (int n = 0; n < ABED_N_NAMES; n++) {
        struct kern *k = abed_open(abed_names[n], 2);
        if (!k) continue;
        struct abed_seq q = {500, 4, false, 1, 71};
        struct abed *c = abed_make((struct abed_shape){4, 2, 64, KERN_F16}, &q, 1);
        abed_run(k, c, NULL);
        float all[2 * 64];
        memcpy(all, c->out, sizeof all);
        int32_t page[2 * 8], block[2 * 8], n_blocks[2] = {8, 3};
        for (int i = 0; i < 8; i++) {
            page[i] = c->page[i];
            block[i] = c->block[i];
            page[8 + i] = i < 3 ? c->page[5 + i] : -1000000; /* beyond n_blocks: never read */
            block[8 + i] = i < 3 ? c->block[5 + i] : 0;
        }
        c->lists = (struct kern_lists){.page = page,
                                       .block = block,
                                       .n_blocks = n_blocks,
                                       .capacity = 8,
                                       .seq_stride = 2,
                                       .head_stride = 1};
        abed_run(k, c, NULL);
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
                score[p - 320] += (double)query[d] * (double)abed_k_at(c, 0, p, 1, d);
            score[p - 320] /= 8;
            top = fmax(top, score[p - 320]);
        }
        for (int p = 320; p < 500; p++) {
            double x = exp(score[p - 320] - top);
            sum += x;
            for (int d = 0; d < 64; d++) o[d] += x * (double)abed_v_at(c, 0, p, 1, d);
        }
        for (int d = 0; d < 64; d++)
            assert_near(c->out[3 * 4 * 64 + 2 * 64 + d], o[d] / sum, ABED_F32_TOLERANCE);
        abed_discard(c);
        k->ops->close(k);
    }
}

/* Quarters of blocks: what is not listed is never multiplied in (it holds NaN), counts as not seen,
 * and is not counted as read; the same bits on any number of threads and beside any other row. */
static void test_attention_quarters(void) {
    static const struct abed_seq seqs[] = {
        {1300, 5, false, 1, 91}, {700, 1, false, 2, 92}, {400, 17, false, 1, 93}};
    static const struct abed_shape shapes[] = {
        {6, 2, 64, KERN_F16}, {3, 3, 80, KERN_BF16}, {16, 1, 24, KERN_F32}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int n = 0; n < ABED_N_NAMES; n++) {
            struct abed *c = abed_make(shapes[i], seqs, 3);
            XXH64_hash_t row[ABED_MAX_ROWS], alone[ABED_MAX_ROWS];
            uint64_t want = 0, bytes = 0;
            size_t es = abed_element_bytes(c->s.dtype), hd = (size_t)c->s.head_dim;
            for (int e = 0; e < 3 * c->capacity; e++) {
                int s = e / c->capacity, block = c->block[e];
                if (e % c->capacity >= c->n_blocks[s]) continue;
                int first = seqs[s].length - seqs[s].n_rows, last = seqs[s].length - 1;
                c->quarters[e] = block >= first / 64 ? 15 : (uint8_t)(1 + (unsigned)e * 7 % 15);
                int seen = block == last / 64 ? last % 64 + 1 : 64;
                for (int q = 0; q < 4; q++)
                    for (int h = 0; h < c->s.n_kv; h++) {
                        uint8_t *base = c->arena + (size_t)c->page[e] * c->kv.page_stride +
                                        (size_t)h * c->kv.head_stride;
                        if (c->quarters[e] >> q & 1) {
                            int rows = seen - 16 * q;
                            want += (uint64_t)(16 + (rows < 0    ? 0
                                                     : rows > 16 ? 16
                                                                 : rows)) *
                                    hd * es;
                            continue;
                        }
                        for (size_t d = 0; d < hd; d++)
                            memset(base + c->kv.k_offset + (d * 64 + 16 * (size_t)q) * es, 0xff,
                                   16 * es);
                        memset(base + c->kv.v_offset + 16 * (size_t)q * hd * es, 0xff,
                               16 * hd * es);
                    }
            }
            c->lists.quarters = c->quarters;
            for (int threads = 1; threads <= 3; threads++) {
                struct kern *k = abed_open(abed_names[n], threads);
                if (!k) break;
                struct kern_attn_taps taps = {.kv_bytes_read = &bytes};
                bytes = 0;
                abed_run(k, c, &taps);
                if (threads == 1) {
                    abed_check(c, NULL, ABED_F32_TOLERANCE, ABED_F32_TOLERANCE, 3);
                    for (int r = 0; r < c->n_rows; r++) row[r] = abed_row_hash(c, r);
                    /* Queries of many rows may be two tiles, which read it twice. */
                    if (c->s.n_heads / c->s.n_kv * 17 <= 48) assert_int_equal(bytes, want);
                }
                for (int r = 0; r < c->n_rows; r++) assert_true(abed_row_hash(c, r) == row[r]);
                if (n > 0) abed_run_parts(k, c, &(struct abed_part){2, 3, 5}, 1, alone);
                for (int r = 0; n > 0 && r < 5; r++) assert_true(alone[r] == row[6 + 3 + r]);
                k->ops->close(k);
            }
            abed_discard(c);
        }
}

/* Lists and masses by KV head: outputs, masses and bytes of a head are, to the bit, those of a call
 * in which all heads read its list; one line for all heads holds the most of theirs. */
static void test_attention_mass_per_head(void) {
    enum { HEADS = 6, KV = 3, SEQS = 3, BLOCKS = 21, GROUP = 2 * 64 };
    static const struct abed_seq seqs[SEQS] = {
        {1300, 5, false, 1, 81}, {700, 3, false, 1, 82}, {640, 40, true, 1, 83}};
    for (int n = 0; n < ABED_N_NAMES; n++) {
        struct kern *k = abed_open(abed_names[n], 2);
        if (!k) continue;
        struct abed *c = abed_make((struct abed_shape){HEADS, KV, 64, KERN_F16}, seqs, SEQS);
        static int32_t page[SEQS * KV * BLOCKS], block[SEQS * KV * BLOCKS], n_blocks[SEQS * KV];
        static float mass[KV + 2][SEQS * KV * BLOCKS], out[ABED_MAX_ROWS * HEADS * 64];
        int32_t line[ABED_MAX_ROWS], first[ABED_MAX_ROWS];
        uint64_t bytes = 0, sum = 0;
        assert_true(c->capacity == BLOCKS);
        for (int l = 0; l < SEQS * KV; l++) {
            n_blocks[l] = 0;
            for (int b = 0; b < c->n_blocks[l / KV]; b++) {
                int at = l / KV * BLOCKS + b;
                if (b % (2 + l % KV) != 0 && b < c->n_blocks[l / KV] - 1) continue;
                page[l * BLOCKS + n_blocks[l]] = c->page[at];
                block[l * BLOCKS + n_blocks[l]++] = c->block[at];
            }
        }
        for (int r = 0; r < c->n_rows; r++) {
            first[r] = c->row_seq[r];
            line[r] = KV * first[r];
        }
        memset(mass, 0, sizeof mass);
        struct kern_attn_taps taps = {
            .mass = mass[KV], .mass_line = line, .mass_head_stride = 1, .kv_bytes_read = &bytes};
        c->lists = (struct kern_lists){.page = page,
                                       .block = block,
                                       .n_blocks = n_blocks,
                                       .capacity = BLOCKS,
                                       .seq_stride = KV,
                                       .head_stride = 1};
        abed_run(k, c, &taps);
        memcpy(out, c->out, (size_t)(c->n_rows * HEADS * 64) * sizeof *out);
        taps.kv_bytes_read = &sum;
        for (int h = 0; h < KV; h++) {
            c->lists = (struct kern_lists){.page = page + h * BLOCKS,
                                           .block = block + h * BLOCKS,
                                           .n_blocks = n_blocks + h,
                                           .capacity = BLOCKS,
                                           .seq_stride = KV};
            taps.mass = mass[h];
            abed_run(k, c, &taps);
            for (int r = 0; r < c->n_rows; r++)
                assert_memory_equal(c->out + (r * KV + h) * GROUP, out + (r * KV + h) * GROUP,
                                    GROUP * sizeof *out);
            for (int s = 0; s < SEQS; s++)
                assert_memory_equal(mass[h] + (s * KV + h) * BLOCKS,
                                    mass[KV] + (s * KV + h) * BLOCKS, BLOCKS * sizeof(float));
        }
        assert_int_equal(sum, KV * bytes);
        taps = (struct kern_attn_taps){.mass = mass[KV + 1], .mass_line = first};
        abed_run(k, c, &taps);
        for (int i = 0; i < SEQS * BLOCKS; i++) {
            float most = 0;
            for (int h = 0; h < KV; h++)
                most = fmaxf(most, mass[KV - 1][(i / BLOCKS * KV + h) * BLOCKS + i % BLOCKS]);
            assert_true(mass[KV + 1][i] == most);
        }
        abed_discard(c);
        k->ops->close(k);
    }
}

const struct test tests[] = {
    {"attention_list_per_head", TEST_QUICK, 60000, test_attention_list_per_head},
    {"attention_quarters", TEST_QUICK, 60000, test_attention_quarters},
    {"attention_mass_per_head", TEST_QUICK, 60000, test_attention_mass_per_head},
    {0},
};
