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
    bool padded;           /* the last id has rows in embedding and head, but no entry: padding */
    uint64_t seed;
};

/* 3 layers, hidden 64, FFN 128, 4 heads over 2 of 16, context 2,048, F32. */
void tiny_model_default(struct tiny_options *o);

/* Append the file's bytes. Fails the running test where memory ends. */
void tiny_model_bytes(const struct tiny_options *o, struct strbuf *out);

/* Write it to a new file that ends in .gguf and return its path (static buffer, overwritten by the
 * next call). The caller unlinks it, which is allowed as soon as it was opened. */
const char *tiny_model_file(const struct tiny_options *o);

/* A draft for a tiny target: the target's own weights, fewer layers or noisier ones, so that it
 * agrees with the target often but not always. Embedding and head rows are the target's to the bit,
 * whether they stand in the draft's file or are borrowed: a draft that is stored whole and one that
 * borrows have equal logits. How often greedy choices agree is held by tests/test_draft_file.c. */
struct tiny_draft {
    int n_layers;          /* 1..the target's: its first ones */
    float noise;           /* layer matrices get that share of their own size in other numbers */
    uint64_t seed;         /* of the noise */
    int context;           /* 0: the target's */
    bool borrow_embedding; /* no token_embd.weight, no tokenizer, the keys tandem.draft.* instead */
    const int32_t *head_ids; /* [n_head_ids] ascending ids of a reduced head; NULL: all */
    int n_head_ids;
    bool own_head; /* output.weight stands in the file. Without: the rows are the embedding's of a
                    * tied draft, or borrowed from the target. A draft of an untied target that does
                    * not borrow has it whatever this says */
};

/* All layers, noise .04, nothing borrowed, whole head, context as the target's: at 0.7 to 0.75 of
 * the places of a greedy answer the draft's choice is the target's. Noise .07 agrees at 0.55, a
 * layer fewer without noise at 0.35, all layers without noise always. */
void tiny_draft_default(struct tiny_draft *d, const struct tiny_options *target);

/* Append the draft's file; the same to a new file (a static buffer of its own: a target's path
 * stays valid). */
void tiny_draft_bytes(const struct tiny_options *target, const struct tiny_draft *d,
                      struct strbuf *out);
const char *tiny_draft_file(const struct tiny_options *target, const struct tiny_draft *d);

#endif
