/* Products: y = W x at the shapes of an 8B model in bf16 and in every quantised format, and at the
 * default target's. Generated rows (1 to 16) are bound by the bytes of W, prompt rows by the matrix
 * units. Copies of the packed matrix take turns, so that a train reads at least 1 GB that no cache
 * holds (1,024 copies at most: a small matrix of the default target goes through less). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "bench/kernels_bench.h"

enum { MAX_COPIES = 1024, MAX_ROWS = 4096, SAMPLES = 192 };

struct product {
    struct kbench *b;
    enum kern_dtype t;
    int rows, cols, copies;
    uint8_t *src; /* in the file's layout */
    void *memory;
    struct kern_weight w; /* the first copy */
    size_t step;          /* bytes between copies */
    struct kern_rows n;
    struct kern_act act;
    float *x, *out; /* host [rows][cols], device [rows][w.rows] */
};

/* ---- Weights ---- */

/* Random numbers of about 2^-7 as t has them: floats by their bits, blocks with sane scales. */
static uint8_t *random_weights(struct kbench *b, enum kern_dtype t, size_t n) {
    size_t bytes = kern_dtype_bytes(t, n), size = kern_dtype_block_bytes(t);
    uint8_t *p = kbench_host(bytes + 8);
    uint64_t s = kbench_seed(b), keep = ~0ull, set = 0;
    if (t == KERN_F32) keep = 0x80FFFFFF80FFFFFF, set = 0x3C0000003C000000;
    if (t == KERN_BF16) keep = 0x80FF80FF80FF80FF, set = 0x3C003C003C003C00;
    if (t == KERN_F16) keep = 0x87FF87FF87FF87FF, set = 0x2000200020002000;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t r = (kbench_random(&s) & keep) | set;
        memcpy(p + i, &r, 8);
    }
    if (kern_dtype_block(t) == 1) return p;
    uint16_t scale = f32_to_f16(0.01f);
    size_t at = t == KERN_Q6_K ? size - 2 : 0;
    bool has_min = t == KERN_Q4_1 || t == KERN_Q5_1 || t == KERN_Q4_K || t == KERN_Q5_K;
    for (size_t i = 0; i < bytes; i += size) {
        memcpy(p + i + at, &scale, 2);
        if (has_min) memcpy(p + i + 2, &scale, 2);
    }
    return p;
}

static void open_matrix(struct product *p, int want) {
    struct kbench *b = p->b;
    struct err e = {0};
    size_t bytes = b->k->ops->weight_bytes(b->k, p->t, p->rows, p->cols);
    if (!bytes) kbench_die("no such product:", kern_dtype_name(p->t));
    p->step = (bytes + 255) / 256 * 256;
    p->copies = want > 0 ? want : (int)(1.1e9 / (double)p->step) + 1;
    if (p->copies > MAX_COPIES) p->copies = MAX_COPIES;
    p->src = random_weights(b, p->t, (size_t)p->rows * (size_t)p->cols);
    p->memory = kbench_reserve(b, (size_t)p->copies * p->step);
    kbench_must(b,
                b->k->ops->weight_pack(b->k, &p->w, p->memory, p->t, p->rows, p->cols, p->src, &e),
                &e, "weight_pack:");
    for (int i = 1; i < p->copies; i++)
        kbench_must(b,
                    b->k->ops->copy_page(b->k, (uint8_t *)p->memory + (size_t)i * p->step,
                                         p->memory, bytes),
                    NULL, "copy_page:");
}

static void close_matrix(struct product *p) {
    kbench_free(p->b, p->memory);
    free(p->src);
}

/* ---- One point ---- */

static int call(void *arg, int i) {
    struct product *p = arg;
    struct kern_weight w = p->w;
    w.data = (const uint8_t *)p->memory + (size_t)(i % p->copies) * p->step;
    return p->b->k->ops->matmul(p->b->k, p->n, &w, p->act, p->out, p->rows, 0);
}

/* A sample of outputs in double, from the file's weights and the activations as they are packed.
 * Tolerance: the kernels may round each weight to 16 bits (2^-11 of it, offsets included); of a sum
 * of independent errors, 1/100 of sqrt(sum of squares) is some thirty deviations, and a wrong
 * weight or column is as large as that sum itself. */
static void check(const struct product *p, const char *what) {
    int n = p->n.n_gen + p->n.n_prompt;
    size_t row_bytes = kern_dtype_bytes(p->t, (size_t)p->cols);
    float *w = kbench_host((size_t)p->cols * sizeof *w), got;
    uint64_t s = kbench_seed(p->b);
    for (int k = 0; k < SAMPLES; k++) {
        int i = k == 0 ? p->rows - 1 : (int)(kbench_random(&s) % (uint64_t)p->rows);
        int r = k < n ? k : (int)(kbench_random(&s) % (uint64_t)n);
        double want = 0, squares = 0;
        kern_dequantize(p->t, p->src + (size_t)i * row_bytes, w, (size_t)p->cols);
        for (int j = 0; j < p->cols; j++) {
            float x = p->x[(size_t)r * (size_t)p->cols + (size_t)j];
            x = p->act.partner == KERN_BF16 ? bf16_to_f32(f32_to_bf16(x))
                                            : f16_to_f32(f32_to_f16(x));
            want += (double)w[j] * (double)x;
            squares += (double)w[j] * (double)w[j] * (double)x * (double)x;
        }
        const float *at = p->out + (size_t)r * (size_t)p->rows + (size_t)i;
        kbench_get(p->b, &got, at, sizeof got);
        kbench_check(what, (long long)r * p->rows + i, (double)got, want, 1e-2 * sqrt(squares));
    }
    free(w);
}

