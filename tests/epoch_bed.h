#ifndef TANDEM_TESTS_EPOCH_BED_H
#define TANDEM_TESTS_EPOCH_BED_H

/* Sparse requests over the tiny model with every list that was made for them, and a naive loop that
 * makes the same lists: passes of one row, states noted one by one, nothing of the engine's. */

#include "target/scorer.h"
#include "tests/engine_helper.h"

enum {
    N_LAYERS = 4,
    SELECT_LAYER = 2,
    MOST_PROMPT = 1100,
    MOST_OUT = 150,
    MOST_BLOCKS = (MOST_PROMPT + MOST_OUT) / 64 + 1,
    MOST_LISTS = MOST_OUT,
    FIRST_SEED = 100,
    MOST_REQUESTS = 16,
    PAGE_BYTES = 2 * 2 * 2 * 64 * 16 * 2, /* K and V of two layers */
};

const struct tiny_options *epoch_target(void);

/* The tiny engine's, with states kept: the default selector is `mean`. */
void epoch_options(struct engine_options *o);

/* One pinned block at the end, a tenth in reserve, a small surprise. */
struct target_settings epoch_settings(int selector, int keep_blocks, int reselect);

/* ---- What a request left ---- */

struct epoch_list {
    int n;
    int32_t kept[MOST_BLOCKS];
    uint8_t quarters[MOST_BLOCKS]; /* of the naive loop's; 0: all of the block */
};

struct epoch_record {
    int n_prompt, n_out, n_lists, n_cached;
    int32_t prompt[MOST_PROMPT], out[MOST_OUT];
    float logprob[MOST_OUT];
    uint64_t row[MOST_OUT]; /* the newest logits behind each place */
    struct epoch_list list[MOST_LISTS];
    int n_chunks; /* of its prompt that got a list; those of cached ones are not made anew */
    struct epoch_list chunk[MOST_BLOCKS];
    struct engine_sparsity sparsity;
};

/* Requests of seeds FIRST_SEED + i leave what they did in records[i]; others are company. */
struct engine *epoch_open(const struct engine_options *o, struct epoch_record *records);
/* Request i: greedy, no end tokens, log-probabilities. Clears r. */
void epoch_request(int i, int n_prompt, int n_out, struct epoch_record *r,
                   struct engine_submit_options *s);
void epoch_end(struct epoch_record *r, const struct engine_progress *p);
void epoch_run(struct engine *g, const struct engine_submit_options *s, struct epoch_record *r);

/* What a run over n requests is made of: request i, and company whose answers nobody looks at, some
 * cancelled at once, the others when they have company_tokens. */
struct epoch_crowd {
    void (*fill)(int i, struct epoch_record *r, struct engine_submit_options *s);
    void (*company)(int i, int n, struct epoch_record *r, struct engine_submit_options *s);
    int company_tokens;
};
/* All of them, one after another or together with company; again: twice, the second time with hits.
 */
void epoch_run_all(const struct engine_options *o, const struct epoch_crowd *c, int n,
                   bool together, bool again, struct epoch_record *r);

/* Tokens, logits, every list; of the chunks' those that were made. */
void epoch_assert_same(const struct epoch_record *got, const struct epoch_record *want,
                       const char *what);

/* ---- A scorer's file ---- */

/* Random weights; the mlp goes by blocks' first tokens and brings a curve and smoothing. Free it
 * with target_scorer_free. */
struct target_scorer_file *epoch_scorer(bool mlp);
/* Written; the path is good until the next one. */
const char *epoch_scorer_file(const struct target_scorer_file *f);

/* ---- The naive loop ---- */

/* A model of its own, one row a pass, states noted one by one. */
struct epoch_loop {
    struct kern *k;
    struct model *m;
    void *arena;
    size_t page_bytes, plane_at;
    int32_t page[2][MOST_BLOCKS], all[MOST_BLOCKS];
    float mass[MOST_BLOCKS], score[MOST_BLOCKS], work[MOST_BLOCKS];
    float logits[TINY_VOCAB], state[64], *ring;
    void *scratch;
    const struct kern_scorer *scorer; /* of TARGET_SCORER */
    int n;                            /* positions so far */
    int n_prompt;
    float states[MOST_PROMPT + MOST_OUT][64], row_mass[MOST_BLOCKS], used[MOST_BLOCKS];
};

/* What the row at `position` pays in the select layer to the blocks list[n], raised into
 * mass[n]. */
void epoch_loop_look(struct epoch_loop *l, int position, const int32_t *list, int n, float *mass);

/* file: of the scorer, whose weights go to *loaded (close it before the loop); NULL: none. */
void epoch_loop_open(struct epoch_loop *l, struct target_scorer **loaded,
                     const struct target_scorer_file *file);
void epoch_loop_close(struct epoch_loop *l);

/* All lists of a request whose answer is known, chunks' too, and its logits. asked: over nothing;
 * file: what the scorer's file says, or NULL. */
void epoch_naive(struct epoch_loop *l, const struct target_settings *asked,
                 const struct target_scorer_defaults *file, uint64_t seed,
                 const struct epoch_record *got, struct epoch_record *want);

#endif
