/* out = x W^T for prompt rows: cuBLASLt, 16-bit floats in, f32 sums, f32 out.
 *
 * Bound by arithmetic from some 300 rows on: 4,096 rows of 4096 x 14336 are 481 GFLOP. Below that
 * by the weights' bytes.
 *
 * One row, one result: cuBLASLt would choose another algorithm for every row count, so it is asked
 * once for each shape of weight, for PIN_ROWS rows, and what it names is used for all counts. Only
 * algorithms qualify that give an element of the output to one tile which walks K from its
 * beginning to its end: no split of K, no reduction scheme, and no more workspace than a counter of
 * tiles (4 bytes, from cuBLASLt 13.0 on), which could hold no partial sums: those that share a
 * tile's K among blocks (stream-K) need more. Which rows share a tile then changes nothing.
 * A matrix whose shape finds no such algorithm goes through the skinny kernel, for every count.
 *
 * The plan depends on the weight (rows, columns, type) and on whether the output is 16-byte aligned
 * (a property of the buffer's stride and offset, thus of the call's place in a model, not of the
 * row count). Plans stand in a fixed table in the context; the heuristic runs at a shape's first
 * product on the host (some 10 us to 1 ms), and no later call allocates: descriptors live on the
 * stack. A full table costs a heuristic a call, and the same results.
 *
 * Weights of another type than x (quantised, or bf16 against f16) become 16-bit floats in slices of
 * rows that fill the context's buffer; the slice's size follows from the columns alone. */
#include "kernels/cuda/cuda.cuh"

#include <stdlib.h>

enum {
    PIN_ROWS = 4096, /* the row count that algorithms are chosen for */
    MAX_PLANS = 256,
    MAX_CANDIDATES = 32,
    SLICE_ROWS = 256,    /* slices are multiples of it */
    MOST_WORKSPACE = 64, /* bytes: a counter, no sums */
};

struct lt_plan {
    int rows, k; /* of W; k is a multiple of 64 */
    bool bf16, aligned;
    bool found; /* else the skinny kernel serves */
    cublasLtMatmulAlgo_t algo;
};

struct cuda_plans {
    int n;
    struct lt_plan plan[MAX_PLANS];
};

int cuda_prompt_open(struct cuda_ctx *c, struct err *e) {
    c->plans = (struct cuda_plans *)calloc(1, sizeof *c->plans);
    if (!c->plans) return err_raise(e, E_NOMEM, "kernels: cannot allocate plans of products");
    return 0;
}

void cuda_prompt_close(struct cuda_ctx *c) {
    free(c->plans);
    c->plans = NULL;
}

/* ---- The problem in cuBLASLt's words ---- */

/* Column-major: D [rows x n] = W^T [rows x k] X [k x n], all three with our rows as columns. */
struct lt_problem {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t w, x, out;
};

static int problem_init(struct cuda_ctx *c, struct lt_problem *p, int rows, int k, bool bf16, int n,
                        int out_stride) {
    cudaDataType type = bf16 ? CUDA_R_16BF : CUDA_R_16F;
    cublasOperation_t turn = CUBLAS_OP_T;
    int rc = CUDA_NOTE_LT(c, cublasLtMatmulDescInit(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (!rc)
        rc = CUDA_NOTE_LT(c, cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_TRANSA,
                                                            &turn, sizeof turn));
    if (!rc) rc = CUDA_NOTE_LT(c, cublasLtMatrixLayoutInit(&p->w, type, k, rows, k));
    if (!rc) rc = CUDA_NOTE_LT(c, cublasLtMatrixLayoutInit(&p->x, type, k, n, k));
    if (!rc)
        rc = CUDA_NOTE_LT(c, cublasLtMatrixLayoutInit(&p->out, CUDA_R_32F, rows, n, out_stride));
    return rc;
}

/* ---- Plans ---- */

/* One block sums an element's whole K, in its order. */
static bool algo_is_plain(const cublasLtMatmulAlgo_t *algo) {
    int32_t split = 1;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    size_t got;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split,
                                             sizeof split, &got) ||
        cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                             sizeof scheme, &got))
        return false;
    return split <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* The algorithm also takes few rows and odd counts. */
static bool algo_takes_any_count(struct cuda_ctx *c, const cublasLtMatmulAlgo_t *algo, int rows,
                                 int k, bool bf16, int out_stride) {
    static const int counts[] = {1, 2, 7, 8, 16, 100, 256, 1000, PIN_ROWS};
    for (int n : counts) {
        struct lt_problem p;
        cublasLtMatmulHeuristicResult_t r = {};
        if (problem_init(c, &p, rows, k, bf16, n, out_stride) ||
            cublasLtMatmulAlgoCheck(c->lt, &p.op, &p.w, &p.x, &p.out, &p.out, algo, &r) ||
            r.workspaceSize > MOST_WORKSPACE)
            return false;
    }
    return true;
}

static int preference_init(struct cuda_ctx *c, cublasLtMatmulPreferenceOpaque_t *pref,
                           uint32_t out_align) {
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE, in_align = KERN_ACT_ALIGN;
    uint64_t workspace = MOST_WORKSPACE;
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        const void *value;
        size_t bytes;
    } wanted[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &in_align, sizeof in_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &in_align, sizeof in_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out_align, sizeof out_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out_align, sizeof out_align},
    };
    int rc = CUDA_NOTE_LT(c, cublasLtMatmulPreferenceInit(pref));
    for (const auto &a : wanted)
        if (!rc)
            rc = CUDA_NOTE_LT(c,
                              cublasLtMatmulPreferenceSetAttribute(pref, a.what, a.value, a.bytes));
    return rc;
}

