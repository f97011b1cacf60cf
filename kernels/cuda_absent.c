#include "kernels/kernels.h"

#include "base/err.h"

/* Linked in place of kernels/cuda/ where the build has no CUDA compiler. */
int kern_cuda_open(struct kern **out, const struct kern_options *o, struct err *e) {
    (void)o;
    *out = NULL;
    return err_raise(
        e, E_UNSUPPORTED,
        "this build has no CUDA backend (configure.py found no nvcc); use --backend cpu");
}
