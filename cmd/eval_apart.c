#include "cmd/eval_apart.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

static size_t n_own(const struct eval_apart *a) {
    return (size_t)a->deep.n_layers * (size_t)a->deep.n_heads;
}

int eval_apart_open(struct eval_apart *a, const struct target_deep *deep, int n_columns,
                    int n_blocks, struct err *e) {
    size_t n = (size_t)n_blocks, quarters = TARGET_QUARTERS * n;
    *a = (struct eval_apart){.deep = *deep, .n_blocks = n_blocks, .n_columns = n_columns};
    size_t own = n_own(a), lists = (size_t)n_columns * own;
    a->own = calloc(lists, sizeof *a->own);
    a->block = calloc(lists * n, sizeof *a->block);
    a->quarters = calloc(lists * n, sizeof *a->quarters);
    a->mass = calloc(own * n, sizeof *a->mass);
    a->by_quarter = calloc(own * quarters, sizeof *a->by_quarter);
    a->line = calloc(n, sizeof *a->line);
    a->quarter = calloc(quarters, sizeof *a->quarter);
    a->unit = calloc(quarters, sizeof *a->unit);
    a->picked = calloc(quarters, sizeof *a->picked);
    if (a->own && a->block && a->quarters && a->mass && a->by_quarter && a->line && a->quarter &&
        a->unit && a->picked)
        return 0;
    eval_apart_close(a);
    return err_raise(e, E_NOMEM, "no memory for %zu lists of %d blocks", lists, n_blocks);
}

void eval_apart_close(struct eval_apart *a) {
    free(a->own);
    free(a->block);
    free(a->quarters);
    free(a->mass);
    free(a->by_quarter);
    free(a->line);
    free(a->quarter);
    free(a->unit);
    free(a->picked);
    *a = (struct eval_apart){0};
}

/* ---- What was seen ---- */

static void raise(float *to, const float *by, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (by[i] > to[i]) to[i] = by[i];
}

void eval_apart_see(struct eval_apart *a, const struct target_seen *seen, int n_blocks,
                    float *most) {
    size_t n = (size_t)n_blocks;
    ASSERT(seen->n_layers == a->deep.n_layers && seen->n_heads == a->deep.n_heads);
    ASSERT(n_blocks <= a->n_blocks);
    memset(most, 0, sizeof *most * n);
    for (size_t i = 0; i < n_own(a); i++) {
        const size_t from = i * (size_t)seen->stride, to = i * (size_t)a->n_blocks;
        memcpy(a->mass + to, seen->mass + from, sizeof *a->mass * n);
        memcpy(a->by_quarter + TARGET_QUARTERS * to, seen->quarters + TARGET_QUARTERS * from,
               sizeof *a->by_quarter * TARGET_QUARTERS * n);
        raise(most, a->mass + to, n);
    }
}

/* The most of those that read the list-th list of n blocks, into a->line and a->quarter. */
static void gather(struct eval_apart *a, const struct target_settings *s, int list, size_t n) {
    memset(a->line, 0, sizeof *a->line * n);
    memset(a->quarter, 0, sizeof *a->quarter * TARGET_QUARTERS * n);
    for (int i = 0; i < (int)n_own(a); i++) {
        const size_t at = (size_t)i * (size_t)a->n_blocks;
        if (target_list_of(s, &a->deep, i / a->deep.n_heads, i % a->deep.n_heads) != list) continue;
        raise(a->line, a->mass + at, n);
        raise(a->quarter, a->by_quarter + TARGET_QUARTERS * at, TARGET_QUARTERS * n);
    }
}

/* ---- Selecting ---- */

static struct target_view view_of(const struct eval_column *c, const struct eval_scores *s,
                                  int n_tokens, const float *numbers) {
    bool seen = c->selector == EVAL_OBSERVED;
    return (struct target_view){.n_tokens = n_tokens,
                                .seed = s->seed,
                                .mass = seen ? numbers : NULL,
                                .score = seen ? NULL : numbers};
}

/* The law for blocks of c->size tokens, n of 64: a sequence of as many blocks as there are of that
 * size. A block of 16 or 32 measures as its best quarter does, one of 128 as its better half. */
