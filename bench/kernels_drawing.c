/* Drawing: sample (greedy, temperature, top-k and top-p, Gumbel) and accept (greedy, sampled with a
 * draft's distributions) over the vocabularies of an 8B model and of the default target. The floor
 * is the logits read once, and the draft's distributions. Several sets of logits take turns.
 * Checked against the CPU twin: as sums of probabilities differ in their last bits, a draw may fall
 * on the other side of a border; one row in sixteen may, greedy and Gumbel rows never. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "bench/kernels_bench.h"

enum { N_DRAFT = 4, PLACES = N_DRAFT + 1, MAX_COPIES = 512 };

enum law { GREEDY, TEMPERATURE, FILTERED, GUMBEL, N_LAWS };
static const char *const law_names[] = {"greedy", "T=0.7", "T=0.7 top-k 40 top-p 0.9", "gumbel"};

struct drawing {
    struct kbench *b;
    enum law law;
    int rows, vocab, copies; /* rows of logits a call */
    float *host, *logits;    /* [copies][rows][vocab]; host: the first copy */
    struct kern_sample *host_params, *params;
    struct kern_sampled *out;
    void *scratch;
    /* accept */
    int rounds;
    struct kern_round *host_round, *round;
    int32_t *host_draft, *draft, *n_accepted;
    struct kern_draft_probs q, host_q;
};

static struct kern_sample params_of(enum law law, int row) {
    struct kern_sample s = {.top_p = 1,
                            .repetition_penalty = 1,
                            .seed = 77,
                            .position = 100 + row,
                            .purpose = RNG_SAMPLE,
                            .history = -1,
                            .probs_row = -1};
    if (law != GREEDY) s.temperature = 0.7f;
    if (law == FILTERED) s.top_k = 40, s.top_p = 0.9f;
    s.gumbel = law == GUMBEL;
    return s;
}

/* Logits with a head and a long tail, as models have them: a cube of uniform noise. */
static void open_drawing(struct drawing *d, size_t scratch) {
    struct kbench *b = d->b;
    struct err e = {0};
    size_t n = (size_t)d->rows * (size_t)d->vocab;
    d->copies = (int)(1.05e9 / (double)(n * 4)) + 1;
    if (d->copies > MAX_COPIES) d->copies = MAX_COPIES;
    d->host = kbench_floats(b, n, 1);
    for (size_t i = 0; i < n; i++) d->host[i] = 12 * d->host[i] * d->host[i] * d->host[i];
    d->logits = kbench_reserve(b, n * (size_t)d->copies * 4);
    for (int i = 0; i < d->copies; i++)
        kbench_must(b, b->k->ops->upload(b->k, d->logits + (size_t)i * n, d->host, n * 4, &e), &e,
                    "upload:");
    d->host_params = kbench_host((size_t)d->rows * sizeof *d->params);
    for (int i = 0; i < d->rows; i++) d->host_params[i] = params_of(d->law, i);
    d->params = kbench_put(b, d->host_params, (size_t)d->rows * sizeof *d->params);
    d->out = kbench_reserve(b, (size_t)d->rows * sizeof *d->out);
    d->scratch = kbench_reserve(b, scratch ? scratch : 64);
}

static void close_drawing(struct drawing *d) {
    void *device[] = {d->logits, d->params, d->out, d->scratch};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) kbench_free(d->b, device[i]);
    free(d->host), free(d->host_params);
}

static const float *logits_of(const struct drawing *d, int i) {
    return d->logits + (size_t)(i % d->copies) * (size_t)d->rows * (size_t)d->vocab;
}

static void count(const char *what, enum law law, int n, int n_differ) {
    char text[120];
    int allowed = law == GREEDY || law == GUMBEL ? 0 : (n + 15) / 16;
    if (n_differ <= allowed) return;
    snprintf(text, sizeof text, "%s: %d of %d differ from the twin's", law_names[law], n_differ, n);
    kbench_die(what, text);
}

/* ---- sample ---- */

static const struct kern_history no_history;

