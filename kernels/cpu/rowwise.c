/* Row-wise arithmetic, compiled once for each instruction set with the same bits: 16 partial sums
 * in a fixed order, multiply and add rounded apart. */
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vexp.h"

/* Sum of squares: lane i % 16 takes element i; a tail counts as zeros. */
static float sum_squares(const float *x, int n) {
    vf acc[VN];
    for (int v = 0; v < VN; v++) acc[v] = v_set1(0.f);
    int i = 0;
    for (; i + 16 <= n; i += 16)
        for (int v = 0; v < VN; v++) {
            vf a = v_load(x + i + v * VL);
            acc[v] = v_add(acc[v], v_mul(a, a));
        }
    if (i < n) {
        float tail[16] = {0};
        memcpy(tail, x + i, (size_t)(n - i) * sizeof *x);
        for (int v = 0; v < VN; v++) {
            vf a = v_load(tail + v * VL);
            acc[v] = v_add(acc[v], v_mul(a, a));
        }
    }
    return v_sum16(acc);
}

static void scale_by_weight(const float *x, const float *weight, float scale, int n, float *out) {
    int i = 0;
    for (; i + VL <= n; i += VL)
        v_store(out + i, v_mul(v_mul(v_load(x + i), v_set1(scale)), v_load(weight + i)));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void norm(float *x, const float *delta, const float *weight, float eps, int cols,
                 float *out) {
    if (delta)
        for (int i = 0; i < cols; i++) x[i] += delta[i];
    float scale = 1.f / sqrtf(sum_squares(x, cols) / (float)cols + eps);
    scale_by_weight(x, weight, scale, cols, out);
}

ALWAYS_INLINE vf silu_mul(vf g, vf u) {
    vf one = v_set1(1.f);
    return v_mul(v_div(g, v_add(one, v_exp(v_sub(v_set1(0.f), g)))), u);
}

static void gate(const float *g, const float *u, int cols, float *out) {
    int i = 0;
    for (; i + VL <= cols; i += VL) v_store(out + i, silu_mul(v_load(g + i), v_load(u + i)));
    if (i < cols) {
        float a[VL] = {0}, b[VL] = {0};
        size_t bytes = (size_t)(cols - i) * sizeof *g;
        memcpy(a, g + i, bytes);
        memcpy(b, u + i, bytes);
        v_store(a, silu_mul(v_load(a), v_load(b)));
        memcpy(out + i, a, bytes);
    }
}

/* cos and sin in double: quadrant q and remainder by pi/2 in three parts of at most 27 bits, so
 * that q times each of the first two is exact below 2^26; then Taylor polynomials on [-pi/4, pi/4],
 * whose error of 1e-13 is far under half an f32 ulp. One loop without branches, so that the
 * compiler may use vectors of any width: every lane is its own. */
static void rope_angles(const float *inv_freq, int half, int32_t position, float scale,
                        float *cos_out, float *sin_out) {
    const double magic = 0x1.8p52;
    for (int i = 0; i < half; i++) {
        double a = (double)position * (double)inv_freq[i];
        double q = (a * 0x1.45f306dc9c883p-1 + magic) - magic;
        double r = ((a - q * 0x1.921fb54p0) - q * 0x1.10b461p-30) - q * 0x1.a62633145c06ep-58;
        double z = r * r;
        double s = 0x1.6124613a86d09p-33, c = -0x1.93974a8c07c9dp-37;
        s = s * z - 0x1.ae64567f544e4p-26;
        s = s * z + 0x1.71de3a556c734p-19;
        s = s * z - 0x1.a01a01a01a01ap-13;
        s = s * z + 0x1.1111111111111p-7;
        s = s * z - 0x1.5555555555555p-3;
        s = r + r * z * s;
        c = c * z + 0x1.1eed8eff8d898p-29;
        c = c * z - 0x1.27e4fb7789f5cp-22;
        c = c * z + 0x1.a01a01a01a01ap-16;
        c = c * z - 0x1.6c16c16c16c17p-10;
        c = c * z + 0x1.5555555555555p-5;
        c = c * z - 0.5;
        c = c * z + 1.0;
        /* q mod 4 without integers: which of the two, and the sign. */
        double half_q = q * 0.5, odd = half_q - ((half_q + magic) - magic); /* 0 or +-0.5 */
        double quarter = (q - odd * 2) * 0.25; /* whole or +-0.5 away */
        double flip = quarter - ((quarter + magic) - magic);
        double sign = 1 - 4 * (flip < 0 ? -flip : flip); /* 1, or -1 where q - odd is 2 mod 4 */
        double turn = odd * 2;                           /* -1, 0 or 1: quadrants beyond sign's */
        bool swap = turn != 0;
        double cs = swap ? -turn * s : c, sn = swap ? turn * c : s;
        cos_out[i] = (float)(sign * cs) * scale;
        sin_out[i] = (float)(sign * sn) * scale;
    }
}

static void rope_head(float *x, int head_dim, const float *bias, const float *norm_weight,
                      float eps, const float *cos, const float *sin, int dim, bool interleaved) {
    if (bias)
        for (int i = 0; i < head_dim; i++) x[i] += bias[i];
    if (norm_weight) norm(x, NULL, norm_weight, eps, head_dim, x);
    if (!cos) return;
    int half = dim / 2;
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = a * sin[i] + b * cos[i];
        }
    } else {
        for (int i = 0; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = a * sin[i] + b * cos[i];
        }
    }
}

