#ifndef TANDEM_CMD_TEXT_H
#define TANDEM_CMD_TEXT_H

/* Small things that several subcommands need. */

#include "base/strbuf.h"
#include "model/model.h"

struct err;

/* The text a person gave: `word` where it is not NULL ("-" is stdin), else the file, else stdin
 * when it is no terminal. E_INVALID where there is none; at most 64 MiB. */
int cmd_text(struct strbuf *out, const char *word, const char *file, struct err *e);

/* The tokenizer of a model path, without its weights. */
int cmd_open_tokenizer(struct tokenizer **out, const char *model_path, struct err *e);

/* "1.50 GiB". Static buffers, four in turn. */
const char *cmd_bytes(double bytes);

#endif
