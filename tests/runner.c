#include "tests/runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "model/source.h"

enum { MAX_SEQS = 64, PAGE_UNIT = 1024 };

struct runner {
    struct runner_options o;
    struct kern *k;
    struct model *m, *target;
    size_t weight_bytes;
    struct kern_device_info info;
    int n_groups, group_layers[2], group_first[2];
    size_t page_bytes[2];
    void *arena[2];
    int32_t *pages[2]; /* [n_seqs][max_blocks] */
    int max_blocks;
    int length[MAX_SEQS];
    int32_t *lists; /* scratch arrays of a pass */
};

/* A failure here ends the process: a test sees the signal and this line. */
static void must(int rc, const struct err *e) {
    if (rc == 0) return;
    fprintf(stderr, "runner: %s\n", e->message);
    abort();
}

static void *take(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    ASSERT(p);
    return p;
}

static void shuffle_pages(struct runner *r, int g) {
    int n = r->o.n_seqs * r->max_blocks;
    r->pages[g] = take((size_t)n, sizeof(int32_t));
    int stride = (int)(r->page_bytes[g] / PAGE_UNIT) + 1; /* a gap of one unit between pages */
    for (int i = 0; i < n; i++) r->pages[g][i] = i * stride + 1;
    for (int i = n - 1; i > 0; i--) {
        int j = (int)(rng_u32(7, (uint64_t)i, RNG_TEST, 0) % (uint32_t)(i + 1));
        int32_t t = r->pages[g][i];
        r->pages[g][i] = r->pages[g][j];
        r->pages[g][j] = t;
    }
    size_t bytes = ((size_t)n * (size_t)stride + 2) * PAGE_UNIT;
    struct err e = {0};
    must(r->k->ops->reserve(r->k, bytes, &r->arena[g], &e), &e);
    memset(r->arena[g], 0xff, bytes); /* NaN in f16, bf16 and f32 */
}

struct runner *runner_open(const struct runner_options *o) {
    struct runner *r = take(1, sizeof *r);
    struct err e = {0};
    r->o = *o;
    ASSERT(o->n_seqs <= MAX_SEQS);
    struct kern_options ko = {.n_threads = o->n_threads, .precision = o->precision, .isa = o->isa};
    must(kern_cpu_open(&r->k, &ko, &e), &e);
    struct model_source *src, *target_src = NULL;
    must(model_source_open(&src, o->path, &e), &e);
    r->max_blocks = (o->max_tokens + KERN_BLOCK - 1) / KERN_BLOCK;
    struct model_caps caps = {.max_rows = o->max_rows,
                              .max_seqs = o->n_seqs,
                              .max_blocks = r->max_blocks,
                              .max_logits = o->max_rows};
    if (o->target_path) {
        must(model_source_open(&target_src, o->target_path, &e), &e);
        must(model_open(&r->target, target_src, NULL, r->k, &caps, NULL, NULL, &e), &e);
    }
    struct model_borrow borrow = {r->target, target_src}, *b = target_src ? &borrow : NULL;
    must(model_open(&r->m, src, b, r->k, &caps, NULL, NULL, &e), &e);
    must(model_weight_bytes(src, b, r->k, &r->weight_bytes, &e), &e);
    model_source_close(src);
    model_source_close(target_src);
    r->k->ops->info(r->k, &r->info);
    const struct model_config *c = model_get_config(r->m);
    r->n_groups = o->select_layer > 0 ? 2 : 1;
    r->group_layers[0] = r->n_groups == 2 ? o->select_layer : c->n_layers;
    r->group_first[1] = r->group_layers[0];
    r->group_layers[1] = c->n_layers - r->group_layers[0];
    for (int g = 0; g < r->n_groups; g++) {
        size_t bytes = model_kv_offset(c, r->group_layers[g], false, kern_dtype_block_bytes(o->kv));
        r->page_bytes[g] = (bytes + PAGE_UNIT - 1) / PAGE_UNIT * PAGE_UNIT;
        shuffle_pages(r, g);
    }
    return r;
}

void runner_close(struct runner *r) {
    for (int g = 0; g < r->n_groups; g++) {
        r->k->ops->unreserve(r->k, r->arena[g]);
        free(r->pages[g]);
    }
    model_close(r->m);
    model_close(r->target);
    r->k->ops->close(r->k);
    free(r);
}

const struct model_config *runner_config(const struct runner *r) {
    return model_get_config(r->m);
}
struct model *runner_model(struct runner *r) {
    return r->m;
}
size_t runner_weight_bytes(const struct runner *r) {
    return r->weight_bytes;
}
const char *runner_device(const struct runner *r) {
    return r->info.name;
}
int runner_length(const struct runner *r, int seq) {
    return r->length[seq];
}

void runner_truncate(struct runner *r, int seq, int n) {
    ASSERT(n <= r->length[seq]);
    r->length[seq] = n;
}

void runner_pass(struct runner *r, const struct runner_piece *pieces, int n_pieces, float *logits) {
    runner_pass_last(r, pieces, n_pieces, logits, logits ? -1 : 0);
}

