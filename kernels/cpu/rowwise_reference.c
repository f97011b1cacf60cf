/* Row-wise arithmetic in double: what the vector forms are checked against. */
#include <math.h>

#include "kernels/cpu/cpu.h"

static void norm(float *x, const float *delta, const float *weight, float eps, int cols,
                 float *out) {
    double sum = 0;
    for (int i = 0; i < cols; i++) {
        if (delta) x[i] += delta[i];
        sum += (double)x[i] * (double)x[i];
    }
    double scale = 1 / sqrt(sum / cols + (double)eps);
    for (int i = 0; i < cols; i++) out[i] = (float)((double)x[i] * scale * (double)weight[i]);
}

static void gate(const float *g, const float *u, int cols, float *out) {
    for (int i = 0; i < cols; i++)
        out[i] = (float)((double)g[i] / (1 + exp(-(double)g[i])) * (double)u[i]);
}

static void rope_angles(const float *inv_freq, int half, int32_t position, float scale,
                        float *cos_out, float *sin_out) {
    for (int i = 0; i < half; i++) {
        double a = (double)position * (double)inv_freq[i];
        cos_out[i] = (float)(cos(a) * (double)scale);
        sin_out[i] = (float)(sin(a) * (double)scale);
    }
}

static void rope_head(float *x, int head_dim, const float *bias, const float *norm_weight,
                      float eps, const float *cos_in, const float *sin_in, int dim,
                      bool interleaved) {
    if (bias)
        for (int i = 0; i < head_dim; i++) x[i] += bias[i];
    if (norm_weight) norm(x, NULL, norm_weight, eps, head_dim, x);
    if (!cos_in) return;
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? x + 2 * i + 1 : x + i + half;
        double c = (double)cos_in[i], s = (double)sin_in[i], u = (double)*a, v = (double)*b;
        *a = (float)(u * c - v * s);
        *b = (float)(u * s + v * c);
    }
}

static bool row_max(const float *x, int n, float *max, int *idx) {
    *max = -INFINITY;
    *idx = 0;
    for (int i = 0; i < n; i++) {
        if (isnan(x[i])) return false;
        if (x[i] > *max) {
            *max = x[i];
            *idx = i;
        }
    }
    return true;
}

static double exp_sum(const float *x, int n, float max, float inv_t, float *out) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        double e = exp(((double)x[i] - (double)max) * (double)inv_t);
        sum += e;
        if (out) out[i] = (float)e;
    }
    return sum;
}

const struct cpu_rowwise_isa cpu_rowwise_reference = {
    .norm = norm,
    .gate = gate,
    .rope_angles = rope_angles,
    .rope_head = rope_head,
    .max = row_max,
    .exp_sum = exp_sum,
};