/* Chunk by chunk, so that only the chunk of the first maximum is searched for its place. */
static bool row_max(const float *x, int n, float *max, int *idx) {
    enum { CHUNK = 1024 };
    float best = -INFINITY;
    int best_begin = 0;
    bool nan = false;
    for (int begin = 0; begin < n; begin += CHUNK) {
        int end = begin + CHUNK < n ? begin + CHUNK : n, i = begin;
        vf m[VN];
        for (int v = 0; v < VN; v++) m[v] = v_set1(-INFINITY);
        for (; i + 16 <= end; i += 16)
            for (int v = 0; v < VN; v++) {
                vf a = v_load(x + i + v * VL);
                m[v] = v_max(a, m[v]);
                nan |= v_any_nan(a);
            }
        float top = v_max16(m);
        for (; i < end; i++) {
            top = x[i] > top ? x[i] : top;
            nan |= x[i] != x[i];
        }
        if (top > best) {
            best = top;
            best_begin = begin;
        }
    }
    *max = best;
    *idx = best_begin;
    if (nan) return false;
    while (*idx < n - 1 && x[*idx] != best) ++*idx;
    return true;
}

/* 16 lanes of f32 over 16 terms each, then of double. */
static double exp_sum(const float *x, int n, float max, float inv_t, float *out) {
    enum { CHUNK = 256 };
    double lane[16] = {0};
    for (int begin = 0; begin < n; begin += CHUNK) {
        int end = begin + CHUNK < n ? begin + CHUNK : n, i = begin;
        vf acc[VN];
        for (int v = 0; v < VN; v++) acc[v] = v_set1(0.f);
        for (; i + 16 <= end; i += 16)
            for (int v = 0; v < VN; v++) {
                vf a = v_sub(v_load(x + i + v * VL), v_set1(max));
                vf e = v_exp(v_mul(a, v_set1(inv_t)));
                acc[v] = v_add(acc[v], e);
                if (out) v_store(out + i + v * VL, e);
            }
        float a[16];
        if (i < end) {
            size_t bytes = (size_t)(end - i) * sizeof *x;
            for (int j = 0; j < 16; j++) a[j] = -INFINITY;
            memcpy(a, x + i, bytes);
            for (int v = 0; v < VN; v++) {
                vf e = v_exp(v_mul(v_sub(v_load(a + v * VL), v_set1(max)), v_set1(inv_t)));
                acc[v] = v_add(acc[v], e);
                v_store(a + v * VL, e);
            }
            if (out) memcpy(out + i, a, bytes);
        }
        for (int v = 0; v < VN; v++) v_store(a + v * VL, acc[v]);
        for (int j = 0; j < 16; j++) lane[j] += (double)a[j];
    }
    for (int k = 8; k; k /= 2)
        for (int j = 0; j < k; j++) lane[j] += lane[j + k];
    return lane[0];
}

const struct cpu_rowwise_isa CPU_NAME(cpu_rowwise) = {
    .norm = norm,
    .gate = gate,
    .rope_angles = rope_angles,
    .rope_head = rope_head,
    .max = row_max,
    .exp_sum = exp_sum,
};
