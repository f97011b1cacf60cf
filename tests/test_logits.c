/* Logits of the default target against tests/golden/logits.bin: an independent numpy implementation
 * over the dequantised file (tests/golden/make_logits.py). The reference path must agree to KL <=
 * 1e-5; the fast path's KL is bounded by what llama.cpp's own CPU backend has on the same prompts
 * (measured: see LLAMA_KL). Rows: hashes of logit rows and KV must not depend on how many rows
 * share a pass, how a prompt is cut, the batch or the threads. */
#include "tests/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/file.h"
#include "base/rng.h"
#include "tests/runner.h"

struct golden {
    int n_ids;
    const int32_t *ids;
    float min, step;
    const uint16_t *q; /* [vocab] log-probabilities */
};

static struct file file;
static int n_golden, vocab;
static struct golden golden[64];

static void load_golden(void) {
    struct err e = {0};
    assert_ok(file_read(&file, test_golden("logits.bin"), 64 << 20, &e), e);
    const uint8_t *p = file.data;
    memcpy(&n_golden, p + 4, 4);
    memcpy(&vocab, p + 8, 4);
    p += 12;
    for (int i = 0; i < n_golden; i++) {
        struct golden *g = &golden[i];
        memcpy(&g->n_ids, p, 4);
        g->ids = (const int32_t *)(const void *)(p + 4);
        p += 4 + 4 * g->n_ids;
        memcpy(&g->min, p, 4);
        memcpy(&g->step, p + 4, 4);
        g->q = (const uint16_t *)(const void *)(p + 8);
        p += 8 + 2 * vocab;
    }
    assert_int_equal(p - file.data, file.bytes);
}

/* KL(golden || softmax(z)). */
static double kl(const struct golden *g, const float *z) {
    double max = -INFINITY, sum = 0, gsum = 0, out = 0;
    /* Rounding to 16 bits took the golden off its norm: left there, that would be a first-order
     * error. */
    for (int i = 0; i < vocab; i++) gsum += exp((double)g->min + (double)g->step * g->q[i]);
    for (int i = 0; i < vocab; i++) max = z[i] > max ? z[i] : max;
    for (int i = 0; i < vocab; i++) sum += exp(z[i] - max);
    double norm = max + log(sum);
    for (int i = 0; i < vocab; i++) {
        double lp = (double)g->min + (double)g->step * g->q[i] - log(gsum);
        out += exp(lp) * (lp - (z[i] - norm));
    }
    return out;
}

/* Mean and worst KL at the last position of the first n prompts. as_prompt is the row class of all
 * its tokens. */
static void measure(enum kern_precision precision, const char *isa, bool as_prompt, int n,
                    double *mean, double *worst, int *n_top) {
    struct runner_options o = {.path = test_default_target(),
                               .precision = precision,
                               .isa = isa,
                               .max_tokens = 2048,
                               .n_seqs = 1,
                               .max_rows = 256,
                               .kv = precision == KERN_REFERENCE ? KERN_F32 : KERN_F16};
    struct runner *r = runner_open(&o);
    float *z = malloc(sizeof(float) * 256 * (size_t)vocab);
    *mean = *worst = 0;
    *n_top = 0;
    for (int i = 0; i < n; i++) {
        const struct golden *g = &golden[i];
        int at = 0;
        while (at < g->n_ids) {
            int take = g->n_ids - at < 256 ? g->n_ids - at : 256;
            if (at + take == g->n_ids && take > 1)
                take--; /* the last token alone: its logits only */
            struct runner_piece p = {.ids = g->ids + at, .n = take, .prompt = as_prompt};
            runner_pass(r, &p, 1, at + take == g->n_ids ? z : NULL);
            at += take;
        }
        double d = kl(g, z);
        int best = 0, want = 0;
        for (int j = 1; j < vocab; j++) {
            if (z[j] > z[best]) best = j;
            if (g->q[j] > g->q[want]) want = j;
        }
        *n_top += best == want;
        *mean += d / n;
        *worst = d > *worst ? d : *worst;
        runner_truncate(r, 0, 0);
    }
    free(z);
    runner_close(r);
}

static void test_logits_reference(void) {
    load_golden();
    double mean, worst;
    int n_top;
    measure(KERN_REFERENCE, NULL, true, 9, &mean, &worst, &n_top);
    fprintf(stderr, "  reference path: KL mean %.2e worst %.2e\n", mean, worst);
    assert_true(worst <= 1e-5);
    assert_int_equal(n_top, 9);
}

