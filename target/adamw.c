#include "target/adamw.h"

#include <math.h>

#include "base/threads.h"

enum { RUN = 4096 };
#define BETA1 0.9
#define BETA2 0.98
#define EPSILON 1e-8
#define MOST_NORM 1.0
#define LEAST_RATE 0.05

struct job {
    const struct adamw *a;
    double *sums;
    float cut, rate, decay, inv1, inv2; /* inv: 1 / (1 - beta^step) */
};

size_t target__adamw_n_runs(size_t n) {
    return (n + RUN - 1) / RUN;
}

static void square_share(void *arg, int idx, int n_threads) {
    const struct job *j = arg;
    int begin, end;
    threads_split((int)target__adamw_n_runs(j->a->n), 1, idx, n_threads, &begin, &end);
    for (int r = begin; r < end; r++) {
        size_t i = (size_t)r * RUN, stop = i + RUN < j->a->n ? i + RUN : j->a->n;
        double sum = 0;
        for (; i < stop; i++) sum += (double)j->a->grad[i] * (double)j->a->grad[i];
        j->sums[r] = sum;
    }
}

static void update_share(void *arg, int idx, int n_threads) {
    const struct job *j = arg;
    const struct adamw *a = j->a;
    int begin, end;
    threads_split((int)target__adamw_n_runs(a->n), 1, idx, n_threads, &begin, &end);
    size_t stop = (size_t)end * RUN < a->n ? (size_t)end * RUN : a->n;
    for (size_t i = (size_t)begin * RUN; i < stop; i++) {
        float g = a->grad[i] * j->cut;
        a->m[i] = (float)BETA1 * a->m[i] + (float)(1 - BETA1) * g;
        a->v[i] = (float)BETA2 * a->v[i] + (float)(1 - BETA2) * g * g;
        float step = a->m[i] * j->inv1 / (sqrtf(a->v[i] * j->inv2) + (float)EPSILON);
        float decay = i < a->n_decay ? j->decay : 0.f;
        a->param[i] -= j->rate * (step + decay * a->param[i]);
    }
}

double target__adamw(const struct adamw *a, int step, double learning_rate, double *sums,
                     struct threads *threads) {
    struct job j = {.a = a, .sums = sums};
    threads_run(threads, square_share, &j);
    double square = 0;
    for (size_t r = 0; r < target__adamw_n_runs(a->n); r++) square += sums[r];
    double norm = sqrt(square);
    j.cut = norm > MOST_NORM ? (float)(MOST_NORM / norm) : 1.f;
    j.rate = (float)learning_rate;
    j.decay = (float)a->weight_decay;
    j.inv1 = (float)(1 / (1 - pow(BETA1, step)));
    j.inv2 = (float)(1 / (1 - pow(BETA2, step)));
    threads_run(threads, update_share, &j);
    return norm;
}

double target__learning_rate(int step, int n_steps, int n_warmup, double peak) {
    if (step <= n_warmup) return peak * step / n_warmup;
    double t = n_steps > n_warmup ? (double)(step - n_warmup) / (n_steps - n_warmup) : 1;
    return peak * (LEAST_RATE + (1 - LEAST_RATE) * .5 * (1 + cos(3.14159265358979323846 * t)));
}
