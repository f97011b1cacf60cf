#include "target/gain.h"

#include <math.h>

#include "base/err.h"

static int check(const struct target_gain_input *in, struct err *e) {
    if (in->n_layers < 1 || in->n_shallow < 0 || in->n_shallow > in->n_layers)
        return err_raise(e, E_RANGE, "gain: %d shallow layers of %d", in->n_shallow, in->n_layers);
    if (in->n_heads < 1 || in->head_dim < 1 || in->kv_layer_bytes < 1)
        return err_raise(e, E_RANGE, "gain: %d heads of %d, %zu bytes of K and V", in->n_heads,
                         in->head_dim, in->kv_layer_bytes);
    if (in->n_tokens < 1 || in->n_kept < 1 || in->n_kept > in->n_tokens || in->batch < 1)
        return err_raise(e, E_RANGE, "gain: %d of %d tokens kept, %d sequences", in->n_kept,
                         in->n_tokens, in->batch);
    const double numbers[] = {in->weight_bytes, in->weight_macs, in->bandwidth, in->rate};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!(numbers[i] >= 0) || isinf(numbers[i]) || (i < 2 && numbers[i] == 0))
            return err_raise(e, E_RANGE,
                             "gain: weights of %g bytes and %g products, %g bytes and %g products "
                             "a second",
                             numbers[0], numbers[1], numbers[2], numbers[3]);
    for (int i = 2; i < 4; i++) /* of so little, times and gains would be no numbers */
        if (numbers[i] > 0 && numbers[i] < 1)
            return err_raise(e, E_RANGE, "%s of %g a second: allowed are 1 and more, 0: not known",
                             i == 2 ? "bandwidth" : "product rate", numbers[i]);
    return 0;
}

/* Positions times layers that a sequence's row reads. */
static double positions(const struct target_gain_input *in, int n_deep_tokens) {
    return (double)in->n_shallow * in->n_tokens +
           (double)(in->n_layers - in->n_shallow) * n_deep_tokens;
}

static double longer(const struct target_gain_input *in, double bytes, double macs) {
    double reading = bytes / in->bandwidth;
    double computing = in->rate > 0 ? macs / in->rate : 0;
    return reading > computing ? reading : computing;
}

/* A score and a value for every query head. */
static double attention_macs(const struct target_gain_input *in, double n_positions) {
    return 2.0 * in->n_heads * in->head_dim * n_positions * in->batch;
}

static enum target_answer answer(bool yes) {
    return yes ? TARGET_YES : TARGET_NO;
}

int target_gain(struct target_gain *out, const struct target_gain_input *in, struct err *e) {
    int rc = check(in, e);
    *out = (struct target_gain){0};
    if (rc) return rc;
    double dense = positions(in, in->n_tokens), sparse = positions(in, in->n_kept);
    double one = (double)in->kv_layer_bytes * in->batch, macs = in->weight_macs * in->batch;
    double dense_macs = attention_macs(in, dense), sparse_macs = attention_macs(in, sparse);
    out->share = sparse / dense;
    out->kv_bytes = dense * one;
    out->kv_bytes_sparse = sparse * one;
    out->weight_bytes = in->weight_bytes;
    out->macs_per_byte = (macs + dense_macs) / (in->weight_bytes + out->kv_bytes);
    out->kv_share = out->kv_bytes / (in->weight_bytes + out->kv_bytes);
    out->even_tokens = in->weight_bytes / (one * in->n_layers);
    out->gain = (in->weight_bytes + out->kv_bytes) / (in->weight_bytes + out->kv_bytes_sparse);
    if (in->bandwidth > 0) {
        double weights = longer(in, in->weight_bytes, macs);
        out->dense_seconds = weights + longer(in, out->kv_bytes, dense_macs);
        out->sparse_seconds = weights + longer(in, out->kv_bytes_sparse, sparse_macs);
        out->gain = out->dense_seconds / out->sparse_seconds;
    }
    out->is_long = answer(in->n_tokens >= TARGET_LONG_CONTEXT);
    out->is_memory_bound = TARGET_UNKNOWN;
    if (in->bandwidth > 0 && in->rate > 0) {
        out->machine_macs_per_byte = in->rate / in->bandwidth;
        out->is_memory_bound = answer(out->macs_per_byte < out->machine_macs_per_byte);
    }
    out->is_kv_bound = answer(out->kv_share >= 0.5);
    out->n_no = (out->is_long == TARGET_NO) + (out->is_memory_bound == TARGET_NO) +
                (out->is_kv_bound == TARGET_NO);
    return 0;
}

const char *target_answer_name(enum target_answer a) {
    return a == TARGET_NO ? "no" : a == TARGET_YES ? "yes" : "unknown";
}
