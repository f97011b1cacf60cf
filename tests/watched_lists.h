#ifndef TANDEM_TESTS_WATCHED_LISTS_H
#define TANDEM_TESTS_WATCHED_LISTS_H

/* What tests/watched_kern.c checks of the rows and lists that attention gets. */

#include "kernels/kernels.h"

/* The first broken rule, into watch.problem; printf's format. */
void watch_problem(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* An attention that is about to run: rows write to pages of their lists; lists that are said to be
 * repeated are those of the call before, their contents too. */
void watch_lists(const struct kern_batch *b, const struct kern_lists *l, int n_kv_heads,
                 const void *scratch);
void watch_lists_reset(void);

#endif
