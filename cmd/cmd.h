#ifndef TANDEM_CMD_H
#define TANDEM_CMD_H

/* The subcommands of `tandem`. Each takes the words behind its name and returns the exit code: 0
 * done, 1 the world said no, 2 the command line was wrong. */

#include <stddef.h>

#include "base/err.h"
#include "engine/engine.h"

int cmd_serve(int argc, char **argv);
int cmd_chat(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_distill(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);

/* Print "error: <message>" to stderr, return 1. */
int cmd_fail(const struct err *e);

/* An error of opening or planning about a file that is not there: say which option named it. rc as
 * it was. */
int cmd_name_option(const struct engine_options *o, int rc, struct err *e);

/* engine_open with a progress bar, the start-up lines (model, device, memory table, pool) on
 * stderr. */
int cmd_open_engine(struct engine **out, const struct engine_options *o, struct err *e);

#endif
