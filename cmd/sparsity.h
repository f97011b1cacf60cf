#ifndef TANDEM_CMD_SPARSITY_H
#define TANDEM_CMD_SPARSITY_H

/* Sparse reading on the command line: flags read from text, and what it did in a line for people.
 */

#include "base/strbuf.h"
#include "cmd/options.h"
#include "engine/engine.h"

/* As typed; NULL: not. The numbers stand in the settings themselves. */
struct sparsity_flags {
    const char *selector, *keep;
    struct target_settings s; /* what the flags fill */
};

/* Rows for an option table. */
/* clang-format off */
#define SPARSITY_FLAGS(f, otherwise)                                                               \
    {OPTION_GROUP, "Sparse reading", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                       \
    {OPTION_STRING, "sparse", NULL, 0, &(f)->selector, "NAME", 0, 0,                               \
     "deep layers read part of the context, chosen by: observed (attention of the prompt's end), " \
     "recent, random; all, off", otherwise},                                                       \
    {OPTION_STRING, "keep", NULL, 0, &(f)->keep, "X", 0, 0,                                        \
     "share of the blocks of 64 tokens that stay, or curve: all to 8K, a tenth at 32K", "curve"},  \
    {OPTION_INT, "keep-blocks", NULL, 0, &(f)->s.keep_blocks, "N", 0, TARGET_MOST_BLOCKS,          \
     "so many instead; 0: by --keep", "0"},                                                        \
    {OPTION_INT, "min-blocks", NULL, 0, &(f)->s.min_blocks, "N", 1, TARGET_MOST_BLOCKS,            \
     "never fewer: a shorter prompt is read densely", "32, or --keep-blocks if less"},             \
    {OPTION_INT, "window-blocks", NULL, 0, &(f)->s.window_blocks, "N", 1, TARGET_MOST_BLOCKS,      \
     "newest blocks that always stay (the first one does, too)", "3"},                             \
    {OPTION_DOUBLE, "reserve", NULL, 0, &(f)->s.reserve, "X", 0, 1,                                \
     "share of the blocks that stay by chance, on top", "0.01"}
/* clang-format on */

void sparsity_flags_init(struct sparsity_flags *f);
/* Fill f->s from what was typed. -1 to go on, else the exit code. */
int sparsity_flags_finish(struct sparsity_flags *f, const struct options *o);

/* ", 32 of 120 blocks read (observed)"; nothing where all was read. */
void sparsity_append_short(struct strbuf *out, const struct engine_sparsity *s);
/* Everything that is counted; nothing where it is off. */
void sparsity_append_long(struct strbuf *out, const struct engine_sparsity *s);

#endif
