#ifndef TANDEM_CMD_BENCH_PROMPTS_H
#define TANDEM_CMD_BENCH_PROMPTS_H

/* Long prompts for benches: a stretch of text and a question about it, of so many tokens. The text
 * is one of those that the program carries (bench/texts), all of them, or a file's. */

#include <stdbool.h>
#include <stddef.h>

#include "base/strbuf.h"
#include "model/model.h"

struct engine;
struct err;

struct bench_question {
    const char *name;
    const char *text; /* stands behind the stretch of text */
};
extern const struct bench_question bench_questions[]; /* ends in a zero entry */
bool bench_question_exists(const char *name);

/* The text: the shipped one of that name, all shipped ones one after another (NULL), else the file
 * of that path. E_INVALID for a file that holds none, or the file's errors. t: of any model. */
int bench_text(struct strbuf *out, const char *name, const struct tokenizer *t, struct err *e);

/* A prompt in the model's chat template (raw where it has none) of at most n_tokens tokens, and
 * short of that by a word or two: text from about byte `start` on, over its end and on from its
 * beginning where it is too short (*repeats is set then, else left alone), then the question.
 * E_RANGE where template and question alone are longer. */
int bench_prompt(struct tokens *out, const struct engine *g, const struct strbuf *text,
                 size_t start, const struct bench_question *q, int n_tokens, bool *repeats,
                 struct err *e);

#endif
