#ifndef TANDEM_TESTS_ENGINE_HELPER_H
#define TANDEM_TESTS_ENGINE_HELPER_H

/* What the engine's tests share: an engine over the tiny model, requests with a short way to ask
 * for them, and a naive greedy loop to compare with. */

#include "engine/engine.h"
#include "tests/harness.h"
#include "tests/tiny_model.h"

/* Sanitizers make everything 10 to 30 times slower: fewer rounds of the same. */
enum { TINY_SLOW = TEST_SANITIZED };

/* Bytes of one block's pages in the default tiny model with 2-byte KV. */
enum { TINY_BLOCK_BYTES = 3 * 2 * 2 * 64 * 16 * 2 };

/* The tiny model's defaults and the options that most tests start from: 1 thread, 8 sequences, 64
 * rows a step, a pool of 64 blocks, no speculation (tests/test_speculation.c turns it on). */
void tiny_engine_options(struct engine_options *o);

/* Open over a fresh file of `t` (NULL: defaults), which is gone again when this returns. */
struct engine *tiny_engine_open(const struct engine_options *o, const struct tiny_options *t);

/* n ids of plain bytes and merges, a pure function of the seed; the first n of a longer call are
 * the same. */
void tiny_prompt(uint64_t seed, int32_t *ids, int n);

/* Greedy, max_tokens 16, seed 1. */
void tiny_submit_options(struct engine_submit_options *s, const int32_t *prompt, int n_prompt);

struct engine_request *tiny_submit(struct engine *g, const struct engine_submit_options *s);

/* Wait until it is finished (fails the test after a minute); returns the final state. */
struct engine_progress tiny_wait(const struct engine_request *r);

/* Wait until at least n tokens are there or it is finished. */
struct engine_progress tiny_wait_tokens(const struct engine_request *r, int n);

/* Submit, wait, copy the tokens to out[], release; returns their number. */
int tiny_run(struct engine *g, const struct engine_submit_options *s, int32_t *out,
             struct engine_progress *final);

/* The default target answers two of three questions at least: greedy, by its chat template, the
 * right word and an end of its own. */
void engine_assert_answers(struct engine *g);

/* Nothing runs, and of the pool nothing is used or reserved: all pages are free or cached. */
void tiny_assert_pool_whole(struct engine *g);

/* The first n_out tokens of the greedy continuation, by one-row passes that start from nothing for
 * each token, over pages in scrambled order and all layers in one group: none of the engine's code.
 */
void tiny_naive_greedy(const struct tiny_options *t, enum kern_precision precision,
                       const int32_t *prompt, int n_prompt, int32_t *out, int n_out);

/* What each of ids[n], of which n_prompt are a prompt, pays to each block: the most over heads and
 * layers from select_layer on, mass[n][n_blocks], by dense one-row passes of the same kind over
 * pages of two groups. t: of two KV heads of 16; up to 32 blocks. */
void tiny_naive_masses(const struct tiny_options *t, int select_layer, const int32_t *ids,
                       int n_prompt, int n, int n_blocks, float *mass);

#endif
