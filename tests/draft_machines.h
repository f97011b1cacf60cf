#ifndef TANDEM_TESTS_DRAFT_MACHINES_H
#define TANDEM_TESTS_DRAFT_MACHINES_H

/* Machines as tables of times, on which the choice of draft lengths is judged: V(rows) for the
 * target, a step of the draft. A step is 5 ms: one row of the target on an empty context. */

struct draft_machine {
    const char *name;
    double v[9];       /* rows 1..9, in units of a step; beyond: the last difference goes on */
    double draft;      /* a draft step of one row */
    double draft_row;  /* each further row of it */
    double per_kv;     /* growth of both by position, as a share of a step */
    double row_per_kv; /* the same for each further row */
};

enum { CPU_TYPICAL, CPU_MILD, CPU_STEEP, GPU, GPU_TILE, CPU_LONG, N_MACHINES };
extern const struct draft_machine draft_machines[N_MACHINES];

/* ns of a pass; kv: positions, summed over sequences; rows over all. */
double draft_machine_target_ns(const struct draft_machine *m, int rows, int n_seqs, double kv);
double draft_machine_draft_ns(const struct draft_machine *m, int rows, double kv);

#endif