static void test_logits_reference_long(void) {
    load_golden();
    double mean, worst;
    int n_top;
    measure(KERN_REFERENCE, NULL, true, n_golden, &mean, &worst, &n_top);
    fprintf(stderr, "  reference path, all prompts: KL mean %.2e worst %.2e\n", mean, worst);
    assert_true(worst <= 1e-5);
    assert_int_equal(n_top, n_golden);
}

/* llama.cpp's own mean KL to the same golden, measured by bench/peer_kl.py: 4.51e-3, with flash
 * attention 4.29e-3, which is the one that counts; the issue allows 1.2 times that, for either row
 * class. */
#define LLAMA_KL 4.29e-3

static void test_logits_fast(void) {
    load_golden();
    for (int as_prompt = 0; as_prompt < 2; as_prompt++) {
        double mean, worst;
        int n_top;
        measure(KERN_FAST, NULL, as_prompt, n_golden, &mean, &worst, &n_top);
        fprintf(stderr, "  fast path, %s rows: KL mean %.2e worst %.2e, top-1 equal %d/%d\n",
                as_prompt ? "prompt" : "generated", mean, worst, n_top, n_golden);
        assert_true(mean <= 1.2 * LLAMA_KL);
    }
}

enum { N_ROWS = 200 };

static uint64_t row_hash[N_ROWS];

/* Feed ids[0..N_ROWS) of prompt 16 in pieces of `chunk` rows beside `n_others` other sequences;
 * compare every row's hash with the first run's. */
static uint64_t feed(int chunk, int n_others, int n_threads, bool prompt, bool record) {
    struct runner_options o = {.path = test_default_target(),
                               .max_tokens = 256,
                               .n_seqs = 4,
                               .max_rows = 256,
                               .kv = KERN_F16,
                               .n_threads = n_threads,
                               .select_layer = 6};
    struct runner *r = runner_open(&o);
    float *z = malloc(sizeof(float) * 256 * (size_t)vocab);
    const struct golden *g = &golden[16];
    for (int at = 0; at < N_ROWS; at += chunk) {
        int n = N_ROWS - at < chunk ? N_ROWS - at : chunk, before = 0;
        struct runner_piece p[4];
        int n_pieces = 0;
        for (int k = 1; k <= n_others; k++) { /* others stand before and after */
            if (runner_length(r, k) + k > 250) runner_truncate(r, k, 0);
            p[n_pieces++] = (struct runner_piece){
                .seq = k, .ids = golden[10 + k].ids + at % 50, .n = k, .prompt = prompt};
            before += k;
        }
        p[n_pieces++] =
            (struct runner_piece){.seq = 0, .ids = g->ids + at, .n = n, .prompt = prompt};
        runner_pass(r, p, n_pieces, z);
        for (int j = 0; j < n; j++) {
            uint64_t h = XXH3_64bits(z + (size_t)(before + j) * (size_t)vocab,
                                     sizeof(float) * (size_t)vocab);
            if (record) row_hash[at + j] = h;
            else if (h != row_hash[at + j])
                fail_msg("row %d differs: chunk %d, %d others, %d threads, %s", at + j, chunk,
                         n_others, n_threads, prompt ? "prompt" : "generated");
        }
    }
    uint64_t kv = runner_kv_hash(r, 0, N_ROWS);
    free(z);
    runner_close(r);
    return kv;
}

static void test_logits_one_row_one_result(void) {
    load_golden();
    static const int chunks[] = {1, 2, 3, 5, 7, 16, 31, 64};
    for (int prompt = 0; prompt < 2; prompt++) {
        uint64_t kv = feed(N_ROWS, 0, 1, prompt, true);
        for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
            if (prompt && chunks[i] < 3) continue; /* slow, and no other path than 3 and 5 take */
            assert_true(kv == feed(chunks[i], (int)i % 4, 1 + (int)i % 2, prompt, false));
        }
        assert_true(kv == feed(N_ROWS, 0, 2, prompt, false));
    }
}

const struct test tests[] = {
    {"logits_reference", TEST_FULL, 240000, test_logits_reference},
    {"logits_reference_long", TEST_LONG, 1500000, test_logits_reference_long},
    {"logits_fast", TEST_FULL, 240000, test_logits_fast},
    {"logits_one_row_one_result", TEST_FULL, 240000, test_logits_one_row_one_result},
    {0},
};