/* Fill the plan's algorithm: the heuristic's best that qualifies. */
static int plan_choose(struct cuda_ctx *c, struct lt_plan *p) {
    struct lt_problem problem;
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t *found;
    int n_found = 0, out_stride = p->aligned ? (p->rows + 3) & ~3 : p->rows | 1;
    int rc = problem_init(c, &problem, p->rows, p->k, p->bf16, PIN_ROWS, out_stride);
    if (!rc) rc = preference_init(c, &pref, p->aligned ? 16 : 4);
    if (rc) return rc;
    found = (cublasLtMatmulHeuristicResult_t *)calloc(MAX_CANDIDATES, sizeof *found);
    if (!found) return E_NOMEM;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(c->lt, &problem.op, &problem.w, &problem.x, &problem.out,
                                       &problem.out, &pref, MAX_CANDIDATES, found, &n_found);
    if (status != CUBLAS_STATUS_SUCCESS) n_found = 0; /* none fits: not supported */
    for (int i = 0; i < n_found && !p->found; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= MOST_WORKSPACE &&
            algo_is_plain(&found[i].algo) &&
            algo_takes_any_count(c, &found[i].algo, p->rows, p->k, p->bf16, out_stride)) {
            p->algo = found[i].algo;
            p->found = true;
        }
    free(found);
    return 0;
}

/* The plan of a shape, by value: chosen now where the table has not got it. */
static int plan_find(struct cuda_ctx *c, int rows, int k, bool bf16, bool aligned,
                     struct lt_plan *out) {
    struct cuda_plans *all = c->plans;
    for (int i = 0; i < all->n; i++) {
        const struct lt_plan *p = &all->plan[i];
        if (p->rows == rows && p->k == k && p->bf16 == bf16 && p->aligned == aligned) {
            *out = *p;
            return 0;
        }
    }
    *out = {};
    out->rows = rows;
    out->k = k;
    out->bf16 = bf16;
    out->aligned = aligned;
    int rc = plan_choose(c, out);
    if (!rc && all->n < MAX_PLANS) all->plan[all->n++] = *out;
    return rc;
}

/* ---- Products ---- */

/* Every row's output begins at a multiple of 16 bytes, whichever the first row is. */
static bool out_is_aligned(const float *out, int out_stride) {
    return out_stride % 4 == 0 && (uintptr_t)out % 16 == 0;
}

static int multiply(struct cuda_ctx *c, const struct lt_plan *plan, int n, const void *w,
                    const void *x, float *out, int out_stride) {
    struct lt_problem p;
    const float one = 1, zero = 0;
    int rc = problem_init(c, &p, plan->rows, plan->k, plan->bf16, n, out_stride);
    if (rc) return rc;
    return CUDA_NOTE_LT(c, cublasLtMatmul(c->lt, &p.op, &one, w, &p.w, x, &p.x, &zero, out, &p.out,
                                          out, &p.out, &plan->algo, c->lt_workspace, MOST_WORKSPACE,
                                          c->stream));
}

static int skinny(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                  bool x_bf16, float *out, int out_stride) {
    return weight_is_plain(w) ? cuda_skinny_plain(c, n, w, x, x_bf16, out, out_stride)
                              : cuda_skinny_quant(c, n, w, x, x_bf16, out, out_stride);
}

/* Weights in another form: slices of rows as 16-bit floats. */
static int sliced_product(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                          bool x_bf16, float *out, int out_stride) {
    int k = plain_stride(w->cols);
    int slice = (int)(CUDA_DEQUANT_BYTES / ((size_t)k * 2) / SLICE_ROWS) * SLICE_ROWS;
    if (slice == 0) return skinny(c, n, w, x, x_bf16, out, out_stride); /* 196,608 columns */
    for (int first = 0; first < w->rows; first += slice) {
        struct lt_plan plan;
        int rows = w->rows - first < slice ? w->rows - first : slice;
        int rc = plan_find(c, rows, k, x_bf16, out_is_aligned(out, out_stride), &plan);
        if (rc) return rc;
        if (!plan.found) { /* all of it: the skinny kernels know no slices */
            return skinny(c, n, w, x, x_bf16, out, out_stride);
        }
        rc = cuda_weight_rows(c, w, first, rows, x_bf16, c->dequant);
        if (!rc) rc = multiply(c, &plan, n, c->dequant, x, out + first, out_stride);
        if (rc) return rc;
    }
    return 0;
}

int cuda_prompt_product(struct cuda_ctx *c, int n, const struct kern_weight *w, const void *x,
                        bool x_bf16, float *out, int out_stride) {
    struct lt_plan plan;
    if (n <= 0) return 0;
    if (w->dtype != (x_bf16 ? KERN_BF16 : KERN_F16))
        return sliced_product(c, n, w, x, x_bf16, out, out_stride);
    int rc = plan_find(c, w->rows, plain_stride(w->cols), x_bf16, out_is_aligned(out, out_stride),
                       &plan);
    if (rc) return rc;
    if (!plan.found) return skinny(c, n, w, x, x_bf16, out, out_stride);
    return multiply(c, &plan, n, w->data, x, out, out_stride);
}
