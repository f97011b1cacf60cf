/* Goal: the AVX-512 products give the bits of formats.h's law (the plain table's), AMX's products
 * lie within bf16's rounding of sums in double and closer to them than 8-bit activations do, and a
 * row's bits depend on nothing but the row. Method: random weights of every type in file layout,
 * ragged shapes, inner tables called directly, by a team's threads. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/err.h"
#include "base/threads.h"
#include "kernels/cpu/formats.h"
#include "tests/harness.h"

#if defined(__x86_64__)

static uint64_t rng_state = 1;

static uint32_t random_bits(void) {
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 32);
}

/* About normal, as weights and activations are. */
static float random_normal(void) {
    double s = 0;
    for (int i = 0; i < 12; i++) s += random_bits() * 0x1p-32;
    return (float)(s - 6);
}

static void need_avx512(void) {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vnni"))
        test_skip("this machine has no AVX-512 with VNNI");
}

static void need_amx(void) {
    need_avx512();
    uint32_t a = 7, b, c = 0, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    bool tiles = d >> 24 & 1 && d >> 22 & 1;
    a = 7, c = 1;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (!tiles || !(a >> 5 & 1)) test_skip("this machine has no AMX bf16 or no AVX512_BF16");
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) test_skip("the system does not permit AMX");
}

static void *zeroed(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(p);
    return memset(p, 0, (bytes + 64) / 64 * 64);
}

static void put_f16(uint8_t *p, float v) {
    uint16_t h = f32_to_f16(v);
    memcpy(p, &h, 2);
}

/* Random weights of n x cols in file layout. */
static uint8_t *random_file(enum kern_dtype t, size_t n) {
    size_t bytes = kern_dtype_bytes(t, n), block = kern_dtype_block_bytes(t);
    uint8_t *file = zeroed(bytes);
    if (cpu_format_is_float(t)) {
        for (size_t i = 0; i < n; i++) {
            float v = random_normal() * 0.05f;
            uint16_t h = t == KERN_F16 ? f32_to_f16(v) : f32_to_bf16(v);
            if (t == KERN_F32) memcpy(file + 4 * i, &v, 4);
            else memcpy(file + 2 * i, &h, 2);
        }
        return file;
    }
    for (size_t i = 0; i < bytes; i++) file[i] = (uint8_t)random_bits();
    for (uint8_t *p = file; p < file + bytes; p += block) {
        float scale = (t >= KERN_Q4_K ? 2e-4f : 1e-2f) * (0.5f + random_bits() * 0x1p-32f);
        put_f16(p + (t == KERN_Q6_K ? 208 : 0), scale);
        if (t == KERN_Q4_1 || t == KERN_Q5_1) put_f16(p + 2, -8 * scale);
        if (t == KERN_Q4_K || t == KERN_Q5_K) put_f16(p + 2, scale * 7);
    }
    return file;
}

struct matrix {
    struct kern_weight w;
    void *data, *file;
};

static struct matrix matrix_pack(const struct cpu_matmul_isa *isa, enum kern_dtype t, int rows,
                                 int cols, void *file) {
    struct matrix m = {.w = {.dtype = t, .rows = rows, .cols = cols}, .file = file};
    m.w.bytes = isa->weight_bytes(t, rows, cols);
    m.w.data = m.data = zeroed(m.w.bytes);
    int panels = (rows + isa->panel_rows - 1) / isa->panel_rows;
    isa->weight_pack(&m.w, m.data, file, 0, panels / 2);
    isa->weight_pack(&m.w, m.data, file, panels / 2, panels);
    return m;
}

/* out[n][stride] from column 3 on; everything around it must stay as it was. */
enum { OFFSET = 3, SENTINEL = 0x7fc12345 };

struct product_job {
    const struct cpu_matmul_isa *isa;
    const struct cpu_ctx *c;
    enum cpu_class cls;
    int n;
    const struct kern_weight *w;
    const uint8_t *act;
    float *out;
    int stride;
    uint8_t *scratch; /* SCRATCH a thread */
};
enum { SCRATCH = 1 << 20 };

