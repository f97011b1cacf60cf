#include "kernels/cpu/context.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/err.h"

enum { PAGE_2M = 2 << 20 };

/* ---- Which instruction set ----------------------------------------------------------------- */

#if defined(__x86_64__)
struct cpuid {
    uint32_t eax, ebx, ecx, edx;
};
static struct cpuid cpuid(uint32_t leaf, uint32_t subleaf) {
    struct cpuid r;
    __asm__("cpuid" : "=a"(r.eax), "=b"(r.ebx), "=c"(r.ecx), "=d"(r.edx) : "a"(leaf), "c"(subleaf));
    return r;
}
#endif

/* AMX state is off until a process asks for it (Linux 5.16): arch_prctl(ARCH_REQ_XCOMP_PERM,
 * XFEATURE_XTILEDATA). Threads started later inherit the permission. */
static bool amx_permitted(void) {
#if defined(__x86_64__) && defined(SYS_arch_prctl)
    if (cpuid(0, 0).eax < 7 || cpuid(7, 0).eax < 1) return false;
    uint32_t edx = cpuid(7, 0).edx;
    bool tile = edx >> 24 & 1, bf16 = edx >> 22 & 1;
    bool rounds = cpuid(7, 1).eax >> 5 & 1; /* AVX512_BF16, which fills the tiles */
    return tile && bf16 && rounds && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

static bool has_avx2(void) {
#if defined(__x86_64__)
    bool f16c = cpuid(1, 0).ecx >> 29 & 1;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
#else
    return false;
#endif
}

static bool has_avxvnni(void) {
#if defined(__x86_64__)
    return has_avx2() && cpuid(0, 0).eax >= 7 && cpuid(7, 0).eax >= 1 && (cpuid(7, 1).eax >> 4 & 1);
#else
    return false;
#endif
}

static bool has_avx512(void) {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

static bool has_amx(void) {
    return has_avx512() && amx_permitted();
}
static bool has_plain(void) {
    return true;
}

/* Best first; `amx` is avx512 with matrix tiles. */
static const struct choice {
    const char *name, *table, *needs;
    bool (*has)(void);
} choices[] = {
    {"amx", "avx512", "AVX-512 VNNI and AMX bf16", has_amx},
    {"avx512", "avx512", "AVX-512 VNNI", has_avx512},
    {"avxvnni", "avxvnni", "AVX2 VNNI", has_avxvnni},
    {"avx2", "avx2", "AVX2", has_avx2},
    {"plain", "plain", "plain C", has_plain},
};
enum { N_CHOICES = sizeof choices / sizeof *choices };

/* Set isa and amx from what was asked, what is linked and what the machine has. */
static int choose_isa(struct cpu_ctx *c, const char *asked, struct err *e) {
    bool automatic = !asked || !strcmp(asked, "auto"), known = automatic;
    if (c->precision == KERN_REFERENCE) {
        c->isa = &cpu_isa_reference;
        return 0;
    }
    for (int i = 0; i < N_CHOICES; i++) {
        const struct choice *o = &choices[i];
        if (!automatic && strcmp(asked, o->name)) continue;
        known = true;
        c->isa = cpu_isa_find(o->table);
        if (c->isa && o->has()) {
            c->amx = i == 0;
            return 0;
        }
        if (!automatic)
            return err_raise(e, E_UNSUPPORTED, "kernels %s: this machine or build lacks %s", asked,
                             o->needs);
    }
    ASSERT(!known); /* plain is always there */
    return err_raise(e, E_INVALID,
                     "kernels '%s': not one of auto, amx, avx512, avxvnni, avx2, plain", asked);
}

static const char *isa_title(const struct cpu_ctx *c) {
    if (c->precision == KERN_REFERENCE) return "reference f32";
    if (c->amx) return "AVX-512 VNNI, AMX bf16";
    for (int i = 1; i < N_CHOICES; i++)
        if (!strcmp(c->isa->name, choices[i].table)) return choices[i].needs;
    return c->isa->name;
}

/* ---- Memory -------------------------------------------------------------------------------- */

/* Value in bytes of "Key:   123 kB" in /proc/meminfo; 0 where it is missing. */
static size_t meminfo(const char *key) {
    FILE *f = fopen("/proc/meminfo", "re");
    if (!f) return 0;
    char line[256];
    unsigned long long kib = 0;
    size_t n = strlen(key);
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && line[n] == ':' && sscanf(line + n + 1, "%llu", &kib) == 1)
            break;
    fclose(f);
    return (size_t)kib << 10;
}

/* One number in a file; SIZE_MAX for "max" or where there is none. */
static size_t read_limit(const char *path) {
    FILE *f = fopen(path, "re");
    if (!f) return SIZE_MAX;
    unsigned long long v;
    size_t out = fscanf(f, "%llu", &v) == 1 ? (size_t)v : SIZE_MAX;
    fclose(f);
    return out;
}

/* The key's number in cgroup's memory.stat. */
static size_t read_stat(const char *path, const char *key) {
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    char name[64];
    unsigned long long v, found = 0;
    while (fscanf(f, "%63s %llu", name, &v) == 2)
        if (!strcmp(name, key)) found = v;
    fclose(f);
    return (size_t)found;
}

/* Folder of this process's cgroup v2 and all its parents may limit memory; each is looked at. Page
 * cache that the kernel would give back counts as free. */
static void cgroup_memory(size_t *total, size_t *available) {
    char path[PATH_MAX] = "", file[PATH_MAX + 64];
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (f) {
        char line[PATH_MAX];
        while (fgets(line, sizeof line, f))
            if (!strncmp(line, "0::/", 4)) {
                line[strcspn(line, "\n")] = 0;
                snprintf(path, sizeof path, "%s", line + 3);
            }
        fclose(f);
    }
    for (;;) {
        if (!strcmp(path, "/")) path[0] = 0;
        snprintf(file, sizeof file, "/sys/fs/cgroup%s/memory.max", path);
        size_t max = read_limit(file);
        if (max != SIZE_MAX) {
            snprintf(file, sizeof file, "/sys/fs/cgroup%s/memory.current", path);
            size_t used = read_limit(file);
            snprintf(file, sizeof file, "/sys/fs/cgroup%s/memory.stat", path);
            size_t cache = read_stat(file, "inactive_file") + read_stat(file, "active_file");
            used = used == SIZE_MAX ? 0 : used > cache ? used - cache : 0;
            *total = min_size(*total, max);
            *available = min_size(*available, max > used ? max - used : 0);
        }
        char *slash = strrchr(path, '/');
        if (!slash) break;
        *slash = 0;
    }
    /* The same in version 1. */
    size_t max = read_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes");
    size_t used = read_limit("/sys/fs/cgroup/memory/memory.usage_in_bytes");
    if (max != SIZE_MAX && used != SIZE_MAX && max < *total) {
        size_t cache = read_stat("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file") +
                       read_stat("/sys/fs/cgroup/memory/memory.stat", "total_active_file");
        used = used > cache ? used - cache : 0;
        *total = max;
        *available = min_size(*available, max > used ? max - used : 0);
    }
}

void cpu_info(const struct kern *k, struct kern_device_info *out) {
    const struct cpu_ctx *c = cpu_ctx(k);
    memset(out, 0, sizeof *out);
    int n = threads_n(c->threads);
    snprintf(out->name, sizeof out->name, "CPU %s; %d thread%s", isa_title(c), n,
             n == 1 ? "" : "s");
    out->is_host = true;
    out->quarters = true;
    out->kv_types = 1u << KERN_F32 | 1u << KERN_F16 | 1u << KERN_BF16 | 1u << KERN_Q8_0;
    out->memory_bytes = meminfo("MemTotal");
    out->free_bytes = meminfo("MemAvailable");
    cgroup_memory(&out->memory_bytes, &out->free_bytes);
}

/* The size stands in front of the block, in a page of its own, so that blocks need no list. */
int cpu_reserve(struct kern *k, size_t bytes, void **out, struct err *e) {
    (void)k;
    *out = NULL;
    size_t total;
    if (bytes == 0) return err_raise(e, E_INVALID, "reserve: no bytes asked for");
    if (!checked_add(bytes, 2 * (size_t)PAGE_2M, &total))
        return err_raise(e, E_NOMEM, "reserve: %zu bytes are more than an address holds", bytes);
    uint8_t *p = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return err_raise(e, E_NOMEM, "reserve: the system refuses %zu bytes", bytes);
    /* Start on a 2 MiB border: weights are read end to end, huge pages save most of the TLB misses.
     */
    uint8_t *block = (uint8_t *)align_up((uintptr_t)p + 64, PAGE_2M);
    madvise(block, bytes, MADV_HUGEPAGE);
    ((size_t *)(void *)block)[-1] = total;
    ((uint8_t **)(void *)block)[-2] = p;
    *out = block;
    return 0;
}

void cpu_unreserve(struct kern *k, void *block) {
    (void)k;
    if (block) munmap(((uint8_t **)block)[-2], ((size_t *)block)[-1]);
}

/* ---- Life ---------------------------------------------------------------------------------- */

static void free_ctx(struct cpu_ctx *c) {
    threads_close(c->threads);
    for (int i = 0; i < CPU_MAX_THREADS; i++) free(c->matmul_scratch[i]);
    free(c);
}

void cpu_close(struct kern *k) {
    if (k) free_ctx((struct cpu_ctx *)k);
}

int kern_cpu_open(struct kern **out, const struct kern_options *o, struct err *e) {
    *out = NULL;
    struct cpu_ctx *c = calloc(1, sizeof *c);
    if (!c) return err_raise(e, E_NOMEM, "kernels: cannot allocate the context");
    c->kern.ops = &cpu_ops;
    c->precision = o->precision;
    c->matmul_scratch_bytes = CPU_SCRATCH_BYTES;
    int rc = choose_isa(c, o->isa, e); /* before the threads start: they inherit AMX's permission */
    if (!rc) rc = threads_open(&c->threads, o->n_threads, e);
    for (int i = 0; !rc && i < threads_n(c->threads); i++) {
        c->matmul_scratch[i] = aligned_alloc(64, c->matmul_scratch_bytes);
        if (!c->matmul_scratch[i]) rc = err_raise(e, E_NOMEM, "kernels: cannot allocate scratch");
    }
    if (rc) {
        free_ctx(c);
        return rc;
    }
    *out = &c->kern;
    return 0;
}