static void point(struct product *p, const char *shape, int n_rows, bool prompt) {
    struct kbench *b = p->b;
    size_t n = (size_t)n_rows;
    p->n = prompt ? (struct kern_rows){.n_prompt = n_rows} : (struct kern_rows){.n_gen = n_rows};
    p->act.bytes = b->k->ops->act_bytes(b->k, p->n, p->cols);
    p->act.data = kbench_reserve(b, p->act.bytes);
    p->act.partner = p->w.dtype;
    p->x = kbench_floats(b, n * (size_t)p->cols, 1);
    float *x = kbench_put(b, p->x, n * (size_t)p->cols * sizeof *p->x);
    p->out = kbench_reserve(b, n * (size_t)p->rows * sizeof *p->out);
    kbench_must(b, b->k->ops->pack(b->k, p->n, p->cols, x, p->act), NULL, "pack:");
    kbench_must(b, call(p, p->copies - 1), NULL, "matmul:");
    /* Where packing made a matrix larger, the file's bytes are the floor. */
    double file_bytes = (double)kern_dtype_bytes(p->t, (size_t)p->rows * (size_t)p->cols);
    check(p, prompt ? "a prompt product is wrong" : "a product is wrong");
    struct kbench_point row = {.family = "products",
                               .kernel = prompt ? "prompt" : "generated",
                               .dtype = kern_dtype_name(p->t),
                               .shape = shape,
                               .rows = n_rows,
                               .batch = 1,
                               .bytes = fmin((double)p->w.bytes, file_bytes),
                               .distinct = (double)p->w.bytes * p->copies};
    bool large = p->rows * (double)p->cols > 1e7;
    if (prompt) row.flops = 2.0 * n_rows * p->rows * p->cols;
    if (large && !prompt && n_rows <= 8) {
        if (p->t == KERN_BF16) row.goal = 0.9;
        if (p->t == KERN_Q8_0 || p->t == KERN_Q4_K) row.goal = n_rows == 1 ? 0.75 : 0.65;
    }
    kbench_measure(b, &row, prompt ? 4 : p->copies < 8 ? 8 : p->copies, call, p);
    kbench_print(b, &row);
    free(p->x);
    kbench_free(b, x);
    kbench_free(b, p->out);
    kbench_free(b, p->act.data);
}

/* ---- Which ---- */

static const struct {
    const char *shape; /* outputs x columns */
    int rows, cols;
    enum kern_dtype t;
    int n_rows[8]; /* of generated ones, 0 ends */
    int prompt;    /* rows of a prompt point, 0: none */
} cases[] = {
    {"4096x14336", 4096, 14336, KERN_BF16, {1, 2, 4, 5, 8, 16, 32}, MAX_ROWS},
    {"14336x4096", 14336, 4096, KERN_BF16, {1, 2, 4, 5, 8, 16, 32}, 0},
    {"28672x4096", 28672, 4096, KERN_BF16, {1, 2, 4, 5, 8, 16, 32}, MAX_ROWS},
    {"6144x4096", 6144, 4096, KERN_BF16, {1, 5, 8, 32}, MAX_ROWS},
    {"4096x4096", 4096, 4096, KERN_BF16, {1, 5, 8, 32}, MAX_ROWS},
    {"128256x4096", 128256, 4096, KERN_BF16, {1, 2, 4, 5, 8, 16, 32}, 0},
    {"16384x2048", 16384, 2048, KERN_BF16, {1, 5, 8}, 0},
    {"2048x8192", 2048, 8192, KERN_BF16, {1, 5, 8}, 0},
    {"2048x2048", 2048, 2048, KERN_BF16, {1, 5, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q8_0, {1, 2, 4, 5, 8, 16}, MAX_ROWS},
    {"4096x14336", 4096, 14336, KERN_Q4_K, {1, 2, 4, 5, 8, 16}, MAX_ROWS},
    {"28672x4096", 28672, 4096, KERN_Q4_K, {1, 5, 8}, 0},
    {"6144x4096", 6144, 4096, KERN_Q4_K, {1, 5, 8}, 0},
    {"4096x4096", 4096, 4096, KERN_Q4_K, {1, 5, 8}, 0},
    {"128256x4096", 128256, 4096, KERN_Q6_K, {1, 5, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_F16, {1, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q4_0, {1, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q4_1, {1, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q5_0, {1, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q5_1, {1, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q5_K, {1, 8}, 0},
    {"4096x14336", 4096, 14336, KERN_Q6_K, {1, 8}, 0},
    {"960x576", 960, 576, KERN_Q4_1, {1, 5, 16}, 512},
    {"576x576", 576, 576, KERN_Q4_1, {1, 5, 16}, 0},
    {"3072x576", 3072, 576, KERN_Q4_1, {1, 5, 16}, 512},
    {"576x1536", 576, 1536, KERN_Q4_1, {1, 5, 16}, 512},
    {"49152x576", 49152, 576, KERN_Q8_0, {1, 5, 16}, 0},
};

void kbench_products(struct kbench *b) {
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct product p = {.b = b, .t = cases[c].t, .rows = cases[c].rows, .cols = cases[c].cols};
        char name[64];
        snprintf(name, sizeof name, "%s %s", kern_dtype_name(p.t), cases[c].shape);
        if (b->match && !strstr(name, b->match)) continue;
        open_matrix(&p, 0);
        for (int i = 0; cases[c].n_rows[i]; i++) {
            int n = cases[c].n_rows[i];
            if (b->quick && n != 1 && n != 8) continue;
            point(&p, cases[c].shape, n, false);
        }
        if (cases[c].prompt && !b->quick) point(&p, cases[c].shape, cases[c].prompt, true);
        close_matrix(&p);
    }
}
