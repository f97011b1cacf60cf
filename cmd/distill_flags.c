#include "cmd/distill_flags.h"

#include <string.h>

#include "cmd/options.h"
#include "target/scorer.h"

/* A table, a row an option. */
/* clang-format off */
#define MODEL(f)                                                                                   \
    {OPTION_GROUP, "What", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                                 \
    {OPTION_STRING, "model", "target", 'm', &(f)->engine.model_path, "PATH", 0, 0,                 \
     "the target: GGUF file or Hugging Face folder", NULL},                                        \
    {OPTION_STRING, "text", NULL, 'f', &(f)->text, "PATHS", 0, 0,                                  \
     "text files with commas between, one a domain (or as words)", NULL},                          \
    {OPTION_STRING, "out", "output", 'o', &(f)->out, "PATH", 0, 0, "the scorer (safetensors)",     \
     NULL},                                                                                        \
    {OPTION_STRING, "scorer", NULL, 0, &(f)->scorer, "KIND", 0, 0, "late or mlp", "late"},         \
    {OPTION_STRING, "layer", "select-layer", 0, &(f)->layer, "N,..", 0, 0,                         \
     "candidates for the select layer; auto: five from an eighth of the depth to a half",          \
     "auto"},                                                                                      \
    {OPTION_STRING, "chat-template", NULL, 0, &(f)->engine.chat_template, "NAME", 0, 0,            \
     "force a chat template", "the model's own"}
#define SAMPLES(f)                                                                                 \
    {OPTION_GROUP, "Samples", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                              \
    {OPTION_STRING, "label", NULL, 0, &(f)->label, "NAME", 0, 0,                                   \
     "attention to learn: last, deep, strongest or accumulated", "strongest"},                     \
    {OPTION_STRING, "representative", NULL, 0, &(f)->representative, "NAME", 0, 0,                 \
     "of a block for mlp: mean or first (token)", "mean"},                                         \
    {OPTION_INT, "window", NULL, 0, &(f)->window, "N", DISTILL_MIN_WINDOW, 262144,                 \
     "tokens of a text", "8192, or the context"},                                                  \
    {OPTION_INT, "windows", NULL, 0, &(f)->n_windows, "N", 4, 1000000,                             \
     "texts, every second a made prompt with facts inside", "300"},                                \
    {OPTION_INT, "places", NULL, 0, &(f)->n_places, "N", 1, TARGET_MAX_PLACES,                     \
     "prefixes of a running text that are looked at", "12"},                                       \
    {OPTION_INT, "questions", NULL, 0, &(f)->n_questions, "N", 1, TARGET_MAX_PLACES,               \
     "questions to a made prompt, at most", "24"},                                                 \
    {OPTION_FLAG, "inside", NULL, 0, &(f)->inside, NULL, 0, 0,                                     \
     "a third of them when the answer, or a text that goes on, has come to the value", "off"},     \
    {OPTION_STRING, "leave-out", NULL, 0, &(f)->leave_out, "NAME", 0, 0,                           \
     "train on nothing of this text, report on it", NULL},                                         \
    {OPTION_BYTES, "memory", NULL, 0, &(f)->memory, "SIZE", 0, 9e15, "most for samples",           \
     "half of the machine's"}
#define TRAINING(f)                                                                                \
    {OPTION_GROUP, "Training", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                             \
    {OPTION_DOUBLE, "aim", NULL, 0, &(f)->aim, "X", 0, 1,                                          \
     "of a made prompt's label, the share that is the asked fact's own blocks", "0.5"},            \
    {OPTION_STRING, "loss", NULL, 0, &(f)->loss, "NAME", 0, 0,                                     \
     "kl (late), bce, bce+rank or kl (mlp)", "kl, bce+rank"},                                      \
    {OPTION_INT, "steps", NULL, 0, &(f)->n_steps, "N", 1, 10000000, "steps", "500 late, 300 mlp"}, \
    {OPTION_INT, "batch", NULL, 0, &(f)->batch, "N", 1, 1024, "windows a step", "16"},             \
    {OPTION_DOUBLE, "learning-rate", NULL, 0, &(f)->learning_rate, "X", 0, 1, "its peak",          \
     "0.002 late, 0.001 mlp"},                                                                     \
    {OPTION_DOUBLE, "weight-decay", NULL, 0, &(f)->weight_decay, "X", 0, 10,                       \
     "of weights", "0.01"},                                                                        \
    {OPTION_INT, "queries", NULL, 0, &(f)->n_queries, "N", 1, KERN_STATE_QUERIES,                  \
     "newest states that ask", "32 late, 1 mlp"},                                                  \
    {OPTION_INT, "heads", NULL, 0, &(f)->n_heads, "N", 1, TARGET_SCORER_MAX_HEADS,                 \
     "of late", "4"},                                                                              \
    {OPTION_INT, "head-dim", NULL, 0, &(f)->head_dim, "N", 1, TARGET_SCORER_MAX_HEAD_DIM,          \
     "of late", "64"},                                                                             \
    {OPTION_INT, "width", NULL, 0, &(f)->width, "N", 1, TARGET_SCORER_MAX_WIDTH, "of mlp",         \
     "the model's"},                                                                               \
    {OPTION_FLAG, "layernorm", NULL, 0, &(f)->layernorm, NULL, 0, 0,                               \
     "of mlp's features (--no-layernorm)", "on"},                                                  \
    {OPTION_DOUBLE, "keep", NULL, 0, &(f)->keep, "X", 0.001, 1,                                    \
     "share of blocks that counts as the best (bce), and for the cost", "0.1"},                    \
    {OPTION_INT, "seed", NULL, 0, &(f)->seed, "N", 0, 2147483647, "of everything", "1"},           \
    {OPTION_DOUBLE, "budget", NULL, 0, &(f)->budget_minutes, "MINUTES", 0, 1e6,                    \
     "fewer windows and steps, so that it ends in time; 0: none", "0"},                            \
    {OPTION_STRING, "checkpoint", NULL, 0, &(f)->checkpoint, "PATH", 0, 0,                         \
     "keep windows here and trainings beside it", NULL},                                           \
    {OPTION_FLAG, "resume", NULL, 0, &(f)->resume, NULL, 0, 0, "go on from --checkpoint", NULL}
#define MACHINE(f)                                                                                 \
    {OPTION_GROUP, "Machine", NULL, 0, NULL, NULL, 0, 0, NULL, NULL},                              \
    {OPTION_INT, "threads", NULL, 't', &(f)->engine.n_threads, "N", 0, 256, "threads",             \
     "all cores that the process may use"},                                                        \
    {OPTION_STRING, "device", NULL, 0, &(f)->engine.device, "NAME", 0, 0,                          \
     "of tracing: cpu, cuda, cuda:N, or auto: a GPU where there is one", "auto"},                  \
    {OPTION_STRING, "cpu-precision", NULL, 0, &(f)->precision, "P", 0, 0,                          \
     "fast, or f32: the slow reference path", "fast"},                                             \
    {OPTION_FLAG, "json", NULL, 0, &(f)->json, NULL, 0, 0, "the report as JSON", NULL},            \
    {OPTION_FLAG, "quiet", NULL, 'q', &(f)->quiet, NULL, 0, 0, "errors alone on stderr", NULL}
/* clang-format on */

static int check(struct distill_flags *f, const struct options *o) {
    if (!f->engine.model_path) return options_error(o, "--model is needed");
    if (!f->out) return options_error(o, "--out is needed");
    if (!f->text && o->n_words == 0) return options_error(o, "a text is needed: --text FILE");
    if (f->resume && !f->checkpoint) return options_error(o, "--resume needs --checkpoint");
    if (!f->precision || !strcmp(f->precision, "fast")) return -1;
    if (strcmp(f->precision, "f32") != 0)
        return options_error(o, "--cpu-precision '%s': fast or f32", f->precision);
    f->engine.precision = KERN_REFERENCE;
    return -1;
}

int distill_flags_read(struct distill_flags *f, int argc, char **argv) {
    *f = (struct distill_flags){.scorer = "late",
                                .layer = "auto",
                                .label = "strongest",
                                .representative = "mean",
                                .n_windows = 300,
                                .n_places = 12,
                                .n_questions = 24,
                                .aim = 0.5,
                                .n_heads = 4,
                                .head_dim = 64,
                                .batch = 16,
                                .weight_decay = 0.01,
                                .keep = 0.1,
                                .seed = 1,
                                .layernorm = true};
    engine_options_default(&f->engine);
    f->engine.device = "auto";
    const struct option table[] = {MODEL(f), SAMPLES(f), TRAINING(f), MACHINE(f), {0}};
    struct options o = {.command = "distill",
                        .usage = "tandem distill -m MODEL -o SCORER [--text] FILE... [options]",
                        .about = "Train a scorer of blocks for a target's sparse reading, on what "
                                 "the dense target attends to in texts.",
                        .table = table,
                        .max_words = DISTILL_MAX_DOMAINS};
    int rc = options_parse(&o, argc, argv);
    if (rc >= 0) return rc;
    f->n_words = o.n_words;
    memcpy(f->words, o.words, (size_t)o.n_words * sizeof *f->words);
    return check(f, &o);
}
