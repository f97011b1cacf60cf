/* Whole models on the CUDA device. Goal: what the engine promises holds there as on the CPU. Logits
 * of the default target stay near the CPU's reference path (f32 activations, sums in double) at
 * 2,220 positions of natural text, in either row class; a row's bits depend neither on its
 * neighbours nor on how a text is cut; speculation, whatever its length and batch, changes no
 * token, no logits row and no byte of KV, greedy or by Gumbel coupling, for the default pair over
 * 200 chats and for tiny pairs of every type that files have. Skipped where there is no GPU. */
#include "tests/speculation_bed.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "tests/cuda_helper.h"
#include "tests/golden_logits.h"

static const struct runner_options on_cuda = {.device = "cuda"};

/* The engine and the runner open a backend of their own. */
static void need_device(void) {
    struct kern *k = cuda_or_skip();
    k->ops->close(k);
}

/* ---- Logits ---- */

enum { FIRST_PROMPT = 5, N_PROMPTS = 9, CHUNK = 128, GEN_CHUNK = 5 }; /* 2,220 tokens */

struct agreement {
    int n, n_top;
    double mean, worst;
};

static double log_sum(const float *z, int n, int *best) {
    double max = -INFINITY, sum = 0;
    *best = 0;
    for (int i = 0; i < n; i++)
        if ((double)z[i] > max) max = (double)z[i], *best = i;
    for (int i = 0; i < n; i++) sum += exp((double)z[i] - max);
    return max + log(sum);
}

/* KL(softmax(want) || softmax(got)) of a row. */
static void compare_row(struct agreement *a, const float *want, const float *got, int n) {
    int best_want, best_got;
    double lw = log_sum(want, n, &best_want), lg = log_sum(got, n, &best_got), kl = 0;
    for (int i = 0; i < n; i++) {
        double p = (double)want[i] - lw;
        kl += exp(p) * (p - ((double)got[i] - lg));
    }
    if (isnan(kl)) fail_msg("row %d: not a number", a->n);
    a->n++;
    a->n_top += best_want == best_got;
    a->mean += kl;
    a->worst = fmax(a->worst, kl);
}

static struct runner *open_target(const char *device, enum kern_precision precision) {
    struct runner_options o = {.device = device,
                               .path = test_default_target(),
                               .precision = precision,
                               .max_tokens = 640,
                               .n_seqs = 2,
                               .max_rows = CHUNK,
                               .kv = precision == KERN_REFERENCE ? KERN_F32 : KERN_F16};
    return runner_open(&o);
}

/* The reference path takes about a quarter of a GMAC a row: a dozen seconds on 16 cores. */
static void test_cuda_engine_reference(void) {
    need_device();
    golden_load();
    size_t n = (size_t)golden_vocab;
    float *want = malloc(CHUNK * n * 4), *got = malloc(CHUNK * n * 4);
    struct runner *cpu = open_target("cpu", KERN_REFERENCE);
    struct runner *cuda = open_target("cuda", KERN_FAST);
    struct agreement of[2] = {{0}}; /* prompt rows, generated rows */
    assert_non_null(want);
    assert_non_null(got);
    for (int i = 0; i < N_PROMPTS; i++) {
        const struct golden *g = golden_at(FIRST_PROMPT + i);
        for (int at = 0; at < g->n_ids; at += CHUNK) {
            int rows = g->n_ids - at < CHUNK ? g->n_ids - at : CHUNK;
            struct runner_piece p = {.ids = g->ids + at, .n = rows, .prompt = true};
            runner_pass(cpu, &p, 1, want);
            runner_pass(cuda, &p, 1, got);
            for (int r = 0; r < rows; r++)
                compare_row(&of[0], want + (size_t)r * n, got + (size_t)r * n, golden_vocab);
            for (int r = 0; r < rows; r += GEN_CHUNK) {
                int few = rows - r < GEN_CHUNK ? rows - r : GEN_CHUNK;
                p = (struct runner_piece){.seq = 1, .ids = g->ids + at + r, .n = few};
                runner_pass(cuda, &p, 1, got + (size_t)r * n);
            }
            for (int r = 0; r < rows; r++)
                compare_row(&of[1], want + (size_t)r * n, got + (size_t)r * n, golden_vocab);
        }
        runner_truncate(cpu, 0, 0);
        runner_truncate(cuda, 0, 0);
        runner_truncate(cuda, 1, 0);
    }
    for (int c = 0; c < 2; c++) {
        of[c].mean /= of[c].n;
        fprintf(stderr, "  %s rows: %d positions, KL mean %.2e worst %.2e, top-1 equal %.2f %%\n",
                c ? "generated" : "prompt", of[c].n, of[c].mean, of[c].worst,
                100.0 * of[c].n_top / of[c].n);
    }
    for (int c = 0; c < 2; c++) {
        assert_true(of[c].n >= 2000);
        assert_true(of[c].mean <= 3e-4);
        assert_true(of[c].n_top >= 0.99 * of[c].n);
    }
    runner_close(cuda);
    runner_close(cpu);
    free(want);
    free(got);
}

