/* A trace tells what the model computes: its numbers are held against passes of one row each, over
 * pages in scrambled order, none of the trace's code. The model is tiny, random and peaked
 * (tests/tiny_model.h). Equal work must give equal bits (chunks, rewinds, lists of everything);
 * what is computed another way is held to 2e-5, the rounding of sums of some hundred f32. */
#include "tests/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "target/target.h"
#include "target/trace.h"
#include "tests/one_row.h"
#include "tests/tiny_model.h"

enum { MOST = 700, BLOCKS = 11, SELECT = 2, LAYERS = 5, HEADS = 4, HIDDEN = 64, KV_PAGE = 64 * 16 };

struct bed {
    struct kern *k;
    struct model *m;
};

static struct tiny_options tiny(void) {
    struct tiny_options t;
    tiny_model_default(&t);
    t.n_layers = LAYERS;
    return t;
}

static struct target_trace_options options(void) {
    return (struct target_trace_options){.max_tokens = MOST,
                                         .max_rows = 64,
                                         .select_layer = SELECT,
                                         .heads = true,
                                         .kv_dtype = KERN_F16};
}

static struct bed bed_open(int n_threads) {
    struct tiny_options t = tiny();
    struct target_trace_options o = options();
    struct kern_options ko = {.n_threads = n_threads};
    struct model_source *src;
    struct bed b;
    struct err e = {0};
    o.max_rows = 256;
    struct model_caps caps = target_trace_caps(&o);
    const char *path = tiny_model_file(&t);
    assert_ok(kern_cpu_open(&b.k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&b.m, src, NULL, b.k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
    return b;
}

static void bed_close(struct bed *b) {
    model_close(b->m);
    b->k->ops->close(b->k);
}

static struct target_trace *open_trace(const struct bed *b, const struct target_trace_options *o) {
    struct target_trace *t;
    struct err e = {0};
    assert_ok(target_trace_open(&t, o, b->m, b->k, &e), e);
    return t;
}

static const int32_t *text(uint64_t seed) {
    static int32_t ids[4][MOST];
    for (uint32_t i = 0; i < MOST; i++)
        ids[seed % 4][i] = (int32_t)(rng_u32(seed, 0, RNG_TEST, i) % TINY_FIRST_MERGE);
    return ids[seed % 4];
}

/* ---- The naive way ---- */

/* One row after another over pages of a layout of its own. */
struct naive {
    const struct bed *b;
    uint8_t *arena;
    size_t page; /* bytes of all layers */
    float logits[TINY_VOCAB];
    float heads[LAYERS - SELECT][HEADS][BLOCKS]; /* summed over the rows that were marked */
    float mass[BLOCKS];
};

static void naive_open(struct naive *n, const struct bed *b) {
    memset(n, 0, sizeof *n);
    n->b = b;
    n->page = (size_t)LAYERS * 2 * 2 * KV_PAGE * 2;
    n->arena = aligned_alloc(64, n->page * 16);
    assert_non_null(n->arena);
    memset(n->arena, 0xff, n->page * 16);
}

static void naive_row(struct naive *n, int32_t id, int32_t position, bool prompt,
                      const struct target_kept *kept, bool mark) {
    int32_t n_all = position / 64 + 1, n_read[2] = {n_all, n_all};
    int32_t pages[2][BLOCKS], blocks[2][BLOCKS], slot[2];
    int32_t line = mark ? 0 : -1;
    struct err e = {0};
    for (int g = 0; g < 2; g++) {
        int at = 0;
        for (int i = 0; i < n_all; i++) {
            size_t half = g ? (size_t)SELECT * 2 * 2 * KV_PAGE * 2 : 0;
            int32_t id_of = (int32_t)(((size_t)(i * 7 % 16) * n->page + half) / 1024);
            bool read = g == 0 || !kept || i >= kept->n_blocks;
            for (int j = 0; kept && j < kept->n; j++) read |= kept->block[j] == i;
            if (i == position / 64) slot[g] = id_of;
            if (!read) continue;
            pages[g][at] = id_of;
            blocks[g][at++] = i;
        }
        n_read[g] = at;
    }
    struct model_pass pass = one_row_pass(&id, &position, !prompt, n->logits, 2);
    for (int g = 0; g < 2; g++)
        pass.group[g] = (struct model_group){
            .first_layer = g ? SELECT : 0,
            .n_layers = g ? LAYERS - SELECT : SELECT,
            .arena = n->arena,
            .kv_dtype = KERN_F16,
            .slot_page = &slot[g],
            .lists = {.page = pages[g],
                      .block = blocks[g],
                      .n_blocks = &n_read[g],
                      .capacity = BLOCKS,
                      .seq_stride = 1},
            .taps = {.mass = g ? n->mass : NULL,
                     .mass_line = g ? &line : NULL,
                     .head_mass = g ? &n->heads[0][0][0] : NULL},
            .head_mass_stride = HEADS * BLOCKS,
        };
    assert_ok(model_forward(n->b->m, &pass, &e), e);
}

static double naive_nll(const struct naive *n, int32_t id) {
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < TINY_VOCAB; i++) top = fmax(top, (double)n->logits[i]);
    for (int i = 0; i < TINY_VOCAB; i++) sum += exp((double)n->logits[i] - top);
    return top + log(sum) - (double)n->logits[id];
}

static int32_t naive_argmax(const struct naive *n) {
    int best = 0;
    for (int i = 1; i < TINY_VOCAB; i++)
        if (n->logits[i] > n->logits[best]) best = i;
    return best;
}

/* ---- Rows ---- */

/* A prompt and an answer, dense and through a list, against the naive rows; pages that are not
 * listed hold NaN where the answer is read. */
static void test_trace_force(void) {
    enum { PROMPT = 451, ANSWER = 150 };
    static const int32_t block[] = {0, 3, 4, 7}, whole[] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct bed b = bed_open(1);
    const int32_t *ids = text(1);
    static struct naive n;
    struct err e = {0};
    float nll[ANSWER], dense[ANSWER];
    int32_t argmax[ANSWER];
    for (int thin = 0; thin < 3; thin++) {
        struct target_trace_options o = options();
        struct target_trace *t = open_trace(&b, &o);
        struct target_kept kept = {
            .block = thin == 1 ? block : whole, .n = thin == 1 ? 4 : 8, .n_blocks = 8};
        assert_ok(target_trace_prompt(t, ids, PROMPT, 0, NULL, &e), e);
        for (int i = 0; thin == 1 && i < 8; i++) {
            size_t bytes;
            void *page = target_trace_page(t, true, i, &bytes);
            if (i != 0 && i != 3 && i != 4 && i != 7) memset(page, 0xff, bytes);
        }
        assert_ok(target_trace_force(t, ids + PROMPT, ANSWER, thin ? &kept : NULL, nll, argmax, &e),
                  e);
        assert_int_equal(target_trace_n_tokens(t), PROMPT + ANSWER);
        if (thin == 2) assert_memory_equal(nll, dense, sizeof nll);
        if (thin == 0) memcpy(dense, nll, sizeof nll);
        double apart = 0;
        for (int i = 0; i < ANSWER; i++) apart = fmax(apart, fabs((double)(nll[i] - dense[i])));
        if (thin == 1) assert_true(apart > 1e-3); /* the list does something */
        naive_open(&n, &b);
        for (int i = 0; i < PROMPT + ANSWER; i++) {
            if (i >= PROMPT) {
                assert_near(nll[i - PROMPT], naive_nll(&n, ids[i]), 2e-5);
                assert_int_equal(argmax[i - PROMPT], naive_argmax(&n));
            }
            naive_row(&n, ids[i], i, i < PROMPT, thin == 1 && i >= PROMPT ? &kept : NULL, false);
        }
        free(n.arena);
        target_trace_close(t);
    }
    bed_close(&b);
}

/* However a text is cut, by calls, by rows of a pass and by threads: the same bits. */
static void test_trace_chunks(void) {
    enum { PROMPT = 300, ANSWER = 90 };
    const int32_t *ids = text(2);
    float want[ANSWER], got[ANSWER];
    struct err e = {0};
    for (int way = 0; way < 4; way++) {
        struct bed b = bed_open(way % 2 + 1);
        struct target_trace_options o = options();
        o.max_rows = way < 2 ? 64 : 256;
        struct target_trace *t = open_trace(&b, &o);
        struct target_masses masses;
        if (way == 1) assert_ok(target_trace_prompt(t, ids, 1, 0, NULL, &e), e);
        if (way == 3) assert_ok(target_trace_look(t, ids, 33, &masses, &e), e);
        int at = target_trace_n_tokens(t);
        assert_ok(target_trace_prompt(t, ids + at, PROMPT - at, 0, NULL, &e), e);
        int cut = way * 17;
        assert_ok(target_trace_force(t, ids + PROMPT, cut, NULL, got, NULL, &e), e);
        assert_ok(
            target_trace_force(t, ids + PROMPT + cut, ANSWER - cut, NULL, got + cut, NULL, &e), e);
        if (way == 0) memcpy(want, got, sizeof want);
        assert_memory_equal(got, want, sizeof want);
        target_trace_close(t);
        bed_close(&b);
    }
}

/* What stands after a rewind is what would stand without the rows behind it. */
static void test_trace_rewind(void) {
    static const int to[] = {420, 419, 400, 385, 384, 300, 64, 63, 20, 1, 0};
    struct bed b = bed_open(1);
    struct target_trace_options o = options();
    struct err e = {0};
    const int32_t *ids = text(1), *other = text(2);
    for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
        struct target_trace *t = open_trace(&b, &o), *fresh = open_trace(&b, &o);
        float got[40], want[40];
        int32_t a[40], w[40];
        assert_ok(target_trace_prompt(t, ids, 420, 0, NULL, &e), e);
        assert_ok(target_trace_force(t, other, 100, NULL, NULL, NULL, &e), e);
        assert_ok(target_trace_rewind(t, to[i], &e), e);
        assert_int_equal(target_trace_n_tokens(t), to[i]);
        assert_ok(target_trace_prompt(fresh, ids, to[i], 0, NULL, &e), e);
        assert_ok(target_trace_force(t, other + 50, 40, NULL, got, a, &e), e);
        assert_ok(target_trace_force(fresh, other + 50, 40, NULL, want, w, &e), e);
        bool known = to[i] == 420; /* the prompt's end: its last row's logits were kept */
        assert_int_equal(isnan(got[0]), !known);
        if (!known) assert_int_equal(a[0], -1);
        assert_memory_equal(got + !known, want + !known, sizeof got - (known ? 0 : sizeof *got));
        assert_memory_equal(a + !known, w + !known, sizeof a - (known ? 0 : sizeof *a));
        target_trace_close(t);
        target_trace_close(fresh);
    }
    bed_close(&b);
}

