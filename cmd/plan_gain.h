#ifndef TANDEM_CMD_PLAN_GAIN_H
#define TANDEM_CMD_PLAN_GAIN_H

/* What `tandem plan` says of sparse reading: share of K and V that stays, what a pass would gain,
 * the three questions; and the measuring of this machine for it. */

#include "base/strbuf.h"
#include "engine/engine.h"
#include "target/gain.h"

struct plan_gain_options {
    double bandwidth, rate; /* a second; 0: not given */
    bool measure;           /* time this machine where they are not given */
    int batch;              /* sequences in a pass */
};

/* What it came to; a value. */
struct plan_gain {
    struct target_gain_input in;
    struct target_gain out;
    struct target_settings settings; /* resolved */
    bool asked;                      /* the settings were the user's, not ours */
    int n_blocks, n_kept;            /* of the context, reserve included */
    int floor_kept;                  /* kept with the default number of blocks, where the curve
                                        leaves nothing out; 0: not that case */
    struct target_gain floor;        /* then */
    bool measured;
};

/* For the plan that `o` gave. Reads the model's headers again; E_* of that, or of the device. */
int plan_gain(struct plan_gain *g, const struct engine_options *o, const struct plan *p,
              const struct plan_gain_options *how, struct err *e);

void plan_gain_text(const struct plan_gain *g, struct strbuf *out);
void plan_gain_json(const struct plan_gain *g, struct strbuf *out); /* one object */

/* Bytes and products a second of one product of a matrix of type t on `k`, as many bytes as no
 * cache holds: one row tells the first, rows enough to be bound by computing the second. About half
 * a second. E_NOMEM, E_UNSUPPORTED where the backend has no product of that type. */
int plan_measure(struct kern *k, enum kern_dtype t, double *bytes_per_s, double *macs_per_s,
                 struct err *e);

#endif
