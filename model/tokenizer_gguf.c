/* Tokenizers out of a GGUF's tokenizer.ggml.* keys. What a key's absence means depends on the
 * algorithm and the pre-tokenizer, as in the project that writes these files (source: the defaults
 * of llama-vocab.cpp). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf.h"
#include "model/tokenizer_private.h"

#define KEY "tokenizer.ggml."

/* tokenizer.ggml.pre -> what it stands for. */
static const struct {
    const char *name;
    enum pretokenizer_kind kind;
    bool ignore_merges, add_bos, nfc;
} pre_names[] = {
    {"gpt-2", PRE_GPT2, false, false, false},
    {"llama-bpe", PRE_LLAMA3, true, true, false},
    {"llama3", PRE_LLAMA3, true, true, false},
    {"llama-v3", PRE_LLAMA3, true, true, false},
    {"smaug-bpe", PRE_LLAMA3, false, false, false}, /* SmolLM3 too */
    {"qwen2", PRE_QWEN2, false, false, true},
    {"deepseek-r1-qwen", PRE_QWEN2, false, false, true},
    {"smollm", PRE_SMOLLM, false, false, false},
    {"tekken", PRE_TEKKEN, true, true, false},
};

static bool str_is(struct gguf_str s, const char *want) {
    return s.n == strlen(want) && memcmp(s.data, want, s.n) == 0;
}

static int read_algorithm(struct tokenizer *t, const struct gguf *g, struct err *e) {
    struct gguf_str model, pre;
    bool borrows = false;
    int rc = gguf_get_str(g, KEY "model", &model, e);
    if (rc && gguf_get_bool(g, "tandem.draft.borrow_embedding", &borrows, NULL) == 0 && borrows)
        return err_raise(e, rc,
                         "no tokenizer in it: it is a draft that borrows its target's (key "
                         "tandem.draft.borrow_embedding); give it as the draft of that target");
    if (rc) return rc;
    t->unknown = -1;
    if (str_is(model, "llama")) {
        t->algorithm = ALGORITHM_SPM_SCORE;
        t->prefix = PREFIX_ALWAYS;
        t->byte_fallback = true;
        t->add_bos = true;
        t->bos = 1;
        t->eos = 2;
        t->unknown = 0;
        return 0;
    }
    if (!str_is(model, "gpt2"))
        return err_raise(e, E_UNSUPPORTED, KEY "model = '%.*s' (known: gpt2, llama)",
                         (int)(model.n < 100 ? model.n : 100), model.data);
    t->algorithm = ALGORITHM_BYTE_BPE;
    t->bos = t->eos = -1;
    rc = gguf_get_str(g, KEY "pre", &pre, e);
    if (rc) return err_prefix(e, rc, "the pre-tokenizer is not named, and a guess costs quality");
    for (size_t i = 0; i < sizeof pre_names / sizeof *pre_names; i++) {
        if (!str_is(pre, pre_names[i].name)) continue;
        t->kind = pre_names[i].kind;
        t->ignore_merges = pre_names[i].ignore_merges;
        t->add_bos = pre_names[i].add_bos;
        t->nfc = pre_names[i].nfc;
        return 0;
    }
    return err_raise(e, E_UNSUPPORTED,
                     KEY "pre = '%.*s' (known: gpt-2, llama-bpe, smaug-bpe, qwen2, smollm, tekken)",
                     (int)(pre.n < 100 ? pre.n : 100), pre.data);
}

/* The element arrays beside tokens must be as long; NULL where the key is missing. */
static int side_array(const struct gguf *g, const char *key, enum gguf_type type, size_t n_tokens,
                      const uint8_t **out, struct err *e) {
    const void *data = NULL;
    size_t n = 0;
    *out = NULL;
    if (!gguf_has(g, key)) return 0;
    int rc = gguf_array_data(g, key, type, &data, &n, e);
    if (rc) return rc;
    if (n != n_tokens)
        return err_raise(e, E_FORMAT, "%s has %zu elements for %zu tokens", key, n, n_tokens);
    *out = data;
    return 0;
}

/* "[PAD151646]": what converters fill a vocabulary with up to the head's rows. */
static bool is_padding(struct gguf_str s, size_t id) {
    char text[40];
    int n = snprintf(text, sizeof text, "[PAD%zu]", id);
    return s.n == (size_t)n && memcmp(s.data, text, s.n) == 0;
}

static int read_tokens(struct tokenizer *t, const struct gguf *g, struct err *e) {
    enum gguf_type type;
    size_t n;
    const uint8_t *types, *scores;
    int rc = gguf_array(g, KEY "tokens", &type, &n, e);
    if (rc) return rc;
    if (n == 0 || n > VOCAB_MAX_TOKENS)
        return err_raise(e, E_FORMAT, KEY "tokens has %zu entries, allowed 1..%d", n,
                         VOCAB_MAX_TOKENS);
    if ((rc = side_array(g, KEY "token_type", GGUF_I32, n, &types, e))) return rc;
    if ((rc = side_array(g, KEY "scores", GGUF_F32, n, &scores, e))) return rc;
    if (t->algorithm == ALGORITHM_SPM_SCORE && !scores)
        return err_raise(e, E_FORMAT, KEY "scores is missing: a llama vocabulary merges by score");
    struct gguf_str *tokens = malloc(n * sizeof *tokens);
    if (!tokens) return err_raise(e, E_NOMEM, "%zu tokens", n);
    rc = gguf_array_str(g, KEY "tokens", tokens, n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        int32_t token_type = TOKEN_NORMAL;
        float score = 0;
        if (types) memcpy(&token_type, types + 4 * i, 4);
        if (scores && t->algorithm == ALGORITHM_SPM_SCORE) memcpy(&score, scores + 4 * i, 4);
        token_type = tokenizer__type(tokens[i].data, tokens[i].n, token_type);
        if (is_padding(tokens[i], i)) token_type = TOKEN_UNUSED;
        rc = vocab_add(&t->vocab, tokens[i].data, tokens[i].n, token_type, score,
                       t->algorithm == ALGORITHM_BYTE_BPE, e);
    }
    free(tokens);
    return rc ? err_prefix(e, rc, KEY "tokens") : 0;
}

