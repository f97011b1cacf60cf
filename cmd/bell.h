#ifndef TANDEM_CMD_BELL_H
#define TANDEM_CMD_BELL_H

/* The step thread rings, a thread of ours waits: what engine_submit's notify needs outside a
 * server. */

#include <pthread.h>
#include <stdbool.h>

struct bell {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    bool rung;
};
#define BELL_INIT                                                                                  \
    { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false }

/* For engine_submit_options.notify; arg is the bell. */
static inline void bell_ring(void *arg) {
    struct bell *b = (struct bell *)arg;
    pthread_mutex_lock(&b->mutex);
    b->rung = true;
    pthread_cond_signal(&b->cond);
    pthread_mutex_unlock(&b->mutex);
}

/* Wait for a ring since the last wait. */
static inline void bell_wait(struct bell *b) {
    pthread_mutex_lock(&b->mutex);
    while (!b->rung) pthread_cond_wait(&b->cond, &b->mutex);
    b->rung = false;
    pthread_mutex_unlock(&b->mutex);
}

#endif
