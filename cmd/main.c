/* `tandem`: finds the subcommand, hands it the rest of the line. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "cmd/cmd.h"
#include "cmd/options.h"

#define TANDEM_VERSION "0.1.0"

static const struct command {
    const char *name;
    int (*fn)(int argc, char **argv);
    const char *about;
} commands[] = {
    {"serve", cmd_serve, "serve a model on a socket (MessagePack-RPC)"},
    {"chat", cmd_chat, "talk to a server in the terminal"},
    {"run", cmd_run, "answer one prompt in this process"},
    {"bench", cmd_bench, "time prompt, decode and batches of a model"},
    {"distill", cmd_distill, "train a scorer of blocks for sparse reading"},
    {"eval", cmd_eval, "measure what sparse reading costs in quality"},
    {"plan", cmd_plan, "say what a model (and draft) needs and what fits, from headers alone"},
    {"info", cmd_info, "show what is in a model file"},
    {"tokenize", cmd_tokenize, "show the tokens of a text"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static int help(FILE *to) {
    fprintf(to, "Usage: tandem COMMAND [options]\n\n"
                "A small serving engine for language models, on CPUs and on one NVIDIA GPU, with\n"
                "speculation and sparse reading of long contexts.\n\nCommands:\n");
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].about);
    fprintf(to, "\n'tandem COMMAND --help' tells the rest. Data goes to stdout, talk to stderr.\n");
    return to == stdout ? 0 : 2;
}

int cmd_fail(const struct err *e) {
    log_error("%s", e->message[0] ? e->message : err_text(e->code));
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 2) return help(stderr);
    const char *word = argv[1];
    if (!strcmp(word, "--help") || !strcmp(word, "-h") || !strcmp(word, "help"))
        return help(stdout);
    if (!strcmp(word, "--version")) {
        printf("tandem %s\n", TANDEM_VERSION);
        return 0;
    }
    const char *names[N_COMMANDS];
    for (int i = 0; i < N_COMMANDS; i++) {
        names[i] = commands[i].name;
        if (!strcmp(word, names[i])) return commands[i].fn(argc - 2, argv + 2);
    }
    const char *near = options_nearest(word, names, N_COMMANDS);
    if (near) fprintf(stderr, "tandem: no command '%s'; did you mean '%s'?\n", word, near);
    else fprintf(stderr, "tandem: no command '%s'; see 'tandem --help'\n", word);
    return 2;
}