static int call_sample(void *arg, int i) {
    struct drawing *d = arg;
    return d->b->k->ops->sample(d->b->k, d->rows, d->vocab, NULL, logits_of(d, i), (size_t)d->vocab,
                                d->params, &no_history, d->scratch, d->out, NULL);
}

static void check_sample(struct drawing *d) {
    struct kbench *b = d->b;
    struct kern_sampled *got = kbench_host((size_t)d->rows * sizeof *got);
    struct kern_sampled *want = kbench_host((size_t)d->rows * sizeof *want);
    void *scratch = kbench_host(b->twin->ops->sample_scratch_bytes(b->twin, d->rows, d->vocab));
    int n_differ = 0;
    kbench_must(b, call_sample(d, 0), NULL, "sample:");
    kbench_get(b, got, d->out, (size_t)d->rows * sizeof *got);
    b->twin->ops->sample(b->twin, d->rows, d->vocab, NULL, d->host, (size_t)d->vocab,
                         d->host_params, &no_history, scratch, want, NULL);
    for (int i = 0; i < d->rows; i++) n_differ += got[i].token != want[i].token;
    count("sample is wrong,", d->law, d->rows, n_differ);
    free(got), free(want), free(scratch);
}

static void point_sample(struct kbench *b, enum law law, int rows, int vocab) {
    struct drawing d = {.b = b, .law = law, .rows = rows, .vocab = vocab};
    char shape[16];
    open_drawing(&d, b->k->ops->sample_scratch_bytes(b->k, rows, vocab));
    check_sample(&d);
    snprintf(shape, sizeof shape, "%d", vocab);
    struct kbench_point p = {.family = "drawing",
                             .kernel = "sample",
                             .dtype = law_names[law],
                             .shape = shape,
                             .rows = rows,
                             .batch = rows,
                             .bytes = 4.0 * rows * vocab};
    p.distinct = p.bytes * d.copies;
    kbench_measure(b, &p, d.copies, call_sample, &d);
    kbench_print(b, &p);
    close_drawing(&d);
}

/* ---- accept ---- */

static int call_accept(void *arg, int i) {
    struct drawing *d = arg;
    return d->b->k->ops->accept(d->b->k, d->rounds, d->vocab, logits_of(d, i), (size_t)d->vocab,
                                d->params, &no_history, d->round, d->draft, &d->q, d->scratch,
                                d->n_accepted, d->out);
}

static int likeliest(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* A row of the draft's: the target's logits with noise, softened. */
static void fill_q(float *q, const float *logits, const float *noise, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += q[i] = expf((logits[i] + noise[i]) / 0.7f - 24);
    for (int i = 0; i < n; i++) q[i] = (float)((double)q[i] / sum);
}

/* Draft tokens that are right at most places; with q, distributions that resemble the target's. */
static void open_rounds(struct drawing *d, bool sampled) {
    struct kbench *b = d->b;
    size_t n_q = (size_t)d->rounds * N_DRAFT, v = (size_t)d->vocab;
    d->host_round = kbench_host((size_t)d->rounds * sizeof *d->round);
    d->host_draft = kbench_host(n_q * 4);
    float *probs = NULL, *noise = NULL;
    if (sampled) {
        probs = kbench_host(n_q * v * 4);
        noise = kbench_floats(b, v, 0.5f);
    }
    for (int i = 0; i < d->rounds; i++) {
        d->host_round[i] = (struct kern_round){.n_draft = N_DRAFT,
                                               .first_row = i * PLACES,
                                               .first_draft = i * N_DRAFT,
                                               .first_q = sampled ? i * N_DRAFT : -1};
        for (int j = 0; j < N_DRAFT; j++) {
            const float *row = d->host + (size_t)(i * PLACES + j) * v;
            int right = likeliest(row, d->vocab);
            d->host_draft[i * N_DRAFT + j] = (i + j) % 5 == 3 ? (right + 1) % d->vocab : right;
            if (sampled) fill_q(probs + (size_t)(i * N_DRAFT + j) * v, row, noise, d->vocab);
        }
    }
    d->round = kbench_put(b, d->host_round, (size_t)d->rounds * sizeof *d->round);
    d->draft = kbench_put(b, d->host_draft, n_q * 4);
    d->n_accepted = kbench_reserve(b, (size_t)d->rounds * 4);
    d->host_q = (struct kern_draft_probs){.probs = probs, .stride = v, .n = d->vocab};
    d->q = d->host_q;
    if (sampled) d->q.probs = kbench_put(b, probs, n_q * v * 4);
    free(noise);
}

static void close_rounds(struct drawing *d) {
    void *device[] = {d->round, d->draft, d->n_accepted, (void *)(uintptr_t)d->q.probs};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) kbench_free(d->b, device[i]);
    free(d->host_round), free(d->host_draft), free((void *)(uintptr_t)d->host_q.probs);
}

