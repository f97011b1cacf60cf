#ifndef TANDEM_MODEL_SAFETENSORS_H
#define TANDEM_MODEL_SAFETENSORS_H

/* Weights in safetensors files: one file, or a folder with model.safetensors or with shards that
 * model.safetensors.index.json names. Read as hostile bytes: the header's length, every offset,
 * shape and type is held against the file; tensors must fill the data without overlap or hole.
 * Source: the format section of the safetensors project's README. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

struct err;
struct file;
struct safetensors;

enum { SAFETENSORS_MAX_DIMS = 8, SAFETENSORS_MAX_SHARDS = 1024 };

struct safetensors_tensor {
    const char *name;
    const char *type;                    /* as in the file: "BF16", "I64", ... static string */
    int n_dims;                          /* 0..8; a rank of 0 is a scalar */
    uint64_t dims[SAFETENSORS_MAX_DIMS]; /* dims[n_dims - 1] is the contiguous one */
    const uint8_t *data;
    size_t bytes;
    int shard;
};

/* Open a file or a folder. Errors name the file, the tensor and the value. E_NOT_FOUND where a
 * folder holds no safetensors. */
int safetensors_open(struct safetensors **out, const char *path, struct err *e);

/* The same over bytes of one file that the caller keeps alive (tests, fuzzing). */
int safetensors_open_bytes(struct safetensors **out, const uint8_t *data, size_t n, struct err *e);

/* Safe on NULL. */
void safetensors_close(struct safetensors *s);

size_t safetensors_n_tensors(const struct safetensors *s);
const struct safetensors_tensor *safetensors_tensor_at(const struct safetensors *s, size_t idx);

/* NULL where there is none. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *s, const char *name);

/* Entries of the headers' __metadata__, in their order; false behind the last. */
bool safetensors_metadata_at(const struct safetensors *s, size_t idx, const char **key,
                             const char **value);

/* Our type of t. E_UNSUPPORTED, with the tensor's name, for what we cannot compute with. */
int safetensors_dtype(const struct safetensors_tensor *t, enum kern_dtype *out, struct err *e);

/* Shards in the order of opening: their mapping and the bytes of length field and header. */
int safetensors_n_shards(const struct safetensors *s);
const struct file *safetensors_shard(const struct safetensors *s, int shard, size_t *header_bytes);

#endif
