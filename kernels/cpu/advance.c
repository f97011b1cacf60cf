/* What stands between passes of a round, so that the host need not: the next draft pass's input
 * from the token that was drawn, the counts of emitted tokens, and the time. */
#include "base/clock.h"
#include "base/err.h"
#include "kernels/cpu/cpu.h"

int kern_cpu_mark(struct kern *k, int i) {
    ASSERT(i >= 0 && i < KERN_MAX_MARKS);
    ((struct cpu_ctx *)k)->mark_ns[i] = clock_ns();
    return 0;
}

int kern_cpu_elapsed(struct kern *k, int from, int to, int64_t *ns) {
    ASSERT(0 <= from && from <= to && to < KERN_MAX_MARKS);
    *ns = cpu_ctx(k)->mark_ns[to] - cpu_ctx(k)->mark_ns[from];
    return 0;
}

/* ---- Draft passes -------------------------------------------------------------------------- */

/* The token just drawn goes where it is read; -1 where there is none to go on with. */
static int32_t take(struct kern_drawing *d, int32_t token, int32_t *drawn, int32_t *target) {
    if (d->n_drawn >= d->n_draft) return -1;
    int32_t *at = drawn + d->first_drawn + d->n_drawn;
    if (d->n_drawn > 0 && at[-1] < 0) token = -1;
    *at = target[d->first_target + d->n_drawn] = token;
    d->n_drawn++;
    return d->n_drawn < d->n_draft ? token : -1;
}

static void move_params(struct kern_sample *p, const struct kern_drawing *d, bool idle) {
    p->position++;
    p->n_recent = d->n_drawn;
    p->probs_row = idle || p->probs_row < 0 ? -1 : p->probs_row + 1;
    if (p->position >= d->min_position) p->n_banned = 0;
}

int kern_cpu_advance(struct kern *k, int n, struct kern_drawing *drawing,
                     const struct kern_sampled *out, const struct kern_next *next, int32_t *drawn,
                     int32_t *target) {
    (void)k;
    ASSERT(n >= 0 && n <= KERN_MAX_ROWS);
    for (int i = 0; i < n; i++) {
        struct kern_drawing *d = &drawing[i];
        int32_t token = take(d, out[i].token, drawn, target);
        int32_t position = (int32_t)next->params[i].position;
        int32_t block = position / KERN_BLOCK - d->hole;
        bool idle = token < 0;
        ASSERT(idle || (block >= 0 && block < next->list_capacity));
        next->token[i] = token;
        next->position[i] = position;
        next->row_seq[i] = idle ? -1 : i;
        next->seq_row[i] = next->logit_row[i] = i;
        next->seq_n_rows[i] = !idle;
        next->slot_page[i] =
            idle ? 0 : next->list[(size_t)i * (size_t)next->list_capacity + (size_t)block];
        move_params(&next->params[i], d, idle);
    }
    return 0;
}

/* ---- Penalties ----------------------------------------------------------------------------- */

int kern_cpu_tally(struct kern *k, int n_rounds, const struct kern_round *rounds,
                   const struct kern_sample *params, const int32_t *n_accepted,
                   const struct kern_sampled *out, uint16_t *output, size_t stride) {
    (void)k;
    for (int i = 0; i < n_rounds; i++) {
        int first = rounds[i].first_row, history = params[first].history;
        if (history < 0) continue;
        for (int row = first; row <= first + n_accepted[i]; row++) {
            int32_t token = out[row].token;
            if (token < 0 || (size_t)token >= stride) continue;
            uint16_t *count = &output[(size_t)history * stride + (size_t)token];
            if (*count < UINT16_MAX) ++*count;
        }
    }
    return 0;
}