/* Against an implementation that is not ours, where texts are longer (to 1,722 tokens). */
static void test_cuda_engine_golden(void) {
    need_device();
    golden_load();
    for (int as_prompt = 0; as_prompt < 2; as_prompt++) {
        double mean, worst;
        int n_top;
        golden_measure(&on_cuda, as_prompt, golden_n, &mean, &worst, &n_top);
        fprintf(stderr, "  %s rows against the golden: KL mean %.2e worst %.2e, top-1 %d/%d\n",
                as_prompt ? "prompt" : "generated", mean, worst, n_top, golden_n);
        assert_true(mean <= 3e-4);
    }
}

static void test_cuda_engine_one_row_one_result(void) {
    static const int chunks[] = {1, 2, 3, 5, 8, 16, 17, 31, 64};
    need_device();
    golden_load();
    for (int prompt = 0; prompt < 2; prompt++) {
        uint64_t kv = golden_feed(&on_cuda, GOLDEN_ROWS, 0, prompt, true);
        for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++)
            if (kv != golden_feed(&on_cuda, chunks[i], (int)i % 4, prompt, false))
                fail_msg("KV differs: chunk %d, %d others, %s", chunks[i], (int)i % 4,
                         prompt ? "prompt" : "generated");
    }
}

/* ---- An answer ---- */

static void test_cuda_engine_answer(void) {
    struct engine_options o;
    struct engine *g = NULL;
    struct err e = {0};
    need_device();
    engine_options_default(&o);
    o.device = "cuda";
    o.model_path = test_default_target();
    o.draft_path = test_default_draft();
    o.context = 1024;
    o.max_seqs = 2;
    o.kv_memory_bytes = (size_t)256 << 20;
    assert_ok(engine_open(&g, &o, NULL, NULL, &e), e);
    engine_assert_answers(g);
    engine_close(g);
}

/* ---- Tiny pairs ---- */

