/* Which backend runs an engine. */
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/number.h"
#include "engine/engine_private.h"

int engine__open_device(struct kern **out, const struct engine_options *o, bool plan_only,
                        struct err *e) {
    struct kern_options ko = {.n_threads = o->n_threads,
                              .precision = o->precision,
                              .isa = o->isa,
                              .plan_only = plan_only};
    const char *name = o->device ? o->device : "cpu";
    if (!strcmp(name, "cpu")) return kern_cpu_open(out, &ko, e);
    if (!strcmp(name, "auto")) {
        /* What only the CPU has was asked for, or there is nothing else. */
        bool cpu = o->precision == KERN_REFERENCE || o->isa;
        struct err why = {0};
        int rc = cpu ? E_UNSUPPORTED : kern_cuda_open(out, &ko, &why);
        if (rc == 0) return 0;
        if (rc == E_UNSUPPORTED) return kern_cpu_open(out, &ko, e);
        return err_raise(e, rc, "%s (--device cpu leaves the GPU alone)", why.message);
    }
    if (!strcmp(name, "cuda")) return kern_cuda_open(out, &ko, e);
    if (!strncmp(name, "cuda:", 5) && number_in(name + 5, strlen(name + 5), 0, 1023, &ko.device))
        return kern_cuda_open(out, &ko, e);
    return err_raise(e, E_INVALID, "device '%.40s': not one of auto, cpu, cuda, cuda:N", name);
}

int engine_open_device(struct kern **out, const struct engine_options *o, struct err *e) {
    return engine__open_device(out, o, false, e);
}
