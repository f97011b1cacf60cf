#ifndef TANDEM_TESTS_WATCHED_KERN_H
#define TANDEM_TESTS_WATCHED_KERN_H

/* The CPU backend as a strict device would be: every kern_cpu_open of a test that links this with
 * `-Wl,--wrap=kern_cpu_open` gets a table that checks what kernels.h asks of callers.
 *
 * What is fetched arrives at the next sync, garbage stands there before. A pinned source that
 * changes between its upload and the sync is found out. Between record_begin and record_end nothing
 * but operations may come; what is enqueued under a key must be the same each time, to the last
 * pointer and count, and from the third time on is really replayed from the record. Rows must write
 * to pages of their sequence's list. And it can be lost: from some operation on everything fails.
 * One backend at a time; the first broken rule is kept. */

#include <stdatomic.h>
#include <stdbool.h>

#include "kernels/kernels.h"

struct watch {
    bool records;      /* set before opening: recordings are kept */
    uint32_t kv_types; /* as kern_device_info's; 0: the CPU's own */
    atomic_long n_ops, n_syncs, n_uploads, n_fetches, n_downloads;
    long n_keys, n_replays;
    long most_uploads; /* between two syncs */
    char problem[256]; /* "": none */
};
extern struct watch watch;

/* Forget what was seen and recorded. */
void watch_reset(bool records);

/* The n-th operation from now and all later ones fail with E_DEVICE (0: none does any more); late:
 * operations do nothing and only the sync tells. Any thread. */
void watch_fail(long n, bool late);

#endif
