/* Any bytes as a config.json: no crash, and what is taken passes the check and gives finite
 * frequencies. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/err.h"
#include "model/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct model_config c;
    struct err e = {0};
    if (model_config_from_json(&c, (const char *)data, n, &e) != 0) {
        if (!e.message[0]) abort();
        return 0;
    }
    if (model_config_check(&c, &e) != 0) abort();
    float f[MODEL_MAX_HEAD_DIM / 2];
    model_rope_frequencies(&c, NULL, f);
    for (int i = 0; i < c.rope_dim / 2; i++)
        if (!isfinite(f[i])) abort();
    return 0;
}
