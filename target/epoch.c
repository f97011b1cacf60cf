/* When an epoch inside an answer ends. The rule reads committed tokens alone, so that it falls at
 * the same token whatever rounds they came in. */
#include "target/target.h"

static double mean(const struct target_epoch *e) {
    double sum = 0;
    for (int i = 0; i < TARGET_SURPRISE_TOKENS; i++) sum += (double)e->nll[i];
    return sum / TARGET_SURPRISE_TOKENS;
}

/* The newest tokens against the epoch's usual level: that of its beginning, or of all its tokens
 * where that is less, so that an epoch that began in the middle of a surprise measures up again
 * once the text has calmed down. Wider than usual, then back: an epoch that a surprise began ends
 * by itself. */
static bool is_surprised(struct target_epoch *e, const struct target_settings *s, float nll) {
    e->nll[(e->n_tokens - 1) % TARGET_SURPRISE_TOKENS] = nll;
    e->sum += (double)nll;
    if (e->n_tokens == TARGET_SURPRISE_TOKENS) e->start = mean(e);
    if (e->wide) return e->n_tokens >= TARGET_WIDE_TOKENS;
    double level = e->sum / e->n_tokens;
    if (e->start < level) level = e->start;
    return e->n_tokens >= TARGET_SURPRISE_LEAST && mean(e) >= level + s->surprise;
}

bool target_epoch_token(struct target_epoch *e, const struct target_settings *s, float nll,
                        bool *wide) {
    bool ends;
    *wide = false;
    e->n_tokens++;
    if (s->reselect == TARGET_RESELECT_OFF) return false;
    if (s->reselect != TARGET_RESELECT_SURPRISE) return e->n_tokens >= s->reselect;
    ends = is_surprised(e, s, nll);
    *wide = ends && !e->wide;
    return ends;
}

int target_epoch_left(const struct target_epoch *e, const struct target_settings *s) {
    int n = INT32_MAX;
    if (s->reselect > 0) n = s->reselect - e->n_tokens;
    else if (s->reselect == TARGET_RESELECT_SURPRISE && e->wide)
        n = TARGET_WIDE_TOKENS - e->n_tokens;
    return n > 1 ? n : 1;
}