static void check_accept(struct drawing *d) {
    struct kbench *b = d->b;
    size_t rows = (size_t)d->rows, rounds = (size_t)d->rounds;
    struct kern_sampled *got = kbench_host(rows * sizeof *got);
    struct kern_sampled *want = kbench_host(rows * sizeof *want);
    int32_t *n_got = kbench_host(rounds * 4), *n_want = kbench_host(rounds * 4), n_differ = 0;
    void *scratch = kbench_host(b->twin->ops->accept_scratch_bytes(b->twin, d->rounds, d->vocab));
    kbench_must(b, call_accept(d, 0), NULL, "accept:");
    kbench_get(b, got, d->out, rows * sizeof *got);
    kbench_get(b, n_got, d->n_accepted, rounds * 4);
    b->twin->ops->accept(b->twin, d->rounds, d->vocab, d->host, (size_t)d->vocab, d->host_params,
                         &no_history, d->host_round, d->host_draft, &d->host_q, scratch, n_want,
                         want);
    for (int i = 0; i < d->rounds; i++) {
        bool same = n_got[i] == n_want[i];
        for (int j = 0; same && j <= n_want[i]; j++)
            same = got[i * PLACES + j].token == want[i * PLACES + j].token;
        n_differ += !same;
    }
    count("accept is wrong,", d->law, d->rounds, n_differ);
    free(got), free(want), free(n_got), free(n_want), free(scratch);
}

static void point_accept(struct kbench *b, bool sampled, int rounds, int vocab) {
    struct drawing d = {.b = b,
                        .law = sampled ? TEMPERATURE : GREEDY,
                        .rows = rounds * PLACES,
                        .vocab = vocab,
                        .rounds = rounds};
    char shape[32];
    open_drawing(&d, b->k->ops->accept_scratch_bytes(b->k, rounds, vocab));
    open_rounds(&d, sampled);
    check_accept(&d);
    snprintf(shape, sizeof shape, "%d g=%d", vocab, N_DRAFT);
    struct kbench_point p = {.family = "drawing",
                             .kernel = "accept",
                             .dtype = law_names[d.law],
                             .shape = shape,
                             .rows = d.rows,
                             .batch = rounds,
                             .bytes = 4.0 * d.rows * vocab +
                                      (sampled ? 4.0 * rounds * N_DRAFT * vocab : 0)};
    p.distinct = 4.0 * d.rows * vocab * d.copies;
    kbench_measure(b, &p, d.copies, call_accept, &d);
    kbench_print(b, &p);
    close_rounds(&d);
    close_drawing(&d);
}

void kbench_drawing(struct kbench *b) {
    static const int vocabs[] = {128256, 49152}, rows[] = {1, 16};
    for (int v = 0; v < 2; v++)
        for (int law = 0; law < N_LAWS; law++)
            for (int r = 0; r < 2; r++) {
                if (b->quick && (law == FILTERED || v)) continue;
                point_sample(b, (enum law)law, rows[r], vocabs[v]);
            }
    for (int v = 0; v < 2; v++)
        for (int sampled = 0; sampled < 2; sampled++)
            for (int r = 0; r < 2; r++) point_accept(b, sampled, rows[r], vocabs[v]);
}
