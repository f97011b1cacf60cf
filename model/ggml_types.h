#ifndef TANDEM_MODEL_GGML_TYPES_H
#define TANDEM_MODEL_GGML_TYPES_H

/* The element types of GGUF tensors, numbered as in the file (ggml.h of the ggml project). The ones
 * that we can compute with carry their block and our own type; the others only a name to be refused
 * by. */

#include <stdbool.h>
#include <stddef.h>

#include "kernels/kernels.h"

struct ggml_type {
    const char *name;      /* "Q4_1"; NULL: no such number */
    enum kern_dtype dtype; /* where supported */
    size_t block;          /* weights a block; 0: not supported */
    size_t block_bytes;
};

/* Entry of `type`, NULL where the number is unknown. */
const struct ggml_type *ggml_type_find(int type);

/* "F32, F16, ..." of the supported ones. */
const char *ggml_type_supported_names(void);

#endif