/* Greedy tokens are the argmax of the same text forced; the stop token ends it and is left out. */
static void test_trace_generate(void) {
    static const int32_t block[] = {0, 2, 4};
    struct bed b = bed_open(2);
    struct target_trace_options o = options();
    struct target_trace *t = open_trace(&b, &o);
    struct target_kept kept = {.block = block, .n = 3, .n_blocks = 5};
    struct err e = {0};
    int32_t out[30], argmax[30];
    int n;
    assert_int_equal(target_trace_generate(t, 1, NULL, NULL, 0, out, &n, &e), E_INVALID);
    assert_ok(target_trace_prompt(t, text(3), 290, 0, NULL, &e), e);
    for (int thin = 0; thin < 2; thin++) {
        assert_ok(target_trace_generate(t, 30, thin ? &kept : NULL, NULL, 0, out, &n, &e), e);
        assert_int_equal(n, 30);
        assert_int_equal(target_trace_n_tokens(t), 290 + 29);
        assert_ok(target_trace_rewind(t, 290, &e), e);
        assert_ok(target_trace_force(t, out, 30, thin ? &kept : NULL, NULL, argmax, &e), e);
        for (int i = 0; i < 30; i++) assert_int_equal(out[i], argmax[i]);
        assert_ok(target_trace_rewind(t, 290, &e), e);
        int first = 0;
        while (out[first] != out[11]) first++;
        assert_ok(target_trace_generate(t, 30, thin ? &kept : NULL, &out[11], 1, argmax, &n, &e),
                  e);
        assert_int_equal(n, first);
        assert_ok(target_trace_rewind(t, 290, &e), e);
    }
    target_trace_close(t);
    bed_close(&b);
}

