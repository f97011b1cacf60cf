/* What true attention says of blocks that a selector judged by something cheaper.
 *
 * Border: before a list is made, the newest rows' attention in the select layer to the pinned
 * blocks and the selector's best. The layer's K of all positions is there, whatever lists were
 * read, because nothing below it is thinned; its queries are made again of the states in the ring.
 * So what is seen is a function of the committed prefix.
 *
 * Drop: while an epoch lasts, what its rows pay to the blocks of its list in the deep layers,
 * which run anyway. A line for each row of a round: only those that were committed count. */
#include <math.h>
#include <stdlib.h>

#include "base/err.h"
#include "engine/engine_private.h"

bool engine__recheck_init(struct engine_request *r) {
    if (r->sparse.drop <= 0 || !r->score) return true;
    r->used = calloc((size_t)target_n_blocks(r->n_prompt), sizeof *r->used);
    return r->used != NULL;
}

/* ---- Drop ---- */

bool engine__recheck_marks(const struct engine_request *r) {
    return r->used && engine__decodes(r) && r->n_kept > 0;
}

void engine__recheck_begin(struct engine_request *r) {
    int n = target_n_blocks(r->n_prompt);
    if (!r->used) return;
    for (int i = 0; i < n; i++) r->used[i] = NAN;
    for (int i = 0; i < r->n_kept; i++) r->used[r->read[i]] = 0;
}

void engine__recheck_see(const struct engine *g, struct engine_request *r, int n) {
    size_t blocks = (size_t)g->batch.pass.caps.max_blocks;
    if (!engine__recheck_marks(r) || r->mass_line < 0) return;
    ASSERT(g->batch.mass_parts == 1); /* no room is kept for more where blocks may be dropped */
    const float *line = (const float *)g->batch.mass.host + (size_t)r->mass_line * blocks;
    for (int row = 0; row < n; row++, line += blocks)
        for (int i = 0; i < r->n_kept; i++)
            if (line[i] > r->used[r->read[i]]) r->used[r->read[i]] = line[i];
    r->mass_line = -1;
}

/* ---- Border ---- */

/* Masses come by entries of the list; a block is never before its entry. */
static void by_block(float *mass, const int32_t *list, int n) {
    for (int i = n - 1; i >= 0; i--) mass[list[i]] = mass[i];
}

int engine__recheck(struct engine *g, struct engine_request *r, struct target_view *view,
                    float *scratch, struct err *e) {
    int n_ranked = target_n_blocks(view->n_tokens), n_all = target_n_blocks(r->n_kv);
    if (r->used && r->sparsity.n_selections > 0) view->used = r->used;
    int n = target_recheck(&r->sparse, view, scratch, r->read), n_list = n;
    if (n == 0) return 0;
    for (int i = n_ranked; i < n_all; i++) r->read[n_list++] = i;
    int rc = engine__batch_look(g, r, r->read, n_list, TARGET_RECHECK_ROWS, e);
    if (rc) return rc;
    by_block(g->batch.look, r->read, n);
    view->attention = g->batch.look;
    return 0;
}
