#include "kernels/cpu/context.h"

#include <string.h>

/* The tables, put together from their parts. `plain` serves a part that an instruction set has not got. */

const struct cpu_isa cpu_isa_reference = {
    .name = "reference",
    .matmul = &cpu_matmul_reference,
};

const struct cpu_isa cpu_isa_plain = {
    .name = "plain",
    .matmul = &cpu_matmul_plain,
};

static const struct cpu_isa *const linked[] = {
    &cpu_isa_plain,
};

const struct cpu_isa *cpu_isa_find(const char *name) {
    for (size_t i = 0; i < sizeof linked / sizeof *linked; i++)
        if (!strcmp(linked[i]->name, name)) return linked[i];
    return NULL;
}
