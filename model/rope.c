/* Frequencies of rotary positions. Computed in f32 step by step as the models' training code
 * (transformers, modeling_rope_utils.py) computes them: at position 8,192 one bit of a frequency is
 * a thousandth of a radian, so the rounding is part of the model. */
#include <math.h>

#include "model/config.h"
#include "model/config_private.h"

double config__yarn_mscale(double scale, double m) {
    return scale <= 1 ? 1 : 0.1 * m * log(scale) + 1;
}

/* Llama 3: short waves stay, waves longer than the old context are stretched, between them a blend.
 */
static float llama3_frequency(const struct model_config *c, float f) {
    double old = c->rope_original_context;
    float low = (float)c->rope_low_freq_factor, high = (float)c->rope_high_freq_factor;
    float factor = (float)c->rope_factor, wave = (float)(2 * 3.14159265358979323846) / f;
    if (wave > (float)(old / c->rope_low_freq_factor)) return f / factor;
    if (wave < (float)(old / c->rope_high_freq_factor)) return f;
    float smooth = ((float)old / wave - low) / (high - low);
    return (1 - smooth) * f / factor + smooth * f;
}

/* YaRN: dimension that turns `turns` times within the original context. */
static double yarn_dimension(const struct model_config *c, double turns) {
    return c->rope_dim * log(c->rope_original_context / (turns * 2 * 3.14159265358979323846)) /
           (2 * log(c->rope_base));
}

/* Dims below `low` keep their frequency, above `high` it is divided, between them a ramp. */
static void yarn_range(const struct model_config *c, double *low, double *high) {
    *low = fmax(floor(yarn_dimension(c, c->rope_beta_fast)), 0);
    *high = fmin(ceil(yarn_dimension(c, c->rope_beta_slow)), c->rope_dim - 1);
    if (*low == *high) *high += 0.001;
}

void model_rope_frequencies(const struct model_config *c, const float *factors, float *out) {
    double low = 0, high = 1;
    if (c->rope_scaling == ROPE_YARN) yarn_range(c, &low, &high);
    for (int i = 0; i < c->rope_dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)c->rope_dim;
        float period = (float)pow((float)c->rope_base, exponent);
        float f = 1.0f / period, factor = (float)c->rope_factor;
        switch (c->rope_scaling) {
        case ROPE_NONE:
            break;
        case ROPE_LINEAR:
            f /= factor;
            break;
        case ROPE_LLAMA3:
            f = llama3_frequency(c, f);
            break;
        case ROPE_YARN: {
            float ramp = ((float)i - (float)low) / (float)(high - low);
            float keep = 1 - fminf(fmaxf(ramp, 0), 1);
            f = 1.0f / (factor * period) * (1 - keep) + f * keep;
            break;
        }
        }
        out[i] = factors ? f / factors[i] : f;
    }
}
