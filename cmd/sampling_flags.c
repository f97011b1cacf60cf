#include "cmd/sampling_flags.h"

#include <string.h>

#include "base/err.h"
#include "base/number.h"
#include "cmd/speculation.h"

void sampling_flags_init(struct sampling_flags *s) {
    memset(s, 0, sizeof *s);
    verify_params_default(&s->params);
    s->params.temperature = 0.8; /* what users of llama.cpp are used to */
}

int sampling_flags_finish(struct sampling_flags *s, const struct options *o) {
    if (s->seed) {
        if (!number_u64(s->seed, strlen(s->seed), 10, &s->params.seed))
            return options_error(o, "--seed: '%s' is not an integer in 0..2^64-1", s->seed);
        s->params.has_seed = true;
    }
    if (s->stop) {
        size_t n = strlen(s->stop);
        if (n < 1 || n > VERIFY_MAX_STOP_BYTES)
            return options_error(o, "--stop: %zu bytes, not in 1..%d", n, VERIFY_MAX_STOP_BYTES);
        s->params.n_stops = 1;
        s->params.stops[0].n = (int)n;
        memcpy(s->params.stops[0].text, s->stop, n);
    }
    int rc = speculation_parse_draft_tokens(o, s->draft_tokens, &s->params.draft_tokens);
    if (rc < 0) rc = speculation_parse_coupling(o, s->coupling, &s->params.coupling);
    if (rc >= 0) return rc;
    struct err e = {0};
    if (verify_params_check(&s->params, &e)) return options_error(o, "%s", e.message);
    return -1;
}
