/* Launch graphs. What is enqueued once under a key is enqueued as it is; the second time it is
 * captured, from the third on one launch stands for all. So a shape that comes once, as in a test
 * or at a batch's edge, costs no capture. The least recently used recording makes room for a new
 * one. A capture or instantiation that fails leaves its key to plain launches. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.cuh"

struct recording {
    uint64_t key[KERN_RECORD_KEY];
    cudaGraphExec_t exec; /* NULL: not captured yet */
    uint64_t last_use;    /* 0: a free place */
    bool refused;         /* capturing failed once */
};

struct cuda_recordings {
    struct recording at[CUDA_MAX_RECORDINGS];
    struct recording *open; /* being captured */
    uint64_t clock;
};

int cuda_recordings_open(struct cuda_ctx *c, struct err *e) {
    c->recordings = (struct cuda_recordings *)calloc(1, sizeof *c->recordings);
    return c->recordings ? 0 : err_raise(e, E_NOMEM, "kernels: no memory for recordings");
}

void cuda_recordings_close(struct cuda_ctx *c) {
    if (!c->recordings) return;
    for (int i = 0; i < CUDA_MAX_RECORDINGS; i++)
        if (c->recordings->at[i].exec) cudaGraphExecDestroy(c->recordings->at[i].exec);
    free(c->recordings);
    c->recordings = NULL;
}

void cuda_recordings_abort(struct cuda_ctx *c) {
    cudaGraph_t graph = NULL;
    if (!c->recording) return;
    cudaStreamEndCapture(c->stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    c->recordings->open->refused = true;
    c->recordings->open = NULL;
    c->recording = false;
}

/* The key's place; a new one, emptied, where it has none yet. */
static struct recording *find(struct cuda_ctx *c, const uint64_t *key, bool *is_new) {
    struct cuda_recordings *r = c->recordings;
    struct recording *oldest = &r->at[0];
    *is_new = false;
    for (int i = 0; i < CUDA_MAX_RECORDINGS; i++) {
        struct recording *x = &r->at[i];
        if (x->last_use && !memcmp(x->key, key, sizeof x->key)) return x;
        if (x->last_use < oldest->last_use) oldest = x;
    }
    if (oldest->exec) {
        /* It may still run. */
        CUDA_NOTE(c, cudaStreamSynchronize(c->stream));
        CUDA_NOTE(c, cudaGraphExecDestroy(oldest->exec));
    }
    memset(oldest, 0, sizeof *oldest);
    memcpy(oldest->key, key, sizeof oldest->key);
    *is_new = true;
    return oldest;
}

int kern_cuda_record_begin(struct kern *k, const uint64_t key[KERN_RECORD_KEY], bool *replayed,
                           struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    struct cuda_recordings *r = c->recordings;
    bool is_new;
    ASSERT(!c->recording && !r->open);
    struct recording *x = find(c, key, &is_new);
    x->last_use = ++r->clock;
    *replayed = x->exec != NULL;
    if (x->exec) {
        if (!CUDA_NOTE(c, cudaGraphLaunch(x->exec, c->stream))) return 0;
        return err_raise(e, E_DEVICE, "CUDA: %s", c->failure);
    }
    if (is_new || x->refused) return 0;
    if (cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        cudaGetLastError();
        x->refused = true;
        return 0;
    }
    r->open = x;
    c->recording = true;
    return 0;
}

int kern_cuda_record_end(struct kern *k, struct err *e) {
    struct cuda_ctx *c = cuda_ctx(k);
    struct cuda_recordings *r = c->recordings;
    struct recording *x = r->open;
    cudaGraph_t graph = NULL;
    if (!x) return 0;
    r->open = NULL;
    c->recording = false;
    c->n_recorded++;
    /* What was enqueued has not run: without a graph it is lost, and that is the caller's error. */
    int rc = CUDA_NOTE(c, cudaStreamEndCapture(c->stream, &graph));
    if (!rc) rc = CUDA_NOTE(c, cudaGraphInstantiate(&x->exec, graph, 0));
    if (graph) cudaGraphDestroy(graph);
    if (!rc) rc = CUDA_NOTE(c, cudaGraphLaunch(x->exec, c->stream));
    if (!rc) return 0;
    x->refused = true;
    return err_raise(e, E_DEVICE, "CUDA: %s", c->failure);
}
