#ifndef TANDEM_TESTS_TINY_MODEL_H
#define TANDEM_TESTS_TINY_MODEL_H

/* A small random llama model with a byte-level vocabulary as a whole GGUF file, so that tests of
 * everything above model/ need no download and a row costs some tens of microseconds. 272 tokens:
 * ids 0..255 are the bytes, then 13 merges (TINY_FIRST_MERGE on), then <|im_start|>, <|im_end|>
 * (end of turn),
 * <|endoftext|>. Queries and keys are scaled so that attention is peaked and a wrong page or
 * position shows. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"
#include "kernels/kernels.h"

enum {
    TINY_FIRST_MERGE = 256,
    TINY_IM_START = 269,
    TINY_IM_END = 270,
    TINY_END_OF_TEXT = 271,
    TINY_VOCAB = 272,
};

struct tiny_options {
    int n_layers, hidden, ffn, n_heads, n_kv_heads, head_dim, context;
    enum kern_dtype dtype; /* of matrices: F32, F16, Q8_0 or Q4_1 */
    bool tied;             /* the head is the embedding */
    float head_scale;      /* larger: more certain */
    uint64_t seed;
};

/* 3 layers, hidden 64, FFN 128, 4 heads over 2 of 16, context 2,048, F32. */
void tiny_model_default(struct tiny_options *o);

/* Append the file's bytes. Fails the running test where memory ends. */
void tiny_model_bytes(const struct tiny_options *o, struct strbuf *out);

/* Write it to a new file that ends in .gguf and return its path (static buffer, overwritten by the
 * next call). The caller unlinks it, which is allowed as soon as it was opened. */
const char *tiny_model_file(const struct tiny_options *o);

#endif
