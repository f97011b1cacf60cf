#ifndef TANDEM_TESTS_SPECULATION_BED_H
#define TANDEM_TESTS_SPECULATION_BED_H

/* Speculation changes nothing but time: requests of many kinds run once without speculation, alone;
 * then again with given draft lengths, lookup alone, a windowed draft, in batches with cancelled
 * neighbours. Tokens, log-probabilities, the hash of every committed logits row, of all committed K
 * and V, and how the answer ended must be the same to the bit. On either device: the options say
 * which. */

#include "tests/engine_helper.h"

enum {
    BED_MAX_REQUESTS = 200,
    BED_MAX_PROMPT = 400,
    BED_MAX_OUT = 128,
    BED_N_ROWS = BED_MAX_PROMPT + BED_MAX_OUT,
};

/* What a request left. */
struct bed_record {
    int n_prompt, n_out;
    int32_t prompt[BED_MAX_PROMPT], out[BED_MAX_OUT];
    float logprob[BED_MAX_OUT];
    uint64_t row[BED_N_ROWS]; /* hash of the newest logits row computed at a position */
    uint64_t kv;              /* hash of all committed K and V */
    int n_kv;
    enum engine_finish finish;
    struct engine_speculation speculation;
};

/* What is tested: a pair, its requests, and the options that all runs share. */
struct bed {
    const char *target, *draft;
    struct engine_options o;
    int n_requests, n_out;
    int n_alone; /* requests of a run that is not in batches, spread over all, others in each run;
                    0: a fifth where there are batches too, else all. With lookup or a window alone
                    the first ones, 0: all; without speculation always all */
    bool gumbel;
    bool sampled;     /* drawn without Gumbel noise: where tokens are the target's own draws */
    const int *exact; /* [n_exact] of the runs in turn, beside dense ones without; n_exact 0: off */
    int n_exact;
    void (*make)(const struct bed *b, int i, struct bed_record *r, struct engine_submit_options *s);
    /* Of its own. */
    int n_layers, n_kv_heads, head_dim;
    struct bed_record *want, *got; /* [n_requests] */
    void *page;                    /* a device's page on the host */
};

/* Draft lengths 1..8 and auto. */
extern const int bed_all_lengths[];
enum { BED_N_LENGTHS = 9 };

/* A tiny pair in files of its own: max_seqs 16, 48 requests of 96 tokens (fewer under a
 * sanitizer). Close it with bed_close_tiny. */
void bed_tiny(struct bed *b, const struct tiny_options *t, const struct tiny_draft *d);
void bed_close_tiny(struct bed *b);

/* Bed of the default pair over chat prompts; it takes n_requests and what the caller sets after. */
void bed_default_pair(struct bed *b, int n_requests, int n_out);
void bed_close_default_pair(struct bed *b);

/* The same bed with a sparse target: prompts of several blocks, of which deep layers keep three and
 * a reserve. */
void bed_sparse(struct bed *b);
/* A tiny sparse bed of `target`'s shape in Q8_0 and its default draft, in a pool for long prompts.
 */
void bed_tiny_sparse(struct bed *b, const struct tiny_options *target, int select_layer);

/* Run all of it. batches: each draft length also with all requests at once. Counters must show that
 * acceptances, rejections and rollbacks over page borders happened. */
void bed_check(struct bed *b, const int *lengths, int n_lengths, bool batches);

#endif
