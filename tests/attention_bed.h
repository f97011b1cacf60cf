#ifndef TANDEM_TESTS_ATTENTION_BED_H
#define TANDEM_TESTS_ATTENTION_BED_H

/* Attention over pages of the CPU backend, and its twin. The twin is written for clarity, in
 * double, on plain arrays of keys and values that never saw a page: positions it may see, softmax,
 * weighted sum. Kernels are held to |got - want| <= 2e-5 + 2e-5 |v|max in f32: scores sum up to 256
 * products of magnitude ~1 in f32 (error some 1e-6, which the softmax turns into a relative error
 * of the weights), sums of up to 1300 weights alike. The AMX kernel rounds Q, K, P and V to bf16
 * (2^-9 relative each), hence 3e-2 there.
 *
 * 8-bit pages: the twin reads the values that the law of kernels/cpu/attention_q8.h leaves of them
 * (made keys count as turned, queries are turned here), and for generated rows of a fast table the
 * query, too. Weights of values are then rounded to 2^-16 of a page's largest: at most 64 such
 * errors of |v| <= 1, as random as the values are, hence 3e-4.
 *
 * Pages: unlisted ones are made inaccessible, so a single touch ends the test; what lies behind a
 * sequence's end is NaN, so a single product with it shows. */

#include <xxhash.h>

#include "kernels/cpu/cpu.h"
#include "tests/harness.h"

enum { ABED_MAX_SEQS = 8, ABED_MAX_ROWS = 160, ABED_MAX_BLOCKS = 32, ABED_N_NAMES = 5 };
#define ABED_F32_TOLERANCE 4e-5

/* One sequence: context of `length` tokens of which the last n_rows are the pass's rows, at
 * positions length - n_rows .. length - 1. keep_every: of the blocks before the rows' own, every
 * n-th is listed. */
struct abed_seq {
    int length, n_rows;
    bool prompt;
    int keep_every;
    uint64_t salt; /* of its contents */
};

struct abed_shape {
    int n_heads, n_kv, head_dim;
    enum kern_dtype dtype;
};

struct abed {
    struct abed_shape s;
    int n_seqs, n_rows, capacity;
    uint8_t quarters[ABED_MAX_SEQS * ABED_MAX_BLOCKS]; /* by entry, where lists.quarters is set */
    struct abed_seq seq[ABED_MAX_SEQS];
    struct kern_batch b;
    struct kern_lists lists;
    struct kern_kv kv;
    int32_t position[ABED_MAX_ROWS], row_seq[ABED_MAX_ROWS], slot_page[ABED_MAX_ROWS];
    int32_t token[ABED_MAX_ROWS], seq_row[ABED_MAX_SEQS], seq_n_rows[ABED_MAX_SEQS];
    int32_t *page, *block, n_blocks[ABED_MAX_SEQS];
    uint8_t *arena;
    size_t arena_bytes;
    float *qkv, *out;
    bool fast; /* the table that ran last quantises queries where pages are of 8 bits */
};

/* Sequences of generated rows must come first. */
struct abed *abed_make(struct abed_shape s, const struct abed_seq *seqs, int n_seqs);
void abed_discard(struct abed *c);

/* Key and value element of a token, as its page holds it; element i of a plane is set to x. */
float abed_k_at(const struct abed *c, int s, int position, int head, int d);
float abed_v_at(const struct abed *c, int s, int position, int head, int d);
float abed_rounded(enum kern_dtype t, float x); /* not of 8 bits */
/* Whole groups of 32 dims by the orthonormal Hadamard matrix. */
void abed_turn(const double *x, int head_dim, double *out);
/* What a cache of type t keeps of a token's head (8 bits: of a key that is turned already). */
void abed_round_head(enum kern_dtype t, const float *x, int head_dim, float *out);
/* In [-1, 1), a mix of the arguments. */
float abed_value(uint64_t salt, int what, int position, int i);
size_t abed_element_bytes(enum kern_dtype t);
void abed_put(enum kern_dtype t, uint8_t *p, size_t i, float x);
/* A token's K or V into place t of an 8-bit plane; poison: NaN for all of it. */
void abed_put_q8(int head_dim, uint8_t *plane, bool is_v, int t, const float *x, bool poison);

/* Into c->out; checks that nothing behind the scratch is written, and packed rows. */
void abed_run(struct kern *k, struct abed *c, const struct kern_attn_taps *taps);

/* Output of one row and query head; share[block] (NULL: not) gets the attention mass by block,
 * abed_quarter_share[4 block + i] that of its quarters. */
extern double abed_quarter_share[ABED_MAX_BLOCKS * 4];
void abed_twin(const struct abed *c, int row, int head, const uint64_t *ancestors, double *o,
               double *share);
/* Every `step`-th (row, head) against the twin. */
void abed_check(const struct abed *c, const uint64_t *ancestors, double gen_tolerance,
                double prompt_tolerance, int step);

/* Backends by name; NULL: this machine has none of it. */
extern const char *const abed_names[ABED_N_NAMES];
struct kern *abed_open(const char *name, int n_threads);
double abed_prompt_tolerance(const char *name, enum kern_dtype t);
double abed_gen_tolerance(const char *name, enum kern_dtype t);

/* Of a row of c->out. */
XXH64_hash_t abed_row_hash(const struct abed *c, int row);

/* Some rows of a case's sequences as a pass of their own: hash[] gets every row's, in the parts'
 * order. What the other rows wrote stays in the pages, as if it came later. */
struct abed_part {
    int seq, first, n;
};
void abed_run_parts(struct kern *k, const struct abed *c, const struct abed_part *part, int n_parts,
                    XXH64_hash_t *hash);
/* One row, one result: the rows of the first sequence (at most ABED_LAST) in passes of `chunk` of
 * them, alone, behind two rows of the second sequence, and between a row of the third and two of
 * the second, have the hashes `want`. */
enum { ABED_LAST = TEST_SANITIZED ? 18 : 64 };
void abed_check_chunks(struct kern *k, const struct abed *c, int chunk, const XXH64_hash_t *want);

#endif
