#include "tests/list_loop.h"

#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/err.h"
#include "model/source.h"
#include "tests/one_row.h"

struct target_settings list_settings(enum list_kind kind, int keep_blocks, double reserve) {
    struct target_settings s;
    target_settings_unset(&s);
    s.selector = TARGET_OBSERVED;
    s.keep_blocks = keep_blocks;
    s.window_blocks = 1;
    s.reserve = reserve;
    s.lists = kind == LAYER                          ? TARGET_LISTS_LAYER
              : kind == HEAD || kind == HEAD_QUARTER ? TARGET_LISTS_HEAD
                                                     : TARGET_LISTS_ONE;
    if (kind == SECOND) s.select2 = SELECT_LAYER + 2;
    s.quarters = kind == TWO_QUARTERS ? 2 : kind == HEAD_QUARTER ? 1 : 4;
    return s;
}

int list_of(enum list_kind kind, int part) {
    int layer = part / N_KV;
    return kind == LAYER                          ? layer
           : kind == HEAD || kind == HEAD_QUARTER ? part
           : kind == SECOND                       ? layer >= 2
                                                  : 0;
}

void list_loop_open(struct list_loop *l) {
    struct tiny_options t = *sparse_target();
    struct err e = {0};
    struct kern_options ko = {.n_threads = 1};
    struct model_caps caps = {
        .max_rows = 1, .max_seqs = 1, .max_blocks = MOST_BLOCKS, .max_logits = 1};
    struct model_source *src;
    const char *path = tiny_model_file(&t);
    size_t page = (size_t)2 * N_LAYERS * N_KV * 64 * ROW_BYTES;
    memset(l, 0, sizeof *l);
    assert_ok(kern_cpu_open(&l->k, &ko, &e), e);
    assert_ok(model_source_open(&src, path, &e), e);
    unlink(path);
    assert_ok(model_open(&l->m, src, NULL, l->k, &caps, NULL, NULL, &e), e);
    model_source_close(src);
    assert_ok(l->k->ops->reserve(l->k, page * 2 * MOST_BLOCKS, &l->arena, &e), e);
    for (int i = 0; i < MOST_BLOCKS; i++) {
        l->all[i] = i;
        for (int g = 0; g < 2; g++)
            l->page[g][i] =
                (int32_t)((size_t)((i * 7 % MOST_BLOCKS) * 2 + g) * page / KVPOOL_ALIGN);
    }
}

void list_loop_close(struct list_loop *l) {
    l->k->ops->unreserve(l->k, l->arena);
    model_close(l->m);
    l->k->ops->close(l->k);
}

/* lists: [N_PARTS], of the prompt's n_blocks blocks; NULL: all is read. */
static void loop_row(struct list_loop *l, int32_t token, int at, int n_prompt,
                     const struct sparse_list *const *lists) {
    struct err e = {0};
    int32_t zero = 0, n_all = at / 64 + 1;
    bool generated = at >= n_prompt, mark = !generated && at >= n_prompt - 32;
    for (int p = 0; p < N_PARTS; p++) {
        int n = 0;
        for (int i = 0; i < n_all; i++) {
            bool in = !lists || i >= (n_prompt + 63) / 64;
            l->own_quarters[p][n] = 15;
            for (int k = 0; lists && k < lists[p]->n; k++) {
                if (lists[p]->kept[k] != i) continue;
                in = true;
                if (lists[p]->quarters[k]) l->own_quarters[p][n] = lists[p]->quarters[k];
            }
            if (!in) continue;
            l->own_block[p][n] = i;
            l->own_page[p][n++] = l->page[1][i];
        }
        l->own_n[p] = n;
    }
    struct model_pass pass = one_row_pass(&token, &at, generated, l->logits, 2);
    pass.group[0] = one_row_group(0, SELECT_LAYER, l->arena, &l->page[0][at / 64], l->page[0],
                                  l->all, &n_all, MOST_BLOCKS);
    pass.group[1] =
        (struct model_group){.first_layer = SELECT_LAYER,
                             .n_layers = N_DEEP,
                             .arena = l->arena,
                             .kv_dtype = KERN_F16,
                             .slot_page = &l->page[1][at / 64],
                             .lists = {.page = l->own_page[0],
                                       .block = l->own_block[0],
                                       .n_blocks = l->own_n,
                                       .capacity = MOST_BLOCKS,
                                       .seq_stride = N_PARTS,
                                       .head_stride = 1,
                                       .quarters = l->own_quarters[0]},
                             .layer_lists = N_KV,
                             .taps = {.mass = mark ? l->mass[0] : NULL,
                                      .mass_line = mark ? &zero : NULL,
                                      .mass_head_stride = 1,
                                      .quarter_mass = mark ? l->quarter_mass[0][0] : NULL},
                             .mass_stride = (size_t)N_KV * MOST_BLOCKS};
    assert_ok(model_forward(l->m, &pass, &e), e);
}

