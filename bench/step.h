#ifndef TANDEM_BENCH_STEP_H
#define TANDEM_BENCH_STEP_H

/* What bench_step's two devices share: a point of V(batch, rows, context), and the options. */

#include <stdbool.h>

enum { STEP_MAX_REPS = 101, STEP_MAX_BATCH = 64 };

struct step_point {
    bool prompt; /* row class */
    int rows;    /* of a sequence */
    int depth;   /* tokens before them */
    int batch;   /* sequences */
};

struct step_options {
    const char *model, *points;
    bool dummy;
    int reps;
    int chunk; /* rows of a prompt pass */
};

/* class:rows:depth[:batch], up to a comma. */
bool step_parse(const char *s, struct step_point *out);

/* Whole steps on the CUDA device; returns the exit status. bench/step_device.c */
int step_device(const struct step_options *o);

#endif