static void product_share(void *arg, int idx, int n_threads) {
    const struct product_job *j = arg;
    j->isa->matmul(j->c, j->cls, j->n, j->w, j->act, j->out, j->stride, OFFSET,
                   j->scratch + (size_t)idx * SCRATCH, idx, n_threads);
}

static float *product(const struct cpu_matmul_isa *isa, bool amx, enum cpu_class cls,
                      const struct matrix *m, const float *x, int n, int n_threads) {
    struct err e = {0};
    struct threads *team;
    assert_ok(threads_open(&team, n_threads, &e), e);
    struct cpu_ctx c = {.threads = team,
                        .amx = amx,
                        .f32_weights = m->w.dtype == KERN_F32,
                        .float_weights = cpu_format_is_float(m->w.dtype)};
    int stride = m->w.rows + 7;
    size_t act_bytes = isa->act_bytes(&c, cls, n, m->w.cols);
    uint8_t *act = zeroed(act_bytes);
    for (size_t i = 0; i < act_bytes; i++) act[i] = 0xff; /* padding may hold NaN */
    for (int r = n - 1; r >= 0; r--)
        isa->act_row(&c, cls, act, r, n, m->w.cols, x + (size_t)r * (size_t)m->w.cols);
    uint32_t *out = zeroed((size_t)n * (size_t)stride * 4);
    for (size_t i = 0; i < (size_t)n * (size_t)stride; i++) out[i] = SENTINEL;
    struct product_job j = {isa, &c, cls, n, &m->w, act, (float *)(void *)out, stride, NULL};
    j.scratch = zeroed((size_t)n_threads * SCRATCH);
    threads_deal(team, cls, cpu_n_panels(isa, &m->w));
    threads_run(team, product_share, &j);
    threads_close(team);
    float *packed = zeroed((size_t)n * (size_t)m->w.rows * 4);
    for (int r = 0; r < n; r++) {
        for (int i = 0; i < stride; i++)
            if (i < OFFSET || i >= OFFSET + m->w.rows)
                assert_int_equal(out[(size_t)r * (size_t)stride + (size_t)i], SENTINEL);
        memcpy(packed + (size_t)r * (size_t)m->w.rows, out + (size_t)r * (size_t)stride + OFFSET,
               (size_t)m->w.rows * 4);
    }
    free(act), free(out), free(j.scratch);
    return packed;
}

static float *random_rows(int n, int cols) {
    float *x = zeroed((size_t)n * (size_t)cols * 4);
    for (int r = 0; r < n; r++) {
        float scale = ldexpf(1, (int)(random_bits() % 9) - 4);
        for (int i = 0; i < cols; i++)
            x[(size_t)r * (size_t)cols + (size_t)i] = random_normal() * scale;
    }
    return x;
}

static int cols_of(enum kern_dtype t, int i) {
    static const int floats[] = {1, 33, 96, 575}, small[] = {32, 96, 576, 1536};
    return kern_dtype_block(t) == 256 ? 256 * (i + 1)
           : cpu_format_is_float(t)   ? floats[i]
                                      : small[i];
}

static const int shapes_rows[] = {1, 15, 48, 77};

