/* Exact answers of a sparse target: rounds commit provisionally, by sparse lists, and every so
 * often one dense pass verifies what they said.
 *
 * A *run* is what sparse rounds committed since the last dense pass: n_ahead tokens that stand in
 * `ids` behind the final ones, known to nobody outside. Then the same tokens are the draft of a
 * round of dense lists, accepted while they are the dense target's own draws. Its rows write their
 * K and V anew, by the dense law, and whatever else belongs to an answer (text, log-probabilities,
 * states, latency, pages for the cache) comes from that round alone: the answer is a dense one, to
 * the bit. Whatever ends a run early changes only how much the next dense pass verifies.
 *
 * The dense pass sees which blocks its rows attend to, for nothing. Masses of the newest
 * TARGET_ROWS committed rows are kept, those of rejected rows left out, and the next run reads a
 * new selection of all blocks that are final. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engine/engine_private.h"

_Static_assert((int)TARGET_MOST_EXACT == (int)KERN_MAX_DRAFT, "a run is a round's draft");

enum { PROMPT_LINE = TARGET_ROWS }; /* of `seen`: what the prompt's end paid */

static int line_blocks(const struct engine_request *r) {
    return target_n_blocks(r->n_prompt + r->max_tokens);
}

static float *seen_line(const struct engine_request *r, int i) {
    return r->seen + (size_t)i * (size_t)line_blocks(r);
}

bool engine__exact_init(const struct engine *g, struct engine_request *r, bool show_special,
                        struct err *e) {
    if (r->sparse.exact == 0 || !r->score) return true;
    if (r->params.n_stops > 0 &&
        verify_text_init(&r->ahead, g->tokenizer, &r->params, show_special, e))
        return false;
    r->seen = calloc((size_t)(TARGET_ROWS + 1) * (size_t)line_blocks(r), sizeof *r->seen);
    return r->seen != NULL;
}

/* ---- Runs ---- */

/* Rows that want logits beside each running sequence's own one. */
static int spare_rows(const struct engine *g, int n_seqs) {
    const struct model_caps *caps = &g->batch.pass.caps;
    int most = caps->max_logits < caps->max_rows ? caps->max_logits : caps->max_rows;
    int n = most - n_seqs;
    /* Lines of masses by layer and head are long: see mass_parts in batch.c. */
    return g->sizes.list_layers > 0 && n > TARGET_MOST_EXACT ? TARGET_MOST_EXACT : n;
}

/* Most tokens of a run: the dense pass adds one itself, and finds room beside all that may run. */
static int most_ahead(const struct engine *g, const struct engine_request *r) {
    int n = r->sparse.exact, room = spare_rows(g, g->sizes.o.max_seqs);
    int left = r->max_tokens - r->n_out - 1;
    if (room < n) n = room;
    return left < n ? left : n;
}

int engine__exact_left(const struct engine *g, const struct engine_request *r) {
    return r->seen ? most_ahead(g, r) - r->n_ahead : INT32_MAX;
}

bool engine__exact_turn(const struct engine *g, struct engine_request *r, int *n_taken) {
    r->is_dense = false;
    if (!r->seen || (!r->run_ended && r->n_ahead < most_ahead(g, r))) return true;
    if (r->n_ahead > spare_rows(g, g->n_running) - *n_taken) return false;
    *n_taken += r->n_ahead;
    r->is_dense = true;
    r->n_draft = r->n_ahead;
    engine__exact_drop(r);
    return true;
}

void engine__exact_drop(struct engine_request *r) {
    if (!r->seen || !engine__decodes(r)) return;
    r->n_ahead = 0;
    r->n_kv = r->n_prompt + r->n_out - (r->n_out > 0);
}

/* Would a dense target's answer end with this token, the next of the run? */
static bool ends_run(const struct engine *g, struct engine_request *r, int token) {
    if (!r->params.ignore_eos && tokenizer_is_eog(g->tokenizer, token)) return true;
    if (r->params.n_stops == 0) return false;
    if (r->n_ahead == 0) verify_text_copy(&r->ahead, &r->text);
    return verify_text_push(&r->ahead, token, NULL);
}