/* ---- Masses ---- */

static void test_trace_look(void) {
    enum { BEFORE = 410, ROWS = 64 };
    struct bed b = bed_open(1);
    struct target_trace_options o = options();
    struct target_trace *t = open_trace(&b, &o);
    const int32_t *ids = text(1);
    static struct naive n;
    struct target_masses m;
    const float *most;
    struct err e = {0};
    assert_ok(target_trace_prompt(t, ids, BEFORE - 100, 0, NULL, &e), e);
    assert_ok(target_trace_prompt(t, ids + BEFORE - 100, 100, 80, &most, &e), e);
    int n_blocks = target_n_blocks(BEFORE);
    naive_open(&n, &b);
    for (int i = 0; i < BEFORE; i++) naive_row(&n, ids[i], i, true, NULL, i >= BEFORE - 80);
    for (int i = 0; i < n_blocks; i++) assert_near(most[i], n.mass[i], 2e-5);
    memset(n.heads, 0, sizeof n.heads);
    for (int again = 0; again < 2; again++) {
        assert_ok(target_trace_look(t, ids + BEFORE, ROWS, &m, &e), e);
        assert_int_equal(m.n_layers, LAYERS - SELECT);
        assert_int_equal(m.first_layer, SELECT);
        assert_int_equal(m.n_heads, HEADS);
        assert_int_equal(m.n_rows, ROWS);
        assert_int_equal(m.n_blocks, target_n_blocks(BEFORE + ROWS));
        for (int i = BEFORE; again == 0 && i < BEFORE + ROWS; i++)
            naive_row(&n, ids[i], i, true, NULL, true);
        for (int l = 0; l < m.n_layers; l++)
            for (int h = 0; h < HEADS; h++) {
                const float *line = m.mass + (l * HEADS + h) * m.stride;
                double sum = 0;
                for (int i = 0; i < m.n_blocks; i++) {
                    assert_near(line[i], n.heads[l][h][i], 2e-5 * ROWS);
                    sum += (double)line[i];
                }
                assert_near(sum, ROWS, 1e-6 * ROWS * 10);
            }
        assert_ok(target_trace_rewind(t, BEFORE, &e), e);
    }
    free(n.arena);
    target_trace_close(t);
    bed_close(&b);
}

