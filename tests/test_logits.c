/* Logits of the default target against tests/golden/logits.bin: an independent numpy implementation
 * over the dequantised file (tests/golden/make_logits.py). The reference path must agree to KL <=
 * 1e-5; the fast path's KL is bounded by what llama.cpp's own CPU backend has on the same prompts
 * (measured: see LLAMA_KL). Rows: hashes of logit rows and KV must not depend on how many rows
 * share a pass, how a prompt is cut, the batch or the threads. */
#include "tests/golden_logits.h"

#include <stdio.h>

#include "tests/harness.h"

static const struct runner_options reference = {.precision = KERN_REFERENCE}, fast,
                                   kv_q8_0 = {.kv = KERN_Q8_0};

static void test_logits_reference(void) {
    golden_load();
    double mean, worst;
    int n_top;
    golden_measure(&reference, true, 9, &mean, &worst, &n_top);
    fprintf(stderr, "  reference path: KL mean %.2e worst %.2e\n", mean, worst);
    assert_true(worst <= 1e-5);
    assert_int_equal(n_top, 9);
}

static void test_logits_reference_long(void) {
    golden_load();
    double mean, worst;
    int n_top;
    golden_measure(&reference, true, golden_n, &mean, &worst, &n_top);
    fprintf(stderr, "  reference path, all prompts: KL mean %.2e worst %.2e\n", mean, worst);
    assert_true(worst <= 1e-5);
    assert_int_equal(n_top, golden_n);
}

/* llama.cpp's own mean KL to the same golden, measured by bench/peer_kl.py: 4.51e-3, with flash
 * attention 4.29e-3, which is the one that counts; the issue allows 1.2 times that, for either row
 * class. */
#define LLAMA_KL 4.29e-3

static void check_fast(const struct runner_options *o, const char *what, bool as_prompt) {
    golden_load();
    double mean, worst;
    int n_top;
    golden_measure(o, as_prompt, golden_n, &mean, &worst, &n_top);
    fprintf(stderr, "  %s, %s rows: KL mean %.2e worst %.2e, top-1 equal %d/%d\n", what,
            as_prompt ? "prompt" : "generated", mean, worst, n_top, golden_n);
    assert_true(mean <= 1.2 * LLAMA_KL);
}

static void test_logits_fast(void) {
    for (int as_prompt = 0; as_prompt < 2; as_prompt++) check_fast(&fast, "fast path", as_prompt);
}

/* Caches of 8 bits, held to the same bound. */
static void test_logits_kv_q8_0(void) {
    check_fast(&kv_q8_0, "fast path, q8_0 caches", true);
}

static uint64_t feed(int chunk, int n_others, int n_threads, bool prompt, bool record) {
    struct runner_options o = {.n_threads = n_threads};
    return golden_feed(&o, chunk, n_others, prompt, record);
}

static void test_logits_one_row_one_result(void) {
    golden_load();
    static const int chunks[] = {1, 2, 3, 5, 7, 16, 31, 64};
    for (int prompt = 0; prompt < 2; prompt++) {
        uint64_t kv = feed(GOLDEN_ROWS, 0, 1, prompt, true);
        for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
            if (prompt && chunks[i] < 3) continue; /* slow, and no other path than 3 and 5 take */
            assert_true(kv == feed(chunks[i], (int)i % 4, 1 + (int)i % 2, prompt, false));
        }
        assert_true(kv == feed(GOLDEN_ROWS, 0, 2, prompt, false));
    }
}

const struct test tests[] = {
    {"logits_reference", TEST_FULL, 240000, test_logits_reference},
    {"logits_reference_long", TEST_LONG, 1500000, test_logits_reference_long},
    {"logits_fast", TEST_FULL, 240000, test_logits_fast},
    {"logits_kv_q8_0", TEST_FULL, 240000, test_logits_kv_q8_0},
    {"logits_one_row_one_result", TEST_FULL, 240000, test_logits_one_row_one_result},
    {0},
};
