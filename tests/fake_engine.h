#ifndef TANDEM_TESTS_FAKE_ENGINE_H
#define TANDEM_TESTS_FAKE_ENGINE_H

/* engine/engine.h, model/tokenizer.h and model/chat.h without a model, for the socket tests. A
 * token is a byte (ids 0..255; 256 ends an answer, 257 opens a turn); the answer repeats the
 * prompt, one token a step, until max_tokens or byte 0x04. One thread steps all requests, as the
 * real one does. */

#include "engine/engine.h"

/* `step_us` between two steps (0: as fast as it goes), `run` tokens a step. */
struct engine *fake_engine_open(int step_us, int run);

/* For the tests' eyes: requests that are submitted and not released. */
int fake_engine_n_live(const struct engine *g);

#endif
