/* Any bytes as a tokenizer.json, or as a GGUF where they begin like one: refused with a message, or
 * a tokenizer that encodes and decodes. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/strbuf.h"
#include "model/gguf.h"
#include "model/tokenizer.h"
#include "model/tokenizer_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int open_any(struct tokenizer **t, const uint8_t *data, size_t n, struct err *e) {
    const char *s = (const char *)data;
    if (n < 4 || memcmp(data, "GGUF", 4) != 0) /* the small files get the same bytes */
        return tokenizer__open_hf_bytes(t, s, n, s, n, s, n, e);
    struct gguf *g = NULL;
    int rc = gguf_open_bytes(&g, data, n, e);
    if (!rc) rc = tokenizer_open_gguf(t, g, e);
    gguf_close(g);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const char text[] = "abc ab  12 \xc3\xa9\xff<s>\n\xe2\x96\x81x";
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (open_any(&t, data, n, &e)) {
        if (!e.message[0] || t) abort();
        return 0;
    }
    struct tokens ids = {0};
    struct strbuf out = {0};
    if (tokenizer_encode(t, text, sizeof text - 1, 3, &ids, &e)) abort();
    for (size_t i = 0; i < ids.n; i++)
        if (ids.ids[i] < 0 || ids.ids[i] >= tokenizer_n_tokens(t)) abort();
    tokenizer_decode(t, ids.ids, ids.n, true, &out);
    if (tokenizer_n_tokens(t) > VOCAB_MAX_TOKENS || tokenizer_bos(t) >= tokenizer_n_tokens(t))
        abort();
    strbuf_deinit(&out);
    tokens_deinit(&ids);
    tokenizer_close(t);
    return 0;
}
