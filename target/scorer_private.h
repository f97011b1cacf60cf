#ifndef TANDEM_TARGET_SCORER_PRIVATE_H
#define TANDEM_TARGET_SCORER_PRIVATE_H

/* The tensors of a scorer's file, in the order of the file and of the backend's memory. */

#include "target/scorer.h"

enum { SCORER_N_TENSORS = 8 };

struct scorer_tensor {
    const char *name;
    size_t dims[2];
    int n_dims; /* 0: this scorer has none */
    size_t n;   /* floats */
    float **at; /* in the file */
};

void scorer__tensors(struct target_scorer_file *f, struct scorer_tensor out[SCORER_N_TENSORS]);
/* Ranges of all fields above the weights; E_RANGE with name, value and range. */
int scorer__check_shape(const struct target_scorer_file *f, struct err *e);

#endif