static void test_avx512_is_the_law(void) {
    need_avx512();
    for (int t = 0; t < KERN_N_DTYPES; t++)
        for (int s = 0; s < 4; s++) {
            int rows = shapes_rows[s], cols = cols_of((enum kern_dtype)t, 3 - s);
            void *file = random_file((enum kern_dtype)t, (size_t)rows * (size_t)cols);
            struct matrix a = matrix_pack(&cpu_matmul_avx512, (enum kern_dtype)t, rows, cols, file);
            struct matrix b = matrix_pack(&cpu_matmul_plain, (enum kern_dtype)t, rows, cols, file);
            for (int n = 1; n < 20; n += n < 13 ? 1 : 3) {
                float *x = random_rows(n, cols);
                x[0] = n == 5 ? NAN : n == 6 ? 0 : x[0];
                if (n == 6) memset(x, 0, (size_t)cols * 4); /* a row of zeros */
                float *got = product(&cpu_matmul_avx512, false, CPU_GEN, &a, x, n, 2);
                float *want = product(&cpu_matmul_plain, false, CPU_GEN, &b, x, n, 1);
                float *prompt = product(&cpu_matmul_avx512, false, CPU_PROMPT, &a, x, n, 1);
                for (int i = 0; i < n * rows; i++) {
                    bool nan = isnan(want[i]) && isnan(got[i]) && isnan(prompt[i]);
                    if (!nan && (memcmp(&got[i], &want[i], 4) || memcmp(&prompt[i], &want[i], 4)))
                        fail_msg("%s %dx%d, %d rows, output %d: %.9g, prompt %.9g, law %.9g",
                                 kern_dtype_name((enum kern_dtype)t), rows, cols, n, i,
                                 (double)got[i], (double)prompt[i], (double)want[i]);
                }
                free(x), free(got), free(want), free(prompt);
            }
            free(a.data), free(b.data), free(file);
        }
}

/* Relative error of both kinds of product against sums in double over the file's weights. */
static void test_amx_against_double(void) {
    need_amx();
    for (int t = 0; t < KERN_N_DTYPES; t++) {
        double int8_square = 0, bf16_square = 0, ref_square = 0;
        for (int s = 0; s < 4; s++) {
            int rows = shapes_rows[s], cols = cols_of((enum kern_dtype)t, s), n = 5 + 14 * s;
            void *file = random_file((enum kern_dtype)t, (size_t)rows * (size_t)cols);
            struct matrix m = matrix_pack(&cpu_matmul_avx512, (enum kern_dtype)t, rows, cols, file);
            float *plain = zeroed((size_t)rows * (size_t)cols * 4);
            kern_dequantize((enum kern_dtype)t, file, plain, (size_t)rows * (size_t)cols);
            float *x = random_rows(n, cols);
            float *bf16 = product(&cpu_matmul_avx512, true, CPU_PROMPT, &m, x, n, 2);
            float *int8 = product(&cpu_matmul_avx512, true, CPU_GEN, &m, x, n, 2);
            for (int r = 0; r < n; r++)
                for (int i = 0; i < rows; i++) {
                    double sum = 0, magnitude = 0;
                    for (int k = 0; k < cols; k++) {
                        double p = (double)plain[(size_t)i * (size_t)cols + (size_t)k] *
                                   (double)x[(size_t)r * (size_t)cols + (size_t)k];
                        sum += p;
                        magnitude += fabs(p);
                    }
                    size_t at = (size_t)r * (size_t)rows + (size_t)i;
                    /* Two factors rounded to 8 bits: 2^-8 each, and their product 2^-16; sums of up
                     * to 2,048 in f32: some 2^-14. */
                    double bound = t == KERN_F32 ? 0x1p-13 : 0x1p-7 + 0x1p-13;
                    assert_near(bf16[at], sum, magnitude * bound + 1e-30);
                    int8_square += (int8[at] - sum) * (int8[at] - sum);
                    bf16_square += (bf16[at] - sum) * (bf16[at] - sum);
                    ref_square += sum * sum;
                }
            free(file), free(m.data), free(plain), free(x), free(bf16), free(int8);
        }
        printf("# %s: relative error %.2e bf16 tiles, %.2e generated rows\n",
               kern_dtype_name((enum kern_dtype)t), sqrt(bf16_square / ref_square),
               sqrt(int8_square / ref_square));
        if (!cpu_format_is_float((enum kern_dtype)t)) assert_true(bf16_square < int8_square);
    }
}