/* ---- Features ---- */

/* Everything that training reads of a prefix. */
struct features {
    int n_tokens;
    float state[2][MOST * HIDDEN], plane[2][BLOCKS * 5 * HIDDEN], score[2][2][BLOCKS];
};

static void read_features(struct target_trace *t, const struct kern_scorer s[2],
                          struct features *f) {
    struct err e = {0};
    f->n_tokens = target_trace_n_tokens(t);
    for (int i = 0; i < 2; i++) {
        assert_ok(target_trace_states(t, i, 0, f->n_tokens, f->state[i], &e), e);
        assert_ok(target_trace_plane(t, i, 0, target_n_blocks(f->n_tokens), f->plane[i], &e), e);
        for (int k = 0; k < 2; k++)
            assert_ok(target_trace_score(t, i, &s[k], f->score[i][k], &e), e);
    }
}

/* A block's quarters hold the sums of its states, in order. */
static void check_sums(const struct features *f) {
    for (int tap = 0; tap < 2; tap++)
        for (int p = 0; p < f->n_tokens; p += KERN_QUARTER) {
            const float *quarter = f->plane[tap] + (p / 64 * 5 + p % 64 / KERN_QUARTER) * HIDDEN;
            for (int i = 0; i < HIDDEN; i++) {
                float sum = f->state[tap][p * HIDDEN + i];
                for (int x = p + 1; x < p + KERN_QUARTER && x < f->n_tokens; x++)
                    sum += f->state[tap][x * HIDDEN + i];
                assert_true(sum == quarter[i]);
                if (p % 64 == 0)
                    assert_true(quarter[4 * HIDDEN + i] == f->state[tap][p * HIDDEN + i]);
            }
        }
}

/* States of two layers, their sums and what scorers make of them are the same bits whatever the
 * chunks, whatever was taken back. */
