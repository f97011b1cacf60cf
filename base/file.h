#ifndef TANDEM_BASE_FILE_H
#define TANDEM_BASE_FILE_H

/* A whole file as read-only bytes. Mapped privately, so that weights cost no memory twice while
 * they are repacked; the size is taken once and held against later growth. A file that shrinks
 * while mapped would raise SIGBUS, so the mapping of weights is short-lived: load, repack, close.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;

struct file {
    const uint8_t *data; /* NULL where bytes == 0 */
    size_t bytes;
    int mapped; /* internal: 1 mmap, 0 heap */
};

/* Map `path`. Refuses what is no regular file and what is larger than `limit_bytes` (0: none).
 * E_NOT_FOUND, E_IO, E_TOO_LONG, with the path in the message. */
int file_open(struct file *f, const char *path, size_t limit_bytes, struct err *e);

/* Read `path` into the heap (for small text files). Same errors. */
int file_read(struct file *f, const char *path, size_t limit_bytes, struct err *e);

/* Could a file be written here? For results that take hours: asked before, not found out behind
 * them. Creates nothing. E_NOT_FOUND (its folder is not there), E_IO. */
int file_check_writable(const char *path, struct err *e);

/* Do both paths name one file, there or yet to be made? */
bool file_is_same(const char *a, const char *b);

/* Safe on a zeroed struct, and twice. */
void file_close(struct file *f);

#endif
