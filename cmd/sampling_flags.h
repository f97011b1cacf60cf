#ifndef TANDEM_CMD_SAMPLING_FLAGS_H
#define TANDEM_CMD_SAMPLING_FLAGS_H

/* Sampling options, for run and chat. */

#include "cmd/options.h"
#include "verify/verify.h"

struct sampling_flags {
    struct verify_params params; /* what the flags fill */
    const char *seed, *stop;     /* text as typed */
    const char *draft_tokens, *coupling;
};

/* A table, a row an option. */
/* clang-format off */
#define SAMPLING_FLAGS(s)                                                                          \
    {OPTION_GROUP, "Sampling", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                             \
    {OPTION_INT, "max-tokens", "n-predict", 'n', &(s)->params.max_tokens, "N", -1,                 \
     MODEL_MAX_CONTEXT, "most tokens of the answer; -1: as many as fit, up to 1024", "-1"},        \
    {OPTION_DOUBLE, "temperature", "temp", 0, &(s)->params.temperature, "T", 0, 100,               \
     "0: always the likeliest token", "0.8"},                                                      \
    {OPTION_INT, "top-k", NULL, 0, &(s)->params.top_k, "K", 0, 1 << 30, "0: off", "0"},            \
    {OPTION_DOUBLE, "top-p", NULL, 0, &(s)->params.top_p, "P", 1e-9, 1, "1: off", "1"},            \
    {OPTION_DOUBLE, "min-p", NULL, 0, &(s)->params.min_p, "P", 0, 1, "0: off", "0"},               \
    {OPTION_DOUBLE, "repetition-penalty", "repeat-penalty", 0, &(s)->params.repetition_penalty,    \
     "X", 0.01, 100, "1: off", "1"},                                                               \
    {OPTION_DOUBLE, "presence-penalty", NULL, 0, &(s)->params.presence_penalty, "X", -2, 2,        \
     "0: off", "0"},                                                                               \
    {OPTION_DOUBLE, "frequency-penalty", NULL, 0, &(s)->params.frequency_penalty, "X", -2, 2,      \
     "0: off", "0"},                                                                               \
    {OPTION_STRING, "seed", NULL, 's', &(s)->seed, "N", 0, 0,                                      \
     "one seed gives one text (with a draft: under --coupling gumbel)", "random"},                 \
    {OPTION_STRING, "stop", NULL, 0, &(s)->stop, "TEXT", 0, 0, "end the answer before this text",  \
     NULL},                                                                                        \
    {OPTION_FLAG, "ignore-eos", NULL, 0, &(s)->params.ignore_eos, NULL, 0, 0,                      \
     "go on past end tokens", NULL}
/* clang-format on */

/* What a request may say of speculation, for chat: run has the engine's flags for it. */
/* clang-format off */
#define REQUEST_SPECULATION_FLAGS(s)                                                               \
    {OPTION_GROUP, "Speculation", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                          \
    {OPTION_STRING, "draft-tokens", "num-speculative-tokens", 0, &(s)->draft_tokens, "N", 0, 0,    \
     "draft tokens a round: auto, 0 (off), or N up to 16", "the server's"},                        \
    {OPTION_FLAG, "lookup", NULL, 0, &(s)->params.lookup, NULL, 0, 0,                              \
     "propose what followed the newest tokens earlier in prompt or answer (--no-lookup)", "on"},   \
    {OPTION_STRING, "coupling", NULL, 0, &(s)->coupling, "NAME", 0, 0,                             \
     "where chance decides: lossless keeps its law, gumbel the very text of a seed",               \
     "the server's"}
/* clang-format on */

void sampling_flags_init(struct sampling_flags *s);
int sampling_flags_finish(struct sampling_flags *s, const struct options *o);

#endif