/* Heads of 64: the kernels have none of 16. */
enum {
    DENSE = -1,
    EXACT = -3,
    EXACT_SAMPLED = -4,
    PREFILL = -5,
    RECHECK = -6,
    LISTS = -7
}; /* else sparse, and `reselect` of that */
static void check_tiny(enum kern_dtype dtype, bool gumbel, bool borrow, int reselect,
                       const int *lengths, int n_lengths) {
    struct tiny_options t;
    struct tiny_draft d;
    struct bed b;
    int32_t ids[TINY_VOCAB];
    int n = 0;
    need_device();
    tiny_model_default(&t);
    t.dtype = dtype;
    t.head_dim = 64;
    tiny_draft_default(&d, &t);
    if (borrow) { /* every other id, and the end of turn */
        for (int i = 0; i < TINY_VOCAB; i++)
            if (i % 2 == 0 || i == TINY_IM_END) ids[n++] = i;
        d.borrow_embedding = true;
        d.head_ids = ids;
        d.n_head_ids = n;
    }
    bed_tiny(&b, &t, &d);
    b.o.device = "cuda";
    b.gumbel = gumbel;
    b.n_alone = 12;
    if (reselect == EXACT || reselect == EXACT_SAMPLED) {
        static const int runs[] = {4, 1, 16};
        b.exact = runs;
        b.n_exact = 3;
        b.sampled = reselect == EXACT_SAMPLED;
    }
    if (reselect != DENSE) {
        bed_sparse(&b);
        if (reselect == PREFILL) {
            b.o.sparse.reserve = 0;
            b.o.sparse.prefill = TARGET_PREFILL_SPARSE;
            b.o.sparse.prefill_dense = 0;
            b.o.sparse.prefill_chunk = 64;
        } else if (reselect == RECHECK) {
            b.o.sparse.reselect = 7;
            b.o.sparse.reselector = TARGET_BOUND;
            b.o.sparse.recheck = TARGET_RECHECK_BORDER;
            b.o.sparse.drop = 0.25;
        } else if (reselect == LISTS) {
            b.o.sparse.lists = TARGET_LISTS_HEAD;
            b.o.sparse.quarters = 2;
        } else if (!b.n_exact) {
            b.o.sparse.reselect = reselect;
        }
        b.o.sparse.surprise = 0.02;
        b.o.kv_memory_bytes *= 2;
        b.n_requests = 24;
    }
    bed_check(&b, lengths, n_lengths, true);
    bed_close_tiny(&b);
}

static const int some_lengths[] = {1, 4, 7, VERIFY_DRAFT_AUTO};
enum { N_SOME = sizeof some_lengths / sizeof *some_lengths };

static void test_cuda_engine_tiny_f32(void) {
    check_tiny(KERN_F32, false, false, DENSE, some_lengths, N_SOME);
}
static void test_cuda_engine_tiny_f16(void) {
    check_tiny(KERN_F16, false, false, DENSE, some_lengths, N_SOME);
}
static void test_cuda_engine_tiny_q8_0(void) {
    check_tiny(KERN_Q8_0, false, false, DENSE, bed_all_lengths, BED_N_LENGTHS);
}
static void test_cuda_engine_tiny_q4_1(void) {
    check_tiny(KERN_Q4_1, false, false, DENSE, some_lengths, N_SOME);
}
static void test_cuda_engine_tiny_gumbel(void) {
    check_tiny(KERN_Q8_0, true, false, DENSE, some_lengths, N_SOME);
}
static void test_cuda_engine_tiny_reduced_head(void) {
    check_tiny(KERN_Q8_0, false, true, DENSE, some_lengths, N_SOME);
}

static void test_cuda_engine_tiny_sparse(void) {
    check_tiny(KERN_Q8_0, false, false, TARGET_RESELECT_OFF, some_lengths, N_SOME);
}

/* Dense passes of provisional tokens, which look at generated rows: the dense answer. */
static void test_cuda_engine_tiny_exact(void) {
    static const int lengths[] = {0, 2, 8, VERIFY_DRAFT_AUTO};
    check_tiny(KERN_Q8_0, false, false, EXACT, lengths, 4);
    check_tiny(KERN_Q8_0, false, false, EXACT_SAMPLED, lengths, 4);
}

/* Chunks of prompts whose lists are made between passes: K and V of prompts, too. */
static void test_cuda_engine_tiny_prefill(void) {
    check_tiny(KERN_Q8_0, false, false, PREFILL, some_lengths, N_SOME);
}

/* Bounds of states, looks at candidates between passes, masses of generated rows. */
static void test_cuda_engine_tiny_recheck(void) {
    check_tiny(KERN_Q8_0, false, false, RECHECK, some_lengths, N_SOME);
}

