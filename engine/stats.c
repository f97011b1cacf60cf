/* Numbers for people and dashboards. The step thread counts in its own copy and publishes it once a
 * step. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine_private.h"

/* Seconds; the last bucket is +inf. */
static const double ttft_bounds[ENGINE_N_BUCKETS] = {.001, .005, .01, .025, .05, .1, .25, .5,
                                                     1,    2.5,  5,   10,   30,  60, 120, INFINITY};
static const double itl_bounds[ENGINE_N_BUCKETS] = {
    .0005, .001, .0025, .005, .0075, .01, .025, .05, .075, .1, .25, .5, 1, 2.5, 5, INFINITY};
static const double e2e_bounds[ENGINE_N_BUCKETS] = {.05, .1, .25, .5,  1,   2.5, 5,    10,
                                                    20,  30, 60,  120, 300, 600, 1800, INFINITY};

void engine__stats_init(struct engine_stats *s) {
    memset(s, 0, sizeof *s);
    memcpy(s->ttft.bound, ttft_bounds, sizeof ttft_bounds);
    memcpy(s->itl.bound, itl_bounds, sizeof itl_bounds);
    memcpy(s->e2e.bound, e2e_bounds, sizeof e2e_bounds);
}

void engine__stats_publish(struct engine *g) {
    g->live.n_running = g->n_running;
    g->live.is_calibrated = engine__is_calibrated(g);
    g->live.n_paused = 0;
    for (int i = 0; i < g->n_running; i++)
        g->live.n_paused += atomic_load_explicit(&g->running[i]->paused, memory_order_relaxed);
    kvpool_get_stats(g->pool, &g->live.pool);
    pthread_mutex_lock(&g->stats_lock);
    g->published = g->live;
    pthread_mutex_unlock(&g->stats_lock);
}

static size_t resident_bytes(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f) return 0;
    if (fscanf(f, "%*u %llu", &pages) != 1) pages = 0;
    fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

void engine_get_stats(struct engine *g, struct engine_stats *out) {
    pthread_mutex_lock(&g->stats_lock);
    *out = g->published;
    pthread_mutex_unlock(&g->stats_lock);
    out->n_waiting = atomic_load(&g->n_waiting);
    out->resident_bytes = resident_bytes();
    out->uptime_seconds = (double)(clock_ns() - g->opened_ns) / 1e9;
}
