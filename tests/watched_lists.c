#include "tests/watched_lists.h"

#include <string.h>
#include <xxhash.h>

/* Of the attention before. */
static struct {
    const void *scratch;
    XXH64_hash_t rows_and_lists;
} before;

void watch_lists_reset(void) {
    memset(&before, 0, sizeof before);
}

static size_t list_of(const struct kern_lists *l, int seq, int head) {
    return (size_t)seq * (size_t)l->seq_stride + (size_t)head * (size_t)l->head_stride;
}

/* A row's K and V go to the page that its sequence's list has for its position. */
static void check_slots(const struct kern_batch *b, const struct kern_lists *l) {
    for (int r = 0; r < b->rows.n_gen + b->rows.n_prompt; r++) {
        int s = b->row_seq[r], i = 0;
        if (s < 0) continue;
        const size_t list = list_of(l, s, 0), at = list * (size_t)l->capacity;
        while (i < l->n_blocks[list] && l->block[at + (size_t)i] != b->position[r] / KERN_BLOCK)
            i++;
        if (s >= b->n_seqs || r < b->seq_row[s] || r >= b->seq_row[s] + b->seq_n_rows[s])
            watch_problem("row %d is not one of sequence %d", r, s);
        else if (i == l->n_blocks[list] || l->page[at + (size_t)i] != b->slot_page[r])
            watch_problem("row %d at position %d of sequence %d writes to page %d", r,
                          b->position[r], s, b->slot_page[r]);
    }
}

static void digest(XXH64_state_t *state, const void *p, size_t n, size_t size) {
    XXH64_update(state, &p, sizeof p);
    if (p) XXH64_update(state, p, n * size);
}

/* Where they lie and what they say. */
static XXH64_hash_t digest_of(const struct kern_batch *b, const struct kern_lists *l,
                              int n_kv_heads) {
    XXH64_state_t *state = XXH64_createState();
    size_t n_rows = (size_t)(b->rows.n_gen + b->rows.n_prompt), n_seqs = (size_t)b->n_seqs;
    const int shape[] = {b->rows.n_gen, b->rows.n_prompt, b->n_seqs, l->capacity,
                         l->seq_stride, l->head_stride,   n_kv_heads};
    XXH64_reset(state, 0);
    XXH64_update(state, shape, sizeof shape);
    digest(state, b->position, n_rows, sizeof *b->position);
    digest(state, b->row_seq, n_rows, sizeof *b->row_seq);
    digest(state, b->seq_row, n_seqs, sizeof *b->seq_row);
    digest(state, b->seq_n_rows, n_seqs, sizeof *b->seq_n_rows);
    for (int s = 0; s < b->n_seqs; s++)
        for (int h = 0; h < (l->head_stride ? n_kv_heads : 1); h++) {
            size_t list = list_of(l, s, h), at = list * (size_t)l->capacity;
            size_t n = (size_t)(l->n_blocks[list] > 0 ? l->n_blocks[list] : 0);
            digest(state, l->n_blocks + list, 1, sizeof *l->n_blocks);
            digest(state, l->page + at, n, sizeof *l->page);
            digest(state, l->block + at, n, sizeof *l->block);
            if (l->quarters) digest(state, l->quarters + at, n, sizeof *l->quarters);
        }
    XXH64_hash_t hash = XXH64_digest(state);
    XXH64_freeState(state);
    return hash;
}

void watch_lists(const struct kern_batch *b, const struct kern_lists *l, int n_kv_heads,
                 const void *scratch) {
    check_slots(b, l);
    XXH64_hash_t hash = digest_of(b, l, n_kv_heads);
    if (l->repeated && (scratch != before.scratch || hash != before.rows_and_lists))
        watch_problem("lists that are said to be repeated are not those of the call before");
    before.scratch = scratch;
    before.rows_and_lists = hash;
}
