#ifndef TANDEM_TARGET_GAIN_H
#define TANDEM_TARGET_GAIN_H

/* Does sparse reading pay? A roofline over one pass of generated rows: each operation takes the
 * longer of its bytes over the memory's bandwidth and its products over the rate of products; and
 * the source's three questions, with the numbers behind each answer. Pure arithmetic over what a
 * plan knows. */

#include <stdbool.h>
#include <stddef.h>

struct err;

enum { TARGET_LONG_CONTEXT = 16384 }; /* tokens: where the source's curve begins to save much */

struct target_gain_input {
    int n_layers, n_shallow; /* n_shallow of them read everything */
    int n_heads, head_dim;
    size_t kv_layer_bytes; /* K and V of one position in one layer */
    double weight_bytes;   /* of what a pass reads: the matrices of all layers and the head */
    double weight_macs;    /* products of a row with them */
    int n_tokens;          /* of each sequence's context */
    int n_kept;            /* of these, positions that the deep layers go on reading */
    int batch;             /* sequences in the pass, a row each */
    double bandwidth;      /* bytes a second; 0: not known */
    double rate;           /* products (MACs) a second; 0: not known */
};

enum target_answer { TARGET_NO, TARGET_YES, TARGET_UNKNOWN };

struct target_gain {
    double share;                     /* of K and V that is still read */
    double kv_bytes, kv_bytes_sparse; /* read by a pass, all its sequences */
    double weight_bytes;              /* likewise */
    double macs_per_byte;             /* of the dense pass */
    double machine_macs_per_byte;     /* where computing takes over from reading; 0: not known */
    double dense_seconds, sparse_seconds; /* of a pass; 0: bandwidth not known */
    double gain;                          /* dense over sparse: of the seconds, else of the bytes */
    double kv_share;                      /* of the dense pass's bytes */
    double even_tokens; /* context at which, with this batch, K and V are half of the bytes */
    enum target_answer is_long, is_memory_bound, is_kv_bound;
    int n_no; /* of the three */
};

/* E_RANGE names a number that makes no sense (no layers, more shallow ones than all, nothing to
 * read, more kept than there is, a negative or infinite speed). */
int target_gain(struct target_gain *out, const struct target_gain_input *in, struct err *e);

const char *target_answer_name(enum target_answer a); /* "no", "yes", "unknown" */

#endif
