/* Device time by events on the stream. A mark remembers how many recordings there were: making one
 * takes milliseconds of the host, in which the device stands, so that a time around it says
 * nothing. */
#include <stdlib.h>

#include "kernels/cuda/cuda.cuh"

struct cuda_marks {
    cudaEvent_t at[KERN_MAX_MARKS];
    uint64_t n_recorded[KERN_MAX_MARKS];
};

int cuda_marks_open(struct cuda_ctx *c, struct err *e) {
    c->marks = (struct cuda_marks *)calloc(1, sizeof *c->marks);
    if (!c->marks) return err_raise(e, E_NOMEM, "kernels: no memory for marks of time");
    for (int i = 0; i < KERN_MAX_MARKS; i++)
        if (cudaEventCreate(&c->marks->at[i]) != cudaSuccess)
            return err_raise(e, E_DEVICE, "CUDA: cudaEventCreate: %s",
                             cudaGetErrorString(cudaGetLastError()));
    return 0;
}

void cuda_marks_close(struct cuda_ctx *c) {
    if (!c->marks) return;
    for (int i = 0; i < KERN_MAX_MARKS; i++)
        if (c->marks->at[i]) cudaEventDestroy(c->marks->at[i]);
    free(c->marks);
    c->marks = NULL;
}

int kern_cuda_mark(struct kern *k, int i) {
    struct cuda_ctx *c = cuda_ctx(k);
    ASSERT(i >= 0 && i < KERN_MAX_MARKS && !c->recording);
    c->marks->n_recorded[i] = c->n_recorded;
    return CUDA_NOTE(c, cudaEventRecord(c->marks->at[i], c->stream));
}

int kern_cuda_elapsed(struct kern *k, int from, int to, int64_t *ns) {
    struct cuda_ctx *c = cuda_ctx(k);
    float ms = 0;
    ASSERT(0 <= from && from <= to && to < KERN_MAX_MARKS);
    *ns = 0;
    if (c->marks->n_recorded[from] != c->marks->n_recorded[to]) return 0;
    int rc = CUDA_NOTE(c, cudaEventElapsedTime(&ms, c->marks->at[from], c->marks->at[to]));
    if (!rc) *ns = (int64_t)((double)ms * 1e6);
    return rc;
}
