#ifndef TANDEM_CMD_EVAL_TEXT_H
#define TANDEM_CMD_EVAL_TEXT_H

/* Running texts as tokens with the bytes that each is made of, and prompts cut from them with facts
 * put in. */

#include <stddef.h>
#include <stdint.h>

#include "cmd/eval_needle.h"
#include "model/model.h"

enum { EVAL_MAX_TEXTS = 64 };

struct eval_text {
    char name[64];
    struct strbuf bytes; /* what the tokens decode to */
    struct tokens ids;
    size_t *begin; /* [ids.n + 1] of each token in `bytes`, heap */
};

struct eval_texts {
    int n;
    struct eval_text at[EVAL_MAX_TEXTS];
};

/* The texts that the program carries (bench/texts): code, dialogue, fiction, news, technical. */
int eval_texts_shipped(struct eval_texts *out, const struct tokenizer *t, struct err *e);
/* Files, with commas between them; each is a text named after its file. */
int eval_texts_files(struct eval_texts *out, const char *paths, const struct tokenizer *t,
                     struct err *e);
/* Add one. */
int eval_texts_add(struct eval_texts *out, const char *name, const char *text, size_t n,
                   const struct tokenizer *t, struct err *e);
void eval_texts_close(struct eval_texts *v); /* safe on a zeroed struct */

/* Drop texts of fewer than `need` tokens. *n_dropped says how many; E_INVALID where none is left,
 * with name and tokens of the longest. */
int eval_texts_drop_short(struct eval_texts *v, int need, int *n_dropped, struct err *e);

/* A place to cut n tokens from (0..ids.n - n), by chance; n <= ids.n. */
int eval_text_place(const struct eval_text *v, int n, uint64_t seed, uint32_t index);

/* How a prompt is put into a model's own words: a chat's user turn where there is a template, else
 * plain text. */
struct eval_speech {
    const struct tokenizer *tokenizer;
    const struct chat_family *chat; /* NULL: plain */
};
/* Append the user's turn (and the opening of the answer) that holds text[0..n). */
int eval_speech_user(const struct eval_speech *s, const char *text, size_t n, struct tokens *out,
                     struct err *e);

/* Append to `out` the prompt of a needle: text from token `first` on with its facts inside, as much
 * of it as makes at most n_tokens tokens in all and few less; then the question (of LATE, that one
 * will be asked). *n_used (NULL): tokens of the text that were taken. E_INVALID where n_tokens have
 * no room for the facts. */
int eval_prompt_needle(const struct eval_speech *s, const struct eval_text *v, int first,
                       const struct eval_needle *needle, int n_tokens, struct tokens *out,
                       int *n_used, struct err *e);

#endif