/* Lists by layer and KV head, and quarters of their blocks. */
static void test_cuda_engine_tiny_lists(void) {
    check_tiny(KERN_Q8_0, false, false, LISTS, some_lengths, N_SOME);
}

/* States, scores and lists inside answers: rounds that end at points, and that are cut at them. */
static void test_cuda_engine_tiny_epochs(void) {
    check_tiny(KERN_Q8_0, false, false, 7, some_lengths, N_SOME);
    check_tiny(KERN_Q8_0, true, false, TARGET_RESELECT_SURPRISE, some_lengths, N_SOME);
}

/* ---- The default pair ---- */

/* Without speculation alone, then with it: every draft length in batches of up to 16 over all
 * requests, and alone over the first ones. */
static void check_pair(int n_requests, int n_out, bool gumbel, const int *lengths, int n_lengths) {
    struct bed b;
    need_device();
    bed_default_pair(&b, n_requests, n_out);
    b.o.device = "cuda";
    b.gumbel = gumbel;
    b.n_alone = n_requests < 16 ? n_requests : 16;
    bed_check(&b, lengths, n_lengths, true);
    bed_close_default_pair(&b);
}

static void test_cuda_engine_pair_few(void) {
    static const int lengths[] = {3, VERIFY_DRAFT_AUTO};
    check_pair(20, 64, false, lengths, 2);
}
static void test_cuda_engine_pair(void) {
    check_pair(200, 128, false, bed_all_lengths, BED_N_LENGTHS);
}
static void test_cuda_engine_pair_gumbel(void) {
    static const int lengths[] = {4, VERIFY_DRAFT_AUTO};
    check_pair(200, 128, true, lengths, 2);
}

const struct test tests[] = {
    {"cuda_engine_reference", TEST_GPU, 240000, test_cuda_engine_reference},
    {"cuda_engine_golden", TEST_GPU, 120000, test_cuda_engine_golden},
    {"cuda_engine_one_row_one_result", TEST_GPU, 120000, test_cuda_engine_one_row_one_result},
    {"cuda_engine_answer", TEST_GPU, 60000, test_cuda_engine_answer},
    {"cuda_engine_tiny_f32", TEST_GPU, 180000, test_cuda_engine_tiny_f32},
    {"cuda_engine_tiny_f16", TEST_GPU, 180000, test_cuda_engine_tiny_f16},
    {"cuda_engine_tiny_q8_0", TEST_GPU, 240000, test_cuda_engine_tiny_q8_0},
    {"cuda_engine_tiny_q4_1", TEST_GPU, 180000, test_cuda_engine_tiny_q4_1},
    {"cuda_engine_tiny_recheck", TEST_GPU, 240000, test_cuda_engine_tiny_recheck},
    {"cuda_engine_tiny_sparse", TEST_GPU, 240000, test_cuda_engine_tiny_sparse},
    {"cuda_engine_tiny_exact", TEST_GPU, 300000, test_cuda_engine_tiny_exact},
    {"cuda_engine_tiny_prefill", TEST_GPU, 240000, test_cuda_engine_tiny_prefill},
    {"cuda_engine_tiny_lists", TEST_GPU, 240000, test_cuda_engine_tiny_lists},
    {"cuda_engine_tiny_epochs", TEST_GPU, 240000, test_cuda_engine_tiny_epochs},
    {"cuda_engine_tiny_gumbel", TEST_GPU, 180000, test_cuda_engine_tiny_gumbel},
    {"cuda_engine_tiny_reduced_head", TEST_GPU, 180000, test_cuda_engine_tiny_reduced_head},
    {"cuda_engine_pair_few", TEST_GPU, 120000, test_cuda_engine_pair_few},
    {"cuda_engine_pair", TEST_GPU, 900000, test_cuda_engine_pair},
    {"cuda_engine_pair_gumbel", TEST_GPU, 600000, test_cuda_engine_pair_gumbel},
    {0},
};