static int select_sized(struct eval_apart *a, const struct eval_column *c,
                        const struct eval_scores *s, int n, int32_t *block, uint8_t *quarters) {
    struct target_settings law = c->settings;
    int size = c->size, small = TARGET_BLOCK / size, large = size / TARGET_BLOCK;
    int keep = target_n_kept(&law, s->n_tokens), n_kept = 0;
    int tokens = small ? s->n_tokens * small : (s->n_tokens + large - 1) / large;
    int units = target_n_blocks(tokens), wide = size / KERN_QUARTER; /* quarters of one */
    law.keep_blocks = law.min_blocks = small ? keep * small : (keep + large - 1) / large;
    law.window_blocks = small ? law.window_blocks * small : (law.window_blocks + large - 1) / large;
    for (int u = 0; u < units; u++) {
        float best = -INFINITY;
        for (int q = u * wide; q < (u + 1) * wide && q < TARGET_QUARTERS * n; q++)
            best = fmaxf(best, large ? a->line[q / TARGET_QUARTERS] : a->quarter[q]);
        a->unit[u] = best;
    }
    const struct target_view view = view_of(c, s, tokens, a->unit);
    int n_picked = target_select(&law, &view, a->unit, a->picked);
    for (int i = 0; i < n_picked; i++)
        for (int q = a->picked[i] * wide; q < (a->picked[i] + 1) * wide; q++) {
            int b = q / TARGET_QUARTERS;
            if (b >= n) break;
            if (n_kept == 0 || block[n_kept - 1] != b) {
                block[n_kept] = b;
                quarters[n_kept++] = 0;
            }
            quarters[n_kept - 1] |= (uint8_t)(1 << q % TARGET_QUARTERS);
        }
    quarters[n_kept - 1] = 15; /* rows lie in the newest one, which is always kept */
    return n_kept;
}

/* The list-th of a column's lists. */
static struct target_kept select_list(struct eval_apart *a, size_t at, int list,
                                      const struct eval_column *c, const struct eval_scores *s) {
    int n = target_n_blocks(s->n_tokens);
    struct target_kept k = {.n_blocks = n};
    int32_t *block = a->block + at * (size_t)a->n_blocks;
    uint8_t *quarters = a->quarters + at * (size_t)a->n_blocks;
    k.block = block;
    if (c->selector == EVAL_OBSERVED) gather(a, &c->settings, list, (size_t)n);
    else {
        memcpy(a->line, eval_column_numbers(c, s), sizeof *a->line * (size_t)n);
        memcpy(a->quarter, eval_column_quarters(c, s),
               sizeof *a->quarter * TARGET_QUARTERS * (size_t)n);
    }
    if (c->size) {
        k.n = select_sized(a, c, s, n, block, quarters);
        k.quarters = quarters;
        return k;
    }
    const struct target_view view = view_of(c, s, s->n_tokens, a->line);
    k.n = target_select(&c->settings, &view, a->line, block);
    if (!target_has_quarters(&c->settings)) return k;
    target_select_quarters(&c->settings, s->n_tokens, a->quarter, block, k.n, quarters);
    k.quarters = quarters;
    return k;
}

static int quarters_of(const struct target_kept *k) {
    int n = 0;
    for (int i = 0; i < k->n; i++)
        n += k->quarters ? __builtin_popcount(k->quarters[i]) : TARGET_QUARTERS;
    return n;
}

int eval_apart_select(struct eval_apart *a, int column, const struct eval_column *c,
                      const struct eval_scores *s, struct target_kept *out) {
    const struct target_settings *law = &c->settings;
    int n = target_n_blocks(s->n_tokens), n_lists = target_n_lists(law, &a->deep), n_quarters = 0;
    size_t first = (size_t)column * n_own(a);
    ASSERT(column >= 0 && column < a->n_columns && n <= a->n_blocks);
    ASSERT(n_lists == 1 || c->selector == EVAL_OBSERVED);
    if (!target_selects(law, s->n_tokens)) return 0;
    for (int i = 0; i < n_lists; i++) {
        struct target_kept list = select_list(a, first + (size_t)i, i, c, s);
        n_quarters += quarters_of(&list);
        for (int j = 0; n_lists > 1 && j < (int)n_own(a); j++)
            if (target_list_of(law, &a->deep, j / a->deep.n_heads, j % a->deep.n_heads) == i)
                a->own[first + (size_t)j] = list;
        *out = list;
    }
    if (n_lists > 1) *out = (struct target_kept){.n_blocks = n, .own = a->own + first};
    int per = TARGET_QUARTERS * n_lists;
    return (n_quarters + per / 2) / per; /* the first and the newest are among them: not 0 */
}