static void test_trace_features(void) {
    static const int to[] = {420, 419, 400, 385, 384, 353, 300, 64, 63, 33, 20, 1};
    static float a[4 * HIDDEN], bw[4 * HIDDEN];
    static struct features got, want;
    struct bed b = bed_open(2);
    struct target_trace_options o = options();
    struct err e = {0};
    const int32_t *ids = text(1);
    for (uint32_t i = 0; i < 4 * HIDDEN; i++) {
        a[i] = rng_uniform(5, 0, RNG_TEST, i) - .5f;
        bw[i] = rng_uniform(6, 0, RNG_TEST, i) - .5f;
    }
    const struct kern_scorer s[2] = {
        {.kind = KERN_SCORE_MEAN, .cols = HIDDEN, .n_queries = 1, .by_first = true},
        {.kind = KERN_SCORE_LATE,
         .cols = HIDDEN,
         .n_queries = 32,
         .normed = true,
         .n_heads = 2,
         .head_dim = 2,
         .a = a,
         .b = bw}};
    o.n_taps = 2;
    o.tap_layer[0] = 1;
    o.tap_layer[1] = 3;
    o.has_first = true;
    for (size_t i = 0; i < sizeof to / sizeof *to; i++) {
        struct target_trace *t = open_trace(&b, &o), *fresh = open_trace(&b, &o);
        assert_ok(target_trace_prompt(t, ids, 420, 0, NULL, &e), e);
        assert_ok(target_trace_force(t, text(2), 100, NULL, NULL, NULL, &e), e);
        assert_ok(target_trace_rewind(t, to[i], &e), e);
        for (int at = 0, n = (int)i + 3; at < to[i]; at += n)
            assert_ok(
                target_trace_prompt(fresh, ids + at, n < to[i] - at ? n : to[i] - at, 0, NULL, &e),
                e);
        read_features(t, s, &got);
        read_features(fresh, s, &want);
        check_sums(&got);
        check_sums(&want);
        for (int tap = 0; tap < 2; tap++) {
            assert_memory_equal(got.state[tap], want.state[tap], (size_t)to[i] * HIDDEN * 4);
            for (int k = 0; k < 2; k++)
                assert_memory_equal(got.score[tap][k], want.score[tap][k],
                                    (size_t)target_n_blocks(to[i]) * 4);
        }
        assert_true(got.state[0][0] != got.state[1][0]);
        target_trace_close(t);
        target_trace_close(fresh);
    }
    bed_close(&b);
}

/* ---- Refusals ---- */

static void test_trace_refuses(void) {
    struct bed b = bed_open(1);
    struct target_trace *t;
    struct target_trace_options o = options(), bad;
    struct err e = {0};
    const int32_t wrong[] = {3, TINY_VOCAB, 4};
#define REFUSES(field, value, word)                                                                \
    bad = o;                                                                                       \
    bad.field = (value);                                                                           \
    assert_int_equal(target_trace_open(&t, &bad, b.m, b.k, &e), E_RANGE);                          \
    assert_non_null(strstr(e.message, word))
    REFUSES(max_tokens, 0, "0 tokens");
    REFUSES(max_tokens, 5000, "5000 tokens");
    REFUSES(max_rows, 63, "63 rows");
    REFUSES(max_rows, KERN_MAX_ROWS + 1, "4097 rows");
    REFUSES(select_layer, -1, "select layer -1");
    REFUSES(select_layer, LAYERS, "select layer 5");
    REFUSES(n_taps, MODEL_MAX_TAPS + 1, "9 layers");
    bad = o;
    bad.n_taps = 2;
    bad.tap_layer[1] = LAYERS;
    assert_int_equal(target_trace_open(&t, &bad, b.m, b.k, &e), E_RANGE);
    assert_non_null(strstr(e.message, "layer 5"));
    t = open_trace(&b, &o);
    assert_int_equal(target_trace_prompt(t, wrong, 3, 0, NULL, &e), E_RANGE);
    assert_non_null(strstr(e.message, "token 272 at 1"));
    assert_int_equal(target_trace_prompt(t, text(1), MOST + 1, 0, NULL, &e), E_TOO_LONG);
    assert_int_equal(target_trace_n_tokens(t), 0);
    target_trace_close(t);
    bed_close(&b);
}

const struct test tests[] = {
    {"trace_force", TEST_QUICK, 60000, test_trace_force},
    {"trace_chunks", TEST_QUICK, 60000, test_trace_chunks},
    {"trace_rewind", TEST_QUICK, 60000, test_trace_rewind},
    {"trace_generate", TEST_QUICK, 60000, test_trace_generate},
    {"trace_look", TEST_QUICK, 60000, test_trace_look},
    {"trace_features", TEST_QUICK, 60000, test_trace_features},
    {"trace_refuses", TEST_QUICK, 60000, test_trace_refuses},
    {0},
};
