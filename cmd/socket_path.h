#ifndef TANDEM_CMD_SOCKET_PATH_H
#define TANDEM_CMD_SOCKET_PATH_H

/* Where `serve` and `chat` meet when nobody says otherwise. */

#include <stddef.h>

struct err;

/* $XDG_RUNTIME_DIR/tandem.sock, else /tmp/tandem-<uid>.sock. */
void socket_path_default(char *out, size_t n);

/* In /tmp anybody can make that name: refuse one that is not this user's or root's. E_AUTH. A
 * missing file is no error here. */
int socket_path_check_owner(const char *path, struct err *e);

/* "HOST:PORT", "[::1]:PORT" or ":PORT" (127.0.0.1) taken apart; host into host[n]. E_INVALID. */
int socket_path_split(const char *text, char *host, size_t n, int *port, struct err *e);

#endif
