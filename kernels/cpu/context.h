#ifndef TANDEM_KERNELS_CPU_CONTEXT_H
#define TANDEM_KERNELS_CPU_CONTEXT_H

/* What context.c, isa.c and ops.c show each other. */

#include "kernels/cpu/cpu.h"

/* A thread's scratch: holds one f32 row (so it bounds cols) or what a matmul shares keep. Touched
 * only where used, so the rest costs no memory. */
enum { CPU_SCRATCH_BYTES = 1 << 20, CPU_MAX_COLS = CPU_SCRATCH_BYTES / 8 };

extern const struct kern_ops cpu_ops;

/* A linked table ("avx2", "avx512"), or NULL. */
const struct cpu_isa *cpu_isa_find(const char *name);

void cpu_close(struct kern *k);
void cpu_info(const struct kern *k, struct kern_device_info *out);
int cpu_reserve(struct kern *k, size_t bytes, void **out, struct err *e);
void cpu_unreserve(struct kern *k, void *block);

#endif
