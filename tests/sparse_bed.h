#ifndef TANDEM_TESTS_SPARSE_BED_H
#define TANDEM_TESTS_SPARSE_BED_H

/* Requests over the tiny model whose lists are made of what the prompt's rows saw, with all that
 * they left: tokens, logits, every list in the order in which it was made. */

#include "tests/engine_helper.h"

enum {
    N_LAYERS = 4,
    SELECT_LAYER = 1,
    MOST_PROMPT = 1500,
    MOST_OUT = 150,
    MOST_BLOCKS = (MOST_PROMPT + MOST_OUT) / 64 + 1,
    MOST_LISTS = MOST_OUT,
    FIRST_SEED = 100,
    MOST_REQUESTS = 16,
};

const struct tiny_options *sparse_target(void);

/* The tiny engine's; who says nothing reads densely. */
void sparse_options(struct engine_options *o);

/* ---- What a request left ---- */

struct sparse_list {
    int n_kv, n_blocks; /* positions that were committed when it was made, blocks before it */
    int n;
    int32_t kept[MOST_BLOCKS];
    uint8_t quarters[MOST_BLOCKS]; /* of a naive loop's; 0: all of the block */
};

struct sparse_record {
    int n_prompt, n_out, n_cached, n_lists;
    int32_t prompt[MOST_PROMPT], out[MOST_OUT];
    uint64_t row[MOST_OUT]; /* the newest logits behind each place */
    struct sparse_list list[MOST_LISTS];
    enum engine_finish finish;
    struct engine_sparsity sparsity;
};

/* The newest of r's lists. */
const struct sparse_list *sparse_newest(const struct sparse_record *r);

/* Requests of seeds FIRST_SEED + i leave what they did in records[i]; others are company. */
struct engine *sparse_open(const struct engine_options *o, struct sparse_record *records);
/* The sink of logits alone, for engines whose lists the test itself looks at. */
void sparse_trace_rows(struct engine *g, struct sparse_record *records);

/* Request i: greedy, no end tokens. Clears r. */
void sparse_request(int i, int n_prompt, int n_out, struct sparse_record *r,
                    struct engine_submit_options *s);
void sparse_end(struct sparse_record *r, const struct engine_progress *p);
void sparse_run(struct engine *g, const struct engine_submit_options *s, struct sparse_record *r);

/* Requests 0..n-1, which fill() makes, one after another or together; again: twice, the second time
 * with hits. */
void sparse_run_all(const struct engine_options *o,
                    void (*fill)(int i, struct sparse_record *r, struct engine_submit_options *s),
                    int n, bool together, bool again, struct sparse_record *r);

void sparse_assert_lists(const struct sparse_record *got, const struct sparse_record *want,
                         const char *what);
/* Tokens and, of each, the logits. */
void sparse_assert_rows(const struct sparse_record *got, const struct sparse_record *want,
                        const char *what);

#endif
