/* The tokenizer of a model that brings none (random weights of a config.json): text goes in byte by
 * byte, and every other id has a word of its own, so that text comes out whatever was drawn. No id
 * is special, none ends a generation. */
#include <stdio.h>
#include <stdlib.h>

#include "model/tokenizer_private.h"

enum { N_BYTES = 256 };

int tokenizer_open_bytes(struct tokenizer **out, int n_tokens, struct err *e) {
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t) return err_raise(e, E_NOMEM, "tokenizer");
    t->algorithm = ALGORITHM_BYTE_BPE;
    t->kind = PRE_GPT2;
    t->bos = t->eos = t->unknown = t->padding = -1;
    t->made_up = true;
    int rc = 0;
    for (int id = 0; id < n_tokens && !rc; id++) {
        char word[24] = {(char)id};
        int n = id < N_BYTES ? 1 : snprintf(word, sizeof word, " w%d", id);
        rc = vocab_add(&t->vocab, word, (size_t)n, TOKEN_NORMAL, 0, false, e);
    }
    if (!rc) rc = tokenizer__index(t, e);
    if (!rc) rc = bpe_init(&t->bpe, 0, e);
    if (!rc) rc = tokenizer__finish(t, NULL, e);
    if (rc) {
        tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}