void list_loop_prompt(struct list_loop *l, const struct sparse_record *r) {
    memset(l->mass, 0, sizeof l->mass);
    memset(l->quarter_mass, 0, sizeof l->quarter_mass);
    for (int i = 0; i < r->n_prompt; i++) loop_row(l, r->prompt[i], i, r->n_prompt, NULL);
}

/* The n quarters of list i's blocks that its readers looked at most, but of pinned ones, in which
 * settings' window is 1. */
static void choose_quarters(const struct list_loop *l, enum list_kind kind, int i, int n,
                            struct sparse_list *out) {
    for (int k = 0; k < out->n; k++) {
        int b = out->kept[k];
        float mass[4] = {0};
        for (int p = 0; p < N_PARTS; p++)
            for (int q = 0; q < 4 && list_of(kind, p) == i; q++)
                if (l->quarter_mass[p][b][q] > mass[q]) mass[q] = l->quarter_mass[p][b][q];
        out->quarters[k] = b == 0 || b == out->n_blocks - 1 ? 15 : 0;
        for (int more = 0; more < n; more++) {
            int best = -1;
            for (int q = 0; q < 4; q++)
                if (!(out->quarters[k] >> q & 1) && (best < 0 || mass[q] > mass[best])) best = q;
            if (best >= 0) out->quarters[k] |= (uint8_t)(1 << best);
        }
    }
}

void list_loop_answer(struct list_loop *l, enum list_kind kind, const struct target_settings *asked,
                      uint64_t seed, const struct sparse_record *got, struct sparse_record *want) {
    struct target_settings none, s;
    const struct sparse_list *reads[N_PARTS];
    target_settings_unset(&none);
    s = target_settings_resolve(&none, asked, NULL);
    *want = *got;
    want->n_lists = 0;
    for (int p = 0; p < N_PARTS; p++)
        if (list_of(kind, p) >= want->n_lists) want->n_lists = list_of(kind, p) + 1;
    for (int i = 0; i < want->n_lists; i++) {
        float mass[MOST_BLOCKS] = {0};
        for (int p = 0; p < N_PARTS; p++)
            for (int b = 0; b < MOST_BLOCKS && list_of(kind, p) == i; b++)
                if (l->mass[p][b] > mass[b]) mass[b] = l->mass[p][b];
        struct target_view view = {.n_tokens = got->n_prompt, .seed = seed, .mass = mass};
        want->list[i].n = target_select(&s, &view, mass, want->list[i].kept);
        want->list[i].n_blocks = (got->n_prompt + 63) / 64;
        choose_quarters(l, kind, i, s.quarters, &want->list[i]);
    }
    for (int p = 0; p < N_PARTS; p++) reads[p] = &want->list[list_of(kind, p)];
    for (int i = 0; i < got->n_out; i++) {
        if (i > 0) loop_row(l, got->out[i - 1], got->n_prompt + i - 1, got->n_prompt, reads);
        else loop_row(l, got->prompt[got->n_prompt - 1], got->n_prompt - 1, got->n_prompt, NULL);
        want->row[i] = XXH3_64bits(l->logits, sizeof l->logits);
    }
}
