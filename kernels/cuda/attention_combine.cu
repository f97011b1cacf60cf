/* Partials of leaves (or of nodes of leaves) of generated rows to the output: for each row and
 * query head, (m, l, o) joined over the aligned binary tree, then o / l. One pass behind
 * attention_gen.cu, whose scratch it reads from the L2 cache: one row of 32 heads at 128K tokens
 * has 256 x 32 partials of 520 bytes, 4 MB.
 *
 * A block takes one (row, head), a warp an aligned node of its tree, a lane 4 dimensions of each
 * 128: eight partials are loaded together and joined in registers, eights on a stack, then the
 * warps' nodes through shared memory. The tree is the same whatever the number of warps is. */

#include "kernels/cuda/attention_gen.cuh"

/* 4 C values of each lane of nodes [n0, n1) of a query, joined over the aligned tree: 8 at a time,
 * eights on a stack. slot: of its node 0; n_q slots between nodes. */
template <int C>
__device__ static void gen_tree(const struct attn_args &a, const struct gen_plan &p, size_t slot,
                                int n_q, int n0, int n1, float &m, float &l, float (&v)[4 * C]) {
    int lane = threadIdx.x & 31;
    float stack_v[24][4 * C], stack_m[24], stack_l[24];
    int depth_of_eight = 0; /* eights so far: bits say which levels of the stack are held */
    m = -INFINITY, l = 0.f;
    for (int n = n0; n < n1; n += 8, depth_of_eight++) {
        float x[8][4 * C], xm[8], xl[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            xm[i] = -INFINITY, xl[i] = 0.f;
#pragma unroll
            for (int c = 0; c < C; c++) {
                float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
                int d = c * 128 + lane * 4;
                size_t at = slot + (size_t)(n + i) * n_q;
                if (n + i < n1 && d < a.head_dim) y = *(const float4 *)(p.o + at * a.head_dim + d);
                x[i][4 * c] = y.x, x[i][4 * c + 1] = y.y;
                x[i][4 * c + 2] = y.z, x[i][4 * c + 3] = y.w;
            }
            if (n + i < n1) {
                float2 y = p.ml[slot + (size_t)(n + i) * n_q];
                xm[i] = y.x, xl[i] = y.y;
            }
        }
#pragma unroll
        for (int d = 1; d < 8; d *= 2)
#pragma unroll
            for (int i = 0; i < 8; i += 2 * d)
                gen_join<4 * C>(xm[i], xl[i], x[i], xm[i + d], xl[i + d], x[i + d]);
        int level = 0;
        m = xm[0], l = xl[0];
#pragma unroll
        for (int i = 0; i < 4 * C; i++) v[i] = x[0][i];
        bool more = n + 8 < n1;
        for (int left = depth_of_eight; more ? left & 1 : left != 0; left >>= 1, level++) {
            if (!(left & 1)) continue;
            float um = stack_m[level], ul = stack_l[level], u[4 * C];
#pragma unroll
            for (int i = 0; i < 4 * C; i++) u[i] = stack_v[level][i];
            gen_join<4 * C>(um, ul, u, m, l, v);
            m = um, l = ul;
#pragma unroll
            for (int i = 0; i < 4 * C; i++) v[i] = u[i];
        }
        if (more) {
            stack_m[level] = m, stack_l[level] = l;
#pragma unroll
            for (int i = 0; i < 4 * C; i++) stack_v[level][i] = v[i];
        }
    }
}

/* A block a (query head, row): its warps take aligned nodes of the tree, the first joins theirs and
 * writes out. C: 128 dimensions each. */
template <int C>
__global__ void __launch_bounds__(GEN_MAX_COMBINE * 32)
    attention_gen_combine_kernel(const __grid_constant__ struct attn_args a,
                                 const __grid_constant__ struct gen_plan p) {
    __shared__ float sh_v[GEN_MAX_COMBINE][C * 128], sh_m[GEN_MAX_COMBINE], sh_l[GEN_MAX_COMBINE];
    int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int n_warps = blockDim.x / 32; /* a power of two */
    pdl_trigger();
    pdl_wait();
    int s = a.row_seq[row];
    struct gen_part part = {0, 0, 0, 0};
    if (s >= 0 && s < a.n_seqs && p.part) part = p.part[s * a.n_kv + head / a.group];
    int q = (row - part.row) * a.group + head % a.group;
    int n = row >= part.row && q < part.n_q ? part.n_nodes : 0, level = 0;
    while (n_warps << level < n) level++;
    float m, l, v[4 * C];
    int n0 = warp << level, n1 = min((warp + 1) << level, n);
#pragma unroll
    for (int i = 0; i < 4 * C; i++) v[i] = 0.f;
    gen_tree<C>(a, p, (size_t)part.first + q, part.n_q, n0, n1, m, l, v);
    if (n > 1) { /* the same for all threads */
        if (lane == 0) sh_m[warp] = m, sh_l[warp] = l;
#pragma unroll
        for (int i = 0; i < 4 * C; i++) sh_v[warp][i * 32 + lane] = v[i];
        for (int d = 1; d < n_warps; d *= 2) { /* neighbours join */
            __syncthreads();
            if (warp % (2 * d)) continue;
            float u[4 * C];
#pragma unroll
            for (int i = 0; i < 4 * C; i++) u[i] = sh_v[warp + d][i * 32 + lane];
            gen_join<4 * C>(m, l, v, sh_m[warp + d], sh_l[warp + d], u);
            if (lane == 0) sh_m[warp] = m, sh_l[warp] = l;
#pragma unroll
            for (int i = 0; i < 4 * C; i++) sh_v[warp][i * 32 + lane] = v[i];
        }
    }
    if (warp) return;
    float by = l == 0.f ? 0.f : 1.f / l; /* a row that sees nothing: zeros */
    float *out = a.out + ((size_t)row * a.n_heads + head) * a.head_dim;
#pragma unroll
    for (int c = 0; c < C; c++) {
        int d = c * 128 + lane * 4;
        float x[4] = {v[4 * c] * by, v[4 * c + 1] * by, v[4 * c + 2] * by, v[4 * c + 3] * by};
        if (d < a.head_dim) gen_vec<4>::put(out + d, x);
    }
}

int cuda_attention_gen_combine(struct cuda_ctx *c, const struct attn_args *a,
                               const struct gen_plan *p, int n_nodes) {
    /* Eight nodes a warp; fewer warps where there are blocks enough to fill the machine. */
    int n_warps = 1;
    int most = a->n_gen * a->n_heads > 1024 ? 4 : GEN_MAX_COMBINE;
    while (n_warps < most && n_warps * 8 < n_nodes) n_warps *= 2;
    dim3 pairs((unsigned)a->n_heads, (unsigned)a->n_gen), block((unsigned)n_warps * 32);
    if (a->head_dim <= 128)
        return CUDA_LAUNCH(c, attention_gen_combine_kernel<1>, pairs, block, 0, *a, *p);
    return CUDA_LAUNCH(c, attention_gen_combine_kernel<2>, pairs, block, 0, *a, *p);
}