static int read_merges(struct tokenizer *t, const struct gguf *g, struct err *e) {
    enum gguf_type type;
    size_t n;
    int rc = gguf_array(g, KEY "merges", &type, &n, e);
    if (rc) return rc;
    if ((rc = bpe_init(&t->bpe, n, e))) return rc;
    struct gguf_str *merges = malloc((n + 1) * sizeof *merges);
    if (!merges) return err_raise(e, E_NOMEM, "%zu merges", n);
    rc = gguf_array_str(g, KEY "merges", merges, n, e);
    for (size_t i = 0; i < n && !rc; i++) {
        /* The first space that is not the first byte parts the two. */
        const char *s = merges[i].data;
        const char *space = merges[i].n > 2 ? memchr(s + 1, ' ', merges[i].n - 1) : NULL;
        if (!space)
            rc = err_raise(e, E_FORMAT, "merge %zu is '%.*s', not two parts and a space", i,
                           (int)(merges[i].n < 100 ? merges[i].n : 100), s);
        else
            rc = tokenizer__add_merge(t, i, s, (size_t)(space - s), space + 1,
                                      merges[i].n - (size_t)(space - s) - 1, e);
    }
    free(merges);
    return rc ? err_prefix(e, rc, KEY "merges") : 0;
}

/* An id key: left alone where missing, refused where it names no token. */
static int read_id(const struct gguf *g, const char *key, int n_tokens, int *out, struct err *e) {
    int64_t id;
    if (!gguf_has(g, key)) return 0;
    /* Writers store "none" as the largest u32. */
    int rc = gguf_get_int(g, key, -1, UINT32_MAX, &id, e);
    if (rc) return rc;
    if (id == -1 || id == UINT32_MAX) {
        *out = -1;
        return 0;
    }
    if (id >= n_tokens)
        return err_raise(e, E_FORMAT, "%s = %lld, the vocabulary has %d tokens", key, (long long)id,
                         n_tokens);
    *out = (int)id;
    return 0;
}

static int read_special(struct tokenizer *t, const struct gguf *g, struct err *e) {
    int n = t->vocab.n, eot = -1, eom = -1, rc, unknown = -1;
    const struct {
        const char *key;
        int *out;
    } ids[] = {
        {KEY "bos_token_id", &t->bos},
        {KEY "eos_token_id", &t->eos},
        {KEY "eot_token_id", &eot},
        {KEY "eom_token_id", &eom},
        {KEY "padding_token_id", &t->padding},
        {KEY "unknown_token_id", &unknown},
    };
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if ((rc = read_id(g, ids[i].key, n, ids[i].out, e))) return rc;
    if (unknown >= 0 && t->algorithm == ALGORITHM_SPM_SCORE) t->unknown = unknown;
    if (t->bos >= n) t->bos = -1;
    if (t->eos >= n) t->eos = -1;
    if (t->unknown >= n) t->unknown = -1;
    const struct {
        const char *key;
        bool *out;
    } flags[] = {{KEY "add_bos_token", &t->add_bos}, {KEY "add_eos_token", &t->add_eos}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (gguf_has(g, flags[i].key) && (rc = gguf_get_bool(g, flags[i].key, flags[i].out, e)))
            return rc;
    if (t->algorithm == ALGORITHM_SPM_SCORE && gguf_has(g, KEY "add_space_prefix")) {
        bool prefix;
        if ((rc = gguf_get_bool(g, KEY "add_space_prefix", &prefix, e))) return rc;
        t->prefix = prefix ? PREFIX_ALWAYS : PREFIX_NEVER;
    }
    t->add_bos = t->add_bos && t->bos >= 0;
    t->add_eos = t->add_eos && t->eos >= 0;
    t->strip_first_space = t->prefix != PREFIX_NEVER;
    (void)tokenizer__add_eog(t, t->eos);
    (void)tokenizer__add_eog(t, eot);
    (void)tokenizer__add_eog(t, eom);
    tokenizer__add_known_eog(t);
    return 0;
}

int tokenizer_open_gguf(struct tokenizer **out, const struct gguf *g, struct err *e) {
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t) return err_raise(e, E_NOMEM, "tokenizer");
    t->bos = t->eos = t->unknown = t->padding = -1;
    int rc = read_algorithm(t, g, e);
    if (!rc) rc = read_tokens(t, g, e);
    if (!rc) rc = tokenizer__index(t, e);
    if (!rc && t->algorithm == ALGORITHM_BYTE_BPE) rc = read_merges(t, g, e);
    if (!rc) rc = read_special(t, g, e);
    if (!rc) rc = tokenizer__finish(t, NULL, e);
    if (rc) {
        tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}
