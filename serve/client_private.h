#ifndef TANDEM_SERVE_CLIENT_PRIVATE_H
#define TANDEM_SERVE_CLIENT_PRIVATE_H

/* What client.c and client_messages.c share: reading what the server's messages say. Values that
 * are missing, or of another type, change nothing. */

#include "serve/client.h"

/* A number of a map (NULL allowed). */
void client__take_real(const msgpack_object *map, const char *key, double *out);

/* The map of a `done`. */
void client__take_done(struct client_done *d, const msgpack_object *map);

/* The map of a `token` as pieces: one, or a run of each kind where it tells its draft tokens. Text
 * behind the last token's (the end released it) belongs to that one. E_PROTOCOL where its arrays do
 * not fit each other or the text. */
int client__give_pieces(const msgpack_object *map, client_tokens_fn *on_tokens, void *arg,
                        struct err *e);

#endif
