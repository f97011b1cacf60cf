#ifndef TANDEM_CMD_CHAT_REPORT_H
#define TANDEM_CMD_CHAT_REPORT_H

/* What `tandem chat` says of a server and of its answers, in lines for people. The server may be
 * anybody's: its numbers may be any, and of its words nothing gets through that could command a
 * terminal. Nothing is appended where there is nothing to say. */

#include "base/strbuf.h"
#include "serve/client.h"

/* Its name and context, from what `hello` told. */
void chat_report_greeting(struct strbuf *out, const msgpack_object *hello);

/* One line on an answer: tokens, speed, why it ended. */
void chat_report_done(struct strbuf *out, const struct client_done *d);
/* Everything that was counted. */
void chat_report_speculation(struct strbuf *out, const struct client_done *d);
void chat_report_sparsity(struct strbuf *out, const struct client_done *d);

/* Lines on the result of `stats`. */
void chat_report_stats(struct strbuf *out, const msgpack_object *stats);

#endif
