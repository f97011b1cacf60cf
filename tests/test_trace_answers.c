/* Several answers at once are what each is alone: target_trace_answers against target_trace_force
 * and target_trace_generate of the same lists, over prompts that end anywhere in a block, with and
 * without tokens forced in front, until stop tokens; afterwards the trace stands where it stood.
 * The model is tiny, random and peaked (tests/tiny_model.h), so that a wrong page changes tokens.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"
#include "target/target.h"
#include "target/trace.h"
#include "tests/harness.h"
#include "tests/tiny_model.h"

enum { MOST = 700, N_ANSWERS = 5, N_LEAD = 150, N_DRAWN = 30, N_TOKENS = N_LEAD + N_DRAWN };
enum { N_LAYERS = 4, SELECT_LAYER = 1, MOST_OWN = (N_LAYERS - SELECT_LAYER) * 8 };

struct bed {
    struct kern *k;
    struct model *m;
    struct target_trace *t;
    bool apart; /* lists by layer and head, quarters */
};

static struct bed bed_open(int max_rows, bool apart) {
    struct tiny_options to;
    struct model_source *src;
    struct bed b = {.apart = apart};
    struct err e = {0};
    struct kern_options ko = {.n_threads = 1};
    struct target_trace_options o = {.max_tokens = MOST,
                                     .max_rows = max_rows,
                                     .select_layer = SELECT_LAYER,
                                     .heads = true,
                                     .apart = apart,
                                     .max_answers = N_ANSWERS,
                                     .max_answer_tokens = N_TOKENS,
                                     .n_taps = 1,
                                     .tap_layer = {1},
                                     .kv_dtype = KERN_F16};
    tiny_model_default(&to);
    to.n_layers = N_LAYERS;
    struct model_caps caps = target_trace_caps(&o);
    const char *path = tiny_model_file(&to);
    assert_ok(kern_cpu_open(&b.k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&b.m, src, NULL, b.k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
    assert_ok(target_trace_open(&b.t, &o, b.m, b.k, &e), e);
    return b;
}

static void bed_close(struct bed *b) {
    target_trace_close(b->t);
    model_close(b->m);
    b->k->ops->close(b->k);
}

static void text(uint64_t seed, int32_t *ids, int n) {
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)(rng_u32(seed, 0, RNG_TEST, (uint32_t)i) % TINY_FIRST_MERGE);
}

/* What answer i is alone. */
static int alone(struct target_trace *t, int n_prompt, const struct target_kept *kept,
                 const int32_t *lead, int n_lead, const int32_t *stop, int n_stop, int32_t *out) {
    struct err e = {0};
    int n;
    assert_ok(target_trace_rewind(t, n_prompt, &e), e);
    if (n_lead) assert_ok(target_trace_force(t, lead, n_lead, kept, NULL, NULL, &e), e);
    assert_ok(target_trace_generate(t, N_DRAWN, kept, stop, n_stop, out, &n, &e), e);
    assert_ok(target_trace_rewind(t, n_prompt, &e), e);
    return n;
}

static int check_prompt(struct bed *b, int n_prompt, int n_lead, const int32_t *stop, int n_stop) {
    static int32_t ids[MOST], lead[N_LEAD], want[N_DRAWN], got[N_ANSWERS * N_DRAWN];
    static float score[2][MOST / 64 + 1];
    static const struct kern_scorer mean = {.kind = KERN_SCORE_MEAN, .cols = 64, .n_queries = 32};
    int32_t block[N_ANSWERS][16], own_block[MOST_OWN][16];
    uint8_t quarters[16];
    struct target_kept kept[N_ANSWERS], own[MOST_OWN];
    const struct target_kept *which[N_ANSWERS] = {NULL};
    struct err e = {0};
    int n_out[N_ANSWERS], n_blocks = target_n_blocks(n_prompt), n_different = 0;
    text((uint64_t)n_prompt, ids, n_prompt);
    text((uint64_t)n_prompt + 1, lead, n_lead);
    assert_ok(target_trace_rewind(b->t, 0, &e), e);
    assert_ok(target_trace_prompt(b->t, ids, n_prompt, 0, NULL, &e), e);
    for (int i = 1; i < N_ANSWERS; i++) { /* i = 0 is dense */
        kept[i] = (struct target_kept){.block = block[i], .n_blocks = n_blocks};
        for (int j = 0; j < n_blocks; j++)
            if (j == n_blocks - 1 || (j + i) % N_ANSWERS == 0) block[i][kept[i].n++] = j;
        which[i] = &kept[i];
    }
    if (b->apart) { /* the last but one reads quarters, the last lists by layer and head */
        int n_own = (N_LAYERS - SELECT_LAYER) * model_get_config(b->m)->n_kv_heads;
        struct target_kept *thin = &kept[N_ANSWERS - 2];
        for (int j = 0; j < thin->n; j++)
            quarters[j] = j == thin->n - 1 ? 15 : (uint8_t)(1 + (j + n_prompt) % 15);
        thin->quarters = quarters;
        assert_true(n_own <= MOST_OWN);
        for (int i = 0; i < n_own; i++) {
            own[i] = (struct target_kept){.block = own_block[i], .n_blocks = n_blocks};
            for (int j = 0; j < n_blocks; j++)
                if (j == n_blocks - 1 || (j + i) % 3 == 0) own_block[i][own[i].n++] = j;
        }
        kept[N_ANSWERS - 1] = (struct target_kept){.n_blocks = n_blocks, .own = own};
    }
    assert_ok(target_trace_score(b->t, 0, &mean, score[0], &e), e);
    assert_ok(target_trace_answers(b->t, N_ANSWERS, which, lead, n_lead, N_DRAWN, stop, n_stop, got,
                                   n_out, &e),
              e);
    assert_int_equal(target_trace_n_tokens(b->t), n_prompt);
    assert_ok(target_trace_score(b->t, 0, &mean, score[1], &e), e);
    assert_memory_equal(score[0], score[1], sizeof score[0][0] * (size_t)n_blocks);
    for (int i = 0; i < N_ANSWERS; i++) {
        int n = alone(b->t, n_prompt, which[i], lead, n_lead, stop, n_stop, want);
        assert_int_equal(n_out[i], n);
        for (int j = 0; j < n; j++)
            if (want[j] != got[i * N_DRAWN + j])
                fail_msg("prompt %d, answer %d, token %d: %d, alone %d", n_prompt, i, j,
                         got[i * N_DRAWN + j], want[j]);
        n_different += i > 0 && memcmp(got, got + i * N_DRAWN, sizeof *got * N_DRAWN) != 0;
    }
    return n_different;
}

static void check_alone(bool apart) {
    static const int prompts[] = {200, 256, 319, 320, 321, 447};
    struct bed b = bed_open(64, apart);
    int n_different = 0;
    for (size_t i = 0; i < sizeof prompts / sizeof prompts[0]; i++)
        for (int n_lead = 0; n_lead <= N_LEAD; n_lead += 75)
            n_different += check_prompt(&b, prompts[i], n_lead, NULL, 0);
    /* Lists mattered. */
    assert_true(n_different > 18 * (N_ANSWERS - 1) / 2);
    bed_close(&b);
    b = bed_open(512, apart); /* other passes */
    check_prompt(&b, 321, N_LEAD, NULL, 0);
    bed_close(&b);
}

static void test_trace_answers_are_each_alone(void) {
    check_alone(false);
}

/* Some by lists of layers and heads, some by quarters, beside those that read as ever: alone those
 * run in other passes, by common lists. */
static void test_trace_answers_apart_are_each_alone(void) {
    check_alone(true);
}

/* What a prompt's end pays, by layer and head, and by quarters: its most is what all of it is. */
static void test_trace_seen_apart(void) {
    static int32_t ids[MOST];
    struct bed b = bed_open(64, true);
    struct target_seen seen;
    const float *mass;
    struct err e = {0};
    float most[MOST / 64 + 1], together[MOST / 64 + 1] = {0};
    int n = 447, n_blocks = target_n_blocks(n), n_thin = 0;
    text(5, ids, n);
    assert_ok(target_trace_prompt(b.t, ids, n, TARGET_ROWS, &mass, &e), e);
    memcpy(most, mass, sizeof *most * (size_t)n_blocks);
    assert_ok(target_trace_rewind(b.t, 0, &e), e);
    assert_ok(target_trace_prompt_apart(b.t, ids, n, TARGET_ROWS, &seen, &e), e);
    assert_int_equal(seen.n_layers, N_LAYERS - SELECT_LAYER);
    assert_int_equal(seen.n_heads, model_get_config(b.m)->n_kv_heads);
    for (int i = 0; i < seen.n_layers * seen.n_heads; i++)
        for (int j = 0; j < n_blocks; j++) {
            const size_t at = (size_t)i * (size_t)seen.stride + (size_t)j;
            float part = 0;
            for (int q = 0; q < TARGET_QUARTERS; q++) part += seen.quarters[4 * at + (size_t)q];
            /* A block's best row is one row; its quarters' may be several. */
            assert_true(part >= seen.mass[at] * .999f);
            if (seen.mass[at] > together[j]) together[j] = seen.mass[at];
            n_thin += seen.mass[at] < most[j];
        }
    assert_memory_equal(together, most, sizeof *most * (size_t)n_blocks);
    assert_true(n_thin > 0);
    bed_close(&b);
}

/* What answer rows pay to their list: of two passes the most of either, of everything what the same
 * rows pay as a prompt's, but for rounding; and looking changes nothing. */
static void test_trace_used(void) {
    static const int32_t some[] = {0, 2, 5, 6}, all[] = {0, 1, 2, 3, 4, 5, 6};
    static int32_t ids[MOST];
    struct bed b = bed_open(64, false);
    struct target_kept list = {.block = some, .n = 4, .n_blocks = 7};
    const float *mass;
    float seen[9], used[7], first[7], second[7], nll[2][10];
    struct err e = {0};
    int n = 447, n_first = 64, n_rows = 100;
    text(6, ids, MOST);
    assert_ok(target_trace_prompt(b.t, ids, n, 0, NULL, &e), e);
    assert_ok(target_trace_force_used(b.t, ids + n, n_rows, &list, used, &e), e);
    assert_ok(target_trace_force(b.t, ids + n + n_rows, 10, &list, nll[0], NULL, &e), e);
    assert_ok(target_trace_rewind(b.t, n, &e), e);
    assert_ok(target_trace_force(b.t, ids + n, n_rows, &list, NULL, NULL, &e), e);
    assert_ok(target_trace_force(b.t, ids + n + n_rows, 10, &list, nll[1], NULL, &e), e);
    assert_memory_equal(nll[0], nll[1], sizeof nll[0]);
    assert_ok(target_trace_rewind(b.t, n, &e), e);
    assert_ok(target_trace_force_used(b.t, ids + n, n_first, &list, first, &e), e);
    assert_ok(target_trace_force_used(b.t, ids + n + n_first, n_rows - n_first, &list, second, &e),
              e);
    int n_listed = 0, n_second = 0;
    for (int i = 0; i < 7; i++) {
        bool listed = n_listed < 4 && some[n_listed] == i;
        n_listed += listed;
        if (!listed) assert_true(isnan(used[i]));
        else assert_true(used[i] == fmaxf(first[i], second[i]) && used[i] > 0);
        n_second += listed && second[i] > first[i];
    }
    assert_true(n_second > 0 && n_second < 4);
    list = (struct target_kept){.block = all, .n = 7, .n_blocks = 7};
    assert_ok(target_trace_rewind(b.t, n, &e), e);
    assert_ok(target_trace_force_used(b.t, ids + n, 40, &list, used, &e), e);
    assert_ok(target_trace_rewind(b.t, n, &e), e);
    assert_ok(target_trace_prompt(b.t, ids + n, 40, 40, &mass, &e), e);
    memcpy(seen, mass, sizeof seen[0] * 7);
    for (int i = 0; i < 7; i++) assert_near(used[i], seen[i], .02 * (double)seen[i] + 1e-4);
    bed_close(&b);
}

static void test_trace_answers_stop(void) {
    struct bed b = bed_open(64, false);
    int32_t stop[128];
    for (int i = 0; i < 128; i++) stop[i] = 2 * i;
    for (int n = 200; n < 220; n++) check_prompt(&b, n, 0, stop, n % 2 ? 128 : 40);
    bed_close(&b);
}

static void test_trace_answers_room(void) {
    struct bed b = bed_open(64, false);
    struct err e = {0};
    static int32_t ids[MOST], out[2 * N_DRAWN];
    const struct target_kept *kept[2] = {NULL};
    int n_out[2];
    text(1, ids, MOST);
    assert_int_equal(target_trace_answers(b.t, 2, kept, NULL, 0, N_DRAWN, NULL, 0, out, n_out, &e),
                     E_INVALID);
    assert_ok(target_trace_prompt(b.t, ids, MOST - 10, 0, NULL, &e), e);
    assert_int_equal(target_trace_answers(b.t, 2, kept, NULL, 0, N_DRAWN, NULL, 0, out, n_out, &e),
                     E_TOO_LONG);
    assert_non_null(strstr(e.message, "30 more tokens behind 690"));
    assert_int_equal(target_trace_answers(b.t, 2, kept, ids, N_TOKENS, 1, NULL, 0, out, n_out, &e),
                     E_TOO_LONG);
    bed_close(&b);
}

const struct test tests[] = {
    {"trace_answers_are_each_alone", TEST_QUICK, 60000, test_trace_answers_are_each_alone},
    {"trace_answers_apart_are_each_alone", TEST_QUICK, 60000,
     test_trace_answers_apart_are_each_alone},
    {"trace_seen_apart", TEST_QUICK, 20000, test_trace_seen_apart},
    {"trace_used", TEST_QUICK, 20000, test_trace_used},
    {"trace_answers_stop", TEST_QUICK, 60000, test_trace_answers_stop},
    {"trace_answers_room", TEST_QUICK, 20000, test_trace_answers_room},
    {0},
};
