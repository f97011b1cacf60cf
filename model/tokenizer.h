#ifndef TANDEM_MODEL_TOKENIZER_H
#define TANDEM_MODEL_TOKENIZER_H

/* Text <-> token ids. Two algorithms: byte-level BPE behind a pre-tokenizer pattern (gpt-2,
 * llama-bpe, qwen2, smollm, tekken), and SentencePiece-style BPE with byte fallback. Ids equal
 * those of the model's own tokenizer. Thread safe once open: encoding allocates from the heap,
 * shares nothing. Time is linear in the text times log of the longest pre-token. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/strbuf.h"

struct err;
struct gguf;
struct tokenizer;

/* Open from a GGUF's tokenizer.ggml.* keys, or from a Hugging Face folder (tokenizer.json,
 * tokenizer_config.json, generation_config.json). An unknown pre-tokenizer, model or normaliser is
 * refused by name: a wrong one would cost quality silently. */
int tokenizer_open_gguf(struct tokenizer **out, const struct gguf *g, struct err *e);
int tokenizer_open_hf(struct tokenizer **out, const char *folder, struct err *e);
/* For a model that brings none: ids below 256 are the bytes, the others read " w1234"; no special
 * ids, no merges. */
int tokenizer_open_bytes(struct tokenizer **out, int n_tokens, struct err *e);
void tokenizer_close(struct tokenizer *t);

/* Is it one of tokenizer_open_bytes? */
bool tokenizer_is_made_up(const struct tokenizer *t);

/* Ids are 0..n_tokens-1. The model's head may have more (padded) rows. */
int tokenizer_n_tokens(const struct tokenizer *t);

/* -1 where the model has none. */
int tokenizer_bos(const struct tokenizer *t);
bool tokenizer_adds_bos(const struct tokenizer *t);

/* Any id that ends a generation (eos, eot, <|im_end|>, the list of generation_config.json). */
bool tokenizer_is_eog(const struct tokenizer *t, int id);

/* Is `id` a control token, whose text is shown only on request? */
bool tokenizer_is_control(const struct tokenizer *t, int id);

/* Id of the token whose exact text is `s` (special tokens included), -1 where there is none. */
int tokenizer_find(const struct tokenizer *t, const char *s);

/* 64-bit fingerprint over every entry, type, merge and special id: equal only for tokenizers that
 * give equal ids. (A pair needs less: model_check_pair.) */
uint64_t tokenizer_fingerprint(const struct tokenizer *t);

struct tokens {
    int32_t *ids; /* heap, owned */
    size_t n, cap;
    size_t limit; /* most ids it may hold; 0: none */
};
void tokens_deinit(struct tokens *v);

enum tokenizer_flags {
    TOKENIZER_ADD_SPECIAL = 1,  /* bos/eos as the model wants them */
    TOKENIZER_PARSE_SPECIAL = 2 /* "<|im_start|>" in text becomes its token: template text only */
};

/* Append the ids of text[0..n). Invalid UTF-8 is taken byte by byte as the model's byte tokens,
 * never refused; a byte that the vocabulary has no token for (SmolLM2 lacks some) leaves no trace,
 * as in the model's own tokenizer. User-defined tokens ("<think>" of Qwen3) are found in any text,
 * as they are ordinary output; control tokens only with TOKENIZER_PARSE_SPECIAL. E_TOO_LONG when
 * out->limit is reached or the text is larger than 256 MiB, E_NOMEM. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, unsigned flags,
                     struct tokens *out, struct err *e);

/* Append the bytes of one token (of a control token only with `special`). The bytes of a run of
 * tokens are the concatenation, but a SentencePiece model's first space, which tokenizer_decode
 * drops. An id outside the vocabulary appends nothing. */
void tokenizer_token_bytes(const struct tokenizer *t, int id, bool special, struct strbuf *out);

/* Append the text of ids[0..n). May hold invalid UTF-8 where the ids do. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool special,
                      struct strbuf *out);

#endif
