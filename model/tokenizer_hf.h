#ifndef TANDEM_MODEL_TOKENIZER_HF_H
#define TANDEM_MODEL_TOKENIZER_HF_H

/* Private to model/tokenizer_hf*.c: the processing steps of a tokenizer.json. */

#include <jansson.h>

#include "model/tokenizer_private.h"

/* Set algorithm, pattern, normalisation, prefix and stripping from the steps "normalizer",
 * "pre_tokenizer" and "decoder" of `root`. Any step, option or pattern that is not known in that
 * place is E_UNSUPPORTED with its name: a near miss would cost quality silently. */
int tokenizer_hf_steps(struct tokenizer *t, json_t *root, struct err *e);

/* What "post_processor" adds around a text: names of a leading and a trailing special token, NULL
 * for none. Strings belong to `root`. */
int tokenizer_hf_template(json_t *root, const char **before, const char **after, struct err *e);

/* Text of a string member, NULL where it is missing or of another type. */
const char *tokenizer_hf_str(json_t *object, const char *key);

#endif
