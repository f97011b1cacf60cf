#ifndef TANDEM_MODEL_GGUF_PRIVATE_H
#define TANDEM_MODEL_GGUF_PRIVATE_H

/* What gguf.c (reads and checks the header) and gguf_values.c (answers questions) share. */

#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "model/gguf.h"

/* One metadata value, still in the file's bytes. */
struct gguf__pair {
    struct gguf_str key;
    enum gguf_type type;
    enum gguf_type elem; /* of an array */
    uint64_t n;          /* elements of an array, bytes of a string, else 1 */
    const uint8_t *data; /* first byte of the value, behind its length */
};

struct gguf {
    struct file file; /* zero where the caller owns the bytes */
    struct gguf__pair *pairs;
    uint32_t *pair_order; /* sorted by key */
    size_t n_pairs;
    struct gguf_tensor *tensors;
    uint32_t *tensor_order; /* sorted by name */
    size_t n_tensors;
    size_t header_bytes; /* up to the end of the tensor list */
};

extern const char *const gguf__type_names[GGUF_N_TYPES];
extern const uint8_t gguf__type_bytes[GGUF_N_TYPES]; /* 0: no fixed size */

/* For messages: a prefix of a string from the file, as printf's %.*s wants it. */
static inline int gguf__shown(struct gguf_str s) {
    return s.n < 80 ? (int)s.n : 80;
}
#define SHOW(s) gguf__shown(s), (s).data

static inline uint64_t gguf__little(const uint8_t *p, size_t n) {
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

/* The order of both indexes. */
static inline int gguf__compare(struct gguf_str a, struct gguf_str b) {
    int c = memcmp(a.data, b.data, min_size(a.n, b.n));
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

#endif
