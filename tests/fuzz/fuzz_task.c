/* Any bytes as lines of a task file of `tandem eval`: each is refused with a message, or a task
 * whose strings are all there. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "cmd/eval_run.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void one_line(const char *line, size_t n) {
    struct eval_task_line t;
    struct err e = {0};
    if (eval_task_line_read(&t, line, n, &e)) {
        if (!e.message[0] || t.context || t.n_answers) abort(); /* nothing is left to be freed */
        return;
    }
    if (!t.context || !t.input || t.n_answers < 1) abort();
    if (t.n_answers > (int)(sizeof t.answer / sizeof t.answer[0])) abort();
    size_t all = strlen(t.context) + strlen(t.input) + (t.dataset ? strlen(t.dataset) : 0);
    for (int i = 0; i < t.n_answers; i++) all += strlen(t.answer[i]);
    if (all > n) abort(); /* an escape is never shorter than what it stands for */
    eval_task_line_close(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    for (const uint8_t *at = data, *end = data + n; at < end;) {
        const uint8_t *stop = memchr(at, '\n', (size_t)(end - at));
        size_t k = (size_t)((stop ? stop : end) - at);
        char *line = malloc(k ? k : 1); /* exactly so long: a read behind it is seen */
        if (!line) abort();
        memcpy(line, at, k);
        one_line(line, k);
        free(line);
        at += k + 1;
    }
    return 0;
}
