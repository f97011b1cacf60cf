#ifndef TANDEM_CMD_SPARSITY_H
#define TANDEM_CMD_SPARSITY_H

/* Sparse reading on the command line: flags read from text, and what it did in a line for people.
 */

#include "base/strbuf.h"
#include "cmd/options.h"
#include "engine/engine.h"

/* As typed; NULL: not. The numbers stand in the settings themselves. */
struct sparsity_flags {
    const char *selector, *keep, *threshold, *reselect, *reselector, *recheck, *exact, *lists;
    int sparse_prefill; /* 1, 0 taken back, -1 not typed */
    struct target_settings s; /* what the flags fill */
};

/* Rows for an option table. */
/* clang-format off */
#define SPARSITY_FLAGS(f, title, otherwise)                                                        \
    {OPTION_GROUP, title, NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                                  \
    {OPTION_STRING, "sparse", NULL, 0, &(f)->selector, "NAME", 0, 0,                               \
     "deep layers read part of the context, chosen by: observed (attention of the prompt's end), " \
     "scorer (--scorer), mean, minmax, bound (of states), recent, random; all, off", otherwise},   \
    {OPTION_STRING, "keep", NULL, 0, &(f)->keep, "X", 0, 0,                                        \
     "share of the blocks of 64 tokens that stay, or curve: the scorer's, else all to 8K, a "      \
     "tenth at 32K; or points, as 8192:1,16384:.15", "curve"},                                     \
    {OPTION_INT, "keep-blocks", NULL, 0, &(f)->s.keep_blocks, "N", 0, TARGET_MOST_BLOCKS,          \
     "so many instead; 0: by --keep", "0"},                                                        \
    {OPTION_INT, "min-blocks", NULL, 0, &(f)->s.min_blocks, "N", 1, TARGET_MOST_BLOCKS,            \
     "never fewer: a shorter prompt is read densely", "32, or --keep-blocks if less"},             \
    {OPTION_INT, "window-blocks", NULL, 0, &(f)->s.window_blocks, "N", 1, TARGET_MOST_BLOCKS,      \
     "newest blocks that always stay (the first one does, too)", "3"},                             \
    {OPTION_DOUBLE, "reserve", NULL, 0, &(f)->s.reserve, "X", 0, 1,                                \
     "share of the blocks that stay by chance, on top", "0.01"},                                   \
    {OPTION_STRING, "keep-threshold", NULL, 0, &(f)->threshold, "X", 0, 0,                         \
     "blocks that score less go, down to --min-blocks", "off"},                                    \
    {OPTION_DOUBLE, "smooth", NULL, 0, &(f)->s.smooth, "X", 0, 1,                                  \
     "so much of its neighbours' mean is added to a block's score", "0, or the scorer's"},         \
    {OPTION_STRING, "reselect", NULL, 0, &(f)->reselect, "WHEN", 0, 0,                             \
     "select anew inside an answer: off, every N tokens, step (each one), surprise", "off"},       \
    {OPTION_STRING, "reselector", NULL, 0, &(f)->reselector, "NAME", 0, 0,                         \
     "who selects then: scorer, mean, minmax, bound, recent, random",                              \
     "as --sparse; for observed the scorer"},                                                      \
    {OPTION_DOUBLE, "surprise", NULL, 0, &(f)->s.surprise, "NATS", 0, 100,                         \
     "--reselect surprise: rise of the mean surprise of 16 tokens", "0.5"},                        \
    {OPTION_STRING, "recheck", NULL, 0, &(f)->recheck, "WHICH", 0, 0,                              \
     "border: which of the blocks of ranks k/2 to 2k stay, true attention in the select layer "    \
     "says; off", "off"},                                                                          \
    {OPTION_BELOW, "drop", NULL, 0, &(f)->s.drop, "X", 0, 1,                                       \
     "--reselect: share of a list that the next one leaves out, those that were used least", "0"}, \
    {OPTION_STRING, "exact", NULL, 0, &(f)->exact, "N", 0, 0,                                      \
     "the dense answer: sparse reading proposes up to N tokens (1..16, on: 16), then a dense pass "\
     "verifies them; off", "off"},                                                                 \
    {OPTION_SWITCH, "sparse-prefill", NULL, 0, &(f)->sparse_prefill, NULL, 0, 0,                   \
     "the prompt, too: chunks behind a dense start read what --reselector keeps "                  \
     "(--no-sparse-prefill takes it back)", "no"},                                                 \
    {OPTION_INT, "prefill-dense", NULL, 0, &(f)->s.prefill_dense, "N", 0, TARGET_MOST_BLOCKS,      \
     "--sparse-prefill: tokens of the dense start, at least --min-blocks blocks", "2048"},         \
    {OPTION_INT, "prefill-chunk", NULL, 0, &(f)->s.prefill_chunk, "N", TARGET_BLOCK,               \
     TARGET_MOST_BLOCKS, "tokens that share a list, a multiple of 64", "512"},                     \
    {OPTION_STRING, "lists", NULL, 0, &(f)->lists, "NAME", 0, 0,                                   \
     "of --sparse observed: one list of blocks for all deep layers, a list by layer, by KV head",  \
     "one"},                                                                                       \
    {OPTION_INT, "select2", NULL, 0, &(f)->s.select2, "N", 0, TARGET_MOST_BLOCKS,                  \
     "deep layers from the N-th on have a list of their own; 0: none", "0"},                       \
    {OPTION_INT, "quarters", NULL, 0, &(f)->s.quarters, "N", 1, TARGET_QUARTERS,                   \
     "of a block that stays, only its N best quarters of 16 tokens are read", "4: all of it"}
/* clang-format on */

void sparsity_flags_init(struct sparsity_flags *f);
/* Fill f->s from what was typed. -1 to go on, else the exit code. */
int sparsity_flags_finish(struct sparsity_flags *f, const struct options *o);

/* "6 dense passes verified 80 provisional tokens and accepted 66, 12.0 tokens a pass"; nothing
 * where none did. */
void sparsity_append_exact(struct strbuf *out, const struct engine_exact *x);
/* ", 32 of 120 blocks read (observed)"; nothing where all was read. */
void sparsity_append_short(struct strbuf *out, const struct engine_sparsity *s);
/* Everything that is counted; nothing where it is off. */
void sparsity_append_long(struct strbuf *out, const struct engine_sparsity *s);

#endif
