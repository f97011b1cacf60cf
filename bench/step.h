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
    int keep;    /* blocks that deep layers read; 0: all */
};

struct step_options {
    const char *model, *points;
    bool dummy;
    int reps;
    int chunk;        /* rows of a prompt pass */
    int select_layer; /* the first deep one, where a point keeps less than all; 0: default */
};

/* class:rows:depth[:batch[:keep]], up to a comma. */
bool step_parse(const char *s, struct step_point *out);

/* runner_options.select_layer for these points: 0 where all of them read everything. */
int step_select_layer(const struct step_options *o);

/* Tokens whose K and V rows of one sequence read, a mean over the layers. */
double step_read_tokens(const struct step_point *p, int select_layer, int n_layers);

/* Whole steps on the CUDA device; returns the exit status. bench/step_device.c */
int step_device(const struct step_options *o);

#endif
