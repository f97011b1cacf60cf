/* May one model draft for another? A draft never tokenizes: it is enough that every id means the
 * same text to both, and that both end at the same ids. How text becomes ids (merges, the
 * pre-tokenizer) is the target's affair alone. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "model/model_private.h"
#include "model/source.h"
#include "model/tokenizer_private.h"

enum { SHOWN_BYTES = 40, SHOWN_TEXT = 4 * SHOWN_BYTES + 48 };

static const char *const type_names[] = {"of no type",   "normal", "unknown", "control",
                                         "user-defined", "unused", "a byte"};

/* "'\xf0\x9f' (normal)": bytes that are no plain ASCII are escaped, so that two entries that
 * differ in them look different. */
static void show_entry(const struct vocab *v, int id, char out[SHOWN_TEXT]) {
    size_t n, at = 0;
    const char *text = vocab_text(v, id, &n);
    out[at++] = '\'';
    for (size_t i = 0; i < n && i < SHOWN_BYTES; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x20 && c < 0x7f) out[at++] = (char)c;
        else at += (size_t)snprintf(out + at, 5, "\\x%02x", c);
    }
    snprintf(out + at, SHOWN_TEXT - at, "'%s (%s)", n > SHOWN_BYTES ? "..." : "",
             type_names[v->type[id]]);
}

/* Entries without the unused ones at the end, which only pad the vocabulary to the head's rows. */
static int n_used(const struct vocab *v) {
    int n = v->n;
    while (n > 0 && v->type[n - 1] == TOKEN_UNUSED) n--;
    return n;
}

static int compare_entries(const struct vocab *t, const struct vocab *d, struct err *e) {
    int n_target = n_used(t), n_draft = n_used(d);
    char a[SHOWN_TEXT], b[SHOWN_TEXT];
    for (int id = 0; id < n_target && id < n_draft; id++) {
        size_t n, k;
        const char *x = vocab_text(t, id, &n), *y = vocab_text(d, id, &k);
        if (t->type[id] == d->type[id] &&
            (t->type[id] == TOKEN_UNUSED || (n == k && memcmp(x, y, n) == 0)))
            continue;
        show_entry(t, id, a);
        show_entry(d, id, b);
        return err_raise(e, E_INVALID, "token %d is %s in the target and %s in the draft", id, a,
                         b);
    }
    if (n_target == n_draft) return 0;
    bool more = n_target > n_draft;
    int id = more ? n_draft : n_target;
    show_entry(more ? t : d, id, a);
    return err_raise(e, E_INVALID,
                     "the target has %d tokens, the draft %d: token %d is %s in the %s alone",
                     n_target, n_draft, id, a, more ? "target" : "draft");
}

/* One id of a special meaning; a file that does not name it agrees with any. */
static int compare_special(const char *what, int target, int draft, struct err *e) {
    if (target < 0 || draft < 0 || target == draft) return 0;
    return err_raise(e, E_INVALID, "%s is token %d in the target and token %d in the draft", what,
                     target, draft);
}

static int compare_ends(const struct tokenizer *t, const struct tokenizer *d, struct err *e) {
    for (int side = 0; side < 2; side++) {
        const struct tokenizer *has = side ? d : t, *lacks = side ? t : d;
        for (int i = 0; i < has->n_eog; i++) {
            if (tokenizer_is_eog(lacks, has->eog[i])) continue;
            char text[SHOWN_TEXT];
            show_entry(&has->vocab, has->eog[i], text);
            return err_raise(e, E_INVALID,
                             "token %d, %s, ends a generation in the %s and not in "
                             "the %s",
                             has->eog[i], text, side ? "draft" : "target",
                             side ? "target" : "draft");
        }
    }
    return 0;
}

