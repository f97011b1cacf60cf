/* Any bytes as a GGUF file: no crash; what opens can be asked everything, and the config reader
 * too, with the keys of a draft. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"
#include "model/config.h"
#include "model/config_private.h"
#include "model/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void ask_everything(const struct gguf *g) {
    char line[256], key[128];
    for (size_t i = 0; gguf_describe(g, i, line, sizeof line); i++) {
        int64_t v;
        double f;
        bool flag;
        struct gguf_str s;
        enum gguf_type type;
        size_t count;
        const void *values;
        if (sscanf(line, "%127s", key) != 1) continue;
        gguf_get_int(g, key, INT64_MIN, INT64_MAX, &v, NULL);
        gguf_get_float(g, key, -1e300, 1e300, &f, NULL);
        gguf_get_bool(g, key, &flag, NULL);
        gguf_get_str(g, key, &s, NULL);
        if (gguf_array(g, key, &type, &count, NULL) != 0) continue;
        gguf_array_data(g, key, GGUF_F32, &values, &count, NULL);
        struct gguf_str *strings = malloc((count + 1) * sizeof *strings); /* count <= n / 8 */
        if (strings && type == GGUF_STRING) gguf_array_str(g, key, strings, count, NULL);
        free(strings);
    }
}

/* What the config reader took of a draft's keys holds. */
static void check_draft(const struct model_config *c, const struct gguf *g) {
    uint64_t hash;
    if (c->borrows_embedding && config__embedding_hash(g, &hash, NULL) != 0) abort();
    if (c->borrows_head && (!c->borrows_embedding || c->tied)) abort();
    if (c->n_head == c->vocab) return;
    int32_t *ids = malloc((size_t)c->n_head * sizeof *ids);
    if (!ids) return;
    config__copy_head_ids(g, ids, c->n_head);
    for (int i = 0; i < c->n_head; i++)
        if (ids[i] < 0 || ids[i] >= c->vocab || (i && ids[i] <= ids[i - 1])) abort();
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct gguf *g;
    struct err e = {0};
    if (gguf_open_bytes(&g, data, n, &e) != 0) {
        if (!e.message[0]) abort();
        return 0;
    }
    ask_everything(g);
    struct model_config c;
    if (model_config_from_gguf(&c, g, &e) == 0) {
        if (model_config_check(&c, &e) != 0) abort();
        check_draft(&c, g);
    }
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->data < data || t->bytes > n || t->data + t->bytes > data + n) abort();
    }
    gguf_close(g);
    return 0;
}
