/* Any bytes as a text, through four small vocabularies: no crash, ids inside the vocabulary, the
 * same ids twice, and lossless where every byte has a token. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "model/gguf.h"
#include "model/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const struct {
    const char *path;
    bool lossless;
} vocabs[] = {
    {"tests/golden/vocab_gpt-2.gguf", true},
    {"tests/golden/vocab_llama-bpe.gguf", true},
    {"tests/golden/vocab_qwen2.gguf", false},     /* NFC changes text */
    {"tests/golden/vocab_llama-spm.gguf", false}, /* U+2581 reads as a space */
};
enum { N_VOCABS = sizeof vocabs / sizeof *vocabs };

/* Opened once, for the process's life. */
static const struct tokenizer *open_once(int which) {
    static struct tokenizer *opened[N_VOCABS];
    struct err e = {0};
    struct gguf *g;
    if (opened[which]) return opened[which];
    if (gguf_open(&g, vocabs[which].path, &e) || tokenizer_open_gguf(&opened[which], g, &e)) {
        fprintf(stderr, "%s (run from the repository's root)\n", e.message);
        abort();
    }
    gguf_close(g);
    return opened[which];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const char *text = (const char *)data;
    for (int k = 0; k < N_VOCABS; k++) {
        const struct tokenizer *t = open_once(k);
        for (unsigned flags = 0; flags < 4; flags++) {
            struct tokens ids = {0}, again = {0};
            struct strbuf out = {0};
            struct err e = {0};
            if (tokenizer_encode(t, text, n, flags, &ids, &e)) abort();
            if (tokenizer_encode(t, text, n, flags, &again, &e)) abort();
            if (ids.n != again.n || (ids.n && memcmp(ids.ids, again.ids, ids.n * sizeof *ids.ids)))
                abort();
            for (size_t i = 0; i < ids.n; i++)
                if (ids.ids[i] < 0 || ids.ids[i] >= tokenizer_n_tokens(t)) abort();
            for (size_t i = 0; i < ids.n; i++)
                if (flags == 0 && tokenizer_is_control(t, ids.ids[i])) abort();
            tokenizer_decode(t, ids.ids, ids.n, true, &out);
            bool same = out.n == n && (n == 0 || memcmp(out.data, text, n) == 0);
            if (vocabs[k].lossless && !(flags & TOKENIZER_ADD_SPECIAL) && !same) abort();
            strbuf_deinit(&out);
            tokens_deinit(&ids);
            tokens_deinit(&again);
        }
    }
    return 0;
}