static int compare_tokenizers(const struct tokenizer *t, const struct tokenizer *d, struct err *e) {
    if (t->fingerprint == d->fingerprint) return 0;
    bool bytes_t = t->algorithm == ALGORITHM_BYTE_BPE, bytes_d = d->algorithm == ALGORITHM_BYTE_BPE;
    if (bytes_t != bytes_d)
        return err_raise(e, E_INVALID, "the target's tokens are %s and the draft's are %s",
                         bytes_t ? "byte-level BPE" : "SentencePiece",
                         bytes_d ? "byte-level BPE" : "SentencePiece");
    int rc = compare_entries(&t->vocab, &d->vocab, e);
    if (!rc) rc = compare_special("bos", t->bos, d->bos, e);
    if (!rc) rc = compare_special("eos", t->eos, d->eos, e);
    return rc ? rc : compare_ends(t, d, e);
}

int model_open_tokenizer(struct tokenizer **out, const struct model_source *src, struct err *e) {
    const struct gguf *g = model_source_gguf(src);
    const char *folder = model_source_folder(src);
    bool dummy = model_source_is_dummy(src);
    struct err why = {0};
    int rc = E_NOT_FOUND;
    if (g) rc = tokenizer_open_gguf(out, g, &why);
    else if (folder) rc = tokenizer_open_hf(out, folder, &why);
    else err_raise(&why, rc, "a config.json alone brings no tokenizer");
    int vocab = model_source_config(src)->vocab;
    if (rc == E_NOT_FOUND && dummy) return tokenizer_open_bytes(out, vocab, e);
    if (rc) return err_raise(e, rc, "%s: tokenizer: %s", model_source_path(src), why.message);
    /* No tensor's shape speaks for the config's number here. */
    int n = n_used(&(*out)->vocab);
    if (!dummy || n <= vocab) return 0;
    tokenizer_close(*out);
    *out = NULL;
    return err_raise(e, E_INVALID,
                     "%s: the tokenizer has %d tokens, vocab_size is %d: tokens without a row of "
                     "the embedding; is it another model's tokenizer?",
                     model_source_path(src), n, vocab);
}

/* A head that can say nothing but the end has nothing to propose, and nothing at all to draw where
 * min_tokens holds end tokens back. */
static int check_head(const struct model_source *draft, const struct tokenizer *t, struct err *e) {
    const int32_t *ids = model_source_head_ids(draft);
    int n = model_source_config(draft)->n_head;
    for (int i = 0; i < n && ids; i++)
        if (!tokenizer_is_eog(t, ids[i])) return 0;
    return ids ? err_raise(e, E_INVALID,
                           "the draft's head of %d tokens holds end tokens alone: it could propose "
                           "nothing else",
                           n)
               : 0;
}

/* Rows of the embedding that tokens need; what the target lacks itself, a draft may lack too. */
static int check_rows(const struct model_config *target, const struct model_config *draft,
                      const struct tokenizer *t, struct err *e) {
    int n = n_used(&t->vocab);
    if (n > target->vocab) n = target->vocab;
    if (draft->vocab >= n) return 0;
    return err_raise(e, E_INVALID, "the draft's embedding has %d rows for %d tokens", draft->vocab,
                     n);
}

int model_check_pair(const struct model_source *target, const struct tokenizer *target_tokenizer,
                     const struct model_source *draft, struct err *e) {
    const struct model_config *tc = model_source_config(target), *dc = model_source_config(draft);
    if (tc->borrows_embedding || tc->n_head < tc->vocab)
        return err_raise(e, E_INVALID, "the target %s is itself a draft (keys tandem.draft.*)",
                         model_source_path(target));
    ASSERT(target_tokenizer);
    int rc = model__check_borrow(draft, target, e);
    if (!rc) rc = check_head(draft, target_tokenizer, e);
    if (!rc) rc = model__check_embedding(draft, target, e);
    if (rc) return rc;
    /* The embedding proves the vocabulary; a tokenizer that is there all the same must agree. */
    if (dc->borrows_embedding && !gguf_has(model_source_gguf(draft), "tokenizer.ggml.tokens"))
        return 0;
    struct tokenizer *t = NULL;
    rc = model_open_tokenizer(&t, draft, e);
    if (rc) return rc;
    rc = compare_tokenizers(target_tokenizer, t, e);
    if (!rc) rc = check_rows(tc, dc, target_tokenizer, e);
    tokenizer_close(t);
    return rc;
}
