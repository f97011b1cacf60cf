#include "tests/draft_machines.h"

#define STEP_NS 5e6

const struct draft_machine draft_machines[N_MACHINES] = {
    [CPU_TYPICAL] = {"cpu", {1, 1.3, 1.8, 2.3, 2.75, 3.2, 3.65, 4.1, 4.6}, 0.18, 0.045, 0, 0},
    [CPU_MILD] = {"cpu mild", {1, 1.25, 1.6, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0}, 0.15, 0.04, 0, 0},
    [CPU_STEEP] = {"cpu steep", {1, 1.4, 2.0, 2.55, 3.1, 3.75, 4.4, 5.0, 5.6}, 0.2, 0.05, 0, 0},
    [GPU] = {"gpu", {1, 1.02, 1.03, 1.05, 1.06, 1.07, 1.09, 1.1, 1.12}, 0.2, 0.001, 0, 0},
    [GPU_TILE] =
        {"gpu tiles of 4", {1, 1.01, 1.02, 1.03, 1.5, 1.51, 1.52, 1.53, 2.0}, 0.12, 0.001, 0, 0},
    [CPU_LONG] = {"cpu long",
                  {1, 1.3, 1.8, 2.3, 2.75, 3.2, 3.65, 4.1, 4.6},
                  0.18,
                  0.045,
                  1.0 / 2000,
                  1.0 / 2500},
};

double draft_machine_target_ns(const struct draft_machine *m, int rows, int n_seqs, double kv) {
    double v = rows <= 9 ? m->v[rows - 1] : m->v[8] + (rows - 9) * (m->v[8] - m->v[7]);
    double extra = (double)(rows - n_seqs) / n_seqs;
    return STEP_NS * (v + kv * (m->per_kv + extra * m->row_per_kv));
}

double draft_machine_draft_ns(const struct draft_machine *m, int rows, double kv) {
    return STEP_NS * (m->draft + m->draft_row * (rows - 1) + 0.1 * kv * m->per_kv);
}
