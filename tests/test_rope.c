/* model/rope: frequencies against a table made by tests/golden/make_rope.py, to a few units in the
 * last place of f32: a scaling that is left out or mixed up is off by far more. */
#include "tests/harness.h"

#include "model/config.h"

static const struct {
    enum rope_scaling scaling;
    int dim;
    double base, factor, low, high; /* llama3's two, or yarn's beta_fast and beta_slow */
    int original;
    struct {
        int idx;
        float f;
    } want[10];
} ropes[] = {
    {ROPE_NONE,
     64,
     100000,
     1,
     0,
     0,
     0,
     {{0, 1.0f},
      {1, 0.697830558f},
      {8, 0.0562341288f},
      {12, 0.0133352149f},
      {15, 0.00453158328f},
      {16, 0.00316227786f},
      {19, 0.00107460783f},
      {20, 0.000749894185f},
      {24, 0.00017782794f},
      {31, 1.43301268e-05f}}},
    {ROPE_LINEAR,
     128,
     10000,
     8,
     0,
     0,
     0,
     {{0, 0.125f},
      {1, 0.108245544f},
      {16, 0.0125000002f},
      {28, 0.00222284929f},
      {31, 0.00144347746f},
      {32, 0.00124999997f},
      {35, 0.000811727077f},
      {40, 0.000395284733f},
      {48, 0.000125000006f},
      {63, 1.44347759e-05f}}},
    {ROPE_LLAMA3,
     64,
     500000,
     32,
     1,
     4,
     8192,
     {{0, 1.0f},
      {1, 0.66360122f},
      {8, 0.0376060307f},
      {12, 0.00729266508f},
      {15, 0.00129054801f},
      {16, 0.000429556705f},
      {19, 1.29147684e-05f},
      {20, 8.57025589e-06f},
      {24, 1.66196764e-06f},
      {31, 9.4183072e-08f}}},
    {ROPE_LLAMA3,
     128,
     500000,
     8,
     1,
     4,
     8192,
     {{0, 1.0f},
      {1, 0.814617217f},
      {16, 0.0376060307f},
      {28, 0.00321144611f},
      {31, 0.00085675146f},
      {32, 0.000524846022f},
      {35, 9.5562129e-05f},
      {40, 3.42810235e-05f},
      {48, 6.64787058e-06f},
      {63, 3.06892588e-07f}}},
    {ROPE_YARN,
     128,
     1000000,
     4,
     32,
     1,
     32768,
     {{0, 1.0f},
      {1, 0.805842221f},
      {16, 0.0316227786f},
      {28, 0.00184827659f},
      {31, 0.000802959781f},
      {32, 0.000602941145f},
      {35, 0.000246258394f},
      {40, 4.44569851e-05f},
      {48, 7.90569356e-06f},
      {63, 3.10234441e-07f}}},
    {ROPE_YARN,
     64,
     10000,
     16,
     48,
     2,
     2048,
     {{0, 1.0f},
      {1, 0.749894202f},
      {8, 0.0843750015f},
      {12, 0.0167996008f},
      {15, 0.00395889208f},
      {16, 0.00218750024f},
      {19, 0.000263560301f},
      {20, 0.000197642366f},
      {24, 6.2500003e-05f},
      {31, 8.3345094e-06f}}},
};

static void test_rope_frequencies(void) {
    for (size_t i = 0; i < sizeof ropes / sizeof *ropes; i++) {
        struct model_config c = {.rope_scaling = ropes[i].scaling,
                                 .rope_dim = ropes[i].dim,
                                 .rope_base = ropes[i].base,
                                 .rope_factor = ropes[i].factor,
                                 .rope_low_freq_factor = ropes[i].low,
                                 .rope_high_freq_factor = ropes[i].high,
                                 .rope_beta_fast = ropes[i].low,
                                 .rope_beta_slow = ropes[i].high,
                                 .rope_original_context = ropes[i].original};
        float f[128], g[128], factors[128];
        model_rope_frequencies(&c, NULL, f);
        for (int k = 0; k < 10; k++)
            assert_near(f[ropes[i].want[k].idx], ropes[i].want[k].f, 3e-7f * ropes[i].want[k].f);
        for (int k = 0; k < 128; k++) factors[k] = 2;
        model_rope_frequencies(&c, factors, g);
        for (int k = 0; k < ropes[i].dim / 2; k++) assert_near(g[k], f[k] / 2, 0);
    }
}

const struct test tests[] = {
    {"rope_frequencies", TEST_QUICK, 5000, test_rope_frequencies},
    {0},
};
