#include "kernels/kernels.h"

#include "base/err.h"

/* Linked in place of kernels/cuda/ where the build has no CUDA (`cuda = absent`). */
int kern_cuda_open(struct kern **out, const struct kern_options *o, struct err *e) {
    (void)o;
    *out = NULL;
    return err_raise(
        e, E_UNSUPPORTED,
        "this build has no CUDA backend, which packing for a GPU and planning for one need (no GPU "
        "is needed to plan): run configure.py where nvcc and cuBLASLt are, or use --device cpu");
}

void kern_cuda_read_kv(const void *page_plane, enum kern_dtype t, int head_dim, float *out) {
    (void)page_plane, (void)t, (void)head_dim, (void)out;
    ASSERT(!"no CUDA in this build");
}
