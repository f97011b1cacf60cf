#include "kernels/cpu/context.h"

#include <string.h>

/* The tables, put together from their parts. avxvnni is avx2 with better products. */

const struct cpu_isa cpu_isa_reference = {
    .name = "reference",
    .matmul = &cpu_matmul_reference,
    .rowwise = &cpu_rowwise_reference,
    .attn = &cpu_attn_reference,
    .q8 = &cpu_q8_plain,
    .score = &cpu_score_reference,
    .gumbel = cpu_gumbel_plain,
};

const struct cpu_isa cpu_isa_plain = {
    .name = "plain",
    .matmul = &cpu_matmul_plain,
    .rowwise = &cpu_rowwise_plain,
    .attn = &cpu_attn_plain,
    .q8 = &cpu_q8_plain,
    .score = &cpu_score_plain,
    .gumbel = cpu_gumbel_plain,
};

#if defined(__x86_64__)
static const struct cpu_isa isa_avx2 = {
    .name = "avx2",
    .matmul = &cpu_matmul_avx2,
    .rowwise = &cpu_rowwise_avx2,
    .attn = &cpu_attn_avx2,
    .q8 = &cpu_q8_avx2,
    .score = &cpu_score_avx2,
    .gumbel = cpu_gumbel_avx2,
};
static const struct cpu_isa isa_avxvnni = {
    .name = "avxvnni",
    .matmul = &cpu_matmul_avxvnni,
    .rowwise = &cpu_rowwise_avx2,
    .attn = &cpu_attn_avx2,
    .q8 = &cpu_q8_avxvnni,
    .score = &cpu_score_avx2,
    .gumbel = cpu_gumbel_avx2,
};
static const struct cpu_isa isa_avx512 = {
    .name = "avx512",
    .matmul = &cpu_matmul_avx512,
    .rowwise = &cpu_rowwise_avx512,
    .attn = &cpu_attn_avx512,
    .q8 = &cpu_q8_avx512,
    .score = &cpu_score_avx512,
    .gumbel = cpu_gumbel_avx512,
};
#endif

static const struct cpu_isa *const linked[] = {
    &cpu_isa_plain,
#if defined(__x86_64__)
    &isa_avx2,
    &isa_avxvnni,
    &isa_avx512,
#endif
};

const struct cpu_isa *cpu_isa_find(const char *name) {
    for (size_t i = 0; i < sizeof linked / sizeof *linked; i++)
        if (!strcmp(linked[i]->name, name)) return linked[i];
    return NULL;
}
