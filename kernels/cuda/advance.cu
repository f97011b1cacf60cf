/* What stands between passes of a round, so that the host need not: the next draft pass's input
 * from the token that was drawn, and the counts of emitted tokens. A thread a sequence, or a round;
 * a few hundred bytes in all: the time is the launch's (some 2 us, nothing inside a recording with
 * programmatic launches). Nothing here trusts an index that a kernel before it wrote. */
#include "kernels/cuda/cuda.cuh"

enum { ADVANCE_THREADS = 64 };

/* ---- Draft passes ---- */

/* The token just drawn goes where it is read; -1 where there is none to go on with. */
__device__ static int32_t take(struct kern_drawing *d, int32_t token, int32_t *drawn,
                               int32_t *target) {
    int32_t n = d->n_drawn;
    if (n < 0 || n >= d->n_draft || n >= KERN_MAX_DRAFT) return -1;
    int32_t *at = drawn + d->first_drawn + n;
    if (n > 0 && at[-1] < 0) token = -1;
    *at = target[d->first_target + n] = token;
    d->n_drawn = n + 1;
    return n + 1 < d->n_draft ? token : -1;
}

__device__ static void move_params(struct kern_sample *p, const struct kern_drawing *d, bool idle) {
    p->position++;
    p->n_recent = d->n_drawn;
    p->probs_row = idle || p->probs_row < 0 ? -1 : p->probs_row + 1;
    if (p->position >= d->min_position) p->n_banned = 0;
}

static __global__ void advance_kernel(int n, struct kern_drawing *drawing,
                                      const struct kern_sampled *out, struct kern_next next,
                                      int32_t *drawn, int32_t *target) {
    int i = (int)(blockIdx.x * ADVANCE_THREADS + threadIdx.x);
    pdl_wait();
    pdl_trigger();
    if (i >= n) return;
    struct kern_drawing *d = &drawing[i];
    struct kern_sample *p = &next.params[i];
    int32_t token = take(d, out[i].token, drawn, target);
    int32_t position = (int32_t)p->position, block = position / KERN_BLOCK - d->hole;
    bool idle = token < 0 || block < 0 || block >= next.list_capacity;
    next.token[i] = idle ? -1 : token;
    next.position[i] = position;
    next.row_seq[i] = idle ? -1 : i;
    next.seq_row[i] = next.logit_row[i] = i;
    next.seq_n_rows[i] = !idle;
    next.slot_page[i] = idle ? 0 : next.list[(size_t)i * next.list_capacity + block];
    move_params(p, d, idle);
}

int kern_cuda_advance(struct kern *k, int n, struct kern_drawing *drawing,
                      const struct kern_sampled *out, const struct kern_next *next, int32_t *drawn,
                      int32_t *target) {
    ASSERT(n >= 0 && n <= KERN_MAX_ROWS);
    if (n == 0) return 0;
    return CUDA_LAUNCH(cuda_ctx(k), advance_kernel, (n + ADVANCE_THREADS - 1) / ADVANCE_THREADS,
                       ADVANCE_THREADS, 0, n, drawing, out, *next, drawn, target);
}

/* ---- Penalties ---- */

/* A token may come twice in a round: one thread counts all of it. */
static __global__ void tally_kernel(int n_rounds, const struct kern_round *rounds,
                                    const struct kern_sample *params, const int32_t *n_accepted,
                                    const struct kern_sampled *out, uint16_t *output,
                                    size_t stride) {
    int i = (int)(blockIdx.x * ADVANCE_THREADS + threadIdx.x);
    pdl_wait();
    pdl_trigger();
    if (i >= n_rounds) return;
    int first = rounds[i].first_row, history = params[first].history;
    int last = first + min(max(n_accepted[i], 0), KERN_MAX_DRAFT);
    if (history < 0) return;
    for (int row = first; row <= last; row++) {
        int32_t token = out[row].token;
        if (token < 0 || (size_t)token >= stride) continue;
        uint16_t *count = &output[(size_t)history * stride + (size_t)token];
        if (*count < UINT16_MAX) ++*count;
    }
}

int kern_cuda_tally(struct kern *k, int n_rounds, const struct kern_round *rounds,
                    const struct kern_sample *params, const int32_t *n_accepted,
                    const struct kern_sampled *out, uint16_t *output, size_t stride) {
    ASSERT(n_rounds >= 0 && n_rounds <= KERN_MAX_ROWS);
    if (n_rounds == 0) return 0;
    return CUDA_LAUNCH(cuda_ctx(k), tally_kernel,
                       (n_rounds + ADVANCE_THREADS - 1) / ADVANCE_THREADS, ADVANCE_THREADS, 0,
                       n_rounds, rounds, params, n_accepted, out, output, stride);
}
