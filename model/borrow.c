/* What a draft takes from its target: whether it may, and the head's rows that it lists. */
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "model/model_private.h"
#include "model/source.h"

int model__check_borrow(const struct model_source *src, const struct model_source *target,
                        struct err *e) {
    const struct model_config *c = model_source_config(src);
    if (!c->borrows_embedding) return 0;
    if (!target)
        return err_raise(e, E_INVALID,
                         "%s is a draft that borrows its target's embedding (key "
                         "tandem.draft.borrow_embedding): give it as the draft of that target; "
                         "alone it is no model",
                         model_source_path(src));
    const struct model_config *t = model_source_config(target);
    if (t->borrows_embedding)
        return err_raise(e, E_INVALID, "the target %s is itself a draft that borrows its embedding",
                         model_source_path(target));
    if (t->n_head < t->vocab)
        return err_raise(e, E_INVALID, "the target %s is itself a draft, with a head of %d tokens",
                         model_source_path(target), t->n_head);
    if (c->hidden != t->hidden)
        return err_raise(e, E_INVALID,
                         "hidden size: the draft borrows the target's embedding and has %d, the "
                         "target %d",
                         c->hidden, t->hidden);
    if (c->vocab != t->vocab)
        return err_raise(e, E_INVALID,
                         "vocabulary: the draft borrows the target's embedding and has %d tokens, "
                         "the target %d",
                         c->vocab, t->vocab);
    return 0;
}

int model__check_embedding(const struct model_source *src, const struct model_source *target,
                           struct err *e) {
    struct tensor_view v;
    if (!model_source_config(src)->borrows_embedding) return 0;
    int rc = model_source_find(target, TENSOR_TOKEN_EMBD, 0, &v, e);
    if (rc || !v.data) return rc;
    uint64_t want = model_source_embedding_hash(src), is = XXH3_64bits(v.data, v.bytes);
    if (is == want) return 0;
    return err_raise(e, E_INVALID,
                     "embedding: the draft was made for one of XXH3 %016llx (key "
                     "tandem.draft.embedding_xxh3), the target's %s has %016llx",
                     (unsigned long long)want, v.name, (unsigned long long)is);
}

int model__find_head(const struct model_source *src, const struct model_borrow *borrow,
                     struct tensor_view *out, struct err *e) {
    const struct model_config *c = model_source_config(src);
    if (c->borrows_head) {
        src = borrow->target_src;
        c = model_source_config(src);
    }
    return model_source_find(src, c->tied ? TENSOR_TOKEN_EMBD : TENSOR_OUTPUT, 0, out, e);
}

int model__gather_rows(const struct tensor_view *v, const int32_t *ids, int n, void **out,
                       struct err *e) {
    /* Rows are whole blocks: the readers checked that the columns are. */
    size_t row_bytes = kern_dtype_bytes(v->dtype, (size_t)v->cols);
    if (!v->data) return err_raise(e, E_INVALID, "tensor %s: headers only, no weights", v->name);
    uint8_t *rows = malloc((size_t)n * row_bytes);
    if (!rows) return err_raise(e, E_NOMEM, "%s: no memory for %d rows", v->name, n);
    for (int i = 0; i < n; i++) {
        ASSERT(ids[i] >= 0 && ids[i] < v->rows);
        memcpy(rows + (size_t)i * row_bytes, (const uint8_t *)v->data + (size_t)ids[i] * row_bytes,
               row_bytes);
    }
    *out = rows;
    return 0;
}