/* Row r of 64 has the same bits in a call of any n > r rows by any threads, and at any other place.
 */
static void invariance(bool amx, enum cpu_class cls) {
    enum { ROWS = 77, N = 64 };
    const struct cpu_matmul_isa *isa = &cpu_matmul_avx512;
    for (int t = 0; t < KERN_N_DTYPES; t++) {
        /* Tiles: past one slab of K, whose sums pass through memory. */
        int cols = cls == CPU_PROMPT && t == KERN_Q4_1 ? 2304 : t == KERN_F16 ? 161 : 256;
        void *file = random_file((enum kern_dtype)t, (size_t)ROWS * (size_t)cols);
        struct matrix m = matrix_pack(isa, (enum kern_dtype)t, ROWS, cols, file);
        float *x = random_rows(N, cols), *moved = zeroed((size_t)N * (size_t)cols * 4);
        float *want = product(isa, amx, cls, &m, x, N, 1);
        for (int n = 1; n <= N; n++) {
            float *got = product(isa, amx, cls, &m, x, n, 1 + n % 5);
            assert_memory_equal(got, want, (size_t)n * ROWS * 4);
            free(got);
            int shift = (int)(random_bits() % N); /* row r moves to (r + shift) % n */
            for (int r = 0; r < n; r++)
                memcpy(moved + (size_t)((r + shift) % n) * (size_t)cols,
                       x + (size_t)r * (size_t)cols, (size_t)cols * 4);
            got = product(isa, amx, cls, &m, moved, n, 3);
            for (int r = 0; r < n; r++)
                assert_memory_equal(got + (r + shift) % n * ROWS, want + r * ROWS, ROWS * 4);
            free(got);
        }
        free(file), free(m.data), free(x), free(moved), free(want);
    }
}

static void test_avx512_rows(void) {
    need_avx512();
    invariance(false, CPU_GEN);
}

static void test_amx_rows(void) {
    need_amx();
    invariance(true, CPU_PROMPT);
}

static void test_embedding_rows(void) {
    for (int t = 0; t < KERN_N_DTYPES; t++) {
        int rows = 21, cols = cols_of((enum kern_dtype)t, 2);
        void *file = random_file((enum kern_dtype)t, (size_t)rows * (size_t)cols);
        struct matrix m = matrix_pack(&cpu_matmul_avx512, (enum kern_dtype)t, rows, cols, file);
        float *plain = zeroed((size_t)rows * (size_t)cols * 4), *got = zeroed((size_t)cols * 4);
        kern_dequantize((enum kern_dtype)t, file, plain, (size_t)rows * (size_t)cols);
        for (int r = 0; r < rows; r++) {
            cpu_matmul_avx512.weight_row(&m.w, r, got);
            for (int i = 0; i < cols; i++) /* equal as numbers: zero may change its sign */
                assert_near(got[i], plain[(size_t)r * (size_t)cols + (size_t)i], 0);
        }
        free(file), free(m.data), free(plain), free(got);
    }
}

#else
static void test_avx512_is_the_law(void) {
    test_skip("not an x86-64 machine");
}
static void test_amx_against_double(void) {
    test_skip("not an x86-64 machine");
}
static void test_avx512_rows(void) {
    test_skip("not an x86-64 machine");
}
static void test_amx_rows(void) {
    test_skip("not an x86-64 machine");
}
static void test_embedding_rows(void) {
    test_skip("not an x86-64 machine");
}
#endif

const struct test tests[] = {
    {"avx512_is_the_law", TEST_QUICK, 60000, test_avx512_is_the_law},
    {"avx512_rows", TEST_QUICK, 60000, test_avx512_rows},
    {"amx_against_double", TEST_QUICK, 60000, test_amx_against_double},
    {"amx_rows", TEST_QUICK, 60000, test_amx_rows},
    {"avx512_embedding_rows", TEST_QUICK, 20000, test_embedding_rows},
    {0},
};
