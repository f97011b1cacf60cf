#include "base/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/err.h"

enum {
    THREADS_MAX = 256,
    /* About 50 to 100 us of pause instructions: longer than any gap inside a step, shorter than the
     * gap between two requests of a person. */
    SPIN_ROUNDS = 2000,
    /* The caller waits as long for a worker that runs; one that was put off its core by other
     * programs gets there sooner when the caller gives way. */
    YIELD_ROUNDS = 300,
    LINE = 64,
    MOST_AHEAD = 192 << 10, /* bytes that a thread reads ahead: a part of its second cache */
};

/* Each on a line of its own: the caller writes `epoch`, workers write `n_done`. */
struct threads {
    _Alignas(64) atomic_uint epoch; /* job number; a change is the signal to start */
    threads_fn *fn;                 /* published by the release store of epoch */
    void *arg;
    struct {
        const uint8_t *base;
        int n;
        size_t bytes; /* of a piece */
    } ahead;
    _Alignas(64) atomic_int n_done; /* workers finished with the current job */
    _Alignas(64) atomic_int n_sleeping;
    atomic_bool stop;
    int n;
    pthread_mutex_t mutex; /* guards sleeping only */
    pthread_cond_t wake;
    pthread_t ids[THREADS_MAX];
    struct worker {
        _Alignas(64) struct threads *team;
        int idx;
        const uint8_t *base, *at, *end; /* of the pieces that it reads ahead */
    } workers[THREADS_MAX];
    /* What is left of a thread's part: begin above, end below. Of a job, a part only shrinks, so
     * that an exchange that succeeds met the part it had read. */
    struct part {
        _Alignas(64) _Atomic uint64_t left;
    } parts[THREADS_DEALS][THREADS_MAX];
};

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* "max 100000" or "200000 100000" in the cgroup v2 file; 0 where there is no limit. */
static int cgroup_cores(void) {
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!f) return 0;
    long long quota = 0, period = 0;
    int n = fscanf(f, "%lld %lld", &quota, &period);
    fclose(f);
    if (n != 2 || quota <= 0 || period <= 0) return 0;
    long long cores = (quota + period - 1) / period;
    return cores < 1 ? 1 : cores > THREADS_MAX ? THREADS_MAX : (int)cores;
}

int threads_n_usable(void) {
    cpu_set_t set;
    int n = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
    int quota = cgroup_cores();
    if (quota && quota < n) n = quota;
    return n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : n;
}

/* The job's word on what is read ahead, before the caller may change it. */
static void note_ahead(struct worker *w) {
    const struct threads *t = w->team;
    if (w->base == t->ahead.base) return;
    int begin, end;
    threads_split(t->ahead.n, 1, w->idx, t->n, &begin, &end);
    size_t bytes = (size_t)(end - begin) * t->ahead.bytes;
    w->base = t->ahead.base;
    w->at = w->base + (size_t)begin * t->ahead.bytes;
    w->end = w->at + (bytes < MOST_AHEAD ? bytes : MOST_AHEAD);
}

/* While waiting: two lines, or a pause. Returns how many pauses. */
static inline int wait_a_little(struct worker *w) {
    if (w->at >= w->end) {
        cpu_relax();
        return 1;
    }
    __builtin_prefetch(w->at, 0, 2);
    __builtin_prefetch(w->at + LINE, 0, 2);
    w->at += 2 * LINE;
    return 0;
}

/* Wait until epoch differs from `seen`: spin first, then sleep. The sleeper announces itself before
 * it re-reads epoch, and the caller reads n_sleeping after it wrote epoch (both sequentially
 * consistent), so one of the two sees the other. */
static unsigned wait_for_job(struct threads *t, struct worker *w, unsigned seen) {
    unsigned now;
    for (int i = 0; i < SPIN_ROUNDS; i += wait_a_little(w)) {
        now = atomic_load_explicit(&t->epoch, memory_order_acquire);
        if (now != seen) return now;
    }
    pthread_mutex_lock(&t->mutex);
    atomic_fetch_add(&t->n_sleeping, 1);
    while ((now = atomic_load(&t->epoch)) == seen) pthread_cond_wait(&t->wake, &t->mutex);
    atomic_fetch_sub(&t->n_sleeping, 1);
    pthread_mutex_unlock(&t->mutex);
    return now;
}

static void *worker_main(void *arg) {
    struct worker *w = arg;
    struct threads *t = w->team;
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_job(t, w, seen);
        if (atomic_load(&t->stop)) return NULL;
        t->fn(t->arg, w->idx, t->n);
        note_ahead(w);
        atomic_fetch_add_explicit(&t->n_done, 1, memory_order_release);
    }
}

