#include "tests/golden_logits.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/file.h"
#include "tests/harness.h"

static struct file file;
int golden_n, golden_vocab;
static struct golden golden[64];

void golden_load(void) {
    struct err e = {0};
    assert_ok(file_read(&file, test_golden("logits.bin"), 64 << 20, &e), e);
    const uint8_t *p = file.data;
    memcpy(&golden_n, p + 4, 4);
    memcpy(&golden_vocab, p + 8, 4);
    p += 12;
    for (int i = 0; i < golden_n; i++) {
        struct golden *g = &golden[i];
        memcpy(&g->n_ids, p, 4);
        g->ids = (const int32_t *)(const void *)(p + 4);
        p += 4 + 4 * g->n_ids;
        memcpy(&g->min, p, 4);
        memcpy(&g->step, p + 4, 4);
        g->q = (const uint16_t *)(const void *)(p + 8);
        p += 8 + 2 * golden_vocab;
    }
    assert_int_equal(p - file.data, file.bytes);
}

double golden_kl(const struct golden *g, const float *z) {
    double max = -INFINITY, sum = 0, gsum = 0, out = 0;
    /* Rounding to 16 bits took the golden off its norm: left there, that would be a first-order
     * error. */
    for (int i = 0; i < golden_vocab; i++) gsum += exp((double)g->min + (double)g->step * g->q[i]);
    for (int i = 0; i < golden_vocab; i++) max = z[i] > max ? z[i] : max;
    for (int i = 0; i < golden_vocab; i++) sum += exp(z[i] - max);
    double norm = max + log(sum);
    for (int i = 0; i < golden_vocab; i++) {
        double lp = (double)g->min + (double)g->step * g->q[i] - log(gsum);
        out += exp(lp) * (lp - (z[i] - norm));
    }
    return out;
}

const struct golden *golden_at(int i) {
    assert_in_range(i, 0, golden_n - 1);
    return &golden[i];
}

static struct runner *open_runner(const struct runner_options *like, int max_tokens, int n_seqs) {
    struct runner_options o = {.device = like->device,
                               .path = test_default_target(),
                               .precision = like->precision,
                               .isa = like->isa,
                               .n_threads = like->n_threads,
                               .max_tokens = max_tokens,
                               .n_seqs = n_seqs,
                               .max_rows = 256,
                               .kv = like->precision == KERN_REFERENCE ? KERN_F32
                                     : like->kv == KERN_Q8_0           ? KERN_Q8_0
                                                                       : KERN_F16,
                               .select_layer = like->select_layer};
    return runner_open(&o);
}

void golden_measure(const struct runner_options *o, bool as_prompt, int n, double *mean,
                    double *worst, int *n_top) {
    struct runner *r = open_runner(o, 2048, 1);
    float *z = malloc(sizeof(float) * 256 * (size_t)golden_vocab);
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
        double d = golden_kl(g, z);
        int best = 0, want = 0;
        for (int j = 1; j < golden_vocab; j++) {
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

static uint64_t row_hash[GOLDEN_ROWS];

uint64_t golden_feed(const struct runner_options *o, int chunk, int n_others, bool prompt,
                     bool record) {
    struct runner_options split = *o;
    split.select_layer = 6;
    struct runner *r = open_runner(&split, 256, 4);
    float *z = malloc(sizeof(float) * 256 * (size_t)golden_vocab);
    const struct golden *g = &golden[16];
    for (int at = 0; at < GOLDEN_ROWS; at += chunk) {
        int n = GOLDEN_ROWS - at < chunk ? GOLDEN_ROWS - at : chunk, before = 0;
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
            uint64_t h = XXH3_64bits(z + (size_t)(before + j) * (size_t)golden_vocab,
                                     sizeof(float) * (size_t)golden_vocab);
            if (record) row_hash[at + j] = h;
            else if (h != row_hash[at + j])
                fail_msg("row %d differs: chunk %d, %d others, %d threads, %s", at + j, chunk,
                         n_others, o->n_threads, prompt ? "prompt" : "generated");
        }
    }
    uint64_t kv = runner_kv_hash(r, 0, GOLDEN_ROWS);
    free(z);
    runner_close(r);
    return kv;
}
