#ifndef TANDEM_CMD_DISTILL_FLAGS_H
#define TANDEM_CMD_DISTILL_FLAGS_H

/* The command line of `tandem distill`, with the defaults of what was not typed; 0 and NULL where
 * those depend on the model or the kind of scorer. */

#include "cmd/distill.h"
#include "engine/engine.h"

struct distill_flags {
    struct engine_options engine;
    const char *text, *scorer, *layer, *label, *representative, *loss, *out, *checkpoint;
    const char *leave_out, *precision;
    const char *words[DISTILL_MAX_DOMAINS]; /* further texts, [n_words] */
    int n_words;
    int window, n_windows, n_places, n_questions, n_steps, n_queries, n_heads, head_dim, width,
        seed, batch;
    double learning_rate, weight_decay, keep, aim, budget_minutes;
    size_t memory; /* bytes */
    bool resume, layernorm, inside, json, quiet;
};

/* -1 to go on, else the exit code. */
int distill_flags_read(struct distill_flags *f, int argc, char **argv);

#endif