static void publish(struct threads *t) {
    atomic_fetch_add(&t->epoch, 1);
    if (atomic_load(&t->n_sleeping) > 0) {
        pthread_mutex_lock(&t->mutex);
        pthread_cond_broadcast(&t->wake);
        pthread_mutex_unlock(&t->mutex);
    }
}

int threads_open(struct threads **out, int n, struct err *e) {
    if (n == 0) n = threads_n_usable();
    if (n < 1 || n > THREADS_MAX)
        return err_raise(e, E_RANGE, "threads: %d is not in 1..%d", n, THREADS_MAX);
    struct threads *t = aligned_alloc(64, align_up(sizeof *t, 64));
    if (!t) return err_raise(e, E_NOMEM, "threads: cannot allocate the team");
    *t = (struct threads){.n = n};
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    t->workers[0] = (struct worker){.team = t};
    for (int i = 1; i < n; i++) {
        t->workers[i] = (struct worker){.team = t, .idx = i};
        if (pthread_create(&t->ids[i], NULL, worker_main, &t->workers[i]) != 0) {
            t->n = i; /* close what was started */
            threads_close(t);
            return err_raise(e, E_NOMEM, "threads: cannot start thread %d of %d", i, n);
        }
    }
    *out = t;
    return 0;
}

int threads_n(const struct threads *t) {
    return t->n;
}

void threads_run(struct threads *t, threads_fn *fn, void *arg) {
    if (t->n > 1) {
        t->fn = fn;
        t->arg = arg;
        atomic_store_explicit(&t->n_done, 0, memory_order_relaxed);
        publish(t);
    }
    fn(arg, 0, t->n);
    note_ahead(&t->workers[0]);
    for (int i = 0; atomic_load_explicit(&t->n_done, memory_order_acquire) < t->n - 1; i++) {
        wait_a_little(&t->workers[0]);
        /* More threads than cores: let the worker that we wait for run. */
        if (i >= YIELD_ROUNDS) sched_yield();
    }
}

void threads_split(int n, int grain, int idx, int n_threads, int *begin, int *end) {
    int units = (n + grain - 1) / grain;
    int lo = (int)((long long)units * idx / n_threads) * grain;
    int hi = (int)((long long)units * (idx + 1) / n_threads) * grain;
    *begin = lo < n ? lo : n;
    *end = hi < n ? hi : n;
}

void threads_ahead(struct threads *t, const void *base, int n, size_t bytes) {
    t->ahead.base = base;
    t->ahead.n = n;
    t->ahead.bytes = bytes;
}

static uint64_t range(uint32_t begin, uint32_t end) {
    return (uint64_t)begin << 32 | end;
}

static uint32_t n_left(uint64_t range) {
    return (uint32_t)range - (uint32_t)(range >> 32);
}

void threads_deal(struct threads *t, int which, int n) {
    ASSERT(which >= 0 && which < THREADS_DEALS && n >= 0);
    for (int i = 0; i < t->n; i++) {
        int begin, end;
        threads_split(n, 1, i, t->n, &begin, &end);
        /* threads_run publishes them. */
        atomic_store_explicit(&t->parts[which][i].left, range((uint32_t)begin, (uint32_t)end),
                              memory_order_relaxed);
    }
}

/* Half of a part, from its front or its back; false where nothing is left. */
static bool take(struct part *p, bool front, int *begin, int *end, int *goes_on) {
    uint64_t had = atomic_load_explicit(&p->left, memory_order_relaxed), rest;
    do {
        uint32_t lo = (uint32_t)(had >> 32), hi = (uint32_t)had, half = (n_left(had) + 1) / 2;
        if (half == 0) return false;
        *begin = (int)(front ? lo : hi - half);
        *end = (int)(front ? lo + half : hi);
        *goes_on = (int)hi;
        rest = front ? range(lo + half, hi) : range(lo, hi - half);
    } while (!atomic_compare_exchange_weak_explicit(&p->left, &had, rest, memory_order_relaxed,
                                                    memory_order_relaxed));
    return true;
}

bool threads_take(struct threads *t, int which, int idx, int *begin, int *end, int *goes_on) {
    struct part *parts = t->parts[which];
    if (take(&parts[idx], true, begin, end, goes_on)) return true;
    for (;;) {
        int most = -1;
        uint32_t left = 0;
        for (int i = 0; i < t->n; i++) {
            uint32_t of = n_left(atomic_load_explicit(&parts[i].left, memory_order_relaxed));
            if (of > left) left = of, most = i;
        }
        if (most < 0) return false;
        if (take(&parts[most], false, begin, end, goes_on)) return true;
    }
}

void threads_close(struct threads *t) {
    if (!t) return;
    atomic_store(&t->stop, true);
    publish(t);
    for (int i = 1; i < t->n; i++) pthread_join(t->ids[i], NULL);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}
