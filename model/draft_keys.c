/* The keys tandem.draft.* of a GGUF: what a draft leaves to its target (docs/draft-format.md). */
#include <string.h>

#include "base/err.h"
#include "model/config_private.h"
#include "model/gguf.h"

#define KEY_BORROW "tandem.draft.borrow_embedding"
#define KEY_HASH "tandem.draft.embedding_xxh3"
#define KEY_IDS "tandem.draft.head_ids"

enum { HASH_DIGITS = 16 };

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

int config__embedding_hash(const struct gguf *g, uint64_t *out, struct err *e) {
    struct gguf_str s;
    int rc = gguf_get_str(g, KEY_HASH, &s, e);
    if (rc == E_NOT_FOUND)
        return err_raise(e, E_FORMAT,
                         "key " KEY_HASH " is missing: a draft that borrows an embedding says by "
                         "it which one");
    if (rc) return rc;
    uint64_t h = 0;
    bool good = s.n == HASH_DIGITS;
    for (size_t i = 0; i < HASH_DIGITS && good; i++) {
        int digit = hex_digit(s.data[i]);
        good = digit >= 0;
        h = h << 4 | (uint64_t)(digit & 15);
    }
    if (!good)
        return err_raise(e, E_FORMAT,
                         "key " KEY_HASH ": \"%.*s\" is not 16 lower-case hexadecimal digits",
                         s.n < 40 ? (int)s.n : 40, s.data);
    *out = h;
    return 0;
}

int config__read_borrowing(struct model_config *c, const struct gguf *g, struct err *e) {
    uint64_t hash;
    int rc = 0;
    c->borrows_embedding = false;
    if (gguf_has(g, KEY_BORROW)) rc = gguf_get_bool(g, KEY_BORROW, &c->borrows_embedding, e);
    if (rc) return rc;
    if (!c->borrows_embedding) {
        if (!gguf_has(g, KEY_HASH)) return 0;
        return err_raise(e, E_FORMAT, "key " KEY_HASH " without " KEY_BORROW " = true");
    }
    if (gguf_tensor_find(g, "token_embd.weight"))
        return err_raise(e, E_FORMAT,
                         "tensor token_embd.weight is there, and key " KEY_BORROW
                         " says that the target's serves");
    return config__embedding_hash(g, &hash, e);
}

/* ---- The head's ids ---- */

/* The raw elements; a file written by numpy has them signed, by others unsigned. */
static int find_ids(const struct gguf *g, enum gguf_type *type, const unsigned char **data,
                    size_t *n, struct err *e) {
    const void *raw = NULL;
    int rc = gguf_array(g, KEY_IDS, type, n, e);
    if (rc) return rc;
    if (*type != GGUF_U32 && *type != GGUF_I32)
        return err_raise(e, E_FORMAT, "key " KEY_IDS ": elements are neither u32 nor i32");
    if ((rc = gguf_array_data(g, KEY_IDS, *type, &raw, n, e)) != 0) return rc;
    *data = raw;
    return 0;
}

static long long id_at(enum gguf_type type, const unsigned char *data, size_t i) {
    int32_t id;
    memcpy(&id, data + 4 * i, 4);
    return type == GGUF_U32 ? (long long)(uint32_t)id : id;
}

int config__read_head_ids(struct model_config *c, const struct gguf *g, struct err *e) {
    enum gguf_type type;
    const unsigned char *data = NULL;
    size_t n = 0;
    c->n_head = c->vocab;
    if (!gguf_has(g, KEY_IDS)) return 0;
    int rc = find_ids(g, &type, &data, &n, e);
    if (rc) return rc;
    if (n < 1 || n > (size_t)c->vocab)
        return err_raise(e, E_FORMAT, "key " KEY_IDS ": %zu ids, allowed is 1..%d (vocabulary)", n,
                         c->vocab);
    for (size_t i = 0; i < n; i++) {
        long long id = id_at(type, data, i), before = i ? id_at(type, data, i - 1) : -1;
        if (id < 0 || id >= c->vocab)
            return err_raise(e, E_FORMAT, "key " KEY_IDS ": element %zu is %lld, outside 0..%d", i,
                             id, c->vocab - 1);
        if (id <= before)
            return err_raise(e, E_FORMAT,
                             "key " KEY_IDS ": element %zu is %lld after %lld; ids ascend, each "
                             "once",
                             i, id, before);
    }
    c->n_head = (int)n;
    return 0;
}

void config__copy_head_ids(const struct gguf *g, int32_t *out, int n) {
    enum gguf_type type;
    const unsigned char *data = NULL;
    size_t count = 0;
    int rc = find_ids(g, &type, &data, &count, NULL);
    ASSERT(rc == 0 && count == (size_t)n);
    memcpy(out, data, (size_t)n * sizeof *out);
}
