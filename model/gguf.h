#ifndef TANDEM_MODEL_GGUF_H
#define TANDEM_MODEL_GGUF_H

/* GGUF v2 and v3 files, little endian, read as hostile bytes: every count, length, type, offset
 * and alignment is checked against the bytes that are there before it is used; nothing is allocated
 * from a number in the file alone. Source: the format page of the ggml project (docs/gguf.md). */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;
struct file;
struct gguf;

/* The types of metadata values, numbered as in the file. */
enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_N_TYPES
};

/* A string inside the file's bytes: not NUL-terminated, lives as long as the gguf. */
struct gguf_str {
    const char *data;
    size_t n;
};

struct gguf_tensor {
    struct gguf_str name;
    int ggml_type;       /* number as in the file */
    int n_dims;          /* 1..4 */
    uint64_t dims[4];    /* dims[0] is the contiguous one (columns); unused ones are 1 */
    const uint8_t *data; /* inside the mapping */
    size_t bytes;
};

/* Map and check the whole header of `path`. Errors name file, key or tensor, and value. */
int gguf_open(struct gguf **out, const char *path, struct err *e);

/* The same over bytes that the caller keeps alive (tests, fuzzing). */
int gguf_open_bytes(struct gguf **out, const uint8_t *data, size_t n, struct err *e);

/* The header alone: tensor data may be missing (the first megabytes of a download are enough to
 * plan with); `data` of a tensor that is not wholly there is NULL. */
int gguf_open_header(struct gguf **out, const char *path, struct err *e);

/* Safe on NULL. */
void gguf_close(struct gguf *g);

/* Bytes from the start to the end of the tensor list. */
size_t gguf_header_bytes(const struct gguf *g);

/* The mapping; zero after gguf_open_bytes. */
const struct file *gguf_file(const struct gguf *g);

bool gguf_has(const struct gguf *g, const char *key);

/* Value of `key`, converted from any integer (or float) type that holds it exactly. Missing key:
 * E_NOT_FOUND; wrong type or out of [lo, hi]: E_FORMAT; both with key and value in the text. */
int gguf_get_int(const struct gguf *g, const char *key, int64_t lo, int64_t hi, int64_t *out,
                 struct err *e);
int gguf_get_float(const struct gguf *g, const char *key, double lo, double hi, double *out,
                   struct err *e);
int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct err *e);
int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, struct err *e);

/* Arrays. gguf_array gives element type and count; gguf_array_str fills `out[0..n)` with strings
 * (checked once; n must be the array's count), gguf_array_data the raw little-endian elements of a
 * fixed-size type, which may lie unaligned: memcpy them. */
int gguf_array(const struct gguf *g, const char *key, enum gguf_type *type, size_t *n,
               struct err *e);
int gguf_array_str(const struct gguf *g, const char *key, struct gguf_str *out, size_t n,
                   struct err *e);
int gguf_array_data(const struct gguf *g, const char *key, enum gguf_type type, const void **data,
                    size_t *n, struct err *e);

size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t idx);
const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name);

/* For `tandem info`: print key idx as "key = value" into buf; false past the last one. */
bool gguf_describe(const struct gguf *g, size_t idx, char *buf, size_t n);

#endif
