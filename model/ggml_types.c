#include "model/ggml_types.h"

#define SUPPORTED(t, block, bytes)                                                                 \
    { #t, KERN_##t, block, bytes }
#define NAMED(t)                                                                                   \
    { #t, KERN_F32, 0, 0 }

/* Block sizes: a quantised block of 32 is an f16 scale (two where the name ends in _1), the high
 * bits of 5-bit types, and the packed values; the K types hold 256 weights with packed sub-scales.
 */
static const struct ggml_type types[] = {
    [0] = SUPPORTED(F32, 1, 4),
    [1] = SUPPORTED(F16, 1, 2),
    [2] = SUPPORTED(Q4_0, 32, 2 + 16),
    [3] = SUPPORTED(Q4_1, 32, 4 + 16),
    [4] = NAMED(Q4_2),
    [5] = NAMED(Q4_3),
    [6] = SUPPORTED(Q5_0, 32, 2 + 4 + 16),
    [7] = SUPPORTED(Q5_1, 32, 4 + 4 + 16),
    [8] = SUPPORTED(Q8_0, 32, 2 + 32),
    [9] = NAMED(Q8_1),
    [10] = NAMED(Q2_K),
    [11] = NAMED(Q3_K),
    [12] = SUPPORTED(Q4_K, 256, 4 + 12 + 128),
    [13] = SUPPORTED(Q5_K, 256, 4 + 12 + 32 + 128),
    [14] = SUPPORTED(Q6_K, 256, 128 + 64 + 16 + 2),
    [15] = NAMED(Q8_K),
    [16] = NAMED(IQ2_XXS),
    [17] = NAMED(IQ2_XS),
    [18] = NAMED(IQ3_XXS),
    [19] = NAMED(IQ1_S),
    [20] = NAMED(IQ4_NL),
    [21] = NAMED(IQ3_S),
    [22] = NAMED(IQ2_S),
    [23] = NAMED(IQ4_XS),
    [24] = NAMED(I8),
    [25] = NAMED(I16),
    [26] = NAMED(I32),
    [27] = NAMED(I64),
    [28] = NAMED(F64),
    [29] = NAMED(IQ1_M),
    [30] = SUPPORTED(BF16, 1, 2),
    [31] = NAMED(Q4_0_4_4),
    [32] = NAMED(Q4_0_4_8),
    [33] = NAMED(Q4_0_8_8),
    [34] = NAMED(TQ1_0),
    [35] = NAMED(TQ2_0),
    [36] = NAMED(IQ4_NL_4_4),
    [37] = NAMED(IQ4_NL_4_8),
    [38] = NAMED(IQ4_NL_8_8),
    [39] = NAMED(MXFP4),
    [40] = NAMED(NVFP4),
    [41] = NAMED(Q1_0),
    [42] = NAMED(Q2_0),
};

const struct ggml_type *ggml_type_find(int type) {
    int n = (int)(sizeof types / sizeof *types);
    return type >= 0 && type < n && types[type].name ? &types[type] : NULL;
}

const char *ggml_type_supported_names(void) {
    return "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";
}
