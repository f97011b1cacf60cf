#ifndef TANDEM_BASE_THREADS_H
#define TANDEM_BASE_THREADS_H

/* A team of worker threads for data-parallel loops. The caller is thread 0 and takes part; the
 * others spin for a short while after a job (a step is dozens of jobs a few microseconds apart) and
 * then sleep. One caller at a time. */

#include <stdbool.h>
#include <stddef.h>

struct err;
struct threads;

/* Cores that this process may use (affinity mask and cgroup quota), at least 1. */
int threads_n_usable(void);

/* Start a team of n threads in all (n-1 workers); n = 0 takes threads_n_usable(). E_NOMEM. */
int threads_open(struct threads **out, int n, struct err *e);

int threads_n(const struct threads *t);

/* Run fn(arg, thread_idx, n_threads) on every thread of the team and wait for all. Allocates and
 * locks nothing while the workers are awake. What a worker wrote is visible to the caller after. */
typedef void threads_fn(void *arg, int thread_idx, int n_threads);
void threads_run(struct threads *t, threads_fn *fn, void *arg);

/* Split [0, n) in contiguous parts that are multiples of `grain` (but the last); part of thread
 * `idx` of `n_threads`. */
void threads_split(int n, int grain, int idx, int n_threads, int *begin, int *end);

/* Work that threads of uneven speed share: two ranges at a time, `which` 0 and 1. threads_deal,
 * called before threads_run, gives every thread its part of [0, n), as threads_split does;
 * threads_take gives thread `idx` its next piece [*begin, *end), until it returns false: half of
 * what is left of its own part, from the front, then halves of what others have left, from the
 * back. Every number is in one piece exactly. *goes_on: the end of what this thread is likely to do
 * behind the piece (its own part's end), for reading ahead. */
enum { THREADS_DEALS = 2 };
void threads_deal(struct threads *t, int which, int n);
bool threads_take(struct threads *t, int which, int idx, int *begin, int *end, int *goes_on);

/* Called before threads_run: from the end of that job on, threads that wait for others or for the
 * next job fetch towards their second caches what threads_split would give them of n pieces of
 * `bytes` at `base`, from the beginning, as far as such a cache holds it. The same base again
 * changes nothing. */
void threads_ahead(struct threads *t, const void *base, int n, size_t bytes);

void threads_close(struct threads *t);

#endif
