#ifndef TANDEM_TESTS_LIST_LOOP_H
#define TANDEM_TESTS_LIST_LOOP_H

/* A naive loop that makes several lists an epoch and reads by them: passes of one row, each deep
 * layer and KV head with its masses and its list in arrays of its own, nothing of the engine's. */

#include "tests/sparse_bed.h"

enum {
    N_DEEP = N_LAYERS - SELECT_LAYER,
    N_KV = 2,
    N_PARTS = N_DEEP * N_KV, /* a part: a deep layer and a KV head */
    HEAD_DIM = 16,
    ROW_BYTES = HEAD_DIM * 2,
};

enum list_kind { ONE, LAYER, HEAD, SECOND, TWO_QUARTERS, HEAD_QUARTER, N_KINDS };

/* One pinned block at the end. */
struct target_settings list_settings(enum list_kind kind, int keep_blocks, double reserve);

/* Which list a part reads, told once more. */
int list_of(enum list_kind kind, int part);

struct list_loop {
    struct kern *k;
    struct model *m;
    void *arena;
    int32_t page[2][MOST_BLOCKS], all[MOST_BLOCKS];
    float mass[N_PARTS][MOST_BLOCKS], quarter_mass[N_PARTS][MOST_BLOCKS][4], logits[TINY_VOCAB];
    /* Of the deep layers: */
    int32_t own_page[N_PARTS][MOST_BLOCKS], own_block[N_PARTS][MOST_BLOCKS], own_n[N_PARTS];
    uint8_t own_quarters[N_PARTS][MOST_BLOCKS];
};

void list_loop_open(struct list_loop *l);
void list_loop_close(struct list_loop *l);

/* r's prompt: K and V of it, and what its last rows saw, stay in the loop. */
void list_loop_prompt(struct list_loop *l, const struct sparse_record *r);

/* Behind the prompt: the lists and every row's logits of an answer whose tokens are got's. */
void list_loop_answer(struct list_loop *l, enum list_kind kind, const struct target_settings *asked,
                      uint64_t seed, const struct sparse_record *got, struct sparse_record *want);

#endif
