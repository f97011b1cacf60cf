#ifndef TANDEM_CMD_ENGINE_FLAGS_H
#define TANDEM_CMD_ENGINE_FLAGS_H

/* The options that every subcommand with an engine shares: rows for its option table. */

#include "cmd/options.h"
#include "cmd/sparsity.h"
#include "engine/engine.h"

struct engine_flags {
    struct engine_options o;               /* what the flags fill */
    const char *precision;                 /* "fast", "f32" */
    const char *load_format;               /* "auto", "dummy" */
    const char *draft_tokens, *coupling;   /* as typed, NULL: not */
    enum verify_coupling default_coupling; /* of requests that name none */
    struct sparsity_flags sparsity;
    bool quiet;
};

/* A table, a row an option. */
/* clang-format off */
#define KV_TYPE_FLAG(out)                                                                          \
    {OPTION_STRING, "kv-type", "cache-type cache-type-k cache-type-v kv-cache-dtype -ctk -ctv", 0, \
     out, "T", 0, 0, "of keys and values alike: f16, bf16, or q8_0, half the bytes (CPU)", "f16"}
#define ENGINE_FLAGS(f)                                                                            \
    {OPTION_GROUP, "Model", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                                \
    {OPTION_STRING, "model", "target", 'm', &(f)->o.model_path, "PATH", 0, 0,                      \
     "GGUF file or Hugging Face folder", NULL},                                                    \
    {OPTION_STRING, "chat-template", NULL, 0, &(f)->o.chat_template, "NAME", 0, 0,                 \
     "force a chat template (chatml, llama3, ...)", "the model's own"},                            \
    {OPTION_STRING, "load-format", NULL, 0, &(f)->load_format, "FORMAT", 0, 0,                     \
     "auto, or dummy: random weights of these shapes, for speed; a config.json will do", "auto"},  \
    {OPTION_STRING, "dummy-type", NULL, 0, &(f)->o.dummy_type, "T", 0, 0,                          \
     "with --load-format dummy: type of the matrices, as BF16, Q8_0, Q4_K", "the model's"},        \
    {OPTION_GROUP, "Speculation", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                          \
    {OPTION_STRING, "draft", "model-draft spec-draft-model speculative-model -md", 0,              \
     &(f)->o.draft_path, "PATH", 0, 0,                                                             \
     "small model of the same vocabulary that proposes tokens", "none"},                           \
    {OPTION_STRING, "draft-tokens", "num-speculative-tokens", 0, &(f)->draft_tokens, "N", 0, 0,    \
     "draft tokens a round: auto (what gives most tokens/s), 0 (off), or N up to 16", "auto"},     \
    {OPTION_INT, "max-draft-tokens", "draft-max draft-n spec-draft-n-max", 0,                      \
     &(f)->o.max_draft_tokens, "N", 1, KERN_MAX_DRAFT,                                             \
     "most of a round, what memory is reserved for", "8"},                                         \
    {OPTION_INT, "draft-window", NULL, 0, &(f)->o.draft_window, "N", 0, MODEL_MAX_CONTEXT,         \
     "the draft sees the first 64 tokens and the newest of N (a multiple of 64); 0: all", "0"},    \
    {OPTION_FLAG, "lookup", NULL, 0, &(f)->o.lookup, NULL, 0, 0,                                   \
     "propose what followed the newest tokens earlier in prompt or answer (--no-lookup)", "on"},   \
    {OPTION_STRING, "coupling", NULL, 0, &(f)->coupling, "NAME", 0, 0,                             \
     "where chance decides: lossless keeps its law, gumbel the very text of a seed", "lossless"},  \
    SPARSITY_FLAGS(&(f)->sparsity, "Sparse reading", "off"),                                       \
    {OPTION_STRING, "scorer", NULL, 0, &(f)->o.scorer_path, "FILE", 0, 0,                          \
     "trained scorer of blocks for this model (tandem distill): --sparse scorer", "none"},         \
    {OPTION_INT, "select-layer", NULL, 0, &(f)->o.select_layer, "N", 0, 1024,                      \
     "first of the deep layers", "the scorer's, else 3/16 of all"},                                \
    {OPTION_GROUP, "Machine", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                              \
    {OPTION_INT, "threads", NULL, 't', &(f)->o.n_threads, "N", 0, 256, "threads of a step",        \
     "all cores that the process may use"},                                                        \
    {OPTION_STRING, "device", NULL, 0, &(f)->o.device, "NAME", 0, 0,                             \
     "cpu, cuda, cuda:N, or auto: a GPU where there is one", "auto"},                \
    {OPTION_STRING, "cpu-precision", NULL, 0, &(f)->precision, "P", 0, 0,                          \
     "fast, or f32: the slow reference path", "fast"},                                             \
    {OPTION_STRING, "cpu-isa", NULL, 0, &(f)->o.isa, "NAME", 0, 0,                                 \
     "amx, avx512, avxvnni, avx2 or plain", "the best that runs here"},                            \
    {OPTION_GROUP, "Memory and batches", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                   \
    {OPTION_BYTES, "kv-memory", "kv-cache-memory-bytes", 0, &(f)->o.kv_memory_bytes, "SIZE", 0,    \
     9e15, "bytes of the KV pool, as 512M or 2GiB", "what is free"},                               \
    KV_TYPE_FLAG(&(f)->o.kv_type),                                                                 \
    {OPTION_INT, "ctx-size", "max-model-len", 'c', &(f)->o.context, "N", 0, MODEL_MAX_CONTEXT,     \
     "most tokens of a sequence", "the model's"},                                                  \
    {OPTION_INT, "max-num-seqs", "parallel", 0, &(f)->o.max_seqs, "N", 1, ENGINE_MAX_SEQS,         \
     "sequences that run at once", "32"},                                                          \
    {OPTION_INT, "max-queue", NULL, 0, &(f)->o.max_queue, "N", 0, 100000,                          \
     "requests that wait for room; more are refused", "256"},                                      \
    {OPTION_INT, "max-num-batched-tokens", "batch-size", 'b', &(f)->o.max_rows, "N", 16,           \
     KERN_MAX_ROWS, "rows of a step", "512"},                                                      \
    {OPTION_DOUBLE, "prefill-share", NULL, 0, &(f)->o.prefill_share, "X", 0.05, 0.95,              \
     "share of a step's time that prompts may take while others decode", "0.5"},                   \
    {OPTION_FLAG, "prefix-cache", "enable-prefix-caching", 0, &(f)->o.prefix_cache, NULL, 0, 0,    \
     "keep finished pages for later prompts (--no-prefix-cache)", "on"},                           \
    {OPTION_FLAG, "quiet", NULL, 'q', &(f)->quiet, NULL, 0, 0, "errors alone on stderr", NULL}
/* clang-format on */

void engine_flags_init(struct engine_flags *f);

/* Checks what the table cannot and sets the log level. -1 to go on, else the exit code. */
int engine_flags_finish(struct engine_flags *f, const struct options *o);

#endif
