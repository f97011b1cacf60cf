#ifndef TANDEM_TESTS_POOL_MODEL_H
#define TANDEM_TESTS_POOL_MODEL_H

/* A naive model of the pool, for the tests that apply random operations.
 *
 * The model simulates what the pages hold: writing position i of a sequence stores, in the page
 * that the pool named, a hash of (salt, class, tokens[0..i]) and the law by which it was computed,
 * and claims every 1,024-byte unit of the page. A sequence is right when each of its positions
 * reads back the hash of its own tokens from units that are still its page's. A page handed out
 * twice, shared under a false prefix, overlapping another or overwritten while cached shows up as a
 * wrong hash; an answer's page in a foreign conversation as a wrong law.
 *
 * What a hit must be is predicted by brute force: every cached block is compared by its tokens, and
 * every pair (target blocks, draft blocks) is tried against counts made from the page tables. */

#include <stdbool.h>
#include <stdint.h>

#include "kvpool/kvpool.h"

enum {
    MODEL_SEQS = 8,
    MODEL_BLOCKS = 16,
    MODEL_TOKENS = MODEL_BLOCKS * KVPOOL_BLOCK,
    MODEL_UNITS = 4096,
    MODEL_HISTORY = 32
};

struct model_seq {
    bool open, draft, windowed;
    uint64_t salt, conversation;
    uint64_t law; /* of its generated positions: the conversation, or a number nobody else has */
    int n_prompt; /* tokens */
    int most;     /* draft pages at once */
    int end[3];   /* blocks at most */
    int limit[3]; /* pages held + reserved */
    int n[3];     /* addressable */
    bool hole[MODEL_BLOCKS];
    int committed;
    int n_known; /* positions whose law is fixed */
    int32_t tokens[MODEL_TOKENS];
    uint64_t hash[MODEL_TOKENS]; /* of tokens[0..i] and salt */
    uint64_t law_at[MODEL_TOKENS];
};

struct model {
    struct kvpool *p;
    struct kvpool_options o;
    struct kvpool_geometry g;
    struct model_seq s[MODEL_SEQS];
    struct {
        uint64_t hash, law;
    } content[MODEL_UNITS][KVPOOL_BLOCK]; /* by page id */
    int32_t owner[MODEL_UNITS];           /* page id * 4 + class of the last writer */
    /* Texts of closed sequences: a next turn starts with one of them. */
    struct {
        int n;
        uint64_t salt, conversation;
        int32_t tokens[MODEL_TOKENS];
    } history[MODEL_HISTORY];
    int n_history, last_history;
    uint64_t seed, counter, n_laws;
    long n_ops, n_full, n_hits, n_generated_hits, n_partial_draft_hits, n_holed_hits, n_copies;
};

/* Open a pool of these options in m, which is cleared; hash_mask 0: all bits count. */
void model_open(struct model *m, const struct kvpool_options *o, uint64_t seed, uint64_t hash_mask);

/* Close what is open, see that everything came back, close the pool. */
void model_close(struct model *m);

int model_draw(struct model *m, int below);
bool model_uses(const struct model *m, const struct model_seq *s, int c);

/* New text from `from` on, made of few patterns, so that prefixes are shared by chance. */
void model_text(struct model *m, struct model_seq *s, int from);

/* Try to admit a random sequence; window: draw a bound of the draft's pages too. */
void model_admit(struct model *m, bool window);

/* Write positions n[c]..to-1 of class c, extending it; `to` is within the reservation. */
void model_write(struct model *m, int i, int c, int to);

/* Roll class c back. */
void model_truncate(struct model *m, int i, int c, int to);

void model_forget(struct model *m, int i, int first, int end);
void model_drop_draft(struct model *m, int i);
void model_register(struct model *m, int i, enum kvpool_origin origin, int n);

/* The text up to `committed` joins the history. */
void model_end(struct model *m, int i);

/* Tokens that class c can be extended to. */
int model_limit(const struct model *m, int i, int c);

/* Least length over the target's classes. */
int model_least(const struct model *m, const struct model_seq *s);

void model_verify_seq(const struct model *m, int i);

/* Every sequence, and every count of the statistics. */
void model_verify(const struct model *m);

#endif
