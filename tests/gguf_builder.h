#ifndef TANDEM_TESTS_GGUF_BUILDER_H
#define TANDEM_TESTS_GGUF_BUILDER_H

/* Tiny GGUF files made in memory. Pieces are appended in the file's order; counts and offsets are
 * the caller's, so that a test can lie about any of them. */

#include <stdint.h>
#include <string.h>

#include "base/strbuf.h"
#include "model/gguf.h"

static inline void put_little(struct strbuf *b, uint64_t v, int n) {
    for (int i = 0; i < n; i++) strbuf_append_char(b, (char)(v >> 8 * i));
}

static inline void put_str(struct strbuf *b, const char *s) {
    put_little(b, strlen(s), 8);
    strbuf_append_str(b, s);
}

static inline void put_header(struct strbuf *b, uint32_t version, uint64_t n_tensors,
                              uint64_t n_keys) {
    strbuf_append(b, "GGUF", 4);
    put_little(b, version, 4);
    put_little(b, n_tensors, 8);
    put_little(b, n_keys, 8);
}

static inline void put_key(struct strbuf *b, const char *key, uint32_t type) {
    put_str(b, key);
    put_little(b, type, 4);
}

static inline void put_key_u32(struct strbuf *b, const char *key, uint32_t v) {
    put_key(b, key, GGUF_U32);
    put_little(b, v, 4);
}

static inline void put_key_f32(struct strbuf *b, const char *key, float v) {
    put_key(b, key, GGUF_F32);
    strbuf_append(b, &v, 4);
}

static inline void put_key_str(struct strbuf *b, const char *key, const char *v) {
    put_key(b, key, GGUF_STRING);
    put_str(b, v);
}

static inline void put_array(struct strbuf *b, const char *key, uint32_t elem, uint64_t n) {
    put_key(b, key, GGUF_ARRAY);
    put_little(b, elem, 4);
    put_little(b, n, 8);
}

static inline void put_tensor(struct strbuf *b, const char *name, uint32_t n_dims,
                              const uint64_t *dims, uint32_t type, uint64_t offset) {
    put_str(b, name);
    put_little(b, n_dims, 4);
    for (uint32_t i = 0; i < n_dims; i++) put_little(b, dims[i], 8);
    put_little(b, type, 4);
    put_little(b, offset, 8);
}

static inline void put_zeros(struct strbuf *b, size_t n) {
    while (n--) strbuf_append_char(b, 0);
}

static inline void put_padding(struct strbuf *b, size_t align) {
    while (b->n % align) strbuf_append_char(b, 0);
}

#endif
