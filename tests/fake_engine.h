#ifndef TANDEM_TESTS_FAKE_ENGINE_H
#define TANDEM_TESTS_FAKE_ENGINE_H

/* engine/engine.h, model/tokenizer.h and model/chat.h without a model, for the socket tests. A
 * token is a byte (ids 0..255; 256 ends an answer, 257 opens a turn); the answer repeats the
 * prompt, one token a step, until max_tokens or byte 0x04. One thread steps all requests, as the
 * real one does.
 *
 * Speculation: a step of more than one token is a round whose last token is the target's own and
 * whose others are accepted draft tokens; one more draft token was refused unless the step ended
 * the answer. By lookup where its first token was not a letter. `draft_tokens` cuts a step to so
 * many and one; 0: a step is one token. A prompt that begins with byte 0x05 has no draft for want
 * of memory. One that begins with byte 0x06 loses the device after some tokens: it and all others
 * fail. A request of a conversation (and salt) finds the prompt and answer of its last one
 * cached.
 *
 * Sparse reading keeps what target/ says of a prompt whose every token is a block; its bytes are
 * made up. */

#include "engine/engine.h"

/* `step_us` between two steps (0: as fast as it goes), `run` tokens a step. */
struct engine *fake_engine_open(int step_us, int run);

/* For the tests' eyes: requests that are submitted and not released. */
int fake_engine_n_live(const struct engine *g);

#endif