void runner_pass_last(struct runner *r, const struct runner_piece *pieces, int n_pieces,
                      float *logits, int n_logits) {
    int n_rows = 0, row = 0, cap = r->max_blocks;
    struct kern_rows rows = {0};
    for (int i = 0; i < n_pieces; i++) {
        n_rows += pieces[i].n;
        if (pieces[i].prompt) rows.n_prompt += pieces[i].n;
        else {
            ASSERT(rows.n_prompt == 0);
            rows.n_gen += pieces[i].n;
        }
    }
    int32_t *token = take((size_t)n_rows, 4), *position = take((size_t)n_rows, 4);
    int32_t *row_seq = take((size_t)n_rows, 4), *all = take((size_t)n_rows, 4), *slot[2];
    int32_t *seq_row = take((size_t)n_pieces, 4), *seq_n = take((size_t)n_pieces, 4);
    int32_t *list[2], *block = take((size_t)n_pieces * (size_t)cap, 4);
    int32_t *n_blocks = take((size_t)n_pieces, 4);
    for (int g = 0; g < 2; g++) {
        slot[g] = take((size_t)n_rows, 4);
        list[g] = take((size_t)n_pieces * (size_t)cap, 4);
    }
    for (int i = 0; i < n_pieces; i++) {
        const struct runner_piece *p = &pieces[i];
        int at = r->length[p->seq], end = at + p->n;
        ASSERT(end <= r->o.max_tokens);
        seq_row[i] = row;
        seq_n[i] = p->n;
        n_blocks[i] = (end + KERN_BLOCK - 1) / KERN_BLOCK;
        for (int b = 0; b < n_blocks[i]; b++) {
            block[i * cap + b] = b;
            for (int g = 0; g < r->n_groups; g++)
                list[g][i * cap + b] = r->pages[g][p->seq * cap + b];
        }
        for (int j = 0; j < p->n; j++, row++) {
            token[row] = p->ids[j];
            position[row] = at + j;
            row_seq[row] = i;
            all[row] = row;
            for (int g = 0; g < r->n_groups; g++)
                slot[g][row] = r->pages[g][p->seq * cap + (at + j) / KERN_BLOCK];
        }
        r->length[p->seq] = end;
    }
    struct model_pass pass = {
        .batch = {.rows = rows,
                  .token = token,
                  .position = position,
                  .row_seq = row_seq,
                  .n_seqs = n_pieces,
                  .seq_row = seq_row,
                  .seq_n_rows = seq_n},
        .n_groups = r->n_groups,
        .n_logits = n_logits < 0 ? n_rows : n_logits,
        .logit_row = all + (n_logits < 0 ? 0 : n_rows - n_logits),
        .logits = logits,
        .logits_stride = (size_t)runner_config(r)->vocab,
    };
    for (int g = 0; g < r->n_groups; g++)
        pass.group[g] = (struct model_group){.first_layer = r->group_first[g],
                                             .n_layers = r->group_layers[g],
                                             .arena = r->arena[g],
                                             .kv_dtype = r->o.kv,
                                             .slot_page = slot[g],
                                             .lists = {.page = list[g],
                                                       .block = block,
                                                       .n_blocks = n_blocks,
                                                       .capacity = cap,
                                                       .seq_stride = 1}};
    struct err e = {0};
    must(model_forward(r->m, &pass, &e), &e);
    must(r->k->ops->sync(r->k, &e), &e);
    free(token), free(position), free(row_seq), free(all), free(seq_row), free(seq_n), free(block);
    free(n_blocks), free(slot[0]), free(slot[1]), free(list[0]), free(list[1]);
}

uint64_t runner_kv_hash(struct runner *r, int seq, int n) {
    const struct model_config *c = runner_config(r);
    size_t elem = kern_dtype_block_bytes(r->o.kv);
    float *tile = take((size_t)KERN_BLOCK * (size_t)c->head_dim, sizeof(float));
    XXH3_state_t *h = XXH3_createState();
    XXH3_64bits_reset(h);
    for (int g = 0; g < r->n_groups; g++)
        for (int layer = 0; layer < r->group_layers[g]; layer++) {
            struct kern_kv kv = {.base = r->arena[g],
                                 .page_stride = PAGE_UNIT,
                                 .k_offset = model_kv_offset(c, layer, false, elem),
                                 .v_offset = model_kv_offset(c, layer, true, elem),
                                 .head_stride = (size_t)KERN_BLOCK * (size_t)c->head_dim * elem,
                                 .dtype = r->o.kv,
                                 .n_kv_heads = c->n_kv_heads,
                                 .head_dim = c->head_dim};
            for (int at = 0; at < n; at += KERN_BLOCK)
                for (int head = 0; head < c->n_kv_heads; head++)
                    for (int value = 0; value < 2; value++) {
                        int take_n = n - at < KERN_BLOCK ? n - at : KERN_BLOCK;
                        kern_cpu_read_kv(&kv, r->pages[g][seq * r->max_blocks + at / KERN_BLOCK],
                                         head, value, tile);
                        XXH3_64bits_update(h, tile, (size_t)take_n * (size_t)c->head_dim * 4);
                    }
        }
    uint64_t out = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    free(tile);
    return out;
}