void engine__exact_commit(struct engine *g, struct engine_request *r, int n_accepted,
                          const struct kern_sampled *run) {
    int n_committed = 0, most = most_ahead(g, r);
    ASSERT(!r->run_ended && r->n_ahead + n_accepted < most);
    for (int i = 0; i <= n_accepted && !r->run_ended; i++) {
        /* What is no number here may be one densely. */
        r->run_ended = run[i].token < 0 || ends_run(g, r, run[i].token);
        if (run[i].token < 0) break;
        r->ids[r->n_prompt + r->n_out + r->n_ahead++] = run[i].token;
        n_committed++;
    }
    r->run_ended |= r->n_ahead == most;
    r->n_kv = r->n_prompt + r->n_out + r->n_ahead - 1;
    if (r->run_ended) r->counts_more = r->has_penalties; /* by all of the run */
    engine__round_end(g, r, n_accepted, n_committed);
}

/* ---- What lookup proposes ---- */

/* The index holds final tokens alone: it is asked where a run begins, and goes on proposing while
 * the run says what it proposed. */
int engine__exact_lookup(struct engine_request *r, int most, int *n_match) {
    const int32_t *final_end = r->ids + r->n_prompt + r->n_out;
    int at = r->n_ahead, n;
    if (at == 0) {
        r->run_match = 0;
        draft_lookup_extend(&r->lookup, r->ids, r->n_prompt + r->n_out);
        r->n_run_lookup = draft_lookup_propose(&r->lookup, r->ids, r->n_prompt + r->n_out,
                                               r->sparse.exact, r->run_lookup, &r->run_match);
    }
    *n_match = 0;
    if (at >= r->n_run_lookup || memcmp(final_end, r->run_lookup, (size_t)at * sizeof *r->ids) != 0)
        return 0;
    n = r->n_run_lookup - at < most ? r->n_run_lookup - at : most;
    memcpy(r->looked_up, r->run_lookup + at, (size_t)n * sizeof *r->ids);
    *n_match = r->run_match + at < DRAFT_LOOKUP_REACH ? r->run_match + at : DRAFT_LOOKUP_REACH;
    return n;
}

/* ---- The dense pass ---- */

/* Masses of the first n rows, which are committed. A row's line holds nothing behind its own block.
 */
static void keep_masses(const struct engine *g, struct engine_request *r, int n) {
    for (int i = 0; r->mass_line >= 0 && i < n; i++) {
        float *line = seen_line(r, r->n_seen++ % TARGET_ROWS);
        memset(line, 0, (size_t)line_blocks(r) * sizeof *line);
        engine__sparse_raise(g, r->mass_line + i, line_blocks(r), line);
    }
    r->mass_line = -1;
}

static void count(struct engine_exact *x, int n_ahead, int n_accepted, int n_committed) {
    x->n_passes++;
    x->n_provisional += (uint64_t)n_ahead;
    x->n_accepted += (uint64_t)(n_accepted < n_committed ? n_accepted : n_committed);
    x->n_tokens += (uint64_t)n_committed;
}

void engine__exact_end(struct engine *g, struct engine_request *r, int n_rows, int n_accepted,
                       int n_committed) {
    keep_masses(g, r, n_rows);
    count(&r->sparsity.exact, r->n_draft, n_accepted, n_committed);
    count(&g->live.exact, r->n_draft, n_accepted, n_committed);
    r->run_ended = false;
    r->wants_selection = r->sparse.selector != TARGET_ALL;
}

/* ---- Selection ---- */

void engine__exact_keep_prompt(struct engine_request *r) {
    memcpy(seen_line(r, PROMPT_LINE), r->score,
           (size_t)target_n_blocks(r->n_prompt) * sizeof *r->score);
}

void engine__exact_masses(struct engine_request *r, int n_blocks) {
    int n = r->n_seen < TARGET_ROWS ? r->n_seen : TARGET_ROWS;
    /* The prompt's end counts as a whole until as many rows came after it. */
    const float *prompt = seen_line(r, PROMPT_LINE);
    for (int b = 0; b < n_blocks; b++) r->score[b] = n < TARGET_ROWS ? prompt[b] : 0;
    for (int i = 0; i < n; i++) {
        const float *line = seen_line(r, i);
        for (int b = 0; b < n_blocks; b++)
            if (line[b] > r->score[b]) r->score[b] = line[b];
    }
}
