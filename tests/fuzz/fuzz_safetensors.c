/* Any bytes as a safetensors file: no crash; what opens lies inside the bytes and can be found
 * again. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/err.h"
#include "model/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct safetensors *s;
    struct err e = {0};
    if (safetensors_open_bytes(&s, data, n, &e) != 0) {
        if (!e.message[0]) abort();
        return 0;
    }
    size_t total = 0;
    for (size_t i = 0; i < safetensors_n_tensors(s); i++) {
        const struct safetensors_tensor *t = safetensors_tensor_at(s, i);
        enum kern_dtype type;
        safetensors_dtype(t, &type, NULL);
        if (t->data < data || t->bytes > n || t->data + t->bytes > data + n) abort();
        if (safetensors_find(s, t->name) != t) abort();
        total += t->bytes;
    }
    if (total > n) abort(); /* they do not overlap */
    safetensors_close(s);
    return 0;
}
