/* Products: which kernel serves a row follows from its class. Generated rows go to the skinny
 * kernel of the weight's layout, prompt rows to cuBLASLt; where a call holds both, the weights are
 * read twice. */
#include "kernels/cuda/cuda.cuh"

size_t kern_cuda_act_bytes(const struct kern *k, struct kern_rows rows, int cols) {
    (void)k;
    return ((size_t)rows.n_gen + (size_t)rows.n_prompt) * (size_t)act_stride(cols) * 2;
}

int kern_cuda_matmul(struct kern *k, struct kern_rows rows, const struct kern_weight *w,
                     struct kern_act act, float *out, int out_stride, int out_offset) {
    struct cuda_ctx *c = cuda_ctx(k);
    bool bf16 = act_is_bf16(&act);
    int rc = 0;
    ASSERT(kern_cuda_act_bytes(k, rows, w->cols) <= act.bytes);
    out += out_offset;
    if (rows.n_gen > 0)
        rc = weight_is_plain(w)
                 ? cuda_skinny_plain(c, rows.n_gen, w, act.data, bf16, out, out_stride)
                 : cuda_skinny_quant(c, rows.n_gen, w, act.data, bf16, out, out_stride);
    if (rc || rows.n_prompt <= 0) return rc;
    const uint16_t *x = (const uint16_t *)act.data + (size_t)rows.n_gen * act_stride(w->cols);
    return cuda_prompt_product(c, rows.n_prompt, w, x, bf16, out + (size_t)rows.n_gen * out_stride,
                               out_stride);
}
